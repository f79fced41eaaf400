"""The record of the starts of a run, in run.json and in checkpoints, without secrets."""

import json
import logging
import os
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import programs
import pytest
from forging import content_of, seal
from marks import make_small
from recipes import callback, rows, t16
from resuming import Killed

from omnitrain.checkpoint import run_record
from omnitrain.checkpoint.run_record import append_start, code_in, read_starts, recorded_environment
from omnitrain.cli.checkpoint import record, show
from omnitrain.cli.main import main
from omnitrain.core.errors import CheckpointError
from omnitrain.core.files import replace_file
from omnitrain.core.secrets import mask_command, mask_text


def make(folder: Path | None, kind: Any = "native", size: int = 16, **options: Any) -> Any:
    return make_small(kind, t16(), rows(size), save_dir=folder, **{"epochs": 1, **options})


def starts_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "run.json").read_text())["starts"]


def test_record_has_each_start_and_checkpoints_the_last(trainer_class: Any, tmp_path: Path) -> None:
    for epochs in (1, 2):
        make(tmp_path, trainer_class, epochs=epochs).train(resume_from="auto")
    first, second = starts_of(tmp_path)
    assert (first["step"], first["resumed_from"]) == (0, None)
    assert (second["step"], second["resumed_from"]) == (4, "checkpoint-4")
    saved = content_of(tmp_path / "checkpoint-8")["record"]
    assert saved == {key: value for key, value in second.items() if key not in ("data", "code", "settings")}
    assert second["packages"]["torch"] == version("torch") and second["processes"] == 1
    assert second["devices"]["kind"] == "cpu" and list(second["hosts"]) == [socket.gethostname()]
    assert second["settings"]["epochs"] == 2 and "save_dir" not in second["settings"]
    assert second["data"]["train_dataset"][""]["size"] == 16 and second["code"]["loss_fn"]
    assert second["command"][0].endswith(Path(sys.orig_argv[0]).name)
    make(tmp_path / "other", trainer_class, size=12).train()
    starts = first, second, *starts_of(tmp_path / "other")
    digests = [start["data"]["train_dataset"][""]["digest"] for start in starts]
    assert digests[0] == digests[1] != digests[2]


def test_record_keeps_killed_starts_until_another_run(tmp_path: Path) -> None:
    def kill(trainer: Any) -> None:
        assert starts_of(tmp_path)  # written before the first step
        raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            make(tmp_path, callbacks=[callback(on_step_end=kill)]).train(resume_from="auto")
    assert len(starts_of(tmp_path)) == 2
    make(tmp_path, overwrite=True).train()
    assert len(starts_of(tmp_path)) == 1


@pytest.mark.processes
def test_git_reports_commit_branch_and_clean(real_git: None, tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return programs.run(*command, check=True).stdout.strip()

    git("init", "-q", "-b", "trunk")
    (tmp_path / "a.py").write_text("1")
    git("add", "a.py")
    git("commit", "-qm", "a")
    (tmp_path / "untracked.py").write_text("1")
    commit = git("rev-parse", "HEAD")
    for text, clean in (("1", True), ("2", False)):
        (tmp_path / "a.py").write_text(text)
        assert run_record.Git(tmp_path).answer(300) == {"commit": commit, "branch": "trunk", "clean": clean}


@pytest.mark.processes
def test_git_or_repository_may_be_missing(real_git: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = run_record.Git(tmp_path)
    assert git.answer(300) is None and git.is_done
    monkeypatch.setenv("PATH", str(tmp_path))
    git = run_record.Git(tmp_path)
    assert git.is_done and git.answer() is None
    monkeypatch.setattr(subprocess, "Popen", None)
    make(None).train()  # has no record


@pytest.mark.processes
def test_git_that_is_slow_is_recorded_by_a_later_save(real_git: None, tmp_path: Path, monkeypatch: Any) -> None:
    git, go = tmp_path / "git", tmp_path / "go"
    text = "# branch.oid 12\\n# branch.head trunk\\n"
    git.write_text(f"#!/bin/sh\nwhile [ ! -e {go} ]; do sleep 0.01; done\nprintf '{text}'\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def save_until_answered(trainer: Any) -> None:
        if trainer.progress.step == 1:
            assert starts_of(tmp_path / "run")[0]["git"] is None
            go.touch()
        trainer.request_save()

    stop = callback(
        on_step_end=save_until_answered,
        on_save_end=lambda trainer: starts_of(tmp_path / "run")[0]["git"] and trainer.stop(),
    )
    with code_in(tmp_path):  # pytest, which runs as the script, has no repository
        make(tmp_path / "run", callbacks=[stop], epochs=10**6, save_total_limit=1).train()
        go.unlink()
        make(tmp_path / "other").train()  # ends before git, which ends with it
    (start,) = starts_of(tmp_path / "run")
    assert start["git"] == {"commit": "12", "branch": "trunk", "clean": True}
    assert starts_of(tmp_path / "other")[0]["git"] is None


def test_environment_of_known_variables_without_secrets() -> None:
    variables = {
        "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HF_TOKEN": "hf_abc", "AWS_SECRET_ACCESS_KEY": "x", "NCCL_AUTH_TOKEN": "x", "MY_OWN": "1", "PATH": "/bin",
        "TORCH_HOME": "https://me:pw@host/", "HF_HOME": "/data/hf", "TORCH_LOGS": "hf_aaaaaaaaaaaaaaaaaaaa",
    }  # fmt: skip
    recorded = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "NCCL_DEBUG", "PYTORCH_CUDA_ALLOC_CONF")
    assert recorded_environment(variables) == {name: variables[name] for name in recorded}


def test_masked_commands_and_texts() -> None:
    for words in (
        "--token=(abc) --lr 0.1", "--hub_token (abc) --lr=1", "--api-key --verbose",
        "+wandb.api_key=(abc) model=gpt2", "--tokenizer gpt2 --max_tokens=5", "(hf_abcdefghijklmnop)",
        '{"password":"(abc)","lr":1}', "s3://(me:pw)@host/a/b", "runs/2026-01-01-resnet50-large-batch",
        "(0123456789abcdef0123456789abcdef01234567)",
    ):  # fmt: skip
        command = ["train.py", *re.sub("[()]", "", words).split()]
        assert " ".join(mask_command(command)) == "train.py " + re.sub(r"\(.*?\)", "***", words)
    for text in (
        "aws_secret_access_key=(wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY)",
        "key (wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEK1Y).", "Driver=ODBC;Uid=me;Pwd=(horse);Server=x",
        "s3://(KEY:sec/ret)@bucket/run", 'Invalid bucket name "(KEY:sec/ret)@bucket"',
        "omnitrain.trainer.native.Trainer", "2.13.0+cpu", "expandable_segments:True", "tokens=512", "a/b/c",
        "/data/User1/projects/abcdefgh/ijklmnopqr", "me@host at 12:30, lr=0.1, max_tokens=5",
    ):  # fmt: skip
        assert mask_text(re.sub("[()]", "", text)) == re.sub(r"\(.*?\)", "***", text)


def test_record_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hf_0123456789abcdefghij"
    monkeypatch.setattr(sys, "orig_argv", ["python", str(Path.cwd() / "a.py"), f"--token={secret}", secret])
    for name in ("HF_TOKEN", "NCCL_SOMETHING", "UNKNOWN"):
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("HF_HOME", str(Path.home() / "hub"))
    make(tmp_path, trial_name=secret).train()
    text = (tmp_path / "run.json").read_text()
    assert '"a.py"' in text and '"~/hub"' in text and str(Path.home()) not in text.replace(sys.prefix, "")
    assert secret not in text + json.dumps(content_of(tmp_path / "checkpoint-4")["record"])


def test_record_is_retried_at_the_next_save(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that could not be written is added then, and replaces no earlier one."""
    failures: list[OSError] = []

    def replace_or_fail(path: Path, content: bytes) -> None:
        if path.name == "run.json" and failures:
            raise failures.pop()
        replace_file(path, content)

    monkeypatch.setattr(run_record, "replace_file", replace_or_fail)
    starts: list[Any] = []
    for count in (0, 1, 2):
        failures += [OSError(28, "No space left on device")] * count
        make(tmp_path, epochs=1 + count).train(resume_from="auto")
        assert not failures and starts_of(tmp_path)[:-1] == starts
        starts = starts_of(tmp_path)
    assert len(starts) == 3 and caplog.text.count("run.json cannot be written") == 2


@pytest.mark.parametrize("text", ["[1]", "half a fi", '{"format_version": 9, "starts": []}'])
def test_record_does_not_overwrite_other_content(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        append_start(tmp_path / "run.json", {"step": 0}, "all")
    assert (tmp_path / "run.json").read_text() == text and "move it away" in caplog.text
    with pytest.raises(CheckpointError, match="no record of the starts"):
        read_starts(tmp_path / "run.json")


def test_record_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    for step in range(3):
        append_start(path, {"step": step})
    append_start(path, {"step": 99}, "last")
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        append_start(path, {"step": 100})
    assert [start["step"] for start in read_starts(path)] == [0, 1, 99]


def test_record_lists_starts_and_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    make(tmp_path, epochs=1).train()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "a b"])
    make(tmp_path, epochs=2).train(resume_from="auto")
    capsys.readouterr()
    assert main(["checkpoint", "record", str(tmp_path)]) == 0
    output, _, changes = capsys.readouterr().out.partition("changes since start 1")
    assert "checkpoint-4" in output and "python train.py 'a b'" in output and socket.gethostname() in output
    assert "settings.epochs" in changes and "environment.CUDA_VISIBLE_DEVICES" in changes
    assert "packages" not in changes and "started_at" not in changes
    record(tmp_path / "checkpoint-8")
    assert "python train.py 'a b'" in capsys.readouterr().out
    show(tmp_path / "checkpoint-8")
    assert "what ran" in capsys.readouterr().out


def test_record_rejects_folders_without_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "run").train()
    checkpoint = tmp_path / "run" / "checkpoint-4"
    seal(checkpoint, content_of(checkpoint) | {"record": None})
    (tmp_path / "run" / "run.json").unlink()
    for name in ("empty", "torn"):
        (tmp_path / name).mkdir()
    (tmp_path / "torn" / "run.json").write_text("{")
    for name, code, message in (
        ("none", 2, "none' does not exist"), ("empty", 2, "has no 'run.json' and no checkpoints"),
        ("torn", 1, "no record of the starts"), ("run", 2, "checkpoint-4' has no record of its run"),
    ):  # fmt: skip
        assert main(["checkpoint", "record", str(tmp_path / name)]) == code
        assert message in capsys.readouterr().err
