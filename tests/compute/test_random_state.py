"""Seeds and snapshots of the three global generators."""

import contextlib
import itertools
import os
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recipes import disturb, draw, states

from omnitrain.compute import random_state
from omnitrain.compute.random_state import GENERATORS, derive_seed, deterministic, isolated_rng, seed_everything

TORCH, NUMPY, PYTHON = GENERATORS
CPU = torch.device("cpu")
MOVES: list[tuple[Any, Callable[[], Any]]] = [
    (TORCH, lambda: torch.rand(1)), (TORCH, lambda: torch.nn.functional.dropout(torch.ones(3))),
    (TORCH, lambda: torch.manual_seed(3)), (TORCH, lambda: torch.rand(624)),
    (NUMPY, lambda: np.random.rand()), (NUMPY, lambda: np.random.randn()), (NUMPY, lambda: np.random.seed(3)),
    (NUMPY, lambda: np.random.seed([3, 4])), (NUMPY, lambda: np.random.bytes(4 * 624)),
    (PYTHON, lambda: random.random()), (PYTHON, lambda: random.gauss(0, 1)), (PYTHON, lambda: random.seed(3)),
    (PYTHON, lambda: random.getrandbits(32 * 624)),
]  # fmt: skip
"""Draws and seeds, and the generator that each of them moves."""
STARTS: dict[str, Callable[[], Any]] = {
    "fresh": lambda: None,
    "in the middle": lambda: (torch.rand(5), np.random.rand(5), random.random()),
    "a normal number in store": lambda: (torch.randn(1), np.random.randn(), random.gauss(0, 1)),
    "seeded by a list": lambda: (np.random.seed([1, 2]), random.seed("text")),
}


def move_all() -> None:
    for _, move in MOVES:
        move()


@pytest.mark.parametrize("start", STARTS)
def test_draws_are_detected_and_undone(start: str) -> None:
    STARTS[start]()
    before, state = states(), random_state.snapshot_rng(CPU)
    assert set(state) == {"torch", "numpy", "python"}
    for generator, move in MOVES:
        snapshots = {each: each.snapshot() for each in GENERATORS}
        assert not any(each.has_changed(snapshot) for each, snapshot in snapshots.items())
        move()
        assert [each for each, snapshot in snapshots.items() if each.has_changed(snapshot)] == [generator]
        generator.restore(snapshots[generator])
        assert states() == before and not generator.has_changed(snapshots[generator])
    for seed in (None, 5):
        with isolated_rng(CPU, seed):
            move_all()
        assert states() == before
    move_all()
    random_state.restore_rng(state, CPU)
    assert states() == before


def test_draws_of_other_numpy_generators(request: pytest.FixtureRequest) -> None:
    random_module: Any = np.random
    original = random_module.get_bit_generator()
    request.addfinalizer(lambda: random_module.set_bit_generator(original))
    for bits in (np.random.PCG64(1), original):
        random_module.set_bit_generator(bits)
        snapshot = NUMPY.snapshot()
        assert not NUMPY.has_changed(snapshot)
        first = np.random.rand()
        assert NUMPY.has_changed(snapshot)
        NUMPY.restore(snapshot)
        assert np.random.rand() == first


def test_seeds_of_generators_are_unrelated() -> None:
    draws = (
        lambda: torch.randint(0, 256, (20,)).tolist(), lambda: np.random.randint(0, 256, 20).tolist(),
        lambda: [random.getrandbits(32) % 256 for _ in range(20)],
    )  # fmt: skip
    values: list[list[int]] = []
    for generator, draw_bytes in zip(GENERATORS, draws, strict=True):
        for parts in ((42, 0, 7), (42, 0, 8), (42, 0, 7)):  # the third time like the first
            generator.seed(derive_seed(*parts))
            values.append(draw_bytes())
        assert values.pop() == values[-2]
    for first, second in itertools.combinations(values, 2):
        assert sum(a == b for a, b in zip(first, second, strict=True)) < 5


@given(st.lists(st.integers(-(2**40), 2**70), max_size=4))
def test_derive_seed_has_64_bits(parts: list[int]) -> None:
    seed = derive_seed(*parts)
    assert 0 <= seed < 2**64 and seed == derive_seed(*parts)
    for generator in GENERATORS:
        generator.seed(seed)


def test_derive_seed_of_near_inputs() -> None:
    seeds = {derive_seed(*parts) for parts in itertools.product(range(10), range(10), range(50))}
    assert len(seeds) == 5000 and derive_seed(1, 2) != derive_seed(2, 1) and derive_seed(1) != derive_seed(1, 0)
    assert min(len({seed & 0xFFFFFFFF for seed in seeds}), len({seed >> 32 for seed in seeds})) > 4990


def test_isolation_nests_and_repeats() -> None:
    disturb()
    before, draws = states(), []
    for _ in range(2):
        with isolated_rng(seed=1):
            with contextlib.suppress(KeyError), isolated_rng(seed=2):
                draw()
                raise KeyError
            draws.append(draw())
        assert states() == before
    with isolated_rng(seed=1):
        assert draws == [draw()] * 2


def test_seed_everything_equals_each_library() -> None:
    seed_everything(7)
    values = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(7)
    assert values == (torch.rand(1).item(), np.random.RandomState(7).rand(), random.Random(7).random())
    seed_everything(2**40 + 1)
    assert torch.initial_seed() == 2**40 + 1


def test_deterministic_mode_ends_with_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    for enabled in (True, False):
        with contextlib.suppress(KeyError), deterministic(enabled):
            assert torch.are_deterministic_algorithms_enabled() is enabled
            raise KeyError
        assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # a setting of the user's own stays


def test_isolated_rng_keeps_error_of_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    lost = mock.Mock(device_count=lambda: 1, get_rng_state=lambda _: torch.zeros(16, dtype=torch.uint8))
    lost.set_rng_state = set_rng_state
    monkeypatch.setattr(torch, "get_device_module", lambda device: lost)
    before = torch.get_rng_state()
    with pytest.raises(IndexError, match="label 7"), isolated_rng(torch.device("cuda"), 1):
        raise IndexError("label 7")
    assert torch.equal(torch.get_rng_state(), before)
