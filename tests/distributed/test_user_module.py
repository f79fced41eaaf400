"""The user's module on ranks: it keeps the modes that the user gave it, and ends a run on its best weights."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Job, asked_for, launch_all, make_trainer, named, sound
from marks import thinned
from recipes import rows, same, t16
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from omnitrain import Callback
from omnitrain.checkpoint.tensors import whole

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
            self.weights = weights_of(trainer)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: whole(one).clone() for name, one in sorted(trainer.backend.model_tensors().items())}


def worsen(backend: str) -> dict[str, Any]:
    noted, data = Rates(), rows(32, torch.float32)
    trainer = make_trainer(
        backend, t16(dtype=torch.float32), data, data, loss_fn=F.mse_loss, batch_size=8, max_steps=8, eval_steps=1,
        load_best_at_end=True, patience=4, callbacks=[noted],
    )  # fmt: skip
    trainer.train()
    ended = weights_of(trainer)
    return {
        "best_step": trainer.metrics["best_step"],
        "best": trainer.metrics["best_valid"]["eval_loss"],
        "last": trainer.metrics["valid"][-1]["eval_loss"],
        "stopped": trainer.metrics["stop_reason"],
        "loss": trainer.evaluate()["eval_loss"],
        "tensors": {f"kept/{name}": one for name, one in noted.weights.items()}
        | {f"ended/{name}": one for name, one in ended.items()},
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
        self.seen: list[list[str]] = []

    def on_step_start(self, trainer: Any) -> None:
        self.seen.append(in_training(trainer.model))

    def on_step_end(self, trainer: Any) -> None:
        self.seen.append(in_training(trainer.model))

    def on_eval_end(self, trainer: Any, metrics: Any) -> None:
        self.seen.append(in_training(trainer.model))


def in_training(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if module.training]


def freeze(backend: str) -> dict[str, Any]:
    model, noted, data = Composed(), Modes(), rows(32, torch.float32)
    model.encoder.eval()
    model.norm.eval()
    before = in_training(model)
    statistics = {name: one.clone() for name, one in model.named_buffers()}
    trainer = make_trainer(
        backend, model, data, data, loss_fn=F.mse_loss, batch_size=4, gradient_accumulation_steps=2, epochs=2,
        eval_steps=1, callbacks=[noted],
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    return {
        "before": before,
        "seen": [*noted.seen, in_training(trainer.model)],
        "moved": [name for name, one in trainer.model.named_buffers() if not torch.equal(one, statistics[name])],
    }


class Block(nn.Module):
    """A layer made of layers, as transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Told(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def divide(backend: str, layers: list[str]) -> dict[str, Any]:
    from accelerate.utils import FullyShardedDataParallelPlugin

    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(4, 1))
    named: dict[str, Any] = {
        "auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": layers
    } if layers else {}  # fmt: skip
    logging.getLogger("omnitrain").addHandler(told := Told())
    try:
        make_trainer(
            backend, model, rows(16, torch.float32), loss_fn=F.mse_loss, batch_size=4, max_steps=1,
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **named),
        ).train()  # fmt: skip
    finally:
        logging.getLogger("omnitrain").removeHandler(told)
    return {"told": [one for one in told.messages if "as one unit" in one]}


def split(backend: str) -> dict[str, Any]:
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stream = Dataset.from_list([{"x": [float(i)] * 4, "labels": [0.0]} for i in range(16)]).to_iterable_dataset(2)
    make_trainer(backend, t16(dtype=torch.float32), split_dataset_by_node(stream, rank, world_size), max_steps=1)
    return {}


class Every(IterableDataset[Any]):
    """Rows, of which a process may take its own share, with numbers that may be of the process's own generator."""

    def __init__(self, is_split: bool, noise: bool) -> None:
        self.own = int(os.environ["RANK"]) if is_split else None
        self.noise = noise

    def __iter__(self) -> Any:
        generator = torch.Generator()
        generator.seed()
        for i in range(16):
            if self.own is None or i % 2 == self.own:
                yield torch.full((4,), i / 16) + self.noise * torch.randn(4, generator=generator), i


def read_apart(backend: str, is_split: bool, noise: bool, loader: bool) -> dict[str, Any]:
    told = Told()
    logging.getLogger("omnitrain").addHandler(told)
    data: Any = Every(is_split, noise)
    given = {"train_loader": DataLoader(data, 4)} if loader else {"train_dataset": data, "batch_size": 4}
    try:
        make_trainer(backend, nn.Linear(4, 16), loss_fn=F.cross_entropy, max_steps=1, **given).train()
    finally:
        logging.getLogger("omnitrain").removeHandler(told)
    return {"told": [one for one in told.messages if "first sample" in one]}


APART = {
    f"{what}-{source}": {"is_split": what == "split", "noise": what != "same", "loader": source == "loader"}
    for what in ("same", "noisy")
    for source in ("stream", "loader")
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    jobs = [
        Job(f"{function}-{backend}", backend, f"{HERE}:{function}")
        for function, test in {"worsen": "test_worsened", "freeze": "test_freezing"}.items()
        for backend in sorted(asked_for(request, "backend", test=test))
    ]
    jobs += [
        Job(f"divide-{'-'.join(layers)}", "fsdp", f"{HERE}:divide", {"layers": layers}) for layers in ([], ["Block"])
    ]
    jobs += [Job(name, "ddp", f"{HERE}:read_apart", options) for name, options in APART.items()]
    found = launch_all([*jobs, Job("split-ddp", "ddp", f"{HERE}:split")], tmp_path_factory.mktemp("module"))
    refused = found.pop("split-ddp")
    sound(found)["split-ddp"] = refused
    return found


@pytest.mark.parametrize("backend", thinned(BACKENDS, ("ddp", "fsdp", "zero3")))
def test_worsened_weights_give_way_to_the_best_on_every_rank_without_a_folder(results: Any, backend: str) -> None:
    for found in results[f"worsen-{backend}"]:
        assert (found["best_step"], found["stopped"]) == (3, "early_stopping")
        assert found["last"] > found["best"]
        assert found["loss"] == pytest.approx(found["best"], rel=1e-6)
        assert same(named(found, "kept").values(), named(found, "ended").values())


@pytest.mark.parametrize("backend", thinned(BACKENDS, ("ddp", "zero3", "hf2")))
def test_freezing_modules_by_eval_keeps_them_so_in_steps_and_after_evaluations(results: Any, backend: str) -> None:
    for found in results[f"freeze-{backend}"]:
        assert found["before"] == ["", "dropout", "head"]
        assert len(found["seen"]) > 12
        assert all(modes == found["before"] for modes in found["seen"])
        assert found["moved"] == []


def test_fsdp_tells_once_of_a_model_of_layers_that_it_gathers_as_a_whole(results: Any) -> None:
    (main,), other = (found["told"] for found in results["divide-"])
    assert "takes Sequential as one unit" in main and "transformer_cls_names_to_wrap=['Block']" in main
    assert not other and not any(found["told"] for found in results["divide-Block"])


@pytest.mark.parametrize("source", ["stream", "loader"])
def test_other_numbers_of_the_same_sample_are_told_once(results: Any, source: str) -> None:
    assert [found["told"] for found in results[f"same-{source}"]] == [[], []]
    (main,), other = (found["told"] for found in results[f"noisy-{source}"])
    assert "has other numbers on each rank" in main and not other


def test_a_stream_of_which_each_rank_has_a_share_already_is_refused(results: Any) -> None:
    for found in results["split-ddp"]:
        assert found["error"] == "ConfigError" and "was split by split_dataset_by_node" in found["message"]
