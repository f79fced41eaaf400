"""Events and exchanges of steps on two ranks, callbacks that fail or stop on one of them, and loggers."""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.tracking import GeneralTracker
from backends import DTYPES, Job, asked_for, dtype_of, gap, launch_all, make_trainer, sound, tensors_of
from marks import thinned
from recipes import Everything, Keyed, KeyedModel, StopAt, rows, t16
from torch import nn

from omnitrain import AccelerateTrainer, Callback

STEPS = 12
BATCH = ["batch_start", "after_forward", "after_loss", "after_backward", "batch_end"]
UPDATE = ["before_optimizer_step", "after_optimizer_step", "before_zero_grad", "after_zero_grad", "step_end"]


class FailsOnRankOne(Callback):
    """Fails in each micro-batch of the second rank, which only warns there."""

    on_error = "warn"
    asks_alone = False

    def on_batch_start(self, trainer: Any, batch: Any, number: int) -> None:
        if trainer.rank == 1:
            raise RuntimeError("boom")


class StopsOnRankOne(Callback):
    """Stops on the second rank, within the third step."""

    def on_after_loss(self, trainer: Any, loss: Any) -> None:
        if trainer.rank == 1 and trainer.progress.step == 2:
            trainer.stop()


def train_watched(backend: str, watched: bool) -> dict[str, Any]:
    everything, dtype = Everything(), DTYPES[dtype_of(backend)]
    options: dict[str, Any] = {"max_steps": 3}
    if watched:
        options = {"max_steps": 9, "callbacks": [everything, FailsOnRankOne(), StopsOnRankOne()]}
    trainer = make_trainer(
        backend, t16(dtype=dtype), rows(40, dtype), batch_size=2, gradient_accumulation_steps=2, learning_rate=0.05,
        loss_fn=nn.functional.mse_loss, log_steps=100, **options,
    )  # fmt: skip
    trainer.train()
    failures = {listener.name: listener.failures for listener in trainer.lifecycle.listeners}
    return {
        "events": everything.events, "failures": failures.get("FailsOnRankOne"), "step": trainer.progress.step,
        "tensors": tensors_of(trainer),
    }  # fmt: skip


# --- exchanges


class Watches(Callback):
    """Has an event of every step, in which it requests something or, by its attribute, nothing."""

    def __init__(self, asks_alone: bool) -> None:
        self.asks_alone = asks_alone

    def on_step_end(self, trainer: Any) -> None:
        pass


class StopsInStep(AccelerateTrainer):
    """A custom trainer, whose rank 1 ends the run in the middle of step 5."""

    def _apply_update(self) -> bool:
        if self.rank == 1 and self.progress.step + 1 == 5:
            self.stop()
        return super()._apply_update()


class Work:
    """A collective call whose first wait is recorded."""

    def __init__(self, work: Any, events: list[str]) -> None:
        self.work, self.events, self.is_read = work, events, False

    def wait(self, *args: Any) -> Any:
        self.events += [] if self.is_read else ["r"]
        self.is_read = True
        return self.work.wait(*args)


@contextlib.contextmanager
def recorded(model: torch.nn.Module) -> Iterator[list[str]]:
    """Yield a list that gets "s" when an exchange is sent, "r" when it is read, "f" and "b" in forward and backward."""
    events: list[str] = []
    all_gather = dist.all_gather
    model.register_forward_pre_hook(lambda *_: events.append("f"))
    next(model.parameters()).register_hook(lambda _: events.append("b"))

    def gather(*args: Any, **kwargs: Any) -> Any:
        events.append("s")
        return Work(all_gather(*args, **kwargs), events)

    with mock.patch.object(dist, "all_gather", gather):
        yield events


# --- cases


def exchange(callback: bool | None, log_steps: Any = STEPS) -> str:
    """Return the events of a run in their order; a callback may or may not request something in a step."""
    model = t16(dtype=torch.float32)
    callbacks = [] if callback is None else [Watches(callback)]
    trainer = AccelerateTrainer(
        model, rows(16 * STEPS, torch.float32), epochs=1, batch_size=8, progress_bar=False, log_steps=log_steps,
        loss_fn=F.mse_loss, callbacks=callbacks,
    )  # fmt: skip
    with recorded(model) as events:
        trainer.train()
    return "".join(events)


def exchange_all(backend: str) -> dict[str, Any]:
    kinds = {"plain": exchange(None), "quiet": exchange(False), "asking": exchange(True), "timed": exchange(None, "1h")}
    trainer = StopsInStep(
        t16(dtype=torch.float32), rows(16 * STEPS, torch.float32), epochs=1, batch_size=8, progress_bar=False,
        loss_fn=F.mse_loss,
    )  # fmt: skip
    metrics = trainer.train()
    return {**kinds, "stop": [trainer.progress.step, metrics["stop_reason"]]}


# --- loggers


class Lines(GeneralTracker):
    """Writes the losses that it gets into a file of each process."""

    name = "lines"
    requires_logging_directory = False

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def tracker(self) -> Path:
        return self.path

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{step} {name}\n" for name in values if name.endswith("/loss"))

    def state_dict(self) -> dict[str, Any]:
        return {"path": str(self.path)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.path = Path(state["path"])


def train_logged(backend: str, folder: str, stop: int = 0, watched: bool = True) -> dict[str, Any]:
    """Train 6 steps with two loggers, stopped after a step, or resumed from there."""
    lines = Path(folder) / f"lines-{os.environ['RANK']}"
    Path(folder).mkdir(exist_ok=True)
    trainer = make_trainer(
        backend, KeyedModel(), Keyed(), Keyed(8), max_steps=6, batch_size=2, log_steps=2, eval_steps=3, save_steps=100,
        save_dir=f"{folder}/run", loggers=["csv", Lines(lines)] if watched else None, callbacks=[StopAt(stop)],
        load_best_at_end=False,
    )  # fmt: skip
    trainer.train(resume_from="auto")
    trainer.evaluate()
    return {"tensors": trainer.backend.model_tensors()}


# --- tests


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> Any:
    jobs = [
        Job(f"{backend}-{watched}", backend, "test_events:train_watched", {"watched": watched})
        for backend in sorted(asked_for(request, "backend", test="test_events"))
        for watched in (True, False)
    ]
    jobs.append(Job("exchanges", "ddp", "test_events:exchange_all"))
    for backend in ("ddp", "hf2"):
        runs: dict[str, Any] = {"cut": {"stop": 4}, "resumed": {}, "plain": {"watched": False}}
        for name, options in runs.items():
            place = str(folder / (f"{backend}-plain" if name == "plain" else backend))
            jobs.append(Job(f"{backend}-{name}", backend, "test_events:train_logged", {"folder": place, **options}))
    return sound(launch_all(jobs, folder / "launch"))


@pytest.mark.parametrize("backend", thinned(["ddp", "fsdp", "hf2", "zero2"], ["fsdp", "hf2"]))
def test_events_in_steps_match_on_all_ranks(results: Any, backend: str) -> None:
    """A stop on one rank ends all of them, and no callback changes the weights; DeepSpeed has no events of clipping."""
    clipping = [] if backend == "zero2" else ["before_clip", "after_clip"]
    step = ["data_fetched", "step_start", *BATCH * 2, *clipping, *UPDATE]
    for watched, plain in zip(results[f"{backend}-True"], results[f"{backend}-False"], strict=True):
        assert watched["step"] == plain["step"] == 3
        assert watched["events"] == ["train_start", "epoch_start", *step * 3, "epoch_end", "log", "train_end"]
        assert gap(watched["tensors"], plain["tensors"]) == 0
    assert [rank["failures"] for rank in results[f"{backend}-True"]] == [0, 6]


@pytest.mark.parametrize(
    ("kind", "order"), [("plain", "sfbr"), ("quiet", "sfbr"), ("asking", "fbsr"), ("timed", "fbsr")]
)
def test_exchange_overlaps_with_steps_without_requests(results: Any, kind: str, order: str) -> None:
    """Each letter is one of the exchange and the passes of a step."""
    for rank in results["exchanges"]:
        assert order * (STEPS - 3) in rank[kind]


def test_custom_trainer_may_stop_in_the_middle_of_a_step(results: Any) -> None:
    assert [rank["stop"] for rank in results["exchanges"]] == [[5, "requested"]] * 2


@pytest.mark.parametrize("backend", ["ddp", "hf2"])
def test_loggers_write_each_step_once_on_main_rank(results: Any, folder: Path, backend: str) -> None:
    """Over a resume too; the weights are those of a run without loggers."""
    for watched, plain in zip(results[f"{backend}-resumed"], results[f"{backend}-plain"], strict=True):
        assert gap(watched["tensors"], plain["tensors"]) == 0
    folder /= backend
    lines = (folder / "lines-0").read_text().splitlines()
    assert lines == ["2 train/loss", "3 eval/loss", "4 train/loss", "6 train/loss", "6 eval/loss"]
    assert not (folder / "lines-1").exists()
    with (folder / "run" / "metrics.csv").open() as file:
        rows = [(row["kind"], row["step"]) for row in csv.DictReader(file)]
    assert rows == [("train", "2"), ("eval", "3"), ("train", "4"), ("train", "6"), ("eval", "6")]
    assert json.loads((folder / "run" / "tracking-lines.json").read_text())["sent"]["train"][0] == 6
