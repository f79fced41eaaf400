"""TrainingArguments: names that transformers has dropped, the argument for each field, and contradictions."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from recipes import Keyed, KeyedModel, callback, fit, rows, t16
from transformers import EarlyStoppingCallback, TrainingArguments

from omnitrain import HFTrainer, HFTrainingArguments
from omnitrain.core.errors import ConfigError


def build(args: TrainingArguments | None, **options: Any) -> HFTrainer:
    """A trainer of 20 rows, with 4 to evaluate on."""
    model = options.pop("model", None) or t16(dtype=torch.float32)
    options = {"loss_fn": F.mse_loss, "progress_bar": False, "eval_dataset": rows(4, torch.float32), **options}
    return HFTrainer(model, args, rows(20, torch.float32), **options)


# --- names that transformers has dropped


@pytest.fixture
def translated(arguments: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """Make HFTrainingArguments, and return them with the warnings."""
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)

    def make(**options: Any) -> tuple[HFTrainingArguments, list[str]]:
        caplog.clear()
        args = arguments(kind=HFTrainingArguments, **options)
        return args, [record.getMessage() for record in caplog.records if record.name == "omnitrain"]

    return make


@pytest.mark.parametrize(("old", "value", "new", "expected"), [
    ("evaluation_strategy", "steps", "eval_strategy", "steps"),
    ("per_gpu_train_batch_size", 3, "per_device_train_batch_size", 3),
    ("per_gpu_eval_batch_size", 5, "per_device_eval_batch_size", 5),
    ("no_cuda", True, "use_cpu", True),
    ("push_to_hub_model_id", "me/mine", "hub_model_id", "me/mine"),
    ("push_to_hub_token", "secret", "hub_token", "secret"),
    ("adafactor", True, "optim", "adafactor"), ("overwrite_output_dir", True, "overwrite", True),
])  # fmt: skip
def test_old_names_are_translated_with_a_warning(
    translated: Any, old: str, value: Any, new: str, expected: Any
) -> None:
    args, (message,) = translated(**{old: value})
    assert getattr(getattr(args, new), "value", getattr(args, new)) == expected
    assert old in message and transformers.__version__ in message


def test_warmup_ratio_and_logging_dir_are_honoured(translated: Any, tmp_path: Path) -> None:
    assert translated(warmup_ratio=0.1)[0].get_warmup_steps(200) == 20
    if not hasattr(TrainingArguments, "warmup_ratio"):  # older releases still have it, and decide
        assert translated(warmup_ratio=0.1, warmup_steps=7)[0].get_warmup_steps(200) == 7
    args, _ = translated(logging_dir=str(tmp_path / "logs"))
    assert str(tmp_path / "logs") in (os.environ.get("TENSORBOARD_LOGGING_DIR"), getattr(args, "logging_dir", None))


def test_names_without_effect_unknown_or_contradicting(translated: Any) -> None:
    _, (message,) = translated(save_safetensors=True, half_precision_backend="auto", evaluation_strategy="no")
    assert all(name in message for name in ("save_safetensors", "half_precision_backend", "evaluation_strategy"))
    args, messages = translated(learning_rate=0.25, eval_strategy="epoch")
    assert args.learning_rate == 0.25 and messages == []
    with pytest.raises(TypeError, match=r"'evaluation_stratgy'.*'evaluation_strategy'"):
        translated(evaluation_stratgy="steps")
    with pytest.raises(ConfigError, match=r"per_gpu_train_batch_size=3.*per_device_train_batch_size=4"):
        translated(per_gpu_train_batch_size=3, per_device_train_batch_size=4)


# --- fields and the arguments that they stand for


EVERY_EPOCH = {"save_strategy": "epoch", "eval_strategy": "epoch"}
WORKERS = {"num_workers": 2, "prefetch_factor": 3}


@pytest.mark.parametrize(("fields", "expected"), [
    ({"num_train_epochs": 7}, {"epochs": 7}), ({"num_train_epochs": 0.5}, {"epochs": 0.5}),
    ({"max_steps": 11}, {"max_steps": 11, "epochs": None}), ({"per_device_train_batch_size": 5}, {"batch_size": 5}),
    ({"per_device_eval_batch_size": 6}, {"eval_batch_size": 6}),
    ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 2}),
    ({"learning_rate": 0.125, "weight_decay": 0.5}, {"learning_rate": 0.125, "weight_decay": 0.5}),
    ({"max_grad_norm": 0.25, "seed": 9}, {"max_grad_norm": 0.25, "seed": 9}),
    ({"max_grad_norm": 0.0}, {"max_grad_norm": None}), ({"logging_steps": 3}, {"log_steps": 3}),
    ({"logging_steps": 0.25}, {"log_steps": "0.25dur"}), ({"logging_strategy": "epoch"}, {"log_steps": "1ep"}),
    ({"logging_strategy": "no"}, {"log_steps": "1dur"}),
    ({"eval_strategy": "steps", "eval_steps": 4}, {"eval_steps": 4}),
    ({"eval_strategy": "steps", "logging_steps": 3}, {"eval_steps": 3}),
    ({"eval_strategy": "steps", "eval_steps": 0.5}, {"eval_steps": "0.5dur"}),
    ({"eval_strategy": "epoch", "eval_on_start": True}, {"eval_steps": "1ep", "eval_on_start": True}),
    ({"save_strategy": "steps", "save_steps": 4}, {"save_steps": 4}),
    ({"save_strategy": "epoch", "save_total_limit": 2}, {"save_steps": "1ep", "save_total_limit": 2}),
    ({"save_strategy": "epoch", "save_only_model": True}, {"save_only_model": True}),
    ({"save_strategy": "no"}, {"save_dir": None}), (EVERY_EPOCH, {"load_best_at_end": False}),
    ({**EVERY_EPOCH, "load_best_model_at_end": True}, {"load_best_at_end": True}),
    ({"bf16": True}, {"autocast": "bf16"}), ({"label_names": ["topic"]}, {"label_names": ["topic"]}),
    ({f"dataloader_{name}": value for name, value in WORKERS.items()}, WORKERS),
    ({"dataloader_pin_memory": False}, {"pin_memory": False}),
    ({"kind": HFTrainingArguments, "overwrite_output_dir": True, **EVERY_EPOCH}, {"overwrite": True}),
    ({"run_name": "third try", "disable_tqdm": True}, {"trial_name": "third try", "progress_bar": False}),
], ids=str)  # fmt: skip
def test_fields_set_the_arguments_of_the_trainer(arguments: Any, fields: Any, expected: dict[str, Any]) -> None:
    settings = build(arguments(**fields), progress_bar=None).settings
    assert {name: getattr(settings, name) for name in expected} == expected


def test_eval_strategy_no_leaves_our_eval_steps(arguments: Any) -> None:
    for options, steps in (({}, []), ({"eval_steps": 2, "batch_size": 4}, [2, 4])):
        assert [row["step"] for row in build(arguments(max_steps=4), **options).train()["valid"]] == steps


@pytest.mark.parametrize(("fields", "options", "metric", "direction"), [
    ({"metric_for_best_model": "wer"}, {}, "wer", "min"),  # which transformers maximises
    ({"metric_for_best_model": "eval_accuracy"}, {}, "accuracy", "max"),
    ({"metric_for_best_model": "accuracy", "greater_is_better": True}, {}, "accuracy", "max"),
    ({"metric_for_best_model": "mine", "greater_is_better": False}, {}, "mine", "min"),
    ({}, {}, "loss", "min"),
    ({}, {"optimization_metric": "accuracy"}, "accuracy", "max"),  # where transformers fills in the loss
])  # fmt: skip
def test_direction_is_that_of_the_metric(
    arguments: Any, fields: dict[str, Any], options: dict[str, Any], metric: str, direction: str
) -> None:
    args = arguments(eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, **fields)
    trainer = build(args, compute_metrics=lambda p: {"wer": 1.0, "accuracy": 1.0, "mine": 1.0}, **options)
    assert (trainer.objective.metric, trainer.objective.direction) == (metric, direction)


def noting_rates(rates: list[float]) -> Any:
    """Return a callback of transformers for the learning rate of each step."""
    note = lambda *_, optimizer, **__: rates.append(optimizer.param_groups[0]["lr"])  # noqa: E731
    return callback(transformers.TrainerCallback, on_step_begin=note)


@pytest.mark.parametrize("fields", [
    {}, {"warmup_steps": 0.3, "lr_scheduler_type": "cosine"},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 2},
], ids=str)  # fmt: skip
def test_learning_rates_are_those_of_a_stock_trainer(arguments: Any, fields: dict[str, Any]) -> None:
    takes_fractions = tuple(map(int, transformers.__version__.split(".")[:2])) > (5, 0)
    if 0 < fields.get("warmup_steps", 0) < 1 and not takes_fractions:
        fields = {**fields, "warmup_ratio": fields["warmup_steps"], "warmup_steps": 0}
    args = arguments(num_train_epochs=2, per_device_train_batch_size=4, learning_rate=0.1, **fields)
    results: list[list[float]] = [[], []]
    for kind, rates in zip((transformers.Trainer, HFTrainer), results, strict=True):
        kind(KeyedModel(), args, train_dataset=Keyed(), callbacks=[noting_rates(rates)]).train()
    assert len(results[0]) == 10
    assert results[1] == pytest.approx(results[0], rel=1e-12)


# --- contradictions

ZERO = {"zero_optimization": {"stage": 2}}
ACCUMULATION = "gradient_accumulation_kwargs"
IN_BACKWARD = "updates weights while gradients are computed"


@pytest.mark.parametrize(("fields", "options", "words"), [
    ({"num_train_epochs": 2}, {"epochs": 4}, ["`epochs=4`", "`num_train_epochs=2`"]),
    ({"per_device_train_batch_size": 2}, {"batch_size": 4}, ["`batch_size=4`", "`per_device_train_batch_size=2`"]),
    ({"bf16": True}, {"autocast": "fp32"}, ["autocast='fp32'", "bf16=True"]),
    ({"eval_strategy": "steps", "eval_steps": 5}, {"eval_steps": 7}, ["eval_steps=7", "eval_steps=5"]),
    ({"save_strategy": "no"}, {"save_steps": 7, "save_dir": "x"}, ["save_steps='7'", "save_strategy='no'"]),
    ({"save_strategy": "no"}, {"save_dir": "x"}, ["save_dir='x'", "save_strategy='no'"]),
    ({"save_strategy": "best"}, {}, ["metric_for_best_model` must be provided with save_strategy='best'"]),
    ({"save_strategy": "best", "metric_for_best_model": "loss"}, {"save_steps": 7}, ["=7", "save_strategy='best'"]),
    ({"save_strategy": "epoch"}, {"save_dir": "other"}, ["save_dir='other'", "output_dir='"]),
    ({"optim": "adafactor"}, {"optimizer": "sgd"}, ["optimizer='sgd'", "optim='adafactor'"]),
    ({"lr_scheduler_type": "cosine"}, {"lr_scheduler": "linear"}, ["'linear'", "lr_scheduler_type='cosine'"]),
    ({"warmup_steps": 2}, {"warmup_steps": 3}, ["`warmup_steps=3`", "`warmup_steps=2`"]),
    ({"max_grad_norm": 0.5}, {"max_grad_norm": None}, ["max_grad_norm=None", "max_grad_norm=0.5"]),
    ({"dataloader_pin_memory": False}, {"pin_memory": True}, ["pin_memory=True", "dataloader_pin_memory=False"]),
    ({"train_sampling_strategy": "sequential"}, {"shuffle": True}, ["shuffle=True", "train_sampling_strategy"]),
    ({"metric_for_best_model": "accuracy"}, {"optimization_metric": "f1"}, ["'f1'", "'accuracy'"]),
    ({"metric_for_best_model": "x", "greater_is_better": False}, {"optimization_direction": "max"},
     ["optimization_direction='max'", "greater_is_better=False"]),
    ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 2}, ["steps=2", "steps=4"]),
    ({"label_names": ["topic"]}, {"label_names": ["other"]}, ["label_names", "topic", "other"]),
    ({"auto_find_batch_size": True}, {"microbatch_size": 4}, ["microbatch_size=4", "auto_find_batch_size=True"]),
    ({"disable_tqdm": True}, {"progress_bar": True}, ["progress_bar=True", "disable_tqdm=True"]),
    ({"eval_strategy": "epoch"}, {"patience": 3, "callbacks": [EarlyStoppingCallback(2)]},
     ["`patience=3` contradicts", "EarlyStoppingCallback (patience=2)"]),
    ({}, {"optimizer": "sgd", "optimizers": (torch.optim.SGD([torch.zeros(1, requires_grad=True)]), None)},
     ["`optimizer='sgd'` contradicts `optimizers`"]),
    ({}, {"compute_loss_func": lambda outputs, labels: 0}, ["`loss_fn` and `compute_loss_func`"]),
    ({}, {"device": "cpu"}, ["use_cpu=True"]),
    ({"save_strategy": "steps"}, {"async_save": True, "stock_checkpoints": True}, ["async_save=True"]),
    ({"eval_do_concat_batches": False}, {}, ["eval_do_concat_batches=False"]),
    ({"save_on_each_node": True}, {}, ["main process writes"]),
    ({"fsdp": True, "fsdp_config": {"version": 1}}, {}, ["requests FSDP 1", "version", "2"]),
    ({"deepspeed": ZERO, "bf16_full_eval": True}, {}, ["bf16_full_eval=True"]),
    ({"deepspeed": ZERO, "accelerator_config": {ACCUMULATION: {"sync_each_batch": True}}}, {},
     ["sync_each_batch=True", "DeepSpeed"]),
    ({"accelerator_config": {ACCUMULATION: {"num_steps": 2}}, "gradient_accumulation_steps": 4}, {},
     ["`num_steps` is set but", "gradient_accumulation_steps=4", "num_steps=2"]),
    ({"dataloader_in_order": False}, {}, ["one order here"]),
    ({"dataloader_multiprocessing_context": "spawn", "dataloader_num_workers": 1}, {}, ["set_start_method"]),
    ({"optim": "lomo", "optim_target_modules": ["0"]}, {}, ["optim='lomo'", IN_BACKWARD]),
    ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["0"]}, {}, ["layerwise'", IN_BACKWARD]),
    ({"include_for_metrics": ["losses"]}, {}, ["got 'losses'", "'loss'"]),
    ({"batch_eval_metrics": True}, {"compute_metrics": ["mae"]}, ["batch_eval_metrics=True", "compute_result"]),
    ({"batch_eval_metrics": True}, {"compute_metrics": lambda prediction: {}}, ["compute_result"]),
    ({"batch_eval_metrics": True, "include_for_metrics": ["inputs"]},
     {"compute_metrics": lambda prediction, compute_result: {}}, ["include_for_metrics=['inputs']"]),
    ({"fp16": True}, {}, ["`training_args.fp16=True` is not available", "`bf16=True`"]),
    ({}, {"callbacks": [print]}, ["callbacks of omnitrain or of transformers"]),
    ({}, {"stock_checkpoints": "yes"}, ["stock_checkpoints", "True or False"]),
    ({}, {"stock_checkpoints": True}, ["stock_checkpoints", "needs a folder"]),
    ({"save_strategy": "steps", "save_only_model": True}, {"stock_checkpoints": True}, ["save_only_model"]),
    ({"deepspeed": {**ZERO, "scheduler": {"type": "WarmupLR", "params": {}}}}, {"lr_scheduler": "linear"},
     ["has a 'scheduler'", "Remove it"]),
    ({"deepspeed": {**ZERO, "optimizer": {"type": "AdamW", "params": {}}}}, {"optimizer": "torch.optim.SGD"},
     ["has the optimizer 'AdamW', and `optimizer='torch.optim.SGD'`"]),
    ({"deepspeed": {**ZERO, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}}, {},
     ["lr=0.01 vs hf learning_rate=5e-05"]),
    ({"deepspeed": {**ZERO, "gradient_clipping": 0.3}}, {}, ["gradient_clipping=0.3", "max_grad_norm", "1.0"]),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")  # fmt: skip
def test_contradictions_report_both_values(arguments: Any, fields: Any, options: Any, words: list[str]) -> None:
    if not fields.keys() <= TrainingArguments.__dataclass_fields__.keys():
        pytest.skip("this transformers has no such field")
    with pytest.raises(ConfigError) as error:
        build(arguments(**fields), **options)
    assert all(word in str(error.value) for word in words), error.value


def test_arguments_of_ours_override_defaults(arguments: Any) -> None:
    options = {
        "learning_rate": 2e-5, "shuffle": False, "epochs": 2, "batch_size": 4, "max_grad_norm": None, "log_steps": 10,
        "eval_steps": 4, "pin_memory": False, "deterministic": True, "load_best_at_end": True, "warmup_steps": 2,
    }  # fmt: skip
    settings = build(arguments(), **options).settings  # the rate is our own default
    assert {name: getattr(settings, name) for name in options} == options


def test_save_dir_overrides_the_default_output_dir(arguments: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    args = arguments(output_dir=None, save_strategy="steps", save_steps=2, max_steps=2)
    build(args, save_dir=tmp_path / "run").train()
    assert (tmp_path / "run/checkpoint-2").is_dir() and not Path("trainer_output").exists()


@pytest.mark.parametrize(("fields", "options"), [
    ({}, {"lr_scheduler": "cosine", "warmup_steps": 4}), ({"lr_scheduler_type": "cosine"}, {"warmup_steps": 4}),
    ({"warmup_steps": 4}, {"lr_scheduler": "cosine"}),
])  # fmt: skip
def test_schedule_and_warmup_may_come_from_either_side(arguments: Any, fields: Any, options: Any) -> None:
    rates: list[float] = []
    build(arguments(max_steps=6, **fields), learning_rate=0.1, callbacks=[noting_rates(rates)], **options).train()
    assert rates == pytest.approx([0, 0.025, 0.05, 0.075, 0.1, 0.05])


def test_equal_values_on_both_sides_are_accepted(arguments: Any, tmp_path: Path) -> None:
    args = arguments(num_train_epochs=2, learning_rate=0.5, save_strategy="epoch")
    assert build(args, epochs=2, learning_rate=0.5, save_dir=tmp_path / "run").epochs == 2


def test_default_optimizer_has_one_group(arguments: Any) -> None:
    """So that other trainers resume it; theirs has two, which nothing sets apart."""
    assert len(fit(build(arguments(max_steps=1))).optimizer.param_groups) == 1


# --- with and without TrainingArguments


def test_trainer_needs_no_training_arguments(tmp_path: Path) -> None:
    trainer = build(None, epochs=2, batch_size=5, learning_rate=0.1, seed=3, save_dir=tmp_path)
    args = trainer.engine.args
    trainer.train()
    assert isinstance(args, TrainingArguments)
    assert (args.per_device_train_batch_size, args.seed, args.output_dir) == (5, 3, str(tmp_path))
    assert args.report_to == [] and trainer.progress.step == 8


def test_precision_of_the_launcher_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert build(None).precision.name == "bf16"
    assert build(None, autocast="fp32").precision.name == "fp32"


@pytest.mark.parametrize(("fields", "options", "steps"), [
    ({}, {"max_steps": 10}, 10), ({}, {"max_duration": "4ep"}, 8),
    ({"num_train_epochs": 1}, {"max_duration": "4ep"}, 2), ({"max_steps": 7}, {}, 7), ({}, {}, 6),
], ids=str)  # fmt: skip
def test_length_of_the_run_is_that_of_either_side(arguments: Any, fields: Any, options: Any, steps: int) -> None:
    assert HFTrainer(t16(), arguments(**fields), rows(16), loss_fn=F.mse_loss, **options).total_steps == steps


FOREIGN = """
from dataclasses import dataclass, field
from transformers import EarlyStoppingCallback, TrainingArguments

@dataclass
class Arguments(TrainingArguments):
    max_length: int | None = 1024
    packing: bool = False
    tags: list[str] = field(default_factory=list)
"""


@pytest.mark.parametrize("place", ["site-packages", "program"])
def test_fields_of_another_library_are_warned_of(
    place: str, tmp_path: Path, arguments: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields of the user's own subclass cause no warning."""
    name = f"foreign_of_{place.replace('-', '_')}"
    (tmp_path / place).mkdir()
    (tmp_path / place / f"{name}.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(tmp_path / place)
    args = arguments(kind=importlib.import_module(name).Arguments, max_length=16, packing=True)
    HFTrainer(KeyedModel(), args, Keyed())
    warnings = "\n".join(message for message in caplog.messages if "not read" in message)
    texts = [
        f"Arguments has 3 fields in addition to those of TrainingArguments, which are for a trainer of {name!r}",
        "not even max_length=16, packing=True. Prepare model and data accordingly",
    ]
    assert [warnings.count(text) for text in texts] == [place == "site-packages"] * 2
