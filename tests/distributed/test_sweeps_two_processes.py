"""A search on two processes: one of them chooses, and both run the same trials."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from forking import Case, Outcome, play
from optuna.pruners import MedianPruner
from recipes import Keyed, KeyedModel, rows, t16
from transformers import TrainingArguments

from omnitrain import AccelerateTrainer, Callback, HFTrainer, search

HERE = Path(__file__).stem
TRAINERS = ("accelerate", "hf")
RATES = {"learning_rate": {"low": 1e-3, "high": 0.3, "log": True}}


class Breaks(Callback):
    """Ends this process, or raises an error in it, at a step."""

    def __init__(self, step: int, how: str) -> None:
        self.step, self.how = step, how

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step != self.step:
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError(self.how)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def run(trainer: str, folder: str, breaks: dict[str, str] | None = None, trials: int = 7) -> Any:
    """Search; `breaks` has how a trial ends, by its folder and rank ("trial-0001/0") or by its folder."""
    size = 8 // int(os.environ.get("WORLD_SIZE", "1"))

    def make(params: dict[str, Any], folder: Path) -> Any:
        how = (breaks or {}).get(f"{folder.name}/{rank()}") or (breaks or {}).get(folder.name)
        options: dict[str, Any] = {"progress_bar": False, "callbacks": [Breaks(7, how)] if how else []}
        if trainer == "accelerate":
            return AccelerateTrainer(
                t16(), rows(40), rows(20), loss_fn=F.mse_loss, batch_size=size, epochs=3, save_dir=folder,
                learning_rate=params["learning_rate"], **options,
            )  # fmt: skip
        args = TrainingArguments(
            str(folder), num_train_epochs=3, per_device_train_batch_size=size, eval_strategy="epoch",
            learning_rate=params["learning_rate"], save_strategy="epoch", report_to="none", use_cpu=True,
        )  # fmt: skip
        return HFTrainer(
            model=KeyedModel().double(), args=args, train_dataset=Doubles(40), eval_dataset=Doubles(20), **options
        )

    pruner = MedianPruner(n_startup_trials=3)
    result = search(make, RATES, trials=trials, save_dir=folder, pruner=pruner)
    return [[one.params["learning_rate"], one.score, one.score_step, one.step, one.state] for one in result.trials]


class Doubles(Keyed):
    """Rows by name in double precision, in which the sum over processes is that of one."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.x, self.y = self.x.double(), self.y.double()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("searches")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[Outcome]]:
    cases = []
    for trainer in TRAINERS:
        where = {"trainer": trainer, "folder": str(folder / trainer)}
        cases.append(Case(trainer, f"{HERE}:run", where))
        cases.append(Case(f"{trainer} alone", f"{HERE}:run", {**where, "folder": str(folder / f"{trainer} alone")},
                          processes=1))  # fmt: skip
    for name, breaks in {
        "killed": {"trial-0001/0": "kill"},
        "one failed": {"trial-0001/1": "on rank 1"},
        "both failed": {"trial-0001": "on both"},
    }.items():
        options = {"trainer": "accelerate", "folder": str(folder / name), "breaks": breaks, "trials": 3}
        cases.append(Case(name, f"{HERE}:run", options))
    return play(cases, folder / "forking")


def close(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        one[2:] == other[2:] and one[0] == other[0] and one[1] == pytest.approx(other[1], rel=1e-9)
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("trainer", TRAINERS)
def test_two_processes_find_what_one_finds_and_both_know_it(trainer: str, outcomes: Any) -> None:
    (alone,) = outcomes[f"{trainer} alone"]
    assert alone.code == 0, alone.output
    assert {one[4] for one in alone.result} == {"complete", "pruned"}
    for found in outcomes[trainer]:
        assert found.code == 0, found.output
        assert close(found.result, alone.result)


@pytest.mark.parametrize("name", ["killed", "one failed"])
def test_a_search_that_loses_a_process_ends_on_both_and_goes_on_where_it_was(
    name: str, outcomes: Any, folder: Path
) -> None:
    for found in outcomes[name]:
        assert found.code not in (0, None), found.output
    (again,) = play(
        [Case("again", f"{HERE}:run", {"trainer": "accelerate", "folder": str(folder / name), "trials": 3})],
        folder / f"{name} again",
    ).values()
    expected = outcomes["accelerate alone"][0].result[:3]
    for found in again:
        assert found.code == 0, found.output
        assert close(found.result, expected)
    starts = json.loads((folder / name / "trial-0001" / "run.json").read_text())["starts"]
    assert len(starts) == 2


def test_a_trial_that_fails_on_both_processes_has_failed_and_the_search_goes_on(outcomes: Any) -> None:
    for found in outcomes["both failed"]:
        assert found.code == 0, found.output
        assert [one[4] for one in found.result] == ["complete", "failed", "complete"]
