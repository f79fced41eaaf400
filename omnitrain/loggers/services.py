"""API differences of the services behind accelerate's trackers.

One entry per service; `tracking.py` decides when something is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from omnitrain.core.events import Histogram


def _log_text(tracker: Any, name: str, text: str, step: int) -> None:
    """Log a text as a value, which accelerate's and custom trackers accept."""
    tracker.log({name: text}, step=step)


def _reject_histogram(tracker: Any, name: str, histogram: Histogram, step: int) -> bool:
    return False


def _ignore_name(tracker: Any, name: str | None) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Service:
    """The API of a service in addition to `tracker.log`.

    Args:
        get_run_id: Returns the id of an open run.
        resume_options: Returns the options of accelerate's tracker that resume the run of an id.
        can_resume: Whether runs can be resumed.
        new_run_options: Options of a new run.
        options: Returns the options of any run, from the project, the name of the run (or None) and its folder.
        takes_run_name: Whether the first argument of accelerate's tracker is the run's name, not the project.
        set_name: Sets the name of a new run, if no option does.
        log_text: Sends a text.
        log_histogram: Sends a histogram, or returns False if the service has none.
        separator: The separator between "train" and the name of a value.
    """

    get_run_id: Callable[[Any], str | None] = lambda run: None
    resume_options: Callable[[str], Mapping[str, Any]] = lambda run_id: {}
    can_resume: bool = False
    new_run_options: Mapping[str, Any] = field(default_factory=dict)
    options: Callable[[str, str | None, Path], dict[str, Any]] = lambda project, name, folder: {}
    takes_run_name: bool = False
    set_name: Callable[[Any, str | None], None] = _ignore_name
    log_text: Callable[[Any, str, str, int], None] = _log_text
    log_histogram: Callable[[Any, str, Histogram, int], bool] = _reject_histogram
    separator: str = "/"


def _name_option(option: str) -> Callable[[str, str | None, Path], dict[str, Any]]:
    return lambda project, name, folder: {} if name is None else {option: name}


def _mlflow_text(tracker: Any, name: str, text: str, step: int) -> None:
    mlflow: Any = import_module("mlflow")

    mlflow.log_text(text, f"{name}/step-{step}.txt", run_id=tracker.tracker.info.run_id)


def _comet_name(tracker: Any, name: str | None) -> None:
    if name is not None:
        tracker.tracker.set_name(name)


def _comet_text(tracker: Any, name: str, text: str, step: int) -> None:
    tracker.tracker.log_text(text, step=step, metadata={"name": name})


def _aim_text(tracker: Any, name: str, text: str, step: int) -> None:
    aim: Any = import_module("aim")

    tracker.tracker.track(aim.Text(text), name=name, step=step)


def _aim_histogram(tracker: Any, name: str, histogram: Histogram, step: int) -> bool:
    aim: Any = import_module("aim")

    if not _has_equal_bins(histogram.edges):  # Aim supports only evenly spaced bins
        return False
    limits = (float(histogram.edges[0]), float(histogram.edges[-1]))
    tracker.tracker.track(aim.Distribution(hist=list(histogram.counts), bin_range=limits), name=name, step=step)
    return True


def _clearml_text(tracker: Any, name: str, text: str, step: int) -> None:
    tracker.tracker.get_logger().report_text(f"{name}, step {step}:\n{text}", print_console=False)


def _clearml_histogram(tracker: Any, name: str, histogram: Histogram, step: int) -> bool:
    labels = [f"{low:.3g} to {high:.3g}" for low, high in zip(histogram.edges, histogram.edges[1:], strict=False)]
    tracker.tracker.get_logger().report_histogram(name, "", list(histogram.counts), iteration=step, xlabels=labels)
    return True


def _swanlab_text(tracker: Any, name: str, text: str, step: int) -> None:
    swanlab: Any = import_module("swanlab")

    tracker.log({name: swanlab.Text(text)}, step=step)


def _trackio_text(tracker: Any, name: str, text: str, step: int) -> None:
    trackio: Any = import_module("trackio")

    tracker.log({name: trackio.Markdown("```\n" + text + "\n```")}, step=step)


def _trackio_histogram(tracker: Any, name: str, histogram: Histogram, step: int) -> bool:
    import numpy as np

    trackio: Any = import_module("trackio")
    pair = (np.asarray(histogram.counts), np.asarray(histogram.edges))
    tracker.log({name: trackio.Histogram(np_histogram=pair)}, step=step)
    return True


def _ignore_text(tracker: Any, name: str, text: str, step: int) -> None:
    """DVCLive has no texts."""


def _has_equal_bins(edges: Sequence[float]) -> bool:
    """Return whether all bins have the same width."""
    width = (edges[-1] - edges[0]) / (len(edges) - 1)
    return all(abs(edge - edges[0] - number * width) <= 1e-6 * width for number, edge in enumerate(edges))


SERVICES: dict[str, Service] = {
    "mlflow": Service(
        get_run_id=lambda run: run.info.run_id,
        resume_options=lambda run_id: {"run_id": run_id},
        can_resume=True,
        options=_name_option("run_name"),
        log_text=_mlflow_text,
    ),
    "comet_ml": Service(
        get_run_id=lambda experiment: experiment.get_key(),
        resume_options=lambda run_id: {"experiment_key": run_id},
        can_resume=True,
        set_name=_comet_name,
        log_text=_comet_text,
    ),
    "aim": Service(
        get_run_id=lambda run: run.hash,
        resume_options=lambda run_id: {"run_hash": run_id},
        can_resume=True,
        options=lambda project, name, folder: {"experiment": project},
        takes_run_name=True,
        log_text=_aim_text,
        log_histogram=_aim_histogram,
    ),
    "clearml": Service(
        get_run_id=lambda task: task.id,
        resume_options=lambda run_id: {"reuse_last_task_id": run_id, "continue_last_task": 0},  # steps without offset
        can_resume=True,
        new_run_options={"reuse_last_task_id": False},
        # its automatic connections would send TensorBoard's values a second time
        options=lambda project, name, folder: {
            "auto_connect_frameworks": False,
            **_name_option("task_name")(project, name, folder),
        },
        log_text=_clearml_text,
        log_histogram=_clearml_histogram,
        separator="_",
    ),
    "dvclive": Service(
        get_run_id=lambda live: live.dir,
        resume_options=lambda run_id: {"dir": run_id, "resume": True},
        can_resume=True,
        options=lambda project, name, folder: {"dir": str(folder / "dvclive")},
        log_text=_ignore_text,
    ),
    "swanlab": Service(
        get_run_id=lambda run: run.id,
        resume_options=lambda run_id: {"id": run_id, "resume": "allow"},
        can_resume=True,
        options=_name_option("experiment_name"),
        log_text=_swanlab_text,
    ),
    "trackio": Service(
        get_run_id=lambda run: run.name,
        resume_options=lambda run_id: {"name": run_id, "resume": "allow"},
        can_resume=True,
        options=_name_option("name"),
        log_text=_trackio_text,
        log_histogram=_trackio_histogram,
    ),
    "wandb": Service(
        get_run_id=lambda run: run.id,
        resume_options=lambda run_id: {"id": run_id, "resume": "allow"},
        can_resume=True,
    ),
}
