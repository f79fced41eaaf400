"""History of a run, and exact weighted means.

Values are converted to plain numbers and strings when they are added, so no tensor or graph is kept alive.
`objective.py` decides which evaluation is the best.
"""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from omnitrain.core.display import ResultView, Table, create_panels, draw_curve, ensure_folder
from omnitrain.core.errors import ConfigError, Tolerance, did_you_mean
from omnitrain.core.files import replace_file
from omnitrain.core.metric_format import bare_name, format_title, get_descriptor, is_described, sort_for_display

_PREFIXES = ("eval_", "test_", "train_")
_POSITION = ("epoch", "step")
TABLES = ("train_metrics_history", "valid", "test")
_SCALARS = ("best_step", "best_checkpoint", "stop_reason", "left_out_samples")
_TRAIN_COLUMNS = {"train_loss": "train_loss", "learning_rate": "lr", "grad_norm": "grad_norm"}


def is_position(step: object, epoch: object) -> bool:
    """Return whether a row of a file can have this step and epoch.

    >>> is_position(10, 0.5), is_position(-1, 0.5), is_position(10, math.nan), is_position("10", 0.5)
    (True, False, False, False)
    """
    are_numbers = type(step) is int and type(epoch) in (int, float)
    return are_numbers and 0 <= step < 2**63 and 0 <= epoch < 2**63  # type: ignore[operator]


def read_row(line: bytes) -> dict[str, Any] | None:
    """Return the row in a line of `metrics.jsonl`, or None if it holds none, as where the file is damaged.

    >>> read_row(b'{"kind": "eval", "step": 10, "epoch": 0.5}'), read_row(b'[1, 2'), read_row(b'{"step": 10}')
    ({'kind': 'eval', 'step': 10, 'epoch': 0.5}, None, None)
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        return None
    return row if is_position(row.get("step"), row.get("epoch", 0.0)) else None


class MetricRow(dict[str, Any]):
    """The metrics of one epoch or one evaluation, found with or without the prefix `eval_`, `test_` or `train_`.

    >>> row = MetricRow(step=3, eval_accuracy=0.5)
    >>> row["accuracy"], row["eval_accuracy"], "accuracy" in row, row.get("f1")
    (0.5, 0.5, True, None)
    """

    def _find_key(self, key: object) -> str | None:
        """Return the spelling under which `key` is stored, or None."""
        if not isinstance(key, str):
            return None
        spellings = [key, *(prefix + key for prefix in _PREFIXES)]
        if key.startswith(_PREFIXES):
            spellings = [key, bare_name(key)]
        return next((name for name in spellings if dict.__contains__(self, name)), None)

    def __missing__(self, key: str) -> Any:
        """Look `key` up in its other spellings."""
        stored = self._find_key(key)
        if not self:
            raise KeyError(f"There is no metric {key!r} here: nothing has been evaluated.")
        if stored is None:
            raise KeyError(
                f"There is no metric {key!r} here, only {quote_names(self)}."
                f"{did_you_mean(str(key), [*self, *map(bare_name, self)])}"
            )
        return self[stored]

    def __contains__(self, key: object) -> bool:
        """Return whether `key` is stored in any spelling."""
        return self._find_key(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key` in any spelling, or `default`."""
        stored = self._find_key(key)
        return default if stored is None else self[stored]


class MetricsDict(ResultView, dict[str, Any]):
    """The history of a run, the same on every rank and backend.

    The keys are "train_metrics_history", "valid" and "test" (lists of rows), "best_valid" (a row, empty until an
    evaluation is selected) and, once known, "best_step", "best_checkpoint", "stop_reason" and "left_out_samples". All
    values are floats, ints and strings, so JSON keeps them unchanged.

    It prints as a table with a row per epoch and evaluation; `*` marks the best. `plot()` draws the losses, the
    learning rate and every metric of the evaluations against the step, with a line at the best evaluation and another
    one at the end of the run.

    >>> metrics = MetricsDict()
    >>> metrics.add_train({"epoch": 1, "step": 10, "train_loss": 0.7})
    >>> row = {"epoch": 1, "step": 10, "eval_loss": 0.6, "eval_accuracy": 0.8}
    >>> metrics.add_valid(row, best=True)
    >>> metrics["best_valid"]["accuracy"], metrics["best_step"]
    (0.8, 10)
    >>> print(metrics)
    best: step 10 (epoch 1), loss 0.6000, accuracy 0.8000
    epoch  step  train_loss  eval_loss  eval_accuracy
        1    10      0.7000     0.6000         0.8000  *
    """

    def __init__(self) -> None:
        """Create an empty history; `from_dict` and `from_json` read an existing one."""
        super().__init__(train_metrics_history=[], valid=[], test=[], best_valid=MetricRow())

    if TYPE_CHECKING:  # the types of the values; at run time the dict's own method is used

        @overload
        def __getitem__(self, key: Literal["train_metrics_history", "valid", "test"], /) -> list[MetricRow]: ...
        @overload
        def __getitem__(self, key: Literal["best_valid"], /) -> MetricRow: ...
        @overload
        def __getitem__(self, key: Literal["best_step"], /) -> int: ...
        @overload
        def __getitem__(self, key: Literal["best_checkpoint", "stop_reason"], /) -> str: ...
        @overload
        def __getitem__(self, key: str, /) -> Any: ...
        def __getitem__(self, key: str, /) -> Any: ...

    def __setitem__(self, key: str, value: Any) -> None:
        """Store a copy of `value` as plain numbers and strings."""
        if key in TABLES:
            value = list(map(_to_plain_row, value))
        elif key == "best_valid":
            value = _to_plain_row(value)
        elif key in _SCALARS:
            value = _to_plain(key, value)
        else:
            known = [*TABLES, "best_valid", *_SCALARS]
            raise ConfigError(
                f"MetricsDict has no place for {key!r}, only for {quote_names(known)}.{did_you_mean(str(key), known)}"
            )
        super().__setitem__(key, value)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the table in notebooks and IPython."""
        printer.text(str(self))

    def __missing__(self, key: str) -> Any:
        """Raise a KeyError with the reason why `key` is missing."""
        if key in _SCALARS:
            why = {"stop_reason": "the run is not over", "left_out_samples": "no `SpikeGuard` has left out any"}
            selection = "no evaluation was selected, or nothing was saved"
            raise KeyError(f"{key!r} is not known: {why.get(key, selection)}.")
        keys = self.keys()  # a subclass may iterate over something else, as TrainResult of HFTrainer
        raise KeyError(f"There is no {key!r} here, only {quote_names(keys)}.{did_you_mean(str(key), keys)}")

    def add_train(self, row: Mapping[str, Any]) -> None:
        """Add an epoch: `epoch, step, train_loss, learning_rate, grad_norm`."""
        self["train_metrics_history"].append(_to_plain_row(row))

    def add_valid(self, row: Mapping[str, Any], best: bool) -> None:
        """Add an evaluation: `epoch, step, eval_loss, eval_<metric>, ...`; `best` marks it as the best."""
        self["valid"].append(_to_plain_row(row))
        if best:
            self["best_valid"] = row
            self["best_step"] = self["best_valid"]["step"]

    def add_test(self, row: Mapping[str, Any]) -> None:
        """Add a test: `epoch, step, test_loss, test_<metric>, ...`; it is never the best."""
        self["test"].append(_to_plain_row(row))

    def to_dict(self, with_rows: bool = True) -> dict[str, Any]:
        """Return a copy for strict JSON: NaN and infinity, which JSON lacks, become strings.

        Args:
            with_rows: Whether to include the tables; otherwise only their numbers of "rows".
        """
        state: dict[str, Any] = dict(self.items())
        state["best_valid"] = _to_strict_row(self["best_valid"])
        if not with_rows:
            state["rows"] = {name: len(state.pop(name)) for name in TABLES}
            return state
        for name in TABLES:
            state[name] = list(map(_to_strict_row, self[name]))
        return state

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> MetricsDict:
        """Build a history from `to_dict()`, or from any dict of the same form."""
        metrics = cls()
        for key, value in state.items():
            metrics[key] = value
        return metrics

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write the history to a JSON file, and return its path."""
        path = ensure_folder(path)
        path.write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        return path

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> MetricsDict:
        """Read a history from a file written by `to_json`."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    def _headline(self) -> str:
        parts = [f"stopped by: {self['stop_reason']}"] if "stop_reason" in self else []
        if best := self["best_valid"]:
            where = f"step {_format_number(best.get('step', '?'))} (epoch {_format_position(best.get('epoch', '?'))})"
            parts.append(f"best: {where}, {_format_row(best)}")
        return " · ".join(parts)

    def _merge_rows(self) -> list[tuple[dict[str, Any], bool]]:
        """Return the rows in order, with training and evaluation of a step merged, and whether each is the best."""
        rows: list[dict[str, Any]] = [dict(row) for row in self["train_metrics_history"]]
        free = {row.get("step"): row for row in rows}
        best: list[dict[str, Any]] = []
        for evaluation in self["valid"]:
            row = free.pop(evaluation.get("step"), None)
            if row is None:
                row = {}
                rows.append(row)
            row.update({name: value for name, value in evaluation.items() if name not in row})
            if evaluation == self["best_valid"]:
                best.append(row)
        rows.sort(key=lambda row: row.get("step", math.inf))
        return [(row, any(row is other for other in best[:1])) for row in rows]

    def _table(self) -> Table:
        rows = self._merge_rows()
        names = list(dict.fromkeys(name for row, _ in rows for name in row))
        first = [name for name in (*_POSITION, *_TRAIN_COLUMNS) if name in names]
        columns = [*first, *sort_for_display({name: 0.0 for name in names if name not in first})]
        return Table(
            [format_title(_TRAIN_COLUMNS.get(name, name)) for name in columns],
            [[_format_cell(name, row.get(name, "")) for name in columns] for row, _ in rows],
            best=next((number for number, (_, is_best) in enumerate(rows) if is_best), None),
            above=[headline] if (headline := self._headline()) else [],
            below=[f"test: {_format_row(row)} (step {_format_number(row.get('step', '?'))})" for row in self["test"]],
            is_abridged=True,
        )

    def _figure(self) -> Any:
        train, valid = self["train_metrics_history"], self["valid"]
        texts = {name for row in valid for name, value in row.items() if isinstance(value, str)}
        names = {name for row in valid for name in row} - texts
        losses = sorted(name for name in names if name.endswith("_loss"))
        metrics = sort_for_display(dict.fromkeys(sorted(names - {*losses, *_POSITION}), 0.0))
        figure, (top, *metric_axes) = create_panels("MetricsDict", 1 + len(metrics))
        draw_curve(top, _points(train, "train_loss"), format_title("train_loss"))
        for axes, panel in zip([top, *metric_axes], [losses, *([name] for name in metrics)], strict=True):
            for name in panel:
                draw_curve(axes, _points(valid, name), format_title(name))
            self._draw_marks(axes, is_named=axes is top)
        rates = _draw_rate(top, _points(train, "learning_rate"))
        for axes in (top, *metric_axes):
            lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
            if lines:
                axes.legend(handles=[*lines, *(rates if axes is top else [])], fontsize="small")
        axes.set_xlabel("step")
        return figure

    def _draw_marks(self, axes: Any, is_named: bool) -> None:
        """Draw vertical lines at the best evaluation and at the end, with names in the legend."""
        steps = [row["step"] for row in (*self["train_metrics_history"], *self["valid"]) if "step" in row]
        reason = f" ({self['stop_reason']})" if "stop_reason" in self else ""
        for name, step, note, color, style in (
            ("best", self.get("best_step"), "", "tab:green", "--"),
            ("end", max(steps, default=None), reason, "0.5", ":"),
        ):
            if step is not None and axes.get_lines():
                label = f"{name}, step {step}{note}" if is_named else f"_{name}"
                axes.axvline(step, linewidth=1, label=label, color=color, linestyle=style)


class HistoryEncoder:
    r"""Encodes the rows of a history as lines of JSON, each row only once.

    In omnitrain.json, every save would encode all rows again, and its time would grow with the number of evaluations.

    >>> encoder, metrics = HistoryEncoder(), MetricsDict()
    >>> metrics.add_train({"epoch": 1, "step": 10, "train_loss": 0.5})
    >>> encoder.encode({"train_metrics_history": 1}, metrics)
    b'{"train_metrics_history":{"epoch":1,"step":10,"train_loss":0.5}}\n'
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._tables: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._text = bytearray()

    def encode(self, counts: Mapping[str, int], metrics: MetricsDict) -> bytes:
        """Return the first rows of each table as text.

        Args:
            counts: The number of rows of each table; rows of the previous call must not have changed.
            metrics: The history.
        """
        tables = {name: dict.__getitem__(metrics, name) for name in counts}
        for name, count in self._counts.items():
            if self._tables[name] is not tables[name] or count > counts[name]:
                self._reset()  # a different history: a checkpoint was loaded
                break
        for name, count in counts.items():
            for entry in tables[name][self._counts.get(name, 0) : count]:
                self._text += json.dumps({name: entry}, separators=(",", ":")).encode() + b"\n"
        self._tables, self._counts = tables, dict(counts)
        return bytes(self._text)


def quote_names(names: Iterable[str]) -> str:
    """Return names for a message: 'loss', 'accuracy'."""
    return ", ".join(repr(name) for name in names) or "nothing"


def _to_plain(name: str, value: Any) -> float | int | str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:
        value = value.item()
    if isinstance(value, str):
        odd = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
        return odd.get(value, str(value))
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        # One NaN object for all: dicts compare by identity first, so equal histories with NaN compare equal.
        return math.nan if math.isnan(value) else float(value)
    kind = type(value).__name__ + (f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else "")
    raise ConfigError(f"{name!r} must be a number or a string, got a {kind}. Return one float per metric.")


def _to_strict_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a row for strict JSON, in which NaN and infinity are text."""
    strict = dict(row)
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            strict[name] = json.dumps(value)
    return strict


def _to_plain_row(row: Mapping[str, Any]) -> MetricRow:
    return MetricRow({str(name): _to_plain(str(name), value) for name, value in row.items()})


def _format_number(value: float | int | str) -> str:
    """Return a number in a few digits."""
    if not isinstance(value, float):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.4f}"
    return f"{value:.3g}"


def _format_cell(name: str, value: float | int | str) -> str:
    """Return a value in the format of its descriptor, or in a few digits."""
    if is_described(name) and isinstance(value, (int, float)):
        return format(value, get_descriptor(name).format)
    return _format_number(value)


def _format_position(value: float | int | str) -> str:
    """Return an epoch, without decimals if it is an integer: 2, or 2.5."""
    return value if isinstance(value, str) else f"{round(value, 4):g}"


def _format_row(row: Mapping[str, Any]) -> str:
    """Return the metrics of a row as text: loss 0.6000, accuracy 0.8000."""
    return ", ".join(
        f"{format_title(bare_name(name))} {_format_cell(name, value)}"
        for name, value in row.items()
        if name not in _POSITION
    )


def _points(rows: list[MetricRow], name: str) -> list[tuple[int, float]]:
    """Return step and value of each row that has a value of this name."""
    return [(row["step"], row[name]) for row in rows if name in row]


def _draw_rate(axes: Any, points: list[tuple[int, float]]) -> list[Any]:
    """Draw the learning rate on a second axis at the right; return its line, if any."""
    if len(points) < 2:
        return []
    right = axes.twinx()
    lines = draw_curve(right, points, "learning rate", color="0.6", linewidth=1, zorder=0, marker=None)
    right.set_ylabel("learning rate", color="0.5")
    right.tick_params(axis="y", colors="0.5")
    right.set_ylim(bottom=0)
    axes.set_zorder(right.get_zorder() + 1)  # so that the losses are drawn over it
    axes.patch.set_visible(False)
    return lines


def write_results(folder: Path, split: str, metrics: Mapping[str, Any], is_main: bool) -> Path:
    """Write metrics to `<split>_results.json` in a folder, on the main process only; return the path of the file.

    If the disk fails, this is logged, and the file stays unchanged.
    """
    path = folder / f"{split}_results.json"
    if is_main:
        text = json.dumps(dict(metrics), indent=2) + "\n"
        with Tolerance(path.name, f"It would hold {text!r}."):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text.encode())
    return path
