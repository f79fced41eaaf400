"""Activations that are computed again and compiled models, on two processes: the same numbers to the bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import DTYPES, Job, asked_for, dtype_of, launch_all, make_trainer  # noqa: E402
from marks import thinned  # noqa: E402
from recipes import rows  # noqa: E402
from torch import nn  # noqa: E402

from omnitrain.checkpoint.tensors import whole  # noqa: E402

pytestmark = pytest.mark.distributed

BACKENDS = ("ddp", "fsdp", "hf2", "zero3", "hf_fsdp")


def learn(backend: str, recomputes: bool, compiler: str | None = None) -> dict[str, Any]:
    """Train a model of blocks with dropout and BatchNorm."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(4, 16), *blocks, nn.Linear(16, 1)).to(DTYPES[dtype_of(backend)])
    trainer = make_trainer(
        backend, model, rows(32, DTYPES[dtype_of(backend)]), loss_fn=F.mse_loss, batch_size=4, max_steps=4,
        learning_rate=0.05, gradient_checkpointing=recomputes, compile={"backend": compiler} if compiler else False,
    )  # fmt: skip
    trainer.train()
    assert any("forward" in vars(one) for one in trainer.get_model().modules()) is recomputes
    return {"tensors": {name: whole(one) for name, one in sorted(trainer.backend.model_tensors().items())}}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    jobs = [
        Job(f"{backend} {recomputes}", backend, "test_recomputed:learn", {"recomputes": recomputes})
        for backend in sorted({"ddp", *asked_for(request, "backend")})
        for recomputes in (False, True)
    ]
    jobs += [
        Job(f"{backend} compiled", backend, "test_recomputed:learn", {"recomputes": False, "compiler": "eager"})
        for backend in ("ddp", "fsdp")
    ]
    return launch_all(jobs, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("backend", thinned(BACKENDS, ["ddp", "fsdp"]))
def test_recomputing_changes_no_bit_on_several_processes(results: Any, backend: str) -> None:
    ranks = [results[f"{backend} {recomputes}"][0] for recomputes in (False, True)]
    assert not [rank["error"] for rank in ranks if "error" in rank], ranks
    kept, again = (rank["tensors"] for rank in ranks)
    assert kept.keys() == again.keys() and len(kept) == 18
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_a_compiled_model_takes_the_steps_of_a_plain_one_on_several_processes(results: Any) -> None:
    plain, compiled = results["ddp False"][0]["tensors"], results["ddp compiled"][0]["tensors"]
    assert plain.keys() == compiled.keys() and all(torch.equal(plain[name], compiled[name]) for name in plain)
    for rank in results["fsdp compiled"]:
        assert rank["error"] == "ConfigError" and "compile" in rank["message"]
