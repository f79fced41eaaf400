"""Preview of a schedule as table and plot. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omnitrain.core.display import ResultView, Table, create_figure
from omnitrain.core.duration import Duration, Limits
from omnitrain.core.errors import ConfigError
from omnitrain.core.progress import Progress
from omnitrain.optim.schedules import (
    Length,
    RunLength,
    RunPosition,
    Schedule,
    check_number,
    named_schedule,
    warmup_length,
)


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
    look = _Look(schedule, run_length, pace, learning_rate)
    places = [look.length * number / (rows - 1) for number in range(rows)]
    if look.unit == "ba":
        places = [float(round(place)) for place in places]
    curve = [look.length * number / 1000 for number in range(1001)]
    return SchedulePreview(
        look.unit, places, list(map(look.rate, places)), (curve, [look.rate(place) for place in curve])
    )


class _Look:
    """The rate of a schedule at any point of a run of constant pace."""

    def __init__(
        self, schedule: Schedule, run_length: RunLength, pace: Mapping[str, float | None], rate: float
    ) -> None:
        self._schedule, self._run_length, self._rate = schedule, run_length, rate
        self._follows = run_length.follows(schedule)
        ends = [] if run_length.limits is None else run_length.limits.durations
        required_units = (
            {length.unit for length in [*schedule.lengths(), *ends]} - {"dur"} if self._follows or ends else set()
        )
        self._pace = {unit: value for unit, value in pace.items() if value}
        if run_length.end is not None:
            self.unit: str = "ba"
            self.length: float = run_length.end
        elif required_units == {ends[0].unit} and len(ends) == 1:  # nothing else is counted
            self.unit, self.length, self._pace = ends[0].unit, ends[0].value, {ends[0].unit: 1.0}
        else:
            missing_units = sorted(unit for unit in {length.unit for length in ends} - self._pace.keys())
            self._refuse(missing_units, required_units)
            earliest = min(ends, key=lambda length: length.value / self._pace[length.unit])
            self.unit, self.length = earliest.unit, earliest.value
        self._refuse(sorted(required_units - self._pace.keys()), required_units)

    def _refuse(self, lacking: list[str], needed: set[str]) -> None:
        if lacking:
            argument = {"ep": "steps_per_epoch", "sp": "samples_per_step", "tok": "tokens_per_step"}
            raise ConfigError(
                f"The schedule and the run count {' and '.join(_COUNTED[unit] for unit in sorted(needed))}. Pass "
                f"`{argument.get(lacking[0], 'seconds_per_step')}`, so that it is known how these go together."
            )

    def rate(self, place: float) -> float:
        """Return the rate at a place."""
        steps, progress = place / self._pace[self.unit], None
        if self._follows:
            done = {unit: steps * pace for unit, pace in self._pace.items()}
            done[self.unit] = place
            epochs, progress = done.get("ep", 0.0), Progress(epoch_size=10**9)
            progress.epoch, progress.samples_in_epoch = int(epochs), round((epochs % 1) * 10**9)
            progress.step = done.get("ba", 0)  # type: ignore[assignment]  # between two steps, for the picture
            progress.samples, progress.tokens = done.get("sp", 0), done.get("tok", 0)  # type: ignore[assignment]
            progress.seconds = done.get("s", 0.0)
        return self._rate * self._schedule.factor(RunPosition(self._run_length, steps, progress), self._rate)


_COUNTED = {"ba": "step", "ep": "epochs", "sp": "samples", "tok": "tokens", "s": "seconds"}
