"""No fault of one process leaves another waiting: all end by themselves, and each says which one failed, and how."""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import random
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import asked_for  # noqa: E402
from forking import Case, Found, Outcome, mark, play, wait_for_other  # noqa: E402
from marks import thinned  # noqa: E402
from recipes import rows, t16  # noqa: E402

from omnitrain import AccelerateTrainer, Callback, CheckpointError, distributed  # noqa: E402
from omnitrain.checkpoint import state  # noqa: E402
from omnitrain.checkpoint.store import Store  # noqa: E402
from omnitrain.checkpoint.tensors import whole  # noqa: E402
from omnitrain.run import lifecycle  # noqa: E402

pytestmark = pytest.mark.distributed


def make(wrapping: str = "ddp", model: nn.Module | None = None, train: Any = None, **options: Any) -> AccelerateTrainer:
    """Return a trainer for 8 steps an epoch."""
    if wrapping == "fsdp":
        from accelerate.utils import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    elif wrapping.startswith("zero"):
        options["deepspeed_config"] = {"zero_optimization": {"stage": int(wrapping[-1])}}
    if "train_loader" not in options:
        options["train_dataset"] = rows(64, torch.float32) if train is None else train
    defaults = {"batch_size": 4, "epochs": 2, "loss_fn": F.mse_loss, "learning_rate": 0.01, "progress_bar": False}
    if "train_loader" in options:
        del defaults["batch_size"]
    return AccelerateTrainer(model or t16(dtype=torch.float32), **{**defaults, **options})


def own_rank() -> int:
    return int(os.environ["RANK"])


def boom() -> None:
    mark()
    raise ValueError("boom")


# --- an error on one process


def raising(event: str) -> Callback:
    class Raises(Callback):
        def __init__(self) -> None:
            self.state: dict[str, Any] = {}

    def handler(self: Any, trainer: Any, *details: Any) -> None:
        boom()

    setattr(Raises, f"on_{event}", handler)
    return Raises()


class Snapshot(Callback):
    def state_dict(self) -> dict[str, Any]:
        if self.armed:
            boom()
        return {"a": 1}

    armed = False

    def on_step_end(self, trainer: Any) -> None:
        self.armed = True


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, bad: int) -> None:
        self.x, self.y = rows(64, torch.float32).tensors
        self.bad = bad

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            boom()
        return self.x[index], self.y[index]


class InEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = t16(dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and own_rank() == 1:
            boom()
        return self.body(x)


class Preparing(AccelerateTrainer):
    def _prepare_batch(self, batch: Any) -> Any:
        if self.rank == 1 and self.progress.step == 3:
            boom()
        return super()._prepare_batch(batch)


def train_and_fail(
    where: str, rank: int = 1, wrapping: str = "ddp", lives_on: bool = False, folder: str = "", **options: Any
) -> None:
    """Train with a fault on one process, which may catch its error and live on."""
    calls = itertools.count()
    is_bad = own_rank() == rank
    kind, _, detail = where.partition(":")
    if folder:
        options |= {"save_dir": folder, "save_steps": 2}

    def loss(output: Any, target: Any) -> torch.Tensor:
        if is_bad and next(calls) == 3:
            boom()
        return F.mse_loss(output, target)

    evaluated = {"eval_dataset": rows(16, torch.float32), "eval_steps": 3}
    if kind == "loss":
        options |= {"loss_fn": loss}
    elif kind == "item":
        options |= {"train": Rows(int(detail)), "shuffle": False}
    elif kind == "callback":
        options |= {**evaluated, "log_steps": 2, "callbacks": [raising(detail)] if is_bad else []}
    elif kind == "snapshot":
        options |= {"callbacks": [Snapshot()] if is_bad else []}
    elif kind == "metric":
        options |= {**evaluated, "compute_metrics": lambda prediction: boom(), "sanity": False}
    elif kind == "evaluation":
        options |= {**evaluated, "model": InEvaluation()}
    elif kind == "writing" and is_bad:
        state.save_tensors = lambda *args, **kwargs: boom()  # type: ignore[assignment]
    if kind == "batch":
        trainer: Any = Preparing(
            t16(dtype=torch.float32), rows(64, torch.float32), loss_fn=F.mse_loss, batch_size=4, progress_bar=False
        )
    else:
        trainer = make(wrapping, **options)
    if kind == "exit" and is_bad:
        trainer.lifecycle.register([*trainer.lifecycle.callbacks, Exits()])
    try:
        if kind == "between":
            trainer.train()
            if is_bad:
                boom()
            trainer.evaluate(rows(16, torch.float32))
        elif kind == "predict":
            trainer.predict(Rows(int(detail)))
        else:
            trainer.train()
    except Exception:
        if not (lives_on and is_bad):
            raise
        wait_for_other()


class Exits(Callback):
    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == 3:
            mark()
            sys.exit(7)


def fail(where: str, name: str = "", hosted: bool = False, **options: Any) -> Case:
    return Case(name or f"error in {where}", "test_faults:train_and_fail", {"where": where, **options}, hosted)


EVENTS = (
    "train_start", "epoch_start", "step_start", "before_optimizer_step", "step_end", "log", "eval_start", "eval_end",
    "save_end", "epoch_end", "train_end",
)  # fmt: skip
READ_AHEAD = "error in __getitem__ of the step after a save"
FAILING = [
    fail("loss"),
    fail("loss", "error in loss on rank 0", rank=0),
    fail("loss", "error in loss on rank 0, which has the store", rank=0, hosted=True),
    fail("loss", "error in loss under FSDP", wrapping="fsdp"),
    fail("loss", "error in loss under FSDP on rank 0", wrapping="fsdp", rank=0),
    fail("item:5", "error in __getitem__ of rank 1 in the first batch"),
    fail("item:41", "error in __getitem__ of rank 0", rank=0),
    fail("item:45", "error in __getitem__ of a worker process", num_workers=2),
    fail("item:21", READ_AHEAD, folder="save"),
    *(fail(f"callback:{event}", folder="save") for event in EVENTS),
    fail("callback:step_end", "error in callback:step_end of rank 0", rank=0),
    fail("snapshot", folder="save"),
    fail("writing", rank=0, folder="save"),
    fail("writing", "error in writing under FSDP", rank=0, folder="save", wrapping="fsdp"),
    fail("metric", rank=0),
    fail("evaluation"),
    fail("batch"),
    fail("predict:13", rank=1),
    fail("between"),
    fail("between", "error in between on rank 0", rank=0),
    fail("exit"),
    fail("exit", "exit of rank 0, which has the store", rank=0, hosted=True),
]
ALIKE = [f"error in callback:{event}" for event in ("epoch_start", "before_optimizer_step", "log", "eval_start")] + [
    "error in callback:epoch_end", "error in loss under FSDP on rank 0", "error in between on rank 0", "error in exit",
]  # fmt: skip
"""Those of FAILING that come to the same as others there."""
LIVING_ON = [
    fail("loss", "error in loss, and that process lives on", lives_on=True),
    fail("callback:step_end", "error in a callback of rank 0, which lives on", lives_on=True, rank=0),
    fail("loss", "error in loss under FSDP, and that process lives on", lives_on=True, wrapping="fsdp"),
    fail("evaluation", "error in evaluation, and that process lives on", lives_on=True),
]


# --- a call on one process only


def call_alone(what: str, when: str, rank: int, folder: str, wrapping: str = "ddp") -> None:
    """Make a call that concerns all processes on one of them, before, in or after the training."""
    trainer: Any = None

    def call() -> None:
        mark()
        if what == "save_model":
            trainer.save_model(f"{folder}/model")
        elif what == "load_checkpoint":
            trainer.load_checkpoint("last")
        elif what in ("evaluate", "predict", "test"):
            getattr(trainer, what)(rows(16, torch.float32))
        elif what == "AccelerateTrainer":
            make(wrapping)
        else:
            getattr(trainer, what)()

    class Calls(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == 3 and trainer.rank == rank:
                call()

    inside = [Calls()] if when == "in" else []
    trainer = make(wrapping, callbacks=inside, save_dir=f"{folder}/save", save_steps=2)
    if when == "before" and trainer.rank == rank:
        call()
    if what != "train" or when == "in":
        trainer.train()
    if when == "after" and trainer.rank == rank:
        call()


ALONE = [
    Case(f"{what} on rank {rank} {when}", "test_faults:call_alone", {"what": what, "when": when, "rank": rank})
    for what, when, rank in [
        ("save_model", "before", 0), ("save_model", "in", 0), ("save_model", "after", 0), ("save_model", "after", 1),
        ("evaluate", "before", 1), ("evaluate", "in", 0), ("evaluate", "after", 0),
        ("predict", "in", 0), ("predict", "after", 0), ("test", "after", 0), ("train", "before", 0),
        ("train", "after", 1),
        ("save_checkpoint", "before", 0), ("save_checkpoint", "in", 1), ("save_checkpoint", "after", 0),
        ("load_checkpoint", "in", 0), ("load_checkpoint", "after", 0), ("AccelerateTrainer", "after", 0),
    ]
]  # fmt: skip
ALONE += [
    Case("save_model on rank 0 under FSDP", ALONE[0].function, {**ALONE[1].options, "wrapping": "fsdp"}),
    Case("save_model on rank 0, which has the store", ALONE[0].function, ALONE[2].options, hosted=True),
    Case("save_model on rank 1, without the store", ALONE[0].function, ALONE[3].options, hosted=True),
]


OFTEN = [
    *(f"{what} after" for what in ("save_model on rank 0", "evaluate on rank 0", "train on rank 1", "test on rank 0")),
    *(f"{what} in" for what in ("save_model on rank 0", "predict on rank 0", "save_checkpoint on rank 1")),
    *(f"{what} before" for what in ("save_model on rank 0", "evaluate on rank 1", "save_checkpoint on rank 0")),
    "load_checkpoint on rank 0 after", "AccelerateTrainer on rank 0 after", "save_model on rank 1, without the store",
]  # fmt: skip
"""Those of ALONE with each call, and each moment."""


# --- errors that all processes come to alike


def survive(wrapping: str, folder: str) -> dict[str, Any]:
    """Come to the same errors on both processes, one a little later, and train to the end all the same."""
    errors = []
    distributed._ERROR_SYNC_S = 600.0  # both are to come, however late one of them is

    class Spoils(Callback):
        def on_step_start(self, trainer: Any) -> None:
            if trainer.progress.step == 3:
                time.sleep(0.3 * trainer.rank)
                raise ValueError("of both")

    def poisoned(output: Any, target: Any) -> torch.Tensor:
        return F.mse_loss(output, target) * (float("nan") if next(calls) == 3 else 1.0)

    calls = itertools.count()
    trainer: Any = make(wrapping, loss_fn=poisoned, save_dir=f"{folder}/a")
    attempts: list[Callable[[], object]] = [
        trainer.train,
        lambda: trainer.train(resume_from=f"{folder}/nothing"),
        lambda: trainer.train(resume_from="auto", allow_change={"nothing"}),
        lambda: make(wrapping, callbacks=[Spoils()]).train(),
        lambda: make(wrapping, model=t16(), optimizer="none"),
        lambda: make(wrapping, train=Rows(5 if trainer.rank else 2), shuffle=False).train(),
    ]
    for attempt in attempts:
        try:
            attempt()
        except Exception as error:
            errors.append(type(error).__name__)
    trainer.train()
    return {"errors": errors, "step": trainer.progress.step, "loss": trainer.evaluate(rows(9, torch.float32))}


# --- requests of one process


class Asks(Callback):
    """Makes requests at events, on one process only."""

    order = 11

    def __init__(self, rank: int, requests: dict[str, list[tuple[int, str]]]) -> None:
        self.rank, self.requests = rank, requests
        self.seen: list[str] = []

    def _ask(self, trainer: Any, event: str) -> None:
        self.seen.append(f"{event} {trainer.progress.step}")
        for step, request in self.requests.get(event, ()):
            if step == trainer.progress.step and trainer.rank == self.rank:
                getattr(trainer, request)()

    def on_step_end(self, trainer: Any) -> None:
        self._ask(trainer, "step_end")

    def on_eval_end(self, trainer: Any, metrics: Any) -> None:
        self._ask(trainer, "eval_end")

    def on_save_end(self, trainer: Any) -> None:
        self._ask(trainer, "save_end")

    def on_epoch_end(self, trainer: Any) -> None:
        self._ask(trainer, "epoch_end")


REQUESTS: dict[str, list[tuple[int, str]]] = {
    "step_end": [(2, "request_save"), (3, "request_evaluate"), (5, "request_log"), (15, "stop")],
    "eval_end": [(3, "request_save")],
    "save_end": [(2, "request_evaluate")],
    "epoch_end": [(8, "request_save"), (8, "request_evaluate")],
}


def ask(rank: int, folder: str, wrapping: str = "ddp") -> dict[str, Any]:
    """Ask for all there is at all events, on one process."""
    asks = Asks(rank, REQUESTS)
    evaluated = {"eval_dataset": rows(16, torch.float32), "eval_steps": 1000}
    trainer: Any = make(wrapping, callbacks=[asks], save_dir=folder, save_steps=1000, **evaluated)
    metrics = trainer.train()
    return {"seen": asks.seen, "reason": metrics["stop_reason"], "step": trainer.progress.step}


def stop_at_any_moment(times: int) -> list[tuple[str, int]]:
    """Stop many runs from another thread of one process, after a random batch of steps, evaluations and epochs."""
    chance, ends, passes = random.Random(own_rank()), [], itertools.count()

    class Stopping(Callback):
        order = 99

        def on_train_start(self, trainer: Any) -> None:
            if trainer.rank == len(ends) % 2:
                threading.Thread(target=stop_after, args=(trainer, chance.randint(1, 150))).start()

    def stop_after(trainer: Any, batches: int) -> None:
        while counts[0] < batches:
            time.sleep(0.0005)
        trainer.stop()

    def count(*_: Any) -> None:
        counts[0] = next(passes)

    data, model, counts = rows(70, torch.float32), t16(dtype=torch.float32), [0]
    model.register_forward_hook(count)
    trainer: Any = make(model=model, eval_dataset=data, eval_steps=3, epochs=1000, batch_size=1, callbacks=[Stopping()])
    for _ in range(times):
        counts[0], passes = 0, itertools.count()
        metrics = trainer.train()
        ends.append((metrics["stop_reason"], trainer.progress.step))
    mark()
    return ends


def run_by_clock(folder: str) -> dict[str, Any]:
    """Train, save and evaluate by clocks, of which that of rank 1 goes faster."""
    now = [0.0]

    class Tick(Callback):
        order = -1

        def on_step_start(self, trainer: Any) -> None:
            now[0] += 0.03 + 0.01 * trainer.rank

    lifecycle.time = SimpleNamespace(perf_counter=lambda: now[0])  # type: ignore[assignment]
    trainer: Any = make(
        callbacks=[Tick()], epochs=None, max_duration="1s", save_dir=folder, save_steps="0.2s",
        eval_dataset=rows(16, torch.float32), eval_steps="0.15s", log_steps="0.1s",
    )  # fmt: skip
    metrics = trainer.train()
    history = [row["step"] for row in metrics["valid"]]
    return {"reason": metrics["stop_reason"], "step": trainer.progress.step, "evaluated": history}


# --- data of unequal length


class Stream(IterableDataset[Any]):
    """A stream that ends earlier on some processes."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        return iter(list(zip(*rows(64, torch.float32).tensors, strict=True))[: self.lengths[own_rank()]])


def train_unevenly(lengths: list[int], wrapping: str, loader: bool, accumulation: int) -> dict[str, Any]:
    """Train and evaluate on data of which the processes see parts of unequal length."""
    data: dict[str, Any] = {"train": Stream(lengths), "eval_dataset": Stream(lengths)}
    if loader:
        own = rows(64, torch.float32)[: lengths[own_rank()]]
        data = {
            name: torch.utils.data.DataLoader(list(zip(*own, strict=True)), batch_size=2)  # type: ignore[arg-type]
            for name in ("train_loader", "eval_loader")
        }
    else:
        data["batch_size"] = 2
    trainer: Any = make(wrapping, **data, gradient_accumulation_steps=accumulation)
    metrics = trainer.train()
    return {"step": trainer.progress.step, "samples": trainer.progress.samples, "best": metrics["best_valid"]}


# --- trainers one after another, and the end of the program


def wrap_in_turn(wrappings: list[str]) -> dict[str, Any]:
    """Train the same model in many ways, each with an earlier trainer still there and used in between."""
    losses, trainers = [], []
    for wrapping in wrappings:
        trainers.append(make(wrapping))
        trainers[-1].train()
        losses.append([trainer.evaluate(rows(9, torch.float32))["eval_loss"] for trainer in trainers])
    mark()
    return {"losses": losses}


def end(how: str) -> None:
    """End a program in order, in one of several ways."""
    # A process that is through waits so long for the others; where they are through too, it does not wait at all.
    distributed._EXIT_WAIT_S = 0.5 if how == "late" else math.inf
    trainer = make()
    trainer.train()
    if how == "destroy":
        dist.destroy_process_group()
    elif how == "destroy and train":
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        make().train()
    elif how == "late" and trainer.rank == 0:
        wait_for_other()
    mark()


# --- disks and background writers


def fill_disk(wrapping: str, folder: str, required: bool = False, limit: bool = False) -> dict[str, Any]:
    """Train while the main process cannot write its second checkpoint."""
    told: list[str] = []
    keep = state.save_tensors

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    def write(tensors: Any, path: Path, *args: Any, **kwargs: Any) -> None:
        if "checkpoint-4" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        keep(tensors, path, *args, **kwargs)

    class Limit(Callback):
        def on_step_start(self, trainer: Any) -> None:
            size = 512 if trainer.progress.step in (2, 3) else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    logging.getLogger("omnitrain").addHandler(handler := Listen(logging.ERROR))
    if not limit:
        state.save_tensors = write  # type: ignore[assignment]
    trainer: Any = make(
        wrapping, save_dir=folder, save_steps=2, epochs=1, save_required=required, save_total_limit=None,
        callbacks=[Limit()] if limit else [],
    )  # fmt: skip
    error = ""
    try:
        trainer.train()
    except CheckpointError as raised:
        error = str(raised)
    state.save_tensors = keep
    logging.getLogger("omnitrain").removeHandler(handler)
    names = [path.name for path in Store(Path(folder)).checkpoints()]
    return {"step": trainer.progress.step, "told": told, "error": error, "names": names}


def write_in_background(wrapping: str, folder: str) -> dict[str, Any]:
    """Train with checkpoints that a thread of the main process writes, and resume from one of them."""
    trainer: Any = make(wrapping, async_save=True, save_dir=folder, save_steps=3, save_total_limit=None)
    trainer.train()
    again: Any = make(wrapping, async_save=True, save_dir=folder, save_steps=3, save_total_limit=None)
    again.train(resume_from=f"{folder}/checkpoint-6")
    names = [path.name for path in Store(Path(folder)).checkpoints()]
    weights = [whole(one.get_model()[0].weight).sum().item() for one in (trainer, again)]
    return {"names": names, "weights": weights, "threads": [thread.name for thread in threading.enumerate()]}


UNEVEN = [([9, 30], False), ([30, 9], False), ([13, 0], False), ([32, 33], True), ([9, 50], True)]
SPREAD = [
    Case(
        f"uneven {lengths} {wrapping} {loader} {accumulation}", "test_faults:train_unevenly",
        {"lengths": lengths, "wrapping": wrapping, "loader": loader, "accumulation": accumulation},
    )
    for lengths, loader in UNEVEN for wrapping in ("ddp", "fsdp") for accumulation in (1, 3)
]  # fmt: skip
SURVIVING = [
    *(Case(f"alike {wrapping}", "test_faults:survive", {"wrapping": wrapping}) for wrapping in ("ddp", "fsdp")),
    *(Case(f"asks {rank}", "test_faults:ask", {"rank": rank}) for rank in (0, 1)),
    Case("asks fsdp", "test_faults:ask", {"rank": 1, "wrapping": "fsdp"}),
    Case("stops", "test_faults:stop_at_any_moment", {"times": 30}),
    Case("clock", "test_faults:run_by_clock"),
    Case("in turn", "test_faults:wrap_in_turn", {"wrappings": ["ddp", "fsdp", "ddp", "fsdp"]}),
    *(Case(f"end {how}", "test_faults:end", {"how": how}) for how in ("plain", "destroy", "destroy and train", "late")),
    *(Case(f"disk {wrapping}", "test_faults:fill_disk", {"wrapping": wrapping}) for wrapping in ("ddp", "fsdp")),
    Case("disk limit", "test_faults:fill_disk", {"wrapping": "fsdp", "limit": True}),
    *(
        Case(f"required {wrapping}", "test_faults:fill_disk", {"wrapping": wrapping, "required": True})
        for wrapping in ("ddp", "fsdp")
    ),
    *(Case(f"background {one}", "test_faults:write_in_background", {"wrapping": one}) for one in ("ddp", "fsdp")),
]  # fmt: skip
NEEDS_FOLDER = ("call_alone", "survive", "ask", "run_by_clock", "fill_disk", "write_in_background")


def in_folders(cases: list[Case], folder: Path) -> list[Case]:
    """Give each case that writes a folder of its own."""
    for number, case in enumerate(cases):
        if case.function.endswith(NEEDS_FOLDER) or "folder" in case.options:
            case.options = {**case.options, "folder": str(folder / str(number))}
    return cases


CASES = {case.name: case for case in (*LIVING_ON, *FAILING, *ALONE, *SPREAD)}


# --- what must come of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    asked = {*asked_for(request, "name"), READ_AHEAD}
    return play(in_folders([*(CASES[name] for name in CASES if name in asked), *SURVIVING], folder), folder / "cases")


def results(outcomes: dict[str, list[Outcome]], name: str) -> list[Any]:
    """Return what a case gave on both processes, which must be the same."""
    for outcome in outcomes[name]:
        assert outcome.code == 0, outcome.output
    first, second = (outcome.result for outcome in outcomes[name])
    assert first == second
    return first


def test_the_waits_of_a_process_that_fails_add_up_to_seconds() -> None:
    waits = (distributed._ERROR_SYNC_S, distributed._GRACE_S, distributed._EXIT_WAIT_S)
    assert sum(waits) + 3 * distributed._POLL_INTERVAL.total_seconds() < 15


COMMON = ("writing", "metric")
"""Errors that the main process has for all of them."""


@pytest.mark.parametrize(
    "name", thinned([case.name for case in FAILING], [case.name for case in FAILING if case.name not in ALIKE])
)
def test_error_on_one_process_ends_all_and_all_say_which_and_why(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    case = CASES[name]
    where, rank = case.options["where"], case.options.get("rank", 1)
    failed, other = outcomes[case.name][rank], outcomes[case.name][1 - rank]
    text = "SystemExit: 7" if where == "exit" else "ValueError: boom"
    for outcome in (failed, other):
        assert outcome.code == (7 if outcome is failed and where == "exit" else 1), outcome.output
    assert where == "exit" or text in failed.output
    if where in COMMON:
        assert "Raised on rank 0, in " in other.output and other.output.count("ValueError: boom") == 2
    elif where == "between":  # outside of all calls: it is seen that it has gone, and not why
        assert "DistributedError: The processes of the run are at different places" in other.output
        assert f"rank {rank}: the end of the program" in other.output
    else:
        call = "predict()" if where.startswith("predict") else "train()"
        assert f"DistributedError: Rank {rank} failed in {call}, and so the run ends on all 2" in other.output
        assert f"--- rank {rank}\nTraceback (most recent call last)" in other.output and text in other.output


def test_sample_that_cannot_be_read_ahead_costs_nothing_of_the_step_before(
    outcomes: dict[str, list[Outcome]], folder: Path
) -> None:
    assert outcomes[READ_AHEAD][1].code == 1
    assert [path.name for path in Store(CASES[READ_AHEAD].options["folder"]).checkpoints()] == ["checkpoint-2"]


@pytest.mark.parametrize("name", [case.name for case in LIVING_ON])
def test_process_that_survives_its_error_leaves_no_other_waiting(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    rank = CASES[name].options.get("rank", 1)
    survivor, other = outcomes[name][rank], outcomes[name][1 - rank]
    assert survivor.code == 0, survivor.output  # it has lived until the other had ended
    assert other.code == 1, other.output
    assert f"DistributedError: Rank {rank} failed in train()" in other.output and "ValueError: boom" in other.output


@pytest.mark.parametrize("name", thinned([case.name for case in ALONE], OFTEN))
def test_call_on_one_process_alone_is_an_error_on_all_that_names_who_is_where(
    name: str, outcomes: dict[str, list[Outcome]]
) -> None:
    case = CASES[name]
    rank = case.options["rank"]
    for outcome in outcomes[case.name]:
        assert outcome.code == 1, outcome.output
        (message,) = re.findall("DistributedError: (The processes of the run are at different.*)", outcome.output)[-1:]
        assert f"rank {rank}: {case.options['what']}()" in message and f"rank {1 - rank}: " in message


@pytest.mark.parametrize("wrapping", ["ddp", "fsdp"])
def test_errors_that_all_processes_come_to_alike_leave_them_able_to_train(
    wrapping: str, outcomes: dict[str, list[Outcome]]
) -> None:
    found = results(outcomes, f"alike {wrapping}")
    errors = ["NonFiniteError", "CheckpointError", "ConfigError", "ValueError", "ConfigError", "ValueError"]
    assert (found["errors"], found["step"]) == (errors, 16)


@pytest.mark.parametrize("who", ["0", "1", "fsdp"])
def test_requests_of_one_process_are_answered_by_all(who: str, outcomes: dict[str, list[Outcome]]) -> None:
    found = results(outcomes, f"asks {who}")
    assert (found["step"], found["reason"]) == (15, "requested")
    seen = [event for event in found["seen"] if not event.startswith("step_end")]
    first = ["save_end 2", "eval_end 3", "save_end 3"]  # the evaluation asked for in save_end 2 comes at step 3
    assert seen == [*first, "epoch_end 8", "eval_end 8", "save_end 8", "epoch_end 15", "save_end 15"]


def test_stop_from_another_thread_of_one_process_ends_all_at_the_same_step(outcomes: dict[str, list[Outcome]]) -> None:
    found = results(outcomes, "stops")
    assert len(found) == 30 and {reason for reason, _ in found} == {"requested"}
    assert len({step for _, step in found}) > 3


def test_clocks_that_differ_between_processes_disturb_nothing(outcomes: dict[str, list[Outcome]]) -> None:
    found = results(outcomes, "clock")
    assert found["reason"] == "max_duration" and len(found["evaluated"]) >= 2


SOME = [one.name for one in SPREAD if (one.options["wrapping"] == "fsdp") == (one.options["accumulation"] == 3)]


@pytest.mark.parametrize("name", thinned([one.name for one in SPREAD], SOME))
def test_data_of_unequal_length_are_trained_on_to_the_end_of_the_longest(
    name: str, outcomes: dict[str, list[Outcome]]
) -> None:
    asked = CASES[name].options
    lengths, loader, accumulation = asked["lengths"], asked["loader"], asked["accumulation"]
    if not all(lengths):
        for outcome in outcomes[name]:
            assert outcome.code == 1 and "DataError: The data yield nothing on rank 1" in outcome.output
        return
    parts = [range(0, length, 2) for length in lengths]
    if loader:  # taken in turns, as from a loader that is the same everywhere
        own = [[min(2, lengths[rank] - start) for start in part][rank::2] for rank, part in enumerate(parts)]
    else:
        own = [_stream_share(length, rank) for rank, length in enumerate(lengths)]
    found = results(outcomes, name)
    assert found["samples"] == 2 * sum(map(sum, own))
    turns = max(sum(map(bool, share)) for share in own)  # a turn in which no process has samples is no step
    assert found["step"] == 2 * -(-turns // accumulation)


def _stream_share(length: int, rank: int) -> list[int]:
    """Return how many samples a process takes of each four."""
    turns = [min(4, length - start) for start in range(0, length, 4)]
    return [(turn + 1 - rank) // 2 for turn in turns]


def test_trainers_of_different_wrapping_in_one_program_do_not_disturb_each_other(
    outcomes: dict[str, list[Outcome]],
) -> None:
    losses = results(outcomes, "in turn")["losses"]
    assert [len(row) for row in losses] == [1, 2, 3, 4]
    assert all(loss == pytest.approx(losses[0][0], abs=1e-6) for row in losses for loss in row)


def said(outcome: Outcome) -> str:
    """Return what a process wrote, without what gloo says in PyTorch 2.8 when it has connected."""
    return "".join(line for line in outcome.output.splitlines(keepends=True) if not line.startswith("[Gloo] Rank "))


@pytest.mark.parametrize("how", ["plain", "destroy", "destroy and train"])
def test_program_that_is_through_ends_at_once_and_without_a_warning(
    how: str, outcomes: dict[str, list[Outcome]]
) -> None:
    for outcome in outcomes[f"end {how}"]:
        assert (outcome.code, said(outcome)) == (0, "")


def test_process_that_has_more_to_do_at_the_end_may_take_its_time(outcomes: dict[str, list[Outcome]]) -> None:
    assert [outcome.code for outcome in outcomes["end late"]] == [0, 0]
    assert [said(outcome) for outcome in outcomes["end late"]] == ["", ""]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "limit"])
def test_full_disk_costs_a_checkpoint_and_not_the_run(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    found = results(outcomes, f"disk {name}")
    assert (found["step"], len(found["told"]), found["error"]) == (8, 1, "")
    assert re.search("Cannot save .*checkpoint-4.*(No space left|File too large)", found["told"][0])
    assert found["names"] == ["checkpoint-2", "checkpoint-6", "checkpoint-8"]


@pytest.mark.parametrize("wrapping", ["ddp", "fsdp"])
def test_full_disk_ends_a_run_that_requires_its_saves_on_all_processes(
    wrapping: str, outcomes: dict[str, list[Outcome]]
) -> None:
    found = results(outcomes, f"required {wrapping}")
    assert found["step"] == 4 and "No space left" in found["error"] and found["names"] == ["checkpoint-2"]


@pytest.mark.parametrize("wrapping", ["ddp", "fsdp"])
def test_background_saves_are_whole_and_leave_no_thread(wrapping: str, outcomes: dict[str, list[Outcome]]) -> None:
    found = results(outcomes, f"background {wrapping}")
    assert found["names"] == [f"checkpoint-{step}" for step in (3, 6, 9, 12, 15, 16)]
    assert found["weights"][0] == found["weights"][1]
    assert found["threads"] == ["MainThread", "omnitrain-post", "omnitrain-watch"]
