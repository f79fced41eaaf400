"""PyTorch trainers with the same numbers on every backend and batch split.

The names in `__all__` are public. They load on first use, so that `import omnitrain` is fast.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from omnitrain.core import errors

if TYPE_CHECKING:
    from omnitrain.algorithms.cutmix import CutMix
    from omnitrain.algorithms.ema import EMA
    from omnitrain.algorithms.gradient_clipping import GradientClipping
    from omnitrain.algorithms.gradual_unfreezing import GradualUnfreezing
    from omnitrain.algorithms.label_smoothing import LabelSmoothing
    from omnitrain.algorithms.layer_freezing import LayerFreezing
    from omnitrain.algorithms.magnitude_pruning import MagnitudePruning
    from omnitrain.algorithms.mixup import MixUp
    from omnitrain.algorithms.progressive_resizing import ProgressiveResizing
    from omnitrain.algorithms.sam import SAM
    from omnitrain.algorithms.seq_length_warmup import SeqLengthWarmup
    from omnitrain.algorithms.stochastic_depth import StochasticDepth
    from omnitrain.algorithms.straight_through import StraightThrough
    from omnitrain.algorithms.swa import SWA
    from omnitrain.callbacks.distributions import Distributions
    from omnitrain.callbacks.early_stopping import EarlyStopping
    from omnitrain.callbacks.garbage_collection import GarbageCollection
    from omnitrain.callbacks.memory_monitor import MemoryMonitor
    from omnitrain.callbacks.periodic import Periodic
    from omnitrain.callbacks.preview import Preview
    from omnitrain.callbacks.profiler import Profiler
    from omnitrain.callbacks.throughput import Throughput
    from omnitrain.callbacks.train_hook import HookCallback, TrainHook
    from omnitrain.cli.compare import RunComparison, compare_runs
    from omnitrain.config.configuration import Config
    from omnitrain.config.instantiation import instantiate
    from omnitrain.core.duration import Duration
    from omnitrain.core.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DistributedError,
        MissingExtraError,
        NonFiniteError,
        ObjectiveError,
        OmnitrainError,
    )
    from omnitrain.core.events import Algorithm, Callback, Event, Histogram
    from omnitrain.core.history import MetricsDict
    from omnitrain.core.metric_format import MetricDescriptor, describe_metric
    from omnitrain.core.objective import Objective
    from omnitrain.core.progress import Progress
    from omnitrain.data.collation import Collator
    from omnitrain.data.grouping import GroupByLength
    from omnitrain.data.packing import PackedDataset
    from omnitrain.data.sets import EvalSet
    from omnitrain.data.shards import ShardedStream
    from omnitrain.hf.arguments import HFTrainingArguments
    from omnitrain.hf.trainer import HFTrainer
    from omnitrain.loggers.progress_bar import ProgressBar
    from omnitrain.loggers.rows import CsvLogger, JsonlLogger
    from omnitrain.loggers.tracking import TensorBoardLogger, Tracking, WandbLogger
    from omnitrain.model.losses import CrossEntropy, WeightedLosses, chunked_cross_entropy
    from omnitrain.model.multitask import MultiTask, MultiTaskUnit
    from omnitrain.model.units import EvalUnit, ModelUnit, StepOutput, TrainUnit
    from omnitrain.optim.param_groups import layerwise_decay
    from omnitrain.optim.schedule_preview import SchedulePreview, preview_schedule
    from omnitrain.optim.schedules import (
        ConstantScheduler,
        CosineAnnealingScheduler,
        CosineWithRestartsScheduler,
        ExponentialScheduler,
        InverseSqrtScheduler,
        LinearScheduler,
        MultiStepScheduler,
        PolynomialScheduler,
        ProductScheduler,
        Schedule,
        StepScheduler,
        WSDScheduler,
    )
    from omnitrain.sweeps.search import SearchResult, SearchTrial, search
    from omnitrain.trainer.accelerated import AccelerateTrainer
    from omnitrain.trainer.base import BaseTrainer
    from omnitrain.trainer.compilation import Compiled
    from omnitrain.trainer.evaluation import Predictions
    from omnitrain.trainer.native import Trainer

__version__ = "0.1.0"

sys.modules["omnitrain.errors"] = errors  # scripts may import errors from there, too

_MODULES = {
    "AccelerateTrainer": "trainer.accelerated",
    "Algorithm": "core.events",
    "BaseTrainer": "trainer.base",
    "Callback": "core.events",
    "CheckpointError": "core.errors",
    "Collator": "data.collation",
    "Compiled": "trainer.compilation",
    "Config": "config.configuration",
    "ConfigError": "core.errors",
    "ConstantScheduler": "optim.schedules",
    "CosineAnnealingScheduler": "optim.schedules",
    "CosineWithRestartsScheduler": "optim.schedules",
    "CrossEntropy": "model.losses",
    "CsvLogger": "loggers.rows",
    "CutMix": "algorithms.cutmix",
    "DataError": "core.errors",
    "DistributedError": "core.errors",
    "Distributions": "callbacks.distributions",
    "Duration": "core.duration",
    "EMA": "algorithms.ema",
    "EarlyStopping": "callbacks.early_stopping",
    "EvalSet": "data.sets",
    "EvalUnit": "model.units",
    "Event": "core.events",
    "ExponentialScheduler": "optim.schedules",
    "GarbageCollection": "callbacks.garbage_collection",
    "GradientClipping": "algorithms.gradient_clipping",
    "GradualUnfreezing": "algorithms.gradual_unfreezing",
    "GroupByLength": "data.grouping",
    "Histogram": "core.events",
    "HookCallback": "callbacks.train_hook",
    "HFTrainer": "hf.trainer",
    "HFTrainingArguments": "hf.arguments",
    "InverseSqrtScheduler": "optim.schedules",
    "JsonlLogger": "loggers.rows",
    "LabelSmoothing": "algorithms.label_smoothing",
    "LinearScheduler": "optim.schedules",
    "LayerFreezing": "algorithms.layer_freezing",
    "MagnitudePruning": "algorithms.magnitude_pruning",
    "MemoryMonitor": "callbacks.memory_monitor",
    "MetricDescriptor": "core.metric_format",
    "MetricsDict": "core.history",
    "MissingExtraError": "core.errors",
    "MixUp": "algorithms.mixup",
    "ModelUnit": "model.units",
    "MultiStepScheduler": "optim.schedules",
    "MultiTask": "model.multitask",
    "MultiTaskUnit": "model.multitask",
    "NonFiniteError": "core.errors",
    "Objective": "core.objective",
    "ObjectiveError": "core.errors",
    "OmnitrainError": "core.errors",
    "PackedDataset": "data.packing",
    "Periodic": "callbacks.periodic",
    "PolynomialScheduler": "optim.schedules",
    "Predictions": "trainer.evaluation",
    "Preview": "callbacks.preview",
    "ProductScheduler": "optim.schedules",
    "Profiler": "callbacks.profiler",
    "Progress": "core.progress",
    "ProgressBar": "loggers.progress_bar",
    "RunComparison": "cli.compare",
    "Schedule": "optim.schedules",
    "SchedulePreview": "optim.schedule_preview",
    "SearchResult": "sweeps.search",
    "SearchTrial": "sweeps.search",
    "ProgressiveResizing": "algorithms.progressive_resizing",
    "SAM": "algorithms.sam",
    "SWA": "algorithms.swa",
    "SeqLengthWarmup": "algorithms.seq_length_warmup",
    "ShardedStream": "data.shards",
    "StepOutput": "model.units",
    "StepScheduler": "optim.schedules",
    "StochasticDepth": "algorithms.stochastic_depth",
    "StraightThrough": "algorithms.straight_through",
    "TensorBoardLogger": "loggers.tracking",
    "Tracking": "loggers.tracking",
    "Throughput": "callbacks.throughput",
    "TrainHook": "callbacks.train_hook",
    "TrainUnit": "model.units",
    "Trainer": "trainer.native",
    "WSDScheduler": "optim.schedules",
    "WandbLogger": "loggers.tracking",
    "describe_metric": "core.metric_format",
    "preview_schedule": "optim.schedule_preview",
    "instantiate": "config.instantiation",
    "layerwise_decay": "optim.param_groups",
    "WeightedLosses": "model.losses",
    "chunked_cross_entropy": "model.losses",
    "compare_runs": "cli.compare",
    "search": "sweeps.search",
}

# Packages that a name may need, and the extra that installs them.
_OPTIONAL = {"transformers": "hf", "accelerate": ""}

__all__ = [  # noqa: RUF022  (which would put EMA first)
    "AccelerateTrainer",
    "Algorithm",
    "BaseTrainer",
    "Callback",
    "CheckpointError",
    "Collator",
    "Compiled",
    "Config",
    "ConfigError",
    "ConstantScheduler",
    "CosineAnnealingScheduler",
    "CosineWithRestartsScheduler",
    "CrossEntropy",
    "CsvLogger",
    "CutMix",
    "DataError",
    "DistributedError",
    "Distributions",
    "Duration",
    "EMA",
    "EarlyStopping",
    "EvalSet",
    "EvalUnit",
    "Event",
    "ExponentialScheduler",
    "GarbageCollection",
    "GradientClipping",
    "GradualUnfreezing",
    "GroupByLength",
    "Histogram",
    "HookCallback",
    "HFTrainer",
    "HFTrainingArguments",
    "InverseSqrtScheduler",
    "JsonlLogger",
    "LabelSmoothing",
    "LinearScheduler",
    "LayerFreezing",
    "MagnitudePruning",
    "MemoryMonitor",
    "MetricDescriptor",
    "MetricsDict",
    "MissingExtraError",
    "MixUp",
    "ModelUnit",
    "MultiStepScheduler",
    "MultiTask",
    "MultiTaskUnit",
    "NonFiniteError",
    "Objective",
    "ObjectiveError",
    "OmnitrainError",
    "PackedDataset",
    "Periodic",
    "PolynomialScheduler",
    "Predictions",
    "Preview",
    "ProductScheduler",
    "Profiler",
    "Progress",
    "ProgressBar",
    "RunComparison",
    "Schedule",
    "SchedulePreview",
    "SearchResult",
    "SearchTrial",
    "ProgressiveResizing",
    "SAM",
    "SWA",
    "SeqLengthWarmup",
    "ShardedStream",
    "StepOutput",
    "StepScheduler",
    "StochasticDepth",
    "StraightThrough",
    "TensorBoardLogger",
    "Tracking",
    "Throughput",
    "TrainHook",
    "TrainUnit",
    "Trainer",
    "WSDScheduler",
    "WandbLogger",
    "WeightedLosses",
    "chunked_cross_entropy",
    "compare_runs",
    "describe_metric",
    "instantiate",
    "layerwise_decay",
    "preview_schedule",
    "search",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'omnitrain' has no attribute {name!r}")
    is_collecting = gc.isenabled()
    gc.disable()  # a collection looks at all objects of torch, which are no garbage: 70 ms for nothing
    try:
        module = import_module(f"omnitrain.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _OPTIONAL:
            raise
        from omnitrain.core.errors import MissingExtraError

        raise MissingExtraError(name, package, _OPTIONAL[package]) from None
    finally:
        if is_collecting:
            gc.enable()
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
