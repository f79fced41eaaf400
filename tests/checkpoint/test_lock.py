"""The lock of a run folder: one run at a time, however the one before it ended."""

import contextlib
import errno
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import SoftFileLease
from marks import make_small
from programs import exit_code, fork
from recipes import callback, rows, t16
from resuming import assert_same, build, play, train
from stores import wait_for

from omnitrain import CheckpointError
from omnitrain.checkpoint import lock as lock_module
from omnitrain.checkpoint.lock import LOCK, Lock
from omnitrain.checkpoint.store import Store

RUN: dict[str, Any] = {"save_steps": 2, "eval_steps": 2, "log_steps": 1}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"HEARTBEAT_S": 0.1, "LEASE_S": 30.0, "EXIT_GRACE_S": 0.1}.items():
        monkeypatch.setattr(lock_module, name, seconds)


class Holder:
    """A process that trains into a folder and pauses after step 3, until a file tells it to proceed."""

    def __init__(self, folder: Path) -> None:
        self.paused, self.proceed = folder / "paused", folder / "proceed"
        pause = callback(on_step_end=self.pause)
        self.pid: int = fork(lambda: build(folder / "run", callbacks=lambda: [pause], **RUN).train())
        wait_for(self.paused.exists)

    def pause(self, trainer: Any) -> None:
        if trainer.progress.step == 3:
            self.paused.touch()
            wait_for(self.proceed.exists)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        exit_code(self.pid)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    """A run in another process, in the middle of its work."""
    process = Holder(tmp_path)
    yield process
    with contextlib.suppress(ChildProcessError):  # it has ended
        os.waitpid(process.pid, os.WNOHANG)
        process.kill()


def owner_of(folder: Path) -> int:
    return SoftFileLease(folder / LOCK).owner.pid  # type: ignore[union-attr]


def leave_lock(folder: Path, **changes: Any) -> None:
    """Leave the lock of a run that is gone, as another machine would have left it."""
    with Lock(folder).hold():
        text = (folder / LOCK).read_text()
    for name, value in {"token": "0" * 32, **changes}.items():
        text = re.sub(f"^{name}=.*$", f"{name}={value}", text, flags=re.MULTILINE)
    (folder / LOCK).write_text(text)


def check_takes(folder: Path) -> None:
    with Lock(folder).hold():
        assert owner_of(folder) == os.getpid()
    assert not (folder / LOCK).exists()


@pytest.mark.processes
def test_lock_rejects_a_second_run_and_leaves_the_first(tmp_path: Path, holder: Holder) -> None:
    run = tmp_path / "run"
    for options in ({"resume_from": "auto"}, {"resume_from": "last"}, {}):
        second = build(run, overwrite=not options, save_steps=1)
        with pytest.raises(CheckpointError, match=rf"in use by process {holder.pid} on .*Wait until it ends"):
            second.train(**options)
        assert second.progress.step == 0
    with pytest.raises(CheckpointError, match="in use by process"):
        build(run).save_checkpoint()
    holder.proceed.touch()
    assert exit_code(holder.pid) == 0 and not (run / LOCK).exists()
    undisturbed, disturbed = play(tmp_path / "undisturbed", **RUN), play(run, **RUN)
    for key in ("last", "journal"):
        assert_same(disturbed[key], undisturbed[key])


@pytest.mark.processes
def test_lock_of_a_killed_run_is_taken_at_once(tmp_path: Path, holder: Holder, caplog: Any) -> None:
    holder.kill()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for name in ("run", "copy"):
        assert owner_of(tmp_path / name) == holder.pid
        caplog.clear()
        check_takes(tmp_path / name)
        assert f"locked by process {holder.pid}" in caplog.text and "It is taken over" in caplog.text
        assert "Waiting" not in caplog.text
    assert train(build(tmp_path / "run", **RUN), resume_from="auto").progress.step == 9


@pytest.mark.processes
def test_lock_of_a_stopped_process_is_respected(tmp_path: Path, holder: Holder) -> None:
    """In a copy of its folder, too: whether that is one, only the user knows."""
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    os.kill(holder.pid, signal.SIGSTOP)  # which SIGKILL ends all the same
    for name in ("run", "copy"):
        with pytest.raises(CheckpointError, match=f"in use by process {holder.pid} .*copy of its folder, delete"):
            Lock(tmp_path / name).acquire()
    (tmp_path / "copy" / LOCK).unlink()
    check_takes(tmp_path / "copy")


@pytest.mark.processes
@pytest.mark.parametrize("stale", [False, True])
def test_lock_has_one_winner_of_many_at_once(stale: bool, tmp_path: Path) -> None:
    if stale:
        leave_lock(tmp_path, pid=1 << 22)

    def compete(number: int) -> int:
        lock, code = Lock(tmp_path), 3
        (tmp_path / f"ready-{number}").touch()
        while len(list(tmp_path.glob("ready-*"))) < 4:
            pass
        with contextlib.suppress(CheckpointError):
            lock.acquire()
            code = 0
        (tmp_path / f"tried-{number}").touch()
        wait_for(lambda: len(list(tmp_path.glob("tried-*"))) == 4)  # with the lock, if this process has it
        if not code:
            lock.release()
        return code

    children = [fork(lambda number=number: compete(number)) for number in range(4)]  # type: ignore[misc]
    assert sorted(map(exit_code, children)) == [0, 3, 3, 3]


def test_lock_is_held_while_each_trainer_trains(trainer_class: Any, tmp_path: Path) -> None:
    pids: list[int] = []

    def look(trainer: Any) -> None:
        pids.append(owner_of(tmp_path))
        with pytest.raises(CheckpointError, match="in use by process"):
            Store(tmp_path).acquire()

    looks = callback(on_step_end=look, on_train_end=lambda trainer: 1 / 0)
    trainer = make_small(trainer_class, t16(), rows(8), epochs=1, save_dir=tmp_path, callbacks=[looks])
    with pytest.raises(ZeroDivisionError):  # the lock is released all the same
        trainer.train()
    assert pids == [os.getpid()] * 2 and not (tmp_path / LOCK).exists()
    trainer.save_checkpoint()
    assert not (tmp_path / LOCK).exists()


@pytest.mark.processes
@pytest.mark.parametrize("shift", [-3600.0, 3600.0], ids=["an hour behind", "an hour ahead"])
def test_lock_on_another_machine_needs_heartbeats(tmp_path: Path, shift: float, caplog: Any, monkeypatch: Any) -> None:
    """A run on another machine is alive as long as it touches its lock, whatever its clock says."""
    monkeypatch.setattr(lock_module, "LEASE_S", 2.0)
    leave_lock(tmp_path, host="elsewhere")
    ends = threading.Event()

    def live() -> None:
        while not ends.wait(0.02):
            os.utime(tmp_path / LOCK, (time.time() + shift,) * 2)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match=r"in use by process .* on 'elsewhere'"):
            Lock(tmp_path).acquire()
    finally:
        ends.set()
        thread.join()
    check_takes(tmp_path)
    assert "Waiting for a heartbeat" in caplog.text and "It is taken over" in caplog.text


@pytest.mark.processes
@pytest.mark.parametrize("text", ["", '{"pid": 1, "token": "0badcafe"}'], ids=["empty", "of an older version"])
def test_lock_without_an_owner_is_taken(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut leaves an empty file."""
    monkeypatch.setattr(lock_module, "EXIT_GRACE_S", 4.0 if text else 0.1)  # filelock waits for two seconds
    monkeypatch.setattr(lock_module, "LEASE_S", 0.3)
    (tmp_path / LOCK).write_text(text)
    check_takes(tmp_path)


@pytest.mark.processes
def test_lock_is_not_held_by_forked_workers(tmp_path: Path) -> None:
    """A data loader's worker may outlive its run."""
    lock = Lock(tmp_path)
    lock.acquire()
    reader, writer = os.pipe()
    child = fork(lambda: (os.close(writer), os.read(reader, 1)))
    lock.release()
    check_takes(tmp_path)
    os.close(reader)
    os.close(writer)
    assert exit_code(child) == 0


def test_lock_taken_over_ends_the_saves_of_a_run(tmp_path: Path) -> None:
    def take_over(trainer: Any) -> None:
        if trainer.progress.step == 3:
            (tmp_path / LOCK).unlink()
            other.acquire()

    other = Lock(tmp_path)
    trainer = build(tmp_path, save_steps=2, callbacks=lambda: [callback(on_step_end=take_over)])
    with pytest.raises(CheckpointError, match=f"was taken over by process {os.getpid()}"):
        trainer.train()
    assert [path.name for path in Store(tmp_path).checkpoints()] == ["checkpoint-2"]
    assert owner_of(tmp_path) == os.getpid()
    other.release()


def test_lock_that_was_deleted_is_restored_by_a_save(tmp_path: Path) -> None:
    states: list[bool] = []

    def delete(trainer: Any) -> None:
        if trainer.progress.step == 1:
            (tmp_path / LOCK).unlink()
        states.append((tmp_path / LOCK).exists())

    build(tmp_path, save_steps=2, epochs=1, callbacks=lambda: [callback(on_step_end=delete)]).train()
    assert states == [False, False, True] and not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("operation", ["open", "write", "utime", "unlink"])
def test_lock_on_a_failing_disk_does_not_end_a_run(
    operation: str, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    original = getattr(os, operation)

    def fails(path: Any, *args: Any, **kwargs: Any) -> Any:
        if operation == "open" and LOCK not in str(path):
            return original(path, *args, **kwargs)
        raise OSError(errno.ENOSPC, "No space left on device")

    lock = Lock(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(lock_module.os, operation, fails)
        with lock.hold():
            lock.check()
    assert ("Nothing keeps another run out" in caplog.text) == (operation in ("open", "write"))
    check_takes(tmp_path)
