"""Builds accelerate's `Accelerator` from the arguments and `accelerate launch`, and picks the backend.

DeepSpeed's configuration is in `deepspeed.py`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from omnitrain.backends.backend import Backend
from omnitrain.backends.ddp import DDP
from omnitrain.backends.fsdp import FSDP
from omnitrain.backends.zero import Zero
from omnitrain.distributed import Ranks
from omnitrain.errors import ConfigError, DistributedError, MissingExtraError
from omnitrain.precision import choose_device
from omnitrain.rendezvous import connected_ranks, meeting
from omnitrain.settings import Settings, check_same_on_ranks, check_type, describe

__all__ = [
    "adopt_precision",
    "backend_for",
    "find_ranks",
    "is_set",
    "make_accelerator",
    "refuse_lost_processes",
]

logger: logging.Logger = logging.getLogger("omnitrain")


def make_accelerator(
    *,
    precision: str,
    deepspeed_plugin: Any = None,
    fsdp_plugin: Any = None,
    parallelism_config: Any = None,
    find_unused_parameters: bool = False,
    timeout: float | None = None,
) -> Any:
    """Return accelerate's `Accelerator` for what was asked for here or by `accelerate launch`.

    Mixed precision is passed on to FSDP and DeepSpeed, which act on it when they wrap the model; autocast and loss
    scaling are the trainer's own. accelerate's number of accumulation steps stays 1: windows are counted by the loop,
    and accelerate would divide the last, short one by too much.

    Args:
        precision: "no", "fp16" or "bf16".
        deepspeed_plugin: accelerate's, if DeepSpeed is to train.
        fsdp_plugin: accelerate's, or None for what the launcher said.
        parallelism_config: accelerate's.
        find_unused_parameters: Whether DDP looks for parameters that a step did not use.
        timeout: Seconds without progress after which the meeting of the processes ends; None is 30 minutes.
    """
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import (
            DistributedDataParallelKwargs,
            DistributedType,
            FullyShardedDataParallelPlugin,
            GradientAccumulationPlugin,
        )
    except ImportError:
        raise MissingExtraError("AccelerateTrainer", "accelerate") from None

    check_type("fsdp_plugin", fsdp_plugin, FullyShardedDataParallelPlugin)
    _check_dimensions(parallelism_config)
    # One trainer after another, each with its own settings; the processes stay.
    kind = PartialState._shared_state.get("distributed_type")
    AcceleratorState._reset_state(deepspeed_plugin is None and kind == DistributedType.DEEPSPEED)
    has_gpu = choose_device(None).type != "cpu" and os.environ.get("ACCELERATE_USE_CPU", "false").lower() != "true"
    wants_fsdp = fsdp_plugin is not None or is_set("ACCELERATE_USE_FSDP")
    if wants_fsdp and fsdp_plugin is None:
        fsdp_plugin = FullyShardedDataParallelPlugin()
    if fsdp_plugin is not None and fsdp_plugin.fsdp_version != 2:
        raise ConfigError(
            "`fsdp_plugin` asks for FSDP 1, which PyTorch has replaced. Pass fsdp_version=2 to it, or set "
            "`fsdp_version: 2` in accelerate's config file."
        )
    handlers: list[Any] = [DistributedDataParallelKwargs(find_unused_parameters=find_unused_parameters)]
    before = {name: os.environ.get(name) for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")}
    if deepspeed_plugin is None:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    if not wants_fsdp:
        os.environ.pop("ACCELERATE_USE_FSDP", None)
    try:
        with meeting(timeout) as init_method:
            handlers.append(_meeting_of(init_method, deepspeed_plugin is not None and not has_gpu))
            accelerator = Accelerator(
                mixed_precision=precision if deepspeed_plugin is not None or wants_fsdp else "no",
                cpu=not has_gpu and deepspeed_plugin is None,
                deepspeed_plugin=deepspeed_plugin,
                fsdp_plugin=fsdp_plugin if has_gpu else None,
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
                kwargs_handlers=handlers,
                **({} if parallelism_config is None else {"parallelism_config": parallelism_config}),  # from 1.10 on
            )
        if wants_fsdp and not has_gpu:
            _shard_on_cpu(accelerator, fsdp_plugin, precision)
    except ValueError as error:
        if parallelism_config is None:
            raise
        raise ConfigError(
            f"`parallelism_config` cannot be used here: {error} Its sizes multiply to the number of processes, which "
            "train on GPUs; leave it out elsewhere."
        ) from error
    finally:  # accelerate leaves word there of what it made; a later trainer in this process may want something else
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    return accelerator


def _meeting_of(init_method: str | None, is_zero_on_cpu: bool) -> Any:
    """Return accelerate's options for forming the group of processes; DeepSpeed on a CPU gets one that is formed."""
    from accelerate.utils import InitProcessGroupKwargs

    if not is_zero_on_cpu:
        return InitProcessGroupKwargs(init_method=init_method)
    if init_method is not None and not torch.distributed.is_initialized():
        # before DeepSpeed compiles, as the processes would not hear of each other meanwhile
        torch.distributed.init_process_group("gloo", init_method=init_method)
    return InitProcessGroupKwargs(backend="gloo", init_method=init_method)  # else accelerate believes in one process


def backend_for(accelerator: Any, settings: Settings, *parts: Any) -> Backend:
    """Return the backend that an accelerator stands for.

    Asked once, when the accelerator is new: its state is shared, and the next one to be made changes it.

    Args:
        accelerator: accelerate's `Accelerator`; None for one that is set before the model is put in place.
        settings: The arguments of the trainer.
        parts: The arguments of `Backend`.

    Raises:
        ConfigError: If `async_save` is set for weights that are sharded.
        DistributedError: If the ranks have been told to place the model in different ways.
    """
    kind = None if accelerator is None else str(accelerator.distributed_type.value)
    ranks: Ranks = parts[-1]
    check_same_on_ranks(ranks, {"accelerator": kind, **_described(accelerator)})
    if kind in ("FSDP", "DEEPSPEED") and settings.async_save:
        raise ConfigError(
            f"`async_save=True` does not work with {kind}, whose weights are sharded over the ranks: all of them put "
            "these together at once, which a background thread cannot do. Leave it out."
        )
    if kind == "FSDP":
        return FSDP(accelerator, *parts)
    if kind == "DEEPSPEED":
        rates = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
        model, device, _, *rest = parts
        scaler = torch.amp.GradScaler(enabled=False)  # DeepSpeed scales by itself
        return Zero(accelerator, settings.batch_size, settings.max_grad_norm, rates, model, device, scaler, *rest)
    return DDP(accelerator, *parts)


def _described(accelerator: Any) -> dict[str, Any]:
    """Return how an accelerator is to place the model, as JSON types."""
    state, handler = getattr(accelerator, "state", None), getattr(accelerator, "ddp_handler", None)
    zero, fsdp = getattr(state, "deepspeed_plugin", None), getattr(state, "fsdp_plugin", None)
    options = {} if fsdp is None else {f"fsdp_plugin.{name}": describe(one) for name, one in vars(fsdp).items()}
    unused = {} if handler is None else {"find_unused_parameters": handler.find_unused_parameters}
    return {**options, **unused, "deepspeed_config": None if zero is None else describe(zero.deepspeed_config)}


def _shard_on_cpu(accelerator: Any, plugin: Any, precision: str) -> None:
    """Have FSDP 2 on processors without a GPU, for development and tests.

    accelerate 1.15 knows FSDP on GPUs only, and gives DDP in silence otherwise. What it does with a model depends on
    these two entries of its state alone, so setting them is enough; `fully_shard` itself runs on any device.
    """
    from accelerate.utils import DistributedType

    if accelerator.num_processes == 1:
        return
    plugin.cpu_ram_efficient_loading = False  # it moves the model through the meta device, onto a GPU
    if precision != "no":
        plugin.set_mixed_precision(precision)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def adopt_precision(given: dict[str, Any]) -> None:
    """Take over the precision that `accelerate launch` or its config file named, where the program names none."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if given.get("autocast") is None and precision != "no":
        given["autocast"] = precision


def is_set(name: str) -> bool:
    """Return whether a variable of the environment says yes."""
    return os.environ.get(name, "false").lower() in ("true", "1", "yes")


def _check_dimensions(parallelism_config: Any) -> None:
    if parallelism_config is not None:
        from accelerate.utils import ParallelismConfig  # from accelerate 1.10 on

        check_type("parallelism_config", parallelism_config, ParallelismConfig)
    for name in ("tp_size", "cp_size", "sp_size"):
        size = getattr(parallelism_config, name, 1) or 1
        if size > 1:
            raise ConfigError(
                f"`parallelism_config` has {name}={size}, but the processes of a run here all train on samples of "
                "their own. Use its dp_replicate_size and dp_shard_size alone."
            )


def find_ranks(accelerator: Any, timeout: float | None = None) -> Ranks:
    """Return the processes that the accelerator found; all trainers of a program share them.

    Args:
        accelerator: accelerate's `Accelerator`.
        timeout: Seconds without progress after which the meeting of the processes ends; None is 30 minutes.
    """
    return Ranks() if accelerator.num_processes == 1 else connected_ranks(timeout)


def refuse_lost_processes(world_size: int) -> None:
    """Tell a user who started several processes, and whose trainer sees only itself.

    Raises:
        DistributedError: If the environment was set for more processes than there are in the run.
    """
    for name in ("WORLD_SIZE", "OMNITRAIN_NUM_PROCESSES"):
        asked = os.environ.get(name, "")
        if asked.isdigit() and int(asked) > world_size:
            raise DistributedError(
                f"{name}={asked}, but this trainer runs on {world_size} process(es). Start the script with "
                "`accelerate launch`, `torchrun` or `omnitrain launch`. On a machine without a GPU, set "
                "use_cpu=True in TrainingArguments, and unset ACCELERATE_USE_CPU for DeepSpeed."
            )
    if world_size == 1 and (asked := _asked_of_launcher()) > 1:
        logger.warning(
            "`accelerate launch` was asked for %d processes and started one: on a CPU it wants MPI for more. Use "
            "`omnitrain launch -n %d`, or torchrun.", asked, asked,
        )  # fmt: skip


def _asked_of_launcher() -> int:
    """Return how many processes the command line of the `accelerate launch` above us asks for, where it can be read."""
    try:
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
            words = file.read().decode(errors="replace").split("\0")
    except OSError:
        return 1
    if not any("accelerate" in word for word in words):
        return 1
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        value = value or following
        if name in ("--num_processes", "--num-processes") and value.isdigit():
            return int(value)
    return 1
