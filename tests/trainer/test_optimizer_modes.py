"""Optimizers with `train()` and `eval()`, which change the weights for evaluations, as schedule-free ones do."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import TRAINERS
from recipes import Keyed, KeyedModel, ScheduleFree, StopAt, fit, trainer_on_cpu
from safetensors.torch import load_file
from torch import nn

from omnitrain import ConfigError


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def reference(steps: int) -> tuple[dict[str, torch.Tensor], float]:
    """Return what a loop written by hand ends with: the weights of evaluations, and their loss."""
    model, data = KeyedModel().double(), Keyed(20)
    optimizer = ScheduleFree(model.parameters())
    optimizer.train()
    x, y = data.x.double(), data.y.double()
    for step in range(steps):
        rows = slice(step * 5 % 20, step * 5 % 20 + 5)
        optimizer.zero_grad()
        F.mse_loss(model.body(x[rows]), y[rows]).backward()
        optimizer.step()
    optimizer.eval()
    return weights_of(model), F.mse_loss(model.body(x), y).item()


def build(kind: str, save_dir: Path | None = None, **options: Any) -> Any:
    class Doubles(Keyed):
        def __init__(self) -> None:
            super().__init__(20)
            self.x, self.y = self.x.double(), self.y.double()

    options = {
        "batch_size": 5, "epochs": 2, "shuffle": False, "max_grad_norm": None, "optimizer": ScheduleFree,
        "learning_rate": 0.05, "eval_dataset": Doubles(), "load_best_at_end": False, **options,
    }  # fmt: skip
    return trainer_on_cpu(TRAINERS[kind], KeyedModel().double(), Doubles(), save_dir=save_dir, **options)


@pytest.fixture(params=TRAINERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def close(tensors: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(tensors[name], other[name], rtol=1e-10) for name in other)


def test_optimizer_modes_follow_evaluations_saves_and_a_resume(kind: str, tmp_path: Path) -> None:
    """What is evaluated, saved and left in the model are the weights of `eval()`; training has those of `train()`.

    These are the same to the bit with more evaluations, and with a resume.
    """
    straight = fit(build(kind, eval_dataset=None, load_best_at_end=None))
    build(kind, tmp_path, eval_steps=1, save_steps=3, callbacks=[StopAt(3)]).train()
    trainer = fit(build(kind, tmp_path, eval_steps=1, save_steps=3), resume_from="auto")
    for row in trainer.metrics["valid"]:
        expected, loss = reference(row["step"])
        assert row["eval_loss"] == pytest.approx(loss, rel=1e-10)
    assert close(load_file(tmp_path / "checkpoint-3" / "model.safetensors"), reference(3)[0])
    assert close(weights_of(trainer.model), expected)
    assert not any(group["train_mode"] for group in trainer.optimizer.param_groups)
    assert trainer.evaluate()["eval_loss"] == trainer.metrics["valid"][-1]["eval_loss"]
    for name, weight in weights_of(straight.model).items():
        assert torch.equal(trainer.model.state_dict()[name], weight)


def test_optimizer_modes_survive_the_best_and_a_longer_run(kind: str) -> None:
    straight = fit(build(kind, epochs=3))
    longer = fit(build(kind, load_best_at_end=True))
    best = min(row["eval_loss"] for row in longer.metrics["valid"])
    assert longer.evaluate()["eval_loss"] == best
    assert not any(group["train_mode"] for group in longer.optimizer.param_groups)
    longer.train(more=1)
    assert longer.metrics["valid"] == straight.metrics["valid"]


def test_optimizer_modes_are_an_error_with_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setattr("omnitrain.backends.accelerators.check_launched", bool)  # it fails before that matters
    build("accelerate")  # accelerate notes that there is one process
    with pytest.raises(ConfigError, match=r"ScheduleFree.*has train\(\) and eval\(\), which change the weights"):
        build("accelerate", deepspeed_config={"zero_optimization": {"stage": 2}}).train()
