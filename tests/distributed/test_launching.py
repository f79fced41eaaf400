"""Real launches: `omnitrain launch` and `accelerate launch` on two processes, their exit codes, and signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import native
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "tests" / "distributed" / "launched.py")
EXAMPLE = str(ROOT / "examples" / "accelerate_train.py")
CONFIGS = ROOT / "examples" / "accelerate_configs"
OMNITRAIN = [sys.executable, "-m", "omnitrain.cli", "launch", "-n", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
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
    with open(cwd / "output.txt", "w") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=environment(), stdout=output, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
            process.kill()
            process.wait()


def run(*command: str, cwd: Path, timeout: float = 90) -> tuple[int, str]:
    """Run a launcher to its end; return its exit code and all that was printed."""
    with started(*command, cwd=cwd) as process:
        code = process.wait(timeout)
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


@pytest.mark.parametrize(
    ("way", "options"), [("ddp", []), ("fsdp2", ["--fsdp"]), ("zero2", ["--zero", "2"]), ("zero3", ["--zero", "3"])]
)
def test_omnitrain_launch_trains_on_two_processes(
    way: str, options: list[str], tmp_path: Path, on_one_process: dict[str, torch.Tensor]
) -> None:
    code, output = run(*OMNITRAIN, *options, SCRIPT, str(tmp_path), cwd=tmp_path)
    assert code == 0, output
    check(way, tmp_path, on_one_process)


@pytest.mark.parametrize("way", WRAPPED)
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


def test_the_example_goes_on_where_it_was_stopped_on_another_number_of_processes(tmp_path: Path) -> None:
    words = [EXAMPLE, "--out", str(tmp_path / "run"), "--epochs"]
    code, output = run(sys.executable, *words, "1", cwd=tmp_path)
    assert code == 0, output
    assert "1 process(es), Sequential" in output
    code, output = run(*OMNITRAIN, *words, "1", cwd=tmp_path)  # nothing is left to do
    assert code == 0, output
    assert output.count("2 process(es), DistributedDataParallel") == 1, "the main process alone prints"


def test_a_module_is_launched_by_its_name(tmp_path: Path) -> None:
    code, output = run(*OMNITRAIN, "-m", "launched", str(tmp_path), cwd=tmp_path)
    assert code == 0, output
    assert [one["world_size"] for one in said(tmp_path)] == [2, 2]


def test_an_error_of_one_process_ends_all_and_is_the_exit_code(tmp_path: Path) -> None:
    code, output = run(*OMNITRAIN, SCRIPT, str(tmp_path), "--fail", cwd=tmp_path)
    assert code == 1
    assert "RuntimeError: as was asked for" in output
    assert "rank 1 was the first to end with an error: exit code 1" in output


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_launcher_saves_and_is_the_exit_code(
    number: signal.Signals, expected: int, tmp_path: Path
) -> None:
    with started(*OMNITRAIN, SCRIPT, str(tmp_path), "--forever", cwd=tmp_path) as process:
        end = time.monotonic() + 60
        while not all((tmp_path / f"trains-{rank}").exists() for rank in range(2)):
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "output.txt").read_text()
            time.sleep(0.1)
        process.send_signal(number)
        code = process.wait(40)
    output = (tmp_path / "output.txt").read_text()
    assert code == expected, output
    manifest = json.loads(
        (tmp_path / "run" / (tmp_path / "run" / "last").read_text().strip() / "omnitrain.json").read_text()
    )
    assert manifest["progress"]["step"] >= 3
    assert "Traceback" not in output or number == signal.SIGINT  # KeyboardInterrupt has one, as ever
