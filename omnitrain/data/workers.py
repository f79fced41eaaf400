"""Worker processes of loaders: start, signals, failures and shutdown.

The workers of a custom loader are unchanged, and a signal may kill them.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import pickle
import re
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from omnitrain.core.errors import DataError, OmnitrainError

logger: logging.Logger = logging.getLogger("omnitrain")

_running: weakref.WeakSet[Any] = weakref.WeakSet()
# Torch's iterators with workers, and a function that returns the samples of some of their tasks as text.
_watched: weakref.WeakKeyDictionary[Any, Callable[[Sequence[int]], str]] = weakref.WeakKeyDictionary()
# The iterators that exist while this process is forked: if the new process collected one as garbage first, that would
# end the workers of its parent.
_during_fork: list[Any] = []


def _hold_iterators() -> None:
    _during_fork.extend({*_running, *_watched})


def _disown_objects() -> None:
    """Leave to the parent process what it made: mark the copies of its iterators as shut down, and collect no garbage.

    Tensors of a GPU that are freed in a forked process can end it, as CUDA does not work there.
    """
    gc.freeze()
    for iterator in _during_fork:
        iterator._shutdown = True
    for iterators in (_running, _watched, _during_fork):
        iterators.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_iterators, after_in_parent=_during_fork.clear, after_in_child=_disown_objects)


def start_workers(loader: DataLoader[Any], describe: Callable[[Sequence[int]], str]) -> Any:
    """Return torch's iterator over a loader, whose workers end only with the iterator, not by a signal.

    `describe` returns the samples of tasks as text for an error, by the numbers of the tasks in a pass.

    The loader's `worker_init_fn` is `outlive_signals`, so its workers survive SIGTERM, by which torch and Python end
    stuck workers before waiting for them without a limit at exit. These workers get SIGKILL instead.
    """
    iterator: Any = iter(loader)
    for process in iterator._workers:
        process._popen.terminate = process._popen.kill
    _running.add(iterator)
    watch_workers(iterator, describe)
    return iterator


def watch_workers(iterator: Any, describe: Callable[[Sequence[int]], str]) -> None:
    """Register torch's iterator over a loader for `report_dead_workers`, if it has workers."""
    if getattr(iterator, "_workers", None):
        _watched[iterator] = describe


@contextlib.contextmanager
def report_dead_workers() -> Iterator[None]:
    """Turn the errors that follow from the death of a worker process into a clear one.

    Torch raises a RuntimeError, in any place, where it sees the death first; else reading from the process fails in
    one of many ways.

    Raises:
        DataError: If a worker has died.
    """
    _forget_dead_workers()
    has_gradients = torch.is_grad_enabled()
    try:
        yield
    except Exception as error:
        torch.set_grad_enabled(has_gradients)  # torch's handler may have raised in the exit of `no_grad`
        death = worker_death(error)
        if death is None:
            raise
        raise death from error


def _forget_dead_workers() -> None:
    """Forget the iterators whose workers have died: later errors do not follow from that."""
    for iterator in list(_watched):
        if any(process.exitcode is not None for process in iterator._workers):
            del _watched[iterator]


def worker_death(error: Exception) -> DataError | None:
    """Return the error to raise instead of one that follows from the death of a worker process; None for others."""
    if not isinstance(error, (RuntimeError, OSError, EOFError, pickle.UnpicklingError)):
        return None
    try:
        if isinstance(error, OmnitrainError) or "in DataLoader worker process" in str(error):  # raised in a worker
            return None
        with _default_child_signal():
            death = _worker_death_error(error)
    except RuntimeError as later:  # by torch's handler, before it was disabled; once for each worker that dies
        if not str(later).startswith("DataLoader worker (pid"):
            raise
        return worker_death(later)
    _forget_dead_workers()
    return death


@contextlib.contextmanager
def _default_child_signal() -> Iterator[None]:
    """Disable torch's handler of SIGCHLD, which raises RuntimeError anywhere, and so loses exit codes."""
    handler = _sigchld_action() if hasattr(signal, "SIGCHLD") else None
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    with contextlib.suppress(RuntimeError):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # which runs what is pending first
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


def _sigchld_action() -> Any:
    """Return what SIGCHLD does. Torch's handler may run in between, and raises once for each worker that dies."""
    while True:
        with contextlib.suppress(RuntimeError):
            return signal.getsignal(signal.SIGCHLD)


def _worker_death_error(error: Exception) -> DataError | None:
    """Return the error for a worker that has died, or None."""
    workers = [(iterator, *entry) for iterator in _watched for entry in enumerate(iterator._workers)]
    frames, text = traceback.walk_tb(error.__traceback__), str(error)
    is_of_loader = any(frame.f_code.co_filename.endswith("dataloader.py") for frame, _ in frames)
    if workers and not isinstance(error, RuntimeError) and is_of_loader:
        processes = {process.sentinel: process for _, _, process in workers}
        for sentinel in connection.wait(list(processes), timeout=_DYING_S):
            processes[sentinel].join(_DYING_S)  # its pipes close slightly before the process ends
    for iterator, number, process in workers:
        code = process.exitcode
        is_named = text.startswith("DataLoader worker (pid") and re.search(rf"\b{process.pid}\b", text) is not None
        has_finished = code == 0 and not iterator._workers_status[number]  # with its part of a stream
        if not is_named and (code is None or has_finished):
            continue
        tasks = sorted(task for task, about in iterator._task_info.items() if about == (number,))
        samples = _watched[iterator](tasks) if tasks else "nothing"
        how, remedy = (
            text.partition(") ")[2].partition(".")[0] if is_named else "has ended",
            "Read them with num_workers=0 to see what ends the process.",
        )
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            how, remedy = f"was killed by {name} (exit code {code})", _REMEDIES.get(name, remedy)
        elif code is not None:
            how = f"ended with exit code {code}"
        return DataError(f"Worker process {number} (pid {process.pid}) {how} while it had to read {samples}. {remedy}")
    return None


# Seconds that a worker whose pipe is closed has to end.
_DYING_S = 10.0
_REMEDIES = {
    "SIGKILL": "The system does that where memory runs out (`dmesg` says so): use fewer workers, or a smaller "
    "`prefetch_factor`.",
    "SIGBUS": "That often means that /dev/shm is full: enlarge it (docker run --shm-size=8g), or use fewer workers.",
}


def stop_workers(iterator: Any) -> None:
    """End the workers of torch's iterator, if it has any.

    If the garbage collector ends them, the queues may be closed already, and it waits 5 seconds per worker.
    """
    if iterator is not None:
        _watched.pop(iterator, None)
        iterator._shutdown_workers()


def outlive_signals(worker: int) -> None:
    """Leave signals to the main process: many are sent to all processes of a run, which still needs its workers.

    The signals are caught, not ignored or blocked: programs that a dataset starts would inherit that.
    """
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _ignore_signal)


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    pass


@atexit.register  # after torch's and multiprocessing's, so that it runs before them
def _stop_all_workers() -> None:
    for iterator in list(_running):
        stop_workers(iterator)
