"""MixUp: training on convex combinations of samples."""

from __future__ import annotations

import torch

from omnitrain.algorithms.mixing import Mixing


class MixUp(Mixing):
    """Mixes each sample with its neighbor, inputs and labels (arXiv:1710.09412).

    Every floating-point tensor of the batch becomes `share * sample + (1 - share) * neighbor`, with one share for each
    step from Beta(alpha, alpha). Numbers are the same in every split of a step into micro-batches of even size. Labels
    become probabilities of shape (samples, num_classes), which `cross_entropy` takes.

    Args:
        num_classes: Number of classes of integer labels; None for labels that are floats already.
        alpha: Parameter of the Beta distribution; larger values mix more.

    Raises:
        ConfigError: If `alpha` is not positive; before the first step, if a micro-batch holds one sample, or
            `microbatch_size="auto"`.
        DataError: If a batch has no inputs of floating-point numbers.

    >>> MixUp(num_classes=10, alpha=0.2).num_classes
    10
    """

    def __init__(self, num_classes: int | None = None, alpha: float = 0.2) -> None:
        super().__init__(num_classes, alpha)

    def _mix(self, value: torch.Tensor, partner: torch.Tensor, share: float) -> torch.Tensor:
        return share * value + (1 - share) * value[partner] if value.is_floating_point() else value
