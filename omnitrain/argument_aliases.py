"""Other trainers' names of arguments and their equivalents here, for errors about unknown arguments and for the docs.

`make signatures` writes `docs/names.md` from this table.
"""

from __future__ import annotations

from typing import NamedTuple


class Meaning(NamedTuple):
    """The equivalent of a name."""

    ours: str
    """An argument, a method ("stop()"), or one of another trainer ("AccelerateTrainer.accelerator"); "" for none."""
    word: str = ""
    """What differs; without an equivalent, what to do instead."""


_A = "AccelerateTrainer."
_LOADER = "A loader of your own has it: `train_loader=DataLoader(...)`."
_CUT = "`Collator(max_length=512)` cuts longer samples"
_TOKENIZE = "Tokenize the dataset yourself, and pass what `model(**batch)` takes."
_EVAL_PART = "`EvalSet(dataset, subset=1000)` evaluates the first 1000 samples"
_TRAIN_PART = "Pass a `torch.utils.data.Subset` as `train_dataset`."
_ITS_OWN = "HFTrainer takes it in its training arguments."
_AUTO_RESUME = 'Pass it to the call: `train(resume_from="auto")`.'
_NOT_GENERATED = "The model runs unchanged: nothing is traced, and no code is generated."
_FORMAT = "Checkpoints have one format, of safetensors and JSON."
_RESUME = "Pass it to the call, not the constructor: `train(resume_from=...)`."
_LAUNCHED = "`omnitrain launch -n N`, `torchrun` or `accelerate launch` start processes; use AccelerateTrainer."
_OPTIONS = "as in `[{'match': '.', 'betas': (0.9, 0.98)}]`"
_OPTIMIZER = "Pass a function of the parameters: `optimizer=lambda parameters: torch.optim.AdamW(parameters, ...)`."
_SCHEDULE = "Pass it in `lr_scheduler_kwargs`, beside the name of a schedule."
_MODEL = "It is a matter of the model: do it before you pass it."
_RATIO = "a share below 1, such as 0.1"
_STEPS = 'an int counts steps; "1ep" is each epoch'

_TRANSFORMERS: dict[str, Meaning] = {
    "args": Meaning("HFTrainer.training_args", "The other trainers take the arguments one by one."),
    "training_args": Meaning("HFTrainer.training_args", "The other trainers take the arguments one by one."),
    "output_dir": Meaning("save_dir", "nothing is written without it"),
    "num_train_epochs": Meaning("epochs"),
    "per_device_train_batch_size": Meaning("batch_size", "on each process, too"),
    "per_gpu_train_batch_size": Meaning("batch_size", "on each process, too"),
    "per_device_eval_batch_size": Meaning("eval_batch_size", "on each process, too"),
    "per_gpu_eval_batch_size": Meaning("eval_batch_size", "on each process, too"),
    "lr_scheduler_type": Meaning("lr_scheduler"),
    "warmup_ratio": Meaning("warmup_steps", _RATIO),
    "logging_steps": Meaning("log_steps", _STEPS),
    "logging_strategy": Meaning("log_steps", _STEPS),
    "logging_first_step": Meaning("", "A callback can ask for it: `trainer.request_log()`."),
    "logging_dir": Meaning("save_dir", "`TensorBoardLogger(folder)` takes another place for TensorBoard"),
    "eval_strategy": Meaning("eval_steps", "without it an evaluation set is evaluated after each epoch"),
    "evaluation_strategy": Meaning("eval_steps", "without it an evaluation set is evaluated after each epoch"),
    "save_strategy": Meaning("save_steps", "without it there is a checkpoint after each epoch"),
    "metric_for_best_model": Meaning("optimization_metric", "with or without `eval_`"),
    "greater_is_better": Meaning("optimization_direction", '"max" or "min"; left out, the metric\'s name tells'),
    "load_best_model_at_end": Meaning("load_best_at_end", "on by default with an evaluation set"),
    "overwrite_output_dir": Meaning("overwrite"),
    "bf16": Meaning("autocast", 'autocast="bf16"'),
    "fp16": Meaning("autocast", 'autocast="fp16"'),
    "fp16_opt_level": Meaning("autocast", 'autocast="fp16"'),
    "half_precision_backend": Meaning("autocast"),
    "no_cuda": Meaning("device", 'device="cpu"'),
    "use_cpu": Meaning("device", 'device="cpu"'),
    "optim": Meaning("optimizer"),
    "optimizers": Meaning("optimizer", "the optimizer and `lr_scheduler` are passed one by one"),
    "optim_args": Meaning("param_groups", _OPTIONS),
    "adam_beta1": Meaning("param_groups", _OPTIONS),
    "adam_beta2": Meaning("param_groups", _OPTIONS),
    "adam_epsilon": Meaning("param_groups", _OPTIONS),
    "tokenizer": Meaning("processing_class", "pads batches, and is saved with the model"),
    "compute_loss_func": Meaning("loss_fn", "called as `loss_fn(outputs, labels)`"),
    "model_init": Meaning("HFTrainer.model_init", "The other trainers take a model; make it before."),
    "dataloader_num_workers": Meaning("num_workers"),
    "dataloader_pin_memory": Meaning("pin_memory"),
    "dataloader_prefetch_factor": Meaning("prefetch_factor"),
    "dataloader_drop_last": Meaning("drop_last"),
    "dataloader_persistent_workers": Meaning("num_workers", "workers are started once in any case"),
    "data_seed": Meaning("seed"),
    "full_determinism": Meaning("deterministic"),
    "run_name": Meaning("trial_name"),
    "report_to": Meaning("loggers"),
    "disable_tqdm": Meaning("progress_bar", "progress_bar=False"),
    "remove_unused_columns": Meaning("", "Columns that the model does not take are left out, and named in the log."),
    "label_smoothing_factor": Meaning("algorithms", "`[LabelSmoothing(num_classes, 0.1)]`"),
    "group_by_length": Meaning(
        "", "Pass `GroupByLength(train_dataset)`; HFTrainer takes it in its training arguments."
    ),
    "train_sampling_strategy": Meaning("", "Pass `GroupByLength(train_dataset)`, or `shuffle=False`."),
    "packing": Meaning("", "Pass `PackedDataset(train_dataset, length)`."),
    "length_column_name": Meaning("", "Pass `GroupByLength(train_dataset, lengths=train_dataset['length'])`."),
    "max_train_steps": Meaning("max_steps"),
    "resume_from_checkpoint": Meaning("", _RESUME),
    "do_train": Meaning("train()", "a call, not a switch"),
    "do_eval": Meaning("eval_dataset", "it is evaluated if it is given"),
    "do_predict": Meaning("predict()", "a call, not a switch"),
    "ddp_find_unused_parameters": Meaning(_A + "find_unused_parameters"),
    "deepspeed": Meaning(_A + "deepspeed_config"),
    "fsdp": Meaning(_A + "fsdp_plugin", "or `omnitrain launch --fsdp`"),
    "fsdp_config": Meaning(_A + "fsdp_plugin", "or `omnitrain launch --fsdp`"),
    "push_to_hub": Meaning("", "HFTrainer uploads, as its training arguments say; save_model() writes the folder."),
    "tf32": Meaning("matmul_precision", '"high" for True, "highest" for False'),
    "torch_compile": Meaning("compile", "True, or a dict of the options of `torch.compile`"),
    "save_safetensors": Meaning("", "Weights are always written as safetensors."),
    "auto_find_batch_size": Meaning("microbatch_size", '"auto"; HFTrainer takes it in its training arguments too'),
    "include_inputs_for_metrics": Meaning("", _ITS_OWN),
    "max_seq_length": Meaning("data_collator", _CUT),
    "max_length": Meaning("data_collator", _CUT),
    "dataset_text_field": Meaning("", _TOKENIZE),
    "peft_config": Meaning("", "Pass `get_peft_model(model, config)`."),
    "early_stopping_patience": Meaning("patience"),
    "early_stopping_threshold": Meaning("delta"),
    "bf16_full_eval": Meaning("", _ITS_OWN),
    "fp16_full_eval": Meaning("", _ITS_OWN),
    "neftune_noise_alpha": Meaning("", _ITS_OWN),
    "gradient_checkpointing_kwargs": Meaning("gradient_checkpointing"),
    "torch_compile_backend": Meaning("compile", '{"backend": ...}'),
    "torch_compile_mode": Meaning("compile", '{"mode": ...}'),
    "ddp_timeout": Meaning("timeout"),
    "ignore_data_skip": Meaning("", "A resumed run always continues with the next sample."),
}
_LIGHTNING: dict[str, Meaning] = {
    "max_epochs": Meaning("epochs"),
    "min_epochs": Meaning("", "Early stopping waits for `patience` evaluations; a longer patience is a longer run."),
    "max_time": Meaning("max_duration", '"2h30m"'),
    "accelerator": Meaning("device", "accelerate's `Accelerator` is an argument of AccelerateTrainer"),
    "devices": Meaning("", _LAUNCHED),
    "num_nodes": Meaning("", _LAUNCHED),
    "strategy": Meaning("", _LAUNCHED),
    "precision": Meaning("autocast", '"16-mixed" is "fp16", "bf16-mixed" is "bf16"'),
    "auto_scale_batch_size": Meaning("microbatch_size", '"auto", which leaves the samples of a step as they are'),
    "accumulate_grad_batches": Meaning("gradient_accumulation_steps"),
    "gradient_clip_val": Meaning("max_grad_norm"),
    "gradient_clip_algorithm": Meaning(
        "algorithms", '`[GradientClipping("value", 0.5)]`; `max_grad_norm` clips by the norm'
    ),
    "val_check_interval": Meaning("eval_steps", 'an int counts steps; "0.25ep" is a share of an epoch'),
    "check_val_every_n_epoch": Meaning("eval_steps", 'as in eval_steps="2ep"'),
    "log_every_n_steps": Meaning("log_steps"),
    "num_sanity_val_steps": Meaning("sanity", "evaluates one batch of each evaluation set, by default; False for 0"),
    "limit_train_batches": Meaning("", _TRAIN_PART),
    "limit_val_batches": Meaning("eval_dataset", _EVAL_PART),
    "limit_test_batches": Meaning("test_dataset", _EVAL_PART),
    "overfit_batches": Meaning("", _TRAIN_PART),
    "fast_dev_run": Meaning("max_steps", "max_steps=1"),
    "enable_progress_bar": Meaning("progress_bar"),
    "enable_checkpointing": Meaning("save_dir", "leave it out to write nothing"),
    "default_root_dir": Meaning("save_dir"),
    "logger": Meaning("loggers"),
    "benchmark": Meaning("", "Set `torch.backends.cudnn.benchmark` before."),
    "sync_batchnorm": Meaning("", "Pass `nn.SyncBatchNorm.convert_sync_batchnorm(model)`."),
    "train_dataloaders": Meaning("train_loader"),
    "val_dataloaders": Meaning("eval_loader"),
    "datamodule": Meaning("train_loader", "and `eval_loader`, `test_loader`"),
    "ckpt_path": Meaning("", _RESUME),
    "monitor": Meaning("optimization_metric"),
    "mode": Meaning("optimization_direction"),
    "min_delta": Meaning("delta"),
    "save_top_k": Meaning("keep_best", "with `save_total_limit`"),
    "dirpath": Meaning("save_dir"),
    "every_n_train_steps": Meaning("save_steps"),
    "every_n_epochs": Meaning("save_steps", 'as in save_steps="2ep"'),
    "save_weights_only": Meaning("save_only_model"),
    "min_steps": Meaning("", "Early stopping waits for `patience` evaluations; a longer patience is a longer run."),
    "limit_predict_batches": Meaning("", "Pass a `torch.utils.data.Subset` to `predict()`."),
    "inference_mode": Meaning("", "Evaluations never compute gradients."),
    "use_distributed_sampler": Meaning("", "Each process reads its own part of the data."),
    "plugins": Meaning(_A + "accelerator", "an `Accelerator` that was made with them"),
}
_COMPOSER: dict[str, Meaning] = {
    "train_dataloader": Meaning("train_loader"),
    "eval_dataloader": Meaning("eval_loader"),
    "optimizers_list": Meaning("optimizer"),
    "schedulers": Meaning("lr_scheduler", "the same classes, without `WithWarmup`: they take `warmup`; `*` multiplies"),
    "scale_schedule_ratio": Meaning("", 'Each schedule takes it: `StepScheduler("30ep", scale_ratio=0.5)`.'),
    "t_warmup": Meaning("warmup_steps", "or `warmup` of a schedule"),
    "eval_interval": Meaning("eval_steps", "the same strings"),
    "save_folder": Meaning("save_dir"),
    "save_interval": Meaning("save_steps", "the same strings"),
    "save_num_checkpoints_to_keep": Meaning("save_total_limit"),
    "save_overwrite": Meaning("overwrite"),
    "load_path": Meaning("", _RESUME),
    "load_weights_only": Meaning("init_from", "the path; a resume of all else is `train(resume_from=...)`"),
    "load_ignore_keys": Meaning("init_from", '{"path": ..., "ignore": [globs]}'),
    "load_strict_model_weights": Meaning("init_from", "what was not loaded is logged"),
    "autoresume": Meaning("", _AUTO_RESUME),
    "deterministic_mode": Meaning("deterministic"),
    "device_train_microbatch_size": Meaning("microbatch_size", 'a number or "auto"; `batch_size` is that of a step'),
    "grad_accum": Meaning("gradient_accumulation_steps"),
    "step_schedulers_every_batch": Meaning("scheduler_interval", '"step" or "epoch"'),
    "train_subset_num_batches": Meaning("", _TRAIN_PART),
    "eval_subset_num_batches": Meaning("eval_dataset", _EVAL_PART),
    "parallelism_config": Meaning(_A + "parallelism_config"),
    "deepspeed_config": Meaning(_A + "deepspeed_config"),
    "algorithm": Meaning("algorithms"),
    "precision_config": Meaning("dtypes", "parameters, buffers and inputs; `autocast` keeps weights in fp32"),
    "console_log_interval": Meaning("callbacks", '`[ProgressBar(every="10ba")]`; `log_steps` is that of all rows'),
    "log_to_console": Meaning("progress_bar"),
    "profiler": Meaning("callbacks", "`[Profiler()]`"),
    "algorithm_passes": Meaning("algorithms", "applied in the order of the list"),
    "accumulate_train_batch_on_tokens": Meaning("grad_reduction", '"per-token-mean"'),
    "compile_config": Meaning("compile", "a dict of the options of `torch.compile`"),
    "ddp_sync_strategy": Meaning(_A + "find_unused_parameters", "gradients are averaged once in a step"),
    "dist_timeout": Meaning("timeout"),
    "spin_dataloaders": Meaning("", "A resumed run always continues with the next sample."),
}
_KERAS: dict[str, Meaning] = {
    "x": Meaning("train_dataset", "TensorDataset(x, y)"),
    "y": Meaning("train_dataset", "TensorDataset(x, y)"),
    "validation_data": Meaning("eval_dataset"),
    "validation_split": Meaning("", "Split the dataset before: `torch.utils.data.random_split`."),
    "validation_freq": Meaning("eval_steps", 'as in eval_steps="2ep"'),
    "validation_batch_size": Meaning("eval_batch_size"),
    "steps_per_epoch": Meaning("", "An epoch is a pass over the data; `max_steps` limits the run."),
    "initial_epoch": Meaning("", _RESUME),
    "verbose": Meaning("progress_bar"),
    "class_weight": Meaning("loss_fn", "as in `nn.CrossEntropyLoss(weight=...)`"),
    "sample_weight": Meaning("loss_fn", "put the weights into the batch, or write a `unit`"),
    "loss": Meaning("loss_fn", "called as `loss_fn(outputs, labels)`"),
    "metrics": Meaning("compute_metrics", "as in compute_metrics=['accuracy', 'f1_macro']"),
    "clipnorm": Meaning("max_grad_norm"),
    "restore_best_weights": Meaning("load_best_at_end"),
    "save_best_only": Meaning("keep_best", "with `save_total_limit`"),
    "filepath": Meaning("save_dir"),
    "workers": Meaning("num_workers"),
}
_ACCELERATE: dict[str, Meaning] = {
    "mixed_precision": Meaning("autocast"),
    "deepspeed_plugin": Meaning(_A + "deepspeed_config", "a path or a dict"),
    "fsdp_plugin": Meaning(_A + "fsdp_plugin"),
    "split_batches": Meaning("global_batch_size", "`batch_size` is that of each process"),
    "rampup_batch_size": Meaning("global_batch_size", 'it grows: {0: 64, "1e6sp": 128}'),
    "batch_size_schedule": Meaning("global_batch_size", 'it grows: {0: 64, "0.2dur": 128}'),
    "cpu": Meaning("device", 'device="cpu"'),
    "step_scheduler_with_optimizer": Meaning("scheduler_interval", '"step" or "epoch"'),
    "log_with": Meaning("loggers"),
    "project_dir": Meaning("save_dir"),
    "kwargs_handlers": Meaning(_A + "accelerator", "an `Accelerator` that was made with them"),
    "dataloader_config": Meaning("", _LOADER),
    "even_batches": Meaning("", "Batches are shared out unevenly, and nothing is counted twice."),
    "find_unused_parameters": Meaning(_A + "find_unused_parameters"),
    "dispatch_batches": Meaning("", "Each process reads its own part of the data."),
}
_FAIRSEQ2: dict[str, Meaning] = {
    "max_num_steps": Meaning("max_steps"),
    "max_num_data_epochs": Meaning("epochs"),
    "data_reader": Meaning("train_loader"),
    "valid_units": Meaning("unit", "with a method `evaluate(batch)`; `EvalSet(dataset, unit=unit)` has one of its own"),
    "valid_data_readers": Meaning("eval_loader", "a dict of them"),
    "validate_every_n_steps": Meaning("eval_steps"),
    "validate_at_start": Meaning("eval_on_start"),
    "validate_every_n_data_epochs": Meaning("eval_steps", 'as in eval_steps="2ep"'),
    "checkpoint_every_n_steps": Meaning("save_steps"),
    "checkpoint_every_n_data_epochs": Meaning("save_steps", 'as in save_steps="2ep"'),
    "keep_last_n_checkpoints": Meaning("save_total_limit"),
    "keep_best_n_checkpoints": Meaning("keep_best", "with `save_total_limit`"),
    "keep_checkpoint_every_n_steps": Meaning("keep_every", "with `save_total_limit`"),
    "publish_metrics_every_n_steps": Meaning("log_steps"),
    "pretrained_model": Meaning("init_from"),
    "score_metric": Meaning("optimization_metric"),
    "score_metric_descriptor": Meaning("optimization_metric"),
    "lower_better": Meaning("optimization_direction", '"max" or "min"'),
    "fp16_loss_scale_window": Meaning("fp16_loss_scale", "its third number"),
    "max_gradient_norm": Meaning("max_grad_norm"),
    "checkpoint_manager": Meaning("save_dir"),
    "anomaly_detection": Meaning("detect_anomaly"),
    "gangs": Meaning("", _LAUNCHED),
    "root_gang": Meaning("", _LAUNCHED),
    "dp_gang": Meaning("", _LAUNCHED),
    "tp_gang": Meaning(_A + "parallelism_config", "`ParallelismConfig(tp_size=2)` of accelerate"),
    "tb_dir": Meaning("loggers", "`[TensorBoardLogger(folder)]`"),
    "metrics_dir": Meaning("save_dir", "`metrics.jsonl` in it has all rows"),
    "keep_last_n_models": Meaning("save_total_limit"),
    "keep_best_n_models": Meaning("keep_best", "with `save_total_limit`"),
    "publish_metrics_every_n_data_epochs": Meaning("log_steps", 'as in log_steps="2ep"'),
    "save_model_only": Meaning("save_only_model"),
    "gc_every_n_steps": Meaning("callbacks", '`[GarbageCollection("1000ba")]`'),
    "dtype": Meaning("autocast"),
}
_NNSCALER: dict[str, Meaning] = {
    "train_args": Meaning("", "The arguments are passed one by one."),
    "global_batchsize": Meaning("global_batch_size"),
    "micro_batch_size": Meaning("batch_size", "or `microbatch_size`, which splits each batch"),
    "grad_accumulation_steps": Meaning("gradient_accumulation_steps"),
    "gen_savedir": Meaning("", _NOT_GENERATED),
    "compute_config": Meaning("", _LAUNCHED),
    "max_val_steps": Meaning("eval_dataset", _EVAL_PART),
    "max_train_steps_per_epoch": Meaning("", _TRAIN_PART),
    "every_n_steps": Meaning("save_steps"),
    "keep_last_n": Meaning("save_total_limit"),
    "hook": Meaning("callbacks", "a `HookCallback` of it"),
    "clip_gnorm": Meaning("max_grad_norm"),
    "dataset": Meaning("train_dataset"),
    "dataset_sampler": Meaning("", _LOADER),
    "enable_log_progress": Meaning("progress_bar"),
    "log_progress_every_n_train_steps": Meaning("callbacks", '`[ProgressBar(every="100ba")]`'),
    "checkpoint": Meaning("save_dir", "and `save_steps`, `save_total_limit`, `keep_best`"),
    "no_save": Meaning("save_dir", "leave it out to write nothing"),
    "save_best": Meaning("keep_best", "0 for False"),
    "save_last": Meaning("save_steps", "the last step is always saved"),
    "save_type": Meaning("consolidate", "whether sharded weights are put together"),
    "symlink_best_and_last": Meaning(
        "", "`best` and `last` in `save_dir` are small files with the name of a checkpoint."
    ),
    "format": Meaning("", _FORMAT),
    "serializer": Meaning("", _FORMAT),
    "val_every_n_train_steps": Meaning("eval_steps"),
    "val_every_n_epochs": Meaning("eval_steps", 'as in eval_steps="2ep"'),
    "tracing_from_weights": Meaning("init_from"),
    "init_env_fn": Meaning("", "Call it before the trainer is made; `seed` and `deterministic` are arguments."),
    "init_module": Meaning("", "Import it before the trainer is made."),
    "log": Meaning("loggers", '"tensorboard", "wandb"'),
    "debug": Meaning("detect_anomaly", "which finds the operation with a NaN gradient"),
    "dataloader": Meaning("", _LOADER),
    "interval": Meaning("scheduler_interval", '"step" or "epoch"'),
    "run_mode": Meaning("", "`train()` runs, and `compile()` compiles ahead of it."),
    "instance_name": Meaning("", _NOT_GENERATED),
    "gen_reuse": Meaning("", _NOT_GENERATED),
    "pas_policy": Meaning("", _NOT_GENERATED),
    "broadcast_strategy": Meaning("", _NOT_GENERATED),
    "dummy_sample_gen_fn": Meaning("", _NOT_GENERATED),
    "dummy_sample_post_process_fn": Meaning("", _NOT_GENERATED),
    "plan_ngpus": Meaning("", _LAUNCHED),
    "runtime_ngpus": Meaning("", _LAUNCHED),
    "use_zero": Meaning("", "`omnitrain launch --fsdp` or `omnitrain launch --zero 2` shards; use AccelerateTrainer."),
    "loss_reduction": Meaning("grad_reduction", '"mean", "sum" or "per-token-mean"'),
    "aggregate_outputs_fn": Meaning("unit", "returns the loss and the number of targets, or a `StepOutput`"),
    "vars": Meaning("", "In a file of `omnitrain train` it is a section next to `trainer:`."),
}
_OMNIGENBENCH: dict[str, Meaning] = {
    "num_epochs": Meaning("epochs"),
    "trial_dir": Meaning("save_dir"),
    "test_loss": Meaning("test()", "a call, not an argument"),
    "learning_rate_scheduler": Meaning("lr_scheduler"),
    "loss_func": Meaning("loss_fn"),
    "max_train_examples": Meaning("", _TRAIN_PART),
    "drop_long_seq": Meaning("", "Filter the dataset; `Collator(max_length=512)` cuts longer samples."),
    "force_padding": Meaning("data_collator", "`Collator()` pads to the longest sample of a batch"),
    "autocast_dtype": Meaning("autocast"),
    "save_metrics": Meaning("save_metrics()", "a call, not an argument"),
}
_EASYDEL: dict[str, Meaning] = {
    "arguments": Meaning("", "The arguments are passed one by one."),
    "model_state": Meaning("model"),
    "dataset_train": Meaning("train_dataset"),
    "dataset_eval": Meaning("eval_dataset"),
    "data_collator_fn": Meaning("data_collator"),
    "max_training_steps": Meaning("max_steps"),
    "max_evaluation_steps": Meaning("eval_dataset", _EVAL_PART),
    "total_batch_size": Meaning("global_batch_size"),
    "eval_batch": Meaning("eval_batch_size"),
    "training_time_limit": Meaning("max_duration", '"2h30m"'),
    "evaluation_steps": Meaning("eval_steps"),
    "save_directory": Meaning("save_dir"),
    "model_name": Meaning("trial_name"),
    "log_grad_norms": Meaning("", "The norm is always logged; `Distributions()` logs gradients of each parameter."),
    "scheduler": Meaning("lr_scheduler"),
    "loss_config": Meaning("loss_fn", "`CrossEntropy(ignore_index=-100, label_smoothing=0.1, z_loss=1e-4)`"),
    "frozen_parameters": Meaning("freeze", "a list of regular expressions"),
    "pruning_module": Meaning("algorithms", "`[MagnitudePruning(0.5)]`"),
    "use_wandb": Meaning("loggers", '"wandb"'),
    "clip_grad": Meaning("max_grad_norm"),
    "shuffle_train_dataset": Meaning("shuffle"),
    "remove_ckpt_after_load": Meaning("", "Retention is `save_total_limit`."),
    "max_sequence_length": Meaning("data_collator", _CUT),
    "truncation_mode": Meaning("data_collator", '`Collator(max_length=512, truncation_side="left")` for "keep_end"'),
    "report_steps": Meaning("log_steps"),
    "resume_if_possible": Meaning("", _AUTO_RESUME),
    "do_last_save": Meaning("save_steps", "the last step is always saved"),
    "save_interval_minutes": Meaning("save_steps", 'as in save_steps="30m"'),
    "save_optimizer_state": Meaning("save_only_model", "True for False"),
    "per_epoch_training_steps": Meaning("", _TRAIN_PART),
    "per_epoch_evaluation_steps": Meaning("eval_dataset", _EVAL_PART),
    "log_weight_distribution": Meaning("callbacks", "`[Distributions()]`"),
    "weight_distribution_log_steps": Meaning("callbacks", '`[Distributions(every="500ba")]`'),
    "watchers": Meaning("callbacks", "`[Distributions()]`"),
    "progress_bar_type": Meaning("progress_bar"),
    "track_memory": Meaning("callbacks", "`[MemoryMonitor()]`"),
    "custom_scheduler": Meaning("lr_scheduler"),
    "extra_optimizer_kwargs": Meaning("param_groups", _OPTIONS),
    "step_partition_spec": Meaning("", _LAUNCHED),
}
_HABITS: dict[str, Meaning] = {
    "lr": Meaning("learning_rate"),
    "wd": Meaning("weight_decay"),
    "bs": Meaning("batch_size"),
    "num_steps": Meaning("max_steps"),
    "steps": Meaning("max_steps"),
    "total_steps": Meaning("max_steps"),
    "n_epochs": Meaning("epochs"),
    "epoch": Meaning("epochs"),
    "grad_clip": Meaning("max_grad_norm"),
    "clip_grad_norm": Meaning("max_grad_norm"),
    "gradient_clipping": Meaning("max_grad_norm"),
    "gradient_clip": Meaning("max_grad_norm"),
    "accumulation_steps": Meaning("gradient_accumulation_steps"),
    "grad_accum_steps": Meaning("gradient_accumulation_steps"),
    "gradient_accumulation": Meaning("gradient_accumulation_steps"),
    "criterion": Meaning("loss_fn", "called as `loss_fn(outputs, labels)`"),
    "loss_function": Meaning("loss_fn", "called as `loss_fn(outputs, labels)`"),
    "net": Meaning("model"),
    "train_set": Meaning("train_dataset"),
    "train_data": Meaning("train_dataset"),
    "training_data": Meaning("train_dataset"),
    "train": Meaning("train_dataset"),
    "val_dataset": Meaning("eval_dataset"),
    "valid_dataset": Meaning("eval_dataset"),
    "validation_dataset": Meaning("eval_dataset"),
    "val_data": Meaning("eval_dataset"),
    "val_loader": Meaning("eval_loader"),
    "valid_loader": Meaning("eval_loader"),
    "val_dataloader": Meaning("eval_loader"),
    "test_dataloader": Meaning("test_loader"),
    "collate_fn": Meaning("data_collator"),
    "sampler": Meaning("", _LOADER),
    "batch_sampler": Meaning("", _LOADER),
    "scaler": Meaning("", "autocast='fp16' makes one; replace `trainer.scaler` before train()."),
    "amp": Meaning("autocast", '"fp16" or "bf16"'),
    "use_amp": Meaning("autocast", '"fp16" or "bf16"'),
    "half": Meaning("autocast", '"fp16"'),
    "allow_tf32": Meaning("matmul_precision", '"high"'),
    "float32_matmul_precision": Meaning("matmul_precision"),
    "gpus": Meaning("", _LAUNCHED),
    "n_gpus": Meaning("", _LAUNCHED),
    "num_gpus": Meaning("", _LAUNCHED),
    "num_processes": Meaning("", _LAUNCHED),
    "local_rank": Meaning("", _LAUNCHED),
    "world_size": Meaning("", _LAUNCHED),
    "ddp": Meaning("", _LAUNCHED),
    "log_interval": Meaning("log_steps"),
    "log_dir": Meaning("save_dir"),
    "log_every": Meaning("log_steps"),
    "eval_every": Meaning("eval_steps"),
    "save_every": Meaning("save_steps"),
    "save_path": Meaning("save_dir"),
    "checkpoint_dir": Meaning("save_dir"),
    "ckpt_dir": Meaning("save_dir"),
    "resume": Meaning("", _RESUME),
    "resume_from": Meaning("", _RESUME),
    "random_seed": Meaning("seed"),
    "random_state": Meaning("seed"),
    "warmup": Meaning("warmup_steps"),
    "num_warmup_steps": Meaning("warmup_steps"),
    "warmup_epochs": Meaning("warmup_steps", '"2ep"'),
    "momentum": Meaning("param_groups", _OPTIONS),
    "betas": Meaning("param_groups", _OPTIONS),
    "eps": Meaning("param_groups", _OPTIONS),
    "layer_decay": Meaning("param_groups", "`layerwise_decay(model, 0.75)`"),
    "llrd": Meaning("param_groups", "`layerwise_decay(model, 0.75)`"),
    "no_decay": Meaning("param_groups", "`[{'match': 'bias|norm', 'weight_decay': 0.0}]`"),
    "parameter_groups": Meaning("param_groups"),
    "frozen_layers": Meaning("freeze", "regular expressions of parameters' names"),
    "freeze_layers": Meaning("freeze", "regular expressions of parameters' names"),
    "gamma": Meaning("", _SCHEDULE),
    "milestones": Meaning("", _SCHEDULE),
    "step_size": Meaning("", _SCHEDULE),
    "min_lr": Meaning("", _SCHEDULE),
    "early_stopping": Meaning("patience"),
    "early_stopping_rounds": Meaning("patience"),
    "higher_is_better": Meaning("optimization_direction", '"max" or "min"'),
    "callback": Meaning("callbacks", "a list"),
    "hooks": Meaning("callbacks", "instances of `Callback`"),
    "wandb": Meaning("loggers", '"wandb"'),
    "tensorboard": Meaning("loggers", '"tensorboard"'),
    "ema": Meaning("algorithms", "`[EMA()]`"),
    "config": Meaning("", "The arguments are passed one by one: `Trainer(model, **options)`."),
    "pretrained": Meaning("init_from", "a path; a model of the Hub is loaded by `from_pretrained`"),
    "init_checkpoint": Meaning("init_from"),
    "weights": Meaning("init_from"),
    "num_labels": Meaning("", _MODEL),
}  # fmt: skip

VOCABULARY: dict[str, dict[str, Meaning]] = {
    "transformers": _TRANSFORMERS,
    "Lightning": _LIGHTNING,
    "Composer": _COMPOSER,
    "Keras": _KERAS,
    "accelerate": _ACCELERATE,
    "fairseq2": _FAIRSEQ2,
    "nnScaler": _NNSCALER,
    "OmniGenBench": _OMNIGENBENCH,
    "EasyDeL": _EASYDEL,
    "Loops by hand": _HABITS,
}
"""The names by origin; each appears once."""


def advice(name: str, known: list[str]) -> str:
    """Return what to write for an argument of another trainer, as a sentence after a space; "" if it is unknown.

    Args:
        name: The argument.
        known: The arguments that the trainer has.
    """
    for names in VOCABULARY.values():
        meant = names.get(name)
        if meant is None:
            continue
        if not meant.ours:
            return f" There is none: {meant.word}"
        kind, _, argument = meant.ours.rpartition(".")
        if kind and argument in known:
            kind = ""
        if not kind and argument not in known and not argument.endswith("()"):
            return ""  # this trainer has its own advice
        where = f"an argument of {kind}: `{argument}`" if kind else f"`{argument}`"
        return f" Here it is {where}{f' ({word})' if (word := meant.word.rstrip('.')) else ''}."
    return ""


def table() -> str:
    """Return the names as the tables of a page of Markdown."""
    parts = []
    for source, names in VOCABULARY.items():
        rows = [f"| `{name}` | {_cell(meant)} |" for name, meant in sorted(names.items())]
        parts.append("\n".join([f"## {source}", "", "| there | here |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _cell(meant: Meaning) -> str:
    kind, _, argument = meant.ours.rpartition(".")
    if not argument:
        return f"none. {meant.word}"
    return f"`{argument}`" + (f" of `{kind}`" if kind else "") + (f": {meant.word}" if meant.word else "")
