"""Mixes of samples: MixUp and CutMix."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from typing import Any, ClassVar

import torch

from omnitrain.compute.random_state import derive_seed
from omnitrain.core.errors import ConfigError, DataError, check_number
from omnitrain.core.events import Algorithm, TrainerLike
from omnitrain.data.collation import as_probabilities, is_image, map_entries, required_labels, tensors_in, with_labels

# Separates these random numbers from others of the same seed.
_STREAM = 0x6D6978


class Mixing(Algorithm):
    """Mixes each sample with its neighbor: the first with the second, the third with the fourth, and so on.

    Random numbers are drawn once per step, from the seed and the number of the step, so that all micro-batches and
    ranks have the same ones. Neighbors stay together however a step is split into micro-batches of even size. The last
    of an odd number of samples has no neighbor and stays unchanged.
    """

    asks_alone = False
    conflicts: ClassVar[Collection[str]] = ("MixUp", "CutMix")

    def __init__(self, num_classes: int | None, alpha: float) -> None:
        check_number("alpha", alpha, above=0)
        self.num_classes = num_classes
        self.alpha = alpha

    def set_up(self, trainer: TrainerLike) -> None:
        name, split = type(self).__name__, trainer.settings.microbatch_size
        if trainer.batch_size == 1 or split in (1, "auto"):
            setting = "batch_size=1" if trainer.batch_size == 1 else f"microbatch_size={split!r}"
            raise ConfigError(
                f"`algorithms` holds {name}, which mixes samples of a micro-batch, and `{setting}`. Pass an even "
                "number."
            )

    def transform_batch(self, trainer: TrainerLike, batch: Any) -> Any:
        label_names = trainer.settings.label_names or ()
        labels = required_labels(batch, label_names, type(self).__name__)
        progress = trainer.progress
        rng = random.Random(derive_seed(trainer.seed, progress.step + progress.skipped_steps, _STREAM))
        share = self._draw_label_share(batch, rng.betavariate(self.alpha, self.alpha), rng)
        count = len(labels)
        partner = torch.arange(count, device=labels.device) ^ 1  # swaps 0 and 1, 2 and 3, ...
        if count % 2:
            partner[-1] = count - 1
        if not any(value.is_floating_point() for value in tensors_in(batch) if value is not labels):
            raise DataError(
                f"{type(self).__name__} mixes inputs, and found no floating-point tensors in the batch: only "
                "labels would be mixed. Leave it out for token ids, or scale images of integers to floats."
            )

        def mix(value: Any) -> Any:
            is_input = isinstance(value, torch.Tensor) and value is not labels
            return self._mix(value, partner, share) if is_input else value

        probabilities = labels
        if not labels.is_floating_point():
            if self.num_classes is None:
                raise ConfigError(f"{type(self).__name__} needs `num_classes` for integer labels.")
            probabilities = as_probabilities(labels, self.num_classes)
        mixed_labels = share * probabilities + (1 - share) * probabilities[partner]
        return with_labels(map_entries(batch, mix), mixed_labels, label_names)

    def _draw_label_share(self, batch: Any, share: float, rng: random.Random) -> float:
        """Return the weight of a sample's label, as against its neighbor's, for a share from Beta(alpha, alpha)."""
        return max(share, 1 - share)  # each of two neighbors is mixed into the other, so `share` is symmetric

    def _mix(self, value: torch.Tensor, partner: torch.Tensor, share: float) -> torch.Tensor:
        """Return a tensor mixed with that of each sample's neighbor, or unchanged if it is no input to mix."""
        raise NotImplementedError


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
        sizes = {tuple(tensor.shape[-2:]) for tensor in tensors_in(batch) if is_image(tensor)}
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
