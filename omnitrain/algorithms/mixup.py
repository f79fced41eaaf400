"""MixUp: training on convex combinations of samples (Zhang et al., 2018, arXiv:1710.09412)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from omnitrain.data.collation import as_probabilities, required_labels, with_labels
from omnitrain.errors import ConfigError
from omnitrain.events import Algorithm, TrainerLike

__all__ = ["MixUp"]


class MixUp(Algorithm):
    """Mixes each sample of a batch with another one, both inputs and labels.

    Labels become probabilities of shape (samples, num_classes), which `cross_entropy` accepts. One factor is drawn per
    micro-batch from Beta(alpha, alpha), so results depend on how a window is split into micro-batches.

    Args:
        num_classes: Number of classes, for integer labels; None if labels are floats.
        alpha: Parameter of the Beta distribution; the larger, the stronger the mix.

    >>> MixUp(num_classes=10, alpha=0.2).num_classes
    10
    """

    def __init__(self, num_classes: int | None = None, alpha: float = 0.2) -> None:
        if not alpha > 0:
            raise ConfigError(f"`alpha` must be a positive number, got {alpha!r}.")
        self.num_classes = num_classes
        self.alpha = alpha

    def transform_batch(self, trainer: TrainerLike, batch: Any) -> Any:
        """Return the mixed batch: every floating-point tensor and the labels."""
        names = trainer.settings.label_names or ()
        labels = required_labels(batch, names, "MixUp")
        # drawn on the host, so that nothing waits for a device
        factor = float(torch.distributions.Beta(self.alpha, self.alpha).sample().numpy())
        factor = max(factor, 1 - factor)
        partner = torch.randperm(len(labels)).to(labels.device, non_blocking=True)

        def mix(tensor: torch.Tensor) -> torch.Tensor:
            return factor * tensor + (1 - factor) * tensor[partner]

        entries = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        mixed = {key: self._mixed(value, mix) for key, value in entries}
        whole = mixed if isinstance(batch, Mapping) else tuple(mixed.values())
        return with_labels(whole, mix(self._as_probabilities(labels)), names)

    @staticmethod
    def _mixed(value: Any, mix: Any) -> Any:
        return mix(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def _as_probabilities(self, labels: torch.Tensor) -> torch.Tensor:
        if labels.is_floating_point():
            return labels
        if self.num_classes is None:
            raise ConfigError("MixUp needs `num_classes` for integer labels.")
        return as_probabilities(labels, self.num_classes)
