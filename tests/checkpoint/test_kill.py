"""Runs that are killed, or whose disk fails, at any operation: they resume to the same end."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import random
import shutil
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
from marks import thinned
from resuming import (
    Killed,
    assert_same,
    build,
    comparable,
    differences,
    disturb_generators,
    journal,
    memory_folder,
    outcome,
    play,
    train,
)

from omnitrain import Callback, CheckpointError, Trainer
from omnitrain.checkpoint import state
from omnitrain.checkpoint.disk import FileSystem
from omnitrain.checkpoint.history import HISTORY
from omnitrain.checkpoint.store import MANIFEST, Store

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes to kill them")

# A checkpoint in the middle of an epoch, one on an epoch's last step, which is saved again after it, and pruning.
RUN: dict[str, Any] = {"epochs": 2, "save_steps": 2, "eval_steps": 2, "save_total_limit": 1, "log_steps": 1}
NO_BEST: dict[str, Any] = {**RUN, "load_best_at_end": False}


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of RUN without any fault, as far as a killed process leaves it."""
    return comparable(play(tmp_path_factory.mktemp("undisturbed") / "run", **RUN))


def fork(action: Callable[[], object]) -> int:
    """Do something in a child process; return its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # its workers
        return code
    code = 1
    try:
        os.setpgid(0, 0)
        action()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# --- a fault at each operation


class Disk(FileSystem):
    """Records its operations, the writing of tensors included, and calls `fault` in one of them.

    A file is half written by then.
    """

    def __init__(self, at: int | None = None, fault: Callable[[Disk, Path], None] | None = None) -> None:
        self.at, self.fault = at, fault
        self.operations: list[str] = []
        self.unsynced: dict[int, Path] = {}

    def _begin(self, kind: str, path: Path) -> None:
        self.operations.append(f"{kind} {path.name}")
        if self.fault is not None and len(self.operations) - 1 == self.at:
            self.fault(self, path)

    def mkdir(self, path: Path) -> None:
        self._begin("mkdir", path)
        super().mkdir(path)

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        self._begin("write", path)
        super().write(path, data)
        self.unsynced[path.stat().st_ino] = path

    def write_tensors(self, tensors: Any, path: Path) -> None:
        path.write_bytes(b"half of a file")
        self._begin("write_tensors", path)
        save_tensors(tensors, path)
        self.unsynced[path.stat().st_ino] = path

    def sync(self, path: Path) -> None:
        self._begin("sync", path)
        self.unsynced.pop(path.stat().st_ino, None)

    def rename(self, source: Path, target: Path) -> None:
        self._begin("rename", source)
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._begin("unlink", path)
        self.unsynced.pop(path.stat().st_ino, None)
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        self._begin("rmdir", path)
        super().rmdir(path)


save_tensors = state.save_tensors


@contextlib.contextmanager
def saving_to(disk: Disk, trainer: Trainer) -> Iterator[Disk]:
    """Let the trainer save to a fake disk."""
    assert trainer.store is not None
    trainer.store.fs = disk
    state.save_tensors = disk.write_tensors
    try:
        yield disk
    finally:
        state.save_tensors = save_tensors


EXTENT = pytest.mark.parametrize("is_exhaustive", [pytest.param(True, marks=pytest.mark.slow), False])


def operations(folder: Path, is_exhaustive: bool, **options: Any) -> list[int]:
    """Return the numbers of the operations of a run to test: all, or one of each kind, in the middle of the run."""
    trainer = build(folder / "counted", **{**RUN, **options})
    with saving_to(Disk(), trainer) as disk:
        train(trainer)
    names = disk.operations
    assert len(names) > 80
    by_kind: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        by_kind.setdefault(name.split()[0], []).append(number)
    assert {*by_kind} == {"mkdir", "write", "write_tensors", "sync", "rename", "unlink", "rmdir"}
    manifests = [number for number, name in enumerate(names) if name == f"write {MANIFEST}"]
    manifest = manifests[len(manifests) // 2]
    middle = {numbers[len(numbers) // 2] for numbers in by_kind.values()}
    return [*range(len(names))] if is_exhaustive else sorted(middle | {manifest - 1, manifest, manifest + 1})


def kill(disk: Disk, path: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
@EXTENT
def test_kill_at_file_operation_resumes_identically(
    is_exhaustive: bool, folder: Path, undisturbed: dict[str, Any]
) -> None:
    for number in operations(folder, is_exhaustive):
        run = folder / str(number)
        trainer = build(run, **RUN)
        with saving_to(Disk(number, kill), trainer):
            assert fork(trainer.train) == -signal.SIGKILL
        assert_same(comparable(play(run, **RUN)), undisturbed, f"killed at operation {number}")
        shutil.rmtree(run)


def cut_power(disk: Disk, path: Path) -> None:
    """Empty the files that were not synced, wherever they have been moved to, and end the process."""
    for file in path.parents[len(path.parts) - 1 - path.parts.index("power")].rglob("*"):
        if file.is_file() and file.stat().st_ino in disk.unsynced:
            file.write_bytes(b"")
    disk.fault = lambda disk, path: None
    raise Killed


@EXTENT
def test_power_cut_at_file_operation_resumes_identically(
    is_exhaustive: bool, folder: Path, undisturbed: dict[str, Any]
) -> None:
    for number in operations(folder, is_exhaustive):
        run = folder / "power" / str(number)
        trainer = build(run, **RUN)
        with saving_to(Disk(number, cut_power), trainer) as disk:
            train(trainer)
        assert disk.fault is not cut_power, "the power was not cut"
        assert_same(comparable(play(run, **RUN)), undisturbed, f"cut at operation {number}")
        shutil.rmtree(run)


def fail_once(disk: Disk, path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def fail_on(disk: Disk, path: Path) -> None:
    disk.at = len(disk.operations)  # the next operation fails too
    fail_once(disk, path)


@pytest.mark.parametrize(
    ("fault", "is_exhaustive"), thinned(itertools.product([fail_once, fail_on], [True, False]), [(fail_on, False)])
)
def test_disk_failure_at_operation_does_not_end_the_run(
    fault: Any, is_exhaustive: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs checkpoints, which are reported, and neither weights nor metrics; what is left can be resumed."""
    expected = play(folder / "undisturbed", **NO_BEST)
    saves = 5  # steps 2, 4, 6, 6 after its epoch, and once more as the best has no checkpoint
    for number in operations(folder, is_exhaustive, **NO_BEST):
        case = f"failed at operation {number}"
        run = folder / str(number)
        trainer = build(run, **NO_BEST)
        caplog.clear()
        with saving_to(Disk(number, fault), trainer):
            trainer.train()
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) <= (1 if fault is fail_once else saves + 2)  # run.json and config.yaml
        assert all("No space left" in error for error in errors)
        assert fault is fail_on or not list(run.glob("*.tmp"))
        result = outcome(trainer)
        for key in ("tensors", "objective", "position", "journal"):
            assert_same(journal(run) if key == "journal" else result[key], expected[key], case)
        if Store(run).resolve("auto") is not None:  # it verifies
            assert_same(play(run, **NO_BEST)["last"], expected["last"], case)
        shutil.rmtree(run, ignore_errors=True)


@EXTENT
def test_disk_failure_during_overwrite_does_not_end_the_run(is_exhaustive: bool, folder: Path) -> None:
    play(folder / "earlier", save_steps=2, epochs=2)
    options = {**NO_BEST, "overwrite": True, "save_steps": 4}
    number = -1
    for number in itertools.count(0, 1 if is_exhaustive else 12):
        run = folder / str(number)
        shutil.copytree(folder / "earlier", run)
        trainer = build(run, **options)
        with saving_to(Disk(number, fail_once), trainer) as disk:
            trainer.train()
        if len(disk.operations) <= number:
            break
        assert trainer.metrics["stop_reason"] == "epochs"
        names = {path.name for path in Store(run).checkpoints()}
        assert names <= {"checkpoint-4", "checkpoint-6"}, f"failed at operation {number}"
        shutil.rmtree(run)
    assert number > 50


@pytest.mark.parametrize("is_async", [False, True])
def test_save_required_failure_ends_the_run(folder: Path, is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier checkpoint stays."""

    def fail_at_step_4(tensors: Any, path: Path) -> None:
        if "checkpoint-4" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        save_tensors(tensors, path)

    trainer = build(folder / "run", **RUN, save_required=True, async_save=is_async)
    monkeypatch.setattr(state, "save_tensors", fail_at_step_4)
    with pytest.raises(CheckpointError, match=r"checkpoint-4.*No space left"):
        trainer.train()
    assert [path.name for path in Store(folder / "run").checkpoints()] == ["checkpoint-2"]
    assert trainer.progress.step in ((4, 5, 6) if is_async else (4,))


# --- killed at any moment


class Timer(Callback):
    """Has the system end the process, as SIGKILL does, a few milliseconds of its processor time after a step began."""

    def __init__(self, steps: int, seconds: float) -> None:
        self.steps, self.seconds = steps, seconds

    def on_step_start(self, trainer: Any) -> None:
        self.steps -= 1
        if self.steps < 0:
            signal.setitimer(signal.ITIMER_PROF, self.seconds)


@pytest.mark.processes
@pytest.mark.parametrize("runs", [pytest.param(6, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("is_async", [False, True])
def test_kill_at_random_moments_resumes_identically(folder: Path, is_async: bool, runs: int) -> None:
    options: dict[str, Any] = {**RUN, "epochs": 4, "save_steps": 3, "async_save": is_async}
    expected = comparable(play(folder / "undisturbed", **options))
    chance = random.Random(3 + is_async)
    kills = 0
    for number in range(runs):
        run, code = folder / str(number), -signal.SIGPROF
        while code:  # a run that gets past its next checkpoint resumes from there
            timer = Timer(chance.randint(0, 8), chance.uniform(0.0001, 0.004))  # 12 steps of about 4 ms
            code = fork(lambda: train(build(run, callbacks=lambda: [timer], **options), resume_from="auto"))  # noqa: B023
            assert code in (0, -signal.SIGPROF)
            kills += code != 0
        assert_same(comparable(play(run, **options)), expected)
    assert kills >= runs


class KillAtStep(Callback):
    def on_step_start(self, trainer: Any) -> None:
        if trainer.progress.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
def test_kill_with_workers_resumes_identically(folder: Path, undisturbed: dict[str, Any]) -> None:
    trainer = build(folder / "run", callbacks=lambda: [KillAtStep()], num_workers=2, **RUN)
    assert fork(trainer.train) == -signal.SIGKILL
    assert_same(comparable(play(folder / "run", **RUN)), undisturbed)


PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from resuming import build
from test_kill import KillAtStep

trainer = build(Path({run!r}), callbacks=lambda: [KillAtStep()], num_workers=2, **{options!r})
trainer.train(resume_from="auto")
"""


@pytest.mark.slow
@pytest.mark.processes
def test_kill_of_program_resumes_in_new_interpreter(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    tests = Path(__file__).parents[1]
    paths = [str(tests / "checkpoint"), str(tests), str(tests.parent)]
    program = textwrap.dedent(PROGRAM).format(paths=paths, run=str(tmp_path / "run"), options=RUN)
    assert programs.run(sys.executable, "-c", program).returncode == -signal.SIGKILL
    assert_same(comparable(play(tmp_path / "run", **RUN)), undisturbed)


@pytest.mark.processes
def test_kill_during_background_write_resumes_identically(folder: Path, undisturbed: dict[str, Any]) -> None:
    """The unfinished checkpoint is left out: the run resumes from the one before."""
    run = folder / "run"
    is_writing = threading.Event()

    class KillWhenWriting(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == 5:
                assert is_writing.wait(programs.LIMIT)
                os.kill(os.getpid(), signal.SIGKILL)

    def hang_at_step_4(tensors: Any, path: Path) -> None:
        save_tensors(tensors, path)
        if "checkpoint-4" in str(path):
            is_writing.set()
            threading.Event().wait()

    def train_until_killed() -> None:
        state.save_tensors = hang_at_step_4
        build(run, async_save=True, callbacks=lambda: [KillWhenWriting()], **RUN).train()

    assert fork(train_until_killed) == -signal.SIGKILL
    assert list(run.glob("checkpoint-4.*.tmp")) and not (run / "checkpoint-4").exists()
    resolved = Store(run).resolve("auto")
    assert resolved is not None and resolved[0].name == "checkpoint-2"
    assert_same(comparable(play(run, **RUN)), undisturbed)


# --- damage


def damages(data: bytes) -> Iterator[tuple[str, bytes | None]]:
    yield "deleted", None
    yield "emptied", b""
    yield "truncated", data[: len(data) // 2]
    yield "one byte short", data[:-1]
    yield "one byte long", data + b"\0"
    for position in (0, 1, len(data) // 3, len(data) // 2, len(data) - 2):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        yield f"bit flipped in byte {position}", bytes(flipped)


@EXTENT
def test_damaged_file_of_newest_checkpoint_is_reported(
    is_exhaustive: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint by name, and "last", are errors that name the one before; "auto" resumes from that one."""
    options = {**RUN, "save_total_limit": None, "load_best_at_end": False}
    expected = comparable(play(folder / "undisturbed", **options))
    run = folder / "run"
    play(run, [{"cut": ("kill", 5)}], **options)
    newest = run / "checkpoint-4"
    files = [path.relative_to(newest).as_posix() for path in sorted(newest.rglob("*")) if path.is_file()]
    assert files == [HISTORY, "model.safetensors", MANIFEST, "optimizer/state.safetensors", "rng/state.safetensors"]
    cases = [(file, *damage) for file in files for damage in damages((newest / file).read_bytes())]
    assert len(cases) == 50
    for file, kind, damaged in cases if is_exhaustive else cases[::11]:
        copy = folder / "copy"
        shutil.copytree(run, copy, symlinks=True)
        target = copy / newest.name / file
        target.unlink()
        if damaged is not None:
            target.write_bytes(damaged)
        for which in (copy / newest.name, "last"):
            trainer = build(copy, **options)
            with pytest.raises(CheckpointError, match=rf"(?s){Path(file).name}.*'checkpoint-2'"):
                trainer.train(resume_from=which)
            assert trainer.progress.step == 0 and not trainer.optimizer.state
        caplog.clear()
        trainer = build(copy, **options)
        disturb_generators()
        trainer.train(resume_from="auto")
        messages = [text for text in caplog.messages if "Passed over" in text]
        assert len(messages) == 1 and Path(file).name in messages[0] and "checkpoint-2" in messages[0], kind
        assert not differences(comparable(outcome(trainer)), expected), f"{file} {kind}"
        shutil.rmtree(copy)


def test_auto_with_all_checkpoints_damaged_changes_nothing(folder: Path) -> None:
    play(folder / "run", [{"cut": ("kill", 5)}], **{**RUN, "save_total_limit": None})
    for path in (folder / "run").glob("checkpoint-*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    before = sorted(path.name for path in (folder / "run").rglob("*"))
    rows = journal(folder / "run")
    with pytest.raises(CheckpointError, match=r"None of the checkpoints in .* can be used"):
        build(folder / "run", **RUN).train(resume_from="auto")
    assert sorted(path.name for path in (folder / "run").rglob("*")) == before
    assert journal(folder / "run") == rows
