"""ProgressiveResizing: small images first, larger ones later."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from omnitrain.core.errors import ConfigError, DataError, check_number
from omnitrain.core.events import Algorithm, TrainerLike, share_of_run
from omnitrain.data.collation import get_labels, is_image, map_entries, tensors_in


class ProgressiveResizing(Algorithm):
    """Trains on downscaled images that grow to their full size.

    Images are the floating-point tensors of a batch of shape (samples, channels, height, width), labels excepted. For
    the first `delay` of the run's updates their sides are `initial_scale` of the full ones; then they grow linearly,
    and from `1 - finetune` on images are unchanged.

    Args:
        initial_scale: The initial sides of images, as a share of the full ones.
        delay: The share of the run after which images begin to grow.
        finetune: The share of the run, at its end, in which images have their full size.
        size_increment: Sides are multiples of this, in pixels.

    Raises:
        ConfigError: If an argument is wrong; before the first step, if the number of updates is unknown.
        DataError: If a batch has no images.

    >>> ProgressiveResizing(initial_scale=0.5).size_at(0.0, 224)
    112
    """

    asks_alone = False

    def __init__(
        self, initial_scale: float = 0.5, delay: float = 0.5, finetune: float = 0.2, size_increment: int = 4
    ) -> None:
        check_number("initial_scale", initial_scale, above=0, below=1)
        check_number("delay", delay, least=0, below=1)
        check_number("finetune", finetune, least=0, below=1)
        check_number("size_increment", size_increment, least=1, is_whole=True)
        if delay + finetune > 1:
            raise ConfigError(f"`delay={delay}` and `finetune={finetune}` add up to more than the run.")
        self.initial_scale = initial_scale
        self.delay = delay
        self.finetune = finetune
        self.size_increment = size_increment

    def size_at(self, done: float, side: int) -> int:
        """Return the length of a side of `side` pixels after this share of the run."""
        growing = 1 - self.finetune - self.delay
        if done >= 1 - self.finetune:
            return side
        grown = max(done - self.delay, 0) / growing if growing > 0 else 0
        scale = self.initial_scale + (1 - self.initial_scale) * grown
        return min(max(round(side * scale / self.size_increment) * self.size_increment, 1), side)

    def set_up(self, trainer: TrainerLike) -> None:
        share_of_run(trainer, "ProgressiveResizing", 0)

    def transform_batch(self, trainer: TrainerLike, batch: Any) -> Any:
        done = share_of_run(trainer, "ProgressiveResizing", trainer.progress.step)
        labels = get_labels(batch, trainer.settings.label_names or ())
        if not any(is_image(tensor) and tensor is not labels for tensor in tensors_in(batch)):
            shapes = [f"{tensor.dtype} of shape {tuple(tensor.shape)}" for tensor in tensors_in(batch)]
            raise DataError(
                "ProgressiveResizing needs images, floating-point tensors of shape (samples, channels, height, width), "
                f"and found {', '.join(shapes) or 'no tensors'} in the batch. Scale images of integers to floats, or "
                "leave it out."
            )

        def rescale(value: Any) -> Any:
            if not is_image(value) or value is labels:
                return map_entries(value, rescale)
            size = [self.size_at(done, side) for side in value.shape[-2:]]
            if size == list(value.shape[-2:]):
                return value
            return F.interpolate(value, size=size, mode="bilinear", align_corners=False, antialias=True)

        return rescale(batch)
