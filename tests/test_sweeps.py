"""Searches for hyperparameters: their trials, their files, and how they resume after a kill."""

from __future__ import annotations

import json
import os
import signal
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from recipes import Keyed, KeyedModel, rows, t16
from torch import nn
from transformers import TrainingArguments

from omnitrain import (
    AccelerateTrainer,
    Callback,
    CheckpointError,
    ConfigError,
    HFTrainer,
    SearchResult,
    Trainer,
    search,
)
from omnitrain.checkpoint import lock
from omnitrain.spaces import Space

optuna = pytest.importorskip("optuna")

RATES = {"learning_rate": {"low": 1e-3, "high": 0.3, "log": True}}
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no picture after each trial, which takes longer than the trial, except where pictures are tested."""
    if "result_marks" not in request.node.name:
        monkeypatch.setattr(SearchResult, "plot", lambda self, path=None: None)


def native(params: dict[str, Any], folder: Path, kind: Any = Trainer, **options: Any) -> Any:
    """Five steps an epoch, three epochs."""
    defaults = {
        "loss_fn": nn.functional.mse_loss, "batch_size": 8, "epochs": 3, "learning_rate": params["learning_rate"],
        "save_dir": folder, "progress_bar": False, "seed": 3,
    }  # fmt: skip
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)).double()
    return kind(model, rows(40), rows(20), **{**defaults, **options})


def accelerated(params: dict[str, Any], folder: Path, **options: Any) -> Any:
    return native(params, folder, AccelerateTrainer, **options)


def of_transformers(params: dict[str, Any], folder: Path, save_strategy: str = "epoch", **options: Any) -> Any:
    args = TrainingArguments(
        str(folder), num_train_epochs=3, per_device_train_batch_size=8, learning_rate=params["learning_rate"],
        eval_strategy="epoch", save_strategy=save_strategy, report_to="none", use_cpu=True, seed=3,
    )  # fmt: skip
    options = {"model": KeyedModel(0.1)} | options if "model_init" not in options else options
    return HFTrainer(args=args, train_dataset=Keyed(40), eval_dataset=Keyed(20), progress_bar=False, **options)


def with_model_init(params: dict[str, Any], folder: Path, **options: Any) -> Any:
    return of_transformers(params, folder, model_init=lambda: KeyedModel(0.1), **options)


MAKERS = {"Trainer": native, "AccelerateTrainer": accelerated, "HFTrainer": of_transformers, "init": with_model_init}
every_trainer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def shown(result: SearchResult) -> list[Any]:
    """What a search has found, without times and places."""
    return [(one.number, one.params, one.score, one.score_step, one.step, one.state) for one in result.trials]


class RaisesAt(Callback):
    """Ends the program at a step, as a signal or a crash would."""

    def __init__(self, step: int, error: BaseException) -> None:
        self.step, self.error = step, error

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == self.step:
            raise self.error


# --- what a search gives


@every_trainer
def test_search_scores_trials_by_best_evaluation(make: Any, tmp_path: Path) -> None:
    """Each trial is a run in its own folder."""
    result = search(make, RATES, trials=4, save_dir=tmp_path / "search")
    assert [one.number for one in result.trials] == [0, 1, 2, 3]
    assert len({one.params["learning_rate"] for one in result.trials}) == 4
    assert [one.state for one in result.trials] == ["complete"] * 4
    for one in result.trials:
        assert one.folder == tmp_path / "search" / f"trial-{one.number:04d}"
        assert one.step == 15
        assert (one.folder / "run.json").exists()
        lines = (one.folder / "metrics.jsonl").read_text().splitlines()
        losses = [row["eval_loss"] for row in map(json.loads, lines) if row["kind"] == "eval"]
        assert len(losses) == 3
        assert one.score == min(losses)
    assert result.best.score == min(one.score for one in result.trials if one.score is not None)
    assert (result.metric, result.direction) == ("loss", "min")


def test_search_depends_on_seed(tmp_path: Path) -> None:
    one, other, third = (
        shown(search(native, RATES, trials=3, save_dir=tmp_path / name, seed=seed))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one == other
    assert one != third


def test_search_frees_models(tmp_path: Path) -> None:
    """Those of failed trials, too."""
    models: list[weakref.ref[nn.Module]] = []

    def make(params: dict[str, Any], folder: Path) -> Any:
        assert not [one for one in models if one() is not None]
        fails = folder.name == "trial-0001"
        trainer = native(params, folder, callbacks=[RaisesAt(2, ZeroDivisionError())] if fails else [])
        models.append(weakref.ref(trainer.get_model()))
        return trainer

    result = search(make, RATES, trials=4, save_dir=tmp_path)
    assert [one.state for one in result.trials] == ["complete", "failed", "complete", "complete"]
    assert len(models) == 5


def test_search_preserves_rng_state(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    search(native, RATES, trials=1, save_dir=tmp_path)
    assert torch.equal(torch.rand(1), expected)


def test_search_result_marks_best_trial(tmp_path: Path) -> None:
    """In the table, in the text file and in the picture."""
    space = {**RATES, "width": [8, None, "wide"]}
    result = search(native, space, trials=3, save_dir=tmp_path, sampler="random")
    lines = str(result).splitlines()
    assert lines[0].split() == ["trial", "learning_rate", "width", "loss", "step", "state", "seconds"]
    assert len(lines) == 4
    assert [number for number, line in enumerate(lines[1:]) if " * " in line] == [result.best.number]
    assert (tmp_path / "search.txt").read_text() == f"{result}\n"
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
    figure = result.plot()
    assert [axes.get_xlabel() for axes in figure.axes] == ["trial", "learning_rate", "width"]
    assert result.plot(tmp_path / "other.svg").read_text().startswith("<?xml")


def test_search_grid_tries_every_combination(tmp_path: Path) -> None:
    tried: list[dict[str, Any]] = []

    def make(params: dict[str, Any], folder: Path) -> Any:
        tried.append(params)
        return native(params, folder, epochs=1)

    space = {"learning_rate": [0.1, 0.01], "depth": {"low": 1, "high": 5, "step": 2}}
    result = search(make, space, sampler="grid", save_dir=tmp_path)
    expected = [{"learning_rate": rate, "depth": depth} for rate in (0.1, 0.01) for depth in (1, 3, 5)]
    assert [one.params for one in result.trials] == expected
    assert tried[1:] == expected  # the first one was made to learn the objective


def test_search_takes_functions_and_optuna_samplers(tmp_path: Path) -> None:
    space = {"learning_rate": lambda trial: 10.0 ** -trial.suggest_int("exponent", 1, 3)}
    sampler = optuna.samplers.GridSampler({"exponent": [1, 2, 3]}, seed=0)
    with pytest.raises(ConfigError, match=r"sampler='grid' tries everything, and space\['learning_rate'\] cannot be"):
        search(native, space, sampler="grid", save_dir=tmp_path)
    result = search(native, space, trials=2, sampler=sampler, pruner="none", save_dir=tmp_path)
    assert {one.params["learning_rate"] for one in result.trials} <= {0.1, 0.01, 0.001}


# --- going on


def uninterrupted(make: Any, tmp_path: Path, trials: int = 3) -> list[Any]:
    return shown(search(make, RATES, trials=trials, save_dir=tmp_path / "whole"))


@every_trainer
def test_search_resumes_interrupted_trial(make: Any, tmp_path: Path) -> None:
    whole = uninterrupted(make, tmp_path)
    made: list[tuple[float, str]] = []

    def interrupted(params: dict[str, Any], folder: Path) -> Any:
        made.append((params["learning_rate"], folder.name))
        callbacks = [RaisesAt(12, KeyboardInterrupt())] if folder.name == "trial-0001" and len(made) == 3 else []
        return make(params, folder, callbacks=callbacks)

    with pytest.raises(KeyboardInterrupt):
        search(interrupted, RATES, trials=3, save_dir=tmp_path / "search")
    first = (tmp_path / "search" / "trial-0000" / "run.json").stat().st_mtime_ns
    result = search(interrupted, RATES, trials=3, save_dir=tmp_path / "search")
    assert shown(result) == whole
    assert made[2] == made[3] and made[3][1] == "trial-0001" and len(made) == 5
    assert (tmp_path / "search" / "trial-0000" / "run.json").stat().st_mtime_ns == first
    starts = json.loads((tmp_path / "search" / "trial-0001" / "run.json").read_text())["starts"]
    assert len(starts) == 2


@every_trainer
def test_search_records_finished_trial_after_kill(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that finished before it was recorded is not trained twice."""
    whole = uninterrupted(make, tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(optuna.study.Study, "tell", _killed)
        with pytest.raises(KeyboardInterrupt):
            search(make, RATES, trials=2, save_dir=tmp_path / "search")
    assert shown(search(make, RATES, trials=2, save_dir=tmp_path / "search")) == whole


def _killed(*args: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def test_search_rejects_changed_trainer(tmp_path: Path) -> None:
    """The trial is not lost: the same trainer as before resumes it."""
    whole = uninterrupted(native, tmp_path, 2)

    def other(params: dict[str, Any], folder: Path) -> Any:
        return native(params, folder, batch_size=5)

    def interrupted(params: dict[str, Any], folder: Path) -> Any:
        return native(params, folder, callbacks=[RaisesAt(12, KeyboardInterrupt())])

    with pytest.raises(KeyboardInterrupt):
        search(interrupted, RATES, trials=2, save_dir=tmp_path / "search")
    with pytest.raises(CheckpointError, match="batch_size"):
        search(other, RATES, trials=2, save_dir=tmp_path / "search")
    assert shown(search(native, RATES, trials=2, save_dir=tmp_path / "search")) == whole


def test_search_restarts_trial_without_checkpoint(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    def rarely(params: dict[str, Any], folder: Path, **options: Any) -> Any:
        return native(params, folder, save_steps=15, keep_best=0, load_best_at_end=False, **options)

    def interrupted(params: dict[str, Any], folder: Path) -> Any:
        return rarely(params, folder, callbacks=[RaisesAt(12, ZeroDivisionError("at last"))])

    whole = uninterrupted(rarely, tmp_path, 2)
    folder = tmp_path / "search"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optuna.study.Study, "tell", _killed)
        with pytest.raises(KeyboardInterrupt):
            search(interrupted, RATES, trials=2, save_dir=folder)
    assert not list(folder.glob("trial-0000/checkpoint-*"))
    assert shown(search(rarely, RATES, trials=2, save_dir=folder)) == whole
    assert not [one for one in recwarn if "already reported" in str(one.message)]


def test_search_resumes_after_sigterm(tmp_path: Path) -> None:
    whole = uninterrupted(native, tmp_path, 2)

    class Terminates(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == 7:
                signal.raise_signal(signal.SIGTERM)

    def make(params: dict[str, Any], folder: Path) -> Any:
        return native(params, folder, callbacks=[Terminates()])

    with pytest.raises(SystemExit) as raised:
        search(make, RATES, trials=2, save_dir=tmp_path / "search")
    assert raised.value.code == 143
    assert shown(search(native, RATES, trials=2, save_dir=tmp_path / "search")) == whole


def test_search_resumes_with_more_trials(tmp_path: Path) -> None:
    """With fewer, nothing is trained."""
    whole = uninterrupted(native, tmp_path, 3)
    search(native, RATES, trials=1, save_dir=tmp_path / "search")
    assert shown(search(native, RATES, trials=3, save_dir=tmp_path / "search")) == whole
    assert shown(search(native, RATES, trials=2, save_dir=tmp_path / "search")) == whole


def test_search_resumes_after_torn_journal_line(tmp_path: Path) -> None:
    whole = uninterrupted(native, tmp_path, 2)
    search(native, RATES, trials=1, save_dir=tmp_path / "search")
    with open(tmp_path / "search" / "search.journal", "ab") as file:
        file.write(b'{"op_code": 4, "tri')
    (tmp_path / "search" / "search.journal.lock").symlink_to("nowhere")
    assert shown(search(native, RATES, trials=2, save_dir=tmp_path / "search")) == whole


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"space": {"learning_rate": [0.1]}},
            r"`space\['learning_rate'\]` was {'low': 0.001, 'high': 0.3, 'log': True} and is \[0.1\]",
        ),
        ({"space": {**RATES, "width": [1]}}, r"`space\['width'\]` was 'not there' and is \[1\]"),
        ({"seed": 7}, "`seed` was 42 and is 7"),
        ({"sampler": "random"}, "`sampler` was 'tpe' and is 'random'"),
    ],
)
def test_search_rejects_folder_of_other_search(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    search(native, RATES, trials=1, save_dir=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ConfigError, match=f"holds another search: {said}. Pass what it was to go on"):
        search(native, **{"space": RATES, "trials": 2, "save_dir": tmp_path, **changes})
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_search_rejects_leftover_checkpoints(tmp_path: Path) -> None:
    search(native, RATES, trials=2, save_dir=tmp_path)
    (tmp_path / "search.json").unlink()
    (tmp_path / "search.journal").unlink()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"has checkpoints, and trial 0 of this search has not begun. Delete"):
            search(native, RATES, trials=2, save_dir=tmp_path, seed=7)


def test_search_rejects_other_objective(tmp_path: Path) -> None:
    search(native, RATES, trials=1, save_dir=tmp_path)

    def other(params: dict[str, Any], folder: Path) -> Any:
        return native(params, folder, compute_metrics="mae", optimization_metric="mae")

    with pytest.raises(ConfigError, match=r"trial 1 optimizes 'mae' \(min\), and this search 'loss' \(min\)"):
        search(other, RATES, trials=2, save_dir=tmp_path)


def test_search_rejects_locked_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LEAVE_S", 0.1)
    tmp_path.joinpath("search").mkdir()
    with lock.Lock(tmp_path / "search").held(), pytest.raises(CheckpointError, match="is in use by process"):
        search(native, RATES, trials=1, save_dir=tmp_path / "search")


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from test_sweeps import RATES, dying
from omnitrain import search
search(dying({trial!r}, {step}), RATES, trials=12, save_dir={folder!r})
"""


class Dies(Callback):
    """Kills the program at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def dying(trial: str, step: int) -> Callable[..., Any]:
    """Makes trainers of which that of one trial kills the program at a step."""
    return lambda params, folder: native(params, folder, callbacks=[Dies(step)] if folder.name == trial else [])


@pytest.mark.slow  # test_search_resumes_interrupted_trial is a quick one
@pytest.mark.processes
def test_search_survives_three_kills(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    for trial, step in (("trial-0000", 3), ("trial-0003", 12), ("trial-0009", 7)):
        program = PROGRAM.format(tests=str(ROOT / "tests"), folder=str(folder), trial=trial, step=step)
        assert programs.run(sys.executable, "-c", program, cwd=ROOT).returncode == -signal.SIGKILL
        assert sorted(path.name for path in folder.glob("trial-*"))[-1] == trial
    result = search(native, RATES, trials=12, save_dir=folder)
    assert [one.number for one in result.trials] == list(range(12))
    assert sorted(path.name for path in folder.glob("trial-*")) == [f"trial-{number:04d}" for number in range(12)]
    assert shown(result) == uninterrupted(native, tmp_path, 12)
    starts = [json.loads((one.folder / "run.json").read_text())["starts"] for one in result.trials]
    assert [len(one) for one in starts] == [2, 1, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1]


# --- pruning


def scripted(direction: str, scores: dict[float, list[float]]) -> Callable[..., Any]:
    """Makes trainers whose evaluations have given scores, by the learning rate."""

    def make(params: dict[str, Any], folder: Path) -> Any:
        given = iter(scores[params["learning_rate"]])
        return native(
            params, folder, compute_metrics=lambda outputs, labels: {"given": next(given)}, sanity=False,
            optimization_metric="given", optimization_direction=direction,
        )  # fmt: skip

    return make


@pytest.mark.parametrize("direction", ["max", "min"])
def test_search_prunes_worse_trials(direction: str, tmp_path: Path) -> None:
    sign = 1 if direction == "max" else -1
    scores = {0.1: [1.0, 2, 3], 0.2: [2.0, 5, 4], 0.3: [0.0, 0, 0], 0.4: [2.0, 1, 9], 0.5: [3.0, 4, 5]}
    signed = {rate: [sign * one for one in values] for rate, values in scores.items()}
    space = {"learning_rate": list(scores)}
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
    result = search(scripted(direction, signed), space, sampler="grid", pruner=pruner, save_dir=tmp_path)
    found = [(one.state, one.score, one.score_step, one.step) for one in result.trials]
    assert found == [
        ("complete", 3 * sign, 15, 15),
        ("complete", 5 * sign, 10, 15),
        ("pruned", 0, 5, 5),
        ("pruned", 2 * sign, 5, 10),
        ("complete", 5 * sign, 15, 15),
    ]
    assert result.best.number == 1  # the first of two that are equal
    assert result.direction == direction
    assert search(scripted(direction, signed), space, sampler="grid", save_dir=tmp_path, pruner="none") == result


def test_search_prunes_trial_again_after_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {0.1: [1.0, 2, 3], 0.2: [2.0, 5, 4], 0.3: [0.0, 9, 9]}
    options = {"space": {"learning_rate": list(scores)}, "sampler": "grid", "save_dir": tmp_path}
    options["pruner"] = optuna.pruners.MedianPruner(n_startup_trials=2)
    tell = optuna.study.Study.tell

    def killed(study: Any, trial: Any, *args: Any, **given: Any) -> Any:
        if trial.number == 2:
            raise KeyboardInterrupt
        return tell(study, trial, *args, **given)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.study.Study, "tell", killed)
        with pytest.raises(KeyboardInterrupt):
            search(scripted("max", scores), **options)
    result = search(scripted("max", scores), **options)
    assert [(one.state, one.score, one.step) for one in result.trials][2] == ("pruned", 0.0, 5)


# --- failures


def test_search_continues_after_failed_trial(tmp_path: Path) -> None:
    def make(params: dict[str, Any], folder: Path) -> Any:
        if folder.name == "trial-0000":
            raise ValueError("no such\nmodel")
        callbacks = [RaisesAt(7, ZeroDivisionError("in step 7"))] if folder.name == "trial-0002" else []
        return native(params, folder, callbacks=callbacks)

    result = search(make, RATES, trials=4, save_dir=tmp_path)
    assert [one.state for one in result.trials] == ["failed", "complete", "failed", "complete"]
    assert [one.error for one in result.trials][::2] == ["ValueError: no such model", "ZeroDivisionError: in step 7"]
    assert [one.step for one in result.trials] == [0, 15, 7, 15]
    assert str(result).splitlines()[-1] == "trial 2: ZeroDivisionError: in step 7"
    assert result.best.number in (1, 3)


def test_search_raises_after_three_failed_trials(tmp_path: Path) -> None:
    def make(params: dict[str, Any], folder: Path) -> Any:
        return native(params, folder, callbacks=[RaisesAt(1, ZeroDivisionError("always"))])

    with pytest.raises(ZeroDivisionError, match="always") as raised:
        search(make, RATES, trials=9, save_dir=tmp_path)
    assert "Every trial so far has failed: trial 0: ZeroDivisionError: always; trial 1" in raised.value.__notes__[-1]
    assert len(list(tmp_path.glob("trial-*"))) == 3


def test_search_raises_for_broken_factory(tmp_path: Path) -> None:
    """Nothing is written."""

    def make(params: dict[str, Any], folder: Path) -> Any:
        raise ZeroDivisionError("always")

    with pytest.raises(ZeroDivisionError):
        search(make, RATES, trials=9, save_dir=tmp_path / "search")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # transformers makes its folder


def test_search_result_without_complete_trial(tmp_path: Path) -> None:
    result = SearchResult([], "loss", "min", tmp_path)
    with pytest.raises(ConfigError, match=r"No trial of .* is complete"):
        result.best  # noqa: B018


# --- wrong arguments


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({}, "`space` must be a dict with a list of choices"),
        ([1, 2], "`space` must be a dict with a list of choices"),
        ({3: [1]}, "`space` has the key 3"),
        ({"a": []}, r"space\['a'\] is an empty list"),
        ({"a": [1, 2, 1]}, "has the choice 1 twice"),
        ({"a": [nn.ReLU]}, "has the choice .*ReLU.* name other things by a string"),
        ({"a": [float("nan")]}, "has the choice nan"),
        ({"a": 0.1}, r"must be a list of choices.*got 0.1.*or write \[0.1\]"),
        ({"a": (1, 2)}, r'Write \[1, 2\] for two choices, or {"low": 1, "high": 2} for a range'),
        ({"a": {"low": 1, "hihg": 2}}, "has the key 'hihg'; a range has .* Did you mean 'high'"),
        ({"a": {"low": 1}}, "needs a finite number as 'high', got None"),
        ({"a": {"low": True, "high": 2}}, "needs a finite number as 'low', got True"),
        ({"a": {"low": 1, "high": float("inf")}}, "needs a finite number as 'high', got inf"),
        ({"a": {"low": 2, "high": 1}}, "has low=2 and high=1. 'low' must be below 'high'"),
        ({"a": {"low": 0, "high": 1, "log": True}}, "log=True and low=0.*begins above 0"),
        ({"a": {"low": 1, "high": 2, "log": 1}}, "has log=1. It must be True or False"),
        ({"a": {"low": 1, "high": 9, "log": True, "step": 2}}, "has both 'log' and 'step'"),
        ({"a": {"low": 1, "high": 9, "step": 0}}, "has step=0. It must be a positive number, at most high - low"),
        ({"a": {"low": 1, "high": 9, "step": 10}}, "has step=10"),
    ],
)
def test_search_rejects_wrong_space(space: Any, said: str, tmp_path: Path) -> None:
    """Nothing is written."""
    with pytest.raises(ConfigError, match=said):
        search(native, space, trials=1, save_dir=tmp_path / "search")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # transformers makes its folder


def test_space_suggests_types_of_range() -> None:
    space = Space(
        {
            "whole": {"low": 1, "high": 8, "step": 3},
            "parts": {"low": 0, "high": 1, "step": 0.3},
            "large": {"low": 1, "high": 1000, "log": True},
        }
    )
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = [space.suggest(study.ask()) for _ in range(30)]
    assert {one["whole"] for one in found} == {1, 4, 7}
    assert {round(one["parts"], 6) for one in found} == {0.0, 0.3, 0.6, 0.9}
    assert all(type(one["large"]) is int for one in found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trials": 0}, "`trials` must be a positive integer, got 0"),
        ({"trials": None}, "`trials` says how many trials there are in all"),
        ({"seed": -1}, "`seed` must be an integer of at least 0"),
        ({"direction": "up"}, "`direction` must be 'max', 'min' or None, got 'up'"),
        ({"direction": "max"}, "direction='max', but the objective of the trainers is 'loss' with direction 'min'"),
        ({"sampler": "gird"}, "`sampler` must be one of .* Did you mean 'grid'"),
        ({"pruner": 3}, "`pruner` must be one of 'median', 'none', or a pruner of optuna, got 3"),
        ({"sampler": "grid"}, r"space\['learning_rate'\] cannot be listed"),
        ({"make_trainer": None}, "`make_trainer` must be callable"),
        ({"make_trainer": lambda params, folder: None}, "`make_trainer` must return a trainer, got NoneType"),
        (
            {"make_trainer": lambda params, folder: native(params, folder.parent)},
            r"trial 0 has save_dir='.*', and a trial must save into a folder of its own.*save_dir=folder",
        ),
        (
            {"make_trainer": lambda params, folder: Trainer(t16(), rows(8), save_dir=folder, loss_fn=nn.MSELoss())},
            "nothing to evaluate on. Pass `eval_dataset`",
        ),
        (
            {"make_trainer": lambda params, folder: of_transformers(params, folder, save_strategy="no")},
            "has save_dir=None.*With TrainingArguments, `save_strategy` must not be 'no'",
        ),
    ],
)
def test_search_rejects_wrong_arguments(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Nothing is written."""
    given: dict[str, Any] = {"make_trainer": native, "space": RATES, "trials": 2, "save_dir": tmp_path / "search"}
    with pytest.raises(ConfigError, match=said):
        search(**{**given, **options})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # transformers makes its folder


def test_search_without_optuna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"search needs optuna, which is not installed. Run `pip install optuna`"):
        search(native, RATES, trials=1, save_dir=tmp_path)
