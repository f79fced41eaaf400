"""Train anywhere, resume anywhere: backends resume the checkpoints of others, in the middle of an epoch, and parts."""

import json
from pathlib import Path
from typing import Any

import backends as on
import pytest
import torch
import torch.nn.functional as F
from backends import BACKENDS, PROCESSES, Jobs, asked_for, bound, dtype_of, gap, named
from marks import thinned
from recipes import fit, rows
from torch import nn

from omnitrain.checkpoint.tensor_files import gather_to_host

PAIRS = [
    ("native", "fsdp"), ("native", "ddp"), ("ddp", "native"), ("hf", "ddp"), ("fsdp", "hf"), ("accelerate", "hf2"),
    ("zero3", "zero2"),
]  # fmt: skip
MORE_PAIRS = [(source, BACKENDS[(number + step) % 12]) for step in (0, 5) for number, source in enumerate(BACKENDS)]
"""Each backend with itself and another one; `benchmarks/parity.py` has all pairs."""
SAVED = ("accelerate", "hf", "ddp", "fsdp", "zero3", "zero1", "hf_fsdp", "hf_zero2")
RANDOM = ("ddp", "native", "fsdp", "hf2", "zero2", "zero3", "hf_fsdp")
CHANGES = (("ddp", "native"), ("native", "ddp"))
"""From one number of processes to another."""


def resume_steps(backend: str, checkpoint: str) -> dict[str, Any]:
    """Resume with the accumulation of the other number of processes, instead of the global batch size."""
    steps = {1: 2, 2: 4}[PROCESSES[backend]]
    return on.regress(backend, "float64", global_batch_size=None, gradient_accumulation_steps=steps, resume=checkpoint)


IN_PARTS = {"stage3_param_persistence_threshold": 0}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
PARTS: dict[str, dict[str, Any]] = {
    "zero1": {}, "zero2": {"autocast": "bf16"}, "zero3": {"zero": IN_PARTS}, "fsdp": {},
    "zero3-bf16": {"zero": IN_PARTS, "autocast": "bf16"}, "zero3-persistent": {"autocast": "bf16"},
    "zero3-offloaded": {"zero": {**IN_PARTS, **OFFLOADED, "offload_param": {"device": "cpu"}}, "last": ()},
    "zero2-offloaded": {"zero": OFFLOADED}, "zero1-empty": {"last": (0, 4)}, "zero3-number": {"last": ()},
}  # fmt: skip


class Odd(nn.Module):
    """Layers of odd sizes, a buffer, a parameter of one number, fewer than there are ranks, and one of a shape."""

    def __init__(self, last: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 7), nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.zeros(3))
        self.rest = nn.ParameterDict({"last": torch.ones(last)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.rest["last"]
        return self.last(torch.tanh(self.first(self.frozen(x)))) * self.scale * (last.mean() if last.numel() else 1)


def resume_parts(backend: str, kind: str, folder: str) -> dict[str, Any]:
    options = {"last": (1,), **PARTS[kind]}
    last, zero = options.pop("last"), options.pop("zero", {})
    if backend == "native":
        options = {}
    elif backend.startswith("zero"):
        config = {"zero_optimization": {"stage": int(backend[-1]), **zero}, "zero_force_ds_cpu_optimizer": False}
        options["deepspeed_config"] = config
    tensors: dict[str, torch.Tensor] = {}
    for name, epochs in (("straight", 2), ("resumed", 1), ("resumed", 2)):
        trainer = fit(on.make_trainer(
            backend, Odd(last), rows(16, torch.float32), loss_fn=F.mse_loss, batch_size=8 // PROCESSES[backend],
            epochs=epochs, learning_rate=0.01, max_grad_norm=0.1, optimizer="adamw", freeze=[r"^frozen\."],
            param_groups=[{"match": "bias", "weight_decay": 0.0}], save_dir=f"{folder}/{name}", consolidate=False,
            **options,
        ), resume_from="auto")  # fmt: skip
        moments, _ = trainer.backend.optimizer_state()
        parts = {**trainer.backend.model_tensors(), **moments}
        tensors |= {f"{name}/{key}": gather_to_host(part) for key, part in parts.items()}
    return {"tensors": tensors}


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """The pairs of backends that are asked for; and runs with dropout and random data, straight and resumed."""
    before, after = Jobs(), Jobs()
    for backend in sorted(asked_for(request, "backend", test="test_random")):
        name = f"random-{backend}"
        noisy: dict[str, Any] = {"dtype": "float32", "dropout": 0.3, "noisy": True, "save_dir": str(folder / name)}
        noisy |= {"save_steps": 5, "load_best_at_end": False, "keep_best": 0}
        before.add(f"{name}-cut", backend, on.regress, cut=5, **noisy)
        before.add(f"{name}-straight", backend, on.regress, **{**noisy, "save_dir": f"{noisy['save_dir']}-straight"})
        after.add(name, backend, on.regress, resume="auto", **noisy)
    for kind in sorted(asked_for(request, "kind")):
        for backend in (kind.partition("-")[0], "native"):
            name = f"parts-{kind}-on-{backend}"
            before.add(name, backend, resume_parts, kind=kind, folder=str(folder / name))
    for source, target in sorted(asked_for(request, "saved_on", "resumed_on")):
        checkpoint = str(folder / f"{source}-float64" / "checkpoint-5")
        after.add(f"steps-{source}-{target}", target, resume_steps, checkpoint=checkpoint)
    pairs = asked_for(request, "source", "target") | {("native", "ddp"), ("ddp", "native")}
    sources = asked_for(request, "backend", test="test_checkpoints")
    return on.resume(folder, sorted(sources), before, after, sorted(pairs))


@pytest.mark.parametrize(("source", "target"), thinned(dict.fromkeys([*PAIRS, *MORE_PAIRS]), PAIRS))
def test_resumed_run_matches_straight_native_run(results: Any, source: str, target: str) -> None:
    assert max(on.compare_resumed(results, source, target).values()) <= bound(source, target)


def test_straight_run_saves_in_mid_epoch(results: Any, folder: Path) -> None:
    (straight,) = results["straight-float64"]
    assert straight["saved"] == ["checkpoint-5", "checkpoint-10", "checkpoint-12"]
    assert [row["step"] for row in straight["metrics"]["valid"]] == [3, 6, 9, 12]
    content = json.loads((folder / "straight-float64/checkpoint-5/omnitrain.json").read_text())
    assert (content["progress"]["epoch"], content["progress"]["samples_in_epoch"]) == (1, 8)
    steps = [len(indices) for indices in on.indices_by_step([straight]).values()]
    assert steps == [8, 8, 8, 1] * 3


@pytest.mark.parametrize("backend", thinned(SAVED, SAVED[:5]))
def test_checkpoints_have_the_tensors_of_native_ones(results: Any, folder: Path, backend: str) -> None:
    runs = [folder / f"{name}-{dtype_of(backend)}" / "checkpoint-5" for name in (backend, "native")]
    for file in ("model.safetensors", "optimizer/state.safetensors"):
        tensors, native = (on.saved(run, file) for run in runs)
        assert gap(tensors, native) <= bound(backend), file
        assert [tensors[name].dtype for name in native] == [tensor.dtype for tensor in native.values()]


@pytest.mark.parametrize("backend", thinned(RANDOM, RANDOM[:1]))
def test_random_numbers_of_a_resumed_run_continue(results: Any, backend: str) -> None:
    runs = (results[f"random-{backend}{run}"] for run in ("-straight", "-cut", ""))
    for straight, cut, resumed in zip(*runs, strict=True):
        assert max(on.parity([resumed], straight).values()) == 0
        assert cut["indices"] + resumed["indices"] == straight["indices"]


@pytest.mark.parametrize(("saved_on", "resumed_on"), CHANGES)
def test_other_number_of_processes_needs_global_batch_size(results: Any, saved_on: str, resumed_on: str) -> None:
    for rank in results[f"steps-{saved_on}-{resumed_on}"]:
        assert rank["error"] == "CheckpointError"
        assert "global_batch_size=8 keeps it on any number of processes" in rank["message"]


@pytest.mark.parametrize("kind", thinned(PARTS, ("zero2", "zero3-offloaded")))
def test_parts_of_tensors_resume_to_the_bit(results: Any, kind: str) -> None:
    """With clipped gradients, and the steps of one process."""
    expected = named(results[f"parts-{kind}-on-native"][0], "straight/")
    for rank in results[f"parts-{kind}-on-{kind.partition('-')[0]}"]:
        assert "error" not in rank, rank
        straight, resumed = named(rank, "straight/"), named(rank, "resumed/")
        assert straight["straight/rest.last"].shape == PARTS[kind].get("last", (1,))
        assert {"straight/frozen.weight", "straight/scale", "straight/first.weight/exp_avg"} <= straight.keys()
        assert gap({name.replace("straight", "resumed"): tensor for name, tensor in straight.items()}, resumed) == 0
        if "autocast" not in PARTS[kind]:
            # ZeRO has moments of an empty parameter, which gets no gradient, too
            assert gap({name: straight[name] for name in expected}, expected) < 1e-5
