"""Each argument of precision with kinds of models, on each backend: trained, or rejected before the first update."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Job, asked_for, launch_all, make_trainer
from marks import thinned
from recipes import rows
from torch import nn
from torch.utils.data import TensorDataset

HERE = "test_precision_kinds"
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64


class Island(nn.Module):
    """Computes in fp32 in a region without autocast, as losses and norms of models do, and returns fp32."""

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
BACKENDS = ("ddp", "fsdp", "zero1", "zero2", "zero3")


def fit(backend: str, kind: str, options: str) -> dict[str, Any]:
    """Take two steps and evaluate; return the losses, or the error with its notes, and how many updates were made."""
    x, y = rows(16, FP32).tensors
    trainer: Any = None
    try:
        trainer = make_trainer(
            backend, KINDS[kind](), TensorDataset(x, y), TensorDataset(x, y), loss_fn=F.mse_loss, batch_size=4,
            epochs=1, learning_rate=0.05, optimizer="torch.optim.SGD", **OPTIONS[options],
        )  # fmt: skip
        metrics = trainer.train()
    except Exception as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        steps = None if trainer is None else trainer.progress.step
        return {"raised": type(error).__name__, "text": text, "steps": steps}
    history = metrics["train_metrics_history"][0]
    return {"losses": [history["train_loss"], metrics["valid"][0]["eval_loss"]], "steps": trainer.progress.step}


def disable_like_a_gpu(backend: str) -> dict[str, Any]:
    """Train where DeepSpeed disables autocast inside of its engine, as it does on GPUs."""
    is_enabled = torch.is_autocast_enabled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device_type="cpu": is_enabled(device_type))
        return fit(backend, "plain", "bf16")


def scalar(backend: str) -> dict[str, Any]:
    """Make a trainer of a model with a parameter of no dimension."""
    model = network()
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    make_trainer(backend, model, rows(16, FP32), loss_fn=F.mse_loss)
    return {}


CASES = [
    (backend, kind, options)
    for backend in BACKENDS
    for kind in KINDS
    for options in OPTIONS
    if (kind == "plain" or options not in ("fp16", "scale"))
    and (kind == "batch norm" or options not in ("bf16 compiled", "bf16 recomputed"))
]
QUICK = [
    ("ddp", "batch norm", "weights inputs"), ("fsdp", "batch norm", "bf16"), ("zero2", "batch norm", "bf16"),
    ("zero2", "fp64 buffer", "bf16"), ("zero2", "bf16", "bf16"), ("zero3", "island", "bf16 sums fp32"),
    ("fsdp", "island", "bf16"), ("zero2", "plain", "fp16"), ("zero1", "plain", "scale"),
]  # fmt: skip
REJECTED = {
    "fp16": "is not available on a CPU. Use `autocast='bf16'`",
    "scale": "has no effect, as the loss is not scaled. Leave it out",
    "weights": "Give both the same type",
    "inputs": "Give both the same type",
    "weights inputs": "Give both the same type|Cast the input|mat1 and mat2",
    "all": "Cast the input|mat1 and mat2",
    "bf16 buffers": "Give both the same type",
    "none": "Give both the same type",
}
"""What an error says where a combination cannot be trained."""
OF_ZERO = "which DeepSpeed ZeRO casts itself"


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    jobs = [
        Job(f"{backend}-{kind}-{options}", backend, f"{HERE}:fit", {"kind": kind, "options": options})
        for backend, kind, options in sorted(asked_for(request, "backend", "kind", "options"))
    ]
    jobs += [Job("gpu", "zero2", f"{HERE}:disable_like_a_gpu"), Job("scalar", "fsdp", f"{HERE}:scalar")]
    return launch_all(jobs, folder / "launches")


@pytest.mark.parametrize(("backend", "kind", "options"), thinned(CASES, QUICK))
def test_precision_trains_or_is_an_error_before_step_1(results: Any, backend: str, kind: str, options: str) -> None:
    """With the remedy; autocast="bf16" trains each kind on each backend."""
    first, second = results[f"{backend}-{kind}-{options}"]
    if "losses" in first:
        assert first == second and first["steps"] == 2 and all(map(math.isfinite, first["losses"]))
        assert first["losses"][1] < first["losses"][0]
        return
    assert not options.startswith("bf16") or "buffers" in options
    says = f"{OF_ZERO}|{REJECTED[options]}" if backend.startswith("zero") else REJECTED[options]
    for rank in (first, second):
        assert not rank["steps"] and re.search(says, rank["text"]), rank


def test_zero_keeps_autocast_in_its_engine(results: Any) -> None:
    """DeepSpeed disables it on GPUs, where inputs in fp32 then meet weights in bf16."""
    assert all(rank.get("steps") == 2 and "losses" in rank for rank in results["gpu"]), results["gpu"]


def test_fsdp_rejects_parameters_without_dimension(results: Any) -> None:
    for rank in results["scalar"]:
        assert rank["error"] == "ConfigError" and "'scale' has no dimension" in rank["message"]
        assert "torch.tensor([1.0])" in rank["message"]
