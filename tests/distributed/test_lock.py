"""The lock of a run's folder, on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from forking import Case, play
from recipes import rows, t16

from omnitrain import AccelerateTrainer, CheckpointError
from omnitrain.checkpoint import lock


def train(folders: list[str]) -> list[Any]:
    """Train in one folder after the other; return the step and the error of each run."""
    lock.LEAVE_S, results = 0.1, []
    for folder in folders:
        trainer = AccelerateTrainer(
            t16(dtype=torch.float32), rows(16, torch.float32), loss_fn=F.mse_loss, batch_size=4, epochs=1,
            save_steps=1, save_dir=folder, progress_bar=False,
        )  # fmt: skip
        message = ""
        try:
            trainer.train()
        except CheckpointError as error:
            message = str(error)
        results.append((trainer.progress.step, message))
    return results


def test_lock_of_another_run_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    case = Case("train", "test_lock:train", {"folders": [str(folder), str(tmp_path / "free")]})
    with lock.Lock(folder).held():
        outcomes = play([case], tmp_path / "cases")["train"]
    for outcome in outcomes:
        (step, message), unlocked = outcome.result
        assert step == 0 and "in use by process" in message and unlocked == [2, ""]
    assert not list(tmp_path.rglob(lock.LOCK)) and not list(folder.glob("checkpoint-*"))
