"""Drills of scripts with planted faults: what differs is found, and what is to blame for it."""

import functools
import json
import os
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from marks import thinned
from programs import LIMIT, fork
from torch import nn

from omnitrain import ConfigError, Trainer
from omnitrain.config import overrides
from omnitrain.diagnostics import drill as drills
from omnitrain.diagnostics import interruptions
from omnitrain.diagnostics.drill import Drill, Record, drill, plan_interruptions
from omnitrain.diagnostics.script import Outcome, Script

FORGOTTEN = [
    ("callback", "another learning rate (same batch, loss, weights, random state)", "callback Halving: its 'count'"),
    ("collator", "another batch", "data_collator Noise: its 'generator'"),
    ("function", "another batch", "data_collator scale(): its 'chance'"),
]
LACKING = [
    ("several runs", "save_dir '"),
    ("late save", "saves only at its end: the drill saves every 4 steps"),
    ("clock", "two undisturbed runs differ in them: eval_pace"),
    ("time", "names are those of times and sizes: eval_arrival_time"),
    ("no folder", "has no `save_dir`"),
    ("transformers", "is redirected"),
]
PLANTED = Path(__file__).with_name("planted.py")


def run_forked(
    script: Script, folder: Path, values: Any, *, name: str = "output", is_stuck: Any = bool, **_: Any
) -> Outcome:
    """Run a script as `Script.run` does, in a fork that has imported everything already."""
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"{name}.log"

    def run() -> int:
        sys.stdout = sys.stderr = output.open("w", buffering=1)
        os.environ[overrides.VARIABLE] = script.complete(values)
        sys.argv = [script.path, *script.arguments]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.seed()  # a new process would not have the state of this one
        try:
            runpy.run_path(script.path, run_name="__main__")
        except SystemExit as error:
            return int(error.code or 0)
        return 0

    child, end = fork(run), time.monotonic() + LIMIT
    while not (state := os.waitpid(child, os.WNOHANG))[0]:
        if is_stuck() or time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(state[1])
    return Outcome(code if code >= 0 else 128 - code, 1.0, output)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("drills")))
    assert Trainer and torch._dynamo  # imported here by their first use, not in each of the forked processes
    monkeypatch.setattr(Script, "run", run_forked)
    monkeypatch.setattr(drills, "_STANDSTILL_SECONDS", 0.0)


def run(folder: Path, fault: str = "", kills: int = 4, **options: Any) -> Drill:
    return drill(Script(str(PLANTED), [fault, str(folder)]), kills, **options)


pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]


def test_drill_of_a_sound_script_is_equal(tmp_path: Path) -> None:
    """Interrupted once by each signal; its own folder stays empty, and nothing is left of the drill."""
    lines: list[str] = []
    result = run(tmp_path, seed=1, report=lines.append)
    assert result.ok and result.code == 0 and all(result.parts.values()), str(result)
    assert lines[0].startswith("undisturbed: 20 steps, 5 evaluations, ")
    assert {start.interruption["signal"] for start in result.starts[:-1] if start.interruption} == {*drills.SIGNALS}
    for start in result.starts[:-1]:
        assert start.step is not None and start.resumed_at is not None and start.resumed_at <= start.step + 1
    assert not list(tmp_path.iterdir()) and result.folder is None
    assert str(result).splitlines()[-1] == result.verdict() == f"equal to the bit: {', '.join(result.parts)}"


@pytest.mark.parametrize(("fault", "what", "suspect"), thinned(FORGOTTEN, FORGOTTEN[:2]))
def test_drill_reports_forgotten_state(fault: str, what: str, suspect: str, tmp_path: Path) -> None:
    result = run(tmp_path, fault, 1, signals=["kill"], seed=2)
    (start, _) = result.starts
    assert result.code == 1 and result.is_deterministic and start.resumed_at is not None
    assert what in result.difference and result.difference.startswith("since step ")
    assert result.suspects[0].startswith(suspect)
    assert not result.parts["weights"] and not result.parts["metrics.jsonl"] and result.parts["random state"]
    assert result.folder is not None and result.folder.is_dir()


def record_of(name: str, *counts: str) -> Record:
    """Return the record of a run in which a part has this count at the end, on each rank."""
    start = {"run": "run-1", "step": 0, "event": "start"}
    end = {"run": "run-1", "step": 1, "event": "end"}
    ranks = {str(rank): [start, {**end, "objects": {name: {"count": count}}}] for rank, count in enumerate(counts)}
    return Record(ranks, {})


@pytest.mark.parametrize(("name", "remedy"), [
    ("callback Halving", "; give it `state_dict()` and `load_state_dict()`"),
    ("data_collator scale()", "; make it a class with `state_dict()`"),
    ("model Noisy", "; make it a buffer"),
    ("compute_metrics count()", "; keep it in a callback"),
    ("TrainerCallback Halving", "; have it inherit from transformers' `ExportableState`"),
])  # fmt: skip
def test_drill_suggests_what_a_checkpoint_saves(name: str, remedy: str) -> None:
    undisturbed, resumed, both = (record_of(name, *counts) for counts in ("3", "1", "33"))
    (suspect,) = drills._find_suspects(undisturbed, resumed, undisturbed)
    assert suspect.startswith(f"{name}: its 'count' is 3 undisturbed, 1 resumed{remedy}")
    assert not drills._find_suspects(undisturbed, resumed, record_of(name, "2"))  # such as a time
    (suspect,) = drills._find_suspects(both, record_of(name, "3", "1"), both)
    assert suspect.startswith(f"{name} of rank 1: its 'count' is 3 undisturbed, 1 resumed")


def add_noise(values: Any, generator: np.random.Generator) -> Any:
    return values


class Stateful(torch.utils.data.Dataset[Any]):
    """A dataset, and a collator, with state in what it holds."""

    def __init__(self) -> None:
        self.noise = functools.partial(add_noise, generator=np.random.default_rng(0))
        self.losses, self.average = list(range(500)), torch.zeros(2)

    def __len__(self) -> int:
        return 4

    def collate(self, samples: Any) -> Any:
        return self.noise(samples)


@pytest.mark.parametrize(("attribute", "change"), [
    ("noise.generator", lambda part: part.noise.keywords["generator"].random()),
    ("losses", lambda part: part.losses.append(3)),
    ("average", lambda part: part.average.add_(1)),
])  # fmt: skip
def test_observer_describes_nested_state(attribute: str, change: Any) -> None:
    """In a method that collates, and in a dataset inside of PyTorch's wrappers."""
    part = Stateful()
    data = torch.utils.data.Subset(torch.utils.data.ConcatDataset([part]), [0, 1])
    trainer = Trainer(nn.Linear(1, 1), data, data_collator=part.collate, device="cpu", progress_bar=False)
    before = dict(interruptions._objects(trainer))
    change(part)
    after = dict(interruptions._objects(trainer))
    assert before.keys() == {"data_collator Stateful", "train_dataset.dataset.datasets[0] Stateful"}
    for name, attributes in before.items():
        assert [key for key, text in attributes.items() if after[name][key] != text] == [attribute]


def test_drill_reports_an_unseeded_script(tmp_path: Path) -> None:
    result = run(tmp_path, "unseeded", 1, signals=["kill"])
    assert result.code == 2 and result.is_deterministic is False and result.folder is None
    assert result.verdict().startswith("not deterministic by itself: two undisturbed runs differ. since step 1: ")


def test_drill_supplies_deterministic_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drills, "_has_other_kernels", lambda record: True)  # as on a GPU
    result = run(tmp_path, "kernels", 1, signals=["kill"])
    assert result.ok and "the drill supplies deterministic=True" in str(result)
    result = run(tmp_path, "no kernel", 1, signals=["kill"])
    assert result.code == 2 and result.verdict().endswith(
        "With deterministic=True it failed: RuntimeError: nll_loss2d does not have a deterministic implementation\n"
        "Without a GPU it can be tried: put CUDA_VISIBLE_DEVICES= before the command."
    )


def test_drill_reports_a_resume_that_fails(tmp_path: Path) -> None:
    result = run(tmp_path, "rejecting", 2, signals=["term"])
    assert result.code == 1 and "cannot be restored" in result.difference and "SIGTERM at step" in result.difference


@pytest.mark.parametrize(("fault", "message"), [
    ("raises", "failed by itself, with exit code 1.*broken by itself"),
    ("trains nothing", "trained with no trainer of omnitrain"),
    ("only weights", "saves only weights"),
])  # fmt: skip
def test_drill_cannot_try(fault: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        run(tmp_path, fault)


@pytest.mark.parametrize(("fault", "note"), thinned(LACKING, LACKING[:1]))
def test_drill_supplies_what_a_script_lacks(fault: str, note: str, tmp_path: Path) -> None:
    result = run(tmp_path, fault, signals=["kill", "disk"], seed=3)
    assert result.ok and note in "\n".join(result.notes), str(result)
    assert not list(tmp_path.iterdir())
    if fault == "several runs":
        assert [*result.losses] == ["run-1", "run-2", "run-3", "run-3.2", "run-3.3"]


def test_drill_that_resumes_nothing_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"run": "run-1", "step": 1, "phase": "step", "signal": "kill", "number": 0, "ranks": None}
    monkeypatch.setattr(drills, "plan_interruptions", lambda *_: [place])
    with pytest.raises(ConfigError, match="Nothing was resumed"):
        run(tmp_path)


def test_drill_that_cannot_run_is_not_tried(tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    def fail_second(self: Script, folder: Path, values: Any, *, name: str = "output", **options: Any) -> Outcome:
        if name == "start-1":
            return Outcome(1, 1.0, folder / "none.log")
        return run_forked(self, folder, values, name=name, **options)

    monkeypatch.setattr(Script, "run", fail_second)
    with pytest.raises(ConfigError, match="before anything interrupted it"):
        run(tmp_path)
    monkeypatch.setattr(Script, "run", mock.Mock(side_effect=OSError(28, "No space left on device")))
    assert command("drill", PLANTED, "", tmp_path)[0] == 2


def test_drill_calls_nothing_equal_that_is_not_there() -> None:
    def record(**history: Any) -> Record:
        end = {"run": "run-1", "step": 1, "event": "end", "reason": "", "tensors": {}, "history": history}
        return Record({"0": [end | {"values": {"scheduler": "null"}}]}, {})

    parts = dict.fromkeys(["weights", "optimizer state", "random state", "history"], True)
    assert drills.compare(record(), record()) == ("", parts)
    assert "best" in drills.compare(record(best_step=1), record(best_step=1))[1]


def test_drill_command_prints_json_and_draws(tmp_path: Path, command: Any) -> None:
    picture = tmp_path / "drill.svg"
    words = f"--kills 1 --signals kill --seed 5 --timeout 300 -n 1 --json --picture {picture}".split()
    code, out, _ = command("drill", *words, PLANTED, "", tmp_path / "own")
    result = json.loads(out)
    assert code == 0 and result["ok"] and result["code"] == 0 and len(result["starts"]) == 2
    assert "kill" in picture.read_text()


def test_plan_covers_all_phases_and_signals() -> None:
    rows = [{"run": "run-1", "event": "start", "step": 0}]
    rows += [{"run": "run-1", "event": "step", "step": step} for step in range(1, 101)]
    rows += [{"run": "run-1", "event": "evaluation", "step": 50, "count": 3}]
    rows += [{"run": "run-1", "event": "save", "step": step, "count": 9} for step in (20, 80)]
    record = Record({"0": rows}, {})
    places = plan_interruptions(record, 16, drills.SIGNALS, 0, processes=2)
    assert places == plan_interruptions(record, 16, drills.SIGNALS, 0, processes=2)
    assert {place["phase"] for place in places} == {*drills.PHASES}
    assert {place["signal"] for place in places} == {*drills.SIGNALS}
    assert all(place["phase"] == "save" for place in places if place["signal"] == "disk")
    assert [place["step"] for place in places] == sorted(place["step"] for place in places)
    last = [plan_interruptions(record, 1, ["kill"], seed)[0] for seed in range(20)]
    assert all(place["step"] > 20 for place in last)  # after a checkpoint
    assert any(place["ranks"] is None for place in places) and any(place["ranks"] for place in places)


@pytest.mark.parametrize(("kills", "signals"), [(0, ["kill"]), (1, ["burn"]), (1, [])])
def test_drill_rejects_wrong_options(kills: int, signals: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`--kills 0`|`--signals"):
        run(tmp_path, kills=kills, signals=signals)


def test_drill_result_is_json() -> None:
    result = Drill(Script("train.py"), [], ["a note"], {"weights": False}, "since step 4", is_deterministic=False)
    content = json.loads(json.dumps(result.to_json()))
    assert content == result.to_json() and (content["ok"], content["code"], result.code) == (False, 2, 2)
    assert result._repr_html_().startswith("<pre>note: a note")
