"""Signals: the first lets the current step finish and ends the run in order, the second leaves at once.

SIGUSR1 asks for a checkpoint and lets the run go on.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from omnitrain.events import Callback

if TYPE_CHECKING:
    from omnitrain.trainers.base import BaseTrainer

__all__ = ["Interrupt"]

logger = logging.getLogger("omnitrain")


class Interrupt(Callback):
    """Turns SIGTERM and SIGINT into a stop at the next step boundary, during `train()` in the main thread only.

    The handler only notes the signal: no collective, file or lock is touched inside it. After TRAIN_END the trainer
    raises `self.error`: SystemExit(143) for SIGTERM, KeyboardInterrupt for SIGINT, as the shell expects.
    """

    order = 0

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._previous: dict[int, Any] = {}
        self._trainer: BaseTrainer | None = None

    def on_train_start(self, trainer: BaseTrainer) -> None:
        """Install the handlers."""
        self.error, self._trainer, self._previous = None, trainer, {}
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows handlers in the main thread only
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        if trainer.store is not None and hasattr(signal, "SIGUSR1"):
            self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._ask_for_checkpoint)

    def on_train_end(self, trainer: BaseTrainer) -> None:
        """Put the earlier handlers back."""
        for number, handler in self._previous.items():
            # A handler that was not installed from Python reads as None and can only be replaced by the default.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous, self._trainer = {}, None

    def _ask_for_checkpoint(self, number: int, frame: FrameType | None) -> None:
        if self._trainer is not None:
            self._trainer.control.save = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        error = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        if self.error is not None or self._trainer is None:
            raise error
        self.error = error
        self._trainer.control.stop = "signal"
        # os.write is safe in a handler; logging may hold a lock that the interrupted code holds too
        text = f"{signal.Signals(number).name}: finishing the current step. Once more leaves at once.\n"
        os.write(2, text.encode())
