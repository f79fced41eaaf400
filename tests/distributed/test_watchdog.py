"""Detection of stalled ranks from heartbeats."""

import json
import math
import re
import sys
import threading
import time
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forking import Case, mark, play
from test_standstill import count_heartbeats
from torch import nn

from omnitrain import Trainer
from omnitrain.distributed import watchdog
from omnitrain.distributed.watchdog import Heartbeat, Position, StallDetector, Watchdog

STEP = Heartbeat(0, "step", 12, 70, False)
"""A rank that may be waiting in a collective of the model, which nobody can see."""
WAITS = Heartbeat(0, "step", 12, 70, True)
DATA = Heartbeat(0, "data", 12, 69, False)
OUTSIDE = Heartbeat(0, "", 0, 0, False)


def watch(seconds: int, *heartbeats: Heartbeat, silent: tuple[int, ...] = ()) -> StallDetector:
    """Return a detector that has seen these heartbeats for so long; those of silent ranks do not count up."""
    observer = StallDetector()
    for second in range(seconds + 1):
        latest = {
            rank: heartbeat if rank in silent else heartbeat._replace(beat=second)
            for rank, heartbeat in enumerate(heartbeats)
        }
        observer.update(latest, 1.0)
    return observer


STALLED: dict[str, tuple[list[Heartbeat], list[int], tuple[int, ...]]] = {
    "the rank that does not wait": ([WAITS, DATA, WAITS], [1], ()),
    "the earlier phase": ([STEP, DATA], [1], ()),
    "the earlier step": ([STEP, STEP._replace(step=11)], [1], ()),
    "the step before evaluation": ([STEP._replace(phase="evaluation"), STEP], [1], ()),
    "all in the same phase": ([STEP, STEP], [0, 1], ()),
    "all wait for each other": ([WAITS, WAITS], [0, 1], ()),
    "a silent rank first": ([DATA, WAITS], [1], (1,)),
    "outside the trainer": ([OUTSIDE, WAITS], [0], ()),
    "outside the trainer, silent": ([OUTSIDE, WAITS], [0], (0,)),
    "all outside the trainer": ([OUTSIDE, OUTSIDE], [], ()),
    "the end of the program": ([OUTSIDE._replace(has_ended=True), DATA], [1], (0,)),
}
"""Heartbeats of ranks, which of them are stalled, and which are silent."""


@pytest.mark.parametrize("case", STALLED)
def test_stall_detector_finds_stalled_ranks(case: str) -> None:
    heartbeats, expected, silent = STALLED[case]
    stalls = watch(30, *heartbeats, silent=silent).stalled(30.0)
    assert [stall.rank for stall in stalls] == expected
    for stall in stalls:  # outside of the trainer a rank may do anything, unless it is silent
        assert stall.is_silent == (stall.rank in silent)
        assert stall.may_end_run == (stall.is_silent or heartbeats[stall.rank] is not OUTSIDE)


def test_stalls_due_seldom_and_once_for_usual_steps() -> None:
    observer, reported = StallDetector(), []
    for second in range(100):
        observer.update({0: WAITS._replace(beat=second), 1: Heartbeat(second, "evaluation", 12, second, False)}, 1.0)
    assert not observer.stalled(3.0)  # while any rank moves
    observer = StallDetector()
    for second in range(300):
        observer.update({0: WAITS._replace(beat=second), 1: DATA._replace(beat=second)}, 1.0)
        reported += [stall.seconds for stall in observer.due(30.0)]
    assert reported == [30, 60, 120, 240]
    assert observer.update({1: STEP._replace(beat=300)}, 1.0) == ["Rank 1 continues after 299 s in 'data'."]
    observer, reported = StallDetector(), []
    for second in range(400):  # each step takes 40 seconds
        observer.update({0: Heartbeat(second, "step", second // 40, second // 40, False)}, 1.0)
        reported += [stall.heartbeat.step for stall in observer.due(30.0)]
    assert reported == [0]


def test_stalls_are_described() -> None:
    (stall,) = watch(31, WAITS, DATA).stalled(30.0)
    assert watchdog.describe_stall(stall) == "Rank 1 has been in 'data' for 31 s (step 12)."
    (stall,) = watch(31, WAITS, Heartbeat(0, "train()", 0, 0, False), silent=(1,)).stalled(30.0)
    assert watchdog.describe_stall(stall) == (
        "Rank 1 has sent no heartbeat for 31 s, and was in 'train()' before: "
        "its process is stopped, swapped out, cut off or gone."
    )


def test_detector_of_one_rank_finds_only_silent_ones() -> None:
    """Who does not know all ranks cannot tell for which one they wait."""
    observer = StallDetector(only_silent=True)
    for second in range(60):
        observer.update({0: WAITS._replace(beat=min(second, 25)), 3: DATA._replace(beat=second)}, 1.0)
        assert bool(observer.stalled(30.0)) == (second >= 55)
    assert [stall.rank for stall in observer.stalled(30.0)] == [0]


def test_given_up_needs_a_report_or_silence() -> None:
    for silent, expected in (((), []), ((1,), [1])):
        observer = watch(12, WAITS, DATA, silent=silent)
        assert [stall.rank for stall in observer.given_up(10.0)] == expected
        observer.due(10.0)
        assert [stall.rank for stall in observer.given_up(10.0)] == [1]


def test_detector_judges_a_thousand_ranks() -> None:
    observer = watch(30, *[WAITS] * 1000, *[DATA] * 24)
    stalls = observer.stalled(30.0)
    assert [stall.rank for stall in stalls] == list(range(1000, 1024))
    end = "Rank 1007 has been in 'data' for 30 s (step 12). 16 more ranks are in the same state."
    assert watchdog.describe_stalls(stalls).endswith(end)


# --- the store


class Slow(dist.Store):
    """A store that answers heartbeats only when no answer is expected any more; rank 1 arrives in between."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = dist.HashStore()
        self.watchdog: Watchdog | None = None
        self.answers = 0

    def delay(self) -> None:
        if self.watchdog is None or threading.current_thread() is not self.watchdog._posting:
            return
        end = self.watchdog._unanswered + watchdog.UNRESPONSIVE_S
        while self.watchdog._unanswered < end and not self.watchdog._closing.is_set():
            time.sleep(0.001)
        self.answers += 1
        if self.answers == 6:
            self.entries.add("omnitrain/0/here", 1)

    def answer(self, name: str, *args: Any) -> Any:
        self.delay()
        return getattr(self.entries, name)(*args)

    set, get = partialmethod(answer, "set"), partialmethod(answer, "get")
    add, check = partialmethod(answer, "add"), partialmethod(answer, "check")


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Position:
    """Rank 0 of two, which waits; the watchdog's seconds are short, and it ends no process."""
    monkeypatch.setattr(watchdog, "_instances", iter([0]))
    monkeypatch.setattr(watchdog, "_ticks", ticks)
    monkeypatch.setattr(watchdog, "exit_now", lambda code: sys.exit("ended"))
    position = Position()
    position.world_size, position.phase, position.step, position.is_waiting = 2, "step", 12, True
    return position


def ticks(ended: threading.Event) -> Iterator[float]:
    while not ended.wait(0.005):
        yield 1.0


def test_watchdog_waits_for_ranks_through_a_slow_store(waiting: Position, capsys: Any) -> None:
    waiting.phase, store = watchdog.START, Slow()
    observer = store.watchdog = Watchdog(waiting, store, None)
    observer.wait_for_ranks()
    assert store.answers >= 6 and "DistributedError" not in capsys.readouterr().err
    observer.close()


def test_watchdog_counts_rank_whose_first_heartbeat_failed(waiting: Position) -> None:
    """Nobody is judged until all ranks are counted."""

    class Failing(Slow):
        def set(self, key: str, value: Any) -> None:
            self.answers += 1
            if self.answers == 1:
                raise RuntimeError("no answer")
            super().set(key, value)

    store = Failing()
    observer = Watchdog(waiting, store, None)
    while not store.entries.add("omnitrain/0/posted", 0):
        assert store.answers < 1000, "its heartbeats come, and it is not counted"
        time.sleep(0.001)
    observer.close()


@pytest.mark.parametrize(("quiet", "limit"), [(1.0, 1800.0), (30.0, 1.0)])
def test_watchdog_reads_other_ranks_before_a_report(
    quiet: float, limit: float, waiting: Position, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 reads them only while it seems to wait; the rank for which it waits is to be reported, not itself."""
    for name, value in {"QUIET_S": quiet, "UNRESPONSIVE_S": math.inf, "GRACE_S": math.inf}.items():
        monkeypatch.setattr(watchdog, name, value)
    store, has_begun = dist.PrefixStore("omnitrain/0", entries := dist.HashStore()), threading.Event()

    def send_heartbeats(ended: threading.Event) -> Iterator[float]:
        has_begun.wait()
        for beat, elapsed in enumerate(ticks(ended)):
            store.set("post/1", json.dumps([DATA._replace(beat=beat), []]))
            yield elapsed

    monkeypatch.setattr(watchdog, "_ticks", send_heartbeats)
    store.set("post/1", json.dumps([DATA, []]))
    store.add("posted", 1)
    observer = Watchdog(waiting, entries, None)
    with observer.limited(limit, is_start=False):
        has_begun.set()
        while not (caplog.messages or store.check(["failure/0"])):
            time.sleep(0.01)
    observer.close()
    reports = caplog.messages or [store.get("failure/0").decode()]
    assert "Rank 1 has been in 'data'" in reports[0] and "Rank 0" not in reports[0]


# --- one process


class Hanging(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            mark()
            time.sleep(1000)
        return torch.zeros(4), torch.zeros(1)


def hang(workers: int) -> None:
    """Train on one process, of which reading data never ends."""
    watchdog.QUIET_S = 1.0
    count_heartbeats(0, "data", "hangs")
    Trainer(
        nn.Linear(4, 1), Hanging(), loss_fn=nn.functional.mse_loss, batch_size=2, epochs=1, device="cpu",
        num_workers=workers, shuffle=False, timeout="4s", progress_bar=False,
    ).train()  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_timeout_ends_a_single_process(workers: int, tmp_path: Path) -> None:
    case = Case("hang", "test_watchdog:hang", {"workers": workers}, processes=1)
    (outcome,) = play([case], tmp_path)["hang"]
    assert outcome.code == 1
    assert re.search(r"^Rank 0 has been in 'data' for \d s \(step \d\)\.$", outcome.output, re.M)
    assert "DistributedError: Rank 0 has been in 'data'" in outcome.output
    assert "No progress for `timeout=4` seconds ends the run. Start it again" in outcome.output
