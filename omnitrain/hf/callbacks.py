"""Dispatch of events to transformers' callbacks, and callbacks for training arguments."""

from __future__ import annotations

import logging
from typing import Any

import transformers
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import CallbackHandler

from omnitrain.core.events import Callback
from omnitrain.core.progress import Progress
from omnitrain.hf.arguments import enum_value

logger: logging.Logger = logging.getLogger("omnitrain")

# The callbacks of `report_to`. Their errors are logged and do not end the run, as with `loggers`.
_TRACKERS = tuple(INTEGRATION_TO_CALLBACK.values())
# Default callbacks of transformers that ours replace: they stay in the list, but are not called.
_REPLACED = (
    transformers.DefaultFlowCallback,
    transformers.ProgressCallback,
    DEFAULT_PROGRESS_CALLBACK,  # a different class in a notebook
)


class CombinedControl:
    """The requests of callbacks: transformers' flags `should_...`, and all other attributes of our `Control`."""

    def __init__(self, trainer: Any) -> None:
        vars(self)["_trainer"] = trainer  # not by `self._trainer =`, which __setattr__ would forward

    def _target(self, name: str) -> Any:
        return self._trainer.engine.control if name.startswith("should_") else self._trainer.lifecycle.control

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target(name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target(name), name, value)


class TransformersCallbacks(CallbackHandler):
    """transformers' callbacks, in a list like that of a stock Trainer, after a `first` one of ours.

    They get `args`, which differ from the arguments of transformers' loop.
    """

    def __init__(
        self, handler: CallbackHandler, args: transformers.TrainingArguments, first: transformers.TrainerCallback
    ) -> None:
        vars(self).update(vars(handler))  # not super().__init__(), which would register each callback again
        self.callbacks: list[transformers.TrainerCallback]
        self.replaced: list[Any] = []
        """The user's callbacks that ours replace; they are not called."""
        self.failures: dict[Any, int] = {}
        """How often each tracker has failed."""
        self.args = args
        self.first = first

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Call all callbacks for an event, and return the control.

        An error of a tracker is logged, and the run continues; any other error is raised with a note on the callback.
        """
        for callback in (self.first, *self.callbacks):
            if type(callback) in _REPLACED or callback in self.replaced:
                continue
            try:
                result = getattr(callback, event)(
                    self.args, state, control, model=self.model, processing_class=self.processing_class,
                    optimizer=self.optimizer, lr_scheduler=self.lr_scheduler, train_dataloader=self.train_dataloader,
                    eval_dataloader=self.eval_dataloader, **kwargs,
                )  # fmt: skip
            except BaseException as error:
                if callback is not self.first:
                    error.add_note(f"Raised by the callback {type(callback).__name__}.{event}.")
                if isinstance(callback, _TRACKERS) and isinstance(error, Exception):
                    self._log_failure(callback, event, state, error)
                    continue
                raise
            control = control if result is None else result
        return control

    def _log_failure(self, callback: Any, event: str, state: Any, error: Exception) -> None:
        """Log failures 1, 10, 100, ... of a tracker, which may fail at every event."""
        count = self.failures[callback] = self.failures.get(callback, 0) + 1
        if str(count).strip("0") == "1":
            logger.warning(
                "%s.%s of `report_to` failed after step %d, failure %d of this tracker. The run continues, "
                "and its data may be lost.", type(callback).__name__, event, state.global_step, count,
                exc_info=error if count == 1 else None,
            )  # fmt: skip


# --- training arguments that are callbacks of ours: logging_first_step, save_strategy="best", eval_delay


def policy_callbacks(args: transformers.TrainingArguments | None) -> list[Callback]:
    """Return callbacks for the training arguments that are not plain intervals."""
    if args is None:
        return []
    requested: list[tuple[Any, Callback]] = [
        (args.logging_first_step, _LogsFirstStep()),
        (enum_value(args.save_strategy) == "best", _SavesBest()),
        (args.eval_delay, _DelaysEvaluations(args)),
    ]
    return [callback for is_requested, callback in requested if is_requested]


def is_delayed(args: transformers.TrainingArguments | None, progress: Progress) -> bool:
    """Return whether it is too early for an evaluation, by transformers' `eval_delay`."""
    if args is None or not args.eval_delay:
        return False
    return (progress.step if enum_value(args.eval_strategy) == "steps" else progress.epochs) < args.eval_delay


class _LogsFirstStep(Callback):
    order = 0

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == 1:
            trainer.request_log()


class _DelaysEvaluations(Callback):
    """Withdraws evaluations that their interval requests too early; it runs right after the interval's callback."""

    order = 0

    def __init__(self, args: transformers.TrainingArguments) -> None:
        self.args = args

    def on_step_end(self, trainer: Any) -> None:
        if is_delayed(self.args, trainer.progress):
            trainer.control.evaluate = False

    def on_epoch_end(self, trainer: Any) -> None:
        self.on_step_end(trainer)


class _SavesBest(Callback):
    """Saves after each evaluation that is the best so far."""

    order = 20

    def on_eval_end(self, trainer: Any, metrics: Any) -> None:
        if trainer.lifecycle.improved:
            trainer.request_save()
