"""The events of a run, and the two kinds of objects that take part in it: callbacks and algorithms.

A `Callback` observes and returns nothing; an `Algorithm` gets a value and returns the new one.
Events are fired by `run/lifecycle.py`; requests are answered in `run/loop.py`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from omnitrain.duration import Limits
from omnitrain.errors import CheckpointError, ConfigError, did_you_mean
from omnitrain.metrics import MetricsDict
from omnitrain.objective import Objective
from omnitrain.progress import Progress

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["STOP_REASONS", "Algorithm", "Callback", "Control", "Event", "TrainerLike"]


class Event(StrEnum):
    """The events of a run, in the order in which they are emitted.

    ::

        CHECKPOINT_LOADED                         # where a run is resumed
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

    CHECKPOINT_LOADED comes after `load_checkpoint()` too, whenever that is called.
    With `eval_on_start=True` one EVAL_START and EVAL_END come between TRAIN_START and the first EPOCH_START.
    EXCEPTION comes as soon as anything in between raises, and the exception goes on to the caller after TRAIN_END.
    """

    CHECKPOINT_LOADED = "checkpoint_loaded"
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


STOP_REASONS = ("epochs", "max_steps", "max_duration", "early_stopping", "signal", "requested")
"""Why a run may end; one of them is in `metrics["stop_reason"]`."""


def first_reason(reasons: Collection[str]) -> str:
    """Return which of several reasons the run ends for: a signal, else the first of `STOP_REASONS`; "" without any."""
    return next((reason for reason in ("signal", *STOP_REASONS) if reason in reasons), "")


@dataclass(slots=True)
class Control:
    """What callbacks have requested. Only the loop acts on it, and only at a step boundary."""

    log: bool = False
    evaluate: bool = False
    save: bool = False
    stop: str = ""
    signal: int = 0
    """The number of the signal that asks for the end."""
    scheduled: set[str] = field(default_factory=set)
    """What of this every rank requests at the same step: "log", "evaluate", "save", or why the run ends."""

    def schedule(self, what: str) -> None:
        """Request "log", "evaluate", "save" or the end for one of `STOP_REASONS`, as every rank does at this step."""
        if what not in STOP_REASONS:
            setattr(self, what, True)
        elif not self.stop:  # it could overwrite a signal that came this very moment
            self.stop = what
        self.scheduled.add(what)

    def add_scheduled(self, control: Control) -> None:
        """Take over what `control` has scheduled, which is cleared there."""
        for what in control.scheduled:
            if what in STOP_REASONS:
                self.stop = first_reason({self.stop, what})
            else:
                setattr(self, what, True)
                setattr(control, what, False)
        control.scheduled.clear()

    @property
    def is_pending(self) -> bool:
        """Whether anything is requested."""
        return self.log or self.evaluate or self.save or self.stop != ""

    def taken(self, *names: str) -> Control:
        """Return and clear the requests of these names; a requested end is returned too, and stays."""
        asked = Control(stop=self.stop, signal=self.signal)
        for name in names:
            self.scheduled.discard(name)
            if getattr(self, name):
                setattr(asked, name, True)
                setattr(self, name, False)
        return asked


class TrainerLike(Protocol):
    """What callbacks and algorithms may use of a trainer."""

    settings: Any
    """The arguments that it was made with, by name."""
    lr_scheduler: Any
    device: torch.device
    limits: Limits
    seed: int
    batch_size: int
    trial_name: str | None
    save_dir: Path | None

    @property
    def model(self) -> nn.Module:
        """The user's module, on every backend."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        ...

    @property
    def train_loader(self) -> Any:
        """The loader of the training set; None without one."""
        ...

    @property
    def eval_loader(self) -> Any:
        """The loader of the evaluation set, a dict of them for named sets; None without one."""
        ...

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        ...

    @property
    def control(self) -> Control:
        """What callbacks on this rank have requested."""
        ...

    @property
    def metrics(self) -> MetricsDict:
        """History and best of the run."""
        ...

    @property
    def objective(self) -> Objective:
        """What evaluations are judged by."""
        ...

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run where that is known."""
        ...

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in an epoch, or None for data without length."""
        ...

    @property
    def stop_reason(self) -> str:
        """Why the run is ending or has ended; empty while nothing ends it."""
        ...

    @property
    def is_main_process(self) -> bool:
        """Whether this rank is the one that prints and writes."""
        ...

    @property
    def rank(self) -> int:
        """The number of this rank among those of the run."""
        ...

    @property
    def world_size(self) -> int:
        """The number of ranks of the run."""
        ...

    @property
    def lifecycle(self) -> LifecycleLike:
        """The state of the run that its events are about."""
        ...

    def stop(self, reason: str = "requested") -> None:
        """Request the end of the run at the next step boundary."""
        ...

    def request_evaluate(self) -> None:
        """Request an evaluation at the next step boundary."""
        ...

    def request_save(self) -> None:
        """Request a checkpoint at the next step boundary."""
        ...

    def request_log(self) -> None:
        """Request a row of logs at the next step boundary."""
        ...

    def resolved_config(self) -> dict[str, Any]:
        """Return every setting as it is in force, as JSON types."""
        ...


class LifecycleLike(Protocol):
    """What callbacks may use of the lifecycle."""

    improved: bool
    """Whether the latest evaluation was the best so far."""
    saved_at: tuple[int, int, int] | None
    """The position of the latest checkpoint of the run; None before any."""
    saved_path: Path | None
    """The folder of the latest checkpoint of the run."""
    is_closing: bool
    """Whether the run is writing its last rows, which a longer run would not have had."""


class Callback:
    """Something that watches a run, and may ask for a log, an evaluation, a checkpoint or the end.

    Override the methods named after the events you want. A callback asks (`trainer.stop(reason)`,
    `trainer.request_evaluate()`, `trainer.request_save()`, `trainer.request_log()`); only the loop acts,
    at the next step boundary. A method named `on_...` that is no event is an error when the class is made,
    because it would never be called.

    >>> class StopAtLoss(Callback):
    ...     def on_log(self, trainer, logs):
    ...         if logs.get("loss", 1.0) < 0.01:  # the row of a `test()` has none
    ...             trainer.stop()
    """

    order: ClassVar[int] | int = 10
    """Callbacks run by ascending order, then as given: 0 cadence, 10 yours, 20 deciders, 30 keepers, 40 reporters."""

    asks_alone: ClassVar[bool] | bool = True
    """Whether it may request, in the hooks of a step, what other ranks do not.

    If so, the ranks tell each other after every step. Set it to False for one that only watches steps."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = [f"on_{event}" for event in Event]
        for name in vars(cls):
            if name.startswith("on_") and name not in known and callable(getattr(cls, name)):
                raise ConfigError(
                    f"{cls.__name__}.{name} would never be called: no event has that name.{did_you_mean(name, known)} "
                    f"The events are {', '.join(known)}."
                )

    def on_checkpoint_loaded(self, trainer: TrainerLike) -> None:
        """After a checkpoint was put back, by a resume (before `on_train_start`) or by `load_checkpoint()`."""

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Before anything else in `train()`, after a resume."""

    def on_epoch_start(self, trainer: TrainerLike) -> None:
        """Before the first window of an epoch, or of the rest of one."""

    def on_step_start(self, trainer: TrainerLike) -> None:
        """Before the first micro-batch of a window."""

    def on_before_optimizer_step(self, trainer: TrainerLike) -> None:
        """Gradients are complete, unscaled and clipped; the optimizer has not stepped."""

    def on_step_end(self, trainer: TrainerLike) -> None:
        """After an optimizer update (or a skipped one) was counted."""

    def on_log(self, trainer: TrainerLike, logs: Mapping[str, float]) -> None:
        """A row of logs: `step, epoch, loss, learning_rate, grad_norm, samples_per_second, ...`.

        That of a `test()` has `step, epoch, test_loss, test_<metric>, ...` instead.
        """

    def on_eval_start(self, trainer: TrainerLike) -> None:
        """Before an evaluation that belongs to the run."""

    def on_eval_end(self, trainer: TrainerLike, metrics: Mapping[str, float]) -> None:
        """After an evaluation that belongs to the run; `metrics` has `eval_loss, eval_<metric>, ...`."""

    def on_save_end(self, trainer: TrainerLike) -> None:
        """After a checkpoint is complete."""

    def on_epoch_end(self, trainer: TrainerLike) -> None:
        """After the last window of an epoch, or after a stop inside it."""

    def on_exception(self, trainer: TrainerLike, error: BaseException) -> None:
        """Something raised; the error goes on to the caller afterwards."""

    def on_train_end(self, trainer: TrainerLike) -> None:
        """After everything else in `train()`, also when it failed."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know: JSON types and tensors, in lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict()` returned, tensors in host memory; whatever it raises refuses the checkpoint."""


class Algorithm:
    """Something that changes the training itself: it is handed a value and returns the new one.

    Batch transforms run in the order given, loss transforms in reverse, so that the outermost algorithm sees
    the raw batch first and the finished loss last. Evaluation batches and losses are never transformed.

    >>> class Halve(Algorithm):
    ...     def transform_loss(self, trainer, loss):
    ...         return loss / 2
    """

    def transform_batch(self, trainer: TrainerLike, batch: Any) -> Any:
        """Return the training batch (already on the device) that the model is to see."""
        return batch

    def transform_loss(self, trainer: TrainerLike, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of a micro-batch (a scalar) that is to be differentiated."""
        return loss

    def transform_metrics(self, trainer: TrainerLike, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation, before anyone else sees them."""
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know: JSON types and tensors, in lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict()` returned, tensors in host memory; whatever it raises refuses the checkpoint."""


def give_back(part: Any, state: dict[str, Any], undo: contextlib.ExitStack) -> None:
    """Load a state that a checkpoint has of a callback, an algorithm or a schedule, which may refuse it.

    Args:
        part: Gets the state.
        state: What its `state_dict()` returned.
        undo: Is told how to bring it back to its present state.

    Raises:
        CheckpointError: If it refuses the state.
    """
    with contextlib.suppress(Exception):  # it need not be able to tell before a run
        before = copy.deepcopy(part.state_dict())
        undo.callback(_try_to_load, part, before)
    try:
        part.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(
            f"{type(part).__qualname__}.load_state_dict refused what the checkpoint holds: "
            f"{type(error).__name__}: {error}. Take another checkpoint, or leave it out."
        ) from error


def _try_to_load(part: Any, state: dict[str, Any]) -> None:
    with contextlib.suppress(Exception):
        part.load_state_dict(state)
