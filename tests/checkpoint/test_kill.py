"""Runs that are killed, or whose power is cut, at any operation: they resume to the same end."""

import contextlib
import errno
import itertools
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import FaultyDisk, cut_power, end_process, fail_once
from forging import spoil
from marks import thinned
from programs import LIMIT, exit_code, fork
from resuming import assert_same, build, comparable, disturb_generators, outcome, play, train

from omnitrain import Callback, CheckpointError, Trainer
from omnitrain.checkpoint.manifest import HISTORY
from omnitrain.checkpoint.store import MANIFEST, Store
from omnitrain.core.files import FileSystem

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes to kill them")

# A checkpoint in the middle of an epoch, one on an epoch's last step, which is saved again after it, and pruning.
RUN: dict[str, Any] = {"epochs": 2, "save_steps": 2, "eval_steps": 2, "save_total_limit": 1, "log_steps": 1}


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], set[str]]:
    """The outcome of RUN without any fault, as far as a killed process leaves it, and the names in its folder."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    return comparable(play(run, **RUN)), set(os.listdir(run))


@pytest.fixture
def undisturbed(undisturbed_run: tuple[dict[str, Any], set[str]]) -> dict[str, Any]:
    return undisturbed_run[0]


@contextlib.contextmanager
def saving_to(trainer: Trainer, at: int | None = None, fault: Any = None) -> Iterator[FaultyDisk]:
    """Have the trainer save to a disk with a fault."""
    assert trainer.store is not None
    trainer.store.fs = disk = FaultyDisk(trainer.store.root, at, fault)
    yield disk


def operations(folder: Path, is_exhaustive: bool) -> list[int]:
    """Return the numbers of the operations of a run to test: all, or some of different kinds in the middle of it."""
    trainer = build(folder / "counted", **RUN)
    with saving_to(trainer) as disk:
        train(trainer)
    assert len(disk.operations) > 80
    if is_exhaustive:
        return [*range(len(disk.operations))]
    by_kind: dict[str, list[int]] = {}
    for number, (kind, path) in enumerate(disk.operations):
        by_kind.setdefault("manifest" if kind == "write" and path.name == MANIFEST else kind, []).append(number)
    chosen = [by_kind[kind][len(by_kind[kind]) // 2] for kind in ("write", "manifest", "rename", "remove")]
    return [*chosen, chosen[1] + 1]


@pytest.mark.parametrize(
    ("fault", "is_exhaustive"),
    thinned([(cut_power, False), (cut_power, True), (end_process, True)], [(cut_power, False)]),
)
def test_kill_at_file_operation_resumes_identically(
    fault: Any, is_exhaustive: bool, folder: Path, undisturbed_run: tuple[dict[str, Any], set[str]]
) -> None:
    """It is killed again early in the run that resumes, and leaves nothing else in the folder."""
    expected, names = undisturbed_run
    for number in operations(folder, is_exhaustive):
        run = folder / str(number)
        for at in (number, 15):
            trainer = build(run, **RUN)
            with saving_to(trainer, at, fault) as disk:
                train(trainer, resume_from="auto")
            assert disk.has_ended or at != number
        is_complete = (run / "checkpoint-6").exists()
        assert_same(comparable(play(run, **RUN)), expected, f"killed at operation {number}")
        present = set(os.listdir(run))  # only a new checkpoint has others deleted
        assert present == names or (is_complete and present > names), f"killed at operation {number}"
        shutil.rmtree(run)


@pytest.mark.parametrize("is_exhaustive", thinned([False, True], [False]))
def test_disk_failure_during_overwrite_does_not_end_the_run(is_exhaustive: bool, folder: Path) -> None:
    play(folder / "earlier", save_steps=2, epochs=2)
    options = {**RUN, "load_best_at_end": False, "overwrite": True, "save_steps": 4}
    number = -1
    for number in itertools.count(0 if is_exhaustive else 30, 1 if is_exhaustive else 30):
        run = folder / str(number)
        shutil.copytree(folder / "earlier", run)
        trainer = build(run, **options)
        with saving_to(trainer, number, fail_once) as disk:
            trainer.train()
        if len(disk.operations) <= number:
            break
        assert trainer.metrics["stop_reason"] == "epochs"
        names = {path.name for path in Store(run).checkpoints()}
        assert names <= {"checkpoint-4", "checkpoint-6"}, f"failed at operation {number}"
        shutil.rmtree(run)
    assert number > 50


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "is_async"),
    [(FULL, False), (FULL, True), (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos"), False)],
    ids=["disk", "async", "torch"],
)
def test_save_required_failure_ends_the_run(error: Exception, is_async: bool, folder: Path) -> None:
    """The earlier checkpoint stays."""

    class FullAtStep4(FileSystem):
        def write(self, path: Path, content: Any) -> Any:
            if "checkpoint-4" in str(path):
                raise error
            return super().write(path, content)

    trainer = build(folder / "run", **RUN, save_required=True, async_save=is_async)
    trainer.store.fs = FullAtStep4()
    with pytest.raises(CheckpointError, match=r"checkpoint-4.*(No space left|unexpected pos)"):
        trainer.train()
    assert [path.name for path in Store(folder / "run").checkpoints()] == ["checkpoint-2"]
    assert trainer.progress.step in ((4, 5, 6) if is_async else (4,))


class KillAtStep(Callback):
    def on_step_start(self, trainer: Any) -> None:
        if trainer.progress.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
def test_kill_with_workers_resumes_identically(folder: Path, undisturbed: dict[str, Any]) -> None:
    trainer = build(folder / "run", callbacks=lambda: [KillAtStep()], num_workers=2, **RUN)
    assert exit_code(fork(trainer.train)) == -signal.SIGKILL
    assert_same(comparable(play(folder / "run", **RUN)), undisturbed)


@pytest.mark.processes
def test_kill_during_background_write_resumes_identically(folder: Path, undisturbed: dict[str, Any]) -> None:
    """The unfinished checkpoint is left out: the run resumes from the one before."""
    run = folder / "run"
    is_writing = threading.Event()

    class KillWhenWriting(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == 5:
                assert is_writing.wait(LIMIT)
                os.kill(os.getpid(), signal.SIGKILL)

    class HangAtStep4(FileSystem):
        def write(self, path: Path, content: Any) -> Any:
            entry = super().write(path, content)
            if "checkpoint-4" in str(path):
                is_writing.set()
                threading.Event().wait()
            return entry

    def train_until_killed() -> None:
        trainer = build(run, async_save=True, callbacks=lambda: [KillWhenWriting()], **RUN)
        trainer.store.fs = HangAtStep4()
        trainer.train()

    assert exit_code(fork(train_until_killed)) == -signal.SIGKILL
    assert list(run.glob("checkpoint-4.*.tmp")) and not (run / "checkpoint-4").exists()
    resolved = Store(run).resolve("auto")
    assert resolved is not None and resolved[0].name == "checkpoint-2"
    assert_same(comparable(play(run, **RUN)), undisturbed)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        (MANIFEST, "flip"), (HISTORY, "device"), ("model.safetensors", "pipe"),
        ("optimizer/state.safetensors", "folder"), ("rng/state.safetensors", "dangling"),
    ],
)  # fmt: skip
def test_damaged_file_of_newest_checkpoint_is_reported(file: str, damage: str, folder: Path, caplog: Any) -> None:
    """A checkpoint by name, and "last", are errors that name the one before; "auto" resumes from that one."""
    options, run = {**RUN, "save_total_limit": None, "load_best_at_end": False}, folder / "run"
    expected = comparable(play(folder / "undisturbed", **options))
    play(run, [{"cut": ("kill", 5)}], **options)
    newest = run / "checkpoint-4"
    files = [path.relative_to(newest).as_posix() for path in sorted(newest.rglob("*")) if path.is_file()]
    assert files == [HISTORY, "model.safetensors", MANIFEST, "optimizer/state.safetensors", "rng/state.safetensors"]
    spoil(newest / file, damage)
    for which in (newest, "last"):
        trainer = build(run, **options)
        with pytest.raises(CheckpointError, match=rf"(?s){file}.*'checkpoint-2'"):
            trainer.train(resume_from=which)
        assert trainer.progress.step == 0 and not trainer.optimizer.state
    caplog.clear()
    trainer = build(run, **options)
    disturb_generators()
    trainer.train(resume_from="auto")
    (message,) = [text for text in caplog.messages if "Skipped:" in text]
    assert file in message and "checkpoint-2" in message
    assert_same(comparable(outcome(trainer)), expected)
