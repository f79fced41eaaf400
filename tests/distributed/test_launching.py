"""What launchers ask for, on two processes; and real launches: their exit codes, and signals."""

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

import programs
import pytest
import torch
from compiled import compile_once
from forking import Case, Found, Outcome, play
from launched import native
from safetensors.torch import load_file

from omnitrain.launch import Launch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "tests" / "distributed" / "launched.py")
EXAMPLE = str(ROOT / "examples" / "multi_gpu.py")
CONFIGS = ROOT / "examples" / "accelerate_configs"
OMNITRAIN = [sys.executable, "-m", "omnitrain.cli", "launch", "-n", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
WAYS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp2": {"fsdp": True}, "zero2": {"zero": 2}, "zero3": {"zero": 3}}
WRAPPED = {
    "ddp": ("DistributedDataParallel", "Parameter"),
    "fsdp2": ("FSDPSequential", "DTensor"),
    "zero2": ("DeepSpeedEngine", "Parameter"),
    "zero3": ("DeepSpeedEngine", "Parameter"),
}
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals, and no gloo over loopback")


def environment() -> dict[str, str]:
    unwanted = ("ACCELERATE_", "FSDP_", "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "OMNITRAIN_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "distributed")])
    # These tests are about processors, also on a machine that has more.
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


@contextlib.contextmanager
def started(*command: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a launcher; at the end, its processes end with it."""
    compile_once()
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


def said(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def on_one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach() for name, tensor in native(tmp_path_factory.mktemp("native")).model.named_parameters()
    }


def check(way: str, folder: Path, expected: dict[str, torch.Tensor]) -> None:
    for one in said(folder):
        assert (one["world_size"], one["step"]) == (2, 12)
        assert (one["model"], one["parameter"]) == WRAPPED[way]
    found = load_file(folder / "run" / "model" / "model.safetensors")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# --- without their launchers, which take longer to start than any of this


def run_example(words: list[str]) -> None:
    """Run the example as its own program would."""
    sys.argv = [EXAMPLE, *words]
    runpy.run_path(EXAMPLE, run_name="__main__")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launching")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Found[list[Outcome]]:
    compile_once()
    cases = []
    for way, options in WAYS.items():
        (folder / way).mkdir()
        asked = Launch(SCRIPT, processes=2, **options).environment(cores=2)
        cases.append(Case(way, "launched:main", {"words": [str(folder / way)]}, environment=asked))
    return play(cases, folder / "cases")


@pytest.mark.parametrize("way", WAYS)
def test_what_omnitrain_launch_asks_for_is_what_trains(
    way: str, outcomes: Found[list[Outcome]], folder: Path, on_one_process: dict[str, torch.Tensor]
) -> None:
    for outcome in outcomes[way]:
        assert outcome.code == 0, outcome.output
    check(way, folder / way, on_one_process)


def test_the_example_goes_on_where_it_was_stopped_on_another_number_of_processes(tmp_path: Path) -> None:
    words = {"words": ["--out", str(tmp_path / "run"), "--epochs", "1"]}
    alone = Case("alone", "test_launching:run_example", words, processes=1)
    (first,) = play([alone], tmp_path / "first")["alone"]
    assert first.code == 0, first.output
    assert "1 process(es), Sequential" in first.output
    both = play([Case("both", "test_launching:run_example", words)], tmp_path / "second")["both"]
    assert [one.code for one in both] == [0, 0], both  # nothing is left to do
    printed = [one.output.count("2 process(es), DistributedDataParallel") for one in both]
    assert printed == [1, 0], "the main process alone prints"


# --- real launches


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("ddp", ["-m", "launched"]),
        pytest.param("zero2", ["--zero", "2", "-m", "launched"], marks=pytest.mark.slow),
        pytest.param("ddp", [SCRIPT], marks=pytest.mark.slow),
        pytest.param("fsdp2", ["--fsdp", SCRIPT], marks=pytest.mark.slow),
        pytest.param("zero3", ["--zero", "3", SCRIPT], marks=pytest.mark.slow),
    ],
)
def test_omnitrain_launch_trains_on_two_processes_by_a_script_or_a_module(
    way: str, options: list[str], tmp_path: Path, on_one_process: dict[str, torch.Tensor]
) -> None:
    code, output = run(*OMNITRAIN, *options, str(tmp_path), cwd=tmp_path)
    assert code == 0, output
    check(way, tmp_path, on_one_process)


@pytest.mark.parametrize(
    "way", ["fsdp2", *(pytest.param(one, marks=pytest.mark.slow) for one in WAYS if one != "fsdp2")]
)
def test_accelerate_launch_trains_on_two_processes_with_our_config_files(
    way: str, tmp_path: Path, on_one_process: dict[str, torch.Tensor]
) -> None:
    config = str(CONFIGS / f"{way}_cpu.yaml")
    code, output = run(*ACCELERATE, "--config_file", config, SCRIPT, str(tmp_path), cwd=tmp_path)
    assert code == 0, output
    check(way, tmp_path, on_one_process)


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.stem)
def test_accelerate_knows_every_word_of_our_config_files(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(path)).num_processes == 2


def test_an_error_of_one_process_ends_all_and_is_the_exit_code(tmp_path: Path) -> None:
    code, output = run(*OMNITRAIN, SCRIPT, str(tmp_path), "--fail", cwd=tmp_path)
    assert code == 1
    assert "RuntimeError: as was asked for" in output
    assert "rank 1 was the first to end with an error: exit code 1" in output


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_launcher_saves_and_is_the_exit_code(
    number: signal.Signals, expected: int, tmp_path: Path
) -> None:
    with started(*OMNITRAIN, SCRIPT, str(tmp_path), "--forever", cwd=tmp_path) as process:
        while not all((tmp_path / f"trains-{rank}").exists() for rank in range(2)):
            assert process.poll() is None, (tmp_path / "output.txt").read_text()
            time.sleep(0.1)
        process.send_signal(number)
        code = process.wait(programs.LIMIT)
    output = (tmp_path / "output.txt").read_text()
    assert code == expected, output
    manifest = json.loads((tmp_path / "run" / "last" / "omnitrain.json").read_text())
    assert manifest["progress"]["step"] >= 3
    assert "Traceback" not in output or number == signal.SIGINT  # KeyboardInterrupt has one, as ever
