"""CutMix: a box of each image is cut out of another one."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import torch

from omnitrain.algorithms.mixing import Mixing
from omnitrain.core.errors import DataError
from omnitrain.data.collation import is_image


class CutMix(Mixing):
    """Replaces a box of each image by that of its neighbor, and mixes labels by area (arXiv:1905.04899).

    Images are the floating-point tensors of the batch of shape (samples, channels, height, width). One box is drawn for
    each step: its area from Beta(alpha, alpha), its centre anywhere. Numbers are the same in every split of a step into
    micro-batches of even size. Labels become probabilities of shape (samples, num_classes).

    Args:
        num_classes: Number of classes of integer labels; None for labels that are floats already.
        alpha: Parameter of the Beta distribution; 1 makes all areas alike.

    Raises:
        ConfigError: If `alpha` is not positive; before the first step, if a micro-batch holds one sample, or
            `microbatch_size="auto"`.
        DataError: If a batch has no images.

    >>> CutMix(num_classes=10).alpha
    1.0
    """

    def __init__(self, num_classes: int | None = None, alpha: float = 1.0) -> None:
        super().__init__(num_classes, alpha)
        self._box = slice(0), slice(0)

    def _draw_label_share(self, batch: Any, share: float, rng: random.Random) -> float:
        entries = batch.values() if isinstance(batch, Mapping) else batch
        sizes = {tuple(entry.shape[-2:]) for entry in entries if is_image(entry)}
        if len(sizes) != 1:
            received = "none" if not sizes else f"those of sizes {sorted(sizes)}"
            raise DataError(
                "CutMix needs images of one size, floating-point tensors of shape (samples, channels, height, width), "
                f"and found {received} in the batch."
            )
        slices, side, area = [], math.sqrt(1 - share), 1.0  # up to the full image, unlike a mix, which is symmetric
        for length in next(iter(sizes)):
            half, centre = length * side / 2, rng.random() * length
            first, last = max(round(centre - half), 0), min(round(centre + half), length)
            slices.append(slice(first, last))
            area *= (last - first) / length
        self._box = slices[0], slices[1]
        return 1 - area

    def _mix(self, value: torch.Tensor, partner: torch.Tensor, share: float) -> torch.Tensor:
        if not is_image(value):
            return value
        mixed = value.clone()
        mixed[..., self._box[0], self._box[1]] = value[partner][..., self._box[0], self._box[1]]
        return mixed
