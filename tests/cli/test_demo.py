import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from forking import Case, play
from recipes import assert_equal, small_trainer
from safetensors.torch import load_file

import omnitrain
from omnitrain import BaseTrainer, ConfigError, HFTrainer, MetricsDict, Trainer
from omnitrain.checkpoint import run_record
from omnitrain.cli import demo
from omnitrain.cli.main import main

SHORT = {"epochs": 1, "progress_bar": False}


Finished = tuple[BaseTrainer, Path, str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A short demo: its trainer, folder, and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "demo"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer = demo.digits(Trainer, out, **SHORT)
    return trainer, out, printed.getvalue()


def test_demo_records_the_commit_of_the_package(tmp_path: Path, monkeypatch: Any, real_git: None) -> None:
    """Not of the repository in which the command was given; of an installed package there is none."""
    folders: list[Path] = []

    class Installed(run_record.Git):
        def __init__(self, folder: Path) -> None:
            folders.append(folder)
            super().__init__(folder / "site-packages")
            assert self.is_done  # without a process

    monkeypatch.setattr(run_record, "Git", Installed)
    monkeypatch.setattr(demo, "digits", lambda kind, out: small_trainer(kind=kind, save_dir=out).train())
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    assert folders == [Path(omnitrain.__file__).parent]
    assert [start["git"] for start in json.loads((tmp_path / "demo" / "run.json").read_text())["starts"]] == [None]


def on_two(folder: str) -> None:
    os.chdir(folder)
    sys.exit(main(["demo", "--trainer", "accelerate"]))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no gloo over loopback")
def test_digits_on_two_processes(tmp_path: Path) -> None:
    """They are learned well, and the run stops early."""
    case = Case("demo", "cli.test_demo:on_two", {"folder": str(tmp_path)})
    ends = play([case], tmp_path / "case")["demo"]
    assert [(end.code, end.output.count("images that it never saw")) for end in ends] == [(0, 1), (0, 0)], ends
    out = tmp_path / "runs" / "demo"
    metrics = MetricsDict.from_json(out / "metrics.json")
    assert metrics["test"][-1]["accuracy"] >= 0.96 and metrics["stop_reason"] == "early_stopping"
    assert {"curves.png", "metrics.jsonl", "model", "demo.json"} <= {path.name for path in out.iterdir()}
    assert json.loads((out / "demo.json").read_text())["trainer"] == "AccelerateTrainer"


def test_demo_saves_and_prints_results(finished: Finished) -> None:
    trainer, out, printed = finished
    weights = {name: tensor.cpu() for name, tensor in trainer.get_model().state_dict().items()}
    assert_equal(load_file(out / "model" / "model.safetensors"), weights)
    assert MetricsDict.from_json(out / "metrics.json") == trainer.metrics
    kinds = {json.loads(line)["kind"] for line in (out / "metrics.jsonl").read_text().splitlines()}
    assert kinds == {"train", "eval", "test"} and (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert str(trainer.metrics) in printed
    accuracy = trainer.metrics["test"][-1]["accuracy"]
    assert f"never saw: {accuracy:.4f}" in printed and accuracy > 0.5  # by chance: 0.1
    parts = [set(part.indices) for part in (trainer.train_dataset, trainer.eval_dataset, trainer.test_dataset)]
    assert [len(part) for part in parts] == [1200, 297, 300] and set.union(*parts) == set(range(1797))


def test_demo_without_matplotlib_on_hf_trainer(finished: Any, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "demo"
    assert demo.digits(HFTrainer, out, **SHORT).metrics == finished[0].metrics
    assert json.loads((out / "demo.json").read_text())["trainer"] == "HFTrainer"
    assert "pip install -e '.[plot]'" in capsys.readouterr().out
    assert (out / "metrics.json").exists() and not (out / "curves.png").exists()


def test_demo_deletes_only_results_of_earlier_demo(finished: Finished, tmp_path: Path) -> None:
    out = shutil.copytree(finished[1], tmp_path / "demo")
    (out / "notes.txt").write_text("mine")
    with mock.patch.object(Trainer, "train", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        demo.digits(Trainer, out, **SHORT)
    names = {path.name for path in out.iterdir()}
    assert "notes.txt" in names and not names & {"metrics.json", "metrics.jsonl", "curves.png"}


def test_demo_rejects_other_folders(tmp_path: Path) -> None:
    file = tmp_path / "metrics.json"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"was not made by the demo.*--out"):
        demo.digits(Trainer, tmp_path, **SHORT)
    assert list(tmp_path.iterdir()) == [file] and file.read_text() == "mine"
    with pytest.raises(ConfigError, match=r"save_dir.*demo.* is a file"):
        demo.digits(Trainer, file / "demo", **SHORT)
