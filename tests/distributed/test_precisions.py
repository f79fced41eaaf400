"""Precisions on two processes: fp16 loss scales, dtypes of gradient reductions, fp8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import eighths
import pytest
import torch
import torch.nn.functional as F
from backends import PROCESSES, Job, asked_for, launch_all, make_trainer, tensors_of
from marks import thinned
from recipes import Overflowing, StopAt, Trace, rows, t16
from torch import nn

from omnitrain import Callback
from omnitrain.compute.precision import Precision

HERE = "test_precisions"
SCALE = (1024.0, 1e-4, 3)


def scaled(backend: str, folder: str, cut: int = 0, resume: str | None = None, **options: Any) -> dict[str, Any]:
    """Take 9 steps under fp16, before the fourth of which one overflows; on a CPU, where fp16 is not supported."""
    from deepspeed.accelerator import get_accelerator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Precision, "parse", classmethod(lambda cls, name, device, *rest: cls(name, device.type)))
        patch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
        trace = Trace()
        trainer = make_trainer(
            backend, Overflowing(at=() if resume else (4,)), rows(40, torch.float32), loss_fn=F.mse_loss,
            batch_size=4 // PROCESSES[backend], max_steps=9, autocast="fp16", learning_rate=0.01, save_dir=folder,
            callbacks=[trace, StopAt(cut)], **{"fp16_loss_scale": SCALE, **options},
        )  # fmt: skip
        trainer.train(resume_from=resume)
    return {
        "scales": [row["loss_scale"] for row in trace.logs],
        "skipped": trainer.progress.skipped_steps,
        "tensors": tensors_of(trainer),
    }


class Rounded(Callback):
    """Collects which share of the gradients bf16 can represent."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def on_before_optimizer_step(self, trainer: Any) -> None:
        gradients = [one.grad for one in trainer.model.parameters() if one.grad is not None]
        parts = [trainer.backend.local_shard(one).float() for one in gradients]
        shares = [(part == part.bfloat16().float()).float().mean().item() for part in parts if part.numel()]
        self.shares.append(sum(shares) / len(shares))


def summed(backend: str, **options: Any) -> dict[str, Any]:
    """Take 3 steps, with gradients of two processes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2), nn.Linear(2, 1))
    rounded = Rounded()
    trainer = make_trainer(
        backend, model, rows(24, torch.float32), loss_fn=F.mse_loss, batch_size=4, epochs=1, learning_rate=0.01,
        max_grad_norm=None, callbacks=[] if backend.startswith("zero") else [rounded], **options,
    )  # fmt: skip
    trainer.train()
    return {
        "shares": rounded.shares,
        "sent": str(getattr(trainer.model_wrapped, "communication_data_type", "")),
        "tensors": tensors_of(trainer),
    }


SUMS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "bf16": {"dtypes": {"reductions": "bf16"}},
    "fp32": {"dtypes": {"reductions": "fp32"}, "autocast": "bf16"},
    "fp32 of bf16": {"dtypes": {"reductions": "fp32", "parameters": "bf16", "inputs": "bf16"}},
}


def in_eighths(backend: str) -> dict[str, Any]:
    """Take 3 steps in fp8."""
    with pytest.MonkeyPatch.context() as patch:
        eighths.install(patch)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        trainer = make_trainer(
            backend, model, rows(24, torch.float32), loss_fn=F.mse_loss, batch_size=8 // PROCESSES[backend], epochs=1,
            learning_rate=0.01, autocast="fp8",
        )  # fmt: skip
        trainer.train()
    kinds = [type(layer).__name__ for layer in trainer.get_model().children()]
    return {"kinds": kinds, "tensors": tensors_of(trainer)}


def plugin_offloads(backend: str) -> dict[str, Any]:
    """Train under FSDP with its weights in host memory."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)
    make_trainer(backend, t16(), rows(8), loss_fn=F.mse_loss, max_steps=1, fsdp_plugin=plugin).train()
    return {}


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    jobs = []

    def add(backend: str, name: str, function: str, **options: Any) -> None:
        jobs.append(Job(f"{backend}-{name}", backend, f"{HERE}:{function}", options))

    for backend in sorted(asked_for(request, "backend", test="test_loss_scale")):
        place = folder / backend
        add(backend, "straight", "scaled", folder=str(place / "straight"))
        add(backend, "cut", "scaled", folder=str(place / "cut"), cut=4)
        add(backend, "resumed", "scaled", folder=str(place), resume=str(place / "cut" / "checkpoint-4"))
        add(backend, "sinking", "scaled", folder=str(place / "sinking"), fp16_loss_scale=(8.0, 8.0))
    for backend in sorted(asked_for(request, "backend", test="test_gradients")):
        for name, options in SUMS.items():
            add(backend, name, "summed", **options)
    for backend in sorted(asked_for(request, "backend", test="test_fp8")):
        add(backend, "fp8", "in_eighths")
    add("fsdp", "plugin", "plugin_offloads")
    return launch_all(jobs, folder / "launches")


def tensor_gap(one: Any, other: Any) -> float:
    return max(
        float((one["tensors"][name].float() - other["tensors"][name].float()).abs().max()) for name in one["tensors"]
    )


@pytest.mark.parametrize("backend", thinned(["ddp", "fsdp", "zero2", "hf2"], ["fsdp", "zero2"]))
def test_gradients_are_summed_in_the_given_dtype(results: Any, backend: str) -> None:
    found = {name: results[f"{backend}-{name}"] for name in SUMS}
    errors = found.pop("fp32 of bf16") if backend == "zero2" else []
    assert all(rank["error"] == "ConfigError" and "updates a copy in fp32" in rank["message"] for rank in errors)
    assert not [rank["message"] for ranks in found.values() for rank in ranks if "error" in rank]
    for first, second in found.values():
        assert tensor_gap(first, second) == 0.0
    (plain, _), (low, _), (high, _) = (found[name] for name in ("as they are", "bf16", "fp32"))
    assert 1e-7 < tensor_gap(plain, low) < 1e-2
    if backend == "zero2":
        assert (low["sent"], high["sent"]) == ("torch.bfloat16", "torch.float32")
        return
    assert min(low["shares"]) == 1.0 and max(plain["shares"] + high["shares"]) < 0.9
    assert found["fp32 of bf16"][0]["tensors"]["0.weight"].dtype is torch.bfloat16


@pytest.mark.parametrize("backend", thinned(["zero2", "zero3"], ["zero2"]))
def test_loss_scale_of_zero_follows_its_settings(results: Any, backend: str) -> None:
    """Over a resume too."""
    runs = ("straight", "resumed", "sinking")
    (straight, _), (resumed, _), sinking = (results[f"{backend}-{run}"] for run in runs)
    # DeepSpeed doubles in the step after the window
    assert straight["scales"] == [1024] * 3 + [512] * 3 + [1024] * 3
    assert straight["skipped"] == 1
    assert resumed["scales"] == straight["scales"][4:]
    assert all(torch.equal(one, straight["tensors"][name]) for name, one in resumed["tensors"].items())
    for rank in sinking:
        assert rank["error"] == "NonFiniteError" and "fell to 4, below its minimum 8" in rank["message"]


def test_fsdp_cpu_offload_is_an_error_without_gpu(results: Any) -> None:
    for rank in results["fsdp-plugin"]:
        assert rank["error"] == "ConfigError" and "`cpu_offload`" in rank["message"]


@pytest.mark.parametrize("backend", thinned(["ddp", "fsdp", "zero2"], ["fsdp", "zero2"]))
def test_fp8_layers_match_native_or_are_an_error(results: Any, backend: str) -> None:
    first, second = results[f"{backend}-fp8"]
    if backend == "zero2":
        assert first["error"] == "ConfigError" and "does not work with DeepSpeed ZeRO" in first["message"]
        return
    assert "error" not in first, first
    assert any("Float8Linear" in kind for kind in first["kinds"]) and tensor_gap(first, second) == 0.0
    assert tensor_gap(first, in_eighths("native")) < 1e-2
