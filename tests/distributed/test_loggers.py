"""Loggers on two ranks: only the main one writes, and the training is unchanged."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import GeneralTracker
from backends import Job, gap, launch_all, make_trainer, sound
from recipes import Keyed, KeyedModel, StopAt


class Lines(GeneralTracker):
    """Writes the losses that it gets into a file of each process."""

    name = "lines"
    requires_logging_directory = False

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def tracker(self) -> Path:
        return self.path

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{step} {name}\n" for name in values if name.endswith("/loss"))

    def state_dict(self) -> dict[str, Any]:
        return {"path": str(self.path)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.path = Path(state["path"])


def train(backend: str, folder: str, stop: int = 0, watched: bool = True) -> dict[str, Any]:
    """Train 6 steps with two loggers, stopped after a step, or resumed from there."""
    lines = Path(folder) / f"lines-{os.environ['RANK']}"
    Path(folder).mkdir(exist_ok=True)
    trainer = make_trainer(
        backend, KeyedModel(), Keyed(), Keyed(8), max_steps=6, batch_size=2, log_steps=2, eval_steps=3, save_steps=1,
        save_dir=f"{folder}/run", loggers=["csv", Lines(lines)] if watched else None, callbacks=[StopAt(stop)],
        load_best_at_end=False,
    )  # fmt: skip
    trainer.train(resume_from="auto")
    trainer.evaluate()
    return {"tensors": trainer.backend.model_tensors()}


@pytest.mark.parametrize("backend", ["ddp", "hf2"])
def test_loggers_write_each_step_once_on_main_rank(backend: str, tmp_path: Path) -> None:
    """Over a resume too; the weights are those of a run without loggers."""
    folder, plain = tmp_path / "watched", str(tmp_path / "plain")
    runs: dict[str, Any] = {"cut": {"stop": 4}, "resumed": {}, "plain": {"folder": plain, "watched": False}}
    jobs = [Job(name, backend, "test_loggers:train", {"folder": str(folder), **run}) for name, run in runs.items()]
    results = sound(launch_all(jobs, tmp_path / "launch"))
    for watched, unwatched in zip(results["resumed"], results["plain"], strict=True):
        assert gap(watched["tensors"], unwatched["tensors"]) == 0
    lines = (folder / "lines-0").read_text().splitlines()
    assert lines == ["2 train/loss", "3 eval/loss", "4 train/loss", "6 train/loss", "6 eval/loss"]
    assert not (folder / "lines-1").exists()
    with (folder / "run" / "metrics.csv").open() as file:
        rows = [(row["kind"], row["step"]) for row in csv.DictReader(file)]
    assert rows == [("train", "2"), ("eval", "3"), ("train", "4"), ("train", "6"), ("eval", "6")]
    assert json.loads((folder / "run" / "tracking-lines.json").read_text())["sent"]["train"][0] == 6
