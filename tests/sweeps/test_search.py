"""Searches for hyperparameters: their trials, their files, and how they resume after a kill."""

import errno
import functools
import json
import os
import re
import signal
import statistics
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from marks import thinned
from recipes import Keyed, KeyedModel, callback, fit, rows, t16
from torch import nn
from transformers import TrainingArguments

from omnitrain import (
    AccelerateTrainer,
    CheckpointError,
    ConfigError,
    HFTrainer,
    SearchResult,
    Trainer,
    search,
)
from omnitrain.checkpoint import lock
from omnitrain.sweeps.spaces import Space

optuna = pytest.importorskip("optuna")

RATES = {"learning_rate": {"low": 1e-3, "high": 0.3, "log": True}}
ROOT = Path(__file__).resolve().parents[2]


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


def of_transformers(params: dict[str, Any], folder: Path, save_strategy: str = "epoch", **options: Any) -> Any:
    args = TrainingArguments(
        str(folder), num_train_epochs=3, per_device_train_batch_size=8, learning_rate=params["learning_rate"],
        eval_strategy="epoch", save_strategy=save_strategy, report_to="none", use_cpu=True, seed=3,
    )  # fmt: skip
    options = {"model": KeyedModel(0.1)} | options if "model_init" not in options else options
    return HFTrainer(args=args, train_dataset=Keyed(40), eval_dataset=Keyed(20), progress_bar=False, **options)


with_model_init = functools.partial(of_transformers, model_init=lambda: KeyedModel(0.1))


def shown(result: SearchResult) -> list[Any]:
    """The trials of a search, without times and places."""
    return [
        (trial.number, trial.params, trial.score, trial.score_step, trial.step, trial.state) for trial in result.trials
    ]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Returns the trials of an uninterrupted search, of which each is run once."""

    @functools.cache
    def trials_of(make: Any = native, trials: int = 2) -> list[Any]:
        return shown(search(make, RATES, trials=trials, save_dir=tmp_path_factory.mktemp("straight")))

    return trials_of


def acts_at(step: int, action: Any) -> dict[str, Any]:
    """Return the argument for a callback that raises an error at a step, or calls a function."""

    def act(trainer: Any) -> None:
        if trainer.progress.step == step and isinstance(action, BaseException):
            raise action
        if trainer.progress.step == step:
            action()

    return {"callbacks": [callback(on_step_end=act)]}


def search_interrupted_at(trial: int, *args: Any, **options: Any) -> None:
    """Search until a trial has ended and is not recorded yet."""
    tell = optuna.study.Study.tell

    def interrupt(study: Any, ended: Any, *args: Any, **options: Any) -> Any:
        if ended.number == trial:
            raise KeyboardInterrupt
        return tell(study, ended, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optuna.study.Study, "tell", interrupt)
        with pytest.raises(KeyboardInterrupt):
            search(*args, **options)


# --- what a search gives


@pytest.mark.parametrize("make", thinned([native, with_model_init], [native]))
def test_search_scores_trials_by_best_evaluation(make: Any, straight: Any, tmp_path: Path) -> None:
    """Each trial is a run in its own folder."""
    result = search(make, RATES, trials=2, save_dir=tmp_path / "search", seed=42)
    assert shown(result) == straight(make)  # the default of the seed
    assert [(trial.number, trial.state) for trial in result.trials] == [(0, "complete"), (1, "complete")]
    assert len({trial.params["learning_rate"] for trial in result.trials}) == 2
    for trial in result.trials:
        assert trial.folder == tmp_path / "search" / f"trial-{trial.number:04d}" and trial.step == 15
        assert (trial.folder / "run.json").exists()
        lines = (trial.folder / "metrics.jsonl").read_text().splitlines()
        losses = [row["eval_loss"] for row in map(json.loads, lines) if row["kind"] == "eval"]
        assert len(losses) == 3 and trial.score == min(losses)
    assert result.best.score == min(trial.score for trial in result.trials if trial.score is not None)
    assert (result.metric, result.direction) == ("loss", "min")


def test_search_depends_on_seed(straight: Any, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    assert shown(search(native, RATES, trials=1, save_dir=tmp_path / "other", seed=2)) != straight()[:1]
    assert torch.equal(torch.rand(1), expected)  # the generators of the program are left unchanged


def test_search_result_marks_best_trial(tmp_path: Path) -> None:
    """In the table, in the text file and in the picture."""
    space = {**RATES, "width": [8, None, "wide"]}
    result = search(functools.partial(native, epochs=1), space, trials=2, save_dir=tmp_path, sampler="random")
    lines = str(result).splitlines()
    assert lines[0].split() == ["trial", "learning_rate", "width", "loss", "step", "state", "seconds"]
    assert len(lines) == 3
    assert [number for number, line in enumerate(lines[1:]) if " * " in line] == [result.best.number]
    assert (tmp_path / "search.txt").read_text() == f"{result}\n" and result._repr_html_().count("<tr>") == 3
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
    assert [axes.get_xlabel() for axes in result.plot().axes] == ["trial", "learning_rate", "width"]


def test_search_grid_tries_every_combination(tmp_path: Path) -> None:
    tried: list[dict[str, Any]] = []

    def make(params: dict[str, Any], folder: Path) -> Any:
        tried.append(params)
        return native(params, folder, epochs=1)

    space = {"learning_rate": [0.1, 0.01], "depth": {"low": 1, "high": 3, "step": 2}}
    result = search(make, space, sampler="grid", save_dir=tmp_path)
    expected = [{"learning_rate": rate, "depth": depth} for rate in (0.1, 0.01) for depth in (1, 3)]
    assert [trial.params for trial in result.trials] == tried[1:] == expected  # the first one: to learn the objective


def test_search_takes_functions_and_optuna_samplers(tmp_path: Path) -> None:
    space = {"learning_rate": lambda trial: 10.0 ** -trial.suggest_int("exponent", 1, 3)}
    sampler = optuna.samplers.GridSampler({"exponent": [1, 2, 3]}, seed=0)
    with pytest.raises(ConfigError, match=r"sampler='grid' tries all values, and those of space\['learning_rate'\]"):
        search(native, space, sampler="grid", save_dir=tmp_path)
    result = search(native, space, trials=1, sampler=sampler, pruner="none", save_dir=tmp_path)
    assert result.trials[0].params["learning_rate"] in (0.1, 0.01, 0.001)


# --- resuming


@pytest.mark.parametrize("make", thinned([of_transformers, with_model_init], [of_transformers]))
def test_search_resumes_interrupted_trial(make: Any, straight: Any, tmp_path: Path) -> None:
    attempts: list[tuple[float, str]] = []

    def interrupted(params: dict[str, Any], folder: Path) -> Any:
        attempts.append((params["learning_rate"], folder.name))
        is_cut = folder.name == "trial-0001" and len(attempts) == 3
        return make(params, folder, **(acts_at(12, KeyboardInterrupt()) if is_cut else {}))

    with pytest.raises(KeyboardInterrupt):
        search(interrupted, RATES, trials=2, save_dir=tmp_path)
    first = (tmp_path / "trial-0000" / "run.json").stat().st_mtime_ns
    assert shown(search(interrupted, RATES, trials=2, save_dir=tmp_path)) == straight(make)
    assert attempts[2] == attempts[3] and attempts[3][1] == "trial-0001" and len(attempts) == 4
    assert (tmp_path / "trial-0000" / "run.json").stat().st_mtime_ns == first
    assert len(json.loads((tmp_path / "trial-0001" / "run.json").read_text())["starts"]) == 2


def test_search_records_finished_trial_after_kill(straight: Any, tmp_path: Path) -> None:
    """A trial that finished before it was recorded is not trained twice."""
    make = functools.partial(native, kind=AccelerateTrainer)
    search_interrupted_at(0, make, RATES, trials=2, save_dir=tmp_path)
    assert shown(search(make, RATES, trials=2, save_dir=tmp_path)) == straight(make)


def test_search_restarts_trial_without_checkpoint(straight: Any, tmp_path: Path, recwarn: Any) -> None:
    rarely = functools.partial(native, save_steps=15, keep_best=0, load_best_at_end=False)
    failing = functools.partial(rarely, **acts_at(12, ZeroDivisionError("at last")))
    search_interrupted_at(0, failing, RATES, trials=2, save_dir=tmp_path)
    assert not list(tmp_path.glob("trial-0000/checkpoint-*"))
    assert shown(search(rarely, RATES, trials=2, save_dir=tmp_path)) == straight()
    assert not [warning for warning in recwarn if "already reported" in str(warning.message)]


def test_search_resumes_after_sigterm_with_the_same_trainer(straight: Any, tmp_path: Path) -> None:
    """Another trainer is rejected, and the trial is not lost by that."""
    terminates = acts_at(7, functools.partial(signal.raise_signal, signal.SIGTERM))
    with pytest.raises(SystemExit) as raised:
        search(functools.partial(native, **terminates), RATES, trials=2, save_dir=tmp_path)
    assert raised.value.code == 143
    with pytest.raises(CheckpointError, match="batch_size"):
        search(functools.partial(native, batch_size=5), RATES, trials=2, save_dir=tmp_path)
    assert shown(search(native, RATES, trials=2, save_dir=tmp_path)) == straight()


def test_search_resumes_with_more_trials_and_torn_journal(straight: Any, tmp_path: Path) -> None:
    """With fewer trials, nothing is trained."""
    search(native, RATES, trials=1, save_dir=tmp_path)
    with open(tmp_path / "search.journal", "ab") as file:
        file.write(b'{"op_code": 4, "tri')
    for trials in (2, 1):
        assert shown(search(native, RATES, trials=trials, save_dir=tmp_path)) == straight()


def test_search_rejects_folder_of_other_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search(native, RATES, trials=1, save_dir=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for changes, words in (
        ({"space": {"learning_rate": [0.1]}}, r"`space\['learning_rate'\]` was {'low': 0.001.* and is \[0.1\]"),
        ({"space": {**RATES, "width": [1]}}, r"`space\['width'\]` was 'not there' and is \[1\]"),
        ({"seed": 7}, "`seed` was 42 and is 7"),
        ({"sampler": "random"}, "`sampler` was 'tpe' and is 'random'"),
    ):
        with pytest.raises(ConfigError, match=f"holds another search: {words}. Pass the earlier values to continue"):
            search(native, **{"space": RATES, "trials": 2, "save_dir": tmp_path, **changes})
    monkeypatch.setattr(lock, "EXIT_GRACE_S", 0.1)
    with lock.Lock(tmp_path).hold(), pytest.raises(CheckpointError, match="is in use by process"):
        search(native, RATES, trials=2, save_dir=tmp_path)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    other = functools.partial(native, compute_metrics="mae", optimization_metric="mae")
    with pytest.raises(ConfigError, match=r"trial 1 optimizes 'mae' \(min\), and this search 'loss' \(min\)"):
        search(other, RATES, trials=2, save_dir=tmp_path)
    (tmp_path / "search.json").unlink()
    (tmp_path / "search.journal").unlink()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"has checkpoints, and trial 0 of this search has not begun. Delete"):
            search(native, RATES, trials=2, save_dir=tmp_path, seed=7)


# --- failing disks and damaged files


def fail_on_full_disk(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("to_end", [False, True])
def test_search_continues_on_full_disk(
    to_end: bool, straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What could not be written is written when the disk works again, and not lost or there twice."""
    disk, fsync = {"is_full": False}, os.fsync

    def fail_if_full(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        if name.startswith("search.txt") or (disk["is_full"] and name.startswith("search.")):
            fail_on_full_disk()
        fsync(descriptor)

    def filling(params: dict[str, Any], folder: Path) -> Any:
        def fill(trainer: Any) -> None:
            """From the first step of the first trial to the twelfth of the second."""
            disk["is_full"] = (0, 1) <= (int(folder.name[-1]), trainer.progress.step) < (1, 12) or to_end

        return native(params, folder, callbacks=[callback(on_step_end=fill)])

    with monkeypatch.context() as patch, caplog.at_level("WARNING", "omnitrain"):
        patch.setattr(os, "fsync", fail_if_full)
        patch.setattr(SearchResult, "plot", fail_on_full_disk)
        assert shown(search(filling, RATES, trials=2, save_dir=tmp_path)) == straight()
    for name in ("search.journal", "search.txt", "search.png"):
        assert sum(f"{name} cannot be written" in line for line in caplog.messages) == 1
    assert ("search.journal: writing works again." in caplog.messages) is not to_end
    assert any("lacks the entries since the disk failed" in line for line in caplog.messages) is to_end
    if not to_end:
        assert shown(search(native, RATES, trials=2, save_dir=tmp_path)) == straight()


def renumbered(content: bytes) -> bytes:
    return re.sub(rb'"line":([0-9]+)', lambda match: b'"line":%d' % (int(match[1]) - 1), content)


def without_line(content: bytes, number: int) -> bytes:
    lines = content.splitlines(keepends=True)
    return content.replace(lines[number], b"")


DAMAGES: list[tuple[str, Callable[[bytes], bytes | None], str]] = [
    ("search.json", lambda content: content[:40], "is damaged: it is not JSON"),
    ("search.json", lambda content: b"\xff\xfe", "is damaged: it is not JSON"),
    ("search.json", lambda content: b"[3]", "is damaged: it lacks 'metric', 'direction'"),
    ("search.json", lambda content: content.replace(b'"seed"', b'"sed"'), "is damaged: it lacks 'seed'"),
    ("search.json", lambda content: None, "is damaged: it is missing"),
    ("search.journal", lambda content: b"\0\0\n" + content, "is damaged: line 1 is no entry"),
    ("search.journal", lambda content: b"3\n" + content, "is damaged: line 1 is no entry"),
    ("search.journal", lambda content: without_line(content, 0), "is damaged: line 1 has the number 2: a line was"),
    ("search.journal", lambda content: without_line(content, -2), "a line was deleted, added or moved"),
    ("search.journal", lambda content: renumbered(without_line(content, 0)), "its entries do not fit together"),
]


def test_search_rejects_damaged_files(tmp_path: Path) -> None:
    search(native, RATES, trials=1, save_dir=tmp_path)
    for name, damage, words in DAMAGES:
        file = tmp_path / name
        content = file.read_bytes()
        damaged = damage(content)
        file.unlink() if damaged is None else file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"{name}'.*{words}.*Restore the file from a copy, or pass another"):
            search(native, RATES, trials=2, save_dir=tmp_path)
        assert not file.exists() if damaged is None else file.read_bytes() == damaged
        file.write_bytes(content)
    assert not (tmp_path / "trial-0001").exists()


def test_search_rejects_unusable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_on_full_disk)
        with pytest.raises(CheckpointError, match=r"A search cannot use its folder .*No space left.* pass another"):
            search(native, RATES, trials=1, save_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    (tmp_path / "search.journal").symlink_to(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"A search cannot use its folder .*It is a link to"):
        search(native, RATES, trials=1, save_dir=tmp_path)
    assert not (tmp_path / "file").stat().st_size


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from sweeps.test_search import RATES, dying
from omnitrain import search
search(dying({trial!r}, {step}), RATES, trials=12, save_dir={folder!r})
"""


def dying(trial: str, step: int) -> Callable[..., Any]:
    """Makes trainers of which that of one trial kills the program at a step."""
    kill = acts_at(step, functools.partial(signal.raise_signal, signal.SIGKILL))
    return lambda params, folder: native(params, folder, **(kill if folder.name == trial else {}))


@pytest.mark.slow  # test_search_resumes_interrupted_trial is a quick one
@pytest.mark.processes
def test_search_survives_three_kills(straight: Any, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    for trial, step in (("trial-0000", 3), ("trial-0003", 12), ("trial-0009", 7)):
        program = PROGRAM.format(tests=str(ROOT / "tests"), folder=str(folder), trial=trial, step=step)
        assert programs.run(sys.executable, "-c", program, cwd=ROOT).returncode == -signal.SIGKILL
        assert sorted(path.name for path in folder.glob("trial-*"))[-1] == trial
    result = search(native, RATES, trials=12, save_dir=folder)
    assert [trial.number for trial in result.trials] == list(range(12))
    assert sorted(path.name for path in folder.glob("trial-*")) == [f"trial-{number:04d}" for number in range(12)]
    assert shown(result) == straight(native, 12)
    starts = [json.loads((trial.folder / "run.json").read_text())["starts"] for trial in result.trials]
    assert [len(times) for times in starts] == [2, 1, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1]


def scripted(direction: str, scores: dict[float, list[float]]) -> Callable[..., Any]:
    """Makes trainers whose evaluations have these scores, by the learning rate."""

    def make(params: dict[str, Any], folder: Path) -> Any:
        values = iter(scores[params["learning_rate"]])
        return native(
            params, folder, compute_metrics=lambda outputs, labels: {"points": next(values)}, sanity=False,
            optimization_metric="points", optimization_direction=direction,
        )  # fmt: skip

    return make


@pytest.mark.parametrize("direction", ["max", "min"])
def test_search_prunes_worse_trials(direction: str, tmp_path: Path) -> None:
    sign = 1 if direction == "max" else -1
    scores = {0.1: [1.0, 2, 3], 0.2: [2.0, 5, 4], 0.3: [0.0, 0, 0], 0.4: [2.0, 1, 9], 0.5: [3.0, 4, 5]}
    signed = {rate: [sign * value for value in values] for rate, values in scores.items()}
    space = {"learning_rate": list(scores)}
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
    result = search(scripted(direction, signed), space, sampler="grid", pruner=pruner, save_dir=tmp_path)
    assert [(trial.state, trial.score, trial.score_step, trial.step) for trial in result.trials] == [
        ("complete", 3 * sign, 15, 15), ("complete", 5 * sign, 10, 15), ("pruned", 0, 5, 5),
        ("pruned", 2 * sign, 5, 10), ("complete", 5 * sign, 15, 15),
    ]  # fmt: skip
    assert result.best.number == 1 and result.direction == direction  # the first of two that are equal
    assert search(scripted(direction, signed), space, sampler="grid", save_dir=tmp_path, pruner="none") == result


def test_search_prunes_trial_again_after_kill(tmp_path: Path) -> None:
    scores = {0.1: [1.0, 2, 3], 0.2: [2.0, 5, 4], 0.3: [0.0, 9, 9]}
    options = {"space": {"learning_rate": list(scores)}, "sampler": "grid", "save_dir": tmp_path}
    options["pruner"] = optuna.pruners.MedianPruner(n_startup_trials=2)
    search_interrupted_at(2, scripted("max", scores), **options)
    trial = search(scripted("max", scores), **options).trials[2]
    assert (trial.state, trial.score, trial.step) == ("pruned", 0.0, 5)


def test_search_continues_after_failed_trial_and_frees_models(tmp_path: Path) -> None:
    models: list[weakref.ref[nn.Module]] = []

    def make(params: dict[str, Any], folder: Path) -> Any:
        assert not [model for model in models if model() is not None]
        if folder.name == "trial-0000" and models:
            raise ValueError("no such\nmodel, pwd=a")
        failing = acts_at(7, ZeroDivisionError("in step 7")) if folder.name == "trial-0002" else {}
        trainer = native(params, folder, **failing)
        models.append(weakref.ref(trainer.get_model()))
        return trainer

    result = search(make, RATES, trials=4, save_dir=tmp_path)
    assert [(trial.state, trial.error) for trial in result.trials] == [
        ("failed", "ValueError: no such model, pwd=***"), ("complete", ""), ("failed", "ZeroDivisionError: in step 7"),
        ("complete", ""),
    ]  # fmt: skip
    assert [trial.step for trial in result.trials] == [0, 15, 7, 15]
    assert str(result).splitlines()[-1] == "trial 2: ZeroDivisionError: in step 7"
    assert result.best.number in (1, 3) and len(models) == 4


def test_search_raises_after_three_failed_trials(tmp_path: Path) -> None:
    failing = functools.partial(native, **acts_at(1, ZeroDivisionError("always")))
    with pytest.raises(ZeroDivisionError, match="always") as raised:
        search(failing, RATES, trials=9, save_dir=tmp_path)
    assert "Every trial so far has failed: trial 0: ZeroDivisionError: always; trial 1" in raised.value.__notes__[-1]
    assert len(list(tmp_path.glob("trial-*"))) == 3


WRONG_SPACES: list[tuple[Any, str]] = [
    ({}, "`space` must be a dict with a list of choices"),
    ({3: [1]}, "`space` has the key 3"),
    ({"a": []}, r"space\['a'\] is an empty list"),
    ({"a": [1, 2, 1]}, "has the choice 1 twice"),
    ({"a": [nn.ReLU]}, "has the choice .*ReLU.* choose other objects by a string"),
    ({"a": [float("nan")]}, "has the choice nan"),
    ({"a": 0.1}, r"must be a list of choices.*got 0.1.*or write \[0.1\]"),
    ({"a": (1, 2)}, r'Write \[1, 2\] for two choices, or {"low": 1, "high": 2} for a range'),
    ({"a": {"low": 1, "hihg": 2}}, "has the key 'hihg'; a range has .* Did you mean 'high'"),
    ({"a": {"low": 1}}, r"`space\['a'\]\['high'\]` must be a finite number, got None"),
    ({"a": {"low": 1, "high": float("inf")}}, "'high'.* must be a finite number, got inf"),
    ({"a": {"low": 2, "high": 1}}, "has low=2 and high=1. 'low' must be below 'high'"),
    ({"a": {"low": 0, "high": 1, "log": True}}, "log=True and low=0.*begins above 0"),
    ({"a": {"low": 1, "high": 2, "log": 1}}, "has log=1. It must be True or False"),
    ({"a": {"low": 1, "high": 9, "log": True, "step": 2}}, "has both 'log' and 'step'"),
    ({"a": {"low": 1, "high": 9, "step": 0}}, r"\['step'\]` must be a finite number above 0 and of at most 8, got 0"),
]
WRONG_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    *(({"space": space}, words) for space, words in WRONG_SPACES),
    ({"trials": 0}, "`trials` must be an integer of at least 1, got 0"),
    ({"trials": None}, "`trials` is the total number of trials"),
    ({"seed": -1}, "`seed` must be an integer of at least 0"),
    ({"direction": "up"}, "`direction` must be 'max', 'min' or None, got 'up'"),
    ({"direction": "max"}, "direction='max', but the objective of the trainers is 'loss' with direction 'min'"),
    ({"sampler": "gird"}, "`sampler` must be one of .* Did you mean 'grid'"),
    ({"pruner": 3}, "`pruner` must be one of 'median', 'none', or a pruner of optuna, got 3"),
    ({"sampler": "grid"}, r"space\['learning_rate'\] cannot be listed"),
    ({"make_trainer": None}, "`make_trainer` must be callable"),
    ({"make_trainer": lambda params, folder: None}, "`make_trainer` must return a trainer, got NoneType"),
    ({"make_trainer": lambda params, folder: native(params, folder.parent)}, "each trial needs its own folder"),
    (
        {"make_trainer": lambda params, folder: Trainer(t16(), rows(8), save_dir=folder, loss_fn=nn.MSELoss())},
        "the trainer has no evaluation set. Pass `eval_dataset`",
    ),
    (
        {"make_trainer": functools.partial(of_transformers, save_strategy="no")},
        "has save_dir=None.*With TrainingArguments, `save_strategy` must not be 'no'",
    ),
    ({"make_trainer": lambda params, folder: 1 / 0}, "division by zero"),
]


@pytest.mark.parametrize(("options", "words"), WRONG_ARGUMENTS)
def test_search_rejects_wrong_arguments(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Nothing is written."""
    arguments: dict[str, Any] = {"make_trainer": native, "space": RATES, "trials": 2, "save_dir": tmp_path / "search"}
    with pytest.raises((ConfigError, ZeroDivisionError), match=words):
        search(**{**arguments, **options})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # transformers makes its folder


def test_search_rejects_trained_trainer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trial 0 has trained before"):
        search(lambda params, folder: fit(native(params, folder, epochs=1)), RATES, trials=1, save_dir=tmp_path)


def test_search_without_optuna_or_complete_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"No trial of .* is complete"):
        SearchResult([], "loss", "min", tmp_path).best  # noqa: B018
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"search needs optuna, which is not installed. Run `pip install optuna`"):
        search(native, RATES, trials=1, save_dir=tmp_path)


def test_space_suggests_types_of_range() -> None:
    space = Space({
        "whole": {"low": 1, "high": 8, "step": 3}, "parts": {"low": 0, "high": 1, "step": 0.3},
        "large": {"low": 1, "high": 1000, "log": True},
    })  # fmt: skip
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    suggestions = [space.suggest(study.ask()) for _ in range(30)]
    assert {values["whole"] for values in suggestions} == {1, 4, 7}
    assert {round(values["parts"], 6) for values in suggestions} == {0.0, 0.3, 0.6, 0.9}
    assert all(type(values["large"]) is int for values in suggestions)


def test_search_over_seeds_has_mean_and_deviation(tmp_path: Path) -> None:
    def make(params: dict[str, Any], folder: Path) -> Trainer:
        return native(params, folder, epochs=1, seed=params["trainer.seed"])

    space = {"learning_rate": [1e-5, 0.05], "trainer.seed": [1, 2, 3]}
    result = search(make, space, sampler="grid", pruner="none", save_dir=tmp_path)
    best, other = result.seed_means
    rates = [mean.params["learning_rate"] for mean in (best, other)]
    scores = [trial.score for trial in result.trials if trial.params["learning_rate"] == rates[0]]
    assert {*rates} == {0.05, 1e-5} and best.mean < other.mean
    assert (best.mean, best.deviation, best.trials) == (statistics.fmean(scores), statistics.stdev(scores), 3)
    assert len(set(scores)) == 3
    last = str(result).splitlines()[-2:]
    assert last[0] == f"learning_rate={rates[0]}: loss {best.mean:.4g} ± {best.deviation:.4g} over 3 seeds"
    assert last[1].startswith(f"learning_rate={rates[1]}: ")
    broken = SearchResult([*result.trials[:1], replace(result.trials[1], state="pruned")], "loss", "min", tmp_path)
    assert [(mean.deviation, mean.trials) for mean in broken.seed_means] == [(None, 1)]
    plain = [replace(trial, params={"rate": 1.0}) for trial in result.trials]
    assert SearchResult(plain, "loss", "min", tmp_path).seed_means == []
