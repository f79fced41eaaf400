"""Timing of a run by phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

# Phases of a run other than training: reading data, evaluating, saving, waiting for other ranks, and everything before
# the first step.
PHASES = ("data", "evaluation", "saving", "waiting", "setup")


class Clock:
    """Counts the seconds of each phase; those of a nested phase count only for the inner one.

    Only the host is timed: pending work of a device counts for the phase that waits for it.

    >>> clock = Clock()
    >>> with clock.during("evaluation"):
    ...     clock.add("waiting", 0.25)
    >>> clock.seconds["waiting"], clock.training(10.25) <= 10.0
    (0.25, True)
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        """Seconds of each phase so far, including those before a resume."""
        self.began_at: float = time.time()
        """The first start of the run, in seconds since 1970."""
        self._within = 0.0

    def add(self, phase: str, seconds: float) -> None:
        """Count seconds that have passed in a phase."""
        self.seconds[phase] += seconds
        self._within += seconds

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the time inside for a phase."""
        start, outside, self._within = time.perf_counter(), self._within, 0.0
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[phase] += max(spent - self._within, 0.0)
            self._within = outside + spent

    def training(self, total: float) -> float:
        """Return the seconds of training itself, out of the `total` of the run."""
        return max(total - sum(self.seconds.values()), 0.0)

    def goodput(self, total: float) -> float:
        """Return the share of the time since the first start of the run that was spent on training.

        Steps that a kill has lost do not count, nor does the time until the restart.

        Args:
            total: The seconds of the run; for a resumed run, those up to its checkpoint and since the resume.
        """
        return min(self.training(total) / max(time.time() - self.began_at, 1e-9), 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints, as JSON types."""
        return {"began_at": self.began_at, "seconds": dict(self.seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict()`."""
        self.began_at = float(state["began_at"])
        self.seconds = {name: float(state["seconds"].get(name, 0.0)) for name in PHASES}
