"""Progress of a run: only counters, without torch."""

from __future__ import annotations

import dataclasses
import math
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
    """Completed epochs: those whose data were used up."""
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
    """Micro-batches consumed in the current epoch, on all ranks: all that can be counted of some loaders."""
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
        """Steps, skipped steps and epochs: equal positions are the same moment of the run."""
        return self.step, self.skipped_steps, self.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return all counters as JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """Build a Progress from `state_dict()`; an unknown key is an error, a missing one gets its default."""
        return cls(**state)
