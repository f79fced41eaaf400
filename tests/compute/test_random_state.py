"""Seeds and snapshots of the three global generators."""

import contextlib
import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recipes import disturb, draw, states

from omnitrain.compute.random_state import (
    GENERATORS,
    derive_seed,
    deterministic,
    isolated_rng,
    restore_rng,
    seed_everything,
    snapshot_rng,
)

TORCH, NUMPY, PYTHON = GENERATORS

MOVES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "torch": (TORCH, lambda: torch.rand(1)),
    "torch dropout": (TORCH, lambda: torch.nn.functional.dropout(torch.ones(3))),
    "torch seeded": (TORCH, lambda: torch.manual_seed(3)),
    "torch 624 words": (TORCH, lambda: torch.rand(624)),
    "numpy": (NUMPY, lambda: np.random.rand()),
    "numpy normal": (NUMPY, lambda: np.random.randn()),
    "numpy seeded": (NUMPY, lambda: np.random.seed(3)),
    "numpy seeded by a list": (NUMPY, lambda: np.random.seed([3, 4])),
    "numpy 624 words": (NUMPY, lambda: np.random.bytes(4 * 624)),
    "python": (PYTHON, lambda: random.random()),
    "python normal": (PYTHON, lambda: random.gauss(0, 1)),
    "python seeded": (PYTHON, lambda: random.seed(3)),
    "python 624 words": (PYTHON, lambda: random.getrandbits(32 * 624)),
}
STARTS: dict[str, Callable[[], Any]] = {
    "fresh": lambda: None,
    "in the middle": lambda: (torch.rand(5), np.random.rand(5), random.random()),
    "with a normal number in store, which the next draw takes": lambda: (
        torch.randn(1),
        np.random.randn(),
        random.gauss(0, 1),
    ),
    "seeded by a list": lambda: (np.random.seed([1, 2]), random.seed("text")),
}


def changed(snapshots: list[Any]) -> list[Any]:
    return [each for each, snapshot in zip(GENERATORS, snapshots, strict=True) if each.has_changed(snapshot)]


def restore(snapshots: list[Any]) -> None:
    for generator, snapshot in zip(GENERATORS, snapshots, strict=True):
        generator.restore(snapshot)


@pytest.mark.parametrize("start", STARTS)
def test_draws_are_detected_and_undone(start: str) -> None:
    STARTS[start]()
    before, state = states(), snapshot_rng(torch.device("cpu"))
    assert set(state) == {"torch", "numpy", "python"}
    for name, (generator, move) in MOVES.items():
        snapshots = [each.snapshot() for each in GENERATORS]
        assert not changed(snapshots), name
        move()
        assert changed(snapshots) == [generator], name
        restore(snapshots)
        assert states() == before and not changed(snapshots), name
    for seed in (None, 5):
        with isolated_rng(torch.device("cpu"), seed):
            for _, move in MOVES.values():
                move()
        assert states() == before
    for _, move in MOVES.values():
        move()
    restore_rng(state, torch.device("cpu"))
    assert states() == before


def test_draws_of_other_numpy_generators() -> None:
    original = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        for bits in (np.random.PCG64(1), original):
            np.random.set_bit_generator(bits)  # type: ignore[attr-defined]
            snapshot = NUMPY.snapshot()
            assert not NUMPY.has_changed(snapshot)
            first = np.random.rand()
            assert NUMPY.has_changed(snapshot)
            NUMPY.restore(snapshot)
            assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(original)  # type: ignore[attr-defined]


def test_seeds_of_generators_are_unrelated() -> None:
    draws: list[Callable[[], list[int]]] = [
        lambda: torch.randint(0, 256, (20,)).tolist(),
        lambda: np.random.randint(0, 256, 20).tolist(),
        lambda: [random.getrandbits(32) % 256 for _ in range(20)],
    ]
    values = []
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
    seeds = {derive_seed(a, b, c) for a in range(10) for b in range(10) for c in range(50)}
    assert len(seeds) == 5000
    assert derive_seed(1, 2) != derive_seed(2, 1)
    assert derive_seed(1) != derive_seed(1, 0)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > 4990
    assert len({seed >> 32 for seed in seeds}) > 4990


def test_isolation_nests_and_repeats() -> None:
    with isolated_rng(seed=1):
        expected = draw()
    disturb()
    before = states()
    with isolated_rng(seed=1):
        with contextlib.suppress(KeyError), isolated_rng(seed=2):
            draw()
            raise KeyError
        assert draw() == expected
    assert states() == before


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
    class Lost:
        device_count = staticmethod(lambda: 1)
        get_rng_state = staticmethod(lambda device: torch.zeros(16, dtype=torch.uint8))

        @staticmethod
        def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch, "get_device_module", lambda device: Lost)
    before = torch.get_rng_state()
    with pytest.raises(IndexError, match="label 7"), isolated_rng(torch.device("cuda"), 1):
        raise IndexError("label 7")
    assert torch.equal(torch.get_rng_state(), before)
