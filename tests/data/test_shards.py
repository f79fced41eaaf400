"""Streams of shards: split over ranks and workers, order and resume."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node

from omnitrain import ConfigError, ShardedStream
from omnitrain.core.errors import CheckpointError, DataError
from omnitrain.data import shards as module
from omnitrain.data.sampling import ReadOptions
from omnitrain.data.shards import ShardedLoader

SIZES = (7, 2, 0, 5)
"""Of four shards: two end early, and one is empty."""


class Shard:
    """Numbers 100 x its place on, with noise from the generators, and a count of what was read."""

    def __init__(self, place: int, size: int) -> None:
        self.place, self.size, self.at, self.read = place, size, 0, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.size:
            self.at += 1
            self.read += 1
            yield 100 * self.place + self.at - 1 + torch.rand(()) / 2
        self.at = 0


class Seekable(Shard):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def loader(rank: int = 0, world_size: int = 1, kind: Any = Seekable, sizes: Any = SIZES, **options: Any) -> Any:
    stream = ShardedStream([kind(place, size) for place, size in enumerate(sizes)])
    reading = ReadOptions(seed=0, rank=rank, world_size=world_size, num_workers=options.pop("num_workers", 0))
    return ShardedLoader(stream, options.pop("batch_size", 8 // world_size), reading, **options)


def values(batches: Any) -> list[list[float]]:
    return [batch.tolist() if samples else [] for batch, samples in batches]


def join(ranks: Any) -> list[list[float]]:
    """The samples of each step of 8 turns on all ranks together."""
    return [sorted(itertools.chain(*parts)) for parts in itertools.zip_longest(*ranks, fillvalue=())]


def steps(world_size: int, **options: Any) -> list[list[float]]:
    return join(values(loader(rank, world_size, **options).counted_batches(1)) for rank in range(world_size))


PROCESSES = pytest.mark.processes


@pytest.mark.parametrize("options", [{}, *(pytest.param({"num_workers": n}, marks=PROCESSES) for n in (1, 2))], ids=str)
def test_steps_are_the_same_on_any_ranks_and_workers(options: dict[str, Any]) -> None:
    whole = steps(1)
    assert sorted(map(int, itertools.chain(*whole))) == [*range(7), 100, 101, *range(300, 305)]
    assert len(whole) == 4  # 25 turns to the last sample of the first shard
    assert steps(2, **options) == whole
    if not options:
        assert steps(4) == whole


def test_rank_reads_its_shards_only() -> None:
    """Empty shards keep their turns."""
    reader = loader(1, 2)
    values(reader.counted_batches(0))
    assert [shard.read for shard in reader.dataset.shards] == [0, 2, 0, 5]
    assert (reader.size, len(reader)) == (14, 4)
    counts = [count for _, count in loader(sizes=(0, 0, 2, 1), batch_size=1).counted_batches(0)]
    assert counts[:7] == [0, 0, 1, 1, 0, 0, 1] and not any(counts[7:])


def state_after(windows: int, ranks: int, *args: Any, **options: Any) -> Any:
    """The state of data that all ranks save after some windows of an epoch."""
    readers = [loader(rank, ranks, *args, **options) for rank in range(ranks)]
    for reader in readers:
        list(itertools.islice(reader.counted_batches(1, 0, 0), windows))
        reader.turn += windows
    points = [reader.position_at(1, 0, 1) for reader in readers]
    return points[0]._replace(state=readers[0].merge_states([point.state for point in points]))


def resumed(point: Any, *args: Any, **options: Any) -> tuple[Any, list[Any]]:
    reader = loader(*args, **options)
    reader.resume_at(point._replace(state=reader.local_state(point.state)))
    return reader, list(reader.counted_batches(1, 1, 1))


@pytest.mark.parametrize("kind", [Shard, Seekable])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 4), (4, 1)])
def test_resume_on_another_number_of_ranks(kind: Any, before: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EVERY", 2)
    for windows in (1, 2, 3):
        point = state_after(windows, before, kind)
        readers, batches = zip(*(resumed(point, rank, after, kind) for rank in range(after)), strict=True)
        parts = list(map(values, batches))
        assert list(filter(None, join(parts))) == list(filter(None, steps(1, kind=kind)[windows:]))
        ended = sum(not any(part) for part in parts)  # of which the ranks read their last batch again
        read = sum(shard.read for reader in readers for shard in reader.dataset.shards)
        assert 14 <= read <= 14 + 14 * ended if kind is Shard else read < 14


@pytest.mark.parametrize("kind", [Shard, Seekable])
@pytest.mark.parametrize(("windows", "num_workers"), [(3, 0), (5, 0), (8, 0), pytest.param(5, 1, marks=PROCESSES)])
def test_resume_after_the_end_of_a_rank_repeats_its_last_batch(windows: int, num_workers: int, kind: Any) -> None:
    options: dict[str, Any] = {"sizes": (17, 5), "batch_size": 2}
    (*_, (last, _)) = loader(1, 2, kind, **options).counted_batches(1)
    point = state_after(windows, 2, kind, **options)
    _, ((batch, samples),) = resumed(point, 1, 2, kind, num_workers=num_workers, **options)
    assert samples == 0 and torch.equal(batch, last)
    assert not resumed(point, 1, 2, kind, **{**options, "sizes": (17, 0)})[1]


def test_shards_of_another_number_are_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CheckpointError, match="has 2 shards, and had 4"):
        loader(sizes=(7, 7)).local_state(state_after(1, 1, Shard).state)
    assert loader().local_state({"at": 3}) is None  # of another kind of data
    with pytest.raises(ConfigError, match=r"has 4 shards, which cannot be divided evenly among 3 ranks"):
        loader(0, 3)
    loader(0, 2, num_workers=5)
    assert "`num_workers=5`: the data has 2 shards for this rank" in caplog.text


@pytest.mark.parametrize("data", [[], "abc", 5, [iter([1])], [5], ["a"]])
def test_sharded_stream_rejects_what_is_no_list_of_shards(data: Any) -> None:
    with pytest.raises(ConfigError, match="iterable"):
        ShardedStream(data)
    with pytest.raises(ConfigError, match="no effect on a list"):
        ShardedStream([[1]], count=1)


def test_error_reports_sample_and_shard() -> None:
    class Broken(Shard):
        def __iter__(self) -> Iterator[Any]:
            yield torch.tensor(1.0)
            raise KeyError("gone")

    with pytest.raises(KeyError) as caught:
        values(loader(1, 2, Broken, name="the training set").counted_batches(0))
    assert caught.value.__notes__ == ["Raised for sample 1 of shard 1 of the training set."]

    def ends(samples: Any) -> Any:
        raise StopIteration

    with pytest.raises(DataError, match="The collator raised StopIteration for the samples from place 0 to"):
        values(ShardedLoader(ShardedStream([[1.0]]), 2, ReadOptions(ends)).counted_batches(0))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=PROCESSES)])
def test_shards_of_hf_streams_are_all_read_once(workers: int) -> None:
    stream = Dataset.from_dict({"x": list(range(24))}).to_iterable_dataset(num_shards=4)
    ranks = [
        ShardedLoader(ShardedStream(stream), 3, ReadOptions(rank=rank, world_size=2, num_workers=workers))
        for rank in range(2)
    ]
    parts = [[x for batch, count in rank.counted_batches(0) if count for x in batch["x"].tolist()] for rank in ranks]
    assert [len(part) for part in parts] == [12, 12] and sorted(parts[0] + parts[1]) == list(range(24))
    assert len(ShardedStream(stream, count=2).shards) == 2
    with pytest.raises(ConfigError, match="from 1 to 4"):
        ShardedStream(stream, count=5)
    with pytest.raises(ConfigError, match="split_dataset_by_node"):
        ShardedStream(split_dataset_by_node(stream, 0, 2))
