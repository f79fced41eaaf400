"""How the outputs and labels of a batch are read: the rules of shapes and types for every metric asked for by name.

Nothing here computes a metric, and nothing waits for the device.

* Classification: integer (or bool) labels with class scores of one more dimension, `(N, C)`, `(N, L, C)` or
  torch's `(N, C, L)`; where both of the last two would fit, the last dimension is the classes. The predicted
  class is the argmax. Integer outputs of the labels' shape are taken as predictions. Labels of -100 are ignored.
  Nothing is shifted: the scores at a position are compared with the label at that position.
* Regression: outputs of the labels' shape, but for a last dimension of 1. Each sample is one row, and results are
  averaged over its columns. A NaN label is left out of its own column only; -100 is a number like any other.
* A tuple of outputs stands for its first entry, a mapping for its "logits".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omnitrain.errors import DataError

IGNORED = -100
"""The integer label that torch and transformers leave out of a loss, and every metric here leaves out too."""


def main_output(outputs: Any) -> Any:
    """Return the tensor that is scored: a tuple's first entry, a mapping's "logits" or only entry."""
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


def class_dimension(outputs: Sequence[int], labels: Sequence[int], known: int | None = None) -> int | None:
    """Return which dimension of outputs of this shape holds the class scores (-1 or 1), or None if none does.

    Where both would do, `known` decides (what an earlier batch showed), and without it the last one is taken.
    """
    outputs, labels = tuple(outputs), tuple(labels)
    if len(outputs) != len(labels) + 1 or not labels:
        return None
    fits = [-1] if outputs[:-1] == labels and outputs[-1] > 1 else []
    if len(outputs) > 2 and outputs[:1] + outputs[2:] == labels and outputs[1] > 1:
        fits.append(1)
    return known if known in fits else next(iter(fits), None)


def differ_by_last_one(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether one of two shapes is the other with a last dimension of 1."""
    return tuple(one) == (*other, 1) or (*one, 1) == tuple(other)


def is_integer(tensor: torch.Tensor) -> bool:
    """Return whether the tensor holds integers or bools."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def quote(names: Sequence[str]) -> str:
    """Return the names as an error message prints them."""
    return ", ".join(repr(name) for name in names)


def on_wide_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor where 64-bit sums can be made: MPS has no float64."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


@dataclass(slots=True)
class Layout:
    """What the batches so far showed about the class scores."""

    dim: int | None = None
    classes: int | None = None
    outside: torch.Tensor | None = None
    """How many labels were no class. Stays on the device, to be read once at the end."""


@dataclass(slots=True)
class Classes:
    """A batch as classification metrics read it."""

    outputs: torch.Tensor
    labels: torch.Tensor
    """int64; where not `valid`, 0."""
    valid: torch.Tensor
    layout: Layout
    has_scores: bool

    def predicted(self) -> torch.Tensor:
        """Return the predicted classes, in the labels' shape."""
        return self.outputs.argmax(self.layout.dim) if self.has_scores else self.outputs

    def scores(self, names: Sequence[str]) -> torch.Tensor:
        """Return the class scores, or raise DataError where there are only predictions."""
        if not self.has_scores:
            raise DataError(
                f"{quote(names)} needs class scores (N, C), got predictions that are {_describe(self.outputs)}. "
                "Return the model's scores, or leave this metric out."
            )
        return self.outputs


class Batch:
    """Outputs and labels of one batch; the class reading is made once, however many metrics ask for it."""

    def __init__(self, outputs: torch.Tensor, labels: torch.Tensor, layout: Layout) -> None:
        self.outputs: torch.Tensor = outputs
        self.labels: torch.Tensor = labels.to(outputs.device)
        self._layout = layout
        self._classes: Classes | None = None

    def classes(self, names: Sequence[str]) -> Classes:
        """Return the batch as classification metrics read it; `names` are those to name in an error."""
        if self._classes is None:
            self._classes = self._read_classes(names)
        return self._classes

    def _read_classes(self, names: Sequence[str]) -> Classes:
        outputs, layout = self.outputs, self._layout
        if not is_integer(self.labels):
            raise self.misfit(names, "integer labels")
        labels = self.labels.long()
        if is_integer(outputs):
            if outputs.shape != labels.shape:
                raise self.misfit(names, "integer predictions of the labels' shape, or class scores (N, C)")
            valid = labels != IGNORED
            return Classes(outputs.long(), labels.where(valid, 0), valid, layout, has_scores=False)
        dim = class_dimension(outputs.shape, labels.shape, layout.dim)
        if dim is None:
            raise self.misfit(names, "class scores (N, C) for labels (N,), or integer predictions")
        if layout.classes is not None and (layout.dim, layout.classes) != (dim, outputs.shape[dim]):
            raise self.misfit(names, f"{layout.classes} classes in dimension {layout.dim}, as in the batches before")
        layout.dim, layout.classes = dim, outputs.shape[dim]
        valid = (labels >= 0) & (labels < layout.classes)
        outside = ((labels != IGNORED) & ~valid).sum()
        layout.outside = outside if layout.outside is None else layout.outside + outside
        return Classes(outputs, labels.where(valid, 0), valid, layout, has_scores=True)

    def misfit(self, names: Sequence[str], expected: str) -> DataError:
        """Return the error that says what was expected of the shapes and types."""
        return DataError(
            f"{quote(names)} cannot score outputs that are {_describe(self.outputs)} against labels that are "
            f"{_describe(self.labels)}. Expected {expected}. To score them otherwise, pass a function "
            "f(y_true, y_pred) or f(eval_pred) as `compute_metrics`."
        )
