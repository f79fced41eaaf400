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

# The most rounds of a case.
_max_rounds: float = math.inf
# What `clock` reads.
_timer: Callable[[], float] = time.perf_counter


def clock() -> float:
    """Return the time in seconds: of the wall, or the CPU time of this process after `use_cpu_time()`."""
    return _timer()


def use_cpu_time() -> None:
    """Measure the CPU time of this process, which leaves out what other programs on the machine take."""
    global _timer
    _timer = time.process_time


def limit_rounds(rounds: int) -> None:
    """Measure no case in more than this many rounds."""
    global _max_rounds
    _max_rounds = rounds


class Sample(NamedTuple):
    """One measurement.

    Attributes:
        value: Seconds, or any other number.
        stretches: The same as extrapolated from short stretches of the work, of which some are undisturbed.
    """

    value: float
    stretches: list[float]


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
        unit: Of `value` and of all that is added.
        value: Median of the rounds.
        ratio: To the reference.
        added: Difference to the reference.
        calm_ratio: Ratio of the fast stretches, which other programs on the machine hardly disturb.
        calm_added: Difference of the same.
    """

    case: str
    variant: str
    unit: str
    value: float
    ratio: Spread
    added: Spread
    calm_ratio: float
    calm_added: float


def timed(
    prepare: Callable[[], Callable[[], Any]],
    check: Callable[[Any], None],
    stretches: Callable[[], list[float]] = list,
) -> Callable[[], Sample]:
    """Return a measurement of what `prepare()` returns.

    Args:
        prepare: Does what is not to be measured, and returns what is.
        check: Gets the result and raises if the work was not done.
        stretches: Returns the `Sample.stretches` of the run that has just ended; none stand for the whole run.
    """

    def sample() -> Sample:
        run = prepare()
        gc.collect()
        start = clock()
        result = run()
        seconds = clock() - start
        check(result)
        return Sample(seconds, stretches() or [seconds])

    return sample


def interleaved(variants: Mapping[str, Callable[[], Sample]], rounds: int, warm_up: int = 1) -> dict[str, list[Sample]]:
    """Measure all variants once per round, each round starting with another one; rounds to warm up are left out."""
    names = list(variants)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for number in range(-warm_up, int(min(rounds, _max_rounds))):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            sample = variants[name]()
            if number >= 0:
                samples[name].append(sample)
    return samples


def calm(samples: Sequence[Sample]) -> float:
    """Return the second percentile of all stretches: the least of them would be that of a lucky one."""
    stretches = sorted(stretch for sample in samples for stretch in sample.stretches)
    return stretches[len(stretches) // 50]


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
    for name, measured in samples.items():
        pairs = [(sample.value, other.value) for sample, other in zip(measured, reference, strict=True)]
        rows.append(
            Row(
                case,
                name,
                unit,
                statistics.median(sample.value for sample in measured) * scale,
                Spread.of([sample / other for sample, other in pairs]),
                Spread.of([(sample - other) * scale for sample, other in pairs]),
                calm(measured) / calm(reference),
                (calm(measured) - calm(reference)) * scale,
            )
        )
    return rows


HEAD = ("case", "variant", "median", "", "x ref", "[min, max]", "added", "[min, max]", "x ref calm", "added calm")
TO_THE_RIGHT = (2, 4, 6, 8, 9)


def show(rows: Sequence[Row]) -> str:
    """Return the rows as one aligned table, with a gap before every case."""
    table: list[tuple[str, ...]] = [HEAD]
    case = None
    for row in rows:
        line = [row.case if row.case != case else "", row.variant, f"{row.value:.1f}", row.unit]
        if row.case != case:
            line += ["ref"] + [""] * 5
        else:
            line += [f"{row.ratio.median:.3f}", f"[{row.ratio.min:.2f}, {row.ratio.max:.2f}]"]
            line += [f"{row.added.median:+.1f}", f"[{row.added.min:+.1f}, {row.added.max:+.1f}]"]
            line += [f"{row.calm_ratio:.3f}", f"{row.calm_added:+.1f}"]
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
