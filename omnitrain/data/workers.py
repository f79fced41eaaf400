"""Worker processes of loaders: start, signals, changes of what they read, and shutdown.

`loaders.py` decides what they fetch, and in which order. The workers of the user's own loader are left as they are,
and a signal may kill them.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import weakref
import zlib
from collections.abc import Iterable, Iterator
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from omnitrain.events import Control

__all__ = ["outlive_signals", "snapshot", "start_workers", "stop_workers", "until_signal"]

logger: logging.Logger = logging.getLogger("omnitrain")

_running: weakref.WeakSet[Any] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # a forked process did not start them and must not end them


def start_workers(loader: DataLoader[Any]) -> Any:
    """Return torch's iterator over a loader, whose workers end only when the iterator ends them, not by a signal.

    The loader's `worker_init_fn` is `outlive_signals`, so its workers survive SIGTERM, with which torch and Python end
    stuck workers before waiting for them without a limit at exit. These workers get SIGKILL instead.
    """
    iterator: Any = iter(loader)
    for process in iterator._workers:
        process._popen.terminate = process._popen.kill
    _running.add(iterator)
    return iterator


def stop_workers(iterator: Any) -> None:
    """End the workers of torch's iterator, if it has any.

    If the garbage collector ends them, the queues may be closed already, and it waits 5 seconds per worker.
    """
    if iterator is not None:
        iterator._shutdown_workers()


_PLAIN = (bool, int, float, complex, str, bytes, range, type(None))
_DEPTH = 6
_VISITED = 1 << 15
"""The most objects of a dataset that are looked into; of the rest, it is noticed which ones they are."""
_BYTES = 1 << 24
"""The largest array whose content is looked at."""


def snapshot(value: Any, depth: int = _DEPTH, left: list[int] | None = None) -> Any:
    """Return what can be compared cheaply of a dataset and its attributes, to notice changes.

    Seen are numbers and text, which objects, tensors and functions there are, writes to tensors and to arrays of up to
    16 MiB, and the same of nested datasets, lists and dicts. Not seen are writes to larger arrays, and what an object
    of compiled code holds.

    Args:
        value: The dataset, or an object in it.
        depth: The levels of objects to look into.
        left: How many more objects to look into; counted down.

    >>> data = type("Data", (), {})()
    >>> data.sizes = [1, 2]
    >>> before = snapshot(data)
    >>> data.sizes.append(3)
    >>> snapshot(data) == before
    False
    """
    left = [_VISITED] if left is None else left
    left[0] -= 1
    if isinstance(value, _PLAIN):
        return type(value).__name__, hash(value)
    if isinstance(value, torch.Tensor):
        return id(value), tuple(value.shape), None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        is_small = value.nbytes <= _BYTES and value.dtype.kind != "O"
        return id(value), value.shape, zlib.crc32(value.tobytes()) if is_small else None
    if not depth or isinstance(value, (type, FunctionType, ModuleType, nn.Module)):
        return id(value)
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        entries = [entry for pair in value.items() for entry in pair] if isinstance(value, dict) else value
        if len(entries) > left[0]:
            return id(value), len(value), hash(tuple(map(id, entries)))
        return id(value), tuple(snapshot(entry, depth - 1, left) for entry in entries)
    attributes = getattr(value, "__dict__", None)
    return id(value), None if attributes is None else snapshot(dict(attributes), depth, left)[1:]


def outlive_signals(worker: int) -> None:
    """Leave signals to the main process: many are sent to all processes of a run, which still needs its workers.

    The signals are caught, not ignored or blocked: programs that a dataset starts would inherit that.
    """
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _do_nothing)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


@atexit.register  # after torch's and multiprocessing's, so that it runs before them
def _stop_all() -> None:
    for iterator in list(_running):
        stop_workers(iterator)


def until_signal(items: Iterable[Any], control: Control) -> Iterator[Any]:
    """Yield batches or windows; after a signal has ended the run, an error of their loader just ends them.

    A signal often goes to all processes of a run, and kills the workers of a loader that is not ours. (For training,
    wrap the windows, not their batches: an incomplete window would be taken for the short last one of an epoch.)
    """
    try:
        yield from items
    except Exception as error:
        if control.stop != "signal":
            raise
        logger.warning("The data end here, since their loader failed after the signal: %s", error)
