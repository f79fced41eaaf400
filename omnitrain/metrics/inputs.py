"""Shapes and dtypes of outputs and labels for named metrics.

Nothing here synchronizes with the device.

* Classification: integer (or bool) labels with class scores of one more dimension, `(N, C)`, `(N, L, C)` or
  torch's `(N, C, L)`; if both of the last two would fit, the last dimension is the classes. The predicted
  class is the argmax. Integer outputs of the labels' shape are taken as predictions. Labels of -100, and of the
  loss's `ignore_index`, are ignored.
  Nothing is shifted: the scores at a position are compared with the label at that position.
* One score for each label of 0 or 1: scores have the labels' shape, up to a dimension of 1. With one label per sample
  these are two classes; with several they are multi-label, or one-hot classes. The loss decides (`Scores`). If it does
  not, labels are one-hot if every row of the set has a single 1; scores are probabilities if all in the set are
  between 0 and 1, with a threshold of 0.5, and logits otherwise, with a threshold of 0.
* Regression: outputs have the labels' shape, up to a last dimension of 1. Each sample is one row, and results are
  averaged over its columns. A NaN label is left out only of its own column; -100 is a number like any other.
* For a tuple of outputs its first entry is used, for a mapping its "logits".
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from omnitrain.core.errors import DataError
from omnitrain.core.history import quote_names
from omnitrain.data.collation import IGNORED_LABEL


def main_output(outputs: Any) -> Any:
    """Return the tensor to score: a tuple's first entry, a mapping's "logits" or only entry."""
    if isinstance(outputs, Mapping):
        if "logits" not in outputs and len(outputs) != 1:
            raise DataError(
                f"Cannot tell which of the outputs {list(outputs)} is to be scored. Name it 'logits', or pass a "
                "function f(eval_pred) as `compute_metrics`."
            )
        return outputs["logits"] if "logits" in outputs else next(iter(outputs.values()))
    if isinstance(outputs, (tuple, list)) and outputs:
        return outputs[0]
    return outputs


def is_text(values: Any) -> bool:
    """Return whether these are texts."""
    return isinstance(values, (list, tuple)) and bool(values) and all(isinstance(value, str) for value in values)


def class_dimension(outputs: Sequence[int], labels: Sequence[int], known: int | None = None) -> int | None:
    """Return which dimension of outputs of this shape holds the class scores (-1 or 1), or None if none does.

    If both fit, `known` decides (the dimension found in an earlier batch); without it, the last one is used.
    """
    outputs, labels = tuple(outputs), tuple(labels)
    if len(outputs) != len(labels) + 1 or not labels:
        return None
    fits = [-1] if outputs[:-1] == labels and outputs[-1] > 1 else []
    if len(outputs) > 2 and outputs[:1] + outputs[2:] == labels and outputs[1] > 1:
        fits.append(1)
    return known if known in fits else next(iter(fits), None)


def differ_by_unit_dim(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether one of two shapes is the other with an added last dimension of 1."""
    return tuple(shape) == (*other, 1) or (*shape, 1) == tuple(other)


def _differ_by_inner_unit_dim(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether one of two shapes is the other with an added dimension of 1, the last or torch's channels."""
    longer, shorter = sorted((tuple(shape), tuple(other)), key=len, reverse=True)
    return differ_by_unit_dim(shape, other) or (
        len(longer) > 1 and longer[1] == 1 and longer[:1] + longer[2:] == shorter
    )


def is_integer(tensor: torch.Tensor) -> bool:
    """Return whether the tensor holds integers or bools."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def on_wide_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on a device with 64-bit sums: MPS has no float64."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


@dataclass(slots=True, frozen=True)
class Scores:
    """What is known about the scores in advance, from their loss; None is unknown."""

    are_probabilities: bool | None = None
    are_of_classes: bool | None = None
    """Whether the classes of a sample exclude each other, so that labels of the scores' shape are one-hot."""
    ignore_index: int = field(default=IGNORED_LABEL, repr=False)
    """The integer label that the loss leaves out; it is left out here as well as -100."""


@dataclass(slots=True)
class Layout:
    """What the batches so far show about the scores. The counts stay on the device and are read once, at the end."""

    dim: int | None = None
    classes: int | None = None
    columns: int | None = None
    """The number of labels per sample, if there is a score for each."""
    outside: Any = 0
    """How many labels were not a class."""
    nan: Any = 0
    """How many samples had a NaN score."""
    unbounded: Any = 0
    """How many scores of 0/1 labels, or rows of class scores, cannot be probabilities."""
    not_one_hot: Any = 0
    """How many rows of 0/1 labels do not have exactly one 1."""
    scores: Scores = Scores()

    COUNTS: ClassVar[tuple[str, ...]] = ("outside", "nan", "unbounded", "not_one_hot")

    def add(self, **counts: Any) -> None:
        """Add to the counts."""
        for name, count in counts.items():
            before = getattr(self, name)
            if isinstance(before, torch.Tensor) and isinstance(count, torch.Tensor):
                before = before.to(count.device)
            setattr(self, name, before + count)

    @property
    def are_probabilities(self) -> bool:
        """Whether the scores of all batches so far are probabilities."""
        known = self.scores.are_probabilities
        return not int(self.unbounded) if known is None else known

    @property
    def is_one_hot(self) -> bool:
        """Whether labels of the scores' shape are one-hot."""
        known = self.scores.are_of_classes
        return bool(self.columns and self.columns > 1) and (not int(self.not_one_hot) if known is None else known)

    @property
    def is_multi_label(self) -> bool:
        """Whether a sample has several labels of 0 or 1."""
        return bool(self.columns and self.columns > 1) and not self.is_one_hot


@dataclass(slots=True)
class Indicators:
    """A batch with one score for each label of 0 or 1, of shape (samples, labels per sample)."""

    scores: torch.Tensor
    labels: torch.Tensor
    """int64; where not `valid`, 0."""
    valid: torch.Tensor


@dataclass(slots=True)
class Classes:
    """A batch in the form for classification metrics."""

    outputs: torch.Tensor
    labels: torch.Tensor
    """int64; where not `valid`, 0."""
    valid: torch.Tensor
    layout: Layout
    has_scores: bool

    def predicted(self) -> torch.Tensor:
        """Return the predicted classes, in the labels' shape."""
        dim = self.layout.dim
        if not self.has_scores or dim is None:
            return self.outputs
        predicted = self.outputs.argmax(dim)  # in a row with a NaN, the NaN
        best = self.outputs.gather(dim, predicted.unsqueeze(dim)).squeeze(dim)
        self.layout.add(nan=(best.isnan() & self.valid).sum())
        return predicted

    def scores(self, names: Sequence[str]) -> tuple[torch.Tensor, int]:
        """Return the class scores and their dimension of classes, or raise DataError if there are only predictions."""
        if not self.has_scores or self.layout.dim is None:
            raise DataError(
                f"{quote_names(names)} needs class scores (N, C), got predictions that are {_describe(self.outputs)}. "
                "Return the model's scores, or leave this metric out."
            )
        return self.outputs, self.layout.dim


class Batch:
    """Outputs and labels of one batch; the form for classification is computed once for all metrics."""

    def __init__(self, outputs: torch.Tensor, labels: torch.Tensor, layout: Layout) -> None:
        self.outputs: torch.Tensor = outputs
        labels, ignore_index = labels.to(outputs.device), layout.scores.ignore_index
        if ignore_index != IGNORED_LABEL and is_integer(labels):
            labels = labels.long().masked_fill(labels == ignore_index, IGNORED_LABEL)
        self.labels: torch.Tensor = labels
        self.names: Sequence[str] = ()
        """The metrics that are updated now, for errors."""
        self._layout = layout

    @functools.cached_property
    def indicators(self) -> Indicators | None:
        """The batch with one score for each label; None if there are class scores or integer outputs."""
        scores, labels, layout = self.outputs, self.labels, self._layout
        if is_integer(scores):
            return None
        if labels.shape != scores.shape and not _differ_by_inner_unit_dim(labels.shape, scores.shape):
            return None
        columns = scores.shape[1] if scores.ndim == 2 and labels.ndim == 2 else 1
        if (layout.classes is not None and layout.columns is None) or layout.columns not in (None, columns):
            expected = f"{layout.columns} labels a sample" if layout.columns else f"{layout.classes} class scores"
            raise self.shape_error(f"{expected}, as in the batches before")
        layout.columns = columns
        scores, labels = scores.reshape(-1, columns), labels.reshape(-1, columns)
        valid = (labels == 0) | (labels == 1)
        counted = labels != IGNORED_LABEL
        layout.add(
            outside=(counted & ~valid).sum(),
            nan=(scores.isnan() & valid).sum(),
            unbounded=(((scores < 0) | (scores > 1)) & valid).sum(),
            not_one_hot=((labels == 1).sum(1) != 1).sum() if columns > 1 else 0,
        )
        return Indicators(scores, labels.where(valid, 0).long(), valid)

    @functools.cached_property
    def classes(self) -> Classes:
        """The batch in the form for classification metrics."""
        outputs, layout = self.outputs, self._layout
        indicators = self.indicators
        if indicators is not None and layout.columns != 1:
            layout.dim, layout.classes = -1, layout.columns
            labels, valid = indicators.labels.argmax(1), indicators.valid.all(1)
            return Classes(outputs, labels.where(valid, 0), valid, layout, has_scores=True)
        if not is_integer(self.labels):
            raise self.shape_error("integer labels, or labels of 0 and 1 with one score each")
        labels = self.labels.long()
        if is_integer(outputs):
            if outputs.shape != labels.shape:
                raise self.shape_error("integer predictions of the labels' shape, or class scores (N, C)")
            valid = labels != IGNORED_LABEL
            return Classes(outputs.long(), labels.where(valid, 0), valid, layout, has_scores=False)
        dim = class_dimension(outputs.shape, labels.shape, layout.dim)
        if dim is None:
            raise self.shape_error("class scores (N, C) for labels (N,), or integer predictions")
        if layout.classes is not None and (layout.dim, layout.classes) != (dim, outputs.shape[dim]):
            raise self.shape_error(f"{layout.classes} classes in dimension {layout.dim}, as in the batches before")
        layout.dim, layout.classes = dim, outputs.shape[dim]
        valid = (labels >= 0) & (labels < layout.classes)
        layout.add(outside=((labels != IGNORED_LABEL) & ~valid).sum())
        return Classes(outputs, labels.where(valid, 0), valid, layout, has_scores=True)

    def shape_error(self, expected: str) -> DataError:
        """Return the error that says which shapes and types were expected."""
        return DataError(
            f"{quote_names(self.names)} cannot score outputs that are {_describe(self.outputs)} against labels that "
            f"are {_describe(self.labels)}. Expected {expected}. To score them otherwise, pass a function "
            "f(y_true, y_pred) or f(eval_pred) as `compute_metrics`."
        )


class Statistic(ABC):
    """Base class of what a family of metrics accumulates over batches.

    Args:
        kind_by_name: The kinds of the family's metrics by the names that the user gives them.
    """

    def __init__(self, kind_by_name: Mapping[str, str]) -> None:
        self.names: list[str] = list(kind_by_name)

    @abstractmethod
    def update(self, batch: Batch) -> None:
        """Take in one batch."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what another process needs to merge, without tensors."""

    @abstractmethod
    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in the state of another process."""

    @abstractmethod
    def compute(self, kind: str, layout: Layout) -> float | None:
        """Return the result, or None if there was nothing to score."""


class StoredRows(Statistic):
    """Base class of statistics that keep all labels and scores, for rankings and medians, which sums cannot give."""

    def __init__(self, kind_by_name: Mapping[str, str]) -> None:
        super().__init__(kind_by_name)
        self._labels: list[np.ndarray] = []
        self._scores: list[np.ndarray] = []

    def state(self) -> dict[str, Any]:
        return {"labels": list(self._labels), "scores": list(self._scores)}

    def merge(self, state: Mapping[str, Any]) -> None:
        self._labels += state["labels"]
        self._scores += state["scores"]
