"""When to log, evaluate, save and finish, from the user's arguments."""

from __future__ import annotations

from omnitrain.duration import Every, Limits
from omnitrain.events import Callback, TrainerLike

__all__ = ["Cadence"]


class Cadence(Callback):
    """Asks for logs, evaluations and checkpoints at their intervals, and for the end at the first limit.

    Args:
        limits: Where the run ends.
        log: Interval of logs.
        evaluate: Interval of evaluations; None where there is no evaluation set.
        save: Interval of checkpoints; None where nothing is saved.
    """

    order = 0

    def __init__(self, limits: Limits, log: Every, evaluate: Every | None, save: Every | None) -> None:
        self.limits = limits
        self.log = log
        self.evaluate = evaluate
        self.save = save
        intervals = [one.duration for one in (log, evaluate, save) if one is not None]
        self.asks_alone: bool = any(duration.unit == "s" for duration in [*limits.durations, *intervals])
        """Whether there is a time among them: the clocks of the ranks differ."""

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Start the intervals where the run is, and end a run at once that has reached its limit already."""
        for interval in (self.log, self.evaluate, self.save):
            if interval is not None:
                interval.restart(trainer.progress)
        self._finish(trainer)

    def on_step_end(self, trainer: TrainerLike) -> None:
        """Ask for what is due at this step."""
        self._ask(trainer)
        self._finish(trainer)

    def on_epoch_end(self, trainer: TrainerLike) -> None:
        """Ask for what is due at the end of an epoch."""
        self._ask(trainer)
        self._finish(trainer)

    def _finish(self, trainer: TrainerLike) -> None:
        reason = self.limits.reached(trainer.progress)
        if reason:
            trainer.control.schedule(reason)

    def _ask(self, trainer: TrainerLike) -> None:
        if self.log.due(trainer.progress):
            trainer.control.schedule("log")
        if self.evaluate is not None and self.evaluate.due(trainer.progress):
            trainer.control.schedule("evaluate")
        if self.save is not None and self.save.due(trainer.progress):
            trainer.control.schedule("save")
