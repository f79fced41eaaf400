from __future__ import annotations

import functools
import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recipes import Noisy
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from omnitrain import AccelerateTrainer, CheckpointError, HFTrainer, Trainer
from omnitrain.checkpoint.identity import code_of, content_of, data_of
from omnitrain.data.loaders import GivenLoader, make_loader

TRAINERS = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}


def plain_loss(outputs: Any, labels: Any) -> Any:
    return F.cross_entropy(outputs, labels)


def data(size: int = 24, flipped: bool = False) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(size) % 3
    return TensorDataset(torch.randn(size, 4, generator=generator), 2 - labels if flipped else labels)


def make(folder: Path, trainer_class: Any = Trainer, **options: Any) -> Any:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "train_dataset": data(), "loss_fn": plain_loss, "batch_size": 4, "save_dir": folder, "progress_bar": False,
    }  # fmt: skip
    placed = {"device": "cpu"} if trainer_class is Trainer else {}
    return trainer_class(nn.Linear(4, 3), **{**given, **placed, **options})


def refused(folder: Path, name: str, **options: Any) -> str:
    trainer = make(folder, epochs=2, **options)
    with pytest.raises(CheckpointError, match="which would change the run") as caught:
        trainer.train(resume_from="auto")
    assert f"allow_change={{{name!r}}}" in str(caught.value)
    assert trainer.progress.step == 0
    make(folder, epochs=2, **options).train(resume_from="auto", allow_change={name})
    return str(caught.value)


def written(folder: Path, text: str, name: str = "f") -> Callable[..., Any]:
    """A function of a module that was just written."""
    path = folder / "written.py"
    path.write_text(text)
    spec: Any = importlib.util.spec_from_file_location("written", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import linecache
    import sys

    sys.modules["written"] = module
    linecache.checkcache()
    return getattr(module, name)


@pytest.mark.parametrize("trainer_class", TRAINERS.values(), ids=TRAINERS)
def test_a_resume_with_other_labels_is_refused_and_names_a_sample(trainer_class: Any, tmp_path: Path) -> None:
    make(tmp_path, trainer_class, epochs=1).train()
    trainer = make(tmp_path, trainer_class, train_dataset=data(flipped=True), epochs=2)
    with pytest.raises(CheckpointError, match=r"other data.* sample \d+ of the training set .*its entry 1"):
        trainer.train(resume_from="auto")
    trainer = make(tmp_path, trainer_class, train_dataset=data(flipped=True), epochs=2)
    trainer.train(resume_from="auto", allow_change={"train_dataset"})
    assert trainer.progress.step == 12
    make(tmp_path, trainer_class, train_dataset=data(flipped=True), epochs=3).train(resume_from="auto")


def test_other_evaluation_data_are_refused_by_the_name_of_their_set(tmp_path: Path) -> None:
    make(tmp_path, eval_dataset={"dev": data(8), "web": data(8)}, epochs=1).train()
    words = refused(tmp_path, "eval_dataset", eval_dataset={"dev": data(8), "web": data(8, flipped=True)})
    assert "of the evaluation set 'web' is not the one" in words
    assert "the evaluation set 'dev' has 9 samples now, and had 8" in refused(
        tmp_path, "eval_dataset", eval_dataset={"dev": data(9)}
    )


@pytest.mark.parametrize("name", ["loss_fn", "data_collator", "unit", "compute_metrics", "model"])
def test_other_code_under_the_same_name_is_refused(name: str, tmp_path: Path) -> None:
    bodies = {
        "loss_fn": "def f(outputs, labels):\n    return F.cross_entropy(outputs, labels) {}\n",
        "data_collator": "def f(samples):\n    return tuple(torch.stack(one) {} for one in zip(*samples))\n",
        "unit": (
            "class Unit:\n    def __init__(self, model):\n        self.model = model\n\n"
            "    def __call__(self, batch):\n"
            "        return F.cross_entropy(self.model(batch[0]), batch[1]) {}\n\n\n"
            "def f(model):\n    return Unit(model)\n"
        ),
        "compute_metrics": "def f(y_true, y_pred):\n    return {{'acc': float((y_true == y_pred).mean()) {}}}\n",
        "model": (
            "class Net(torch.nn.Linear):\n    def forward(self, x):\n        return super().forward(x) {}\n\n\n"
            "def f():\n    return Net(4, 3)\n"
        ),
    }

    def trainer(change: str, epochs: int) -> Trainer:
        head = "import torch\nimport torch.nn.functional as F\n\n\n"
        function = written(tmp_path, head + bodies[name].format(change))
        model: nn.Module = function() if name == "model" else nn.Linear(4, 3)
        given: dict[str, Any] = {"loss_fn": plain_loss, "eval_dataset": data(8)}
        if name != "model":
            given[name] = function(model) if name == "unit" else function
        given |= {"loss_fn": None} if name == "unit" else {}
        return Trainer(
            model, train_dataset=data(), batch_size=4, epochs=epochs, device="cpu", progress_bar=False,
            save_dir=tmp_path / "run", **given,
        )  # fmt: skip

    trainer("* 1", 1).train()
    trainer("*   1", 2).train(resume_from="auto")  # formatting is no change
    with pytest.raises(CheckpointError, match=f"other code.*{name}: the code or the options of"):
        trainer("* 1 * 1", 3).train(resume_from="auto")
    trainer("* 1 * 1", 3).train(resume_from="auto", allow_change={name})


def test_a_checkpoint_without_fingerprints_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, epochs=1)
    monkeypatch.setattr(trainer._checkpointer._contents, "identify", lambda *_: None)
    trainer.train()
    trainer = make(tmp_path, train_dataset=data(flipped=True), epochs=2)
    trainer.train(resume_from="auto")
    assert trainer.progress.step == 12


def test_random_samples_are_compared_by_what_is_keyed_and_others_left_out() -> None:
    random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    first = data_of(make_loader(Noisy(), 4, name="train_dataset"))
    random.seed(1)
    torch.manual_seed(4)
    assert first == data_of(make_loader(Noisy(), 4, name="train_dataset", seed=5)) and first is not None
    assert first["samples"]
    torch.set_rng_state(torch.tensor(before[2], dtype=torch.uint8))
    data_of(make_loader(Noisy(), 4, name="train_dataset"))
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]

    class Unkeyed(Dataset[Any]):
        turn = 0

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            self.turn += 1
            return {"x": self.turn, "y": index, "z": object()}

    found = data_of(make_loader(Unkeyed(), 2, name="train_dataset"))
    assert found is not None and [list(parts) for parts in found["samples"].values()] == [["y"]] * 3


def test_workers_read_the_samples_where_the_loader_has_some() -> None:
    class Opened(Dataset[Any]):
        reads = 0

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            return torch.tensor(index)

    dataset = Opened()
    alone, shared = (data_of(make_loader(dataset, 2, name="train_dataset", num_workers=n)) for n in (0, 1))
    assert alone == shared is not None
    assert dataset.reads == 8, "those of the process without workers"
    assert data_of(GivenLoader(DataLoader(dataset, 2), 0)) == alone


def test_streams_and_what_cannot_be_read_have_no_fingerprint() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("it is not to be read")

    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            raise KeyError(index)

    assert data_of(make_loader(Stream(), 2, name="train_dataset")) is None
    assert data_of(make_loader(Broken(), 2, name="train_dataset")) == {"size": 4, "samples": {}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)),
        (np.zeros(2), np.ones(2)),
        ("a", b"a"),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"b": 1}),
        (["ab", "c"], ["a", "bc"]),
        (True, 1),
        (np.array(["a", {"b": 1}], dtype=object), np.array(["a", {"b": 2}], dtype=object)),
    ],
)
def test_contents_that_differ_have_other_digests(one: Any, other: Any) -> None:
    assert content_of(one) is not None
    assert content_of(one) != content_of(other)
    assert content_of(one) == content_of(one)


def focal(alpha: float) -> Callable[..., Any]:
    def loss(outputs: Any, labels: Any) -> Any:
        return alpha * F.cross_entropy(outputs, labels)

    return loss


def test_options_of_a_loss_count_and_what_changes_while_it_is_used_does_not() -> None:
    assert code_of(focal(0.5)) == code_of(focal(0.5)) != code_of(focal(0.6))
    partial = functools.partial(F.cross_entropy, label_smoothing=0.1)
    assert code_of(partial) == code_of(functools.partial(F.cross_entropy, label_smoothing=0.1))
    assert code_of(partial) != code_of(F.cross_entropy)
    weighted = [nn.CrossEntropyLoss(weight=torch.tensor([1.0, weight])) for weight in (1.0, 1.0, 2.0)]
    assert code_of(weighted[0]) == code_of(weighted[1]) != code_of(weighted[2])
    assert code_of(lambda o, y: o - y) != code_of(lambda o, y: y - o)

    class Counting:
        calls = 0

        def __call__(self, outputs: Any, labels: Any) -> Any:
            self.calls += 1

    used = Counting()
    before = code_of(used)
    used(1, 2)
    assert code_of(used) == before
