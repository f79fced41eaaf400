"""Killed processes and lost machines: runs restart on the ranks that are left. Agents of torchrun act as machines."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import programs
import psutil
import pytest
import torch
from compiled import compile_once
from forking import Case, Outcome, play
from safetensors.torch import load_file
from test_launching import OMNITRAIN, OPTIONS, SCRIPT, reports, run, started

from omnitrain.cli.launch import Launch

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals, and no gloo over loopback")
]


def state(run: Path) -> dict[str, torch.Tensor]:
    """Return the last weights of a run, and its optimizer's state."""
    last = run / "last"
    return load_file(last / "model.safetensors") | load_file(last / "optimizer" / "state.safetensors")


def assert_equal(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> dict[str, torch.Tensor]:
    """The end of an uninterrupted run on one machine with two processes."""
    assert [outcome.code for outcome in forked(folder, [str(folder)])] == [0, 0]
    return state(folder / "run")


def forked(folder: Path, words: list[str], processes: int = 2, way: str = "ddp") -> list[Outcome]:
    """Run the script on several processes without torchrun."""
    if "zero" in way:
        compile_once()
    name = f"{len(list(folder.glob('forked-*')))}"
    variables = Launch(SCRIPT, processes=processes, **OPTIONS[way]).environment(cores=2)
    case = Case(name, "launched:main", {"words": words}, processes=processes, environment=variables)
    return play([case], folder / f"forked-{name}")[name]


def nodes_and_restarts(folder: Path) -> list[tuple[Any, Any]]:
    return [(report["node"], report["restarts"]) for report in reports(folder)]


def test_machine_without_the_shared_folder_resumes(tmp_path: Path, uninterrupted: dict[str, torch.Tensor]) -> None:
    """Only the main process writes checkpoints, and reads them; the others get what they need from it."""
    words = [str(tmp_path), "--separate-folders", "--kill", "6"]
    killed = forked(tmp_path, words)
    assert (killed[0].code, killed[1].code) == (1, -signal.SIGKILL), killed
    resumed = forked(tmp_path, words)
    assert [outcome.code for outcome in resumed] == [0, 0], resumed
    assert_equal(state(tmp_path / "run-0"), uninterrupted)
    assert not (tmp_path / "run-1").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["--standalone", "--master-port"])  # the latter is that of accelerate launch
def test_torchrun_restarts_a_killed_worker_exactly(
    rendezvous: str, tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    words = [rendezvous, *([str(programs.free_port())] if rendezvous == "--master-port" else [])]
    words += ["--nproc-per-node", "2", "--max-restarts", "2", SCRIPT, str(tmp_path), "--kill", "6"]
    code, output = run(*TORCHRUN, *words, cwd=tmp_path)
    assert code == 0, output
    assert (tmp_path / "killed").exists()
    # an attempt that found keys of the one before it would fail, and so would all that are allowed
    assert nodes_and_restarts(tmp_path) in ([("0", "1")] * 2, [("0", "2")] * 2), output
    assert_equal(state(tmp_path / "run"), uninterrupted)


@pytest.mark.slow
def test_killed_worker_restarts_both_machines(tmp_path: Path, uninterrupted: dict[str, torch.Tensor]) -> None:
    words = ["-n", "1", "--nnodes", "2", "--rdzv-endpoint", f"localhost:{programs.free_port()}", "--max-restarts", "2"]
    with contextlib.ExitStack() as stack:
        agents = []
        for folder in (tmp_path / "first", tmp_path / "second"):
            folder.mkdir()
            command = [*OMNITRAIN, *words, SCRIPT, str(tmp_path), "--kill", "6"]
            agents.append(stack.enter_context(started(*command, cwd=folder)))
        assert [agent.wait(programs.LIMIT) for agent in agents] == [0, 0], output_of(tmp_path)
    assert {node for node, _ in nodes_and_restarts(tmp_path)} == {"0", "1"}
    assert (tmp_path / "killed").exists()
    assert_equal(state(tmp_path / "run"), uninterrupted)


# --- fewer ranks, and more again


def train_on_one_process(folder: Path, step: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on one process; return the loss of each step, and the last weights."""
    folder.mkdir()
    case = Case("single", "launched:main", {"words": [str(folder), "--step", f"{step}"]}, processes=1)
    (outcome,) = play([case], folder / "forked")["single"]
    assert outcome.code == 0, outcome.output
    rows = losses(folder)
    return [rows[number]["loss"] for number in sorted(rows)], load_file(folder / "run" / "model" / "model.safetensors")


def losses(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the loss of each step when it was last taken, and the number of ranks."""
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def wait_for(pattern: str, count: int, folder: Path, *agents: subprocess.Popen[str]) -> None:
    end = time.monotonic() + programs.LIMIT
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < end and all(agent.poll() is None for agent in agents), output_of(folder)
        time.sleep(0.1)


def output_of(folder: Path) -> str:
    return "".join(f"--- {path}\n{path.read_text()}" for path in sorted(folder.glob("*/output.txt")))


def lose(agent: subprocess.Popen[str]) -> None:
    """Kill an agent and its worker, as if the power of a machine is cut."""
    for process in (psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)):
        process.kill()


class Machines:
    """Machines of one process each, of which the first one has the store."""

    def __init__(self, count: int, folder: Path, stack: contextlib.ExitStack, *words: str) -> None:
        self.folder, self._stack = folder, stack
        endpoint = f"localhost:{programs.free_port()}"
        self._command = [*OMNITRAIN, "-n", "1", "--rdzv-endpoint", endpoint, "--max-restarts", "3", *words]
        self.agents: list[subprocess.Popen[str]] = []
        self._started = 0
        self.start()
        wait_for_store(endpoint, self.agents[0])
        for _ in range(1, count):
            self.start()

    def start(self) -> None:
        folder = self.folder / f"machine-{self._started}"
        folder.mkdir()
        self.agents.append(self._stack.enter_context(started(*self._command, cwd=folder)))
        self._started += 1

    def lose_one_at(self, step: int) -> None:
        """Lose the last machine while all of them pause after a step."""
        wait_for(f"pauses-{step}-*", len(self.agents), self.folder, *self.agents)
        lose(self.agents.pop())
        (self.folder / f"continue-{step}").touch()

    def finish(self) -> None:
        codes = [agent.wait(programs.LIMIT) for agent in self.agents]
        assert codes == [0] * len(self.agents), output_of(self.folder)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Machines]]:
    # torchrun waits 45 seconds for the return of a lost machine
    monkeypatch.setenv("PET_RDZV_CONF", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3")
    with contextlib.ExitStack() as stack:
        yield lambda count, *words: Machines(count, tmp_path, stack, *words)


def assert_as_on_one_process(folder: Path, reference: tuple[list[float], dict[str, torch.Tensor]]) -> list[int]:
    """Compare the loss of each step and the last weights; return on how many ranks each step was taken."""
    expected, weights = reference
    rows = losses(folder)
    assert sorted(rows) == [*range(1, len(expected) + 1)]
    assert [rows[number]["loss"] for number in sorted(rows)] == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(load_file(folder / "run" / "model" / "model.safetensors"), weights, rtol=0, atol=1e-5)
    return [rows[number]["ranks"] for number in sorted(rows)]


@pytest.mark.slow
@pytest.mark.parametrize("way", OPTIONS)
def test_run_resumes_on_fewer_ranks(way: str, tmp_path: Path) -> None:
    """The quick case is in test_uneven_steps.py."""
    step = 7 if way == "fsdp2" else 8
    expected = train_on_one_process(tmp_path / "single", step)
    words = [str(tmp_path), "--step", f"{step}", "--kill", "6", *([] if way == "ddp" else ["--in-parts"])]
    killed = forked(tmp_path, words, 3, way)
    assert [outcome.code for outcome in killed] == [1, -signal.SIGKILL, 1], killed
    resumed = forked(tmp_path, words, 2, way)
    assert [outcome.code for outcome in resumed] == [0, 0], resumed
    ranks = assert_as_on_one_process(tmp_path, expected)
    assert ranks[:4] == [3] * 4 and set(ranks[4:]) == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "comes_back", "step", "options"),
    [
        pytest.param(3, True, 8, [], id="3 and 2 and 3"),
        pytest.param(3, True, 7, ["--fsdp"], id="3 and 2 and 3 with FSDP 2"),
        pytest.param(3, False, 8, ["--zero", "2"], id="3 and 2 with ZeRO 2"),
        pytest.param(2, False, 7, ["--zero", "3"], id="2 and 1 with ZeRO 3"),
    ],
)
def test_run_continues_without_a_lost_machine(
    count: int, comes_back: bool, step: int, options: list[str], tmp_path: Path, machines: Callable[..., Machines]
) -> None:
    """The run continues without the machine, and with it again when it is back."""
    compile_once()
    expected = train_on_one_process(tmp_path / "single", step)
    words = ["--nnodes", f"{count - 1}:{count}", *options, SCRIPT, str(tmp_path), "--step", f"{step}"]
    words += ["--pause", "6", *(["9"] if comes_back else []), *(["--in-parts"] if options else [])]
    run = machines(count, *words)
    run.lose_one_at(6)
    if comes_back:
        wait_for("pauses-9-*", count - 1, tmp_path, *run.agents)
        run.start()
        wait_for_end_of_workers(9, tmp_path)
        (tmp_path / "continue-9").touch()
    run.finish()
    ranks = assert_as_on_one_process(tmp_path, expected)
    assert ranks[:8] == [count] * 4 + [count - 1] * 4 and set(ranks[9:]) == {len(run.agents)}
    # shards were saved by each rank, and are read in slices by another number of ranks
    parts = {path.name.split(".")[0] for path in (tmp_path / "run" / "last").rglob("rank-*.safetensors")}
    assert parts == ({f"rank-{rank:05}" for rank in range(len(run.agents))} if options else set())


@pytest.mark.slow
def test_run_on_fixed_machines_waits_for_a_replacement(tmp_path: Path, machines: Callable[..., Machines]) -> None:
    expected = train_on_one_process(tmp_path / "single", 7)
    run = machines(2, "--nnodes", "2", "--fsdp", SCRIPT, str(tmp_path), "--step", "7", "--pause", "6")
    run.lose_one_at(6)
    wait_for_end_of_workers(6, tmp_path)
    run.start()
    run.finish()
    assert set(assert_as_on_one_process(tmp_path, expected)) == {2}


def wait_for_end_of_workers(step: int, folder: Path) -> None:
    """Wait until the processes that have paused after a step have ended."""
    numbers = [int(path.name.split("-")[-1]) for path in folder.glob(f"pauses-{step}-*")]
    workers = [psutil.Process(number) for number in numbers if psutil.pid_exists(number)]
    _, alive = psutil.wait_procs(workers, programs.LIMIT)
    assert not alive, output_of(folder)


def wait_for_store(endpoint: str, agent: subprocess.Popen[str]) -> None:
    host, _, port = endpoint.partition(":")
    end = time.monotonic() + programs.LIMIT
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return
        assert time.monotonic() < end and agent.poll() is None
        time.sleep(0.1)
