"""Measuring variants of the same work against each other: interleaved rounds, ratios within a round, one table.

What is measured is in `overhead.py`.
"""

from __future__ import annotations

import gc
import json
import math
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
    """A variant of a case beside the reference of the same rounds, which is the case's first row.

    Attributes:
        unit: Of `value` and what is added.
        value: Median of the rounds.
        ratio: To the reference.
        added: Difference to the reference.
        cpu_ratio: The ratio in CPU time, which other programs on the machine disturb less; None where not measured.
        cpu_added: The difference in CPU time.
    """

    case: str
    variant: str
    unit: str
    value: float
    ratio: Spread
    added: Spread
    cpu_ratio: Spread | None
    cpu_added: Spread | None


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


def interleaved(variants: Mapping[str, Callable[[], Sample]], rounds: int, warm_up: int = 1) -> dict[str, list[Sample]]:
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


def compare(values: Sequence[float], others: Sequence[float], scale: float) -> tuple[Spread, Spread]:
    """Return ratio and difference of two variants' measurements, round by round."""
    pairs = list(zip(values, others, strict=True))
    return Spread.of([one / other if other else math.nan for one, other in pairs]), Spread.of(
        [(one - other) * scale for one, other in pairs]
    )


def summarize(case: str, samples: Mapping[str, list[Sample]], unit: str, scale: float) -> list[Row]:
    """Return the rows of a case, whose first variant is the reference.

    Args:
        case: Its name.
        samples: What `interleaved` returned.
        unit: The unit to print in.
        scale: What turns a measured value into that unit.
    """
    reference = next(iter(samples.values()))
    rows = []
    for name, taken in samples.items():
        ratio, added = compare([one.value for one in taken], [one.value for one in reference], scale)
        cpu, reference_cpu = ([one.cpu for one in group if one.cpu is not None] for group in (taken, reference))
        cpu_ratio, cpu_added = compare(cpu, reference_cpu, scale) if cpu else (None, None)
        value = statistics.median(sample.value for sample in taken) * scale
        rows.append(Row(case, name, unit, value, ratio, added, cpu_ratio, cpu_added))
    return rows


HEAD = ("case", "variant", "median", "", "x ref", "[min, max]", "added", "[min, max]", "x ref CPU", "added CPU")
TO_THE_RIGHT = (2, 4, 6, 8, 9)


def show(rows: Sequence[Row]) -> str:
    """Return the rows as one aligned table, with a gap before every case."""
    table, case = [HEAD], None
    for row in rows:
        line = [row.case if row.case != case else "", row.variant, f"{row.value:.1f}", row.unit]
        if row.case != case:
            line += ["ref"] + [""] * 5
        else:
            line += [f"{row.ratio.median:.3f}", f"[{row.ratio.min:.2f}, {row.ratio.max:.2f}]"]
            line += [f"{row.added.median:+.1f}", f"[{row.added.min:+.1f}, {row.added.max:+.1f}]"]
            line += ["" if row.cpu_ratio is None else f"{row.cpu_ratio.median:.3f}"]
            line += ["" if row.cpu_added is None else f"{row.cpu_added.median:+.1f}"]
        table.append(tuple(line))
        case = row.case
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    text = []
    for line in table:
        cells = [
            cell.rjust(width) if column in TO_THE_RIGHT else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append(("\n" if line[0] else "") + "  ".join(cells).rstrip())
    return "\n".join(text)


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
