"""Tables and figures of results, for consoles, files and notebooks. No torch."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, overload

from omnitrain.core.errors import MissingExtraError

_FIRST_ROWS, _LAST_ROWS = 5, 15


@dataclass(frozen=True, slots=True)
class Table:
    """A table as text and as HTML.

    Attributes:
        titles: The titles of the columns.
        rows: The cells of each row.
        best: The number of the row to mark: by `*` in text, by bold cells in HTML.
        above: Lines above the table.
        below: Lines below it.
        is_first_left: Whether the first column is aligned to the left; all others are to the right.
        is_abridged: Whether only the first and last rows of a long table are shown.

    >>> print(Table(["run", "loss"], [["a", "0.25"], ["long", "0.5"]], best=0, is_first_left=True))
    run   loss
    a     0.25  *
    long   0.5
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: int | None = None
    above: Sequence[str] = ()
    below: Sequence[str] = ()
    is_first_left: bool = False
    is_abridged: bool = False

    def __str__(self) -> str:
        """Return the table with aligned columns."""
        widths = [max(map(len, column)) for column in zip(self.titles, *self.rows, strict=True)]
        lines = list(self.above)
        for cells, is_best in [(self.titles, False), *self._shown_rows()] if self.rows else ():
            if isinstance(cells, str):
                lines.append(cells)
                continue
            aligned = [*map(str.rjust, cells, widths)]
            if self.is_first_left:
                aligned[0] = cells[0].ljust(widths[0])
            lines.append(("  ".join(aligned) + ("  *" if is_best else "")).rstrip())
        return "\n".join([*lines, *self.below])

    def to_html(self) -> str:
        """Return the table as HTML."""
        from html import escape  # with a table of 2,000 entities, which no run needs

        def to_row(cells: Sequence[str], kind: str) -> str:
            return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"

        lines = [f"<div>{escape(line)}</div>" for line in self.above]
        if self.rows:
            lines += ["<table>", to_row(self.titles, "th")]
            for cells, is_best in self._shown_rows():
                is_gap = isinstance(cells, str)
                gap = f'<tr><td colspan="{len(self.titles)}">{cells}</td></tr>'
                lines.append(gap if is_gap else to_row(cells, "th" if is_best else "td"))
            lines.append("</table>")
        return "\n".join([*lines, *(f"<div>{escape(line)}</div>" for line in self.below)])

    def _shown_rows(self) -> Iterator[tuple[Sequence[str], bool]]:
        """Yield the cells of each row, or a string for omitted ones, and whether it is the best."""
        hidden = len(self.rows) - _FIRST_ROWS - _LAST_ROWS if self.is_abridged else 0
        for number, cells in enumerate(self.rows):
            if hidden <= 1 or not _FIRST_ROWS <= number < _FIRST_ROWS + hidden:
                yield cells, number == self.best
            elif number == _FIRST_ROWS:
                yield f"… {hidden} rows …", False


class ResultView:
    """Base class of results that are shown as a table and as a figure."""

    __slots__ = ()

    def _table(self) -> Table:
        raise NotImplementedError

    def _figure(self) -> Any:
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the table."""
        return str(self._table()) or "no metrics yet"

    def _repr_html_(self) -> str:
        """Show the table in notebooks."""
        return self._table().to_html() or "no metrics yet"

    @overload
    def plot(self, path: str | os.PathLike[str]) -> Path: ...
    @overload
    def plot(self, path: None = None) -> Any: ...
    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw the figure that the class describes.

        Args:
            path: The image to write; its suffix is the format, PNG by default. None returns a figure instead, which a
                notebook shows.

        Returns:
            The path of the image, or the figure of matplotlib.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        figure = self._figure()
        if path is None:
            return figure
        path = ensure_folder(path)
        figure.savefig(path, format=path.suffix[1:] or "png")
        return path


class ProofResult(ResultView):
    """Base class of results that say yes or no: as text, as JSON, and by an exit code."""

    __slots__ = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        raise NotImplementedError

    @property
    def code(self) -> int:
        """The exit code of the command: 0 if nothing is wrong, 1 if something is, 2 if it could not be tried."""
        return 0 if self.ok else 1

    def to_json(self) -> dict[str, Any]:
        """Return `ok` and the fields that a dataclass shows, as JSON types."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.repr}  # type: ignore[arg-type]
        return {"ok": self.ok, **json.loads(json.dumps(values, default=asdict))}

    def _repr_html_(self) -> str:
        """Show the table in notebooks, or the text of a result without one."""
        from html import escape

        has_table = type(self)._table is not ResultView._table
        return ResultView._repr_html_(self) if has_table else f"<pre>{escape(str(self))}</pre>"


def create_panels(caller: str, count: int, has_one_axis: bool = True) -> tuple[Any, list[Any]]:
    """Return a figure of matplotlib, and its panels from top to bottom, which have one x axis or one each.

    It is made without pyplot, whose global state belongs to the user.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(f"{caller}.plot", "matplotlib", "plot") from error

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            """Show the figure in notebooks, which otherwise show only those of pyplot."""
            image = io.BytesIO()
            self.savefig(image, format="png")
            return image.getvalue()

    figure = ShownFigure(figsize=(7.2, 2.8 * count + 0.4), layout="constrained")
    panels = list(figure.subplots(count, squeeze=False, sharex=has_one_axis)[:, 0])
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


def draw_curve(axes: Any, points: Sequence[tuple[float, float]], label: str, **style: Any) -> list[Any]:
    """Draw points as a line, with dots if they are few; return the line, if there are points."""
    style = {"marker": "." if len(points) < 100 else None, **style}
    return list(axes.plot(*zip(*points, strict=True), label=label, **style)) if points else []


def ensure_folder(path: str | os.PathLike[str]) -> Path:
    """Return the path, after creating its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Return the values in dicts and lists by dotted names.

    >>> flatten({"a": [1, {"b": 2}], "c": {}})
    {'a.0': 1, 'a.1.b': 2, 'c': {}}
    """
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    flat: dict[str, Any] = {}
    for key, entry in entries:
        flat |= flatten(entry, f"{name}.{key}" if name else str(key))
    return flat or ({name: value} if name else {})
