"""How fast a run trains: rates per device, where the time goes, and what share of the device's peak is used."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from omnitrain.callbacks.devices import peak_flops
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Callback, Event, TrainerLike
from omnitrain.core.timing import PHASES
from omnitrain.data.sampling import share

logger: logging.Logger = logging.getLogger("omnitrain")


def _of_attention(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _of_attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


_OF_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _of_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _of_attention_backward,
}
"""Attention on a CPU, which PyTorch's counter leaves out."""


class Counted(NamedTuple):
    """How far a run was at a row of logs."""

    seconds: float
    phases: dict[str, float]
    steps: int
    samples: int
    tokens: int


class Throughput(Callback):
    """Adds rates, times and the use of the device to the rows of logs.

    The rates are those of training alone, without evaluations, saves and what comes before the first step, over the
    last rows: `steps_per_second`, `samples_per_second_per_device` and `tokens_per_second_per_device`, tokens being
    those that count, without padding. `data_share` and `waiting_share` are the parts of that time in which this rank
    waited for data and for other ranks. `goodput` is the share of all time since the run was first started that has
    moved the model forward: what a kill has lost, and the time until the restart, do not count.

    The operations of the first step are counted by `torch.utils.flop_counter`, forward and backward, attention
    included, and taken per token, or per sample where there are none: `tflops_per_device` is what each device does in
    a second. `mfu` is the share of the device's peak that the model needs, and `hfu` the share that it does, which is
    more where activations are computed again. Peaks are known for 16 bits on common GPUs; elsewhere there is no `mfu`
    unless `peak` is given. Compiled models cannot be counted: give `flops`.

    Args:
        window: Rows over which rates are taken; the first rows have fewer.
        flops: Operations that one token, or one sample where there are no tokens, needs forward and backward; None
            counts them.
        peak: The most operations that a device can do in a second, such as 989.4e12; None looks it up.

    Raises:
        ConfigError: If a number is not positive.

    >>> callbacks = [Throughput(window=20)]  # Trainer(..., callbacks=callbacks)
    """

    order: ClassVar[int] | int = 10
    asks_alone: ClassVar[bool] | bool = False

    def __init__(self, window: int = 10, flops: float | None = None, peak: float | None = None) -> None:
        for name, value in (("window", window), ("flops", flops), ("peak", peak)):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and value > 0 and (name != "window" or int(value) == value)):
                kind = "a whole number" if name == "window" else "a number"
                raise ConfigError(f"`{name}` of a Throughput must be {kind} greater than 0, got {value!r}.")
        self.window: int = window
        self.peak: float | None = peak
        self.flops: float | None = flops
        """Operations that one token or sample needs, once they are known."""
        self.hardware_flops: float | None = flops
        """Those that are done for it, which are more where activations are computed again."""
        self._rows: deque[Counted] = deque(maxlen=window + 1)
        self._forward = self._backward = 0.0
        self._before: tuple[int, int] = (0, 0)
        self._has_told = False

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Begin to measure, and say what cannot be."""
        self._rows.clear()
        self._rows.append(_now(trainer))
        if trainer.settings.compile and self.flops is None:
            self._tell(trainer, "the model is compiled, and what it computes cannot be counted. Pass `flops`.")
        self._forward = self._backward = 0.0
        if self.flops is not None or trainer.settings.compile:
            trainer.lifecycle.unsubscribe(self, Event.STEP_START, Event.STEP_END)

    def on_step_start(self, trainer: TrainerLike) -> None:
        """Count what this step computes."""
        self._forward = self._backward = 0.0
        self._before = trainer.progress.samples, trainer.progress.tokens
        trainer.lifecycle.set_profiler_ranges(self, self._counting)

    def on_step_end(self, trainer: TrainerLike) -> None:
        """Note what the step has computed; the further ones are not counted."""
        trainer.lifecycle.set_profiler_ranges(self, None)
        samples, tokens = trainer.progress.samples - self._before[0], trainer.progress.tokens - self._before[1]
        units = (tokens or samples) * _computed(trainer, samples)
        if not units or not self._forward:
            return  # nothing but a step that was left out, or the user's own loop
        trainer.lifecycle.unsubscribe(self, Event.STEP_START, Event.STEP_END)
        done = self._forward + self._backward
        recomputes = bool(trainer.settings.gradient_checkpointing)
        # backward computes two products for each of forward: what is beyond that is forward computed again
        self.flops = (3 * self._forward if recomputes else done) / units
        self.hardware_flops = done / units

    def on_train_end(self, trainer: TrainerLike) -> None:
        """Say how much of the time has moved the model forward."""
        trainer.lifecycle.set_profiler_ranges(self, None)
        if not trainer.is_main_process:
            return
        clock, total = trainer.lifecycle.clock, trainer.progress.seconds
        spent = {"training": clock.training(total)} | clock.seconds
        text = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent.items() if seconds >= 0.05)
        logger.info("Time of the run: %s. Goodput %.1f %%.", text or "none", 100 * clock.goodput(total))

    def log_values(self, trainer: TrainerLike) -> Mapping[str, float]:
        """Return the rates since the oldest row of the window."""
        now = _now(trainer)
        first = self._rows[0] if self._rows else now
        self._rows.append(now)
        passed = now.seconds - first.seconds
        spent = {name: now.phases[name] - first.phases[name] for name in PHASES}
        training = passed - spent["evaluation"] - spent["saving"] - spent["setup"]
        if training <= 0.0:
            return {}
        samples, tokens, devices = now.samples - first.samples, now.tokens - first.tokens, trainer.world_size
        values = {
            "steps_per_second": (now.steps - first.steps) / training,
            "samples_per_second_per_device": samples / training / devices,
        }
        if tokens:
            values["tokens_per_second_per_device"] = tokens / training / devices
        values["data_share"] = spent["data"] / training
        if devices > 1:
            values["waiting_share"] = spent["waiting"] / training
        values["goodput"] = trainer.lifecycle.clock.goodput(trainer.progress.seconds)
        return values | self._use_of_device(trainer, (tokens or samples) / training / devices)

    def _use_of_device(self, trainer: TrainerLike, units: float) -> dict[str, float]:
        if self.flops is None or self.hardware_flops is None:
            return {}
        done = units * self.hardware_flops
        values = {"tflops_per_device": done / 1e12}
        precision = trainer.precision.name
        name = _name_of(trainer.device)
        peak = self.peak or peak_flops(name, precision)
        if peak is None:
            self._tell(trainer, f"the peak of {name!r} in {precision} is unknown, so there is no `mfu`. Pass `peak`.")
            return values
        return values | {"mfu": units * self.flops / peak, "hfu": done / peak}

    @contextlib.contextmanager
    def _counting(self, name: str) -> Iterator[None]:
        """Count the operations of a part of the step."""
        if name not in ("forward", "backward"):
            yield
            return
        with FlopCounterMode(display=False, custom_mapping=_OF_CPU) as counter:
            yield
        if name == "forward":
            self._forward += counter.get_total_flops()
        else:
            self._backward += counter.get_total_flops()

    def _tell(self, trainer: TrainerLike, what: str) -> None:
        if trainer.is_main_process and not self._has_told:
            logger.info("Throughput: %s", what)
        self._has_told = True


def _computed(trainer: TrainerLike, samples: int) -> float:
    """Return what share of a step this rank has computed: one of its samples more, or fewer, than another rank."""
    data = trainer.ranks.data
    return len(share(range(samples), data.rank, data.size)) / max(samples, 1) * data.size / trainer.world_size


def _now(trainer: TrainerLike) -> Counted:
    progress = trainer.progress
    steps = progress.step + progress.skipped_steps
    return Counted(progress.seconds, dict(trainer.lifecycle.clock.seconds), steps, progress.samples, progress.tokens)


def _name_of(device: Any) -> str:
    if device.type in ("cuda", "xpu"):
        return str(getattr(torch, device.type).get_device_name(device))
    return str(device.type)
