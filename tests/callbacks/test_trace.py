"""`Trace`: what parts two runs first, rows after a kill, and runs that it must not change."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from counting import Streamed
from recipes import KeyedModel, callback, fit, rows, same, small_trainer, t16, weights
from resuming import Killed
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import AccelerateTrainer, Callback, ConfigError, Event, HFTrainer, Trace
from omnitrain.callbacks.trace import TRACED


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


def traced(folder: Path, *callbacks: Callback, every: int = 1, **options: Any) -> list[dict[str, Any]]:
    small_trainer(save_dir=folder, callbacks=[*callbacks, Trace(every)], **options).train()
    return read(folder)


def first_difference(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> tuple[int, str]:
    pairs = zip(a, b, strict=True)
    return next((x["step"], name) for x, y in pairs for name in TRACED if x.get(name) != y.get(name))


def at(step: int, action: Any, event: str = "on_step_start") -> Callback:
    return callback(**{event: lambda trainer: action(trainer) if trainer.progress.step + 1 == step else None})


def kill(trainer: Any) -> None:
    raise Killed


def test_trace_has_a_row_of_each_step_and_moves_no_bit(tmp_path: Path) -> None:
    plain = fit(small_trainer(save_dir=tmp_path / "a", model=t16(0.2)))
    watched = fit(small_trainer(save_dir=tmp_path / "b", model=t16(0.2), callbacks=[Trace()]))
    assert str(plain.metrics) == str(watched.metrics) and same(weights(plain.model), weights(watched.model))
    lines = read(tmp_path / "b")
    assert [line["step"] for line in lines] == [*range(1, 9)]
    assert all(len(line[name]) == 32 for line in lines for name in TRACED)
    losses = [row for row in map(json.loads, (tmp_path / "b/metrics.jsonl").open()) if row["kind"] == "train"]
    assert sum(line["mean_loss"] for line in lines) / 8 == pytest.approx(losses[0]["loss"])
    assert traced(tmp_path / "c", model=t16(0.2)) == lines
    assert traced(tmp_path / "d", model=t16(0.2), every=3) == lines[2::3]


CHANGES: dict[str, Any] = {
    "weights": lambda trainer: trainer.model[0].weight.data[0, 0].add_(1e-12),
    "update": lambda trainer: trainer.optimizer.param_groups[0].update(lr=0.2),
}


@pytest.mark.parametrize(("options", "expected"), [
    ({"callbacks": [at(5, CHANGES["weights"])]}, (5, "weights")),
    ({"callbacks": [at(4, lambda trainer: torch.rand(1))]}, (4, "random")),
    ({"callbacks": [at(4, lambda trainer: np.random.rand())]}, (4, "random")),
    ({"loss_fn": lambda outputs, labels: F.mse_loss(outputs, labels) / 2}, (1, "loss")),
    ({"callbacks": [at(7, CHANGES["update"])]}, (7, "update")),
], ids=["weights", "torch", "numpy", "loss", "update"])  # fmt: skip
def test_trace_shows_what_parts_first(options: dict[str, Any], expected: tuple[int, str], tmp_path: Path) -> None:
    """Also the samples, the batch or the gradients: those are in diagnostics/test_run_diff.py."""
    options = {"callbacks": [], **options}
    changed = traced(tmp_path / "b", *options.pop("callbacks"), **options)
    assert first_difference(traced(tmp_path / "a"), changed) == expected


@pytest.mark.parametrize("step", [3, 6, 8])
def test_trace_continues_after_a_kill(step: int, tmp_path: Path) -> None:
    def run(folder: str, *callbacks: Callback, **options: Any) -> None:
        trainer = small_trainer(save_dir=tmp_path / folder, callbacks=[*callbacks, Trace()], model=t16(0.2), **options)
        trainer.train(resume_from="auto")

    run("a", epochs=3)
    with pytest.raises(Killed):
        run("b", at(step, kill, "on_batch_end"), save_steps=2)
    with (tmp_path / "b/trace.jsonl").open("a") as file:
        file.write('{"kind": "st')  # as a process leaves it that was killed while it wrote
    run("b", epochs=2)
    run("b", epochs=3)
    assert read(tmp_path / "b") == read(tmp_path / "a")


def test_trace_drops_rows_after_a_rewind(tmp_path: Path) -> None:
    def go_back(trainer: Any) -> None:
        if trainer.progress.step == 6 and not rewinds:
            rewinds.append(6)
            trainer.progress.step = 4
            trainer.lifecycle.emit(Event.CHECKPOINT_LOADED)

    rewinds = list[int]()
    lines = traced(tmp_path / "a", callback(on_step_start=go_back), max_steps=8, epochs=3)
    assert [line["step"] for line in lines] == [*range(1, 9)]


def whole_numbers() -> dict[str, Any]:
    """Return a model and data of small whole numbers, of which every sum is exact in any order."""
    model = nn.Linear(3, 1, dtype=torch.float64)
    model.weight.data.copy_(torch.tensor([[1.0, -2.0, 3.0]]))
    model.bias.data.zero_()
    numbers = torch.randint(-3, 4, (16, 4), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return {"model": model, "data": TensorDataset(numbers[:, :3].clone(), numbers[:, 3:].clone())}


@pytest.mark.parametrize("split", [
    {"batch_size": 1, "gradient_accumulation_steps": 8}, {"batch_size": 8, "microbatch_size": 2},
    {"batch_size": 4, "gradient_accumulation_steps": 2, "kind": AccelerateTrainer},
    {"batch_size": 2, "gradient_accumulation_steps": 4, "kind": HFTrainer},
])  # fmt: skip
def test_trace_is_the_same_in_other_splits(split: dict[str, Any], tmp_path: Path) -> None:
    exact = {"learning_rate": 0.25, "optimizer": "SGD", "max_grad_norm": None}
    expected = traced(tmp_path / "a", **whole_numbers(), **exact, batch_size=8)
    assert len(expected) == 4 and traced(tmp_path / "b", **whole_numbers(), **exact, **split) == expected


def test_trace_marks_skipped_steps(tmp_path: Path) -> None:
    data = rows(16)
    data.tensors[1][5] = torch.nan
    lines = traced(tmp_path / "a", data=data, on_nonfinite="skip")
    skipped = [line for line in lines if "skipped" in line]
    assert len(lines) == 8 and len(skipped) == 2 and [line["step"] for line in lines][-1] == 6
    assert {line["update"] for line in skipped} == {"0" * 32} and skipped[0]["mean_loss"] is None


def test_trace_takes_any_data_but_needs_a_folder(tmp_path: Path) -> None:
    lines = traced(tmp_path / "stream", data=Streamed(rows(16)), epochs=1)
    assert len(lines) == 4 and "samples" not in lines[0] and len({line["batch"] for line in lines}) == 4
    data = [{"x": x, "labels": y, "tag": "a"} for x, y in rows(16, torch.float32)]
    assert len(traced(tmp_path / "texts", model=KeyedModel(), data=data, loss_fn=None)) == 8
    with pytest.raises(ConfigError, match="save_dir"):
        small_trainer(callbacks=[Trace()]).train()


def test_trace_sees_buffers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    other = copy.deepcopy(model)
    other.get_buffer("1.running_mean").fill_(0.5)
    runs = [traced(tmp_path / name, model=module) for name, module in (("a", model), ("b", other))]
    assert first_difference(*runs) == (1, "weights")
    assert runs[0][0]["loss"] == runs[1][0]["loss"]
