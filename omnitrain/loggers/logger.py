"""Base class of loggers."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from omnitrain.core.duration import Duration, Every
from omnitrain.core.errors import Tolerance
from omnitrain.core.events import Callback, Histogram, TrainerLike

logger: logging.Logger = logging.getLogger("omnitrain")

# Rows kept in memory while a disk fails; beyond that the oldest are lost, with a warning.
MAX_PENDING = 10_000

Position = tuple[int, float]
"""Step and epoch of a row."""


@dataclass(frozen=True, slots=True)
class LogRow:
    """A row of a run: `kind` is "train", "eval", "test" or "report", whose values are texts and histograms."""

    kind: str
    step: int
    epoch: float
    values: Mapping[str, Any]
    is_final: bool
    """Whether it is written only because the run ended."""


def is_test_row(logs: Mapping[str, float]) -> bool:
    """Return whether a row is the result of a test: `on_log` receives these and rows of training.

    >>> is_test_row({"step": 10, "loss": 0.5}), is_test_row({"test_loss": 0.6})
    (False, True)
    """
    return any(name.startswith("test_") for name in logs)


def histogram_stats(name: str, histogram: Histogram) -> dict[str, float]:
    """Return the minimum, maximum, mean and standard deviation of a histogram.

    >>> histogram_stats("w", Histogram(edges=[0, 2, 4], counts=[1, 1], low=1.0, high=3.0, total=4.0, squares=10.0))
    {'w/min': 1.0, 'w/max': 3.0, 'w/mean': 2.0, 'w/std': 1.0}
    """
    count = sum(histogram.counts)
    mean = histogram.total / count if count else math.nan
    variance = histogram.squares / count - mean**2 if count else math.nan
    std = math.sqrt(max(variance, 0.0)) if math.isfinite(variance) else math.nan
    stats = {"min": histogram.low, "max": histogram.high, "mean": mean, "std": std}
    return {f"{name}/{stat}": float(value) for stat, value in stats.items()}


class Pace:
    """Decides which rows of training a logger writes: all, or one per interval, such as "100ba" or "10m"."""

    def __init__(self, every: int | str | Duration | None = None) -> None:
        self._duration = None if every is None else Duration.parse(every, "ba", "every")
        self._every: Every | None = None
        # Number of intervals in the restored checkpoint.
        self._restored_count: int | None = None

    def begin(self, trainer: TrainerLike) -> None:
        """Start at the trainer's position, or at the count of the resumed checkpoint."""
        if self._duration is None:
            return
        self._every = Every(self._duration, trainer.limits)
        self._every.restart(trainer.progress)
        if self._restored_count is not None and trainer.progress.step:
            self._every.count = self._restored_count
        self._restored_count = None

    def shows(self, trainer: TrainerLike) -> bool:
        """Return whether to write a row of training now: at each interval, and at the end of the run."""
        return self._every is None or self._every.due(trainer.progress) or trainer.lifecycle.is_closing

    def state_dict(self) -> dict[str, Any]:
        """Return the number of intervals so far, if an interval is set."""
        return {} if self._every is None else {"shown": self._every.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the number of intervals."""
        self._restored_count = state.get("shown")


class RowLogger(Callback, ABC):
    """Writes one row per log, evaluation, test and report, each position of a run once.

    Args:
        subject: What is written to, for messages.
        every: The interval of the rows of training, such as "100ba"; None writes each.
        consequence: What happens to rows while writing fails, as a sentence.
        tolerated: A type of error that does not end the run, besides those of a failing disk.
    """

    order: ClassVar[int] | int = 40

    def __init__(
        self,
        subject: str,
        every: int | str | Duration | None,
        consequence: str = "Its rows are kept in memory until they can be written.",
        tolerated: type[Exception] | tuple[()] = (),
    ) -> None:
        self._pace = Pace(every)
        self._is_active = False
        # Rows that are not written yet, and how many are lost.
        self._pending: deque[LogRow] = deque(maxlen=MAX_PENDING)
        self._lost = 0
        # The last row of each kind that is written, by this process or, of reports, by an earlier one.
        self._last: dict[str, Position] = {}
        self._tolerance = Tolerance(subject, consequence, tolerated)

    @abstractmethod
    def _begin(self, trainer: TrainerLike, is_test: bool) -> bool:
        """Prepare for the rows of a run, or of a test outside of one; return whether this process writes any."""

    @abstractmethod
    def _open(self, trainer: TrainerLike) -> None:
        """Open what is written to, if it is not open."""

    @abstractmethod
    def _write(self, row: LogRow) -> None:
        """Write a row."""

    @abstractmethod
    def _recover(self, error: Exception) -> None:
        """Handle an error of `_open` or `_write`; the next row tries again."""

    @abstractmethod
    def _close(self) -> None:
        """Close what is written to."""

    def on_train_start(self, trainer: TrainerLike) -> None:
        self._pace.begin(trainer)
        self._start(trainer, is_test=False)

    def restart(self, trainer: TrainerLike) -> None:
        """Start the interval at a state to which the run has gone back, and drop the rows after it, if possible."""
        self._pace.begin(trainer)

    def on_log(self, trainer: TrainerLike, logs: Mapping[str, float]) -> None:
        """Write a row of training, if its interval is over, or the result of a test."""
        if not is_test_row(logs):
            if self._pace.shows(trainer):
                self._append(trainer, "train", logs)
            return
        is_outside = not self._is_active
        if is_outside:
            self._start(trainer, is_test=True)
        self._append(trainer, "test", logs)
        if is_outside:
            self._end(trainer)

    def on_eval_end(self, trainer: TrainerLike, metrics: Mapping[str, float]) -> None:
        self._append(trainer, "eval", metrics)

    def on_report(self, trainer: TrainerLike, values: Mapping[str, str | Histogram]) -> None:
        self._append(trainer, "report", values)

    def on_train_end(self, trainer: TrainerLike) -> None:
        self._end(trainer)

    def state_dict(self) -> dict[str, Any]:
        return self._pace.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pace.load_state_dict(state)

    def _start(self, trainer: TrainerLike, is_test: bool) -> None:
        self._pending.clear()
        self._last.clear()
        self._lost, self._is_active = 0, False
        self._is_active = self._begin(trainer, is_test)

    def _append(self, trainer: TrainerLike, kind: str, values: Mapping[str, Any], is_final: bool | None = None) -> None:
        """Write a row, which by default is final if the run is closing."""
        if not self._is_active:
            return
        step, epoch = values.get("step", trainer.progress.step), values.get("epoch", round(trainer.progress.epochs, 6))
        # The row may exist already: a resumed run repeats an evaluation whose checkpoint was lost in a kill, and the
        # last log of a run may repeat a step. Rounded, because `epochs` is slightly smaller before an epoch is closed
        # than after; compared by epoch too, because a trainer with a custom loop may count no steps.
        position = (int(step), round(float(epoch), 6))
        if kind != "test" and position <= self._last.get(kind, (-1, 0.0)):
            return
        if kind in ("train", "eval"):  # a step may have several tests and reports
            self._last[kind] = position
        self._lost += len(self._pending) == self._pending.maxlen
        is_final = trainer.lifecycle.is_closing if is_final is None else is_final
        self._pending.append(LogRow(kind, int(step), epoch, values, is_final))
        self._flush(trainer)

    def _flush(self, trainer: TrainerLike) -> None:
        """Write the rows that wait."""
        with self._tolerance:
            try:
                while self._pending:
                    self._open(trainer)
                    self._write(self._pending[0])
                    self._pending.popleft()
            except Exception as error:
                self._recover(error)
                raise

    def _end(self, trainer: TrainerLike) -> None:
        if not self._is_active:
            return
        self._flush(trainer)
        if lost := self._lost + len(self._pending):
            logger.error("%s lacks %d rows that could not be written.", self._tolerance.subject, lost)
        self._close()
        self._is_active = False
