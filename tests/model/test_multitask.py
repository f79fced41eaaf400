"""Training on several tasks at once: the mix, the loss, resumes, and every trainer."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import TRAINERS
from recipes import Sentences, Tagger, Trace, callback, distance, fit, same, trainer_on_cpu, weights
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from omnitrain import CheckpointError, ConfigError, DataError, MultiTask, MultiTaskUnit, Trainer
from omnitrain.data.collation import Collator, count_samples


class Heads(nn.Module):
    """A shared body with a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleDict({"kind": nn.Linear(4, 3), "size": nn.Linear(4, 1)})
        self.double()

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        return self.heads[task](self.body(x).tanh())


def numbers(size: int, task: str, seed: int = 0) -> TensorDataset:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(1) if task == "kind" else x.sum(1, keepdim=True))


LOSSES = {"kind": F.cross_entropy, "size": F.mse_loss}


def mixed(**options: Any) -> MultiTask:
    return MultiTask({"kind": numbers(20, "kind"), "size": numbers(9, "size")}, **options)


def build(trainer_class: Any, tasks: MultiTask | None = None, losses: Any = LOSSES, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Heads()
    options = {"epochs": 3, "batch_size": 8, "learning_rate": 0.05, **options}
    unit = MultiTaskUnit(model, losses, {"size": 0.5})
    return trainer_on_cpu(trainer_class, model, tasks or mixed(), unit=unit, **options)


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
        order = MultiTask({"a": list(range(900)), "b": list(range(100))}, **options).epoch_order(0, 1)
        return [int(np.sum(order < 900)), int(np.sum(order >= 900))]

    assert counts() == [900, 100]
    assert counts(temperature=2) == [750, 250]  # the square roots are 30 and 10
    assert counts(temperature=1e9) == counts(mixing="uniform") == counts(mixing="round_robin") == [500, 500]
    assert counts(mixing={"a": 1, "b": 3}, epoch_size=40) == [10, 30]
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
    (lambda: mixed(mixing={"kind": 1}), ConfigError, r"`mixing\['size'\]` must be .* above 0, got None"),
    (lambda: mixed(mixing={"kind": 1, "size": 1, "sise": 1}), ConfigError, "'sise', which is no task"),
    (lambda: mixed(mixing="uniform", temperature=2), ConfigError, "`temperature=2` has an effect on"),
    (lambda: mixed(temperature=0), ConfigError, "`temperature` must be a finite number above 0, got 0"),
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


CLASSES = {
    "weights": nn.CrossEntropyLoss(torch.tensor([1.0, 4.0, 0.3], dtype=torch.float64)),
    "ignored": nn.CrossEntropyLoss(ignore_index=0),
}


@pytest.mark.parametrize("name", CLASSES)
def test_multitask_class_weights_in_every_split(trainer_class: Any, name: str) -> None:
    """The mean of a task is over the class weights of its labels, in steps and in evaluations."""
    classes, evaluated = CLASSES[name], numbers(10, "kind", 1)
    ends, losses = [], []
    for batch, accumulation in [(8, 1), (2, 4)]:
        options = {"batch_size": batch, "eval_batch_size": batch, "gradient_accumulation_steps": accumulation}
        options |= {"eval_dataset": mixed().evaluation({"kind": evaluated}), "epochs": 2}
        trainer = fit(build(trainer_class, mixed(), {**LOSSES, "kind": classes}, **options))
        ends.append(weights(trainer.model))
        history = (trainer.metrics["valid"][-1], trainer.metrics["train_metrics_history"][-1])
        losses.append([row[key] for row, key in zip(history, ("eval_kind_loss", "train_loss_kind"), strict=True)])
    assert distance(*ends) <= 1e-12 and losses[0] == pytest.approx(losses[1], rel=1e-12)
    x, labels = evaluated.tensors
    expected = float(classes(trainer.model(x, "kind"), labels).detach())
    assert trainer.evaluate()["eval_kind_loss"] == pytest.approx(expected)


MIXINGS = [("native", "uniform"), ("accelerate", "proportional"), ("hf", {"kind": 1, "size": 2})]


@pytest.mark.parametrize(("kind", "mixing"), MIXINGS)
def test_multitask_is_the_same_in_every_split_and_resume(kind: str, mixing: Any, tmp_path: Path) -> None:
    sizes: list[int] = []
    look = callback(on_batch_start=lambda trainer, batch, number: sizes.append(count_samples(batch)))

    def trained(resume_from: str | None = None, **options: Any) -> list[torch.Tensor]:
        trainer = build(TRAINERS[kind], mixed(mixing=mixing), callbacks=[look], **options)
        return weights(fit(trainer, resume_from=resume_from).model)

    straight = trained()
    for split, size in (({"batch_size": 2, "gradient_accumulation_steps": 4}, 2), ({"microbatch_size": 3}, 3)):
        sizes.clear()
        assert distance(trained(**split), straight) <= 1e-12 and max(sizes) == size
    trained(save_dir=tmp_path, epochs=None, max_steps=6)
    assert same(trained("auto", save_dir=tmp_path), straight)
    if mixing == "uniform":
        with pytest.raises(CheckpointError, match=r"training set has mixing='proportional' now, and had 'uniform'"):
            build(Trainer, mixed(), save_dir=tmp_path).train(resume_from="auto")


@pytest.mark.parametrize("as_dicts", [False, True])
def test_task_batch_split_by_samples(as_dicts: bool) -> None:
    """Micro-batches have at most so many samples of all tasks; a task without one there is idle."""
    kind, size = numbers(20, "kind"), numbers(9, "size")
    if as_dicts:
        kind, size = ([{"x": x, "labels": y} for x, y in data] for data in (kind, size))
    tasks, key = MultiTask({"kind": kind, "size": size}), "x" if as_dicts else 0
    collate = tasks.collate_with(Collator())
    for chosen in ([0, 1, 2, 3, 4, 20, 21, 22], [0, 1, 2, 3], [20, 0, 1]):
        batch = collate([tasks[i] for i in chosen])
        assert count_samples(batch) == len(chosen)
        for most in (1, 2, 3, 8):
            parts = collate.split_batch(batch, most)
            sizes = [count_samples(part) for part in parts]
            assert sum(sizes) == len(chosen) and max(sizes) <= most
            for name in tasks.tasks:
                rows = [part.parts[name][key] for part in parts if name not in part.idle]
                assert torch.cat(rows).equal(batch.parts[name][key]) if rows else name in batch.idle
                assert all(set(part.parts) == set(tasks.tasks) for part in parts)


class TaskTagger(Tagger):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor, task: str) -> Any:  # type: ignore[override]
        return super().forward(ids, labels)


@pytest.mark.processes
def test_multitask_takes_workers_tokens_and_model_losses() -> None:
    trainers = []
    for batch, workers in [(6, 0), (2, 1)]:
        model, tasks = TaskTagger(), MultiTask({"a": Sentences(11), "b": Sentences(7)})
        options = {"batch_size": batch, "gradient_accumulation_steps": 6 // batch, "num_workers": workers}
        options |= {"unit": MultiTaskUnit(model), "epochs": 2, "learning_rate": 0.01}
        trainers.append(fit(trainer_on_cpu(Trainer, model, tasks, **options)))
    assert distance(*(weights(trainer.model) for trainer in trainers)) <= 1e-12
    assert trainers[0].progress.tokens == trainers[1].progress.tokens > 2 * 11
