"""Names of metrics for `compute_metrics`, and the scorer of a list of them.

A new name is one line in a table, if its family already remembers what it needs.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from omnitrain.errors import ConfigError, DataError, MissingExtraError, did_you_mean
from omnitrain.streaming.classification import COUNTED, CrossEntropy, PairCounts, RankedScores, TopHits
from omnitrain.streaming.reading import IGNORED, Batch, Layout, main_output, quote
from omnitrain.streaming.regression import REGRESSION, Moments


class Statistic(Protocol):
    """What a family of metrics remembers of the batches. `asked` maps the user's names to the kinds below."""

    def __init__(self, asked: Mapping[str, str]) -> None: ...

    def update(self, batch: Batch) -> None:
        """Take in one batch."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what another process needs to merge, without tensors."""
        ...

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in the state of another process."""
        ...

    def compute(self, kind: str) -> float | None:
        """Return the result, or None if there was nothing to score."""
        ...


_FAMILIES: dict[type[Statistic], Sequence[str]] = {
    PairCounts: list(COUNTED),
    RankedScores: ["roc_auc", "average_precision"],
    CrossEntropy: ["log_loss", "perplexity"],
    Moments: list(REGRESSION),
}
_ALIASES = {
    **{f"{kind}_score": kind for kind in ("accuracy", "balanced_accuracy", "f1", "precision", "recall", "jaccard")},
    **{f"{kind}_score": kind for kind in ("cohen_kappa", "r2", "explained_variance", "roc_auc", "average_precision")},
    "mcc": "matthews_corrcoef",
    "mean_squared_error": "mse",
    "root_mean_squared_error": "rmse",
    "mean_absolute_error": "mae",
    "mean_absolute_percentage_error": "mape",
    "pearsonr": "pearson",
}
_LOWER_IS_BETTER = {
    "hamming_loss",
    "zero_one_loss",
    "log_loss",
    "perplexity",
    "mse",
    "rmse",
    "mae",
    "mape",
    "max_error",
}


@dataclass(slots=True, frozen=True)
class _Named:
    """One metric as the user asked for it."""

    statistic: type[Statistic]
    kind: str
    sign: int
    higher_is_better: bool


def _look_up(name: str) -> _Named:
    """Return what a name stands for, or raise ConfigError with all names."""
    if found := re.fullmatch(r"top([1-9]\d*)_accuracy", name):
        return _Named(TopHits, found[1], 1, higher_is_better=True)
    plain = name.removeprefix("neg_")
    kind = _ALIASES.get(plain, plain)
    for statistic, kinds in _FAMILIES.items():
        if kind in kinds and (plain == name or kind in _LOWER_IS_BETTER):
            if statistic in (PairCounts, RankedScores) and importlib.util.find_spec("sklearn") is None:
                raise MissingExtraError(f"The metric {name!r}", "scikit-learn")
            return _Named(statistic, kind, 1 if plain == name else -1, plain != name or kind not in _LOWER_IS_BETTER)
    kinds = [kind for kinds in _FAMILIES.values() for kind in kinds]
    raise ConfigError(
        f"`compute_metrics` knows no metric named {name!r}.{did_you_mean(name, [*kinds, *_ALIASES])} "
        f"The names are {', '.join(kinds)} and top<k>_accuracy; scikit-learn's long names, and neg_ before an error or "
        "a loss, work too. For any other metric pass a function f(y_true, y_pred) or a torchmetrics metric."
    )


_LARGE = 1 << 14
"""Scores in a batch from which on it is read by itself."""


class NamedMetrics:
    """Scores batches by the names of metrics; names that need the same counts share them.

    >>> metrics = NamedMetrics(["accuracy", "f1_macro"])
    >>> metrics.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    >>> metrics.compute()["accuracy"]
    0.5
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._metrics = {name: _look_up(name) for name in names}
        self.names: list[str] = list(self._metrics)
        self.higher_is_better: dict[str, bool] = {
            name: metric.higher_is_better for name, metric in self._metrics.items()
        }
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._layout = Layout()
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._waiting_kind: Any = None
        self._waiting_size = 0
        asked: dict[type[Statistic], dict[str, str]] = {}
        for name, metric in self._metrics.items():
            asked.setdefault(metric.statistic, {})[name] = metric.kind
        self._statistics = {statistic: statistic(kinds) for statistic, kinds in asked.items()}

    def update(self, outputs: Any, labels: Any) -> None:
        """Take in one batch, on its own device."""
        outputs = main_output(outputs)
        if not isinstance(outputs, torch.Tensor) or not isinstance(labels, torch.Tensor):
            raise DataError(
                f"{quote(self.names)} needs tensors, got outputs of type {type(outputs).__name__} and labels of type "
                f"{type(labels).__name__}. Pass a function f(eval_pred) as `compute_metrics`."
            )
        if labels.numel() == 0:
            return
        # Reading a batch costs much the same whatever its size, so small ones are read together: all but the first
        # of a kind, which shows at once whether it can be read.
        kind = (outputs.shape[1:], labels.shape[1:], outputs.dtype, labels.dtype, outputs.device)
        if kind != self._waiting_kind or outputs.numel() >= _LARGE or not labels.ndim:
            self._settle()
            self._take_in(outputs, labels)
            self._waiting_kind = kind
            return
        self._waiting.append((outputs, labels))
        self._waiting_size += outputs.numel()
        if self._waiting_size >= _LARGE:
            self._settle()

    def _settle(self) -> None:
        """Read the small batches that are waiting, as one."""
        waiting, self._waiting, self._waiting_size = self._waiting, [], 0
        if len(waiting) == 1:
            self._take_in(*waiting[0])
        elif waiting:
            self._take_in(torch.cat([one for one, _ in waiting]), torch.cat([one for _, one in waiting]))

    def _take_in(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        batch = Batch(outputs.detach(), labels.detach(), self._layout)
        if not labels.ndim:
            raise batch.misfit(self.names, "labels with a dimension of samples")
        for statistic in self._statistics.values():
            statistic.update(batch)

    def state(self) -> dict[str, Any]:
        """Return what another process needs to merge: numpy arrays, no predictions."""
        self._settle()
        layout = self._layout
        return {
            "statistics": [statistic.state() for statistic in self._statistics.values()],
            "layout": (layout.dim, layout.classes, int(layout.outside or 0)),
        }

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in the state of another process."""
        self._settle()
        layout, (dim, classes, outside) = self._layout, state["layout"]
        if None not in (layout.classes, classes) and (layout.dim, layout.classes) != (dim, classes):
            raise DataError(
                f"The processes disagree on the scores: {layout.classes} in dimension {layout.dim}, and {classes} "
                f"in dimension {dim}. Give every process outputs of one shape, with the classes in the last dimension."
            )
        outside = torch.tensor(outside) + (0 if layout.outside is None else layout.outside.cpu())
        self._layout = Layout(layout.dim or dim, layout.classes or classes, outside)
        for statistic, other in zip(self._statistics.values(), state["statistics"], strict=True):
            statistic.merge(other)

    def compute(self) -> dict[str, float | None]:
        """Return the results, None for a name that had nothing to score."""
        self._settle()
        layout = self._layout
        if layout.outside is not None and (outside := int(layout.outside)):
            raise DataError(
                f"{outside} labels are outside 0..{(layout.classes or 0) - 1}, though the model gives "
                f"{layout.classes} class scores. Use labels of 0 to C - 1, and {IGNORED} for what is to be ignored."
            )
        results: dict[str, float | None] = {}
        for name, metric in self._metrics.items():
            value = self._statistics[metric.statistic].compute(metric.kind)
            results[name] = None if value is None else metric.sign * value
        return results
