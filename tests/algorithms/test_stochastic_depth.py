"""Stochastic depth."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import FailsAt, callback, distance, fit, rows, small_trainer, weights
from torch import nn

from omnitrain import StochasticDepth


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, str]:
        return x + torch.tanh(self.body(x)) * scale, "kept"


class Deep(nn.Module):
    """Three residual layers, called by position and by keyword."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(4, 1)
        self.double()
        self.factors: list[float] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            output, word = block(x=x) if number == 1 else block(x, 1.0)
            assert word == "kept"
            x = output if self.factors is None else x + (output - x) * self.factors[number]
        return self.head(x)


def build(*algorithms: Any, model: nn.Module | None = None, **options: Any) -> Any:
    options = {"max_grad_norm": None, "shuffle": False, "optimizer": "sgd", **options}
    return small_trainer(*algorithms, model=model or Deep(), **options)


@pytest.mark.parametrize("compile_", [False, pytest.param({"backend": "eager"}, marks=pytest.mark.slow)])
def test_run_equals_a_model_without_the_skipped_layers(compile_: Any) -> None:
    trained, model, drawn = Deep(), Deep(), list[list[float]]()
    depth = StochasticDepth([Block], 0.6)
    draws = callback(on_step_end=lambda trainer: drawn.append(depth._factors.tolist()))
    options = {"compile": compile_, "eval_dataset": rows(9), "load_best_at_end": False, "callbacks": [draws]}
    metrics = build(depth, model=trained, **options).train()
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), lr=0.1), rows(16).tensors
    for step, factors in enumerate(drawn):
        part = slice(step % 4 * 4, step % 4 * 4 + 4)
        model.factors = factors
        F.mse_loss(model(x[part]), y[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert distance(weights(trained), weights(model)) <= 1e-6  # factors are of 32 bits
    shares = [1 - rate for rate in depth.rates(3)]
    assert shares == pytest.approx([0.8, 0.6, 0.4]) and len(drawn) == 8
    for row in drawn:
        assert all(value in (0, pytest.approx(1 / share)) for value, share in zip(row, shares, strict=True))
    assert len({tuple(row) for row in drawn}) > 2
    model.factors = None
    expected = F.mse_loss(model(rows(9).tensors[0]), rows(9).tensors[1]).item()
    assert metrics["valid"][-1]["eval_loss"] == pytest.approx(expected, abs=1e-6)
    assert not any(module._forward_hooks for module in trained.modules())
    assert set(trained.state_dict()) == set(Deep().state_dict())


def test_layers_are_skipped_at_their_rates() -> None:
    depth, drawn = StochasticDepth([r"blocks\.\d"], 0.5, "uniform"), []
    draws = callback(on_step_end=lambda trainer: drawn.append(depth._factors.tolist()))
    build(depth, epochs=None, max_steps=150, callbacks=[draws], log_steps=1000).train()
    skipped = (torch.tensor(drawn) == 0).double().mean(dim=0)
    assert ((skipped - 0.5).abs() < 0.12).all() and depth.rates(3) == [0.5] * 3


def test_model_has_no_hooks_after_a_run() -> None:
    model: Any = FailsAt(2, Deep())
    trainer = build(StochasticDepth([Block]), model=model)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.train()
    assert not any(module._forward_hooks for module in model.modules())
    trainer.train()
    trainer, longer = fit(build(StochasticDepth([Block]))), fit(build(StochasticDepth([Block]), epochs=3))
    trainer.train(more=1)
    assert distance(weights(trainer.model), weights(longer.model)) == 0
