"""Where batches come from: map-style datasets, streams and users' own loaders, with and without workers."""

from __future__ import annotations

import itertools
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from marks import thinned
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from omnitrain.data.collation import Collator
from omnitrain.data.loaders import GivenLoader, MapLoader, StreamLoader, has_length, make_loader
from omnitrain.data.sampling import EpochSampler, Rounds
from omnitrain.data.streams import Mark
from omnitrain.errors import DataError
from omnitrain.progress import Progress
from omnitrain.reproducibility import snapshot_rng

PROCESSES = pytest.mark.processes
WORKERS = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=PROCESSES)])


def draw() -> float:
    """Draw from all three generators."""
    return torch.rand(1).item() + 10 * float(np.random.randn()) + 100 * random.random()


class Rows(Dataset[torch.Tensor]):
    """Rows of (index, something drawn in every third sample)."""

    def __init__(self, size: int = 11) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, draw() if index % 3 == 0 else 0.0], dtype=torch.float64)


class Pids(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def states() -> list[Any]:
    state = snapshot_rng()
    return [state["torch"].tolist(), repr(state["numpy"]), state["python"]]


def read(loader: Any, epoch: int = 0, position: int = 0, disturb: bool = True) -> list[Any]:
    """Read an epoch while training draws from the generators, which the loader must not move."""
    batches = []
    source = iter(loader.batches(epoch, position))
    while True:
        if disturb:
            torch.rand(2), np.random.randn(), random.random()
        before = states()
        batch = next(source, None)
        assert states() == before
        if batch is None:
            return batches
        batches.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)


def flat(batches: list[Any]) -> list[Any]:
    return [sample for batch in batches for sample in batch]


def size_of(batches: list[Any]) -> int:
    return len(flat(batches))


# Map-style datasets


@PROCESSES
def test_workers_change_no_sample_and_no_order() -> None:
    alone = make_loader(Rows(), 3, name="d", shuffle=True)
    helped = make_loader(Rows(), 3, name="d", shuffle=True, num_workers=2)
    for epoch in (0, 1, 0):
        expected = read(alone, epoch)
        assert read(helped, epoch) == expected
        assert sorted(int(index) for index, _ in flat(expected)) == list(range(11))


@WORKERS
def test_map_loader_seek_gives_the_tail(workers: int) -> None:
    loader = make_loader(Rows(), 2, name="d", shuffle=True, num_workers=workers)
    straight = read(loader, 1)
    for done in (0, 1, 3, 5, 6):
        assert read(loader, 1, position=min(2 * done, 11)) == straight[done:]


@WORKERS
def test_map_loader_seek_reads_nothing_before(workers: int, tmp_path: Any) -> None:
    class Noted(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            (tmp_path / str(index)).touch()
            return torch.tensor(index)

    loader = make_loader(Noted(), 2, name="d", num_workers=workers)
    assert read(loader, 0, position=8) == [[8, 9], [10]]
    assert {path.name for path in tmp_path.iterdir()} == {"8", "9", "10"}


@PROCESSES
def test_workers_are_started_once_for_all_epochs() -> None:
    loader = make_loader(Pids(), 2, name="d", num_workers=2)
    pids = set()
    for epoch in range(5):
        for number, batch in enumerate(loader.batches(epoch)):
            pids |= set(batch.tolist())
            if epoch % 2 and number == 3:
                break
    assert len(pids) == 2 and os.getpid() not in pids


@PROCESSES
def test_workers_give_a_full_epoch_after_a_break() -> None:
    loader = make_loader(Rows(40), 2, name="d", shuffle=True, num_workers=2)
    expected = read(make_loader(Rows(40), 2, name="d", shuffle=True), 1)
    for number, _ in enumerate(loader.batches(0)):
        if number == 2:
            break
    assert read(loader, 1) == expected


@pytest.mark.parametrize(
    "workers, kind", [(0, KeyError), (0, IndexError), (0, OSError), pytest.param(2, KeyError, marks=PROCESSES)]
)
def test_map_loader_passes_errors_on_and_continues(kind: type[Exception], workers: int) -> None:
    class Failing(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 7:
                raise kind("the key")
            return super().__getitem__(index)

    loader = make_loader(Failing(), 2, name="d", num_workers=workers)
    with pytest.raises(kind, match="the key"):
        read(loader)
    assert len(flat(read(loader, 0, position=8))) == 3  # and the loader goes on working
    if workers:  # left to the garbage collector, torch waits ten seconds for them: the error's traceback is a cycle
        loader._workers._iterator._shutdown_workers()  # type: ignore[attr-defined]


@WORKERS
@pytest.mark.parametrize("size", [1, 3])
def test_map_loader_of_few_samples_has_one_batch(size: int, workers: int) -> None:
    loader: Any = make_loader(Rows(size), 8, name="d", shuffle=True, num_workers=workers)
    assert len(loader) == 1
    assert [len(batch) for batch in read(loader)] == [size]


def test_map_loader_iterates_over_the_epoch_set() -> None:
    loader = make_loader(Rows(), 4, name="d", shuffle=True)
    loader.set_epoch(2)
    assert [batch.tolist() for batch in loader] == read(loader, 2) != read(loader, 0)


def test_map_loader_reads_lazily() -> None:
    indices = []

    class Asked(Rows):
        def __getitem__(self, index: int) -> int:
            indices.append(index)
            return index

    batches = make_loader(Asked(), 2, name="d").batches(0)
    assert next(batches).tolist() == [0, 1]
    assert indices == [0, 1]


@pytest.mark.parametrize(
    "dataset",
    [TensorDataset(torch.arange(5.0)), torch.arange(5.0), (torch.arange(5.0), torch.ones(5)), {"x": torch.arange(5.0)}],
    ids=["TensorDataset", "tensor", "pair", "dict"],
)
@WORKERS
def test_map_loader_takes_tensors(dataset: Any, workers: int) -> None:
    loader: Any = make_loader(dataset, 2, name="d", num_workers=workers)
    assert (loader.size, len(loader)) == (5, 3)
    first = [batch["x"] if isinstance(batch, dict) else batch for batch in loader.batches(0)]
    first = [batch[0] if isinstance(batch, tuple) else batch for batch in first]
    assert torch.equal(torch.cat(first), torch.arange(5.0))


def test_map_loader_has_the_size_of_a_subset() -> None:
    loader = make_loader(Subset(Subset(TensorDataset(torch.arange(9)), [1, 3, 5, 7]), [3, 0]), 5, name="d")
    assert loader.size == 2
    assert [batch[0].tolist() for batch in loader.batches(0)] == [[7, 1]]
    assert make_loader(Subset(Rows(), [1, 2, 4]), 5, name="d").size == 3


def test_map_loader_ranks_share_all_samples() -> None:
    alone = {int(index): value for index, value in flat(read(make_loader(Rows(), 4, name="d", shuffle=True), 1))}
    ranks = [make_loader(Rows(), 2, name="d", shuffle=True, rank=rank, world_size=2) for rank in range(2)]
    shared = flat(read(ranks[0], 1)) + flat(read(ranks[1], 1))
    assert len(shared) == 11
    assert {int(index): value for index, value in shared} == alone


def test_map_loader_samples_depend_on_the_seed() -> None:
    values = {flat(read(make_loader(Rows(1), 1, name="d", seed=seed)))[0][1] for seed in range(5)}
    assert len(values) == 5


# What is a dataset


def test_make_loader_returns_a_loader_unchanged() -> None:
    loader = make_loader(Rows(), 2, name="d")
    assert make_loader(loader, 5, name="d") is loader


def test_make_loader_chooses_the_kind_by_dataset() -> None:
    assert isinstance(make_loader(Rows(), 2, name="d"), MapLoader)
    assert isinstance(make_loader([{"x": 1}], 2, name="d"), MapLoader)
    assert isinstance(make_loader(np.ones((3, 2)), 2, name="d"), MapLoader)
    assert isinstance(make_loader(Numbers(), 2, name="d"), StreamLoader)
    assert isinstance(make_loader({1, 2}, 2, name="d"), StreamLoader)
    assert isinstance(make_loader(DataLoader(Rows()), 2, name="d"), GivenLoader)


class DataFrame:
    """What pandas has under this name, as far as a loader can see: items are columns."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, key: Any) -> Any:
        raise KeyError(key)


DataFrame.__module__ = "pandas.core.frame"
X, LABELS = np.arange(24.0).reshape(8, 3), np.arange(8)
NO_DATASETS: list[tuple[Any, str]] = [
    *((data, "`d` is empty") for data in ([], torch.ones(0, 2), TensorDataset(torch.ones(0)), Subset(Rows(), []))),
    *(
        (data, f"`d` must be a dataset.*{type(data).__name__}")
        for data in ("imdb", b"imdb", 3, object(), (i for i in range(3)), map(str, [1]), iter([1]), {"x": [1, 2]},
                     {"x": np.array("a")})
    ),
    (DataFrame(), r"`d` is a pandas DataFrame, .*to_numpy.*from_pandas"),
    ([["a"] * 8, [0] * 8], r"a list of 2 sequences of 8 entries .*\(inputs, labels\)"),
    (([[1.0]] * 8, [0] * 8), r"a tuple of 2 sequences of 8 entries"),
    ([X, LABELS], r"a list of 2 sequences of 8 entries"),
    ([torch.tensor(X), torch.tensor(LABELS)], r"a list of 2 sequences of 8 entries"),
    ((X, LABELS.tolist()), r"a tuple of 2 sequences of 8 entries"),
    ((X, LABELS[:7]), r"equally many rows, got \[8, 7\]"),
    ({"x": [1, 2]}, r"tensors or arrays with equally many rows"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "words"), NO_DATASETS, ids=[type(data).__name__ for data, _ in NO_DATASETS])
def test_make_loader_rejects_what_is_no_dataset(data: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        make_loader(data, 4, name="d")


def test_has_length_is_false_where_len_raises() -> None:
    class Lengthless:
        def __len__(self) -> int:
            raise NotImplementedError

    assert not has_length(Lengthless())
    assert not has_length(3)
    assert has_length([])


# Hugging Face datasets


@pytest.fixture
def hf() -> Any:
    return pytest.importorskip("datasets")


@WORKERS
@pytest.mark.parametrize("torch_format", [False, True])
def test_hf_dataset_is_read_in_order(hf: Any, torch_format: bool, workers: int) -> None:
    dataset = hf.Dataset.from_dict({"ids": [[1, 2], [3], [4, 5, 6]], "label": [0, 1, 2], "text": ["a", "b", "c"]})
    dataset = dataset.with_format("torch") if torch_format else dataset
    first, second = make_loader(dataset, 2, name="d", num_workers=workers).batches(0)
    assert first["ids"].tolist() == [[1, 2], [3, 0]]
    assert second["ids"].tolist() == [[4, 5, 6]]
    assert (first["label"].tolist(), first["text"]) == ([0, 1], ["a", "b"])


@WORKERS
def test_hf_dataset_transform_draws_reproducibly(hf: Any, workers: int) -> None:
    dataset = hf.Dataset.from_dict({"x": list(range(7))})
    dataset = dataset.with_transform(lambda rows: {"x": [[x, draw()] for x in rows["x"]]})
    whole = flat([batch["x"].tolist() for batch in make_loader(dataset, 7, name="d").batches(1)])
    split = read(make_loader(dataset, 2, name="d", num_workers=workers), 1)
    assert flat([batch["x"].tolist() for batch in split]) == whole


def values(loader: Any, epoch: int = 0, position: int = 0) -> list[int]:
    return flat([batch["x"].tolist() for batch in loader.batches(epoch, position)])


@pytest.mark.parametrize(
    ("shards", "workers"),
    [(1, 0), (4, 0), pytest.param(4, 3, marks=PROCESSES)]
    + [pytest.param(*case, marks=[PROCESSES, pytest.mark.slow]) for case in ((1, 1), (1, 3), (4, 1))],
)
def test_hf_stream_is_read_once_in_order_by_any_workers(hf: Any, shards: int, workers: int) -> None:
    dataset = hf.Dataset.from_dict({"x": list(range(30))}).to_iterable_dataset(num_shards=shards)
    loader = make_loader(dataset, 4, name="d", num_workers=workers)
    assert values(loader) == values(loader, 1) == list(range(30))
    assert values(loader, 1, position=12) == list(range(12, 30))


@PROCESSES
@pytest.mark.parametrize("shards", thinned([1, 4], [4]))
def test_hf_stream_shuffles_each_epoch_differently(hf: Any, shards: int) -> None:
    dataset = hf.Dataset.from_dict({"x": list(range(30))}).to_iterable_dataset(num_shards=shards)
    orders = []
    for workers in (0, 1, 2):
        loader = make_loader(dataset.shuffle(seed=1, buffer_size=10), 4, name="d", num_workers=workers)
        order = values(loader)
        assert sorted(order) == list(range(30))
        assert order != values(loader, 1)
        assert order == values(loader)
        assert order[12:] == values(loader, 0, position=12)
        orders.append(order)
    assert orders[1] == orders[2]  # datasets shuffles otherwise in a worker than in the process itself


# Streams


class Numbers(IterableDataset[torch.Tensor]):
    """A stream of (number, something drawn)."""

    def __init__(self, size: int = 11) -> None:
        self.size = size

    def numbers(self) -> Iterator[int]:
        return iter(range(self.size))

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in self.numbers():
            yield torch.tensor([number, draw() if number % 3 == 0 else 0.0], dtype=torch.float64)


class Sharing(Numbers):
    """A stream that shares itself out among workers, as PyTorch's documentation shows it."""

    def numbers(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.size) if info is None else range(info.id, self.size, info.num_workers))


class Shuffled(Numbers):
    """A stream that draws its order, and says so by `set_epoch`."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def numbers(self) -> Iterator[int]:
        numbers = [100 * self.epoch + number for number in range(self.size)]
        random.shuffle(numbers)
        return iter(numbers)


class Itself(IterableDataset[int]):
    """A stream that is its own iterator, and starts anew."""

    def __iter__(self) -> Itself:
        self.left = 5
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


every_stream = pytest.mark.parametrize("stream", [Numbers, Sharing, Shuffled])


@pytest.mark.parametrize("workers", [0, *(pytest.param(n, marks=PROCESSES) for n in (1, 2))])
@every_stream
def test_stream_is_read_once_in_order_by_any_workers(stream: type[Numbers], workers: int) -> None:
    expected = [read(make_loader(stream(), 3, name="d"), epoch) for epoch in (0, 1)]
    assert [len(batch) for batch in expected[0]] == [3, 3, 3, 2]
    assert sorted(int(number) for number, _ in flat(expected[0])) == list(range(11))
    loader = make_loader(stream(), 3, name="d", num_workers=workers)
    assert [read(loader, epoch) for epoch in (0, 1, 0)] == [*expected, expected[0]]


@WORKERS
@every_stream
def test_stream_seek_gives_the_tail(stream: type[Numbers], workers: int) -> None:
    loader = make_loader(stream(), 2, name="d", num_workers=workers)
    straight = read(loader, 1)
    for done in (1, 3, 5, 6):
        assert read(loader, 1, position=min(2 * done, 11)) == straight[done:]


def test_stream_seek_warns_before_reading(caplog: pytest.LogCaptureFixture) -> None:
    loader = make_loader(Numbers(), 2, name="d")
    with caplog.at_level(logging.WARNING, "omnitrain"):
        next(loader.batches(0))
        assert not caplog.records
        next(loader.batches(0, position=4))
    assert "Reading 4 samples of the stream again" in caplog.text


def test_stream_samples_do_not_depend_on_the_batch_size() -> None:
    runs = [flat(read(make_loader(Numbers(), size, name="d"), 1)) for size in (1, 4, 20)]
    assert runs[0] == runs[1] == runs[2]


def test_stream_draws_differ_by_epoch_sample_and_seed() -> None:
    runs = [read(make_loader(Numbers(), 2, name="d", seed=seed), epoch) for seed in (0, 1) for epoch in (0, 1)]
    drawn = [value for run in runs for number, value in flat(run) if number % 3 == 0]
    assert len(set(drawn)) == len(drawn) == 16


@WORKERS
def test_stream_collator_draws_reproducibly(workers: int) -> None:
    def collate(samples: Any) -> torch.Tensor:
        return torch.stack(samples)[:, 0] + draw()

    runs = [read(make_loader(Numbers(), 2, name="d", collate=collate, num_workers=n), 1) for n in (0, workers // 2)]
    assert runs[0] == runs[1]
    assert read(make_loader(Numbers(), 2, name="d", collate=collate), 1, position=4) == runs[0][2:]


def test_stream_without_length_has_none() -> None:
    loader: Any = make_loader(Numbers(), 2, name="d")
    assert loader.size is None
    with pytest.raises(TypeError, match="no length"):
        len(loader)


def test_stream_with_a_length_has_it() -> None:
    class Sized(Numbers):
        def __len__(self) -> int:
            return self.size

    loader: Any = make_loader(Sized(), 2, name="d")
    assert (loader.size, len(loader)) == (11, 6)


def test_stream_that_is_its_own_iterator_restarts() -> None:
    loader = make_loader(Itself(), 2, name="d")
    assert read(loader, 0) == read(loader, 1) == [[4, 3], [2, 1], [0]]


def test_stream_error_leaves_the_generators_unchanged() -> None:
    class Failing(Numbers):
        def numbers(self) -> Iterator[int]:
            yield 0
            draw()
            raise KeyError("the key")

    before = states()
    with pytest.raises(KeyError, match="the key"):
        list(make_loader(Failing(), 4, name="d").batches(0))
    assert states() == before


@PROCESSES
def test_stream_left_in_mid_epoch_restarts() -> None:
    loader = make_loader(Shuffled(), 2, name="d", num_workers=1)
    straight = read(loader, 0)
    for _ in itertools.islice(loader.batches(0), 2):
        pass
    assert read(loader, 0) == straight


@pytest.mark.parametrize("position", [0, 8, 16])
def test_stream_shares_steps_that_do_not_divide(position: int) -> None:
    """Steps of 8 on three ranks with batches of 2 at most, in rounds of 3 and 5."""
    rounds, size = Rounds.of(8, 2, 3), 19
    loaders = [
        make_loader(Numbers(size), 2, name="train_dataset", rank=rank, world_size=3, rounds=rounds) for rank in range(3)
    ]
    turns = list(zip(*(loader.counted(0, position) for loader in loaders), strict=True))
    dealt = [[number for one in turn if one.samples for number in one.batch[:, 0].tolist()] for turn in turns]
    starts = [*range(position, size, 8), *range(position + 3, size, 8)]
    assert dealt == [[*range(start, end)] for start, end in itertools.pairwise([*sorted(starts), size])]
    assert max(one.samples for turn in turns for one in turn) <= 2
    named = [loader.indices_at(0, position, turn) for turn in range(2) for loader in loaders]
    assert [index for one in named for index in one or ()] == [*range(position, position + 8)]


def test_map_loader_last_step_where_steps_do_not_divide() -> None:
    data, rounds = torch.arange(30.0), Rounds.of(13, 2, 3)  # of 6, 3 and 4
    loader = make_loader(data, 2, name="train_dataset", rank=0, world_size=3, rounds=rounds)
    assert isinstance(loader, MapLoader)
    assert (len(loader), loader.last_step(3)) == (7, 26)
    assert [one.batch.tolist() for one in loader.last_batch()] == [[26.0, 27.0]]


def test_stream_warns_of_more_than_one_worker(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "omnitrain"):
        make_loader(Numbers(), 2, name="d", num_workers=1)
        assert not caplog.records
        make_loader(Numbers(), 2, name="d", num_workers=3)
    assert "`num_workers=3`: a stream is read by one worker" in caplog.text


# Users' own loaders


class EpochSampling(Sampler[int]):
    """A sampler of the user's own, whose order follows from `set_epoch`."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.RandomState(self.epoch).permutation(11).tolist())


class EpochBatches(EpochSampling):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        order = list(super().__iter__())
        yield from (order[start : start + 4] for start in range(0, 11, 4))


def by_hand(**options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(), **options)


USER_LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffle": lambda: by_hand(batch_size=4, shuffle=True),
    "drop_last": lambda: by_hand(batch_size=4, shuffle=True, drop_last=True),
    "workers": lambda: by_hand(batch_size=4, shuffle=True, num_workers=2),
    "generator": lambda: by_hand(batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "generator in the sampler": lambda: by_hand(
        batch_size=4, sampler=RandomSampler(Rows(), generator=torch.Generator().manual_seed(5))
    ),
    "weighted": lambda: by_hand(batch_size=4, sampler=WeightedRandomSampler([1.0] * 11, 11)),
    "sampler": lambda: by_hand(batch_size=4, sampler=EpochSampling()),
    "batch_sampler": lambda: by_hand(batch_sampler=EpochBatches()),
    "sampler in a batch_sampler": lambda: by_hand(batch_sampler=BatchSampler(EpochSampling(), 4, False)),
    "DistributedSampler": lambda: by_hand(batch_size=4, sampler=DistributedSampler(Rows(), 1, 0)),
    "generator in a batch_sampler": lambda: by_hand(
        batch_sampler=BatchSampler(RandomSampler(Rows(), generator=torch.Generator().manual_seed(5)), 4, False)
    ),
}
every_user_loader = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=PROCESSES if kind == "workers" else []) for kind in USER_LOADERS]
)


@every_user_loader
def test_user_loader_epochs_follow_from_seed_and_epoch(kind: str) -> None:
    """Every epoch has its order, also in a process without an earlier epoch, and from any batch on."""
    loader = GivenLoader(USER_LOADERS[kind](), 0)
    epochs = [read(loader, epoch) for epoch in range(3)]
    orders = [[int(index) for index, _ in flat(batches)] for batches in epochs]
    assert orders[0] != orders[1] != orders[2] != orders[0] and epochs[0] != epochs[1]
    if kind not in ("drop_last", "weighted"):
        assert all(sorted(order) == list(range(11)) for order in orders)
    assert read(loader, 0) == epochs[0]
    for count in range(len(epochs[1]) + 1):
        assert read(GivenLoader(USER_LOADERS[kind](), 0), 1, size_of(epochs[1][:count])) == epochs[1][count:]


class Filtering:
    """A loader of an unknown class: batches of 4, 0, 3 and 2 rows."""

    sizes = (4, 0, 3, 2)

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(9).split(list(self.sizes)))


def test_user_loader_of_unknown_samples_resumes_by_batches() -> None:
    loader = GivenLoader(Filtering(), 0)
    straight = [batch.tolist() for batch in loader.batches(0)]
    progress = Progress()
    for done, (_, samples) in enumerate(loader.counted(0), 1):
        progress.advance(samples, batches=1)
        assert [batch.tolist() for batch, _ in loader.rest(0, progress)] == straight[done:]
    earlier = Progress(samples_in_epoch=4)  # of a version that did not count batches
    assert [batch.tolist() for batch, _ in loader.rest(0, earlier)] == straight[1:]


def test_user_loader_with_other_batches_is_an_error() -> None:
    progress = Progress(samples_in_epoch=8, batches_in_epoch=2)
    with pytest.raises(DataError, match=r"The first 2 batches of the loader have 5 rows; .* they had 8"):
        list(GivenLoader(Filtering(), 0).rest(0, progress))


def test_user_loader_longer_than_its_length_warns(caplog: pytest.LogCaptureFixture) -> None:
    class Modest(Filtering):
        def __len__(self) -> int:
            return 3

    assert len(list(GivenLoader(Modest(), 0).batches(0))) == 4
    assert "yielded 4 batches, but its length is 3" in caplog.text


def test_user_loader_order_depends_on_its_generator() -> None:
    loaders = [by_hand(batch_size=11, shuffle=True, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
    assert read(GivenLoader(loaders[0], 0)) != read(GivenLoader(loaders[1], 0))


def test_user_loader_sets_the_epoch_of_its_stream() -> None:
    loader = GivenLoader(DataLoader(Shuffled(), batch_size=3), 0)
    assert min(number for number, _ in flat(read(loader, 2))) == 200
    assert read(loader, 2) == read(loader, 2)


def test_user_loader_size_is_known_if_it_covers_the_data() -> None:
    known = {kind: GivenLoader(make(), 0).size for kind, make in USER_LOADERS.items()}
    covering = {"shuffle", "workers", "generator", "generator in the sampler", "generator in a batch_sampler"}
    assert known == {kind: 11 if kind in covering else None for kind in USER_LOADERS}
    for sampler, drop_last in ((SubsetRandomSampler([1, 2]), False), (RandomSampler(Rows()), True)):
        assert GivenLoader(by_hand(batch_sampler=BatchSampler(sampler, 4, drop_last)), 0).size is None


def test_user_loader_size_of_batched_items_is_unknown() -> None:
    batches = TensorDataset(torch.ones(4, 3, 2))
    assert GivenLoader(DataLoader(batches, batch_size=None), 0).size is None
    assert GivenLoader(DataLoader(Numbers(), batch_size=2), 0).size is None
    assert GivenLoader([1, 2], 0).size is None


def test_user_loader_may_be_a_list() -> None:
    loader = GivenLoader([torch.arange(2), torch.arange(3)], 0)
    assert len(loader) == 2
    assert read(loader) == [[0, 1], [0, 1, 2]]
    assert read(loader, 0, position=2) == [[0, 1, 2]]


class Pipeline:
    """A loader that is its own iterator, as DALI's are."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Pipeline:
        self.left = 2
        return self

    def __next__(self) -> torch.Tensor:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return torch.tensor([self.left])


def test_user_loader_may_be_its_own_iterator() -> None:
    loader = GivenLoader(Pipeline(), 0)
    assert read(loader, 0) == read(loader, 1) == [[1], [0]]


@pytest.mark.parametrize("loader", [(i for i in range(3)), iter([1]), zip([1], [2], strict=True), 5])
def test_user_loader_for_one_epoch_only_is_an_error(loader: Any) -> None:
    with pytest.raises(DataError, match=f"iterable any number of times.*{type(loader).__name__}"):
        GivenLoader(loader, 0)


def test_user_loader_error_leaves_generators_unchanged() -> None:
    class Failing(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            draw()
            raise KeyError("the key")

    before = states()
    with pytest.raises(KeyError, match="the key"):
        list(GivenLoader(DataLoader(Failing()), 0).batches(0))
    assert states() == before


def test_map_loader_uses_its_sampler() -> None:
    loader = MapLoader(Rows(), EpochSampler(11, 4, shuffle=False), Collator())
    assert (len(loader), loader.size) == (3, 11)
    assert [int(index) for index, _ in flat(read(loader))] == list(range(11))


@WORKERS
@pytest.mark.parametrize("position", [0, 2, 7])
def test_hf_stream_resumes_from_its_state(hf: Any, position: int, workers: int) -> None:
    def stream() -> Any:
        rows = hf.Dataset.from_dict({"x": list(range(11))}).to_iterable_dataset(num_shards=3)
        return rows.map(lambda row: {"x": 10 * row["x"]})

    first = make_loader(stream(), 1, name="d", num_workers=workers)
    whole = values(first)
    mark = first.mark_at(0, position)
    exact = tuple(map(int, hf.__version__.split(".")[:2])) >= (5, 1)
    assert (mark is None) == (position == 0 or not exact)
    second = make_loader(stream(), 1, name="d", num_workers=workers)
    second.start_from(mark)
    assert values(second, 0, position) == whole[position:]
    assert values(second, 1) == whole  # and an epoch later it is as if nothing had been


@pytest.mark.parametrize("cause", ["shuffled", "older"])
def test_hf_stream_with_a_lossy_state_is_read_again(
    cause: str, hf: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = hf.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset()
    if cause == "shuffled":
        stream = stream.shuffle(seed=0, buffer_size=8)
    else:
        monkeypatch.setattr(hf, "__version__", "5.0.1")
    loader = make_loader(stream.map(lambda row: row), 1, name="d")
    whole = values(loader)
    assert loader.mark_at(0, 5) is None
    assert values(loader, 0, 5) == whole[5:]
    assert "Reading 5 samples of the stream again" in caplog.text


def test_stream_far_ahead_of_its_marks_is_read_again() -> None:
    loader = StreamLoader(Counting(2000), 1, Collator(None), 0)
    assert len(values(loader)) == 2000
    assert loader.mark_at(0, 5) is None
    mark = loader.mark_at(0, 1999)
    assert mark is not None
    assert mark.position == 1999


class Counting(IterableDataset[Any]):
    """A stream that can say where it is."""

    def __init__(self, size: int) -> None:
        self.size, self.place = size, 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.size:
            self.place += 1
            yield {"x": self.place - 1}
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize(
    "data",
    [
        [[1, 2, 3], [4, 5, 6]],
        [torch.ones(3, 2), torch.zeros(3, 2)],
        [[[1.0, 2.0], 1], [[3.0, 4.0], 0]],
        ([1, 2, 3], [4, 5, 6]),
        [(torch.ones(2), 1), (torch.ones(2), 0)],
    ],
    ids=["tokens", "images", "records as lists", "a tuple of samples", "records"],
)
def test_make_loader_counts_two_samples_as_two(data: Any) -> None:
    loader = make_loader(data, 4, name="d")
    assert loader.size == 2 and len(list(loader.batches(0))) == 1


@pytest.mark.parametrize("change", [lambda a: a, lambda a: a[::-1], lambda a: a.astype(a.dtype.newbyteorder(">"))])
def test_make_loader_takes_arrays_like_tensors(change: Callable[[Any], Any]) -> None:
    x, y = change(X), change(LABELS)
    x.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = list(make_loader((x, y), 5, name="d").batches(0))
        named = list(make_loader({"x": x, "labels": torch.tensor(y.tolist())}, 5, name="d").batches(0))
    expected = list(
        make_loader((torch.tensor(x.tolist(), dtype=torch.float64), torch.tensor(y.tolist())), 5, name="d").batches(0)
    )
    for found, other, batch in zip(batches, named, expected, strict=True):
        assert all(torch.equal(one, two) and one.dtype is two.dtype for one, two in zip(found, batch, strict=True))
        assert torch.equal(other["x"], batch[0]) and torch.equal(other["labels"], batch[1])


def test_make_loader_copies_no_memory_mapped_array(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    loader = make_loader((x, LABELS), 4, name="d")
    assert loader.fetch.columns[0].data_ptr() == x.ctypes.data  # type: ignore[attr-defined]
    assert next(loader.batches(0))[0].tolist() == X[:4].tolist()


class Positioned:
    """A loader with a state, which counts what it reads."""

    def __init__(self) -> None:
        self.at, self.read = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 5:
            self.at += 1
            self.read += 1
            yield torch.tensor([self.at, self.at]) + torch.randint(0, 9, (2,))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "at" not in state:
            raise KeyError("at")
        self.at = state["at"]


def put_back(mark: Any, batches: int) -> tuple[Any, list[Any]]:
    """A new loader that begins at a mark, and what it yields from such a batch on."""
    source = Positioned()
    loader = GivenLoader(source, 0, marks=True)
    loader.start_from(mark)
    progress = Progress(epoch=1, samples_in_epoch=2 * batches, batches_in_epoch=batches)
    return source, [batch.tolist() for batch, _ in loader.rest(1, progress)]


def test_user_loader_with_a_state_resumes_from_it() -> None:
    loader = GivenLoader(Positioned(), 0, world_size=5, marks=True)
    whole = read(GivenLoader(Positioned(), 0), 1)
    list(loader.counted(1))
    for batches in range(1, 6):
        mark = loader.mark_at(1, 2 * batches, batches)
        assert mark is not None
        assert (mark.batches, mark.position) == (batches, 2 * batches)
        source, rest = put_back(mark, batches)
        assert (source.read, rest) == (5 - batches, whole[batches:])
    assert loader.mark_at(2, 0) == (1, 10, {"at": 0}, True, 5, 0)
    assert loader.mark_at(0, 2, 1) is None


def test_user_loader_ignores_a_state_of_another_position(caplog: pytest.LogCaptureFixture) -> None:
    whole = read(GivenLoader(Positioned(), 0), 1)
    mark = Mark(1, 6, {"at": 3}, False, 3)
    assert put_back(mark, 2)[1] == whole[2:]  # it is after the position
    assert put_back(mark._replace(epoch=0), 4)[1] == whole[4:]
    assert put_back(mark._replace(batches=0), 4)[1] == whole[4:]  # the state of a stream
    assert not caplog.records
    source, rest = put_back(mark._replace(workers=2), 4)
    assert (source.read, rest) == (5, whole[4:])
    assert "num_workers=2 when its state was saved, and has 0 now" in caplog.text
    with pytest.raises(KeyError) as caught:
        put_back(mark._replace(state={}), 4)
    assert "for its state from the checkpoint" in caught.value.__notes__[0]
