"""Logs and evaluations in TensorBoard.

Also the names of values in all dashboards, such as `train/loss`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from omnitrain.core.duration import Duration
from omnitrain.core.errors import MissingExtraError, Tolerance
from omnitrain.core.events import Callback, Histogram, TrainerLike
from omnitrain.core.files import create_folder
from omnitrain.core.paths import folder_path
from omnitrain.loggers.rows import MAX_PENDING, Pace, row_kind

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


logger: logging.Logger = logging.getLogger("omnitrain")

# Seconds between two attempts to open a file on a failing disk; each attempt leaves an empty file behind.
RETRY_S = 30.0
# Maximum values between two flushes; they are kept until a flush, as a failing writer loses them.
MAX_UNFLUSHED = 1_000

WriterCall = tuple[str, str, Any, int]
"""A method of SummaryWriter, the name, the value and the step."""


def dashboard_names(values: Mapping[str, float], kind: str) -> dict[str, float]:
    """Return the values of a row under grouped names, without the step, which is the axis.

    >>> dashboard_names({"step": 5, "loss": 0.1}, "train"), dashboard_names({"eval_dev_loss": 0.2}, "eval")
    ({'train/loss': 0.1}, {'eval/dev_loss': 0.2})
    """
    return {f"{kind}/{name.removeprefix(f'{kind}_')}": value for name, value in values.items() if name != "step"}


class TensorBoardLogger(Callback):
    """Writes logs, evaluations and the run's settings as TensorBoard event files.

    Scalars are named `train/loss`, `train/learning_rate`, `eval/loss`, `test/loss`, ...; the settings are the text
    `config`. Reported texts and histograms are included. A resumed run hides values after its checkpoint, and a
    fresh run hides all values of earlier runs in the folder, so no step appears twice. Requires the extra
    `tensorboard`.

    Args:
        log_dir: The folder; None is `tensorboard` in the run's `save_dir`, or `runs/tensorboard` without one.
        every: The interval of the rows of training, such as "100ba"; None sends each.

    >>> reporters = [TensorBoardLogger()]  # Trainer(..., callbacks=reporters)
    """

    order: ClassVar[int] | int = 40

    def __init__(self, log_dir: str | Path | None = None, every: int | str | Duration | None = None) -> None:
        self._pace = Pace(every)
        is_address = "://" in str(log_dir)  # TensorBoard itself can write to some stores
        self.log_dir: str | Path | None = log_dir if log_dir is None or is_address else folder_path(log_dir, "log_dir")
        self._writer: SummaryWriter | None = None
        self._is_open = False
        # The step from which TensorBoard hides the values of earlier files.
        self._purge_step: int | None = None
        # Calls that may not be on the disk yet: a failing writer loses unflushed ones.
        self._pending_calls: deque[WriterCall] = deque(maxlen=MAX_PENDING)
        # How many calls are lost, and how many were sent to the writer.
        self._lost = self._sent_count = 0
        self._retry_at = -math.inf
        self._tolerance = Tolerance("TensorBoard's file", "It is kept in memory until it can be written.")

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Open an event file and write the run's settings into it."""
        if not trainer.is_main_process:
            return
        self._pending_calls.clear()
        self._pace.begin(trainer)
        step = trainer.progress.step
        self._purge_step = step + 1 if step else 0
        settings = json.dumps(trainer.resolved_config(), indent=2)
        self._is_open = True
        self._write(trainer, [("add_text", "config", _code_block(settings), step)])

    def on_log(self, trainer: TrainerLike, logs: Mapping[str, float]) -> None:
        """Write a row of training, or the result of a test."""
        if not trainer.is_main_process:
            return
        kind = row_kind(logs)
        if kind == "train" and not self._pace.shows(trainer):
            return
        is_outside = not self._is_open and kind == "test"  # a test outside `train()`
        if is_outside:
            self._is_open, self._purge_step = True, None
        self._write(trainer, self._scalars(trainer, kind, logs))
        if is_outside:
            self._close(trainer)

    def on_eval_end(self, trainer: TrainerLike, metrics: Mapping[str, float]) -> None:
        """Write an evaluation."""
        self._write(trainer, self._scalars(trainer, "eval", metrics))

    def on_report(self, trainer: TrainerLike, values: Mapping[str, str | Histogram]) -> None:
        """Write texts and histograms."""
        step = trainer.progress.step
        self._write(trainer, [
            ("add_text", name, _code_block(value), step) if isinstance(value, str)
            else ("add_histogram_raw", name, value, step)
            for name, value in values.items()
        ])  # fmt: skip

    def on_save_end(self, trainer: TrainerLike) -> None:
        """Flush all values that a run resumed from this checkpoint will not write again."""
        self._write(trainer, [], flush=True)

    def on_train_end(self, trainer: TrainerLike) -> None:
        """Close the event file."""
        self._close(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the interval."""
        return self._pace.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the interval."""
        self._pace.load_state_dict(state)

    def _scalars(self, trainer: TrainerLike, kind: str, values: Mapping[str, float]) -> list[WriterCall]:
        step = int(values.get("step", trainer.progress.step))
        return [("add_scalar", name, value, step) for name, value in dashboard_names(values, kind).items()]

    def _open(self, trainer: TrainerLike) -> SummaryWriter:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("TensorBoardLogger", "tensorboard", "tensorboard") from error
        log_dir = self.log_dir or Path(trainer.save_dir or "runs") / "tensorboard"
        if self.log_dir is None and trainer.save_dir is not None:
            create_folder(Path(log_dir))
        self._writer, self._sent_count = SummaryWriter(str(log_dir), purge_step=self._purge_step), 0
        return self._writer

    def _write(self, trainer: TrainerLike, calls: Iterable[WriterCall], flush: bool = False) -> None:
        if not self._is_open:
            return
        for call in calls:
            self._lost += len(self._pending_calls) == self._pending_calls.maxlen
            self._pending_calls.append(call)
        if not flush and self._writer is None and time.monotonic() < self._retry_at:
            return
        with self._tolerance:
            try:
                writer = self._writer or self._open(trainer)
                for method, name, value, step in itertools.islice(self._pending_calls, self._sent_count, None):
                    _call_writer(writer, method, name, value, step)
                self._sent_count = len(self._pending_calls)
                if flush or self._sent_count >= MAX_UNFLUSHED:
                    writer.flush()
                    self._pending_calls.clear()
                    self._sent_count = 0
            except Exception:  # unwritten values go into another file
                self._drop_writer()
                self._retry_at = time.monotonic() + RETRY_S
                if self._pending_calls:
                    self._purge_step = self._pending_calls[0][3]
                raise

    def _close(self, trainer: TrainerLike) -> None:
        self._write(trainer, [], flush=True)
        if lost := self._lost + len(self._pending_calls):
            logger.error("TensorBoard's file lacks %d values that could not be written.", lost)
        self._lost = 0
        self._drop_writer()
        self._pending_calls.clear()
        self._is_open = False

    def _drop_writer(self) -> None:
        writer, self._writer, self._sent_count = self._writer, None, 0
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.close()


def _code_block(text: str) -> str:
    """Return a text as an indented code block of Markdown, which TensorBoard renders."""
    return "\n".join("    " + line for line in text.splitlines())


def _call_writer(writer: SummaryWriter, method: str, name: str, value: Any, step: int) -> None:
    if not isinstance(value, Histogram):
        getattr(writer, method)(name, value, step)
        return
    writer.add_histogram_raw(
        name, value.low, value.high, sum(value.counts), value.total, value.squares, list(value.edges[1:]),
        list(value.counts), step,
    )  # fmt: skip
