"""BaseTrainer: the arguments, the parts of a run, and the public methods."""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from omnitrain.arguments import (
    NoExtraArguments,
    PrecisionName,
    ScheduleName,
    Settings,
    accumulation_stages,
    change_setting,
    check_same_on_ranks,
    check_settings,
    describe,
    describe_all,
    get_construction,
    has_changing_batch_size,
    parse_init_from,
    parse_seconds,
    reconstruct,
    reject_assignment,
    reject_class,
    resolve_accumulation,
    samples_of_step,
    takes_arguments,
)
from omnitrain.backends.backend import Backend
from omnitrain.callbacks.early_stopping import EarlyStopping
from omnitrain.checkpoint import state_dicts
from omnitrain.checkpoint.checkpointer import Checkpointer, check_allowed, locked
from omnitrain.checkpoint.contents import Contents, group_options
from omnitrain.checkpoint.eval_weights import EvalWeights
from omnitrain.checkpoint.initial_weights import load_initial
from omnitrain.checkpoint.mirrored_store import make_store
from omnitrain.checkpoint.model_files import save_model
from omnitrain.checkpoint.setting_changes import InitialOptions, constructor_arguments, initial_group_options
from omnitrain.checkpoint.store import Store
from omnitrain.checkpoint.tensor_files import DTYPES, unsaved_dtype
from omnitrain.compute.activation_checkpointing import recompute_activations
from omnitrain.compute.precision import Precision, matmul_precision
from omnitrain.compute.random_state import deterministic as deterministic_kernels
from omnitrain.compute.random_state import isolated_rng
from omnitrain.config import overrides
from omnitrain.config.instantiation import TrainerConfig
from omnitrain.core.duration import Duration, Interval, Limits
from omnitrain.core.errors import ConfigError, DistributedError, NonFiniteError, add_location
from omnitrain.core.events import STOP_REASONS, Algorithm, Callback, Control, Event, check_algorithms, find_overrides
from omnitrain.core.foreign_names import ATTRIBUTES, explain_call
from omnitrain.core.history import MetricsDict, write_results
from omnitrain.core.objective import Objective
from omnitrain.core.paths import local_path, run_folder
from omnitrain.core.progress import Progress
from omnitrain.core.secrets import mask_secrets, mask_text
from omnitrain.data.collation import padding_collator
from omnitrain.data.loaders import by_name, close_loaders
from omnitrain.data.sets import Columns, Sets, is_user_defined
from omnitrain.data.workers import report_dead_workers
from omnitrain.distributed.ranks import Ranks
from omnitrain.distributed.rendezvous import reject_several_processes
from omnitrain.distributed.signals import signal_error
from omnitrain.loggers.notebook import show_in_notebooks, trainer_html
from omnitrain.metrics.scorer import Scorer, make_scorer, scores_for
from omnitrain.model.losses import LossMean
from omnitrain.model.units import ModelUnit, check_untrained_loss, forward_names, move_loss, move_unit
from omnitrain.optim.build import (
    ScheduleLR,
    build_optimizer,
    build_scheduler,
    check_optimizers,
    default_rate,
    follows_evaluations,
)
from omnitrain.optim.param_groups import freeze_parameters, group_parameters
from omnitrain.optim.schedules import RunLength, Schedule
from omnitrain.trainer.compilation import Compiled, check_compilable, compile_ahead
from omnitrain.trainer.default_callbacks import default_callbacks, make_loggers
from omnitrain.trainer.evaluation import Evaluation, Predictions, metric_direction
from omnitrain.trainer.exporting import export_model
from omnitrain.trainer.failing_samples import add_device_remedy
from omnitrain.trainer.feed import Feed
from omnitrain.trainer.hooks import (
    NEVER_CALLED,
    SEE_BATCHES,
    Hooks,
    members_of_user,
    reject_event_methods,
    reject_uncalled_methods,
)
from omnitrain.trainer.lifecycle import Lifecycle
from omnitrain.trainer.loop import Loop
from omnitrain.trainer.step import Step

if TYPE_CHECKING:
    from omnitrain.diagnostics.check import CheckResult
    from omnitrain.diagnostics.plan import RunPlan

logger: logging.Logger = logging.getLogger("omnitrain")


class BaseTrainer(Hooks, ABC):
    """The base class of all trainers: one lifecycle, one loop, and hooks for what differs.

    Use `Trainer` on one device. A subclass needs to override only `_setup_training_components`, `_prepare_batch` and
    `_train_epoch`.
    """

    config: TrainerConfig
    """What the trainer was made with; `print(trainer.config)` shows it as a file for `omnitrain train`."""
    lifecycle: Lifecycle
    mesh: Any
    """Torch's `DeviceMesh`, with the dimensions of `parallelism_config` that have several ranks; None without."""
    train_dataset: Any
    eval_dataset: Any
    test_dataset: Any
    data_collator: Callable[[Any], Any] | None
    processing_class: Any
    batch_size: int
    """Samples in a micro-batch of one rank."""
    eval_batch_size: int
    gradient_accumulation_steps: int
    epochs: int | float | None
    max_steps: int | None
    limits: Limits
    learning_rate: float
    weight_decay: float
    max_grad_norm: float | None
    grad_reduction: Literal["mean", "sum", "per-token-mean"]
    loss_fn: Callable[[Any, Any], Any] | None
    compute_metrics: Any
    scorer: Scorer
    save_dir: Path | None
    store: Store | None
    seed: int
    on_nonfinite: Literal["raise", "skip", "warn"]
    trial_name: str | None
    _feed: Feed
    _step: Step
    _loop: Loop
    _evaluation: Evaluation
    _checkpointer: Checkpointer
    # What a subclass makes these parts of.
    _evaluation_class: ClassVar[type[Evaluation]] = Evaluation
    _loop_class: ClassVar[type[Loop]] = Loop

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        never_called = getattr(cls, "NEVER_CALLED", NEVER_CALLED)
        for name, value in members_of_user(cls).items():
            is_event = name.startswith("on_") and callable(value)
            instead = "a callback, a subclass of omnitrain.Callback," if is_event else never_called.get(name)
            if instead is not None:
                raise TypeError(f"{cls.__name__} overrides {name}, which is never called. Use {instead} instead.")

    @takes_arguments
    def __init__(
        self,
        model: nn.Module,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        test_dataset: Any = None,
        *,
        # data
        train_loader: Iterable[Any] | None = None,
        eval_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
        test_loader: Iterable[Any] | None = None,
        data_collator: Callable[[Any], Any] | None = None,
        batch_size: int = 8,
        microbatch_size: int | Literal["auto"] | None = None,
        eval_batch_size: int | None = None,
        global_batch_size: int | Mapping[Any, int] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        prefetch_factor: int | None = None,
        processing_class: Any = None,
        # length
        epochs: int | float | None = None,
        max_steps: int | None = None,
        max_duration: int | str | Duration | None = None,
        # optimizer
        optimizer: torch.optim.Optimizer | str | Callable[..., torch.optim.Optimizer] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        learning_rate: float = 2e-5,
        weight_decay: float = 0.0,
        lr_scheduler: Schedule | LRScheduler | ScheduleName | Callable[[Any], Any] | None = None,
        lr_scheduler_kwargs: Mapping[str, Any] | None = None,
        warmup_steps: int | float | str | Duration = 0,
        scheduler_interval: Literal["step", "epoch"] = "step",
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = 1.0,
        grad_reduction: Literal["mean", "sum", "per-token-mean"] = "mean",
        param_groups: Sequence[Mapping[str, Any]] | None = None,
        freeze: Sequence[str] | None = None,
        # loss and metrics
        loss_fn: Callable[[Any, Any], torch.Tensor | Mapping[str, torch.Tensor]] | None = None,
        unit: Callable[..., Any] | None = None,
        compute_metrics: Any = None,
        label_names: Sequence[str] | None = None,
        optimization_metric: str = "loss",
        optimization_direction: Literal["max", "min"] | None = None,
        patience: int | str | Duration | None = None,
        delta: float = 0.0,
        early_stopper: Callable[[int, float], bool] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        sanity: bool = True,
        # cadence
        eval_steps: Interval | None = None,
        eval_on_start: bool = False,
        save_steps: Interval | None = None,
        log_steps: Interval = 10,
        # checkpoints
        save_dir: str | Path | None = None,
        save_total_limit: int | None = None,
        keep_best: int = 1,
        keep_every: int | None = None,
        load_best_at_end: bool | None = None,
        overwrite: bool = False,
        save_required: bool = False,
        save_only_model: bool | Literal["all_but_last"] = False,
        save_frozen: bool | None = None,
        async_save: bool = False,
        consolidate: bool | None = None,
        init_from: str | Path | Mapping[str, Any] | None = None,
        # precision and placement
        autocast: PrecisionName | torch.dtype | None = None,
        dtypes: Mapping[str, PrecisionName | torch.dtype] | None = None,
        fp16_loss_scale: tuple[float, float] | tuple[float, float, int] = (65536.0, 1e-4),
        matmul_precision: Literal["highest", "high", "medium"] | None = None,
        compile: bool | Mapping[str, Any] = False,
        gradient_checkpointing: bool | Sequence[str] = False,
        device: str | torch.device | None = None,
        # run
        seed: int = 42,
        deterministic: bool = False,
        on_nonfinite: Literal["raise", "skip", "warn"] = "raise",
        detect_anomaly: bool = False,
        timeout: float | str | Duration | None = None,
        callbacks: Iterable[Callback] = (),
        loggers: str | Sequence[object] | None = None,
        algorithms: Iterable[Algorithm] = (),
        progress_bar: bool | None = None,
        trial_name: str | None = None,
        **unknown: Unpack[NoExtraArguments],
    ) -> None:
        """Set up a trainer; nothing is trained or written before `train()`.

        The ten that matter first: `loss_fn`, `compute_metrics`, `optimization_metric`, `learning_rate`, `batch_size`,
        `epochs`, `patience`, `save_dir`, `autocast` and `seed`. All are listed below in groups, as in the signature:
        data, length, optimizer, loss and metrics, cadence, checkpoints, precision and placement, and the run.

        Args:
            model: Any `nn.Module`; it is moved to the device and trained in place.
            train_dataset: Map-style dataset, iterable, tensors, or a `DataLoader`; None to evaluate only.
            eval_dataset: The same, or a dict of named sets; its evaluations select the best checkpoint.
            test_dataset: The same, for `test()`; never used to select anything.
            train_loader: Your own loader instead of `train_dataset`, used unchanged.
            eval_loader: The same instead of `eval_dataset`.
            test_loader: The same instead of `test_dataset`.
            data_collator: A function from a list of samples to a batch; None is `Collator()`, which stacks and pads.
            batch_size: Samples per forward pass on each process; default 8.
            microbatch_size: Splits each training batch into parts of so many rows; "auto" finds a size that fits.
            eval_batch_size: The same for evaluations; None is `batch_size`.
            global_batch_size: Samples per step over all ranks, or {0: 64, "0.2dur": 128}; sets the accumulation.
            shuffle: Whether to shuffle the training samples again in each epoch, from `seed`; default True.
            drop_last: Whether to drop the last step of an epoch if it is short of samples; default False.
            num_workers: Worker processes per loader; default 0.
            pin_memory: Whether to put batches into page-locked memory; None does so with a GPU.
            prefetch_factor: Batches that each worker loads in advance; None is PyTorch's default, 2.
            processing_class: Tokenizer or processor; pads batches unless `data_collator` is given, and is saved.
            epochs: Passes over the training data, such as 3 or 2.5; None is 3, or no limit if another limit is set.
            max_steps: Optimizer steps, not counting skipped ones; the first limit reached ends the run.
            max_duration: Any other length, such as "4e4sp" (samples), "3e6tok" or "2h30m"; an int counts epochs.
            optimizer: An instance, a class, its name or path, or a callable of the parameters; None is fused AdamW.
            optimizer_kwargs: What the default optimizer or a class is made with, such as {"betas": (0.9, 0.95)}.
            learning_rate: For the default optimizer or a class; default 2e-5 for AdamW, otherwise the optimizer's own.
            weight_decay: For the default optimizer or a class; default 0.
            lr_scheduler: A name, a `Schedule`, an instance, or a callable of the optimizer; None is a constant rate.
            lr_scheduler_kwargs: What a schedule by name, path or class is made with, such as {"min_lr": 1e-6}.
            warmup_steps: Over what the rate rises linearly from 0: steps, a share such as 0.1, or a duration.
            scheduler_interval: When the schedule advances: after each update ("step", default) or each "epoch".
            gradient_accumulation_steps: Micro-batches per optimizer step; default 1.
            max_grad_norm: Clips the norm of the gradients; default 1.0, None does not clip. The norm is always logged.
            grad_reduction: "mean" (default) over samples or labels, "per-token-mean" over labels only, or "sum".
            param_groups: Options by names of parameters: [{"match": "bias|norm", "weight_decay": 0}, ...].
            freeze: Regular expressions; parameters in whose names one of them is found do not train.
            loss_fn: Called as `loss_fn(outputs, labels)`; None takes the loss from what the model returns.
            unit: Called as `unit(batch)` or `unit(model, batch)`; returns the loss, or (sum of losses, targets).
            compute_metrics: Names of metrics, a function, a torchmetrics metric, or a list of these.
            label_names: Keys of the labels in a dict batch; several give a tuple, None tries the usual names.
            optimization_metric: The metric that decides which evaluation is best; default "loss".
            optimization_direction: "max" or "min"; None infers it from the metric, or raises an error.
            patience: Stop after so many evaluations without a gain, or so long after one, "2ep"; None and -1 never.
            delta: A gain must be larger than this to count for `patience`; default 0.
            early_stopper: Called as `f(step, score)` after each evaluation; True ends the run.
            preprocess_logits_for_metrics: Called as f(logits, labels) in evaluations; metrics get its result.
            sanity: Whether to run and score one batch of each evaluation set before step 1, to find errors early.
            eval_steps: Steps between evaluations, "0.5ep", "500ba after 2ep", a function or a list; None is each epoch.
            eval_on_start: Whether to evaluate before the first step; default False.
            save_steps: Steps between checkpoints, as `eval_steps`; None saves after each epoch, if `save_dir` is set.
            log_steps: Steps between logs, as `eval_steps`; default 10.
            save_dir: Folder, or address such as s3://bucket/run, for the files of the run; None writes nothing.
            save_total_limit: How many of the newest checkpoints to keep; None keeps all.
            keep_best: How many of the best to keep, each saved when found; default 1. 0 saves only at intervals.
            keep_every: With `save_total_limit`, also keep checkpoints of steps divisible by this.
            load_best_at_end: Whether to end with the best weights; None does so with an evaluation set.
            overwrite: Whether a fresh run may replace the checkpoints in `save_dir`; default False.
            save_required: Whether a failing disk ends the run; by default it is reported, and the run continues.
            save_only_model: Whether to save weights only, without resume; "all_but_last" keeps the newest whole.
            save_frozen: Whether to save weights that are not trained; None leaves them out if there are PEFT adapters.
            async_save: Whether to write checkpoints in the background; default False.
            consolidate: Whether checkpoints hold sharded weights put together; None does so up to 5 GB of them.
            init_from: Weights to begin with: a path, or {"path": ..., "ignore": [globs], "convert": function}.
            autocast: Precision of the forward pass and the loss: "fp32" (default), "bf16", "fp16" or "fp8".
            dtypes: Dtypes of "parameters", "buffers", "inputs" and "reductions", such as {"reductions": "fp32"}.
            fp16_loss_scale: (initial, minimum, steps until it doubles) of the fp16 loss scale; the third is 2000.
            matmul_precision: "high" lets a GPU compute products of fp32 matrices in TF32; None leaves it unchanged.
            compile: Whether to use `torch.compile` on the model, or its options, such as {"mode": "max-autotune"}.
            gradient_checkpointing: Whether to recompute activations to save memory; or regexes of module names.
            device: Where to train; None is the first available of cuda, xpu, mps, cpu.
            seed: Seed for the order of samples, augmentation, dropout and evaluation; default 42.
            deterministic: Whether to allow only deterministic kernels during `train()`; default False.
            on_nonfinite: What to do if a loss or gradient is not finite: "raise" (default), "skip" the step or "warn".
            detect_anomaly: Whether to run under PyTorch's anomaly detection, which is slow; default False.
            timeout: End the run after this long without progress: seconds, or "10m"; None is 30m on several ranks only.
            callbacks: Instances of `Callback`.
            loggers: Where logs go besides `save_dir`: "tensorboard", "wandb", "mlflow", "csv", ..., or a list of them.
            algorithms: Instances of `Algorithm`, applied in this order.
            progress_bar: None shows a bar on terminals, else plain lines; True forces the bar, False prints nothing.
            trial_name: Name of the run for loggers.

        Raises:
            ConfigError: If an argument is wrong, or two contradict each other.
            DistributedError: If it is one of several processes of a launch, each of which would train by itself.
            ObjectiveError: If it is unknown whether a higher or a lower `optimization_metric` is better.
            TypeError: If arguments are unknown; the message lists all of them with the nearest names.
        """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("fixed_settings", ()):
            reject_assignment(self, name, value)
        super().__setattr__(name, value)
        vars(self).get("_described", {}).clear()

    def _construct(self, arguments: dict[str, Any], ranks: Ranks | None = None) -> None:
        """Build the trainer."""
        if ranks is None:
            reject_several_processes(type(self).__name__)
        model = arguments.pop("model")
        _check_model(model)
        place = arguments.get("save_dir")
        if place is not None:
            arguments["save_dir"] = run_folder(place, "save_dir")
        if arguments.get("init_from") is not None:
            arguments["init_from"] = parse_init_from(arguments["init_from"])
        if "learning_rate" not in arguments and (rate := default_rate(arguments.get("optimizer"))) is not None:
            arguments["learning_rate"] = rate
        settings = Settings.of(arguments)
        check_settings(settings)
        if settings.data_collator is None:
            settings = replace(settings, data_collator=padding_collator(settings.processing_class))
        self.settings: Settings = settings
        parts = {name: getattr(settings, name) for name in ("optimizer", "lr_scheduler", "unit", "loss_fn")}
        reject_event_methods(model=model, **parts)
        reject_uncalled_methods(model, settings, type(self))
        self.ranks: Ranks = ranks or Ranks()
        self.mesh = self.ranks.mesh
        if self.ranks.world_size > 1:
            check_same_on_ranks(self.ranks, {"trainer": describe(type(self)), **describe_all(settings.to_dict())})
        self.train_dataset, self.eval_dataset = settings.train_dataset, settings.eval_dataset
        self.test_dataset, self.data_collator = settings.test_dataset, settings.data_collator
        self.processing_class = settings.processing_class
        self.batch_size = settings.batch_size
        self.eval_batch_size = settings.eval_batch_size or settings.batch_size
        self.epochs, self.max_steps = settings.epochs, settings.max_steps
        self.limits = Limits(settings.epochs, settings.max_steps, settings.max_duration)
        self.learning_rate, self.weight_decay = settings.learning_rate, settings.weight_decay
        self.scheduler_interval = settings.scheduler_interval
        self.max_grad_norm, self.grad_reduction = settings.max_grad_norm, settings.grad_reduction
        self.loss_fn = settings.loss_fn
        self.compute_metrics = settings.compute_metrics
        scores = scores_for(settings.loss_fn, model)
        self.scorer = make_scorer(settings.compute_metrics, scores, settings.processing_class)
        self.save_dir = cast("Path | None", settings.save_dir)
        self.store = None if place is None else make_store(place, settings.save_required)
        self._timeout = None if settings.timeout is None else parse_seconds("timeout", settings.timeout)
        self.seed, self.on_nonfinite, self.trial_name = settings.seed, settings.on_nonfinite, settings.trial_name
        self.algorithms: list[Algorithm] = list(settings.algorithms)
        for algorithm in self.algorithms:
            reject_class("algorithms", algorithm)
            if not isinstance(algorithm, Algorithm):
                raise ConfigError(f"`algorithms` must hold omnitrain.Algorithm instances, got {algorithm!r}.")
            reject_event_methods(algorithms=algorithm)
        check_algorithms(self.algorithms)
        self._callbacks = list(settings.callbacks)
        for callback in self._callbacks:
            reject_class("callbacks", callback)
        self._callbacks += make_loggers(settings.loggers, self._callbacks, settings.save_dir is not None)
        self._initial = InitialOptions()
        # What `resolved_config` has described, since the latest assignment to the trainer.
        self._described: dict[str, Any] = {}
        self.lr_scheduler: Any = None
        self.device: torch.device = self._choose_device(settings.device)
        self.gradient_accumulation_steps = resolve_accumulation(settings, self.ranks.data.size)
        self.precision: Precision = Precision.parse(
            settings.autocast, self.device, settings.matmul_precision, settings.dtypes
        )
        self._set_up_model(model)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for `pickle` and `copy.deepcopy`: how the trainer was made, its weights and its history.

        Raises:
            TypeError: In a run, and with several processes.
        """
        if self.lifecycle.is_running or self.world_size > 1:
            where = "while it trains" if self.lifecycle.is_running else "that is one of several processes"
            raise TypeError(
                f"{type(self).__name__} cannot be pickled or copied {where}. Save a checkpoint instead: "
                "`save_checkpoint()`, and `train(resume_from=...)` of another trainer."
            )
        weights = None if "model" in vars(self)["_arguments"] else self.get_model().state_dict()  # of `model_init`
        return {**get_construction(self), "weights": weights, "run": self.lifecycle.outcome()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Build the trainer again; the optimizer's state of a run that has ended is not in a copy."""
        reconstruct(self, state)
        if state["weights"] is not None:
            self.get_model().load_state_dict(state["weights"])
        self.lifecycle.load_outcome(state["run"])
        if self.progress.step:
            self._checkpointer.finished_run = "this trainer is a copy, without the optimizer's state"

    # --- the parts of a run

    def _set_up_model(self, model: nn.Module) -> None:
        """Build the unit and the backend of a model, and the parts of a run."""
        settings, dtypes = self.settings, self.precision.dtypes
        if self.store is not None:
            _check_dtypes(model)
        if dtypes.inputs is not None and "_prepare_batch" in members_of_user(type(self)):
            raise ConfigError(
                f"`dtypes={dtypes.described!r}` sets the inputs, which `_prepare_batch` of {type(self).__name__} "
                "prepares itself. Cast them there, and leave 'inputs' out."
            )
        # before anything holds a reference to the tensors: expanded ones are replaced
        state_dicts.unshare_elements((*model.parameters(), *model.buffers()))
        initial: Any = None
        if settings.init_from is not None:
            initial = load_initial(model, cast("Mapping[str, Any]", settings.init_from), self.ranks)
        # before the backend: DDP and ZeRO look at `requires_grad` when they wrap the model
        if settings.freeze is not None:
            freeze_parameters(state_dicts.named_parameters(model), settings.freeze)
        if settings.gradient_checkpointing:
            recompute_activations(state_dicts.unwrap(model), settings.gradient_checkpointing)
        unit = settings.unit
        check_untrained_loss("`unit`", unit, model)
        move_loss(settings.loss_fn, model, self.device)
        move_unit(unit, model, self.device)
        self.unit: Any = unit if unit is not None else ModelUnit(model, settings.loss_fn, settings.label_names or ())
        mean = getattr(self.unit, "loss_mean", None)
        bare = state_dicts.unwrap(model)
        self.loss_mean: LossMean = mean if isinstance(mean, LossMean) else LossMean.of(self.unit, bare)
        self.backend: Backend = self._make_backend(model)
        self.backend.initial = initial
        self.backend.set_dtypes(dtypes)
        dtypes.cast(bare)
        self.precision.convert(bare)
        # after every conversion, or the first step would compile for dtypes that nobody uses
        if settings.compile is not None and settings.compile is not False:
            self.backend.compile_options = {} if settings.compile is True else settings.compile
            self.backend.maybe_compile(model)  # which raises now for options that are wrong
        self._sets = self._make_sets()
        self._assemble()
        self._setup_training_components()
        self._finish_setup()

    def _make_sets(self) -> Sets:
        """Return the data."""
        settings = self.settings
        handlers = [settings.data_collator, *settings.algorithms]
        reads_batches = bool(members_of_user(type(self)).keys() & SEE_BATCHES) or any(map(is_user_defined, handlers))
        names = None if reads_batches or type(self.unit) is not ModelUnit else self.unit.columns
        columns, adds_mask = Columns(names, self.get_model()), "attention_mask" in forward_names(self.get_model())
        return Sets(settings, self.device, self.ranks, columns, adds_mask)

    def _make_backend(self, model: nn.Module, make: Callable[..., Backend] = Backend) -> Backend:
        """Return the backend, by its class or another maker; `_setup_training_components` puts the model in place."""

        def grouped() -> torch.optim.Optimizer:
            optimizer, groups = self._build_optimizer(), self.settings.param_groups
            if groups is not None:
                group_parameters(optimizer, state_dicts.named_parameters(self.model), groups, self.is_main_process)
            return optimizer

        scaler = self.precision.grad_scaler(self.settings.fp16_loss_scale)
        return make(model, self.device, scaler, grouped, self.ranks)

    def _build_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of the arguments, built for the current model."""
        settings = self.settings
        return build_optimizer(
            settings.optimizer,
            state_dicts.unwrap(self.model),
            settings.learning_rate,
            settings.weight_decay,
            settings.optimizer_kwargs,
        )

    @property
    def _evaluates(self) -> bool:
        """Whether the run evaluates."""
        return self.eval_loader is not None

    def _assemble(self) -> None:
        """Make the parts of a run, which start counting at zero."""
        settings, ranks, sets = self.settings, self.ranks, self._sets
        metric = settings.optimization_metric
        direction = metric_direction(metric, self.scorer, sets.eval)
        objective = Objective(metric, settings.optimization_direction, settings.delta, direction)
        callbacks = default_callbacks(settings, self.limits, self.store, self._evaluates, self._callbacks)
        lifecycle = self.lifecycle = Lifecycle(self, [*callbacks, *self._callbacks], objective, self._evaluates)
        lifecycle.progress.epoch_size = None if sets.train is None else sets.train.size
        previous = vars(self).get("_feed")
        stages = accumulation_stages(settings, self.limits, ranks.data.size, lifecycle.progress.epoch_size)
        self._feed = Feed(self, lifecycle, self.gradient_accumulation_steps, stages)
        lifecycle.annotators = (self.backend.annotate, self._feed.annotate)
        if previous is not None:  # of an earlier run
            self._feed.microbatch_size = previous.microbatch_size
        self._step = Step(self, lifecycle, sets, self._feed)
        eval_weights = EvalWeights(self, self.backend, self.algorithms)
        contents = Contents(self, lifecycle, self._step, sets, self._initial, eval_weights)
        self._checkpointer = Checkpointer(self, lifecycle, contents, eval_weights, self.store, self._write_extra_files)
        self._evaluation = self._evaluation_class(self, self._feed, self.scorer, eval_weights, lifecycle)
        if self._evaluates:
            self._evaluation.check(objective, sets.eval)
        self._loop = self._loop_class(
            self, lifecycle, sets, self._feed, self._step, self._evaluation, self._checkpointer
        )

    def _finish_setup(self, lr_scheduler: Any = None, warmup_steps: Any = None) -> None:
        """Build the schedule, once `_setup_training_components` has put the model in place."""
        self.lr_scheduler = None
        if self.train_loader is None and not self._loop.has_custom_epoch:
            self._register_components()
            return
        spec = self.settings.lr_scheduler if lr_scheduler is None else lr_scheduler
        warmup = self.settings.warmup_steps if warmup_steps is None else warmup_steps
        self.settings = replace(self.settings, lr_scheduler=spec, warmup_steps=warmup)
        self._initial.record_optimizer(self.backend.groups)
        # another part has made the schedule with its options, unless it has named it
        options = self.settings.lr_scheduler_kwargs if lr_scheduler is None or isinstance(lr_scheduler, str) else None
        size = None if self.train_loader is None else self.train_loader.size
        run_length = RunLength.of(self.limits, self.steps_per_epoch, size, self.settings.scheduler_interval)
        self.lr_scheduler = build_scheduler(
            spec, self.optimizer, warmup_steps=warmup, options=options, run_length=run_length,
            mode=self.objective.direction,
        )  # fmt: skip
        if not isinstance(spec, str | Schedule | None):
            self._initial.record_schedule(self.lr_scheduler)
        if self._loop.has_custom_epoch and isinstance(self.lr_scheduler, ScheduleLR) and self.lr_scheduler.follows:
            raise ConfigError(
                f"`lr_scheduler={self.lr_scheduler.schedule!r}` follows samples, tokens or time, which nothing counts "
                "in a custom `_train_epoch`. Give its lengths in steps or epochs, and the run's by `max_steps` or "
                "`epochs`."
            )
        if follows_evaluations(self.lr_scheduler):
            if not self._evaluates:
                kind = type(self.lr_scheduler).__name__
                raise ConfigError(f"`lr_scheduler={kind}` follows evaluations. Pass `eval_dataset`.")
            if self.settings.scheduler_interval == "epoch":
                raise ConfigError(
                    "`scheduler_interval='epoch'` has no effect on a schedule that follows evaluations. Leave it out."
                )
            change_setting(self, scheduler_interval="evaluation")
        self._register_components()

    def _register_components(self) -> None:
        """Register the model, the optimizer and the schedule, if they are callbacks or hooks."""
        optimizer = self.backend.optimizer if self._sets.train is not None or self._loop.has_custom_epoch else None
        bare = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        self.lifecycle.register_components(state_dicts.unwrap(self.backend.model), bare, self.lr_scheduler)

    def _write_extra_files(self, folder: Path) -> None:
        """Write the tokenizer or processor next to the weights of a checkpoint: `from_pretrained` opens both."""
        if self.processing_class is not None:
            self.processing_class.save_pretrained(str(folder))

    # --- training

    @explain_call
    def train(
        self,
        resume_from: str | Path | None = None,
        allow_change: Collection[str] = (),
        *,
        more: int | float | str | Duration | None = None,
    ) -> MetricsDict:
        """Train to the first limit, and return the history with the best evaluation.

        A second call trains again from the present weights, with fresh progress and history; with `more` it continues
        the run instead. The random number generators of torch, numpy and Python are restored after the call, even after
        an error.

        Args:
            resume_from: The folder of a checkpoint, "last", "best", or "auto": the newest undamaged one in `save_dir`,
                or a fresh start if there is none.
            allow_change: Names of arguments (settings, data, functions) that may differ from those of the checkpoint.
            more: Continue the run that has ended for so much longer, such as 2 (epochs), "500ba" or "1h", from the
                weights of its last step, as if it had had that length from the start; the trainer keeps that length.
                After early stopping, `patience` is reset.

        Raises:
            ConfigError: If no run has ended that `more` could continue, or another thread of the program trains.
            CheckpointError: If the checkpoint is damaged, or was saved with settings that would change the run, or if
                another run writes into `save_dir`.
            NonFiniteError: If a loss or gradient is not finite and `on_nonfinite="raise"`; the weights are intact.
            KeyboardInterrupt, SystemExit: After SIGINT or SIGTERM has ended the run in order.
        """
        if self.lifecycle.is_running:
            raise ConfigError(
                "`train()` was called within `train()`, by a callback or a hook of this trainer. A callback can call "
                "request_evaluate(), request_save() or stop(); another run needs another trainer."
            )
        self._described.clear()  # PyTorch's precision of products may have changed since
        if overrides.is_active():
            resume_from = overrides.override_run(self, resume_from, more)
        with (
            contextlib.ExitStack() as after,
            self._calling("train()", draws=True),
            isolated_rng(self.device),
            locked(self.store, self.ranks, after),
        ):
            if self._sets.train is None and not self._loop.has_custom_epoch:
                raise ConfigError("There is nothing to train on: pass `train_dataset` or `train_loader`.")
            check_allowed(allow_change)
            if self.ranks.world_size > 1:
                # before the first collective that depends on an argument, which would hang where these differ
                check_same_on_ranks(self.ranks, self._described_run(resume_from, allow_change, more))
            if more is not None:
                self._continue_run(more, resume_from, allow_change)
            else:
                self._start_run(resume_from, allow_change)
            self._checkpointer.check_disk()
            failed = True
            try:
                with (
                    report_dead_workers(),  # around the others, in whose exits torch's handler of signals may raise
                    _kernels(self.settings, self.precision),
                    self._checkpointer.background(),
                    self._loop.explaining_memory("training"),
                ):
                    self._loop.run()
                failed = False
            except BaseException as error:
                if isinstance(error, Exception) and not isinstance(error, NonFiniteError):  # which says where it was
                    progress = self.progress
                    add_location(error, f"after step {progress.step} (epoch {progress.epoch + 1}), rank {self.rank}")
                    add_device_remedy(error)
                self.lifecycle.failed(error)
                self._checkpointer.finished_run = "its last run failed"
                # the other rank has left on its own signal: a stop that was asked for, not a failure
                if isinstance(error, DistributedError) and self.control.signal:
                    logger.error("%s", error)
                    raise signal_error(self.control.signal) from error
                raise
            finally:
                with contextlib.ExitStack() as ending:  # each of them also after an error, or a second signal
                    ending.callback(self._checkpointer.end_record)
                    ending.callback(self.lifecycle.end_train, failed)
                    self._end_run()
        # raised only now, when callbacks have seen TRAIN_END and the lock is released
        if self.lifecycle.signal:
            raise signal_error(self.lifecycle.signal)
        return self.lifecycle.metrics

    def _start_run(self, resume_from: Any, allow_change: Collection[str]) -> None:
        """Begin a run, afresh or from a checkpoint."""
        checkpointer = self._checkpointer
        checkpoint = None if resume_from is None else checkpointer.find(resume_from)
        if checkpoint is None:
            if resume_from == "auto":
                logger.info("No checkpoint in %r yet: the run starts afresh.", str(self.save_dir))
            else:
                checkpointer.check_save_dir()
            self.backend.check_weights_loaded()
        self._begin_run(resumes=checkpoint is not None)
        self._checkpointer.check_optimizers(vars(self), is_resuming=checkpoint is not None)
        if checkpoint is not None:
            self._checkpointer.resume(checkpoint, allow_change)

    def _continue_run(self, more: Any, resume_from: Any, allow_change: Collection[str]) -> None:
        """Begin a longer run that continues from the end of the previous one."""
        if resume_from is not None or allow_change:
            name = "resume_from" if resume_from is not None else "allow_change"
            raise ConfigError(
                f"`more` continues the run that this trainer has ended, and `{name}` with one from a checkpoint. Leave "
                "one of them out."
            )
        checkpointer, reason, tests = self._checkpointer, self.stop_reason, self.metrics["test"]
        ended, length = checkpointer.require_finished_run(), Limits.after(self.progress, more)
        groups = group_options(self.backend.groups)
        changed = [
            {key: value for key, value in group.items() if key not in previous or previous[key] != value}
            for group, previous in zip(groups, ended.groups, strict=True)
        ]
        checkpoint = None if ended.folder is None else checkpointer.find(ended.folder)
        if checkpoint is not None:  # the optimizer is rebuilt, and the state of both may not fit into memory
            checkpointer.finished_run, ended = "a longer run has begun", replace(ended, parts=())
        change_setting(
            self, settings=replace(self.settings, **length), limits=Limits(**length), epochs=length["epochs"],
            max_steps=length["max_steps"],
        )  # fmt: skip
        self._begin_run(resumes=True, is_live=checkpoint is None)
        if checkpoint is not None:
            self._checkpointer.check_optimizers(vars(self), is_resuming=True)
            self._checkpointer.resume(checkpoint, ())
        self._checkpointer.continue_run(ended, checkpointer, changed)
        self.metrics["test"] = tests
        if reason == "early_stopping":
            self.objective.evaluations_without_gain = 0
            for callback in self.lifecycle.callbacks:
                if isinstance(callback, EarlyStopping):
                    callback.stopped_at = callback.gained_at = None
            logger.info("Early stopping has ended the previous run: `patience` is reset.")

    def _described_run(self, resume_from: Any, allow_change: Collection[str], more: Any) -> dict[str, Any]:
        """Return what the ranks must agree on before they train, as JSON types."""
        described, groups = self.resolved_config(), self.backend.groups
        del described["samples_per_epoch"]  # with the user's own loaders, it may differ between ranks
        spec = self.settings.lr_scheduler
        if spec is None or hasattr(spec, "step"):
            del described["total_steps"]  # which follow from those samples, and decide nothing here
        return described | {
            "optimizer_groups": initial_group_options(groups),  # which may have changed since the trainer was made
            "learning_rates": [float(group["lr"]) for group in groups],
            "resume_from": resume_from if resume_from in (None, "auto", "last", "best") else "a folder",
            "allow_change": sorted(allow_change),
            "more": describe(more),
        }

    def _begin_run(self, resumes: bool, is_live: bool = False) -> None:
        """Reset the counters to zero, and the optimizer if the trainer has trained before.

        If the run `is_live`, it continues with the current optimizer and algorithms.
        """
        for algorithm in () if is_live else self.algorithms:  # first: one may have frozen what an optimizer is to hold
            algorithm.set_up(self)
        former = self.lifecycle.progress.step
        if is_live or former or self.lifecycle.metrics["train_metrics_history"]:
            self._assemble()
            self.lifecycle.trained_before = 0 if resumes else former
            is_given = hasattr(self.settings.optimizer, "param_groups")
            if not is_live and not is_given:
                self.backend.reset_optimizer()
            self._finish_setup()
        optimizer = self.backend.optimizer
        if getattr(self.lr_scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigError(
                "`trainer.lr_scheduler` belongs to another optimizer than `trainer.optimizer`, so it would change "
                "nothing. Assign a schedule of the new optimizer too, or pass `optimizer` to the constructor."
            )
        self._register_components()
        if not is_live:
            self._checkpointer.eval_weights.begin_training()
        self._seed()
        self._step.prepare()
        self._described.clear()  # what comes before may have changed parts in place

    def compile(self, steps: int = 1) -> Compiled:
        """Compile before the run what it would compile in its first steps, and return what was compiled.

        Batches are run forward and backward: those of the first steps, of the last step of an epoch if the data have
        an index, and of each evaluation set the first and the last, one of each shape. No update is made and nothing
        is written: weights, data, random numbers and progress are as before, and callbacks are not called. A later
        `train()` finds everything compiled, and so does another process in the cache of inductor
        (`TORCHINDUCTOR_CACHE_DIR`). With `compile=False`, what you have compiled in the model yourself is.

        Args:
            steps: From how many of the first steps of an epoch batches are taken, for data of many lengths.

        Raises:
            ConfigError: If the run has begun, or the trainer has a custom `_train_epoch` or `_train_step`.
        """
        check_compilable(self._loop, steps)
        with self._rehearsing("compile()"):
            return compile_ahead(self._loop, steps)

    def check(self, samples: int = 10_000, seconds: float = 5.0) -> CheckResult:
        """Look for faults of the data, the model and the loss before the run, in seconds, and leave no trace.

        A batch of up to 16 samples is run some dozen times, and at most `samples` of each set are read. Weights,
        buffers, modes, gradients, data and random numbers are then as before, so a later `train()` gives the same
        numbers. All ranks call it, and get the same result.

        Args:
            samples: How many samples of each set to read, at most.
            seconds: For how long to read each set, and to overfit the batch, at most.

        Raises:
            ConfigError: If the run has begun, or there are no training data.
        """
        from omnitrain.diagnostics.check import check_run

        with self._rehearsing("check()"):
            return check_run(self._loop, samples, seconds)

    def plan(self, device: str | None = None, ranks: int | None = None) -> RunPlan:
        """Return what the run will take: steps, rates, memory, disk, evaluations, saves and time; leave no trace.

        Two steps without an update are run, and one batch of each evaluation set. All ranks call it.

        Args:
            device: The memory of each device of another machine, such as "80GB", where the run is to be; then fake
                tensors stand for the passes, which are not computed, and the time is unknown.
            ranks: The processes of the run, if it is to have others than now.

        Raises:
            ConfigError: If the run has begun, there are no training data, or `device` is no size.
        """
        from omnitrain.diagnostics.plan import plan_run

        with self._rehearsing("plan()"):
            return plan_run(self._loop, device, ranks)

    @contextlib.contextmanager
    def _rehearsing(self, call: str) -> Iterator[None]:
        """Enter a call that runs parts of a run ahead of it, and resets the random numbers."""
        lifecycle = self.lifecycle
        if lifecycle.is_running or lifecycle.progress.step or lifecycle.metrics["train_metrics_history"]:
            raise ConfigError(
                f"`{call}` is for the time before a run, and this trainer is at step {lifecycle.progress.step}. Call "
                "it before `train()` or `load_checkpoint()`."
            )
        if self._sets.train is None and not self._loop.has_custom_epoch:
            raise ConfigError(f"There is nothing for `{call}` to look at: pass `train_dataset` or `train_loader`.")
        with self._calling(call, draws=True), isolated_rng(self.device):
            self._begin_run(resumes=True)
            try:
                with _kernels(self.settings, self.precision), self.lifecycle.suppress_events():
                    yield
            finally:
                self._end_run()

    def _end_run(self) -> None:
        """Undo what a run, or a rehearsal of it, has set up."""
        for end in find_overrides(self.algorithms, "end_run"):
            end(self)
        self._step.guard.release(self.backend.optimizer)
        close_loaders(self._sets.train, self._sets.eval)

    @contextlib.contextmanager
    def _calling(self, what: str, draws: bool = False) -> Iterator[None]:
        """Enter a call that all ranks make, in the mesh of this trainer: the trainers of a program share the ranks.

        If it `draws` random numbers, no other thread may train meanwhile.
        """
        ranks, previous = self.ranks, self.ranks.mesh
        with _only_thread(what) if draws else contextlib.nullcontext():
            ranks.set_mesh(self.mesh)
            try:
                with ranks.collective_call(what, self._timeout):
                    yield
            finally:
                ranks.set_mesh(previous)

    def stop(self, reason: str = "requested") -> None:
        """Request the end of the run at the next step boundary; only the first reason counts."""
        if reason not in STOP_REASONS:
            logger.info("The run was asked to stop: %s", reason)
            reason = "requested"
        self.control.stop = self.control.stop or reason

    def request_evaluate(self) -> None:
        """Request an evaluation at the next step boundary."""
        if not self._evaluates:
            raise ConfigError("An evaluation was requested, but there is no evaluation set. Pass `eval_dataset`.")
        self.control.evaluate = True

    def request_save(self) -> None:
        """Request a checkpoint at the next step boundary."""
        if self.store is None:
            raise ConfigError("A checkpoint was requested, but the trainer has no `save_dir`. Pass one.")
        self.control.save = True

    def request_log(self) -> None:
        """Request a row of logs at the next step boundary."""
        self.control.log = True

    # --- evaluating

    @explain_call
    def evaluate(self, dataset: Any = None, prefix: str = "eval") -> dict[str, float]:
        """Return `<prefix>_loss` and the metrics on a dataset, a loader or a dict of named sets; default: the eval set.

        The history, the best evaluation and the random numbers of the run stay unchanged.
        """
        loader = self.eval_loader if dataset is None else self._sets.loader_for(dataset)
        if loader is None:
            raise ConfigError("There is nothing to evaluate: pass a dataset, or `eval_dataset` to the constructor.")
        with self._calling("evaluate()", draws=True):
            return self._loop.evaluate_outside_run(self._evaluation.evaluate, loader, prefix)

    @explain_call
    def test(self, dataset: Any = None) -> dict[str, float]:
        """Return `test_loss` and the metrics on a dataset or the test set; they never select a checkpoint."""
        loader = self.test_loader if dataset is None else self._sets.loader_for(dataset)
        if loader is None:
            raise ConfigError("There is nothing to test: pass a dataset, or `test_dataset` to the constructor.")
        with self._calling("test()", draws=True):
            metrics = self._loop.evaluate_outside_run(self._evaluation.evaluate, loader, "test")
        progress = self._checkpointer.weights_from or self.progress
        row = {"step": progress.step, "epoch": round(progress.epochs, 6), **metrics}
        self.metrics.add_test(row)
        self.lifecycle.emit(Event.LOG, row)
        return metrics

    @explain_call
    def predict(self, dataset: Any) -> Predictions:
        """Return predictions and labels as arrays, one row per sample in the dataset's order, and any metrics."""
        loader = self._sets.loader_for(dataset)
        if loader is None:
            raise ConfigError("There is nothing to predict: pass a dataset.")
        if isinstance(loader, dict):
            raise ConfigError(
                f"`predict` takes one dataset, got the sets {', '.join(loader)}. Call it for each of them."
            )
        with self._calling("predict()", draws=True):
            self.lifecycle.emit(Event.PREDICT_START)
            predictions = self._loop.evaluate_outside_run(self._evaluation.predict, loader)
            self.lifecycle.emit(Event.PREDICT_END, predictions)
            return predictions

    # --- saving and loading

    @explain_call
    def save_model(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the weights as safetensors to the folder `path`, with config and tokenizer, if any.

        For a model with PEFT adapters, only the adapters are written, in PEFT's format.
        """
        return self._write_model(path, overwrite, self.processing_class)

    def _write_model(self, path: str | Path, overwrite: bool, processor: Any) -> Path:
        """Write the weights, the config and a tokenizer or processor, if any; called on every rank."""
        with self._calling("save_model()"):
            if overrides.is_active():
                path, overwrite = overrides.override_model_folder(path), True
            folder = local_path(path, "path")
            self.backend.check_weights_loaded()
            processors = [] if processor is None else [processor]
            return save_model(
                self.model, folder, overwrite, self._checkpointer.eval_weights.model_tensors(), self.ranks, processors
            )

    @explain_call
    def export(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the model as one file that runs without its code: "model.pt2" by `torch.export`, or "model.onnx".

        It is recorded as evaluations run it, for a batch of any size; a card with inputs, outputs and metrics is
        written next to it, as `<path>.md`. Needs an evaluation set, or a training set, whose first batch is run.

        Raises:
            ConfigError: If the path or the model does not fit, or the file exists and `overwrite` is False.
            MissingExtraError: If ONNX needs a package.
        """
        loaders = by_name(self.train_loader if self.eval_loader is None else self.eval_loader)
        if not loaders:
            raise ConfigError("export() runs the model on a batch: pass `eval_dataset` to the constructor.")
        with self._calling("export()", draws=True), isolated_rng(self.device):
            if overrides.is_active():
                path, overwrite = overrides.override_model_folder(path), True
            return export_model(self._evaluation, next(iter(loaders.values())), local_path(path, "path"), overwrite)

    @explain_call
    def save_checkpoint(self) -> Path:
        """Save a full checkpoint of the current state, and return its folder.

        Raises:
            ConfigError: If there is no `save_dir`.
            CheckpointError: If it cannot be written; earlier checkpoints are untouched.
        """
        with self._calling("save_checkpoint()"), self.lifecycle.untimed():
            self.backend.check_weights_loaded()
            return self._checkpointer.save_now()

    @explain_call
    def load_checkpoint(self, path: str | Path) -> Path:
        """Restore the trainer from a checkpoint (a path, "last" or "best"), and return its folder.

        Raises:
            CheckpointError: If it is missing, damaged, or from another model or optimizer.
        """
        with self._calling("load_checkpoint()"):
            return self._checkpointer.load(path)

    def save_metrics(self, split: str, metrics: Mapping[str, Any]) -> Path:
        """Write metrics to `<split>_results.json` in `save_dir`, or in the current folder if there is none."""
        return write_results(self.save_dir or Path(), split, metrics, self.is_main_process)

    def resolved_config(self) -> dict[str, Any]:
        """Return every setting in force, as JSON types."""
        loader = self._sets.train
        # whatever is assigned clears it, see `__setattr__`; the rest may change without an assignment
        key = getattr(loader, "size", None), id(loader), *map(id, self._callbacks)
        if self._described.get("key") != key:
            settings, has_updates = self.settings, loader is not None or self._loop.has_custom_epoch
            plain = settings.to_dict()
            if isinstance(settings.save_dir, str):  # an address, which may have credentials
                plain["save_dir"] = mask_text(settings.save_dir)
            plain |= {
                "algorithm_options": constructor_arguments(self.algorithms),
                "autocast": self.precision.name,
                "batch_size": self.batch_size,
                "dtypes": self.precision.dtypes.described,
                "callback_options": mask_secrets(constructor_arguments(self._callbacks)),
                "device": str(self.device),
                "eval_batch_size": self.eval_batch_size,
                "gradient_accumulation_steps": self.gradient_accumulation_steps,
                "global_batch_size": settings.global_batch_size or samples_of_step(settings, self._sets.share.size),
            }
            content = {
                "trainer": describe(type(self)),
                "model": describe(state_dicts.class_of(self.backend.model)),
                **describe_all(plain),
                "matmul_precision": self.precision.matmul or matmul_precision(),
                "optimization_direction": self.lifecycle.objective.direction,
                "optimizer": describe(self.backend.optimizer) if has_updates else None,
                "optimizer_groups": self._initial.optimizer,
                "lr_scheduler_options": self._initial.schedule,
                "samples_per_epoch": self._sets.train_size,
                "total_steps": self.total_steps,
                "unit": describe(self.unit),
            }
            self._described.update(key=key, content=content)
        return dict(self._described["content"])

    # --- what the trainer has

    def __repr__(self) -> str:
        if "lifecycle" not in vars(self):  # in an error of the constructor
            return object.__repr__(self)
        size, steps = sum(parameter.numel() for parameter in self.model.parameters()), self.total_steps
        total = "" if steps is None else f" of {steps}"
        end = f", ended by {self.stop_reason!r}" if self.stop_reason else ""
        model = f"{type(self.model).__name__} of {size:,} parameters"
        return f"{type(self).__name__}({model} on {self.device}, step {self.progress.step}{total}{end})"

    if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            try:
                return object.__getattribute__(self, name)  # for the error of a property
            except AttributeError:
                if name not in ATTRIBUTES or hasattr(type(self), name):
                    raise
                text = f"{type(self).__name__} has no attribute {name!r}. {ATTRIBUTES[name]}"
                raise AttributeError(text, name=name, obj=self) from None

    @property
    def model(self) -> nn.Module:
        """The user's module, on every backend; `model_wrapped` is the one that runs."""
        return self.backend.model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self.backend.model, self.backend.wrapped = model, self.backend.maybe_compile(model)

    @property
    def model_wrapped(self) -> nn.Module:
        """The module that runs in a forward pass, the model or its wrapper by DDP, `torch.compile` or DeepSpeed."""
        return self.backend.wrapped

    def get_model(self) -> nn.Module:
        """Return the bare module, without the wrappers of a backend or `torch.compile`."""
        return state_dicts.unwrap(self.model)

    unwrap_model = get_model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer, or one built on first use, after the model is in place."""
        return self.backend.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for name in ("param_groups", "optimizer_kwargs"):
            if getattr(self.settings, name) is not None:
                raise ConfigError(
                    f"`{name}` would have no effect on an optimizer that is assigned. Make it with these, and leave "
                    f"`{name}` out."
                )
        self.settings = replace(self.settings, optimizer=optimizer)  # it stays for further runs
        self.backend.optimizer = optimizer

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Several optimizers by name, for your own `_train_epoch`; empty if there is only one.

        Set it in `_setup_training_components`. Every checkpoint has all of them. The first is `optimizer`: it counts
        the steps of the run and has the schedule.
        """
        return self.backend.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        check_optimizers(optimizers, self.backend.sharding is None)
        self.backend.optimizers = dict(optimizers)
        self.optimizer = next(iter(optimizers.values()))
        self._initial.optimizer = None
        self._initial.record_optimizer(self.backend.groups)

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """PyTorch's GradScaler, enabled under fp16 only. It can be replaced before `train()`."""
        return self.backend.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler) -> None:
        self.backend.scaler = scaler

    @property
    def train_loader(self) -> Any:
        """The loader of the training set, or None."""
        return self._sets.train

    @property
    def eval_loader(self) -> Any:
        """The loader of the evaluation set, a dict of loaders for named sets, or None."""
        return self._sets.eval

    @property
    def test_loader(self) -> Any:
        """The loader of the test set, or None."""
        return self._sets.test

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return self.lifecycle.progress

    @property
    def control(self) -> Control:
        """What callbacks on this rank have requested; all ranks agree on what is done."""
        return self.lifecycle.control

    @property
    def metrics(self) -> MetricsDict:
        """The history of the run and its best evaluation."""
        return self.lifecycle.metrics

    @property
    def objective(self) -> Objective:
        """The metric to optimize, its direction, and its best value so far."""
        return self.lifecycle.objective

    @property
    def stop_reason(self) -> str:
        """Why the run is ending or has ended; empty until then."""
        return self.lifecycle.stop or self.control.stop

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in an epoch; None for data without length, and where `global_batch_size` changes."""
        if has_changing_batch_size(self.settings):
            return None
        try:
            batches = len(self._sets.train)
        except TypeError:
            return None
        return -(-batches // self.gradient_accumulation_steps)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the full run, or None if unknown."""
        loader = self._sets.train
        return self.limits.total_steps(self.steps_per_epoch, None if loader is None else loader.size)

    @property
    def is_main_process(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.ranks.is_main

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """The number of ranks of the run."""
        return self.ranks.world_size


show_in_notebooks(BaseTrainer, trainer_html)  # a method for it would be one more that subclasses might override


def _check_model(model: Any) -> None:
    reject_class("model", model)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`model` must be an nn.Module, got {type(model).__name__}.")
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise ConfigError(
            f"`model` has lazy parameters, {lazy[0]!r} for instance, whose shapes are known after a first "
            "batch. Call the model on one before you pass it: model(batch)."
        )


def _check_dtypes(model: nn.Module) -> None:
    """Raise ConfigError if checkpoints cannot hold a tensor of the model; buffers that do not persist are not saved."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    unknown = [(name, tensor.dtype) for name, tensor in tensors if tensor.dtype not in DTYPES]
    saved = model.state_dict().keys() if unknown else ()
    for name, dtype in unknown:
        if name in saved:
            raise ConfigError(f"`model` cannot be saved: {unsaved_dtype(name, dtype)}")


# The threads that are inside of a call that draws random numbers, with its name, each as often as it has entered.
_threads: list[tuple[threading.Thread, str]] = []
_threads_lock = threading.Lock()


@contextlib.contextmanager
def _only_thread(call: str) -> Iterator[None]:
    """Reject a call while another thread trains, and training while another one evaluates.

    Both would draw from, and seed or restore, the same random number generators.
    """
    thread = threading.current_thread()
    with _threads_lock:
        for other, running in _threads:
            if other is thread or not other.is_alive() or "train()" not in (call, running):  # a fork ends them
                continue
            doing = "trains" if running == "train()" else f"is in `{running}`"
            raise ConfigError(
                f"`{call}` was called in the thread {thread.name!r} while the thread {other.name!r} of this program "
                f"{doing}: they would share their random numbers, so that no run could be repeated. Make the calls "
                "one after another, or each in its own process; a callback's request_evaluate() has a run "
                "evaluate itself."
            )
        _threads.append((thread, call))
    try:
        yield
    finally:
        with _threads_lock:
            _threads.remove((thread, call))


@contextlib.contextmanager
def _kernels(settings: Settings, precision: Precision) -> Iterator[None]:
    """Set PyTorch's kernels and precision of the settings."""
    anomalies = torch.autograd.set_detect_anomaly if settings.detect_anomaly else contextlib.nullcontext
    deterministic = deterministic_kernels(settings.deterministic)
    with deterministic, precision.run_context(), anomalies(True):
        yield
