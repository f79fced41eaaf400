"""Object detection: lists of images and of boxes, a model that returns losses in training and boxes in evaluation.

    python examples/object_detection.py

The detector has the interface of torchvision's: `model(images, targets)` returns a dict of losses in training, and
`model(images)` a dict of boxes and scores for each image in evaluation. So any of these takes its place:

    from torchvision.models.detection import fasterrcnn_resnet50_fpn
    model = fasterrcnn_resnet50_fpn(num_classes=2)

and `torchmetrics.detection.MeanAveragePrecision()` that of `recall`. The images are black with white rectangles, and
of two sizes, so there is nothing to download.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from omnitrain import MetricsDict, Trainer

CELL = 8  # pixels; each cell of an image says whether the centre of a box is in it, and where its edges are


class TinyDetector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Conv2d(32, 5, 1)  # a score, and the distances to the four edges in cells

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]] | None = None) -> Any:
        maps = [self.head(self.features(image[None]))[0] for image in images]
        if not self.training:
            return [self.boxes_of(cells) for cells in maps]
        assert targets is not None
        pairs = [self.losses_of(cells, target["boxes"]) for cells, target in zip(maps, targets, strict=True)]
        scores, edges = (torch.stack(losses).mean() for losses in zip(*pairs, strict=True))
        return {"loss_objectness": scores, "loss_box_reg": edges}

    def losses_of(self, cells: torch.Tensor, boxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of an image for boxes of shape (boxes, 4): left, top, right, bottom in pixels."""
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2
        columns, rows = (centres / CELL).long().unbind(1)
        is_object = torch.zeros_like(cells[0])
        is_object[rows, columns] = 1
        middles = (torch.stack([columns, rows], 1) + 0.5) * CELL
        distances = torch.cat([middles - boxes[:, :2], boxes[:, 2:] - middles], 1) / CELL
        weight = torch.tensor(cells[0].numel() / max(len(boxes), 1)).sqrt()
        score = F.binary_cross_entropy_with_logits(cells[0], is_object, pos_weight=weight)
        return score, F.smooth_l1_loss(cells[1:, rows, columns].T, distances, reduction="sum") / max(len(boxes), 1)

    def boxes_of(self, cells: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the boxes of an image, and their scores."""
        rows, columns = torch.nonzero(cells[0] > 0, as_tuple=True)
        middles = (torch.stack([columns, rows], 1) + 0.5) * CELL
        edges = cells[1:, rows, columns].T * CELL
        boxes = torch.cat([middles - edges[:, :2], middles + edges[:, 2:]], 1)
        scores = cells[0, rows, columns].sigmoid()
        return {"boxes": boxes, "scores": scores, "labels": torch.ones_like(rows)}


def make_images(count: int, seed: int) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return images of two sizes, each with one or two rectangles and their boxes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    samples = []
    for _ in range(count):
        size = 32 * draw(1, 3)
        image, boxes = torch.zeros(1, size, size), []
        for place in range(draw(1, 3)):
            left, top = 1 + place * size // 2, draw(1, size - 14)
            right, bottom = left + draw(8, 13), top + draw(8, 13)
            image[:, top:bottom, left:right] = 1
            boxes.append([left, top, right, bottom])
        target = {
            "boxes": torch.tensor(boxes, dtype=torch.float32),
            "labels": torch.ones(len(boxes), dtype=torch.int64),
        }
        samples.append((image, target))
    return samples


def collate(samples: list[Any]) -> tuple[Any, ...]:
    """Leave images and boxes as lists, since no two need to have the same shape: torchvision's `collate_fn`."""
    return tuple(zip(*samples, strict=True))


def overlap(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return intersection over union of all pairs of boxes, of shape (first, second)."""
    low, high = torch.maximum(first[:, None, :2], second[:, :2]), torch.minimum(first[:, None, 2:], second[:, 2:])
    shared = (high - low).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1) for boxes in (first, second)]
    return shared / (areas[0][:, None] + areas[1] - shared)


def recall(eval_pred: Any) -> dict[str, float]:
    """Return the share of boxes that are found; predictions and labels are lists with a dict for each image."""
    predictions, labels = eval_pred
    hits = total = 0
    for prediction, target in zip(predictions, labels, strict=True):
        overlaps = overlap(torch.tensor(target["boxes"]), torch.tensor(prediction["boxes"]))
        hits += int((overlaps > 0.5).any(1).sum())
        total += len(target["boxes"])
    return {"recall": hits / total}


def main(epochs: int = 6, out: str | None = None, images: int = 128) -> MetricsDict:
    torch.manual_seed(0)
    trainer = Trainer(
        TinyDetector(),
        make_images(images, seed=1),
        make_images(32, seed=2),
        data_collator=collate,
        compute_metrics=recall,
        optimization_metric="recall",  # there is no eval_loss: in evaluation the model returns boxes alone
        batch_size=8,
        epochs=epochs,
        learning_rate=3e-3,
        seed=0,
        device="cpu",
        save_dir=out,
    )
    return trainer.train()


if __name__ == "__main__":
    print(main(out="runs/detection"))
