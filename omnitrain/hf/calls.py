"""The interface of `transformers.Trainer`, for HFTrainer.

Names, signatures and results are those of transformers. The default of an overridable method is our trainer's behavior,
so `super()` works as in a subclass of `transformers.Trainer`. Methods that build a run (loaders, optimizer, schedule)
are called at its beginning, not by the constructor: a subclass may set their attributes after `super().__init__()`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, TypeVar

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers import trainer_pt_utils
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from omnitrain.arguments import change_setting, reject_assignment
from omnitrain.callbacks.early_stopping import EarlyStopping
from omnitrain.config import overrides
from omnitrain.core.duration import Duration
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Callback, Control
from omnitrain.core.files import check_not_link
from omnitrain.core.history import MetricsDict, write_results
from omnitrain.core.paths import local_path
from omnitrain.data.collation import get_labels, move_to_device
from omnitrain.data.sets import is_dict_of_sets
from omnitrain.hf.arguments import resolve_alias, scheduler_factory
from omnitrain.hf.callbacks import CombinedControl
from omnitrain.hf.data import undo_prepare
from omnitrain.hf.engine import Engine
from omnitrain.hf.evaluation import HFEvaluation, replace_prefix
from omnitrain.metrics.scorer import make_scorer, scores_for
from omnitrain.model.units import ModelUnit, StepOutput, metrics_in, run_unit, scores_in
from omnitrain.trainer.base import BaseTrainer
from omnitrain.trainer.evaluation import Predictions

logger: logging.Logger = logging.getLogger("omnitrain")

_SETUP_METHODS = ("get_train_dataloader", "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler")
# Methods of `transformers.Trainer` that a run calls, so overriding them has an effect.
OVERRIDABLE = (
    *_SETUP_METHODS,
    "get_eval_dataloader",
    "get_test_dataloader",
    "compute_loss",
    "training_step",
    "prediction_step",
    "evaluate",
    "log",
)


Attribute = TypeVar("Attribute")
FromEngine: TypeAlias = Annotated[Attribute, "an attribute of `transformers.Trainer` that is read from the engine"]


class TrainResult(MetricsDict):
    """The history of a run, as every trainer returns it, which also works as transformers' `TrainOutput`.

    It unpacks like that: `step, loss, metrics = trainer.train()`. Its keys, in `keys()`, are those of the history.

    Attributes:
        global_step: Optimizer steps of the run.
        training_loss: The mean loss of the steps of this call of `train()`.
        metrics: `train_runtime`, `train_loss`, `epoch`, ...

    >>> result = TrainResult(MetricsDict(), TrainOutput(10, 0.5, {"train_loss": 0.5}))
    >>> step, loss, metrics = result
    >>> step, loss, metrics, result["valid"], result.global_step
    (10, 0.5, {'train_loss': 0.5}, [], 10)
    """

    def __init__(self, history: MetricsDict, output: TrainOutput) -> None:
        super().__init__()
        dict.update(self, history)
        self.global_step: int = output.global_step
        self.training_loss: float = output.training_loss
        self.metrics: dict[str, float] = output.metrics

    def __iter__(self) -> Iterator[Any]:
        """Yield step, loss and metrics, as `TrainOutput` does."""
        return iter((self.global_step, self.training_loss, self.metrics))


class TransformersAPI(BaseTrainer):
    """The interface of `transformers.Trainer`. If a call has two meanings, the names of its arguments decide."""

    ASSIGNABLE: ClassVar[frozenset[str]] = frozenset({"compute_metrics"})
    """Arguments that may be assigned, in addition to those of every trainer."""

    callback_handler: FromEngine[Any]
    can_return_loss: FromEngine[Any]
    current_flos: FromEngine[Any]
    deepspeed: FromEngine[Any]
    hp_name: FromEngine[Any]
    hp_search_backend: FromEngine[Any]
    hub_model_id: FromEngine[Any]
    is_fsdp_xla_enabled: FromEngine[Any]
    is_fsdp_xla_v1_enabled: FromEngine[Any]
    is_fsdp_xla_v2_enabled: FromEngine[Any]
    is_in_train: FromEngine[Any]
    is_model_parallel: FromEngine[Any]
    label_names: FromEngine[Any]
    label_smoother: FromEngine[Any]
    model_accepts_loss_kwargs: FromEngine[Any]
    neftune_noise_alpha: FromEngine[Any]
    place_model_on_device: FromEngine[Any]
    state: FromEngine[transformers.TrainerState]
    autocast_smart_context_manager: FromEngine[Callable[..., Any]]
    compute_loss_context_manager: FromEngine[Callable[..., Any]]
    floating_point_ops: FromEngine[Callable[..., Any]]
    get_cp_size: FromEngine[Callable[..., Any]]
    get_decay_parameter_names: FromEngine[Callable[..., Any]]
    get_sp_size: FromEngine[Callable[..., Any]]
    get_total_train_batch_size: FromEngine[Callable[..., Any]]
    get_tp_size: FromEngine[Callable[..., Any]]
    init_hf_repo: FromEngine[Callable[..., Any]]
    num_examples: FromEngine[Callable[..., Any]]
    store_flos: FromEngine[Callable[..., Any]]

    engine: Engine
    training_args: transformers.TrainingArguments | None
    processing_class: Any
    model_init: Any
    _evaluation: HFEvaluation
    _new_model: Callable[..., nn.Module]
    _output_dir: Path | None
    _engine_args: transformers.TrainingArguments
    lr_scheduler: Any
    # Whether the user has passed `lr_scheduler`.
    _has_user_schedule: bool
    # The training arguments when the trainer was created, to detect changes.
    _initial_args: dict[str, Any]
    # Whether a second run in the folder of the training arguments replaces the first, as transformers does.
    _replaces_earlier_run: bool

    # The threshold of an early stopping callback that was added.
    _early_stopping_threshold: float | None = None
    # The metrics to log from the latest `compute_loss` of ours.
    _loss_metrics: Mapping[str, Any] | None = None
    # Whether a subclass is creating the optimizer.
    _is_building = False
    # The optimizer that it has created so far.
    _built_optimizer: Any = None
    # The schedule that it has created together with the optimizer.
    _built_scheduler: Any = None
    # Whether a run is beginning.
    _is_beginning_run = False
    # Whether the objects that a subclass creates at the beginning of a run exist.
    _is_set_up = True

    get_optimizer_cls_and_kwargs: Callable[..., Any] = staticmethod(transformers.Trainer.get_optimizer_cls_and_kwargs)
    get_num_trainable_parameters: Callable[..., int] = transformers.Trainer.get_num_trainable_parameters
    get_learning_rates: Callable[..., list[float]] = transformers.Trainer.get_learning_rates
    get_optimizer_group: Callable[..., Any] = transformers.Trainer.get_optimizer_group
    is_local_process_zero: Callable[..., bool] = transformers.Trainer.is_local_process_zero

    if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if name in ENGINE_ATTRIBUTES and "engine" in vars(self):
                return getattr(self.engine, name)
            return super().__getattr__(name)

    @property
    def args(self) -> transformers.TrainingArguments:
        """The training arguments: the user's, if any were passed."""
        return self._engine_args if self.training_args is None else self.training_args

    @property
    def is_deepspeed_enabled(self) -> bool:
        """Whether DeepSpeed shards the weights."""
        return getattr(self.engine.real_accelerator.state, "deepspeed_plugin", None) is not None

    @property
    def is_fsdp_enabled(self) -> bool:
        """Whether FSDP shards the weights."""
        return getattr(self.engine.real_accelerator.state, "fsdp_plugin", None) is not None

    @property
    def tokenizer(self) -> Any:
        """Transformers' former name for `processing_class`."""
        return self.processing_class

    @property
    def control(self) -> Any:
        """The requests of callbacks on this rank, both ours and transformers' (`control.should_save`)."""
        return CombinedControl(self)

    @control.setter
    def control(self, control: Any) -> None:
        """Accept the return value of transformers' callback handler, which is this object already."""
        if control is self.engine.control or isinstance(control, (CombinedControl, Control)):
            return
        self.engine.control = control

    @property
    def compute_metrics(self) -> Any:
        """The metrics of evaluations; a subclass may replace it temporarily for its own evaluation."""
        return self.settings.compute_metrics

    @compute_metrics.setter
    def compute_metrics(self, compute_metrics: Any) -> None:
        if "_evaluation" in vars(self):
            scorer = make_scorer(compute_metrics, scores_for(self.loss_fn, self.model), self.processing_class)
            settings = dataclasses.replace(self.settings, compute_metrics=compute_metrics)
            change_setting(self, settings=settings, scorer=scorer)
            self._evaluation.scorer = scorer
        elif "settings" not in vars(self) or compute_metrics is not self.settings.compute_metrics:
            reject_assignment(self, "compute_metrics", compute_metrics)

    # --- training

    def train(
        self,
        resume_from: str | Path | bool | None = None,
        allow_change: Collection[str] | None = (),
        *,
        more: int | float | str | Duration | None = None,
        resume_from_checkpoint: str | Path | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Collection[str] | None = None,
    ) -> TrainResult:
        """Train to the first limit, and return the history, which also works as transformers' `TrainOutput`.

        Args:
            resume_from: The folder of a checkpoint, "last", "best", or "auto"; True, as in transformers, is the newest
                one in the run's folder, which must exist.
            allow_change: Names of arguments (settings, data, functions) that may differ from those of the checkpoint.
            more: Continue the finished run for this much longer, as for every trainer.
            resume_from_checkpoint: transformers' name for `resume_from`.
            trial: Do not pass it: `hyperparameter_search` creates a trainer for each trial.
            ignore_keys_for_eval: Keys of the model's output to leave out of the predictions in evaluations.

        Raises:
            ConfigError: If there is no checkpoint to resume from, or the arguments contradict each other.
            CheckpointError, NonFiniteError, KeyboardInterrupt, SystemExit: As for every trainer.
        """
        if trial is not None:
            raise ConfigError("`train(trial=...)` is for transformers' own search. Call hyperparameter_search().")
        checkpoint: Any = resolve_alias(
            "resume_from", resume_from or None, "resume_from_checkpoint", resume_from_checkpoint or None
        )
        self._reject_changed_arguments()
        if checkpoint is True and overrides.is_active():
            checkpoint = "auto"
        if checkpoint is True:
            if self.store is None or not self.ranks.on_main("a look at `save_dir`", self.store.checkpoints):
                raise ConfigError(
                    f"No valid checkpoint found in output directory ({self.save_dir or self._output_dir}), and "
                    "resume_from_checkpoint=True needs one. Leave it out for the first run, or pass "
                    "resume_from='auto', which starts a new run without a checkpoint."
                )
            checkpoint = "auto"
        elif checkpoint is None and more is None:
            self._warn_earlier_run()
        self.engine.output, self.engine.is_in_train = None, False  # a run that failed has left it True
        with self._evaluation.with_options(ignore_keys_for_eval):
            history = super().train(checkpoint, allow_change or (), more=more)
        return TrainResult(history, self._make_train_output())

    def _reject_changed_arguments(self) -> None:
        """Raise ConfigError for training arguments that were changed after the trainer was created."""
        current = {} if self.training_args is None else vars(self.training_args)
        changed = [name for name, value in self._initial_args.items() if current.get(name) != value]
        if changed:
            raise ConfigError(
                f"`args.{changed[0]}` was {self._initial_args[changed[0]]!r} when the trainer was created, and is "
                f"{current.get(changed[0])!r} now, which has no effect. Create a trainer with the new arguments."
            )

    def _warn_earlier_run(self) -> None:
        """Warn that the checkpoints of an earlier run in the same folder will be replaced."""
        if not self._replaces_earlier_run or self.store is None or not self.is_main_process:
            return
        if checkpoints := self.store.checkpoints():
            logger.warning(
                "%r holds %d checkpoints of an earlier run, up to %s. This run starts from scratch, as with "
                "transformers.Trainer, and replaces them once it has saved its first. To resume from them: "
                "train(resume_from_checkpoint=True).", str(self.save_dir), len(checkpoints), checkpoints[-1].name,
            )  # fmt: skip

    def _make_train_output(self) -> TrainOutput:
        """Return the result of transformers' loop, or the equivalent if no step was left."""
        output, progress = self.engine.output, self.progress
        rows = self.metrics["train_metrics_history"]
        mean = float(rows[-1]["train_loss"]) if rows else 0.0
        metrics = dict(output.metrics) if output is not None else {"train_runtime": 0.0, "train_loss": mean}
        metrics["epoch"] = round(progress.epochs, 6)
        loss = mean if output is None else output.training_loss
        return TrainOutput(progress.step, loss, metrics)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a new model from `model_init`; in a search, the trainer of each trial calls this itself."""
        if self.model_init is None:
            raise ConfigError("`call_model_init()` needs `model_init`. Pass it to the constructor.")
        return self._new_model(self.seed, self.device)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search like `transformers.Trainer.hyperparameter_search`; each trial is a run of a trainer like this one."""
        return self.engine.hyperparameter_search(*args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the optimizer, which is built on first use."""
        if self._is_building and self._built_optimizer is None:
            self._built_optimizer = self._default_optimizer()
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Return the schedule for this many optimizer steps, which the next run then uses."""
        if not self._has_user_schedule:
            args = self.args
            make = scheduler_factory(args, args.get_warmup_steps(num_training_steps), num_training_steps)
            self.lr_scheduler = make(optimizer or self.optimizer)
        return self.lr_scheduler

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Build optimizer and schedule for this many steps."""
        self.create_scheduler(num_training_steps, self.create_optimizer())

    # --- data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the training set as transformers builds it; a run has its own order."""
        return self.engine.stock_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return a loader, as transformers does, of a set, of the evaluation set, or of one of several by name."""
        return self.engine.get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return a loader of a set as transformers builds it."""
        return self.engine.get_test_dataloader(test_dataset)

    # --- evaluation; transformers' memory tracker needs these method names: it inspects the name of its caller

    def evaluate(
        self,
        dataset: Any = None,
        prefix: Any = "eval",
        metric_key_prefix: str | None = None,
        *,
        eval_dataset: Any = None,
        ignore_keys: Collection[str] | None = None,
        **generation: Any,
    ) -> dict[str, float]:
        """Return `<prefix>_loss` and the metrics on a dataset, a loader or a dict of named sets; default: the eval set.

        Args:
            dataset: The data to evaluate, or the name of one of several evaluation sets.
            prefix: The prefix of the metrics' names. As a positional argument, a list or None is transformers'
                `ignore_keys`.
            metric_key_prefix: transformers' name for `prefix`.
            eval_dataset: transformers' name for `dataset`.
            ignore_keys: Keys of the model's output to leave out of the predictions.
            generation: With `predict_with_generate`, arguments of `model.generate` such as `max_length`, `num_beams`.
        """
        evaluation = self._evaluation
        if evaluation.run_evaluation is not None:  # called by an override of this method, as part of the run
            return evaluation.evaluate_for_run()
        dataset = resolve_alias("dataset", dataset, "eval_dataset", eval_dataset)
        if prefix is None or not isinstance(prefix, str):
            prefix, ignore_keys = "eval", prefix if ignore_keys is None else ignore_keys
        prefix = prefix if metric_key_prefix is None else metric_key_prefix
        if isinstance(dataset, str):
            dataset, prefix = self._named_set(dataset), f"{prefix}_{dataset}"
        if "get_eval_dataloader" in self._overridden:
            dataset = self._user_eval_loader(dataset)
        self.engine._memory_tracker.start()
        with evaluation.with_options(ignore_keys, "evaluate", generation):
            metrics = super().evaluate(dataset, prefix)
        self.engine.report_evaluation(metrics)
        self.engine._memory_tracker.stop_and_update_metrics(metrics)
        return metrics

    def _named_set(self, name: str) -> Any:
        sets = self.eval_dataset
        if not isinstance(sets, Mapping) or name not in sets:
            available = ", ".join(map(repr, sets)) if isinstance(sets, Mapping) else "no names"
            raise ConfigError(f"`eval_dataset` has no set {name!r}. It has {available}.")
        return sets[name]

    def predict(
        self,
        dataset: Any = None,
        ignore_keys: Collection[str] | None = None,
        metric_key_prefix: str = "test",
        *,
        test_dataset: Any = None,
        **generation: Any,
    ) -> Predictions:
        """Return predictions and labels as arrays, one row per sample in the dataset's order, and any metrics.

        Args:
            dataset: The data to predict.
            ignore_keys: Keys of the model's output to leave out of the predictions.
            metric_key_prefix: The prefix of the metrics' names.
            test_dataset: transformers' name for `dataset`.
            generation: With `predict_with_generate`, arguments of `model.generate` such as `max_length`, `num_beams`.
        """
        evaluation = self._evaluation
        dataset = resolve_alias("dataset", dataset, "test_dataset", test_dataset)
        if "get_test_dataloader" in self._overridden:
            dataset = undo_prepare(self.get_test_dataloader(dataset))
        self.engine._memory_tracker.start()
        with evaluation.with_options(ignore_keys, "predict", generation):
            result = super().predict(dataset)
        metrics = replace_prefix(result.metrics, metric_key_prefix)
        self.engine.report_prediction({**metrics, **replace_prefix(evaluation.speeds, metric_key_prefix)})
        self.engine._memory_tracker.stop_and_update_metrics(metrics)
        return Predictions(result.predictions, result.labels, metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str = "Evaluation",
        prediction_loss_only: bool | None = None,
        ignore_keys: Collection[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return predictions, labels, metrics and the number of samples, for a subclass's `evaluate`.

        Such an `evaluate` logs and calls the callbacks itself, as in transformers. `dataloader` is from
        `get_eval_dataloader` or `get_test_dataloader`. `description` is not used: our progress bar has its own text.
        """
        evaluation = self._evaluation
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        loader, request = self._sets.loader_for(undo_prepare(dataloader)), (metric_key_prefix, not loss_only)
        generation = vars(self).get("_gen_kwargs", {})  # set by subclasses written for Seq2SeqTrainer
        with evaluation.with_options(ignore_keys, "evaluation_loop", generation):
            if evaluation.run_evaluation is not None:
                result = evaluation.evaluate_loader(loader, *request)
            else:
                with self._calling("evaluation_loop()"):
                    result = self._loop.evaluate_outside_run(evaluation.evaluate_or_predict, loader, *request)
        size = loader.size
        if size is None:
            arrays = result.predictions if isinstance(result.predictions, tuple) else (result.predictions,)
            size = next((len(array) for array in (result.labels, *arrays) if array is not None), None)
        return EvalLoopOutput(result.predictions, result.labels, result.metrics, size)

    # --- logs and callbacks

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add a row to transformers' history, and call its callbacks."""
        self.engine.write_log(logs, start_time)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, ours or transformers', as an instance or a class."""
        if isinstance(callback, transformers.EarlyStoppingCallback):  # ours has its counter in checkpoints
            if not self._evaluates:
                raise ConfigError("EarlyStoppingCallback needs evaluations, and there are none. Pass `eval_dataset`.")
            threshold = float(callback.early_stopping_threshold or 0.0)
            self._early_stopping_threshold = self.objective.delta = threshold
            callback = EarlyStopping(callback.early_stopping_patience)
        if isinstance(callback, Callback):
            self._callbacks.append(callback)
            self.lifecycle.register([*self.lifecycle.callbacks, callback])
        else:
            self.engine.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first one of a class, and return it; None if there is none."""
        if isinstance(callback, Callback) or (isinstance(callback, type) and issubclass(callback, Callback)):
            callbacks = self.lifecycle.callbacks
            match = next((entry for entry in callbacks if entry is callback or type(entry) is callback), None)
            if match in self._callbacks:
                self._callbacks.remove(match)
            self.lifecycle.register([entry for entry in callbacks if entry is not match])
            return match
        return self.engine.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class."""
        self.pop_callback(callback)

    def is_world_process_zero(self) -> bool:
        """Return whether this is the main rank, which prints and writes."""
        return self.is_main_process

    # --- saving

    def save_model(
        self,
        path: str | Path | None = None,
        overwrite: bool | None = None,
        *,
        output_dir: str | Path | None = None,
        _internal_call: bool = False,
    ) -> Path:
        """Write the weights as safetensors, the model's config, and the tokenizer or processor if there is one.

        For a model with PEFT adapters, only the adapters are written, in PEFT's format.

        Args:
            path: The folder; None is the folder of the run.
            overwrite: Whether to replace an existing model; None replaces it if training arguments were passed, as in
                transformers, and raises otherwise, like our other trainers.
            output_dir: transformers' name for `path`; an existing model is replaced.

        Raises:
            ConfigError: If an existing model is not to be replaced, or there is no folder.
        """
        if overwrite is None:
            overwrite = path is None or output_dir is not None or self.training_args is not None
        target = resolve_alias("path", path, "output_dir", output_dir)
        target = self._run_folder() if target is None else target
        folder = local_path(target, "path")
        self._write_model(folder, overwrite, self.engine.saved_processor)
        if self.training_args is not None and self.is_main_process:
            check_not_link(folder / "training_args.bin")
            torch.save(self.training_args, folder / "training_args.bin")
        if self._engine_args.push_to_hub and not _internal_call:
            self.engine.push_to_hub(commit_message="Model save")
        return folder

    def save_state(self) -> None:
        """Write transformers' history to `trainer_state.json` in the folder of the run."""
        if self.is_main_process:
            folder = Path(self._run_folder())
            folder.mkdir(parents=True, exist_ok=True)
            check_not_link(folder / "trainer_state.json")
            self.engine.state.save_to_json(str(folder / "trainer_state.json"))

    def _run_folder(self) -> Path:
        folder = self._output_dir or self.save_dir
        if folder is None:
            raise ConfigError("The run has no folder. Pass `output_dir`, or `save_dir` to the constructor.")
        return Path(folder)

    def metrics_format(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Return metrics formatted for printing, with units."""
        return trainer_pt_utils.metrics_format(metrics)

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print metrics as a table, on the main rank."""
        trainer_pt_utils.log_metrics(self, split, metrics)

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> Path:
        """Write metrics to `<split>_results.json` in `save_dir`, or in the folder of the training arguments.

        With `combined`, they are added to `all_results.json` too, as transformers does.
        """
        folder = self.save_dir or Path(self._output_dir or "")
        if combined:
            combined_metrics = {**_read_results(folder / "all_results.json"), **metrics}
            write_results(folder, "all", combined_metrics, self.is_main_process)
        return write_results(folder, split, metrics, self.is_main_process)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload model, tokenizer and a model card, as `transformers.Trainer.push_to_hub` does."""
        return self.engine.push_to_hub(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write a draft of a model card, as `transformers.Trainer.create_model_card` does."""
        self.engine.create_model_card(*args, **kwargs)

    # --- loss and outputs of a batch

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean loss of a batch on the device, and with `return_outputs` the model's output.

        An override returns a mean, too: its weight in the step is counted as for every loss, so every split gives the
        same numbers. `num_items_in_batch` is that weight: a sum divided by it is a mean. In addition to transformers'
        return values, it may return `StepOutput(loss, outputs, metrics={...})`, in training and in evaluations: the
        logs then have these means over the batch.
        """
        unit = self.unit
        if isinstance(unit, ModelUnit):
            loss, outputs, self._loss_metrics = unit.run(model, inputs)
        else:
            output = run_unit(unit, model, inputs)
            loss, outputs = output.loss, {"loss": output.loss, "logits": output.outputs}
            self._loss_metrics = output.metrics
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Collection[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Return the loss, logits and labels of an evaluation batch; called without gradients."""
        with torch.no_grad(), self._autocast():
            output = self._forward_for_eval(model, self._prepare_batch(inputs))
        return output.loss, None if prediction_loss_only else output.outputs, output.labels

    def _forward(self, model: nn.Module, batch: Any) -> StepOutput:
        if torch.is_grad_enabled():
            is_custom = "compute_loss" in self._overridden
            return self._forward_custom_loss(model, batch) if is_custom else super()._forward(model, batch)
        if "prediction_step" in self._overridden:
            ignored = list(self._evaluation.ignored) or None
            loss, logits, labels = self.prediction_step(model, _shallow_copy(batch), False, ignored)
            return StepOutput(loss, logits, labels)
        return self._forward_for_eval(model, batch)

    def _forward_custom_loss(self, model: nn.Module, batch: Any) -> StepOutput:
        labels = get_labels(batch, self.settings.label_names or ())
        loss, _, metrics = self._custom_loss(model, batch, self._step.weight)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"{type(self).__name__}.compute_loss must return a scalar tensor, the mean loss of the batch, got "
                f"{loss!r:.200}."
            )
        return StepOutput(loss.reshape(()), None, labels, metrics=metrics)

    def _custom_loss(
        self, model: nn.Module, batch: Any, weight: float, return_outputs: bool = False
    ) -> tuple[Any, Any, dict[str, Any] | None]:
        """Return loss, outputs and metrics to log from a subclass's `compute_loss`.

        With `grad_reduction="sum"` it returns a sum, and so it does where no label counts.
        """
        self._loss_metrics = None
        count = 1 if self.grad_reduction == "sum" else weight or 1
        count = int(count) if count == int(count) else count
        # as in transformers, by name and in evaluations only: an override may take **kwargs, or none of it to train
        options = {"return_outputs": True} if return_outputs else {}
        result = self.compute_loss(model, _shallow_copy(batch), **options, num_items_in_batch=count)
        if isinstance(result, StepOutput):
            if result.num_targets is not None:
                raise ConfigError(
                    f"{type(self).__name__}.compute_loss returned a StepOutput with num_targets. Return a mean, whose "
                    "weight is counted here; a sum over targets is for a `unit`."
                )
            loss, outputs, metrics = result.loss, result.outputs, result.metrics
        else:
            loss, outputs = (*result, None)[:2] if isinstance(result, tuple) else (result, None)
            metrics = metrics_in(outputs)
        return loss, outputs, {**(self._loss_metrics or {}), **(metrics or {})} or None

    def _forward_for_eval(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return loss and outputs without `ignore_keys`."""
        labels = get_labels(batch, self.settings.label_names or ())
        evaluation = self._evaluation
        needs_loss = labels is not None or not evaluation.is_predicting
        metrics = None
        if "compute_loss" in self._overridden and needs_loss:
            weight = evaluation.weight
            if weight is None:
                weight = self._weigh(move_to_device(batch, torch.device("cpu")))
            loss, outputs, metrics = self._custom_loss(model, batch, weight, return_outputs=True)
        elif isinstance(self.unit, ModelUnit):
            loss, outputs, metrics = self.unit.run(model, batch)
        else:
            return super()._forward(model, batch)
        scores, returned = scores_in(outputs, loss, evaluation.ignored), outputs if loss is None else None
        return StepOutput(loss, scores, labels, metrics=metrics, _returned=returned)

    # --- logs

    def call_log(self, logs: dict[str, float], start_time: float | None) -> None:
        """Pass a row of logs to `log`; a subclass's may take only the row, as in earlier transformers."""
        if "log" in self._overridden:
            try:
                inspect.signature(self.log).bind(logs, start_time)
            except TypeError:
                return self.log(logs)
        return self.log(logs, start_time)

    # --- a micro-batch

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward on a micro-batch, and return its part of the step's loss.

        An override must call it once by `super()`: the weight of a micro-batch in its step is applied here.
        """
        return self.engine.run_micro_batch(model, inputs, num_items_in_batch)

    def call_training_step(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        """Return the result of `training_step` for the next micro-batch, for transformers' loop."""
        calls_before = self._step.turn
        loss = self.training_step(model, inputs, None)
        if self._step.turn != calls_before + 1:
            raise ConfigError(
                f"{type(self).__name__}.training_step must call super().training_step(model, inputs, ...) once for "
                f"each batch, and called it {self._step.turn - calls_before} times: gradients would not have the "
                "weight of their samples in the step."
            )
        return loss

    # --- the beginning of a run

    @property
    def optimizer(self) -> Any:
        """The optimizer; None while a subclass is creating it, as in transformers."""
        return self._built_optimizer if self._is_building else self.backend.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_building:
            self._built_optimizer = optimizer
        else:
            BaseTrainer.optimizer.fset(self, optimizer)  # type: ignore[attr-defined]

    def _build_optimizer(self) -> torch.optim.Optimizer:
        methods = ("create_optimizer", "create_optimizer_and_scheduler")
        overridden = [name for name in methods if name in self._overridden]
        if not overridden or self._is_building:
            return self._default_optimizer()
        self._is_building, self._built_optimizer = True, None
        try:
            if "create_optimizer" in overridden:
                self._built_optimizer = self.create_optimizer() or self._built_optimizer
            else:
                self.lr_scheduler = None
                self.create_optimizer_and_scheduler(self.total_steps or 0)
                self._built_scheduler = self.lr_scheduler
            if self._built_optimizer is None:
                raise ConfigError(f"{type(self).__name__}.{overridden[0]} created no optimizer. Return it, or set it.")
            return self._built_optimizer
        finally:
            self._is_building = False

    def _default_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer for a subclass that does not create its own."""
        return super()._build_optimizer()

    def _begin_run(self, resumes: bool, is_live: bool = False) -> None:
        self._is_beginning_run = True
        try:
            if "get_train_dataloader" in self._overridden:
                self._sets.set_train_loader(undo_prepare(self.get_train_dataloader()))
                self.lifecycle.progress.epoch_size = self._sets.train.size
            if "get_eval_dataloader" in self._overridden and self._evaluates:
                self._sets.set_eval_loader(self._user_eval_loader(None))
            if not self._is_set_up:
                self._finish_setup()
            super()._begin_run(resumes, is_live)
        finally:
            self._is_beginning_run = False

    def _finish_setup(self, lr_scheduler: Any = None, warmup_steps: Any = None) -> None:
        self._is_set_up = self._is_beginning_run or self._overridden.isdisjoint(_SETUP_METHODS)
        if not self._is_set_up:
            return
        super()._finish_setup(lr_scheduler, warmup_steps)
        if "create_scheduler" in self._overridden:
            self.lr_scheduler = None
            self.lr_scheduler = self.create_scheduler(self.total_steps or 0, self.optimizer) or self.lr_scheduler
        elif "create_optimizer_and_scheduler" in self._overridden and self._built_scheduler is not None:
            self.lr_scheduler = self._built_scheduler

    # --- data

    def _user_eval_loader(self, dataset: Any) -> Any:
        """Return the loader from a subclass's `get_eval_dataloader` for a set, or for each of several."""
        datasets = self.eval_dataset if dataset is None else dataset
        if is_dict_of_sets(datasets):
            return {name: undo_prepare(self.get_eval_dataloader(eval_set)) for name, eval_set in datasets.items()}
        return undo_prepare(self.get_eval_dataloader(dataset))


_FIELDS = TransformersAPI.__annotations__
ENGINE_ATTRIBUTES = frozenset(name for name in _FIELDS if str(_FIELDS[name]).startswith("FromEngine"))


def _shallow_copy(batch: Any) -> Any:
    """Copy a batch, so that an override may pop its labels."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def _read_results(path: Path) -> dict[str, Any]:
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return results if isinstance(results, dict) else {}
