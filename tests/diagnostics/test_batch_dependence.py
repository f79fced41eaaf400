"""What makes a step depend on its split into batches, found by trials."""

import math
from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diagnostics.faults import Pooled, Sentences
from recipes import Composed, Holding, rows, same, trainer_on_cpu, weights
from torch import nn

from omnitrain import Algorithm, Collator, DataError, MixUp, Trainer
from omnitrain.diagnostics.batch_dependence import BatchProbe

DROPPING = Composed(lambda model, x: model.body(F.dropout(x, 0.5, model.training)), body=nn.Linear(4, 1).double())
MIXING = Composed(lambda model, x: model.body(x - x.mean(0)), body=nn.Linear(4, 1).double())


class Reversed(Algorithm):
    """Mixes each sample with one from the other end of the batch."""

    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        x, y = batch
        return x + x.flip(0), y


def layers(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, 1)).double()


def rank_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - outputs.T).square().mean() + F.mse_loss(outputs, labels)


def center(samples: list[Any]) -> Any:
    x, y = Collator()(samples)
    return x - x.mean(), y


def find(model: nn.Module, data: Any = None, **options: Any) -> list[str]:
    options = {"loss_fn": F.mse_loss, **options}
    reasons = BatchProbe(trainer_on_cpu(Trainer, model, data or rows(16), batch_size=8, **options)).find_reasons()
    modules = dict(model.named_modules())
    for reason in reasons:
        assert 0 < reason.effect <= 1 and all(modules[name].training for name in reason.modules)
    return [reason.text for reason in reasons]


@pytest.mark.parametrize(("model", "options", "expected"), [
    (layers(nn.LayerNorm(8)), {}, []),
    (layers(nn.BatchNorm1d(8)), {}, ["BatchNorm1d '1' sees the batch"]),
    (layers(nn.Dropout(0.5)), {}, ["Dropout '1' draws random numbers per batch"]),
    (layers(nn.Dropout(0.0)), {}, []),
    (layers(nn.BatchNorm1d(8).eval()), {}, []),
    (layers(*[nn.BatchNorm1d(8) for _ in range(3)], nn.Dropout(0.5)), {},
     ["BatchNorm1d '1', '2' and others (3 in all) see the batch", "Dropout '4' draws random numbers per batch"]),
    (DROPPING, {}, ["Composed (the model itself) draws random numbers per batch"]),
    (MIXING, {}, ["the model (Composed) mixes the samples of a batch"]),
    (layers(), {"loss_fn": rank_loss}, ["the loss (rank_loss) compares the samples of a batch"]),
    (layers(), {"algorithms": [MixUp(alpha=0.4)]}, []),  # pairs stay together
    (layers(), {"algorithms": [Reversed()]}, ["Reversed transforms whole batches"]),
    (layers(), {"data_collator": center}, ["`data_collator` (center"]),
], ids=["none", "statistics", "dropout", "zero", "frozen", "several", "functional", "model", "loss", "pairs", "mix",
        "collator"])  # fmt: skip
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
    data, options = Sentences(has_mask=True), {"loss_fn": F.cross_entropy}
    assert find(Pooled(True), data, **options) == []
    for collator in (None, lambda samples: UserDict(Collator()(samples))):  # as BatchEncoding, which is no dict
        (reason,) = find(Pooled(False), data, data_collator=collator, **options)
        assert reason.startswith("padding changes the loss")
    model = Pooled(False, scale=1e-3)
    model.head = nn.Sequential(nn.Dropout(0.5), model.head)  # type: ignore[assignment]
    nn.init.constant_(model.head[1].bias, 0.01)
    reasons = [reason.partition(":")[0] for reason in find(model, data, **options)]
    assert reasons == ["padding changes the loss", "Dropout 'head.0' draws random numbers per batch"]


def test_sum_of_losses_is_no_dependence() -> None:
    """Weights and modes stay."""
    model = layers(nn.Dropout(0.0))
    before = weights(model)
    assert find(model, unit=Holding(model), loss_fn=None) == []
    assert model.training and model[1].training and same(before, weights(model))
