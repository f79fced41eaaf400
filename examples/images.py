"""Classify images: a small convolutional network, with random augmentation of the images it learns from.

    python examples/images.py

The data are scikit-learn's 1,797 handwritten digits. The augmentation is ordinary code in `__getitem__`. Its random
numbers follow from seed, epoch and sample, so that workers and resumed runs see the same images.
In plain PyTorch: about 40 lines for the loops, the evaluation and the best weights; with the trainer 17.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from omnitrain import Trainer


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Shifts each image by up to a pixel and makes it brighter or darker, anew in every epoch."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(-1, 2, (2,)).tolist()
        brightness = 0.8 + 0.4 * torch.rand(())
        return self.images[index].roll((down, right), dims=(1, 2)) * brightness, self.labels[index]


def convolution(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU())


def main(epochs: int = 12) -> dict[str, float]:
    digits, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(digits, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(classes)

    torch.manual_seed(0)  # the weights that the model starts from
    model = nn.Sequential(
        convolution(1, 16), convolution(16, 32), nn.MaxPool2d(2), convolution(32, 64), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    trainer = Trainer(
        model,
        Augmented(images[:1200], labels[:1200]),
        TensorDataset(images[1200:1500], labels[1200:1500]),
        TensorDataset(images[1500:], labels[1500:]),
        loss_fn=nn.functional.cross_entropy,
        compute_metrics="accuracy",
        optimization_metric="accuracy",
        epochs=epochs,
        batch_size=64,
        eval_batch_size=300,
        learning_rate=1e-2,
        lr_scheduler="cosine",
        log_steps="1ep",
    )
    best = trainer.train()["best_valid"]
    results = trainer.test()

    print(f"best evaluation: epoch {best['epoch']}, accuracy {best['accuracy']:.3f}")
    print(f"test: accuracy {results['test_accuracy']:.3f}, loss {results['test_loss']:.3f}")
    return results


if __name__ == "__main__":
    main()
