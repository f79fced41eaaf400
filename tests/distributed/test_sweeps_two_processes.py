"""A search on two processes: one chooses parameters, and both run the same trials."""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from backends import asked_for
from forking import Case, Found, Outcome, current_rank, joined, play
from marks import thinned
from optuna.pruners import MedianPruner
from recipes import callback, rows, t16

from omnitrain import AccelerateTrainer, search

RATES = {"learning_rate": {"low": 1e-3, "high": 0.3, "log": True}}


def break_at_step_6(how: str, trainer: Any) -> None:
    if trainer.progress.step == 6 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif trainer.progress.step == 6:
        raise ZeroDivisionError(how)


def run(processes: int, folder: str, breaks: dict[str, str] | None = None, trials: int = 5) -> Any:
    """Search; `breaks` has how a trial ends, by its folder and rank ("trial-0001/0") or by its folder."""

    def make(params: dict[str, Any], folder: Path) -> Any:
        how = (breaks or {}).get(f"{folder.name}/{current_rank()}") or (breaks or {}).get(folder.name)
        return AccelerateTrainer(
            t16(), rows(40), rows(20), loss_fn=F.mse_loss, batch_size=8 // processes, epochs=2, save_dir=folder,
            learning_rate=params["learning_rate"], progress_bar=False,
            callbacks=[callback(on_step_end=partial(break_at_step_6, how))] if how else [],
        )  # fmt: skip

    result = search(make, RATES, trials=trials, save_dir=folder, pruner=MedianPruner(n_startup_trials=2))
    names = ("score", "score_step", "step", "state")
    return [
        {"rate": trial.params["learning_rate"], **{name: getattr(trial, name) for name in names}}
        for trial in result.trials
    ]


BREAKS = {
    "killed": {"trial-0001/0": "kill"}, "one failed": {"trial-0001/1": "on rank 1"},
    "both failed": {"trial-0001": "on both"},
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    def case(name: str, place: str, processes: int = 2, **options: Any) -> Case:
        options = {"processes": processes, "folder": str(folder / place), **options}
        return Case(name, "test_sweeps_two_processes:run", options, processes=processes)

    broken = asked_for(request, "name")
    first = [case("on one", "one", processes=1), case("on two", "two")]
    first += [case(name, name, breaks=BREAKS[name], trials=3) for name in sorted({"both failed"} | broken)]
    second = [case(f"{name} again", name, trials=3) for name in sorted(broken)]
    return joined(play(first, folder / "first"), play(second, folder / "second"))


def assert_trials(outcome: Outcome, expected: list[Any]) -> None:
    assert outcome.code == 0, outcome.output
    for trial, other in zip(outcome.result, expected, strict=True):
        assert trial == {**other, "score": pytest.approx(other["score"], rel=1e-9)}


def test_search_on_two_processes_matches_one(outcomes: Any) -> None:
    """Both processes have its results."""
    (single,) = outcomes["on one"]
    assert single.code == 0, single.output
    assert {trial["state"] for trial in single.result} == {"complete", "pruned"}
    for outcome in outcomes["on two"]:
        assert_trials(outcome, single.result)


@pytest.mark.parametrize("name", thinned(["killed", "one failed"], ["killed"]))
def test_search_that_loses_a_process_is_resumed(name: str, outcomes: Any, folder: Path) -> None:
    assert all(outcome.code not in (0, None) for outcome in outcomes[name]), outcomes[name]
    for outcome in outcomes[f"{name} again"]:
        assert_trials(outcome, outcomes["on one"][0].result[:3])
    assert len(json.loads((folder / name / "trial-0001" / "run.json").read_text())["starts"]) == 2


def test_search_continues_after_a_trial_that_fails_on_both(outcomes: Any) -> None:
    for outcome in outcomes["both failed"]:
        assert outcome.code == 0, outcome.output
        assert [trial["state"] for trial in outcome.result] == ["complete", "failed", "complete"]
