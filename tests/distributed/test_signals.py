"""Signals to any of the processes end the run on all of them, in order; the one that kills ends the others too."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import programs  # noqa: E402
from backends import asked_for  # noqa: E402
from forking import HERE, Case, Found, Outcome, joined, mark, play  # noqa: E402
from marks import thinned  # noqa: E402
from recipes import distance, rows, t16, weights  # noqa: E402

from omnitrain import Callback  # noqa: E402

pytestmark = pytest.mark.distributed


def own_rank() -> int:
    return int(os.environ["RANK"])


class Net(nn.Module):
    """4 -> 16 -> 1, and something to do at a forward pass in training or evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = t16(dropout=0.1, dtype=torch.float32)
        self.hook: Callable[[bool], None] = lambda training: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hook(self.training)
        return self.body(x)


class Sends(Callback):
    """Sends this process a signal at a moment of the run."""

    order = 98

    def __init__(self, number: int, ranks: list[int], moment: str, net: Net) -> None:
        self.number, self.ranks, self.moment = number, ranks, moment
        self.is_sent = False
        self.trainer: Any = None
        self.passes = 0
        net.hook = self._on_forward

    def _send(self, moment: str) -> None:
        if moment == self.moment and not self.is_sent and own_rank() in self.ranks:
            self.is_sent = True
            mark()
            os.kill(os.getpid(), self.number)

    def _on_forward(self, training: bool) -> None:
        if self.trainer is None or self.trainer.progress.step < 3:
            return
        if not training:
            self._send("evaluation")
        self.passes += training
        if self.passes == 2:  # of the three of a step
            self._send("window")

    def on_train_start(self, trainer: Any) -> None:
        self.trainer = trainer
        self._send("before")

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == 4:
            self._send("step")

    def on_epoch_end(self, trainer: Any) -> None:
        self._send("epoch")

    def on_save_end(self, trainer: Any) -> None:
        self._send("save")


def make(folder: str, wrapping: str = "ddp", net: Net | None = None, **options: Any) -> Any:
    """Return a trainer for 6 steps of 3 micro-batches an epoch, the last one shorter."""
    import test_faults

    defaults = {
        "model": net or Net(), "gradient_accumulation_steps": 3, "eval_dataset": rows(90, torch.float32),
        "eval_steps": 3, "compute_metrics": "mae", "save_dir": folder, "load_best_at_end": False,
        "save_total_limit": None, "keep_best": 0,
        "train": rows(130, torch.float32), "lr_scheduler": "cosine", "log_steps": 2,
    }  # fmt: skip
    return test_faults.make(wrapping, **{**defaults, **options})


def signalled(number: int, ranks: list[int], moment: str, folder: str, wrapping: str = "ddp") -> dict[str, Any]:
    """Train until a signal comes to some processes, resume, and train undisturbed beside it."""
    net, code = Net(), None
    straight = make(f"{folder}/straight", wrapping)
    straight.train()
    trainer = make(f"{folder}/run", wrapping, net, callbacks=[Sends(number, ranks, moment, net)])
    mark()
    try:
        trainer.train()
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:
        code = 130
    at = trainer.progress.step
    paths = Path(f"{folder}/run").glob("checkpoint-*") if trainer.is_main_process else ()  # the other is ahead
    names = sorted(path.name for path in paths)
    reason = trainer.metrics.get("stop_reason")
    again = make(f"{folder}/run", wrapping)
    if code is not None:
        again.train(resume_from="auto")
    else:
        again = trainer
    far = distance(map(_whole, straight.get_model().parameters()), map(_whole, again.get_model().parameters()))
    histories = [[row["eval_loss"] for row in one.metrics["valid"]] for one in (straight, again)]
    differ = max(abs(a - b) for a, b in zip(*histories, strict=True))
    return {"code": code, "step": at, "names": names, "reason": reason, "far": far, "differ": differ}


def _whole(parameter: Any) -> torch.Tensor:
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


def train(folder: str, number: int = 0, ranks: list[int] | None = None, resume: bool = False, **options: Any) -> Any:
    """Train with whatever signal comes, which ends the process or not."""
    net = Net()
    callbacks = [Sends(number, ranks or [], "step", net)] if number else []
    trainer = make(folder, net=net, callbacks=callbacks, save_steps=2, **options)
    trainer.train(resume_from="auto" if resume else None)
    return {"step": trainer.progress.step, "weights": [one.tolist() for one in weights(trainer.get_model())]}


def evaluate_and_die(folder: str) -> None:
    """Lose a process in an evaluation outside of a run."""
    net = Net()
    trainer = make(folder, net=net)
    net.hook = lambda training: os.kill(os.getpid(), signal.SIGKILL) if own_rank() == 1 else None
    mark()
    trainer.evaluate()


TERM, INT, USR1, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL
SIGNALLED = {
    f"{signal.Signals(number).name} {moment} {ranks} {wrapping}": (number, ranks, moment, wrapping)
    for number, ranks, moment, wrapping in [
        (TERM, [1], "step", "ddp"), (TERM, [0], "step", "ddp"), (TERM, [0, 1], "step", "ddp"),
        (TERM, [1], "window", "ddp"), (TERM, [0], "window", "fsdp"), (TERM, [1], "evaluation", "ddp"),
        (TERM, [0, 1], "evaluation", "fsdp"), (TERM, [1], "before", "ddp"), (TERM, [0], "epoch", "ddp"),
        (TERM, [1], "save", "fsdp"), (INT, [1], "step", "ddp"), (INT, [0, 1], "window", "ddp"),
        (USR1, [1], "step", "ddp"), (USR1, [0], "step", "fsdp"),
    ]
}  # fmt: skip
ALIKE = [
    name
    for name, (number, ranks, moment, wrapping) in SIGNALLED.items()
    if (ranks == [0, 1] and moment != "evaluation") or moment == "epoch" or (number == USR1 and wrapping == "fsdp")
]
"""Those that come to the same as others there."""
CASES = [
    Case(
        name, "test_signals:signalled", {"number": int(number), "ranks": ranks, "moment": moment, "wrapping": wrapping}
    )
    for name, (number, ranks, moment, wrapping) in SIGNALLED.items()
]


def in_folders(cases: list[Case], folder: Path) -> list[Case]:
    for number, case in enumerate(cases):
        case.options = {"folder": str(folder / str(number)), **case.options}
    return cases


KILLED = {
    "rank 1": {"ranks": [1]},
    "rank 0": {"ranks": [0]},
    "rank 1 under FSDP": {"ranks": [1], "wrapping": "fsdp"},
    "rank 0, which has the store": {"ranks": [0]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals")


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    asked = asked_for(request, "name")
    killed = [
        Case(name, "test_signals:train", {"number": int(KILL), **options}, hosted="store" in name)
        for name, options in KILLED.items()
    ]
    others = [Case("straight", "test_signals:train"), Case("evaluation", "test_signals:evaluate_and_die")]
    cases = in_folders([*(case for case in CASES if case.name in asked), *killed, *others], folder)
    found = play(cases, folder / "first")
    resumed = [
        Case(f"{case.name} resumed", case.function, {"folder": case.options["folder"], "resume": True})
        for case in killed
    ]
    return joined(found, play(resumed, folder / "second"))


@pytest.mark.parametrize("name", thinned(SIGNALLED, [name for name in SIGNALLED if name not in ALIKE]))
def test_signal_to_any_process_saves_there_and_the_resumed_run_equals_the_straight_one(
    name: str, outcomes: dict[str, list[Outcome]]
) -> None:
    number, _, moment, _ = SIGNALLED[name]
    step = {"before": 0, "evaluation": 3, "epoch": 6, "save": 6}.get(moment, 4)
    for rank, outcome in enumerate(outcomes[name]):
        assert outcome.code == 0, outcome.output
        found = outcome.result
        assert (found["far"], found["differ"]) == (0.0, 0.0)
        if number == USR1:
            assert (found["code"], found["reason"]) == (None, "epochs")
            assert rank or "checkpoint-4" in found["names"]
            continue
        assert (found["code"], found["reason"], found["step"]) == (128 + number, "signal", step)
        assert rank or found["names"][-1] == f"checkpoint-{step}"


@pytest.mark.parametrize("name", KILLED)
def test_killed_process_ends_the_others_and_the_run_can_be_resumed(
    name: str, outcomes: dict[str, list[Outcome]]
) -> None:
    (rank,) = KILLED[name]["ranks"]  # type: ignore[misc]
    killed, other = outcomes[name][rank], outcomes[name][1 - rank]
    assert killed.code == -KILL
    assert other.code == 1, other.output
    assert re.search(rf"DistributedError: Rank {1 - rank} lost another process in .*: it was killed", other.output)
    expected = outcomes["straight"][0].result
    for outcome in outcomes[f"{name} resumed"]:
        assert outcome.code == 0, outcome.output
        assert outcome.result["step"] == expected["step"] == 12
        pairs = zip(outcome.result["weights"], expected["weights"], strict=True)
        far = 1e-6 if "FSDP" in name else 0.0  # which adds gradients up in another order until it is killed
        assert all(torch.allclose(torch.tensor(a), torch.tensor(b), rtol=0, atol=far) for a, b in pairs)


def test_process_killed_in_an_evaluation_ends_the_others(outcomes: dict[str, list[Outcome]]) -> None:
    other, killed = outcomes["evaluation"]
    assert killed.code == -KILL
    assert other.code == 1, other.output
    assert re.search(
        r"DistributedError: Rank 0 lost another process in a batch of an evaluation: it was killed", other.output
    )


# --- with torchrun


def run_slowly(folder: str) -> None:
    """Train for longer than any test, and leave word of each step."""

    class Pace(Callback):
        def on_step_end(self, trainer: Any) -> None:
            Path(f"{folder}/pid-{trainer.rank}").write_text(str(os.getpid()))
            time.sleep(0.02)

    make(f"{folder}/save", callbacks=[Pace()], epochs=10000).train()


def run_into_error(folder: str) -> None:
    """Fail on rank 1 where rank 0 waits for it in a collective of the model's own."""
    import test_faults

    test_faults.train_and_fail("loss")


@contextlib.contextmanager
def launched(function: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    unwanted = ("ACCELERATE_", "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
    root = str(HERE.parent.parent)
    environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": root}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    with programs.started(
        *torchrun, HERE / "test_signals.py", function, folder, env={**environment, "CASE_FOLDER": str(folder)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as child:  # fmt: skip
        yield child


@pytest.mark.slow
def test_torchrun_ends_with_143_on_all_when_one_process_gets_sigterm(tmp_path: Path) -> None:
    pid = tmp_path / "pid-1"
    with launched("run_slowly", tmp_path) as child:
        while not (pid.exists() and pid.read_text()) and child.poll() is None:
            time.sleep(0.05)
        os.kill(int(pid.read_text()), TERM)
        output, _ = child.communicate(timeout=programs.LIMIT)
    assert child.returncode == 1
    assert len(re.findall(r"exitcode  : 143", output)) == 2, output
    assert "Traceback" not in output.partition("ChildFailedError")[0].replace(
        "Traceback (most recent call last):", "", 1
    )
    assert list((tmp_path / "save").glob("checkpoint-*"))


@pytest.mark.slow
def test_torchrun_shows_the_first_error_also_from_the_other_process(tmp_path: Path) -> None:
    with launched("run_into_error", tmp_path) as child:
        output, _ = child.communicate(timeout=programs.LIMIT)
    assert output.count("ValueError: boom") >= 3
    assert (
        "DistributedError: Rank 1 failed in train(), and so the run ends on all 2 processes: ValueError: boom" in output
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](sys.argv[2])
