"""A disk that fails at any operation of any writer: it is told of, tried again, and never ends a run."""

from __future__ import annotations

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
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import thinned
from recipes import rows, t16

from omnitrain import AccelerateTrainer, Callback, CheckpointError, HFTrainer, NonFiniteError, Trainer
from omnitrain.callbacks import rows as row_files
from omnitrain.callbacks.tensorboard import TensorBoardLogger
from omnitrain.checkpoint import checkpointer, lock, state
from omnitrain.checkpoint.store import Store
from omnitrain.errors import Tolerance, is_disk_error

TRAINERS: dict[str, Any] = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}
ERRNOS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
AUDITED = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "os.utime",
    "os.listdir",
    "os.scandir",
    "os.symlink",
)


class Disk:
    """Counts the operations on what lies in a folder, and lets one of them, or all from one on, fail.

    What Python tells its audit hooks is counted: opening, renaming, removing, listing. So is each write to a file,
    and what is written in other languages.
    """

    def __init__(self, folder: Path, at: int | None = None, number: int = errno.ENOSPC, stays: bool = False) -> None:
        self.folder, self.at, self.number, self.stays = str(folder), at, number, stays
        self.count = 0
        self.failed: list[str] = []

    def touch(self, what: str, path: Any, error: Callable[[], Exception] | None = None) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)) or self.folder not in os.fsdecode(path):
            return
        index, self.count = self.count, self.count + 1
        if self.at is not None and (index >= self.at if self.stays else index == self.at):
            if self.stays and what in ("os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.truncate", "reading"):
                return  # which a full disk does
            self.failed.append(f"{what} {path}")
            raise error() if error else OSError(self.number, os.strerror(self.number), os.fsdecode(path))


present: list[Disk] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if present and event in AUDITED:
        if event == "open":
            path, _, flags = args
            is_reading = not (flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            present[-1].touch("reading" if is_reading else "opening", path)
        else:
            present[-1].touch(event, args[1 if event == "os.symlink" else 0])


sys.addaudithook(_audit)


class File:
    """An open file whose writes are counted."""

    def __init__(self, file: Any, path: Any, disk: Disk) -> None:
        self._file, self._path, self._disk = file, path, disk

    def write(self, data: Any) -> Any:
        self._disk.touch("writing", self._path)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Any:
        self._file.__enter__()
        return self

    def __exit__(self, *args: Any) -> Any:
        return self._file.__exit__(*args)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)


@contextlib.contextmanager
def failing(disk: Disk) -> Iterator[Disk]:
    """Let a disk fail inside."""
    real = {"open": io.open, "save": torch.save, "fsync": os.fsync, "write": os.write}

    def opening(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = real["open"](path, mode, *args, **kwargs)
        is_written = any(letter in mode for letter in "wax+") and isinstance(path, (str, os.PathLike))
        return File(file, path, disk) if is_written and disk.folder in os.fspath(path) else file

    def saving(what: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        words = "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"
        disk.touch("torch.save", path, lambda: RuntimeError(words))
        real["save"](what, path, *args, **kwargs)

    def place(descriptor: int) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def fsync(descriptor: int) -> None:
        disk.touch("fsync", place(descriptor))
        real["fsync"](descriptor)

    def write(descriptor: int, data: Any) -> int:
        if descriptor > 2:
            disk.touch("os.write", place(descriptor))
        return real["write"](descriptor, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", opening)
        patch.setattr(io, "open", opening)
        patch.setattr(torch, "save", saving)
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "write", write)
        present.append(disk)
        try:
            yield disk
        finally:
            present.remove(disk)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in memory, where there is such a place: thousands of files are synced to it."""
    monkeypatch.setattr(lock, "LEAVE_S", 0.1)
    monkeypatch.setattr(checkpointer, "_GIT_S", 60.0)  # where git is slow, run.json is written once more, at any time
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # TensorBoard writes in a thread
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)


def make(kind: str, run: Path, *guests: Callback, **options: Any) -> Any:
    options = {
        "epochs": 2, "batch_size": 4, "learning_rate": 0.05, "log_steps": 1, "eval_steps": 2, "save_steps": 2,
        "save_total_limit": 1, "load_best_at_end": False, "progress_bar": False, **options,
    }  # fmt: skip
    if kind == "native":
        options["device"] = "cpu"
    logger = TensorBoardLogger()
    return TRAINERS[kind](
        t16(), rows(12), rows(4), loss_fn=F.mse_loss, save_dir=run, callbacks=[logger, *guests], **options
    )


def outcome(trainer: Any) -> Any:
    """What a failing disk may not change."""
    weights = [parameter.detach().clone() for parameter in trainer.get_model().parameters()]
    metrics = {name: value for name, value in trainer.metrics.to_dict().items() if name != "best_checkpoint"}
    return weights, metrics, trainer.progress.step


def is_same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True)) and one[1:] == other[1:]


def rows_of(run: Path) -> list[tuple[str, int]]:
    return [(row["kind"], row["step"]) for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]


def whole(kind: str, run: Path) -> Any:
    """A run of a program: it trains, tests, saves and writes its results."""
    trainer = make(kind, run)
    trainer.train()
    found = outcome(trainer)
    trainer.save_metrics("test", {"test_loss": 1.0})
    return found


def count(kind: str, folder: Path, play: Callable[[Path], Any]) -> tuple[int, Any]:
    """Return how many operations there are, and what comes of it without a fault."""
    with failing(Disk(folder / "run")) as disk:
        expected = play(folder / "run")
    shutil.rmtree(folder / "run")
    return disk.count, expected


# --- one fault, or all from one on, at every operation


@pytest.mark.parametrize(
    ("kind", "every"), thinned([(kind, n) for kind in TRAINERS for n in (1, 23)], [("native", 23), ("hf", 23)])
)
def test_a_fault_at_any_operation_of_a_run_ends_no_run(kind: str, every: int, folder: Path) -> None:
    number, expected = count(kind, folder, lambda run: whole(kind, run))
    assert number > 200
    for stays in (False, True):
        for at in range(3 * stays, number, every):
            run = folder / "run"
            with failing(Disk(run, at, ERRNOS[at % len(ERRNOS)], stays)) as disk:
                try:
                    found = whole(kind, run)
                except CheckpointError:  # before the first step, as another run may lie where nothing can be listed
                    assert "scandir" in disk.failed[0]
                    found = expected
            assert is_same(found, expected), f"after {disk.failed}"
            assert disk.failed
            if not stays and (run / "metrics.jsonl").exists():
                assert rows_of(run)[-1][1] == 6, f"after {disk.failed}"
            shutil.rmtree(run, ignore_errors=True)


@pytest.mark.parametrize(
    ("kind", "every"), thinned([(kind, n) for kind in TRAINERS for n in (1, 23)], [("native", 23), ("hf", 23)])
)
def test_a_run_is_resumed_while_the_disk_is_full(kind: str, every: int, folder: Path) -> None:
    class Ends(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == 3:
                trainer.stop()

    make(kind, folder / "first", Ends()).train()
    plain = make(kind, folder / "plain")
    plain.train()
    expected = outcome(plain)

    def go_on(run: Path) -> Any:
        trainer = make(kind, run)
        trainer.train(resume_from="last")
        return outcome(trainer)

    shutil.copytree(folder / "first", folder / "run")
    with failing(Disk(folder / "run")) as disk:
        assert is_same(go_on(folder / "run"), expected)
    number = disk.count
    for at in [0, *range(1, number, every)]:
        shutil.rmtree(folder / "run")
        shutil.copytree(folder / "first", folder / "run")
        with failing(Disk(folder / "run", at, stays=True)) as disk:
            found = go_on(folder / "run")
        assert is_same(found, expected), f"after {disk.failed}"
        assert rows_of(folder / "run")[:3] == rows_of(folder / "plain")[:3]


def test_a_nan_is_told_of_where_its_report_cannot_be_written(folder: Path) -> None:
    class Spoils(Callback):
        def on_step_start(self, trainer: Any) -> None:
            if trainer.progress.step == 2:
                with torch.no_grad():
                    next(trainer.model.parameters()).fill_(math.nan)

    for at in (0, 40):
        with failing(Disk(folder / "run", at, stays=True)), pytest.raises(NonFiniteError, match="not finite at step 3"):
            make("native", folder / "run", Spoils()).train()
        shutil.rmtree(folder / "run", ignore_errors=True)


def test_torch_save_that_fails_costs_a_checkpoint_and_not_the_run(folder: Path, monkeypatch: Any, caplog: Any) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")

    def saved(what: Any, path: Any) -> None:
        (fails if "checkpoint-4" in str(path) else torch_save)(what, path)

    torch_save = state.save_tensors
    monkeypatch.setattr(state, "save_tensors", lambda found, path, *_: saved(found, path))
    trainer = make("native", folder / "run")
    trainer.train()
    assert trainer.progress.step == 6 and "Cannot save" in caplog.text and "saving works again" in caplog.text
    with pytest.raises(CheckpointError, match="unexpected pos"):
        make("native", folder / "required", save_required=True).train()


# --- the real thing


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_limit_of_the_system_on_the_size_of_files_ends_no_run(kind: str, folder: Path) -> None:
    told = folder / "told.json"

    class Limit(Callback):
        def on_step_start(self, trainer: Any) -> None:
            size = 512 if trainer.progress.step < 5 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    child = os.fork()
    if not child:
        trainer = make(kind, folder / "run", Limit(), epochs=4)
        trainer.train()
        told.write_text(json.dumps(trainer.progress.step))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert json.loads(told.read_text()) == 12
    assert [step for kind, step in rows_of(folder / "run") if kind == "train"] == list(range(1, 13))
    assert Store(folder / "run").resolve("last") is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_disk_that_is_really_full_ends_no_run(kind: str, tmp_path: Path) -> None:
    if shutil.which("mount") is None or os.geteuid():
        pytest.skip("mounting a small disk takes root")
    small = tmp_path / "small"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=256k tmpfs {small} 2>/dev/null"):
        pytest.skip("this system does not let a small disk be mounted")

    class Fills(Callback):
        def on_step_end(self, trainer: Any) -> None:
            ballast = small / "ballast"
            if trainer.progress.step == 3:
                with contextlib.suppress(OSError), ballast.open("wb") as file:
                    file.write(b"0" * (1 << 20))
            elif trainer.progress.step == 9:
                ballast.unlink()

    try:
        trainer = make(kind, small / "run", Fills(), epochs=4)
        trainer.train()
        assert trainer.progress.step == 12
        assert [step for kind, step in rows_of(small / "run") if kind == "train"] == list(range(1, 13))
        assert Store(small / "run").resolve("last") is not None
        (small / "ballast").write_bytes(b"0" * 1000)
        with contextlib.suppress(OSError), (small / "ballast").open("wb") as file:
            file.write(b"0" * (1 << 20))
        again = make(kind, small / "run", epochs=5)
        again.train(resume_from="auto")
        assert again.progress.step == 15
    finally:
        os.system(f"umount -l {small}")


# --- rows that wait


def test_rows_of_metrics_wait_for_the_disk_and_the_oldest_are_lost_with_a_word(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(Callback):
        order = 39

        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step in (4, 100):
                disk.at = disk.count if trainer.progress.step == 4 else None

    caplog.set_level(logging.WARNING)
    options: dict[str, Any] = {"epochs": 40, "save_steps": 1000, "eval_steps": 1000}
    with failing(Disk(folder / "run", stays=True)) as disk:
        make("native", folder / "run", Fails(), **options).train()
    assert [step for kind, step in rows_of(folder / "run") if kind == "train"] == list(range(1, 121))
    told = [record.getMessage() for record in caplog.records if "metrics.jsonl" in record.getMessage()]
    assert ["cannot be written" in told[0], "works again" in told[1], len(told)] == [True, True, 2]
    shutil.rmtree(folder / "run")
    monkeypatch.setattr(row_files, "MAX_WAITING", 10)
    caplog.clear()
    with failing(Disk(folder / "run", stays=True)) as disk:
        make("native", folder / "run", Fails(), **options).train()
    steps = [step for kind, step in rows_of(folder / "run") if kind == "train"]
    assert steps == [1, 2, 3, *range(91, 121)]
    assert "lacks 87 rows" in caplog.text


def test_what_libraries_say_of_a_disk_is_known_and_nothing_else_is_forgiven() -> None:
    from safetensors.torch import save_file

    with pytest.raises(Exception, match=r"os error|Os \{ code") as caught:
        save_file({"a": torch.zeros(3)}, "/nonexistent/folder/a.safetensors")
    assert is_disk_error(caught.value)
    with pytest.raises(RuntimeError) as of_torch:
        torch.save({}, "/nonexistent/folder/a.pt")
    assert is_disk_error(of_torch.value)
    assert not is_disk_error(RuntimeError("CUDA error")) and not is_disk_error(CheckpointError("inline_container"))
    with pytest.raises(ValueError, match="other"), Tolerance("a file", "It is lost."):
        raise ValueError("other")
