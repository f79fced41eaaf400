"""Activation checkpointing and compiled models on two processes: bit-identical numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, Job, asked_for, dtype_of, gap, launch_all, make_trainer, sound, tensors_of
from marks import thinned
from recipes import Graphs, rows
from torch import nn

from omnitrain import GradualUnfreezing

BACKENDS = ("ddp", "fsdp", "hf2", "zero3", "hf_fsdp")


class Blocks(nn.Sequential):
    """A model with a custom forward pass: under the hooks of FSDP, PyTorch compiles none of its own modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
        return x


def learn(backend: str, recomputes: bool, compiles: bool = False) -> dict[str, Any]:
    """Train a model of blocks with dropout and BatchNorm; a compiled one then again, compiled ahead."""
    tensors = train_blocks(backend, recomputes, compiles)
    again = train_blocks(backend, recomputes, compiles, ahead=True) if compiles else {}
    return {"tensors": tensors | {f"ahead {name}": one for name, one in again.items()}}


def train_blocks(backend: str, recomputes: bool, compiles: bool, ahead: bool = False) -> dict[str, Any]:
    torch.compiler.reset()
    torch.manual_seed(0)
    compiler = Graphs()
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2)]
    model = Blocks(nn.Linear(4, 16), *blocks, nn.Linear(16, 1)).to(DTYPES[dtype_of(backend)])
    trainer = make_trainer(
        backend, model, rows(32, DTYPES[dtype_of(backend)]), loss_fn=F.mse_loss, batch_size=4, max_steps=4,
        learning_rate=0.05, gradient_checkpointing=recomputes, compile={"backend": compiler} if compiles else False,
    )  # fmt: skip
    if ahead:
        compiled = trainer.compile()
        assert compiled.graphs and compiled.shapes == {"train": ["[4, 4], [4, 1]"]}
    graphs = compiler.count
    trainer.train()
    assert bool(compiler.count) is compiles and (not ahead or compiler.count == graphs)
    assert any("forward" in vars(module) for module in trainer.get_model().modules()) is recomputes
    return tensors_of(trainer)


def thaw(backend: str) -> dict[str, Any]:
    """Train a plain model and a compiled one, whose layers are frozen at first."""
    ends: dict[str, torch.Tensor] = {}
    for word, compiles in (("plain", False), ("compiled", {"backend": Graphs()})):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Blocks(nn.Linear(4, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 1))
        trainer = make_trainer(
            backend, model.to(DTYPES[dtype_of(backend)]), rows(32, DTYPES[dtype_of(backend)]), loss_fn=F.mse_loss,
            batch_size=4, epochs=4, learning_rate=0.05, algorithms=[GradualUnfreezing()], compile=compiles,
        )  # fmt: skip
        if compiles:
            assert trainer.compile().graphs
        trainer.train()
        ends |= {f"{word} {name}": one for name, one in tensors_of(trainer).items()}
    return {"tensors": ends}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    jobs = []

    def add(name: str, backend: str, function: str = "learn", **options: Any) -> None:
        jobs.append(Job(f"{name} {backend}", backend, f"test_recomputed:{function}", options))

    recomputed = asked_for(request, "backend", test="test_recomputing")
    compiled = asked_for(request, "backend", test="test_compiled")
    for backend in sorted(recomputed | compiled):
        add("plain", backend, recomputes=False)
        if backend in recomputed:
            add("recomputed", backend, recomputes=True)
        if backend in compiled:
            add("compiled", backend, recomputes=False, compiles=True)
    for backend in sorted(asked_for(request, "backend", test="test_layers")):
        add("thawed", backend, "thaw")
    return sound(launch_all(jobs, tmp_path_factory.mktemp("runs")))


def results_of(results: Any, *names: str) -> list[dict[str, torch.Tensor]]:
    return [results[name][0]["tensors"] for name in names]


@pytest.mark.parametrize("backend", thinned(BACKENDS, ["fsdp"]))
def test_recomputing_changes_no_bit(results: Any, backend: str) -> None:
    plain, recomputed = results_of(results, f"plain {backend}", f"recomputed {backend}")
    assert len(plain) == 18 and gap(plain, recomputed) == 0


@pytest.mark.parametrize("backend", thinned((*BACKENDS, "zero2"), ["fsdp"]))
def test_compiled_model_takes_the_steps_of_a_plain_one(results: Any, backend: str) -> None:
    """Also if it is compiled ahead."""
    plain, compiled = results_of(results, f"plain {backend}", f"compiled {backend}")
    assert len(plain) == 18 and gap(plain | {f"ahead {name}": one for name, one in plain.items()}, compiled) == 0


@pytest.mark.parametrize("backend", thinned(("ddp", "fsdp"), ["ddp"]))
def test_layers_of_a_compiled_model_thaw(results: Any, backend: str) -> None:
    (tensors,) = results_of(results, f"thawed {backend}")
    plain, compiled = (
        {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
        for prefix in ("plain ", "compiled ")
    )
    assert len(plain) == 6 and gap(plain, compiled) == 0
