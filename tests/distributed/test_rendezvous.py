"""Rendezvous of processes: stores with keys of earlier attempts, and ranks that end or stall before the trainer exists.

The run then ends on the others.
"""

import datetime
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from backends import asked_for, make_trainer
from compiled import compile_once
from forking import Case, Found, Outcome, by_name, case_folder, current_rank, mark, play, stop_until
from marks import thinned
from recipes import rows
from torch import nn
from torch.distributed import HashStore, Store, distributed_c10d
from torch.nn.parallel import distributed as ddp

from omnitrain.core.errors import DistributedError
from omnitrain.distributed import rendezvous, watchdog
from omnitrain.distributed.ranks import ProcessRanks

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def meet(store: Store, ranks: list[int]) -> list[str]:
    """Return the names that the ranks agree on; the last one of the list comes last."""
    limit = datetime.timedelta(seconds=programs.LIMIT)
    with ThreadPoolExecutor(len(ranks)) as pool:
        names = [pool.submit(rendezvous.agree_on_name, store, rank, len(ranks), limit) for rank in ranks]
        return [name.result(programs.LIMIT) for name in names]


def test_agree_on_name_is_unique_per_attempt() -> None:
    store = HashStore()
    store.set("omnitrain/attempt", "old")  # its ranks 0 and 1 were there, rank 2 was not
    store.set("omnitrain/old/1", "gone")
    with pytest.raises(TimeoutError, match="Rank 1 has found no rank 0"):
        rendezvous.agree_on_name(store, 1, 3, datetime.timedelta(seconds=0.05))
    attempts = [{"old"}, *(set(meet(store, [2, 1, 0])) for _ in range(4))]
    assert [len(names) for names in attempts] == [1] * 5 and len(set.union(*attempts)) == 5
    assert len(meet(HashStore(), [0])) == 1


def test_meeting_yields_init_method_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with rendezvous.watch_init_process_group(None) as method:
        assert method is None
    for name in VARIABLES:
        monkeypatch.setenv(name, "0")
    for _ in range(2):
        with rendezvous.watch_init_process_group(None) as method:
            assert method == "omnitrain://"


def test_meeting_reports_ranks_that_never_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SILENCE_S", 0.5)
    for rank in "01":
        for name, value in zip(VARIABLES, (rank, "2", "localhost", str(programs.free_port())), strict=True):
            monkeypatch.setenv(name, value)
        with (
            rendezvous.watch_init_process_group(0.5) as method,
            pytest.raises(DistributedError, match=f"Rank {rank} has not met the"),
        ):
            dist.init_process_group("gloo", init_method=method)


def wait_for_silent_store() -> None:
    """Join a group whose store accepts connections, and never answers."""
    watchdog.SILENCE_S = 2.0
    with socket.create_server(("localhost", 0)) as store, rendezvous.watch_init_process_group(2.0):
        os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
        os.environ["MASTER_PORT"] = str(store.getsockname()[1])
        dist.init_process_group("gloo", init_method="omnitrain://")


# --- ranks that leave while trainers are made


def leave(how: str) -> None:
    """Kill this process, at once or, stopped, when the other one has ended."""
    mark()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    stop_until(f"ended-{1 - current_rank()}", signal.SIGKILL)


def act_before(owner: Any, name: str, act: Callable[[], None], number: int = 1) -> None:
    """Do something before the call of a function that has this number."""
    function: Callable[..., Any] = getattr(owner, name)
    numbers = itertools.count(1)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == number:
            act()
        return function(*args, **kwargs)

    setattr(owner, name, replacement)


def await_fault() -> None:
    while not (case_folder() / "fault").exists():
        time.sleep(0.01)
    time.sleep(0.2)  # the fault is marked just before


def make(backend: str, moment: str, rank: int, how: str, is_other_late: bool) -> None:
    """Make a trainer, and leave on one rank when it is about to form a group, to exchange anything, or to broadcast."""
    watchdog.UNRESPONSIVE_S, fault = 3.0, case_folder() / "fault"

    class Detector(watchdog.StallDetector):
        """Counts a minute in three seconds, but only once a rank has left: others may take long to start."""

        def update(self, heartbeats: Mapping[int, watchdog.Heartbeat], elapsed: float) -> list[str]:
            return super().update(heartbeats, elapsed * (20 if fault.exists() else 1))

    watchdog.StallDetector = Detector  # type: ignore[misc]
    what, _, number = moment.partition(" ")
    owner, name = {
        "group": (distributed_c10d, "_new_process_group_helper"),  # torch's first one, ours, those of the backend
        "ranks": (ProcessRanks, "connect"),
        "broadcast": (ddp, "_verify_param_shape_across_processes"),
    }[what]
    if current_rank() == rank:
        act_before(owner, name, partial(leave, how), int(number or 1))
    elif is_other_late:  # it has not used the store yet
        act_before(ProcessRanks, "__init__", await_fault)
    make_trainer(backend, nn.Linear(4, 1), rows(32, torch.float32), loss_fn=F.mse_loss, batch_size=4)


def case(backend: str, moment: str, rank: int, how: str, hosted: bool = True, is_other_late: bool = False) -> Case:
    name = f"{backend}, {moment}, rank {rank} {how}{', torchrun' * (not hosted)}{', the other late' * is_other_late}"
    options = {"backend": backend, "moment": moment, "rank": rank, "how": how, "is_other_late": is_other_late}
    return Case(name, "test_rendezvous:make", options, hosted)


CASES = by_name([
    case("ddp", "group 1", 0, "stopped", is_other_late=True), case("ddp", "group 2", 1, "stopped", hosted=False),
    case("fsdp", "ranks", 0, "killed"), case("zero3", "group 1", 1, "killed"), case("hf2", "ranks", 1, "killed"),
    case("ddp", "broadcast 1", 1, "killed", hosted=False), case("zero3", "group 3", 0, "stopped", hosted=False),
])  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    names = asked_for(request, "name")
    if any("zero" in name for name in names):
        compile_once()
    silent = Case("silent", "test_rendezvous:wait_for_silent_store", processes=1)
    return play([silent, *(case for case in CASES.values() if case.name in names)], folder, at_once=7)


def test_meeting_ends_if_store_never_answers(outcomes: dict[str, list[Outcome]]) -> None:
    (outcome,) = outcomes["silent"]
    words = "DistributedError: Rank 1 waits for the others of 2 processes at localhost, and got no answer in"
    assert outcome.code == 1 and words in outcome.output


@pytest.mark.parametrize("name", thinned(CASES, list(CASES)[:5]))
def test_meeting_that_a_rank_leaves_ends_the_run(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    rank = CASES[name].options["rank"]
    leaver, other = outcomes[name][rank], outcomes[name][1 - rank]
    assert leaver.code == -signal.SIGKILL, leaver.output
    assert other.code == 1 and "DistributedError: " in other.output, other.output
