"""Worker processes and signals, with real processes: schedulers and terminals signal all processes of a run at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from omnitrain.data import workers
from omnitrain.data.loaders import make_loader

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="Windows has no process groups")

# Data are slower than training, and index 27 is in the second window: what is left of it is fetched after the signal.
SCRIPT = """
import os, signal, sys, time
import multiprocessing, torch
from pathlib import Path
from torch.utils.data import DataLoader, Dataset, IterableDataset
from omnitrain import Callback, Trainer

kind, name, where = sys.argv[1:4]
resumes = Path("run").exists()

class Rows(Dataset):
    def __init__(self, place):
        self.place, self.strikes = place, where == place and not resumes
    def __len__(self):
        return 64 if self.place == "data" else 32
    def __getitem__(self, index):
        time.sleep(0.01)
        if index == 27 and self.strikes:
            os.killpg(0, getattr(signal, name))
            time.sleep(0.2)
        return torch.full((4,), float(index)), torch.zeros(1)

class Stream(IterableDataset):
    def __iter__(self):
        rows = Rows("data")
        return (rows[index] for index in range(64))

class Report(Callback):
    def on_step_start(self, trainer):
        print("children", *(child.pid for child in multiprocessing.active_children()), flush=True)
        if where == "step" and trainer.progress.step == 1 and not resumes:
            os.killpg(0, getattr(signal, name))
            time.sleep(0.3)
    def on_train_end(self, trainer):
        print("ended", trainer.progress.step, trainer.stop_reason, len(trainer.metrics["valid"]), flush=True)

def main():
    torch.set_num_threads(1)
    if kind == "spawn":
        torch.multiprocessing.set_start_method("spawn")
    train, evaluation = Rows("data"), Rows("eval")
    options = {"shuffle": False, "num_workers": 2}
    if kind == "stream":
        train = Stream()
        del options["shuffle"]
    elif kind == "given":
        options = {
            "train_loader": DataLoader(train, batch_size=2, num_workers=2),
            "eval_loader": DataLoader(evaluation, batch_size=2, num_workers=2),
        }
        train = evaluation = None
    trainer = Trainer(
        torch.nn.Linear(4, 1), train, evaluation, loss_fn=torch.nn.functional.mse_loss, epochs=1, batch_size=2,
        gradient_accumulation_steps=8, eval_steps=1, save_steps=100, save_dir="run", device="cpu", progress_bar=False,
        callbacks=[Report()], **options,
    )
    trainer.train(resume_from="auto")

if __name__ == "__main__":
    main()
"""


class Ended(NamedTuple):
    """How a run of SCRIPT ended."""

    code: int
    steps: int
    evaluations: int
    children: list[int]
    errors: str


def run(folder: Path, kind: str, name: str, where: str) -> Ended:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), kind, name, where],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,  # a process group of its own
        capture_output=True,
        text=True,
        timeout=100,
    )
    words = [line.split() for line in done.stdout.splitlines()]
    children = sorted({int(pid) for line in words if line[0] == "children" for pid in line[1:]})
    ended = [(int(line[1]), int(line[3])) for line in words if line[0] == "ended"] or [(-1, -1)]
    return Ended(done.returncode, *ended[0], children, done.stderr)


def is_running(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"  # nobody may reap orphans
    return False


def left_over(children: list[int], seconds: float) -> list[int]:
    """Return the children that still run after so many seconds, or as soon as there are none."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(map(is_running, children)):
        time.sleep(0.05)
    return [pid for pid in children if is_running(pid)]


SIGNALS = {"SIGTERM": (143,), "SIGINT": (130, -signal.SIGINT)}
CASES = [
    ("map", "SIGTERM", "data", (2, 1)),
    ("map", "SIGINT", "data", (2, 1)),
    ("map", "SIGTERM", "eval", (1, 0)),
    ("map", "SIGINT", "step", (2, 1)),
    ("spawn", "SIGTERM", "data", (2, 1)),
    ("stream", "SIGTERM", "data", (2, 1)),
    ("given", "SIGINT", "data", (2, 1)),
    ("given", "SIGTERM", "step", (2, 1)),
    pytest.param("given", "SIGTERM", "data", (1, 1)),
    pytest.param("given", "SIGTERM", "eval", (1, 0)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "where", "expected"), CASES)
def test_a_signal_to_the_whole_process_group_ends_the_run_in_order(
    kind: str, name: str, where: str, expected: tuple[int, int], tmp_path: Path
) -> None:
    first = run(tmp_path, kind, name, where)
    assert first.code in SIGNALS[name], first.errors
    assert (first.steps, first.evaluations) == expected
    assert first.errors.count("finishing the current step") == 1
    assert len(list(tmp_path.glob("run/checkpoint-*"))) == 1
    assert first.children and not left_over(first.children, 1)
    second = run(tmp_path, kind, name, where)
    assert (second.code, second.steps, second.evaluations) == (0, 4, 4), second.errors


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = SCRIPT.replace("os.killpg(0, getattr(signal, name))", "os.kill(os.getpid(), signal.SIGKILL)")
    (tmp_path / "script.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, "script.py", "map", "SIGKILL", "step"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        children = [int(pid) for pid in process.stdout.readline().split()[1:]]
        assert len(children) >= 2
        assert process.wait(timeout=60) == -signal.SIGKILL
    assert not left_over(children, 15)


STUCK = """
import time, torch
from omnitrain.data.loaders import make_loader

class Stuck(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from (torch.tensor([0]), torch.tensor([1]))
        while True:
            time.sleep(1000)

batches = make_loader(Stuck(), 1, name="data", num_workers=1).batches(0)
next(batches)
"""


def ended(code: str) -> tuple[int, str]:
    """Run code as a program, and return its exit code and what it had to complain of."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],  # torch warns of more workers than cores
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_stuck_worker_keeps_no_process_from_its_end() -> None:
    assert ended(STUCK) == (0, "")


LEFT = """
import torch
from omnitrain.data.loaders import make_loader

batches = make_loader(torch.arange(100), 1, name="data", num_workers=8).batches(0)
next(batches)
"""


def test_an_epoch_that_is_left_ends_with_the_process_and_without_a_word() -> None:
    assert ended(LEFT) == (0, "")


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(40))


def test_a_forked_process_that_exits_ends_no_workers_of_its_parent() -> None:
    batches = make_loader(Numbers(), 1, name="data", num_workers=1).batches(0)
    first = int(next(batches))
    child = os.fork()
    if not child:
        workers._stop_all()
        os._exit(0)
    os.waitpid(child, 0)
    assert [first, *map(int, batches)] == list(range(40))


class Programs(Dataset[Any]):
    """Starts a program for every sample and ends it, as a decoder of videos may."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        program = subprocess.Popen(["sleep", "60"])
        number = (signal.SIGTERM, signal.SIGINT)[index]
        program.send_signal(number)
        return torch.tensor(program.wait(timeout=20))


def test_programs_that_a_dataset_starts_hear_signals_as_ever() -> None:
    loader = make_loader(Programs(), 1, name="data", num_workers=1)
    try:
        assert [int(batch) for batch in loader.batches(0)] == [-signal.SIGTERM, -signal.SIGINT]
    finally:
        loader.close()
