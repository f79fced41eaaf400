"""Each argument of what is public, and each option of the command, by the file of a test that fails without it.

`test_arguments_have_tests` names those that are in no line. Arguments that all trainers share are under BaseTrainer.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import omnitrain
from omnitrain import BaseTrainer
from omnitrain.cli import main

TESTS = Path(__file__).resolve().parent
RESULTS = {
    "Event", "Histogram", "MetricsDict", "Predictions", "Progress", "RunComparison", "SchedulePreview", "SearchResult",
    "SearchTrial",
}  # fmt: skip
"""What a user gets and does not make."""
PROTOCOLS = {"EvalUnit", "TrainUnit"}

ARGUMENTS: dict[str, str] = {
    "algorithms/test_arguments.py":
        "GradientClipping(kind limit) LabelSmoothing(num_classes) LayerFreezing(layers) MagnitudePruning(sparsity "
        "start initial match scope) SWA(every) StochasticDepth(layers drop_rate distribution) "
        "StraightThrough(function match)",
    "algorithms/test_mixup.py": "CutMix(num_classes alpha) LabelSmoothing(smoothing) MixUp(num_classes alpha)",
    "algorithms/test_pruning.py": "MagnitudePruning(every end)",
    "algorithms/test_updates.py":
        "GradientClipping(exclude) ProgressiveResizing(initial_scale delay finetune size_increment) "
        "GradualUnfreezing(until layers) LayerFreezing(freeze_start freeze_level) SAM(rho) SeqLengthWarmup(max_length "
        "duration)",
    "callbacks/test_arguments.py":
        "GarbageCollection(every generation) HookCallback(hooks) MemoryMonitor(folder) Periodic(function every) "
        "Preview(prompts every) Tracking(tracker) Throughput(window)",
    "callbacks/test_distributions.py": "Distributions(of modules match every bins)",
    "callbacks/test_early_stopping.py": "BaseTrainer(early_stopper) EarlyStopping(stopper)",
    "callbacks/test_memory_monitor.py": "MemoryMonitor(snapshot)",
    "callbacks/test_periodic.py":
        "Periodic(main_only on_error timeout) Preview(on_error function max_new_tokens processing_class timeout "
        "generate_options)",
    "callbacks/test_profiler.py":
        "Profiler(warmup folder record_shapes profile_memory with_stack active wait repeat rows)",
    "callbacks/test_throughput.py": "Throughput(peak flops)",
    "checkpoint/test_failing_disk.py": "BaseTrainer.save_metrics(metrics)",
    "checkpoint/test_frozen_weights.py": "BaseTrainer(save_frozen)",
    "checkpoint/test_initial_weights.py": "BaseTrainer(init_from)",
    "checkpoint/test_remote.py": "BaseTrainer.load_checkpoint(path) BaseTrainer(save_required)",
    "checkpoint/test_resume.py":
        "BaseTrainer.train(allow_change resume_from) BaseTrainer(save_only_model save_total_limit keep_every)",
    "checkpoint/test_untrusted.py": "BaseTrainer(loggers) Profiler(skip)",
    "cli/test_compare.py": "compare_runs(runs)",
    "cli/test_config.py": "BaseTrainer(overwrite)",
    "compute/test_activation_checkpointing.py": "AccelerateTrainer(fsdp_plugin) BaseTrainer(gradient_checkpointing)",
    "compute/test_precision.py": "BaseTrainer(device)",
    "config/test_configuration.py": "TensorBoardLogger(log_dir) Config(tree trust) instantiate(seed init_args)",
    "config/test_round_trip.py": "instantiate(class_path)",
    "contrib/test_nnscaler.py": "BaseTrainer(dtypes)",
    "core/test_duration.py": "Duration(unit)",
    "core/test_metric_format.py":
        "MetricDescriptor(title unit format order higher_is_better) describe_metric(name descriptor)",
    "core/test_objective.py": "Objective(direction delta) BaseTrainer(delta)",
    "data/test_collation.py": "Collator(truncation_side padding_side pad_value pad_values)",
    "data/test_grouping.py": "GroupByLength(pool group_size lengths)",
    "data/test_packing.py": "PackedDataset(length lengths overlong tokens pad_values dataset borders shift)",
    "data/test_sampling.py": "Collator(max_length)",
    "data/test_shards.py": "ShardedStream(shards count)",
    "data/test_workers.py": "BaseTrainer(num_workers)",
    "distributed/test_sharded_saves.py": "BaseTrainer(consolidate)",
    "distributed/test_standstill.py": "BaseTrainer(timeout)",
    "hf/test_arguments.py":
        "BaseTrainer(batch_size warmup_steps max_grad_norm deterministic pin_memory async_save microbatch_size "
        "eval_steps optimization_metric save_dir seed) HFTrainer(optimizers) HFTrainingArguments(args) "
        "Objective(metric)",
    "hf/test_batch_size.py": "BaseTrainer(callbacks)",
    "hf/test_callbacks.py": "BaseTrainer(train_loader keep_best)",
    "hf/test_calls.py":
        "BaseTrainer.stop(reason) HFTrainer(args optimizer_cls_and_kwargs) StepOutput(metrics) "
        "BaseTrainer(compute_metrics train_dataset data_collator optimization_direction)",
    "hf/test_evaluation.py": "BaseTrainer(unit)",
    "hf/test_search.py": "HFTrainer(model_init)",
    "hf/test_trainer.py":
        "HFTrainer(compute_loss_func stock_checkpoints) BaseTrainer(epochs eval_dataset scheduler_interval "
        "save_steps)",
    "loggers/test_progress_bar.py": "ProgressBar(enabled stream) BaseTrainer(progress_bar)",
    "loggers/test_rows.py": "CsvLogger(filename) JsonlLogger(filename)",
    "loggers/test_summary.py": "ProgressBar(every)",
    "loggers/test_tracking.py":
        "CsvLogger(every) JsonlLogger(every) TensorBoardLogger(every) BaseTrainer(trial_name) "
        "HFTrainingArguments(kwargs) Tracking(project options every)",
    "loggers/test_wandb.py": "WandbLogger(init_kwargs project every)",
    "model/test_losses.py":
        "chunked_cross_entropy(labels bias label_smoothing chunk_size hidden weight ignore_index z_loss) "
        "CrossEntropy(ignore_index shift weight label_smoothing z_loss) BaseTrainer(loss_fn) WeightedLosses(losses "
        "weights)",
    "model/test_multitask.py": "MultiTask(epoch_size mixing tasks temperature) MultiTaskUnit(model weights losses)",
    "model/test_units.py": "StepOutput(outputs labels num_targets loss) ModelUnit(loss_fn model)",
    "optim/test_muon.py": "BaseTrainer(max_steps)",
    "optim/test_param_groups.py": "layerwise_decay(model decay) BaseTrainer(weight_decay param_groups freeze)",
    "optim/test_schedules.py":
        "BaseTrainer(lr_scheduler lr_scheduler_kwargs) preview_schedule(lr_scheduler_kwargs epochs max_steps "
        "learning_rate steps_per_epoch schedule max_duration warmup_steps tokens_per_step samples_per_step "
        "seconds_per_step rows) Schedule(warmup min_lr min_lr_rate scale_ratio) Scheduler(warmup min_lr min_lr_rate "
        "scale_ratio t_max num_cycles power step_size gamma milestones decay_period timescale decay kind) "
        "ConstantScheduler(min_lr_rate) ProductScheduler(schedules warmup min_lr min_lr_rate scale_ratio)",
    "sweeps/test_search.py": "search(seed sampler pruner make_trainer space direction trials save_dir)",
    "test_arguments.py":
        "HFTrainer(training_args) AccelerateTrainer(parallelism_config accelerator find_unused_parameters) "
        "BaseTrainer(prefetch_factor global_batch_size)",
    "test_parity.py":
        "BaseTrainer(label_names drop_last eval_on_start gradient_accumulation_steps on_nonfinite autocast "
        "fp16_loss_scale matmul_precision load_best_at_end log_steps patience max_duration model shuffle) "
        "GroupByLength(dataset) Duration(value) EMA(decay) BaseTrainer.test(dataset) BaseTrainer.save_model(path) "
        "SeqLengthWarmup(min_length step_size) SWA(start)",
    "trainer/test_out_of_memory.py": "BaseTrainer.save_metrics(split)",
    "trainer/test_base.py": "BaseTrainer(grad_reduction preprocess_logits_for_metrics processing_class)",
    "trainer/test_closures.py": "BaseTrainer(optimizer algorithms)",
    "trainer/test_compilation.py": "BaseTrainer.compile(steps) BaseTrainer(compile)",
    "trainer/test_copies.py": "BaseTrainer(learning_rate)",
    "trainer/test_detection.py": "Objective(higher_is_better)",
    "trainer/test_eval_sets.py": "EvalSet(every metrics weight unit data) BaseTrainer(eval_loader)",
    "trainer/test_evaluation.py":
        "BaseTrainer.evaluate(dataset prefix) BaseTrainer.predict(dataset) EvalSet(subset) ModelUnit(label_names) "
        "BaseTrainer(eval_batch_size sanity test_loader test_dataset) StepOutput(extra) Collator(label_names)",
    "trainer/test_nonfinite.py": "BaseTrainer(detect_anomaly)",
    "trainer/test_more.py": "EarlyStopping(patience) BaseTrainer.train(more)",
    "trainer/test_native.py": "BaseTrainer.save_model(overwrite)",
    "trainer/test_optimizer_modes.py": "AccelerateTrainer(deepspeed_config)",
}  # fmt: skip
"""The arguments that the tests of each file cover; those of `Scheduler` are those of all classes so called."""
OPTIONS: dict[str, str] = {
    "checkpoint/test_merge_adapters.py": "checkpoint export(--adapter --merge)",
    "cli/test_compare.py": "compare(--png)",
    "cli/test_config.py": "sweep(--sampler --pruner --trials --save_dir) train(--print_config --resume)",
    "cli/test_launch.py": "launch(--nnodes --rdzv-endpoint -m -n --fsdp --zero --cpu)",
    "cli/test_main.py":
        "demo(--trainer --out) schedule(--steps-per-epoch --rows --plot --epochs --max-steps --max-duration "
        "--warmup --learning-rate --samples-per-step --tokens-per-step --seconds-per-step)",
    "config/test_configuration.py": "train(--trust) sweep(--trust) config check(--trust)",
    "distributed/test_launching.py": "launch(--max-restarts)",
}  # fmt: skip
"""The options of commands that the tests of each file cover."""


def parameters_of(function: Any) -> list[str]:
    names = inspect.signature(function).parameters
    return [name for name in names if name not in ("self", "unknown") and not name.startswith("_")]


def public_arguments() -> set[tuple[str, str]]:
    """Return (class or function, argument) of all that is public, and of the methods of a trainer."""
    shared = parameters_of(BaseTrainer.__init__)
    arguments = {"BaseTrainer": shared}
    for name, method in vars(BaseTrainer).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            arguments[f"BaseTrainer.{name}"] = parameters_of(method)
    for name in omnitrain.__all__:
        value = getattr(omnitrain, name)
        if not inspect.isclass(value):
            arguments[name] = parameters_of(value)
        elif "__init__" in vars(value) and name not in RESULTS | PROTOCOLS and not issubclass(value, Exception):
            names = parameters_of(value.__init__)
            is_trainer = issubclass(value, BaseTrainer)
            arguments.setdefault(name, [name for name in names if not is_trainer or name not in shared])
    return {(owner, name) for owner, names in arguments.items() for name in names}


def options_of(parser: argparse.ArgumentParser, command: str = "") -> Iterator[tuple[str, str]]:
    """Yield the options of a command and of those below it, each by its longest name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from options_of(below, f"{command} {name}".strip())
        elif action.option_strings and not {"-h", "--version"} & {*action.option_strings}:
            yield command, max(action.option_strings, key=len)


def flat(table: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return (class or command, argument, file)."""
    return [
        (owner, name, file)
        for file, text in table.items()
        for owner, names in re.findall(r"(\w[\w. ]*)\(([^)]*)\)", text)
        for name in names.split()
    ]


def test_arguments_have_tests() -> None:
    rows = [(owner, name) for owner, name, _ in [*flat(ARGUMENTS), *flat(OPTIONS)]]
    assert len({*rows}) == len(rows)
    public = public_arguments() | {*options_of(main._parser())}
    is_shared = {row: row[0].endswith("Scheduler") and row not in rows for row in public}
    assert {*rows} == {("Scheduler", row[1]) if is_shared[row] else row for row in public}


def test_files_of_arguments_exist_and_use_them() -> None:
    """A file has the argument's name, or that of what takes it, as arguments may be given by position."""
    texts = {file: (TESTS / file).read_text(encoding="utf-8") for file in ARGUMENTS | OPTIONS}
    for owner, name, file in [*flat(ARGUMENTS), *flat(OPTIONS)]:
        words = [name] if owner == "BaseTrainer" or name.startswith("-") else [name, owner.rpartition(".")[2]]
        assert any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", texts[file]) for word in words), (owner, name, file)
