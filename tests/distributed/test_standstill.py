"""A process that stands still is noticed: the others say where it is, and the run ends on all of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import make_trainer  # noqa: E402
from compiled import compile_once  # noqa: E402
from forking import Case, Found, Outcome, mark, play  # noqa: E402
from recipes import rows, t16  # noqa: E402

from omnitrain import Callback, distributed  # noqa: E402
from omnitrain.backends.accelerators import find_ranks  # noqa: E402

pytestmark = pytest.mark.distributed

PHASES = ("data", "step", "evaluation", "save")
BACKENDS = ("ddp", "fsdp", "zero2", "zero3", "hf2")


class Stands:
    """Stops this process, or hangs in it, the first time that one of its ranks comes to a phase after a step."""

    def __init__(self, phase: str, rank: int, how: str) -> None:
        self.phase, self.how = phase, how
        self.is_slow = False
        self.is_armed = int(os.environ["RANK"]) == rank
        self.has_begun = False

    def at(self, phase: str) -> None:
        if phase != self.phase or not self.is_armed or not self.has_begun:
            return
        self.is_armed = False
        mark()
        if self.how == "hangs":
            while True:
                time.sleep(1)
        folder, other = Path(os.environ["CASE_FOLDER"]), 1 - int(os.environ["RANK"])
        wait = f"while [ ! -e '{folder}/{self.how}-{other}' ]; do sleep 0.05; done; kill -CONT {os.getpid()}"
        with subprocess.Popen(["sh", "-c", wait]):
            self._await_readers()  # at the very end: it must have moved in its last post
            os.kill(os.getpid(), signal.SIGSTOP)
            self.is_slow = True  # so that the other sees it go on

    def _await_readers(self) -> None:
        """Make progress until the other process has read where this one is."""
        ranks: Any = find_ranks(SimpleNamespace(num_processes=2))

        def other() -> int:
            ranks.moves += 1
            time.sleep(0.01)
            return json.loads(ranks._store.get(f"post/{1 - ranks.rank}"))[0][0]

        posted = ranks._beat + 2
        while ranks._beat < posted:
            other()
        read = other() + 2  # one whole round of posting and reading
        while other() < read:
            pass


class Rows(Dataset[Any]):
    def __init__(self, stands: Stands) -> None:
        self.x, self.y = rows(64, torch.float32).tensors
        self.stands = stands
        self.taken = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self.taken += 1
        if self.taken > 12:
            self.stands.at("data")
        time.sleep(0.1 * self.stands.is_slow)
        return self.x[index], self.y[index]


class Net(nn.Module):
    def __init__(self, stands: Stands) -> None:
        super().__init__()
        self.body = t16(dtype=torch.float32)
        self.stands = [stands]  # no part of the model
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if not self.training or self.passes == 4:
            self.stands[0].at("step" if self.training else "evaluation")
        return self.body(x)


class InSave(Callback):
    def __init__(self, stands: Stands) -> None:
        self.stands = stands

    def on_step_end(self, trainer: Any) -> None:
        self.stands.has_begun = True

    def state_dict(self) -> dict[str, Any]:
        self.stands.at("save")
        return {}


def train(
    phase: str, rank: int, how: str, folder: str, backend: str = "ddp", timeout: float = 5.0, signals: int = 0
) -> int:
    """Train while one process stands still in a phase, which is told after 2 seconds.

    Args:
        phase: Where it stands.
        rank: Which one.
        how: "hangs", or "ended" and "told" for a process that is stopped until a file so called is there.
        folder: The run's.
        backend: Of the trainer.
        timeout: Of the trainer.
        signals: How many SIGTERM the other process gets when it has told of it.
    """
    import logging

    distributed.QUIET_S = 2.0
    if signals:
        distributed._SIGNALLED_S = 3.0
    own, case = int(os.environ["RANK"]), Path(os.environ["CASE_FOLDER"])

    class Tell(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told = case / f"told-{own}"
            if record.getMessage().startswith(f"Rank {rank} has ") and own != rank and not told.exists():
                told.touch()
                for number in range(signals):
                    time.sleep(0.7 * number)
                    os.kill(os.getpid(), signal.SIGTERM)

    logging.getLogger("omnitrain").addHandler(Tell())
    logging.getLogger("omnitrain").addHandler(logging.StreamHandler())
    stands = Stands(phase, rank, how)
    trainer = make_trainer(
        backend, Net(stands), Rows(stands), rows(16, torch.float32), batch_size=4, epochs=2, loss_fn=F.mse_loss,
        learning_rate=0.01, save_dir=folder, save_steps=6, eval_steps=5, callbacks=[InSave(stands)], timeout=timeout,
        load_best_at_end=False,
    )  # fmt: skip
    trainer.train()
    return trainer.progress.step


class StandsAt(Callback):
    """Stops a rank at a step, or hangs in it; one that is stopped goes on when another has ended."""

    def __init__(self, step: int, rank: int, how: str) -> None:
        self.step, self.rank, self.how = step, rank, how

    def on_step_start(self, trainer: Any) -> None:
        if trainer.rank != self.rank or trainer.progress.step != self.step:
            return
        mark()
        while self.how == "hangs":
            time.sleep(1)
        file = Path(os.environ["CASE_FOLDER"]) / f"ended-{int(self.rank == 0)}"
        wait = f"while [ ! -e '{file}' ]; do sleep 0.05; done; kill -CONT {os.getpid()}"
        with subprocess.Popen(["sh", "-c", wait]):
            os.kill(os.getpid(), signal.SIGSTOP)


def train_in_tree(rank: int, how: str) -> int:
    """Train on ranks of which each one knows those after it by digests alone: they are a tree with one child each."""
    import logging

    from omnitrain import stalls

    distributed.QUIET_S, stalls._CHILDREN, stalls.GONE_S = 2.0, 1, 2.0
    logging.getLogger("omnitrain").addHandler(logging.StreamHandler())
    trainer = make_trainer(
        "ddp", t16(dtype=torch.float32), rows(64, torch.float32), batch_size=4, epochs=2, loss_fn=F.mse_loss,
        learning_rate=0.01, callbacks=[StandsAt(2, rank, how)], timeout=12.0,
    )  # fmt: skip
    trainer.train()
    return trainer.progress.step


def case(phase: str, rank: int, how: str = "ended", hosted: bool = False, **options: Any) -> Case:
    name = " ".join([phase, str(rank), how, "with the store" if hosted else "", *map(str, options.values())])
    environment = {} if "zero" in options.get("backend", "") else {"ACCELERATE_USE_CPU": "true"}
    options = {"phase": phase, "rank": rank, "how": how, **options}
    return Case(name, "test_standstill:train", options, hosted=hosted, environment=environment)


QUICK = [
    case("data", 1),
    case("step", 0),
    case("evaluation", 1, "hangs"),
    case("data", 0, "hangs"),
    case("step", 0, hosted=True),  # with it stops the store, through which the others would learn of it
]
IN_TREE = [
    Case(f"{rank} of 4 {how}", "test_standstill:train_in_tree", {"rank": rank, "how": how}, processes=4)
    for rank, how in ((3, "hangs"), (1, "stopped"), (0, "stopped"))
]
ALL = [
    one
    for backend in BACKENDS for phase in PHASES for rank in (0, 1) for how in ("ended", "hangs")
    if (one := case(phase, rank, how, backend=backend))
]  # fmt: skip
CONTINUED = case("data", 1, "told", timeout=600.0)
SIGNALLED = [
    case("data", 1, timeout=600.0, signals=1),
    case("step", 0, timeout=600.0, signals=1),
    case("step", 1, "hangs", timeout=600.0, signals=2),
    case("step", 0, hosted=True, timeout=600.0, signals=1),
]


def in_folders(cases: list[Case], folder: Path) -> list[Case]:
    for number, one in enumerate(cases):
        one.options["folder"] = str(folder / str(number))
    return cases


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Found[list[Outcome]]:
    folder = tmp_path_factory.mktemp("stalls")
    cases = [*in_folders([*QUICK, *SIGNALLED, CONTINUED], folder), *IN_TREE]
    return play(cases, folder / "cases", at_once=5)


@pytest.fixture(scope="module")
def all_outcomes(tmp_path_factory: pytest.TempPathFactory) -> Found[list[Outcome]]:
    folder = tmp_path_factory.mktemp("all-stalls")
    compile_once()
    return play(in_folders(ALL, folder), folder / "cases", at_once=4)


def check_end(one: Case, found: list[Outcome]) -> None:
    """Both have ended by an error that says which one stood still, and where, and the others were told before."""
    phase, rank, hangs = one.options["phase"], one.options["rank"], one.options["how"] == "hangs"
    stands = rf"Rank {rank} has been in '{phase}' for \d+ s \(step \d+\)\."
    if not hangs:
        stands = (
            rf"Rank {rank} has posted nothing for \d+ s, and was in '{phase}' \(step \d+\) before: its process is .*\."
        )
    for outcome in found:
        assert outcome.code == 1, outcome.output
    teller, other = found[0 if hangs else 1 - rank].output, found[1 - rank].output
    assert re.search(rf"^{stands}$", teller, re.M), teller
    if hangs and phase == "step":  # the other one waits in its backward pass, which nothing tells from computing
        stands = rf"(Rank 0 .*\. )?{stands}( Rank 1 .*\.)?"
    assert re.search(rf"DistributedError: {stands} No progress for `timeout=5` seconds ends the run", other), other
    # the store goes with rank 0, and then nothing is left to learn the reason from
    assert one.hosted or re.search(rf"DistributedError: {stands}", found[rank].output), found[rank].output


@pytest.mark.parametrize("one", QUICK, ids=lambda one: one.name)
def test_process_that_stands_still_is_told_and_ends_the_run_on_all(
    one: Case, outcomes: dict[str, list[Outcome]]
) -> None:
    check_end(one, outcomes[one.name])


@pytest.mark.slow
@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_process_that_stands_still_ends_the_run_in_every_phase_of_every_backend(
    one: Case, all_outcomes: dict[str, list[Outcome]]
) -> None:
    check_end(one, all_outcomes[one.name])


@pytest.mark.parametrize("one", IN_TREE, ids=lambda one: one.name)
def test_process_that_others_know_by_digests_alone_ends_the_run_on_all(
    one: Case, outcomes: dict[str, list[Outcome]]
) -> None:
    rank, hangs = one.options["rank"], one.options["how"] == "hangs"
    for number, outcome in enumerate(outcomes[one.name]):
        assert outcome.code == 1, outcome.output
        if number != rank or hangs:
            said = "has been in 'step' for" if hangs else "has posted nothing for"
            assert re.search(rf"DistributedError: .*Rank {rank} {said} \d+ s", outcome.output), outcome.output
    teller = outcomes[one.name][0 if rank else 1].output
    assert re.search(rf"^Rank {rank} has ", teller, re.M), teller


def test_process_that_goes_on_in_time_costs_nothing(outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes[CONTINUED.name]:
        assert (outcome.code, outcome.result) == (0, 16), outcome.output
    assert re.search(r"Rank 1 goes on, after \d+ s in 'data'\.", outcomes[CONTINUED.name][0].output)


@pytest.mark.parametrize("one", SIGNALLED, ids=lambda one: one.name)
def test_signalled_process_leaves_one_that_stands_still_behind(one: Case, outcomes: dict[str, list[Outcome]]) -> None:
    rank = one.options["rank"]
    signalled, stalled = outcomes[one.name][1 - rank], outcomes[one.name][rank]
    assert signalled.code == 143, signalled.output
    assert "SIGTERM ends rank" in signalled.output or "SIGTERM once more" in signalled.output
    assert stalled.code == 1, stalled.output
