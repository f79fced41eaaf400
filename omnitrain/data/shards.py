"""Streams of shards, of which each rank reads its own.

`streams.py` has streams that every rank reads completely, as evaluations also read these.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from omnitrain.compute.random_state import derive_seed, isolated_rng, seed_generators
from omnitrain.core.errors import CheckpointError, ConfigError, format_list
from omnitrain.data.collation import pin_batch
from omnitrain.data.loaders import Loader, has_length, make_worker_loader
from omnitrain.data.sampling import COLLATE, CountedBatch, ReadOptions, annotate
from omnitrain.data.streams import StreamPosition, can_seek
from omnitrain.data.workers import report_dead_workers, start_workers, stop_workers

logger: logging.Logger = logging.getLogger("omnitrain")

# Samples of a shard between two of its states: as many at most are read again on a resume.
_EVERY = 32


class ShardedStream(IterableDataset[Any]):
    """A stream of several shards, such as files, of which each rank of a training run reads only its own.

    The shards take turns: the first sample of each, then the second of each, and so on; the turns of a shard that has
    ended stay empty. Rank r reads the shards r, r + ranks, r + 2 x ranks, ..., so that each step has the same samples
    on any number of ranks that divides the number of shards, and in every split into micro-batches. `num_workers`
    processes share the shards of a rank.

    Shards of equal length are best: where some are longer, the last steps of an epoch have fewer samples.

    Args:
        shards: Iterables that restart with each `iter()`; or one stream with `num_shards` and `shard(num_shards,
            index)`, such as Hugging Face's. On a resume, those with `state_dict()` and `load_state_dict()` restore
            their state, and the others are read again. `set_epoch` is called if it exists.
        count: The number of shards to make of one stream, all of which are open at a time; None is its `num_shards`.

    Raises:
        ConfigError: If `shards` is empty or of another type.

    >>> list(ShardedStream([range(0, 3), range(10, 12), range(20, 23)]))
    [0, 10, 20, 1, 11, 21, 2, 22]
    """

    def __init__(self, shards: Any, count: int | None = None) -> None:
        if getattr(shards, "_distributed", None) is not None:
            raise ConfigError(
                "`shards` was split by split_dataset_by_node, and a ShardedStream gives each rank its shards itself. "
                "Pass the stream from before the split."
            )
        if callable(getattr(shards, "shard", None)) and hasattr(shards, "num_shards"):
            most = int(shards.num_shards)
            count = most if count is None else count
            if type(count) is not int or not 1 <= count <= most:
                raise ConfigError(f"`count` must be from 1 to {most}, the `num_shards` of the stream, got {count!r}.")
            shards = [shards.shard(num_shards=count, index=index) for index in range(count)]
        elif count is not None:
            raise ConfigError(f"`count={count!r}` has no effect on a list of shards. Leave it out.")
        if not isinstance(shards, Sequence) or isinstance(shards, str | bytes) or not shards:
            raise ConfigError(
                "`shards` must be a list of iterables, or a stream with `num_shards` and `shard(num_shards, index)`, "
                f"got {type(shards).__name__}{' without entries' * (isinstance(shards, Sequence))}."
            )
        for place, shard in enumerate(shards):
            if isinstance(shard, str | bytes | Iterator) or not hasattr(shard, "__iter__"):
                raise ConfigError(
                    f"Shard {place} must be iterable any number of times, got {type(shard).__name__}. A generator is "
                    "used up after one epoch: wrap it in a class with __iter__."
                )
        self.shards: list[Any] = list(shards)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the shards, which may shuffle by it."""
        for shard in self.shards:
            if callable(getattr(shard, "set_epoch", None)):
                shard.set_epoch(epoch)

    def __len__(self) -> int:
        return sum(len(shard) for shard in self.shards)

    def __iter__(self) -> Iterator[Any]:
        live = deque(map(iter, self.shards))
        while live:
            iterator = live.popleft()
            if (sample := next(iterator, _END)) is not _END:
                live.append(iterator)
                yield sample


class _ReaderBatch(NamedTuple):
    """A reader's part of one micro-batch; `states` has the samples read from shards and their states at that point."""

    places: list[int]
    samples: Any
    states: dict[int, tuple[int, Any]]


class _Reader(IterableDataset[_ReaderBatch]):
    """Reads some of the shards of a rank; the places on the rank belong to its shards in turn."""

    def __init__(self, loader: ShardedLoader, numbers: list[int], collates: bool) -> None:
        self.shards = {number: loader.local_shards[number] for number in numbers}
        self.turns = len(loader.local_shards)
        self.options, self.batch_size, self.name = loader.options, loader.batch_size, loader.name
        self.collates = collates
        self.keep_states: bool = loader.keep_states
        self.epoch = self.first = 0
        self.starts: dict[int, tuple[int, Any]] = {}

    def __iter__(self) -> Iterator[_ReaderBatch]:
        live = dict[int, Iterator[Any]]()
        with isolated_rng():
            for number in self.shards:
                live[number] = self._open_shard(number)
        state_counts = {number: self._samples_before(number, self.first) for number in live}
        for first in itertools.count(self.first, self.batch_size):
            if not live:
                return
            places, samples, states = list[int](), list[Any](), dict[int, tuple[int, Any]]()
            with isolated_rng():
                for place in range(first, first + self.batch_size):
                    number = place % self.turns
                    if number not in live:
                        continue
                    self._seed(place)
                    sample = self._next(live[number], number, place)
                    if sample is _END:
                        del live[number]
                        continue
                    places.append(place)
                    samples.append(sample)
            if self.keep_states:
                states = self._states(live, state_counts, first + self.batch_size)
            yield _ReaderBatch(places, self.make_batch(places, samples) if self.collates else samples, states)

    def _open_shard(self, number: int) -> Iterator[Any]:
        """Return the rest of a shard, from the first place on."""
        shard, target = self.shards[number], self._samples_before(number, self.first)
        if callable(getattr(shard, "set_epoch", None)):
            shard.set_epoch(self.epoch)
        count, state = self.starts.get(number, (0, None))
        if count:
            shard.load_state_dict(state)
        self._seed(number)
        samples = iter(shard)
        for done in range(count, target):
            self._seed(number + done * self.turns)
            if self._next(samples, number, number + done * self.turns) is _END:
                break
        return samples

    def _samples_before(self, number: int, place: int) -> int:
        """Return how many samples of a shard are before a place, if the shard is long enough."""
        return max(0, math.ceil((place - number) / self.turns))

    def _next(self, samples: Iterator[Any], number: int, place: int) -> Any:
        try:
            return next(samples, _END)
        except Exception as error:
            shard = self.options.rank + number * self.options.world_size
            error.add_note(f"Raised for sample {place // self.turns} of shard {shard} of {self.name}.")
            raise

    def _seed(self, place: int, *more: int) -> None:
        options = self.options
        seed_generators(derive_seed(options.seed, self.epoch, options.rank + place * options.world_size, *more))

    def _states(self, live: Iterable[int], state_counts: dict[int, int], place: int) -> dict[int, tuple[int, Any]]:
        """Return the states of the shards of which enough was read since their last states."""
        states = {}
        for number in live:
            count = self._samples_before(number, place)
            if count - state_counts[number] >= _EVERY and can_seek(self.shards[number]):
                state_counts[number] = count
                states[number] = count, self.shards[number].state_dict()
        return states

    def make_batch(self, places: Sequence[int], samples: list[Any]) -> Any:
        """Return the batch of these samples; None if there are no samples."""
        if not samples:
            return None
        with isolated_rng():
            self._seed(places[0], COLLATE)
            try:
                return self.options.collate(samples)
            except Exception as error:
                rank, ranks = self.options.rank, self.options.world_size
                first, last = (rank + place * ranks for place in (places[0], places[-1]))
                description = f"the samples from place {first} to {last} of {self.name}, a stream of shards"
                annotate(error, "collator", description)
                raise


_END = object()


class ShardedLoader(Loader):
    """Batches a `ShardedStream`: only this rank's shards are read, here or in worker processes.

    A position is a number of turns of all shards, so it means the same on any number of ranks. Each rank continues
    until its own shards have ended; a micro-batch in which all turns are of ended shards is a dummy batch.

    Raises:
        ConfigError: If the shards cannot be shared out evenly.
    """

    is_split = True

    def __init__(
        self,
        stream: ShardedStream,
        batch_size: int,
        options: ReadOptions,
        keep_states: bool = True,
        name: str = Loader.name,
    ) -> None:
        count, world_size, num_workers = len(stream.shards), options.world_size, options.num_workers
        if count % world_size:
            raise ConfigError(
                f"{name[:1].upper()}{name[1:]} has {count} shards, which cannot be divided evenly among "
                f"{world_size} ranks. Make a multiple of {world_size} of them, or pass the stream without "
                "ShardedStream: then each rank reads all of it, and takes its share of the samples."
            )
        self.dataset: Any = stream
        self.options: ReadOptions = options
        self.batch_size: int = batch_size
        self.rank: int = options.rank
        self.world_size: int = world_size
        self.keep_states: bool = keep_states
        self.name: str = name
        self.local_shards: list[Any] = stream.shards[options.rank :: world_size]
        self.size: int | None = len(stream) if has_length(stream) else None
        readers = max(1, min(num_workers, len(self.local_shards)))
        if num_workers > len(self.local_shards):
            logger.warning(
                "`num_workers=%d`: %s has %d shards for this rank, so as many workers read them.", num_workers, name,
                len(self.local_shards),
            )  # fmt: skip
        groups = [list(range(first, len(self.local_shards), readers)) for first in range(readers)]
        self._readers = [_Reader(self, numbers, readers == 1) for numbers in groups]
        self._iterators: list[Any] = []
        self._states: dict[int, deque[tuple[int, Any]]] = {}
        # The epoch of the present pass, and the place on this rank where it began.
        self._from: tuple[int, int] = (0, 0)

    def update(self, size: int | None = None) -> None:
        if size is None and self.size is not None:
            self.size = len(self.dataset)

    def __len__(self) -> int:
        if self.size is None:
            raise TypeError("This stream has no length.")
        count = len(self.dataset.shards)
        ends = [(len(shard) - 1) * count + number + 1 for number, shard in enumerate(self.dataset.shards) if len(shard)]
        return math.ceil(max(ends, default=0) / (self.batch_size * self.world_size))

    def close(self) -> None:
        for iterator in self._iterators if self.options.num_workers else ():
            stop_workers(iterator)
        self._iterators = []

    def stateful_sources(self) -> Sequence[Any]:
        return [shard for shard in self.local_shards if can_seek(shard)]

    # --- the position

    def position_at(self, epoch: int, position: int, batches: int = 0) -> StreamPosition | None:
        """Return the place up to which the windows so far go, and the states of this rank's shards not after it."""
        if not batches or self._from[0] != epoch:
            return None
        place = self._from[1] + self.turn * self.batch_size
        states = {}
        for number, history in self._states.items():
            before = [entry for entry in history if entry[0] <= self._readers[0]._samples_before(number, place)]
            if before:
                states[self.rank + number * self.world_size] = list(before[-1])
        count = len(self.dataset.shards)
        return StreamPosition(epoch, place * self.world_size, {"shards": count, "states": states}, False, batches)

    def merge_states(self, states: list[Any]) -> Any:
        """Return one state from those of all ranks."""
        return {**states[0], "states": {number: entry for state in states for number, entry in state["states"].items()}}

    def local_state(self, state: Any) -> Any:
        """Return this rank's part of a merged state, None if it is of other data.

        Raises:
            CheckpointError: If there were other shards.
        """
        if not isinstance(state, dict) or state.keys() != {"shards", "states"}:
            return None
        if state["shards"] != len(self.dataset.shards):
            raise CheckpointError(
                f"{self.name[:1].upper()}{self.name[1:]} has {len(self.dataset.shards)} shards, and had "
                f"{state['shards']} when the checkpoint was saved in the middle of an epoch. Pass the former shards, "
                "or take a checkpoint from the end of an epoch."
            )
        entries = state["states"].items()
        return {**state, "states": {key: entry for key, entry in entries if key % self.world_size == self.rank}}

    def counted_batches(self, epoch: int, position: int = 0, batches: int | None = None) -> Iterator[CountedBatch]:
        """Yield the micro-batches of an epoch; without `batches`, `position` counts turns of all shards."""
        point = self._pop_start()
        place, states = position // self.world_size, {}
        if batches is not None:
            place = batches // self.world_size * self.batch_size
        if point is not None and point.epoch == epoch:
            place, states = point.position // self.world_size, point.state["states"]
            if point.position % self.world_size:
                raise CheckpointError(
                    f"The checkpoint was saved after {point.position} turns of the shards of {self.name}, which are no "
                    f"whole steps of {self.world_size} ranks. Take another number of ranks."
                )
        starts = {number // self.world_size: (entry[0], entry[1]) for number, entry in states.items()}
        counts = [self._readers[0]._samples_before(number, place) for number in range(len(self.local_shards))]
        again = sum(count - min(count, starts.get(number, (0,))[0]) for number, count in enumerate(counts))
        if again > len(self.local_shards) * _EVERY:
            logger.warning(
                "Reading up to %d samples of this rank's shards again to reach the position of the run.", again
            )
        self._from = (epoch, place)
        self.turn: int = 0
        self._states = {number: deque([entry], maxlen=3) for number, entry in starts.items()}
        for reader in self._readers:
            reader.epoch, reader.first = epoch, place
            reader.starts = {number: entry for number, entry in starts.items() if number in reader.shards}
        return self._batches()

    def _batches(self) -> Iterator[CountedBatch]:
        latest, missed = None, 0
        for places, batch in self._merged():
            if not places:
                missed += latest is None
                if latest is not None:
                    yield CountedBatch(latest, 0)
                continue
            latest = pin_batch(batch) if self.options.pin_memory else batch
            for _ in range(missed):  # turns of empty shards before the first sample
                yield CountedBatch(latest, 0)
            missed = 0
            yield CountedBatch(latest, len(places))
        if latest is None and (last := self._last_before(*self._from)) is not None:
            yield CountedBatch(pin_batch(last) if self.options.pin_memory else last, 0)  # other ranks may have more

    def _last_before(self, epoch: int, end: int) -> Any:
        """Return the last micro-batch of this rank before a place at which its shards have ended; None if it has none.

        An uninterrupted pass would repeat it as a dummy batch.
        """
        reader, back, last = _Reader(self, list(range(len(self.local_shards))), True), self.batch_size, None
        reader.epoch, reader.keep_states = epoch, False
        while last is None and end > 0:
            reader.first = max(0, end - back)
            for part in reader:
                last = part.samples if part.places else last
            if not reader.first:
                break
            back *= 2
        return last

    def _merged(self) -> Iterator[tuple[list[int], Any]]:
        """Yield the micro-batches of all readers together, each with the places of its samples."""
        self.close()
        self._iterators = [self._start_reader(reader) for reader in self._readers]
        live = list(self._iterators)
        try:
            while True:
                with report_dead_workers():  # before they are ended
                    results = [(iterator, next(iterator, None)) for iterator in live]
                live = [iterator for iterator, part in results if part is not None]
                parts = [part for _, part in results if part is not None]
                if not parts:
                    return
                for part in parts:
                    for number, entry in part.states.items():
                        self._states.setdefault(number, deque(maxlen=3)).append(entry)
                if len(self._readers) == 1:
                    yield parts[0].places, parts[0].samples
                    continue
                pairs = [pair for part in parts for pair in zip(part.places, part.samples, strict=True)]
                pairs.sort(key=lambda pair: pair[0])
                places = [place for place, _ in pairs]
                yield places, self._readers[0].make_batch(places, [sample for _, sample in pairs])
        finally:
            self.close()

    def _start_reader(self, reader: _Reader) -> Any:
        if not self.options.num_workers:
            return iter(reader)
        # one worker each, as a stream that shares itself out among workers takes all of its shard then
        loader = make_worker_loader(reader, self.options, num_workers=1)
        return start_workers(loader, lambda tasks: f"batches {format_list(tasks)} of {self.name}")
