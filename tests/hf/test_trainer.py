"""HFTrainer's loop. What all trainers share is in test_parity.py, real models are in test_real.py."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from marks import thinned
from recipes import Keyed, KeyedModel, Noisy, StopAt, Trace, distance, rows, same, t16, weights
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from omnitrain import Callback, HFTrainer, Trainer
from omnitrain.core.errors import CheckpointError, ConfigError
from omnitrain.data.sampling import EpochSampler
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


FOREIGN = r"Foreign is a transformers.Trainer with its own loop.*other.data_collat"


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


def test_engine_class_takes_the_steps() -> None:
    calls = []

    class Mine(Engine):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("step")
            return super().training_step(*args, **kwargs)

    subclass = type("Own", (HFTrainer,), {"engine_class": Mine, "my_own": lambda self: None})
    trainer = trained(t16(), rows(8), kind=subclass, epochs=1)
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


# --- callbacks of transformers


class Requests(TrainerCallback):
    """Raises transformers' flags at chosen steps, or in the middle of the second step."""

    def __init__(self, substep: str = "", **steps: int) -> None:
        self.substep, self.steps = substep, steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        for flag, step in self.steps.items():
            if state.global_step == step:
                setattr(control, flag, True)
        return control

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.substep:
            setattr(control, self.substep, state.global_step == 1)
        return control


@pytest.mark.parametrize(
    ("callback", "accumulation", "steps", "reason"),
    [
        (Requests(should_epoch_stop=2), 1, [2, 7], "epochs"),
        (Requests("should_epoch_stop"), 2, [2, 5], "epochs"),
        (Requests("should_training_stop"), 2, [2], "requested"),
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


@pytest.mark.parametrize("cut", thinned([None, 5, 6, 7, 8, 9], [7]))
def test_early_stopping_continues_over_a_resume(arguments: Any, cut: int | None) -> None:
    options = {"num_train_epochs": 9, "load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    if cut:
        stopping(arguments(**options), callbacks=[StopAt(cut)])
    trainer = stopping(arguments(**options), "auto" if cut else None)
    assert (trainer.stop_reason, trainer.metrics["best_step"], trainer.progress.step) == ("early_stopping", 4, 10)
    assert cut or trainer.state.best_metric == 0.7


# --- what transformers does by default, and HFTrainer does not


@pytest.mark.parametrize(("metric", "best"), thinned([("wer", 4), ("accuracy", 2)], [("wer", 4)]))
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
    state = json.loads((tmp_path / "run" / f"checkpoint-{best}" / "trainer_state.json").read_text())
    assert (state["best_metric"], state["best_global_step"]) == (0.2 if metric == "wer" else 0.9, best)
    assert state["best_model_checkpoint"] == str(tmp_path / "run" / f"checkpoint-{best}")


def test_evaluate_leaves_the_random_generators_unchanged() -> None:
    trainer = make(t16(dropout=0.5), Noisy(8), eval_dataset=Noisy(8))
    before = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    trainer.evaluate()
    trainer.engine.evaluate()
    assert before == (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())


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
    thinned(itertools.product(SOURCES, (1, 4), LENGTHS), [("stream", 4, "steps"), ("loader", 1, "epochs")]),
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
KEPT = [RESUMES[6], RESUMES[9], RESUMES[10]]


@pytest.mark.parametrize(("source", "first", "second", "cut"), thinned(RESUMES, KEPT))
def test_resumed_run_is_the_native_run_to_the_bit(
    tmp_path: Path, source: str, first: Any, second: Any, cut: int
) -> None:
    check_resumed(tmp_path, source, first, second, cut, **({} if source == "map" else FIRST_STEPS))


@pytest.mark.processes
def test_worker_processes_change_no_numbers(tmp_path: Path) -> None:
    check_resumed(tmp_path, "map", HFTrainer, HFTrainer, 8, workers=2)


def check_resumed(
    folder: Path, source: str, first: Any, second: Any, cut: int, workers: int = 0, **options: Any
) -> None:
    expected = Straight.of(folder / "straight", source, **options)
    options = {**Straight.options, "save_dir": folder / "cut", "num_workers": workers, **options}
    feed(first, source, callbacks=[StopAt(cut)], **options)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(99)
    trainer = feed(second, source, "auto", **options)
    assert same(state_of(trainer), expected[0])
    assert (history_of(trainer), trainer.progress.position) == expected[1:]
    if first is second is HFTrainer:
        steps = [row["step"] for row in trainer.state.log_history if "loss" in row]
        assert steps == list(range(1, trainer.state.global_step + 1))


def test_random_draws_of_a_callback_do_not_reach_a_resume(tmp_path: Path) -> None:
    class Draws(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.rand(3)

    straight = feed(HFTrainer, "map", max_steps=3, callbacks=[Draws()])
    feed(HFTrainer, "map", max_steps=3, callbacks=[Draws(), StopAt(2)], save_dir=tmp_path)
    trainer = feed(HFTrainer, "map", "auto", max_steps=3, callbacks=[Draws()], save_dir=tmp_path)
    assert same(state_of(trainer), state_of(straight))


# --- stock checkpoints


class FirstState(TrainerCallback):
    """The state that a stock Trainer begins with."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step, self.epoch = state.global_step, state.epoch
        entries = kwargs["optimizer"].state_dict()["state"].values()
        self.moments = [entry["exp_avg"].clone() for entry in entries if entry]
        self.weights = weights(kwargs["model"])


def test_stock_trainer_resumes_from_our_checkpoint(arguments: Any, tmp_path: Path) -> None:
    options = {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2, "eval_strategy": "no"}
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


def test_checkpoint_has_pickles_only_for_a_stock_trainer(arguments: Any, tmp_path: Path) -> None:
    keyed(arguments("plain", max_steps=2))
    keyed(arguments("stock", max_steps=2), stock_checkpoints=True)
    keyed(kind=Trainer, eval_dataset=None, max_steps=2, save_dir=tmp_path / "native", save_steps=2)
    native, plain, stock = (
        {path.name for path in (tmp_path / run / "checkpoint-2").rglob("*") if path.is_file()}
        for run in ("native", "plain", "stock")
    )
    assert plain == native | {"trainer_state.json"}
    assert stock == plain | {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}


@pytest.fixture(scope="module")
def stopped_run(module_arguments: Any) -> Path:
    """The folder of a run of 6 steps that was stopped after 4, with files for a stock trainer."""
    args = module_arguments(max_steps=6)
    keyed(args, callbacks=[StopAt(4)], stock_checkpoints=True)
    return Path(args.output_dir)


@pytest.mark.parametrize(
    "file", thinned(["model.safetensors", "omnitrain.json", "trainer_state.json", "optimizer.pt"], ["optimizer.pt"])
)
def test_damaged_checkpoint_is_reported_and_skipped_by_auto(
    stopped_run: Path, arguments: Any, tmp_path: Path, file: str
) -> None:
    shutil.copytree(stopped_run, tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoint-4" / file
    damaged.write_bytes(damaged.read_bytes()[:20])
    args = arguments(max_steps=6)
    with pytest.raises(CheckpointError, match=file):
        keyed(args, tmp_path / "run" / "checkpoint-4")
    trace = Trace()
    keyed(args, "auto", callbacks=[trace])
    assert trace.events.count("step_end") == 4  # from step 2 on


def test_saving_the_best_only_keeps_the_best_and_the_last(arguments: Any, tmp_path: Path) -> None:
    scores = iter([0.5, 0.4, 0.9, 0.8, 0.7])
    args = arguments(save_strategy="best", metric_for_best_model="accuracy", load_best_model_at_end=True)
    keyed(args, compute_metrics=lambda _: {"accuracy": next(scores)}, sanity=False)
    assert steps_of(tmp_path / "run") == [2, 6, 10]


# --- signals


class Sends(Callback):
    """Sends the signal of the end to this process in the third step."""

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == 3:
            signal.raise_signal(signal.SIGTERM)


def test_signal_saves_and_sets_the_exit_code(tmp_path: Path) -> None:
    options = {"epochs": 1, "save_dir": tmp_path}
    with pytest.raises(SystemExit) as error:
        trained(t16(dropout=0.3), Noisy(22), callbacks=[Sends()], **options)
    assert error.value.code == 143 and steps_of(tmp_path) == [3]
    trainer = make(t16(dropout=0.3), Noisy(22), **options)
    trainer.train(resume_from="auto")
    assert same(state_of(trainer), state_of(trained(t16(dropout=0.3), Noisy(22), epochs=1)))


def test_signal_in_an_evaluation_leaves_it_to_the_resumed_run(tmp_path: Path) -> None:
    class Model(nn.Sequential):
        is_armed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_armed and not self.training:
                self.is_armed = False
                signal.raise_signal(signal.SIGINT)
            return super().forward(x)

    def build(is_armed: bool) -> Any:
        model = Model(*t16())
        model.is_armed = is_armed
        return make(model, rows(20), eval_dataset=rows(8), epochs=1, eval_steps=2, save_steps=2, save_dir=tmp_path)

    with pytest.raises(KeyboardInterrupt):
        build(True).train()
    metrics = build(False).train(resume_from="auto")
    assert [row["step"] for row in metrics["valid"]] == [2, 4, 5]
