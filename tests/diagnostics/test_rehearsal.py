"""`omnitrain check` and `omnitrain plan` of a script: its first trainer, before its first step."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnitrain.cli.main import main
from omnitrain.config import overrides
from omnitrain.diagnostics.script import Outcome, Script

TRAINS = """
import sys
import torch
from torch import nn
from omnitrain import Trainer

torch.manual_seed(0)
x = torch.randn(64, 4)
options = {"batch_size": 8, "loss_fn": nn.functional.mse_loss, "device": "cpu", "progress_bar": False}
options["learning_rate"] = 1e-2
epochs = int(sys.argv[1]) if sys.argv[1:] else 1
trainer = Trainer(nn.Linear(4, 1), (x, x.sum(1, keepdim=True)), epochs=epochs, save_dir="runs/a", **options)
second = Trainer(nn.Linear(3, 1), (x, x.sum(1, keepdim=True)), epochs=9, **options)
trainer.save_model("model")
"""
CONFIG = """
trainer:
  model: {class_path: torch.nn.Linear, init_args: {in_features: 4, out_features: 1}}
  train_dataset: {class_path: data.rows}
  loss_fn: torch.nn.functional.mse_loss
  batch_size: 8
  epochs: 1
  device: cpu
"""
DATA = "import torch\ndef rows():\n    x = torch.ones(64, 4)\n    return torch.utils.data.TensorDataset(x, x[:, :1])"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Write a script into the current folder; scripts then run in this process."""

    def run(script: Script, folder: Path, changes: Any, *, timeout: float, **_: Any) -> Outcome:
        output, code = folder / "output.log", 0
        words = [script.path, *script.arguments]
        monkeypatch.setattr("sys.argv", words)
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(output.open("w"))
            stack.enter_context(contextlib.redirect_stdout(file))
            stack.enter_context(contextlib.redirect_stderr(file))
            stack.enter_context(overrides.applied(changes))
            try:
                if script.path.endswith(".yaml"):
                    code = main(["train", *words])
                else:
                    runpy.run_path(script.path, run_name="__main__")
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except Exception:
                code = 1
                traceback.print_exc()
        return Outcome(code, 0.0, output)

    monkeypatch.setattr(Script, "run", run)
    monkeypatch.chdir(tmp_path)

    def write_file(content: str, name: str = "train.py") -> str:
        Path(name).write_text(textwrap.dedent(content))
        return name

    return write_file


def test_check_takes_a_script(write: Any, capsys: Any) -> None:
    """Nothing is trained or written, and what follows is not run."""
    script = write(f"{TRAINS}\ntrainer.train()\nopen('after', 'w')")
    assert main(["check", "--samples", "10", "--seconds", "1", script]) == 0
    assert capsys.readouterr().out.startswith("train.py: Trainer\nnothing found, in ")
    assert [path.name for path in Path().iterdir()] == [script]


def test_rehearsal_leaves_no_folder_of_transformers(write: Any, capsys: Any) -> None:
    pytest.importorskip("transformers")
    names = "from transformers import TrainingArguments\nfrom omnitrain import HFTrainer\n"
    arguments = "TrainingArguments('new/run', save_strategy='epoch', use_cpu=True, report_to=[], disable_tqdm=True)"
    train = f"HFTrainer(nn.Linear(4, 4), {arguments}, (x, x), loss_fn=nn.functional.mse_loss).train()"
    script = write(f"{names}{TRAINS}\n{train}")
    assert main(["plan", "--json", script]) == 0
    assert json.loads(capsys.readouterr().out)["disk"]["free"]
    assert [path.name for path in Path().iterdir()] == [script]


def test_check_exits_with_1_for_a_fault(write: Any, capsys: Any) -> None:
    assert main(["check", "--json", write(TRAINS.replace("torch.randn", "torch.zeros") + "trainer.train()")]) == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["ok"] and "features" in [finding["check"] for finding in result["findings"]]


def test_plan_takes_a_script_with_arguments(write: Any, capsys: Any) -> None:
    script = write(f"{TRAINS}\ntrainer.train()")
    assert main(["plan", "--json", script, "3"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["length"]["steps"] == 24 and result["counts"]["saves"] == 3 and result["disk"]["free"]
    assert main(["plan", "--device", "100B", "--ranks", "2", script, "3"]) == 1
    assert "12 steps, 3 epochs" in capsys.readouterr().out


def test_rehearsal_takes_the_trainer_that_trains_first(write: Any, capsys: Any) -> None:
    assert main(["plan", "--json", write(f"{TRAINS}\nsecond.save_dir\nsecond.train()\ntrainer.train()")]) == 2
    assert "mat1 and mat2" in capsys.readouterr().err
    assert main(["plan", "--json", write(f"{TRAINS}\ntrainer.train()\nsecond.train()")]) == 0
    assert json.loads(capsys.readouterr().out)["length"]["epochs"] == 1


def test_rehearsal_takes_a_configuration(write: Any, capsys: Any, tmp_path: Path) -> None:
    write(DATA, "data.py")
    assert main(["plan", "--json", write(CONFIG, "run.yaml"), "--trainer.epochs", "2", "--trust"]) == 0
    assert json.loads(capsys.readouterr().out)["length"]["steps"] == 16


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("raise RuntimeError('no data today')", r"(?s)ended with exit code 1, without calling `train\(\)`.*no data"),
        ("print('nothing to do')", r"(?s)ended with exit code 0, without calling `train\(\)` of a trainer"),
        (f"{TRAINS}\nTrainer(nn.Linear(4, 1), **options).train()", "train.py: There is nothing for `check"),
    ],
)
def test_rehearsal_that_cannot_be_tried(write: Any, capsys: Any, content: str, message: str) -> None:
    assert main(["check", write(content)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_rehearsal_rejects_wrong_options(write: Any, capsys: Any) -> None:
    script = write(f"{TRAINS}\ntrainer.train()")
    for words, message in [
        (["plan", "--device", "many", script], "is the memory of a device"),
        (["check", "-n", "0", script], "must be a number of processes"),
        (["check", "none.py"], "There is no script 'none.py'"),
    ]:
        assert main(words) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.processes
def test_check_runs_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        TRAINS.replace("Trainer", "AccelerateTrainer").replace('"device": "cpu", ', "") + "trainer.train()"
    )
    assert main(["check", "-n", "2", "train.py"]) == 0
    assert "AccelerateTrainer\nnothing found" in capsys.readouterr().out
    assert [path.name for path in Path().iterdir()] == ["train.py"]
