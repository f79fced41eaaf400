"""The order of samples, their split over ranks, and fetching."""

from __future__ import annotations

import itertools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DistributedSampler, Subset, TensorDataset

from omnitrain.compute.random_state import GENERATORS, Generator, derive_seed, isolated_rng
from omnitrain.core.errors import DataError, describe_samples
from omnitrain.data.collation import Collator, DictBatch
from omnitrain.data.failing_samples import describe_failures

Collate = Callable[[Sequence[Any]], Any]


@dataclass(slots=True)
class Window:
    """The micro-batches of one optimizer step on this process, with their weights and counts.

    Attributes:
        batches: The micro-batches on the host, as the loader yielded them.
        weights: The weight of each micro-batch in the window's mean.
        weight: The sum of the weights over all ranks.
        micro_batches: Batches of the loader in the window, split or not, over all ranks.
        samples: Samples of the dataset in the window, over all ranks.
        tokens: Tokens in the window, over all ranks.
        divisor: The divisor of the weighted losses of this rank.
        origins: The batch of this rank's window that each micro-batch is a part of; None if none is split.
    """

    batches: list[Any]
    weights: list[float]
    weight: float
    micro_batches: int
    samples: int
    tokens: int
    divisor: float
    origins: list[int] | None = None


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How all loaders read data: what makes batches, the share of a rank, and worker processes."""

    collate: Collate = field(default_factory=Collator)
    seed: int = 42
    rank: int = 0
    world_size: int = 1
    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None


class CountedBatch(NamedTuple):
    """A batch and how many samples of the dataset it was made of: a collator may make any number of rows.

    Attributes:
        batch: The collated batch.
        samples: 0 for a dummy batch of a process that has run out of samples: it goes through the model, because
            other ranks wait, and has no weight.
    """

    batch: Any
    samples: int


@dataclass(frozen=True, slots=True)
class MicrobatchLayout:
    """The micro-batches of a step: in each round, every rank takes its share of a number of samples.

    Attributes:
        sizes: The samples of each round of a step; every step has the same sizes.

    >>> rounds = MicrobatchLayout.of(13, batch_size=2, world_size=3)
    >>> rounds.sizes, rounds.count(18), [rounds.start(number) for number in range(5)]
    ((6, 3, 4), 4, [0, 6, 9, 13, 19])
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, step: int, batch_size: int, world_size: int) -> MicrobatchLayout:
        """Return the fewest rounds for a step of `step` samples, in which ranks differ by at most one sample."""
        number = math.ceil(step / (batch_size * world_size))
        each, rest = divmod(step, world_size)
        sizes = [world_size * (each // number + (turn < each % number)) for turn in range(number)]
        sizes[-1] += rest  # of the rounds that are equal parts, the last one is the smallest
        return cls(tuple(sizes))

    @property
    def step(self) -> int:
        """The samples of a step."""
        return sum(self.sizes)

    def start(self, number: int) -> int:
        """Return the samples before a round, counted from the beginning of a step."""
        steps, turns = divmod(number, len(self.sizes))
        return steps * self.step + sum(self.sizes[:turns])

    def count(self, samples: int) -> int:
        """Return the number of rounds of so many samples, of which the last may be short."""
        steps, rest = divmod(samples, self.step)
        starts = itertools.accumulate(self.sizes[:-1], initial=0)
        return steps * len(self.sizes) + sum(start < rest for start in starts)


class EpochSampler:
    """The order of samples in every epoch, and the split of each window over the ranks.

    The order depends only on (seed, epoch), and a position is a number of samples, so seeking is arithmetic: step k
    has the same samples on any number of ranks. Above 2^24 samples the permutation is computed position by position,
    so with a billion samples the first step starts at once and takes no memory. A short last share is split unevenly:
    nothing is padded or counted twice, and every process gets the same number of micro-batches, some of them empty.

    Attributes:
        size: Samples in an epoch.
        multiple_of: The samples in an epoch are a multiple of this.
        is_keyed: Whether a shuffled order is computed position by position. Checkpoints record it.

    >>> [list(map(int, batch)) for batch in EpochSampler(5, 2, shuffle=False).batches(epoch=0, position=2)]
    [[2, 3], [4]]
    """

    # Whether an order is drawn as a whole however many samples there are.
    _is_drawn_whole = False

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 42,
        rank: int = 0,
        world_size: int = 1,
        multiple_of: int = 1,
        rounds: MicrobatchLayout | None = None,
    ) -> None:
        self.multiple_of = multiple_of
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.rounds: MicrobatchLayout = rounds or MicrobatchLayout((batch_size * world_size,))
        self._drawn: tuple[int, np.ndarray] | None = None
        self._samples = -1
        self.size: int
        self.is_keyed: bool
        self.resize(size)

    def resize(self, size: int) -> None:
        """Set the number of samples in the dataset, for the epochs drawn from then on."""
        if size == self._samples:
            return
        self._samples = size
        self.size = size - size % self.multiple_of
        self.is_keyed = size > _DRAWN_WHOLE and not self._is_drawn_whole
        self._drawn = None

    def __len__(self) -> int:
        """Return the number of micro-batches of one epoch on one process."""
        return self.rounds.count(self.size)

    def order(self, epoch: int) -> np.ndarray:
        """Return the order of all samples of an epoch, as int64."""
        return self.samples(epoch, 0, self._samples)

    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the samples at the positions `start` to `stop` of an epoch, as int64; fewer at its end."""
        stop = min(stop, self._samples)
        if not self.shuffle:
            return np.arange(start, stop)
        if self.is_keyed:
            return permute(np.arange(start, stop), self._samples, derive_seed(self.seed, epoch))
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, self._draw(epoch)
        return self._drawn[1][start:stop]

    def _draw(self, epoch: int) -> np.ndarray:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch) >> 1)
        return torch.randperm(self._samples, generator=generator).numpy()

    def batches(self, epoch: int, position: int = 0) -> Iterator[np.ndarray]:
        """Yield the indices of this process's micro-batches, from the step at `position` of the epoch on."""
        rounds = self.rounds
        block = rounds.step * max(1, _BLOCK // rounds.step)
        for first in range(position, self.size, block):
            samples = self.samples(epoch, first, min(first + block, self.size))
            for start, end in itertools.pairwise(itertools.accumulate(itertools.cycle(rounds.sizes), initial=0)):
                if start >= len(samples):
                    break
                yield share(samples[start:end], self.rank, self.world_size)


class DatasetOrder(EpochSampler):
    """The order that a dataset defines: `epoch_order(epoch, seed)` with `epoch_size` samples."""

    _is_drawn_whole = True

    def __init__(self, dataset: Any, batch_size: int, **options: Any) -> None:
        super().__init__(dataset.epoch_size, batch_size, **options)
        self._dataset = dataset

    def _draw(self, epoch: int) -> np.ndarray:
        order, last = np.asarray(self._dataset.epoch_order(epoch, self.seed)), len(self._dataset) - 1
        start = f"{type(self._dataset).__name__}.epoch_order must return"
        if order.shape != (self._samples,) or order.dtype.kind not in "iu":
            raise DataError(
                f"{start} {self._samples} samples (`epoch_size`) as integers, got {order.dtype} of shape {order.shape}."
            )
        if not 0 <= order.min() <= order.max() <= last:
            raise DataError(f"{start} samples from 0 to {last}, got {order.min()} to {order.max()}.")
        return order.astype(np.int64)


# The most samples whose order is drawn as one permutation: 128 MiB, and about a second.
_DRAWN_WHOLE = 1 << 24
# Positions of an order that are computed at once.
_BLOCK = 1 << 14
_ROUNDS = 8


def permute(places: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return the numbers at these positions of a permutation of `size` numbers, selected by `key`, as int64.

    A Feistel network: a position is a row and a column of a square, and each round shifts one of the two by a hash
    (splitmix64's finalizer) of the other. Rounds are invertible, so no two positions collide. The square is slightly
    larger than `size`; a result outside `size` goes through the network again until it is inside.

    >>> sorted(permute(np.arange(10), 10, key=1).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    side = np.uint64(math.isqrt(size - 1) + 1)
    keys = [np.uint64(derive_seed(key, number)) for number in range(_ROUNDS)]

    def apply_rounds(places: np.ndarray) -> np.ndarray:
        row, column = np.divmod(places, side)
        for round_key in keys:
            row, column = column, (row + _hash(column + round_key) % side) % side
        return row * side + column

    result = apply_rounds(places.astype(np.uint64))
    while len(outside := np.flatnonzero(result >= size)):
        result[outside] = apply_rounds(result[outside])
    return result.astype(np.int64)


def _hash(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def adapt_collate(dataset: Any, collate: Collate) -> Collate:
    """Return the collator that a dataset makes of this one; this one, if it makes none."""
    adapt = getattr(dataset, "collate_with", None)
    return adapt(collate) if callable(adapt) else collate  # type: ignore[return-value]


def share(samples: Any, rank: int, world_size: int) -> Any:
    """Return a rank's part of the samples of a micro-batch of all ranks: equal parts, the first ones larger by one.

    >>> [share([1, 2, 3, 4], rank, 2) for rank in (0, 1)], [share([1], rank, 2) for rank in (0, 1)]
    ([[1, 2], [3, 4]], [[1], []])
    """
    if world_size == 1:
        return samples
    size, larger = divmod(len(samples), world_size)
    first = rank * size + min(rank, larger)
    return samples[first : first + size + (rank < larger)]


def round_robin(batches: Iterable[CountedBatch], rank: int, world_size: int) -> Iterator[CountedBatch]:
    """Yield one of every `world_size` batches, and a dummy if the data end before this process's last turn.

    >>> batches = [CountedBatch(number, 8) for number in range(5)]
    >>> [[batch.batch for batch in round_robin(batches, rank, 2)] for rank in (0, 1)]
    [[0, 2, 4], [1, 3, 4]]
    """
    number, latest = -1, None
    for number, latest in enumerate(batches):
        if number % world_size == rank:
            yield latest
    if latest is not None and 0 < (number + 1) % world_size <= rank:
        yield CountedBatch(latest.batch, 0)


def disable_padding(sampler: DistributedSampler[Any]) -> int:
    """Keep a DistributedSampler from repeating samples, and return the number of samples of the largest share.

    By default it repeats samples to make all shares equal, and these would count twice.
    """
    if not sampler.drop_last:
        sampler.drop_last, sampler.total_size = True, len(sampler.dataset)  # type: ignore[arg-type]
        sampler.num_samples = len(range(sampler.rank, sampler.total_size, sampler.num_replicas))
    return math.ceil(sampler.total_size / sampler.num_replicas)


def pad_with_dummies(
    batches: Iterable[CountedBatch], turns: int, make_dummy: Callable[[], Any]
) -> Iterator[CountedBatch]:
    """Yield the batches of a share, and dummies up to the number of `turns` of the largest share.

    >>> list(pad_with_dummies([CountedBatch("a", 8)], 2, make_dummy=str))
    [CountedBatch(batch='a', samples=8), CountedBatch(batch='a', samples=0)]
    """
    latest = None
    for latest in batches:
        turns -= 1
        yield latest
    for _ in range(turns):
        yield CountedBatch(make_dummy() if latest is None else latest.batch, 0)


class Samples:
    """The samples of a map-style dataset, or the rows of tensors, by index."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.columns: Any
        self.rows: Any
        self.update_columns()

    def update_columns(self) -> None:
        """Find the tensors of the dataset, which may have changed since the latest pass."""
        self.columns, self.rows = tensor_columns(self.dataset)

    def __len__(self) -> int:
        if self.rows is not None or self.columns is None:
            return len(self.dataset if self.rows is None else self.rows)
        columns = self.columns.values() if isinstance(self.columns, dict) else self.columns
        return len(columns if isinstance(columns, torch.Tensor) else next(iter(columns)))

    def __getitem__(self, index: int) -> Any:
        columns = self.columns
        if columns is None:
            return self.dataset[index]
        row = index if self.rows is None else int(self.rows[index])
        if isinstance(columns, dict):
            return {name: column[row] for name, column in columns.items()}
        return tuple(column[row] for column in columns) if isinstance(columns, tuple) else columns[row]


class Fetch(Samples):
    """Fetches the samples of one micro-batch and collates them; random numbers depend only on the sample.

    Tensors are indexed once for the entire batch. Otherwise each sample is fetched with generators seeded by (seed,
    epoch, index), but only those generators that the dataset has drawn from so far: if a fetch advances a generator
    that was not seeded, it is repeated with that one seeded. So workers, resumes and the number of ranks cannot change
    a sample, a dataset that draws nothing costs next to nothing, and the generators of training are unchanged. Custom
    collators are treated in the same way; their random numbers are keyed by the batch's first sample.
    """

    def __init__(self, dataset: Any, collate: Collate, seed: int, name: str = "the data") -> None:
        super().__init__(dataset)
        self.name = name
        self.collate = collate
        self.seed = seed
        self.drawn: list[Generator] = []
        self.drawn_in_collate: list[Generator] = []
        self._stacks = type(collate) is Collator  # which draws nothing
        self._has_batch_fetch = callable(getattr(dataset, "__getitems__", None))

    def __call__(self, epoch: int, indices: np.ndarray) -> Any:
        """Return the collated batch of the samples at `indices`; if there are none, that of the first sample.

        Raises:
            DataError: If the dataset or the collator raises StopIteration, which would look like the end of the data.
        """
        if not len(indices):
            indices = np.zeros(1, dtype=np.int64)
        if self.columns is not None and self._stacks and self.collate.max_length is None:  # type: ignore[attr-defined]
            return self._fetch_columns(indices)
        positions = indices.tolist()
        while True:
            samples = self._run_watched(self.drawn, self._samples, epoch, positions)
            if samples is _AGAIN:
                continue
            try:
                if self._stacks:
                    return self.collate(samples)
                batch = self._run_watched(self.drawn_in_collate, self._seed_and_collate, epoch, positions, samples)
            except Exception as error:
                with isolated_rng():
                    description = describe_failures(
                        error, positions, self.name, lambda part: self.collate(self._samples(epoch, part)), pairs=True
                    )
                annotate(error, "collator", description)
                raise
            if batch is not _AGAIN:  # if it is, fetch the samples again too: a collator may have changed them
                return batch

    def _run_watched(self, seeded: list[Generator], work: Callable[..., Any], *args: Any) -> Any:
        """Return the result of `work`; _AGAIN if it drew from a generator not in `seeded`, which is then added."""
        snapshots, count = [generator.snapshot() for generator in GENERATORS], len(seeded)
        try:
            result = work(*args)
        finally:
            for generator, snapshot in zip(GENERATORS, snapshots, strict=True):
                if generator.has_changed(snapshot):
                    generator.restore(snapshot)
                    seeded += [] if generator in seeded else [generator]
        return result if len(seeded) == count else _AGAIN

    def _seed_and_collate(self, epoch: int, positions: list[int], samples: Sequence[Any]) -> Any:
        for generator in self.drawn_in_collate:
            generator.seed(derive_seed(self.seed, epoch, positions[0], COLLATE))
        return self.collate(samples)

    def _samples(self, epoch: int, positions: list[int]) -> Sequence[Any]:
        if self.columns is not None:
            return _rows_of(self._fetch_columns(np.asarray(positions)))
        turns = iter(positions)  # which shows how far it came if a sample fails
        try:
            dataset, samples = self.dataset, []
            if not self.drawn:
                return dataset.__getitems__(positions) if self._has_batch_fetch else [dataset[index] for index in turns]
            for position in turns:
                seed = derive_seed(self.seed, epoch, position)
                for generator in self.drawn:
                    generator.seed(seed)
                samples.append(dataset[position])
            return samples
        except Exception as error:
            count = len(positions) - operator.length_hint(turns)
            if count:
                description = describe_samples(positions[count - 1 : count], self.name)
            else:  # all at once
                description = describe_failures(error, positions, self.name, self.dataset.__getitems__)
            annotate(error, "dataset", description)
            raise

    def _fetch_columns(self, indices: np.ndarray) -> Any:
        index = torch.from_numpy(indices if self.rows is None else self.rows[indices])
        columns = self.columns
        is_named, rows = isinstance(columns, dict), []
        for column in columns.values() if is_named else columns if isinstance(columns, tuple) else (columns,):
            rows.append(column.index_select(0, index if column.is_cpu else index.to(column.device)))
        if is_named:
            return DictBatch(zip(columns, rows, strict=True))
        return tuple(rows) if isinstance(columns, tuple) else rows[0]


def annotate(error: Exception, part: str, samples: str) -> None:
    """Note the samples for which the dataset or the collator has raised an error.

    Raises:
        DataError: For a StopIteration, which a loop would mistake for the end of the data.
    """
    if isinstance(error, StopIteration):
        raise DataError(
            f"The {part} raised StopIteration for {samples}, which a loop would mistake for the end of the data. It is "
            "often a next() on an exhausted iterator: catch it, or give it a default."
        ) from error
    error.add_note(f"Raised {'by the collator ' * (part == 'collator')}for {samples}.")


_AGAIN = object()
COLLATE = 1  # makes the seed of a batch's collation differ from that of its first sample


def _rows_of(batch: Any) -> list[Any]:
    if isinstance(batch, torch.Tensor):
        return list(batch)
    if isinstance(batch, dict):
        return [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    return list(zip(*batch, strict=True))


def is_table(value: Any) -> bool:
    """Return whether a value is a table or a column of pandas or polars."""
    module = type(value).__module__.partition(".")[0]
    return module in ("pandas", "polars") and hasattr(value, "to_numpy")


def tables_to_arrays(dataset: Any, name: str) -> Any:
    """Return a tuple or dict of tables and columns of pandas or polars as one of arrays; anything else unchanged.

    Raises:
        DataError: If a column is not numeric.
    """
    values = dataset.values() if type(dataset) is dict else dataset if type(dataset) is tuple else ()
    if not any(map(is_table, values)):
        return dataset

    def convert(value: Any) -> Any:
        if not is_table(value):
            return value
        array = value.to_numpy()
        if array.dtype.kind in "biufc":
            return array
        columns = value.columns if hasattr(value, "columns") else ()
        odd = [str(column) for column in columns if not _is_column(value[column].to_numpy())]
        which = f"its columns {', '.join(map(repr, odd))} are" if odd else "it is"
        raise DataError(
            f"A {type(value).__name__} of `{name}` has the type {array.dtype}: {which} not numeric. Leave them out, or "
            "encode them, for example by pandas.get_dummies or Series.cat.codes, and fill missing values."
        )

    if type(dataset) is dict:
        return {key: convert(value) for key, value in dataset.items()}
    return tuple(map(convert, dataset))


def tensor_columns(
    dataset: Any,
) -> tuple[torch.Tensor | dict[str, torch.Tensor] | tuple[torch.Tensor, ...] | None, Any]:
    """Return the tensors of a dataset that consists of tensors, and the rows of them that it has (None: all).

    Arrays of numbers count as tensors, except a single array, which is a sequence of rows.
    """
    if type(dataset) is Subset:
        columns, rows = tensor_columns(dataset.dataset)
        if columns is None:
            return None, None
        chosen = np.asarray(dataset.indices, dtype=np.int64)
        return columns, chosen if rows is None else rows[chosen]
    if type(dataset) is TensorDataset:
        return dataset.tensors, None
    if isinstance(dataset, torch.Tensor):
        return dataset, None
    columns = dataset.values() if isinstance(dataset, dict) else dataset if type(dataset) is tuple else ()
    if columns and all(_is_column(column) for column in columns):
        if len({len(column) for column in columns}) > 1:
            raise DataError(
                "The tensors or arrays of a dataset must have the same number of rows, got "
                f"{[len(column) for column in columns]}."
            )
        if isinstance(dataset, dict):
            return {key: _as_tensor(column) for key, column in dataset.items()}, None
        return tuple(map(_as_tensor, columns)), None
    return None, None


def _is_column(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.dtype.kind in "biufc"
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _as_tensor(column: Any) -> torch.Tensor:
    """Return a column as a tensor; an array shares its memory, unless torch cannot use its layout."""
    if isinstance(column, torch.Tensor):
        return column
    if not column.dtype.isnative or min(column.strides) < 0:
        column = column.astype(column.dtype.newbyteorder("="), order="C")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about read-only arrays, such as those on disk: nothing writes to them
        return torch.from_numpy(column)
