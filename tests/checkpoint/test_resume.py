"""Interrupted and resumed runs end like uninterrupted ones; and what else a checkpoint folder guarantees."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import math
import os
import pickle
import platform
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from forging import content_of, copied, seal
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import thinned
from recipes import Sentences, Tagger
from resuming import (
    Cut,
    KillAtEvent,
    Killed,
    Net,
    Numbered,
    Stream,
    assert_same,
    build,
    comparable,
    differences,
    disturb_generators,
    journal,
    memory_folder,
    outcome,
    play,
    train,
)
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, IterableDataset

import omnitrain
from omnitrain import Algorithm, Callback, CheckpointError, ConfigError, Trainer
from omnitrain.checkpoint import state
from omnitrain.checkpoint.history import HISTORY
from omnitrain.checkpoint.store import MANIFEST, Store
from omnitrain.data import sampling
from omnitrain.events import INSIDE_OF_STEPS


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


@pytest.fixture(scope="module")
def stopped_run() -> Iterator[Path]:
    with memory_folder() as path:
        play(path / "run", [{"cut": ("stop", 4)}])
        yield path / "run"


@pytest.fixture(scope="module")
def straight() -> dict[str, Any]:
    """The outcome of a run without options that was not interrupted, with its last weights."""
    with memory_folder() as path:
        return play(path / "run", load_best_at_end=False)


@pytest.fixture
def stopped(stopped_run: Path, folder: Path) -> Path:
    """A run without options that was stopped after step 4 of 9."""
    return copied(stopped_run, folder / "run")


def names(run: Path) -> list[str]:
    return [path.name for path in Store(run).checkpoints()]


def numbered(*steps: int) -> list[str]:
    return [f"checkpoint-{step}" for step in steps]


def best_of(run: Path) -> str:
    return (Store(run).resolve("best") or [Path()])[0].name


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return state.load_tensors(folder / state.WEIGHTS)


def model_of(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of an outcome."""
    tensors = result["tensors"].items()
    return {name.removeprefix("model/"): tensor for name, tensor in tensors if name.startswith("model/")}


def on(event: str, condition: Callable[[Any], object], action: Callable[[Any], object]) -> Callback:
    """Return a callback that does something at an event if a condition holds."""

    def handle(self: Any, trainer: Any, *details: Any) -> None:
        if condition(trainer):
            action(trainer)

    return type("Handler", (Callback,), {f"on_{event}": handle, "order": 90})()


def at_step(step: int) -> Callable[[Any], bool]:
    return lambda trainer: trainer.progress.step == step


def always(trainer: Any) -> bool:
    return True


def send(number: signal.Signals) -> Callable[[Any], None]:
    return lambda trainer: os.kill(os.getpid(), number)


def raise_error(error: type[BaseException]) -> Callable[[Any], None]:
    def act(trainer: Any) -> None:
        raise error

    return act


def failing_save(condition: Callable[[Path], bool]) -> Callable[..., None]:
    """Return a `save_tensors` whose disk is full for some files."""
    save_tensors = state.save_tensors

    def save(tensors: Any, path: Path) -> None:
        if condition(path):
            raise OSError(28, "No space left on device")
        save_tensors(tensors, path)

    return save


# --- interrupted anywhere


class Overflowing(Net):
    """Has infinite gradients in chosen batches; it counts them in a buffer, as if the data caused them."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.training:
            self.count += 1
            if int(self.count) in (2, 5, 6, 12):
                out.register_hook(lambda gradient: gradient * math.inf)
        return out


def scale(trainer: Trainer) -> None:
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)


class Endless(IterableDataset[Any]):
    """A stream of 22 samples without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([Numbered()[i] for i in range(22)])


class Seekable(IterableDataset[Any]):
    """A stream with a state, which draws its order from its own generator; it counts the samples that are read."""

    def __init__(self) -> None:
        self.read = 0
        self.generator = torch.Generator().manual_seed(7)
        self.order: list[int] = []
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        if not self.order:
            self.order = torch.randperm(22, generator=self.generator).tolist()
        while self.place < 22:
            self.place, self.read = self.place + 1, self.read + 1
            yield Numbered()[self.order[self.place - 1]]
        self.order, self.place = [], 0

    def state_dict(self) -> dict[str, Any]:
        words = self.generator.get_state().tolist()
        return {"order": list(self.order), "place": self.place, "generator": words}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.place = list(state["order"]), state["place"]
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))


class Requesting(Callback):
    """Has a state, requests saves after some evaluations, and an evaluation after a step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, trainer: Any) -> None:
        self.steps.append(trainer.progress.step)
        if trainer.progress.step == 5:
            trainer.request_evaluate()

    def on_eval_end(self, trainer: Any, metrics: Any) -> None:
        if trainer.progress.step % 4 == 0:
            trainer.request_save()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = list(parameters)
    return torch.optim.AdamW([{"params": others, "weight_decay": 0.1}, {"params": [first], "lr": 0.1}], lr=0.05)


def given_optimizer(make: Any) -> dict[str, Any]:
    return {"optimizer": make, "learning_rate": 2e-5}


def scheduled(make: Any, **options: Any) -> dict[str, Any]:
    return {"lr_scheduler": make, "save_steps": 2, **options}


def single_precision() -> Numbered:
    return Numbered(dtype=torch.float32)


RECIPES: dict[str, dict[str, Any]] = {
    "epochs": {},
    "odd intervals": {"eval_steps": 2, "save_steps": 3, "log_steps": 3},
    "each step": {"eval_steps": 3, "save_steps": 1, "log_steps": 1, "save_total_limit": 1},
    "saves between evaluations": {"eval_steps": 4, "save_steps": 5, "log_steps": 1},
    "samples": {
        "epochs": None, "max_duration": "50sp", "save_steps": "20sp", "eval_steps": "0.5ep", "log_steps": "10sp",
    },
    "end in epoch": {"epochs": None, "max_steps": 8, "save_steps": 3, "eval_steps": 5},
    "end in steps": {"epochs": None, "max_steps": 6, "save_steps": 3, "eval_steps": 4},
    "eval on start": {"eval_on_start": True, "save_steps": 2, "patience": 9},
    "no evaluation": {"eval_dataset": None, "save_steps": 2},
    "requests": {"callbacks": lambda: [Requesting()], "eval_steps": 1, "save_steps": 3},
    "async": {"save_steps": 2, "eval_steps": 3, "async_save": True},
    "skipped steps": {
        "model": Overflowing, "dataset": single_precision, "prepare": scale, "save_steps": 2, "eval_steps": 2,
        "lr_scheduler": "linear",
    },
    "bf16": {
        "autocast": "bf16", "model": lambda: Net(torch.float32), "dataset": single_precision, "save_steps": 2,
    },
    "stream": {"dataset": Endless, "save_steps": 2, "eval_steps": 2},
    "seekable stream": {"dataset": Seekable, "save_steps": 2, "eval_steps": 2},
    "stream saved at end": {"dataset": Endless, "save_steps": 3, "eval_steps": 3},
    "loader": {"train_loader": lambda: DataLoader(Numbered(), batch_size=4, shuffle=True), "save_steps": 2},
    "warm-up": {"lr_scheduler": "cosine", "warmup_steps": 2, "save_steps": 1},
    "linear per epoch": {"lr_scheduler": "linear", "scheduler_interval": "epoch", "save_steps": 2},
    "CosineAnnealingLR": scheduled(lambda optimizer: schedules.CosineAnnealingLR(optimizer, 5)),
    "OneCycleLR": scheduled(lambda optimizer: schedules.OneCycleLR(optimizer, 0.1, total_steps=9)),
    "SequentialLR": scheduled(
        lambda optimizer: schedules.SequentialLR(
            optimizer, [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.ExponentialLR(optimizer, 0.8)], [3]
        )
    ),
    "ReduceLROnPlateau": scheduled(
        lambda optimizer: schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0), eval_steps=2, save_steps=3
    ),
    "MultiStepLR per epoch": scheduled(
        lambda optimizer: schedules.MultiStepLR(optimizer, [1, 2, 2]), scheduler_interval="epoch"
    ),
    "CyclicLR": scheduled(
        lambda optimizer: schedules.CyclicLR(optimizer, 0.01, 0.1, 2),
        **given_optimizer(lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9)),
    ),
    "Adafactor": {"optimizer": torch.optim.Adafactor, "save_steps": 2},
    "unfused AdamW": {"optimizer": torch.optim.AdamW, "save_steps": 2},
    "tensor rate": scheduled(
        "linear", **given_optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.05)))
    ),
    "two groups": scheduled("linear", **given_optimizer(two_groups)),
}  # fmt: skip


KINDS = ("stop", "signal", "kill")
EXTENTS = ("all", "some")
SLOW = (
    "each step", "saves between evaluations", "end in steps", "eval on start", "stream saved at end",
    "linear per epoch", "OneCycleLR", "unfused AdamW", "async", "no evaluation", "end in epoch", "Adafactor",
    "CosineAnnealingLR", "ReduceLROnPlateau",
)  # fmt: skip
"""Recipes of which other ones, or other tests, are a quick case."""


def shortened(name: str, extent: str) -> dict[str, Any]:
    return {"epochs": 2, **RECIPES[name]} if extent == "some" else RECIPES[name]


def cuts(name: str, length: int, extent: str) -> Iterator[tuple[str, int]]:
    """Yield how and after which window to end a run: after each, or one at or between the boundaries of an epoch."""
    number = list(RECIPES).index(name)
    if extent == "some":
        yield KINDS[number // 3 % 3], (1, 3, 4)[number % 3]
        return
    for window in range(1, length + 1):
        if extent == "all" and number < 4:
            yield from ((how, window) for how in KINDS)
        else:
            yield KINDS[(window + number) % 3], window


@pytest.mark.parametrize(
    ("name", "extent"),
    thinned(
        [(name, extent) for name in RECIPES for extent in EXTENTS if extent == "all" or name not in SLOW],
        [(name, "some") for name in RECIPES if name not in SLOW],
    ),
)
def test_cut_run_resumes_identically(name: str, extent: str, folder: Path) -> None:
    options = shortened(name, extent)
    expected = play(folder / "straight", **options)
    length = expected["position"]["step"] + expected["position"]["skipped_steps"]
    assert length >= 6
    for number, cut in enumerate(cuts(name, length, extent)):
        result = play(folder / str(number), [{"cut": cut}, {}], **options)
        assert_same(result, expected, f"{name}, cut by {cut}")


@pytest.mark.parametrize(
    ("name", "order", "extent"),
    thinned(
        itertools.product(["odd intervals", "each step", "end in steps"], [-5, 97], EXTENTS),
        [("odd intervals", 97, "some"), ("end in steps", -5, "some")],
    ),
)
def test_run_killed_at_event_resumes_identically(name: str, order: int, extent: str, folder: Path) -> None:
    """At every event, or the middle one of each kind outside of steps, before or after the other callbacks."""
    recorder, options = KillAtEvent(order=order), shortened(name, extent)
    expected = play(folder / "straight", [{"cut": recorder}], **options)
    assert recorder.count > 30
    kinds: dict[str, list[int]] = {}
    for number, event in enumerate(recorder.names, 1):
        kinds.setdefault(event, []).append(number)
    middle = [numbers[len(numbers) // 2] for event, numbers in kinds.items() if event not in INSIDE_OF_STEPS]
    for number in range(1, recorder.count + 1) if extent == "all" else middle[order > 0 :: 2]:
        result = play(folder / str(number), [{"cut": KillAtEvent(number, order)}, {}], **options)
        assert_same(result, expected, f"killed at event {number}, {recorder.names[number - 1]}")


LENGTHENED: dict[str, dict[str, Any]] = {
    "plain": {"eval_steps": 2, "save_steps": 3},
    "async": {"eval_steps": 4, "save_steps": 3, "async_save": True},
    "CosineAnnealingLR": {**RECIPES["CosineAnnealingLR"], "eval_steps": 5},
    "ReduceLROnPlateau": {**RECIPES["ReduceLROnPlateau"], "save_steps": 2},
}


@pytest.mark.parametrize(
    ("name", "extent"), thinned(itertools.product(LENGTHENED, EXTENTS), [(name, "some") for name in LENGTHENED])
)
def test_lengthened_run_equals_the_long_run(name: str, extent: str, folder: Path) -> None:
    expected = play(folder / "straight", **LENGTHENED[name])
    for steps in range(1, 9) if extent == "all" else (4,):
        result = play(folder / str(steps), [{"max_steps": steps}, {}], **LENGTHENED[name])
        assert_same(result, expected, f"{steps} steps, then the rest")


CUTS: dict[str, Any] = {
    "intervals": st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4)),
    "epochs": st.sampled_from([1, 2, 2.5, 3]),
    "accumulation": st.integers(1, 3),
    "limit": st.sampled_from([None, 2]),
    "is_async": st.booleans(),
    "cuts": st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 12)), min_size=1, max_size=4),
}


def cut_and_compare(intervals: Any, epochs: Any, accumulation: int, limit: Any, is_async: bool, cuts: Any) -> None:
    options = {
        "eval_steps": intervals[0], "save_steps": intervals[1], "log_steps": intervals[2], "epochs": epochs,
        "gradient_accumulation_steps": accumulation, "save_total_limit": limit, "async_save": is_async,
    }  # fmt: skip
    with memory_folder() as folder:
        expected = play(folder / "straight", **options)
        parts = [{"cut": cut} for cut in sorted(cuts, key=lambda cut: cut[1])]
        assert_same(play(folder / "cut", [*parts, {}], **options), expected)


@settings(max_examples=2)
@given(**CUTS)
def test_several_cuts_resume_identically(**drawn: Any) -> None:
    cut_and_compare(**drawn)


@pytest.mark.slow
@settings(max_examples=60)
@given(**CUTS)
def test_several_cuts_resume_identically_60(**drawn: Any) -> None:
    cut_and_compare(**drawn)


@pytest.mark.processes
@pytest.mark.parametrize(("how", "window"), thinned([("stop", 2), ("kill", 5)], [("kill", 5)]))
def test_workers_change_nothing_before_or_after_resume(how: str, window: int, folder: Path) -> None:
    cut, expected = (how, window), play(folder / "straight", save_steps=2)
    for number, workers in enumerate(((2, 2), (2, 0), (0, 1))):
        parts = [{"num_workers": workers[0], "cut": cut}, {"num_workers": workers[1]}]
        assert_same(play(folder / str(number), parts, save_steps=2), expected)


def test_resumed_run_keeps_its_kind_of_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger datasets are shuffled without drawing the whole order; checkpoints of older versions do not say which."""
    drawn = play(folder / "drawn")
    train(build(folder / "before", callbacks=lambda: [Cut("stop", 2)]))
    (checkpoint,) = (path.parent for path in (folder / "before").glob(f"checkpoint-*/{MANIFEST}"))
    content = content_of(checkpoint)
    assert content.pop("order") == "drawn" and content["progress"].pop("batches_in_epoch") == 4
    seal(checkpoint, content)
    monkeypatch.setattr(sampling, "_DRAWN_WHOLE", 10)
    resumed = train(build(folder / "before"), resume_from="auto")
    assert_same(outcome(resumed)["tensors"], drawn["tensors"])
    keyed = play(folder / "keyed")
    assert sorted(keyed["stream"]) == sorted(drawn["stream"]) and keyed["stream"] != drawn["stream"]
    parts = [{"cut": ("stop", 2)}, {"cut": ("kill", 5), "save_steps": 1}, {}]
    assert_same(play(folder / "parts", parts)["tensors"], keyed["tensors"])


PATIENT: dict[str, Any] = {"epochs": 9, "eval_steps": 1, "save_steps": 1, "patience": 2}


def test_patience_ends_resumed_runs_at_the_same_step(folder: Path) -> None:
    expected = play(folder / "straight", **PATIENT)
    last = expected["position"]["step"]
    assert expected["metrics"]["stop_reason"] == "early_stopping" and 3 < last < 27
    for step in (2, last - 1):
        assert_same(play(folder / str(step), [{"cut": ("kill", step)}, {}], **PATIENT), expected)


def test_run_ended_by_patience_resumes_only_with_more(folder: Path) -> None:
    expected = play(folder / "run", **PATIENT)
    again = play(folder / "run", **PATIENT)
    assert again["position"] == expected["position"] and again["metrics"] == expected["metrics"]
    longer = play(folder / "run", **{**PATIENT, "patience": 4})
    assert longer["position"]["step"] > expected["position"]["step"]


@pytest.mark.parametrize(
    "options", [{}, {"max_steps": 7, "eval_steps": 5, "save_steps": 3, "epochs": None}], ids=["epochs", "steps"]
)
def test_resuming_finished_run_trains_nothing(options: Any, folder: Path) -> None:
    expected = play(folder / "once", **options)
    assert_same(play(folder / "twice", [{}, {}], **options), expected)


def test_trainer_resumes_its_own_stopped_run(folder: Path) -> None:
    """With an optimizer and a schedule of the user."""

    def make(run: str) -> Trainer:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        return build(
            folder / run,
            model=lambda: model,
            **given_optimizer(optimizer),
            lr_scheduler=lambda optimizer: schedules.ExponentialLR(optimizer, 0.8),
        )

    expected = outcome(train(make("straight")))
    trainer = make("cut")
    trainer.lifecycle.register([*trainer.lifecycle.callbacks, Cut("stop", 4)])
    train(trainer)
    assert_same(outcome(train(trainer, resume_from="auto")), expected)
    assert trainer.progress.step == 9


def test_fused_and_unfused_optimizers_resume_each_other(folder: Path) -> None:
    def adamw(fused: bool) -> Any:
        return given_optimizer(lambda parameters: torch.optim.AdamW(parameters, 0.05, fused=fused))

    expected = play(folder / "straight", **adamw(True))
    for fused in (True, False):
        run = folder / str(fused)
        play(run, [{"cut": ("stop", 4)}], **adamw(fused))
        trainer = train(build(run, **adamw(not fused)), resume_from="auto")
        assert trainer.optimizer.param_groups[0]["fused"] is not fused
        for name, tensor in trainer.model.state_dict().items():
            torch.testing.assert_close(tensor, expected["tensors"][f"model/{name}"])


def test_moments_of_another_dtype_resume_identically(folder: Path) -> None:
    class Momentum(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    entry = self.state[parameter]
                    wide = entry.setdefault("wide", torch.zeros(parameter.shape, dtype=torch.float64))
                    wide.mul_(0.9).add_(parameter.grad)
                    entry["count"] = entry.get("count", torch.zeros(1).short()) + 1
            return super().step(closure)

    options = {"optimizer": Momentum, "model": lambda: Net(torch.float32), "dataset": single_precision}
    expected = play(folder / "straight", **options)
    result = play(folder / "cut", [{"cut": ("stop", 4)}, {}], **options)
    assert_same(result, expected)
    assert result["tensors"]["optimizer/0/wide"].dtype is torch.float64


# --- folders


def test_run_resumes_in_another_save_dir(folder: Path) -> None:
    """It finds its best checkpoint in the first folder, and adds nothing there."""
    options = {"eval_steps": 1, "save_steps": 1}
    expected = play(folder / "straight", **options)
    best = expected["metrics"]["best_step"]
    assert 2 < best < 9
    play(folder / "first", [{"cut": ("stop", best + 1)}], **options)
    result = outcome(
        train(build(folder / "second", **options), resume_from=folder / "first" / f"checkpoint-{best + 1}")
    )
    for key in ("tensors", "metrics", "objective", "position", "last"):
        assert_same(result[key], expected[key], key)
    assert result["journal"] == [row for row in expected["journal"] if row["step"] > best + 1]
    assert not (folder / "first" / "checkpoint-9").exists()


def test_moved_run_resumes_from_another_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"eval_steps": 1, "save_steps": 1, "save_total_limit": 2}
    expected = play(folder / "straight", **options)
    for name in ("before", "after"):
        (folder / name).mkdir()
    monkeypatch.chdir(folder / "before")
    play(Path("run"), [{"cut": ("kill", 5)}], **options)
    shutil.move("run", folder / "elsewhere")
    monkeypatch.chdir(folder / "after")
    assert_same(comparable(play(Path("../elsewhere"), **options)), comparable(expected))


def test_folder_with_checkpoints_is_rejected_unchanged(folder: Path) -> None:
    play(folder / "run", save_steps=2)
    before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    trainer = build(folder / "run", save_steps=2)
    with pytest.raises(ConfigError, match=r"already holds checkpoints.*checkpoint-9.*resume_from.*overwrite"):
        trainer.train()
    assert trainer.progress.step == 0
    assert {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("is_async", [False, True])
def test_overwrite_replaces_the_run_at_the_first_save(folder: Path, is_async: bool) -> None:
    run = folder / "run"
    play(run, save_steps=1)
    present: list[list[str]] = []

    def look(event: str) -> Callback:
        return on(event, always, lambda trainer: present.append(names(run)))

    options = {"save_steps": 4, "async_save": is_async, "seed": 1, "keep_best": 0, "overwrite": True}
    train(build(run, **options, callbacks=lambda: [look("train_start"), look("save_end")]))
    assert len(present[0]) == 9 and present[1] == numbered(4) and present[-1] == numbered(4, 8, 9)
    assert {row["step"] for row in journal(run)} <= set(range(10))


def test_overwrite_killed_before_a_save_leaves_the_run(folder: Path) -> None:
    expected = play(folder / "run", save_steps=2)
    train(build(folder / "run", save_steps=2, overwrite=True, callbacks=lambda: [Cut("kill", 1)]))
    resolved = Store(folder / "run").resolve("auto")
    assert resolved is not None and resolved[0].name == "checkpoint-9"
    assert differences(resolved[1]["objective"], expected["objective"]) == []


# --- best and retention


class Scripted(Algorithm):
    """Gives the evaluation after step n the n-th score."""

    def __init__(self, scores: list[float]) -> None:
        self.scores = scores

    def transform_metrics(self, trainer: Any, metrics: dict[str, float]) -> dict[str, float]:
        return {**metrics, "eval_score": self.scores[trainer.progress.step - 1]}


SCORES = [3.0, 9.0, 1.0, 2.0, 8.0, 4.0]


def scored(scores: list[float] = SCORES, **options: Any) -> dict[str, Any]:
    return {
        "algorithms": lambda: [Scripted(scores)],
        "compute_metrics": lambda y_true, y_pred: {"score": 0.0},
        "optimization_metric": "score",
        "eval_steps": 1,
        "save_steps": 1,
        "epochs": 2,
        **options,
    }


def scores_of(run: Path) -> dict[int, float | None]:
    return {entry.step: entry.score for entry in sorted(Store(run).kept(), key=lambda entry: entry.step)}


@pytest.mark.parametrize(
    ("limit", "is_async"), thinned(itertools.product([1, 2, 3, 4], [False, True]), [(1, False), (2, True), (4, False)])
)
def test_newest_and_best_exist_after_every_save(limit: int, is_async: bool, folder: Path) -> None:
    run, steps = folder / "run", []

    def look(trainer: Any) -> None:
        step = int(trainer.lifecycle.saved_path.name.removeprefix("checkpoint-"))
        best = max(range(1, step + 1), key=lambda n: SCORES[n - 1])
        for which, expected in (("last", step), ("best", best)):
            path, _ = trainer.store.resolve(which)
            assert path.name == f"checkpoint-{expected}"
        newest = range(max(1, step - limit + 1), step + 1)
        assert names(run) == numbered(*sorted({*newest, best}))
        steps.append(step)

    options = scored(save_total_limit=limit, async_save=is_async, callbacks=lambda: [on("save_end", always, look)])
    trainer = train(build(run, **options))
    assert steps[-1] == 6 and len(steps) >= 6
    assert trainer.metrics["best_step"] == 2 and trainer.metrics["best_checkpoint"] == "checkpoint-2"


@pytest.mark.parametrize(("option", "steps"), [({"keep_best": 3}, (2, 5, 6)), ({"keep_every": 3}, (2, 3, 6))])
def test_keep_best_and_keep_every(option: Any, steps: Any, folder: Path) -> None:
    play(folder / "run", **scored(save_total_limit=1, **option))
    assert names(folder / "run") == numbered(*steps)


@pytest.mark.parametrize("is_async", [False, True])
def test_score_belongs_to_one_checkpoint(is_async: bool, folder: Path) -> None:
    """So that `keep_best=3` keeps the checkpoints of three evaluations."""
    options = scored(SCORES * 2, eval_steps=3, epochs=4, async_save=is_async)
    play(folder / "all", **options)
    assert scores_of(folder / "all") == dict.fromkeys(range(1, 13)) | {3: 1.0, 6: 4.0, 9: 1.0, 12: 4.0}
    play(folder / "few", **options, save_total_limit=1, keep_best=3)
    assert names(folder / "few") == numbered(3, 6, 12)


@pytest.mark.parametrize(
    ("interval", "kills"), thinned([(3, "all"), (1, "all"), (3, "some"), (1, "some")], [(3, "some"), (1, "some")])
)
def test_score_goes_to_first_checkpoint_after_evaluation(interval: int, kills: str, folder: Path) -> None:
    """In a resumed run, too, and if a callback requests another save."""
    expected = {3: None, 6: 2.0, 9: 9.0, 12: 4.0}
    if interval == 1:
        expected = dict.fromkeys(range(1, 13)) | {4: 2.0, 8: 9.0, 12: 4.0}
    request = on("epoch_end", lambda trainer: trainer.progress.step in expected, lambda trainer: trainer.request_save())
    options = scored(SCORES * 2, eval_steps=4, save_steps=interval, epochs=4, callbacks=lambda: [request], keep_best=0)
    play(folder / "straight", **options)
    assert scores_of(folder / "straight") == expected
    for step in range(1, 12) if kills == "all" else (5,):
        play(folder / str(step), [{"cut": ("kill", step)}, {}], **options)
        assert scores_of(folder / str(step)) == expected, f"killed after step {step}"


def test_score_of_closing_evaluation_stays_with_its_checkpoint(folder: Path) -> None:
    """The evaluation that closed the shorter run."""
    options = scored(SCORES * 2, eval_steps=4, epochs=4)
    play(folder / "run", [{"max_steps": 6}, {}], **options)
    assert scores_of(folder / "run") == dict.fromkeys(range(1, 13)) | {4: 2.0, 6: 4.0, 8: 9.0, 12: 4.0}


def test_score_of_failed_checkpoint_goes_to_the_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "save_tensors", failing_save(lambda path: "checkpoint-3" in str(path)))
    play(folder / "run", **scored(eval_steps=3, max_steps=5, epochs=None))
    assert scores_of(folder / "run") == {1: None, 2: None, 4: 1.0, 5: 8.0}


@pytest.mark.parametrize(
    ("end", "step"),
    [
        ({"max_steps": 4}, 2), ({"patience": 2}, 2), ({"cut": ("stop", 4)}, 2), ({"cut": ("signal", 5)}, 5),
        ({"load_best_at_end": False}, 6),
    ],
    ids=["max_steps", "patience", "stop", "signal", "not wanted"],
)  # fmt: skip
def test_best_weights_are_loaded_at_the_end(end: Any, step: int, folder: Path, caplog: Any) -> None:
    """Except after a signal, or if that is not wanted, which is logged."""
    caplog.set_level(logging.INFO, "omnitrain")
    run = folder / "run"
    cut = {"callbacks": lambda: [Cut(*end["cut"])]} if "cut" in end else end
    trainer = train(build(run, **scored(**cut)))
    assert_same(dict(trainer.model.state_dict()), weights_of(run / f"checkpoint-{step}"))
    assert ("keeps its last weights" in caplog.text) == (step != 2)
    assert best_of(run) == "checkpoint-2"


@pytest.mark.parametrize("damage", ["flip", "truncate", "manifest"])
def test_damaged_best_is_reported_and_last_weights_stay(damage: str, folder: Path, caplog: Any) -> None:
    name = MANIFEST if damage == "manifest" else state.WEIGHTS

    def spoil(trainer: Any) -> None:
        path = trainer.store.path(2) / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data[:-1] if damage == "truncate" else data)

    trainer = train(build(folder / "run", **scored(), callbacks=lambda: [on("step_start", at_step(5), spoil)]))
    assert trainer.metrics["stop_reason"] == "epochs" and trainer.metrics["best_checkpoint"] == "checkpoint-2"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "checkpoint-2" in warnings[0] and repr(name) in warnings[0]
    assert_same(dict(trainer.model.state_dict()), weights_of(folder / "run" / "checkpoint-6"))


@pytest.mark.parametrize("options", [{}, {"eval_steps": 2, "save_steps": 1}, {"max_steps": 7, "eval_steps": 3}])
def test_evaluating_loaded_best_gives_the_stored_best(options: Any, folder: Path) -> None:
    trainer = train(build(folder / "run", **options))
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == trainer.metrics["best_valid"]["eval_loss"]
    fresh = build(None)
    state.load_weights(fresh.model, weights_of(folder / "run" / trainer.metrics["best_checkpoint"]), "there")
    assert fresh.evaluate() == metrics


def test_best_by_closing_evaluation_gets_existing_checkpoint(folder: Path) -> None:
    """The checkpoint of step 4 is saved before anybody knows that it is the best."""
    options = scored([1.0, 2.0, 3.0, 4.0], eval_steps=3, save_steps=2, max_steps=4)
    trainer = train(build(folder / "run", **options))
    assert trainer.metrics["best_step"] == 4 and trainer.metrics["best_checkpoint"] == "checkpoint-4"
    assert best_of(folder / "run") == "checkpoint-4"


def test_longer_run_selects_from_its_own_evaluations(folder: Path) -> None:
    """The evaluation after step 4 closed the shorter run; the longer one has none there."""
    options = scored([0.0, 0.0, 5.0, 9.0, 0.0, 1.0], eval_steps=3)
    expected = play(folder / "straight", **options)
    result = play(folder / "run", [{"max_steps": 4}, {}], **options)
    assert result["metrics"]["best_checkpoint"] == "checkpoint-3"
    assert_same(result, expected)


def test_best_deleted_by_shorter_run_is_replaced(folder: Path) -> None:
    """By the checkpoint that the pointer "best" names."""
    options = scored([0.0, 0.0, 5.0, 9.0, 0.0, 1.0], eval_steps=3, save_total_limit=1)
    result = play(folder / "run", [{"max_steps": 4}, {}], **options)
    assert names(folder / "run") == numbered(4, 6)
    assert_same(model_of(result), weights_of(folder / "run" / "checkpoint-4"))


def test_resuming_from_best_equals_the_first_time(folder: Path) -> None:
    run, options = folder / "run", scored([1.0, 9.0, 2.0, 3.0, 4.0, 5.0], save_steps=2)
    expected = comparable(play(run, **options))
    assert_same(outcome(train(build(run, **options), resume_from="best")), expected)
    assert names(run) == numbered(2, 4, 6)
    train(build(run, **options, callbacks=lambda: [Cut("stop", 3)]), resume_from="best")
    assert_same(comparable(play(run, **options)), expected, "3 was saved last, not 6")


# --- settings that have changed


class Doubled(Algorithm):
    def transform_loss(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        return 2 * loss


class Wider(Net):
    pass


CHANGES: dict[str, dict[str, Any]] = {
    "model": {"model": Wider},
    "optimizer": {"optimizer": torch.optim.SGD},
    "learning_rate": {"learning_rate": 0.01},
    "weight_decay": {"weight_decay": 0.1},
    "optimizer_groups": given_optimizer(
        lambda parameters: torch.optim.AdamW(parameters, 0.05, (0.8, 0.99), weight_decay=0)
    ),
    "lr_scheduler": {"lr_scheduler": "linear"},
    "warmup_steps": {"warmup_steps": 2},
    "global_batch_size": {"batch_size": 8},
    "max_grad_norm": {"max_grad_norm": 0.5},
    "grad_reduction": {"grad_reduction": "sum"},
    "loss_fn": {"loss_fn": F.l1_loss},
    "unit": {"unit": lambda model: lambda batch: F.mse_loss(model(batch[0]), batch[1]), "loss_fn": None},
    "algorithms": {"algorithms": lambda: [Doubled()]},
    "optimization_metric": {"optimization_metric": "mae", "compute_metrics": lambda t, p: {"mae": abs(t - p).mean()}},
    "optimization_direction": {"optimization_direction": "max"},
    "autocast": {"autocast": "bf16"},
    "seed": {"seed": 1},
    "shuffle": {"shuffle": False},
    "samples_per_epoch": {"dataset": lambda: Numbered(24)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_setting_is_rejected(name: str, stopped: Path) -> None:
    """The error has both values, and nothing is restored."""
    trainer = build(stopped, **CHANGES[name])
    before = {key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"other settings.*\b{name}: .* -> .*allow_change=") as caught:
        trainer.train(resume_from="auto")
    reported = re.findall(r"(\w+): (?:(?!; |\. Set).)* -> ", str(caught.value).split("change the run: ")[1])
    assert {*reported} == {name} | ({"loss_fn"} if name == "unit" else set()), "and no other setting"
    assert_same(dict(trainer.model.state_dict()), before)
    assert trainer.progress.step == 0


EFFECTS: dict[str, Callable[[Trainer], object]] = {
    "weight_decay": lambda trainer: trainer.optimizer.param_groups[0]["weight_decay"] == 0.1,
    "optimizer_groups": lambda trainer: trainer.optimizer.param_groups[0]["betas"] == (0.8, 0.99),
    "optimizer": lambda trainer: isinstance(trainer.optimizer, torch.optim.SGD),
}
SAME_NUMBERS = ("autocast", "model", "optimization_direction", "optimization_metric", "unit", "warmup_steps")
"""As the run is in double precision, and past its warm-up."""


@pytest.mark.parametrize(
    "name",
    thinned(CHANGES, {*CHANGES} - {"learning_rate", "lr_scheduler", "warmup_steps", "optimization_metric"}),
)
def test_allowed_change_takes_effect(name: str, stopped: Path, straight: dict[str, Any]) -> None:
    trainer = build(stopped, **CHANGES[name], load_best_at_end=False)
    metrics = trainer.train(resume_from="auto", allow_change={name, "loss_fn"} if name == "unit" else {name})
    assert metrics["train_metrics_history"][-1]["epoch"] == 3
    weight = straight["tensors"]["model/head.weight"]
    assert torch.equal(trainer.model.head.weight, weight) == (name in SAME_NUMBERS)
    assert EFFECTS.get(name, bool)(trainer)


def lr(rate: float, steps: range, factor: Callable[[int], float] = lambda step: 1.0) -> list[float]:
    """Return the learning rates after these steps."""
    return [rate * factor(step) for step in steps]


def linear(length: int) -> Callable[[int], float]:
    return lambda step: (length - step) / length


def cosine(step: int) -> float:
    return (1 + math.cos(math.pi * step / 9)) / 2


def halving(step: int) -> float:
    return 0.5**step


def exponential(factor: float) -> Any:
    return lambda optimizer: schedules.ExponentialLR(optimizer, factor)


FIRST, REST = range(1, 5), range(5, 10)
RATES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None, list[float]]] = {
    "rate": ({}, {"learning_rate": 0.01}, "learning_rate", [*lr(0.05, FIRST), *lr(0.01, REST)]),
    "rate, custom schedule": (
        {"lr_scheduler": exponential(0.5)}, {"learning_rate": 0.01}, "learning_rate",
        [*lr(0.05, FIRST, halving), *lr(0.01, REST, halving)],
    ),
    "rate, linear": (
        {"lr_scheduler": "linear"}, {"learning_rate": 0.01}, "learning_rate",
        [*lr(0.05, FIRST, linear(9)), *lr(0.01, REST, linear(9))],
    ),
    "linear to cosine": (
        {"lr_scheduler": "linear"}, {"lr_scheduler": "cosine"}, "lr_scheduler",
        [*lr(0.05, FIRST, linear(9)), *lr(0.05, REST, cosine)],
    ),
    "none to linear": (
        {}, {"lr_scheduler": "linear"}, "lr_scheduler", [*lr(0.05, FIRST), *lr(0.05, REST, linear(9))],
    ),
    "linear to none": (
        {"lr_scheduler": "linear"}, {"lr_scheduler": None}, "lr_scheduler",
        [*lr(0.05, FIRST, linear(9)), *lr(0.05, REST)],
    ),
    "constant to custom": (
        {"lr_scheduler": "constant"}, {"lr_scheduler": exponential(0.5)}, "lr_scheduler",
        [*lr(0.05, FIRST), *lr(0.05, range(1, 6), halving)],
    ),
    "warm-up": (
        {"warmup_steps": 2}, {"warmup_steps": 8}, "warmup_steps",
        [0.025, 0.05, 0.05, 0.05, *lr(0.05, range(5, 9), lambda step: step / 8), 0.05],
    ),
    "longer": (
        {"lr_scheduler": "linear"}, {"epochs": 6}, None,
        [*lr(0.05, FIRST, linear(9)), *lr(0.05, range(5, 19), linear(18))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RATES)
def test_allowed_rate_or_schedule_takes_effect_at_once(case: str, folder: Path) -> None:
    options, change, name, expected = RATES[case]
    parts = [{"cut": ("stop", 4)}, {**change, "allow_change": {name} if name else set()}]
    result = play(folder / "run", parts, **options, eval_dataset=None)
    assert [rate for (rate,) in result["rates"]] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "expected"),
    [({"lr_scheduler": "cosine"}, 0.05 * cosine(4)), ({"epochs": 6}, 0.05 * 14 / 18)],
    ids=["cosine", "longer"],
)
def test_first_step_under_another_schedule_uses_its_rate(change: Any, expected: float, folder: Path) -> None:
    rates: list[float] = []
    record = on("before_optimizer_step", always, lambda trainer: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    parts = [{"cut": ("stop", 4)}, {**change, "allow_change": {"lr_scheduler"}}]
    play(folder / "run", parts, lr_scheduler="linear", callbacks=lambda: [record])
    assert rates[3:5] == pytest.approx([0.05 * 6 / 9, expected])


@pytest.mark.parametrize(
    ("make", "values", "message", "expected"),
    [
        (
            lambda value: lambda optimizer: schedules.CosineAnnealingLR(optimizer, 9, eta_min=value),
            (0.0, 0.04), r"'eta_min': 0.0\} -> .*'eta_min': 0.04", [*lr(0.05, FIRST, cosine), 0.04],
        ),
        (
            lambda value: lambda optimizer: schedules.StepLR(optimizer, value),
            (2, 3), r"'step_size': 2, .* -> .*'step_size': 3, ",
            [0.05, 0.005, 0.005, 0.0005, 0.0005, 5e-05, 5e-05, 5e-05, 5e-06],
        ),
        (
            lambda value: lambda optimizer: schedules.ChainedScheduler([schedules.ExponentialLR(optimizer, value)]),
            (0.5, 0.1), r"'gamma': 0.5.* -> .*'gamma': 0.1",
            [0.025, 0.0125, 0.00625, 0.003125, 0.005, 0.0005, 5e-05, 5e-06, 5e-07],
        ),
    ],
    ids=["CosineAnnealingLR", "StepLR", "ChainedScheduler"],
)  # fmt: skip
def test_custom_schedule_with_other_options_needs_permission(
    make: Any, values: Any, message: str, expected: list[float], folder: Path
) -> None:
    run, (first, second) = folder / "run", map(make, values)
    rates = play(run, [{"cut": ("stop", 4)}], lr_scheduler=first, eval_dataset=None)["rates"]
    trainer = build(run, lr_scheduler=second, eval_dataset=None)
    with pytest.raises(CheckpointError, match=rf"lr_scheduler_options: .*{message}"):
        trainer.train(resume_from="auto")
    parts = [{"allow_change": {"lr_scheduler_options"}}]
    rates += play(run, parts, lr_scheduler=second, eval_dataset=None)["rates"]
    assert len(rates) == 9
    assert [rate for (rate,) in [*rates[: len(expected) - 1], rates[-1]]] == pytest.approx(expected)


def test_longer_schedule_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    play(folder / "run", [{"cut": ("stop", 4)}, {"epochs": 6}], lr_scheduler="cosine")
    assert "18 steps" in caplog.text and "before: 9" in caplog.text


def test_allowed_change_of_seed_changes_the_dropout(folder: Path) -> None:
    """Neither the order nor the samples depend on the seed here."""
    options = {"shuffle": False, "dataset": lambda: Numbered(noisy=False), "load_best_at_end": False}
    straight = play(folder / "straight", **options)
    result = play(folder / "run", [{"cut": ("stop", 4)}, {"seed": 1, "allow_change": {"seed"}}], **options)
    assert not torch.equal(result["tensors"]["model/head.weight"], straight["tensors"]["model/head.weight"])


def test_allowed_change_of_objective_selects_again(folder: Path) -> None:
    play(folder / "run", [{"cut": ("stop", 7)}], eval_steps=1, save_steps=1)
    trainer = build(folder / "run", eval_steps=1, save_steps=1, **CHANGES["optimization_metric"])
    trainer.train(resume_from="auto", allow_change={"optimization_metric"})
    assert trainer.objective.metric == "mae" and trainer.metrics["best_step"] in (8, 9)
    assert "eval_mae" in trainer.metrics["best_valid"] and len(trainer.metrics["valid"]) == 9
    assert trainer.metrics["best_checkpoint"] == f"checkpoint-{trainer.metrics['best_step']}"


def test_allowed_change_of_algorithms_matches_states(folder: Path) -> None:
    """No algorithm gets the state of another one."""

    class Picky(Algorithm):
        def state_dict(self) -> dict[str, Any]:
            return {"picky": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state == {"picky": 1}

    class Other(Picky):
        def state_dict(self) -> dict[str, Any]:
            return {"other": 2}

    play(folder / "run", [{"cut": ("stop", 4)}], algorithms=lambda: [Other()])
    trainer = build(folder / "run", algorithms=lambda: [Picky(), Doubled()])
    trainer.train(resume_from="auto", allow_change={"algorithms"})


@pytest.mark.parametrize(
    "change",
    [
        {
            "epochs": 5, "patience": 50, "eval_steps": 4, "save_steps": 1, "log_steps": 5, "eval_batch_size": 3,
            "callbacks": lambda: [Requesting()], "keep_best": 3, "on_nonfinite": "skip", "delta": 0.1,
            "async_save": True,
        },
        {"epochs": None, "max_steps": 20},
    ],
    ids=["options", "length"],
)  # fmt: skip
def test_settings_that_do_not_alter_numbers_may_change(change: Any, stopped: Path) -> None:
    assert play(stopped, **change)["position"]["step"] in (15, 20)


class Plain(Net):
    """Without batch norm and dropout, which depend on the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8).double()


def test_same_global_batch_size_is_no_change(folder: Path) -> None:
    expected = play(folder / "straight", model=Plain)
    parts = [{"cut": ("stop", 4)}, {"batch_size": 8, "gradient_accumulation_steps": 1}]
    result = play(folder / "run", parts, model=Plain)
    assert sorted(result["stream"]) == sorted(expected["stream"])
    for name, tensor in result["tensors"].items():
        torch.testing.assert_close(tensor, expected["tensors"][name])


# --- errors


def unknown_parameter(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(7))], 0.1)


WITHOUT_FOLDER: list[tuple[Any, type[Exception], str]] = [
    (lambda: build(None).train(resume_from=True), ConfigError, r"`resume_from=True`: pass 'auto' .* or 'last'"),
    (lambda: build(None).train(resume_from="auto"), ConfigError, r"resume_from='auto'.*save_dir"),
    (lambda: build(None).save_checkpoint(), ConfigError, "save_dir"),
    (lambda: build(None, save_only_model=True), ConfigError, r"save_only_model=True.*save_dir"),
]
STOPPED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {"resume_from": True}, ConfigError, r"`resume_from=True`: pass 'auto' .* or 'last'"),
    ({}, {"allow_change": {"lerning_rate"}}, ConfigError, r"'lerning_rate'.*learning_rate"),
    ({"model": Plain}, {"allow_change": {"model"}}, CheckpointError, r"does not fit the model.*body\.0"),
    (
        {**given_optimizer(unknown_parameter), "overwrite": True}, {"resume_from": None}, CheckpointError,
        r"shapes \[\(7,\)\] that are not the model's",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), WITHOUT_FOLDER)
def test_checkpoints_need_a_folder(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(("options", "arguments", "error", "message"), STOPPED)
def test_errors_of_resuming_come_before_the_first_step(
    options: Any, arguments: Any, error: type[Exception], message: str, stopped: Path
) -> None:
    trainer = build(stopped, **options)
    with pytest.raises(error, match=message):
        trainer.train(**{"resume_from": "auto", **arguments})
    assert trainer.progress.step == 0 and names(stopped) == numbered(3, 4)


# --- files


def test_nothing_is_pickled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = play(folder / "straight", save_steps=2, lr_scheduler="cosine")

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("pickle was used")

    for module, functions in (
        (pickle, ("Unpickler", "Pickler", "loads", "dumps", "load", "dump")),
        (torch, ("load", "save")),
        (torch.serialization, ("load", "save")),
    ):
        for name in functions:
            monkeypatch.setattr(module, name, fail)
    result = play(folder / "run", [{"cut": ("stop", 4)}, {}], save_steps=2, lr_scheduler="cosine")
    assert_same(result, expected)
    files = [path for path in (folder / "run").rglob("*") if path.is_file()]
    assert len(files) > 12
    for path in files:
        assert path.suffix in (".safetensors", ".json", ".jsonl", ".yaml", "")
        assert not path.read_bytes().startswith((b"\x80", b"PK"))


def test_files_have_strict_json_and_no_absolute_paths(folder: Path) -> None:
    """NaN and Infinity, which the state of this schedule has, are not JSON."""

    def fail(constant: str) -> Any:
        raise AssertionError(f"{constant} in a JSON file")

    options = scheduled(lambda optimizer: schedules.ReduceLROnPlateau(optimizer), eval_steps=5, save_steps=1)
    play(folder / "run", [{"cut": ("stop", 6)}], **options)
    files = [path for path in (folder / "run").rglob("*") if path.is_file()]
    assert {".json", ".jsonl"} <= {path.suffix for path in files}
    for path in files:
        if path.suffix in (".json", ".jsonl", ""):
            assert str(folder) not in path.read_text(), path
        if path.suffix == ".json":
            json.loads(path.read_text(), parse_constant=fail)


def test_manifest_has_settings_time_and_versions(folder: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    trainer = train(build(folder / "run"))
    content = content_of(folder / "run" / "checkpoint-9")
    resolved = trainer.resolved_config()
    assert content["settings"] == {key: value for key, value in resolved.items() if key != "save_dir"}
    assert json.loads(json.dumps(resolved)) == resolved
    saved = datetime.fromisoformat(content["saved_at"])
    assert saved.utcoffset() == timedelta(0) and before <= saved <= datetime.now(UTC)
    assert content["versions"]["omnitrain"] == omnitrain.__version__
    assert content["versions"]["python"] == platform.python_version()
    assert content["versions"]["torch"] == metadata.version("torch")


OWN_FIELDS = ("format_version", "sha256", "step", "sequence", "score", "best", "files")
"""What the store itself adds to a manifest."""


def save_again(store: Store, step: int, target: int, without: tuple[str, ...] = (), **changes: Any) -> None:
    """Save the checkpoint of a step as that of another one, with other values in the manifest."""
    path, content = store.path(step), content_of(store.path(step))
    payload = {key: value for key, value in content.items() if key not in (*OWN_FIELDS, *without)}
    store.save(
        target,
        lambda folder: shutil.copytree(path, folder, dirs_exist_ok=True),
        payload | changes,
        score=content["score"],
    )


def test_checkpoint_of_older_version_resumes(folder: Path) -> None:
    """Without the fields that were added since."""
    run, options = folder / "run", {"save_steps": 2, "eval_steps": 2}
    expected = play(folder / "straight", **options)
    play(run, [{"cut": ("stop", 4)}], **options)
    save_again(Store(run), 4, 4, without=("saved_at", "scored"), versions={"torch": torch.__version__})
    assert_same(play(run, **options)["tensors"], expected["tensors"])
    assert scores_of(run) == scores_of(folder / "straight")


# --- asynchronous saves


class Collecting(Algorithm):
    """Has a list that grows while an earlier state of it is written."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        self.sizes.append(len(batch[0]))
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"sizes": self.sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sizes = state["sizes"]


def test_async_save_writes_the_state_of_its_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"save_steps": 3, "keep_best": 0, "algorithms": lambda: [Collecting()]}
    expected = play(folder / "straight", callbacks=lambda: [Requesting()], **options)
    may_write, save_tensors = threading.Event(), state.save_tensors

    def wait_and_save(*arguments: Any) -> None:
        assert may_write.wait(programs.LIMIT)
        save_tensors(*arguments)

    def release(trainer: Any) -> None:
        assert not trainer.store.checkpoints()
        may_write.set()

    monkeypatch.setattr(state, "save_tensors", wait_and_save)
    callbacks = [Requesting(), on("step_end", at_step(5), release)]
    train(build(folder / "run", async_save=True, callbacks=lambda: callbacks, **options))
    for step in (3, 6, 9):
        paths = [folder / run / f"checkpoint-{step}" for run in ("run", "straight")]
        assert_same(*map(weights_of, paths))
        result, straight = map(content_of, paths)
        for key in ("callbacks", "algorithms"):
            assert result[key] == straight[key], f"{key} of step {step}"
        assert result["progress"]["step"] == step
    assert expected["position"]["step"] == 9


def test_async_saves_do_not_overlap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, most, save_tensors = [0], [0], state.save_tensors

    def save_slowly(*arguments: Any) -> None:
        writing[0] += 1
        most[0] = max(most[0], writing[0])
        time.sleep(0.01)
        save_tensors(*arguments)
        writing[0] -= 1

    monkeypatch.setattr(state, "save_tensors", save_slowly)
    train(build(folder / "run", save_steps=1, async_save=True))
    assert most == [1] and len(names(folder / "run")) == 9
    assert not [thread for thread in threading.enumerate() if "omnitrain-save" in thread.name]


def test_async_save_error_is_logged_at_the_next_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_failed, set_exception, logged = threading.Event(), Future.set_exception, []

    def set_and_notify(future: Any, error: Any) -> None:
        set_exception(future, error)
        has_failed.set()

    class Listener(Callback):
        def on_step_start(self, trainer: Any) -> None:
            if trainer.progress.step == 3:
                assert has_failed.wait(programs.LIMIT)

        def on_step_end(self, trainer: Any) -> None:
            logged.append((trainer.progress.step, caplog.text.count("Cannot save")))

    monkeypatch.setattr(Future, "set_exception", set_and_notify)
    monkeypatch.setattr(state, "save_tensors", failing_save(lambda path: "checkpoint-3" in str(path)))
    options: dict[str, Any] = {"save_steps": 3, "async_save": True, "keep_best": 0}
    train(build(folder / "run", callbacks=lambda: [Listener()], **options))
    assert next(step for step, errors in logged if errors) in (4, 5) and logged[-1] == (9, 1)
    assert names(folder / "run") == numbered(6, 9)


@pytest.mark.parametrize("fails", [True, False])
def test_error_of_the_run_waits_for_the_async_save(
    fails: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint counts, and an error of the save is logged."""
    save_tensors = state.save_tensors

    def save(*arguments: Any) -> None:
        time.sleep(0.05)
        (failing_save(always) if fails else save_tensors)(*arguments)

    callbacks = [on("step_start", at_step(4), raise_error(ZeroDivisionError))]
    if fails:
        callbacks.append(on("save_end", always, raise_error(AssertionError)))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):  # noqa: PT012
        patch.setattr(state, "save_tensors", save)
        build(folder / "run", save_steps=4, async_save=True, keep_best=0, callbacks=lambda: callbacks).train()
    assert caplog.text.count("Cannot save") == fails and names(folder / "run") == ([] if fails else numbered(4))
    if not fails:
        resumed, straight = (play(folder / run, save_steps=4)["tensors"] for run in ("run", "straight"))
        assert_same(resumed, straight)


def test_failed_last_checkpoint_is_saved_at_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[Path] = []
    save = failing_save(lambda path: len(attempts) == 1)
    monkeypatch.setattr(state, "save_tensors", lambda tensors, path: (attempts.append(path), save(tensors, path)))
    train(build(folder / "run", save_steps=4, eval_steps=2, max_steps=4))
    assert names(folder / "run") == numbered(4) and caplog.text.count("Cannot save") == 1


# --- events and states


def test_save_end_comes_after_commit_and_before_pruning(folder: Path) -> None:
    """Callbacks of a late order see the pruned folder."""
    counts: dict[int, list[int]] = {29: [], 90: []}

    def count(order: int) -> Callback:
        def act(trainer: Any) -> None:
            Store(trainer.save_dir).verify(trainer.lifecycle.saved_path)
            counts[order].append(len(trainer.store.checkpoints()))

        callback = on("save_end", always, act)
        callback.order = order
        return callback

    options: dict[str, Any] = {"save_steps": 3, "eval_dataset": None, "save_total_limit": 1}
    train(build(folder / "run", callbacks=lambda: [count(90), count(29)], **options))
    assert counts == {29: [1, 2, 2, 1], 90: [1, 1, 1, 1]}


def test_states_are_restored_to_their_owners(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Counter(Callback):
        def __init__(self, name: str) -> None:
            self.name, self.count = name, 0

        def on_step_end(self, trainer: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"name": self.name, "count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state["name"] == self.name
            self.count = state["count"]

    callbacks, algorithms = [], []
    for cut in ([Cut("stop", 4)], []):
        callbacks = [Counter("a"), Counter("b")]
        algorithms = [Collecting()]
        options = {"callbacks": lambda: [*callbacks, *cut], "algorithms": lambda: algorithms}  # noqa: B023
        train(build(folder / "run", **options), resume_from="auto")
    assert [callback.count for callback in callbacks] == [9, 9] and len(algorithms[0].sizes) == 18
    train(build(folder / "run", algorithms=lambda: [Collecting()], epochs=4), resume_from="auto")
    assert "the state of a callback" in caplog.text and "Counter" in caplog.text


def test_seeking_does_not_read_earlier_samples(folder: Path) -> None:
    class Reads:
        count = 0

        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            Reads.count += 1
            return torch.zeros(4), torch.zeros(1)

    def make(steps: int) -> Trainer:
        return Trainer(
            nn.Linear(4, 1), Reads(), loss_fn=F.mse_loss, batch_size=4, max_steps=steps, epochs=None, device="cpu",
            save_dir=folder / "run", progress_bar=False,
        )  # fmt: skip

    make(2).train()
    store = Store(folder / "run")
    progress = content_of(store.path(2))["progress"]  # is all that says how far a run has come
    save_again(
        store, 2, 200_000, progress={**progress, "step": 200_000, "samples": 800_000, "samples_in_epoch": 800_000}
    )
    Reads.count = 0
    trainer = make(200_003)
    order = trainer.train_loader.sampler.order(0)
    trainer.train(resume_from="auto")
    fingerprint = 4 * 32  # a few dozen samples, each twice, for the comparison and for what comes
    assert trainer.progress.samples_in_epoch == 800_012 and Reads.count == 12 + fingerprint
    assert len(order) == 1_000_000


# --- signals


def test_evaluation_cut_by_signal_is_repeated(folder: Path) -> None:
    run, options = folder / "run", {"eval_steps": 2, "save_steps": 4, "patience": 9}
    expected = play(folder / "straight", **options)
    play(run, [{"cut": on("eval_start", at_step(4), send(signal.SIGTERM))}], **options)
    assert [row["step"] for row in journal(run) if row["kind"] == "eval"] == [2]
    assert_same(comparable(play(run, **options)), comparable(expected))


def test_evaluation_cut_twice_can_be_the_best(folder: Path) -> None:
    options = scored([1.0, 2.0, 9.0, 4.0, 5.0, 6.0])
    expected = play(folder / "straight", **options)
    again = on("train_start", always, send(signal.SIGTERM))
    result = play(folder / "run", [{"cut": ("signal", 3)}, {"cut": again}, {}], **options)
    assert_same(result, expected)


@pytest.mark.parametrize("event", ["train_start", "eval_start", "eval_end"])
def test_signal_before_first_step_saves(event: str, folder: Path) -> None:
    options = {"eval_on_start": True, "patience": 2, "eval_steps": 1}
    expected = play(folder / "straight", **options)
    early = on(event, at_step(0), send(signal.SIGTERM))
    assert_same(play(folder / "run", [{"cut": early}, {}], **options), expected)


def test_signal_while_limits_are_checked_is_not_lost() -> None:
    trainer = build(None)
    reached, steps = trainer.limits.reached, []

    def interrupted(progress: Any) -> str:
        result = reached(progress)
        steps.append(progress.step)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    trainer.limits.reached = interrupted  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        trainer.train()
    assert trainer.progress.step == 2 and trainer.stop_reason == "signal"


def test_sigusr1_saves_and_the_run_continues(folder: Path) -> None:
    request = on("step_start", at_step(4), send(signal.SIGUSR1))
    trainer = train(build(folder / "run", save_steps=8, keep_best=0, callbacks=lambda: [request]))
    assert names(folder / "run") == numbered(5, 8, 9)
    assert trainer.metrics["stop_reason"] == "epochs"


def test_small_disk_is_reported_before_first_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    texts: list[str] = []
    look = on("step_start", always, lambda trainer: texts.append(caplog.text))
    train(build(folder / "run", callbacks=lambda: [look]))
    assert "GB free" in texts[0]


# --- models


@pytest.mark.parametrize(
    ("first", "second"), thinned([(False, True), (True, False), (True, True)], [(False, True), (True, False)])
)
def test_compiled_and_plain_models_resume_each_other(first: bool, second: bool, folder: Path) -> None:
    def model(compiled: bool) -> Any:
        return lambda: torch.compile(Net(), backend="eager") if compiled else Net()

    expected = play(folder / "straight", save_steps=2)
    parts = [{"model": model(first), "cut": ("stop", 4)}, {"model": model(second)}]
    assert_same(play(folder / "run", parts, save_steps=2), expected)
    assert sorted(weights_of(folder / "run" / "checkpoint-4")) == sorted(Net().state_dict())


class Language(Tagger):
    """Has tied weights, a buffer that is a view of another, one that is not persistent, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__(classes=11)
        self.out.weight = self.embed.weight
        self.register_buffer("table", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("head_of_table", self.table[:3])
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        if self.training:
            self.table += 1
            self.scratch += 1
        return super().forward(ids, labels)


class NoStream(Stream):
    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        return batch


def test_shared_tensors_are_saved_once_and_stay_tied(folder: Path) -> None:
    def make(run: str, *callbacks: Callback) -> Trainer:
        return Trainer(
            Language(), Sentences(), save_dir=folder / run, device="cpu", progress_bar=False, batch_size=2, epochs=2,
            learning_rate=0.05, save_steps=3, log_steps=2, algorithms=[NoStream()], callbacks=[*callbacks],
        )  # fmt: skip

    expected = outcome(train(make("straight")))
    train(make("run", Cut("kill", 5)))
    trainer = train(make("run"), resume_from="auto")
    assert_same(outcome(trainer), expected)
    model = trainer.model
    assert model.out.weight is model.embed.weight
    assert model.head_of_table.data_ptr() == model.table.data_ptr() and float(model.table[0]) == 8
    saved = weights_of(folder / "run" / "checkpoint-8")
    assert "scratch" not in saved and "frozen" in saved
    assert len({"embed.weight", "out.weight"} & set(saved)) == 1


class Aging(Net):
    """Counts its forward passes outside of any tensor."""

    age = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.age += self.training
        return super().forward(x) * (1 + self.age / 100)

    def get_extra_state(self) -> Any:
        return {"age": self.age}

    def set_extra_state(self, state: Any) -> None:
        self.age = state["age"]


def test_extra_state_of_module_resumes(folder: Path) -> None:
    expected = play(folder / "straight", model=Aging, save_steps=2)
    assert_same(play(folder / "run", [{"cut": ("kill", 5)}, {}], model=Aging, save_steps=2), expected)
    trainer = build(folder / "run", model=Aging)
    trainer.load_checkpoint("last")
    assert trainer.model.age == 18


def test_transformers_model_opens_with_from_pretrained(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    data = [{"input_ids": sample["ids"], "labels": sample["ids"]} for sample in (Sentences()[i] for i in range(8))]
    Trainer(
        model, data, save_dir=folder / "run", max_steps=2, epochs=None, device="cpu", progress_bar=False, batch_size=2
    ).train()
    path = folder / "run" / "checkpoint-2"
    opened = transformers.GPT2LMHeadModel.from_pretrained(path)
    assert_same(dict(opened.state_dict()), dict(model.state_dict()))
    assert {"config.json", "generation_config.json"} <= content_of(path)["files"].keys()
    weights = weights_of(path)
    assert "lm_head.weight" not in weights and "transformer.wte.weight" in weights


# --- public calls


def test_save_checkpoint_of_callback_resumes(folder: Path) -> None:
    """At STEP_END the evaluation of this step is still to come."""

    def save_and_end(trainer: Any) -> None:
        trainer.save_checkpoint()
        raise Killed

    run, options = folder / "run", {"eval_steps": 2, "save_steps": 5}
    expected = play(folder / "straight", **options)
    play(run, [{"cut": on("step_end", at_step(4), save_and_end)}], **options)
    result = play(run, **options)
    for key in ("valid", "best_valid", "train_metrics_history"):
        assert_same(result["metrics"][key], expected["metrics"][key])
    assert_same(result["last"], expected["last"])


def test_load_checkpoint_restores_the_trainer(folder: Path) -> None:
    def facts(trainer: Trainer) -> dict[str, Any]:
        return {key: value for key, value in outcome(trainer).items() if key not in ("journal", "callbacks")}

    options = {"save_steps": 2, "eval_steps": 3, "lr_scheduler": "linear"}
    expected = facts(train(build(folder / "run", load_best_at_end=False, **options)))
    other = build(folder / "run", **options)
    disturb_generators()
    assert other.load_checkpoint("last").name == "checkpoint-9"
    result = facts(other)
    result["metrics"]["stop_reason"], result["generator"] = "epochs", [torch.get_rng_state()]
    assert_same(result, expected)
    with pytest.raises(CheckpointError, match="does not exist"):
        other.load_checkpoint(folder / "nowhere")


def test_pending_evaluation_without_dataset_is_left_out(folder: Path) -> None:
    play(folder / "run", [{"cut": ("signal", 3)}])
    assert play(folder / "run", eval_dataset=None)["position"]["step"] == 9


# --- save_only_model


@pytest.mark.parametrize("is_async", [False, True])
def test_save_only_model_writes_the_same_weights(is_async: bool, folder: Path) -> None:
    options = scored(save_steps=2, save_total_limit=1, async_save=is_async)
    full, light = folder / "full", folder / "light"
    expected = dict(train(build(full, **options)).model.state_dict())
    assert_same(dict(train(build(light, **options, save_only_model=True)).model.state_dict()), expected)
    assert names(light) == names(full)
    for path in Store(light).checkpoints():
        files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        assert files == [HISTORY, state.WEIGHTS, MANIFEST]
        assert_same(weights_of(path), weights_of(full / path.name))
        assert Store(light).verify(path)["metrics"]


def test_save_only_model_checkpoints_cannot_resume(folder: Path) -> None:
    def times() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in (folder / "run").rglob("*")}

    train(build(folder / "run", **scored(), save_only_model=True))
    before = times()
    trainer = build(folder / "run", **scored())
    for which in ("auto", "last", "best", "checkpoint-6"):
        for call in (trainer.train, trainer.load_checkpoint):
            with pytest.raises(CheckpointError, match=r"save_only_model=True: it holds weights, and nothing else"):
                call(which)
    assert trainer.progress.step == 0
    assert times() == before


# --- streams


@pytest.mark.parametrize("cut", thinned([1, 3, 4, 8], [3, 4]))
def test_seekable_stream_is_not_read_again(cut: int, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """3 steps of 8, 8 and 6 samples an epoch, 3 epochs: an epoch's end is after steps 3 and 6."""
    options = {"dataset": Seekable, "load_best_at_end": False}
    straight = play(folder / "straight", **options)
    play(folder / "run", [{"cut": ("stop", cut)}], **options)
    resumed = build(folder / "run", **options)
    caplog.clear()
    train(resumed, resume_from="auto")
    assert "again" not in caplog.text
    assert resumed.train_dataset.read == 3 * 22 - (cut // 3 * 22 + cut % 3 * 8)
    assert_same(dict(resumed.model.state_dict()), model_of(straight))


class Opaque(Seekable):
    """A stream whose state is not JSON."""

    def state_dict(self) -> dict[str, Any]:
        return {"what": object()}


def test_stream_with_unsavable_state_is_read_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    play(folder / "run", [{"cut": ("stop", 2)}], dataset=Opaque, load_best_at_end=False)
    assert "will read the epoch again" in caplog.text
    resumed = train(build(folder / "run", dataset=Opaque, load_best_at_end=False), resume_from="auto")
    assert (resumed.progress.step, resumed.train_dataset.read) == (9, 66)


class Trusting(IterableDataset[Any]):
    """A stream that accepts any state."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"place": 0, "share": 0.0, "file": "a", "deep": {"shard": 0}}

    def __iter__(self) -> Iterator[Any]:
        while self.state["place"] < 22:
            self.state["place"] += 1
            yield Numbered()[self.state["place"] - 1]
        self.state["place"] = 0

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = {**state, "deep": {"shard": state["deep"]["shard"]}}


TRUSTING: dict[str, Any] = {"dataset": Trusting, "load_best_at_end": False, "save_steps": 2}


@pytest.fixture(scope="module")
def streamed_run() -> Iterator[Path]:
    with memory_folder() as path:
        play(path / "run", [{"cut": ("stop", 4)}], **TRUSTING)
        yield path / "run"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("place", "x"), ("place", {"__float__": "nan"}), ("place", True), ("share", {"__float__": "inf"}),
        ("file", 3), ("deep", {}), ("deep", 3), ("deep", {"shard": []}),
    ],
)  # fmt: skip
def test_impossible_stream_state_is_rejected(
    key: str, value: Any, streamed_run: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before anything is restored; "auto" resumes from the checkpoint before."""
    run = copied(streamed_run, folder / "run")
    newest = max(run.glob("checkpoint-*"))
    content = content_of(newest)
    content["stream"]["state"][key] = value
    seal(newest, content)
    resumed = build(run, **TRUSTING)
    before = copy.deepcopy(resumed.model.state_dict())
    field = "shard" if value == {} else key
    with pytest.raises(CheckpointError, match=rf"{newest.name}.*omnitrain.json.*{field}"):
        resumed.train(resume_from=newest)
    assert_same(dict(resumed.model.state_dict()), dict(before))
    assert resumed.train_dataset.state == Trusting().state
    train(resumed, resume_from="auto")
    assert resumed.progress.step == 9
    assert "Passed over" in caplog.text
