"""omnitrain: PyTorch trainers that give the same numbers on every backend, batch split and number of processes.

What is listed in `__all__` is public. Names load on first use, so that `import omnitrain` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnitrain.algorithms.label_smoothing import LabelSmoothing
    from omnitrain.algorithms.mixup import MixUp
    from omnitrain.callbacks.early_stopping import EarlyStopping
    from omnitrain.callbacks.tensorboard import TensorBoardLogger
    from omnitrain.callbacks.wandb import WandbLogger
    from omnitrain.data.collation import Collator
    from omnitrain.data.sets import EvalSet
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
    from omnitrain.events import Algorithm, Callback, Event
    from omnitrain.hf.arguments import HFTrainingArguments
    from omnitrain.hf.trainer import HFTrainer
    from omnitrain.metrics import MetricsDict
    from omnitrain.multitask import MultiTask, MultiTaskUnit
    from omnitrain.objective import Objective
    from omnitrain.progress import Progress
    from omnitrain.run.evaluation import Predictions
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
    "ConfigError": "errors",
    "DataError": "errors",
    "DistributedError": "errors",
    "Duration": "duration",
    "EarlyStopping": "callbacks.early_stopping",
    "EvalSet": "data.sets",
    "EvalUnit": "units",
    "Event": "events",
    "HFTrainer": "hf.trainer",
    "HFTrainingArguments": "hf.arguments",
    "LabelSmoothing": "algorithms.label_smoothing",
    "MetricsDict": "metrics",
    "MissingExtraError": "errors",
    "MixUp": "algorithms.mixup",
    "ModelUnit": "units",
    "MultiTask": "multitask",
    "MultiTaskUnit": "multitask",
    "NonFiniteError": "errors",
    "Objective": "objective",
    "ObjectiveError": "errors",
    "OmnitrainError": "errors",
    "Predictions": "run.evaluation",
    "Progress": "progress",
    "StepOutput": "units",
    "TensorBoardLogger": "callbacks.tensorboard",
    "TrainUnit": "units",
    "Trainer": "trainers.native",
    "WandbLogger": "callbacks.wandb",
}

_OPTIONAL = {"transformers": "hf", "accelerate": ""}
"""Packages that one of these names needs, and the extra that brings them along."""

__all__ = [
    "AccelerateTrainer",
    "Algorithm",
    "BaseTrainer",
    "Callback",
    "CheckpointError",
    "Collator",
    "ConfigError",
    "DataError",
    "DistributedError",
    "Duration",
    "EarlyStopping",
    "EvalSet",
    "EvalUnit",
    "Event",
    "HFTrainer",
    "HFTrainingArguments",
    "LabelSmoothing",
    "MetricsDict",
    "MissingExtraError",
    "MixUp",
    "ModelUnit",
    "MultiTask",
    "MultiTaskUnit",
    "NonFiniteError",
    "Objective",
    "ObjectiveError",
    "OmnitrainError",
    "Predictions",
    "Progress",
    "StepOutput",
    "TensorBoardLogger",
    "TrainUnit",
    "Trainer",
    "WandbLogger",
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
