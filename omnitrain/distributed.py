"""What the processes of a run tell each other: sums, requests, results of the main one, and that one of them failed.

`Ranks` is one process alone: every answer is its own. `ProcessRanks` speaks through torch.distributed. Every exchange
starts with a meeting, at which each process says what it came for: processes that came for different things (a call
made on one rank only) notice at once and raise a `DistributedError` instead of waiting for each other for ever. What
the model's own collectives do does not belong here.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from omnitrain.errors import DistributedError
from omnitrain.lifecycle import STOP_REASONS, Control

__all__ = ["ProcessRanks", "Ranks"]

logger = logging.getLogger("omnitrain")

T = TypeVar("T")


class Ranks:
    """The processes of a run, as one of them sees them; here it is alone.

    >>> ranks = Ranks()
    >>> ranks.sum("weights", 3.0, 4.0), ranks.gather("names", "a"), ranks.on_main("a sum", lambda: 1 + 1)
    ([3.0, 4.0], ['a'], 2)
    """

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def sum(self, what: str, *values: float) -> list[float]:
        """Return the sum of each value over all processes."""
        return list(values)

    def agree(self, what: str, asked: Control) -> Control:
        """Return what was asked for on any process."""
        return asked

    def gather(self, what: str, value: T) -> list[T]:
        """Return the values of all processes in the order of ranks; any plain object."""
        return [value]

    def on_main(self, what: str, work: Callable[[], T]) -> T:
        """Return what `work` returned on the main process, or raise there and everywhere what it raised."""
        return work()

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a host tensor with that of the main process, and return it."""
        return tensor

    @contextlib.contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Enter a call that all processes must make; an error inside ends it on all of them."""
        yield


_FIELDS = 16
_PATIENCE = datetime.timedelta(seconds=1)
_LAST_WORDS = 3.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ProcessRanks(Ranks):
    """The processes of torch.distributed. Made on all of them at the same place in the program.

    Exchanges run on the host through gloo, so none of them waits for a GPU.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # Waiting is watched over here, so it may last: the main process may hash a checkpoint for an hour.
        self._group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7))
        store = distributed_c10d._get_default_store()  # the one place that all processes can reach for sure
        self._store = distributed_c10d.PrefixStore("omnitrain", store)
        self._board = torch.zeros(_FIELDS, dtype=torch.float64)
        self._numbers = self._board.numpy()
        self._meetings = 0
        self._ends = False
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._watch_over, name="omnitrain-watch", daemon=True)
        self._watch.start()
        atexit.register(self._leave)

    # --- exchanges

    def sum(self, what: str, *values: float) -> list[float]:
        """Return the sum of each value over all processes; at most 12 of them."""
        self._meet(what, values)
        return self._numbers[4 : 4 + len(values)].tolist()

    def agree(self, what: str, asked: Control) -> Control:
        """Return what was asked for on any process; of several reasons to stop, the first of `STOP_REASONS`."""
        by_reason = [float(asked.stop == reason) for reason in STOP_REASONS]
        signals = [float(asked.signal == number) for number in _SIGNALS]
        log, evaluate, save, *rest = self.sum(what, asked.log, asked.evaluate, asked.save, *signals, *by_reason)
        found = [number for number, count in zip(_SIGNALS, rest, strict=False) if count]
        reasons = [reason for reason, count in zip(STOP_REASONS, rest[len(_SIGNALS) :], strict=True) if count]
        stop = "signal" if "signal" in reasons else reasons[0] if reasons else ""
        return Control(bool(log), bool(evaluate), bool(save), stop, found[0] if found else 0)

    def gather(self, what: str, value: T) -> list[T]:
        """Return the values of all processes in the order of ranks."""
        self._meet(what)
        values: list[Any] = [None] * self.world_size
        self._listening(lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def on_main(self, what: str, work: Callable[[], T]) -> T:
        """Return what `work` returned on the main process, or raise there and everywhere what it raised."""
        result, error = None, None
        if self.is_main:
            try:
                result = work()
            except Exception as raised:
                error = raised
        self._meet(what)  # the others wait here, where waiting is watched over
        sent: list[Any] = [(result, _portable(error), _portable(error and error.__cause__))]
        self._listening(lambda: dist.broadcast_object_list(sent, src=0, group=self._group))
        if not self.is_main:
            result, error, cause = sent[0]
            if error is not None:
                error.__cause__ = cause
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a contiguous host tensor with that of the main process, and return it."""
        self._listening(lambda: dist.broadcast(tensor, src=0, group=self._group))
        return tensor

    def _meet(self, what: str, values: Sequence[float] = (), seconds: float | None = None) -> None:
        """Sum `values` over all processes into `_numbers[4:]`, and make sure that all came for the same thing."""
        if self._ends:
            raise DistributedError(f"{what}: this run has ended by an error on one of its processes. Start it anew.")
        numbers, self._meetings = self._numbers, self._meetings + 1
        code = float(zlib.crc32(what.encode()) % 65521 + 1)
        numbers[:] = 0.0
        numbers[0], numbers[1] = code, code * code
        numbers[4 : 4 + len(values)] = values
        self._wait(dist.all_reduce(self._board, group=self._group, async_op=True), what, seconds)
        if numbers[0] != code * self.world_size or numbers[1] != code * code * self.world_size:
            raise self._disagreement(what)

    def _wait(self, work: Any, what: str, seconds: float | None) -> None:
        """Wait for an exchange, for as long as the others are well; at most so many seconds."""
        begin = time.monotonic()
        while True:
            start = time.monotonic()
            try:
                work.wait(_PATIENCE)
                return
            except RuntimeError as error:
                now = time.monotonic()
                if now - start < 0.9 * _PATIENCE.total_seconds():
                    raise self._lost(error, what) from error
                if seconds is not None and now - begin >= seconds:
                    raise TimeoutError(what) from error
                if seconds is None and self._failure() is not None:
                    raise self._lost(error, what) from error

    def _listening(self, exchange: Callable[[], object]) -> None:
        try:
            exchange()
        except RuntimeError as error:
            raise self._lost(error, "an exchange") from error

    # --- errors

    @contextlib.contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Enter a call that all processes must make; an error of one of them ends it on all.

        An error that all of them raise alike, such as a loss that is not finite, leaves them able to go on.

        Raises:
            DistributedError: If another process made another call, or failed; its error is in the message.
        """
        try:
            self._meet(what)
            yield
        except DistributedError:
            self._ends = True
            raise
        except Exception as error:
            if _is_of_connection(error):
                self._ends = True
                raise self._lost(error, what) from error
            self._tell(what, error)
            if not self._is_common(error, what):
                self._ends = True
            raise
        except BaseException as error:  # a second signal, or sys.exit(): this process leaves at once
            self._tell(what, error)
            self._ends = True
            raise

    def _is_common(self, error: Exception, what: str) -> bool:
        """Return whether all processes came to the same error; those that did not are told by this very question."""
        try:
            self._meet(f"{type(error).__name__} in {what}", seconds=_LAST_WORDS)
        except (DistributedError, TimeoutError):
            return False
        if self.is_main:
            self._store.delete_key("failure")
        return True

    def _tell(self, what: str, error: BaseException) -> None:
        """Let the other processes know that this one has failed; the first one to fail has the word."""
        text = "".join(traceback.format_exception(error))
        report = {"rank": self.rank, "what": what, "error": f"{type(error).__name__}: {error}", "traceback": text}
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("failure", "", json.dumps(report))

    def _failure(self, wait: float = 0.0) -> dict[str, Any] | None:
        """Return what the first process that failed has left, waiting a little for it if asked to."""
        end = time.monotonic() + wait
        while True:
            try:
                if self._store.check(["failure"]):
                    return json.loads(self._store.get("failure"))
            except RuntimeError:
                return None  # the store went with the process that held it
            if time.monotonic() >= end:
                return None
            time.sleep(0.05)

    def _ended_by(self, report: dict[str, Any]) -> DistributedError:
        return DistributedError(
            f"Rank {report['rank']} failed in {report['what']}, and so the run ends on all {self.world_size} "
            f"processes: {report['error']}\n--- rank {report['rank']}\n{report['traceback']}---"
        )

    def _lost(self, error: BaseException, what: str) -> DistributedError:
        report = self._failure(wait=_LAST_WORDS)
        if report is not None and report["rank"] != self.rank:
            return self._ended_by(report)
        return DistributedError(
            f"Rank {self.rank} lost another process in {what}: it was killed, or its machine is gone ({error}). "
            "Start the run again with resume_from='auto'; torchrun's --max-restarts does so by itself."
        )

    def _disagreement(self, what: str) -> DistributedError:
        """Say who came for what. All processes notice together, so all of them leave word."""
        self._ends = True
        report = self._failure(wait=0.2)
        if report is not None and report["rank"] != self.rank:
            return self._ended_by(report)
        at: dict[int, str] = {}
        with contextlib.suppress(RuntimeError):
            self._store.set(f"at/{self.rank}", what)
            end = time.monotonic() + _LAST_WORDS
            while len(at) < self.world_size and time.monotonic() < end:
                for rank in set(range(self.world_size)) - at.keys():
                    if self._store.check([f"at/{rank}"]):
                        at[rank] = self._store.get(f"at/{rank}").decode()
                time.sleep(0.02)
        places = "; ".join(f"rank {rank}: {place}" for rank, place in sorted(at.items()))
        return DistributedError(
            f"The processes of the run are at different places, where they would have waited for each other for ever: "
            f"{places}. Calls of the trainer that concern the whole run (train, evaluate, test, predict, save_model, "
            "save_checkpoint, load_checkpoint) are made on every rank, not under `if trainer.is_main_process:`."
        )

    def _watch_over(self) -> None:
        """End this process if another has failed and this one is stuck in a collective that cannot be interrupted."""
        while not self._closing.wait(1):
            report = self._failure()
            if report is None or report["rank"] == self.rank or self._ends:
                continue
            if self._closing.wait(2 * _LAST_WORDS) or self._ends or self._failure() != report:
                continue
            print(f"omnitrain.errors.DistributedError: {self._ended_by(report)}", file=sys.stderr, flush=True)
            os._exit(1)

    def _leave(self) -> None:
        """At the end of the program, make sure that no other process is waiting in a call for this one."""
        self._closing.set()
        if not self._ends and dist.is_initialized() and self._failure() is None:
            ahead = threading.Thread(target=self._say_goodbye, daemon=True)
            ahead.start()
            ahead.join(2 * _LAST_WORDS)
        self._watch.join(2)

    def _say_goodbye(self) -> None:
        with contextlib.suppress(RuntimeError):
            try:
                self._meet("the end of the program")
            except DistributedError as error:
                if "different places" in str(error):
                    print(f"omnitrain.errors.DistributedError: {error}", file=sys.stderr, flush=True)
                    os._exit(1)


def _is_of_connection(error: BaseException) -> bool:
    """Whether this is what gloo, NCCL and MPI raise where the other end has gone."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in text for word in ("gloo", "nccl", "connection", "socket", "timed out", "peer")
    )


def _portable(error: Any) -> Any:
    """Return the error if it can be sent to another process, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
