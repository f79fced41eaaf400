"""The user's module on ranks: its modes in training, and the best weights at the end."""

import itertools
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Jobs, asked_for, launch_all, make_trainer, tensors_of
from counting import Streamed
from forking import current_rank
from marks import thinned
from recipes import callback, fit, rows, same, t16
from torch import nn
from torch.utils.data import DataLoader

from omnitrain import Callback

BACKENDS = ("ddp", "fsdp", "hf2", "zero2", "zero3", "hf_fsdp")


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
    trainer = fit(make_trainer(
        backend, t16(dtype=torch.float32), data, data, loss_fn=F.mse_loss, batch_size=8, max_steps=8, eval_steps=1,
        load_best_at_end=True, patience=4, callbacks=[rates],
    ))  # fmt: skip
    metrics, best = trainer.metrics, trainer.metrics["best_valid"]["eval_loss"]
    assert same(rates.weights.values(), tensors_of(trainer).values())
    assert (metrics["best_step"], metrics["stop_reason"]) == (3, "early_stopping")
    assert metrics["valid"][-1]["eval_loss"] > best == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-6)
    return {}


def freeze(backend: str) -> dict[str, Any]:
    """Look which modules are in training whenever something may have changed it, and whether statistics change."""
    encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).requires_grad_(False).eval()
    model = nn.Sequential(encoder, nn.BatchNorm1d(8).eval(), nn.Dropout(0.5), nn.Linear(8, 1))
    modes, data = list[list[str]](), rows(32, torch.float32)

    def note(trainer: Any, *metrics: Any) -> None:
        modes.append([name for name, module in trainer.model.named_modules() if module.training])

    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    trainer = fit(make_trainer(
        backend, model, data, data, loss_fn=F.mse_loss, batch_size=4, gradient_accumulation_steps=2, epochs=2,
        eval_steps=1, callbacks=[callback(on_step_start=note, on_step_end=note, on_eval_end=note)],
    ))  # fmt: skip
    trainer.evaluate()
    note(trainer)
    assert len(modes) > 12 and all(names == ["", "2", "3"] for names in modes)
    assert same(statistics.values(), (buffer for _, buffer in trainer.model.named_buffers()))
    return {}


class Block(nn.Sequential):
    """A layer made of layers, as transformers have them."""


def warnings_of(text: str, *parts: Any, **options: Any) -> dict[str, Any]:
    """Make a trainer and train it; return the warnings of omnitrain in which a text is."""
    messages, logger, handler = list[str](), logging.getLogger("omnitrain"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    make_trainer(*parts, max_steps=1, **options).train()
    logger.removeHandler(handler)
    return {"warnings": [message for message in messages if text in message]}


def divide(backend: str, layers: list[str]) -> dict[str, Any]:
    from accelerate.utils import FullyShardedDataParallelPlugin

    torch.manual_seed(0)
    blocks = [Block(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(4, 1))
    policy = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": layers} if layers else {}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **policy)
    options = {"loss_fn": F.mse_loss, "batch_size": 4, "fsdp_plugin": plugin}
    return warnings_of("as one unit", backend, model, rows(16, torch.float32), **options)


def split(backend: str) -> dict[str, Any]:
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    rank, world_size = current_rank(), int(os.environ["WORLD_SIZE"])
    stream = Dataset.from_list([{"x": [float(i)] * 4, "labels": [0.0]} for i in range(16)]).to_iterable_dataset(2)
    make_trainer(backend, t16(dtype=torch.float32), split_dataset_by_node(stream, rank, world_size), max_steps=1)
    return {}


def read(backend: str, is_split: bool, noise: bool, loader: bool) -> dict[str, Any]:
    """Train on a stream, of which a process may take its share, with noise that may differ between processes."""
    generator = torch.Generator().manual_seed(current_rank())
    xs = torch.arange(16)[:, None] / 16 + noise * torch.randn(16, 4, generator=generator)
    data = Streamed([(x, i) for i, x in enumerate(xs) if not is_split or i % 2 == current_rank()])
    options = {"train_loader": DataLoader(data, 4)} if loader else {"train_dataset": data, "batch_size": 4}
    return warnings_of("first sample", backend, nn.Linear(4, 16), loss_fn=F.cross_entropy, **options)


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    jobs = Jobs()
    for test, function in {"best_weights": worsen, "frozen": freeze}.items():
        for backend in sorted(asked_for(request, "backend", test=f"test_{test}")):
            jobs.add(f"{function.__name__}-{backend}", backend, function)
    for layers in ([], ["Block"]):
        jobs.add(f"divide-{len(layers)}", "fsdp", divide, layers=layers)
    for noise, loader in itertools.product((False, True), (False, True)):
        jobs.add(f"read-{noise}-{loader}", "ddp", read, is_split=False, noise=noise, loader=loader)
    jobs.add("by node", "ddp", split)  # the last, as their errors end the launch
    jobs.add("by hand", "ddp", read, is_split=True, noise=True, loader=False)
    return launch_all(jobs, folder)


@pytest.mark.parametrize("backend", thinned(BACKENDS, ("fsdp", "hf2")))
def test_best_weights_without_a_folder_reach_every_rank(results: Any, backend: str) -> None:
    assert results[f"worsen-{backend}"] == [{}, {}]


@pytest.mark.parametrize("backend", thinned(BACKENDS, ("ddp", "hf2")))
def test_frozen_modules_stay_in_eval_mode(results: Any, backend: str) -> None:
    assert results[f"freeze-{backend}"] == [{}, {}]


def test_fsdp_warns_once_of_layers_in_one_unit(results: Any) -> None:
    (warning,), other = (rank["warnings"] for rank in results["divide-0"])
    assert "takes Sequential as one unit" in warning and "transformer_cls_names_to_wrap=['Block']" in warning
    assert not other and not any(rank["warnings"] for rank in results["divide-1"])


@pytest.mark.parametrize("loader", [False, True], ids=["stream", "loader"])
def test_first_samples_that_differ_are_warned_of_once(results: Any, loader: bool) -> None:
    assert [rank["warnings"] for rank in results[f"read-False-{loader}"]] == [[], []]
    (warning,), other = (rank["warnings"] for rank in results[f"read-True-{loader}"])
    assert "has other numbers on each rank" in warning and not other


@pytest.mark.parametrize(("how", "error", "words"), [
    ("by node", "ConfigError", "was split by split_dataset_by_node"),
    ("by hand", "DistributedError", "The first sample of the training set is another one on each rank"),
])  # fmt: skip
def test_stream_that_is_split_already_is_an_error(results: Any, how: str, error: str, words: str) -> None:
    for rank in results[how]:
        assert rank["error"] == error and words in rank["message"]
