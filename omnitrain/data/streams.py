"""Batches and positions of iterable datasets."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from omnitrain.compute.random_state import derive_seed, isolated_rng, seed_generators
from omnitrain.core.errors import describe_samples
from omnitrain.data.sampling import CountedBatch, MicrobatchLayout, ReadOptions, annotate, share
from omnitrain.data.stateful import has_state


class StreamPosition(NamedTuple):
    """A position of a stream or loader: the samples before it in the epoch, and the `state_dict()` there."""

    epoch: int
    position: int
    state: Any
    has_ended: bool
    """Whether the dataset is at its end, so that the next epoch begins with this state."""
    batches: int = 0
    """The batches before it, of a loader; 0 for a stream."""
    workers: int = 0
    """The worker processes of a loader, for which its state is valid."""


class Stream(IterableDataset[Any]):
    """The batches of an epoch of an iterable dataset, each with the position after it if the dataset has a state.

    The first batch is yielded with the first sample, if several ranks read the same stream. Random numbers drawn by the
    stream are keyed by (seed, epoch, sample); the generators of training are unchanged.
    """

    def __init__(
        self,
        dataset: Any,
        rounds: MicrobatchLayout,
        options: ReadOptions,
        keep_states: bool = True,
        name: str = "the data",
    ) -> None:
        self.dataset = dataset
        self.name = name
        self.rounds = rounds
        self.options = options
        self.keep_states: bool = keep_states and can_seek(dataset)
        self.epoch: int = 0
        self.position: int = 0
        self.start: StreamPosition | None = None
        """Where the next pass begins: in its epoch, or at the end of the previous one."""
        self.passes: Any = None
        """A queue of (epoch, position, start) of passes for a worker, which keeps its copy of the stream."""

    def __iter__(self) -> Iterator[tuple[CountedBatch, StreamPosition | None, Any]]:
        if self.passes is not None and get_worker_info() is not None:
            self.epoch, self.position, self.start = self.passes.get()
        start, self.start = self.start, None
        if start is not None and start.has_ended:
            self.dataset.load_state_dict(start.state)
            if start.epoch == self.epoch:
                return
            start = None
        if start is not None and start.epoch < self.epoch:  # at its end, which the dataset notices by a further read
            with isolated_rng():
                for _ in self._samples(start.epoch, start):
                    pass
            start = None
        number, options = 0 if start is None else start.position, self.options
        samples = self._samples(self.epoch, start)
        with isolated_rng():
            for _ in itertools.islice(samples, self.position - number):
                pass
        number = self.position
        for size in itertools.cycle(self.rounds.sizes):
            with isolated_rng():
                window = list(itertools.islice(samples, size))
                local_samples = share(window, options.rank, options.world_size)
                # the random numbers of collation continue from the last sample's seed
                try:
                    batch = options.collate(local_samples or window[:1]) if window else None
                except Exception as error:
                    local_samples = share(range(number, number + len(window)), options.rank, options.world_size)
                    annotate(error, "collator", f"{describe_samples(local_samples, self.name)}, a stream")
                    raise
            if not window:
                return
            first = window[0] if options.world_size > 1 and number == self.position else None
            number += len(window)
            has_ended = len(window) < size
            yield (
                CountedBatch(batch, len(local_samples)),
                StreamPosition(self.epoch, number, self.dataset.state_dict(), has_ended) if self.keep_states else None,
                first,
            )

    def _samples(self, epoch: int, start: StreamPosition | None) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        if start is not None:
            self.dataset.load_state_dict(start.state)
        samples = None
        for number in itertools.count(0 if start is None else start.position):
            seed_generators(derive_seed(self.options.seed, epoch, number))
            samples = iter(self.dataset) if samples is None else samples
            try:
                sample = next(samples)
            except StopIteration:
                return
            except Exception as error:
                error.add_note(f"Raised for sample {number} of {self.name}, a stream.")
                raise
            yield sample


def can_seek(dataset: Any) -> bool:
    """Whether a stream has a state that can be saved and restored.

    Hugging Face's shuffled streams cannot: their state leaves out the samples in the buffer, which would be lost.
    Nor can those of datasets before 5.1, whose state leaves out what `map` and `filter` have read ahead.
    """
    if not has_state(dataset):
        return False
    package = sys.modules.get("datasets")
    if package is None or not isinstance(dataset, getattr(package, "IterableDataset", ())):
        return True
    exact = tuple(map(int, package.__version__.split(".")[:2])) >= (5, 1)
    return exact and not _has_buffer(getattr(dataset, "_ex_iterable", None))


def _has_buffer(part: Any) -> bool:
    children = [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
    return "BufferShuffled" in type(part).__name__ or any(_has_buffer(child) for child in children if child is not None)
