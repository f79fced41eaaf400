"""One model and one set of data through all three trainers, and one run that is handed from each to the next.

    python examples/three_trainers.py

First `Trainer`, `AccelerateTrainer` and `HFTrainer` each train alone, and their losses are compared. Then `Trainer`
begins a run and stops in the middle of an epoch, `AccelerateTrainer` goes on from its checkpoint and stops in the
middle of another, and `HFTrainer` ends it: with the weights of a run that nobody interrupted. The model has dropout
and the images are shifted at random, so that a random number out of place would show. Needs the extra `hf`.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from omnitrain import AccelerateTrainer, BaseTrainer, Callback, HFTrainer, Trainer

TRAINERS: tuple[type[BaseTrainer], ...] = (Trainer, AccelerateTrainer, HFTrainer)


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Handwritten digits; those to train on are a little elsewhere each time they are looked at."""

    def __init__(self, part: slice, moves: bool = False) -> None:
        pixels, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(pixels[part], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.labels = torch.tensor(labels[part])
        self.moves = moves

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.moves:
            image = image.roll(int(torch.randint(-1, 2, ())), dims=-1)
        return image, self.labels[index]


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


class StopAfter(Callback):
    """Ends a run after so many steps, as a time limit would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == self.step:
            trainer.stop()


def train(trainer_class: type[BaseTrainer], epochs: int, resume_from: str | None = None, **options: Any) -> BaseTrainer:
    """Train with one of the three; which one is all that differs."""
    torch.manual_seed(0)  # for the weights that the model starts from
    trainer = trainer_class(
        network(),
        train_dataset=Digits(slice(0, 1500), moves=True),
        eval_dataset=Digits(slice(1500, None)),
        loss_fn=F.cross_entropy,
        compute_metrics="accuracy",
        epochs=epochs,
        batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler="cosine",
        log_steps="1ep",
        progress_bar=False,
        **options,
    )
    trainer.train(resume_from)
    return trainer


def distance(first: BaseTrainer, second: BaseTrainer) -> float:
    """Return the largest difference between two trainers' weights."""
    pairs = zip(first.get_model().parameters(), second.get_model().parameters(), strict=True)
    return max(float((a.detach().cpu() - b.detach().cpu()).abs().max()) for a, b in pairs)


def main(epochs: int = 5) -> tuple[float, float]:
    """Return how far the losses, and the weights after two changes of trainer, are from those of `Trainer`."""
    trained = [train(trainer_class, epochs) for trainer_class in TRAINERS]
    print("train_loss, epoch by epoch")
    histories = [[row["train_loss"] for row in trainer.metrics["train_metrics_history"]] for trainer in trained]
    for trainer, losses in zip(trained, histories, strict=True):
        accuracy = trainer.metrics["best_valid"]["accuracy"]
        print(f"  {type(trainer).__name__:<18}", *(f"{loss:.6f}" for loss in losses), f" accuracy {accuracy:.4f}")
    apart = max(abs(a - b) for losses in histories for a, b in zip(losses, histories[0], strict=True))
    print(f"  largest difference: {apart:.1e}\n")

    total = trained[0].progress.step
    stops = total // 3 + 2, 2 * total // 3 + 3  # both in the middle of an epoch
    with tempfile.TemporaryDirectory() as folder:
        for trainer_class, stop in zip(TRAINERS, (*stops, None), strict=True):
            callbacks = [] if stop is None else [StopAfter(stop)]
            handed_on = train(
                trainer_class, epochs, "auto", callbacks=callbacks, save_dir=folder, load_best_at_end=False
            )
            done = handed_on.progress
            print(f"{trainer_class.__name__} took it to step {done.step} of {total}, epoch {done.epochs:.2f}")
    moved = distance(handed_on, trained[0])
    print(f"largest difference to the weights of a run that nobody interrupted: {moved:.1e}")
    return apart, moved


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="default: %(default)s")
    main(**vars(parser.parse_args()))
