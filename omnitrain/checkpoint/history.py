"""History of metrics, one line of JSON per row.

In omnitrain.json, every save would encode all rows again, and its time would grow with the number of evaluations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnitrain.checkpoint.manifest import ROW, check_limits, check_value
from omnitrain.core.errors import CheckpointError
from omnitrain.core.files import open_regular
from omnitrain.core.history import TABLES, MetricsDict

HISTORY = "history.jsonl"


class HistoryEncoder:
    r"""Encodes the rows of a history as lines of JSON, each row only once.

    >>> encoder, metrics = HistoryEncoder(), MetricsDict()
    >>> metrics.add_train({"epoch": 1, "step": 10, "train_loss": 0.5})
    >>> encoder.encode({"train_metrics_history": 1}, metrics)
    b'{"train_metrics_history":{"epoch":1,"step":10,"train_loss":0.5}}\n'
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._tables: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._text = bytearray()

    def encode(self, counts: Mapping[str, int], metrics: MetricsDict) -> bytes:
        """Return the first rows of each table as text.

        Args:
            counts: The number of rows of each table; rows of the previous call must not have changed.
            metrics: The history.
        """
        tables = {name: dict.__getitem__(metrics, name) for name in counts}
        if any(
            self._tables.get(name) is not tables[name] or self._counts[name] > counts[name] for name in self._counts
        ):
            self._reset()  # a different history: a checkpoint was loaded
        new = bytearray()
        for name, count in counts.items():
            for entry in tables[name][self._counts.get(name, 0) : count]:
                new += json.dumps({name: entry}, separators=(",", ":")).encode() + b"\n"
        self._tables, self._counts = tables, dict(counts)
        self._text += new
        return bytes(self._text)


def read_history(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `metrics` of a checkpoint, with the rows of its history.

    Args:
        folder: The folder of the checkpoint.
        content: Its omnitrain.json.

    Raises:
        CheckpointError: If the file of the rows is invalid.
    """
    tables: dict[str, list[Any]] = {name: [] for name in TABLES}
    metrics = {**content["metrics"], **tables}
    counts = metrics.pop("rows")
    number = 0
    try:
        with open_regular(folder / HISTORY) as file:
            lines = file.read().splitlines()
        for line in lines:
            number += 1
            ((name, entry),) = json.loads(line).items()
            check_limits(entry)
            check_value(entry, ROW, name)
            tables[name].append(entry)
        for name, rows in tables.items():
            if len(rows) != counts.get(name, 0):
                raise ValueError(f"its rows are not the expected {counts}")
    except OSError as error:
        raise CheckpointError(f"{str(folder / HISTORY)!r} cannot be read: {error}. Use another checkpoint.") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{str(folder)!r} is damaged: line {number} of {HISTORY!r} is not a row of a history "
            f"({type(error).__name__}: {error}). Use another checkpoint."
        ) from None
    return metrics
