"""What mixing and smoothing do to a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omnitrain import ConfigError, DataError, LabelSmoothing, MixUp
from omnitrain.settings import Settings

TRAINER: Any = SimpleNamespace(settings=Settings())


def test_inputs_and_labels_are_mixed_by_the_same_factor_with_the_same_partner() -> None:
    x = torch.eye(4)  # each sample is its own class: mixed inputs and mixed labels must be equal
    mixed, labels = MixUp(num_classes=4, alpha=1.0).transform_batch(TRAINER, (x, torch.arange(4)))
    assert torch.equal(mixed, labels) and not torch.equal(mixed, x)
    torch.testing.assert_close(labels.sum(dim=1), torch.ones(4))


def test_a_dict_keeps_its_keys_and_what_cannot_be_mixed() -> None:
    batch = {"x": torch.randn(4, 2), "ids": torch.arange(4), "labels": torch.tensor([0, 1, 0, 1])}
    mixed = MixUp(num_classes=2).transform_batch(TRAINER, batch)
    assert list(mixed) == ["x", "ids", "labels"] and torch.equal(mixed["ids"], batch["ids"])
    assert mixed["labels"].shape == (4, 2)


def test_the_draw_is_reproducible_from_the_training_generator() -> None:
    batch = (torch.randn(4, 2), torch.randn(4, 1))
    torch.manual_seed(5)
    first = MixUp().transform_batch(TRAINER, batch)
    torch.manual_seed(5)
    assert torch.equal(first[0], MixUp().transform_batch(TRAINER, batch)[0])


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(ConfigError, match="alpha"):
        MixUp(alpha=0)
    with pytest.raises(ConfigError, match="num_classes"):
        MixUp().transform_batch(TRAINER, (torch.randn(2, 2), torch.tensor([0, 1])))
    with pytest.raises(DataError, match="labels"):
        MixUp().transform_batch(TRAINER, torch.randn(2, 2))


def test_label_smoothing_gives_what_torch_gives() -> None:
    logits, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    _, smooth = LabelSmoothing(3, 0.2).transform_batch(TRAINER, (logits, labels))
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.2)
    torch.testing.assert_close(torch.nn.functional.cross_entropy(logits, smooth), expected)
    with pytest.raises(ConfigError, match="smoothing"):
        LabelSmoothing(3, 1.0)


@pytest.mark.parametrize("algorithm", [MixUp(num_classes=2), LabelSmoothing(2)])
def test_labels_are_those_that_the_trainer_was_told_of(algorithm: Any) -> None:
    trainer: Any = SimpleNamespace(settings=Settings(label_names=["kind"]))
    batch = {"x": torch.randn(4, 2), "kind": torch.tensor([0, 1, 0, 1]), "labels": torch.arange(4)}
    changed = algorithm.transform_batch(trainer, batch)
    assert changed["kind"].shape == (4, 2)
    assert torch.equal(changed["labels"], batch["labels"])


@pytest.mark.parametrize("algorithm", [MixUp(num_classes=2), LabelSmoothing(2)])
def test_labels_that_it_cannot_change_are_told_with_the_remedy(algorithm: Any) -> None:
    x, kind = torch.randn(4, 2), torch.tensor([0, 1, 0, 1])
    with pytest.raises(DataError, match=r"the keys 'x', 'kind'.*label_names=\['kind'\]"):
        algorithm.transform_batch(TRAINER, {"x": x, "kind": kind})
    several: Any = SimpleNamespace(settings=Settings(label_names=["kind", "other"]))
    with pytest.raises(DataError, match="has several of them"):
        algorithm.transform_batch(several, {"x": x, "kind": kind, "other": kind})
    for odd in (-100, 2):
        with pytest.raises(DataError, match="labels from 0 to 1"):
            algorithm.transform_batch(TRAINER, (x, kind + odd))
