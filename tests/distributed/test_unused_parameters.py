"""Parameters that a step does not use under DDP: an error before the update, or none if DDP looks for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import asked_for, make_trainer
from forking import Case, play
from marks import thinned
from recipes import rows
from torch import nn

HERE = "test_unused_parameters"
CASES = [(backend, when) for backend in ("ddp", "hf2") for when in ("never", "later", "at the end")] + [
    ("ddp", "found")
]
QUICK = [("ddp", "later"), ("ddp", "at the end"), ("ddp", "found"), ("hf2", "never")]


class Experts(nn.Module):
    """Has layers of which steps do not use all; "later": from the third on; "at the end": in the fourth alone."""

    def __init__(self, when: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.first, self.second, self.third = (nn.Linear(4, 1) for _ in range(4))
        self.when, self.passes = when, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.base(x)
        if self.training:
            self.passes += 1
        if self.passes <= {"later": 4, "at the end": 6}.get(self.when, 0):  # two passes in a step
            output = output + self.first(x) + self.second(x) + self.third(x)
        return output


def train(backend: str, when: str) -> dict[str, Any]:
    """Train for 4 steps of two micro-batches; return the error, and the steps before it."""
    model, options = Experts(when), {"find_unused_parameters": True} if when == "found" else {}
    trainer = make_trainer(
        backend, model, rows(16, torch.float32), loss_fn=F.mse_loss, batch_size=1, global_batch_size=4, epochs=1,
        learning_rate=0.01, **options,
    )  # fmt: skip
    try:
        trainer.train()
    except Exception as error:
        return {"raised": type(error).__name__, "message": str(error), "step": trainer.progress.step}
    return {"raised": "", "message": "", "step": trainer.progress.step}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """Each case on processes of its own, which an error ends."""
    cases = sorted(asked_for(request, "backend", "when"), key=CASES.index)
    return play(
        [Case(f"{backend}-{when}", f"{HERE}:train", {"backend": backend, "when": when}) for backend, when in cases],
        tmp_path_factory.mktemp("unused"),
    )


@pytest.mark.parametrize(("backend", "when"), thinned(CASES, QUICK))
def test_unused_parameters_raise_before_the_update(outcomes: Any, backend: str, when: str) -> None:
    for number, outcome in enumerate(outcomes[f"{backend}-{when}"]):
        rank = outcome.result
        if when == "found":
            assert rank == {"raised": "", "message": "", "step": 4}
            continue
        assert rank["raised"] == "DistributedError" and "find_unused_parameters=True" in rank["message"]
        expected = "6 parameters on rank {}, for whose gradients DDP waits: first.weight, first.bias, second.weight, "
        assert expected.format(number) + "second.bias, third.weight, ..." in rank["message"]
        assert rank["step"] == {"never": 0, "later": 2, "at the end": 3}[when]
