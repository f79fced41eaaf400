"""`microbatch_size="auto"`: smaller micro-batches after out-of-memory errors.

A step consists of the same samples before and after, with the same weights. How a batch is split is in `feed.py`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from omnitrain.backends.backend import Backend
from omnitrain.compute.precision import free_memory, is_out_of_memory
from omnitrain.compute.random_state import restore_rng, snapshot_rng
from omnitrain.core.errors import ConfigError, DataError
from omnitrain.core.events import Algorithm, find_overrides
from omnitrain.data.collation import count_samples
from omnitrain.data.sampling import Window
from omnitrain.distributed.ranks import Ranks
from omnitrain.trainer.buffers import Buffers
from omnitrain.trainer.feed import Feed
from omnitrain.trainer.hooks import Hooks
from omnitrain.trainer.lifecycle import Lifecycle

logger: logging.Logger = logging.getLogger("omnitrain")

Result = TypeVar("Result")

# What algorithms do in the passes of a micro-batch, where their states may change.
_IN_PASSES = ("transform_batch", "transform_output", "transform_loss")


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a model has layers that normalize over the micro-batch of one rank."""
    kinds = [type(module) for module in model.modules()]
    return any(issubclass(kind, _BatchNorm) and kind is not nn.SyncBatchNorm for kind in kinds)


class AutoMicrobatch:
    """Runs the micro-batches of a step again, halved, if memory runs out on any rank.

    Nothing that the ranks do together may be under way then: micro-batches run without an exchange of gradients, the
    ranks agree that all of them are through, and only then the gradients are averaged.

    Args:
        trainer: The trainer.
        backend: Where weights and gradients are.
        feed: Splits batches.
        ranks: The ranks of the run.
        lifecycle: Knows which step it is.
        snapshot: Returns the means of the epoch so far.
        rollback: Restores the means that `snapshot` returned.

    Raises:
        ConfigError: If ranks exchange something inside of a forward or backward pass.
    """

    def __init__(
        self,
        trainer: Hooks,
        backend: Backend,
        feed: Feed,
        ranks: Ranks,
        lifecycle: Lifecycle,
        snapshot: Callable[[], Any],
        rollback: Callable[[Any], None],
    ) -> None:
        self._trainer = trainer
        self._backend = backend
        self._feed = feed
        self._ranks = ranks
        self._lifecycle = lifecycle
        self._snapshot, self._rollback = snapshot, rollback
        self._buffers = Buffers()
        stateful = [
            algorithm for algorithm in trainer.algorithms if type(algorithm).state_dict is not Algorithm.state_dict
        ]
        self._algorithms = [
            algorithm for algorithm in stateful if any(find_overrides([algorithm], name) for name in _IN_PASSES)
        ]
        # Whether memory ran out in the latest update, which was made all the same.
        self._has_failed_in_update = False
        self.prepare()

    @property
    def separate_all_reduce(self) -> bool:
        """Whether gradients are averaged after the last backward pass, and not during it."""
        return self._ranks.world_size > 1

    def prepare(self) -> None:
        """Reject exchanges between ranks in a forward or backward pass; called again once the model is placed.

        Raises:
            ConfigError: Naming what makes them.
        """
        self._backend.check_separate_all_reduce()
        modules = self._backend.model.modules()
        if self._ranks.world_size > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in modules):
            raise ConfigError(
                "`microbatch_size='auto'` cannot be used with nn.SyncBatchNorm, in whose forward pass the ranks wait "
                "for each other: one that runs out of memory there would leave the others waiting. Pass a number, such "
                "as microbatch_size=4."
            )

    def begin_epoch(self) -> None:
        """Look for the buffers of the model, which a callback may have changed."""
        self._buffers.collect(self._backend.model)

    # --- micro-batches

    def run(self, window: Window, attempt: Callable[[], Result], restart: Callable[[Window], None]) -> Result:
        """Return what `attempt()` returns, which runs the micro-batches of a window, once all ranks have come through.

        Args:
            window: The window.
            attempt: Called again where memory has run out.
            restart: Called before, with the window in smaller micro-batches.

        Raises:
            RuntimeError: The out-of-memory error, if not even a single row fits.
        """
        means, random_numbers, first = self._snapshot(), snapshot_rng(self._trainer.device), 0
        states = [copy.deepcopy(algorithm.state_dict()) for algorithm in self._algorithms]
        self._buffers.snapshot()
        while True:
            try:
                result = attempt()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                size = self._agree(window, True)
                if size == 1:
                    error.add_note("`microbatch_size='auto'` is at one row at a time, which does not fit either.")
                    raise
            else:
                size = self._agree(window, False)
                if not size:
                    self._backend.reduce_gradients()
                    if first:
                        self._warn_out_of_memory("", first)
                    return result
                if size == 1:  # the rank that has failed ends the others with its error
                    self._ranks.gather("the end of the memory of another rank", None)
                del result
            # out here the error is gone, and with it what it kept alive
            first = first or size
            self._backend.discard_gradients()
            self._rollback(means)
            self._buffers.restore()
            restore_rng(random_numbers, self._trainer.device)
            for algorithm, state in zip(self._algorithms, states, strict=True):
                algorithm.load_state_dict(copy.deepcopy(state))
            free_memory()
            self._feed.shrink((size + 1) // 2)
            window = self._feed.split_again(window)
            restart(window)

    def _agree(self, window: Window, has_failed: bool) -> int:
        """Return the rows of the micro-batches that did not fit on some rank; 0 if they did on all of them."""
        ranks, has_failed_in_update, self._has_failed_in_update = self._ranks, self._has_failed_in_update, False
        failed, updates = ranks.sum("the memory of a step", has_failed, has_failed_in_update)
        if not failed and not updates:
            return 0
        rows = [self._rows_of(batch) for batch in window.batches]
        largest = ranks.combine("the rows of the micro-batches", max(rows), max)
        size = min(self._feed.microbatch_size or largest, largest)
        if not failed and size > 1:
            self._feed.shrink((size + 1) // 2)
            self._warn_out_of_memory(" in its update", size)
        return size if failed else 0

    def _rows_of(self, batch: Any) -> int:
        try:
            return count_samples(batch)
        except DataError:  # an object that only the user's own `split_batch` knows
            return self._trainer.settings.batch_size

    def _warn_out_of_memory(self, where: str, size: int) -> None:
        if self._ranks.is_main:
            logger.warning(
                "Step %d has run out of memory%s with micro-batches of %d rows. From here on they are of %d at most, "
                "and a step has as many more of them. Pass microbatch_size=%d to begin with that.%s",
                self._lifecycle.progress.step + (not where), where, size, *[self._feed.microbatch_size] * 2,
                " BatchNorm takes its statistics of one micro-batch." if has_batch_norm(self._backend.model) else "",
            )  # fmt: skip

    # --- the update

    def update(self) -> bool:
        """Step the optimizer; again if memory runs out before it has changed anything.

        The gradients are complete, so no pass is repeated, and the other ranks need not know.

        Raises:
            RuntimeError: The out-of-memory error, if the update was made in part or does not fit at all.
        """
        optimizer = self._backend.optimizer
        before = _versions(optimizer)
        try:
            return self._trainer._apply_update()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if not _is_unchanged(optimizer, before):
                error.add_note(
                    "Memory ran out in the middle of the optimizer's update, which cannot be made again, as some of it "
                    "was made. Resume from the latest checkpoint, with an optimizer that keeps less, a smaller "
                    "`microbatch_size`, or weights that are sharded (FSDP, DeepSpeed)."
                )
                raise
        free_memory()
        try:
            applied = self._trainer._apply_update()
        except RuntimeError as error:
            if is_out_of_memory(error):
                error.add_note(
                    "It was the optimizer's update, which had all of the memory that micro-batches take. Take an "
                    "optimizer that keeps less, or shard the weights (FSDP, DeepSpeed)."
                )
            raise
        self._has_failed_in_update = True
        return applied


Versions = tuple[dict[Any, list[Any]], list[Any]]


def _versions(optimizer: torch.optim.Optimizer) -> Versions:
    """Return version counters of an optimizer's state, and of its weights and groups."""
    state = {
        parameter: [_version(value) for value in entries.values()] for parameter, entries in optimizer.state.items()
    }
    groups = [_version(value) for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    return state, groups + [parameter._version for group in optimizer.param_groups for parameter in group["params"]]


def _version(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value._version
    return value if isinstance(value, (bool, int, float, str)) else id(value)


def _is_unchanged(optimizer: torch.optim.Optimizer, before: Versions) -> bool:
    """Whether an update that failed has changed nothing; state that it has only begun to fill is dropped then.

    A fused kernel does not mark what it changes, but its step counts are marked.
    """
    state, rest = _versions(optimizer)
    fresh = [parameter for parameter in state if not before[0].get(parameter)]
    is_known = len(optimizer.param_groups) == 1 or not any(group.get("fused") for group in optimizer.param_groups)
    is_known = is_known or all("step" in entries for entries in optimizer.state.values())
    if (
        not is_known
        or rest != before[1]
        or any(state[parameter] != versions for parameter, versions in before[0].items() if versions)
    ):
        return False
    values = [value for parameter in fresh for value in optimizer.state[parameter].values()]
    if any(bool(value.any() if isinstance(value, torch.Tensor) else value) for value in values):
        return False
    for parameter in fresh:
        del optimizer.state[parameter]
    return True
