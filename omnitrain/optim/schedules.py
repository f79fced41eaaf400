"""Schedules as functions of progress, and their preview. No torch.

What sets the rates of an optimizer by a schedule is in `build.py`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, Literal

from omnitrain.core.display import ResultView, Table, create_panels
from omnitrain.core.duration import Duration, Limits
from omnitrain.core.errors import ConfigError, check_choice, check_number, did_you_mean
from omnitrain.core.progress import Progress

Length = int | float | str | Duration

_WHOLE_RUN = Duration(1, "dur")
# Fields of schedules that are durations, or lists of them.
_LENGTHS = ("decay", "t_max", "step_size", "milestones", "decay_period", "timescale")
# Fields that are numbers above 0.
_POSITIVE = ("scale_ratio", "num_cycles", "power", "gamma")


def _exact(number: float) -> Fraction:
    return Fraction(number).limit_denominator(10**9)


@dataclass(frozen=True, slots=True)
class RunLength:
    """The length of a run in some unit; schedules see it through a `RunPosition`.

    Attributes:
        unit: What the position in the run is counted in.
        end: How many of these there are; None where that is unknown, or where `ends` says it.
        ends: The limits of a run whose steps are unknown.
        steps_per_epoch: Optimizer steps of an epoch; None for data of unknown length.
        samples_per_epoch: Samples of an epoch; None for data of unknown length.
    """

    unit: str = "ba"
    end: int | None = None
    ends: Sequence[Duration] = ()
    steps_per_epoch: int | None = None
    samples_per_epoch: int | None = None
    # Earlier results of `convert`, which every step calls.
    _known: dict[tuple[float, str, float], float | None] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        limits: Limits,
        steps_per_epoch: int | None = None,
        samples_per_epoch: int | None = None,
        interval: str = "step",
    ) -> RunLength:
        """Return the length of a run in optimizer steps, or in epochs if `interval` is "epoch".

        If the number of steps is unknown, as in a run of so many tokens or hours, the nearest limit is the end.
        """
        total = limits.total_steps(steps_per_epoch, samples_per_epoch)
        units = ("sp", "tok", "s", "ep") if samples_per_epoch else ("sp", "tok", "s")
        has_limits = total is None and any(limit.unit in units for limit in limits.durations)
        unit, end = "ba", total
        if interval == "epoch":
            unit, end = "ep", -(-total // steps_per_epoch) if total is not None and steps_per_epoch else None
            # the steps of an epoch may change with the size of the batch
            has_limits = has_limits or (end is None and total is not None)
        return cls(unit, end, limits.durations if has_limits else (), steps_per_epoch, samples_per_epoch)

    def convert(self, length: Duration, scale: float = 1.0) -> float | None:
        """Return a length times `scale` (a share of the run: without it) in this unit; None if only the run can tell.

        A length that ends inside of a step ends with that step.
        """
        key = length.value, length.unit, scale
        if key not in self._known:
            self._known[key] = self._converted(length, scale)
        return self._known[key]

    def _converted(self, length: Duration, scale: float) -> float | None:
        length = length if self.unit == "ep" else self.counted(length)
        value = length.exact
        if length.unit == "dur":
            value, unit = value * (self.end or 0), None if self.end is None else self.unit
        else:
            value, unit, steps = value * _exact(scale), length.unit, self.steps_per_epoch
            if unit == "sp" and self.samples_per_epoch and self.unit != "sp":
                value, unit = value / self.samples_per_epoch, "ep"
            if unit != self.unit and steps and {unit, self.unit} == {"ba", "ep"}:
                value, unit = (value * steps if unit == "ep" else value / steps), self.unit
        if unit != self.unit:
            return None
        if self.unit == "ba":
            return math.ceil(value)
        return int(value) if value.denominator == 1 else float(value)

    def steps_of(self, warmup: Any) -> int:
        """Return a warm-up, given as `warmup_length` takes it, in steps.

        Raises:
            ConfigError: If only the run can tell how many they are.
        """
        length = warmup_length(warmup)
        steps = 0 if length == 0 else self.convert(length)
        if steps is None:
            raise ConfigError(
                f"`warmup_steps={warmup!r}` cannot be converted to steps, which this schedule needs. Pass steps."
            )
        return int(steps)

    def counted(self, length: Duration) -> Duration:
        """Return a length; epochs become samples if the number of steps in an epoch changes in the run.

        At the end of its last step an epoch is not complete yet, but its samples are.
        """
        if length.unit != "ep" or self.steps_per_epoch or not self.samples_per_epoch:
            return length
        samples = length.exact * self.samples_per_epoch
        return Duration(int(samples) if samples.denominator == 1 else float(samples), "sp")

    def follows(self, schedule: Schedule) -> bool:
        """Return whether a schedule needs more than the number of updates: tokens, samples, seconds."""
        return any(self.convert(length) is None for length in schedule.lengths())

    def units(self, schedule: Schedule) -> frozenset[str]:
        """Return the units of the lengths of a schedule, and of the run's limits."""
        return frozenset(self.counted(length).unit for length in [*schedule.lengths(), *self.ends])

    def check(self, schedule: Schedule, name: str) -> None:
        """Raise ConfigError for a schedule, called `name`, that this run cannot have or that leaves nothing of it."""
        for part in schedule.parts:
            for length in part.lengths():
                if length.unit == "dur" and self.end is None and not self.ends:
                    raise ConfigError(
                        f"`lr_scheduler={name}` needs the number of steps, which is unknown: the data has no length. "
                        "Set `max_steps`, or `max_duration` in samples, tokens or time."
                    )
                if length.unit == "ep" and self.unit != "ep" and not (self.steps_per_epoch or self.samples_per_epoch):
                    raise ConfigError(
                        f"`lr_scheduler={name}` counts epochs ('{length}'), but the data has no length, so that an "
                        "epoch has no middle. Give it in steps ('500ba'), samples, tokens, time or shares of the run."
                    )
            end, warmup = self.end, part.warmup
            if end is not None and isinstance(warmup, Duration):
                length = self.convert(warmup, part.scale_ratio)
                if length is not None and length >= end:
                    words = {"ba": "steps", "ep": "epochs"}[self.unit]
                    warmup_text = warmup.value if warmup.unit == "ba" else repr(str(warmup))
                    raise ConfigError(
                        f"`warmup_steps={warmup_text}` leaves nothing of the run's {end} {words}. Make it smaller."
                    )
            if isinstance(part, WSDScheduler):
                lengths: tuple[Any, ...] = warmup, part.decay, part.t_max
                first, last, whole = (length and self.convert(length, part.scale_ratio) for length in lengths)
                if first is not None and last is not None and whole is not None and first + last > whole:
                    raise ConfigError(
                        f"`lr_scheduler={part!r}`: warm-up and decay take {first:g} + {last:g} steps, and there are "
                        f"{whole:g}. Make one of them shorter."
                    )

    def unreached(self, schedule: Schedule) -> list[Duration]:
        """Return the milestones of a schedule that lie after the end of the run, where that is known."""
        unreachable = []
        for part in schedule.parts:
            milestones: Any = part.milestones if isinstance(part, MultiStepScheduler) else ()
            for length in milestones:
                position, exact = self.convert(length, part.scale_ratio), length.exact * _exact(part.scale_ratio)
                is_late = self.end is not None and position is not None and position > self.end
                if is_late or any(end.unit == length.unit and exact > end.exact for end in self.ends):
                    unreachable.append(length)
        return unreachable


class RunPosition:
    """A position in a run, `now`, with every length converted to its unit.

    Lengths of another unit than that of the run, such as a warm-up of 100 steps in a run of 3e6 tokens, are converted
    by the pace of the run so far, from `progress`: exactly where they end, and the rate depends only on the progress.
    """

    __slots__ = ("_end", "_progress", "_run_length", "now")

    def __init__(self, run_length: RunLength, position: float, progress: Progress | None = None) -> None:
        self._run_length = run_length
        self._end: float | None = run_length.end
        self._progress = progress
        self.now: float = position
        if progress is not None and run_length.end is None and run_length.ends:
            ends = map(run_length.counted, run_length.ends)
            nearest = max(ends, key=lambda end: end.amount(progress) / end.value)
            self.now, self._end = nearest.amount(progress), nearest.value
            if nearest.unit != run_length.unit:
                self._run_length = dataclasses.replace(run_length, unit=nearest.unit, _known={})

    def at(self, length: Any, scale: float = 1.0) -> float:
        """Return where a length times `scale` ends that began with the run; infinite while nothing is known of it."""
        converted = self._known(length, scale)
        if converted is not None:
            return converted
        done = self.done(length, scale)
        return math.inf if not done else 0.0 if not self.now and done >= 1 else self.now / done

    def done(self, length: Any, scale: float = 1.0) -> float:
        """Return how much of a length times `scale` is done; 1 is all of it."""
        converted = self._known(length, scale)
        if converted is not None:
            return self.now / converted
        length = self._run_length.counted(length)
        return length.amount(self._progress) / (length.value * scale) if self._progress is not None else 0.0

    def _known(self, length: Duration, scale: float) -> float | None:
        if length.unit == "dur" and self._run_length.end is None:
            return math.inf if self._end is None else float(length.exact * _exact(self._end))
        return self._run_length.convert(length, scale)


@dataclass(frozen=True, kw_only=True, repr=False)
class Schedule:
    """The learning rate as a function of progress: a factor of the optimizer's own rate.

    Give one as `lr_scheduler`. Lengths are durations such as "500ba" (steps), "2ep", "3e6tok" or "0.1dur" (a share of
    the run). Schedules can be multiplied: `LinearScheduler() * StepScheduler("30ep")`.

    Attributes:
        warmup: Over how long the factor rises linearly from 0 to 1 at first: steps, a share of the run below 1, or a
            duration.
        min_lr: The rate that is not fallen below after the warm-up.
        min_lr_rate: The same as a share of the optimizer's rate.
        scale_ratio: What all lengths are multiplied by, that of the warm-up too; shares of the run stay, and a schedule
            of nothing else takes no ratio.
    """

    warmup: Length = 0
    min_lr: float | None = None
    min_lr_rate: float | None = None
    scale_ratio: float = 1.0

    def __post_init__(self) -> None:
        kind = type(self).__name__
        object.__setattr__(self, "warmup", warmup_length(self.warmup, f"{kind}.warmup"))
        for name, value in ((attribute.name, getattr(self, attribute.name)) for attribute in fields(self)):
            if name in _LENGTHS:
                object.__setattr__(self, name, _length_of(f"{kind}.{name}", value))
            elif name in _POSITIVE:
                check_number(f"{kind}.{name}", value, above=0)
        if self.min_lr is not None and self.min_lr_rate is not None:
            raise ConfigError(f"`{kind}`: `min_lr` and `min_lr_rate` are both given. Leave one of them out.")
        check_number(f"{kind}.min_lr", 0 if self.min_lr is None else self.min_lr, least=0)
        check_number(f"{kind}.min_lr_rate", 0 if self.min_lr_rate is None else self.min_lr_rate, least=0, below=1)
        if self.scale_ratio != 1 and all(length.unit == "dur" for length in self.lengths()):
            raise ConfigError(
                f"`{kind}.scale_ratio={self.scale_ratio!r}` has no effect: it multiplies lengths such as '500ba' or "
                "'2ep', and this schedule has none but shares of the run. Leave it out, or give `warmup` or another "
                "length in steps, epochs, samples, tokens or time."
            )

    def shape(self, position: RunPosition, begin: float) -> float:
        """Return the factor after the warm-up, which ended at `begin`, as if there were no least rate."""
        raise NotImplementedError

    def factor(self, position: RunPosition, rate: float = 1.0) -> float:
        """Return what the optimizer's rate is multiplied by; `min_lr` is a part of that rate."""
        begin: float = 0
        if isinstance(self.warmup, Duration):
            done = position.done(self.warmup, self.scale_ratio)
            if done < 1:
                return done
            begin = position.at(self.warmup, self.scale_ratio)
        shape = self.shape(position, begin)
        if not rate or (self.min_lr is None and self.min_lr_rate is None):
            return shape
        least = (self.min_lr_rate or 0.0) * rate if self.min_lr is None else self.min_lr
        return self.floored(shape, least, rate)

    def floored(self, shape: float, least: float, rate: float) -> float:
        """Return the factor with its least value in force: here the schedule falls to that instead of to 0."""
        return ((rate - least) * shape + least) / rate

    @property
    def parts(self) -> tuple[Schedule, ...]:
        """The factors of the product: only itself."""
        return (self,)

    def lengths(self) -> list[Duration]:
        """Return all durations of the schedule."""
        lengths = [self.warmup] if isinstance(self.warmup, Duration) else []
        for name in _LENGTHS:
            value = getattr(self, name, None)
            lengths += value if isinstance(value, tuple) else [value] if isinstance(value, Duration) else []
        return lengths

    def __mul__(self, other: Schedule) -> Schedule:
        if not isinstance(other, Schedule):
            return NotImplemented
        return ProductScheduler((*self.parts, *other.parts))

    def __repr__(self) -> str:
        values = {attribute: getattr(self, attribute.name) for attribute in fields(self)}
        words = [f"{key.name}={_plain(value)!r}" for key, value in values.items() if value != key.default and key.init]
        return f"{type(self).__name__}({', '.join(words)})"


class _Clamped(Schedule):
    """A schedule whose least rate cuts it off, instead of being what it falls to."""

    def floored(self, shape: float, least: float, rate: float) -> float:
        return max(shape, least / rate)


@dataclass(frozen=True, repr=False)
class ConstantScheduler(_Clamped):
    """The optimizer's rate, after a warm-up if there is one.

    >>> preview_schedule(ConstantScheduler(warmup="0.5dur"), max_duration="4ba", rows=3).rates
    [0.0, 1.0, 1.0]
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_lr_rate is not None:
            raise ConfigError(
                f"`ConstantScheduler`: `min_lr_rate={self.min_lr_rate!r}` has no effect, as the rate never falls. "
                "Leave it out, or pass another schedule."
            )

    def shape(self, position: RunPosition, begin: float) -> float:
        return 1.0


@dataclass(frozen=True, repr=False)
class LinearScheduler(Schedule):
    """Falls linearly from the end of the warm-up to `t_max`, by default the end of the run.

    >>> preview_schedule(LinearScheduler(min_lr_rate=0.5), max_duration="4ba", rows=3).rates
    [1.0, 0.75, 0.5]
    """

    t_max: str | Duration = _WHOLE_RUN

    def shape(self, position: RunPosition, begin: float) -> float:
        return 1.0 - _fallen(self, position, begin)


@dataclass(frozen=True, repr=False)
class CosineAnnealingScheduler(Schedule):
    """Falls as the first half of a cosine from the end of the warm-up to `t_max`, by default the end of the run.

    From SGDR (arXiv 1608.03983), without its restarts. `num_cycles` is the number of waves, as in transformers.

    >>> preview_schedule(CosineAnnealingScheduler(), max_duration="1h", rows=3).rates
    [1.0, 0.5, 0.0]
    """

    t_max: str | Duration = _WHOLE_RUN
    num_cycles: float = 0.5

    def shape(self, position: RunPosition, begin: float) -> float:
        share = _fallen(self, position, begin)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * self.num_cycles * 2.0 * share)))


@dataclass(frozen=True, repr=False)
class CosineWithRestartsScheduler(Schedule):
    """Falls as half a cosine `num_cycles` times from the end of the warm-up to `t_max`, from 1 each time.

    From SGDR (arXiv 1608.03983), with periods of one length.

    >>> preview_schedule(CosineWithRestartsScheduler(2), max_duration="8ba", rows=5).rates
    [1.0, 0.5, 1.0, 0.5, 0.0]
    """

    num_cycles: int = 1
    t_max: str | Duration = _WHOLE_RUN

    def shape(self, position: RunPosition, begin: float) -> float:
        share = _fallen(self, position, begin)
        return 0.0 if share >= 1.0 else max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((self.num_cycles * share) % 1.0))))


@dataclass(frozen=True, repr=False)
class PolynomialScheduler(Schedule):
    """Falls as a power of what is left from the end of the warm-up to `t_max`, by default the end of the run.

    >>> preview_schedule(PolynomialScheduler(power=2), max_duration="4ba", rows=3).rates
    [1.0, 0.25, 0.0]
    """

    power: float = 1.0
    t_max: str | Duration = _WHOLE_RUN

    def shape(self, position: RunPosition, begin: float) -> float:
        return (1.0 - _fallen(self, position, begin)) ** self.power


@dataclass(frozen=True, repr=False)
class StepScheduler(_Clamped):
    """Multiplies the rate with `gamma` after each `step_size`.

    >>> preview_schedule(StepScheduler("2ba", gamma=0.5), max_duration="4ba", rows=5).rates
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    step_size: str | Duration
    gamma: float = 0.1

    def shape(self, position: RunPosition, begin: float) -> float:
        return self.gamma ** math.floor(position.done(self.step_size, self.scale_ratio))


@dataclass(frozen=True, repr=False)
class MultiStepScheduler(_Clamped):
    """Multiplies the rate with `gamma` at each of the milestones.

    >>> schedule = MultiStepScheduler(["0.5dur", "9ep"], gamma=0.1)
    >>> preview_schedule(schedule, max_duration="10ep", steps_per_epoch=8, rows=3).rates
    [1.0, 0.1, 0.010000000000000002]
    """

    milestones: Sequence[str | Duration]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if isinstance(self.milestones, (str, Duration)) or not isinstance(self.milestones, Iterable):
            raise ConfigError(
                f"`MultiStepScheduler.milestones` must be a list of durations such as ['0.3dur', '80ep'], got "
                f"{self.milestones!r}."
            )
        super().__post_init__()

    def shape(self, position: RunPosition, begin: float) -> float:
        return self.gamma ** sum(position.done(milestone, self.scale_ratio) >= 1 for milestone in self.milestones)


@dataclass(frozen=True, repr=False)
class ExponentialScheduler(_Clamped):
    """Multiplies the rate with `gamma` over each `decay_period`, evenly, from the end of the warm-up on.

    >>> preview_schedule(ExponentialScheduler(0.25, "2ba"), max_duration="4ba", rows=5).rates
    [1.0, 0.5, 0.25, 0.125, 0.0625]
    """

    gamma: float
    decay_period: str | Duration = "1ep"

    def shape(self, position: RunPosition, begin: float) -> float:
        period = position.at(self.decay_period, self.scale_ratio)
        return self.gamma ** ((position.now - begin) / period) if period else 1.0


@dataclass(frozen=True, repr=False)
class InverseSqrtScheduler(_Clamped):
    """Falls as one over the square root of the time, from the end of the warm-up on.

    `timescale` is the time over which it first falls to its 0.7th part; by default the warm-up, or 10000 steps without
    one. From "Attention Is All You Need" (arXiv 1706.03762), with the rate of the optimizer as its peak.

    >>> preview_schedule(InverseSqrtScheduler(warmup="1ba"), max_duration="4ba", rows=5).rates[::2]
    [0.0, 0.7071067811865475, 0.5]
    """

    timescale: str | Duration | None = None

    def shape(self, position: RunPosition, begin: float) -> float:
        warmup = self.warmup if self.timescale is None else self.timescale
        scale = position.at(warmup if isinstance(warmup, Duration) else Duration(10_000, "ba"), self.scale_ratio)
        if not scale or math.isinf(scale):
            return 1.0
        return 1.0 / math.sqrt((position.now + (scale - begin)) / scale)

    def lengths(self) -> list[Duration]:
        return super().lengths() or [Duration(10_000, "ba")]


@dataclass(frozen=True, repr=False)
class WSDScheduler(Schedule):
    """Warm-up, then the full rate, and a decay over the last part of the run ("warmup-stable-decay").

    From MiniCPM (arXiv 2404.06395); "1-sqrt" is the decay that arXiv 2405.18392 found best. A run that is extended
    before its decay has begun continues at the same rate.

    >>> preview_schedule(WSDScheduler("0.5dur", kind="linear"), max_duration="3e6tok", rows=5).rates
    [1.0, 1.0, 1.0, 0.5, 0.0]
    """

    decay: Length = "0.1dur"
    kind: Literal["linear", "cosine", "1-sqrt", "exponential"] = "1-sqrt"
    t_max: str | Duration = _WHOLE_RUN

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", warmup_length(self.decay, "WSDScheduler.decay") or self.decay)
        super().__post_init__()
        check_choice("WSDScheduler.kind", self.kind, _DECAYS)
        if self.kind == "exponential" and not (self.min_lr or self.min_lr_rate):
            raise ConfigError("`WSDScheduler.kind='exponential'` never reaches 0. Pass `min_lr` or `min_lr_rate`.")

    def shape(self, position: RunPosition, begin: float) -> float:
        end = position.at(self.t_max, self.scale_ratio)
        start = end - (position.at(self.decay, self.scale_ratio) if isinstance(self.decay, Duration) else 0)
        if position.now < start or math.isinf(end):
            return 1.0
        return _DECAYS[self.kind](_share(position, start, end))

    def floored(self, shape: float, least: float, rate: float) -> float:
        # an exponential decay has the least rate in its base
        return (least / rate) ** (1 - shape) if self.kind == "exponential" else super().floored(shape, least, rate)


@dataclass(frozen=True, repr=False)
class ProductScheduler(Schedule):
    """Several schedules multiplied: what `a * b` makes.

    >>> both = LinearScheduler() * StepScheduler("2ba", gamma=0.5)
    >>> preview_schedule(both, max_duration="4ba", rows=5).rates
    [1.0, 0.75, 0.25, 0.125, 0.0]
    """

    schedules: tuple[Schedule, ...] = ()

    def __post_init__(self) -> None:
        if self.warmup or self.min_lr is not None or self.min_lr_rate is not None or self.scale_ratio != 1:
            raise ConfigError("`ProductScheduler` takes no options. Give `warmup`, `min_lr` and the like to one part.")
        super().__post_init__()
        if len(self.schedules) < 2 or not all(isinstance(schedule, Schedule) for schedule in self.schedules):
            raise ConfigError(f"`ProductScheduler` takes a tuple of at least two schedules, got {self.schedules!r}.")
        object.__setattr__(self, "schedules", tuple(part for schedule in self.schedules for part in schedule.parts))

    def factor(self, position: RunPosition, rate: float = 1.0) -> float:
        return math.prod(schedule.factor(position, rate) for schedule in self.schedules)

    @property
    def parts(self) -> tuple[Schedule, ...]:
        return self.schedules

    def lengths(self) -> list[Duration]:
        return [length for schedule in self.schedules for length in schedule.lengths()]

    def __repr__(self) -> str:
        return " * ".join(map(repr, self.schedules))


# --- by name

# Schedules by name; some names are transformers'.
NAMED: dict[str, type[Schedule]] = {
    "constant": ConstantScheduler,
    "constant_with_warmup": ConstantScheduler,
    "linear": LinearScheduler,
    "cosine": CosineAnnealingScheduler,
    "cosine_with_restarts": CosineWithRestartsScheduler,
    "cosine_with_min_lr": CosineAnnealingScheduler,
    "inverse_sqrt": InverseSqrtScheduler,
    "polynomial": PolynomialScheduler,
    "step": StepScheduler,
    "multistep": MultiStepScheduler,
    "exponential": ExponentialScheduler,
    "wsd": WSDScheduler,
}


def named_schedule(name: str, options: Mapping[str, Any] | None = None, warmup: Any = 0) -> Schedule:
    """Return the schedule of a name in `NAMED`; `options` may have transformers' names.

    Raises:
        ConfigError: If there is none of the name, or it takes no such options.

    >>> named_schedule("wsd", {"decay": "0.2dur"}, warmup=100)
    WSDScheduler(warmup='100ba', decay='0.2dur')
    """
    check_choice("lr_scheduler", name, NAMED, ", a scheduler or a callable of the optimizer")
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(
            f"`lr_scheduler_kwargs` must be a dict of what the schedule takes, such as {{'min_lr': 1e-6}}, got "
            f"{options!r:.200}."
        )
    arguments = dict(options or {})
    has_min_lr = {"min_lr", "min_lr_rate"} & arguments.keys()
    if name == "polynomial":
        end = arguments.pop("lr_end", 1e-7)
        arguments |= {} if has_min_lr else {"min_lr": end}
    if name == "cosine_with_min_lr" and not has_min_lr:
        raise ConfigError(f"`lr_scheduler={name!r}` needs `lr_scheduler_kwargs` with 'min_lr' or 'min_lr_rate'.")
    if name == "inverse_sqrt" and isinstance(arguments.get("timescale"), int):
        arguments["timescale"] = Duration(arguments["timescale"], "ba")  # transformers counts steps
    return make_schedule(NAMED[name], f"lr_scheduler={name!r}", {**arguments, **({"warmup": warmup} if warmup else {})})


def make_schedule(kind: type[Schedule], who: str, options: Mapping[str, Any]) -> Schedule:
    """Return a schedule of a class, called `who`, with these options.

    Raises:
        ConfigError: If an option is unknown or missing.
    """
    known = {attribute.name: attribute for attribute in fields(kind)}
    for name in options:
        if name not in known:
            raise ConfigError(
                f"`lr_scheduler_kwargs` has {name!r}, but `{who}` takes {', '.join(map(repr, known))}."
                f"{did_you_mean(str(name), known)}"
            )
    missing = dataclasses.MISSING
    lacking = [name for name, attribute in known.items() if attribute.default is missing and name not in options]
    if lacking:
        raise ConfigError(f"`{who}` needs `lr_scheduler_kwargs` with {' and '.join(map(repr, lacking))}.")
    return kind(**options)


def warmup_length(value: Any, name: str = "warmup_steps") -> Duration | Literal[0]:
    """Return the length of a warm-up, given as steps, a share of the run below 1, or a duration; 0 for none.

    Raises:
        ConfigError: If it is none of these.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return Duration.parse(value, "ba", name)
    number = float(value)
    if number == 0:
        return 0
    if 0 < number < 1:
        return Duration(number, "dur")
    if not (number > 0 and number.is_integer()):
        raise ConfigError(
            f"`{name}` must be an integer of at least 0 (steps), a share of the run below 1 such as 0.1, or a "
            f"duration such as '0.1dur' or '2ep', got {value!r}."
        )
    return Duration(int(number), "ba")


# --- helpers


def _fallen(schedule: Any, position: RunPosition, begin: float) -> float:
    """Return how much of the way from the warm-up to `t_max` is done, between 0 and 1."""
    return _share(position, begin, position.at(schedule.t_max, schedule.scale_ratio))


def _share(position: RunPosition, begin: float, end: float) -> float:
    """Return how much of the way from `begin` to `end` is done, between 0 and 1."""
    way = end - begin
    if math.isinf(way) or math.isnan(way):
        return 0.0
    return min(max((position.now - begin) / way, 0.0), 1.0) if way > 0 else float(position.now >= end)


def _length_of(name: str, value: Any) -> Any:
    """Return a duration, or a tuple of them; a bare number is none, as it says not what it counts."""
    if value is None:
        return None
    if isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(_length_of(name, entry) for entry in value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        raise ConfigError(f"`{name}` must say what it counts, got {value!r}. Give '{value}ba' (steps) or '{value}ep'.")
    return Duration.parse(value, "ba", name)


def _plain(value: Any) -> Any:
    if isinstance(value, Duration):
        return str(value)
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


# The part of the rate that is left by the share of the decay that is done; of an exponential one, its exponent.
_DECAYS = {
    "linear": lambda share: 1.0 - share,
    "cosine": lambda share: 0.5 * (1.0 + math.cos(math.pi * share)),
    "1-sqrt": lambda share: 1.0 - math.sqrt(share),
    "exponential": lambda share: 1.0 - share,
}


# --- preview


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
        figure, (axes,) = create_panels("SchedulePreview", 1)
        axes.plot(*self._curve)
        axes.set(xlabel=_COUNTED[self.unit], ylabel="learning rate")
        axes.set_ylim(bottom=0)
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
    check_number("rows", rows, least=2, is_whole=True)
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
    known_pace = {unit: value for unit, value in pace.items() if value}
    unit, length, rate_at = _rates_of(schedule, run_length, known_pace, learning_rate)
    places = [length * number / (rows - 1) for number in range(rows)]
    if unit == "ba":
        places = [float(round(place)) for place in places]
    curve = [length * number / 1000 for number in range(1001)]
    return SchedulePreview(unit, places, list(map(rate_at, places)), (curve, list(map(rate_at, curve))))


def _rates_of(
    schedule: Schedule, run_length: RunLength, pace: dict[str, float], learning_rate: float
) -> tuple[str, float, Callable[[float], float]]:
    """Return the unit and length of a run with so many of each unit in a step, and the rate at each place of it."""
    follows, ends = run_length.follows(schedule), run_length.ends
    units = {length.unit for length in [*schedule.lengths(), *ends]} - {"dur"} if follows or ends else set()
    if run_length.end is None and len(ends) == 1 and units == {ends[0].unit}:  # nothing else is counted
        pace = {ends[0].unit: 1.0}
    for unit in sorted(units - pace.keys()):
        argument = {"ep": "steps_per_epoch", "sp": "samples_per_step", "tok": "tokens_per_step"}
        raise ConfigError(
            f"The schedule and the run count {' and '.join(_COUNTED[name] for name in sorted(units))}. Pass "
            f"`{argument.get(unit, 'seconds_per_step')}`, so that it is known how these go together."
        )
    end = Duration(run_length.end, "ba") if run_length.end is not None else None
    nearest = end or min(ends, key=lambda end: end.value / pace[end.unit])
    unit, length = nearest.unit, float(nearest.value)

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

    return unit, length, rate_at


_COUNTED = {"ba": "step", "ep": "epochs", "sp": "samples", "tok": "tokens", "s": "seconds"}
