"""Events, exchanges and loggers on two ranks, callbacks that fail on one of them, and watchers, which change no bit."""

import contextlib
import csv
import dataclasses
import gc
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.tracking import GeneralTracker
from backends import DTYPES, Jobs, asked_for, dtype_of, gap, launch_all, make_trainer, sound, tensors_of
from forking import current_rank
from marks import thinned
from recipes import Everything, Keyed, KeyedModel, Starving, StopAt, Trace, callback, fit, rows, t16
from tiny import Tokens, llama
from watchers import TRACES, outcome, run

from omnitrain import AccelerateTrainer, Callback, ConfigError, Distributions, Periodic, Preview
from omnitrain.trainer import feed
from omnitrain.trainer.out_of_memory import shortage_of

STEPS = 12
BATCH = ["batch_start", "after_forward", "after_loss", "after_backward", "batch_end"]
UPDATE = ["before_optimizer_step", "after_optimizer_step", "before_zero_grad", "after_zero_grad", "step_end"]


class ActsOnRankOne(Callback):
    """Fails in each micro-batch of the second rank, which only warns there; stops in its third step."""

    on_error = "warn"

    def on_batch_start(self, trainer: Any, batch: Any, number: int) -> None:
        if trainer.rank == 1:
            raise RuntimeError("boom")

    def on_after_loss(self, trainer: Any, loss: Any) -> None:
        if trainer.rank == 1 and trainer.progress.step == 2:
            trainer.stop()


def train_watched(backend: str, watched: bool) -> dict[str, Any]:
    everything, dtype = Everything(), DTYPES[dtype_of(backend)]
    trainer = fit(make_trainer(
        backend, t16(dtype=dtype), rows(40, dtype), batch_size=2, gradient_accumulation_steps=2, learning_rate=0.05,
        loss_fn=F.mse_loss, log_steps=100, max_steps=9 if watched else 3,
        callbacks=[everything, ActsOnRankOne()] if watched else [],
    ))  # fmt: skip
    failures = sum(listener.failures for listener in trainer.lifecycle.listeners)
    tensors = tensors_of(trainer)
    return {"events": everything.events, "failures": failures, "step": trainer.progress.step, "tensors": tensors}


# --- exchanges


class StopsInStep(AccelerateTrainer):
    """A custom trainer, whose rank 1 ends the run in the middle of step 5."""

    def _apply_update(self) -> bool:
        if self.rank == 1 and self.progress.step + 1 == 5:
            self.stop()
        return super()._apply_update()


def train_steps(trainer_class: type[AccelerateTrainer] = AccelerateTrainer, **options: Any) -> Any:
    """Return a trainer for some steps of one micro-batch each."""
    return trainer_class(
        t16(dtype=torch.float32), rows(16 * STEPS, torch.float32), epochs=1, batch_size=8, progress_bar=False,
        loss_fn=F.mse_loss, **options,
    )  # fmt: skip


@contextlib.contextmanager
def recorded(model: torch.nn.Module) -> Iterator[list[str]]:
    """Yield a list that gets "s" when an exchange is sent, "r" when it is read, "f" and "b" in forward and backward."""
    events: list[str] = []
    all_gather = dist.all_gather
    model.register_forward_pre_hook(lambda *_: events.append("f"))
    next(model.parameters()).register_hook(lambda _: events.append("b"))

    def gather(*args: Any, **kwargs: Any) -> Any:
        events.append("s")
        work, numbers = all_gather(*args, **kwargs), itertools.count()

        def wait(*args: Any) -> Any:
            if next(numbers) == 0:
                events.append("r")
            return work.wait(*args)

        return SimpleNamespace(wait=wait)

    with mock.patch.object(dist, "all_gather", gather):
        yield events


def exchange(asks_alone: bool | None, log_steps: Any = STEPS, short_step: float = 0.0) -> str:
    """Return the events of a run in their order; its callback, if any, may or may not request something in a step."""
    watches = [] if asks_alone is None else [callback(on_step_end=lambda trainer: None, asks_alone=asks_alone)]
    trainer = train_steps(log_steps=log_steps, callbacks=watches)
    with recorded(trainer.get_model()) as events, mock.patch.object(feed, "_SHORT_STEP", short_step):
        trainer.train()
    return "".join(events)


def exchange_all(backend: str) -> dict[str, Any]:
    kinds = {
        "plain": exchange(None), "quiet": exchange(False), "asking": exchange(True, short_step=math.inf),
        "timed": exchange(None, "1h", math.inf), "short": exchange(None, short_step=math.inf),
        "logged": exchange(False, 4, math.inf),
    }  # fmt: skip
    trainer = train_steps(StopsInStep)
    metrics = trainer.train()
    return {**kinds, "stop": [trainer.progress.step, metrics["stop_reason"]]}


# --- loggers


class Lines(GeneralTracker):
    """Writes the losses that it gets into a file of each process."""

    name = "lines"
    requires_logging_directory = False
    tracker = None

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{step} {name}\n" for name in values if name.endswith("/loss"))


def train_logged(backend: str, folder: str, stop: int = 0, watched: bool = True) -> dict[str, Any]:
    """Train 6 steps with two loggers, stopped after a step, or resumed from there."""
    Path(folder).mkdir(exist_ok=True)
    loggers = ["csv", Lines(Path(folder) / f"lines-{current_rank()}")] if watched else None
    trainer = make_trainer(
        backend, KeyedModel(), Keyed(), Keyed(8), max_steps=6, batch_size=2, log_steps=2, eval_steps=3, save_steps=100,
        save_dir=f"{folder}/run", loggers=loggers, callbacks=[StopAt(stop)], load_best_at_end=False,
    )  # fmt: skip
    trainer.train(resume_from="auto")
    trainer.evaluate()
    return {"tensors": tensors_of(trainer)}


# --- watchers


def train_with_watchers(backend: str, folder: str | None = None) -> dict[str, Any]:
    """Train, with all watchers if there is a folder; return the outcome, and the steps that collect garbage."""
    trainers, collected = [], list[int]()

    def make(*args: Any, **options: Any) -> Any:
        trainers.append(make_trainer(backend, *args, **options))
        return trainers[-1]

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2 and trainers:
            collected.append(trainers[-1].progress.step)

    gc.callbacks.append(note)
    trainer = run(make, folder if folder is None else Path(folder))
    gc.callbacks.remove(note)
    return {**outcome(trainer), "collected": collected}


def run_out_of_memory(backend: str) -> dict[str, Any]:
    """Train until memory runs out in the third step, on both ranks."""
    dtype = torch.float32 if backend == "fsdp" else torch.float64
    model = Starving(room=2, start=2).to(dtype)
    trainer = make_trainer(backend, model, rows(64, dtype), loss_fn=F.mse_loss, batch_size=4)
    try:
        trainer.train()
    except torch.OutOfMemoryError as error:
        shortage = shortage_of(trainer, "training")
        return {"notes": "\n".join(error.__notes__), **dataclasses.asdict(shortage)}
    raise AssertionError("there was room")


def reports_of(trace: Trace) -> dict[str, Any]:
    values = {name: value for _, report in trace.reports for name, value in report.items()}
    return {name: value if isinstance(value, str) else list(value.counts) for name, value in values.items()}


def measure(backend: str) -> dict[str, Any]:
    """Measure a model whose weights stay equal, on the same samples in the same step on any number of ranks."""
    trace, everything = Trace(), ("weights", "gradients", "updates", "activations")
    make_trainer(
        backend, t16(), rows(16), batch_size=4 if backend == "fsdp" else 8, epochs=1, loss_fn=F.mse_loss,
        learning_rate=1e-30, weight_decay=0.0,
        callbacks=[trace, Distributions(of=everything, every=2, bins=8, modules=r"^\d$")],
    ).train()  # fmt: skip
    unrounded = {name: value for name, value in reports_of(trace).items() if not name.startswith("updates")}
    row = {name: value for logs in trace.logs for name, value in logs.items() if "/" in name}
    return {"row": row, "reports": unrounded}


def generate(backend: str) -> dict[str, Any]:
    """Generate with sharded weights, next to a function that fails on one rank only."""
    trace, error = Trace(), ""

    def fail(trainer: Any) -> None:
        if trainer.rank == 1:
            raise ValueError("only on the second rank")

    previews = [Preview([[5, 6], [7, 8, 9]], 2, 4, do_sample=False, on_error="raise"), Periodic(fail, 1)]
    options: dict[str, Any] = {"batch_size": 4, "max_steps": 2, "learning_rate": 1e-30, "weight_decay": 0.0}
    if backend == "zero3":
        try:
            make_trainer(backend, llama().float(), Tokens(16), callbacks=[Distributions()], **options).train()
        except ConfigError as raised:
            error = str(raised)
    trainer = fit(make_trainer(backend, llama().float(), Tokens(16), callbacks=[trace, *previews], **options))
    return {"step": trainer.progress.step, "reports": reports_of(trace), "weights error": error}


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> Any:
    jobs = Jobs()
    for backend in sorted(asked_for(request, "backend", test="test_events")):
        for watched in (True, False):
            jobs.add(f"{backend}-{watched}", backend, train_watched, watched=watched)
    jobs.add("exchanges", "ddp", exchange_all)
    for backend in ("ddp", "hf2"):
        jobs.add(f"{backend}-cut", backend, train_logged, folder=str(folder / backend), stop=4)
        jobs.add(f"{backend}-resumed", backend, train_logged, folder=str(folder / backend))
        jobs.add(f"{backend}-plain", backend, train_logged, folder=str(folder / f"{backend}-plain"), watched=False)
    for backend in sorted(asked_for(request, "backend", test="test_watchers")):
        jobs.add(f"{backend} bare", backend, train_with_watchers)
        jobs.add(f"{backend} watched", backend, train_with_watchers, folder=str(folder / f"{backend}-watched"))
    for test, function in {"memory": run_out_of_memory, "distributions": measure, "preview": generate}.items():
        for backend in sorted(asked_for(request, "backend", test=f"test_{test}")):
            jobs.add(f"{backend} {test}", backend, function)
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


def test_short_steps_share_an_exchange(results: Any) -> None:
    """The second one is for eight windows; after a log, in which callbacks may make requests, there is another."""
    for rank in results["exchanges"]:
        assert "sfbr" * 2 + "fb" * 7 + "sfbr" + "fb" * 2 in rank["short"]
        assert "sfbr" * 2 + "fb" * 2 + "s" in rank["logged"] and "sfbr" + "fb" * 3 + "s" in rank["logged"]


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
    rows = csv.DictReader((folder / "run" / "metrics.csv").read_text().splitlines())
    assert [f"{row['step']} {row['kind']}/loss" for row in rows] == lines
    assert json.loads((folder / "run" / "tracking-lines.json").read_text())["sent"]["train"][0] == 6


@pytest.mark.parametrize("backend", thinned(["ddp", "fsdp", "hf2"], ["fsdp"]))
def test_watchers_change_no_bit_on_two_ranks(results: Any, folder: Path, backend: str) -> None:
    for watched, bare in zip(results[f"{backend} watched"], results[f"{backend} bare"], strict=True):
        assert watched["history"] == bare["history"] and gap(watched["tensors"], bare["tensors"]) == 0
        assert [step for step in watched["collected"] if 0 < step < 4] == [2]  # on both ranks
    watched_folder = folder / f"{backend}-watched"
    for trace in TRACES:
        assert list(watched_folder.glob(trace)), trace
    traces = sorted(path.name.partition("-")[0] for path in (watched_folder / "profile").iterdir())
    assert traces == ["rank0", "rank1"]
    (start,) = json.loads((watched_folder / "run" / "run.json").read_text())["starts"]
    assert start["processes"] == 2 and sum(sum(host.values()) for host in start["hosts"].values()) == 2


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_memory_error_counts_the_part_of_its_rank(results: Any, backend: str) -> None:
    is_sharded = backend == "fsdp"
    trained = sum(parameter.numel() for parameter in Starving().parameters()) * (4 if is_sharded else 8)
    shortages = results[f"{backend} memory"]
    total = sum(shortage["state"] for shortage in shortages)
    assert total == pytest.approx(2 * trained * (1 if is_sharded else 2), rel=0.1)
    for shortage in shortages:
        assert "Memory ran out in training" in shortage["notes"]
        assert "microbatch_size=2 (instead of 4" in shortage["notes"]
        assert (shortage["world_size"], shortage["is_sharded"]) == (2, is_sharded)


@pytest.mark.parametrize("backend", ["fsdp"])
def test_distributions_of_shards_equal_those_of_one_process(results: Any, backend: str) -> None:
    expected = measure("native")
    for result in results[f"{backend} distributions"]:
        assert result["reports"] == expected["reports"] and result["row"].keys() == expected["row"].keys()
        for name, value in result["row"].items():
            assert value == pytest.approx(expected["row"][name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("backend", thinned(["fsdp", "zero3"], ["fsdp"]))
def test_preview_of_shards_equals_that_of_one_process(results: Any, backend: str) -> None:
    expected = generate("native")["reports"]
    for result in results[f"{backend} preview"]:
        assert (result["step"], result["reports"]) == (2, expected)
        is_unseen = "`of` holds 'weights', which cannot be seen here: ZeRO 3" in result["weights error"]
        assert is_unseen == (backend == "zero3")
