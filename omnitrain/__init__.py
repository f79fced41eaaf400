"""omnitrain: PyTorch trainers that give the same numbers on every backend, batch split and number of processes.

What is listed in `__all__` is public. Names load on first use, so that `import omnitrain` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    from omnitrain.callbacks.csv import CsvLogger
    from omnitrain.callbacks.distributions import Distributions
    from omnitrain.callbacks.early_stopping import EarlyStopping
    from omnitrain.callbacks.garbage_collection import GarbageCollection
    from omnitrain.callbacks.hooks import HookCallback, TrainHook
    from omnitrain.callbacks.jsonl import JsonlLogger
    from omnitrain.callbacks.memory_monitor import MemoryMonitor
    from omnitrain.callbacks.periodic import Periodic
    from omnitrain.callbacks.preview import Preview
    from omnitrain.callbacks.profiler import Profiler
    from omnitrain.callbacks.progress_bar import ProgressBar
    from omnitrain.callbacks.tensorboard import TensorBoardLogger
    from omnitrain.callbacks.throughput import Throughput
    from omnitrain.callbacks.tracking import Tracking
    from omnitrain.callbacks.wandb import WandbLogger
    from omnitrain.comparison import RunComparison, compare_runs
    from omnitrain.config.configuration import Config
    from omnitrain.data.collation import Collator
    from omnitrain.data.grouping import GroupByLength
    from omnitrain.data.packing import PackedDataset
    from omnitrain.data.sets import EvalSet
    from omnitrain.data.shards import ShardedStream
    from omnitrain.descriptors import MetricDescriptor, describe_metric
    from omnitrain.duration import Duration
    from omnitrain.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DistributedError,
        MissingExtraError,
        NonFiniteError,
        ObjectiveError,
        OmnitrainError,
    )
    from omnitrain.events import Algorithm, Callback, Event, Histogram
    from omnitrain.hf.arguments import HFTrainingArguments
    from omnitrain.hf.trainer import HFTrainer
    from omnitrain.instantiation import instantiate
    from omnitrain.losses import CrossEntropy, WeightedLosses, chunked_cross_entropy
    from omnitrain.metrics import MetricsDict
    from omnitrain.multitask import MultiTask, MultiTaskUnit
    from omnitrain.objective import Objective
    from omnitrain.param_groups import layerwise_decay
    from omnitrain.preview import SchedulePreview, preview_schedule
    from omnitrain.progress import Progress
    from omnitrain.run.compilation import Compiled
    from omnitrain.run.evaluation import Predictions
    from omnitrain.schedules import (
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
    from omnitrain.sweeps import SearchResult, SearchTrial, search
    from omnitrain.trainers.accelerated import AccelerateTrainer
    from omnitrain.trainers.base import BaseTrainer
    from omnitrain.trainers.native import Trainer
    from omnitrain.units import EvalUnit, ModelUnit, StepOutput, TrainUnit

__version__ = "0.1.0"

_HOMES = {
    "AccelerateTrainer": "trainers.accelerated",
    "Algorithm": "events",
    "BaseTrainer": "trainers.base",
    "Callback": "events",
    "CheckpointError": "errors",
    "Collator": "data.collation",
    "Compiled": "run.compilation",
    "Config": "config.configuration",
    "ConfigError": "errors",
    "ConstantScheduler": "schedules",
    "CosineAnnealingScheduler": "schedules",
    "CosineWithRestartsScheduler": "schedules",
    "CrossEntropy": "losses",
    "CsvLogger": "callbacks.csv",
    "CutMix": "algorithms.cutmix",
    "DataError": "errors",
    "DistributedError": "errors",
    "Distributions": "callbacks.distributions",
    "Duration": "duration",
    "EMA": "algorithms.ema",
    "EarlyStopping": "callbacks.early_stopping",
    "EvalSet": "data.sets",
    "EvalUnit": "units",
    "Event": "events",
    "ExponentialScheduler": "schedules",
    "GarbageCollection": "callbacks.garbage_collection",
    "GradientClipping": "algorithms.gradient_clipping",
    "GradualUnfreezing": "algorithms.gradual_unfreezing",
    "GroupByLength": "data.grouping",
    "Histogram": "events",
    "HookCallback": "callbacks.hooks",
    "HFTrainer": "hf.trainer",
    "HFTrainingArguments": "hf.arguments",
    "InverseSqrtScheduler": "schedules",
    "JsonlLogger": "callbacks.jsonl",
    "LabelSmoothing": "algorithms.label_smoothing",
    "LinearScheduler": "schedules",
    "LayerFreezing": "algorithms.layer_freezing",
    "MagnitudePruning": "algorithms.magnitude_pruning",
    "MemoryMonitor": "callbacks.memory_monitor",
    "MetricDescriptor": "descriptors",
    "MetricsDict": "metrics",
    "MissingExtraError": "errors",
    "MixUp": "algorithms.mixup",
    "ModelUnit": "units",
    "MultiStepScheduler": "schedules",
    "MultiTask": "multitask",
    "MultiTaskUnit": "multitask",
    "NonFiniteError": "errors",
    "Objective": "objective",
    "ObjectiveError": "errors",
    "OmnitrainError": "errors",
    "PackedDataset": "data.packing",
    "Periodic": "callbacks.periodic",
    "PolynomialScheduler": "schedules",
    "Predictions": "run.evaluation",
    "Preview": "callbacks.preview",
    "ProductScheduler": "schedules",
    "Profiler": "callbacks.profiler",
    "Progress": "progress",
    "ProgressBar": "callbacks.progress_bar",
    "RunComparison": "comparison",
    "Schedule": "schedules",
    "SchedulePreview": "preview",
    "SearchResult": "sweeps",
    "SearchTrial": "sweeps",
    "ProgressiveResizing": "algorithms.progressive_resizing",
    "SAM": "algorithms.sam",
    "SWA": "algorithms.swa",
    "SeqLengthWarmup": "algorithms.seq_length_warmup",
    "ShardedStream": "data.shards",
    "StepOutput": "units",
    "StepScheduler": "schedules",
    "StochasticDepth": "algorithms.stochastic_depth",
    "StraightThrough": "algorithms.straight_through",
    "TensorBoardLogger": "callbacks.tensorboard",
    "Tracking": "callbacks.tracking",
    "Throughput": "callbacks.throughput",
    "TrainHook": "callbacks.hooks",
    "TrainUnit": "units",
    "Trainer": "trainers.native",
    "WSDScheduler": "schedules",
    "WandbLogger": "callbacks.wandb",
    "describe_metric": "descriptors",
    "preview_schedule": "preview",
    "instantiate": "instantiation",
    "layerwise_decay": "param_groups",
    "WeightedLosses": "losses",
    "chunked_cross_entropy": "losses",
    "compare_runs": "comparison",
    "search": "sweeps",
}

_OPTIONAL = {"transformers": "hf", "accelerate": ""}
"""Packages that one of these names needs, and the extra that brings them along."""

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
    if name not in _HOMES:
        raise AttributeError(f"module 'omnitrain' has no attribute {name!r}")
    try:
        module = import_module(f"omnitrain.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _OPTIONAL:
            raise
        from omnitrain.errors import MissingExtraError

        raise MissingExtraError(name, package, _OPTIONAL[package]) from None
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
