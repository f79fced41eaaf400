"""The DeepSpeed configuration and its relation to the trainer's arguments.

`zero.py` has what DeepSpeed does with the model.
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnitrain.backends.compile_cache import use_compile_cache
from omnitrain.compute.precision import choose_device
from omnitrain.core.errors import ConfigError, MissingExtraError

logger: logging.Logger = logging.getLogger("omnitrain")

# Valid entries of a configuration that are not among DeepSpeed's constants.
_ENTRIES = {
    "activation_checkpointing", "aio", "amp", "autotuning", "comms_logger", "compile", "compression_training",
    "csv_monitor", "curriculum_learning", "data_efficiency", "eigenvalue", "elasticity", "flops_profiler",
    "hybrid_engine", "nebula", "pipeline", "progressive_layer_drop", "sparse_attention", "tensorboard", "timers",
    "wandb", "weight_quantization", "zero_optimization",
}  # fmt: skip


def deepspeed_plugin(config: str | Path | Mapping[str, Any] | None) -> Any:
    """Return accelerate's plugin for a DeepSpeed configuration, or for the launcher's settings; None without either.

    Args:
        config: A path, a dict (`{}` is ZeRO 2 with its defaults), or None for the launcher's settings.

    Raises:
        ConfigError: If the file cannot be read.
    """
    from_launcher = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if config is None and not from_launcher:
        return None
    if choose_device(None).type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it on import
    try:
        import deepspeed  # noqa: F401
        from accelerate.utils import DeepSpeedPlugin
    except ImportError:
        raise MissingExtraError("deepspeed_config", "deepspeed", "deepspeed") from None
    use_compile_cache()
    if config is None:
        return DeepSpeedPlugin()
    if isinstance(config, (str, Path)):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"`deepspeed_config={str(config)!r}` cannot be read: {error}.") from error
    content = json.loads(json.dumps(config))  # a copy, which DeepSpeed may modify
    content.setdefault("zero_optimization", {"stage": 2})
    return DeepSpeedPlugin(hf_ds_config=content)


def _check_misspelled(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for an entry that resembles one of DeepSpeed's, which ignores unknown entries."""
    from deepspeed.runtime import constants

    known = _ENTRIES | {value for value in vars(constants).values() if isinstance(value, str)}
    for key in config:
        near = [] if key in known else difflib.get_close_matches(key, known, 1, 0.85)
        if near:
            raise ConfigError(f"The DeepSpeed configuration has {key!r}, which it ignores. Did you mean {near[0]!r}?")


def merge_config(plugin: Any, arguments: dict[str, Any]) -> None:
    """Reconcile the DeepSpeed configuration with the trainer's arguments.

    Values set only in the configuration become the trainer's arguments; values set in both must be equal.

    Args:
        plugin: accelerate's `DeepSpeedPlugin`, with the configuration.
        arguments: The keyword arguments that the user passed; missing ones are filled in.

    Raises:
        ConfigError: If they contradict each other; the message names both values.
    """
    config = plugin.deepspeed_config
    _check_misspelled(config)
    if "scheduler" in config:
        raise ConfigError(
            "The DeepSpeed configuration has a 'scheduler', but the schedule is stepped by the trainer, so that it is "
            "the same everywhere. Remove it and pass `lr_scheduler` and `warmup_steps`."
        )
    if "optimizer" in config and arguments.get("optimizer") is not None:
        raise ConfigError(
            f"The DeepSpeed configuration has the optimizer {config['optimizer'].get('type')!r}, and "
            f"`optimizer={arguments['optimizer']!r}` is passed too. Leave one of them out."
        )
    for name in ("param_groups", "optimizer_kwargs"):
        if "optimizer" in config and arguments.get(name) is not None:
            raise ConfigError(
                f"`{name}` has no effect on the optimizer that the DeepSpeed configuration names. Remove it there, and "
                "pass `optimizer` and `learning_rate`."
            )
    names = {
        "train_micro_batch_size_per_gpu": "batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "max_grad_norm",
        "train_batch_size": "global_batch_size",
    }
    for key, name in names.items():
        setting = config.get(key, "auto")
        if setting == "auto" or (key == "gradient_accumulation_steps" and setting == 1):
            continue  # accelerate writes a 1 if nothing was set
        argument = arguments.get(name, setting)
        argument = 0.0 if argument is None and key == "gradient_clipping" else argument
        if argument is not None and argument != setting:
            raise ConfigError(
                f"The DeepSpeed configuration says {key}={setting}, and the argument `{name}` {arguments.get(name)}. "
                f"Give both the same value, or set 'auto' in the configuration."
            )
        arguments[name] = setting if setting or key != "gradient_clipping" else None
    for precision in ("fp16", "bf16"):
        setting = config.get(precision, {}).get("enabled", "auto")
        autocast = arguments.get("autocast")
        if (setting is True and autocast not in (None, precision)) or (setting is False and autocast == precision):
            raise ConfigError(
                f"The DeepSpeed configuration {'enables' if setting else 'disables'} {precision}, and "
                f"`autocast={autocast!r}`. Make them agree."
            )
        if setting is True:
            arguments["autocast"] = precision


def fill_config(
    plugin: Any, batch_size: int, max_grad_norm: float | None, world_size: int, reductions: str | None = None
) -> None:
    """Put the trainer's settings into the DeepSpeed configuration, "auto" or not.

    Raises:
        ConfigError: If the configuration says that gradients are added up in another dtype.
    """
    setting = plugin.deepspeed_config.get("communication_data_type")
    if reductions is not None and setting not in (None, "auto", reductions):
        raise ConfigError(
            f"The DeepSpeed configuration says communication_data_type={setting!r}, and `dtypes` sets 'reductions' to "
            f"{reductions!r}. Leave one of them out."
        )
    if reductions is not None:
        plugin.deepspeed_config["communication_data_type"] = reductions
    # The loop counts windows: it tells DeepSpeed at each micro-batch whether it is the last of a step.
    plugin.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": 1,
        "train_batch_size": batch_size * world_size,
        "gradient_clipping": 0.0 if max_grad_norm is None else max_grad_norm,
    }


def deepspeed_scheduler(content: Mapping[str, Any], **automatic: Any) -> Any:
    """Return the 'scheduler' of a DeepSpeed configuration as a callable of the optimizer; `automatic` is for "auto".

    Raises:
        ConfigError: If DeepSpeed has no such schedule.
    """
    from deepspeed.runtime import lr_schedules

    name = content.get("type")
    if name not in lr_schedules.VALID_LR_SCHEDULES:
        raise ConfigError(
            f"The DeepSpeed configuration has the scheduler {name!r}, which is none of "
            f"{', '.join(lr_schedules.VALID_LR_SCHEDULES)}."
        )
    options = {
        key: automatic.get(key) if value == "auto" else value for key, value in content.get("params", {}).items()
    }
    return functools.partial(getattr(lr_schedules, str(name)), **options)
