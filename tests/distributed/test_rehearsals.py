"""Checks and plans on two processes: they leave no trace, and all ranks get the same result."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import retentive
import torch
from backends import make_trainer, tensors_of
from forking import Case, Found, current_rank, play
from torch import nn
from torch.utils.data import Dataset

HERE = "test_rehearsals"
BACKENDS = ("ddp", "hf2", "fsdp")


def run(backend: str, rehearses: bool) -> dict[str, Any]:
    retentive.COLLATING.manual_seed(3)
    trainer = make_trainer(
        backend, retentive.Noisy(), retentive.Drawn(40), retentive.Drawn(8), batch_size=4,
        loss_fn=nn.CrossEntropyLoss(), data_collator=retentive.collate, learning_rate=1e-2, epochs=1,
        lr_scheduler="cosine",
    )  # fmt: skip
    outcome: dict[str, Any] = {}
    if rehearses:
        result, plan = trainer.check(), trainer.plan()
        outcome = {
            "findings": [(finding.check, finding.where) for finding in result.findings], "outcomes": result.outcomes,
            "plan": (plan.length, plan.counts, plan.memory["weights"], plan.memory["optimizer"]),
            "bytes": sum(tensor.nbytes for tensor in trainer.get_model().state_dict().values()),
        }  # fmt: skip
    metrics = trainer.train()
    weights = {name: tensor.tolist() for name, tensor in tensors_of(trainer).items()}
    return {**outcome, "trained": [weights, metrics["train_metrics_history"], metrics["valid"]]}


class Augmented(Dataset[dict[str, Any]]):
    """Texts of 3 to 7 words; on the second rank, each reading of one gives others."""

    def __init__(self) -> None:
        self.turns = itertools.count() if current_rank() else itertools.repeat(0)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"words": torch.full((3 + index % 5,), 1 + next(self.turns) % 7), "labels": index % 3}


class Texts(nn.Sequential):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return super().forward(words).sum(1)


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    words = nn.utils.rnn.pad_sequence([sample["words"] for sample in samples], batch_first=True)
    return {"words": words, "labels": torch.tensor([sample["labels"] for sample in samples])}


def check_augmented() -> str:
    options = {"batch_size": 4, "loss_fn": nn.CrossEntropyLoss(), "data_collator": pad, "epochs": 1, "timeout": 60}
    return (
        make_trainer("fsdp", Texts(nn.Embedding(8, 4), nn.Linear(4, 3)), Augmented(), **options)
        .check()
        .outcomes["padding"]
    )


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Found:
    cases = [
        Case(f"{backend}-{rehearses}", f"{HERE}:run", {"backend": backend, "rehearses": rehearses})
        for backend, rehearses in itertools.product(BACKENDS, (False, True))
    ]
    return play([*cases, Case("augmented", f"{HERE}:check_augmented")], folder)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rehearsals_leave_no_trace_on_two_ranks(outcomes: Found, backend: str) -> None:
    plain, rehearsed = ([rank.result for rank in outcomes[f"{backend}-{flag}"]] for flag in (False, True))
    assert [rank["trained"] for rank in plain] == [rank["trained"] for rank in rehearsed]
    first, second = rehearsed
    assert {**first, "bytes": 0} == {**second, "bytes": 0}
    length, counts, weight_bytes, optimizer_bytes = first["plan"]
    assert counts == {"evaluations": 1, "saves": 0} and ["mixing", "BatchNorm1d 'body.1'"] in first["findings"]
    assert (length["steps"], length["samples"], length["samples_per_step"]) == (5, 40, 8)
    if backend == "fsdp":  # each rank has about half of the parameters
        assert weight_bytes < 0.75 * first["bytes"] and optimizer_bytes < 1.5 * first["bytes"]
        tried = [name for name, outcome in first["outcomes"].items() if "gradients of sharded weights" not in outcome]
        assert tried == ["loss", "shapes", "mixing", "padding", "labels", "features", "overlap"]
    else:
        assert weight_bytes == first["bytes"] and optimizer_bytes > first["bytes"]


def test_check_of_padding_agrees_on_random_samples(outcomes: Found) -> None:
    """No rank runs a pass for which the others do not come."""
    first, second = (rank.result for rank in outcomes["augmented"])
    assert first == second == "not tried: another rank reads other samples"
