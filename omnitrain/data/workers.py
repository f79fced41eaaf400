"""Worker processes of loaders: how ours are started, what signals are to them, and how they end.

What they fetch, and in which order, is in `loaders.py`. The workers of a user's own loader are left as they are, and a
signal may kill them.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from omnitrain.events import Control

__all__ = ["outlive_signals", "start_workers", "stop_workers", "until_signal"]

logger: logging.Logger = logging.getLogger("omnitrain")

_running: weakref.WeakSet[Any] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # a forked process has not started them, and must not end them


def start_workers(loader: DataLoader[Any]) -> Any:
    """Return torch's iterator over a loader, whose workers end when it wants them to and by no other signal.

    The loader's `worker_init_fn` is `outlive_signals`. Its workers get over SIGTERM then, with which torch and Python
    end those that are stuck, and at exit wait for them without a limit: theirs has to be SIGKILL.
    """
    iterator: Any = iter(loader)
    for process in iterator._workers:
        process._popen.terminate = process._popen.kill
    _running.add(iterator)
    return iterator


def stop_workers(iterator: Any) -> None:
    """End the workers of torch's iterator, if it is one.

    Left to the garbage collector, it may find its queues closed, and waits 5 seconds a worker.
    """
    if iterator is not None:
        iterator._shutdown_workers()


def outlive_signals(worker: int) -> None:
    """Leave signals to the main process: many are sent to all processes of a run, which needs its workers to the end.

    They are caught, and neither ignored nor blocked: programs that a dataset starts would inherit that.
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
    """Yield batches or windows. An error of their loader is their end once a signal has ended the run.

    A signal often goes to all processes of a run, and kills the workers of a loader that is not ours. (Of windows, not
    of the batches that they are made of: what there is of a window then would be taken for an epoch's short last one.)
    """
    try:
        yield from items
    except Exception as error:
        if control.stop != "signal":
            raise
        logger.warning("The data end here, since their loader failed after the signal: %s", error)
