"""Loggers on two ranks: the main one alone writes, and nothing that is trained moves."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from accelerate.tracking import GeneralTracker  # noqa: E402
from backends import Job, gap, launch_all, make_trainer, sound  # noqa: E402
from recipes import Keyed, KeyedModel, StopAt  # noqa: E402

pytestmark = pytest.mark.distributed

HERE = "test_loggers"
BACKENDS = ("ddp", "hf2")


class Lines(GeneralTracker):
    """Writes what it is told into a file of each process."""

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
    import os

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


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("loggers")
    jobs = []
    for backend in BACKENDS:
        watched, alone = {"folder": str(folder / backend)}, {"folder": str(folder / f"{backend}-alone")}
        jobs += [
            Job(f"{backend}-cut", backend, f"{HERE}:train", {**watched, "stop": 4}),
            Job(f"{backend}-resumed", backend, f"{HERE}:train", watched),
            Job(f"{backend}-alone", backend, f"{HERE}:train", {**alone, "watched": False}),
        ]
    return folder, sound(launch_all(jobs, folder / "launch"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_main_rank_writes_and_each_step_is_there_once(results: Any, backend: str) -> None:
    folder = results[0] / backend
    lines = (folder / "lines-0").read_text().splitlines()
    assert lines == ["2 train/loss", "3 eval/loss", "4 train/loss", "6 train/loss", "6 eval/loss"]
    assert not (folder / "lines-1").exists()
    with (folder / "run" / "metrics.csv").open() as file:
        rows = [(row["kind"], row["step"]) for row in csv.DictReader(file)]
    assert rows == [("train", "2"), ("eval", "3"), ("train", "4"), ("train", "6"), ("eval", "6")]
    assert json.loads((folder / "run" / "tracking-lines.json").read_text())["sent"]["train"][0] == 6


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_weights_are_those_of_a_run_without_loggers(results: Any, backend: str) -> None:
    for watched, alone in zip(results[1][f"{backend}-resumed"], results[1][f"{backend}-alone"], strict=True):
        assert gap(watched["tensors"], alone["tensors"]) == 0
