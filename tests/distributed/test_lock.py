"""A run of several processes locks its folder on all of them, or ends on all of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from forking import Case, play  # noqa: E402
from recipes import rows, t16  # noqa: E402

from omnitrain import AccelerateTrainer, CheckpointError  # noqa: E402
from omnitrain.checkpoint.lock import LOCK, Lock  # noqa: E402

pytestmark = pytest.mark.distributed


def train(folder: str) -> list[Any]:
    """Train, or be refused; return what came of it on this rank."""
    trainer = AccelerateTrainer(
        t16(dtype=torch.float32), rows(16, torch.float32), loss_fn=F.mse_loss, batch_size=4, epochs=1, save_steps=1,
        save_dir=folder, progress_bar=False,
    )  # fmt: skip
    try:
        trainer.train()
    except CheckpointError as error:
        return [trainer.progress.step, str(error)]
    return [trainer.progress.step, ""]


def test_all_ranks_are_refused_while_another_run_has_the_folder_and_train_when_it_is_free(tmp_path: Path) -> None:
    taken, free = tmp_path / "taken", tmp_path / "free"
    taken.mkdir()
    cases = [Case(path.name, "test_lock:train", {"folder": str(path)}) for path in (taken, free)]
    with Lock(taken).held():
        found = play(cases, tmp_path / "cases")
    for rank in (0, 1):
        step, words = found["taken"][rank].result
        assert step == 0 and "in use by process" in words
        assert found["free"][rank].result == [2, ""]
    assert not list(tmp_path.rglob(LOCK)) and not list(taken.glob("checkpoint-*"))
