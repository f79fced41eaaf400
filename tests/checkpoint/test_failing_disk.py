"""A disk that fails at any operation of any writer: the run warns, tries again, and does not end."""

import builtins
import contextlib
import errno
import io
import json
import logging
import math
import os
import resource
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import make_small, thinned
from programs import exit_code, fork
from recipes import StopAt, callback, fit, rows, t16, weights
from resuming import assert_same
from safetensors.torch import save_file

from omnitrain import Callback, CheckpointError, NonFiniteError
from omnitrain.checkpoint import lock
from omnitrain.checkpoint.store import Store
from omnitrain.core.errors import Tolerance, is_disk_error
from omnitrain.loggers import rows as row_files
from omnitrain.loggers.tracking import TensorBoardLogger

ERRNOS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
AUDITED = (
    "open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.utime", "os.listdir", "os.scandir",
    "os.symlink",
)  # fmt: skip
POSSIBLE_ON_FULL_DISK = ("os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.truncate", "reading")
TORCH_ERROR = "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"


class Disk:
    """Records the operations in a folder, and lets one of them fail, or with `is_full` all that a full disk rejects.

    Python's audit events are recorded (opening, renaming, removing, listing), each write to a file, and what is
    written by other languages.
    """

    def __init__(self, folder: Path, at: int | None = None, number: int = errno.ENOSPC, is_full: bool = False) -> None:
        self.folder, self.at, self.number, self.is_full = str(folder), at, number, is_full
        self.operations: list[str] = []
        self.failed: list[str] = []

    def touch(self, what: str, path: Any, error: Exception | None = None) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)) or self.folder not in os.fsdecode(path):
            return
        index = len(self.operations)
        self.operations.append(what)
        if self.at is None or index < self.at or (index > self.at and not self.is_full):
            return
        if not (self.is_full and what in POSSIBLE_ON_FULL_DISK):
            self.failed.append(f"{what} {path}")
            raise error or OSError(self.number, os.strerror(self.number), os.fsdecode(path))


present: list[Disk] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if present and event in AUDITED:
        path = args[1 if event == "os.symlink" else 0]
        if event == "open":
            event = "opening" if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else "reading"
        present[-1].touch(event, path)


sys.addaudithook(_audit)


class File:
    """An open file whose writes are recorded."""

    def __init__(self, file: Any, path: Any, disk: Disk) -> None:
        self._file, self._path, self._disk = file, path, disk

    def write(self, data: Any) -> Any:
        self._disk.touch("writing", self._path)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: Any) -> Any:
        return self._file.__exit__(*args)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)


@contextlib.contextmanager
def failing(disk: Disk) -> Iterator[Disk]:
    """Let a disk fail inside."""
    real_open, append, save, real_fsync, real_write = io.open, row_files.open_to_append, torch.save, os.fsync, os.write

    def path_of(descriptor: int) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def opening(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = real_open(path, mode, *args, **kwargs)
        if not any(letter in mode for letter in "wax+"):
            return file
        name = path_of(path) if isinstance(path, int) else os.fsdecode(path)
        return File(file, name, disk) if disk.folder in name else file

    def saving(what: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        disk.touch("torch.save", path, RuntimeError(TORCH_ERROR))
        save(what, path, *args, **kwargs)

    def fsync(descriptor: int) -> None:
        disk.touch("fsync", path_of(descriptor))
        real_fsync(descriptor)

    def write(descriptor: int, data: Any) -> int:
        if descriptor > 2:
            disk.touch("os.write", path_of(descriptor))
        return real_write(descriptor, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", opening)
        patch.setattr(io, "open", opening)
        patch.setattr(row_files, "open_to_append", lambda path: File(append(path), path, disk))
        patch.setattr(torch, "save", saving)
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "write", write)
        present.append(disk)
        try:
            yield disk
        finally:
            present.remove(disk)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "EXIT_GRACE_S", 0.1)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # TensorBoard writes in a thread


def make(kind: str, run: Path, *callbacks: Callback, **options: Any) -> Any:
    options = {
        "epochs": 2, "learning_rate": 0.05, "log_steps": 1, "eval_steps": 2, "save_steps": 2, "save_total_limit": 1,
        "load_best_at_end": False, "eval_dataset": rows(4), **options,
    }  # fmt: skip
    return make_small(kind, t16(), rows(12), save_dir=run, callbacks=[TensorBoardLogger(), *callbacks], **options)


def outcome(trainer: Any) -> dict[str, Any]:
    """Return what a failing disk may not change."""
    metrics = trainer.metrics.to_dict() | {"best_checkpoint": ""}
    return {"weights": weights(trainer.get_model()), "metrics": metrics, "step": trainer.progress.step}


def rows_of(run: Path, *kinds: str) -> list[tuple[str, int]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(row["kind"], row["step"]) for row in rows if not kinds or row["kind"] in kinds]


def train_and_test(kind: str, run: Path) -> dict[str, Any]:
    """Train, test, save and write the results, as a program does."""
    trainer = fit(make(kind, run))
    result = outcome(trainer)
    trainer.save_metrics("test", {"test_loss": 1.0})
    return result


PARTS = 12


def chosen(operations: list[str], kind: str, part: int | None, is_full: bool = False) -> list[int]:
    """Return the numbers of the operations to test: a part of all, or some kinds; each kind once natively."""
    if part is not None:
        return [*range(part, len(operations), PARTS)]
    names = ["opening"] if is_full else dict.fromkeys(operations) if kind == "native" else ["opening", "os.rename"]
    numbers = {name: [number for number, other in enumerate(operations) if other == name] for name in names}
    return [same_name[len(same_name) // 2] for same_name in numbers.values()]


CASES = [("native", None), ("hf", None), *(("native", part) for part in range(PARTS))]


@pytest.mark.parametrize(("kind", "part"), thinned(CASES, CASES[:2]))
def test_disk_fault_at_operation_does_not_end_the_run(kind: str, part: int | None, folder: Path, caplog: Any) -> None:
    """It is reported, and costs neither weights nor metrics; what is left can be resumed."""
    run = folder / "run"
    with failing(Disk(run)) as disk:
        expected = train_and_test(kind, run)
    operations = disk.operations
    assert len(operations) > 200
    for is_full in (False, True):
        for at in chosen(operations, kind, part, is_full):
            if is_full and (operations[at] in POSSIBLE_ON_FULL_DISK or at < 3):
                continue
            shutil.rmtree(run, ignore_errors=True)
            caplog.clear()
            with failing(Disk(run, at, ERRNOS[at % len(ERRNOS)], is_full)) as disk:
                try:
                    assert_same(train_and_test(kind, run), expected, disk.failed)
                except CheckpointError:  # before the first step, as another run may lie where nothing can be listed
                    assert "scandir" in disk.failed[0]
            assert disk.failed
            if not is_full:
                assert sum(record.levelno == logging.ERROR for record in caplog.records) <= 1, f"after {disk.failed}"
                if (run / "metrics.jsonl").exists():
                    assert rows_of(run)[-1][1] == 6, f"after {disk.failed}"
            elif Store(run).resolve("auto") is not None:  # it verifies
                trainer = fit(make(kind, run), resume_from="auto")
                assert_same(weights(trainer.get_model()), expected["weights"], disk.failed)


@pytest.mark.parametrize("part", thinned([None, 0, 4, 8], [None]))
def test_resume_works_on_full_disk(part: int | None, folder: Path) -> None:
    run, first = folder / "run", folder / "first"
    make("native", first, StopAt(3)).train()
    expected = train_and_test("native", folder / "straight")

    def resume(at: int | None) -> list[str]:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(first, run)
        with failing(Disk(run, at, is_full=True)) as disk:
            assert_same(outcome(fit(make("native", run), resume_from="last")), expected, disk.failed)
        return disk.operations

    for at in [0, *chosen(resume(None), "native", part, is_full=True)]:
        resume(at)
        assert rows_of(run)[:3] == rows_of(folder / "straight")[:3]


def test_non_finite_loss_is_reported_on_full_disk(folder: Path) -> None:
    def spoil(trainer: Any) -> None:
        if trainer.progress.step == 2:
            next(trainer.model.parameters()).data.fill_(math.nan)

    for at in (0, 40):
        run = folder / str(at)
        with failing(Disk(run, at, is_full=True)), pytest.raises(NonFiniteError, match="not finite at step 3"):
            make("native", run, callback(on_step_start=spoil)).train()


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process cannot lift the limit of its files again")
def test_file_size_limit_does_not_end_the_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The system rejects writes, in safetensors' own code too: an error per save, and the checkpoint before stays."""
    run = folder / "run"

    def limit(trainer: Any) -> None:
        step = trainer.progress.step
        size = 512 if 3 <= step < 9 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        if step == 9:
            assert Store(run).resolve("auto")[0].name == "checkpoint-2"  # type: ignore[index]
            assert not [*run.glob("*.tmp")]

    def train_with_limits() -> None:
        make("native", run, callback(on_step_start=limit, order=99), epochs=4).train()
        errors = [text for text in caplog.messages if "Cannot save" in text]
        assert len(errors) == 3 and all("File too large" in error for error in errors)  # steps 4, 6, 8

    assert exit_code(fork(train_with_limits)) == 0
    assert rows_of(run, "train") == [("train", step) for step in range(1, 13)]
    assert Store(run).resolve("last")[0].name == "checkpoint-12"  # type: ignore[index]


def test_metric_rows_wait_for_the_disk(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(trainer: Any) -> None:
        if trainer.progress.step in (4, 20):
            disk.at = len(disk.operations) if trainer.progress.step == 4 else None

    run = folder / "run"
    with failing(Disk(run, is_full=True)) as disk:
        make("native", run, callback(on_step_end=fail, order=39), epochs=10, save_steps=1000, eval_steps=1000).train()
    assert rows_of(run, "train") == [("train", step) for step in range(1, 31)]
    first, second = (text for text in caplog.messages if "metrics.jsonl" in text)
    assert "cannot be written" in first and "works again" in second


def test_is_disk_error_accepts_only_disk_errors() -> None:
    with pytest.raises(Exception, match=r"os error|Os \{ code") as safetensors_error:
        save_file({"a": torch.zeros(3)}, "/nonexistent/folder/a.safetensors")
    with pytest.raises(RuntimeError) as torch_error:
        torch.save({}, "/nonexistent/folder/a.pt")
    assert is_disk_error(safetensors_error.value) and is_disk_error(torch_error.value)
    assert not is_disk_error(RuntimeError("CUDA error")) and not is_disk_error(CheckpointError("inline_container"))
    with pytest.raises(ValueError, match="other"), Tolerance("a file", "It is lost."):
        raise ValueError("other")
