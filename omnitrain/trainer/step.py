"""One optimizer step: the passes of a window and its update.

Our loop runs a full step with `run_window`. transformers' loop runs the same step in parts: `begin`, `loss_of` for
each micro-batch, `finish`, `end_step`.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn

from omnitrain.arguments import DEFAULTS, Settings
from omnitrain.backends.backend import Backend
from omnitrain.compute.device_runtime import DeviceRuntime, device_runtime
from omnitrain.core.errors import ConfigError, DataError, NonFiniteError, add_location
from omnitrain.core.events import Event, find_overrides
from omnitrain.data.sampling import Window
from omnitrain.data.sets import Sets
from omnitrain.distributed.ranks import Ranks
from omnitrain.model.units import ModelUnit, count_as_sum, no_token_counts
from omnitrain.optim.build import ScheduleLR, needs_closure
from omnitrain.optim.sparse_gradients import parameters_by_layout
from omnitrain.trainer.buffers import Buffers
from omnitrain.trainer.failing_samples import add_dtype_remedy, describe_failing_samples
from omnitrain.trainer.feed import Feed
from omnitrain.trainer.hooks import Hooks
from omnitrain.trainer.lifecycle import Lifecycle, is_callback_error
from omnitrain.trainer.meters import LossMeter, Meters
from omnitrain.trainer.nonfinite import WindowPosition, nonfinite_error
from omnitrain.trainer.out_of_memory import AutoMicrobatch
from omnitrain.trainer.spikes import Spikes

logger: logging.Logger = logging.getLogger("omnitrain")

Result = TypeVar("Result")


# The methods of algorithms that are called in a step.
IN_STEPS = (
    "transform_batch",
    "transform_output",
    "transform_loss",
    "before_second_pass",
    "after_second_pass",
    "before_update",
    "after_update",
)


def modules_in_eval_mode(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that the user has put into evaluation mode.

    A model that is entirely in evaluation mode counts as none: `from_pretrained` leaves models so, and the user
    expects training. The same goes for a part that has `from_pretrained`, unless all of it is frozen.
    """
    modules, ahead = list[nn.Module](), [model] if model.training else []
    while ahead:
        module = ahead.pop()
        if not module.training:
            trains = any(parameter.requires_grad for parameter in module.parameters())
            # `from_pretrained` returns models in evaluation mode, which says nothing about what the user wants
            if trains and hasattr(type(module), "from_pretrained"):
                continue
            modules.append(module)
        ahead += module.children()
    return modules


class FiniteGuard:
    """Decides before each optimizer step whether to take it.

    Reading a number from a GPU in every step would slow the loop down. If the optimizer can skip an update on the
    device (PyTorch's fused ones can, by the `found_inf` that GradScaler also uses), the guard is *deferred*: from the
    first non-finite step on, the device makes no more updates, and the host learns of it some steps later without
    waiting. Otherwise the number is read, which is free on a CPU.
    """

    _MAX_PENDING = 32  # how many steps the host may lag behind before it waits

    def __init__(self, runtime: DeviceRuntime, optimizer: Any, deferred: bool) -> None:
        self._runtime = runtime
        self.deferred: bool = deferred
        self._pending: deque[tuple[int, Any, Any]] = deque()
        if deferred:
            self._found_inf = torch.zeros((), dtype=torch.float32, device=runtime.device)
            self._host_flags = runtime.host_buffer(self._MAX_PENDING)
            self._count = 0
            # the attributes that torch.amp.GradScaler sets for fused optimizers (`_step_supports_amp_scaling`)
            optimizer.found_inf, optimizer.grad_scale = self._found_inf, None

    def should_update(self, finiteness_value: float | torch.Tensor, locate: Callable[[], Any]) -> bool:
        """Return whether to take the step; a deferred guard returns True, and leaves the decision to the device.

        Args:
            finiteness_value: A scalar that is finite if and only if loss and gradients are.
            locate: Returns the result of `first_bad()` in case this step turns out to be the first bad one.
        """
        if not self.deferred:
            return math.isfinite(finiteness_value)  # waits for the device
        bad = ~torch.as_tensor(finiteness_value, device=self._found_inf.device).isfinite()
        # never reset to 0: no update may follow a bad step before the host has seen it
        torch.maximum(self._found_inf, bad.to(self._found_inf.dtype), out=self._found_inf)
        slot = self._count % self._MAX_PENDING
        self._count += 1
        # to pinned memory, as a copy to pageable memory would wait for the device
        self._host_flags[slot].copy_(self._found_inf, non_blocking=True)
        self._pending.append((slot, self._runtime.record_event(), locate()))
        return True

    def first_bad(self, wait: bool = False) -> Any | None:
        """Return the result of `locate` for the first bad step that the device has reported, or None.

        Args:
            wait: Whether to check all steps so far, and wait for them. Otherwise a step is checked once 32 steps are
                pending, when the device is done with it; checking whichever are done could differ between ranks.
        """
        while len(self._pending) >= (1 if wait else self._MAX_PENDING):
            slot, event, location = self._pending.popleft()
            if event is not None:
                event.synchronize()
            if self._host_flags[slot].item():
                self._pending.clear()
                return location
        return None

    def reset(self) -> None:
        """Forget the steps so far, which were undone."""
        if self.deferred:
            self._found_inf.zero_()
            self._pending.clear()

    def release(self, optimizer: Any) -> None:
        """Remove the guard from the optimizer."""
        if self.deferred:
            # otherwise they would also guard steps that the user takes after the run
            del optimizer.found_inf, optimizer.grad_scale
            self.deferred = False


class Step:
    """Trains on one window at a time, by the hooks of a trainer."""

    guard: FiniteGuard
    """Detects losses and gradients that are not finite."""

    def __init__(self, trainer: Hooks, lifecycle: Lifecycle, sets: Sets, feed: Feed) -> None:
        self._trainer = trainer
        self._backend: Backend = trainer.backend
        self._ranks: Ranks = trainer.ranks
        self._runtime = device_runtime(trainer.backend.device)
        self._settings: Settings = trainer.settings
        self._lifecycle = lifecycle
        self._sets = sets
        self._feed = feed
        self.loss: LossMeter = LossMeter(trainer.backend.device, trainer.ranks)
        """The losses of the epoch so far."""
        self.metrics: Meters = Meters(trainer.backend.device, trainer.ranks)
        """The metrics that forward passes returned in the epoch so far."""
        self.latest_metrics: dict[str, float] = {}
        """Their means in the latest row of logs."""
        is_auto = trainer.settings.microbatch_size == "auto"
        self._auto_microbatch = AutoMicrobatch(trainer, feed, lifecycle, self) if is_auto else None
        self.grad_norm: torch.Tensor | None = None
        """The norm of the latest gradients before clipping, on the device; None before the first step."""
        self.rates: list[Any] = []
        """The learning rate of each group of the optimizer in the latest update; empty before the first one."""
        self.window: Window = cast("Any", None)
        """The latest window; None before the first."""
        self.weight: float = 0.0
        """The weight of the current micro-batch in the mean of its step."""
        self.turn: int = 0
        """How many micro-batches of this step were run."""
        self._targets: float | None = None  # those of this window so far, if the unit counts them
        self._before: Any = None  # the means at the beginning of the current step, if it can be skipped
        self._has_warned_of_empty = False
        self._is_in_training = False  # whether this run has put the model into training mode
        self._evaluating: list[nn.Module] = []  # the modules that the user has put into evaluation mode, and stay in it
        self._untrained: list[str] = []  # parameters with a gradient and without a group, of which the user was warned
        self.spikes: Spikes | None = None
        """What to do about spikes; None without a `SpikeGuard`."""
        # The methods of algorithms that change a step, by name, in the order they are called.
        self._transforms: dict[str, list[Callable[..., Any]]] = {}
        # `prepare` sets the rest: whether this is the first step of a run, which checks that anything is trained;
        self._is_first = True
        # whether a step can be skipped, so that its loss has to be subtracted;
        self._may_undo = False
        # whether it is, so that the buffers of the model are copied before it: its passes may put NaN into them;
        self._copies_buffers = False
        self._buffers: Buffers | None = None  # of the epoch
        # whether the trainer's class overrides how gradients are measured or clipped;
        self._has_clip_hook = False
        # whether the loss is scaled, so that the scaler skips updates with gradients that are not finite;
        self._scales_loss = False
        # the unit's `set_step_nr`, if it has one;
        self._set_step_nr: Callable[[int], None] | None = None
        # whether a micro-batch may run more than once in a step;
        self._repeats = False
        # whether the optimizer computes loss and gradients again in its step, as LBFGS does;
        self._needs_closure = False
        # and whether the current loss and gradients are those that it needs first.
        self._is_at_start = False

    def prepare(self) -> None:
        """Prepare for a run: no gradients, and a guard that fits the optimizer."""
        optimizer, settings = self._backend.optimizer, self._settings
        trainer_class, self._scales_loss = type(self._trainer), self._backend.can_skip
        self._has_clip_hook = trainer_class._clip_gradients is not Hooks._clip_gradients
        self._has_clip_hook |= trainer_class._gradient_norm is not Hooks._gradient_norm
        if settings.fp16_loss_scale != DEFAULTS["fp16_loss_scale"] and not self._scales_loss:
            raise ConfigError(
                f"`fp16_loss_scale={settings.fp16_loss_scale!r}` has no effect, as the loss is not scaled. Leave it "
                "out, or set autocast='fp16'."
            )
        self._list_transforms()
        if self._backend.unsupported:
            self._check_support(self._backend.unsupported)
        self._is_first, self._is_in_training = True, False
        self._collect_parameters()
        self._backend.clear_gradients()
        self._backend.reset_scaler()  # an error may have ended an earlier run within a step
        self._backend.check_update()
        self._check_low_precision()
        if self._auto_microbatch is not None:
            self._auto_microbatch.prepare()
        # a `_train_epoch` of the user's own calls step() itself, with its own closure
        self._needs_closure = needs_closure(optimizer) and trainer_class._train_epoch is Hooks._train_epoch
        if self._needs_closure:
            self._check_closure()
        has_second_pass = self._needs_closure or bool(self._transforms["before_second_pass"])
        if has_second_pass and "training_step" in self._trainer._overridden:
            raise ConfigError(
                f"{trainer_class.__name__}.training_step is not called for micro-batches that are run again, as "
                "`optimizer` or `algorithms` ask for. Put what it does into `compute_loss`, or leave one of them out."
            )
        self._repeats = has_second_pass or self._auto_microbatch is not None
        self.spikes = Spikes.find(self, self._trainer) if self._trainer.algorithms else None
        skips_spikes = self.spikes is not None and not self.spikes.rewinds
        self._feed.is_left_out = None if self.spikes is None else self.spikes.guard.is_left_out
        self._may_undo = settings.on_nonfinite != "raise" or self._scales_loss or self._needs_closure or skips_spikes
        # with "raise" the run ends anyway, and with "warn" the update is made
        self._copies_buffers = settings.on_nonfinite == "skip" or self._scales_loss or skips_spikes
        self._set_step_nr = getattr(self._trainer.unit, "set_step_nr", None)
        # a deferred verdict comes some steps late: good enough for an error, too late to skip the step
        is_raised = settings.on_nonfinite == "raise" and not self._scales_loss
        self.guard = FiniteGuard(self._runtime, optimizer, is_raised and self._runtime.can_skip_updates(optimizer))

    def _list_transforms(self) -> None:
        """List the methods of algorithms that change a step."""
        for place in IN_STEPS:
            self._transforms[place] = find_overrides(self._trainer.algorithms, place)
        for place in ("transform_output", "transform_loss"):
            self._transforms[place].reverse()

    def _check_support(self, unsupported: Mapping[str, str]) -> None:
        """Reject algorithms that the backend does not support, and warn about callbacks whose events it cannot give."""
        for algorithm in self._trainer.algorithms:
            used = [place for place in IN_STEPS if find_overrides([algorithm], place)]
            lacking = [unsupported[need] for need in (*used, *algorithm.needs) if need in unsupported]
            if lacking:
                raise ConfigError(
                    f"`algorithms` holds {type(algorithm).__name__}, which cannot work here: {lacking[0]}. Leave it "
                    "out, or train with DDP or FSDP."
                )
        reason = unsupported.get("before_update")
        names = self._lifecycle.listeners_to(Event.BEFORE_CLIP, Event.AFTER_CLIP)
        if reason is not None and names:
            logger.warning(
                "BEFORE_CLIP and AFTER_CLIP, to which %s listens, do not come here: %s. The norm is in each row of "
                "logs.", ", ".join(names), reason,
            )  # fmt: skip

    def _check_low_precision(self) -> None:
        """Warn about weights that train in 16 bits, unless the backend updates a 32-bit copy; reject averages of them.

        Raises:
            ConfigError: If an algorithm transforms them.
        """
        trained = {parameter.dtype for parameter in self._backend.parameters if parameter.requires_grad}
        dtypes = trained & {torch.bfloat16, torch.float16}
        if not dtypes or self._backend.has_master_weights:
            return
        kind, transforms = min(dtypes, key=str), find_overrides(self._trainer.algorithms, "transform_weights")
        if transforms:
            name = type(cast("Any", transforms[0]).__self__).__name__
            raise ConfigError(
                f"`algorithms` holds {name}, and the weights are of {kind}, in which what one step adds is lost. Load "
                "the model in float32 (dtype=torch.float32), and pass autocast='bf16' to compute in 16 bits."
            )
        if self._ranks.is_main:
            logger.warning(
                "Weights that train are of %s: an update that is smaller than about 1/%d of a weight is lost. Load the "
                "model in float32 (dtype=torch.float32) and pass autocast='bf16', which computes in 16 bits as well.",
                kind, round(2 / torch.finfo(kind).eps),
            )  # fmt: skip

    def begin_epoch(self) -> None:
        """Prepare for an epoch: a callback may have frozen or unfrozen layers since the last one."""
        self._put_into_training()
        self._buffers = Buffers(self._backend.model) if self._copies_buffers else None
        self._collect_parameters()
        if self._auto_microbatch is not None:
            self._auto_microbatch.begin_epoch()

    def _put_into_training(self) -> None:
        """Put the model into training mode at the beginning of a run; after that the user decides its modes.

        If the full model is in evaluation mode at the beginning of a later epoch, it is put back into training mode.
        """
        model, wrapped = self._backend.model, self._backend.wrapped
        if self._is_in_training and wrapped.training and model.training:
            return
        if not self._is_in_training:  # only now, since a callback may have set modes when the run began
            self._evaluating = modules_in_eval_mode(model)
        # the wrapper too: DDP and DeepSpeed have a flag of their own, which decides whether they synchronize buffers
        wrapped.train()
        for module in self._evaluating:
            module.training = False
        if self._evaluating and not self._is_in_training:
            names = [name for name, module in model.named_modules() if module in self._evaluating]
            logger.info(
                "Modules that are in evaluation mode stay in it while the rest trains: %s%s. Call train() on them "
                "before the run, if they are to train.", ", ".join(names[:3]), ", ..." if len(names) > 3 else "",
            )  # fmt: skip
        self._is_in_training = True

    def _collect_parameters(self) -> None:
        """Collect the parameters that train; warn once about those with a gradient that are in no optimizer group."""
        self._backend.collect_parameters()
        untrained = self._backend.ungrouped_parameters()
        if set(untrained) - set(self._untrained):
            logger.warning(
                "%d parameters require a gradient and are in no group of the optimizer, so they are not trained: %s%s. "
                "Freeze them, or add them: trainer.optimizer.add_param_group({'params': [...]}).",
                len(untrained), ", ".join(untrained[:3]), ", ..." if len(untrained) > 3 else "",
            )  # fmt: skip
        self._untrained = untrained
        self._backend.check_layouts(*parameters_by_layout(self._backend.model))  # sparse gradients that cannot train

    # --- the step

    def run_window(self, window: Window) -> bool:
        """Train on a window, and return whether the weights were updated."""
        self.begin(window)
        if window.weight:  # otherwise it has nothing to predict on any rank
            self.run(self._run_micro_batches)
        return self.end_step(self.finish() and self.update())

    def dry_run(self, window: Window) -> None:
        """Run the passes of a window without an update; weights, means, modes and gradients stay unchanged.

        Buffers, what algorithms keep, and random numbers, do not.
        """
        trainer, backend, snapshot = self._trainer, self._backend, self.snapshot()
        modes = [(module, module.training) for module in backend.wrapped.modules()]
        gradients = [(parameter, parameter.grad) for parameter in backend.model.parameters()]
        self._list_transforms()
        backend.collect_parameters()
        backend.clear_gradients()
        self._is_in_training = False
        try:
            self._put_into_training()
            self.restart(window)
            for batch in self.window.batches:
                with trainer._accumulating(last=backend.dry_run_completes_gradients):
                    loss = self.loss_of(batch)
                    if loss is not None:
                        trainer._backward(loss * 0)  # DeepSpeed accumulates gradients in its own buffers
        finally:
            self._is_in_training = False
            backend.discard_gradients()
            self.rollback(snapshot)
            for module, mode in modes:
                module.training = mode
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _run_micro_batches(self) -> None:
        trainer, emit = self._trainer, self._lifecycle.emit_in_step
        for batch in self.window.batches:
            with trainer._accumulating(last=self.completes):
                loss = self.loss_of(batch)
                if loss is not None:
                    trainer._backward(loss)
                    if emit is not None:
                        emit(Event.AFTER_BACKWARD)
            if emit is not None:
                emit(Event.BATCH_END)

    def run(self, attempt: Callable[[], Result]) -> Result:
        """Return what `attempt()` returns, which runs all micro-batches; smaller ones where memory has run out."""
        return attempt() if self._auto_microbatch is None else self._auto_microbatch.run(attempt)

    def update(self) -> bool:
        """Update the weights, and return whether that was done."""
        return self._update_by_closure() if self._needs_closure else self._trainer._apply_update()

    def begin(self, window: Window) -> None:
        """Begin a window."""
        if self._may_undo:
            self._before = self.snapshot()
        if self._buffers is not None:
            self._buffers.snapshot()
        if self._needs_closure:
            self.loss.rollback((0.0, 0.0))  # the loss of the window only
        if self.spikes is not None:
            self.spikes.begin_step()
        if self._set_step_nr is not None:
            self._set_step_nr(self._lifecycle.progress.step + 1)
        self.restart(window)

    def restart(self, window: Window) -> None:
        """Go to the first micro-batch of a window, which may be the same samples in other micro-batches."""
        self.window, self.turn, self._targets = window, 0, None
        self._backend.begin_window()

    @property
    def completes(self) -> bool:
        """Whether the gradients are to be complete after the next micro-batch."""
        is_last = self.turn == len(self.window.batches) - 1  # "auto" averages over the ranks after the last one
        return is_last and (self._auto_microbatch is None or self._ranks.world_size == 1)

    def loss_of(self, batch: Any) -> torch.Tensor | None:
        """Run the next forward pass; return its part of the window's loss, or None if no backward pass is needed."""
        turn, last = self.turn, self.turn == len(self.window.batches) - 1
        self.turn += 1
        self._ranks.progress_count += 1
        try:
            # the count above is how the watchdog of the other ranks knows that this one is alive
            return self._loss_of(batch, self.window.weights[turn], last)
        except Exception as error:
            if is_callback_error(error):
                raise
            # PyTorch has no class for this error; the text is that of torch.nn.functional.batch_norm
            if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
                raise self._too_few_to_normalize(turn) from error
            add_dtype_remedy(error, self._backend.model, batch, self._settings.dtypes)
            place, loader, turn = self._place(), self._sets.train, (self.window.origins or range(turn + 1))[turn]
            if loader is not None:
                forward = functools.partial(self._backend.forward, self._trainer._forward)
                mode = functools.partial(self._backend.eval_mode, self._settings.seed)
                position = place.epoch, place.position, turn
                samples = describe_failing_samples(error, self._trainer, loader, position, forward, mode)
                if samples:
                    error.add_note(f"Raised for {samples}.")
            add_location(error, f"step {place.step} (epoch {place.epoch + 1}), rank {self._ranks.rank}")
            raise

    def _too_few_to_normalize(self, turn: int) -> DataError:
        """Return the error for a layer that normalizes over a batch of a single sample."""
        place, size = self._place(), self._lifecycle.progress.epoch_size
        is_rest = size is not None and place.position + place.samples >= size
        cause = f", which is what the batches leave over of {size} samples" if is_rest else ""
        remedy = (
            "Choose a `batch_size` that leaves more, or pass `drop_last=True`, which leaves out the last step of an "
            "epoch if it is short"
        )
        if self._settings.microbatch_size is not None:
            remedy = "Choose a `microbatch_size`, and a `batch_size`, that leave more"
        return DataError(
            f"Micro-batch {turn + 1} of step {place.step} (epoch {place.epoch + 1}, rank {self._ranks.rank}) has a "
            f"single row{cause}, and BatchNorm, or a layer like it, cannot take mean and variance of one value per "
            f"channel. {remedy}; LayerNorm and GroupNorm take any batch."
        )

    def _loss_of(self, batch: Any, weight: float, last: bool) -> torch.Tensor | None:
        trainer, window, emit = self._trainer, self.window, self._lifecycle.emit_in_step
        self.weight = weight
        if self._repeats:
            batch = copy.deepcopy(batch)  # the model may change it in place
        batch = trainer._prepare_batch(batch)
        for transform in self._transforms["transform_batch"]:
            batch = transform(trainer, batch)
        if emit is not None:
            emit(Event.BATCH_START, batch, self.turn - 1)
        with trainer._autocast():
            output = self._backend.forward(trainer._forward, batch)
            if emit is not None:
                emit(Event.AFTER_FORWARD, batch, output)
            if self._settings.grad_reduction == "sum":
                count_as_sum(output, weight)
            for transform in self._transforms["transform_output"]:
                output = transform(trainer, output)
            if self._transforms["transform_batch"]:
                self._feed.count_classes(output, weight)
            loss = output.required_loss()
            for transform in self._transforms["transform_loss"]:
                loss = transform(trainer, loss)
        if emit is not None:
            emit(Event.AFTER_LOSS, loss)
        if output.num_targets is None:
            if self._settings.grad_reduction == "per-token-mean" and not isinstance(trainer.unit, ModelUnit):
                raise no_token_counts()
            self.loss.add(loss, weight)
            count: float = weight
        else:  # the loss is a sum over targets, which only the forward pass could count
            count = float(output.num_targets) if weight else 0
            # the gradients are divided by the sum over all ranks in `finish`, which is known after the last micro-batch
            self._targets = (self._targets or 0) + count
            self.loss.add(loss / (count or 1), count)
            weight = 1.0 if count else 0.0
        if output.metrics is not None:
            self.metrics.add(output.metrics, count)
        # the mean of nothing is NaN, and 0 x NaN is NaN
        divisor = window.divisor
        if not weight:
            scaled = trainer._idle_loss(output, loss)
        else:
            # a factor of 1 would still be one more kernel, and one more node for backward
            scaled = loss if weight == divisor else loss * (weight / divisor)
        if last and self._ranks.world_size > 1 and scaled is not None:
            # All ranks must see a loss that is not finite: they see its gradients, once these are averaged.
            total = self.loss.sum
            if isinstance(total, torch.Tensor):
                scaled = scaled * (total * 0 + 1).to(scaled.dtype)
            elif not math.isfinite(total):
                scaled = scaled * math.nan
        return scaled

    def finish(self) -> bool:
        """Complete the gradients, call the callbacks, and return whether to make the update."""
        if not self.window.weight or (self._targets is not None and not self._divide_by(self._targets)):
            if not self._has_warned_of_empty:
                self._has_warned_of_empty = True
                logger.warning(
                    "No sample of step %d has a label that counts, on any rank: the weights are not updated. Such "
                    "steps are counted in `progress.skipped_steps`; later ones are not reported.",
                    self._lifecycle.progress.step + 1,
                )
            return False
        if self._is_first:
            self._is_first = False
            self._check_gradients()
        if self._transforms["before_second_pass"]:
            self._run_second_pass()
        # DeepSpeed steps inside of its backward pass, so nothing can come between gradients and update
        if self._backend.clips_in_update:
            self._lifecycle.emit(Event.BEFORE_OPTIMIZER_STEP)
            self.grad_norm = self._backend.clip_gradients(self._settings.max_grad_norm)
        else:
            if self._scales_loss:  # before the norm is taken, which would be that of scaled gradients
                self._backend.scaler.unscale_(self._backend.optimizer)
            self.grad_norm = self._clip(self._lifecycle.emit_in_step)
            self._lifecycle.emit(Event.BEFORE_OPTIMIZER_STEP)
        if self._should_update(self.grad_norm):
            return True
        self._backend.reset_scaler()
        return False

    def _clip(self, emit: Callable[..., None] | None = None) -> torch.Tensor:
        """Have algorithms change the gradients, and clip them; return their norm before either."""
        trainer, changes = self._trainer, self._transforms["before_update"]
        if emit is not None:
            emit(Event.BEFORE_CLIP)
        first_norm = trainer._gradient_norm() if changes else None
        for change in changes:
            change(trainer)
        if self._has_clip_hook:
            norm = trainer._clip_gradients()
        else:
            norm = self._backend.clip_gradients(self._settings.max_grad_norm)
        # what is logged is the norm of the gradients of the loss, whatever algorithms make of them
        norm = norm if first_norm is None else first_norm
        if emit is not None:
            emit(Event.AFTER_CLIP, norm)
        return norm

    def _check_gradients(self) -> None:
        """Raise an error if the first step gave no gradients, or no tokens to a schedule that follows them."""
        if not self._backend.has_gradients():
            raise ConfigError(
                "No parameter of the optimizer got a gradient in the first step, so nothing would be trained. The loss "
                "depends on none of them: is it computed by another model than the one that was passed (by a `unit` "
                "that holds its own, say), under torch.no_grad(), or were all of them frozen since?"
            )
        sparse, dense = dict[int, str](), dict[int, str]()
        for name, parameter in self._backend.model.named_parameters():
            if parameter.grad is not None:
                (sparse if parameter.grad.is_sparse else dense)[id(parameter)] = name
        self._backend.check_layouts(sparse, dense)
        scheduler = self._trainer.lr_scheduler
        if not isinstance(scheduler, ScheduleLR) or not scheduler.follows:
            return
        if "tok" in scheduler.units and not self.window.tokens:
            raise DataError(
                f"`lr_scheduler={scheduler.schedule!r}` follows the tokens of the run, but the batches have none: they "
                "are counted in 'attention_mask', 'input_ids' or labels. Give lengths in steps, samples or time."
            )

    def end_step(self, applied: bool) -> bool:
        """Step the schedule if the update was made, clear the gradients, and return `applied`."""
        trainer, backend, emit = self._trainer, self._backend, self._lifecycle.emit_in_step
        if applied:
            # tensors are copied, because schedules change them in place
            self.rates = [
                rate.clone() if isinstance(rate := group["lr"], torch.Tensor) else rate
                for group in backend.optimizer.param_groups
            ]
            for update in self._transforms["after_update"]:
                update(trainer)
            if emit is not None:
                emit(Event.AFTER_OPTIMIZER_STEP)
        else:
            scaler, least = backend.scaler, self._settings.fp16_loss_scale[1]
            if scaler.is_enabled() and scaler.get_scale() < least:
                raise NonFiniteError(
                    f"The fp16 loss scale fell to {scaler.get_scale():g}, below its minimum {least:g}, at step "
                    f"{self._lifecycle.progress.step + 1}: the gradients overflow whatever the scale. Lower the "
                    "learning rate, use autocast='bf16', or lower the minimum in `fp16_loss_scale`."
                )
            if self._may_undo:
                self.rollback(self._before)
            if self._buffers is not None:
                self._buffers.restore()
        # also after a skipped step: a schedule by samples or time moves on, one by updates checks `applied`
        if trainer.lr_scheduler is not None and trainer.scheduler_interval == "step":
            self.step_schedule(trainer.lr_scheduler, applied)
        if emit is not None:
            emit(Event.BEFORE_ZERO_GRAD)
        backend.clear_gradients()
        if emit is not None:
            emit(Event.AFTER_ZERO_GRAD)
        return applied

    def step_schedule(self, scheduler: Any, applied: bool = True, ends_epoch: bool = False) -> None:
        """Set the rates of the next step, or of the next epoch.

        Without an update (`applied=False`), a schedule that counts updates stays where it is; one that follows samples,
        tokens or time does not, as these went on.
        """
        try:
            if isinstance(scheduler, ScheduleLR) and scheduler.follows:
                self._follow(scheduler, applied, ends_epoch)
            elif applied:
                scheduler.step()
        except Exception as error:
            error.add_note(
                f"Raised by `lr_scheduler`, a {type(scheduler).__name__}, at the end of step "
                f"{self._lifecycle.progress.step + 1}. One that is made for a number of steps needs those of the run; "
                "a name, such as 'cosine', finds them."
            )
            raise

    def _follow(self, scheduler: ScheduleLR, applied: bool, ends_epoch: bool) -> None:
        """Set the rates by where the run is at the end of this step, or of this epoch."""
        progress, window = copy.copy(self._lifecycle.progress), self.window
        if ends_epoch:
            progress.close_epoch(complete=True)
        else:
            progress.advance(window.samples, window.tokens, not applied)
        if "s" in scheduler.units:
            self._lifecycle.tick()
            seconds = self._lifecycle.progress.seconds
            if self._ranks.world_size > 1:  # each has a clock of its own, and the rate must be one
                (seconds,) = self._ranks.sum("the clock of a schedule", seconds if self._ranks.is_main else 0.0)
            progress.seconds = seconds
        scheduler.move(progress, applied)

    def _run_second_pass(self) -> None:
        """Run the window's micro-batches once more, at weights that algorithms have moved; its loss is not counted."""
        trainer, snapshot = self._trainer, self.snapshot()
        for move in self._transforms["before_second_pass"]:
            move(trainer)
        try:
            self._rerun()
        finally:
            self.rollback(snapshot)
            for put_back in reversed(self._transforms["after_second_pass"]):
                put_back(trainer)

    def _rerun(self) -> None:
        """Compute the gradients of the window again."""
        self._backend.clear_gradients()
        self.restart(self.window)
        self.run(self._run_micro_batches)
        if self._targets is not None:
            self._divide_by(self._targets)

    # --- optimizers with a closure

    def _check_closure(self) -> None:
        settings, backend = self._settings, self._backend
        what = f"`optimizer` ({type(backend.optimizer).__name__}) takes loss and gradients several times in a step"
        if "closure" in backend.unsupported:
            raise ConfigError(
                f"{what}, which cannot work here: {backend.unsupported['closure']}. Use DDP or one process."
            )
        second = [
            algorithm for algorithm in self._trainer.algorithms if find_overrides([algorithm], "before_second_pass")
        ]
        reasons = {
            "autocast='fp16'": (backend.can_skip, "has a loss scale that may leave an update out", "autocast='bf16'"),
            f"max_grad_norm={settings.max_grad_norm!r}": (
                settings.max_grad_norm is not None, "would clip what it compares with each other", "max_grad_norm=None"
            ),
            "microbatch_size='auto'": (
                self._auto_microbatch is not None, "could not begin such a step again", "a number"
            ),
            f"on_nonfinite={settings.on_nonfinite!r}": (
                settings.on_nonfinite != "raise", "decides on a step before it is made", "on_nonfinite='raise'"
            ),
            f"algorithms=[{type(second[0]).__name__ if second else ''}]": (
                second, "moves the weights between its own two passes", "no such algorithm"
            ),
        }  # fmt: skip
        for argument, (is_set, reason, remedy) in reasons.items():
            if is_set:
                raise ConfigError(f"{what}, and `{argument}` {reason}. Pass {remedy}, or another optimizer.")

    def _update_by_closure(self) -> bool:
        """Update the weights with a closure that runs the window's micro-batches; the first pass is logged."""
        backend, first, before = self._backend, self.snapshot(), self._before
        weights = [
            (parameter, parameter.detach().clone()) for parameter in backend.parameters if parameter.requires_grad
        ]
        # others may have moved the weights before they call it
        self._is_at_start = isinstance(backend.optimizer, torch.optim.LBFGS)
        backend.closure = self._closure
        try:
            return self._trainer._apply_update()
        except NonFiniteError:
            with torch.no_grad():
                for parameter, value in weights:
                    parameter.copy_(value)
            raise
        finally:
            backend.closure = None
            self.rollback(first)
            self.loss.rollback((before[0][0] + first[0][0], before[0][1] + first[0][1]))

    def _closure(self) -> torch.Tensor:
        """Return the loss of the window at the present weights, over all ranks, and add up its gradients."""
        if not self._is_at_start:
            self.loss.rollback((0.0, 0.0))
            with torch.enable_grad():
                self._rerun()
            if not math.isfinite(self._finiteness_value(self._clip())):
                raise self._nonfinite_error(self._place())
        self._is_at_start = False
        total, weight = self._ranks.sum_shares("the loss of a closure", float(self.loss.sum), self.loss.weight)
        value = total if self._settings.grad_reduction == "sum" else total / weight
        return torch.tensor(value, dtype=torch.float64)

    def _divide_by(self, targets: float) -> bool:
        """Divide the gradients by the targets of the window, which the forward passes counted; return False if none."""
        if self._settings.grad_reduction == "sum":
            return True
        (targets,) = self._ranks.sum_shares("the targets of a step", targets)
        if targets:
            self._trainer._scale_gradients(self.window.divisor * self._ranks.data.size / targets)
        return bool(targets)

    # --- means

    def snapshot(self) -> Any:
        """Return the state of the means, for `rollback`."""
        return self.loss.snapshot(), self.metrics.snapshot()

    def rollback(self, snapshot: Any) -> None:
        """Remove what was added since `snapshot()`."""
        self.loss.rollback(snapshot[0])
        self.metrics.rollback(snapshot[1])

    def means_since_last(self) -> tuple[float, dict[str, float]]:
        """Return the mean loss (NaN without any) and the metrics over all ranks since the last call."""
        local_sums = *self.loss.since_last(), len(self.metrics)
        total, weight, name_count = self._ranks.sum_shares("the loss for a log", *local_sums)
        # ranks may have different names, or none, so all are gathered if any rank has one
        self.latest_metrics = self.metrics.means_since_last() if name_count else {}
        return total / weight if weight else math.nan, self.latest_metrics

    # --- losses and gradients that are not finite

    def _should_update(self, norm: torch.Tensor) -> bool:
        """Return whether to make the update, under the policy for numbers that are not finite."""
        if self.spikes is not None and not self.spikes.admits(norm):
            return False
        if self.guard.should_update(self._finiteness_value(norm), self._place):
            if self.guard.deferred:
                self.raise_if_nonfinite()
            return True
        place, policy = self._place(), self._settings.on_nonfinite
        if policy == "raise" and self.spikes is not None:
            self.spikes.expect_nonfinite()
            return False
        if policy == "raise":
            raise self._nonfinite_error(place)
        skips = policy == "skip"
        todo = "the step is skipped" if skips else "the update is made all the same (on_nonfinite='warn')"
        logger.warning("The loss or a gradient is not finite at step %d: %s.", place.step, todo)
        if not skips:
            self.rollback(self._before)
        return not skips

    def _place(self) -> WindowPosition:
        progress = self._lifecycle.progress
        return WindowPosition(progress.step + 1, progress.epoch, progress.samples_in_epoch, self.window.samples)

    def _finiteness_value(self, norm: torch.Tensor) -> float | torch.Tensor:
        """Return a number that is finite if and only if the losses so far and the gradients are."""
        if self._scales_loss:  # the scaler handles an infinite gradient: it skips the step
            if self._ranks.world_size == 1 or math.isfinite(norm):
                return self.loss.sum
            # a loss that is not finite on any rank: another scale on each of them would change the gradients
            is_bad = not math.isfinite(self.loss.sum)
            return math.nan if any(self._ranks.sum("the losses of a step that is not finite", is_bad)) else 0.0
        if self._ranks.world_size > 1:
            return norm
        return self.loss.sum + (norm.item() if isinstance(self.loss.sum, float) else norm)

    def raise_if_nonfinite(self, wait: bool = False) -> None:
        """Raise NonFiniteError for a bad step that the device has reported; with `wait`, check all steps so far."""
        place = self.guard.first_bad(wait)
        if place is not None and self.spikes is None:  # which judges it itself
            raise self._nonfinite_error(place)

    def _nonfinite_error(self, place: WindowPosition) -> NonFiniteError:
        return nonfinite_error(self._trainer, self._sets.train, place)

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the losses of all ranks, what was named there, the latest norm and rates: numbers and lists."""
        local = self.loss.state_dict(), self.metrics.state_dict()
        everywhere = self._ranks.one_per_share(self._ranks.gather("the losses for a checkpoint", local))
        losses, metrics = zip(*everywhere, strict=True)
        return {
            "loss": list(losses),
            **({"metrics": list(metrics), **self.metrics.object_results(metrics)} if any(metrics) else {}),
            "grad_norm": None if self.grad_norm is None else float(self.grad_norm),
            "learning_rates": list(map(float, self.rates)),
            **({} if self._auto_microbatch is None else {"microbatch_size": self._feed.microbatch_size}),
            "loss_mean": self._trainer.loss_mean.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`, on any number of ranks."""
        norm = state["grad_norm"]
        self.loss.load_state_dict(state["loss"])
        self.metrics.load_state_dict(state.get("metrics", []), state.get("metric_results", {}))
        self.grad_norm = None if norm is None else torch.tensor(norm, dtype=torch.float64)
        self.rates = list(state["learning_rates"])
        self._trainer.loss_mean.load_state_dict(state["loss_mean"])
        if self._auto_microbatch is not None:
            self._feed.microbatch_size = state.get("microbatch_size")
