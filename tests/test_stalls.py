"""Which ranks are told to make no progress, from what they post."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import programs
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

from omnitrain import AccelerateTrainer, HFTrainer, Trainer
from omnitrain import stalls as of_stalls
from omnitrain.errors import ConfigError
from omnitrain.stalls import GONE_S, Group, Post, Report, Stall, Stalls, Tree, in_words

HERE = Post(0, "step", 12, 70, False)
"""Where a rank may be waiting inside a collective of the model, which nobody can see."""
WAITS = Post(0, "step", 12, 70, True)
DATA = Post(0, "data", 12, 69, False)


def watched(seconds: int, silent: tuple[int, ...] = (), **posts: Post) -> Stalls:
    """Return what has seen these posts for so long, each with a new beat but those of silent ranks."""
    stalls = Stalls()
    for second in range(seconds + 1):
        seen = {int(name[1:]): post for name, post in posts.items()}
        stalls.look({rank: post if rank in silent else post._replace(beat=second) for rank, post in seen.items()}, 1.0)
    return stalls


def ranks(stalls: Stalls, seconds: float = 30.0) -> list[tuple[int, bool]]:
    return [(stall.rank, stall.is_silent) for stall in stalls.found(seconds)]


def test_the_rank_that_does_not_wait_is_the_one_that_others_wait_for() -> None:
    assert ranks(watched(30, r0=WAITS, r1=DATA, r2=WAITS)) == [(1, False)]


def test_of_ranks_that_may_wait_in_collectives_of_the_model_it_is_the_one_that_came_least_far() -> None:
    assert ranks(watched(30, r0=HERE, r1=DATA)) == [(1, False)]
    assert ranks(watched(30, r0=HERE, r1=HERE._replace(step=11))) == [(1, False)]
    assert ranks(watched(30, r0=HERE._replace(place="evaluation"), r1=HERE)) == [(1, False)]
    assert ranks(watched(30, r0=HERE, r1=HERE)) == [(0, False), (1, False)]


def test_a_process_that_does_not_run_comes_before_all_others() -> None:
    assert ranks(watched(30, (1,), r0=DATA, r1=WAITS)) == [(1, True)]


def test_where_all_wait_for_each_other_all_are_told() -> None:
    assert ranks(watched(30, r0=WAITS, r1=WAITS)) == [(0, False), (1, False)]


def test_a_rank_outside_of_the_trainer_may_take_its_time() -> None:
    (stall,) = watched(30, r0=Post(0, "", 0, 0, False), r1=WAITS).found(30.0)
    assert stall.rank == 0 and not stall.may_end
    (stall,) = watched(30, (0,), r0=Post(0, "", 0, 0, False), r1=WAITS).found(30.0)
    assert stall.rank == 0 and stall.may_end
    assert not ranks(watched(99, r0=Post(0, "", 0, 0, False), r1=Post(0, "", 0, 0, False)))


def test_a_rank_that_has_reached_the_end_of_the_program_is_not_missed() -> None:
    assert ranks(watched(30, (0,), r0=Post(0, "", 0, 0, False, has_ended=True), r1=DATA)) == [(1, False)]


def test_nobody_is_told_while_anybody_makes_progress() -> None:
    stalls = Stalls()
    for second in range(100):
        stalls.look({0: WAITS._replace(beat=second), 1: Post(second, "evaluation", 12, second, False)}, 1.0)
    assert not ranks(stalls, 3.0)


def test_lines_come_ever_more_rarely_and_the_end_of_it_is_told() -> None:
    stalls, told = Stalls(), []
    for second in range(300):
        stalls.look({0: WAITS._replace(beat=second), 1: DATA._replace(beat=second)}, 1.0)
        told += [stall.seconds for stall in stalls.due(30.0)]
    assert told == [30, 60, 120, 240]
    assert stalls.look({1: HERE._replace(beat=300)}, 1.0) == ["Rank 1 goes on, after 299 s in 'data'."]


def test_what_has_taken_as_long_before_is_not_told_again() -> None:
    stalls, told = Stalls(), []
    for second in range(400):  # each step takes 40 seconds
        stalls.look({0: Post(second, "step", second // 40, second // 40, False)}, 1.0)
        told += [stall.post.step for stall in stalls.due(30.0)]
    assert told == [0]


def test_words() -> None:
    (stall,) = watched(31, r0=WAITS, r1=DATA).found(30.0)
    assert in_words(stall) == "Rank 1 has been in 'data' for 31 s (step 12)."
    (stall,) = watched(31, (1,), r0=WAITS, r1=Post(0, "train()", 0, 0, False)).found(30.0)
    assert in_words(stall) == (
        "Rank 1 has posted nothing for 31 s, and was in 'train()' before: "
        "its process is stopped, swapped out, cut off or gone."
    )


# --- many ranks: a tree

Where = Callable[[int, int], Post | None]
"""The post of a rank in a second; None while its process does not run."""


class Run:
    """Ranks that read each other's reports as in a run, second by second, beside one that reads all posts itself."""

    def __init__(self, size: int, where: Where) -> None:
        self.trees = [Tree(rank, size) for rank in range(size)]
        self.where = where
        self.store: list[str] = [self.text(rank, where(rank, 0) or HERE) for rank in range(size)]
        self.all = Stalls()
        self.second = 0
        self.read: list[int] = []
        self.lines: dict[int, list[str]] = {}

    def text(self, rank: int, post: Post) -> str:
        report = Report(post._replace(beat=self.second if hasattr(self, "second") else 0), self.trees[rank].digest())
        return json.dumps(report.plain())

    def tick(self) -> None:
        self.second += 1
        running = [rank for rank in range(len(self.trees)) if self.where(rank, self.second)]
        for rank in running:
            self.store[rank] = self.text(rank, self.where(rank, self.second) or HERE)
        self.read = []
        for rank in running:
            tree = self.trees[rank]
            ranks = tree.to_read(tree.is_top)
            self.read.append(len(ranks))
            reports = {one: Report.of(*json.loads(self.store[one])) for one in ranks}
            self.lines[rank] = tree.look(reports, 1.0, tree.is_top)
        self.all.look({rank: Report.of(*json.loads(text)).post for rank, text in enumerate(self.store)}, 1.0)

    def judges(self) -> list[Stalls]:
        """Return what those see that do the work of rank 0, and run."""
        return [tree.whole for tree in self.trees if tree.is_top and self.where(tree.rank, self.second)]


def numbers(found: list[Stall]) -> tuple[list[int], int]:
    return [stall.rank for stall in found], len(found) + sum(stall.others for stall in found)


def check_tree(size: int, where: Where, seconds: float = 30.0, levels: int = 2) -> None:
    """Find by the tree what reading all finds, not earlier and later by some seconds for each level of the tree."""
    run, expected = Run(size, where), list[Stall]()
    for _ in range(int(seconds + (levels + 1) * (GONE_S + 2))):
        run.tick()
        expected = run.all.found(seconds)
        assert expected or not any(judge.found(seconds) for judge in run.judges())
    assert run.judges(), "nobody judges"
    for judge in run.judges():
        found, count = numbers(judge.found(seconds))
        assert set(found) <= {stall.rank for stall in expected} and count == len(expected)
        assert [stall.is_silent for stall in judge.found(seconds)] == [expected[0].is_silent] * len(found)


@pytest.mark.parametrize("stuck", [(0,), (5,), (40,), (700,), (1, 33, 64, 65), tuple(range(100, 120))])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_of_a_thousand_ranks_those_that_stand_still_are_found(stuck: tuple[int, ...], is_stopped: bool) -> None:
    def where(rank: int, second: int) -> Post | None:
        if second < 2:
            return Post(0, "step", 1, second, False)
        return WAITS if rank not in stuck else None if is_stopped else DATA

    check_tree(1024, where, 20.0)


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(4, 40),
    stopped=st.sets(st.integers(0, 39), max_size=8),
    held=st.sets(st.integers(0, 39), max_size=3),
)
@example(size=40, stopped={0, 1, 2}, held={7})
@example(size=40, stopped={0, 1, 2, 3, 4, 5, 6}, held=set())
def test_no_rank_that_is_gone_hides_those_below_it(size: int, stopped: set[int], held: set[int]) -> None:
    assume(not stopped.issuperset(range(size)))

    def where(rank: int, second: int) -> Post | None:
        return None if rank in stopped and second > 1 else DATA if rank in held else WAITS

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_stalls, "_CHILDREN", 2)
        check_tree(size, where, levels=6)


def test_a_thousand_ranks_read_few_reports_and_short_ones() -> None:
    run = Run(1024, lambda rank, second: Post(0, "step", second // 3, second * rank, rank % 3 > 0))
    for _ in range(12):
        run.tick()
    assert max(run.read) <= 2 * of_stalls._CHILDREN + 1 and sum(run.read) <= 4 * 1024
    assert max(map(len, run.store)) < 600
    healthy = Run(1024, lambda rank, second: Post(0, "step", 1, second, False))
    healthy.tick()
    healthy.tick()
    assert max(healthy.read) <= 2 * of_stalls._CHILDREN + 1


def test_with_few_ranks_all_read_all_while_they_wait_and_else_the_main_rank() -> None:
    tree = Tree(3, 33)
    assert tree.is_top and tree.to_read(judges=False) == [0] and sorted(tree.to_read(judges=True)) == list(range(33))
    assert Tree(0, 33).to_read(judges=False) == [] and not tree.digest()


def test_while_one_rank_goes_on_far_below_nobody_is_told() -> None:
    run = Run(1024, lambda rank, second: Post(0, "evaluation", 3, second, False) if rank == 1000 else WAITS)
    for _ in range(50):
        run.tick()
    assert not any(judge.found(10.0) for judge in run.judges())


def test_a_rank_far_below_that_goes_on_is_told_of() -> None:
    run = Run(1024, lambda rank, second: WAITS if rank != 1000 else DATA if second < 40 else HERE._replace(step=13))
    told: list[int] = []
    for _ in range(45):
        run.tick()
        told += [stall.rank for stall in run.trees[0].whole.due(30.0)]
        if run.lines[0]:
            break
    assert told == [1000]
    (line,) = run.lines[0]
    assert re.fullmatch(r"Rank 1000 goes on, after 3\d s or more in 'data'\.", line)


def test_when_rank_0_runs_again_it_judges_again() -> None:
    run = Run(1024, lambda rank, second: None if rank == 0 and 2 < second < 30 else WAITS)
    tops = {}
    for second in range(1, 50):
        run.tick()
        tops[second] = [tree.rank for tree in run.trees if tree.is_top]
    assert tops[2] == [0] and tops[29] == [*range(33)] and tops[49] == [0]


def test_a_group_counts_those_that_it_does_not_list() -> None:
    stalls = Stalls()
    for second in range(40):
        stalls.look({rank: DATA._replace(beat=second) for rank in range(20)}, 1.0)
    (group,) = stalls.digest()
    assert group == Group(tuple(range(8)), 20, DATA._replace(beat=39), 39.0, 39.0, 0.0)


# --- one process

HANGS = """
import logging, sys, time
import torch
from omnitrain import Trainer, distributed

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        time.sleep(1000 if index == 5 else 0)
        return torch.zeros(4), torch.zeros(1)

if __name__ == "__main__":
    distributed.QUIET_S = 1.0
    Trainer(torch.nn.Linear(4, 1), Rows(), loss_fn=torch.nn.functional.mse_loss, batch_size=2, epochs=1, device="cpu",
            num_workers=int(sys.argv[1]), shuffle=False, timeout="4s", progress_bar=False).train()
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_single_process_that_hangs_says_where_and_ends_at_a_timeout_that_was_given(
    workers: int, tmp_path: Any
) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    child = programs.run(sys.executable, tmp_path / "hangs.py", str(workers), cwd=tmp_path)
    assert child.returncode == 1
    assert re.search(r"^Rank 0 has been in 'data' for \d s \(step \d\)\.$", child.stderr, re.M)
    assert "DistributedError: Rank 0 has been in 'data'" in child.stderr
    assert "No progress for `timeout=4` seconds ends the run. Start it again" in child.stderr


@pytest.mark.parametrize("trainer_class", [Trainer, AccelerateTrainer, HFTrainer])
@pytest.mark.parametrize("timeout", [-1, "3ep", "x"])
def test_a_timeout_that_is_no_time_is_refused(trainer_class: Any, timeout: Any) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        trainer_class(nn.Linear(4, 1), torch.zeros(8, 4), timeout=timeout)
