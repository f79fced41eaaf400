"""HFTrainer: transformers' loop and arguments, with the other trainers' guarantees."""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, Unpack, cast

import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import PrinterCallback
from transformers import Trainer as StockTrainer  # a program may put ours in its place later

from omnitrain.arguments import (
    NoExtraArguments,
    PrecisionName,
    ScheduleName,
    check_list,
    check_type,
    reject_class,
    samples_of_step,
    takes_arguments,
)
from omnitrain.backends.accelerators import build_backend, check_lost_processes, merge_precision
from omnitrain.backends.backend import Backend
from omnitrain.backends.deepspeed import deepspeed_scheduler
from omnitrain.callbacks.early_stopping import EarlyStopping
from omnitrain.checkpoint.state_dicts import unwrap
from omnitrain.compute.precision import choose_device
from omnitrain.compute.random_state import isolated_rng
from omnitrain.core.duration import Duration, Interval
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Algorithm, Callback
from omnitrain.core.paths import run_folder
from omnitrain.data.collation import IGNORED_LABEL, Collator
from omnitrain.data.loaders import MapLoader
from omnitrain.data.sets import Columns, Sets
from omnitrain.distributed.ranks import Ranks
from omnitrain.distributed.rendezvous import connected_ranks
from omnitrain.hf.arguments import (
    FIELDS,
    accumulation_options,
    default_training_args,
    effective_arguments,
    engine_arguments,
    enum_value,
    fill_arguments,
    merge_activation_checkpointing,
    merge_training_args,
    reject_dataset_fields,
    reject_duplicate_loggers,
    reject_fp16_on_cpu,
    resolve_alias,
    scheduler_factory,
    sharding_accelerator,
    timeout_seconds,
    warn_unread_fields,
)
from omnitrain.hf.callbacks import policy_callbacks
from omnitrain.hf.calls import OVERRIDABLE, TransformersAPI
from omnitrain.hf.data import apply_length_grouping
from omnitrain.hf.engine import Engine, EngineLoop, Reporter
from omnitrain.hf.evaluation import HFEvaluation, make_generation
from omnitrain.hf.files import check_stock_checkpoints
from omnitrain.hf.label_smoothing import set_smoothed_loss
from omnitrain.hf.search import Trial, record_arguments, transfer_callbacks
from omnitrain.model.losses import shifts_by_default
from omnitrain.model.units import ModelUnit, StepOutput, forward_names, without_effect
from omnitrain.optim.schedules import NAMED, RunLength, Schedule
from omnitrain.trainer import hooks

_FILES_OF_CHECKPOINTS = "a callback's on_save, for more files in the folder checkpoint-<step>"
# Hooks that transformers' loop does not call, here or at all, and their alternatives.
NEVER_CALLED = {
    "_fit": "HFTrainer's own; transformers' loop is Engine.train",
    "_train_epoch": "engine_class, as a subclass of Engine that overrides `_run_epoch`",
    "_train_step": "engine_class, as a subclass of Engine that overrides `training_step`",
    "_optimizer_step": "a callback's on_before_optimizer_step",
    "_answer_requests": "a callback",
    "_evaluate": "`evaluate`",
    "_get_train_sampler": "`get_train_dataloader`, which returns a loader with that sampler,",
    "_get_eval_sampler": "`get_eval_dataloader`, which returns a loader with that sampler,",
    "_prepare_inputs": "`_prepare_batch`, which takes and returns a batch,",
    "_save": _FILES_OF_CHECKPOINTS,
    "_save_checkpoint": _FILES_OF_CHECKPOINTS,
}

_DATA_METHODS = ("__getitem__", "__iter__", "__len__")
# The positional arguments of `transformers.Trainer`, after model and training arguments.
_STOCK_POSITIONAL = (
    "data_collator", "train_dataset", "eval_dataset", "processing_class", "model_init", "compute_loss_func",
    "compute_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics",
)  # fmt: skip
AnyCallback: TypeAlias = Callback | transformers.TrainerCallback | type[transformers.TrainerCallback]
Constructor = TypeVar("Constructor", bound=Callable[..., None])


def accept_stock_order(init: Constructor) -> Constructor:
    """Accept transformers' positional arguments in our constructor; their third is the collator."""

    @functools.wraps(init)
    def ordered(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > 2 and callable(args[2]) and not any(hasattr(args[2], name) for name in _DATA_METHODS):
            init(self, *args[:2], **dict(zip(_STOCK_POSITIONAL, args[2:], strict=False)), **kwargs)
        else:
            init(self, *args, **kwargs)

    return cast(Constructor, ordered)


class HFTrainer(TransformersAPI):
    """Trains with transformers' loop, and the numbers, checkpoints and guarantees of the other trainers.

    `trainer.engine` is the real `transformers.Trainer`, for everything that is not ours (`engine.push_to_hub()`,
    `engine.add_callback(...)`, ...). FSDP and DeepSpeed are enabled by the training arguments or by
    `accelerate launch`, as in transformers.
    """

    REFUSED: ClassVar[dict[str, str]] = {
        "device": "is an argument of Trainer. Pass training_args=TrainingArguments(..., use_cpu=True) to keep a run "
        "off the GPUs.",
    }
    """Arguments of other trainers that this one does not have, and why."""

    NEVER_CALLED: ClassVar[Mapping[str, str]] = {
        name: use for name, use in hooks.NEVER_CALLED.items() if not hasattr(StockTrainer, name)
    }

    _evaluation_class = HFEvaluation
    _loop_class = EngineLoop
    engine_class: type[Engine] = Engine
    engine: Engine
    accelerator: Any = None
    """accelerate's `Accelerator`."""
    # The trial of a search that this trainer runs.
    _trial: Trial | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        for base in (*cls.__mro__[1:], cls.engine_class):
            if issubclass(base, StockTrainer) and not issubclass(base, Engine):
                raise TypeError(
                    f"{base.__name__} is a transformers.Trainer with its own loop, and cannot be a base or the "
                    f"`engine_class` of {cls.__name__}. Pass its model and data to HFTrainer: HFTrainer(other.model, "
                    "other.args, train_dataset=other.train_dataset, data_collator=other.data_collator), with its loss "
                    "as `compute_loss`. Move its changes to the loop into a subclass of omnitrain.hf.engine.Engine."
                )
        overridden = hooks.members_of_user(cls)
        for name in NEVER_CALLED.keys() & overridden.keys():
            raise TypeError(
                f"{cls.__name__} overrides {name}, which transformers' loop never calls. Use {NEVER_CALLED[name]} "
                "instead."
            )
        super().__init_subclass__(**kwargs)
        cls._overridden = frozenset(OVERRIDABLE) & overridden.keys()
        if "__init__" in vars(cls):
            cls.__init__ = record_arguments(cls.__init__)
        for name in overridden:
            is_offered = hasattr(TransformersAPI, name) and name != "evaluation_loop"
            if hasattr(StockTrainer, name) and name not in OVERRIDABLE and not is_offered:
                raise TypeError(
                    f"{cls.__name__} overrides {name} of transformers.Trainer, which is never called here; of its "
                    f"methods these are: {', '.join(sorted(OVERRIDABLE))}. Put it into a subclass of "
                    "omnitrain.hf.engine.Engine, and set that as `engine_class`."
                )

    @record_arguments
    @accept_stock_order
    @takes_arguments
    def __init__(
        self,
        model: nn.Module | None = None,
        training_args: transformers.TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        test_dataset: Any = None,
        *,
        # transformers
        args: transformers.TrainingArguments | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        model_init: Callable[..., nn.Module] | None = None,
        stock_checkpoints: bool = False,
        # <arguments of BaseTrainer, written by `make signatures`>
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
        # run
        seed: int = 42,
        deterministic: bool = False,
        on_nonfinite: Literal["raise", "skip", "warn"] = "raise",
        detect_anomaly: bool = False,
        timeout: float | str | Duration | None = None,
        callbacks: Iterable[AnyCallback] | None = (),
        loggers: str | Sequence[object] | None = None,
        algorithms: Iterable[Algorithm] = (),
        progress_bar: bool | None = None,
        trial_name: str | None = None,
        # </arguments>
        **unknown: Unpack[NoExtraArguments],
    ) -> None:
        """Set up a trainer; nothing is trained or written before `train()`.

        The ten that matter first: `loss_fn`, `compute_metrics`, `optimization_metric`, `learning_rate`, `batch_size`,
        `epochs`, `patience`, `save_dir`, `autocast` and `seed`. All are listed below in groups, as in the signature:
        data, length, optimizer, loss and metrics, cadence, checkpoints, precision and placement, and the run.

        Args:
            model: Any `nn.Module`; leave it out if you pass `model_init`.
            args: transformers' name for `training_args`.
            training_args: transformers' TrainingArguments, or `HFTrainingArguments`, which also takes older names.
            train_dataset: Map-style dataset, iterable, tensors, or a `DataLoader`; None to evaluate only.
            eval_dataset: The same, or a dict of named sets; its evaluations select the best checkpoint.
            test_dataset: The same, for `test()`; never used to select anything.
            compute_loss_func: transformers' name for `loss_fn`; gets `num_items_in_batch` of its batch, too.
            optimizers: transformers' pair of optimizer and schedule.
            optimizer_cls_and_kwargs: transformers' pair of an optimizer's class and its options.
            model_init: Returns a new model for each fresh `train()` and for each trial of a search.
            stock_checkpoints: Whether a stock `transformers.Trainer` can resume from checkpoints; default False.
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
            ConfigError: If the training arguments and ours contradict each other.
            ObjectiveError: If it is unknown whether a higher or a lower `optimization_metric` is better.
            TypeError: If arguments are unknown; the message lists all of them with the nearest names.
        """

    def _construct(self, kwargs: dict[str, Any], ranks: Ranks | None = None) -> None:
        model, training_args = kwargs.pop("model", None), self._pop_training_args(kwargs)
        callbacks = kwargs.pop("callbacks", None)
        callbacks = () if callbacks is None else callbacks
        check_list("callbacks", callbacks)
        callbacks = self._user_callbacks = list(callbacks)
        if self._trial is not None and training_args is not None:
            search_trainer: Any = self._trial.engine.trainer
            training_args, callbacks = self._trial.arguments(training_args), search_trainer._user_callbacks
            kwargs |= {"save_dir": training_args.output_dir} if kwargs.get("save_dir") is not None else {}
        self.training_args = training_args
        self._stock_checkpoints = kwargs.pop("stock_checkpoints", False)
        explicit = {name for name, value in kwargs.items() if value is not None or name == "max_grad_norm"}
        self._merge_stock_arguments(kwargs)
        self._initial_args = {} if training_args is None else dict(vars(training_args))
        self._user_arguments = {*kwargs, *FIELDS, "learning_rate", "weight_decay"}
        self._replaces_earlier_run = False
        if training_args is not None:
            self._user_arguments = explicit
            if kwargs.get("save_dir") == training_args.output_dir and "overwrite" not in explicit:
                self._replaces_earlier_run = kwargs["overwrite"] = True
        self._has_user_schedule = kwargs.get("lr_scheduler") is not None
        check_stock_checkpoints(self._stock_checkpoints, kwargs)
        our_callbacks = self._split_callbacks(callbacks, kwargs)
        reject_duplicate_loggers(training_args, kwargs.get("loggers"))
        self._scratch = tempfile.TemporaryDirectory(prefix="omnitrain-")
        output_dir, name = kwargs.get("save_dir"), "save_dir"
        if output_dir is None:
            output_dir, name = training_args and training_args.output_dir, "output_dir"
        self._output_dir = None if output_dir is None else run_folder(output_dir, name)
        fields: dict[str, Any] = {}
        if training_args is None:  # on a CPU, transformers forms a process group only if its arguments request it
            fields = {"seed": kwargs.get("seed", 42), "use_cpu": choose_device(None).type == "cpu"}
            fields["ddp_find_unused_parameters"] = False
        timeout, output_path = timeout_seconds(kwargs), str(self._output_dir or self._scratch.name)
        self._base_args = training_args or default_training_args(output_path, timeout, **fields)
        self._engine_args = engine_arguments(self._base_args, output_path)
        if self._engine_args.n_gpu > 1:
            self._engine_args._n_gpu = 1  # else transformers copies the model to all GPUs, which changes the numbers
        self._sharding, self._scheduler_config = sharding_accelerator(training_args, kwargs)
        ranks = connected_ranks(timeout) if self._engine_args.world_size > 1 else Ranks()
        check_lost_processes(ranks.world_size)
        self.model_init: Any = kwargs.pop("model_init", None)
        _check_model_init(model, self.model_init, kwargs)
        if self.model_init is not None:
            model = self._new_model(kwargs.get("seed", 42), self._engine_args.device)
        if isinstance(kwargs.get("loss_fn"), _CountedLoss):
            kwargs["loss_fn"].skips_first = shifts_by_default(model)
        set_smoothed_loss(training_args, model, kwargs)
        merge_activation_checkpointing(self._engine_args, model, kwargs)
        reject_fp16_on_cpu(training_args, self._engine_args.device)
        callbacks = [*policy_callbacks(training_args), *our_callbacks, Reporter()]
        kwargs |= {"model": model, "callbacks": callbacks}
        # transformers seeds the program's generators when its Trainer is created
        with (
            ranks.collective_call(f"{type(self).__name__}()", timeout, is_start=True),
            isolated_rng(self._engine_args.device),
        ):
            super()._construct(kwargs, ranks)

    @staticmethod
    def _pop_training_args(kwargs: dict[str, Any]) -> transformers.TrainingArguments | None:
        """Pop the training arguments from the user's arguments, where they may be positional or missing."""
        training_args = kwargs.pop("training_args", None)
        for name, value in (("training_args", training_args), ("args", kwargs.get("args"))):
            is_data = name == "training_args" and (hasattr(value, "__iter__") or hasattr(value, "__getitem__"))
            if isinstance(value, (str, bytes, type)) or not is_data:
                check_type(name, value, transformers.TrainingArguments)
        if training_args is not None and not isinstance(training_args, transformers.TrainingArguments):
            # HFTrainer(model, train_dataset, eval_dataset): positional, as with the other trainers
            names = ("train_dataset", "eval_dataset", "test_dataset")
            datasets = (training_args, kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
            kwargs |= {name: value for name, value in zip(names, datasets, strict=True) if value is not None}
            training_args = None
        args = kwargs.pop("args", None)
        return resolve_alias("args", args, "training_args", training_args)

    def _merge_stock_arguments(self, kwargs: dict[str, Any]) -> None:
        """Merge transformers' arguments into ours."""
        loss, optimizers = kwargs.pop("compute_loss_func", None), kwargs.pop("optimizers", (None, None))
        if kwargs.get("optimizer_cls_and_kwargs") is not None:
            pair: Any = kwargs["optimizer_cls_and_kwargs"]
            is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2 and callable(pair[0])
            if not is_pair or not isinstance(pair[1], Mapping):
                raise ConfigError(
                    "`optimizer_cls_and_kwargs` must be a pair of an optimizer's class and a dict of its options, got "
                    f"{pair!r:.200}."
                )
            make, options = pair
            fill_arguments({"optimizer": functools.partial(make, **options)}, kwargs, "`optimizer_cls_and_kwargs`")
        kwargs.pop("optimizer_cls_and_kwargs", None)
        if loss is not None:
            resolve_alias("loss_fn", kwargs.get("loss_fn"), "compute_loss_func", loss)
            kwargs["loss_fn"] = _CountedLoss(loss, num_items_in_batch=None)  # which earlier checkpoints compare
        if not isinstance(optimizers, (tuple, list)) or len(optimizers) != 2:
            raise ConfigError(f"`optimizers` must be a pair of optimizer and schedule, got {optimizers!r:.200}.")
        fill_arguments(dict(zip(("optimizer", "lr_scheduler"), optimizers, strict=True)), kwargs, "`optimizers`")
        if self.training_args is not None:
            warn_unread_fields(self.training_args)
            merge_training_args(self.training_args, kwargs)
        else:
            merge_precision(kwargs)

    def _split_callbacks(self, callbacks: Iterable[Any], kwargs: dict[str, Any]) -> list[Callback]:
        """Separate transformers' callbacks; its early stopping is replaced by ours, whose state is in checkpoints."""
        self._stock_callbacks: list[Any] = []
        self._replaced_callbacks: list[Any] = []
        our_callbacks: list[Any] = []
        for callback in callbacks:
            if callback is transformers.EarlyStoppingCallback:
                callback = transformers.EarlyStoppingCallback()
            if type(callback) is transformers.EarlyStoppingCallback:  # a subclass may decide otherwise
                self._stock_callbacks.append(callback)
                self._replaced_callbacks.append(callback)
                values = {"patience": callback.early_stopping_patience, "delta": callback.early_stopping_threshold}
                fill_arguments(values, kwargs, "transformers' EarlyStoppingCallback")
            else:
                (our_callbacks if isinstance(callback, Callback) else self._stock_callbacks).append(callback)
        for callback in self._stock_callbacks:
            kind = callback if isinstance(callback, type) else type(callback)
            if issubclass(kind, Callback):
                reject_class("callbacks", callback)
            if not issubclass(kind, transformers.TrainerCallback):
                raise ConfigError(
                    f"`callbacks` must hold callbacks of omnitrain or of transformers, got {callback!r}. "
                    "Make it a subclass of omnitrain.Callback (and pass an instance, not the class)."
                )
        return our_callbacks

    def _new_model(self, seed: int, device: torch.device) -> nn.Module:
        """Return a new model, whose weights depend only on the seed; the program's random state stays unchanged."""
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(self.model_init).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind in positional]
        if len(names) > 1:
            raise ConfigError(
                f"`model_init` must take no argument, or one, the trial of a search. It takes {', '.join(names)}."
            )
        with isolated_rng(device, seed):
            model = self.model_init(*[self._trial and self._trial.trial][: len(names)])
        if not isinstance(model, nn.Module):
            raise ConfigError(f"`model_init` must return an nn.Module, got {type(model).__name__}.")
        return model

    # --- the parts of a run

    def _choose_device(self, device: Any) -> torch.device:
        return self._engine_args.device

    @property
    def _evaluates(self) -> bool:
        args, eval_steps = self.training_args, self.settings.eval_steps
        return super()._evaluates and (args is None or eval_steps is not None or enum_value(args.eval_strategy) != "no")

    @property
    def _order_seed(self) -> int | None:
        """The seed for the order of samples, if it differs from `seed`."""
        args = self.training_args
        return None if args is None or args.data_seed in (None, args.seed) else args.data_seed

    def _make_sets(self) -> Sets:
        args, unit = self.training_args, self.unit
        sampling: dict[str, Any] = {} if self._order_seed is None else {"order_seed": self._order_seed}
        step = samples_of_step(self.settings, self.ranks.data.size)
        if args is not None and args.dataloader_drop_last:
            share = self.batch_size * self.ranks.data.size
            sampling["multiple_of"] = step if step % share else share
        keeps_all = type(unit) is not ModelUnit or (args is not None and not args.remove_unused_columns)
        self._engine_args.remove_unused_columns = not keeps_all
        columns = Columns(None if keeps_all else unit.columns, self.get_model())
        adds_mask = "attention_mask" in forward_names(self.get_model())
        settings = apply_length_grouping(self.settings, args, step)
        sets = Sets(settings, self.device, self.ranks, columns, adds_mask, **sampling)
        if (
            self.settings.microbatch_size == "auto"
            and self.world_size > 1
            and accumulation_options(args).get("sync_each_batch")
        ):
            raise ConfigError(
                "`accelerator_config` with sync_each_batch=True exchanges gradients in each backward pass, and with "
                "`microbatch_size='auto'` the ranks do so once all of them have come through. Leave one of them out."
            )
        if sets.train is not None and not isinstance(sets.train, MapLoader):
            reject_dataset_fields(args)
        return sets

    def _make_backend(self, model: nn.Module, make: Callable[..., Backend] | None = None) -> Backend:
        return super()._make_backend(model, make or functools.partial(build_backend, self._sharding, self.settings))

    def _write_extra_files(self, folder: Path) -> None:
        self.engine.write_transformers_files(folder, self._stock_checkpoints)

    def _assemble(self) -> None:
        super()._assemble()
        if self._early_stopping_threshold is not None:
            self.objective.delta = self._early_stopping_threshold

    def _setup_training_components(self) -> None:
        """Build the engine around the model, and put the model on its device."""
        self._engine_args.per_device_train_batch_size = self.batch_size
        self._engine_args.per_device_eval_batch_size = self.eval_batch_size
        self._engine_args.gradient_accumulation_steps = 1  # transformers' loop gets full windows,
        self._engine_args.ignore_data_skip = True  # and the rest of an epoch only
        self.engine = self.engine_class(
            self,
            effective_arguments(self._base_args, self.settings, self._user_arguments, self._evaluates),
            model=self.model,
            args=self._engine_args,
            data_collator=self.data_collator or Collator(label_names=self.settings.label_names or ()),
            train_dataset=[None],
            eval_dataset=self.eval_dataset,
            processing_class=self.processing_class,
            compute_loss_func=_unused_loss,  # so that no version divides the loss again; see Engine.compute_loss
            callbacks=self._stock_callbacks,
        )
        if (
            self.training_args is None
            or "progress_bar" in self._user_arguments
            or self.settings.progress_bar is not False
        ):
            # transformers' printer replaces our bar only if the training arguments ask for it by `disable_tqdm`
            callbacks = self.engine.callback_handler.callbacks
            self._replaced_callbacks += [callback for callback in callbacks if type(callback) is PrinterCallback]
        self.engine.callback_handler.replaced = self._replaced_callbacks
        self.engine.train_dataset = self.train_dataset
        self.engine.loss_is_scaled_for_ga = True
        self.engine._has_output_dir = self._output_dir is not None
        self.accelerator = self.engine.real_accelerator
        self.backend.accelerator = self.accelerator
        super()._setup_training_components()
        self.engine.model_wrapped = self.backend.wrapped

    def _default_optimizer(self) -> torch.optim.Optimizer:
        if self.training_args is None or self.settings.optimizer is not None:
            return super()._default_optimizer()
        if self.settings.optimizer_kwargs is not None:
            raise ConfigError(
                f"`optimizer_kwargs={self.settings.optimizer_kwargs!r:.200}` is for an optimizer that is not made of "
                "`training_args`. Set its fields instead, such as adam_beta2, or pass optimizer='adamw' too."
            )
        self.engine.args.learning_rate, self.engine.args.weight_decay = self.learning_rate, self.weight_decay
        self.engine.optimizer = None  # type: ignore[assignment]
        optimizer = self.engine.create_optimizer()
        groups = [group for group in optimizer.param_groups if group["params"]]
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        if options[1:] and all(entry == options[0] for entry in options):  # with a decay of 0 the groups are equal
            ids = {id(parameter) for group in groups for parameter in group["params"]}
            parameters = [parameter for parameter in self.model.parameters() if id(parameter) in ids]
            groups = [{**options[0], "params": parameters}]
        optimizer.param_groups[:] = groups
        return optimizer

    def _finish_setup(self, lr_scheduler: Any = None, warmup_steps: Any = None) -> None:
        self._evaluation.generation = make_generation(
            self.training_args, unwrap(self.model), self.compute_metrics, self.processing_class
        )
        super()._finish_setup(*self._schedule())

    def _schedule(self) -> tuple[Any, Any]:
        """Return the schedule and warm-up of the training arguments, unless ours are set."""
        args, total, user_schedule = self.training_args, self.total_steps, self.settings.lr_scheduler
        if args is None or not isinstance(user_schedule, str | None) or self.train_loader is None:
            return None, None
        warmup = self.settings.warmup_steps or (
            args.get_warmup_steps(total or 0) if total or args.warmup_steps >= 1 else args.warmup_steps
        )
        name = enum_value(args.lr_scheduler_type)
        if user_schedule not in (None, name):
            return None, warmup
        run_length = RunLength("ba", self.total_steps, steps_per_epoch=self.steps_per_epoch)
        if self._scheduler_config is not None:
            rates = {"warmup_min_lr": 0, "warmup_max_lr": self.learning_rate}
            counts = {"warmup_num_steps": run_length.steps_of(warmup), "total_num_steps": total}
            return deepspeed_scheduler(self._scheduler_config, **rates, **counts), 0
        is_short = total is None or not isinstance(warmup, int) or warmup < total
        if user_schedule is not None or (name in NAMED and is_short):
            return name, warmup
        # options that a name does not have, or a warm-up longer than the run
        return scheduler_factory(args, run_length.steps_of(warmup), total), 0

    def _idle_loss(self, output: StepOutput, loss: torch.Tensor) -> torch.Tensor | None:
        return without_effect(output, loss)  # transformers' loop runs backward for every micro-batch

    # --- training

    def _begin_run(self, resumes: bool, is_live: bool = False) -> None:
        if not resumes and self.model_init is not None and self._trial is None:  # the model of a trial is new already
            self._reinitialize_model()
        super()._begin_run(resumes, is_live)

    def _start_run(self, resume_from: Any, allow_change: Collection[str]) -> None:
        super()._start_run(resume_from, allow_change)
        if self._engine_args.restore_callback_states_from_checkpoint and self._checkpointer.is_resuming:
            self._restore_early_stopping()

    def _restore_early_stopping(self) -> None:
        """Restore the patience and threshold of transformers' early stopping, which ours replaces."""
        states: Any = self.engine.current_state().stateful_callbacks
        state = states.get(transformers.EarlyStoppingCallback.__name__, {})
        state = state[0] if isinstance(state, list) else state
        for callback in self.lifecycle.callbacks:
            if isinstance(callback, EarlyStopping) and state:
                callback.patience = state["args"]["early_stopping_patience"]
                self.objective.delta = state["args"]["early_stopping_threshold"] or 0.0

    def _reinitialize_model(self) -> None:
        """Start with a new model, engine and optimizer."""
        old_engine = self.engine
        old_engine._finish_current_push()
        self.backend.release()
        settings = self.settings.to_dict()
        if self._scheduler_config is not None:
            settings["lr_scheduler"] = None
        self._sharding, self._scheduler_config = sharding_accelerator(self.training_args, settings)
        self._set_up_model(self._new_model(self.seed, self.device))
        transfer_callbacks(self.engine, old_engine)

    def resolved_config(self) -> dict[str, Any]:
        """Return every setting in force, as JSON types."""
        return {**super().resolved_config(), "order_seed": self._order_seed}


class _CountedLoss(functools.partial[Any]):
    """A `compute_loss_func`, which gets the number of labels of its batch: a sum divided by it is the mean."""

    skips_first = False
    """Whether the first label of each row does not count, as nothing predicts it."""

    def __call__(self, outputs: Any, labels: Any) -> Any:
        """Return the user's loss of a batch."""
        count = None
        if isinstance(labels, torch.Tensor):
            counted = labels[..., 1:] if self.skips_first and labels.ndim > 1 else labels
            count = counted.ne(IGNORED_LABEL).sum()
        return self.func(outputs, labels, num_items_in_batch=count)


def _unused_loss(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("Engine.compute_loss computes the loss")


def _check_model_init(model: Any, model_init: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError unless one of model and `model_init` is passed, with arguments that fit every new model."""
    if (model is None) == (model_init is None):
        problem = "neither is given" if model is None else "both are given"
        raise ConfigError(f"HFTrainer needs `model` or `model_init`, and {problem}. Pass one of them.")
    if model_init is None:
        return
    if not callable(model_init) or isinstance(model_init, nn.Module):
        raise ConfigError(f"`model_init` must be a function that returns a model, got {type(model_init).__name__}.")
    if hasattr(kwargs.get("optimizer"), "param_groups"):
        raise ConfigError(
            "`optimizer` belongs to one model, but `model_init` makes a new one for each run. Pass the optimizer's "
            "class, or a function of the parameters."
        )
    if kwargs.get("unit") is not None:
        raise ConfigError(
            "`unit` has its own model, but `model_init` makes a new one for each run. Pass `model` instead."
        )
