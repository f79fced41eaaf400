"""Crash-safe files of rows, the base of the JSONL and CSV loggers.

Also the interval of rows that all loggers share, and the statistics of histograms for loggers of numbers only.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, Literal

from omnitrain.core.duration import Duration, Every
from omnitrain.core.errors import Tolerance
from omnitrain.core.events import Callback, Histogram, TrainerLike
from omnitrain.core.files import check_not_link, open_file, open_to_append, replace_file
from omnitrain.core.metric_format import sort_for_display
from omnitrain.core.paths import local_path

logger: logging.Logger = logging.getLogger("omnitrain")

# Rows kept in memory while a disk fails; beyond that the oldest are lost, with a warning.
MAX_PENDING = 10_000

Row = tuple[int, bytes, str, tuple[int, float]]
"""Offset, line, kind and (step, epoch) of a row in a file; the kind of a table header is empty."""

# The kind of a line that is not a valid row.
DAMAGED = "damaged"


def row_kind(logs: Mapping[str, float]) -> Literal["train", "test"]:
    """Distinguish a row of training from the result of a test: `on_log` receives both.

    >>> row_kind({"step": 10, "loss": 0.5}), row_kind({"test_loss": 0.6})
    ('train', 'test')
    """
    return "test" if any(name.startswith("test_") for name in logs) else "train"


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
    """Decides which rows of training a logger writes: all, or one per interval.

    Args:
        every: The interval, as a number of steps or a duration such as "100ba" or "10m"; None is every row.

    Raises:
        ConfigError: If `every` is not a duration.
    """

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


class RowFile(Callback, ABC):
    """Writes one row per log, evaluation and test to a file in the run's `save_dir`.

    A fresh run empties the file. A resumed run drops the rows after its checkpoint, so each step is there once, in
    order. Without a `save_dir` nothing is written. While the disk fails, rows wait in memory.

    Args:
        filename: The name of the file in `save_dir`.
        every: The interval of the rows of training, such as "100ba"; None writes each.
    """

    order: ClassVar[int] | int = 40

    def __init__(self, filename: str, every: int | str | Duration | None = None) -> None:
        self.filename: str = str(local_path(filename, "filename"))
        self._pace = Pace(every)
        self._path: Path | None = None
        self._file: FileIO | None = None
        # The step to truncate the file to before writing; a failing disk may delay this.
        self._truncate_step: float | None = None
        # Rows that are not in the file yet.
        self._pending_rows: deque[dict[str, Any]] = deque(maxlen=MAX_PENDING)
        self._lost = 0
        self._last: dict[str, tuple[int, float]] = {}
        self._tolerance = Tolerance(filename, "Its rows are kept in memory until they can be written.")

    @abstractmethod
    def _line(self, row: Mapping[str, Any]) -> bytes:
        """Return a row as a line of the file."""

    @abstractmethod
    def _rows_of(self, path: Path, until: float) -> Iterator[Row]:
        """Yield each complete row up to the step `until`, and damaged lines of the kind `DAMAGED`."""

    def _fit_row(self, row: Mapping[str, Any]) -> None:
        """Extend the open file if a row does not fit its columns."""

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Empty the file, or truncate it to the step from which the run resumes."""
        is_fresh = trainer.progress.step == 0 and trainer.lifecycle.saved_at is None
        self._pace.begin(trainer)
        self._begin(trainer, until=-1 if is_fresh else trainer.progress.step)

    def on_log(self, trainer: TrainerLike, logs: Mapping[str, float]) -> None:
        """Append a row of kind `train` or `test`."""
        if row_kind(logs) == "train":
            if self._pace.shows(trainer):
                self._append(trainer, "train", logs)
        elif self._path is not None:
            self._append(trainer, "test", logs)
        else:
            self._begin(trainer, until=math.inf)  # a killed run may have left an incomplete line
            self._append(trainer, "test", logs)
            self._end()

    def on_eval_end(self, trainer: TrainerLike, metrics: Mapping[str, float]) -> None:
        """Append a row of kind `eval`."""
        self._append(trainer, "eval", metrics)

    def on_report(self, trainer: TrainerLike, values: Mapping[str, str | Histogram]) -> None:
        """Append a row of kind `report`, with four statistics per histogram."""
        row: dict[str, Any] = {}
        for name, value in values.items():
            row |= {name: value} if isinstance(value, str) else histogram_stats(name, value)
        self._append(trainer, "report", row)

    def on_train_end(self, trainer: TrainerLike) -> None:
        """Close the file."""
        self._end()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the interval."""
        return self._pace.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the interval."""
        self._pace.load_state_dict(state)

    def _begin(self, trainer: TrainerLike, until: float) -> None:
        self._last, self._truncate_step, self._lost = {}, until, 0
        self._pending_rows.clear()
        self._path = None
        if trainer.save_dir is not None and trainer.is_main_process:
            self._path = Path(trainer.save_dir) / self.filename
            self._write()

    def _end(self) -> None:
        if self._path is None:
            return
        self._write()
        lost = self._lost + len(self._pending_rows)
        if lost:
            logger.error("%s lacks %d rows that could not be written.", str(self._path), lost)
        self._close()
        self._path = None

    def _append(self, trainer: TrainerLike, kind: str, values: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        step, epoch = (
            int(values.get("step", trainer.progress.step)),
            values.get("epoch", round(trainer.progress.epochs, 6)),
        )
        # The row may exist already: a resumed run repeats an evaluation whose checkpoint was lost in a kill, and the
        # last log of a run may repeat a step. Rounded, because `epochs` is slightly smaller before an epoch is closed
        # than after; compared by epoch too, because a trainer with a custom loop may count no steps.
        position = (step, round(float(epoch), 6))
        if kind != "test":
            if position <= self._last.get(kind, (-1, 0.0)):
                return
            if kind != "report":  # a step may have several reports
                self._last[kind] = position
        row: dict[str, Any] = {"kind": kind, "step": step, "epoch": epoch}
        row |= {name: value for name, value in sort_for_display(values).items() if name not in row}
        if trainer.lifecycle.is_closing:
            row["final"] = True
        self._lost += len(self._pending_rows) == self._pending_rows.maxlen
        self._pending_rows.append(row)
        self._write()

    def _write(self) -> None:
        """Write the pending rows, and open the file if needed."""
        with self._tolerance:
            try:
                if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:
                    logger.warning("%s was deleted during the run: a new one is started.", str(self._path))
                    self._close()
                file = self._file or self._open()
                while self._pending_rows:
                    self._fit_row(self._pending_rows[0])
                    file, line = self._file or file, self._line(self._pending_rows[0])
                    if file.write(line) != len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.filename)
                    self._pending_rows.popleft()
            except OSError:
                self._truncate_step = (
                    math.inf if self._file is not None else self._truncate_step
                )  # the last row may be incomplete
                self._close()
                raise

    def _open(self) -> FileIO:
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._truncate_step is not None:
            until = self._truncate_step
            positions = truncate_rows(self._path, lambda path: self._rows_of(path, until))
            if until == math.inf:  # after an error the run continues, and may have more reports of this step
                positions.pop("report", None)
            self._last = positions | self._last
            self._truncate_step = None
        # Unbuffered: each row reaches the operating system at once, so a killed process loses none.
        self._file = open_to_append(self._path)
        return self._file

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def truncate_rows(path: Path, rows_of: Callable[[Path], Iterator[Row]]) -> dict[str, tuple[int, float]]:
    """Drop everything from a file except the rows that `rows_of` yields.

    A killed process may leave an incomplete row at the end. Usually the file is truncated, which works on a full disk.
    Otherwise the file is replaced atomically. A file with damaged lines is copied to another name, which is logged.

    Returns:
        The last remaining (step, epoch) of each kind.
    """
    last: dict[str, tuple[int, float]] = {}
    check_not_link(path)
    if not path.is_file():
        return last
    end, is_prefix, damaged = 0, True, 0
    for start, line, kind, position in rows_of(path):
        if kind == DAMAGED:
            damaged += 1
            continue
        if kind:
            last[kind] = position
        is_prefix = is_prefix and start == end and line.endswith(b"\n")
        end = start + len(line)
    if damaged:
        copy = path.with_name(f"{path.name}.damaged")
        with path.open("rb") as file:
            replace_file(copy, iter(lambda: file.read(1 << 20), b""))
        logger.warning(
            "%s had %d damaged lines, which are removed. %r has the original.", str(path), damaged, copy.name
        )
    if is_prefix:
        with open(path, "r+b", opener=open_file) as file:
            if end < os.fstat(file.fileno()).st_size:
                file.truncate(end)
        return last
    rows = (line for _, line, kind, _ in rows_of(path) if kind != DAMAGED)
    replace_file(path, (line.rstrip(b"\r\n") + b"\n" for line in rows))
    return last
