"""What ran: in run.json and in checkpoints, on every trainer, without secrets."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import rows, same, t16, weights

from omnitrain import AccelerateTrainer, Callback, ConfigError, HFTrainer, Trainer
from omnitrain.checkpoint import record
from omnitrain.checkpoint.disk import FileSystem
from omnitrain.checkpoint.record import Git, append_start, environment_of, read_starts
from omnitrain.checkpoint_cli import show, show_run
from omnitrain.cli import main
from omnitrain.errors import CheckpointError
from omnitrain.masking import masked, masked_command

TRAINERS = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}


def make(folder: Path | None, trainer_class: Any = Trainer, **options: Any) -> Any:
    placed = {"device": "cpu"} if trainer_class is Trainer else {}
    given: dict[str, Any] = {"loss_fn": F.mse_loss, "batch_size": 4, "epochs": 1, "progress_bar": False, **placed}
    return trainer_class(t16(), rows(16), save_dir=folder, **{**given, **options})


def starts_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "run.json").read_text())["starts"]


class Killed(BaseException):
    """Stands for a kill: nothing is put in order."""


@pytest.mark.parametrize("trainer_class", TRAINERS.values(), ids=TRAINERS)
def test_each_start_of_a_run_is_in_a_file_and_the_last_one_in_checkpoints(trainer_class: Any, tmp_path: Path) -> None:
    make(tmp_path, trainer_class, epochs=1).train()
    make(tmp_path, trainer_class, epochs=2).train(resume_from="auto")
    first, second = starts_of(tmp_path)
    assert (first["step"], first["resumed_from"]) == (0, None)
    assert (second["step"], second["resumed_from"]) == (4, "checkpoint-4")
    kept = json.loads((tmp_path / "checkpoint-8" / "omnitrain.json").read_text())["record"]
    assert kept == {name: one for name, one in second.items() if name not in ("data", "code", "settings")}
    assert second["packages"]["torch"] == torch.__version__ and second["processes"] == 1
    assert second["devices"]["kind"] == "cpu" and list(second["hosts"]) == [record.host()]
    assert second["settings"]["epochs"] == 2 and "save_dir" not in second["settings"]
    assert second["data"]["train_dataset"][""]["size"] == 16 and second["code"]["loss_fn"]
    assert second["command"][0].endswith(Path(sys.orig_argv[0]).name)


def test_other_data_have_another_digest_and_the_same_have_the_same(tmp_path: Path) -> None:
    digests = []
    for number, data in enumerate((rows(16), rows(16), rows(12))):
        Trainer(
            t16(), data, loss_fn=F.mse_loss, max_steps=1, device="cpu", progress_bar=False,
            save_dir=tmp_path / str(number),
        ).train()  # fmt: skip
        digests.append(starts_of(tmp_path / str(number))[0]["data"]["train_dataset"][""]["digest"])
    assert digests[0] == digests[1] != digests[2]


def test_a_start_is_kept_when_its_run_is_killed_and_replaced_by_that_of_another_run(tmp_path: Path) -> None:
    class Kill(Callback):
        def on_step_end(self, trainer: Any) -> None:
            assert starts_of(tmp_path)  # it is there before the first step
            raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            make(tmp_path, callbacks=[Kill()]).train(resume_from="auto")
    assert len(starts_of(tmp_path)) == 2
    make(tmp_path, overwrite=True).train()
    assert len(starts_of(tmp_path)) == 1


def test_without_a_folder_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    make(None).train()


def test_a_checkpoint_of_an_earlier_version_has_no_record_and_goes_on(tmp_path: Path) -> None:
    trainer = make(tmp_path, epochs=1)
    trainer._checkpointer._contents.identify = lambda *_: None
    trainer.train()
    with pytest.raises(ConfigError, match=r"checkpoint-4' does not say what ran"):
        show_run(tmp_path)
    make(tmp_path, epochs=2).train(resume_from="auto")
    assert len(starts_of(tmp_path)) == 1


# --- git


def in_git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def test_commit_and_whether_the_tree_was_clean_are_those_of_git(tmp_path: Path) -> None:
    in_git(tmp_path, "init", "-q", "-b", "trunk")
    (tmp_path / "a.py").write_text("1")
    in_git(tmp_path, "add", "a.py")
    in_git(tmp_path, "commit", "-qm", "a")
    (tmp_path / "untracked.py").write_text("1")
    commit = in_git(tmp_path, "rev-parse", "HEAD")
    assert Git(tmp_path).answer(30) == {"commit": commit, "branch": "trunk", "clean": True}
    (tmp_path / "a.py").write_text("2")
    assert Git(tmp_path).answer(30) == {"commit": commit, "branch": "trunk", "clean": False}


def test_without_git_or_a_repository_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Git(tmp_path)
    assert found.answer(30) is None and found.is_done
    monkeypatch.setenv("PATH", str(tmp_path))
    found = Git(tmp_path)
    assert found.is_done and found.answer() is None


def test_a_slow_git_holds_nothing_up_and_its_answer_is_added_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, may_answer = tmp_path / "git", tmp_path / "now"
    text = "# branch.oid 12\\n# branch.head trunk\\n"
    slow.write_text(f"#!/bin/sh\nwhile [ ! -e {may_answer} ]; do sleep 0.01; done\nprintf '{text}'\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    seen = []

    class Look(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == 1:
                seen.append(starts_of(tmp_path / "run")[0]["git"])
                may_answer.touch()
                git = trainer._checkpointer._contents.start._git
                git._process.wait(60)
                trainer.request_save()

        def on_save_end(self, trainer: Any) -> None:
            seen.append(starts_of(tmp_path / "run")[0]["git"])

    make(tmp_path / "run", callbacks=[Look()]).train()
    answer = {"commit": "12", "branch": "trunk", "clean": True}
    assert seen[:2] == [None, answer] and len(starts_of(tmp_path / "run")) == 1
    may_answer.unlink()
    make(tmp_path / "other").train()  # it ends before git does, which ends with it
    assert starts_of(tmp_path / "other")[0]["git"] is None


# --- secrets


def test_environment_values_are_those_of_a_list_and_none_that_look_like_secrets() -> None:
    given = {
        "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HF_TOKEN": "hf_abc", "AWS_SECRET_ACCESS_KEY": "x", "NCCL_AUTH_TOKEN": "x", "MY_OWN": "1", "PATH": "/bin",
        "TORCH_HOME": "https://me:pw@host/", "HF_HOME": "/data/hf", "TORCH_LOGS": "hf_aaaaaaaaaaaaaaaaaaaa",
    }  # fmt: skip
    assert environment_of(given) == {
        "CUDA_VISIBLE_DEVICES": "0,1", "HF_HOME": "/data/hf", "NCCL_DEBUG": "INFO",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("train.py --token=abc --lr 0.1", "train.py --token=*** --lr 0.1"),
        ("train.py --hub_token abc --lr=1", "train.py --hub_token *** --lr=1"),
        ("train.py --api-key --verbose", "train.py --api-key --verbose"),
        ("train.py +wandb.api_key=abc model=gpt2", "train.py +wandb.api_key=*** model=gpt2"),
        ("train.py --tokenizer gpt2 --max_tokens=5", "train.py --tokenizer gpt2 --max_tokens=5"),
        ("train.py hf_abcdefghijklmnop", "train.py ***"),
        ('train.py {"password":"abc","lr":1}', 'train.py {"password":"***","lr":1}'),
        ("train.py s3://me:pw@host/a/b", "train.py s3://***@host/a/b"),
        ("train.py runs/2026-01-01-resnet50-large-batch", "train.py runs/2026-01-01-resnet50-large-batch"),
        ("train.py 0123456789abcdef0123456789abcdef01234567", "train.py ***"),
    ],
)
def test_a_command_is_kept_without_its_secrets(given: str, kept: str) -> None:
    assert " ".join(masked_command(given.split())) == kept


def test_what_a_run_records_has_no_secret_of_its_command_its_environment_or_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "hf_0123456789abcdefghij"
    monkeypatch.setattr(sys, "orig_argv", ["python", str(Path.cwd() / "a.py"), f"--token={secret}", secret])
    for name in ("HF_TOKEN", "NCCL_SOMETHING", "UNKNOWN"):
        monkeypatch.setenv(name, secret)
    make(tmp_path, trial_name=secret).train()
    text = (tmp_path / "run.json").read_text()
    assert secret not in text and '"a.py"' in text and str(Path.home()) not in text.replace(sys.prefix, "")
    kept = json.loads((tmp_path / "checkpoint-4" / "omnitrain.json").read_text())
    assert secret not in json.dumps(kept["record"])


def test_masks_leave_plain_text_as_it_is() -> None:
    for text in ("omnitrain.trainers.native.Trainer", "2.13.0+cpu", "expandable_segments:True", "tokens=512", "a/b/c"):
        assert masked(text) == text


# --- the file


def test_a_failing_disk_costs_the_file_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full(FileSystem):
        def sync(self, path: Path) -> None:
            if path.name.startswith("run.json"):
                raise OSError(28, "No space left on device")
            super().sync(path)

    plain = make(tmp_path / "plain")
    plain.train()
    trainer = make(tmp_path / "run")
    trainer.store.fs = Full()
    trainer.train()
    assert same(weights(trainer.get_model()), weights(plain.get_model()))
    assert not list((tmp_path / "run").glob("run.json*")) and (tmp_path / "run" / "checkpoint-4").is_dir()
    assert caplog.text.count("run.json cannot be written") == 1


def test_a_start_that_could_not_be_written_is_written_at_the_next_save_and_replaces_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FullAtFirst(FileSystem):
        failures = 1

        def sync(self, path: Path) -> None:
            if path.name.startswith("run.json") and self.failures:
                self.failures -= 1
                raise OSError(28, "No space left on device")
            super().sync(path)

    make(tmp_path, epochs=1).train()
    before = starts_of(tmp_path)
    for failures in (1, 2):
        trainer = make(tmp_path, epochs=1 + failures)
        trainer.store.fs = FullAtFirst()
        trainer.store.fs.failures = failures
        trainer.train(resume_from="auto")
        now = starts_of(tmp_path)
        assert now[:-1] == before and len(now) == 1 + failures
        before = now
    assert caplog.text.count("run.json cannot be written") == 2


def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for text in ("{}", "[1]", "half a fi", '{"format_version": 9, "starts": []}'):
        (tmp_path / "run.json").write_text(text)
        with caplog.at_level(logging.WARNING):
            append_start(FileSystem(), tmp_path / "run.json", {"step": 0}, "all")
        assert (tmp_path / "run.json").read_text() == text and "move it away" in caplog.text
        with pytest.raises(CheckpointError, match="no record of the starts"):
            read_starts(tmp_path / "run.json")
        caplog.clear()


def test_the_file_is_whole_at_every_moment(tmp_path: Path) -> None:
    path, stop, seen = tmp_path / "run.json", threading.Event(), set()
    append_start(FileSystem(), path, {"step": 0})

    def watch() -> None:
        while not stop.is_set():
            seen.add(len(read_starts(path)))

    reader = threading.Thread(target=watch)
    reader.start()
    for step in range(1, 30):
        append_start(FileSystem(), path, {"step": step})
    append_start(FileSystem(), path, {"step": 99}, "last")
    stop.set()
    reader.join()
    assert 0 not in seen and [one["step"] for one in read_starts(path)] == [*range(29), 99]


# --- shown


def test_a_run_is_shown_with_its_starts_and_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, epochs=1).train()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "a b"])
    make(tmp_path, epochs=2).train(resume_from="auto")
    capsys.readouterr()
    assert main(["show", "run", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "checkpoint-4" in shown and "python train.py 'a b'" in shown and record.host() in shown
    changes = shown.partition("changes since start 1")[2]
    assert "settings.epochs" in changes and "environment.CUDA_VISIBLE_DEVICES" in changes
    assert "packages" not in changes and "started_at" not in changes
    show_run(tmp_path / "checkpoint-8")
    assert "python train.py 'a b'" in capsys.readouterr().out
    show(tmp_path / "checkpoint-8")
    assert "what ran" in capsys.readouterr().out


def test_a_folder_without_a_run_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "run", str(tmp_path / "none")]) == 2
    assert "none' does not exist" in capsys.readouterr().err
    assert main(["show", "run", str(tmp_path)]) == 2
    assert "has no 'run.json' and no checkpoints" in capsys.readouterr().err
    (tmp_path / "run.json").write_text("{")
    assert main(["show", "run", str(tmp_path)]) == 1
    assert "no record of the starts" in capsys.readouterr().err
