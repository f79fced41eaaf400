"""Models like torchvision's detectors: lists of images and targets, losses in training, objects in evaluation."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backends import make_trainer
from forking import Case, play
from marks import TRAINERS
from torch import nn

from omnitrain import DataError, StepOutput
from omnitrain.metrics.scorer import SampleList, per_sample


class Detector(nn.Module):
    """Finds as many boxes in an image as its first number says; its losses depend on the image alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: list[torch.Tensor], targets: Any = None) -> Any:
        if not self.training:
            return [{"boxes": image.new_full((int(image[0]), 4), float(image[0]))} for image in images]
        pairs = zip(images, targets, strict=True)
        errors = [self.scale * image.mean() - len(target["boxes"]) for image, target in pairs]
        return {"classification": torch.stack(errors).square().mean(), "loss_box_reg": self.scale.square()}


def samples(count: int) -> list[Any]:
    """Images of several sizes, each with as many boxes as its number modulo 3."""
    boxes = [{"boxes": torch.ones(number % 3, 4) * number} for number in range(count)]
    return [(torch.full((2 + i % 2,), float(i % 3)), target) for i, target in enumerate(boxes)]


def collate(batch: list[Any]) -> Any:
    return tuple(zip(*batch, strict=True))


class Counts:
    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []

    def __call__(self, eval_pred: Any) -> dict[str, float]:
        predictions, labels = eval_pred
        self.sizes.append((len(predictions), len(labels)))
        assert [len(image["boxes"]) for image in predictions] == [len(image["boxes"]) for image in labels]
        assert all(isinstance(image["boxes"], np.ndarray) for image in (*predictions, *labels))
        return {"map": sum(len(image["boxes"]) for image in predictions)}


def make(backend: str, **options: Any) -> Any:
    options = {"batch_size": 4, "eval_batch_size": 5, "epochs": 1, "optimization_metric": "map"} | options
    return make_trainer(backend, Detector(), samples(8), data_collator=collate, eval_dataset=samples(11), **options)


@pytest.mark.parametrize("backend", TRAINERS)
def test_detector_trains_and_is_scored_by_image(backend: str) -> None:
    counts = Counts()
    trainer = make(backend, compute_metrics=counts)
    metrics = trainer.train()
    assert counts.sizes[-1] == (11, 11)
    assert trainer.evaluate() == {"eval_map": 10.0} and metrics["best_valid"]["eval_map"] == 10.0
    row = metrics["train_metrics_history"][-1]
    assert row["train_loss"] == pytest.approx(row["train_loss_classification"] + row["train_loss_box_reg"])
    result = trainer.predict(samples(7))
    assert [len(image["boxes"]) for image in result.predictions] == [0, 1, 2, 0, 1, 2, 0]
    assert type(result.predictions) is list and len(result.labels) == 7


def test_metric_objects_get_lists_of_dicts() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Images(torchmetrics.Metric):
        higher_is_better = True

        def __init__(self) -> None:
            super().__init__()
            self.add_state("images", torch.tensor(0), dist_reduce_fx="sum")

        def update(self, preds: Any, target: Any) -> None:
            assert isinstance(preds, list) and isinstance(target, list) and len(preds) == len(target)
            assert all(isinstance(image["boxes"], torch.Tensor) for image in (*preds, *target))
            self.images += len(preds)

        def compute(self) -> torch.Tensor:
            return self.images

    trainer = make("native", compute_metrics=Images(), optimization_metric="Images")
    assert trainer.evaluate() == {"eval_Images": 11.0}


def test_unit_without_loss_in_evaluation_is_scored() -> None:
    class Unit:
        is_mixed = False

        def __call__(self, batch: Any) -> Any:
            return trainer.model(*batch)

        def evaluate(self, batch: Any) -> Any:
            images, targets = batch
            loss = torch.ones(()) if self.is_mixed and len(images) == 1 else None
            return StepOutput(loss, trainer.model(images), targets)

    trainer = make("native", unit=Unit(), compute_metrics=Counts())
    assert trainer.train()["best_valid"]["eval_map"] == 10.0
    Unit.is_mixed = True
    with pytest.raises(DataError, match="Some batches of the evaluation set have a loss, and others none"):
        trainer.evaluate()


def test_scalars_without_a_gradient_are_no_losses() -> None:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            error = super().forward(x).square().mean()
            return {"error": error, "accuracy": error.detach()}

    with pytest.raises(DataError, match="No loss found: the model returned a dict with the keys 'error', 'accuracy'"):
        make_trainer("native", Model(4, 1), torch.ones(8, 4), epochs=1).train()
    with pytest.raises(DataError, match="No loss found: the model returned a list of"):
        make("native", optimization_metric="loss").train()


def test_columns_stay_columns() -> None:
    heads = [torch.ones(2, 3), torch.ones(2, 4)]
    assert per_sample(heads, 2) is heads
    assert per_sample(tuple(heads), 2) == tuple(heads)
    assert isinstance(per_sample([torch.ones(1, 4), torch.ones(2, 4)], 2), SampleList)
    assert per_sample(torch.ones(2), 2).shape == (2,)
    assert per_sample(["a", "b"], 2) == ["a", "b"]


def evaluate(backend: str) -> list[float]:
    counts = Counts()
    trainer = make(backend, compute_metrics=counts)
    trainer.train()
    sizes = counts.sizes[-1] if int(os.environ["RANK"]) == 0 else (11, 11)
    return [*sizes, trainer.evaluate()["eval_map"], len(trainer.predict(samples(7)).predictions)]


@pytest.mark.processes
def test_detector_on_two_processes(tmp_path: Path) -> None:
    cases = [Case(name, "tests.trainer.test_detection:evaluate", {"backend": name}) for name in ("ddp", "hf2")]
    for outcomes in play(cases, tmp_path).values():
        assert [outcome.result for outcome in outcomes] == [[11, 11, 10.0, 7]] * 2
