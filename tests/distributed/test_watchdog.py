"""Detection of stalled ranks from heartbeats."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import Case, Found, Outcome, play
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from marks import thinned
from torch import nn

from omnitrain import Trainer
from omnitrain.distributed import ranks, watchdog
from omnitrain.distributed.watchdog import Group, Heartbeat, RankTree, Report, Stall, StallDetector, describe_stall

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


STALLED: dict[str, tuple[list[Heartbeat], tuple[int, ...], list[tuple[int, bool]]]] = {
    "the rank that does not wait": ([WAITS, DATA, WAITS], (), [(1, False)]),
    "the earlier phase": ([STEP, DATA], (), [(1, False)]),
    "the earlier step": ([STEP, STEP._replace(step=11)], (), [(1, False)]),
    "the step before evaluation": ([STEP._replace(phase="evaluation"), STEP], (), [(1, False)]),
    "all in the same phase": ([STEP, STEP], (), [(0, False), (1, False)]),
    "all wait for each other": ([WAITS, WAITS], (), [(0, False), (1, False)]),
    "a silent rank first": ([DATA, WAITS], (1,), [(1, True)]),
    "outside the trainer": ([OUTSIDE, WAITS], (), [(0, False)]),
    "all outside the trainer": ([OUTSIDE, OUTSIDE], (), []),
    "the end of the program": ([OUTSIDE._replace(has_ended=True), DATA], (0,), [(1, False)]),
}
"""Heartbeats of ranks, which of them are silent, and the stalls: rank, and whether it is silent."""


@pytest.mark.parametrize("case", STALLED)
def test_stall_detector_finds_stalled_ranks(case: str) -> None:
    heartbeats, silent, expected = STALLED[case]
    stalls = watch(30, *heartbeats, silent=silent).stalled(30.0)
    assert [(stall.rank, stall.is_silent) for stall in stalls] == expected


def test_stalls_outside_of_the_trainer_end_if_silent() -> None:
    for silent in ((), (0,)):
        (stall,) = watch(30, OUTSIDE, WAITS, silent=silent).stalled(30.0)
        assert stall.rank == 0 and stall.may_end_run == bool(silent)


def test_stalls_empty_while_any_rank_moves() -> None:
    observer = StallDetector()
    for second in range(100):
        observer.update({0: WAITS._replace(beat=second), 1: Heartbeat(second, "evaluation", 12, second, False)}, 1.0)
    assert not observer.stalled(3.0)


def test_stalls_due_seldom_and_once_for_usual_steps() -> None:
    observer, reported = StallDetector(), []
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


def test_digest_and_words_of_stalls() -> None:
    (stall,) = watch(31, WAITS, DATA).stalled(30.0)
    assert describe_stall(stall) == "Rank 1 has been in 'data' for 31 s (step 12)."
    (stall,) = watch(31, WAITS, Heartbeat(0, "train()", 0, 0, False), silent=(1,)).stalled(30.0)
    assert describe_stall(stall) == (
        "Rank 1 has sent no heartbeat for 31 s, and was in 'train()' before: "
        "its process is stopped, swapped out, cut off or gone."
    )
    (group,) = watch(39, *[DATA] * 20).digest()
    assert group == Group(tuple(range(8)), 20, DATA._replace(beat=39), 39.0, 39.0, 0.0)


# --- a tree of many ranks

Heartbeats = Callable[[int, int], Heartbeat | None]
"""The heartbeat of a rank in a second; None while its process does not run."""


class Run:
    """Ranks that read each other's reports second by second, and an observer that reads all heartbeats itself."""

    def __init__(self, size: int, heartbeats: Heartbeats) -> None:
        self.trees = [RankTree(rank, size) for rank in range(size)]
        self.heartbeats = heartbeats
        self.second = 0
        self.store: list[str] = [self.report(rank, heartbeats(rank, 0) or STEP) for rank in range(size)]
        self.observer = StallDetector()
        self.reads: list[int] = []
        self.lines: dict[int, list[str]] = {}

    def report(self, rank: int, heartbeat: Heartbeat) -> str:
        return json.dumps(Report(heartbeat._replace(beat=self.second), self.trees[rank].digest()).to_json())

    def tick(self) -> None:
        self.second += 1
        running = {
            rank: heartbeat for rank in range(len(self.trees)) if (heartbeat := self.heartbeats(rank, self.second))
        }
        for rank, heartbeat in running.items():
            self.store[rank] = self.report(rank, heartbeat)
        self.reads = []
        for rank in running:
            tree = self.trees[rank]
            ranks = tree.ranks_to_read(tree.is_top)
            self.reads.append(len(ranks))
            reports = {number: Report.from_json(*json.loads(self.store[number])) for number in ranks}
            self.lines[rank] = tree.update(reports, 1.0, tree.is_top)
        self.observer.update(
            {rank: Report.from_json(*json.loads(text)).heartbeat for rank, text in enumerate(self.store)}, 1.0
        )

    def judges(self) -> list[StallDetector]:
        """Return the observers of running ranks that do the work of rank 0."""
        return [tree.all_ranks for tree in self.trees if tree.is_top and self.heartbeats(tree.rank, self.second)]


def check_tree(size: int, heartbeats: Heartbeats, seconds: float = 30.0, levels: int = 2) -> None:
    """Find by the tree what reading all finds, not earlier and later by some seconds for each level of the tree."""
    run, expected = Run(size, heartbeats), list[Stall]()
    for _ in range(int(seconds + (levels + 1) * (watchdog.GONE_S + 2))):
        run.tick()
        expected = run.observer.stalled(seconds)
        assert expected or not any(judge.stalled(seconds) for judge in run.judges())
    assert run.judges(), "nobody judges"
    for judge in run.judges():
        stalled = judge.stalled(seconds)
        assert {stall.rank for stall in stalled} <= {stall.rank for stall in expected}
        assert len(stalled) + sum(stall.more for stall in stalled) == len(expected)
        assert [stall.is_silent for stall in stalled] == [expected[0].is_silent] * len(stalled)


@pytest.mark.parametrize(
    ("size", "ranks", "is_stopped"),
    thinned(
        [(128, (100,), False), (128, (0,), True), (128, (1, 33, 64, 65), True), (1024, tuple(range(100, 120)), False)],
        [(128, (100,), False)],
    ),
    ids=str,
)
def test_tree_finds_stalls_of_many_ranks(size: int, ranks: tuple[int, ...], is_stopped: bool) -> None:
    def heartbeats(rank: int, second: int) -> Heartbeat | None:
        if second < 2:
            return Heartbeat(0, "step", 1, second, False)
        return WAITS if rank not in ranks else None if is_stopped else DATA

    check_tree(size, heartbeats, 20.0)


def check_stopped(size: int, stopped: set[int], behind: set[int]) -> None:
    def heartbeats(rank: int, second: int) -> Heartbeat | None:
        return None if rank in stopped and second > 1 else DATA if rank in behind else WAITS

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "_CHILDREN", 2)
        check_tree(size, heartbeats, levels=6)


def test_tree_finds_stalls_below_stopped_ranks() -> None:
    check_stopped(40, {0, 1, 2}, {7})


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    size=st.integers(4, 40),
    stopped=st.sets(st.integers(0, 39), max_size=8),
    behind=st.sets(st.integers(0, 39), max_size=3),
)
@example(size=40, stopped=set(range(7)), behind=set())
@example(size=40, stopped=set(), behind={39})
def test_tree_finds_stalls_below_any_stopped_ranks(size: int, stopped: set[int], behind: set[int]) -> None:
    assume(not stopped.issuperset(range(size)))
    check_stopped(size, stopped, behind)


def test_tree_reads_few_and_short_reports() -> None:
    run = Run(256, lambda rank, second: Heartbeat(0, "step", second // 3, second * rank, rank % 3 > 0))
    for _ in range(12):
        run.tick()
    assert max(run.reads) <= 2 * watchdog._CHILDREN + 1 and sum(run.reads) <= 4 * 256
    assert max(map(len, run.store)) < 600


def test_tree_of_few_ranks_reads_all_while_judging() -> None:
    tree = RankTree(3, 33)
    assert tree.is_top and tree.ranks_to_read(judges=False) == [0]
    assert sorted(tree.ranks_to_read(judges=True)) == list(range(33))
    assert RankTree(0, 33).ranks_to_read(judges=False) == [] and not tree.digest()


def test_tree_reports_a_distant_rank_that_continues() -> None:
    def heartbeats(rank: int, second: int) -> Heartbeat:
        if rank != 100:
            return WAITS
        return Heartbeat(0, "evaluation", 3, second, False) if second < 15 else DATA if second < 50 else STEP

    run = Run(128, heartbeats)
    reported: list[tuple[int, int]] = []
    for second in range(55):
        run.tick()
        reported += [(second, stall.rank) for stall in run.trees[0].all_ranks.due(30.0)]
        if run.lines[0]:
            break
    ((second, rank),) = reported
    assert rank == 100 and second > 40  # not while it moves
    (line,) = run.lines[0]
    assert re.fullmatch(r"Rank 100 continues after 3\d s or more in 'data'\.", line)


def test_tree_top_returns_to_rank_0() -> None:
    run = Run(66, lambda rank, second: None if rank == 0 and 2 < second < 30 else WAITS)
    tops = {}
    for second in range(1, 50):
        run.tick()
        tops[second] = [tree.rank for tree in run.trees if tree.is_top]
    assert tops[2] == [0] and tops[29] == [*range(33)] and tops[49] == [0]


# --- one process


class Hanging(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        time.sleep(1000 if index == 5 else 0)
        return torch.zeros(4), torch.zeros(1)


def hang(workers: int) -> None:
    """Train on one process, of which reading data never ends."""
    ranks.QUIET_S = 1.0
    Trainer(
        nn.Linear(4, 1), Hanging(), loss_fn=nn.functional.mse_loss, batch_size=2, epochs=1, device="cpu",
        num_workers=workers, shuffle=False, timeout="4s", progress_bar=False,
    ).train()  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Found[list[Outcome]]:
    cases = [Case(f"{workers}", "test_watchdog:hang", {"workers": workers}, processes=1) for workers in (0, 1)]
    return play(cases, folder)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_timeout_ends_a_single_process(workers: int, outcomes: dict[str, list[Outcome]]) -> None:
    (outcome,) = outcomes[f"{workers}"]
    assert outcome.code == 1
    assert re.search(r"^Rank 0 has been in 'data' for \d s \(step \d\)\.$", outcome.output, re.M)
    assert "DistributedError: Rank 0 has been in 'data'" in outcome.output
    assert "No progress for `timeout=4` seconds ends the run. Start it again" in outcome.output
