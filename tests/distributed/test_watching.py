"""Profiler, MemoryMonitor and GarbageCollection on two ranks, and what an error of memory says there."""

from __future__ import annotations

import dataclasses
import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import Job, gap, launch_all, make_trainer, sound  # noqa: E402
from recipes import rows, t16  # noqa: E402
from starving import Starving  # noqa: E402

from omnitrain import GarbageCollection, MemoryMonitor, Profiler  # noqa: E402
from omnitrain.checkpoint.tensors import whole  # noqa: E402
from omnitrain.run.shortage import shortage_of  # noqa: E402

pytestmark = pytest.mark.distributed

HERE = "test_watching"
BACKENDS = ("ddp", "fsdp", "hf2")


def train(backend: str, folder: str | None = None) -> dict[str, Any]:
    """Train 8 steps, with all that watches or with nothing."""
    watched = [Profiler(skip=2, active=2, folder=folder), MemoryMonitor(), GarbageCollection("3ba")]
    collected: list[int] = []
    dtype = torch.float32 if backend == "fsdp" else torch.float64
    trainer = make_trainer(
        backend, t16(0.2, dtype), rows(64, dtype), loss_fn=F.mse_loss, batch_size=4, epochs=1, learning_rate=0.05,
        callbacks=watched if folder else [],
    )  # fmt: skip

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 1:
            collected.append(trainer.progress.step)

    gc.callbacks.append(note)
    trainer.train()
    gc.callbacks.remove(note)
    tensors = {name: whole(one).clone() for name, one in sorted(trainer.backend.model_tensors().items())}
    return {"tensors": tensors, "collected": collected if folder else []}


def run_out(backend: str) -> dict[str, Any]:
    """Train until memory runs out in the third step, on both ranks."""
    dtype = torch.float32 if backend == "fsdp" else torch.float64
    model = Starving(room=2, start=2).to(dtype)
    trainer = make_trainer(backend, model, rows(64, dtype), loss_fn=F.mse_loss, batch_size=4)
    try:
        trainer.train()
    except torch.OutOfMemoryError as error:
        found = shortage_of(trainer, "training")
        return {"notes": "\n".join(error.__notes__), "tensors": {}, "sizes": dataclasses.asdict(found)}
    raise AssertionError("there was room")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("watching")
    jobs = [Job(f"{one} plain", one, f"{HERE}:train") for one in BACKENDS]
    jobs += [Job(f"{one} watched", one, f"{HERE}:train", {"folder": str(folder / one)}) for one in BACKENDS]
    jobs += [Job(f"{one} starved", one, f"{HERE}:run_out") for one in BACKENDS]
    found: dict[str, Any] = sound(launch_all(jobs, folder / "launch"))
    found["folder"] = folder
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_watching_changes_no_bit_and_every_rank_writes_its_trace(results: Any, backend: str) -> None:
    for plain, watched in zip(results[f"{backend} plain"], results[f"{backend} watched"], strict=True):
        assert gap(plain["tensors"], watched["tensors"]) == 0
        assert [step for step in watched["collected"] if 0 < step < 8] == [3, 6]
    traces = sorted(one.name for one in (results["folder"] / backend).iterdir())
    assert traces == ["rank0-step5.json.gz", "rank1-step5.json.gz"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_memory_counts_the_part_of_its_rank(results: Any, backend: str) -> None:
    trained = sum(one.numel() for one in Starving().parameters()) * (4 if backend == "fsdp" else 8)
    state = [found["sizes"]["state"] for found in results[f"{backend} starved"]]
    assert sum(state) == pytest.approx(2 * trained * (1 if backend == "fsdp" else 2), rel=0.1)
    for found in results[f"{backend} starved"]:
        assert "Memory ran out in training" in found["notes"]
        assert "microbatch_size=2 (instead of 4" in found["notes"]
        assert found["sizes"]["world_size"] == 2 and found["sizes"]["is_sharded"] == (backend == "fsdp")
