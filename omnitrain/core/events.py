"""Events of a run, callbacks and algorithms.

A `Callback` observes and returns nothing; an `Algorithm` gets a value and returns a new one.
`trainer/lifecycle.py` emits the events; `trainer/loop.py` acts on requests.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from omnitrain.core.duration import Limits
from omnitrain.core.errors import CheckpointError, ConfigError, did_you_mean
from omnitrain.core.history import MetricsDict
from omnitrain.core.objective import Objective
from omnitrain.core.progress import Clock, Progress

if TYPE_CHECKING:
    import torch
    from torch import nn


class Event(StrEnum):
    """The events of a run, in the order in which they are emitted.

    ::

        CHECKPOINT_LOADED                   # only if the run resumes
        TRAIN_START
        while not stop:
            EPOCH_START, [algorithms: begin_epoch]
            for window in epoch:            # the micro-batches of one optimizer step
                DATA_FETCHED, STEP_START
                for batch in window:
                    prepare, [algorithms: batch], BATCH_START
                    forward, AFTER_FORWARD, [algorithms: output, loss], AFTER_LOSS
                    backward, AFTER_BACKWARD, BATCH_END
                [algorithms: second pass]   # all micro-batches once more, with their events
                unscale, BEFORE_CLIP, norm, [algorithms: before_update], clip, AFTER_CLIP
                BEFORE_OPTIMIZER_STEP       # gradients final; not under DeepSpeed
                optimizer, scaler, [algorithms: after_update], AFTER_OPTIMIZER_STEP
                scheduler, BEFORE_ZERO_GRAD, zero_grad, AFTER_ZERO_GRAD
                STEP_END                    # callbacks may request log, evaluate, save, stop
                if requested: log      -> LOG
                if requested: EVAL_START
                    for each batch: EVAL_BATCH_START, forward, EVAL_BATCH_END
                    [algorithms: metrics] -> EVAL_END    # may request save, stop
                if requested: SAVE_START, save -> SAVE_END  # may delete old checkpoints
            [algorithms: end_epoch], EPOCH_END  # once per EPOCH_START; counts if the data ran out
            if requested: log, evaluate, save, as above
        [algorithms: end_run], TRAIN_END    # always, even after EXCEPTION

    CHECKPOINT_LOADED also follows each call of `load_checkpoint()`, and, after an EPOCH_END that does not count, the
    return of `SpikeGuard` to an earlier state; SAVE_START and SAVE_END belong to each of
    `save_checkpoint()`, EVAL_BATCH_START and EVAL_BATCH_END to each batch of `evaluate()`, `test()` and `predict()`,
    and PREDICT_START and PREDICT_END to each `predict()`.
    The events of micro-batches come for each pass over them: again if an algorithm has a second pass, if the optimizer
    evaluates the loss again (between BEFORE_OPTIMIZER_STEP and AFTER_OPTIMIZER_STEP), or if `microbatch_size="auto"`
    restarts a step. A step without a label that counts has none of them. AFTER_BACKWARD comes where there is a
    backward pass, AFTER_OPTIMIZER_STEP where the weights were updated. BEFORE_CLIP and AFTER_CLIP do not come under
    DeepSpeed, which clips and updates at once. SAVE_END comes later with `async_save`, and not if the disk fails.
    REPORT comes whenever a callback reports a text or a histogram.
    With `eval_on_start=True`, one EVAL_START and EVAL_END come between TRAIN_START and the first EPOCH_START.
    EXCEPTION comes as soon as anything in between raises; the exception is re-raised to the caller after TRAIN_END.
    """

    CHECKPOINT_LOADED = "checkpoint_loaded"
    TRAIN_START = "train_start"
    EPOCH_START = "epoch_start"
    DATA_FETCHED = "data_fetched"
    STEP_START = "step_start"
    BATCH_START = "batch_start"
    AFTER_FORWARD = "after_forward"
    AFTER_LOSS = "after_loss"
    AFTER_BACKWARD = "after_backward"
    BATCH_END = "batch_end"
    BEFORE_CLIP = "before_clip"
    AFTER_CLIP = "after_clip"
    BEFORE_OPTIMIZER_STEP = "before_optimizer_step"
    AFTER_OPTIMIZER_STEP = "after_optimizer_step"
    BEFORE_ZERO_GRAD = "before_zero_grad"
    AFTER_ZERO_GRAD = "after_zero_grad"
    STEP_END = "step_end"
    LOG = "log"
    REPORT = "report"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    PREDICT_START = "predict_start"
    PREDICT_END = "predict_end"
    SAVE_START = "save_start"
    SAVE_END = "save_end"
    EPOCH_END = "epoch_end"
    EXCEPTION = "exception"
    TRAIN_END = "train_end"


# Events inside of a step: the loop emits them only if a callback listens to one of them.
INNER_STEP_EVENTS = (
    Event.DATA_FETCHED, Event.BATCH_START, Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.AFTER_BACKWARD,
    Event.BATCH_END, Event.BEFORE_CLIP, Event.AFTER_CLIP, Event.AFTER_OPTIMIZER_STEP, Event.BEFORE_ZERO_GRAD,
    Event.AFTER_ZERO_GRAD,
)  # fmt: skip

# The values of `Callback.on_error`.
ERROR_POLICIES = ("raise", "warn", "disable")


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram that a callback reports, such as that of the weights.

    Args:
        edges: Limits of the bins in ascending order, one more than there are bins.
        counts: Values in each bin.
        low: The smallest value.
        high: The largest value.
        total: The sum of all values.
        squares: The sum of their squares.
    """

    edges: Sequence[float]
    counts: Sequence[int]
    low: float
    high: float
    total: float
    squares: float


# The values of `metrics["stop_reason"]`.
STOP_REASONS = ("epochs", "max_steps", "max_duration", "early_stopping", "signal", "requested")


def pick_stop_reason(reasons: Collection[str]) -> str:
    """Return the reason that takes precedence: a signal, or the first in `STOP_REASONS`; "" if none."""
    return next((reason for reason in ("signal", *STOP_REASONS) if reason in reasons), "")


@dataclass(slots=True)
class Control:
    """The requests of callbacks. Only the loop acts on them, and only at a step boundary."""

    log: bool = False
    evaluate: bool = False
    save: bool = False
    stop: str = ""
    signal: int = 0
    """The number of the signal that requested the end."""
    scheduled: set[str] = field(default_factory=set)
    """The requests that every rank makes at the same step: "log", "evaluate", "save", or a stop reason."""

    def schedule(self, what: str) -> None:
        """Request "log", "evaluate", "save" or a stop for one of `STOP_REASONS`, as every rank does at this step."""
        if what not in STOP_REASONS:
            setattr(self, what, True)
        elif not self.stop:  # or it could overwrite a signal that has just arrived
            self.stop = what
        self.scheduled.add(what)

    def add_scheduled(self, control: Control) -> None:
        """Move the scheduled requests of `control` to this object."""
        for what in control.scheduled:
            if what in STOP_REASONS:
                self.stop = pick_stop_reason({self.stop, what})
            else:
                setattr(self, what, True)
                setattr(control, what, False)
        control.scheduled.clear()

    def pop(self, *names: str) -> Control:
        """Return and clear the requests with these names; a requested stop is returned too, but not cleared."""
        popped = Control(stop=self.stop, signal=self.signal)
        for name in names:
            self.scheduled.discard(name)
            if getattr(self, name):
                setattr(popped, name, True)
                setattr(self, name, False)
        return popped


ProfilerRanges = Callable[[str], contextlib.AbstractContextManager[Any]]
"""Returns the context for a part of a step: "data", "forward", "backward" or "update"."""


class TrainerLike(Protocol):
    """The part of a trainer that callbacks and algorithms may use."""

    settings: Any
    """The arguments of the trainer, by name."""
    lr_scheduler: Any
    precision: Any
    """The precision of the run: `precision.name` is "fp32", "bf16", "fp16" or "fp8"."""
    ranks: Any
    """The ranks of the run; `ranks.data.size` is the number of those with different samples."""
    device: torch.device
    loss_mean: Any
    """What the loss of a batch is a mean over: an `omnitrain.model.losses.LossMean`."""
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
        """The loader of the training set, or None."""
        ...

    @property
    def eval_loader(self) -> Any:
        """The loader of the evaluation set, a dict of loaders for named sets, or None."""
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
        """The history of the run and its best evaluation."""
        ...

    @property
    def objective(self) -> Objective:
        """The metric to optimize, its direction, and its best value so far."""
        ...

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the run, or None if unknown."""
        ...

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in an epoch, or None for data without length."""
        ...

    @property
    def stop_reason(self) -> str:
        """Why the run is ending or has ended; empty until then."""
        ...

    @property
    def is_main_process(self) -> bool:
        """Whether this is the rank that prints and writes."""
        ...

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """The number of ranks of the run."""
        ...

    @property
    def lifecycle(self) -> LifecycleLike:
        """The lifecycle of the run."""
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
        """Return every setting in force, as JSON types."""
        ...


class LifecycleLike(Protocol):
    """The part of the lifecycle that callbacks may use."""

    improved: bool
    """Whether the latest evaluation was the best so far."""
    saved_at: tuple[int, int, int] | None
    """The position of the run's latest checkpoint; None before the first."""
    saved_path: Path | None
    """The folder of the latest checkpoint of the run."""
    evaluated_step: int
    """The step of the run's latest evaluation; -1 before the first."""
    resumed_from: Path | None
    """The folder of the checkpoint that the run was resumed from; None for a fresh start."""
    trained_before: int
    """Steps of an earlier `train()` whose final weights this run starts from."""
    signal: int
    """The number of the signal that ended the run."""
    is_closing: bool
    """Whether the run is writing its last rows, which a longer run would not have."""

    def report(self, values: Mapping[str, str | Histogram]) -> None:
        """Send texts and histograms to the callbacks with `on_report`, on the ranks that call it."""
        ...

    def untimed(self) -> contextlib.AbstractContextManager[None]:
        """Exclude the time inside from the rates in the logs."""
        ...

    def set_profiler_ranges(self, owner: object, ranges: ProfilerRanges | None) -> None:
        """Run each part of a step inside of `ranges(name)`, within those of other owners; None removes the owner's."""
        ...

    def unsubscribe(self, callback: Callback, *events: Event) -> None:
        """Unsubscribe a callback from events, until the callbacks are registered again."""
        ...

    @property
    def clock(self) -> Clock:
        """The seconds of the run by phase."""
        ...


def wrap_in_range(ranges: ProfilerRanges, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, wrapped in `ranges(name)`."""

    def ranged(*args: Any, **kwargs: Any) -> Any:
        with ranges(name):
            return run(*args, **kwargs)

    return ranged


def _record_arguments(cls: Any) -> None:
    """Wrap the constructor of a class so that each object records its arguments, for `init_arguments`."""
    init = vars(cls).get("__init__")
    if init is None:
        return

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        if _ARGUMENTS not in vars(self):  # otherwise a derived class has recorded its own
            with contextlib.suppress(TypeError):  # which the call itself raises
                bound = inspect.signature(init).bind(self, *args, **kwargs)
                bound.apply_defaults()
                arguments = dict(list(bound.arguments.items())[1:])
                vars(self)[_ARGUMENTS] = {name: _copy_container(value) for name, value in arguments.items()}
        init(self, *args, **kwargs)

    cls.__init__ = wrapper


_ARGUMENTS = "_arguments_given"


def _copy_container(value: Any) -> Any:
    return copy.copy(value) if type(value) in (list, dict, set) else value


def init_arguments(part: Any) -> dict[str, Any]:
    """Return the arguments that a callback or algorithm was created with, with defaults; empty if unknown.

    >>> class Every(Callback):
    ...     def __init__(self, steps, scale=1.0):
    ...         self.turns = steps
    >>> init_arguments(Every(3))
    {'steps': 3, 'scale': 1.0}
    """
    return dict(vars(part).get(_ARGUMENTS, {}))


class Callback:
    """Watches a run, and can request a log, an evaluation, a checkpoint or the end.

    Override the methods named after the events you need. A callback makes requests (`trainer.stop(reason)`,
    `trainer.request_evaluate()`, `trainer.request_save()`, `trainer.request_log()`); only the loop acts on them, at
    the next step boundary. A class with a method `on_...` that matches no event raises an error when it is defined,
    because the method would never be called.

    >>> class StopAtLoss(Callback):
    ...     def on_log(self, trainer, logs):
    ...         if logs.get("loss", 1.0) < 0.01:  # the row of a `test()` has none
    ...             trainer.stop()
    """

    order: ClassVar[int] | int = 10
    """Callbacks run in ascending order, then as given.

    0 is for cadence, 10 for yours, 20 for early stopping and other decisions, 30 for deletion of checkpoints, 40 for
    reports.
    """

    asks_alone: ClassVar[bool] | bool = True
    """Whether, in the hooks of a step, the callback may request something that other ranks do not.

    If so, the ranks exchange their requests after every step. Set it to False if it only watches steps."""

    on_error: ClassVar[str] | str = "raise"
    """What happens when one of its methods raises an exception.

    "raise": the run ends with it. "warn": it is logged, and the run continues. "disable": it is logged, and the
    callback is not called again in this run; checkpoints keep its state. KeyboardInterrupt, SystemExit and errors of
    other ranks always end the run. A callback in which ranks wait for each other must raise: if it failed on a single
    rank, the others would wait."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _record_arguments(cls)
        known = [f"on_{event}" for event in Event]
        for name in vars(cls):
            if name.startswith("on_") and name not in known and callable(getattr(cls, name)):
                raise ConfigError(
                    f"{cls.__name__}.{name} would never be called: no event has that name.{did_you_mean(name, known)} "
                    f"The events are {', '.join(known)}."
                )

    def on_checkpoint_loaded(self, trainer: TrainerLike) -> None:
        """After a checkpoint was restored, by a resume (before `on_train_start`) or by `load_checkpoint()`."""

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Before anything else in `train()`, after a resume."""

    def on_epoch_start(self, trainer: TrainerLike) -> None:
        """Before the first window of an epoch, or of the rest of one after a resume."""

    # Tensors passed to these methods are on the device: keeping one keeps its memory, reading one makes the host wait,
    # and changing one in place changes the run.

    def on_data_fetched(self, trainer: TrainerLike, batches: Sequence[Any]) -> None:
        """The micro-batches of the next window are loaded, as the loader returns them."""

    def on_step_start(self, trainer: TrainerLike) -> None:
        """Before the first micro-batch of a window."""

    def on_batch_start(self, trainer: TrainerLike, batch: Any, number: int) -> None:
        """Before the forward pass of a micro-batch; `batch` is the input of the model.

        `number` counts the micro-batches of the window from 0, and again from 0 if the window is repeated.
        """

    def on_after_forward(self, trainer: TrainerLike, batch: Any, output: Any) -> None:
        """After the forward pass of a micro-batch; `output` is its `StepOutput`, before any algorithm."""

    def on_after_loss(self, trainer: TrainerLike, loss: torch.Tensor) -> None:
        """After the loss of a micro-batch is computed, by all algorithms too; it is not weighted yet."""

    def on_after_backward(self, trainer: TrainerLike) -> None:
        """After the backward pass of a micro-batch: gradients are those of the window so far, times the loss scale."""

    def on_batch_end(self, trainer: TrainerLike) -> None:
        """A micro-batch is done."""

    def on_before_clip(self, trainer: TrainerLike) -> None:
        """Gradients are complete, averaged over the ranks and unscaled; not clipped. Not called under DeepSpeed."""

    def on_after_clip(self, trainer: TrainerLike, norm: torch.Tensor) -> None:
        """Gradients are clipped to `max_grad_norm`, if set; `norm` is their norm before. Not under DeepSpeed."""

    def on_before_optimizer_step(self, trainer: TrainerLike) -> None:
        """Gradients are complete, unscaled and clipped; the optimizer has not stepped."""

    def on_after_optimizer_step(self, trainer: TrainerLike) -> None:
        """The weights are updated, and gradients not freed; the step is not counted yet."""

    def on_before_zero_grad(self, trainer: TrainerLike) -> None:
        """Before the gradients are freed, also those of a step that was skipped."""

    def on_after_zero_grad(self, trainer: TrainerLike) -> None:
        """After the gradients were freed."""

    def on_step_end(self, trainer: TrainerLike) -> None:
        """After an optimizer update, or a skipped one, was counted."""

    def on_log(self, trainer: TrainerLike, logs: Mapping[str, float]) -> None:
        """A row of logs is ready: `step, epoch, loss, learning_rate, grad_norm, samples_per_second, ...`.

        The row of a `test()` has `step, epoch, test_loss, test_<metric>, ...` instead.
        """

    def on_report(self, trainer: TrainerLike, values: Mapping[str, str | Histogram]) -> None:
        """A callback reports texts or histograms, by names such as "preview/0" or "weights/head.bias"."""

    def on_eval_start(self, trainer: TrainerLike) -> None:
        """Before an evaluation that belongs to the run."""

    def on_eval_batch_start(self, trainer: TrainerLike, batch: Any) -> None:
        """Before the forward pass of a batch of any evaluation or prediction; `batch` is the input of the model."""

    def on_eval_batch_end(self, trainer: TrainerLike, batch: Any, output: Any) -> None:
        """After it; `output` is a `StepOutput`."""

    def on_eval_end(self, trainer: TrainerLike, metrics: Mapping[str, float]) -> None:
        """After an evaluation that belongs to the run; `metrics` has `eval_loss, eval_<metric>, ...`."""

    def on_predict_start(self, trainer: TrainerLike) -> None:
        """Before the first batch of a `predict()`."""

    def on_predict_end(self, trainer: TrainerLike, predictions: Any) -> None:
        """After a `predict()`; `predictions` is what it returns."""

    def on_save_start(self, trainer: TrainerLike) -> None:
        """Before the state of the run is captured for a checkpoint."""

    def on_save_end(self, trainer: TrainerLike) -> None:
        """After a checkpoint is complete."""

    def on_epoch_end(self, trainer: TrainerLike) -> None:
        """After the last window of an epoch, or after a stop within it."""

    def on_exception(self, trainer: TrainerLike, error: BaseException) -> None:
        """Something raised `error`, which is re-raised to the caller afterwards."""

    def on_train_end(self, trainer: TrainerLike) -> None:
        """After everything else in `train()`, even if it failed."""

    def log_values(self, trainer: TrainerLike) -> Mapping[str, float]:
        """Return more values for the current row of logs; called once per row, on every rank.

        Names that the row already has are an error. The time of this call is excluded from rates.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints: JSON types and tensors, in lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict()`, with tensors in host memory; any exception rejects the checkpoint."""


class Algorithm:
    """Changes the training itself: each method gets a value and returns the new one.

    Override the methods you need; one that nobody overrides costs nothing. They run in the order of `algorithms`,
    those of outputs, losses and metrics in reverse: the first algorithm sees the raw batch and the final loss.
    Evaluation batches, outputs and losses are never transformed. A method whose name looks like one of these, and is
    not, raises an error when the class is defined.

    >>> class Halve(Algorithm):
    ...     def transform_loss(self, trainer, loss):
    ...         return loss / 2
    """

    conflicts: ClassVar[Collection[str]] = ()
    """Names of classes of algorithms that cannot be used together with this one; one of the two is enough."""

    asks_alone: ClassVar[bool] | bool = True
    """Whether it may request something in a step that other ranks do not; see `Callback.asks_alone`."""

    needs: ClassVar[Collection[str]] = ()
    """What the backend must support besides the overridden methods, such as "freezing" of weights during a run."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _record_arguments(cls)
        known = [name for name in vars(Algorithm) if name.startswith(_METHOD_PREFIXES)]
        for name in vars(cls):
            if name.startswith(_METHOD_PREFIXES) and name not in known and callable(getattr(cls, name)):
                raise ConfigError(
                    f"{cls.__name__}.{name} would never be called: no method has that name.{did_you_mean(name, known)} "
                    f"The methods are {', '.join(known)}. Begin the names of your own methods with an underscore."
                )

    def set_up(self, trainer: TrainerLike) -> None:
        """Before each run, and before a checkpoint is restored: reset the state, and reject what cannot work.

        `trainer.progress` may still be that of the earlier run.
        """

    def begin_epoch(self, trainer: TrainerLike) -> None:
        """Before the first window of an epoch, or of the rest of one after a resume."""

    def transform_batch(self, trainer: TrainerLike, batch: Any) -> Any:
        """Return the training batch for the model; `batch` is already on the device."""
        return batch

    def transform_output(self, trainer: TrainerLike, output: Any) -> Any:
        """Return the `StepOutput` of a micro-batch: its loss, outputs and labels, right after the forward pass."""
        return output

    def transform_loss(self, trainer: TrainerLike, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of a micro-batch, a scalar, for the backward pass."""
        return loss

    def before_second_pass(self, trainer: TrainerLike) -> None:
        """Gradients of all micro-batches are accumulated, times the loss scale: move the weights for a second pass.

        An algorithm that overrides this runs the micro-batches of each step twice; the update uses only the gradients
        of the second pass. An error under DeepSpeed.
        """

    def after_second_pass(self, trainer: TrainerLike) -> None:
        """The second pass is done, or has failed: restore the weights."""

    def before_update(self, trainer: TrainerLike) -> None:
        """Gradients are complete and unscaled, their norm is computed, and they are not clipped: change them in place.

        An error under DeepSpeed, whose engine clips and updates at once, in its own buffers.
        """

    def after_update(self, trainer: TrainerLike) -> None:
        """The optimizer has updated the weights; not called for a skipped step. The step is not counted yet."""

    def transform_weights(self, trainer: TrainerLike, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return the weights by name for evaluations, model files and the end of the run.

        Training continues with the original ones, and checkpoints have both. Only one algorithm of a run may override
        this.

        Args:
            trainer: The trainer.
            weights: The weights in training: live tensors, which may be sharded. Return unchanged entries as the same
                object; others need the same shape, dtype and sharding.
        """
        return dict(weights)

    def restore_weights(self, trainer: TrainerLike, weights: Mapping[str, Any]) -> None:
        """Restore a copy of the weights that `transform_weights` changed for the loaded checkpoint, or of none."""

    def transform_metrics(self, trainer: TrainerLike, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation, before anything else uses them."""
        return metrics

    def end_epoch(self, trainer: TrainerLike) -> None:
        """After the last window of an epoch that is complete, before it is counted and before its evaluation."""

    def end_run(self, trainer: TrainerLike) -> None:
        """After a run, even one that failed: remove all hooks from the model. A longer run may follow."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints: JSON types and tensors, in lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict()`, with tensors in host memory; any exception rejects the checkpoint."""


# Prefixes of the names of algorithms' methods.
_METHOD_PREFIXES = ("transform_", "before_", "after_", "begin_", "end_", "restore_", "set_up")


def find_overrides(algorithms: Iterable[Algorithm], name: str) -> list[Callable[..., Any]]:
    """Return the methods of this name of the algorithms that override it, in their order."""
    overrides = []
    for algorithm in algorithms:
        method = getattr(algorithm, name)
        if getattr(method, "__func__", method) is not getattr(Algorithm, name):
            overrides.append(method)
    return overrides


def check_algorithms(algorithms: Iterable[Algorithm]) -> None:
    """Reject algorithms that cannot be used together.

    Raises:
        ConfigError: With two of them.
    """
    for pair in itertools.combinations(algorithms, 2):
        names = [type(algorithm).__name__ for algorithm in pair]
        reason = ""
        if names[1] in pair[0].conflicts or names[0] in pair[1].conflicts:
            reason = "which exclude each other"
        elif len(find_overrides(pair, "transform_weights")) > 1:
            reason = "and only one may set the weights for evaluations"
        if reason:
            raise ConfigError(f"`algorithms` holds {names[0]} and {names[1]}, {reason}. Leave one out.")


def share_of_run(trainer: TrainerLike, who: str, step: int) -> float:
    """Return the share of a run's updates that are done at a step: the same on every rank, and after a resume.

    Raises:
        ConfigError: If the number of updates is unknown.
    """
    total, size = trainer.total_steps, trainer.settings.global_batch_size
    if total is None:
        if isinstance(size, Mapping):
            reason = f"`global_batch_size={dict(size)!r}` changes in the run"
            remedy = "one number of samples a step"
        else:
            reason = "its length is in time or tokens, or its data have no length"
            remedy = "`epochs` and data of known length"
        raise ConfigError(
            f"{who} needs the share of the run that is done, and its number of steps is unknown: {reason}. Pass "
            f"`max_steps`, or {remedy}."
        )
    return step / total


def restore_with_undo(part: Any, state: dict[str, Any], undo: contextlib.ExitStack) -> None:
    """Restore the state of a callback, an algorithm or a schedule from a checkpoint; `undo` restores the present one.

    Raises:
        CheckpointError: If the object rejects the state.
    """
    with contextlib.suppress(Exception):  # some objects have no state before a run
        before = copy.deepcopy(part.state_dict())
        undo.callback(_try_to_load, part, before)
    try:
        part.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(
            f"{type(part).__qualname__}.load_state_dict rejected the state in the checkpoint: "
            f"{type(error).__name__}: {error}. Use another checkpoint, or leave it out."
        ) from error


def _try_to_load(part: Any, state: dict[str, Any]) -> None:
    with contextlib.suppress(Exception):
        part.load_state_dict(state)
