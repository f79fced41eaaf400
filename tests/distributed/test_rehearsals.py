"""Checks and plans on two processes: they leave no trace, and all ranks get the same result."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import pytest
import retentive
import torch
from forking import Case, Found, current_rank, play
from torch import nn
from torch.utils.data import Dataset

from omnitrain import AccelerateTrainer, HFTrainer

HERE = "test_rehearsals"
KINDS = {"ddp": AccelerateTrainer, "hf": HFTrainer, "fsdp": AccelerateTrainer}


def run(kind: str, rehearses: bool) -> dict[str, Any]:
    """Train on this rank, after a check and a plan if asked for; return digests."""
    retentive.COLLATING.manual_seed(3)
    options: dict[str, Any] = {}
    if kind == "fsdp":
        from accelerate import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    trainer = KINDS[kind](
        retentive.Noisy(), train_dataset=retentive.Drawn(40), eval_dataset=retentive.Drawn(8), batch_size=4,
        loss_fn=nn.CrossEntropyLoss(), data_collator=retentive.collate, learning_rate=1e-2, epochs=1,
        lr_scheduler="cosine", progress_bar=False, **options,
    )  # fmt: skip
    outcome: dict[str, Any] = {}
    if rehearses:
        result = trainer.check()
        outcome["findings"] = [(finding.check, finding.where) for finding in result.findings]
        outcome["outcomes"] = result.outcomes
        plan = trainer.plan()
        outcome["plan"] = plan.length, plan.counts, plan.memory["weights"], plan.memory["optimizer"]
        sizes = [tensor.nbytes for tensor in trainer.get_model().state_dict().values()]
        outcome["bytes"] = sum(sizes)
    metrics = trainer.train()
    tensors = trainer.backend.model_tensors()
    content = b"".join(trainer.backend.local_shard(tensors[name]).numpy().tobytes() for name in sorted(tensors))
    history = metrics["train_metrics_history"], metrics["valid"]
    return {**outcome, "weights": hashlib.sha256(content).hexdigest(), "history": history}


class Augmented(Dataset[dict[str, Any]]):
    """Texts of 3 to 7 words; on the second rank, each reading of one gives others."""

    def __init__(self) -> None:
        self.turns = itertools.count() if current_rank() else itertools.repeat(0)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"words": torch.full((3 + index % 5,), 1 + next(self.turns) % 7), "labels": index % 3}


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.body(words).sum(1)


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    words = nn.utils.rnn.pad_sequence([sample["words"] for sample in samples], batch_first=True)
    return {"words": words, "labels": torch.tensor([sample["labels"] for sample in samples])}


def check_augmented() -> str:
    """Return what the check of padding says with sharded weights."""
    from accelerate import FullyShardedDataParallelPlugin

    trainer = AccelerateTrainer(
        Texts(), train_dataset=Augmented(), batch_size=4, loss_fn=nn.CrossEntropyLoss(), data_collator=pad,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), epochs=1, progress_bar=False, timeout=60,
    )  # fmt: skip
    return trainer.check().outcomes["padding"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Found:
    cases = [
        Case(f"{kind}-{rehearses}", f"{HERE}:run", {"kind": kind, "rehearses": rehearses})
        for kind in KINDS
        for rehearses in (False, True)
    ]
    cases.append(Case("augmented", f"{HERE}:check_augmented"))
    return play(cases, tmp_path_factory.mktemp("rehearsals"))


@pytest.mark.parametrize("kind", KINDS)
def test_rehearsals_leave_no_trace_on_two_ranks(outcomes: Found, kind: str) -> None:
    plain, rehearsed = ([rank.result for rank in outcomes[f"{kind}-{flag}"]] for flag in (False, True))
    for before, after in zip(plain, rehearsed, strict=True):
        assert (before["weights"], before["history"]) == (after["weights"], after["history"])
    first, second = rehearsed
    assert first["findings"] == second["findings"] and first["outcomes"] == second["outcomes"]
    length, counts, held_bytes, optimizer_bytes = first["plan"]
    assert first["plan"] == second["plan"] and counts == {"evaluations": 1, "saves": 0}
    assert ["mixing", "BatchNorm1d 'body.1'"] in first["findings"]
    assert (length["steps"], length["samples"], length["samples_per_step"]) == (5, 40, 8)
    if kind == "fsdp":  # each rank has about half of the parameters
        assert held_bytes < 0.75 * first["bytes"] and optimizer_bytes < 1.5 * first["bytes"]
        tried = [name for name, outcome in first["outcomes"].items() if "gradients of sharded weights" not in outcome]
        assert tried == ["loss", "shapes", "mixing", "padding", "labels", "features", "overlap"]
    else:
        assert held_bytes == first["bytes"] and optimizer_bytes > first["bytes"]


def test_check_of_padding_agrees_on_random_samples(outcomes: Found) -> None:
    """No rank runs a pass for which the others do not come."""
    first, second = (rank.result for rank in outcomes["augmented"])
    assert first == second == "not tried: another rank reads other samples"
