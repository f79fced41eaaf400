"""`omnitrain replay`: one step of a run once more, to the bit, with the loss and the gradient of each sample."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from forking import Case, play
from recipes import rows, small_trainer, t16
from torch import nn
from torch.utils.data import default_collate

import omnitrain
from omnitrain import ConfigError, Trace
from omnitrain.callbacks.trace import TRACED
from omnitrain.data.sampling import EpochSampler
from omnitrain.diagnostics.verify import describe_script

SCRIPT = """
import argparse
import torch
from omnitrain import AccelerateTrainer, Trace
from torch import nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=0.05)
x = torch.arange(48.0).view(12, 4) / 48
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))
trainer = AccelerateTrainer(
    model, TensorDataset(x, x.sum(1, keepdim=True)), loss_fn=nn.functional.mse_loss, batch_size=4,
    learning_rate=parser.parse_args().rate, epochs=2, save_dir="run", progress_bar=False, callbacks=[Trace()],
    overwrite=True,
)
trainer.train()
"""


def make(folder: Path, **options: Any) -> Any:
    defaults: dict[str, Any] = {"model": t16(0.2), "callbacks": [Trace()], "eval_dataset": rows(8)}
    return small_trainer(save_dir=folder, **defaults | options)


def replay(run: Path, step: int, **options: Any) -> Any:
    return omnitrain.replay(run, step, lambda: make(run, **options))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a"
    make(folder).train()
    return folder


def content(folder: Path) -> dict[Path, str]:
    return {path: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("step", [1, 4, 5, 8])
def test_replay_makes_a_step_again_to_the_bit(step: int, run: Path) -> None:
    before = content(run)
    result = replay(run, step)
    assert result.ok and sorted(result.same) == sorted(TRACED), str(result)
    assert result.checkpoint == ("checkpoint-4" if step > 4 else "") and content(run) == before
    epoch, place = divmod(step - 1, 4)
    assert result.samples == EpochSampler(16, 4).order(epoch)[4 * place : 4 * place + 4].tolist()
    assert torch.equal(result.batch[0], rows(16).tensors[0][result.samples])
    assert json.loads(json.dumps(result.to_json()))["grad_norm"] == result.grad_norm


def test_replay_measures_each_sample(trainer_class: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": trainer_class, "batch_size": 2, "gradient_accumulation_steps": 2}
    make(tmp_path, model=t16(), **options).train()
    result = replay(tmp_path, 5, model=t16(), **options)
    model, (x, y) = t16(), rows(16).tensors
    omnitrain.Trainer(model, device="cpu", loss_fn=F.mse_loss).load_checkpoint(tmp_path / "checkpoint-4")
    for sample, loss, norm in zip(result.samples, result.losses, result.grad_norms, strict=True):
        expected = F.mse_loss(model(x[[sample]]), y[[sample]])
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        assert (loss, norm) == pytest.approx((expected.item(), nn.utils.get_total_norm(gradients).item()), rel=1e-12)
    assert len(result.losses) == 4 and len(result.batch) == 2 and result.ok
    assert sum(result.losses) / 4 == pytest.approx(result.loss, rel=1e-12)


def test_replay_reports_what_disagrees(run: Path, tmp_path: Path) -> None:
    """And begins before a damaged checkpoint."""
    data = rows(16)
    data.tensors[0][:, 0] += 1e-9
    result = replay(run, 3, data=data)
    assert not result.ok and result.differs[0] == "batch" and "samples" in result.same
    assert "not as in the run: batch" in str(result)
    damaged = shutil.copytree(run, tmp_path / "a")
    (damaged / "checkpoint-4" / "model.safetensors").unlink()
    result = replay(damaged, 7)
    assert result.ok and result.checkpoint == ""


def test_replay_compares_logs_without_trace(tmp_path: Path) -> None:
    options = {"callbacks": [], "log_steps": 3}
    make(tmp_path, **options).train()
    result = replay(tmp_path, 6, **options)
    assert result.ok and result.same == ["grad_norm"]
    result = replay(tmp_path, 5, **options)
    assert result.ok and not result.same and "nothing could be compared" in str(result)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def test_replay_leaves_batch_statistics_unchanged(tmp_path: Path) -> None:
    make(tmp_path, model=normed()).train()
    result = replay(tmp_path, 6, model=normed())
    assert result.ok and len(result.losses) == 4 and "update" in result.same


def pairs_only(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if len(outputs) == 1:
        raise ValueError("a pair is needed")
    return (outputs[0] - outputs[1]).square().mean()


def two_rows(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x.repeat(2, 1), y.repeat(2, 1)


def test_replay_numbers_rows_that_are_no_samples(tmp_path: Path) -> None:
    make(tmp_path, data_collator=two_rows).train()
    result = replay(tmp_path, 2, data_collator=two_rows)
    assert result.ok and (len(result.samples), len(result.losses)) == (4, 8)
    assert "4 samples are 8 rows" in result.notes[0]
    assert str(result).splitlines()[3].split() == ["row", "loss", "gradient"]


def test_replay_says_why_samples_have_no_loss(tmp_path: Path) -> None:
    options = {"loss_fn": pairs_only, "eval_dataset": None}
    make(tmp_path, **options).train()
    result = replay(tmp_path, 2, **options)
    assert result.ok and not result.losses and len(result.samples) == 4 and "a pair is needed" in result.notes[0]


def test_replay_rejects_steps_and_folders(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, path, words in [(0, run, "step"), (9, run, "ended at step 8"), (1, tmp_path / "b", "is no folder"),
                              (1, tmp_path, "no checkpoints")]:  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            replay(path, step)
    trainer = make(tmp_path / "c")
    with pytest.raises(ConfigError, match="must return a new trainer"):
        omnitrain.replay(run, 2, lambda: trainer)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one process"):
        replay(run, 1)


def run_script(folder: str) -> None:
    """Run the script in a folder."""
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py"])
        exec(compile(SCRIPT, "train.py", "exec"), {"__name__": "__main__"})


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


@pytest.mark.processes
def test_replay_takes_a_script(script: str, command: Any, tmp_path: Path) -> None:
    run_script(str(tmp_path))
    before = content(Path())
    code, out, _ = command("replay", "run", "--step", "5", "--json", script)
    result = json.loads(out)
    assert code == 0 and len(result["losses"]) == 4 and len(result["same"]) == 7
    assert result["checkpoint"] == "checkpoint-3" and content(Path()) == before


@pytest.mark.slow
@pytest.mark.processes
def test_replay_takes_two_processes(script: str, command: Any, tmp_path: Path) -> None:
    case = Case("first", "diagnostics.test_replay:run_script", {"folder": str(tmp_path)})
    assert [rank.code for rank in play([case], tmp_path / "cases")["first"]] == [0, 0]
    code, out, _ = command("replay", "run", "--step", "3", "--json", script)  # as many as the run had
    result = json.loads(out)
    assert code == 0 and len(result["losses"]) == 8 and len(result["same"]) == 7 and not result["notes"]


@pytest.mark.slow
@pytest.mark.processes
def test_verify_rejects_script_without_trainer(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("raise SystemExit('nothing to do')")
    with pytest.raises(ConfigError, match=r"(?s)ended with exit code 1, without .*nothing to do"):
        describe_script([str(tmp_path / "none.py")], 1)


@pytest.mark.slow
@pytest.mark.processes
def test_replay_and_verify_take_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", programs.launch_environment()["PYTHONPATH"])
    options = "batch_size: 8, epochs: 2, device: cpu, progress_bar: false, save_dir: run, callbacks: [Trace]"
    parts = "model: named.Net, train_dataset: named.rows, loss_fn: named.loss"
    Path("run.yaml").write_text(f"trainer: {{{parts}, {options}}}\n")
    assert command("train", "run.yaml", "--trust")[0] == 0
    code, out, error = command("replay", "run", "--step", "5", "--json", "run.yaml", "--trust")
    assert code == 0 and len(json.loads(out)["same"]) == 7, error
    before, rate = content(Path()), ["--trainer.learning_rate", "0.1"]
    code, out, error = command("verify", "run", "--data", "run.yaml", "--trust", *rate)
    assert code == 1 and re.search("changed  setting learning_rate: was .*, is 0.1", out), error
    assert "same     data train_dataset" in out and content(Path()) == before
