"""API differences of the services behind accelerate's trackers.

One class per service; `tracking.py` decides when something is sent.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from omnitrain.core.events import Histogram, TrainerLike
from omnitrain.core.files import create_folder


class Service:
    """The API of a service in addition to `tracker.log`; that of a custom tracker has these defaults."""

    id_attribute: ClassVar[str] = ""
    """Where an open run has its id; empty if no run can be resumed."""
    id_option: ClassVar[str] = ""
    """The option of accelerate's tracker for the id of the run to resume."""
    resume: ClassVar[Mapping[str, Any]] = {}
    """Other options to resume a run."""
    name_option: ClassVar[str] = ""
    """The option for the name of a run."""
    separator: ClassVar[str] = "/"
    """The separator between "train" and the name of a value."""
    is_local: ClassVar[bool] = False
    """Whether it writes files here: rows wait in memory while the disk fails."""

    def options(self, tracking: Any, trainer: TrainerLike, folder: Path) -> dict[str, Any]:
        """Return options of accelerate's tracker for any run; "run_name" replaces the project of the `Tracking`."""
        return {self.name_option: trainer.trial_name} if self.name_option and trainer.trial_name else {}

    def resume_options(self, run_id: str | None) -> dict[str, Any]:
        """Return options to resume a run, or for a new one."""
        return {} if run_id is None or not self.id_option else {self.id_option: run_id, **self.resume}

    def find_open_run(self) -> Any:
        """Return a tracker of the run that the user has opened; None if there is none."""

    def run_id(self, tracker: Any) -> str | None:
        """Return the id of an open run."""
        return attrgetter(self.id_attribute)(tracker.tracker) if self.id_attribute else None

    def first_step(self, tracker: Any) -> int | None:
        """Return the first step that is not in an open run yet; None if it does not tell."""

    def describe_run(self, tracker: Any, trainer: TrainerLike) -> None:
        """Store the settings of a new run."""
        settings = trainer.resolved_config()
        scalars = (bool, int, float, str)
        tracker.store_init_configuration(
            {name: value if isinstance(value, scalars) else json.dumps(value) for name, value in settings.items()}
        )

    def log_test(self, tracker: Any, values: dict[str, float], step: int) -> None:
        """Send the result of a test."""
        tracker.log(values, step=step)

    def log_text(self, tracker: Any, name: str, text: str, step: int) -> None:
        """Send a text."""
        tracker.log({name: text}, step=step)

    def log_histogram(self, tracker: Any, name: str, histogram: Histogram, step: int) -> bool:
        """Send a histogram, or return False if the service has none."""
        return False

    def finish(self, tracker: Any, has_failed: bool) -> None:
        """End the run."""
        tracker.finish()


class _MLflow(Service):
    id_attribute, id_option, name_option = "info.run_id", "run_id", "run_name"

    def log_text(self, tracker: Any, name: str, text: str, step: int) -> None:
        mlflow: Any = import_module("mlflow")
        mlflow.log_text(text, f"{name}/step-{step}.txt", run_id=tracker.tracker.info.run_id)


class _Comet(Service):
    id_attribute, id_option = "id", "experiment_key"

    def run_id(self, tracker: Any) -> str | None:
        return tracker.tracker.get_key()

    def describe_run(self, tracker: Any, trainer: TrainerLike) -> None:
        if trainer.trial_name is not None:
            tracker.tracker.set_name(trainer.trial_name)
        super().describe_run(tracker, trainer)

    def log_text(self, tracker: Any, name: str, text: str, step: int) -> None:
        tracker.tracker.log_text(text, step=step, metadata={"name": name})


class _Aim(Service):
    id_attribute, id_option = "hash", "run_hash"

    def options(self, tracking: Any, trainer: TrainerLike, folder: Path) -> dict[str, Any]:
        return {"run_name": trainer.trial_name or tracking.project, "experiment": tracking.project}

    def log_text(self, tracker: Any, name: str, text: str, step: int) -> None:
        aim: Any = import_module("aim")
        tracker.tracker.track(aim.Text(text), name=name, step=step)

    def log_histogram(self, tracker: Any, name: str, histogram: Histogram, step: int) -> bool:
        aim: Any = import_module("aim")
        widths = np.diff(histogram.edges)
        if not np.allclose(widths, widths[0], rtol=1e-6, atol=0):  # Aim supports only evenly spaced bins
            return False
        limits = (float(histogram.edges[0]), float(histogram.edges[-1]))
        tracker.tracker.track(aim.Distribution(hist=list(histogram.counts), bin_range=limits), name=name, step=step)
        return True


class _ClearML(Service):
    id_attribute, id_option, name_option, separator = "id", "reuse_last_task_id", "task_name", "_"
    resume: ClassVar = {"continue_last_task": 0}  # steps without offset

    def options(self, tracking: Any, trainer: TrainerLike, folder: Path) -> dict[str, Any]:
        # its automatic connections would send TensorBoard's values a second time
        return {"auto_connect_frameworks": False, **super().options(tracking, trainer, folder)}

    def resume_options(self, run_id: str | None) -> dict[str, Any]:
        return super().resume_options(run_id) or {self.id_option: False}

    def log_text(self, tracker: Any, name: str, text: str, step: int) -> None:
        tracker.tracker.get_logger().report_text(f"{name}, step {step}:\n{text}", print_console=False)

    def log_histogram(self, tracker: Any, name: str, histogram: Histogram, step: int) -> bool:
        labels = [f"{low:.3g} to {high:.3g}" for low, high in zip(histogram.edges, histogram.edges[1:], strict=False)]
        tracker.tracker.get_logger().report_histogram(name, "", list(histogram.counts), iteration=step, xlabels=labels)
        return True


class _DVCLive(Service):
    id_attribute, id_option = "dir", "dir"
    resume: ClassVar = {"resume": True}

    def options(self, tracking: Any, trainer: TrainerLike, folder: Path) -> dict[str, Any]:
        return {"dir": str(folder / "dvclive")}

    def log_text(self, tracker: Any, name: str, text: str, step: int) -> None:
        """DVCLive has no texts."""


class _SwanLab(Service):
    id_attribute, id_option, name_option = "id", "id", "experiment_name"
    resume: ClassVar = {"resume": "allow"}

    def log_text(self, tracker: Any, name: str, text: str, step: int) -> None:
        swanlab: Any = import_module("swanlab")
        tracker.log({name: swanlab.Text(text)}, step=step)


class _Trackio(Service):
    id_attribute, id_option, name_option = "name", "name", "name"
    resume: ClassVar = {"resume": "allow"}

    def log_text(self, tracker: Any, name: str, text: str, step: int) -> None:
        trackio: Any = import_module("trackio")
        tracker.log({name: trackio.Markdown("```\n" + text + "\n```")}, step=step)

    def log_histogram(self, tracker: Any, name: str, histogram: Histogram, step: int) -> bool:
        trackio: Any = import_module("trackio")
        pair = (np.asarray(histogram.counts), np.asarray(histogram.edges))
        tracker.log({name: trackio.Histogram(np_histogram=pair)}, step=step)
        return True


class _OpenWandbRun:
    """The W&B run that the user has opened, which stays open."""

    def __init__(self, run: Any) -> None:
        self.tracker = run

    def log(self, values: dict[str, Any], step: int) -> None:
        # The user's rows advance W&B's step, and W&B drops a row whose step goes backwards.
        self.tracker.log({**values, "step": step})


class _Wandb(Service):
    id_attribute, id_option, name_option, is_local = "id", "id", "name", True
    resume: ClassVar = {"resume": "allow"}

    def options(self, tracking: Any, trainer: TrainerLike, folder: Path) -> dict[str, Any]:
        return {"config": trainer.resolved_config(), **super().options(tracking, trainer, folder)}

    def find_open_run(self) -> Any:
        run = import_module("wandb").run
        return None if run is None else _OpenWandbRun(run)

    def first_step(self, tracker: Any) -> int | None:
        # A killed process has sent earlier steps: W&B has their values, and would warn about each.
        return 0 if isinstance(tracker, _OpenWandbRun) else tracker.tracker.step

    def describe_run(self, tracker: Any, trainer: TrainerLike) -> None:
        if "config" not in getattr(tracker, "init_kwargs", ("config",)):  # of a tracker that the user has made
            super().describe_run(tracker, trainer)

    def log_test(self, tracker: Any, values: dict[str, float], step: int) -> None:
        # Not into the history: a test comes after the last step, and W&B accepts no step twice in a continued run.
        tracker.tracker.summary.update(values)

    def log_text(self, tracker: Any, name: str, text: str, step: int) -> None:
        tracker.log({name: import_module("wandb").Html(f"<pre>{html.escape(text)}</pre>")}, step=step)

    def log_histogram(self, tracker: Any, name: str, histogram: Histogram, step: int) -> bool:
        pair = (np.asarray(histogram.counts), np.asarray(histogram.edges))
        tracker.log({name: import_module("wandb").Histogram(np_histogram=pair)}, step=step)
        return True

    def finish(self, tracker: Any, has_failed: bool) -> None:
        if not isinstance(tracker, _OpenWandbRun):
            tracker.tracker.finish(exit_code=1 if has_failed else 0)


class _TensorBoard(Service):
    is_local = True

    def options(self, tracking: Any, trainer: TrainerLike, folder: Path) -> dict[str, Any]:
        if tracking.log_dir is None and trainer.save_dir is not None:
            create_folder(folder / "tensorboard")
        places = {"run_name": "tensorboard", "logging_dir": str(folder)}
        if tracking.log_dir is not None:
            places = {"run_name": "", "logging_dir": str(tracking.log_dir)}
        return {**places, "purge_step": tracking.purge_step}

    def first_step(self, tracker: Any) -> int | None:
        return 0  # it hides the values that an earlier process has written from `purge_step` on

    def describe_run(self, tracker: Any, trainer: TrainerLike) -> None:
        self.log_text(tracker, "config", json.dumps(trainer.resolved_config(), indent=2), trainer.progress.step)

    def log_text(self, tracker: Any, name: str, text: str, step: int) -> None:
        block = "\n".join("    " + line for line in text.splitlines())  # TensorBoard renders Markdown
        tracker.log({name: block}, step=step)

    def log_histogram(self, tracker: Any, name: str, histogram: Histogram, step: int) -> bool:
        tracker.tracker.add_histogram_raw(
            name, histogram.low, histogram.high, sum(histogram.counts), histogram.total, histogram.squares,
            list(histogram.edges[1:]), list(histogram.counts), step,
        )  # fmt: skip
        tracker.tracker.flush()
        return True


SERVICES: dict[str, Service] = {
    "mlflow": _MLflow(),
    "comet_ml": _Comet(),
    "aim": _Aim(),
    "clearml": _ClearML(),
    "dvclive": _DVCLive(),
    "swanlab": _SwanLab(),
    "trackio": _Trackio(),
    "wandb": _Wandb(),
    "tensorboard": _TensorBoard(),
}
