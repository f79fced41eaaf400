"""Every optimizer by name where weights are sharded: the numbers of one process, or an error before the first step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Job, asked_for, gap, launch_all, make_trainer
from marks import thinned
from recipes import rows
from torch import nn

from omnitrain.checkpoint.tensor_files import gather_to_host

HERE = "test_sharded_optimizers"
NAMES = sorted(
    name.lower() for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)  # fmt: skip
SHARDED = ("fsdp", "zero1", "zero2", "zero3")
REJECTED = {
    ("lbfgs", "fsdp"): "which cannot work here", ("lbfgs", "zero"): "which DeepSpeed does not give it",
    ("adafactor", "fsdp"): r"\(Adafactor\) cannot update weights that FSDP shards: .* Use another one, such as 'adamw'",
    ("adafactor", "zero"): "where Adafactor needs whole matrices. Use DDP",
    ("rprop", "fsdp"): r"\(Rprop\) cannot update weights that FSDP shards: ",
    ("muon", "zero"): "where Muon needs whole matrices. Use FSDP or DDP",
    ("sparseadam", "fsdp"): "takes sparse gradients only", ("sparseadam", "zero"): "takes sparse gradients only",
}  # fmt: skip
CASES = [(name, backend) for name in NAMES for backend in SHARDED]
QUICK = [("adafactor", "fsdp"), ("rprop", "fsdp"), ("adamw", "fsdp"), ("adafactor", "zero2"), ("adagrad", "fsdp"),
         ("adagrad", "zero2")]  # fmt: skip


def train(backend: str, optimizer: str, folder: str) -> dict[str, Any]:
    """Train for 4 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    trainer = make_trainer(
        backend, model, rows(16, torch.float32), loss_fn=F.mse_loss, epochs=1, batch_size=2, global_batch_size=4,
        optimizer=optimizer, learning_rate=0.01, save_dir=folder,
    )  # fmt: skip
    trainer.train()
    if backend == "fsdp":
        trainer.optimizer.state_dict()  # has no state of the weights before they were sharded
    return {"tensors": {name: gather_to_host(one) for name, one in sorted(trainer.backend.model_tensors().items())}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    folder, cases = tmp_path_factory.mktemp("optimizers"), asked_for(request, "name", "backend")
    trained = {(name, "native") for name, backend in cases if (name, backend.rstrip("123")) not in REJECTED}
    jobs = []
    for name, backend in sorted({*cases, *trained}):
        options = {"optimizer": name, "folder": str(folder / f"{name}-{backend}")}
        jobs.append(Job(f"{name}-{backend}", backend, f"{HERE}:train", options))
    return {"folder": folder, "ran": launch_all(jobs, folder)}


@pytest.mark.parametrize(("name", "backend"), thinned(CASES, QUICK))
def test_optimizers_train_sharded_weights(results: Any, name: str, backend: str) -> None:
    ranks = results["ran"][f"{name}-{backend}"]
    message = REJECTED.get((name, backend.rstrip("123")))
    if message is not None:
        for rank in ranks:
            assert rank["error"] == "ConfigError" and re.search(message, rank["message"])
        assert not list((results["folder"] / f"{name}-{backend}").glob("*"))
        return
    (expected,) = results["ran"][f"{name}-native"]
    limit = 1e-3 if name == "muon" else 1e-5  # Muon computes in bfloat16
    assert all(gap(rank["tensors"], expected["tensors"]) < limit for rank in ranks)
