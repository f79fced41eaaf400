"""Communication between the ranks of a run: reductions, broadcasts, requests, failure detection.

`Ranks` is a single process: every result is its own. `ProcessRanks` uses torch.distributed. Every exchange carries the
name of its call, so ranks that make different calls (such as a call on one rank only) notice at once and raise a
`DistributedError` instead of waiting for each other forever. Collectives of the model do not belong here, but each rank
posts where it is, so a rank for which the others wait in a collective is noticed too.
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
from omnitrain.distributed.processes import is_alive, is_known, own_process
from omnitrain.distributed.watchdog import Post, Report, Stall, Stalls, Tree, in_words

logger: logging.Logger = logging.getLogger("omnitrain")

T = TypeVar("T")
S = TypeVar("S")


_POLL_INTERVAL = datetime.timedelta(seconds=1)
QUIET_S = 30.0
"""Seconds without progress after which a rank is reported."""
_TIMEOUT_S = 1800.0
"""Seconds without progress after which a run on several processes ends, unless its trainer has a `timeout`."""
_BUSY_SHARE = 0.02
"""The share of CPU time that counts as progress in places without a counter, such as a long save or metric."""
_COUNTED = ("data", "step", "evaluation")
"""Places where batches are counted; CPU time does not count there, as NCCL waits in a busy loop."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8, 1-D.

    >>> as_bytes(torch.tensor([[1], [2]], dtype=torch.int16))
    tensor([1, 0, 2, 0], dtype=torch.uint8)
    """
    assert tensor.is_contiguous()  # which any stride of a dimension of size 1 is, and `view` does not know
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Which share of the data a rank has; the ranks of a tensor-parallel group have the same one.

    Attributes:
        rank: The number of the share.
        size: The number of shares: the data-parallel ranks.
        counts: Whether this rank stands for its share in sums over ranks: it is the first one that has it.
    """

    rank: int = 0
    size: int = 1
    counts: bool = True


_MODEL_DIMENSIONS = ("cp", "sp", "tp")
"""The dimensions of a mesh whose ranks work on the same samples; they are the last ones of it."""


class Ranks:
    """The ranks of a run, seen from one of them; here it is the only one.

    Attributes:
        place: What this rank is doing, in one word, during a call of the trainer.
        step: The number of its current step.
        moves: Counts its progress; increment it in places that may take long.

    >>> ranks = Ranks()
    >>> ranks.sum("weights", 3.0, 4.0), ranks.gather("names", "a"), ranks.on_main("a sum", lambda: 1 + 1)
    ([3.0, 4.0], ['a'], 2)
    """

    rank: int = 0
    world_size: int = 1
    place: str = ""
    step: int = 0
    moves: int = 0
    mesh: Any = None
    """Torch's `DeviceMesh` that the ranks are laid out in: that of the trainer whose call runs; None without."""
    dimensions: Mapping[str, int] = MappingProxyType({})
    """The sizes of the mesh's dimensions, the outermost first; empty without a mesh."""
    _beat: int = 0
    _is_waiting: bool = False
    _limit: float = math.inf
    """Seconds without progress of any rank after which the current call ends."""
    _silence: float = math.inf
    """Seconds without a post from a rank after which it ends too."""
    _processor_s: float = 0.0
    """The CPU time used by this process until its latest post."""

    @property
    def is_main(self) -> bool:
        """Whether this is the main rank, which prints and writes."""
        return self.rank == 0

    def lay_out(self, mesh: Any) -> None:
        """Lay the ranks out in torch's `DeviceMesh`, whose sizes multiply to their number; in none if it is None."""
        self.mesh = mesh
        self.dimensions = {} if mesh is None else dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))

    @contextlib.contextmanager
    def laid_out(self, mesh: Any) -> Iterator[None]:
        """Lay the ranks out in a mesh inside; the trainers of a program share them, and each has a mesh of its own."""
        before = self.mesh
        self.lay_out(mesh)
        try:
            yield
        finally:
            self.lay_out(before)

    @property
    def data(self) -> Coordinates:
        """Which share of the data this rank has: one of its own, unless the mesh says otherwise."""
        model = math.prod(size for name, size in self.dimensions.items() if name in _MODEL_DIMENSIONS)
        return Coordinates(self.rank // model, self.world_size // model, self.rank % model == 0)

    def once(self, values: Sequence[float]) -> list[float]:
        """Return numbers of this rank's share of the data for a sum over ranks: zeros if another rank gives them."""
        return [value if self.data.counts else 0 for value in values]

    def by_share(self, values: Sequence[T]) -> Sequence[T]:
        """Return of the values of all ranks, from `gather`, one for each share of the data."""
        return values[:: self.world_size // self.data.size]

    def part(self, name: str) -> Part:
        """Return the ranks that differ from this one only in a dimension of the mesh; this one alone without it."""
        sizes = list(self.dimensions.values())
        if name not in self.dimensions:
            return Part(self, (self.rank,))
        place = list(self.dimensions).index(name)
        step = math.prod(sizes[place + 1 :])
        first = self.rank - self.rank // step % sizes[place] * step
        return Part(self, tuple(range(first, first + step * sizes[place], step)))

    def sum(self, what: str, *values: float) -> list[float]:
        """Return the sum of each value over all ranks."""
        return list(values)

    def agree(self, what: str, asked: Control, *values: float) -> tuple[Control, list[float]]:
        """Return the requests made on any rank, and the sum of each value over all ranks."""
        return self.begin_agreeing(what, asked, *values)()

    def begin_agreeing(self, what: str, asked: Control, *values: float) -> Callable[[], tuple[Control, list[float]]]:
        """Start `agree`, and return a function that waits for it and returns its result."""
        return lambda: (asked, list(values))

    def gather(self, what: str, value: T) -> list[T]:
        """Return the values of all ranks in order; they can be any picklable object."""
        return [value]

    def check_alike(self, what: str, values: Mapping[str, Any], remedy: str) -> None:
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
        told = {name: json.dumps(value) for name, value in values.items()}
        digest = np.frombuffer(hashlib.sha256(json.dumps(list(told.items())).encode()).digest()[:16], np.uint16)
        parts = [int(part) for part in digest]
        found = self.sum(f"{what}, compared", *parts, *(part * part for part in parts))
        if any(self.world_size * squares != total * total for total, squares in zip(found[:8], found[8:], strict=True)):
            raise DistributedError(_difference(what, self.gather(what, told), remedy))

    def on_main(self, what: str, work: Callable[[], T]) -> T:
        """Return the result of `work` on the main rank; raise its error on all ranks."""
        return work()

    def attempt(self, what: str, work: Callable[[], object]) -> None:
        """Have every rank do its work.

        Raises:
            Exception: The error of the first rank that has one, on all ranks, once all are done.
        """
        work()

    def together(self, what: str, work: Callable[[], T]) -> list[T]:
        """Return the results of `work`, done by every rank, on the main rank; nothing on the others.

        Raises:
            Exception: The error of the first rank that has one, on all ranks, once all are done.
        """
        return [work()]

    def gather_on_main(self, what: str, values: list[T]) -> list[list[T]]:
        """Return the lists of all ranks in order on the main rank, nothing on the others; empties `values`."""
        return [values]

    def combine(self, what: str, value: T, work: Callable[[list[T]], S]) -> S:
        """Return the result of `work` on the values of all ranks in order; both can be any picklable object.

        With many ranks, the main one alone gets their values and works on them.
        """
        return work([value])

    def deal(self, what: str, work: Callable[[], Sequence[T]]) -> T | None:
        """Return this rank's one of the values that `work` returns on the main rank; None if there are fewer."""
        return next(iter(work()), None)

    def share(self, what: str, value: T) -> T:
        """Return the main rank's value, a tree of tuples, dicts and arrays."""
        return value

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast a host tensor from the main rank, in place, and return it."""
        return tensor

    @contextlib.contextmanager
    def calling(self, what: str, timeout: float | None = None, is_start: bool = False) -> Iterator[None]:
        """Enter a call that all ranks must make; an error inside ends it on all of them.

        Args:
            what: The name of the call.
            timeout: Seconds without progress after which it ends; None is 30 minutes on several ranks, and no limit
                on one.
            is_start: Whether libraries set up their communication in it, and wait in their own ways: then a rank that
                posts nothing for a minute ends the call, and `timeout` is at least a minute.
        """
        if self.place:  # a call inside another one, which is already watched
            with self.at(what):
                yield
            return
        self._limit, ended = timeout or math.inf, threading.Event()
        watch = threading.Thread(target=self._watch_itself, args=(ended,), name="omnitrain-watch", daemon=True)
        watch.start()
        try:
            with self.at(what):
                yield
        finally:
            ended.set()
            watch.join()

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Set the place that the other ranks see inside."""
        before, self.place = self.place, place
        if not before:
            self.step = 0
        try:
            yield
        finally:
            self.place = before

    # --- ranks that make no progress

    def _watch_itself(self, ended: threading.Event) -> None:
        """Report this process if it makes no progress, and end it after the limit."""
        stalls = Stalls()
        for passed in _looks(ended):
            lines = stalls.look({0: self._post()}, passed)
            if found := self._judge(stalls, lines):
                sys.stdout.flush()
                print(f"omnitrain.core.errors.DistributedError: {self._text_of(found)}", file=sys.stderr, flush=True)
                leave_now(1)

    def _post(self) -> Post:
        """Return the current post of this rank for the others."""
        self._beat += 1
        used, before = time.process_time(), self._processor_s
        self._processor_s = used
        is_busy = used - before >= _BUSY_SHARE * _POLL_INTERVAL.total_seconds()
        if is_busy and self.place not in _COUNTED and not self._is_waiting:
            self.moves += 1
        return Post(self._beat, self.place, self.step, self.moves, self._is_waiting)

    def _judge(self, stalls: Stalls, lines: Sequence[str]) -> list[Stall]:
        """Log what is due about ranks without progress, and return those that end the run."""
        lines = [*lines, *map(in_words, stalls.due(QUIET_S))]
        for line in lines if self._tells(stalls) else ():
            logger.warning("%s", line)
        found = stalls.found(min(self._silence, self._limit))
        if not all(stall.is_silent for stall in found):
            found = stalls.found(self._limit)
        return found if all(stall.may_end for stall in found) else []

    def _tells(self, stalls: Stalls) -> bool:
        """Return whether this rank reports about others."""
        return True

    def _text_of(self, found: Sequence[Stall]) -> str:
        """Return the message of the error that ends the run because of these ranks."""
        whole = "" if self.world_size == 1 else f" on all {self.world_size} processes"
        if found[0].seconds < self._limit:
            return (
                f"{_said(found)} While the processes of a run meet, {self._silence:g} seconds of "
                f"that end it{whole}. Start it again with resume_from='auto'."
            )
        return (
            f"{_said(found)} No progress for `timeout={self._limit:g}` seconds ends the run{whole}. "
            "Start it again with resume_from='auto', or with a longer `timeout` if a part of it takes as long."
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the ranks: those of one dimension of a mesh, on which all others have the same coordinate.

    Every exchange is one of all ranks, each of which gets what its own part has: all must call it, and an error of any
    rank is noticed by all.

    Args:
        whole: All ranks.
        members: The numbers of those that belong to this part, in order.

    >>> part = Ranks().part("tp")
    >>> part.rank, part.world_size, part.sum("weights", 3.0), part.gather("names", "a")
    (0, 1, [3.0], ['a'])
    """

    whole: Ranks
    members: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The number of this rank in the part."""
        return self.members.index(self.whole.rank)

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
        found = self.whole.gather(what, value)
        return [found[member] for member in self.members]

    def sum(self, what: str, *values: float) -> list[float]:
        """Return the sum of each value over the part's ranks."""
        return [math.fsum(of_rank) for of_rank in zip(*self.gather(what, values), strict=True)]


_TOLD = 8
"""How many ranks without progress an error names."""


def _said(found: Sequence[Stall]) -> str:
    """Return what is known of ranks without progress: of the first ones, and how many more there are."""
    others = max(0, len(found) - _TOLD) + sum(stall.others for stall in found)
    more = [f"So it is with {others} more ranks."] if others else []
    return " ".join([*map(in_words, found[:_TOLD]), *more])


_NAMED = 3
"""How many differing values an error names."""


def _difference(what: str, everywhere: Sequence[Mapping[str, str]], remedy: str) -> str:
    """Return the message for values, as text, that differ between ranks.

    >>> print(_difference("The arguments of the ranks", [{"seed": "1", "a": "0"}, {"seed": "2", "a": "0"}], "Stop."))
    The arguments of the ranks differ: `seed` is 1 on rank 0 and 2 on rank 1. Stop.
    """
    names = dict.fromkeys(name for one in everywhere for name in one)
    differing = [name for name in names if len({one.get(name) for one in everywhere}) > 1]
    listed = []
    for name in differing[:_NAMED]:
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(everywhere):
            ranks.setdefault(one.get(name, "nothing"), []).append(rank)
        said = [f"{value:.200} on rank {', '.join(map(str, some[:8]))}{', ...' * (len(some) > 8)}"
                for value, some in ranks.items()]  # fmt: skip
        listed.append(f"`{name}` is {' and '.join(said)}")
    more = f"; and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
    return f"{what} differ: {'; '.join(listed) or 'their order does'}{more}. {remedy}"


_FIELDS = 20
_LISTED = 64
"""The most ranks of which each one gets the numbers of all in an exchange; of more, it gets the sums."""
_PART = 1 << 24
"""Bytes per part if a rank's data are sent in parts."""
_PARTS = 1 << 28
"""Bytes of the parts of all ranks that the main one holds at once, unless there is a larger value."""
_HEAD = 8
"""Bytes before a rank's data that hold their length."""
SILENCE_S = 60.0
"""Seconds that the others wait at the start for a rank without a post."""
_START = "the start"
"""The place of a rank from its first post until all ranks are connected."""
_ERROR_SYNC_S = 5.0
"""Seconds that a failed rank waits for the others to raise the same error."""
_GRACE_S = 3.0
"""Seconds that a rank has to notice the failure of another rank, before it is ended."""
_EXIT_WAIT_S = 3.0
"""Seconds that a rank waits for the others at the end of the program."""
_LOOK_S = 3.0
"""Seconds without progress of this rank after which it checks the others."""
_UNHANDLED_S = 1.0
"""Seconds that the main thread has to handle a signal, before another thread does."""
_MUTE_S = 10.0
"""Seconds without an answer after which the store is no longer asked."""
_SIGNALLED_S = 10.0
"""Seconds that a rank with a signal waits for another rank without a sign of life."""
_AT_THE_END = "the end of the program"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_made = itertools.count()
_REQUESTS = 3 + len(_SIGNALS) + len(STOP_REASONS)


@functools.cache
def _code(what: str) -> float:
    """Return a number for the name of a call."""
    return float(zlib.crc32(what.encode()) % 65521 + 1)


def _as_numbers(asked: Control) -> list[float]:
    """Return the requests as numbers, to sum over the ranks."""
    signals = [asked.signal == number for number in _SIGNALS]
    return [asked.log, asked.evaluate, asked.save, *signals, *(asked.stop == reason for reason in STOP_REASONS)]


def _as_control(numbers: list[float]) -> Control:
    """Return the requests of any rank; the inverse of `_as_numbers`."""
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
        self.moves: int = 0
        self.place: str = _START
        self.world: Any = None
        """torch.distributed's group of all ranks, once it exists."""
        self._group: Any = None
        self._process = os.getpid()
        self._prefix = f"omnitrain/{next(_made)}"
        self._store = distributed_c10d.PrefixStore(self._prefix, store)
        self._store_error: RuntimeError | None = None
        """Why the store no longer answers, if so: the process that hosted it has ended."""
        self._limit, self._silence = max(timeout or _TIMEOUT_S, SILENCE_S), SILENCE_S
        self._survived = 0
        """How many errors all ranks raised together and survived; the number of the next error in the store."""
        self._report_read: tuple[int, dict[str, Any], bool] | None = None
        """The failure report of another rank, the value of `_survived` then, and whether that rank has given up."""
        self._has_failed = self._ends = False
        self._has_left = False
        """Whether a rank has reached the end of the program, as last read from the store."""
        self._tree, self._judging = Tree(rank, world_size), threading.Lock()
        self._main_post = Post(0, "", 0, 0, False)
        """The latest post of the main rank that was read."""
        self._have_posted = False
        """Whether each rank has posted; reading a missing post would wait for it."""
        self._neighbours: dict[int, dict[str, Any]] = {}
        """The processes of other ranks that this one can check for having ended."""
        self._unanswered = 0.0
        """Seconds since the store has answered."""
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
        with self.at(_START):
            try:
                self._await_others()
                timeout = datetime.timedelta(seconds=SILENCE_S)
                self._group = dist.new_group(backend="gloo", timeout=timeout)
            except RuntimeError as error:
                raise self.lost_at_start(error) from error
        self.place = ""
        # `_wait` detects failures, so waiting has no limit: the main rank may hash a checkpoint for an hour.
        distributed_c10d._set_pg_timeout(datetime.timedelta(days=7), self._group)

    def lost_at_start(self, error: BaseException) -> DistributedError:
        """Return the error for a rank lost while a library set up its communication."""
        return error if isinstance(error, DistributedError) else self._lost(error, _START)

    def _await_others(self) -> None:
        """Wait until all ranks are here; threads watch those that have posted."""
        here = self._store.add("here", 1)
        end, pause = time.monotonic() + SILENCE_S, 0.005
        while here < self.world_size:
            if self._failure() is not None or self._has_left:
                raise self._lost(RuntimeError("it has ended"), _START)
            if time.monotonic() > end and not self._have_posted:
                unknown = [rank for rank in range(self.world_size) if not self._store.check([f"post/{rank}"])]
                if unknown:
                    self._ends = True
                    raise DistributedError(
                        f"Rank {self.rank} has waited {SILENCE_S:.0f} seconds for rank "
                        f"{', '.join(map(str, unknown))}, which has joined the group of processes and has not come to "
                        "a trainer since: it was killed, stands still, or does something else first. Make the trainer "
                        "at the same place of the program on all processes."
                    )
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
            here = self._store.add("here", 0)

    # --- exchanges

    def sum(self, what: str, *values: float) -> list[float]:
        """Return the sum of each value over all ranks; at most 19 values."""
        return self._exchange(what, values)

    def begin_agreeing(self, what: str, asked: Control, *values: float) -> Callable[[], tuple[Control, list[float]]]:
        """Start `agree`, and return a function that waits for it and returns its result; at most 8 values."""
        wait = self._begin_exchange(what, (*_as_numbers(asked), *values))

        def finish() -> tuple[Control, list[float]]:
            found = wait(None)
            return _as_control(found[:_REQUESTS]), found[_REQUESTS:]

        return finish

    def gather(self, what: str, value: T) -> list[T]:
        """Return the values of all processes in the order of ranks."""
        own = pickle.dumps(value)  # before the exchange, as it may fail
        self._exchange(what)
        padded = _with_length(own, self._largest(what, len(own)))
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        self._wait(dist.all_gather(parts, padded, group=self._group, async_op=True), what)
        return [pickle.loads(_without_length(part)) for part in parts]

    def combine(self, what: str, value: T, work: Callable[[list[T]], S]) -> S:
        """Return the result of `work` on the values of all ranks in order; both can be any picklable object.

        With many ranks, the main one alone gets their values and works on them.
        """
        if self.world_size <= _LISTED:
            return work(self.gather(what, value))
        found = self.gather_on_main(what, [value])
        return self.on_main(what, lambda: work([one for (one,) in found]))

    def deal(self, what: str, work: Callable[[], Sequence[T]]) -> T | None:
        """Return this rank's one of the values that `work` returns on the main rank; None if there are fewer."""
        values: list[bytes] = []

        def pack() -> tuple[int, int]:
            values.extend(map(pickle.dumps, work()))
            return len(values), max(map(len, values), default=0)

        count, largest = self.on_main(what, pack)
        values += [b""] * (self.world_size - len(values))
        parts = [_with_length(one, largest) for one in values[: self.world_size]] if self.is_main else None
        own = _with_length(b"", largest)
        self._wait(dist.scatter(own, parts, src=0, group=self._group, async_op=True), what)
        return pickle.loads(_without_length(own)) if self.rank < count else None

    def _largest(self, what: str, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        largest = torch.tensor([number], dtype=torch.int64)
        self._wait(dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group, async_op=True), what)
        return int(largest)

    def on_main(self, what: str, work: Callable[[], T]) -> T:
        """Return the result of `work` on the main rank; raise its error on all ranks."""
        result, error, packed = None, None, torch.empty(0, dtype=torch.uint8)
        if self.is_main:
            try:
                result = work()
                packed = _packed((result, None, None))
            except Exception as raised:
                error = raised
                packed = _packed((None, self._portable(error, what), self._portable(error.__cause__, what)))
        (size,) = self._exchange(what, [len(packed)])  # the other ranks wait here, where failures are noticed
        packed = packed if self.is_main else torch.empty(int(size), dtype=torch.uint8)
        self._wait(dist.broadcast(packed, src=0, group=self._group, async_op=True), what)
        if not self.is_main:
            result, error, cause = _unpacked(packed)
            if error is not None:
                error.__cause__ = cause
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def attempt(self, what: str, work: Callable[[], object]) -> None:
        """Have every rank do its work.

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
        own = None if error is None else (self._portable(error, what), self._portable(error.__cause__, what))
        rank, found = next((rank, one) for rank, one in enumerate(self.gather(what, own)) if one is not None)
        if error is not None and rank == self.rank:
            raise error
        raise found[0] from found[1]

    def together(self, what: str, work: Callable[[], T]) -> list[T]:
        """Return the results of `work`, done by every rank, on the main rank; nothing on the others.

        Raises:
            Exception: The error of the first rank that has one, on all ranks, once all are done.
        """
        result: list[T] = []
        self.attempt(what, lambda: result.append(work()))
        return [one for (one,) in self.gather_on_main(what, result)]

    def gather_on_main(self, what: str, values: list[T]) -> list[list[T]]:
        """Return the lists of all ranks in order on the main rank, nothing on the others; empties `values`.

        They are sent in parts, so only the main rank ever holds more than its own.
        """
        self._exchange(what)
        found: list[list[T]] = [[] for _ in range(self.world_size)]
        values.reverse()  # as they are taken from the end
        limit = min(_PART, max(_PARTS // self.world_size, 1 << 16))
        while True:
            own = b"" if self.is_main else b"".join(_next_part(values, limit))
            largest = self._largest(what, len(own))
            if not largest:
                break
            padded = _with_length(own, largest)
            del own
            parts = [torch.empty_like(padded) for _ in range(self.world_size)] if self.is_main else None
            self._wait(dist.gather(padded, parts, dst=0, group=self._group, async_op=True), what)
            for mine, part in zip(found, parts or (), strict=False):
                data = _without_length(part)
                stream = io.BytesIO(data)
                while stream.tell() < len(data):
                    mine.append(pickle.load(stream))
        if not self.is_main:
            return []
        found[self.rank] = values[::-1]
        values.clear()
        return found

    def share(self, what: str, value: T) -> T:
        """Return the main rank's value, a tree of tuples, dicts and arrays; large arrays are sent without a copy."""
        arrays: list[np.ndarray] = []
        tree: Any = self.on_main(what, lambda: _without_arrays(value, arrays))
        if not self.is_main:
            tree = _with_arrays(tree, arrays)
        for array in arrays:
            flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
            for part in flat.split(_PART) if len(flat) else ():
                self._wait(dist.broadcast(part, src=0, group=self._group, async_op=True), what)
        return value if self.is_main else tree

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a contiguous host tensor with that of the main process, and return it."""
        if tensor.numel():
            sent = as_bytes(tensor)  # gloo does not take every dtype
            self._wait(dist.broadcast(sent, src=0, group=self._group, async_op=True), "the reading of tensors")
        return tensor

    def _exchange(self, what: str, values: Sequence[float] = (), seconds: float | None = None) -> list[float]:
        """Return the sum of each value over all ranks, which must all make the same call."""
        return self._begin_exchange(what, values)(seconds)

    def _begin_exchange(self, what: str, values: Sequence[float]) -> Callable[[float | None], list[float]]:
        """Start an exchange, and return a function that waits for it, up to some seconds, and returns the sums."""
        if self._ends:
            raise DistributedError(f"{what}: this run has ended by an error on one of its ranks. Start it again.")
        self.moves += 1
        code = _code(what)
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
                raise self._disagreement(what)
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
                raise self._disagreement(what)
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
                    now = time.monotonic()
                    if now - start < 0.9 * _POLL_INTERVAL.total_seconds():
                        raise self._lost(error, what) from error
                    if seconds is not None and now - begin >= seconds:
                        raise TimeoutError(what) from error
                    if seconds is None and (self._failure() is not None or self._has_left):
                        raise self._lost(error, what) from error
                    if seconds is None and signals.handled() and (found := self._left_behind()):
                        raise DistributedError(self._text_at_signal(signals.handled(), found)) from error
        finally:
            self._is_waiting = False

    # --- errors

    @contextlib.contextmanager
    def calling(self, what: str, timeout: float | None = None, is_start: bool = False) -> Iterator[None]:
        """Enter a call that all ranks must make; an error on one of them ends it on all.

        After an error that all of them raise together, such as a loss that is not finite, they can go on.

        Raises:
            DistributedError: If another rank made a different call, or failed; its error is in the message.
        """
        with contextlib.ExitStack() as place:
            if not self.place:
                self._silence = SILENCE_S if is_start else math.inf
                self._limit = max(timeout or _TIMEOUT_S, SILENCE_S if is_start else 0.0)
                place.callback(setattr, self, "_silence", math.inf)
            place.enter_context(self.at(what))
            place.enter_context(self._ending(what))
            self._exchange(what)
            yield

    @contextlib.contextmanager
    def _ending(self, what: str) -> Iterator[None]:
        """End a call on all ranks if it raises an error on this one."""
        try:
            yield
        except DistributedError:
            self._ends = True
            raise
        except Exception as error:
            if is_of_connection(error):
                raise self._lost(error, what) from error
            self._report_failure(what, error)
            self._ends = self._ends or not self._is_common(error, what)
            raise
        except BaseException as error:  # a second signal, or sys.exit(): this rank ends at once
            self._report_failure(what, error)
            self._settle_verdict("alone")
            self._ends = True
            raise

    def _is_common(self, error: Exception, what: str) -> bool:
        """Return whether all ranks raised the same error; this exchange itself informs those that did not."""
        verdict = "common"
        try:
            self._exchange(f"{type(error).__name__} in {what}", seconds=_ERROR_SYNC_S)
        except (DistributedError, TimeoutError):
            verdict = "alone"
        if self._settle_verdict(verdict) != "common":
            return False
        self._survived, self._has_failed = self._survived + 1, False
        return True

    def _settle_verdict(self, verdict: str) -> str:
        """Return whether the error is "common" or "alone": the first verdict in the store counts for all ranks.

        Otherwise a rank that stopped waiting and one that arrived a little late would disagree.
        """
        if self._is_mute:
            return "alone"
        try:
            return self._store.compare_set(f"verdict/{self._survived}", "", verdict).decode()
        except RuntimeError:
            return "alone"

    def _report_failure(self, what: str, error: BaseException) -> None:
        """Report to the other ranks that this one has failed; the first report counts."""
        self._has_failed = True
        text = "".join(traceback.format_exception(error))
        self._send_report({"what": what, "error": f"{type(error).__name__}: {error}", "traceback": text})

    def _send_report(self, report: dict[str, Any]) -> None:
        if not self._is_mute:
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(f"failure/{self._survived}", "", json.dumps({"rank": self.rank, **report}))

    def _read_failure(self) -> None:
        """Check whether another rank has reported a failure, and still waits for the others to raise it."""
        survived, keys = self._survived, [f"{name}/{self._survived}" for name in ("failure", "verdict")]
        if self._is_mute:
            return
        with contextlib.suppress(RuntimeError):  # the process that hosted the store may have ended
            report = json.loads(self._store.get(keys[0])) if self._store.check(keys[:1]) else None
            if report is not None and (report["rank"] != self.rank or "stall" in report):
                given_up = self._store.check(keys[1:]) and self._store.get(keys[1]) != b"common"
                self._report_read = survived, report, given_up

    def _failure(self) -> dict[str, Any] | None:
        """Return the failure report of another rank, if one has been read."""
        read = self._report_read
        return None if read is None or read[0] != self._survived else read[1]

    def _error_from(self, report: dict[str, Any]) -> DistributedError:
        self._ends = True
        if "stall" in report:
            return DistributedError(report["stall"])
        return DistributedError(
            f"Rank {report['rank']} failed in {report['what']}, and so the run ends on all {self.world_size} "
            f"processes: {report['error']}\n--- rank {report['rank']}\n{report['traceback']}---"
        )

    def _lost(self, error: BaseException, what: str) -> DistributedError:
        """Return the error for a rank that is gone; it has reported its failure, unless it was killed."""
        self._ends = True
        self._read_failure()
        report = self._failure()
        if report is not None:
            return self._error_from(report)
        if self._has_exited():
            return self._disagreement(what)
        reason = str(error).partition(". This is")[0].partition("\n")[0]  # the rest of gloo's message is no help
        lost = DistributedError(
            f"Rank {self.rank} lost another process in {what}: it was killed, or its machine is gone ({reason}). "
            "Start the run again with resume_from='auto'; torchrun's --max-restarts does so by itself."
        )
        self._report_failure(what, lost)
        return lost

    def _disagreement(self, what: str) -> DistributedError:
        """Return an error that lists the call of every rank. All ranks notice together, so all record their calls."""
        self._ends = True
        self._read_failure()
        report = self._failure()
        if report is not None:
            return self._error_from(report)
        if self._has_failed:
            return DistributedError(what)  # the others went on, and read the report of this error
        self._tell_place(what)
        at = {**self._places_of_ranks(), self.rank: what}
        places = "; ".join(f"rank {rank}: {place}" for rank, place in sorted(at.items()))
        return DistributedError(
            f"The processes of the run are at different places, where they would have waited for each other forever: "
            f"{places}. Calls of the trainer that concern the whole run (train, evaluate, test, predict, save_model, "
            "save_checkpoint, load_checkpoint) are made on every rank, not under `if trainer.is_main_process:`."
        )

    def _tell_place(self, what: str) -> None:
        """Record the call that this rank is in."""
        with contextlib.suppress(RuntimeError):
            if not self._is_mute:
                self._store.set(f"at/{self.rank}", what)
                self._store.add("placed", 1)

    def _places_of_ranks(self) -> dict[int, str]:
        """Return the recorded calls, by rank, once all are recorded or after some seconds."""
        at: dict[int, str] = {}
        end = time.monotonic() + _EXIT_WAIT_S
        with contextlib.suppress(RuntimeError):
            while not self._is_mute and self._store.add("placed", 0) < self.world_size and time.monotonic() < end:
                time.sleep(0.02)
            for rank in range(0 if self._is_mute else self.world_size):
                if self._store.check([f"at/{rank}"]):
                    at[rank] = self._store.get(f"at/{rank}").decode()
        return at

    def _has_exited(self) -> bool:
        """Return whether a rank reached the end of the program and stopped waiting for the others."""
        with contextlib.suppress(RuntimeError):
            self._has_left = self._has_left or (not self._is_mute and bool(self._store.check(["left"])))
        return self._has_left

    # --- the threads

    def _keep_posting(self, store: distributed_c10d.Store, has_posted: threading.Event) -> None:
        """Post where this rank is, check for failures of others, and check their progress while this one waits."""
        still, unread = 0.0, 0.0
        own = self._post()
        with contextlib.suppress(RuntimeError):  # our own connection: a stuck collective may hold the other one
            self._store = distributed_c10d.PrefixStore(self._prefix, store.clone())  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            self._store.set(f"process/{self.rank}", json.dumps(own_process()))
            self._put_report(own)
            self._store.add("posted", 1)
        has_posted.set()
        for passed in _looks(self._closing):
            before, own = own, self._post()
            still = still + passed if own[1:] == before[1:] else 0.0
            unread += passed
            try:
                self._put_report(own)
                self._read_failure()
                self._has_exited()
                if not self._have_posted:
                    self._have_posted = self._store.add("posted", 0) >= self.world_size
                    self._neighbours = self._read_neighbours() if self._have_posted else {}
                    self._judge_posts({self.rank: own}, passed)
                else:
                    looks = still >= min(_LOOK_S, self._limit / 2) or self._tree.whole.has_told
                    self._read_reports(unread, looks)
                    unread = 0.0
                if self.place and self._silence < math.inf and self._failure() is None:
                    self._look_for_neighbours()
                self._unanswered, self._store_error = 0.0, None
            except RuntimeError as error:  # the process that hosted the store has ended
                self._store_error = error
                if self._report_read is not None:
                    self._report_read = *self._report_read[:2], True

    def _put_report(self, own: Post) -> None:
        self._store.set(f"post/{self.rank}", json.dumps(Report(own, self._tree.digest()).plain()))

    def _read_reports(self, passed: float, looks: bool) -> None:
        """Read the reports of other ranks, and judge them all if this rank has to.

        Args:
            passed: Seconds since the last call.
            looks: Whether this rank seems to wait for another one. With few ranks, they are judged only then.
        """
        tree = self._tree
        is_signalled = bool(signals.handled() or signals.unhandled())  # this rank decides for itself when to leave
        judges = tree.is_top or is_signalled if tree.is_deep else looks
        ranks = tree.to_read(judges)
        keys = [f"post/{rank}" for rank in ranks]
        extended = bool(keys) and self._store.has_extended_api()  # type: ignore[attr-defined]
        found = self._store.multi_get(keys) if extended else [self._store.get(key) for key in keys]
        reports = {rank: Report.of(*json.loads(text)) for rank, text in zip(ranks, found, strict=True)}
        if 0 in reports:
            self._main_post = reports[0].post
        with self._judging:
            lines = tree.look(reports, passed, judges)
            stalled = self._judge(tree.whole, lines) if judges else []
        self._end_because_of(stalled)

    def _read_neighbours(self) -> dict[int, dict[str, Any]]:
        first, count = self.rank - int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        ranks = [rank for rank in range(max(first, 0), min(first + count, self.world_size)) if rank != self.rank]
        found = {rank: json.loads(self._store.get(f"process/{rank}")) for rank in ranks}
        return {rank: process for rank, process in found.items() if is_known(process)}

    def _look_for_neighbours(self) -> None:
        """End the run during the start if another process has ended: there are no connections yet that would break."""
        for rank, process in self._neighbours.items():
            if not is_alive(process):
                text = (
                    f"The process of rank {rank} has ended, before the run could begin on all {self.world_size} "
                    "processes. Start it again with resume_from='auto'; torchrun's --max-restarts does so by itself."
                )
                self._report_gone(rank, self.place, "its process has ended", text)
                return

    def _report_gone(self, rank: int, what: str, error: str, text: str) -> None:
        """Report that the run ends on all ranks because of another rank, and why."""
        report = {"what": what, "error": error, "stall": text, "traceback": ""}
        self._send_report(report)
        self._settle_verdict("alone")
        self._read_failure()
        if self._failure() is None:  # the store does not answer
            self._report_read = self._survived, {"rank": rank, **report}, True

    def _judge_posts(self, posts: Mapping[int, Post], passed: float) -> None:
        """Do what `_read_reports` does with the posts of some ranks, while those of others cannot be read."""
        with self._judging:
            stalled = self._judge(self._tree.whole, self._tree.whole.look(posts, passed))
        self._end_because_of(stalled)

    def _end_because_of(self, stalled: Sequence[Stall]) -> None:
        """End the run on all ranks if some have made no progress for too long."""
        if stalled and not self._ends and self._failure() is None:
            self._report_gone(stalled[0].rank, stalled[0].post.place, "no progress", self._text_of(stalled))

    def _tells(self, stalls: Stalls) -> bool:
        return self._is_mute or stalls.first_alive(min(QUIET_S, 5.0)) == self.rank

    @property
    def _is_mute(self) -> bool:
        """Whether the store does not answer: the process that hosts it is stopped or gone."""
        return self._unanswered >= _MUTE_S

    def _keep_watching(self) -> None:
        """End this process if another rank has failed, or a signal has arrived, and it is stuck in a collective."""
        since = alone = 0.0
        for passed in _looks(self._closing):
            if self._ends:
                return
            has_lost = self.place == _START and (self._has_left or self._store_error is not None)
            alone = alone + passed if has_lost else 0.0
            if alone > _GRACE_S:
                self._end_now(self._lost(self._store_error or RuntimeError("it has ended"), _START))
            self._unanswered += passed
            if self._is_mute:
                is_store_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
                others = {0: self._main_post} if is_store_there and self.rank else {}
                self._judge_posts({**others, self.rank: self._post()}, passed)
            self._leave_at_signal()
            read = self._report_read
            if read is None or read[0] != self._survived or not read[2]:
                since = 0.0
                continue
            if not since and "stall" not in read[1]:
                logger.error("Rank %d failed in %s: %s", read[1]["rank"], read[1]["what"], read[1]["error"])
            since += passed
            if since > _GRACE_S and not self._ends:
                self._end_now(self._error_from(read[1]))

    def _left_behind(self) -> list[Stall]:
        """Return the ranks for which a rank with a signal no longer waits."""
        with self._judging:
            whole = self._tree.whole
            found = whole.found(_SIGNALLED_S)
            if not found or not (all(stall.is_silent for stall in found) or whole.are_told(found)):
                return []
        return found

    def _leave_at_signal(self) -> None:
        """End this process if a signal has arrived that the main thread cannot handle."""
        unhandled = signals.unhandled()
        if not unhandled or time.monotonic() - unhandled[-1][1] < _UNHANDLED_S:
            return
        number, found = unhandled[0][0], self._left_behind()
        if any(signals.is_second(*one) for one in unhandled):
            text = f"{signal.Signals(number).name} once more: this rank leaves at once."
        elif found:
            text = self._text_at_signal(number, found)
        else:
            return
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
        self._report_failure(self.place, SystemExit(128 + number))
        self._settle_verdict("alone")
        self._keep_store_for_others()
        leave_now(128 + number)

    def _text_at_signal(self, number: int, found: Sequence[Stall]) -> str:
        return (
            f"{_said(found)} {signal.Signals(number).name} ends rank {self.rank} before its step is "
            "done, which needs all ranks: the latest checkpoint counts."
        )

    # --- the end of the program

    def _end_now(self, error: DistributedError) -> None:
        sys.stdout.flush()
        print(f"omnitrain.core.errors.DistributedError: {error}", file=sys.stderr, flush=True)
        self._keep_store_for_others()
        leave_now(1)

    def _at_exit(self) -> None:
        """Make sure, at the end of the program, that no other rank waits for this one."""
        self._closing.set()
        if not self._is_mute and os.getpid() == self._process:
            self._posting.join(2 * _POLL_INTERVAL.total_seconds())
            with contextlib.suppress(RuntimeError):
                self._put_report(self._post()._replace(has_ended=True))
        if os.getpid() != self._process:
            return
        if self._ends:
            self._keep_store_for_others()
            return
        if self._group is None:
            self._leave()
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
            self._leave()
        except DistributedError as error:
            if not self._has_exited():  # if so, another rank ended long ago
                self._end_now(error)

    def _leave(self) -> None:
        """Record that this rank is at the end of the program; others find this in their next collective call."""
        with contextlib.suppress(RuntimeError):
            if not self._is_mute:
                self._tell_place(_AT_THE_END)
                self._store.set("left", "")

    def _keep_store_for_others(self) -> None:
        """Keep the store alive after an error, if this process hosts it, until the others have read the report."""
        if self._is_mute:
            return
        with contextlib.suppress(RuntimeError):
            self._store.set(f"parted/{self.rank}", "")
            end = time.monotonic() + _EXIT_WAIT_S
            is_store_here = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            keys = [f"parted/{rank}" for rank in range(self.world_size)]
            while is_store_here and time.monotonic() < end and not self._store.check(keys):
                time.sleep(0.02)

    def _portable(self, error: BaseException | None, what: str) -> Any:
        """Return a picklable copy of the error, with a note of its origin."""
        if error is None:
            return None
        try:
            copy = pickle.loads(pickle.dumps(error))
        except Exception:
            copy = RuntimeError(f"{type(error).__name__}: {error}")
        copy.add_note(f"Raised on rank {self.rank}, in {what}:\n{''.join(traceback.format_exception(error))}")
        return copy


def _looks(ended: threading.Event) -> Iterator[float]:
    """Yield, about once a second, how long this process has run since; time in which it was stopped does not count."""
    interval = _POLL_INTERVAL.total_seconds()
    last = time.monotonic()
    while not ended.wait(interval):
        now = time.monotonic()
        yield min(now - last, 2 * interval)
        last = now


def leave_now(code: int) -> NoReturn:
    """End this process, from another thread than the main one, and its loaders' workers, which may hang too."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def _packed(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def _with_length(data: bytes, size: int) -> torch.Tensor:
    """Return data with their length before them, padded to `size` bytes."""
    padded = torch.zeros(_HEAD + size, dtype=torch.uint8)
    numbers = padded.numpy()
    numbers[:_HEAD] = np.frombuffer(len(data).to_bytes(_HEAD, "little"), np.uint8)
    numbers[_HEAD : _HEAD + len(data)] = np.frombuffer(data, np.uint8)
    return padded


def _without_length(padded: torch.Tensor) -> memoryview:
    """Return the data of `_with_length`, without a copy."""
    data = padded.numpy().data
    return data[_HEAD : _HEAD + int.from_bytes(data[:_HEAD], "little")]


def _next_part(values: list[Any], limit: int) -> list[bytes]:
    """Take values from the end of a list until they fill so many bytes, and return them packed."""
    packed, size = [], 0
    while values and size < limit:
        packed.append(pickle.dumps(values.pop()))
        size += len(packed[-1])
    return packed


class _Blank(NamedTuple):
    """The place of an array that was taken out."""

    shape: tuple[int, ...]
    dtype: str


def _without_arrays(value: Any, arrays: list[np.ndarray]) -> Any:
    """Return a tree with blanks in place of its arrays, which go to `arrays`."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        arrays.append(np.require(value, requirements=["C", "W"]))
        return _Blank(value.shape, value.dtype.str)
    if isinstance(value, dict):
        return {key: _without_arrays(one, arrays) for key, one in value.items()}
    return tuple(_without_arrays(one, arrays) for one in value) if type(value) is tuple else value


def _with_arrays(tree: Any, arrays: list[np.ndarray]) -> Any:
    """Return a tree with new arrays in place of its blanks, which go to `arrays` too."""
    if isinstance(tree, _Blank):
        arrays.append(np.empty(tree.shape, tree.dtype))
        return arrays[-1]
    if isinstance(tree, dict):
        return {key: _with_arrays(one, arrays) for key, one in tree.items()}
    return tuple(_with_arrays(one, arrays) for one in tree) if type(tree) is tuple else tree


def is_of_connection(error: BaseException) -> bool:
    """Return whether this is an error that gloo and NCCL raise if the other end is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))
