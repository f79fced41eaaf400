"""Cross-validation: a new model and a new trainer for each fold, and one prediction for every sample.

    python examples/k_fold.py

The data are scikit-learn's 569 tumours, benign or malignant.
In plain PyTorch: about 21 lines in each fold to train and to predict; with the trainer 12.
"""

from __future__ import annotations

from statistics import mean, stdev

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import accuracy_score, roc_auc_score
from sklearn.model_selection import StratifiedKFold
from torch import nn

from omnitrain import Trainer


def main(folds: int = 5, epochs: int = 15) -> dict[str, float]:
    X, y = load_breast_cancer(return_X_y=True)
    X, y = X.astype("float32"), y.astype("float32")[:, None]
    scores = np.empty_like(y)  # of each sample, by the model that has not seen it
    accuracies = []
    for train, valid in StratifiedKFold(folds, shuffle=True, random_state=0).split(X, y):
        center, scale = X[train].mean(axis=0), X[train].std(axis=0)
        inputs = (X - center) / scale
        torch.manual_seed(0)  # the weights that the model starts from: the same in each fold
        trainer = Trainer(
            nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1)),
            (inputs[train], y[train]),
            loss_fn=nn.functional.binary_cross_entropy_with_logits,
            compute_metrics="accuracy",
            epochs=epochs,
            batch_size=32,
            learning_rate=3e-3,
            progress_bar=False,
        )
        trainer.train()
        predictions, _, metrics = trainer.predict((inputs[valid], y[valid]))
        scores[valid] = predictions
        accuracies.append(metrics["test_accuracy"])

    results = {"accuracy": float(accuracy_score(y, scores > 0)), "roc_auc": float(roc_auc_score(y, scores))}
    print("accuracy of the folds:", " ".join(f"{accuracy:.3f}" for accuracy in accuracies))
    print(f"mean {mean(accuracies):.3f}, standard deviation {stdev(accuracies):.3f}")
    print(f"all samples, each by the model that has not seen it: ROC AUC {results['roc_auc']:.4f}")
    return results


if __name__ == "__main__":
    main()
