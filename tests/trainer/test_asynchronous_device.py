"""Runs on a device that works later than the host: what would race on a GPU changes numbers here, or is counted."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import KINDS, make
from fake_device import FakeDevice, FakeEvent, FakeStream, Replayed
from recipes import Starving, fit, rows, same, t16, trainer_on_cpu, weights

from omnitrain import EMA, NonFiniteError, Trace, Trainer

CPU = torch.device("cpu")
RACES: dict[str, tuple[Any, str, Any]] = {
    "computation does not wait": (FakeStream, "wait_event", lambda stream, event: None),
    "host does not wait": (FakeEvent, "synchronize", FakeEvent.wait),
    "allocator does not know": (FakeDevice, "record", lambda device, tensor: None),
}


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
    options |= {} if device is None else {"data_collator": ReusedMemory(device)}
    model, (data, valid) = t16(dropout=0.1, dtype=torch.float32), (rows(size, torch.float32) for size in (24, 10))
    return fit(make(kind, CPU, model, data, valid, epochs=2, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_late_copies_change_no_number(kind: str, tmp_path: Path) -> None:
    with FakeDevice() as device:
        trainer = train(kind, device, callbacks=[Trace()], save_dir=tmp_path / "late")
    plain = train(kind, None, callbacks=[Trace()], save_dir=tmp_path / "plain")
    assert same(weights(trainer.model), weights(plain.model)) and trainer.metrics == plain.metrics
    late, rows_of_plain = ((tmp_path / name / "trace.jsonl").read_bytes() for name in ("late", "plain"))
    assert late == rows_of_plain and late.count(b"\n") == 12
    assert len(device.copies) > 2 * 2 * 6 and device.unrecorded_copies() == 0


def train_replayed(kind: str, compile: bool | None) -> tuple[Any, list[torch.Tensor]]:
    metrics = ["mae", lambda prediction: {"largest": float(prediction.predictions.max())}]
    options = {"gradient_accumulation_steps": 2, "algorithms": [EMA(0.5)], "log_steps": 2, "compile": compile}
    with FakeDevice() as device:
        trainer = train(kind, device, compute_metrics=metrics, **options)
        outputs = [*map(torch.as_tensor, trainer.predict(rows(10, torch.float32))[:2])]
    return trainer, [*weights(trainer.model), *outputs]


@pytest.mark.parametrize("kind", ["native", "accelerate"])
def test_replayed_graphs_change_no_number(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model has returned is gone when it runs again, and the package reads it before."""
    monkeypatch.setattr(torch, "compile", Replayed)
    (plain, expected), (replayed, result) = (train_replayed(kind, compile) for compile in (None, True))
    assert same(result, expected) and replayed.metrics == plain.metrics
    assert replayed.backend.wrapped.runs > 20


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
        trainer = fit(make("native", CPU, model, rows(24), epochs=2, microbatch_size="auto", loss_fn=F.mse_loss))
    assert trainer.progress.step == 12 and max(model.sizes[2:]) == 2 and device.unrecorded_copies() == 0


@pytest.mark.parametrize("race", RACES)
def test_fake_device_finds_planted_races(race: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*RACES[race])
    plain = train("native", None)
    with FakeDevice() as device:
        try:
            trainer = train("native", device)
        except (NonFiniteError, AssertionError):
            return
    assert device.unrecorded_copies() or not same(weights(trainer.model), weights(plain.model))
