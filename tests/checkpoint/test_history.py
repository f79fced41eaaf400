"""The history is encoded once: how long a save takes does not depend on how many rows there are."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from forging import content_of, seal
from resuming import build

from omnitrain.checkpoint.history import HISTORY, Lines, read_history
from omnitrain.metrics import MetricsDict


def history(evaluations: int) -> MetricsDict:
    metrics = MetricsDict()
    for step in range(evaluations):
        metrics.add_valid(
            {"epoch": step / 7, "step": step, "eval_loss": 1 / (step + 3), "eval_accuracy": 0.5}, best=step == 1
        )
    return metrics


def test_rows_that_were_there_are_not_encoded_again_and_those_of_another_history_are() -> None:
    lines, metrics = Lines(), history(3)
    first, _ = lines.up_to({"train_metrics_history": 0, "valid": 2, "test": 0}, metrics)
    metrics.add_train({"epoch": 1, "step": 3, "train_loss": float("nan")})
    second, _ = lines.up_to({"train_metrics_history": 1, "valid": 3, "test": 0}, metrics)
    assert second.startswith(first) and len(first.splitlines()) == 2 and len(second.splitlines()) == 4
    assert lines.up_to({"train_metrics_history": 0, "valid": 2, "test": 0}, metrics)[0] == first
    assert lines.up_to({"train_metrics_history": 0, "valid": 1, "test": 0}, history(1))[0] == first.splitlines(True)[0]


def test_checkpoint_that_is_copied_away_alone_has_its_history(tmp_path: Path) -> None:
    build(tmp_path / "run", epochs=2).train()
    alone = shutil.copytree(tmp_path / "run" / "last", tmp_path / "alone")
    shutil.rmtree(tmp_path / "run")
    trainer = build(tmp_path / "other")
    trainer.load_checkpoint(alone)
    assert [row["step"] for row in trainer.metrics["valid"]] == [3, 6]
    assert [row["epoch"] for row in trainer.metrics["train_metrics_history"]] == [1, 2]
    assert "valid" not in content_of(alone)["metrics"]


def test_history_in_the_manifest_of_an_older_checkpoint_is_still_read(tmp_path: Path) -> None:
    build(tmp_path / "run", epochs=2).train()
    old = shutil.copytree(tmp_path / "run" / "last", tmp_path / "alone")
    content = content_of(old)
    expected = content["metrics"] = read_history(old, content)
    (old / HISTORY).unlink()
    del content["files"][HISTORY]
    seal(old, content)
    trainer = build(tmp_path / "other")
    trainer.load_checkpoint(old)
    assert json.loads(json.dumps(trainer.metrics)) == json.loads(json.dumps(expected))


def seconds_of_saves(trainer: Any, evaluations: int) -> float:
    """The fastest of some saves of a run with a long history, each after one more evaluation."""
    trainer.lifecycle.metrics = history(evaluations)
    trainer.save_checkpoint()
    found = []
    for step in range(5):
        trainer.metrics.add_valid({"epoch": 1.0, "step": step, "eval_loss": 0.5}, best=False)
        start = time.perf_counter()
        trainer.save_checkpoint()
        found.append(time.perf_counter() - start)
    return min(found)


@pytest.mark.slow
def test_save_after_a_hundred_thousand_evaluations_takes_about_as_long_as_one_after_ten(tmp_path: Path) -> None:
    few, many = (seconds_of_saves(build(tmp_path / str(n)), n) for n in (10, 100_000))
    print(f"a save takes {few * 1000:.1f} ms after 10 evaluations, {many * 1000:.1f} ms after 100,000")
    assert many < few + 0.15


def test_save_encodes_new_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from omnitrain.checkpoint import history as module

    trainer, encoded = build(tmp_path), []

    class Counting:
        loads = staticmethod(json.loads)

        @staticmethod
        def dumps(value: Any, **options: Any) -> str:
            encoded.append(value)
            return json.dumps(value, **options)

    monkeypatch.setattr(module, "json", Counting)
    seconds_of_saves(trainer, 200)
    assert len(encoded) == 205
