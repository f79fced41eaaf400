"""Graceful stop on SIGTERM and SIGINT, checkpoints on SIGUSR1.

The first signal ends the run after the current step; a second one exits at once. For signals in worker processes see
`data/workers.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

from omnitrain.core.events import Callback, TrainerLike
from omnitrain.distributed import signals
from omnitrain.distributed.signals import signal_error

logger: logging.Logger = logging.getLogger("omnitrain")


class Interrupt(Callback):
    """Turns SIGTERM and SIGINT into a stop at the next step boundary, only during `train()` in the main thread.

    The handler only records the signal: it touches no collective, file or lock. After TRAIN_END the trainer raises
    `signal_error(signal)`: SystemExit(143) for SIGTERM, KeyboardInterrupt for SIGINT, as the shell expects.
    """

    order = 0

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._previous_handlers: dict[int, Any] = {}
        self._trainer: TrainerLike | None = None
        self._pid = 0

    def on_train_start(self, trainer: TrainerLike) -> None:
        self.error, self._trainer, self._previous_handlers, self._pid = None, trainer, {}, os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows handlers in the main thread only
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous_handlers[signum] = signal.signal(signum, self._handle_signal)
        if trainer.save_dir is not None and hasattr(signal, "SIGUSR1"):
            self._previous_handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._request_checkpoint)
        signals.listen()

    def on_train_end(self, trainer: TrainerLike) -> None:
        if self._previous_handlers:
            signals.stop_listening()
        for signum in list(self._previous_handlers):
            self._restore_signal(signum)
        self._trainer = None

    def _restore_signal(self, signum: int) -> None:
        # A handler that was not installed by Python code reads as None, and can only be replaced by the default.
        handler = self._previous_handlers.pop(signum)
        signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def _request_checkpoint(self, signum: int, frame: FrameType | None) -> None:
        if self._trainer is not None and os.getpid() == self._pid:
            self._trainer.control.save = True

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        # A process forked during the run, usually a loader worker, inherits our handlers. Ctrl-C goes to all processes,
        # and the run still needs its workers; SIGTERM ends them.
        if os.getpid() != self._pid:
            if signum == signal.SIGTERM:
                self._restore_signal(signum)
                os.kill(os.getpid(), signum)
            return
        if not signals.handle(signum):
            return
        error = signal_error(signum)
        if self.error is not None or self._trainer is None:
            raise error
        self.error = error
        self._trainer.control.signal = signum
        self._trainer.control.stop = "signal"
        self._ignore_dead_workers()
        # os.write is safe in a handler; logging might wait for a lock that the interrupted code holds
        text = f"{signal.Signals(signum).name}: finishing the current step. Send it again to exit at once.\n"
        os.write(2, text.encode())

    def _ignore_dead_workers(self) -> None:
        """Keep torch from raising for dead workers at any point of this thread, such as in the middle of an update.

        The signal may have killed the workers of the user's loader, which still raises when asked for data.
        """
        signum = getattr(signal, "SIGCHLD", None)
        handler = None if signum is None else signal.getsignal(signum)
        if getattr(handler, "__module__", "") != "torch.utils.data._utils.signal_handling":
            return

        def ignore_errors(signum: int, frame: FrameType | None) -> None:
            with contextlib.suppress(RuntimeError):
                handler(signum, frame)  # type: ignore[operator]

        self._previous_handlers[signum] = signal.signal(signum, ignore_errors)  # type: ignore[arg-type, index]
