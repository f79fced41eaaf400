"""The crown: one table of promises over all trainers. A feature is in when its row is."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import eighths
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from counting import COLLATORS, SIZE, SOURCES, Resumable, made
from marks import thinned
from recipes import (
    Blank,
    Everything,
    Graphs,
    Holding,
    Noisy,
    Overflowing,
    Sentences,
    StopAt,
    Tagger,
    Trace,
    distance,
    rows,
    same,
    t16,
    weights,
)
from starving import Starving, StarvingAdamW
from tiny import Short, Tokens, bert, gpt, t5
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from transformers import DataCollatorWithFlattening

from omnitrain import (
    EMA,
    SAM,
    SWA,
    AccelerateTrainer,
    Algorithm,
    Callback,
    CheckpointError,
    Collator,
    ConfigError,
    CrossEntropy,
    CutMix,
    DataError,
    Duration,
    GradientClipping,
    GradualUnfreezing,
    GroupByLength,
    HFTrainer,
    HookCallback,
    LabelSmoothing,
    LayerFreezing,
    MagnitudePruning,
    MixUp,
    MultiStepScheduler,
    NonFiniteError,
    PackedDataset,
    ProgressiveResizing,
    SeqLengthWarmup,
    ShardedStream,
    StepOutput,
    StochasticDepth,
    StraightThrough,
    Trainer,
    TrainHook,
    WeightedLosses,
    WSDScheduler,
)
from omnitrain.checkpoint import identity
from omnitrain.checkpoint.store import Store
from omnitrain.checkpoint.tensors import load_tensors
from omnitrain.data.sampling import EpochSampler
from omnitrain.precision import Precision
from omnitrain.run import lifecycle

TRAINERS = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}


@pytest.fixture(params=TRAINERS)
def trainer_class(request: pytest.FixtureRequest) -> Any:
    return TRAINERS[request.param]


def placed_on_cpu(trainer_class: Any) -> dict[str, Any]:
    """The argument that keeps a trainer off a GPU: accelerate is told by its environment."""
    return {"device": "cpu"} if trainer_class is Trainer else {}


def run(trainer_class: Any, model: nn.Module, data: Any, *guests: Callback, **options: Any) -> Any:
    options = {"progress_bar": False, "log_steps": 1, "learning_rate": 0.05, **placed_on_cpu(trainer_class), **options}
    if isinstance(model, nn.Sequential):
        options.setdefault("loss_fn", F.mse_loss)
    train = options.pop("train", True)
    trainer = trainer_class(model, train_dataset=data, callbacks=guests, **options)
    if train:
        trainer.train()
    return trainer


def by_hand(
    model: nn.Module, data: Any, *, window: int, epochs: int, lr: float, schedule: Any = None, clip: float | None = 1.0
) -> dict[str, list[float]]:
    """What a careful user would write: full-batch windows in the sampler's order, SGD, clip, one scheduler step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = schedule(optimizer) if schedule else None
    sampler = EpochSampler(len(data), window)
    seen: dict[str, list[float]] = {"loss": [], "grad_norm": [], "learning_rate": []}
    for epoch in range(epochs):
        for indices in sampler.batches(epoch):
            samples = [data[int(i)] for i in indices]
            if isinstance(samples[0], dict):
                loss = model(**{key: torch.stack([s[key] for s in samples]) for key in samples[0]})["loss"]
            else:
                x, y = (torch.stack(column) for column in zip(*samples, strict=True))
                loss = F.mse_loss(model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
            seen["loss"].append(loss.item())
            seen["grad_norm"].append(norm.item())
            seen["learning_rate"].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if scheduler:
                scheduler.step()
            optimizer.zero_grad()
    return seen


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


# --- compiled models


def test_compiling_ahead_leaves_no_trace_and_the_run_compiles_nothing_more(trainer_class: Any, tmp_path: Path) -> None:
    def made(folder: str, **options: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1)).double()
        return run(
            trainer_class, model, Noisy(28), eval_dataset=rows(6), eval_batch_size=4, batch_size=4, epochs=2,
            gradient_accumulation_steps=2, algorithms=[EMA(0.5)], save_dir=tmp_path / folder, eval_steps=3,
            train=False, **options,
        )  # fmt: skip

    def look(trainer: Any) -> Any:
        model = trainer.get_model()
        modes, gradients = [one.training for one in model.modules()], [one.grad for one in model.parameters()]
        return (
            weights(model), modes, gradients, trainer.optimizer.state_dict(), trainer.progress.state_dict(),
            torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate(), trainer.metrics.to_dict(),
        )  # fmt: skip

    graphs = Graphs()
    trainer = made("compiled", compile={"backend": graphs})
    before, files = look(trainer), list(tmp_path.rglob("*"))
    found = trainer.compile()
    torch.testing.assert_close(look(trainer), before, rtol=0, atol=0)
    assert list(tmp_path.rglob("*")) == files and found.graphs == graphs.count > 0
    assert found.shapes == {"train": ["[4, 4], [4, 1]"], "eval": ["[4, 4], [4, 1]", "[2, 4], [2, 1]"]}
    trainer.train()
    assert graphs.count == found.graphs
    for folder, compiled in (("later", {"backend": Graphs()}), ("plain", False)):
        other = made(folder, compile=compiled)
        other.train()
        assert same(weights(trainer.get_model()), weights(other.get_model()))
        for rows_of in ("valid", "train_metrics_history"):
            assert trainer.metrics[rows_of] == other.metrics[rows_of]
    torch.compiler.reset()


# --- events


def test_events_come_in_the_order_that_the_docstring_of_event_prints(trainer_class: Any) -> None:
    trace = Trace()
    run(
        trainer_class, t16(), rows(12), trace, eval_dataset=rows(4), epochs=2, batch_size=4, eval_steps=2,
        gradient_accumulation_steps=2, log_steps=2, eval_on_start=True,
    )  # fmt: skip
    step = ["step_start", "before_optimizer_step", "step_end"]
    evaluation = ["eval_start", "eval_end"]
    epoch = ["epoch_start", *step, *step, "log", *evaluation, "epoch_end"]
    assert trace.events == ["train_start", *evaluation, *epoch, *epoch, "train_end"]


BATCH = ["batch_start", "after_forward", "after_loss", "after_backward", "batch_end"]
CLIPPED = ["before_clip", "after_clip", "before_optimizer_step"]
UPDATED = ["after_optimizer_step", "before_zero_grad", "after_zero_grad", "step_end"]


def test_all_events_come_in_that_order_and_change_no_bit(trainer_class: Any, tmp_path: Path) -> None:
    everything, models = Everything(), [t16(), t16()]
    for model, guests in zip(models, ([everything], []), strict=True):
        trainer = run(
            trainer_class, model, rows(12), *guests, eval_dataset=rows(4), epochs=1, batch_size=2, save_steps=2,
            gradient_accumulation_steps=4, log_steps=2, eval_steps=2, save_dir=tmp_path / str(len(guests)),
            load_best_at_end=False, max_grad_norm=0.1,
        )  # fmt: skip
        trainer.predict(rows(4))
    first, short = (["data_fetched", "step_start", *BATCH * turns, *CLIPPED, *UPDATED] for turns in (4, 2))
    evaluated = ["eval_batch_start", "eval_batch_end"] * 2
    answers = ["log", "eval_start", *evaluated, "eval_end", "save_start", "save_end"]
    expected = ["train_start", "epoch_start", *first, *short, *answers, "epoch_end"]
    assert everything.events[: len(expected)] == expected
    rest = everything.events[len(expected) :]
    assert rest[rest.index("train_end") :] == ["train_end", "predict_start", *evaluated, "predict_end"]
    assert everything.numbers == [0, 1, 2, 3, 0, 1] and min(everything.norms) > 0.1
    assert same(weights(models[0]), weights(models[1]))


@pytest.mark.parametrize("case", ["second pass", "closure", "out of memory", "nothing to predict", "skipped"])
def test_micro_batches_that_are_run_again_are_told_again(trainer_class: Any, case: str) -> None:
    everything = Everything()
    model, data, options = t16(), rows(4), dict[str, Any](batch_size=2, gradient_accumulation_steps=2)
    step = ["data_fetched", "step_start", *BATCH * 2]
    if case == "second pass":
        options["algorithms"] = [SAM()]
        step += [*BATCH * 2, *CLIPPED, *UPDATED]
    elif case == "closure":
        options |= {"optimizer": partial(torch.optim.LBFGS, max_iter=2), "max_grad_norm": None, "learning_rate": 2e-5}
        step += [*CLIPPED, *BATCH * 2, *UPDATED]  # which takes the first losses as they are
    elif case == "out of memory":
        model = Starving(2, "backward", start=0)
        options = {"batch_size": 4, "microbatch_size": "auto", "loss_fn": F.mse_loss}
        step = ["data_fetched", "step_start", *BATCH[:3], *BATCH * 2, *CLIPPED, *UPDATED]
    elif case == "skipped":
        model, data = Overflowing(range(9)), rows(4, torch.float32)
        options |= {"on_nonfinite": "skip", "loss_fn": F.mse_loss}
        step += [*CLIPPED, *UPDATED[1:]]
    else:
        model, data = Tagger(), Blank(4, range(4))
        step = ["data_fetched", "step_start", "before_zero_grad", "after_zero_grad", "step_end"]
    with contextlib.suppress(DataError):
        run(trainer_class, model, data, everything, max_steps=1, epochs=1, **options)
    begin = everything.events.index("data_fetched")
    assert everything.events[begin : everything.events.index("step_end") + 1] == step


def test_parts_of_a_trainer_that_are_hooks_are_called_before_callbacks(trainer_class: Any, tmp_path: Path) -> None:
    calls: list[Any] = []

    class Model(nn.Linear, TrainHook):
        def on_epoch_start(self, trainer: Any, epoch: int) -> None:
            calls.append(("model", epoch))

        def on_save_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["step"] = trainer.progress.step

        def on_load_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
            calls.append(("loaded", checkpoint))

    class Optimizer(torch.optim.SGD, Callback):
        def on_epoch_start(self, trainer: Any) -> None:
            calls.append("optimizer")

    class Schedule(torch.optim.lr_scheduler.StepLR, TrainHook):
        def on_epoch_start(self, trainer: Any, epoch: int) -> None:
            calls.append("schedule")

    user = HookCallback({"on_epoch_start": lambda trainer: calls.append("user")})
    options: dict[str, Any] = {
        "optimizer": Optimizer, "lr_scheduler": partial(Schedule, step_size=1), "save_dir": tmp_path, "batch_size": 4,
        "loss_fn": F.mse_loss,
    }  # fmt: skip
    run(trainer_class, Model(4, 1).double(), rows(4), user, epochs=1, **options)
    order = ["optimizer", "schedule", "user"]
    assert calls == [("model", 0), *order]
    trainer = run(trainer_class, Model(4, 1).double(), rows(4), user, epochs=2, train=False, **options)
    trainer.train(resume_from="auto")
    assert calls[4:] == [("loaded", {"step": 1}), ("model", 1), *order]


def test_a_resume_is_told_before_anything_else_and_a_load_at_once(trainer_class: Any, tmp_path: Any) -> None:
    run(trainer_class, t16(), rows(8), epochs=1, batch_size=4, save_dir=tmp_path, eval_dataset=rows(4))
    trace = Trace()
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "learning_rate": 0.05, **placed_on_cpu(trainer_class)}
    trainer = trainer_class(
        t16(), train_dataset=rows(8), callbacks=[trace], epochs=2, batch_size=4, save_dir=tmp_path,
        progress_bar=False, eval_dataset=rows(4), log_steps=1, **options,
    )  # fmt: skip
    trainer.train(resume_from="auto")
    assert trace.events[:3] == ["checkpoint_loaded", "train_start", "epoch_start"]
    trace.events.clear()
    trainer.load_checkpoint("last")
    assert trace.events == ["checkpoint_loaded"]


def test_a_failure_is_told_and_the_end_of_the_run_still_comes(trainer_class: Any) -> None:
    class Fails(Callback):
        def on_step_end(self, trainer: Any) -> None:
            raise RuntimeError("boom")

    trace = Trace()
    with pytest.raises(RuntimeError, match="boom") as caught:
        run(trainer_class, t16(), rows(8), trace, Fails(), epochs=1)
    assert trace.events[-2:] == ["exception", "train_end"]
    assert any("Fails.on_step_end" in note for note in caught.value.__notes__)


# --- numbers


@pytest.mark.parametrize(("batch", "accumulation"), [(12, 1), (6, 2), (4, 3), (1, 12), (5, 2)])
def test_loss_norm_rate_and_weights_equal_a_hand_written_full_batch_loop(
    trainer_class: Any, batch: int, accumulation: int
) -> None:
    # 31 samples: the last window is short, and with batches of 5 its last micro-batch is short too
    window = batch * accumulation
    model, reference, trace = t16(), t16(), Trace()
    run(
        trainer_class, model, rows(31), trace, optimizer=sgd, lr_scheduler=cosine, max_grad_norm=0.5,
        batch_size=batch, gradient_accumulation_steps=accumulation, epochs=3, learning_rate=2e-5,
    )  # fmt: skip
    expected = by_hand(reference, rows(31), window=window, epochs=3, lr=0.05, schedule=cosine, clip=0.5)
    assert distance(weights(model), weights(reference)) <= 1e-12
    for key in ("loss", "grad_norm", "learning_rate"):
        np.testing.assert_allclose([row[key] for row in trace.logs], expected[key], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (4, 2), (2, 4), (1, 8), (3, 3)])
def test_masked_labels_weigh_every_token_the_same_in_every_split(
    trainer_class: Any, batch: int, accumulation: int
) -> None:
    model, reference = Tagger(), Tagger()
    data = Sentences(8)
    run(
        trainer_class, model, data, optimizer=sgd, batch_size=batch, gradient_accumulation_steps=accumulation,
        epochs=1, max_grad_norm=None, learning_rate=2e-5,
    )  # fmt: skip
    by_hand(reference, data, window=8, epochs=1, lr=0.05, clip=None)
    assert distance(weights(model), weights(reference)) <= 1e-12


@pytest.mark.parametrize(("batch", "size"), [(8, 1), (4, 2), (8, 3)])
def test_a_batch_that_is_split_gives_the_numbers_of_the_whole(trainer_class: Any, batch: int, size: int) -> None:
    model, reference, trace, other = Tagger(), Tagger(), Trace(), Trace()
    options = {"epochs": 2, "grad_reduction": "per-token-mean", "gradient_accumulation_steps": 8 // batch}
    run(trainer_class, model, Sentences(13), trace, batch_size=batch, microbatch_size=size, **options)
    run(trainer_class, reference, Sentences(13), other, batch_size=batch, **options)
    assert distance(weights(model), weights(reference)) <= 1e-12
    assert trace.events == other.events
    for key in ("loss", "grad_norm", "learning_rate", "epoch"):
        assert [row[key] for row in trace.logs] == pytest.approx([row[key] for row in other.logs], rel=1e-12)


@pytest.mark.parametrize("where", ["forward", "backward", "update"])
def test_a_run_whose_memory_runs_out_has_the_numbers_of_one_with_small_micro_batches_and_is_resumed_so(
    trainer_class: Any, where: str, tmp_path: Path
) -> None:
    def start(folder: str, *guests: Callback, room: int = 3) -> Any:
        model = Starving(1000 if where == "update" else room, where, start=2)
        optimizer = StarvingAdamW(model.parameters(), (3,) if where == "update" and room < 1000 else (), lr=0.05)
        return trainer_class(
            model, rows(20), batch_size=8, microbatch_size="auto", epochs=3, optimizer=optimizer, loss_fn=F.mse_loss,
            callbacks=guests, save_dir=tmp_path / folder, save_steps=100, progress_bar=False,
            **placed_on_cpu(trainer_class),
        )  # fmt: skip

    straight, cut, resumed = start("straight"), start("cut", StopAt(5)), start("cut", room=1000)
    straight.train()
    cut.train()
    resumed.train(resume_from="auto")
    assert max(resumed.get_model().sizes) == (4 if where == "update" else 2)
    kept = [[*weights(one.get_model()), *one.get_model().buffers()] for one in (straight, resumed)]
    assert same(*kept)
    assert straight.metrics["train_metrics_history"] == resumed.metrics["train_metrics_history"]


def test_short_last_window_is_averaged_over_its_own_batches(trainer_class: Any) -> None:
    # 7 micro-batches of equal size in windows of 4: two steps, the second over three batches
    gradients: list[torch.Tensor] = []

    class Keep(Callback):
        def on_before_optimizer_step(self, trainer: Any) -> None:
            gradients.append(trainer.model[0].weight.grad.clone())

    trainer = run(
        trainer_class, t16(), rows(14), Keep(), batch_size=2, gradient_accumulation_steps=4, epochs=1,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0), max_grad_norm=None, learning_rate=2e-5,
    )  # fmt: skip
    model, data = t16(), rows(14)
    last = EpochSampler(14, 8).order(0)[8:]
    F.mse_loss(model(data.tensors[0][last]), data.tensors[1][last]).backward()
    assert trainer.progress.step == len(gradients) == 2
    assert distance([gradients[1]], [model[0].weight.grad]) <= 1e-14
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_the_logged_loss_is_the_weighted_mean_since_the_last_log(trainer_class: Any) -> None:
    every, third = Trace(), Trace()
    for trace, interval in ((every, 1), (third, 3)):
        run(trainer_class, Tagger(), Sentences(20), trace, batch_size=4, epochs=2, log_steps=interval)
    counts = []
    sampler = EpochSampler(20, 4)
    for epoch in range(2):
        counts += [int((Sentences(20).labels[i] != -100).sum()) for i in map(torch.from_numpy, sampler.batches(epoch))]
    losses = [row["loss"] for row in every.logs]
    for row, first in zip(third.logs, (0, 3, 6, 9), strict=True):  # a log may span the end of an epoch
        expected = np.average(losses[first : first + 3], weights=counts[first : first + 3])
        assert row["loss"] == pytest.approx(expected, abs=1e-12)


# --- watching changes nothing


@pytest.mark.parametrize("data", [rows(20), Noisy(20)], ids=["tensors", "augmented"])
def test_evaluating_and_logging_leave_the_weights_as_they_would_have_been(trainer_class: Any, data: Any) -> None:
    def final(**options: Any) -> list[torch.Tensor]:
        model = t16(dropout=0.3)
        run(trainer_class, model, data, batch_size=4, epochs=2, **options)
        return weights(model)

    plain = final(log_steps=1000)
    assert same(plain, final(log_steps=1))
    for interval in (1, 3):
        watched = {"eval_dataset": Noisy(7), "eval_steps": interval, "eval_on_start": True, "log_steps": interval}
        assert same(plain, final(**watched, load_best_at_end=False))


# --- stopping


@pytest.mark.parametrize(
    ("options", "step", "reason"),
    [
        ({"epochs": 2}, 10, "epochs"),
        ({"epochs": 9, "max_steps": 7}, 7, "max_steps"),
        ({"epochs": 9, "max_duration": "6ba"}, 6, "max_duration"),
        ({"epochs": 9, "max_duration": "30sp"}, 8, "max_duration"),
        ({"epochs": 9, "max_duration": "0.5ep"}, 3, "max_duration"),
        ({"epochs": 9, "max_steps": 10}, 10, "max_steps"),
        ({"epochs": 2, "max_steps": 10}, 10, "max_steps"),
    ],
)
def test_the_first_limit_reached_ends_the_run(trainer_class: Any, options: Any, step: int, reason: str) -> None:
    trainer = run(trainer_class, t16(), rows(20), batch_size=4, **options)
    assert (trainer.progress.step, trainer.metrics["stop_reason"]) == (step, reason)


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_patience_counts_evaluations_in_a_row_without_a_gain(trainer_class: Any, patience: int) -> None:
    scores = iter([0.5, 0.6, 0.6, 0.55, 0.61, 0.6, 0.6, 0.6, 0.6, 0.6])
    trainer = run(
        trainer_class, t16(), rows(8), eval_dataset=rows(4), epochs=10, batch_size=8, patience=patience,
        compute_metrics=lambda _: {"accuracy": next(scores)}, optimization_metric="accuracy", sanity=False,
    )  # fmt: skip
    assert trainer.progress.epoch == {1: 3, 2: 4, 3: 8}[patience]
    assert trainer.metrics["stop_reason"] == "early_stopping"
    assert trainer.metrics["best_step"] == {1: 2, 2: 2, 3: 5}[patience]


def test_a_stop_inside_an_epoch_does_not_count_the_epoch_nor_evaluate_it(trainer_class: Any) -> None:
    trace = Trace()
    trainer = run(trainer_class, t16(), rows(20), StopAt(3), trace, eval_dataset=rows(4), batch_size=4, epochs=2)
    assert trainer.progress.epoch == 0 and trainer.progress.samples_in_epoch == 12
    assert trainer.metrics["stop_reason"] == "requested"
    assert "eval_start" not in trace.events
    assert trace.events[-3:] == ["log", "epoch_end", "train_end"]  # EPOCH_END always pairs EPOCH_START


def test_the_last_step_is_evaluated_once_though_no_interval_falls_on_it(trainer_class: Any) -> None:
    trainer = run(
        trainer_class, t16(), rows(20), eval_dataset=rows(4), batch_size=4, epochs=9, max_steps=7, eval_steps=3
    )
    assert [row["step"] for row in trainer.metrics["valid"]] == [3, 6, 7]


# --- metrics


def test_the_result_has_one_row_per_epoch_and_per_evaluation(trainer_class: Any) -> None:
    trainer = run(
        trainer_class, t16(), rows(20), eval_dataset=rows(7), batch_size=4, epochs=2, eval_batch_size=3,
        load_best_at_end=False,
    )  # fmt: skip
    metrics = trainer.metrics
    assert [(row["epoch"], row["step"]) for row in metrics["train_metrics_history"]] == [(1, 5), (2, 10)]
    assert set(metrics["train_metrics_history"][0]) == {"epoch", "step", "train_loss", "learning_rate", "grad_norm"}
    assert [(row["epoch"], row["step"]) for row in metrics["valid"]] == [(1, 5), (2, 10)]
    x, y = rows(7).tensors
    with torch.no_grad():
        expected = F.mse_loss(trainer.get_model()(x), y).item()  # exact, though the last batch is short
    assert metrics["valid"][-1]["eval_loss"] == pytest.approx(expected, abs=1e-14)
    assert trainer.evaluate()["eval_loss"] == metrics["valid"][-1]["eval_loss"]


@pytest.mark.parametrize("size", [1, 2, 5, 17])
def test_predictions_come_in_the_order_of_the_dataset_one_row_a_sample(trainer_class: Any, size: int) -> None:
    trainer = run(trainer_class, t16(), rows(8), epochs=1, batch_size=4, eval_batch_size=3)
    x, y = rows(size).tensors
    result = trainer.predict(rows(size))
    with torch.no_grad():
        np.testing.assert_allclose(result.predictions, trainer.get_model()(x).numpy(), atol=1e-12)
    np.testing.assert_array_equal(result.labels, y.numpy())


# --- models of transformers, units that hold their model, and packed batches


KINDS = ("plain", "unit", "gpt", "bert", "t5", "packed", "rows", "by length")


def kind_of(kind: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """A model, its data and what else a trainer is to be told: the kinds that every row of this part runs on."""
    if kind in ("plain", "unit"):
        model = t16()
        return model, rows(21), {"unit": Holding(model)} if kind == "unit" else {}
    if kind == "packed":
        return gpt(), Short(21), {"data_collator": DataCollatorWithFlattening()}
    if kind == "rows":
        return gpt(), PackedDataset(Short(60), 16), {}
    if kind == "by length":
        labelled = [{**one, "labels": one["input_ids"]} for one in Short(21)]
        return gpt(), GroupByLength(labelled, 4), {}
    data = Tokens(21, {"gpt": "tokens", "bert": "classes", "t5": "pairs"}[kind])
    return {"gpt": gpt, "bert": bert, "t5": t5}[kind](), data, {}


def trained(trainer_class: Any, kind: str, **options: Any) -> tuple[Any, Trace]:
    """A trainer after two epochs on this kind, and the rows that it logged."""
    model, data, extra = kind_of(kind)
    if "loss_fn" not in extra and "unit" not in extra and kind == "plain":
        extra["loss_fn"] = F.mse_loss
    trace = Trace()
    options = {"optimizer": sgd, "learning_rate": 2e-5, "epochs": 2, "batch_size": 4, **extra, **options}
    trainer = trainer_class(
        model, train_dataset=data, progress_bar=False, log_steps=1, callbacks=[trace],
        **placed_on_cpu(trainer_class), **options,
    )  # fmt: skip
    trainer.train()
    return trainer, trace


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_ends_with_the_bits_of_the_native_trainer(trainer_class: Any, kind: str) -> None:
    options = {"gradient_accumulation_steps": 2, "lr_scheduler": "cosine", "warmup_steps": 1}
    reference, expected = trained(Trainer, kind, **options)
    trainer, trace = trained(trainer_class, kind, **options)
    assert same(weights(trainer.get_model()), weights(reference.get_model()))
    for key in ("step", "loss", "grad_norm", "learning_rate"):
        assert [row[key] for row in trace.logs] == [row[key] for row in expected.logs]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_takes_the_same_steps_in_every_split(trainer_class: Any, kind: str) -> None:
    whole, expected = trained(trainer_class, kind, batch_size=8)
    parts, found = trained(trainer_class, kind, batch_size=2, gradient_accumulation_steps=4)
    bound = 1e-10 if kind in ("plain", "unit") else 1e-6  # transformers computes losses in fp32
    assert distance(weights(parts.get_model()), weights(whole.get_model())) <= bound
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([r[key] for r in found.logs], [r[key] for r in expected.logs], rtol=0, atol=bound)


@pytest.mark.parametrize("kind", ["rows", "by length"])
def test_packed_and_grouped_data_are_resumed_in_mid_epoch_also_in_another_split(
    trainer_class: Any, kind: str, tmp_path: Path
) -> None:
    def ended(batch_size: int = 4, resume_from: str | None = None, **options: Any) -> Any:
        model, data, _ = kind_of(kind)
        trainer = trainer_class(
            model, train_dataset=data, optimizer="sgd", learning_rate=0.05, batch_size=batch_size, progress_bar=False,
            gradient_accumulation_steps=4 // batch_size, **placed_on_cpu(trainer_class), **options,
        )  # fmt: skip
        trainer.train(resume_from=resume_from)
        return trainer

    straight = ended(epochs=2)
    assert straight.progress.step > 9
    ended(max_steps=7, save_dir=tmp_path)  # one more than an epoch has
    resumed = ended(epochs=2, save_dir=tmp_path / "same", resume_from=str(tmp_path / "checkpoint-7"))
    assert same(weights(resumed.get_model()), weights(straight.get_model()))
    resumed = ended(2, epochs=2, save_dir=tmp_path / "other", resume_from=str(tmp_path / "checkpoint-7"))
    assert distance(weights(resumed.get_model()), weights(straight.get_model())) < 1e-6


# --- collators that make other rows than samples


def counted(
    trainer_class: Any, collator: str, source: str, save_dir: Path, stop: int = 0, **options: Any
) -> tuple[Any, list[torch.Tensor]]:
    """A trainer on such data, stopped after a step, and its weights: steps of 8, 8 and 6 samples in two epochs."""
    model, given = made(collator, source)
    trainer = trainer_class(
        model, epochs=2, gradient_accumulation_steps=2, learning_rate=0.05, save_dir=save_dir, save_steps=1,
        progress_bar=False, callbacks=[StopAt(stop)], **placed_on_cpu(trainer_class), **given, **options,
    )  # fmt: skip
    trainer.train(resume_from="auto")
    return trainer, weights(trainer.get_model())


ROWS = [(collator, source) for collator in COLLATORS for source in SOURCES]
SOME_ROWS = [
    ("filtered", "data"),
    ("views", "stream"),
    ("bins", "own loader"),
    ("packed", "workers"),
    ("bins", "loader"),
    ("bins", "resumable loader"),
]


@pytest.mark.parametrize(("collator", "source"), thinned(ROWS, SOME_ROWS))
def test_a_collator_that_makes_other_rows_than_samples_is_resumed_bit_for_bit(
    trainer_class: Any, collator: str, source: str, tmp_path: Path
) -> None:
    straight, expected = counted(trainer_class, collator, source, tmp_path / "straight")
    progress = straight.progress
    assert (progress.step + progress.skipped_steps, progress.epoch) == (6, 2)
    if source not in ("own loader", "resumable loader"):  # of which only the rows are known
        assert progress.samples == 2 * SIZE
    for stop in (2, 3, 4):
        counted(trainer_class, collator, source, tmp_path / f"{stop}", stop)
        resumed, found = counted(trainer_class, collator, source, tmp_path / f"{stop}")
        assert same(found, expected), stop
        assert {**resumed.progress.state_dict(), "seconds": 0} == {**progress.state_dict(), "seconds": 0}


def test_a_loader_with_a_state_is_put_back_and_not_read_again(trainer_class: Any, tmp_path: Path) -> None:
    for stop, batches in ((2, 4), (4, 8)):
        counted(trainer_class, "bins", "resumable loader", tmp_path / f"{stop}", stop)
        Resumable.made = 0
        counted(trainer_class, "bins", "resumable loader", tmp_path / f"{stop}")
        assert Resumable.made == 2 * 6 - batches


class File(IterableDataset[Any]):
    """Some rows of `rows`, with noise, and with a state."""

    def __init__(self, *places: int) -> None:
        self.places, self.at = range(*places), 0

    def __iter__(self) -> Any:
        data = rows(30)
        while self.at < len(self.places):
            self.at += 1
            x, y = data[self.places[self.at - 1]]
            yield x + 0.1 * torch.randn(4, dtype=x.dtype), y
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_a_stream_of_shards_is_the_same_in_every_split_and_resumed_bit_for_bit(
    trainer_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omnitrain.data.shards._EVERY", 2)

    def trained(batch_size: int = 8, **options: Any) -> Any:
        files = [File(9), File(9, 12), File(12, 12), File(12, 30)]  # 72 turns
        stop = StopAt(options.pop("stop", 0))
        trainer = run(
            trainer_class, t16(), ShardedStream(files), stop, epochs=2, batch_size=batch_size,
            global_batch_size=8, train=False, **options,
        )  # fmt: skip
        trainer.train(resume_from="auto" if "save_dir" in options else None)
        return trainer

    straight = trained()
    assert (straight.progress.step, straight.progress.samples) == (18, 60)
    for options in ({"batch_size": 2}, {"batch_size": 4, "num_workers": 2}):
        assert distance(weights(trained(**options).get_model()), weights(straight.get_model())) <= 1e-12
    for stop in (3, 9, 14):
        trained(stop=stop, save_dir=tmp_path / f"{stop}")
        resumed = trained(save_dir=tmp_path / f"{stop}")
        assert same(weights(resumed.get_model()), weights(straight.get_model())), stop


@dataclass(frozen=True)
class Pair:
    """A batch of a class that names its labels."""

    x: torch.Tensor
    labels: torch.Tensor


class Graph:
    """A batch of which nothing is known, not even its length."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any) -> Graph:
        return type(self)(self.x.to(device), self.y.to(device))


class LongGraph(Graph):
    """The same with a length, so that a part can be weighed."""

    def __len__(self) -> int:
        return len(self.x)


class OnGraphs:
    """Makes such batches, splits them, and computes their loss."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def collate(self, samples: Any) -> Graph:
        return Graph(*(torch.stack(column) for column in zip(*samples, strict=True)))

    def split_batch(self, batch: Graph, size: int) -> list[LongGraph]:
        return list(map(LongGraph, batch.x.split(size), batch.y.split(size)))

    def __call__(self, batch: Graph) -> Any:
        return F.mse_loss(self.model(batch.x), batch.y, reduction="sum"), batch.y.numel()

    def evaluate(self, batch: Graph) -> StepOutput:
        loss, count = self(batch)
        return StepOutput(loss, num_targets=count)


class OnPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = t16()

    def forward(self, batch: Pair) -> torch.Tensor:
        return self.body(batch.x)


@pytest.mark.parametrize("kind", ["dataclass", "object"])
def test_a_batch_of_any_class_trains_is_split_and_evaluated_as_one_of_tensors(trainer_class: Any, kind: str) -> None:
    data, common = rows(21), {"batch_size": 8, "epochs": 2, "eval_dataset": rows(5), "load_best_at_end": False}
    plain = run(trainer_class, t16(), data, loss_fn=F.mse_loss, **common)
    for options in ({}, {"microbatch_size": 3}):
        if kind == "dataclass":
            own: dict[str, Any] = {"loss_fn": F.mse_loss, "data_collator": lambda batch: Pair(*Collator()(batch))}
            model: Any = OnPairs()
        else:
            model = t16()
            unit = OnGraphs(model)
            collate: Any = lambda samples, unit=unit: unit.collate(samples)  # noqa: E731
            collate.split_batch = unit.split_batch
            own = {"unit": unit, "data_collator": collate}
        found = trainer_class(
            model, data, progress_bar=False, log_steps=1, learning_rate=0.05, **placed_on_cpu(trainer_class), **common,
            **own, **options,
        )  # fmt: skip
        found.train()
        assert distance(weights(found.get_model()), weights(plain.get_model())) <= 1e-12
        assert found.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], abs=1e-12)


def test_a_nan_among_packed_samples_is_traced_to_the_sample(trainer_class: Any, tmp_path: Path) -> None:
    data = rows(SIZE)
    data.tensors[0][13] = math.nan
    with pytest.raises(NonFiniteError) as caught:
        run(
            trainer_class, t16(), data, batch_size=4, gradient_accumulation_steps=2, data_collator=COLLATORS["bins"],
            epochs=1,
        )  # fmt: skip
    assert "these samples of the training set: 13." in str(caught.value)


class Rooted(nn.Module):
    """Its loss is finite for every sample, and the gradient of it for all but those of zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).pow(2).sum(dim=1, keepdim=True).sqrt()


def test_a_gradient_that_is_not_finite_is_traced_to_the_sample(trainer_class: Any) -> None:
    data, model = rows(SIZE, torch.float32), Rooted()
    data.tensors[0][13] = 0.0
    with pytest.raises(NonFiniteError) as caught:
        run(
            trainer_class, model, data, loss_fn=F.mse_loss, batch_size=4, gradient_accumulation_steps=2, epochs=1
        )  # fmt: skip
    assert "these samples of the training set: 13." in str(caught.value)
    assert all(one.isfinite().all() for one in model.parameters())


@pytest.mark.parametrize("length", [{"max_steps": 5}, {"epochs": 2}, {"epochs": 60}], ids=str)
def test_a_run_in_which_every_step_is_skipped_is_an_error(trainer_class: Any, length: Any) -> None:
    model = Tagger(dtype=torch.float32)
    with pytest.raises(DataError, match="steps were all skipped: nothing is trained"):
        run(trainer_class, model, Blank(8, range(8)), batch_size=4, **length)


def test_a_run_in_which_a_later_epoch_is_skipped_is_an_error(trainer_class: Any) -> None:
    broken = Overflowing(range(8, 10_000))
    with pytest.raises(DataError, match="steps were all skipped"):
        run(
            trainer_class, broken, rows(32, torch.float32), loss_fn=F.mse_loss, batch_size=4, epochs=60,
            on_nonfinite="skip",
        )  # fmt: skip
    assert all(one.isfinite().all() for one in broken.parameters())


def test_a_few_skipped_steps_are_no_error(trainer_class: Any) -> None:
    broken = Overflowing(range(8, 16))  # a whole epoch
    done = run(
        trainer_class, broken, rows(32, torch.float32), loss_fn=F.mse_loss, batch_size=4, epochs=3, on_nonfinite="skip"
    )
    assert (done.progress.step, done.progress.skipped_steps) == (16, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_that_train_in_16_bits_are_told_of(trainer_class: Any, dtype: Any, caplog: Any) -> None:
    run(trainer_class, t16(dtype=dtype), rows(16, dtype), batch_size=8, max_steps=1)
    told = [one for one in caplog.messages if "smaller than about 1/256 of a weight is lost" in one]
    assert len(told) == (dtype is torch.bfloat16)


def test_the_remedy_for_arrays_in_double_precision_comes_with_the_rehearsal_too(trainer_class: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        run(trainer_class, t16(dtype=torch.float32), rows(16, torch.float32), eval_dataset=rows(8))
    assert any("Arrays of NumPy are float64" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32], ids=str)
def test_classes_of_the_wrong_type_are_told_with_the_remedy(trainer_class: Any, dtype: Any) -> None:
    data = torch.rand(16, 4), torch.zeros(16, dtype=dtype)
    with pytest.raises(RuntimeError) as caught:
        run(trainer_class, nn.Linear(4, 3), data, loss_fn=F.cross_entropy, batch_size=8)
    assert any("labels of 64 bits" in note for note in caught.value.__notes__)


def test_an_evaluation_of_packed_samples_weighs_what_the_loss_is_a_mean_of(trainer_class: Any) -> None:
    model, given = made("packed", "data")
    trainer = trainer_class(model, epochs=1, progress_bar=False, **placed_on_cpu(trainer_class), **given)
    data = Short(7)
    labels = sum(len(sample["input_ids"]) - 1 for sample in data)
    losses = [
        model(**COLLATORS["packed"]([data[i] for i in part]), use_cache=False).loss.item() * count
        for part in ([0, 1, 2, 3], [4, 5, 6])
        for count in [sum(len(data[i]["input_ids"]) - 1 for i in part)]
    ]
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(sum(losses) / labels, abs=1e-6)


@pytest.mark.parametrize("collator", ["views", "packed"])
def test_predicting_samples_that_a_collator_makes_other_rows_of_is_refused(trainer_class: Any, collator: str) -> None:
    model, given = made(collator, "data")
    trainer = trainer_class(model, epochs=1, progress_bar=False, **placed_on_cpu(trainer_class), **given)
    found = {"views": 8, "packed": 1}[collator]
    with pytest.raises(DataError, match=f"one row a sample, but the model returned {found} rows for 4 samples"):
        trainer.predict(given["train_dataset"])


# --- data that end too early


class Ending(Dataset[Any]):
    """Rows of which one raises StopIteration."""

    def __init__(self, at: int = 13) -> None:
        self.at, self.data = at, rows(SIZE)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return next(iter([] if index == self.at else [self.data[index]]))


class EndingBatches(Ending):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class Announced(IterableDataset[Any]):
    """A stream of 22 samples that says it has 30."""

    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Any:
        return iter([rows(SIZE)[index] for index in range(SIZE)])


def collate_that_ends(samples: Any) -> Any:
    return next(iter(()))


class Announcing:
    """A loader of the user's own that yields 3 batches, and says 5."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter(DataLoader(rows(12), 4))


ENDS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "dataset": (Ending, {}, "The dataset raised StopIteration for sample 13"),
    "dataset, worker": (Ending, {"num_workers": 1}, "The dataset raised StopIteration for sample 13"),
    "dataset of batches": (EndingBatches, {}, "The dataset raised StopIteration for .*13"),
    "collator": (
        partial(rows, 4), {"data_collator": collate_that_ends}, "The collator raised StopIteration for",
    ),
    "collator, worker": (
        partial(rows, 4), {"data_collator": collate_that_ends, "num_workers": 1},
        "The collator raised StopIteration for",
    ),
    "stream": (Announced, {}, "ended after 22 samples, but their length is 30"),
    "stream, collator": (
        Announced, {"data_collator": collate_that_ends}, "The collator raised StopIteration",
    ),
    "loader": (lambda: DataLoader(Ending(), 4), {}, "DataLoader ended after 3 batches, but its length is 6"),
    "loader, worker": (
        lambda: DataLoader(Ending(), 4, num_workers=1), {}, "DataLoader ended after 3 batches, but its length is 6",
    ),
    "own loader": (
        Announcing, {}, "ended after 3 (batches|samples), but .* length is 5",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", thinned(ENDS, [one for one in ENDS if one not in ("loader, worker", "collator, worker")])
)
def test_data_that_end_before_their_length_are_an_error_and_no_shorter_epoch(trainer_class: Any, kind: str) -> None:
    make, options, words = ENDS[kind]
    source = "train_loader" if "loader" in kind else "train_dataset"
    size = {} if "loader" in kind else {"batch_size": 4}
    trainer = trainer_class(
        t16(), **{source: make()}, loss_fn=F.mse_loss, epochs=1, progress_bar=False, **placed_on_cpu(trainer_class),
        **options, **size,
    )  # fmt: skip
    with pytest.raises(DataError, match=words):
        trainer.train()
    with pytest.raises(DataError, match=words):
        trainer.evaluate(make())


# --- arrays, batches of one, and steps that are short


def test_a_pair_of_arrays_trains_as_the_same_tensors_do(trainer_class: Any) -> None:
    x, y = rows(13).tensors
    expected = run(trainer_class, t16(), (x, y), eval_dataset=(x, y), epochs=2)
    found = run(trainer_class, t16(), (x.numpy(), y.numpy()), eval_dataset={"a": (x.numpy(), y.numpy())}, epochs=2)
    assert same(weights(found.get_model()), weights(expected.get_model()))
    assert found.metrics["valid"][-1]["eval_a_loss"] == expected.metrics["valid"][-1]["eval_loss"]


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()


def test_a_last_batch_of_one_that_cannot_be_normalized_is_named_with_the_remedy(trainer_class: Any) -> None:
    with pytest.raises(DataError) as caught:
        run(trainer_class, normalized(), rows(9), batch_size=4, epochs=1)
    for words in ("Micro-batch 1 of step 3 (epoch 1", "single row", "leave over of 9 samples", "drop_last=True"):
        assert words in str(caught.value)
    assert run(trainer_class, normalized(), rows(9), batch_size=4, epochs=1, drop_last=True).progress.step == 2


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (4, 2), (1, 8)])
def test_without_the_short_last_step_every_split_takes_the_same_whole_steps(
    trainer_class: Any, batch: int, accumulation: int
) -> None:
    model, reference = t16(), t16()
    whole = run(
        trainer_class, model, rows(23), batch_size=batch, gradient_accumulation_steps=accumulation, epochs=2,
        drop_last=True, optimizer=sgd, learning_rate=2e-5,
    )  # fmt: skip
    assert (whole.progress.step, whole.progress.samples, whole.progress.epoch) == (4, 32, 2)
    optimizer = sgd(reference.parameters())
    x, y = rows(23).tensors
    for epoch in range(2):
        for part in EpochSampler(23, 8).order(epoch)[:16].reshape(2, 8):
            F.mse_loss(reference(x[part]), y[part]).backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert distance(weights(model), weights(reference)) <= 1e-12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train_dataset": rows(7)}, "7 samples, and without the last, incomplete batch of 8 nothing is left"),
        ({"train_dataset": Announced()}, "`drop_last=True` needs data with a length, so that"),
        ({"train_loader": DataLoader(rows(9), 4)}, "`drop_last=True` has no effect on a `train_loader`"),
    ],
    ids=["too few", "stream", "loader"],
)
def test_steps_cannot_be_dropped_of_data_without_any_or_of_another_order(
    trainer_class: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        trainer_class(t16(), loss_fn=F.mse_loss, drop_last=True, **placed_on_cpu(trainer_class), **options)


def test_a_unit_is_told_the_number_of_each_step(trainer_class: Any) -> None:
    model = t16()
    unit = Holding(model)
    run(trainer_class, model, rows(12), unit=unit, loss_fn=None, epochs=1, batch_size=2)
    assert unit.steps == [1, 2, 3, 4, 5, 6]


def test_callbacks_see_the_users_own_module(trainer_class: Any) -> None:
    model, seen = t16(), []

    class Look(Callback):
        def on_step_end(self, trainer: Any) -> None:
            seen.append(trainer.model is model and trainer.get_model() is model)

    run(trainer_class, model, rows(8), Look(), epochs=1, batch_size=4)
    assert seen == [True, True]


# --- steps that are skipped


@pytest.mark.parametrize("counts_targets", [False, True], ids=["labels", "targets of a unit"])
def test_a_window_without_a_label_changes_nothing_and_is_counted_as_skipped(
    trainer_class: Any, counts_targets: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def unit_of(model: Tagger) -> Any:
        def unit(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            kept = batch["labels"] != -100
            scores = model.out(model.embed(batch["ids"]))
            return F.cross_entropy(scores[kept], batch["labels"][kept], reduction="sum"), kept.sum()

        return unit

    def final(data: Any) -> tuple[Any, Trace]:
        model, trace = Tagger(), Trace()
        options = {"unit": unit_of(model)} if counts_targets else {}
        trainer = run(
            trainer_class, model, data, trace, batch_size=2, gradient_accumulation_steps=2, epochs=1, shuffle=False,
            lr_scheduler="linear", optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), learning_rate=2e-5,
            max_steps=4, **options,
        )  # fmt: skip
        return trainer, trace

    reference, expected = final(Subset(Sentences(20), [*range(8), *range(12, 20)]))
    trainer, trace = final(Blank(20, range(8, 12)))
    assert (trainer.progress.step, trainer.progress.skipped_steps) == (4, 1)
    assert same(weights(trainer.model), weights(reference.model))
    for key in ("step", "loss", "learning_rate"):
        assert [row[key] for row in trace.logs] == [row[key] for row in expected.logs]
    assert sum("has a label that counts" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_an_overflow_of_fp16_skips_the_step(trainer_class: Any, fused: bool) -> None:
    kept: list[list[torch.Tensor]] = []

    class Keep(Callback):
        def on_step_end(self, trainer: Any) -> None:
            kept.append(weights(trainer.model))

    trace = Trace()
    trainer = trainer_class(
        Overflowing(at=(3, 8)), train_dataset=rows(40, torch.float32), loss_fn=F.mse_loss, batch_size=4, epochs=1,
        lr_scheduler="linear", callbacks=[trace, Keep()], progress_bar=False, log_steps=1, learning_rate=2e-5,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused), **placed_on_cpu(trainer_class),
    )  # fmt: skip
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    metrics = trainer.train()
    assert (trainer.progress.step, trainer.progress.skipped_steps) == (8, 2)
    assert trainer.lr_scheduler.last_epoch == 8
    assert trainer.scaler.get_scale() == 256.0
    assert same(kept[1], kept[2]) and not same(kept[2], kept[3])
    assert trace.logs[-1]["skipped_steps"] == 2 and trace.logs[-1]["loss_scale"] == 256.0
    assert math.isfinite(metrics["train_metrics_history"][0]["train_loss"])


@pytest.fixture
def fp16_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 on a CPU too, which PyTorch can and nobody wants."""

    def parse(cls: Any, autocast: Any, device: torch.device, *rest: Any) -> Precision:
        return Precision(autocast or "fp32", device.type)

    monkeypatch.setattr(Precision, "parse", classmethod(parse))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_a_loss_scale_below_the_minimum_ends_the_run(fp16_everywhere: None, trainer_class: Any, fused: bool) -> None:
    trainer = trainer_class(
        Overflowing(at=range(1, 99)), train_dataset=rows(40, torch.float32), loss_fn=F.mse_loss, batch_size=4,
        fp16_loss_scale=(8.0, 2.0), autocast="fp16", optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused),
        learning_rate=2e-5, progress_bar=False, **placed_on_cpu(trainer_class),
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match=r"fell to 1, below its minimum 2"):
        trainer.train()
    assert trainer.progress.step == 0


def scaled(trainer_class: Any, window: int, *, cut: int = 0, **options: Any) -> tuple[Any, Trace]:
    """Take 10 steps under fp16, of which the fourth overflows; stop after step `cut`."""
    trace, resume = Trace(), {name: options.pop(name) for name in ("resume_from", "allow_change") if name in options}
    trainer = trainer_class(
        Overflowing(at=(4,)), train_dataset=rows(40, torch.float32), loss_fn=F.mse_loss, batch_size=4, max_steps=9,
        fp16_loss_scale=(1024.0, 1e-4, window), autocast="fp16", log_steps=1, learning_rate=0.01, progress_bar=False,
        callbacks=[trace, StopAt(cut)], load_best_at_end=None, **options, **placed_on_cpu(trainer_class),
    )  # fmt: skip
    if resume:
        trainer.model.at = ()
    trainer.train(**resume)
    return trainer, trace


def test_the_loss_scale_doubles_after_its_window_and_is_resumed_in_the_middle_of_one(
    fp16_everywhere: None, trainer_class: Any, tmp_path: Path
) -> None:
    straight, trace = scaled(trainer_class, 3)
    scales = [row["loss_scale"] for row in trace.logs]
    assert scales == [1024, 1024, 2048, 1024, 1024, 2048, 2048, 2048, 4096]
    scaled(trainer_class, 3, cut=4, save_dir=tmp_path)  # one step into a window
    resumed, rest = scaled(trainer_class, 3, save_dir=tmp_path / "3", resume_from=tmp_path / "last")
    assert [row["loss_scale"] for row in rest.logs] == scales[4:]
    assert same(weights(resumed.model), weights(straight.model))
    with pytest.raises(CheckpointError, match=r"fp16_loss_scale: \[1024.0, 0.0001, 3\] -> \[1024.0, 0.0001, 2\]"):
        scaled(trainer_class, 2, save_dir=tmp_path / "2", resume_from=tmp_path / "last")
    _, other = scaled(
        trainer_class, 2, save_dir=tmp_path / "2", resume_from=tmp_path / "last", allow_change={"fp16_loss_scale"}
    )
    assert [row["loss_scale"] for row in other.logs] == [2048, 2048, 4096, 4096, 8192]


# --- fp8


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))


def test_layers_of_fitting_sizes_multiply_in_fp8_and_a_run_is_resumed_so(
    trainer_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eighths.install(monkeypatch)

    def trained(precision: str, resume: str | None = None, cut: int = 0, **options: Any) -> Any:
        data = rows(12, torch.float32)
        model, options = wide(), {"epochs": 2, "batch_size": 4, "autocast": precision, **options}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # of the layers as they were
        trainer = run(
            trainer_class, model, data, StopAt(cut), train=False, optimizer=optimizer, learning_rate=2e-5, **options
        )
        trainer.train(resume)
        return trainer

    straight = trained("fp8")
    kinds = [type(layer).__name__ for layer in straight.model if isinstance(layer, nn.Linear)]
    assert kinds == ["Linear", "Float8Linear", "Linear"] and straight.precision.name == "fp8"
    assert distance(weights(straight.model), weights(trained("bf16").model)) > 1e-6
    trained("fp8", cut=4, save_dir=tmp_path)
    with pytest.raises(CheckpointError, match="autocast: 'fp8' -> 'bf16'"):
        trained("bf16", "auto", save_dir=tmp_path)
    assert same(weights(straight.model), weights(trained("fp8", "auto", save_dir=tmp_path).model))
    assert load_tensors(tmp_path / "last" / "model.safetensors").keys() == wide().state_dict().keys()
    with pytest.raises(ConfigError, match="no linear layer whose sizes are both multiples of 16"):
        run(trainer_class, t16(), rows(8), autocast="fp8")


# --- dtypes


class Scaled(nn.Module):
    """A layer with a buffer; notes the dtypes of all that a forward pass and its loss meet."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.seen = nn.Linear(4, 1), set[tuple[torch.dtype, ...]]()
        self.register_buffer("factor", torch.tensor(1.1))
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add((self.layer.weight.dtype, self.factor.dtype, x.dtype, self.steps.dtype))
        return self.layer(x * self.factor)


def test_parameters_buffers_and_inputs_are_of_the_dtypes_that_are_set_and_a_run_is_resumed_so(
    trainer_class: Any, tmp_path: Path
) -> None:
    BF16, FP32 = torch.bfloat16, torch.float32
    labels = []

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        labels.append(targets.dtype)
        return F.mse_loss(outputs, targets)

    def trained(model: nn.Module, data: Any, resume: str | None = None, cut: int = 0, **options: Any) -> Any:
        options = {"loss_fn": loss_fn, "batch_size": 4, "epochs": 2, "eval_dataset": data, **options}
        trainer = run(trainer_class, model, data, StopAt(cut), train=False, load_best_at_end=False, **options)
        trainer.train(resume)
        return trainer

    dtypes = {"parameters": "bf16", "buffers": torch.bfloat16, "inputs": "bfloat16"}
    data = rows(12, FP32)
    by_argument = trained(Scaled(), data, dtypes=dtypes)
    by_argument.predict(data)
    assert by_argument.model.seen == {(BF16, BF16, BF16, torch.int64)} and set(labels) == {FP32}
    pixels, targets = data.tensors
    by_hand = trained(Scaled().bfloat16(), TensorDataset(pixels.to(BF16), targets))
    assert same(weights(by_argument.model), weights(by_hand.model))
    trained(Scaled(), data, dtypes=dtypes, cut=4, save_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"dtypes: \{.*'parameters': 'bf16'.*\} -> None"):
        trained(Scaled(), data, "auto", save_dir=tmp_path)
    resumed = trained(Scaled(), data, "auto", dtypes=dtypes, save_dir=tmp_path)
    assert same(weights(resumed.model), weights(by_argument.model))
    assert load_tensors(tmp_path / "last" / "model.safetensors")["layer.weight"].dtype is BF16


def test_dtypes_that_would_have_no_effect_are_refused(trainer_class: Any) -> None:
    class Own(trainer_class):
        def _prepare_batch(self, batch: Any) -> Any:
            return batch

    with pytest.raises(ConfigError, match="sets the inputs, which `_prepare_batch` of Own prepares itself"):
        run(Own, t16(), rows(8), dtypes={"inputs": "bf16"})
    if trainer_class is Trainer:
        with pytest.raises(ConfigError, match=r"'reductions'.*Trainer has only one.*AccelerateTrainer"):
            run(trainer_class, t16(), rows(8), dtypes={"reductions": "bf16"})


# --- products of matrices


class Products(nn.Module):
    """Notes in what precision products are computed, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.seen = nn.Linear(4, 1).double(), set[tuple[bool, str]]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add((self.training, torch.get_float32_matmul_precision()))
        return self.layer(x)


def test_products_are_computed_as_matmul_precision_says_and_afterwards_as_before(
    trainer_class: Any, tmp_path: Path
) -> None:
    def make(precision: Any, cut: int = 0) -> Any:
        options = {"epochs": 1, "batch_size": 4, "save_dir": tmp_path, "matmul_precision": precision}
        return run(
            trainer_class, Products(), rows(12), StopAt(cut), loss_fn=F.mse_loss, eval_dataset=rows(4), train=False,
            **options,
        )  # fmt: skip

    trainer = make("high", cut=2)
    trainer.train()
    trainer.evaluate()
    trainer.predict(rows(4))
    assert trainer.model.seen == {(True, "high"), (False, "high")}
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(CheckpointError, match="matmul_precision: 'high' -> 'highest'"):
        make(None).train("auto")
    torch.set_float32_matmul_precision("high")  # by the program itself, which is the same
    try:
        make(None).train("auto")
    finally:
        torch.set_float32_matmul_precision("highest")


# --- the rate that is logged


def test_the_logged_learning_rate_is_that_of_the_step_for_each_group_that_differs(trainer_class: Any) -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.4}], lr=0.1)

    trace = Trace()
    trainer = run(
        trainer_class, t16(), rows(16), trace, optimizer=groups, lr_scheduler="linear", batch_size=4, epochs=1,
        learning_rate=2e-5,
    )  # fmt: skip
    assert [row["learning_rate"] for row in trace.logs] == pytest.approx([0.1, 0.075, 0.05, 0.025], abs=1e-15)
    assert [row["learning_rate_1"] for row in trace.logs] == pytest.approx([0.4, 0.3, 0.2, 0.1], abs=1e-15)
    assert trainer.metrics["train_metrics_history"][-1]["learning_rate"] == trace.logs[-1]["learning_rate"]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0


def test_a_schedule_that_looks_at_gradients_finds_them(trainer_class: Any) -> None:
    seen: list[bool] = []

    class Looking(torch.optim.lr_scheduler.LRScheduler):
        def get_lr(self) -> Any:
            if self.last_epoch > 0:
                seen.append(all(p.grad is not None for g in self.optimizer.param_groups for p in g["params"]))
            return self.base_lrs

    run(trainer_class, t16(), rows(8), lr_scheduler=Looking, batch_size=4, epochs=1)
    assert seen == [True, True]


# --- the best weights without a save_dir


class Remember(Callback):
    """Keeps the weights of each evaluation."""

    def __init__(self) -> None:
        self.weights: dict[int, list[torch.Tensor]] = {}

    def on_eval_end(self, trainer: Any, metrics: Any) -> None:
        self.weights[trainer.progress.step] = weights(trainer.model)


def diverging(trainer_class: Any, *guests: Callback, **options: Any) -> Any:
    """A run whose evaluations get worse after the second one: the rate grows."""
    grows = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.7**step)}
    model = t16()
    return run(
        trainer_class, model, rows(16), *guests, eval_dataset=rows(8), eval_steps=1, batch_size=8, max_steps=12,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02), learning_rate=2e-5, max_grad_norm=None,
        **grows, **options,
    )  # fmt: skip


def test_a_run_without_a_save_dir_ends_on_its_best_weights_and_says_so(
    trainer_class: Any, caplog: pytest.LogCaptureFixture
) -> None:
    remember = Remember()
    with caplog.at_level("INFO", "omnitrain"):
        trainer = diverging(trainer_class, remember)
    best = trainer.metrics["best_step"]
    assert 0 < best < 12
    assert same(weights(trainer.model), remember.weights[best])
    assert trainer.evaluate()["eval_loss"] == trainer.metrics["best_valid"]["eval_loss"]
    assert trainer.test(rows(8))["test_loss"] == trainer.metrics["best_valid"]["eval_loss"]
    assert trainer.metrics["test"][-1]["step"] == best
    assert [one for one in caplog.messages if "weights" in one] == [
        f"The model has the best weights now, those of step {best}."
    ]


def test_a_run_that_ends_on_its_last_weights_says_so(trainer_class: Any, caplog: pytest.LogCaptureFixture) -> None:
    remember = Remember()
    with caplog.at_level("INFO", "omnitrain"):
        trainer = diverging(trainer_class, remember, load_best_at_end=False)
    assert same(weights(trainer.model), remember.weights[12])
    assert [one for one in caplog.messages if "weights" in one] == [
        "The model keeps its last weights, those of step 12: load_best_at_end=False."
    ]


def test_buffers_and_extra_state_are_of_the_best_evaluation_too(trainer_class: Any) -> None:
    seen = {}

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net, self.norm = nn.Linear(4, 1), nn.BatchNorm1d(4)
            self.count = 0
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += self.training
            return self.net(self.norm(x))

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    class Look(Callback):
        def on_eval_end(self, trainer: Any, metrics: Any) -> None:
            seen[trainer.progress.step] = trainer.model.count, trainer.model.norm.running_mean.clone()

    model = Counting()
    trainer = run(
        trainer_class, model, rows(16), Look(), eval_dataset=rows(8), eval_steps=1, batch_size=8, max_steps=6,
        loss_fn=F.mse_loss, learning_rate=3.0,
    )  # fmt: skip
    count, mean = seen[trainer.metrics["best_step"]]
    assert trainer.metrics["best_step"] < 6
    assert model.count == count
    assert torch.equal(model.norm.running_mean, mean)


# --- modes of modules


class WithNorm(nn.Module):
    """A BatchNorm between two layers, with dropout after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.dropout = nn.Dropout(0.3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(self.norm(self.first(x))))


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def test_a_module_that_the_user_put_into_evaluation_mode_stays_in_it(
    trainer_class: Any, caplog: pytest.LogCaptureFixture
) -> None:
    seen = []

    class Look(Callback):
        def on_before_optimizer_step(self, trainer: Any) -> None:
            seen.append(modes(trainer.model))

    model = WithNorm()
    model.norm.eval()
    before, statistics = modes(model), model.norm.running_mean.clone()
    with caplog.at_level("INFO", "omnitrain"):
        run(
            trainer_class, model, rows(12), Look(), loss_fn=F.mse_loss, epochs=2, batch_size=4, eval_dataset=rows(4),
            eval_steps=2, gradient_accumulation_steps=2, load_best_at_end=False,
        )  # fmt: skip
    assert seen == [before] * 4
    assert modes(model) == before
    assert torch.equal(model.norm.running_mean, statistics)
    told = [record.getMessage() for record in caplog.records if "evaluation mode stay" in record.getMessage()]
    assert len(told) == 1
    assert "norm" in told[0]


def test_modes_that_a_callback_sets_between_epochs_stay(trainer_class: Any) -> None:
    class Freeze(Callback):
        def on_epoch_end(self, trainer: Any) -> None:
            trainer.model.norm.eval()
            kept.append(trainer.model.norm.running_mean.clone())

    kept: list[torch.Tensor] = []
    model = WithNorm()
    run(trainer_class, model, rows(12), Freeze(), loss_fn=F.mse_loss, epochs=3, batch_size=4)
    assert torch.equal(kept[0], kept[2])


def test_modes_that_a_callback_sets_at_the_beginning_of_each_run_stay(trainer_class: Any) -> None:
    class Freeze(Callback):
        def on_train_start(self, trainer: Any) -> None:
            trainer.model.norm.eval()

    model = WithNorm()
    statistics = model.norm.running_mean.clone()
    trainer = run(trainer_class, model, rows(12), Freeze(), loss_fn=F.mse_loss, epochs=1, batch_size=4)
    model.train()
    trainer.train()
    assert torch.equal(model.norm.running_mean, statistics)
    assert not model.norm.training


def test_a_model_that_is_in_evaluation_mode_as_a_whole_is_trained(trainer_class: Any) -> None:
    def losses(prepare: Any) -> list[dict[str, float]]:
        model = WithNorm()
        prepare(model)
        trainer = run(trainer_class, model, rows(12), loss_fn=F.mse_loss, epochs=2, batch_size=4)
        assert all(modes(model).values())
        return trainer.metrics["train_metrics_history"]

    assert losses(lambda model: model.eval()) == losses(lambda model: None)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_part_that_from_pretrained_left_in_evaluation_mode_trains_unless_it_is_frozen(
    trainer_class: Any, frozen: bool
) -> None:
    class Composed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = bert().eval()  # as from_pretrained returns it
            self.encoder.requires_grad_(not frozen)
            self.head = nn.Linear(3, 3).double()

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = self.head(self.encoder(input_ids).logits)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    model = Composed()
    run(trainer_class, model, Tokens(8, "classes"), epochs=1, batch_size=4)
    assert model.encoder.training is (not frozen)
    assert model.training
    assert model.head.training


# --- mistakes that were raw errors, or late


def test_a_loss_that_is_cut_off_from_the_model_is_refused_with_the_remedy(trainer_class: Any) -> None:
    def detached(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs, labels).detach()

    with pytest.raises(ConfigError, match="The loss has no gradient"):
        run(trainer_class, t16(), rows(8), loss_fn=detached, epochs=1)


def test_data_in_another_precision_than_the_model_are_told_with_the_remedy(trainer_class: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        run(trainer_class, t16(dtype=torch.float32), rows(8), epochs=1)
    assert any("The batch has torch.float64, and the model torch.float32" in note for note in caught.value.__notes__)


def test_a_schedule_that_is_shorter_than_the_run_is_named(trainer_class: Any) -> None:
    def short(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)

    with pytest.raises(ValueError, match="Tried to step") as caught:
        run(trainer_class, t16(), rows(12), batch_size=2, epochs=1, lr_scheduler=short)
    assert any("OneCycleLR, at the end of step 3" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("event", ["on_step_end", "on_train_end"])
def test_training_inside_of_training_is_refused_and_outside_goes_on(trainer_class: Any, event: str) -> None:
    class Nests(Callback):
        pass

    def nest(self: Any, trainer: Any) -> None:
        if not tried:
            tried.append(1)
            trainer.train()

    tried: list[int] = []
    setattr(Nests, event, nest)
    trainer = trainer_class(
        t16(), rows(8), loss_fn=F.mse_loss, epochs=1, callbacks=[Nests()], **placed_on_cpu(trainer_class)
    )
    with pytest.raises(ConfigError, match="called inside of `train"):
        trainer.train()
    assert trainer.train()["stop_reason"] == "epochs"


def test_a_model_with_lazy_parameters_is_refused_with_the_remedy(trainer_class: Any) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    with pytest.raises(ConfigError, match=r"lazy parameters, '0\.weight'"):
        trainer_class(model, rows(8), loss_fn=F.mse_loss, **placed_on_cpu(trainer_class))


def test_evaluation_sets_that_are_not_named_by_text_are_refused_at_once(trainer_class: Any) -> None:
    with pytest.raises(ConfigError, match=r"names its sets by text.*got 1"):
        trainer_class(t16(), rows(8), {1: rows(4)}, loss_fn=F.mse_loss, **placed_on_cpu(trainer_class))


# --- labels under a name of their own


@pytest.mark.parametrize("algorithm", [lambda: LabelSmoothing(3, 0.2), lambda: MixUp(3)], ids=["smoothing", "mixup"])
def test_algorithms_change_the_labels_that_label_names_names(trainer_class: Any, algorithm: Any) -> None:
    x = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def data(name: str) -> list[dict[str, Any]]:
        return [{"x": row, name: index % 3} for index, row in enumerate(x)]

    def trained(name: str, **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Renamed(nn.Linear(4, 3).double())
        run(
            trainer_class, model, data(name), loss_fn=F.cross_entropy, batch_size=4, epochs=2,
            algorithms=[algorithm()], **options,
        )  # fmt: skip
        return weights(model)

    torch.set_default_dtype(torch.float64)
    try:
        assert same(trained("kind", label_names=["kind"]), trained("labels"))
        with pytest.raises(DataError, match=r"label_names=\['kind'\]"):
            trained("kind")
    finally:
        torch.set_default_dtype(torch.float32)


class Renamed(nn.Module):
    """A layer whose input is called x."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


# --- random numbers of the program


def drawn() -> list[float]:
    return [torch.rand(1).item(), float(np.random.rand()), random.random()]


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_the_generators_of_the_program_are_put_back_after_training(trainer_class: Any, fails: bool) -> None:
    class Draws(Callback):
        def on_step_end(self, trainer: Any) -> None:
            drawn()
            torch.manual_seed(5)
            if fails and trainer.progress.step == 2:
                raise RuntimeError("boom")

    def members() -> list[list[float]]:
        """What an ensemble draws whose members are made one after another, each trained before the next is made."""
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        found = []
        for _ in range(3):
            found.append(drawn())
            with contextlib.suppress(RuntimeError):
                if trains:
                    run(
                        trainer_class, t16(dropout=0.3), Noisy(8), Draws(), eval_dataset=rows(4), epochs=1, batch_size=4
                    )
                else:
                    t16()
        return found

    trains = False
    expected = members()
    trains = True
    assert members() == expected


# --- schedules in time


SCHEDULES: dict[str, dict[str, Any]] = {
    "by name": {"lr_scheduler": "cosine", "warmup_steps": 0.2, "lr_scheduler_kwargs": {"min_lr": 0.005}},
    "in time": {"lr_scheduler": MultiStepScheduler(["0.3dur", "6ba"], 0.5, warmup="30tok") * WSDScheduler("0.4dur")},
}


def by_tokens(trainer_class: Any, schedule: str, **options: Any) -> tuple[Any, list[float]]:
    """A run over so many tokens, and the rate of each of its steps."""
    trace = Trace()
    given: dict[str, Any] = {"max_duration": "200tok", "batch_size": 4, "optimizer": sgd, "learning_rate": 2e-5}
    trainer = trainer_class(
        Tagger(), Sentences(20), callbacks=[trace, *options.pop("callbacks", ())], progress_bar=False, log_steps=1,
        save_steps=options.get("save_dir") and 1, **placed_on_cpu(trainer_class), **SCHEDULES[schedule],
        **{**given, **options},
    )  # fmt: skip
    trainer.train(resume_from=options.get("save_dir") and "auto")
    return trainer, [row["learning_rate"] for row in trace.logs]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_spans_the_tokens_of_a_run_in_every_split_and_over_a_resume(
    trainer_class: Any, schedule: str, tmp_path: Path
) -> None:
    reference, expected = by_tokens(Trainer, schedule)
    straight, found = by_tokens(trainer_class, schedule)
    assert found == expected and len(set(expected)) > 4
    assert straight.optimizer.param_groups[0]["lr"] == pytest.approx(0.005 if schedule == "by name" else 0.0)
    assert same(weights(straight.get_model()), weights(reference.get_model()))
    parts, split = by_tokens(trainer_class, schedule, batch_size=1, gradient_accumulation_steps=4)
    assert split == expected and distance(weights(parts.get_model()), weights(straight.get_model())) <= 1e-10
    _, before = by_tokens(trainer_class, schedule, save_dir=tmp_path / "run", callbacks=[StopAt(3)])
    resumed, after = by_tokens(trainer_class, schedule, save_dir=tmp_path / "run")
    assert len(before) == 3 and before + after == expected
    assert same(weights(resumed.get_model()), weights(straight.get_model()))


class OfUnknownLength(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from zip(*rows(64, torch.float32).tensors, strict=True)


def test_a_schedule_on_samples_goes_on_in_a_skipped_step(trainer_class: Any) -> None:
    trace = Trace()
    run(
        trainer_class, Overflowing(at=(1, 4)), OfUnknownLength(), trace, loss_fn=F.mse_loss, batch_size=4,
        max_duration="40sp", lr_scheduler="linear", on_nonfinite="skip",
    )  # fmt: skip
    left = [0.05 * (10 - window) / 10 for window in range(10) if window not in (0, 3)]
    assert [row["learning_rate"] for row in trace.logs] == pytest.approx(left)


# --- the length of a run


@pytest.mark.parametrize(
    ("limits", "reason", "steps"),
    [({"max_steps": 20}, "max_steps", 20), ({"max_duration": "5ep"}, "max_duration", 15), ({}, "epochs", 9)],
    ids=lambda value: str(value),
)
def test_a_limit_that_is_given_lifts_the_default_of_three_epochs(
    trainer_class: Any, limits: dict[str, Any], reason: str, steps: int
) -> None:
    trainer = run(trainer_class, t16(), rows(12), batch_size=4, lr_scheduler="linear", **limits)
    assert trainer.total_steps == trainer.progress.step == steps
    assert trainer.metrics["stop_reason"] == reason
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0  # the schedule is of the same length


@pytest.mark.parametrize("evaluates_first", [True, False])
def test_rates_leave_out_what_is_spent_in_evaluations_and_saves_and_before_the_first_step(
    trainer_class: Any, evaluates_first: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    data_of = identity.data_of

    def slowly(*args: Any) -> Any:
        now[0] += 100
        return data_of(*args)

    monkeypatch.setattr(lifecycle.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(identity, "data_of", slowly)

    class Slow(Callback):
        def on_step_end(self, trainer: Any) -> None:
            now[0] += 1
            if trainer.progress.step == 4:
                trainer.evaluate()
                trainer.save_checkpoint()

        def on_eval_end(self, trainer: Any, metrics: Any) -> None:
            now[0] += 100

        def state_dict(self) -> dict[str, Any]:
            now[0] += 1000
            return {}

    def scored(y_true: Any, y_pred: Any) -> float:
        now[0] += 10
        return 1.0

    trace = Trace()
    run(
        trainer_class, t16(), rows(48), trace, Slow(), epochs=1, batch_size=4, log_steps=3, eval_dataset=rows(4),
        eval_steps=2, eval_on_start=evaluates_first, compute_metrics=scored, save_dir=tmp_path, save_steps=5,
    )  # fmt: skip
    assert [row["samples_per_second"] for row in trace.logs] == pytest.approx([4, 4, 4, 4])


# --- the best


SCORES = {"in the middle": [0.1, 0.1, 0.5, 0.9, 0.2, 0.3, 0.1, 0.2, 0.1], "at the start": [0.9, *[0.5] * 8]}


@pytest.mark.parametrize("where", SCORES)
def test_a_run_ends_with_its_best_weights_though_it_evaluates_more_often_than_it_saves(
    trainer_class: Any, where: str, tmp_path: Path
) -> None:
    seen: dict[int, list[torch.Tensor]] = {}
    found: list[int] = []
    store = Store(tmp_path / "run")

    class Looks(Callback):
        def on_eval_end(self, trainer: Any, metrics: Any) -> None:
            seen[trainer.progress.step] = weights(trainer.get_model())

        def on_step_start(self, trainer: Any) -> None:
            best = store.resolve("best") if store.kept() else None
            found.append(-1 if best is None else best[1]["step"])

    trainer = trainer_class(
        t16(), train_dataset=rows(32), eval_dataset=rows(4), loss_fn=F.mse_loss, batch_size=4, epochs=1, eval_steps=1,
        save_steps=4, save_dir=tmp_path / "run", progress_bar=False, callbacks=[Looks()], learning_rate=0.05,
        optimization_metric="accuracy", eval_on_start=where == "at the start",
        compute_metrics=lambda _: {"accuracy": SCORES[where][trainer.progress.step]}, **placed_on_cpu(trainer_class),
    )  # fmt: skip
    trainer.train()
    best = trainer.metrics["best_step"]
    assert best == (3 if where == "in the middle" else 0)
    assert found == ([-1, 1, 2, 3, 3, 3, 3, 3] if best else [0] * 8)  # there when it is found
    assert same(weights(trainer.get_model()), seen[best])
    assert [kept.step for kept in store.kept()] == [best, 4, 8]


def test_keep_best_of_0_saves_at_intervals_alone(trainer_class: Any, tmp_path: Path) -> None:
    run(
        trainer_class, t16(), rows(32), eval_dataset=rows(4), batch_size=4, epochs=1, eval_steps=1, save_steps=4,
        keep_best=0, save_dir=tmp_path / "run",
    )  # fmt: skip
    assert [kept.step for kept in Store(tmp_path / "run").kept()] == [4, 8]


# --- where files are


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nosuch://bucket/run", "knows no file system"),
        ("", "must be a path"),
        (3, "must be a path"),
        ("taken", "is a file"),
    ],
)
def test_a_save_dir_that_is_no_folder_of_this_machine_is_refused(
    trainer_class: Any, path: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").touch()
    with pytest.raises(ConfigError, match=f"`save_dir.*{words}"):
        trainer_class(t16(), train_dataset=rows(4), loss_fn=F.mse_loss, save_dir=path)
    assert [found.name for found in tmp_path.iterdir()] == ["taken"]


def test_a_run_stays_in_its_folder_when_the_program_goes_to_another(
    trainer_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaves(Callback):
        def on_step_end(self, trainer: Any) -> None:
            monkeypatch.chdir(tmp_path / "elsewhere")

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    trainer = run(trainer_class, t16(), rows(8), Leaves(), batch_size=4, epochs=1, save_steps=1, save_dir="run")
    assert trainer.save_dir == tmp_path / "run" and not list((tmp_path / "elsewhere").iterdir())
    assert [kept.step for kept in Store(tmp_path / "run").kept()] == [1, 2]
    assert trainer.save_model("~/model") == tmp_path / "model" and (tmp_path / "model" / "model.safetensors").exists()
    again = run(trainer_class, t16(), rows(8), batch_size=4, epochs=1, save_dir="~/again")
    assert again.save_dir == tmp_path / "again" and again.load_checkpoint("~/run/last").name == "checkpoint-2"
    for path, words in (("nosuch://bucket/run", "knows no file system|is an address"), ("", "must be a path")):
        with pytest.raises(ConfigError, match=words):
            again.load_checkpoint(path)
        with pytest.raises(ConfigError, match=words):
            again.save_model(path)


def test_a_folder_that_may_not_be_written_is_refused_before_the_first_step(
    trainer_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_class(
        t16(), train_dataset=rows(8), loss_fn=F.mse_loss, save_dir=tmp_path / "kept" / "run", progress_bar=False,
        **placed_on_cpu(trainer_class),
    )  # fmt: skip
    monkeypatch.setattr("os.access", lambda path, *_: not str(path).startswith(str(tmp_path)))  # root may do anything
    with pytest.raises(ConfigError, match=f"{tmp_path}.*Make it writable"):
        trainer.train()
    assert trainer.progress.step == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_of_the_loss_give_the_same_numbers_in_every_split(trainer_class: Any, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 3, (32,), generator=generator)
    labels[::5] = 7  # left out
    data = TensorDataset(torch.randn(32, 4, generator=generator, dtype=torch.float64), labels)

    def trained(batch: int, accumulation: int) -> tuple[list[torch.Tensor], list[float]]:
        torch.manual_seed(0)
        model, trace = nn.Linear(4, 3, dtype=torch.float64), Trace()
        weight = torch.tensor([1.0, 10.0, 0.1], dtype=torch.float64)
        loss = nn.CrossEntropyLoss(weight=weight, ignore_index=7, label_smoothing=smoothing)
        trainer = run(
            trainer_class, model, data, trace, loss_fn=loss, optimizer=sgd, batch_size=batch, epochs=2,
            gradient_accumulation_steps=accumulation, learning_rate=2e-5, eval_dataset=data, eval_batch_size=batch,
        )  # fmt: skip
        return weights(model), [*(row["loss"] for row in trace.logs), trainer.metrics["valid"][-1]["eval_loss"]]

    whole, losses = trained(16, 1)
    for split in ((2, 8), (1, 16)):
        found, seen = trained(*split)
        assert distance(found, whole) <= 1e-12
        np.testing.assert_allclose(seen, losses, rtol=0, atol=1e-12)


def test_batch_norm_is_said_to_depend_on_the_split_where_a_step_is_split(
    trainer_class: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    with caplog.at_level("INFO", logger="omnitrain"):
        run(trainer_class, model, rows(8), batch_size=4, max_steps=1)
        assert "BatchNorm" not in caplog.text
        run(trainer_class, model, rows(8), batch_size=4, max_steps=1, gradient_accumulation_steps=2)
    assert "a step of 2 of them does not give the numbers of one large batch" in caplog.text


# --- what a forward pass names


class Measured(Tagger):
    """Returns two losses and two metrics; one of these only where a sentence begins with an even token."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits, kept = self.out(self.embed(ids)), labels != -100
        hits = (logits.argmax(-1) == labels)[kept].double()
        losses = {"ce": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "z": logits[kept].square().mean()}
        metrics = {"accuracy": hits.mean(), "kept": kept.sum()}
        if ids[0, 0] % 2 == 0:
            metrics["even"] = logits[kept].mean()
        return {"loss": losses, "logits": logits, "metrics": metrics}


NAMED = ("loss_ce", "loss_z", "accuracy")
"""What is the mean over labels, so that no split changes it."""


@pytest.mark.parametrize("split", [(8, 1), (2, 4), (1, 8)], ids=str)
def test_losses_and_metrics_that_a_model_names_are_those_of_the_window_in_every_split(
    trainer_class: Any, split: tuple[int, int]
) -> None:
    trace, data, model, lr = Trace(), Sentences(32), Measured(), 0.05
    trainer = run(
        trainer_class, model, data, trace, optimizer=sgd, lr_scheduler=None, max_grad_norm=None, batch_size=split[0],
        gradient_accumulation_steps=split[1], epochs=2, log_steps=2, learning_rate=2e-5, eval_dataset=data,
        eval_batch_size=split[0], load_best_at_end=False, shuffle=False,
    )  # fmt: skip
    by_hand, optimizer = Measured(), None
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=lr)
    sums: list[dict[str, float]] = []
    for step in range(8):
        batch = {key: torch.stack([data[i][key] for i in range(step % 4 * 8, step % 4 * 8 + 8)]) for key in data[0]}
        output, count = by_hand(**batch), int((batch["labels"] != -100).sum())
        named = {"loss_ce": output["loss"]["ce"], "loss_z": output["loss"]["z"], **output["metrics"]}
        sums.append({"weight": count, **{name: named[name].item() * count for name in NAMED}})
        optimizer.zero_grad()
        sum(output["loss"].values()).backward()
        optimizer.step()

    def means(begin: int, end: int) -> list[float]:
        return [
            sum(one[name] for one in sums[begin:end]) / sum(one["weight"] for one in sums[begin:end]) for name in NAMED
        ]

    np.testing.assert_allclose(
        [[row[name] for name in NAMED] for row in trace.logs],
        [means(i, i + 2) for i in (0, 2, 4, 6)],
        rtol=0,
        atol=1e-12,
    )
    for row in trace.logs:
        assert row["loss"] == pytest.approx(row["loss_ce"] + row["loss_z"], abs=1e-12)
        assert list(row)[2:7] == ["loss", "loss_ce", "loss_z", "accuracy", "kept"]
    history = trainer.metrics["train_metrics_history"]
    np.testing.assert_allclose(
        [[row[f"train_{name}"] for name in NAMED] for row in history], [means(0, 4), means(4, 8)], rtol=0, atol=1e-12
    )
    assert distance(weights(model), weights(by_hand)) <= 1e-12
    whole = {key: torch.stack([data[i][key] for i in range(32)]) for key in data[0]}
    output = by_hand(**whole)
    expected = [output["loss"]["ce"].item(), output["loss"]["z"].item(), output["metrics"]["accuracy"].item()]
    np.testing.assert_allclose(
        [trainer.metrics["valid"][-1][f"eval_{name}"] for name in NAMED], expected, rtol=0, atol=1e-12
    )


def test_what_was_named_since_the_last_log_is_resumed_to_the_bit(trainer_class: Any, tmp_path: Path) -> None:
    def trained(folder: Path, *guests: Callback) -> tuple[Any, list[Any]]:
        trainer = run(
            trainer_class, Measured(), Sentences(20), Trace(), *guests, batch_size=2, epochs=2, log_steps=4,
            save_steps=3, save_dir=folder, optimizer=sgd, learning_rate=2e-5, train=False,
        )  # fmt: skip
        trainer.train(resume_from="auto")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return trainer, [{name: value for name, value in row.items() if "per_second" not in name} for row in rows]

    straight, expected = trained(tmp_path / "straight")
    trained(tmp_path / "parts", StopAt(6))
    trained(tmp_path / "parts", StopAt(13))
    trainer, found = trained(tmp_path / "parts")
    assert found == expected and {"loss_ce", "accuracy", "even"} <= expected[0].keys()
    assert trainer.metrics.to_dict() == straight.metrics.to_dict()
    assert same(weights(trainer.model), weights(straight.model))


class Tracked(Overflowing):
    """Names how many forward passes there were so far; those chosen overflow, or have a loss that is not finite."""

    def __init__(self, at: Any, makes_nan: bool) -> None:
        super().__init__(() if makes_nan else at)
        self.bad = at if makes_nan else ()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        loss = F.mse_loss(super().forward(x), labels)
        loss = loss + math.nan if self.count in self.bad and self.training else loss
        return {"loss": {"mse": loss}, "metrics": {"turn": self.count, f"of_{self.count}": torch.tensor(1.0)}}


@pytest.mark.parametrize("kind", ["overflow", "skip", "warn"])
def test_what_a_skipped_step_has_named_is_taken_back(trainer_class: Any, kind: str) -> None:
    data = [{"x": x, "labels": y} for x, y in rows(24, torch.float32)]
    trace = Trace()
    trainer = run(
        trainer_class, Tracked((3, 8), kind != "overflow"), data, trace, batch_size=2, gradient_accumulation_steps=2,
        epochs=1, log_steps=2, on_nonfinite="raise" if kind == "overflow" else kind, train=False,
    )  # fmt: skip
    if kind == "overflow":
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.train()
    (row,) = trainer.metrics["train_metrics_history"]
    counted = [one for one in range(1, 13) if one not in (3, 4, 7, 8)]
    assert row["train_turn"] == sum(counted) / 8
    assert [name for name in row if name.startswith("train_of_")] == [f"train_of_{one}" for one in counted]
    assert math.isfinite(row["train_loss"]) and row["train_loss_mse"] == pytest.approx(row["train_loss"], abs=1e-12)


@pytest.mark.parametrize(
    ("metrics", "error", "word"),
    [
        ({"grad_norm": 1.0}, ConfigError, "'grad_norm'.*Choose another name"),
        ({"hits": torch.ones(3)}, DataError, r"'hits' must be a scalar.*shape \(3,\)"),
        ({"ours": 1.0}, ConfigError, "'ours'.*_backend_logs.*Rename"),
    ],
    ids=["reserved", "vector", "of the backend"],
)
def test_a_metric_that_cannot_be_logged_is_refused_by_name(
    trainer_class: Any, metrics: Any, error: Any, word: str
) -> None:
    class Ours(trainer_class):
        def _backend_logs(self) -> dict[str, float]:
            return {**super()._backend_logs(), "ours": 1.0}

    model = t16()
    with pytest.raises(error, match=word):
        run(
            Ours,
            model,
            rows(8),
            loss_fn=None,
            unit=lambda b: StepOutput(F.mse_loss(model(b[0]), b[1]), metrics=metrics),
            batch_size=4,
        )


@pytest.mark.parametrize("one_dimension", [True, False], ids=["samples", "tokens"])
def test_a_loss_with_everything_takes_the_same_steps_in_every_split(trainer_class: Any, one_dimension: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    size = (32,) if one_dimension else (32, 3)
    labels = torch.randint(0, 3, size, generator=generator)
    labels[torch.rand(size, generator=generator) < 0.4] = 7
    data = TensorDataset(torch.randn(*size, 4, generator=generator, dtype=torch.float64), labels)

    def trained(batch: int, accumulation: int) -> tuple[list[torch.Tensor], list[list[float]]]:
        torch.manual_seed(0)
        model, trace = nn.Linear(4, 3, dtype=torch.float64), Trace()
        loss = CrossEntropy(torch.tensor([1.0, 10.0, 0.1], dtype=torch.float64), 7, 0.1, 0.05)
        trainer = run(
            trainer_class, model, data, trace, loss_fn=WeightedLosses({"first": loss}, {"first": 0.5}), optimizer=sgd,
            batch_size=batch, epochs=2, gradient_accumulation_steps=accumulation, learning_rate=2e-5,
            eval_dataset=data, eval_batch_size=batch,
        )  # fmt: skip
        logs = [[row[f"loss{name}"] for name in ("", "_first", "_first_ce", "_first_z")] for row in trace.logs]
        return weights(model), [*logs, [trainer.metrics["valid"][-1]["eval_loss_first_z"]] * 4]

    whole, expected = trained(16, 1)
    for total, first, ce, z in expected[:-1]:
        assert total == pytest.approx(0.5 * first, abs=1e-12) and first == pytest.approx(ce + z, abs=1e-12) and z
    for split in ((2, 8), (1, 16)):
        found, seen = trained(*split)
        assert distance(found, whole) <= 1e-12
        np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-12)


class Looking(Algorithm):
    """Names what it sees of batches and outputs, beside what others have named."""

    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        self.seen = batch[0].mean()
        return batch

    def transform_output(self, trainer: Any, output: StepOutput) -> StepOutput:
        named = {"inputs": self.seen, "outputs": output.outputs.mean()}
        return replace(output, metrics={**(output.metrics or {}), **named})


def test_an_algorithm_names_training_metrics_which_every_split_averages_alike(trainer_class: Any) -> None:
    data, found = rows(20), {}
    for batch in (8, 2, 1):
        trace = Trace()
        run(
            trainer_class, t16(), data, trace, algorithms=[Looking()], batch_size=batch, epochs=1,
            gradient_accumulation_steps=8 // batch,
        )  # fmt: skip
        found[batch] = [[row["inputs"], row["outputs"]] for row in trace.logs]
        np.testing.assert_allclose(found[batch], found[8], rtol=0, atol=1e-12)
    expected = [data.tensors[0][indices].mean() for indices in EpochSampler(20, 8).batches(0)]
    np.testing.assert_allclose([one for one, _ in found[8]], expected, rtol=0, atol=1e-12)


# --- a batch size that grows


@pytest.mark.parametrize("batch_size", [4, 2, 1])
def test_a_batch_that_grows_takes_the_steps_of_a_loop_by_hand_and_resumes_in_each_stage(
    trainer_class: Any, tmp_path: Path, batch_size: int
) -> None:
    """50 rows in steps of 4 up to the half of the first epoch, of 8 up to its end, and then of 16."""
    (x, y), model = rows(50).tensors, t16()
    optimizer, sizes = torch.optim.SGD(model.parameters(), lr=0.05), []
    for epoch in range(2):
        order, at = EpochSampler(50, 1).order(epoch), 0
        while at < 50:
            size = 16 if epoch else 8 if at >= 25 else 4
            indices = order[at : at + size]
            at += len(indices)
            sizes.append(len(indices))
            optimizer.zero_grad()
            F.mse_loss(model(x[indices]), y[indices]).backward()
            optimizer.step()

    def trained(*guests: Callback, **options: Any) -> tuple[Any, list[torch.Tensor]]:
        found, resume = t16(), options.pop("resume_from", None)
        trainer = run(
            trainer_class, found, rows(50), *guests, optimizer="torch.optim.SGD", batch_size=batch_size, epochs=2,
            max_grad_norm=None, global_batch_size={0: 4, "0.5ep": 8, Duration(1, "ep"): 16}, train=False, **options,
        )  # fmt: skip
        trainer.train(resume_from=resume)
        return trainer, weights(found)

    trainer, found = trained()
    assert trainer.progress.step == len(sizes) and distance(found, weights(model)) <= 1e-12
    for stop in (3, 8, 12) if batch_size == 2 else (8,):
        trained(StopAt(stop), save_dir=tmp_path / str(stop), save_steps=1)
        resumed, last = trained(save_dir=tmp_path / str(stop), resume_from="auto")
        assert resumed.progress.step == len(sizes) and same(last, found)


# --- optimizers that take loss and gradients several times in a step


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=5, line_search_fn="strong_wolfe")


def test_lbfgs_takes_the_steps_of_a_loop_by_hand_in_every_split_and_after_a_resume(
    trainer_class: Any, tmp_path: Path
) -> None:
    (x, y), model, losses = rows(24).tensors, t16(), []
    optimizer = lbfgs(model.parameters())
    for epoch in range(2):
        for indices in EpochSampler(24, 8).batches(epoch):

            def closure(indices: Any = indices) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x[indices]), y[indices])
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())

    def trained(batch_size: int, *guests: Callback, **options: Any) -> tuple[list[torch.Tensor], list[float]]:
        found, trace, resume = t16(), Trace(), options.pop("resume_from", None)
        trainer = run(
            trainer_class, found, rows(24), trace, *guests, optimizer=lbfgs, max_grad_norm=None, epochs=2, train=False,
            batch_size=batch_size, gradient_accumulation_steps=8 // batch_size, learning_rate=2e-5, **options,
        )  # fmt: skip
        trainer.train(resume_from=resume)
        return weights(found), [row["loss"] for row in trace.logs]

    for batch_size in (8, 2, 1):
        found, seen = trained(batch_size)
        assert distance(found, weights(model)) <= (0 if batch_size == 8 else 1e-10)
        np.testing.assert_allclose(seen, losses, rtol=0, atol=1e-10)
    trained(1, StopAt(4), save_dir=tmp_path)  # which is in the middle of an epoch
    resumed, rest = trained(1, save_dir=tmp_path, resume_from="auto")
    assert same(resumed, found) and rest == seen[4:]


# --- algorithms


class Case(NamedTuple):
    """An algorithm, what it is tried on, and whether a step's numbers are the same in every split of it."""

    make: Callable[[], Any]
    data: str = "rows"
    is_split: bool = True
    options: Any = MappingProxyType({})


def images(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn(size, 1, 8, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(pixels, (pixels.mean(dim=(1, 2, 3)) > 0).double()[:, None])


class Drifting(Callback):
    """Holds tensors, which every step changes, and sees them as they are once a checkpoint is back."""

    def __init__(self) -> None:
        self.drift = {"sum": torch.zeros(2, dtype=torch.bfloat16), "steps": [torch.zeros((), dtype=torch.int64)]}
        self.seen: list[Any] = []

    def on_step_end(self, trainer: Any) -> None:
        self.drift["sum"] += trainer.progress.step
        self.drift["steps"][0] += 1

    def on_checkpoint_loaded(self, trainer: Any) -> None:
        self.seen.append((trainer.progress.step, self.drift["sum"].tolist()))

    def state_dict(self) -> dict[str, Any]:
        return self.drift

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drift = state


def test_tensors_in_the_state_of_a_callback_are_back_before_it_hears_of_the_checkpoint(
    trainer_class: Any, tmp_path: Path
) -> None:
    run(trainer_class, t16(), rows(12), Drifting(), max_steps=3, batch_size=4, save_dir=tmp_path)
    drifting = Drifting()
    trainer = run(
        trainer_class, t16(), rows(12), drifting, max_steps=5, batch_size=4, save_dir=tmp_path, train=False
    )  # fmt: skip
    trainer.train(resume_from="last")
    assert drifting.seen == [(3, [6.0, 6.0])]
    assert drifting.drift["sum"].dtype is torch.bfloat16 and drifting.drift["sum"].tolist() == [15.0, 15.0]
    assert drifting.drift["steps"][0].item() == 5


class Shrinking(Algorithm):
    """Keeps nothing of what it was made with under the argument's name."""

    def __init__(self, rates: list[float], shape: str = "line") -> None:
        self._left = rates
        self._shape = shape

    def transform_loss(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * (self._left.pop() if self._left else 1.0)


class Quiet(Callback):
    def __init__(self, level: int) -> None:
        self._level = level


def test_another_option_of_an_algorithm_is_refused_on_a_resume_and_that_of_a_callback_told(
    trainer_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def made(decay: float, rate: float, level: int, steps: int = 4) -> Any:
        algorithms = [EMA(decay), Shrinking([0.9, rate])]
        return run(
            trainer_class, t16(), rows(12), Quiet(level), algorithms=algorithms, max_steps=steps, batch_size=4,
            save_dir=tmp_path, train=False,
        )  # fmt: skip

    made(0.9, 0.5, 1, steps=2).train()
    with caplog.at_level("INFO", "omnitrain"):
        made(0.9, 0.5, 2, steps=3).train(resume_from="auto")  # though the list was emptied
    assert (
        "Callbacks have other options than in the checkpoint: {'Quiet.level': 1} -> {'Quiet.level': 2}." in caplog.text
    )
    words = (
        r"algorithm_options: \{'EMA\.decay': 0\.9, 'Shrinking\.rates': \[0\.9, 0\.5\]\} -> "
        r"\{'EMA\.decay': 0\.5, 'Shrinking\.rates': \[0\.9, 0\.1\]\}\."
    )
    with pytest.raises(CheckpointError, match=words):
        made(0.5, 0.1, 2).train(resume_from="auto")
    other = made(0.5, 0.1, 2)
    other.train(resume_from="auto", allow_change={"algorithm_options"})
    assert other.progress.step == 4 and other.algorithms[0].count == 4  # the average went on


@pytest.mark.parametrize("saves", [False, True])
def test_a_run_that_goes_on_in_the_process_is_the_longer_run(trainer_class: Any, saves: bool, tmp_path: Path) -> None:
    def made(length: dict[str, Any], folder: str, *guests: Callback) -> Any:
        options = {"save_dir": tmp_path / folder} if saves else {}
        return run(
            trainer_class, t16(dropout=0.3), rows(12), *guests, eval_dataset=rows(9), batch_size=2, eval_steps=3,
            gradient_accumulation_steps=2, algorithms=[EMA(0.6)], train=False, **length, **options,
        )  # fmt: skip

    traces = Trace(), Trace()
    parts, whole = made({"max_steps": 4}, "parts", traces[0]), made({"epochs": 3}, "whole", traces[1])
    parts.train()
    before = torch.get_rng_state()
    found, expected = parts.train(more="5ba"), whole.train()
    assert torch.equal(torch.get_rng_state(), before)
    assert same(weights(parts.get_model()), weights(whole.get_model()))
    for one, other in zip(parts.optimizer.state.values(), whole.optimizer.state.values(), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    for table in ("train_metrics_history", "valid", "best_valid"):
        assert found[table] == expected[table]
    assert [row["loss"] for row in traces[0].logs] == [row["loss"] for row in traces[1].logs]


def convolution() -> nn.Module:
    torch.manual_seed(0)
    parts = nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 1)
    return nn.Sequential(*parts).double()


KINDS_OF_DATA: dict[str, Any] = {
    "rows": (lambda: deep(), rows, {"loss_fn": F.mse_loss}),
    "images": (convolution, images, {"loss_fn": F.mse_loss}),
    "tokens": (Tagger, Sentences, {}),
}
ALGORITHMS = {
    "ema": Case(lambda: EMA(0.8)),
    "swa": Case(lambda: SWA("0.3dur")),
    "swa by updates": Case(lambda: SWA(2, every=1)),
    "freezing": Case(lambda: LayerFreezing(0.0)),
    "unfreezing": Case(lambda: GradualUnfreezing(0.5)),
    "value": Case(lambda: GradientClipping("value", 0.01)),
    "agc": Case(lambda: GradientClipping("adaptive", 0.05, ["^4"])),
    "mixup": Case(lambda: MixUp(alpha=1.0)),
    "cutmix": Case(CutMix, "images"),
    "smoothing": Case(lambda: LabelSmoothing(5, 0.2), "tokens"),
    "lengths": Case(lambda: SeqLengthWarmup(6, 2, 0.9, 1), "tokens"),
    "sizes": Case(lambda: ProgressiveResizing(0.5, 0.0, 0.2, 1), "images"),
    "sam": Case(lambda: SAM(0.5)),
    "depth": Case(lambda: StochasticDepth(["[13]"], 0.5)),
    "rounding": Case(lambda: StraightThrough(rounded)),
    "pruning": Case(lambda: MagnitudePruning(0.7, end="0.9dur", every=2)),
    "pruning of all": Case(lambda: MagnitudePruning(0.7, 2, 5, 1, 0.2, ["^2", r"0\."], "global")),
}
TRAINED = [(kind, name) for kind in TRAINERS for name in ALGORITHMS]
SOME_TRAINED = [(kind, name) for kind, name in TRAINED if kind == "native" or (kind, name) == ("hf", "ema")]


def rounded(weight: torch.Tensor) -> torch.Tensor:
    return (weight * 8).round() / 8


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def with_algorithm(kind: str, name: str, *, plain: bool = False, cut: int = 0, **options: Any) -> tuple[Any, Trace]:
    """Train for 2 epochs of 3 steps of 8 samples, evaluated every 2 steps; stop after step `cut`."""
    case, trace, resume = ALGORITHMS[name], Trace(), options.pop("resume_from", None)
    options = {
        "batch_size": 4, "gradient_accumulation_steps": 2, "epochs": 2, "eval_steps": 2, "log_steps": 1,
        "learning_rate": 0.05, "progress_bar": False, "load_best_at_end": False, "optimizer": "sgd",
        "max_grad_norm": None, **placed_on_cpu(TRAINERS[kind]), **case.options, **options,
    }  # fmt: skip
    model, data, own = KINDS_OF_DATA[case.data]
    trainer = TRAINERS[kind](
        model(), train_dataset=data(24), eval_dataset=data(9), algorithms=[] if plain else [case.make()],
        callbacks=[trace, StopAt(cut)], **own, **options,
    )  # fmt: skip
    trainer.train(resume_from=resume)
    return trainer, trace


@functools.cache
def straight(kind: str, name: str) -> tuple[list[torch.Tensor], list[float]]:
    """Return the numbers of the whole run, and the losses of its steps."""
    trainer, trace = with_algorithm(kind, name)
    assert trainer.progress.step == 6
    return numbers(trainer), [row["loss"] for row in trace.logs]


@functools.cache
def without(kind: str, data: str) -> list[torch.Tensor]:
    """Return the numbers of the run without any algorithm."""
    return numbers(with_algorithm(kind, next(one for one in ALGORITHMS if ALGORITHMS[one].data == data), plain=True)[0])


def numbers(trainer: Any) -> list[torch.Tensor]:
    """The weights that a run ends with, and its evaluations."""
    valid = [row["eval_loss"] for row in trainer.metrics["valid"]]
    return [*weights(trainer.get_model()), torch.tensor(valid, dtype=torch.float64)]


@pytest.mark.parametrize(("kind", "name"), thinned(TRAINED, SOME_TRAINED))
def test_an_algorithm_changes_a_run_and_is_resumed_bit_for_bit(kind: str, name: str, tmp_path: Path) -> None:
    expected, losses = straight(kind, name)
    with_algorithm(kind, name, cut=4, save_dir=tmp_path)
    resumed, rest = with_algorithm(kind, name, save_dir=tmp_path, resume_from="auto")
    assert resumed.progress.step == 6 and len(rest.logs) == 2
    assert same(expected, numbers(resumed))
    assert [row["loss"] for row in rest.logs] == losses[4:]
    assert not same(expected, without(kind, ALGORITHMS[name].data))


@pytest.mark.parametrize(("kind", "name"), thinned(TRAINED, SOME_TRAINED))
def test_an_algorithm_gives_the_same_numbers_in_every_split_where_it_says_so(kind: str, name: str) -> None:
    for batch in (8, 2):
        other, _ = with_algorithm(kind, name, batch_size=batch, gradient_accumulation_steps=8 // batch)
        apart = distance(straight(kind, name)[0], numbers(other))
        assert apart <= 1e-12 if ALGORITHMS[name].is_split else apart > 1e-6
