"""The order of samples, their split over ranks, and fetching."""

import itertools
import random
import tracemalloc
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import assert_equal, disturb, draw, states
from torch.utils.data import Dataset, Subset, TensorDataset

from omnitrain.compute.random_state import derive_seed
from omnitrain.data import sampling
from omnitrain.data.collation import Collator
from omnitrain.data.sampling import EpochSampler, Fetch, MicrobatchLayout, permute, share, tensor_columns

fuzzed = settings(max_examples=30)
sizes, batch_sizes, worlds, epochs = (st.integers(*bounds) for bounds in ((1, 60), (1, 7), (1, 5), (0, 3)))


def per_rank(size: int, batch_size: int, world: int, epoch: int = 0, position: int = 0, **options: Any) -> list[list]:
    samplers = [EpochSampler(size, batch_size, rank=rank, world_size=world, **options) for rank in range(world)]
    return [[batch.tolist() for batch in sampler.batches(epoch, position)] for sampler in samplers]


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch]


def sorted_steps(ranks: list[list], accumulation: int = 1) -> list[list[int]]:
    """The samples of each step on all ranks together, in ascending order."""
    batches = list(zip(*ranks, strict=True))
    return [sorted(flat(flat(batches[first : first + accumulation]))) for first in range(0, len(batches), accumulation)]


@fuzzed
@given(sizes, batch_sizes, worlds, epochs, st.data())
def test_order_has_each_index_once_in_equally_many_batches(
    size: int, batch_size: int, world: int, epoch: int, data: st.DataObject
) -> None:
    """From a position on it is the tail of the epoch."""
    ranks, step = per_rank(size, batch_size, world, epoch), batch_size * world
    assert sorted(flat(flat(ranks))) == list(range(size))
    assert {len(batches) for batches in ranks} == {len(EpochSampler(size, batch_size, world_size=world))}
    assert {len(batch) for batches in ranks for batch in batches[:-1]} <= {batch_size}
    last = [len(batches[-1]) for batches in ranks]
    assert max(last) - min(last) <= 1 and max(last) <= batch_size
    assert flat(per_rank(size, batch_size, 1, epoch, shuffle=False)[0]) == list(range(size))
    done = data.draw(st.integers(0, len(ranks[0])))
    assert per_rank(size, batch_size, world, epoch, min(done * step, size)) == [batches[done:] for batches in ranks]
    whole = per_rank(size, batch_size, world, epoch, multiple_of=step)  # without a short batch
    assert {len(batches) for batches in whole} == {size // step}
    assert {len(batch) for batches in whole for batch in batches} <= {batch_size}
    sampler = EpochSampler(size, batch_size, world_size=world, multiple_of=step)
    assert len(set(flat(flat(whole)))) == len(flat(flat(whole))) == sampler.size
    assert sorted(sampler.order(epoch)) == list(range(size))


def test_order_differs_by_epoch_and_seed_only() -> None:
    before = torch.get_rng_state()
    orders = [tuple(EpochSampler(50, 4, seed=seed).order(epoch)) for seed in (1, 2) for epoch in range(5)]
    assert len(set(orders)) == 10 and torch.equal(torch.get_rng_state(), before)
    sampler = EpochSampler(50, 8, seed=2, rank=1, world_size=2)
    assert [tuple(sampler.order(epoch)) for epoch in (3, 0, 3)] == [orders[8], orders[5], orders[8]]


@fuzzed
@given(st.integers(1, 60), batch_sizes, worlds)
def test_rounds_are_as_few_and_as_even_as_possible(step: int, batch_size: int, world: int) -> None:
    sizes = MicrobatchLayout.of(step, batch_size, world).sizes
    shares = [sum(len(share(range(size), rank, world)) for size in sizes) for rank in range(world)]
    assert sum(sizes) == sum(shares) == step and max(shares) - min(shares) <= 1
    assert min(sizes) > 0 and max(sizes) <= batch_size * world and (len(sizes) - 1) * batch_size * world < step
    if step % (batch_size * world) == 0:
        assert set(sizes) == {batch_size * world}


@fuzzed
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 60))
def test_rounds_are_counted_when_they_begin(sizes: list[int], samples: int) -> None:
    rounds, starts = MicrobatchLayout(tuple(sizes)), [0]
    while starts[-1] < samples:
        starts.append(starts[-1] + sizes[(len(starts) - 1) % len(sizes)])
    assert [rounds.start(number) for number in range(len(starts))] == starts
    assert rounds.count(samples) == len(starts) - 1


@fuzzed
@given(sizes, st.integers(1, 20), batch_sizes, worlds, epochs, st.data())
def test_rounds_of_any_step_have_its_samples_on_any_world(
    size: int, step: int, batch_size: int, world: int, epoch: int, data: st.DataObject
) -> None:
    rounds = MicrobatchLayout.of(step, batch_size, world)
    done = step * data.draw(st.integers(0, (size - 1) // step))
    block = data.draw(st.sampled_from([16, sampling._BLOCK]))
    with mock.patch("omnitrain.data.sampling._BLOCK", block):  # which steps may be larger than
        ranks = per_rank(size, batch_size, world, epoch, done, rounds=rounds)
    assert all(len(batch) <= batch_size for batches in ranks for batch in batches)
    assert sorted_steps(ranks, len(rounds.sizes)) == sorted_steps(per_rank(size, step, 1, epoch, done))
    if not done:
        assert {len(batches) for batches in ranks} == {len(EpochSampler(size, 1, rounds=rounds))}
    ranks = per_rank(size, batch_size, world, epoch)  # and so without rounds, in steps of whole micro-batches
    assert sorted_steps(ranks, 2) == sorted_steps(per_rank(size, 2 * batch_size * world, 1, epoch))


X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10)
TENSORS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "TensorDataset": (TensorDataset(X, Y), lambda i: (X[i], Y[i])),
    "one tensor in a TensorDataset": (TensorDataset(X), lambda i: (X[i],)),
    "tensor": (X, lambda i: X[i]),
    "pair of tensors": ((X, Y), lambda i: (X[i], Y[i])),
    "dict of tensors": ({"x": X, "labels": Y}, lambda i: {"x": X[i], "labels": Y[i]}),
    "Subset of a Subset": (
        Subset(Subset(TensorDataset(X, Y), range(9, -1, -1)), torch.tensor([2, 0, 1])),  # type: ignore[arg-type]
        lambda i: (X[[7, 9, 8]][i], Y[[7, 9, 8]][i]),
    ),
    "Subset of a tensor": (Subset(X, [5, 3, 9]), lambda i: X[[5, 3, 9]][i]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", TENSORS)
def test_fetch_of_tensors_copies_them_like_samples(kind: str) -> None:
    dataset, expected = TENSORS[kind]
    samples = Fetch(dataset, lambda samples: samples, 0)(0, np.array([2, 0]))
    assert_equal(list(samples), [expected(2), expected(0)])  # for a custom collator
    index = torch.tensor([2, 0, 1])
    for _ in range(2):
        batch = Fetch(dataset, Collator(), 0)(0, index.numpy())
        assert isinstance(batch, type(expected(index)))
        assert_equal(batch, expected(index))
        for tensor in batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple) else [batch]:
            tensor.zero_()


def test_fetch_of_tensors_is_cut_to_the_maximum_length() -> None:
    batch = Fetch({"ids": torch.ones(4, 6, dtype=torch.int64)}, Collator(max_length=3), 0)(0, np.array([0, 1]))
    assert batch["ids"].shape == (2, 3)

    class Doubled(TensorDataset):  # whose items are not those of its tensors
        def __getitem__(self, index: int) -> Any:
            return 2 * self.tensors[0][index]

    assert tensor_columns(Doubled(Y)) == (None, None)
    assert Fetch(Subset(Doubled(Y), [4, 3]), Collator(), 0)(0, np.array([1])).tolist() == [6]


def draw_nothing() -> float:
    return 0.0


def draw_torch() -> float:
    return torch.rand(1).item()


def draw_and_seed(before: bool) -> float:
    value = 0.0 if before else draw()
    for seed, function in enumerate((np.random.seed, torch.manual_seed, random.seed), start=3):
        function(seed)
    return draw() if before else value


DRAWS: dict[str, Callable[[], float]] = {
    "all": draw,
    "one by another": lambda: float(np.random.rand()) if torch.rand(1) < 0.5 else random.random(),
    "normal numbers": lambda: float(np.random.randn()) + torch.randn(1).item() + random.gauss(0, 1),
    "624 words of torch": lambda: torch.rand(624).sum().item(),
    "624 words of numpy": lambda: float(np.frombuffer(np.random.bytes(4 * 624), np.uint32).sum()),
    "624 words of python": lambda: float(random.getrandbits(32 * 624) % 10007),
    "seeds before": lambda: draw_and_seed(before=True),
    "seeds after": lambda: draw_and_seed(before=False),
    "nothing": draw_nothing,
}


class Drawing(Dataset[torch.Tensor]):
    """Rows of (index, something drawn); `every` says in which samples something is drawn."""

    def __init__(self, draw: Callable[[], float], size: int = 12, every: int = 1) -> None:
        self.draw, self.size, self.every = draw, size, every

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.draw() if index % self.every == 0 else 0.0], dtype=torch.float64)


class DrawingBatches(Drawing):
    """The same, fetched by batch."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def one_by_one(dataset: Any, epoch: int = 0, seed: int = 0) -> dict[int, float]:
    fetched = [Fetch(dataset, Collator(), seed)(epoch, np.array([index])) for index in range(len(dataset))]
    return {int(index): value for [[index, value]] in (batch.tolist() for batch in fetched)}


@pytest.mark.parametrize("draw", DRAWS)
def test_fetch_gives_the_same_sample_in_any_batch(draw: str) -> None:
    number = list(DRAWS).index(draw)
    dataset = (Drawing, DrawingBatches)[number % 2](DRAWS[draw], every=(1, 5)[number // 2 % 2])
    expected = one_by_one(dataset)
    for split in ([[*range(12)]], [[11, 1, 0], [5]], [[i] for i in range(11, -1, -1)], [[1, 2, 3], [4, 5, 6], [0, 10]]):
        fetch = Fetch(dataset, Collator(), 0)
        for prepare, indices in itertools.product((disturb, lambda: np.random.seed([1, 2])), split):
            prepare()
            before = states()
            fetched = fetch(0, np.array(indices)).tolist()
            assert {int(index): value for index, value in fetched} == {i: expected[i] for i in indices}
            assert states() == before
    if draw not in ("nothing", "seeds before"):
        dataset = Drawing(DRAWS[draw])
        runs = [one_by_one(dataset), one_by_one(dataset, epoch=1), one_by_one(dataset, seed=1)]
        values = [value for run in runs for value in run.values()]
        assert len(set(values)) == len(values)


def test_fetch_without_draws_reads_once_by_batch() -> None:
    requests = []

    class Batches(DrawingBatches):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            requests.append(indices)
            return super().__getitems__(indices)

    data = Batches(draw_nothing)
    assert Fetch(data, Collator(), 0)(0, np.array([3, 1])).tolist() == [[3, 0], [1, 0]]
    fetch = Fetch(data, mask, 0)
    fetch(0, np.array([0]))
    fetch(0, np.array([4, 2]))  # draws of the collator concern no sample
    assert requests[0] == [3, 1] and requests[-1] == [4, 2]


@pytest.mark.parametrize("error", [KeyError("no such key"), IndexError("too far"), OSError(2)])
def test_fetch_passes_errors_on_and_restores_generators(error: Exception) -> None:
    class Failing(Drawing):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 3:
                self.draw()
                raise error
            return super().__getitem__(index)

    for draws in (draw_nothing, draw):
        fetch = Fetch(Failing(draws), Collator(), 0)
        disturb()
        before = states()
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                fetch(0, np.array([1, 3]))
            assert caught.value is error and states() == before
        assert fetch(0, np.array([1, 2])).shape == (2, 2)


def mask(samples: Any) -> torch.Tensor:
    return torch.stack(samples)[:, 0] + draw()


@pytest.mark.parametrize("draws", [draw_nothing, draw])
def test_collator_draws_follow_from_the_batch(draws: Any) -> None:
    dataset, batches = Drawing(draws), ([0, 1, 2], [3, 4], [5])
    drawn = []
    for order in (batches, batches[::-1]):
        fetch = Fetch(dataset, mask, 0)
        disturb()
        before = states()
        drawn.append({indices[0]: fetch(0, np.array(indices)).tolist() for indices in order})
        assert states() == before
    assert drawn[0] == drawn[1]
    assert len({values[0] - first for first, values in drawn[0].items()}) == 3
    assert Fetch(dataset, mask, 0)(1, np.array([0, 1, 2])).tolist() != drawn[0][0]
    on_tensors = [Fetch(X, mask, 0)(0, np.array([1, 2])).tolist() for _ in range(2)]
    assert on_tensors[0] == on_tensors[1]


def test_collator_that_draws_and_changes_samples_gets_new_ones() -> None:
    """And what it draws is not what its first sample drew."""

    class Dicts(Drawing):
        def __getitem__(self, index: int) -> Any:
            return {"value": index}

    def take_apart(samples: Any) -> list[float]:
        return [sample.pop("value") + draw_torch() for sample in samples]

    def collate(samples: Any) -> tuple[float, float]:
        return samples[0][1].item(), draw_torch()

    assert len(Fetch(Dicts(draw_nothing), take_apart, 0)(0, np.array([1, 2]))) == 2
    sample, collated = Fetch(Drawing(draw_torch), collate, 0)(0, np.array([4, 5]))
    assert sample == one_by_one(Drawing(draw_torch))[4] != collated


@fuzzed
@given(st.integers(1, 5000), st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
def test_keyed_order_is_a_permutation(size: int, huge: int, key: int, data: st.DataObject) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))
    start = data.draw(st.integers(0, huge - 1))
    places = np.arange(start, min(start + 100, huge))
    order = permute(places, huge, key)
    assert order.min() >= 0 and order.max() < huge and len(set(order.tolist())) == len(places)
    assert order[-1] == permute(places[-1:], huge, key)[0]


@fuzzed
@given(sizes, batch_sizes, worlds, epochs, st.integers(0, 60))
def test_keyed_order_is_shared_and_resumed(size: int, batch_size: int, world: int, epoch: int, position: int) -> None:
    samplers = [EpochSampler(size, batch_size, rank=rank, world_size=world) for rank in range(world)]
    for sampler in samplers:
        sampler.is_keyed = True
    order = samplers[0].order(epoch)
    assert sorted(order) == list(range(size))
    turns = zip(*(sampler.batches(epoch, position) for sampler in samplers), strict=True)
    assert flat(map(np.concatenate, turns)) == order[position:].tolist()


def test_keyed_order_looks_random() -> None:
    size = 447**2  # a whole square
    places, (order, other) = np.arange(size), (permute(np.arange(size), size, key) for key in (5, 6))
    # Each bound is what chance stays below but once in many thousands of orders.
    for a, b in ((places, order), (order[:-1], order[1:]), (order, other)):
        assert abs(np.corrcoef(a, b)[0, 1]) * np.sqrt(size) < 4.5
    counts = np.bincount(places * 20 // size * 20 + order * 20 // size)  # where each twentieth of the places goes
    assert ((counts - size / 400) ** 2 / (size / 400)).sum() < 361 + 4.5 * np.sqrt(2 * 361)
    steps = np.diff(order) % size  # of an order that is too regular some would come again and again
    assert np.bincount(steps).max() < 12
    assert abs((np.diff(order) > 0).mean() - 0.5) * np.sqrt(12 * size) < 4.5
    assert (order == places).sum() < 10 and (order == other).sum() < 10  # of a random permutation one on average


@pytest.mark.parametrize("shuffle", [True, False])
def test_keyed_order_of_huge_data_takes_no_memory(shuffle: bool) -> None:
    """Only huge data have such an order."""
    assert not EpochSampler(1 << 24, 8).is_keyed and EpochSampler((1 << 24) + 1, 8).is_keyed
    order = torch.randperm(20, generator=torch.Generator().manual_seed(derive_seed(42, 3) >> 1))
    assert EpochSampler(20, 8).order(3).tolist() == order.tolist()
    for size in (10**9, 10**12):
        sampler = EpochSampler(size, 32, shuffle=shuffle, rank=1, world_size=2)
        tracemalloc.start()
        first, last = next(sampler.batches(0)), next(sampler.batches(0, size - 40))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(first) == 32 and len(last) == 20 and peak < 1 << 23
        assert shuffle or (first[0], last[0]) == (32, size - 20)
