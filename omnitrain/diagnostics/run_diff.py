"""The first step at which two runs part, and its cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnitrain.callbacks.trace import TRACE_FILE, TRACED
from omnitrain.checkpoint.run_record import read_record
from omnitrain.core.display import ProofResult, create_panels, draw_curve, flatten
from omnitrain.core.errors import ConfigError, escape_unprintable
from omnitrain.core.history import read_row

METRICS_FILE = "metrics.jsonl"
# The entries of a start that differ between any two runs.
_PER_START = ("started_at", "step", "resumed_from", "command", "hosts")
# The values of a row of logs that do not depend on time.
_LOGGED = ("loss", "grad_norm", "learning_rate", "loss_scale")
_TITLES = {"random": "random state", "grad_norm": "norm of the gradients", "learning_rate": "learning rate"}
_MAX_SHOWN = 30


@dataclass(frozen=True, slots=True)
class RunDiff(ProofResult):
    """Two runs compared step by step; prints as lines, and `plot()` draws both losses up to where they part and on.

    Attributes:
        a: The first run.
        b: The second run.
        source: The files by which they were compared: "trace.jsonl", or "metrics.jsonl" if one run has no trace.
        equal_to: The last step up to which they are equal; 0 if none is.
        step: The step at which they part; None if they do not.
        same: What is the same in this step, in the order in which a step comes to it.
        differs: What differs in this step, in the same order: the first is the cause of the others.
        values: Two numbers of the step, by name, such as its loss in both runs.
        record: The values of their records that differ, by name.
        notes: What limits the comparison.
        losses: The training loss of the steps of both runs.
    """

    a: str
    b: str
    source: str
    equal_to: int
    step: int | None
    same: list[str]
    differs: list[str]
    values: dict[str, tuple[Any, Any]]
    record: dict[str, tuple[Any, Any]]
    notes: list[str]
    losses: tuple[list[tuple[int, float]], ...] = field(default=(), repr=False)

    @property
    def ok(self) -> bool:
        """Whether the runs are equal in every step that both have."""
        return self.step is None

    def _figure(self) -> Any:
        figure, (axes,) = create_panels("RunDiff", 1)
        for name, points, width in zip((self.a, self.b), self.losses, (5, 1.2), strict=False):
            draw_curve(axes, points, name, linewidth=width, alpha=0.5 if width > 2 else 1, marker=None)
        if self.step is not None:
            axes.axvline(self.step, color="#888", linewidth=0.8, linestyle=":", label=f"other {self.differs[0]}")
        axes.set(xlabel="step", ylabel="training loss")
        axes.legend(fontsize="small")
        return figure

    def __str__(self) -> str:
        """Return where the runs part, and what differs in their records, as lines."""
        extent = f"equal to step {self.equal_to}" if self.equal_to else "they part at once"
        lines = [f"{self.a} and {self.b}, by {self.source}: {extent}"]
        if self.step is not None:
            cause, *rest = [_TITLES.get(name, name) for name in self.differs]
            parts = [f"same {_TITLES.get(name, name)}" for name in self.same] + [f"other {cause}"]
            lines.append(f"step {self.step}: {', '.join(parts)}" + (f" (and {', '.join(rest)})" if rest else ""))
        lines += [f"  {name}: {before!r} and {after!r}" for name, (before, after) in self.values.items()]
        if self.record:
            lines.append("their records differ in")
            shown = list(self.record.items())[:_MAX_SHOWN]
            lines += [f"  {name}: {_shorten(before)} and {_shorten(after)}" for name, (before, after) in shown]
            if len(self.record) > _MAX_SHOWN:
                lines.append(f"  and {len(self.record) - _MAX_SHOWN} more values")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(map(escape_unprintable, lines))


def _shorten(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def diff_runs(a: Path, b: Path, names: Sequence[str] | None = None) -> RunDiff:
    """Compare two runs step by step, by the digests of a `Trace`, or by their rows of logs if one has none.

    Args:
        a: The folder of a run.
        b: The folder of another run.
        names: What the result calls them; None are their paths.

    Raises:
        ConfigError: If a folder has neither file, or the runs have no step in common.
    """
    sides, notes = (a, b), list[str]()
    for folder in sides:
        if not any((folder / file).is_file() for file in (TRACE_FILE, METRICS_FILE)):
            problem = f"has neither {TRACE_FILE} nor {METRICS_FILE}" if folder.is_dir() else "is no folder"
            raise ConfigError(f"{str(folder)!r} {problem}. Give a run's `save_dir`.")
    records = [read_record(folder) for folder in sides]
    missing = [folder for folder in sides if not (folder / TRACE_FILE).is_file()]
    source = METRICS_FILE if missing else TRACE_FILE
    if missing:
        notes.append(
            f"{' and '.join(repr(str(folder)) for folder in missing)} has no {TRACE_FILE}: only the rows of logs were "
            "compared. Pass callbacks=[Trace()] to see each step, and what parts first."
        )
    rows = [read_rows(folder / source) for folder in sides]
    common = [key for key in rows[0] if key in rows[1]]
    if not common:
        raise ConfigError(f"{str(a)!r} and {str(b)!r} have no step in common in {source}: there is nothing to compare.")
    ignored: set[str] = set()
    processes = [record.get("processes") for record in records]
    if processes[0] != processes[1]:
        # each process has its own generators, and sums in another order are rounded in another way
        ignored = {"random"}
        notes.append(
            f"they ran on {processes[0]} and {processes[1]} processes, so that random numbers are others, and losses "
            "and gradients may differ by rounding."
        )
    ends = [list(side)[-1][0] for side in rows]
    if ends[0] != ends[1]:
        notes.append(f"the last step is {ends[0]} in {a.name!r} and {ends[1]} in {b.name!r}.")
    equal_to, step, same, differs, values = 0, None, list[str](), list[str](), dict[str, tuple[Any, Any]]()
    for key in common:
        row_a, row_b = rows[0][key], rows[1][key]
        compared = _compared_names(row_a, row_b, source, ignored)
        differs = [name for name in compared if row_a[name] != row_b[name]]
        if differs:
            step, same = key[0], compared[: compared.index(differs[0])]
            numbers = ("mean_loss",) if source == TRACE_FILE else differs
            values = {
                name: (row_a.get(name), row_b.get(name)) for name in numbers if row_a.get(name) != row_b.get(name)
            }
            break
        equal_to = key[0]
    before, after = (flatten({name: start[name] for name in start if name not in _PER_START}) for start in records)
    record = {
        name: (before.get(name), after.get(name)) for name in {**before, **after} if before.get(name) != after.get(name)
    }
    labels = names or (str(a), str(b))
    losses = tuple([_losses(side) for side in rows])
    return RunDiff(labels[0], labels[1], source, equal_to, step, same, differs, values, record, notes, losses)


def _losses(rows: Mapping[tuple[int, Any], Mapping[str, Any]]) -> list[tuple[int, float]]:
    values = [(key[0], row.get("mean_loss", row.get("loss"))) for key, row in rows.items()]
    return [(step, float(loss)) for step, loss in values if isinstance(loss, (int, float))]


def _compared_names(
    row_a: Mapping[str, Any], row_b: Mapping[str, Any], source: str, ignored: Iterable[str]
) -> list[str]:
    names = (
        [*TRACED] if source == TRACE_FILE else [*_LOGGED, *sorted(name for name in row_a if name.startswith("eval_"))]
    )
    return [
        name
        for name in names
        if name in row_a and name in row_b and name not in ignored and not name.endswith(("_per_second", "_runtime"))
    ]


def read_rows(path: Path) -> dict[tuple[int, Any], dict[str, Any]]:
    """Return the rows by step, and by what tells apart several rows of a step, without lines that are no rows."""
    rows: dict[tuple[int, Any], dict[str, Any]] = {}
    with path.open("rb") as file:
        for line in file:
            row = read_row(line)
            if row is None or row["kind"] not in ("step", "train", "eval"):
                continue
            rows[row["step"], row.get("epoch") if row.get("skipped") else row["kind"]] = row
    return rows
