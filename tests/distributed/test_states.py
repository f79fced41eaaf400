"""What users bring, on two ranks and over a resume: modules with their buffers and modes, states, data and streams."""

import itertools
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import PROCESSES, Jobs, asked_for, bound, gap, launch_all, make_trainer, named, sound, tensors_of
from counting import BATCH_SIZE, SIZE, Resumable, ResumableShare, Streamed, made
from forking import current_rank, joined
from marks import thinned
from recipes import StopAt, callback, fit, rows, same, t16
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, default_collate

from omnitrain import Callback
from omnitrain.core.errors import ConfigError, DistributedError


class Drifting(nn.Module):
    """Normalizes by BatchNorm, and by a running mean that its forward passes in training use, as a codebook's are.

    It scales by a buffer whose elements share memory.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("center", torch.zeros(8))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("scale", torch.full((1,), 1.5).expand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.body(x))
        if self.training:
            with torch.no_grad():
                self.get_buffer("center").lerp_(hidden.square().mean(0), 0.5)
        return self.head((hidden - self.get_buffer("center")).tanh() * self.scale)


def drift(backend: str, folder: str | None = None, stop: int = 0) -> dict[str, Any]:
    """Train for 6 steps; with a folder, evaluate and save on the way, stop after a step, or resume from there."""
    options, tensors = dict[str, Any](), dict[str, torch.Tensor]()

    def keep_buffers(trainer: Any, metrics: Any) -> None:
        buffers = trainer.get_model().named_buffers()
        tensors.update({f"evaluation {trainer.progress.step}/{name}": buffer.clone() for name, buffer in buffers})

    if folder:
        options = {"eval_dataset": rows(8, torch.float32), "eval_steps": 2, "save_dir": folder, "save_steps": 2}
        options["load_best_at_end"] = False
    trainer = make_trainer(
        backend, Drifting(), rows(24, torch.float32), loss_fn=F.mse_loss, batch_size=4, epochs=2, learning_rate=0.05,
        optimizer="torch.optim.AdamW", callbacks=[callback(on_eval_end=keep_buffers), StopAt(stop)], **options,
    )  # fmt: skip
    trainer.train(resume_from=folder and "auto")
    tensors |= {f"weights/{name}": tensor for name, tensor in tensors_of(trainer).items()}
    if folder:
        trainer.load_checkpoint("best")
    return {
        "best": trainer.metrics["best_valid"].get("eval_loss"), "tensors": {**tensors},
        "again": [trainer.evaluate()["eval_loss"] for _ in range(2)] if folder else [],
    }  # fmt: skip


class Replacing(nn.Module):
    """Replaces a buffer, which the next forward pass uses, by one whose elements share memory, or by a copy of that."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.copies = nn.Linear(4, 1), copies
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.head(x - self.center)
        if self.training:
            center = x.detach().mean().expand(4)
            self.center = center.clone() if self.copies else center
        return output


def replace(backend: str, copies: bool) -> dict[str, Any]:
    data = rows(24, torch.float32)
    trainer = fit(make_trainer(
        backend, Replacing(copies), data, loss_fn=F.mse_loss, batch_size=2, global_batch_size=8, epochs=1,
        learning_rate=0.05, eval_dataset=data[:8], eval_steps=1,
    ))  # fmt: skip
    return {"tensors": tensors_of(trainer), "losses": [row["eval_loss"] for row in trainer.metrics["valid"]]}


class Sums:
    """A collator whose state is the sum of the labels that this rank has seen."""

    def __init__(self) -> None:
        self.total = torch.zeros(1)

    def __call__(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        self.total += y.sum()
        return x * (1 + self.total / 10), y

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"].clone()


def collate(backend: str, folder: str | None = None, stop: int = 0) -> dict[str, Any]:
    torch.manual_seed(0)
    sums, options = Sums(), {"save_dir": folder, "save_steps": 100} if folder else {}
    trainer = fit(make_trainer(
        backend, nn.Linear(4, 1), rows(24, torch.float32), loss_fn=F.mse_loss, batch_size=4, epochs=2,
        learning_rate=0.05, data_collator=sums, callbacks=[StopAt(stop)], **options,
    ), resume_from=folder and "auto")  # fmt: skip
    return {"tensors": {**tensors_of(trainer), "total": sums.total}}


def count(backend: str, collator: str, source: str, folder: str | None = None, stop: int = 0) -> dict[str, Any]:
    """Train two epochs of 22 samples, of which a collator makes other rows; stop after a step, or resume from there."""
    model, options = made(collator, source)
    ranks, Resumable.created = PROCESSES[backend], 0
    if "shared loader" in source:
        data, collate = options.pop("train_dataset"), options.pop("data_collator")
        sampler = DistributedSampler(data, ranks, current_rank())
        loader = DataLoader if source == "shared loader" else ResumableShare
        options["train_loader"] = loader(data, BATCH_SIZE, collate_fn=collate, sampler=sampler)
    if "batch_size" in options:
        options |= {"batch_size": BATCH_SIZE // ranks, "global_batch_size": 8}
    else:
        options["gradient_accumulation_steps"] = 2 // ranks
    trainer = make_trainer(
        backend, model, epochs=2, learning_rate=0.05, save_dir=folder, save_steps=folder and 2,
        callbacks=[StopAt(stop)], **options,
    )  # fmt: skip
    trainer.train(resume_from=folder and "auto")
    progress = trainer.progress
    counts = [progress.step + progress.skipped_steps, progress.samples, progress.tokens]
    return {"counts": counts, "created": Resumable.created, "tensors": trainer.backend.model_tensors()}


# --- the user's module and stream


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
    with pytest.raises(ConfigError, match="was split by split_dataset_by_node"):
        make_trainer(backend, t16(dtype=torch.float32), split_dataset_by_node(stream, rank, world_size), max_steps=1)
    return {}


def read(backend: str, is_split: bool, noise: bool, loader: bool) -> dict[str, Any]:
    """Train on a stream, of which a process may take its share, with noise that may differ between processes."""
    generator = torch.Generator().manual_seed(current_rank())
    xs = torch.arange(16)[:, None] / 16 + noise * torch.randn(16, 4, generator=generator)
    data = Streamed([(x, i) for i, x in enumerate(xs) if not is_split or i % 2 == current_rank()])
    options = {"train_loader": DataLoader(data, 4)} if loader else {"train_dataset": data, "batch_size": 4}
    return warnings_of("first sample", backend, nn.Linear(4, 16), loss_fn=F.cross_entropy, **options)


def split_by_hand(backend: str) -> dict[str, Any]:
    with pytest.raises(DistributedError, match="The first sample of the training set is another one on each rank"):
        read(backend, is_split=True, noise=True, loader=False)
    return {}


BACKENDS = ("ddp", "fsdp", "zero2", "hf2", "zero3", "hf_fsdp", "hf_zero2")
DATA = [
    ("ddp", "filtered", "shared loader"), ("hf2", "views", "stream"), ("ddp", "views", "resumable loader"),
    ("hf2", "filtered", "shards"), ("ddp", "bins", "own loader"), ("hf2", "packed", "data"),
    ("hf2", "bins", "resumable shared loader"),
]  # fmt: skip
"""Backend, collator, and where the data come from."""


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    first, second = Jobs(), Jobs()

    def add(name: str, backend: str, function: Any, stop: int, target: str = "", **options: Any) -> None:
        """Add a straight run, one that is cut short, and one that resumes it."""
        place = str(folder / name)
        first.add(f"{name}-straight", target or backend, function, **options)
        first.add(f"{name}-cut", backend, function, folder=place, stop=stop, **options)
        second.add(f"{name}-resumed", target or backend, function, folder=place, **options)

    for backend in sorted({"ddp", *asked_for(request, "backend", test="test_buffers")}):
        add(backend, backend, drift, 4)
    for backend, copies in itertools.product(sorted(asked_for(request, "replaced_on")), (True, False)):
        first.add(f"replace-{backend}-{copies}", backend, replace, copies=copies)
    add("collate", "ddp", collate, 4)
    for backend, collator, source in sorted(asked_for(request, "backend", "collator", "source")):
        add(f"{collator}-{source}", backend, count, 2, collator=collator, source=source)
    add("moved", "ddp", count, 2, target="native", collator="filtered", source="shards")
    for test, function in {"best_weights": worsen, "frozen": freeze}.items():
        for backend in sorted(asked_for(request, "backend", test=f"test_{test}")):
            first.add(f"{function.__name__}-{backend}", backend, function)
    for layers in ([], ["Block"]):
        first.add(f"divide-{len(layers)}", "fsdp", divide, layers=layers)
    for noise, loader in itertools.product((False, True), (False, True)):
        first.add(f"read-{noise}-{loader}", "ddp", read, is_split=False, noise=noise, loader=loader)
    first.add("by node", "ddp", split)  # the last, as their errors end the launch
    first.add("by hand", "ddp", split_by_hand)
    return joined(sound(launch_all(first, folder / "first")), sound(launch_all(second, folder / "second")))


@pytest.mark.parametrize("backend", thinned(BACKENDS, BACKENDS[:3]))
def test_buffers_are_alike_and_survive_a_resume(results: Any, backend: str) -> None:
    """On all ranks, in evaluations and at the end; the best evaluation is that of what was saved."""
    for name in ("straight", "cut", "resumed"):
        first, second = (rank["tensors"] for rank in results[f"{backend}-{name}"])
        assert gap(first, second) == 0
    assert sum(name.endswith("/center") for name in first) == 2
    for rank in results[f"{backend}-cut"]:
        assert rank["again"] == [rank["best"]] * 2
    runs = (results[name] for name in (f"{backend}-straight", f"{backend}-resumed", "ddp-straight"))
    for straight, resumed, reference in zip(*runs, strict=True):
        assert gap(named(resumed, "weights"), named(straight, "weights")) == 0, "unlike one without save or evaluation"
        assert gap(straight["tensors"], reference["tensors"]) <= bound("zero2")


def test_states_of_each_rank_survive_a_resume(results: Any) -> None:
    straight, resumed = results["collate-straight"], results["collate-resumed"]
    assert gap(straight, resumed) == 0
    assert straight[0]["tensors"]["total"] != straight[1]["tensors"]["total"]


@pytest.mark.parametrize("replaced_on", thinned(BACKENDS, BACKENDS[:3]))
def test_buffers_may_be_replaced_by_expanded_ones(results: Any, replaced_on: str) -> None:
    """DDP broadcasts into them what the main rank has, and nothing can be written to a tensor made by `expand`."""
    assert gap(*(results[f"replace-{replaced_on}-{copies}"] for copies in (True, False))) == 0


@pytest.mark.parametrize(("backend", "collator", "source"), thinned(DATA, DATA[:4]))
def test_resumed_rows_match_straight_run_exactly(results: Any, backend: str, collator: str, source: str) -> None:
    pairs = zip(*(results[f"{collator}-{source}-{run}"] for run in ("straight", "resumed")), strict=True)
    for straight, resumed in pairs:
        assert straight["counts"][0] == (12 if source == "shards" else 6)
        assert source in ("own loader", "resumable loader") or straight["counts"][1] == 2 * SIZE
        assert resumed["counts"] == straight["counts"]
        assert gap(resumed["tensors"], straight["tensors"]) == 0
        if source == "resumable loader":  # 12 batches, of which 4 were trained on before
            assert (straight["created"], resumed["created"]) in ((12, 8), (12, 9))


def test_rows_of_two_ranks_resume_on_one(results: Any) -> None:
    (resumed,), (straight,) = results["moved-resumed"], results["moved-straight"]
    assert resumed["counts"] == straight["counts"]
    assert gap(resumed["tensors"], straight["tensors"]) <= 1e-12


@pytest.mark.parametrize("backend", thinned(BACKENDS[:6], ("fsdp", "hf2")))
def test_best_weights_without_a_folder_reach_every_rank(results: Any, backend: str) -> None:
    assert results[f"worsen-{backend}"] == [{}, {}]


@pytest.mark.parametrize("backend", thinned(BACKENDS[:6], ("ddp", "hf2")))
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


def test_stream_that_is_split_already_is_an_error(results: Any) -> None:
    assert results["by node"] == results["by hand"] == [{}, {}]
