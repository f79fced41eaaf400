"""Logs and evaluations in TensorBoard, W&B and other services.

Decides which run of a service the values go to, and what is sent. The APIs of services come from `services.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omnitrain.compute.random_state import isolated_rng
from omnitrain.core.duration import Duration
from omnitrain.core.errors import ConfigError, MissingExtraError, did_you_mean, is_disk_error
from omnitrain.core.events import Histogram, TrainerLike
from omnitrain.core.files import replace_file
from omnitrain.core.foreign_names import explain_call
from omnitrain.core.metric_format import sort_for_display
from omnitrain.core.paths import folder_path
from omnitrain.loggers.logger import LogRow, Position, RowLogger, histogram_stats
from omnitrain.loggers.services import SERVICES, Service

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

logger: logging.Logger = logging.getLogger("omnitrain")

# Seconds between two attempts to open TensorBoard's file on a failing disk; each attempt leaves an empty file behind.
RETRY_S = 30.0


class Tracking(RowLogger):
    """Sends logs, evaluations, tests and the run's settings to a service, from the main process.

    Values are named `train/loss`, `eval/accuracy`, ... Checkpoints keep the id of the service's run, so a resumed
    training continues it, and a `test()` after the training goes there too. Rows that a killed process sent after
    its checkpoint are not sent again: the file `tracking-<name>.json` in `save_dir` has the last step. A failure of
    the service is logged, and its rows of that time are lost; the training continues.

    Args:
        tracker: A name: "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio", or that of a class
            registered with accelerate. Or an object of a subclass of `accelerate.tracking.GeneralTracker`; if it has
            `state_dict` and `load_state_dict`, a resumed training calls them to continue its run.
        project: The project or experiment for the run of a tracker by name.
        every: The interval of the rows of training, such as "100ba"; None sends each.
        **options: Passed to accelerate's class of that name; they override everything set here.

    Raises:
        ConfigError: If the tracker is unknown.
        MissingExtraError: If the package of the service is not installed.

    >>> from accelerate.tracking import GeneralTracker
    >>> class Printer(GeneralTracker):
    ...     name, requires_logging_directory, tracker = "printer", False, None
    ...     def log(self, values, step=None, **options):
    ...         print(step, values)
    >>> loggers = [Tracking(Printer(), every="100ba")]  # Trainer(..., loggers=loggers)
    """

    log_dir: str | Path | None = None
    """The folder of TensorBoard's files; None is one in `save_dir`."""

    def __init__(
        self,
        tracker: str | GeneralTracker,
        project: str | None = "omnitrain",
        every: int | str | Duration | None = None,
        **options: Any,
    ) -> None:
        self._class: Any = _tracker_class(tracker) if isinstance(tracker, str) else None
        self._user_tracker: Any = None if isinstance(tracker, str) else tracker
        if self._user_tracker is not None and options:
            raise ConfigError(f"Tracking takes no options with a tracker, got {options}. Pass them to the tracker.")
        if not isinstance(tracker, str) and not isinstance(
            tracker, import_module("accelerate.tracking").GeneralTracker
        ):
            raise ConfigError(
                "Tracking takes a name or an object of a subclass of accelerate.tracking.GeneralTracker, got "
                f"{tracker!r}. Define such a class with `start`, `log` and `finish`."
            )
        self.name: str = tracker if isinstance(tracker, str) else str(getattr(tracker, "name", type(tracker).__name__))
        self.project = project
        self.options = options
        self.purge_step: int | None = None
        """The step from which a service hides earlier values, if it can."""
        self._service: Service = SERVICES.get(self.name, Service())
        fate = "kept in memory until they can be written" if self._service.is_local else "lost"
        super().__init__(self.name, every, f"The rows of the time in between are {fate}.", tolerated=Exception)
        self._tracker: Any = None
        self._run_id: str | None = None
        # The state of the user's tracker in the checkpoint.
        self._state: dict[str, Any] | None = None
        self._has_opened = self._has_failed = False
        self._retry_at = -math.inf
        # The first step that is not in the run, if the service tells; otherwise the file of the rows that were sent.
        self._first_step = 0
        self._path: Path | None = None
        self._sent: dict[str, Position] = {}

    def on_exception(self, trainer: TrainerLike, error: BaseException) -> None:
        self._has_failed = True

    def state_dict(self) -> dict[str, Any]:
        get_state = getattr(self._user_tracker, "state_dict", None)
        state = {"tracker": self.name, "run_id": self._run_id, **self._pace.state_dict()}
        return {**state, "state": get_state()} if get_state is not None and self._has_opened else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the id of the run that a resumed training continues; that of another service is ignored."""
        if state.get("tracker", self.name) == self.name:
            self._run_id, self._state = state.get("run_id"), state.get("state")
            self._pace.load_state_dict(state)

    # --- the run of the service

    def _begin(self, trainer: TrainerLike, is_test: bool) -> bool:
        step = trainer.progress.step
        if not is_test and step == 0 and trainer.lifecycle.saved_at is None:
            self._run_id, self._has_opened = None, False  # a second, fresh training is another run
        if not trainer.is_main_process:
            return False
        is_stateless = self._user_tracker is not None and not hasattr(self._user_tracker, "load_state_dict")
        if self._has_opened and is_stateless and not (self._service.id_attribute or self._service.is_local):
            logger.warning("%s has ended its run and cannot resume it: the row is not sent.", self.name)
            return False
        self._has_failed, self._retry_at = False, -math.inf
        self.purge_step = None if is_test else step + 1 if step else 0
        self._load_sent(trainer)
        if not is_test:
            try:
                self._open(trainer)
            except Exception as error:
                if not (self._service.is_local and is_disk_error(error)):  # which the first row reports
                    raise
        return True

    def _open(self, trainer: TrainerLike) -> None:
        if self._tracker is not None:
            return
        is_new = self._run_id is None and self._state is None and not self._has_opened
        with _isolated_state():
            resume, tracker = self._service.resume_options(self._run_id), self._user_tracker
            if tracker is None:
                tracker = self._service.find_open_run()
            elif self._state is not None and hasattr(tracker, "load_state_dict"):
                tracker.load_state_dict(self._state)
            if tracker is None:
                folder = Path(trainer.save_dir or "runs")
                options = self._service.options(self, trainer, folder) | resume | self.options
                if self._class.requires_logging_directory and "logging_dir" not in options:
                    options["logging_dir"] = str(folder)
                tracker = self._class(options.pop("run_name", self.project), **options)
            elif tracker is self._user_tracker and self._run_id is not None:
                for name, value in resume.items():
                    if hasattr(tracker, name):
                        setattr(tracker, name, value)
                    else:
                        tracker.init_kwargs[name] = value
            tracker.main_process_only = False  # only the main process calls it
            if hasattr(tracker, "start"):  # before accelerate 1.9 the constructor opens the run
                tracker.start()
            self._run_id, self._first_step = self._service.run_id(tracker), self._service.first_step(tracker) or 0
            if is_new:
                self._service.describe_run(tracker, trainer)
            self._tracker, self._has_opened = tracker, True

    def _close(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with self._tolerance, _isolated_state():
                self._service.finish(tracker, self._has_failed)

    # --- rows

    def _flush(self, trainer: TrainerLike) -> None:
        if self._tracker is not None or time.monotonic() >= self._retry_at:
            super()._flush(trainer)

    def _end(self, trainer: TrainerLike) -> None:
        self._retry_at = -math.inf
        super()._end(trainer)

    def _recover(self, error: Exception) -> None:
        if not self._service.is_local or not is_disk_error(error):
            self._pending.clear()  # a row that the service rejects must not keep back all others
        elif self.name == "tensorboard":  # a writer that has failed stays so: another file gets the rows
            self._retry_at = time.monotonic() + RETRY_S
            self.purge_step = self._pending[0].step if self._pending else None
            tracker, self._tracker = self._tracker, None
            if tracker is not None:
                with contextlib.suppress(Exception):
                    tracker.finish()

    def _write(self, row: LogRow) -> None:
        if row.step < self._first_step and row.kind != "test":
            return
        self._record_sent(row)
        with _isolated_state():
            values: dict[str, Any] = {}
            for name, value in sort_for_display(row.values).items():
                if isinstance(value, str):
                    self._service.log_text(self._tracker, name, value, row.step)
                elif isinstance(value, Histogram):
                    if not self._service.log_histogram(self._tracker, name, value, row.step):
                        values |= histogram_stats(name, value)
                elif name != "step":  # which is the axis
                    values[row.kind + self._service.separator + name.removeprefix(f"{row.kind}_")] = float(value)
            if row.kind == "test":
                self._service.log_test(self._tracker, values, row.step)
            elif values:
                self._tracker.log(values, step=row.step)

    def _record_sent(self, row: LogRow) -> None:
        """Note that a row is sent, before it is: a kill in between loses the row, which is better than a duplicate."""
        if self._path is None or row.kind == "test":
            return
        self._sent[row.kind] = (row.step, round(float(row.epoch), 6))
        with self._tolerance:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps({"run_id": self._run_id, "sent": self._sent}).encode()
            replace_file(self._path, content, sync=False)  # as every row writes it

    def _load_sent(self, trainer: TrainerLike) -> None:
        """Load the positions that earlier processes sent to the resumed run."""
        self._path, self._sent = None, {}
        if trainer.save_dir is None or self._service.is_local:  # which know themselves what they have
            return
        self._path = Path(trainer.save_dir) / f"tracking-{self.name}.json"
        if self._run_id is None and trainer.progress.step == 0:
            return
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            record = json.loads(self._path.read_text(encoding="utf-8"))
            if self._run_id is None and self._service.id_attribute:  # a checkpoint from before the tracker was added
                self._run_id = record["run_id"]
            if record["run_id"] == self._run_id:
                self._sent = {kind: (int(step), float(epoch)) for kind, (step, epoch) in record["sent"].items()}
                self._last.update(self._sent)


class TensorBoardLogger(Tracking):
    """Writes logs, evaluations and the run's settings as TensorBoard event files.

    Scalars are named `train/loss`, `train/learning_rate`, `eval/loss`, `test/loss`, ...; the settings are the text
    `config`. Reported texts and histograms are included. A resumed run hides values after its checkpoint, and a
    fresh run hides all values of earlier runs in the folder, so no step appears twice. While the disk fails, rows
    wait in memory. Requires the extra `tensorboard`.

    Args:
        log_dir: The folder; None is `tensorboard` in the run's `save_dir`, or `runs/tensorboard` without one.
        every: The interval of the rows of training, such as "100ba"; None sends each.

    >>> reporters = [TensorBoardLogger()]  # Trainer(..., callbacks=reporters)
    """

    @explain_call
    def __init__(self, log_dir: str | Path | None = None, every: int | str | Duration | None = None) -> None:
        super().__init__("tensorboard", every=every)
        is_address = "://" in str(log_dir)  # TensorBoard itself can write to some stores
        self.log_dir: str | Path | None = log_dir if log_dir is None or is_address else folder_path(log_dir, "log_dir")


class WandbLogger(Tracking):
    """Sends logs, evaluations and the run's settings to Weights & Biases, from the main process.

    Values are named `train/loss`, `eval/accuracy`, ...; test results go to the run's summary. Checkpoints keep the id
    of the W&B run, so a resumed training continues it. A run that you opened with `wandb.init()` is used
    unchanged and left open. While the disk of W&B's folder fails, rows wait in memory. Requires the extra `wandb`.

    Args:
        project: The W&B project; None is W&B's default.
        every: The interval of the rows of training, such as "100ba"; None sends each.
        **init_kwargs: Passed on to `wandb.init()`; they override everything set here.

    >>> reporter = WandbLogger(project="digits", tags=["baseline"])
    >>> callbacks = [reporter]  # Trainer(..., callbacks=callbacks)
    """

    def __init__(
        self, project: str | None = None, every: int | str | Duration | None = None, **init_kwargs: Any
    ) -> None:
        super().__init__("wandb", project, every, **init_kwargs)


def _tracker_class(name: str) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    classes: dict[str, Any] = {str(getattr(key, "value", key)): cls for key, cls in LOGGER_TYPE_TO_CLASS.items()}
    if name not in classes and name not in SERVICES:
        names = sorted({*classes, *SERVICES})
        raise ConfigError(
            f"Tracking has no tracker {name!r}.{did_you_mean(name, names)} The trackers are {', '.join(names)}."
        )
    if name in SERVICES and find_spec(name) is None:
        raise MissingExtraError(f"The logger {name!r}", name, name if name in ("tensorboard", "wandb") else "")
    if name not in classes:
        raise MissingExtraError(f"Tracking({name!r})", "'accelerate>=1.12'")
    return classes[name]


@contextlib.contextmanager
def _isolated_state() -> Iterator[None]:
    """Isolate the random numbers of the training from a tracker, and provide a state of accelerate.

    The log messages of trackers need one. If none exists, a temporary one of a single process is provided: one that
    accelerate creates would look for other processes, set the number of threads, and persist.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    shared: dict[str, Any] = PartialState._shared_state  # type: ignore[assignment]
    if shared:
        with isolated_rng():
            yield
        return
    single = {"num_processes": 1, "process_index": 0, "local_process_index": 0, "distributed_type": DistributedType.NO}
    shared.update(single, _cpu=True, backend=None, debug=False, device=torch.device("cpu"), fork_launched=False)
    try:
        with isolated_rng():
            yield
    finally:
        shared.clear()
