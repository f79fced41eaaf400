"""Label smoothing: part of every label's probability goes to all classes."""

from __future__ import annotations

from typing import Any

import torch

from omnitrain.core.errors import ConfigError, DataError, check_number
from omnitrain.core.events import Algorithm, TrainerLike
from omnitrain.core.foreign_names import explain_call
from omnitrain.data.collation import as_probabilities, required_labels, with_labels


class LabelSmoothing(Algorithm):
    """Spreads part of each label's probability over all classes (arXiv:1512.00567).

    Integer labels of shape (samples,) become probabilities of shape (samples, num_classes), and probabilities are
    smoothed. Of integer labels of more dimensions, such as one for each token or pixel, the loss is smoothed instead:
    the model's or `loss_fn`'s cross entropy becomes what it is for smoothed labels, over the labels that are not -100.
    It must be the only part of the loss: with a z-loss or others, use `label_smoothing` of `CrossEntropy`.
    Classes are the last dimension of the outputs, or the second one, as in (samples, classes, height, width).

    Args:
        num_classes: Number of classes.
        smoothing: Share of the probability that is spread over all classes.

    Raises:
        ConfigError: If `smoothing` is not between 0 and 1; in the first step, if the loss of tokens or pixels has
            several parts, or a class weight of 0.
        DataError: If there are no labels, or no outputs that fit them.

    >>> LabelSmoothing(num_classes=10, smoothing=0.1).smoothing
    0.1
    """

    asks_alone = False

    @explain_call
    def __init__(self, num_classes: int, smoothing: float = 0.1) -> None:
        check_number("smoothing", smoothing, above=0, below=1)
        self.num_classes = num_classes
        self.smoothing = smoothing
        self._is_checked = False

    def set_up(self, trainer: TrainerLike) -> None:
        self._is_checked = False

    def transform_batch(self, trainer: TrainerLike, batch: Any) -> Any:
        names = trainer.settings.label_names or ()
        labels = required_labels(batch, names, "LabelSmoothing")
        if _has_many_per_sample(labels):
            return batch
        if not labels.is_floating_point():
            labels = as_probabilities(labels, self.num_classes)
        return with_labels(batch, labels * (1 - self.smoothing) + self.smoothing / self.num_classes, names)

    def transform_output(self, trainer: TrainerLike, output: Any) -> Any:
        labels, scores = output.labels, output.outputs
        if not isinstance(labels, torch.Tensor) or not _has_many_per_sample(labels):
            return output
        if not self._is_checked:  # once, as reading class weights waits for the device
            _check_loss(output, trainer.loss_mean)
            self._is_checked = True
        counts = trainer.loss_mean.counted(labels)
        shape = tuple(scores.shape) if isinstance(scores, torch.Tensor) else ()
        if shape == (*labels.shape, self.num_classes):
            if trainer.loss_mean.shift:
                scores, labels, counts = scores[:, :-1], labels[:, 1:], counts[:, 1:]
        elif shape == (labels.shape[0], self.num_classes, *labels.shape[1:]):
            scores = scores.movedim(1, -1)
        else:
            received = f"of shape {shape}" if shape else f"a {type(scores).__name__}"
            raise DataError(
                f"LabelSmoothing needs scores of {self.num_classes} classes for labels of shape {tuple(labels.shape)}, "
                f"and the outputs are {received}. Correct `num_classes`, or smooth in a custom loss."
            )
        losses = -torch.log_softmax(scores.float() if scores.dtype.itemsize < 4 else scores, dim=-1)
        weights, divisor = trainer.loss_mean.class_weights, counts
        if weights is not None:
            weights = weights.to(losses)
            losses, divisor = losses * weights, torch.where(counts, weights[labels.where(counts, 0)], 0.0)
        total = torch.where(counts, losses.mean(dim=-1), 0.0).sum()
        if output.num_targets is None:
            total = total / divisor.sum()
        output.loss = (1 - self.smoothing) * output.required_loss() + self.smoothing * total
        return output


def _has_many_per_sample(labels: torch.Tensor) -> bool:
    return labels.dim() > 1 and not labels.is_floating_point()


def _check_loss(output: Any, mean: Any) -> None:
    """Raise ConfigError for a loss of which only a part is to be smoothed, or that would be divided by nothing."""
    parts = [name for name in output.metrics or () if name.startswith("loss_")]
    if parts:
        raise ConfigError(
            f"The loss has the parts {', '.join(map(repr, parts))}, and LabelSmoothing of tokens or pixels smooths a "
            "loss that is nothing but a cross entropy. Leave LabelSmoothing out, and smooth the cross entropy "
            "itself: CrossEntropy(label_smoothing=...), with a `z_loss` or as a part of WeightedLosses."
        )
    weights = mean.class_weights
    if weights is not None and not bool(weights.all()):
        raise ConfigError(
            f"Class {int((weights == 0).nonzero()[0])} has the class weight 0, and LabelSmoothing gives a share of its "
            "labels to other classes, whose mean would divide by 0. Give it a small weight, or make its labels -100."
        )
