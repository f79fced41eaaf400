"""Python's garbage collection at step boundaries, on all ranks at once."""

from __future__ import annotations

import gc

from omnitrain.core.duration import Duration, Every
from omnitrain.core.errors import ConfigError, check_number
from omnitrain.core.events import Callback, TrainerLike


class GarbageCollection(Callback):
    """Collects cyclic garbage at an interval of the run, instead of when Python's counters trigger it.

    Python collects in the middle of a step, on each rank in a different one, and all other ranks wait. With this
    callback automatic collection is off during the run, and every rank collects after the same steps. It is
    restored after the run, even a failed one. Running data loader workers keep their own setting.

    Args:
        every: The interval: an int counts steps; or a duration of steps, epochs, samples or tokens.
        generation: The oldest generation to collect: 0, 1 or 2; 2 collects everything and takes longest.

    >>> callbacks = [GarbageCollection("500ba")]  # Trainer(..., callbacks=callbacks)
    """

    order = 0  # first, so that another callback's error cannot leave collection off
    asks_alone = False

    def __init__(self, every: int | str | Duration = "1000ba", generation: int = 1) -> None:
        """Check the arguments.

        Raises:
            ConfigError: If the interval is a time or a share of the run, or the generation does not exist.
        """
        duration = Duration.parse(every, "ba", "every")
        if duration.unit in ("s", "dur"):
            raise ConfigError(
                f"`every={every!r}` may be due after different steps on the ranks, and all ranks must "
                "collect after the same one. Give it in steps ('1000ba'), epochs, samples or tokens."
            )
        check_number("generation", generation, least=0, most=2, is_whole=True)
        self.generation = generation
        self._every = Every(duration)
        self._was_enabled = False

    def on_train_start(self, trainer: TrainerLike) -> None:
        self._every.restart(trainer.progress)
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()

    def on_checkpoint_loaded(self, trainer: TrainerLike) -> None:
        self._every.restart(trainer.progress)

    def on_step_end(self, trainer: TrainerLike) -> None:
        if self._every.due(trainer.progress):
            gc.collect(self.generation)

    def on_train_end(self, trainer: TrainerLike) -> None:
        if self._was_enabled:
            self._was_enabled = False
            gc.enable()
