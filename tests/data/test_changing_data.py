"""Datasets that callbacks change during a run."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from backends import make_trainer
from forking import ON_CPU, Case, play
from recipes import StopAt, fit, rows, same, t16, weights
from torch.utils.data import Dataset, Subset, TensorDataset

from omnitrain import Algorithm, Callback
from omnitrain.core.errors import DataError
from omnitrain.data.stateful import snapshot


class Pool(Dataset[Any]):
    """As many rows as there are indices, each with its own index as the fourth number."""

    def __init__(self, size: int) -> None:
        self.indices: list[int] = list(range(size))
        self.x, self.y = (part.clone() for part in rows(32, torch.float32).tensors)
        self.x[:, 3] = torch.arange(32)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.x[self.indices[index]], self.y[self.indices[index]]


class Seen(Algorithm):
    """Records the samples of each epoch."""

    def __init__(self) -> None:
        self.epochs: dict[int, list[int]] = {}

    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        self.epochs.setdefault(trainer.progress.epoch, []).extend(map(int, batch[0][:, 3]))
        return batch

    @property
    def sizes(self) -> list[int]:
        return [len(samples) for samples in self.epochs.values()]


class Resize(Callback):
    """Gives a dataset another length at the start of each epoch, which its state restores."""

    def __init__(self, data: Any, sizes: Sequence[int]) -> None:
        self.data, self.sizes = data, sizes

    def on_epoch_start(self, trainer: Any) -> None:
        if not trainer.progress.samples_in_epoch:
            self.data.indices = list(range(self.sizes[trainer.progress.epoch]))

    def state_dict(self) -> dict[str, Any]:
        return {"size": len(self.data)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.indices = list(range(state["size"]))


def make(backend: str, data: Any, sizes: Sequence[int], callbacks: Sequence[Callback] = (), **options: Any) -> Any:
    options = {"batch_size": 4, "epochs": len(sizes), "loss_fn": F.mse_loss, "lr_scheduler": "constant"} | options
    callbacks = [Resize(data, sizes), *callbacks]
    return make_trainer(backend, t16(dtype=torch.float32), data, callbacks=callbacks, algorithms=[Seen()], **options)


@pytest.mark.parametrize("backend", ["native", "accelerate", "hf"])
def test_length_is_asked_at_each_epoch(backend: str) -> None:
    pool, sizes = Pool(6), [6, 13, 3]
    for data in (pool, Subset(TensorDataset(pool.x, pool.y), range(6))):
        trainer = fit(make(backend, data, sizes, gradient_accumulation_steps=2))
        epochs = trainer.algorithms[0].epochs.values()
        assert [sorted(samples) for samples in epochs] == [list(range(size)) for size in sizes]
        assert (trainer.progress.samples, trainer.progress.step, trainer.progress.epochs) == (22, 4, 3)
        assert trainer.stop_reason == "epochs"
    with pytest.raises(DataError, match="The training set now has 0 samples"):
        make(backend, Pool(6), [6, 0]).train()


def test_length_of_evaluation_set_is_asked() -> None:
    data, evaluation = Pool(6), Pool(4)
    lengths = []

    def count(outputs: Any, labels: Any) -> dict[str, float]:
        lengths.append(len(labels))
        return {}

    trainer = make("native", data, [6, 6], [Resize(evaluation, [4, 9])], eval_dataset=evaluation, compute_metrics=count)
    trainer.train()
    assert lengths[-2:] == [4, 9]


@pytest.mark.parametrize("backend", ["native", "hf"])
@pytest.mark.parametrize("step", [2, 4, 6], ids=["between", "within", "at its end"])
def test_resume_has_length_of_its_epoch(backend: str, step: int, tmp_path: Path) -> None:
    sizes = [6, 15, 9]
    whole = fit(make(backend, Pool(6), sizes))
    make(backend, Pool(6), sizes, [StopAt(step)], save_dir=tmp_path).train()
    resumed = fit(make(backend, Pool(6), sizes, save_dir=tmp_path), resume_from="last")
    assert resumed.progress.step == whole.progress.step
    assert resumed.progress.samples == whole.progress.samples == sum(sizes)
    assert same(weights(whole.model), weights(resumed.model))


def test_resume_of_shrunk_data_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Resize, "load_state_dict", lambda self, state: None)
    make("native", Pool(6), [6, 15], [StopAt(4)], save_dir=tmp_path).train()
    with pytest.raises(DataError, match="now has 6 samples, and had 15 when the resumed epoch"):
        make("native", Pool(6), [6, 15], save_dir=tmp_path).train(resume_from="last")


def train(backend: str, sizes: list[list[int]]) -> list[int]:
    trainer = fit(make(backend, Pool(6), sizes[int(os.environ["RANK"])]))
    return [*trainer.algorithms[0].sizes, trainer.progress.samples, trainer.progress.step]


@pytest.mark.processes
def test_lengths_on_two_ranks(tmp_path: Path) -> None:
    """Of the same data they are shared out; others are an error on all ranks."""
    alike, other = [[8, 14], [8, 14]], [[8, 14], [8, 13]]
    cases = [
        Case(backend, "tests.data.test_changing_data:train", {"backend": backend, "sizes": sizes})
        for backend, sizes in (("ddp", alike), ("hf2", alike))
    ]
    cases.append(Case("other", cases[0].function, {"backend": "ddp", "sizes": other}, environment=ON_CPU))
    outcomes = play(cases, tmp_path)
    for backend in ("ddp", "hf2"):
        assert [outcome.result for outcome in outcomes[backend]] == [[4, 7, 22, 3]] * 2
    for outcome in outcomes["other"]:
        assert outcome.code == 1 and "`the training set` is 14 on rank 0 and 13 on rank 1" in outcome.output


class Leveled(Pool):
    """Rows whose fourth number is the level, which is in one of the places that a callback may change."""

    def __init__(self, size: int, place: str) -> None:
        super().__init__(size)
        self.place, self.level, self.array = place, 0, np.zeros(1)

    def set(self, level: int) -> None:
        if self.place == "attribute":
            self.level = level
        else:
            self.array[0] = level

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return torch.cat([x[:3], torch.tensor([self.level + float(self.array[0])])]), y


class Raise(Callback):
    """Raises the level at the start of each epoch, or in its middle."""

    def __init__(self, data: Leveled, in_the_middle: bool = False) -> None:
        self.data, self.in_the_middle = data, in_the_middle

    def on_epoch_start(self, trainer: Any) -> None:
        if not self.in_the_middle:
            self.data.set(trainer.progress.epoch)

    def on_step_end(self, trainer: Any) -> None:
        if self.in_the_middle and trainer.progress.step == 2:
            self.data.set(7)


def levels(place: str, num_workers: int, in_the_middle: bool = False) -> dict[int, list[int]]:
    data = Subset(Leveled(16, place), range(16))
    trainer = fit(make_trainer(
        "native", t16(dtype=torch.float32), data, callbacks=[Raise(data.dataset, in_the_middle)], algorithms=[Seen()],
        epochs=2, batch_size=4, loss_fn=F.mse_loss, num_workers=num_workers,
    ))  # fmt: skip
    return {epoch: sorted(set(values)) for epoch, values in trainer.algorithms[0].epochs.items()}


@pytest.mark.processes
def test_workers_see_changes_at_each_epoch(caplog: pytest.LogCaptureFixture) -> None:
    for place in ("attribute", "array"):
        assert levels(place, num_workers=1) == levels(place, num_workers=0) == {0: [0], 1: [1]}
    assert "was changed while worker processes read it" not in caplog.text
    assert levels("attribute", num_workers=1, in_the_middle=True)[1] == [7]
    assert "The training set was changed while worker processes read it." in caplog.text


class Item:
    def __init__(self, value: int) -> None:
        self.value: Any = value


LOOP = Item(1)
LOOP.value = [LOOP]
CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "attribute": (Item(1), lambda data: setattr(data, "value", 2)),
    "new attribute": (Item(1), lambda data: setattr(data, "other", 2)),
    "tensor": (torch.zeros(3), lambda data: data.add_(1)),
    "tensors": (TensorDataset(torch.zeros(3)), lambda data: setattr(data, "tensors", (torch.zeros(4),))),
    "array": (np.zeros((3, 2)), lambda data: data.fill(1)),
    "subset": (Subset(Item(1), [1, 2]), lambda data: setattr(data.dataset, "value", 2)),  # type: ignore[arg-type]
    "long list": ([Item(i) for i in range(40000)], lambda data: data.reverse()),
    "list of lists": ([[1], [2]], lambda data: data[1].append(3)),
    "itself": (LOOP, lambda data: data.value.append(1)),
    "dict": ({"level": 0}, lambda data: data.update(level=1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_snapshot_shows_changes(name: str) -> None:
    data, change = CHANGES[name]
    data = Subset(data, [0])
    before = snapshot(data)
    assert snapshot(data) == before
    change(data.dataset)
    assert snapshot(data) != before
