"""Samples and step in an error of one rank, reported by all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forking import Case, Found, Outcome, play
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import AccelerateTrainer, HFTrainer

CASES = ("ddp", "hf", "fsdp", "evaluation")


def train(kind: str) -> None:
    """Train on, or evaluate, a set whose sample 13 has a bad label: in step 2, on rank 1."""
    x, good = torch.randn(32, 4), torch.arange(32) % 3
    bad = TensorDataset(x, good.index_fill(0, torch.tensor(13), 7))
    options: dict[str, Any] = {"train_dataset": bad}
    if kind == "fsdp":
        from accelerate.utils import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    elif kind == "evaluation":
        options = {"train_dataset": TensorDataset(x, good), "eval_dataset": bad, "eval_steps": 2}
    trainer: Any = (HFTrainer if kind == "hf" else AccelerateTrainer)(
        nn.Sequential(nn.Linear(4, 3)), loss_fn=F.cross_entropy, batch_size=4, shuffle=False, progress_bar=False,
        **options,
    )  # fmt: skip
    trainer.train()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Found[list[Outcome]]:
    cases = [Case(kind, "test_named_samples:train", {"kind": kind}) for kind in CASES]
    return play(cases, tmp_path_factory.mktemp("samples"))


@pytest.mark.parametrize("kind", CASES)
def test_error_on_one_rank_reports_its_samples_on_all(kind: str, outcomes: dict[str, list[Outcome]]) -> None:
    # a forward pass over sharded weights needs all ranks: there the samples are not run again
    samples = "samples 12, 13, 14, 15" if kind == "fsdp" else "sample 13"
    dataset, place = ("evaluation", "the evaluation after step 2") if kind == "evaluation" else ("training", "step 2")
    for outcome in outcomes[kind]:
        assert outcome.code == 1, outcome.output
        assert f"Raised for {samples} of the {dataset} set" in outcome.output, outcome.output
        assert f"Where: {place} (epoch 1), rank 1." in outcome.output
    assert "IndexError: Target 7 is out of bounds." in outcomes[kind][1].output
