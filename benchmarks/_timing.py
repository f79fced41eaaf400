"""Measuring variants of the same work against each other: interleaved rounds, ratios within a round, one table.

What is measured is in `overhead.py`.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Sample(NamedTuple):
    """One measurement: seconds on the clock and, for work in this process, seconds of CPU; or any one other number."""

    value: float
    cpu: float | None = None


class Spread(NamedTuple):
    """Median, least and greatest of the rounds."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(slots=True)
class Row:
    """A variant of a case beside the reference of the same rounds.

    Attributes:
        unit: Of `value` and `added`.
        value: Median of the rounds.
        ratio: To the reference; None where the reference is next to nothing.
        cpu_ratio: The same in CPU time, which other programs on the machine disturb less.
        added: Difference to the reference.
    """

    case: str
    variant: str
    unit: str
    value: float
    ratio: Spread | None
    cpu_ratio: Spread | None
    added: Spread


def timed(prepare: Callable[[], Callable[[], Any]], check: Callable[[Any], None]) -> Callable[[], Sample]:
    """Return a measurement of what `prepare()` returns; `check` gets its result and raises if the work was not done."""

    def sample() -> Sample:
        run = prepare()
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        result = run()
        taken = Sample(time.perf_counter() - wall, time.process_time() - cpu)
        check(result)
        return taken

    return sample


def interleaved(
    variants: Mapping[str, Callable[[], Sample]], rounds: int, warm_up: int = 1
) -> dict[str, list[Sample]]:
    """Measure all variants once per round, each round starting with another one; rounds to warm up are left out."""
    names = list(variants)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            sample = variants[name]()
            if number >= 0:
                samples[name].append(sample)
    return samples


def summarize(case: str, samples: Mapping[str, list[Sample]], unit: str, per_second: float) -> list[Row]:
    """Return the rows of a case, whose first variant is the reference.

    Args:
        case: Its name.
        samples: What `interleaved` returned.
        unit: The unit to print in.
        per_second: How many of that unit a measured second is.
    """
    reference = next(iter(samples.values()))
    rows = []
    for name, taken in samples.items():
        pairs = list(zip(taken, reference, strict=True))
        cpu = [one.cpu / other.cpu for one, other in pairs if one.cpu is not None and other.cpu]
        rows.append(
            Row(
                case,
                name,
                unit,
                statistics.median(sample.value for sample in taken) * per_second,
                Spread.of([one.value / other.value for one, other in pairs]) if all(o.value for _, o in pairs) else None,
                Spread.of(cpu) if cpu else None,
                Spread.of([(one.value - other.value) * per_second for one, other in pairs]),
            )
        )
    return rows


def show(rows: Sequence[Row]) -> str:
    """Return the rows as one aligned table."""
    table = [("case", "variant", "median", "", "x ref", "[min, max]", "x ref, CPU", "added", "[min, max]")]
    case = None
    for row in rows:
        is_reference = row.case != case
        table.append(
            (
                row.case if is_reference else "",
                row.variant,
                f"{row.value:.1f}" if abs(row.value) >= 10 else f"{row.value:.3f}",
                row.unit,
                "reference" if is_reference else "" if row.ratio is None else f"{row.ratio.median:.3f}",
                "" if is_reference or row.ratio is None else f"[{row.ratio.min:.2f}, {row.ratio.max:.2f}]",
                "" if is_reference or row.cpu_ratio is None else f"{row.cpu_ratio.median:.3f}",
                "" if is_reference else f"{row.added.median:+.1f}",
                "" if is_reference else f"[{row.added.min:+.1f}, {row.added.max:+.1f}]",
            )
        )
        case = row.case
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = []
    for line in table:
        if line[0]:
            lines.append("")  # a gap before every case
        cells = (text.rjust(w) if i in (2, 4, 6, 7) else text.ljust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines[1:])


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def write_json(path: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> None:
    """Write the rows and what they depend on; spreads are [median, min, max]."""
    path.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=2) + "\n", encoding="utf-8")
