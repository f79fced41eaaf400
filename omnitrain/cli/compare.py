"""Comparison of runs: a table of results and plots. No torch."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnitrain.arguments import is_finite
from omnitrain.core.display import ResultView, Table, create_panels, draw_curve
from omnitrain.core.errors import ConfigError, ObjectiveError
from omnitrain.core.history import MetricsDict, read_row
from omnitrain.core.metric_format import get_descriptor, sort_for_display
from omnitrain.core.objective import infer_direction

logger: logging.Logger = logging.getLogger("omnitrain")

_NO_CURVE = ("kind", "step", "epoch", "final", "learning_rate", "grad_norm", "skipped_steps", "loss_scale")


@dataclass(frozen=True, slots=True)
class RunComparison(ResultView):
    """The rows of several runs, which print as a table: the last loss, and the best value of each metric.

    `*` marks the best of the runs, if the direction of a metric is known. `plot()` draws the training loss and every
    metric of the evaluations, each with a curve per run.

    Attributes:
        runs: The rows of each run by its name, as in `metrics.jsonl`.
    """

    runs: dict[str, list[dict[str, Any]]]

    def _figure(self) -> Any:
        names = [name for name in self._names() if not name.startswith("test_")]
        figure, panels = create_panels("RunComparison", len(names))
        for axes, name in zip(panels, names, strict=True):
            for number, (run, rows) in enumerate(self.runs.items()):
                points, color = _points(rows, name), f"C{number % 10}"
                draw_curve(axes, points, run, color=color, **({"marker": None} if name == "loss" else {}))
                if (best := _best(points, name)) is not None:
                    axes.plot(*best, color=color, marker="*", markersize=11, linestyle="none")
            axes.set_ylabel("train loss" if name == "loss" else _title(name))
            axes.legend(fontsize="small")
        panels[-1].set_xlabel("step" + (" (a star is the best of a run)" if len(names) > 1 else ""))
        return figure

    def _names(self) -> list[str]:
        """Return the values that have a column: the loss, and those of evaluations and tests."""
        names = {
            name: 0.0 for rows in self.runs.values() for row in rows for name in row
            if (name == "loss" if row["kind"] == "train" else name not in _NO_CURVE) and is_finite(row[name])
        }  # fmt: skip
        return sorted(sort_for_display(names), key=lambda name: name.startswith("test_"))

    def _table(self) -> Table:
        names = self._names()
        ends = [max(rows, key=lambda row: row["step"]) for rows in self.runs.values()]
        epochs = [f"{end['epoch']:.2f}" if is_finite(end.get("epoch")) else "-" for end in ends]
        columns: list[list[str]] = [list(self.runs), [str(end["step"]) for end in ends], epochs]
        for name in names:
            curves = [_points(rows, name) for rows in self.runs.values()]
            chosen = [_best(points, name) or (points[-1] if points else None) for points in curves]
            direction = None if name == "loss" else _direction(name)
            values = [point[1] for point in chosen if point is not None]
            top = None if direction is None or len(values) < 2 else (max if direction == "max" else min)(values)
            form = get_descriptor(name).format
            cells = []
            for point in chosen:
                words = "-" if point is None else format(point[1], form)
                if point is not None and name.startswith("eval_"):
                    words += f" @{point[0]}"
                cells.append(words + (" *" if point is not None and point[1] == top else ""))
            columns.append(cells)
        titles = ["run", "steps", "epochs", *(_title(name) for name in names)]
        return Table(titles, [*zip(*columns, strict=True)], is_first_left=True)


def compare_runs(*runs: str | os.PathLike[str] | Mapping[str, Any]) -> RunComparison:
    """Return the results of several runs side by side.

    Args:
        runs: Folders of runs, whose `metrics.jsonl` is read, or files: that one, or one that `MetricsDict.to_json` has
            written. A dict has any of these, or a `MetricsDict`, by the names that the table is to show.

    Raises:
        ConfigError: If there is no such folder or file, it has no rows, or a run is named twice.

    >>> one, other = MetricsDict(), MetricsDict()
    >>> one.add_valid({"epoch": 1, "step": 10, "eval_loss": 0.6}, best=True)
    >>> other.add_valid({"epoch": 2, "step": 20, "eval_loss": 0.4}, best=True)
    >>> print(compare_runs({"small": one, "large": other}))
    run    steps  epochs  eval_loss
    small     10    1.00    0.6 @10
    large     20    2.00  0.4 @20 *
    """
    entries: list[tuple[str, Any]] = []
    for run in runs:
        if isinstance(run, MetricsDict):
            raise ConfigError('A MetricsDict has no name: pass compare_runs({"name": metrics, ...}).')
        entries += run.items() if isinstance(run, Mapping) else [(os.fspath(run).rstrip("/") or "/", run)]
    if not entries:
        raise ConfigError("There is nothing to compare: pass folders of runs, or a dict of them by name.")
    rows_by_run: dict[str, list[dict[str, Any]]] = {}
    for name, run in entries:
        if name in rows_by_run:
            raise ConfigError(f"The run {name!r} is there twice. Leave one out, or name them by a dict.")
        rows = _rows_of_history(run) if isinstance(run, MetricsDict) else _read(Path(run))
        if not rows:
            raise ConfigError(f"The run {name!r} has no rows: it has neither logged nor evaluated.")
        rows_by_run[name] = rows
    return RunComparison(rows_by_run)


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a run from its folder or file."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not path.exists():
        raise ConfigError(f"There is no folder {str(path)!r}. Give the `save_dir` of a run.")
    if not file.is_file():
        raise ConfigError(
            f"{str(path)!r} has no metrics.jsonl, which each run writes into its `save_dir`. Give the folder of a run, "
            "not of a checkpoint."
        )
    if file.suffix == ".json":
        try:
            return _rows_of_history(MetricsDict.from_dict(json.loads(file.read_bytes())))
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise ConfigError(f"{str(file)!r} has no rows of a run: {error}.") from error
    lines = file.read_bytes().split(b"\n")
    read = [read_row(line) for line in lines[:-1]]  # of the last one, a killed run has written half
    rows = [row for row in read if row is not None]
    if len(rows) < len(read):
        if not rows:
            raise ConfigError(f"{str(file)!r} has no rows of a run: each line is a JSON object with 'kind' and 'step'.")
        logger.warning("%s has %d damaged lines, which are left out.", str(file), len(read) - len(rows))
    return rows


def _rows_of_history(metrics: MetricsDict) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for kind, table in (("train", "train_metrics_history"), ("eval", "valid"), ("test", "test")):
        for row in metrics[table]:
            values = {"loss" if name == "train_loss" else name: value for name, value in row.items()}
            rows.append({"kind": kind, **values})
    return [row for row in rows if "step" in row]


def _points(rows: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return step and value of each row that has a number under a name."""
    kind = {"loss": ("train",)}.get(name, ("eval", "test"))
    return [(row["step"], row[name]) for row in rows if row["kind"] in kind and is_finite(row.get(name))]


def _best(points: list[tuple[int, float]], name: str) -> tuple[int, float] | None:
    """Return the best point of an evaluation's metric, if its direction is known."""
    direction = _direction(name) if name.startswith("eval_") else None
    if direction is None or not points:
        return None
    return (max if direction == "max" else min)(points, key=lambda point: point[1])


def _direction(name: str) -> str | None:
    try:
        return infer_direction(name)[0]
    except ObjectiveError:
        return None


def _title(name: str) -> str:
    title = get_descriptor(name).title
    return name if title is None else f"{name.split('_')[0]} {title}" if name.startswith(("eval_", "test_")) else title
