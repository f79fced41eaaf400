"""SWA: the plain mean of the weights late in a run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar

from torch.optim.swa_utils import get_swa_multi_avg_fn

from omnitrain.algorithms.averaging import WeightAverage
from omnitrain.core.duration import Duration
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import TrainerLike, share_of_run
from omnitrain.core.progress import Progress
from omnitrain.optim.schedules import RunLength


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

    def __init__(self, start: int | str | Duration = "0.7dur", every: int | None = None) -> None:
        update: Any = get_swa_multi_avg_fn()
        super().__init__(lambda averages, weights, count: update(averages, weights, count + 1))
        self.start: Duration = Duration.parse(start, "ba", "start")
        if self.start.unit == "s":
            raise ConfigError(f"`start` of SWA cannot be a time, which no two ranks agree on, got {str(self.start)!r}.")
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ConfigError(
                f"`every` of SWA must be a positive number of updates, or None for epochs, got {every!r}."
            )
        self.every = every

    def set_up(self, trainer: TrainerLike) -> None:
        """Forget the averages of an earlier run.

        Raises:
            ConfigError: If the start is unknown, or the run ends before averaging starts.
        """
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
        """Average the weights every `every` updates."""
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
