"""Training rates, time shares and device utilization in logs."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from omnitrain.compute.device_runtime import device_runtime
from omnitrain.core.errors import check_number
from omnitrain.core.events import Callback, Event, TrainerLike
from omnitrain.core.progress import PHASES, Progress
from omnitrain.data.sampling import share

logger: logging.Logger = logging.getLogger("omnitrain")

Shape = tuple[int, ...]


def _forward_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, _with_heads_of(query, key), _with_heads_of(query, value))


def _backward_flops(grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, query, _with_heads_of(query, key), _with_heads_of(query, value))


def _with_heads_of(query: Shape, shape: Shape) -> Shape:
    return (shape[0], query[1], *shape[2:])


# PyTorch's counter misses attention on a CPU, and that of older versions fails if queries share keys and values.
_ATTENTION_FLOPS: dict[Any, Callable[..., int]] = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{suffix}"): count
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for suffix, count in (("", _forward_flops), ("_backward", _backward_flops))
}
# Dense TFLOP/s of 16-bit matrix products with 32-bit accumulation, from data sheets; specific names come first.
_DENSE_16_BIT = {
    "B200": 2250.0, "H200": 989.4, "H100 PCIe": 756.0, "H100 NVL": 835.5, "H100": 989.4, "A100": 312.0, "L40S": 362.05,
    "L4": 121.0, "A10": 125.0, "V100": 125.0, "T4": 65.0, "MI300X": 1307.4, "MI250X": 383.0, "RTX 5090": 209.5,
    "RTX 4090": 165.2, "RTX 3090": 71.0,
}  # fmt: skip
_NO_BF16 = ("V100", "T4")


class Throughput(Callback):
    """Adds rates, time shares and device utilization to the rows of logs.

    Rates are over the last rows and exclude evaluations, saves and the time before the first step:
    `steps_per_second`, `samples_per_second_per_device` and `tokens_per_second_per_device` (without padding).
    `data_share` and `waiting_share` are the shares of that time in which this rank waited for data and for other
    ranks. `goodput` is the share of productive training in all time since the first start of the run: steps lost in
    a kill, and the time until the restart, do not count.

    The operations of the first step are counted by `torch.utils.flop_counter`, forward and backward, with attention,
    per token, or per sample without tokens. `tflops_per_device` is what each device computes per second. `mfu` is the
    share of the device's peak that the model requires; `hfu` includes recomputed activations. Peaks are known for
    16 bits on common GPUs; elsewhere `mfu` requires `peak`. Operations of compiled models cannot be counted: pass
    `flops`.

    Args:
        window: Rows over which rates are taken; the first rows have fewer.
        flops: Operations per token, or per sample without tokens, forward and backward; None counts them.
        peak: Peak operations per second of a device, such as 989.4e12; None looks it up.

    Raises:
        ConfigError: If a number is not positive.

    >>> callbacks = [Throughput(window=20)]  # Trainer(..., callbacks=callbacks)
    """

    order: ClassVar[int] | int = 10
    asks_alone: ClassVar[bool] | bool = False

    def __init__(self, window: int = 10, flops: float | None = None, peak: float | None = None) -> None:
        check_number("window", window, least=1, is_whole=True)
        for name, value in (("flops", flops), ("peak", peak)):
            if value is not None:
                check_number(name, value, above=0)
        self.window: int = int(window)
        self.peak: float | None = peak
        self.flops: float | None = flops
        """Operations per token or sample, once known."""
        self.hardware_flops: float | None = flops
        """Operations per token or sample including recomputed activations."""
        # The progress and the seconds of each phase at the latest rows.
        self._rows: deque[tuple[Progress, dict[str, float]]] = deque(maxlen=self.window + 1)
        self._flops = {"forward": 0.0, "backward": 0.0}
        self._start_counts: tuple[int, int] = (0, 0)
        self._has_reported = False

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Start measuring, and report a model whose operations cannot be counted."""
        self.on_checkpoint_loaded(trainer)
        if trainer.settings.compile and self.flops is None:
            self._report(trainer, "the operations of a compiled model cannot be counted. Pass `flops`.")
        if self.flops is not None or trainer.settings.compile:
            trainer.lifecycle.unsubscribe(self, Event.STEP_START, Event.STEP_END)

    def on_checkpoint_loaded(self, trainer: TrainerLike) -> None:
        """Take rates from a state on to which the run goes back."""
        self._rows.clear()
        self._rows.append(_totals(trainer))

    def on_step_start(self, trainer: TrainerLike) -> None:
        self._flops = {"forward": 0.0, "backward": 0.0}
        self._start_counts = trainer.progress.samples, trainer.progress.tokens
        trainer.lifecycle.set_profiler_ranges(self, self._count_flops)

    def on_step_end(self, trainer: TrainerLike) -> None:
        """Store the operations of the step; later steps are not counted."""
        trainer.lifecycle.set_profiler_ranges(self, None)
        samples = trainer.progress.samples - self._start_counts[0]
        tokens = trainer.progress.tokens - self._start_counts[1]
        data = trainer.ranks.data
        computed = len(share(range(samples), data.rank, data.size))  # of the samples here; ranks may differ by one
        units = (tokens or samples) * computed / max(samples, 1) * data.size / trainer.world_size
        forward, flops = self._flops["forward"], sum(self._flops.values())
        if not units or not forward:
            return  # a skipped step, or a custom loop
        trainer.lifecycle.unsubscribe(self, Event.STEP_START, Event.STEP_END)
        recomputes = bool(trainer.settings.gradient_checkpointing)
        # backward has two products for each one of forward; the rest is recomputed forward
        self.flops = (3 * forward if recomputes else flops) / units
        self.hardware_flops = flops / units

    def on_train_end(self, trainer: TrainerLike) -> None:
        trainer.lifecycle.set_profiler_ranges(self, None)
        if not trainer.is_main_process:
            return
        clock, total = trainer.lifecycle.clock, trainer.progress.seconds
        spent = {"training": clock.training(total)} | clock.seconds
        text = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent.items() if seconds >= 0.05)
        logger.info("Time of the run: %s. Goodput %.1f %%.", text or "none", 100 * clock.goodput(total))

    def log_values(self, trainer: TrainerLike) -> Mapping[str, float]:
        """Return the rates since the oldest row of the window."""
        last, last_phases = _totals(trainer)
        first, first_phases = self._rows[0] if self._rows else (last, last_phases)
        self._rows.append((last, last_phases))
        elapsed = last.seconds - first.seconds
        spent = {name: last_phases[name] - first_phases[name] for name in PHASES}
        training = elapsed - spent["evaluation"] - spent["saving"] - spent["setup"]
        if training <= 0.0:
            return {}
        samples, tokens, devices = last.samples - first.samples, last.tokens - first.tokens, trainer.world_size
        values = {
            "steps_per_second": (last.step + last.skipped_steps - first.step - first.skipped_steps) / training,
            "samples_per_second_per_device": samples / training / devices,
        }
        if tokens:
            values["tokens_per_second_per_device"] = tokens / training / devices
        values["data_share"] = spent["data"] / training
        if devices > 1:
            values["waiting_share"] = spent["waiting"] / training
        values["goodput"] = trainer.lifecycle.clock.goodput(trainer.progress.seconds)
        return values | self._utilization(trainer, (tokens or samples) / training / devices)

    def _utilization(self, trainer: TrainerLike, units: float) -> dict[str, float]:
        if self.flops is None or self.hardware_flops is None:
            return {}
        flops = units * self.hardware_flops
        values = {"tflops_per_device": flops / 1e12}
        precision, name = trainer.precision.name, device_runtime(trainer.device).name
        peak = self.peak or peak_flops(name, precision)
        if peak is None:
            message = f"the peak of {name!r} in {precision} is unknown, so `mfu` is not logged. Pass `peak`."
            self._report(trainer, message)
            return values
        return values | {"mfu": units * self.flops / peak, "hfu": flops / peak}

    @contextlib.contextmanager
    def _count_flops(self, name: str) -> Iterator[None]:
        """Count the operations of a part of the step."""
        if name not in self._flops:
            yield
            return
        with FlopCounterMode(display=False, custom_mapping=_ATTENTION_FLOPS) as counter:
            yield
        self._flops[name] += counter.get_total_flops()

    def _report(self, trainer: TrainerLike, message: str) -> None:
        if trainer.is_main_process and not self._has_reported:
            logger.info("Throughput: %s", message)
        self._has_reported = True


def _totals(trainer: TrainerLike) -> tuple[Progress, dict[str, float]]:
    return copy.copy(trainer.progress), dict(trainer.lifecycle.clock.seconds)


def peak_flops(name: str, precision: str) -> float | None:
    """Return the peak operations per second of a device, or None if unknown.

    Args:
        name: The device name in PyTorch, such as "NVIDIA H100 80GB HBM3".
        precision: "fp32", "bf16", "fp16" or "fp8"; only 16-bit peaks are known.

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bf16"), peak_flops("NVIDIA H100 PCIe", "bf16"), peak_flops("cpu", "bf16")
    (989400000000000.0, 756000000000000.0, None)
    """
    if precision not in ("bf16", "fp16"):
        return None
    words = set(name.replace("-", " ").split())
    if "Laptop" in words:  # a slower chip under the same name
        return None
    for model, peak in _DENSE_16_BIT.items():
        if words.issuperset(model.split()):
            return None if precision == "bf16" and model in _NO_BF16 else peak * 1e12
    return None
