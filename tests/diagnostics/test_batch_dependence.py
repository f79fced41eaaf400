"""What makes a step depend on its split into batches, found by trials."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import Holding, rows, same, trainer_on_cpu, weights
from torch import nn
from torch.utils.data import Dataset

from omnitrain import Algorithm, Collator, DataError, MixUp, Trainer
from omnitrain.diagnostics.batch_dependence import BatchProbe


class Words(Dataset[dict[str, torch.Tensor]]):
    """Sentences of 2 to 6 words with a class."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = 2 + index % 5
        words = 1 + torch.arange(index, index + length) % 9
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.tensor(index % 2)}


class Mean(nn.Module):
    """Averages word vectors, with or without those of the padding."""

    def __init__(self, is_masked: bool) -> None:
        super().__init__()
        self.words, self.head, self.is_masked = nn.Embedding(10, 4), nn.Linear(4, 2), is_masked

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        mask = attention_mask if self.is_masked else torch.ones_like(attention_mask)
        vectors = (self.words(input_ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        logits = self.head(vectors)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Custom(nn.Module):
    """Applies a function to its inputs."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.function = nn.Linear(4, 1).double(), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.function(self, x))


DROPPING = Custom(lambda model, x: F.dropout(x, 0.5, model.training))
MIXING = Custom(lambda model, x: x - x.mean(0))


class Reversed(Algorithm):
    """Mixes each sample with one from the other end of the batch."""

    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        x, y = batch
        return x + x.flip(0), y


def layers(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, 1)).double()


def rank_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compares the outputs of a batch with each other."""
    return (outputs - outputs.T).square().mean() + F.mse_loss(outputs, labels)


def find(model: nn.Module, data: Any = None, **options: Any) -> list[str]:
    options = {"loss_fn": None if data is not None else F.mse_loss, **options}
    trainer = trainer_on_cpu(Trainer, model, data or rows(16), batch_size=8, **options)
    reasons = BatchProbe(trainer).find_reasons()
    modules = dict(model.named_modules())
    for reason in reasons:
        assert 0 < reason.effect <= 1 and all(modules[name].training for name in reason.modules)
    return [reason.text for reason in reasons]


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        (layers(nn.LayerNorm(8)), {}, []),
        (layers(nn.BatchNorm1d(8)), {}, ["BatchNorm1d '1' sees the batch"]),
        (layers(nn.Dropout(0.5)), {}, ["Dropout '1' draws random numbers per batch"]),
        (layers(nn.Dropout(0.0)), {}, []),
        (layers(nn.BatchNorm1d(8).eval()), {}, []),
        (
            layers(*[nn.BatchNorm1d(8) for _ in range(3)], nn.Dropout(0.5)), {},
            ["BatchNorm1d '1', '2' and others (3 in all) see the batch", "Dropout '4' draws random numbers per batch"],
        ),
        (DROPPING, {}, ["Custom (the model itself) draws random numbers per batch"]),
        (MIXING, {}, ["the model (Custom) mixes the samples of a batch"]),
        (layers(), {"loss_fn": rank_loss}, ["the loss (rank_loss) compares the samples of a batch"]),
        (layers(), {"algorithms": [MixUp(alpha=0.4)]}, []),  # pairs stay together
        (layers(), {"algorithms": [Reversed()]}, ["Reversed transforms whole batches"]),
    ],
    ids=["none", "statistics", "dropout", "zero", "frozen", "several", "functional", "model", "loss", "pairs", "mix"],
)  # fmt: skip
def test_reason_is_named(model: nn.Module, options: dict[str, Any], expected: list[str]) -> None:
    reasons = find(model, **options)
    assert len(reasons) == len(expected)
    assert all(reason.startswith(text) for reason, text in zip(reasons, expected, strict=True)), reasons


def test_loss_that_is_not_finite_is_no_reason() -> None:
    """NaN is not equal to itself, which would excuse every difference."""
    with pytest.raises(DataError, match="The loss of the first samples is nan"):
        find(layers(), loss_fn=lambda outputs, labels: F.mse_loss(outputs, labels) * math.nan)


def test_unmasked_padding_is_named() -> None:
    """Also with a head with small weights, by which all samples have almost the same scores, and with a dropout."""
    torch.manual_seed(0)
    assert find(Mean(is_masked=True), Words()) == []
    for options in ({}, {"data_collator": lambda samples: UserDict(Collator()(samples))}):  # as BatchEncoding, no dict
        (reason,) = find(Mean(is_masked=False), Words(), **options)
        assert reason.startswith("padding changes the loss")
    model = Mean(is_masked=False)
    model.head = nn.Sequential(nn.Dropout(0.5), model.head)  # type: ignore[assignment]
    with torch.no_grad():
        model.head[1].weight.mul_(1e-3)
        model.head[1].bias.fill_(0.01)
    reasons = [reason.partition(":")[0] for reason in find(model, Words())]
    assert reasons == ["padding changes the loss", "Dropout 'head.0' draws random numbers per batch"]


def test_collator_of_other_rows_is_named() -> None:
    def collate(samples: list[Any]) -> Any:
        x, y = Collator()(samples)
        return x - x.mean(), y

    (reason,) = find(layers(), data_collator=collate)
    assert reason.startswith("`data_collator` (") and "collate" in reason


def test_sum_of_losses_is_no_dependence() -> None:
    """Weights and modes stay."""
    model = layers(nn.Dropout(0.0))
    before = weights(model)
    assert find(model, unit=Holding(model), loss_fn=None) == []
    assert model.training and model[1].training and same(before, weights(model))
