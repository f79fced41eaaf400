"""The history file of a checkpoint: each row is encoded once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from forging import content_of
from resuming import build

from omnitrain.checkpoint import history as history_module
from omnitrain.checkpoint.history import read_history
from omnitrain.core.history import MetricsDict


def history(evaluations: int) -> MetricsDict:
    metrics = MetricsDict()
    for step in range(evaluations):
        metrics.add_valid(
            {"epoch": step / 7, "step": step, "eval_loss": 1 / (step + 3), "eval_accuracy": 0.5}, best=step == 1
        )
    return metrics


def test_history_is_in_a_checkpoint_that_is_copied_away(tmp_path: Path) -> None:
    def loaded() -> Any:
        trainer = build(tmp_path / "other")
        trainer.load_checkpoint(folder)
        return json.loads(json.dumps(trainer.metrics))

    build(tmp_path / "run", epochs=2).train()
    folder = shutil.copytree(tmp_path / "run" / "last", tmp_path / "alone")
    shutil.rmtree(tmp_path / "run")
    metrics = loaded()
    assert [row["step"] for row in metrics["valid"]] == [3, 6]
    assert [row["epoch"] for row in metrics["train_metrics_history"]] == [1, 2]
    assert "valid" not in content_of(folder)["metrics"]


def test_history_save_encodes_only_new_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a save does not grow with the rows before it."""
    trainer, encoded = build(tmp_path), []

    class Counting:
        loads = staticmethod(json.loads)

        @staticmethod
        def dumps(value: Any, **options: Any) -> str:
            encoded.append(value)
            return json.dumps(value, **options)

    monkeypatch.setattr(history_module, "json", Counting)
    trainer.lifecycle.metrics = history(200)
    trainer.save_checkpoint()
    assert len(encoded) == 200
    for step in range(3):
        trainer.metrics.add_valid({"epoch": 1.0, "step": step, "eval_loss": 0.5}, best=False)
        trainer.save_checkpoint()
        assert len(encoded) == 201 + step
    trainer.lifecycle.metrics = history(2)  # as after loading another checkpoint
    trainer.save_checkpoint()
    assert len(encoded) == 205
    assert len(read_history(trainer.store.root / "last", content_of(trainer.store.root / "last"))["valid"]) == 2
