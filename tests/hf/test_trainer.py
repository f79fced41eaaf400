"""transformers' loop in our hands. What all trainers share is in test_parity.py, whole models in test_real.py."""

from __future__ import annotations

import json
import logging
import math
import random
import signal
import sys
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
import torch
import torch.nn.functional as F
import transformers
from recipes import Keyed, KeyedModel, Noisy, Sentences, StopAt, Tagger, Trace, distance, rows, same, t16, weights
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from omnitrain import Algorithm, HFTrainer, LabelSmoothing, NonFiniteError, Trainer
from omnitrain.data.sampling import EpochSampler
from omnitrain.errors import CheckpointError, ConfigError
from omnitrain.hf.engine import Engine
from omnitrain.hf.trainer import NEVER_CALLED


def make(model: nn.Module, data: Any = None, args: Any = None, kind: Any = HFTrainer, **options: Any) -> Any:
    """A trainer for rows or sentences; without `args` the options are those of every trainer."""
    defaults: dict[str, Any] = {"progress_bar": False}
    if args is None:
        defaults |= {"log_steps": 1, "learning_rate": 0.05, "batch_size": 4}
    if isinstance(model, nn.Sequential):
        defaults["loss_fn"] = F.mse_loss
    if kind is Trainer:
        defaults["device"] = "cpu"
        return Trainer(model, data, **{**defaults, **options})
    return kind(model, args, data, **{**defaults, **options})


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    """Makes TrainingArguments: 20 rows in steps of 4, an evaluation and a checkpoint every other step."""

    def make(**options: Any) -> TrainingArguments:
        defaults = {
            "output_dir": str(tmp_path / "run"), "num_train_epochs": 2, "per_device_train_batch_size": 4,
            "learning_rate": 0.05, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
            "logging_steps": 2, "use_cpu": True, "report_to": "none", "seed": 3,
        }  # fmt: skip
        return TrainingArguments(**{**defaults, **options})

    return make


class InOrder(transformers.Trainer):
    """A stock Trainer that is given our order of samples."""

    def _get_train_sampler(self, *args: Any) -> Any:
        order = EpochSampler(20, 4, seed=self.args.seed)

        class Ours(torch.utils.data.Sampler):
            epoch = 0

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


# --- loud limits


@pytest.mark.parametrize("name", ["evaluation_loop", "get_batch_samples", "floating_point_ops", "_prepare_inputs"])
def test_a_subclass_that_overrides_what_only_transformers_has_is_told_where_to_put_it(name: str) -> None:
    with pytest.raises(TypeError, match=f"overrides {name} of transformers.Trainer.*engine_class"):
        type("Mine", (HFTrainer,), {name: lambda self, *args: None})


class Foreign(transformers.Trainer):
    """As a trainer of another library."""


@pytest.mark.parametrize(
    ("bases", "members"),
    [((HFTrainer, Foreign), {}), ((Foreign, HFTrainer), {}), ((HFTrainer,), {"engine_class": Foreign})],
    ids=["after", "before", "engine"],
)
def test_a_trainer_of_another_library_is_no_base_and_no_engine(bases: Any, members: Any) -> None:
    with pytest.raises(TypeError, match=r"Foreign is a transformers.Trainer with a loop of its own.*other.data_collat"):
        type("Mine", bases, members)


def test_a_subclass_may_have_methods_of_its_own() -> None:
    assert issubclass(type("Mine", (HFTrainer,), {"my_own": lambda self: None, "engine_class": Engine}), HFTrainer)


@pytest.mark.parametrize("name", NEVER_CALLED)
def test_a_hook_that_is_never_called_cannot_be_overridden(name: str) -> None:
    with pytest.raises(TypeError, match=f"Mine overrides {name}, which transformers' loop never calls. Use .* instead"):
        type("Mine", (HFTrainer,), {name: lambda self: None})


@pytest.mark.parametrize("name", ["_prepare_batch", "_forward", "_weigh", "_clip_gradients", "_autocast"])
def test_a_hook_that_may_be_overridden_is_called(name: str) -> None:
    calls = []

    def hook(self: Any, *args: Any) -> Any:
        calls.append(name)
        return getattr(HFTrainer, name)(self, *args)

    make(t16(), rows(8), kind=type("Mine", (HFTrainer,), {name: hook}), epochs=1).train()
    assert len(calls) == 2


def test_an_engine_of_the_users_own_has_its_steps_taken() -> None:
    calls = []

    class Mine(Engine):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("step")
            return super().training_step(*args, **kwargs)

    trainer = make(t16(), rows(8), kind=type("Own", (HFTrainer,), {"engine_class": Mine}), epochs=1)
    trainer.train()
    assert len(calls) == 2 and isinstance(trainer.engine, transformers.Trainer)


def test_the_engine_cannot_be_trained_past_the_trainer() -> None:
    trainer = make(t16(), rows(8), epochs=1)
    with pytest.raises(ConfigError, match=r"Call HFTrainer\.train\(\)"):
        trainer.engine.train()


# --- history of both kinds


def test_steps_and_history_are_those_of_a_stock_trainer_that_sees_the_same_samples(arguments: Any) -> None:
    options = {"weight_decay": 0.1, "warmup_steps": 3, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5}
    args = arguments(save_strategy="no", logging_steps=1, **options)
    stock = InOrder(KeyedModel(), args, train_dataset=Keyed(), eval_dataset=Keyed(8))
    stock.train()
    ours = make(KeyedModel(), Keyed(), args, eval_dataset=Keyed(8))
    ours.train()
    assert distance(weights(stock.model), weights(ours.model)) <= 1e-7
    before, now = stock.state.log_history, ours.engine.state.log_history
    assert len(now) == len(before) == 16
    apart = ("runtime", "per_second", "total_flos")
    for one, other in zip(now, before, strict=True):
        names = {name for name in other if not name.startswith("eval_") or name == "eval_loss"}
        assert names <= set(one)
        for name in names:
            if not name.endswith(apart):
                assert one[name] == pytest.approx(other[name], abs=1e-6), name


def test_our_history_is_that_of_the_native_trainer_without_what_transformers_adds() -> None:
    found = []
    for kind in (Trainer, HFTrainer):
        trainer = make(KeyedModel(), Keyed(), kind=kind, eval_dataset=Keyed(8), epochs=2, compute_metrics="mae")
        found.append(trainer.train().to_dict())
    assert found[0] == found[1]
    assert set(found[1]["valid"][0]) == {"epoch", "step", "eval_loss", "eval_mae"}


# --- transformers' callbacks


class Spy(TrainerCallback):
    """Writes down every event of transformers with the step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []


def _spying(name: str) -> Any:
    def note(self: Spy, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append((name, state.global_step))

    return note


for _name in vars(TrainerCallback):
    if _name.startswith("on_") and _name != "on_prediction_step":
        setattr(Spy, _name, _spying(_name))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_callbacks_of_transformers_hear_what_they_would_of_a_stock_trainer(arguments: Any, accumulation: int) -> None:
    seen = []
    for kind in (transformers.Trainer, HFTrainer):
        spy = Spy()
        # an interval that falls on the last step, and none on an epoch's end
        args = arguments(
            gradient_accumulation_steps=accumulation, max_steps=8, logging_steps=2, eval_steps=4, save_steps=4
        )
        kind(KeyedModel(), args, train_dataset=Keyed(), eval_dataset=Keyed(8), callbacks=[spy]).train()
        seen.append(spy.seen)
    assert seen[1] == seen[0]


class Asks(TrainerCallback):
    """Raises transformers' flags at chosen steps."""

    def __init__(self, **at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        for flag, step in self.at.items():
            if state.global_step == step:
                setattr(control, flag, True)
        return control


def test_flags_that_a_callback_raises_are_acted_on(arguments: Any, tmp_path: Path) -> None:
    rare = {"eval_steps": 100, "save_steps": 100, "logging_steps": 100}
    asks, trace = Asks(should_evaluate=2, should_save=3, should_log=4, should_training_stop=6), Trace()
    trainer = make(
        KeyedModel(), Keyed(), arguments(**rare), eval_dataset=Keyed(8), callbacks=[asks, trace], keep_best=0
    )
    metrics = trainer.train()
    assert [row["step"] for row in metrics["valid"]] == [2]
    assert [row["step"] for row in trace.logs] == [4, 6]  # the end of a run is logged
    assert (trainer.progress.step, metrics["stop_reason"]) == (6, "requested")
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [
        "checkpoint-3", "checkpoint-6",
    ]  # fmt: skip


def test_a_flag_that_ends_the_epoch_ends_it_and_not_the_run(arguments: Any) -> None:
    trainer = make(
        KeyedModel(), Keyed(), arguments(save_strategy="no", eval_strategy="no"), callbacks=[Asks(should_epoch_stop=2)]
    )
    metrics = trainer.train()
    assert [row["step"] for row in metrics["train_metrics_history"]] == [2, 7]


def test_a_stop_in_the_middle_of_a_step_waits_for_its_end(arguments: Any) -> None:
    class Stops(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop = state.global_step == 1
            return control

    args = arguments(save_strategy="no", eval_strategy="no", gradient_accumulation_steps=2)
    trainer = make(KeyedModel(), Keyed(), args, callbacks=[Stops()])
    metrics = trainer.train()
    assert (trainer.progress.step, trainer.progress.samples, metrics["stop_reason"]) == (2, 16, "requested")


def test_the_end_of_an_epoch_asked_for_in_the_middle_of_a_step_waits_for_its_end(arguments: Any) -> None:
    class Ends(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_epoch_stop = state.global_step == 1
            return control

    args = arguments(save_strategy="no", eval_strategy="no", gradient_accumulation_steps=2)
    trainer = make(KeyedModel(), Keyed(), args, callbacks=[Ends()])
    assert [row["step"] for row in trainer.train()["train_metrics_history"]] == [2, 5]


def test_a_save_that_a_callback_asks_for_is_one_of_ours_without_intervals_too(arguments: Any, tmp_path: Path) -> None:
    told: list[int] = []

    class Told(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            told.append(state.global_step)

    args = arguments(save_strategy="no", eval_strategy="no")
    straight = make(KeyedModel(), Keyed(), args, callbacks=[Asks(should_save=3), Told()])
    straight.train()
    assert told == [3] and straight.store is None
    (folder,) = (tmp_path / "run").glob("checkpoint-*")
    assert (folder / "omnitrain.json").exists()
    resumed = make(KeyedModel(), Keyed(), args)
    resumed.train(resume_from=folder)
    assert same(weights(resumed.model), weights(straight.model))


def test_without_intervals_of_checkpoints_nothing_but_what_is_asked_for_is_saved(
    arguments: Any, tmp_path: Path
) -> None:
    args = arguments(save_strategy="no", eval_strategy="steps", eval_steps=1, max_steps=4)
    metrics = make(KeyedModel(), Keyed(), args, eval_dataset=Keyed(4), callbacks=[Asks(should_save=2)]).train()
    assert len(metrics["valid"]) == 4
    assert [int(path.name.rpartition("-")[2]) for path in (tmp_path / "run").glob("checkpoint-*")] == [2]


def test_a_callback_of_transformers_may_be_given_as_a_class(arguments: Any) -> None:
    called = []

    class Mine(TrainerCallback):
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            called.append("end")

    make(KeyedModel(), Keyed(), arguments(max_steps=2), eval_dataset=Keyed(4), callbacks=[Mine]).train()
    assert called == ["end"]


def test_what_is_no_callback_is_refused(arguments: Any) -> None:
    with pytest.raises(ConfigError, match="callbacks of omnitrain or of transformers"):
        make(KeyedModel(), Keyed(), arguments(), callbacks=[print])


class Counts(TrainerCallback, transformers.trainer_callback.ExportableState):
    """Counts steps, and lets transformers keep the count."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


def test_what_a_callback_of_transformers_keeps_comes_back_to_the_same_object(arguments: Any) -> None:
    args = arguments(max_steps=6)
    make(KeyedModel(), Keyed(), args, eval_dataset=Keyed(4), callbacks=[Counts(), StopAt(4)]).train()
    counts = Counts()
    make(KeyedModel(), Keyed(), args, eval_dataset=Keyed(4), callbacks=[counts]).train(resume_from="auto")
    assert counts.count == 6


def test_the_history_of_transformers_goes_on_after_a_resume(arguments: Any) -> None:
    args = arguments(max_steps=6)
    make(KeyedModel(), Keyed(), args, eval_dataset=Keyed(4), callbacks=[StopAt(4)]).train()
    trainer = make(KeyedModel(), Keyed(), args, eval_dataset=Keyed(4))
    trainer.train(resume_from="auto")
    assert [row["step"] for row in trainer.engine.state.log_history if "loss" in row] == [2, 4, 6]


# --- early stopping


class Scores:
    """Gives an accuracy for each evaluation of a run; the next one is kept by the run's history."""

    def __init__(self, trainer_of: list[Any]) -> None:
        self.trainer_of = trainer_of

    def __call__(self, prediction: Any) -> dict[str, float]:
        scores = [0.5, 0.7, 0.6, 0.65, 0.69, 0.6, 0.9, 0.9, 0.9, 0.9]
        return {"accuracy": scores[len(self.trainer_of[0].metrics["valid"])]}


def stopping(args: Any, *callbacks: Any, **options: Any) -> Any:
    holder: list[Any] = []
    trainer = make(
        KeyedModel(), Keyed(), args, eval_dataset=Keyed(4), compute_metrics=Scores(holder),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3, early_stopping_threshold=0.001), *callbacks],
        **options,
    )  # fmt: skip
    holder.append(trainer)
    return trainer


def test_early_stopping_of_transformers_ends_the_run_in_the_right_direction(arguments: Any) -> None:
    args = arguments(num_train_epochs=9, load_best_model_at_end=True, metric_for_best_model="accuracy")
    trainer = stopping(args)
    metrics = trainer.train()
    assert (metrics["stop_reason"], metrics["best_step"], trainer.progress.step) == ("early_stopping", 4, 10)
    assert trainer.engine.state.best_metric == 0.7


@pytest.mark.parametrize("cut", [5, 6, 7, 8, 9])
def test_early_stopping_goes_on_counting_after_a_resume(arguments: Any, cut: int) -> None:
    options = {"num_train_epochs": 9, "load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    stopping(arguments(**options), StopAt(cut)).train()
    trainer = stopping(arguments(**options))
    metrics = trainer.train(resume_from="auto")
    assert (metrics["stop_reason"], metrics["best_step"], trainer.progress.step) == ("early_stopping", 4, 10)


# --- what transformers does by default, and we do not


@pytest.mark.parametrize(("metric", "best"), [("wer", 4), ("accuracy", 2)])
def test_the_best_checkpoint_is_the_best_by_the_metrics_own_direction(
    arguments: Any, tmp_path: Path, metric: str, best: int
) -> None:
    scores = iter([0.9, 0.2, 0.5, 0.5, 0.5])
    trainer = make(
        KeyedModel(), Keyed(), arguments(load_best_model_at_end=True, metric_for_best_model=metric, save_total_limit=1),
        eval_dataset=Keyed(4), compute_metrics=lambda _: {metric: next(scores)}, sanity=False,
    )  # fmt: skip
    metrics = trainer.train()
    assert metrics["best_step"] == best and metrics["best_checkpoint"] == f"checkpoint-{best}"
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {
        f"checkpoint-{best}", "checkpoint-10",
    }  # fmt: skip
    kept = trainer.store.resolve("best")[0] / "model.safetensors"
    from safetensors.torch import load_file

    assert same(load_file(kept).values(), dict(sorted(trainer.model.state_dict().items())).values())


def bad_rows(kind: str) -> Any:
    data = rows(20)
    data.tensors[1][7] = math.nan if kind == "nan" else math.inf
    return data


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_loss_that_is_not_finite_ends_the_run_before_it_touches_the_weights(kind: str) -> None:
    position = list(EpochSampler(20, 4).order(0)).index(7) // 4 + 1
    model = t16()
    trainer = make(model, bad_rows(kind), epochs=1)
    with pytest.raises(NonFiniteError, match=f"step {position}"):
        trainer.train()
    assert all(bool(tensor.isfinite().all()) for tensor in weights(model))
    assert trainer.progress.step == position - 1


def test_skipping_a_step_that_is_not_finite_is_what_the_native_trainer_does() -> None:
    found = []
    for kind in (Trainer, HFTrainer):
        trainer = make(t16(), bad_rows("nan"), kind=kind, epochs=2, on_nonfinite="skip", lr_scheduler="linear")
        metrics = trainer.train()
        losses = [row["train_loss"] for row in metrics["train_metrics_history"]]
        found.append((losses, trainer.progress.step, trainer.progress.skipped_steps, weights(trainer.model)))
    assert found[0][:3] == found[1][:3] and found[0][2] == 2
    assert same(found[0][3], found[1][3])


def test_warning_of_a_step_that_is_not_finite_lets_the_run_go_on(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(t16(), bad_rows("nan"), epochs=1, on_nonfinite="warn")
    with caplog.at_level(logging.WARNING, "omnitrain"):
        trainer.train()
    assert "not finite" in caplog.text and trainer.progress.step == 5
    assert any(math.isnan(row["loss"]) for row in trainer.engine.state.log_history if "loss" in row)


class Outputs(nn.Module):
    """Keeps weak references to what it has put out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 20_000)  # small ones are looked at several at a time
        self.refs: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layer(x)
        self.refs = [ref for ref in self.refs if ref() is not None]
        self.refs.append(weakref.ref(output))
        self.most = max(self.most, len(self.refs))
        return output


def test_an_evaluation_with_metrics_by_name_keeps_no_predictions() -> None:
    model = Outputs()
    data = torch.utils.data.TensorDataset(rows(60, torch.float32).tensors[0], torch.arange(60) % 3)
    trainer = make(
        model, data, eval_dataset=data, loss_fn=F.cross_entropy, compute_metrics=["accuracy"],
        eval_batch_size=1, epochs=1,
    )  # fmt: skip
    metrics = trainer.evaluate()
    assert set(metrics) == {"eval_loss", "eval_accuracy"}
    assert model.most <= 3


def test_an_evaluation_draws_nothing_from_the_random_numbers_of_the_program() -> None:
    trainer = make(t16(dropout=0.5), Noisy(8), eval_dataset=Noisy(8))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    trainer.evaluate()
    trainer.engine.evaluate()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


# --- data of other kinds


class Stream(IterableDataset[Any]):
    def __init__(self, size: int = 22) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*rows(self.size).tensors, strict=True)


KINDS: dict[str, Any] = {
    "stream": lambda: {"train_dataset": Stream()},
    "loader": lambda: {"train_loader": DataLoader(rows(22), batch_size=4)},
    "map": lambda: {"train_dataset": Noisy(22)},
}


def feed(kind: Any, source: str, **options: Any) -> Any:
    defaults: dict[str, Any] = {"loss_fn": F.mse_loss, "learning_rate": 0.05, "progress_bar": False, "log_steps": 1}
    if kind is Trainer:
        defaults["device"] = "cpu"
    if source != "loader":
        defaults["batch_size"] = 4
    return kind(t16(dropout=0.3), **KINDS[source](), **{**defaults, **options})


@pytest.mark.parametrize("options", [{"epochs": 2}, {"epochs": None, "max_steps": 7}], ids=["epochs", "steps"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("source", KINDS)
def test_data_of_any_kind_is_trained_on_as_by_the_native_trainer(
    source: str, accumulation: int, options: dict[str, Any]
) -> None:
    found = []
    for kind in (Trainer, HFTrainer):
        trace = Trace()
        trainer = feed(kind, source, gradient_accumulation_steps=accumulation, callbacks=[trace], **options)
        metrics = trainer.train()
        history = [(row["epoch"], row["step"], row["train_loss"]) for row in metrics["train_metrics_history"]]
        found.append((trace.events, [row["loss"] for row in trace.logs], history, metrics["stop_reason"], trainer))
    assert found[0][:4] == found[1][:4]
    assert same(state_of(found[0][4]), state_of(found[1][4]))


def test_worker_processes_change_nothing() -> None:
    found = [feed(HFTrainer, "map", epochs=1, num_workers=workers) for workers in (0, 2)]
    for trainer in found:
        trainer.train()
    assert same(*(weights(trainer.model) for trainer in found))


@pytest.mark.parametrize(
    "options",
    [
        {"autocast": "bf16"},
        {"grad_reduction": "sum"},
        {"max_grad_norm": None},
        {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "learning_rate": 2e-5},
        {"lr_scheduler": "cosine", "scheduler_interval": "epoch"},
        {"lr_scheduler": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0), "eval_steps": 1},
        {"eval_on_start": True, "eval_steps": 2},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_of_every_trainer_do_what_they_do_to_the_native_one(options: dict[str, Any]) -> None:
    found = []
    for kind in (Trainer, HFTrainer):
        trace = Trace()
        trainer = make(
            t16(dtype=torch.float32), rows(22, torch.float32), kind=kind, epochs=2, callbacks=[trace],
            eval_dataset=rows(7, torch.float32), gradient_accumulation_steps=2, **options,
        )  # fmt: skip
        trainer.train()
        found.append((trace.events, [(row["loss"], row["learning_rate"]) for row in trace.logs], trainer))
    assert found[0][:2] == found[1][:2]
    assert same(state_of(found[0][2]), state_of(found[1][2]))


def test_bf16_of_the_training_arguments_is_our_autocast(arguments: Any) -> None:
    native = make(KeyedModel(), Keyed(), kind=Trainer, autocast="bf16", epochs=2, seed=3, lr_scheduler="linear")
    native.train()
    ours = make(KeyedModel(), Keyed(), arguments(bf16=True, save_strategy="no", eval_strategy="no"))
    ours.train()
    assert distance(weights(native.model), weights(ours.model)) <= 1e-7


def test_half_precision_on_a_processor_is_refused_naming_the_other(arguments: Any) -> None:
    with pytest.raises(ConfigError, match="bf16"):
        make(t16(), rows(8), autocast="fp16")
    with pytest.raises(ConfigError, match=r"`training_args.fp16=True` is not available.*`bf16=True`"):
        make(t16(), rows(8), arguments(fp16=True))


class Shift(Algorithm):
    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]

    def transform_loss(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * 2


def test_algorithms_change_batches_and_losses_as_in_the_native_trainer() -> None:
    found = []
    for kind in (Trainer, HFTrainer):
        trainer = make(t16(), rows(20), kind=kind, epochs=2, algorithms=[Shift()])
        trainer.train()
        found.append(weights(trainer.model))
    assert same(*found)


def test_label_smoothing_is_an_algorithm_here() -> None:
    data = torch.utils.data.TensorDataset(rows(24, torch.float32).tensors[0], torch.arange(24) % 3)
    found = []
    for kind in (Trainer, HFTrainer):
        torch.manual_seed(0)
        trainer = make(
            nn.Sequential(nn.Linear(4, 3)), data, kind=kind, epochs=1, loss_fn=F.cross_entropy,
            algorithms=[LabelSmoothing(3, 0.1)],
        )  # fmt: skip
        trainer.train()
        found.append(weights(trainer.model))
    assert same(*found)


def test_a_unit_of_the_users_own_counts_its_targets() -> None:
    found = []
    for batch, accumulation in ((8, 1), (2, 4)):
        model = Tagger()

        def unit(one: Any, model: nn.Module = model) -> tuple[torch.Tensor, torch.Tensor]:
            kept = one["labels"] != -100
            logits = model.out(model.embed(one["ids"]))
            return F.cross_entropy(logits[kept], one["labels"][kept], reduction="sum"), kept.sum()

        make(
            model, Sentences(16), unit=unit, batch_size=batch, gradient_accumulation_steps=accumulation, epochs=2
        ).train()
        found.append(weights(model))
    assert distance(*found) <= 1e-12


def test_a_loss_function_of_transformers_kind_is_called_with_its_arguments(arguments: Any) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return F.l1_loss(outputs["logits"] if isinstance(outputs, dict) else outputs, labels)

    args = arguments(save_strategy="no", eval_strategy="no", max_steps=3)
    by_function = make(KeyedModel(), Keyed(), args, compute_loss_func=loss)
    by_function.train()
    plain = make(KeyedModel(), Keyed(), args)
    plain.train()
    assert distance(weights(by_function.model), weights(plain.model)) > 1e-4


def test_a_second_training_starts_counting_anew_from_the_present_weights() -> None:
    found = []
    for kind in (Trainer, HFTrainer):
        trainer = make(t16(), rows(20), kind=kind, epochs=1, lr_scheduler="linear")
        trainer.train()
        metrics = trainer.train()
        found.append((trainer.progress.step, len(metrics["train_metrics_history"]), weights(trainer.model)))
    assert found[0][:2] == found[1][:2] == (5, 1)
    assert same(found[0][2], found[1][2])


# --- calls


def test_a_second_training_has_the_optimizer_that_the_arguments_name(arguments: Any) -> None:
    args = arguments(optim="sgd", save_strategy="no", eval_strategy="no", weight_decay=0.1)
    trainer = make(KeyedModel(), Keyed(), args)
    groups = []
    for _ in range(2):
        trainer.train()
        groups.append([(group["weight_decay"], len(group["params"])) for group in trainer.optimizer.param_groups])
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert groups == [[(0.1, 2), (0.0, 2)]] * 2


def test_named_sets_are_evaluated_each_and_one_of_them_selects(arguments: Any) -> None:
    sets = {"dev": Keyed(8), "web": Keyed(5)}
    args = arguments(load_best_model_at_end=True, metric_for_best_model="dev_mae")
    trainer = make(KeyedModel(), Keyed(), args, eval_dataset=sets, compute_metrics="mae")
    row = trainer.train()["best_valid"]
    names = {"eval_loss", "eval_mae", "eval_dev_loss", "eval_dev_mae", "eval_web_loss", "eval_web_mae"}
    assert set(row) == names | {"epoch", "step"} and trainer.objective.direction == "min"
    assert trainer.evaluate(sets).keys() == names
    assert any(names <= set(row) for row in trainer.engine.state.log_history)


def test_evaluations_tests_and_predictions_are_those_of_the_native_trainer(tmp_path: Path) -> None:
    found: list[Any] = []
    for kind in (Trainer, HFTrainer):
        trainer = make(
            KeyedModel(), Keyed(), kind=kind, eval_dataset=Keyed(7), test_dataset=Keyed(9), compute_metrics="mae",
            save_dir=tmp_path / kind.__name__, epochs=1, eval_batch_size=3,
        )  # fmt: skip
        trainer.train()
        predictions = trainer.predict(Keyed(5))
        found.append((trainer.evaluate(), trainer.evaluate(Keyed(5), prefix="held"), trainer.test(), predictions[2]))
        found[-1] += (predictions[0].tolist(), predictions[1].tolist(), trainer.metrics["test"])
    assert found[0] == found[1]
    assert found[1][1].keys() == {"held_loss", "held_mae"}


def test_metrics_and_model_are_written_where_they_are_asked_for(arguments: Any, tmp_path: Path) -> None:
    trainer = make(KeyedModel(), Keyed(), arguments(save_strategy="no"), eval_dataset=Keyed(4))
    results = trainer.evaluate(Keyed(6), prefix="test")
    assert trainer.save_metrics("test", results) == tmp_path / "run" / "test_results.json"
    assert json.loads((tmp_path / "run" / "test_results.json").read_text()) == results
    folder = trainer.save_model(tmp_path / "final")
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "training_args.bin"]
    with pytest.raises(Exception, match="overwrite=True"):
        trainer.save_model(tmp_path / "final", overwrite=False)


# --- checkpoints


class Straight:
    """The native run that no cut may change: 6 steps an epoch, random rows, dropout."""

    options: dict[str, Any] = {  # noqa: RUF012
        "epochs": 3, "save_steps": 2, "load_best_at_end": False, "lr_scheduler": "cosine", "warmup_steps": 2,
    }  # fmt: skip
    found: dict[Any, Any] = {}  # noqa: RUF012

    @classmethod
    def of(cls, folder: Path, source: str, **options: Any) -> Any:
        key = (source, *sorted(options.items()))
        if key not in cls.found:
            trainer = feed(Trainer, source, save_dir=folder, **{**cls.options, **options})
            trainer.train()
            history = [
                (row["epoch"], row["step"], row["train_loss"]) for row in trainer.metrics["train_metrics_history"]
            ]
            cls.found[key] = state_of(trainer), history, trainer.progress.position
        return cls.found[key]


def disturb() -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(99)


def resumed(folder: Path, source: str, kinds: tuple[Any, Any], cut: int, **options: Any) -> Any:
    options = {**Straight.options, "save_dir": folder / "cut", **options}
    feed(kinds[0], source, callbacks=[StopAt(cut)], **options).train()
    disturb()
    trainer = feed(kinds[1], source, **options)
    trainer.train(resume_from="auto")
    history = [(row["epoch"], row["step"], row["train_loss"]) for row in trainer.metrics["train_metrics_history"]]
    return state_of(trainer), history, trainer.progress.position


def check_resumed(folder: Path, source: str, kinds: tuple[Any, Any], cut: int, **options: Any) -> None:
    expected = Straight.of(folder / "straight", source, **options)
    found = resumed(folder, source, kinds, cut, **options)
    assert same(found[0], expected[0])
    assert found[1:] == expected[1:]


@pytest.mark.parametrize("cut", [1, 5, 6, 7, 12, 17])
def test_a_run_that_is_cut_anywhere_and_resumed_is_the_native_run_to_the_bit(tmp_path: Path, cut: int) -> None:
    check_resumed(tmp_path, "map", (HFTrainer, HFTrainer), cut)


@pytest.mark.parametrize("kinds", [(Trainer, HFTrainer), (HFTrainer, Trainer)], ids=["from native", "to native"])
@pytest.mark.parametrize("cut", [4, 6])
def test_a_run_goes_on_with_another_trainer_as_if_nothing_had_happened(tmp_path: Path, kinds: Any, cut: int) -> None:
    check_resumed(tmp_path, "map", kinds, cut)


@pytest.mark.parametrize("source", ["stream", "loader"])
@pytest.mark.parametrize("cut", [2, 3])
def test_streams_and_loaders_are_resumed_in_the_middle_too(tmp_path: Path, source: str, cut: int) -> None:
    check_resumed(tmp_path, source, (HFTrainer, HFTrainer), cut, gradient_accumulation_steps=3, warmup_steps=0,
                  lr_scheduler=None, save_steps=1)  # fmt: skip


def test_what_a_callback_of_transformers_draws_at_the_start_does_not_reach_a_resumed_run(tmp_path: Path) -> None:
    class Draws(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.rand(3)

    straight = feed(HFTrainer, "map", epochs=2, callbacks=[Draws()])
    straight.train()
    feed(HFTrainer, "map", epochs=2, callbacks=[Draws(), StopAt(4)], save_dir=tmp_path).train()
    trainer = feed(HFTrainer, "map", epochs=2, callbacks=[Draws()], save_dir=tmp_path)
    trainer.train(resume_from="auto")
    assert same(state_of(trainer), state_of(straight))


def test_transformers_is_told_the_step_of_a_resumed_stream(tmp_path: Path) -> None:
    options = {"epochs": 2, "save_dir": tmp_path, "load_best_at_end": None}
    feed(HFTrainer, "stream", callbacks=[StopAt(8)], **options).train()
    trainer = feed(HFTrainer, "stream", **options)
    trainer.train(resume_from="auto")
    steps = [row["step"] for row in trainer.engine.state.log_history if "loss" in row]
    assert steps == list(range(1, 13)) and trainer.engine.state.global_step == 12


def test_workers_read_on_from_where_the_run_was_cut(tmp_path: Path) -> None:
    options = {"num_workers": 2}
    expected = Straight.of(tmp_path / "straight", "map")
    assert same(resumed(tmp_path, "map", (HFTrainer, HFTrainer), 8, **options)[0], expected[0])


class Looks(TrainerCallback):
    """What a stock Trainer begins with."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step, self.epoch = state.global_step, state.epoch
        self.moments = [
            value["exp_avg"].clone() for value in kwargs["optimizer"].state_dict()["state"].values() if value
        ]
        self.rate = kwargs["lr_scheduler"].get_last_lr()
        self.weights = weights(kwargs["model"])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_stock_trainer_goes_on_from_our_checkpoint_to_the_same_end(
    arguments: Any, tmp_path: Path, decay: float
) -> None:
    options = {"weight_decay": decay, "lr_scheduler_type": "cosine", "warmup_steps": 2, "eval_strategy": "no"}
    ours = make(KeyedModel(), Keyed(), arguments(**options), stock_checkpoints=True)
    ours.train()
    looks = Looks()
    in_place = {**options, "output_dir": str(tmp_path / "stock")}
    stock = InOrder(KeyedModel(), arguments(**in_place), train_dataset=Keyed(), callbacks=[looks])
    order = EpochSampler(20, 4, seed=3)
    stock._get_train_sampler = lambda *_: [int(i) for i in order.order(1)]  # type: ignore[method-assign]
    stock.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))
    assert looks.step == 6 and looks.epoch == pytest.approx(1.2)
    halfway = make(KeyedModel(), Keyed(), arguments(**options))
    halfway.load_checkpoint(tmp_path / "run" / "checkpoint-6")
    assert same(looks.weights, weights(halfway.model))
    total = sum(float(moment.double().sum()) for moment in looks.moments)
    kept = [value["exp_avg"] for value in halfway.optimizer.state_dict()["state"].values()]
    assert total == pytest.approx(sum(float(moment.double().sum()) for moment in kept), abs=1e-12)
    assert distance(weights(stock.model), weights(ours.model)) <= 1e-7


def test_a_stock_trainer_finds_the_moments_of_each_parameter_in_a_run_without_its_arguments(tmp_path: Path) -> None:
    ours = make(
        KeyedModel(),
        Keyed(),
        epochs=2,
        save_dir=tmp_path / "run",
        save_steps=3,
        max_grad_norm=1.0,
        stock_checkpoints=True,
    )
    ours.train()
    args = TrainingArguments(
        str(tmp_path / "stock"), num_train_epochs=2, per_device_train_batch_size=4, learning_rate=0.05, use_cpu=True,
        lr_scheduler_type="constant", report_to="none", save_strategy="no",
    )  # fmt: skip
    order = EpochSampler(20, 4)

    class Rest(transformers.Trainer):
        epochs = iter((0, 1))

        def _get_train_sampler(self, *args: Any) -> Any:
            class Ours(torch.utils.data.Sampler):
                def __len__(self) -> int:
                    return 20

                def __iter__(self) -> Iterator[int]:
                    return iter(map(int, order.order(next(Rest.epochs))))

            return Ours()

    stock = Rest(KeyedModel(), args, train_dataset=Keyed())
    stock.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert stock.state.global_step == 10
    assert distance(weights(stock.model), weights(ours.model)) <= 1e-7


@pytest.mark.parametrize("stock", [False, True])
def test_a_checkpoint_holds_the_files_of_every_trainer_and_pickles_only_for_a_stock_one(
    arguments: Any, tmp_path: Path, stock: bool
) -> None:
    make(KeyedModel(), Keyed(), arguments(max_steps=2), eval_dataset=Keyed(4), stock_checkpoints=stock).train()
    make(KeyedModel(), Keyed(), kind=Trainer, max_steps=2, save_dir=tmp_path / "native", save_steps=2).train()
    names, sizes = [], []
    for run in ("run", "native"):
        (folder,) = (tmp_path / run).glob("checkpoint-*")
        found = [path for path in folder.rglob("*") if path.is_file()]
        names.append({path.relative_to(folder).as_posix() for path in found})
        sizes.append(sum(path.stat().st_size for path in found if "json" not in path.suffix))
    theirs = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"} if stock else set()
    assert names[0] - names[1] == theirs | {"trainer_state.json"} and not names[1] - names[0]
    assert (sizes[0] == sizes[1]) is not stock


def test_files_for_a_stock_trainer_need_a_place_and_what_to_go_on_from(arguments: Any) -> None:
    for options, words in (
        ({"stock_checkpoints": "yes"}, "True or False"),
        ({"stock_checkpoints": True}, "needs a place"),
        ({"stock_checkpoints": True, "save_dir": "run", "save_only_model": True}, "contradicts"),
    ):
        with pytest.raises(ConfigError, match=f"stock_checkpoints.*{words}"):
            make(KeyedModel(), Keyed(), **options)


def test_what_transformers_pickles_is_never_read_back(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(max_steps=6)
    make(KeyedModel(), Keyed(), args, eval_dataset=Keyed(4), callbacks=[StopAt(4)], stock_checkpoints=True).train()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("unpickled")

    monkeypatch.setattr(torch, "load", refuse)
    trainer = make(KeyedModel(), Keyed(), args, eval_dataset=Keyed(4))
    trainer.train(resume_from="auto")
    assert trainer.progress.step == 6


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer/state.safetensors", "omnitrain.json", "trainer_state.json", "optimizer.pt"]
)
def test_a_damaged_checkpoint_is_refused_by_name_and_passed_over_by_auto(
    arguments: Any, tmp_path: Path, file: str
) -> None:
    args = arguments(max_steps=6)
    make(KeyedModel(), Keyed(), args, eval_dataset=Keyed(4), callbacks=[StopAt(4)], stock_checkpoints=True).train()
    damaged = tmp_path / "run" / "checkpoint-4" / file
    damaged.write_bytes(damaged.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=file.split("/")[-1]):
        make(KeyedModel(), Keyed(), args, eval_dataset=Keyed(4)).train(resume_from=damaged.parents[file.count("/")])
    trace = Trace()
    make(KeyedModel(), Keyed(), args, eval_dataset=Keyed(4), callbacks=[trace]).train(resume_from="auto")
    assert trace.events.count("step_end") == 4  # from step 2 on


def test_other_settings_are_refused_naming_both_values(arguments: Any) -> None:
    make(KeyedModel(), Keyed(), arguments(max_steps=4), eval_dataset=Keyed(4)).train()
    with pytest.raises(CheckpointError, match=r"learning_rate: 0\.05 -> 0\.5"):
        make(KeyedModel(), Keyed(), arguments(max_steps=6, learning_rate=0.5), eval_dataset=Keyed(4)).train("auto")


def test_saving_the_best_only_keeps_the_best_and_the_last(arguments: Any, tmp_path: Path) -> None:
    scores = iter([0.5, 0.4, 0.9, 0.8, 0.7])
    args = arguments(save_strategy="best", metric_for_best_model="accuracy", load_best_model_at_end=True)
    metrics = {"compute_metrics": lambda _: {"accuracy": next(scores)}, "sanity": False}
    make(KeyedModel(), Keyed(), args, eval_dataset=Keyed(4), **metrics).train()
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [
        "checkpoint-10", "checkpoint-2", "checkpoint-6",
    ]  # fmt: skip


def test_transformers_state_in_a_checkpoint_knows_the_best_one(arguments: Any, tmp_path: Path) -> None:
    scores = iter([0.5, 0.9, 0.4, 0.3, 0.2])
    args = arguments(metric_for_best_model="accuracy", load_best_model_at_end=True)
    metrics = {"compute_metrics": lambda _: {"accuracy": next(scores)}, "sanity": False}
    make(KeyedModel(), Keyed(), args, eval_dataset=Keyed(4), **metrics).train()
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
        if trainer.progress.step == 3 and len(sys.argv) > 2:
            os.kill(os.getpid(), int(sys.argv[2]))

trainer = HFTrainer(t16(dropout=0.3), None, Noisy(22), loss_fn=F.mse_loss, learning_rate=0.05, batch_size=4,
                    epochs=2, save_dir=sys.argv[1], progress_bar=False, callbacks=[Send()])
trainer.train(resume_from="auto")
torch.save(trainer.model.state_dict(), sys.argv[1] + "/end.pt")
"""


def test_a_signal_saves_and_ends_the_program_with_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    environment = {"PYTHONPATH": ":".join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1])])}

    def play(folder: str, *more: str) -> int:
        import os

        command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / folder), *more]
        return programs.run(*command, env={**os.environ, **environment}).returncode

    assert play("cut", str(int(signal.SIGTERM))) in (143, -signal.SIGTERM)
    assert [path.name for path in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-3"]
    trainer = make(t16(dropout=0.3), Noisy(22), epochs=2, save_dir=tmp_path / "cut", log_steps=10)
    trainer.train(resume_from="auto")
    straight = make(t16(dropout=0.3), Noisy(22), epochs=2)
    straight.train()
    assert same(state_of(trainer), state_of(straight))


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_in_an_evaluation_leaves_it_to_the_resumed_run(
    tmp_path: Path, number: signal.Signals, error: type[BaseException]
) -> None:
    class Sends(nn.Sequential):
        is_armed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_armed and not self.training:
                self.is_armed = False
                signal.raise_signal(number)
            return super().forward(x)

    def build(armed: bool) -> Any:
        torch.manual_seed(0)
        model = Sends(*t16())
        model.is_armed = armed
        return make(model, rows(20), eval_dataset=rows(8), epochs=1, eval_steps=2, save_steps=2, save_dir=tmp_path)

    with pytest.raises(error):
        build(True).train()
    trainer = build(False)
    metrics = trainer.train(resume_from="auto")
    assert [row["step"] for row in metrics["valid"]] == [2, 4, 5]
