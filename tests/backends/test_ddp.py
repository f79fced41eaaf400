"""The module that DDP wraps: the model, or a function of it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import nn

from omnitrain.backends.ddp import Runner, run_wrapped
from omnitrain.model.units import StepOutput


def runner() -> Runner:
    return Runner(nn.Linear(2, 1))


def test_runner_calls_model_and_counts_forward_with_gradients() -> None:
    wrapped, x = runner(), torch.ones(3, 2)
    with torch.no_grad():
        assert torch.equal(wrapped(input=x), wrapped._orig_mod(x))
    assert not wrapped.has_run
    assert torch.equal(wrapped(x), wrapped._orig_mod(x)) and wrapped.has_run
    assert [name for name, _ in wrapped.named_parameters()] == ["_orig_mod.weight", "_orig_mod.bias"]


def test_runner_runs_function_and_shows_tensors() -> None:
    wrapped, x = runner(), torch.ones(3, 2)

    def run(model: nn.Module, batch: Any) -> StepOutput:
        scores = model(batch)
        return StepOutput(scores.sum(), scores, None)

    inside = wrapped(run_step=lambda model: run(model, x))
    assert isinstance(inside, dict) and inside.keys() == {field.name for field in fields(StepOutput)}
    output = run_wrapped(wrapped, run, x)
    assert isinstance(output, StepOutput) and torch.equal(output.required_loss(), inside["loss"])
    assert run_wrapped(wrapped, lambda model, batch: batch + 1, 3) == 4
