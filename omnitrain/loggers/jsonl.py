"""Logs and evaluations as JSON rows in `metrics.jsonl`.

Not for reading rows back into a plot or a table: `MetricsDict` has the history of the evaluations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omnitrain.core.duration import Duration
from omnitrain.core.history import read_row
from omnitrain.loggers.rows import DAMAGED, Row, RowFile


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
        metadata = ("kind", "step", "epoch", "final")
        values = {name: value if name in metadata else _finite(value) for name, value in row.items()}
        return (json.dumps(values, allow_nan=False) + "\n").encode()

    def _rows_of(self, path: Path, until: float) -> Iterator[Row]:
        start = 0
        with path.open("rb") as file:
            for line in file:
                start += len(line)
                row = read_row(line)
                if row is None or "epoch" not in row:
                    if line.endswith(b"\n") and until >= 0:  # otherwise a row that a killed run did not complete
                        yield start - len(line), line, DAMAGED, (0, 0.0)
                    continue
                # Rows written at the end of a run are off the interval: a longer run would not have them.
                if row["step"] <= until and not (row.get("final") and until < math.inf):
                    yield start - len(line), line, row["kind"], (row["step"], round(float(row["epoch"]), 6))


def _finite(value: float | str) -> float | str | None:
    if isinstance(value, str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
