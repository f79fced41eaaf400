"""Ranks' parts of ZeRO's and FSDP's tensors, of any precision and size: saved as they are, resumed to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import PROCESSES, Job, asked_for, gap, launch_all, named, sound
from marks import thinned
from recipes import rows
from torch import nn

from omnitrain import AccelerateTrainer, Trainer
from omnitrain.checkpoint.tensor_files import gather_to_host

IN_PARTS = {"stage3_param_persistence_threshold": 0}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
KINDS: dict[str, dict[str, Any]] = {
    "zero1": {},
    "zero2": {"autocast": "bf16"},
    "zero3": {"zero": IN_PARTS},
    "zero3-bf16": {"zero": IN_PARTS, "autocast": "bf16"},
    "zero3-persistent": {"autocast": "bf16"},
    "zero2-offloaded": {"zero": OFFLOADED},
    "zero3-offloaded": {"zero": {**IN_PARTS, **OFFLOADED, "offload_param": {"device": "cpu"}}, "last": ()},
    "fsdp": {},
    "zero1-empty": {"last": (0, 4)},
    "zero3-number": {"last": ()},
}


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


def resume(backend: str, kind: str, folder: str) -> dict[str, Any]:
    """Train two epochs at once, and with a resume in between."""
    options = {"last": (1,), **KINDS[kind]}
    last, zero = options.pop("last"), options.pop("zero", {})
    if backend == "native":
        options = {"device": "cpu"}
    elif backend == "fsdp":
        from accelerate.utils import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    else:
        config = {"zero_optimization": {"stage": int(backend[-1]), **zero}, "zero_force_ds_cpu_optimizer": False}
        options["deepspeed_config"] = config
    tensors: dict[str, torch.Tensor] = {}
    for name, epochs, resume_from in (("straight", 2, None), ("resumed", 1, None), ("resumed", 2, "last")):
        trainer: Any = (Trainer if backend == "native" else AccelerateTrainer)(
            Odd(last), rows(16, torch.float32), loss_fn=F.mse_loss, batch_size=8 // PROCESSES[backend], epochs=epochs,
            learning_rate=0.01, max_grad_norm=0.1, optimizer="adamw", freeze=[r"^frozen\."],
            param_groups=[{"match": "bias", "weight_decay": 0.0}],
            progress_bar=False, save_dir=f"{folder}/{name}", consolidate=False, **options,
        )  # fmt: skip
        trainer.train(resume_from=resume_from)
        moments, _ = trainer.backend.optimizer_state()
        parts = {**trainer.backend.model_tensors(), **moments}
        tensors |= {f"{name}/{key}": gather_to_host(one) for key, one in parts.items()}
    return {"tensors": tensors}


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> Any:
    jobs = [
        Job(kind, kind.partition("-")[0], "test_zero_parts:resume", {"kind": kind, "folder": str(folder / kind)})
        for kind in sorted(asked_for(request, "kind"))
    ]
    return sound(launch_all(jobs, folder / "jobs"))


@pytest.mark.parametrize("kind", thinned(KINDS, ("zero2", "zero3-offloaded")))
def test_parts_of_tensors_resume_to_the_bit(results: Any, kind: str, tmp_path: Path) -> None:
    """With clipped gradients, and the steps of one process."""
    expected = named(resume("native", kind, str(tmp_path)), "straight/")
    for rank in results[kind]:
        straight, resumed = named(rank, "straight/"), named(rank, "resumed/")
        assert straight["straight/rest.last"].shape == KINDS[kind].get("last", (1,))
        assert {"straight/frozen.weight", "straight/scale", "straight/first.weight/exp_avg"} <= straight.keys()
        for name, tensor in straight.items():
            assert torch.equal(resumed[name.replace("straight", "resumed")], tensor), name
        if "autocast" not in KINDS[kind]:
            # ZeRO has moments of an empty parameter, which gets no gradient, too
            assert gap({name: straight[name] for name in expected}, expected) < 1e-5
