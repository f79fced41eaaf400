"""Retention policy of checkpoints; `store.py` deletes."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# The sort key of checkpoints.
SAVE_ORDER = operator.attrgetter("sequence", "step")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The properties of a checkpoint that retention uses.

    >>> to_delete([CheckpointInfo(10, 0.9), CheckpointInfo(20, 0.5), CheckpointInfo(30, 0.7)], keep_last=1)
    [20]
    """

    step: int
    score: float | None = None
    """The value of the metric to optimize at this step; None if it was not evaluated or not finite."""
    sequence: int = 0
    """The number of the save in this folder; steps need not rise with it, as a run can resume from an earlier one."""
    best: bool = False
    """Whether its score was the best so far when it was saved."""
    for_best: bool = False
    """Whether that was the only reason to save it: it is deleted once `keep_best` others are better."""

    @classmethod
    def from_manifest(cls, content: Mapping[str, Any]) -> CheckpointInfo:
        """Return the properties in the content of omnitrain.json."""
        for_best = bool(content.get("for_best"))  # a folder written through `Store` need not have it
        return cls(content["step"], content["score"], content["sequence"], content["best"], for_best)


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
    """
    saved = sorted(checkpoints, key=SAVE_ORDER)
    sign = -1 if direction == "max" else 1
    ranked, regular, former_bests, keep = [], [], [], {info.step for info in saved[-1:]}
    for info in saved:
        if info.score is not None and math.isfinite(info.score):
            ranked.append((sign * info.score, info.step))
        if not info.for_best:
            regular.append(info.step)
        if info.best:
            former_bests.append(info.step)
        if keep_every and info.step % keep_every == 0:
            keep.add(info.step)
    keep.update(regular if keep_last is None else regular[-max(keep_last, 1) :])
    keep.update(step for _, step in sorted(ranked)[: max(keep_best, 1)])
    keep.update(former_bests[-1:])
    return [info.step for info in saved if info.step not in keep]
