"""HFTrainer's loop. What all trainers share is in test_parity.py, real models are in test_real.py."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from recipes import Keyed, KeyedModel, Noisy, StopAt, callback, distance, fit, rows, same, setting, t16, weights
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

from omnitrain import HFTrainer, Trainer
from omnitrain.checkpoint.manifest import MANIFEST
from omnitrain.core.errors import ConfigError
from omnitrain.hf.engine import Engine
from omnitrain.hf.trainer import NEVER_CALLED

DEFAULTS = {
    "num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 0.05, "eval_strategy": "steps",
    "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "logging_steps": 2, "seed": 3,
}  # fmt: skip
"""20 rows in steps of 4, an evaluation and a checkpoint every other step."""
IN_ORDER = {"train_sampling_strategy": "sequential"}
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
    return fit(make(*args, **options))


def keyed(args: Any = None, resume_from: Any = None, **options: Any) -> Any:
    """A trainer of rows by name, with 4 of them to evaluate on, after its run."""
    return fit(make(KeyedModel(), Keyed(), args, **{"eval_dataset": Keyed(4), **options}), resume_from=resume_from)


def state_of(trainer: Any) -> list[torch.Tensor]:
    """Weights and moments."""
    return weights(trainer.get_model()) + [
        entry[key].clone() for entry in trainer.optimizer.state_dict()["state"].values() for key in sorted(entry)
    ]


def steps_of(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder."""
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))


class Foreign(transformers.Trainer):
    """As a trainer of another library."""


MIXIN = type("Mixin", (), {"_save_checkpoint": transformers.Trainer._save_checkpoint})
FOREIGN = r"Foreign is a transformers.Trainer with its own loop.*other.data_collat"


@pytest.mark.parametrize(("bases", "members", "message"), [
    *[
        ((HFTrainer,), {name: lambda self, *args: None}, f"overrides {name} of transformers.Trainer.*engine_class")
        for name in ("evaluation_loop", "get_batch_samples", "floating_point_ops", "_wrap_model")
    ],
    *[
        ((HFTrainer,), {name: lambda self: None}, f"{name}, which transformers' loop never calls. Use .* instead")
        for name in NEVER_CALLED
    ],
    ((MIXIN, HFTrainer), {}, "_save_checkpoint, which .* never calls. Use a callback's on_save, for more files"),
    ((HFTrainer, Foreign), {}, FOREIGN), ((Foreign, HFTrainer), {}, FOREIGN),
    ((HFTrainer,), {"engine_class": Foreign}, FOREIGN),
])  # fmt: skip
def test_subclass_rejects_members_that_are_not_called(bases: Any, members: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        type("Mine", bases, members)


class CountsSteps(Engine):
    steps = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().training_step(*args, **kwargs)


def test_engine_class_takes_the_steps() -> None:
    subclass = type("Own", (HFTrainer,), {"engine_class": CountsSteps, "my_own": lambda self: None})
    trainer = trained(t16(), rows(8), kind=subclass, epochs=1)
    assert trainer.engine.steps == 2 and isinstance(trainer.engine, transformers.Trainer)
    with pytest.raises(ConfigError, match=r"Call HFTrainer\.train\(\)"):
        trainer.engine.train()


def test_history_is_that_of_a_stock_trainer(arguments: Any) -> None:
    """Also the steps, where it sees the same samples."""
    options = {"weight_decay": 0.1, "warmup_steps": 3, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5}
    args = arguments(save_strategy="no", logging_steps=1, **IN_ORDER, **options)
    stock = fit(transformers.Trainer(KeyedModel(), args, train_dataset=Keyed(), eval_dataset=Keyed(8)))
    trainer = keyed(args, eval_dataset=Keyed(8))
    assert distance(weights(stock.model), weights(trainer.model)) <= 1e-7
    assert len(trainer.state.log_history) == len(stock.state.log_history) == 16
    for row, expected in zip(trainer.state.log_history, stock.state.log_history, strict=True):
        measured = ("runtime", "per_second", "total_flos")
        expected = {name: value for name, value in expected.items() if not name.endswith(measured)}
        assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("event", "flag", "accumulation", "steps", "reason"), [
    ("on_step_end", "should_epoch_stop", 1, [2, 7], "epochs"),
    ("on_substep_end", "should_epoch_stop", 2, [2, 5], "epochs"),
    ("on_substep_end", "should_training_stop", 2, [2], "requested"),
])  # fmt: skip
def test_stop_flags_wait_for_the_end_of_a_step(
    arguments: Any, event: str, flag: str, accumulation: int, steps: list[int], reason: str
) -> None:
    """Set after the second step, or in its middle."""
    stops = setting(TrainerCallback, event, flag, step=2 if event == "on_step_end" else 1)
    trainer = keyed(arguments(**TRAIN_ONLY, gradient_accumulation_steps=accumulation), callbacks=[stops])
    assert [row["step"] for row in trainer.metrics["train_metrics_history"]] == steps
    assert (trainer.stop_reason, trainer.progress.step) == (reason, steps[-1])
    if reason == "requested":
        assert trainer.progress.samples == 16


def test_save_flag_writes_a_full_checkpoint_without_intervals(arguments: Any, tmp_path: Path) -> None:
    steps: list[int] = []
    saves = callback(TrainerCallback, on_save=lambda args, state, *_, **__: steps.append(state.global_step))
    sets = setting(TrainerCallback, "on_step_end", "should_save", step=3)
    args = arguments(save_strategy="no", eval_steps=1, max_steps=6)
    straight = keyed(args, callbacks=[sets, type(saves)])  # an instance, and a class
    assert steps == steps_of(tmp_path / "run") == [3] and straight.store is None
    assert len(straight.metrics["valid"]) == 6
    resumed = keyed(args, resume_from=tmp_path / "run" / "checkpoint-3")
    assert same(weights(resumed.model), weights(straight.model))


@pytest.mark.parametrize(("metric", "scores", "fields", "steps"), [
    ("wer", [0.9, 0.2, 0.5, 0.5, 0.5], {"save_total_limit": 1}, [4, 10]),
    ("accuracy", [0.5, 0.4, 0.9, 0.8, 0.7], {"save_strategy": "best"}, [2, 6, 10]),  # the best only, and the last
])  # fmt: skip
def test_best_checkpoint_goes_by_the_direction_of_its_metric(
    arguments: Any, tmp_path: Path, metric: str, scores: list[float], fields: dict[str, Any], steps: list[int]
) -> None:
    values = iter(scores)
    args = arguments(load_best_model_at_end=True, metric_for_best_model=metric, **fields)
    trainer = keyed(args, compute_metrics=lambda _: {metric: next(values)}, sanity=False)
    best, folder = steps[-2], tmp_path / "run" / f"checkpoint-{steps[-2]}"
    assert (trainer.metrics["best_step"], trainer.metrics["best_checkpoint"]) == (best, folder.name)
    assert steps_of(tmp_path / "run") == steps
    saved = load_file(trainer.store.resolve("best")[0] / "model.safetensors")
    assert same(saved.values(), dict(sorted(trainer.model.state_dict().items())).values())
    state = json.loads((folder / "trainer_state.json").read_text())
    assert (state["best_metric"], state["best_global_step"]) == (scores[best // 2 - 1], best)
    assert state["best_model_checkpoint"] == str(folder)


def test_second_train_starts_over_with_the_present_weights(arguments: Any) -> None:
    options = {"epochs": 1, "lr_scheduler": "linear"}
    native, trainer = (fit(trained(t16(), rows(20), kind=kind, **options)) for kind in (Trainer, HFTrainer))
    assert trainer.progress.step == 5 and len(trainer.metrics["train_metrics_history"]) == 1
    assert same(weights(native.model), weights(trainer.model))
    trainer = make(KeyedModel(), Keyed(), arguments(optim="sgd", weight_decay=0.1, max_steps=2, **TRAIN_ONLY))
    for _ in range(2):
        trainer.train()
        assert isinstance(trainer.optimizer, torch.optim.SGD)
        groups = [(group["weight_decay"], len(group["params"])) for group in trainer.optimizer.param_groups]
        assert groups == [(0.1, 2), (0.0, 2)]


def test_resumed_run_does_not_read_its_checkpoint_again(tmp_path: Path) -> None:
    """It may have been replaced, by a save at the end of its epoch."""

    def run(folder: str, *callbacks: Any) -> Any:
        options = {"save_dir": tmp_path / folder, "save_steps": 1, "max_steps": 4, "callbacks": callbacks}
        return fit(make(t16(dropout=0.3), rows(22), **options), resume_from="auto")

    straight, _ = run("straight"), run("run", StopAt(2))
    remove = callback(on_epoch_start=lambda trainer: shutil.rmtree(tmp_path / "run" / "checkpoint-2"))
    assert same(weights(run("run", remove).model), weights(straight.model))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_random_draws_of_a_callback_do_not_reach_a_resume(tmp_path: Path, workers: int) -> None:
    def draw(*_: Any, **__: Any) -> None:
        torch.rand(3)

    def feed(*callbacks: Any, resume_from: Any = None, **options: Any) -> Any:
        options |= {"callbacks": [callback(TrainerCallback, on_train_begin=draw), *callbacks], "num_workers": workers}
        return fit(make(t16(dropout=0.3), Noisy(22), max_steps=8, **options), resume_from=resume_from)

    straight = feed()
    feed(StopAt(4), save_dir=tmp_path)
    assert same(state_of(feed(resume_from="auto", save_dir=tmp_path)), state_of(straight))


@pytest.mark.parametrize("by_fields", [True, False], ids=["training arguments", "our arguments"])
def test_stock_trainer_resumes_from_our_checkpoint(arguments: Any, tmp_path: Path, by_fields: bool) -> None:
    """With our weights and moments."""
    options = {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2, "eval_strategy": "no", **IN_ORDER}
    ours = {"epochs": 2, "save_dir": tmp_path / "run", "save_steps": 2, "max_grad_norm": 1.0, "shuffle": False}
    if by_fields:
        ours = {"args": arguments(**options)}
    else:
        options = {"lr_scheduler_type": "constant", **TRAIN_ONLY, **IN_ORDER}
    trainer = keyed(eval_dataset=None, stock_checkpoints=True, **ours)
    steps: list[tuple[int, float]] = []
    starts = callback(
        TrainerCallback, on_train_begin=lambda args, state, *_, **__: steps.append((state.global_step, state.epoch))
    )
    stock = transformers.Trainer(KeyedModel(), arguments("stock", **options), train_dataset=Keyed(), callbacks=[starts])
    stock.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))
    assert steps == [(6, pytest.approx(1.2))] and stock.state.global_step == 10
    assert distance(weights(stock.model), weights(trainer.model)) <= 1e-7


def test_checkpoint_has_pickles_only_for_a_stock_trainer(arguments: Any, tmp_path: Path) -> None:
    keyed(arguments("plain", max_steps=2))
    run = keyed(arguments("stock", max_steps=2), stock_checkpoints=True)
    keyed(kind=Trainer, eval_dataset=None, max_steps=2, save_dir=tmp_path / "native", save_steps=2)
    folders = [tmp_path / name / "checkpoint-2" for name in ("native", "plain", "stock")]
    native, plain, stock = ({path.name for path in folder.rglob("*") if path.is_file()} for folder in folders)
    assert plain == native | {"trainer_state.json"}
    assert stock == plain | {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}
    assert {Path(name).name for name in run.store.resolve("last")[1]["files"]} | {
        MANIFEST
    } == stock  # with their hashes
