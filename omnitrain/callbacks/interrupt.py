"""Signals: after the first, the current step finishes and the run ends in order; the second exits at once.

SIGUSR1 requests a checkpoint, and the run goes on. How worker processes treat signals is in `data/workers.py`.
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
    `signal_error` the signal: SystemExit(143) for SIGTERM, KeyboardInterrupt for SIGINT, as the shell expects.
    """

    order = 0

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._previous: dict[int, Any] = {}
        self._trainer: TrainerLike | None = None
        self._process = 0

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Install the handlers."""
        self.error, self._trainer, self._previous, self._process = None, trainer, {}, os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows handlers in the main thread only
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        if trainer.save_dir is not None and hasattr(signal, "SIGUSR1"):
            self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._ask_for_checkpoint)
        signals.listen()

    def on_train_end(self, trainer: TrainerLike) -> None:
        """Restore the earlier handlers."""
        if self._previous:
            signals.stop_listening()
        for number in list(self._previous):
            self._put_back(number)
        self._trainer = None

    def _put_back(self, number: int) -> None:
        # A handler that was not installed by Python code reads as None, and can only be replaced by the default.
        handler = self._previous.pop(number)
        signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _ask_for_checkpoint(self, number: int, frame: FrameType | None) -> None:
        if self._trainer is not None and os.getpid() == self._process:
            self._trainer.control.save = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._leave_to_parent(number)
            return
        if not signals.handle(number):
            return
        error = signal_error(number)
        if self.error is not None or self._trainer is None:
            raise error
        self.error = error
        self._trainer.control.signal = number
        self._trainer.control.stop = "signal"
        self._let_workers_die()
        # os.write is safe in a handler; logging might wait for a lock that the interrupted code holds
        text = f"{signal.Signals(number).name}: finishing the current step. Send it again to leave at once.\n"
        os.write(2, text.encode())

    def _leave_to_parent(self, number: int) -> None:
        """Handle a signal in a process forked during the run, usually a loader's worker, which inherits our handlers.

        Ctrl-C goes to all processes, and the run still needs its workers. SIGTERM ends them.
        """
        if number == signal.SIGTERM:
            self._put_back(number)
            os.kill(os.getpid(), number)

    def _let_workers_die(self) -> None:
        """Keep torch from raising for dead workers wherever this thread is, for instance in the middle of an update.

        The signal may have killed the workers of the user's own loader. That loader still raises when asked for data.
        """
        number = getattr(signal, "SIGCHLD", None)
        handler = None if number is None else signal.getsignal(number)
        if getattr(handler, "__module__", "") != "torch.utils.data._utils.signal_handling":
            return

        def tolerate(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(RuntimeError):
                handler(number, frame)  # type: ignore[operator]

        self._previous[number] = signal.signal(number, tolerate)  # type: ignore[arg-type, index]
