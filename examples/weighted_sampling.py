"""Rare classes: a DataLoader of your own with a `WeightedRandomSampler`, beside the data as they are.

    python examples/weighted_sampling.py

One sample in 25 is of the rare class. Drawn with weights, each class comes up equally often, and the balanced
accuracy (the mean recall of the classes) rises. A resumed run goes on in the order of the loader.
In plain PyTorch: about 22 lines for each of the two; with the trainer 10.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from omnitrain import Trainer


def weighted_loader(X: Tensor, y: Tensor, batch_size: int = 64) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader that draws with replacement, each class with the same probability."""
    weights = (1 / torch.bincount(y).float())[y]
    generator = torch.Generator().manual_seed(0)
    sampler = WeightedRandomSampler(weights.tolist(), num_samples=len(y), generator=generator)
    return DataLoader(TensorDataset(X, y), batch_size=batch_size, sampler=sampler)


def main(epochs: int = 8) -> dict[str, float]:
    features, classes = make_classification(
        6000, n_features=12, n_informative=6, weights=[0.96], class_sep=0.8, flip_y=0.0, random_state=0
    )
    X, y = torch.tensor(features, dtype=torch.float32), torch.tensor(classes)
    train, held_out = train_test_split(np.arange(len(y)), test_size=0.5, random_state=0, stratify=y)

    results = {}
    for name, data in {
        "as they are": {"train_dataset": (X[train], y[train]), "batch_size": 64},
        "weighted": {"train_loader": weighted_loader(X[train], y[train])},
    }.items():
        torch.manual_seed(0)  # the weights that the model starts from
        trainer = Trainer(
            nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2)),
            **data,
            loss_fn=nn.functional.cross_entropy,
            compute_metrics=["accuracy", "balanced_accuracy", "recall"],
            epochs=epochs,
            learning_rate=3e-3,
            progress_bar=False,
        )
        trainer.train()
        metrics = trainer.evaluate((X[held_out], y[held_out]))
        results[name] = metrics["eval_balanced_accuracy"]
        print(f"{name + ':':13} accuracy {metrics['eval_accuracy']:.3f}, balanced {results[name]:.3f}", end=", ")
        print(f"rare class found {metrics['eval_recall']:.3f}")
    return results


if __name__ == "__main__":
    main()
