"""Crash-safe files of rows: JSON lines and CSV.

Not for reading rows back into a plot or a table: `MetricsDict` has the history of the evaluations.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import logging
import math
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omnitrain.core.duration import Duration
from omnitrain.core.events import Histogram, TrainerLike
from omnitrain.core.files import check_not_link, open_to_append, replace_file
from omnitrain.core.history import is_position, read_row
from omnitrain.core.metric_format import sort_for_display
from omnitrain.core.paths import local_path
from omnitrain.loggers.logger import LogRow, Position, RowLogger, histogram_stats

logger: logging.Logger = logging.getLogger("omnitrain")

_FIRST, _LAST = ("kind", "step", "epoch"), ("final",)
_HEADER = {"kind": "", "step": -1, "epoch": 0.0}


class RowFile(RowLogger):
    """Writes rows to a file in the run's `save_dir`; the base class of `JsonlLogger` and `CsvLogger`."""

    def __init__(self, filename: str, every: int | str | Duration | None = None) -> None:
        self.filename: str = str(local_path(filename, "filename"))
        super().__init__(self.filename, every)
        self._path: Path = Path(filename)
        self._file: io.FileIO | None = None
        # The step after which rows of the existing file are dropped; infinity keeps all that are complete.
        self._until: float = math.inf

    @abstractmethod
    def _line(self, row: Mapping[str, Any]) -> bytes:
        """Return a row as a line of the file."""

    @abstractmethod
    def _parse(self, line: bytes) -> Mapping[str, Any] | None:
        """Return the kind, step, epoch and `final` of a line, `_HEADER` for titles, or None if it is damaged."""

    def _begin(self, trainer: TrainerLike, is_test: bool) -> bool:
        if trainer.save_dir is None or not trainer.is_main_process:
            return False
        self._path = Path(trainer.save_dir) / self.filename
        lifecycle = trainer.lifecycle
        is_fresh = trainer.progress.step == 0 and lifecycle.saved_at is None and lifecycle.evaluated_step < 0
        self._until = math.inf if is_test else -1 if is_fresh else trainer.progress.step
        with self._tolerance:
            self._open(trainer)
        return True

    def restart(self, trainer: TrainerLike) -> None:
        super().restart(trainer)
        self._end(trainer)
        self._start(trainer, is_test=False)

    def _open(self, trainer: TrainerLike) -> None:
        if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:
            logger.warning("%s was deleted during the run: a new one is started.", str(self._path))
            self._close()
        if self._file is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        check_not_link(self._path)
        self._last.update(self._truncate() | self._last)
        self._until = math.inf
        self._open_file()

    def _open_file(self) -> None:
        # Unbuffered: each row reaches the operating system at once, so a killed process loses none.
        self._file = open_to_append(self._path)

    def _truncate(self) -> dict[str, Position]:
        """Drop rows after the step `_until`, incomplete and damaged lines; return the last row of each kind.

        A file with damaged lines is copied to another name, which is logged.
        """
        last: dict[str, Position] = {}

        def remaining_lines() -> Iterator[bytes]:
            damaged = 0
            with self._path.open("rb") as file:
                for line in file if self._until >= 0 else ():
                    row = self._parse(line)
                    if row is None:
                        damaged += line.endswith(b"\n")  # otherwise a row that a killed run did not complete
                    # Rows written at the end of a run are off the interval: a longer run would not have them.
                    elif not self._is_later(row) and not (row.get("final") and self._until < math.inf):
                        last[row["kind"]] = (row["step"], round(float(row["epoch"]), 6))
                        yield line.rstrip(b"\r\n") + b"\n"
                if damaged:
                    copy = self._path.with_name(f"{self._path.name}.damaged")
                    file.seek(0)
                    replace_file(copy, iter(lambda: file.read(1 << 20), b""))
                    words = "%s had %d damaged lines, which are removed. %r has the original."
                    logger.warning(words, str(self._path), damaged, copy.name)

        if self._path.is_file():
            replace_file(self._path, remaining_lines())
        if self._until == math.inf:  # the run continues after an error, and may have more reports of this step
            last.pop("report", None)
        return last

    def _is_later(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row is of a step after the last one that stays."""
        return row["step"] > self._until

    def _write(self, row: LogRow) -> None:
        values: dict[str, Any] = {"kind": row.kind, "step": row.step, "epoch": row.epoch}
        for name, value in sort_for_display(row.values).items():
            if name not in values:
                values |= histogram_stats(name, value) if isinstance(value, Histogram) else {name: value}
        line = self._line(values | ({"final": True} if row.is_final else {}))
        assert self._file is not None
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.filename)

    def _recover(self, error: Exception) -> None:
        self._close()  # the last row may be incomplete: opening the file again removes it

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


class JsonlLogger(RowFile):
    """Writes one JSON row per log and per evaluation to a file in the run's `save_dir`.

    A row is `{"kind": "train" | "eval" | "test" | "report", "step": ..., "epoch": ..., <values>}`. Every line is valid
    JSON: NaN and infinity, which JSON lacks, become null. A fresh run empties the file. A resumed run drops the rows
    after its checkpoint, so each step is there once, in order. Without a `save_dir` nothing is written. While the disk
    fails, rows wait in memory.

    Args:
        filename: The name of the file in `save_dir`.
        every: The interval of the rows of training, such as "100ba"; None writes each.

    >>> reporters = [JsonlLogger()]  # Trainer(..., save_dir="runs/a", callbacks=reporters)
    """

    def __init__(self, filename: str = "metrics.jsonl", every: int | str | Duration | None = None) -> None:
        super().__init__(filename, every)

    def _line(self, row: Mapping[str, Any]) -> bytes:
        values: dict[str, Any] = dict(row)
        for name in row.keys() - {*_FIRST, *_LAST}:
            if not isinstance(row[name], str):
                values[name] = float(row[name]) if math.isfinite(row[name]) else None
        return (json.dumps(values, allow_nan=False) + "\n").encode()

    def _parse(self, line: bytes) -> Mapping[str, Any] | None:
        return parse_row(line)


def parse_row(line: bytes) -> Mapping[str, Any] | None:
    """Return the row in a line of JSON; None if it has no kind, step and epoch."""
    row = read_row(line)
    return None if row is None or "epoch" not in row else row


class CsvLogger(RowFile):
    """Writes logs, evaluations and tests to a CSV file in the run's `save_dir`, for spreadsheets or pandas.

    Its columns are `kind, step, epoch`, the values in the order of their descriptors, and `final`, which is 1 in rows
    that were written only because the run ended. A value that appears later gets a new column: the file is replaced
    atomically. A resumed run drops the rows after its checkpoint. Histograms are written as minimum, maximum, mean and
    standard deviation; texts are omitted.

    Args:
        filename: The name of the file in `save_dir`.
        every: The interval of the rows of training, such as "100ba"; None writes each.

    >>> loggers = [CsvLogger(every="100ba")]  # Trainer(..., save_dir="runs/a", loggers=loggers)
    """

    def __init__(self, filename: str = "metrics.csv", every: int | str | Duration | None = None) -> None:
        super().__init__(filename, every)
        # Columns of the open file.
        self._columns: list[str] = []

    def on_report(self, trainer: TrainerLike, values: Mapping[str, str | Histogram]) -> None:
        if histograms := {name: value for name, value in values.items() if not isinstance(value, str)}:
            super().on_report(trainer, histograms)

    def _truncate(self) -> dict[str, Position]:
        self._columns = []
        return super()._truncate()

    def _parse(self, line: bytes) -> Mapping[str, Any] | None:
        cells = _parse_cells(line)
        if not self._columns and {*_FIRST} <= {*cells}:
            self._columns = cells
            return _HEADER
        row: dict[str, Any] = dict(zip(self._columns, cells, strict=False))
        try:
            row |= {"step": int(row["step"]), "epoch": float(row["epoch"])}
        except (ValueError, KeyError):
            return None
        is_whole = line.endswith(b"\n") and len(cells) == len(self._columns)
        return row if is_whole and row["kind"] and is_position(row["step"], row["epoch"]) else None

    def _line(self, row: Mapping[str, Any]) -> bytes:
        values = {" ".join(name.splitlines()): value for name, value in row.items()}  # each line of the file is a row
        if not {*values} <= {*self._columns}:
            self._add_columns(values)
        cells = (values.get(name, "") for name in self._columns)
        return _join_cells([
            cell if isinstance(cell, str) else str(int(cell)) if isinstance(cell, int) else repr(float(cell))
            for cell in cells
        ])  # fmt: skip

    def _add_columns(self, names: Mapping[str, Any]) -> None:
        """Replace the file by one that has these columns too."""
        previous = self._columns
        inner = sort_for_display(dict.fromkeys([*previous, *names], 0.0))
        columns = [*_FIRST, *(name for name in inner if name not in (*_FIRST, *_LAST)), *_LAST]

        def lines() -> Iterator[bytes]:
            yield _join_cells(columns)
            with self._path.open("rb") as file:
                next(file, None)  # skip the header
                for line in file:
                    row = dict(zip(previous, _parse_cells(line), strict=False))
                    yield _join_cells([row.get(name, "") for name in columns])

        replace_file(self._path, lines())
        self._close()
        self._open_file()
        self._columns = columns


def _parse_cells(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode(errors="replace").rstrip("\r\n")]), [])
    except csv.Error:  # such as a cell over 128 KiB
        return []


def _join_cells(cells: list[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
