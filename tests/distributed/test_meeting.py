"""Processes that end or stall during the rendezvous, before the trainer exists: the run ends on the others."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import asked_for, make_trainer
from compiled import compile_once
from forking import Case, Found, Outcome, mark, play
from marks import thinned
from recipes import rows
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import distributed as ddp

from omnitrain.distributed import ranks
from omnitrain.distributed.ranks import ProcessRanks

MOMENTS = {
    "ddp": ("group 1", "ranks", "group 2", "broadcast 1"),
    "fsdp": ("group 1", "ranks", "group 2"),
    "zero2": ("group 1", "ranks", "group 2", "group 3"),
    "zero3": ("group 1", "ranks", "group 2", "group 3"),
    "hf2": ("group 1", "ranks", "group 2", "broadcast 1"),
}
"""What a rank is about to do, by backend: form torch's first group, ours, one of the backend's; begin to exchange
anything; broadcast the weights."""


def leave(how: str) -> None:
    """Kill this process, at once or, stopped, when the other one has ended."""
    mark()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    folder, other = Path(os.environ["CASE_FOLDER"]), 1 - int(os.environ["RANK"])
    wait = f"while [ ! -e '{folder}/ended-{other}' ]; do sleep 0.05; done; kill -KILL {os.getpid()}"
    with subprocess.Popen(["sh", "-c", wait]):
        os.kill(os.getpid(), signal.SIGSTOP)


def leave_in(owner: Any, name: str, call: int, how: str) -> None:
    """Leave in a call of a function instead of what it does."""
    function: Callable[..., Any] = getattr(owner, name)
    numbers = iter(range(1, 100))

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return leave(how) if next(numbers) == call else function(*args, **kwargs)

    setattr(owner, name, replacement)


def await_fault() -> None:
    """Wait for the other process to leave before this one has used the store."""
    start = ProcessRanks.__init__

    def late(ranks: ProcessRanks, *args: Any) -> None:
        while not Path(os.environ["CASE_FOLDER"], "fault").exists():
            time.sleep(0.01)
        time.sleep(0.2)  # the fault is marked just before
        start(ranks, *args)

    ProcessRanks.__init__ = late  # type: ignore[method-assign]


def make(
    backend: str, moment: str, rank: int, how: str, timeout: float | None = None, is_other_late: bool = False
) -> None:
    """Make a trainer, and leave on one rank at a moment."""
    ranks.SILENCE_S = ranks._UNRESPONSIVE_S = 3.0
    what, _, number = moment.partition(" ")
    owner, name = {
        "group": (distributed_c10d, "_new_process_group_helper"),
        "ranks": (ProcessRanks, "connect"),
        "broadcast": (ddp, "_verify_param_shape_across_processes"),
    }[what]
    is_leaving = int(os.environ["RANK"]) == rank
    if is_other_late and not is_leaving:
        await_fault()
    if is_leaving:
        leave_in(owner, name, int(number or 1), how)
    make_trainer(backend, nn.Linear(4, 1), rows(32, torch.float32), loss_fn=F.mse_loss, batch_size=4, timeout=timeout)


def case(backend: str, moment: str, rank: int, how: str, hosted: bool = True, is_other_late: bool = False) -> Case:
    store = ", torchrun" if not hosted else ", with the store" if not rank else ""
    name = f"{backend}, {moment}, rank {rank} {how}{store}{', the other late' * is_other_late}"
    environment = {} if "zero" in backend else {"ACCELERATE_USE_CPU": "true"}
    options = {"backend": backend, "moment": moment, "rank": rank, "how": how, "is_other_late": is_other_late}
    return Case(name, "test_meeting:make", options, hosted, environment=environment)


QUICK = [
    case("ddp", "group 1", 0, "stopped", is_other_late=True),
    case("ddp", "group 2", 1, "stopped", hosted=False),
    case("fsdp", "ranks", 0, "killed"),
    case("zero3", "group 1", 1, "killed"),
    case("hf2", "ranks", 1, "killed"),
]
EXHAUSTIVE = [
    case("ddp", "group 1", 0, "killed", is_other_late=True),
    case("ddp", "group 1", 1, "killed"),
    case("zero2", "group 3", 1, "killed"),
    *(
        case(backend, moment, rank, how, hosted)
        for backend, moments in MOMENTS.items() for moment in moments
        for how, rank, hosted in (("killed", 0, True), ("stopped", 0, False), ("killed", 1, False))
    ),
]  # fmt: skip
CASES = {case.name: case for case in (*QUICK, *EXHAUSTIVE)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    names = asked_for(request, "name")
    if any("zero" in name for name in names):
        compile_once()
    cases = [case for case in CASES.values() if case.name in names]
    return play(cases, tmp_path_factory.mktemp("meeting"), at_once=4 if len(cases) > 20 else 7)


@pytest.mark.parametrize("name", thinned(CASES, [case.name for case in QUICK]))
def test_meeting_that_a_rank_leaves_ends_the_run(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    rank = CASES[name].options["rank"]
    leaver, other = outcomes[name][rank], outcomes[name][1 - rank]
    assert leaver.code == -signal.SIGKILL, leaver.output
    assert other.code == 1, other.output
    assert "DistributedError: " in other.output, other.output
