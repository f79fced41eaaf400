"""Train anywhere, resume anywhere: every backend resumes every other's checkpoint, in the middle of an epoch."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
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
    parity,
    regress,
    resume,
    saved,
)
from marks import thinned

HERE = "test_resume_matrix"
PAIRS = list(itertools.product(BACKENDS, BACKENDS))
QUICK = [
    ("native", "fsdp"), ("native", "ddp"), ("ddp", "native"), ("hf", "ddp"), ("fsdp", "hf"), ("accelerate", "hf2"),
    ("zero3", "zero2"),
]  # fmt: skip
CHANGES = (("ddp", "native"), ("native", "ddp"), ("native", "fsdp"))
"""From one number of processes to another."""

# --- what runs on every process


def resume_steps(backend: str, checkpoint: str) -> dict[str, Any]:
    """Resume with the accumulation of the other number of processes, instead of the global batch size."""
    steps = {1: 2, 2: 4}[PROCESSES[backend]]
    return regress(backend, "float64", global_batch_size=None, gradient_accumulation_steps=steps, resume=checkpoint)


# --- what came of it


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
    for source, target in sorted(asked_for(request, "saved_on", "resumed_on")):
        checkpoint = str(folder / f"{source}-float64" / "checkpoint-5")
        after.append(Job(f"steps-{source}-{target}", target, f"{HERE}:resume_steps", {"checkpoint": checkpoint}))
    pairs = asked_for(request, "source", "target") | {("native", "ddp"), ("ddp", "native")}
    sources = asked_for(request, "backend", test="test_checkpoints")
    return resume(folder, sorted(sources), before, after, sorted(pairs))


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


@pytest.mark.parametrize("backend", thinned(BACKENDS[1:], ("accelerate", "hf", "ddp", "fsdp", "zero3")))
def test_checkpoints_have_the_tensors_of_native_ones(results: Any, folder: Path, backend: str) -> None:
    dtype = dtype_of(backend)
    for file in ("model.safetensors", "optimizer/state.safetensors"):
        tensors, native = (saved(folder / f"{name}-{dtype}" / "checkpoint-5", file) for name in (backend, "native"))
        assert gap(tensors, native) <= bound(backend), file
        assert {name: one.dtype for name, one in tensors.items()} == {name: one.dtype for name, one in native.items()}


@pytest.mark.parametrize("backend", thinned(BACKENDS, ("ddp",)))
def test_random_numbers_of_a_resumed_run_continue(results: Any, backend: str) -> None:
    straight, cut, resumed = (results[f"random-{backend}{run}"] for run in ("-straight", "-cut", ""))
    for rank in range(PROCESSES[backend]):
        assert "error" not in resumed[rank], resumed[rank]
        assert max(parity([resumed[rank]], straight[rank]).values()) == 0, rank
        assert cut[rank]["indices"] + resumed[rank]["indices"] == straight[rank]["indices"], rank


@pytest.mark.parametrize(("saved_on", "resumed_on"), thinned(CHANGES, CHANGES[:2]))
def test_other_number_of_processes_needs_global_batch_size(results: Any, saved_on: str, resumed_on: str) -> None:
    for rank in results[f"steps-{saved_on}-{resumed_on}"]:
        assert rank["error"] == "CheckpointError"
        assert "global_batch_size=8 keeps it on any number of processes" in rank["message"]
