"""`auto_find_batch_size`: more and smaller micro-batches when memory runs out.

Steps consist of the same samples before and after, so the numbers stay the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache

from omnitrain.data.loaders import GivenLoader, MapLoader, StreamLoader
from omnitrain.data.sets import Sets
from omnitrain.errors import ConfigError
from omnitrain.precision import is_out_of_memory
from omnitrain.reproducibility import restore_rng, snapshot_rng
from omnitrain.settings import change_setting
from omnitrain.trainers.base import BaseTrainer

__all__ = ["prepare_to_shrink", "smaller", "smaller_on_out_of_memory"]

logger: logging.Logger = logging.getLogger("omnitrain")


def smaller(batch_size: int, accumulation: int) -> tuple[int, int] | None:
    """Return a micro-batch size of half or less, and how many make the same step; None if it cannot be smaller.

    >>> smaller(8, 1), smaller(6, 2), smaller(7, 1), smaller(1, 8)
    ((4, 2), (3, 4), (1, 7), None)
    """
    whole = batch_size * accumulation
    size = next((size for size in range(batch_size // 2, 0, -1) if whole % size == 0), None)
    return None if size is None else (size, whole // size)


def prepare_to_shrink(sets: Sets, world_size: int, drops_last: bool) -> None:
    """Prepare the training data for other batch sizes, or refuse data whose batches cannot change.

    Raises:
        ConfigError: On several processes, with the user's own loader, or with `dataloader_drop_last`.
    """
    if world_size > 1:
        raise ConfigError(
            f"`training_args.auto_find_batch_size=True` works on one process, and there are {world_size}: one "
            "that runs out of memory in a backward pass cannot tell the others. Set a smaller "
            "per_device_train_batch_size with `global_batch_size`, which gives the same numbers."
        )
    if drops_last:
        raise ConfigError(
            "`training_args.auto_find_batch_size=True` would change what `dataloader_drop_last=True` leaves out, which "
            "depends on the batch size. Leave one of them out."
        )
    if isinstance(sets.train, GivenLoader):
        raise ConfigError(
            "`training_args.auto_find_batch_size=True` cannot change the batches of a loader of your own. Pass "
            "`train_dataset` instead."
        )
    if isinstance(sets.train, StreamLoader):
        sets.train.keep_marks()


def _shrink(owner: BaseTrainer, size: int, accumulation: int) -> None:
    """Continue the run with other micro-batches, from the sample after the last completed step."""
    progress, former, sets = owner.progress, owner.train_loader, owner._sets
    logger.warning(
        "Step %d has run out of memory with micro-batches of %d samples. From here on they are of %d, and a step has "
        "%d of them instead of %d, which gives the same numbers.", progress.step + progress.skipped_steps + 1,
        owner.batch_size, size, accumulation, owner.gradient_accumulation_steps,
    )  # fmt: skip
    change_setting(owner, batch_size=size, gradient_accumulation_steps=accumulation)
    owner.settings = replace(owner.settings, batch_size=size, gradient_accumulation_steps=accumulation)
    owner._feed.accumulation = accumulation
    former.close()
    sets.train = sets.train_loader_of(size)
    if isinstance(former, MapLoader) and isinstance(sets.train, MapLoader):
        sets.train.fetch.drawn += former.fetch.drawn
        sets.train.sampler.is_keyed = former.sampler.is_keyed
    elif isinstance(former, StreamLoader) and isinstance(sets.train, StreamLoader):
        sets.train.keep_marks(former)
        sets.train.start_from(former.mark_at(progress.epoch, progress.samples_in_epoch))


def smaller_on_out_of_memory(step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return an engine's `training_step` that is repeated in smaller micro-batches if memory runs out."""

    @functools.wraps(step)
    def taken(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.training_args is None or not self.training_args.auto_find_batch_size:
            return step(self, model, inputs, *args, **kwargs)
        owner: BaseTrainer = self.owner
        meter, random_numbers = owner._step.loss, snapshot_rng(owner.device)
        before = meter.mark()
        while True:
            try:
                return step(self, model, inputs, *args, **kwargs)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                found = smaller(owner.batch_size, owner.gradient_accumulation_steps)
                if found is None:
                    error.add_note("`auto_find_batch_size` is at one sample at a time, which does not fit either.")
                    raise
            # outside the `except` block, where the error and the memory that it kept alive are freed
            owner.backend.clear_gradients()
            meter.go_back(before)
            restore_rng(random_numbers, owner.device)
            inputs = None
            clear_device_cache(garbage_collection=True)
            _shrink(owner, *found)
            self.args.per_device_train_batch_size = self.state.train_batch_size = owner.batch_size
            inputs = self.restart_step()

    return taken
