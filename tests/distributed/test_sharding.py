"""Weights in parts, as users ask for them: transformers' arguments, configurations of DeepSpeed, launchers, adapters.

The numbers of plain models are in `test_same_numbers.py`, all ways of resuming in `test_resume_matrix.py`.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import Job, asked_for, gap, launch, make_trainer  # noqa: E402
from forking import Case, play  # noqa: E402
from marks import thinned  # noqa: E402
from recipes import Trace, rows, t16  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_hf_two_processes import Tokens, correct, llama, rank  # noqa: E402
from transformers import (  # noqa: E402
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
)
from transformers import Trainer as Stock  # noqa: E402

from omnitrain import HFTrainer  # noqa: E402
from omnitrain.checkpoint.tensors import Gathered, whole  # noqa: E402
from omnitrain.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.distributed

HERE = "test_sharding"
AUTO: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
THEIR_OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
}  # DeepSpeed's own would be compiled first
THEIR_SCHEDULE = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"},
}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "fsdp": {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "activation_checkpointing": True,
        },
    },
    "zero1": {"deepspeed": {**AUTO, "zero_optimization": {"stage": 1}}},
    "zero2": {"deepspeed": AUTO},
    "zero3": {"deepspeed": {**AUTO, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}}},
    "configured": {"deepspeed": {**AUTO, "optimizer": THEIR_OPTIMIZER, "scheduler": THEIR_SCHEDULE}},
}
TWICE = ["ddp", "fsdp", "zero1", "zero2", "zero3", "hf2", "hf_fsdp", "hf_zero2"]
PLAIN: dict[str, dict[str, Any]] = {
    "whole": {},
    "fsdp": {"fsdp": True, "fsdp_config": {"version": 2}},
    "zero2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
}
"""The same for models that are none of transformers."""
LAUNCHED = {
    "fsdp": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
}


# --- what runs on every process


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0,
            pad_token_id=0, eos_token_id=1, dropout_rate=0.0,
        )
    )  # fmt: skip


def arguments(folder: str, kind: Any = TrainingArguments, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8 // int(os.environ.get("WORLD_SIZE", "1")),
        "num_train_epochs": 2, "learning_rate": 0.05, "weight_decay": 0.1, "lr_scheduler_type": "cosine",
        "warmup_steps": 2, "max_grad_norm": 0.5, "per_device_eval_batch_size": 2, "eval_strategy": "steps",
        "eval_steps": 3, "save_strategy": "steps", "save_steps": 3, "load_best_model_at_end": False,
        "logging_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    return kind(folder, **{**defaults, **options})


def speaker(args: TrainingArguments, model: Any = None, **options: Any) -> HFTrainer:
    return HFTrainer(
        model or llama(rank()).float(), args, Tokens(29), Tokens(7), compute_metrics=correct,
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1), optimization_metric="accuracy", **options,
    )  # fmt: skip


def speak(backend: str, way: str, folder: str) -> dict[str, Any]:
    """Train a language model with transformers' optimizer of two groups; evaluate, predict and save it."""
    trace = Trace()
    trainer = speaker(arguments(folder, **WAYS[way]), callbacks=[trace], stock_checkpoints=True)
    wrapped, part = type(trainer.model_wrapped).__name__, type(next(trainer.model.parameters())).__name__
    part += " of nothing" if not next(trainer.model.parameters()).numel() else ""
    metrics = trainer.train()
    predicted = trainer.predict(Tokens(7))
    trainer.save_model(f"{folder}/model")
    return {
        "made of": [wrapped, part, len(trainer.optimizer.param_groups)],
        "losses": [row["loss"] for row in trace.logs],
        "norms": [row["grad_norm"] for row in trace.logs],
        "rates": [row["learning_rate"] for row in trace.logs],
        "their losses": [row["loss"] for row in trainer.engine.state.log_history if "loss" in row],
        "valid": metrics["valid"],
        "predictions": predicted.predictions.tolist(),
        "tensors": {name: whole(one) for name, one in trainer.backend.model_tensors().items()},
    }


def born_in_parts(backend: str, folder: str, model: str) -> dict[str, Any]:
    """Train a model that transformers has loaded piece by piece, as it does once there are arguments for ZeRO 3."""
    import deepspeed
    from transformers import LlamaForCausalLM

    args = arguments(folder, **WAYS["zero3"])
    deepspeed.init_distributed("gloo")  # on GPUs the arguments do it
    loaded = LlamaForCausalLM.from_pretrained(model)
    trace, empty = Trace(), not next(loaded.parameters()).numel()
    trainer = speaker(args, loaded, callbacks=[trace])
    trainer.train()
    trainer.save_model(f"{folder}/model")
    return {"empty": empty, "losses": [row["loss"] for row in trace.logs]}


def start(backend: str, way: str, folder: str) -> dict[str, Any]:
    """Train as a launcher asks for, which speaks by the environment."""
    os.environ.update(LAUNCHED[way])
    try:
        trace = Trace()
        options: dict[str, Any] = {"learning_rate": 0.05, "max_steps": 4, "batch_size": 2, "progress_bar": False}
        trainer = HFTrainer(
            t16(dtype=torch.float32), None, rows(20, torch.float32), loss_fn=F.mse_loss, callbacks=[trace], log_steps=1,
            **options,
        )  # fmt: skip
        wrapped = type(trainer.model_wrapped).__name__
        trainer.train()
    finally:
        for name in LAUNCHED[way]:
            del os.environ[name]
    return {"wrapped": wrapped, "losses": [row["loss"] for row in trace.logs]}


def halves(parameters: Any) -> torch.optim.Optimizer:
    kept = list(parameters)
    return torch.optim.AdamW([{"params": kept[:1], "weight_decay": 0.2}, {"params": kept[1:]}], lr=0.05)


def train_twice(backend: str) -> dict[str, Any]:
    """Train in two groups of parameters, and once more from there."""
    trace = Trace()
    trainer = make_trainer(
        backend, t16(dtype=torch.float32), rows(20, torch.float32), loss_fn=F.mse_loss, optimizer=halves, max_steps=4,
        batch_size=2, lr_scheduler="linear", callbacks=[trace],
    )  # fmt: skip
    trainer.train()
    trainer.train()
    return {"losses": [row["loss"] for row in trace.logs], "rates": [row["learning_rate"] for row in trace.logs]}


def cut_and_resume(backend: str, folder: str) -> dict[str, Any]:
    """Train in two groups of parameters in one piece, and in two."""
    found = []
    for place, steps, resume in (("whole", 6, None), ("parts", 3, None), ("parts", 6, "auto")):
        trainer = make_trainer(
            backend, t16(dtype=torch.float32), rows(20, torch.float32), loss_fn=F.mse_loss, optimizer=halves,
            max_steps=steps, batch_size=2, save_dir=f"{folder}/{place}", save_steps=3,
        )  # fmt: skip
        trainer.train(resume_from=resume)
        moments, _ = trainer.backend.optimizer_state()
        found.append(
            {name: whole(one).tolist() for name, one in {**trainer.backend.model_tensors(), **moments}.items()}
        )
    return {"whole": found[0], "parts": found[2]}


def by_configuration(backend: str, stage: int, configured: bool) -> dict[str, Any]:
    """Train with AdamW, which DeepSpeed makes from its configuration, or we."""
    from omnitrain import AccelerateTrainer

    params = {"lr": "auto", "weight_decay": "auto", "torch_adam": True}
    config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    config |= {"optimizer": {"type": "AdamW", "params": params}} if configured else {}
    trace = Trace()
    trainer = AccelerateTrainer(
        t16(dtype=torch.float32), rows(20, torch.float32), loss_fn=F.mse_loss, max_steps=5, batch_size=2, log_steps=1,
        learning_rate=0.05, weight_decay=0.1, deepspeed_config=config, callbacks=[trace], progress_bar=False,
    )  # fmt: skip
    trainer.train()
    return {"losses": [row["loss"] for row in trace.logs]}


def make_anew(backend: str, way: str, folder: str) -> dict[str, Any]:
    """Train a model of `model_init` twice, after another trainer was made; then search for a learning rate."""
    trace, made = Trace(), list[weakref.ref[Any]]()

    def make(trial: Any) -> Any:
        model = t16(dtype=torch.float32)
        made.append(weakref.ref(model))
        return model

    args = arguments(
        folder,
        max_steps=3,
        per_device_train_batch_size=2,
        save_strategy="no",
        gradient_accumulation_steps=1,
        **PLAIN[way],
    )
    trainer = HFTrainer(
        None, args, rows(20, torch.float32), rows(6, torch.float32), loss_fn=F.mse_loss, callbacks=[trace],
        model_init=make,
    )  # fmt: skip
    make_trainer("hf2", t16(dtype=torch.float32), rows(20, torch.float32), loss_fn=F.mse_loss)
    trainer.train()
    trainer.train()
    losses, kind, before = [row["loss"] for row in trace.logs], type(trainer.model_wrapped).__name__, trainer.evaluate()

    def space(trial: Any) -> dict[str, Any]:
        return {"learning_rate": trial.suggest_categorical("learning_rate", [0.05, 1e-4])}

    with pytest.raises(ConfigError, match="`catch` would only act on the main process"):
        trainer.hyperparameter_search(space, n_trials=2, backend="optuna", catch=(ValueError,))
    sampler = optuna.samplers.RandomSampler(seed=0)
    best = trainer.hyperparameter_search(space, n_trials=2, sampler=sampler, backend="optuna")
    gc.collect()
    return {
        "made of": kind,
        "losses": losses,
        "objective": best.objective if trainer.is_main_process else None,
        "is unchanged": trainer.evaluate() == before,
        "alive": sum(one() is not None for one in made),
    }


def make_anew_by_configuration(backend: str, folder: str) -> dict[str, Any]:
    """Train a model of `model_init` twice, on the schedule of DeepSpeed's configuration."""
    trace, config = Trace(), {**PLAIN["zero2"]["deepspeed"], "scheduler": THEIR_SCHEDULE}
    args = arguments(folder, max_steps=3, save_strategy="no", eval_strategy="no", deepspeed=config)
    trainer = HFTrainer(
        None, args, rows(20, torch.float32), loss_fn=F.mse_loss, callbacks=[trace],
        model_init=lambda: t16(dtype=torch.float32),
    )  # fmt: skip
    trainer.train()
    trainer.train()
    return {"rates": [row["learning_rate"] for row in trace.logs]}


def answer(backend: str, way: str) -> dict[str, Any]:
    """Have a model in parts generate what metrics look at."""
    options = {"predict_with_generate": True, "generation_max_length": 9, "max_steps": 2, "save_strategy": "no"}
    args = arguments(tempfile.mkdtemp(), kind=Seq2SeqTrainingArguments, **options, **WAYS[way])
    trainer = HFTrainer(
        t5(), args, Tokens(16), Tokens(7), compute_metrics=lambda p: {"sum": float(p.predictions.sum())}
    )
    return {"valid": trainer.train()["valid"], "predictions": trainer.predict(Tokens(7)).predictions.tolist()}


def adapt(backend: str, way: str, folder: str) -> dict[str, Any]:
    """Train adapters of PEFT, save them, and resume."""
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    runs = []
    for steps, resume in ((3, None), (6, "auto")):
        torch.manual_seed(0)
        model = peft.get_peft_model(llama(0).float(), config)
        trainer = speaker(arguments(folder, max_steps=steps, **WAYS[way]), model, load_best_at_end=False)
        runs.append(trainer.train(resume_from=resume)["valid"])
    trainer.save_model(f"{folder}/adapters")
    return {"valid": runs[-1]}


def fail_on_main(backend: str, folder: str) -> dict[str, Any]:
    """Save, while the main process cannot put its third tensor together."""
    trainer = make_trainer(
        backend, t16(dtype=torch.float32), rows(20, torch.float32), loss_fn=F.mse_loss, max_steps=2, batch_size=2,
        save_dir=folder, save_steps=10,
    )  # fmt: skip
    trainer.train()
    count, weights = [0], trainer.backend.model_tensors()

    def failing(one: Gathered) -> Gathered:
        def read() -> torch.Tensor:
            count[0] += 1
            if count[0] == 3 and rank() == 0:
                raise ValueError("as was asked for")
            return one.read()

        return Gathered(one.shape, one.dtype, read)

    trainer.backend.model_tensors = lambda: {name: failing(one) for name, one in weights.items()}
    trainer.save_checkpoint()
    return {}


# --- what came of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharding")


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    jobs = [Job(way, "hf2", f"{HERE}:speak", {"way": way, "folder": str(folder / way)}) for way in WAYS]
    jobs += [Job(f"launched-{way}", "hf2", f"{HERE}:start", {"way": way, "folder": ""}) for way in LAUNCHED]
    jobs += [
        Job(f"adapters-{way}", "hf2", f"{HERE}:adapt", {"way": way, "folder": str(folder / f"adapters-{way}")})
        for way in ("whole", "fsdp", "zero2")
    ]
    for way in PLAIN:
        options = {"way": way, "folder": str(folder / f"anew-{way}")}
        jobs.append(Job(f"anew-{way}", "hf2", f"{HERE}:make_anew", options))
    options = {"folder": str(folder / "anew-configured")}
    jobs.append(Job("anew-configured", "hf2", f"{HERE}:make_anew_by_configuration", options))
    jobs += [Job(f"answers-{way}", "hf2", f"{HERE}:answer", {"way": way}) for way in ("whole", "zero2", "zero3")]
    for backend in sorted({"ddp", *asked_for(request, "backend")}):
        jobs.append(Job(f"twice-{backend}", backend, f"{HERE}:train_twice"))
        jobs.append(
            Job(f"cut-{backend}", backend, f"{HERE}:cut_and_resume", {"folder": str(folder / f"cut-{backend}")})
        )
    for stage in (1, 3):
        for configured in (False, True):
            options = {"stage": stage, "configured": configured}
            jobs.append(Job(f"configuration-{stage}-{configured}", "zero2", f"{HERE}:by_configuration", options))
    llama(0).float().save_pretrained(folder / "llama")
    options = {"folder": str(folder / "born"), "model": str(folder / "llama")}
    jobs.append(Job("born in parts", "hf2", f"{HERE}:born_in_parts", options))
    return launch(jobs, folder / "launch")


def test_what_is_asked_for_is_what_trains(results: Any) -> None:
    made = {way: results[way][1].get("made of", results[way][1]) for way in WAYS}
    assert made == {
        "whole": ["DistributedDataParallel", "Parameter", 2],
        "fsdp": ["FSDPLlamaForCausalLM", "DTensor", 2],
        "zero1": ["DeepSpeedEngine", "Parameter", 2],
        "zero2": ["DeepSpeedEngine", "Parameter", 2],
        "zero3": ["DeepSpeedEngine", "Parameter of nothing", 2],
        "configured": ["DeepSpeedEngine", "Parameter", 1],
    }


@pytest.mark.parametrize("way", ["fsdp", "zero1", "zero2", "zero3"])
def test_a_language_model_in_parts_trains_and_is_evaluated_as_in_one_piece(results: Any, way: str) -> None:
    for one, expected in zip(results[way], results["whole"], strict=True):
        assert gap({**one, "made of": 0}, {**expected, "made of": 0}) < 1e-5


def test_a_model_that_was_never_whole_trains_and_is_saved_as_one_that_was(results: Any, folder: Path) -> None:
    for result in results["born in parts"]:
        assert result.get("empty"), result
        assert gap(result["losses"], results["zero3"][0]["losses"]) < 1e-6
    saved = load_file(folder / "born/model/model.safetensors")
    assert gap(saved, load_file(folder / "zero3/model/model.safetensors")) < 1e-6


def test_optimizer_and_schedule_of_deepspeed_s_configuration_are_those_that_it_names(results: Any) -> None:
    for result in results["configured"]:
        assert result["rates"] == pytest.approx(
            [0.0, 0.0, 0.025] + 5 * [0.05]
        )  # of each update; a stock Trainer logs the next one's
    assert gap(results["configured"][0]["losses"][:2], results["whole"][0]["losses"][:2]) < 1e-5


@pytest.mark.parametrize("way", ["fsdp", "zero2", "zero3"])
def test_a_stock_trainer_goes_on_from_a_checkpoint_of_weights_in_parts(results: Any, folder: Path, way: str) -> None:
    ours = torch.load(folder / way / "checkpoint-3/optimizer.pt", weights_only=True)
    expected = torch.load(folder / "whole" / "checkpoint-3/optimizer.pt", weights_only=True)
    assert ours["state"].keys() == expected["state"].keys()
    for number, entries in expected["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert type(ours["state"][number][name]) is torch.Tensor
            assert gap(ours["state"][number][name], entries[name]) < 1e-6
    assert [group["params"] for group in ours["param_groups"]] == [one["params"] for one in expected["param_groups"]]
    stock = Stock(
        llama(0).float(),
        arguments(str(folder / "stock"), save_strategy="no", eval_strategy="no"),
        train_dataset=Tokens(29),
    )
    assert stock.train(resume_from_checkpoint=str(folder / way / "checkpoint-3")).global_step == 8
    assert stock.optimizer.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("way", list(LAUNCHED))
def test_what_a_launcher_asks_for_is_done_without_training_arguments_too(results: Any, way: str) -> None:
    wrapped = {"fsdp": "FSDPSequential", "zero2": "DeepSpeedEngine"}
    for result in results[f"launched-{way}"]:
        assert result.get("wrapped") == wrapped[way], result
    assert gap(results["launched-fsdp"][0]["losses"], results["launched-zero2"][0]["losses"]) < 1e-5


@pytest.mark.parametrize("way", ["fsdp", "zero2"])
def test_adapters_of_weights_in_parts_are_saved_whole_and_resumed(results: Any, folder: Path, way: str) -> None:
    for name in ("adapters", "checkpoint-6"):
        file = f"{name}/adapter_model.safetensors"
        expected = load_file(folder / "adapters-whole" / file)
        assert len(expected) == 4
        assert gap(load_file(folder / f"adapters-{way}" / file), expected) < 1e-5
    for one, expected in zip(results[f"adapters-{way}"], results["adapters-whole"], strict=True):
        assert gap(one, expected) < 1e-5


@pytest.mark.parametrize(("way", "made"), [("fsdp", "FSDPSequential"), ("zero2", "DeepSpeedEngine")])
def test_a_model_made_anew_is_cut_up_anew_for_each_training_and_each_trial(results: Any, way: str, made: str) -> None:
    for one, expected in zip(results[f"anew-{way}"], results["anew-whole"], strict=True):
        assert one.get("made of") == made, one
        assert one["is unchanged"] and one["alive"] == 1
        assert one["losses"][3:] == pytest.approx(one["losses"][:3], abs=1e-6) and len(one["losses"]) == 6
        assert gap({**one, "made of": 0}, {**expected, "made of": 0}) < 1e-5


def test_the_schedule_of_deepspeed_s_configuration_begins_anew_with_the_model(results: Any) -> None:
    for result in results["anew-configured"]:
        assert result.get("rates") == pytest.approx(2 * [0.0, 0.0, 0.025]), result


@pytest.mark.parametrize("way", ["zero2", "zero3"])
def test_a_model_in_parts_generates_what_one_in_one_piece_does(results: Any, way: str) -> None:
    for one, expected in zip(results[f"answers-{way}"], results["answers-whole"], strict=True):
        assert "error" not in expected, expected
        assert gap(one, expected) < 1e-5


@pytest.mark.parametrize("backend", thinned(TWICE[1:], ["fsdp", "zero2", "zero3", "hf2"]))
def test_a_second_training_begins_with_a_new_optimizer_and_schedule(results: Any, backend: str) -> None:
    for one, expected in zip(results[f"twice-{backend}"], results["twice-ddp"], strict=True):
        assert len(expected["losses"]) == 8 and expected["rates"][4] == expected["rates"][0]
        assert gap(one, expected) < 1e-5


@pytest.mark.parametrize("backend", thinned(TWICE, ["ddp", "fsdp", "zero2", "zero3", "hf2"]))
def test_an_optimizer_in_several_groups_is_saved_and_resumed(results: Any, backend: str) -> None:
    for result in results[f"cut-{backend}"]:
        assert "error" not in result, result
        assert gap(result["parts"], result["whole"]) < 1e-6


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_may_make_the_optimizer_from_its_configuration(results: Any, stage: int) -> None:
    ours, theirs = (results[f"configuration-{stage}-{configured}"] for configured in (False, True))
    assert gap(theirs, ours) < 1e-5


def test_a_process_that_cannot_put_its_tensors_together_does_not_leave_the_other_waiting(folder: Path) -> None:
    case = Case("lost", f"{HERE}:fail_on_main", {"backend": "zero2", "folder": str(folder / "lost")}, environment={})
    for outcome in play([case], folder / "lost-launch")["lost"]:
        assert outcome.code == 1 and "as was asked for" in outcome.output, outcome
    assert [path.name for path in (folder / "lost").glob("checkpoint-*")] == ["checkpoint-2"]
