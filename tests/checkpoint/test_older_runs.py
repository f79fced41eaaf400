"""Run folders that version 0.1.0 wrote, before its modules moved: each is still read, whatever backend wrote it.

Only what a resumed run reads is kept of them; those of sharded kinds were written by two processes.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import BaseTrainer, CrossEntropy, HFTrainer, Trainer, WeightedLosses
from omnitrain.cli.main import main

FOLDERS = Path(__file__).with_name("older_runs")
KINDS = sorted(path.name for path in FOLDERS.glob("*"))
SAVED_STEP, LAST_STEP = 4, 12


def make_trainer(kind: str, save_dir: Path) -> BaseTrainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2))
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(48, 4, generator=generator), torch.randint(0, 2, (48,), generator=generator)
    dataset = TensorDataset(inputs, labels)
    options: dict[str, Any] = {
        "loss_fn": nn.functional.cross_entropy, "epochs": 2, "batch_size": 8, "learning_rate": 1e-2,
        "lr_scheduler": "cosine", "warmup_steps": 2, "log_steps": 1, "save_dir": save_dir, "progress_bar": False,
    }  # fmt: skip
    if kind == "losses":
        options["loss_fn"] = WeightedLosses({"plain": CrossEntropy(), "z": CrossEntropy(z_loss=1e-3)})
    if kind == "hf":
        return HFTrainer(model, None, dataset, dataset, **options)
    return Trainer(model, dataset, dataset, device="cpu", **options)


def losses(folder: Path) -> dict[int, float]:
    """Return the training losses of a run by step, as its log has them."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.parametrize("kind", KINDS)
def test_older_runs_are_resumed(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of HFTrainer by HFTrainer, the others by Trainer. That a class has moved changes no setting and no code."""
    folder = tmp_path / kind
    shutil.copytree(FOLDERS / kind, folder)
    trainer = make_trainer(kind, folder)
    trainer.train(folder / f"checkpoint-{SAVED_STEP}")
    assert trainer.progress.step == LAST_STEP
    assert "omnitrain." not in caplog.text
    resumed, expected = losses(folder), losses(FOLDERS / kind)
    assert set(range(SAVED_STEP + 1, LAST_STEP + 1)) <= resumed.keys() == expected.keys()
    tolerance = 1e-6 if kind in ("native", "losses", "hf") else 0.2  # on two ranks dropout drew other numbers
    assert resumed == pytest.approx(expected, abs=tolerance)
    assert main(["checkpoint", "verify", str(FOLDERS / kind / f"checkpoint-{SAVED_STEP}")]) == 0
