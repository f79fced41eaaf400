"""How batches become windows: weighed on the host, shared out among processes, each step's known to all of them.

Where batches come from is in `omnitrain/loaders.py`; what is done with a window, in `loop.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from omnitrain.data.collation import copied_ahead, count_samples
from omnitrain.errors import DataError
from omnitrain.lifecycle import Control, Lifecycle
from omnitrain.data.loaders import Loader, MapLoader
from omnitrain.progress import Progress
from omnitrain.data.sampling import StandIn, Window, windows
from omnitrain.trainers.hooks import Hooks
from omnitrain.units import ModelUnit, count_labels, count_tokens, shifts_labels
from omnitrain.data.workers import until_signal

__all__ = ["Feeding"]

Weighed = tuple[Any, float, int, int]
"""A micro-batch, its weight in the loss, and its samples and tokens."""


def _part(group: list[Weighed]) -> tuple[float, ...]:
    """Return what the processes add up of a window: weight, samples, tokens, micro-batches, and their square."""
    size = len(group)
    return *(sum(one[i] for one in group) for i in (1, 2, 3)), size, size * size


class Feeding(Hooks):
    """What feeds a training loop."""

    lifecycle: Lifecycle
    train_loader: Any
    gradient_accumulation_steps: int
    grad_reduction: str
    _groups: Iterator[list[Weighed]] | None = None
    """Where the next window comes from, if it may be read ahead."""
    _ahead: list[Weighed] | Exception | None = None
    """The next window, or what its reading raised."""
    _totals_ahead: Sequence[float] = ()
    """What `_part` of it is over all processes."""

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return self.lifecycle.progress

    @property
    def control(self) -> Control:
        """What callbacks on this process have asked for; what is done about it, all processes agree on."""
        return self.lifecycle.control

    @property
    def rank(self) -> int:
        """The number of this process among those of the run."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """The number of processes of the run."""
        return self.ranks.world_size

    def _until_signal(self, items: Iterable[Any]) -> Iterable[Any]:
        """Return batches or windows, which end where a signal has killed what loads them.

        Several processes would have to agree on that in the middle of a step; there it is an error.
        """
        return until_signal(items, self.control) if self.world_size == 1 else items

    def _windows(self, epoch: int) -> Iterator[Window]:
        """Yield the windows of an epoch, from the present position on, weighed while they are on the host."""
        batches = self.train_loader.batches(epoch, self.progress.samples_in_epoch)
        groups, last = windows(self._weighed(batches), self.gradient_accumulation_steps), None
        # a sample's random numbers are its own, so only those of data by index may be read before their time
        self._groups = groups if self.world_size > 1 and isinstance(self.train_loader, MapLoader) else None
        self._ahead, self._totals_ahead = None, []
        while True:
            group, self._ahead = self._ahead if self._ahead is not None else next(groups, []), None
            if isinstance(group, Exception):
                raise group
            last = group[-1] if group else last
            window = self._window_of(group, last, self._totals_ahead)
            self._totals_ahead = []
            if window is None:
                self._groups = None
                return
            yield window

    def _read_ahead(self) -> Sequence[float]:
        """Read the next window at the end of a step, and return what the other processes are to know of it."""
        if self._groups is None or self._ahead is not None:
            return ()
        try:
            self._ahead = next(self._groups, [])
        except Exception as error:  # of the next step: what this one asked for comes first
            self._ahead = error
        return () if isinstance(self._ahead, Exception) else _part(self._ahead)

    def _window_of(self, group: list[Weighed], last: Any = None, totals: Sequence[float] = ()) -> Window | None:
        """Return the window of these micro-batches and those of the other processes; None if nobody has one.

        Args:
            group: The micro-batches.
            last: One to go on with where others have more.
            totals: What `_part` is over all processes, if they have been told.
        """
        size = len(group)
        totals = totals or self.ranks.sum("the beginning of a step", *_part(group))
        weight, samples, tokens, sizes, squares = totals
        if not sizes:
            return None
        if squares * self.world_size != sizes * sizes:  # then they are not all of one size
            group = group + self._stand_ins(size, last)
        return Window([one[0] for one in group], [one[1] for one in group], weight, int(samples), int(tokens))

    def _stand_ins(self, size: int, last: Any) -> list[Weighed]:
        """Return what brings a window to as many micro-batches as any process has: in each of them all wait for all."""
        sizes = self.ranks.gather("the micro-batches of a step", None if last is None else size)
        self._refuse_empty(sizes)
        return [] if last is None else [(last[0], 0, 0, 0)] * (max(one or 0 for one in sizes) - size)

    def _in_step(self, loader: Loader) -> Iterator[Any]:
        """Yield the batches of an evaluation, as many as any process has: data that end earlier go on as stand-ins."""
        batches = loader.batches(0)
        if self.world_size == 1 or isinstance(loader, MapLoader):  # whose batches are as many by themselves
            yield from self._until_signal(batches)
            return
        last = None
        while True:
            batch = next(batches, None)
            last = last if batch is None else batch.batch if type(batch) is StandIn else batch
            count, empty = self.ranks.sum("the turn of a batch", batch is not None, last is None)
            if not count:
                return
            if empty:
                self._refuse_empty(self.ranks.gather("data that yield nothing", None if last is None else 0))
            yield StandIn(last) if batch is None else batch

    @staticmethod
    def _refuse_empty(found: list[Any]) -> None:
        empty = [str(rank) for rank, one in enumerate(found) if one is None]
        if empty:
            raise DataError(
                f"The data yield nothing on rank {', '.join(empty)}, but do on others. Give every process a part of "
                "them, or the same data, of which each then takes its share."
            )

    def _weighed(self, batches: Iterator[Any]) -> Iterator[Weighed]:
        pairs = ((batch, batch) for batch in batches)
        if self.device.type == "cuda" and type(self)._prepare_batch is Hooks._prepare_batch:
            pairs = copied_ahead(batches, self.device)
        for batch, ready in pairs:
            if type(batch) is StandIn:
                yield ready.batch, 0, 0, 0
            else:
                yield ready, self._weigh(batch), count_samples(batch), count_tokens(batch)

    def _weigh(self, batch: Any) -> float:
        """Return how much a micro-batch (on the host) counts in its window: its labels that count, or its samples."""
        if self.grad_reduction == "sum":
            return 1
        if isinstance(self.unit, ModelUnit):  # a unit of the user's own counts its targets, or means its samples
            labels = count_labels(batch, self._shifts_labels)
            if labels is not None:
                return labels
            if self.grad_reduction == "per-token-mean":
                raise self._no_token_counts()
        return count_samples(batch)

    @staticmethod
    def _no_token_counts() -> DataError:
        return DataError(
            "`grad_reduction='per-token-mean'` needs token counts: labels that are integers of more than one "
            "dimension, or a `unit` that returns (loss, num_targets). Use grad_reduction='mean' otherwise."
        )

    @cached_property
    def _shifts_labels(self) -> bool:
        return shifts_labels(self.model)

    def _divisor(self, window: Window) -> float:
        """Return what this process's weighted losses are divided by; gradients are averaged over processes later."""
        if self.grad_reduction == "sum":
            return 1.0 / self.world_size
        return window.weight / self.world_size or 1.0
