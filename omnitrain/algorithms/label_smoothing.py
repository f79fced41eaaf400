"""Label smoothing: a share of each label's probability goes to all classes (Szegedy et al., 2016, arXiv:1512.00567)."""

from __future__ import annotations

from typing import Any

from omnitrain.data.collation import as_probabilities, required_labels, with_labels
from omnitrain.errors import ConfigError
from omnitrain.events import Algorithm, TrainerLike

__all__ = ["LabelSmoothing"]


class LabelSmoothing(Algorithm):
    """Replaces integer labels of shape (samples,) with smoothed probabilities of shape (samples, num_classes).

    Args:
        num_classes: Number of classes.
        smoothing: The share of the probability that is spread over all classes.

    >>> LabelSmoothing(num_classes=10, smoothing=0.1).smoothing
    0.1
    """

    def __init__(self, num_classes: int, smoothing: float = 0.1) -> None:
        if not 0 < smoothing < 1:
            raise ConfigError(f"`smoothing` must be between 0 and 1, got {smoothing!r}.")
        self.num_classes = num_classes
        self.smoothing = smoothing

    def transform_batch(self, trainer: TrainerLike, batch: Any) -> Any:
        """Return the batch with smoothed labels; labels that already are probabilities are smoothed too."""
        names = trainer.settings.label_names or ()
        labels = required_labels(batch, names, "LabelSmoothing")
        if not labels.is_floating_point():
            labels = as_probabilities(labels, self.num_classes)
        return with_labels(batch, labels * (1 - self.smoothing) + self.smoothing / self.num_classes, names)
