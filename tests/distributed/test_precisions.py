"""Precisions on two processes: what trains or is rejected, fp16 loss scales, dtypes of gradient reductions, fp8."""

import math
import re
from pathlib import Path
from typing import Any

import eighths
import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import FullyShardedDataParallelPlugin
from backends import PROCESSES, Jobs, asked_for, gap, launch_all, make_trainer, tensors_of
from marks import thinned
from recipes import Overflowing, StopAt, Trace, callback, rows
from torch import nn

from omnitrain.compute.precision import Precision

SCALE = (1024.0, 1e-4, 3)
FP32, FP64 = torch.float32, torch.float64


# --- kinds of models with each argument


class Island(nn.Module):
    """Computes in fp32 in a region without autocast, as losses and norms of models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return x + F.linear(x.float(), self.layer.weight.float(), self.layer.bias.float())


class Scaled(nn.Module):
    """Multiplies by a buffer of fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((8,), 0.5, dtype=FP64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.to(x.dtype)


def network(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Linear(8, 1))


KINDS: dict[str, Any] = {
    "plain": lambda: network(),
    "batch norm": lambda: network(nn.BatchNorm1d(8)),
    "layer norm": lambda: network(nn.LayerNorm(8)),
    "bf16": lambda: network(nn.BatchNorm1d(8)).bfloat16(),
    "fp64 buffer": lambda: network(Scaled()),
    "island": lambda: network(Island(), nn.LayerNorm(8), nn.Linear(8, 8)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"autocast": "bf16"},
    "fp16": {"autocast": "fp16"},
    "bf16 sums fp32": {"autocast": "bf16", "dtypes": {"reductions": "fp32"}},
    "weights": {"dtypes": {"parameters": "bf16"}},
    "weights inputs": {"dtypes": {"parameters": "bf16", "inputs": "bf16"}},
    "all": {"dtypes": {"parameters": "bf16", "inputs": "bf16", "buffers": "bf16", "reductions": "bf16"}},
    "inputs": {"dtypes": {"inputs": "bf16"}},
    "bf16 inputs": {"autocast": "bf16", "dtypes": {"inputs": "bf16"}},
    "bf16 buffers": {"autocast": "bf16", "dtypes": {"buffers": "bf16"}},
    "scale": {"fp16_loss_scale": (1024.0, 1.0)},
    "bf16 compiled": {"autocast": "bf16", "compile": {"backend": "eager"}},
    "bf16 recomputed": {"autocast": "bf16", "gradient_checkpointing": ["1"]},
}


def fit(backend: str, kind: str, options: str) -> dict[str, Any]:
    """Take two steps and evaluate; return the losses, or the error with its notes, and how many updates were made."""
    data = rows(16, FP32)
    trainer: Any = None
    try:
        trainer = make_trainer(
            backend, KINDS[kind](), data, data, loss_fn=F.mse_loss, batch_size=4, epochs=1, learning_rate=0.05,
            optimizer="torch.optim.SGD", **OPTIONS[options],
        )  # fmt: skip
        metrics = trainer.train()
    except Exception as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        steps = None if trainer is None else trainer.progress.step
        return {"raised": type(error).__name__, "text": text, "steps": steps}
    losses = [metrics["train_metrics_history"][0]["train_loss"], metrics["valid"][0]["eval_loss"]]
    return {"losses": losses, "steps": trainer.progress.step}


def disable_like_a_gpu(backend: str) -> dict[str, Any]:
    """Train where DeepSpeed disables autocast inside of its engine, as it does on GPUs."""
    is_enabled = torch.is_autocast_enabled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device_type="cpu": is_enabled(device_type))
        return fit(backend, "plain", "bf16")


CASES = [
    (backend, kind, options)
    for backend in ("ddp", "fsdp", "zero2", "zero3")
    for kind in KINDS
    for options in OPTIONS
    if (options in ("none", "bf16") if kind != "batch norm" else options not in ("fp16", "scale"))
    or (kind, options) == ("island", "bf16 compiled")
]
QUICK = [
    ("ddp", "batch norm", "weights inputs"), ("fsdp", "batch norm", "bf16"), ("zero2", "batch norm", "bf16"),
    ("zero2", "fp64 buffer", "bf16"), ("zero2", "bf16", "bf16"), ("zero3", "island", "bf16 sums fp32"),
    ("fsdp", "island", "bf16"), ("zero2", "plain", "fp16"), ("zero1", "plain", "scale"),
    ("zero3", "island", "bf16 compiled"),
]  # fmt: skip
UNCALLED = ("zero3", "island", "bf16 compiled")  # a layer that is not called itself, so that its weight is not gathered
REJECTED = {
    "fp16": "is not available on a CPU. Use `autocast='bf16'`",
    "scale": "has no effect, as the loss is not scaled. Leave it out",
    "weights": "Give both the same type",
    "inputs": "Give both the same type",
    "weights inputs": "Give both the same type|Give all of them one|mat1 and mat2",
    "all": "Give all of them one|mat1 and mat2",
    "bf16 buffers": "Give all of them one",
    "none": "Give both the same type",
}
"""What an error says where a combination cannot be trained."""
OF_ZERO = "which DeepSpeed ZeRO casts itself"


# --- scales, sums and eighths


def scaled(backend: str, folder: str, cut: int = 0, resume: str | None = None, **options: Any) -> dict[str, Any]:
    """Take 9 steps under fp16, before the fourth of which one overflows; on a CPU, where fp16 is not supported."""
    from deepspeed.accelerator import get_accelerator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Precision, "parse", classmethod(lambda cls, name, device, *rest: cls(name, device.type)))
        patch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
        trace = Trace()
        trainer = make_trainer(
            backend, Overflowing(at=() if resume else (4,)), rows(40, FP32), loss_fn=F.mse_loss,
            batch_size=4 // PROCESSES[backend], max_steps=9, autocast="fp16", learning_rate=0.01, save_dir=folder,
            callbacks=[trace, StopAt(cut)], **{"fp16_loss_scale": SCALE, **options},
        )  # fmt: skip
        trainer.train(resume_from=resume)
    scales = [row["loss_scale"] for row in trace.logs]
    return {"scales": scales, "skipped": trainer.progress.skipped_steps, "tensors": tensors_of(trainer)}


def summed(backend: str, **options: Any) -> dict[str, Any]:
    """Take 3 steps, with gradients of two processes; return which share of the gradients bf16 can represent."""
    shares: list[float] = []

    def note_share(trainer: Any) -> None:
        gradients = [parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None]
        parts = torch.cat([trainer.backend.local_shard(gradient).float().flatten() for gradient in gradients])
        shares.append((parts == parts.bfloat16().float()).float().mean().item())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2), nn.Linear(2, 1))
    trainer = make_trainer(
        backend, model, rows(24, FP32), loss_fn=F.mse_loss, batch_size=4, epochs=1, learning_rate=0.01,
        max_grad_norm=None, **options,
        callbacks=[] if backend.startswith("zero") else [callback(on_before_optimizer_step=note_share)],
    )  # fmt: skip
    trainer.train()
    sent = str(getattr(trainer.model_wrapped, "communication_data_type", ""))
    return {"shares": shares, "sent": sent, "tensors": tensors_of(trainer)}


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
            backend, model, rows(24, FP32), loss_fn=F.mse_loss, batch_size=8 // PROCESSES[backend], epochs=1,
            learning_rate=0.01, autocast="fp8",
        )  # fmt: skip
        trainer.train()
    kinds = [type(layer).__name__ for layer in trainer.get_model().children()]
    return {"kinds": kinds, "tensors": tensors_of(trainer)}


def train_rejected(backend: str, scalar: bool) -> dict[str, Any]:
    """Train under FSDP with a parameter of no dimension, or with its weights in host memory."""
    model, options = network(), dict[str, Any]()
    if scalar:
        model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    else:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)
    make_trainer(backend, model, rows(8, FP32), loss_fn=F.mse_loss, max_steps=1, **options).train()
    return {}


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    jobs = Jobs()
    for backend, kind, options in sorted(asked_for(request, "backend", "kind", "options")):
        jobs.add(f"{backend}-{kind}-{options}", backend, fit, kind=kind, options=options)
    for backend in sorted(asked_for(request, "backend", test="test_loss_scale")):
        place = folder / backend
        jobs.add(f"{backend}-straight", backend, scaled, folder=str(place / "straight"))
        jobs.add(f"{backend}-cut", backend, scaled, folder=str(place / "cut"), cut=4)
        jobs.add(f"{backend}-resumed", backend, scaled, folder=str(place), resume=str(place / "cut" / "checkpoint-4"))
        jobs.add(f"{backend}-sinking", backend, scaled, folder=str(place / "sinking"), fp16_loss_scale=(8.0, 8.0))
    for backend in sorted(asked_for(request, "backend", test="test_gradients")):
        for name, options in SUMS.items():
            jobs.add(f"{backend}-{name}", backend, summed, **options)
    for backend in sorted(asked_for(request, "backend", test="test_fp8")):
        jobs.add(f"{backend}-fp8", backend, in_eighths)
    jobs.add("zero2-gpu", "zero2", disable_like_a_gpu)
    for name in ("scalar", "plugin"):
        jobs.add(f"fsdp-{name}", "fsdp", train_rejected, scalar=name == "scalar")
    return launch_all(jobs, folder / "launches")


@pytest.mark.parametrize(("backend", "kind", "options"), thinned(dict.fromkeys([*QUICK, *CASES]), QUICK))
def test_precision_trains_or_is_an_error_before_step_1(results: Any, backend: str, kind: str, options: str) -> None:
    """With the remedy; autocast="bf16" trains each kind on each backend."""
    first, second = results[f"{backend}-{kind}-{options}"]
    if "losses" in first:
        assert first == second and first["steps"] == 2 and all(map(math.isfinite, first["losses"]))
        assert first["losses"][1] < first["losses"][0]
        return
    if (backend, kind, options) == UNCALLED:
        says = r"`compile` cannot be used .*register_external_parameter\(self, weight\)"
    else:
        assert not options.startswith("bf16") or "buffers" in options
        says = f"{OF_ZERO}|{REJECTED[options]}" if backend.startswith("zero") else REJECTED[options]
    for rank in (first, second):
        assert not rank["steps"] and re.search(says, rank["text"]), rank


def test_zero_keeps_autocast_in_its_engine(results: Any) -> None:
    """DeepSpeed disables it on GPUs, where inputs in fp32 then meet weights in bf16."""
    assert all(rank.get("steps") == 2 and "losses" in rank for rank in results["zero2-gpu"]), results["zero2-gpu"]


@pytest.mark.parametrize(("name", "words"), [("scalar", "'scale' has no dimension"), ("plugin", "`cpu_offload`")])
def test_fsdp_rejects_what_it_cannot_shard_or_offload(results: Any, name: str, words: str) -> None:
    for rank in results[f"fsdp-{name}"]:
        assert rank["error"] == "ConfigError" and words in rank["message"]


@pytest.mark.parametrize("backend", thinned(["ddp", "fsdp", "zero2", "hf2"], ["fsdp", "zero2"]))
def test_gradients_are_summed_in_the_given_dtype(results: Any, backend: str) -> None:
    sums = {name: results[f"{backend}-{name}"] for name in SUMS}
    errors = sums.pop("fp32 of bf16") if backend == "zero2" else []
    assert all(rank["error"] == "ConfigError" and "updates a copy in fp32" in rank["message"] for rank in errors)
    assert not [rank["message"] for ranks in sums.values() for rank in ranks if "error" in rank]
    for first, second in sums.values():
        assert gap(first["tensors"], second["tensors"]) == 0.0
    (plain, _), (low, _), (high, _) = (sums[name] for name in ("as they are", "bf16", "fp32"))
    assert 1e-7 < gap(plain["tensors"], low["tensors"]) < 1e-2
    if backend == "zero2":
        assert (low["sent"], high["sent"]) == ("torch.bfloat16", "torch.float32")
        return
    assert min(low["shares"]) == 1.0 and max(plain["shares"] + high["shares"]) < 0.9
    assert sums["fp32 of bf16"][0]["tensors"]["0.weight"].dtype is torch.bfloat16


@pytest.mark.parametrize("backend", thinned(["zero2", "zero3"], ["zero2"]))
def test_loss_scale_of_zero_follows_its_settings(results: Any, backend: str) -> None:
    """Over a resume too."""
    runs = ("straight", "resumed", "sinking")
    (straight, _), (resumed, _), sinking = (results[f"{backend}-{run}"] for run in runs)
    # DeepSpeed doubles in the step after the window
    assert (straight["scales"], straight["skipped"]) == ([1024] * 3 + [512] * 3 + [1024] * 3, 1)
    assert resumed["scales"] == straight["scales"][4:]
    assert gap(resumed["tensors"], straight["tensors"]) == 0.0
    for rank in sinking:
        assert rank["error"] == "NonFiniteError" and "fell to 4, below its minimum 8" in rank["message"]


@pytest.mark.parametrize("backend", thinned(["ddp", "fsdp", "zero2"], ["fsdp", "zero2"]))
def test_fp8_layers_match_native_or_are_an_error(results: Any, backend: str) -> None:
    first, second = results[f"{backend}-fp8"]
    if backend == "zero2":
        assert first["error"] == "ConfigError" and "does not work with DeepSpeed ZeRO" in first["message"]
        return
    assert "error" not in first, first
    assert any("Float8Linear" in kind for kind in first["kinds"]) and gap(first["tensors"], second["tensors"]) == 0.0
    assert gap(first["tensors"], in_eighths("native")["tensors"]) < 1e-2
