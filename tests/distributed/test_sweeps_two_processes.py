"""A search on two processes: one chooses parameters, and both run the same trials."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from backends import asked_for
from forking import Case, Found, Outcome, current_rank, joined, play
from marks import thinned
from optuna.pruners import MedianPruner
from recipes import Keyed, KeyedModel, rows, t16
from transformers import TrainingArguments

from omnitrain import AccelerateTrainer, Callback, HFTrainer, search

HERE = Path(__file__).stem
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


def run(trainer: str, folder: str, breaks: dict[str, str] | None = None, trials: int = 5) -> Any:
    """Search; `breaks` has how a trial ends, by its folder and rank ("trial-0001/0") or by its folder."""
    size = 8 // int(os.environ.get("WORLD_SIZE", "1"))

    def make(params: dict[str, Any], folder: Path) -> Any:
        how = (breaks or {}).get(f"{folder.name}/{current_rank()}") or (breaks or {}).get(folder.name)
        options: dict[str, Any] = {"progress_bar": False, "callbacks": [Breaks(6, how)] if how else []}
        if trainer == "accelerate":
            return AccelerateTrainer(
                t16(), rows(40), rows(20), loss_fn=F.mse_loss, batch_size=size, epochs=2, save_dir=folder,
                learning_rate=params["learning_rate"], **options,
            )  # fmt: skip
        args = TrainingArguments(
            str(folder), num_train_epochs=2, per_device_train_batch_size=size, eval_strategy="epoch",
            learning_rate=params["learning_rate"], save_strategy="epoch", report_to="none", use_cpu=True,
        )  # fmt: skip
        return HFTrainer(
            model=KeyedModel().double(), args=args, train_dataset=Doubles(40), eval_dataset=Doubles(20), **options
        )

    pruner = MedianPruner(n_startup_trials=2)
    result = search(make, RATES, trials=trials, save_dir=folder, pruner=pruner)
    return [[one.params["learning_rate"], one.score, one.score_step, one.step, one.state] for one in result.trials]


class Doubles(Keyed):
    """Rows by name in double precision, in which the sum over processes is that of one."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.x, self.y = self.x.double(), self.y.double()


BREAKS = {
    "killed": {"trial-0001/0": "kill"},
    "one failed": {"trial-0001/1": "on rank 1"},
    "both failed": {"trial-0001": "on both"},
}


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    cases = []

    def add(name: str, processes: int, **options: Any) -> Case:
        return Case(name, f"{HERE}:run", {"folder": str(folder / name), **options}, processes=processes)

    for trainer in sorted({"accelerate"} | asked_for(request, "trainer")):
        cases += [add(f"{trainer}-{processes}", processes, trainer=trainer) for processes in (1, 2)]
    lost = asked_for(request, "name")
    for name in sorted({"both failed"} | lost):
        cases.append(add(name, 2, trainer="accelerate", breaks=BREAKS[name], trials=3))
    found = play(cases, folder / "first")
    again = [add(name, 2, trainer="accelerate", trials=3) for name in sorted(lost)]
    for case in again:
        case.name += " again"
    return joined(found, play(again, folder / "second"))


def assert_trials(outcome: Outcome, expected: list[Any]) -> None:
    assert outcome.code == 0, outcome.output
    for trial, other in zip(outcome.result, expected, strict=True):
        assert [trial[0], *trial[2:]] == [other[0], *other[2:]]
        assert trial[1] == pytest.approx(other[1], rel=1e-9)


@pytest.mark.parametrize("trainer", thinned(["accelerate", "hf"], ["accelerate"]))
def test_search_on_two_processes_matches_one(trainer: str, outcomes: Any) -> None:
    """Both processes have its results."""
    (single,) = outcomes[f"{trainer}-1"]
    assert single.code == 0, single.output
    assert {trial[4] for trial in single.result} == {"complete", "pruned"}
    for outcome in outcomes[f"{trainer}-2"]:
        assert_trials(outcome, single.result)


@pytest.mark.parametrize("name", thinned(["killed", "one failed"], ["killed"]))
def test_search_that_loses_a_process_is_resumed(name: str, outcomes: Any, folder: Path) -> None:
    assert all(outcome.code not in (0, None) for outcome in outcomes[name]), outcomes[name]
    for outcome in outcomes[f"{name} again"]:
        assert_trials(outcome, outcomes["accelerate-1"][0].result[:3])
    assert len(json.loads((folder / name / "trial-0001" / "run.json").read_text())["starts"]) == 2


def test_search_continues_after_a_trial_that_fails_on_both(outcomes: Any) -> None:
    for outcome in outcomes["both failed"]:
        assert outcome.code == 0, outcome.output
        assert [trial[4] for trial in outcome.result] == ["complete", "failed", "complete"]
