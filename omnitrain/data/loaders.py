"""Loaders for map-style datasets, streams and custom loaders."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from omnitrain.compute.random_state import derive_seed, isolated_rng, seed_generators
from omnitrain.core.errors import DataError, describe_samples, format_list
from omnitrain.data.collation import count_samples, first_row, pin_batch
from omnitrain.data.sampling import (
    CountedBatch,
    DatasetOrder,
    EpochSampler,
    Fetch,
    MicrobatchLayout,
    ReadOptions,
    Samples,
    adapt_collate,
    disable_padding,
    pad_with_dummies,
    round_robin,
    share,
    tables_to_arrays,
    tensor_columns,
)
from omnitrain.data.stateful import has_state, preserve_state, snapshot
from omnitrain.data.streams import Stream, StreamPosition, can_seek
from omnitrain.data.workers import outlive_signals, report_dead_workers, start_workers, stop_workers, watch_workers

logger: logging.Logger = logging.getLogger("omnitrain")

# How many requests to workers are remembered for error messages: more than are ever pending.
_MAX_REQUESTS = 4096
# How many recent batches of a stream have a known position: more than a step has, plus those read ahead.
_MAX_POSITIONS = 256


class Loader:
    """The base class of loaders. `for batch in loader` iterates over the epoch set by `set_epoch`."""

    dataset: Any
    """The data, unless a loader was passed."""
    size: int | None = None
    """Samples in an epoch over all ranks, or None if unknown."""
    rules: Any = None
    """The `EvalSet` that the data belong to, if any."""
    name: str = "the data"
    counts_samples = True
    """Whether it knows how many samples a batch used; otherwise the rows of the batch are counted."""
    shards_samples = False
    """Whether ranks take turns with single samples instead of batches."""
    samples_iterated: int = 0
    """Samples yielded by `iter()` since `set_epoch`, as in a custom loop."""
    first: Any = None
    """The first sample of the latest pass, or row of its first batch, if all ranks read the same data."""
    turn: int = 0
    """The micro-batches of the windows so far of a pass, which the feed counts."""
    is_split: bool = False
    """Whether each rank has its own share of the data, whose states differ."""
    has_ended: bool = False
    """Whether an evaluation has reached the end of the data, whose length may be unknown."""
    is_compared: bool = False
    """Whether the samples were compared, and are the same on all ranks."""
    _epoch = 0
    _positions: deque[StreamPosition] = deque(maxlen=0)  # noqa: RUF012 (it can hold nothing)
    _start: StreamPosition | None = None

    def counted_batches(self, epoch: int, position: int = 0, batches: int | None = None) -> Iterator[CountedBatch]:
        """Yield the micro-batches of an epoch from a position on, each with its number of samples.

        The position is given in samples and in micro-batches, over all ranks; all that can be counted of some loaders
        is the micro-batches.
        """
        raise NotImplementedError

    def batches(self, epoch: int, position: int = 0) -> Iterator[Any]:
        """Yield the micro-batches of an epoch, from the sample at `position` on."""
        return (batch for batch, _ in self.counted_batches(epoch, position))

    def indices_at(self, epoch: int, position: int, turn: int) -> Sequence[int] | None:
        """Return the samples of this process's micro-batch, `turn` batches after a position; None if unknown."""
        return None

    def position_at(self, epoch: int, position: int, batches: int = 0) -> StreamPosition | None:
        """Return the latest recorded position not after this one; at the beginning, the end of the previous epoch."""
        if not position:
            return next((point for point in reversed(self._positions) if point.epoch == epoch - 1), None)
        candidates = (point for point in reversed(self._positions) if point.epoch == epoch)
        return next((point for point in candidates if self._is_reached(point, position, batches)), None)

    def _is_reached(self, point: StreamPosition, position: int, batches: int) -> bool:
        return point.position <= position

    def resume_at(self, point: StreamPosition | None) -> None:
        """Begin the next pass at a recorded position, unless it is after the position where the pass begins."""
        self._start = point
        self._positions.extend([] if point is None else [point])

    def _pop_start(self) -> StreamPosition | None:
        start, self._start = self._start, None
        return start

    def merge_states(self, states: list[Any]) -> Any:
        """Return one state from those of all ranks, if each has its own share."""
        return {"ranks": states}

    def local_state(self, state: Any) -> Any:
        """Return this rank's part of a joined state, or None."""
        return None

    def update(self, size: int | None = None) -> None:
        """Adapt to changes of the dataset since the latest pass; `size` are the samples of an epoch in progress.

        Raises:
            DataError: If it has become empty, or has fewer samples than `size`.
        """

    def first_batch(self) -> Iterator[CountedBatch]:
        """Yield only the first batch of epoch 0; the next pass starts at the beginning again."""
        return itertools.islice(self.counted_batches(0), 1)

    def last_batch(self) -> Iterator[CountedBatch]:
        """Yield only the last batch of epoch 0; nothing if earlier batches must be read for it."""
        return iter(())

    def last_step(self, batches: int) -> int | None:
        """Return the position of the last step of so many batches in epoch 0; None if others must be read for it."""
        return None

    @contextlib.contextmanager
    def preserve_state(self) -> Iterator[None]:
        """Restore the state and the next pass on exit, whatever is read inside."""
        positions, start = list(self._positions), self._start
        with preserve_state(dict(enumerate(self.stateful_sources()))):
            try:
                yield
            finally:
                self.close()
                self._start = start
                self._positions.clear()
                self._positions.extend(positions)

    def stateful_sources(self) -> Sequence[Any]:
        """Return the sources of a pass with `state_dict` and `load_state_dict`."""
        return ()

    def close(self) -> None:
        """End worker processes, if any; the next pass starts new ones."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass over the loader."""
        self._epoch, self.samples_iterated = epoch, 0

    def __iter__(self) -> Iterator[Any]:
        for batch, samples in self.counted_batches(self._epoch):
            self.samples_iterated += samples
            yield batch


def by_name(loaders: Any) -> dict[str, Any]:
    """Return the loaders of named sets, that of a single set under "", or none."""
    return loaders if isinstance(loaders, dict) else {} if loaders is None else {"": loaders}


def close_loaders(*loaders: Any) -> None:
    """End the worker processes of our loaders, and of dicts of loaders."""
    for entry in loaders:
        for loader in by_name(entry).values():
            if isinstance(loader, Loader):
                loader.close()


class _RequestSampler:
    """A sampler for torch's DataLoader that yields the (epoch, indices) pairs last requested."""

    def __init__(self) -> None:
        self.pending: Iterable[Any] = ()
        self._latest: dict[int, np.ndarray] = {}

    def __iter__(self) -> Iterator[Any]:
        self._latest.clear()
        for number, request in enumerate(self.pending):
            self._latest[number] = request[1]
            self._latest.pop(number - _MAX_REQUESTS, None)
            yield request

    def describe(self, numbers: Iterable[int]) -> str:
        """Return the samples of some of the latest requests as text; requests count from 0 in a pass."""
        return describe_samples(itertools.chain.from_iterable(self._latest.get(number, ()) for number in numbers))


class _BatchDataset:
    """A dataset for torch's DataLoader whose items are entire batches."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch

    def __getitem__(self, request: tuple[int, np.ndarray]) -> CountedBatch:
        return CountedBatch(self.fetch(*request), len(request[1]))


def identity_collate(batch: Any) -> Any:
    """Return a batch unchanged: a `collate_fn` that worker processes can import."""
    return batch


def make_worker_loader(dataset: Any, options: ReadOptions, **arguments: Any) -> DataLoader[Any]:
    """Return torch's loader of a dataset of entire batches, whose workers end only with it."""
    generator = torch.Generator().manual_seed(options.seed)  # otherwise it draws from the generator of training
    return DataLoader(
        dataset, batch_size=None, collate_fn=identity_collate, worker_init_fn=outlive_signals, generator=generator,
        prefetch_factor=options.prefetch_factor, **arguments,
    )  # fmt: skip


class MapLoader(Loader):
    """Fetches a map-style dataset in the sampler's order, here or in worker processes that live until it is closed."""

    def __init__(
        self,
        dataset: Any,
        sampler: EpochSampler,
        options: ReadOptions,
        name: str = Loader.name,
        subset: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.size: int | None = sampler.size
        self.name = name
        self._subset = subset
        self._snapshot = snapshot(dataset)
        self.fetch: Fetch = Fetch(dataset, options.collate, options.seed, name)
        self.pin_memory: bool = options.pin_memory
        self._has_warned = False
        self._requests = _RequestSampler()
        self._workers: DataLoader[Any] | None = None
        if options.num_workers:
            self._workers = make_worker_loader(
                _BatchDataset(self.fetch), options, sampler=self._requests, num_workers=options.num_workers,
                pin_memory=options.pin_memory, persistent_workers=True,
            )  # fmt: skip

    @property
    def has_workers(self) -> bool:
        """Whether worker processes read the data."""
        return self._workers is not None

    def __len__(self) -> int:
        return len(self.sampler)

    def update(self, size: int | None = None) -> None:
        dataset, sampler = self.dataset, self.sampler
        state = snapshot(dataset)
        if state != self._snapshot:
            self._snapshot = state
            self.fetch.update_columns()
            self.close()  # the workers have copies of the former dataset
        samples = dataset.epoch_size if isinstance(sampler, DatasetOrder) else len(self.fetch)
        samples = samples if self._subset is None else min(samples, self._subset)
        if size is not None and sampler.multiple_of == 1 and size <= samples:
            samples = size
        sampler.resize(samples)
        self.size = sampler.size
        change = f"{self.name[:1].upper()}{self.name[1:]} now has {samples} samples"
        if size not in (None, self.size):
            raise DataError(
                f"{change}, and had {size} when the resumed epoch began. Restore its length in load_state_dict() of "
                "the dataset, or of the callback that changes it."
            )
        if not self.size:
            raise DataError(f"{change}, too few for a step. Keep at least `batch_size`.")

    def close(self) -> None:
        if self._workers is not None:
            stop_workers(self._workers._iterator)
            self._workers._iterator = None

    def indices_at(self, epoch: int, position: int, turn: int) -> Sequence[int] | None:
        batches = self.sampler.batches(epoch, position)
        indices = next(itertools.islice(batches, turn, None), None)
        return None if indices is None else indices.tolist()

    def counted_batches(self, epoch: int, position: int = 0, batches: int | None = None) -> Iterator[CountedBatch]:
        return self._read(epoch, self.sampler.batches(epoch, position))

    def first_batch(self) -> Iterator[CountedBatch]:
        return self._read(0, itertools.islice(self.sampler.batches(0), 1))  # workers read no others in advance

    def last_batch(self) -> Iterator[CountedBatch]:
        return self._read(0, self.sampler.batches(0, self.last_step(1)))

    def last_step(self, batches: int) -> int:
        return self.sampler.rounds.start((len(self) - 1) // batches * batches)

    def _read(self, epoch: int, requests: Iterator[np.ndarray]) -> Iterator[CountedBatch]:
        if self._workers is not None:
            self._requests.pending = ((epoch, indices) for indices in requests)
            yield from start_workers(self._workers, lambda tasks: f"{self._requests.describe(tasks)} of {self.name}")
            if not self._has_warned and snapshot(self.dataset) != self._snapshot:
                self._has_warned = True
                logger.warning(
                    "%s was changed while worker processes read it. They have copies, and see the change from their "
                    "next pass on. Change it in on_epoch_start or on_epoch_end, or pass num_workers=0.",
                    self.name[:1].upper() + self.name[1:],
                )  # fmt: skip
        else:
            for indices in requests:
                batch = self.fetch(epoch, indices)
                yield CountedBatch(pin_batch(batch) if self.pin_memory else batch, len(indices))


class StreamLoader(Loader):
    """Batches an iterable dataset, in its own order; the samples before a position are read again and dropped.

    A dataset with `state_dict()` and `load_state_dict()` need not be read again: its state is kept with each of the
    latest batches, and `position_at` returns the state at a position.

    At most one worker reads a stream: only then is every stream read once and in the same order, whether it splits
    itself over workers (as PyTorch's documentation advises, and Hugging Face's streams do) or not. With several ranks,
    each reads the entire stream and keeps its share, so the stream must yield the same samples on all ranks. The worker
    keeps its copy of the stream over epochs, so a stream with its own generator has a different order in each epoch, as
    without a worker. (A Hugging Face stream shuffles differently with a worker than without.)
    """

    def __init__(
        self,
        dataset: Any,
        rounds: MicrobatchLayout,
        options: ReadOptions,
        *,
        keep_states: bool = True,
        name: str = Loader.name,
    ) -> None:
        self.dataset = dataset
        self.name = name
        self.rounds = rounds
        self.options = options
        self.size: int | None = len(dataset) if has_length(dataset) else None
        self._stream = Stream(dataset, self.rounds, options, keep_states, name)
        if options.num_workers > 1:
            logger.warning(
                "`num_workers=%d`: a stream is read by one worker, so that its order does not depend on their number. "
                "For more, pass a DataLoader as `train_loader` or `eval_loader`.", options.num_workers,
            )  # fmt: skip
        # Has the worker, which keeps its copy of the stream for the next pass, unless a pass is interrupted.
        self._worker: DataLoader[Any] | None = None
        self._snapshot = snapshot(dataset)
        self._positions: deque[StreamPosition] = deque(maxlen=_MAX_POSITIONS)
        self.first: Any = None

    def __len__(self) -> int:
        if self.size is None:
            raise TypeError("This stream has no length.")
        return self.rounds.count(self.size)

    def indices_at(self, epoch: int, position: int, turn: int) -> Sequence[int] | None:
        places = range(position + self.rounds.start(turn), position + self.rounds.start(turn + 1))
        return share(places, self.options.rank, self.options.world_size)

    def update(self, size: int | None = None) -> None:
        if size is None and self.size is not None:
            self.size = len(self.dataset)
        if (state := snapshot(self.dataset)) != self._snapshot:
            self._snapshot = state
            self.close()  # the worker has a copy of the former stream

    def close(self) -> None:
        if self._worker is not None:
            stop_workers(self._worker._iterator)
        self._worker = None

    def stateful_sources(self) -> Sequence[Any]:
        return [self.dataset] if can_seek(self.dataset) else []

    def counted_batches(self, epoch: int, position: int = 0, batches: int | None = None) -> Iterator[CountedBatch]:
        """Yield the micro-batches of an epoch; to reach `position`, the samples before it are read and dropped."""
        start = self._pop_start()
        if start is not None and (start.epoch, start.position) > (epoch, position):
            start = None
        again = position - (start.position if start is not None and start.epoch == epoch else 0)
        if again:
            logger.warning("Reading %d samples of the stream again to reach the position of the run.", again)
        self._stream.epoch, self._stream.position, self._stream.start = epoch, position, start
        for batch, point, first in self._read():
            if point is not None:
                self._positions.append(point)
            self.first = self.first if first is None else first
            yield batch

    def _read(self) -> Iterator[tuple[CountedBatch, StreamPosition | None, Any]]:
        stream = self._stream
        if not self.options.num_workers:
            for batch, point, first in stream:
                yield pin_batch(batch) if self.options.pin_memory else batch, point, first
            return
        if self._worker is None:
            stream.passes = get_context().SimpleQueue()
            self._worker = make_worker_loader(
                stream, self.options, num_workers=1, pin_memory=self.options.pin_memory, persistent_workers=True
            )
        stream.passes.put((stream.epoch, stream.position, stream.start))
        try:
            with report_dead_workers():  # before they are ended
                yield from start_workers(self._worker, lambda tasks: f"batches {format_list(tasks)} of {self.name}")
        except BaseException:  # GeneratorExit too
            self.close()
            raise


class UserLoader(Loader):
    """The user's loader, used unchanged; the random numbers that it draws are keyed by (seed, epoch, batch).

    For a DataLoader with PyTorch's BatchSampler, the number of samples of a batch is known. For any other loader the
    rows of its batches are counted, which may differ from its samples; a resumed run then counts batches.

    With several ranks, each reads the entire loader and keeps every n-th batch, unless its sampler is PyTorch's
    DistributedSampler, which has split the samples already; the samples it repeats for equal shares are left out.

    The loader defines the order: to reach a position, the batches before it are read again and dropped. A generator
    passed to it (`DataLoader(generator=...)`) is seeded by (the generator's initial seed, epoch); otherwise its order
    would depend on how many epochs this process has run.

    A loader with `state_dict()` and `load_state_dict()`, such as torchdata's StatefulDataLoader, need not be read
    again: with `keep_states`, its state is kept with each of the latest batches.
    """

    def __init__(
        self,
        loader: Any,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        name: str = Loader.name,
        keep_states: bool = False,
    ) -> None:
        self.loader = loader
        self.name = name
        self.seed = seed
        self.size: int | None = len(loader.dataset) if _covers_dataset(loader) else None
        batch_sampler = getattr(loader, "batch_sampler", None)
        parts = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
        components = {id(part): part for part in (*parts, getattr(loader, "dataset", None)) if part is not None}
        self._with_epochs = [part for part in components.values() if callable(getattr(part, "set_epoch", None))]
        generators = [getattr(part, "generator", None) for part in components.values()]
        self._generators = {
            generator: generator.initial_seed() for generator in generators if isinstance(generator, torch.Generator)
        }
        if _draws_own_seed(loader):  # which is another one in every process
            self._generators[loader.batch_sampler.sampler.generator] = seed
        self.keep_states: bool = keep_states and has_state(loader)
        self._workers: int = getattr(loader, "num_workers", 0) if isinstance(loader, DataLoader) else 0
        # what ranks, and copies to a GPU, are ahead
        self._positions: deque[StreamPosition] = deque(maxlen=world_size + 2)
        samplers = [part for part in components.values() if isinstance(part, DistributedSampler)]
        shared = [sampler for sampler in samplers if sampler.num_replicas > 1]
        self.shards_samples: bool = bool(shared)
        self._own_rank = rank
        self._rank, self._world_size = (0, 1) if shared else (rank, world_size)
        self._shares = world_size if shared else 1
        self.is_split: bool = bool(shared)
        self.first: Any = None
        self._turns: int | None = None
        is_plain = _is_exactly(batch_sampler, torch.utils.data.BatchSampler)
        if shared and type(shared[0]) is DistributedSampler and batch_sampler is not None and is_plain:
            turns = disable_padding(shared[0]) / batch_sampler.batch_size
            self._turns = math.floor(turns) if batch_sampler.drop_last else math.ceil(turns)
        is_known = batch_sampler is not None and is_plain and has_length(batch_sampler.sampler)
        self._batch_sampler: torch.utils.data.BatchSampler | None = batch_sampler if is_known else None
        self.counts_samples: bool = is_known
        is_split = isinstance(getattr(loader, "dataset", None), IterableDataset) and loader.num_workers > 1
        self._says_length: bool = has_length(loader) and not is_split  # split workers each end with a short batch

    @property
    def reads_all(self) -> bool:
        """Whether this process reads all of the data, and is the only one that does."""
        return self._world_size == self._shares == 1

    def __len__(self) -> int:
        return math.ceil(len(self.loader) / self._world_size) if self._turns is None else self._turns

    def counted_batches(self, epoch: int, position: int = 0, batches: int | None = None) -> Iterator[CountedBatch]:
        """Yield this process's batches; to reach the position, those before it are read and dropped."""
        if self.counts_samples or batches is None:
            return self._share_of(self._read(epoch, samples=position // self._shares), position)
        rows = position if self._shares == 1 else None
        return self._share_of(self._read(epoch, batches // self._shares, rows=rows), position)

    def update(self, size: int | None = None) -> None:
        if size is None and self.size is not None:
            self.size = len(self.loader.dataset)

    def local_state(self, state: Any) -> Any:
        """Return this rank's part of a merged state; None if it is of another number of ranks, or of other data."""
        if not isinstance(state, dict) or state.keys() != {"ranks"} or len(state["ranks"]) != self._shares:
            return None
        return state["ranks"][self._own_rank]

    def stateful_sources(self) -> Sequence[Any]:
        return [self.loader] if has_state(self.loader) else []

    def _is_reached(self, point: StreamPosition, position: int, batches: int) -> bool:
        return not point.has_ended and point.batches <= batches // self._shares

    def resume_at(self, point: StreamPosition | None) -> None:
        if point is not None and point.workers != self._workers:
            logger.warning(
                "The loader had num_workers=%d when its state was saved, and has %d now, so that state cannot be used: "
                "its first batches are read again.", point.workers, self._workers,
            )  # fmt: skip
            point = None
        super().resume_at(point if has_state(self.loader) else None)

    def _begin(self, epoch: int, skipped: int, samples: int) -> tuple[int, int]:
        """Restore the loader from a checkpoint; return its batches and samples before that position.

        The pass begins after so many skipped batches or samples.
        """
        point = self._pop_start()
        if point is None or point.batches > skipped > 0 or point.position > samples > 0:
            return 0, 0
        loader: Any = self.loader
        is_at_end = point.has_ended and point.epoch == epoch - 1 and not skipped and not samples
        if is_at_end and isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            return 0, 0  # its order depends only on the epoch
        if not is_at_end and (point.epoch != epoch or point.has_ended):
            return 0, 0
        if self._workers and not is_at_end:
            logger.warning(
                "The loader resumes from its own state, without the random state of its %d workers: if the dataset "
                "draws random numbers, the rest of the epoch differs from an uninterrupted run.", self._workers,
            )  # fmt: skip
        try:
            self.loader.load_state_dict(point.state)
        except Exception as error:
            error.add_note(
                f"Raised by the loader of {self.name} for its state from the checkpoint. Pass the same arguments to it "
                "as before, or pass a loader without load_state_dict(), whose first batches are read again."
            )
            raise
        return (0, 0) if is_at_end else (point.batches, point.position)

    def _share_of(self, batches: Iterator[CountedBatch], position: int) -> Iterator[CountedBatch]:
        if self._turns is None:
            return round_robin(batches, self._rank, self._world_size)
        done = position // self._shares // self.loader.batch_sampler.batch_size
        return pad_with_dummies(batches, self._turns - done, self._dummy_batch)

    def _dummy_batch(self) -> Any:
        with isolated_rng():
            return self.loader.collate_fn([self.loader.dataset[0]])

    def _read(
        self, epoch: int, skipped: int = 0, *, samples: int = 0, rows: int | None = None
    ) -> Iterator[CountedBatch]:
        """Yield the batches of an epoch after so many skipped batches, which must have `rows` rows, or samples."""
        for part in self._with_epochs:
            part.set_epoch(epoch)
        for generator, seed in self._generators.items():
            generator.manual_seed(derive_seed(seed, epoch))
        start, has_warned, batches = time.monotonic(), False, None
        first, dropped_samples = self._begin(epoch, skipped, samples)
        read = dropped_samples
        for number in itertools.count(first):
            with isolated_rng():
                try:
                    if batches is None:  # what it draws to begin with, it has drawn for the first batch of the epoch
                        seed_generators(derive_seed(self.seed, epoch, 0))
                        batches = iter(self.loader)
                        watch_workers(batches, lambda tasks: f"batches {format_list(tasks)} of {self.name}")
                    if number:
                        seed_generators(derive_seed(self.seed, epoch, number))
                    batch = next(batches, _END)
                except Exception as error:
                    error.add_note(f"Raised by the loader of {self.name} for batch {number} of its epoch, from 0 on.")
                    raise
            is_skipped = number < skipped or dropped_samples < samples
            if rows is not None and dropped_samples != rows and (batch is _END or not is_skipped):
                raise DataError(
                    f"The first {number} batches of the loader have {dropped_samples} rows; when the checkpoint was "
                    f"saved they had {rows}. The position is known only in batches: give the loader its former batch "
                    "size, and the same data in the same order, or start from a checkpoint that was saved at the end "
                    "of an epoch."
                )
            if batch is _END:
                self._check_length(number)
                if self.keep_states:
                    self._record_position(epoch, read, number, has_ended=True)
                return
            if number == first and self._world_size > 1:
                self.first = first_row(batch)
            count = self._samples_in(number, batch)
            read += count
            if self.keep_states:
                self._record_position(epoch, read, number + 1)
            if not is_skipped:
                yield CountedBatch(batch, count)
                continue
            dropped_samples += count
            if not has_warned and time.monotonic() - start > 1:
                has_warned = True
                logger.warning("Reading the first batches of the loader again to reach the position of the run.")

    def _record_position(self, epoch: int, samples: int, batches: int, has_ended: bool = False) -> None:
        self._positions.append(
            StreamPosition(epoch, samples, self.loader.state_dict(), has_ended, batches, self._workers)
        )

    def _samples_in(self, number: int, batch: Any) -> int:
        """Return the number of samples of a batch, at least 1: with 0 it would be a dummy batch."""
        sampler = self._batch_sampler
        remaining = 0 if sampler is None else len(sampler.sampler) - number * sampler.batch_size  # type: ignore[arg-type]
        return max(1, count_samples(batch)) if sampler is None or remaining <= 0 else min(sampler.batch_size, remaining)

    def _check_length(self, batches: int) -> None:
        if not self._says_length:
            return
        if batches > len(self.loader):
            logger.warning(
                "The loader %s yielded %d batches, but its length is %d, from which the steps of the run and of its "
                "schedule were computed. Correct its `__len__`.", type(self.loader).__name__, batches,
                len(self.loader),
            )  # fmt: skip
        if batches < len(self.loader):
            raise DataError(
                f"The loader {type(self.loader).__name__} ended after {batches} batches, but its length is "
                f"{len(self.loader)}. Correct its `__len__`; if that is right, the dataset's __getitem__ or the "
                "collator raised StopIteration before the end."
            )


_END = object()


def check_loader(loader: Any, argument: str) -> None:
    """Raise DataError, with the name of the argument, unless it can be iterated any number of times."""
    is_iterable = hasattr(type(loader), "__iter__") and not isinstance(loader, (str, bytes, type))
    if not is_iterable or _is_used_up(loader):
        raise DataError(
            f"`{argument}` must be iterable any number of times, as a DataLoader is, got "
            f"{type(loader).__name__ if is_iterable else repr(loader)[:200]}. "
            "A generator is used up after one epoch: wrap it in a class with __iter__."
        )


def _draws_own_seed(loader: Any) -> bool:
    """Whether a loader has torchdata's sampler with `shuffle=True`, which draws a seed if none is passed."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    is_theirs = type(sampler).__module__.startswith("torchdata.") and hasattr(sampler, "generator")
    return is_theirs and getattr(loader, "generator", None) is None


def _is_used_up(iterable: Any) -> bool:
    """Whether it can be iterated only once. Loaders with a length, such as DALI's, restart with every iter()."""
    return isinstance(iterable, Iterator) and not has_length(iterable) and not isinstance(iterable, IterableDataset)


def _is_exactly(part: Any, kind: type) -> bool:
    """Whether a part of a loader is an instance of exactly PyTorch's class, or of torchdata's class of this name."""
    is_theirs = type(part).__module__.startswith("torchdata.") and type(part).__name__ == kind.__name__
    return type(part) is kind or is_theirs


def _covers_dataset(loader: Any) -> bool:
    """Whether one pass over a DataLoader is one pass over its dataset, so its length in samples is known."""
    batch_sampler: Any = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or not _is_exactly(batch_sampler, torch.utils.data.BatchSampler):
        return False
    sampler = batch_sampler.sampler  # `loader.sampler` differs if a batch_sampler was given
    kinds = (torch.utils.data.SequentialSampler, torch.utils.data.RandomSampler)
    return (
        not batch_sampler.drop_last
        and (isinstance(sampler, kinds) or _is_exactly(sampler, torch.utils.data.RandomSampler))
        and has_length(sampler)
        and has_length(loader.dataset)
        and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    )


def has_length(dataset: Any) -> bool:
    """Return whether `len(dataset)` works; some classes define it only to raise."""
    try:
        len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return False
    return True


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset can only be iterated: it has no `__getitem__`, or no length."""
    if tensor_columns(dataset)[0] is not None:
        return False
    return isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and has_length(dataset))


def count_rows(dataset: Any) -> int:
    """Return the number of samples of a map-style dataset, or of tensors."""
    return len(Samples(dataset))


def _reject_tables(dataset: Any, name: str) -> None:
    if type(dataset).__module__.partition(".")[0] in ("pandas", "polars"):
        raise DataError(
            f"`{name}` is a {type(dataset).__module__.partition('.')[0]} {type(dataset).__name__}, whose index "
            "names a column or a label, not a sample. Pass inputs and labels, (df[features].astype('float32'), "
            "df['label']), or a dataset of Hugging Face, datasets.Dataset.from_pandas(df)."
        )
    if type(dataset) not in (list, tuple) or not 1 < len(dataset) <= 4 or tensor_columns(dataset)[0] is not None:
        return
    if not all(isinstance(column, (list, np.ndarray, torch.Tensor)) for column in dataset):
        return
    if any(getattr(column, "ndim", 1) == 0 for column in dataset) or len({len(column) for column in dataset}) > 1:
        return
    if len(dataset[0]) > len(dataset) and len({_kind(column) for column in dataset}) > 1:
        raise DataError(
            f"`{name}` is a {type(dataset).__name__} of {len(dataset)} sequences of {len(dataset[0])} entries of "
            "different kinds, which look like the columns of a dataset, not its samples. Pass a tuple of tensors or "
            "arrays, (inputs, labels), or a list of samples, list(zip(inputs, labels))."
        )


def _kind(column: Any) -> tuple[Any, ...]:
    if isinstance(column, list):
        return (type(column[0]), tuple(getattr(column[0], "shape", ()))) if column else ()
    return type(column), tuple(column.shape[1:]), str(column.dtype)


_TITLES = {"train": "the training set", "eval": "the evaluation set", "test": "the test set"}


class _First(IterableDataset[Any]):
    def __init__(self, stream: Any, size: int) -> None:
        self.stream, self.size = stream, size

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.stream), self.size)


def dataset_title(argument: str) -> str:
    """Return the name of an argument's data in messages.

    >>> dataset_title("train_dataset"), dataset_title("eval_loader['dev']"), dataset_title("dataset")
    ('the training set', "the evaluation set 'dev'", 'the dataset')
    """
    stem, _, key = argument.partition("[")
    title = _TITLES.get(stem.partition("_")[0], "the dataset")
    return f"{title} {key[:-1]}" if key else title


def make_loader(
    dataset: Any,
    batch_size: int,
    *,
    name: str,
    shuffle: bool = False,
    keep_states: bool = True,
    multiple_of: int = 1,
    order_seed: int | None = None,
    subset: int | None = None,
    rounds: MicrobatchLayout | None = None,
    **read_options: Any,
) -> Loader:
    """Return the loader for a dataset, which can be map-style (with a length and items), a stream or a DataLoader.

    With `keep_states`, the state of a stream that has one is recorded after each batch, so that it can be restored.
    `multiple_of` (the samples in an epoch are a multiple of this) and `order_seed` (a seed only for the order) are for
    map-style datasets. `subset` keeps at most that many of the first samples. `rounds` splits the samples of a step;
    None gives `batch_size` to each rank. The rest are `ReadOptions`.

    Raises:
        DataError: If `dataset` is empty or none of these.
    """
    if isinstance(dataset, Loader):
        return dataset
    options, title = ReadOptions(**read_options), dataset_title(name)
    rounds = rounds or MicrobatchLayout((batch_size * options.world_size,))
    if isinstance(dataset, DataLoader):
        return UserLoader(dataset, options.seed, options.rank, options.world_size, title, keep_states)
    dataset = tables_to_arrays(dataset, name)
    is_other_dict = isinstance(dataset, dict) and 0 not in dataset and tensor_columns(dataset)[0] is None
    if isinstance(dataset, (str, bytes)) or is_other_dict:
        raise DataError(
            f"`{name}` must be a dataset, tensors or a DataLoader, got {type(dataset).__name__} "
            f"{str(dataset)[:60]!r}. A dict needs tensors or arrays with the same number of rows."
        )
    _reject_tables(dataset, name)
    if not is_stream(dataset):
        size = count_rows(dataset)
        if not size:
            raise DataError(f"`{name}` is empty. Give it at least one sample.")
        source: Any = dataset  # which may define its order and collation
        options = replace(options, collate=adapt_collate(source, options.collate))
        share = {"rank": options.rank, "world_size": options.world_size, "multiple_of": multiple_of, "rounds": rounds}
        share["seed"] = options.seed if order_seed is None else order_seed
        if shuffle and callable(getattr(source, "epoch_order", None)):
            size, sampler = source.epoch_size, DatasetOrder(source, batch_size, **share)
        else:
            size = size if subset is None else min(size, subset)
            sampler = EpochSampler(size, batch_size, shuffle=shuffle, **share)
        if not sampler.size:
            raise DataError(
                f"`{name}` has {size} samples, fewer than the {multiple_of} of a step, and incomplete steps are "
                "dropped. Make the batches smaller, or keep the last one."
            )
        return MapLoader(dataset, sampler, options, title, subset)
    if not hasattr(dataset, "__iter__") or _is_used_up(dataset):
        raise DataError(
            f"`{name}` must be a dataset (with __len__ and __getitem__, or iterable any number of times), tensors, or "
            f"a DataLoader, got {type(dataset).__name__}."
        )
    stream = dataset if subset is None else _First(dataset, subset)
    return StreamLoader(stream, rounds, options, keep_states=keep_states, name=title)
