"""Rendezvous of the ranks, also after a restart of all of them.

What they say to each other once they have is in `distributed.py`.
"""

from __future__ import annotations

import datetime
import json
import os
import time
import uuid
from collections.abc import Iterator
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.distributed.rendezvous import rendezvous as rendezvous_by

__all__ = ["agree_on_name", "init_method"]

_SCHEME = "omnitrain"
_registered: set[str] = set()


def init_method() -> str | None:
    """Return what `init_process_group` is to be given as `init_method`; None for PyTorch's own.

    torchrun keeps one store through all of its restarts, so that the processes of an attempt find addresses there that
    those before them left (pytorch issue 135712), and cannot connect. The number of restarts is no way to tell them
    apart: each machine has its own.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if _SCHEME not in _registered:
        register_rendezvous_handler(_SCHEME, _rendezvous)
        _registered.add(_SCHEME)
    return f"{_SCHEME}://"


def _rendezvous(
    url: str, timeout: datetime.timedelta = datetime.timedelta(minutes=30), **options: Any
) -> Iterator[tuple[Store, int, int]]:
    """Yield what "env://" does, with a store in which nothing of an earlier attempt is to be found."""
    store, rank, world_size = next(iter(rendezvous_by("env://", timeout=timeout)))
    name = agree_on_name(store, rank, world_size, timeout)
    yield PrefixStore(f"omnitrain/{name}", store), rank, world_size


def agree_on_name(store: Store, rank: int, world_size: int, timeout: datetime.timedelta) -> str:
    """Return a name that all processes of this attempt return, and none of an earlier one.

    Rank 0 proposes a new name, the others answer with names of their own, and rank 0 lists those. A proposal that an
    earlier attempt left has a list too, but not with this process in it.

    Raises:
        TimeoutError: If the processes did not find each other in time.
    """
    own, end, pause = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds(), 0.005
    if rank == 0:
        store.set("omnitrain/attempt", own)
        answers = [f"omnitrain/{own}/{other}" for other in range(1, world_size)]
        store.set(f"omnitrain/{own}/all", json.dumps([store.get(answer).decode() for answer in answers]))
        return own
    while time.monotonic() < end:
        name = store.get("omnitrain/attempt").decode()
        store.set(f"omnitrain/{name}/{rank}", own)
        if store.check([f"omnitrain/{name}/all"]) and own in json.loads(store.get(f"omnitrain/{name}/all")):
            return name
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    raise TimeoutError(f"Rank {rank} has found no rank 0 within {timeout.total_seconds():.0f} seconds.")
