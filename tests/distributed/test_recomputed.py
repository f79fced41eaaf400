"""Activations that are computed again and compiled models, on two processes: the same numbers to the bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import (  # noqa: E402
    DTYPES,
    Job,
    asked_for,
    dtype_of,
    launch_all,
    make_trainer,
    sharding_arguments,
)
from marks import thinned  # noqa: E402
from recipes import rows  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from omnitrain import GradualUnfreezing, HFTrainer  # noqa: E402
from omnitrain.checkpoint.tensors import whole  # noqa: E402

pytestmark = pytest.mark.distributed

BACKENDS = ("ddp", "fsdp", "hf2", "zero3", "hf_fsdp")


class Counting:
    """A compiler that leaves a graph as it is."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph


class Blocks(nn.Sequential):
    """A model with a forward pass of its own, as PyTorch compiles none of its own modules' under the hooks of FSDP."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
        return x


def learn(backend: str, recomputes: bool, compiles: bool = False) -> dict[str, Any]:
    """Train a model of blocks with dropout and BatchNorm; one that is compiled, then once more, compiled ahead."""
    tensors = train_blocks(backend, recomputes, compiles)
    again = train_blocks(backend, recomputes, compiles, ahead=True) if compiles else {}
    return {"tensors": tensors | {f"ahead {name}": one for name, one in again.items()}}


def train_blocks(backend: str, recomputes: bool, compiles: bool, ahead: bool = False) -> dict[str, Any]:
    torch.compiler.reset()
    torch.manual_seed(0)
    compiler = Counting()
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2)]
    model = Blocks(nn.Linear(4, 16), *blocks, nn.Linear(16, 1)).to(DTYPES[dtype_of(backend)])
    trainer = make_trainer(
        backend, model, rows(32, DTYPES[dtype_of(backend)]), loss_fn=F.mse_loss, batch_size=4, max_steps=4,
        learning_rate=0.05, gradient_checkpointing=recomputes, compile={"backend": compiler} if compiles else False,
    )  # fmt: skip
    if ahead:
        found = trainer.compile()
        assert found.graphs and found.shapes == {"train": ["[4, 4], [4, 1]"]}
    graphs = compiler.graphs
    trainer.train()
    assert bool(compiler.graphs) is compiles and (not ahead or compiler.graphs == graphs)
    assert any("forward" in vars(one) for one in trainer.get_model().modules()) is recomputes
    return {name: whole(one) for name, one in sorted(trainer.backend.model_tensors().items())}


def thaw(backend: str) -> dict[str, Any]:
    """Train a plain model and a compiled one, whose layers are frozen at first."""
    ends: dict[str, torch.Tensor] = {}
    for word, compiles in (("plain", False), ("compiled", {"backend": Counting()})):
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
        ends |= {f"{word} {name}": whole(one) for name, one in trainer.backend.model_tensors().items()}
    return {"tensors": ends}


def learn_by_their_arguments(backend: str, compiles: bool) -> dict[str, Any]:
    """Train as `torch_compile` of transformers' arguments says."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    dtype = DTYPES[dtype_of(backend)]
    options: dict[str, Any] = {"batch_size": 4, "max_steps": 4, "learning_rate": 0.05}
    args = sharding_arguments(backend, False, options)
    if compiles:
        args.torch_compile, args.torch_compile_backend = True, "aot_eager"
    trainer = HFTrainer(
        Blocks(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype), args, rows(32, dtype),
        loss_fn=F.mse_loss, progress_bar=False, optimizer="torch.optim.AdamW",
    )  # fmt: skip
    trainer.train()
    assert bool(counters["stats"]["unique_graphs"]) is compiles
    return {"tensors": {name: whole(one) for name, one in sorted(trainer.backend.model_tensors().items())}}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    jobs = [
        Job(f"{backend} {recomputes}", backend, "test_recomputed:learn", {"recomputes": recomputes})
        for backend in sorted({*asked_for(request, "backend"), *asked_for(request, "compiled")})
        for recomputes in (False, True)
    ]
    jobs += [
        Job(f"{backend} compiled", backend, "test_recomputed:learn", {"recomputes": False, "compiles": True})
        for backend in sorted(asked_for(request, "compiled"))
    ]
    jobs += [
        Job(f"their {backend} {compiles}", backend, "test_recomputed:learn_by_their_arguments", {"compiles": compiles})
        for backend in sorted(asked_for(request, "theirs"))
        for compiles in (False, True)
    ]
    jobs += [Job(f"thawed {one}", one, "test_recomputed:thaw", {}) for one in sorted(asked_for(request, "thawed"))]
    return launch_all(jobs, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("backend", thinned(BACKENDS, ["ddp", "fsdp"]))
def test_recomputing_changes_no_bit_on_several_processes(results: Any, backend: str) -> None:
    ranks = [results[f"{backend} {recomputes}"][0] for recomputes in (False, True)]
    assert not [rank["error"] for rank in ranks if "error" in rank], ranks
    kept, again = (rank["tensors"] for rank in ranks)
    assert kept.keys() == again.keys() and len(kept) == 18
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("compiled", thinned((*BACKENDS, "zero2"), ["ddp", "fsdp"]))
def test_a_compiled_model_takes_the_steps_of_a_plain_one_on_several_processes(results: Any, compiled: str) -> None:
    ranks = [results[name][0] for name in (f"{compiled} False", f"{compiled} compiled")]
    assert not [rank["error"] for rank in ranks if "error" in rank], ranks
    plain, compiled_one = (rank["tensors"] for rank in ranks)
    assert compiled_one.keys() == plain.keys() | {f"ahead {name}" for name in plain} and len(plain) == 18
    for name, one in plain.items():
        assert torch.equal(one, compiled_one[name]) and torch.equal(one, compiled_one[f"ahead {name}"]), name


@pytest.mark.parametrize("thawed", thinned(("ddp", "fsdp"), ["ddp"]))
def test_layers_of_a_compiled_model_thaw_as_those_of_a_plain_one(results: Any, thawed: str) -> None:
    (one, *_) = results[f"thawed {thawed}"]
    assert "error" not in one, one
    tensors = one["tensors"]
    names = {name.partition(" ")[2] for name in tensors}
    assert len(names) == 6 and len(tensors) == 12
    assert all(torch.equal(tensors[f"plain {name}"], tensors[f"compiled {name}"]) for name in names)


@pytest.mark.parametrize("theirs", thinned(("hf_fsdp", "hf_zero2", "hf_zero3"), []))
def test_torch_compile_of_transformers_arguments_is_honoured_where_weights_are_sharded(
    results: Any, theirs: str
) -> None:
    ranks = [results[f"their {theirs} {compiles}"][0] for compiles in (False, True)]
    assert not [rank["error"] for rank in ranks if "error" in rank], ranks
    plain, compiled = (rank["tensors"] for rank in ranks)
    assert plain.keys() == compiled.keys() and len(plain) == 4
    assert all(torch.allclose(plain[name], compiled[name], atol=1e-6) for name in plain)
