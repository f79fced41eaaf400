"""Signals to any rank end the run on all of them after a save; a killed rank ends the others too."""

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import asked_for, gap, tensors_of
from forking import Case, Found, Outcome, current_rank, joined, mark, play
from marks import thinned
from recipes import rows, t16
from torch import nn

from omnitrain import Callback

TERM, INT, USR1, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL


class Sends(Callback):
    """Sends this process a signal at a moment of the run, on some ranks: after an event at a step, or in a pass."""

    order = 98

    def __init__(self, number: int, ranks: Sequence[int], moment: str) -> None:
        self.number, self.moment = number, moment
        self.is_armed = current_rank() in ranks
        self.trainer: Any = None
        self.passes = 0

    def send(self, event: str, trainer: Any) -> None:
        self.trainer = trainer
        if self.moment == f"{event} {trainer.progress.step}" and self.is_armed:
            self.is_armed = False
            mark()
            os.kill(os.getpid(), self.number)

    def note_pass(self, module: nn.Module, inputs: Any) -> None:
        if self.trainer is not None:
            self.passes += module.training
            self.send(f"pass {self.passes} after" if module.training else "evaluation", self.trainer)


for _event in ("train_start", "step_end", "epoch_end", "save_end"):
    setattr(Sends, f"on_{_event}", lambda self, trainer, *_, event=_event: self.send(event, trainer))


def make(folder: str, wrapping: str = "ddp", sends: Sends | None = None, **options: Any) -> Any:
    """Return a trainer for 6 steps of 3 micro-batches an epoch, the last one shorter."""
    import test_faults

    model = t16(dropout=0.1, dtype=torch.float32)
    if sends:
        model.register_forward_pre_hook(sends.note_pass)
    defaults = {
        "model": model, "gradient_accumulation_steps": 3, "eval_dataset": rows(20, torch.float32),
        "eval_steps": 3, "compute_metrics": "mae", "save_dir": folder, "load_best_at_end": False,
        "save_total_limit": None, "keep_best": 0, "callbacks": [sends] if sends else [],
        "train": rows(130, torch.float32), "lr_scheduler": "cosine", "log_steps": 2,
    }  # fmt: skip
    return test_faults.make(wrapping, **{**defaults, **options})


def train_and_signal(number: int, ranks: list[int], moment: str, folder: str, wrapping: str = "ddp") -> dict[str, Any]:
    trainer, code = make(folder, wrapping, Sends(number, ranks, moment)), None
    try:
        trainer.train()
    except (SystemExit, KeyboardInterrupt) as error:
        code = getattr(error, "code", 130)
    step, reason = trainer.progress.step, trainer.metrics.get("stop_reason")
    paths = Path(folder).glob("checkpoint-*") if trainer.is_main_process else ()  # the other rank is ahead
    end = {"code": code, "stopped": step, "reason": reason, "saved": sorted(int(path.name[11:]) for path in paths)}
    return {**end, **(result_of(trainer) if code is None else train(folder, wrapping, resume=True))}


def train(
    folder: str, wrapping: str = "ddp", number: int = 0, ranks: tuple[int, ...] = (), resume: bool = False
) -> dict[str, Any]:
    """Train with a signal to some ranks after a step, if there is a number."""
    trainer = make(folder, wrapping, Sends(number, ranks, "step_end 4") if number else None, save_steps=4)
    trainer.train(resume_from="auto" if resume else None)
    return result_of(trainer)


def result_of(trainer: Any) -> dict[str, Any]:
    return {
        "step": trainer.progress.step,
        "weights": [tensor.tolist() for tensor in tensors_of(trainer).values()],
        "evaluations": [row["eval_loss"] for row in trainer.metrics["valid"]],
    }


SIGNALLED: dict[str, dict[str, Any]] = {
    f"{number.name} {moment} {ranks} {wrapping}": {
        "number": int(number), "ranks": ranks, "moment": moment, "wrapping": wrapping
    }
    for number, ranks, moment, wrapping in [
        (TERM, [1], "pass 11 after 3", "ddp"), (TERM, [0, 1], "evaluation 3", "fsdp"),
        (TERM, [1], "evaluation 12", "ddp"), (INT, [0], "save_end 12", "ddp"), (TERM, [1], "train_start 0", "ddp"),
        (TERM, [1], "save_end 6", "fsdp"), (USR1, [1], "step_end 4", "ddp"), (TERM, [0], "epoch_end 6", "ddp"),
    ]
}  # fmt: skip
KILLED: dict[str, dict[str, Any]] = {
    "rank 1 of HFTrainer": {"ranks": [1], "wrapping": "hf"}, "rank 0, with the store": {"ranks": [0]},
    "rank 1 of FSDP": {"ranks": [1], "wrapping": "fsdp"},
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    names = asked_for(request, "name")

    def case(name: str, function: str, hosted: bool = False, **options: Any) -> Case:
        return Case(name, f"test_signals:{function}", {"folder": str(folder / name), **options}, hosted)

    wrappings = {"ddp", *(SIGNALLED[name]["wrapping"] for name in SIGNALLED if name in names)}
    cases = [case(wrapping, "train", wrapping=wrapping) for wrapping in sorted(wrappings)]
    cases += [case(name, "train_and_signal", **SIGNALLED[name]) for name in SIGNALLED if name in names]
    killed = [name for name in KILLED if name in names]
    cases += [case(name, "train", "store" in name, number=int(KILL), **KILLED[name]) for name in killed]
    resumed = [replace(case(name, "train", resume=True), name=f"{name} resumed") for name in killed]
    return joined(play(cases, folder / "first", at_once=5), play(resumed, folder / "second"))


@pytest.mark.parametrize("name", thinned(SIGNALLED, list(SIGNALLED)[:3]))
def test_signal_to_any_rank_saves_and_resumes_exactly(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    number, moment = SIGNALLED[name]["number"], SIGNALLED[name]["moment"]
    expected = outcomes[SIGNALLED[name]["wrapping"]][0].result
    step = 4 if moment.startswith("pass") else int(moment.split()[-1])  # the step of a pass is taken
    for rank, outcome in enumerate(outcomes[name]):
        assert outcome.code == 0, outcome.output
        result = outcome.result
        assert {key: result[key] for key in expected} == expected
        if number == USR1:
            assert (result["code"], result["reason"]) == (None, "epochs")
            assert rank or 4 in result["saved"]
        else:
            assert (result["code"], result["reason"], result["stopped"]) == (128 + number, "signal", step)
            assert rank or result["saved"][-1] == step


@pytest.mark.parametrize("name", thinned(KILLED, list(KILLED)[:2]))
def test_killed_rank_ends_the_others_and_the_run_resumes(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    (rank,) = KILLED[name]["ranks"]
    killed, other = outcomes[name][rank], outcomes[name][1 - rank]
    assert (killed.code, other.code) == (-KILL, 1), other.output
    assert re.search(rf"DistributedError: Rank {1 - rank} lost another process in .*: it was killed", other.output)
    expected = outcomes["ddp"][0].result
    for outcome in outcomes[f"{name} resumed"]:
        assert outcome.code == 0, outcome.output
        assert outcome.result["step"] == expected["step"] == 12
        tolerance = 1e-6 if "FSDP" in name else 0.0  # it adds gradients in another order until it is killed
        assert gap(outcome.result["weights"], expected["weights"]) <= tolerance
