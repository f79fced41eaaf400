"""The events of a run, and the two kinds of guests that may take part in it.

A `Callback` is told what happens and returns nothing; an `Algorithm` is handed a value and returns the new one.
What happens when is decided in `lifecycle.py`; who acts on a request, in `trainers/base.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from omnitrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch

    from omnitrain.trainers.base import BaseTrainer

__all__ = ["Algorithm", "Callback", "Event"]


class Event(StrEnum):
    """What a run tells its callbacks, in this order and no other.

    ::

        TRAIN_START
        while not stop:
            EPOCH_START
            for window in epoch:                  # a window is the list of micro-batches of one optimizer step
                STEP_START
                for batch in window:  prepare -> [algorithms: batch] -> forward -> [algorithms: loss] -> backward
                BEFORE_OPTIMIZER_STEP             # gradients final, unscaled, clipped; not under DeepSpeed
                optimizer, scaler, scheduler, zero_grad
                STEP_END                          # callbacks may ask: log, evaluate, save, stop
                if asked: log      -> LOG
                if asked: EVAL_START, evaluate -> EVAL_END      # may ask: save, stop
                if asked: save     -> SAVE_END    # may prune
            EPOCH_END                             # always pairs EPOCH_START; counts only if the data ran out
            if asked: log, evaluate, save, as above
        TRAIN_END                                 # always, also after EXCEPTION

    With `eval_on_start=True` one EVAL_START and EVAL_END come between TRAIN_START and the first EPOCH_START.
    EXCEPTION comes as soon as anything in between raises, and the exception goes on to the caller after TRAIN_END.
    """

    TRAIN_START = "train_start"
    EPOCH_START = "epoch_start"
    STEP_START = "step_start"
    BEFORE_OPTIMIZER_STEP = "before_optimizer_step"
    STEP_END = "step_end"
    LOG = "log"
    EVAL_START = "eval_start"
    EVAL_END = "eval_end"
    SAVE_END = "save_end"
    EPOCH_END = "epoch_end"
    EXCEPTION = "exception"
    TRAIN_END = "train_end"


class Callback:
    """Something that watches a run, and may ask for a log, an evaluation, a checkpoint or the end.

    Override the methods named after the events you want. A callback asks (`trainer.stop(reason)`,
    `trainer.request_evaluate()`, `trainer.request_save()`, `trainer.request_log()`); only the loop acts,
    at the next step boundary. A method named `on_...` that is no event is an error when the class is made,
    because it would never be called.

    >>> class StopAtLoss(Callback):
    ...     def on_log(self, trainer, logs):
    ...         if logs["loss"] < 0.01:
    ...             trainer.stop()
    """

    order: ClassVar[int] | int = 10
    """Callbacks run by ascending order, then as given: 0 cadence, 10 yours, 20 deciders, 30 keepers, 40 reporters."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = [f"on_{event}" for event in Event]
        for name in vars(cls):
            if name.startswith("on_") and name not in known and callable(getattr(cls, name)):
                raise ConfigError(
                    f"{cls.__name__}.{name} would never be called: no event has that name.{did_you_mean(name, known)} "
                    f"The events are {', '.join(known)}."
                )

    def on_train_start(self, trainer: BaseTrainer) -> None:
        """Before anything else in `train()`, after a resume."""

    def on_epoch_start(self, trainer: BaseTrainer) -> None:
        """Before the first window of an epoch, or of the rest of one."""

    def on_step_start(self, trainer: BaseTrainer) -> None:
        """Before the first micro-batch of a window."""

    def on_before_optimizer_step(self, trainer: BaseTrainer) -> None:
        """Gradients are complete, unscaled and clipped; the optimizer has not stepped."""

    def on_step_end(self, trainer: BaseTrainer) -> None:
        """After an optimizer update (or a skipped one) was counted."""

    def on_log(self, trainer: BaseTrainer, logs: Mapping[str, float]) -> None:
        """A row of `step, epoch, loss, learning_rate, grad_norm, samples_per_second, ...` is there."""

    def on_eval_start(self, trainer: BaseTrainer) -> None:
        """Before an evaluation that belongs to the run."""

    def on_eval_end(self, trainer: BaseTrainer, metrics: Mapping[str, float]) -> None:
        """After an evaluation that belongs to the run; `metrics` has `eval_loss, eval_<metric>, ...`."""

    def on_save_end(self, trainer: BaseTrainer) -> None:
        """After a checkpoint is complete."""

    def on_epoch_end(self, trainer: BaseTrainer) -> None:
        """After the last window of an epoch, or after a stop inside it."""

    def on_exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        """Something raised; the error goes on to the caller afterwards."""

    def on_train_end(self, trainer: BaseTrainer) -> None:
        """After everything else in `train()`, also when it failed."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know, as JSON types."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict()` returned."""


class Algorithm:
    """Something that changes the training itself: it is handed a value and returns the new one.

    Batch transforms run in the order given, loss transforms in reverse, so that the outermost algorithm sees
    the raw batch first and the finished loss last. Evaluation batches and losses are never transformed.

    >>> class Halve(Algorithm):
    ...     def transform_loss(self, trainer, loss):
    ...         return loss / 2
    """

    def transform_batch(self, trainer: BaseTrainer, batch: Any) -> Any:
        """Return the training batch (already on the device) that the model is to see."""
        return batch

    def transform_loss(self, trainer: BaseTrainer, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of a micro-batch (a scalar) that is to be differentiated."""
        return loss

    def transform_metrics(self, trainer: BaseTrainer, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation, before anyone else sees them."""
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know, as JSON types."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict()` returned."""
