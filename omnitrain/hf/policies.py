"""Training arguments of transformers as callbacks: `logging_first_step`, `save_strategy="best"`, `eval_delay`."""

from __future__ import annotations

from typing import Any

import transformers

from omnitrain.core.events import Callback
from omnitrain.core.progress import Progress
from omnitrain.hf.arguments import enum_value


def policy_callbacks(args: transformers.TrainingArguments | None) -> list[Callback]:
    """Return callbacks for the training arguments that are not plain intervals."""
    callbacks: list[Callback] = []
    if args is not None and args.logging_first_step:
        callbacks.append(_LogsFirstStep())
    if args is not None and enum_value(args.save_strategy) == "best":
        callbacks.append(_SavesBest())
    if args is not None and args.eval_delay:
        callbacks.append(_DelaysEvaluations(args))
    return callbacks


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
