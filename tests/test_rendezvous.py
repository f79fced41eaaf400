"""How processes find each other in a store in which earlier ones have left their words."""

from __future__ import annotations

import datetime
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import programs
import pytest
import torch.distributed as dist
from torch.distributed import HashStore, Store

from omnitrain import distributed, rendezvous
from omnitrain.errors import DistributedError

SOON = datetime.timedelta(seconds=programs.LIMIT)


def meet(store: Store, ranks: list[int], world_size: int) -> list[str]:
    """Return the names that the ranks agree on, rank 0 being the last to come."""
    with ThreadPoolExecutor(world_size) as pool:
        names = [pool.submit(rendezvous.agree_on_name, store, rank, world_size, SOON) for rank in ranks]
        return [name.result(programs.LIMIT) for name in names]


def test_all_processes_of_an_attempt_agree_and_no_two_attempts_do() -> None:
    store, seen = HashStore(), set()
    for _ in range(4):
        names = meet(store, [2, 1, 0], 3)
        assert len(set(names)) == 1
        seen |= set(names)
    assert len(seen) == 4


def test_what_an_attempt_left_that_never_came_together_misleads_nobody() -> None:
    store = HashStore()
    store.set("omnitrain/attempt", "old")  # its rank 0 was there, and rank 1; rank 2 was not
    store.set("omnitrain/old/1", "gone")
    assert "old" not in meet(store, [1, 2, 0], 3)


def test_a_process_alone_needs_no_other() -> None:
    assert len(meet(HashStore(), [0], 1)) == 1


def test_a_rank_0_that_never_comes_is_an_error_that_says_so() -> None:
    store = HashStore()
    store.set("omnitrain/attempt", "old")
    with pytest.raises(TimeoutError, match="Rank 1 has found no rank 0"):
        rendezvous.agree_on_name(store, 1, 2, datetime.timedelta(seconds=0.05))


def test_only_processes_of_a_launch_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with rendezvous.meeting(None) as method:
        assert method is None
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    for _ in range(2):
        with rendezvous.meeting(None) as method:
            assert method == "omnitrain://"


def test_others_that_are_never_started_are_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    monkeypatch.setattr(distributed, "SILENCE_S", 0.5)
    for rank in "01":
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with rendezvous.meeting(0.5) as method, pytest.raises(DistributedError, match=f"Rank {rank} has not met the"):
            dist.init_process_group("gloo", init_method=method)


STORE_STOPS = """
import os, socket
import torch.distributed as dist
from omnitrain import distributed, rendezvous

distributed.SILENCE_S = 1.0
with socket.create_server(("localhost", 0)) as store, rendezvous.meeting(1.0):
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = str(store.getsockname()[1])
    dist.init_process_group("gloo", init_method="omnitrain://")
"""


def test_a_store_that_takes_connections_and_answers_nothing_ends_the_process() -> None:
    done = programs.run(sys.executable, "-c", STORE_STOPS)
    assert done.returncode == 1
    assert "DistributedError: Rank 1 waits for the others of 2 processes at localhost, and got no answer in 3 s" in (
        done.stderr
    )
