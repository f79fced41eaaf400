"""Intervals of logs, evaluations and checkpoints, and limits of the run."""

from __future__ import annotations

from collections.abc import Sequence

from omnitrain.core.duration import AnyInterval, Every, IntervalRule, Limits, make_interval
from omnitrain.core.events import Callback, TrainerLike


class Cadence(Callback):
    """Requests logs, evaluations and checkpoints at their intervals, and the end of the run at its first limit."""

    order = 0

    def __init__(
        self,
        limits: Limits,
        log: Sequence[IntervalRule],
        evaluate: Sequence[IntervalRule] | None,
        save: Sequence[IntervalRule] | None,
    ) -> None:
        self.limits = limits
        self.log: Every | AnyInterval = make_interval(log, limits)
        self.evaluate: Every | AnyInterval | None = None if evaluate is None else make_interval(evaluate, limits)
        self.save: Every | AnyInterval | None = None if save is None else make_interval(save, limits)
        rules = [rule for rules in (log, evaluate, save) for rule in rules or ()]
        has_time = any(duration.unit == "s" for duration in limits.durations)
        self.asks_alone: bool = has_time or any(rule.has_time or rule.is_function for rule in rules)
        """Whether a limit or interval is a time or a function: what is due may differ between ranks."""

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Start the intervals at the current position, and end a run that is already at its limit."""
        self.restart(trainer)
        self._stop_at_limit(trainer)

    def restart(self, trainer: TrainerLike) -> None:
        """Start the intervals at the current position."""
        for interval in (self.log, self.evaluate, self.save):
            if interval is not None:
                interval.restart(trainer.progress)

    def on_step_end(self, trainer: TrainerLike) -> None:
        progress = trainer.progress
        if self.log.due(progress):
            trainer.control.schedule("log")
        if self.evaluate is not None and self.evaluate.due(progress):
            trainer.control.schedule("evaluate")
        if self.save is not None and self.save.due(progress):
            trainer.control.schedule("save")
        self._stop_at_limit(trainer)

    on_epoch_end = on_step_end

    def _stop_at_limit(self, trainer: TrainerLike) -> None:
        reason = self.limits.reached(trainer.progress)
        if reason:
            trainer.control.schedule(reason)
