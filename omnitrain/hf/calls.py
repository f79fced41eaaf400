"""What scripts call on a `transformers.Trainer`, and what their subclasses override of it, answered by our trainer.

Names, signatures and results are transformers'. The default of what may be overridden is what our trainer does without
it, so that `super()` works as in a subclass of `transformers.Trainer`. Methods with which a run is built (loaders,
optimizer, schedule) are called when it begins, as there, and not by the constructor: a subclass may set what they need
after `super().__init__()`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers import trainer_pt_utils
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from omnitrain.callbacks.early_stopping import EarlyStopping
from omnitrain.data.collation import labels_of
from omnitrain.data.sets import is_named_sets
from omnitrain.errors import ConfigError
from omnitrain.events import Callback, Control
from omnitrain.hf.arguments import either_name, schedule_for
from omnitrain.hf.callbacks import Controls
from omnitrain.hf.data import unprepared
from omnitrain.hf.engine import Engine
from omnitrain.hf.evaluation import prefixed
from omnitrain.hf.files import write_model
from omnitrain.metrics import MetricsDict, write_results
from omnitrain.run import hooks
from omnitrain.run.evaluation import Predictions
from omnitrain.scoring import make_scorer, scores_for
from omnitrain.settings import change_setting, local_path, refuse_assignment
from omnitrain.trainers.base import BaseTrainer
from omnitrain.units import ModelUnit, StepOutput, run_unit, scores_in

__all__ = ["ANSWERED_BY_ENGINE", "CALLED", "Calls", "TrainResult"]

logger: logging.Logger = logging.getLogger("omnitrain")

ANSWERED_BY_ENGINE = (
    # what transformers keeps of a run
    "callback_handler", "can_return_loss", "current_flos", "deepspeed", "hp_name", "hp_search_backend",
    "hub_model_id", "is_fsdp_xla_enabled", "is_fsdp_xla_v1_enabled", "is_fsdp_xla_v2_enabled",
    "is_in_train", "is_model_parallel", "label_names", "label_smoother", "model_accepts_loss_kwargs",
    "neftune_noise_alpha", "place_model_on_device", "state",
    # questions, and helpers of its own
    "autocast_smart_context_manager", "compute_loss_context_manager", "floating_point_ops", "get_cp_size",
    "get_decay_parameter_names", "get_sp_size", "get_total_train_batch_size", "get_tp_size", "init_hf_repo",
    "num_examples", "store_flos",
)  # fmt: skip
"""Attributes of `transformers.Trainer` that are read from the engine, which is one."""


_AT_THE_START = ("get_train_dataloader", "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler")
CALLED = (
    *_AT_THE_START,
    "get_eval_dataloader",
    "get_test_dataloader",
    "compute_loss",
    "training_step",
    "prediction_step",
    "evaluate",
    "log",
)
"""Methods of `transformers.Trainer` that a run calls, so that overriding them has an effect."""


class TrainResult(MetricsDict):
    """History and best of a run, as every trainer returns them, which also answers as transformers' `TrainOutput`.

    It is unpacked as that is: `step, loss, metrics = trainer.train()`. Its keys are those of the history, in `keys()`.

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


class Calls(BaseTrainer):
    """The calling surface of `transformers.Trainer`. Where one call means two things, its argument names decide."""

    ASSIGNABLE: ClassVar[frozenset[str]] = frozenset({"compute_metrics"})
    """Arguments that have an effect when they are assigned, besides those of every trainer."""

    engine: Engine
    training_args: transformers.TrainingArguments | None
    processing_class: Any
    model_init: Any
    _new_model: Callable[..., nn.Module]
    _output_dir: Path | None
    _engine_args: transformers.TrainingArguments
    lr_scheduler: Any
    _has_own_schedule: bool
    """Whether the user has passed `lr_scheduler`."""
    _adopted: dict[str, Any]
    """The training arguments as they were when the trainer was made."""
    _replaces: bool
    """Whether a second run in the folder of the training arguments replaces the first, as transformers does."""

    _threshold: float | None = None
    """What an early stopping callback that was added takes for a gain."""
    _overridden: frozenset[str] = frozenset()
    """Which of `CALLED` a subclass overrides."""
    _is_building = False
    """Whether a subclass is making the optimizer."""
    _made: Any = None
    """What it has made so far."""
    _own_scheduler: Any = None
    """The schedule that it has made together with the optimizer."""
    _begins = False
    """Whether a run is beginning."""
    _is_set_up = True
    """Whether what a subclass makes at the beginning of a run is there."""

    get_optimizer_cls_and_kwargs: Callable[..., Any] = staticmethod(transformers.Trainer.get_optimizer_cls_and_kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = hooks.members_of_user(cls)
        cls._overridden = frozenset(name for name in CALLED if name in own)

    if TYPE_CHECKING:  # at run time they are looked up in the engine
        callback_handler: Any
        can_return_loss: Any
        current_flos: Any
        deepspeed: Any
        hp_name: Any
        hp_search_backend: Any
        hub_model_id: Any
        is_fsdp_xla_enabled: Any
        is_fsdp_xla_v1_enabled: Any
        is_fsdp_xla_v2_enabled: Any
        is_in_train: Any
        is_model_parallel: Any
        label_names: Any
        label_smoother: Any
        model_accepts_loss_kwargs: Any
        neftune_noise_alpha: Any
        place_model_on_device: Any
        state: transformers.TrainerState
        autocast_smart_context_manager: Callable[..., Any]
        compute_loss_context_manager: Callable[..., Any]
        floating_point_ops: Callable[..., Any]
        get_cp_size: Callable[..., Any]
        get_decay_parameter_names: Callable[..., Any]
        get_sp_size: Callable[..., Any]
        get_total_train_batch_size: Callable[..., Any]
        get_tp_size: Callable[..., Any]
        init_hf_repo: Callable[..., Any]
        num_examples: Callable[..., Any]
        store_flos: Callable[..., Any]

    def _of_engine(self, name: str) -> Any:
        """Return what transformers keeps of the run."""
        if name in ANSWERED_BY_ENGINE and "engine" in vars(self):
            return getattr(self.engine, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def args(self) -> transformers.TrainingArguments:
        """The training arguments, the user's own if there are any."""
        return self._engine_args if self.training_args is None else self.training_args

    @property
    def is_deepspeed_enabled(self) -> bool:
        """Whether DeepSpeed cuts up the weights."""
        return getattr(self.engine.real_accelerator.state, "deepspeed_plugin", None) is not None

    @property
    def is_fsdp_enabled(self) -> bool:
        """Whether FSDP cuts up the weights."""
        return getattr(self.engine.real_accelerator.state, "fsdp_plugin", None) is not None

    @property
    def tokenizer(self) -> Any:
        """Transformers' former name of `processing_class`."""
        return self.processing_class

    @property
    def control(self) -> Any:
        """What callbacks on this rank have requested, ours and those of transformers (`control.should_save`)."""
        return Controls(self)

    @control.setter
    def control(self, control: Any) -> None:
        """Take what a method of transformers' callback handler returns, which is this already."""
        if control is self.engine.control or isinstance(control, (Controls, Control)):
            return
        self.engine.control = control

    @property
    def compute_metrics(self) -> Any:
        """What evaluations compute; a subclass may set it aside for an evaluation of its own."""
        return self.settings.compute_metrics

    @compute_metrics.setter
    def compute_metrics(self, compute_metrics: Any) -> None:
        if "_evaluation" in vars(self):
            scorer = make_scorer(compute_metrics, scores_for(self.loss_fn, self.model))
            settings = dataclasses.replace(self.settings, compute_metrics=compute_metrics)
            change_setting(self, settings=settings, scorer=scorer)
            self._evaluation.scorer = scorer
        elif "settings" not in vars(self) or compute_metrics is not self.settings.compute_metrics:
            refuse_assignment(self, "compute_metrics", compute_metrics)

    # --- training

    def train(
        self,
        resume_from: str | Path | bool | None = None,
        allow_change: Collection[str] | None = (),
        *,
        resume_from_checkpoint: str | Path | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Collection[str] | None = None,
    ) -> TrainResult:
        """Train to the first limit, and return history and best, which also answer as transformers' `TrainOutput`.

        Args:
            resume_from: A checkpoint's folder, "last", "best", or "auto"; True, as in transformers, is the newest one
                in the run's folder, of which there must be one.
            allow_change: Settings, data and functions that may differ from those of the checkpoint, by argument.
            resume_from_checkpoint: transformers' name of `resume_from`.
            trial: Not to be given: `hyperparameter_search` makes a trainer for each trial.
            ignore_keys_for_eval: Keys of the model's output that evaluations leave out of the predictions.

        Raises:
            ConfigError: If there is no checkpoint to go on from, or the arguments contradict each other.
            CheckpointError, NonFiniteError, KeyboardInterrupt, SystemExit: As for every trainer.
        """
        if trial is not None:
            raise ConfigError("`train(trial=...)` is for transformers' own search. Call hyperparameter_search().")
        names = "resume_from", resume_from or None, "resume_from_checkpoint", resume_from_checkpoint or None
        which: Any = either_name(*names)
        self._refuse_changed_arguments()
        if which is True:
            which = self._newest()
        elif which is None:
            self._tell_of_earlier_run()
        self.engine.output = None
        with self._leaving_out(ignore_keys_for_eval):
            history = super().train(which, allow_change or ())
        return TrainResult(history, self._output())

    def _newest(self) -> str:
        """Return what stands for the newest checkpoint of the run."""
        if self.store is None or not self.ranks.on_main("a look at `save_dir`", self.store.checkpoints):
            raise ConfigError(
                f"No valid checkpoint found in output directory ({self.save_dir or self._output_dir}), and "
                "resume_from_checkpoint=True goes on from one. Leave it out for the first run, or pass "
                "resume_from='auto', which starts afresh where there is none."
            )
        return "auto"

    def _refuse_changed_arguments(self) -> None:
        """Raise ConfigError for training arguments that were changed after the trainer was made."""
        now = {} if self.training_args is None else vars(self.training_args)
        changed = [name for name, value in self._adopted.items() if now.get(name) != value]
        if changed:
            raise ConfigError(
                f"`args.{changed[0]}` was {self._adopted[changed[0]]!r} when the trainer was made, and is "
                f"{now.get(changed[0])!r} now, which would change nothing. Make a trainer with the new arguments."
            )

    def _tell_of_earlier_run(self) -> None:
        """Say that the checkpoints of an earlier run in the same folder will be replaced."""
        there = self.store.checkpoints() if self._replaces and self.store is not None and self.is_main_process else []
        if there:
            logger.warning(
                "%r holds %d checkpoints of an earlier run, up to %s. This run starts afresh, as with "
                "transformers.Trainer, and replaces them once it has saved its first. To go on with them: "
                "train(resume_from_checkpoint=True).", str(self.save_dir), len(there), there[-1].name,
            )  # fmt: skip

    def _output(self) -> TrainOutput:
        """Return what transformers' loop returned, or what it would have where no step was left."""
        output, progress = self.engine.output, self.progress
        rows = self.metrics["train_metrics_history"]
        mean = float(rows[-1]["train_loss"]) if rows else 0.0
        metrics = dict(output.metrics) if output is not None else {"train_runtime": 0.0, "train_loss": mean}
        metrics["epoch"] = round(progress.epochs, 6)
        loss = mean if output is None else output.training_loss
        return TrainOutput(progress.step, loss, metrics)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a new model from `model_init`; for a trial of a search, the search makes the trainer that asks."""
        if self.model_init is None:
            raise ConfigError("There is no `model_init` to make a model with. Pass it to the constructor.")
        return self._new_model(self.seed, self.device)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search as `transformers.Trainer.hyperparameter_search` does; each trial is a run of a trainer like this."""
        return self.engine.hyperparameter_search(*args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the optimizer, which is built when it is first used."""
        if self._is_building and self._made is None:
            self._made = self._default_optimizer()
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Return the schedule for so many steps, which the next run then has.

        Args:
            num_training_steps: Optimizer steps of the run.
            optimizer: The one whose rates it moves; None is the trainer's.
        """
        if not self._has_own_schedule:
            args = self.args
            make = schedule_for(args, args.get_warmup_steps(num_training_steps), num_training_steps)
            self.lr_scheduler = make(optimizer or self.optimizer)
        return self.lr_scheduler

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Build optimizer and schedule for so many steps."""
        self.create_scheduler(num_training_steps, self.create_optimizer())

    def get_num_trainable_parameters(self) -> int:
        """Return how many numbers are trained."""
        return sum(one.numel() for one in self.model.parameters() if one.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of each group of the optimizer."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_optimizer_group(self, param: str | nn.Parameter | None = None) -> Any:
        """Return the group of the optimizer that has a parameter; all groups without one."""
        groups = self.optimizer.param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(one is param for one in group["params"])), None)

    # --- data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the training set as transformers makes it; a run has an order of its own."""
        return self.engine.stock_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return a loader of a set, or of the evaluation set or one of several by its name, as transformers does."""
        return self.engine.get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return a loader of a set as transformers makes it."""
        return self.engine.get_test_dataloader(test_dataset)

    # --- evaluating; transformers' tracker of memory tells what is measured by the names of what calls it

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
        """Return `<prefix>_loss` and the metrics of a dataset, a loader, a dict of named sets, or of the eval set.

        Args:
            dataset: What to evaluate; the name of one of several evaluation sets, too.
            prefix: What names of metrics begin with. By position, a list or None is transformers' `ignore_keys`.
            metric_key_prefix: transformers' name of `prefix`.
            eval_dataset: transformers' name of `dataset`.
            ignore_keys: Keys of the model's output that are left out of the predictions.
            generation: With `predict_with_generate`, arguments of `model.generate` such as `max_length`, `num_beams`.
        """
        evaluation: Any = self._evaluation
        if evaluation.is_of_run:  # an override of this method, called as a part of the run
            return evaluation.go_on()
        dataset = either_name("dataset", dataset, "eval_dataset", eval_dataset)
        if prefix is None or not isinstance(prefix, str):
            prefix, ignore_keys = "eval", prefix if ignore_keys is None else ignore_keys
        prefix = prefix if metric_key_prefix is None else metric_key_prefix
        if isinstance(dataset, str):
            dataset, prefix = self._named_set(dataset), f"{prefix}_{dataset}"
        if "get_eval_dataloader" in self._overridden:
            dataset = self._eval_loader_of(dataset)
        self.engine._memory_tracker.start()
        with self._leaving_out(ignore_keys), evaluation.generating("evaluate", generation):
            metrics = super().evaluate(dataset, prefix)
        self.engine.report_evaluation(metrics)
        self.engine._memory_tracker.stop_and_update_metrics(metrics)
        return metrics

    def _named_set(self, name: str) -> Any:
        sets = self.eval_dataset
        if not isinstance(sets, Mapping) or name not in sets:
            there = ", ".join(map(repr, sets)) if isinstance(sets, Mapping) else "no sets by name"
            raise ConfigError(f"`eval_dataset` has no {name!r}: there are {there}.")
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
        """Return predictions and labels as arrays in the dataset's order, one row a sample, and the metrics if any.

        Args:
            dataset: What to predict.
            ignore_keys: Keys of the model's output that are left out of the predictions.
            metric_key_prefix: What names of metrics begin with.
            test_dataset: transformers' name of `dataset`.
            generation: With `predict_with_generate`, arguments of `model.generate` such as `max_length`, `num_beams`.
        """
        evaluation: Any = self._evaluation
        dataset = either_name("dataset", dataset, "test_dataset", test_dataset)
        if "get_test_dataloader" in self._overridden:
            dataset = unprepared(self.get_test_dataloader(dataset))
        self.engine._memory_tracker.start()
        with self._leaving_out(ignore_keys), evaluation.generating("predict", generation):
            found = super().predict(dataset)
        metrics = prefixed(found.metrics, metric_key_prefix)
        self.engine.report_prediction({**metrics, **prefixed(evaluation.speeds, metric_key_prefix)})
        self.engine._memory_tracker.stop_and_update_metrics(metrics)
        return Predictions(found.predictions, found.labels, metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str = "Evaluation",
        prediction_loss_only: bool | None = None,
        ignore_keys: Collection[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return predictions, labels, metrics and how many samples there were, for an `evaluate` of a subclass.

        Such an `evaluate` writes the row of logs and tells callbacks for itself, as in transformers.

        Args:
            dataloader: What `get_eval_dataloader` or `get_test_dataloader` returned.
            description: Not used: a progress bar of ours says what it is about.
            prediction_loss_only: Whether no predictions are kept; None is as the training arguments say.
            ignore_keys: Keys of the model's output that are left out of the predictions.
            metric_key_prefix: What names of metrics begin with.
        """
        evaluation: Any = self._evaluation
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        loader, part = self._sets.loader_for(unprepared(dataloader)), (metric_key_prefix, not loss_only)
        generation = vars(self).get("_gen_kwargs", {})  # as subclasses of Seq2SeqTrainer set it
        with self._leaving_out(ignore_keys), evaluation.generating("evaluation_loop", generation):
            if evaluation.is_of_run:
                found = evaluation.go_over(loader, *part)
            else:
                with self.ranks.calling("evaluation_loop()", self._timeout):
                    found = self._loop.outside(loader, lambda stop: evaluation.over(loader, *part, stop))
        size = loader.size
        if size is None:
            size = next((len(one) for one in (found.labels, *_parts(found.predictions)) if one is not None), None)
        return EvalLoopOutput(found.predictions, found.labels, found.metrics, size)

    def _leaving_out(self, keys: Collection[str] | None) -> Any:
        return self._evaluation.leaving_out(keys or ())  # type: ignore[attr-defined]

    # --- logs and callbacks

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add a row to transformers' history, and tell its callbacks."""
        self.engine.write_log(logs, start_time)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, ours or one of transformers; an instance or a class."""
        if isinstance(callback, transformers.EarlyStoppingCallback):
            callback = self._early_stopping(callback)
        if isinstance(callback, Callback):
            self._callbacks.append(callback)
            self.lifecycle.register([*self.lifecycle.callbacks, callback])
        else:
            self.engine.add_callback(callback)

    def _early_stopping(self, callback: transformers.EarlyStoppingCallback) -> EarlyStopping:
        """Return ours for transformers', whose count is kept in checkpoints."""
        if not self._evaluates:
            raise ConfigError("EarlyStoppingCallback judges evaluations, and there are none. Pass `eval_dataset`.")
        threshold = float(callback.early_stopping_threshold or 0.0)
        self._threshold = self.objective.delta = threshold
        return EarlyStopping(callback.early_stopping_patience)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first of a class, and return it; None if there is none."""
        if isinstance(callback, Callback) or (isinstance(callback, type) and issubclass(callback, Callback)):
            found = next((one for one in self.lifecycle.callbacks if one is callback or type(one) is callback), None)
            if found in self._callbacks:
                self._callbacks.remove(found)
            self.lifecycle.register([one for one in self.lifecycle.callbacks if one is not found])
            return found
        return self.engine.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first of a class."""
        self.pop_callback(callback)

    def is_world_process_zero(self) -> bool:
        """Return whether this is the rank that prints and writes."""
        return self.is_main_process

    def is_local_process_zero(self) -> bool:
        """Return whether this is the first rank of its machine."""
        return self._engine_args.local_process_index == 0

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

        Of a model with adapters of PEFT, these are written, in PEFT's own form.

        Args:
            path: The folder; None is that of the run.
            overwrite: Whether to replace a model that is there; None is as transformers does with training arguments,
                which replaces it, and otherwise as our other trainers do, which refuse to.
            output_dir: transformers' name of `path`; it replaces a model that is there.

        Raises:
            ConfigError: If a model is there that is not to be replaced, or there is no folder.
        """
        if overwrite is None:
            overwrite = path is None or output_dir is not None or self.training_args is not None
        place = either_name("path", path, "output_dir", output_dir)
        place = self._own_folder() if place is None else place
        folder = local_path(place, "path")
        write_model(self, self.engine.saved_processor, folder, overwrite)
        if self.training_args is not None and self.is_main_process:
            torch.save(self.training_args, folder / "training_args.bin")
        if self._engine_args.push_to_hub and not _internal_call:
            self.engine.push_to_hub(commit_message="Model save")
        return folder

    def save_state(self) -> None:
        """Write transformers' history as `trainer_state.json` into the folder of the run."""
        if self.is_main_process:
            folder = Path(self._own_folder())
            folder.mkdir(parents=True, exist_ok=True)
            self.engine.state.save_to_json(str(folder / "trainer_state.json"))

    def _own_folder(self) -> Path:
        folder = self._output_dir or self.save_dir
        if folder is None:
            raise ConfigError("There is no folder of the run. Pass `output_dir`, or `save_dir` to the constructor.")
        return Path(folder)

    def metrics_format(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Return metrics as they are printed, with units."""
        return trainer_pt_utils.metrics_format(metrics)

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print metrics as a table, on the main rank."""
        trainer_pt_utils.log_metrics(self, split, metrics)

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> Path:
        """Write metrics as `<split>_results.json` into `save_dir`, else where the training arguments write.

        Args:
            split: "train", "eval", "test", ...
            metrics: By name.
            combined: Whether to add them to `all_results.json` as well, as transformers does.
        """
        folder = self.save_dir or Path(self._output_dir or "")
        if combined:
            everything = {**_read_results(folder / "all_results.json"), **metrics}
            write_results(folder, "all", everything, self.is_main_process)
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
        """Return the mean loss of a batch on the device, and with `return_outputs` what the model returned.

        A mean is what an override returns, too: how much it weighs in its step is counted as for every loss, so that
        the numbers are the same in every split. `num_items_in_batch` is that weight: a sum divided by it is a mean.
        """
        unit = self.unit
        if isinstance(unit, ModelUnit):
            loss, outputs = unit.loss_and_outputs(model, inputs)
        else:
            output = run_unit(unit, model, inputs)
            loss, outputs = output.loss, {"loss": output.loss, "logits": output.outputs}
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Collection[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Return loss, logits and labels of a batch in an evaluation; called without gradients, as evaluations are."""
        with torch.no_grad(), self._autocast():
            output = self._evaluated(model, self._prepare_batch(inputs))
        return output.loss, None if prediction_loss_only else output.outputs, output.labels

    def _forward(self, model: nn.Module, batch: Any) -> StepOutput:
        if torch.is_grad_enabled():
            return self._trained(model, batch)
        if "prediction_step" in self._overridden:
            ignored = list(self._evaluation.ignored) or None  # type: ignore[attr-defined]
            loss, logits, labels = self.prediction_step(model, _copied(batch), False, ignored)
            return StepOutput(loss, logits, labels)
        return self._evaluated(model, batch)

    def _trained(self, model: nn.Module, batch: Any) -> StepOutput:
        if "compute_loss" not in self._overridden:
            return super()._forward(model, batch)
        labels, weight = labels_of(batch, self.settings.label_names or ()), self._step.weight
        count = int(weight) if weight == int(weight) else weight
        loss = self.compute_loss(model, _copied(batch), num_items_in_batch=count or None)
        if isinstance(loss, tuple):
            loss = loss[0]
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"{type(self).__name__}.compute_loss must return a scalar tensor, the mean loss of the batch, got "
                f"{loss!r:.200}."
            )
        return StepOutput(loss.reshape(()), None, labels)

    def _evaluated(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return loss and outputs without gradients, less `ignore_keys`."""
        labels = labels_of(batch, self.settings.label_names or ())
        evaluation: Any = self._evaluation
        needs_loss = labels is not None or not evaluation.is_predicting
        if "compute_loss" in self._overridden and needs_loss:
            loss, outputs = self.compute_loss(model, _copied(batch), return_outputs=True)
        elif isinstance(self.unit, ModelUnit):
            loss, outputs = self.unit.loss_and_outputs(model, batch)
        else:
            return super()._forward(model, batch)
        return StepOutput(loss, scores_in(outputs, loss, evaluation.ignored), labels)

    # --- logs

    def take_log(self, logs: dict[str, float], start_time: float | None) -> None:
        """Give a row of logs to `log`; one of a subclass may take the row alone, as it did in earlier versions."""
        if "log" in self._overridden and not _takes(self.log, logs, start_time):
            self.log(logs)
        else:
            self.log(logs, start_time)

    # --- a micro-batch

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run a micro-batch forward and backward, and return its part of the step's loss.

        An override calls it by `super()`, once: the weight of a micro-batch in its step is applied here.
        """
        return self.engine.run_micro_batch(model, inputs, num_items_in_batch)

    def take_micro_batch(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        """Return what `training_step` does with the next micro-batch; called by transformers' loop."""
        before = self._step.turn
        loss = self.training_step(model, inputs, None)
        if self._step.turn != before + 1:
            raise ConfigError(
                f"{type(self).__name__}.training_step must call super().training_step(model, inputs, ...) once for "
                f"each batch, and called it {self._step.turn - before} times: gradients would not have the weight that "
                "their samples have in the step."
            )
        return loss

    # --- the beginning of a run

    @property
    def optimizer(self) -> Any:
        """The optimizer; None while a subclass is making it, as in transformers."""
        return self._made if self._is_building else self.backend.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_building:
            self._made = optimizer
        else:
            BaseTrainer.optimizer.fset(self, optimizer)  # type: ignore[attr-defined]

    def _build_optimizer(self) -> torch.optim.Optimizer:
        making = [name for name in ("create_optimizer", "create_optimizer_and_scheduler") if name in self._overridden]
        if not making or self._is_building:
            return self._default_optimizer()
        self._is_building, self._made = True, None
        try:
            if "create_optimizer" in making:
                self._made = self.create_optimizer() or self._made
            else:
                self.lr_scheduler = None
                self.create_optimizer_and_scheduler(self.total_steps or 0)
                self._own_scheduler = self.lr_scheduler
            if self._made is None:
                raise ConfigError(f"{type(self).__name__}.{making[0]} made no optimizer. Return it, or set it.")
            return self._made
        finally:
            self._is_building = False

    def _default_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer that a subclass without one of its own has."""
        return super()._build_optimizer()

    def _begin_run(self, resumes: bool) -> None:
        self._begins = True
        try:
            if "get_train_dataloader" in self._overridden:
                self._sets.take_train(unprepared(self.get_train_dataloader()))
                self.lifecycle.progress.epoch_size = self._sets.train.size
            if "get_eval_dataloader" in self._overridden and self._evaluates:
                self._sets.take_eval(self._eval_loader_of(None))
            if not self._is_set_up:
                self._finish_setup()
            super()._begin_run(resumes)
        finally:
            self._begins = False

    def _finish_setup(self, lr_scheduler: Any = None, warmup_steps: int | None = None) -> None:
        self._is_set_up = self._begins or self._overridden.isdisjoint(_AT_THE_START)
        if not self._is_set_up:
            return
        super()._finish_setup(lr_scheduler, warmup_steps)
        if "create_scheduler" in self._overridden:
            self.lr_scheduler = None
            self.lr_scheduler = self.create_scheduler(self.total_steps or 0, self.optimizer) or self.lr_scheduler
        elif "create_optimizer_and_scheduler" in self._overridden and self._own_scheduler is not None:
            self.lr_scheduler = self._own_scheduler

    # --- data

    def _eval_loader_of(self, dataset: Any) -> Any:
        """Return what `get_eval_dataloader` of a subclass makes of a set, or of each of several."""
        named = self.eval_dataset if dataset is None else dataset
        if is_named_sets(named):
            return {name: unprepared(self.get_eval_dataloader(one)) for name, one in named.items()}
        return unprepared(self.get_eval_dataloader(dataset))


if not TYPE_CHECKING:  # to which any name would be an attribute
    Calls.__getattr__ = Calls._of_engine


def _takes(function: Any, *args: Any) -> bool:
    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        return False
    return True


def _parts(predictions: Any) -> Sequence[Any]:
    return predictions if isinstance(predictions, tuple) else (predictions,)


def _copied(batch: Any) -> Any:
    """Return a batch from which labels may be popped."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def _read_results(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
