"""State that lies in parts is never put together whole in one process: saving and loading take a tensor at a time."""

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
from backends import Job, launch_all, make_trainer
from safetensors.torch import save_file
from torch import nn

from omnitrain.checkpoint.store import Store

HERE = "test_peak_memory"
LAYERS, WIDTH = 6, 1536
TENSOR = WIDTH * WIDTH * 4 / 2**20
"""MiB of the largest tensor, of which there are LAYERS, with two moments each."""


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
        while not done.wait(0.0005):
            most = max(most, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return most - before


def optimizers_with_state() -> int:
    gc.collect()
    return sum(type(one) is torch.optim.AdamW and len(one.state) > 0 for one in gc.get_objects())


def measure(backend: str, folder: str) -> dict[str, Any]:
    """Train a step, save and load; first with a small model, which brings in the code that it takes."""
    found: dict[str, Any] = {}
    for width, name in ((8, "small"), (WIDTH, "large")):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        x = torch.randn(8, width)
        trainer = make_trainer(
            backend, model, torch.utils.data.TensorDataset(x, x), loss_fn=F.mse_loss, batch_size=4, epochs=1,
            save_dir=Path(folder, name), save_steps=1000,
        )  # fmt: skip
        del model
        trainer.train()
        before = optimizers_with_state()
        trainer.train(more="1ba")
        found["optimizers"] = optimizers_with_state() - before
        found["save"] = growth(trainer.save_checkpoint)
        found["load"] = growth(lambda trainer=trainer: trainer.load_checkpoint("last"))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peaks")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    if "RssAnon" not in Path("/proc/self/status").read_text():
        pytest.skip("this system does not say how much memory a process holds")
    jobs = [Job(one, one, f"{HERE}:measure", {"folder": str(folder / one)}) for one in ("fsdp", "zero3")]
    return launch_all(jobs, folder)


@pytest.mark.parametrize("what", ["save", "load"])
@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_no_process_holds_more_than_a_few_tensors_at_a_time(results: Any, backend: str, what: str) -> None:
    whole = 3 * LAYERS * TENSOR
    for rank, result in enumerate(results[backend]):
        assert "error" not in result, result
        assert result[what] < 5 * TENSOR < whole / 3, f"{result[what]:.0f} MiB of {whole:.0f} on rank {rank}"


@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_a_run_that_goes_on_holds_the_moments_once(results: Any, backend: str) -> None:
    assert [result["optimizers"] for result in results[backend]] == [0, 0]


def test_it_is_all_of_it_that_was_saved(results: Any, folder: Path) -> None:
    for backend in results:
        _, content = Store(folder / backend / "large").resolve("last") or (None, {})
        size = sum(entry["size"] for name, entry in content["files"].items() if not name.startswith("rng"))
        assert size > 3 * LAYERS * TENSOR * 2**20


# --- the start

DEEP, BROAD = 8, 3072
MATRIX = BROAD * BROAD * 4 / 2**20
"""MiB of the largest tensor of a model that begins, of which there are DEEP."""
PARTS = {"fsdp": 1, "zero3": 3}
"""How often each rank has its part before the first step: DeepSpeed takes that of a copy and of the gradients too."""


def deep(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(DEEP)))


def _make(made: list[Any], backend: str, width: int, empty: list[int], options: dict[str, Any]) -> None:
    with torch.device("meta" if int(os.environ["RANK"]) in empty else "cpu"):
        model = deep(width)
    x = torch.randn(8, width)
    data = torch.utils.data.TensorDataset(x, x)
    made.append(make_trainer(backend, model, data, loss_fn=F.mse_loss, batch_size=4, **options))


def begin(backend: str, folder: str) -> dict[str, Any]:
    """Make models of 300 MiB on the main rank alone, or on none; first small ones."""
    found: dict[str, Any] = {}
    for width in (8, BROAD):
        for place, empty in {"main": [1], "file": [0, 1], "own": [0, 1]}.items():
            options = {"init_from": f"{folder}/{width}.safetensors"} if place == "file" else {}
            made: list[Any] = []
            found[place] = growth(functools.partial(_make, made, backend, width, empty, options))
            made.pop().backend.release()
            gc.collect()
    return found


@pytest.fixture(scope="module")
def begun(folder: Path) -> dict[str, list[dict[str, Any]]]:
    if "RssAnon" not in Path("/proc/self/status").read_text():
        pytest.skip("this system does not say how much memory a process holds")
    for width in (8, BROAD):
        save_file(deep(width).state_dict(), folder / f"{width}.safetensors")
    jobs = [Job(f"begin {one}", one, f"{HERE}:begin", {"folder": str(folder)}) for one in PARTS]
    return launch_all(jobs, folder / "begun")


@pytest.mark.slow
@pytest.mark.parametrize("backend", PARTS)
def test_no_process_but_the_one_that_has_it_holds_the_model_whole_at_the_start(begun: Any, backend: str) -> None:
    whole = DEEP * MATRIX
    for rank, result in enumerate(begun[f"begin {backend}"]):
        assert "error" not in result, result
        for place, grown in result.items():
            most = PARTS[backend] * whole / 2 + (3 if backend == "fsdp" else 5) * MATRIX
            if place == "main" and rank == 0:
                assert grown < most + whole
            else:
                assert grown < most < PARTS[backend] * whole / 2 + whole, f"{place}: {grown:.0f} MiB on rank {rank}"
