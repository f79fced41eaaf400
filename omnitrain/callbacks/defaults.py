"""The default callbacks of a trainer, from its arguments."""

from __future__ import annotations

from typing import Any

from omnitrain.callbacks.cadence import Cadence
from omnitrain.callbacks.early_stopping import EarlyStopping
from omnitrain.callbacks.interrupt import Interrupt
from omnitrain.callbacks.jsonl import JsonlLogger
from omnitrain.callbacks.progress_bar import ProgressBar
from omnitrain.callbacks.retention import Retention
from omnitrain.checkpoint.store import Store
from omnitrain.duration import Duration, Every, Limits
from omnitrain.events import Callback
from omnitrain.settings import Settings

__all__ = ["default_callbacks"]


def default_callbacks(settings: Settings, limits: Limits, store: Store | None, evaluates: bool) -> list[Callback]:
    """Return the callbacks for signals, intervals, early stopping and progress, and for files if the run writes any.

    Args:
        settings: The arguments of the trainer.
        limits: Where the run ends.
        store: The checkpoints of the run; None without a `save_dir`.
        evaluates: Whether the run evaluates.
    """

    def interval(name: str) -> Every:
        value: Any = getattr(settings, name)
        return Every(Duration.parse("1ep" if value is None else value, "ba", name), limits)

    evaluate = interval("eval_steps") if evaluates else None
    save = interval("save_steps") if store is not None else None
    patience = None if settings.patience == -1 else settings.patience
    found: list[Callback] = [
        Interrupt(),
        Cadence(limits, interval("log_steps"), evaluate, save),
        EarlyStopping(patience, settings.early_stopper),
        ProgressBar(settings.progress_bar),
    ]
    if store is not None:
        kept = settings.save_total_limit, settings.keep_best, settings.keep_every
        found += [JsonlLogger(), Retention(store, *kept, replaces=settings.overwrite)]
    return found
