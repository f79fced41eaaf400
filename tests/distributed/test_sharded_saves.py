"""Checkpoints that every process writes a part of: kills, full disks, saves in the background, locked folders."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import make_trainer
from forking import ON_CPU, Case, Found, Outcome, mark, play
from marks import thinned
from recipes import rows, t16

from omnitrain import CheckpointError
from omnitrain.checkpoint import lock
from omnitrain.checkpoint.disk import FileSystem
from omnitrain.checkpoint.store import Store
from omnitrain.checkpoint.tensor_files import gather_to_host
from omnitrain.distributed import ranks

HERE = "test_sharded_saves"
ASYNC = {"async_save": True}
PARTS = {"consolidate": False}
WAYS: dict[str, dict[str, Any]] = {"parts": PARTS, "async-parts": PARTS | ASYNC}
MORE: dict[str, dict[str, Any]] = {
    "whole": {},
    "async": ASYNC,
    "ddp": {"backend": "ddp"},
    **{backend: {"backend": backend, **PARTS} for backend in ("zero2", "zero3", "hf_fsdp")},
    **{f"{backend}-async": {"backend": backend, **PARTS, **ASYNC} for backend in ("zero2", "zero3", "hf_fsdp")},
    **{backend: {"backend": backend} for backend in ("hf2", "hf_zero2")},
    **{f"{backend}-async": {"backend": backend, **ASYNC} for backend in ("hf2", "hf_zero2")},
}
"""Ways that only `make test-all` tests."""
SAME = [("parts", "async-parts"), ("whole", "async"),
        *((backend, f"{backend}-async") for backend in ("zero2", "zero3", "hf_fsdp", "hf2", "hf_zero2"))]  # fmt: skip
RECORD = ("config.yaml", "metrics.jsonl", "run.json", "run.lock")
"""What is in a run's folder besides its checkpoints."""
KINDS = ("create", "rename")
"""The file operations that are disturbed in `make test`; in `make test-all` it is half of all."""


# --- what runs on every process


class Disk(FileSystem):
    """Notes what is done to it, and has a fault at one of the operations, by its number or its first words."""

    def __init__(self, at: int | str | None = None, fault: str = "kill") -> None:
        self.at, self.fault, self.noted = at, fault, list[str]()
        self.lock = threading.Lock()

    def _next(self, kind: str, path: Path) -> None:
        with self.lock:
            operation = f"{kind} {path.name}"
            self.noted.append(operation)
            is_it = operation.startswith(self.at) if isinstance(self.at, str) else len(self.noted) - 1 == self.at
            if not is_it:
                return
        mark()
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def mkdir(self, path: Path) -> None:
        self._next("mkdir", path)
        super().mkdir(path)

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        self._next("write", path)
        super().write(path, data)

    def create(self, path: Path, pieces: Iterable[bytes | memoryview]) -> None:
        path.write_bytes(b"half of a file")
        self._next("create", path)
        super().create(path, pieces)

    def sync(self, path: Path) -> None:
        self._next("sync", path)
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        self._next("rename", source)
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._next("unlink", path)
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        self._next("rmdir", path)
        super().rmdir(path)


def digest(tensors: dict[str, Any]) -> dict[str, str]:
    """Return the sha256 of each tensor's bytes; all ranks call this."""
    return {
        name: hashlib.sha256(gather_to_host(one).contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, one in sorted(tensors.items())
    }


def state_of(trainer: Any) -> dict[str, str]:
    moments, _ = trainer.backend.optimizer_state()
    return digest({**trainer.backend.model_tensors(), **moments})


def make(folder: str, backend: str = "fsdp", **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "global_batch_size": 12, "batch_size": 6, "max_steps": 4, "save_steps": 2, "save_total_limit": 1,
        "loss_fn": F.mse_loss, "learning_rate": 0.01, "save_dir": folder,
    }  # fmt: skip
    return make_trainer(backend, t16(dtype=torch.float32), rows(60, torch.float32), **{**defaults, **options})


def run(
    folder: str, rank: int = -1, at: int | str | None = None, fault: str = "kill", **options: Any
) -> dict[str, Any]:
    """Train from the latest checkpoint, with a fault of the disk of one process."""
    ranks._GRACE_S = 1.0
    trainer = make(folder, **options)
    disk = Disk(at if int(os.environ.get("RANK", "0")) == rank else None, fault)
    trainer.store.fs = disk
    trainer.train(resume_from="auto")
    _, content = trainer.store.resolve("last")
    files = {name: entry["sha256"] for name, entry in content["files"].items() if name.endswith(".safetensors")}
    return {"noted": disk.noted, "state": state_of(trainer), "step": trainer.progress.step, "files": files}


def case(way: str, name: str, **options: Any) -> Case:
    """Return a case that trains in this way."""
    environment = {"DS_ACCELERATOR": "cpu"} if "zero" in way else dict(ON_CPU)
    return Case(name, f"{HERE}:run", {**(WAYS | MORE)[way], **options}, environment=environment)


def run_in_turn(folders: list[str]) -> list[Any]:
    """Train in one folder after the other; return the step and the error of each run."""
    lock.EXIT_GRACE_S, results = 0.1, []
    for folder in folders:
        trainer, message = make(folder, "ddp"), ""
        try:
            trainer.train()
        except CheckpointError as error:
            message = str(error)
        results.append((trainer.progress.step, message))
    return results


# --- kills and full disks


SHARES = 13
"""A run of the tests disturbs one operation in so many, and six runs nearly half of them."""


@pytest.fixture(scope="module", params=[None, *(pytest.param(n, marks=pytest.mark.slow) for n in range(6))])
def part(request: pytest.FixtureRequest) -> int | None:
    """Which share of all operations is disturbed; None for a few of them."""
    return request.param


@pytest.fixture(scope="module")
def undisturbed(part: int | None, tmp_path_factory: pytest.TempPathFactory) -> Found[list[Outcome]]:
    """How each way ends if nothing happens, and what it does to the disk."""
    folder, ways = tmp_path_factory.mktemp("undisturbed"), WAYS if part is None else WAYS | MORE
    cases = [case(way, way, folder=str(folder / way)) for way in ways]
    found = play(cases, folder / "cases")
    for way in ways:
        assert [one.code for one in found[way]] == [0, 0], [one.output for one in found[way]]
    return found


def test_async_saves_write_the_files_of_other_saves(undisturbed: Found[list[Outcome]]) -> None:
    pairs = [pair for pair in SAME if set(pair) <= set(undisturbed)]
    assert len(pairs) in (1, len(SAME))
    for way, async_way in pairs:
        for one, other in zip(undisturbed[way], undisturbed[async_way], strict=True):
            assert one.result["files"] == other.result["files"], (way, async_way)
            assert any("optimizer" in name or "states" in name for name in one.result["files"])


Point = tuple[str, int, int]
"""Way, rank and number of a file operation."""


def points(found: Found[list[Outcome]], part: int | None, kinds: Sequence[str], until: str = "") -> list[Point]:
    """Return the operations to disturb, up to one that begins so: a part of them, or one of each of these kinds."""
    operations: list[Point] = []
    for way in found:
        for rank, outcome in enumerate(found[way]):
            noted = outcome.result["noted"]
            end = len(noted)
            if until:
                end = next((k + 1 for k, one in enumerate(noted) if one.startswith(until)), end // 2)
            operations += [(way, rank, k) for k in range(end)]
    if part is not None:
        return operations[part::SHARES]
    few: list[Point] = []
    for number, kind in enumerate(kinds):
        of_kind = [
            (way, rank, k) for way, rank, k in operations if found[way][rank].result["noted"][k].startswith(kind)
        ]  # fmt: skip
        few += of_kind[len(of_kind) * (number + 1) // (len(kinds) + 1) :][:1]  # another way and rank for each kind
    return few


def disturbed(point: Point, fault: str, folder: Path) -> Case:
    way, rank, k = point
    name = f"{way}-{rank}-{k}"
    return case(way, name, folder=str(folder / name), rank=rank, at=k, fault=fault)


def test_kill_at_any_file_operation_costs_only_recent_work(
    part: int | None, undisturbed: Found[list[Outcome]], tmp_path: Path
) -> None:
    """The other process ends with an error; the next run ends as one that nothing happened to."""
    chosen = points(undisturbed, part, KINDS)
    assert {undisturbed[way][rank].result["noted"][k].split()[0] for way, rank, k in chosen} >= set(KINDS)
    faults = [disturbed(point, "kill", tmp_path) for point in chosen]
    killed = play(faults, tmp_path / "killed")
    again = [
        case(way, fault.name, folder=str(tmp_path / fault.name))
        for (way, _, _), fault in zip(chosen, faults, strict=True)
    ]
    resumed = play(again, tmp_path / "resumed")
    errors = []
    for fault, (way, rank, k) in zip(faults, chosen, strict=True):
        name = f"{fault.name}: {undisturbed[way][rank].result['noted'][k]}"
        victim, other = killed[fault.name][rank], killed[fault.name][1 - rank]
        if victim.code != -signal.SIGKILL or other.code != 1 or "DistributedError" not in other.output:
            errors.append(f"{name}: ended with {victim.code}, {other.code}\n{other.output[-1500:]}")
        states = [outcome.result and outcome.result["state"] for outcome in resumed[fault.name]]
        if states != [undisturbed[way][0].result["state"]] * 2:
            errors.append(f"{name}: not the same end\n{resumed[fault.name][0].output[-1500:]}")
    assert not errors, "\n".join(errors)


def test_full_disk_at_any_operation_costs_one_checkpoint(
    part: int | None, undisturbed: Found[list[Outcome]], tmp_path: Path
) -> None:
    chosen = points(undisturbed, part, ("create",), until="rename checkpoint-2.")
    faults = [disturbed(point, "full", tmp_path) for point in chosen]
    assert faults
    found, errors = play(faults, tmp_path / "full"), []
    for fault, (way, rank, k) in zip(faults, chosen, strict=True):
        name, folder = f"{fault.name}: {undisturbed[way][rank].result['noted'][k]}", tmp_path / fault.name
        outcomes = found[fault.name]
        if [one.result and one.result["state"] for one in outcomes] != [undisturbed[way][0].result["state"]] * 2:
            codes = [one.code for one in outcomes]
            errors.append(f"{name}: {codes} {''.join(one.output[-1500:] for one in outcomes)}")
            continue
        left = sorted(path.name for path in folder.iterdir() if path.name not in RECORD)
        if left != ["checkpoint-4", "last"]:
            errors.append(f"{name}: left {left}")
        if ": create " in name and not any("Cannot save" in one.output for one in outcomes):
            errors.append(f"{name}: no message")
        Store(folder).verify(folder / "checkpoint-4")
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(
    ("way", "rank"),
    thinned([("ddp", 0), ("parts", 0), ("parts", 1), ("async", 0), ("async", 1)], [("parts", 1)]),
)
def test_required_save_that_fails_on_one_rank_ends_both(way: str, rank: int, tmp_path: Path) -> None:
    at = "sync model" if way == "ddp" else "create rank-"
    failing = case(way, "run", folder=str(tmp_path / "run"), rank=rank, at=at, fault="full", save_required=True)
    found = play([failing], tmp_path / "cases")["run"]
    assert [one.code for one in found] == [1, 1], found
    for one in found:
        assert "CheckpointError: Cannot save" in one.output and "No space left" in one.output, one.output
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_lock_of_another_run_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    folders = {"folders": [str(folder), str(tmp_path / "free")]}
    with lock.Lock(folder).hold():
        outcomes = play([Case("train", f"{HERE}:run_in_turn", folders)], tmp_path / "cases")["train"]
    for outcome in outcomes:
        (step, message), unlocked = outcome.result
        assert step == 0 and "in use by process" in message and unlocked == [4, ""]
    assert not list(tmp_path.rglob(lock.LOCK)) and not list(folder.glob("checkpoint-*"))
