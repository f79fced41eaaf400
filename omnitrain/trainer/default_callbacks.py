"""The callbacks of a trainer that its arguments ask for: its own, and its loggers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from omnitrain.arguments import Settings
from omnitrain.callbacks.cadence import Cadence
from omnitrain.callbacks.early_stopping import EarlyStopping
from omnitrain.callbacks.interrupt import Interrupt
from omnitrain.callbacks.retention import Retention
from omnitrain.checkpoint.store import Store
from omnitrain.core.duration import Duration, Every, Limits
from omnitrain.core.errors import ConfigError, MissingExtraError, did_you_mean
from omnitrain.core.events import Callback
from omnitrain.loggers.csv import CsvLogger
from omnitrain.loggers.jsonl import JsonlLogger
from omnitrain.loggers.progress_bar import ProgressBar
from omnitrain.loggers.rows import RowFile
from omnitrain.loggers.services import SERVICES
from omnitrain.loggers.tensorboard import TensorBoardLogger
from omnitrain.loggers.tracking import Tracking
from omnitrain.loggers.wandb import WandbLogger


def default_callbacks(
    settings: Settings, limits: Limits, store: Store | None, evaluates: bool, given: Sequence[Callback] = ()
) -> list[Callback]:
    """Return the callbacks for signals, intervals, early stopping and progress, and for files if the run writes any.

    Args:
        settings: The arguments of the trainer.
        limits: Where the run ends.
        store: The checkpoints of the run; None without a `save_dir`.
        evaluates: Whether the run evaluates.
        given: The user's own; a logger of theirs replaces the one that writes the same file.

    Raises:
        ConfigError: If `progress_bar` contradicts a ProgressBar among the callbacks.
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
    ]
    if not any(isinstance(one, ProgressBar) for one in given):
        found.append(ProgressBar(settings.progress_bar))
    elif settings.progress_bar is not None:
        raise ConfigError(
            f"`progress_bar={settings.progress_bar}` has no effect beside the ProgressBar in `callbacks`. Leave it "
            f"out, or make that one with enabled={settings.progress_bar}."
        )
    if store is not None:
        kept = settings.save_total_limit, settings.keep_best, settings.keep_every
        rows, taken = JsonlLogger(), {one.filename for one in given if isinstance(one, RowFile)}
        found += [rows] if rows.filename not in taken else []
        found.append(Retention(store, *kept, replaces=settings.overwrite))
    return found


_OWN: dict[str, type[Callback]] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "csv": CsvLogger}


def make_loggers(loggers: object, callbacks: Iterable[object], has_folder: bool = True) -> list[Callback]:
    """Return the callbacks for the trainer's argument `loggers`.

    Args:
        loggers: A name, or a list of names, of callbacks, and of objects of accelerate's `GeneralTracker`; or None.
        callbacks: The trainer's other callbacks.
        has_folder: Whether the run has a `save_dir`.

    Raises:
        ConfigError: If one of them is no logger or has no place to write to, or two would write to the same place.
        MissingExtraError: If a package is not installed.
    """
    given = [loggers] if isinstance(loggers, (str, Callback)) else loggers
    if given is None:
        return []
    if not isinstance(given, (list, tuple)):
        raise ConfigError(f"`loggers` must be a name or a list of names and loggers, got {given!r}.")
    made = [_make_logger(one) for one in given]
    places = [_place_of(one) for one in (*made, *callbacks) if isinstance(one, Callback)]
    for place in filter(None, places):
        if places.count(place) > 1:
            raise ConfigError(
                f"`loggers` has {place} twice, or beside the same one in `callbacks`: each row would be there twice. "
                "Leave one out."
            )
    files = [] if has_folder else [one.filename for one in made if isinstance(one, RowFile)]
    if files:
        raise ConfigError(f"`loggers` asks for {files[0]!r}, and there is no place for it. Pass `save_dir`.")
    return made


def _make_logger(one: object) -> Callback:
    if isinstance(one, Callback):
        return one
    if isinstance(one, type):
        raise ConfigError(f"`loggers` takes names and objects, got the class {one.__name__}. Pass {one.__name__}(...).")
    if not isinstance(one, str):
        try:
            return Tracking(one)  # type: ignore[arg-type]  # which refuses what is no tracker
        except ConfigError as error:
            raise ConfigError(f"`loggers` holds {one!r}, which is no name and no logger. {error}") from error
    if one in _OWN:
        if one != "csv" and find_spec(one) is None:
            raise MissingExtraError(f"loggers={[one]}", one, one)
        return _OWN[one]()
    try:
        return Tracking(one)
    except ConfigError as error:
        names = ["tensorboard", "wandb", "csv", *(name for name in SERVICES if name not in _OWN)]
        raise ConfigError(
            f"`loggers` holds {one!r}, and there is no such logger.{did_you_mean(one, names)} There are "
            f"{', '.join(names)}; `accelerate.tracking.register_tracker_class` adds others."
        ) from error


def _place_of(logger: Callback) -> str:
    """Return where a logger writes to, in words; "" if nobody else could."""
    if isinstance(logger, TensorBoardLogger):
        return "TensorBoard" + (f" in {str(logger.log_dir)!r}" if logger.log_dir else "")
    if isinstance(logger, WandbLogger):
        return "W&B"
    if isinstance(logger, RowFile):
        return f"the file {logger.filename!r}"
    return f"the tracker {logger.name!r}" if isinstance(logger, Tracking) else ""
