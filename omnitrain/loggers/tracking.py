"""Logs and evaluations in MLflow, Comet and other services of accelerate.

Decides which run of a service the values go to, and what is sent. Names of values come from `tensorboard.py`, the APIs
of services from `services.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from omnitrain.compute.random_state import isolated_rng
from omnitrain.core.duration import Duration
from omnitrain.core.errors import ConfigError, MissingExtraError, Tolerance, did_you_mean
from omnitrain.core.events import Callback, Histogram, TrainerLike
from omnitrain.core.files import replace_file
from omnitrain.core.metric_format import sort_for_display
from omnitrain.core.progress import Progress
from omnitrain.loggers.rows import Pace, histogram_stats, row_kind
from omnitrain.loggers.services import SERVICES, Service
from omnitrain.loggers.tensorboard import dashboard_names

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

logger: logging.Logger = logging.getLogger("omnitrain")

Position = tuple[int, float]
"""Step and epoch of a row."""


class Tracking(Callback):
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

    order: ClassVar[int] | int = 40

    def __init__(
        self,
        tracker: str | GeneralTracker,
        project: str = "omnitrain",
        every: int | str | Duration | None = None,
        **options: Any,
    ) -> None:
        self._pace = Pace(every)
        self._class: Any = _tracker_class(tracker) if isinstance(tracker, str) else None
        self._user_tracker: Any = None if isinstance(tracker, str) else tracker
        if self._user_tracker is not None and options:
            raise ConfigError(f"Tracking takes no options with a tracker, got {options}. Pass them to the tracker.")
        self.name: str = tracker if isinstance(tracker, str) else _tracker_name(tracker)
        self.project = project
        self.options = options
        self._service: Service = SERVICES.get(self.name, Service())
        self._tracker: Any = None
        self._run_id: str | None = None
        # The state of the user's tracker in the checkpoint.
        self._state: dict[str, Any] | None = None
        self._has_opened = self._is_training = False
        self._path: Path | None = None
        # The last row of each kind that an earlier process sent to this run.
        self._previously_sent: dict[str, Position] = {}
        self._sent: dict[str, Position] = {}
        self._tolerance = Tolerance(self.name, "The rows of the time in between are lost.", tolerated=Exception)

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Open a run, or continue the one of the checkpoint."""
        self._pace.begin(trainer)
        if trainer.progress.step == 0 and trainer.lifecycle.saved_at is None:
            self._run_id, self._has_opened = None, False  # a second, fresh training is another run
        self._is_training = trainer.is_main_process
        if trainer.is_main_process:
            self._open(trainer)

    def on_log(self, trainer: TrainerLike, logs: Mapping[str, float]) -> None:
        """Send a row of training, or the result of a test."""
        if not trainer.is_main_process:
            return
        if row_kind(logs) == "train":
            if self._pace.shows(trainer):
                self._send(trainer, "train", logs)
            return
        with self._tolerance:
            if self._tracker is None and not self._open(trainer):
                return
            self._call(
                lambda tracker: tracker.log(_scalars(logs, "test", self._service), step=_step(trainer.progress, logs))
            )
            if not self._is_training:
                self._close()

    def on_eval_end(self, trainer: TrainerLike, metrics: Mapping[str, float]) -> None:
        """Send an evaluation."""
        self._send(trainer, "eval", metrics)

    def on_report(self, trainer: TrainerLike, values: Mapping[str, str | Histogram]) -> None:
        """Send texts and histograms, or the numbers that describe a histogram to a service without histograms."""
        if not self._is_training or self._has_sent("report", _position(trainer.progress, {})):
            return
        step, service = trainer.progress.step, self._service

        def send(tracker: Any) -> None:
            numbers: dict[str, Any] = {}
            for name, value in values.items():
                if isinstance(value, str):
                    service.log_text(tracker, name, value, step)
                elif not service.log_histogram(tracker, name, value, step):
                    numbers |= histogram_stats(name, value)
            if numbers:
                tracker.log(numbers, step=step)

        with self._tolerance:
            self._call(send)

    def on_train_end(self, trainer: TrainerLike) -> None:
        """End the run."""
        self._is_training = False
        with self._tolerance:
            self._close()

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the service's run, and the state of the interval."""
        get_state = getattr(self._user_tracker, "state_dict", None)
        state = {"tracker": self.name, "run_id": self._run_id, **self._pace.state_dict()}
        return {**state, "state": get_state()} if get_state is not None and self._has_opened else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the id of the run that a resumed training continues; that of another service is ignored."""
        if state.get("tracker") == self.name:
            self._run_id, self._state = state.get("run_id"), state.get("state")
            self._pace.load_state_dict(state)

    # --- the run of the service

    def _open(self, trainer: TrainerLike) -> bool:
        """Open the run; return False if it has ended and cannot be resumed."""
        is_stateless = self._user_tracker is not None and not hasattr(self._user_tracker, "load_state_dict")
        if self._has_opened and is_stateless and not self._service.can_resume:
            logger.warning("%s has ended its run and cannot resume it: the row is not sent.", self.name)
            return False
        self._load_sent(trainer)
        is_new = self._run_id is None and self._state is None and not self._has_opened
        with _isolated_state():
            tracker = self._user_tracker or self._create_tracker(trainer)
            if self._user_tracker is not None:
                self._restore_tracker(self._user_tracker)
            tracker.main_process_only = False  # only the main process calls it
            if hasattr(tracker, "start"):  # before accelerate 1.9 the constructor opens the run
                tracker.start()
            self._tracker, self._has_opened = tracker, True
            self._run_id = self._service.get_run_id(tracker.tracker)
            if is_new:
                self._service.set_name(tracker, trainer.trial_name)
                tracker.store_init_configuration(_flatten_settings(trainer.resolved_config()))
        return True

    def _create_tracker(self, trainer: TrainerLike) -> Any:
        """Return accelerate's tracker, not yet started."""
        folder = Path(trainer.save_dir or "runs")
        options = self._service.options(self.project, trainer.trial_name, folder)
        options |= self._service.new_run_options if self._run_id is None else self._service.resume_options(self._run_id)
        options |= self.options
        if self._class.requires_logging_directory and "logging_dir" not in options:
            options["logging_dir"] = str(folder)
        first = trainer.trial_name if self._service.takes_run_name and trainer.trial_name else self.project
        return self._class(first, **options)

    def _restore_tracker(self, tracker: Any) -> None:
        """Let a tracker of the user resume the run of the checkpoint."""
        if self._state is not None and hasattr(tracker, "load_state_dict"):
            tracker.load_state_dict(self._state)
        if self._run_id is None:
            return
        for name, value in self._service.resume_options(self._run_id).items():
            if hasattr(tracker, name):
                setattr(tracker, name, value)
            else:
                tracker.init_kwargs[name] = value

    def _close(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with _isolated_state():
                tracker.finish()

    def _call(self, function: Callable[[Any], None]) -> None:
        if self._tracker is not None:
            with _isolated_state():
                function(self._tracker)

    # --- sent rows

    def _send(self, trainer: TrainerLike, kind: str, values: Mapping[str, float]) -> None:
        position = _position(trainer.progress, values)
        if not self._is_training or position <= self._sent.get(kind, (-1, 0.0)) or self._has_sent(kind, position):
            return
        with self._tolerance:
            self._call(lambda tracker: tracker.log(_scalars(values, kind, self._service), step=position[0]))

    def _has_sent(self, kind: str, position: Position) -> bool:
        """Return whether an earlier process has sent a row; otherwise mark it as sent.

        Marked before it is sent: a kill in between loses the row, which is better than a duplicate.
        """
        if position <= self._previously_sent.get(kind, (-1, 0.0)):
            return True
        self._sent[kind] = position
        if self._path is not None:
            with self._tolerance:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                content = json.dumps({"run_id": self._run_id, "sent": self._sent}).encode()
                replace_file(self._path, content, sync=False)  # as every row writes it
        return False

    def _load_sent(self, trainer: TrainerLike) -> None:
        """Load the positions that earlier processes sent to the resumed run."""
        self._path = None if trainer.save_dir is None else Path(trainer.save_dir) / f"tracking-{self.name}.json"
        self._previously_sent, self._sent = {}, {}
        is_new = self._run_id is None and trainer.progress.step == 0
        if self._path is None or is_new or not self._path.is_file():
            return
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            record = json.loads(self._path.read_text(encoding="utf-8"))
            if self._run_id is None and self._service.can_resume:  # a checkpoint from before the tracker was added
                self._run_id = record["run_id"]
            if record["run_id"] == self._run_id:
                self._sent = {kind: (int(step), float(epoch)) for kind, (step, epoch) in record["sent"].items()}
                self._previously_sent = dict(self._sent)


def _step(progress: Progress, values: Mapping[str, float]) -> int:
    return int(values.get("step", progress.step))


def _position(progress: Progress, values: Mapping[str, float]) -> Position:
    """Return the position of a row; rounded, because `epochs` is slightly smaller before an epoch is closed."""
    return _step(progress, values), round(float(values.get("epoch", progress.epochs)), 6)


def _scalars(values: Mapping[str, float], kind: str, service: Service) -> dict[str, float]:
    values = dashboard_names(sort_for_display(values), kind)
    return {name.replace("/", service.separator, 1): float(value) for name, value in values.items()}


def _flatten_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as numbers and texts, with containers as JSON."""
    scalars = (bool, int, float, str)
    return {name: value if isinstance(value, scalars) else json.dumps(value) for name, value in settings.items()}


def _tracker_class(name: str) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    classes: dict[str, Any] = {str(getattr(key, "value", key)): cls for key, cls in LOGGER_TYPE_TO_CLASS.items()}
    if name not in classes and name not in SERVICES:
        names = sorted({*classes, *SERVICES})
        raise ConfigError(
            f"Tracking has no tracker {name!r}.{did_you_mean(name, names)} The trackers are {', '.join(names)}."
        )
    if name in SERVICES and find_spec(name) is None:
        raise MissingExtraError(f"Tracking({name!r})", name)
    if name not in classes:
        raise MissingExtraError(f"Tracking({name!r})", "'accelerate>=1.12'")
    return classes[name]


def _tracker_name(tracker: Any) -> str:
    from accelerate.tracking import GeneralTracker

    if not isinstance(tracker, GeneralTracker):
        raise ConfigError(
            "Tracking takes a name or an object of a subclass of accelerate.tracking.GeneralTracker, got "
            f"{tracker!r}. Define such a class with `start`, `log` and `finish`."
        )
    return str(getattr(tracker, "name", type(tracker).__name__))


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
