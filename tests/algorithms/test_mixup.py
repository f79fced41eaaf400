"""MixUp, CutMix and label smoothing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import VOCABULARY, Tokens, gpt

from omnitrain import ConfigError, CutMix, DataError, LabelSmoothing, MixUp, Progress, StepOutput
from omnitrain.arguments import Settings
from omnitrain.model.losses import LossMean
from omnitrain.model.units import ModelUnit


def trainer(step: int = 0, seed: int = 42, **settings: Any) -> Any:
    return SimpleNamespace(
        settings=Settings(**settings), progress=Progress(step=step), seed=seed, batch_size=4, model=torch.nn.Identity(),
        loss_mean=LossMean(),
    )  # fmt: skip


TRAINER = trainer()


def test_mixup_mixes_inputs_and_labels_by_the_same_share() -> None:
    x = torch.eye(4)  # each sample is its own class: mixed inputs and mixed labels must be equal
    mixed, labels = MixUp(num_classes=4, alpha=1.0).transform_batch(TRAINER, (x, torch.arange(4)))
    assert torch.equal(mixed, labels) and not torch.equal(mixed, x)
    torch.testing.assert_close(labels.sum(dim=1), torch.ones(4))
    share = labels[0, 0]
    assert share >= 0.5 and torch.equal(labels[2], torch.stack([share * 0, share * 0, share, labels[0, 1]]))
    batch = {"x": torch.randn(4, 2), "ids": torch.arange(4), "labels": torch.tensor([0, 1, 0, 1])}
    mixed = MixUp(num_classes=2).transform_batch(TRAINER, batch)
    assert list(mixed) == ["x", "ids", "labels"] and torch.equal(mixed["ids"], batch["ids"])
    assert mixed["labels"].shape == (4, 2)


@pytest.mark.parametrize("make", [MixUp, CutMix])
def test_mixing_depends_on_step_and_seed_not_on_the_split(make: Any) -> None:
    x, y = torch.randn(8, 1, 6, 6), torch.randn(8, 1)
    full = make(alpha=1.0).transform_batch(TRAINER, (x, y))
    parts = [make(alpha=1.0).transform_batch(TRAINER, (x[i : i + 2], y[i : i + 2])) for i in range(0, 8, 2)]
    assert all(torch.equal(torch.cat([part[i] for part in parts]), full[i]) for i in range(2))
    for other in (trainer(step=1), trainer(seed=7)):
        assert not torch.equal(make(alpha=1.0).transform_batch(other, (x, y))[0], full[0])


@pytest.mark.parametrize("make", [MixUp, CutMix])
def test_mixing_leaves_a_single_sample_unchanged(make: Any) -> None:
    x, y = torch.randn(3, 1, 4, 4), torch.randn(3, 1)
    mixed, labels = make(alpha=1.0).transform_batch(TRAINER, (x, y))
    torch.testing.assert_close(mixed[2], x[2])
    torch.testing.assert_close(labels[2], y[2])
    for size, split in ((1, None), (4, 1), (4, "auto")):
        with pytest.raises(ConfigError, match=f"{make.__name__}.*`(micro)?batch_size='?{1 if size == 1 else split}"):
            make().set_up(SimpleNamespace(batch_size=size, settings=Settings(microbatch_size=split)))


def test_cutmix_mixes_labels_by_the_area_of_the_box() -> None:
    batch = {"x": torch.stack([torch.full((1, 7, 5), float(i)) for i in range(2)]), "labels": torch.arange(2)}
    for step in range(6):
        mixed, labels = CutMix(num_classes=2).transform_batch(trainer(step), batch).values()
        torch.testing.assert_close(labels[0, 1], mixed[0].mean())
        torch.testing.assert_close(labels[1, 0], 1 - mixed[1].mean())


def test_cutmix_draws_boxes_up_to_the_full_image() -> None:
    """The share of a box is uniform in the paper; what lies outside of the image is cut off.

    A side of length s has s - s^2 / 4 inside on average, and s^2 is uniform: the mean area is 1/2 - 1/5 + 1/48.
    """
    batch = (torch.stack([torch.zeros(1, 32, 32), torch.ones(1, 32, 32)]), torch.arange(2))
    areas = [float(CutMix(num_classes=2).transform_batch(trainer(step), batch)[1][0, 1]) for step in range(600)]
    assert sum(areas) / len(areas) == pytest.approx(1 / 2 - 1 / 5 + 1 / 48, abs=0.03)
    assert sum(area > 0.5 for area in areas) / len(areas) == pytest.approx(0.18, abs=0.04)


def test_label_smoothing_equals_torch() -> None:
    logits, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    _, smooth = LabelSmoothing(3, 0.2).transform_batch(TRAINER, (logits, labels))
    expected = F.cross_entropy(logits, labels, label_smoothing=0.2)
    torch.testing.assert_close(F.cross_entropy(logits, smooth), expected)


@pytest.mark.parametrize("last", [True, False], ids=["classes last", "classes second"])
@pytest.mark.parametrize("sums", [True, False], ids=["sum", "mean"])
def test_label_smoothing_ignores_labels_that_do_not_count(last: bool, sums: bool) -> None:
    scores, labels = torch.randn(2, 3, 4, 5), torch.randint(0, 3, (2, 4, 5))
    labels[:, 1:, 2:] = -100
    batch = {"x": scores, "labels": labels}
    smoothing, reduction = LabelSmoothing(3, 0.2), "sum" if sums else "mean"
    assert smoothing.transform_batch(TRAINER, batch) is batch
    plain = F.cross_entropy(scores, labels, reduction=reduction)
    outputs = scores.movedim(1, -1) if last else scores
    output = StepOutput(plain, outputs, labels, num_targets=int((labels != -100).sum()) if sums else None)
    expected = F.cross_entropy(scores, labels, reduction=reduction, label_smoothing=0.2)
    torch.testing.assert_close(smoothing.transform_output(TRAINER, output).loss, expected)
    with pytest.raises(DataError, match=r"4 classes.*\(2, 4, 5\)"):
        LabelSmoothing(4).transform_output(TRAINER, StepOutput(plain, outputs, labels))
    with pytest.raises(DataError, match="the outputs are a NoneType"):
        LabelSmoothing(4).transform_output(TRAINER, StepOutput(plain, None, labels))


def test_label_smoothing_shifts_labels_of_causal_models() -> None:
    model, samples = gpt(), Tokens(4)
    ids, labels = (torch.stack([samples[i][key] for i in range(4)]) for key in ("input_ids", "labels"))
    outputs = model(input_ids=ids, labels=labels)
    output = StepOutput(outputs.loss, outputs.logits, labels)
    unshifted = SimpleNamespace(loss_mean=ModelUnit(model).loss_mean)
    smooth = LabelSmoothing(VOCABULARY, 0.3).transform_output(unshifted, output)
    scores, counted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    torch.testing.assert_close(smooth.loss, F.cross_entropy(scores, counted, label_smoothing=0.3), check_dtype=False)


X, KIND = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
UNSUPPORTED: list[tuple[Any, Any, str]] = [
    (MixUp(), (X, KIND), "num_classes"),
    (MixUp(2), (X.long(), KIND), "MixUp mixes inputs, and found no floating-point tensors"),
    (MixUp(), X, "labels"),
    (CutMix(), (X, torch.zeros(4, 1)), "images of one size.*found none"),
    *((algorithm, batch, words) for algorithm in (MixUp(num_classes=2), LabelSmoothing(2)) for batch, words in (
        ({"x": X, "kind": KIND}, r"the keys 'x', 'kind'.*label_names=\['kind'\]"),
        ({"x": X, "first": KIND, "second": KIND}, "has several of them"),
        *(((X, KIND + number), "labels from 0 to 1") for number in (-100, 2)),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "batch", "words"), UNSUPPORTED)
def test_unsupported_labels_are_an_error(algorithm: Any, batch: Any, words: str) -> None:
    settings = {"label_names": ["first", "second"]} if "several" in words else {}
    with pytest.raises(ConfigError if words == "num_classes" else DataError, match=words):
        algorithm.transform_batch(trainer(**settings), batch)
