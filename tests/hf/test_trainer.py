"""HFTrainer's loop. What all trainers share is in test_parity.py, real models are in test_real.py."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import shutil
import signal
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import programs
import pytest
import torch
import torch.nn.functional as F
import transformers
from marks import thinned
from recipes import Keyed, KeyedModel, Noisy, Sentences, StopAt, Tagger, Trace, distance, rows, same, t16, weights
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from omnitrain import Algorithm, Callback, HFTrainer, LabelSmoothing, NonFiniteError, Trainer
from omnitrain.data.sampling import EpochSampler
from omnitrain.errors import CheckpointError, ConfigError
from omnitrain.hf.engine import Engine
from omnitrain.hf.trainer import NEVER_CALLED

NATIVE_AND_HF: tuple[Any, Any] = (Trainer, HFTrainer)
DEFAULTS = {
    "num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 0.05, "eval_strategy": "steps",
    "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "logging_steps": 2, "seed": 3,
}  # fmt: skip
"""20 rows in steps of 4, an evaluation and a checkpoint every other step."""
TRAIN_ONLY = {"save_strategy": "no", "eval_strategy": "no"}


def make(model: nn.Module, data: Any = None, args: Any = None, kind: Any = HFTrainer, **options: Any) -> Any:
    """A trainer for rows or sentences; without `args` the options are those of every trainer."""
    defaults: dict[str, Any] = {"progress_bar": False}
    if args is None:
        defaults |= {"log_steps": 1, "learning_rate": 0.05, "batch_size": 4}
    if isinstance(model, nn.Sequential):
        defaults["loss_fn"] = F.mse_loss
    if kind is Trainer:
        return Trainer(model, data, device="cpu", **{**defaults, **options})
    return kind(model, args, data, **{**defaults, **options})


def trained(*args: Any, **options: Any) -> Any:
    """A trainer after its run."""
    trainer = make(*args, **options)
    trainer.train()
    return trainer


def keyed(args: Any = None, resume_from: Any = None, **options: Any) -> Any:
    """A trainer of rows by name, with 4 of them to evaluate on, after its run."""
    trainer = make(KeyedModel(), Keyed(), args, **{"eval_dataset": Keyed(4), **options})
    trainer.train(resume_from=resume_from)
    return trainer


class InOrder(transformers.Trainer):
    """A stock Trainer that is given our order of samples."""

    start = 0

    def _get_train_sampler(self, *args: Any) -> Any:
        order, start = EpochSampler(20, 4, seed=self.args.seed), self.start

        class Ours(torch.utils.data.Sampler):
            epoch = start

            def __len__(self) -> int:
                return 20

            def __iter__(self) -> Iterator[int]:
                indices = order.order(self.epoch)
                self.epoch += 1
                return iter(map(int, indices))

        return Ours()


def state_of(trainer: Any) -> list[torch.Tensor]:
    """Weights and moments."""
    return weights(trainer.get_model()) + [
        entry[key].clone() for entry in trainer.optimizer.state_dict()["state"].values() for key in sorted(entry)
    ]


def steps_of(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder."""
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))


# --- subclasses and engines


class Foreign(transformers.Trainer):
    """As a trainer of another library."""


FOREIGN = r"Foreign is a transformers.Trainer with a loop of its own.*other.data_collat"


@pytest.mark.parametrize(
    ("bases", "members", "message"),
    [
        *[
            ((HFTrainer,), {name: lambda self, *args: None}, f"overrides {name} of transformers.Trainer.*engine_class")
            for name in ("evaluation_loop", "get_batch_samples", "floating_point_ops", "_prepare_inputs")
        ],
        *[
            ((HFTrainer,), {name: lambda self: None}, f"{name}, which transformers' loop never calls. Use .* instead")
            for name in NEVER_CALLED
        ],
        ((HFTrainer, Foreign), {}, FOREIGN),
        ((Foreign, HFTrainer), {}, FOREIGN),
        ((HFTrainer,), {"engine_class": Foreign}, FOREIGN),
    ],
)
def test_subclass_rejects_members_that_are_not_called(bases: Any, members: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        type("Mine", bases, members)


def test_subclass_may_add_methods_and_an_engine() -> None:
    assert issubclass(type("Mine", (HFTrainer,), {"my_own": lambda self: None, "engine_class": Engine}), HFTrainer)


def test_subclass_hooks_are_called() -> None:
    names = ["_prepare_batch", "_forward", "_weigh", "_clip_gradients", "_autocast"]
    calls = []

    def hook(name: str) -> Any:
        def call(self: Any, *args: Any) -> Any:
            calls.append(name)
            return getattr(HFTrainer, name)(self, *args)

        return call

    trained(t16(), rows(8), kind=type("Mine", (HFTrainer,), {name: hook(name) for name in names}), epochs=1)
    assert {name: calls.count(name) for name in names} == dict.fromkeys(names, 2)


def test_engine_class_takes_the_steps() -> None:
    calls = []

    class Mine(Engine):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("step")
            return super().training_step(*args, **kwargs)

    trainer = trained(t16(), rows(8), kind=type("Own", (HFTrainer,), {"engine_class": Mine}), epochs=1)
    assert len(calls) == 2 and isinstance(trainer.engine, transformers.Trainer)
    with pytest.raises(ConfigError, match=r"Call HFTrainer\.train\(\)"):
        trainer.engine.train()


# --- history of both kinds


def test_history_is_that_of_a_stock_trainer(arguments: Any) -> None:
    """Also the steps, where it sees the same samples."""
    options = {"weight_decay": 0.1, "warmup_steps": 3, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5}
    args = arguments(save_strategy="no", logging_steps=1, **options)
    stock = InOrder(KeyedModel(), args, train_dataset=Keyed(), eval_dataset=Keyed(8))
    stock.train()
    trainer = keyed(args, eval_dataset=Keyed(8))
    assert distance(weights(stock.model), weights(trainer.model)) <= 1e-7
    assert len(trainer.state.log_history) == len(stock.state.log_history) == 16
    for row, expected in zip(trainer.state.log_history, stock.state.log_history, strict=True):
        names = {name for name in expected if not name.startswith("eval_") or name == "eval_loss"}
        assert names <= set(row)
        for name in names:
            if not name.endswith(("runtime", "per_second", "total_flos")):
                assert row[name] == pytest.approx(expected[name], abs=1e-6), name


def test_metrics_are_those_of_the_native_trainer() -> None:
    native, metrics = (
        keyed(kind=kind, eval_dataset=Keyed(8), epochs=2, compute_metrics="mae").metrics.to_dict()
        for kind in NATIVE_AND_HF
    )
    assert native == metrics
    assert set(metrics["valid"][0]) == {"epoch", "step", "eval_loss", "eval_mae"}


# --- callbacks of transformers


class Requests(TrainerCallback):
    """Raises transformers' flags at chosen steps."""

    def __init__(self, **steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        for flag, step in self.steps.items():
            if state.global_step == step:
                setattr(control, flag, True)
        return control


class Substep(TrainerCallback):
    """Raises a flag in the middle of the second step."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        setattr(control, self.flag, state.global_step == 1)
        return control


def test_flags_of_a_callback_are_honoured(arguments: Any, tmp_path: Path) -> None:
    args = arguments(eval_steps=100, save_steps=100, logging_steps=100)
    requests, trace = Requests(should_evaluate=2, should_save=3, should_log=4, should_training_stop=6), Trace()
    trainer = keyed(args, callbacks=[requests, trace], keep_best=0)
    assert [row["step"] for row in trainer.metrics["valid"]] == [2]
    assert [row["step"] for row in trace.logs] == [4, 6]  # the end of a run is logged
    assert (trainer.progress.step, trainer.stop_reason) == (6, "requested")
    assert steps_of(tmp_path / "run") == [3, 6]


@pytest.mark.parametrize(
    ("callback", "accumulation", "steps", "reason"),
    [
        (Requests(should_epoch_stop=2), 1, [2, 7], "epochs"),
        (Substep("should_epoch_stop"), 2, [2, 5], "epochs"),
        (Substep("should_training_stop"), 2, [2], "requested"),
    ],
    ids=["epoch", "epoch in a step", "run in a step"],
)
def test_stop_flags_wait_for_the_end_of_a_step(
    arguments: Any, callback: Any, accumulation: int, steps: list[int], reason: str
) -> None:
    trainer = keyed(arguments(**TRAIN_ONLY, gradient_accumulation_steps=accumulation), callbacks=[callback])
    assert [row["step"] for row in trainer.metrics["train_metrics_history"]] == steps
    assert (trainer.stop_reason, trainer.progress.step) == (reason, steps[-1])
    if reason == "requested":
        assert trainer.progress.samples == 16


def test_save_flag_writes_a_full_checkpoint_without_intervals(arguments: Any, tmp_path: Path) -> None:
    steps: list[int] = []

    class Saves(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    args = arguments(save_strategy="no", eval_steps=1, max_steps=6)
    straight = keyed(args, callbacks=[Requests(should_save=3), Saves])  # an instance, and a class
    assert steps == steps_of(tmp_path / "run") == [3] and straight.store is None
    assert len(straight.metrics["valid"]) == 6
    assert (tmp_path / "run" / "checkpoint-3" / "omnitrain.json").exists()
    resumed = keyed(args, resume_from=tmp_path / "run" / "checkpoint-3")
    assert same(weights(resumed.model), weights(straight.model))


def test_callbacks_that_are_no_callbacks_are_rejected(arguments: Any) -> None:
    with pytest.raises(ConfigError, match="callbacks of omnitrain or of transformers"):
        make(KeyedModel(), Keyed(), arguments(), callbacks=[print])


# --- early stopping


def stopping(args: Any, resume_from: Any = None, callbacks: Any = ()) -> Any:
    """Run with early stopping on an accuracy; the evaluation that comes next is known by the run's history."""
    scores = [0.5, 0.7, 0.6, 0.65, 0.69, 0.6, 0.9, 0.9, 0.9, 0.9]
    trainer = make(
        KeyedModel(), Keyed(), args, eval_dataset=Keyed(4),
        compute_metrics=lambda _: {"accuracy": scores[len(trainer.metrics["valid"])]},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3, early_stopping_threshold=0.001), *callbacks],
    )  # fmt: skip
    trainer.train(resume_from=resume_from)
    return trainer


@pytest.mark.parametrize("cut", thinned([None, 5, 6, 7, 8, 9], [None, 7]))
def test_early_stopping_continues_over_a_resume(arguments: Any, cut: int | None) -> None:
    options = {"num_train_epochs": 9, "load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    if cut:
        stopping(arguments(**options), callbacks=[StopAt(cut)])
    trainer = stopping(arguments(**options), "auto" if cut else None)
    assert (trainer.stop_reason, trainer.metrics["best_step"], trainer.progress.step) == ("early_stopping", 4, 10)
    assert cut or trainer.state.best_metric == 0.7


# --- what transformers does by default, and HFTrainer does not


@pytest.mark.parametrize(("metric", "best"), [("wer", 4), ("accuracy", 2)])
def test_best_checkpoint_goes_by_the_direction_of_its_metric(
    arguments: Any, tmp_path: Path, metric: str, best: int
) -> None:
    scores = iter([0.9, 0.2, 0.5, 0.5, 0.5])
    args = arguments(load_best_model_at_end=True, metric_for_best_model=metric, save_total_limit=1)
    trainer = keyed(args, compute_metrics=lambda _: {metric: next(scores)}, sanity=False)
    assert (trainer.metrics["best_step"], trainer.metrics["best_checkpoint"]) == (best, f"checkpoint-{best}")
    assert steps_of(tmp_path / "run") == [best, 10]
    saved = load_file(trainer.store.resolve("best")[0] / "model.safetensors")
    assert same(saved.values(), dict(sorted(trainer.model.state_dict().items())).values())


def bad_rows(value: float) -> Any:
    data = rows(20)
    data.tensors[1][7] = value
    return data


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_loss_ends_the_run_before_the_update(value: float) -> None:
    step = list(EpochSampler(20, 4).order(0)).index(7) // 4 + 1
    model = t16()
    trainer = make(model, bad_rows(value), epochs=1)
    with pytest.raises(NonFiniteError, match=f"step {step}"):
        trainer.train()
    assert all(bool(tensor.isfinite().all()) for tensor in weights(model))
    assert trainer.progress.step == step - 1


def test_nonfinite_steps_are_skipped_as_by_the_native_trainer() -> None:
    results = []
    for kind in NATIVE_AND_HF:
        trainer = trained(
            t16(), bad_rows(math.nan), kind=kind, epochs=2, on_nonfinite="skip", lr_scheduler="linear"
        )  # fmt: skip
        losses = [row["train_loss"] for row in trainer.metrics["train_metrics_history"]]
        results.append((losses, trainer.progress.step, trainer.progress.skipped_steps, weights(trainer.model)))
    assert results[0][:3] == results[1][:3] and results[0][2] == 2
    assert same(results[0][3], results[1][3])


def test_nonfinite_loss_may_only_be_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "omnitrain"):
        trainer = trained(t16(), bad_rows(math.nan), epochs=1, on_nonfinite="warn")
    assert "not finite" in caplog.text and trainer.progress.step == 5
    assert any(math.isnan(row["loss"]) for row in trainer.state.log_history if "loss" in row)


class Outputs(nn.Module):
    """Keeps weak references to its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 20_000)  # small ones are looked at several at a time
        self.refs: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layer(x)
        self.refs = [ref for ref in self.refs if ref() is not None] + [weakref.ref(output)]
        self.most = max(self.most, len(self.refs))
        return output


def test_evaluate_keeps_no_predictions_for_named_metrics() -> None:
    data = torch.utils.data.TensorDataset(rows(60, torch.float32).tensors[0], torch.arange(60) % 3)
    options = {"loss_fn": F.cross_entropy, "compute_metrics": ["accuracy"], "eval_batch_size": 1}
    trainer = make(Outputs(), data, eval_dataset=data, **options)
    assert set(trainer.evaluate()) == {"eval_loss", "eval_accuracy"}
    assert trainer.model.most <= 3


def test_evaluate_leaves_the_random_generators_unchanged() -> None:
    trainer = make(t16(dropout=0.5), Noisy(8), eval_dataset=Noisy(8))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    trainer.evaluate()
    trainer.engine.evaluate()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


# --- data of other kinds, options of every trainer


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(*rows(22).tensors, strict=True)


SOURCES: dict[str, Any] = {
    "stream": lambda: {"train_dataset": Stream(), "batch_size": 4},
    "loader": lambda: {"train_loader": DataLoader(rows(22), batch_size=4)},
    "map": lambda: {"train_dataset": Noisy(22), "batch_size": 4},
}


def feed(kind: Any, source: str, resume_from: Any = None, **options: Any) -> Any:
    """A trainer of a source of data, after its run."""
    defaults: dict[str, Any] = {"loss_fn": F.mse_loss, "learning_rate": 0.05, "progress_bar": False, "log_steps": 1}
    if kind is Trainer:
        defaults["device"] = "cpu"
    trainer = kind(t16(dropout=0.3), **SOURCES[source](), **{**defaults, **options})
    trainer.train(resume_from=resume_from)
    return trainer


def history_of(trainer: Any) -> list[tuple[Any, ...]]:
    return [(row["epoch"], row["step"], row["train_loss"]) for row in trainer.metrics["train_metrics_history"]]


LENGTHS: dict[str, Any] = {"epochs": {"epochs": 2}, "steps": {"epochs": None, "max_steps": 7}}


@pytest.mark.parametrize(
    ("source", "accumulation", "length"),
    thinned(
        [(source, accumulation, length) for source in SOURCES for accumulation in (1, 4) for length in LENGTHS],
        [("stream", 4, "steps"), ("loader", 1, "epochs"), ("map", 4, "epochs")],
    ),
)
def test_data_of_any_kind_trains_as_in_the_native_trainer(source: str, accumulation: int, length: str) -> None:
    results = []
    for kind in NATIVE_AND_HF:
        trace = Trace()
        options = {"gradient_accumulation_steps": accumulation, "callbacks": [trace], **LENGTHS[length]}
        trainer = feed(kind, source, **options)
        losses = [row["loss"] for row in trace.logs]
        results.append((trace.events, losses, history_of(trainer), trainer.stop_reason, trainer))
    assert results[0][:4] == results[1][:4]
    assert same(state_of(results[0][4]), state_of(results[1][4]))


def with_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "options",
    [
        {"autocast": "bf16"},
        {"grad_reduction": "sum"},
        {"max_grad_norm": None},
        {"optimizer": with_sgd, "learning_rate": 2e-5},
        {"lr_scheduler": "cosine", "scheduler_interval": "epoch"},
        {"lr_scheduler": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0), "eval_steps": 1},
        {"eval_on_start": True, "eval_steps": 2},
    ],
    ids="-".join,
)
def test_options_act_as_in_the_native_trainer(options: dict[str, Any]) -> None:
    results = []
    for kind in NATIVE_AND_HF:
        trace = Trace()
        trainer = trained(
            t16(dtype=torch.float32), rows(22, torch.float32), kind=kind, epochs=2, callbacks=[trace],
            eval_dataset=rows(7, torch.float32), gradient_accumulation_steps=2, **options,
        )  # fmt: skip
        results.append((trace.events, [(row["loss"], row["learning_rate"]) for row in trace.logs], trainer))
    assert results[0][:2] == results[1][:2]
    assert same(state_of(results[0][2]), state_of(results[1][2]))


class Shift(Algorithm):
    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]

    def transform_loss(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * 2


@pytest.mark.parametrize("algorithm", [Shift, LabelSmoothing])
def test_algorithms_act_as_in_the_native_trainer(algorithm: Any) -> None:
    results = []
    for kind in NATIVE_AND_HF:
        model, data, options = t16(), rows(20), {"algorithms": [Shift()]}
        if algorithm is LabelSmoothing:
            model, options = nn.Linear(4, 3), {"loss_fn": F.cross_entropy, "algorithms": [LabelSmoothing(3, 0.1)]}
            data = torch.utils.data.TensorDataset(rows(24, torch.float32).tensors[0], torch.arange(24) % 3)
            nn.init.eye_(model.weight)
            nn.init.zeros_(model.bias)
        results.append(weights(trained(model, data, kind=kind, epochs=2, **options).model))
    assert same(*results)


def test_bf16_argument_is_autocast(arguments: Any) -> None:
    native = keyed(kind=Trainer, eval_dataset=None, autocast="bf16", epochs=2, seed=3, lr_scheduler="linear")
    assert distance(weights(native.model), weights(keyed(arguments(bf16=True, **TRAIN_ONLY)).model)) <= 1e-7


def test_fp16_on_cpu_is_rejected(arguments: Any) -> None:
    with pytest.raises(ConfigError, match="bf16"):
        make(t16(), rows(8), autocast="fp16")
    with pytest.raises(ConfigError, match=r"`training_args.fp16=True` is not available.*`bf16=True`"):
        make(t16(), rows(8), arguments(fp16=True))


def test_unit_counts_its_targets() -> None:
    results = []
    for batch, accumulation in ((8, 1), (2, 4)):
        model = Tagger()

        def unit(batch: Any, model: nn.Module = model) -> tuple[torch.Tensor, torch.Tensor]:
            mask = batch["labels"] != -100
            logits = model.out(model.embed(batch["ids"]))
            return F.cross_entropy(logits[mask], batch["labels"][mask], reduction="sum"), mask.sum()

        trained(model, Sentences(16), unit=unit, batch_size=batch, gradient_accumulation_steps=accumulation, epochs=2)
        results.append(weights(model))
    assert distance(*results) <= 1e-12


def test_compute_loss_func_is_called_with_outputs_and_labels(arguments: Any) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return F.l1_loss(outputs["logits"] if isinstance(outputs, dict) else outputs, labels)

    args = arguments(**TRAIN_ONLY, max_steps=3)
    models = [keyed(args, **options).model for options in ({"compute_loss_func": loss}, {})]
    assert distance(*map(weights, models)) > 1e-4


# --- calls


def test_second_train_starts_over_with_the_present_weights() -> None:
    results = []
    for kind in NATIVE_AND_HF:
        trainer = trained(t16(), rows(20), kind=kind, epochs=1, lr_scheduler="linear")
        metrics = trainer.train()
        results.append((trainer.progress.step, len(metrics["train_metrics_history"]), weights(trainer.model)))
    assert results[0][:2] == results[1][:2] == (5, 1)
    assert same(results[0][2], results[1][2])


def test_second_train_has_the_optimizer_of_the_arguments(arguments: Any) -> None:
    trainer = make(KeyedModel(), Keyed(), arguments(optim="sgd", weight_decay=0.1, max_steps=2, **TRAIN_ONLY))
    for _ in range(2):
        trainer.train()
        assert isinstance(trainer.optimizer, torch.optim.SGD)
        groups = [(group["weight_decay"], len(group["params"])) for group in trainer.optimizer.param_groups]
        assert groups == [(0.1, 2), (0.0, 2)]


def test_named_evaluation_sets_have_metrics_and_select_the_best(arguments: Any) -> None:
    sets = {"dev": Keyed(8), "web": Keyed(5)}
    args = arguments(load_best_model_at_end=True, metric_for_best_model="dev_mae", num_train_epochs=1)
    trainer = keyed(args, eval_dataset=sets, compute_metrics="mae")
    names = {"eval_loss", "eval_mae", "eval_dev_loss", "eval_dev_mae", "eval_web_loss", "eval_web_mae"}
    assert set(trainer.metrics["best_valid"]) == names | {"epoch", "step"} and trainer.objective.direction == "min"
    assert trainer.evaluate(sets).keys() == names
    assert any(names <= set(row) for row in trainer.state.log_history)


def test_evaluate_test_and_predict_match_the_native_trainer(tmp_path: Path) -> None:
    results: list[Any] = []
    for kind in NATIVE_AND_HF:
        trainer = keyed(
            kind=kind, eval_dataset=Keyed(7), test_dataset=Keyed(9), compute_metrics="mae", epochs=1,
            save_dir=tmp_path / kind.__name__, eval_batch_size=3,
        )  # fmt: skip
        predictions, labels, metrics = trainer.predict(Keyed(5))
        sets = trainer.evaluate(), trainer.evaluate(Keyed(5), prefix="held"), trainer.test(), trainer.metrics["test"]
        results.append((*sets, metrics, predictions.tolist(), labels.tolist()))
    assert results[0] == results[1]
    assert results[1][1].keys() == {"held_loss", "held_mae"}


def test_metrics_and_model_are_written_to_their_folders(arguments: Any, tmp_path: Path) -> None:
    trainer = make(KeyedModel(), Keyed(), arguments(save_strategy="no"), eval_dataset=Keyed(4))
    results = trainer.evaluate(Keyed(6), prefix="test")
    assert trainer.save_metrics("test", results) == tmp_path / "run" / "test_results.json"
    assert json.loads((tmp_path / "run" / "test_results.json").read_text()) == results
    folder = trainer.save_model(tmp_path / "final")
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "training_args.bin"]
    with pytest.raises(Exception, match="overwrite=True"):
        trainer.save_model(tmp_path / "final", overwrite=False)


# --- resuming


class Straight:
    """The native run that no interruption may change: 6 steps an epoch, random rows, dropout."""

    options: ClassVar[dict[str, Any]] = {
        "epochs": 3, "save_steps": 2, "load_best_at_end": False, "lr_scheduler": "cosine", "warmup_steps": 2,
    }  # fmt: skip
    results: ClassVar[dict[Any, Any]] = {}

    @classmethod
    def of(cls, folder: Path, source: str, **options: Any) -> Any:
        key = (source, *sorted(options.items()))
        if key not in cls.results:
            trainer = feed(Trainer, source, save_dir=folder, **{**cls.options, **options})
            cls.results[key] = state_of(trainer), history_of(trainer), trainer.progress.position
        return cls.results[key]


FIRST_STEPS = {"gradient_accumulation_steps": 3, "warmup_steps": 0, "lr_scheduler": None, "save_steps": 1}
RESUMES: list[Any] = [
    *[("map", HFTrainer, HFTrainer, cut) for cut in (1, 5, 6, 7, 12, 17)],
    *[("map", Trainer, HFTrainer, cut) for cut in (4, 6)],
    *[("map", HFTrainer, Trainer, cut) for cut in (4, 6)],
    *[(source, HFTrainer, HFTrainer, cut) for source in ("stream", "loader") for cut in (2, 3)],
]
KEPT = [RESUMES[2], RESUMES[3], RESUMES[6], RESUMES[9], RESUMES[10], RESUMES[13]]


@pytest.mark.parametrize(("source", "first", "second", "cut"), thinned(RESUMES, KEPT))
def test_resumed_run_is_the_native_run_to_the_bit(
    tmp_path: Path, source: str, first: Any, second: Any, cut: int
) -> None:
    options = {} if source == "map" else FIRST_STEPS
    check_resumed(tmp_path, source, first, second, cut, options)


@pytest.mark.processes
def test_worker_processes_change_no_numbers(tmp_path: Path) -> None:
    check_resumed(tmp_path, "map", HFTrainer, HFTrainer, 8, {}, num_workers=2)


def check_resumed(
    folder: Path, source: str, first: Any, second: Any, cut: int, options: dict[str, Any], **more: Any
) -> None:
    expected = Straight.of(folder / "straight", source, **options)
    options = {**Straight.options, "save_dir": folder / "cut", **options, **more}
    feed(first, source, callbacks=[StopAt(cut)], **options)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(99)
    trainer = feed(second, source, "auto", **options)
    assert same(state_of(trainer), expected[0])
    assert (history_of(trainer), trainer.progress.position) == expected[1:]


def test_random_draws_of_a_callback_do_not_reach_a_resume(tmp_path: Path) -> None:
    class Draws(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.rand(3)

    straight = feed(HFTrainer, "map", epochs=2, callbacks=[Draws()])
    feed(HFTrainer, "map", epochs=2, callbacks=[Draws(), StopAt(4)], save_dir=tmp_path)
    trainer = feed(HFTrainer, "map", "auto", epochs=2, callbacks=[Draws()], save_dir=tmp_path)
    assert same(state_of(trainer), state_of(straight))


def test_state_has_the_steps_of_a_resumed_stream(tmp_path: Path) -> None:
    options = {"epochs": 2, "save_dir": tmp_path, "load_best_at_end": None}
    feed(HFTrainer, "stream", callbacks=[StopAt(8)], **options)
    trainer = feed(HFTrainer, "stream", "auto", **options)
    steps = [row["step"] for row in trainer.state.log_history if "loss" in row]
    assert steps == list(range(1, 13)) and trainer.state.global_step == 12


# --- stock checkpoints


class FirstState(TrainerCallback):
    """The state that a stock Trainer begins with."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step, self.epoch = state.global_step, state.epoch
        entries = kwargs["optimizer"].state_dict()["state"].values()
        self.moments = [entry["exp_avg"].clone() for entry in entries if entry]
        self.weights = weights(kwargs["model"])


@pytest.mark.parametrize("decay", thinned([0.0, 0.1], [0.1]))
def test_stock_trainer_resumes_from_our_checkpoint(arguments: Any, tmp_path: Path, decay: float) -> None:
    options = {"weight_decay": decay, "lr_scheduler_type": "cosine", "warmup_steps": 2, "eval_strategy": "no"}
    trainer, checkpoint = keyed(arguments(**options), stock_checkpoints=True), tmp_path / "run" / "checkpoint-6"
    first = FirstState()
    stock = InOrder(KeyedModel(), arguments("stock", **options), train_dataset=Keyed(), callbacks=[first])
    stock.start = 1
    stock.train(resume_from_checkpoint=str(checkpoint))
    assert first.step == 6 and first.epoch == pytest.approx(1.2)
    halfway = make(KeyedModel(), Keyed(), arguments(**options))
    halfway.load_checkpoint(checkpoint)
    assert same(first.weights, weights(halfway.model))
    total = sum(float(moment.double().sum()) for moment in first.moments)
    saved = [value["exp_avg"] for value in halfway.optimizer.state_dict()["state"].values()]
    assert total == pytest.approx(sum(float(moment.double().sum()) for moment in saved), abs=1e-12)
    assert distance(weights(stock.model), weights(trainer.model)) <= 1e-7


def test_stock_trainer_resumes_from_a_run_without_arguments(tmp_path: Path) -> None:
    options = {"epochs": 2, "save_dir": tmp_path / "run", "save_steps": 3, "max_grad_norm": 1.0}
    trainer = keyed(eval_dataset=None, stock_checkpoints=True, **options)
    args = TrainingArguments(
        str(tmp_path / "stock"), num_train_epochs=2, per_device_train_batch_size=4, learning_rate=0.05, use_cpu=True,
        lr_scheduler_type="constant", report_to="none", save_strategy="no",
    )  # fmt: skip
    stock = InOrder(KeyedModel(), args, train_dataset=Keyed())
    stock.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert stock.state.global_step == 10
    assert distance(weights(stock.model), weights(trainer.model)) <= 1e-7


@pytest.mark.parametrize("is_stock", [False, True])
def test_checkpoint_has_pickles_only_for_a_stock_trainer(arguments: Any, tmp_path: Path, is_stock: bool) -> None:
    keyed(arguments(max_steps=2), stock_checkpoints=is_stock)
    keyed(kind=Trainer, eval_dataset=None, max_steps=2, save_dir=tmp_path / "native", save_steps=2)
    names, sizes = [], []
    for run in ("run", "native"):
        files = [path for path in (tmp_path / run / "checkpoint-2").rglob("*") if path.is_file()]
        names.append({path.relative_to(tmp_path / run / "checkpoint-2").as_posix() for path in files})
        sizes.append(sum(path.stat().st_size for path in files if "json" not in path.suffix))
    pickles = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"} if is_stock else set()
    assert names[0] - names[1] == pickles | {"trainer_state.json"} and not names[1] - names[0]
    assert (sizes[0] == sizes[1]) is not is_stock


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stock_checkpoints": "yes"}, "True or False"),
        ({"stock_checkpoints": True}, "needs a place"),
        ({"stock_checkpoints": True, "save_dir": "run", "save_only_model": True}, "contradicts"),
    ],
    ids=["value", "folder", "model only"],
)
def test_stock_checkpoints_reject_options_without_them(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"stock_checkpoints.*{message}"):
        make(KeyedModel(), Keyed(), **options)


class Counts(TrainerCallback, transformers.trainer_callback.ExportableState):
    """Counts steps, and lets transformers save the count."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


@pytest.fixture(scope="module")
def stopped_run(module_arguments: Any) -> Path:
    """The folder of a run of 6 steps that was stopped after 4, with files for a stock trainer."""
    args = module_arguments(max_steps=6)
    keyed(args, callbacks=[Counts(), StopAt(4)], stock_checkpoints=True)
    return Path(args.output_dir)


def test_resume_restores_callbacks_and_history_without_pickle(
    stopped_run: Path, arguments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(stopped_run, tmp_path / "run")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("unpickled")

    monkeypatch.setattr(torch, "load", fail)
    counts = Counts()
    trainer = keyed(arguments(max_steps=6), "auto", callbacks=[counts])
    assert counts.count == trainer.progress.step == 6
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [2, 4, 6]


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer/state.safetensors", "omnitrain.json", "trainer_state.json", "optimizer.pt"]
)
def test_damaged_checkpoint_is_reported_and_skipped_by_auto(
    stopped_run: Path, arguments: Any, tmp_path: Path, file: str
) -> None:
    shutil.copytree(stopped_run, tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoint-4" / file
    damaged.write_bytes(damaged.read_bytes()[:20])
    args = arguments(max_steps=6)
    with pytest.raises(CheckpointError, match=file.split("/")[-1]):
        keyed(args, tmp_path / "run" / "checkpoint-4")
    trace = Trace()
    keyed(args, "auto", callbacks=[trace])
    assert trace.events.count("step_end") == 4  # from step 2 on


def test_resume_with_other_settings_reports_both_values(stopped_run: Path, arguments: Any) -> None:
    args = arguments(output_dir=str(stopped_run), max_steps=6, learning_rate=0.5)
    with pytest.raises(CheckpointError, match=r"learning_rate: 0\.05 -> 0\.5"):
        keyed(args, "auto")


def test_saving_the_best_only_keeps_the_best_and_the_last(arguments: Any, tmp_path: Path) -> None:
    scores = iter([0.5, 0.4, 0.9, 0.8, 0.7])
    args = arguments(save_strategy="best", metric_for_best_model="accuracy", load_best_model_at_end=True)
    keyed(args, compute_metrics=lambda _: {"accuracy": next(scores)}, sanity=False)
    assert steps_of(tmp_path / "run") == [2, 6, 10]


def test_checkpoint_state_has_the_best_metric(arguments: Any, tmp_path: Path) -> None:
    scores = iter([0.5, 0.9, 0.4, 0.3, 0.2])
    args = arguments(metric_for_best_model="accuracy", load_best_model_at_end=True)
    keyed(args, compute_metrics=lambda _: {"accuracy": next(scores)}, sanity=False)
    for step in (4, 8):
        state = json.loads((tmp_path / "run" / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert (state["best_metric"], state["best_global_step"]) == (0.9, 4)
        assert state["best_model_checkpoint"] == str(tmp_path / "run" / "checkpoint-4")


# --- signals


SCRIPT = """
import os, signal, sys
import torch; torch.set_num_threads(1)
import torch.nn.functional as F
from recipes import Noisy, t16
from omnitrain import Callback, HFTrainer

class Send(Callback):
    def on_step_end(self, trainer):
        if trainer.progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

HFTrainer(t16(dropout=0.3), None, Noisy(22), loss_fn=F.mse_loss, learning_rate=0.05, batch_size=4, epochs=2,
          save_dir=sys.argv[1], progress_bar=False, callbacks=[Send()]).train()
"""


class Sends(Callback):
    """Sends the signal of the end to this process in the third step."""

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == 3:
            signal.raise_signal(signal.SIGTERM)


def check_signalled(folder: Path) -> None:
    assert steps_of(folder) == [3]
    trainer = make(t16(dropout=0.3), Noisy(22), epochs=2, save_dir=folder, log_steps=10)
    trainer.train(resume_from="auto")
    assert same(state_of(trainer), state_of(trained(t16(dropout=0.3), Noisy(22), epochs=2)))


def test_signal_saves_and_sets_the_exit_code(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        trained(t16(dropout=0.3), Noisy(22), epochs=2, save_dir=tmp_path, callbacks=[Sends()])
    assert error.value.code == 143
    check_signalled(tmp_path)


@pytest.mark.slow
@pytest.mark.processes
def test_signal_ends_a_program_with_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    path = ":".join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1])])
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "cut")]
    process = programs.run(*command, env={**os.environ, "PYTHONPATH": path})
    assert process.returncode in (143, -signal.SIGTERM)
    check_signalled(tmp_path / "cut")


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_signal_in_an_evaluation_leaves_it_to_the_resumed_run(
    tmp_path: Path, number: signal.Signals, error: type[BaseException]
) -> None:
    class Model(nn.Sequential):
        is_armed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_armed and not self.training:
                self.is_armed = False
                signal.raise_signal(number)
            return super().forward(x)

    def build(is_armed: bool) -> Any:
        model = Model(*t16())
        model.is_armed = is_armed
        return make(model, rows(20), eval_dataset=rows(8), epochs=1, eval_steps=2, save_steps=2, save_dir=tmp_path)

    with pytest.raises(error):
        build(True).train()
    metrics = build(False).train(resume_from="auto")
    assert [row["step"] for row in metrics["valid"]] == [2, 4, 5]
