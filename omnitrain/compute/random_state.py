"""Seeds and random state of the global generators.

User code draws from three global generators: torch's default one, numpy's and Python's `random`. They belong to
training; data, evaluation and saving must leave them unchanged.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1


def derive_seed(*parts: int) -> int:
    """Mix integers into one 64-bit seed; close inputs give unrelated seeds (splitmix64's finalizer).

    >>> derive_seed(42, 0) != derive_seed(42, 1)
    True
    """
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


class _TorchGenerator:
    # torch.manual_seed would seed every device's generator too, which takes many times as long.

    def snapshot(self) -> bytes:
        # compared as bytes, since torch.equal takes five times as long
        return torch.default_generator.get_state().numpy().tobytes()

    def has_changed(self, snapshot: bytes) -> bool:
        return self.snapshot() != snapshot

    def restore(self, snapshot: bytes) -> None:
        torch.default_generator.set_state(torch.frombuffer(bytearray(snapshot), dtype=torch.uint8))

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)


class _PythonGenerator:
    """Python's `random`. Getting its state builds a tuple of 625 ints, which takes 8 microseconds.

    CPython keeps them after the object's header: the position, then the 624 words. We only read that memory, and only
    if one comparison with the real state has shown that they are there.
    """

    def __init__(self) -> None:
        self._generator: Any = random.random.__self__  # type: ignore[attr-defined]
        self._memory: Any = None
        if self._generator.__sizeof__() >= object.__basicsize__ + 2500:
            memory = (ctypes.c_uint32 * 625).from_address(id(self._generator) + object.__basicsize__)
            words = random.getstate()[1]
            if tuple(memory) == (words[-1], *words[:-1]):
                self._memory = memory

    def snapshot(self) -> Any:
        if self._memory is None:
            return random.getstate()
        return bytes(self._memory), self._generator.gauss_next

    def has_changed(self, snapshot: Any) -> bool:
        return self.snapshot() != snapshot

    def restore(self, snapshot: Any) -> None:
        if self._memory is not None:
            position, *words = struct.unpack("=625I", snapshot[0])
            snapshot = (3, (*words, position), snapshot[1])
        random.setstate(snapshot)

    def seed(self, seed: int) -> None:
        random.seed(seed)


def _find_flag() -> Any:
    """Return the flag of numpy's legacy generator for a stored normal number; None if not found.

    It is in the generator's object, just before that number, by which we find it. Asking numpy takes as long as getting
    the whole state.
    """
    generator: Any = np.random.mtrand._rand  # type: ignore[attr-defined]
    before, number = generator.get_state(legacy=False), 1.2345678901234567e-89
    try:
        generator.set_state({**before, "has_gauss": 1, "gauss": number})
        content = bytes((ctypes.c_char * generator.__sizeof__()).from_address(id(generator)))
        place = content.find(struct.pack("=ixxxxd", 1, number))
        if place < 0:
            return None
        flag = ctypes.c_int32.from_address(id(generator) + place)
        generator.set_state({**before, "has_gauss": 0, "gauss": 0.0})
        return flag if flag.value == 0 else None
    finally:
        generator.set_state(before)


class _NumpyGenerator:
    """numpy's legacy generator. Reading or setting its whole state takes 25 microseconds, so we access its memory.

    `ctypes.state_address` (public) points to the Mersenne Twister's 624 words of 32 bits and its position. It does not
    include the normal number that `randn` may store for its next call; if there is one, the whole state is used. That
    must be checked each time: after a new seed, a generator may reach the same words without a stored number.
    """

    def __init__(self) -> None:
        self._bit_generator: Any = None
        self._memory: Any = None
        self._known: tuple[Any, Any] = (None, None)
        self._in_store = _find_flag()

    def _peek(self) -> Any:
        bit_generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if bit_generator is not self._bit_generator:
            self._bit_generator, self._memory = bit_generator, None
            if isinstance(bit_generator, np.random.MT19937):
                self._memory = (ctypes.c_uint32 * 625).from_address(bit_generator.ctypes.state_address)
        if self._memory is None or self._in_store is None:
            return repr(np.random.get_state(legacy=False)), True
        return bytes(self._memory), bool(self._in_store.value)

    def snapshot(self) -> Any:
        peek = self._peek()
        if self._known[0] != peek or peek[1]:
            self._known = (peek, np.random.get_state(legacy=False))
        return self._known

    def has_changed(self, snapshot: Any) -> bool:
        return self._peek() != snapshot[0]

    def restore(self, snapshot: Any) -> None:
        (words, has_more), state = snapshot
        if has_more:
            np.random.set_state(state)
        else:
            np.random.seed(0)  # drops the stored number
            ctypes.memmove(self._memory, words, len(words))

    def seed(self, seed: int) -> None:
        # The upper half: numpy and torch use the same Mersenne Twister, so the same 32 bits would give both the same
        # numbers.
        np.random.seed(seed >> 32)


Generator = _TorchGenerator | _NumpyGenerator | _PythonGenerator
# The global generators of the CPU: torch, numpy, random.
GENERATORS: tuple[Generator, ...] = (_TorchGenerator(), _NumpyGenerator(), _PythonGenerator())


def seed_generators(seed: int) -> None:
    """Seed the global generators of the CPU with a 64-bit integer, as `derive_seed` returns it."""
    for generator in GENERATORS:
        generator.seed(seed)


def snapshot_rng(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of every generator that training draws from, including the device's."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
    if device is not None and device.type not in ("cpu", "meta"):
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_rng(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Restore every generator from `snapshot_rng`."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "device" in state and device is not None:
        torch.get_device_module(device).set_rng_state(state["device"], device)


@contextlib.contextmanager
def isolated_rng(device: torch.device | None = None, seed: int | None = None) -> Iterator[None]:
    """Restore the generators on exit; seed them with `seed` on entry, if it is not None."""
    snapshots = [(generator, generator.snapshot()) for generator in GENERATORS]
    restores: list[Callable[[], None]] = []
    if device is not None and device.type not in ("cpu", "meta"):
        module: Any = torch.get_device_module(device)
        for index in range(module.device_count()):  # all of the type, as seeding one of them seeds them all
            restores.append(partial(module.set_rng_state, module.get_rng_state(index), index))
    try:
        if seed is not None:
            seed_everything(seed)
        yield
    finally:
        for generator, snapshot in snapshots:
            generator.restore(snapshot)
        for restore in restores:
            with contextlib.suppress(torch.AcceleratorError):  # after an error that ends the use of the device
                restore()


@contextlib.contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Allow only deterministic kernels inside, if enabled; an operation without one raises an error."""
    before = torch.are_deterministic_algorithms_enabled()
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it, before its first call
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), numpy and random."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
