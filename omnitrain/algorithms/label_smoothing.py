"""Label smoothing: part of every label's probability goes to all classes (Szegedy et al., 2016, arXiv:1512.00567)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from omnitrain.data.collation import LABEL_KEYS, labels_of
from omnitrain.errors import ConfigError, DataError
from omnitrain.events import Algorithm, TrainerLike

__all__ = ["LabelSmoothing"]


class LabelSmoothing(Algorithm):
    """Replaces integer labels of shape (samples,) by probabilities of shape (samples, num_classes), smoothed.

    Args:
        num_classes: Number of classes.
        smoothing: Share of the probability that is spread over all classes.

    >>> LabelSmoothing(num_classes=10, smoothing=0.1).smoothing
    0.1
    """

    def __init__(self, num_classes: int, smoothing: float = 0.1) -> None:
        if not 0 < smoothing < 1:
            raise ConfigError(f"`smoothing` must be between 0 and 1, got {smoothing!r}.")
        self.num_classes = num_classes
        self.smoothing = smoothing

    def transform_batch(self, trainer: TrainerLike, batch: Any) -> Any:
        """Return the batch with smoothed labels; labels that are probabilities already are smoothed too."""
        labels = labels_of(batch)
        if not isinstance(labels, torch.Tensor):
            raise DataError("LabelSmoothing needs labels: a dict batch with 'labels', or a tuple of (inputs, labels).")
        if not labels.is_floating_point():
            labels = F.one_hot(labels, self.num_classes).to(torch.get_default_dtype())
        smooth = labels * (1 - self.smoothing) + self.smoothing / self.num_classes
        if isinstance(batch, Mapping):
            name = next(key for key in LABEL_KEYS if key in batch)
            return {**batch, name: smooth}
        return (*batch[:-1], smooth)
