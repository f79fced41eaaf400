"""Communication between ranks, and detection of failed ones.

`Ranks` is a single process: every result is its own. `ProcessRanks` uses torch.distributed. Every exchange carries the
name of its call, so ranks that make different calls (such as a call on one rank only) notice at once and raise a
`DistributedError` instead of waiting for each other forever. Collectives of the model do not belong here, but each rank
sends heartbeats, so a rank for which the others wait in a collective is noticed too.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import hashlib
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from omnitrain.core.errors import DistributedError
from omnitrain.core.events import STOP_REASONS, Control, pick_stop_reason
from omnitrain.distributed import signals
from omnitrain.distributed.processes import identify_process, is_alive, is_in_same_container
from omnitrain.distributed.watchdog import Heartbeat, RankTree, Report, Stall, StallDetector, describe_stall

logger: logging.Logger = logging.getLogger("omnitrain")

T = TypeVar("T")
S = TypeVar("S")


_POLL_INTERVAL = datetime.timedelta(seconds=1)
# Seconds without progress after which a rank is reported.
QUIET_S = 30.0
# Seconds without progress after which a run on several processes ends, unless its trainer has a `timeout`.
_TIMEOUT_S = 1800.0
# The share of CPU time that counts as progress in phases without a counter, such as a long save or metric.
_BUSY_SHARE = 0.02
# Phases in which batches are counted; CPU time does not count there, as NCCL waits in a busy loop.
_COUNTED_PHASES = ("data", "step", "evaluation")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8, 1-D.

    >>> as_bytes(torch.tensor([[1], [2]], dtype=torch.int16))
    tensor([1, 0, 2, 0], dtype=torch.uint8)
    """
    assert tensor.is_contiguous()  # which any stride of a dimension of size 1 is, and `view` does not know
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The share of the data that a rank has; the ranks of a tensor-parallel group have the same one.

    Attributes:
        rank: The number of the share.
        size: The number of shares: the data-parallel ranks.
        counts: Whether this rank adds its share to sums over ranks: it is the first one that has it.
    """

    rank: int = 0
    size: int = 1
    counts: bool = True


# The dimensions of a mesh whose ranks work on the same samples; they are the last ones of it.
_MODEL_DIMENSIONS = ("cp", "sp", "tp")


class Ranks:
    """The ranks of a run, seen from one of them; here it is the only one.

    Attributes:
        phase: What this rank is doing during a call of the trainer: "data", "step" etc.
        step: The number of its current step.
        progress_count: Counts its progress; code that may take long increments it.

    >>> ranks = Ranks()
    >>> ranks.sum("weights", 3.0, 4.0), ranks.gather("names", "a"), ranks.on_main("a sum", lambda: 1 + 1)
    ([3.0, 4.0], ['a'], 2)
    """

    rank: int = 0
    world_size: int = 1
    phase: str = ""
    step: int = 0
    progress_count: int = 0
    mesh: Any = None
    """Torch's `DeviceMesh` of the ranks: that of the trainer whose call runs; None without."""
    dimensions: Mapping[str, int] = MappingProxyType({})
    """The sizes of the mesh's dimensions, the outermost first; empty without a mesh."""
    _beat: int = 0
    _is_waiting: bool = False
    # Seconds without progress of any rank after which the current call ends.
    _limit: float = math.inf
    # Seconds without a heartbeat of a rank after which it ends too.
    _silence_limit: float = math.inf
    # The CPU time used by this process until its latest heartbeat.
    _cpu_s: float = 0.0

    @property
    def is_main(self) -> bool:
        """Whether this is the main rank, which prints and writes."""
        return self.rank == 0

    def set_mesh(self, mesh: Any) -> None:
        """Set torch's `DeviceMesh` of the ranks, whose sizes multiply to their number; None for none."""
        if mesh is self.mesh:
            return
        vars(self).pop("data", None)
        self.mesh = mesh
        self.dimensions = {} if mesh is None else dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))

    @functools.cached_property
    def data(self) -> Coordinates:
        """The share of the data that this rank has: a separate one, unless it shares it in a mesh."""
        model = math.prod(size for name, size in self.dimensions.items() if name in _MODEL_DIMENSIONS)
        return Coordinates(self.rank // model, self.world_size // model, self.rank % model == 0)

    def count_once(self, values: Sequence[float]) -> list[float]:
        """Return numbers of this rank's share of the data for a sum over ranks: zeros if another rank counts them."""
        return list(values) if self.data.counts else [0] * len(values)

    def one_per_share(self, values: Sequence[T]) -> Sequence[T]:
        """Return one value for each share of the data, of those of all ranks from `gather`."""
        return values[:: self.world_size // self.data.size]

    def part(self, name: str) -> Part:
        """Return the ranks that differ from this one only in a dimension of the mesh; only this one without it."""
        sizes = list(self.dimensions.values())
        if name not in self.dimensions:
            return Part(self, (self.rank,))
        index = list(self.dimensions).index(name)
        step = math.prod(sizes[index + 1 :])
        first = self.rank - self.rank // step % sizes[index] * step
        return Part(self, tuple(range(first, first + step * sizes[index], step)))

    def sum(self, what: str, *values: float) -> list[float]:
        """Return the sum of each value over all ranks."""
        return list(values)

    def sync_requests(self, what: str, requests: Control, *values: float) -> tuple[Control, list[float]]:
        """Return the requests made on any rank, and the sum of each value over all ranks."""
        return self.start_sync_requests(what, requests, *values)()

    def start_sync_requests(
        self, what: str, requests: Control, *values: float
    ) -> Callable[[], tuple[Control, list[float]]]:
        """Start `sync_requests`, and return a function that waits for it and returns its result."""
        return lambda: (requests, list(values))

    def gather(self, what: str, value: T) -> list[T]:
        """Return the values of all ranks in order; they can be any picklable object."""
        return [value]

    def check_equal(self, what: str, values: Mapping[str, Any], remedy: str) -> None:
        """Compare values that must be the same on all ranks: first digests, and the values only if these differ.

        Args:
            what: The subject of the message.
            values: The values by name, as JSON types.
            remedy: What to do about a difference.

        Raises:
            DistributedError: On all ranks, with the differing values by rank.
        """
        if self.world_size == 1:
            return
        texts = {name: json.dumps(value) for name, value in values.items()}
        digest = np.frombuffer(hashlib.sha256(json.dumps(list(texts.items())).encode()).digest()[:16], np.uint16)
        parts = [int(part) for part in digest]
        sums = self.sum(f"{what}, compared", *parts, *(part * part for part in parts))
        if any(self.world_size * squares != total * total for total, squares in zip(sums[:8], sums[8:], strict=True)):
            raise DistributedError(_difference_message(what, self.gather(what, texts), remedy))

    def on_main(self, what: str, work: Callable[[], T]) -> T:
        """Return the result of `work` on the main rank; raise its error on all ranks."""
        return work()

    def run_on_all(self, what: str, work: Callable[[], object]) -> None:
        """Run `work` on every rank.

        Raises:
            Exception: The error of the first rank that has one, on all ranks, once all are done.
        """
        work()

    def gather_results(self, what: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; return the results on the main rank, nothing on the others.

        Raises:
            Exception: The error of the first rank that has one, on all ranks, once all are done.
        """
        return [work()]

    def gather_on_main(self, what: str, values: list[T]) -> list[list[T]]:
        """Return the lists of all ranks in order on the main rank, nothing on the others; empties `values`."""
        return [values]

    def combine(self, what: str, value: T, work: Callable[[list[T]], S]) -> S:
        """Return the result of `work` on the values of all ranks in order; both can be any picklable object.

        With many ranks, only the main one gets their values and works on them.
        """
        return work([value])

    def scatter(self, what: str, work: Callable[[], Sequence[T]]) -> T | None:
        """Return this rank's entry of the values that `work` returns on the main rank; None if there are fewer."""
        return next(iter(work()), None)

    def broadcast_object(self, what: str, value: T) -> T:
        """Return the main rank's value, a tree of tuples, dicts and arrays."""
        return value

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast a host tensor from the main rank, in place, and return it."""
        return tensor

    @contextlib.contextmanager
    def collective_call(self, what: str, timeout: float | None = None, is_start: bool = False) -> Iterator[None]:
        """Enter a call that all ranks must make; an error inside ends it on all of them.

        Args:
            what: The name of the call.
            timeout: Seconds without progress after which it ends; None is 30 minutes on several ranks, and no limit
                on one.
            is_start: Whether libraries set up their communication in it, and wait in their own ways: then a rank
                without a heartbeat for a minute ends the call, and `timeout` is at least a minute.
        """
        if self.phase:  # a call inside another one, which is already watched
            with self.in_phase(what):
                yield
            return
        self._limit, ended = timeout or math.inf, threading.Event()
        watch = threading.Thread(target=self._watch_progress, args=(ended,), name="omnitrain-watch", daemon=True)
        watch.start()
        try:
            with self.in_phase(what):
                yield
        finally:
            ended.set()
            watch.join()

    @contextlib.contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Set the phase that the other ranks see inside the context."""
        previous, self.phase = self.phase, phase
        if not previous:
            self.step = 0
        try:
            yield
        finally:
            self.phase = previous

    # --- ranks that make no progress

    def _watch_progress(self, ended: threading.Event) -> None:
        """Report this process if it makes no progress, and end it after the limit."""
        detector = StallDetector()
        for elapsed in _ticks(ended):
            lines = detector.update({0: self._heartbeat()}, elapsed)
            if stalls := self._judge(detector, lines):
                sys.stdout.flush()
                print(
                    f"omnitrain.core.errors.DistributedError: {self._stall_message(stalls)}",
                    file=sys.stderr,
                    flush=True,
                )
                exit_now(1)

    def _heartbeat(self) -> Heartbeat:
        """Return the current heartbeat of this rank for the others."""
        self._beat += 1
        cpu_s, previous = time.process_time(), self._cpu_s
        self._cpu_s = cpu_s
        is_busy = cpu_s - previous >= _BUSY_SHARE * _POLL_INTERVAL.total_seconds()
        if is_busy and self.phase not in _COUNTED_PHASES and not self._is_waiting:
            self.progress_count += 1
        return Heartbeat(self._beat, self.phase, self.step, self.progress_count, self._is_waiting)

    def _judge(self, detector: StallDetector, lines: Sequence[str]) -> list[Stall]:
        """Log the due reports on ranks without progress, and return the ranks that end the run."""
        lines = [*lines, *map(describe_stall, detector.due(QUIET_S))]
        for line in lines if self._should_report(detector) else ():
            logger.warning("%s", line)
        stalled = detector.stalled(min(self._silence_limit, self._limit))
        if not all(stall.is_silent for stall in stalled):
            stalled = detector.stalled(self._limit)
        return stalled if all(stall.may_end_run for stall in stalled) else []

    def _should_report(self, detector: StallDetector) -> bool:
        """Return whether this rank reports about others."""
        return True

    def _stall_message(self, stalls: Sequence[Stall]) -> str:
        """Return the message of the error that ends the run because of these ranks."""
        everywhere = "" if self.world_size == 1 else f" on all {self.world_size} processes"
        if stalls[0].seconds < self._limit:
            return (
                f"{_describe_stalls(stalls)} While the processes of a run connect, {self._silence_limit:g} seconds of "
                f"that end it{everywhere}. Start it again with resume_from='auto'."
            )
        return (
            f"{_describe_stalls(stalls)} No progress for `timeout={self._limit:g}` seconds ends the run{everywhere}. "
            "Start it again with resume_from='auto', or with a longer `timeout` if a part of it takes as long."
        )


@dataclass(frozen=True, slots=True)
class Part:
    """The ranks along one dimension of a mesh.

    Every exchange is one of all ranks, each of which gets the result of its part: all must call it, and all notice an
    error of any rank.

    Args:
        all_ranks: All ranks.
        members: The numbers of those that belong to this part, in order.

    >>> part = Ranks().part("tp")
    >>> part.rank, part.world_size, part.sum("weights", 3.0), part.gather("names", "a")
    (0, 1, [3.0], ['a'])
    """

    all_ranks: Ranks
    members: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The number of this rank in the part."""
        return self.members.index(self.all_ranks.rank)

    @property
    def world_size(self) -> int:
        """The number of ranks in the part."""
        return len(self.members)

    @property
    def is_main(self) -> bool:
        """Whether this is the first rank of the part."""
        return self.rank == 0

    def gather(self, what: str, value: T) -> list[T]:
        """Return the values of the part's ranks in order."""
        values = self.all_ranks.gather(what, value)
        return [values[member] for member in self.members]

    def sum(self, what: str, *values: float) -> list[float]:
        """Return the sum of each value over the part's ranks."""
        return [math.fsum(of_rank) for of_rank in zip(*self.gather(what, values), strict=True)]


# How many ranks without progress an error describes.
_MAX_DESCRIBED = 8


def _describe_stalls(stalls: Sequence[Stall]) -> str:
    """Describe the first ranks without progress, and count the others."""
    more = max(0, len(stalls) - _MAX_DESCRIBED) + sum(stall.more for stall in stalls)
    suffix = [f"{more} more ranks are in the same state."] if more else []
    return " ".join([*map(describe_stall, stalls[:_MAX_DESCRIBED]), *suffix])


# How many differing values an error lists.
_MAX_VALUES = 3


def _difference_message(what: str, everywhere: Sequence[Mapping[str, str]], remedy: str) -> str:
    """Return the message for values, as text, that differ between ranks.

    >>> print(_difference_message("The arguments", [{"seed": "1", "a": "0"}, {"seed": "2", "a": "0"}], "Stop."))
    The arguments differ: `seed` is 1 on rank 0 and 2 on rank 1. Stop.
    """
    names = dict.fromkeys(name for entries in everywhere for name in entries)
    differing = [name for name in names if len({entries.get(name) for entries in everywhere}) > 1]
    listed = []
    for name in differing[:_MAX_VALUES]:
        by_value: dict[str, list[int]] = {}
        for rank, entries in enumerate(everywhere):
            by_value.setdefault(entries.get(name, "nothing"), []).append(rank)
        values = [f"{value:.200} on rank {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"
                for value, ranks in by_value.items()]  # fmt: skip
        listed.append(f"`{name}` is {' and '.join(values)}")
    more = f"; and {len(differing) - _MAX_VALUES} more" if len(differing) > _MAX_VALUES else ""
    return f"{what} differ: {'; '.join(listed) or 'their order does'}{more}. {remedy}"


_FIELDS = 20
# The most ranks of which each one gets the numbers of all in an exchange; of more, it gets the sums.
_LISTED = 64
# Bytes per part if a rank's data are sent in parts.
_PART = 1 << 24
# Bytes of the parts of all ranks that the main one holds at once, unless there is a larger value.
_PARTS = 1 << 28
# Bytes before a rank's data that hold their length.
_HEAD = 8
# Seconds that the others wait at the start for a rank without a heartbeat.
SILENCE_S = 60.0
# The phase of a rank from its first heartbeat until all ranks are connected.
_START = "the start"
# Seconds that a failed rank waits for the others to raise the same error.
_ERROR_SYNC_S = 5.0
# Seconds that a rank has to notice the failure of another rank, before it is ended.
_GRACE_S = 3.0
# Seconds that a rank waits for the others at the end of the program.
_EXIT_WAIT_S = 3.0
# Seconds without progress of this rank after which it checks the others.
_CHECK_S = 3.0
# Seconds that the main thread has to handle a signal, before another thread does.
_UNHANDLED_S = 1.0
# Seconds without an answer after which no more requests are sent to the store.
_UNRESPONSIVE_S = 10.0
# Seconds that a rank with a signal waits for another rank without a heartbeat.
_SIGNALLED_S = 10.0
_AT_THE_END = "the end of the program"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_instances = itertools.count()
_REQUESTS = 3 + len(_SIGNALS) + len(STOP_REASONS)


@functools.cache
def _call_code(what: str) -> float:
    """Return a number for the name of a call."""
    return float(zlib.crc32(what.encode()) % 65521 + 1)


def _requests_to_numbers(requests: Control) -> list[float]:
    """Return the requests as numbers, to sum over the ranks."""
    signals = [requests.signal == number for number in _SIGNALS]
    reasons = [requests.stop == reason for reason in STOP_REASONS]
    return [requests.log, requests.evaluate, requests.save, *signals, *reasons]


def _numbers_to_requests(numbers: list[float]) -> Control:
    """Return the requests of any rank; the inverse of `_requests_to_numbers`."""
    log, evaluate, save, *rest = map(bool, numbers)
    signal_number = next((number for number, is_asked in zip(_SIGNALS, rest, strict=False) if is_asked), 0)
    reasons = [reason for reason, is_asked in zip(STOP_REASONS, rest[len(_SIGNALS) :], strict=True) if is_asked]
    return Control(log, evaluate, save, pick_stop_reason(reasons), signal_number)


class ProcessRanks(Ranks):
    """The ranks of torch.distributed.

    Exchanges run on the host through gloo, so none of them waits for a GPU. Errors are reported through the store of
    torch.distributed, which can be read while a collective is stuck. The store exists before any process group: with
    it, this object watches the libraries that set up their communication, which wait forever, or for half an hour, for
    a rank that is gone. Exchanges are possible after `connect`.

    Args:
        store: A store that all ranks can reach.
        rank: The number of this rank.
        world_size: The number of ranks.
        timeout: Seconds without progress until the start fails, at least a minute; None is 30 minutes.
    """

    def __init__(self, store: distributed_c10d.Store, rank: int, world_size: int, timeout: float | None = None) -> None:
        self.rank: int = rank
        self.world_size: int = world_size
        self.progress_count: int = 0
        self.phase: str = _START
        self.world: Any = None
        """torch.distributed's group of all ranks, once it exists."""
        self._group: Any = None
        self._process = os.getpid()
        self._prefix = f"omnitrain/{next(_instances)}"
        self._store = distributed_c10d.PrefixStore(self._prefix, store)
        # Why the store no longer answers, if so: the process that hosted it has ended.
        self._store_error: RuntimeError | None = None
        self._limit, self._silence_limit = max(timeout or _TIMEOUT_S, SILENCE_S), SILENCE_S
        # How many errors all ranks have raised together and survived; numbers the next error in the store.
        self._survived_errors = 0
        # The number of the error that another rank reports, its report, and whether that rank has given up.
        self._failure_read: tuple[int, dict[str, Any], bool] | None = None
        self._has_failed = self._has_ended = False
        # Whether a rank has reached the end of the program, as last read from the store.
        self._has_left = False
        self._tree, self._judging = RankTree(rank, world_size), threading.Lock()
        # The latest heartbeat of the main rank that was read.
        self._main_heartbeat = Heartbeat(0, "", 0, 0, False)
        # Whether each rank has sent a heartbeat; reading a missing one would wait for it.
        self._all_posted = False
        # The processes of other ranks whose end this one can detect.
        self._neighbours: dict[int, dict[str, Any]] = {}
        # Seconds since the store last answered.
        self._unanswered = 0.0
        self._closing = threading.Event()
        # Two threads: if the process that hosts the store is stopped, a request never returns, not even the first.
        has_posted = threading.Event()
        self._posting = threading.Thread(
            target=self._keep_posting, args=(store, has_posted), name="omnitrain-post", daemon=True
        )
        self._watch = threading.Thread(target=self._keep_watching, name="omnitrain-watch", daemon=True)
        self._posting.start()
        self._watch.start()
        has_posted.wait()  # before this rank can be waited for; if it takes too long, the other thread ends it
        atexit.register(self._at_exit)

    # --- the start

    @property
    def is_connected(self) -> bool:
        """Whether exchanges are possible."""
        return self._group is not None

    def connect(self) -> None:
        """Form the group for exchanges, after torch.distributed's own; all ranks call it at the same place.

        Raises:
            DistributedError: If another rank is gone, or never gets here.
        """
        self.world = dist.group.WORLD
        with self.in_phase(_START):
            try:
                self._wait_for_ranks()
                timeout = datetime.timedelta(seconds=SILENCE_S)
                self._group = dist.new_group(backend="gloo", timeout=timeout)
            except RuntimeError as error:
                raise self.lost_at_start(error) from error
        self.phase = ""
        # `_wait` detects failures, so waiting has no limit: the main rank may hash a checkpoint for an hour.
        distributed_c10d._set_pg_timeout(datetime.timedelta(days=7), self._group)

    def lost_at_start(self, error: BaseException) -> DistributedError:
        """Return the error for a rank lost while a library set up its communication."""
        return error if isinstance(error, DistributedError) else self._lost_rank_error(error, _START)

    def _wait_for_ranks(self) -> None:
        """Wait until all ranks have arrived; threads watch those that have sent a heartbeat."""
        arrived = self._store.add("here", 1)
        end, pause = time.monotonic() + SILENCE_S, 0.005
        while arrived < self.world_size:
            if self._current_failure() is not None or self._has_left:
                raise self._lost_rank_error(RuntimeError("it has ended"), _START)
            if time.monotonic() > end and not self._all_posted:
                unknown = [rank for rank in range(self.world_size) if not self._store.check([f"post/{rank}"])]
                if unknown:
                    self._has_ended = True
                    raise DistributedError(
                        f"Rank {self.rank} has waited {SILENCE_S:.0f} seconds for rank "
                        f"{', '.join(map(str, unknown))}, which has joined the group of processes and has not "
                        "created a trainer since: it was killed, hangs, or does something else first. Create the "
                        "trainer at the same place of the program on all processes."
                    )
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
            arrived = self._store.add("here", 0)

    # --- exchanges

    def sum(self, what: str, *values: float) -> list[float]:
        """Return the sum of each value over all ranks; at most 19 values."""
        return self._exchange(what, values)

    def start_sync_requests(
        self, what: str, requests: Control, *values: float
    ) -> Callable[[], tuple[Control, list[float]]]:
        """Start `sync_requests`, and return a function that waits for it and returns its result; at most 8 values."""
        wait = self._begin_exchange(what, (*_requests_to_numbers(requests), *values))

        def finish() -> tuple[Control, list[float]]:
            sums = wait(None)
            return _numbers_to_requests(sums[:_REQUESTS]), sums[_REQUESTS:]

        return finish

    def gather(self, what: str, value: T) -> list[T]:
        """Return the values of all processes in the order of ranks."""
        packed = pickle.dumps(value)  # before the exchange, as it may fail
        self._exchange(what)
        padded = _add_length(packed, self._largest(what, len(packed)))
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        self._wait(dist.all_gather(parts, padded, group=self._group, async_op=True), what)
        return [pickle.loads(_strip_length(part)) for part in parts]

    def combine(self, what: str, value: T, work: Callable[[list[T]], S]) -> S:
        """Return the result of `work` on the values of all ranks in order; both can be any picklable object.

        With many ranks, only the main one gets their values and works on them.
        """
        if self.world_size <= _LISTED:
            return work(self.gather(what, value))
        by_rank = self.gather_on_main(what, [value])
        return self.on_main(what, lambda: work([entry for (entry,) in by_rank]))

    def scatter(self, what: str, work: Callable[[], Sequence[T]]) -> T | None:
        """Return this rank's entry of the values that `work` returns on the main rank; None if there are fewer."""
        values: list[bytes] = []

        def pack() -> tuple[int, int]:
            values.extend(map(pickle.dumps, work()))
            return len(values), max(map(len, values), default=0)

        count, largest = self.on_main(what, pack)
        values += [b""] * (self.world_size - len(values))
        parts = [_add_length(packed, largest) for packed in values[: self.world_size]] if self.is_main else None
        received = _add_length(b"", largest)
        self._wait(dist.scatter(received, parts, src=0, group=self._group, async_op=True), what)
        return pickle.loads(_strip_length(received)) if self.rank < count else None

    def _largest(self, what: str, number: int) -> int:
        largest = torch.tensor([number], dtype=torch.int64)
        self._wait(dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group, async_op=True), what)
        return int(largest)

    def on_main(self, what: str, work: Callable[[], T]) -> T:
        """Return the result of `work` on the main rank; raise its error on all ranks."""
        result, error, packed = None, None, torch.empty(0, dtype=torch.uint8)
        if self.is_main:
            try:
                result = work()
                packed = _pack((result, None, None))
            except Exception as raised:
                error = raised
                packed = _pack((None, self._picklable(error, what), self._picklable(error.__cause__, what)))
        (size,) = self._exchange(what, [len(packed)])  # the other ranks wait here, where failures are noticed
        packed = packed if self.is_main else torch.empty(int(size), dtype=torch.uint8)
        self._wait(dist.broadcast(packed, src=0, group=self._group, async_op=True), what)
        if not self.is_main:
            result, error, cause = _unpack(packed)
            if error is not None:
                error.__cause__ = cause
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def run_on_all(self, what: str, work: Callable[[], object]) -> None:
        """Run `work` on every rank.

        Raises:
            Exception: The error of the first rank that has one, on all ranks, once all are done.
        """
        error: Exception | None = None
        try:
            work()
        except DistributedError:
            raise
        except Exception as raised:
            error = raised
        (failed,) = self._exchange(what, [float(error is not None)])
        if not failed:
            return
        failure = None if error is None else (self._picklable(error, what), self._picklable(error.__cause__, what))
        failures = enumerate(self.gather(what, failure))
        rank, first = next((rank, failure) for rank, failure in failures if failure is not None)
        if error is not None and rank == self.rank:
            raise error
        raise first[0] from first[1]

    def gather_results(self, what: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; return the results on the main rank, nothing on the others.

        Raises:
            Exception: The error of the first rank that has one, on all ranks, once all are done.
        """
        result: list[T] = []
        self.run_on_all(what, lambda: result.append(work()))
        return [entry for (entry,) in self.gather_on_main(what, result)]

    def gather_on_main(self, what: str, values: list[T]) -> list[list[T]]:
        """Return the lists of all ranks in order on the main rank, nothing on the others; empties `values`.

        They are sent in parts, so only the main rank ever holds more than its own.
        """
        self._exchange(what)
        by_rank: list[list[T]] = [[] for _ in range(self.world_size)]
        values.reverse()  # as they are popped from the end
        limit = min(_PART, max(_PARTS // self.world_size, 1 << 16))
        while True:
            packed = b"" if self.is_main else b"".join(_pop_packed(values, limit))
            largest = self._largest(what, len(packed))
            if not largest:
                break
            padded = _add_length(packed, largest)
            del packed
            parts = [torch.empty_like(padded) for _ in range(self.world_size)] if self.is_main else None
            self._wait(dist.gather(padded, parts, dst=0, group=self._group, async_op=True), what)
            for entries, part in zip(by_rank, parts or (), strict=False):
                data = _strip_length(part)
                stream = io.BytesIO(data)
                while stream.tell() < len(data):
                    entries.append(pickle.load(stream))
        if not self.is_main:
            return []
        by_rank[self.rank] = values[::-1]
        values.clear()
        return by_rank

    def broadcast_object(self, what: str, value: T) -> T:
        """Return the main rank's value, a tree of tuples, dicts and arrays; large arrays are sent without a copy."""
        arrays: list[np.ndarray] = []
        tree: Any = self.on_main(what, lambda: _extract_arrays(value, arrays))
        if not self.is_main:
            tree = _allocate_arrays(tree, arrays)
        for array in arrays:
            flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
            for part in flat.split(_PART) if len(flat) else ():
                self._wait(dist.broadcast(part, src=0, group=self._group, async_op=True), what)
        return value if self.is_main else tree

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a contiguous host tensor with that of the main rank, and return it."""
        if tensor.numel():
            sent = as_bytes(tensor)  # gloo does not support every dtype
            self._wait(dist.broadcast(sent, src=0, group=self._group, async_op=True), "the reading of tensors")
        return tensor

    def _exchange(self, what: str, values: Sequence[float] = (), seconds: float | None = None) -> list[float]:
        """Return the sum of each value over all ranks, which must all make the same call."""
        return self._begin_exchange(what, values)(seconds)

    def _begin_exchange(self, what: str, values: Sequence[float]) -> Callable[[float | None], list[float]]:
        """Start an exchange, and return a function that waits for it, up to some seconds, and returns the sums."""
        if self._has_ended:
            raise DistributedError(f"{what}: this run has ended by an error on one of its ranks. Start it again.")
        self.progress_count += 1
        code = _call_code(what)
        if self.world_size > _LISTED:
            return self._begin_summing(what, code, values)
        # The first row is this rank's. For so few numbers, gloo's all_gather takes half the time of its all_reduce.
        board = torch.zeros(self.world_size + 1, _FIELDS, dtype=torch.float64)
        numbers = board.numpy()
        numbers[0, 0], numbers[0, 1 : 1 + len(values)] = code, values
        work = dist.all_gather(list(board[1:]), board[0], group=self._group, async_op=True)

        def finish(seconds: float | None) -> list[float]:
            self._wait(work, what, seconds)
            if (numbers[1:, 0] != code).any():
                raise self._mismatch_error(what)
            return numbers[1:, 1 : 1 + len(values)].sum(0).tolist()

        return finish

    def _begin_summing(self, what: str, code: float, values: Sequence[float]) -> Callable[[float | None], list[float]]:
        """Do `_begin_exchange` with an amount of data that does not grow with the ranks; integers are summed exactly.

        The codes of all ranks are this one's if and only if both their sum and that of their squares say so: then
        their variance is 0. So either all ranks notice a difference, or none.
        """
        row = torch.zeros(_FIELDS + 1, dtype=torch.float64)
        numbers = row.numpy()
        numbers[:2], numbers[2 : 2 + len(values)] = (code, code * code), values
        work = dist.all_reduce(row, group=self._group, async_op=True)

        def finish(seconds: float | None) -> list[float]:
            self._wait(work, what, seconds)
            if numbers[0] != self.world_size * code or numbers[1] != self.world_size * code * code:
                raise self._mismatch_error(what)
            return numbers[2 : 2 + len(values)].tolist()

        return finish

    def _wait(self, work: Any, what: str, seconds: float | None = None) -> None:
        """Wait for an exchange while no rank has failed, or up to this many seconds."""
        begin, self._is_waiting = time.monotonic(), True
        # Kept until the next one: if gloo's thread freed it at the very end of the program, the process would abort.
        self._latest = work
        try:
            while True:
                start = time.monotonic()
                try:
                    work.wait(_POLL_INTERVAL)
                    return
                except RuntimeError as error:
                    end = time.monotonic()
                    if end - start < 0.9 * _POLL_INTERVAL.total_seconds():
                        raise self._lost_rank_error(error, what) from error
                    if seconds is not None and end - begin >= seconds:
                        raise TimeoutError(what) from error
                    if seconds is None and (self._current_failure() is not None or self._has_left):
                        raise self._lost_rank_error(error, what) from error
                    if seconds is None and signals.handled() and (stalls := self._stalled_ranks()):
                        raise DistributedError(self._signal_message(signals.handled(), stalls)) from error
        finally:
            self._is_waiting = False

    # --- errors

    @contextlib.contextmanager
    def collective_call(self, what: str, timeout: float | None = None, is_start: bool = False) -> Iterator[None]:
        """Enter a call that all ranks must make; an error on one of them ends it on all.

        After an error that all of them raise together, such as a loss that is not finite, they can continue.

        Raises:
            DistributedError: If another rank made a different call, or failed; its error is in the message.
        """
        with contextlib.ExitStack() as stack:
            if not self.phase:
                self._silence_limit = SILENCE_S if is_start else math.inf
                self._limit = max(timeout or _TIMEOUT_S, SILENCE_S if is_start else 0.0)
                stack.callback(setattr, self, "_silence_limit", math.inf)
            stack.enter_context(self.in_phase(what))
            stack.enter_context(self._propagate_errors(what))
            self._exchange(what)
            yield

    @contextlib.contextmanager
    def _propagate_errors(self, what: str) -> Iterator[None]:
        """End a call on all ranks if it raises an error on this one."""
        try:
            yield
        except DistributedError:
            self._has_ended = True
            raise
        except Exception as error:
            if is_connection_error(error):
                raise self._lost_rank_error(error, what) from error
            self._report_failure(what, error)
            self._has_ended = self._has_ended or not self._raised_on_all_ranks(error, what)
            raise
        except BaseException as error:  # a second signal, or sys.exit(): this rank ends at once
            self._report_failure(what, error)
            self._agree_on_error_scope("local")
            self._has_ended = True
            raise

    def _raised_on_all_ranks(self, error: Exception, what: str) -> bool:
        """Return whether all ranks raised the same error; the exchange notifies those that did not."""
        verdict = "common"
        try:
            self._exchange(f"{type(error).__name__} in {what}", seconds=_ERROR_SYNC_S)
        except (DistributedError, TimeoutError):
            verdict = "local"
        if self._agree_on_error_scope(verdict) != "common":
            return False
        self._survived_errors, self._has_failed = self._survived_errors + 1, False
        return True

    def _agree_on_error_scope(self, verdict: str) -> str:
        """Return whether the error is "common" or "local": the first verdict in the store counts for all ranks.

        Otherwise a rank that stopped waiting and one that arrived a little late would disagree.
        """
        if self._store_unresponsive:
            return "local"
        try:
            return self._store.compare_set(f"verdict/{self._survived_errors}", "", verdict).decode()
        except RuntimeError:
            return "local"

    def _report_failure(self, what: str, error: BaseException) -> None:
        """Report to the other ranks that this one has failed; the first report counts."""
        self._has_failed = True
        text = "".join(traceback.format_exception(error))
        self._send_report({"what": what, "error": f"{type(error).__name__}: {error}", "traceback": text})

    def _send_report(self, report: dict[str, Any]) -> None:
        if not self._store_unresponsive:
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(
                    f"failure/{self._survived_errors}", "", json.dumps({"rank": self.rank, **report})
                )

    def _read_failure(self) -> None:
        """Check whether another rank has reported a failure, and still waits for the others to raise it."""
        survived, keys = self._survived_errors, [f"{name}/{self._survived_errors}" for name in ("failure", "verdict")]
        if self._store_unresponsive:
            return
        with contextlib.suppress(RuntimeError):  # the process that hosted the store may have ended
            report = json.loads(self._store.get(keys[0])) if self._store.check(keys[:1]) else None
            if report is not None and (report["rank"] != self.rank or "stall" in report):
                given_up = self._store.check(keys[1:]) and self._store.get(keys[1]) != b"common"
                self._failure_read = survived, report, given_up

    def _current_failure(self) -> dict[str, Any] | None:
        """Return the failure report of another rank, if one has been read."""
        read = self._failure_read
        return None if read is None or read[0] != self._survived_errors else read[1]

    def _failure_error(self, report: dict[str, Any]) -> DistributedError:
        self._has_ended = True
        if "stall" in report:
            return DistributedError(report["stall"])
        return DistributedError(
            f"Rank {report['rank']} failed in {report['what']}, and so the run ends on all {self.world_size} "
            f"processes: {report['error']}\n--- rank {report['rank']}\n{report['traceback']}---"
        )

    def _lost_rank_error(self, error: BaseException, what: str) -> DistributedError:
        """Return the error for a rank that is gone; it has reported its failure, unless it was killed."""
        self._has_ended = True
        self._read_failure()
        report = self._current_failure()
        if report is not None:
            return self._failure_error(report)
        if self._has_exited():
            return self._mismatch_error(what)
        reason = str(error).partition(". This is")[0].partition("\n")[0]  # the rest of gloo's message is no help
        lost = DistributedError(
            f"Rank {self.rank} lost another process in {what}: it was killed, or its machine is gone ({reason}). "
            "Start the run again with resume_from='auto'; torchrun's --max-restarts does so by itself."
        )
        self._report_failure(what, lost)
        return lost

    def _mismatch_error(self, what: str) -> DistributedError:
        """Return an error that lists the call of every rank. All ranks detect it at once, so all record their calls."""
        self._has_ended = True
        self._read_failure()
        report = self._current_failure()
        if report is not None:
            return self._failure_error(report)
        if self._has_failed:
            return DistributedError(what)  # the others continued, and read the report of this error
        self._record_call(what)
        calls = {**self._calls_by_rank(), self.rank: what}
        places = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(calls.items()))
        return DistributedError(
            f"The processes of the run are at different places, where they would have waited for each other forever: "
            f"{places}. Calls of the trainer that concern the whole run (train, evaluate, test, predict, save_model, "
            "save_checkpoint, load_checkpoint) are made on every rank, not under `if trainer.is_main_process:`."
        )

    def _record_call(self, what: str) -> None:
        with contextlib.suppress(RuntimeError):
            if not self._store_unresponsive:
                self._store.set(f"at/{self.rank}", what)
                self._store.add("placed", 1)

    def _calls_by_rank(self) -> dict[int, str]:
        """Return the recorded calls, by rank, once all are recorded or after some seconds."""
        at: dict[int, str] = {}
        end = time.monotonic() + _EXIT_WAIT_S
        with contextlib.suppress(RuntimeError):
            while not self._store_unresponsive and time.monotonic() < end:
                if self._store.add("placed", 0) >= self.world_size:
                    break
                time.sleep(0.02)
            for rank in range(0 if self._store_unresponsive else self.world_size):
                if self._store.check([f"at/{rank}"]):
                    at[rank] = self._store.get(f"at/{rank}").decode()
        return at

    def _has_exited(self) -> bool:
        """Return whether a rank reached the end of the program and stopped waiting for the others."""
        with contextlib.suppress(RuntimeError):
            self._has_left = self._has_left or (not self._store_unresponsive and bool(self._store.check(["left"])))
        return self._has_left

    # --- the threads

    def _keep_posting(self, store: distributed_c10d.Store, has_posted: threading.Event) -> None:
        """Send heartbeats, check for failures of others, and check their progress while this rank waits."""
        idle, unread = 0.0, 0.0
        heartbeat = self._heartbeat()
        with contextlib.suppress(RuntimeError):  # a separate connection, as a stuck collective may hold the other one
            self._store = distributed_c10d.PrefixStore(self._prefix, store.clone())  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            self._store.set(f"process/{self.rank}", json.dumps(identify_process()))
            self._write_report(heartbeat)
            self._store.add("posted", 1)
        has_posted.set()
        for elapsed in _ticks(self._closing):
            previous, heartbeat = heartbeat, self._heartbeat()
            idle = idle + elapsed if heartbeat[1:] == previous[1:] else 0.0
            unread += elapsed
            try:
                self._write_report(heartbeat)
                self._read_failure()
                self._has_exited()
                if not self._all_posted:
                    self._all_posted = self._store.add("posted", 0) >= self.world_size
                    self._neighbours = self._read_neighbours() if self._all_posted else {}
                    self._judge_heartbeats({self.rank: heartbeat}, elapsed)
                else:
                    checks_others = idle >= min(_CHECK_S, self._limit / 2) or self._tree.all_ranks.has_reported
                    self._read_reports(unread, checks_others)
                    unread = 0.0
                if self.phase and self._silence_limit < math.inf and self._current_failure() is None:
                    self._check_neighbours()
                self._unanswered, self._store_error = 0.0, None
            except RuntimeError as error:  # the process that hosted the store has ended
                self._store_error = error
                if self._failure_read is not None:
                    self._failure_read = *self._failure_read[:2], True

    def _write_report(self, heartbeat: Heartbeat) -> None:
        self._store.set(f"post/{self.rank}", json.dumps(Report(heartbeat, self._tree.digest()).to_json()))

    def _read_reports(self, elapsed: float, checks_others: bool) -> None:
        """Read the reports of other ranks, and judge them all if this rank has to.

        Args:
            elapsed: Seconds since the last call.
            checks_others: Whether this rank seems to wait for another one. With few ranks, they are judged only then.
        """
        tree = self._tree
        is_signalled = bool(signals.handled() or signals.unhandled())  # this rank decides for itself when to leave
        judges = tree.is_top or is_signalled if tree.is_deep else checks_others
        ranks = tree.ranks_to_read(judges)
        keys = [f"post/{rank}" for rank in ranks]
        extended = bool(keys) and self._store.has_extended_api()  # type: ignore[attr-defined]
        texts = self._store.multi_get(keys) if extended else [self._store.get(key) for key in keys]
        reports = {rank: Report.from_json(*json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}
        if 0 in reports:
            self._main_heartbeat = reports[0].heartbeat
        with self._judging:
            lines = tree.update(reports, elapsed, judges)
            stalled = self._judge(tree.all_ranks, lines) if judges else []
        self._end_on_stall(stalled)

    def _read_neighbours(self) -> dict[int, dict[str, Any]]:
        first, count = self.rank - int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        ranks = [rank for rank in range(max(first, 0), min(first + count, self.world_size)) if rank != self.rank]
        processes = {rank: json.loads(self._store.get(f"process/{rank}")) for rank in ranks}
        return {rank: process for rank, process in processes.items() if is_in_same_container(process)}

    def _check_neighbours(self) -> None:
        """End the run during the start if another process has ended: no connection exists yet that would break."""
        for rank, process in self._neighbours.items():
            if not is_alive(process):
                text = (
                    f"The process of rank {rank} has ended, before the run could begin on all {self.world_size} "
                    "processes. Start it again with resume_from='auto'; torchrun's --max-restarts does so by itself."
                )
                self._report_lost_rank(rank, self.phase, "its process has ended", text)
                return

    def _report_lost_rank(self, rank: int, what: str, error: str, text: str) -> None:
        """Report that the run ends on all ranks because of another rank, and why."""
        report = {"what": what, "error": error, "stall": text, "traceback": ""}
        self._send_report(report)
        self._agree_on_error_scope("local")
        self._read_failure()
        if self._current_failure() is None:  # the store does not answer
            self._failure_read = self._survived_errors, {"rank": rank, **report}, True

    def _judge_heartbeats(self, heartbeats: Mapping[int, Heartbeat], elapsed: float) -> None:
        """Do what `_read_reports` does with the heartbeats of some ranks, while those of others cannot be read."""
        with self._judging:
            stalled = self._judge(self._tree.all_ranks, self._tree.all_ranks.update(heartbeats, elapsed))
        self._end_on_stall(stalled)

    def _end_on_stall(self, stalled: Sequence[Stall]) -> None:
        """End the run on all ranks if some have made no progress for too long."""
        if stalled and not self._has_ended and self._current_failure() is None:
            first = stalled[0]
            self._report_lost_rank(first.rank, first.heartbeat.phase, "no progress", self._stall_message(stalled))

    def _should_report(self, detector: StallDetector) -> bool:
        return self._store_unresponsive or detector.first_alive(min(QUIET_S, 5.0)) == self.rank

    @property
    def _store_unresponsive(self) -> bool:
        """Whether the store does not answer: the process that hosts it is stopped or gone."""
        return self._unanswered >= _UNRESPONSIVE_S

    def _keep_watching(self) -> None:
        """End this process if another rank has failed, or a signal has arrived, and it is stuck in a collective."""
        since_failure = since_lost = 0.0
        for elapsed in _ticks(self._closing):
            if self._has_ended:
                return
            has_lost = self.phase == _START and (self._has_left or self._store_error is not None)
            since_lost = since_lost + elapsed if has_lost else 0.0
            if since_lost > _GRACE_S:
                self._abort(self._lost_rank_error(self._store_error or RuntimeError("it has ended"), _START))
            self._unanswered += elapsed
            if self._store_unresponsive:
                is_store_on_main = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
                heartbeats = {0: self._main_heartbeat} if is_store_on_main and self.rank else {}
                self._judge_heartbeats({**heartbeats, self.rank: self._heartbeat()}, elapsed)
            self._exit_at_signal()
            read = self._failure_read
            if read is None or read[0] != self._survived_errors or not read[2]:
                since_failure = 0.0
                continue
            if not since_failure and "stall" not in read[1]:
                logger.error("Rank %d failed in %s: %s", read[1]["rank"], read[1]["what"], read[1]["error"])
            since_failure += elapsed
            if since_failure > _GRACE_S and not self._has_ended:
                self._abort(self._failure_error(read[1]))

    def _stalled_ranks(self) -> list[Stall]:
        """Return the stalled ranks for which a rank with a signal no longer waits."""
        with self._judging:
            detector = self._tree.all_ranks
            stalls = detector.stalled(_SIGNALLED_S)
            if not stalls or not (all(stall.is_silent for stall in stalls) or detector.are_reported(stalls)):
                return []
        return stalls

    def _exit_at_signal(self) -> None:
        """End this process if a signal has arrived that the main thread cannot handle."""
        unhandled = signals.unhandled()
        if not unhandled or time.monotonic() - unhandled[-1][1] < _UNHANDLED_S:
            return
        number, stalls = unhandled[0][0], self._stalled_ranks()
        if any(signals.is_second(*received) for received in unhandled):
            text = f"{signal.Signals(number).name} again: this rank exits at once."
        elif stalls:
            text = self._signal_message(number, stalls)
        else:
            return
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
        self._report_failure(self.phase, SystemExit(128 + number))
        self._agree_on_error_scope("local")
        self._keep_store_alive()
        exit_now(128 + number)

    def _signal_message(self, number: int, stalls: Sequence[Stall]) -> str:
        return (
            f"{_describe_stalls(stalls)} {signal.Signals(number).name} ends rank {self.rank} before its step is "
            "done, which needs all ranks: the latest checkpoint counts."
        )

    # --- the end of the program

    def _abort(self, error: DistributedError) -> None:
        sys.stdout.flush()
        print(f"omnitrain.core.errors.DistributedError: {error}", file=sys.stderr, flush=True)
        self._keep_store_alive()
        exit_now(1)

    def _at_exit(self) -> None:
        """Make sure, at the end of the program, that no other rank waits for this one."""
        self._closing.set()
        if not self._store_unresponsive and os.getpid() == self._process:
            self._posting.join(2 * _POLL_INTERVAL.total_seconds())
            with contextlib.suppress(RuntimeError):
                self._write_report(self._heartbeat()._replace(has_ended=True))
        if os.getpid() != self._process:
            return
        if self._has_ended:
            self._keep_store_alive()
            return
        if self._group is None:
            self._record_exit()
            return
        if dist.group.WORLD is not self.world:
            return  # the user has destroyed the group
        with contextlib.suppress(ValueError):  # not the main thread
            # when the first process ends, torchrun sends SIGTERM to all others, whatever the exit code
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            self._exchange(_AT_THE_END, seconds=_EXIT_WAIT_S)
            dist.destroy_process_group()
        except TimeoutError:  # another rank is still working
            self._record_exit()
        except DistributedError as error:
            if not self._has_exited():  # if so, another rank ended long ago
                self._abort(error)

    def _record_exit(self) -> None:
        """Record that this rank is at the end of the program; the others read it in their next collective call."""
        with contextlib.suppress(RuntimeError):
            if not self._store_unresponsive:
                self._record_call(_AT_THE_END)
                self._store.set("left", "")

    def _keep_store_alive(self) -> None:
        """Keep the store alive after an error, if this process hosts it, until the others have read the report."""
        if self._store_unresponsive:
            return
        with contextlib.suppress(RuntimeError):
            self._store.set(f"parted/{self.rank}", "")
            end = time.monotonic() + _EXIT_WAIT_S
            hosts_store = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            keys = [f"parted/{rank}" for rank in range(self.world_size)]
            while hosts_store and time.monotonic() < end and not self._store.check(keys):
                time.sleep(0.02)

    def _picklable(self, error: BaseException | None, what: str) -> Any:
        """Return a picklable copy of the error, with a note of its origin."""
        if error is None:
            return None
        try:
            copy = pickle.loads(pickle.dumps(error))
        except Exception:
            copy = RuntimeError(f"{type(error).__name__}: {error}")
        copy.add_note(f"Raised on rank {self.rank}, in {what}:\n{''.join(traceback.format_exception(error))}")
        return copy


def _ticks(ended: threading.Event) -> Iterator[float]:
    """Yield, about once a second, how long this process has run since; time while it was stopped does not count."""
    interval = _POLL_INTERVAL.total_seconds()
    last = time.monotonic()
    while not ended.wait(interval):
        current = time.monotonic()
        yield min(current - last, 2 * interval)
        last = current


def exit_now(code: int) -> NoReturn:
    """End this process, from another thread than the main one, and its loaders' workers, which may hang too."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def _pack(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpack(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def _add_length(data: bytes, size: int) -> torch.Tensor:
    """Return data with their length before them, padded to `size` bytes."""
    padded = torch.zeros(_HEAD + size, dtype=torch.uint8)
    numbers = padded.numpy()
    numbers[:_HEAD] = np.frombuffer(len(data).to_bytes(_HEAD, "little"), np.uint8)
    numbers[_HEAD : _HEAD + len(data)] = np.frombuffer(data, np.uint8)
    return padded


def _strip_length(padded: torch.Tensor) -> memoryview:
    """Return the data of `_add_length`, without a copy."""
    data = padded.numpy().data
    return data[_HEAD : _HEAD + int.from_bytes(data[:_HEAD], "little")]


def _pop_packed(values: list[Any], limit: int) -> list[bytes]:
    """Pop values from the end of a list until they fill so many bytes, and return them pickled."""
    packed, size = [], 0
    while values and size < limit:
        packed.append(pickle.dumps(values.pop()))
        size += len(packed[-1])
    return packed


class _ArraySpec(NamedTuple):
    """Shape and dtype of an extracted array."""

    shape: tuple[int, ...]
    dtype: str


def _extract_arrays(value: Any, arrays: list[np.ndarray]) -> Any:
    """Return a tree with an `_ArraySpec` instead of each array, which goes to `arrays`."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        arrays.append(np.require(value, requirements=["C", "W"]))
        return _ArraySpec(value.shape, value.dtype.str)
    if isinstance(value, dict):
        return {key: _extract_arrays(child, arrays) for key, child in value.items()}
    return tuple(_extract_arrays(child, arrays) for child in value) if type(value) is tuple else value


def _allocate_arrays(tree: Any, arrays: list[np.ndarray]) -> Any:
    """Return a tree with a new array instead of each `_ArraySpec`; the arrays go to `arrays` too."""
    if isinstance(tree, _ArraySpec):
        arrays.append(np.empty(tree.shape, tree.dtype))
        return arrays[-1]
    if isinstance(tree, dict):
        return {key: _allocate_arrays(child, arrays) for key, child in tree.items()}
    return tuple(_allocate_arrays(child, arrays) for child in tree) if type(tree) is tuple else tree


def is_connection_error(error: BaseException) -> bool:
    """Return whether gloo or NCCL raised this because the other end is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))
