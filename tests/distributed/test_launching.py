"""Launchers: their environments, exit codes and signals; runs restart after killed processes and lost machines."""

import contextlib
import json
import os
import signal
import socket
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
from backends import asked_for, gap
from compiled import compile_once
from forking import Case, Found, Outcome, environment_on_cpu, play
from launched import native
from marks import thinned
from safetensors.torch import load_file

from omnitrain.cli.launch import Launch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "tests" / "distributed" / "launched.py")
CONFIGS = ROOT / "examples" / "accelerate_configs"
OMNITRAIN = [sys.executable, "-m", "omnitrain", "launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
WAYS: dict[str, tuple[dict[str, Any], str, str]] = {
    "ddp": ({}, "DistributedDataParallel", "Parameter"), "fsdp2": ({"fsdp": True}, "FSDPSequential", "DTensor"),
    "zero2": ({"zero": 2}, "DeepSpeedEngine", "Parameter"), "zero3": ({"zero": 3}, "DeepSpeedEngine", "Parameter"),
}  # fmt: skip
"""Options of the launcher, and the classes of the wrapped model and of its parameters."""
ENVIRONMENTS = [("omnitrain", "ddp"), ("omnitrain", "zero3"), ("accelerate", "fsdp2"), ("omnitrain", "fsdp2"),
                ("omnitrain", "zero2"), ("accelerate", "zero3")]  # fmt: skip
MODEL = "run/model/model.safetensors"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals, and no gloo over loopback")


def run(*command: str) -> tuple[int, str]:
    """Run a launcher to its end; return its exit code and all that was printed."""
    done = programs.run(*command, env=environment_on_cpu(), stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of the same training on one process."""
    return {
        name: weight.detach() for name, weight in native(tmp_path_factory.mktemp("native")).model.named_parameters()
    }


def check(way: str, folder: Path, expected: dict[str, torch.Tensor]) -> None:
    for report in reports(folder):
        assert (report["world_size"], report["step"]) == (2, 12)
        assert (report["model"], report["parameter"]) == WAYS[way][1:]
    torch.testing.assert_close(load_file(folder / MODEL), expected, rtol=0, atol=1e-5)


# --- without launchers, which take longer to start than any of this


def environment_of_accelerate(way: str) -> dict[str, str]:
    """Return what `accelerate launch` sets for its processes with one of our configurations."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    words = ["--config_file", str(CONFIGS / f"{way}_cpu.yaml"), SCRIPT]
    variables: dict[str, str] = {}
    with (
        mock.patch.dict(os.environ, environment_on_cpu(), clear=True),
        mock.patch("torch.distributed.run.run", side_effect=lambda args: variables.update(os.environ)),
    ):
        before = dict(os.environ)
        launch_command(launch_command_parser().parse_args(words))
    assert variables, "accelerate has started nothing"
    return {name: value for name, value in variables.items() if before.get(name) != value}


def variables_of(way: str = "ddp") -> dict[str, str]:
    return Launch(SCRIPT, processes=2, **WAYS[way][0]).environment(cores=2)


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    selected = sorted({("omnitrain", "ddp"), *asked_for(request, "launcher", "way")})
    if any("zero" in way for _, way in selected):
        compile_once()
    cases = []
    for launcher, way in selected:
        name = f"{launcher}-{way}"
        (folder / name).mkdir()
        variables = environment_of_accelerate(way) if launcher == "accelerate" else variables_of(way)
        cases.append(Case(name, "launched:main", {"words": [str(folder / name)]}, environment=variables))
    return play(cases, folder / "cases")


@pytest.mark.parametrize(("launcher", "way"), thinned(ENVIRONMENTS, ENVIRONMENTS[:3]))
def test_launcher_environment_decides_how_to_train(
    launcher: str, way: str, outcomes: Found[list[Outcome]], folder: Path, expected: dict[str, torch.Tensor]
) -> None:
    for outcome in outcomes[f"{launcher}-{way}"]:
        assert outcome.code == 0, outcome.output
    check(way, folder / f"{launcher}-{way}", expected)


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.stem)
def test_accelerate_reads_our_config_files(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(path)).num_processes == 2


# --- real launches


def wait_until(condition: Callable[[], object], *processes: subprocess.Popen[str]) -> None:
    """Wait for something that comes while processes run."""
    end = time.monotonic() + programs.LIMIT
    while not condition():
        assert time.monotonic() < end and all(process.poll() is None for process in processes)
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("number", "code", "count"), [(signal.SIGTERM, 143, 1), pytest.param(signal.SIGINT, 130, 2, marks=pytest.mark.slow)]
)
def test_omnitrain_launch_saves_at_a_signal(number: signal.Signals, code: int, count: int, tmp_path: Path) -> None:
    command = [*OMNITRAIN, "-n", f"{count}", "-m", "launched", str(tmp_path), "--pause", "3"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with programs.started(*command, env=environment_on_cpu(), **pipes) as process:
        wait_until(lambda: len(list(tmp_path.glob("pauses-3-*"))) == count, process)
        process.send_signal(number)
        output, _ = process.communicate(timeout=programs.LIMIT)
    assert process.returncode == code, output
    manifest = json.loads((tmp_path / "run" / "last" / "omnitrain.json").read_text())
    assert manifest["progress"]["step"] == 3
    assert "Traceback" not in output or number == signal.SIGINT  # KeyboardInterrupt has one, as ever


@pytest.mark.slow
def test_accelerate_launch_trains_on_two_processes(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    code, output = run(*ACCELERATE, "--config_file", f"{CONFIGS / 'fsdp2'}_cpu.yaml", SCRIPT, str(tmp_path))
    assert code == 0, output
    check("fsdp2", tmp_path, expected)


@pytest.mark.slow
def test_omnitrain_launch_exits_with_the_error_of_one_rank(tmp_path: Path) -> None:
    code, output = run(*OMNITRAIN, "-n", "2", SCRIPT, str(tmp_path), "--fail")
    assert code == 1
    assert "RuntimeError: boom" in output
    assert "rank 1 was the first to end with an error: exit code 1" in output


# --- killed processes and lost machines; agents of torchrun act as machines


def state(run: Path) -> dict[str, torch.Tensor]:
    """Return the last weights of a run, and its optimizer's state."""
    last = run / "last"
    return load_file(last / "model.safetensors") | load_file(last / "optimizer" / "state.safetensors")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, outcomes: Found[list[Outcome]]) -> dict[str, torch.Tensor]:
    """The end of an uninterrupted run on one machine with two processes."""
    assert [outcome.code for outcome in outcomes["omnitrain-ddp"]] == [0, 0]
    return state(folder / "omnitrain-ddp" / "run")


def test_machine_without_the_shared_folder_resumes(tmp_path: Path, uninterrupted: dict[str, torch.Tensor]) -> None:
    """Only the main process writes checkpoints, and reads them; the others get what they need from it."""
    words = {"words": [str(tmp_path), "--separate-folders", "--kill", "6"]}
    for name, codes in {"killed": [1, -signal.SIGKILL], "resumed": [0, 0]}.items():
        case = Case(name, "launched:main", words, environment=variables_of())
        outcomes = play([case], tmp_path / "cases")[name]
        assert [outcome.code for outcome in outcomes] == codes, outcomes
    assert gap(state(tmp_path / "run-0"), uninterrupted) == 0
    assert not (tmp_path / "run-1").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["--standalone", "--master-port"])  # the latter is that of accelerate launch
def test_torchrun_restarts_a_killed_worker_exactly(
    rendezvous: str, tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    words = [rendezvous, *([str(programs.free_port())] if rendezvous == "--master-port" else [])]
    words += ["--nproc-per-node", "2", "--max-restarts", "2", SCRIPT, str(tmp_path), "--kill", "6"]
    code, output = run(*TORCHRUN, *words)
    assert code == 0, output
    assert (tmp_path / "killed").exists()
    # an attempt that found keys of the one before it would fail, and so would all that are allowed
    restarts = [(report["node"], report["restarts"]) for report in reports(tmp_path)]
    assert restarts in ([("0", "1")] * 2, [("0", "2")] * 2), output
    assert gap(state(tmp_path / "run"), uninterrupted) == 0


def losses(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the loss of each step when it was last taken, and the number of ranks."""
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return dict(sorted({row["step"]: row for row in map(json.loads, lines)}.items()))


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1):
        return True
    return False


def wait_for_end_of_workers(step: int, folder: Path) -> None:
    """Wait until the processes that have paused after a step have ended."""
    numbers = [int(path.name.split("-")[-1]) for path in folder.glob(f"pauses-{step}-*")]
    workers = [psutil.Process(number) for number in numbers if psutil.pid_exists(number)]
    assert not psutil.wait_procs(workers, programs.LIMIT)[1]


class Machines:
    """Machines of one process each, of which the first one has the store; what they print is in their folders."""

    def __init__(self, count: int, folder: Path, stack: contextlib.ExitStack, *words: str) -> None:
        self.folder, self._stack = folder, stack
        port = programs.free_port()
        self._command = [*OMNITRAIN, "-n", "1", "--rdzv-endpoint", f"localhost:{port}", "--max-restarts", "3", *words]
        self.agents: list[subprocess.Popen[str]] = []
        self._started = 0
        self.start()
        wait_until(lambda: is_listening(port), *self.agents)
        for _ in range(1, count):
            self.start()

    def start(self) -> None:
        output = self._stack.enter_context((self.folder / f"machine-{self._started}.txt").open("w"))
        options = {"env": environment_on_cpu(), "stdout": output, "stderr": subprocess.STDOUT}
        self.agents.append(self._stack.enter_context(programs.started(*self._command, **options)))
        self._started += 1

    def wait_for_pause(self, step: int, count: int) -> None:
        wait_until(lambda: len(list(self.folder.glob(f"pauses-{step}-*"))) >= count, *self.agents)

    def lose_one_at(self, step: int) -> None:
        """Lose the last machine, as if its power is cut, while all of them pause after a step."""
        self.wait_for_pause(step, len(self.agents))
        agent = psutil.Process(self.agents.pop().pid)
        for process in (agent, *agent.children(recursive=True)):
            process.kill()
        (self.folder / f"continue-{step}").touch()

    def finish(self) -> None:
        assert [agent.wait(programs.LIMIT) for agent in self.agents] == [0] * len(self.agents)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Machines]]:
    # torchrun waits 45 seconds for the return of a lost machine
    monkeypatch.setenv("PET_RDZV_CONF", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3")
    with contextlib.ExitStack() as stack:
        yield lambda count, *words: Machines(count, tmp_path, stack, *words)


def check_steps(folder: Path, step: int) -> list[int]:
    """Compare each loss and the last weights with those of one process; return the number of ranks of each step."""
    single = folder / "single"
    single.mkdir()
    case = Case("single", "launched:main", {"words": [str(single), "--step", f"{step}"]}, processes=1)
    (outcome,) = play([case], single)["single"]
    assert outcome.code == 0, outcome.output
    rows, expected = losses(folder), losses(single)
    assert [*rows] == [*range(1, len(expected) + 1)]
    assert [row["loss"] for row in rows.values()] == pytest.approx([row["loss"] for row in expected.values()], abs=1e-5)
    torch.testing.assert_close(load_file(folder / MODEL), load_file(single / MODEL), rtol=0, atol=1e-5)
    return [row["ranks"] for row in rows.values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "comes_back", "step", "options"),
    [
        pytest.param(3, True, 8, [], id="3 and 2 and 3"),
        pytest.param(3, True, 7, ["--fsdp"], id="3 and 2 and 3 with FSDP 2"),
        pytest.param(2, False, 7, ["--zero", "3"], id="2 and 1 with ZeRO 3"),
    ],
)
def test_run_continues_without_a_lost_machine(
    count: int, comes_back: bool, step: int, options: list[str], tmp_path: Path, machines: Callable[..., Machines]
) -> None:
    """The run continues without the machine, and with it again when it is back."""
    compile_once()
    words = ["--nnodes", f"{count - 1}:{count}", *options, SCRIPT, str(tmp_path), "--step", f"{step}"]
    words += ["--pause", "6", *(["9"] if comes_back else []), *(["--in-parts"] if options else [])]
    run = machines(count, *words)
    run.lose_one_at(6)
    if comes_back:
        run.wait_for_pause(9, count - 1)
        run.start()
        wait_for_end_of_workers(9, tmp_path)
        (tmp_path / "continue-9").touch()
    run.finish()
    ranks = check_steps(tmp_path, step)
    assert ranks[:8] == [count] * 4 + [count - 1] * 4 and set(ranks[9:]) == {len(run.agents)}
    # shards were saved by each rank, and are read in slices by another number of ranks
    parts = {path.name.split(".")[0] for path in (tmp_path / "run" / "last").rglob("rank-*.safetensors")}
    assert parts == ({f"rank-{rank:05}" for rank in range(len(run.agents))} if options else set())


@pytest.mark.slow
def test_run_on_fixed_machines_waits_for_a_replacement(tmp_path: Path, machines: Callable[..., Machines]) -> None:
    run = machines(2, "--nnodes", "2", "--fsdp", SCRIPT, str(tmp_path), "--step", "7", "--pause", "6")
    run.lose_one_at(6)
    wait_for_end_of_workers(6, tmp_path)
    run.start()
    run.finish()
    assert set(check_steps(tmp_path, 7)) == {2}
