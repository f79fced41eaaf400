"""Setup of accelerate's `Accelerator`, and choice of the backend.

`deepspeed.py` has the DeepSpeed configuration.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from omnitrain.arguments import Settings, check_same_on_ranks, check_type, describe
from omnitrain.backends.backend import Backend
from omnitrain.backends.ddp import DDP, syncs_each_batch
from omnitrain.backends.fsdp import FSDP
from omnitrain.backends.tensor_parallel import TensorParallel
from omnitrain.backends.zero import LossScale, Zero
from omnitrain.compute.precision import choose_device, precision_name
from omnitrain.core.errors import ConfigError, DistributedError, MissingExtraError, did_you_mean
from omnitrain.distributed.ranks import Ranks
from omnitrain.distributed.rendezvous import connected_ranks, watch_init_process_group

logger: logging.Logger = logging.getLogger("omnitrain")


def make_accelerator(
    *,
    precision: str,
    deepspeed_plugin: Any = None,
    fsdp_plugin: Any = None,
    parallelism_config: Any = None,
    ddp_options: Mapping[str, Any] = MappingProxyType({}),
    timeout: float | None = None,
) -> Any:
    """Return accelerate's `Accelerator` for these arguments and those of `accelerate launch`.

    Mixed precision is passed on to FSDP and DeepSpeed, which use it when they wrap the model; the trainer itself does
    autocast and loss scaling. accelerate's number of accumulation steps stays 1: the loop counts windows, and
    accelerate would divide the last, short one by too much.

    Args:
        precision: "no", "fp16" or "bf16".
        deepspeed_plugin: accelerate's `DeepSpeedPlugin`, to train with DeepSpeed.
        fsdp_plugin: accelerate's `FullyShardedDataParallelPlugin`, or None for the launcher's settings.
        parallelism_config: accelerate's `ParallelismConfig`.
        ddp_options: What `check_ddp_options` returned.
        timeout: Seconds without progress until forming the process group fails; None is 30 minutes.

    Raises:
        ConfigError: If an argument cannot be used here, or DeepSpeed without a launcher.
        MissingExtraError: If accelerate is not installed.
    """
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import (
            DistributedDataParallelKwargs,
            DistributedType,
            FullyShardedDataParallelPlugin,
            GradientAccumulationPlugin,
            patch_environment,
        )
    except ImportError:
        raise MissingExtraError("AccelerateTrainer", "accelerate") from None

    check_type("fsdp_plugin", fsdp_plugin, FullyShardedDataParallelPlugin)
    check_launched(deepspeed_plugin is not None)
    _check_dimensions(parallelism_config, deepspeed_plugin is not None)
    # Trainers may follow each other, each with its own settings, on the same processes. What accelerate notes of the
    # first would keep FSDP from the second, or give it to one that has no plugin.
    kind = PartialState._shared_state.get("distributed_type")
    has_zero = kind == DistributedType.DEEPSPEED and deepspeed_plugin is None
    AcceleratorState._reset_state(has_zero or kind == DistributedType.FSDP)
    has_gpu = choose_device(None).type != "cpu" and os.environ.get("ACCELERATE_USE_CPU", "false").lower() != "true"
    fsdp_plugin = _fsdp_plugin(fsdp_plugin, parallelism_config, FullyShardedDataParallelPlugin)
    wants_fsdp = fsdp_plugin is not None
    options = dict(ddp_options)
    sync_each_batch = options.pop("sync_each_batch", False)
    handlers: list[Any] = [DistributedDataParallelKwargs(**options)]
    # accelerate records there what it creates, and a later trainer in this process may need something else
    flags = {"ACCELERATE_USE_FSDP": wants_fsdp, "ACCELERATE_USE_DEEPSPEED": deepspeed_plugin is not None}
    flags = {name: os.environ.get(name, "false") if is_used else "false" for name, is_used in flags.items()}
    try:
        with patch_environment(**flags), watch_init_process_group(timeout) as init_method:
            handlers.append(_process_group_options(init_method, deepspeed_plugin is not None and not has_gpu))
            accelerator = Accelerator(
                mixed_precision=precision if deepspeed_plugin is not None or wants_fsdp else "no",
                cpu=not has_gpu and deepspeed_plugin is None,
                deepspeed_plugin=deepspeed_plugin,
                fsdp_plugin=fsdp_plugin if has_gpu else None,
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_each_batch=sync_each_batch),
                kwargs_handlers=handlers,
                **({"parallelism_config": parallelism_config} if parallelism_config and has_gpu else {}),  # since 1.10
            )
        if deepspeed_plugin is not None and accelerator.distributed_type != DistributedType.DEEPSPEED:
            raise ConfigError(
                "There is a DeepSpeed configuration, and accelerate disables DeepSpeed where ACCELERATE_USE_CPU is "
                "set, as `omnitrain launch --cpu` does. Unset it: without a GPU DeepSpeed uses the CPU anyway."
            )
        if options.keys() - {"find_unused_parameters"} and (wants_fsdp or deepspeed_plugin is not None):
            raise ConfigError(
                f"`accelerator` has {next(iter(options))!r}, an option of DDP, and the launcher asks for FSDP or "
                "DeepSpeed. Leave one of them out."
            )
        if wants_fsdp and not has_gpu:
            _shard_on_cpu(accelerator, fsdp_plugin, precision)
        if parallelism_config is not None and not has_gpu:
            _set_mesh_on_cpu(accelerator, parallelism_config)
    except ValueError as error:
        if parallelism_config is None:
            raise
        raise ConfigError(
            f"`parallelism_config` cannot be used here: {error} Its sizes multiply to the number of processes."
        ) from error
    return accelerator


_DDP_OPTIONS: dict[str, type] = {
    "bucket_cap_mb": int, "find_unused_parameters": bool, "gradient_as_bucket_view": bool, "static_graph": bool,
    "sync_each_batch": bool,
}  # fmt: skip


def check_ddp_options(options: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of DDP in the argument `accelerator` and in others, after a check of names and values.

    Raises:
        ConfigError: If one is unknown, wrong, or given twice.
    """
    for name, value in options.items():
        kind = _DDP_OPTIONS.get(name)
        if kind is None:
            nearest = did_you_mean(str(name), _DDP_OPTIONS)
            raise ConfigError(
                f"`accelerator` has {name!r}. As a dict it takes DDP's {', '.join(_DDP_OPTIONS)}; an Accelerator of "
                f"your own has all others.{nearest}"
            )
        if type(value) is not kind or (kind is int and value < 1):
            expected = "a positive integer" if kind is int else "True or False"
            raise ConfigError(f"`accelerator[{name!r}]` must be {expected}, got {value!r:.200}.")
        if name in arguments:
            raise ConfigError(f"`{name}` is given twice, by itself and in `accelerator`. Leave one of them out.")
    return {**arguments, **options}


# The variables that a launcher sets; without one of them, DeepSpeed assumes MPI and needs mpi4py.
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_launched(is_zero: bool) -> None:
    """Raise ConfigError if DeepSpeed is used without a launcher: it has a process group for one process, too."""
    missing = [name for name in _LAUNCHER_VARIABLES if not os.environ.get(name)]
    if is_zero and missing and not torch.distributed.is_initialized():
        raise ConfigError(
            f"DeepSpeed needs a launcher, also for one process, and the environment has no {', '.join(missing)}. Start "
            "the script with `omnitrain launch -n 1`, `accelerate launch` or `torchrun`, or leave out the DeepSpeed "
            "configuration."
        )


def _fsdp_plugin(argument: Any, parallelism_config: Any, kind: Callable[..., Any]) -> Any:
    """Return the plugin of FSDP 2, by the argument, the launcher or a mesh that shards; None without any of them."""
    shards = getattr(parallelism_config, "dp_shard_size", 1) > 1
    if argument is None and not shards and not is_set("ACCELERATE_USE_FSDP"):
        return None
    plugin = kind(**({"fsdp_version": 2} if shards else {})) if argument is None else argument
    if plugin.fsdp_version != 2:
        raise ConfigError(
            "`fsdp_plugin` asks for FSDP 1, which PyTorch has replaced. Pass fsdp_version=2 to it, or set "
            "`fsdp_version: 2` in accelerate's config file."
        )
    return plugin


def _process_group_options(init_method: str | None, is_zero_on_cpu: bool) -> Any:
    """Return accelerate's options for forming the process group; for DeepSpeed on a CPU it is formed here."""
    from accelerate.utils import InitProcessGroupKwargs

    if not is_zero_on_cpu:
        return InitProcessGroupKwargs(init_method=init_method)
    if init_method is not None and not torch.distributed.is_initialized():
        # before DeepSpeed compiles, during which the processes would not hear from each other
        torch.distributed.init_process_group("gloo", init_method=init_method)
    return InitProcessGroupKwargs(backend="gloo", init_method=init_method)  # or accelerate assumes a single process


def build_backend(accelerator: Any, settings: Settings, *parts: Any) -> Backend:
    """Return the backend for an accelerator.

    Called once, when the accelerator is new: its state is shared, and the next accelerator changes it.

    Args:
        accelerator: accelerate's `Accelerator`; None if it is set before the model is put in place.
        settings: The arguments of the trainer.
        parts: The arguments of `Backend`.

    Raises:
        ConfigError: If fp8, or an exchange of gradients after each micro-batch, is used with DeepSpeed.
        DistributedError: If the settings for placing the model differ between ranks.
    """
    kind = None if accelerator is None else str(accelerator.distributed_type.value)
    ranks: Ranks = parts[-1]
    check_same_on_ranks(ranks, {"accelerator": kind, **_placement_settings(accelerator)})
    if ranks.part("tp").world_size > 1:
        _check_for_tensor_parallel(settings)
        return TensorParallel(accelerator, *parts)
    if kind == "FSDP":
        return FSDP(accelerator, *parts)
    if kind == "DEEPSPEED":
        if syncs_each_batch(accelerator):
            raise ConfigError(
                "`accelerator` has sync_each_batch=True, but DeepSpeed has its own way of accumulating gradients; the "
                "numbers are the same. Leave it out."
            )
        if precision_name(settings.autocast) == "fp8":
            raise ConfigError(
                f"`autocast={settings.autocast!r}` does not work with DeepSpeed ZeRO, which casts and flattens the "
                "weights that the fp8 layers scale. Use FSDP or DDP, or autocast='bf16'."
            )
        rates = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
        model, device, _, *rest = parts
        scaler = LossScale(settings.fp16_loss_scale)
        return Zero(accelerator, settings.batch_size, settings.max_grad_norm, rates, model, device, scaler, *rest)
    return DDP(accelerator, *parts)


def _placement_settings(accelerator: Any) -> dict[str, Any]:
    """Return how an accelerator will place the model, as JSON types."""
    state, handler = getattr(accelerator, "state", None), getattr(accelerator, "ddp_handler", None)
    zero, fsdp = getattr(state, "deepspeed_plugin", None), getattr(state, "fsdp_plugin", None)
    options = {} if fsdp is None else {f"fsdp_plugin.{name}": describe(option) for name, option in vars(fsdp).items()}
    ddp = {} if handler is None else {f"accelerator.{name}": describe(value) for name, value in vars(handler).items()}
    ddp["accelerator.sync_each_batch"] = syncs_each_batch(accelerator)
    return {**options, **ddp, "deepspeed_config": None if zero is None else describe(zero.deepspeed_config)}


def _shard_on_cpu(accelerator: Any, plugin: Any, precision: str) -> None:
    """Enable FSDP 2 on CPUs, for development and tests.

    accelerate 1.15 supports FSDP only on GPUs, and silently uses DDP otherwise. What it does with a model depends only
    on these two entries of its state, so setting them is enough; `fully_shard` itself runs on any device.
    """
    from accelerate.utils import DistributedType

    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ConfigError(
            "The FSDP plugin has `cpu_offload`, which keeps in host memory what trains on a GPU, and there is none. "
            "Leave it out on a CPU."
        )
    if accelerator.num_processes == 1:
        return
    plugin.cpu_ram_efficient_loading = False  # it moves the model through the meta device, onto a GPU
    if precision != "no":
        plugin.set_mixed_precision(precision)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def merge_precision(arguments: dict[str, Any]) -> None:
    """Use the precision of `accelerate launch` or its config file, if the program sets none."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if arguments.get("autocast") is None and precision != "no":
        arguments["autocast"] = precision


def is_set(name: str) -> bool:
    """Return whether an environment variable is set to true."""
    return os.environ.get(name, "false").lower() in ("true", "1", "yes")


def _set_mesh_on_cpu(accelerator: Any, parallelism_config: Any) -> None:
    """Set the mesh in accelerate's state, which accepts one only on GPUs, for no reason of PyTorch's."""
    if accelerator.num_processes == 1 and parallelism_config.total_size == 1:
        return
    if parallelism_config.total_size not in (1, accelerator.num_processes):
        raise ValueError(
            f"its sizes multiply to {parallelism_config.total_size}, and there are {accelerator.num_processes} "
            "processes."
        )
    if parallelism_config.total_size > 1:
        accelerator.state.parallelism_config = parallelism_config
        accelerator.state.device_mesh = parallelism_config.get_device_mesh("cpu")
        if str(accelerator.distributed_type.value) == "FSDP":
            parallelism_config._validate_accelerator(accelerator)


def _check_for_tensor_parallel(settings: Settings) -> None:
    optimizer = settings.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"`optimizer` is an instance of {type(optimizer).__name__}, which has the weights as they were before "
            "tensor parallelism sharded them. Pass the class, or a function of the parameters."
        )


# The dimensions that are rejected, and why.
_UNSUPPORTED_DIMENSIONS = {
    "cp_size": "PyTorch's ring attention knows no attention of CPUs, and on GPUs labels would be counted wrong",
    "sp_size": "sequence parallelism is DeepSpeed's, whose attention runs only on GPUs",
}


def _check_dimensions(parallelism_config: Any, is_zero: bool = False) -> None:
    if parallelism_config is not None:
        import accelerate.utils

        kind = getattr(accelerate.utils, "ParallelismConfig", None)
        if kind is None:
            raise ConfigError(
                f"`parallelism_config` needs accelerate 1.10 or newer, and this is {accelerate.__version__}."
            )
        check_type("parallelism_config", parallelism_config, kind)
    for name, reason in _UNSUPPORTED_DIMENSIONS.items():
        size = getattr(parallelism_config, name, 1) or 1
        if size > 1:
            raise ConfigError(
                f"`parallelism_config` has {name}={size}, which is not supported: {reason}. Use dp_replicate_size, "
                "dp_shard_size and tp_size."
            )
    if is_zero and parallelism_config is not None and parallelism_config.total_size > 1:
        raise ConfigError(
            "`parallelism_config` has no effect with DeepSpeed, which has its own meshes. Leave it out, or train "
            "with FSDP."
        )


def find_ranks(accelerator: Any, timeout: float | None = None) -> Ranks:
    """Return the processes that the accelerator found, connected in `timeout` seconds; all trainers share them."""
    _check_dimensions(getattr(accelerator, "parallelism_config", None))
    if accelerator.num_processes == 1:
        return Ranks()
    return connected_ranks(timeout, getattr(accelerator, "torch_device_mesh", None))


def check_lost_processes(world_size: int) -> None:
    """Check that the trainer sees all processes that were started.

    Raises:
        DistributedError: If the environment is set for more processes than the run has.
    """
    for name in ("WORLD_SIZE", "OMNITRAIN_NUM_PROCESSES"):
        requested = os.environ.get(name, "")
        if requested.isdigit() and int(requested) > world_size:
            raise DistributedError(
                f"{name}={requested}, but this trainer runs on {world_size} process(es). Start the script with "
                "`accelerate launch`, `torchrun` or `omnitrain launch`. On a machine without a GPU, set "
                "use_cpu=True in TrainingArguments, and unset ACCELERATE_USE_CPU for DeepSpeed."
            )
    if world_size == 1 and (requested := _requested_processes()) > 1:
        logger.warning(
            "`accelerate launch` was asked for %d processes and started one: on a CPU it wants MPI for more. Use "
            "`omnitrain launch -n %d`, or torchrun.", requested, requested,
        )  # fmt: skip


def _requested_processes() -> int:
    """Return how many processes the command line of our parent `accelerate launch` asks for; 1 if unknown."""
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
