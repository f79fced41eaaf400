"""Rendezvous of processes in a store that still has keys of earlier attempts."""

from __future__ import annotations

import datetime
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import programs
import pytest
import torch.distributed as dist
from forking import Case, play
from torch.distributed import HashStore, Store

from omnitrain.core.errors import DistributedError
from omnitrain.distributed import ranks, rendezvous

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def meet(store: Store, ranks: list[int]) -> list[str]:
    """Return the names that the ranks agree on; the last one of the list comes last."""
    limit = datetime.timedelta(seconds=programs.LIMIT)
    with ThreadPoolExecutor(len(ranks)) as pool:
        names = [pool.submit(rendezvous.agree_on_name, store, rank, len(ranks), limit) for rank in ranks]
        return [name.result(programs.LIMIT) for name in names]


@pytest.mark.processes
def test_agree_on_name_is_unique_per_attempt() -> None:
    store = HashStore()
    store.set("omnitrain/attempt", "old")  # its ranks 0 and 1 were there, rank 2 was not
    store.set("omnitrain/old/1", "gone")
    attempts = [{"old"}, *(set(meet(store, [2, 1, 0])) for _ in range(4))]
    assert [len(names) for names in attempts] == [1] * 5 and len(set.union(*attempts)) == 5
    assert len(meet(HashStore(), [0])) == 1


def test_agree_on_name_without_rank_0_times_out() -> None:
    store = HashStore()
    store.set("omnitrain/attempt", "old")
    with pytest.raises(TimeoutError, match="Rank 1 has found no rank 0"):
        rendezvous.agree_on_name(store, 1, 2, datetime.timedelta(seconds=0.05))


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


@pytest.mark.processes
def test_meeting_reports_ranks_that_never_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SILENCE_S", 0.5)
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
    ranks.SILENCE_S = 0.3
    with socket.create_server(("localhost", 0)) as store, rendezvous.watch_init_process_group(0.3):
        os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
        os.environ["MASTER_PORT"] = str(store.getsockname()[1])
        dist.init_process_group("gloo", init_method="omnitrain://")


@pytest.mark.processes
def test_meeting_ends_if_store_never_answers(tmp_path: Path) -> None:
    case = Case("silent", "test_rendezvous:wait_for_silent_store", processes=1)
    (outcome,) = play([case], tmp_path)["silent"]
    assert outcome.code == 1
    assert "DistributedError: Rank 1 waits for the others of 2 processes at localhost, and got no answer in" in (
        outcome.output
    )
