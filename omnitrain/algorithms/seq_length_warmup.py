"""SeqLengthWarmup: short sequences first, longer ones later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from omnitrain.core.errors import ConfigError, DataError, check_number
from omnitrain.core.events import Algorithm, TrainerLike, share_of_run
from omnitrain.data.collation import required_labels


class SeqLengthWarmup(Algorithm):
    """Truncates sequences to a length that grows linearly from `min_length` to `max_length` (arXiv:2108.06084).

    Every tensor of a dict batch whose second dimension is that of the labels is truncated. Then gradients are means
    over the remaining labels, counted over the full step, so that numbers are the same in every split.

    Args:
        max_length: The full length, in tokens.
        min_length: The length at the start.
        duration: The share of the run's updates after which nothing is truncated.
        step_size: Lengths are multiples of this, except the last.

    Raises:
        ConfigError: If an argument is wrong; before the first step, if the number of updates is unknown.
        DataError: If a batch is no dict, or has no integer labels of shape (samples, length).

    >>> SeqLengthWarmup(max_length=512).length_at(0.15)
    256
    """

    asks_alone = False

    def __init__(self, max_length: int, min_length: int = 8, duration: float = 0.3, step_size: int = 8) -> None:
        for name, value in (("max_length", max_length), ("min_length", min_length), ("step_size", step_size)):
            check_number(name, value, least=1, is_whole=True)
        if min_length > max_length:
            raise ConfigError(f"`min_length={min_length}` is above `max_length={max_length}`.")
        check_number("duration", duration, above=0, most=1)
        self.max_length = max_length
        self.min_length = min_length
        self.duration = duration
        self.step_size = step_size

    def length_at(self, done: float) -> int:
        """Return the length after this share of the run."""
        if done >= self.duration:
            return self.max_length
        length = self.min_length + (self.max_length - self.min_length) * done / self.duration
        return max(int(length) // self.step_size * self.step_size, self.min_length)

    def _current_length(self, trainer: TrainerLike) -> int:
        return self.length_at(share_of_run(trainer, "SeqLengthWarmup", trainer.progress.step))

    def set_up(self, trainer: TrainerLike) -> None:
        share_of_run(trainer, "SeqLengthWarmup", 0)

    def transform_batch(self, trainer: TrainerLike, batch: Any) -> Any:
        length = self._current_length(trainer)
        if length >= self.max_length:
            return batch
        labels = required_labels(batch, trainer.settings.label_names or (), "SeqLengthWarmup")
        if not isinstance(batch, Mapping) or labels.dim() < 2 or labels.is_floating_point():
            raise DataError(
                "SeqLengthWarmup needs dict batches with integer labels of shape (samples, length), and found labels "
                f"of shape {tuple(labels.shape)} in a {type(batch).__name__}."
            )
        full = labels.shape[1]
        cut = {key for key, value in batch.items() if isinstance(value, torch.Tensor) and value.shape[1:2] == (full,)}
        # contiguous, as models of transformers call `labels.view`
        return {key: value[:, :length].contiguous() if key in cut else value for key, value in batch.items()}

    def transform_output(self, trainer: TrainerLike, output: Any) -> Any:
        if self._current_length(trainer) >= self.max_length or output.num_targets is not None:
            return output
        output.num_targets = trainer.loss_mean.divisor({"labels": output.labels})
        if output.num_targets is not None:
            output.loss = output.required_loss() * output.num_targets
        return output
