"""Stalled processes: the others report where they are, and the run ends on all of them."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import asked_for, make_trainer
from compiled import compile_once
from forking import Case, Found, Outcome, by_name, case_folder, current_rank, mark, play, stop_until
from marks import thinned
from recipes import rows, t16
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import Callback
from omnitrain.distributed import watchdog
from omnitrain.distributed.rendezvous import connected_ranks


class Fault(Callback):
    """Stops this process, or hangs in it, the first time that a rank comes to a phase after a step."""

    def __init__(self, phase: str, rank: int, how: str) -> None:
        self.phase, self.how = phase, how
        self.is_armed = current_rank() == rank
        self.has_begun = self.is_slow = False
        self.passes = 0

    def on_step_end(self, trainer: Any) -> None:
        self.has_begun = True

    def state_dict(self) -> dict[str, Any]:
        self.at("save")
        return {}

    def note_pass(self, module: nn.Module, inputs: Any) -> None:
        self.passes += module.training
        if not module.training or self.passes == 4:
            self.at("step" if module.training else "evaluation")

    def at(self, phase: str) -> None:
        if phase != self.phase or not self.is_armed or not self.has_begun:
            return
        self.is_armed = False
        mark()
        while self.how == "hangs":
            time.sleep(1)
        ranks, end = connected_ranks(), time.monotonic() + 4  # in which the others read where this one is
        while time.monotonic() < end:  # it must have moved in its last heartbeat
            ranks.progress_count += 1
            time.sleep(0.01)
        stop_until(f"{self.how}-{1 - current_rank()}")
        self.is_slow = True  # so that the other one sees it continue


class Rows(TensorDataset):
    def __init__(self, fault: Fault) -> None:
        super().__init__(*rows(64, torch.float32).tensors)
        self.fault, self.count = fault, 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        if self.count > 12:
            self.fault.at("data")
        time.sleep(0.1 * self.fault.is_slow)
        return super().__getitem__(index)


def train(phase: str, rank: int, how: str, backend: str = "ddp", timeout: float = 4.0, signals: int = 0) -> int:
    """Train until a rank stalls in a phase.

    Args:
        phase: Where it stalls.
        rank: Which one.
        how: "hangs", or the file "ended" or "reported" of the other rank until which the process is stopped.
        backend: Of the trainer.
        timeout: Of the trainer.
        signals: How many SIGTERM the other process gets when it has reported the stall.
    """
    watchdog.QUIET_S, watchdog.UNRESPONSIVE_S = 2.0, 4.0
    if signals:
        watchdog.SIGNALLED_S = 3.0
    number, case = current_rank(), case_folder()

    class Signal(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reported = case / f"reported-{number}"
            if record.getMessage().startswith(f"Rank {rank} has ") and number != rank and not reported.exists():
                reported.touch()
                for count in range(signals):
                    time.sleep(0.7 * count)
                    os.kill(os.getpid(), signal.SIGTERM)

    logging.getLogger("omnitrain").addHandler(Signal())
    logging.getLogger("omnitrain").addHandler(logging.StreamHandler())
    fault, model = Fault(phase, rank, how), t16(dtype=torch.float32)
    model.register_forward_pre_hook(fault.note_pass)
    trainer = make_trainer(
        backend, model, Rows(fault), rows(16, torch.float32), batch_size=4, epochs=2, loss_fn=F.mse_loss,
        learning_rate=0.01, save_dir=case / "run", save_steps=6, eval_steps=5, callbacks=[fault],
        timeout=timeout, load_best_at_end=False,
    )  # fmt: skip
    trainer.train()
    return trainer.progress.step


def train_on_several(rank: int, how: str, signalled: int = -1) -> None:
    """Train on more than two ranks, of which only the main one judges all; one may get SIGTERM."""
    watchdog.QUIET_S = watchdog.SIGNALLED_S = 2.0
    logging.getLogger("omnitrain").addHandler(logging.StreamHandler())

    class StallsInStep(Callback):
        def on_step_start(self, trainer: Any) -> None:
            if trainer.progress.step == 2 and trainer.rank == rank:
                mark()
                while how == "hangs":
                    time.sleep(1)
                stop_until(f"ended-{int(rank == 0)}")
            if trainer.progress.step == 2 and trainer.rank == signalled:
                threading.Timer(2, os.kill, (os.getpid(), signal.SIGTERM)).start()  # while it waits in a collective

    make_trainer(
        "ddp", t16(dtype=torch.float32), rows(64, torch.float32), batch_size=4, epochs=2, loss_fn=F.mse_loss,
        learning_rate=0.01, callbacks=[StallsInStep()], timeout=600.0 if signalled > 0 else 6.0,
    ).train()  # fmt: skip


def case(phase: str, rank: int, how: str = "ended", hosted: bool = False, **options: Any) -> Case:
    name = " ".join([phase, str(rank), how, *(["hosted"] if hosted else []), *map(str, options.values())])
    options = {"phase": phase, "rank": rank, "how": how, **options}
    return Case(name, "test_standstill:train", options, hosted=hosted)


STALLED = by_name([
    case("data", 1),
    case("evaluation", 1, "hangs"),
    case("step", 0, hosted=True),  # with it stops the store, through which the others would learn of it
    case("save", 0, "hangs", backend="fsdp"),
    *(case("step", 1, "hangs", backend=backend) for backend in ("zero3", "hf2")),
])  # fmt: skip
SIGNALLED = by_name([
    case("step", 1, "hangs", timeout=600.0, signals=2),
    case("step", 0, hosted=True, timeout=600.0, signals=1),
])  # fmt: skip
SEVERAL = by_name([
    Case(f"{rank} of 3 {how} {signalled}", "test_standstill:train_on_several",
         {"rank": rank, "how": how, "signalled": signalled}, processes=3)
    for rank, how, signalled in ((2, "hangs", 1), (0, "stopped", -1), (2, "hangs", -1))
])  # fmt: skip
CONTINUED = by_name([case("data", 1, "reported", timeout=600.0)])
CASES = SIGNALLED | SEVERAL | CONTINUED | STALLED


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    names = asked_for(request, "name")
    cases = [case for case in CASES.values() if case.name in names]
    if any("zero" in selected.name for selected in cases):
        compile_once()
    return play(cases, folder, at_once=9)  # they wait most of the time


@pytest.mark.parametrize("name", thinned(STALLED, list(STALLED)[:3]))
def test_stalled_rank_is_reported_and_ends_the_run(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    selected = STALLED[name]
    phase, rank, hangs = selected.options["phase"], selected.options["rank"], selected.options["how"] == "hangs"
    report = rf"Rank {rank} has been in '{phase}' for \d+ s \(step \d+\)\."
    if not hangs:
        report = (
            rf"Rank {rank} has sent no heartbeat for \d+ s, and was in '{phase}' \(step \d+\) before: its process is "
            r"stopped, swapped out, cut off or gone\."
        )
    for outcome in outcomes[name]:
        assert outcome.code == 1, outcome.output
    reporter, other = outcomes[name][0 if hangs else 1 - rank].output, outcomes[name][1 - rank].output
    assert re.search(rf"^{report}$", reporter, re.M), reporter
    if hangs and phase == "step":  # the other one waits in its backward pass, which nothing tells from computing
        report = rf"(Rank 0 .*\. )?{report}( Rank 1 .*\.)?"
    assert re.search(rf"DistributedError: {report} No progress for `timeout=4` seconds ends the run", other), other
    stalled = outcomes[name][rank].output
    # the store goes with rank 0, and then the stalled one cannot learn the reason
    assert selected.hosted or re.search(rf"DistributedError: {report}", stalled), stalled


@pytest.mark.parametrize("name", thinned(SEVERAL, list(SEVERAL)[:1]))
def test_stalled_rank_of_several_ends_the_run(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    rank, how, signalled = SEVERAL[name].options.values()
    state = "has been in 'step' for" if how == "hangs" else "has sent no heartbeat for"
    for number, outcome in enumerate(outcomes[name]):
        assert outcome.code == (143 if number == signalled else 1), outcome.output
        if signalled < 0 and (number != rank or how == "hangs"):
            assert re.search(rf"DistributedError: .*Rank {rank} {state} \d+ s", outcome.output), outcome.output
    reporter = outcomes[name][0 if rank else 1].output
    assert re.search(rf"^Rank {rank} has ", reporter, re.M), reporter


@pytest.mark.parametrize("name", CONTINUED)
def test_stalled_rank_that_continues_ends_no_run(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes[name]:
        assert (outcome.code, outcome.result) == (0, 16), outcome.output
    assert re.search(r"Rank 1 continues after \d+ s in 'data'\.", outcomes[name][0].output)


@pytest.mark.parametrize("name", SIGNALLED)
def test_signalled_rank_leaves_a_stalled_one_behind(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    rank = SIGNALLED[name].options["rank"]
    signalled, stalled = outcomes[name][1 - rank], outcomes[name][rank]
    assert signalled.code == 143, signalled.output
    assert "SIGTERM ends rank" in signalled.output or "SIGTERM once more" in signalled.output
    assert stalled.code == 1, stalled.output
