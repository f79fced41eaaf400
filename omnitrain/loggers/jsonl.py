"""Logs and evaluations as JSON rows in `metrics.jsonl`, which survives a kill and a resume.

This file says how a row is written and read. It does not read them for a plot or a table: `MetricsDict` keeps the
history of the evaluations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omnitrain.core.duration import Duration
from omnitrain.core.history import read_row
from omnitrain.loggers.rows import DAMAGED, Row, RowFile, cut_back


class JsonlLogger(RowFile):
    """Writes one JSON row per log and per evaluation to a file in the run's `save_dir`.

    A row is `{"kind": "train" | "eval" | "test" | "report", "step": ..., "epoch": ..., <values>}`. Every line is valid
    JSON: NaN and infinity, which JSON lacks, become null. A fresh run empties the file. A resumed run drops the rows
    after its checkpoint, so each step is there once, in order. Without a `save_dir` nothing is written. While the disk
    fails, rows wait in memory.

    Args:
        filename: The name of the file in `save_dir`.
        every: The interval of the rows of training, such as "100ba"; None writes each. Rows in between are left out.

    >>> reporters = [JsonlLogger()]  # Trainer(..., save_dir="runs/a", callbacks=reporters)
    """

    def __init__(self, filename: str = "metrics.jsonl", every: int | str | Duration | None = None) -> None:
        super().__init__(filename, every)

    def _line(self, row: Mapping[str, Any]) -> bytes:
        facts = ("kind", "step", "epoch", "final")
        plain = {name: value if name in facts else _finite(value) for name, value in row.items()}
        return (json.dumps(plain, allow_nan=False) + "\n").encode()

    def _rows_of(self, path: Path, until: float) -> Iterator[Row]:
        return _rows_of(path, until)


def keep_rows(path: Path, until: float) -> dict[str, tuple[int, float]]:
    """Drop the rows of `path` after the step `until`, and whatever is not a whole row.

    Returns:
        The last (step, epoch) kept of each kind.
    """
    return cut_back(path, lambda path: _rows_of(path, until))


def _rows_of(path: Path, until: float) -> Iterator[Row]:
    """Yield each whole row up to the step `until`, and the lines that are no rows."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            start += len(line)
            row = read_row(line)
            if row is None or "epoch" not in row:
                if line.endswith(b"\n") and until >= 0:  # else a killed run has written half of it
                    yield start - len(line), line, DAMAGED, (0, 0.0)
                continue
            # The rows that close a run fall on no interval; a longer run would not have had them.
            if row["step"] <= until and not (row.get("final") and until < math.inf):
                yield start - len(line), line, row["kind"], (row["step"], round(float(row["epoch"]), 6))


def _finite(value: float | str) -> float | str | None:
    if isinstance(value, str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
