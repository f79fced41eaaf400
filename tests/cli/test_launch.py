"""Command line of `omnitrain launch`, and the commands and environments of its processes."""

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from forking import Case, play
from recipes import small_trainer

from omnitrain import ConfigError, MissingExtraError
from omnitrain.cli import launch
from omnitrain.cli.launch import Launch
from omnitrain.cli.main import main


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit(7)\n")
    return str(path)


MACHINES = "--rdzv-endpoint a:1 --max-restarts 3"


@pytest.mark.parametrize(("words", "expected"), [
    # what follows the script belongs to it
    ("-n 2 --zero 3 a.py -n 7 --fsdp", Launch("a.py", ["-n", "7", "--fsdp"], 2, zero=3)),
    (f"-n 4 --fsdp --cpu --nnodes 2 {MACHINES} -m package.train --lr 1",
     Launch("package.train", ["--lr", "1"], 4, True, None, True, True, "2", "a:1", 3)),
    (f"--nnodes 1:4 {MACHINES} a.py", Launch("a.py", [], machines="1:4", endpoint="a:1", max_restarts=3)),
])  # fmt: skip
def test_launch_reads_options(words: str, expected: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "start", start := mock.Mock(return_value=0))
    assert main(["launch", *words.split()]) == 0
    start.assert_called_once_with(expected)


@pytest.mark.parametrize(("options", "fragment"), [
    ({"processes": -2}, "Cannot start -2 process"), ({"machines": 0}, "on 0 machine"),
    ({"max_restarts": -1}, "-1 restarts"),
    ({"machines": "2:1", "endpoint": "a:1"}, "`--nnodes 2:1` must be a number of machines, or the fewest"),
    ({"machines": "1:2:3"}, "`--nnodes 1:2:3` must be a number"),
    ({"machines": "0:2"}, "on 0:2 machine"),
    ({"machines": "1:4", "max_restarts": 1}, "`--nnodes 1:4` needs `--rdzv-endpoint HOST:PORT`"),
    ({"machines": "1:4", "endpoint": "a:1"}, "`--nnodes 1:4` needs `--max-restarts N`"),
    ({"machines": 2}, "`--nnodes 2` needs `--rdzv-endpoint HOST:PORT`"),
    ({"endpoint": "a:1"}, "`--rdzv-endpoint a:1` is for several machines"),
    ({"script": "missing.py"}, "no script 'missing.py'"),
])  # fmt: skip
def test_check_rejects_options(options: dict[str, Any], fragment: str, script: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        Launch(**{"script": script, **options}).check()


def test_check_needs_gpus_and_deepspeed(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"`-n 3` .* \(2\)"):
        Launch(script, processes=3).check(gpus=2)
    Launch(script, processes=2).check(gpus=2)
    Launch(script, processes=3).check(gpus=0)
    Launch(script, processes=3, cpu=True).check(gpus=2)
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"-e .*\[deepspeed\]"):
        Launch(script, zero=2).check()
    Launch(script, fsdp=True).check()
    Launch("package.train", is_module=True).check()  # needs no file


SEVERAL = "--rdzv-backend c10d --rdzv-endpoint a:1"


@pytest.mark.parametrize(("options", "fragment", "absent"), [
    ({"processes": 2}, "--standalone", "--rdzv"),
    ({"machines": 3, "endpoint": "a:1"}, f"--nnodes 3 {SEVERAL}", "--standalone"),
    ({"machines": "1:4", "endpoint": "a:1", "max_restarts": 3}, f"--nnodes 1:4 {SEVERAL}", "--standalone"),
    ({"is_module": True}, " -m a.b -x", "--nnodes"),
])  # fmt: skip
def test_command_of_machines_and_modules(options: dict[str, Any], fragment: str, absent: str) -> None:
    command = " ".join(Launch("a.b", ["-x"], **options).command())
    assert fragment in command and absent not in command


FOUR = {"OMNITRAIN_NUM_PROCESSES": "4"}
SHARDED = {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "false"}


@pytest.mark.parametrize(("options", "expected"), [
    ({}, FOUR),
    ({"fsdp": True}, {**FOUR, **SHARDED, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}),
    ({"zero": 2}, {**FOUR, **SHARDED, "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}),
    ({"cpu": True}, {**FOUR, "ACCELERATE_USE_CPU": "true"}),
    ({"machines": 2, "endpoint": "a:1"}, {"OMNITRAIN_NUM_PROCESSES": "8"}),  # of all machines
    # machines that come and go
    ({"machines": "1:4", "endpoint": "a:1", "max_restarts": 3}, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
])  # fmt: skip
def test_environment_sets_only_requested_options(options: dict[str, Any], expected: dict[str, str]) -> None:
    prefixes = ("ACCELERATE_", "FSDP_", "OMNITRAIN_NUM_", "TORCH_DISABLE_")
    environment = Launch("a.py", processes=4, **options).environment(cores=8)
    assert {name: value for name, value in environment.items() if name.startswith(prefixes)} == expected


def test_environment_of_cpu_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Launch("a.py", processes=4, zero=3, cpu=True).environment(cores=8)
    assert environment["ACCELERATE_USE_CPU"] == "false"  # it would turn DeepSpeed off
    assert (environment["DS_ACCELERATOR"], environment["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert Launch("a.py", processes=2).environment(cores=9)["OMP_NUM_THREADS"] == "4"
    assert Launch("a.py", processes=9).environment(cores=2)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in Launch("a.py", processes=2).environment(cores=9)


def run_command(words: list[str]) -> None:
    sys.exit(main(words))


def train_natively() -> None:
    """Train by a native trainer in a process group whose launcher's variables are gone."""
    dist.init_process_group("gloo")
    del os.environ["RANK"]
    small_trainer().train()


@pytest.mark.processes
def test_launch_ends_with_code_or_error_of_the_script(script: str, tmp_path: Path) -> None:
    case = Case("exit", "cli.test_launch:run_command", {"words": ["launch", script]}, processes=1)
    outcomes = play([case, Case("native", "cli.test_launch:train_natively")], tmp_path / "cases")
    for name, code, message in (
        ("exit", 7, "exit code 7"),
        ("native", 1, "DistributedError: Trainer trains on one process, and this is one of 2"),
    ):  # fmt: skip
        assert all(outcome.code == code and message in outcome.output for outcome in outcomes[name])
    assert "Traceback" not in outcomes["exit"][0].output
