"""One run at a time writes into a folder, whoever else tries, however the one before ended."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
import torch.nn.functional as F
from recipes import rows, t16
from resuming import build, differences, outcome, play, train

from omnitrain import AccelerateTrainer, Callback, CheckpointError, HFTrainer, Trainer
from omnitrain.checkpoint import lock as lock_module
from omnitrain.checkpoint.lock import LOCK, Lock
from omnitrain.checkpoint.store import Store

RUN: dict[str, Any] = {"save_steps": 2, "eval_steps": 2, "log_steps": 1}
TRAINERS: dict[str, Any] = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}


class Holder:
    """A process that trains into a folder and waits after step 3 until it is told to go on."""

    def __init__(self, folder: Path) -> None:
        self.told, self.goes_on = folder / "told", folder / "goes_on"
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid:
            wait_for(self.told.exists)
            return
        code = 1
        try:
            build(folder / "run", callbacks=lambda: [Waits(self.told, self.goes_on)], **RUN).train()
            code = 0
        finally:
            os._exit(code)

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def end(self, number: int = signal.SIGKILL) -> None:
        if self._code is None:
            os.kill(self.pid, number)
            self.wait()


class Waits(Callback):
    """Says that step 3 is done, and waits until it is told to go on."""

    def __init__(self, told: Path, goes_on: Path) -> None:
        self.told, self.goes_on = told, goes_on

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == 3:
            self.told.touch()
            wait_for(self.goes_on.exists)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BEAT_S": 0.1, "WATCH_S": 1.0, "STALE_S": 2.0, "LEAVE_S": 0.2, "SETTLE_S": 0.05}.items():
        monkeypatch.setattr(lock_module, name, seconds)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    """A run in another process, in the middle of its work."""
    process = Holder(tmp_path)
    yield process
    process.end()


def wait_for(condition: Any) -> None:
    end = time.monotonic() + programs.LIMIT
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def owner_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / LOCK).read_text())


def leave(folder: Path, **changed: Any) -> dict[str, Any]:
    """Leave the lock of a run that is gone, as another machine or container would have left it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder)
    with lock.held():
        owner = owner_of(folder) | changed
    (folder / LOCK).write_text("")
    owner["inode"] = changed.get("inode", (folder / LOCK).stat().st_ino)
    (folder / LOCK).write_text(json.dumps(owner))
    return owner


# --- two runs


def test_a_second_run_on_a_folder_is_refused_and_the_first_one_is_not_disturbed(tmp_path: Path, holder: Holder) -> None:
    run = tmp_path / "run"
    for options in ({"resume_from": "auto"}, {"resume_from": "last"}, {}):
        second = build(run, overwrite=not options, save_steps=1)
        with pytest.raises(CheckpointError, match=rf"in use by process {holder.pid} on .*Wait for its end"):
            second.train(**options)
        assert second.progress.step == 0
    with pytest.raises(CheckpointError, match="in use by process"):
        build(run).save_checkpoint()
    holder.goes_on.touch()
    assert holder.wait() == 0
    assert not (run / LOCK).exists()
    undisturbed = play(tmp_path / "undisturbed", **RUN)
    found = play(run, **RUN)
    assert not differences(found["last"], undisturbed["last"]) and not differences(
        found["journal"], undisturbed["journal"]
    )


def test_a_run_goes_on_at_once_where_one_was_killed(tmp_path: Path, holder: Holder, caplog: Any) -> None:
    holder.end()
    assert owner_of(tmp_path / "run")["pid"] == holder.pid
    begin = time.monotonic()
    lock = Lock(tmp_path / "run")
    with lock.held():
        assert owner_of(tmp_path / "run")["pid"] == os.getpid()
    assert time.monotonic() - begin < lock_module.WATCH_S
    assert f"left locked by process {holder.pid}" in caplog.text
    trainer = train(build(tmp_path / "run", **RUN), resume_from="auto")
    assert trainer.progress.step == 9


def test_a_copy_of_a_folder_in_use_is_free(tmp_path: Path, holder: Holder, caplog: Any) -> None:
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    trainer = train(build(tmp_path / "copy", **RUN), resume_from="auto")
    assert trainer.progress.step == 9 and not (tmp_path / "copy" / LOCK).exists()
    assert "is a copy, whose original is locked by" in caplog.text
    assert owner_of(tmp_path / "run")["pid"] == holder.pid


def test_of_many_that_start_at_once_one_has_the_folder(tmp_path: Path) -> None:
    code = """
    import sys, time
    from pathlib import Path
    from omnitrain.checkpoint import lock as module
    module.LEAVE_S = 0.0
    folder, go, name = map(Path, sys.argv[1:])
    lock = module.Lock(folder)
    while not go.exists():
        pass
    try:
        lock.take()
    except module.CheckpointError:
        sys.exit(3)
    assert not list(folder.glob("inside-*")), "two at once"
    (folder / f"inside-{name}").touch()
    time.sleep(0.3)
    (folder / f"inside-{name}").unlink()
    lock.release()
    """
    for stale in (False, True):
        folder, go = tmp_path / f"run-{stale}", tmp_path / f"go-{stale}"
        folder.mkdir()
        if stale:
            leave(folder)
        arguments = [sys.executable, "-c", textwrap.dedent(code), str(folder), str(go)]
        started = [subprocess.Popen([*arguments, str(number)]) for number in range(4)]
        time.sleep(0.5)
        go.touch()
        codes = sorted(process.wait(programs.LIMIT) for process in started)
        assert set(codes) <= {0, 3} and 0 in codes


@pytest.mark.parametrize("kind", TRAINERS)
def test_every_trainer_locks_its_folder_while_it_trains(kind: str, tmp_path: Path) -> None:
    seen: list[bool] = []

    class Looks(Callback):
        def on_step_end(self, trainer: Any) -> None:
            seen.append(owner_of(tmp_path / "run")["pid"] == os.getpid())
            with pytest.raises(CheckpointError, match="in use by process"):
                Store(tmp_path / "run").take()

    options: dict[str, Any] = {"device": "cpu"} if kind == "native" else {}
    trainer = TRAINERS[kind](
        t16(), rows(8), loss_fn=F.mse_loss, epochs=1, batch_size=4, progress_bar=False, callbacks=[Looks()],
        save_dir=tmp_path / "run", **options,
    )  # fmt: skip
    trainer.train()
    assert seen == [True, True] and not (tmp_path / "run" / LOCK).exists()
    trainer.save_checkpoint()
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_run_that_ends_by_an_error_gives_the_folder_back(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_step_end(self, trainer: Any) -> None:
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        build(tmp_path / "run", callbacks=lambda: [Fails()]).train()
    assert not (tmp_path / "run" / LOCK).exists()


# --- what is left of a run elsewhere


@pytest.mark.parametrize("shift", [-3600.0, 0.0, 3600.0], ids=["an hour behind", "right", "an hour ahead"])
def test_a_run_on_another_machine_is_known_by_its_signs_of_life_whatever_its_clock_says(
    tmp_path: Path, shift: float, caplog: Any
) -> None:
    run = tmp_path / "run"
    leave(run, boot="another", host="elsewhere")

    def shift_clock() -> None:
        now = time.time() + shift
        os.utime(run / LOCK, (now, now))

    shift_clock()
    beats = subprocess.Popen(
        [sys.executable, "-c", "import os, sys, time\nwhile True:\n    time.sleep(0.1)\n"
         f"    now = time.time() + {shift}\n    os.utime(sys.argv[1], (now, now))", str(run / LOCK)]
    )  # fmt: skip
    try:
        with pytest.raises(CheckpointError, match=r"in use by process .* on 'elsewhere'"):
            Lock(run).take()
    finally:
        beats.kill()
        beats.wait()
    shift_clock()
    with Lock(run).held():
        assert owner_of(run)["pid"] == os.getpid()
    assert "Waiting for a sign of life" in caplog.text and "It is taken over" in caplog.text


def test_a_process_in_another_container_is_not_taken_for_the_one_of_its_number(tmp_path: Path) -> None:
    run = tmp_path / "run"
    # on this kernel, and its lock of the system is gone: so is the process, whatever has its number here
    leave(run, namespace="pid:[1]", pid=os.getppid())
    begin = time.monotonic()
    with Lock(run).held():
        assert time.monotonic() - begin < lock_module.WATCH_S


@pytest.mark.parametrize(
    ("changed", "is_free"),
    [
        ({"pid": 1 << 22}, True),
        ({"pid": os.getppid(), "started": "1"}, True),  # the number is another process's now
        ({"pid": os.getppid(), "started": None}, False),
        ({"pid": os.getpid()}, True),  # an earlier run of this program, which could not remove its lock
        ({"namespace": "pid:[1]"}, True),  # after a wait
        ({"pid": os.getppid(), "started": None, "inode": 1}, True),  # a copy
    ],
)
def test_without_locks_of_the_system_the_process_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], is_free: bool
) -> None:
    monkeypatch.setattr(lock_module, "_flock", lambda descriptor: None)
    run = tmp_path / "run"
    leave(run, **changed)
    if is_free:
        with Lock(run).held():
            assert owner_of(run)["pid"] == os.getpid()
            with pytest.raises(CheckpointError, match="in use by process"):
                Lock(run).take()
    else:
        with pytest.raises(CheckpointError, match="in use by process"):
            Lock(run).take()


@pytest.mark.parametrize("text", ["", "{", "null", '{"pid": "x"}', "\0" * 300])
def test_a_lock_that_says_nothing_keeps_nobody_out(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    with Lock(tmp_path).held():
        assert owner_of(tmp_path)["pid"] == os.getpid()


def test_a_stopped_process_has_its_folder_still(tmp_path: Path, holder: Holder) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    try:
        with pytest.raises(CheckpointError, match=f"in use by process {holder.pid}"):
            Lock(tmp_path / "run").take()
    finally:
        os.kill(holder.pid, signal.SIGCONT)


def test_a_worker_that_outlives_its_run_does_not_hold_the_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    lock.take()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    lock.release()
    with Lock(tmp_path).held():
        pass
    os.close(reading)
    os.close(writing)
    os.waitpid(child, 0)


# --- a lock that is lost


def test_a_run_whose_folder_was_taken_over_saves_nothing_more(tmp_path: Path) -> None:
    run = tmp_path / "run"

    class TakesOver(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == 3:
                (run / LOCK).unlink()
                other.take()

    other = Lock(run)
    trainer = build(run, save_steps=2, callbacks=lambda: [TakesOver()])
    with pytest.raises(CheckpointError, match=f"was taken over by process {os.getpid()}"):
        trainer.train()
    assert [path.name for path in Store(run).checkpoints()] == ["checkpoint-2"]
    assert owner_of(run)["token"] == other.token
    other.release()


def test_a_lock_that_somebody_deleted_is_made_anew_at_the_next_save(tmp_path: Path) -> None:
    run = tmp_path / "run"
    seen: list[bool] = []

    class Deletes(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == 1:
                (run / LOCK).unlink()
            seen.append((run / LOCK).exists())

    build(run, save_steps=2, callbacks=lambda: [Deletes()]).train()
    assert seen[:3] == [False, False, True] and not (run / LOCK).exists()


@pytest.mark.parametrize("what", ["open", "write", "utime", "unlink"])
def test_a_disk_that_fails_does_not_keep_a_run_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    real = getattr(os, what)

    def fails(path: Any, *args: Any, **kwargs: Any) -> Any:
        if what == "open" and LOCK not in str(path):
            return real(path, *args, **kwargs)
        raise OSError(28, "No space left on device")

    caplog.set_level(logging.WARNING)
    lock = Lock(tmp_path)
    monkeypatch.setattr(lock_module.os, what, fails)
    try:
        with lock.held():
            lock.check()
    finally:
        monkeypatch.setattr(lock_module.os, what, real)
    assert ("Nothing keeps another run out" in caplog.text) == (what == "open")
    with Lock(tmp_path).held():
        assert owner_of(tmp_path)["pid"] == os.getpid()


# --- retention


def test_the_last_checkpoint_that_verifies_is_never_deleted(tmp_path: Path, caplog: Any) -> None:
    run = tmp_path / "run"
    trainer = build(run, save_steps=2, epochs=2)
    train(trainer)
    newest = Store(run).path(6)
    weights = newest / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    (run / "best").unlink()
    assert Store(run).prune(keep_last=1, keep_best=1, direction="min") == []
    assert "would be left that verifies" in caplog.text
    assert outcome(build(run)) is not None and Store(run).path(4).exists()
