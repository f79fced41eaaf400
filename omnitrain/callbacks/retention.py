"""Deletion of old checkpoints, chosen by `checkpoint/retention.py`."""

from __future__ import annotations

import logging

from omnitrain.checkpoint.store import Store
from omnitrain.core.errors import Tolerance
from omnitrain.core.events import Callback, TrainerLike

logger: logging.Logger = logging.getLogger("omnitrain")


class Retention(Callback):
    """Deletes checkpoints after each new one, except for the newest n, the best n and those of every k-th step.

    Args:
        store: The run's checkpoints.
        keep_last: Number of newest checkpoints to keep; None keeps all.
        keep_best: Number of best checkpoints to keep.
        keep_every: Keep checkpoints of steps divisible by this.
        replaces: Whether to delete the checkpoints of an earlier run in the same folder once this run has saved one.
    """

    order = 30

    def __init__(
        self, store: Store, keep_last: int | None, keep_best: int, keep_every: int | None, *, replaces: bool
    ) -> None:
        self.store = store
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.keep_every = keep_every
        self.replaces = replaces
        self._stale_steps: list[int] = []
        self._tolerance = Tolerance("The list of checkpoints", "Old checkpoints stay until the next save.")

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Record the checkpoints of an earlier run, if this run replaces it."""
        is_fresh = trainer.lifecycle.saved_at is None
        self._stale_steps = []
        if self.replaces and is_fresh:
            with self._tolerance:
                self._stale_steps = [info.step for info in self.store.checkpoint_infos()]

    def on_save_end(self, trainer: TrainerLike) -> None:
        """Delete old checkpoints after a new one is complete."""
        if not trainer.is_main_process:
            return
        stale_steps, self._stale_steps = self._stale_steps, []
        for step in stale_steps:
            if self.store.path(step) == trainer.lifecycle.saved_path:  # the run itself may have saved this step
                continue
            try:
                self.store.delete(step)
            except OSError as error:
                logger.warning("Cannot delete %r, of an earlier run: %s.", str(self.store.path(step)), error)
                self._stale_steps.append(step)  # until the next checkpoint
        with self._tolerance:
            self.store.prune(self.keep_last, self.keep_best, self.keep_every, trainer.objective.direction)
