"""Loaders of map-style datasets, streams and custom loaders, with and without workers."""

import functools
import itertools
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pandas
import pytest
import torch
from datasets import Dataset as Table
from recipes import assert_equal, disturb, draw, states
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, Subset, TensorDataset

from omnitrain.core.errors import DataError
from omnitrain.data.loaders import MapLoader, StreamLoader, UserLoader, check_loader, make_loader
from omnitrain.data.sampling import MicrobatchLayout, ReadOptions
from omnitrain.data.streams import StreamPosition

BatchSampler = torch.utils.data.BatchSampler
PROCESSES = pytest.mark.processes
WORKERS = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=PROCESSES)])


class Rows(Dataset[torch.Tensor]):
    """Rows of (index, something drawn in every third sample), or of another function."""

    def __init__(self, size: int = 11, make: Callable[[int], Any] = lambda i: (i, draw() if i % 3 == 0 else 0)) -> None:
        self.size, self.make = size, make

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.make(index), dtype=torch.float64)


def read(loader: Any, epoch: int = 0, position: int = 0) -> list[Any]:
    """Read an epoch while training draws from the generators, which the loader must not move."""
    batches, source = [], iter(loader.batches(epoch, position))
    while True:
        disturb()
        before = states()
        batch = next(source, None)
        assert states() == before
        if batch is None:
            return batches
        batches.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)


load = functools.partial(make_loader, name="d")
flat = itertools.chain.from_iterable


@WORKERS
def test_map_loader_reads_the_same_from_any_position(workers: int) -> None:
    expected = [read(load(Rows(), 2, shuffle=True), epoch) for epoch in (0, 1)]
    assert sorted(int(index) for index, _ in flat(expected[0])) == list(range(11))
    loader = load(Rows(), 2, shuffle=True, num_workers=workers)
    assert [read(loader, epoch) for epoch in (0, 1, 0)] == [*expected, expected[0]]
    for done in (1, 3, 5, 6):
        assert read(loader, 1, position=min(2 * done, 11)) == expected[1][done:]
    loader.set_epoch(1)
    assert [batch.tolist() for batch in loader] == expected[1] != expected[0]
    assert [len(batch) for batch in read(load(Rows(3), 8, num_workers=workers))] == [3]  # fewer than workers


@WORKERS
def test_map_loader_reads_lazily_from_a_position(workers: int, tmp_path: Path) -> None:
    data = Rows(make=lambda index: (tmp_path / str(index)).touch() or index)
    batches = load(data, 2, num_workers=workers).batches(0, 8)
    assert next(batches).tolist() == [8, 9] and (workers or set(os.listdir(tmp_path)) == {"8", "9"})
    assert [batch.tolist() for batch in batches] == [[10]] and set(os.listdir(tmp_path)) == {"8", "9", "10"}


@PROCESSES
def test_workers_are_started_once_and_survive_a_break() -> None:
    loader, pids = load(Rows(40, lambda index: (index, os.getpid())), 2, shuffle=True, num_workers=2), set()
    for epoch in range(5):
        pairs = torch.cat([*itertools.islice(loader.batches(epoch), 3 if epoch % 2 else None)]).tolist()
        pids |= {pid for _, pid in pairs}
        assert epoch % 2 or sorted(index for index, _ in pairs) == list(range(40))
    assert len(pids) == 2 and os.getpid() not in pids


@WORKERS
def test_map_loader_passes_errors_on_and_continues(workers: int) -> None:
    loader = load(Rows(make=lambda index: {}["the key"] if index == 7 else index), 2, num_workers=workers)
    with pytest.raises(KeyError, match="the key"):
        read(loader)
    assert read(loader, 0, position=8) == [[8, 9], [10]]
    loader.close()  # left to the garbage collector, torch waits ten seconds: the error's traceback is a cycle


def test_make_loader_chooses_kind_and_size_by_dataset() -> None:
    five, nested = torch.arange(5.0), Subset(Subset(TensorDataset(torch.arange(9)), [1, 3, 5, 7]), [3, 0])
    two: list[Any] = [
        [[1, 2, 3], [4, 5, 6]], [torch.ones(3, 2), torch.zeros(3, 2)], [[[1.0, 2.0], 1], [[3.0, 4.0], 0]],
        ([1, 2, 3], [4, 5, 6]), [(torch.ones(2), 1), (torch.ones(2), 0)], nested,
    ]  # fmt: skip
    for data, kind, size in (
        (Rows(), MapLoader, 11), ([{"x": 1}], MapLoader, 1), (np.ones((3, 2)), MapLoader, 3),
        (Numbers(), StreamLoader, None), ({1, 2}, StreamLoader, 2), (DataLoader(Rows()), UserLoader, 11),
        *((columns, MapLoader, 5) for columns in (TensorDataset(five), five, (five, torch.ones(5)), {"x": five})),
        *((samples, MapLoader, 2) for samples in two),
    ):  # fmt: skip
        loader: Any = load(data, 2)
        assert isinstance(loader, kind) and loader.size == size
        assert size is None or kind is UserLoader or len(list(loader.batches(0))) == -(-size // 2)
        assert load(loader, 5) is loader


X, LABELS = np.arange(24.0).reshape(8, 3), np.arange(8)
TABLE = pandas.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4, 5, 6], "label": [0, 1, 1], "name": ["x", "y", "z"]})

NO_DATASETS: list[tuple[Any, str]] = [
    *((data, "`d` is empty") for data in ([], torch.ones(0, 2), TensorDataset(torch.ones(0)), Subset(Rows(), []))),
    *(
        (data, f"`d` must be a dataset.*{type(data).__name__}")
        for data in ("imdb", b"imdb", 3, (i for i in range(3)), {"x": [1, 2]}, {"x": np.array("a")})
    ),
    ([["a"] * 8, [0] * 8], r"a list of 2 sequences of 8 entries .*\(inputs, labels\)"),
    ([X, LABELS], r"a list of 2 sequences of 8 entries"),
    ((X, LABELS.tolist()), r"a tuple of 2 sequences of 8 entries"),
    ((X, LABELS[:7]), r"the same number of rows, got \[8, 7\]"),
    ({"x": [1, 2]}, r"tensors or arrays with the same number of rows"),
    (TABLE, r"`d` is a pandas DataFrame, .*astype.*from_pandas"),
    ((TABLE[["a", "name"]], TABLE["label"]), r"A DataFrame of `d` .* 'name' are not numeric\. .*get_dummies"),
    ((TABLE[["a"]], TABLE["name"]), r"A Series of `d` .*: it is not numeric"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "words"), NO_DATASETS, ids=[type(data).__name__ for data, _ in NO_DATASETS])
def test_make_loader_rejects_what_is_no_dataset(data: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load(data, 4)


@pytest.mark.parametrize(("loader", "shown"), [
    ((i for i in range(3)), "generator"), (iter([1]), "list_iterator"), (zip([1], [2], strict=True), "zip"), (5, "5"),
])  # fmt: skip
def test_user_loader_rejects_what_yields_one_epoch_only(loader: Any, shown: str) -> None:
    with pytest.raises(DataError, match=f"^`train_loader` must be iterable any number of times.* got {shown}"):
        check_loader(loader, "train_loader")


def test_make_loader_takes_tables_of_pandas() -> None:
    ((inputs, labels),) = load((TABLE[["a", "b"]].astype("float32"), TABLE["label"]), 3)
    assert_equal(inputs, torch.tensor([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]))
    assert_equal(labels, torch.tensor([0, 1, 1]))
    (batch,) = load({"x": TABLE["a"], "labels": TABLE["label"]}, 3)
    assert batch["x"].tolist() == [1, 2, 3] and batch["labels"].tolist() == [0, 1, 1]


def values(loader: Any, epoch: int = 0, position: int = 0) -> list[int]:
    return [value for batch in loader.batches(epoch, position) for value in batch["x"].tolist()]


@WORKERS
@pytest.mark.parametrize("torch_format", [False, True])
def test_hf_dataset_is_read_in_order(torch_format: bool, workers: int) -> None:
    dataset = Table.from_dict({"ids": [[1, 2], [3], [4, 5, 6]], "label": [0, 1, 2], "text": ["a", "b", "c"]})
    dataset = dataset.with_format("torch") if torch_format else dataset
    first, second = load(dataset, 2, num_workers=workers).batches(0)
    assert (first["ids"].tolist(), second["ids"].tolist()) == ([[1, 2], [3, 0]], [[4, 5, 6]])
    assert (first["label"].tolist(), first["text"]) == ([0, 1], ["a", "b"])
    if not torch_format:  # draws of a transform are reproducible
        noisy = Table.from_dict({"x": list(range(7))}).with_transform(lambda rows: {"x": [draw() for _ in rows["x"]]})
        assert values(load(noisy, 2, num_workers=workers), 1) == values(load(noisy, 7), 1)


@PROCESSES
def test_hf_stream_shuffles_each_epoch_differently() -> None:
    dataset = Table.from_dict({"x": list(range(30))}).to_iterable_dataset(num_shards=4)
    orders = []
    for workers in (0, 1, 2):
        loader = load(dataset.shuffle(seed=1, buffer_size=10), 4, num_workers=workers)
        order = values(loader)
        assert sorted(order) == list(range(30)) and order == values(loader) != values(loader, 1)
        assert order[12:] == values(loader, 0, position=12)
        orders.append(order)
    assert orders[1] == orders[2]  # datasets shuffles otherwise in a worker than in the process itself


class Numbers(IterableDataset[torch.Tensor]):
    """A stream of (number, something drawn)."""

    def __init__(self, size: int = 11) -> None:
        self.size = size

    def numbers(self) -> Iterable[int]:
        return range(self.size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(Rows().__getitem__, self.numbers())


class Sharing(Numbers):
    """A stream that shares itself out among workers, as PyTorch's documentation shows it."""

    def numbers(self) -> Iterable[int]:
        info = torch.utils.data.get_worker_info()
        return range(self.size) if info is None else range(info.id, self.size, info.num_workers)


class Shuffled(Numbers):
    """A stream that draws its order, and says so by `set_epoch`."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def numbers(self) -> Iterable[int]:
        return random.sample(range(100 * self.epoch, 100 * self.epoch + self.size), self.size)


class Itself(IterableDataset[torch.Tensor]):
    """A stream that is its own iterator, and starts again."""

    def __iter__(self) -> Any:
        self.rest = iter([2, 1, 0])
        return self

    def __next__(self) -> torch.Tensor:
        return torch.tensor([next(self.rest)])


def test_data_that_is_its_own_iterator_restarts() -> None:
    stream, loader = load(Itself(), 2), UserLoader(Itself(), 0)
    assert read(stream, 0) == read(stream, 1) == [[[2], [1]], [[0]]]
    assert read(loader, 0) == read(loader, 1) == [[2], [1], [0]]
    batches = UserLoader([torch.arange(2), torch.arange(3)], 0)
    assert (len(batches), read(batches), read(batches, 0, position=2)) == (2, [[0, 1], [0, 1, 2]], [[0, 1, 2]])
    loader = UserLoader(DataLoader(Shuffled(), batch_size=3), 0)  # whose data have a `set_epoch`
    assert read(loader, 2) == read(loader, 2) and min(number for number, _ in flat(read(loader, 2))) == 200


@pytest.mark.parametrize("workers", [0, *(pytest.param(n, marks=PROCESSES) for n in (1, 2))])
@pytest.mark.parametrize("stream", [Numbers, Sharing, Shuffled])
def test_stream_is_the_same_with_any_workers_and_position(stream: type[Numbers], workers: int) -> None:
    expected = [read(load(stream(), 3), epoch) for epoch in (0, 1)]
    assert [len(batch) for batch in expected[0]] == [3, 3, 3, 2]
    assert sorted(int(number) for number, _ in flat(expected[0])) == list(range(11))
    loader = load(stream(), 3, num_workers=workers)
    assert [read(loader, epoch) for epoch in (0, 1, 0)] == [*expected, expected[0]]
    for done in (1, 3, 4):
        next(loader.batches(1))  # an epoch that is left
        assert read(loader, 1, position=min(3 * done, 11)) == expected[1][done:]


def test_stream_draws_differ_by_epoch_sample_and_seed() -> None:
    by_size = [[*flat(read(load(Numbers(), size), 1))] for size in (1, 4, 20)]
    assert by_size[0] == by_size[1] == by_size[2]  # but not by the size of batches
    runs = [read(load(Numbers(), 2, seed=seed), epoch) for seed in (0, 1) for epoch in (0, 1)]
    drawn = [value for run in runs for number, value in flat(run) if number % 3 == 0]
    assert len(set(drawn)) == len(drawn) == 16


class OwnOrder(IterableDataset[Any]):
    """Numbers in an order by a generator of its own, which has no state to save."""

    def __init__(self, size: int = 12) -> None:
        self.size, self.generator = size, np.random.default_rng(0)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.generator.permutation(self.size).tolist())


@PROCESSES
def test_stream_of_own_generator_is_the_same_with_a_worker() -> None:
    """It has another order in each epoch; a pass that is broken off starts again, and a worker sees changes."""

    def order(loader: Any, epoch: int) -> list[int]:
        return torch.cat(list(loader.batches(epoch))).tolist()

    orders = []
    for workers in (0, 1):
        loader = load(OwnOrder(), 4, num_workers=workers)
        orders.append([order(loader, epoch) for epoch in range(3)])
        loader.close()
    assert orders[0] == orders[1] and len(set(map(tuple, orders[0]))) == 3
    dataset = OwnOrder()
    loader = load(dataset, 4, num_workers=1)
    assert order(loader, 0) == orders[0][0]
    batches = loader.batches(1)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert order(loader, 1) == orders[0][0]
    dataset.size = 8
    loader.update()
    assert sorted(order(loader, 2)) == list(range(8))
    loader.close()


@WORKERS
def test_stream_collator_draws_reproducibly(workers: int) -> None:
    collated = functools.partial(load, Numbers(), 2, collate=lambda rows: torch.stack(rows)[:, 0] + draw())
    expected = read(collated(), 1)
    assert read(collated(num_workers=workers // 2), 1) == expected
    assert read(collated(), 1, position=4) == expected[2:]


def test_stream_may_have_a_length() -> None:
    lengths = {"lasts": lambda self: self.size, "fails": mock.Mock(side_effect=NotImplementedError)}
    lasts, fails = (type(name, (Numbers,), {"__len__": length})() for name, length in lengths.items())
    sized: Any = load(lasts, 2)
    assert (sized.size, len(sized)) == (11, 6)
    for stream in (fails, Numbers()):
        with pytest.raises(TypeError, match="no length"):
            len(load(stream, 2))  # type: ignore[arg-type]


def test_error_of_a_stream_or_loader_leaves_generators_unchanged() -> None:
    class Failing(Numbers):
        def numbers(self) -> Iterable[int]:
            yield 0
            draw()
            raise KeyError("the key")

    before = states()
    for loader in (load(Failing(), 4), UserLoader(DataLoader(Failing(), batch_size=4), 0)):
        with pytest.raises(KeyError, match="the key"):
            list(loader.batches(0))
        assert states() == before


def test_stream_shares_steps_that_do_not_divide() -> None:
    """Steps of 8 on three ranks with batches of 2 at most, in rounds of 3 and 5."""
    options: dict[str, Any] = {"name": "train_dataset", "world_size": 3}
    rounds, size = MicrobatchLayout.of(8, 2, 3), 19
    for position in (0, 8, 16):
        loaders = [make_loader(Numbers(size), 2, rank=rank, rounds=rounds, **options) for rank in range(3)]
        turns = list(zip(*(loader.counted_batches(0, position) for loader in loaders), strict=True))
        shared = [[number for part in turn if part.samples for number in part.batch[:, 0].tolist()] for turn in turns]
        starts = [*range(position, size, 8), *range(position + 3, size, 8)]
        assert shared == [[*range(start, end)] for start, end in itertools.pairwise([*sorted(starts), size])]
        assert max(part.samples for turn in turns for part in turn) <= 2
        indices = [loader.indices_at(0, position, turn) for turn in range(2) for loader in loaders]
        assert [index for part in indices for index in part or ()] == [*range(position, position + 8)]
    rounds = MicrobatchLayout.of(13, 2, 3)  # of 6, 3 and 4
    loader: Any = make_loader(torch.arange(30.0), 2, rank=0, rounds=rounds, **options)
    assert isinstance(loader, MapLoader) and (len(loader), loader.last_step(3)) == (7, 26)
    assert [part.batch.tolist() for part in loader.last_batch()] == [[26.0, 27.0]]


def test_stream_warns_of_workers_and_of_reading_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "omnitrain")
    load(Numbers(), 2, num_workers=1)
    next(load(Numbers(), 2).batches(0))
    assert not caplog.records
    load(Numbers(), 2, num_workers=3)
    next(load(Numbers(), 2).batches(0, position=4))
    assert "`num_workers=3`: a stream is read by one worker" in caplog.text
    assert "Reading 4 samples of the stream again" in caplog.text


class EpochSampling(Sampler[int]):
    """A sampler of the user's own, whose order follows from `set_epoch`."""

    epoch, size = 0, 11

    def __init__(self) -> None:
        pass

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        return iter(np.random.RandomState(self.epoch).permutation(11).tolist())


class EpochBatches(EpochSampling):
    size = 3

    def __iter__(self) -> Any:
        return (batch.tolist() for batch in torch.tensor([*super().__iter__()]).split(4))


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


USER_LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"shuffle": True},
    "drop_last": lambda: {"shuffle": True, "drop_last": True},
    "workers": lambda: {"shuffle": True, "num_workers": 2},
    "generator": lambda: {"shuffle": True, "generator": generator()},
    "generator in the sampler": lambda: {"sampler": RandomSampler(Rows(), generator=generator())},
    "weighted": lambda: {"sampler": torch.utils.data.WeightedRandomSampler([1.0] * 11, 11)},
    "sampler": lambda: {"sampler": EpochSampling()},
    "batch_sampler": lambda: {"batch_sampler": EpochBatches()},
    "sampler in a batch_sampler": lambda: {"batch_sampler": BatchSampler(EpochSampling(), 4, False)},
    "DistributedSampler": lambda: {"sampler": torch.utils.data.DistributedSampler(Rows(), 1, 0)},
    "generator in a batch_sampler": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(Rows(), generator=generator()), 4, False)
    },
}


def user_loader(kind: str) -> UserLoader:
    options = USER_LOADERS[kind]()
    return UserLoader(DataLoader(Rows(), **({} if "batch_sampler" in options else {"batch_size": 4}), **options), 0)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=PROCESSES if kind == "workers" else []) for kind in USER_LOADERS]
)
def test_user_loader_epochs_follow_from_seed_and_epoch(kind: str) -> None:
    """Every epoch has its order, also in a process without an earlier epoch, and from any batch on."""
    loader = user_loader(kind)
    epochs = [read(loader, epoch) for epoch in range(3)]
    orders = [[int(index) for index, _ in flat(batches)] for batches in epochs]
    assert orders[0] != orders[1] != orders[2] != orders[0] and epochs[0] != epochs[1] and read(loader, 0) == epochs[0]
    assert kind in ("drop_last", "weighted") or all(sorted(order) == list(range(11)) for order in orders)
    for count in range(len(epochs[1]) + 1):
        assert read(user_loader(kind), 1, sum(map(len, epochs[1][:count]))) == epochs[1][count:]
    if kind == "generator":
        seeded = DataLoader(Rows(), batch_size=4, shuffle=True, generator=generator(6))
        assert read(UserLoader(seeded, 0)) != epochs[0]


class Filtering:
    """A loader of an unknown class: batches of 4, 0, 3 and 2 rows."""

    sizes = (4, 0, 3, 2)

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(9).split(list(self.sizes)))


def test_user_loader_of_unknown_samples_resumes_by_batches(caplog: pytest.LogCaptureFixture) -> None:
    loader = UserLoader(Filtering(), 0)
    straight = [(batch.tolist(), samples) for batch, samples in loader.counted_batches(0)]
    for done in range(1, 5):
        rest = loader.counted_batches(0, sum(samples for _, samples in straight[:done]), done)
        assert [(batch.tolist(), samples) for batch, samples in rest] == straight[done:]
    with pytest.raises(DataError, match=r"The first 2 batches of the loader have 5 rows; .* they had 8"):
        list(UserLoader(Filtering(), 0).counted_batches(0, 8, 2))

    class Modest(Filtering):
        def __len__(self) -> int:
            return 3

    assert len(list(UserLoader(Modest(), 0).batches(0))) == 4
    assert "yielded 4 batches, but its length is 3" in caplog.text


def test_user_loader_size_is_known_if_it_covers_the_data() -> None:
    known = {kind: user_loader(kind).size for kind in USER_LOADERS}
    covering = {"shuffle", "workers", "generator", "generator in the sampler", "generator in a batch_sampler"}
    assert known == {kind: 11 if kind in covering else None for kind in USER_LOADERS}
    subset = BatchSampler(torch.utils.data.SubsetRandomSampler([1, 2]), 4, False)
    short = BatchSampler(RandomSampler(Rows()), 4, True)
    for loader in (
        DataLoader(Rows(), batch_sampler=subset), DataLoader(Rows(), batch_sampler=short), [1, 2],
        DataLoader(TensorDataset(torch.ones(4, 3, 2)), batch_size=None), DataLoader(Numbers(), batch_size=2),
    ):  # fmt: skip
        assert UserLoader(loader, 0).size is None


@WORKERS
def test_hf_stream_resumes_from_its_state(workers: int) -> None:
    def stream() -> Any:
        rows = Table.from_dict({"x": list(range(11))}).to_iterable_dataset(num_shards=3)
        return load(rows.map(lambda row: {"x": 10 * row["x"]}), 1, num_workers=workers)

    first = stream()
    whole = values(first)
    assert whole == values(first, 1) == list(range(0, 110, 10))
    exact = tuple(map(int, datasets.__version__.split(".")[:2])) >= (5, 1)
    for position in (0, 2, 7):
        point = first.position_at(0, position)
        assert (point is None) == (position == 0 or not exact)
        second = stream()
        second.resume_at(point)
        assert values(second, 0, position) == whole[position:]
        assert values(second, 1) == whole  # and an epoch later it is as if nothing had been


@pytest.mark.parametrize("cause", ["shuffled", "older"])
def test_hf_stream_with_a_lossy_state_is_read_again(cause: str, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Table.from_dict({"x": list(range(40))}).to_iterable_dataset()
    if cause == "shuffled":
        stream = stream.shuffle(seed=0, buffer_size=8)
    else:
        monkeypatch.setattr(datasets, "__version__", "5.0.1")
    loader = load(stream.map(lambda row: row), 1)
    whole = values(loader)
    assert loader.position_at(0, 5) is None and values(loader, 0, 5) == whole[5:]
    assert "Reading 5 samples of the stream again" in caplog.text


def test_stream_far_ahead_of_its_marks_is_read_again() -> None:
    loader = StreamLoader(Positioned(2000), MicrobatchLayout((1,)), ReadOptions())
    assert len(list(loader.batches(0))) == 2000
    assert loader.position_at(0, 5) is None
    point = loader.position_at(0, 1999)
    assert point is not None and point.position == 1999


@pytest.mark.parametrize("change", [lambda a: a[::-1], lambda a: a.astype(a.dtype.newbyteorder(">"))])
def test_make_loader_takes_arrays_like_tensors(change: Callable[[Any], Any], tmp_path: Path) -> None:
    """A memory-mapped one is not copied."""
    x, y = change(X), change(LABELS)
    x.setflags(write=False)
    inputs, labels = torch.tensor(x.tolist(), dtype=torch.float64), torch.tensor(y.tolist())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pairs = list(load((x, y), 5).batches(0))
        dicts = list(load({"x": x, "labels": labels}, 5).batches(0))
    assert [len(batch) for batch, _ in pairs] == [5, 3]
    for batches in (pairs, [(batch["x"], batch["labels"]) for batch in dicts]):
        assert_equal([*map(torch.cat, zip(*batches, strict=True))], [inputs, labels])
    np.save(tmp_path / "x.npy", X)
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    loader: Any = load((x, LABELS), 4)
    assert loader.fetch.columns[0].data_ptr() == x.ctypes.data
    assert next(loader.batches(0))[0].tolist() == X[:4].tolist()


class Positioned:
    """A loader with a state, which counts what it reads."""

    def __init__(self, size: int = 5) -> None:
        self.size, self.at, self.read = size, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.size:
            self.at += 1
            self.read += 1
            yield torch.tensor([self.at, self.at]) + torch.randint(0, 9, (2,))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def restored(point: Any, batches: int) -> tuple[int, list[Any]]:
    """How many batches a new loader reads that begins at a point, and what it yields from such a batch on."""
    source = Positioned()
    loader = UserLoader(source, 0, keep_states=True)
    loader.resume_at(point)
    rest = [batch.tolist() for batch, _ in loader.counted_batches(1, 2 * batches, batches)]
    return source.read, rest


def test_user_loader_with_a_state_resumes_from_it() -> None:
    loader = UserLoader(Positioned(), 0, world_size=5, keep_states=True)
    whole = read(UserLoader(Positioned(), 0), 1)
    list(loader.counted_batches(1))
    for batches in range(1, 6):
        point = loader.position_at(1, 2 * batches, batches)
        assert point is not None and (point.batches, point.position) == (batches, 2 * batches)
        assert restored(point, batches) == (5 - batches, whole[batches:])
    assert loader.position_at(2, 0) == (1, 10, {"at": 0}, True, 5, 0)
    assert loader.position_at(0, 2, 1) is None


def test_user_loader_ignores_a_state_of_another_position(caplog: pytest.LogCaptureFixture) -> None:
    whole = read(UserLoader(Positioned(), 0), 1)
    point = StreamPosition(1, 6, {"at": 3}, False, 3)
    assert restored(point, 2)[1] == whole[2:]  # it is after the position
    assert restored(point._replace(epoch=0), 4)[1] == whole[4:]
    assert not caplog.records
    assert restored(point._replace(workers=2), 4) == (5, whole[4:])
    assert "num_workers=2 when its state was saved, and has 0 now" in caplog.text
    with pytest.raises(KeyError, match="at") as caught:
        restored(point._replace(state={}), 4)
    assert "for its state from the checkpoint" in caught.value.__notes__[0]
