"""Runs that are killed, or whose power is cut, at any operation: they resume to the same end."""

import itertools
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from disks import FaultyDisk, cut_power, end_process, fail_once
from marks import thinned
from programs import LIMIT, exit_code, fork
from recipes import callback
from resuming import assert_same, build, comparable, play, train

from omnitrain import Trainer
from omnitrain.checkpoint.store import MANIFEST, Store
from omnitrain.core.files import FileSystem

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes to kill them")

# A checkpoint in the middle of an epoch, one on an epoch's last step, which is saved again after it, and pruning.
RUN: dict[str, Any] = {"epochs": 2, "save_steps": 2, "eval_steps": 2, "save_total_limit": 1, "log_steps": 1}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of RUN without any fault, as far as a killed process leaves it, and the names in its folder."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    return {**comparable(play(run, **RUN)), "names": set(os.listdir(run))}


def check_resumes(run: Path, undisturbed: dict[str, Any], case: object = "") -> None:
    """Check that the run ends like an undisturbed one; only a new checkpoint has others deleted."""
    is_complete = (run / "checkpoint-6").exists()
    result = comparable(play(run, **RUN))
    names = set(os.listdir(run))
    assert names == undisturbed["names"] or (is_complete and names > undisturbed["names"]), case
    assert_same({**result, "names": undisturbed["names"]}, undisturbed, case)


def save_to_disk(trainer: Trainer, at: int | None = None, fault: Any = None) -> FaultyDisk:
    """Have the trainer save to a disk with a fault."""
    assert trainer.store is not None
    trainer.store.fs = disk = FaultyDisk(trainer.store.root, at, fault)
    return disk


def operations(folder: Path, is_exhaustive: bool) -> list[int]:
    """Return the numbers of the operations of a run to test: all, or some of different kinds in the middle of it."""
    trainer = build(folder / "counted", **RUN)
    disk = save_to_disk(trainer)
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
    fault: Any, is_exhaustive: bool, folder: Path, undisturbed: dict[str, Any]
) -> None:
    """It is killed again early in the run that resumes, and leaves nothing else in the folder."""
    for number in operations(folder, is_exhaustive):
        run = folder / str(number)
        for at in (number, 15):
            trainer = build(run, **RUN)
            disk = save_to_disk(trainer, at, fault)
            train(trainer, resume_from="auto")
            assert disk.has_ended or at != number
        check_resumes(run, undisturbed, f"killed at operation {number}")
        shutil.rmtree(run)


@pytest.mark.parametrize("every", thinned([30, 1], [30]))
def test_disk_failure_during_overwrite_does_not_end_the_run(every: int, folder: Path) -> None:
    play(folder / "earlier", save_steps=2, epochs=2)
    options = {**RUN, "load_best_at_end": False, "overwrite": True, "save_steps": 4}
    for number in itertools.count(0, every):
        run = shutil.copytree(folder / "earlier", folder / str(number))
        trainer = build(run, **options)
        disk = save_to_disk(trainer, number, fail_once)
        trainer.train()
        if len(disk.operations) <= number:
            break
        assert trainer.metrics["stop_reason"] == "epochs"
        names = {path.name for path in Store(run).checkpoints()}
        assert names <= {"checkpoint-4", "checkpoint-6"}, f"failed at operation {number}"
        shutil.rmtree(run)
    assert number > 50


@pytest.mark.processes
def test_kill_with_workers_resumes_identically(folder: Path, undisturbed: dict[str, Any]) -> None:
    kill = callback(on_step_start=lambda trainer: trainer.progress.step < 5 or os.kill(os.getpid(), signal.SIGKILL))
    trainer = build(folder / "run", callbacks=lambda: [kill], num_workers=2, **RUN)
    assert exit_code(fork(trainer.train)) == -signal.SIGKILL
    check_resumes(folder / "run", undisturbed)


@pytest.mark.processes
def test_kill_during_background_write_resumes_identically(folder: Path, undisturbed: dict[str, Any]) -> None:
    """The unfinished checkpoint is left out: the run resumes from the one before."""
    run, is_writing = folder / "run", threading.Event()

    def kill_when_writing(trainer: Any) -> None:
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

    trainer = build(run, async_save=True, callbacks=lambda: [callback(on_step_end=kill_when_writing)], **RUN)
    trainer.store.fs = HangAtStep4()
    assert exit_code(fork(trainer.train)) == -signal.SIGKILL
    assert list(run.glob("checkpoint-4.*.tmp")) and not (run / "checkpoint-4").exists()
    assert Store(run).resolve("auto")[0].name == "checkpoint-2"  # type: ignore[index]
    check_resumes(run, undisturbed)
