"""Communication between ranks.

`Ranks` is a single process: every result is its own. `ProcessRanks` uses torch.distributed. Every exchange carries the
name of its call, so ranks that make different calls (such as a call on one rank only) notice at once and raise a
`DistributedError` instead of waiting for each other forever. Collectives of the model do not belong here; `watchdog.py`
notices a rank for which the others wait in one.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import hashlib
import io
import json
import math
import pickle
import signal
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from omnitrain.core.errors import DistributedError
from omnitrain.core.events import STOP_REASONS, Control, pick_stop_reason
from omnitrain.distributed import watchdog
from omnitrain.distributed.watchdog import AT_THE_END, START, Position, Watchdog, watch_one_process

T = TypeVar("T")
S = TypeVar("S")


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


class Ranks(Position):
    """The ranks of a run, seen from one of them; here it is the only one.

    >>> ranks = Ranks()
    >>> ranks.sum("weights", 3.0, 4.0), ranks.gather("names", "a"), ranks.on_main("a sum", lambda: 1 + 1)
    ([3.0, 4.0], ['a'], 2)
    """

    mesh: Any = None
    """Torch's `DeviceMesh` of the ranks: that of the trainer whose call runs; None without."""
    dimensions: Mapping[str, int] = MappingProxyType({})
    """The sizes of the mesh's dimensions, the outermost first; empty without a mesh."""

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

    def sum_shares(self, what: str, *values: float) -> Sequence[float]:
        """Return the sum of each value over the shares of the data; the ranks of one share give the same values."""
        return values

    def start_sync_requests(
        self, what: str, requests: Control, *values: float
    ) -> Callable[[], tuple[Control, list[float]]]:
        """Start an exchange, and return a function that waits for it.

        It returns the requests made on any rank, and the sum of each value over all ranks.
        """
        return lambda: (requests, list(values))

    def gather(self, what: str, value: T) -> list[T]:
        """Return the values of all ranks in order; they can be any picklable object."""
        return [value]

    def are_equal(self, what: str, *codes: int) -> bool:
        """Return whether all ranks have the same codes, up to nine of them, which are shortened to 21 bits.

        They do if and only if the means of each and of its square fit this rank's code, as the variance is 0 then; so
        either all ranks notice a difference, or none. float64 holds these sums exactly over two thousand ranks.
        """
        short = [code & (1 << 21) - 1 for code in codes]
        sums = self.sum(what, *short, *(code * code for code in short))
        return sums == [self.world_size * number for number in (*short, *(code * code for code in short))]

    def check_equal(self, what: str, values: Mapping[str, Any], remedy: str) -> None:
        """Compare values that must be the same on all ranks: first digests, and the values only if these differ.

        They are JSON types by name; `what` is the subject of the message, and `remedy` its last sentence.

        Raises:
            DistributedError: On all ranks, with the differing values by rank.
        """
        if self.world_size == 1:
            return
        texts = {name: json.dumps(value) for name, value in values.items()}
        digest = np.frombuffer(hashlib.sha256(json.dumps(list(texts.items())).encode()).digest()[:16], np.uint16)
        if not self.are_equal(f"{what}, compared", *map(int, digest)):
            raise DistributedError(_difference_message(what, self.gather(what, texts), remedy))

    def on_main(self, what: str, work: Callable[[], T]) -> T:
        """Return the result of `work` on the main rank; raise its error on all ranks.

        Large arrays in the result are sent without a copy.
        """
        return work()

    def run_on_all(self, what: str, work: Callable[[], T]) -> T:
        """Run `work` on every rank, and return its result.

        Raises:
            Exception: The error of the first rank that has one, on all ranks, once all are done.
        """
        return work()

    def gather_on_main(self, what: str, values: list[T]) -> list[list[T]]:
        """Return the lists of all ranks in order on the main rank, nothing on the others; empties `values`.

        They are sent in parts, so only the main rank ever holds more than its own.
        """
        return [values]

    def combine(self, what: str, value: T, work: Callable[[list[T]], S]) -> S:
        """Return the result of `work` on the values of all ranks in order; both can be any picklable object.

        With many ranks, only the main one gets their values and works on them.
        """
        return work([value])

    def scatter(self, what: str, work: Callable[[], Sequence[T]]) -> T | None:
        """Return this rank's entry of the values that `work` returns on the main rank; None if there are fewer."""
        return next(iter(work()), None)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a contiguous host tensor with that of the main rank, and return it."""
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
        ended = threading.Event()
        arguments = self, timeout or math.inf, ended
        watch = threading.Thread(target=watch_one_process, args=arguments, name="omnitrain-watch", daemon=True)
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
        previous = self.phase
        self.phase: str = phase
        if not previous:
            self.step = 0
        try:
            yield
        finally:
            self.phase = previous


@dataclass(frozen=True, slots=True)
class Part:
    """The ranks along one dimension of a mesh; all ranks make its exchanges, and each gets the result of its part.

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

    def gather(self, what: str, value: T) -> list[T]:
        """Return the values of the part's ranks in order."""
        values = self.all_ranks.gather(what, value)
        return [values[member] for member in self.members]

    def sum(self, what: str, *values: float) -> list[float]:
        """Return the sum of each value over the part's ranks."""
        return [math.fsum(of_rank) for of_rank in zip(*self.gather(what, values), strict=True)]


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


# Numbers in an exchange: two for the call, and up to 62 values.
_FIELDS = 64
# The most ranks of which each one gets the numbers of all in an exchange; of more, it gets the sums.
_LISTED = 64
# Bytes per part if a rank's data are sent in parts.
_PART = 1 << 24
# Bytes of the parts of all ranks that the main one holds at once, unless there is a larger value.
_PARTS = 1 << 28
# Bytes from which an array in the result of `on_main` is sent without a copy.
_LARGE = 1 << 20
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_REQUESTS = 3 + len(_SIGNALS) + len(STOP_REASONS)


@functools.cache
def _call_code(what: str) -> float:
    return float(zlib.crc32(what.encode()) % 65521 + 1)


def _requests_to_numbers(requests: Control) -> list[float]:
    signals = [requests.signal == number for number in _SIGNALS]
    reasons = [requests.stop == reason for reason in STOP_REASONS]
    return [requests.log, requests.evaluate, requests.save, *signals, *reasons]


def _numbers_to_requests(numbers: list[float]) -> Control:
    log, evaluate, save, *rest = map(bool, numbers)
    signal_number = next((number for number, is_asked in zip(_SIGNALS, rest, strict=False) if is_asked), 0)
    reasons = [reason for reason, is_asked in zip(STOP_REASONS, rest[len(_SIGNALS) :], strict=True) if is_asked]
    return Control(log, evaluate, save, pick_stop_reason(reasons), signal_number)


class ProcessRanks(Ranks):
    """The ranks of torch.distributed.

    Exchanges run on the host through gloo, so none of them waits for a GPU; they are possible after `connect`. All
    ranks can reach the store. The start fails after `timeout` seconds without progress, at least a minute; None is 30.
    """

    def __init__(self, store: distributed_c10d.Store, rank: int, world_size: int, timeout: float | None = None) -> None:
        self.rank: int = rank
        self.world_size: int = world_size
        self.phase: str = START
        self.progress_count: int = 0
        self.is_waiting: bool = False
        self.world: Any = None
        """torch.distributed's group of all ranks, once it exists."""
        self._group: Any = None
        self._watchdog = Watchdog(self, store, timeout)
        atexit.register(self._at_exit)

    # --- the start

    def connect(self) -> None:
        """Form the group for exchanges, unless it exists, after torch.distributed's own; all ranks call it together.

        Raises:
            DistributedError: If another rank is gone, or never gets here.
        """
        if self._group is not None:
            return
        self.world = dist.group.WORLD
        with self.in_phase(START):
            try:
                self._watchdog.wait_for_ranks()
                timeout = datetime.timedelta(seconds=watchdog.SILENCE_S)
                self._group = dist.new_group(backend="gloo", timeout=timeout)
            except RuntimeError as error:
                raise self.lost_at_start(error) from error
        self.phase = ""
        # `_wait` detects failures, so waiting has no limit: the main rank may hash a checkpoint for an hour.
        distributed_c10d._set_pg_timeout(datetime.timedelta(days=7), self._group)

    def lost_at_start(self, error: BaseException) -> DistributedError:
        """Return the error for a rank lost while a library set up its communication."""
        return error if isinstance(error, DistributedError) else self._watchdog.lost_rank_error(error, START)

    # --- exchanges

    def sum(self, what: str, *values: float) -> list[float]:
        return self._exchange(what, values)

    def sum_shares(self, what: str, *values: float) -> list[float]:
        return self._exchange(what, self.count_once(values))

    def start_sync_requests(
        self, what: str, requests: Control, *values: float
    ) -> Callable[[], tuple[Control, list[float]]]:
        wait = self._begin_exchange(what, (*_requests_to_numbers(requests), *values))

        def finish() -> tuple[Control, list[float]]:
            sums = wait(None)
            return _numbers_to_requests(sums[:_REQUESTS]), sums[_REQUESTS:]

        return finish

    def gather(self, what: str, value: T) -> list[T]:
        packed = pickle.dumps(value)  # before the exchange, as it may fail
        self._exchange(what)
        padded = _pad(packed, self._largest(what, len(packed)))
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        self._wait(dist.all_gather(parts, padded, group=self._group, async_op=True), what)
        return [pickle.loads(part.numpy().data) for part in parts]

    def scatter(self, what: str, work: Callable[[], Sequence[T]]) -> T | None:
        values: list[bytes] = []

        def pack() -> tuple[int, int]:
            values.extend(map(pickle.dumps, work()))
            return len(values), max(map(len, values), default=0)

        count, largest = self.on_main(what, pack)
        values += [b""] * (self.world_size - len(values))
        parts = [_pad(packed, largest) for packed in values[: self.world_size]] if self.is_main else None
        received = torch.empty(largest, dtype=torch.uint8)
        self._wait(dist.scatter(received, parts, src=0, group=self._group, async_op=True), what)
        return pickle.loads(received.numpy().data) if self.rank < count else None

    def _largest(self, what: str, number: int) -> int:
        largest = torch.tensor([number], dtype=torch.int64)
        self._wait(dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group, async_op=True), what)
        return int(largest)

    def on_main(self, what: str, work: Callable[[], T]) -> T:
        result, failure, buffers, packed = None, None, list[pickle.PickleBuffer](), b""

        def keeps_inside(buffer: pickle.PickleBuffer) -> bool:
            return buffer.raw().nbytes < _LARGE or buffers.append(buffer) is not None

        if self.is_main:
            try:
                result = work()
                packed = pickle.dumps((result, None, None), protocol=5, buffer_callback=keeps_inside)
            except Exception as error:
                failure, buffers = error, []
                packed = pickle.dumps((None, self._picklable(error, what), self._picklable(error.__cause__, what)))
            packed = pickle.dumps((packed, [buffer.raw().nbytes for buffer in buffers]))
        (size,) = self._exchange(what, [len(packed)])  # the other ranks wait here, where failures are noticed
        packed = self._broadcast_bytes(what, packed or bytearray(int(size)))
        if self.is_main:
            for buffer in buffers:
                self._broadcast_bytes(what, buffer.raw())
        else:
            packed, sizes = pickle.loads(packed)
            memory = [self._broadcast_bytes(what, bytearray(size)) for size in sizes]
            result, failure, cause = pickle.loads(packed, buffers=memory)
            if failure is not None:
                failure.__cause__ = cause
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]

    def _broadcast_bytes(self, what: str, memory: Any) -> Any:
        """Fill memory with that of the main rank, and return it."""
        flat = torch.frombuffer(bytearray(memory) if memoryview(memory).readonly else memory, dtype=torch.uint8)
        for part in flat.split(_PART):
            self._wait(dist.broadcast(part, src=0, group=self._group, async_op=True), what)
        return memory

    def run_on_all(self, what: str, work: Callable[[], T]) -> T:
        error, result = None, None
        try:
            result = work()
        except DistributedError:
            raise
        except Exception as raised:
            error = raised
        (failed,) = self._exchange(what, [float(error is not None)])
        if not failed:
            return result  # type: ignore[return-value]
        failure = None if error is None else (self._picklable(error, what), self._picklable(error.__cause__, what))
        failures = enumerate(self.gather(what, failure))
        rank, first = next((rank, failure) for rank, failure in failures if failure is not None)
        if error is not None and rank == self.rank:
            raise error
        raise first[0] from first[1]

    def gather_on_main(self, what: str, values: list[T]) -> list[list[T]]:
        self._exchange(what)
        by_rank: list[list[T]] = [[] for _ in range(self.world_size)]
        values.reverse()  # as they are popped from the end
        limit = min(_PART, max(_PARTS // self.world_size, 1 << 16))
        while True:
            count, packed = _pop_packed([] if self.is_main else values, limit)
            largest = self._largest(what, len(packed) if count else 0)
            if not largest:
                break
            padded = _pad(packed, largest)
            del packed
            parts = [torch.empty_like(padded) for _ in range(self.world_size)] if self.is_main else None
            self._wait(dist.gather(padded, parts, dst=0, group=self._group, async_op=True), what)
            for entries, part in zip(by_rank, parts or (), strict=False):
                stream = io.BytesIO(part.numpy().data)
                entries += [pickle.load(stream) for _ in range(pickle.load(stream))]
        if not self.is_main:
            return []
        by_rank[self.rank] = values[::-1]
        values.clear()
        return by_rank

    def combine(self, what: str, value: T, work: Callable[[list[T]], S]) -> S:
        if self.world_size <= _LISTED:
            return work(self.gather(what, value))
        by_rank = self.gather_on_main(what, [value])
        return self.on_main(what, lambda: work([entry for (entry,) in by_rank]))

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            sent = as_bytes(tensor)  # gloo does not support every dtype
            self._wait(dist.broadcast(sent, src=0, group=self._group, async_op=True), "the reading of tensors")
        return tensor

    def _exchange(self, what: str, values: Sequence[float] = (), seconds: float | None = None) -> list[float]:
        return self._begin_exchange(what, values)(seconds)

    def _begin_exchange(self, what: str, values: Sequence[float]) -> Callable[[float | None], list[float]]:
        """Start an exchange, and return a function that waits for it, up to some seconds, and returns the sums."""
        if self._watchdog.has_ended:
            raise DistributedError(f"{what}: this run has ended by an error on one of its ranks. Start it again.")
        self.progress_count += 1
        code, end = _call_code(what), 2 + len(values)  # compared as in `are_equal`
        row = torch.zeros(_FIELDS, dtype=torch.float64)
        row.numpy()[:end] = code, code * code, *values
        board = row.unsqueeze(0)
        if self.world_size > _LISTED:
            work = dist.all_reduce(row, group=self._group, async_op=True)
        else:  # for so few numbers, gloo's all_gather takes half the time of its all_reduce
            board = torch.empty(self.world_size, _FIELDS, dtype=torch.float64)
            work = dist.all_gather(list(board), row, group=self._group, async_op=True)

        def finish(seconds: float | None) -> list[float]:
            self._wait(work, what, seconds)
            sums = board.numpy().sum(0)
            if sums[0] != self.world_size * code or sums[1] != self.world_size * code * code:
                raise self._watchdog.mismatch_error(what)
            return sums[2:end].tolist()

        return finish

    def _wait(self, work: Any, what: str, seconds: float | None = None) -> None:
        """Wait for an exchange while no rank has failed, or up to this many seconds."""
        begin, self.is_waiting = time.monotonic(), True
        # Kept until the next one: if gloo's thread freed it at the very end of the program, the process would abort.
        self._latest = work
        try:
            while True:
                start = time.monotonic()
                try:
                    work.wait(watchdog.POLL_INTERVAL)
                    return
                except RuntimeError as error:
                    end = time.monotonic()
                    if end - start < 0.9 * watchdog.POLL_INTERVAL.total_seconds():
                        raise self._watchdog.lost_rank_error(error, what) from error
                    if seconds is not None:
                        if end - begin >= seconds:
                            raise TimeoutError(what) from error
                    elif self._watchdog.knows_lost_rank:
                        raise self._watchdog.lost_rank_error(error, what) from error
                    elif message := self._watchdog.signal_message():
                        raise DistributedError(message) from error
        finally:
            self.is_waiting = False

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
                stack.enter_context(self._watchdog.limited(timeout, is_start))
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
            self._watchdog.has_ended = True
            raise
        except Exception as error:
            if is_connection_error(error):
                raise self._watchdog.lost_rank_error(error, what) from error
            self._watchdog.report_failure(what, error)
            self._watchdog.has_ended = self._watchdog.has_ended or not self._raised_on_all_ranks(error, what)
            raise
        except BaseException as error:  # a second signal, or sys.exit(): this rank ends at once
            self._watchdog.report_failure(what, error)
            self._watchdog.settle_error(is_common=False)
            self._watchdog.has_ended = True
            raise

    def _raised_on_all_ranks(self, error: Exception, what: str) -> bool:
        """Return whether all ranks raised the same error; the exchange notifies those that did not."""
        is_common = True
        try:
            self._exchange(f"{type(error).__name__} in {what}", seconds=watchdog.ERROR_SYNC_S)
        except (DistributedError, TimeoutError):
            is_common = False
        if is_common := self._watchdog.settle_error(is_common):
            self._watchdog.survive_error()
        return is_common

    # --- the end of the program

    def _at_exit(self) -> None:
        """Make sure, at the end of the program, that no other rank waits for this one."""
        if not self._watchdog.close():
            return
        if self._group is None:
            self._watchdog.record_exit()
            return
        if dist.group.WORLD is not self.world:
            return  # the user has destroyed the group
        with contextlib.suppress(ValueError):  # not the main thread
            # when the first process ends, torchrun sends SIGTERM to all others, whatever the exit code
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            self._exchange(AT_THE_END, seconds=watchdog.EXIT_WAIT_S)
            dist.destroy_process_group()
        except TimeoutError:  # another rank is still working
            self._watchdog.record_exit()
        except DistributedError as error:
            if not self._watchdog.has_exited():  # if so, another rank ended long ago
                self._watchdog.abort(error)

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


def _pad(packed: bytes, size: int) -> torch.Tensor:
    """Return pickled data, padded to `size` bytes, which are ignored when it is read."""
    padded = torch.zeros(size, dtype=torch.uint8)
    padded.numpy()[: len(packed)] = np.frombuffer(packed, np.uint8)
    return padded


def _pop_packed(values: list[Any], limit: int) -> tuple[int, bytes]:
    """Pop values from the end of a list until they fill so many bytes; return their count, and all that pickled."""
    packed, size = [], 0
    while values and size < limit:
        packed.append(pickle.dumps(values.pop()))
        size += len(packed[-1])
    return len(packed), b"".join([pickle.dumps(len(packed)), *packed])


def is_connection_error(error: BaseException) -> bool:
    """Return whether gloo or NCCL raised this because the other end is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))
