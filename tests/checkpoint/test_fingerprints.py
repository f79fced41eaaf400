"""Fingerprints of data and code, and resumes that they reject."""

import functools
import importlib.util
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from marks import make_small, thinned
from recipes import Noisy, fit, states
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from omnitrain import CheckpointError, Trainer
from omnitrain.checkpoint.fingerprints import code_digest, content_digest, data_fingerprint
from omnitrain.data.loaders import UserLoader, make_loader


def plain_loss(outputs: Any, labels: Any) -> Any:
    return F.cross_entropy(outputs, labels)


def data(size: int = 12, flipped: bool = False) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(size) % 3
    return TensorDataset(torch.randn(size, 4, generator=generator), 2 - labels if flipped else labels)


class Counted(Dataset[Any]):
    """Four numbers, and how many were read."""

    reads = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return torch.tensor(index)


def make(folder: Path, kind: str = "native", model: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"data": data(), "loss_fn": plain_loss, **options}
    return make_small(kind, model or nn.Linear(4, 3), save_dir=folder, **options)


def module_function(folder: Path, text: str) -> Callable[..., Any]:
    """Return the function `f` of a module that is written and imported here."""
    path = folder / "written.py"
    path.write_text(text)
    spec: Any = importlib.util.spec_from_file_location("written", path)
    module = sys.modules["written"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    linecache.checkcache()
    return module.f


@pytest.mark.parametrize(("kind", "options"), [("native", {}), ("native", {"drop_last": True}), ("hf", {})])
def test_identity_rejects_other_labels_and_names_a_sample(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    size = 13 if options else 12  # of which `drop_last` leaves 12 for the steps of an epoch
    make(tmp_path, kind, epochs=1, **{"data": data(size), **options}).train()
    other = {"data": data(size, flipped=True), **options}
    with pytest.raises(CheckpointError, match=r"other data.* sample \d+ of the training set .*its entry 1"):
        make(tmp_path, kind, **other, epochs=2).train(resume_from="auto")
    trainer = fit(make(tmp_path, kind, **other, epochs=2), resume_from="auto", allow_change={"train_dataset"})
    assert trainer.progress.step == 6
    make(tmp_path, kind, **other, epochs=3).train(resume_from="auto")


def test_identity_names_the_evaluation_set_that_differs(tmp_path: Path) -> None:
    make(tmp_path, eval_dataset={"dev": data(8), "web": data(8)}, epochs=1).train()
    for eval_dataset, message in (
        ({"dev": data(8), "web": data(8, flipped=True)}, "of the evaluation set 'web' is not the one"),
        ({"dev": data(9)}, "the evaluation set 'dev' has 9 samples now, and had 8"),
    ):
        trainer = make(tmp_path, epochs=2, eval_dataset=eval_dataset)
        with pytest.raises(CheckpointError, match="which would change the run") as caught:
            trainer.train(resume_from="auto")
        assert message in str(caught.value) and "allow_change={'eval_dataset'}" in str(caught.value)
        assert trainer.progress.step == 0
        trainer.train(resume_from="auto", allow_change={"eval_dataset"})


BODIES = {
    "loss_fn": "def f(outputs, labels):\n    return F.cross_entropy(outputs, labels) {}\n",
    "data_collator": "def f(samples):\n    return tuple(torch.stack(column) {} for column in zip(*samples))\n",
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


@pytest.mark.parametrize("name", thinned(BODIES, ["data_collator", "unit", "model"]))
def test_identity_rejects_other_code_of_the_same_name(name: str, tmp_path: Path) -> None:
    def trainer(change: str, epochs: int) -> Trainer:
        head = "import torch\nimport torch.nn.functional as F\n\n\n"
        function = module_function(tmp_path, head + BODIES[name].format(change))
        model: nn.Module = function() if name == "model" else nn.Linear(4, 3)
        options: dict[str, Any] = {"loss_fn": None if name == "unit" else plain_loss, "eval_dataset": data(8)}
        if name != "model":
            options[name] = function(model) if name == "unit" else function
        return make(tmp_path / "run", model=model, epochs=epochs, **options)

    trainer("* 1", 1).train()
    trainer("*   1", 2).train(resume_from="auto")  # formatting is no change
    with pytest.raises(CheckpointError, match=f"other code.*{name}: the code or the options of"):
        trainer("* 1 * 1", 3).train(resume_from="auto")
    trainer("* 1 * 1", 3).train(resume_from="auto", allow_change={name})


def fingerprint(dataset: Any, **options: Any) -> Any:
    return data_fingerprint(make_loader(dataset, 2, name="train_dataset", **options))


def test_data_of_random_samples_is_keyed_and_leaves_generators() -> None:
    """Samples that are random by their index are compared, and entries that are random otherwise are left out."""
    before = states()
    first = fingerprint(Noisy())
    assert before == states()
    torch.manual_seed(4)
    assert first == fingerprint(Noisy(), seed=5) and first["samples"]

    class Unkeyed(Counted):
        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            return {"x": self.reads, "y": index, "z": object()}

    assert [list(parts) for parts in fingerprint(Unkeyed())["samples"].values()] == [["y"]] * 4


def test_data_of_loaders_streams_and_broken_datasets() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("it is not to be read")

    class Broken(Counted):
        def __getitem__(self, index: int) -> Any:
            raise KeyError(index)

    dataset = Counted()
    first = fingerprint(dataset)
    assert first is not None and dataset.reads == 8
    assert data_fingerprint(UserLoader(DataLoader(dataset, 2), 0)) == first
    assert fingerprint(Stream()) is None and fingerprint(Broken()) == {"size": 4, "samples": {}}


@pytest.mark.processes
def test_data_of_a_loader_with_workers_is_read_by_workers() -> None:
    dataset = Counted()
    with_workers = fingerprint(dataset, num_workers=1)
    assert dataset.reads == 0 and with_workers == fingerprint(dataset) is not None


def test_content_digest_of_values_that_differ() -> None:
    for value, other in (
        (torch.zeros(2), torch.zeros(3)), (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)),
        (np.zeros(2), np.ones(2)), ("a", b"a"), ([1, 2], [2, 1]), ({"a": 1}, {"b": 1}), (["ab", "c"], ["a", "bc"]),
        (True, 1), (np.array(["a", {"b": 1}], dtype=object), np.array(["a", {"b": 2}], dtype=object)),
    ):  # fmt: skip
        assert content_digest(value) == content_digest(value) is not None
        assert content_digest(value) != content_digest(other)


def test_content_digest_of_a_part() -> None:
    """What has no stable content hides nothing else, and objects count by their tensors."""
    graphs = [SimpleNamespace(x=torch.full((2,), value), size=object()) for value in (0.0, 0.0, 1.0)]
    parts = [{"graph": graph, "other": object(), "y": torch.eye(2).to_sparse()} for graph in graphs]
    first, same, other = (content_digest(part, is_partial=True) for part in parts)
    assert first == same != other and content_digest(parts[0]) is None
    assert content_digest(torch.eye(2).to_sparse()) == content_digest(torch.eye(2))


def pair(limit: int) -> Callable[..., Any]:
    """Return a function that calls another, which calls it."""

    def even(number: int) -> bool:
        return number > limit or odd(number + 1)

    def odd(number: int) -> bool:
        return number > limit and even(number + 1)

    return even


def test_code_includes_options_but_not_counters() -> None:
    def focal(alpha: float) -> Callable[..., Any]:
        return lambda outputs, labels: alpha * F.cross_entropy(outputs, labels)

    class Counting:
        calls = 0

        def __call__(self, outputs: Any, labels: Any) -> Any:
            self.calls += 1

    smooth = [functools.partial(F.cross_entropy, label_smoothing=0.1) for _ in range(2)]
    weighted = [nn.CrossEntropyLoss(weight=torch.tensor([1.0, weight])) for weight in (1.0, 1.0, 2.0)]
    loss = Counting()
    for code, equal, other in (
        (focal(0.5), focal(0.5), focal(0.6)), (*smooth, F.cross_entropy), weighted, (pair(3), pair(3), pair(4)),
        (lambda o, y: o - y, lambda o, y: o - y, lambda o, y: y - o), (loss, loss, Counting),
    ):  # fmt: skip
        digest = code_digest(code)
        loss(1, 2)
        assert digest == code_digest(equal) != code_digest(other)
