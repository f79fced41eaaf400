"""Train anywhere, resume anywhere: every backend resumes every other's checkpoint, in the middle of an epoch."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import (
    BACKENDS,
    PROCESSES,
    Job,
    asked_for,
    bound,
    compare_resumed,
    dtype_of,
    gap,
    indices_by_step,
    make_trainer,
    parity,
    regress,
    resume,
    saved,
)
from marks import thinned
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import TensorDataset

from omnitrain.checkpoint import tensors

HERE = "test_resume_matrix"
RING = (
    "native", "fsdp", "hf", "ddp", "accelerate", "hf2", "hf_fsdp", "zero1", "zero3", "zero2", "hf_zero3", "hf_zero2",
)  # fmt: skip
"""Each backend resumes the one before it, and the first one the last."""
PAIRS = list(itertools.product(BACKENDS, BACKENDS))
QUICK = [*zip(RING, RING[1:] + RING[:1], strict=True), ("ddp", "native"), ("native", "ddp")]
WIDTH = 128
LAYERS = 6
CHANGES = (("ddp", "native"), ("native", "ddp"), ("native", "fsdp"))
"""From one number of processes to another."""

# --- what runs on every process


class Alive:
    """Counts how many tensors of the size of a layer, put together or read from a file, are in memory at once."""

    def __init__(self) -> None:
        self.refs: list[StorageWeakRef] = []
        self.most, self.seen = 0, 0

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() >= WIDTH * WIDTH:
            self.refs = [ref for ref in self.refs if not ref.expired()]
            ref = StorageWeakRef(tensor.untyped_storage())
            self.refs += [ref] if ref.cdata not in {one.cdata for one in self.refs} else []
            self.most, self.seen = max(self.most, len(self.refs)), self.seen + 1
        return tensor


def watch_memory(backend: str, folder: str) -> dict[str, Any]:
    """Save and load a model of equal layers, and count what of it is whole on this process at a time."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    data = TensorDataset(torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    trainer = make_trainer(
        backend, model, data, loss_fn=F.mse_loss, save_dir=folder, batch_size=2, epochs=1, save_steps=10
    )
    alive, result = Alive(), {}
    full_tensor, read = torch.distributed.tensor.DTensor.full_tensor, tensors.TensorFile.__getitem__
    whole = tensors.whole
    patches: list[tuple[Any, str, Any]] = [
        (torch.distributed.tensor.DTensor, "full_tensor", lambda self, **rest: alive.note(full_tensor(self, **rest))),
        (tensors.TensorFile, "__getitem__", lambda self, name: alive.note(read(self, name))),
        (tensors, "whole", lambda tensor: alive.note(whole(tensor)) if tensors.is_in_parts(tensor) else whole(tensor)),
    ]
    trainer.train()
    calls = {
        "save": trainer.save_checkpoint,
        "load": lambda: trainer.load_checkpoint("last"),
        "save_model": lambda: trainer.save_model(f"{folder}/model"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in patches:
            patch.setattr(owner, name, value)
        for what, call in calls.items():
            alive.refs, alive.most, alive.seen = [], 0, 0
            call()
            result[what] = [alive.most, alive.seen]
    return result


def resume_steps(backend: str, checkpoint: str) -> dict[str, Any]:
    """Resume with the accumulation of the other number of processes, instead of the global batch size."""
    steps = {1: 2, 2: 4}[PROCESSES[backend]]
    return regress(backend, "float64", global_batch_size=None, gradient_accumulation_steps=steps, resume=checkpoint)


# --- what came of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """The pairs of backends that are asked for; and runs with dropout and random data, straight and resumed."""
    noisy = {"dtype": "float32", "dropout": 0.3, "noisy": True}
    noisy |= {"save_steps": 5, "load_best_at_end": False, "keep_best": 0}
    before, after = [], []
    for backend in sorted(asked_for(request, "backend", test="test_random")):
        name = f"random-{backend}"
        for run, cut in (("straight", 0), ("cut", 5)):
            options = {**noisy, "cut": cut, "save_dir": str(folder / f"{name}-{run}")}
            before.append(Job(f"{name}-{run}", backend, "backends:regress", options))
        options = {**noisy, "save_dir": str(folder / name), "resume": str(folder / f"{name}-cut" / "checkpoint-5")}
        after.append(Job(name, backend, "backends:regress", options))
    for backend in sorted({backend for backend, _ in asked_for(request, "backend", "what")}):
        name = f"memory-{backend}"
        before.append(Job(name, backend, f"{HERE}:watch_memory", {"folder": str(folder / name)}))
    for source, target in CHANGES:
        checkpoint = str(folder / f"{source}-float64" / "checkpoint-5")
        after.append(Job(f"steps-{source}-{target}", target, f"{HERE}:resume_steps", {"checkpoint": checkpoint}))
    asked = asked_for(request, "source", "target")
    backends = {"native", "ddp"} | {backend for pair in asked for backend in pair}
    backends |= asked_for(request, "backend", test="test_checkpoints")
    return resume(folder, sorted(backends), before, after, [pair for pair in PAIRS if pair in asked])


@pytest.mark.parametrize(("source", "target"), thinned(PAIRS, QUICK))
def test_resumed_run_matches_straight_native_run(results: Any, source: str, target: str) -> None:
    found = compare_resumed(results, source, target)
    assert {name: value for name, value in found.items() if value > bound(source, target)} == {}


def test_straight_run_saves_in_mid_epoch(results: Any, folder: Path) -> None:
    """And between evaluations."""
    (straight,) = results["straight-float64"]
    assert straight["saved"] == ["checkpoint-5", "checkpoint-10", "checkpoint-12"]
    assert [row["step"] for row in straight["metrics"]["valid"]] == [3, 6, 9, 12]
    content = json.loads((folder / "straight-float64/checkpoint-5/omnitrain.json").read_text())
    assert (content["progress"]["epoch"], content["progress"]["samples_in_epoch"]) == (1, 8)
    steps = [len(indices) for indices in indices_by_step([straight]).values()]
    assert steps == [8, 8, 8, 1] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_have_the_tensors_of_native_ones(results: Any, folder: Path, backend: str) -> None:
    dtype = dtype_of(backend)
    for file in ("model.safetensors", "optimizer/state.safetensors"):
        tensors, native = (saved(folder / f"{name}-{dtype}" / "checkpoint-5", file) for name in (backend, "native"))
        assert gap(tensors, native) <= bound(backend), file
        assert {name: one.dtype for name, one in tensors.items()} == {name: one.dtype for name, one in native.items()}


@pytest.mark.parametrize("backend", thinned(BACKENDS, ("native", "ddp")))
def test_random_numbers_of_a_resumed_run_continue(results: Any, backend: str) -> None:
    straight, cut, resumed = (results[f"random-{backend}{run}"] for run in ("-straight", "-cut", ""))
    for rank in range(PROCESSES[backend]):
        assert "error" not in resumed[rank], resumed[rank]
        assert max(parity([resumed[rank]], straight[rank]).values()) == 0, rank
        assert cut[rank]["indices"] + resumed[rank]["indices"] == straight[rank]["indices"], rank


@pytest.mark.parametrize(("source", "target"), CHANGES)
def test_other_number_of_processes_needs_global_batch_size(results: Any, source: str, target: str) -> None:
    for rank in results[f"steps-{source}-{target}"]:
        assert rank["error"] == "CheckpointError"
        assert "global_batch_size=8 keeps it on any number of processes" in rank["message"]


@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
@pytest.mark.parametrize("what", ["save", "load", "save_model"])
def test_sharded_tensors_are_gathered_one_at_a_time(results: Any, backend: str, what: str) -> None:
    for rank in results[f"memory-{backend}"]:
        assert "error" not in rank, rank
        most, seen = rank[what]
        assert most <= 2, "the one that is written, and the next"
        if what == "save_model":
            assert seen >= LAYERS
        elif (backend, what) != ("zero3", "load"):  # which keeps weights as small as these in full
            assert seen == 0, "every rank writes and reads its part"
