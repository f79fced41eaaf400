"""Hooks under nnScaler's names, as a class or a mapping of functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omnitrain.core.errors import ConfigError, did_you_mean
from omnitrain.core.events import Callback, Event, TrainerLike


class TrainHook:
    """Hooks under nnScaler's names: override those you need, and pass `HookCallback(hook)` in `callbacks`.

    Models, optimizers and schedules derived from it are called automatically, in this order and before the callbacks.
    Each hook gets the trainer, and may omit other parameters that it does not need. Defining a class with an unknown
    method `on_...`, `before_...` or `after_...` raises an error.

    >>> class Frozen(TrainHook):
    ...     def on_epoch_start(self, trainer, epoch):
    ...         trainer.model.encoder.eval()
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, Callback):
            raise ConfigError(
                f"{cls.__name__} is derived from TrainHook and from Callback, whose methods of the same name get other "
                "arguments. Choose one."
            )
        for name in vars(cls):
            if name.startswith(("on_", "before_", "after_")) and callable(getattr(cls, name)):
                _check_name(name, f"{cls.__name__}.{name}")

    def after_setup(self, trainer: TrainerLike) -> None:
        """The run is set up and a checkpoint is restored; before `on_train_start`."""

    def on_train_start(self, trainer: TrainerLike) -> None:
        """The run begins."""

    def on_train_end(self, trainer: TrainerLike) -> None:
        """The run ends, even by an error."""

    def on_finalize(self, trainer: TrainerLike) -> None:
        """Right after that."""

    def on_epoch_start(self, trainer: TrainerLike, epoch: int) -> None:
        """An epoch begins or is resumed; the first is 0."""

    def on_epoch_end(self, trainer: TrainerLike, epoch: int) -> None:
        """It ends."""

    def on_step_start(self, trainer: TrainerLike, epoch: int, idx: int) -> None:
        """A step begins; `idx` is the number of previous updates in the epoch."""

    def on_step_end(self, trainer: TrainerLike, epoch: int, idx: int) -> None:
        """A step has ended or was skipped."""

    def on_train_step_start(self, trainer: TrainerLike, batches: Sequence[Any], idx: int) -> None:
        """Before the forward passes of a step; `batches` are its micro-batches as the loader yields them."""

    def on_train_step_end(self, trainer: TrainerLike, outputs: Sequence[Any], batches: Sequence[Any], idx: int) -> None:
        """After the backward passes of a step; `outputs` has the `StepOutput` of each, in memory until then."""

    def on_val_start(self, trainer: TrainerLike) -> None:
        """An evaluation of the run begins."""

    def on_val_end(self, trainer: TrainerLike, val_loss: float) -> None:
        """It is over; `val_loss` is the mean over all samples of all ranks."""

    def on_val_step_start(self, trainer: TrainerLike, batches: Sequence[Any], idx: int) -> None:
        """Before the forward pass of a batch of that evaluation, the only one in `batches`."""

    def on_val_step_end(self, trainer: TrainerLike, outputs: Sequence[Any], batches: Sequence[Any], idx: int) -> None:
        """After it."""

    def before_zero_grad(self, trainer: TrainerLike) -> None:
        """Before the gradients are freed, at the end of a step."""

    def after_zero_grad(self, trainer: TrainerLike) -> None:
        """After it."""

    def after_sync_grad(self, trainer: TrainerLike) -> None:
        """Gradients are complete, averaged over the ranks and unscaled. Not called under DeepSpeed."""

    def before_gnorm_clip(self, trainer: TrainerLike) -> None:
        """Right after that."""

    def after_gnorm_clip(self, trainer: TrainerLike, gnorm: Any) -> None:
        """Gradients are clipped, if enabled; `gnorm` is their norm before, on the device. Not under DeepSpeed."""

    def before_optimizer_step(self, trainer: TrainerLike) -> None:
        """Gradients are final."""

    def after_optimizer_step(self, trainer: TrainerLike) -> None:
        """The weights are updated; not called for a skipped step."""

    def before_log_train_metrics(self, trainer: TrainerLike, step_metrics: Mapping[str, float]) -> None:
        """A row of logs is ready."""

    def before_log_val_metrics(self, trainer: TrainerLike, step_metrics: Mapping[str, float]) -> None:
        """The metrics of an evaluation of the run are ready; before `on_val_end`."""

    def on_save_checkpoint(self, trainer: TrainerLike, checkpoint: dict[str, Any]) -> None:
        """Add state for a resumed run to `checkpoint`: JSON types and tensors.

        It may be called more often than checkpoints are written.
        """

    def on_load_checkpoint(self, trainer: TrainerLike, checkpoint: dict[str, Any]) -> None:
        """Restore the state that `on_save_checkpoint` saved, after everything else is restored."""

    def after_load_checkpoint(self, trainer: TrainerLike, checkpoint: dict[str, Any]) -> None:
        """Right after that."""


# The hooks and their arguments after the trainer.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(method).parameters)[2:]
    for name, method in vars(TrainHook).items() if not name.startswith("_")
}  # fmt: skip

# Hooks of nnScaler that cannot be called here, and why.
UNSUPPORTED_HOOKS = {
    "before_sync_grad": "gradients are averaged over the ranks during the last backward pass, so they are never "
    "complete and not yet averaged. Use after_sync_grad",
    "after_aggregate_train_step_outputs": "the losses of a step are added up over the ranks only for logs. Use "
    "before_log_train_metrics, or on_train_step_end for the losses of this rank",
    "after_aggregate_val_step_outputs": "the losses of an evaluation are added up over the ranks only at its end. Use "
    "on_val_end, or on_val_step_end for the losses of this rank",
    "on_expire_checkpoint": "nothing is called before a checkpoint is deleted. Copy what is to be kept in "
    "on_save_checkpoint",
}

# The events inside of steps and evaluations that each hook needs, which cost time if anything listens to them.
_INNER_EVENTS: dict[str, tuple[Event, ...]] = {
    "on_step_start": (Event.STEP_START,),
    "on_step_end": (Event.STEP_START, Event.STEP_END),
    "on_train_step_start": (Event.DATA_FETCHED, Event.STEP_START),
    "on_train_step_end": (
        Event.DATA_FETCHED, Event.STEP_START, Event.BATCH_START, Event.AFTER_FORWARD, Event.BEFORE_CLIP,
        Event.BEFORE_OPTIMIZER_STEP, Event.STEP_END,
    ),
    "on_val_step_start": (Event.EVAL_BATCH_START,),
    "on_val_step_end": (Event.EVAL_BATCH_START, Event.EVAL_BATCH_END),
    "after_sync_grad": (Event.BEFORE_CLIP,),
    "before_gnorm_clip": (Event.BEFORE_CLIP,),
    "after_gnorm_clip": (Event.AFTER_CLIP,),
    **{
        str(event): (event,) for event in (
            Event.BEFORE_ZERO_GRAD, Event.AFTER_ZERO_GRAD, Event.BEFORE_OPTIMIZER_STEP, Event.AFTER_OPTIMIZER_STEP,
        )
    },
}  # fmt: skip


def _check_name(name: str, where: str) -> None:
    """Raise ConfigError if no hook has this name."""
    if name in UNSUPPORTED_HOOKS:
        raise ConfigError(f"{where} would never be called: {UNSUPPORTED_HOOKS[name]}.")
    if name not in _ARGUMENTS:
        raise ConfigError(
            f"{where} would never be called: no hook has that name.{did_you_mean(name, _ARGUMENTS)} The hooks are "
            f"{', '.join(_ARGUMENTS)}. Begin the name of a custom method with an underscore."
        )


def _accepted_arguments(name: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the arguments that a function takes after the trainer, by parameter name or else by order."""
    arguments = _ARGUMENTS[name]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # functions in C may have no signature
        return arguments
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return arguments
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter for parameter in parameters if parameter.kind in kinds]
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if not positional or len(required) > 1 + len(arguments) or any(p not in positional for p in required):
        raise ConfigError(
            f"The hook {name} is called with {', '.join(('trainer', *arguments))}, got "
            f"{getattr(function, '__qualname__', function)}({', '.join(p.name for p in parameters)}). It may take "
            "fewer of them, but no others."
        )
    names = tuple(parameter.name for parameter in positional[1:])
    return names if set(names) <= set(arguments) else arguments[: len(names)]


class HookCallback(Callback):
    """Calls hooks under nnScaler's names: those of a `TrainHook`, or functions in a mapping by name.

    The state that `on_save_checkpoint` adds to its dict is in every checkpoint.

    >>> HookCallback({"on_epoch_end": lambda trainer, epoch: print("epoch", epoch, "is over")}).name
    'HookCallback'

    Args:
        hooks: A `TrainHook`, or a mapping of its methods' names to functions.

    Raises:
        ConfigError: If a hook is unknown, or a function takes arguments that its hook does not get.
    """

    def __init__(self, hooks: TrainHook | Mapping[str, Callable[..., Any]]) -> None:
        if not isinstance(hooks, TrainHook | Mapping):
            raise ConfigError(
                f"HookCallback takes a TrainHook, or a mapping of names to functions, got {hooks!r:.80}. Pass an "
                "instance, such as HookCallback(MyHook())."
            )
        functions: Mapping[str, Callable[..., Any]] = hooks if isinstance(hooks, Mapping) else {
            name: getattr(hooks, name)
            for name in _ARGUMENTS if getattr(type(hooks), name) is not getattr(TrainHook, name)
        }  # fmt: skip
        self.name: str = type(hooks).__name__ if isinstance(hooks, TrainHook) else type(self).__name__
        """The name in logs and errors."""
        self._functions: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {}
        for name, function in functions.items():
            _check_name(name, f"The hook {name!r}")
            if not callable(function):
                raise ConfigError(f"The hook {name!r} must be a function of the trainer, got {function!r:.80}.")
            self._functions[name] = function, _accepted_arguments(name, function)
        for event in dict.fromkeys(event for name in functions for event in _INNER_EVENTS.get(name, ())):
            forward = functools.partial(self._call, str(event))
            vars(self)[f"on_{event}"] = getattr(self, f"_at_{event}", forward)  # subscribes to these events only
        self._trainer: TrainerLike | None = None
        self._loaded: dict[str, Any] = {}
        self._epoch = self._idx = self._eval_idx = 0
        self._batches: Sequence[Any] = ()
        self._outputs: list[Any] = []
        self._is_in_train_step = self._is_in_evaluation = False

    def _call(self, name: str, trainer: TrainerLike, **details: Any) -> None:
        function, names = self._functions.get(name, (None, ()))
        if function is not None:
            function(trainer, *[details[name] for name in names])

    # --- a run

    def on_train_start(self, trainer: TrainerLike) -> None:
        self._trainer = trainer
        self._call("after_setup", trainer)
        self._call("on_train_start", trainer)

    def on_train_end(self, trainer: TrainerLike) -> None:
        self._is_in_evaluation = False  # a signal may have cut one short
        self._call("on_train_end", trainer)
        self._call("on_finalize", trainer)

    def on_epoch_start(self, trainer: TrainerLike) -> None:
        self._epoch = trainer.progress.epoch
        self._call("on_epoch_start", trainer, epoch=self._epoch)

    def on_epoch_end(self, trainer: TrainerLike) -> None:
        self._call("on_epoch_end", trainer, epoch=self._epoch)

    # --- a step

    def _at_data_fetched(self, trainer: TrainerLike, batches: Sequence[Any]) -> None:
        self._batches = batches

    def _at_step_start(self, trainer: TrainerLike) -> None:
        self._idx, self._is_in_train_step = trainer.progress.step_in_epoch, True
        self._outputs = []
        self._call("on_step_start", trainer, epoch=self._epoch, idx=self._idx)
        self._call("on_train_step_start", trainer, batches=self._batches, idx=self._idx)

    def _at_batch_start(self, trainer: TrainerLike, batch: Any, number: int) -> None:
        if not number:
            self._outputs = []

    def _at_after_forward(self, trainer: TrainerLike, batch: Any, output: Any) -> None:
        if self._is_in_train_step:
            self._outputs.append(output)

    def _end_train_step(self, trainer: TrainerLike) -> None:
        if self._is_in_train_step:
            self._is_in_train_step = False
            outputs, self._outputs = self._outputs, []
            self._call("on_train_step_end", trainer, outputs=outputs, batches=self._batches, idx=self._idx)
            self._batches = ()

    def _at_before_clip(self, trainer: TrainerLike) -> None:
        self._end_train_step(trainer)
        self._call("after_sync_grad", trainer)
        self._call("before_gnorm_clip", trainer)

    def _at_after_clip(self, trainer: TrainerLike, norm: Any) -> None:
        self._call("after_gnorm_clip", trainer, gnorm=norm)

    def _at_before_optimizer_step(self, trainer: TrainerLike) -> None:
        self._end_train_step(trainer)  # DeepSpeed has no earlier event
        self._call("before_optimizer_step", trainer)

    def _at_step_end(self, trainer: TrainerLike) -> None:
        self._end_train_step(trainer)  # of a step skipped for lack of labels
        self._call("on_step_end", trainer, epoch=self._epoch, idx=self._idx)

    # --- logs and evaluations

    def on_log(self, trainer: TrainerLike, logs: Mapping[str, float]) -> None:
        if "loss" in logs:  # otherwise a row of a test
            self._call("before_log_train_metrics", trainer, step_metrics=logs)

    def on_eval_start(self, trainer: TrainerLike) -> None:
        self._is_in_evaluation, self._eval_idx = True, -1
        self._call("on_val_start", trainer)

    def _at_eval_batch_start(self, trainer: TrainerLike, batch: Any) -> None:
        if self._is_in_evaluation:  # of the run
            self._eval_idx += 1
            self._call("on_val_step_start", trainer, batches=[batch], idx=self._eval_idx)

    def _at_eval_batch_end(self, trainer: TrainerLike, batch: Any, output: Any) -> None:
        if self._is_in_evaluation:
            self._call("on_val_step_end", trainer, outputs=[output], batches=[batch], idx=self._eval_idx)

    def on_eval_end(self, trainer: TrainerLike, metrics: Mapping[str, float]) -> None:
        self._is_in_evaluation = False
        self._call("before_log_val_metrics", trainer, step_metrics=metrics)
        self._call("on_val_end", trainer, val_loss=metrics.get("eval_loss"))

    # --- checkpoints

    def on_save_start(self, trainer: TrainerLike) -> None:
        self._trainer = trainer

    def on_checkpoint_loaded(self, trainer: TrainerLike) -> None:
        loaded, self._loaded = self._loaded, {}
        self._call("on_load_checkpoint", trainer, checkpoint=loaded)
        self._call("after_load_checkpoint", trainer, checkpoint=loaded)

    def state_dict(self) -> dict[str, Any]:
        """Return the dict that `on_save_checkpoint` fills; empty before the run begins."""
        state: dict[str, Any] = {}
        if self._trainer is not None:
            self._call("on_save_checkpoint", self._trainer, checkpoint=state)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Store the state for `on_load_checkpoint`, called after everything is restored."""
        self._loaded = dict(state)
