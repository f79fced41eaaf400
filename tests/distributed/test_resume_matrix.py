"""Train anywhere, resume anywhere: every backend goes on from every other's checkpoint, in the middle of an epoch."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import (
    BACKENDS,
    MAIN,
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
RESUMED = tuple(one for one in BACKENDS if one != "hf_zero2")  # whose checkpoints come from the same lines as zero2's
WIDTH = 128
LAYERS = 6
CHANGES = (("ddp", "native"), ("native", "ddp"), ("native", "fsdp"))
"""Saved on one number of processes, resumed on another."""

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
    alive, found = Alive(), {}
    full_tensor, read = torch.distributed.tensor.DTensor.full_tensor, tensors.TensorFile.__getitem__
    whole = tensors.whole
    patches: list[tuple[Any, str, Any]] = [
        (torch.distributed.tensor.DTensor, "full_tensor", lambda self, **rest: alive.note(full_tensor(self, **rest))),
        (tensors.TensorFile, "__getitem__", lambda self, name: alive.note(read(self, name))),
        (tensors, "whole", lambda tensor: alive.note(whole(tensor)) if tensors.is_in_parts(tensor) else whole(tensor)),
    ]
    kept = [(place, name, getattr(place, name)) for place, name, _ in patches]
    trainer.train()
    for place, name, value in patches:
        setattr(place, name, value)
    try:
        for what in ("save", "load", "save_model"):
            alive.refs, alive.most, alive.seen = [], 0, 0
            if what == "save":
                trainer.save_checkpoint()
            elif what == "load":
                trainer.load_checkpoint("last")
            else:
                trainer.save_model(f"{folder}/model")
            found[what] = [alive.most, alive.seen]
    finally:
        for place, name, value in kept:
            setattr(place, name, value)
    return found


def refuse(backend: str, checkpoint: str) -> dict[str, Any]:
    """Resume with the accumulation of the other number of processes, instead of the global batch size."""
    steps = {1: 2, 2: 4}[PROCESSES[backend]]
    return regress(backend, "float64", global_batch_size=None, gradient_accumulation_steps=steps, resume=checkpoint)


# --- what came of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """The ways from one backend to another that are asked for; and runs with dropout and random data.

    The latter are done in one piece, and resumed.
    """
    options = {
        "dtype": "float32",
        "dropout": 0.3,
        "noisy": True,
        "save_steps": 5,
        "load_best_at_end": False,
        "keep_best": 0,
    }
    before, after = [], []
    for one in sorted(asked_for(request, "backend", test="test_a_resumed_run_draws")):
        for name, cut in (("straight", 0), ("cut", 5)):
            place = str(folder / f"random-{one}-{name}")
            own = {**options, "cut": cut, "save_dir": place}
            before.append(Job(f"random-{one}-{name}", one, "backends:regress", own))
        places = {"save_dir": str(folder / f"random-{one}"), "resume": f"{place}/checkpoint-5"}
        after.append(Job(f"random-{one}", one, "backends:regress", {**options, **places}))
    for one in ("fsdp", "zero3"):
        before.append(Job(f"memory-{one}", one, f"{HERE}:watch_memory", {"folder": str(folder / f"memory-{one}")}))
    for source, target in CHANGES:
        checkpoint = str(folder / f"{source}-float64" / "checkpoint-5")
        after.append(Job(f"refused-{source}-{target}", target, f"{HERE}:refuse", {"checkpoint": checkpoint}))
    asked = asked_for(request, "source", "target")
    return resume(folder, RESUMED, before, after, [pair for pair in PAIRS if pair in asked])


PAIRS = [*itertools.product(RESUMED, RESUMED)]
ENDS = [pair for pair in PAIRS if "native" in pair]
"""From each to the native trainer, and from that to each."""
SOME = random.Random(0).sample([pair for pair in PAIRS if pair not in ENDS], 4)


@pytest.mark.parametrize(("source", "target"), thinned(PAIRS, [*ENDS, *SOME]))
def test_a_run_resumed_on_any_backend_is_the_straight_native_run(results: Any, source: str, target: str) -> None:
    found = compare_resumed(results, source, target)
    assert {name: value for name, value in found.items() if value > bound(source, target)} == {}


def test_the_straight_run_is_saved_in_the_middle_of_an_epoch_between_evaluations(results: Any, folder: Path) -> None:
    straight = results["straight-float64"][0]
    assert straight["saved"] == ["checkpoint-5", "checkpoint-10", "checkpoint-12"]
    assert [row["step"] for row in straight["metrics"]["valid"]] == [3, 6, 9, 12]
    content = json.loads((folder / "straight-float64/checkpoint-5/omnitrain.json").read_text())
    assert (content["progress"]["epoch"], content["progress"]["samples_in_epoch"]) == (1, 8)
    steps = [len(indices) for indices in indices_by_step([straight]).values()]
    assert steps == [8, 8, 8, 1] * 3


@pytest.mark.parametrize("backend", RESUMED)
def test_checkpoints_on_disk_name_the_same_tensors_as_the_native_ones(results: Any, folder: Path, backend: str) -> None:
    dtype = dtype_of(backend)
    for file in ("model.safetensors", "optimizer/state.safetensors"):
        one, native = (saved(folder / f"{name}-{dtype}" / "checkpoint-5", file) for name in (backend, "native"))
        assert gap(one, native) <= bound(backend), file
        assert {name: value.dtype for name, value in one.items()} == {k: v.dtype for k, v in native.items()}, file


@pytest.mark.parametrize("backend", thinned(RESUMED, MAIN))
def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(results: Any, backend: str) -> None:
    straight, cut, resumed = (results[f"random-{backend}{name}"] for name in ("-straight", "-cut", ""))
    for rank in range(PROCESSES[backend]):
        assert "error" not in resumed[rank], resumed[rank]
        assert max(parity([resumed[rank]], straight[rank]).values()) == 0, rank
        assert cut[rank]["indices"] + resumed[rank]["indices"] == straight[rank]["indices"], rank


@pytest.mark.parametrize(("source", "target"), CHANGES)
def test_another_number_of_processes_needs_the_global_batch_size_and_is_told_so(
    results: Any, source: str, target: str
) -> None:
    for result in results[f"refused-{source}-{target}"]:
        assert result["error"] == "CheckpointError"
        assert "global_batch_size=8 keeps it on any number of processes" in result["message"]


@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
@pytest.mark.parametrize("what", ["save", "load", "save_model"])
def test_of_a_sharded_model_one_tensor_at_a_time_is_whole(results: Any, backend: str, what: str) -> None:
    for result in results[f"memory-{backend}"]:
        assert "error" not in result, result
        most, seen = result[what]
        assert most <= 2, "the one that is written, and the next"
        if what == "save_model":
            assert seen >= LAYERS
        elif (backend, what) != ("zero3", "load"):  # which keeps weights as small as these whole
            assert seen == 0, "every rank writes and reads its own part"
