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
    from omnitrain.algorithms.averaging import EMA as EMA
    from omnitrain.algorithms.averaging import SWA as SWA
    from omnitrain.algorithms.freezing import GradualUnfreezing as GradualUnfreezing
    from omnitrain.algorithms.freezing import LayerFreezing as LayerFreezing
    from omnitrain.algorithms.gradient_clipping import GradientClipping as GradientClipping
    from omnitrain.algorithms.label_smoothing import LabelSmoothing as LabelSmoothing
    from omnitrain.algorithms.magnitude_pruning import MagnitudePruning as MagnitudePruning
    from omnitrain.algorithms.mixing import CutMix as CutMix
    from omnitrain.algorithms.mixing import MixUp as MixUp
    from omnitrain.algorithms.progressive_resizing import ProgressiveResizing as ProgressiveResizing
    from omnitrain.algorithms.sam import SAM as SAM
    from omnitrain.algorithms.seq_length_warmup import SeqLengthWarmup as SeqLengthWarmup
    from omnitrain.algorithms.spike_guard import SpikeGuard as SpikeGuard
    from omnitrain.algorithms.stochastic_depth import StochasticDepth as StochasticDepth
    from omnitrain.algorithms.straight_through import StraightThrough as StraightThrough
    from omnitrain.callbacks.distributions import Distributions as Distributions
    from omnitrain.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from omnitrain.callbacks.garbage_collection import GarbageCollection as GarbageCollection
    from omnitrain.callbacks.gradient_check import GradientCheck as GradientCheck
    from omnitrain.callbacks.memory_monitor import MemoryMonitor as MemoryMonitor
    from omnitrain.callbacks.periodic import Periodic as Periodic
    from omnitrain.callbacks.preview import Preview as Preview
    from omnitrain.callbacks.profiler import Profiler as Profiler
    from omnitrain.callbacks.throughput import Throughput as Throughput
    from omnitrain.callbacks.time_limit import TimeLimit as TimeLimit
    from omnitrain.callbacks.trace import Trace as Trace
    from omnitrain.callbacks.train_hook import HookCallback as HookCallback
    from omnitrain.callbacks.train_hook import TrainHook as TrainHook
    from omnitrain.cli.compare import RunComparison as RunComparison
    from omnitrain.cli.compare import compare_runs as compare_runs
    from omnitrain.config.configuration import Config as Config
    from omnitrain.config.instantiation import instantiate as instantiate
    from omnitrain.core.duration import Duration as Duration
    from omnitrain.core.errors import CheckpointError as CheckpointError
    from omnitrain.core.errors import ConfigError as ConfigError
    from omnitrain.core.errors import DataError as DataError
    from omnitrain.core.errors import DistributedError as DistributedError
    from omnitrain.core.errors import MissingExtraError as MissingExtraError
    from omnitrain.core.errors import NonFiniteError as NonFiniteError
    from omnitrain.core.errors import ObjectiveError as ObjectiveError
    from omnitrain.core.errors import OmnitrainError as OmnitrainError
    from omnitrain.core.events import Algorithm as Algorithm
    from omnitrain.core.events import Callback as Callback
    from omnitrain.core.events import Event as Event
    from omnitrain.core.events import Histogram as Histogram
    from omnitrain.core.history import MetricsDict as MetricsDict
    from omnitrain.core.metric_format import MetricDescriptor as MetricDescriptor
    from omnitrain.core.metric_format import describe_metric as describe_metric
    from omnitrain.core.objective import Objective as Objective
    from omnitrain.core.progress import Progress as Progress
    from omnitrain.data.collation import Collator as Collator
    from omnitrain.data.grouping import BatchByTokens as BatchByTokens
    from omnitrain.data.grouping import GroupByLength as GroupByLength
    from omnitrain.data.packing import PackedDataset as PackedDataset
    from omnitrain.data.sets import EvalSet as EvalSet
    from omnitrain.data.shards import ShardedStream as ShardedStream
    from omnitrain.diagnostics.check import CheckFinding as CheckFinding
    from omnitrain.diagnostics.check import CheckResult as CheckResult
    from omnitrain.diagnostics.plan import RunPlan as RunPlan
    from omnitrain.diagnostics.replay import Replay as Replay
    from omnitrain.diagnostics.replay import replay as replay
    from omnitrain.hf.arguments import HFTrainingArguments as HFTrainingArguments
    from omnitrain.hf.trainer import HFTrainer as HFTrainer
    from omnitrain.loggers.progress_bar import ProgressBar as ProgressBar
    from omnitrain.loggers.rows import CsvLogger as CsvLogger
    from omnitrain.loggers.rows import JsonlLogger as JsonlLogger
    from omnitrain.loggers.tracking import TensorBoardLogger as TensorBoardLogger
    from omnitrain.loggers.tracking import Tracking as Tracking
    from omnitrain.loggers.tracking import WandbLogger as WandbLogger
    from omnitrain.model.losses import CrossEntropy as CrossEntropy
    from omnitrain.model.losses import WeightedLosses as WeightedLosses
    from omnitrain.model.losses import chunked_cross_entropy as chunked_cross_entropy
    from omnitrain.model.multitask import MultiTask as MultiTask
    from omnitrain.model.multitask import MultiTaskUnit as MultiTaskUnit
    from omnitrain.model.units import EvalUnit as EvalUnit
    from omnitrain.model.units import Max as Max
    from omnitrain.model.units import ModelUnit as ModelUnit
    from omnitrain.model.units import StepOutput as StepOutput
    from omnitrain.model.units import Sum as Sum
    from omnitrain.model.units import TrainUnit as TrainUnit
    from omnitrain.optim.param_groups import layerwise_decay as layerwise_decay
    from omnitrain.optim.schedules import ConstantScheduler as ConstantScheduler
    from omnitrain.optim.schedules import CosineAnnealingScheduler as CosineAnnealingScheduler
    from omnitrain.optim.schedules import CosineWithRestartsScheduler as CosineWithRestartsScheduler
    from omnitrain.optim.schedules import ExponentialScheduler as ExponentialScheduler
    from omnitrain.optim.schedules import InverseSqrtScheduler as InverseSqrtScheduler
    from omnitrain.optim.schedules import LinearScheduler as LinearScheduler
    from omnitrain.optim.schedules import MultiStepScheduler as MultiStepScheduler
    from omnitrain.optim.schedules import PolynomialScheduler as PolynomialScheduler
    from omnitrain.optim.schedules import ProductScheduler as ProductScheduler
    from omnitrain.optim.schedules import Schedule as Schedule
    from omnitrain.optim.schedules import SchedulePreview as SchedulePreview
    from omnitrain.optim.schedules import StepScheduler as StepScheduler
    from omnitrain.optim.schedules import WSDScheduler as WSDScheduler
    from omnitrain.optim.schedules import preview_schedule as preview_schedule
    from omnitrain.sweeps.search import SearchResult as SearchResult
    from omnitrain.sweeps.search import SearchTrial as SearchTrial
    from omnitrain.sweeps.search import SeedMean as SeedMean
    from omnitrain.sweeps.search import search as search
    from omnitrain.trainer.accelerated import AccelerateTrainer as AccelerateTrainer
    from omnitrain.trainer.base import BaseTrainer as BaseTrainer
    from omnitrain.trainer.compilation import Compiled as Compiled
    from omnitrain.trainer.evaluation import Predictions as Predictions
    from omnitrain.trainer.native import Trainer as Trainer

__version__ = "0.1.0"

sys.modules["omnitrain.errors"] = errors  # scripts may import errors from there, too

# The public names of each module.
_EXPORTS = {
    "algorithms.averaging": "EMA SWA",
    "algorithms.freezing": "GradualUnfreezing LayerFreezing",
    "algorithms.gradient_clipping": "GradientClipping",
    "algorithms.label_smoothing": "LabelSmoothing",
    "algorithms.magnitude_pruning": "MagnitudePruning",
    "algorithms.mixing": "CutMix MixUp",
    "algorithms.progressive_resizing": "ProgressiveResizing",
    "algorithms.sam": "SAM",
    "algorithms.seq_length_warmup": "SeqLengthWarmup",
    "algorithms.spike_guard": "SpikeGuard",
    "algorithms.stochastic_depth": "StochasticDepth",
    "algorithms.straight_through": "StraightThrough",
    "callbacks.distributions": "Distributions",
    "callbacks.early_stopping": "EarlyStopping",
    "callbacks.garbage_collection": "GarbageCollection",
    "callbacks.gradient_check": "GradientCheck",
    "callbacks.memory_monitor": "MemoryMonitor",
    "callbacks.periodic": "Periodic",
    "callbacks.preview": "Preview",
    "callbacks.profiler": "Profiler",
    "callbacks.throughput": "Throughput",
    "callbacks.trace": "Trace",
    "callbacks.time_limit": "TimeLimit",
    "callbacks.train_hook": "HookCallback TrainHook",
    "cli.compare": "RunComparison compare_runs",
    "config.configuration": "Config",
    "config.instantiation": "instantiate",
    "core.duration": "Duration",
    "core.errors": "CheckpointError ConfigError DataError DistributedError MissingExtraError NonFiniteError "
        "ObjectiveError OmnitrainError",
    "core.events": "Algorithm Callback Event Histogram",
    "core.history": "MetricsDict",
    "core.metric_format": "MetricDescriptor describe_metric",
    "core.objective": "Objective",
    "core.progress": "Progress",
    "data.collation": "Collator",
    "data.grouping": "BatchByTokens GroupByLength",
    "data.packing": "PackedDataset",
    "data.sets": "EvalSet",
    "data.shards": "ShardedStream",
    "diagnostics.check": "CheckFinding CheckResult",
    "diagnostics.plan": "RunPlan",
    "diagnostics.replay": "Replay replay",
    "hf.arguments": "HFTrainingArguments",
    "hf.trainer": "HFTrainer",
    "loggers.progress_bar": "ProgressBar",
    "loggers.rows": "CsvLogger JsonlLogger",
    "loggers.tracking": "TensorBoardLogger Tracking WandbLogger",
    "model.losses": "CrossEntropy WeightedLosses chunked_cross_entropy",
    "model.multitask": "MultiTask MultiTaskUnit",
    "model.units": "EvalUnit Max ModelUnit StepOutput Sum TrainUnit",
    "optim.param_groups": "layerwise_decay",
    "optim.schedules": "ConstantScheduler CosineAnnealingScheduler CosineWithRestartsScheduler ExponentialScheduler "
        "InverseSqrtScheduler LinearScheduler MultiStepScheduler PolynomialScheduler ProductScheduler "
        "Schedule SchedulePreview StepScheduler WSDScheduler preview_schedule",
    "sweeps.search": "SearchResult SearchTrial SeedMean search",
    "trainer.accelerated": "AccelerateTrainer",
    "trainer.base": "BaseTrainer",
    "trainer.compilation": "Compiled",
    "trainer.evaluation": "Predictions",
    "trainer.native": "Trainer",
}  # fmt: skip
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names.split()}
# Packages that a name may need, and the extra that installs them.
_OPTIONAL = {"transformers": "hf", "accelerate": ""}

__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise _missing(name, "omnitrain")
    is_collecting = gc.isenabled()
    gc.disable()  # a collection looks at all objects of torch, which are no garbage: 70 ms for nothing
    try:
        module = import_module(f"omnitrain.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _OPTIONAL:
            raise
        raise errors.MissingExtraError(name, package, _OPTIONAL[package]) from None
    finally:
        if is_collecting:
            gc.enable()
    value = getattr(module, name)
    globals()[name] = value
    return value


def _load_export(package: str, name: str) -> Any:
    """Return a public name of a package inside of this one, as its `__getattr__` does."""
    if _MODULES.get(name, "").startswith(f"{package.removeprefix('omnitrain.')}."):
        return globals().get(name) or __getattr__(name)
    raise _missing(name, package)


def _missing(name: str, package: str) -> Exception:
    """Return the error for a name that is not there; names of other trainers have a remedy."""
    from omnitrain.core.foreign_names import IMPORTS

    if name in IMPORTS:  # the text of an AttributeError would be dropped by `from omnitrain import ...`
        return ImportError(f"{package} has no {name}. {IMPORTS[name]}")
    return AttributeError(f"module {package!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
