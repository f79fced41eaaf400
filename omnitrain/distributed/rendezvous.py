"""Rendezvous of the ranks, also after a restart of all of them.

`ranks.py` has their communication afterwards.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.distributed.rendezvous import rendezvous as rendezvous_by

from omnitrain.core.errors import DistributedError
from omnitrain.distributed import watchdog
from omnitrain.distributed.ranks import ProcessRanks, is_connection_error

logger: logging.Logger = logging.getLogger("omnitrain")

_SCHEME = "omnitrain"
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The timeout of the latest `watch_init_process_group`.
_timeout: float | None = None
# The ranks of the latest rendezvous; the trainers of a program share them.
_ranks: ProcessRanks | None = None


@contextlib.contextmanager
def watch_init_process_group(timeout: float | None) -> Iterator[str | None]:
    """Detect lost ranks while libraries set up their communication inside.

    Args:
        timeout: Seconds without progress until the start fails, at least a minute; None is 30 minutes.

    Yields:
        The `init_method` for `init_process_group`; None for PyTorch's default.

    Raises:
        DistributedError: If a connection breaks.
    """
    global _timeout
    _timeout = timeout
    previous = _ranks
    try:
        yield f"{_SCHEME}://" if all(map(os.environ.get, _VARIABLES)) else None
    except RuntimeError as error:
        if _ranks is not None and _ranks is not previous and is_connection_error(error):
            raise _ranks.lost_at_start(error) from error
        raise
    finally:
        if _ranks is not None and _ranks is not previous:
            _ranks.world, _ranks.phase = dist.group.WORLD, ""


def connected_ranks(timeout: float | None = None, mesh: Any = None) -> ProcessRanks:
    """Return the connected ranks of torch.distributed's group, in a mesh; all ranks call it at the same place.

    Connecting fails after `timeout` seconds without progress; None is 30 minutes.
    """
    global _ranks
    if _ranks is None or _ranks.world is not dist.group.WORLD:
        store = distributed_c10d._get_default_store()  # the one place that all ranks can certainly reach
        _ranks = ProcessRanks(store, dist.get_rank(), dist.get_world_size(), timeout)
    _ranks.connect()
    _ranks.set_mesh(mesh)
    return _ranks


def reject_several_processes(trainer: str) -> None:
    """Raise DistributedError if a `trainer` of one process is in a launch of several: each would train by itself."""
    size = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
    processes = int(size) if size.isdigit() else 1
    if dist.is_available() and dist.is_initialized():
        processes = max(processes, dist.get_world_size())
    if processes > 1:
        raise DistributedError(
            f"{trainer} trains on one process, and this is one of {processes}, each of which would train on all of the "
            "data by itself. Use AccelerateTrainer, which trains on all of them together, or start one process. If "
            "they are to train separately, unset RANK and WORLD_SIZE."
        )


def _rendezvous(
    url: str, timeout: datetime.timedelta = datetime.timedelta(minutes=30), **options: object
) -> Iterator[tuple[Store, int, int]]:
    """Yield what "env://" does, with a store that contains nothing from an earlier attempt.

    torchrun keeps one store through all restarts, so the processes of an attempt find addresses there left by earlier
    ones (pytorch issue 135712), and cannot connect. The number of restarts cannot tell attempts apart: each machine
    has its own.
    """
    global _ranks
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    quiet, limit = watchdog.QUIET_S, timeout
    if _timeout is not None:
        limit = datetime.timedelta(seconds=max(_timeout, watchdog.SILENCE_S))
    text = f"Rank {rank} waits for the others of {size} processes at {os.environ['MASTER_ADDR']}"
    longest = 2 * limit.total_seconds() + watchdog.SILENCE_S  # a store that has stopped may never answer
    timers = [
        threading.Timer(quiet, logger.warning, (f"{text}, and has for {quiet:.0f} seconds.",)),
        threading.Timer(longest, watchdog.abort, (f"{text}, and got no answer in {longest:.0f} seconds.",)),
    ]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        if rank != "0":
            _wait_for_store(limit.total_seconds())
        store, rank, world_size = next(iter(rendezvous_by("env://", timeout=limit)))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = PrefixStore(f"omnitrain/{agree_on_name(store, rank, world_size, limit)}", store)
    except (dist.DistError, TimeoutError) as error:
        raise DistributedError(
            f"Rank {rank} has not met the others of {size} processes at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']}: {error} Look whether all of them have been started, and what ended them."
        ) from error
    finally:
        for timer in timers:
            timer.cancel()
    if world_size > 1:
        _ranks = ProcessRanks(store, rank, world_size, _timeout)
    yield store, rank, world_size


def _wait_for_store(seconds: float) -> None:
    """Wait until the store can be reached; PyTorch's own wait takes up to three times the given time.

    Raises:
        TimeoutError: If it takes longer.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            with socket.create_connection(place, timeout=max(1.0, end - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise TimeoutError(f"{error} for {seconds:.0f} seconds.") from error
        time.sleep(0.1)


def agree_on_name(store: Store, rank: int, world_size: int, timeout: datetime.timedelta) -> str:
    """Return a name shared by all processes of this attempt and none of an earlier one.

    Rank 0 proposes a new name, the others answer with their own names, and rank 0 lists those. A proposal left by an
    earlier attempt has a list too, but one without this process.

    Raises:
        TimeoutError: If the processes did not find each other in time.
    """
    token, end, pause = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds(), 0.005
    if rank == 0:
        store.set("omnitrain/attempt", token)
        answers = [f"omnitrain/{token}/{other}" for other in range(1, world_size)]
        store.set(f"omnitrain/{token}/all", json.dumps([store.get(answer).decode() for answer in answers]))
        return token
    while time.monotonic() < end:
        name = store.get("omnitrain/attempt").decode()
        store.set(f"omnitrain/{name}/{rank}", token)
        if store.check([f"omnitrain/{name}/all"]) and token in json.loads(store.get(f"omnitrain/{name}/all")):
            return name
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    raise TimeoutError(f"Rank {rank} has found no rank 0 within {timeout.total_seconds():.0f} seconds.")


register_rendezvous_handler(_SCHEME, _rendezvous)
