"""Progress of a run: counters, and the time by phase. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Progress:
    """The position of a run, saved in every checkpoint.

    Counts are totals over all processes, so a position means the same on any number of them. `samples_in_epoch` is
    the position in the epoch's order of samples: a resume continues there without reading the samples before it.

    >>> progress = Progress(epoch_size=60)
    >>> progress.advance(samples=30)
    >>> progress.step, progress.samples_in_epoch, progress.epochs
    (1, 30, 0.5)
    """

    epoch: int = 0
    """Completed epochs, whose data were used up."""
    step: int = 0
    """Optimizer updates done. A skipped step (overflow, non-finite loss) does not count."""
    samples_in_epoch: int = 0
    """Samples of the dataset consumed in the current epoch, however many rows a collator made of them."""
    samples: int = 0
    """Samples consumed since the start of the run."""
    tokens: int = 0
    """Tokens consumed since the start of the run; 0 if batches have none."""
    seconds: float = 0.0
    """Wall-clock seconds inside `train()`, including evaluations and the earlier parts of a resumed run."""
    skipped_steps: int = 0
    """Steps without an update, because of the loss scaler, `on_nonfinite="skip"` or a window without any label."""
    step_in_epoch: int = 0
    """Optimizer updates in the current epoch."""
    batches_in_epoch: int = 0
    """Micro-batches consumed in the current epoch, on all ranks; some loaders have no other count."""
    epoch_size: int | None = None
    """Samples in one epoch; None for a stream of unknown length."""

    def advance(self, samples: int, tokens: int = 0, skipped: bool = False, batches: int = 0) -> None:
        """Count one window of `samples` samples in `batches` micro-batches, as an update unless it was skipped."""
        if skipped:
            self.skipped_steps += 1
        else:
            self.step += 1
            self.step_in_epoch += 1
        self.samples_in_epoch += samples
        self.batches_in_epoch += batches
        self.samples += samples
        self.tokens += tokens

    def leave_out(self, samples: int, batches: int) -> None:
        """Move past a window that is not trained on: neither a step nor consumed samples."""
        self.samples_in_epoch += samples
        self.batches_in_epoch += batches

    def close_epoch(self, complete: bool) -> None:
        """Leave the current epoch; it counts as done only if it is `complete`."""
        if complete:
            self.epoch += 1
            self.samples_in_epoch = self.batches_in_epoch = self.step_in_epoch = 0

    @property
    def is_epoch_consumed(self) -> bool:
        """Whether every sample of the current epoch was consumed, even if the epoch is not closed yet."""
        return self.epoch_size is not None and self.samples_in_epoch >= self.epoch_size > 0

    @property
    def epochs(self) -> float:
        """Epochs done, the current one as a fraction; an int at the end of an epoch, and on streams without length.

        The fraction stays below 1 until the epoch is closed, so `floor(epochs)` is always `epoch`.
        """
        if not self.epoch_size or not self.samples_in_epoch:
            return self.epoch
        fraction = min(self.samples_in_epoch / self.epoch_size, 1.0)
        return min(self.epoch + fraction, math.nextafter(self.epoch + 1.0, 0.0))

    @property
    def position(self) -> tuple[int, int, int]:
        """Steps, skipped steps and epochs. Equal positions are the same moment of the run."""
        return self.step, self.skipped_steps, self.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return all counters as JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """Build a Progress from `state_dict()`; an unknown key is an error, a missing one gets its default."""
        return cls(**state)


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
