"""Logs and evaluations in TensorBoard.

The names under which values appear in a dashboard (`train/loss`, `eval/accuracy`) are decided here, also for W&B.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from omnitrain.callbacks.jsonl import row_kind
from omnitrain.errors import MissingExtraError
from omnitrain.events import Callback, TrainerLike

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


__all__ = ["TensorBoardLogger", "dashboard_names"]


def dashboard_names(values: Mapping[str, float], kind: str) -> dict[str, float]:
    """Return the values of a row under grouped names; the step is not among them, it is the axis.

    >>> dashboard_names({"step": 5, "loss": 0.1}, "train"), dashboard_names({"eval_dev_loss": 0.2}, "eval")
    ({'train/loss': 0.1}, {'eval/dev_loss': 0.2})
    """
    return {f"{kind}/{name.removeprefix(f'{kind}_')}": value for name, value in values.items() if name != "step"}


class TensorBoardLogger(Callback):
    """Writes logs, evaluations and the run's settings as TensorBoard event files.

    Scalars are named `train/loss`, `train/learning_rate`, `eval/loss`, `test/loss`, ...; the settings are the text
    `config`. A resumed run hides what was written after its checkpoint, and a fresh one whatever an earlier run
    left in the folder, so that no step appears twice. Needs the extra `tensorboard`.

    Args:
        log_dir: The folder; None is `tensorboard` in the run's `save_dir`, or `runs/tensorboard` without one.

    >>> reporters = [TensorBoardLogger()]  # Trainer(..., callbacks=reporters)
    """

    order: ClassVar[int] | int = 40

    def __init__(self, log_dir: str | Path | None = None) -> None:
        self.log_dir = log_dir
        self._writer: SummaryWriter | None = None

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Open an event file and write the run's settings into it."""
        if not trainer.is_main_process:
            return
        step = trainer.progress.step
        self._writer = self._open(trainer, purge_step=step + 1 if step else 0)
        # Indented by four, which is Markdown's code block: TensorBoard renders texts as Markdown.
        settings = json.dumps(trainer.resolved_config(), indent=2)
        self._writer.add_text("config", "\n".join("    " + line for line in settings.splitlines()), step)

    def on_log(self, trainer: TrainerLike, logs: Mapping[str, float]) -> None:
        """Write a row of the training, or the result of a test."""
        if not trainer.is_main_process:
            return
        kind = row_kind(logs)
        if self._writer is None and kind == "test":  # a test outside `train()`
            self._writer = self._open(trainer)
            self._write(trainer, kind, logs)
            self._close()
        else:
            self._write(trainer, kind, logs)

    def on_eval_end(self, trainer: TrainerLike, metrics: Mapping[str, float]) -> None:
        """Write an evaluation."""
        self._write(trainer, "eval", metrics)

    def on_save_end(self, trainer: TrainerLike) -> None:
        """Put on disk all that a run resumed from this checkpoint will not write again."""
        if self._writer is not None:
            self._writer.flush()

    def on_train_end(self, trainer: TrainerLike) -> None:
        """Close the event file."""
        self._close()

    def _open(self, trainer: TrainerLike, purge_step: int | None = None) -> SummaryWriter:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("TensorBoardLogger", "tensorboard", "tensorboard") from error
        log_dir = self.log_dir or Path(trainer.save_dir or "runs") / "tensorboard"
        return SummaryWriter(str(log_dir), purge_step=purge_step)

    def _write(self, trainer: TrainerLike, kind: str, values: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        step = int(values.get("step", trainer.progress.step))
        for name, value in dashboard_names(values, kind).items():
            self._writer.add_scalar(name, value, step)

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
