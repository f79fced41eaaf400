"""What each rank has before the first step: one model, wherever its weights were read."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import make_trainer  # noqa: E402
from compiled import compile_once  # noqa: E402
from forking import Case, Found, Outcome, play  # noqa: E402
from recipes import rows, t16  # noqa: E402

from omnitrain.checkpoint.tensors import whole  # noqa: E402

pytestmark = pytest.mark.distributed

BACKENDS = ("ddp", "fsdp", "zero2", "zero3", "hf2", "hf_fsdp")


class Net(nn.Module):
    """4 -> 16 -> 1, with a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.body = t16(dtype=torch.float32)
        self.twins = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twins(self.body(x)) * self.scale


def train(backend: str, empty: list[int]) -> dict[str, list[float]]:
    """Train with a model whose weights are on the meta device on some ranks; return the weights."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    with torch.device("meta" if rank in empty else "cpu"):
        model = Net()
    trainer = make_trainer(
        backend, model, rows(32, torch.float32), loss_fn=F.mse_loss, batch_size=4, epochs=1, learning_rate=0.01
    )
    trainer.train()
    return {name: whole(one).flatten().tolist() for name, one in sorted(trainer.backend.model_tensors().items())}


def differ(backend: str) -> None:
    """Make another model on each rank."""
    size = 4 + int(os.environ["RANK"])
    make_trainer(backend, nn.Linear(4, size), rows(32, torch.float32), loss_fn=F.mse_loss, batch_size=4)


def case(name: str, backend: str, function: str, **options: Any) -> Case:
    environment = {} if "zero" in backend else {"ACCELERATE_USE_CPU": "true"}
    return Case(name, f"test_start:{function}", {"backend": backend, **options}, environment=environment)


CASES = [
    *(case(f"{backend} {empty}", backend, "train", empty=empty) for backend in BACKENDS for empty in ([], [1])),
    *(case(f"{backend} nowhere", backend, "train", empty=[0, 1]) for backend in ("ddp", "fsdp")),
    case("others", "fsdp", "differ"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Found[list[Outcome]]:
    compile_once()
    return play(CASES, tmp_path_factory.mktemp("start"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_only_the_main_rank_has_train_as_those_that_all_have(
    backend: str, outcomes: dict[str, list[Outcome]]
) -> None:
    found = [outcomes[f"{backend} {empty}"] for empty in ([], [1])]
    for outcome in (one for pair in found for one in pair):
        assert outcome.code == 0, outcome.output
    assert len({str(outcome.result) for pair in found for outcome in pair}) == 1


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_weights_that_no_rank_has_are_an_error_on_all(backend: str, outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes[f"{backend} nowhere"]:
        assert outcome.code == 1
        assert "ConfigError: 9 tensors of the main rank's model are on the meta device" in outcome.output


def test_models_that_differ_are_an_error_on_all_that_names_where(outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes["others"]:
        assert outcome.code == 1
        assert (
            'The models of the ranks differ: `weight` is "torch.float32 of shape (4, 4), which trains" on rank 0'
            in outcome.output
        )
