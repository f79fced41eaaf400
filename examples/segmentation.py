"""Segmentation: a small U-Net says for each pixel whether it belongs to a disc, a square or the background.

    python examples/segmentation.py

The pictures are drawn here: discs and squares of any brightness, half hidden in noise, so that only the form tells
them apart. As in many datasets (Pascal VOC, Cityscapes), pixels at borders have the label 255, which does not count.
In plain PyTorch: about 40 lines for loops, mean IoU and the best weights; with the trainer 14.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omnitrain import Trainer

CLASSES = ["background", "disc", "square"]


def draw(count: int, seed: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Return pictures of shape (count, 1, size, size) with two forms each, and the class of each pixel."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = torch.zeros(count, size, size), torch.zeros(count, size, size, dtype=torch.long)
    rows, columns = torch.arange(size)[:, None], torch.arange(size)
    for image, classes in zip(images, labels, strict=True):
        for form in (1, 2):
            radius, y, x = (int(torch.randint(*limits, (), generator=generator)) for limits in ((4, 8), *[(6, 26)] * 2))
            down, right = (rows - y).abs(), (columns - x).abs()
            inside = down**2 + right**2 <= radius**2 if form == 1 else torch.maximum(down, right) <= radius * 0.9
            image[inside], classes[inside] = float(0.5 + 0.5 * torch.rand((), generator=generator)), form
    neighbours = F.unfold(F.pad(labels[:, None].float(), [1] * 4, mode="replicate"), 3).view(count, 9, size, size)
    labels[neighbours.amax(1) != neighbours.amin(1)] = 255
    return images[:, None] + 0.25 * torch.randn(count, 1, size, size, generator=generator), labels


def convolutions(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU(),
        nn.Conv2d(channels_out, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (8, 16, 32)) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.first = convolutions(1, widths[0])
        self.downs = nn.ModuleList(convolutions(small, large) for small, large in pairs)
        self.ups = nn.ModuleList(convolutions(small + large, small) for small, large in reversed(pairs))
        self.head = nn.Conv2d(widths[0], len(CLASSES), 1)

    def forward(self, images: Tensor) -> Tensor:
        maps = [self.first(images)]
        for layer in self.downs:
            maps.append(layer(F.max_pool2d(maps[-1], 2)))
        features = maps.pop()
        for layer in self.ups:  # the finer map of the way down says where the edges are
            features = layer(torch.cat([maps.pop(), F.interpolate(features, scale_factor=2.0)], dim=1))
        return self.head(features)


def main(epochs: int = 8) -> dict[str, float]:
    torch.manual_seed(0)  # the weights that the model starts from
    trainer = Trainer(
        UNet(),
        draw(400, seed=1),
        draw(100, seed=2),
        loss_fn=nn.CrossEntropyLoss(ignore_index=255),
        compute_metrics=["miou", "accuracy"],
        optimization_metric="miou",
        epochs=epochs,
        batch_size=16,
        learning_rate=1e-2,
        lr_scheduler="cosine",
    )
    best = trainer.train()["best_valid"]
    print(f"best evaluation: epoch {best['epoch']}, mean IoU {best['miou']:.3f}, accuracy {best['accuracy']:.3f}")
    return best


if __name__ == "__main__":
    main()
