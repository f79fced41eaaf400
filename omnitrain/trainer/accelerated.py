"""AccelerateTrainer: training on several processes under DDP, FSDP 2 or ZeRO."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from omnitrain.arguments import (
    NoExtraArguments,
    PrecisionName,
    ScheduleName,
    check_switch,
    check_type,
    describe,
    parse_seconds,
    takes_arguments,
)
from omnitrain.backends.accelerators import (
    build_backend,
    check_ddp_options,
    check_lost_processes,
    find_ranks,
    make_accelerator,
    merge_precision,
)
from omnitrain.backends.backend import Backend
from omnitrain.backends.deepspeed import deepspeed_plugin, merge_config
from omnitrain.compute.precision import accelerate_precision
from omnitrain.core.duration import Duration, Interval
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Algorithm, Callback
from omnitrain.distributed.ranks import Ranks
from omnitrain.optim.schedules import Schedule
from omnitrain.trainer.base import BaseTrainer


class AccelerateTrainer(BaseTrainer):
    """Trains a model on all processes started by `accelerate launch`, `torchrun` or `omnitrain launch`.

    The settings of an accelerate config file and of its launcher's flags (FSDP, DeepSpeed, mixed precision) apply.
    Call every public method that concerns the run (`train`, `evaluate`, `save_model`, ...) on every process.
    """

    REFUSED: ClassVar[dict[str, str]] = {
        "device": "is an argument of Trainer: here each process is given its own. "
        "Leave it out (ACCELERATE_USE_CPU=true keeps a run off the GPUs)."
    }
    """Arguments of other trainers that this one does not have, and why."""

    accelerator: Any
    """accelerate's `Accelerator`."""

    @takes_arguments
    def __init__(
        self,
        model: nn.Module,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        test_dataset: Any = None,
        *,
        # accelerate
        deepspeed_config: str | Path | Mapping[str, Any] | None = None,
        fsdp_plugin: Any = None,
        parallelism_config: Any = None,
        accelerator: Any = None,
        find_unused_parameters: bool = False,
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
        callbacks: Iterable[Callback] = (),
        loggers: str | Sequence[object] | None = None,
        algorithms: Iterable[Algorithm] = (),
        progress_bar: bool | None = None,
        trial_name: str | None = None,
        # </arguments>
        **unknown: Unpack[NoExtraArguments],
    ) -> None:
        """Set up a trainer; call it on every process. Nothing is trained or written before `train()`.

        The ten that matter first: `loss_fn`, `compute_metrics`, `optimization_metric`, `learning_rate`, `batch_size`,
        `epochs`, `patience`, `save_dir`, `autocast` and `seed`. All are listed below in groups, as in the signature:
        data, length, optimizer, loss and metrics, cadence, checkpoints, precision and placement, and the run.

        Args:
            model: Any `nn.Module`; every process starts from the weights of the main process.
            train_dataset: Map-style dataset, iterable, tensors, or a `DataLoader`; None to evaluate only.
            eval_dataset: The same, or a dict of named sets; its evaluations select the best checkpoint.
            test_dataset: The same, for `test()`; never used to select anything.
            deepspeed_config: Path or dict of a DeepSpeed configuration; `{}` is ZeRO 2. "auto" values are filled in.
            fsdp_plugin: accelerate's `FullyShardedDataParallelPlugin(fsdp_version=2, ...)`.
            parallelism_config: accelerate's `ParallelismConfig`: a mesh of dp_replicate, dp_shard (FSDP 2) and tp.
            accelerator: Your own `Accelerator`, or options of DDP such as {"static_graph": True, "bucket_cap_mb": 50}.
            find_unused_parameters: Whether DDP searches for parameters without a gradient in every step; default False.
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
            ConfigError: If arguments contradict each other or the DeepSpeed configuration.
            DistributedError: If the program was started on more processes than the trainer sees.
            ObjectiveError: If it is unknown whether a higher or a lower `optimization_metric` is better.
            TypeError: If arguments are unknown; the message lists all of them with the nearest names.
        """

    def _construct(self, arguments: dict[str, Any], ranks: Ranks | None = None) -> None:
        check_switch("find_unused_parameters", arguments.get("find_unused_parameters"))
        check_type("deepspeed_config", arguments.get("deepspeed_config"), str, Path, Mapping)
        setups = {name: arguments.pop(name, None) for name in ("deepspeed_config", "fsdp_plugin", "accelerator")}
        parallelism, unused = arguments.pop("parallelism_config", None), arguments.pop("find_unused_parameters", False)
        chosen = [name for name, value in setups.items() if value is not None]
        if len(chosen) > 1:
            raise ConfigError(f"`{chosen[0]}` and `{chosen[1]}` exclude each other. Pass one of them.")
        accelerator, ddp = setups.pop("accelerator"), {"find_unused_parameters": True} if unused else {}
        if isinstance(accelerator, Mapping):
            if parallelism is not None:
                raise ConfigError(
                    "`parallelism_config` and the options of DDP in `accelerator` exclude each other. Pass one of them."
                )
            accelerator, ddp = None, check_ddp_options(accelerator, ddp)
        timeout = None if arguments.get("timeout") is None else parse_seconds("timeout", arguments["timeout"])
        if accelerator is not None and not hasattr(accelerator, "mixed_precision"):
            raise ConfigError(
                "`accelerator` must be an accelerate.Accelerator, or a dict of DDP's options such as "
                f"{{'static_graph': True}}, got {accelerator!r:.200}."
            )
        for name, value in {"parallelism_config": parallelism, "find_unused_parameters": unused or None}.items():
            if accelerator is not None and value is not None:
                raise ConfigError(
                    f"`{name}` has no effect with your `accelerator`. Make that accelerator with it: "
                    "Accelerator(parallelism_config=..., kwargs_handlers=[DistributedDataParallelKwargs(...)])."
                )
        reductions = (
            (arguments.get("dtypes") or {}).get("reductions") if isinstance(arguments.get("dtypes"), Mapping) else None
        )
        if reductions is not None and getattr(setups["fsdp_plugin"], "mixed_precision_policy", None) is not None:
            raise ConfigError(
                f"`dtypes` sets 'reductions' to {str(reductions)!r}, and `fsdp_plugin` has a mixed_precision_policy "
                "with a reduce_dtype of its own. Leave one of them out."
            )
        if accelerator is not None:
            _apply_accumulation(accelerator, arguments)
        if accelerator is None:
            plugin = deepspeed_plugin(setups["deepspeed_config"])
            if plugin is not None:
                merge_config(plugin, arguments)
            else:
                _apply_launcher_settings(arguments)
            accelerator = make_accelerator(
                precision=accelerate_precision(arguments.get("autocast")),
                deepspeed_plugin=plugin,
                fsdp_plugin=setups["fsdp_plugin"],
                parallelism_config=parallelism,
                ddp_options=ddp,
                timeout=timeout,
            )
        elif arguments.get("autocast") is None and accelerator.mixed_precision != "no":
            if accelerator.mixed_precision == "fp8":
                raise ConfigError(
                    "`accelerator` has mixed_precision='fp8', by which accelerate changes the layers of the model when "
                    "it prepares that. Make it without, and pass autocast='fp8'."
                )
            arguments["autocast"] = accelerator.mixed_precision
        self.accelerator = accelerator
        self._accelerate_settings = {**setups, "find_unused_parameters": unused}
        ranks = find_ranks(accelerator, timeout)
        check_lost_processes(ranks.world_size)
        fsdp_plugin = setups["fsdp_plugin"] or getattr(accelerator.state, "fsdp_plugin", None)
        recomputes = arguments.get("gradient_checkpointing") not in (None, False, (), [])
        if recomputes and getattr(fsdp_plugin, "activation_checkpointing", False):
            raise ConfigError(
                "`gradient_checkpointing` and the FSDP plugin's activation_checkpointing are both set, and each "
                "recomputes activations. Leave one of them out."
            )
        with ranks.collective_call(f"{type(self).__name__}()", timeout, is_start=True):
            super()._construct(arguments, ranks)

    def _choose_device(self, device: str | torch.device | None) -> torch.device:
        return self.accelerator.device

    def _make_backend(self, model: nn.Module, make: Callable[..., Backend] | None = None) -> Backend:
        return super()._make_backend(model, make or functools.partial(build_backend, self.accelerator, self.settings))

    def resolved_config(self) -> dict[str, Any]:
        settings = {name: describe(value) for name, value in self._accelerate_settings.items()}
        return {**super().resolved_config(), **settings}


def _apply_launcher_settings(arguments: dict[str, Any]) -> None:
    """Apply the settings of `accelerate launch` or its config file that the user's program leaves open."""
    merge_precision(arguments)
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if (
        steps.isdigit()
        and int(steps) > 1
        and not {"gradient_accumulation_steps", "global_batch_size"} & arguments.keys()
    ):
        arguments["gradient_accumulation_steps"] = int(steps)


def _apply_accumulation(accelerator: Any, arguments: dict[str, Any]) -> None:
    """Apply the number of micro-batches in a step of the user's `Accelerator`."""
    steps = getattr(accelerator, "gradient_accumulation_steps", 1)
    if steps == 1 or "global_batch_size" in arguments:
        return
    if arguments.setdefault("gradient_accumulation_steps", steps) != steps:
        raise ConfigError(
            f"`gradient_accumulation_steps={arguments['gradient_accumulation_steps']}` contradicts that of "
            f"`accelerator`, which is {steps}. Leave one of them out."
        )
