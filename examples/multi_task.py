"""Several tasks, one network: which digit an image shows, and by how many quarter turns it lies on its side.

    python examples/multi_task.py

Each sample has a label for each task, under the keys that `label_names` lists. `loss_fn` and the metric get them as a
tuple, as the model returns its two outputs. For tasks with separate datasets see examples/custom_trainer.py.
In plain PyTorch: about 36 lines for loops, both tasks and the best weights; with the trainer 22.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from omnitrain import Trainer

TASKS = {"digit": 10, "turns": 4}  # and the number of their classes


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU())
        self.heads = nn.ModuleDict({task: nn.Linear(64, classes) for task, classes in TASKS.items()})

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        features = self.body(images)
        return tuple(head(features) for head in self.heads.values())


def total_loss(outputs: tuple[Tensor, ...], labels: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(outputs[0], labels[0]) + 0.5 * F.cross_entropy(outputs[1], labels[1])


def accuracies(evaluation: Any) -> dict[str, float]:
    """Return the accuracy of each task, and of both at once."""
    right = [scores.argmax(axis=1) == labels for scores, labels in zip(*evaluation, strict=True)]
    by_task = {f"{task}_accuracy": float(values.mean()) for task, values in zip(TASKS, right, strict=True)}
    return {**by_task, "accuracy": float(np.logical_and(*right).mean())}


def main(epochs: int = 10) -> dict[str, float]:
    digits, labels = load_digits(return_X_y=True)
    images = torch.tensor(digits, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    turns = torch.arange(len(images)) % 4
    turned = torch.stack([image.rot90(place % 4, (1, 2)) for place, image in enumerate(images)])
    data = {"images": turned, "digit": torch.tensor(labels), "turns": turns}

    torch.manual_seed(0)  # the weights that the model starts from
    trainer = Trainer(
        TwoHeads(),
        {key: values[:1400] for key, values in data.items()},
        {key: values[1400:] for key, values in data.items()},
        loss_fn=total_loss,
        label_names=list(TASKS),
        compute_metrics=accuracies,
        optimization_metric="accuracy",
        epochs=epochs,
        batch_size=32,
        eval_batch_size=400,
        learning_rate=3e-3,
        lr_scheduler="cosine",
        log_steps="2ep",
    )
    best = trainer.train()["best_valid"]
    print("accuracy:", ", ".join(f"{task} {best[task + '_accuracy']:.3f}" for task in TASKS))
    print(f"both right: {best['accuracy']:.3f}")
    return dict(best)


if __name__ == "__main__":
    main()
