"""transformers' TrainingArguments, translated to a trainer's arguments and back, including their former names.

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
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from omnitrain.arguments import Settings, is_loader, seconds_of
from omnitrain.backends.accelerators import check_launched, is_set, make_accelerator
from omnitrain.backends.deepspeed import deepspeed_plugin, merge_config
from omnitrain.checkpoint.state_dicts import unwrap
from omnitrain.compute.activation_checkpointing import own_way
from omnitrain.compute.precision import precision_name
from omnitrain.core.errors import ConfigError, did_you_mean, unexpected_arguments
from omnitrain.distributed.rendezvous import meeting
from omnitrain.metrics.scorer import ByBatch

logger: logging.Logger = logging.getLogger("omnitrain")

RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "no_cuda": "use_cpu",
    "push_to_hub_token": "hub_token",
    "push_to_hub_model_id": "hub_model_id",
    "include_tokens_per_second": "include_num_input_tokens_seen",
}
"""Names that transformers has dropped, and their replacements."""

MOVED = ("logging_dir", "warmup_ratio", "overwrite_output_dir", "adafactor", "group_by_length")
"""Names that transformers has dropped and whose values are translated; see `_translate`."""

WITHOUT_EFFECT = (
    "save_safetensors",
    "half_precision_backend",
    "fp16_backend",
    "fp16_opt_level",
    "use_ipex",
    "use_mps_device",
    "jit_mode_eval",
    "sharded_ddp",
    "past_index",
    "tpu_num_cores",
    "tpu_metrics_debug",
    "prediction_loss_only_eval",
    "ray_scope",
    "torchdynamo",
    "mp_parameters",
)
"""Names that transformers has dropped because they ask for what happens anyway, or for what no longer exists."""


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
            target = self._translate(name, value, kwargs)
            if target is None:
                nearest = did_you_mean(name, [*known, *RENAMED, *MOVED, *WITHOUT_EFFECT])
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
        if config is not None and config.is_zero3():  # from_pretrained would go by it, and end in an error about MPI
            check_launched(True)

    overwrite = False
    """The value of `overwrite_output_dir`."""

    def _translate(self, name: str, value: Any, kwargs: dict[str, Any]) -> str | None:
        """Translate a dropped argument into `kwargs`, and return in words what became of it; None if unknown."""
        if name in RENAMED:
            new = RENAMED[name]
            if new in kwargs and kwargs[new] != value:
                raise ConfigError(
                    f"`{name}={value!r}` and `{new}={kwargs[new]!r}` say different things. Drop the first."
                )
            kwargs[new] = value
            return f"now {new!r}"
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
        if name == "adafactor":
            if value:
                kwargs["optim"] = "adafactor"
            return "now optim='adafactor'"
        if name == "group_by_length":
            if value:
                kwargs["train_sampling_strategy"] = "group_by_length"
            return "now 'train_sampling_strategy'"
        return "without effect" if name in WITHOUT_EFFECT else None


UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "train_sampling_strategy": ("random", "sequential", "group_by_length"),
    "sortish_sampler": (False,),
    "eval_do_concat_batches": (True,),
    "parallelism_config": (None,),
    "save_on_each_node": (False,),
    "ignore_data_skip": (False,),
    "average_tokens_across_devices": (True,),
    "dataloader_in_order": (True,),
    "dataloader_multiprocessing_context": (None,),
}
"""Fields that have no effect here, with the values that are allowed because they ask for nothing."""


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
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "accelerator_config"),
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
"""The fields of transformers' arguments that mean the same as one of ours under another name."""


def _user_fields(args: transformers.TrainingArguments, name: str) -> dict[str, Any]:
    """Return the fields for one of our arguments that the user has set, those that differ from their default."""
    defaults = {
        field.name: field.default if field.default is not dataclasses.MISSING else None
        for field in dataclasses.fields(args)
    }
    # values that transformers fills in are not the user's
    derived = {"output_dir": "trainer_output"}
    if args.load_best_model_at_end:
        derived["metric_for_best_model"] = "loss"
    found = {}
    for field in FIELDS.get(name, (name,)):
        value = enum_value(getattr(args, field, None))
        if field == "accelerator_config":
            value = _accelerate_steps(args)
        if value != enum_value(defaults.get(field)) and value not in ({}, derived.get(field, {})):
            found[field] = value
    return found


def _accelerate_accumulation(args: transformers.TrainingArguments | None) -> Mapping[str, Any]:
    config = None if args is None else args.accelerator_config
    return getattr(config, "gradient_accumulation_kwargs", None) or {}


def _accelerate_steps(args: transformers.TrainingArguments) -> int | None:
    """Return the number of accumulation steps in the settings for accelerate; None if not set."""
    return _accelerate_accumulation(args).get("num_steps")


def syncs_each_batch(args: transformers.TrainingArguments | None) -> bool:
    """Return whether to exchange gradients after each micro-batch, which saves memory under FSDP."""
    return bool(_accelerate_accumulation(args).get("sync_each_batch"))


def merge_training_args(args: transformers.TrainingArguments, given: dict[str, Any]) -> None:
    """Fill our arguments from transformers'; contradictions are an error.

    An argument of ours takes precedence over a field of `args` with its default value, as the user has not set that.

    Args:
        args: The user's TrainingArguments.
        given: The keyword arguments that the user passed to HFTrainer; missing ones are filled in.

    Raises:
        ConfigError: If both are set and differ, or if `args` asks for something unsupported.
    """
    for name, idle in UNSUPPORTED.items():
        value = enum_value(getattr(args, name, idle[0]))
        if value not in idle:
            raise ConfigError(f"`training_args.{name}={value!r}` is not supported by HFTrainer. {_ADVICE[name]}")
    if enum_value(args.optim) in ("lomo", "adalomo") or str(enum_value(args.optim)).endswith("_layerwise"):
        raise ConfigError(
            f"`training_args.optim={enum_value(args.optim)!r}` updates weights while gradients are computed, before "
            "they are known to be finite, and has no state that a checkpoint could hold. Choose the one without "
            "layers, such as 'galore_adamw' or 'adamw_torch'."
        )
    steps = args.gradient_accumulation_steps
    if steps != 1 and _accelerate_steps(args) not in (None, steps):
        raise ConfigError(
            f"`training_args.gradient_accumulation_steps={steps}` and num_steps={_accelerate_steps(args)} of their "
            "`accelerator_config` are two numbers for one thing. Leave one of them out."
        )
    meant = [name for name in ("save_steps", "save_dir") if given.get(name) is not None]
    if meant and enum_value(args.save_strategy) == "no":
        raise ConfigError(
            f"`{meant[0]}={str(given[meant[0]])!r}` contradicts the training arguments, which say save_strategy='no'. "
            "Set their save_strategy instead."
        )
    if args.torch_compile:
        if given.get("compile") not in (None, False):
            raise ConfigError("`compile` and torch_compile=True of the training arguments are both set. Leave one out.")
        options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        given["compile"] = {name: value for name, value in options.items() if value is not None}
    _merge_metrics(args, given)
    said = _translate_fields(args)
    if getattr(args.accelerator_config, "split_batches", False):
        for name in ("batch_size", "eval_batch_size"):
            if said[name] % args.world_size:
                raise ConfigError(
                    f"`training_args.accelerator_config` has split_batches=True, which shares a batch of {said[name]} "
                    f"out to {args.world_size} processes. Choose a batch size that they divide."
                )
            said[name] //= args.world_size
    has_own_length = given.get("max_duration") is not None and args.num_train_epochs == _DEFAULT_EPOCHS
    if given.get("epochs") is None and (given.get("max_steps") is not None or has_own_length):
        del said["epochs"]  # as in transformers, where `max_steps` replaces the epochs
    if given.get("optimizer") is not None and not isinstance(given["optimizer"], (str, type)):
        del said["learning_rate"], said["weight_decay"]  # they are for an optimizer that we would create
    if given.get("train_loader") is not None or is_loader(given.get("train_dataset")):
        for name in ("batch_size", "pin_memory"):
            said.pop(name, None)  # training arguments always have a value
    if all(given.get(name) is None for name in ("eval_dataset", "eval_loader")):
        for name in ("optimization_metric", "optimization_direction"):
            said.pop(name, None)  # transformers' scripts name a metric even if they do not evaluate
    _merge_arguments(args, said, given)


def warn_unread_fields(args: transformers.TrainingArguments) -> None:
    """Warn about fields of another library's training arguments that nothing here reads.

    Fields of the user's own class are for the user's own program.
    """
    known = {field.name for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    own = [field for field in dataclasses.fields(args) if field.name not in known]
    module = sys.modules.get(type(args).__module__)
    is_of_library = not {"site-packages", "dist-packages"}.isdisjoint(Path(getattr(module, "__file__", "") or "").parts)
    if not own or not is_of_library or args.process_index:
        return
    made = {one.name: one.default_factory() for one in own if callable(one.default_factory)}
    found = {one.name: getattr(args, one.name) for one in own}
    said = [f"{one.name}={found[one.name]!r:.80}" for one in own if found[one.name] != made.get(one.name, one.default)]
    logger.warning(
        "%s has %d fields beside those of TrainingArguments, which are for a trainer of %r and are not read here%s. "
        "Prepare model and data as they say, or let that trainer do so.",
        type(args).__name__, len(own), type(args).__module__.partition(".")[0],
        f", not even {', '.join(said)}" if said else "",
    )  # fmt: skip


def merge_activation_checkpointing(args: transformers.TrainingArguments, model: Any, given: dict[str, Any]) -> None:
    """Let us recompute activations if transformers' arguments ask for it and the model has no support of its own.

    Args:
        args: The engine's arguments; if we recompute, they no longer ask for it.
        model: The user's model.
        given: The keyword arguments that the user passed to HFTrainer; missing ones are filled in.

    Raises:
        ConfigError: If these say that activations are kept.
    """
    names = [name for name in ("activation_checkpointing", "gradient_checkpointing") if getattr(args, name, False)]
    if not names:
        return
    if not isinstance(given.get("gradient_checkpointing"), (list, tuple)):
        fill_arguments({"gradient_checkpointing": True}, given, "the training arguments")
        if own_way(unwrap(model)) is not None:
            return  # transformers' loop enables it, with the options in its arguments
    for name in names:
        setattr(args, name, False)


def reject_dataset_fields(args: transformers.TrainingArguments | None, has_order: bool) -> None:
    """Refuse arguments without effect on training data that transformers' loop gets in whole steps.

    Args:
        args: The user's TrainingArguments.
        has_order: Whether the data nevertheless are a dataset, whose samples can be named.

    Raises:
        ConfigError: It names the argument.
    """
    if args is None:
        return
    asked = {
        "dataloader_drop_last": args.dataloader_drop_last and not has_order,
        "data_seed": args.data_seed not in (None, args.seed) and not has_order,
        "include_num_input_tokens_seen": enum_value(args.include_num_input_tokens_seen) not in ("no", False),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise ConfigError(
                f"`training_args.{name}={getattr(args, name)!r}` would have no effect on "
                + ("whole steps, as `microbatch_size` has them" if has_order else "a stream or a loader of your own")
                + ", where transformers' loop sees no single batch. Leave it out."
            )


def _merge_metrics(args: transformers.TrainingArguments, given: dict[str, Any]) -> None:
    """Check a metric function's inputs, and warn if it is called batch by batch."""
    for name in args.include_for_metrics or ():
        if name not in ("inputs", "loss"):
            nearest = did_you_mean(name, ["inputs", "loss"])
            raise ConfigError(
                f"`training_args.include_for_metrics` may hold 'inputs' and 'loss', got {name!r}.{nearest}"
            )
    metrics = given.get("compute_metrics")
    if args.prediction_loss_only:
        given["compute_metrics"] = None
    elif args.batch_eval_metrics and metrics is not None:
        if args.include_for_metrics:
            raise ConfigError(
                f"`training_args.batch_eval_metrics=True` and their `include_for_metrics={args.include_for_metrics!r}` "
                "are both set. Leave one of them out."
            )
        takes = [] if not callable(metrics) or isinstance(metrics, torch.nn.Module) else _parameters_of(metrics)
        if "compute_result" not in takes:
            raise ConfigError(
                "`training_args.batch_eval_metrics=True` is for a `compute_metrics` that is called as f(eval_pred, "
                f"compute_result=...), got {metrics!r}. Give it that argument, or leave batch_eval_metrics out: "
                "metrics by name, and those of torchmetrics, keep no predictions anyway."
            )
        given["compute_metrics"] = ByBatch(metrics)


def _parameters_of(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _merge_arguments(args: transformers.TrainingArguments, said: Mapping[str, Any], given: dict[str, Any]) -> None:
    """Fill our arguments from transformers', except those that the user passed.

    Raises:
        ConfigError: If the user set both, and they differ.
    """
    own_metric = given.get("optimization_metric")
    for name, value in {**said, **_optimizer_fields(args, given)}.items():
        if given.get(name) is None and not (name == "max_grad_norm" and name in given):  # whose None has a meaning
            if name != "optimization_direction" or own_metric in (None, said.get("optimization_metric")):
                given[name] = value  # a direction belongs to the metric named with it
            continue
        own, theirs = given[name], _user_fields(args, name)
        if theirs and value is not None and not _is_same(name, own, value):
            spelled = " and ".join(f"`{field}={word!r}`" for field, word in theirs.items())
            raise ConfigError(
                f"`{name}={str(own) if isinstance(own, Path) else own!r}` contradicts {spelled} of the training "
                "arguments. Leave one of them out."
            )


def _optimizer_fields(args: transformers.TrainingArguments, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer, the schedule and its warm-up named in transformers' arguments, if the user named one here.

    Otherwise transformers creates them.
    """
    found = {"optimizer": args.optim, "lr_scheduler": args.lr_scheduler_type}
    named: dict[str, Any] = {name: enum_value(word) for name, word in found.items() if isinstance(given.get(name), str)}
    if given.get("warmup_steps") is not None:
        named["warmup_steps"] = args.warmup_steps
    return named


def _is_same(name: str, own: Any, value: Any) -> bool:
    """Return whether one of our arguments means the same as theirs."""
    if name == "optimization_metric":
        own, value = str(own).removeprefix("eval_"), str(value).removeprefix("eval_")
    if name == "optimizer":  # such as "adamw" and "adamw_torch_fused"
        return own.rpartition(".")[2].lower() in value
    return own == value or str(own) == str(value)


def fill_arguments(said: Mapping[str, Any], given: dict[str, Any], who: str) -> None:
    """Fill our arguments from another source; None means not set.

    Raises:
        ConfigError: If one was also passed by the user, with another value.
    """
    for name, value in said.items():
        own = given.get(name)
        if own is None:
            given[name] = value
        elif value is not None and own != value and str(own) != str(value):
            raise ConfigError(
                f"`{name}={own!r}` contradicts {who}, which say {name}={value!r}. Leave it out of one of them."
            )


_DEFAULT_EPOCHS = transformers.TrainingArguments.__dataclass_fields__["num_train_epochs"].default

_GROUPED = (
    "Samples come in one order, which is the same on every number of processes. Use "
    "train_sampling_strategy='group_by_length', which keeps padding short, and ranks as busy as each other."
)
_ADVICE = {
    "train_sampling_strategy": _GROUPED,
    "sortish_sampler": _GROUPED,
    "eval_do_concat_batches": "Functions of metrics get whole arrays, filled up to one length. Leave it out; for "
    "metrics of single batches set batch_eval_metrics=True.",
    "ignore_data_skip": "A resumed run goes on with the sample that comes next, which costs nothing. Leave it out.",
    "average_tokens_across_devices": "Each label of a step counts the same, on whatever process it is. Leave it out.",
    "parallelism_config": "Use AccelerateTrainer with `parallelism_config`: its checkpoints and numbers are the same.",
    "dataloader_in_order": "Samples come in one order here, with any number of workers. Leave it out.",
    "dataloader_multiprocessing_context": "Call torch.multiprocessing.set_start_method() at the start of the program.",
    "save_on_each_node": "The main process writes checkpoints, and hands them to all others when they are read. Leave "
    "it out.",
}
"""The reason, and what to do instead."""


def _translate_fields(args: transformers.TrainingArguments) -> dict[str, Any]:
    """Return transformers' arguments as ours."""
    saves = enum_value(args.save_strategy)
    found: dict[str, Any] = {
        "epochs": args.num_train_epochs if args.max_steps <= 0 else None,
        "max_steps": args.max_steps if args.max_steps > 0 else None,
        "batch_size": args.per_device_train_batch_size,
        "eval_batch_size": args.per_device_eval_batch_size,
        "learning_rate": args.learning_rate,
        "weight_decay": args.weight_decay,
        "gradient_accumulation_steps": _accelerate_steps(args) or args.gradient_accumulation_steps,
        "max_grad_norm": args.max_grad_norm or None,
        "seed": args.seed,
        "shuffle": enum_value(getattr(args, "train_sampling_strategy", "random")) != "sequential",
        "num_workers": args.dataloader_num_workers,
        "log_steps": _interval(enum_value(args.logging_strategy), args.logging_steps),
        "eval_on_start": args.eval_on_start,
        "deterministic": args.full_determinism,
        "autocast": None if args.mixed_precision == "no" else args.mixed_precision,
        "pin_memory": args.dataloader_pin_memory,
        "load_best_at_end": args.load_best_model_at_end,  # off by default, with and without checkpoints
    }
    if args.lr_scheduler_kwargs:
        found["lr_scheduler_kwargs"] = args.lr_scheduler_kwargs
    if enum_value(args.eval_strategy) != "no":
        found["eval_steps"] = _interval(enum_value(args.eval_strategy), args.eval_steps)
    if saves != "no":
        found["save_dir"] = args.output_dir
        found["save_total_limit"] = args.save_total_limit
        if getattr(args, "overwrite", False):  # only HFTrainingArguments has it
            found["overwrite"] = True
        found["save_only_model"] = args.save_only_model
        found["save_steps"] = _interval(saves, args.save_steps)
    if args.metric_for_best_model is not None:
        found["optimization_metric"] = args.metric_for_best_model
    if args.greater_is_better is False and args.metric_for_best_model is not None:
        found["optimization_direction"] = "min"  # transformers itself fills in True, so only False is the user's
    if args.run_name is not None and args.run_name != args.output_dir:
        found["trial_name"] = args.run_name
    if args.auto_find_batch_size:
        found["microbatch_size"] = "auto"
    if args.tf32 is not None:
        found["matmul_precision"] = "high" if args.tf32 else "highest"
    if args.label_names:
        found["label_names"] = list(args.label_names)
    if args.disable_tqdm:
        found["progress_bar"] = False
    if args.ddp_timeout != 1800 and args.world_size > 1:  # 1800 is our default too
        found["timeout"] = args.ddp_timeout
    if args.dataloader_prefetch_factor is not None:
        found["prefetch_factor"] = args.dataloader_prefetch_factor
    return found


def sharding_accelerator(args: transformers.TrainingArguments | None, given: dict[str, Any]) -> tuple[Any, Any]:
    """Return an `Accelerator` that shards the weights, and DeepSpeed's schedule; None for each that is not asked for.

    Args:
        args: The user's TrainingArguments; `accelerate launch` may ask for sharding too.
        given: The keyword arguments for our trainer; values set only in DeepSpeed's configuration are filled in.

    Raises:
        ConfigError: If they contradict each other, or ask for FSDP 1 or anything incompatible with sharding.
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
        if syncs_each_batch(args):
            raise ConfigError(
                "`training_args.accelerator_config` has sync_each_batch=True, but DeepSpeed has its own way of "
                "accumulating gradients; the numbers are the same. Leave it out."
            )
        if args is not None and given.get("lr_scheduler") is None:
            schedule = zero.deepspeed_config.pop("scheduler", None)
        merge_config(zero, given)
        if mismatches := getattr(config, "mismatches", None):
            raise ConfigError(
                "`training_args.deepspeed` contradicts the other training arguments:\n"
                + "\n".join(mismatches)
                + "\nGive both the same values, or say 'auto' in the configuration."
            )
    elif options is not None and args is not None:
        if options["fsdp_version"] != 2:
            raise ConfigError(
                f"`training_args.fsdp_config` asks for FSDP {options['fsdp_version']}, explicitly or by default; "
                "PyTorch has replaced it. Pass fsdp_config={'version': 2}."
            )
        settings: Any = args.fsdp_config  # transformers 5.4 does not pass all of it to the plugin
        kept = {name: settings[name] for name in ("activation_checkpointing",) if name in settings}
        fsdp = FullyShardedDataParallelPlugin(**{**options, **kept})
    precision = precision_name(given.get("autocast"))
    accelerator = make_accelerator(
        precision=precision, deepspeed_plugin=zero, fsdp_plugin=fsdp, timeout=timeout_seconds(given)
    )
    return accelerator, schedule


def timeout_seconds(given: Mapping[str, Any]) -> float | None:
    """Return the `timeout` among the keyword arguments for our trainer in seconds; None if not set."""
    return None if given.get("timeout") is None else seconds_of("timeout", given["timeout"])


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


def resolve_alias(name: str, value: Any, other_name: str, other: Any) -> Any:
    """Return the value passed under one of two names, or None.

    Raises:
        ConfigError: If values were passed under both.
    """
    if value is not None and other is not None:
        raise ConfigError(f"`{name}` and `{other_name}` are two names for one thing. Leave one of them out.")
    return other if value is None else value


def scheduler_factory(args: transformers.TrainingArguments, warmup: int, steps: int | None) -> Callable[[Any], Any]:
    """Return a callable that builds the schedule named in transformers' arguments, for a run of this many steps."""
    options: Any = args.lr_scheduler_kwargs or {}
    return functools.partial(
        transformers.get_scheduler, args.lr_scheduler_type, num_warmup_steps=warmup, num_training_steps=steps,
        scheduler_specific_kwargs=options,
    )  # fmt: skip


def default_training_args(output_dir: str, timeout: float | None, **ours: Any) -> transformers.TrainingArguments:
    """Return training arguments for a user who has passed none.

    Args:
        output_dir: The folder to which transformers may write.
        timeout: Seconds without progress until forming the process group fails; None is 30 minutes.
        ours: Fields that the trainer decides.
    """
    with meeting(timeout) as init_method:
        if init_method is not None and not torch.distributed.is_initialized():
            limit = datetime.timedelta(seconds=1800)  # as in transformers for NCCL, whose default is shorter
            PartialState(cpu=ours.get("use_cpu", False), init_method=init_method, timeout=limit)
        return transformers.TrainingArguments(output_dir, report_to=[], **ours)


def reject_fp16_on_cpu(args: transformers.TrainingArguments | None, device: torch.device) -> None:
    """Refuse `fp16` in the training arguments if transformers would train without it."""
    if args is not None and args.fp16 and device.type == "cpu":
        raise ConfigError(
            "`training_args.fp16=True` is not available on a CPU, and transformers would silently ignore it. "
            "Use `bf16=True` there, or a GPU."
        )


def engine_arguments(args: transformers.TrainingArguments, output_dir: str) -> transformers.TrainingArguments:
    """Return the engine's arguments: the user's, except for what our lifecycle decides.

    Args:
        args: The user's TrainingArguments, which stay unchanged.
        output_dir: The folder to which the engine may write.
    """
    engine = copy.copy(args)
    quiet = {
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
    }
    for name, value in {**quiet, "output_dir": output_dir}.items():
        setattr(engine, name, value)
    if engine.accelerator_config is not None:  # transformers would modify the user's object
        config: Any = copy.copy(engine.accelerator_config)
        config.gradient_accumulation_kwargs = None
        engine.accelerator_config = config
    # transformers seeds the program with it when its Trainer is created, with seeds below 2**32; we seed the run
    engine.seed = engine.seed % 2**32 if isinstance(engine.seed, int) else 0
    engine.eval_strategy = engine.logging_strategy = IntervalStrategy.NO
    engine.save_strategy = SaveStrategy.NO
    return engine


def effective_arguments(
    args: transformers.TrainingArguments, settings: Settings, own: Collection[str], evaluates: bool
) -> transformers.TrainingArguments:
    """Return the training arguments for transformers' callbacks, with the values of our own arguments.

    This is the user's own object if our arguments change nothing.

    Args:
        args: The user's TrainingArguments.
        settings: All of our arguments in force.
        own: Those that the user passed, or that do not come from `args`.
        evaluates: Whether the run evaluates.
    """
    shown = copy.copy(args)
    for name in own:
        value, field = getattr(settings, name, None), FIELDS.get(name, (name,))[0]
        if name in _INTERVALS:
            is_on = {"eval_steps": evaluates, "save_steps": settings.save_dir is not None}.get(name, True)
            word = "steps" if isinstance(value, int) else "epoch"
            setattr(shown, field, type(getattr(args, field))(word if is_on else "no"))
            if isinstance(value, int):
                setattr(shown, FIELDS[name][1], value)
        elif name in _SAME_VALUE and (value is not None or name == "max_grad_norm"):
            setattr(shown, field, 0.0 if value is None else value)
    if settings.save_dir is not None and "save_dir" in own:
        shown.output_dir = str(settings.save_dir)
    return args if vars(shown) == vars(args) else shown


_INTERVALS = ("log_steps", "eval_steps", "save_steps")

_SAME_VALUE = (
    "epochs", "max_steps", "batch_size", "eval_batch_size", "gradient_accumulation_steps", "learning_rate",
    "weight_decay", "warmup_steps", "max_grad_norm", "seed", "num_workers", "pin_memory", "prefetch_factor",
    "drop_last", "deterministic", "eval_on_start", "save_total_limit", "save_only_model", "load_best_at_end",
    "optimization_metric", "trial_name",
)  # fmt: skip
"""Our arguments whose values are also those of transformers' fields."""


def ddp_options(args: transformers.TrainingArguments, model: Any) -> Any:
    """Return accelerate's options for DDP from transformers' arguments; newer versions set them themselves."""
    from accelerate.utils import DistributedDataParallelKwargs

    unused = args.ddp_find_unused_parameters
    if unused is None:
        unused = not getattr(model, "is_gradient_checkpointing", False)
    options: dict[str, Any] = {"find_unused_parameters": unused}
    for name in ("bucket_cap_mb", "broadcast_buffers", "static_graph"):
        value = getattr(args, f"ddp_{name}", None)
        if value is not None:
            options[name] = value
    return DistributedDataParallelKwargs(**options)


def reject_duplicate_loggers(args: transformers.TrainingArguments | None, loggers: object) -> None:
    """Refuse a service that both `report_to` of the training arguments and `loggers` name: each row would go twice.

    Raises:
        ConfigError: Naming it.
    """
    if args is None or loggers is None:
        return
    told = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])
    given = loggers if isinstance(loggers, (list, tuple)) else [loggers]
    kinds = {"TensorBoardLogger": "tensorboard", "WandbLogger": "wandb"}
    names = [one if isinstance(one, str) else kinds.get(type(one).__name__, getattr(one, "name", "")) for one in given]
    twice = [name for name in names if name in told or (name and "all" in told)]
    if twice:
        raise ConfigError(
            f"`loggers` and `report_to` of the training arguments both name {twice[0]!r}: each row would be there "
            "twice. Leave it out of one of them; those of `report_to` are transformers' own."
        )
