"""SpikeGuard on two processes: all ranks go back, and leave out the samples that one process does."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from backends import Jobs, gap, launch_all, make_trainer, tensors_of
from recipes import fit, rows, t16
from torch.utils.data import TensorDataset

from omnitrain import EMA, SpikeGuard

BACKENDS = ["ddp", "fsdp", "hf2", "hf_fsdp"]


def rewind(backend: str, every: int | None, action: str, folder: str) -> dict[str, Any]:
    """Train on data of which one sample is far from the others."""
    x = rows(128).tensors[0]
    y = x.sum(dim=1, keepdim=True)
    y[100] = 1000
    guard = SpikeGuard(threshold=30.0, window=16, action=action, every=every)  # type: ignore[arg-type]
    trainer = fit(make_trainer(
        backend, t16(), TensorDataset(x, y), loss_fn=F.mse_loss, epochs=1, batch_size=2, global_batch_size=4,
        learning_rate=0.01, algorithms=[guard, EMA(0.9)], save_dir=folder,
        save_steps=10, log_steps=1000,
    ))  # fmt: skip
    spikes = [{**asdict(spike), "value": 0.0} for spike in guard.left_out]
    return {"tensors": tensors_of(trainer), "spikes": spikes, "position": list(trainer.progress.position)}


@pytest.fixture(scope="module")
def results(folder: Path) -> Any:
    jobs = Jobs()
    rewound = itertools.product(["native", *BACKENDS], (None, 3), ["rewind"])
    for backend, every, action in (*rewound, ("zero2", None, "rewind"), ("zero2", None, "skip")):
        name = f"{backend}-{every}-{action}"
        jobs.add(name, backend, rewind, every=every, action=action, folder=str(folder / name))
    return launch_all(jobs, folder)


@pytest.mark.slow
@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rewind_is_that_of_one_process(results: Any, backend: str, every: int | None) -> None:
    (expected,) = results[f"native-{every}-rewind"]
    assert len(expected["spikes"]) == 1 and expected["position"][0] == 31
    for rank in results[f"{backend}-{every}-rewind"]:
        assert gap(rank["spikes"], expected["spikes"]) < 1e-9
        assert gap({**rank, "spikes": 0}, {**expected, "spikes": 0}) < 1e-12


@pytest.mark.slow
def test_deepspeed_skips_but_does_not_rewind(results: Any) -> None:
    for rank in results["zero2-None-rewind"]:
        assert rank["error"] == "ConfigError" and "SpikeGuard, which cannot work here: DeepSpeed" in rank["message"]
    for rank in results["zero2-None-skip"]:
        assert rank["position"][:2] == [31, 1] and len(rank["spikes"]) == 1
