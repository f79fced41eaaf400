"""The feed: groups micro-batches into windows (one optimizer step each) whose weights all ranks know.

Batches come from `data/loaders.py`; windows go to `step.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from omnitrain.checkpoint.state import unwrap
from omnitrain.data.collation import copied_ahead, count_samples
from omnitrain.data.loaders import GivenLoader, Loader, MapLoader
from omnitrain.data.sampling import Counted, Window, windows
from omnitrain.data.workers import until_signal
from omnitrain.distributed import Ranks
from omnitrain.errors import DataError, add_place
from omnitrain.progress import Progress
from omnitrain.run.hooks import Hooks
from omnitrain.run.lifecycle import Lifecycle
from omnitrain.settings import Settings
from omnitrain.units import ModelUnit, count_labels, count_tokens, no_token_counts, shifts_labels, sum_of_class_weights

__all__ = ["Feed"]

Weighed = tuple[Any, float, int, int]
"""A micro-batch, its weight in the loss, and its samples and tokens."""


def _part(group: list[Weighed]) -> tuple[float, ...]:
    """Return the numbers of a window to sum over ranks: weight, samples, tokens, micro-batches, and their square."""
    weight = samples = tokens = 0
    for one in group:
        weight, samples, tokens = weight + one[1], samples + one[2], tokens + one[3]
    return weight, samples, tokens, len(group), len(group) ** 2


class Feed:
    """Yields the windows of an epoch.

    Args:
        hooks: Weighs and prepares batches.
        lifecycle: Knows whether a signal has arrived.
        ranks: The ranks of the run.
        settings: The arguments of the trainer.
        accumulation: Micro-batches of a window on each rank.
    """

    def __init__(self, hooks: Hooks, lifecycle: Lifecycle, ranks: Ranks, settings: Settings, accumulation: int) -> None:
        self.accumulation = accumulation
        self._hooks = hooks
        self._lifecycle = lifecycle
        self._ranks = ranks
        self._reduction = settings.grad_reduction
        self._label_names = settings.label_names or ()
        self._groups: Iterator[list[Weighed]] | None = None
        """The source of the next window, if it may be read ahead."""
        self._ahead: list[Weighed] | Exception | None = None
        """The next window, or the error from reading it."""
        self._totals_ahead: Sequence[float] = ()
        """Its `_part`, summed over all ranks."""

    # --- training

    def windows(self, loader: Loader, epoch: int, progress: Progress) -> Iterator[Window]:
        """Yield the windows of an epoch from the position of the run on, with weights computed on the host.

        Raises:
            DataError: If the data end with fewer or more samples than an epoch has.
        """
        done, size = progress.samples_in_epoch, self._size_of(loader)
        groups, last = windows(self.weighed(loader.rest(epoch, progress)), self.accumulation), None
        # only data by index may be read early: there each sample has random numbers of its own
        self._groups = groups if self._ranks.world_size > 1 and isinstance(loader, MapLoader) else None
        self._ahead, self._totals_ahead = None, ()
        ranks, progress = self._ranks, self._lifecycle.progress
        while True:
            ranks.place, ranks.step = "data", progress.step + progress.skipped_steps + 1
            try:
                group, self._ahead = self._ahead if self._ahead is not None else next(groups, []), None
                if isinstance(group, Exception):
                    raise group
            except Exception as error:
                place = f"the data of step {progress.step + 1} (epoch {progress.epoch + 1}), rank {ranks.rank}"
                add_place(error, place)
                raise
            last = group[-1] if group else last
            totals, self._totals_ahead = self._totals_ahead, ()
            window = self.window_of(group, last, totals)
            ranks.place = "step"
            if window is None:
                self._groups = None
                if size not in (None, done):
                    raise _other_count(done, size)
                return
            if window.samples:  # otherwise all ranks have only stand-ins
                done += window.samples
                yield window

    def _size_of(self, loader: Loader) -> int | None:
        """Return the samples that an epoch must have over all ranks; None if each rank has the user's own loader."""
        return None if isinstance(loader, GivenLoader) and self._ranks.world_size > 1 else loader.size

    def read_ahead(self) -> Sequence[float]:
        """Read the next window at the end of a step, and return what the other ranks need to know about it."""
        if self._groups is None or self._ahead is not None:
            return ()
        self._ranks.place = "data"
        try:
            self._ahead = next(self._groups, [])
        except Exception as error:  # it belongs to the next step: the requests of this one come first
            self._ahead = error
        self._ranks.place = "step"
        return () if isinstance(self._ahead, Exception) else _part(self._ahead)

    def take_totals(self, totals: Sequence[float]) -> None:
        """Take the results of `read_ahead`, summed over all ranks."""
        self._totals_ahead = totals or self._totals_ahead

    def window_of(self, group: list[Weighed], last: Weighed | None, totals: Sequence[float] = ()) -> Window | None:
        """Return the window of these micro-batches and those of the other ranks; None if no rank has any.

        Args:
            group: The micro-batches.
            last: The one to repeat without weight if other ranks have more.
            totals: `_part` summed over all ranks, if known already.
        """
        size = len(group)
        totals = totals or self._ranks.sum("the beginning of a step", *_part(group))
        weight, samples, tokens, sizes, squares = totals
        if not sizes:
            return None
        if squares * self._ranks.world_size != sizes * sizes:  # true if and only if the sizes differ
            group = group + self._stand_ins(size, last)
        batches, weights = [one[0] for one in group], [one[1] for one in group]
        return Window(batches, weights, weight, int(sizes), int(samples), int(tokens), self._divisor(weight))

    def _divisor(self, weight: float) -> float:
        """Return the divisor of this rank's weighted losses; gradients are averaged over the ranks later."""
        if self._reduction == "sum":
            return 1.0 / self._ranks.world_size
        return weight / self._ranks.world_size or 1.0

    def _stand_ins(self, size: int, last: Weighed | None) -> list[Weighed]:
        """Return the micro-batches that fill a window up to the size of the largest: all ranks must run forward."""
        sizes = self._ranks.gather("the micro-batches of a step", None if last is None else size)
        _refuse_empty(sizes)
        return [] if last is None else [(last[0], 0, 0, 0)] * (max(one or 0 for one in sizes) - size)

    # --- weights

    def weighed(self, batches: Iterable[Counted]) -> Iterator[Weighed]:
        """Yield each batch with its weight, samples and tokens; with a GPU, the next batch is copied meanwhile."""
        hooks = self._hooks
        pairs = ((one, one) for one in batches)
        if hooks.device.type == "cuda" and type(hooks)._prepare_batch is Hooks._prepare_batch:
            pairs = copied_ahead(batches, hooks.device)
        for (batch, samples), (ready, _) in pairs:
            self._ranks.moves += 1
            if samples:
                yield ready, hooks._weigh(batch), samples, count_tokens(batch)
            else:
                yield ready, 0, 0, 0

    def weigh(self, batch: Any) -> float:
        """Return the weight of a micro-batch (on the host) in its window: its labels that count, or its rows.

        The loss is a mean over these. There are as many rows as samples, unless a collator makes other rows.
        """
        if self._reduction == "sum":
            return 1
        if isinstance(self._hooks.unit, ModelUnit):  # the user's own unit counts targets, or averages over samples
            weighted = sum_of_class_weights(self._hooks.unit.loss_fn, batch, self._label_names)
            if weighted is not None:
                return weighted
            labels = count_labels(batch, self.shifts_labels, self._label_names)
            if labels is not None:
                return labels
            if self._reduction == "per-token-mean":
                raise no_token_counts()
        return count_samples(batch)

    @cached_property
    def shifts_labels(self) -> bool:
        """Whether the model predicts each label one position earlier, as causal language models of transformers do."""
        return shifts_labels(unwrap(self._hooks.backend.model))

    # --- evaluations

    def in_step(self, loader: Loader, only_first: bool = False) -> Iterator[Counted]:
        """Yield the batches of an evaluation, equally many on all ranks: stand-ins follow data that end earlier.

        Args:
            loader: The loader.
            only_first: Whether to yield only the first batch.
        """
        batches, ranks = loader.first_batch() if only_first else loader.counted(0), self._ranks
        if isinstance(loader, MapLoader):  # which has equally many batches on all ranks anyway
            yield from self.until_signal(batches)
            return
        last, done, size = None, 0, None if only_first else self._size_of(loader)
        batches = iter(self.until_signal(batches))
        while True:
            counted = next(batches, None)
            last = last if counted is None else counted
            own = 0 if counted is None else counted.samples
            count, empty, samples = ranks.sum("the turn of a batch", counted is not None, last is None, own)
            done += int(samples)
            if not count:
                if size not in (None, done) and self._lifecycle.control.stop != "signal":
                    raise _other_count(done, size)
                return
            if empty:
                _refuse_empty(ranks.gather("data that yield nothing", None if last is None else 0))
            if counted is not None:
                yield counted
            elif last is not None:
                yield Counted(last.batch, 0)

    def until_signal(self, items: Iterable[Any]) -> Iterable[Any]:
        """Return batches or windows, which end if a signal has killed their loader's workers.

        Several ranks would have to agree on that in the middle of a step; with them it is an error.
        """
        return until_signal(items, self._lifecycle.control) if self._ranks.world_size == 1 else items


def _other_count(found: int, size: int) -> DataError:
    return DataError(
        f"The data ended after {found} samples, but their length is {size}. Correct the `__len__` of the dataset, or "
        "what ends it early."
    )


def _refuse_empty(found: list[Any]) -> None:
    empty = [str(rank) for rank, one in enumerate(found) if one is None]
    if empty:
        raise DataError(
            f"The data yield nothing on rank {', '.join(empty)}, but do on others. Give every process a part of "
            "them, or the same data, and each takes its share."
        )
