"""Datasets that callbacks change during a run."""

import functools
import itertools
import operator
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from backends import make_trainer
from forking import ON_CPU, Case, play
from recipes import StopAt, callback, fit, rows, same, t16, weights
from resuming import Stream
from torch.utils.data import Dataset, Subset, TensorDataset

from omnitrain import Callback
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


def epochs_of(trainer: Any) -> list[list[int]]:
    pairs = itertools.groupby(trainer.algorithms[0].samples, key=operator.itemgetter(0))
    return [sorted(sample for _, sample in samples) for _, samples in pairs]


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


def make(backend: str, data: Any, sizes: Sequence[int] = (), callbacks: Sequence[Callback] = (), **options: Any) -> Any:
    options = {"batch_size": 4, "epochs": len(sizes), "loss_fn": F.mse_loss, "lr_scheduler": "constant"} | options
    callbacks = [*([Resize(data, sizes)] if sizes else []), *callbacks]
    return make_trainer(backend, t16(dtype=torch.float32), data, callbacks=callbacks, algorithms=[Stream()], **options)


@pytest.mark.parametrize("backend", ["native", "accelerate", "hf"])
def test_length_is_asked_at_each_epoch(backend: str) -> None:
    pool, sizes = Pool(6), [6, 13, 3]
    for data in (pool, Subset(TensorDataset(pool.x, pool.y), range(6))):
        trainer = fit(make(backend, data, sizes, gradient_accumulation_steps=2))
        assert epochs_of(trainer) == [list(range(size)) for size in sizes]
        assert (trainer.progress.samples, trainer.progress.step, trainer.progress.epochs) == (22, 4, 3)
        assert trainer.stop_reason == "epochs"
    with pytest.raises(DataError, match="The training set now has 0 samples"):
        make(backend, Pool(6), [6, 0]).train()


def test_length_of_evaluation_set_is_asked() -> None:
    data, evaluation, lengths = Pool(6), Pool(4), list[int]()
    options = {"eval_dataset": evaluation, "compute_metrics": lambda _, labels: lengths.append(len(labels)) or {}}
    make("native", data, [6, 6], [Resize(evaluation, [4, 9])], **options).train()
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
    return [*map(len, epochs_of(trainer)), trainer.progress.samples, trainer.progress.step]


@pytest.mark.processes
def test_lengths_on_two_ranks(tmp_path: Path) -> None:
    """Of the same data they are shared out; others are an error on all ranks."""
    function, alike, other = "tests.data.test_changing_data:train", [[8, 14], [8, 14]], [[8, 14], [8, 13]]
    cases = [Case(backend, function, {"backend": backend, "sizes": alike}) for backend in ("ddp", "hf2")]
    cases.append(Case("other", function, {"backend": "ddp", "sizes": other}, environment=ON_CPU))
    outcomes = play(cases, tmp_path)
    for backend in ("ddp", "hf2"):
        assert [outcome.result for outcome in outcomes[backend]] == [[4, 7, 22, 3]] * 2
    for outcome in outcomes["other"]:
        assert outcome.code == 1 and "`the training set` is 14 on rank 0 and 13 on rank 1" in outcome.output


class Leveled(Pool):
    """Rows whose fourth number is the level: an attribute, or in an array."""

    def __init__(self, size: int, level: Any = 0) -> None:
        super().__init__(size)
        self.level = level

    def set(self, level: int) -> None:
        if isinstance(self.level, int):
            self.level = level
        else:
            self.level[0] = level

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return torch.cat([x[:3], torch.tensor([float(np.sum(self.level))])]), y


def levels(level: Any, num_workers: int, in_the_middle: bool = False) -> list[set[int]]:
    """Raise the level at the start of each epoch, or in the second step, and return those of each epoch."""
    data = Leveled(16, level)
    if in_the_middle:
        change = callback(on_step_end=lambda trainer: data.set(7) if trainer.progress.step == 2 else None)
    else:
        change = callback(on_epoch_start=lambda trainer: data.set(trainer.progress.epoch))
    trainer = make("native", Subset(data, range(16)), callbacks=[change], epochs=2, num_workers=num_workers)
    return [set(samples) for samples in epochs_of(fit(trainer))]


@pytest.mark.processes
def test_workers_see_changes_at_each_epoch(caplog: pytest.LogCaptureFixture) -> None:
    for level in (int, functools.partial(np.zeros, 1)):
        assert levels(level(), num_workers=1) == levels(level(), num_workers=0) == [{0}, {1}]
    assert "was changed while worker processes read it" not in caplog.text
    assert levels(0, num_workers=1, in_the_middle=True)[1] == {7}
    assert "The training set was changed while worker processes read it." in caplog.text


LOOP: Any = SimpleNamespace()
LOOP.value = [LOOP]
CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "attribute": (SimpleNamespace(value=1), lambda data: setattr(data, "value", 2)),
    "new attribute": (SimpleNamespace(value=1), lambda data: setattr(data, "other", 2)),
    "tensor": (torch.zeros(3), lambda data: data.add_(1)),
    "tensors": (TensorDataset(torch.zeros(3)), lambda data: setattr(data, "tensors", (torch.zeros(4),))),
    "array": (np.zeros((3, 2)), lambda data: data.fill(1)),
    "subset": (Subset(Pool(1), [1, 2]), lambda data: setattr(data.dataset, "value", 2)),
    "long list": ([SimpleNamespace(value=i) for i in range(40000)], lambda data: data.reverse()),
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
