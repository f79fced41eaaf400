"""Layers that are left out: which they are, in which steps, and that the model is its own afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import distance, rows, weights
from torch import nn

from omnitrain import Callback, ConfigError, StochasticDepth, Trainer


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
            made, word = block(x=x) if number == 1 else block(x, 1.0)
            assert word == "kept"
            x = made if self.factors is None else x + (made - x) * self.factors[number]
        return self.head(x)


def build(*algorithms: Any, model: nn.Module | None = None, **options: Any) -> Trainer:
    common: dict[str, Any] = {"epochs": 2, "batch_size": 4, "learning_rate": 0.1, "max_grad_norm": None}
    common |= {"loss_fn": F.mse_loss, "device": "cpu", "progress_bar": False, "shuffle": False, "optimizer": "sgd"}
    return Trainer(model or Deep(), rows(16), algorithms=algorithms, **{**common, **options})


@pytest.mark.parametrize("compile_", [False, {"backend": "eager"}])
def test_a_run_is_that_of_a_model_that_leaves_the_same_layers_out(compile_: Any) -> None:
    found, model, chosen = Deep(), Deep(), list[list[float]]()
    depth = StochasticDepth([Block], 0.6)

    class Looking(Callback):
        def on_step_end(self, trainer: Any) -> None:
            chosen.append(depth._factors.tolist())

    trainer = build(
        depth, model=found, compile=compile_, eval_dataset=rows(9), load_best_at_end=False, callbacks=[Looking()]
    )
    metrics = trainer.train()
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), lr=0.1), rows(16).tensors
    for step, factors in enumerate(chosen):
        part = slice(step % 4 * 4, step % 4 * 4 + 4)
        model.factors = factors
        F.mse_loss(model(x[part]), y[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert distance(weights(found), weights(model)) <= 1e-6  # factors are of 32 bits
    kept = [1 - rate for rate in depth.rates(3)]
    assert kept == pytest.approx([0.8, 0.6, 0.4]) and len(chosen) == 8
    assert all(
        value == 0 or value == pytest.approx(1 / share)
        for row in chosen
        for value, share in zip(row, kept, strict=True)
    )
    assert len({tuple(row) for row in chosen}) > 2
    model.factors = None
    expected = F.mse_loss(model(rows(9).tensors[0]), rows(9).tensors[1]).item()
    assert metrics["valid"][-1]["eval_loss"] == pytest.approx(expected, abs=1e-6)
    assert not any(one._forward_hooks for one in found.modules()) and set(found.state_dict()) == set(
        Deep().state_dict()
    )


def test_layers_are_left_out_as_often_as_their_rates_say() -> None:
    depth = StochasticDepth([r"blocks\.\d"], 0.5, "uniform")
    seen = []

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(depth._factors.tolist())
            return x

    model = Deep()
    model.head = nn.Sequential(Looking(), model.head)  # type: ignore[assignment]
    build(depth, model=model, epochs=None, max_steps=400).train()
    left_out = (torch.tensor(seen) == 0).double().mean(dim=0)
    assert ((left_out - 0.5).abs() < 0.1).all() and depth.rates(3) == [0.5] * 3


def test_the_model_has_no_hooks_after_a_run_that_failed_and_the_next_one_has_its_own() -> None:
    class Fails(Deep):
        passes = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            if self.passes == 2:
                raise RuntimeError("boom")
            return super().forward(x)

    model = Fails()
    trainer = build(StochasticDepth([Block]), model=model)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.train()
    assert not any(one._forward_hooks for one in model.modules())
    trainer.train()
    model, whole = Deep(), Deep()
    trainer = build(StochasticDepth([Block]), model=model)
    trainer.train()
    trainer.train(more=1)
    build(StochasticDepth([Block]), model=whole, epochs=3).train()
    assert distance(weights(model), weights(whole)) == 0


def test_what_cannot_be_is_refused() -> None:
    for wrong in ({"layers": "a"}, {"layers": [3]}, {"drop_rate": 1}, {"distribution": "square"}):
        with pytest.raises(ConfigError, match=f"`{next(iter(wrong))}`"):
            StochasticDepth(**{"layers": ["a"], **wrong})  # type: ignore[arg-type]
    for one, words in (
        (StochasticDepth(["block"]), "no module is called 'block'"),
        (StochasticDepth([nn.Conv2d]), "no module is a Conv2d"),
        (StochasticDepth(["head"]), "'head' gives another shape than it takes"),
    ):
        with pytest.raises(ConfigError, match=words):
            build(one).train()
