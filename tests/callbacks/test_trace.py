"""`Trace`: what parts two runs first, rows after a kill, and runs that it must not change."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recipes import rows, small_trainer, t16
from resuming import Killed
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from omnitrain import AccelerateTrainer, Callback, ConfigError, Event, HFTrainer, Trace
from omnitrain.callbacks.trace import TRACED
from omnitrain.data.sampling import EpochSampler


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


def traced(folder: Path, *callbacks: Callback, every: int = 1, **options: Any) -> list[dict[str, Any]]:
    small_trainer(save_dir=folder, callbacks=[*callbacks, Trace(every)], **options).train()
    return read(folder)


def first_difference(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> tuple[int, str]:
    """Return the step and the name of the first digest that differs."""
    for left, right in zip(a, b, strict=True):
        for name in TRACED:
            if left.get(name) != right.get(name):
                return left["step"], name
    return 0, ""


class At(Callback):
    """Does something before a step, counted from 1."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_step_start(self, trainer: Any) -> None:
        if trainer.progress.step + 1 == self.step:
            self.action(trainer)


def other_data() -> TensorDataset:
    """Return data with one other number, in a sample of the second step."""
    data = rows(16)
    data.tensors[1][int(EpochSampler(16, 4).order(0)[5])] += 1e-12
    return data


def half_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, labels) / 2


def move_weight(trainer: Any) -> None:
    with torch.no_grad():
        trainer.model[0].weight[0, 0] += 1e-12


def scale_gradient(trainer: Any) -> None:
    trainer.model[0].bias.register_hook(lambda gradient: gradient * (1 + 1e-12))


def raise_rate(trainer: Any) -> None:
    trainer.optimizer.param_groups[0]["lr"] *= 2


def test_trace_has_a_row_of_each_step_and_moves_no_bit(tmp_path: Path) -> None:
    plain = small_trainer(save_dir=tmp_path / "a", model=t16(0.2))
    watched = small_trainer(save_dir=tmp_path / "b", model=t16(0.2), callbacks=[Trace()])
    assert str(plain.train()) == str(watched.train())
    assert all(map(torch.equal, plain.model.parameters(), watched.model.parameters()))
    lines = read(tmp_path / "b")
    assert [line["step"] for line in lines] == [*range(1, 9)]
    assert all(len(line[name]) == 32 for line in lines for name in TRACED)
    losses = [row for row in map(json.loads, (tmp_path / "b/metrics.jsonl").open()) if row["kind"] == "train"]
    assert sum(line["mean_loss"] for line in lines) / 8 == pytest.approx(losses[0]["loss"])
    assert traced(tmp_path / "c", model=t16(0.2)) == lines
    assert traced(tmp_path / "d", model=t16(0.2), every=3) == lines[2::3]


@pytest.mark.parametrize(("options", "expected"), [
    ({"seed": 43}, (1, "samples")),
    ({"data": other_data()}, (2, "batch")),
    ({"callbacks": [At(5, move_weight)]}, (5, "weights")),
    ({"callbacks": [At(4, lambda trainer: torch.rand(1))]}, (4, "random")),
    ({"callbacks": [At(4, lambda trainer: np.random.rand())]}, (4, "random")),
    ({"loss_fn": half_loss}, (1, "loss")),
    ({"callbacks": [At(6, scale_gradient)]}, (6, "gradients")),
    ({"callbacks": [At(7, raise_rate)]}, (7, "update")),
], ids=["seed", "data", "weights", "torch", "numpy", "loss", "gradients", "update"])  # fmt: skip
def test_trace_shows_what_parts_first(options: dict[str, Any], expected: tuple[int, str], tmp_path: Path) -> None:
    options = {"callbacks": [], **options}
    changed = traced(tmp_path / "b", *options.pop("callbacks"), **options)
    assert first_difference(traced(tmp_path / "a"), changed) == expected


class KilledAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_batch_end(self, trainer: Any) -> None:
        if trainer.progress.step + 1 == self.step:
            raise Killed


@pytest.mark.parametrize("step", [3, 6, 8])
def test_trace_continues_after_a_kill(step: int, tmp_path: Path) -> None:
    expected = traced(tmp_path / "a", model=t16(0.2), save_steps=2)
    with pytest.raises(Killed):
        traced(tmp_path / "b", KilledAt(step), model=t16(0.2), save_steps=2)
    with (tmp_path / "b/trace.jsonl").open("a") as file:
        file.write('{"kind": "st')  # as a process leaves it that was killed while it wrote
    small_trainer(save_dir=tmp_path / "b", model=t16(0.2), save_steps=2, callbacks=[Trace()]).train(resume_from="last")
    assert read(tmp_path / "b") == expected


class GoesBack(Callback):
    """Goes back to step 4 once, after step 6."""

    def on_step_start(self, trainer: Any) -> None:
        if trainer.progress.step == 6:
            trainer.lifecycle.unsubscribe(self, Event.STEP_START)
            trainer.progress.step = 4
            trainer.lifecycle.emit(Event.CHECKPOINT_LOADED)


def test_trace_drops_rows_after_a_rewind(tmp_path: Path) -> None:
    steps = [line["step"] for line in traced(tmp_path / "a", GoesBack(), max_steps=8, epochs=3)]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]


def test_trace_continues_longer_run(tmp_path: Path) -> None:
    expected = traced(tmp_path / "a", epochs=3)
    traced(tmp_path / "b", epochs=2)
    small_trainer(save_dir=tmp_path / "b", epochs=3, callbacks=[Trace()]).train(resume_from="last")
    assert read(tmp_path / "b") == expected


def whole_numbers() -> tuple[nn.Module, TensorDataset]:
    """Return a model and data of small whole numbers, of which every sum is exact in any order."""
    model = nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0, 3.0]]))
        model.bias.zero_()
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randint(-3, 4, (16, 4), generator=generator, dtype=torch.float64)
    return model, TensorDataset(numbers[:, :3].clone(), numbers[:, 3:].clone())


@pytest.mark.parametrize("split", [
    {"batch_size": 1, "gradient_accumulation_steps": 8},
    {"batch_size": 8, "microbatch_size": 2},
    {"batch_size": 4, "gradient_accumulation_steps": 2, "kind": AccelerateTrainer},
    {"batch_size": 2, "gradient_accumulation_steps": 4, "kind": HFTrainer},
])  # fmt: skip
def test_trace_is_the_same_in_other_splits(split: dict[str, Any], tmp_path: Path) -> None:
    traces = []
    for name, options in {"a": {"batch_size": 8}, "b": split}.items():
        model, data = whole_numbers()
        exact = {"model": model, "data": data, "learning_rate": 0.25, "optimizer": "SGD", "max_grad_norm": None}
        traces.append(traced(tmp_path / name, **exact, **options))
    assert len(traces[0]) == 4 and traces[0] == traces[1]


def test_trace_marks_skipped_steps(tmp_path: Path) -> None:
    data = rows(16)
    data.tensors[1][5] = torch.nan
    lines = traced(tmp_path / "a", data=data, on_nonfinite="skip")
    skipped = [line for line in lines if "skipped" in line]
    assert len(lines) == 8 and len(skipped) == 2 and [line["step"] for line in lines][-1] == 6
    assert {line["update"] for line in skipped} == {"0" * 32} and skipped[0]["mean_loss"] is None


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __iter__(self) -> Any:
        return iter(rows(16))


def test_trace_takes_data_without_index(tmp_path: Path) -> None:
    lines = traced(tmp_path / "a", data=Stream(), epochs=1)
    assert len(lines) == 4 and "samples" not in lines[0] and len({line["batch"] for line in lines}) == 4


class TaggedBatch(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y, "tag": "a"}

    __getitems__ = None


class ReadsX(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = t16()

    def forward(self, x: torch.Tensor, **rest: Any) -> torch.Tensor:
        return self.body(x)


def test_trace_takes_dicts_with_text(tmp_path: Path) -> None:
    assert len(traced(tmp_path / "a", model=ReadsX(), data=TaggedBatch(*rows(16).tensors))) == 8


def test_trace_rejects_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="every"):
        Trace(every=0)
    with pytest.raises(ConfigError, match="save_dir"):
        small_trainer(callbacks=[Trace()]).train()


def test_trace_sees_buffers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    other = copy.deepcopy(model)
    other.get_buffer("1.running_mean").fill_(0.5)
    runs = [traced(tmp_path / name, model=module) for name, module in (("a", model), ("b", other))]
    assert first_difference(*runs) == (1, "weights")
    assert runs[0][0]["loss"] == runs[1][0]["loss"]
