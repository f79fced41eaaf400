"""Registry of metrics by name, and their scorer.

A new name is one line in a table, if its family already accumulates what it needs.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omnitrain.core.errors import ConfigError, DataError, MissingExtraError, did_you_mean
from omnitrain.core.history import quote_names
from omnitrain.data.collation import IGNORED_LABEL
from omnitrain.metrics.classification import (
    COUNTED,
    FROM_HITS,
    CrossEntropySums,
    PairCounts,
    RankedScores,
    TopHits,
    score_texts,
    sklearn_function,
)
from omnitrain.metrics.inputs import Batch, Layout, Scores, Statistic, is_text, main_output
from omnitrain.metrics.regression import PAIRED, REGRESSION, Moments, Pairs
from omnitrain.metrics.text import TEXT_METRICS

logger: logging.Logger = logging.getLogger("omnitrain")


_FAMILIES: dict[type[Statistic], Sequence[str]] = {
    PairCounts: list(COUNTED),
    RankedScores: ["roc_auc", "average_precision"],
    CrossEntropySums: ["log_loss", "perplexity", "brier"],
    Moments: list(REGRESSION),
    Pairs: list(PAIRED),
}
_ALIASES = {
    **{f"{kind}_score": kind for kind in ("accuracy", "balanced_accuracy", "f1", "precision", "recall", "jaccard")},
    **{f"{kind}_score": kind for kind in ("cohen_kappa", "r2", "explained_variance", "roc_auc", "average_precision")},
    "mcc": "matthews_corrcoef",
    "acc": "accuracy",
    "auc": "roc_auc",
    "auroc": "roc_auc",
    "auprc": "average_precision",
    "pr_auc": "average_precision",
    "iou": "jaccard",
    "miou": "jaccard_macro",
    "dice": "f1",
    "sensitivity": "recall",
    "cross_entropy": "log_loss",
    "brier_score": "brier",
    "brier_score_loss": "brier",
    "mean_squared_error": "mse",
    "root_mean_squared_error": "rmse",
    "mean_absolute_error": "mae",
    "mean_absolute_percentage_error": "mape",
    "pearsonr": "pearson",
    "mean_squared_log_error": "msle",
    "root_mean_squared_log_error": "rmsle",
    "median_absolute_error": "medae",
    "spearmanr": "spearman",
    "kendalltau": "kendall",
}
_LOWER_IS_BETTER = {
    "hamming_loss", "zero_one_loss", "log_loss", "perplexity", "brier", "msle", "rmsle", "medae", "mse", "rmse", "mae",
    "mape", "max_error",
}  # fmt: skip


@dataclass(slots=True, frozen=True)
class _RegisteredMetric:
    """One metric that the user requested."""

    statistic: type[Statistic]
    kind: str
    sign: int
    higher_is_better: bool


def _look_up(name: str) -> _RegisteredMetric:
    """Return the metric of a name, or raise ConfigError with all names."""
    if match := re.fullmatch(r"top([1-9]\d*)_accuracy", name):
        return _RegisteredMetric(TopHits, match[1], 1, higher_is_better=True)
    plain = name.removeprefix("neg_")
    kind, is_negated = _ALIASES.get(plain, plain), plain != name
    families = [statistic for statistic, kinds in _FAMILIES.items() if kind in kinds]
    if not families and not is_negated and sklearn_function(kind)[0]:  # f2, f0.5_macro
        families = [PairCounts]
    is_error = kind in _LOWER_IS_BETTER
    if families and (is_error or not is_negated):
        statistic, package = families[0], ""
        if statistic is RankedScores or (statistic is PairCounts and kind not in FROM_HITS):
            package = "scikit-learn"
        elif statistic is Pairs and kind != "medae":
            package = "scipy"  # which scikit-learn brings along
        if package and importlib.util.find_spec(package.replace("scikit-learn", "sklearn")) is None:
            raise MissingExtraError(f"The metric {name!r}", package, "metrics")
        return _RegisteredMetric(statistic, kind, -1 if is_negated else 1, is_negated or not is_error)
    kinds = [kind for kinds in _FAMILIES.values() for kind in kinds]
    near = " Say which, such as 'f2' or 'f0.5_macro'." if "fbeta" in name or "f_beta" in name else ""
    near = near or did_you_mean(name, [*kinds, *_ALIASES, *TEXT_METRICS])
    raise ConfigError(
        f"`compute_metrics` knows no metric named {name!r}.{near} "
        f"The names are {', '.join(kinds)}, top<k>_accuracy and f<beta>, such as f2_macro, and of texts "
        f"{', '.join(TEXT_METRICS)}; scikit-learn's long names, and neg_ before an error or a loss, work too. For any "
        "other metric pass a function f(y_true, y_pred) or a torchmetrics metric."
    )


# Scores in a batch from which on it is read by itself.
_LARGE = 1 << 14


class NamedMetrics:
    """Scores batches by the names of metrics; names that need the same counts share them.

    >>> metrics = NamedMetrics(["accuracy", "f1_macro"])
    >>> metrics.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    >>> metrics.compute()["accuracy"]
    0.5
    """

    def __init__(self, names: Sequence[str], scores: Scores | None = None) -> None:
        self._scores = scores or Scores()
        self._messages: set[str] = set()
        self._metrics = {name: _look_up(name) for name in names}
        self.names: list[str] = list(self._metrics)
        self.higher_is_better: dict[str, bool] = {
            name: metric.higher_is_better for name, metric in self._metrics.items()
        }
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._layout = Layout(scores=self._scores)
        self._texts: Counter[tuple[str, str]] = Counter()
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._waiting_kind: Any = None
        self._waiting_size = 0
        kinds_by_statistic: dict[type[Statistic], dict[str, str]] = {}
        for name, metric in self._metrics.items():
            kinds_by_statistic.setdefault(metric.statistic, {})[name] = metric.kind
        self._statistics = {statistic: statistic(kinds) for statistic, kinds in kinds_by_statistic.items()}

    def update(self, outputs: Any, labels: Any) -> None:
        """Take in one batch, on its own device."""
        outputs = main_output(outputs) if not is_text(outputs) else outputs
        if is_text(outputs) and is_text(labels):
            self._texts.update(zip(labels, outputs, strict=True))
            return
        if not isinstance(outputs, torch.Tensor) or not isinstance(labels, torch.Tensor):
            raise DataError(
                f"{quote_names(self.names)} needs tensors, got outputs of type {type(outputs).__name__} and labels of "
                f"type {type(labels).__name__}. Give labels as numbers (of text, predictions must be text too), or "
                "pass a function f(eval_pred) as `compute_metrics`."
            )
        if labels.numel() == 0:
            return
        # Reading a batch costs much the same whatever its size, so small ones are read together: all but the first
        # of a kind, which shows at once whether it can be read.
        kind = (outputs.shape[1:], labels.shape[1:], outputs.dtype, labels.dtype, outputs.device)
        if kind != self._waiting_kind or outputs.numel() >= _LARGE or not labels.ndim:
            self._flush()
            self._update_statistics(outputs, labels)
            self._waiting_kind = kind
            return
        # copies, as a model that runs as CUDA graphs and a loader that reuses its batches overwrite what they return
        self._waiting.append((outputs.clone(), labels.clone()))
        self._waiting_size += outputs.numel()
        if self._waiting_size >= _LARGE:
            self._flush()

    def _flush(self) -> None:
        """Read the small batches that are waiting, as one."""
        waiting, self._waiting, self._waiting_size = self._waiting, [], 0
        if len(waiting) == 1:
            self._update_statistics(*waiting[0])
        elif waiting:
            outputs, labels = map(torch.cat, zip(*waiting, strict=True))
            self._update_statistics(outputs, labels)

    def _update_statistics(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        batch = Batch(outputs.detach(), labels.detach(), self._layout)
        batch.names = self.names
        if not labels.ndim:
            raise batch.shape_error("labels with a dimension of samples")
        for statistic in self._statistics.values():
            batch.names = statistic.names
            statistic.update(batch)

    def state(self) -> dict[str, Any]:
        """Return what another process needs to merge: numpy arrays, no predictions."""
        self._flush()
        layout = self._layout
        return {
            "statistics": [statistic.state() for statistic in self._statistics.values()],
            "layout": (layout.dim, layout.classes, layout.columns),
            "counts": {name: int(getattr(layout, name)) for name in Layout.COUNTS},
            "texts": dict(self._texts),
        }

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in the state of another process."""
        self._flush()
        layout, (dim, classes, columns) = self._layout, state["layout"]
        if None not in (layout.classes, classes) and (layout.dim, layout.classes) != (dim, classes):
            raise DataError(
                f"The processes disagree on the scores: {layout.classes} in dimension {layout.dim}, and {classes} "
                f"in dimension {dim}. Give every process outputs of one shape, with the classes in the last dimension."
            )
        if None not in (layout.columns, columns) and layout.columns != columns:
            raise DataError(f"The processes disagree: {layout.columns} labels a sample, and {columns}.")
        layout.dim, layout.classes = layout.dim or dim, layout.classes or classes
        layout.columns = layout.columns or columns
        layout.add(**state["counts"])
        self._texts.update(state["texts"])
        for statistic, other in zip(self._statistics.values(), state["statistics"], strict=True):
            statistic.merge(other)

    def compute(self) -> dict[str, float | None]:
        """Return the results, None for a name that had nothing to score."""
        self._flush()
        if self._texts:
            metrics = self._metrics.items()
            return {name: metric.sign * score_texts(name, metric.kind, self._texts) for name, metric in metrics}
        layout = self._layout
        if outside := int(layout.outside):
            expected = f"0..{(layout.classes or 0) - 1}, though the model gives {layout.classes} class scores"
            if layout.columns:
                expected = "0 and 1, though the model gives one score for each label"
            raise DataError(
                f"{outside} labels are outside {expected}. Use labels of 0 to C - 1, and {IGNORED_LABEL}, or the "
                "loss's `ignore_index`, for what is to be ignored."
            )
        has_nan = bool(int(layout.nan))
        if has_nan:
            self._warn_once("Some scores are NaN: metrics of classes are NaN too.")
        results: dict[str, float | None] = {}
        for name, metric in self._metrics.items():
            is_of_classes = metric.statistic in (PairCounts, TopHits)
            value = math.nan
            if not (has_nan and is_of_classes):
                value = self._statistics[metric.statistic].compute(metric.kind, layout)
            results[name] = None if value is None else metric.sign * value
        self._warn_score_interpretation({metric.statistic for metric in self._metrics.values()})
        return results

    def _warn_score_interpretation(self, used: set[type[Statistic]]) -> None:
        """Warn once how scores were interpreted, if only their values could decide."""
        layout, known = self._layout, self._scores
        thresholds = PairCounts in used and layout.columns is not None and not layout.is_one_hot
        read_as_logits = CrossEntropySums in used and (layout.columns is not None or layout.classes is not None)
        if known.are_probabilities is None and (thresholds or read_as_logits) and layout.are_probabilities:
            self._warn_once(
                "All scores of the set are within 0 and 1%s, so metrics take them for probabilities, not for logits. A "
                "loss of PyTorch as `loss_fn` would tell." % ("" if layout.columns else " and sum to one")
            )
        if known.are_of_classes is None and layout.columns and layout.columns > 1:
            what = "one-hot: each sample has exactly one 1" if layout.is_one_hot else "several of each sample"
            self._warn_once(
                f"Metrics take the labels of 0 and 1 for {what}. A `loss_fn` of PyTorch would say which they are."
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._messages:
            self._messages.add(message)
            logger.warning(message)
