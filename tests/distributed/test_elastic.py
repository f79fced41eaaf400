"""Two machines, played by two of torchrun's agents on this one; and processes that are killed and started anew."""

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
from forking import Case, Outcome, play
from safetensors.torch import load_file
from test_launching import SCRIPT, run, said, started

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
OMNITRAIN = [sys.executable, "-m", "omnitrain.cli", "launch"]
pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals, and no gloo over loopback"),
]


def on_two_machines(*command: str, cwd: Path) -> str:
    """Start the command once for each machine, and return what was printed."""
    folders = [cwd / "first", cwd / "second"]
    with contextlib.ExitStack() as stack:
        agents = []
        for folder in folders:
            folder.mkdir()
            agents.append(stack.enter_context(started(*command, cwd=folder)))
        codes = [agent.wait(programs.LIMIT) for agent in agents]
    output = "".join((folder / "output.txt").read_text() for folder in folders)
    assert codes == [0, 0], output
    return output


def state(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a run ended with, and its optimizer's state."""
    last = run / "last"
    return load_file(last / "model.safetensors") | load_file(last / "optimizer" / "state.safetensors")


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """How the run ends on one machine with two processes that nothing disturbs."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert [one.code for one in forked(folder, [str(folder)])] == [0, 0]
    return state(folder / "run")


def forked(folder: Path, words: list[str]) -> list[Outcome]:
    """Run the script on two processes without torchrun."""
    name = f"{len(list(folder.glob('forked-*')))}"
    return play([Case(name, "launched:main", {"words": words})], folder / f"forked-{name}")[name]


def nodes_and_restarts(folder: Path) -> list[tuple[Any, Any]]:
    return [(one["node"], one["restarts"]) for one in said(folder)]


@pytest.mark.slow
def test_two_machines_end_with_the_weights_of_one(tmp_path: Path, uninterrupted: dict[str, torch.Tensor]) -> None:
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    endpoint = f"localhost:{programs.free_port()}"
    on_two_machines(*TORCHRUN, *words, "--rdzv-endpoint", endpoint, SCRIPT, str(tmp_path), cwd=tmp_path)
    assert nodes_and_restarts(tmp_path) == [("0", "0"), ("1", "0")]
    assert_equal(state(tmp_path / "run"), uninterrupted)


def test_a_machine_without_the_shared_folder_is_no_hindrance(
    tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    """Only the main process writes checkpoints, and reads them; the others get what they need from it."""
    words = [str(tmp_path), "--own-folders", "--kill", "6"]
    killed = forked(tmp_path, words)
    assert (killed[0].code, killed[1].code) == (1, -signal.SIGKILL), killed
    again = forked(tmp_path, words)
    assert [one.code for one in again] == [0, 0], again
    assert_equal(state(tmp_path / "run-0"), uninterrupted)
    assert not (tmp_path / "run-1").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "rendezvous",
    [
        pytest.param(["--standalone"], id="c10d"),
        pytest.param(["--master-port"], id="static"),
    ],
)
def test_a_run_whose_worker_is_killed_is_started_anew_and_ends_with_the_same_weights(
    rendezvous: list[str], tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    if rendezvous == ["--master-port"]:  # what accelerate launch does: one store through all restarts, at a known port
        rendezvous = ["--master-port", str(programs.free_port())]
    words = ["--nproc-per-node", "2", "--max-restarts", "2", SCRIPT, str(tmp_path), "--kill", "6"]
    code, output = run(*TORCHRUN, *rendezvous, *words, cwd=tmp_path)
    assert code == 0, output
    assert (tmp_path / "killed").exists()
    # an attempt that found what the one before it has left would fail, and so would all that are allowed
    assert nodes_and_restarts(tmp_path) in ([("0", "1")] * 2, [("0", "2")] * 2), output
    assert_equal(state(tmp_path / "run"), uninterrupted)


def test_a_killed_worker_takes_both_machines_back_to_the_last_checkpoint(
    tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    words = ["-n", "1", "--nnodes", "2", "--rdzv-endpoint", f"localhost:{programs.free_port()}", "--max-restarts", "2"]
    on_two_machines(*OMNITRAIN, *words, SCRIPT, str(tmp_path), "--kill", "6", cwd=tmp_path)
    assert (tmp_path / "killed").exists()
    assert_equal(state(tmp_path / "run"), uninterrupted)


# --- machines that are lost, and replaced or not


def alone(folder: Path, step: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on one process that nothing disturbs; return the loss of each step, and the last weights."""
    folder.mkdir()
    case = Case("alone", "launched:main", {"words": [str(folder), "--step", f"{step}"]}, processes=1)
    (outcome,) = play([case], folder / "forked")["alone"]
    assert outcome.code == 0, outcome.output
    rows = losses(folder)
    return [rows[number]["loss"] for number in sorted(rows)], load_file(folder / "run" / "model" / "model.safetensors")


def losses(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the loss of each step as it was when it was last taken, and on how many ranks."""
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def wait_for(pattern: str, count: int, folder: Path, *agents: subprocess.Popen[str]) -> None:
    end = time.monotonic() + programs.LIMIT
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < end and all(one.poll() is None for one in agents), output_of(folder)
        time.sleep(0.1)


def output_of(folder: Path) -> str:
    return "".join(f"--- {path}\n{path.read_text()}" for path in sorted(folder.glob("*/output.txt")))


def lose(agent: subprocess.Popen[str]) -> None:
    """Kill an agent and its worker, as a machine ends whose power is cut."""
    for process in (psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)):
        process.kill()


class Machines:
    """Machines of one process each, played by agents on this one; the first of them keeps the store."""

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
        """Cut the power of the last machine while all of them pause after a step."""
        wait_for(f"pauses-{step}-*", len(self.agents), self.folder, *self.agents)
        lose(self.agents.pop())
        (self.folder / f"go-on-{step}").touch()

    def finish(self) -> None:
        codes = [agent.wait(programs.LIMIT) for agent in self.agents]
        assert codes == [0] * len(self.agents), output_of(self.folder)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Machines]]:
    # torchrun waits 45 seconds for a machine that has gone to come back
    monkeypatch.setenv("PET_RDZV_CONF", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3")
    with contextlib.ExitStack() as stack:
        yield lambda count, *words: Machines(count, tmp_path, stack, *words)


def assert_as_alone(folder: Path, alone: tuple[list[float], dict[str, torch.Tensor]]) -> list[int]:
    """Compare the loss of each step and the last weights; return on how many ranks each step was taken."""
    expected, weights = alone
    rows = losses(folder)
    assert sorted(rows) == [*range(1, len(expected) + 1)]
    assert [rows[number]["loss"] for number in sorted(rows)] == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(load_file(folder / "run" / "model" / "model.safetensors"), weights, rtol=0, atol=1e-5)
    return [rows[number]["ranks"] for number in sorted(rows)]


@pytest.mark.parametrize(
    ("count", "comes_back", "step", "way"),
    [
        pytest.param(3, False, 8, [], id="3 and 2"),
        pytest.param(2, False, 7, [], id="2 and 1", marks=pytest.mark.slow),
        pytest.param(3, True, 8, [], id="3 and 2 and 3", marks=pytest.mark.slow),
        pytest.param(3, False, 8, ["--fsdp"], id="3 and 2 with FSDP 2", marks=pytest.mark.slow),
        pytest.param(3, True, 7, ["--fsdp"], id="3 and 2 and 3 with FSDP 2", marks=pytest.mark.slow),
        pytest.param(3, False, 8, ["--zero", "2"], id="3 and 2 with ZeRO 2", marks=pytest.mark.slow),
        pytest.param(2, False, 7, ["--zero", "3"], id="2 and 1 with ZeRO 3", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_without_a_lost_machine_and_with_it_again_when_it_is_back(
    count: int, comes_back: bool, step: int, way: list[str], tmp_path: Path, machines: Callable[..., Machines]
) -> None:
    """Steps of as many samples, in the same order, on any number of machines of one process each."""
    expected = alone(tmp_path / "alone", step)
    words = ["--nnodes", f"{count - 1}:{count}", *way, SCRIPT, str(tmp_path), "--step", f"{step}"]
    words += ["--pause", "6", *(["9"] if comes_back else []), *(["--in-parts"] if way else [])]
    run = machines(count, *words)
    run.lose_one_at(6)
    if comes_back:
        wait_for("pauses-9-*", count - 1, tmp_path, *run.agents)
        workers = [int(path.name.split("-")[-1]) for path in tmp_path.glob("pauses-9-*")]
        run.start()
        _, left = psutil.wait_procs([psutil.Process(one) for one in workers], programs.LIMIT)
        assert not left, output_of(tmp_path)
        (tmp_path / "go-on-9").touch()
    run.finish()
    ranks = assert_as_alone(tmp_path, expected)
    assert ranks[:8] == [count] * 4 + [count - 1] * 4 and set(ranks[9:]) == {len(run.agents)}
    # what is sharded was saved by each rank, and is read in slices by another number of them
    parts = {path.name.split(".")[0] for path in (tmp_path / "run" / "last").rglob("rank-*.safetensors")}
    assert parts == ({f"rank-{rank:05}" for rank in range(len(run.agents))} if way else set())


@pytest.mark.parametrize(
    ("step", "way"),
    [
        pytest.param(8, [], id="DDP", marks=pytest.mark.slow),
        pytest.param(7, ["--fsdp"], id="FSDP 2", marks=pytest.mark.slow),
    ],
)
def test_a_run_on_a_fixed_number_of_machines_waits_for_one_in_the_place_of_a_lost_one(
    step: int, way: list[str], tmp_path: Path, machines: Callable[..., Machines]
) -> None:
    expected = alone(tmp_path / "alone", step)
    words = ["--nnodes", "2", *way, SCRIPT, str(tmp_path), "--step", f"{step}", "--pause", "6"]
    run = machines(2, *words)
    run.lose_one_at(6)
    workers = [psutil.Process(int(path.name.split("-")[-1])) for path in tmp_path.glob("pauses-6-*") if alive(path)]
    _, left = psutil.wait_procs(workers, programs.LIMIT)
    assert not left, output_of(tmp_path)
    run.start()
    run.finish()
    assert set(assert_as_alone(tmp_path, expected)) == {2}


def alive(pause: Path) -> bool:
    return psutil.pid_exists(int(pause.name.split("-")[-1]))


def wait_for_store(endpoint: str, agent: subprocess.Popen[str]) -> None:
    host, _, port = endpoint.partition(":")
    end = time.monotonic() + programs.LIMIT
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return
        assert time.monotonic() < end and agent.poll() is None
        time.sleep(0.1)
