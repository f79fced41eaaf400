"""Each algorithm of the table in docs/algorithms.md: a step is the same in every split, with class weights too."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import Sentences, Tagger, distance, fit, same, small_trainer, weights
from torch import nn
from torch.utils.data import TensorDataset

import omnitrain
from omnitrain import Algorithm, ConfigError, CrossEntropy, LabelSmoothing, Trainer, WeightedLosses
from omnitrain.data.collation import as_probabilities, get_labels, with_labels

CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 0.3], dtype=torch.float64)
TOKEN_WEIGHTS = torch.tensor([1.0, 4.0, 0.3, 2.0, 0.1], dtype=torch.float64)
SPLITS = ((8, 1), (2, 4))

ALGORITHMS: dict[str, Any] = {
    "EMA": lambda: omnitrain.EMA(0.8),
    "SWA": lambda: omnitrain.SWA("0.3dur"),
    "LayerFreezing": lambda: omnitrain.LayerFreezing(0.0, layers=["0", "2", "5"]),
    "GradualUnfreezing": lambda: omnitrain.GradualUnfreezing(0.5, layers=["0", "2", "5"]),
    "GradientClipping": lambda: omnitrain.GradientClipping("value", 0.01),
    "LabelSmoothing": lambda: LabelSmoothing(3, 0.2),
    "MixUp": lambda: omnitrain.MixUp(3, alpha=1.0),
    "CutMix": lambda: omnitrain.CutMix(3),
    "SeqLengthWarmup": lambda: omnitrain.SeqLengthWarmup(6, 2, 1.0, 1),
    "ProgressiveResizing": lambda: omnitrain.ProgressiveResizing(0.5, 0.5, 0.2, 2),
    "MagnitudePruning": lambda: omnitrain.MagnitudePruning(0.5, end=3, every=1),
    "StochasticDepth": lambda: omnitrain.StochasticDepth(["2"], 0.5),
    "StraightThrough": lambda: omnitrain.StraightThrough(torch.round),
    "SpikeGuard": lambda: omnitrain.SpikeGuard(0.2, 8, "skip"),
    "SAM": lambda: omnitrain.SAM(0.5),
}
CHANGE_LABELS = ("LabelSmoothing", "MixUp")


class Tokenwise(nn.Module):
    """Scores of 5 classes for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.tagger = Tagger()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tagger.out(self.tagger.embed(ids))


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(16, 3)).double()


def images(size: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(size, 1, 8, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(pixels, torch.randint(0, 3, (size,), generator=generator))


def train(
    trainer_class: Any, split: tuple[int, int], *algorithms: Any, model: Any = None, data: Any = None, **options: Any
) -> Any:
    common = {"loss_fn": nn.CrossEntropyLoss(CLASS_WEIGHTS), "optimizer": "sgd", "max_grad_norm": None, "log_steps": 1}
    return fit(small_trainer(
        *algorithms, kind=trainer_class, model=model or network(), data=data or images(), batch_size=split[0],
        gradient_accumulation_steps=split[1], **{**common, **options},
    ))  # fmt: skip


def assert_same_in_every_split(trainer_class: Any, make: Any, build: Any = network, **options: Any) -> None:
    first, other = (train(trainer_class, split, make(), model=build(), **options) for split in SPLITS)
    assert distance(weights(first.model), weights(other.model)) <= 1e-12
    losses = [[row["train_loss"] for row in trainer.metrics["train_metrics_history"]] for trainer in (first, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_table_of_algorithms_is_complete() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    assert re.findall(r"^\| `(\w+)\(", page, re.MULTILINE) == list(ALGORITHMS)


@pytest.mark.parametrize(
    ("trainer_class", "name"),
    [*((Trainer, name) for name in ALGORITHMS), (omnitrain.AccelerateTrainer, "MixUp"), (omnitrain.HFTrainer, "MixUp")],
)
def test_class_weights_are_the_same_in_every_split(trainer_class: Any, name: str) -> None:
    of_tokens = {"build": Tokenwise, "data": Sentences(16), "loss_fn": CrossEntropy(TOKEN_WEIGHTS)}
    assert_same_in_every_split(trainer_class, ALGORITHMS[name], **(of_tokens if name == "SeqLengthWarmup" else {}))


@pytest.mark.parametrize("name", CHANGE_LABELS)
@pytest.mark.parametrize("make_loss", [
    lambda: CrossEntropy(CLASS_WEIGHTS, z_loss=1e-2),
    lambda: WeightedLosses({"ce": CrossEntropy(CLASS_WEIGHTS), "z": CrossEntropy(CLASS_WEIGHTS, z_loss=0.1)}),
    lambda: nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.1),
], ids=["z-loss", "several", "smoothed"])  # fmt: skip
def test_losses_of_probabilities_are_the_same_in_every_split(make_loss: Any, name: str) -> None:
    assert_same_in_every_split(Trainer, ALGORITHMS[name], loss_fn=make_loss())


def test_smoothed_classes_have_the_mean_of_torch() -> None:
    """Over rows, as labels of one dimension become probabilities."""
    x, labels = images(8).tensors
    expected = network()
    probabilities = F.one_hot(labels, 3).double() * 0.8 + 0.2 / 3
    loss = F.cross_entropy(expected(x), probabilities, CLASS_WEIGHTS)
    loss.backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    trainer = train(Trainer, (2, 4), LabelSmoothing(3, 0.2), data=images(8), epochs=1)
    assert distance(weights(trainer.model), weights(expected)) <= 1e-7  # probabilities are made in float32
    assert trainer.metrics["train_metrics_history"][0]["train_loss"] == pytest.approx(float(loss.detach()))


@pytest.mark.parametrize("shift", [False, True], ids=["plain", "shifted"])
def test_smoothed_tokens_have_the_mean_of_torch(shift: bool) -> None:
    """Over class weights, as `cross_entropy` has it for classes with `label_smoothing`."""
    first, *rest = (
        weights(train(Trainer, split, *algorithms, model=Tokenwise(), data=Sentences(16), loss_fn=loss).model)
        for split in SPLITS
        for algorithms, loss in (
            ([LabelSmoothing(5, 0.2)], CrossEntropy(TOKEN_WEIGHTS, shift=shift)),
            ([], CrossEntropy(TOKEN_WEIGHTS, shift=shift, label_smoothing=0.2)),
        )
    )
    assert max(distance(first, other) for other in rest) <= 1e-12


def test_microbatches_have_class_weights_too() -> None:
    trained = [train(Trainer, (8, 1), LabelSmoothing(3, 0.2), microbatch_size=size) for size in (None, 3)]
    assert distance(weights(trained[0].model), weights(trained[1].model)) <= 1e-12


WITHOUT_FIRST = torch.tensor([0.0, 4.0, 0.3], dtype=torch.float64)


def sorted_images() -> TensorDataset:
    """The first half of the images are of a class, so that some micro-batches have no other label."""
    pixels, labels = images().tensors
    return TensorDataset(pixels, labels.where(torch.arange(16) % 8 > 3, 0))


@pytest.mark.parametrize("name", [*CHANGE_LABELS, "CutMix"])
@pytest.mark.parametrize("make_loss", [nn.CrossEntropyLoss, CrossEntropy])
def test_labels_without_class_weight_count_as_probabilities(make_loss: Any, name: str) -> None:
    """Their rows do, in every split; a step of nothing else is made too."""
    options = {"data": sorted_images(), "loss_fn": make_loss(WITHOUT_FIRST), "shuffle": False}
    assert_same_in_every_split(Trainer, ALGORITHMS[name], **options)
    trainer = train(Trainer, (4, 1), LabelSmoothing(3, 0.2), **options)
    assert (trainer.progress.step, trainer.progress.skipped_steps) == (8, 0)
    assert all(math.isfinite(row["train_loss"]) for row in trainer.metrics["train_metrics_history"])


def alternate(trainer: Any, batch: Any) -> Any:
    """Make probabilities of labels in every other step."""
    if trainer.progress.step % 2:
        return batch
    return with_labels(batch, as_probabilities(get_labels(batch), 3).double(), ())


@pytest.mark.parametrize(("change", "class_weights", "skipped"), [
    (alternate, CLASS_WEIGHTS, 0),
    (lambda trainer, batch: (batch[0], 2 - batch[1]), torch.tensor([1.0, 2.0, 7.0]).double(), 0),
    (lambda trainer, batch: (batch[0] * 2, batch[1]), WITHOUT_FIRST, 4),  # labels stay, and count nothing
], ids=["probabilities", "other classes", "inputs"])  # fmt: skip
def test_custom_algorithm_is_the_same_in_every_split(change: Any, class_weights: torch.Tensor, skipped: int) -> None:
    """The mean is over the class weights of the labels that it returns."""
    make = type("Changing", (Algorithm,), {"transform_batch": lambda self, trainer, batch: change(trainer, batch)})
    options = {"data": sorted_images(), "loss_fn": nn.CrossEntropyLoss(class_weights), "shuffle": False}
    assert_same_in_every_split(Trainer, make, **options)
    assert train(Trainer, (4, 1), make(), **options).progress.skipped_steps == skipped


@pytest.mark.parametrize(("loss", "words"), [
    (CrossEntropy(z_loss=1e-2), r"parts 'loss_ce', 'loss_z'.* CrossEntropy\(label_smoothing=\.\.\.\)"),
    (WeightedLosses({"ce": CrossEntropy(), "other": CrossEntropy()}, {"other": 0.5}), "parts 'loss_ce', 'loss_oth"),
    (CrossEntropy([1.0, 0.0, 1.0, 1.0, 1.0]), "Class 1 has the class weight 0"),
], ids=["z-loss", "several", "class weight"])  # fmt: skip
def test_smoothed_tokens_with_other_parts_are_an_error(loss: Any, words: str) -> None:
    model = Tokenwise().float()
    before = weights(model)
    with pytest.raises(ConfigError, match=words):
        train(Trainer, (8, 1), LabelSmoothing(5, 0.2), model=model, data=Sentences(16), loss_fn=loss)
    assert same(before, weights(model))
