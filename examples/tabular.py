"""Regression on a table: NumPy arrays in, R2 and mean absolute error out, beside a linear model of scikit-learn.

    python examples/tabular.py

The data are scikit-learn's 442 diabetes patients: ten measurements each, and how far the disease went in a year.
In plain PyTorch: about 37 lines for loops, metrics, patience and the best weights; with the trainer 16.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from sklearn.metrics import mean_absolute_error, r2_score
from torch import nn

from omnitrain import Trainer


def main(epochs: int = 100) -> dict[str, float]:
    X, y = (np.asarray(array, dtype=np.float32) for array in load_diabetes(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(X))
    X, y = X[order], y[order].reshape(-1, 1)
    train, valid, test = slice(0, 262), slice(262, 342), slice(342, None)
    inputs = (X - X[train].mean(axis=0)) / X[train].std(axis=0)
    mean, deviation = y[train].mean(), y[train].std()
    targets = (y - mean) / deviation

    torch.manual_seed(0)  # the weights that the model starts from
    trainer = Trainer(
        nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)),
        (inputs[train], targets[train]),
        (inputs[valid], targets[valid]),
        loss_fn=nn.functional.mse_loss,
        compute_metrics=["r2", "mae"],
        optimization_metric="r2",
        patience=15,  # evaluations without a better R2
        epochs=epochs,
        batch_size=32,
        learning_rate=3e-3,
        weight_decay=1e-2,
        log_steps="10ep",
    )
    metrics = trainer.train()  # the model is left with the weights of the best evaluation
    predicted = trainer.predict(inputs[test]).predictions * deviation + mean
    linear = LinearRegression().fit(X[: test.start], y[: test.start]).predict(X[test])

    print(f"stopped by {metrics['stop_reason']} in epoch {metrics['valid'][-1]['epoch']}")
    results = {}
    for name, values in {"network": predicted, "linear": linear}.items():
        results[name] = float(r2_score(y[test], values))
        print(f"{name}: R2 {results[name]:.3f}, mean absolute error {mean_absolute_error(y[test], values):.1f}")
    return results


if __name__ == "__main__":
    main()
