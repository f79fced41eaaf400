"""Preview of a schedule as table and plot. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from omnitrain.core.display import ResultView, Table, create_figure
from omnitrain.core.duration import Duration, Limits
from omnitrain.core.errors import ConfigError, check_number
from omnitrain.core.progress import Progress
from omnitrain.optim.schedules import Length, RunLength, RunPosition, Schedule, named_schedule, warmup_length


@dataclass(frozen=True, slots=True)
class SchedulePreview(ResultView):
    """The rates of a schedule over a run, which prints as a table; `plot()` draws them.

    Attributes:
        unit: What the places count: "ba" (steps), "sp" (samples), "tok" (tokens) or "s" (seconds).
        places: Where the rates are, from the beginning of the run to its end.
        rates: The learning rate at each place.
    """

    unit: str
    places: list[float]
    rates: list[float]
    _curve: tuple[list[float], list[float]] = field(repr=False, compare=False)

    def _figure(self) -> Any:
        figure = create_figure("SchedulePreview.plot", 3.2)
        axes = figure.subplots()
        axes.plot(*self._curve)
        axes.set_xlabel(_COUNTED[self.unit])
        axes.set_ylabel("learning rate")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        return figure

    def _table(self) -> Table:
        end = self.places[-1]
        shown = [f"{place:.0f}" if end >= 10 or float(place).is_integer() else f"{place:g}" for place in self.places]
        rows = [
            (f"{place / end:.0%}", words, f"{rate:.4g}")
            for place, words, rate in zip(self.places, shown, self.rates, strict=True)
        ]
        return Table(["run", _COUNTED[self.unit], "learning rate"], rows)


def preview_schedule(
    schedule: Schedule | str,
    *,
    epochs: float | None = None,
    max_steps: int | None = None,
    max_duration: int | str | Duration | None = None,
    learning_rate: float = 1.0,
    warmup_steps: Length = 0,
    lr_scheduler_kwargs: Mapping[str, Any] | None = None,
    steps_per_epoch: int | None = None,
    samples_per_step: float | None = None,
    tokens_per_step: float | None = None,
    seconds_per_step: float | None = None,
    rows: int = 11,
) -> SchedulePreview:
    """Return the rates that a schedule gives over a run, without a model and without training.

    Args:
        schedule: A schedule of omnitrain, or its name.
        epochs: The length of the run; this or one of the next two is needed.
        max_steps: The same in steps.
        max_duration: Any other length, such as "3e6tok".
        learning_rate: That of the optimizer.
        warmup_steps: The warm-up of a schedule by name.
        lr_scheduler_kwargs: What a schedule by name is made with.
        steps_per_epoch: Optimizer steps of an epoch, where one is counted in epochs.
        samples_per_step: Samples of a step, where one of several units is samples.
        tokens_per_step: The same for tokens.
        seconds_per_step: The same for time.
        rows: Rows of the table, evenly spaced.

    Raises:
        ConfigError: If the schedule does not fit the run, or if it is unknown how its units go together.

    >>> print(preview_schedule("wsd", max_duration="3e6tok", learning_rate=3e-4, warmup_steps=0.1, rows=5))
     run   tokens  learning rate
      0%        0              0
     25%   750000         0.0003
     50%  1500000         0.0003
     75%  2250000         0.0003
    100%  3000000              0
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 2:
        raise ConfigError(f"`rows` must be an integer of at least 2, got {rows!r}.")
    check_number("learning_rate", learning_rate, above=0)
    options = {"lr_scheduler_kwargs": lr_scheduler_kwargs, "warmup_steps": warmup_steps}
    if isinstance(schedule, str):
        name, schedule = repr(schedule), named_schedule(schedule, lr_scheduler_kwargs, warmup_length(warmup_steps))
    elif not isinstance(schedule, Schedule):
        raise ConfigError(f"`schedule` must be a schedule of omnitrain or its name, got {schedule!r:.200}.")
    elif any(options.values()):
        key = next(filter(options.get, options))
        raise ConfigError(f"`{key}={options[key]!r}` has no effect on a schedule that is made already.")
    else:
        name = repr(schedule)
    limits = Limits(epochs, max_steps, max_duration)
    if not steps_per_epoch and all(limit.unit == "ep" for limit in limits.durations):
        raise ConfigError("Nothing says how many steps the run has. Give `steps_per_epoch`, or `max_steps`.")
    size = None if not (steps_per_epoch and samples_per_step) else math.ceil(steps_per_epoch * samples_per_step)
    run_length = RunLength.of(limits, steps_per_epoch, size)
    run_length.check(schedule, name)
    pace: dict[str, float | None] = {"ba": 1.0, "ep": 1 / steps_per_epoch if steps_per_epoch else None}
    pace |= {"sp": samples_per_step, "tok": tokens_per_step, "s": seconds_per_step}
    rates = _rates_of(schedule, run_length, {unit: value for unit, value in pace.items() if value}, learning_rate)
    places = [rates.length * number / (rows - 1) for number in range(rows)]
    if rates.unit == "ba":
        places = [float(round(place)) for place in places]
    curve = [rates.length * number / 1000 for number in range(1001)]
    return SchedulePreview(rates.unit, places, list(map(rates.at, places)), (curve, list(map(rates.at, curve))))


class _Rates(NamedTuple):
    """The rate at each place of a run of this length in this unit."""

    unit: str
    length: float
    at: Callable[[float], float]


def _rates_of(schedule: Schedule, run_length: RunLength, pace: dict[str, float], learning_rate: float) -> _Rates:
    """Return the rates of a schedule in a run with so many of each unit in a step."""
    follows, ends = run_length.follows(schedule), run_length.ends
    units = {length.unit for length in [*schedule.lengths(), *ends]} - {"dur"} if follows or ends else set()
    if run_length.end is not None:
        unit, length = "ba", float(run_length.end)
    elif len(ends) == 1 and units == {ends[0].unit}:  # nothing else is counted
        unit, length = ends[0].unit, ends[0].value
        pace = {unit: 1.0}
    else:
        _check_pace({end.unit for end in ends}, pace, units)
        nearest = min(ends, key=lambda end: end.value / pace[end.unit])
        unit, length = nearest.unit, nearest.value
    _check_pace(units, pace, units)

    def rate_at(place: float) -> float:
        steps, progress = place / pace[unit], None
        if follows:
            done: dict[str, Any] = {name: steps * value for name, value in pace.items()}
            done[unit] = place
            epochs = done.get("ep", 0.0)
            progress = Progress(
                epoch=int(epochs), samples_in_epoch=round((epochs % 1) * 10**9), epoch_size=10**9,
                step=done.get("ba", 0),  # between two steps, for the picture
                samples=done.get("sp", 0), tokens=done.get("tok", 0), seconds=done.get("s", 0.0),
            )  # fmt: skip
        return learning_rate * schedule.factor(RunPosition(run_length, steps, progress), learning_rate)

    return _Rates(unit, length, rate_at)


def _check_pace(units: set[str], pace: Mapping[str, float], counted: set[str]) -> None:
    for unit in sorted(units - pace.keys()):
        argument = {"ep": "steps_per_epoch", "sp": "samples_per_step", "tok": "tokens_per_step"}
        raise ConfigError(
            f"The schedule and the run count {' and '.join(_COUNTED[name] for name in sorted(counted))}. Pass "
            f"`{argument.get(unit, 'seconds_per_step')}`, so that it is known how these go together."
        )


_COUNTED = {"ba": "step", "ep": "epochs", "sp": "samples", "tok": "tokens", "s": "seconds"}
