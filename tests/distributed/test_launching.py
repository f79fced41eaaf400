"""Environments of launchers on two processes; and real launches: their exit codes, and signals."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import programs
import pytest
import torch
from backends import asked_for
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
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
OPTIONS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp2": {"fsdp": True}, "zero2": {"zero": 2}, "zero3": {"zero": 3}}
WRAPPED = {
    "ddp": ("DistributedDataParallel", "Parameter"),
    "fsdp2": ("FSDPSequential", "DTensor"),
    "zero2": ("DeepSpeedEngine", "Parameter"),
    "zero3": ("DeepSpeedEngine", "Parameter"),
}
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals, and no gloo over loopback")


def environment() -> dict[str, str]:
    unwanted = ("ACCELERATE_", "FSDP_", "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "OMNITRAIN_")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "distributed")])
    # These tests are about processors, also on a machine that has more.
    return variables | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


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
    selected = sorted(asked_for(request, "launcher", "way"))
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


@pytest.mark.parametrize(
    ("launcher", "way"),
    thinned(
        [(launcher, way) for launcher in ("omnitrain", "accelerate") for way in OPTIONS],
        [("omnitrain", "ddp"), ("omnitrain", "zero3"), ("accelerate", "fsdp2")],
    ),
)  # fmt: skip
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
        ("zero2", [*OMNITRAIN, "-n", "2", "--zero", "2", "-m", "launched"]),
        *((way, [*ACCELERATE, "--config_file", f"{CONFIGS / way}_cpu.yaml", SCRIPT]) for way in ("ddp", "zero3")),
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
