"""Logs and evaluations as JSON rows in `metrics.jsonl`, which survives a kill and a resume.

Writing rows and cutting an old file back to where a run resumes belong here. Reading them for a plot or a table
does not: `MetricsDict` keeps the history of the evaluations.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TextIO

from omnitrain.events import Callback, TrainerLike

__all__ = ["JsonlLogger", "row_kind"]

_log = logging.getLogger(__name__)


def row_kind(logs: Mapping[str, float]) -> Literal["train", "test"]:
    """Tell a row of the training from the result of a test: both arrive as `on_log`.

    >>> row_kind({"step": 10, "loss": 0.5}), row_kind({"test_loss": 0.6})
    ('train', 'test')
    """
    return "test" if any(name.startswith("test_") for name in logs) else "train"


class JsonlLogger(Callback):
    """Writes one JSON row per log and per evaluation to a file in the run's `save_dir`.

    A row is `{"kind": "train" | "eval" | "test", "step": ..., "epoch": ..., <values>}`. Every line is valid JSON: NaN
    and the infinities, which JSON does not have, become null. A fresh run empties the file; a resumed one
    drops the rows after the checkpoint it resumes from, so that each step is there once, in order. Without a
    `save_dir` nothing is written.

    Args:
        filename: The file's name inside `save_dir`.

    >>> reporters = [JsonlLogger()]  # Trainer(..., save_dir="runs/a", callbacks=reporters)
    """

    order: ClassVar[int] | int = 40

    def __init__(self, filename: str = "metrics.jsonl") -> None:
        self.filename = filename
        self._file: TextIO | None = None
        self._last: dict[str, tuple[int, float]] = {}

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Empty the file, or cut it back to the step that the run resumes from."""
        self._last = {}
        path = self._path(trainer)
        if path is None:
            return
        if trainer.progress.step == 0 and trainer.lifecycle.saved_at is None:
            self._file = _open(path, "w")
        else:
            self._last = keep_rows(path, until=trainer.progress.step)
            self._file = _open(path, "a")

    def on_log(self, trainer: TrainerLike, logs: Mapping[str, float]) -> None:
        """Append a row of kind `train` or `test`."""
        if row_kind(logs) == "train":
            self._append(trainer, "train", logs)
            return
        path = self._path(trainer)
        if self._file is not None or path is None:
            self._append(trainer, "test", logs)
            return
        keep_rows(path, until=math.inf)  # a test outside `train()` may find the torn line of a killed run
        self._file = _open(path, "a")
        self._append(trainer, "test", logs)
        self._close()

    def on_eval_end(self, trainer: TrainerLike, metrics: Mapping[str, float]) -> None:
        """Append a row of kind `eval`."""
        self._append(trainer, "eval", metrics)

    def on_train_end(self, trainer: TrainerLike) -> None:
        """Close the file."""
        self._close()

    def _path(self, trainer: TrainerLike) -> Path | None:
        if trainer.save_dir is None or not trainer.is_main_process:
            return None
        return Path(trainer.save_dir) / self.filename

    def _append(
        self, trainer: TrainerLike, kind: Literal["train", "eval", "test"], values: Mapping[str, float]
    ) -> None:
        if self._file is None:
            return
        step, epoch = (
            int(values.get("step", trainer.progress.step)),
            values.get("epoch", round(trainer.progress.epochs, 6)),
        )
        # The evaluation that a kill separated from its checkpoint is done again by the resumed run, and the last
        # log of a run may repeat a step: the row is there already. Rounded, because the epoch is a hair less before
        # the epoch is closed than after; the epoch counts at all because a trainer's own loop may count no steps.
        position = (step, round(float(epoch), 6))
        if kind != "test":
            if position <= self._last.get(kind, (-1, 0.0)):
                return
            self._last[kind] = position
        row: dict[str, Any] = {"kind": kind, "step": step, "epoch": epoch}
        row |= {name: _finite(value) for name, value in values.items() if name not in row}
        if trainer.lifecycle.is_closing:
            row["final"] = True
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
        except OSError as error:
            # A full disk must not end a run; and going on after half a row would tear the file in its middle.
            _log.warning("%s: %s. No more rows are written.", self._file.name, error)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                _log.warning("%s: %s. Its last row may be missing.", file.name, error)


def keep_rows(path: Path, until: float) -> dict[str, tuple[int, float]]:
    """Drop the rows of `path` after the step `until`, and whatever is not a whole row.

    A killed process may leave half a row at the end. The file is replaced in one go, so that a kill during the
    cut leaves the old one.

    Returns:
        The last (step, epoch) of each kind that was kept.
    """
    last: dict[str, tuple[int, float]] = {}
    if not path.exists():
        return last
    shortened = path.with_name(path.name + ".tmp")
    with (
        path.open(encoding="utf-8", errors="replace") as old,
        shortened.open("w", encoding="utf-8", newline="\n") as new,
    ):
        for line in old:
            try:
                row = json.loads(line)
                kind, step, epoch = row["kind"], row["step"], row["epoch"]
            except (ValueError, TypeError, KeyError):
                continue
            # The rows that close a run are where no interval falls; a run that goes on would not have had them.
            if step <= until and not (row.get("final") and until < math.inf):
                last[kind] = (step, round(float(epoch), 6))
                new.write(line.rstrip("\n") + "\n")
        new.flush()
        os.fsync(new.fileno())
    os.replace(shortened, path)
    return last


def _open(path: Path, mode: Literal["w", "a"]) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Line-buffered: a row is with the operating system as soon as it is written, so a killed process loses none.
    return path.open(mode, buffering=1, encoding="utf-8", newline="\n")


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
