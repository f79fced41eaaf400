"""Durations: how they are read, when they are due, and when a run ends."""

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omnitrain.core.duration import Duration, Every, Limits, make_interval, parse_interval
from omnitrain.core.errors import ConfigError
from omnitrain.core.progress import Progress


def walk(progress: Progress, batch_size: int, epochs: int):
    """Yield at the end of each step, and after each epoch is closed, as a loop looks."""
    size = progress.epoch_size
    assert size is not None
    for _ in range(epochs):
        while progress.samples_in_epoch < size:
            progress.advance(min(batch_size, size - progress.samples_in_epoch))
            yield "step"
        progress.close_epoch(complete=True)
        yield "epoch"


@pytest.mark.parametrize(("text", "value", "unit"), [
    ("10ep", 10, "ep"), ("0.5ep", 0.5, "ep"), ("500ba", 500, "ba"), ("40sp", 40, "sp"), ("3e4tok", 30000, "tok"),
    ("90s", 90, "s"), ("2h30m", 9000, "s"), ("1d", 86400, "s"), ("45m", 2700, "s"), ("1h5m10s", 3910, "s"),
    ("1.5h", 5400, "s"), (" 2h 30m ", 9000, "s"), ("0.3dur", 0.3, "dur"), ("1dur", 1, "dur"), (500, 500, "ba"),
    (500.0, 500, "ba"), (np.int64(500), 500, "ba"), (Duration(2, "ep"), 2, "ep"),
])  # fmt: skip
def test_duration_parses_every_notation(text: Any, value: float, unit: str) -> None:
    assert Duration.parse(text, unit="ba", name="save_steps") == Duration(value, unit)


@pytest.mark.parametrize("text", [
    True, None, [1], math.nan, math.inf, -1, 0, "", " ", "10", "abc", "10st", "-5ep", "0ep", "1e999ep", "1e308d",
    "nanep", "-2h", "2h-30m", "30m2h", "1_0ep", "٣ep", "0dur", "1.5dur", "1e-400ep", "5 ep ep",
])  # fmt: skip
def test_duration_rejects_wrong_values(text: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Duration.parse(text, unit="ba", name="save_steps")
    message = str(caught.value)
    assert message.startswith(f"`save_steps` must be a positive duration, got {text!r}. Give a number of steps or")
    assert all(example in message for example in ("'10ep'", "'500ba'", "sp'", "tok'", "'2h30m'", "'0.3dur'"))


def test_duration_rejects_fractions_of_whole_units() -> None:
    for text, word in (("0.5ba", "steps"), (0.5, "steps"), ("0.5sp", "samples"), ("1.5tok", "tok")):
        with pytest.raises(ConfigError, match=f"whole number of {word}.*got {re.escape(repr(text))}"):
            Duration.parse(text, unit="ba", name="save_steps")
    for value, unit in ((-1, "ep"), (1, "st"), (0.5, "ba"), (True, "ep")):
        with pytest.raises(ConfigError):
            Duration(value, unit)  # type: ignore[arg-type]


@given(st.sampled_from(["ep", "ba", "sp", "tok", "s", "dur"]), st.floats(1e-6, 1e9), st.booleans())
@settings(max_examples=50, deadline=None)
def test_duration_round_trips_through_str(unit: str, value: float, whole: bool) -> None:
    value = min(value, 1.0) if unit == "dur" else value
    duration = Duration(math.ceil(value) if whole or unit in ("ba", "sp", "tok") else value, unit)
    assert Duration.parse(str(duration), unit="ep", name="epochs") == duration
    for text in ("10ep", "0.5ep", "500ba", "30000tok", "2h30m", "1m30s", "1d", "0.1s", "0.3dur"):
        assert str(Duration.parse(text, unit="ep", name="epochs")) == text


@pytest.mark.parametrize(("unit", "amount"), [("ep", 1.5), ("ba", 7), ("sp", 90), ("tok", 1000), ("s", 12.5)])
def test_amount_and_due_read_counter_of_unit(unit: str, amount: float) -> None:
    progress = Progress(epoch=1, step=7, samples_in_epoch=30, samples=90, tokens=1000, seconds=12.5, epoch_size=60)
    assert Duration(1, unit).amount(progress) == amount
    assert Duration(math.floor(amount), unit).due(progress)
    assert not Duration(math.floor(amount) + 1, unit).due(progress)


@given(st.integers(1, 20), st.lists(st.integers(0, 50), max_size=30), st.sampled_from(["ba", "sp", "tok", "s"]))
@settings(max_examples=60, deadline=None)
def test_every_fires_when_multiple_is_crossed(n: int, strides: list[int], unit: str) -> None:
    every, count = Every(Duration(n, unit)), 0
    for stride in strides:
        before, count = count // n, count + stride
        assert every.due(Progress(step=count, samples=count, tokens=count, seconds=count)) == (count // n > before)


@given(tenths=st.integers(1, 40), size=st.integers(1, 30), batch_size=st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_every_fraction_of_epoch_is_exact(tenths: int, size: int, batch_size: int) -> None:
    every, progress = Every(Duration.parse(f"{tenths / 10}ep", "ep", "eval_steps")), Progress(epoch_size=size)
    fired = 0
    for at in walk(progress, batch_size, epochs=5):
        done = 10 * (progress.epoch * size + progress.samples_in_epoch)  # in tenths of samples
        count = (done - (at == "step" and progress.is_epoch_consumed)) // (tenths * size)  # until it is closed
        assert every.due(progress) == (count > fired)
        fired = count
    assert fired == 50 // tenths


def test_every_part_of_epoch_is_exact() -> None:
    for part, size, expected in (
        (2, 2, ["epoch"]), (1 / 3, 3, ["step", "step", "epoch"]), (0.1, 10, [*["step"] * 9, "epoch"])
    ):  # fmt: skip
        every, progress = Every(Duration(part, "ep")), Progress(epoch_size=size)
        fired = [at for at in walk(progress, batch_size=1, epochs=2) if every.due(progress)]
        assert fired == expected * round(2 / max(part, 1))
    every, progress = Every(Duration(1, "ep")), Progress()  # of a stream
    progress.advance(8)
    assert not every.due(progress)
    progress.close_epoch(complete=True)
    assert every.due(progress) and not every.due(progress)
    every, progress = Every(Duration(0.1, "dur"), Limits(epochs=10)), Progress(epoch_size=7)
    assert [at for at in walk(progress, batch_size=2, epochs=10) if every.due(progress)] == ["epoch"] * 10


@pytest.mark.parametrize(("share", "limits", "fired"), [
    (0.3, Limits(max_steps=10), [3, 6, 9]),
    (0.1, Limits(max_steps=30), [*range(3, 31, 3)]),
    (0.5, Limits(max_steps=5), [3, 5]),
    (0.5, Limits(epochs=100, max_steps=8, max_duration="20sp"), [3, 5]),
])  # fmt: skip
def test_every_share_of_run_follows_nearest_limit(share: float, limits: Limits, fired: list[int]) -> None:
    every, progress, steps = Every(Duration(share, "dur"), limits), Progress(epoch_size=1000), []
    while not limits.reached(progress):
        progress.advance(4)
        if every.due(progress):
            steps.append(progress.step)
    assert steps == fired


@pytest.mark.parametrize("text", ["4ba", "8sp", "1ep", "0.25ep", "0.1dur"])
def test_every_across_resume(text: str) -> None:
    limits, duration = Limits(epochs=4), Duration.parse(text, "ep", "save_steps")
    straight, progress = Every(duration, limits), Progress(epoch_size=6)
    expected = [straight.due(progress) for _ in walk(progress, batch_size=2, epochs=4)]
    for cut in range(len(expected)):
        progress, every, fired = Progress(epoch_size=6), Every(duration, limits), []
        for look, _ in enumerate(walk(progress, batch_size=2, epochs=4)):
            fired.append(every.due(progress))
            if look == cut:
                every = Every(duration, limits)
                every.restart(Progress.from_state(progress.state_dict()))
        assert fired == expected


def test_limits_stop_at_first_reached() -> None:
    limits = Limits(epochs=3, max_steps=100, max_duration="1h")
    places = ((2, 99, 3599.0), (2, 100, 3599.0), (2, 99, 3600.0), (3, 99, 0.0))
    reasons = [limits.reached(Progress(epoch=epoch, step=step, seconds=seconds)) for epoch, step, seconds in places]
    assert reasons == ["", "max_steps", "max_duration", "epochs"]
    assert Limits(epochs=1, max_steps=1, max_duration=1).reached(Progress(epoch=1, step=1)) == "epochs"  # of a tie
    assert Limits(max_steps=1, max_duration="1ba").reached(Progress(step=1)) == "max_steps"
    assert Limits(max_duration=2).reached(Progress(epoch=2)) == "max_duration"


@given(hundredths=st.integers(1, 500), size=st.integers(1, 40))
@example(hundredths=136, size=25)  # in floats, 1 + 9/25 is less than 1.36
@settings(max_examples=40, deadline=None)
def test_limits_of_fractional_epochs(hundredths: int, size: int) -> None:
    limits, progress = Limits(epochs=hundredths / 100), Progress(epoch_size=size)
    next(None for _ in walk(progress, batch_size=1, epochs=6) if limits.reached(progress))
    total = limits.total_steps(steps_per_epoch=size, samples_per_epoch=size)
    assert progress.step == total == -(-hundredths * size // 100)


@pytest.mark.parametrize(("call", "name"), [
    *((lambda value=value: Limits(epochs=value), "`epochs`") for value in (0, -1, True, "3", math.nan)),
    *((lambda value=value: Limits(max_steps=value), "`max_steps`") for value in (0, 2.5, "10")),
    *((lambda value=value: Limits(max_duration=value), "`max_duration`") for value in ("0.5dur", "10", 0)),
    (Limits, "`max_duration`"),
    (lambda: Duration(0.3, "dur").amount(Progress()), r"0\.3dur"),  # of a run of unknown length
    (lambda: Every(Duration(0.3, "dur")), r"0\.3dur"),
    *((lambda value=value: parse_interval(value, "save_steps"), "`save_steps`") for value in (
        [], "5ba after", "after 5ba", "5ba after 0ba", "5 after 1ep", ["1ep", None], [[1]], int)),
])  # fmt: skip
def test_limits_and_intervals_reject_wrong_values(call: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        call()


def test_fraction_follows_nearest_limit() -> None:
    limits, places = Limits(epochs=4, max_steps=10), ((0, 0), (1, 2), (1, 6), (9, 2))
    assert [limits.fraction(Progress(epoch=epoch, step=step)) for epoch, step in places] == [0.0, 0.25, 0.6, 1.0]


@pytest.mark.parametrize(("limits", "total", "of_stream"), [
    ({"epochs": 3}, 30, None), ({"epochs": 0.7}, 7, None), ({"epochs": 0.71}, 8, None),
    ({"epochs": 3, "max_steps": 12}, 12, 12), ({"epochs": 3, "max_steps": 99}, 30, 99),
    ({"max_duration": "160sp"}, 20, None), ({"max_duration": "161sp"}, 21, None), ({"max_duration": "25ba"}, 25, 25),
    ({"epochs": 3, "max_duration": "2h"}, 30, None), ({"max_duration": "2h"}, None, None),
    ({"max_duration": "5tok"}, None, None),
])  # fmt: skip
def test_total_steps_of_first_known_limit(limits: Any, total: int | None, of_stream: int | None) -> None:
    assert Limits(**limits).total_steps(steps_per_epoch=10, samples_per_epoch=80) == total
    assert Limits(**limits).total_steps(None, None) == of_stream


def fired_steps(value: Any, limits: Limits, start: int = 0) -> list[float]:
    """Return the epochs at which an interval fires in 6 epochs of 4 steps, called as a run calls it."""
    interval, progress, fired = make_interval(parse_interval(value, "eval_steps"), limits), Progress(epoch_size=8), []
    for _ in range(24):
        progress.advance(samples=2)
        if progress.step == start:
            interval.restart(progress)
        elif progress.step > start and interval.due(progress):
            fired.append(progress.step)
        if progress.is_epoch_consumed:
            progress.close_epoch(complete=True)
            if progress.step >= start and interval.due(progress):
                fired.append(progress.step + 0.5)  # at the end of the epoch
    return fired


@pytest.mark.parametrize(("value", "fired"), [
    (["5ba", "2ep"], [5, 8.5, 10, 15, 16.5, 20, 24.5]),
    ([10, "10ba"], [10, 20]),
    ("1ep after 3ep", [16.5, 20.5, 24.5]),
    ("4ba after 8ba", [12, 16, 20, 24]),
    ("3ba after 0.5dur", [15, 18, 21, 24]),
    ("16sp after 2ep", [16, 24]),
    (["1ep", "2ba after 5ep"], [4.5, 8.5, 12.5, 16.5, 20.5, 22, 24, 24.5]),
    (lambda progress: progress.step in (1, 4, 9), [1, 4, 9]),
    ([lambda progress: not progress.samples_in_epoch and progress.epoch in (2, 5), 9], [8.5, 9, 18, 20.5]),
])  # fmt: skip
def test_interval_of_several_rules(value: Any, fired: list[float]) -> None:
    limits = Limits(epochs=6)
    assert fired_steps(value, limits) == fired
    for start in (5, 10, 15):  # a resumed run repeats and skips nothing
        assert fired_steps(value, limits, start) == [step for step in fired if step > start]


@pytest.mark.parametrize(("text", "limits", "step"), [
    ("6ba", Limits(epochs=6), 11), ("1ep", Limits(epochs=6), 9), ("0.25dur", Limits(epochs=6), 11),
    ("0.25dur", Limits(epochs=6, max_steps=8), 7), ("7sp", Limits(epochs=6), 9),
])  # fmt: skip
def test_duration_has_passed_since_a_position(text: str, limits: Limits, step: int) -> None:
    """From step 5 on, of 4 steps an epoch."""

    def position(step: int) -> Progress:
        return Progress(epoch=step // 4, step=step, samples_in_epoch=2 * (step % 4), samples=2 * step, epoch_size=8)

    duration = Duration.parse(text)
    assert [duration.has_passed(position(5), position(n), limits) for n in (step - 1, step)] == [False, True]
