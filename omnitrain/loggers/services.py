"""What the services behind accelerate's trackers call their runs, texts and histograms.

An entry per service, and nothing about when something is sent: `tracking.py` decides that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from omnitrain.core.events import Histogram


def _log_text(tracker: Any, name: str, text: str, step: int) -> None:
    """What accelerate's trackers take: a text is a value, in the tracker of the user too."""
    tracker.log({name: text}, step=step)


def _no_histogram(tracker: Any, name: str, histogram: Histogram, step: int) -> bool:
    return False


def _no_name(tracker: Any, name: str | None) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Service:
    """How a service is spoken to beside `tracker.log`.

    Args:
        id_of: Returns the id of a run that is open.
        continued: Returns the options of accelerate's tracker that continue the run of an id.
        can_continue: Whether there are any.
        new: Those of a run that is new.
        options: Returns those of any run, from the project, the name of the run (or None) and the run's folder.
        takes_name: Whether the first argument of accelerate's tracker is the name of the run, and not the project.
        name_it: Names a new run, where no option does.
        show_text: Sends a text.
        show_histogram: Sends a histogram, or returns False if it cannot.
        separator: What stands between "train" and the name of a value.
    """

    id_of: Callable[[Any], str | None] = lambda run: None
    continued: Callable[[str], Mapping[str, Any]] = lambda run_id: {}
    can_continue: bool = False
    new: Mapping[str, Any] = field(default_factory=dict)
    options: Callable[[str, str | None, Path], dict[str, Any]] = lambda project, name, folder: {}
    takes_name: bool = False
    name_it: Callable[[Any, str | None], None] = _no_name
    show_text: Callable[[Any, str, str, int], None] = _log_text
    show_histogram: Callable[[Any, str, Histogram, int], bool] = _no_histogram
    separator: str = "/"


def _named(option: str) -> Callable[[str, str | None, Path], dict[str, Any]]:
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

    if not _is_even(histogram.edges):  # Aim knows the limits of the first bin and the last
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


def _left_out(tracker: Any, name: str, text: str, step: int) -> None:
    """DVCLive has no texts."""


def _is_even(edges: Sequence[float]) -> bool:
    """Return whether all bins are equally wide."""
    width = (edges[-1] - edges[0]) / (len(edges) - 1)
    return all(abs(edge - edges[0] - number * width) <= 1e-6 * width for number, edge in enumerate(edges))


SERVICES: dict[str, Service] = {
    "mlflow": Service(
        id_of=lambda run: run.info.run_id,
        continued=lambda run_id: {"run_id": run_id},
        can_continue=True,
        options=_named("run_name"),
        show_text=_mlflow_text,
    ),
    "comet_ml": Service(
        id_of=lambda experiment: experiment.get_key(),
        continued=lambda run_id: {"experiment_key": run_id},
        can_continue=True,
        name_it=_comet_name,
        show_text=_comet_text,
    ),
    "aim": Service(
        id_of=lambda run: run.hash,
        continued=lambda run_id: {"run_hash": run_id},
        can_continue=True,
        options=lambda project, name, folder: {"experiment": project},
        takes_name=True,
        show_text=_aim_text,
        show_histogram=_aim_histogram,
    ),
    "clearml": Service(
        id_of=lambda task: task.id,
        continued=lambda run_id: {"reuse_last_task_id": run_id, "continue_last_task": 0},  # 0: the steps are ours
        can_continue=True,
        new={"reuse_last_task_id": False},
        # its own way of finding values would send those of TensorBoard once more
        options=lambda project, name, folder: {
            "auto_connect_frameworks": False,
            **_named("task_name")(project, name, folder),
        },
        show_text=_clearml_text,
        show_histogram=_clearml_histogram,
        separator="_",
    ),
    "dvclive": Service(
        id_of=lambda live: live.dir,
        continued=lambda run_id: {"dir": run_id, "resume": True},
        can_continue=True,
        options=lambda project, name, folder: {"dir": str(folder / "dvclive")},
        show_text=_left_out,
    ),
    "swanlab": Service(
        id_of=lambda run: run.id,
        continued=lambda run_id: {"id": run_id, "resume": "allow"},
        can_continue=True,
        options=_named("experiment_name"),
        show_text=_swanlab_text,
    ),
    "trackio": Service(
        id_of=lambda run: run.name,
        continued=lambda run_id: {"name": run_id, "resume": "allow"},
        can_continue=True,
        options=_named("name"),
        show_text=_trackio_text,
        show_histogram=_trackio_histogram,
    ),
    "wandb": Service(
        id_of=lambda run: run.id,
        continued=lambda run_id: {"id": run_id, "resume": "allow"},
        can_continue=True,
    ),
}
