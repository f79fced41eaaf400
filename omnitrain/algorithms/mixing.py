"""Base class of MixUp and CutMix."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch

from omnitrain.compute.random_state import derive_seed
from omnitrain.core.errors import ConfigError, DataError
from omnitrain.core.events import Algorithm, TrainerLike
from omnitrain.data.collation import as_probabilities, required_labels, with_labels

# Separates these random numbers from others of the same seed.
_STREAM = 0x6D6978


class Mixing(Algorithm):
    """Mixes each sample with its neighbor: the first with the second, the third with the fourth, and so on.

    Random numbers are drawn once per step, from the seed and the number of the step, so that all micro-batches and
    ranks have the same ones. Neighbors stay together however a step is split into micro-batches of even size. The last
    of an odd number of samples has no neighbor and stays unchanged. Labels become probabilities of shape
    (samples, num_classes), which `cross_entropy` takes.

    Args:
        num_classes: Number of classes of integer labels; None for labels that are floats already.
        alpha: Parameter of the Beta distribution of the shares; larger values mix more.
    """

    asks_alone = False
    conflicts: ClassVar[Collection[str]] = ("MixUp", "CutMix")

    def __init__(self, num_classes: int | None, alpha: float) -> None:
        if not alpha > 0:
            raise ConfigError(f"`alpha` must be a positive number, got {alpha!r}.")
        self.num_classes = num_classes
        self.alpha = alpha

    def set_up(self, trainer: TrainerLike) -> None:
        """Reject micro-batches of one sample, which has no neighbor.

        Raises:
            ConfigError: If `batch_size` is 1, or `microbatch_size` is 1 or "auto".
        """
        name, split = type(self).__name__, trainer.settings.microbatch_size
        if trainer.batch_size == 1 or split in (1, "auto"):
            setting = "batch_size=1" if trainer.batch_size == 1 else f"microbatch_size={split!r}"
            raise ConfigError(
                f"`algorithms` holds {name}, which mixes samples of a micro-batch, and `{setting}`. Pass an even "
                "number."
            )

    def transform_batch(self, trainer: TrainerLike, batch: Any) -> Any:
        """Return the batch with floating-point inputs and labels mixed."""
        label_names = trainer.settings.label_names or ()
        labels = required_labels(batch, label_names, type(self).__name__)
        progress = trainer.progress
        rng = random.Random(derive_seed(trainer.seed, progress.step + progress.skipped_steps, _STREAM))
        share = self._draw_label_share(batch, rng.betavariate(self.alpha, self.alpha), rng)
        count = len(labels)
        partner = torch.arange(count, device=labels.device) ^ 1  # swaps 0 and 1, 2 and 3, ...
        if count % 2:
            partner[-1] = count - 1
        entries = dict(batch.items() if isinstance(batch, Mapping) else enumerate(batch))
        inputs = {
            key: value for key, value in entries.items() if isinstance(value, torch.Tensor) and value is not labels
        }
        if not any(value.is_floating_point() for value in inputs.values()):
            raise DataError(
                f"{type(self).__name__} mixes inputs, and found no floating-point tensors in the batch: only "
                "labels would be mixed. Leave it out for token ids, or scale images of integers to floats."
            )
        mixed = entries | {key: self._mix(value, partner, share) for key, value in inputs.items()}
        probabilities = self._as_probabilities(labels)
        mixed_batch = mixed if isinstance(batch, Mapping) else tuple(mixed.values())
        return with_labels(mixed_batch, share * probabilities + (1 - share) * probabilities[partner], label_names)

    def _draw_label_share(self, batch: Any, share: float, rng: random.Random) -> float:
        """Draw any further random numbers of a step; return the weight of a sample's label, as against its neighbor's.

        Args:
            batch: The batch.
            share: The number from Beta(alpha, alpha).
            rng: The random number generator of the step.
        """
        return max(share, 1 - share)  # each of two neighbors is mixed into the other, so `share` is symmetric

    def _mix(self, value: torch.Tensor, partner: torch.Tensor, share: float) -> torch.Tensor:
        """Return a tensor of the batch mixed, or unchanged if it is no input to mix.

        Args:
            value: The tensor.
            partner: The index of each sample's neighbor.
            share: The result of `_draw_label_share`.
        """
        raise NotImplementedError

    def _as_probabilities(self, labels: torch.Tensor) -> torch.Tensor:
        if labels.is_floating_point():
            return labels
        if self.num_classes is None:
            raise ConfigError(f"{type(self).__name__} needs `num_classes` for integer labels.")
        return as_probabilities(labels, self.num_classes)
