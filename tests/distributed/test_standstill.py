"""Stalled processes: the others report where they are, and the run ends on all of them."""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import asked_for, make_trainer
from compiled import compile_once
from forking import Case, Found, Outcome, by_name, case_folder, current_rank, mark, play, stop_until
from marks import thinned
from recipes import fit, rows, t16
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import Callback
from omnitrain.distributed import watchdog
from omnitrain.distributed.rendezvous import connected_ranks
from omnitrain.distributed.signals import ECHO_SECONDS
from omnitrain.distributed.watchdog import Heartbeat


class Fault(Callback):
    """Stops this process, or hangs in it, the first time that a rank comes to a phase after a step."""

    def __init__(self, phase: str, rank: int, how: str) -> None:
        self.phase, self.how = phase, how
        self.is_armed = current_rank() == rank
        self.has_begun = False
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
        while self.how == "hangs":
            mark()
            time.sleep(1)
        wait_for(case_folder() / "read")  # once it has stopped, others may no longer read where it is
        mark()
        stop_until(self.how)
        while self.how == "reported" and not (case_folder() / "continued").exists():
            connected_ranks().progress_count += 1
            time.sleep(0.01)


class Rows(TensorDataset):
    def __init__(self, fault: Fault) -> None:
        super().__init__(*rows(64, torch.float32).tensors)
        self.fault, self.count = fault, 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        if self.count > 12:
            self.fault.at("data")
        return super().__getitem__(index)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def count_heartbeats(stalled: int, phase: str, how: str) -> None:
    """Have the watchdog count a second for each heartbeat of all running ranks, once one stalls and the others wait.

    So no rank seems to stall because the machine is busy, or because a process takes long to start.
    """
    folder = case_folder()

    class Detector(watchdog.StallDetector):
        counted: Mapping[int, Heartbeat] = {}
        latest: Heartbeat | None = None

        def update(self, heartbeats: Mapping[int, Heartbeat], elapsed: float) -> list[str]:
            heartbeat, previous = heartbeats.get(stalled), self.latest
            self.latest, elapsed = heartbeat, 0.0
            if heartbeat is not None and heartbeat.phase == phase and stalled != current_rank():
                (folder / "read").touch()
            running = {rank: latest for rank, latest in heartbeats.items() if rank != stalled or how == "hangs"}
            if (
                heartbeat is not None
                and (folder / "fault").exists()
                and (how == "hangs" or (previous is not None and heartbeat.beat == previous.beat))
                and all(watchdog._progress(latest) >= watchdog._progress(heartbeat) for latest in running.values())
                and all(rank not in self.counted or latest.beat > self.counted[rank].beat
                        for rank, latest in running.items())
            ):  # fmt: skip
                self.counted, elapsed = running, 1.0
            return super().update(heartbeats, elapsed)

    watchdog.StallDetector = Detector  # type: ignore[misc]


class NoteReports(logging.StreamHandler[Any]):
    """Writes reports to stderr, and leaves a file when a rank is reported, and when it continues."""

    folder: Path

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if match := re.match(r"Rank \d+ (has|continues) ", record.getMessage()):
            (self.folder / {"has": "reported", "continues": "continued"}[match[1]]).touch()


def send(signals: int, folder: Path) -> None:
    """Send SIGTERM to this process, which waits in a collective, when a stall is reported."""
    wait_for(folder / "reported")
    for count in range(signals):
        time.sleep(ECHO_SECONDS * 2 * count)
        os.kill(os.getpid(), signal.SIGTERM)


def train(
    phase: str, rank: int, how: str, backend: str = "ddp", timeout: float = 4.0, signals: int = 0, signalled: int = 1
) -> int:
    """Train until a rank stalls in a phase.

    Args:
        phase: Where it stalls.
        rank: Which one.
        how: "hangs", or the file of the case until which the process is stopped.
        backend: Of the trainer, like `timeout`.
        signals: How many SIGTERM another process, of the rank `signalled`, gets when the stall is reported.
    """
    watchdog.QUIET_S, watchdog.UNRESPONSIVE_S, watchdog.SIGNALLED_S = 2.0, 4.0, 3.0
    count_heartbeats(rank, phase, how)
    folder = case_folder()  # accelerate clears the environment at times, which threads would notice
    if signals and current_rank() == signalled:
        threading.Thread(target=send, args=(signals, folder), daemon=True).start()
    NoteReports.folder = folder
    logging.getLogger("omnitrain").addHandler(NoteReports())
    fault, model = Fault(phase, rank, how), t16(dtype=torch.float32)
    model.register_forward_pre_hook(fault.note_pass)
    trainer = fit(make_trainer(
        backend, model, Rows(fault), rows(16, torch.float32), batch_size=4, epochs=2, loss_fn=F.mse_loss,
        learning_rate=0.01, save_dir=folder / "run", save_steps=6, eval_steps=5, callbacks=[fault],
        timeout=timeout, load_best_at_end=False,
    ))  # fmt: skip
    return trainer.progress.step


def case(phase: str, rank: int, how: str = "", hosted: bool = False, processes: int = 2, **options: Any) -> Case:
    how = how or f"ended-{int(rank == 0)}"
    words = [phase, str(rank), how, *(["hosted"] if hosted else []), *map(str, options.values())]
    options = {"phase": phase, "rank": rank, "how": how, **options}
    return Case(" ".join(words), "test_standstill:train", options, hosted, processes)


STALLED = by_name([
    case("data", 1), case("evaluation", 1, "hangs"),
    case("step", 0, hosted=True),  # with it stops the store, through which the others would learn of it
    case("save", 0, "hangs", backend="fsdp"),
    *(case("step", 1, "hangs", backend=backend) for backend in ("zero3", "hf2")),
])  # fmt: skip
SIGNALLED = by_name([
    case("step", 1, "hangs", timeout=600.0, signals=2, signalled=0),
    case("step", 0, hosted=True, timeout=600.0, signals=1),
])  # fmt: skip
SEVERAL = by_name([
    case("step", 2, "hangs", processes=3, timeout=600.0, signals=1), case("step", 2, "hangs", processes=3),
    case("step", 0, processes=3, backend="ddp"),
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
    selected, outputs = STALLED[name], [outcome.output for outcome in outcomes[name]]
    phase, rank, how = (selected.options[key] for key in ("phase", "rank", "how"))
    report = rf"Rank {rank} has been in '{phase}' for \d+ s \(step \d+\)\."
    if how != "hangs":
        report = rf"Rank {rank} has sent no heartbeat for \d+ s, and was in '{phase}' \(step \d+\) before: its process "
        report += r"is stopped, swapped out, cut off or gone\."
    assert [outcome.code for outcome in outcomes[name]] == [1, 1], outputs
    assert re.search(rf"^{report}$", outputs[0 if how == "hangs" else 1 - rank], re.M), outputs
    if how == "hangs" and phase == "step":  # the other waits in its backward pass, which nothing tells from computing
        report = rf"(Rank 0 .*\. )?{report}( Rank 1 .*\.)?"
    end = rf"DistributedError: {report} No progress for `timeout=4` seconds ends the run"
    assert re.search(end, outputs[1 - rank]), outputs
    # the store goes with rank 0, and then the stalled one cannot learn the reason
    assert selected.hosted or re.search(rf"DistributedError: {report}", outputs[rank]), outputs


@pytest.mark.parametrize("name", thinned(SEVERAL, list(SEVERAL)[:1]))
def test_stalled_rank_of_several_ends_the_run(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    rank, how, signals = (SEVERAL[name].options.get(key) for key in ("rank", "how", "signals"))
    state = "has been in 'step' for" if how == "hangs" else "has sent no heartbeat for"
    for number, outcome in enumerate(outcomes[name]):
        assert outcome.code == (143 if signals and number == 1 else 1), outcome.output
        if not signals and (number != rank or how == "hangs"):
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
    assert (signalled.code, stalled.code) == (143, 1), signalled.output + stalled.output
    assert re.search("SIGTERM (ends rank|again)", signalled.output), signalled.output
