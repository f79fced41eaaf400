"""Several tasks with their own datasets, one network: which digit an image shows, and how much ink it has.

    python examples/mixed_tasks.py

The second task has a sixth of the samples of the first. `MultiTask` mixes both in each epoch, here by the square roots
of their sizes, and `MultiTaskUnit` computes the loss. Each task has its own loss, weight, evaluation set and metric.
In plain PyTorch: about 60 lines for loops, mixing, both losses and the best weights; with the trainer 24.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from omnitrain import MultiTask, MultiTaskUnit, Trainer


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU())
        self.heads = nn.ModuleDict({"digit": nn.Linear(64, 10), "ink": nn.Linear(64, 1)})

    def forward(self, images: Tensor, task: str) -> Tensor:
        return self.heads[task](self.body(images))


def main(epochs: int = 10) -> dict[str, float]:
    digits, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(digits, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(classes)
    ink = images.mean((1, 2, 3))[:, None] * 4
    tasks = MultiTask(
        {"digit": TensorDataset(images[:1200], labels[:1200]), "ink": TensorDataset(images[1200:1400], ink[1200:1400])},
        mixing="proportional",
        temperature=2,
    )
    held_out = {"digit": TensorDataset(images[1400:], labels[1400:]), "ink": TensorDataset(images[1400:], ink[1400:])}

    torch.manual_seed(0)  # the weights that the model starts from
    model = TwoHeads()
    trainer = Trainer(
        model,
        tasks,
        tasks.evaluation(held_out, metrics={"digit": "accuracy", "ink": "r2"}),
        unit=MultiTaskUnit(model, {"digit": F.cross_entropy, "ink": F.mse_loss}, weights={"ink": 0.5}),
        optimization_metric="digit_accuracy",
        epochs=epochs,
        batch_size=32,
        eval_batch_size=400,
        learning_rate=3e-3,
        lr_scheduler="cosine",
        log_steps="2ep",
    )
    best = trainer.train()["best_valid"]
    print(f"digit: accuracy {best['digit_accuracy']:.3f}; ink: R2 {best['ink_r2']:.3f}")
    return dict(best)


if __name__ == "__main__":
    main()
