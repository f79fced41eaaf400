"""Export of the model to one file: same outputs for any batch, with a card."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import TRAINERS
from recipes import callback, fit, rows, t16
from tiny import Tokens, gpt
from torch import nn

from omnitrain import EMA, AccelerateTrainer, ConfigError, MissingExtraError, StepOutput, Trainer


class Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def load(path: Path) -> Any:
    return torch.export.load(path).module()


def make(model: nn.Module, cls: Any = Trainer, **options: Any) -> Any:
    defaults = {"loss_fn": F.mse_loss, "batch_size": 2, "epochs": 1}
    return cls(model, rows(16), rows(5), **{**defaults, **options})


@pytest.mark.parametrize("name", TRAINERS)
def test_exported_model_gives_the_same_outputs(name: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
    trainer = fit(make(model, TRAINERS[name], algorithms=[EMA(0.5)]))
    model.train()
    before, random_state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    path = trainer.export(tmp_path / "a" / "model.pt2")
    assert model.training and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    program, model = load(path), model.eval()
    for size in (1, 7):
        inputs = rows(size)[:][0]
        torch.testing.assert_close(program(inputs), model(inputs), rtol=1e-12, atol=1e-12)
    card = (tmp_path / "a" / "model.pt2.md").read_text()
    assert "| input | `input` | float64 | (batch, 4) |" in card and "| output | `0` | float64 | (batch, 1) |" in card
    assert "after step 8 " in card and f"eval_loss {trainer.metrics['best_valid']['eval_loss']:.4g}" in card
    with pytest.raises(ConfigError, match=r"model.pt2' exists already. Pass overwrite=True"):
        trainer.export(path)
    assert trainer.export(path, overwrite=True) == path and len(list(path.parent.iterdir())) == 2


def test_export_in_a_run_has_the_weights_of_evaluations(tmp_path: Path) -> None:
    def export(trainer: Any) -> None:
        if trainer.progress.step == 5:
            program = load(trainer.export(tmp_path / "model.pt2"))
            expected.append((program(rows(3)[:][0]), torch.as_tensor(trainer.predict(rows(3)).predictions)))

    expected: list[Any] = []
    make(t16(), algorithms=[EMA(0.5)], callbacks=[callback(on_step_end=export)], learning_rate=0.1).train()
    torch.testing.assert_close(*expected[0], rtol=1e-12, atol=1e-12)


def test_exported_language_model_takes_any_length(tmp_path: Path) -> None:
    trainer = Trainer(gpt(), Tokens(4), Tokens(4), batch_size=1)
    program = load(trainer.export(tmp_path / "model.pt2"))
    assert "forward" not in vars(trainer.model)
    ids = torch.arange(15).view(3, 5)
    torch.testing.assert_close(program(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)


def no_model(batch: Any) -> StepOutput:
    return StepOutput(batch[0].mean(), batch[0], batch[1])


@pytest.mark.parametrize(("make_trainer", "file", "message"), [
    (lambda: make(t16()), "model.txt", "must end with '.pt2' or '.onnx', got 'model.txt'"),
    (lambda: make(Branching(4, 1).double()), "model.pt2", "Branching cannot be exported: .*See the limits of"),
    (lambda: make(t16(), loss_fn=None, unit=no_model), "model.pt2", "The .* never calls the model"),
    (lambda: AccelerateTrainer(t16()), "model.pt2", "pass `eval_dataset` to the constructor"),
])  # fmt: skip
def test_export_rejects(make_trainer: Any, file: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer().export(tmp_path / file)
    assert not list(tmp_path.iterdir())


def test_export_to_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, path = make(t16()), tmp_path / "model.onnx"
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    with pytest.raises(MissingExtraError, match="Export to ONNX needs onnx"):
        trainer.export(path)
    monkeypatch.undo()
    reference = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    session = reference.ReferenceEvaluator(str(trainer.export(path)))
    inputs = rows(7)[:][0]
    (outputs,) = session.run(None, {session.input_names[0]: inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(outputs), trainer.model.eval()(inputs).detach())
