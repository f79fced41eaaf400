"""Callbacks and loggers from the arguments of a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from omnitrain.arguments import Settings
from omnitrain.callbacks.cadence import Cadence
from omnitrain.callbacks.early_stopping import EarlyStopping
from omnitrain.callbacks.interrupt import Interrupt
from omnitrain.callbacks.retention import Retention
from omnitrain.checkpoint.store import Store
from omnitrain.core.duration import IntervalRule, Limits, parse_interval
from omnitrain.core.errors import ConfigError, did_you_mean
from omnitrain.core.events import Callback
from omnitrain.loggers.progress_bar import ProgressBar
from omnitrain.loggers.rows import CsvLogger, JsonlLogger, RowFile
from omnitrain.loggers.services import SERVICES
from omnitrain.loggers.tracking import TensorBoardLogger, Tracking, WandbLogger


def default_callbacks(
    settings: Settings, limits: Limits, store: Store | None, evaluates: bool, user_callbacks: Sequence[Callback] = ()
) -> list[Callback]:
    """Return the callbacks for signals, intervals, early stopping and progress, and for files if the run writes any."""

    def interval(name: str) -> list[IntervalRule]:
        value: Any = getattr(settings, name)
        return parse_interval("1ep" if value is None else value, name)

    evaluate = interval("eval_steps") if evaluates else None
    save = interval("save_steps") if store is not None else None
    patience = None if settings.patience == -1 else settings.patience
    callbacks: list[Callback] = [
        Interrupt(),
        Cadence(limits, interval("log_steps"), evaluate, save),
        EarlyStopping(patience, settings.early_stopper),
    ]
    if not any(isinstance(callback, ProgressBar) for callback in user_callbacks):
        if settings.progress_bar is not False:
            callbacks.append(ProgressBar(settings.progress_bar))
    elif settings.progress_bar is not None:
        raise ConfigError(
            f"`progress_bar={settings.progress_bar}` has no effect with the ProgressBar in `callbacks`. Leave it "
            f"out, or make that one with enabled={settings.progress_bar}."
        )
    if store is not None:
        rows, filenames = JsonlLogger(), {logger.filename for logger in user_callbacks if isinstance(logger, RowFile)}
        callbacks += [rows] if rows.filename not in filenames else []
        retention = settings.save_total_limit, settings.keep_best, settings.keep_every
        reduces = settings.save_only_model == "all_but_last"
        callbacks.append(Retention(store, *retention, replaces=settings.overwrite, reduces=reduces))
    return callbacks


_BUILTIN: dict[str, type[Callback]] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "csv": CsvLogger}


def make_loggers(loggers: object, callbacks: Iterable[object], has_folder: bool = True) -> list[Callback]:
    """Return the callbacks for the trainer's argument `loggers`."""
    specs = [loggers] if isinstance(loggers, (str, Callback)) else loggers
    if specs is None:
        return []
    if not isinstance(specs, (list, tuple)):
        raise ConfigError(f"`loggers` must be a name or a list of names and loggers, got {specs!r}.")
    instances = [_make_logger(logger) for logger in specs]
    destinations = [_destination(logger) for logger in (*instances, *callbacks) if isinstance(logger, Callback)]
    for destination in filter(None, destinations):
        if destinations.count(destination) > 1:
            raise ConfigError(
                f"`loggers` has {destination} twice, or also in `callbacks`: each row would be written "
                "twice. Leave one out."
            )
    files = [] if has_folder else [logger.filename for logger in instances if isinstance(logger, RowFile)]
    if files:
        raise ConfigError(f"`loggers` needs a folder for {files[0]!r}. Pass `save_dir`.")
    return instances


def _make_logger(spec: object) -> Callback:
    if isinstance(spec, Callback):
        return spec
    if isinstance(spec, type):
        raise ConfigError(
            f"`loggers` takes names and objects, got the class {spec.__name__}. Pass {spec.__name__}(...)."
        )
    if isinstance(spec, str) and spec in _BUILTIN:
        return _BUILTIN[spec]()
    try:
        return Tracking(spec)  # type: ignore[arg-type]  # which rejects what is no tracker
    except ConfigError as error:
        if not isinstance(spec, str):
            raise ConfigError(f"`loggers` holds {spec!r}, which is no name and no logger. {error}") from error
        names = dict.fromkeys([*_BUILTIN, *SERVICES])
        raise ConfigError(
            f"`loggers` holds {spec!r}, which is no known logger.{did_you_mean(spec, names)} There are "
            f"{', '.join(names)}; `accelerate.tracking.register_tracker_class` adds others."
        ) from error


def _destination(logger: Callback) -> str:
    """Return where a logger writes to, as text; "" if no other logger could."""
    if isinstance(logger, TensorBoardLogger):
        return "TensorBoard" + (f" in {str(logger.log_dir)!r}" if logger.log_dir else "")
    if isinstance(logger, WandbLogger):
        return "W&B"
    if isinstance(logger, RowFile):
        return f"the file {logger.filename!r}"
    return f"the tracker {logger.name!r}" if isinstance(logger, Tracking) else ""
