"""Traces of steps by the profiler."""

import gzip
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import KINDS, make
from marks import thinned
from recipes import FailsAt, Trace, callback, fit, rows, t16

from omnitrain import Callback, ConfigError, Profiler
from omnitrain.callbacks.profiler import PARTS, format_table

CPU = torch.device("cpu")


def run(kind: str, folder: Path, *callbacks: Callback, resume: str | None = None, **options: Any) -> Any:
    options = {"max_steps": 12, "epochs": None, "save_dir": folder, **options}
    return fit(make(kind, CPU, t16(0.2), rows(32), callbacks=callbacks, **options), resume)


def spans(path: Path) -> dict[str, int]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kinds = ("user_annotation", "cpu_op")
    names = [event["name"] for event in events if event.get("cat") in kinds and event.get("ph") == "X"]
    counts = {part: names.count(part) for part in PARTS}
    return counts | {"steps": sum(name.startswith("ProfilerStep#") for name in names)}


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def assert_no_annotations(trainer: Any) -> None:
    assert not {"forward", "backward", "update"} & set(vars(trainer.backend))
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("kind", thinned(KINDS, ["native", "hf"]))
def test_traces_have_the_steps_of_the_schedule(kind: str, tmp_path: Path) -> None:
    trace, profiler = Trace(), Profiler(skip=2, wait=1, warmup=1, active=2, repeat=2, rows=3)
    trainer = run(kind, tmp_path, profiler, trace, gradient_accumulation_steps=2)
    assert files_in(tmp_path / "profile") == {"rank0-step10.json.gz", "rank0-step6.json.gz"}
    for path in (tmp_path / "profile").iterdir():
        counts = spans(path)
        assert [counts[name] for name in ("steps", "forward", "backward", "update")] == [2, 4, 4, 2]
        assert 2 <= counts["data"] <= 3  # one more where an epoch ends between
    tables = [values["profile"].splitlines() for _, values in trace.reports]
    assert [len(table) for table in tables] == [5, 5]
    assert all(f"{part} " in tables[0][-1] for part in PARTS)
    assert_no_annotations(trainer)


def test_repeat_0_has_no_end_and_a_resume_counts_again(tmp_path: Path) -> None:
    run("native", tmp_path, Profiler(skip=0, warmup=1, active=1, repeat=0), max_steps=6)
    run("native", tmp_path, Profiler(skip=1, active=2), max_steps=12, resume="last")
    assert files_in(tmp_path / "profile") == {f"rank0-step{n}.json.gz" for n in (2, 4, 6, 10)}


def test_profiler_is_off_in_skipped_steps_and_sets_no_filters(tmp_path: Path) -> None:
    profiler, calls = Profiler(skip=3, wait=1, warmup=1, active=1, repeat=2), list[bool]()
    filters = [*warnings.filters]
    note = callback(on_step_start=lambda _: calls.append(profiler._profile is not None))
    with warnings.catch_warnings(record=True) as caught:
        run("native", tmp_path, profiler, note, max_steps=11)
        added = [entry for entry in warnings.filters if entry not in filters]
    assert [step for step, is_on in enumerate(calls, 1) if is_on] == [5, 6, 8, 9]
    assert not any("Profiler" in str(entry) for entry in added)
    assert not any("Profiler" in str(warning.message) for warning in caught)


OPTIONS = {"record_shapes": b'"Input Dims"', "profile_memory": b'"[memory]"', "with_stack": b'"python_function"'}


def test_profiler_notes_what_is_asked_for(tmp_path: Path) -> None:
    for value in (False, True):
        folder = tmp_path / str(value)
        profiler = Profiler(skip=0, warmup=2, active=1, folder=folder, **dict.fromkeys(OPTIONS, value))
        run("native", tmp_path / f"run-{value}", profiler, max_steps=4)
        trace = gzip.decompress((folder / "rank0-step3.json.gz").read_bytes())
        assert [words in trace for words in OPTIONS.values()] == [value] * 3


def test_run_shorter_than_the_schedule_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run("native", tmp_path / "a", Profiler(skip=4, warmup=1, active=3), max_steps=3)
    assert "has traced nothing: this run had 3 steps, and step 6 would be the first" in caplog.text
    run("native", tmp_path / "b", Profiler(skip=4, warmup=1, active=3), max_steps=6)
    assert "its last trace has fewer than 3 steps" in caplog.text
    assert (tmp_path / "b" / "profile").exists() and not (tmp_path / "a" / "profile").exists()


@pytest.mark.parametrize(("kind", "step"), [("native", 1), ("native", 2), ("hf", 2)])
def test_error_ends_the_profiler(kind: str, step: int, tmp_path: Path) -> None:
    options = {"save_dir": tmp_path / "a", "callbacks": [Profiler(skip=0, warmup=1, active=4)]}
    trainer = make(kind, CPU, FailsAt(step), rows(32), loss_fn=F.mse_loss, **options)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.train()
    assert_no_annotations(trainer)
    run(kind, tmp_path / "b", Profiler(skip=0, warmup=1, active=2), max_steps=4)
    assert (tmp_path / "b" / "profile" / "rank0-step3.json.gz").exists()


def test_profiler_is_alone_and_needs_a_folder_but_no_disk(tmp_path: Path, caplog: Any) -> None:
    with pytest.raises(ConfigError, match="another one is active, in the `callbacks` of this run"):
        run("native", tmp_path, Profiler(), Profiler())
    with torch.profiler.profile(), pytest.raises(ConfigError, match="another one is active, around"):
        run("native", tmp_path, Profiler())
    with pytest.raises(ConfigError, match="A Profiler needs a folder for its traces"):
        make("native", CPU, t16(), rows(8), callbacks=[Profiler()]).train()
    profilers = [Profiler(skip=0, warmup=1, active=1, folder=tmp_path / name) for name in ("traces", "file")]
    (tmp_path / "file").write_text("")
    for profiler in profilers:
        make("native", CPU, t16(), rows(16), callbacks=[profiler]).train()
    assert (tmp_path / "traces" / "rank0-step2.json.gz").exists()
    assert caplog.text.count("A trace of the profiler cannot be written") == 1


def test_profiler_on_error_ends_the_profiler_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = Profiler(skip=0, active=1, repeat=0)
    profiler.on_error = "warn"
    monkeypatch.setattr("omnitrain.callbacks.profiler.format_table", lambda *_: 1 / 0)
    trainer = run("native", tmp_path / "a", profiler)
    assert trainer.progress.step == 12 and len(files_in(tmp_path / "a" / "profile")) == 1
    assert_no_annotations(trainer)
    monkeypatch.undo()
    run("native", tmp_path / "b", Profiler(skip=0, active=1), max_steps=3)
    assert (tmp_path / "b" / "profile").exists()


def operation(key: str, host: float, device: float = 0.0, count: int = 1) -> Any:
    times = {"self_cpu_time_total": host, "cpu_time_total": host, "self_device_time_total": device}
    return SimpleNamespace(key=key, count=count, **times)


def test_table_is_sorted_by_time_on_the_device() -> None:
    on_host = [operation("mm", 1000, 0, 4), operation("add", 3000), operation("forward", 5000)]
    on_host += [operation("ProfilerStep#3", 9000)]
    on_device = [operation("mm", 1000, 6000, 4), operation("add", 3000, 2000), operation("forward", 5000, 9999)]
    parts = "Parts of the steps, in ms on the host: forward 5.000."
    assert format_table(on_host, 1).splitlines() == [
        "operation    calls    ms on host  share",
        "add              1         3.000  75.0%",
        parts,
    ]
    assert format_table(on_device, 5).splitlines() == [
        "operation    calls  ms on device  share",
        "mm               4         6.000  75.0%",
        "add              1         2.000  25.0%",
        parts,
    ]
