"""Worker processes and signals, with real processes."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import programs
import psutil
import pytest
import torch
from forking import Case, Outcome, play
from torch.utils.data import DataLoader, Dataset, IterableDataset

from omnitrain import Callback, DataError, Trainer
from omnitrain.data import workers
from omnitrain.data.loaders import make_loader

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

needs_groups = pytest.mark.skipif(not hasattr(os, "killpg"), reason="Windows has no process groups")
pytestmark = [pytest.mark.processes, needs_groups]


class Rows(Dataset[Any]):
    """Slow data, of which row 27, in the second window, may signal the process group once training has `started`."""

    def __init__(self, size: int, sends: int = 0, started: Path = Path()) -> None:
        self.size, self.sends, self.started = size, sends, started

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.01)
        if index == 27 and self.sends and self.started.exists():
            os.killpg(0, self.sends)
            time.sleep(0.2)
        return torch.full((4,), float(index)), torch.zeros(1)


class Stream(IterableDataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(len(self.rows)))


class Report(Callback):
    """Says which worker processes there are, and how the run has ended; may send a signal in the second step."""

    def __init__(self, sends: Callable[[], None] | None, started: Path) -> None:
        self.sends, self.started = sends, started

    def on_epoch_start(self, trainer: Any) -> None:
        self.started.touch()

    def on_step_start(self, trainer: Any) -> None:
        print("children", *(child.pid for child in multiprocessing.active_children()), flush=True)
        if self.sends is not None and trainer.progress.step == 1:
            self.sends()
            time.sleep(0.3)

    def on_train_end(self, trainer: Any) -> None:
        print("ended", trainer.progress.step, trainer.stop_reason, len(trainer.metrics["valid"]), flush=True)


def train(kind: str, where: str, number: int, folder: str, everyone: bool = True) -> list[str]:
    """Train 4 steps of 8 micro-batches with evaluations, and a signal from a place; return the checkpoints."""
    torch.set_num_threads(1)
    if kind == "spawn":
        torch.multiprocessing.set_start_method("spawn", force=True)
    started = Path(folder, "started")
    data: Any = Rows(64, number if where == "data" else 0, started)
    evaluation: Any = Rows(32, number if where == "eval" else 0, started)
    options: dict[str, Any] = {"eval_dataset": evaluation, "num_workers": 2, "batch_size": 2}
    if kind == "given":
        loaders = [DataLoader(rows, batch_size=2, num_workers=2) for rows in (data, evaluation)]
        options = dict(zip(("train_loader", "eval_loader"), loaders, strict=True))
    else:
        options |= {"train_dataset": Stream(data)} if kind == "stream" else {"train_dataset": data, "shuffle": False}

    def send() -> None:
        os.killpg(0, number) if everyone else os.kill(os.getpid(), number)

    trainer = Trainer(
        torch.nn.Linear(4, 1), loss_fn=torch.nn.functional.mse_loss, epochs=1, gradient_accumulation_steps=8,
        eval_steps=1, save_steps=100, save_dir=Path(folder, "run"), device="cpu", progress_bar=False,
        callbacks=[Report(send if where == "step" else None, started)], **options,
    )  # fmt: skip
    trainer.train(resume_from="auto")
    return sorted(path.name for path in Path(folder, "run").glob("checkpoint-*"))


def slow_but(cases: list[Any], *quick: Any) -> list[Any]:
    """As `marks.thinned`, which loads transformers, in each process of these tests too."""
    return [pytest.param(*case, marks=[] if case in quick else pytest.mark.slow) for case in cases]


EXITS = {signal.SIGTERM: 143, signal.SIGINT: 130}
CASES = [
    ("map", signal.SIGTERM, "data", (2, 1)),
    ("map", signal.SIGINT, "step", (2, 1)),
    ("spawn", signal.SIGTERM, "data", (2, 1)),
    ("stream", signal.SIGTERM, "data", (2, 1)),
    ("given", signal.SIGINT, "data", (2, 1)),
    ("given", signal.SIGTERM, "eval", (1, 0)),
]


def ended(outcome: Outcome) -> tuple[int, int]:
    words = re.findall(r"^ended (\d+) \w+ (\d+)$", outcome.output, re.MULTILINE)
    assert len(words) == 1, outcome.output
    return int(words[0][0]), int(words[0][1])


@pytest.mark.parametrize(("kind", "number", "where", "expected"), slow_but(CASES, CASES[0], CASES[-1]))
def test_signal_to_the_process_group_ends_the_run_in_order(
    kind: str, number: signal.Signals, where: str, expected: tuple[int, int], tmp_path: Path
) -> None:
    def run(name: str, **options: Any) -> Outcome:
        options = {"kind": kind, "where": where, "number": int(number), "folder": str(tmp_path), **options}
        case = Case(name, "tests.data.test_workers:train", options, processes=1)
        (outcome,) = play([case], tmp_path / name)[name]
        return outcome

    first = run("first")
    assert first.code == EXITS[number], first.output
    assert ended(first) == expected
    assert first.output.count("finishing the current step") == 1
    children = {pid for line in re.findall(r"^children (.+)$", first.output, re.MULTILINE) for pid in line.split()}
    assert len(children) >= 2 and not [process for process in first.left if process.split()[0] in children]
    # workers that are spawned take seconds to start, and were checked in the first run
    second = run("second", kind="map" if kind == "spawn" else kind, where="")
    assert second.code == 0, second.output
    assert ended(second) == (4, 4)
    assert second.result == [f"checkpoint-{step}" for step in (expected[0], 4)]


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # nobody may reap orphans
    return False


PROGRAM = """
import signal, sys
sys.path[:0] = {paths!r}
import test_workers
test_workers.train("map", "step", signal.SIGKILL, {folder!r}, everyone=False)
"""


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    paths = [str(HERE), str(HERE.parent), str(HERE.parent / "distributed"), str(ROOT)]
    program = PROGRAM.format(paths=paths, folder=str(tmp_path))
    with programs.started(sys.executable, "-c", program, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        children = [int(pid) for pid in process.stdout.readline().split()[1:]]
        assert len(children) >= 2
        assert process.wait(programs.LIMIT) == -signal.SIGKILL
        while any(map(is_running, children)):
            time.sleep(0.05)


STUCK = """
import time, torch
from omnitrain.data.loaders import make_loader

class Stuck(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from (torch.tensor([0]), torch.tensor([1]))
        while True:
            time.sleep(1000)

stuck = make_loader(Stuck(), 1, name="data", num_workers=1).batches(0)
next(stuck)
unfinished = make_loader(torch.arange(100), 1, name="data", num_workers=8).batches(0)
next(unfinished)
"""


@pytest.mark.slow
def test_workers_neither_delay_nor_disturb_the_exit() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = programs.run(sys.executable, "-W", "ignore", "-c", STUCK, env=environment)  # warns of few cores
    assert (done.returncode, done.stderr) == (0, "")


def test_forked_process_keeps_workers_of_its_parent() -> None:
    """When it exits, and when it collects garbage that the parent has not collected yet."""
    loaders = [DataLoader(torch.arange(8), num_workers=1) for _ in range(3)]
    iterators = [workers.start_workers(loaders[0], str), workers.start_workers(loaders[1], str), iter(loaders[2])]
    workers.watch_workers(iterators[2], str)
    for iterator, act in zip(
        iterators, (workers._stop_all_workers, *(it.__del__ for it in iterators[1:])), strict=True
    ):
        assert programs.exit_code(programs.fork(act)) == 0
        assert not iterator._workers_done_event.is_set() and len(list(iterator)) == 8


class Cycle:
    """Counts its deletions; that of a tensor on a GPU is fatal in a forked process."""

    deleted = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        type(self).deleted += 1


def test_forked_process_collects_no_garbage_of_its_parent() -> None:
    def collect() -> int:
        Cycle()
        gc.collect()
        return Cycle.deleted

    Cycle()
    assert programs.exit_code(programs.fork(collect)) == 1  # its own


class Programs(Dataset[Any]):
    """Starts a program for every sample and ends it, as a decoder of videos may."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        program = subprocess.Popen(["sleep", "1000"])
        program.send_signal((signal.SIGTERM, signal.SIGINT)[index])
        return torch.tensor(program.wait(programs.LIMIT))


def test_programs_of_a_dataset_receive_signals() -> None:
    with contextlib.closing(make_loader(Programs(), 1, name="data", num_workers=1)) as loader:
        assert [int(batch) for batch in loader.batches(0)] == [-signal.SIGTERM, -signal.SIGINT]


class Deadly(Dataset[Any]):
    """Rows, of which one ends the process that reads it."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end, self.main = end, os.getpid()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index == 9 and os.getpid() != self.main:
            self.end()
        return torch.full((4,), float(index)), torch.zeros(1)


ENDS = {
    "exit code 3": lambda: os._exit(3), "exit code 0": lambda: os._exit(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
}  # fmt: skip

PLACES = {
    "training": lambda data: {"train_dataset": data, "shuffle": False, "batch_size": 4, "num_workers": 1},
    "evaluation": lambda data: {**PLACES["training"]([data[0]] * 4), "eval_dataset": data},
    "stream": lambda data: {"train_dataset": Stream(data), "batch_size": 4, "num_workers": 1},
    "own loader": lambda data: {"train_loader": DataLoader(data, 4, num_workers=1)},
}
DEATHS = [*(("exit code 3", place) for place in PLACES), *((end, "training") for end in list(ENDS)[1:])]


@pytest.mark.parametrize(("end", "place"), slow_but(DEATHS, *DEATHS[:4]))
def test_dead_worker_is_a_data_error(end: str, place: str) -> None:
    options = PLACES[place](Deadly(ENDS[end]))
    trainer = Trainer(
        torch.nn.Linear(4, 1), loss_fn=torch.nn.functional.mse_loss, epochs=1, device="cpu", progress_bar=False,
        sanity=False, **options,
    )  # fmt: skip
    words = rf"Worker process 0 \(pid \d+\) .*{end}.* while it had to read .*of the (training|evaluation) set"
    with pytest.raises(DataError, match=words) as caught:
        trainer.train()
    if place in ("training", "evaluation"):
        # the death may come before torch has noted its last request
        assert re.search(r"(4, 5, 6, 7|8, 9, 10, 11)\b.* of the", str(caught.value))


EXITED = RuntimeError("DataLoader worker (pid 1) exited unexpectedly with exit code 3. Details are lost.")


def test_death_of_worker_during_its_explanation_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And before it: torch's handler raises while the error is looked at that reading from the dead worker raised."""
    getsignal, calls = signal.getsignal, itertools.count()

    def interrupted(number: int) -> Any:
        if number == signal.SIGCHLD and next(calls) == 0:
            raise EXITED
        return getsignal(number)

    monkeypatch.setattr(signal, "getsignal", interrupted)
    test_dead_worker_is_a_data_error("exit code 3", "training")
    assert next(calls) > 1
    broken = type("Broken", (OSError,), {"__str__": mock.Mock(side_effect=EXITED)})
    assert workers.worker_death(broken()) is None  # no worker of this process has that number


def test_death_of_worker_in_exit_of_no_grad_leaves_gradients_on() -> None:
    @workers.report_dead_workers()
    def evaluate() -> None:
        torch.set_grad_enabled(False)  # as torch's handler of SIGCHLD leaves it
        raise EXITED

    with pytest.raises(RuntimeError, match="exited"):
        evaluate()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("error", [ConnectionResetError, EOFError, FileNotFoundError])
def test_broken_pipe_of_dead_worker_is_a_data_error(error: type[Exception]) -> None:
    """What reading from a dying worker may raise, before torch notices its death; next to a living one it stays."""
    iterator = workers.start_workers(DataLoader(Deadly(ENDS["exit code 3"]), 4, num_workers=1), "batches {}".format)
    living = workers.start_workers(DataLoader(Rows(16), 4, num_workers=1), str)

    def read() -> None:
        next(iterator)  # which asks for the third batch
        with contextlib.suppress(RuntimeError):  # by which torch says the same
            iterator._workers[0].join()
        iterator._workers[0]._popen.returncode = 5  # which that may have lost
        raise error

    message = r"exit code 5 while it had to read batches \[1, 2\]"
    with pytest.raises(DataError, match=message), workers.report_dead_workers():
        read()
    workers.stop_workers(iterator)
    with pytest.raises(error), workers.report_dead_workers():
        raise error
    workers.stop_workers(living)
