"""Durations: lengths of a run and of its intervals.

Only arithmetic on them and on a `Progress` belongs here. The lifecycle and the callbacks act on it.
"""

from __future__ import annotations

import functools
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, overload

from omnitrain.core.errors import ConfigError
from omnitrain.core.progress import Progress

_COUNTERS = {"ep": "epochs", "ba": "step", "sp": "samples", "tok": "tokens", "s": "seconds"}
_WORDS = {"ep": "epochs", "ba": "steps", "sp": "samples", "tok": "tokens", "s": "seconds", "dur": "run"}
_WHOLE_UNITS = ("ba", "sp", "tok")
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_UNITS = (
    "'10ep' (epochs), '500ba' (optimizer steps), '4e4sp' (samples), '3e6tok' (tokens), "
    "'90s', '45m', '2h30m' or '1d' (time), '0.3dur' (share of the run, at most 1)"
)
_NUMBER = r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*"
_COUNT = re.compile(_NUMBER + "(ep|ba|sp|tok|dur)", re.ASCII)
_CLOCK = re.compile(r"\s*".join(f"(?:{_NUMBER}{letter})?" for letter in _SECONDS), re.ASCII)


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of training: epochs, optimizer steps, samples, tokens, seconds, or a share of the run.

    Durations of one unit can be added, subtracted, compared and divided; any can be multiplied or divided by a number.
    Counts of steps, samples and tokens are rounded to integers. Where one operand is a Duration, the
    other may be a string.

    >>> every = Duration.parse("2h30m", unit="ba", name="save_steps")
    >>> str(every), str(Duration.parse(500, "ba", "save_steps"))
    ('2h30m', '500ba')
    >>> every.due(Progress(seconds=9000.0))
    True
    >>> str(Duration.parse("2h") + "30m"), str(Duration.parse("90ep") / 3), Duration.parse("2ep") / "8ep"
    ('2h30m', '30ep', 0.25)
    """

    value: float
    """The number of units. Whole numbers are ints, so counting has no rounding errors."""
    unit: str
    """One of "ep", "ba", "sp", "tok", "s" and "dur"."""

    def __post_init__(self) -> None:
        """Reject an invalid length; `parse` does so with the argument's name in the message."""
        value = _validate(self.value, self.unit, "Duration", f"Duration({self.value!r}, {self.unit!r})")
        object.__setattr__(self, "value", value)

    @classmethod
    def parse(cls, text: int | float | str | Duration, unit: str = "ba", name: str = "duration") -> Duration:
        """Read a duration as users write it; a plain number counts `unit`, which is steps by default.

        Args:
            text: A number, a string such as "10ep", "3e4tok" or "2h30m", or a Duration.
            unit: The unit of a plain number.
            name: The argument's name, for the message.

        Raises:
            ConfigError: It cannot be read, is not positive and finite, or is a fraction of an indivisible unit.
        """
        if isinstance(text, Duration):
            return text
        if isinstance(text, str):
            value, own_unit = _parse_text(text) or (math.nan, unit)
            return cls(_validate(value, own_unit, name, repr(text), _WORDS[unit]), own_unit)
        return cls(_validate(text, unit, name, repr(text), _WORDS[unit]), unit)

    def amount(self, progress: Progress) -> float:
        """Return how much a run has done, in this unit.

        Raises:
            ConfigError: The unit is "dur", which only the run's `Limits` can measure.
        """
        if self.unit == "dur":
            raise ConfigError(f"'{self}' is a share of the run, and cannot be used where its length is not known.")
        return getattr(progress, _COUNTERS[self.unit])

    def due(self, progress: Progress) -> bool:
        """Return whether a run has done at least this much; a whole epoch counts once it is closed."""
        if self.unit != "ep":
            return self.amount(progress) >= self.value
        return _multiples(progress, "ep", *_ratio(self.value)) > 0

    def has_passed(self, start: Progress, progress: Progress, limits: Limits | None = None) -> bool:
        """Return whether a run has done at least this much from `start` to `progress`, of a run with `limits`."""
        return any(
            (_exact_amount(progress, unit) - _exact_amount(start, unit)) * denominator >= numerator
            for unit, numerator, denominator in _intervals(self, limits)
        )

    def __add__(self, other: Duration | str) -> Duration:
        """Return the sum of the two lengths.

        Raises:
            ConfigError: They are of two units.
        """
        return self._new(self.exact + self._same_unit(other, "added"))

    __radd__ = __add__

    def __sub__(self, other: Duration | str) -> Duration:
        """Return the difference of the two lengths.

        Raises:
            ConfigError: They are of two units, or the difference is not positive.
        """
        return self._new(self.exact - self._same_unit(other, "subtracted"))

    def __rsub__(self, other: Duration | str) -> Duration:
        return self._new(self._same_unit(other, "subtracted") - self.exact)

    def __mul__(self, number: float) -> Duration:
        """Return a multiple."""
        return self._new(self.exact * Fraction(*_ratio(number))) if _is_positive(number) else NotImplemented

    __rmul__ = __mul__

    @overload
    def __truediv__(self, other: float) -> Duration: ...
    @overload
    def __truediv__(self, other: Duration | str) -> float: ...
    def __truediv__(self, other: Duration | str | float) -> Duration | float:
        """Return a fraction of it for a number, or the ratio of two lengths.

        Raises:
            ConfigError: They are of two units.
        """
        if isinstance(other, (Duration, str)):
            return float(self.exact / self._same_unit(other, "divided"))
        return self._new(self.exact / Fraction(*_ratio(other))) if _is_positive(other) else NotImplemented

    def __lt__(self, other: Duration | str) -> bool:
        return self.exact < self._same_unit(other, "compared")

    def __le__(self, other: Duration | str) -> bool:
        return self.exact <= self._same_unit(other, "compared")

    def __gt__(self, other: Duration | str) -> bool:
        return self.exact > self._same_unit(other, "compared")

    def __ge__(self, other: Duration | str) -> bool:
        return self.exact >= self._same_unit(other, "compared")

    @property
    def exact(self) -> Fraction:
        """The value as a fraction, such as 1/10 for 0.1."""
        return Fraction(*_ratio(self.value))

    def _same_unit(self, other: Duration | str, done: str) -> Fraction:
        if isinstance(other, str):
            other = Duration.parse(other)
        if not isinstance(other, Duration):
            raise TypeError(f"'{self}' can be {done} with a duration such as '2{self.unit}', got {other!r}.")
        if other.unit != self.unit:
            raise ConfigError(
                f"'{self}' and '{other}' cannot be {done}: one counts {_WORDS[self.unit]}, the other "
                f"{_WORDS[other.unit]}, which only a run can convert. Give both in one unit."
            )
        return other.exact

    def _new(self, value: Fraction) -> Duration:
        """Return a duration of this unit, rounded to a whole number where the unit cannot be divided."""
        number = round(value) if self.unit in _WHOLE_UNITS else float(value)
        return Duration(_validate(number, self.unit, "duration", f"{float(value):g}{self.unit}"), self.unit)

    def __str__(self) -> str:
        """Write it as `parse` reads it."""
        if self.unit != "s" or not isinstance(self.value, int):
            return f"{self.value}{self.unit}"
        parts, rest = "", self.value
        for letter, seconds in _SECONDS.items():
            count, rest = divmod(rest, seconds)
            parts += f"{count}{letter}" if count else ""
        return parts


class Every:
    """Fires once at each multiple of a duration, however large the steps in between are.

    >>> every = Every(Duration(2, "ba"))
    >>> [every.due(Progress(step=step)) for step in range(1, 7)]
    [False, True, False, True, False, True]
    """

    def __init__(self, duration: Duration, limits: Limits | None = None) -> None:
        """Start at the beginning of a run; `limits` are needed only for shares of it ("0.1dur")."""
        self.duration = duration
        if duration.unit == "dur" and limits is None:
            raise ConfigError(f"'{duration}' is a share of the run, whose length is not known. Give its `limits`.")
        self._intervals = _intervals(duration, limits)
        self.steps: int = int(duration.value) if duration.unit == "ba" else 0
        """The steps of an interval of steps; 0 for any other."""
        self.count: int = 0

    def due(self, progress: Progress) -> bool:
        """Return whether a multiple was reached since the last call."""
        # Called after every step: the usual case is one integer division.
        count = progress.step // self.steps if self.steps else self._count(progress)
        is_new = count > self.count
        self.count = count
        return is_new

    def restart(self, progress: Progress) -> None:
        """Skip the multiples before `progress`, so that nothing fires twice after a resume."""
        self.count = self._count(progress)

    def _count(self, progress: Progress) -> int:
        return max(_multiples(progress, *interval) for interval in self._intervals)


IntervalPart = int | str | Duration | Callable[[Progress], bool]
Interval = IntervalPart | Sequence[IntervalPart]
"""An interval of a run: a number of steps, "1ep", "500ba after 2ep", a function of the progress, or a list of these."""

_AFTER = re.compile(r"(.+?)\s+after\s+(.+)")


@dataclass(frozen=True, slots=True)
class IntervalRule:
    """A part of an `Interval`: a duration, from a length of the run on, or a function that decides after each step."""

    every: Duration | Callable[[Progress], bool]
    after: Duration | None = None

    @property
    def is_function(self) -> bool:
        """Whether a function decides, which may do so differently on each rank."""
        return not isinstance(self.every, Duration)

    @property
    def has_time(self) -> bool:
        """Whether the clock decides, which differs between ranks."""
        return any(isinstance(length, Duration) and length.unit == "s" for length in (self.every, self.after))

    def __str__(self) -> str:
        if not isinstance(self.every, Duration):
            return getattr(self.every, "__name__", type(self.every).__name__) + "(progress)"
        words = {"ep": "epoch", "ba": "step"}
        word, value = words.get(self.every.unit), self.every.value
        text = f"{value:,} {word}{'' if value == 1 else 's'}" if word else str(self.every)
        return text if self.after is None else f"{text} after {self.after}"


def parse_interval(value: Interval, name: str) -> list[IntervalRule]:
    """Read an interval as users write it, as the argument `name`.

    Raises:
        ConfigError: If it is empty, or a part of it cannot be read.

    >>> [str(rule) for rule in parse_interval(["1ep", "500ba after 2000ba"], "eval_steps")]
    ['1 epoch', '500 steps after 2000ba']
    """
    parts: Any = value if isinstance(value, (list, tuple)) else [value]
    if not parts:
        raise ConfigError(f"`{name}` is an empty list. Give at least one interval, such as ['1ep', '500ba'].")
    rules = []
    for part in parts:
        match = _AFTER.fullmatch(part.strip()) if isinstance(part, str) else None
        if match:
            rules.append(IntervalRule(Duration.parse(match[1], "ba", name), Duration.parse(match[2], "ba", name)))
        else:
            if isinstance(part, type):
                raise ConfigError(
                    f"`{name}` is the class {part.__name__!r}, and may be a function of the progress that returns "
                    "whether it is due. Pass a function, or an interval such as '1ep' or 500."
                )
            every: Any = part if callable(part) else Duration.parse(part, "ba", name)
            rules.append(IntervalRule(every))
    return rules


class AnyInterval:
    """Fires when one of several rules does; called after each step and at the end of each epoch.

    >>> intervals = AnyInterval(parse_interval(["2ba after 3ba", lambda progress: progress.step == 1], "log_steps"))
    >>> [intervals.due(Progress(step=step)) for step in range(1, 7)]
    [True, False, False, True, False, True]
    """

    def __init__(self, rules: Sequence[IntervalRule], limits: Limits | None = None) -> None:
        """Start at the beginning of a run; `limits` are needed only for shares of it ("0.1dur")."""
        self._rules: list[tuple[Every | Callable[[Progress], bool], list[tuple[str, int, int]]]] = [
            (
                Every(rule.every, limits) if isinstance(rule.every, Duration) else rule.every,
                [] if rule.after is None else _intervals(rule.after, limits),
            )
            for rule in rules
        ]
        self._fired_step = -1

    def due(self, progress: Progress) -> bool:
        """Return whether a rule fires at this position; functions do so once in a step."""
        fires = False
        for every, after in self._rules:
            if isinstance(every, Every):
                fires |= every.due(progress) and _is_past(progress, after)
            elif self._fired_step != progress.step and every(progress):
                self._fired_step, fires = progress.step, True
        return fires

    def restart(self, progress: Progress) -> None:
        """Skip what was due before `progress`, so that nothing fires twice after a resume."""
        self._fired_step = -1
        for every, _ in self._rules:
            if isinstance(every, Every):
                every.restart(progress)


def make_interval(rules: Sequence[IntervalRule], limits: Limits | None = None) -> Every | AnyInterval:
    """Return what fires by these rules: for a single duration, an `Every`."""
    first = rules[0]
    if len(rules) > 1 or first.after is not None or not isinstance(first.every, Duration):
        return AnyInterval(rules, limits)
    return Every(first.every, limits)


class Limits:
    """The end of a run: the first limit that is reached.

    >>> limits = Limits(epochs=3, max_steps=100)
    >>> limits.reached(Progress(epoch=2, step=100)), limits.total_steps(steps_per_epoch=10, samples_per_epoch=80)
    ('max_steps', 30)
    """

    def __init__(
        self,
        epochs: int | float | None = None,
        max_steps: int | None = None,
        max_duration: int | str | Duration | None = None,
    ) -> None:
        """Check the limits.

        Args:
            epochs: Passes over the data; a fraction ends in the middle of an epoch.
            max_steps: Optimizer steps.
            max_duration: Any other length; an int counts epochs.

        Raises:
            ConfigError: A limit is not positive, or there is none.
        """
        self._limits: dict[str, Duration] = {}
        if epochs is not None:
            if not _is_positive(epochs):
                raise ConfigError(f"`epochs` must be a positive number or None, got {epochs!r}.")
            self._limits["epochs"] = Duration.parse(epochs, "ep", "epochs")
        if max_steps is not None:
            if not _is_positive(max_steps) or max_steps != int(max_steps):
                raise ConfigError(f"`max_steps` must be a positive integer or None, got {max_steps!r}.")
            self._limits["max_steps"] = Duration.parse(max_steps, "ba", "max_steps")
        if max_duration is not None:
            duration = Duration.parse(max_duration, "ep", "max_duration")
            if duration.unit == "dur":
                raise ConfigError(
                    f"`max_duration` is the length of the run and cannot be a share of it, got {str(duration)!r}. "
                    "Give '10ep', '500ba', '4e4sp', '3e6tok' or '2h30m'."
                )
            self._limits["max_duration"] = duration
        if not self._limits:
            raise ConfigError("Nothing would end this run. Give `epochs`, `max_steps` or `max_duration`.")

    @staticmethod
    def after(progress: Progress, more: int | float | str | Duration) -> dict[str, Any]:
        """Return `epochs`, `max_steps` and `max_duration` of a run that continues for `more`.

        Raises:
            ConfigError: `more` is no length, or a share of the run.

        >>> Limits.after(Progress(epoch=3, step=30), "20ba")
        {'epochs': None, 'max_steps': 50, 'max_duration': None}
        """
        length = Duration.parse(more, "ep", "more")
        if length.unit == "dur":
            raise ConfigError(
                f"`more` is a length and cannot be a share of the run, got {str(length)!r}. Give '2ep', "
                "'500ba', '4e4sp', '3e6tok' or '2h30m'."
            )
        end = _exact_amount(progress, length.unit) + length.exact
        limit = Duration(int(end) if end.denominator == 1 else float(end), length.unit)
        names = {"ep": "epochs", "ba": "max_steps"}
        limits: dict[str, Any] = {"epochs": None, "max_steps": None, "max_duration": None}
        return limits | ({names[limit.unit]: limit.value} if limit.unit in names else {"max_duration": str(limit)})

    @property
    def durations(self) -> list[Duration]:
        """The limits that are set."""
        return list(self._limits.values())

    def reached(self, progress: Progress) -> str:
        """Return "epochs", "max_steps" or "max_duration", in this order, or "" if none is reached."""
        for reason, duration in self._limits.items():
            if duration.due(progress):
                return reason
        return ""

    def fraction(self, progress: Progress) -> float:
        """Return how much of the run is done, from 0 to 1, by the nearest limit."""
        return min(1.0, max(duration.amount(progress) / duration.value for duration in self.durations))

    def total_steps(self, steps_per_epoch: int | None, samples_per_epoch: int | None) -> int | None:
        """Return the optimizer steps of the run, or None if its limits do not determine them.

        Limits in tokens or seconds do not. If a limit falls inside an epoch, the steps are rounded up as if all had
        the same size, so with a short last step the run may end one step earlier. Data of unknown length have None.
        """
        totals: list[int] = []
        for duration in self.durations:
            length = duration.exact
            if duration.unit == "ba":
                totals.append(int(duration.value))
            elif duration.unit == "ep" and steps_per_epoch:
                totals.append(math.ceil(length * steps_per_epoch))
            elif duration.unit == "sp" and steps_per_epoch and samples_per_epoch:
                totals.append(math.ceil(length / samples_per_epoch * steps_per_epoch))
        return min(totals, default=None)


class Stages:
    """An integer that changes during a run, at places that depend on the consumed samples.

    >>> sizes = Stages({0: 32, "0.5dur": 64}, Limits(epochs=4))
    >>> [sizes.at(Progress(epoch=epoch)) for epoch in range(4)]
    [32, 32, 64, 64]
    """

    def __init__(self, numbers: Mapping[Any, int], limits: Limits) -> None:
        """Read the places, after `check_stages`.

        Args:
            numbers: The first number by 0, and each later one by the Duration from which it holds.
            limits: The end of the run, for shares of it.

        Raises:
            ConfigError: A place is a share of a run that ends after so many steps or so much time.
        """
        self._stages: list[tuple[int, list[tuple[str, int, int]]]] = []
        for place, number in numbers.items():
            if place == 0:
                self._stages.append((number, []))
                continue
            length = Duration.parse(place)
            for limit in limits.durations if length.unit == "dur" else ():
                if limit.unit in ("ba", "s"):
                    raise ConfigError(
                        f"'{length}' is a share of a run that ends after '{limit}', and where that is depends on the "
                        "number that is to change there. Give samples ('4e4sp'), tokens or epochs."
                    )
            self._stages.append((number, _intervals(length, limits)))

    def at(self, progress: Progress) -> int:
        """Return the number at a position of the run."""
        number = self._stages[0][0]
        for value, lengths in self._stages[1:]:
            if not any(_multiples(progress, *length) for length in lengths):
                break
            number = value
        return number


def _intervals(duration: Duration, limits: Limits | None) -> list[tuple[str, int, int]]:
    """Return the units and fractions of a duration: of a share of the run, one for each limit."""
    if duration.unit != "dur" or limits is None:
        return [(duration.unit, *_ratio(duration.value))]
    lengths = [(limit.unit, duration.exact * limit.exact) for limit in limits.durations]
    return [(unit, length.numerator, length.denominator) for unit, length in lengths]


def check_stages(name: str, numbers: Mapping[Any, int]) -> None:
    """Raise ConfigError for an argument with wrong numbers that change during a run, or wrong places of them."""
    example = f"{name}={{0: 64, '0.2dur': 128, '0.5dur': 256}}"
    if 0 not in numbers or next(iter(numbers)) != 0:
        raise ConfigError(f"`{name}` must begin with the number at 0, as in {example}, got {dict(numbers)!r:.200}.")
    latest: Duration | None = None
    for place, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigError(f"`{name}` must have positive integers, as in {example}, got {number!r} at {place!r}.")
        if place == 0:
            continue
        if not isinstance(place, (str, Duration)):
            raise ConfigError(f"`{name}` must name each place with its unit, as in {example}, got {place!r}.")
        length = Duration.parse(place, "sp", name)
        if length.unit in ("ba", "s"):
            raise ConfigError(
                f"`{name}` must change after so many samples, tokens or epochs, or a share of the run, as in {example},"
                f" got {str(length)!r}."
            )
        if latest is not None and (length.unit != latest.unit or length <= latest):
            raise ConfigError(
                f"`{name}` must have its places in one unit and in their order, as in {example}, got {str(length)!r} "
                f"after {str(latest)!r}."
            )
        latest = length


def check_stages_reached(name: str, numbers: Mapping[Any, int], limits: Limits, samples_per_epoch: int | None) -> None:
    """Raise ConfigError for a number of samples per step that a run ends before, as far as that is known.

    The number of samples of an epoch is None for data of unknown length.
    """

    def to_samples(length: Duration) -> Fraction | None:
        if length.unit == "ep" and samples_per_epoch:
            return length.exact * samples_per_epoch
        return length.exact if length.unit == "sp" else None

    largest = numbers[0]
    for text, number in list(numbers.items())[1:]:
        place = Duration.parse(text, "sp", name)
        for limit in limits.durations:
            start, end = to_samples(place), to_samples(limit)
            if limit.unit == "ba":  # no step before has more samples than the largest until then
                end = limit.exact * largest
            elif limit.unit == place.unit or place.unit == "dur":
                start, end = place.exact, Fraction(1) if place.unit == "dur" else limit.exact
            if start is not None and end is not None and start >= end:
                raise ConfigError(
                    f"`{name}` becomes {number} at '{place}', and the run ends after '{limit}', so it never does. "
                    "Leave that place out, or give an earlier one, or a share of the run such as '0.5dur'."
                )
        largest = max(largest, number)


def _exact_amount(progress: Progress, unit: str) -> Fraction:
    """Return how much a run has done, with the share of the current epoch."""
    if unit == "ep" and progress.epoch_size:
        return progress.epoch + Fraction(progress.samples_in_epoch, progress.epoch_size)
    return Fraction(getattr(progress, _COUNTERS[unit]))


def _is_past(progress: Progress, lengths: Sequence[tuple[str, int, int]]) -> bool:
    """Return whether a run has done more than one of these lengths; True without any."""
    return not lengths or any(
        _exact_amount(progress, unit) * denominator > numerator for unit, numerator, denominator in lengths
    )


def _multiples(progress: Progress, unit: str, numerator: int, denominator: int) -> int:
    """Return how often a run has done `numerator / denominator` of `unit`, without rounding errors."""
    if unit != "ep":
        return int(getattr(progress, _COUNTERS[unit]) * denominator // numerator)
    size, done = progress.epoch_size, progress.samples_in_epoch
    if not size or not done:
        return progress.epoch * denominator // numerator
    if done >= size:  # consumed but not closed: infinitesimally less than the next whole epoch
        return -(-(progress.epoch + 1) * denominator // numerator) - 1
    return (progress.epoch * size + done) * denominator // (size * numerator)


@functools.cache
def _ratio(value: float) -> tuple[int, int]:
    """Return the simple fraction closest to a float: 1/10 for 0.1, and 1/3 for 0.3333333333333333."""
    fraction = Fraction(value).limit_denominator(10**9) or Fraction(value)
    return fraction.numerator, fraction.denominator


def _parse_text(text: str) -> tuple[float, str] | None:
    """Return value and unit of a string, or None if it is not a duration."""
    text = text.strip()
    if match := _COUNT.fullmatch(text):
        return float(match[1]), match[2]
    if text and (match := _CLOCK.fullmatch(text)):
        parts = [
            (float(part), seconds) for part, seconds in zip(match.groups(), _SECONDS.values(), strict=True) if part
        ]
        if all(part >= 0 for part, _ in parts):
            return sum(part * seconds for part, seconds in parts), "s"
    return None


def _validate(value: Any, unit: str, name: str, shown: str, bare: str = "") -> float:
    """Return `value`, as an int if it is whole, or raise a ConfigError about `shown`."""
    if unit not in _WORDS or not _is_positive(value) or (unit == "dur" and value > 1):
        bare = bare and f"a number of {bare} or "
        raise ConfigError(
            f"`{name}` must be a positive duration, got {shown}. Give {bare}a number with its unit: {_UNITS}."
        )
    if int(value) == value:
        return int(value)
    if unit in _WHOLE_UNITS:
        raise ConfigError(f"`{name}` must be a whole number of {_WORDS[unit]}, got {shown}.")
    return float(value)


def _is_positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    # An int too large for a float is still finite.
    return int(value) > 0 if isinstance(value, numbers.Integral) else 0 < float(value) < math.inf
