"""Deletion of old checkpoints."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

from omnitrain.checkpoint.manifest import SAVE_ORDER, CheckpointInfo
from omnitrain.checkpoint.store import Store
from omnitrain.core.errors import Tolerance
from omnitrain.core.events import Callback, TrainerLike


def to_delete(
    checkpoints: Sequence[CheckpointInfo],
    keep_last: int | None,
    keep_best: int = 1,
    keep_every: int | None = None,
    direction: Literal["max", "min"] = "max",
) -> list[int]:
    """Return the steps to delete, the earliest save first; never the newest or the best.

    Args:
        checkpoints: All complete ones, in any order.
        keep_last: How many of the newest to keep, not counting those saved only as the best; None keeps all of these.
        keep_best: How many of the best to keep. Ties go to the earlier step; without a finite score none is best.
        keep_every: Keep steps divisible by this.
        direction: Whether a higher or a lower score is better.

    >>> to_delete([CheckpointInfo(10, 0.9), CheckpointInfo(20, 0.5), CheckpointInfo(30, 0.7)], keep_last=1)
    [20]
    """
    saved = sorted(checkpoints, key=SAVE_ORDER)
    sign = -1 if direction == "max" else 1
    ranked, regular, former_bests, keep = [], [], [], set[int]()
    for info in saved:
        if info.score is not None and math.isfinite(info.score):
            ranked.append((sign * info.score, info.step))
        if not info.for_best:
            regular.append(info.step)
        if info.best:
            former_bests.append(info.step)
        if keep_every and info.step % keep_every == 0:
            keep.add(info.step)
    if saved:
        keep.add(saved[-1].step)
    keep.update(regular if keep_last is None else regular[-max(keep_last, 1) :])
    keep.update(step for _, step in sorted(ranked)[: max(keep_best, 1)])
    keep.update(former_bests[-1:])
    return [info.step for info in saved if info.step not in keep]


class Retention(Callback):
    """Deletes checkpoints after each new one, except for the newest n, the best n and those of every k-th step.

    Args:
        store: The run's checkpoints.
        keep_last: Number of newest checkpoints to keep; None keeps all.
        keep_best: Number of best checkpoints to keep.
        keep_every: Keep checkpoints of steps divisible by this.
        replaces: Whether to delete the checkpoints of an earlier run in the same folder once this run has saved one.
        reduces: Whether to keep only the weights of all checkpoints but the newest.
    """

    order = 30

    def __init__(
        self,
        store: Store,
        keep_last: int | None,
        keep_best: int,
        keep_every: int | None,
        *,
        replaces: bool,
        reduces: bool = False,
    ) -> None:
        self.store = store
        self._to_delete = functools.partial(to_delete, keep_last=keep_last, keep_best=keep_best, keep_every=keep_every)
        self.replaces = replaces
        self.reduces = reduces
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
            self.store.prune(functools.partial(self._to_delete, direction=trainer.objective.direction))
            if self.reduces:
                self.store.keep_only_weights()
