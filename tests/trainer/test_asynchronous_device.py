"""Runs on a device that works later than the host: what would race on a GPU changes numbers here, or is counted."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import KINDS, make
from fake_device import FakeDevice, FakeEvent, FakeStream, Replayed
from recipes import Starving, rows, same, t16, trainer_on_cpu, weights
from torch.utils._pytree import tree_map_only

from omnitrain import EMA, NonFiniteError, Trace, Trainer
from omnitrain.backends.backend import Backend
from omnitrain.trainer import evaluation

CPU = torch.device("cpu")
Race = tuple[Any, str, Any]
RACES: dict[str, Race] = {
    "computation does not wait": (FakeStream, "wait_event", lambda stream, event: None),
    "host does not wait": (FakeEvent, "synchronize", FakeEvent.wait),
    "allocator does not know": (FakeDevice, "record", lambda device, tensor: None),
}
"""What the package could forget: each is planted into the fake."""


class ReusedMemory:
    """A collator that writes each batch into the memory of the one before, which must have been copied by then."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.memory = device, dict[int, tuple[torch.Tensor, ...]]()

    def __call__(self, samples: list[Any]) -> tuple[torch.Tensor, ...]:
        assert self.device.unfinished_copies() == 0, "the memory of a batch is written while it is copied"
        columns = [torch.stack(column) for column in zip(*samples, strict=True)]
        memory = self.memory.setdefault(len(samples), tuple(torch.empty_like(column) for column in columns))
        for target, column in zip(memory, columns, strict=True):
            target[:] = column
        return memory


def train(kind: str, device: FakeDevice | None, **options: Any) -> Any:
    """Train for 2 epochs of 6 steps with a fused optimizer, with evaluations."""
    collator = {} if device is None else {"data_collator": ReusedMemory(device)}
    trainer = make(
        kind, CPU, options.pop("model", None) or t16(dropout=0.1, dtype=torch.float32), rows(24, torch.float32),
        options.pop("eval_data", rows(10, torch.float32)), epochs=2, **collator, **options,
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", KINDS)
def test_late_copies_change_no_number(kind: str) -> None:
    with FakeDevice() as device:
        trainer = train(kind, device)
    plain = train(kind, None)
    assert same(weights(trainer.model), weights(plain.model)) and trainer.metrics == plain.metrics
    assert len(device.copies) > 2 * 2 * 6 and device.unrecorded_copies() == 0


def test_late_copies_change_no_row_of_a_trace(tmp_path: Path) -> None:
    with FakeDevice() as device:
        train("native", device, callbacks=[Trace()], save_dir=tmp_path / "late")
    train("native", None, callbacks=[Trace()], save_dir=tmp_path / "plain")
    late, plain = ((tmp_path / name / "trace.jsonl").read_bytes() for name in ("late", "plain"))
    assert late == plain and late.count(b"\n") == 12


def train_replayed(kind: str, is_replayed: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """Train and predict with all that keeps outputs: micro-batches, algorithms, metrics by name and by function."""
    monkeypatch.setattr(torch, "compile", Replayed)
    kept: list[Any] = []
    options: dict[str, Any] = {
        "gradient_accumulation_steps": 2, "algorithms": [EMA(0.5)], "log_steps": 2,
        "compute_metrics": ["mae", lambda prediction: {"largest": float(prediction.predictions.max())}],
    }  # fmt: skip
    with FakeDevice() as device:
        trainer = train(kind, device, compile=True if is_replayed else None, **options)
        kept += [*weights(trainer.model), *map(torch.as_tensor, trainer.predict(rows(10, torch.float32))[:2])]
    assert not is_replayed or trainer.backend.wrapped.runs > 20
    return trainer, kept


@pytest.mark.parametrize("kind", ["native", "accelerate"])
def test_replayed_graphs_change_no_number(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model has returned is gone when it runs again, and the package reads it before."""
    (plain, expected), (replayed, result) = (train_replayed(kind, value, monkeypatch) for value in (False, True))
    assert same(result, expected) and replayed.metrics == plain.metrics


def keep(outputs: Any) -> Any:
    """Return outputs as arrays that share their memory."""
    return tree_map_only(torch.Tensor, torch.Tensor.numpy, outputs)


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_of_a_replayed_part_are_copied(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a part compiled by `part.compile()`, which stays the module that it was."""
    model: Any = t16(dtype=torch.float32)
    graph = Replayed(model[0])
    if in_place:
        monkeypatch.setitem(vars(model[0]), "_compiled_call_impl", graph)
    else:
        model[0] = graph
    backend = trainer_on_cpu(Trainer, model, rows(16, torch.float32), loss_fn=F.mse_loss, epochs=1).backend
    backend.collect_parameters()
    parameter = next(iter(model.parameters()))
    parameter.grad = gradient = torch.ones_like(parameter)
    with backend.accumulating(last=False):
        pass
    assert parameter.grad is not gradient and torch.equal(parameter.grad, gradient)


REUSED: dict[str, Race] = {
    "predictions": (evaluation, "to_numpy", keep),
    "gradients": (Backend, "_copying_gradients", lambda backend: contextlib.nullcontext()),
}
"""What could be kept in memory of a graph: each is planted."""


@pytest.mark.parametrize("what", REUSED)
def test_replayed_graphs_find_planted_reuse(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*REUSED[what])
    if what == "gradients":
        with pytest.raises(NonFiniteError):
            train_replayed("native", True, monkeypatch)
        return
    (plain, _), (replayed, _) = (train_replayed("native", value, monkeypatch) for value in (False, True))
    assert replayed.metrics != plain.metrics


@pytest.mark.parametrize(("kind", "step"), [("native", 1), ("native", 5), *((kind, 40) for kind in KINDS)])
def test_late_verdict_names_the_step(kind: str, step: int) -> None:
    """The device makes no update from the bad step on; the host learns of it at the end, or 32 steps later."""
    options: dict[str, Any] = {"shuffle": False, "log_steps": 1000}
    data = rows(48 * 4, torch.float32)
    data.tensors[0][4 * (step - 1)] = torch.inf
    model, clean = t16(dtype=torch.float32), t16(dtype=torch.float32)
    with FakeDevice(), pytest.raises(NonFiniteError, match=rf"step {step}\b"):
        make(kind, CPU, model, data, **options).train()
    if step > 1:
        make(kind, CPU, clean, data, max_steps=step - 1, **options).train()
    assert same(weights(model), weights(clean))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_auto_microbatch_survives_full_asynchronous_device(where: str) -> None:
    with FakeDevice() as device:
        model = Starving(2, where)
        trainer = make("native", CPU, model, rows(24), epochs=2, microbatch_size="auto", loss_fn=F.mse_loss)
        trainer.train()
    assert trainer.progress.step == 12 and max(model.sizes[2:]) == 2 and device.unrecorded_copies() == 0


@pytest.mark.parametrize("race", RACES)
def test_fake_device_finds_planted_races(race: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement = RACES[race]
    monkeypatch.setattr(owner, name, replacement)
    plain = train("native", None)
    with FakeDevice() as device:
        try:
            trainer = train("native", device)
        except (NonFiniteError, AssertionError):
            return
    assert device.unrecorded_copies() or not same(weights(trainer.model), weights(plain.model))


def test_fake_device_finds_verdict_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "synchronize", lambda event: None)
    data = rows(24, torch.float32)
    data.tensors[0][20] = torch.inf
    with FakeDevice() as device:
        device.delay = 0.1
        trainer = make("native", CPU, t16(dtype=torch.float32), data, shuffle=False)
        trainer.train()  # which reads the verdict of the last step before it is there
    assert trainer.progress.step == 6
