"""transformers' TrainingArguments: names that it has dropped, what becomes of each field, and what is refused."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from recipes import StopAt, Trace, distance, rows, t16, weights
from transformers import EarlyStoppingCallback, TrainingArguments

from omnitrain import HFTrainer, HFTrainingArguments, Trainer
from omnitrain.errors import ConfigError


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    """Makes TrainingArguments that keep quiet, on a processor."""

    def make(**options: Any) -> TrainingArguments:
        defaults = {"use_cpu": True, "report_to": "none", "output_dir": str(tmp_path / "run"), "save_strategy": "no"}
        return TrainingArguments(**{**defaults, **options})

    return make


def build(args: TrainingArguments | None, **options: Any) -> HFTrainer:
    options = {"loss_fn": F.mse_loss, "progress_bar": False, **options}
    model = options.pop("model", None) or t16(dtype=torch.float32)
    return HFTrainer(model, args, rows(20, torch.float32), options.pop("eval_dataset", None), **options)


# --- names that transformers has dropped


@pytest.fixture
def translated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """Makes HFTrainingArguments, and returns them with what was warned of."""
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)

    def make(**options: Any) -> tuple[HFTrainingArguments, list[str]]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "omnitrain"):
            args = HFTrainingArguments(str(tmp_path), report_to="none", **options)
        return args, [record.getMessage() for record in caplog.records if record.name == "omnitrain"]

    return make


@pytest.mark.parametrize(
    ("old", "value", "new", "expected"),
    [
        ("evaluation_strategy", "steps", "eval_strategy", "steps"),
        ("per_gpu_train_batch_size", 3, "per_device_train_batch_size", 3),
        ("per_gpu_eval_batch_size", 5, "per_device_eval_batch_size", 5),
        ("no_cuda", True, "use_cpu", True),
        ("push_to_hub_model_id", "me/mine", "hub_model_id", "me/mine"),
        ("push_to_hub_token", "secret", "hub_token", "secret"),
        ("adafactor", True, "optim", "adafactor"),
        ("overwrite_output_dir", True, "overwrite", True),
    ],
)
def test_an_old_name_is_translated_and_told_once(
    translated: Any, old: str, value: Any, new: str, expected: Any
) -> None:
    args, told = translated(**{old: value})
    found = getattr(args, new)
    assert getattr(found, "value", found) == expected
    assert len(told) == 1 and old in told[0] and transformers.__version__ in told[0]


def test_a_ratio_of_warm_up_becomes_that_share_of_the_steps(translated: Any) -> None:
    args, _ = translated(warmup_ratio=0.1)
    assert args.get_warmup_steps(200) == 20


@pytest.mark.skipif(hasattr(TrainingArguments, "warmup_ratio"), reason="older releases still have it, and decide")
def test_a_number_of_warm_up_steps_goes_before_a_ratio_as_it_always_did(translated: Any) -> None:
    args, _ = translated(warmup_ratio=0.1, warmup_steps=7)
    assert args.get_warmup_steps(200) == 7


def test_the_logging_folder_is_where_tensorboard_of_transformers_looks_for_it(translated: Any, tmp_path: Path) -> None:
    args, _ = translated(logging_dir=str(tmp_path / "logs"))
    assert str(tmp_path / "logs") in (os.environ.get("TENSORBOARD_LOGGING_DIR"), getattr(args, "logging_dir", None))


def test_names_without_effect_are_taken_and_all_told_in_one_line(translated: Any) -> None:
    _, told = translated(save_safetensors=True, half_precision_backend="auto", evaluation_strategy="no")
    assert len(told) == 1
    assert all(name in told[0] for name in ("save_safetensors", "half_precision_backend", "evaluation_strategy"))


def test_names_that_transformers_knows_are_passed_on_without_a_word(translated: Any) -> None:
    args, told = translated(learning_rate=0.25, eval_strategy="epoch")
    assert args.learning_rate == 0.25 and told == []


def test_an_unknown_name_is_an_error_that_names_the_nearest_one(translated: Any) -> None:
    with pytest.raises(TypeError, match=r"'evaluation_stratgy'.*'evaluation_strategy'"):
        translated(evaluation_stratgy="steps")


def test_an_old_and_a_new_name_that_differ_are_an_error_naming_both(translated: Any) -> None:
    with pytest.raises(ConfigError, match=r"per_gpu_train_batch_size=3.*per_device_train_batch_size=4"):
        translated(per_gpu_train_batch_size=3, per_device_train_batch_size=4)


def test_a_second_run_in_the_output_folder_starts_among_old_checkpoints_unless_that_is_refused(tmp_path: Path) -> None:
    options = {"use_cpu": True, "report_to": "none", "max_steps": 2, "save_steps": 2}
    build(TrainingArguments(str(tmp_path), **options)).train()
    with pytest.raises(ConfigError, match="already holds checkpoints"):
        build(TrainingArguments(str(tmp_path), **options), overwrite=False).train()
    build(TrainingArguments(str(tmp_path), **options)).train()
    trainer = build(HFTrainingArguments(str(tmp_path), overwrite_output_dir=True, **options))
    assert trainer.train()["stop_reason"] == "max_steps"


# --- what transformers' arguments say, in our words


@pytest.mark.parametrize(
    ("said", "name", "expected"),
    [
        ({"num_train_epochs": 7}, "epochs", 7),
        ({"num_train_epochs": 0.5}, "epochs", 0.5),
        ({"max_steps": 11}, "max_steps", 11),
        ({"max_steps": 11}, "epochs", None),
        ({"per_device_train_batch_size": 5}, "batch_size", 5),
        ({"per_device_eval_batch_size": 6}, "eval_batch_size", 6),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps", 2),
        ({"learning_rate": 0.125}, "learning_rate", 0.125),
        ({"weight_decay": 0.5}, "weight_decay", 0.5),
        ({"max_grad_norm": 0.25}, "max_grad_norm", 0.25),
        ({"max_grad_norm": 0.0}, "max_grad_norm", None),
        ({"seed": 9}, "seed", 9),
        ({"logging_steps": 3}, "log_steps", 3),
        ({"logging_steps": 0.25}, "log_steps", "0.25dur"),
        ({"logging_strategy": "epoch"}, "log_steps", "1ep"),
        ({"logging_strategy": "no"}, "log_steps", "1dur"),
        ({"eval_strategy": "steps", "eval_steps": 4}, "eval_steps", 4),
        ({"eval_strategy": "steps", "logging_steps": 3}, "eval_steps", 3),
        ({"eval_strategy": "epoch"}, "eval_steps", "1ep"),
        ({"eval_strategy": "steps", "eval_steps": 0.5}, "eval_steps", "0.5dur"),
        ({"eval_strategy": "epoch", "eval_on_start": True}, "eval_on_start", True),
        ({"save_strategy": "steps", "save_steps": 4}, "save_steps", 4),
        ({"save_strategy": "epoch"}, "save_steps", "1ep"),
        ({"save_strategy": "epoch", "save_total_limit": 2}, "save_total_limit", 2),
        ({"save_strategy": "epoch", "save_only_model": True}, "save_only_model", True),
        ({"save_strategy": "no"}, "save_dir", None),
        ({"save_strategy": "epoch", "eval_strategy": "epoch"}, "load_best_at_end", False),
        (
            {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True},
            "load_best_at_end",
            True,
        ),
        ({"bf16": True}, "autocast", "bf16"),
        ({"dataloader_num_workers": 2, "dataloader_prefetch_factor": 3}, "num_workers", 2),
        ({"dataloader_num_workers": 2, "dataloader_prefetch_factor": 3}, "prefetch_factor", 3),
        ({"dataloader_pin_memory": False}, "pin_memory", False),
        ({"run_name": "third try"}, "trial_name", "third try"),
        ({"disable_tqdm": True}, "progress_bar", False),
    ],
)
def test_a_field_arrives_in_the_argument_that_it_stands_for(
    arguments: Any, said: dict[str, Any], name: str, expected: Any
) -> None:
    trainer = build(arguments(**said), eval_dataset=rows(4, torch.float32), progress_bar=None)
    assert getattr(trainer.settings, name) == expected


def test_lengths_and_intervals_make_the_run_that_they_say(arguments: Any, tmp_path: Path) -> None:
    args = arguments(
        num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=2, eval_strategy="steps",
        eval_steps=2, save_strategy="steps", save_steps=4, logging_steps=3, logging_first_step=True,
    )  # fmt: skip
    trace = Trace()
    trainer = build(args, eval_dataset=rows(6, torch.float32), callbacks=[trace])
    metrics = trainer.train()  # 20 rows in steps of 8, 8 and 4
    assert trainer.progress.step == 9 and metrics["stop_reason"] == "epochs"
    assert [row["step"] for row in trace.logs] == [1, 3, 6, 9]
    assert [row["step"] for row in metrics["valid"]] == [2, 4, 6, 8, 9]
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [
        "checkpoint-4", "checkpoint-8", "checkpoint-9",
    ]  # fmt: skip


def test_no_evaluation_strategy_means_no_evaluation_in_the_run(arguments: Any) -> None:
    trainer = build(arguments(max_steps=2), eval_dataset=rows(6, torch.float32))
    assert trainer.train()["valid"] == []
    assert trainer.evaluate().keys() == {"eval_loss"}


def test_saving_the_model_only_leaves_out_what_a_run_goes_on_from(arguments: Any, tmp_path: Path) -> None:
    trainer = build(arguments(max_steps=2, save_strategy="steps", save_steps=2, save_only_model=True))
    trainer.train()
    found = {path.name for path in (tmp_path / "run" / "checkpoint-2").iterdir()}
    assert "model.safetensors" in found and not {"optimizer", "optimizer.pt", "rng_state.pth"} & found


def test_a_loss_alone_is_all_that_an_evaluation_gives_if_it_is_all_that_was_asked_for(arguments: Any) -> None:
    args = arguments(prediction_loss_only=True)
    trainer = build(args, eval_dataset=rows(6, torch.float32), compute_metrics=lambda p: {"x": 1.0})
    assert trainer.evaluate().keys() == {"eval_loss"}


@pytest.mark.parametrize(
    ("said", "metric", "direction"),
    [
        ({"metric_for_best_model": "wer"}, "wer", "min"),  # which transformers maximises
        ({"metric_for_best_model": "eval_accuracy"}, "accuracy", "max"),
        ({"metric_for_best_model": "accuracy", "greater_is_better": True}, "accuracy", "max"),
        ({"metric_for_best_model": "mine", "greater_is_better": False}, "mine", "min"),
        ({}, "loss", "min"),
    ],
)
def test_the_direction_is_that_of_our_table_unless_the_user_has_said_false(
    arguments: Any, said: dict[str, Any], metric: str, direction: str
) -> None:
    trainer = build(
        arguments(eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, **said),
        eval_dataset=rows(6, torch.float32), compute_metrics=lambda p: {"wer": 1.0, "accuracy": 1.0, "mine": 1.0},
    )  # fmt: skip
    assert (trainer.objective.metric, trainer.objective.direction) == (metric, direction)


def test_a_metric_whose_direction_nobody_knows_is_refused_before_the_first_step(arguments: Any) -> None:
    with pytest.raises(ValueError, match="higher or lower 'mine' is better"):
        build(arguments(eval_strategy="epoch", metric_for_best_model="mine"), eval_dataset=rows(6, torch.float32))


class _Rates(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(kwargs["optimizer"].param_groups[0]["lr"])


class _Rows(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.x, self.y = rows(20, torch.float32).tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = t16(dtype=torch.float32)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        output = self.body(x)
        return {"loss": F.mse_loss(output, labels), "logits": output} if labels is not None else {"logits": output}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"warmup_steps": 3},
        {"warmup_steps": 0.3, "lr_scheduler_type": "cosine"},
        {"lr_scheduler_type": "constant"},
        {"lr_scheduler_type": "polynomial", "warmup_steps": 2},
        {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 2},
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
        {"lr_scheduler_type": "linear", "warmup_steps": 50},
    ],
    ids=str,
)
def test_the_learning_rate_of_every_step_is_that_of_a_stock_trainer(
    arguments: Any, tmp_path: Path, said: dict[str, Any]
) -> None:
    if "warmup_steps" in said and said["warmup_steps"] < 1 and not _takes_fractions():
        said = {**said, "warmup_ratio": said["warmup_steps"], "warmup_steps": 0}
    seen = []
    for kind in (transformers.Trainer, HFTrainer):
        args = arguments(num_train_epochs=2, per_device_train_batch_size=4, learning_rate=0.1, **said)
        rates = _Rates()
        trainer: Any = kind(_Model(), args, train_dataset=_Rows(), callbacks=[rates])
        trainer.train()
        seen.append(rates.seen)
    assert len(seen[0]) == 10
    assert seen[1] == pytest.approx(seen[0], rel=1e-12)


def _takes_fractions() -> bool:
    return tuple(map(int, transformers.__version__.split(".")[:2])) > (5, 0)


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor", "rmsprop"])
def test_the_optimizer_is_the_one_that_the_arguments_name(arguments: Any, optim: str) -> None:
    trainer = build(arguments(optim=optim, weight_decay=0.25))
    kinds = {"adamw_torch": "AdamW", "sgd": "SGD", "adafactor": "Adafactor", "rmsprop": "RMSprop"}
    assert type(trainer.optimizer).__name__ == kinds[optim]
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.25, 0.0}  # none on biases


def test_the_betas_of_adam_are_those_of_the_arguments(arguments: Any) -> None:
    trainer = build(arguments(adam_beta1=0.5, adam_beta2=0.75, adam_epsilon=1e-3))
    group = trainer.optimizer.param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.5, 0.75), 1e-3)


# --- contradictions


@pytest.mark.parametrize(
    ("said", "options", "words"),
    [
        ({"num_train_epochs": 2}, {"epochs": 4}, ["`epochs=4`", "`num_train_epochs=2`"]),
        ({"max_steps": 3}, {"max_steps": 4}, ["max_steps=4", "max_steps=3"]),
        ({"learning_rate": 0.5}, {"learning_rate": 0.25}, ["learning_rate=0.25", "learning_rate=0.5"]),
        ({"per_device_train_batch_size": 2}, {"batch_size": 4}, ["`batch_size=4`", "`per_device_train_batch_size=2`"]),
        ({"per_device_eval_batch_size": 2}, {"eval_batch_size": 4}, ["eval_batch_size=4", "eval_batch_size=2"]),
        ({"weight_decay": 0.5}, {"weight_decay": 0.1}, ["weight_decay=0.1", "weight_decay=0.5"]),
        ({"max_grad_norm": 0.5}, {"max_grad_norm": 2.0}, ["max_grad_norm=2.0", "max_grad_norm=0.5"]),
        ({"seed": 1}, {"seed": 2}, ["seed=2", "seed=1"]),
        ({"bf16": True}, {"autocast": "fp32"}, ["autocast='fp32'", "bf16=True"]),
        ({"logging_steps": 5}, {"log_steps": 7}, ["log_steps=7", "logging_steps=5"]),
        ({"eval_strategy": "steps", "eval_steps": 5}, {"eval_steps": 7}, ["eval_steps=7", "eval_steps=5"]),
        ({"save_strategy": "steps", "save_steps": 5}, {"save_steps": 7}, ["save_steps=7", "save_steps=5"]),
        ({"save_strategy": "no"}, {"save_steps": 7, "save_dir": "x"}, ["save_steps='7'", "save_strategy='no'"]),
        ({"save_strategy": "no"}, {"save_dir": "x"}, ["save_dir='x'", "save_strategy='no'"]),
        (
            {"save_strategy": "best", "metric_for_best_model": "loss"},
            {"save_steps": 7},
            ["save_steps=7", "save_strategy='best'"],
        ),
        ({"save_strategy": "epoch"}, {"save_dir": "other"}, ["save_dir='other'", "output_dir='"]),
        ({"save_strategy": "epoch", "save_total_limit": 2}, {"save_total_limit": 3}, ["limit=3", "limit=2"]),
        ({"optim": "adafactor"}, {"optimizer": "sgd"}, ["optimizer='sgd'", "optim='adafactor'"]),
        ({"lr_scheduler_type": "cosine"}, {"lr_scheduler": "linear"}, ["'linear'", "lr_scheduler_type='cosine'"]),
        ({"warmup_steps": 2}, {"warmup_steps": 3}, ["`warmup_steps=3`", "`warmup_steps=2`"]),
        ({"max_grad_norm": 0.5}, {"max_grad_norm": None}, ["max_grad_norm=None", "max_grad_norm=0.5"]),
        ({"dataloader_pin_memory": False}, {"pin_memory": True}, ["pin_memory=True", "dataloader_pin_memory=False"]),
        ({"train_sampling_strategy": "sequential"}, {"shuffle": True}, ["shuffle=True", "train_sampling_strategy"]),
        ({"metric_for_best_model": "accuracy"}, {"optimization_metric": "f1"}, ["'f1'", "'accuracy'"]),
        (
            {"metric_for_best_model": "x", "greater_is_better": False},
            {"optimization_direction": "max"},
            ["optimization_direction='max'", "greater_is_better=False"],
        ),
        ({"dataloader_num_workers": 1}, {"num_workers": 2}, ["num_workers=2", "dataloader_num_workers=1"]),
        ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 2}, ["steps=2", "steps=4"]),
        ({"run_name": "a"}, {"trial_name": "b"}, ["trial_name='b'", "run_name='a'"]),
        ({"disable_tqdm": True}, {"progress_bar": True}, ["progress_bar=True", "disable_tqdm=True"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_contradiction_is_an_error_naming_both_values_in_the_words_of_each(
    arguments: Any, said: dict[str, Any], options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(arguments(**said), eval_dataset=rows(4, torch.float32), **options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"learning_rate": 1e-3}, "learning_rate", 1e-3),
        ({"learning_rate": 2e-5}, "learning_rate", 2e-5),  # our own default, said all the same
        ({"shuffle": False}, "shuffle", False),
        ({"epochs": 2}, "epochs", 2),
        ({"batch_size": 4}, "batch_size", 4),
        ({"max_grad_norm": None}, "max_grad_norm", None),
        ({"log_steps": 10}, "log_steps", 10),
        ({"eval_steps": 4}, "eval_steps", 4),
        ({"pin_memory": False}, "pin_memory", False),
        ({"deterministic": True}, "deterministic", True),
        ({"load_best_at_end": True}, "load_best_at_end", True),
        ({"warmup_steps": 2}, "warmup_steps", 2),
    ],
    ids=str,
)
def test_an_argument_of_ours_goes_before_a_default_of_the_training_arguments(
    arguments: Any, given: dict[str, Any], name: str, expected: Any
) -> None:
    trainer = build(arguments(), eval_dataset=rows(4, torch.float32), **given)
    assert getattr(trainer.settings, name) == expected


def test_a_decay_of_ours_reaches_the_optimizer_that_the_training_arguments_name(arguments: Any) -> None:
    trainer = build(arguments(optim="adamw_torch"), weight_decay=0.25, learning_rate=0.5)
    assert {(group["weight_decay"], group["lr"]) for group in trainer.optimizer.param_groups} == {
        (0.25, 0.5),
        (0.0, 0.5),
    }


def test_what_transformers_fills_in_by_itself_is_no_word_of_the_users(arguments: Any) -> None:
    args = arguments(eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True)
    assert args.metric_for_best_model == "loss" and args.greater_is_better is False
    options: dict[str, Any] = {"eval_dataset": rows(4, torch.float32), "compute_metrics": lambda p: {"accuracy": 1.0}}
    trainer = build(args, optimization_metric="accuracy", **options)
    assert (trainer.objective.metric, trainer.objective.direction) == ("accuracy", "max")


def test_a_run_evaluates_at_an_interval_of_ours_where_the_training_arguments_name_none(arguments: Any) -> None:
    trainer = build(arguments(max_steps=4), eval_dataset=rows(4, torch.float32), eval_steps=2, batch_size=4)
    assert [row["step"] for row in trainer.train()["valid"]] == [2, 4]


@pytest.mark.parametrize("given", [{"warmup_steps": 4}, {"lr_scheduler": "cosine"}], ids=str)
def test_of_schedule_and_warm_up_each_may_be_said_in_either_words(arguments: Any, given: dict[str, Any]) -> None:
    both = {"lr_scheduler": "cosine", "warmup_steps": 4}
    theirs = {"lr_scheduler": {"lr_scheduler_type": "cosine"}, "warmup_steps": {"warmup_steps": 4}}
    (other,) = [words for name, words in theirs.items() if name not in given]
    rates = []
    for args, options in ((arguments(max_steps=8, **other), given), (arguments(max_steps=8), both)):
        seen = _Rates()
        build(args, learning_rate=0.1, callbacks=[seen], **options).train()
        rates.append(seen.seen)
    assert rates[0] == rates[1] and rates[0][:3] == pytest.approx([0, 0.025, 0.05])


def test_saying_the_same_twice_is_no_contradiction(arguments: Any, tmp_path: Path) -> None:
    args = arguments(num_train_epochs=2, learning_rate=0.5, save_strategy="epoch")
    trainer = build(args, epochs=2, learning_rate=0.5, save_dir=tmp_path / "run")
    assert trainer.epochs == 2


def test_overwriting_may_be_asked_for_beside_the_training_arguments(arguments: Any) -> None:
    args = arguments(save_strategy="steps", save_steps=2, max_steps=2)
    build(args).train()
    assert build(args, overwrite=True).train()["stop_reason"] == "max_steps"


def test_patience_of_two_kinds_that_differ_is_an_error(arguments: Any) -> None:
    with pytest.raises(ConfigError, match=r"`patience=3` contradicts .* EarlyStoppingCallback, which say patience=2"):
        build(
            arguments(eval_strategy="epoch"), eval_dataset=rows(4, torch.float32), patience=3,
            callbacks=[EarlyStoppingCallback(2)],
        )  # fmt: skip


def test_two_optimizers_or_losses_are_an_error(arguments: Any) -> None:
    model = t16(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="`optimizer='sgd'` contradicts `optimizers`"):
        build(arguments(), model=model, optimizer="sgd", optimizers=(optimizer, None))
    with pytest.raises(ConfigError, match="`loss_fn` and `compute_loss_func`"):
        build(arguments(), compute_loss_func=lambda outputs, labels, num_items_in_batch=None: 0)


def test_a_device_is_told_where_it_belongs(arguments: Any) -> None:
    with pytest.raises(ConfigError, match="use_cpu=True"):
        build(arguments(), device="cpu")


def test_saving_in_the_background_is_refused_beside_files_that_are_written_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"async_save=True.*stock_checkpoints=True"):
        build(None, async_save=True, stock_checkpoints=True, save_dir=tmp_path)


# --- what is not honoured is refused, with the remedy


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"eval_do_concat_batches": False}, "eval_do_concat_batches=False"),
        ({"save_on_each_node": True}, "main process writes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_field_that_would_not_be_honoured_is_refused(arguments: Any, said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(arguments(**said))


def test_a_run_with_the_default_optimizer_and_schedule_goes_on_under_another_trainer(
    arguments: Any, tmp_path: Path
) -> None:
    straight = build(arguments(max_steps=5))
    straight.train()
    assert len(straight.optimizer.param_groups) == 1  # theirs has two, which nothing sets apart
    said = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": False}

    build(arguments(**said), callbacks=[StopAt(2)]).train()
    other = Trainer(
        t16(dtype=torch.float32), rows(20, torch.float32), loss_fn=F.mse_loss, progress_bar=False, device="cpu",
        max_steps=5, epochs=None, learning_rate=5e-5, lr_scheduler="linear",
    )  # fmt: skip
    other.train(resume_from=tmp_path / "run/checkpoint-2")
    assert other.progress.step == 5
    assert distance(weights(other.model), weights(straight.get_model())) == 0


ZERO = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("said", "given", "words"),
    [
        ({"fsdp": True, "fsdp_config": {"version": 1}}, {}, "asks for FSDP 1.*version.*2"),
        ({"deepspeed": ZERO, "bf16_full_eval": True}, {}, "bf16_full_eval=True"),
        (
            {"deepspeed": {**ZERO, "scheduler": {"type": "WarmupLR", "params": {}}}},
            {"lr_scheduler": "linear"},
            "has a 'scheduler'.*Remove it",
        ),
        (
            {"deepspeed": {**ZERO, "optimizer": {"type": "AdamW", "params": {}}}},
            {"optimizer": "torch.optim.SGD"},
            "has the optimizer 'AdamW', and `optimizer='torch.optim.SGD'`",
        ),
        (
            {"deepspeed": {**ZERO, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}},
            {},
            "lr=0.01 vs hf learning_rate=5e-05",
        ),
        ({"deepspeed": {**ZERO, "gradient_clipping": 0.3}}, {}, "gradient_clipping=0.3.*max_grad_norm.*1.0"),
    ],
    ids=["fsdp 1", "cast", "two schedules", "two optimizers", "two rates", "two limits"],
)
def test_sharding_that_cannot_be_as_it_is_said_is_refused(
    arguments: Any, said: dict[str, Any], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        build(arguments(**said), **given)


# --- without them


def test_without_training_arguments_ours_are_enough(tmp_path: Path) -> None:
    trainer = build(None, epochs=2, batch_size=5, learning_rate=0.1, seed=3, save_dir=tmp_path)
    args = trainer.engine.args
    trainer.train()
    assert isinstance(args, TrainingArguments)
    assert (args.per_device_train_batch_size, args.seed, args.output_dir) == (5, 3, str(tmp_path))
    assert args.report_to == [] and trainer.progress.step == 8


def test_the_users_arguments_stay_as_they_are(arguments: Any) -> None:
    args = arguments(num_train_epochs=1, save_strategy="epoch", max_grad_norm=0.5)
    before = args.to_dict()
    build(args).train()
    assert args.to_dict() == before


def test_the_precision_that_a_launcher_asks_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert build(None).precision.name == "bf16"
    assert build(None, autocast="fp32").precision.name == "fp32"


def test_arguments_under_the_name_that_transformers_gives_them_work_too(arguments: Any) -> None:
    trainer = HFTrainer(t16(dtype=torch.float32), args=arguments(max_steps=3), train_dataset=rows(8, torch.float32),
                        loss_fn=F.mse_loss, progress_bar=False)  # fmt: skip
    assert trainer.train()["stop_reason"] == "max_steps" and trainer.progress.step == 3


def test_data_may_come_first_as_with_the_other_trainers() -> None:
    one, other = t16(dtype=torch.float32), t16(dtype=torch.float32)
    HFTrainer(one, rows(8, torch.float32), loss_fn=F.mse_loss, epochs=1, learning_rate=0.1, progress_bar=False).train()
    HFTrainer(other, None, rows(8, torch.float32), loss_fn=F.mse_loss, epochs=1, learning_rate=0.1,
              progress_bar=False).train()  # fmt: skip
    assert distance(weights(one), weights(other)) == 0


@pytest.mark.parametrize(
    ("theirs", "ours", "steps"),
    [
        ({}, {"max_steps": 10}, 10),
        ({}, {"max_duration": "4ep"}, 8),
        ({"num_train_epochs": 1}, {"max_duration": "4ep"}, 2),
        ({"max_steps": 7}, {}, 7),
        ({}, {}, 6),
    ],
    ids=str,
)
def test_the_length_of_the_run_is_what_either_side_says(
    tmp_path: Path, theirs: dict[str, Any], ours: dict[str, Any], steps: int
) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", **theirs)
    assert HFTrainer(t16(), args, rows(16), loss_fn=F.mse_loss, **ours).total_steps == steps


FOREIGN = """
from dataclasses import dataclass, field
from transformers import TrainingArguments

@dataclass
class Arguments(TrainingArguments):
    max_length: int | None = 1024
    packing: bool = False
    tags: list[str] = field(default_factory=list)
"""


@pytest.mark.parametrize("place", ["site-packages", "program"])
def test_fields_that_are_for_a_trainer_of_another_library_are_named(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"foreign_of_{place.replace('-', '_')}"
    (tmp_path / place).mkdir()
    (tmp_path / place / f"{name}.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(tmp_path / place)
    kind = importlib.import_module(name).Arguments
    HFTrainer(_Model(), kind(str(tmp_path), use_cpu=True, report_to="none", max_length=16, packing=True), _Rows())
    told = [one.getMessage() for one in caplog.records if "not read" in one.getMessage()]
    if place == "program":  # which reads its own fields by itself
        assert not told
    else:
        assert (
            f"Arguments has 3 fields beside those of TrainingArguments, which are for a trainer of {name!r}" in told[0]
        )
        assert "not even max_length=16, packing=True. Prepare model and data as they say" in told[0]
