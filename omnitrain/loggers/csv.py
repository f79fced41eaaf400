"""Logs and evaluations as a CSV table in `metrics.csv`."""

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
        """Append the numbers that describe histograms."""
        histograms = {name: value for name, value in values.items() if not isinstance(value, str)}
        if histograms:
            super().on_report(trainer, histograms)

    def _line(self, row: Mapping[str, Any]) -> bytes:
        values = {_single_line(name): value for name, value in row.items()}
        return _encode_row([_format_cell(values.get(name, "")) for name in self._columns])

    def _rows_of(self, path: Path, until: float) -> Iterator[Row]:
        start, columns = 0, []
        with path.open("rb") as file:
            for line in file:
                start += len(line)
                cells, is_complete = _parse_row(line), line.endswith(b"\n")
                if not columns and {*_FIRST} <= {*cells}:
                    columns = cells
                    if until >= 0 and is_complete:
                        yield 0, line, "", (0, 0.0)
                    continue
                row = dict(zip(columns, cells, strict=False))
                try:
                    position = (int(row["step"]), round(float(row["epoch"]), 6))
                except (ValueError, KeyError):
                    position = (-1, 0.0)
                if len(cells) != len(columns) or not row.get("kind") or not is_position(*position):
                    if is_complete and until >= 0:  # otherwise a row that a killed run did not complete
                        yield start - len(line), line, DAMAGED, (0, 0.0)
                elif is_complete and position[0] <= until and not (row.get("final") and until < math.inf):
                    yield start - len(line), line, row["kind"], position

    def _open(self) -> io.FileIO:
        file = super()._open()
        assert self._path is not None
        with self._path.open("rb") as reader:
            self._columns = _parse_row(reader.readline())
        return file

    def _fit_row(self, row: Mapping[str, Any]) -> None:
        names = [_single_line(name) for name in row]
        if all(name in self._columns for name in names) and self._columns:
            return
        assert self._path is not None
        previous_columns = self._columns
        values = dict.fromkeys([*previous_columns, *names], 0.0)
        inner = [name for name in sort_for_display(values) if name not in (*_FIRST, *_LAST)]
        self._close()
        columns = [*_FIRST, *inner, *_LAST]

        def lines(path: Path) -> Iterator[bytes]:
            yield _encode_row(columns)
            with path.open("rb") as file:
                next(file, None)  # skip the header
                for line in file:
                    row = dict(zip(previous_columns, _parse_row(line), strict=False))
                    yield _encode_row([row.get(name, "") for name in columns])

        replace_file(self._path, lines(self._path))
        self._open()


def _single_line(name: str) -> str:
    """Return a name without line breaks, as each line of the file is a row."""
    return " ".join(name.splitlines())


def _parse_row(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode(errors="replace").rstrip("\r\n")]), [])
    except csv.Error:  # such as a cell over 128 KiB
        return []


def _encode_row(cells: list[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _format_cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return str(int(value)) if isinstance(value, int) else repr(float(value))
