"""Detection of ranks that failed, are gone or make no progress.

`StallDetector` judges ranks by their heartbeats, and knows nothing of how they are sent. Times are the observer's own:
how long it has seen no change; clocks of different machines are never compared. `Watchdog` sends and reads heartbeats
and reports of errors through a store, which can be read while a collective is stuck, and ends the process if it is.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from torch.distributed import distributed_c10d

from omnitrain.core.errors import DistributedError
from omnitrain.distributed import signals

logger: logging.Logger = logging.getLogger("omnitrain")

POLL_INTERVAL = datetime.timedelta(seconds=1)
# Seconds without progress after which a rank is reported.
QUIET_S = 30.0
# Seconds without progress after which a run on several processes ends, unless its trainer has a `timeout`.
TIMEOUT_S = 1800.0
# Seconds that the others wait at the start for a rank without a heartbeat.
SILENCE_S = 60.0
# Seconds that a failed rank waits for the others to raise the same error.
ERROR_SYNC_S = 5.0
# Seconds that a rank has to notice the failure of another rank, before it is ended.
GRACE_S = 3.0
# Seconds that a rank waits for the others at the end of the program.
EXIT_WAIT_S = 3.0
# Seconds without an answer after which no more requests are sent to the store.
UNRESPONSIVE_S = 10.0
# Seconds that a rank with a signal waits for another rank without a heartbeat.
SIGNALLED_S = 10.0
# Seconds without progress of the main rank after which it checks the others.
_CHECK_S = 3.0
# Seconds that the main thread has to handle a signal, before another thread does.
_UNHANDLED_S = 1.0
# The share of CPU time that counts as progress in phases without a counter, such as a long save or metric.
_BUSY_SHARE = 0.02
# Phases in which batches are counted; CPU time does not count there, as NCCL waits in a busy loop.
_COUNTED_PHASES = ("data", "step", "evaluation")
# The phase of a rank from its first heartbeat until all ranks are connected.
START = "the start"
AT_THE_END = "the end of the program"
_instances = itertools.count()

# The phases of a step, in order.
_ORDER = {phase: number for number, phase in enumerate(("data", "step", "evaluation", "metrics", "save"))}
# How many ranks without progress a message describes.
_MAX_DESCRIBED = 8


class Heartbeat(NamedTuple):
    """A rank's report about itself, posted about once a second.

    Attributes:
        beat: Counts the heartbeats; it stops if the process does not run.
        phase: What the rank is doing: "data", "step", "evaluation", "metrics", "save", "load", or the name of a call;
            empty outside the trainer's calls.
        step: The number of its current optimizer step.
        progress_count: Counts progress within a phase: batches, exchanges, files.
        is_waiting: Whether it is waiting for other ranks in an exchange.
        has_ended: Whether this is the last heartbeat.
    """

    beat: int
    phase: str
    step: int
    progress_count: int
    is_waiting: bool
    has_ended: bool = False


class Stall(NamedTuple):
    """A rank that makes no progress, for which others may be waiting.

    Attributes:
        rank: Its number.
        heartbeat: Its latest heartbeat.
        seconds: How long that has not changed, or how long there was none.
        is_silent: Whether its heartbeats have stopped: its process does not run.
    """

    rank: int
    heartbeat: Heartbeat
    seconds: float
    is_silent: bool

    @property
    def may_end_run(self) -> bool:
        """Whether this may end a run: the user's code outside the trainer may take any time."""
        return bool(self.heartbeat.phase) or self.is_silent


@dataclass(slots=True)
class _RankState:
    """What is known of a rank; times are in seconds."""

    heartbeat: Heartbeat
    # Without a change of its progress.
    idle: float = 0.0
    # In the same phase of the same step.
    settled: float = 0.0
    # Without a heartbeat.
    silent: float = 0.0
    # The last stall that was reported.
    reported: Stall | None = None


class StallDetector:
    """Judges ranks by their heartbeats.

    Args:
        only_silent: Whether to find only ranks whose heartbeats have stopped: whoever does not know all ranks cannot
            tell for which one the others wait.
        world_size: The number of ranks, for messages.
        limit: Seconds without progress of any rank after which the current call ends.

    >>> detector, waiting = StallDetector(), Heartbeat(0, "step", 12, 70, True)
    >>> for second in range(41):
    ...     _ = detector.update({0: waiting._replace(beat=second), 1: Heartbeat(second, "data", 12, 69, False)}, 1.0)
    >>> [(stall.rank, stall.heartbeat.phase, stall.seconds) for stall in detector.stalled(30.0)]
    [(1, 'data', 40.0)]
    """

    def __init__(self, only_silent: bool = False, world_size: int = 1, limit: float = math.inf) -> None:
        self._only_silent = only_silent
        self._everywhere = "" if world_size == 1 else f" on all {world_size} processes"
        # Seconds without progress of any rank, or without a heartbeat of one, after which the current call ends.
        self.limit: float = limit
        self.silence_limit: float = math.inf
        self._ranks: dict[int, _RankState] = {}
        # The longest time that a rank was in a phase before it continued.
        self._longest: dict[str, float] = {}

    def update(self, heartbeats: Mapping[int, Heartbeat], elapsed: float) -> list[str]:
        """Record the latest heartbeats; return a line for each rank that continues after it was reported.

        Args:
            heartbeats: The latest heartbeat of each rank; ranks that are no longer among them are forgotten.
            elapsed: Seconds since the last call in which the observer itself was running.
        """
        lines = []
        known, self._ranks = self._ranks, {}
        for rank, current in heartbeats.items():
            state = self._ranks[rank] = known.get(rank) or _RankState(current)
            if rank not in known:
                continue
            previous, state.heartbeat = state.heartbeat, current
            idle = max(state.idle, state.silent)
            state.silent = 0.0 if current.beat != previous.beat else state.silent + elapsed
            has_moved = (current.phase, current.step) != (previous.phase, previous.step)
            state.settled = 0.0 if has_moved else state.settled + elapsed
            if current[1:] == previous[1:] and not current.has_ended:
                state.idle += elapsed
                continue
            state.idle = 0.0
            self._longest[previous.phase] = max(self._longest.get(previous.phase, 0.0), idle)
            if state.reported is not None and not current.has_ended:
                lines.append(f"Rank {rank} continues after {idle:.0f} s in {_phase_name(previous)}.")
            state.reported = None
        return lines

    def stalled(self, seconds: float) -> list[Stall]:
        """Return the ranks for which all others wait, if nothing has moved for this many seconds.

        These are the ranks whose processes do not run; if all run, those that do not wait themselves, and of these the
        ones furthest behind.
        """
        present = {rank: state for rank, state in sorted(self._ranks.items()) if not state.heartbeat.has_ended}
        inside = {rank: state for rank, state in present.items() if state.heartbeat.phase}
        if not inside or any(state.settled < seconds for state in inside.values()):
            return []
        silent = [Stall(rank, state.heartbeat, state.silent, True) for rank, state in present.items()]
        silent = [stall for stall in silent if stall.seconds >= seconds]
        if silent or self._only_silent or any(state.idle < seconds for state in inside.values()):
            return silent
        busy = {rank: state for rank, state in inside.items() if not state.heartbeat.is_waiting}
        least = min((_progress(state.heartbeat) for state in busy.values()), default=None)
        stalled = {rank: state for rank, state in busy.items() if _progress(state.heartbeat) == least}
        outside = {rank: state for rank, state in present.items() if rank not in inside and state.idle >= seconds}
        chosen = stalled or outside or inside
        return [Stall(rank, state.heartbeat, state.idle, False) for rank, state in chosen.items()]

    def due(self, seconds: float) -> list[Stall]:
        """Return those of `stalled` to report now: less and less often, and not if it has taken as long before."""
        stalls = []
        for stall in self.stalled(seconds):
            state = self._ranks[stall.rank]
            usual = 0.0 if stall.is_silent else 2 * self._longest.get(stall.heartbeat.phase, 0.0)
            if stall.seconds >= max(2 * state.reported.seconds if state.reported else 0.0, usual):
                state.reported = stall
                stalls.append(stall)
        return stalls

    def given_up(self, seconds: float) -> list[Stall]:
        """Return the ranks for which a rank with a signal no longer waits: all of them are silent, or were reported."""
        stalls = self.stalled(seconds)
        has_reported_all = all(self._ranks[stall.rank].reported is not None for stall in stalls)
        return stalls if has_reported_all or all(stall.is_silent for stall in stalls) else []

    def judge(self, heartbeats: Mapping[int, Heartbeat], elapsed: float, logs: bool = True) -> list[Stall]:
        """Log which ranks make no progress, by the latest heartbeats, and return those that end the run."""
        lines = [*self.update(heartbeats, elapsed), *map(describe_stall, self.due(QUIET_S))]
        for line in lines if logs else ():
            logger.warning("%s", line)
        stalled = self.stalled(min(self.silence_limit, self.limit))
        if not all(stall.is_silent for stall in stalled):
            stalled = self.stalled(self.limit)
        return stalled if all(stall.may_end_run for stall in stalled) else []

    def message(self, stalls: Sequence[Stall]) -> str:
        """Return the message of the error that ends the run because of these ranks."""
        start = f"{describe_stalls(stalls)} "
        remedy = f"{self._everywhere}. Start it again with resume_from='auto'"
        if stalls[0].seconds < self.limit:
            return (
                f"{start}While the processes of a run connect, {self.silence_limit:g} seconds of that end it{remedy}."
            )
        return (
            f"{start}No progress for `timeout={self.limit:g}` seconds ends the run{remedy}, or with a longer `timeout` "
            "if a part of it takes as long."
        )

    @property
    def has_reported(self) -> bool:
        """Whether a rank was reported and has not continued."""
        return any(state.reported is not None for state in self._ranks.values())


def describe_stall(stall: Stall) -> str:
    """Describe a rank that makes no progress in a sentence."""
    phase, step = _phase_name(stall.heartbeat), f" (step {stall.heartbeat.step})" if stall.heartbeat.step else ""
    if not stall.is_silent:
        return f"Rank {stall.rank} has been in {phase} for {stall.seconds:.0f} s{step}."
    return (
        f"Rank {stall.rank} has sent no heartbeat for {stall.seconds:.0f} s, and was in {phase}{step} before: "
        "its process is stopped, swapped out, cut off or gone."
    )


def describe_stalls(stalls: Sequence[Stall]) -> str:
    """Describe the first ranks without progress, and count the others."""
    more = len(stalls) - _MAX_DESCRIBED
    suffix = [f"{more} more ranks are in the same state."] if more > 0 else []
    return " ".join([*map(describe_stall, stalls[:_MAX_DESCRIBED]), *suffix])


def _phase_name(heartbeat: Heartbeat) -> str:
    return repr(heartbeat.phase) if heartbeat.phase else "the program around the trainer"


def _progress(heartbeat: Heartbeat) -> tuple[int, int]:
    return heartbeat.step, _ORDER.get(heartbeat.phase, len(_ORDER))


class Position:
    """What a rank is doing, in the fields of `Heartbeat`; code that may take long increments `progress_count`."""

    rank: int = 0
    world_size: int = 1
    phase: str = ""
    step: int = 0
    progress_count: int = 0
    is_waiting: bool = False
    _beat: int = 0
    # The CPU time used by this process until its latest heartbeat.
    _cpu_s: float = 0.0

    def count_progress(self) -> None:
        """Report progress in a long call to the watchdog."""
        self.progress_count += 1

    def heartbeat(self) -> Heartbeat:
        """Return a heartbeat, one for each second."""
        self._beat += 1
        cpu_s, previous = time.process_time(), self._cpu_s
        self._cpu_s = cpu_s
        is_busy = cpu_s - previous >= _BUSY_SHARE * POLL_INTERVAL.total_seconds()
        if is_busy and self.phase not in _COUNTED_PHASES and not self.is_waiting:
            self.progress_count += 1
        return Heartbeat(self._beat, self.phase, self.step, self.progress_count, self.is_waiting)


def watch_one_process(position: Position, limit: float, ended: threading.Event) -> None:
    """Report this process while it makes no progress, and end it after so many seconds."""
    detector = StallDetector(limit=limit)
    for elapsed in _ticks(ended):
        if stalls := detector.judge({0: position.heartbeat()}, elapsed):
            abort(detector.message(stalls))


class _SlowStoreError(RuntimeError):
    """The store does not answer now: the process that hosts it is stopped, or slow."""


class Watchdog:
    """Watches the ranks of a run from one of them, through a store that all can reach.

    It exists before any process group, and so watches the libraries that set up their communication too, which wait
    forever, or for half an hour, for a rank that is gone. The start fails after `timeout` seconds without progress, at
    least a minute; None is 30 minutes.

    Attributes:
        has_ended: Whether the run has ended by an error.
    """

    def __init__(self, position: Position, store: distributed_c10d.Store, timeout: float | None) -> None:
        self._position, self._rank, self._size = position, position.rank, position.world_size
        self.has_ended: bool = False
        self._process = os.getpid()
        self._prefix = f"omnitrain/{next(_instances)}"
        self._connection = distributed_c10d.PrefixStore(self._prefix, store)
        # Seconds since the store last answered.
        self._unanswered = 0.0
        # Why the store no longer answers, if so: the process that hosted it has ended.
        self._store_error: RuntimeError | None = None
        # How many errors all ranks have raised together and survived; numbers the next error in the store.
        self._survived_errors = 0
        # The latest report of another rank's error, with the error's "number" and whether that rank has "given_up".
        self._failure_read: dict[str, Any] | None = None
        # Whether this rank has failed.
        self._has_failed = False
        # Whether a rank has reached the end of the program, as last read from the store.
        self._has_left = False
        # The main rank judges all ranks, and the others whether its process runs.
        self._detector = StallDetector(self._rank > 0, self._size, max(timeout or TIMEOUT_S, SILENCE_S))
        self._detector.silence_limit = SILENCE_S
        self._judging = threading.Lock()
        # The stalled ranks for which a rank with a signal no longer waits, by its own judgement and the main rank's.
        self._given_up: list[Stall] = []
        self._main_given_up: list[Stall] = []
        # The latest heartbeat of the main rank that was read.
        self._main_heartbeat = Heartbeat(0, "", 0, 0, False)
        # Whether each rank has sent a heartbeat; reading a missing one would wait for it.
        self._all_posted = False
        self._closing = threading.Event()
        # Two threads: if the process that hosts the store is stopped, a request never returns, not even the first.
        has_posted = threading.Event()
        self._posting = threading.Thread(
            target=self._keep_posting, args=(store, has_posted), name="omnitrain-post", daemon=True
        )
        self._watching = threading.Thread(target=self._keep_watching, name="omnitrain-watch", daemon=True)
        self._posting.start()
        self._watching.start()
        has_posted.wait()  # before this rank can be waited for; if it takes too long, the other thread ends it

    @contextlib.contextmanager
    def limited(self, timeout: float | None, is_start: bool) -> Iterator[None]:
        """Set the limits for a call; at a start, a rank without a heartbeat for a minute ends it."""
        self._detector.silence_limit = SILENCE_S if is_start else math.inf
        self._detector.limit = max(timeout or TIMEOUT_S, SILENCE_S if is_start else 0.0)
        try:
            yield
        finally:
            self._detector.silence_limit = math.inf

    def wait_for_ranks(self) -> None:
        """Wait until all ranks have arrived here; threads watch those that have sent a heartbeat.

        Raises:
            DistributedError: If a rank is gone, or has not sent a heartbeat in a minute.
        """
        # even if the store does not answer for a while: the threads end the run if it never does
        arrived = self._connection.add("here", 1)
        end, pause = time.monotonic() + SILENCE_S, 0.005
        while arrived < self._size:
            if self.knows_lost_rank:
                raise self.lost_rank_error(RuntimeError("it has ended"), START)
            if time.monotonic() > end and not self._all_posted:
                unknown = [rank for rank in range(self._size) if not self._connection.check([f"post/{rank}"])]
                if unknown:
                    self.has_ended = True
                    raise DistributedError(
                        f"Rank {self._rank} has waited {SILENCE_S:.0f} seconds for rank "
                        f"{', '.join(map(str, unknown))}, which has joined the group of processes and has not "
                        "created a trainer since: it was killed, hangs, or does something else first. Create the "
                        "trainer at the same place of the program on all processes."
                    )
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
            arrived = self._connection.add("here", 0)

    # --- the store

    @property
    def _store(self) -> distributed_c10d.Store:
        """The store; a RuntimeError at once where it does not answer, as the process that hosts it is stopped."""
        if self._store_unresponsive:
            raise _SlowStoreError("The store does not answer.")
        return self._connection

    @property
    def _store_unresponsive(self) -> bool:
        return self._unanswered >= UNRESPONSIVE_S

    @property
    def _store_is_on_main(self) -> bool:
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    # --- errors

    @property
    def knows_lost_rank(self) -> bool:
        """Whether another rank has reported a failure, or has left the program."""
        return self._current_failure() is not None or self._has_left

    def signal_message(self) -> str:
        """Return why this rank no longer waits for the others after a signal; "" if it does."""
        stalls = self._given_up or self._main_given_up
        return self._describe_signal(signals.handled(), stalls) if signals.handled() and stalls else ""

    def _describe_signal(self, number: int, stalls: Sequence[Stall]) -> str:
        return (
            f"{describe_stalls(stalls)} {signal.Signals(number).name} ends rank {self._rank} before its step is "
            "done, which needs all ranks: the latest checkpoint counts."
        )

    def report_failure(self, what: str, error: BaseException) -> None:
        """Report to the other ranks that this one has failed; the first report counts."""
        self._has_failed = True
        text = "".join(traceback.format_exception(error))
        self._send_report({"what": what, "error": f"{type(error).__name__}: {error}", "traceback": text})

    def _send_report(self, report: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(f"failure/{self._survived_errors}", "", json.dumps({"rank": self._rank, **report}))

    def settle_error(self, is_common: bool) -> bool:
        """Return whether all ranks have raised an error of this one: the first verdict in the store counts for all.

        Otherwise a rank that stopped waiting and one that arrived a little late would disagree.
        """
        verdict = "common" if is_common else "local"
        try:
            return self._store.compare_set(f"verdict/{self._survived_errors}", "", verdict).decode() == "common"
        except RuntimeError:
            return False

    def survive_error(self) -> None:
        """Continue after an error that all ranks have raised."""
        self._survived_errors, self._has_failed = self._survived_errors + 1, False

    def _read_failure(self) -> dict[str, Any] | None:
        """Return the report of another rank's failure, if any; that may still wait for the others to raise it."""
        number = self._survived_errors
        failure, verdict = f"failure/{number}", f"verdict/{number}"
        with contextlib.suppress(RuntimeError):  # the process that hosted the store may have ended
            report = json.loads(self._store.get(failure)) if self._store.check([failure]) else None
            if report is not None and (report["rank"] != self._rank or "stall" in report):
                given_up = self._store.check([verdict]) and self._store.get(verdict) != b"common"
                self._failure_read = {**report, "number": number, "given_up": given_up}
        return self._current_failure()

    def _current_failure(self) -> dict[str, Any] | None:
        """Return the report of another rank's failure, if one has been read."""
        report = self._failure_read
        return None if report is None or report["number"] != self._survived_errors else report

    def _failure_error(self, report: dict[str, Any]) -> DistributedError:
        self.has_ended = True
        if "stall" in report:
            return DistributedError(report["stall"])
        return DistributedError(
            f"Rank {report['rank']} failed in {report['what']}, and so the run ends on all {self._size} processes: "
            f"{report['error']}\n--- rank {report['rank']}\n{report['traceback']}---"
        )

    def lost_rank_error(self, error: BaseException, what: str) -> DistributedError:
        """Return the error for a rank that is gone; it has reported its failure, unless it was killed."""
        self.has_ended = True
        if report := self._read_failure():
            return self._failure_error(report)
        if self.has_exited():
            return self.mismatch_error(what)
        reason = str(error).partition(". This is")[0].partition("\n")[0]  # the rest of gloo's message is no help
        lost = DistributedError(
            f"Rank {self._rank} lost another process in {what}: it was killed, or its machine is gone ({reason}). "
            "Start the run again with resume_from='auto'; torchrun's --max-restarts does so by itself."
        )
        self.report_failure(what, lost)
        return lost

    def mismatch_error(self, what: str) -> DistributedError:
        """Return an error that lists the call of every rank. All ranks detect it at once, so all record their calls."""
        self.has_ended = True
        if report := self._read_failure():
            return self._failure_error(report)
        if self._has_failed:
            return DistributedError(what)  # the others continued, and read the report of this error
        self._record_call(what)
        calls = {**self._calls_by_rank(), self._rank: what}
        places = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(calls.items()))
        return DistributedError(
            f"The processes of the run are at different places, where they would have waited for each other forever: "
            f"{places}. Calls of the trainer that concern the whole run (train, evaluate, test, predict, save_model, "
            "save_checkpoint, load_checkpoint) are made on every rank, not under `if trainer.is_main_process:`."
        )

    def _record_call(self, what: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"at/{self._rank}", what)
            self._store.add("placed", 1)

    def _calls_by_rank(self) -> dict[int, str]:
        """Return the recorded calls, by rank, once all are recorded or after some seconds."""
        calls: dict[int, str] = {}
        with contextlib.suppress(RuntimeError):
            end = time.monotonic() + EXIT_WAIT_S
            while self._store.add("placed", 0) < self._size and time.monotonic() < end:
                time.sleep(0.02)
            for rank in range(self._size):
                if self._store.check([f"at/{rank}"]):
                    calls[rank] = self._store.get(f"at/{rank}").decode()
        return calls

    # --- the threads

    def _keep_posting(self, store: distributed_c10d.Store, has_posted: threading.Event) -> None:
        """Send heartbeats, check for failures of others, and check their progress."""
        idle, unread, is_counted = 0.0, 0.0, False
        heartbeat = self._position.heartbeat()
        with contextlib.suppress(RuntimeError):  # a separate connection, as a stuck collective may hold the other one
            self._connection = distributed_c10d.PrefixStore(self._prefix, store.clone())  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            self._post(heartbeat)
            self._store.add("posted", 1)
            is_counted = True
        has_posted.set()
        for elapsed in _ticks(self._closing):
            previous, heartbeat = heartbeat, self._position.heartbeat()
            idle = idle + elapsed if heartbeat[1:] == previous[1:] else 0.0
            unread += elapsed
            try:
                self._post(heartbeat)
                self._unanswered, self._store_error = 0.0, None
                if not is_counted:  # the store was too slow at first, and nobody is judged until all are counted
                    self._store.add("posted", 1)
                    is_counted = True
                self._read_failure()
                self.has_exited()
                self._all_posted = self._all_posted or self._store.add("posted", 0) >= self._size
                # the main rank reads the others only while it seems to wait for one
                is_waiting = idle >= min(_CHECK_S, QUIET_S / 2, self._detector.limit / 2) or self._detector.has_reported
                heartbeats = self._read_others(is_waiting) if self._all_posted else {}
                self._judge_ranks({self._rank: heartbeat, **heartbeats}, unread)
                unread = 0.0
            except _SlowStoreError:
                pass  # the next heartbeat tells whether it answers again
            except RuntimeError as error:  # the process that hosted the store has ended
                self._store_error = error
                if self._failure_read is not None:
                    self._failure_read["given_up"] = True

    def _post(self, heartbeat: Heartbeat) -> None:
        stalls = [] if self._rank else self._given_up[:_MAX_DESCRIBED]
        self._connection.set(f"post/{self._rank}", json.dumps([heartbeat, stalls]))

    def _read_others(self, reads_all: bool) -> dict[int, Heartbeat]:
        """Return the heartbeat of the main rank; on that, those of all others or none."""
        if self._rank:
            heartbeat, stalls = json.loads(self._store.get("post/0"))
            self._main_heartbeat = Heartbeat(*heartbeat)
            self._main_given_up = [Stall(rank, Heartbeat(*latest), *rest) for rank, latest, *rest in stalls]
            return {0: self._main_heartbeat}
        keys = [f"post/{rank}" for rank in range(1, self._size if reads_all else 1)]
        extended = bool(keys) and self._store.has_extended_api()  # type: ignore[attr-defined]
        texts = self._store.multi_get(keys) if extended else [self._store.get(key) for key in keys]
        return {rank: Heartbeat(*json.loads(text)[0]) for rank, text in enumerate(texts, start=1)}

    def _judge_ranks(self, heartbeats: Mapping[int, Heartbeat], elapsed: float) -> None:
        """End the run on all ranks if some have made no progress for too long."""
        with self._judging:
            # rank 1 reports about the main one
            stalled = self._detector.judge(heartbeats, elapsed, logs=self._rank <= 1 or self._store_unresponsive)
            self._given_up = self._detector.given_up(SIGNALLED_S)
        if not stalled or self.has_ended or self._current_failure() is not None:
            return
        what, text = stalled[0].heartbeat.phase, self._detector.message(stalled)
        report = {"what": what, "error": "no progress", "stall": text, "traceback": ""}
        self._send_report(report)
        self.settle_error(is_common=False)
        if self._read_failure() is None:  # the store does not answer
            number = self._survived_errors
            self._failure_read = {"rank": stalled[0].rank, **report, "number": number, "given_up": True}

    def _keep_watching(self) -> None:
        """End this process if another rank has failed, or a signal has arrived, and it is stuck in a collective."""
        since_failure = since_lost = 0.0
        for elapsed in _ticks(self._closing):
            if self.has_ended:
                return
            has_lost = self._position.phase == START and (self._has_left or self._store_error is not None)
            since_lost = since_lost + elapsed if has_lost else 0.0
            if since_lost > GRACE_S:
                self.abort(self.lost_rank_error(self._store_error or RuntimeError("it has ended"), START))
            self._unanswered += elapsed
            if self._store_unresponsive:
                heartbeats = {0: self._main_heartbeat} if self._store_is_on_main and self._rank else {}
                self._judge_ranks({self._rank: self._position.heartbeat(), **heartbeats}, elapsed)
            self._exit_at_signal()
            failure = self._current_failure()
            if failure is None or not failure["given_up"]:
                since_failure = 0.0
                continue
            if not since_failure and "stall" not in failure:
                logger.error("Rank %d failed in %s: %s", failure["rank"], failure["what"], failure["error"])
            since_failure += elapsed
            if since_failure > GRACE_S and not self.has_ended:
                self.abort(self._failure_error(failure))

    def _exit_at_signal(self) -> None:
        """End this process if a signal has arrived that the main thread cannot handle."""
        unhandled = signals.unhandled()
        if not unhandled or time.monotonic() - unhandled[-1][1] < _UNHANDLED_S:
            return
        number, stalls = unhandled[0][0], self._given_up or self._main_given_up
        if any(signals.is_second(*received) for received in unhandled):
            text = f"{signal.Signals(number).name} again: this rank exits at once."
        elif stalls:
            text = self._describe_signal(number, stalls)
        else:
            return
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
        self.report_failure(self._position.phase, SystemExit(128 + number))
        self.settle_error(is_common=False)
        self._keep_store_alive()
        exit_now(128 + number)

    # --- the end of the program

    def abort(self, error: DistributedError) -> NoReturn:
        """End this process with an error, from any thread."""
        abort(error, self._keep_store_alive)

    def close(self) -> bool:
        """Stop at the end of the program; return whether the other ranks wait for this one."""
        self._closing.set()
        if os.getpid() != self._process:  # a fork of it
            return False
        if not self._store_unresponsive:
            self._posting.join(2 * POLL_INTERVAL.total_seconds())
            with contextlib.suppress(RuntimeError):
                self._post(self._position.heartbeat()._replace(has_ended=True))
        if self.has_ended:
            self._keep_store_alive()
        return not self.has_ended

    def record_exit(self) -> None:
        """Record that this rank is at the end of the program; the others read it in their next collective call."""
        with contextlib.suppress(RuntimeError):
            self._record_call(AT_THE_END)
            self._store.set("left", "")

    def has_exited(self) -> bool:
        """Return whether a rank reached the end of the program and stopped waiting for the others."""
        with contextlib.suppress(RuntimeError):
            self._has_left = self._has_left or self._store.check(["left"])
        return self._has_left

    def _keep_store_alive(self) -> None:
        """Keep the store alive after an error, if this process hosts it, until the others have read the report."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"parted/{self._rank}", "")
            keys, end = [f"parted/{rank}" for rank in range(self._size)], time.monotonic() + EXIT_WAIT_S
            while self._rank == 0 and self._store_is_on_main and time.monotonic() < end and not self._store.check(keys):
                time.sleep(0.02)


def _ticks(ended: threading.Event) -> Iterator[float]:
    """Yield, about once a second, how long this process has run since; time while it was stopped does not count."""
    interval = POLL_INTERVAL.total_seconds()
    last = time.monotonic()
    while not ended.wait(interval):
        current = time.monotonic()
        yield min(current - last, 2 * interval)
        last = current


def abort(error: object, finish: Callable[[], None] = lambda: None) -> NoReturn:
    """Print a DistributedError and end this process after `finish`, from another thread than the main one."""
    sys.stdout.flush()
    print(f"omnitrain.core.errors.DistributedError: {error}", file=sys.stderr, flush=True)
    finish()
    exit_now(1)


def exit_now(code: int) -> NoReturn:
    """End this process, from another thread than the main one, and its loaders' workers, which may hang too."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)
