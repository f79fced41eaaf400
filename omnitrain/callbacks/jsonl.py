"""Logs and evaluations as JSON rows in `metrics.jsonl`, which survives a kill and a resume.

This file writes the rows, and cuts an old file back to where a run resumes. It does not read them for a plot or a
table: `MetricsDict` keeps the history of the evaluations.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, Literal

from omnitrain.errors import Tolerance
from omnitrain.events import Callback, TrainerLike
from omnitrain.settings import local_path

__all__ = ["MAX_WAITING", "JsonlLogger", "row_kind"]

logger: logging.Logger = logging.getLogger("omnitrain")

MAX_WAITING = 10_000
"""Rows kept in memory while a disk fails; beyond that the oldest are lost, with a warning."""


def row_kind(logs: Mapping[str, float]) -> Literal["train", "test"]:
    """Tell a row of training from the result of a test: both arrive by `on_log`.

    >>> row_kind({"step": 10, "loss": 0.5}), row_kind({"test_loss": 0.6})
    ('train', 'test')
    """
    return "test" if any(name.startswith("test_") for name in logs) else "train"


class JsonlLogger(Callback):
    """Writes one JSON row per log and per evaluation to a file in the run's `save_dir`.

    A row is `{"kind": "train" | "eval" | "test", "step": ..., "epoch": ..., <values>}`. Every line is valid JSON: NaN
    and infinity, which JSON lacks, become null. A fresh run empties the file. A resumed run drops the rows after its
    checkpoint, so each step is there once, in order. Without a `save_dir` nothing is written. While the disk fails,
    rows wait in memory.

    Args:
        filename: The name of the file in `save_dir`.

    >>> reporters = [JsonlLogger()]  # Trainer(..., save_dir="runs/a", callbacks=reporters)
    """

    order: ClassVar[int] | int = 40

    def __init__(self, filename: str = "metrics.jsonl") -> None:
        self.filename: str = str(local_path(filename, "filename"))
        self._path: Path | None = None
        self._file: FileIO | None = None
        self._until: float | None = None
        """The step to cut the file back to before writing; a failing disk may delay this."""
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        """Rows not in the file yet."""
        self._lost = 0
        self._last: dict[str, tuple[int, float]] = {}
        self._tolerance = Tolerance(filename, "Its rows are kept in memory until they can be written.")

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Empty the file, or cut it back to the step from which the run resumes."""
        is_fresh = trainer.progress.step == 0 and trainer.lifecycle.saved_at is None
        self._begin(trainer, until=-1 if is_fresh else trainer.progress.step)

    def on_log(self, trainer: TrainerLike, logs: Mapping[str, float]) -> None:
        """Append a row of kind `train` or `test`."""
        if row_kind(logs) == "train":
            self._append(trainer, "train", logs)
        elif self._path is not None:
            self._append(trainer, "test", logs)
        else:
            self._begin(trainer, until=math.inf)  # a killed run may have left half a line before this test
            self._append(trainer, "test", logs)
            self._end()

    def on_eval_end(self, trainer: TrainerLike, metrics: Mapping[str, float]) -> None:
        """Append a row of kind `eval`."""
        self._append(trainer, "eval", metrics)

    def on_train_end(self, trainer: TrainerLike) -> None:
        """Close the file."""
        self._end()

    def _begin(self, trainer: TrainerLike, until: float) -> None:
        self._last, self._until, self._lost = {}, until, 0
        self._waiting.clear()
        self._path = None
        if trainer.save_dir is not None and trainer.is_main_process:
            self._path = Path(trainer.save_dir) / self.filename
            self._write()

    def _end(self) -> None:
        if self._path is None:
            return
        self._write()
        lost = self._lost + len(self._waiting)
        if lost:
            logger.error("%s lacks %d rows that could not be written.", str(self._path), lost)
        self._close()
        self._path = None

    def _append(
        self, trainer: TrainerLike, kind: Literal["train", "eval", "test"], values: Mapping[str, float]
    ) -> None:
        if self._path is None:
            return
        step, epoch = (
            int(values.get("step", trainer.progress.step)),
            values.get("epoch", round(trainer.progress.epochs, 6)),
        )
        # The row may be there already: a resumed run repeats an evaluation whose checkpoint was lost in a kill, and
        # the last log of a run may repeat a step. Rounded, because `epochs` is a tiny bit smaller before an epoch is
        # closed than after; compared at all, because a trainer with its own loop may count no steps.
        position = (step, round(float(epoch), 6))
        if kind != "test":
            if position <= self._last.get(kind, (-1, 0.0)):
                return
            self._last[kind] = position
        row: dict[str, Any] = {"kind": kind, "step": step, "epoch": epoch}
        row |= {name: _finite(value) for name, value in values.items() if name not in row}
        if trainer.lifecycle.is_closing:
            row["final"] = True
        self._lost += len(self._waiting) == self._waiting.maxlen
        self._waiting.append((json.dumps(row, allow_nan=False) + "\n").encode())
        self._write()

    def _write(self) -> None:
        """Write the waiting rows, and open the file if needed."""
        with self._tolerance:
            try:
                if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:
                    logger.warning("%s was deleted during the run: a new one is started.", str(self._path))
                    self._close()
                file = self._file or self._open()
                while self._waiting:
                    row = self._waiting[0]
                    if file.write(row) != len(row):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.filename)
                    self._waiting.popleft()
            except OSError:
                self._until = math.inf if self._file is not None else self._until  # half a row may be written
                self._close()
                raise

    def _open(self) -> FileIO:
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._until is not None:
            self._last = keep_rows(self._path, self._until) | self._last
            self._until = None
        # Unbuffered: each row reaches the operating system at once, so a killed process loses none.
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        return self._file

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def keep_rows(path: Path, until: float) -> dict[str, tuple[int, float]]:
    """Drop the rows of `path` after the step `until`, and whatever is not a whole row.

    A killed process may leave half a row at the end. Usually the end of the file is cut off, which works on a full
    disk. Otherwise the file is replaced, so a kill leaves the old one.

    Returns:
        The last (step, epoch) kept of each kind.
    """
    last: dict[str, tuple[int, float]] = {}
    if not path.is_file():
        return last
    end, is_beginning = 0, True
    for start, line, kind, position in _rows_of(path, until):
        last[kind] = position
        is_beginning = is_beginning and start == end and line.endswith(b"\n")
        end = start + len(line)
    if is_beginning:
        if end < path.stat().st_size:
            os.truncate(path, end)
        return last
    shortened = path.with_name(path.name + ".tmp")
    with shortened.open("wb") as new:
        for _, line, _, _ in _rows_of(path, until):
            new.write(line.rstrip(b"\r\n") + b"\n")
        new.flush()
        os.fsync(new.fileno())
    os.replace(shortened, path)
    return last


def _rows_of(path: Path, until: float) -> Iterator[tuple[int, bytes, str, tuple[int, float]]]:
    """Yield offset, line, kind and (step, epoch) of each whole row up to the step `until`."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            start += len(line)
            try:
                row = json.loads(line)
                kind, step, epoch = row["kind"], row["step"], row["epoch"]
            except (ValueError, TypeError, KeyError):
                continue
            # The rows that close a run fall on no interval; a longer run would not have had them.
            if step <= until and not (row.get("final") and until < math.inf):
                yield start - len(line), line, kind, (step, round(float(epoch), 6))


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
