"""Python's garbage collection at step boundaries, on all ranks at once."""

from __future__ import annotations

import gc

from omnitrain.core.duration import Duration, Every
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Callback, TrainerLike


class GarbageCollection(Callback):
    """Collects cyclic garbage at an interval of the run, instead of whenever Python's counters say so.

    Python collects in the middle of a step, on each rank at another one, and all others wait for it. In a run with
    this callback the automatic collection is off, and every rank collects after the same steps. After the run,
    even one that failed, it is as it was before. Data loader workers that run already keep their own.

    Args:
        every: The interval: an int counts steps; or a duration of steps, epochs, samples or tokens.
        generation: The oldest generation that is collected: 0, 1 or 2; 2 is everything, and takes the longest.

    >>> callbacks = [GarbageCollection("500ba")]  # Trainer(..., callbacks=callbacks)
    """

    order = 0  # so that no other callback's error comes before the end of it
    asks_alone = False

    def __init__(self, every: int | str | Duration = "1000ba", generation: int = 1) -> None:
        """Check the arguments.

        Raises:
            ConfigError: If the interval is none, or is one of time or of the run, or there is no such generation.
        """
        duration = Duration.parse(every, "ba", "every")
        if duration.unit in ("s", "dur"):
            raise ConfigError(
                f"`every={every!r}` may be due after another step on each rank, and all ranks are to collect after the "
                "same. Give it in steps ('1000ba'), epochs, samples or tokens."
            )
        if isinstance(generation, bool) or generation not in (0, 1, 2):
            raise ConfigError(f"`generation` must be 0, 1 or 2, which is everything, got {generation!r}.")
        self.generation = generation
        self._every = Every(duration)
        self._was_enabled = False

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Collect everything once, and turn the automatic collection off."""
        self._every.restart(trainer.progress)
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()

    def on_step_end(self, trainer: TrainerLike) -> None:
        """Collect, if it is due."""
        if self._every.due(trainer.progress):
            gc.collect(self.generation)

    def on_train_end(self, trainer: TrainerLike) -> None:
        """Turn the automatic collection on again, if it was on before."""
        if self._was_enabled:
            self._was_enabled = False
            gc.enable()
