"""Retention: decides which checkpoints to keep and which to delete; `store.py` deletes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Kept:
    """The facts about a checkpoint that retention uses.

    >>> to_delete([Kept(10, score=0.9), Kept(20, score=0.5), Kept(30, score=0.7)], keep_last=1)
    [20]
    """

    step: int
    score: float | None = None
    """The value of the metric to optimize at this step; None if there was no evaluation, or it was not finite."""
    sequence: int = 0
    """The number of the save in this folder. A run that went back to an earlier step saves lower steps later."""
    best: bool = False
    """Whether it was the best so far when it was saved."""
    for_best: bool = False
    """Whether that was the only reason to save it: it is deleted once `keep_best` others are better."""


def to_delete(
    checkpoints: Sequence[Kept],
    keep_last: int | None,
    keep_best: int = 1,
    keep_every: int | None = None,
    direction: Literal["max", "min"] = "max",
) -> list[int]:
    """Return the steps to delete, the earliest save first; the newest and the best are never among them.

    Args:
        checkpoints: All complete ones, in any order.
        keep_last: How many of the newest to keep, not counting those saved only for being the best; None keeps all
            others.
        keep_best: How many of the best to keep. Ties go to the earlier step; without a finite score there is no best.
        keep_every: Keep steps divisible by this.
        direction: Whether a higher or a lower score is better.
    """
    saved = sorted(checkpoints, key=lambda kept: (kept.sequence, kept.step))
    sign = -1 if direction == "max" else 1
    ranked = sorted((sign * k.score, k.step) for k in saved if k.score is not None and math.isfinite(k.score))
    regular = [kept for kept in saved if not kept.for_best]
    keep = {kept.step for kept in saved[-1:]}
    keep |= {kept.step for kept in (regular if keep_last is None else regular[-max(keep_last, 1) :])}
    keep |= {step for _, step in ranked[: max(keep_best, 1)]}
    keep |= {kept.step for kept in [k for k in saved if k.best][-1:]}
    if keep_every:
        keep |= {kept.step for kept in saved if kept.step % keep_every == 0}
    return [kept.step for kept in saved if kept.step not in keep]
