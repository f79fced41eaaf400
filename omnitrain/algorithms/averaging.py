"""Averages of the weights: EMA and SWA."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from omnitrain.algorithms.weights import local_part, parameters_by_name
from omnitrain.checkpoint.state_dicts import bare_name
from omnitrain.checkpoint.tensor_files import gather_to_host
from omnitrain.core.duration import Duration
from omnitrain.core.errors import ConfigError, check_number
from omnitrain.core.events import Algorithm, TrainerLike, share_of_run
from omnitrain.core.foreign_names import explain_call
from omnitrain.core.progress import Progress
from omnitrain.optim.schedules import RunLength

logger: logging.Logger = logging.getLogger("omnitrain")


class WeightAverage(Algorithm):
    """Keeps an average of every parameter that requires a gradient, laid out as the parameter is.

    Evaluations run on the averages, `model.safetensors` of a checkpoint holds them, and the run ends with them; the
    weights in training are saved next to them, in `trained.safetensors`. Buffers, such as the statistics of BatchNorm,
    stay those of training.

    Args:
        update: Updates averages in place; called with averages, weights, and the number of averaged states.
    """

    asks_alone = False

    def __init__(self, update: Callable[[list[torch.Tensor], list[torch.Tensor], int], None]) -> None:
        self._update = update
        self.count: int = 0
        """How many states of the weights are in the average."""
        self._averages: dict[str, torch.Tensor] = {}
        self._pairs: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    def set_up(self, trainer: TrainerLike) -> None:
        if any(hasattr(parameter, "ds_id") for parameter in trainer.model.parameters()):
            raise ConfigError(
                f"`algorithms` holds {type(self).__name__}, which cannot average weights under ZeRO 3, "
                "which shards them in buffers of DeepSpeed. Use ZeRO 1 or 2, or FSDP."
            )
        self.count, self._averages, self._pairs = 0, {}, ([], [])

    def _add_parameters(self, trainer: TrainerLike) -> None:
        """Start an average, at the current weight, of each trained parameter without one."""
        has_master_weights = trainer.backend.has_master_weights  # type: ignore[attr-defined]
        for name, parameter in parameters_by_name(trainer.model).items():
            if parameter.requires_grad and name not in self._averages:
                # master weights are of float32, also those of a model of float64, and so is what a checkpoint holds
                self._averages[name] = _copy(parameter.float() if has_master_weights else parameter)
        self._pair(trainer)

    def _pair(self, trainer: TrainerLike) -> None:
        """Pair the local parts of averages and weights."""
        live = parameters_by_name(trainer.model)
        names = [name for name in self._averages if name in live]
        self._pairs = [local_part(self._averages[name]) for name in names], [live[name] for name in names]

    def _update_averages(self) -> None:
        averages, weights = self._pairs
        pairs = zip(averages, weights, strict=True)
        if averages:
            self._update(averages, [local_part(weight).to(average.dtype) for average, weight in pairs], self.count)
        self.count += 1

    def transform_weights(self, trainer: TrainerLike, weights: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._averages.get(name, weight) for name, weight in weights.items()}

    def restore_weights(self, trainer: TrainerLike, weights: Mapping[str, Any]) -> None:
        live = {bare_name(name): parameter for name, parameter in trainer.model.named_parameters()}
        self._averages = {name: _copy(weights[name], live[name]) for name in weights}
        self._pair(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = int(state["count"])


def _copy(tensor: Any, like: torch.Tensor | None = None) -> torch.Tensor:
    """Copy a weight to the device, in at least 32 bits."""
    if like is not None and not isinstance(tensor, torch.Tensor):  # gathered lazily from all ranks
        return gather_to_host(tensor).to(like.device)
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.clone()


class EMA(WeightAverage):
    """Evaluates, keeps and ends with an exponential moving average of the weights (arXiv:1703.01780).

    After each update every average becomes `d * average + (1 - d) * weight`; it begins at the first weights. At first
    `d` is smaller than `decay`, so that a short run forgets these too: after `n` updates it is
    `min(decay, (1 + n) / (10 + n))`, as in diffusers and TensorFlow.

    Args:
        decay: How much of the average stays at each update, between 0 and 1; an average is over the latest
            `1 / (1 - decay)` updates or so. A run that is shorter logs a warning.

    Raises:
        ConfigError: If `decay` is not between 0 and 1; before the first step, under ZeRO 3, or for weights of 16 bits.

    >>> [round(EMA(decay=0.99).decay_after(updates), 3) for updates in (0, 90, 1000)]
    [0.1, 0.91, 0.99]
    """

    conflicts: ClassVar[Collection[str]] = ("SWA",)

    @explain_call
    def __init__(self, decay: float = 0.999) -> None:
        check_number("decay", decay, above=0, below=1)
        super().__init__(self._average)
        self.decay = decay

    def decay_after(self, updates: int) -> float:
        """Return how much of the average stays at an update that comes after so many others."""
        return min(self.decay, (1 + updates) / (10 + updates))

    def _average(self, averages: list[torch.Tensor], weights: list[torch.Tensor], updates: int) -> None:
        get_ema_multi_avg_fn(self.decay_after(updates))(averages, weights, updates)

    def set_up(self, trainer: TrainerLike) -> None:
        super().set_up(trainer)
        total, span = trainer.total_steps, 1 / (1 - self.decay)
        if total is not None and total < span and trainer.rank == 0:
            logger.warning(
                "EMA(decay=%s) averages over about %.0f updates, and the run has %d, at whose end decay is %.3f. Pass "
                "a smaller one.", self.decay, span, total, self.decay_after(total),
            )  # fmt: skip

    def begin_epoch(self, trainer: TrainerLike) -> None:
        self._add_parameters(trainer)

    def after_update(self, trainer: TrainerLike) -> None:
        self._update_averages()


class SWA(WeightAverage):
    """Evaluates, keeps and ends with the mean of the weights at the end of each late epoch (arXiv:1803.05407).

    Until the first average, evaluations and files have the weights in training. The learning rate is that of
    `lr_scheduler`; the paper keeps it high and constant, or lets it cycle.

    Args:
        start: When averaging starts: a duration such as "0.7dur" or "5ep"; an int counts steps.
        every: Average every so many updates instead of at the ends of epochs.

    Raises:
        ConfigError: If an argument is wrong; before the first step, under ZeRO 3, for weights of 16 bits, or if the run
            ends before averaging starts.

    >>> SWA(start="0.5dur").start
    Duration(value=0.5, unit='dur')
    """

    conflicts: ClassVar[Collection[str]] = ("EMA",)

    @explain_call
    def __init__(self, start: int | str | Duration = "0.7dur", every: int | None = None) -> None:
        update: Any = get_swa_multi_avg_fn()
        super().__init__(lambda averages, weights, count: update(averages, weights, count + 1))
        self.start: Duration = Duration.parse(start, "ba", "start")
        if self.start.unit == "s":
            raise ConfigError(f"`start` of SWA cannot be a time, which no two ranks agree on, got {str(self.start)!r}.")
        if every is not None:
            check_number("every", every, least=1, is_whole=True)
        self.every = every

    def set_up(self, trainer: TrainerLike) -> None:
        super().set_up(trainer)
        if self.start.unit == "dur":
            share_of_run(trainer, "SWA", 0)
        self._check_reached(trainer)

    def _check_reached(self, trainer: TrainerLike) -> None:
        steps_per_epoch = trainer.steps_per_epoch
        run_length = RunLength.of(trainer.limits, steps_per_epoch, getattr(trainer.train_loader, "size", None))
        first, last, interval = run_length.convert(self.start), run_length.end, self.every or steps_per_epoch
        if first is not None and last is not None and interval:
            is_reached = last // interval * interval >= max(first, 1)
        else:
            ends = [limit for limit in trainer.limits.durations if limit.unit == self.start.unit]
            is_reached = all(self.start.exact <= end.exact for end in ends)
        if not is_reached:
            moments = f"each {self.every} updates" if self.every else "each epoch"
            length = " or ".join(map(str, trainer.limits.durations)) if last is None else f"{last} updates"
            length += f", {steps_per_epoch} in an epoch" if steps_per_epoch and not self.every else ""
            raise ConfigError(
                f"SWA would average nothing: it averages at the end of {moments} from '{self.start}' on, and the "
                f"run has {length}. Set an earlier `start`, or average more often by `every`."
            )

    def after_update(self, trainer: TrainerLike) -> None:
        step = trainer.progress.step + 1
        if self.every is not None and step % self.every == 0:
            self._average_if_started(trainer, replace(trainer.progress, step=step))

    def end_epoch(self, trainer: TrainerLike) -> None:
        """Average the weights at the end of an epoch."""
        if self.every is None:
            progress = trainer.progress
            self._average_if_started(trainer, replace(progress, epoch=progress.epoch + 1, samples_in_epoch=0))

    def _average_if_started(self, trainer: TrainerLike, progress: Progress) -> None:
        if self.start.unit == "dur":
            has_started = share_of_run(trainer, "SWA", progress.step) >= self.start.value
        else:
            has_started = self.start.due(progress)
        if not has_started:
            return
        if self._averages:
            self._update_averages()
        self._add_parameters(trainer)
