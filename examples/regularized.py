"""Regularize a small network: CutMix on its images, averaged weights (EMA), and a warm-up-stable-decay schedule.

    python examples/regularized.py

The data are 1,797 handwritten digits of scikit-learn. CutMix and EMA are algorithms: each is one entry of a list. The
schedule warms up over a tenth of the run and decays over its last third. Evaluations, the best checkpoint and the
model at the end have the averaged weights. (Images of 8 x 8 pixels gain nothing by it: test accuracy is 0.942 with,
0.967 without. It is the code that matters here.)
In plain PyTorch: about 75 lines for loops, CutMix, averages, schedule and best weights; with the trainer 20.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import EMA, CutMix, Trainer, WSDScheduler


def convolution(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.GroupNorm(4, channels_out), nn.ReLU())


def network() -> nn.Module:
    return nn.Sequential(
        convolution(1, 16), convolution(16, 32), nn.MaxPool2d(2), convolution(32, 64), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def digits(first: int, last: int) -> TensorDataset:
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels[first:last], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(images, torch.tensor(labels[first:last]))


def main(epochs: int = 20, regularizes: bool = True) -> dict[str, float]:
    torch.manual_seed(0)  # the weights that the model starts from
    trainer = Trainer(
        network(),
        digits(0, 1000),
        digits(1000, 1400),
        digits(1400, 1797),
        loss_fn=nn.CrossEntropyLoss(),
        algorithms=[CutMix(num_classes=10), EMA(0.98)] if regularizes else [],
        lr_scheduler=WSDScheduler(decay="0.3dur", warmup="0.1dur"),
        compute_metrics="accuracy",
        optimization_metric="accuracy",
        epochs=epochs,
        batch_size=50,
        eval_batch_size=400,
        learning_rate=1e-2,
        log_steps="5ep",
    )
    trainer.train()
    tested = trainer.test()
    print(f"test accuracy: {tested['test_accuracy']:.3f}")
    return tested


if __name__ == "__main__":
    main()
