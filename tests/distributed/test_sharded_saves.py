"""Checkpoints that every process writes a part of: killed, out of space, on folders of their own, in the background."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import make_trainer  # noqa: E402
from forking import ON_CPU, Case, Found, Outcome, mark, play  # noqa: E402
from recipes import rows, t16  # noqa: E402

from omnitrain.checkpoint import checkpointer  # noqa: E402
from omnitrain.checkpoint.disk import FileSystem  # noqa: E402
from omnitrain.checkpoint.store import Store  # noqa: E402
from omnitrain.checkpoint.tensors import whole  # noqa: E402

pytestmark = pytest.mark.distributed

HERE = "test_sharded_saves"
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "parts": {"consolidate": False},
    "async": {"async_save": True},
    "async-parts": {"consolidate": False, "async_save": True},
    "zero2-async": {"backend": "zero2", "consolidate": False, "async_save": True},
    "hf_fsdp-async": {"backend": "hf_fsdp", "consolidate": False, "async_save": True},
}
MORE: dict[str, dict[str, Any]] = {
    "zero2": {"backend": "zero2", "consolidate": False},
    "zero3": {"backend": "zero3", "consolidate": False},
    "zero3-async": {"backend": "zero3", "consolidate": False, "async_save": True},
    "hf_fsdp": {"backend": "hf_fsdp", "consolidate": False},
    "hf2": {"backend": "hf2"},
    "hf2-async": {"backend": "hf2", "async_save": True},
    "hf_zero2": {"backend": "hf_zero2"},
    "hf_zero2-async": {"backend": "hf_zero2", "async_save": True},
}
"""Ways that only the whole set of tests goes."""
SAME = [("whole", "async"), ("parts", "async-parts"), ("zero2", "zero2-async"), ("zero3", "zero3-async"),
        ("hf_fsdp", "hf_fsdp-async"), ("hf2", "hf2-async"), ("hf_zero2", "hf_zero2-async")]  # fmt: skip
RECORD = ("config.yaml", "metrics.jsonl", "run.json", "run.lock")
"""What is in a run's folder besides its checkpoints."""


# --- what runs on every process


class Disk(FileSystem):
    """Notes what is done to it, and has a fault at one of the operations."""

    def __init__(self, at: int | None = None, fault: str = "kill") -> None:
        self.at, self.fault, self.noted = at, fault, list[str]()
        self.lock = threading.Lock()

    def _next(self, kind: str, path: Path) -> None:
        with self.lock:
            self.noted.append(f"{kind} {path.name}")
            if len(self.noted) - 1 != self.at:
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
        name: hashlib.sha256(whole(one).contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, one in sorted(tensors.items())
    }


def state_of(trainer: Any) -> dict[str, str]:
    moments, _ = trainer.backend.optimizer_state()
    return digest({**trainer.backend.model_tensors(), **moments})


def make(folder: str, backend: str = "fsdp", **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "global_batch_size": 12, "batch_size": 1, "max_steps": 4, "save_steps": 2, "save_total_limit": 1,
        "loss_fn": F.mse_loss, "learning_rate": 0.01, "save_dir": folder,
    }  # fmt: skip
    return make_trainer(backend, t16(dtype=torch.float32), rows(60, torch.float32), **{**defaults, **options})


def run(folder: str, rank: int = -1, at: int | None = None, fault: str = "kill", **options: Any) -> dict[str, Any]:
    """Train from the latest checkpoint on, with a fault of the disk of one process."""
    checkpointer._GIT_S = 60.0  # or a git that is slow would have run.json written once more, at any time
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


# --- killed, and out of space, at every operation


@pytest.fixture(scope="module", params=[WAYS, pytest.param(WAYS | MORE, marks=pytest.mark.slow)], ids=["few", "all"])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found[list[Outcome]]:
    """How each way ends if nothing happens, and what it does to the disk."""
    folder = tmp_path_factory.mktemp("undisturbed")
    cases = [case(way, way, folder=str(folder / way)) for way in request.param]
    found = play(cases, folder / "cases")
    for way in request.param:
        assert [one.code for one in found[way]] == [0, 0], [one.output for one in found[way]]
    return found


def test_what_is_written_in_the_background_is_what_a_save_that_waits_writes(undisturbed: Found[list[Outcome]]) -> None:
    pairs = [pair for pair in SAME if set(pair) <= set(undisturbed)]
    assert len(pairs) in (2, len(SAME))
    for waits, behind in pairs:
        for one, other in zip(undisturbed[waits], undisturbed[behind], strict=True):
            assert one.result["files"] == other.result["files"], (waits, behind)
            assert any("optimizer" in name or "states" in name for name in one.result["files"])


def of_first_save(noted: list[str]) -> int:
    """Return how many operations come before the first checkpoint has its name."""
    return next((k + 1 for k, one in enumerate(noted) if one.startswith("rename checkpoint-2.")), len(noted) // 2)


def points(found: Found[list[Outcome]], every: int, whole_run: bool) -> list[tuple[str, int, int]]:
    """Return way, rank and operation of each case: one of so many."""
    every_one = [
        (way, rank, k)
        for way in found
        for rank in (0, 1)
        for k in range(
            len(found[way][rank].result["noted"]) if whole_run else of_first_save(found[way][rank].result["noted"])
        )
    ]
    removals = {(way, 0): found[way][0].result["noted"].index("rmdir model") for way in ("whole", "async")}
    return [one for n, one in enumerate(every_one) if n % every == every // 2 or one[2] == removals.get(one[:2])]


def test_a_kill_of_either_process_at_every_file_operation_ends_the_other_and_costs_only_the_work_since(
    undisturbed: Found[list[Outcome]], tmp_path: Path
) -> None:
    chosen = points(undisturbed, 1 if set(MORE) <= set(undisturbed) else 37, True)
    assert chosen
    names = [f"{way}-{rank}-{k}" for way, rank, k in chosen]
    asked = [(way, name, {"folder": str(tmp_path / name)}) for (way, _, _), name in zip(chosen, names, strict=True)]
    faults = [
        case(way, name, **options, rank=rank, at=k)
        for (way, name, options), (_, rank, k) in zip(asked, chosen, strict=True)
    ]
    killed = play(faults, tmp_path / "killed")
    again = play([case(way, name, **options) for way, name, options in asked], tmp_path / "again")
    wrong = []
    for name, (way, rank, k) in zip(names, chosen, strict=True):
        what = f"{name}: {undisturbed[way][rank].result['noted'][k]}"
        one, other = killed[name][rank], killed[name][1 - rank]
        if one.code != -signal.SIGKILL or other.code != 1 or "DistributedError" not in other.output:
            wrong.append(f"{what}: ended with {one.code}, {other.code}\n{other.output[-1500:]}")
        results = [outcome.result and outcome.result["state"] for outcome in again[name]]
        if results != [undisturbed[way][0].result["state"]] * 2:
            wrong.append(f"{what}: not the same end\n{again[name][0].output[-1500:]}")
    assert not wrong, "\n".join(wrong)


def test_a_full_disk_of_either_process_at_any_operation_costs_a_checkpoint_and_not_the_run(
    undisturbed: Found[list[Outcome]], tmp_path: Path
) -> None:
    chosen = points(undisturbed, 1 if set(MORE) <= set(undisturbed) else 29, False)
    names = [f"{way}-{rank}-{k}" for way, rank, k in chosen]
    cases = [
        case(way, name, folder=str(tmp_path / name), rank=rank, at=k, fault="full")
        for (way, rank, k), name in zip(chosen, names, strict=True)
    ]
    found = play(cases, tmp_path / "full")
    wrong = []
    for name, (way, rank, k) in zip(names, chosen, strict=True):
        what, folder = f"{name}: {undisturbed[way][rank].result['noted'][k]}", tmp_path / name
        outcomes = found[name]
        if [one.result and one.result["state"] for one in outcomes] != [undisturbed[way][0].result["state"]] * 2:
            wrong.append(f"{what}: {[one.code for one in outcomes]} {''.join(one.output[-1500:] for one in outcomes)}")
            continue
        left = sorted(path.name for path in folder.iterdir() if path.name not in RECORD)
        if left != ["checkpoint-4", "last"]:
            wrong.append(f"{what}: left {left}")
        Store(folder).verify(folder / "checkpoint-4")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("way", ["parts", pytest.param("async", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_required_save_that_fails_on_one_process_ends_both_with_the_same_error(
    way: str, rank: int, undisturbed: Found[list[Outcome]], tmp_path: Path
) -> None:
    noted = undisturbed[way][rank].result["noted"]
    k = next(k for k, one in enumerate(noted) if one.startswith("create rank-"))
    failing = case(way, "run", folder=str(tmp_path / "run"), rank=rank, at=k, fault="full", save_required=True)
    found = play([failing], tmp_path / "cases")["run"]
    assert [one.code for one in found] == [1, 1], found
    for one in found:
        assert "CheckpointError: Cannot save" in one.output and "No space left" in one.output, one.output
    assert not list((tmp_path / "run").glob("checkpoint-*"))
