"""The user's module on ranks: its modes in training, and the best weights at the end."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Job, asked_for, launch_all, make_trainer, named, sound, tensors_of
from marks import thinned
from recipes import rows, same, t16
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from omnitrain import Callback

HERE = Path(__file__).stem
BACKENDS = ("ddp", "fsdp", "hf2", "zero2", "zero3", "hf_fsdp", "hf_zero2", "hf_zero3")


class Rates(Callback):
    """Trains well for three steps, then with a rate by which the loss grows; keeps the weights of step 3."""

    order = 30
    weights: dict[str, torch.Tensor]

    def on_step_start(self, trainer: Any) -> None:
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.01 if trainer.progress.step < 3 else 1.0

    def on_eval_end(self, trainer: Any, metrics: Any) -> None:
        if trainer.progress.step == 3:
            self.weights = tensors_of(trainer)


def worsen(backend: str) -> dict[str, Any]:
    rates, data = Rates(), rows(32, torch.float32)
    trainer = make_trainer(
        backend, t16(dtype=torch.float32), data, data, loss_fn=F.mse_loss, batch_size=8, max_steps=8, eval_steps=1,
        load_best_at_end=True, patience=4, callbacks=[rates],
    )  # fmt: skip
    trainer.train()
    last = tensors_of(trainer)
    return {
        "best_step": trainer.metrics["best_step"],
        "best": trainer.metrics["best_valid"]["eval_loss"],
        "last": trainer.metrics["valid"][-1]["eval_loss"],
        "stopped": trainer.metrics["stop_reason"],
        "loss": trainer.evaluate()["eval_loss"],
        "tensors": {f"best/{name}": one for name, one in rates.weights.items()}
        | {f"last/{name}": one for name, one in last.items()},
    }


class Composed(nn.Module):
    """A frozen encoder with dropout, a normalization, and a head that trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.norm(self.encoder(x))))


class Modes(Callback):
    """Notes what is in training, whenever something may have changed it."""

    def __init__(self) -> None:
        self.modes: list[list[str]] = []

    def note(self, trainer: Any, metrics: Any = None) -> None:
        self.modes.append(in_training(trainer.model))

    on_step_start = on_step_end = on_eval_end = note


def in_training(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if module.training]


def freeze(backend: str) -> dict[str, Any]:
    model, modes, data = Composed(), Modes(), rows(32, torch.float32)
    model.encoder.eval()
    model.norm.eval()
    before = in_training(model)
    statistics = {name: one.clone() for name, one in model.named_buffers()}
    trainer = make_trainer(
        backend, model, data, data, loss_fn=F.mse_loss, batch_size=4, gradient_accumulation_steps=2, epochs=2,
        eval_steps=1, callbacks=[modes],
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    return {
        "before": before,
        "modes": [*modes.modes, in_training(trainer.model)],
        "moved": [name for name, one in trainer.model.named_buffers() if not torch.equal(one, statistics[name])],
    }


class Block(nn.Module):
    """A layer made of layers, as transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Messages(logging.Handler):
    """Collects the warnings of omnitrain while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> Messages:
        logging.getLogger("omnitrain").addHandler(self)
        return self

    def __exit__(self, *error: Any) -> None:
        logging.getLogger("omnitrain").removeHandler(self)


def divide(backend: str, layers: list[str]) -> dict[str, Any]:
    from accelerate.utils import FullyShardedDataParallelPlugin

    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(4, 1))
    policy = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": layers} if layers else {}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **policy)
    with Messages() as handler:
        make_trainer(
            backend, model, rows(16, torch.float32), loss_fn=F.mse_loss, batch_size=4, max_steps=1, fsdp_plugin=plugin
        ).train()  # fmt: skip
    return {"warnings": [message for message in handler.messages if "as one unit" in message]}


def split(backend: str) -> dict[str, Any]:
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stream = Dataset.from_list([{"x": [float(i)] * 4, "labels": [0.0]} for i in range(16)]).to_iterable_dataset(2)
    make_trainer(backend, t16(dtype=torch.float32), split_dataset_by_node(stream, rank, world_size), max_steps=1)
    return {}


class Stream(IterableDataset[Any]):
    """Rows, of which a process may take its share, with noise that may differ between processes."""

    def __init__(self, is_split: bool, noise: bool) -> None:
        self.rank = int(os.environ["RANK"]) if is_split else None
        self.noise = noise

    def __iter__(self) -> Any:
        generator = torch.Generator()
        generator.seed()
        for i in range(16):
            if self.rank is None or i % 2 == self.rank:
                yield torch.full((4,), i / 16) + self.noise * torch.randn(4, generator=generator), i


def read(backend: str, is_split: bool, noise: bool, loader: bool) -> dict[str, Any]:
    data: Any = Stream(is_split, noise)
    options = {"train_loader": DataLoader(data, 4)} if loader else {"train_dataset": data, "batch_size": 4}
    with Messages() as handler:
        make_trainer(backend, nn.Linear(4, 16), loss_fn=F.cross_entropy, max_steps=1, **options).train()
    return {"warnings": [message for message in handler.messages if "first sample" in message]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    jobs = [
        Job(f"{function}-{backend}", backend, f"{HERE}:{function}")
        for function, test in {"worsen": "test_best_weights", "freeze": "test_frozen"}.items()
        for backend in sorted(asked_for(request, "backend", test=test))
    ]
    jobs += [Job(f"divide-{len(layers)}", "fsdp", f"{HERE}:divide", {"layers": layers}) for layers in ([], ["Block"])]
    for noise in (False, True):
        for loader in (False, True):
            options = {"is_split": False, "noise": noise, "loader": loader}
            jobs.append(Job(f"read-{noise}-{loader}", "ddp", f"{HERE}:read", options))
    split = {"is_split": True, "noise": True, "loader": False}
    failing = [Job("by node", "ddp", f"{HERE}:split"), Job("by hand", "ddp", f"{HERE}:read", split)]
    found = launch_all([*jobs, *failing], tmp_path_factory.mktemp("module"))  # the last, as their errors end the launch
    errors = {job.name: found.pop(job.name) for job in failing}
    sound(found).update(errors)
    return found


@pytest.mark.parametrize("backend", thinned(BACKENDS, ("fsdp", "hf2")))
def test_best_weights_without_a_folder_reach_every_rank(results: Any, backend: str) -> None:
    for rank in results[f"worsen-{backend}"]:
        assert (rank["best_step"], rank["stopped"]) == (3, "early_stopping")
        assert rank["last"] > rank["best"]
        assert rank["loss"] == pytest.approx(rank["best"], rel=1e-6)
        assert same(named(rank, "best").values(), named(rank, "last").values())


@pytest.mark.parametrize("backend", thinned(BACKENDS, ("ddp", "hf2")))
def test_frozen_modules_stay_in_eval_mode(results: Any, backend: str) -> None:
    """In steps and after evaluations."""
    for rank in results[f"freeze-{backend}"]:
        assert rank["before"] == ["", "dropout", "head"]
        assert len(rank["modes"]) > 12
        assert all(modes == rank["before"] for modes in rank["modes"])
        assert rank["moved"] == []


def test_fsdp_warns_once_of_layers_in_one_unit(results: Any) -> None:
    (warning,), other = (rank["warnings"] for rank in results["divide-0"])
    assert "takes Sequential as one unit" in warning and "transformer_cls_names_to_wrap=['Block']" in warning
    assert not other and not any(rank["warnings"] for rank in results["divide-1"])


@pytest.mark.parametrize("loader", [False, True], ids=["stream", "loader"])
def test_first_samples_that_differ_are_warned_of_once(results: Any, loader: bool) -> None:
    assert [rank["warnings"] for rank in results[f"read-False-{loader}"]] == [[], []]
    (warning,), other = (rank["warnings"] for rank in results[f"read-True-{loader}"])
    assert "has other numbers on each rank" in warning and not other


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("by node", "ConfigError", "was split by split_dataset_by_node"),
        ("by hand", "DistributedError", "The first sample of the training set is another one on each rank"),
    ],
)
def test_stream_that_is_split_already_is_an_error(results: Any, how: str, error: str, words: str) -> None:
    for rank in results[how]:
        assert rank["error"] == error and words in rank["message"]
