"""Live notebook display of a run.

Requires only IPython, no widgets, so that the output of a finished run is saved with the notebook. `progress_bar.py`
decides what is shown when.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from time import perf_counter
from typing import Any

from omnitrain.core.events import TrainerLike
from omnitrain.core.history import MetricsDict
from omnitrain.loggers.summary import opening, position

# A refresh sends some kilobytes to the browser and takes about a millisecond.
REFRESH_SECONDS = 0.5
_MAX_POINTS = 300
_COLORS = ("#1f77b4", "#ff7f0e")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 150, 60, 20


def is_notebook(stream: Any) -> bool:
    """Whether text printed to a stream appears in a notebook."""
    # `%%capture` and a redirected stdout have another stream, which gets plain lines
    return "ipykernel" in sys.modules and type(stream).__module__.startswith("ipykernel.")


def show_in_notebooks(kind: type, to_html: Callable[[Any], str]) -> None:
    """Register an HTML formatter for a class, if this is IPython."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.display_formatter.formatters["text/html"].for_type(kind, to_html)


def trainer_html(trainer: TrainerLike) -> str:
    """Return the HTML representation of a trainer: its summary, position and metrics."""
    lines = [type(trainer).__name__, *opening(trainer, is_start=False)]
    step = trainer.progress.step
    if step:
        lines.append(f"at {position(step, trainer.total_steps, trainer.limits.fraction(trainer.progress))}")
    metrics = trainer.metrics
    has_rows = metrics["valid"] or metrics["train_metrics_history"] or metrics["test"]
    return "\n".join([_pre_html(lines), *([metrics._repr_html_()] if has_rows else [])])


class NotebookPanel:
    """The display of one run in the output of a cell, below its first lines; each run has a separate one."""

    def __init__(self, first: Sequence[str]) -> None:
        from IPython.display import display

        self._first = list(first)
        self._lines: list[str] = list(first)
        self._notes: list[str] = []
        self._status: tuple[float, str] = (0.0, "")
        self._curves: dict[str, list[tuple[float, float]]] = {"loss": [], "eval_loss": []}
        self._next_refresh = 0.0
        self._handle = display(self._content(None), raw=True, display_id=True)

    def add_line(self, line: str, is_note: bool = True) -> None:
        """Add a line of text, such as a preview; a line with `is_note=False` is shown only without HTML."""
        self._lines.append(line)
        if is_note:
            self._notes.append(line)

    def add_point(self, step: float, values: Mapping[str, Any]) -> None:
        """Add the losses of a row to the curves."""
        for name, points in self._curves.items():
            value = values.get(name)
            if isinstance(value, (int, float)) and math.isfinite(value):
                points.append((step, float(value)))
                if len(points) > _MAX_POINTS:
                    del points[1:-1:2]

    def refresh(self, fraction: float, status: str, metrics: MetricsDict, is_last: bool = False) -> None:
        """Redraw the panel, at most about twice a second except at the end; `fraction` is completed."""
        time = perf_counter()
        if not is_last and time < self._next_refresh:
            return
        self._next_refresh = time + REFRESH_SECONDS
        self._status = fraction, status
        if self._handle is not None:
            self._handle.update(self._content(metrics), raw=True)

    def _content(self, metrics: MetricsDict | None) -> dict[str, str]:
        fraction, status = self._status
        parts = [_pre_html(self._first)]
        bar = f'<progress value="{fraction:.4f}" max="1" style="width:{_WIDTH}px"></progress>'
        parts.append(f"<div>{bar}</div>{_pre_html([status])}")
        parts.append(curve_svg(self._curves))
        if metrics is not None and (metrics["valid"] or metrics["train_metrics_history"]):
            parts.append(metrics._repr_html_())
        parts.append(_pre_html(self._notes))
        text = "\n".join([*self._lines, *([status] if status and fraction < 1.0 else [])])
        return {"text/html": "\n".join(filter(None, parts)), "text/plain": text}


def _pre_html(lines: Sequence[str]) -> str:
    if not any(lines):
        return ""
    return f'<pre style="margin:2px 0;white-space:pre-wrap">{escape(chr(10).join(lines))}</pre>'


def curve_svg(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return a plot of curves over the step as SVG; empty if none has two points."""
    drawn = {name: points for name, points in curves.items() if len(points) > 1}
    if not drawn:
        return ""
    xs = [x for points in drawn.values() for x, _ in points]
    ys = [y for points in drawn.values() for _, y in points]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    x_scale, y_scale = (_WIDTH - _LEFT - 10) / ((x1 - x0) or 1.0), (_HEIGHT - _BOTTOM - 10) / ((y1 - y0) or 1.0)

    def point(x: float, y: float) -> str:
        return f"{_LEFT + (x - x0) * x_scale:.1f},{_HEIGHT - _BOTTOM - (y - y0) * y_scale:.1f}"

    def label(x: float, y: float, anchor: str, text: str, color: str = "currentColor") -> str:
        style = f'text-anchor="{anchor}" font-size="11" font-family="sans-serif" fill="{color}"'
        return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'

    frame = f"M{_LEFT},10 V{_HEIGHT - _BOTTOM} H{_WIDTH - 10}"
    parts = [
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">',
        f'<path d="{frame}" fill="none" stroke="currentColor" stroke-opacity="0.4"/>',
        *(label(_LEFT - 4, y, "end", f"{value:.4g}") for y, value in ((14, y1), (_HEIGHT - _BOTTOM, y0))),
        label(_LEFT, _HEIGHT - 5, "start", f"{x0:g}"),
        label(_WIDTH - 10, _HEIGHT - 5, "end", f"{x1:g}"),
        label((_LEFT + _WIDTH) / 2, _HEIGHT - 5, "middle", "step"),
        label(_LEFT - 4, _HEIGHT / 2, "end", "loss"),
    ]
    colors = dict(zip(curves, _COLORS * len(curves), strict=False))
    for number, (name, points) in enumerate(drawn.items()):
        path = " ".join(point(x, y) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colors[name]}" stroke-width="1.5"/>')
        parts.append(label(_WIDTH - 16, 22 + 14 * number, "end", name, colors[name]))
    return "".join([*parts, "</svg>"])
