"""The history file of a checkpoint: each row is encoded once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from forging import content_of, seal
from resuming import build

from omnitrain.checkpoint import history as history_module
from omnitrain.checkpoint.history import HISTORY, Lines, read_history
from omnitrain.metrics import MetricsDict


def history(evaluations: int) -> MetricsDict:
    metrics = MetricsDict()
    for step in range(evaluations):
        metrics.add_valid(
            {"epoch": step / 7, "step": step, "eval_loss": 1 / (step + 3), "eval_accuracy": 0.5}, best=step == 1
        )
    return metrics


def test_history_lines_are_reused_unless_rows_differ() -> None:
    lines, metrics = Lines(), history(3)
    first, _ = lines.up_to({"train_metrics_history": 0, "valid": 2, "test": 0}, metrics)
    metrics.add_train({"epoch": 1, "step": 3, "train_loss": float("nan")})
    second, _ = lines.up_to({"train_metrics_history": 1, "valid": 3, "test": 0}, metrics)
    assert second.startswith(first) and len(first.splitlines()) == 2 and len(second.splitlines()) == 4
    assert lines.up_to({"train_metrics_history": 0, "valid": 2, "test": 0}, metrics)[0] == first
    assert lines.up_to({"train_metrics_history": 0, "valid": 1, "test": 0}, history(1))[0] == first.splitlines(True)[0]


def test_history_is_in_a_checkpoint_that_is_copied_away(tmp_path: Path) -> None:
    build(tmp_path / "run", epochs=2).train()
    folder = shutil.copytree(tmp_path / "run" / "last", tmp_path / "alone")
    shutil.rmtree(tmp_path / "run")
    trainer = build(tmp_path / "other")
    trainer.load_checkpoint(folder)
    assert [row["step"] for row in trainer.metrics["valid"]] == [3, 6]
    assert [row["epoch"] for row in trainer.metrics["train_metrics_history"]] == [1, 2]
    assert "valid" not in content_of(folder)["metrics"]


def test_history_in_the_manifest_of_old_checkpoints_is_read(tmp_path: Path) -> None:
    build(tmp_path / "run", epochs=2).train()
    folder = shutil.copytree(tmp_path / "run" / "last", tmp_path / "alone")
    content = content_of(folder)
    expected = content["metrics"] = read_history(folder, content)
    (folder / HISTORY).unlink()
    del content["files"][HISTORY]
    seal(folder, content)
    trainer = build(tmp_path / "other")
    trainer.load_checkpoint(folder)
    assert json.loads(json.dumps(trainer.metrics)) == json.loads(json.dumps(expected))


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
