"""The crown: one table of promises over all trainers. A feature is in when its row is."""

import contextlib
import copy
import functools
import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import eighths
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from counting import COLLATORS, SIZE, SOURCES, Resumable, Streamed, made
from marks import TRAINERS
from recipes import (
    Blank,
    Everything,
    Holding,
    Noisy,
    Overflowing,
    Pages,
    Sentences,
    Starving,
    StopAt,
    Tagger,
    Trace,
    callback,
    distance,
    draw,
    rows,
    same,
    states,
    t16,
    weights,
)
from tiny import Short, Tokens, bert, gpt, t5
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from transformers import DataCollatorWithFlattening

from omnitrain import (
    EMA,
    SAM,
    SWA,
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
from omnitrain.checkpoint.store import Store
from omnitrain.checkpoint.tensor_files import load_tensors
from omnitrain.compute.precision import Precision
from omnitrain.data.sampling import EpochSampler
from omnitrain.trainer import lifecycle


def quick_on(*kinds: str) -> Any:
    """Run a test on all trainers, on all but these only in `make test-all`."""
    return pytest.mark.parametrize(
        "trainer_class",
        [pytest.param(TRAINERS[kind], id=kind, marks=[] if kind in kinds else pytest.mark.slow) for kind in TRAINERS],
    )


def table(
    names: str,
    cases: Mapping[str, Any] | list[Any],
    boundary: Collection[str],
    processes: Collection[str] = (),
    native: Collection[str] | None = None,
    accelerate: Collection[str] | None = None,
    rest: Collection[str] = ("native", "in turn"),
) -> Any:
    """Parametrize a test over all trainers: all cases on `Trainer`, those at the boundary on the other two.

    The rest is slow, on one of the other two in turn. The ids of a list are its entries, as text; `processes` has those
    that start processes, `native` and `accelerate` those that are quick there if not all, or those at the boundary.
    """
    if not isinstance(cases, Mapping):
        cases = {"-".join(map(str, case)) if isinstance(case, tuple) else str(case): case for case in cases}
    quick = {
        "native": set(cases if native is None else native),
        "accelerate": set(boundary if accelerate is None else accelerate),
        "hf": set(boundary),
    }
    assert {*processes}.union(*quick.values()) <= cases.keys(), sorted(cases)
    parameters = []
    for kind, trainer_class in TRAINERS.items():
        for number, (case, values) in enumerate(cases.items()):
            turn = "native" if kind == "native" else "in turn" if kind == ("hf", "accelerate")[number % 2] else "never"
            if turn not in rest and case not in quick[kind]:
                continue
            marks = [] if case in quick[kind] else [pytest.mark.slow]
            marks += [pytest.mark.processes] if case in processes else []
            values = values if "," in names else (values,)
            parameters.append(pytest.param(trainer_class, *values, id=f"{kind}-{case}", marks=marks))
    return pytest.mark.parametrize(f"trainer_class,{names}", parameters)


PLAIN = (nn.Linear, nn.Sequential, Overflowing, Starving)
"""Models that return outputs, and no loss."""


def run(trainer_class: Any, model: nn.Module, data: Any = None, *callbacks: Callback, **options: Any) -> Any:
    """Train a model (the loss of a plain one is the squared error); with `train=False`, return the trainer only."""
    place = {"device": "cpu"} if trainer_class is Trainer else {}  # accelerate reads its environment
    loss = {"loss_fn": F.mse_loss} if isinstance(model, PLAIN) and "unit" not in options else {}
    rate = {} if "optimizer" in options else {"learning_rate": 0.05}
    options = {"progress_bar": False, "log_steps": 1, **rate, **loss, **place, **options}
    train, resume_from = options.pop("train", True), options.pop("resume_from", None)
    if data is not None:
        options["train_dataset"] = data
    trainer = trainer_class(model, callbacks=callbacks, **options)
    if train:
        trainer.train(resume_from=resume_from)
    return trainer


def with_norm() -> Any:
    torch.manual_seed(0)
    parts = {"first": nn.Linear(4, 8), "norm": nn.BatchNorm1d(8), "dropout": nn.Dropout(0.3), "last": nn.Linear(8, 1)}
    return nn.Sequential(OrderedDict(parts)).double()


def by_hand(
    model: nn.Module,
    data: Any,
    windows: Iterable[Any],
    make_optimizer: Callable[..., torch.optim.Optimizer],
    schedule: Callable[[Any], Any] | None = None,
    clip: float = math.inf,
) -> dict[str, list[float]]:
    """What a careful user would write: one batch for each window of indices, clipped, and one step of the schedule."""
    optimizer = make_optimizer(model.parameters())
    scheduler = schedule(optimizer) if schedule else None
    history: dict[str, list[float]] = {"loss": [], "grad_norm": [], "learning_rate": []}
    for indices in windows:
        samples = [data[int(index)] for index in indices]
        norms: list[torch.Tensor] = []

        def closure(samples: Any = samples, norms: Any = norms) -> torch.Tensor:
            optimizer.zero_grad()
            if isinstance(samples[0], dict):
                loss = model(**{key: torch.stack([sample[key] for sample in samples]) for key in samples[0]})["loss"]
            else:
                x, y = (torch.stack(column) for column in zip(*samples, strict=True))
                loss = F.mse_loss(model(x), y)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
            return loss

        history["learning_rate"].append(optimizer.param_groups[0]["lr"])
        history["loss"].append(optimizer.step(closure).item())
        history["grad_norm"].append(norms[0].item())
        if scheduler is not None:
            scheduler.step()
    return history


def windows_of(size: int, window: int, epochs: int = 2) -> list[Any]:
    """Return the indices of the samples of each step, in the order of the sampler."""
    return [indices for epoch in range(epochs) for indices in EpochSampler(size, window).batches(epoch)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


# --- events


BATCH = ["batch_start", "after_forward", "after_loss", "after_backward", "batch_end"]
CLIPPED = ["before_clip", "after_clip", "before_optimizer_step"]
UPDATED = ["after_optimizer_step", "before_zero_grad", "after_zero_grad", "step_end"]


def test_events_come_in_the_documented_order(trainer_class: Any, tmp_path: Path) -> None:
    """Those of all kinds, and listening to them changes no bit."""
    everything, models = Everything(), [t16(), t16()]
    for model, callbacks in zip(models, ([everything], []), strict=True):
        trainer = run(
            trainer_class, model, rows(12), *callbacks, eval_dataset=rows(4), epochs=1, batch_size=2, save_steps=2,
            gradient_accumulation_steps=4, log_steps=2, eval_steps=2, save_dir=tmp_path / str(len(callbacks)),
            load_best_at_end=False, max_grad_norm=0.1, eval_on_start=True,
        )  # fmt: skip
        trainer.predict(rows(4))
    first, short = (["data_fetched", "step_start", *BATCH * turns, *CLIPPED, *UPDATED] for turns in (4, 2))
    evaluated = ["eval_batch_start", "eval_batch_end"] * 2
    answers = ["eval_start", *evaluated, "eval_end", "save_start", "save_end"]
    expected = ["train_start", *answers, "epoch_start", *first, *short, "log", *answers, "epoch_end"]
    assert everything.events[: len(expected)] == expected
    rest = everything.events[len(expected) :]
    assert rest[rest.index("train_end") :] == ["train_end", "predict_start", *evaluated, "predict_end"]
    assert everything.numbers == [0, 1, 2, 3, 0, 1] and min(everything.norms) > 0.1
    assert same(weights(models[0]), weights(models[1]))


@table("case", ["second pass", "closure", "out of memory", "nothing to predict", "skipped"], ["second pass", "skipped"])
def test_events_repeat_with_their_micro_batches(trainer_class: Any, case: str) -> None:
    everything, model, data = Everything(), t16(), rows(4)
    options: dict[str, Any] = {"batch_size": 2, "gradient_accumulation_steps": 2}
    step = ["data_fetched", "step_start", *BATCH * 2]
    if case == "second pass":
        options["algorithms"] = [SAM()]
        step += [*BATCH * 2, *CLIPPED, *UPDATED]
    elif case == "closure":
        options |= {"optimizer": partial(torch.optim.LBFGS, max_iter=2), "max_grad_norm": None}
        step += [*CLIPPED, *BATCH * 2, *UPDATED]  # which takes the first losses as they are
    elif case == "out of memory":
        model, options = Starving(2, "backward", start=0), {"batch_size": 4, "microbatch_size": "auto"}
        step = ["data_fetched", "step_start", *BATCH[:3], *BATCH * 2, *CLIPPED, *UPDATED]
    elif case == "skipped":
        model, data, options["on_nonfinite"] = Overflowing(range(9)), rows(4, torch.float32), "skip"
        step += [*CLIPPED, *UPDATED[1:]]
    else:
        model, data = Tagger(), Blank(4, range(4))
        step = ["data_fetched", "step_start", "before_zero_grad", "after_zero_grad", "step_end"]
    with contextlib.suppress(DataError):
        run(trainer_class, model, data, everything, max_steps=1, epochs=1, **options)
    begin = everything.events.index("data_fetched")
    assert everything.events[begin : everything.events.index("step_end") + 1] == step


def test_events_reach_parts_before_callbacks(trainer_class: Any, tmp_path: Path) -> None:
    """A model, an optimizer or a schedule that is a hook is called before the callbacks."""
    calls: list[Any] = []

    def append(name: str) -> Callable[..., None]:
        return lambda *_: calls.append(name)

    class Model(nn.Linear, TrainHook):
        on_epoch_start = append("model")

        def on_save_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["step"] = trainer.progress.step

        def on_load_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
            calls.append(checkpoint)

    optimizer = type("Optimizer", (torch.optim.SGD, Callback), {"on_epoch_start": append("optimizer")})
    schedule = type("Schedule", (torch.optim.lr_scheduler.StepLR, TrainHook), {"on_epoch_start": append("schedule")})
    last = callback(on_epoch_start=append("callback"))
    for epochs in (1, 2):
        run(
            trainer_class, Model(4, 1).double(), rows(4), last, epochs=epochs, resume_from="auto", batch_size=4,
            optimizer=optimizer, lr_scheduler=partial(schedule, step_size=1), save_dir=tmp_path,
        )  # fmt: skip
    order = ["model", "optimizer", "schedule", "callback"]
    assert calls == [*order, {"step": 1}, *order]


def test_events_of_a_failure_end_the_run(trainer_class: Any) -> None:
    trace = Trace()
    with pytest.raises(ZeroDivisionError) as caught:
        run(trainer_class, t16(), rows(8), trace, callback(on_step_end=lambda trainer: 1 / 0), epochs=1)
    assert trace.events[-2:] == ["exception", "train_end"]
    assert any("Functions.on_step_end" in note for note in caught.value.__notes__)


# --- numbers


SPLITS = [("rows", 12, 1), ("rows", 6, 2), ("rows", 5, 2), ("rows", 1, 12)]
SPLITS += [("tokens", 8, 1), ("tokens", 3, 3), ("tokens", 1, 8)]


@table("kind, batch, accumulation", SPLITS, ["rows-5-2", "tokens-3-3"], accelerate=["rows-5-2"])
def test_numbers_equal_a_handwritten_full_batch_loop(
    trainer_class: Any, kind: str, batch: int, accumulation: int
) -> None:
    # 31 samples: the last window is short, and with batches of 5 its last micro-batch is short too
    (model, reference), trace = ((t16(), t16()) if kind == "rows" else (Tagger(), Tagger())), Trace()
    data: Any = rows(31) if kind == "rows" else Sentences(31)
    run(
        trainer_class, model, data, trace, lr_scheduler=cosine, max_grad_norm=0.5, batch_size=batch,
        gradient_accumulation_steps=accumulation, epochs=2, optimizer=sgd,
    )  # fmt: skip
    expected = by_hand(reference, data, windows_of(31, batch * accumulation), sgd, cosine, 0.5)
    assert distance(weights(model), weights(reference)) <= 1e-12
    for key in ("loss", "grad_norm", "learning_rate"):
        np.testing.assert_allclose([row[key] for row in trace.logs], expected[key], rtol=0, atol=1e-12)


@table("batch, size", [(8, 1), (4, 2), (8, 3)], ["8-3"])
def test_numbers_of_a_split_batch_are_those_of_the_whole(trainer_class: Any, batch: int, size: int) -> None:
    model, reference, trace, other = Tagger(), Tagger(), Trace(), Trace()
    options = {"epochs": 2, "grad_reduction": "per-token-mean", "gradient_accumulation_steps": 8 // batch}
    run(trainer_class, model, Sentences(13), trace, batch_size=batch, microbatch_size=size, **options)
    run(trainer_class, reference, Sentences(13), other, batch_size=batch, **options)
    assert distance(weights(model), weights(reference)) <= 1e-12
    assert trace.events == other.events
    for key in ("loss", "grad_norm", "learning_rate", "epoch"):
        assert [row[key] for row in trace.logs] == pytest.approx([row[key] for row in other.logs], rel=1e-12)


@table("where", ["forward", "backward"], ["backward"], accelerate=[])
def test_numbers_survive_running_out_of_memory(trainer_class: Any, where: str, tmp_path: Path) -> None:
    """A run whose memory runs out has the numbers of one with small micro-batches, and is resumed with them."""

    def train(folder: str, *callbacks: Callback, room: int = 3, **options: Any) -> Any:
        return run(
            trainer_class, Starving(room, where, start=2), rows(20), *callbacks, batch_size=8, microbatch_size="auto",
            epochs=2, save_dir=tmp_path / folder, save_steps=100, **options,
        )  # fmt: skip

    straight = train("straight")
    train("cut", StopAt(5))
    resumed = train("cut", room=1000, resume_from="auto")
    assert max(resumed.get_model().sizes) == 2
    assert same(*(trainer.get_model().state_dict().values() for trainer in (straight, resumed)))
    assert straight.metrics["train_metrics_history"] == resumed.metrics["train_metrics_history"]


def test_evaluation_and_logging_leave_weights_unchanged(trainer_class: Any) -> None:
    watched = {"eval_dataset": Noisy(7), "eval_steps": 1, "eval_on_start": True, "load_best_at_end": False}
    models = [t16(dropout=0.3), t16(dropout=0.3)]
    for model, options in zip(models, ({"log_steps": 1000}, watched), strict=True):
        run(trainer_class, model, Noisy(16), batch_size=4, epochs=1, **options)
    assert same(*map(weights, models))


# --- stopping


LIMITS: dict[str, tuple[dict[str, Any], int, str]] = {
    "default": ({}, 15, "epochs"), "epochs": ({"epochs": 2}, 10, "epochs"),
    "7 steps": ({"max_steps": 7}, 7, "max_steps"), "6ba": ({"epochs": 9, "max_duration": "6ba"}, 6, "max_duration"),
    "30sp": ({"epochs": 9, "max_duration": "30sp"}, 8, "max_duration"),
    "0.5ep": ({"max_duration": "0.5ep"}, 3, "max_duration"), "both": ({"epochs": 2, "max_steps": 10}, 10, "max_steps"),
}  # fmt: skip


@table("options, step, reason", LIMITS, ["default", "0.5ep", "both"])
def test_train_ends_at_the_first_limit(trainer_class: Any, options: Any, step: int, reason: str) -> None:
    """One limit alone replaces the default of three epochs; the schedule ends with the run."""
    trainer = run(trainer_class, t16(), rows(20), batch_size=4, lr_scheduler="linear", **options)
    assert trainer.total_steps == trainer.progress.step == step
    assert trainer.metrics["stop_reason"] == reason
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0


def test_patience_counts_evaluations_without_a_gain(trainer_class: Any) -> None:
    scores = iter([0.5, 0.6, 0.6, 0.55, 0.61, 0.6, 0.6, 0.6])
    trainer = run(
        trainer_class, t16(), rows(8), eval_dataset=rows(4), epochs=10, batch_size=8, patience=3, sanity=False,
        compute_metrics=lambda _: {"accuracy": next(scores)}, optimization_metric="accuracy",
    )  # fmt: skip
    assert (trainer.progress.epoch, trainer.metrics["best_step"]) == (8, 5)
    assert trainer.metrics["stop_reason"] == "early_stopping"


def test_stop_inside_an_epoch_neither_counts_nor_evaluates(trainer_class: Any) -> None:
    trace = Trace()
    trainer = run(trainer_class, t16(), rows(20), StopAt(3), trace, eval_dataset=rows(4), batch_size=4, epochs=2)
    assert trainer.progress.epoch == 0 and trainer.progress.samples_in_epoch == 12
    assert trainer.metrics["stop_reason"] == "requested"
    assert "eval_start" not in trace.events
    assert trace.events[-3:] == ["log", "epoch_end", "train_end"]  # EPOCH_END always pairs EPOCH_START


# --- metrics


def test_metrics_have_a_row_per_epoch_and_evaluation(trainer_class: Any) -> None:
    options = {"eval_dataset": rows(7), "eval_batch_size": 3, "batch_size": 4, "load_best_at_end": False}
    steps = run(trainer_class, t16(), rows(20), epochs=9, max_steps=7, eval_steps=3, **options).metrics["valid"]
    assert [row["step"] for row in steps] == [3, 6, 7]  # the last one once
    trainer = run(trainer_class, t16(), rows(20), epochs=2, **options)
    metrics = trainer.metrics
    assert [(row["epoch"], row["step"]) for row in metrics["train_metrics_history"]] == [(1, 5), (2, 10)]
    assert set(metrics["train_metrics_history"][0]) == {"epoch", "step", "train_loss", "learning_rate", "grad_norm"}
    assert [(row["epoch"], row["step"]) for row in metrics["valid"]] == [(1, 5), (2, 10)]
    x, y = rows(7).tensors
    expected = F.mse_loss(trainer.get_model()(x), y).item()  # exact, though the last batch is short
    assert metrics["valid"][-1]["eval_loss"] == pytest.approx(expected, abs=1e-14)
    assert trainer.evaluate()["eval_loss"] == metrics["valid"][-1]["eval_loss"]


def test_predict_returns_a_row_per_sample_in_order(trainer_class: Any) -> None:
    trainer = run(trainer_class, t16(), rows(8), epochs=1, batch_size=4, eval_batch_size=3)
    for size in (1, 5):
        (x, y), result = rows(size).tensors, trainer.predict(rows(size))
        np.testing.assert_allclose(result.predictions, trainer.get_model()(x).detach(), atol=1e-12)
        np.testing.assert_array_equal(result.labels, y)


# --- setups: what each of these trains, it trains alike on all trainers, in every split and when it is resumed


Setup = Callable[[], tuple[nn.Module, dict[str, Any]]]
"""Makes a model and the arguments of its trainer."""


def setup(make_model: Any, make_data: Any, make_algorithm: Any = None, **options: Any) -> Setup:
    """Return a setup of 22 samples for training, so that the last step of an epoch is short, and 9 for evaluation."""

    def make() -> tuple[nn.Module, dict[str, Any]]:
        data = {"train_dataset": make_data(SIZE), "eval_dataset": make_data(9), "eval_steps": 2}
        algorithms = [] if make_algorithm is None else [make_algorithm()]
        return make_model(), {**data, "load_best_at_end": False, "algorithms": algorithms, **options}

    return make


def with_unit() -> tuple[nn.Module, dict[str, Any]]:
    model = t16()
    return model, {"train_dataset": rows(21), "unit": Holding(model), **RISING}


def grouped(size: int) -> Any:
    return GroupByLength([{**sample, "labels": sample["input_ids"]} for sample in Short(size)], 4)


def sharded() -> tuple[nn.Module, dict[str, Any]]:
    """Four shards, one of them empty, which take 72 turns in two epochs."""
    shards = [Pages(9), Pages(9, 12), Pages(12, 12), Pages(12, 30)]
    return t16(), {"train_dataset": ShardedStream(shards), "global_batch_size": 8}


def images(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn(size, 1, 8, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(pixels, (pixels.mean(dim=(1, 2, 3)) > 0).double()[:, None])


def classified(size: int, *shape: int) -> TensorDataset:
    """Rows of three classes, of which many are left out as the class 7."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 3, (size, *shape), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.4] = 7
    return TensorDataset(torch.randn(*labels.shape, 4, generator=generator, dtype=torch.float64), labels)


def convolution() -> nn.Module:
    torch.manual_seed(0)
    parts = nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 1)
    return nn.Sequential(*parts).double()


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3, dtype=torch.float64)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    return (weight * 8).round() / 8


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=3, line_search_fn="strong_wolfe")


class MeansOfBatches(Algorithm):
    """Adds the means of batches and outputs to the metrics."""

    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        self.mean = batch[0].mean()
        return batch

    def transform_output(self, trainer: Any, output: StepOutput) -> StepOutput:
        metrics = {"inputs": self.mean, "outputs": output.outputs.mean()}
        return replace(output, metrics={**(output.metrics or {}), **metrics})


RISING = {"lr_scheduler": "cosine", "warmup_steps": 1}
MODELS: dict[str, Setup] = {
    "plain": setup(t16, rows, **RISING),
    "unit": with_unit,
    "gpt": setup(gpt, Tokens, **RISING),
    "bert": setup(bert, partial(Tokens, kind="classes"), **RISING),
    "t5": setup(t5, partial(Tokens, kind="pairs"), **RISING),
    "packed": setup(gpt, Short, data_collator=DataCollatorWithFlattening(), **RISING),
    "rows": setup(gpt, lambda size: PackedDataset(Short(3 * size), 16), **RISING),
    "by length": setup(gpt, grouped, **RISING),
}
UNCLIPPED = partial(setup, max_grad_norm=None)
ALGORITHMS: dict[str, Setup] = {
    "ema": UNCLIPPED(deep, rows, lambda: EMA(0.8)),
    "swa": UNCLIPPED(deep, rows, lambda: SWA("0.3dur")),
    "swa by updates": UNCLIPPED(deep, rows, lambda: SWA(2, every=1)),
    "freezing": UNCLIPPED(deep, rows, lambda: LayerFreezing(0.0)),
    "unfreezing": UNCLIPPED(deep, rows, lambda: GradualUnfreezing(0.5)),
    "value": UNCLIPPED(deep, rows, lambda: GradientClipping("value", 0.01)),
    "agc": UNCLIPPED(deep, rows, lambda: GradientClipping("adaptive", 0.05, ["^4"])),
    "mixup": UNCLIPPED(deep, rows, lambda: MixUp(alpha=1.0)),
    "cutmix": UNCLIPPED(convolution, images, CutMix),
    "smoothing": UNCLIPPED(Tagger, Sentences, lambda: LabelSmoothing(5, 0.2)),
    "lengths": UNCLIPPED(Tagger, Sentences, lambda: SeqLengthWarmup(6, 2, 0.9, 1)),
    "sizes": UNCLIPPED(convolution, images, lambda: ProgressiveResizing(0.5, 0.0, 0.2, 1)),
    "sam": UNCLIPPED(deep, rows, lambda: SAM(0.5)),
    "depth": UNCLIPPED(deep, rows, lambda: StochasticDepth(["[13]"], 0.5)),
    "rounding": UNCLIPPED(deep, rows, lambda: StraightThrough(rounded)),
    "pruning": UNCLIPPED(deep, rows, lambda: MagnitudePruning(0.7, end="0.9dur", every=2)),
    "pruning of all": UNCLIPPED(deep, rows, lambda: MagnitudePruning(0.7, 2, 5, 1, 0.2, ["^2", r"0\."], "global")),
}
CLASS_WEIGHTS = torch.tensor([1.0, 10.0, 0.1], dtype=torch.float64)
WEIGHTED = WeightedLosses({"first": CrossEntropy(CLASS_WEIGHTS, 7, 0.1, 0.05)}, {"first": 0.5})
LOSSES: dict[str, Setup] = {
    "weights": setup(layer, classified, loss_fn=nn.CrossEntropyLoss(CLASS_WEIGHTS, ignore_index=7)),
    "smooth weights": setup(
        layer, classified, loss_fn=nn.CrossEntropyLoss(CLASS_WEIGHTS, ignore_index=7, label_smoothing=0.1)
    ),
    "weights and sums": setup(layer, classified, loss_fn=WEIGHTED),
    "sums over tokens": setup(layer, lambda size: classified(size, 3), loss_fn=WEIGHTED),
}
DATA: dict[str, Setup] = {
    "shards": sharded,
    "whole steps": setup(t16, rows, drop_last=True),
    "metrics": setup(t16, rows, MeansOfBatches),
}
SIZES = {0: 4, "0.5ep": 8, Duration(1, "ep"): 16}
STEPS: dict[str, Setup] = {
    "growing": UNCLIPPED(t16, rows, global_batch_size=SIZES),
    "lbfgs": UNCLIPPED(t16, rows, optimizer=lbfgs),
    "schedule by name": setup(
        Tagger, Sentences, epochs=None, max_duration="300tok", lr_scheduler="cosine", warmup_steps=0.2,
        lr_scheduler_kwargs={"min_lr": 0.005},
    ),
    "schedule in time": setup(
        Tagger, Sentences, epochs=None, max_duration="300tok",
        lr_scheduler=MultiStepScheduler(["0.3dur", "6ba"], 0.5, warmup="30tok") * WSDScheduler("0.4dur"),
    ),
}  # fmt: skip
PACES: dict[str, Setup] = {
    "plateau": setup(t16, rows, lr_scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, patience=0)),
    "epochs in bf16": UNCLIPPED(
        partial(t16, dtype=torch.float32), partial(rows, dtype=torch.float32), autocast="bf16", grad_reduction="sum",
        lr_scheduler="cosine", scheduler_interval="epoch", optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    ),
}  # fmt: skip
"""Schedules by evaluations and by epochs."""
PAIRS = {
    "bins": SOURCES,
    "filtered": ("data", "stream", "loader", "resumable loader"),
    "views": ("stream", "workers"),
    "packed": ("data", "stream of a worker", "own loader"),
}
OTHER_ROWS: dict[str, Setup] = {
    f"{collator} of {source}": partial(made, collator, source)
    for collator, sources in PAIRS.items()
    for source in sources
}
SETUPS = MODELS | ALGORITHMS | LOSSES | DATA | STEPS | PACES | OTHER_ROWS


class Outcome(NamedTuple):
    """What a run ends with."""

    weights: list[torch.Tensor]
    logs: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    progress: dict[str, Any]


def train(trainer_class: Any, name: str, batch_size: int = 4, *, stop: int = 0, **options: Any) -> Outcome:
    """Train a setup for two epochs in steps of 8 samples, or up to a step."""
    model, arguments = SETUPS[name]()
    trace = Trace()
    options = {"epochs": 2, "gradient_accumulation_steps": 8 // batch_size, "optimizer": sgd, **arguments, **options}
    if "global_batch_size" in options:
        del options["gradient_accumulation_steps"]
    if "train_loader" not in options:
        options["batch_size"] = batch_size
    trainer = run(trainer_class, model, None, trace, StopAt(stop), **options)
    logs = [{key: value for key, value in row.items() if "per_second" not in key} for row in trace.logs]
    progress = {**trainer.progress.state_dict(), "seconds": 0}
    return Outcome(weights(trainer.get_model()), logs, trainer.metrics["valid"], progress)


straight = functools.cache(train)


WITH_WORKERS = [name for name in SETUPS if "worker" in name]


@table(
    "name", [*SETUPS], ["t5", "by length", "schedule in time", *PACES], WITH_WORKERS, accelerate=["packed"],
    native=["plain"], rest=["in turn"],
)  # fmt: skip
def test_setup_ends_with_the_native_bits(trainer_class: Any, name: str) -> None:
    outcome, expected = train(trainer_class, name), straight(Trainer, name)
    assert same(outcome.weights, expected.weights)
    assert (outcome.logs, outcome.evaluations) == (expected.logs, expected.evaluations)


@table(
    "name", [*MODELS, *ALGORITHMS, *LOSSES, *DATA, *STEPS], ["ema", "shards"], accelerate=["metrics"], rest=["native"],
    native=[
        "packed", "rows", "agc", "sums over tokens", "schedule in time", "whole steps", "metrics", "shards",
    ],
)  # fmt: skip
def test_setup_gives_the_same_numbers_in_every_split(trainer_class: Any, name: str) -> None:
    expected = straight(trainer_class, name)
    bound = 1e-12 if name in ALGORITHMS | LOSSES | DATA else 1e-10
    if name in MODELS and name not in ("plain", "unit"):
        bound = 1e-6  # transformers computes losses in fp32
    for batch_size in (2, 1) if name == "growing" else (8, 2):
        outcome = train(trainer_class, name, batch_size)
        assert distance(outcome.weights, expected.weights) <= bound
        for row, other in zip(outcome.logs + outcome.evaluations, expected.logs + expected.evaluations, strict=True):
            assert row == pytest.approx(other, abs=bound)


@table(
    "name", [*SETUPS], ["ema", "rows", "lbfgs", "growing", "shards", "whole steps", "bins of resumable loader",
    "views of stream"], WITH_WORKERS, accelerate=[], rest=["native"],
    native=[
        "by length", "swa", "unfreezing", "rounding", "pruning", "growing", "shards", "filtered of data",
        "bins of own loader", "views of workers",
    ],
)  # fmt: skip
def test_setup_resumes_bit_for_bit(
    trainer_class: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader with a state is restored, and yields no batch a second time."""
    expected = straight(trainer_class, name)
    windows = expected.progress["step"] + expected.progress["skipped_steps"]
    stop = 2 + [*SETUPS].index(name) % 3 if name in OTHER_ROWS else windows * 2 // 3
    monkeypatch.setattr("omnitrain.data.shards._EVERY", 2)
    first = train(trainer_class, name, save_dir=tmp_path, stop=stop)
    if name in ("rows", "by length"):
        last = {"save_dir": tmp_path / "other", "resume_from": str(tmp_path / f"checkpoint-{stop}")}
        assert distance(train(trainer_class, name, 2, **last).weights, expected.weights) < 1e-6
    Resumable.created = 0
    resumed = train(trainer_class, name, save_dir=tmp_path, resume_from="auto")
    assert same(resumed.weights, expected.weights)
    assert first.logs + resumed.logs == expected.logs
    assert (resumed.evaluations, resumed.progress) == (expected.evaluations, expected.progress)
    if name in ALGORITHMS:
        assert train(trainer_class, name, algorithms=[]).evaluations != expected.evaluations
    if "resumable loader" in name:
        assert Resumable.created == 2 * (6 - stop)
    if name in OTHER_ROWS:
        assert (windows, expected.progress["epoch"]) == (6, 2)
        assert expected.progress["samples"] == 2 * SIZE or "own" in name or "resumable" in name  # only rows are known


def test_setup_of_an_algorithm_logs_its_metrics(trainer_class: Any) -> None:
    x = rows(SIZE).tensors[0]
    means = [x[indices].mean() for indices in windows_of(SIZE, 8)]
    logs = straight(trainer_class, "metrics").logs
    np.testing.assert_allclose([row["inputs"] for row in logs], means, rtol=0, atol=1e-12)
    assert all("outputs" in row for row in logs)


def test_setup_equals_a_loop_by_hand(trainer_class: Any) -> None:
    """Growing steps are of 4 up to the half of the first epoch, of 8 up to its end, then of 16; or only whole ones."""
    orders = [EpochSampler(SIZE, 1).order(epoch) for epoch in range(2)]
    bounds = [(0, 4), (4, 8), (8, 12), (12, 20), (20, 22)]
    growing = [orders[0][begin:end] for begin, end in bounds] + [orders[1][:16], orders[1][16:]]
    whole = [EpochSampler(SIZE, 8).order(epoch)[begin : begin + 8] for epoch in range(2) for begin in (0, 8)]
    for name, windows, optimizer, clip, bound in (
        ("growing", growing, sgd, math.inf, 1e-12), ("whole steps", whole, sgd, 1.0, 1e-12),
        ("lbfgs", windows_of(SIZE, 8), lbfgs, math.inf, 1e-10),
    ):  # fmt: skip
        model, outcome = t16(), straight(trainer_class, name)
        history = by_hand(model, rows(SIZE), windows, optimizer, None, clip)
        assert outcome.progress["step"] == len(windows) and outcome.progress["samples"] == sum(map(len, windows))
        assert distance(outcome.weights, weights(model)) <= bound
        np.testing.assert_allclose([row["loss"] for row in outcome.logs], history["loss"], rtol=0, atol=1e-10)
    assert distance(train(trainer_class, "lbfgs", 8).weights, weights(model)) == 0


# --- batches of any class, and data that end early


@dataclass(frozen=True)
class Pair:
    """A batch of a class that names its labels."""

    x: torch.Tensor
    labels: torch.Tensor


class Graph:
    """A batch of which nothing is known, not even its length."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any) -> Any:
        return type(self)(self.x.to(device), self.y.to(device))


class LongGraph(Graph):
    """The same with a length, so that a part can be weighed."""

    def __len__(self) -> int:
        return len(self.x)


class GraphCollator:
    """Makes such batches, and splits them."""

    def __call__(self, samples: Any) -> Graph:
        return Graph(*Collator()(samples))

    def split_batch(self, batch: Graph, size: int) -> Any:
        return list(map(LongGraph, batch.x.split(size), batch.y.split(size)))


class OnGraphs(Holding):
    """Computes their loss."""

    def __call__(self, batch: Graph) -> Any:
        return super().__call__((batch.x, batch.y))

    def evaluate(self, batch: Graph) -> StepOutput:
        loss, count = self(batch)
        return StepOutput(loss, num_targets=count)


class OnPairs(nn.Sequential):
    def forward(self, batch: Pair) -> torch.Tensor:
        return super().forward(batch.x)


@table("kind", ["dataclass", "object"], ["object"])
def test_batches_of_any_class_train_like_tensors(trainer_class: Any, kind: str) -> None:
    data, common = rows(21), {"batch_size": 8, "epochs": 2, "eval_dataset": rows(5), "load_best_at_end": False}
    plain = run(trainer_class, t16(), data, **common)
    for options in ({}, {"microbatch_size": 3}):
        model = t16() if kind == "object" else OnPairs(t16())
        if kind == "object":
            options |= {"unit": OnGraphs(model), "data_collator": GraphCollator()}
        else:
            options["data_collator"] = lambda batch: Pair(*Collator()(batch))
        trainer = run(trainer_class, model, data, **common, **options)
        assert distance(weights(trainer.get_model()), weights(plain.get_model())) <= 1e-12
        assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], abs=1e-12)


def test_batch_without_split_batch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = t16()
    train = partial(run, Trainer, model, rows(8), unit=OnGraphs(model), microbatch_size=3)
    with pytest.raises(DataError, match=r"cannot split a Graph into rows.*`data_collator`.*split_batch\(batch, size\)"):
        train(data_collator=GraphCollator().__call__)
    monkeypatch.setattr(GraphCollator, "split_batch", lambda self, batch, size: None)
    with pytest.raises(DataError, match=r"split_batch\(batch, size\) returned None"):
        train(data_collator=GraphCollator())


@table("has_loss", {"gradient": False, "loss": True}, ["gradient"])
def test_nonfinite_sample_is_reported_by_index(
    trainer_class: Any, has_loss: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That of a loss that packed samples share, or of a gradient where the loss is finite; "warn" trains on."""

    class Rooted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).pow(2).sum(dim=1, keepdim=True).sqrt()

    data, model = rows(SIZE), t16() if has_loss else Rooted(4, 8, bias=False).double()
    data.tensors[0][13] = math.nan if has_loss else 0.0
    states = [weights(model)]
    keep = callback(on_step_end=lambda trainer: states.append(weights(trainer.get_model())))
    train = partial(
        run, trainer_class, model, data, keep, batch_size=4, gradient_accumulation_steps=2, epochs=1,
        data_collator=COLLATORS["bins"] if has_loss else None,
    )  # fmt: skip
    with pytest.raises(NonFiniteError) as caught:
        train(save_dir=tmp_path)
    report = json.loads((tmp_path / "nonfinite.json").read_text())
    assert (report["sample_indices"], report["step"]) == ([13], len(states))
    assert re.search(f"at step {len(states)} .*these samples of the training set: 13\\.", str(caught.value))
    assert same(weights(model), states[-1])
    train(on_nonfinite="warn")
    assert f"not finite at step {report['step']}" in caplog.text
    assert not all(parameter.isfinite().all() for parameter in model.parameters())


@quick_on("native", "hf")
def test_epoch_of_only_skipped_steps_is_an_error(trainer_class: Any) -> None:
    """The first epoch, in which no sample has a label, or a later one, in which every step overflows at the end."""
    model = Tagger(dtype=torch.float32)
    for length in ({"max_steps": 5}, {"epochs": 60}):
        with pytest.raises(DataError, match="steps were all skipped: nothing is trained"):
            run(trainer_class, model, Blank(8, range(8)), batch_size=4, **length)
    train = partial(run, trainer_class, data=rows(32, torch.float32), on_nonfinite="skip", batch_size=4)
    with pytest.raises(DataError, match="steps were all skipped"):
        train(Overflowing(range(8, 10_000)), epochs=60)
    trainer = train(Overflowing(range(8, 16)), epochs=3)
    assert (trainer.progress.step, trainer.progress.skipped_steps) == (16, 8)
    for module in (model, trainer.model):
        assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_weights_of_16_bits_are_warned_of(trainer_class: Any, caplog: pytest.LogCaptureFixture) -> None:
    for dtype, count in ((torch.float32, 0), (torch.bfloat16, 1)):
        model = t16(dtype=dtype)
        model.register_parameter("frozen", nn.Parameter(torch.zeros(1, dtype=torch.bfloat16), requires_grad=False))
        run(trainer_class, model, rows(16, dtype), batch_size=8, max_steps=1)
        assert sum("smaller than about 1/256 of a weight is lost" in line for line in caplog.messages) == count


class Ending(Dataset[Any]):
    """Rows of which one raises StopIteration."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return end() if index == 13 else rows(SIZE)[index]


class EndingBatches(Ending):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class Announced(IterableDataset[Any]):
    """A stream of 22 samples, or a loader of 3 batches, that says it has more."""

    def __init__(self, data: Any, length: int) -> None:
        self.data, self.length = data, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter([*self.data])


def end(samples: Any = None) -> Any:
    return next(iter(()))


LONG = partial(Announced, rows(SIZE), 30)
OF_SAMPLE, OF_COLLATOR = "The dataset raised StopIteration for sample 13", "The collator raised StopIteration for"
OF_LOADER, ENDS = "DataLoader ended after 3 batches, but its length is 6", {"data_collator": end}
EARLY_ENDS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "dataset": (Ending, {}, OF_SAMPLE),
    "dataset, worker": (Ending, {"num_workers": 1}, OF_SAMPLE),
    "dataset of batches": (EndingBatches, {}, "The dataset raised StopIteration for .*13"),
    "collator": (partial(rows, 4), ENDS, OF_COLLATOR),
    "collator, worker": (partial(rows, 4), {**ENDS, "num_workers": 1}, OF_COLLATOR),
    "stream": (LONG, {}, "ended after 22 samples, but their length is 30"),
    "stream, collator": (LONG, ENDS, OF_COLLATOR),
    "loader": (lambda: DataLoader(Ending(), 4), {}, OF_LOADER),
    "custom loader": (
        lambda: Announced(DataLoader(rows(12), 4), 5),
        {},
        "ended after 3 (batches|samples), but .* is 5",
    ),
}


@table(
    "kind", list(EARLY_ENDS), ["dataset", "stream", "loader", "custom loader"],
    ["dataset, worker", "collator, worker"], native=EARLY_ENDS.keys() - {"collator, worker"},
)  # fmt: skip
def test_data_that_end_before_their_length_are_an_error(trainer_class: Any, kind: str) -> None:
    make, options, words = EARLY_ENDS[kind]
    options = {"train_loader": make()} if "loader" in kind else {"train_dataset": make(), "batch_size": 4, **options}
    trainer = run(trainer_class, t16(), None, epochs=1, train=False, **options)
    with pytest.raises(DataError, match=words):
        trainer.train()
    with pytest.raises(DataError, match=words):
        trainer.evaluate(make())


# --- arrays, batches of one, and steps that are short


def test_drop_last_avoids_a_batch_of_one_for_batch_norm(trainer_class: Any) -> None:
    train = partial(run, trainer_class, data=rows(9), batch_size=4, epochs=1)
    words = r"(?s)Micro-batch 1 of step 3 \(epoch 1.*single row.*leave over of 9 samples.*drop_last=True"
    with pytest.raises(DataError, match=words):
        train(with_norm())
    assert train(with_norm(), drop_last=True).progress.step == 2


def test_unit_gets_step_numbers_and_callbacks_the_module(trainer_class: Any) -> None:
    model, modules = t16(), []
    unit = Holding(model)
    look = callback(on_step_end=lambda trainer: modules.extend((trainer.model, trainer.get_model())))
    run(trainer_class, model, rows(12), look, unit=unit, epochs=1, batch_size=4)
    assert unit.steps == [1, 2, 3] and all(module is model for module in modules)


# --- steps that are skipped


@table("counts_targets", {"labels": False, "targets": True}, ["labels"])
def test_skipped_window_without_a_label_changes_nothing(
    trainer_class: Any, counts_targets: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def train(data: Any) -> tuple[Any, Trace]:
        model, trace = Tagger(), Trace()

        def unit(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            scores, labels = model(**batch)["logits"].flatten(0, 1), batch["labels"].flatten()
            return F.cross_entropy(scores, labels, reduction="sum"), (labels != -100).sum()

        trainer = run(
            trainer_class, model, data, trace, batch_size=2, gradient_accumulation_steps=2, epochs=1, shuffle=False,
            lr_scheduler="linear", optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9), max_steps=4,
            **({"unit": unit} if counts_targets else {}),
        )  # fmt: skip
        return trainer, trace

    reference, expected = train(Subset(Sentences(20), [*range(8), *range(12, 20)]))
    trainer, trace = train(Blank(20, range(8, 12)))
    assert (trainer.progress.step, trainer.progress.skipped_steps) == (4, 1)
    assert same(weights(trainer.model), weights(reference.model))
    for key in ("step", "loss", "learning_rate"):
        assert [row[key] for row in trace.logs] == [row[key] for row in expected.logs]
    assert sum("has a label that counts" in message for message in caplog.messages) == 1


FUSED = {"fused": True, "unfused": False}


@table("fused", FUSED, ["fused"])
def test_skipped_step_of_an_fp16_overflow_changes_nothing(trainer_class: Any, fused: bool) -> None:
    snapshots, trace = list[list[torch.Tensor]](), Trace()
    keep = callback(on_step_end=lambda trainer: snapshots.append(weights(trainer.model)))
    trainer = run(
        trainer_class, Overflowing(at=(3, 8)), rows(40, torch.float32), trace, keep, batch_size=4, epochs=1,
        lr_scheduler="linear", optimizer=partial(torch.optim.AdamW, lr=0.01, fused=fused), train=False,
    )  # fmt: skip
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    metrics = trainer.train()
    assert (trainer.progress.step, trainer.progress.skipped_steps) == (8, 2)
    assert trainer.lr_scheduler.last_epoch == 8
    assert trainer.scaler.get_scale() == 256.0
    assert same(snapshots[1], snapshots[2]) and not same(snapshots[2], snapshots[3])
    assert trace.logs[-1]["skipped_steps"] == 2 and trace.logs[-1]["loss_scale"] == 256.0
    assert math.isfinite(metrics["train_metrics_history"][0]["train_loss"])


@pytest.fixture
def fp16_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 on a CPU too, which PyTorch can and nobody wants."""

    def parse(cls: Any, autocast: Any, device: torch.device, *rest: Any) -> Precision:
        return Precision(autocast or "fp32", device.type)

    monkeypatch.setattr(Precision, "parse", classmethod(parse))


@table("fused", FUSED, ["fused"])
def test_loss_scale_below_its_minimum_ends_the_run(trainer_class: Any, fused: bool, fp16_everywhere: None) -> None:
    trainer = run(
        trainer_class, Overflowing(at=range(1, 99)), rows(40, torch.float32), batch_size=4, autocast="fp16",
        fp16_loss_scale=(8.0, 2.0), optimizer=partial(torch.optim.AdamW, fused=fused), train=False,
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match=r"fell to 1, below its minimum 2"):
        trainer.train()
    assert trainer.progress.step == 0


@quick_on("native")
def test_loss_scale_is_resumed_inside_its_window(fp16_everywhere: None, trainer_class: Any, tmp_path: Path) -> None:
    """Of 10 steps the fourth overflows; the scale doubles after 3 steps without an overflow."""

    def train(window: int, cut: int = 0, resume_from: Path | None = None, **resume: Any) -> tuple[list[float], Any]:
        trace = Trace()
        trainer = run(
            trainer_class, Overflowing(at=() if resume_from else (4,)), rows(40, torch.float32), trace, StopAt(cut),
            batch_size=4, max_steps=9, fp16_loss_scale=(1024.0, 1e-4, window), autocast="fp16", learning_rate=0.01,
            save_dir=tmp_path / f"{window}-{cut}-{bool(resume_from)}", train=False,
        )  # fmt: skip
        trainer.train(resume_from=resume_from, **resume)
        return [row["loss_scale"] for row in trace.logs], trainer.model

    scales, model = train(3)
    assert scales == [1024, 1024, 2048, 1024, 1024, 2048, 2048, 2048, 4096]
    train(3, cut=4)  # one step into a window
    last = tmp_path / "3-4-False" / "last"
    rest, resumed = train(3, resume_from=last)
    assert rest == scales[4:] and same(weights(resumed), weights(model))
    with pytest.raises(CheckpointError, match=r"fp16_loss_scale: \[1024.0, 0.0001, 3\] -> \[1024.0, 0.0001, 2\]"):
        train(2, resume_from=last)
    assert train(2, resume_from=last, allow_change={"fp16_loss_scale"})[0] == [2048, 2048, 4096, 4096, 8192]


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))


@quick_on("native")
def test_fp8_multiplies_layers_of_fitting_sizes_and_resumes(
    trainer_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eighths.install(monkeypatch)

    def train(precision: str, cut: int = 0, **options: Any) -> Any:
        model = wide()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # of the layers before their replacement
        return run(
            trainer_class, model, rows(12, torch.float32), StopAt(cut), optimizer=optimizer, epochs=2,
            batch_size=4, autocast=precision, **options,
        )  # fmt: skip

    straight, again = train("fp8"), {"save_dir": tmp_path, "resume_from": "auto"}
    assert [type(layer).__name__ for layer in straight.model[::2]] == ["Linear", "Float8Linear", "Linear"]
    assert straight.precision.name == "fp8"
    assert distance(weights(straight.model), weights(train("bf16").model)) > 1e-6
    train("fp8", cut=4, save_dir=tmp_path)
    with pytest.raises(CheckpointError, match="autocast: 'fp8' -> 'bf16'"):
        train("bf16", **again)
    assert same(weights(straight.model), weights(train("fp8", **again).model))
    assert load_tensors(tmp_path / "last" / "model.safetensors").keys() == wide().state_dict().keys()
    with pytest.raises(ConfigError, match="no linear layer whose sizes are both multiples"):
        run(trainer_class, t16(), rows(8), autocast="fp8")


# --- dtypes


class Scaled(nn.Module):
    """A layer with buffers; notes the dtypes that a forward pass meets, and the precision of its products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.dtypes = nn.Linear(4, 1), set[tuple[torch.dtype, ...]]()
        self.precisions = set[tuple[bool, str]]()
        self.register_buffer("factor", torch.tensor(1.1))
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes.add((self.layer.weight.dtype, self.factor.dtype, x.dtype, self.steps.dtype))
        self.precisions.add((self.training, torch.get_float32_matmul_precision()))
        return self.layer(x * self.factor)


@quick_on("native")
def test_dtypes_hold_for_parameters_buffers_and_inputs(trainer_class: Any, tmp_path: Path) -> None:
    BF16, labels = torch.bfloat16, []
    data = x, y = rows(12, torch.float32).tensors

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        labels.append(targets.dtype)
        return F.mse_loss(outputs.float(), targets)

    def train(data: Any = data, cut: int = 0, model: Any = None, **options: Any) -> Any:
        return run(
            trainer_class, model or Scaled(), data, StopAt(cut), loss_fn=loss_fn, batch_size=4, epochs=2,
            eval_dataset=data, load_best_at_end=False, **options,
        )  # fmt: skip

    dtypes = {"dtypes": {"parameters": "bf16", "buffers": torch.bfloat16, "inputs": "bfloat16"}}
    straight, again = train(**dtypes), {"save_dir": tmp_path, "resume_from": "auto"}
    straight.predict(data)
    assert straight.model.dtypes == {(BF16, BF16, BF16, torch.int64)} and set(labels) == {torch.float32}
    assert same(weights(straight.model), weights(train((x.to(BF16), y), model=Scaled().bfloat16()).model))
    train(cut=4, save_dir=tmp_path, **dtypes)
    with pytest.raises(CheckpointError, match=r"dtypes: \{.*'parameters': 'bf16'.*\} -> None"):
        train(**again)
    assert same(weights(train(**again, **dtypes).model), weights(straight.model))
    assert load_tensors(tmp_path / "last" / "model.safetensors")["layer.weight"].dtype is BF16


@quick_on("native")
def test_matmul_precision_holds_during_the_run_only(trainer_class: Any, tmp_path: Path) -> None:
    data = rows(12, torch.float32)
    train = partial(
        run, trainer_class, eval_dataset=data, loss_fn=F.mse_loss, epochs=1, batch_size=4, save_dir=tmp_path,
        resume_from="auto",
    )  # fmt: skip
    trainer = train(Scaled(), data, StopAt(2), matmul_precision="high")
    trainer.evaluate()
    trainer.predict(data)
    assert trainer.model.precisions == {(True, "high"), (False, "high")}
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(CheckpointError, match="matmul_precision: 'high' -> 'highest'"):
        train(Scaled(), data)
    torch.set_float32_matmul_precision("high")  # by the program itself, which is the same
    try:
        train(Scaled(), data)
    finally:
        torch.set_float32_matmul_precision("highest")


# --- the rate that is logged


def test_log_has_the_learning_rates_of_the_step_by_group(trainer_class: Any) -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.4}], lr=0.1)

    trace = Trace()
    trainer = run(
        trainer_class, t16(), rows(16), trace, optimizer=groups, lr_scheduler="linear", batch_size=4, epochs=1,
    )  # fmt: skip
    assert [row["learning_rate"] for row in trace.logs] == pytest.approx([0.1, 0.075, 0.05, 0.025], abs=1e-15)
    assert [row["learning_rate_1"] for row in trace.logs] == pytest.approx([0.4, 0.3, 0.2, 0.1], abs=1e-15)
    assert trainer.metrics["train_metrics_history"][-1]["learning_rate"] == trace.logs[-1]["learning_rate"]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0


def test_schedule_sees_the_gradients_of_its_step(trainer_class: Any) -> None:
    has_gradients: list[bool] = []

    class Looking(torch.optim.lr_scheduler.LRScheduler):
        def get_lr(self) -> Any:
            has_gradients.append(all(p.grad is not None for g in self.optimizer.param_groups for p in g["params"]))
            return self.base_lrs

    run(trainer_class, t16(), rows(8), lr_scheduler=Looking, batch_size=4, epochs=1)
    assert has_gradients == [False, True, True]


class Counting(nn.Sequential):
    """Has weights, buffers, and an extra state: the number of its passes in training."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += self.training
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


@table("is_best", {"best": True, "last": False}, ["best"])
def test_run_without_save_dir_ends_on_its_best_or_last_weights(
    trainer_class: Any, is_best: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The evaluations get worse after the second one, since the rate grows; a line of the log reports the weights."""
    states, model = dict[int, Any](), Counting(nn.BatchNorm1d(4), t16()).double()

    def remember(trainer: Any, metrics: Any) -> None:
        states[trainer.progress.step] = copy.deepcopy(model.state_dict())

    with caplog.at_level("INFO", "omnitrain"):
        trainer = run(
            trainer_class, model, rows(16), callback(on_eval_end=remember), eval_dataset=rows(8), eval_steps=1,
            batch_size=8, max_steps=8, optimizer=partial(torch.optim.SGD, lr=0.02), max_grad_norm=None,
            lr_scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.7**step),
            **({} if is_best else {"load_best_at_end": False}),
        )  # fmt: skip
    best = trainer.metrics["best_step"]
    assert 0 < best < 8
    state, expected = model.state_dict(), states[best if is_best else 8]
    assert state.pop("_extra_state") == expected.pop("_extra_state") and same(state.values(), expected.values())
    assert [message for message in caplog.messages if "weights" in message] == [
        f"The model has the best weights now, those of step {best}."
        if is_best
        else "The model keeps its last weights, those of step 8: load_best_at_end=False."
    ]
    if is_best:
        assert trainer.evaluate()["eval_loss"] == trainer.metrics["best_valid"]["eval_loss"]
        assert trainer.test(rows(8))["test_loss"] == trainer.metrics["best_valid"]["eval_loss"]
        assert trainer.metrics["test"][-1]["step"] == best


# --- modes of modules


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def test_modes_that_the_user_sets_stay(trainer_class: Any, caplog: pytest.LogCaptureFixture) -> None:
    """That a step of several batches has other statistics than one large batch is logged."""
    modes_in_steps, model = [], with_norm()
    look = callback(on_before_optimizer_step=lambda trainer: modes_in_steps.append(modes(trainer.model)))
    model.norm.eval()
    before, statistics = modes(model), model.norm.running_mean.clone()
    with caplog.at_level("INFO", "omnitrain"):
        run(
            trainer_class, model, rows(12), look, batch_size=4, epochs=2, eval_dataset=rows(4), eval_steps=2,
            gradient_accumulation_steps=2, load_best_at_end=False,
        )  # fmt: skip
        assert modes_in_steps == [before] * 4 and modes(model) == before
        assert torch.equal(model.norm.running_mean, statistics)
        (message,) = (message for message in caplog.messages if "evaluation mode stay" in message)
        assert "norm" in message
        caplog.clear()
        run(trainer_class, with_norm(), rows(8), batch_size=4, max_steps=1)
        assert "BatchNorm" not in caplog.text
        run(trainer_class, with_norm(), rows(8), batch_size=4, max_steps=1, gradient_accumulation_steps=2)
    assert "a step of 2 of them does not give the numbers of one large batch" in caplog.text


def test_modes_that_a_callback_sets_stay(trainer_class: Any) -> None:
    """Between two epochs, and in the next run."""
    means, model = list[torch.Tensor](), with_norm()

    def freeze(trainer: Any) -> None:
        model.norm.eval()
        means.append(model.norm.running_mean.clone())

    guest = callback(on_epoch_end=freeze, on_train_start=lambda trainer: model.norm.train(not means))
    trainer = run(trainer_class, model, rows(12), guest, batch_size=4, epochs=2)
    model.train()
    trainer.train()
    assert len(means) == 4 and all(torch.equal(means[0], mean) for mean in means)
    assert not model.norm.training


@table("frozen", {"trained": False, "frozen": True}, ["trained"])
def test_modes_of_a_pretrained_part_follow_its_gradients(trainer_class: Any, frozen: bool) -> None:
    """A part that from_pretrained left in evaluation mode trains, unless it is frozen; so does a full model."""

    class Composed(nn.Sequential):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            return {"loss": F.cross_entropy(self[1](self[0](input_ids).logits), labels)}

    encoder = bert().eval().requires_grad_(not frozen)  # as from_pretrained returns it
    model = Composed(encoder, nn.Linear(3, 3).double())
    run(trainer_class, model, Tokens(8, "classes"), epochs=1, batch_size=4, loss_fn=None)
    assert encoder.training is (not frozen)
    assert model.training and model[1].training
    full = [with_norm().train(is_training) for is_training in (False, True)]
    for model in full:
        run(trainer_class, model, rows(12), batch_size=4, epochs=2)
        assert all(modes(model).values())
    assert same(*map(weights, full))


# --- mistakes that were raw errors, or late


def log_metrics(trainer_class: Any, **metrics: Any) -> None:
    model, renaming = t16(), type("Renaming", (trainer_class,), {"_backend_logs": lambda self: {"ours": 1.0}})
    unit = lambda batch: StepOutput(F.mse_loss(model(batch[0]), batch[1]), metrics=metrics)  # noqa: E731
    run(renaming, model, rows(8), unit=unit, batch_size=4)


def cast_inputs(trainer_class: Any) -> None:
    passing = type("Own", (trainer_class,), {"_prepare_batch": lambda self, batch: batch})
    run(passing, t16(), rows(8), dtypes={"inputs": "bf16"})


def classify(trainer_class: Any, dtype: torch.dtype) -> None:
    data = torch.rand(16, 4), torch.zeros(16, dtype=dtype)
    run(trainer_class, nn.Linear(4, 3), data, loss_fn=F.cross_entropy, batch_size=8)


def predict(trainer_class: Any, collator: str) -> None:
    model, arguments = made(collator, "data")
    run(trainer_class, model, None, train=False, **arguments).predict(arguments["train_dataset"])


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)


FP32, LABELS = {"dtype": torch.float32}, "labels of 64 bits"
MISTAKES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "detached loss": (
        lambda t: run(t, t16(), rows(8), loss_fn=lambda x, y: F.mse_loss(x, y).detach(), epochs=1),
        ConfigError, "The loss has no gradient",
    ),
    "data in fp64": (
        lambda t: run(t, t16(**FP32), rows(8)), RuntimeError, "The batch has torch.float64, and the model torch.float32"
    ),
    "evaluation data in fp64": (
        lambda t: run(t, t16(**FP32), rows(16, **FP32), eval_dataset=rows(8)), RuntimeError, "of NumPy are float64"
    ),
    "classes in int32": (lambda t: classify(t, torch.int32), RuntimeError, LABELS),
    "classes in fp32": (lambda t: classify(t, torch.float32), RuntimeError, LABELS),
    "short schedule": (
        lambda t: run(t, t16(), rows(12), batch_size=2, epochs=1, lr_scheduler=one_cycle),
        ValueError, r"(?s)Tried to step.*OneCycleLR, at the end of step 3",
    ),
    "inputs cast twice": (cast_inputs, ConfigError, "sets the inputs, which `_prepare_batch` of Own prepares itself"),
    "predictions of views": (lambda t: predict(t, "views"), DataError, "model returned 8 rows for 4 samples"),
    "predictions of packed": (lambda t: predict(t, "packed"), DataError, "model returned 1 rows for 4 samples"),
    "reserved metric": (lambda t: log_metrics(t, grad_norm=1.0), ConfigError, "'grad_norm'.*Choose another name"),
    "vector as metric": (lambda t: log_metrics(t, hits=torch.ones(3)), DataError, "'hits' must be a scalar"),
    "metric of the backend": (lambda t: log_metrics(t, ours=1.0), ConfigError, "'ours'.*_backend_logs.*Rename"),
}  # fmt: skip


@table("mistake", list(MISTAKES), ["detached loss", "data in fp64", "short schedule", "metric of the backend"])
def test_mistakes_raise_errors_with_the_remedy(trainer_class: Any, mistake: str) -> None:
    make, error, words = MISTAKES[mistake]
    with pytest.raises(error) as caught:
        make(trainer_class)
    assert re.search(words, "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])]))


@pytest.mark.parametrize("event", ["on_step_end", "on_train_end"])
def test_train_inside_of_train_is_an_error(trainer_class: Any, event: str) -> None:
    """The same call outside of the run works afterwards."""
    calls = iter([1])
    nest = lambda trainer: [trainer.train() for _ in calls]  # noqa: E731
    trainer = run(trainer_class, t16(), rows(8), callback(**{event: nest}), epochs=1, train=False)
    with pytest.raises(ConfigError, match="called within `train"):
        trainer.train()
    assert trainer.train()["stop_reason"] == "epochs"


@table("algorithm", {"smoothing": partial(LabelSmoothing, 3, 0.2), "mixup": partial(MixUp, 3)}, ["mixup"])
def test_algorithms_change_labels_by_label_names(
    trainer_class: Any, algorithm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def train(name: str, **options: Any) -> list[torch.Tensor]:
        model, data = layer(), [{"input": row, name: index % 3} for index, row in enumerate(x)]
        options |= {"loss_fn": F.cross_entropy, "batch_size": 4, "epochs": 2, "algorithms": [algorithm()]}
        run(trainer_class, model, data, **options)
        return weights(model)

    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)  # that of collated numbers
    assert same(train("kind", label_names=["kind"]), train("labels"))
    with pytest.raises(DataError, match=r"label_names=\['kind'\]"):
        train("kind")


@table("fails", {"ends": False, "fails": True}, ["fails"])
def test_generators_of_the_program_are_restored(trainer_class: Any, fails: bool) -> None:
    """Members of an ensemble are drawn one after another, and training one before the next changes none."""
    member = t16(dropout=0.3)

    def disturb(trainer: Any) -> None:
        draw()
        torch.manual_seed(5)
        if fails and trainer.progress.step == 2:
            raise RuntimeError("boom")

    before = states()
    for number in range(2):
        with contextlib.suppress(RuntimeError):
            guest = callback(on_step_end=disturb)
            run(trainer_class, member, Noisy(8), guest, eval_dataset=rows(4), epochs=1, batch_size=4)
        assert states() == before, number


# --- schedules in time


@quick_on("native", "hf")
def test_schedule_on_samples_continues_in_skipped_steps(trainer_class: Any, tmp_path: Path) -> None:
    def train(at: Collection[int], *callbacks: Callback, **options: Any) -> tuple[list[torch.Tensor], list[float]]:
        model, data, trace = Overflowing(at), Streamed(rows(64, torch.float32)), Trace()
        run(
            trainer_class, model, data, trace, *callbacks, batch_size=4, max_duration="40sp", lr_scheduler="linear",
            warmup_steps=0.2, on_nonfinite="skip", **options,
        )  # fmt: skip
        return weights(model), [row["learning_rate"] for row in trace.logs]

    straight, rates = train((1, 4))
    expected = [0, 0.025, *(0.05 * (10 - window) / 8 for window in range(2, 10))]
    assert rates == pytest.approx([rate for window, rate in enumerate(expected) if window not in (0, 3)])
    _, before = train((1, 4), StopAt(3), save_dir=tmp_path)
    resumed, after = train((), save_dir=tmp_path, resume_from="auto")
    assert before + after == rates and same(resumed, straight)


@quick_on("native")
def test_log_of_speed_leaves_out_evaluations_and_saves(
    trainer_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what comes before the first step count."""
    clock = [0.0]
    monkeypatch.setattr(lifecycle.time, "perf_counter", lambda: clock[0])

    def take(seconds: float, trainer: Any = None, *_: Any) -> None:
        clock[0] += seconds
        if seconds == 1 and trainer.progress.step == 4:
            trainer.evaluate()
            trainer.save_checkpoint()

    trace = Trace()
    slow = callback(on_step_end=partial(take, 1), on_eval_end=partial(take, 100), state_dict=lambda: take(1000) or {})
    run(
        trainer_class, t16(), rows(48), trace, slow, epochs=1, batch_size=4, log_steps=3, eval_dataset=rows(4),
        eval_steps=2, eval_on_start=True, save_dir=tmp_path, save_steps=5,
    )  # fmt: skip
    assert [row["samples_per_second"] for row in trace.logs] == pytest.approx([4, 4, 4, 4])


SCORES = {"in the middle": [0.1, 0.1, 0.5, 0.9, 0.2, 0.3, 0.1, 0.2, 0.1], "at the start": [0.9, *[0.5] * 8]}


@table("where", list(SCORES), [], native=["in the middle"])
def test_best_weights_are_saved_at_once_between_saves(trainer_class: Any, where: str, tmp_path: Path) -> None:
    """A run ends with its best weights, though it evaluates more often than it saves."""
    states, saved, store = dict[int, list[torch.Tensor]](), list[int](), Store(tmp_path / "run")

    class Looks(Callback):
        def on_eval_end(self, trainer: Any, metrics: Any) -> None:
            states[trainer.progress.step] = weights(trainer.get_model())

        def on_step_start(self, trainer: Any) -> None:
            best = store.resolve("best") if store.checkpoint_infos() else None
            saved.append(-1 if best is None else best[1]["step"])

    trainer = run(
        trainer_class, t16(), rows(32), Looks(), eval_dataset=rows(4), batch_size=4, epochs=1, eval_steps=1,
        save_steps=4, save_dir=tmp_path / "run", optimization_metric="accuracy", eval_on_start=where == "at the start",
        compute_metrics=lambda _: {"accuracy": SCORES[where][trainer.progress.step]}, train=False,
    )  # fmt: skip
    trainer.train()
    best = trainer.metrics["best_step"]
    assert best == (3 if where == "in the middle" else 0)
    assert saved == ([-1, 1, 2, 3, 3, 3, 3, 3] if best else [0] * 8)  # saved in the same step
    assert same(weights(trainer.get_model()), states[best])
    assert [checkpoint.step for checkpoint in store.checkpoint_infos()] == [best, 4, 8]


# --- where files are


@quick_on("native")
def test_save_dir_stays_when_the_program_changes_folder(
    trainer_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = callback(on_step_end=lambda trainer: monkeypatch.chdir(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    train = partial(run, trainer_class, t16(), rows(8), leaves, batch_size=4, epochs=1)
    trainer = train(save_steps=1, save_dir="run")
    assert trainer.save_dir == tmp_path / "run" and not list((tmp_path / "elsewhere").iterdir())
    assert [checkpoint.step for checkpoint in Store(tmp_path / "run").checkpoint_infos()] == [1, 2]
    assert trainer.save_model("~/model") == tmp_path / "model" and (tmp_path / "model" / "model.safetensors").exists()
    other = train(save_dir="~/again")
    assert other.save_dir == tmp_path / "again" and other.load_checkpoint("~/run/last").name == "checkpoint-2"
    for path, words in (("nosuch://bucket/run", "knows no file system|is an address"), ("", "must be a path")):
        for method in (other.load_checkpoint, other.save_model):
            with pytest.raises(ConfigError, match=words):
                method(path)


def test_save_dir_that_is_not_writable_fails_before_step_1(
    trainer_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = run(trainer_class, t16(), rows(8), save_dir=tmp_path / "kept" / "run", train=False)
    monkeypatch.setattr("os.access", lambda path, *_: not str(path).startswith(str(tmp_path)))  # root may do anything
    with pytest.raises(ConfigError, match=f"{tmp_path}.*Change its permissions"):
        trainer.train()
    assert trainer.progress.step == 0


# --- losses and metrics that a forward pass names


class Measured(Tagger):
    """Returns two losses and some metrics; one of these only where a sentence begins with an even token."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits, counted = self.out(self.embed(ids)), labels != -100
        hits = (logits.argmax(-1) == labels)[counted].double()
        losses = {"ce": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "z": logits[counted].square().mean()}
        metrics = {"accuracy": hits.mean(), "counted": counted.sum()}
        if ids[0, 0] % 2 == 0:
            metrics["even"] = logits[counted].mean()
        return {"loss": losses, "logits": logits, "metrics": metrics}


NAMED = ("loss_ce", "loss_z", "accuracy")
"""What is the mean over labels, so that no split changes it."""


def named_by(output: Any) -> list[float]:
    values = output["loss"]["ce"], output["loss"]["z"], output["metrics"]["accuracy"]
    return [value.item() for value in values]


@table("batch, accumulation", [(8, 1), (2, 4), (1, 8)], ["2-4"])
def test_named_losses_and_metrics_are_those_of_the_window(trainer_class: Any, batch: int, accumulation: int) -> None:
    trace, data, model, reference = Trace(), Sentences(32), Measured(), Measured()
    trainer = run(
        trainer_class, model, data, trace, max_grad_norm=None, batch_size=batch, epochs=2, log_steps=3,
        gradient_accumulation_steps=accumulation, eval_dataset=data, eval_batch_size=batch, load_best_at_end=False,
        shuffle=False, optimizer=sgd,
    )  # fmt: skip
    optimizer = sgd(reference.parameters())
    counts, values = [], []
    for ids, labels in [*zip(data.ids.split(8), data.labels.split(8), strict=True)] * 2:
        output = reference(ids, labels)
        counts.append(int((labels != -100).sum()))
        values.append(named_by(output))
        optimizer.zero_grad()
        sum(output["loss"].values()).backward()
        optimizer.step()

    def means(*bounds: tuple[int, int]) -> list[Any]:
        return [np.average(values[begin:end], axis=0, weights=counts[begin:end]) for begin, end in bounds]

    logged = [[row[name] for name in NAMED] for row in trace.logs]  # the second spans the end of an epoch
    np.testing.assert_allclose(logged, means((0, 3), (3, 6), (6, 8)), rtol=0, atol=1e-12)
    for row in trace.logs:
        assert row["loss"] == pytest.approx(row["loss_ce"] + row["loss_z"], abs=1e-12)
        assert list(row)[2:7] == ["loss", "loss_ce", "loss_z", "accuracy", "counted"]
    history = [[row[f"train_{name}"] for name in NAMED] for row in trainer.metrics["train_metrics_history"]]
    np.testing.assert_allclose(history, means((0, 4), (4, 8)), rtol=0, atol=1e-12)
    assert distance(weights(model), weights(reference)) <= 1e-12
    expected = named_by(reference(data.ids, data.labels))
    evaluation = trainer.metrics["valid"][-1]
    np.testing.assert_allclose([evaluation[f"eval_{name}"] for name in NAMED], expected, rtol=0, atol=1e-12)


@quick_on("native")
def test_named_metrics_since_the_last_log_are_resumed(trainer_class: Any, tmp_path: Path) -> None:
    def train(folder: Path, *callbacks: Callback) -> tuple[Any, list[Any]]:
        trainer = run(
            trainer_class, Measured(), Sentences(20), Trace(), *callbacks, batch_size=2, epochs=2, log_steps=4,
            save_steps=100, save_dir=folder, resume_from="auto", optimizer=sgd,
        )  # fmt: skip
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return trainer, [{name: value for name, value in row.items() if "per_second" not in name} for row in lines]

    straight, expected = train(tmp_path / "straight")
    train(tmp_path / "parts", StopAt(6))
    train(tmp_path / "parts", StopAt(13))
    trainer, lines = train(tmp_path / "parts")
    assert lines == expected and {"loss_ce", "accuracy", "even"} <= expected[0].keys()
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


@table("kind", ["overflow", "skip", "warn"], ["overflow", "warn"])
def test_named_metrics_of_a_skipped_step_are_undone(trainer_class: Any, kind: str) -> None:
    data = [{"x": x, "labels": y} for x, y in rows(24, torch.float32)]
    trainer = run(
        trainer_class, Tracked((3, 8), kind != "overflow"), data, batch_size=2, gradient_accumulation_steps=2,
        epochs=1, log_steps=2, on_nonfinite="raise" if kind == "overflow" else kind, loss_fn=None, train=False,
    )  # fmt: skip
    if kind == "overflow":
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.train()
    (row,) = trainer.metrics["train_metrics_history"]
    counted = [1, 2, 5, 6, 9, 10, 11, 12]
    assert row["train_turn"] == sum(counted) / 8
    assert [name for name in row if name.startswith("train_of_")] == [f"train_of_{turn}" for turn in counted]
    assert math.isfinite(row["train_loss"]) and row["train_loss_mse"] == pytest.approx(row["train_loss"], abs=1e-12)


# --- the state of callbacks and algorithms


class Drifting(Callback):
    """Holds tensors, which every step changes, and sees them when a checkpoint is loaded."""

    def __init__(self) -> None:
        self.drift = {"sum": torch.zeros(2, dtype=torch.bfloat16), "steps": [torch.zeros((), dtype=torch.int64)]}
        self.loaded: list[Any] = []

    def on_step_end(self, trainer: Any) -> None:
        self.drift["sum"] += trainer.progress.step
        self.drift["steps"][0] += 1

    def on_checkpoint_loaded(self, trainer: Any) -> None:
        self.loaded.append((trainer.progress.step, self.drift["sum"].tolist()))

    def state_dict(self) -> dict[str, Any]:
        return self.drift

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drift = state


@quick_on("native", "hf")
def test_checkpoint_loaded_comes_first_with_restored_state(trainer_class: Any, tmp_path: Path) -> None:
    train = partial(run, trainer_class, t16(), rows(12), batch_size=4, save_dir=tmp_path)
    train(Drifting(), max_steps=3)
    drifting, trace = Drifting(), Trace()
    trainer = train(drifting, trace, max_steps=5, resume_from="last")
    assert trace.events[:3] == ["checkpoint_loaded", "train_start", "epoch_start"]
    assert drifting.loaded == [(3, [6.0, 6.0])]
    assert drifting.drift["sum"].dtype is torch.bfloat16 and drifting.drift["sum"].tolist() == [15.0, 15.0]
    assert drifting.drift["steps"][0].item() == 5
    trace.events.clear()
    trainer.load_checkpoint("last")
    assert trace.events == ["checkpoint_loaded"]


class Shrinking(Algorithm):
    """Keeps nothing of its arguments under their names."""

    def __init__(self, rates: list[float], shape: str = "line") -> None:
        self._left = rates

    def transform_loss(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * (self._left.pop() if self._left else 1.0)


class Quiet(Callback):
    def __init__(self, level: int) -> None: ...


@quick_on("native")
def test_resume_rejects_other_options_of_algorithms(
    trainer_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of callbacks are logged only."""

    def train(decay: float, rate: float, level: int, steps: int = 4, **resume: Any) -> Any:
        trainer = run(
            trainer_class, t16(), rows(12), Quiet(level), algorithms=[EMA(decay), Shrinking([0.9, rate])],
            max_steps=steps, batch_size=4, save_dir=tmp_path, train=False,
        )  # fmt: skip
        trainer.train(**resume)
        return trainer

    train(0.9, 0.5, 1, steps=2)
    with caplog.at_level("INFO", "omnitrain"):
        train(0.9, 0.5, 2, steps=3, resume_from="auto")  # though the list was emptied
    assert "Options of callbacks differ from the checkpoint: {'Quiet.level': 1} -> {'Quiet.level': 2}." in caplog.text
    options = "{{'EMA.decay': {}, 'Shrinking.rates': [0.9, {}]}}".format
    words = f"algorithm_options: {options(0.9, 0.5)} -> {options(0.5, 0.1)}."
    with pytest.raises(CheckpointError, match=re.escape(words)):
        train(0.5, 0.1, 2, resume_from="auto")
    other = train(0.5, 0.1, 2, resume_from="auto", allow_change={"algorithm_options"})
    assert other.progress.step == 4 and other.algorithms[0].count == 4  # the average continued


@table("saves", {"memory": False, "disk": True}, [], native=["memory"])
def test_train_more_equals_the_longer_run(trainer_class: Any, saves: bool, tmp_path: Path) -> None:
    def make(length: dict[str, Any], folder: str) -> tuple[Any, Trace]:
        trace, options = Trace(), {"save_dir": tmp_path / folder} if saves else {}
        trainer = run(
            trainer_class, t16(dropout=0.3), rows(12), trace, eval_dataset=rows(9), batch_size=2, eval_steps=2,
            gradient_accumulation_steps=2, algorithms=[EMA(0.6)], train=False, **length, **options,
        )  # fmt: skip
        return trainer, trace

    (parts, trace), (whole, whole_trace) = make({"max_steps": 2}, "parts"), make({"epochs": 2}, "whole")
    parts.train()
    before = torch.get_rng_state()
    metrics, expected = parts.train(more="4ba"), whole.train()
    assert torch.equal(torch.get_rng_state(), before)
    assert same(weights(parts.get_model()), weights(whole.get_model()))
    states = (trainer.optimizer.state_dict()["state"] for trainer in (parts, whole))
    torch.testing.assert_close(*states, rtol=0, atol=0)
    for history in ("train_metrics_history", "valid", "best_valid"):
        assert metrics[history] == expected[history]
    assert [row["loss"] for row in trace.logs] == [row["loss"] for row in whole_trace.logs]
