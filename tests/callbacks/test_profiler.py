"""Steps that are traced: which ones, what is written and shown, and what is refused."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import KINDS, make
from recipes import rows, same, t16, weights

from omnitrain import Callback, ConfigError, Profiler
from omnitrain.callbacks.profiler import PARTS, table_of

CPU = torch.device("cpu")


class Tables(Callback):
    """Keeps the tables that are reported."""

    def __init__(self) -> None:
        self.tables: list[str] = []

    def on_report(self, trainer: Any, values: Any) -> None:
        self.tables.append(values["profile"])


class Fails(Callback):
    """Ends the run by an error at the beginning of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer: Any) -> None:
        if trainer.progress.step + 1 == self.step:
            raise RuntimeError("no more")


def run(kind: str, folder: Path, *callbacks: Callback, resume: str | None = None, **options: Any) -> Any:
    options = {"max_steps": 12, "epochs": None, "save_dir": folder, **options}
    trainer = make(kind, CPU, t16(0.2), rows(32), callbacks=callbacks, **options)
    trainer.train(resume)
    return trainer


def spans(path: Path) -> dict[str, int]:
    """How many times each part of a step is in a trace, and the steps of the profiler."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [one["name"] for one in events if one.get("cat") in ("user_annotation", "cpu_op") and one.get("ph") == "X"]
    found = {part: names.count(part) for part in PARTS}
    return found | {"steps": sum(name.startswith("ProfilerStep#") for name in names)}


@pytest.mark.parametrize("kind", KINDS)
def test_traces_hold_the_steps_of_the_schedule_and_no_number_changes(kind: str, tmp_path: Path) -> None:
    tables = Tables()
    profiler = Profiler(skip=2, wait=1, warmup=1, active=2, repeat=2, rows=3)
    options: dict[str, Any] = {"gradient_accumulation_steps": 2}
    watched = run(kind, tmp_path / "a", profiler, tables, **options)
    plain = run(kind, tmp_path / "b", **options)
    assert same(weights(watched.get_model()), weights(plain.get_model()))
    folder = tmp_path / "a" / "profile"
    assert sorted(one.name for one in folder.iterdir()) == ["rank0-step10.json.gz", "rank0-step6.json.gz"]
    for path in folder.iterdir():
        found = spans(path)
        assert (found["steps"], found["forward"], found["backward"], found["update"]) == (2, 4, 4, 2)
        assert 2 <= found["data"] <= 3  # one more where an epoch ends between
    assert len(tables.tables) == 2
    assert [len(one.splitlines()) for one in tables.tables] == [5, 5]
    assert all(f"{part} " in tables.tables[0].splitlines()[-1] for part in PARTS)
    backend = vars(watched.backend)
    assert not {"forward", "backward", "update"} & set(backend) and watched._feed._next is next


def test_it_traces_from_the_first_step_and_to_the_end_of_the_run_if_told_to(tmp_path: Path) -> None:
    run("native", tmp_path, Profiler(skip=0, warmup=1, active=1, repeat=0), max_steps=6)
    assert {one.name for one in (tmp_path / "profile").iterdir()} == {f"rank0-step{n}.json.gz" for n in (2, 4, 6)}


def test_a_resumed_run_counts_from_where_it_goes_on(tmp_path: Path) -> None:
    run("native", tmp_path, max_steps=5)
    run("native", tmp_path, Profiler(skip=1, active=2), max_steps=12, resume="last")
    assert [one.name for one in (tmp_path / "profile").iterdir()] == ["rank0-step9.json.gz"]


@pytest.mark.parametrize(
    ("steps", "said"), [(3, "has traced nothing: it counted 3 steps, and the first that it traces is step 6"),
                        (6, "its last trace has fewer than 3 steps")],
)  # fmt: skip
def test_a_run_shorter_than_the_schedule_says_so(
    steps: int, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "omnitrain"):
        run("native", tmp_path, Profiler(skip=4, warmup=1, active=3), max_steps=steps)
    assert said in caplog.text
    assert (tmp_path / "profile").exists() == (steps > 5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_error_ends_the_profiler_too(kind: str, step: int, tmp_path: Path) -> None:
    callbacks = [Profiler(skip=0, warmup=1, active=4), Fails(step)]
    trainer = make(kind, CPU, t16(), rows(32), save_dir=tmp_path / "a", callbacks=callbacks)
    with pytest.raises(RuntimeError, match="no more"):
        trainer.train()
    assert "forward" not in vars(trainer.backend) and trainer._feed._next is next
    assert not torch.autograd._profiler_enabled()
    run(kind, tmp_path / "b", Profiler(skip=0, warmup=1, active=2), max_steps=4)
    assert (tmp_path / "b" / "profile" / "rank0-step3.json.gz").exists()


def test_two_profilers_are_refused_before_the_first_step_and_the_next_run_has_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another one is at work, in the `callbacks` of this run"):
        run("native", tmp_path, Profiler(), Profiler())
    with torch.profiler.profile(), pytest.raises(ConfigError, match="another one is at work, around"):
        run("native", tmp_path, Profiler())
    run("native", tmp_path, Profiler(skip=0, active=1), max_steps=3)


def test_a_run_without_a_folder_needs_one_for_traces(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no place for the traces of a Profiler"):
        make("native", CPU, t16(), rows(8), callbacks=[Profiler()]).train()
    profiler = Profiler(skip=0, warmup=1, active=1, folder=tmp_path / "traces")
    make("native", CPU, t16(), rows(32), callbacks=[profiler]).train()
    assert (tmp_path / "traces" / "rank0-step2.json.gz").exists()


def test_a_disk_that_fails_costs_the_trace_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiler = Profiler(skip=0, active=1, folder=tmp_path / "traces")
    (tmp_path / "traces").write_text("")
    trainer = make("native", CPU, t16(), rows(32), callbacks=[profiler])
    trainer.train()
    assert trainer.progress.step == 8 and "A trace of the profiler cannot be written" in caplog.text


@pytest.mark.parametrize(
    "options", [{"skip": -1}, {"wait": 0.5}, {"warmup": True}, {"active": 0}, {"repeat": -2}, {"rows": 0}]
)
def test_numbers_that_make_no_schedule_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"`{name}` of a Profiler must be an integer of at least"):
        Profiler(**options)


@pytest.mark.parametrize("policy", ["disable", "warn"])
def test_a_profiler_that_fails_where_the_run_may_go_on_is_ended(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> str:
        raise ValueError("no table")

    profiler = Profiler(skip=0, active=1, repeat=0)
    profiler.on_error = policy
    with monkeypatch.context() as patch:
        patch.setattr("omnitrain.callbacks.profiler.table_of", fail)
        trainer = run("native", tmp_path / "a", profiler)
    assert trainer.progress.step == 12 and not torch.autograd._profiler_enabled()
    assert len(list((tmp_path / "a" / "profile").iterdir())) == 1
    run("native", tmp_path / "b", Profiler(skip=0, active=1), max_steps=3)
    assert (tmp_path / "b" / "profile").exists()


class Operation:
    def __init__(self, key: str, host: float, device: float = 0.0, count: int = 1) -> None:
        self.key, self.count = key, count
        self.self_cpu_time_total = self.cpu_time_total = host
        self.self_device_time_total = device


def test_the_table_shows_what_took_longest_where_it_ran() -> None:
    found = [Operation("mm", 1000, 0, 4), Operation("add", 3000), Operation("forward", 5000)]
    found += [Operation("ProfilerStep#3", 9000)]
    on_device = [Operation("mm", 1000, 6000, 4), Operation("add", 3000, 2000), Operation("forward", 5000, 9999)]
    assert table_of(found, 1).splitlines() == [
        "operation    calls    ms on host  share",
        "add              1         3.000  75.0%",
        "Parts of the steps, in ms on the host: forward 5.000.",
    ]
    assert table_of(on_device, 5).splitlines() == [
        "operation    calls  ms on device  share",
        "mm               4         6.000  75.0%",
        "add              1         2.000  25.0%",
        "Parts of the steps, in ms on the host: forward 5.000.",
    ]
