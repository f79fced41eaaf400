"""Sharded weights by transformers' arguments, DeepSpeed's configurations, launchers and PEFT.

The numbers of plain models are in `test_same_numbers.py`, all ways of resuming in `test_resume_matrix.py`.
"""

import gc
import os
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
import pytest
import torch
import torch.nn.functional as F
from backends import Jobs, asked_for, gap, launch_all, make_trainer, sound, tensors_of
from forking import current_rank
from marks import thinned
from recipes import Trace, fit, rows, t16
from safetensors.torch import load_file
from tiny import Tokens, llama, t5
from transformers import LlamaForCausalLM, Seq2SeqTrainingArguments, TrainingArguments
from transformers import Trainer as Stock

from omnitrain import HFTrainer
from omnitrain.core.errors import ConfigError

AUTO: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
}  # fmt: skip
ADAMW = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
"""DeepSpeed's AdamW would be compiled first."""
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
SCHEDULE = {"type": "WarmupLR", "params": WARMUP}
WRAPPING = {
    "version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "activation_checkpointing": True,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "fsdp": {"fsdp": True, "fsdp_config": WRAPPING},
    "zero2": {"deepspeed": AUTO},
    "zero3": {"deepspeed": {**AUTO, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}}},
    "configured": {"deepspeed": {**AUTO, "optimizer": {"type": "AdamW", "params": ADAMW}, "scheduler": SCHEDULE}},
}
PLAIN: dict[str, dict[str, Any]] = {
    "whole": {},
    "fsdp": {"fsdp": True, "fsdp_config": {"version": 2}},
    "zero2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
}
LAUNCHED = {
    "fsdp": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
}


SHARDED = {"fsdp": "FSDPSequential", "zero2": "DeepSpeedEngine"}
WRAPPED = {"whole": "DistributedDataParallel Parameter", "fsdp": "FSDPLlamaForCausalLM DTensor"}
"""What the models and parameters of trainers are, if not DeepSpeed's engine and parameters, of nothing under ZeRO 3."""


def correct(prediction: Any) -> dict[str, float]:
    counted = prediction.label_ids != -100
    return {"accuracy": float((prediction.predictions == prediction.label_ids)[counted].mean()), "rows": len(counted)}


def logged(trainer: Any, *names: str) -> dict[str, Any]:
    """Train with a `Trace`, and return the losses and other numbers of all steps by name."""
    (trace,) = (callback for callback in trainer.lifecycle.callbacks if isinstance(callback, Trace))
    trace.logs.clear()
    trainer.train()
    return {name: [row[name] for row in trace.logs] for name in ("loss", *names)}


def arguments(folder: str, kind: Any = TrainingArguments, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4 // int(os.environ.get("WORLD_SIZE", "1")),
        "max_steps": 5, "learning_rate": 0.05, "weight_decay": 0.1, "lr_scheduler_type": "cosine",
        "warmup_steps": 2, "max_grad_norm": 0.5, "per_device_eval_batch_size": 2, "eval_strategy": "steps",
        "eval_steps": 3, "save_strategy": "steps", "save_steps": 3, "load_best_model_at_end": False,
        "logging_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    return kind(folder, **{**defaults, **options})


def speaker(args: TrainingArguments, model: Any = None, **options: Any) -> HFTrainer:
    return HFTrainer(
        model or llama(current_rank()).float(), args, Tokens(29), Tokens(7), compute_metrics=correct,
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1), optimization_metric="accuracy",
        callbacks=[Trace()], **options,
    )  # fmt: skip


def speak(backend: str, way: str, folder: str) -> dict[str, Any]:
    """Train a language model with transformers' optimizer of two groups; evaluate, predict and save it."""
    trainer = speaker(arguments(folder, **WAYS[way]), stock_checkpoints=True)
    parameter = next(trainer.model.parameters())
    assert bool(parameter.numel()) == (way != "zero3")
    made_of = f"{type(trainer.model_wrapped).__name__} {type(parameter).__name__}"
    assert made_of == WRAPPED.get(way, "DeepSpeedEngine Parameter") or backend == "hf"
    numbers = logged(trainer, "grad_norm", "learning_rate")
    predicted = trainer.predict(Tokens(7))
    trainer.save_model(f"{folder}/model")
    return {
        **numbers, "groups": len(trainer.optimizer.param_groups),
        "their losses": [row["loss"] for row in trainer.engine.state.log_history if "loss" in row],
        "valid": trainer.metrics["valid"], "predictions": predicted.predictions.tolist(),
        "tensors": tensors_of(trainer),
    }  # fmt: skip


def load_in_parts(backend: str, folder: str, model: str) -> dict[str, Any]:
    """Train a model that transformers has loaded in parts, as it does once there are arguments for ZeRO 3."""
    import deepspeed

    args = arguments(folder, **WAYS["zero3"])
    deepspeed.init_distributed("gloo")  # on GPUs the arguments do it
    loaded = LlamaForCausalLM.from_pretrained(model)
    assert not next(loaded.parameters()).numel()
    trainer = speaker(args, loaded)
    numbers = logged(trainer)
    trainer.save_model(f"{folder}/model")
    return numbers


def start(backend: str, way: str) -> dict[str, Any]:
    with mock.patch.dict(os.environ, LAUNCHED[way]):
        trainer = HFTrainer(
            t16(dtype=torch.float32), None, rows(20, torch.float32), loss_fn=F.mse_loss, log_steps=1,
            learning_rate=0.05, max_steps=4, batch_size=2, progress_bar=False, callbacks=[Trace()],
        )  # fmt: skip
        assert type(trainer.model_wrapped).__name__ == SHARDED[way]
        return logged(trainer)


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *rest = parameters
    return torch.optim.AdamW([{"params": [first], "weight_decay": 0.2}, {"params": rest}], lr=0.05)


def train_twice(backend: str) -> dict[str, Any]:
    trainer = make_trainer(
        backend, t16(dtype=torch.float32), rows(20, torch.float32), loss_fn=F.mse_loss, optimizer=two_groups,
        max_steps=4, batch_size=2, lr_scheduler="linear", callbacks=[Trace()],
    )  # fmt: skip
    return {"first": logged(trainer, "learning_rate"), "second": logged(trainer, "learning_rate")}


def by_configuration(backend: str, configured: bool) -> dict[str, Any]:
    """Train with AdamW, made by DeepSpeed from its configuration, or by the trainer."""
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    if configured:
        params = {"lr": "auto", "weight_decay": "auto", "torch_adam": True}
        config["optimizer"] = {"type": "AdamW", "params": params}
    return logged(make_trainer(
        backend, t16(dtype=torch.float32), rows(20, torch.float32), loss_fn=F.mse_loss, max_steps=5, batch_size=2,
        learning_rate=0.05, weight_decay=0.1, deepspeed_config=config, callbacks=[Trace()],
    ))  # fmt: skip


def initialize_again(backend: str, way: str, folder: str) -> dict[str, Any]:
    """Train a model of `model_init` twice, after another trainer was made; then search for a learning rate."""
    models = weakref.WeakSet[Any]()

    def make(trial: Any) -> Any:
        model = t16(dtype=torch.float32)
        models.add(model)
        return model

    args = arguments(
        folder, max_steps=3, per_device_train_batch_size=2, save_strategy="no", gradient_accumulation_steps=1,
        **PLAIN[way],
    )  # fmt: skip
    trainer = HFTrainer(
        None, args, rows(20, torch.float32), rows(6, torch.float32), loss_fn=F.mse_loss, model_init=make,
        callbacks=[Trace()],
    )  # fmt: skip
    make_trainer("hf2", t16(dtype=torch.float32), rows(20, torch.float32), loss_fn=F.mse_loss)
    assert type(trainer.model_wrapped).__name__ == SHARDED.get(way, "DistributedDataParallel")
    losses, again, before = logged(trainer)["loss"], logged(trainer)["loss"], trainer.evaluate()
    assert again == pytest.approx(losses, abs=1e-6) and len(losses) == 3

    def space(trial: Any) -> dict[str, Any]:
        return {"learning_rate": trial.suggest_categorical("learning_rate", [0.05, 1e-4])}

    with pytest.raises(ConfigError, match="`catch` would only act on the main process"):
        trainer.hyperparameter_search(space, n_trials=2, backend="optuna", catch=(ValueError,))
    sampler = optuna.samplers.RandomSampler(seed=0)
    best = trainer.hyperparameter_search(space, n_trials=2, sampler=sampler, backend="optuna")
    gc.collect()
    assert trainer.evaluate() == before and len(models) == 1
    return {"losses": losses, "objective": best.objective if trainer.is_main_process else None}


def initialize_again_by_configuration(backend: str, folder: str) -> dict[str, Any]:
    """Train a model of `model_init` twice, on the schedule of DeepSpeed's configuration."""
    config = {**PLAIN["zero2"]["deepspeed"], "scheduler": SCHEDULE}
    args = arguments(folder, max_steps=3, save_strategy="no", eval_strategy="no", deepspeed=config)
    trainer = fit(HFTrainer(
        None, args, rows(20, torch.float32), loss_fn=F.mse_loss, model_init=lambda: t16(dtype=torch.float32),
        callbacks=[Trace()],
    ))  # fmt: skip
    return logged(trainer, "learning_rate")


def generate(backend: str, way: str, folder: str) -> dict[str, Any]:
    options = {"predict_with_generate": True, "generation_max_length": 9, "max_steps": 2, "save_strategy": "no"}
    args = arguments(folder, kind=Seq2SeqTrainingArguments, **options, **WAYS[way])
    trainer = HFTrainer(
        t5().float(), args, Tokens(16), Tokens(7), compute_metrics=lambda p: {"sum": float(p.predictions.sum())}
    )
    return {"valid": trainer.train()["valid"], "predictions": trainer.predict(Tokens(7)).predictions.tolist()}


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    jobs = Jobs()

    def add(name: str, function: Any, backend: str = "hf2", **options: Any) -> None:
        jobs.add(name, backend, function, folder=str(folder / name), **options)

    def selected(test: str, parameter: str = "way") -> list[str]:
        return sorted(asked_for(request, parameter, test=f"test_{test}"))

    llama(0).float().save_pretrained(folder / "llama")
    add("parts", load_in_parts, model=str(folder / "llama"))
    for way in sorted({"whole", "zero3", *selected("arguments"), *selected("stock")}):
        add(way, speak, way=way)
    add("single", speak, "hf", way="whole")
    for way in LAUNCHED:
        jobs.add(f"launched-{way}", "hf2", start, way=way)
    asked = asked_for(request, "what", "way")
    for what, way in sorted(asked | {(what, "whole") for what, _ in asked}):
        add(f"{what}-{way}", initialize_again if what == "model_init" else generate, way=way)
    add("again", initialize_again_by_configuration)
    for backend in ["ddp", *selected("second", "backend")]:
        jobs.add(f"twice-{backend}", backend, train_twice)
    for configured in (False, True):
        jobs.add(f"configured-{configured}", "zero2", by_configuration, configured=configured)
    return sound(launch_all(jobs, folder / "launch"))


@pytest.mark.parametrize("way", thinned(WAYS, ["whole", "fsdp", "zero3"]))
def test_arguments_shard_and_change_no_number(results: Any, way: str) -> None:
    """A language model with masked prompts trains, is evaluated and predicts as an unsharded one on one process."""
    (expected,) = results["single"]
    assert [row["eval_rows"] for row in expected["valid"]] == [7] * 2
    for result in results[way]:
        assert result["groups"] == (1 if way == "configured" else 2)
        if way == "configured":  # another schedule: these are the rates of each update; a stock Trainer logs the next
            assert result["learning_rate"] == pytest.approx([0.0, 0.0, 0.025] + 2 * [0.05])
            assert gap(result["loss"][:2], expected["loss"][:2]) < 1e-5
        else:
            assert gap(result, expected) < 1e-5


def test_model_loaded_in_parts_trains_and_saves_exactly(results: Any, folder: Path) -> None:
    for result in results["parts"]:
        assert gap(result["loss"], results["zero3"][0]["loss"]) < 1e-6
    weights = load_file(folder / "parts/model/model.safetensors")
    assert gap(weights, load_file(folder / "zero3/model/model.safetensors")) < 1e-6


@pytest.mark.parametrize("way", ["fsdp", "zero3"])
def test_stock_trainer_resumes_from_sharded_weights(results: Any, folder: Path, way: str) -> None:
    assert results[way]
    state, expected = (
        torch.load(folder / name / "checkpoint-3/optimizer.pt", weights_only=True) for name in (way, "whole")
    )
    moments, reference = (
        {number: [entries["exp_avg"], entries["exp_avg_sq"]] for number, entries in optimizer["state"].items()}
        for optimizer in (state, expected)
    )
    assert {type(tensor) for tensors in moments.values() for tensor in tensors} == {torch.Tensor}
    assert gap(moments, reference) < 1e-6
    groups = [[group["params"] for group in optimizer["param_groups"]] for optimizer in (state, expected)]
    assert groups[0] == groups[1]
    args = arguments(str(folder / "stock"), save_strategy="no", eval_strategy="no")
    stock = Stock(llama(0).float(), args, train_dataset=Tokens(29))
    assert stock.train(resume_from_checkpoint=str(folder / way / "checkpoint-3")).global_step == 5
    assert stock.optimizer.param_groups[0]["weight_decay"] == 0.1


def test_launcher_shards_without_training_arguments(results: Any) -> None:
    assert gap(results["launched-fsdp"], results["launched-zero2"]) < 1e-5


def test_deepspeed_schedule_restarts_with_the_model(results: Any) -> None:
    assert [result["learning_rate"] for result in results["again"]] == [pytest.approx([0.0, 0.0, 0.025])] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("what", "way"), [("model_init", "fsdp"), ("model_init", "zero2"), ("generation", "zero3")])
def test_shards_are_made_again_and_generate_as_unsharded(results: Any, what: str, way: str) -> None:
    """The models of `model_init`, for each run of a training or a search, and the predictions of metrics."""
    assert gap(results[f"{what}-{way}"], results[f"{what}-whole"]) < 1e-5


@pytest.mark.parametrize("backend", thinned(["fsdp", "zero2", "zero3", "hf_zero2"], ["zero3"]))
def test_second_training_has_a_new_optimizer_and_schedule(results: Any, backend: str) -> None:
    for result, expected in zip(results[f"twice-{backend}"], results["twice-ddp"], strict=True):
        rates = expected["second"]["learning_rate"]
        assert rates == expected["first"]["learning_rate"] and len(rates) == 4
        assert gap(result, expected) < 1e-5


def test_deepspeed_optimizer_equals_ours(results: Any) -> None:
    assert gap(results["configured-True"], results["configured-False"]) < 1e-5
