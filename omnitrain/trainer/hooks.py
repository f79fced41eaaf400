"""Overridable methods of trainers.

`step.py` and `loop.py` show when each is called. The parts of a run know nothing else about their trainer.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from omnitrain.arguments import Settings
from omnitrain.backends.backend import Backend
from omnitrain.callbacks.train_hook import TrainHook
from omnitrain.compute.precision import Precision, choose_device
from omnitrain.compute.random_state import derive_seed, seed_everything
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Algorithm, Callback, Event
from omnitrain.data.collation import cast_inputs, move_to_device
from omnitrain.data.sampling import Window
from omnitrain.distributed.ranks import Ranks
from omnitrain.model.losses import LossMean
from omnitrain.model.units import StepOutput, run_unit, without_effect

_LOSS = "`loss_fn`, a `unit`, or `_forward(model, batch)`"
_DATA = "`train_dataset` or `train_loader`"

# Methods of other trainers and of earlier versions of ours that nothing calls, and what to use instead.
NEVER_CALLED = {
    "compute_loss": _LOSS,
    "training_step": f"{_LOSS}, or `_train_step(window)`",
    **dict.fromkeys(
        ("validation_step", "test_step", "prediction_step", "predict_step"), "a `unit` with `evaluate(batch)`"
    ),
    "evaluation_loop": "a `unit` with `evaluate(batch)`, or `compute_metrics`",
    "forward": "`_forward(model, batch)`",
    "backward": "`_backward(loss)`",
    "fit": "`_train_epoch(epoch)`",
    "optimizer_step": "`_apply_update()`",
    **dict.fromkeys(("configure_optimizers", "create_optimizer_and_scheduler"), "`optimizer` and `lr_scheduler`"),
    "create_optimizer": "`optimizer`",
    "create_scheduler": "`lr_scheduler`",
    **dict.fromkeys(("train_dataloader", "get_train_dataloader"), _DATA),
    **dict.fromkeys(("val_dataloader", "get_eval_dataloader"), "`eval_dataset` or `eval_loader`"),
    "get_test_dataloader": "`test_dataset` or `test_loader`",
    "log": "the callback's `on_log(trainer, logs)`",
    "_fit": "`_train_epoch(epoch)`",
    "_optimizer_step": "`_apply_update()`, or the callback's `on_before_optimizer_step(trainer)`",
    "_answer_requests": "a callback that requests",
    "_leave_evaluation": "a backend's `end_evaluation()`",
    "_capture_state": "a callback's `state_dict()`",
    "_restore_state": "a callback's `load_state_dict(state)`",
    # of EasyDeL
    "start_training_hook": "the callback's `on_train_start(trainer)`",
    "start_evaluation_hook": "the callback's `on_eval_start(trainer)`",
    "apply_training_hooks": "`transform_metrics` of an `Algorithm`, or `on_nonfinite` and `max_duration`",
    "_preprocess_batch_input": "`_prepare_batch(batch)`",
    "configure_functions": f"{_LOSS}, and `compile`",
    "configure_dataloaders": f"{_DATA}, and `eval_dataset` or `eval_loader`",
    "configure_model": "`model`, `optimizer` and `lr_scheduler`",
    **dict.fromkeys([f"create_{kind}collect_function" for kind in ("", "grain_", "tfds_")], "`data_collator`"),
    "_get_next_batch": f"{_DATA}, or `_train_epoch(epoch)`",
    "_should_run_evaluation": "`eval_steps`, or a callback that requests evaluations",
    "_should_save_checkpoint": "`save_steps`, or a callback that requests checkpoints",
    "maybe_generate": "`Preview` in `callbacks`",
    "log_weight_distribution": "`Distributions` in `callbacks`",
}

_UNIT = "`loss_fn`, or a `unit`, which is called with the batch,"
_EVALUATION = "`compute_metrics`, or a `unit` with `evaluate(batch)`,"
_UPDATE = "an `Algorithm`, or `_apply_update()` of a subclass of the trainer,"
# Methods that Lightning, Composer and Keras call on models: what to use instead, and the arguments by which a user may
# have passed on what they return.
METHODS_OF_MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("training_step", "train_step"), (_UNIT, ("unit",))),
    **dict.fromkeys(("validation_step", "test_step", "predict_step", "eval_forward"), (_EVALUATION, ("unit",))),
    **dict.fromkeys(("update_metric", "get_metrics"), (_EVALUATION, ("unit", "compute_metrics"))),
    "configure_optimizers": ("`optimizer` and `lr_scheduler`", ("optimizer",)),
    "val_dataloader": ("`eval_dataset` or `eval_loader`", ("eval_dataset", "eval_loader")),
    **dict.fromkeys(("optimizer_step", "optimizer_zero_grad"), (_UPDATE, ())),
    "lr_scheduler_step": ("a `Schedule` as `lr_scheduler`", ()),
    "configure_gradient_clipping": ("`max_grad_norm` or `GradientClipping`", ()),
}

# The hooks that get batches or read them.
SEE_BATCHES = ("_train_epoch", "_train_step", "_weigh", "_prepare_batch", "_forward")

# Hooks of a subclass, HFTrainer's among them, that may call methods of the model.
_RUN_MODELS = frozenset(
    [*SEE_BATCHES, "_setup_training_components", "_build_optimizer", "compute_loss", "training_step", "prediction_step",
     "create_optimizer", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs"]
)  # fmt: skip

_STAGES = ["fit", "sanity_check", "epoch", "step", "batch", "eval"]
_STAGES += [stage + part for stage in ("train", "validation", "test", "predict") for part in ("", "_epoch", "_batch")]
# Methods that other trainers call, on callbacks or, as Lightning does, on the model.
EVENTS_OF_TRAINERS = frozenset(
    [f"on_{event}" for event in Event]
    + [f"on_{stage}_{moment}" for stage in _STAGES for moment in ("begin", "start", "end")]
    + ["on_before_backward", "on_after_backward", "on_before_zero_grad", "on_save_checkpoint", "on_load_checkpoint"]
    + ["on_before_batch_transfer", "on_after_batch_transfer", "on_init_end", "on_pre_optimizer_step"]
    + ["on_optimizer_step", "on_substep_end", "on_evaluate", "on_predict", "on_prediction_step", "on_save"]
)
# What parts of these names are called here.
_OURS = {
    "begin": "start", "train_epoch": "epoch", "validation_epoch": "eval", "validation": "eval", "evaluate": "eval_end",
    "train_batch": "batch", "predict_batch": "eval_batch", "test_batch": "eval_batch", "substep": "batch",
    "pre_optimizer_step": "before_optimizer_step",
}  # fmt: skip
# Packages whose base classes have such methods anyway; only the user's own are an error.
_LIBRARIES = frozenset(
    ["accelerate", "builtins", "composer", "deepspeed", "keras", "lightning", "lightning_fabric", "omnitrain", "peft",
     "pytorch_lightning", "timm", "torch", "transformers"]
)  # fmt: skip


def reject_event_methods(**parts: Any) -> None:
    """Raise ConfigError for a method of a model, an optimizer, ... whose name suggests that an event calls it."""
    for argument, part in parts.items():
        kind = part if isinstance(part, type) else type(part)
        members = {} if issubclass(kind, (Callback, TrainHook)) else members_of_user(kind)  # theirs are called
        for name in members:
            if name in EVENTS_OF_TRAINERS and callable(getattr(kind, name)):
                ours = functools.reduce(lambda text, part: text.replace(*part), _OURS.items(), name)
                event = ours if ours.removeprefix("on_") in list(Event) else "on_<event>"
                raise ConfigError(
                    f"`{argument}` ({kind.__name__}) has a method {name}(), which nothing calls. Put it into a "
                    f"callback, a subclass of omnitrain.Callback with {event}(trainer, ...), and pass that in "
                    "`callbacks`; or rename it, if you call it yourself."
                )


def reject_uncalled_methods(model: nn.Module, settings: Settings, trainer_class: type) -> None:
    """Raise ConfigError for a method of the model that another library's trainer calls, and none of ours."""
    if members_of_user(trainer_class).keys() & _RUN_MODELS:
        return
    members = members_of_user(type(model))
    for name, (instead, arguments) in METHODS_OF_MODELS.items():
        if callable(members.get(name)) and all(getattr(settings, argument) is None for argument in arguments):
            raise ConfigError(
                f"`model` ({type(model).__name__}) has a method {name}(), which nothing calls. Use {instead} "
                "instead; or rename it, if you call it yourself."
            )


def members_of_user(cls: type) -> dict[str, Any]:
    """Return what a class and its bases define, without those of libraries."""
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] not in _LIBRARIES:
            members |= vars(base)
    return members


class Hooks:
    """The parts of a training run that can be overridden, and the objects that a trainer consists of."""

    settings: Settings
    backend: Backend
    ranks: Ranks
    device: torch.device
    precision: Precision
    unit: Any
    loss_mean: LossMean
    algorithms: list[Algorithm]
    lr_scheduler: Any
    scheduler_interval: str
    # The methods of transformers' trainer that a subclass of HFTrainer overrides.
    _overridden: frozenset[str] = frozenset()
    # feed.Feed, step.Step, loop.Loop, which import this module
    _feed: Any
    _step: Any
    _loop: Any

    # --- setting up

    def _choose_device(self, device: str | torch.device | None) -> torch.device:
        """Return the device to train on: the one asked for, or the first available of cuda, xpu, mps, cpu."""
        return choose_device(device)

    def _setup_training_components(self) -> None:
        """Put the model on its device and wrap it. `self.optimizer` is built afterwards, unless this sets it."""
        self.backend.prepare()

    def _seed(self) -> None:
        """Seed the generators that training draws from, differently on each rank, so that dropout masks differ."""
        rank = self.ranks.data.rank  # those that share samples drop out the same
        seed_everything(self.settings.seed if rank == 0 else derive_seed(self.settings.seed, rank) & 0x7FFFFFFF)

    # --- an epoch and a step

    def _train_epoch(self, epoch: int) -> float:
        """Train on an epoch, or the rest of one after a resume, and return its mean loss.

        Override it for your own loop: then the events of steps are not emitted, and everything else stays the same.
        """
        return self._loop.train_epoch(epoch)

    def _train_step(self, window: Window) -> bool:
        """Train on one window, and return whether the weights were updated."""
        return self._step.run_window(window)

    # --- a micro-batch

    def _weigh(self, batch: Any) -> float:
        """Return the weight of a micro-batch (on the host) in its window's mean: its labels, or its samples."""
        return self._feed.weigh(batch)

    def _prepare_batch(self, batch: Any) -> Any:
        """Return the batch for the model, on the device."""
        batch, dtype = move_to_device(batch, self.device, non_blocking=True), self.precision.dtypes.inputs
        return batch if dtype is None else cast_inputs(batch, dtype, self.settings.label_names or ())

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return the context for the forward pass and the loss."""
        return self.precision.autocast()

    def _accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context for one micro-batch; after the `last` one of a window, gradients must be complete."""
        return self.backend.accumulating(last)

    def _forward(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return loss and outputs of a batch on the device."""
        return run_unit(self.unit, model, batch)

    def _idle_loss(self, output: StepOutput, loss: torch.Tensor) -> torch.Tensor | None:
        """Return a loss with zero gradients for a micro-batch without labels, if other ranks wait for its backward."""
        return without_effect(output, loss) if self.ranks.world_size > 1 else None

    def _backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`."""
        if not loss.requires_grad:
            raise ConfigError(
                "The loss has no gradient: it depends on no parameter that requires one, or was cut off from them, by "
                ".detach(), .item() or torch.no_grad() in the model, the `loss_fn` or the `unit`, or by a new tensor "
                "made of its value. Return the tensor that was computed from the outputs."
            )
        self.backend.backward(loss)

    # --- the update

    def _scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by `factor`."""
        self.backend.scale_gradients(factor)

    def _clip_gradients(self) -> torch.Tensor:
        """Clip the gradients to `max_grad_norm`, if set, and return their norm before clipping, on the device."""
        return self.backend.clip_gradients(self.settings.max_grad_norm, self._gradient_norm())

    def _gradient_norm(self) -> torch.Tensor:
        """Return the norm of all gradients."""
        return self.backend.gradient_norm()

    def _apply_update(self) -> bool:
        """Step the optimizer; return False if the step was skipped."""
        return self.backend.update()

    # --- outside of steps

    def _backend_logs(self) -> dict[str, float]:
        """Return the values that the backend adds to each row of logs."""
        scaler = self.backend.scaler
        return {"loss_scale": scaler.get_scale()} if scaler.is_enabled() else {}
