"""A GAN: a training loop of your own with two optimizers, stopped and resumed like any other run.

    python examples/gan.py

A subclass of `BaseTrainer` writes `_train_epoch`. What it puts into `self.optimizers` is in every checkpoint, so that
`resume_from="auto"` goes on with both. The data are handwritten digits; the distance to them should fall.
In plain PyTorch: about 38 lines, 17 of them to save and to resume; with a trainer of your own 28.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import softplus

from omnitrain import BaseTrainer


class AdversarialTrainer(BaseTrainer):
    def _setup_training_components(self) -> None:
        self.model.to(self.device)
        parts = self.model.named_children()
        self.optimizers = {name: torch.optim.Adam(part.parameters(), 1e-3, betas=(0.5, 0.99)) for name, part in parts}

    def _train_epoch(self, epoch: int) -> float:
        generator, discriminator = self.model.children()
        total = torch.zeros((), device=self.device)
        for images in map(self._prepare_batch, self.train_loader):
            forged = generator(torch.randn(len(images), 16, device=self.device))
            loss = softplus(-discriminator(images)).mean() + softplus(discriminator(forged.detach())).mean()
            self.update("discriminator", loss)
            self.update("generator", softplus(-discriminator(forged)).mean())
            total += loss.detach()
        return total.item() / len(self.train_loader)

    def update(self, part: str, loss: Tensor) -> None:
        self.optimizers[part].zero_grad()
        loss.backward()
        self.optimizers[part].step()


def distance(images: Tensor, forged: Tensor) -> float:
    """Return the Frechet distance of the pixels: how far apart means and covariances are."""
    a, b, between = torch.cov(images.T), torch.cov(forged.T), images.mean(dim=0) - forged.mean(dim=0)
    return float(between.square().sum() + (a + b).trace() - 2 * torch.linalg.eigvals(a @ b).sqrt().real.sum())


def train(images: Tensor, epochs: int, folder: str) -> Tensor:
    torch.manual_seed(0)  # the weights that the models start from
    generator = nn.Sequential(nn.Linear(16, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))
    trainer = AdversarialTrainer(
        nn.ModuleDict({"generator": generator, "discriminator": discriminator}),
        images,
        epochs=epochs,
        batch_size=64,
        log_steps="10ep",
        save_dir=folder,
    )
    trainer.train(resume_from="auto")
    noise = torch.randn(len(images), 16, generator=torch.Generator().manual_seed(0))
    return generator.eval()(noise.to(trainer.device)).detach().cpu()


def main(epochs: int = 40) -> dict[str, float]:
    images = torch.tensor(load_digits(return_X_y=True)[0], dtype=torch.float32) / 8 - 1
    results = {"noise": distance(images, torch.rand_like(images) * 2 - 1)}
    with TemporaryDirectory() as folder:
        results["first half"] = distance(images, train(images, epochs // 2, folder))
        results["resumed"] = distance(images, train(images, epochs, folder))
    print("distance to the digits:", ", ".join(f"{name} {value:.1f}" for name, value in results.items()))
    return results


if __name__ == "__main__":
    main()
