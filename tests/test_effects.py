"""Each argument of what is public, and each option of the command, with a test that fails if it does nothing.

A new argument needs a line in the table; `test_arguments_have_tests` names those that have none. Arguments that all
trainers share stand once, under BaseTrainer.
"""

from __future__ import annotations

import argparse
import functools
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
    "algorithms/test_arguments.py::test_arguments_are_validated":
        "GradientClipping(kind limit) LabelSmoothing(num_classes) LayerFreezing(layers) MagnitudePruning(sparsity "
        "start initial match scope) SWA(every) StochasticDepth(layers drop_rate distribution) "
        "StraightThrough(function match)",
    "algorithms/test_mixup.py::test_cutmix_mixes_labels_by_the_area_of_the_box": "CutMix(num_classes)",
    "algorithms/test_mixup.py::test_label_smoothing_equals_torch": "LabelSmoothing(smoothing)",
    "algorithms/test_mixup.py::test_mixup_mixes_inputs_and_labels_by_the_same_share":
        "CutMix(alpha) MixUp(num_classes alpha)",
    "algorithms/test_pruning.py::test_pruned_weights_grow_by_the_cube_and_stay_zero": "MagnitudePruning(every)",
    "algorithms/test_pruning.py::test_pruning_equals_a_loop_with_masks": "MagnitudePruning(end)",
    "algorithms/test_updates.py::test_gradients_are_clipped_by_value_or_adaptively": "GradientClipping(exclude)",
    "algorithms/test_updates.py::test_images_grow_to_their_full_size":
        "ProgressiveResizing(initial_scale delay finetune size_increment)",
    "algorithms/test_updates.py::test_layers_are_frozen_and_unfrozen_by_progress":
        "GradualUnfreezing(until layers) LayerFreezing(freeze_start freeze_level)",
    "algorithms/test_updates.py::test_sam_equals_a_loop_by_hand": "SAM(rho)",
    "algorithms/test_updates.py::test_sequence_warmup_is_the_mean_over_remaining_labels":
        "SeqLengthWarmup(max_length duration)",
    "callbacks/test_arguments.py::test_arguments_are_validated":
        "GarbageCollection(every generation) HookCallback(hooks) MemoryMonitor(folder) Periodic(function every) "
        "Preview(prompts every) Tracking(tracker) Throughput(window)",
    "callbacks/test_distributions.py::test_activations_that_are_zero_in_a_full_step_are_dead":
        "Distributions(of modules)",
    "callbacks/test_distributions.py::test_distributions_are_checked_and_omitted_on_the_console":
        "Distributions(match)",
    "callbacks/test_distributions.py::test_statistics_and_histograms_equal_numpy": "Distributions(every bins)",
    "callbacks/test_early_stopping.py::test_stopper_gets_step_and_score_and_ends_the_run": "BaseTrainer(early_stopper)",
    "callbacks/test_early_stopping.py::test_stopper_state_is_restored_by_a_resume": "EarlyStopping(stopper)",
    "callbacks/test_memory_monitor.py::test_memory_on_a_cpu_is_that_of_the_process": "MemoryMonitor(snapshot)",
    "callbacks/test_periodic.py::test_main_only_is_rejected_with_sharded_weights": "Periodic(main_only)",
    "callbacks/test_periodic.py::test_periodic_errors_are_handled_by_on_error": "Periodic(on_error) Preview(on_error)",
    "callbacks/test_periodic.py::test_periodic_work_changes_no_weights": "Preview(function)",
    "callbacks/test_periodic.py::test_preview_texts_are_those_of_generate":
        "Preview(max_new_tokens processing_class timeout generate_options)",
    "callbacks/test_periodic.py::test_timeout_ends_a_generator_and_fails_a_function": "Periodic(timeout)",
    "callbacks/test_profiler.py::test_profiler_notes_what_is_asked_for":
        "Profiler(warmup folder record_shapes profile_memory with_stack)",
    "callbacks/test_profiler.py::test_run_shorter_than_the_schedule_warns": "Profiler(active)",
    "callbacks/test_profiler.py::test_traces_have_the_steps_of_the_schedule": "Profiler(wait repeat rows)",
    "callbacks/test_throughput.py::test_recomputed_activations_count_for_hfu_only": "Throughput(peak)",
    "callbacks/test_throughput.py::test_unknown_flops_and_peaks_are_logged_and_are_arguments": "Throughput(flops)",
    "checkpoint/test_failing_disk.py::test_disk_fault_at_operation_does_not_end_the_run":
        "BaseTrainer.save_metrics(metrics)",
    "checkpoint/test_frozen_weights.py::test_save_frozen_false_resumes_exactly": "BaseTrainer(save_frozen)",
    "checkpoint/test_initial_weights.py::test_init_from_loads_once_on_every_trainer": "BaseTrainer(init_from)",
    "checkpoint/test_remote.py::test_save_dir_address_is_validated_by_the_constructor":
        "BaseTrainer.load_checkpoint(path)",
    "checkpoint/test_remote.py::test_upload_failure_ends_a_run_with_save_required": "BaseTrainer(save_required)",
    "checkpoint/test_resume.py::test_allowed_change_of_algorithms_matches_states": "BaseTrainer.train(allow_change)",
    "checkpoint/test_resume.py::test_checkpoints_need_a_folder":
        "BaseTrainer(save_only_model) BaseTrainer.train(resume_from)",
    "checkpoint/test_resume.py::test_keep_best_and_keep_every_add_checkpoints":
        "BaseTrainer(save_total_limit keep_every)",
    "checkpoint/test_untrusted.py::test_run_writes_nothing_through_a_linked_folder":
        "BaseTrainer(loggers) Profiler(skip)",
    "cli/test_compare.py::test_compare_marks_best_of_each_metric": "compare_runs(runs)",
    "cli/test_config.py::test_train_words_override_file": "BaseTrainer(overwrite)",
    "compute/test_activation_checkpointing.py::test_checkpointing_by_training_arguments":
        "AccelerateTrainer(fsdp_plugin)",
    "compute/test_activation_checkpointing.py::test_checkpointing_rejects_model_without_blocks":
        "BaseTrainer(gradient_checkpointing)",
    "compute/test_precision.py::test_device_that_cannot_be_used_is_an_error": "BaseTrainer(device)",
    "config/test_configuration.py::test_callbacks_algorithms_and_loggers_by_name": "TensorBoardLogger(log_dir)",
    "config/test_configuration.py::test_files_are_not_modified": "Config(tree)",
    "config/test_configuration.py::test_foreign_code_needs_trust": "Config(trust)",
    "config/test_configuration.py::test_parts_are_seeded_and_preserve_rng_state": "instantiate(seed)",
    "config/test_configuration.py::test_texts_stay_texts_where_admitted": "instantiate(init_args)",
    "config/test_round_trip.py::test_samples_constructors_and_secrets_are_not_written": "instantiate(class_path)",
    "contrib/test_nnscaler.py::test_convert_and_train_every_section": "BaseTrainer(dtypes)",
    "core/test_duration.py::test_duration_rejects_fractions_of_whole_units": "Duration(unit)",
    "core/test_metric_format.py::test_describe_metric_sets_title_unit_format_and_place":
        "MetricDescriptor(title unit format order) describe_metric(name)",
    "core/test_metric_format.py::test_metric_brings_descriptor": "describe_metric(descriptor)",
    "core/test_metric_format.py::test_plot_panels_and_direction_follow_descriptors":
        "MetricDescriptor(higher_is_better)",
    "core/test_objective.py::test_direction_precedence": "Objective(direction)",
    "core/test_objective.py::test_objective_equals_naive_model": "BaseTrainer(delta) Objective(delta)",
    "data/test_collation.py::test_padding_equals_padding_by_hand": "Collator(truncation_side padding_side)",
    "data/test_collation.py::test_padding_may_differ_by_key": "Collator(pad_value pad_values)",
    "data/test_grouping.py::test_data_that_cannot_be_grouped_are_an_error": "GroupByLength(pool)",
    "data/test_grouping.py::test_groups_save_padding_and_differ_from_epoch_to_epoch": "GroupByLength(group_size)",
    "data/test_grouping.py::test_lengths_are_found_passed_or_computed": "GroupByLength(lengths)",
    "data/test_packing.py::test_data_that_cannot_be_packed_are_an_error":
        "PackedDataset(length lengths overlong tokens pad_values)",
    "data/test_packing.py::test_error_reports_the_row_and_its_samples": "PackedDataset(dataset)",
    "data/test_packing.py::test_resume_with_other_rows_is_an_error": "PackedDataset(borders)",
    "data/test_packing.py::test_row_has_positions_borders_labels_and_padding": "PackedDataset(shift)",
    "data/test_sampling.py::test_fetch_of_tensors_is_cut_to_the_maximum_length": "Collator(max_length)",
    "data/test_shards.py::test_rank_reads_its_shards_only": "ShardedStream(shards)",
    "data/test_shards.py::test_shards_of_hf_streams_are_all_read_once": "ShardedStream(count)",
    "data/test_workers.py::test_programs_of_a_dataset_receive_signals": "BaseTrainer(num_workers)",
    "distributed/test_sharded_saves.py::test_async_saves_write_the_files_of_other_saves": "BaseTrainer(consolidate)",
    "distributed/test_standstill.py::test_stalled_rank_is_reported_and_ends_the_run": "BaseTrainer(timeout)",
    "hf/test_arguments.py::test_arguments_of_ours_override_defaults":
        "BaseTrainer(batch_size warmup_steps max_grad_norm deterministic)",
    "hf/test_arguments.py::test_contradictions_report_both_values":
        "BaseTrainer(pin_memory async_save microbatch_size) HFTrainer(optimizers)",
    "hf/test_arguments.py::test_equal_values_on_both_sides_are_accepted": "HFTrainingArguments(args)",
    "hf/test_arguments.py::test_eval_strategy_no_leaves_our_eval_steps": "BaseTrainer(eval_steps)",
    "hf/test_arguments.py::test_direction_is_that_of_the_metric":
        "BaseTrainer(optimization_metric) Objective(metric)",
    "hf/test_arguments.py::test_trainer_needs_no_training_arguments": "BaseTrainer(save_dir seed)",
    "hf/test_batch_size.py::test_callbacks_get_each_event_once": "BaseTrainer(callbacks)",
    "hf/test_callbacks.py::test_callbacks_get_loaders_of_the_data": "BaseTrainer(train_loader)",
    "hf/test_callbacks.py::test_events_of_a_run_are_those_of_a_stock_trainer": "BaseTrainer(keep_best)",
    "hf/test_calls.py::test_added_early_stopping_stops_a_run": "BaseTrainer.stop(reason)",
    "hf/test_calls.py::test_compute_loss_keeps_the_metrics_of_a_pass": "HFTrainer(args) StepOutput(metrics)",
    "hf/test_calls.py::test_compute_metrics_may_be_set_after_the_constructor": "BaseTrainer(compute_metrics)",
    "hf/test_calls.py::test_constructor_takes_positions_in_either_order": "BaseTrainer(train_dataset data_collator)",
    "hf/test_calls.py::test_evaluate_of_a_subclass_is_part_of_the_run": "BaseTrainer(optimization_direction)",
    "hf/test_calls.py::test_optimizer_may_be_a_class_with_options": "HFTrainer(optimizer_cls_and_kwargs)",
    "hf/test_evaluation.py::test_losses_of_a_unit_that_sums_are_means": "BaseTrainer(unit)",
    "hf/test_search.py::test_model_init_makes_a_new_model_for_each_run": "HFTrainer(model_init)",
    "hf/test_trainer.py::test_compute_loss_func_is_called_with_outputs_and_labels": "HFTrainer(compute_loss_func)",
    "hf/test_trainer.py::test_engine_class_takes_the_steps": "BaseTrainer(epochs)",
    "hf/test_trainer.py::test_evaluate_leaves_the_random_generators_unchanged": "BaseTrainer(eval_dataset)",
    "hf/test_trainer.py::test_options_act_as_in_the_native_trainer": "BaseTrainer(scheduler_interval)",
    "hf/test_trainer.py::test_stock_trainer_resumes_from_a_run_without_arguments":
        "BaseTrainer(save_steps) HFTrainer(stock_checkpoints)",
    "loggers/test_progress_bar.py::test_bar_is_drawn_into_a_file_if_enabled": "ProgressBar(enabled stream)",
    "loggers/test_progress_bar.py::test_plain_lines_are_one_per_log_and_evaluation": "BaseTrainer(progress_bar)",
    "loggers/test_rows.py::test_fresh_run_empties_the_file": "CsvLogger(filename)",
    "loggers/test_rows.py::test_full_disk_does_not_end_the_run": "JsonlLogger(filename)",
    "loggers/test_summary.py::test_progress_bar_in_callbacks_replaces_the_default_one": "ProgressBar(every)",
    "loggers/test_tracking.py::test_jsonl_logger_replaces_the_default_one": "CsvLogger(every) JsonlLogger(every)",
    "loggers/test_tracking.py::test_loggers_by_name_and_as_objects_get_the_same_rows": "TensorBoardLogger(every)",
    "loggers/test_tracking.py::test_mlflow_run_is_resumed_with_each_step_once": "BaseTrainer(trial_name)",
    "loggers/test_tracking.py::test_report_to_and_loggers_must_not_overlap": "HFTrainingArguments(kwargs)",
    "loggers/test_tracking.py::test_tracker_by_name_gets_the_project_and_options": "Tracking(project options)",
    "loggers/test_tracking.py::test_tracking_every_omits_rows_also_after_a_resume": "Tracking(every)",
    "loggers/test_wandb.py::test_fresh_run_has_the_arguments_of_the_user": "WandbLogger(project every init_kwargs)",
    "model/test_losses.py::test_chunked_cross_entropy_equals_full":
        "chunked_cross_entropy(labels bias label_smoothing chunk_size)",
    "model/test_losses.py::test_chunked_cross_entropy_without_labels": "chunked_cross_entropy(hidden weight)",
    "model/test_losses.py::test_cross_entropy_equals_pytorch": "CrossEntropy(ignore_index)",
    "model/test_losses.py::test_cross_entropy_ignores_labels_of_one_dimension": "chunked_cross_entropy(ignore_index)",
    "model/test_losses.py::test_cross_entropy_shift": "CrossEntropy(shift)",
    "model/test_losses.py::test_losses_reject_wrong_values": "chunked_cross_entropy(z_loss)",
    "model/test_losses.py::test_resume_reports_other_loss":
        "BaseTrainer(loss_fn) CrossEntropy(weight label_smoothing z_loss)",
    "model/test_losses.py::test_weighted_losses_are_summed_and_logged": "WeightedLosses(losses weights)",
    "model/test_multitask.py::test_multitask_loss_is_weighted_mean":
        "MultiTask(epoch_size) MultiTaskUnit(model weights)",
    "model/test_multitask.py::test_multitask_rejects_wrong_arguments": "MultiTaskUnit(losses)",
    "model/test_multitask.py::test_multitask_samples_each_task_by_share": "MultiTask(mixing)",
    "model/test_multitask.py::test_multitask_shares_by_temperature_and_dict": "MultiTask(tasks temperature)",
    "model/test_units.py::test_unit_evaluate_runs_without_gradients": "StepOutput(outputs)",
    "model/test_units.py::test_unit_passes_every_key_to_kwargs": "ModelUnit(loss_fn)",
    "model/test_units.py::test_unit_returns_mean_or_sum": "StepOutput(labels num_targets)",
    "model/test_units.py::test_zero_grad_loss_keeps_graph": "ModelUnit(model) StepOutput(loss)",
    "optim/test_muon.py::test_muon_trains_transformers_model": "BaseTrainer(max_steps)",
    "optim/test_param_groups.py::test_layer_wise_decay_lowers_rates": "layerwise_decay(model decay)",
    "optim/test_param_groups.py::test_param_groups_equal_groups_by_hand_and_resume":
        "BaseTrainer(weight_decay param_groups freeze)",
    "optim/test_schedules.py::test_preview_equals_run":
        "BaseTrainer(lr_scheduler) preview_schedule(lr_scheduler_kwargs epochs max_steps learning_rate "
        "steps_per_epoch)",
    "optim/test_schedules.py::test_preview_takes_pace":
        "preview_schedule(schedule max_duration warmup_steps tokens_per_step samples_per_step seconds_per_step rows)",
    "optim/test_schedules.py::test_schedule_arguments_change_the_rates":
        "Schedule(warmup min_lr min_lr_rate scale_ratio) Scheduler(warmup min_lr min_lr_rate scale_ratio t_max "
        "num_cycles power step_size gamma milestones decay_period timescale decay kind)",
    "optim/test_schedules.py::test_schedule_options_are_compared_on_resume": "BaseTrainer(lr_scheduler_kwargs)",
    "optim/test_schedules.py::test_schedule_rejects_least_share_of_a_constant_rate":
        "ConstantScheduler(min_lr_rate) ProductScheduler(schedules warmup min_lr min_lr_rate scale_ratio)",
    "sweeps/test_search.py::test_search_depends_on_seed": "search(seed)",
    "sweeps/test_search.py::test_search_grid_tries_every_combination": "search(sampler)",
    "sweeps/test_search.py::test_search_prunes_worse_trials": "search(pruner)",
    "sweeps/test_search.py::test_search_rejects_wrong_arguments": "search(make_trainer space direction)",
    "sweeps/test_search.py::test_search_takes_functions_and_optuna_samplers": "search(trials)",
    "sweeps/test_search.py::test_search_without_optuna_or_complete_trial": "search(save_dir)",
    "test_arguments.py::test_hf_trainer_rejects_ambiguous_arguments": "HFTrainer(training_args)",
    "test_arguments.py::test_settings_reject_conflict_with_accelerator":
        "AccelerateTrainer(parallelism_config accelerator find_unused_parameters)",
    "test_arguments.py::test_settings_reject_wrong_values": "BaseTrainer(prefetch_factor)",
    "test_arguments.py::test_settings_take_accumulation_of_accelerator": "BaseTrainer(global_batch_size)",
    "test_parity.py::test_algorithms_change_labels_by_label_names": "BaseTrainer(label_names)",
    "test_parity.py::test_data_that_end_before_their_length_are_an_error": "GroupByLength(dataset)",
    "test_parity.py::test_drop_last_avoids_a_batch_of_one_for_batch_norm": "BaseTrainer(drop_last)",
    "test_parity.py::test_events_come_in_the_documented_order": "BaseTrainer(eval_on_start)",
    "test_parity.py::test_events_repeat_with_their_micro_batches":
        "BaseTrainer(gradient_accumulation_steps on_nonfinite)",
    "test_parity.py::test_loss_scale_below_its_minimum_ends_the_run": "BaseTrainer(autocast fp16_loss_scale)",
    "test_parity.py::test_matmul_precision_holds_during_the_run_only": "BaseTrainer(matmul_precision)",
    "test_parity.py::test_metrics_have_a_row_per_epoch_and_evaluation": "BaseTrainer(load_best_at_end)",
    "test_parity.py::test_mistakes_raise_errors_with_the_remedy": "Duration(value)",
    "test_parity.py::test_named_metrics_of_a_skipped_step_are_undone": "BaseTrainer(log_steps)",
    "test_parity.py::test_patience_counts_evaluations_without_a_gain": "BaseTrainer(patience)",
    "test_parity.py::test_resume_rejects_other_options_of_algorithms": "EMA(decay)",
    "test_parity.py::test_run_without_save_dir_ends_on_its_best_or_last_weights": "BaseTrainer.test(dataset)",
    "test_parity.py::test_save_dir_stays_when_the_program_changes_folder": "BaseTrainer.save_model(path)",
    "test_parity.py::test_schedule_on_samples_continues_in_skipped_steps": "BaseTrainer(max_duration)",
    "test_parity.py::test_setup_ends_with_the_native_bits": "BaseTrainer(model)",
    "test_parity.py::test_setup_gives_the_same_numbers_in_every_split": "SeqLengthWarmup(min_length step_size)",
    "test_parity.py::test_setup_resumes_bit_for_bit": "SWA(start)",
    "test_parity.py::test_skipped_window_without_a_label_changes_nothing": "BaseTrainer(shuffle)",
    "trainer/test_auto_microbatch.py::test_microbatch_size_equals_gradient_accumulation":
        "BaseTrainer.save_metrics(split)",
    "trainer/test_base.py::test_loss_of_sums_is_a_mean_over_samples": "BaseTrainer(grad_reduction)",
    "trainer/test_base.py::test_preprocessed_logits_reach_metrics_and_predictions":
        "BaseTrainer(preprocess_logits_for_metrics)",
    "trainer/test_base.py::test_processing_class_without_padding_is_only_saved": "BaseTrainer(processing_class)",
    "trainer/test_closures.py::test_unsupported_options_are_an_error": "BaseTrainer(optimizer algorithms)",
    "trainer/test_compilation.py::test_compile_restores_the_state_of_data": "BaseTrainer.compile(steps)",
    "trainer/test_compilation.py::test_compiled_run_equals_plain": "BaseTrainer(compile)",
    "trainer/test_copies.py::test_copy_of_model_init_has_the_trained_weights": "BaseTrainer(learning_rate)",
    "trainer/test_detection.py::test_metric_objects_get_lists_of_dicts": "Objective(higher_is_better)",
    "trainer/test_eval_sets.py::test_interval_of_a_set_selects_evaluations": "EvalSet(every)",
    "trainer/test_eval_sets.py::test_means_over_sets_are_weighted": "BaseTrainer(eval_loader) EvalSet(metrics weight)",
    "trainer/test_eval_sets.py::test_sets_have_their_own_unit": "EvalSet(unit)",
    "trainer/test_eval_sets.py::test_subset_is_the_first_samples": "EvalSet(data)",
    "trainer/test_evaluation.py::test_evaluate_takes_datasets_loaders_and_tensors":
        "BaseTrainer.evaluate(dataset prefix) BaseTrainer.predict(dataset)",
    "trainer/test_evaluation.py::test_evaluation_without_end_warns_within_seconds": "EvalSet(subset)",
    "trainer/test_evaluation.py::test_label_names_choose_the_labels": "ModelUnit(label_names)",
    "trainer/test_evaluation.py::test_loss_is_the_mean_over_labels_for_any_batch_size": "BaseTrainer(eval_batch_size)",
    "trainer/test_evaluation.py::test_metrics_of_functions_names_and_units_agree": "StepOutput(extra)",
    "trainer/test_evaluation.py::test_predict_needs_no_labels_and_pads_ragged_outputs": "Collator(label_names)",
    "trainer/test_evaluation.py::test_rehearsal_raises_errors_before_the_first_step": "BaseTrainer(sanity)",
    "trainer/test_evaluation.py::test_test_uses_the_test_loader_or_dataset": "BaseTrainer(test_loader test_dataset)",
    "trainer/test_finite.py::test_detect_anomaly_names_the_operation_of_a_nan": "BaseTrainer(detect_anomaly)",
    "trainer/test_more.py::test_more_restarts_patience_after_early_stopping":
        "EarlyStopping(patience) BaseTrainer.train(more)",
    "trainer/test_native.py::test_save_model_writes_weights_and_replaces_none": "BaseTrainer.save_model(overwrite)",
    "trainer/test_optimizer_modes.py::test_optimizer_modes_are_an_error_with_zero":
        "AccelerateTrainer(deepspeed_config)",
}  # fmt: skip
"""The arguments that each test covers; those of `Scheduler` are those of all classes so called."""
OPTIONS: dict[str, str] = {
    "checkpoint/test_merge_adapters.py::test_merge_one_of_several_adapters": "checkpoint export(--adapter)",
    "checkpoint/test_merge_adapters.py::test_merge_with_the_base_in_the_checkpoint": "checkpoint export(--merge)",
    "cli/test_compare.py::test_compare_plots_panel_per_value": "compare(--png)",
    "cli/test_config.py::test_sweep_passes_sampler_and_pruner_to_search": "sweep(--sampler --pruner)",
    "cli/test_config.py::test_sweep_rejects_wrong_words": "sweep(--trials)",
    "cli/test_config.py::test_sweep_tries_every_value": "sweep(--save_dir)",
    "cli/test_config.py::test_train_finds_files_anywhere": "train(--print_config)",
    "cli/test_config.py::test_train_reports_missing_remote_run": "train(--resume)",
    "cli/test_launch.py::test_command_of_machines_and_modules": "launch(--nnodes --rdzv-endpoint -m)",
    "cli/test_launch.py::test_launch_reads_options": "launch(-n --fsdp --zero --cpu)",
    "cli/test_main.py::test_cli_passes_words_to_demo": "demo(--trainer --data --out)",
    "cli/test_main.py::test_cli_prints_and_draws_schedule": "schedule(--steps-per-epoch --rows --plot)",
    "cli/test_main.py::test_cli_rejects_wrong_schedule": "schedule(--epochs --max-steps --max-duration --warmup)",
    "cli/test_main.py::test_cli_schedule_takes_pace_and_rate":
        "schedule(--learning-rate --samples-per-step --tokens-per-step --seconds-per-step)",
    "config/test_configuration.py::test_foreign_code_needs_trust":
        "train(--trust) sweep(--trust) config check(--trust)",
    "distributed/test_launching.py::test_torchrun_restarts_a_killed_worker_exactly": "launch(--max-restarts)",
}  # fmt: skip
"""The options of commands that each test covers."""


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
    """Return (class or command, argument, test)."""
    return [
        (owner, name, test)
        for test, text in table.items()
        for owner, names in re.findall(r"(\w[\w. ]*)\(([^)]*)\)", text)
        for name in names.split()
    ]


def test_arguments_have_tests() -> None:
    rows = [(owner, name) for owner, name, _ in [*flat(ARGUMENTS), *flat(OPTIONS)]]
    assert len({*rows}) == len(rows)
    public = public_arguments() | {*options_of(main._parser())}
    is_shared = {row: row[0].endswith("Scheduler") and row not in rows for row in public}
    assert {*rows} == {("Scheduler", row[1]) if is_shared[row] else row for row in public}


@functools.cache
def text_of(file: str) -> str:
    return (TESTS / file).read_text(encoding="utf-8")


def test_tests_of_arguments_exist_and_use_them() -> None:
    """The file has the argument's name, or that of what takes it, as arguments may be given by position."""
    missing = []
    for owner, name, test in [*flat(ARGUMENTS), *flat(OPTIONS)]:
        file, _, function = test.partition("::")
        words = [name] if owner == "BaseTrainer" or name.startswith("-") else [name, owner.rpartition(".")[2]]
        uses = any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text_of(file)) for word in words)
        if not uses or f"\ndef {function}(" not in text_of(file):
            missing.append((owner, name, test))
    assert not missing
