"""Runs that are killed, or whose power is cut, at any operation: they resume to the same end."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
from forging import copied, spoil
from resuming import assert_same, build, comparable, disturb_generators, journal, memory_folder, outcome, play, train

from omnitrain import Callback, CheckpointError, Trainer
from omnitrain.checkpoint import state_dicts
from omnitrain.checkpoint.disk import FileSystem
from omnitrain.checkpoint.history import HISTORY
from omnitrain.checkpoint.store import MANIFEST, Store

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes to kill them")

# A checkpoint in the middle of an epoch, one on an epoch's last step, which is saved again after it, and pruning.
RUN: dict[str, Any] = {"epochs": 2, "save_steps": 2, "eval_steps": 2, "save_total_limit": 1, "log_steps": 1}


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


save_tensors = state_dicts.save_tensors


@contextlib.contextmanager
def saving_to(disk: Disk, trainer: Trainer) -> Iterator[Disk]:
    """Let the trainer save to a fake disk."""
    assert trainer.store is not None
    trainer.store.fs = disk
    state_dicts.save_tensors = disk.write_tensors
    try:
        yield disk
    finally:
        state_dicts.save_tensors = save_tensors


EXTENT = pytest.mark.parametrize("is_exhaustive", [pytest.param(True, marks=pytest.mark.slow), False])


def operations(folder: Path, is_exhaustive: bool) -> list[int]:
    """Return the numbers of the operations of a run to test: all, or some of different kinds in the middle of it."""
    trainer = build(folder / "counted", **RUN)
    with saving_to(Disk(), trainer) as disk:
        train(trainer)
    names = disk.operations
    assert len(names) > 80
    by_kind: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        by_kind.setdefault(name if name == f"write {MANIFEST}" else name.split()[0], []).append(number)
    assert {*by_kind} == {"mkdir", "write", f"write {MANIFEST}", "write_tensors", "sync", "rename", "unlink", "rmdir"}
    middle = {kind: numbers[len(numbers) // 2] for kind, numbers in by_kind.items()}
    chosen = [middle[kind] for kind in ("write_tensors", f"write {MANIFEST}", "rename", "unlink")]
    return [*range(len(names))] if is_exhaustive else [*chosen, middle[f"write {MANIFEST}"] + 1]


def kill(disk: Disk, path: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def cut_power(disk: Disk, path: Path) -> None:
    """Empty the files that were not synced, wherever they have been moved to, and end the process."""
    for file in path.parents[len(path.parts) - 1 - path.parts.index("runs")].rglob("*"):
        if file.is_file() and file.stat().st_ino in disk.unsynced:
            file.write_bytes(b"")
    kill(disk, path)


@pytest.mark.processes
@EXTENT
@pytest.mark.parametrize("fault", [kill, cut_power])
def test_kill_at_file_operation_resumes_identically(
    fault: Any, is_exhaustive: bool, folder: Path, undisturbed: dict[str, Any]
) -> None:
    for number in operations(folder, is_exhaustive):
        run = folder / "runs" / str(number)
        trainer = build(run, **RUN)
        with saving_to(Disk(number, fault), trainer):
            assert fork(trainer.train) == -signal.SIGKILL
        assert_same(comparable(play(run, **RUN)), undisturbed, f"killed at operation {number}")
        shutil.rmtree(run)


def fail_once(disk: Disk, path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


@EXTENT
def test_disk_failure_during_overwrite_does_not_end_the_run(is_exhaustive: bool, folder: Path) -> None:
    play(folder / "earlier", save_steps=2, epochs=2)
    options = {**RUN, "load_best_at_end": False, "overwrite": True, "save_steps": 4}
    number = -1
    for number in itertools.count(0 if is_exhaustive else 30, 1 if is_exhaustive else 30):
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


@pytest.mark.parametrize(
    ("error", "is_async"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"), False),  # torch's
    ],
    ids=["disk", "async", "torch"],
)
def test_save_required_failure_ends_the_run(
    error: Exception, is_async: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier checkpoint stays."""

    def fail_at_step_4(tensors: Any, path: Path) -> None:
        if "checkpoint-4" in str(path):
            raise error
        save_tensors(tensors, path)

    trainer = build(folder / "run", **RUN, save_required=True, async_save=is_async)
    monkeypatch.setattr(state_dicts, "save_tensors", fail_at_step_4)
    with pytest.raises(CheckpointError, match=r"checkpoint-4.*(No space left|unexpected pos)"):
        trainer.train()
    assert [path.name for path in Store(folder / "run").checkpoints()] == ["checkpoint-2"]
    assert trainer.progress.step in ((4, 5, 6) if is_async else (4,))


def test_leftover_that_cannot_be_removed_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    leftover, remove = folder / "run" / "checkpoint-9.tmp", FileSystem.remove
    leftover.mkdir(parents=True)

    def fail(disk: FileSystem, path: Path) -> None:
        if path == leftover:
            raise PermissionError(errno.EACCES, "Permission denied")
        remove(disk, path)

    monkeypatch.setattr(FileSystem, "remove", fail)
    assert train(build(folder / "run", **RUN)).progress.step == 6
    assert "Cannot clear" in caplog.text and leftover.exists() and Store(folder / "run").resolve("last")


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
        state_dicts.save_tensors = hang_at_step_4
        build(run, async_save=True, callbacks=lambda: [KillWhenWriting()], **RUN).train()

    assert fork(train_until_killed) == -signal.SIGKILL
    assert list(run.glob("checkpoint-4.*.tmp")) and not (run / "checkpoint-4").exists()
    resolved = Store(run).resolve("auto")
    assert resolved is not None and resolved[0].name == "checkpoint-2"
    assert_same(comparable(play(run, **RUN)), undisturbed)


# --- damage


@EXTENT
def test_damaged_file_of_newest_checkpoint_is_reported(
    is_exhaustive: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint by name, and "last", are errors that name the one before; "auto" resumes from that one."""
    options = {**RUN, "save_total_limit": None, "load_best_at_end": False}
    expected = comparable(play(folder / "undisturbed", **options))
    run, copy = folder / "run", folder / "copy"
    play(run, [{"cut": ("kill", 5)}], **options)
    newest = run / "checkpoint-4"
    files = [path.relative_to(newest).as_posix() for path in sorted(newest.rglob("*")) if path.is_file()]
    assert files == [HISTORY, "model.safetensors", MANIFEST, "optimizer/state.safetensors", "rng/state.safetensors"]
    cases = list(itertools.product(files, ("missing", "empty", "truncate", "extend", "flip", "pipe"), (0, -1)))
    for file, damage, position in cases if is_exhaustive else [(MANIFEST, "flip", -1), (files[1], "pipe", 0)]:
        target = copied(run, copy) / newest.name / file
        spoil(target, damage, position, fill=1)
        for which in (copy / newest.name, "last"):
            trainer = build(copy, **options)
            with pytest.raises(CheckpointError, match=rf"(?s){Path(file).name}.*'checkpoint-2'"):
                trainer.train(resume_from=which)
            assert trainer.progress.step == 0 and not trainer.optimizer.state
        caplog.clear()
        trainer = build(copy, **options)
        disturb_generators()
        trainer.train(resume_from="auto")
        (message,) = [text for text in caplog.messages if "Skipped:" in text]
        assert Path(file).name in message and "checkpoint-2" in message, damage
        assert_same(comparable(outcome(trainer)), expected, f"{file} {damage}")


def test_auto_with_all_checkpoints_damaged_changes_nothing(folder: Path) -> None:
    run = folder / "run"
    play(run, [{"cut": ("kill", 5)}], **{**RUN, "save_total_limit": None})
    for path in run.glob("checkpoint-*/model.safetensors"):
        spoil(path, "truncate", -1)
    before, rows = sorted(run.rglob("*")), journal(run)
    with pytest.raises(CheckpointError, match=r"None of the checkpoints in .* can be used"):
        build(run, **RUN).train(resume_from="auto")
    assert sorted(run.rglob("*")) == before and journal(run) == rows
