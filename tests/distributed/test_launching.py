"""Launchers: their environments, exit codes and signals; runs restart after killed processes and lost machines."""

import contextlib
import json
import os
import runpy
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
from forking import Case, Found, Outcome, play
from launched import native
from marks import thinned
from safetensors.torch import load_file

from omnitrain.cli.launch import Launch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "tests" / "distributed" / "launched.py")
EXAMPLE = str(ROOT / "examples" / "multi_gpu.py")
CONFIGS = ROOT / "examples" / "accelerate_configs"
OMNITRAIN = [sys.executable, "-m", "omnitrain", "launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
OPTIONS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp2": {"fsdp": True}, "zero2": {"zero": 2}, "zero3": {"zero": 3}}
WRAPPED = {
    "ddp": ("DistributedDataParallel", "Parameter"),
    "fsdp2": ("FSDPSequential", "DTensor"),
    "zero2": ("DeepSpeedEngine", "Parameter"),
    "zero3": ("DeepSpeedEngine", "Parameter"),
}
ENVIRONMENTS = [("omnitrain", "ddp"), ("omnitrain", "zero3"), ("accelerate", "fsdp2"), ("omnitrain", "fsdp2"),
                ("omnitrain", "zero2"), ("accelerate", "zero3")]  # fmt: skip
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals, and no gloo over loopback")


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "distributed")])
    # These tests are about processors, also on a machine that has more.
    on_cpu = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return programs.launch_environment(PYTHONPATH=path, **on_cpu)


@contextlib.contextmanager
def started(*command: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a launcher; at the end, its processes end with it."""
    with (
        open(cwd / "output.txt", "w") as output,
        programs.started(*command, cwd=cwd, env=environment(), stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        yield process


def run(*command: str, cwd: Path) -> tuple[int, str]:
    """Run a launcher to its end; return its exit code and all that was printed."""
    with started(*command, cwd=cwd) as process:
        code = process.wait(programs.LIMIT)
    return code, (cwd / "output.txt").read_text()


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
        assert (report["model"], report["parameter"]) == WRAPPED[way]
    weights = load_file(folder / "run" / "model" / "model.safetensors")
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)


# --- without launchers, which take longer to start than any of this


def environment_of_accelerate(way: str) -> dict[str, str]:
    """Return what `accelerate launch` sets for its processes with one of our configurations."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    words = ["--config_file", str(CONFIGS / f"{way}_cpu.yaml"), SCRIPT]
    variables: dict[str, str] = {}
    with (
        mock.patch.dict(os.environ, environment(), clear=True),
        mock.patch("torch.distributed.run.run", side_effect=lambda args: variables.update(os.environ)),
    ):
        before = dict(os.environ)
        launch_command(launch_command_parser().parse_args(words))
    assert variables, "accelerate has started nothing"
    return {name: value for name, value in variables.items() if before.get(name) != value}


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    selected = sorted({("omnitrain", "ddp"), *asked_for(request, "launcher", "way")})
    if any("zero" in way for _, way in selected):
        compile_once()
    cases = []
    for launcher, way in selected:
        name = f"{launcher}-{way}"
        (folder / name).mkdir()
        variables = Launch(SCRIPT, processes=2, **OPTIONS[way]).environment(cores=2)
        if launcher == "accelerate":
            variables = environment_of_accelerate(way)
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


def run_example(words: list[str]) -> None:
    sys.argv = [EXAMPLE, *words]
    runpy.run_path(EXAMPLE, run_name="__main__")


def test_example_resumes_on_another_number_of_processes(tmp_path: Path) -> None:
    words = {"words": ["--out", str(tmp_path / "run"), "--epochs", "1"]}
    (first,) = play([Case("one", "test_launching:run_example", words, processes=1)], tmp_path / "first")["one"]
    assert first.code == 0, first.output
    assert "1 process(es), Sequential" in first.output
    both = play([Case("both", "test_launching:run_example", words)], tmp_path / "second")["both"]
    assert [outcome.code for outcome in both] == [0, 0], both  # nothing is left to do
    printed = [outcome.output.count("2 process(es), DistributedDataParallel") for outcome in both]
    assert printed == [1, 0], "only the main process prints"


# --- real launches


@pytest.mark.parametrize(
    ("number", "code", "count"), [(signal.SIGTERM, 143, 1), pytest.param(signal.SIGINT, 130, 2, marks=pytest.mark.slow)]
)
def test_omnitrain_launch_saves_at_a_signal(number: signal.Signals, code: int, count: int, tmp_path: Path) -> None:
    with started(*OMNITRAIN, "-n", f"{count}", "-m", "launched", str(tmp_path), "--forever", cwd=tmp_path) as process:
        while not all((tmp_path / f"trains-{rank}").exists() for rank in range(count)):
            assert process.poll() is None, (tmp_path / "output.txt").read_text()
            time.sleep(0.1)
        process.send_signal(number)
        exit_code = process.wait(programs.LIMIT)
    output = (tmp_path / "output.txt").read_text()
    assert exit_code == code, output
    manifest = json.loads((tmp_path / "run" / "last" / "omnitrain.json").read_text())
    assert manifest["progress"]["step"] >= 3
    assert "Traceback" not in output or number == signal.SIGINT  # KeyboardInterrupt has one, as ever


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "command"),
    [
        ("fsdp2", [*OMNITRAIN, "-n", "2", "--fsdp", SCRIPT]),
        ("zero3", [*ACCELERATE, "--config_file", f"{CONFIGS / 'zero3'}_cpu.yaml", SCRIPT]),
    ],
)
def test_launchers_train_on_two_processes(
    way: str, command: list[str], tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    compile_once()
    code, output = run(*command, str(tmp_path), cwd=tmp_path)
    assert code == 0, output
    check(way, tmp_path, expected)


@pytest.mark.slow
def test_omnitrain_launch_exits_with_the_error_of_one_rank(tmp_path: Path) -> None:
    code, output = run(*OMNITRAIN, "-n", "2", SCRIPT, str(tmp_path), "--fail", cwd=tmp_path)
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


def forked(folder: Path, words: list[str]) -> list[Outcome]:
    """Run the script on two processes without torchrun."""
    variables = Launch(SCRIPT, processes=2).environment(cores=2)
    return play([Case("run", "launched:main", {"words": words}, environment=variables)], folder)["run"]


def test_machine_without_the_shared_folder_resumes(tmp_path: Path, uninterrupted: dict[str, torch.Tensor]) -> None:
    """Only the main process writes checkpoints, and reads them; the others get what they need from it."""
    words = [str(tmp_path), "--separate-folders", "--kill", "6"]
    killed = forked(tmp_path / "killing", words)
    assert (killed[0].code, killed[1].code) == (1, -signal.SIGKILL), killed
    resumed = forked(tmp_path / "resuming", words)
    assert [outcome.code for outcome in resumed] == [0, 0], resumed
    assert gap(state(tmp_path / "run-0"), uninterrupted) == 0
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
    restarts = [(report["node"], report["restarts"]) for report in reports(tmp_path)]
    assert restarts in ([("0", "1")] * 2, [("0", "2")] * 2), output
    assert gap(state(tmp_path / "run"), uninterrupted) == 0


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


def wait_for_end_of_workers(step: int, folder: Path) -> None:
    """Wait until the processes that have paused after a step have ended."""
    numbers = [int(path.name.split("-")[-1]) for path in folder.glob(f"pauses-{step}-*")]
    workers = [psutil.Process(number) for number in numbers if psutil.pid_exists(number)]
    _, alive = psutil.wait_procs(workers, programs.LIMIT)
    assert not alive, output_of(folder)


class Machines:
    """Machines of one process each, of which the first one has the store."""

    def __init__(self, count: int, folder: Path, stack: contextlib.ExitStack, *words: str) -> None:
        self.folder, self._stack = folder, stack
        endpoint = f"localhost:{programs.free_port()}"
        self._command = [*OMNITRAIN, "-n", "1", "--rdzv-endpoint", endpoint, "--max-restarts", "3", *words]
        self.agents: list[subprocess.Popen[str]] = []
        self._started = 0
        self.start()
        self._wait_for_store(int(endpoint.partition(":")[2]))
        for _ in range(1, count):
            self.start()

    def _wait_for_store(self, port: int) -> None:
        end = time.monotonic() + programs.LIMIT
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1):
                return
            assert time.monotonic() < end and self.agents[0].poll() is None
            time.sleep(0.1)

    def start(self) -> None:
        folder = self.folder / f"machine-{self._started}"
        folder.mkdir()
        self.agents.append(self._stack.enter_context(started(*self._command, cwd=folder)))
        self._started += 1

    def lose_one_at(self, step: int) -> None:
        """Lose the last machine, as if its power is cut, while all of them pause after a step."""
        wait_for(f"pauses-{step}-*", len(self.agents), self.folder, *self.agents)
        agent = psutil.Process(self.agents.pop().pid)
        for process in (agent, *agent.children(recursive=True)):
            process.kill()
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
