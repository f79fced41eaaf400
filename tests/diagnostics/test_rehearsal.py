"""`omnitrain check` and `omnitrain plan` of a script: its first trainer, before its first step."""

import json
import re
import runpy
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
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
CONFIG = "trainer: {model: named.Net, train_dataset: named.rows, loss_fn: named.loss, batch_size: 8, device: cpu}"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Write a script into the current folder; scripts then run in this process."""

    def run(script: Script, folder: Path, changes: Any, *, timeout: float, **_: Any) -> Outcome:
        output, code = folder / "output.log", 0
        words = [script.path, *script.arguments]
        monkeypatch.setattr("sys.argv", words)
        with output.open("w") as file, redirect_stdout(file), redirect_stderr(file), overrides.applied(changes):
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
        Path(name).write_text(content)
        return name

    return write_file


def test_check_takes_a_script(write: Any, command: Any) -> None:
    script = write(f"{TRAINS}\ntrainer.train()\nopen('after', 'w')")
    code, out, _ = command("check", "--samples", "10", "--seconds", "1", script)
    assert code == 0 and out.startswith("train.py: Trainer\nnothing found, in ")
    assert [path.name for path in Path().iterdir()] == [script]
    code, out, _ = command("check", "--json", write(TRAINS.replace("torch.randn", "torch.zeros") + "trainer.train()"))
    result = json.loads(out)
    assert code == 1 and not result["ok"] and "features" in [finding["check"] for finding in result["findings"]]


def test_rehearsal_leaves_no_folder_of_transformers(write: Any, plan: Any) -> None:
    pytest.importorskip("transformers")
    names = "from transformers import TrainingArguments\nfrom omnitrain import HFTrainer\n"
    arguments = "TrainingArguments('new/run', save_strategy='epoch', use_cpu=True, report_to=[], disable_tqdm=True)"
    train = f"HFTrainer(nn.Linear(4, 4), {arguments}, (x, x), loss_fn=nn.functional.mse_loss).train()"
    script = write(f"{names}{TRAINS}\n{train}")
    assert plan(script)["disk"]["free"]
    assert [path.name for path in Path().iterdir()] == [script]


@pytest.fixture
def plan(command: Any) -> Callable[..., Any]:

    def run(*words: str) -> Any:
        code, out, error = command("plan", "--json", *words)
        assert code == 0, error
        return json.loads(out)

    return run


def test_plan_takes_a_script_with_arguments(write: Any, command: Any, plan: Any) -> None:
    script = write(f"{TRAINS}\ntrainer.train()\nsecond.train()")
    result = plan(script, "3")
    assert result["length"]["steps"] == 24 and result["counts"]["saves"] == 3 and result["disk"]["free"]
    code, out, _ = command("plan", "--device", "100B", "--ranks", "2", script, "3")
    assert code == 1 and "12 steps, 3 epochs" in out
    assert plan(write(CONFIG, "run.yaml"), "--trainer.epochs", "2", "--trust")["length"]["steps"] == 8


@pytest.mark.parametrize(("content", "words", "message"), [
    ("raise RuntimeError('no data today')", "check", r"(?s)ended with exit code 1, without calling `train.*no data"),
    ("print('nothing to do')", "check", r"(?s)ended with exit code 0, without calling `train\(\)` of a trainer"),
    (f"{TRAINS}\nTrainer(nn.Linear(4, 1), **options).train()", "check", "train.py: There is nothing for `check"),
    # of two trainers, the one that trains first counts
    (f"{TRAINS}\nsecond.save_dir\nsecond.train()\ntrainer.train()", "plan --json", "mat1 and mat2"),
    (f"{TRAINS}\ntrainer.train()", "plan --device many", "is the memory of a device"),
    ("", "check -n 0", "must be a number of processes"),
    ("", "check none.py", "There is no script 'none.py'"),
])  # fmt: skip
def test_rehearsal_that_cannot_be_tried(write: Any, command: Any, content: str, words: str, message: str) -> None:
    code, _, error = command(*words.split(), write(content))
    assert code == 2 and re.search(message, error)


@pytest.mark.slow
@pytest.mark.processes
def test_check_runs_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.chdir(tmp_path)
    script = TRAINS.replace("Trainer", "AccelerateTrainer").replace('"device": "cpu", ', "") + "trainer.train()"
    Path("train.py").write_text(script)
    code, out, _ = command("check", "-n", "2", "train.py")
    assert code == 0 and "AccelerateTrainer\nnothing found" in out
    assert [path.name for path in Path().iterdir()] == ["train.py"]
