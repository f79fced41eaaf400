"""Contrastive learning: two views of one image should be more alike than views of different images.

    python examples/contrastive.py

This needs no labels. Afterwards a linear classifier learns from 50 labelled digits, and does better on the features
of the network than on pixels. The model returns its own loss (InfoNCE, as in SimCLR).
In plain PyTorch: about 19 lines; with the trainer 12.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from omnitrain import Trainer


def views(samples: list[tuple[Tensor]]) -> dict[str, Tensor]:
    """Return two views of each image: turned, sheared, scaled, moved, brighter or darker."""
    images, batch = torch.stack([image for (image,) in samples]), {}
    for name in ("first", "second"):
        change = torch.eye(2, 3) + 0.6 * (torch.rand(len(images), 2, 3) - 0.5)
        grid = F.affine_grid(change, list(images.shape), align_corners=False)
        brightness = 0.7 + 0.6 * torch.rand(len(images), 1, 1, 1)
        batch[name] = F.grid_sample(images, grid, align_corners=False) * brightness
    return batch


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        edges, strokes = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        layers = [edges, nn.ReLU(), nn.MaxPool2d(2), strokes, nn.ReLU(), nn.Flatten(), nn.Linear(1024, 64)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(64, 32))

    def forward(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
        a, b = (F.normalize(self.head(self.body(view)), dim=1) for view in (first, second))
        alike = a @ b.T / 0.2  # the temperature
        pairs = torch.arange(len(a), device=a.device)
        return {"loss": (F.cross_entropy(alike, pairs) + F.cross_entropy(alike.T, pairs)) / 2}


def main(epochs: int = 20) -> dict[str, float]:
    digits, labels = load_digits(return_X_y=True)
    images = torch.tensor(digits, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    torch.manual_seed(0)  # the weights that the model starts from
    model = Encoder()
    trainer = Trainer(
        model,
        TensorDataset(images[:1300]),
        data_collator=views,
        epochs=epochs,
        batch_size=128,  # each image is compared with all others of its batch
        drop_last=True,  # so that each has as many to be compared with
        learning_rate=3e-3,
        lr_scheduler="cosine",
        log_steps="5ep",
    )
    trainer.train()
    with torch.no_grad():
        features = model.body(images.to(trainer.device)).cpu().numpy()
    few = [int(place) for digit in range(10) for place in np.flatnonzero(labels[:1300] == digit)[:5]]
    results = {}
    for name, inputs in {"pixels": digits / 16, "features": features / features.std()}.items():
        classifier = LogisticRegression(max_iter=1000).fit(inputs[few], labels[few])
        results[name] = float(classifier.score(inputs[1300:], labels[1300:]))
        print(f"accuracy of a linear classifier of {name}, after 50 labels: {results[name]:.3f}")
    return results


if __name__ == "__main__":
    main()
