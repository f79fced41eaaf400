"""Early stopping: ends a run when its evaluations no longer improve."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from omnitrain.core.duration import Duration
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Callback, TrainerLike
from omnitrain.core.foreign_names import explain_call
from omnitrain.core.progress import Progress
from omnitrain.data.stateful import has_state

logger: logging.Logger = logging.getLogger("omnitrain")


class EarlyStopping(Callback):
    """Stops after `patience` evaluations, or so long, without a gain, or when `stopper(step, score)` returns True.

    The objective decides what is a gain (`optimization_metric`, `delta`) and counts the evaluations without one, so
    the count survives a resume. The trainer adds this callback for its arguments `patience` and `early_stopper`.

    Args:
        patience: Stop after this many evaluations in a row without a gain; or, for a duration such as "20ba", "2ep" or
            "1h", at the first evaluation that comes so long after the last gain. None never stops.
        stopper: Called after each evaluation with the step and the metric's value; True ends the run. If it has
            `state_dict()` and `load_state_dict(state)`, its state is kept in checkpoints.

    >>> EarlyStopping(patience=3).patience
    3
    """

    order = 20

    @explain_call
    def __init__(
        self,
        patience: int | str | Duration | None = None,
        stopper: Callable[[int, float], bool] | None = None,
    ) -> None:
        is_length = isinstance(patience, (str, Duration))
        if not is_length and patience is not None and (type(patience) is not int or patience < 1):
            raise ConfigError(
                f"`patience` must be a positive integer, a duration such as '20ba', or None, got {patience!r}. Leave "
                "it out to train all epochs."
            )
        if stopper is not None and not callable(stopper):
            raise ConfigError(f"`stopper` must be callable as stopper(step, score) -> bool, got {stopper!r}.")
        self.patience: int | Duration | None = Duration.parse(patience, "ba", "patience") if is_length else patience
        self.stopper = stopper
        self.gained_at: Progress | None = None
        """The position of the last gain, or of the start of the run, if `patience` is a duration."""
        self.stopped_at: int | None = None
        """The step at which the stopper ended the run; None before."""

    def on_train_start(self, trainer: TrainerLike) -> None:
        """End a resumed run at once if its patience has run out, or if its stopper ended it."""
        has_attributes = bool(getattr(self.stopper, "__dict__", None)) and not inspect.isroutine(self.stopper)
        if trainer.save_dir is not None and has_attributes and not has_state(self.stopper):
            logger.warning(
                "The early stopper %s has attributes, but no `state_dict()` and `load_state_dict(state)`: its "
                "counts start over if the run is resumed.", type(self.stopper).__name__,
            )  # fmt: skip
        if self.stopped_at != trainer.progress.step:  # from another run, or from a step after the resumed one
            self.stopped_at = None
        if self.gained_at is None or not trainer.progress.step or self.gained_at.step > trainer.progress.step:
            self.gained_at = copy.copy(trainer.progress)  # a run that does not continue the former one
        # a length runs out at an evaluation, which may be the next one, or interrupted
        is_judged = not isinstance(self.patience, Duration) or trainer.lifecycle.evaluated_step == trainer.progress.step
        is_out_of_patience = is_judged and self._is_out_of_patience(trainer)
        if (is_out_of_patience or self.stopped_at is not None) and not trainer.control.stop:
            trainer.stop("early_stopping")

    def on_eval_end(self, trainer: TrainerLike, metrics: Mapping[str, float]) -> None:
        objective = trainer.objective
        if not objective.evaluations_without_gain and objective.latest is not None:
            self.gained_at = copy.copy(trainer.progress)
        stops, step = self._is_out_of_patience(trainer), trainer.progress.step
        if self.stopper is not None and self.stopper(step, metrics[trainer.objective.key(metrics)]):
            stops, self.stopped_at = True, step
        if stops:
            trainer.stop("early_stopping")

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"stopper": self.stopper.state_dict()} if has_state(self.stopper) else {}  # type: ignore[union-attr]
        if isinstance(self.patience, Duration) and self.gained_at is not None:
            state["gained_at"] = self.gained_at.state_dict()
        return state if self.stopped_at is None else {**state, "stopped_at": self.stopped_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stopped_at = None if self.stopper is None else state.get("stopped_at")
        self.gained_at = Progress.from_state(state["gained_at"]) if "gained_at" in state else None
        if has_state(self.stopper) and "stopper" in state:
            self.stopper.load_state_dict(state["stopper"])  # type: ignore[union-attr]

    def _is_out_of_patience(self, trainer: TrainerLike) -> bool:
        objective, progress = trainer.objective, trainer.progress
        if not isinstance(self.patience, Duration):
            return self.patience is not None and objective.evaluations_without_gain >= self.patience
        # an evaluation that is not finite says nothing about a gain
        is_counted = objective.evaluations_without_gain > 0 and objective.latest is not None
        return is_counted and self.patience.has_passed(self.gained_at or progress, progress, trainer.limits)
