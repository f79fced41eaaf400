"""Stopped anywhere and resumed, a run ends as if it had not been; and what a checkpoint folder promises besides."""

from __future__ import annotations

import contextlib
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
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from forging import content_of, seal
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
    build,
    differences,
    disturb_generators,
    journal,
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
from omnitrain.checkpoint.manifest import encode
from omnitrain.checkpoint.store import MANIFEST, Store
from omnitrain.data import sampling


@contextlib.contextmanager
def memory() -> Iterator[Path]:
    """Return a folder in memory, where there is such a place: many checkpoints are synced to it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory() as path:
        yield path


# --- stopped anywhere


class Overflowing(Net):
    """Gives gradients of infinity in chosen batches; it counts them in a buffer, as the data would."""

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
    """A stream of 22 samples that does not say so."""

    def __iter__(self) -> Iterator[Any]:
        return iter([Numbered()[i] for i in range(22)])


class Seekable(IterableDataset[Any]):
    """A stream that draws its order from a generator of its own, and can be put back; it counts what is read."""

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


class Moody(Callback):
    """Keeps a history of its own, asks for saves after some evaluations, and for evaluations after some steps."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_end(self, trainer: Any) -> None:
        self.seen.append(trainer.progress.step)
        if trainer.progress.step == 5:
            trainer.request_evaluate()

    def on_eval_end(self, trainer: Any, metrics: Any) -> None:
        if trainer.progress.step % 4 == 0:
            trainer.request_save()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = list(parameters)
    return torch.optim.AdamW([{"params": others, "weight_decay": 0.1}, {"params": [first], "lr": 0.1}], lr=0.05)


def given_optimizer(make: Any) -> dict[str, Any]:
    return {"optimizer": make, "learning_rate": 2e-5}


def scheduled(make: Any, **options: Any) -> dict[str, Any]:
    return {"lr_scheduler": make, "save_steps": 2, **options}


RECIPES: dict[str, dict[str, Any]] = {
    "intervals of epochs": {},
    "evaluations and saves that coincide with nothing": {"eval_steps": 2, "save_steps": 3, "log_steps": 3},
    "a save at every step and one kept": {"eval_steps": 3, "save_steps": 1, "log_steps": 1, "save_total_limit": 1},
    "saves between the evaluations": {"eval_steps": 4, "save_steps": 5, "log_steps": 1},
    "intervals of samples": {
        "epochs": None, "max_duration": "50sp", "save_steps": "20sp", "eval_steps": "0.5ep", "log_steps": "10sp",
    },
    "an end inside an epoch": {"epochs": None, "max_steps": 8, "save_steps": 3, "eval_steps": 5},
    "an end in steps at an epoch's end": {"epochs": None, "max_steps": 6, "save_steps": 3, "eval_steps": 4},
    "an evaluation before the first step": {"eval_on_start": True, "save_steps": 2, "patience": 9},
    "no evaluation": {"eval_dataset": None, "save_steps": 2},
    "a callback that asks": {"callbacks": lambda: [Moody()], "eval_steps": 1, "save_steps": 3},
    "saves in the background": {"save_steps": 2, "eval_steps": 3, "async_save": True},
    "skipped steps": {
        "model": Overflowing, "dataset": lambda: Numbered(dtype=torch.float32), "prepare": scale, "save_steps": 2,
        "eval_steps": 2, "lr_scheduler": "linear",
    },
    "bf16": {
        "autocast": "bf16", "model": lambda: Net(torch.float32), "dataset": lambda: Numbered(dtype=torch.float32),
        "save_steps": 2,
    },
    "a stream without length": {"dataset": Endless, "save_steps": 2, "eval_steps": 2},
    "a stream that can be put back": {"dataset": Seekable, "save_steps": 2, "eval_steps": 2},
    "a stream without length, saved at its end": {"dataset": Endless, "save_steps": 3, "eval_steps": 3},
    "a loader of the user's own": {
        "train_loader": lambda: DataLoader(Numbered(), batch_size=4, shuffle=True), "save_steps": 2,
    },
    "cosine with warm-up": {"lr_scheduler": "cosine", "warmup_steps": 2, "save_steps": 1},
    "named, per epoch": {"lr_scheduler": "linear", "scheduler_interval": "epoch", "save_steps": 2},
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
    "MultiStepLR, per epoch": scheduled(
        lambda optimizer: schedules.MultiStepLR(optimizer, [1, 2, 2]), scheduler_interval="epoch"
    ),
    "CyclicLR moving SGD's momentum": scheduled(
        lambda optimizer: schedules.CyclicLR(optimizer, 0.01, 0.1, 2),
        **given_optimizer(lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9)),
    ),
    "Adafactor": {"optimizer": torch.optim.Adafactor, "save_steps": 2},
    "AdamW without the fused kernel": {"optimizer": torch.optim.AdamW, "save_steps": 2},
    "a rate that is a tensor": scheduled(
        "linear", **given_optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.05)))
    ),
    "groups of parameters in another order": scheduled("linear", **given_optimizer(two_groups)),
}  # fmt: skip


KINDS = ("stop", "signal", "kill")
ANYWHERE = [*RECIPES][1:4]
"""Recipes that are cut after every step, in one way, also where the others are cut at some: intervals that coincide
with nothing, a save at every step, and saves between the evaluations."""
BOUNDARIES = {"the first step": 1, "the middle of an epoch": 5, "an epoch's last step": 6}


def stops(name: str, length: int, has_all: bool) -> Iterator[tuple[str, int]]:
    """All ways to end at all windows for the first recipes; one way at each window, in turn, for the others."""
    for window in range(1, length + 1):
        if has_all and list(RECIPES).index(name) < 4:
            yield from ((how, window) for how in KINDS)
        else:
            yield KINDS[(window + len(name)) % 3], window


@pytest.mark.parametrize(
    ("name", "has_all"),
    thinned(
        [*((name, True) for name in RECIPES), *((name, False) for name in ANYWHERE)],
        [(name, False) for name in ANYWHERE],
    ),
)
def test_run_that_is_cut_after_any_step_and_resumed_ends_like_one_that_was_not(
    name: str, has_all: bool, folder: Path
) -> None:
    expected = play(folder / "straight", **RECIPES[name])
    length = expected["position"]["step"] + expected["position"]["skipped_steps"]
    assert length >= 6
    for number, cut in enumerate(stops(name, length, has_all)):
        found = play(folder / str(number), [{"cut": cut}, {}], **RECIPES[name])
        assert not differences(found, expected), f"{name}, cut by {cut}"


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ANYWHERE])
def test_run_that_is_cut_at_the_boundaries_of_an_epoch_ends_like_one_that_was_not(name: str, folder: Path) -> None:
    expected = play(folder / "straight", **RECIPES[name])
    for number, (place, window) in enumerate(BOUNDARIES.items()):
        cut = KINDS[(number + len(name)) % 3], window
        found = play(folder / str(number), [{"cut": cut}, {}], **RECIPES[name])
        assert not differences(found, expected), f"{name}, cut by {cut} after {place}"


@pytest.mark.parametrize(
    ("name", "order", "every"),
    thinned(
        itertools.product([*[*RECIPES][1:3], "an end in steps at an epoch's end"], [-5, 97], [1, 3]),
        [([*RECIPES][1], 97, 3), ("an end in steps at an epoch's end", -5, 3)],
    ),
)
def test_run_that_is_killed_at_any_event_and_resumed_ends_like_one_that_was_not(
    name: str, order: int, every: int, folder: Path
) -> None:
    counter = KillAtEvent(order=order)
    expected = play(folder / "straight", [{"cut": counter}], **RECIPES[name])
    assert counter.count > 30
    for number in range(1, counter.count + 1, every):
        found = play(folder / str(number), [{"cut": KillAtEvent(number, order)}, {}], **RECIPES[name])
        assert not differences(found, expected), f"{name}, killed at event {number}"


@pytest.mark.parametrize(
    "options",
    [
        {"eval_steps": 2, "save_steps": 3},
        {"eval_steps": 4, "save_steps": 3, "async_save": True},
        scheduled(lambda optimizer: schedules.CosineAnnealingLR(optimizer, 5), eval_steps=5),
        scheduled(lambda optimizer: schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0), eval_steps=2),
    ],
)
def test_run_that_is_lengthened_after_any_number_of_steps_equals_the_long_run(options: Any, folder: Path) -> None:
    expected = play(folder / "straight", **options)
    for steps in range(1, 9):
        found = play(folder / str(steps), [{"max_steps": steps}, {}], **options)
        assert not differences(found, expected), f"{steps} steps, then the rest"


CUTS: dict[str, Any] = {
    "intervals": st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4)),
    "epochs": st.sampled_from([1, 2, 2.5, 3]),
    "accumulation": st.integers(1, 3),
    "limit": st.sampled_from([None, 2]),
    "is_async": st.booleans(),
    "cuts": st.lists(
        st.tuples(st.sampled_from(["stop", "signal", "kill"]), st.integers(1, 12)), min_size=1, max_size=4
    ),
}


def cut_and_compare(intervals: Any, epochs: Any, accumulation: int, limit: Any, is_async: bool, cuts: Any) -> None:
    options = {
        "eval_steps": intervals[0], "save_steps": intervals[1], "log_steps": intervals[2], "epochs": epochs,
        "gradient_accumulation_steps": accumulation, "save_total_limit": limit, "async_save": is_async,
    }  # fmt: skip
    with memory() as folder:
        expected = play(folder / "straight", **options)
        parts = [{"cut": cut} for cut in sorted(cuts, key=lambda cut: cut[1])]
        found = play(folder / "cut", [*parts, {}], **options)
        assert not differences(found, expected)


@settings(max_examples=12)
@given(**CUTS)
def test_some_cuts_under_some_intervals_change_nothing(**drawn: Any) -> None:
    cut_and_compare(**drawn)


@pytest.mark.slow
@settings(max_examples=60)
@given(**CUTS)
def test_any_number_of_cuts_under_any_intervals_changes_nothing(**drawn: Any) -> None:
    cut_and_compare(**drawn)


@pytest.mark.parametrize("cut", [("stop", 2), ("kill", 5)])
def test_worker_processes_change_nothing_before_or_after_a_resume(cut: tuple[str, int], folder: Path) -> None:
    expected = play(folder / "straight", save_steps=2)
    found = play(folder / "cut", [{"cut": cut}, {}], save_steps=2, num_workers=2)
    assert not differences(found, expected)
    mixed = play(folder / "mixed", [{"cut": cut, "num_workers": 2}, {}], save_steps=2)
    assert not differences(mixed, expected)


def test_a_run_goes_on_in_the_kind_of_order_that_it_began_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = play(folder / "drawn")
    train(build(folder / "before", callbacks=lambda: [Cut("stop", 2)]))
    (manifest,) = (folder / "before").glob(f"checkpoint-*/{MANIFEST}")
    content = json.loads(manifest.read_text())
    assert content.pop("order") == "drawn" and content["progress"].pop("batches_in_epoch") == 4
    rest = {key: value for key, value in content.items() if key not in ("format_version", "sha256")}
    manifest.write_bytes(encode(rest))  # as earlier versions have left it
    monkeypatch.setattr(sampling, "_DRAWN_WHOLE", 10)
    found = train(build(folder / "before"), resume_from="auto")
    assert differences(outcome(found)["tensors"], drawn["tensors"]) == []
    keyed = play(folder / "keyed")
    assert sorted(keyed["stream"]) == sorted(drawn["stream"]) and keyed["stream"] != drawn["stream"]
    parts = [{"cut": ("stop", 2)}, {"cut": ("kill", 5), "save_steps": 1}, {}]
    assert differences(play(folder / "parts", parts)["tensors"], keyed["tensors"]) == []


def test_patience_runs_out_at_the_same_step_whatever_evaluation_the_run_was_killed_after(folder: Path) -> None:
    options = {"epochs": 9, "eval_steps": 1, "save_steps": 1, "patience": 2}
    expected = play(folder / "straight", **options)
    last = expected["position"]["step"]
    assert expected["metrics"]["stop_reason"] == "early_stopping" and 3 < last < 27
    for step in range(1, last):
        assert not differences(play(folder / str(step), [{"cut": ("kill", step)}, {}], **options), expected)


def test_run_that_patience_has_ended_stays_ended_unless_patience_is_raised(folder: Path) -> None:
    options = {"epochs": 9, "eval_steps": 1, "save_steps": 1, "patience": 2}
    expected = play(folder / "run", **options)
    again = play(folder / "run", **options)
    assert again["position"] == expected["position"] and again["metrics"] == expected["metrics"]
    longer = play(folder / "run", **{**options, "patience": 4})
    assert longer["position"]["step"] > expected["position"]["step"]


@pytest.mark.parametrize("options", [{}, {"max_steps": 7, "eval_steps": 5, "save_steps": 3, "epochs": None}])
def test_resuming_a_finished_run_trains_nothing_and_says_the_same(options: Any, folder: Path) -> None:
    expected = play(folder / "once", **options)
    again = play(folder / "twice", [{}, {}], **options)
    assert not differences(again, expected)


def test_trainer_that_was_stopped_resumes_by_itself_with_an_optimizer_and_a_schedule_of_the_users_own(
    folder: Path,
) -> None:
    def make(run: str) -> Trainer:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        return build(
            folder / run,
            model=lambda: model,
            **given_optimizer(optimizer),
            lr_scheduler=lambda given: schedules.ExponentialLR(given, 0.8),
        )

    expected = outcome(train(make("straight")))
    trainer = make("cut")
    cut = Cut("stop", 4)
    trainer.lifecycle.register([*trainer.lifecycle.callbacks, cut])
    train(trainer)
    found = outcome(train(trainer, resume_from="auto"))
    assert trainer.progress.step == 9
    assert not differences(found, expected)


def test_optimizer_with_a_fused_kernel_is_resumed_by_one_without_and_the_other_way_round(folder: Path) -> None:
    def adamw(fused: bool) -> Any:
        return lambda parameters: torch.optim.AdamW(parameters, 0.05, fused=fused)

    expected = play(folder / "straight", **given_optimizer(adamw(True)))
    for fused in (True, False):
        run = folder / str(fused)
        play(run, [{"cut": ("stop", 4)}], **given_optimizer(adamw(fused)))
        trainer = train(build(run, **given_optimizer(adamw(not fused))), resume_from="auto")
        assert trainer.optimizer.param_groups[0]["fused"] is not fused
        for name, tensor in trainer.model.state_dict().items():
            torch.testing.assert_close(tensor, expected["tensors"][f"model/{name}"])


def test_moments_keep_a_dtype_that_is_not_the_parameters(folder: Path) -> None:
    class Momentum(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    kept = self.state[parameter].setdefault("kept", torch.zeros(parameter.shape, dtype=torch.float64))
                    kept.mul_(0.9).add_(parameter.grad)
                    self.state[parameter]["count"] = self.state[parameter].get("count", torch.zeros(1).short()) + 1
            return super().step(closure)

    options = {
        "optimizer": Momentum, "model": lambda: Net(torch.float32),
        "dataset": lambda: Numbered(dtype=torch.float32),
    }  # fmt: skip
    expected = play(folder / "straight", **options)
    found = play(folder / "cut", [{"cut": ("stop", 4)}, {}], **options)
    assert not differences(found, expected)
    assert found["tensors"]["optimizer/0/kept"].dtype is torch.float64


# --- where the checkpoints are


def test_run_goes_on_in_another_save_dir_and_finds_its_best_where_it_was(folder: Path) -> None:
    options = {"eval_steps": 1, "save_steps": 1}
    expected = play(folder / "straight", **options)
    best = expected["metrics"]["best_step"]
    assert 2 < best < 9
    play(folder / "first", [{"cut": ("stop", best + 1)}], **options)
    trainer = build(folder / "second", **options)
    train(trainer, resume_from=folder / "first" / f"checkpoint-{best + 1}")
    found = outcome(trainer)
    for key in ("tensors", "metrics", "objective", "position", "last"):
        assert not differences(found[key], expected[key])
    assert found["journal"] == [row for row in expected["journal"] if row["step"] > best + 1]
    assert not (folder / "first" / "checkpoint-9").exists()


def test_run_folder_can_be_moved_and_resumed_from_another_working_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"eval_steps": 1, "save_steps": 1, "save_total_limit": 2}
    expected = play(folder / "straight", **options)
    (folder / "before").mkdir()
    monkeypatch.chdir(folder / "before")
    play(Path("run"), [{"cut": ("kill", 5)}], **options)
    shutil.move("run", folder / "elsewhere")
    (folder / "after").mkdir()
    monkeypatch.chdir(folder / "after")
    found = play(Path("../elsewhere"), **options)
    assert not differences({**found, "stream": 0, "rates": 0}, {**expected, "stream": 0, "rates": 0})


def test_no_absolute_path_is_in_any_file(folder: Path) -> None:
    play(folder / "run", eval_steps=1, save_steps=1, model=Net)
    texts = [path for path in (folder / "run").rglob("*") if path.suffix in (".json", ".jsonl") or not path.suffix]
    for path in texts:
        if path.is_file():
            assert str(folder) not in path.read_text(), path


def test_folder_that_holds_checkpoints_is_refused_before_the_first_step_and_left_as_it_is(folder: Path) -> None:
    play(folder / "run", save_steps=2)
    before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    trainer = build(folder / "run", save_steps=2)
    with pytest.raises(ConfigError, match=r"already holds checkpoints.*checkpoint-9.*resume_from.*overwrite"):
        trainer.train()
    assert trainer.progress.step == 0
    assert {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("is_async", [False, True])
def test_overwrite_replaces_the_earlier_run_once_there_is_a_new_checkpoint(folder: Path, is_async: bool) -> None:
    play(folder / "run", save_steps=1)
    there: list[list[str]] = []

    class Look(Callback):
        order = 90

        def on_train_start(self, trainer: Any) -> None:
            there.append(names(trainer.store))

        def on_save_end(self, trainer: Any) -> None:
            there.append(names(trainer.store))

    trainer = build(
        folder / "run",
        save_steps=4,
        overwrite=True,
        async_save=is_async,
        seed=1,
        callbacks=lambda: [Look()],
        keep_best=0,
    )
    train(trainer)
    assert len(there[0]) == 9 and there[1] == ["checkpoint-4"]
    assert there[-1] == ["checkpoint-4", "checkpoint-8", "checkpoint-9"]
    assert {row["step"] for row in journal(folder / "run")} <= set(range(10))


def test_overwrite_that_is_killed_before_its_first_save_leaves_the_earlier_run(folder: Path) -> None:
    expected = play(folder / "run", save_steps=2)
    train(build(folder / "run", save_steps=2, overwrite=True, callbacks=lambda: [Cut("kill", 1)]))
    found = Store(folder / "run").resolve("auto")
    assert found is not None and found[0].name == "checkpoint-9"
    assert differences(found[1]["objective"], expected["objective"]) == []


def names(store: Any) -> list[str]:
    return [path.name for path in store.checkpoints()]


# --- best and retention


class Scripted(Algorithm):
    """Makes the evaluation after step n worth the n-th score."""

    def __init__(self, scores: list[float]) -> None:
        self.scores = scores

    def transform_metrics(self, trainer: Any, metrics: dict[str, float]) -> dict[str, float]:
        return {**metrics, "eval_score": self.scores[trainer.progress.step - 1]}


SCORES = [3.0, 9.0, 1.0, 2.0, 8.0, 4.0]


def scored(scores: list[float] | None = None, **options: Any) -> dict[str, Any]:
    return {
        "algorithms": lambda: [Scripted(SCORES if scores is None else scores)],
        "compute_metrics": lambda y_true, y_pred: {"score": 0.0},
        "optimization_metric": "score",
        "eval_steps": 1,
        "save_steps": 1,
        "epochs": 2,
        **options,
    }


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_newest_and_best_are_there_and_loadable_after_every_save(limit: int, is_async: bool, folder: Path) -> None:
    seen: list[tuple[int, list[str]]] = []

    class Look(Callback):
        order = 90

        def on_save_end(self, trainer: Any) -> None:
            step = int(trainer.lifecycle.saved_path.name.removeprefix("checkpoint-"))
            best = max(range(1, step + 1), key=lambda n: SCORES[n - 1])
            for which, meant in (("last", step), ("best", best)):
                path, _ = trainer.store.resolve(which)
                assert path.name == f"checkpoint-{meant}"
            newest = range(max(1, step - limit + 1), step + 1)
            assert names(trainer.store) == [f"checkpoint-{n}" for n in sorted({*newest, best})]
            seen.append((step, names(trainer.store)))

    trainer = build(
        folder / "run", **scored(save_total_limit=limit, async_save=is_async, callbacks=lambda: [Look(), *[]])
    )
    train(trainer)
    assert [step for step, _ in seen][-1] == 6 and len(seen) >= 6
    assert trainer.metrics["best_step"] == 2 and trainer.metrics["best_checkpoint"] == "checkpoint-2"


def test_best_few_and_every_third_stay(folder: Path) -> None:
    play(folder / "best", **scored(save_total_limit=1, keep_best=3))
    assert names(Store(folder / "best")) == [f"checkpoint-{n}" for n in (2, 5, 6)]
    play(folder / "every", **scored(save_total_limit=1, keep_every=3))
    assert names(Store(folder / "every")) == [f"checkpoint-{n}" for n in (2, 3, 6)]


def scores_of(run: Path) -> dict[int, float | None]:
    return {kept.step: kept.score for kept in sorted(Store(run).kept(), key=lambda kept: kept.step)}


@pytest.mark.parametrize("is_async", [False, True])
def test_evaluation_is_the_score_of_one_checkpoint_so_that_the_best_few_are_of_as_many_evaluations(
    is_async: bool, folder: Path
) -> None:
    options = scored(SCORES * 2, eval_steps=3, save_steps=1, epochs=4, async_save=is_async)
    play(folder / "all", **options)
    assert scores_of(folder / "all") == dict.fromkeys(range(1, 13)) | {3: 1.0, 6: 4.0, 9: 1.0, 12: 4.0}
    play(folder / "few", **options, save_total_limit=1, keep_best=3)
    assert names(Store(folder / "few")) == [f"checkpoint-{n}" for n in (3, 6, 12)]


@pytest.mark.parametrize(
    "interval, expected",
    [(3, {3: None, 6: 2.0, 9: 9.0, 12: 4.0}), (1, dict.fromkeys(range(1, 13)) | {4: 2.0, 8: 9.0, 12: 4.0})],
)
def test_score_goes_to_the_first_checkpoint_after_the_evaluation_in_a_resumed_run_too(
    interval: int, expected: Any, folder: Path
) -> None:
    class AskAgain(Callback):
        def on_epoch_end(self, trainer: Any) -> None:
            if trainer.progress.step in expected:
                trainer.request_save()

    options = scored(
        SCORES * 2, eval_steps=4, save_steps=interval, epochs=4, callbacks=lambda: [AskAgain()], keep_best=0
    )
    play(folder / "straight", **options)
    assert scores_of(folder / "straight") == expected
    for number, cut in enumerate(("kill", n) for n in range(1, 12)):
        play(folder / str(number), [{"cut": cut}, {}], **options)
        assert scores_of(folder / str(number)) == expected, f"killed after step {cut[1]}"


def test_evaluation_that_closed_a_shorter_run_is_the_score_of_its_checkpoint_alone(folder: Path) -> None:
    options = scored(SCORES * 2, eval_steps=4, save_steps=1, epochs=4)
    play(folder / "run", [{"max_steps": 6}, {}], **options)
    assert scores_of(folder / "run") == dict.fromkeys(range(1, 13)) | {4: 2.0, 6: 4.0, 8: 9.0, 12: 4.0}


def test_checkpoint_whose_score_failed_to_be_written_leaves_it_to_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tensors = state.save_tensors

    def fail(tensors: Any, path: Path) -> None:
        if "checkpoint-3" in str(path):
            raise OSError(28, "No space left on device")
        save_tensors(tensors, path)

    monkeypatch.setattr(state, "save_tensors", fail)
    play(folder / "run", **scored(eval_steps=3, max_steps=5, epochs=None))
    assert scores_of(folder / "run") == {1: None, 2: None, 4: 1.0, 5: 8.0}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return state.load_tensors(folder / state.WEIGHTS)


@pytest.mark.parametrize(
    "end, best_is_loaded",
    [({"max_steps": 4}, True), ({"patience": 2}, True), ({"cut": ("stop", 4)}, True), ({"cut": ("signal", 5)}, False)],
)
def test_best_weights_are_loaded_at_every_end_but_by_a_signal_which_says_so(
    end: Any, best_is_loaded: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "omnitrain")
    run = folder / "run"
    cut = end.pop("cut", None)
    trainer = build(run, **scored(**end), callbacks=lambda: [Cut(*cut)] if cut else [])
    train(trainer)
    last = f"checkpoint-{trainer.progress.step}"
    expected = weights_of(run / ("checkpoint-2" if best_is_loaded else last))
    assert not differences(dict(trainer.model.state_dict()), expected)
    assert best_is_loaded or "keeps its last weights" in caplog.text
    store = Store(run)
    assert (store.resolve("best") or [Path()])[0].name == "checkpoint-2"


def test_best_weights_stay_away_if_they_are_not_wanted(folder: Path) -> None:
    trainer = train(build(folder / "run", **scored(load_best_at_end=False)))
    assert not differences(dict(trainer.model.state_dict()), weights_of(folder / "run" / "checkpoint-6"))


@pytest.mark.parametrize("damage", ["flip", "truncate", "manifest"])
def test_best_that_is_damaged_is_named_and_the_run_ends_with_its_last_weights(
    damage: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = MANIFEST if damage == "manifest" else state.WEIGHTS

    class Damage(Callback):
        def on_step_start(self, trainer: Any) -> None:
            if trainer.progress.step == 5:
                path = trainer.store.path(2) / name
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(data[:-1] if damage == "truncate" else data)

    trainer = train(build(folder / "run", **scored(), callbacks=lambda: [Damage()]))
    assert trainer.metrics["stop_reason"] == "epochs" and trainer.metrics["best_checkpoint"] == "checkpoint-2"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "checkpoint-2" in warnings[0] and repr(name) in warnings[0]
    assert not differences(dict(trainer.model.state_dict()), weights_of(folder / "run" / "checkpoint-6"))


@pytest.mark.parametrize("options", [{}, {"eval_steps": 2, "save_steps": 1}, {"max_steps": 7, "eval_steps": 3}])
def test_evaluating_the_loaded_best_gives_exactly_the_stored_best(options: Any, folder: Path) -> None:
    trainer = train(build(folder / "run", **options))
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == trainer.metrics["best_valid"]["eval_loss"]
    fresh = build(None)
    state.load_weights(fresh.model, weights_of(folder / "run" / trainer.metrics["best_checkpoint"]), "there")
    assert fresh.evaluate() == metrics


def test_evaluation_that_closes_a_run_and_is_the_best_gets_the_checkpoint_that_was_there_already(
    folder: Path,
) -> None:
    """The checkpoint of step 4 is saved before anybody knows that it is the best."""
    options = scored([1.0, 2.0, 3.0, 4.0], eval_steps=3, save_steps=2, max_steps=4)
    trainer = train(build(folder / "run", **options))
    assert trainer.metrics["best_step"] == 4 and trainer.metrics["best_checkpoint"] == "checkpoint-4"
    assert (Store(folder / "run").resolve("best") or [Path()])[0].name == "checkpoint-4"


def test_longer_run_takes_the_best_of_its_own_evaluations(folder: Path) -> None:
    """The evaluation after step 4 closed the shorter run; the longer one has none there."""
    options = scored([0.0, 0.0, 5.0, 9.0, 0.0, 1.0], eval_steps=3)
    expected = play(folder / "straight", **options)
    found = play(folder / "run", [{"max_steps": 4}, {}], **options)
    assert found["metrics"]["best_checkpoint"] == "checkpoint-3"
    assert not differences(found, expected)


def test_best_that_was_pruned_away_by_a_shorter_run_is_replaced_by_what_best_stands_for(folder: Path) -> None:
    options = scored([0.0, 0.0, 5.0, 9.0, 0.0, 1.0], eval_steps=3, save_total_limit=1)
    found = play(folder / "run", [{"max_steps": 4}, {}], **options)
    assert names(Store(folder / "run")) == ["checkpoint-4", "checkpoint-6"]
    loaded = {name.removeprefix("model/"): t for name, t in found["tensors"].items() if name.startswith("model/")}
    assert not differences(loaded, weights_of(folder / "run" / "checkpoint-4"))


def test_going_back_to_the_best_and_on_again_equals_the_first_time(folder: Path) -> None:
    options = scored([1.0, 9.0, 2.0, 3.0, 4.0, 5.0], save_steps=2)
    expected = without_parts(play(folder / "run", **options))
    trainer = train(build(folder / "run", **options), resume_from="best")
    assert not differences(outcome(trainer), expected)
    assert names(trainer.store) == [f"checkpoint-{n}" for n in (2, 4, 6)]
    train(build(folder / "run", **options, callbacks=lambda: [Cut("stop", 3)]), resume_from="best")
    assert not differences(without_parts(play(folder / "run", **options)), expected), "3 was saved last, not 6"


def without_parts(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in ("stream", "rates")}


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


@pytest.mark.parametrize("has_folder", [True, False])
def test_true_names_no_checkpoint_and_is_refused_with_the_words_that_do(has_folder: bool, folder: Path) -> None:
    trainer = build(folder / "run") if has_folder else build(None)
    with pytest.raises(ConfigError, match=r"`resume_from=True`: pass 'auto' .* or 'last'"):
        trainer.train(resume_from=True)  # type: ignore[arg-type]
    assert trainer.progress.step == 0 and not list(folder.glob("run/*"))


@pytest.mark.parametrize("name", CHANGES)
def test_setting_that_would_change_the_run_is_refused_with_both_values(name: str, folder: Path) -> None:
    play(folder / "run", [{"cut": ("stop", 4)}])
    trainer = build(folder / "run", **CHANGES[name])
    before = {key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"other settings.*\b{name}: .* -> .*allow_change=") as caught:
        trainer.train(resume_from="auto")
    told = re.findall(r"(\w+): (?:(?!; |\. Set).)* -> ", str(caught.value).split("change the run: ")[1])
    allowed = {name} | ({"loss_fn"} if name == "unit" else set())
    assert set(told) == allowed, "nothing else is told"
    assert not differences(dict(trainer.model.state_dict()), before)
    assert trainer.progress.step == 0
    metrics = build(folder / "run", **CHANGES[name]).train(resume_from="auto", allow_change=allowed)
    assert metrics["train_metrics_history"][-1]["epoch"] == 3


def resumed_with(folder: Path, change: dict[str, Any], allow: set[str], **options: Any) -> dict[str, Any]:
    """Four steps, and the rest of three epochs with something else."""
    return play(folder / "run", [{**options, "cut": ("stop", 4)}, {**options, **change}], make=allowing(allow))


def allowing(names: set[str]) -> Any:
    def make(save_dir: Path, **options: Any) -> Trainer:
        trainer = build(save_dir, **options)
        original = trainer.train
        trainer.train = lambda **given: original(**given, allow_change=names)  # type: ignore[method-assign]
        return trainer

    return make


@pytest.mark.parametrize(
    "options, change, name, expected",
    [
        ({}, {"learning_rate": 0.01}, "learning_rate", [0.05] * 4 + [0.01] * 5),
        (
            {"lr_scheduler": lambda optimizer: schedules.ExponentialLR(optimizer, 0.5)},
            {"learning_rate": 0.01},
            "learning_rate",
            [0.05 / 2**n for n in range(1, 5)] + [0.01 / 2**n for n in range(5, 10)],
        ),
        (
            {"lr_scheduler": "linear"},
            {"learning_rate": 0.01},
            "learning_rate",
            [0.05 * (9 - n) / 9 for n in range(1, 5)] + [0.01 * (9 - n) / 9 for n in range(5, 10)],
        ),
        (
            {"lr_scheduler": "linear"},
            {"lr_scheduler": "cosine"},
            "lr_scheduler",
            [0.05 * (9 - n) / 9 for n in range(1, 5)]
            + [0.025 * (1 + math.cos(math.pi * n / 9)) for n in range(5, 10)],
        ),
        ({}, {"lr_scheduler": "linear"}, "lr_scheduler", [0.05] * 4 + [0.05 * (9 - n) / 9 for n in range(5, 10)]),
        ({"lr_scheduler": "linear"}, {"lr_scheduler": None}, "lr_scheduler",
         [0.05 * (9 - n) / 9 for n in range(1, 5)] + [0.05] * 5),
        (
            {"lr_scheduler": "constant"},
            {"lr_scheduler": lambda optimizer: schedules.ExponentialLR(optimizer, 0.5)},
            "lr_scheduler",
            [0.05] * 4 + [0.05 / 2**n for n in range(1, 6)],
        ),
        ({"warmup_steps": 2}, {"warmup_steps": 8}, "warmup_steps",
         [0.025] + [0.05] * 3 + [0.05 * n / 8 for n in range(5, 9)] + [0.05]),
        ({"lr_scheduler": "linear"}, {"epochs": 6}, None,
         [0.05 * (9 - n) / 9 for n in range(1, 5)] + [0.05 * (18 - n) / 18 for n in range(5, 19)]),
    ],
)  # fmt: skip
def test_allowed_change_of_rate_or_schedule_is_in_force_from_the_first_step_on(
    options: Any, change: Any, name: str | None, expected: list[float], folder: Path
) -> None:
    found = resumed_with(folder, change, {name} if name else set(), **options)
    assert [rate for (rate,) in found["rates"]] == pytest.approx(expected)


@pytest.mark.parametrize(
    "first, second, told, expected",
    [
        (
            lambda optimizer: schedules.CosineAnnealingLR(optimizer, 9),
            lambda optimizer: schedules.CosineAnnealingLR(optimizer, 9, eta_min=0.04),
            r"'eta_min': 0.0\} -> .*'eta_min': 0.04",
            [0.025 * (1 + math.cos(math.pi * n / 9)) for n in range(1, 5)],
        ),
        (
            lambda optimizer: schedules.StepLR(optimizer, 2),
            lambda optimizer: schedules.StepLR(optimizer, 3),
            r"'step_size': 2, .* -> .*'step_size': 3, ",
            [0.05, 0.005, 0.005, 0.0005, 0.0005, 5e-05, 5e-05, 5e-05, 5e-06],
        ),
        (
            lambda optimizer: schedules.ChainedScheduler([schedules.ExponentialLR(optimizer, 0.5)]),
            lambda optimizer: schedules.ChainedScheduler([schedules.ExponentialLR(optimizer, 0.1)]),
            r"'gamma': 0.5.* -> .*'gamma': 0.1",
            [0.025, 0.0125, 0.00625, 0.003125, 0.005, 0.0005, 5e-05, 5e-06, 5e-07],
        ),
    ],
)
def test_schedule_of_the_users_own_that_was_made_otherwise_is_refused_and_if_allowed_in_force(
    first: Any, second: Any, told: str, expected: list[float], folder: Path
) -> None:
    play(folder / "refused", [{"cut": ("stop", 4)}], lr_scheduler=first)
    with pytest.raises(CheckpointError, match=rf"lr_scheduler_options: .*{told}"):
        build(folder / "refused", lr_scheduler=second).train(resume_from="auto")
    found = resumed_with(folder, {"lr_scheduler": second}, {"lr_scheduler_options"}, lr_scheduler=first)
    assert [rate for (rate,) in found["rates"]][: len(expected)] == pytest.approx(expected)
    assert found["rates"][4:] != play(folder / "straight", lr_scheduler=first)["rates"][4:]


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"lr_scheduler": "cosine"}, 0.025 * (1 + math.cos(math.pi * 4 / 9))),
        ({"epochs": 6}, 0.05 * 14 / 18),
    ],
)
def test_first_step_under_another_schedule_is_taken_at_its_rate(change: Any, expected: float, folder: Path) -> None:
    used: list[float] = []

    class Look(Callback):
        def on_before_optimizer_step(self, trainer: Any) -> None:
            used.append(trainer.optimizer.param_groups[0]["lr"])

    options = {"lr_scheduler": "linear", "callbacks": lambda: [Look()]}
    resumed_with(folder, change, {"lr_scheduler"}, **options)
    assert used[3:5] == pytest.approx([0.05 * 6 / 9, expected])


def test_schedule_that_got_longer_says_what_it_does(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    resumed_with(folder, {"epochs": 6}, set(), lr_scheduler="cosine")
    assert "18 steps" in caplog.text and "before: 9" in caplog.text


def test_allowed_changes_of_other_settings_are_in_force(folder: Path) -> None:
    run = folder / "run"
    play(run, [{"cut": ("stop", 4)}])

    def changed(name: str, extra: tuple[str, ...] = ()) -> Trainer:
        copy = folder / name
        shutil.copytree(run, copy)
        trainer = build(copy, **CHANGES[name], load_best_at_end=False)
        trainer.train(resume_from="auto", allow_change={name, *extra})
        return trainer

    assert changed("weight_decay").optimizer.param_groups[0]["weight_decay"] == 0.1
    assert changed("optimizer_groups").optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    assert isinstance(changed("optimizer").optimizer, torch.optim.SGD)
    straight = play(folder / "straight", load_best_at_end=False)["tensors"]["model/head.weight"]
    for name in ("max_grad_norm", "grad_reduction", "loss_fn", "algorithms", "seed", "shuffle", "global_batch_size"):
        assert not torch.equal(changed(name).model.head.weight, straight), name


def test_allowed_change_of_the_seed_reaches_the_dropout_too(folder: Path) -> None:
    """Neither the order nor the samples depend on the seed here."""
    options = {"shuffle": False, "dataset": lambda: Numbered(noisy=False), "load_best_at_end": False}
    straight = play(folder / "straight", **options)["tensors"]["model/head.weight"]
    found = resumed_with(folder, {"seed": 1}, {"seed"}, **options)["tensors"]["model/head.weight"]
    assert not torch.equal(found, straight)


def test_allowed_change_of_the_objective_begins_a_new_selection(folder: Path) -> None:
    play(folder / "run", [{"cut": ("stop", 7)}], eval_steps=1, save_steps=1)
    options = {"eval_steps": 1, "save_steps": 1, **CHANGES["optimization_metric"]}
    trainer = build(folder / "run", **options)
    trainer.train(resume_from="auto", allow_change={"optimization_metric"})
    assert trainer.objective.metric == "mae" and trainer.metrics["best_step"] in (8, 9)
    assert "eval_mae" in trainer.metrics["best_valid"] and len(trainer.metrics["valid"]) == 9
    assert trainer.metrics["best_checkpoint"] == f"checkpoint-{trainer.metrics['best_step']}"


def test_allowed_change_of_the_algorithms_gives_none_of_them_the_state_of_another(folder: Path) -> None:
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
        {"epochs": 5},
        {"epochs": None, "max_steps": 20},
        {"patience": 50},
        {"eval_steps": 4},
        {"save_steps": 1},
        {"log_steps": 5},
        {"eval_batch_size": 3},
        {"num_workers": 1},
        {"callbacks": lambda: [Moody()]},
        {"keep_best": 3},
        {"on_nonfinite": "skip"},
        {"delta": 0.1},
        {"async_save": True},
    ],
)
def test_settings_that_do_not_change_the_numbers_may_change(change: Any, folder: Path) -> None:
    found = play(folder / "run", [{"cut": ("stop", 4)}, change])
    assert found["position"]["step"] >= 9


def test_batch_times_accumulation_that_stays_the_same_is_no_change(folder: Path) -> None:
    expected = play(folder / "straight", model=Plain)
    found = play(
        folder / "run", [{"cut": ("stop", 4)}, {"batch_size": 8, "gradient_accumulation_steps": 1}], model=Plain
    )
    assert sorted(found["stream"]) == sorted(expected["stream"])
    for name, tensor in found["tensors"].items():
        torch.testing.assert_close(tensor, expected["tensors"][name])


class Plain(Net):
    """Without batch norm and dropout, which see the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8).double()


def test_allow_change_of_what_is_no_setting_is_refused_with_those_there_are(folder: Path) -> None:
    play(folder / "run", [{"cut": ("stop", 4)}])
    with pytest.raises(ConfigError, match=r"'lerning_rate'.*learning_rate"):
        build(folder / "run").train(resume_from="auto", allow_change={"lerning_rate"})


# --- what is in the files


def test_nothing_is_pickled_and_nothing_unpickled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = play(folder / "straight", save_steps=2, lr_scheduler="cosine")

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("pickle was used")

    for owner, names in (
        (pickle, ("Unpickler", "Pickler", "loads", "dumps", "load", "dump")),
        (torch, ("load", "save")),
        (torch.serialization, ("load", "save")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, refuse)
    found = play(folder / "run", [{"cut": ("stop", 4)}, {}], save_steps=2, lr_scheduler="cosine")
    assert not differences(found, expected)
    files = [path for path in (folder / "run").rglob("*") if path.is_file()]
    assert len(files) > 12
    for path in files:
        assert path.suffix in (".safetensors", ".json", ".jsonl", ".yaml", "")
        assert not path.read_bytes().startswith((b"\x80", b"PK"))


def test_every_json_is_one_that_any_tool_reads(folder: Path) -> None:
    """NaN and Infinity are no JSON."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} in a JSON file")

    play(
        folder / "run",
        **scheduled(lambda optimizer: schedules.ReduceLROnPlateau(optimizer), eval_steps=5),
        cut=("stop", 3),
    )
    for path in (folder / "run").rglob("*.json"):
        json.loads(path.read_text(), parse_constant=refuse)


def test_settings_in_the_checkpoint_are_the_resolved_ones(folder: Path) -> None:
    trainer = train(build(folder / "run"))
    content = json.loads((folder / "run" / "checkpoint-9" / MANIFEST).read_text())
    resolved = trainer.resolved_config()
    assert content["settings"] == {key: value for key, value in resolved.items() if key != "save_dir"}
    assert json.loads(json.dumps(resolved)) == resolved


def test_checkpoint_says_when_and_with_what_it_was_saved(folder: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    train(build(folder / "run"))
    content = json.loads((folder / "run" / "checkpoint-9" / MANIFEST).read_text())
    saved = datetime.fromisoformat(content["saved_at"])
    assert saved.utcoffset() == timedelta(0) and before <= saved <= datetime.now(UTC)
    assert content["versions"]["omnitrain"] == omnitrain.__version__
    assert content["versions"]["python"] == platform.python_version()
    assert content["versions"]["torch"] == metadata.version("torch")


def test_checkpoint_from_before_some_fields_were_there_is_resumed(folder: Path) -> None:
    options = {"save_steps": 2, "eval_steps": 2}
    expected = play(folder / "straight", **options)
    play(folder / "run", [{"cut": ("stop", 4)}], **options)
    store = Store(folder / "run")
    path, content = store.resolve("last") or (Path(), {})
    own = ("format_version", "sha256", "step", "sequence", "score", "best", "files", "saved_at", "scored")
    payload = {key: value for key, value in content.items() if key not in own}
    payload["versions"] = {"torch": torch.__version__}
    store.save(4, lambda target: shutil.copytree(path, target, dirs_exist_ok=True), payload, score=content["score"])
    assert not differences(play(folder / "run", **options)["tensors"], expected["tensors"])
    assert scores_of(folder / "run") == scores_of(folder / "straight")


# --- a background writer


class Collecting(Algorithm):
    """Keeps a list that it goes on filling while an earlier state of it is written."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        self.sizes.append(len(batch[0]))
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"sizes": self.sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sizes = state["sizes"]


def test_weights_that_are_written_in_the_background_are_those_of_their_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guests = {"callbacks": lambda: [Moody()], "algorithms": lambda: [Collecting()]}
    expected = play(folder / "straight", save_steps=3, keep_best=0, **guests)
    may_write, save_tensors = threading.Event(), state.save_tensors

    def wait_and_save(*given: Any) -> None:
        assert may_write.wait(programs.LIMIT)
        save_tensors(*given)

    class Release(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == 5:
                assert not trainer.store.checkpoints()
                may_write.set()

    monkeypatch.setattr(state, "save_tensors", wait_and_save)
    guests["callbacks"] = lambda: [Moody(), Release()]
    train(build(folder / "run", save_steps=3, async_save=True, keep_best=0, **guests))
    for step in (3, 6, 9):
        name = f"checkpoint-{step}"
        assert not differences(weights_of(folder / "run" / name), weights_of(folder / "straight" / name))
        found, wanted = (json.loads((folder / run / name / MANIFEST).read_text()) for run in ("run", "straight"))
        for key in ("callbacks", "algorithms"):
            assert found[key] == wanted[key], f"{key} of step {step}"
        assert found["progress"]["step"] == step
    assert expected["position"]["step"] == 9


def test_one_save_at_a_time_is_in_flight(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, most, save_tensors = [0], [0], state.save_tensors

    def slowly(*given: Any) -> None:
        writing[0] += 1
        most[0] = max(most[0], writing[0])
        time.sleep(0.01)
        save_tensors(*given)
        writing[0] -= 1

    monkeypatch.setattr(state, "save_tensors", slowly)
    trainer = train(build(folder / "run", save_steps=1, async_save=True))
    assert most == [1] and len(names(trainer.store)) == 9
    assert trainer._checkpointer._in_flight is None and not [
        t for t in threading.enumerate() if "omnitrain-save" in t.name
    ]


def test_failure_in_the_background_is_reported_at_the_next_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tensors, heard = state.save_tensors, []

    def fail(tensors: Any, path: Path) -> None:
        if "checkpoint-3" in str(path):
            raise OSError(28, "No space left on device")
        save_tensors(tensors, path)

    class Listen(Callback):
        def on_step_start(self, trainer: Any) -> None:
            save = trainer._checkpointer._in_flight
            if save is not None:
                save._work.exception()  # waits until this step's part of it is done

        def on_step_end(self, trainer: Any) -> None:
            heard.append((trainer.progress.step, caplog.text.count("Cannot save")))

    monkeypatch.setattr(state, "save_tensors", fail)
    trainer = train(build(folder / "run", save_steps=3, async_save=True, keep_best=0, callbacks=lambda: [Listen()]))
    assert next(step for step, errors in heard if errors) in (4, 5) and heard[-1] == (9, 1)
    assert names(trainer.store) == ["checkpoint-6", "checkpoint-9"]


def test_failure_in_the_background_is_told_even_if_the_run_ends_by_an_error_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(tensors: Any, path: Path) -> None:
        time.sleep(0.05)
        raise OSError(28, "No space left on device")

    class Explode(Callback):
        def on_save_end(self, trainer: Any) -> None:
            raise AssertionError("there is no checkpoint")

        def on_step_start(self, trainer: Any) -> None:
            if trainer.progress.step == 4:
                raise ZeroDivisionError

    monkeypatch.setattr(state, "save_tensors", fail)
    trainer = build(folder / "run", save_steps=4, async_save=True, keep_best=0, callbacks=lambda: [Explode()])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert caplog.text.count("Cannot save") == 1 and trainer._checkpointer._in_flight is None


def test_last_checkpoint_that_failed_is_tried_again_when_the_run_closes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts, save_tensors = [], state.save_tensors

    def fail_once(tensors: Any, path: Path) -> None:
        attempts.append(path)
        if len(attempts) == 1:
            raise OSError(28, "No space left on device")
        save_tensors(tensors, path)

    monkeypatch.setattr(state, "save_tensors", fail_once)
    trainer = train(build(folder / "run", save_steps=4, eval_steps=2, max_steps=4))
    assert names(trainer.store) == ["checkpoint-4"] and caplog.text.count("Cannot save") == 1


def test_error_of_the_run_waits_for_the_save_in_flight_which_counts(folder: Path) -> None:
    class Explode(Callback):
        def on_step_start(self, trainer: Any) -> None:
            if trainer.progress.step == 4:
                raise ZeroDivisionError

    trainer = build(folder / "run", save_steps=4, async_save=True, keep_best=0, callbacks=lambda: [Explode()])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert names(trainer.store) == ["checkpoint-4"]
    assert not differences(play(folder / "run", save_steps=4)["tensors"], play(folder / "x", save_steps=4)["tensors"])


# --- events and guests


def test_save_end_comes_after_the_commit_and_late_callbacks_see_the_pruned_folder(folder: Path) -> None:
    early: list[int] = []
    late: list[int] = []

    class Early(Callback):
        order = 29

        def on_save_end(self, trainer: Any) -> None:
            Store(trainer.save_dir).verify(trainer.lifecycle.saved_path)
            early.append(len(trainer.store.checkpoints()))

    class Late(Callback):
        order = 90

        def on_save_end(self, trainer: Any) -> None:
            late.append(len(trainer.store.checkpoints()))

    train(build(
        folder / "run", save_steps=3, eval_dataset=None, save_total_limit=1, callbacks=lambda: [Late(), Early()]
    ))  # fmt: skip
    assert early == [1, 2, 2, 1] and late == [1, 1, 1, 1]


def test_states_of_callbacks_and_algorithms_come_back_each_to_its_own(folder: Path, caplog: Any) -> None:
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

    class Batches(Algorithm):
        count = 0

        def transform_batch(self, trainer: Any, batch: Any) -> Any:
            self.count += 1
            return batch

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    guests = [[Counter("a"), Counter("b")] for _ in range(2)]
    algorithms = [[Batches()], [Batches()]]
    for number, how in enumerate([{"callbacks": [Cut("stop", 4)]}, {"callbacks": []}]):
        trainer = build(
            folder / "run",
            callbacks=lambda: [*guests[number], *how["callbacks"]],  # noqa: B023
            algorithms=lambda: algorithms[number],  # noqa: B023
        )
        train(trainer, resume_from="auto")
    assert [guest.count for guest in guests[1]] == [9, 9] and algorithms[1][0].count == 18
    train(build(folder / "run", algorithms=lambda: [Batches()], epochs=4), resume_from="auto")
    assert "the state of a callback" in caplog.text and "Counter" in caplog.text


def test_seeking_reads_none_of_the_samples_before(folder: Path) -> None:
    class Counting:
        reads = 0

        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            Counting.reads += 1
            return torch.zeros(4), torch.zeros(1)

    def make(steps: int) -> Trainer:
        model = nn.Linear(4, 1)
        return Trainer(
            model, Counting(), loss_fn=F.mse_loss, batch_size=4, max_steps=steps, epochs=None, save_dir=folder / "run",
            device="cpu", progress_bar=False,
        )  # fmt: skip

    first = make(2)
    first.train()
    # As after 200,000 steps: the position is all that tells.
    path = first.store.path(2)
    content = json.loads((path / MANIFEST).read_text())
    progress = {**content["progress"], "step": 200_000, "samples": 800_000, "samples_in_epoch": 800_000}
    own = ("format_version", "sha256", "step", "sequence", "score", "best", "files")
    payload = {**{key: value for key, value in content.items() if key not in own}, "progress": progress}
    first.store.save(200_000, lambda target: shutil.copytree(path, target, dirs_exist_ok=True), payload)
    Counting.reads = 0
    trainer = make(200_003)
    order = trainer.train_loader.sampler.order(0)
    trainer.train(resume_from="auto")
    fingerprint = 4 * 32  # a few dozen samples, each twice, for the comparison and for what comes
    assert trainer.progress.samples_in_epoch == 800_012 and Counting.reads == 12 + fingerprint
    assert len(order) == 1_000_000


def test_evaluation_that_a_signal_cut_short_is_done_again_after_the_resume(folder: Path) -> None:
    class DuringEvaluation(Callback):
        def on_eval_start(self, trainer: Any) -> None:
            if trainer.progress.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    options = {"eval_steps": 2, "save_steps": 4, "patience": 9}
    expected = play(folder / "straight", **options)
    run = folder / "run"
    play(run, [{"cut": DuringEvaluation()}], **options)
    assert [row["step"] for row in journal(run) if row["kind"] == "eval"] == [2]
    found = play(run, **options)
    found["stream"] = expected["stream"]
    found["rates"] = expected["rates"]
    assert not differences(found, expected)


def test_evaluation_that_was_cut_short_twice_is_done_the_third_time_and_its_checkpoint_is_the_best(
    folder: Path,
) -> None:
    class AtStart(Callback):
        def on_train_start(self, trainer: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    options = scored([1.0, 2.0, 9.0, 4.0, 5.0, 6.0])
    expected = play(folder / "straight", **options)
    found = play(folder / "run", [{"cut": ("signal", 3)}, {"cut": AtStart()}, {}], **options)
    assert not differences(found, expected)


@pytest.mark.parametrize("event", ["train_start", "eval_start", "eval_end"])
def test_signal_before_the_first_step_saves_and_the_resumed_run_is_the_whole_run(event: str, folder: Path) -> None:
    def kill(self: Any, trainer: Any, *details: Any) -> None:
        if trainer.progress.step == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    early = type("Early", (Callback,), {f"on_{event}": kill})
    options = {"eval_on_start": True, "patience": 2, "eval_steps": 1}
    expected = play(folder / "straight", **options)
    found = play(folder / "run", [{"cut": early()}, {}], **options)
    assert not differences(found, expected)


def test_signal_at_the_very_moment_when_limits_are_looked_at_is_not_lost(folder: Path) -> None:
    trainer = build(None)
    reached, seen = trainer.limits.reached, []

    def interrupted(progress: Any) -> str:
        found = reached(progress)
        seen.append(progress.step)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    trainer.limits.reached = interrupted  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        trainer.train()
    assert trainer.progress.step == 2 and trainer.stop_reason == "signal"


def test_sigusr1_saves_at_the_next_step_boundary_and_the_run_goes_on(folder: Path) -> None:
    class Ask(Callback):
        def on_step_start(self, trainer: Any) -> None:
            if trainer.progress.step == 4:
                os.kill(os.getpid(), signal.SIGUSR1)

    trainer = train(build(folder / "run", save_steps=8, keep_best=0, callbacks=lambda: [Ask()]))
    assert names(trainer.store) == [f"checkpoint-{n}" for n in (5, 8, 9)]
    assert trainer.metrics["stop_reason"] == "epochs"


def test_disk_that_is_too_small_is_told_before_the_first_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    told = []

    class Look(Callback):
        def on_step_start(self, trainer: Any) -> None:
            told.append("GB free" in caplog.text)

    train(build(folder / "run", callbacks=lambda: [Look()]))
    assert told[0]


# --- models


@pytest.mark.parametrize("first, second", [(False, True), (True, False), (True, True)])
def test_compiled_and_plain_models_resume_each_other(first: bool, second: bool, folder: Path) -> None:
    def model(compiled: bool) -> Any:
        return lambda: torch.compile(Net(), backend="eager") if compiled else Net()

    expected = play(folder / "straight", save_steps=2)
    found = play(folder / "run", [{"model": model(first), "cut": ("stop", 4)}, {"model": model(second)}], save_steps=2)
    assert not differences(found, expected)
    assert sorted(weights_of(folder / "run" / "checkpoint-4")) == sorted(Net().state_dict())


class Language(Tagger):
    """Embedding and head are one tensor; a buffer is a view of another; one buffer is not persistent."""

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


def test_tied_weights_view_shared_buffers_and_frozen_parameters_are_saved_once_and_come_back_tied(
    folder: Path,
) -> None:
    def make(save_dir: Path, **options: Any) -> Trainer:
        return Trainer(
            Language(), Sentences(), save_dir=save_dir, device="cpu", progress_bar=False, batch_size=2, epochs=2,
            learning_rate=0.05, save_steps=3, log_steps=2, algorithms=[NoStream()],
            callbacks=options["callbacks"](),
        )  # fmt: skip

    expected = outcome(train(make(folder / "straight", callbacks=list)))
    train(make(folder / "run", callbacks=lambda: [Cut("kill", 5)]))
    trainer = train(make(folder / "run", callbacks=list), resume_from="auto")
    assert not differences(outcome(trainer), expected)
    model = trainer.model
    assert model.out.weight is model.embed.weight
    assert model.head_of_table.data_ptr() == model.table.data_ptr() and float(model.table[0]) == 8
    saved = weights_of(folder / "run" / "checkpoint-8")
    assert "scratch" not in saved and "frozen" in saved
    assert len({"embed.weight", "out.weight"} & set(saved)) == 1


class Aging(Net):
    """Counts its forwards outside of any tensor."""

    age = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.age += self.training
        return super().forward(x) * (1 + self.age / 100)

    def get_extra_state(self) -> Any:
        return {"age": self.age}

    def set_extra_state(self, state: Any) -> None:
        self.age = state["age"]


def test_extra_state_of_a_module_is_part_of_the_run(folder: Path) -> None:
    expected = play(folder / "straight", model=Aging, save_steps=2)
    found = play(folder / "run", [{"cut": ("kill", 5)}, {}], model=Aging, save_steps=2)
    assert not differences(found, expected)
    trainer = build(folder / "run", model=Aging)
    trainer.load_checkpoint("last")
    assert trainer.model.age == 18


class NoStream(Stream):
    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        return batch


def test_checkpoint_of_a_transformers_model_opens_with_from_pretrained(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    data = [{"input_ids": sample["ids"], "labels": sample["ids"]} for sample in (Sentences()[i] for i in range(8))]
    trainer = Trainer(
        model, data, save_dir=folder / "run", max_steps=2, epochs=None, device="cpu", progress_bar=False, batch_size=2
    )
    trainer.train()
    opened = transformers.GPT2LMHeadModel.from_pretrained(folder / "run" / "checkpoint-2")
    assert not differences(dict(opened.state_dict()), dict(model.state_dict()))
    content = json.loads((folder / "run" / "checkpoint-2" / MANIFEST).read_text())
    assert {"config.json", "generation_config.json"} <= content["files"].keys()
    weights = weights_of(folder / "run" / "checkpoint-2")
    assert "lm_head.weight" not in weights and "transformer.wte.weight" in weights


# --- the public calls


def test_checkpoint_that_a_callback_saves_in_the_middle_of_a_step_boundary_is_as_good_as_any(folder: Path) -> None:
    """At STEP_END the evaluation of this step is still to come."""

    class SaveNow(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == 4:
                trainer.save_checkpoint()
                raise Killed

    options = {"eval_steps": 2, "save_steps": 5}
    expected = play(folder / "straight", **options)
    play(folder / "run", [{"cut": SaveNow()}], **options)
    found = play(folder / "run", **options)
    for key in ("valid", "best_valid", "train_metrics_history"):
        assert not differences(found["metrics"][key], expected["metrics"][key])
    assert not differences(found["last"], expected["last"])


def test_load_checkpoint_puts_the_whole_trainer_back(folder: Path) -> None:
    trainer = train(build(folder / "run", save_steps=2, eval_steps=3, load_best_at_end=False, lr_scheduler="linear"))
    expected = {k: v for k, v in outcome(trainer).items() if k not in ("journal", "callbacks")}
    other = build(folder / "run", save_steps=2, eval_steps=3, lr_scheduler="linear")
    disturb_generators()
    assert other.load_checkpoint("last").name == "checkpoint-9"
    found = {k: v for k, v in outcome(other).items() if k not in ("journal", "callbacks")}
    found["metrics"]["stop_reason"], found["generator"] = "epochs", [torch.get_rng_state()]
    assert not differences(found, expected)
    with pytest.raises(CheckpointError, match="does not exist"):
        other.load_checkpoint(folder / "nowhere")


def test_names_of_checkpoints_need_a_save_dir(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume_from='auto'.*save_dir"):
        build(None).train(resume_from="auto")
    with pytest.raises(ConfigError, match=r"save_dir"):
        build(None).save_checkpoint()


def test_state_that_could_not_be_saved_is_told_before_the_first_step(folder: Path) -> None:
    def with_a_stranger(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(7))], 0.1)

    trainer = build(folder / "run", **given_optimizer(with_a_stranger))
    with pytest.raises(CheckpointError, match=r"shapes \[\(7,\)\] that are not the model's"):
        trainer.train()
    assert trainer.progress.step == 0


def test_resumed_run_without_the_evaluation_that_it_owes_goes_on(folder: Path) -> None:
    play(folder / "run", [{"cut": ("signal", 3)}])
    assert play(folder / "run", eval_dataset=None)["position"]["step"] == 9


def test_checkpoint_of_another_model_is_refused_by_name(folder: Path) -> None:
    play(folder / "run", [{"cut": ("stop", 4)}])
    with pytest.raises(CheckpointError, match=r"does not fit the model.*body\.0"):
        build(folder / "run", model=Plain).train(resume_from="auto", allow_change={"model"})


# --- weights alone


@pytest.mark.parametrize("in_background", [False, True])
def test_checkpoints_of_weights_alone_hold_what_whole_ones_do_of_the_model(in_background: bool, folder: Path) -> None:
    options = scored(save_steps=2, save_total_limit=1, async_save=in_background)
    whole = train(build(folder / "whole", **options))
    alone = train(build(folder / "alone", **options, save_only_model=True))
    assert not differences(dict(alone.model.state_dict()), dict(whole.model.state_dict()))  # the best ones
    assert names_in(folder / "alone") == names_in(folder / "whole")
    for path in Store(folder / "alone").checkpoints():
        found = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        assert found == [HISTORY, state.WEIGHTS, MANIFEST]
        assert not differences(weights_of(path), weights_of(folder / "whole" / path.name))
        assert Store(folder / "alone").verify(path)["metrics"]


def names_in(run: Path) -> list[str]:
    return [path.name for path in Store(run).checkpoints()]


@pytest.mark.parametrize("which", ["auto", "last", "best", "checkpoint-6"])
def test_checkpoint_of_weights_alone_is_no_place_to_go_on_from(which: str, folder: Path) -> None:
    train(build(folder / "run", **scored(), save_only_model=True))
    before = journal_of_files(folder / "run")
    trainer = build(folder / "run", **scored())
    for call in (trainer.train, trainer.load_checkpoint):
        with pytest.raises(CheckpointError, match=r"save_only_model=True: it holds weights, and nothing else"):
            call(which)
    assert trainer.progress.step == 0
    assert journal_of_files(folder / "run") == before


def journal_of_files(run: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in run.rglob("*")}


def test_weights_alone_need_a_place() -> None:
    with pytest.raises(ConfigError, match=r"save_only_model=True.*save_dir"):
        build(None, save_only_model=True)


# --- streams


@pytest.mark.parametrize("cut", [1, 3, 4, 8])
def test_stream_that_can_be_put_back_is_not_read_again(
    cut: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """3 windows of 8, 8 and 6 samples an epoch, 3 epochs: an epoch's end is after steps 3 and 6."""
    straight = play(folder / "straight", dataset=Seekable, load_best_at_end=False)
    play(folder / "run", [{"cut": ("stop", cut)}], dataset=Seekable, load_best_at_end=False)
    resumed = build(folder / "run", dataset=Seekable, load_best_at_end=False)
    caplog.clear()
    train(resumed, resume_from="auto")
    assert "again" not in caplog.text
    done = cut // 3 * 22 + cut % 3 * 8
    assert resumed.train_dataset.read == 3 * 22 - done
    assert not differences(dict(resumed.model.state_dict()), without_prefix(straight["tensors"], "model/"))


class Opaque(Seekable):
    """A stream whose state is no JSON."""

    def state_dict(self) -> dict[str, Any]:
        return {"what": object()}


def test_stream_whose_state_cannot_be_kept_is_read_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    play(folder / "run", [{"cut": ("stop", 2)}], dataset=Opaque, load_best_at_end=False)
    assert "will read the epoch again" in caplog.text
    resumed = train(build(folder / "run", dataset=Opaque, load_best_at_end=False), resume_from="auto")
    assert (resumed.progress.step, resumed.train_dataset.read) == (9, 66)


class Counting(IterableDataset[Any]):
    """A stream that takes whatever place it is given."""

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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("place", "x"), ("place", {"__float__": "nan"}), ("place", True), ("share", {"__float__": "inf"}),
        ("file", 3), ("deep", {}), ("deep", 3), ("deep", {"shard": []}),
    ],
)  # fmt: skip
def test_state_that_a_stream_cannot_have_had_is_refused_before_anything_is_loaded_and_auto_takes_the_one_before(
    key: str, value: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"dataset": Counting, "load_best_at_end": False, "save_steps": 2}
    play(folder / "run", [{"cut": ("stop", 4)}], **options)
    newest = max(folder.glob("run/checkpoint-*"))
    content = content_of(newest)
    content["stream"]["state"][key] = value
    seal(newest, content)
    resumed = build(folder / "run", **options)
    before = copy.deepcopy(resumed.model.state_dict())
    told = "shard" if value == {} else key
    with pytest.raises(CheckpointError, match=rf"{newest.name}.*omnitrain.json.*{told}"):
        resumed.train(resume_from=newest)
    assert all(torch.equal(one, before[name]) for name, one in resumed.model.state_dict().items())
    assert resumed.train_dataset.state == Counting().state
    train(resumed, resume_from="auto")
    assert resumed.progress.step == 9
    assert "Passed over" in caplog.text


def without_prefix(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
