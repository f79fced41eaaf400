"""Schedules as functions of progress: their values, what they are written in, and the runs that they span."""

import dataclasses
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from counting import Streamed
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import StopAt, Trace, rows, same, small_trainer, t16, weights
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, MultiStepLR, ReduceLROnPlateau, StepLR
from torch.utils.data import IterableDataset

import omnitrain
from omnitrain import ConfigError, LinearScheduler, MultiStepScheduler, StepScheduler, WSDScheduler, preview_schedule
from omnitrain.core.duration import Limits
from omnitrain.optim.build import build_scheduler
from omnitrain.optim.schedules import NAMED, RunLength, RunPosition, Schedule, named_schedule
from omnitrain.trainer import lifecycle

EXAMPLES: list[Schedule] = [
    omnitrain.ConstantScheduler(warmup=3), LinearScheduler(warmup="0.1dur"), omnitrain.PolynomialScheduler(2, warmup=2),
    LinearScheduler(t_max="0.5dur", min_lr_rate=0.2), omnitrain.CosineAnnealingScheduler(warmup=5, min_lr=0.01),
    omnitrain.CosineWithRestartsScheduler(3, warmup="0.2dur"), StepScheduler("0.2dur", gamma=0.5),
    MultiStepScheduler(["0.3dur", "17ba"], gamma=0.1, warmup=4), omnitrain.InverseSqrtScheduler("9ba", warmup=4),
    omnitrain.ExponentialScheduler(0.5, "0.1dur", min_lr_rate=0.1), LinearScheduler(warmup=3) * StepScheduler("0.5dur"),
    WSDScheduler("0.2dur", warmup="0.1dur"), WSDScheduler("10ba", kind="exponential", min_lr_rate=0.01),
]  # fmt: skip


def optimizer_of(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates], lr=rates[0])


def walked(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    rates = []
    for _ in range(steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def over_steps(schedule: Any, total: int, rate: float = 0.1, **options: Any) -> list[float]:
    optimizer = optimizer_of(rate)
    return walked(build_scheduler(schedule, optimizer, run_length=RunLength(end=total), **options), optimizer, total)


@settings(max_examples=20)
@given(
    st.sampled_from([
        ("constant_with_warmup", {}), ("linear", {}), ("cosine", {}), ("cosine_with_restarts", {}),
        ("inverse_sqrt", {}), ("inverse_sqrt", {"timescale": 7}),
        ("cosine_with_min_lr", {"min_lr": 0.01}), ("cosine_with_min_lr", {"min_lr_rate": 0.3, "num_cycles": 1.5}),
        ("cosine", {"num_cycles": 0.75}), ("cosine_with_restarts", {"num_cycles": 3}),
        ("polynomial", {"lr_end": 1e-3, "power": 2.5}), ("polynomial", {}),
        ("warmup_stable_decay", {"num_decay_steps": 4, "min_lr_ratio": 0.1, "decay_type": "1-sqrt"}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
    ]), st.integers(0, 20), st.integers(6, 40),
)  # fmt: skip
def test_schedule_names_equal_transformers(case: Any, warmup: int, more: int) -> None:
    name, options = case
    if name not in list(transformers.SchedulerType):
        return
    optimizer, total = optimizer_of(0.1), warmup + more
    theirs = transformers.get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=dict(options))
    expected = walked(theirs, optimizer, total)
    rates = over_steps(name, total, warmup_steps=warmup, options=options)
    assert rates == pytest.approx(expected, rel=1e-12, abs=1e-17)


@settings(max_examples=10)
@given(st.integers(1, 12), st.floats(0.05, 1.5), st.lists(st.integers(1, 40), max_size=4, unique=True))
def test_schedule_steps_equal_torch(size: int, gamma: float, steps: list[int]) -> None:
    for ours, theirs in (
        (StepScheduler(f"{size}ba", gamma), lambda optimizer: StepLR(optimizer, size, gamma)),
        (MultiStepScheduler([f"{step}ba" for step in steps], gamma), lambda it: MultiStepLR(it, steps, gamma)),
        (omnitrain.ExponentialScheduler(gamma, f"{size}ba"), lambda it: ExponentialLR(it, gamma ** (1 / size))),
    ):
        optimizer = optimizer_of(0.1)
        assert over_steps(ours, 40) == pytest.approx(walked(theirs(optimizer), optimizer, 40), rel=1e-10)


@pytest.mark.parametrize(
    ("kind", "half"), [("linear", 0.5), ("cosine", 0.5), ("1-sqrt", 1 - math.sqrt(0.5)), ("exponential", 0.0)]
)
def test_schedule_wsd(kind: Any, half: float) -> None:
    rates = over_steps(WSDScheduler("0.2dur", kind=kind, warmup=4, min_lr=0.001), 40, rate=0.1)
    assert rates[:5] == pytest.approx([0, 0.025, 0.05, 0.075, 0.1])
    assert rates[5:33] == [0.1] * 28 and rates[33] < 0.1
    middle = 0.01 if kind == "exponential" else 0.001 + 0.099 * half  # the root of 0.1 x 0.001
    assert [rates[36], rates[40]] == pytest.approx([middle, 0.001])


def test_schedule_milestones_in_units() -> None:
    run_length = RunLength.of(Limits(epochs=10), steps_per_epoch=7, samples_per_epoch=50)
    schedule = MultiStepScheduler(["0.3dur", "8ep", "10ba", "175sp"], gamma=0.5)
    factors = [schedule.factor(RunPosition(run_length, step)) for step in range(71)]
    drops = [step for step in range(1, 71) if factors[step] < factors[step - 1]]
    assert drops == [10, 21, 25, 56]  # 175 of 50 samples an epoch are 24.5 steps


def test_schedule_min_lr_per_group() -> None:
    optimizer = optimizer_of(0.1, 0.02, 0.0)
    scheduler = build_scheduler("cosine_with_min_lr", optimizer, options={"min_lr": 0.01}, run_length=RunLength(end=10))
    assert scheduler.state_dict().keys() == LambdaLR(optimizer_of(0.1), lambda _: 1.0).state_dict().keys()
    walked(scheduler, optimizer, 10)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.01, 0.0])
    assert isinstance(scheduler, LambdaLR)


@pytest.mark.parametrize("schedule", EXAMPLES, ids=repr)
def test_schedule_scale_ratio_and_repr(schedule: Schedule) -> None:
    assert eval(repr(schedule), vars(omnitrain)) == schedule
    if len(schedule.parts) == 1 and all(length.unit == "dur" for length in schedule.lengths()):
        with pytest.raises(ConfigError, match=rf"{type(schedule).__name__}.scale_ratio=2.0` has no effect"):
            dataclasses.replace(schedule, scale_ratio=2.0)
    elif len(schedule.parts) == 1:
        whole = [schedule.factor(RunPosition(RunLength("ba", 50), step), 0.1) for step in range(51)]
        twice = dataclasses.replace(schedule, scale_ratio=2.0)
        scaled = [twice.factor(RunPosition(RunLength("ba", 100), step), 0.1) for step in range(0, 101, 2)]
        assert scaled == pytest.approx(whole, rel=1e-9, abs=1e-12)


NEEDED: dict[Any, dict[str, Any]] = {
    StepScheduler: {"step_size": "4ba"}, MultiStepScheduler: {"milestones": ["4ba"]},
    omnitrain.ExponentialScheduler: {"gamma": 0.5},
}  # fmt: skip
VALUES: dict[str, Any] = {
    "warmup": "3ba", "min_lr": 2.0, "min_lr_rate": 0.99999, "scale_ratio": 0.5, "t_max": "8ba", "num_cycles": 3,
    "power": 3.0, "gamma": 0.5, "decay_period": "4ba", "timescale": "2ba", "decay": "0.5dur", "kind": "linear",
}  # fmt: skip
"""For each argument of a schedule a value that shows its effect."""


@pytest.mark.parametrize(("kind", "name"), [
    (kind, field.name)
    for kind in dict.fromkeys(type(part) for schedule in EXAMPLES for part in schedule.parts)
    for field in dataclasses.fields(kind)
    if field.name not in NEEDED.get(kind, ()) and (kind, field.name) != (omnitrain.ConstantScheduler, "min_lr_rate")
], ids=lambda value: getattr(value, "__name__", value))  # fmt: skip
def test_schedule_arguments_change_the_rates(kind: type[Schedule], name: str) -> None:
    options = {**NEEDED.get(kind, {}), **({"warmup": "3ba"} if name == "scale_ratio" else {})}
    schedules = kind(**options), kind(**options, **{name: VALUES[name]})
    rates = [preview_schedule(schedule, max_steps=24, steps_per_epoch=6, rows=25).rates for schedule in schedules]
    assert rates[0] != rates[1]


PACES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 500), st.floats(0.01, 9)), min_size=5, max_size=40)


@settings(max_examples=15)
@given(st.sampled_from(EXAMPLES), st.sampled_from(["tok", "sp", "s"]), PACES, st.data())
def test_schedule_depends_on_progress_only(schedule: Schedule, unit: str, windows: Any, data: Any) -> None:
    """Whatever came before, and whatever steps were skipped, the same progress gives the same rate, to the bit."""

    def move(scheduler: Any, is_skipped: bool = False) -> float:
        if not is_skipped:
            scheduler.optimizer.step()
        if scheduler.follows:
            scheduler.move(progress, not is_skipped)
        elif not is_skipped:
            scheduler.step()
        return scheduler.optimizer.param_groups[0]["lr"]

    totals = dict(zip(("sp", "tok", "s"), map(sum, zip(*windows, strict=True)), strict=True))
    run_length = RunLength.of(Limits(max_duration=omnitrain.Duration(max(1, totals[unit]), unit)))
    scheduler = build_scheduler(schedule, optimizer_of(0.1), run_length=run_length)
    progress = omnitrain.Progress()
    for samples, tokens, seconds in windows:
        is_skipped = data.draw(st.booleans())
        progress.advance(samples, tokens, is_skipped)
        progress.seconds += seconds
        rate = move(scheduler, is_skipped)
        fresh = build_scheduler(schedule, optimizer_of(0.1), run_length=run_length)
        fresh.last_epoch = progress.step - 1
        assert rate == move(fresh)
        assert 0 <= rate <= 0.1 * (1 + 1e-12)
        assert scheduler.last_epoch == progress.step


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield from zip(*rows(32).tensors, strict=True)


def rates_of(data: Any, folder: Any = None, stop: int = 0, resume: Any = None, times: int = 1, **options: Any) -> Any:
    trace = Trace()
    options = {"learning_rate": 0.05, "log_steps": 1, "epochs": None, "save_dir": folder, **options}
    trainer = small_trainer(data=data, callbacks=[trace, StopAt(stop)], **options)
    for _ in range(times):
        trainer.train(resume_from=resume)
    return trainer, [row["learning_rate"] for row in trace.logs]


def test_schedule_by_clock_reaches_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(lifecycle.time, "perf_counter", lambda: clock[0])

    def collate(samples: Any) -> Any:
        clock[0] += 1
        return torch.utils.data.default_collate(samples)

    trainer, rates = rates_of(Endless(), max_duration="10s", lr_scheduler="linear", data_collator=collate)
    assert rates[0] == 0.05 and rates == sorted(rates, reverse=True) and rates[-1] <= 0.01
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0


def test_schedule_restarts_with_second_training() -> None:
    _, rates = rates_of(Endless(), times=2, max_duration="20sp", lr_scheduler="linear")
    assert rates == pytest.approx([0.05, 0.04, 0.03, 0.02, 0.01] * 2)


def test_schedule_per_epoch() -> None:
    drops = MultiStepScheduler(["2ep"], gamma=0.5)
    for data, length, schedule, expected in (
        (rows(8), {"epochs": 4}, drops, [1, 1, 0.5, 0.5]),
        (rows(8), {"max_duration": "32sp"}, LinearScheduler(), [1, 0.75, 0.5, 0.25]),
        (Streamed(rows(8)), {"max_duration": "32sp"}, drops * LinearScheduler(), [1, 0.75, 0.25, 0.125]),
    ):
        _, rates = rates_of(data, lr_scheduler=schedule, scheduler_interval="epoch", **length)
        assert rates == pytest.approx([0.05 * factor for factor in expected for _ in range(2)])


@pytest.mark.parametrize("common", [
    {"lr_scheduler": LinearScheduler(warmup="1ep"), "max_duration": "120sp"},
    {"lr_scheduler": StepScheduler("1ep"), "max_steps": 20},
    {"lr_scheduler": MultiStepScheduler(["1ep", "60sp"], warmup=2), "max_duration": "120sp"},
    {"lr_scheduler": "linear", "scheduler_interval": "epoch", "epochs": 3},
])  # fmt: skip
def test_schedule_of_growing_batch(common: dict[str, Any]) -> None:
    _, expected = rates_of(rows(40), **common)
    assert rates_of(rows(40), global_batch_size={0: 4, "1ep": 4}, **common)[1] == pytest.approx(expected)
    grown = rates_of(rows(40), global_batch_size={0: 4, "1ep": 8}, **common)[1]
    assert grown[:10] == pytest.approx(expected[:10]) and len(set(grown)) > 1


def test_schedule_class_path_with_options() -> None:
    def scheduler_of(name: str, **options: Any) -> Any:
        trainer, _ = rates_of(rows(8), lr_scheduler=name, lr_scheduler_kwargs=options, eval_dataset=rows(4), epochs=1)
        return trainer.lr_scheduler

    assert scheduler_of("omnitrain.WSDScheduler", decay="0.5dur").schedule == WSDScheduler("0.5dur")
    scheduler = scheduler_of("torch.optim.lr_scheduler.StepLR", step_size=3)
    assert (type(scheduler), scheduler.step_size) == (StepLR, 3)
    scheduler = scheduler_of("reduce_lr_on_plateau", patience=3)
    assert (type(scheduler), scheduler.patience) == (ReduceLROnPlateau, 3)


@pytest.mark.parametrize(("data", "schedule", "unit", "lengths", "words"), [
    (rows(16), LinearScheduler(), "epochs", (2, 4), "since .* 16 steps now .*8 steps"),
    (Endless(), LinearScheduler(), "max_duration", ("32sp", "64sp"), "max_duration='64sp' now .*='32sp'"),
    (rows(16), WSDScheduler("0.25dur"), "epochs", (2, 4), ""),  # its decay has not begun
])  # fmt: skip
def test_schedule_extension_warns_of_jump(
    data: Any, schedule: Schedule, unit: str, lengths: Any, words: str, tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    rates_of(data, tmp_path, 4, lr_scheduler=schedule, **{unit: lengths[0]})
    assert "goes from" not in caplog.text
    _, rates = rates_of(data, tmp_path, resume="auto", lr_scheduler=schedule, **{unit: lengths[1]})
    assert rates[0] == pytest.approx(0.0375 if words else 0.05)
    pattern = f"step 4 goes from 0.025 to 0.0375, .*{words}" if words else "goes from"
    assert bool(re.search(pattern, caplog.text)) is bool(words), caplog.text


def test_schedule_options_are_compared_on_resume(tmp_path: Path) -> None:
    options = {"lr_scheduler": "cosine", "epochs": 2, "save_dir": tmp_path}
    rates_of(rows(16), stop=4, lr_scheduler_kwargs={"min_lr": 0.01}, **options)
    with pytest.raises(omnitrain.CheckpointError, match=r"kwargs: \{'min_lr': 0.01\} -> \{'min_lr': 0.02\}"):
        rates_of(rows(16), resume="auto", lr_scheduler_kwargs={"min_lr": 0.02}, **options)


def test_schedule_warns_of_late_milestone(caplog: pytest.LogCaptureFixture) -> None:
    for data, length, milestones, late in (
        (rows(8), {"epochs": 4}, ["0.5dur", "4ep", "5ep", "30sp", "33sp", "9tok"], {"5ep", "33sp"}),
        (Endless(), {"max_duration": "32sp"}, ["0.5dur", "30sp", "33sp", "9tok"], {"33sp"}),
    ):
        caplog.clear()
        small_trainer(data=data, lr_scheduler=MultiStepScheduler(milestones), **{"epochs": None, **length})
        assert {text.split("'")[1] for text in caplog.messages if "after the end of the run" in text} == late


TWO = LinearScheduler(warmup=2)


@pytest.mark.parametrize(("options", "words"), [
    ({"lr_scheduler_kwargs": {"min_lr": 1e-3}}, "`lr_scheduler_kwargs=.*neither name nor class"),
    ({"lr_scheduler": TWO, "lr_scheduler_kwargs": {"min_lr": 1e-3}}, "`lr_scheduler_kwargs=.*has no"),
    ({"lr_scheduler": "cosine", "lr_scheduler_kwargs": {"min_rl": 1}}, "'min_rl'.*'cosine'` takes.*mean 'min_lr'"),
    ({"lr_scheduler": "multistep"}, "'multistep'` needs `lr_scheduler_kwargs` with 'mile"),
    ({"lr_scheduler": "warmup_stable_decay"}, "warmup_stable_decay.*transformers rejects it.*num_decay_steps"),
    ({"lr_scheduler": TWO, "warmup_steps": 3}, "`warmup_steps=3` has no effect.*warmup="),
    ({"warmup_steps": "1dur"}, "`warmup_steps='1dur'` leaves nothing of the run's 6"),
    ({"lr_scheduler": LinearScheduler(warmup="9ep")}, "'9ep'` leaves nothing"),
    ({"warmup_steps": 1.5}, "`warmup_steps`.*a share of the run below 1.*1.5"),
    ({"lr_scheduler": TWO, "scheduler_interval": "epoch"}, "`warmup_steps=2ba` counts steps"),
    ({"lr_scheduler": WSDScheduler("0.7dur", warmup="0.5dur")}, "take 3 [+] 5 steps, and there are 6"),
    ({"lr_scheduler": "cosine", "lr_scheduler_kwargs": {"min_lr": 0.1}}, "min_lr=0.1` is not below.*0.05"),
    ({"data": Endless(), "lr_scheduler": "wsd"}, "the data has no length"),
    ({"data": Endless(), "epochs": None, "max_duration": "9sp", "lr_scheduler": StepScheduler("2ep")}, "epochs .'2ep'"),
    ({"lr_scheduler": "omnitrain.Trainer"}, "not a subclass of .*LRScheduler or .*Schedule"),
])  # fmt: skip
def test_schedule_rejects_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small_trainer(**{"data": rows(8), "learning_rate": 0.05, "epochs": 3, **options})


@pytest.mark.parametrize(("make", "words"), [
    (lambda: MultiStepScheduler([30, 80]), "`MultiStepScheduler.milestones` must say what it counts, got 30"),
    (lambda: MultiStepScheduler("0.3dur"), "must be a list of durations"),
    (lambda: StepScheduler("3ep", gamma=0), "`StepScheduler.gamma` must be a finite number above 0, got 0"),
    (lambda: WSDScheduler(kind="sqrt"), "`WSDScheduler.kind` must be one of .* got 'sqrt'. Did you mean '1-sqrt'"),
    (lambda: WSDScheduler(kind="exponential"), "never reaches 0. Pass `min_lr`"),
    (lambda: LinearScheduler(min_lr=0.1, min_lr_rate=0.1), "are both given"),
    (lambda: LinearScheduler(min_lr_rate=1.0), "at least 0 and below 1, got 1.0"),
    (lambda: LinearScheduler(warmup=0.1, scale_ratio=0.5), "scale_ratio=0.5` has no effect: .*'500ba'"),
    (lambda: omnitrain.ConstantScheduler(min_lr_rate=0.1), "has no effect, as the rate never falls"),
    *((lambda option=option: omnitrain.ProductScheduler((TWO, TWO), **dict([option])), "takes no options")
      for option in (("warmup", "2ba"), ("min_lr", 0.1), ("min_lr_rate", 0.1), ("scale_ratio", 2.0))),
    (lambda: named_schedule("wds"), "Did you mean 'wsd'"),
    (lambda: preview_schedule("linear"), "Nothing would end this run"),
    (lambda: preview_schedule("linear", epochs=2), "Give `steps_per_epoch`, or `max_steps`"),
    (lambda: preview_schedule("linear", max_duration="1h", warmup_steps=9), "Pass `seconds_per_step`"),
    (lambda: named_schedule("cosine", [("min_lr", 0.1)]), r"`lr_scheduler_kwargs` must be a dict .* got \[\('min_lr'"),
    (lambda: named_schedule("cosine", "min_lr"), "`lr_scheduler_kwargs` must be a dict"),
])  # fmt: skip
def test_schedule_rejects_wrong_values(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_schedule_rejects_missing_tokens_and_custom_epochs() -> None:
    model = t16()
    with pytest.raises(omnitrain.DataError, match=r"LinearScheduler\(\)` follows the tokens.*batches have none"):
        rates_of(Endless(), model=model, max_duration="99tok", lr_scheduler="linear")
    assert same(weights(model), weights(t16()))
    custom = type("Own", (omnitrain.Trainer,), {"_train_epoch": lambda self, epoch: 0.0})
    options = {"kind": custom, "data": Endless(), "epochs": None, "lr_scheduler": "linear"}
    with pytest.raises(ConfigError, match="follows samples, tokens or time, which nothing counts in a custom `_tra"):
        small_trainer(**options, max_duration="99sp")
    small_trainer(**options, max_steps=9)


def test_preview_equals_run(tmp_path: Path) -> None:
    needed = {"step": {"step_size": "3ba"}, "multistep": {"milestones": ["3ba"]}, "exponential": {"gamma": 0.5}}
    needed["cosine_with_min_lr"] = {"min_lr": 0.01}
    for name in NAMED:
        options: dict[str, Any] = {"lr_scheduler_kwargs": needed.get(name, {}), "warmup_steps": 2, "epochs": 2}
        _, rates = rates_of(rows(12), lr_scheduler=name, **options)
        preview = preview_schedule(name, learning_rate=0.05, steps_per_epoch=3, rows=7, **options)
        assert preview.rates[:-1] == rates, name
    pytest.importorskip("matplotlib")
    path = preview.plot(tmp_path / "new" / "rate.png")  # pyright: ignore[reportPossiblyUnbound]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_preview_takes_pace() -> None:
    preview = preview_schedule("linear", max_duration="1h", warmup_steps=900, seconds_per_step=2, rows=5)
    assert (preview.unit, preview.places) == ("s", [0, 900, 1800, 2700, 3600])
    assert preview.rates == pytest.approx([0, 0.5, 1, 0.5, 0])
    for duration, pace, unit in (("400tok", {"tokens_per_step": 50}, "tok"), ("40sp", {"samples_per_step": 5}, "sp")):
        preview = preview_schedule("constant", max_duration=duration, warmup_steps=4, rows=9, **pace)
        assert preview.rates == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1] and preview.unit == unit
    assert str(preview).splitlines()[0].split() == ["run", "samples", "learning", "rate"]
