"""A run that is killed, or whose disk fails, at any moment: what it leaves is resumed to the same end."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
from resuming import Killed, build, differences, disturb_generators, journal, outcome, play, train

from omnitrain import Callback, CheckpointError, Trainer
from omnitrain.checkpoint import checkpointer, state
from omnitrain.checkpoint.disk import FileSystem
from omnitrain.checkpoint.history import HISTORY
from omnitrain.checkpoint.store import MANIFEST, Store

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes to kill them")

# A checkpoint in the middle of an epoch, one on an epoch's last step, which is saved again after it, and pruning.
RUN: dict[str, Any] = {"epochs": 2, "save_steps": 2, "eval_steps": 2, "save_total_limit": 1, "log_steps": 1}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory, where there is such a place: thousands of files are synced to it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def waits_for_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every run do the same to the disk: where git is slow, run.json is written once more, at any time."""
    monkeypatch.setattr(checkpointer, "_GIT_S", 60.0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes of RUN if nothing happens to it."""
    return play(tmp_path_factory.mktemp("undisturbed") / "run", **RUN)


def forked(action: Callable[[], object]) -> int:
    """Do something in a child process, and return the child's id; it exits with 0, or 1 after an error."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        action()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def exit_of(child: int) -> int:
    """Wait for a child; return its exit code, or minus the signal that it died of."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def some_of(every: int) -> Any:
    """Parametrize `every`: all operations of a run are for `make test-all`, one of so many for each `make test`."""
    return pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), every])


# --- killed at every operation on the disk


class Disk(FileSystem):
    """Counts what is done to it, the writing of tensors included, and does something else at one of the operations."""

    def __init__(self, at: int | None = None, fault: Callable[[Disk, Path], None] | None = None) -> None:
        self.at, self.fault = at, fault
        self.count = 0
        self.unsynced: dict[int, Path] = {}

    def _next(self, path: Path) -> None:
        self.count += 1
        if self.fault is not None and self.count - 1 == self.at:
            self.fault(self, path)

    def mkdir(self, path: Path) -> None:
        self._next(path)
        super().mkdir(path)

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        self._next(path)
        super().write(path, data)
        self.unsynced[path.stat().st_ino] = path

    def write_tensors(self, tensors: Any, path: Path) -> None:
        path.write_bytes(b"half of a file")
        self._next(path)
        save_tensors(tensors, path)
        self.unsynced[path.stat().st_ino] = path

    def sync(self, path: Path) -> None:
        self._next(path)
        self.unsynced.pop(path.stat().st_ino, None)

    def rename(self, source: Path, target: Path) -> None:
        self._next(source)
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._next(path)
        self.unsynced.pop(path.stat().st_ino, None)
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        self._next(path)
        super().rmdir(path)


save_tensors = state.save_tensors


@contextlib.contextmanager
def disk(trainer: Trainer, fake: Disk) -> Iterator[Disk]:
    """Let the trainer save to a fake disk."""
    assert trainer.store is not None
    trainer.store.fs = fake
    state.save_tensors = fake.write_tensors
    try:
        yield fake
    finally:
        state.save_tensors = save_tensors


def operations(folder: Path) -> int:
    trainer = build(folder / "counted", **RUN)
    with disk(trainer, Disk()) as fake:
        train(trainer)
    return fake.count


def kill(disk: Disk, path: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@some_of(5)
def test_sigkill_at_every_file_operation_of_a_run_costs_only_the_work_since_the_last_save(
    every: int, folder: Path, undisturbed: dict[str, Any]
) -> None:
    number = operations(folder)
    assert number > 80
    for k in range(0, number, every):
        run = folder / str(k)
        trainer = build(run, **RUN)
        with disk(trainer, Disk(k, kill)):
            child = forked(trainer.train)
        assert exit_of(child) == -signal.SIGKILL
        got = play(run, **RUN)
        assert not differences(without_streams(got), without_streams(undisturbed)), f"killed at operation {k}"
        shutil.rmtree(run)


def without_streams(found: dict[str, Any]) -> dict[str, Any]:
    """What is known of a run that began in another process."""
    return {key: value for key, value in found.items() if key not in ("stream", "rates")}


def cut_power(disk: Disk, path: Path) -> None:
    """Empty the files that were not synced, wherever they have been moved to, and be gone."""
    for file in path.parents[len(path.parts) - 1 - path.parts.index("power")].rglob("*"):
        if file.is_file() and file.stat().st_ino in disk.unsynced:
            file.write_bytes(b"")
    disk.fault = lambda disk, path: None
    raise Killed


@some_of(4)
def test_power_cut_at_every_file_operation_of_a_run_costs_only_the_work_since_the_last_save(
    every: int, folder: Path, undisturbed: dict[str, Any]
) -> None:
    for k in range(0, operations(folder), every):
        run = folder / "power" / str(k)
        trainer = build(run, **RUN)
        with disk(trainer, Disk(k, cut_power)) as fake:
            train(trainer)
        assert fake.fault is not cut_power, "the power was not cut"
        got = play(run, **RUN)
        assert not differences(without_streams(got), without_streams(undisturbed)), f"cut at operation {k}"
        shutil.rmtree(run)


# --- killed at any moment


SLOW: dict[str, Any] = {
    **RUN,
    "epochs": 4,
    "save_steps": 3,
    "eval_steps": 2,
}


class Tells(Callback):
    """Writes a byte at every step, so that a process can be killed in a given one however long steps take."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def on_step_start(self, trainer: Any) -> None:
        os.write(self.descriptor, b".")


@pytest.mark.parametrize("is_async", [False, True])
def test_sigkill_at_random_moments_until_the_run_is_done_changes_nothing(folder: Path, is_async: bool) -> None:
    options = {**SLOW, "async_save": is_async}
    expected = play(folder / "undisturbed", **options)
    chance = random.Random(3 + is_async)
    kills = 0
    for number in range(6):
        run = folder / str(number)
        is_over = False
        while not is_over:  # a run that gets past its next checkpoint goes on from there
            reading, writing = os.pipe()
            tells = {**options, "callbacks": lambda: [Tells(writing)]}  # noqa: B023
            child = forked(lambda: train(build(run, **tells), resume_from="auto"))  # noqa: B023
            os.close(writing)
            steps = chance.randint(0, 8)  # of 12 at most, before the moment
            if all(os.read(reading, 1) for _ in range(steps)):
                time.sleep(chance.uniform(0, 0.004))  # a step takes about as long
                os.kill(child, signal.SIGKILL)
            code = exit_of(child)
            assert code in (0, -signal.SIGKILL)
            is_over, kills = code == 0, kills + (code != 0)
            os.close(reading)
        assert not differences(without_streams(play(run, **options)), without_streams(expected))
    assert kills > 6


PROGRAM = """
import json, os, signal, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from resuming import *

class Suicide(Callback):
    def on_step_start(self, trainer):
        if trainer.progress.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

trainer = build(Path({run!r}), callbacks=lambda: [Suicide()], num_workers={workers}, **{options!r})
trainer.train(resume_from="auto")
"""


def test_sigkill_of_a_program_with_workers_and_its_restart_in_a_new_interpreter(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    here = Path(__file__).parents[1]
    run = tmp_path / "run"
    program = textwrap.dedent(PROGRAM).format(paths=[str(here), str(here.parent)], run=str(run), workers=2, options=RUN)
    first = programs.run(sys.executable, "-c", program)
    assert first.returncode == -signal.SIGKILL
    got = play(run, **RUN)
    assert not differences(without_streams(got), without_streams(undisturbed))


# --- a background writer


def test_sigkill_during_a_background_write_resumes_from_the_checkpoint_before(
    folder: Path, undisturbed: dict[str, Any]
) -> None:
    run = folder / "run"

    def train_until_killed() -> None:
        trainer = build(run, async_save=True, callbacks=lambda: [KillWhenWriting()], **RUN)
        with disk(trainer, Disk(fault=None)) as fake:
            fake.write_tensors = hang_at_step_4(fake.write_tensors)  # type: ignore[method-assign]
            state.save_tensors = fake.write_tensors
            trainer.train()

    assert exit_of(forked(train_until_killed)) == -signal.SIGKILL
    assert list(run.glob("checkpoint-4.*.tmp")) and not (run / "checkpoint-4").exists()
    found = Store(run).resolve("auto")
    assert found is not None and found[0].name == "checkpoint-2"
    assert not differences(without_streams(play(run, **RUN)), without_streams(undisturbed))


class KillWhenWriting(Callback):
    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == 5:
            while not list(trainer.save_dir.glob("checkpoint-4.*.tmp/*")):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)


def hang_at_step_4(write: Any) -> Any:
    def hang(tensors: Any, path: Path) -> None:
        write(tensors, path)
        if "checkpoint-4" in str(path):
            time.sleep(100)

    return hang


# --- a disk that fails


def glitch(disk: Disk, path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def full(disk: Disk, path: Path) -> None:
    disk.at = disk.count  # and the next one too
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


NO_BEST: dict[str, Any] = {**RUN, "load_best_at_end": False}


@pytest.mark.parametrize("fault", [pytest.param(glitch, marks=pytest.mark.slow), full])
def test_disk_that_fails_at_any_operation_costs_checkpoints_and_not_the_run(
    folder: Path, fault: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = play(folder / "undisturbed", **NO_BEST)
    saves = 5  # steps 2, 4, 6, 6 after its epoch, and once more as the best has no checkpoint
    for k in range(0, operations(folder), 1 if fault is glitch else 3):
        run = folder / str(k)
        trainer = build(run, **NO_BEST)
        caplog.clear()
        with disk(trainer, Disk(k, fault)):
            trainer.train()
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) <= (1 if fault is glitch else saves + 2)  # run.json and config.yaml
        assert all("No space left" in str(record.getMessage()) for record in errors)
        assert not list(run.glob("*.tmp")) or fault is full
        got = outcome(trainer)
        for key in ("tensors", "objective", "position"):
            assert not differences(got[key], expected[key]), f"{key} after a fault at operation {k}"
        assert not differences(journal(run), expected["journal"])
        found = Store(run).resolve("auto")  # None, or one that verifies
        if found is not None:
            after = without_streams(play(run, **NO_BEST))
            assert not differences(after["last"], expected["last"]), f"resumed after a fault at operation {k}"
        shutil.rmtree(run, ignore_errors=True)


@some_of(5)
def test_disk_that_fails_while_an_earlier_run_is_replaced_does_not_end_the_new_one(every: int, folder: Path) -> None:
    play(folder / "earlier", save_steps=2, epochs=2)
    options = {**NO_BEST, "overwrite": True, "save_steps": 4}
    for k in itertools.count(0, every):
        run = folder / str(k)
        shutil.copytree(folder / "earlier", run)
        trainer = build(run, **options)
        with disk(trainer, Disk(k, glitch)) as fake:
            trainer.train()
        if fake.count <= k:
            break
        assert trainer.metrics["stop_reason"] == "epochs"
        names = [path.name for path in Store(run).checkpoints()]
        assert set(names) <= {"checkpoint-4", "checkpoint-6"}, f"after a fault at operation {k}"
        shutil.rmtree(run)
    assert k > 50


@pytest.mark.parametrize("is_async", [False, True])
def test_failed_save_ends_a_run_that_requires_its_saves_and_leaves_the_earlier_checkpoint(
    folder: Path, is_async: bool
) -> None:
    run = folder / "run"
    trainer = build(run, **RUN, save_required=True, async_save=is_async)
    failing = fail_at_step_4()
    with disk(trainer, Disk()), pytest.raises(CheckpointError, match=r"checkpoint-4.*No space left"):  # noqa: PT012
        state.save_tensors = failing
        trainer.train()
    assert [path.name for path in Store(run).checkpoints()] == ["checkpoint-2"]
    assert trainer.progress.step in ((4,) if not is_async else (4, 5, 6))


def fail_at_step_4() -> Any:
    def fail(tensors: Any, path: Path) -> None:
        if "checkpoint-4" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        save_tensors(tensors, path)

    return fail


def test_file_size_limit_of_the_system_is_told_once_per_save_and_training_goes_on(folder: Path) -> None:
    """The real thing: the system refuses to write, in safetensors' own code too."""
    run, told = folder / "run", folder / "told.json"

    class Limit(Callback):
        def on_step_start(self, trainer: Any) -> None:
            if trainer.progress.step == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:
                errors.append(record.getMessage())

    errors: list[str] = []

    def go() -> None:
        logging.getLogger("omnitrain").addHandler(Listen())
        trainer = build(run, **{**RUN, "log_steps": 100}, callbacks=lambda: [Limit()])
        metrics = trainer.train()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        told.write_text(json.dumps([errors, metrics["stop_reason"], trainer.progress.step]))

    assert exit_of(forked(go)) == 0
    errors, reason, step = json.loads(told.read_text())
    assert (reason, step) == ("epochs", 6)
    assert len(errors) == 4 and all("Cannot save" in error and "File too large" in error for error in errors)
    found = Store(run).resolve("auto")
    assert found is not None and found[0].name == "checkpoint-2"
    assert not list(run.glob("*.tmp"))


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


@some_of(3)
def test_damage_to_any_file_of_the_newest_checkpoint_is_named_and_the_one_before_is_taken(
    every: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**RUN, "save_total_limit": None, "load_best_at_end": False}
    expected = play(folder / "undisturbed", **options)
    run = folder / "run"
    play(run, [{"cut": ("kill", 5)}], **options)
    newest = run / "checkpoint-4"
    files = [path.relative_to(newest).as_posix() for path in sorted(newest.rglob("*")) if path.is_file()]
    assert files == [HISTORY, "model.safetensors", MANIFEST, "optimizer/state.safetensors", "rng/state.safetensors"]
    cases = [(file, *case) for file in files for case in damages((newest / file).read_bytes())]
    assert len(cases) == 50
    for file, kind, damaged in cases[::every]:
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
        passed = [r.getMessage() for r in caplog.records if "Passed over" in r.getMessage()]
        assert len(passed) == 1 and Path(file).name in passed[0] and "checkpoint-2" in passed[0], kind
        assert not differences(without_streams(outcome(trainer)), without_streams(expected)), f"{file} {kind}"
        shutil.rmtree(copy)


def test_when_every_checkpoint_is_damaged_auto_is_an_error_and_nothing_is_touched(folder: Path) -> None:
    play(folder / "run", [{"cut": ("kill", 5)}], **{**RUN, "save_total_limit": None})
    for path in (folder / "run").glob("checkpoint-*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    before = sorted(path.name for path in (folder / "run").rglob("*"))
    rows = journal(folder / "run")
    with pytest.raises(CheckpointError, match=r"None of the checkpoints in .* can be used"):
        build(folder / "run", **RUN).train(resume_from="auto")
    assert sorted(path.name for path in (folder / "run").rglob("*")) == before
    assert journal(folder / "run") == rows
