"""What `omnitrain launch` refuses, and what it tells torchrun and accelerate. It launches in `distributed/`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import programs
import pytest

from omnitrain import ConfigError, MissingExtraError, cli, launch
from omnitrain.launch import Launch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit(7)\n")
    return str(path)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    launches: list[Launch] = []
    monkeypatch.setattr(launch, "start", lambda one: launches.append(one) or 0)
    return launches


# What may be typed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "script"),
        (["-n", "two", "train.py"], "'two'"),
        (["--zero", "4", "train.py"], "invalid choice: 4"),
        (["--fsdp", "--zero", "3", "train.py"], "not allowed with"),
        (["--nproc-per-node", "2", "train.py"], "--nproc-per-node"),
        (["-n", "2"], "script"),
    ],
)
def test_wrong_words_exit_with_2_and_are_named(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["launch", *words])
    assert exit_.value.code == 2
    assert expected in capsys.readouterr().err


def test_words_after_the_script_are_the_scripts_own(started: list[Launch]) -> None:
    assert cli.main(["launch", "-n", "2", "--zero", "3", "train.py", "-n", "7", "--fsdp", "x"]) == 0
    assert started == [Launch("train.py", ["-n", "7", "--fsdp", "x"], processes=2, zero=3)]


def test_every_option_arrives(started: list[Launch]) -> None:
    machines = ["--nnodes", "2", "--rdzv-endpoint", "a:1", "--max-restarts", "3"]
    assert cli.main(["launch", "-n", "4", "--fsdp", "--cpu", *machines, "-m", "package.train", "--lr", "1"]) == 0
    assert started == [Launch("package.train", ["--lr", "1"], 4, True, None, True, True, 2, "a:1", 3)]


def test_what_cannot_work_exits_with_2_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "-n", "0", "train.py"]) == 2
    assert capsys.readouterr().err.startswith("omnitrain: Cannot start 0 process(es)")


# What is refused before anything starts


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"processes": 0}, "Cannot start 0 process"),
        ({"processes": -2}, "Cannot start -2 process"),
        ({"machines": 0}, "on 0 machine"),
        ({"max_restarts": -1}, "-1 restarts"),
        ({"fsdp": True, "zero": 3}, "`--fsdp` and `--zero 3` exclude each other"),
        ({"machines": "2:1", "endpoint": "a:1"}, "`--nnodes 2:1` must be a number of machines, or the fewest"),
        ({"machines": "two"}, "`--nnodes two` must be a number"),
        ({"machines": "1:2:3"}, "`--nnodes 1:2:3` must be a number"),
        ({"machines": "0:2"}, "on 0:2 machine"),
        ({"machines": "1:4", "max_restarts": 1}, "`--nnodes 1:4` needs `--rdzv-endpoint HOST:PORT`"),
        ({"machines": "1:4", "endpoint": "a:1"}, "`--nnodes 1:4` needs `--max-restarts N`"),
        ({"machines": 2}, "`--nnodes 2` needs `--rdzv-endpoint HOST:PORT`"),
        ({"endpoint": "a:1"}, "`--rdzv-endpoint a:1` is for several machines"),
        ({"script": "missing.py"}, "no script 'missing.py'"),
    ],
)
def test_what_cannot_work_is_an_error_that_names_it(options: dict[str, Any], expected: str, script: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Launch(**{"script": script, **options}).check()


def test_a_module_need_not_be_a_file() -> None:
    Launch("package.train", is_module=True).check()


def test_more_processes_than_gpus_are_refused_but_not_on_processors(script: str) -> None:
    with pytest.raises(ConfigError, match=r"`-n 3` .* \(2\)"):
        Launch(script, processes=3).check(gpus=2)
    Launch(script, processes=2).check(gpus=2)
    Launch(script, processes=3).check(gpus=0)
    Launch(script, processes=3, cpu=True).check(gpus=2)


def test_zero_without_deepspeed_names_the_extra(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"-e .*\[deepspeed\]"):
        Launch(script, zero=2).check()
    Launch(script, fsdp=True).check()


# What torchrun and accelerate are told


def test_one_machine_takes_a_free_port_and_several_meet_at_one() -> None:
    assert "--standalone" in Launch("a.py", processes=2).command()
    words = " ".join(Launch("a.py", processes=2, machines=3, endpoint="a:1").command())
    assert "--nnodes 3 --rdzv-backend c10d --rdzv-endpoint a:1" in words
    assert "--standalone" not in words


def test_a_run_whose_machines_come_and_go_has_no_number_of_processes() -> None:
    launch = Launch("a.py", processes=2, machines="1:4", endpoint="a:1", max_restarts=3)
    assert "--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint a:1" in " ".join(launch.command())
    assert "OMNITRAIN_NUM_PROCESSES" not in launch.environment(cores=8)
    assert launch.environment(cores=8)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in Launch("a.py", max_restarts=3).environment(cores=8)


def test_the_number_of_machines_is_read_from_the_command_line(started: list[Launch]) -> None:
    assert cli.main(["launch", "--nnodes", "1:4", "--rdzv-endpoint", "a:1", "--max-restarts", "1", "train.py"]) == 0
    assert cli.main(["launch", "--nnodes", "2", "--rdzv-endpoint", "a:1", "train.py"]) == 0
    assert [one.machines for one in started] == ["1:4", 2]


def test_a_module_is_started_as_one() -> None:
    assert Launch("a.b", ["-x"], is_module=True).command()[-3:] == ["-m", "a.b", "-x"]


def test_the_processes_are_told_how_many_they_are_on_all_machines() -> None:
    told = Launch("a.py", processes=4, machines=2, endpoint="a:1").environment(cores=8)
    assert told["OMNITRAIN_NUM_PROCESSES"] == "8"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"fsdp": True}, {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_DEEPSPEED": "false", "FSDP_VERSION": "2"}),
        (
            {"zero": 2},
            {
                "ACCELERATE_USE_FSDP": "false",
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
            },
        ),
        ({"cpu": True}, {"ACCELERATE_USE_CPU": "true"}),
    ],
)
def test_accelerate_is_told_what_was_asked_for_and_no_more(options: dict[str, Any], expected: dict[str, str]) -> None:
    told = Launch("a.py", processes=2, **options).environment(cores=2)
    assert {key: value for key, value in told.items() if key.startswith(("ACCELERATE_", "FSDP_"))} == expected


def test_deepspeed_on_processors_is_kept_off_the_gpus_without_accelerates_switch() -> None:
    told = Launch("a.py", processes=2, zero=3, cpu=True).environment(cores=2)
    assert (told["ACCELERATE_USE_CPU"], told["DS_ACCELERATOR"], told["CUDA_VISIBLE_DEVICES"]) == ("false", "cpu", "")


def test_processes_share_the_cores_unless_the_user_has_said_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert Launch("a.py", processes=2).environment(cores=9)["OMP_NUM_THREADS"] == "4"
    assert Launch("a.py", processes=9).environment(cores=2)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in Launch("a.py", processes=2).environment(cores=9)


# How it ends


def test_the_exit_code_is_the_scripts(script: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = programs.run(sys.executable, "-m", "omnitrain.cli", "launch", script, env=environment)
    assert done.returncode == 7
    assert "exit code 7" in done.stderr
    assert "Traceback" not in done.stderr
