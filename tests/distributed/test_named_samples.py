"""An error on one rank names its samples and its step, on that rank and in what the others are told of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from forking import Case, Found, Outcome, play  # noqa: E402

from omnitrain import AccelerateTrainer, HFTrainer  # noqa: E402

pytestmark = pytest.mark.distributed

BAD = 13  # of step 2 on rank 1


def train(wrapping: str, evaluates: bool = False) -> None:
    data = TensorDataset(torch.randn(32, 4), torch.arange(32) % 3)
    data.tensors[1][BAD] = 7
    options: dict[str, Any] = {}
    if wrapping == "fsdp":
        from accelerate.utils import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    if evaluates:
        good = TensorDataset(data.tensors[0], torch.arange(32) % 3)
        options |= {"eval_dataset": data, "eval_steps": 2}
        data = good
    trainer: Any = (HFTrainer if wrapping == "hf" else AccelerateTrainer)(
        nn.Sequential(nn.Linear(4, 3)), train_dataset=data, loss_fn=F.cross_entropy, batch_size=4, shuffle=False,
        progress_bar=False, **options,
    )  # fmt: skip
    trainer.train()


CASES = [
    *(Case(wrapping, "test_named_samples:train", {"wrapping": wrapping}) for wrapping in ("ddp", "hf", "fsdp")),
    Case("evaluation", "test_named_samples:train", {"wrapping": "ddp", "evaluates": True}),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Found[list[Outcome]]:
    return play(CASES, tmp_path_factory.mktemp("samples"))


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_all_ranks_say_which_sample_of_which_rank_has_failed(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    # a forward pass over sharded weights needs all ranks: there the samples are not run again
    samples = "samples 12, 13, 14, 15" if name == "fsdp" else "sample 13"
    which = "evaluation" if name == "evaluation" else "training"
    place = "the evaluation after step 2" if name == "evaluation" else "step 2"
    for outcome in outcomes[name]:
        assert outcome.code == 1, outcome.output
        assert f"Raised for {samples} of the {which} set" in outcome.output, outcome.output
        assert f"Where: {place} (epoch 1), rank 1." in outcome.output
    assert "IndexError: Target 7 is out of bounds." in outcomes[name][1].output
