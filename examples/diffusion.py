"""Diffusion: a network that takes noise from images, averaged over its updates, draws the digits it is asked for.

    python examples/diffusion.py

A unit adds noise to each image, and the network is to restore it. `EMA` averages the weights: the model ends with the
averages, so nothing is to be swapped before it draws (by DDIM, from noise alone). A classifier of real digits reads
the drawn ones more easily than real ones that it has not seen, because they are more regular.
In plain PyTorch: about 28 lines for the loop, the averages and the schedule; with unit and trainer 16.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F

from omnitrain import EMA, Trainer

LEVELS = 50
SHARES = torch.cos(torch.linspace(0, 1, LEVELS + 1) * torch.pi / 2).square()  # of the image; the rest is noise


def network(width: int = 256) -> nn.Module:
    hidden = [layer for _ in range(3) for layer in (nn.SiLU(), nn.Linear(width, width))]
    return nn.Sequential(nn.Linear(64 + LEVELS + 1 + 10, width), *hidden, nn.SiLU(), nn.Linear(width, 64))


def restore(model: nn.Module, noisy: Tensor, levels: Tensor, digits: Tensor) -> Tensor:
    return model(torch.cat([noisy, F.one_hot(levels, LEVELS + 1), F.one_hot(digits, 10)], dim=1))


class Denoising:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.shares = model, SHARES  # attributes move to the device of the model

    def __call__(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, digits = batch
        levels = torch.randint(1, LEVELS + 1, (len(images),), device=images.device)
        share = self.shares[levels, None]
        noisy = share.sqrt() * images + (1 - share).sqrt() * torch.randn_like(images)
        return F.mse_loss(restore(self.model, noisy, levels, digits), images)


@torch.no_grad()
def draw(model: nn.Module, digits: Tensor) -> Tensor:
    noisy = torch.randn(len(digits), 64, generator=torch.Generator().manual_seed(0)).to(digits.device)
    for level in range(LEVELS, 0, -1):
        image = restore(model, noisy, torch.full_like(digits, level), digits).clamp(-1, 1)
        noise = (noisy - SHARES[level].sqrt() * image) / (1 - SHARES[level]).sqrt()
        noisy = SHARES[level - 1].sqrt() * image + (1 - SHARES[level - 1]).sqrt() * noise
    return noisy.cpu()


def main(epochs: int = 100) -> dict[str, float]:
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
    torch.manual_seed(0)  # the weights that the model starts from
    model = network()
    unit: Any = Denoising(model)
    options: dict[str, Any] = {"batch_size": 64, "learning_rate": 2e-3, "lr_scheduler": "cosine", "log_steps": "20ep"}
    trainer = Trainer(
        model, (images[:1300], digits[:1300]), unit=unit, algorithms=[EMA(0.99)], epochs=epochs, **options
    )
    trainer.train()
    drawn = draw(model.eval(), digits[1300:].to(trainer.device))
    classifier = LogisticRegression(max_iter=2000).fit(images[:1300], labels[:1300])
    results = {name: classifier.score(x, labels[1300:]) for name, x in (("drawn", drawn), ("real", images[1300:]))}
    print("a classifier reads {drawn:.1%} of the drawn digits, and {real:.1%} of real ones".format(**results))
    for row in drawn[:10].clamp(-1, 1).view(10, 8, 8).transpose(0, 1).tolist():  # a line of each of ten images
        print("  ".join("".join(" .:*#"[round(2 * value + 2)] for value in line) for line in row))
    return results


if __name__ == "__main__":
    main()
