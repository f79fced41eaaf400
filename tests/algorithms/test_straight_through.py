"""Straight-through estimation: passes with rounded weights, updates of full ones."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import FailsAt, Holding, Trace, distance, fit, rows, same, small_trainer, t16, weights
from torch import nn
from torch.nn.utils import parametrize

from omnitrain import StraightThrough
from omnitrain.checkpoint.tensor_files import load_tensors


def rounded(weight: torch.Tensor) -> torch.Tensor:
    return (weight * 8).round() / 8


build = functools.partial(small_trainer, max_grad_norm=0.5, load_best_at_end=False, shuffle=False)


class Rounded(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (rounded(weight) - weight).detach()


def test_run_equals_a_parametrized_model(tmp_path: Path) -> None:
    trained, model, trace = t16(), t16(), Trace()
    trainer = fit(build(
        StraightThrough(rounded, ["weight"]), model=trained, eval_dataset=rows(9), eval_steps=3, log_steps=1,
        optimizer="sgd", callbacks=[trace], save_dir=tmp_path,
    ))  # fmt: skip
    for layer in (model[0], model[3]):  # type: ignore[index]
        parametrize.register_parametrization(layer, "weight", Rounded())
    optimizer, (x, y), losses, evaluations = torch.optim.SGD(model.parameters(), lr=0.1), rows(16).tensors, [], []
    for step in range(8):
        part = slice(step % 4 * 4, step % 4 * 4 + 4)
        loss = F.mse_loss(model(x[part]), y[part])
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step in (2, 5, 7):
            evaluations.append(F.mse_loss(model(rows(9).tensors[0]), rows(9).tensors[1]).item())
    assert [row["loss"] for row in trace.logs] == pytest.approx(losses, abs=1e-12)
    assert [row["eval_loss"] for row in trainer.metrics["valid"]] == pytest.approx(evaluations, abs=1e-12)
    full = {
        name.replace("parametrizations.weight.original", "weight"): parameter.detach()
        for name, parameter in model.named_parameters()
    }
    updated = load_tensors(tmp_path / "checkpoint-8" / "trained.safetensors")
    assert updated.keys() == {"0.weight", "3.weight"}
    assert distance(updated.values(), [full[name] for name in updated]) <= 1e-12
    state, evaluated = trained.state_dict(), load_tensors(tmp_path / "checkpoint-8" / "model.safetensors")
    assert set(state) == set(evaluated) == set(full)
    assert all(torch.equal(evaluated[name], rounded(updated[name])) for name in updated)
    assert all(torch.equal(state[name], evaluated[name]) for name in evaluated)
    assert distance([state["0.bias"]], [full["0.bias"]]) <= 1e-12


def test_step_without_targets_changes_no_weights(tmp_path: Path) -> None:
    class Half(Holding):
        """Counts no targets in every second step."""

        calls = 0

        def __call__(self, batch: Any) -> tuple[torch.Tensor, int]:
            self.calls += 1
            loss, count = super().__call__(batch)
            return loss, count * (self.calls % 2)

    def trained(kind: Any, data: Any) -> dict[str, torch.Tensor]:
        model, folder = t16(), tmp_path / kind.__name__
        trainer = fit(build(
            StraightThrough(rounded), model=model, data=data, unit=kind(model), save_dir=folder, save_steps=100,
            optimizer="sgd", epochs=1,
        ))  # fmt: skip
        return load_tensors(folder / f"checkpoint-{trainer.progress.step}" / "trained.safetensors")

    x, y = rows(16).tensors
    part = torch.cat([torch.arange(4), torch.arange(8, 12)])
    halved, expected = trained(Half, rows(16)), trained(Holding, torch.utils.data.TensorDataset(x[part], y[part]))
    assert same(halved.values(), expected.values())


def test_run_resumes_after_a_failed_pass(tmp_path: Path) -> None:
    model, expected = FailsAt(4), t16()
    trainer = build(StraightThrough(rounded), model=model, save_dir=tmp_path, save_steps=1)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.train()
    trainer.train(resume_from=tmp_path / "checkpoint-1")
    build(StraightThrough(rounded), model=expected).train()
    assert same(weights(model.body), weights(expected))
