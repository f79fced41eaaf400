"""Deletion of old checkpoints, chosen by `checkpoint/retention.py`."""

from __future__ import annotations

from omnitrain.checkpoint.store import Store
from omnitrain.core.errors import Tolerance
from omnitrain.core.events import Callback, TrainerLike


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
        # The steps of an earlier run that are still to be deleted.
        self._stale_steps: set[int] = set()
        self._tolerance = Tolerance("The list of checkpoints", "Old checkpoints stay until the next save.")

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Record the checkpoints of an earlier run, if this run replaces it."""
        self._stale_steps = set()
        if self.replaces and trainer.lifecycle.saved_at is None and trainer.is_main_process:
            with self._tolerance:
                self._stale_steps = {info.step for info in self.store.all_infos()}

    def on_save_end(self, trainer: TrainerLike) -> None:
        if not trainer.is_main_process:
            return
        with self._tolerance:
            if self._stale_steps:
                path = trainer.lifecycle.saved_path  # of a step that the earlier run may have saved, too
                self._stale_steps = {step for step in self._stale_steps if self.store.path(step) != path}
                self._stale_steps -= set(self.store.delete(self._stale_steps))
            self.store.prune(self.keep_last, self.keep_best, self.keep_every, trainer.objective.direction)
