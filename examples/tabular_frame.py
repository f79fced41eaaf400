"""A table with categories, missing values and a rare class: from a pandas DataFrame to an embedding for each column.

    python examples/tabular_frame.py

The customers are drawn here: one in fifteen cancels, above all those of two regions who pay monthly, and those who call
often and are new. A quarter of the incomes is missing. Next to it, a logistic regression of the same columns.
In plain PyTorch: about 45 lines for loops, ROC AUC, groups, patience and the best weights; with the trainer 19.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from omnitrain import Trainer

CATEGORIES, NUMBERS, LABEL = ["region", "plan", "payment"], ["income", "months", "calls"], "cancelled"


def draw(count: int, seed: int = 0) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    frame = pd.DataFrame({
        "region": random.choice([f"region {number}" for number in range(12)], count),
        "plan": random.choice(["basic", "family", "business"], count, p=[0.6, 0.3, 0.1]),
        "payment": random.choice(["monthly", "yearly"], count), "income": random.lognormal(10.3, 0.5, count),
        "months": random.exponential(30, count), "calls": random.poisson(2, count),
    })  # fmt: skip
    monthly_south = frame["region"].isin(["region 2", "region 7"]) & (frame["payment"] == "monthly")
    new_caller = (frame["months"] < 12) & (frame["calls"] > 2)
    risk = -4.2 + 3.5 * monthly_south + 3.0 * new_caller - 0.5 * (frame["plan"] == "family")
    frame[LABEL] = (random.random(count) < 1 / (1 + np.exp(-risk))).astype("float32")
    frame.loc[random.random(count) < 0.25, "income"] = np.nan
    frame.loc[random.random(count) < 0.05, "plan"] = None
    return frame


class TableNetwork(nn.Module):
    def __init__(self, sizes: list[int], numbers: int, width: int = 64, dim: int = 4) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, dim) for size in sizes)
        self.body = nn.Sequential(nn.Linear(dim * len(sizes) + numbers, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        columns = [embedding(codes) for embedding, codes in zip(self.embeddings, categories.unbind(1), strict=True)]
        return self.body(torch.cat([*columns, numbers], dim=1)).squeeze(1)


def main(epochs: int = 15) -> dict[str, float]:
    frame = draw(9000)
    train, valid, test = slice(0, 5000), slice(5000, 7000), slice(7000, None)
    known = {name: frame[name][train].dropna().unique().tolist() for name in CATEGORIES}
    codes = np.stack([pd.Categorical(frame[name], known[name]).codes + 1 for name in CATEGORIES], 1)  # 0: not known
    missing = frame[NUMBERS].isna()
    scaled = (frame[NUMBERS] - frame[NUMBERS][train].mean()) / frame[NUMBERS][train].std()
    numbers = np.concatenate([scaled.fillna(0.0), missing.loc[:, missing.any()]], axis=1).astype("float32")
    columns = {"categories": codes.astype("int64"), "numbers": numbers, "labels": frame[LABEL].to_numpy()}
    parts = [{name: values[part] for name, values in columns.items()} for part in (train, valid, test)]

    torch.manual_seed(0)  # the weights that the model starts from
    rare = float(frame[LABEL][train].mean())
    trainer = Trainer(
        TableNetwork([len(names) + 1 for names in known.values()], numbers.shape[1]),
        *parts[:2],
        loss_fn=nn.BCEWithLogitsLoss(pos_weight=torch.tensor((1 - rare) / rare)),  # both classes count as much
        param_groups=[{"match": r"^embeddings\.", "weight_decay": 0.1}],  # a category with few rows stays near zero
        compute_metrics=["roc_auc", "balanced_accuracy"],
        optimization_metric="roc_auc",
        patience=4,
        epochs=epochs,
        batch_size=64,
        learning_rate=3e-3,
        progress_bar=False,
    )
    metrics = trainer.train()
    one_hot = np.concatenate([np.eye(codes.max() + 1)[codes].reshape(len(frame), -1), numbers], axis=1)
    linear = LogisticRegression(class_weight="balanced", max_iter=1000).fit(one_hot[train], frame[LABEL][train])
    results = {"network": trainer.predict(parts[2]).predictions, "linear": linear.decision_function(one_hot[test])}
    results = {name: float(roc_auc_score(frame[LABEL][test], scores)) for name, scores in results.items()}
    print(f"{rare:.1%} cancel; best evaluation in epoch {metrics['best_valid']['epoch']}")
    print(", ".join(f"{name}: ROC AUC {value:.3f}" for name, value in results.items()))
    return results


if __name__ == "__main__":
    main()
