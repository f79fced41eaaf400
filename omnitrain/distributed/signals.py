"""Detection of signals that the main thread has not handled.

Python runs handlers only in the main thread, between two calls: while it waits inside a library call, a signal has no
effect. But Python's low-level handler writes each signal into a pipe, where another thread can see it.
`callbacks/interrupt.py` decides what a signal does to a run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

# The same signal again within this time is the same request, sent to the process and to its group.
ECHO_SECONDS = 0.5

_lock = threading.RLock()  # a handler may interrupt another one
_unhandled: list[tuple[int, float]] = []
_first: list[tuple[int, float]] = []
# The two ends of the pipe, for reading and writing; empty if nobody listens.
_pipe: list[int] = []


def signal_error(number: int) -> BaseException:
    """Return the exception that ends a program as this signal does: KeyboardInterrupt, or exit code 128 + number."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + (number or signal.SIGTERM))


def listen() -> None:
    """Start recording signals; called in the main thread."""
    _first.clear()
    if _pipe:
        return
    _pipe[:] = os.pipe()
    for end in _pipe:
        os.set_blocking(end, False)
    earlier = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    if earlier != -1:  # an event loop needs it
        signal.set_wakeup_fd(earlier, warn_on_full_buffer=False)
        _close()


def stop_listening() -> None:
    """Undo `listen`."""
    _first.clear()
    if _pipe:
        signal.set_wakeup_fd(-1)
        _close()
        _unhandled.clear()


def handle(number: int) -> bool:
    """Record in a handler that this signal and all before it are handled; return False for an echo of the first."""
    with _lock:
        _read()
        _unhandled.clear()
        received_at = time.monotonic()
        if _first and not is_second(number, received_at):
            return False
        if not _first:
            _first.append((number, received_at))
        return True


def handled() -> int:
    """Return the first signal that the main thread has handled; 0 if none."""
    return _first[0][0] if _first else 0


def is_second(number: int, when: float) -> bool:
    """Return whether a signal is a second one, not the first one again by way of the process group."""
    first, first_at = _first[0] if _first else (_unhandled or [(number, when)])[0]
    return number != first or when - first_at >= ECHO_SECONDS


def unhandled() -> list[tuple[int, float]]:
    """Return each SIGTERM and SIGINT not yet handled, and when it was first seen."""
    with _lock:
        _read()
        return list(_unhandled)


def _read() -> None:
    with contextlib.suppress(BlockingIOError):
        while _pipe and (numbers := os.read(_pipe[0], 100)):
            received_at = time.monotonic()
            _unhandled.extend((number, received_at) for number in numbers if number in (signal.SIGTERM, signal.SIGINT))


def _close() -> None:
    with _lock:
        while _pipe:
            os.close(_pipe.pop())


def _leave_pipe_to_parent() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent process may have held it
    if _pipe:
        with contextlib.suppress(ValueError):  # forked by another thread
            signal.set_wakeup_fd(-1)
        _close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_pipe_to_parent)
