"""HFTrainer on two processes: transformers' arguments and models, also sharded, have the numbers of one process.

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
from backends import PROCESSES, Jobs, asked_for, gap, launch_all, make_trainer, sound, tensors_of
from forking import current_rank
from marks import thinned
from recipes import Trace, fit, rows, setting, t16
from safetensors.torch import load_file
from tiny import Tokens, llama, t5
from torch.utils.data import DataLoader, DistributedSampler, default_collate
from transformers import LlamaForCausalLM, Seq2SeqTrainingArguments, TrainerCallback, TrainingArguments
from transformers import Trainer as Stock

from omnitrain import HFTrainer
from omnitrain.core.errors import ConfigError


class Prepares(HFTrainer):
    """Hands its loaders to accelerate, as subclasses of transformers.Trainer do."""

    def _loader(self, dataset: Any) -> Any:
        loader = DataLoader(dataset, batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")))
        return self.accelerator.prepare(loader)

    def get_train_dataloader(self) -> Any:
        return self._loader(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._loader(self.eval_dataset if eval_dataset is None else eval_dataset)


def prepare(backend: str, folder: str) -> dict[str, Any]:
    """Train on 21 rows and evaluate 11 by loaders that accelerate has prepared; predict by transformers' loop."""
    trainer = Prepares(
        t16(), None, rows(21), rows(11), loss_fn=F.mse_loss, epochs=2, learning_rate=0.05, batch_size=2,
        progress_bar=False, load_best_at_end=False, data_collator=default_collate,
    )  # fmt: skip
    metrics = trainer.train()
    output = trainer.evaluation_loop(trainer.get_test_dataloader(rows(11)), "Prediction", metric_key_prefix="loop")
    return {
        "losses": [row["eval_loss"] for row in metrics["valid"]], "tensors": tensors_of(trainer),
        "predictions": output.predictions.tolist(), "loop": [output.metrics["loop_loss"], output.num_samples],
        "shares": sum(len(labels) for _, labels in trainer.get_test_dataloader(rows(11))),
    }  # fmt: skip


def search(backend: str, folder: str) -> dict[str, Any]:
    """Search over the learning rate, where the second trial is pruned; then train as without a search."""

    class PrunesSecond(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return trial.number == 1 and len(trial.intermediate_values) == 2

    args = TrainingArguments(
        folder, per_device_train_batch_size=8 // PROCESSES[backend], max_steps=6, optim="sgd", eval_strategy="steps",
        eval_steps=2, save_strategy="no", use_cpu=True, report_to="none", disable_tqdm=True, learning_rate=0.01,
    )  # fmt: skip
    trainer = HFTrainer(
        None, args, rows(20), rows(10), loss_fn=F.mse_loss, progress_bar=False,
        model_init=lambda: t16(seed=current_rank()),
    )  # fmt: skip
    evaluations = []
    best = trainer.engine.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 0.1, log=True)}, n_trials=3,
        sampler=optuna.samplers.RandomSampler(seed=0), pruner=PrunesSecond(), backend="optuna",
        compute_objective=lambda metrics: evaluations.append(metrics["eval_loss"]) or metrics["eval_loss"],
    )  # fmt: skip
    trainer.train()
    chosen = None if best is None else [best.run_id, best.objective, best.hyperparameters["learning_rate"]]
    return {"best": chosen, "evaluations": evaluations, "tensors": tensors_of(trainer)}


def flag(backend: str, folder: str) -> dict[str, Any]:
    """Set transformers' flags on the second process only."""
    steps = {"should_save": 2, "should_evaluate": 3, "should_training_stop": 5}
    flags = [
        setting(TrainerCallback, "on_step_end", name, step=step if current_rank() == 1 else -1)
        for name, step in steps.items()
    ]
    trainer = HFTrainer(
        t16(), None, rows(24), rows(3), loss_fn=F.mse_loss, epochs=2, save_dir=folder, batch_size=2, save_steps=100,
        keep_best=0, eval_steps=100, progress_bar=False, callbacks=flags, load_best_at_end=False,
    )  # fmt: skip
    metrics = trainer.train()
    saved = [path.name for path in trainer.store.checkpoints()]
    return {"saved": saved, "valid": [row["step"] for row in metrics["valid"]], "step": trainer.progress.step}


def arguments(backend: str, folder: str, **options: Any) -> Seq2SeqTrainingArguments:
    """Arguments for steps of 8 sequences, whatever the number of processes."""
    processes = PROCESSES[backend]
    defaults = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8 // processes, "num_train_epochs": 1,
        "learning_rate": 0.5, "optim": "sgd", "save_strategy": "no", "use_cpu": True, "report_to": "none",
        "per_device_eval_batch_size": 2 // processes, "disable_tqdm": True,
    }  # fmt: skip
    return Seq2SeqTrainingArguments(folder, **{**defaults, **options})


def generate(backend: str, folder: str) -> dict[str, Any]:
    """Generate for 7 sequences; of the last batch one process has one, and the other none."""
    args = arguments(backend, folder, predict_with_generate=True, generation_max_length=30, eval_strategy="epoch")
    model = t5()
    model.generation_config.eos_token_id = list(range(2, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    calls: list[Any] = []

    def note(prediction: Any) -> dict[str, float]:
        calls.append((prediction.predictions.tolist(), prediction.label_ids.tolist()))
        return {"ends": float((prediction.predictions == 5).sum())}

    trainer = HFTrainer(model, args, Tokens(8, "pairs"), Tokens(7, "pairs"), compute_metrics=note)
    metrics = trainer.train()
    output = trainer.predict(Tokens(7, "pairs"))
    predictions = [output.predictions.tolist(), output.labels.tolist()]
    return {"valid": metrics["valid"], "predictions": predictions, "calls": calls}


def batches(backend: str, folder: str, shared: bool = False) -> dict[str, Any]:
    """Evaluate 7 sequences batch by batch; if `shared`, a sampler of PyTorch distributes them."""
    data, calls, size = Tokens(7), [], 4 // PROCESSES[backend]
    args = arguments(backend, folder, batch_eval_metrics=True, per_device_eval_batch_size=size)
    loader: Any = data
    if shared:
        sampler = DistributedSampler(data, shuffle=False) if PROCESSES[backend] > 1 else None
        loader = DataLoader(data, batch_size=size, sampler=sampler)

    def note(prediction: Any, compute_result: bool) -> dict[str, float]:
        calls.append([prediction.predictions.argmax(-1).tolist(), prediction.label_ids.tolist(), compute_result])
        return {"rows": float(sum(len(call[0]) for call in calls))} if compute_result else {}

    metrics = HFTrainer(llama(), args, compute_metrics=note).evaluate(loader)
    return {"metrics": metrics, "calls": calls}


def inputs(backend: str, folder: str) -> dict[str, Any]:
    calls: list[Any] = []

    def note(prediction: Any) -> dict[str, float]:
        calls.append([prediction.inputs.tolist(), prediction.losses.tolist()])
        return {"rows": len(prediction.inputs)}

    args = arguments(backend, folder, include_for_metrics=["inputs", "loss"], per_device_eval_batch_size=1)
    return {"metrics": HFTrainer(llama(), args, compute_metrics=note).evaluate(Tokens(7)), "calls": calls}


# --- sharded weights by arguments, configurations of DeepSpeed, launchers


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
DATA = {"label_smoothing_factor": 0.2, "dataloader_drop_last": True, "data_seed": 9}
"""Full micro-batches over all processes, in the order of another seed, with smoothed labels."""
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


def sharded_arguments(folder: str, kind: Any = TrainingArguments, **options: Any) -> Any:
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
    trainer = speaker(sharded_arguments(folder, **DATA, **WAYS[way]), stock_checkpoints=True)
    parameter = next(trainer.model.parameters())
    assert bool(parameter.numel()) == (way != "zero3")
    made_of = f"{type(trainer.model_wrapped).__name__} {type(parameter).__name__}"
    assert made_of == WRAPPED.get(way, "DeepSpeedEngine Parameter") or backend == "hf"
    numbers = logged(trainer, "grad_norm", "learning_rate")
    predicted = trainer.predict(Tokens(7))
    trainer.save_model(f"{folder}/model")
    progress = trainer.progress
    return {
        **numbers, "progress": [progress.step, progress.samples, progress.epochs],
        "groups": len(trainer.optimizer.param_groups),
        "their losses": [row["loss"] for row in trainer.engine.state.log_history if "loss" in row],
        "valid": trainer.metrics["valid"], "predictions": predicted.predictions.tolist(),
        "tensors": tensors_of(trainer),
    }  # fmt: skip


def load_in_parts(backend: str, folder: str, model: str) -> dict[str, Any]:
    """Train a model that transformers has loaded in parts, as it does once there are arguments for ZeRO 3."""
    import deepspeed

    args = sharded_arguments(folder, **DATA, **WAYS["zero3"])
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

    args = sharded_arguments(
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
    args = sharded_arguments(folder, max_steps=3, save_strategy="no", eval_strategy="no", deepspeed=config)
    trainer = fit(HFTrainer(
        None, args, rows(20, torch.float32), loss_fn=F.mse_loss, model_init=lambda: t16(dtype=torch.float32),
        callbacks=[Trace()],
    ))  # fmt: skip
    return logged(trainer, "learning_rate")


def generate_sharded(backend: str, way: str, folder: str) -> dict[str, Any]:
    options = {"predict_with_generate": True, "generation_max_length": 9, "max_steps": 2, "save_strategy": "no"}
    args = sharded_arguments(folder, kind=Seq2SeqTrainingArguments, **options, **WAYS[way])
    trainer = HFTrainer(
        t5().float(), args, Tokens(16), Tokens(7), compute_metrics=lambda p: {"sum": float(p.predictions.sum())}
    )
    return {"valid": trainer.train()["valid"], "predictions": trainer.predict(Tokens(7)).predictions.tolist()}


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """What came of each function on two processes, and as "<name> single" on one."""
    jobs = Jobs()

    def add(name: str, function: Any, backend: str = "hf2", **options: Any) -> None:
        jobs.add(name, backend, function, folder=str(folder / name), **options)

    def selected(test: str, parameter: str = "way") -> list[str]:
        return sorted(asked_for(request, parameter, test=f"test_{test}"))

    for function in (prepare, flag, search, generate, batches, inputs):
        add(function.__name__, function)
        add(f"{function.__name__} single", function, "hf")
    add("shared batches", batches, shared=True)
    llama(0).float().save_pretrained(folder / "llama")
    add("parts", load_in_parts, model=str(folder / "llama"))
    for way in sorted({"whole", "zero3", *selected("arguments"), *selected("stock")}):
        add(way, speak, way=way)
    add("single", speak, "hf", way="whole")
    for way in LAUNCHED:
        jobs.add(f"launched-{way}", "hf2", start, way=way)
    asked = asked_for(request, "what", "way")
    for what, way in sorted(asked | {(what, "whole") for what, _ in asked}):
        add(f"{what}-{way}", initialize_again if what == "model_init" else generate_sharded, way=way)
    add("again", initialize_again_by_configuration)
    for backend in ["ddp", *selected("second", "backend")]:
        jobs.add(f"twice-{backend}", backend, train_twice)
    for configured in (False, True):
        jobs.add(f"configured-{configured}", "zero2", by_configuration, configured=configured)
    return sound(launch_all(jobs, folder / "launch"))


def test_prepared_loaders_are_split_once(results: Any) -> None:
    (expected,) = results["prepare single"]
    assert expected.pop("shares") == expected["loop"][1] == len(expected["predictions"]) == 11
    assert [result.pop("shares") for result in results["prepare"]] == [6, 6]  # code that reads one gets a share
    assert all(gap(result, expected) <= 1e-10 for result in results["prepare"])


def test_flags_of_one_process_hold_for_all(results: Any) -> None:
    expected = {"saved": ["checkpoint-2", "checkpoint-5"], "valid": [3], "step": 5}
    assert results["flag"] == [expected, expected]


def test_search_on_two_processes_matches_one(results: Any) -> None:
    (expected,), (main, other) = results["search single"], results["search"]
    assert len(expected["evaluations"]) == 3 + 2 + 3
    assert gap(main, expected) <= 1e-10
    assert other["best"] is None and gap({**other, "best": expected["best"]}, expected) <= 1e-10


def test_generated_answers_keep_the_order_of_the_data(results: Any) -> None:
    """`compute_metrics` gets them on the main process."""
    (expected,), ranks = results["generate single"], results["generate"]
    assert len({tuple(row) for row in expected["predictions"][0]}) > 1
    assert [rank["predictions"] for rank in ranks] == [expected["predictions"]] * 2
    assert all(gap(rank["valid"], expected["valid"]) <= 1e-6 for rank in ranks)
    assert [rank["calls"] for rank in ranks] == [expected["calls"], []]


@pytest.mark.parametrize("name", ["batches", "shared batches"])
def test_batch_metrics_get_the_batches_of_all_processes(results: Any, name: str) -> None:
    (expected,), (main, other) = results["batches single"], results[name]
    assert [len(batch[0]) for batch in expected["calls"]] == [4, 3]
    assert main["calls"] == expected["calls"] and other["calls"] == []
    assert main["metrics"] == other["metrics"] and gap(main["metrics"], expected["metrics"]) <= 1e-6


def test_inputs_and_losses_keep_the_order_of_the_data(results: Any) -> None:
    (expected,), (main, other) = results["inputs single"], results["inputs"]
    assert main["calls"][0][0] == expected["calls"][0][0] == Tokens(7).ids.tolist() and other["calls"] == []
    assert gap(main["calls"][0][1], expected["calls"][0][1]) <= 1e-6
    assert len(set(expected["calls"][0][1])) == 6  # two sequences have no label, and NaN as their loss
    assert gap(other["metrics"], expected["metrics"]) <= 1e-6


@pytest.mark.parametrize("way", thinned(WAYS, ["whole", "fsdp", "zero3"]))
def test_arguments_shard_and_change_no_number(results: Any, way: str) -> None:
    """A language model with masked prompts trains, is evaluated and predicts as an unsharded one on one process."""
    (expected,) = results["single"]
    assert [row["eval_rows"] for row in expected["valid"]] == [7] * 2 and expected["progress"][:2] == [5, 36]
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
    args = sharded_arguments(str(folder / "stock"), save_strategy="no", eval_strategy="no")
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
