"""Streaming regression metrics: running moments in float64 per output column."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from omnitrain.core.errors import DataError
from omnitrain.metrics.inputs import Batch, Layout, Statistic, StoredRows, differ_by_unit_dim, on_wide_device


def _moments(true: torch.Tensor, predicted: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return float64 moments per column; `mean` and `spread` have rows for labels, predictions and errors."""
    valid = ~true.isnan()
    true, predicted = true.where(valid, 0), predicted.where(valid, 0)
    error = true - predicted
    rows = torch.stack([true, predicted, error])
    count = valid.sum(0).double()  # divided as integers, counts would give float32
    mean = rows.sum(1) / count.clamp(min=1)
    away = (rows - mean.unsqueeze(1)).where(valid, 0)
    absolute = error.abs()
    return {
        "count": count,
        "mean": mean,
        "spread": away.square().sum(1),  # squared distances from the mean
        "joint": (away[0] * away[1]).sum(0),  # products of the distances of labels and predictions
        "absolute": absolute.sum(0),
        "relative": (absolute / true.abs().clamp(min=torch.finfo(torch.float64).eps)).sum(0),
        "largest": absolute.amax(0),
        "logarithmic": (true.log1p() - predicted.log1p()).square().sum(0),  # differences of log(1 + value)
    }


def _join(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join two sets by the update of Chan, Golub and LeVeque (1979), which keeps precision with large means."""
    joined = {name: a[name] + b[name] for name in a}
    shift, share = b["mean"] - a["mean"], b["count"] / joined["count"].clamp(min=1)
    lever = a["count"] * share
    return joined | {
        "mean": a["mean"] + shift * share,
        "spread": joined["spread"] + shift.square() * lever,
        "joint": joined["joint"] + shift[0] * shift[1] * lever,
        "largest": torch.maximum(a["largest"], b["largest"]),
    }


def _columns(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return labels and predictions in float64, one row per sample."""
    true, predicted = batch.labels, batch.outputs
    if true.shape != predicted.shape and not differ_by_unit_dim(true.shape, predicted.shape):
        raise batch.shape_error("outputs of the labels' shape")
    rows = len(true)
    true, predicted = (on_wide_device(x).double().reshape(rows, -1) for x in (true, predicted))
    return true, predicted


class Moments(Statistic):
    """Running moments of labels, predictions and errors, from which the regression metrics are computed."""

    def __init__(self, kind_by_name: Mapping[str, str]) -> None:
        super().__init__(kind_by_name)
        self._total: dict[str, torch.Tensor] = {}

    def update(self, batch: Batch) -> None:
        self._add(_moments(*_columns(batch)), batch)

    def _add(self, new: dict[str, torch.Tensor], batch: Batch | None = None) -> None:
        if not self._total:
            self._total = new
            return
        if new["count"].shape != self._total["count"].shape:
            columns = f"rows of {len(self._total['count'])} values, as in the batches before"
            raise batch.shape_error(columns) if batch else DataError(f"Expected {columns}.")
        self._total = _join(self._total, new)

    def state(self) -> dict[str, Any]:
        return {name: moments.cpu().numpy() for name, moments in self._total.items()}

    def merge(self, state: Mapping[str, Any]) -> None:
        if state:
            device = self._total["count"].device if self._total else None
            self._add({name: torch.from_numpy(array).to(device) for name, array in state.items()})

    def compute(self, kind: str, layout: Layout) -> float | None:
        state = self.state()
        if not state or not state["count"].any():
            return None
        has_labels = state["count"] > 0  # a column without any label is left out of the average
        columns = {name: array[..., has_labels] for name, array in state.items()}
        with np.errstate(invalid="ignore", divide="ignore"):
            values = REGRESSION[kind](**columns)
        return float(values.max() if kind == "max_error" else values.mean())


def _explained(unexplained: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Return the explained share of the labels' spread; for a constant label 1 or 0, as in scikit-learn."""
    constant = np.where(unexplained == 0, 1.0, unexplained * 0)  # times 0, so that NaN stays NaN
    return np.where(spread[0] == 0, constant, 1 - unexplained / spread[0])


def _squared(count: np.ndarray, mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
    return spread[2] + count * mean[2] ** 2


REGRESSION: dict[str, Any] = {
    "mse": lambda count, mean, spread, **_: _squared(count, mean, spread) / count,
    "rmse": lambda count, mean, spread, **_: np.sqrt(_squared(count, mean, spread) / count),
    "mae": lambda count, absolute, **_: absolute / count,
    "mape": lambda count, relative, **_: relative / count,
    "msle": lambda count, logarithmic, **_: logarithmic / count,
    "rmsle": lambda count, logarithmic, **_: np.sqrt(logarithmic / count),
    "max_error": lambda largest, **_: largest,
    "r2": lambda count, mean, spread, **_: np.where(
        count > 1, _explained(_squared(count, mean, spread), spread), np.nan
    ),
    "explained_variance": lambda spread, **_: _explained(spread[2], spread),
    "pearson": lambda spread, joint, **_: joint / np.sqrt(spread[0] * spread[1]),
}


class Pairs(StoredRows):
    """Keeps all labels and predictions."""

    def update(self, batch: Batch) -> None:
        true, predicted = _columns(batch)
        if self._labels and true.shape[1] != self._labels[0].shape[1]:
            raise batch.shape_error(f"rows of {self._labels[0].shape[1]} values, as in the batches before")
        self._labels.append(true.cpu().numpy())
        self._scores.append(predicted.cpu().numpy())

    def compute(self, kind: str, layout: Layout) -> float | None:
        if not self._labels:
            return None
        columns = zip(np.concatenate(self._labels).T, np.concatenate(self._scores).T, strict=True)
        pairs = [(true[~np.isnan(true)], predicted[~np.isnan(true)]) for true, predicted in columns]
        values = [PAIRED[kind](*pair) for pair in pairs if len(pair[0])]
        return float(np.mean(values)) if values else None


def _correlation(name: str) -> Any:
    def compute(true: np.ndarray, predicted: np.ndarray) -> float:
        from scipy import stats

        if len(true) < 2 or np.isnan(predicted).any():
            return float("nan")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about constants, whose NaN is reported like any other
            return float(getattr(stats, name)(true, predicted)[0])

    return compute


PAIRED: dict[str, Any] = {
    "medae": lambda true, predicted: np.median(np.abs(true - predicted)),
    "spearman": _correlation("spearmanr"),
    "kendall": _correlation("kendalltau"),
}
