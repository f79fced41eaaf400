"""The names of other trainers' arguments: errors for unknown arguments, and the page that lists them."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import omnitrain
from omnitrain import AccelerateTrainer, BaseTrainer, ConfigError, HFTrainer, HFTrainingArguments, Trainer
from omnitrain.argument_aliases import VOCABULARY, advice
from omnitrain.cli.main import main
from omnitrain.contrib import nnscaler

ROOT = Path(__file__).resolve().parent.parent
TRAINERS: dict[str, Any] = {kind.__name__: kind for kind in (Trainer, AccelerateTrainer, HFTrainer)}
NAMES = {name: meaning for names in VOCABULARY.values() for name, meaning in names.items()}


@functools.cache
def arguments_of(kind: Any) -> set[str]:
    return set(inspect.signature(kind.__init__).parameters) - {"self", "unknown"}


def refusal(kind: Any, name: str) -> str:
    with pytest.raises(TypeError) as caught:
        kind(None, **{name: 1})
    return str(caught.value)


ALIASES = {
    "lr": "learning_rate", "per_device_train_batch_size": "batch_size", "grad_clip": "max_grad_norm",
    "max_epochs": "epochs", "save_folder": "save_dir", "validation_data": "eval_dataset",
    "mixed_precision": "autocast", "keep_last_n_checkpoints": "save_total_limit",
    "total_batch_size": "global_batch_size", "grad_accumulation_steps": "gradient_accumulation_steps",
}  # fmt: skip


@pytest.mark.parametrize("kind", TRAINERS)
def test_alias_suggests_our_name(kind: str) -> None:
    for name, ours in ALIASES.items():
        assert f"unexpected argument {name!r}. Here it is `{ours}`" in refusal(TRAINERS[kind], name)


def test_alias_without_counterpart_suggests_remedy() -> None:
    assert "There is none: Pass it in `lr_scheduler_kwargs`" in refusal(Trainer, "gamma")
    assert "AccelerateTrainer" in refusal(Trainer, "deepspeed_config")
    assert "HFTrainer: `training_args`" in refusal(Trainer, "args")
    assert refusal(Trainer, "learning_rte").endswith("Did you mean 'learning_rate'?")
    assert refusal(Trainer, "bananas").endswith("'bananas'.")


@pytest.mark.parametrize("kind", TRAINERS)
def test_all_unknown_arguments_are_in_one_error(kind: str) -> None:
    wrong = {"unit": None, "data_reader": 1, "gamma": 1, "learning_rte": 1, "bananas": None, "max_num_steps": 30}
    with pytest.raises(TypeError) as caught:
        TRAINERS[kind](None, **wrong)
    assert str(caught.value).splitlines() == [
        f"{kind}() got 5 unexpected arguments:",
        "  'data_reader'. Here it is `train_loader`.",
        "  'gamma'. There is none: Pass it in `lr_scheduler_kwargs`, with the name of a schedule.",
        "  'learning_rte'. Did you mean 'learning_rate'?",
        "  'bananas'.",
        "  'max_num_steps'. Here it is `max_steps`.",
    ]


@pytest.mark.parametrize("kind", ["AccelerateTrainer", "HFTrainer"])
def test_argument_of_another_trainer_is_in_the_same_error(kind: str) -> None:
    with pytest.raises(TypeError, match=r"got 2 unexpected arguments:\n  'lr'.*\n  `device='cpu'` is an argument of"):
        TRAINERS[kind](None, lr=1, device="cpu")
    with pytest.raises(TypeError, match="got an unexpected argument 'lr'"):
        TRAINERS[kind](None, lr=1, device=None)
    with pytest.raises(ConfigError, match=r"^`device='cpu'` is an argument of Trainer"):
        TRAINERS[kind](None, device="cpu")


def test_all_unknown_training_arguments_are_in_one_error() -> None:
    with pytest.raises(TypeError) as caught:
        HFTrainingArguments("a", num_train_epoch=1, evaluation_strategy="no", bananas=2)
    assert str(caught.value).splitlines() == [
        "HFTrainingArguments() got 2 unexpected arguments:",
        "  'num_train_epoch'. Did you mean 'num_train_epochs'?",
        "  'bananas'.",
    ]


def test_aliases_point_to_existing_names() -> None:
    assert len(NAMES) == sum(map(len, VOCABULARY.values())) >= 300  # no name is there twice
    for name, meaning in NAMES.items():
        kind, _, ours = meaning.ours.rpartition(".")
        if ours.endswith("()"):
            assert callable(getattr(BaseTrainer, ours.removesuffix("()"))), name
        elif ours:
            assert ours in arguments_of(TRAINERS.get(kind, BaseTrainer)) and (name != ours or kind), name
        else:
            assert meaning.word, name
        assert name not in arguments_of(Trainer)


ARGUMENTS_THERE = {
    "Lightning": """accelerator strategy devices num_nodes precision logger fast_dev_run max_epochs min_epochs min_steps
        max_time limit_train_batches limit_val_batches limit_test_batches limit_predict_batches overfit_batches
        val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps enable_checkpointing
        enable_progress_bar enable_model_summary accumulate_grad_batches gradient_clip_val gradient_clip_algorithm
        benchmark inference_mode use_distributed_sampler profiler barebones plugins sync_batchnorm
        reload_dataloaders_every_n_epochs default_root_dir enable_autolog_hparams model_registry gpus tpu_cores ipus
        hpus num_processes auto_select_gpus auto_lr_find auto_scale_batch_size resume_from_checkpoint
        checkpoint_callback progress_bar_refresh_rate weights_summary amp_backend amp_level replace_sampler_ddp
        move_metrics_to_cpu multiple_trainloader_mode track_grad_norm terminate_on_nan stochastic_weight_avg
        weights_save_path process_position prepare_data_per_node flush_logs_every_n_steps log_gpu_memory
        truncated_bptt_steps datamodule train_dataloaders val_dataloaders ckpt_path dataloaders weights_only""",
    "Composer": """train_dataloader train_dataloader_label train_subset_num_batches spin_dataloaders algorithm_passes
        optimizers schedulers scale_schedule_ratio step_schedulers_every_batch eval_dataloader eval_interval
        eval_subset_num_batches run_name log_to_console console_stream console_log_interval log_traces
        auto_log_hparams load_path load_object_store load_weights_only load_strict_model_weights load_progress_bar
        load_ignore_keys load_exclude_algorithms save_folder save_filename save_latest_filename save_overwrite
        save_interval save_weights_only save_ignore_keys save_num_checkpoints_to_keep save_metrics autoresume
        deepspeed_config fsdp_config fsdp_auto_wrap parallelism_config precision precision_config
        device_train_microbatch_size accum_train_batch_on_rank0 deterministic_mode dist_timeout ddp_sync_strategy
        profiler python_log_level compile_config grad_accum""",
    "fairseq2": """gangs amp amp_dtype dtype data_reader data_readers grad_accumulation fp16_init_scale max_num_steps
        max_num_data_epochs grad_check gradient_check anomaly_detection score_metric lower_score_better valid_units
        valid_data_readers validate_at_start validate_after_n_steps validate_every_n_steps
        validate_after_n_data_epochs validate_every_n_data_epochs checkpoint_manager checkpoint_metadata_saver
        checkpoint_after_n_steps checkpoint_every_n_steps checkpoint_after_n_data_epochs
        checkpoint_every_n_data_epochs keep_last_n_checkpoints keep_best_n_checkpoints keep_checkpoint_every_n_steps
        publish_metrics_after_n_steps publish_metrics_every_n_steps publish_metrics_after_n_data_epochs
        publish_metrics_every_n_data_epochs metric_recorder metric_recorders metrics_dir wall_watch profile profiler
        no_sync_grad_accumulation garbage_collector device_stat_tracker progress_reporter save_model_only
        activation_checkpointing""",
    "EasyDeL": """model_name num_train_epochs total_batch_size max_training_steps max_evaluation_steps
        max_sequence_length scheduler init_tx auto_shard_states aux_loss_enabled backend clip_grad custom_scheduler
        dataloader_num_workers dataloader_pin_memory do_eval do_last_save do_train evaluation_steps
        extra_optimizer_kwargs frozen_parameters ids_to_pop_from_dataset is_fine_tuning jax_distributed_config
        learning_rate_end log_all_workers log_grad_norms loss_config low_mem_usage metrics_to_show_in_rich_pbar
        model_class model_huggingface_repo_id model_parameters offload_dataset offload_device
        per_epoch_evaluation_steps per_epoch_training_steps performance_mode process_zero_is_admin progress_bar_type
        pruning_module quantization_mode quantization_block remove_ckpt_after_load remove_unused_columns
        report_metrics report_steps resume_if_possible save_directory save_optimizer_state sharding_array
        shuffle_seed_train shuffle_train_dataset sparse_module_type sparsify_module
        state_apply_fn_kwarguments_to_model step_start_point step_partition_spec trackio_project track_memory
        train_on_inputs training_time training_time_limit truncation_mode tx_mu_dtype use_data_collator use_grain
        use_wandb verbose wandb_entity wandb_name weight_distribution_log_steps weight_distribution_pattern
        generation_interval generation_prompts generation_max_new_tokens generation_temperature generation_top_p
        watchers""",
}
"""The arguments of these trainers that ours does not have by the same name."""


@pytest.mark.parametrize("source", ARGUMENTS_THERE)
def test_each_argument_of_a_source_has_a_hint(source: str) -> None:
    known = [*arguments_of(Trainer)]
    assert [name for name in ARGUMENTS_THERE[source].split() if not advice(name, known)] == []


def test_hint_fits_by_argument() -> None:
    hints = {name: advice(name, [*arguments_of(Trainer)]) for name in NAMES}
    for name in ("limit_val_batches", "eval_subset_num_batches", "max_val_steps", "max_evaluation_steps"):
        assert hints[name].startswith(" Here it is `eval_dataset`") and "EvalSet(dataset, subset=1000)" in hints[name]
    for name, text in {
        "limit_test_batches": "`test_dataset`", "num_sanity_val_steps": "`sanity`", "no_save": "`save_dir` (leave",
        "gradient_clip_algorithm": '`[GradientClipping("value", 0.5)]`', "save_best": "`keep_best`",
        "init_env_fn": "before the trainer is made", "max_train_steps_per_epoch": "`torch.utils.data.Subset`",
    }.items():  # fmt: skip
        assert text in hints[name], name


def test_every_key_of_nnscaler_has_hint() -> None:
    assert set(nnscaler._KEYS[""]) <= NAMES.keys() | arguments_of(Trainer)
    common = {"no_save", "save_best", "save_last", "save_type", "every_n_epochs", "keep_last_n_checkpoints"}
    assert common <= set(nnscaler._KEYS["checkpoint"]) & NAMES.keys()


CODE = sorted({code for meaning in NAMES.values() for code in re.findall(r"`([^`]+)`", meaning.word)})
"""What hints quote as code."""
OF_THEIR_OWN = {"WithWarmup", "eval_", "*", "metrics.jsonl", "best", "last", "trainer:", "from_pretrained"}
PLACEHOLDERS = {
    "dataset", "folder", "parameters", "outputs", "labels", "batch", "length", "num_classes", "options", "path",
    "config", "trainer", "ignore", "evaluate", "warmup", "Accelerator", "ParallelismConfig", "get_peft_model",
}  # fmt: skip
"""Names in an example that stand for a value, or are of a package that the hint names."""


def missing_names(code: str) -> set[str]:
    """Return the names in an example that do not exist; calls of ours must fit their signatures."""
    modules = {"torch": torch, "nn": torch.nn, "trainer": BaseTrainer}
    known = set().union(*map(arguments_of, TRAINERS.values())) | {*dir(BaseTrainer), *modules, *PLACEHOLDERS}
    loading = vars(torch.utils.data)
    missing = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name) and not (node.id in known or hasattr(omnitrain, node.id) or node.id in loading):
            missing.add(node.id)
        elif isinstance(node, ast.Attribute):
            root, *path = ast.unparse(node).split(".")
            thing = modules.get(root)
            for name in path if thing is not None else ():
                thing = getattr(thing, name, None)
                missing |= {ast.unparse(node)} if thing is None else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            called = getattr(omnitrain, name, None) or getattr(BaseTrainer, name, None)
            if called is not None and not any(keyword.arg is None for keyword in node.keywords):
                bound = [None] * (name in dir(BaseTrainer)) + node.args
                inspect.signature(called).bind_partial(*bound, **{str(keyword.arg): None for keyword in node.keywords})
    return missing


@pytest.mark.parametrize("code", CODE)
def test_code_in_hint_exists(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *words = code.split()
    if command == "omnitrain":
        with pytest.raises(SystemExit) as caught:
            main([words[0], "--help"])
        usage = capsys.readouterr().out
        assert not caught.value.code and all(word in usage for word in words if word.startswith("-"))
    elif code not in (*OF_THEIR_OWN, "torchrun", "accelerate launch"):
        assert missing_names(code) == set()


def test_code_that_does_not_exist_is_found() -> None:
    assert missing_names("max_grad_nrm") == {"max_grad_nrm"}
    assert missing_names("torch.nn.SyncBatchNrm(model)") == {"torch.nn.SyncBatchNrm"}
    assert missing_names("trainer.request_logs()") == {"trainer.request_logs"}
    with pytest.raises(TypeError, match="subsets"):
        missing_names("EvalSet(dataset, subsets=3)")


def test_aliases_cover_transformers() -> None:
    common = {
        "output_dir", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size", "report_to",
        "lr_scheduler_type", "logging_steps", "eval_strategy", "save_strategy", "load_best_model_at_end", "use_cpu",
        "metric_for_best_model", "greater_is_better", "bf16", "fp16", "optim", "dataloader_num_workers", "run_name",
        "remove_unused_columns", "label_smoothing_factor",
    }  # fmt: skip
    assert common <= set(transformers.TrainingArguments.__dataclass_fields__)
    assert common - arguments_of(HFTrainer) <= NAMES.keys()


def chapters() -> dict[str, str]:
    """Return the chapters of the page with an example for each source of names."""
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))


SOURCES = [source for source in VOCABULARY if source != "Loops by hand"]
OF_OTHERS = {
    "Lightning": {"shuffle"},
    "Composer": {"sampler", "batch_size"},
    "accelerate": {"shuffle"},
    "fairseq2": {"reduction"},
    "nnScaler": {"type", "args", "split", "val_args"},
}
"""What is no argument of a trainer in the examples of theirs."""


@pytest.mark.parametrize("source", SOURCES)
def test_coming_from_page_uses_aliases(source: str) -> None:
    text = chapters()[source]
    assert f"](names.md#{source.lower()})" in text
    (theirs, *printed), (ours, *_) = (
        re.findall(rf"^```{kind}\n(.*?)^```$", text, re.M | re.S) for kind in ("text", "python")
    )
    assert len(theirs.splitlines()) <= 13 and printed
    used = {
        *re.findall(r"[(\s{](\w+)=(?!=)", theirs),
        *re.findall(r"[{\s](\w+): ", theirs if source == "nnScaler" else ""),
    }
    known = {*VOCABULARY[source], *NAMES, *arguments_of(Trainer)} | OF_OTHERS.get(source, set())
    assert used and used - known == set()
    assert re.search(r"Trainer\(", ours)


def test_coming_from_page_has_every_trainer() -> None:
    assert set(chapters()) == {"Plain PyTorch", *SOURCES}


@pytest.mark.processes
def test_names_page_is_generated() -> None:
    done = subprocess.run([sys.executable, ROOT / ".ci" / "signatures.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in NAMES)
