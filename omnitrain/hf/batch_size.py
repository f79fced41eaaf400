"""Smaller micro-batches where memory runs out, and as many more of them: `auto_find_batch_size` of transformers.

Steps consist of the same samples before and after, so the numbers stay the same. What a step does is in `engine.py`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from omnitrain.errors import ConfigError
from omnitrain.data.loaders import GivenLoader, MapLoader, StreamLoader, make_loader
from omnitrain.reproducibility import restore_rng, snapshot_rng

if TYPE_CHECKING:
    from omnitrain.hf.trainer import HFTrainer

__all__ = ["check_sparing", "is_out_of_memory", "shrink", "smaller", "sparing"]

logger = logging.getLogger("omnitrain")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device has no memory left."""
    known = isinstance(error, Exception) and should_reduce_batch_size(error)
    return known or isinstance(error, torch.OutOfMemoryError)


def smaller(batch_size: int, accumulation: int) -> tuple[int, int] | None:
    """Return a micro-batch of half the size or less, and how many make the same step; None if it cannot be smaller.

    >>> smaller(8, 1), smaller(6, 2), smaller(7, 1), smaller(1, 8)
    ((4, 2), (3, 4), (1, 7), None)
    """
    whole = batch_size * accumulation
    size = next((size for size in range(batch_size // 2, 0, -1) if whole % size == 0), None)
    return None if size is None else (size, whole // size)


def check_sparing(owner: HFTrainer) -> None:
    """Get the data ready to be read anew in other batches, or refuse it where nobody could change them.

    Raises:
        ConfigError: On several processes, for a loader of the user's own, and beside `dataloader_drop_last`.
    """
    if owner.world_size > 1:
        raise ConfigError(
            f"`training_args.auto_find_batch_size=True` works on one process, and there are {owner.world_size}: one "
            "that runs out of memory in a backward pass cannot tell the others. Set a smaller "
            "per_device_train_batch_size with `global_batch_size`, which gives the same numbers."
        )
    if owner._sampling.get("drop_last"):
        raise ConfigError(
            "`training_args.auto_find_batch_size=True` would change what `dataloader_drop_last=True` leaves out, which "
            "depends on the batch size. Leave one of them out."
        )
    if isinstance(owner.train_loader, GivenLoader):
        raise ConfigError(
            "`training_args.auto_find_batch_size=True` cannot change the batches of a loader of your own. Pass "
            "`train_dataset` instead."
        )
    if isinstance(owner.train_loader, StreamLoader):
        owner.train_loader.keep_marks()


def shrink(owner: HFTrainer, size: int, accumulation: int) -> None:
    """Have the run go on with other micro-batches, from the sample after the last completed step on."""
    progress, former = owner.progress, owner.train_loader
    logger.warning(
        "Step %d has run out of memory with micro-batches of %d samples. From here on they are of %d, and a step has "
        "%d of them instead of %d, which gives the same numbers.", progress.step + progress.skipped_steps + 1,
        owner.batch_size, size, accumulation, owner.gradient_accumulation_steps,
    )  # fmt: skip
    owner.batch_size, owner.gradient_accumulation_steps = size, accumulation
    owner._given |= {"batch_size": size, "gradient_accumulation_steps": accumulation}
    owner.engine.args.per_device_train_batch_size = owner.engine.state.train_batch_size = size
    former.close()
    owner.train_loader = make_loader(
        owner._without_unused_columns(owner.train_dataset), size, name="train_dataset",
        shuffle=owner._given["shuffle"], marks=owner.store is not None, **owner._sampling,
        **owner._loading,
    )  # fmt: skip
    if isinstance(former, MapLoader) and isinstance(owner.train_loader, MapLoader):
        owner.train_loader.fetch.drawn += former.fetch.drawn
    elif isinstance(former, StreamLoader) and isinstance(owner.train_loader, StreamLoader):
        owner.train_loader.keep_marks(former)
        owner.train_loader.start_from(former.mark_at(progress.epoch, progress.samples_in_epoch))


def sparing(step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return an engine's step that is taken anew, in smaller micro-batches, where memory has run out."""

    @functools.wraps(step)
    def taken(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        owner: HFTrainer = self.owner
        if not owner._finds_batch_size:
            return step(self, model, inputs, *args, **kwargs)
        random_numbers = snapshot_rng(owner.device)
        loss, weight = owner._loss.sum.clone(), owner._loss.weight  # stays on the device: nothing waits for it
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
            # out here the error is gone, and with it what it kept alive
            for parameter in owner._parameters:
                parameter.grad = None
            owner._loss.sum.copy_(loss)
            owner._loss.weight, owner._targets = weight, None
            restore_rng(random_numbers, owner.device)
            inputs = None
            clear_device_cache(garbage_collection=True)
            shrink(owner, *found)
            inputs = self.begin_anew()

    return taken
