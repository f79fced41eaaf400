"""Training on several tasks at once: the mix, the loss, resumes, and every trainer."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import TRAINERS, thinned
from recipes import Trace, distance, same, weights
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from omnitrain import (
    Callback,
    CheckpointError,
    ConfigError,
    DataError,
    MultiTask,
    MultiTaskUnit,
    Trainer,
)
from omnitrain.data.collation import Collator, count_samples


class Heads(nn.Module):
    """A shared body with a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, dtype=torch.float64)
        self.heads = nn.ModuleDict(
            {"kind": nn.Linear(4, 3, dtype=torch.float64), "size": nn.Linear(4, 1, dtype=torch.float64)}
        )

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        return self.heads[task](self.body(x).tanh())


def numbers(size: int, task: str, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(1) if task == "kind" else x.sum(1, keepdim=True))


LOSSES = {"kind": F.cross_entropy, "size": F.mse_loss}


def mixed(**options: Any) -> MultiTask:
    return MultiTask({"kind": numbers(20, "kind"), "size": numbers(9, "size")}, **options)


def build(trainer_class: Any, tasks: MultiTask | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Heads()
    options = {"epochs": 3, "batch_size": 8, "learning_rate": 0.05, "progress_bar": False, **options}
    return trainer_class(
        model, train_dataset=tasks or mixed(), unit=MultiTaskUnit(model, LOSSES, {"size": 0.5}), **options
    )


# The mix


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4), epoch_size=st.none() | st.integers(1, 90),
    mixing=st.sampled_from(["proportional", "uniform", "round_robin"]), seed=st.integers(0, 2**63),
)  # fmt: skip
def test_multitask_samples_each_task_by_share(sizes: list[int], epoch_size: int | None, mixing: Any, seed: int) -> None:
    tasks = MultiTask({f"t{i}": list(range(size)) for i, size in enumerate(sizes)}, mixing, epoch_size=epoch_size)
    used: Counter[tuple[str, int]] = Counter()
    shares = [size / sum(sizes) if mixing == "proportional" else 1 / len(sizes) for size in sizes]
    for epoch in range(4):
        order = tasks.epoch_order(epoch, seed)
        assert len(order) == (epoch_size or sum(sizes))
        assert np.array_equal(order, tasks.epoch_order(epoch, seed))
        counts = Counter(tasks[i][0] for i in order)
        for i, share in enumerate(shares):
            assert abs(counts[f"t{i}"] - share * len(order)) < 1
        used.update(tasks[i] for i in order)
    for i, size in enumerate(sizes):
        uses = [used[f"t{i}", sample] for sample in range(size)]
        assert max(uses) - min(uses) <= 1


def test_multitask_shares_by_temperature_and_dict() -> None:
    def counts(**options: Any) -> list[int]:
        tasks = MultiTask({"a": list(range(900)), "b": list(range(100))}, **options)
        return [int(np.sum(tasks.epoch_order(0, 1) < 900)), int(np.sum(tasks.epoch_order(0, 1) >= 900))]

    assert counts() == [900, 100]
    assert counts(temperature=2) == [750, 250]  # the square roots are 30 and 10
    assert counts(temperature=1e9) == counts(mixing="uniform") == counts(mixing="round_robin") == [500, 500]
    assert counts(mixing={"a": 1, "b": 3}, epoch_size=40) == [10, 30]


def test_multitask_round_robin_and_random() -> None:
    tasks = {"a": list(range(50)), "b": list(range(50)), "c": list(range(50))}
    turns = [MultiTask(tasks)[i][0] for i in MultiTask(tasks, "round_robin").epoch_order(3, 7)]
    assert turns == ["a", "b", "c"] * 50
    at_random = [[MultiTask(tasks)[i][0] for i in MultiTask(tasks, "uniform").epoch_order(e, 7)] for e in range(2)]
    assert at_random[0] != turns and at_random[0] != at_random[1]


class Odd(MultiTask):
    def epoch_order(self, epoch: int, seed: int) -> np.ndarray:
        return super().epoch_order(epoch, seed) + 20


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


def train_on_plain_loader() -> None:
    model = Heads()
    loader = DataLoader(numbers(4, "kind"))
    Trainer(model, train_loader=loader, unit=MultiTaskUnit(model), progress_bar=False).train()


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: MultiTask({}), ConfigError, "`tasks` must be a dict"),
    (lambda: MultiTask(cast("Any", [numbers(3, "kind")])), ConfigError, "`tasks` must be a dict"),
    (lambda: MultiTask({"a": []}), DataError, "'a' has no samples"),
    (lambda: MultiTask({"a": (x for x in "ab")}), DataError, "'a' must have a length"),
    (lambda: MultiTask({"a": Endless()}), DataError, "must have a length"),
    (lambda: mixed(mixing="proportionate"), ConfigError, "'proportionate'.*Did you mean 'proportional'"),
    (lambda: mixed(mixing={"kind": 1}), ConfigError, "positive share, got None for 'size'"),
    (lambda: mixed(mixing={"kind": 1, "size": 1, "sise": 1}), ConfigError, "'sise', which is no task"),
    (lambda: mixed(mixing="uniform", temperature=2), ConfigError, "`temperature=2` has an effect on"),
    (lambda: mixed(temperature=0), ConfigError, "`temperature` must be a positive number, got 0"),
    (lambda: mixed(epoch_size=0), ConfigError, "`epoch_size`.*got 0"),
    (lambda: MultiTaskUnit(nn.Linear(2, 2)), ConfigError, "must take the name of the task as `task`"),
    (lambda: MultiTaskUnit(Heads(), weights={"kind": -1}), ConfigError, "'kind'.*at least 0, got -1"),
    (lambda: MultiTaskUnit(Heads(), cast("Any", {"kind": nn.MSELoss})), ConfigError, "'kind' must be callable"),
    (lambda: mixed().evaluation({"kinds": []}), ConfigError, "'kinds', which is no task.*'kind'"),
    (lambda: build(Trainer, shuffle=False), ConfigError, "`shuffle=False` contradicts"),
    (lambda: build(Trainer, eval_dataset=numbers(4, "kind")).train(), DataError, "MultiTask.evaluation"),
    (lambda: build(Trainer, Odd({"kind": numbers(20, "kind"), "size": numbers(9, "size")})).train(), DataError,
     "Odd.epoch_order must return samples from 0 to 28, got 20 to"),
    (train_on_plain_loader, DataError, r"needs the batches of a MultiTask dataset, got (tuple|list)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), WRONG)
def test_multitask_rejects_wrong_arguments(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


# Training


def test_multitask_logs_loss_of_each_task(trainer_class: Any) -> None:
    logs = []
    for batch, accumulation in [(8, 1), (2, 4)]:
        trace = Trace()
        trainer = build(
            trainer_class, batch_size=batch, gradient_accumulation_steps=accumulation, epochs=1, log_steps=1,
            callbacks=[trace], learning_rate=0.0, optimizer=torch.optim.SGD,
        )  # fmt: skip
        row = trainer.train()["train_metrics_history"][0]
        for task, data in trainer.train_dataset.tasks.items():
            x, y = data.tensors
            assert row[f"train_loss_{task}"] == pytest.approx(float(LOSSES[task](trainer.model(x, task), y).detach()))
        logs.append([{name: row[name] for name in ("loss_kind", "loss_size") if name in row} for row in trace.logs])
    for row, other in zip(*logs, strict=True):
        assert row == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize("trainer_class", thinned(TRAINERS.values(), [Trainer]))
def test_multitask_learns_all_tasks(trainer_class: Any) -> None:
    tasks = MultiTask({"kind": numbers(200, "kind"), "size": numbers(100, "size")}, mixing="uniform")
    sets = tasks.evaluation(
        {"kind": numbers(50, "kind", 1), "size": numbers(50, "size", 1)}, {"kind": "accuracy", "size": "r2"}
    )
    trainer = build(
        trainer_class, tasks, eval_dataset=sets, epochs=5, batch_size=16, learning_rate=0.1,
        optimization_metric="kind_accuracy",
    )  # fmt: skip
    best = trainer.train()["best_valid"]
    assert best["kind_accuracy"] > 0.8 and best["size_r2"] > 0.8
    assert best["eval_loss"] == pytest.approx((best["eval_kind_loss"] + 0.5 * best["eval_size_loss"]) / 2)


def test_multitask_evaluates_tasks_without_weights(trainer_class: Any) -> None:
    """As in logs and history; the loss of all sets together is what is trained on."""
    tasks = mixed()
    sets = tasks.evaluation(tasks.tasks)
    trainer = build(trainer_class, tasks, eval_dataset=sets, epochs=1, learning_rate=0.0, optimizer=torch.optim.SGD)
    history = trainer.train()
    train, valid = history["train_metrics_history"][0], history["valid"][0]
    for task in tasks.tasks:
        assert valid[f"eval_{task}_loss"] == pytest.approx(train[f"train_loss_{task}"], rel=1e-12)
    assert valid["eval_loss"] == pytest.approx((valid["eval_kind_loss"] + 0.5 * valid["eval_size_loss"]) / 2, rel=1e-12)
    only = MultiTask({"size": tasks.tasks["size"]})
    assert trainer.evaluate(only)["eval_loss"] == pytest.approx(0.5 * valid["eval_size_loss"], rel=1e-12)
    assert trainer.predict(only).metrics["test_loss"] == pytest.approx(0.5 * valid["eval_size_loss"], rel=1e-12)


def test_multitask_loss_is_weighted_mean() -> None:
    trainer = build(Trainer, mixed(epoch_size=10), epochs=1, batch_size=10, log_steps=1)
    model = copy.deepcopy(trainer.model).requires_grad_(False)
    total = 0.0
    for i in trainer.train_dataset.epoch_order(0, 42):
        task, (x, y) = trainer.train_dataset[int(i)]
        total += float(LOSSES[task](model(x[None], task), y[None])) * (0.5 if task == "size" else 1.0)
    assert trainer.train()["train_metrics_history"][0]["train_loss"] == pytest.approx(total / 10, rel=1e-12)


def test_multitask_class_weights_in_every_split(trainer_class: Any) -> None:
    """The mean of a task is over the class weights of its labels, in steps and in evaluations."""
    classes, evaluated = nn.CrossEntropyLoss(torch.tensor([1.0, 4.0, 0.3], dtype=torch.float64)), numbers(10, "kind", 1)
    results, losses = [], []
    for batch, accumulation in [(8, 1), (2, 4)]:
        torch.manual_seed(0)
        model, tasks = Heads(), mixed()
        unit = MultiTaskUnit(model, {**LOSSES, "kind": classes}, {"size": 0.5})
        trainer = trainer_class(
            model, tasks, tasks.evaluation({"kind": evaluated}), unit=unit, batch_size=batch, eval_batch_size=batch,
            gradient_accumulation_steps=accumulation, epochs=2, learning_rate=0.05, progress_bar=False,
        )  # fmt: skip
        trainer.train()
        results.append(weights(trainer.model))
        row = trainer.metrics["valid"][-1]
        losses.append([row["eval_kind_loss"], trainer.metrics["train_metrics_history"][-1]["train_loss_kind"]])
    assert distance(*results) <= 1e-12 and losses[0] == pytest.approx(losses[1], rel=1e-12)
    x, labels = evaluated.tensors
    assert trainer.evaluate()["eval_kind_loss"] == pytest.approx(
        float(classes(trainer.model(x, "kind"), labels).detach())
    )


def test_multitask_moves_losses_to_device(trainer_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a `loss_fn`: each is moved, once the trainer knows its device, and before it is called."""
    moved: list[tuple[nn.Module, torch.device]] = []

    def note(module: nn.Module, device: torch.device) -> nn.Module:
        moved.append((module, device))
        return module

    classes, lengths = nn.CrossEntropyLoss(torch.ones(3, dtype=torch.float64)), nn.MSELoss()
    for loss in (classes, lengths):
        monkeypatch.setattr(loss, "to", functools.partial(note, loss))
    model = Heads()
    trainer = trainer_class(
        model, mixed(), unit=MultiTaskUnit(model, {"kind": classes, "size": lengths}), epochs=1, progress_bar=False
    )
    assert moved == [(classes, trainer.device), (lengths, trainer.device)]


@pytest.mark.parametrize("ignore_index", [-100, 0])
def test_multitask_counts_what_a_loss_ignores(ignore_index: int) -> None:
    results = []
    for batch, accumulation in [(4, 1), (2, 2)]:
        torch.manual_seed(0)
        model, tasks = Heads(), mixed()
        unit = MultiTaskUnit(model, {**LOSSES, "kind": nn.CrossEntropyLoss(ignore_index=ignore_index)})
        Trainer(
            model, tasks, unit=unit, batch_size=batch, gradient_accumulation_steps=accumulation, epochs=1,
            learning_rate=0.05, progress_bar=False, device="cpu",
        ).train()  # fmt: skip
        results.append(weights(model))
    assert distance(*results) <= 1e-12


MIXINGS = [(kind, "proportional") for kind in TRAINERS]
MORE_MIXINGS = [("native", "uniform"), ("hf", "round_robin"), ("accelerate", {"kind": 1, "size": 2})]


@pytest.mark.parametrize(("kind", "mixing"), thinned([*MIXINGS, *MORE_MIXINGS], MIXINGS))
def test_multitask_is_the_same_in_every_split_and_resume(kind: str, mixing: Any, tmp_path: Path) -> None:
    trainer_class = TRAINERS[kind]
    straight = build(trainer_class, mixed(mixing=mixing))
    straight.train()
    split = build(trainer_class, mixed(mixing=mixing), batch_size=2, gradient_accumulation_steps=4)
    split.train()
    assert distance(weights(split.model), weights(straight.model)) <= 1e-12
    build(trainer_class, mixed(mixing=mixing), save_dir=tmp_path, epochs=None, max_steps=6).train()
    resumed = build(trainer_class, mixed(mixing=mixing), save_dir=tmp_path)
    resumed.train(resume_from="auto")
    assert same(weights(resumed.model), weights(straight.model))
    if trainer_class is Trainer and mixing == "proportional":
        with pytest.raises(CheckpointError, match=r"training set has mixing='uniform' now, and had 'proportional'"):
            build(Trainer, mixed(mixing="uniform"), save_dir=tmp_path).train(resume_from="auto")


@pytest.mark.parametrize("as_dicts", [False, True])
def test_task_batch_split_by_samples(as_dicts: bool) -> None:
    """Micro-batches have at most so many samples of all tasks; a task without one there is idle."""
    kind, size = numbers(20, "kind"), numbers(9, "size")
    if as_dicts:
        kind, size = ([{"x": x, "labels": y} for x, y in data] for data in (kind, size))
    tasks = MultiTask({"kind": kind, "size": size})
    collate = tasks.collate_with(Collator())
    for chosen in ([0, 1, 2, 3, 4, 20, 21, 22], [0, 1, 2, 3], [20, 0, 1]):
        samples = [tasks[i] for i in chosen]
        batch = collate(samples)
        assert count_samples(batch) == len(samples)
        for most in (1, 2, 3, 8):
            parts = collate.split_batch(batch, most)
            sizes = [count_samples(part) for part in parts]
            assert sum(sizes) == len(samples) and max(sizes) <= most
            for name in tasks.tasks:
                rows = [part.parts[name]["x"] if as_dicts else part.parts[name][0] for part in parts]
                rows = [x for x, part in zip(rows, parts, strict=True) if name not in part.idle]
                whole = batch.parts[name]["x"] if as_dicts else batch.parts[name][0]
                assert torch.cat(rows).equal(whole) if rows else name in batch.idle
                assert all(set(part.parts) == set(tasks.tasks) for part in parts)


def test_multitask_microbatches_train_alike(trainer_class: Any) -> None:
    largest: list[int] = []

    class Counts(Callback):
        def on_batch_start(self, trainer: Any, batch: Any, number: int) -> None:
            largest.append(count_samples(batch))

    whole = build(trainer_class, epochs=2)
    whole.train()
    split = build(trainer_class, epochs=2, microbatch_size=3, callbacks=[Counts()])
    split.train()
    assert max(largest) == 3 and distance(weights(split.model), weights(whole.model)) <= 1e-12


@pytest.mark.processes
def test_multitask_takes_workers_tokens_and_model_losses() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor, task: str) -> Any:
            logits = self.head(self.embed(ids))
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def words(size: int, ignored: int) -> list[dict[str, torch.Tensor]]:
        rows = []
        for i in range(size):
            labels = torch.arange(4) % 3
            labels[: ignored * (i % 3)] = -100
            rows.append({"ids": (torch.arange(4) + i) % 9, "labels": labels})
        return rows

    results, tokens = [], []
    for batch, workers in [(6, 0), (2, 1)]:
        torch.manual_seed(0)
        model = Tagger().double()
        tasks = MultiTask({"a": words(11, 1), "b": words(7, 0)})
        trainer = Trainer(
            model, tasks, unit=MultiTaskUnit(model), batch_size=batch, gradient_accumulation_steps=6 // batch,
            num_workers=workers, epochs=2, learning_rate=0.01, progress_bar=False,
        )  # fmt: skip
        trainer.train()
        results.append(weights(model))
        tokens.append(trainer.progress.tokens)
    assert distance(*results) <= 1e-12
    assert tokens[0] == tokens[1] > 2 * 11
