"""Which ranks are told to make no progress, from what they post."""

from __future__ import annotations

import re
import sys
from typing import Any

import programs
import pytest
import torch
from torch import nn

from omnitrain import AccelerateTrainer, HFTrainer, Trainer
from omnitrain.errors import ConfigError
from omnitrain.stalls import Post, Stalls, in_words

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
