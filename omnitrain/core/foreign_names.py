"""Names that users of other trainers type, and their equivalents.

Errors about these methods, attributes, imports and arguments of calls say what they are called here. The trainers' own
arguments are in `argument_aliases.py`; `make signatures` writes `docs/names.md` from both.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def _read(table: str) -> dict[str, str]:
    """Return the remedy of each name: names, an arrow and their remedy, which may go on in lines without an arrow."""
    remedies: dict[str, str] = {}
    for entry in re.split(r"\n(?=.* ->(?: |\n))", table.strip()):
        names, _, remedy = entry.partition(" ->")
        remedies |= dict.fromkeys(names.split(), " ".join(remedy.split()))
    return remedies


ATTRIBUTES: dict[str, str] = _read("""
    fit fit_loop learn run -> Call `train()`.
    validate eval val -> Call `evaluate()`, or `evaluate(dataset)`.
    resume restore -> Call `train(resume_from="last")`, or `train(more=1)` after a run that is done.
    score -> Call `evaluate(dataset)`, with `compute_metrics=["accuracy"]` in the constructor.
    predict_proba -> Call `predict(dataset)`: its `predictions` are logits, for `scipy.special.softmax(..., axis=-1)`.
    state -> `progress` has counters and position, `metrics` the history, `stop_reason` why a run ended.
    global_step step num_updates timestamp -> `progress.step` counts updates, `progress.samples` samples.
    current_epoch epoch iteration batch_idx -> `progress.epoch` counts whole epochs, `progress.epochs` is a float.
    num_epochs max_epochs num_train_epochs max_duration_epochs -> It is `epochs`.
    num_training_steps estimated_stepping_batches num_update_steps max_train_steps -> It is `total_steps`.
    history history_ metrics_history log_history callback_metrics logged_metrics progress_bar_metrics -> `metrics` has
        the results of all evaluations and epochs; rows of logs go to loggers and to metrics.jsonl in `save_dir`.
    eval_loss train_loss best_metric best_score best_loss best_model_score -> It is in `metrics`, as in
        `metrics["best_valid"]`.
    best_model_path best_model_checkpoint best_checkpoint -> The file `best` in `save_dir` names it;
        `load_checkpoint("best")` loads it.
    best_model -> `model` is the best at the end of a run with an evaluation set: `load_best_at_end`.
    log log_dict log_metric log_metrics add_scalar report -> What a callback's `log_values` returns is added to rows of
        logs, and means over steps of what a forward pass returns as "metrics".
    logger loggers writer tb wandb -> Pass `loggers=["tensorboard", "wandb"]` to the constructor.
    summary print_summary -> The first lines of a run name the model, its parameters and the settings.
    add_callback register_callback add_callbacks -> Pass `callbacks=[...]` to the constructor.
    remove_callback pop_callback callback_handler -> Make a trainer without the callback: `callbacks=[...]`.
    early_stopping_callback -> Pass `patience` or `early_stopper` to the constructor.
    checkpoint_callback checkpoint_saver ckpt_path -> `save_dir`, `save_steps` and `keep_best` save checkpoints.
    should_stop stop_training should_training_stop interrupted -> Call `stop()` to end a run; `stop_reason` says why it
        ended.
    args hparams hyperparameters -> `config` has the arguments, `settings` their values.
    accelerator fabric strategy -> It is an attribute of `AccelerateTrainer`; `backend` places the model.
    is_world_process_zero is_global_zero is_main is_rank_zero -> It is `is_main_process`.
    is_local_process_zero is_local_zero local_rank -> `int(os.environ.get("LOCAL_RANK", 0))`; `is_main_process` is for
        what happens once.
    global_rank process_index -> It is `rank`.
    num_processes num_devices n_gpu -> It is `world_size`.
    lr current_lr get_lr get_last_lr get_learning_rates learning_rates -> `optimizer.param_groups[0]["lr"]`; rows of
        logs have it as `learning_rate`.
    lr_schedulers scheduler schedulers lr_scheduler_configs -> It is `lr_scheduler`.
    module lightning_module net network module_ -> It is `model`.
    unwrap_model unwrapped_model -> Call `get_model()`.
    train_dataloader get_train_dataloader -> It is `train_loader`.
    val_dataloader val_dataloaders eval_dataloader get_eval_dataloader valid_loader val_loader -> It is `eval_loader`.
    test_dataloader test_dataloaders get_test_dataloader -> It is `test_loader`.
    dataset data data_module datamodule -> They are `train_dataset`, `eval_dataset` and `test_dataset`.
    to_onnx to_torchscript export_for_inference -> Call `export("model.pt2")`, or `export("model.onnx")`.
    save save_pretrained -> Call `save_model(folder)` for the model, `save_checkpoint()` for the
        run.
    load load_model load_weights -> Call `load_checkpoint(path)`; `init_from` of the constructor takes weights alone.
    state_dict load_state_dict save_state -> Call `save_checkpoint()` and `load_checkpoint(path)`; the weights are
        those of `model.state_dict()`.
    close finish teardown shutdown -> Nothing is to be closed: `train()` leaves all in order, also after an error.
    hyperparameter_search tune tuner lr_find scale_batch_size -> `search` of omnitrain runs trials;
        `microbatch_size="auto"` finds what fits into memory.
    push_to_hub create_model_card init_hf_repo -> HFTrainer has it; `save_model(folder)` writes what is to be uploaded.
    training_step train_step compute_loss forward_step -> Write a `TrainUnit`, or override `_forward`: see "Extending".
    validation_step eval_step test_step prediction_step predict_step evaluation_loop -> Write an `EvalUnit`: see
        "Extending".
    on_train_epoch_end on_validation_epoch_end on_fit_start on_fit_end -> Write a `Callback`; its events have the names
        of `Event`.
    configure_optimizers create_optimizer create_scheduler -> Pass `optimizer` and `lr_scheduler` to the constructor.
    tokenizer feature_extractor image_processor -> It is `processing_class`.
    is_fsdp_enabled is_deepspeed_enabled -> `backend.sharding` is "FSDP", "DEEPSPEED" or empty.
    backward manual_backward clip_gradients optimizer_step zero_grad -> The loop does it; `_train_step` can be
        overridden: see "Extending".
    to cuda cpu -> The trainer puts the model in place: `device="cuda"` in the constructor.
    engine hf_device_map model_accepts_loss_kwargs -> It is of HFTrainer.
""")
"""Methods and attributes of other trainers."""

IMPORTS: dict[str, str] = _read("""
    TrainingArguments Seq2SeqTrainingArguments SFTConfig DPOConfig TrainerConfig -> Pass the arguments one by one,
        `Trainer(model, data, epochs=3)`; HFTrainer also takes those of `transformers`.
    ModelCheckpoint CheckpointSaver Checkpoint CheckpointCallback -> `save_dir`, `save_steps`, `save_total_limit` and
        `keep_best` of a trainer save checkpoints.
    EarlyStoppingCallback EarlyStopper -> `patience` of a trainer, or `EarlyStopping` in `callbacks`.
    seed_everything set_seed manual_seed -> `seed` of a trainer seeds training and data; before the model is made, call
        `torch.manual_seed`.
    LightningModule ComposerModel HuggingFaceModel NeuralNet NeuralNetClassifier Model -> A trainer takes any
        `torch.nn.Module`; `loss_fn`, or a `TrainUnit`, says what its loss is.
    LightningDataModule DataModule DataSpec DataReader ShardedDataset -> Pass datasets, or loaders as `train_loader` and
        `eval_loader`.
    Time TimeUnit -> It is `Duration`: "10ep", "500ba", "3e6tok", "2h30m".
    Evaluator -> It is `EvalSet`.
    TrainerCallback LambdaCallback Hook -> It is `Callback`; `HookCallback` takes functions.
    LearningRateMonitor LRMonitor -> Rows of logs have the learning rate.
    RichProgressBar TQDMProgressBar ProgressBarLogger -> It is `ProgressBar`; a trainer has one by default.
    CSVLogger -> It is `CsvLogger`, or `loggers=["csv"]`.
    WandBLogger WandbCallback TensorBoardCallback MLFlowLogger CometLogger -> Pass `loggers=["wandb", "tensorboard",
        "mlflow", "comet_ml"]` to a trainer.
    SpeedMonitor ThroughputMonitor -> It is `Throughput`.
    DeviceStatsMonitor -> It is `MemoryMonitor`.
    StochasticWeightAveraging WeightAveraging -> It is `SWA`, in `algorithms`.
    EMACallback ExponentialMovingAverage EMAWeightAveraging -> It is `EMA`, in `algorithms`.
    GradientAccumulationScheduler -> `global_batch_size={0: 64, "2ep": 128}` of a trainer.
    Fabric Accelerator -> `AccelerateTrainer` does it; accelerate's `Accelerator` is one of its arguments.
    Seq2SeqTrainer SFTTrainer -> `HFTrainer` or `Trainer`, with a model of transformers; `Preview` generates texts.
    DPOTrainer GRPOTrainer ORPOTrainer KTOTrainer PPOTrainer RewardTrainer -> Write the loss as a `TrainUnit`.
    DataCollator DataCollatorWithPadding DataCollatorForSeq2Seq default_data_collator -> `Collator`, or those of
        transformers, as `data_collator`.
    DataCollatorForLanguageModeling -> `Collator`, or those of transformers, as `data_collator`.
    TrainState TrainerState TrainerControl State Timestamp EasyDeLState -> It is `Progress`, as `trainer.progress`.
    Metric MulticlassAccuracy Accuracy -> `compute_metrics=["accuracy"]`, or metrics of torchmetrics.
    notebook_launcher Launcher AutoDistributedRunner JaxDistributedConfig -> `omnitrain launch -n 2 script.py`.
    TorchProfiler PyTorchProfiler AdvancedProfiler SimpleProfiler SystemProfiler JSONTraceHandler -> It is `Profiler`,
        in `callbacks`; `Throughput` and `MemoryMonitor` log rates and memory.
    MetricBag MetricRecorder CompositeMetricRecorder MetricsTracker SumMetric MeanMetric MaxMetric -> A `TrainUnit`
        returns a `StepOutput` with `metrics`: means, or values in `Sum` and `Max`.
    merge_checkpoint merge_state_dicts load_merged_state_dict zero_to_fp32 -> No merging is needed: any number of
        processes resumes from a checkpoint, and `omnitrain checkpoint export run folder` writes full weights.
    TrainerOutput TrainOutput -> `train()` returns a `MetricsDict`.
    PredictionOutput EvalPrediction EvalLoopOutput -> `predict(dataset)` returns `Predictions`; metric functions of
        HFTrainer get the one of transformers.
    TrainStepOutput ValStepOutput AggregatedOutputs LossMetrics -> It is `StepOutput`.
    Logger LoggerDestination FileLogger InMemoryLogger SlackLogger NeptuneLogger -> Pass `loggers` by name, a
        `Tracking` around a tracker of accelerate, or a `Callback`.
    TensorboardLogger -> It is `TensorBoardLogger`.
    OptimizerMonitor -> It is `Distributions`, in `callbacks`.
    NaNMonitor TerminateOnNaN -> `on_nonfinite` of a trainer ends the run, skips the step or warns.
    SpikeDetection -> It is `SpikeGuard`, in `algorithms`.
    GarbageCollector -> It is `GarbageCollection`, in `callbacks`.
    RuntimeEstimator -> `plan()` says how long a run takes; the progress bar has the time left.
    Timer -> It is `TimeLimit` in `callbacks`, or `max_duration="2h"` of a trainer.
    ModelSummary -> The first lines of a run name the model and its parameters; `plan()` has their memory.
    ModelPruning -> It is `MagnitudePruning`, in `algorithms`.
    BaseFinetuning BackboneFinetuning -> `freeze` of a trainer, or `GradualUnfreezing` in `algorithms`.
    BatchSizeFinder -> `microbatch_size="auto"` of a trainer.
    LearningRateFinder Tuner -> `search` tries rates in short runs.
    LightningCLI TrainRecipe Recipe HfArgumentParser -> `omnitrain train config.yaml`, or `Config` from Python.
    TrainerArgs CheckpointConfig OptimizerConfig DatasetConfig ModelConfig ResumeOptions TrainingConfig -> Pass the
        arguments one by one, `Trainer(model, data, epochs=3)`.
    BasePredictionWriter -> `predict(dataset)` returns all predictions, on the host.
    Precision Precisions -> `autocast="bf16"` of a trainer.
    DDPStrategy FSDPStrategy DeepSpeedStrategy Gang ComputeConfig parallelize -> `AccelerateTrainer`,
        started by `omnitrain launch -n 2 --fsdp script.py`.
    CheckpointManager get_last_checkpoint load_checkpoint -> `save_dir` of a trainer and `train(resume_from="auto")`;
        `load_checkpoint("best")`.
    AbstractTrainUnit -> It is `TrainUnit`.
    Validator StandardValidator -> `eval_dataset` of a trainer, and `EvalSet`.
    LocalMetricDescriptor register_metric_descriptor -> It is `describe_metric`, with a `MetricDescriptor`.
    DefaultFlowCallback ProgressCallback PrinterCallback IntervalStrategy -> `eval_steps`, `save_steps`, `log_steps` and
        `progress_bar` of a trainer.
    SchedulerType LRSchedulerType get_scheduler get_linear_schedule_with_warmup get_cosine_schedule_with_warmup ->
        `lr_scheduler="linear"` or `"cosine"` of a trainer, with `warmup_steps`.
    AdamW DecoupledAdamW Adafactor build_optimizer create_optimizer -> `optimizer="adamw"` of a trainer, or any class
        or instance of `torch.optim`.
    enable_full_determinism -> `deterministic=True` of a trainer.
    GenerationConfig -> Import it from transformers; `Preview` and HFTrainer take the arguments of its generation.
""")
"""Names of other packages that are not in this one."""

_DATA = "It is the first argument, `dataset`."
_BEFORE = "Pass it to the constructor, as `eval_batch_size` and `progress_bar`; `load_checkpoint(path)` comes before."
_MORE = "The constructor takes the length; after a run that is done, `train(more=1)` goes on."
CALLS: dict[str, dict[str, str]] = {
    "train": _read(f"""
        epochs num_epochs num_train_epochs max_epochs max_steps steps duration -> {_MORE}
        resume_from_checkpoint ckpt_path load_path checkpoint resume -> It is `resume_from`, as in resume_from="last".
        train_dataloader train_dataloaders train_dataset train_data x y data datamodule -> Pass it to the constructor.
        val_dataloaders eval_dataloader validation_data model batch_size callbacks -> Pass it to the constructor.
        trial ignore_keys_for_eval -> It is of HFTrainer.
    """),
    "evaluate": _read(f"""
        eval_dataset dataloaders dataloader eval_dataloader data x y -> {_DATA}
        metric_key_prefix -> It is `prefix`.
        verbose batch_size ckpt_path model ignore_keys -> {_BEFORE}
    """),
    "test": _read(f"""
        test_dataset dataloaders dataloader test_dataloader data x y -> {_DATA}
        verbose batch_size ckpt_path model -> {_BEFORE}
    """),
    "predict": _read(f"""
        test_dataset dataloaders dataloader data x -> {_DATA}
        batch_size verbose ckpt_path model return_predictions -> {_BEFORE}
    """),
    "save_model": _read("output_dir folder filepath filename directory -> It is `path`."),
    "save_checkpoint": _read("""
        path filepath output_dir filename -> It is saved in `save_dir`; `save_model(path)` writes the model anywhere.
        weights_only -> `save_only_model` of the constructor, or `save_model(path)`.
    """),
    "load_checkpoint": _read("ckpt_path filepath filename checkpoint -> It is `path`."),
    "EarlyStopping": _read("""
        monitor metric mode -> The trainer has them, for all that compares: `optimization_metric`,
            `optimization_direction`.
        early_stopping_patience -> It is `patience`.
        min_delta early_stopping_threshold threshold -> It is `delta` of the trainer.
        restore_best_weights -> It is `load_best_at_end` of the trainer.
        baseline divergence_threshold -> Pass a function as `stopper`.
    """),
    "EMA": _read("beta smoothing momentum -> It is `decay`.\nhalf_life -> A decay of 0.5 ** (1 / steps)."),
    "SWA": _read("""
        swa_start swa_epoch_start -> It is `start`.
        update_interval -> It is `every`.
        swa_lrs swa_lr -> `lr_scheduler` of the trainer has the rates.
    """),
    "LabelSmoothing": _read("alpha label_smoothing epsilon -> It is `smoothing`."),
    "GradientClipping": _read("""
        clipping_type gradient_clip_algorithm -> It is `kind`; `max_grad_norm` of the trainer clips by the norm.
        clipping_threshold clip_val gradient_clip_val -> It is `limit`.
    """),
    "ProgressBar": _read("refresh_rate -> It is `every`.\nleave -> The last line always stays."),
    "Profiler": _read("schedule -> `skip`, `wait`, `warmup`, `active` and `repeat`."),
    "TensorBoardLogger": _read("save_dir logdir -> It is `log_dir`."),
}
"""Arguments of methods and classes in other packages, which here have other names or are not there."""


def format_tables() -> str:
    """Return the names as the tables of a page of Markdown."""
    tables = {"Methods and attributes": ATTRIBUTES, "Imports": IMPORTS}
    tables["Arguments of calls"] = {
        f"{function}({name}=)": remedy for function, names in CALLS.items() for name, remedy in names.items()
    }
    return "\n".join(
        "\n".join([f"## {title}", "", "| there | here |", "|---|---|", *_rows(table), ""])
        for title, table in tables.items()
    )


def _rows(table: dict[str, str]) -> list[str]:
    """Return a row for each remedy, with all of its names."""
    names: dict[str, list[str]] = {}
    for name, remedy in table.items():
        names.setdefault(remedy, []).append(f"`{name}`")
    return [f"| {', '.join(group)} | {remedy} |" for remedy, group in names.items()]


def explain_call(function: Callable[P, R]) -> Callable[P, R]:
    """Have a call whose arguments do not fit say what they are called here, and how the function is called."""
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def explained(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # by the function itself
            remedies = [f"`{key}`: {remedy}" for key, remedy in CALLS.get(name, {}).items() if key in kwargs]
            parameters = [
                parameter for key, parameter in inspect.signature(function).parameters.items() if key != "self"
            ]
            arguments = ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)
            text = " ".join([f"{error}.", *remedies, f"It is called as {name}({arguments})."])
            raise TypeError(text) from None

    return explained
