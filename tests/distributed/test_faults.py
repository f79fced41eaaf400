"""Faults of one process: all end by themselves, and each one reports which one failed and how."""

import datetime
import itertools
import math
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from backends import Jobs, asked_for, launch_all, make_trainer
from counting import Streamed
from forking import Case, Found, Outcome, by_name, case_folder, current_rank, mark, play, wait_for_other
from marks import thinned
from recipes import callback, fit, rows, subscribe, t16
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from omnitrain import Callback, Event
from omnitrain.checkpoint.store import Store
from omnitrain.core.files import FileSystem
from omnitrain.distributed import watchdog
from omnitrain.trainer import feed


def make(wrapping: str = "ddp", model: nn.Module | None = None, train: Any = None, **options: Any) -> Any:
    """Return a trainer for 8 steps an epoch; a rank that is stuck in a collective is ended sooner than in a run."""
    watchdog.GRACE_S, watchdog.POLL_INTERVAL = 1.0, datetime.timedelta(seconds=0.5)
    defaults: dict[str, Any] = {"epochs": 2, "loss_fn": F.mse_loss, "learning_rate": 0.01, "log_steps": 10}
    if "train_loader" not in options:
        defaults |= {"batch_size": 4, "train_dataset": rows(64, torch.float32) if train is None else train}
    return make_trainer(wrapping, model or t16(dtype=torch.float32), **{**defaults, **options})


def boom(*_: Any) -> None:
    mark()
    raise ValueError("boom")


# --- an error on one process


def exit_after_step_3(trainer: Any) -> None:
    if trainer.progress.step == 3:
        mark()
        sys.exit(7)


class Rows(TensorDataset):
    """Rows of which one cannot be read."""

    def __init__(self, bad: int) -> None:
        super().__init__(*rows(64, torch.float32).tensors)
        self.bad = bad

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            boom()
        return super().__getitem__(index)


def classes(has_error: bool) -> TensorDataset:
    """Rows of three classes, of which sample 13 has another label: in step 2, on rank 1."""
    labels = torch.arange(32) % 3
    return TensorDataset(torch.randn(32, 4), labels.index_fill(0, torch.tensor(13), 7) if has_error else labels)


def train_and_fail(
    where: str, rank: int = 1, wrapping: str = "ddp", lives_on: bool = False, saves: bool = False,
    short_step: float = 0.0, **options: Any,
) -> None:  # fmt: skip
    """Train with a fault on one process, which may catch its error and live on."""
    feed._SHORT_STEP = short_step
    numbers, is_bad = itertools.count(), current_rank() == rank
    kind, _, detail = where.partition(":")

    def loss(output: Any, target: Any) -> torch.Tensor:
        if is_bad and (next(numbers) == 3 if kind == "loss" else not torch.is_grad_enabled()):
            boom()
        return F.mse_loss(output, target)

    evaluated = {"eval_dataset": rows(16, torch.float32), "eval_steps": 3}
    options |= {"save_dir": case_folder() / "run", "save_steps": 2} if saves else {}
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "loss": lambda: {"loss_fn": loss},
        "item": lambda: {"train": Rows(int(detail)), "shuffle": False},
        "callback": lambda: {**evaluated, "callbacks": [callback(**{f"on_{detail}": boom})] if is_bad else []},
        "metric": lambda: {**evaluated, "compute_metrics": lambda prediction: boom(), "sanity": False},
        "evaluation": lambda: {**evaluated, "loss_fn": loss},
        "exit": lambda: {"callbacks": [callback(on_step_end=exit_after_step_3)] if is_bad else []},
        "label": lambda: {
            "model": nn.Sequential(nn.Linear(4, 3)), "loss_fn": F.cross_entropy, "train": classes(not detail),
            "shuffle": False, **({"eval_dataset": classes(True), "eval_steps": 2} if detail else {}),
        },
    }  # fmt: skip
    options |= kinds.get(kind, dict)()
    if kind == "writing" and is_bad:
        write = FileSystem.write
        FileSystem.write = lambda fs, path, content: (  # type: ignore[method-assign, assignment]
            boom() if path.suffix == ".safetensors" else write(fs, path, content)
        )
    trainer = make(wrapping, **options)
    try:
        if kind == "predict":
            trainer.predict(Rows(int(detail)))
        else:
            trainer.train()
        if kind == "between":
            if is_bad:
                boom()
            trainer.evaluate(rows(16, torch.float32))
    except Exception:
        if not (lives_on and is_bad):
            raise
        wait_for_other()


def fail(where: str, name: str = "", hosted: bool = False, **options: Any) -> Case:
    return Case(name or where, "test_faults:train_and_fail", {"where": where, **options}, hosted)


AHEAD, FAR_AHEAD = "item of the step after a save", "item of a step that shares its exchange"
FAILING = by_name([
    fail("loss"),
    fail("item:45", "item of a worker process", num_workers=2),
    fail("item:21", AHEAD, saves=True),
    fail("item:61", FAR_AHEAD, saves=True, short_step=math.inf),
    fail("callback:save_end", saves=True),
    fail("metric", rank=0),
    fail("predict:13"),
    fail("between"),
    fail("exit", "exit of rank 0, with the store", rank=0, hosted=True),
    fail("loss", "loss of FSDP, lives on", lives_on=True, wrapping="fsdp"),
    fail("evaluation", "evaluation, lives on", lives_on=True),
    fail("loss", "loss of HFTrainer", wrapping="hf"),
    fail("writing", "writing of FSDP", rank=0, saves=True, wrapping="fsdp"),
])  # fmt: skip
LABELS = by_name([
    fail("label", "label of FSDP", wrapping="fsdp"), fail("label", "label of HFTrainer", wrapping="hf"),
    fail("label:evaluation"),
])  # fmt: skip


# --- a call on one process only


def call_on_one_rank(what: str, when: str, rank: int, wrapping: str = "ddp") -> None:
    """Make a call that concerns all processes on one of them, before, in or after the training."""
    data = rows(16, torch.float32)
    arguments = {"save_model": [case_folder() / "model"], "evaluate": [data]}

    def call(moment: str) -> None:
        if moment == when and trainer.rank == rank:
            mark()
            if what == "AccelerateTrainer":
                make(wrapping)
            else:
                getattr(trainer, what)(*arguments.get(what, []))

    calls = [callback(on_step_end=lambda trainer: call(f"step {trainer.progress.step}"))] if "step" in when else []
    trainer = make(wrapping, callbacks=calls, save_dir=case_folder() / "run", save_steps=2)
    call("before")
    trainer.train()
    call("after")


def solo(what: str, when: str, rank: int, hosted: bool = False, **options: Any) -> Case:
    options = {"what": what, "when": when, "rank": rank, **options}
    return Case(f"{what} on rank {rank} {when}", "test_faults:call_on_one_rank", options, hosted)


CALLS = by_name([
    solo("save_model", "after", 1, hosted=True), solo("evaluate", "before", 1),
    solo("save_checkpoint", "step 3", 0), solo("AccelerateTrainer", "after", 0),
    solo("save_model", "step 3", 0, wrapping="fsdp"),
])  # fmt: skip


# --- the end of the program


def end(how: str) -> None:
    """End a program in order, in one of several ways."""
    # A process at the end waits so long for the others; where they are at the end too, it does not wait at all.
    watchdog.EXIT_WAIT_S = 0.5 if how == "late" else math.inf
    trainer = fit(make())
    if how.startswith("destroy"):
        dist.destroy_process_group()
    if how == "destroy and train":
        dist.init_process_group("gloo")
        make().train()
    if how == "late" and trainer.rank == 0:
        wait_for_other()
    mark()


ENDS = {how: Case(how, "test_faults:end", {"how": how}) for how in ("destroy and train", "late")}
CASES = FAILING | LABELS | CALLS | ENDS


# --- jobs: errors of all processes alike


def survive(backend: str) -> dict[str, Any]:
    """Raise the same errors on both processes, one a little later, and train to the end all the same."""
    errors = []
    watchdog.ERROR_SYNC_S = 600.0  # both are to come, however late one of them is

    def fail_late(trainer: Any) -> None:
        if trainer.progress.step == 3:
            time.sleep(0.3 * trainer.rank)
            raise ValueError("of both")

    def diverge(output: Any, target: Any) -> torch.Tensor:
        diverges = torch.is_grad_enabled() and next(numbers) == 3
        return F.mse_loss(output, target) * (float("nan") if diverges else 1.0)

    numbers = itertools.count()
    trainer: Any = make(backend, loss_fn=diverge, save_dir=case_folder() / f"survive-{backend}")
    attempts: list[Callable[[], object]] = [
        trainer.train,
        lambda: trainer.train(resume_from=case_folder() / "nothing"),
        lambda: trainer.train(resume_from="auto", allow_change={"nothing"}),
        lambda: make(backend, callbacks=[callback(on_step_start=fail_late)]).train(),
        lambda: make(backend, model=t16(), optimizer="none"),
        lambda: make(backend, train=Rows(5 if trainer.rank else 2), shuffle=False).train(),
    ]
    for attempt in attempts:
        try:
            attempt()
        except Exception as error:
            errors.append(type(error).__name__)
    trainer.train()
    return {"errors": errors, "step": trainer.progress.step, "loss": trainer.evaluate(rows(9, torch.float32))}


# --- jobs: requests of one process


class Asks(Callback):
    """Makes requests after steps, on the second process only."""

    order = 11

    def __init__(self, requests: dict[str, list[str]]) -> None:
        self.requests, self.events = requests, list[str]()

    def ask(self, event: Event, trainer: Any, *details: Any) -> None:
        self.events.append(f"{event} {trainer.progress.step}")
        for request in self.requests.get(self.events[-1], []):
            if trainer.rank == 1:
                getattr(trainer, request)()


class AsksInSteps(Asks):
    """Makes requests in steps, too."""


subscribe(Asks, Asks.ask, (Event.EVAL_END, Event.SAVE_END, Event.EPOCH_END, Event.LOG))
subscribe(AsksInSteps, Asks.ask, (Event.STEP_END,))


def make_asking(backend: str, asks: Asks, folder: str, log_steps: int) -> Any:
    return make(
        backend, callbacks=[asks], save_dir=case_folder() / folder, save_steps=1000, log_steps=log_steps, keep_best=0,
        eval_dataset=rows(16, torch.float32), eval_steps=1000,
    )  # fmt: skip


def ask(backend: str) -> dict[str, Any]:
    """Make every request at every event, on one process."""
    asks = AsksInSteps({
        "step_end 2": ["request_save"], "step_end 3": ["request_evaluate"], "step_end 5": ["request_log"],
        "step_end 15": ["stop"], "eval_end 3": ["request_save"], "save_end 2": ["request_evaluate"],
        "epoch_end 8": ["request_save", "request_evaluate"], "log 12": ["request_save", "request_evaluate"],
    })  # fmt: skip
    trainer = make_asking(backend, asks, f"ask-{backend}", 4)
    metrics = trainer.train()
    return {"events": asks.events, "reason": metrics["stop_reason"], "step": trainer.progress.step}


def ask_between_steps(backend: str) -> dict[str, list[str]]:
    """Return the events of a run in which each step has an exchange, and of one in which short steps share it."""
    runs = {}
    for name, short_step in {"single": 0.0, "shared": math.inf}.items():
        asks = Asks({"log 3": ["request_save"], "save_end 4": ["request_evaluate"], "log 9": ["stop"]})
        with mock.patch.object(feed, "_SHORT_STEP", short_step):
            make_asking(backend, asks, f"ask-between-{name}", 3).train()
        runs[name] = asks.events
    return runs


def stop_at_any_moment(backend: str) -> dict[str, Any]:
    """Stop six runs from another thread of one process, after a random batch of steps, evaluations and epochs."""
    generator, ends = random.Random(current_rank()), list[tuple[str, int]]()

    def start_thread(trainer: Any) -> None:
        if trainer.rank == len(ends) % 2:
            threading.Thread(target=stop_after, args=(trainer, len(passes) + generator.randint(1, 150))).start()

    def stop_after(trainer: Any, count: int) -> None:
        while len(passes) < count:
            time.sleep(0.0005)
        trainer.stop()

    data, model, passes = rows(70, torch.float32), t16(dtype=torch.float32), list[nn.Module]()
    model.register_forward_hook(lambda module, *_: passes.append(module))
    starts = [callback(on_train_start=start_thread, order=99)]
    trainer: Any = make(model=model, eval_dataset=data, eval_steps=3, epochs=1000, batch_size=1, callbacks=starts)
    for _ in range(6):
        metrics = trainer.train()
        ends.append((metrics["stop_reason"], trainer.progress.step))
    return {"ends": ends}


# --- jobs: data of unequal length


def train_unevenly(backend: str, lengths: list[int], loader: bool, accumulation: int) -> dict[str, Any]:
    """Train and evaluate on data of which the processes see parts of unequal length."""
    samples: Any = list(zip(*rows(64, torch.float32)[: lengths[current_rank()]], strict=True))
    data: dict[str, Any] = {"train": Streamed(samples), "eval_dataset": Streamed(samples), "batch_size": 2}
    if loader:
        data = {name: DataLoader(samples, batch_size=2) for name in ("train_loader", "eval_loader")}
    trainer: Any = make(backend, **data, gradient_accumulation_steps=accumulation)
    metrics = trainer.train()
    return {"step": trainer.progress.step, "samples": trainer.progress.samples, "best": metrics["best_valid"]}


UNEVEN = {
    "streams": ("ddp", [9, 30], False, 1, 40, 16),
    "streams of FSDP": ("fsdp", [30, 9], False, 3, 38, 6),
    "loaders": ("ddp", [9, 50], True, 1, 58, 24),
}
"""Backend, length of the data of each process, whether they come from a loader, and accumulated batches of a step; what
two epochs have of samples and steps."""


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    names = asked_for(request, "name")
    return play([case for name, case in CASES.items() if name in names], folder / "cases", at_once=8)


@pytest.fixture(scope="module")
def results(folder: Path) -> Found[list[dict[str, Any]]]:
    jobs = Jobs()
    jobs.add("stop", "ddp", stop_at_any_moment)
    jobs.add("ask between steps", "ddp", ask_between_steps)
    for backend in ("ddp", "fsdp"):
        jobs.add(f"survive {backend}", backend, survive)
        jobs.add(f"ask {backend}", backend, ask)
    for name, (backend, lengths, loader, accumulation, *_) in UNEVEN.items():
        jobs.add(name, backend, train_unevenly, lengths=lengths, loader=loader, accumulation=accumulation)
    jobs.add("empty", "fsdp", train_unevenly, lengths=[13, 0], loader=False, accumulation=3)
    return launch_all(jobs, folder / "jobs")


def result_of(results: Found[list[dict[str, Any]]], name: str) -> dict[str, Any]:
    """Return the result of a job, which must be the same on both processes."""
    first, second = results[name]
    assert first == second and "error" not in first, results[name]
    return first


def test_waits_of_a_failed_process_add_up_to_seconds() -> None:
    waits = (watchdog.ERROR_SYNC_S, watchdog.GRACE_S, watchdog.EXIT_WAIT_S)
    assert sum(waits) + 3 * watchdog.POLL_INTERVAL.total_seconds() < 15


@pytest.mark.parametrize("name", thinned(FAILING, list(FAILING)[:10]))
def test_error_on_one_rank_ends_all_with_its_reason(
    name: str, outcomes: dict[str, list[Outcome]], folder: Path
) -> None:
    """Also if the rank that failed lives on until the other one has ended."""
    where, rank = CASES[name].options["where"], CASES[name].options.get("rank", 1)
    failed, other = outcomes[name][rank], outcomes[name][1 - rank]
    lives_on = "lives_on" in CASES[name].options
    text = "SystemExit: 7" if where == "exit" else "ValueError: boom"
    assert failed.code == (0 if lives_on else 7 if where == "exit" else 1), failed.output
    assert other.code == 1, other.output
    assert lives_on or where == "exit" or text in failed.output
    if where in ("writing", "metric"):  # errors that the main process has for all
        assert "Raised on rank 0, in " in other.output and other.output.count("ValueError: boom") == 2
    elif where == "between":  # outside of all calls: it is known that it has gone, and not why
        assert "DistributedError: The processes of the run are at different places" in other.output
        assert f"rank {rank}: the end of the program" in other.output
    else:
        call = "predict()" if where.startswith("predict") else "train()"
        assert f"DistributedError: Rank {rank} failed in {call}, and so the run ends on all 2" in other.output
        assert f"--- rank {rank}\nTraceback (most recent call last)" in other.output and text in other.output
    saved = {AHEAD: ["checkpoint-2"], FAR_AHEAD: ["checkpoint-2", "checkpoint-4", "checkpoint-6"]}
    if name in saved:  # reading ahead costs nothing of the steps before
        checkpoints = Store(folder / "cases" / name / "run").checkpoints()
        assert sorted(path.name for path in checkpoints) == saved[name]


@pytest.mark.parametrize("name", LABELS)
def test_error_on_one_rank_reports_its_samples_on_all(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    # a forward pass over sharded weights needs all ranks: there the samples are not run again
    samples = "samples 12, 13, 14, 15" if name == "label of FSDP" else "sample 13"
    dataset, place = ("evaluation", "the evaluation after step 2") if ":" in name else ("training", "step 2")
    for outcome in outcomes[name]:
        assert outcome.code == 1, outcome.output
        assert f"Raised for {samples} of the {dataset} set" in outcome.output, outcome.output
        assert f"Where: {place} (epoch 1), rank 1." in outcome.output
    assert "IndexError: Target 7 is out of bounds." in outcomes[name][1].output


@pytest.mark.parametrize("name", thinned(CALLS, list(CALLS)[:4]))
def test_call_on_one_rank_only_is_an_error_on_all(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    what, rank = CASES[name].options["what"], CASES[name].options["rank"]
    for outcome in outcomes[name]:
        assert outcome.code == 1, outcome.output
        (message,) = re.findall("DistributedError: (The processes of the run are at different.*)", outcome.output)[-1:]
        assert f"rank {rank}: {what}()" in message and f"rank {1 - rank}: " in message


@pytest.mark.parametrize("name", ENDS)
def test_end_of_the_program_is_silent(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes[name]:
        lines = [line for line in outcome.output.splitlines() if not line.startswith("[Gloo] Rank ")]  # PyTorch 2.8
        assert (outcome.code, lines) == (0, [])


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_errors_common_to_all_ranks_leave_them_able_to_train(backend: str, results: Any) -> None:
    result = result_of(results, f"survive {backend}")
    errors = ["NonFiniteError", "CheckpointError", "ConfigError", "ValueError", "ConfigError", "ValueError"]
    assert (result["errors"], result["step"]) == (errors, 16)


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_requests_of_one_rank_act_on_all(backend: str, results: Any) -> None:
    result = result_of(results, f"ask {backend}")
    assert (result["step"], result["reason"]) == (15, "requested")
    events = [event for event in result["events"] if not event.startswith(("step_end", "log"))]
    assert events == [
        *("save_end 2", "eval_end 3", "save_end 3"),  # the evaluation requested in save_end 2 comes at step 3
        *("epoch_end 8", "eval_end 8", "save_end 8"),
        *("eval_end 13", "save_end 13"),  # requested in the log of step 12
        *("epoch_end 15", "save_end 15"),
    ]


def test_requests_between_short_steps_act_in_the_next_one(results: Any) -> None:
    runs = result_of(results, "ask between steps")
    assert runs["single"] == runs["shared"]
    events = [event for event in runs["shared"] if event.startswith(("save_end", "eval_end"))]
    assert events == ["save_end 4", "eval_end 5", "save_end 10"]


def test_stop_from_a_thread_of_one_rank_ends_all_at_one_step(results: Any) -> None:
    ends = result_of(results, "stop")["ends"]
    assert len(ends) == 6 and {reason for reason, _ in ends} == {"requested"}
    assert len({step for _, step in ends}) > 2


@pytest.mark.parametrize("case", UNEVEN)
def test_uneven_data_train_to_the_end_of_the_longest(case: str, results: Any) -> None:
    """A turn of both processes in which neither has samples is no step."""
    *_, samples, steps = UNEVEN[case]
    result = result_of(results, case)
    assert (result["samples"], result["step"]) == (samples, steps)


def test_data_that_are_empty_on_one_rank_are_an_error(results: Any) -> None:
    for result in results["empty"]:
        assert result["error"] == "DataError" and "The training data are empty on rank 1" in result["message"]
