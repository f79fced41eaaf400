"""The seconds of a run, by what they were spent on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

PHASES = ("data", "evaluation", "saving", "waiting", "setup")
"""What a run spends time on beside training: reading data, evaluating, saving, waiting for other ranks, and what comes
before the first step."""


class Clock:
    """Counts the seconds of each phase; inside of another phase, they count for the inner one alone.

    Only the host is timed: work that a device still does is in the phase that waits for it.

    >>> clock = Clock()
    >>> with clock.during("evaluation"):
    ...     clock.add("waiting", 0.25)
    >>> clock.seconds["waiting"], clock.training(10.25) <= 10.0
    (0.25, True)
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        """Seconds of each phase so far, those of the earlier parts of a resumed run included."""
        self.began_at: float = time.time()
        """When the run was started first, in seconds since 1970."""
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
        """Return the share of the time since the run was started first that has moved the model forward.

        What a kill has lost, and was done again, does not count, nor does the time until the restart.

        Args:
            total: The seconds of the run, of which a resumed run has those up to its checkpoint and its own.
        """
        return min(self.training(total) / max(time.time() - self.began_at, 1e-9), 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return what checkpoints keep, as JSON types."""
        return {"began_at": self.began_at, "seconds": dict(self.seconds)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from `state_dict()`; older checkpoints have none, and count from now on."""
        if state is not None:
            self.began_at = float(state["began_at"])
            self.seconds = {name: float(state["seconds"].get(name, 0.0)) for name in PHASES}
