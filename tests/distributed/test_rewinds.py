"""SpikeGuard on two processes: all ranks go back, and leave out the samples that one process does."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Jobs, gap, launch_all, make_trainer, tensors_of
from torch import nn

from omnitrain import EMA, SpikeGuard

BACKENDS = ["ddp", "fsdp", "hf2", "hf_fsdp"]


def rewind(backend: str, every: int | None, action: str, folder: str) -> dict[str, Any]:
    """Train on data of which one sample is far from the others."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 4, dtype=torch.float64, generator=generator)
    y = x.sum(dim=1, keepdim=True)
    y[100] = 1000
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    guard = SpikeGuard(threshold=30.0, window=16, action=action, every=every)  # type: ignore[arg-type]
    trainer = make_trainer(
        backend, model, list(zip(x, y, strict=True)), loss_fn=F.mse_loss, epochs=1, batch_size=2, global_batch_size=4,
        learning_rate=0.01, algorithms=[guard, EMA(0.9)], save_dir=folder, save_steps=10, log_steps=1000,
    )  # fmt: skip
    trainer.train()
    spikes = [{name: value for name, value in asdict(spike).items() if name != "value"} for spike in guard.left_out]
    return {"tensors": tensors_of(trainer), "spikes": spikes, "position": list(trainer.progress.position)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    jobs, folder = Jobs(), tmp_path_factory.mktemp("rewinds")
    for backend in ["native", *BACKENDS]:
        for every in (None, 3):
            name = f"{backend}-{every}"
            jobs.add(name, backend, rewind, every=every, action="rewind", folder=str(folder / name))
    jobs.add("zero2", "zero2", rewind, every=None, action="rewind", folder=str(folder / "zero2"))
    jobs.add("zero2-skip", "zero2", rewind, every=None, action="skip", folder=str(folder / "zero2-skip"))
    return launch_all(jobs, folder)


@pytest.mark.slow
@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rewind_is_that_of_one_process(results: Any, backend: str, every: int | None) -> None:
    (expected,) = results[f"native-{every}"]
    assert len(expected["spikes"]) == 1 and expected["position"][0] == 31
    for rank in results[f"{backend}-{every}"]:
        assert [spike["start"] for spike in rank["spikes"]] == [spike["start"] for spike in expected["spikes"]]
        assert gap(rank["spikes"], expected["spikes"]) < 1e-9
        assert rank["position"] == expected["position"]
        assert gap(rank["tensors"], expected["tensors"]) < 1e-12


@pytest.mark.slow
def test_deepspeed_skips_but_does_not_rewind(results: Any) -> None:
    for rank in results["zero2"]:
        assert rank["error"] == "ConfigError" and "SpikeGuard, which cannot work here: DeepSpeed" in rank["message"]
    for rank in results["zero2-skip"]:
        assert rank["position"][:2] == [31, 1] and len(rank["spikes"]) == 1
