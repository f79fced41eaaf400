"""Peak memory of sharded state: starting, saving and loading hold a few tensors at a time."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Job, asked_for, launch_all, make_trainer, sound
from marks import thinned
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain.checkpoint.store import Store

HERE = "test_peak_memory"
LAYERS = {8: 6, 1024: 6, 1536: 6, 3072: 8}
"""How many matrices a model has, by their width; those of width 8 show only that all works."""
PARTS = {"fsdp": 1, "zero3": 3}
"""How often each rank has its part before the first step: DeepSpeed takes that of a copy and of the gradients too."""
needs_rss = pytest.mark.skipif(
    not Path("/proc/self/status").exists() or "RssAnon" not in Path("/proc/self/status").read_text(),
    reason="this system does not say how much memory a process holds",
)


def tensor_size(width: int) -> float:
    """Return the MiB of the largest tensor."""
    return width * width * 4 / 2**20


def anonymous() -> float:
    """Return the MiB of memory that this process holds, without the pages of files that it has mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def growth(work: Callable[[], Any]) -> float:
    """Return by how many MiB this process's memory grew at most while `work` ran."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: give large blocks back as soon as they are free
    gc.collect()
    before = most = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return most - before


def deep(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS[width])))


def make(backend: str, width: int, empty: bool = False, **options: Any) -> Any:
    with torch.device("meta" if empty else "cpu"):
        model = deep(width)
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(0))
    return make_trainer(backend, model, TensorDataset(x, x), loss_fn=F.mse_loss, batch_size=4, epochs=1, **options)


def make_into(trainers: list[Any], *args: Any, **options: Any) -> None:
    trainers.append(make(*args, **options))


def optimizers_with_state() -> int:
    gc.collect()
    return sum(type(one) is torch.optim.AdamW and len(one.state) > 0 for one in gc.get_objects())


def measure(backend: str, folder: str, widths: list[int]) -> dict[str, Any]:
    """Train a step, save and load; first with a small model, which loads the code."""
    result: dict[str, Any] = {}
    for width in widths:
        trainer = make(backend, width, save_dir=f"{folder}/{width}", save_steps=1000)
        trainer.train()
        before = optimizers_with_state()
        trainer.train(more="1ba")
        result["optimizers"] = optimizers_with_state() - before
        result["save"] = growth(trainer.save_checkpoint)
        result["load"] = growth(functools.partial(trainer.load_checkpoint, "last"))
        result["save_model"] = growth(functools.partial(trainer.save_model, f"{folder}/{width}-model"))
    return result


def start(backend: str, folder: str, widths: list[int]) -> dict[str, Any]:
    """Make models that only the main rank has, or that a file has, or nobody; first small ones."""
    result: dict[str, Any] = {}
    for width in widths:
        for source, empty in {"main": [1], "file": [0, 1], "initializers": [0, 1]}.items():
            options = {"init_from": f"{folder}/{width}.safetensors"} if source == "file" else {}
            trainers: list[Any] = []
            is_empty = int(os.environ["RANK"]) in empty
            result[source] = growth(functools.partial(make_into, trainers, backend, width, is_empty, **options))
            trainers.pop().backend.release()
            gc.collect()
    return result


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    jobs = []
    for backend, width in sorted(asked_for(request, "backend", "width")):
        name = f"measure-{backend}-{width}"
        options = {"folder": str(folder / name), "widths": [8, width]}
        jobs.append(Job(name, backend, f"{HERE}:measure", options))
    for backend in sorted(asked_for(request, "backend", test="test_start")):
        for width in (8, 3072):
            save_file(deep(width).state_dict(), folder / f"{width}.safetensors")
        jobs.append(Job(f"start-{backend}", backend, f"{HERE}:start", {"folder": str(folder), "widths": [8, 3072]}))
    return sound(launch_all(jobs, folder / "launch"))


WIDTHS = thinned([("fsdp", 1024), ("fsdp", 1536), ("zero3", 1536)], [("fsdp", 1024)])


@needs_rss
@pytest.mark.parametrize(("backend", "width"), WIDTHS)
def test_checkpoints_hold_few_tensors_at_a_time(results: Any, folder: Path, backend: str, width: int) -> None:
    everything = 3 * LAYERS[width] * tensor_size(width)
    for rank, result in enumerate(results[f"measure-{backend}-{width}"]):
        for what in ("save", "load", "save_model"):
            assert result[what] < 5 * tensor_size(width) < everything / 3, f"{what}: {result[what]:.0f} on rank {rank}"
    content = Store(folder / f"measure-{backend}-{width}" / f"{width}").resolve("last")[1]
    size = sum(entry["size"] for name, entry in content["files"].items() if not name.startswith("rng"))
    assert size > everything * 2**20


@pytest.mark.parametrize(("backend", "width"), WIDTHS)
def test_continued_run_holds_moments_once(results: Any, backend: str, width: int) -> None:
    assert [result["optimizers"] for result in results[f"measure-{backend}-{width}"]] == [0, 0]


@needs_rss
@pytest.mark.slow
@pytest.mark.parametrize("backend", PARTS)
def test_start_holds_full_model_only_where_it_was_made(results: Any, backend: str) -> None:
    """The quick cases are in test_start.py."""
    matrix = tensor_size(3072)
    everything = LAYERS[3072] * matrix
    for rank, result in enumerate(results[f"start-{backend}"]):
        for source, grown in result.items():
            most = PARTS[backend] * everything / 2 + (3 if backend == "fsdp" else 5) * matrix
            if source == "main" and rank == 0:
                assert grown < most + everything
            else:
                assert grown < most < PARTS[backend] * everything / 2 + everything, f"{source}: {grown:.0f} MiB, {rank}"
