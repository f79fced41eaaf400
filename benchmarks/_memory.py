"""The memory that a process takes while it does a piece of work."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["MIB", "peak_of", "return_freed_memory"]

MIB = 2**20


def return_freed_memory() -> None:
    """Let the allocator give large blocks back to the system as soon as they are free, so that a peak is one."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD


def resident() -> int:
    """Return the bytes that this process holds, without the pages of files that it has mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def peak_of(work: Callable[[], Any]) -> tuple[int, int]:
    """Return by how many bytes this process grew at most while `work` ran, and by how many after it."""
    gc.collect()
    before = most = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = work()
    finally:
        done.set()
        thread.join()
    gc.collect()
    after = resident() - before
    del result
    return max(most - before, after), after
