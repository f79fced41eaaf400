"""Logs and evaluations as a table in `metrics.csv`, which survives a kill and a resume.

This file says how a row is written and read, and adds columns to the file as they appear.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omnitrain.core.duration import Duration
from omnitrain.core.events import Histogram, TrainerLike
from omnitrain.core.files import replace_file
from omnitrain.core.history import is_position
from omnitrain.core.metric_format import sort_for_display
from omnitrain.loggers.rows import DAMAGED, Row, RowFile

_FIRST, _LAST = ("kind", "step", "epoch"), ("final",)


class CsvLogger(RowFile):
    """Writes logs, evaluations and tests to a CSV file in the run's `save_dir`, which a spreadsheet or pandas reads.

    Its columns are `kind, step, epoch`, the values in the order of their descriptors, and `final`, which is 1 in rows
    that were written only because the run ended. A value that appears later gets a column too, for which the file is
    replaced at once by one with that column. A resumed run drops the rows after its checkpoint. Of a histogram there
    are the smallest, largest and mean value and the deviation; texts are left out.

    Args:
        filename: The name of the file in `save_dir`.
        every: The interval of the rows of training, such as "100ba"; None writes each. Rows in between are left out.

    >>> loggers = [CsvLogger(every="100ba")]  # Trainer(..., save_dir="runs/a", loggers=loggers)
    """

    def __init__(self, filename: str = "metrics.csv", every: int | str | Duration | None = None) -> None:
        super().__init__(filename, every)
        self._columns: list[str] = []
        """Those of the file that is open."""

    def on_report(self, trainer: TrainerLike, values: Mapping[str, str | Histogram]) -> None:
        """Append the numbers that describe histograms."""
        histograms = {name: value for name, value in values.items() if not isinstance(value, str)}
        if histograms:
            super().on_report(trainer, histograms)

    def _line(self, row: Mapping[str, Any]) -> bytes:
        named = {_one_line(name): value for name, value in row.items()}
        return _encoded([_cell(named.get(name, "")) for name in self._columns])

    def _rows_of(self, path: Path, until: float) -> Iterator[Row]:
        start, columns = 0, []
        with path.open("rb") as file:
            for line in file:
                start += len(line)
                cells, is_whole = _cells(line), line.endswith(b"\n")
                if not columns and {*_FIRST} <= {*cells}:
                    columns = cells
                    if until >= 0 and is_whole:
                        yield 0, line, "", (0, 0.0)
                    continue
                row = dict(zip(columns, cells, strict=False))
                try:
                    position = (int(row["step"]), round(float(row["epoch"]), 6))
                except (ValueError, KeyError):
                    position = (-1, 0.0)
                if len(cells) != len(columns) or not row.get("kind") or not is_position(*position):
                    if is_whole and until >= 0:  # else a killed run has written half of it
                        yield start - len(line), line, DAMAGED, (0, 0.0)
                elif is_whole and position[0] <= until and not (row.get("final") and until < math.inf):
                    yield start - len(line), line, row["kind"], position

    def _open(self) -> io.FileIO:
        file = super()._open()
        assert self._path is not None
        with self._path.open("rb") as old:
            self._columns = _cells(old.readline())
        return file

    def _make_room(self, row: Mapping[str, Any]) -> None:
        names = [_one_line(name) for name in row]
        if all(name in self._columns for name in names) and self._columns:
            return
        assert self._path is not None
        before = self._columns
        values = dict.fromkeys([*before, *names], 0.0)
        inner = [name for name in sort_for_display(values) if name not in (*_FIRST, *_LAST)]
        self._close()
        columns = [*_FIRST, *inner, *_LAST]

        def lines(path: Path) -> Iterator[bytes]:
            yield _encoded(columns)
            with path.open("rb") as old:
                next(old, None)  # its header
                for line in old:
                    kept = dict(zip(before, _cells(line), strict=False))
                    yield _encoded([kept.get(name, "") for name in columns])

        replace_file(self._path, lines(self._path))
        self._open()


def _one_line(name: str) -> str:
    """Return a name without line breaks: each line of the file is a row."""
    return " ".join(name.splitlines())


def _cells(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode(errors="replace").rstrip("\r\n")]), [])
    except csv.Error:  # such as a cell of more than 128 KiB
        return []


def _encoded(cells: list[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return str(int(value)) if isinstance(value, int) else repr(float(value))
