"""How processes find each other in a store in which earlier ones have left their words."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor

import programs
import pytest
from torch.distributed import HashStore, Store

from omnitrain import rendezvous

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


def test_only_a_store_that_outlives_the_processes_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert rendezvous.init_method() is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert rendezvous.init_method() == rendezvous.init_method() == "omnitrain://"
