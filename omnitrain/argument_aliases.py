"""Names of arguments in other trainers, and their equivalents.

Errors about unknown arguments and the docs use them. `make signatures` writes `docs/names.md` from this table.
"""

from __future__ import annotations

from typing import NamedTuple


class Meaning(NamedTuple):
    """The equivalent of a name."""

    ours: str
    """An argument, a method ("stop()"), or one of another trainer ("AccelerateTrainer.accelerator"); "" for none."""
    word: str = ""
    """What differs; without an equivalent, what to do instead."""


# Explanations that several names share.
_SHARED = {
    "LOADER": "A custom loader has it: `train_loader=DataLoader(...)`.",
    "CUT": "`Collator(max_length=512)` cuts longer samples",
    "TOKENIZE": "Tokenize the dataset yourself, and pass what `model(**batch)` takes.",
    "EVAL_PART": "`EvalSet(dataset, subset=1000)` evaluates the first 1000 samples",
    "TRAIN_PART": "Pass a `torch.utils.data.Subset` as `train_dataset`.",
    "TRAINING_ARGUMENTS": "HFTrainer takes it in its training arguments.",
    "AUTO_RESUME": 'Pass it to the call: `train(resume_from="auto")`.',
    "NOT_GENERATED": "The model runs unchanged: nothing is traced, and no code is generated.",
    "FORMAT": "Checkpoints have one format, of safetensors and JSON.",
    "RESUME": "Pass it to the call, not the constructor: `train(resume_from=...)`.",
    "LAUNCH": "`omnitrain launch -n N`, `torchrun` or `accelerate launch` start processes; use AccelerateTrainer.",
    "OPTIONS": "as in `{'betas': (0.9, 0.98)}`",
    "SCHEDULE": "Pass it in `lr_scheduler_kwargs`, with the name of a schedule.",
    "MODEL": "It is a matter of the model: do it before you pass it.",
    "SET_EPOCH": "A stream with a method set_epoch() gets the number of each epoch, and may change then.",
    "PREVIEW": "`[Preview(options)]` generates texts",
    "OWN_PART": "Each process reads its own part of the data.",
    "NEXT_SAMPLE": "A resumed run always continues with the next sample.",
    "COLUMNS": "Columns that the model does not take are left out, and named in the log.",
    "ONE_BY_ONE": "The arguments are passed one by one: `Trainer(model, **options)`.",
    "NORM": "The norm is always logged; `Distributions()` logs gradients of each parameter.",
    "FREE": "Events that nobody listens to cost nothing; leave out `callbacks` and `loggers`.",
    "SETTINGS": "Two files in `save_dir` have the settings, config.yaml and run.json.",
}

# The names by origin; each appears once. A line has `theirs=ours` for names that differ in nothing else, or some names
# and, after the arrow, their equivalent and what differs.
_TABLES = {
    "transformers": """
        num_train_epochs=epochs lr_scheduler_type=lr_scheduler overwrite_output_dir=overwrite
        half_precision_backend=autocast optim=optimizer dataloader_num_workers=num_workers
        dataloader_pin_memory=pin_memory dataloader_prefetch_factor=prefetch_factor dataloader_drop_last=drop_last
        data_seed=seed full_determinism=deterministic run_name=trial_name report_to=loggers max_train_steps=max_steps
        ddp_find_unused_parameters=AccelerateTrainer.find_unused_parameters deepspeed=AccelerateTrainer.deepspeed_config
        early_stopping_patience=patience early_stopping_threshold=delta
        gradient_checkpointing_kwargs=gradient_checkpointing ddp_timeout=timeout
        args training_args -> HFTrainer.training_args: The other trainers take the arguments one by one.
        output_dir -> save_dir: nothing is written without it
        per_device_train_batch_size per_gpu_train_batch_size train_batch_size -> batch_size: on each process, too
        per_device_eval_batch_size per_gpu_eval_batch_size -> eval_batch_size: on each process, too
        warmup_ratio -> warmup_steps: a share below 1, such as 0.1
        logging_steps logging_strategy -> log_steps: an int counts steps; "1ep" is each epoch
        logging_first_step -> none: A callback can ask for it: `trainer.request_log()`.
        logging_dir -> save_dir: `TensorBoardLogger(folder)` takes another place for TensorBoard
        eval_strategy evaluation_strategy -> eval_steps: without it an evaluation set is evaluated after each epoch
        save_strategy -> save_steps: without it there is a checkpoint after each epoch
        metric_for_best_model -> optimization_metric: with or without `eval_`
        greater_is_better -> optimization_direction: "max" or "min"; by default inferred from its name
        load_best_model_at_end -> load_best_at_end: on by default with an evaluation set
        bf16 -> autocast: autocast="bf16"
        fp16 fp16_opt_level -> autocast: autocast="fp16"
        no_cuda use_cpu -> device: device="cpu"
        optimizers -> optimizer: the optimizer and `lr_scheduler` are passed one by one
        optim_args adam_beta1 adam_beta2 adam_epsilon -> optimizer_kwargs: OPTIONS
        tokenizer -> processing_class: pads batches, and is saved with the model
        compute_loss_func -> loss_fn: called as `loss_fn(outputs, labels)`
        model_init -> HFTrainer.model_init: The other trainers take a model; make it before.
        dataloader_persistent_workers -> num_workers: workers are started once in any case
        disable_tqdm -> progress_bar: progress_bar=False
        remove_unused_columns -> none: COLUMNS
        label_smoothing_factor -> algorithms: `[LabelSmoothing(num_classes, 0.1)]`
        group_by_length -> none: Pass `GroupByLength(train_dataset)`; HFTrainer takes it in its training arguments.
        train_sampling_strategy -> none: Pass `GroupByLength(train_dataset)`, or `shuffle=False`.
        packing -> none: Pass `PackedDataset(train_dataset, length)`.
        length_column_name -> none: Pass `GroupByLength(train_dataset, lengths=train_dataset['length'])`.
        resume_from_checkpoint -> none: RESUME
        do_train -> train(): a call, not a switch
        do_eval -> eval_dataset: it is evaluated if it is given
        do_predict -> predict(): a call, not a switch
        fsdp fsdp_config -> AccelerateTrainer.fsdp_plugin: or `omnitrain launch --fsdp`
        push_to_hub -> none: HFTrainer uploads, as its training arguments say; save_model() writes the folder.
        tf32 -> matmul_precision: "high" for True, "highest" for False
        torch_compile -> compile: True, or a dict of the options of `torch.compile`
        save_safetensors -> none: Weights are always written as safetensors.
        auto_find_batch_size -> microbatch_size: "auto"; HFTrainer takes it in its training arguments too
        include_inputs_for_metrics bf16_full_eval fp16_full_eval neftune_noise_alpha -> none: TRAINING_ARGUMENTS
        max_seq_length max_length -> data_collator: CUT
        dataset_text_field -> none: TOKENIZE
        peft_config -> none: Pass `get_peft_model(model, config)`.
        torch_compile_backend -> compile: {"backend": ...}
        torch_compile_mode -> compile: {"mode": ...}
        ignore_data_skip -> none: NEXT_SAMPLE
    """,
    "Lightning": """
        max_epochs=epochs accumulate_grad_batches=gradient_accumulation_steps gradient_clip_val=max_grad_norm
        log_every_n_steps=log_steps enable_progress_bar=progress_bar default_root_dir=save_dir logger=loggers
        train_dataloaders=train_loader val_dataloaders=eval_loader monitor=optimization_metric
        mode=optimization_direction min_delta=delta dirpath=save_dir every_n_train_steps=save_steps
        save_weights_only=save_only_model amp_backend=autocast weights_save_path=save_dir process_position=progress_bar
        test_dataloaders=test_loader
        min_epochs -> none: Early stopping waits for `patience` evaluations; a longer patience is a longer run.
        min_steps -> none: Early stopping waits for `patience` evaluations; a longer patience is a longer run.
        max_time -> max_duration: "2h30m"; `TimeLimit("2h30m")` in `callbacks` counts each job
        accelerator -> device: accelerate's `Accelerator` is an argument of AccelerateTrainer
        devices num_nodes strategy tpu_cores ipus hpus -> none: LAUNCH
        precision -> autocast: "16-mixed" is "fp16", "bf16-mixed" is "bf16"
        auto_scale_batch_size -> microbatch_size: "auto", which leaves the samples of a step unchanged
        gradient_clip_algorithm -> algorithms: `[GradientClipping("value", 0.5)]`; `max_grad_norm` clips by the norm
        val_check_interval -> eval_steps: an int counts steps; "0.25ep" is a share of an epoch
        check_val_every_n_epoch -> eval_steps: as in eval_steps="2ep"
        num_sanity_val_steps -> sanity: evaluates one batch of each evaluation set, by default; False for 0
        limit_train_batches overfit_batches -> none: TRAIN_PART
        limit_val_batches -> eval_dataset: EVAL_PART
        limit_test_batches -> test_dataset: EVAL_PART
        fast_dev_run -> max_steps: max_steps=1
        enable_checkpointing checkpoint_callback -> save_dir: leave it out to write nothing
        benchmark -> none: Set `torch.backends.cudnn.benchmark` before.
        sync_batchnorm -> none: Pass `nn.SyncBatchNorm.convert_sync_batchnorm(model)`.
        datamodule -> train_loader: and `eval_loader`, `test_loader`
        ckpt_path -> none: RESUME
        save_top_k -> keep_best: with `save_total_limit`
        every_n_epochs -> save_steps: as in save_steps="2ep"
        limit_predict_batches -> none: Pass a `torch.utils.data.Subset` to `predict()`.
        inference_mode -> none: Evaluations never compute gradients.
        use_distributed_sampler replace_sampler_ddp -> none: OWN_PART
        plugins -> AccelerateTrainer.accelerator: an `Accelerator` that was made with them
        enable_model_summary weights_summary -> none: The first lines of a run name the model and its parameters.
        barebones -> none: FREE
        reload_dataloaders_every_n_epochs -> none: SET_EPOCH
        enable_autolog_hparams -> none: SETTINGS
        model_registry -> save_dir: a path or an address, as of a bucket
        auto_select_gpus -> device: device="cuda:0"
        auto_lr_find -> none: A search tries rates: `search` of omnitrain.
        progress_bar_refresh_rate -> progress_bar: False for 0
        amp_level -> autocast: "fp16" or "bf16"
        move_metrics_to_cpu -> compute_metrics: names stream, and keep no predictions
        multiple_trainloader_mode -> none: Pass a `MultiTask` of several datasets as `train_dataset`.
        track_grad_norm -> none: NORM
        terminate_on_nan -> on_nonfinite: "raise", by default
        stochastic_weight_avg -> algorithms: `[SWA()]`
        prepare_data_per_node -> none: Prepare the data before the trainer is made.
        flush_logs_every_n_steps -> none: Each row is written at once.
        log_gpu_memory -> callbacks: `[MemoryMonitor()]`
        truncated_bptt_steps -> unit: a `TrainUnit` that cuts a batch in time, and keeps the hidden state
        dataloaders -> none: Pass a loader to the call of evaluate() or predict().
        predict_dataloaders -> predict(): which takes a loader
        weights_only -> none: FORMAT
    """,
    "Composer": """
        train_dataloader=train_loader eval_dataloader=eval_loader optimizers_list=optimizer save_folder=save_dir
        save_num_checkpoints_to_keep=save_total_limit save_overwrite=overwrite deterministic_mode=deterministic
        grad_accum=gradient_accumulation_steps parallelism_config=AccelerateTrainer.parallelism_config
        deepspeed_config=AccelerateTrainer.deepspeed_config algorithm=algorithms log_to_console=progress_bar
        dist_timeout=timeout accum_train_batch_on_rank0=global_batch_size grad_clip_norm=max_grad_norm
        reproducibility_mode=deterministic eval_batch_split=eval_batch_size
        schedulers -> lr_scheduler: the same classes, without `WithWarmup`: they take `warmup`; `*` multiplies
        scale_schedule_ratio -> none: Each schedule takes it: `StepScheduler("30ep", scale_ratio=0.5)`.
        t_warmup -> warmup_steps: or `warmup` of a schedule
        eval_interval -> eval_steps: the same strings
        save_interval -> save_steps: the same strings
        load_path load_progress_bar -> none: RESUME
        load_weights_only -> init_from: the path; a resume of all else is `train(resume_from=...)`
        load_ignore_keys -> init_from: {"path": ..., "ignore": [globs]}
        load_strict_model_weights -> init_from: what was not loaded is logged
        autoresume -> none: AUTO_RESUME
        device_train_microbatch_size -> microbatch_size: a number or "auto"; `batch_size` is that of a step
        step_schedulers_every_batch -> scheduler_interval: "step" or "epoch"
        train_subset_num_batches -> none: TRAIN_PART
        eval_subset_num_batches -> eval_dataset: EVAL_PART
        precision_config -> dtypes: parameters, buffers and inputs; `autocast` keeps weights in fp32
        console_log_interval -> callbacks: `[ProgressBar(every="10ba")]`; `log_steps` is that of all rows
        profiler log_traces -> callbacks: `[Profiler()]`
        algorithm_passes -> algorithms: applied in the order of the list
        accumulate_train_batch_on_tokens -> grad_reduction: "per-token-mean"
        compile_config -> compile: a dict of the options of `torch.compile`
        ddp_sync_strategy -> AccelerateTrainer.find_unused_parameters: gradients are averaged once in a step
        spin_dataloaders -> none: NEXT_SAMPLE
        train_dataloader_label -> none: There is one training set; those of evaluation have names in a dict.
        console_stream -> progress_bar: False for none; logs go where the logger called omnitrain sends them
        auto_log_hparams -> none: SETTINGS
        load_object_store -> none: Pass the address to the call: `train(resume_from="s3://bucket/run/last")`.
        load_exclude_algorithms -> none: Pass the names that may differ to the call: `train(allow_change=[...])`.
        save_filename -> save_dir: folders in it are called checkpoint-<step>
        save_latest_filename latest_remote_file_name -> save_dir: the file or link called last names the latest
        save_ignore_keys -> save_only_model: or `save_frozen`
        fsdp_auto_wrap -> AccelerateTrainer.fsdp_plugin: or `omnitrain launch --fsdp`
        python_log_level -> none: Set the level of the logger called omnitrain, by the module logging.
        fsdp_state_dict_type state_dict_type -> consolidate: full weights next to the shards of the ranks
        load_fsdp_monolith_rank0_only load_monolith_rank0_only -> none: Each rank reads its own part of a checkpoint.
    """,
    "Keras": """
        validation_data=eval_dataset validation_batch_size=eval_batch_size verbose=progress_bar clipnorm=max_grad_norm
        restore_best_weights=load_best_at_end filepath=save_dir workers=num_workers
        x y -> train_dataset: TensorDataset(x, y)
        validation_split -> none: Split the dataset before: `torch.utils.data.random_split`.
        validation_freq -> eval_steps: as in eval_steps="2ep"
        steps_per_epoch -> none: An epoch is a pass over the data; `max_steps` limits the run.
        initial_epoch -> none: RESUME
        class_weight -> loss_fn: as in `nn.CrossEntropyLoss(weight=...)`
        sample_weight -> loss_fn: put the weights into the batch, or write a `unit`
        loss -> loss_fn: called as `loss_fn(outputs, labels)`
        metrics -> compute_metrics: as in compute_metrics=['accuracy', 'f1_macro']
        save_best_only -> keep_best: with `save_total_limit`
    """,
    "accelerate": """
        mixed_precision=autocast fsdp_plugin=AccelerateTrainer.fsdp_plugin log_with=loggers project_dir=save_dir
        find_unused_parameters=AccelerateTrainer.find_unused_parameters
        deepspeed_plugin -> AccelerateTrainer.deepspeed_config: a path or a dict
        split_batches -> global_batch_size: `batch_size` is that of each process
        rampup_batch_size -> global_batch_size: it grows: {0: 64, "1e6sp": 128}
        batch_size_schedule -> global_batch_size: it grows: {0: 64, "0.2dur": 128}
        cpu -> device: device="cpu"
        step_scheduler_with_optimizer -> scheduler_interval: "step" or "epoch"
        kwargs_handlers -> AccelerateTrainer.accelerator: an `Accelerator` that was made with them
        dataloader_config -> none: LOADER
        even_batches -> none: Batches are shared out unevenly, and nothing is counted twice.
        dispatch_batches -> none: OWN_PART
    """,
    "fairseq2": """
        max_num_steps=max_steps max_num_data_epochs=epochs data_reader=train_loader validate_every_n_steps=eval_steps
        validate_at_start=eval_on_start checkpoint_every_n_steps=save_steps keep_last_n_checkpoints=save_total_limit
        publish_metrics_every_n_steps=log_steps pretrained_model=init_from score_metric=optimization_metric
        score_metric_descriptor=optimization_metric max_gradient_norm=max_grad_norm checkpoint_manager=save_dir
        anomaly_detection=detect_anomaly keep_last_n_models=save_total_limit save_model_only=save_only_model
        dtype=autocast data_readers=train_loader grad_accumulation=gradient_accumulation_steps
        fp16_init_scale=fp16_loss_scale fp16_min_scale=fp16_loss_scale fp16_scale_window=fp16_loss_scale
        loss_scaler=fp16_loss_scale valid_data_reader=eval_loader validate_after_n_steps=eval_steps
        checkpoint_after_n_steps=save_steps async_checkpoint_saving=async_save publish_metrics_after_n_steps=log_steps
        metric_recorder=loggers metric_recorders=loggers progress_reporter=progress_bar
        activation_checkpointing=gradient_checkpointing num_accumulate=gradient_accumulation_steps
        keep_last_checkpoint=save_total_limit keep_best_checkpoint=keep_best metric_publishers=loggers
        valid_units -> unit: with a method `evaluate(batch)`; `EvalSet(dataset, unit=unit)` has its own
        valid_data_readers -> eval_loader: a dict of them
        validate_every_n_data_epochs validate_after_n_data_epochs -> eval_steps: as in eval_steps="2ep"
        checkpoint_every_n_data_epochs checkpoint_after_n_data_epochs -> save_steps: as in save_steps="2ep"
        keep_best_n_checkpoints keep_best_n_models -> keep_best: with `save_total_limit`
        keep_checkpoint_every_n_steps -> keep_every: with `save_total_limit`
        lower_better -> optimization_direction: "max" or "min"
        fp16_loss_scale_window -> fp16_loss_scale: its third number
        gangs root_gang dp_gang data_parallelism tensor_parallel_size -> none: LAUNCH
        tp_gang -> AccelerateTrainer.parallelism_config: `ParallelismConfig(tp_size=2)` of accelerate
        tb_dir -> loggers: `[TensorBoardLogger(folder)]`
        metrics_dir -> save_dir: `metrics.jsonl` in it has all rows
        publish_metrics_every_n_data_epochs publish_metrics_after_n_data_epochs -> log_steps: as in log_steps="2ep"
        gc_every_n_steps -> callbacks: `[GarbageCollection("1000ba")]`
        amp_dtype -> autocast: "bf16" or "fp16"
        grad_check gradient_check -> callbacks: `[GradientCheck("100ba")]`
        lower_score_better -> optimization_direction: "min" for True
        valid_unit -> eval_dataset: a dict names several; `unit` may be an `EvalUnit` too
        validate_before_checkpoint -> eval_steps: an evaluation comes before the checkpoint of its step
        checkpoint_metadata_saver -> processing_class: it and the model's config are saved with the weights
        save_as_hugging_face -> none: FORMAT
        tbd_writer -> loggers: "tensorboard"
        wall_watch -> none: The progress of the trainer has the seconds in training.
        profile -> callbacks: `[Profiler()]`
        no_sync_grad_accumulation -> none: Gradients are averaged once in a step, after its last micro-batch.
        garbage_collector -> callbacks: `[GarbageCollection()]`
        device_stat_tracker -> callbacks: `[MemoryMonitor()]`
        fsdp_granularity fsdp_wrap_granularity -> AccelerateTrainer.fsdp_plugin: or `omnitrain launch --fsdp`
        recipe -> none: ONE_BY_ONE
    """,
    "nnScaler": """
        global_batchsize=global_batch_size grad_accumulation_steps=gradient_accumulation_steps every_n_steps=save_steps
        keep_last_n=save_total_limit clip_gnorm=max_grad_norm dataset=train_dataset enable_log_progress=progress_bar
        val_every_n_train_steps=eval_steps tracing_from_weights=init_from
        train_args -> none: The arguments are passed one by one.
        micro_batch_size -> batch_size: or `microbatch_size`, which splits each batch
        gen_savedir instance_name gen_reuse pas_policy broadcast_strategy dummy_sample_gen_fn -> none: NOT_GENERATED
        dummy_sample_post_process_fn -> none: NOT_GENERATED
        compute_config plan_ngpus runtime_ngpus -> none: LAUNCH
        max_val_steps -> eval_dataset: EVAL_PART
        max_train_steps_per_epoch -> none: TRAIN_PART
        hook -> callbacks: a `HookCallback` of it
        dataset_sampler dataloader -> none: LOADER
        log_progress_every_n_train_steps -> callbacks: `[ProgressBar(every="100ba")]`
        checkpoint -> save_dir: and `save_steps`, `save_total_limit`, `keep_best`
        no_save -> save_dir: leave it out to write nothing
        save_best -> keep_best: 0 for False
        save_last -> save_steps: the last step is always saved
        save_type -> consolidate: whether sharded weights are put together
        symlink_best_and_last -> none: `best` and `last` in `save_dir` are small files with the name of a checkpoint.
        format serializer -> none: FORMAT
        val_every_n_epochs -> eval_steps: as in eval_steps="2ep"
        init_env_fn -> none: Call it before the trainer is made; `seed` and `deterministic` are arguments.
        init_module -> none: Import it before the trainer is made.
        log -> loggers: "tensorboard", "wandb"
        debug -> detect_anomaly: which finds the operation with a NaN gradient
        interval -> scheduler_interval: "step" or "epoch"
        run_mode -> none: `train()` runs, and `compile()` compiles ahead of it.
        use_zero -> none: `omnitrain launch --fsdp` or `omnitrain launch --zero 2` shards; use AccelerateTrainer.
        loss_reduction -> grad_reduction: "mean", "sum" or "per-token-mean"
        aggregate_outputs_fn -> unit: returns the loss and the number of targets, or a `StepOutput`
        vars -> none: In a file of `omnitrain train` it is a section next to `trainer:`.
    """,
    "OmniGenBench": """
        num_epochs=epochs trial_dir=save_dir learning_rate_scheduler=lr_scheduler loss_func=loss_fn
        autocast_dtype=autocast
        test_loss -> test(): a call, not an argument
        max_train_examples -> none: TRAIN_PART
        drop_long_seq -> none: Filter the dataset; `Collator(max_length=512)` cuts longer samples.
        force_padding -> data_collator: `Collator()` pads to the longest sample of a batch
        save_metrics -> save_metrics(): a call, not an argument
    """,
    "EasyDeL": """
        model_state=model dataset_train=train_dataset dataset_eval=eval_dataset data_collator_fn=data_collator
        max_training_steps=max_steps total_batch_size=global_batch_size eval_batch=eval_batch_size
        evaluation_steps=eval_steps save_directory=save_dir model_name=trial_name scheduler=lr_scheduler
        clip_grad=max_grad_norm shuffle_train_dataset=shuffle report_steps=log_steps progress_bar_type=progress_bar
        custom_scheduler=lr_scheduler force_batch_size_to_use_global_batch_size_on_dp=global_batch_size backend=device
        offload_device=device init_tx=optimizer scheduler_kwargs=lr_scheduler_kwargs use_data_collator=data_collator
        shuffle_seed_train=seed model_parameters=init_from backup_save_steps=save_steps evaluation_interval=eval_steps
        metrics_to_show_in_rich_pbar=progress_bar report_metrics=loggers log_global=loggers
        log_logprobs_metrics=compute_metrics wandb_name=trial_name benchmark_interval=eval_steps
        arguments -> none: The arguments are passed one by one.
        max_evaluation_steps per_epoch_evaluation_steps -> eval_dataset: EVAL_PART
        training_time_limit training_time -> max_duration: "2h30m"; `TimeLimit("2h30m")` in `callbacks` counts each job
        log_grad_norms -> none: NORM
        loss_config -> loss_fn: `CrossEntropy(ignore_index=-100, label_smoothing=0.1, z_loss=1e-4)`
        frozen_parameters -> freeze: a list of regular expressions
        pruning_module sparsify_module sparse_module_type -> algorithms: `[MagnitudePruning(0.5)]`
        use_wandb -> loggers: "wandb"
        remove_ckpt_after_load -> none: Retention is `save_total_limit`.
        max_sequence_length -> data_collator: CUT
        truncation_mode -> data_collator: `Collator(max_length=512, truncation_side="left")` for "keep_end"
        resume_if_possible -> none: AUTO_RESUME
        do_last_save -> save_steps: the last step is always saved
        save_interval_minutes -> save_steps: as in save_steps="30m"
        save_optimizer_state -> save_only_model: True for False
        per_epoch_training_steps -> none: TRAIN_PART
        log_weight_distribution watchers weight_distribution_pattern -> callbacks: `[Distributions()]`
        weight_distribution_log_steps -> callbacks: `[Distributions(every="500ba")]`
        track_memory -> callbacks: `[MemoryMonitor()]`
        extra_optimizer_kwargs optimizer_mu_dtype tx_mu_dtype -> optimizer_kwargs: OPTIONS
        step_partition_spec auto_shard_states sharding_array do_shard_fns jax_distributed_config -> none: LAUNCH
        fully_sharded_data_parallel -> AccelerateTrainer.fsdp_plugin: or `omnitrain launch --fsdp`
        process_zero_is_admin -> none: The main rank writes and logs; `trainer.is_main_process` is true there.
        log_all_workers -> none: The main rank writes and logs; `trainer.is_main_process` is true there.
        aux_loss_enabled -> none: A loss of the model that balances experts is part of its loss.
        offload_dataset -> pin_memory: data stay on the host, and are copied ahead
        performance_mode -> none: FREE
        low_mem_usage -> none: A model on the meta device gets its weights as they arrive, from `init_from`.
        learning_rate_end -> lr_scheduler_kwargs: `{"min_lr": 1e-6}`
        param_dtype -> none: Convert the model before you pass it; `dtypes` and `autocast` are for what is computed.
        ids_to_pop_from_dataset -> none: COLUMNS
        use_grain -> train_loader: a custom loader or iterable
        grain_shard_index grain_shard_count -> none: OWN_PART
        train_on_inputs -> none: Set the labels of the prompt to -100 in the dataset.
        split_names -> eval_dataset: a dict of named sets
        is_fine_tuning -> init_from: a path; a model of the Hub is loaded by `from_pretrained`
        model_class -> model: an instance
        model_huggingface_repo_id -> none: save_model() writes the folder; HFTrainer uploads it.
        checkpoint_path -> init_from: weights to begin with; `train(resume_from=...)` continues a run
        load_from_checkpoint step_start_point -> none: RESUME
        save_tpu_preemption_checkpoints -> none: SIGTERM ends a run in order: it is saved, and can be resumed.
        tpu_preemption_checkpoint_manager -> none: SIGTERM ends a run in order: it is saved, and can be resumed.
        loss_chunk_size -> loss_fn: `chunked_cross_entropy(..., chunk_size=1024)` in the model's forward
        quantization_mode quantization_block -> none: MODEL
        state_apply_fn_kwarguments_to_model -> unit: a `TrainUnit` calls the model as it likes
        ema_decay -> algorithms: `[EMA(0.999)]`
        trackio_project -> loggers: "trackio"
        wandb_entity -> loggers: `[WandbLogger(entity=...)]`
        wandb_project -> loggers: `[WandbLogger(project=...)]`
        wandb_tags -> loggers: `[WandbLogger(tags=...)]`
        auto_fix_xla_flags -> none: There is no XLA: models are of PyTorch.
        benchmarks -> callbacks: `[Preview(options)]`, or an evaluation set
        preview_prompts generation_prompts generation_interval generation_config -> callbacks: PREVIEW
        generation_max_new_tokens generation_temperature generation_top_p generation_top_k -> callbacks: PREVIEW
        generation_do_sample generation_num_prompts generation_extra_kwargs -> callbacks: PREVIEW
        generation_log_to_wandb generation_use_train_prompts generation_dataset_prompt_field -> callbacks: PREVIEW
        generation_preview_print generation_shard_inputs use_esurge_generation -> callbacks: PREVIEW
    """,
    "Loops by hand": """
        lr=learning_rate wd=weight_decay bs=batch_size num_steps=max_steps steps=max_steps total_steps=max_steps
        n_epochs=epochs epoch=epochs grad_clip=max_grad_norm clip_grad_norm=max_grad_norm
        gradient_clipping=max_grad_norm gradient_clip=max_grad_norm accumulation_steps=gradient_accumulation_steps
        grad_accum_steps=gradient_accumulation_steps gradient_accumulation=gradient_accumulation_steps net=model
        train_set=train_dataset train_data=train_dataset training_data=train_dataset train=train_dataset
        val_dataset=eval_dataset valid_dataset=eval_dataset validation_dataset=eval_dataset val_data=eval_dataset
        val_loader=eval_loader valid_loader=eval_loader val_dataloader=eval_loader test_dataloader=test_loader
        collate_fn=data_collator float32_matmul_precision=matmul_precision log_interval=log_steps log_dir=save_dir
        log_every=log_steps eval_every=eval_steps save_every=save_steps save_path=save_dir checkpoint_dir=save_dir
        ckpt_dir=save_dir random_seed=seed random_state=seed warmup=warmup_steps num_warmup_steps=warmup_steps
        parameter_groups=param_groups early_stopping=patience early_stopping_rounds=patience init_checkpoint=init_from
        weights=init_from
        criterion loss_function -> loss_fn: called as `loss_fn(outputs, labels)`
        sampler batch_sampler -> none: LOADER
        scaler -> none: autocast='fp16' makes one; replace `trainer.scaler` before train().
        amp use_amp -> autocast: "fp16" or "bf16"
        half -> autocast: "fp16"
        allow_tf32 -> matmul_precision: "high"
        gpus n_gpus num_gpus num_processes local_rank world_size ddp -> none: LAUNCH
        resume resume_from -> none: RESUME
        warmup_epochs -> warmup_steps: "2ep"
        momentum betas eps -> optimizer_kwargs: OPTIONS
        layer_decay llrd -> param_groups: `layerwise_decay(model, 0.75)`
        no_decay -> param_groups: `[{'match': 'bias|norm', 'weight_decay': 0.0}]`
        frozen_layers freeze_layers -> freeze: regular expressions of parameters' names
        gamma milestones step_size min_lr -> none: SCHEDULE
        higher_is_better -> optimization_direction: "max" or "min"
        callback -> callbacks: a list
        hooks -> callbacks: instances of `Callback`
        wandb -> loggers: "wandb"
        tensorboard -> loggers: "tensorboard"
        ema -> algorithms: `[EMA()]`
        config -> none: ONE_BY_ONE
        pretrained -> init_from: a path; a model of the Hub is loaded by `from_pretrained`
        num_labels -> none: MODEL
    """,
}


def _read_table(table: str) -> dict[str, Meaning]:
    names: dict[str, Meaning] = {}
    for line in table.strip().splitlines():
        theirs, arrow, meaning = line.strip().partition(" -> ")
        if arrow:
            ours, _, word = meaning.partition(": ")
            names |= dict.fromkeys(theirs.split(), Meaning("" if ours == "none" else ours, _SHARED.get(word, word)))
        else:
            names |= {name: Meaning(ours) for name, ours in (pair.split("=") for pair in theirs.split())}
    return names


VOCABULARY: dict[str, dict[str, Meaning]] = {source: _read_table(table) for source, table in _TABLES.items()}


def advice(name: str, known: list[str]) -> str:
    """Return what to write for an argument of another trainer, as a sentence after a space; "" if it is unknown.

    Args:
        name: The argument.
        known: The arguments that the trainer has.
    """
    for names in VOCABULARY.values():
        meaning = names.get(name)
        if meaning is None:
            continue
        if not meaning.ours:
            return f" There is none: {meaning.word}"
        kind, _, argument = meaning.ours.rpartition(".")
        if kind and argument in known:
            kind = ""
        if not kind and argument not in known and not argument.endswith("()"):
            return ""  # this trainer has its own advice
        where = f"an argument of {kind}: `{argument}`" if kind else f"`{argument}`"
        return f" Here it is {where}{f' ({word})' if (word := meaning.word.rstrip('.')) else ''}."
    return ""


def format_tables() -> str:
    """Return the names as the tables of a page of Markdown."""
    parts = []
    for source, names in VOCABULARY.items():
        rows = [f"| `{name}` | {_cell(meaning)} |" for name, meaning in sorted(names.items())]
        parts.append("\n".join([f"## {source}", "", "| there | here |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _cell(meaning: Meaning) -> str:
    kind, _, argument = meaning.ours.rpartition(".")
    if not argument:
        return f"none. {meaning.word}"
    return f"`{argument}`" + (f" of `{kind}`" if kind else "") + (f": {meaning.word}" if meaning.word else "")
