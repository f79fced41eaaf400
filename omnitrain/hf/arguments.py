"""Translation of transformers' TrainingArguments to trainer arguments and back.

The list of arguments is read from the installed transformers; nothing here lists all of them.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from accelerate.state import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from omnitrain.arguments import Settings, is_loader, parse_seconds
from omnitrain.backends.accelerators import check_launched, is_set, make_accelerator
from omnitrain.backends.deepspeed import deepspeed_plugin, merge_config
from omnitrain.checkpoint.state_dicts import unwrap
from omnitrain.compute.activation_checkpointing import builtin_checkpointing
from omnitrain.compute.precision import accelerate_precision
from omnitrain.core.errors import ConfigError, did_you_mean, unexpected_arguments
from omnitrain.distributed.rendezvous import watch_init_process_group
from omnitrain.metrics.scorer import ByBatch

logger: logging.Logger = logging.getLogger("omnitrain")

# Names that transformers has dropped, and their replacements.
RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "no_cuda": "use_cpu",
    "push_to_hub_token": "hub_token",
    "push_to_hub_model_id": "hub_model_id",
    "include_tokens_per_second": "include_num_input_tokens_seen",
}

# Switches that transformers has dropped, and the field that has their name as its value.
SWITCHES = {"adafactor": "optim", "group_by_length": "train_sampling_strategy"}

# Other names that transformers has dropped and whose values are translated.
MOVED = ("logging_dir", "warmup_ratio", "overwrite_output_dir")

# Names that transformers has dropped because they are the only behavior now, or their feature no longer exists.
WITHOUT_EFFECT = (
    "save_safetensors", "half_precision_backend", "fp16_backend", "fp16_opt_level", "use_ipex", "use_mps_device",
    "jit_mode_eval", "sharded_ddp", "past_index", "tpu_num_cores", "tpu_metrics_debug", "prediction_loss_only_eval",
    "ray_scope", "torchdynamo", "mp_parameters",
)  # fmt: skip


class HFTrainingArguments(transformers.TrainingArguments):
    """transformers' TrainingArguments, which also accepts names that newer versions have dropped.

    Raises:
        ConfigError: If two names contradict each other, or `deepspeed` is ZeRO 3 and there is no launcher.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> args = HFTrainingArguments(folder, evaluation_strategy="steps", use_cpu=True)
    >>> args.eval_strategy.value
    'steps'
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
        translated: dict[str, str] = {}
        errors = []
        for name in [name for name in kwargs if name not in known]:
            value = kwargs.pop(name)
            target = self._translate_dropped(name, value, kwargs)
            if target is None:
                nearest = did_you_mean(name, [*known, *RENAMED, *SWITCHES, *MOVED, *WITHOUT_EFFECT])
                errors.append(f"{name!r}.{nearest}")
            else:
                translated[name] = target
        if errors:
            raise unexpected_arguments("HFTrainingArguments", errors)
        if translated:
            listed = ", ".join(f"{old!r} ({new})" for old, new in translated.items())
            logger.warning("transformers %s no longer has %s.", transformers.__version__, listed)
        super().__init__(*args, **kwargs)
        config = getattr(self, "hf_deepspeed_config", None)
        if config is not None and config.is_zero3():  # from_pretrained would follow it, and fail in MPI
            check_launched(True)

    overwrite = False
    """The value of `overwrite_output_dir`."""

    def _translate_dropped(self, name: str, value: Any, kwargs: dict[str, Any]) -> str | None:
        """Translate a dropped argument into `kwargs`, and return a text for the warning; None if unknown."""
        if name in RENAMED:
            new = RENAMED[name]
            if new in kwargs and kwargs[new] != value:
                raise ConfigError(
                    f"`{name}={value!r}` and `{new}={kwargs[new]!r}` contradict each other. Drop the first."
                )
            kwargs[new] = value
            return f"now {new!r}"
        if name in SWITCHES:
            if value:
                kwargs[SWITCHES[name]] = name
            return f"now {SWITCHES[name]}={name!r}"
        if name == "logging_dir":
            os.environ["TENSORBOARD_LOGGING_DIR"] = str(value)
            return "now the environment variable TENSORBOARD_LOGGING_DIR, which is set"
        if name == "warmup_ratio":
            if value and not kwargs.get("warmup_steps"):
                kwargs["warmup_steps"] = float(value)
            return "now a 'warmup_steps' below 1"
        if name == "overwrite_output_dir":
            self.overwrite: bool = bool(value)
            return "taken as `overwrite` of HFTrainer"
        return "without effect" if name in WITHOUT_EFFECT else None


_ORDER_ADVICE = (
    "Samples come in one order, which is the same on every number of processes. Use "
    "train_sampling_strategy='group_by_length', which keeps padding short and the load of the ranks balanced."
)
# Fields that have no effect here: their allowed values, which request nothing, and the reason with the alternative.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "train_sampling_strategy": (("random", "sequential", "group_by_length"), _ORDER_ADVICE),
    "sortish_sampler": ((False,), _ORDER_ADVICE),
    "eval_do_concat_batches": (
        (True,),
        "Metric functions get full arrays, padded to one length. Leave it out; for metrics per batch set "
        "batch_eval_metrics=True.",
    ),
    "parallelism_config": (
        (None,),
        "HFTrainer gives each rank samples of its own, and ranks that compute one model together need the same. Use "
        "AccelerateTrainer with `parallelism_config`: its checkpoints and numbers are the same.",
    ),
    "save_on_each_node": (
        (False,),
        "The main process writes checkpoints, and broadcasts them when they are read. Leave it out.",
    ),
    "ignore_data_skip": ((False,), "A resumed run continues with the next sample, which costs nothing. Leave it out."),
    "average_tokens_across_devices": ((True,), "Each label of a step counts the same on every process. Leave it out."),
    "dataloader_in_order": ((True,), "Samples come in one order here, with any number of workers. Leave it out."),
    "dataloader_multiprocessing_context": (
        (None,),
        "Call torch.multiprocessing.set_start_method() at the start of the program.",
    ),
}

# Our arguments whose values are always those of a field of transformers.
_SAME_VALUES = (
    "batch_size", "eval_batch_size", "learning_rate", "weight_decay", "seed", "num_workers", "pin_memory",
    "prefetch_factor", "deterministic", "eval_on_start", "load_best_at_end",
)  # fmt: skip
# Those whose values transformers' callbacks get, except intervals.
_EXPORTED = (
    *_SAME_VALUES, "epochs", "max_steps", "gradient_accumulation_steps", "warmup_steps", "max_grad_norm", "drop_last",
    "save_total_limit", "save_only_model", "optimization_metric", "trial_name",
)  # fmt: skip
_INTERVALS = ("log_steps", "eval_steps", "save_steps")
_DEFAULT_EPOCHS = transformers.TrainingArguments.__dataclass_fields__["num_train_epochs"].default

# The fields of transformers' arguments that mean the same as one of ours under another name.
FIELDS: dict[str, tuple[str, ...]] = {
    "epochs": ("num_train_epochs",),
    "batch_size": ("per_device_train_batch_size",),
    "microbatch_size": ("auto_find_batch_size",),
    "eval_batch_size": ("per_device_eval_batch_size",),
    "shuffle": ("train_sampling_strategy",),
    "drop_last": ("dataloader_drop_last",),
    "num_workers": ("dataloader_num_workers",),
    "pin_memory": ("dataloader_pin_memory",),
    "prefetch_factor": ("dataloader_prefetch_factor",),
    "log_steps": ("logging_strategy", "logging_steps"),
    "eval_steps": ("eval_strategy", "eval_steps"),
    "save_steps": ("save_strategy", "save_steps"),
    "save_dir": ("output_dir",),
    "load_best_at_end": ("load_best_model_at_end",),
    "optimization_metric": ("metric_for_best_model",),
    "optimization_direction": ("greater_is_better",),
    "optimizer": ("optim",),
    "lr_scheduler": ("lr_scheduler_type",),
    "deterministic": ("full_determinism",),
    "autocast": ("bf16", "fp16"),
    "matmul_precision": ("tf32",),
    "trial_name": ("run_name",),
    "progress_bar": ("disable_tqdm",),
    "timeout": ("ddp_timeout",),
}


def _user_fields(args: transformers.TrainingArguments, name: str) -> dict[str, Any]:
    """Return the fields for one of our arguments that the user has set, those that differ from their default."""
    derived = {"output_dir": "trainer_output"}  # which transformers fills in
    if args.load_best_model_at_end:
        derived["metric_for_best_model"] = "loss"
    known, fields_set = type(args).__dataclass_fields__, {}
    for field in FIELDS.get(name, (name,)):
        value, default = enum_value(getattr(args, field, None)), getattr(known.get(field), "default", None)
        default = None if default is dataclasses.MISSING else enum_value(default)
        if value not in (default, {}, derived.get(field, {})):
            fields_set[field] = value
    return fields_set


def accumulation_options(args: transformers.TrainingArguments | None) -> Mapping[str, Any]:
    """Return transformers' settings of accumulation for accelerate: `num_steps` and `sync_each_batch`."""
    config = None if args is None else args.accelerator_config
    return getattr(config, "gradient_accumulation_kwargs", None) or {}


def merge_training_args(args: transformers.TrainingArguments, kwargs: dict[str, Any]) -> None:
    """Fill our arguments, in `kwargs`, from transformers'; contradictions are an error.

    An argument of ours takes precedence over a field of `args` with its default value, as the user has not set that.
    """
    for name, (allowed, advice) in UNSUPPORTED.items():
        value = enum_value(getattr(args, name, allowed[0]))
        if value not in allowed:
            raise ConfigError(f"`training_args.{name}={value!r}` is not supported by HFTrainer. {advice}")
    optim = str(enum_value(args.optim))
    if optim in ("lomo", "adalomo") or optim.endswith("_layerwise"):
        raise ConfigError(
            f"`training_args.optim={optim!r}` updates weights while gradients are computed, before "
            "they are known to be finite, and has no state that a checkpoint could hold. Choose the one without "
            "layers, such as 'galore_adamw' or 'adamw_torch'."
        )
    steps, num_steps = args.gradient_accumulation_steps, accumulation_options(args).get("num_steps")
    if steps != 1 and num_steps not in (None, steps):
        raise ConfigError(
            "The `AcceleratorConfig`'s `num_steps` is set but contradicts `training_args`: "
            f"num_steps={num_steps} and gradient_accumulation_steps={steps}. Leave one of them out."
        )
    args.gradient_accumulation_steps = num_steps or steps  # as in transformers: callbacks and scripts read it
    conflicts = [name for name in ("save_steps", "save_dir") if kwargs.get(name) is not None]
    if conflicts and enum_value(args.save_strategy) == "no":
        raise ConfigError(
            f"`{conflicts[0]}={str(kwargs[conflicts[0]])!r}` contradicts save_strategy='no' of the training arguments. "
            "Set their save_strategy instead."
        )
    has_metric = args.metric_for_best_model is not None or kwargs.get("optimization_metric") is not None
    if enum_value(args.save_strategy) == "best" and not has_metric:
        raise ConfigError(
            "`args.metric_for_best_model` must be provided with save_strategy='best', as in transformers. Pass "
            "'loss', or one of your metrics."
        )
    if args.torch_compile:
        if kwargs.get("compile") not in (None, False):
            raise ConfigError("`compile` and torch_compile=True of the training arguments are both set. Leave one out.")
        options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        kwargs["compile"] = {name: value for name, value in options.items() if value is not None}
    _merge_metrics(args, kwargs)
    values = _translate_fields(args)
    if getattr(args.accelerator_config, "split_batches", False):
        for name in ("batch_size", "eval_batch_size"):
            if values[name] % args.world_size:
                raise ConfigError(
                    "`training_args.accelerator_config` has split_batches=True, which splits a batch of "
                    f"{values[name]} over {args.world_size} processes. Choose a batch size that they divide."
                )
            values[name] //= args.world_size
    excluded: set[str] = set()
    has_max_duration = kwargs.get("max_duration") is not None and args.num_train_epochs == _DEFAULT_EPOCHS
    if kwargs.get("epochs") is None and (kwargs.get("max_steps") is not None or has_max_duration):
        excluded |= {"epochs"}  # as in transformers, where `max_steps` replaces the epochs
    if kwargs.get("optimizer") is not None and not isinstance(kwargs["optimizer"], (str, type)):
        excluded |= {"learning_rate", "weight_decay"}  # for an optimizer that we would create
    if kwargs.get("train_loader") is not None or is_loader(kwargs.get("train_dataset")):
        excluded |= {"batch_size", "pin_memory"}  # training arguments always have a value
    if all(kwargs.get(name) is None for name in ("eval_dataset", "eval_loader")):
        # transformers' scripts name a metric even if they do not evaluate
        excluded |= {"optimization_metric", "optimization_direction"}
    values = {name: value for name, value in values.items() if name not in excluded}
    _merge_arguments(args, values, kwargs)


def translate_training_args(args: transformers.TrainingArguments, kwargs: dict[str, Any]) -> None:
    """Fill the arguments of another trainer than `HFTrainer`, with optimizer and schedule as in transformers."""
    merge_training_args(args, kwargs)
    optim = str(enum_value(args.optim))
    fields: dict[str, Any] = {"warmup_steps": args.warmup_steps, "lr_scheduler": enum_value(args.lr_scheduler_type)}
    if optim.startswith("adamw_torch"):
        fields["optimizer_kwargs"] = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    else:
        fields["optimizer"] = optim
    if args.weight_decay:
        model = kwargs["model"]
        decaying = transformers.Trainer.get_decay_parameter_names(cast("Any", None), model)
        undecayed = [re.escape(name) for name, _ in model.named_parameters() if name not in decaying]
        fields["param_groups"] = [{"match": f"^({'|'.join(undecayed)})$", "weight_decay": 0.0}] if undecayed else None
    kwargs |= {name: value for name, value in fields.items() if kwargs.get(name) is None}


def warn_unread_fields(args: transformers.TrainingArguments) -> None:
    """Warn about fields of another library's training arguments that nothing here reads.

    Fields of the user's own class are for the user's own program.
    """
    known_names = {field.name for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    extra_fields = [field for field in dataclasses.fields(args) if field.name not in known_names]
    module = sys.modules.get(type(args).__module__)
    path = Path(getattr(module, "__file__", "") or "")
    if not extra_fields or {"site-packages", "dist-packages"}.isdisjoint(path.parts) or args.process_index:
        return
    changed = []
    for field in extra_fields:
        value = getattr(args, field.name)
        if value != (field.default_factory() if callable(field.default_factory) else field.default):
            changed.append(f"{field.name}={value!r:.80}")
    logger.warning(
        "%s has %d fields in addition to those of TrainingArguments, which are for a trainer of %r and are not read "
        "here%s. Prepare model and data accordingly, or let that trainer do so.",
        type(args).__name__, len(extra_fields), type(args).__module__.partition(".")[0],
        f", not even {', '.join(changed)}" if changed else "",
    )  # fmt: skip


def merge_activation_checkpointing(args: transformers.TrainingArguments, model: Any, kwargs: dict[str, Any]) -> None:
    """Recompute activations if transformers' arguments request it and the model does not support it itself.

    If we recompute, `args`, those of the engine, no longer request it, and our argument in `kwargs` does.
    """
    names = [name for name in ("activation_checkpointing", "gradient_checkpointing") if getattr(args, name, False)]
    if not names:
        return
    if not isinstance(kwargs.get("gradient_checkpointing"), (list, tuple)):
        fill_arguments({"gradient_checkpointing": True}, kwargs, "the training arguments")
        if builtin_checkpointing(unwrap(model)) is not None:
            return  # transformers' loop enables it, with the options in its arguments
    for name in names:
        setattr(args, name, False)


def reject_dataset_fields(args: transformers.TrainingArguments | None) -> None:
    """Raise ConfigError for arguments without effect on training data that are no map-style dataset."""
    if args is None:
        return
    has_other_order = args.data_seed not in (None, args.seed)
    for name, is_set_by_user in (("dataloader_drop_last", args.dataloader_drop_last), ("data_seed", has_other_order)):
        if is_set_by_user:
            raise ConfigError(
                f"`training_args.{name}={getattr(args, name)!r}` would have no effect on a stream or a custom loader, "
                "of which transformers' loop sees no single sample. Leave it out."
            )


def _merge_metrics(args: transformers.TrainingArguments, kwargs: dict[str, Any]) -> None:
    """Check a metric function's inputs, and warn if it is called batch by batch."""
    for name in args.include_for_metrics or ():
        if name not in ("inputs", "loss"):
            nearest = did_you_mean(name, ["inputs", "loss"])
            raise ConfigError(
                f"`training_args.include_for_metrics` may hold 'inputs' and 'loss', got {name!r}.{nearest}"
            )
    metrics = kwargs.get("compute_metrics")
    if args.prediction_loss_only:
        kwargs["compute_metrics"] = None
    elif args.batch_eval_metrics and metrics is not None:
        if args.include_for_metrics:
            raise ConfigError(
                f"`training_args.batch_eval_metrics=True` and their `include_for_metrics={args.include_for_metrics!r}` "
                "are both set. Leave one of them out."
            )
        is_function = callable(metrics) and not isinstance(metrics, torch.nn.Module)
        if not is_function or "compute_result" not in inspect.signature(metrics).parameters:
            raise ConfigError(
                "`training_args.batch_eval_metrics=True` is for a `compute_metrics` that is called as f(eval_pred, "
                f"compute_result=...), got {metrics!r}. Add that argument, or leave batch_eval_metrics out: "
                "metrics by name, and those of torchmetrics, keep no predictions anyway."
            )
        kwargs["compute_metrics"] = ByBatch(metrics)


def _merge_arguments(args: transformers.TrainingArguments, values: Mapping[str, Any], kwargs: dict[str, Any]) -> None:
    """Fill our arguments from transformers', except those of the user, which must not contradict."""
    user_metric = kwargs.get("optimization_metric")
    # transformers creates these, unless the user has passed ours
    created = {"optimizer": enum_value(args.optim), "lr_scheduler": enum_value(args.lr_scheduler_type)}
    compared = {name: value for name, value in created.items() if isinstance(kwargs.get(name), str)}
    if kwargs.get("warmup_steps") is not None:
        compared["warmup_steps"] = args.warmup_steps
    for name, value in {**values, **compared}.items():
        if kwargs.get(name) is None and not (name == "max_grad_norm" and name in kwargs):  # None means no clipping
            if name != "optimization_direction" or user_metric in (None, values.get("optimization_metric")):
                kwargs[name] = value  # a direction belongs to the metric named with it
            continue
        argument, fields = kwargs[name], _user_fields(args, name)
        if fields and value is not None and not _is_equivalent(name, argument, value):
            spelled = " and ".join(f"`{field}={field_value!r}`" for field, field_value in fields.items())
            shown = str(argument) if isinstance(argument, Path) else argument
            raise ConfigError(
                f"`{name}={shown!r}` contradicts {spelled} of the training arguments. Leave one of them out."
            )


def _is_equivalent(name: str, argument: Any, value: Any) -> bool:
    """Return whether one of our arguments means the same as theirs."""
    if name == "optimization_metric":
        argument, value = str(argument).removeprefix("eval_"), str(value).removeprefix("eval_")
    if name == "optimizer":  # such as "adamw" and "adamw_torch_fused"
        return argument.rpartition(".")[2].lower() in value
    return argument == value or str(argument) == str(value)


def fill_arguments(values: Mapping[str, Any], kwargs: dict[str, Any], source: str) -> None:
    """Fill our arguments from another source, unless the user passed another value; None means not set."""
    for name, value in values.items():
        argument = kwargs.get(name)
        if argument is None:
            kwargs[name] = value
        elif value is not None and argument != value and str(argument) != str(value):
            raise ConfigError(
                f"`{name}={argument!r}` contradicts {source} ({name}={value!r}). Leave it out of one of them."
            )


def _translate_fields(args: transformers.TrainingArguments) -> dict[str, Any]:
    """Return transformers' arguments as ours, without those that request nothing."""
    values: dict[str, Any] = {name: getattr(args, FIELDS.get(name, (name,))[0]) for name in _SAME_VALUES}
    evaluates, saves = enum_value(args.eval_strategy), enum_value(args.save_strategy)
    metric = args.metric_for_best_model
    values |= {
        "epochs": args.num_train_epochs if args.max_steps <= 0 else None,
        "max_steps": args.max_steps if args.max_steps > 0 else None,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "shuffle": enum_value(getattr(args, "train_sampling_strategy", "random")) != "sequential",
        "log_steps": _interval(enum_value(args.logging_strategy), args.logging_steps),
        "eval_steps": None if evaluates == "no" else _interval(evaluates, args.eval_steps),
        "autocast": None if args.mixed_precision == "no" else args.mixed_precision,
        "lr_scheduler_kwargs": args.lr_scheduler_kwargs or None,
        "optimization_metric": metric,
        # transformers itself fills in True, so only False is the user's
        "optimization_direction": "min" if args.greater_is_better is False and metric is not None else None,
        "trial_name": None if args.run_name == args.output_dir else args.run_name,
        "microbatch_size": "auto" if args.auto_find_batch_size else None,
        "matmul_precision": None if args.tf32 is None else "high" if args.tf32 else "highest",
        "label_names": list(args.label_names or ()) or None,
        "progress_bar": False if args.disable_tqdm else None,
        "timeout": args.ddp_timeout if args.ddp_timeout != 1800 and args.world_size > 1 else None,  # our default too
    }
    if saves != "no":
        values |= {name: getattr(args, name) for name in ("save_total_limit", "save_only_model")}
        values |= {"save_dir": args.output_dir, "save_steps": _interval(saves, args.save_steps)}
        values["overwrite"] = getattr(args, "overwrite", False) or None  # only HFTrainingArguments has it
    values = {name: value for name, value in values.items() if value is not None}
    return {**values, "max_grad_norm": args.max_grad_norm or None}  # None means no clipping


def sharding_accelerator(args: transformers.TrainingArguments | None, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return an `Accelerator` that shards the weights, and DeepSpeed's schedule; None for each without a request.

    `accelerate launch` may request sharding too. Values set only in DeepSpeed's configuration are filled into `kwargs`.
    """
    config = getattr(args, "hf_deepspeed_config", None)  # where "auto" is filled in from the arguments
    zero = deepspeed_plugin(None if config is None else config.config)
    options, schedule, fsdp = getattr(args, "fsdp_plugin_args", None), None, None
    if zero is None and options is None and not is_set("ACCELERATE_USE_FSDP"):
        return None, None
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name, False):
            raise ConfigError(f"`training_args.{name}=True` is not supported with FSDP or DeepSpeed. Leave it out.")
    if zero is not None:
        if accumulation_options(args).get("sync_each_batch"):
            raise ConfigError(
                "`training_args.accelerator_config` has sync_each_batch=True, but DeepSpeed accumulates gradients "
                "itself; the numbers are the same. Leave it out."
            )
        if args is not None and kwargs.get("lr_scheduler") is None:
            schedule = zero.deepspeed_config.pop("scheduler", None)
        merge_config(zero, kwargs)
        if mismatches := getattr(config, "mismatches", None):
            raise ConfigError(
                "`training_args.deepspeed` contradicts the other training arguments:\n"
                + "\n".join(mismatches)
                + "\nSet both to the same values, or to 'auto' in the configuration."
            )
    elif options is not None and args is not None:
        if options["fsdp_version"] != 2:
            raise ConfigError(
                f"`training_args.fsdp_config` requests FSDP {options['fsdp_version']}, explicitly or by default; "
                "PyTorch has replaced it. Pass fsdp_config={'version': 2}."
            )
        settings: Any = args.fsdp_config  # transformers 5.4 does not pass all of it to the plugin
        untranslated = {name: settings[name] for name in ("activation_checkpointing",) if name in settings}
        fsdp = FullyShardedDataParallelPlugin(**{**options, **untranslated})
    precision, timeout = accelerate_precision(kwargs.get("autocast")), timeout_seconds(kwargs)
    return make_accelerator(precision=precision, deepspeed_plugin=zero, fsdp_plugin=fsdp, timeout=timeout), schedule


def timeout_seconds(kwargs: Mapping[str, Any]) -> float | None:
    """Return the `timeout` among the keyword arguments for our trainer in seconds; None if not set."""
    return None if kwargs.get("timeout") is None else parse_seconds("timeout", kwargs["timeout"])


def enum_value(choice: Any) -> Any:
    """Return the string value of one of transformers' enumerations."""
    return getattr(choice, "value", choice)


def _interval(strategy: str, steps: Any) -> Any:
    """Return an interval in our form, which can be a fraction of the run too."""
    if strategy == "epoch":
        return "1ep"
    if strategy in ("no", "best"):  # a callback saves for "best", see `policy_callbacks`
        return "1dur"
    return f"{steps}dur" if isinstance(steps, float) and steps < 1 else int(steps)


def resolve_alias(name: str, value: Any, alias: str, alias_value: Any) -> Any:
    """Return the value passed under one of two names, or None; values under both are an error."""
    if value is not None and alias_value is not None:
        raise ConfigError(f"`{name}` and `{alias}` are two names of one argument. Leave one of them out.")
    return alias_value if value is None else value


def scheduler_factory(args: transformers.TrainingArguments, warmup: int, steps: int | None) -> Callable[[Any], Any]:
    """Return a callable that builds the schedule named in transformers' arguments, for a run of this many steps."""
    return functools.partial(
        transformers.get_scheduler, args.lr_scheduler_type, num_warmup_steps=warmup, num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs or {},  # type: ignore[arg-type]
    )  # fmt: skip


def default_training_args(output_dir: str, timeout: float | None, **fields: Any) -> transformers.TrainingArguments:
    """Return training arguments for a user who has passed none; `timeout` is in seconds."""
    with watch_init_process_group(timeout) as init_method:
        if init_method is not None and not torch.distributed.is_initialized():
            limit = datetime.timedelta(seconds=1800)  # as in transformers for NCCL, whose default is shorter
            PartialState(cpu=fields.get("use_cpu", False), init_method=init_method, timeout=limit)
        return transformers.TrainingArguments(output_dir, report_to=[], **fields)


def reject_fp16_on_cpu(args: transformers.TrainingArguments | None, device: torch.device) -> None:
    """Raise ConfigError for `fp16` in the training arguments if transformers would train without it."""
    if args is not None and args.fp16 and device.type == "cpu":
        raise ConfigError(
            "`training_args.fp16=True` is not available on a CPU, and transformers would silently ignore it. "
            "Use `bf16=True` there, or a GPU."
        )


def engine_arguments(args: transformers.TrainingArguments, output_dir: str) -> transformers.TrainingArguments:
    """Return the engine's arguments: a copy of the user's, except for those that our lifecycle decides."""
    engine = copy.copy(args)
    overrides = {
        "max_grad_norm": 0.0,  # the Bridge clips
        "logging_nan_inf_filter": False,
        "load_best_model_at_end": False,
        "save_total_limit": None,
        "eval_on_start": False,
        "ignore_data_skip": False,
        "max_steps": -1,
        "num_train_epochs": 1_000_000,  # the lifecycle ends the run
        "torch_compile": False,  # the backend compiles
        "torch_compile_backend": None,
        "torch_compile_mode": None,
        "mixed_precision": "no",  # the trainer does autocast and loss scaling
        "auto_find_batch_size": False,  # it is `microbatch_size`; transformers' version changes the steps
        "enable_jit_checkpoint": False,  # a signal saves anyway
        # the trainer decides about sharding, too
        "fsdp": "",
        "fsdp_plugin_args": None,
        "deepspeed": None,
        "deepspeed_plugin": None,
        "label_smoothing_factor": 0,  # the trainer computes the loss; theirs needs a config, which some models lack
        # transformers seeds the program when its Trainer is created, with seeds below 2**32; we seed the run
        "seed": args.seed % 2**32 if isinstance(args.seed, int) else 0,
        "eval_strategy": IntervalStrategy.NO,
        "logging_strategy": IntervalStrategy.NO,
        "save_strategy": SaveStrategy.NO,
        "output_dir": output_dir,
    }
    vars(engine).update(overrides)
    if engine.accelerator_config is not None:  # transformers would modify the user's object
        config: Any = copy.copy(engine.accelerator_config)
        config.gradient_accumulation_kwargs = None
        engine.accelerator_config = config
    return engine


def effective_arguments(
    args: transformers.TrainingArguments, settings: Settings, user_arguments: Collection[str], evaluates: bool
) -> transformers.TrainingArguments:
    """Return the training arguments for transformers' callbacks, with the values of our arguments.

    This is the user's object if our arguments change nothing. `user_arguments` are those that do not come from `args`.
    """
    effective = copy.copy(args)
    for name in user_arguments:
        value, field = getattr(settings, name, None), FIELDS.get(name, (name,))[0]
        if name in _INTERVALS:
            is_on = {"eval_steps": evaluates, "save_steps": settings.save_dir is not None}.get(name, True)
            strategy = "steps" if isinstance(value, int) else "epoch"
            setattr(effective, field, type(getattr(args, field))(strategy if is_on else "no"))
            if isinstance(value, int):
                setattr(effective, FIELDS[name][1], value)
        elif name in _EXPORTED and (value is not None or name == "max_grad_norm"):
            value = value is True if name == "save_only_model" else value
            setattr(effective, field, 0.0 if value is None else value)
    if settings.save_dir is not None and "save_dir" in user_arguments:
        effective.output_dir = str(settings.save_dir)
    return args if vars(effective) == vars(args) else effective


def reject_duplicate_loggers(args: transformers.TrainingArguments | None, loggers: object) -> None:
    """Raise ConfigError for a service in both `loggers` and `report_to` of the training arguments."""
    if args is None or loggers is None:
        return
    reported = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])
    logger_list = loggers if isinstance(loggers, (list, tuple)) else [loggers]
    names = [entry if isinstance(entry, str) else getattr(entry, "name", "") for entry in logger_list]
    duplicates = [name for name in names if name in reported or (name and "all" in reported)]
    if duplicates:
        raise ConfigError(
            f"`loggers` and `report_to` of the training arguments both have {duplicates[0]!r}, which would log each "
            "row twice. Leave it out of one of them; `report_to` uses transformers' callbacks."
        )
