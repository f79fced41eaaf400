"""AccelerateTrainer: any number of processes, under DDP, FSDP 2 or DeepSpeed ZeRO, with one process's numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omnitrain.errors import ConfigError
from omnitrain.precision import precision_name
from omnitrain.trainers.accelerators import (
    adopt_precision,
    find_ranks,
    make_accelerator,
    refuse_lost_processes,
    sharding_of,
)
from omnitrain.trainers.native import Trainer
from omnitrain.trainers.sharding import Sharding
from omnitrain.trainers.zero import adopt_config, deepspeed_plugin

__all__ = ["AccelerateTrainer"]


class AccelerateTrainer(Sharding, Trainer):
    """Trains a model on all processes that `accelerate launch`, `torchrun` or `omnitrain launch` started.

    Takes the arguments of `BaseTrainer` except `device`, which each process is given, and those below. What an
    accelerate config file or a flag of its launcher says (FSDP, DeepSpeed, mixed precision) is honoured. Every public
    call that concerns the run (`train`, `evaluate`, `save_model`, ...) is made on every process.

    Args:
        model: As in `BaseTrainer`; every process starts from the weights of the first.
        args: As in `BaseTrainer`.
        deepspeed_config: Path or dict of a DeepSpeed configuration; `{}` is ZeRO 2 with its defaults. "auto" entries
            are filled in, and whatever contradicts an argument is an error.
        fsdp_plugin: accelerate's `FullyShardedDataParallelPlugin(fsdp_version=2, ...)`.
        parallelism_config: accelerate's `ParallelismConfig`, of which the data-parallel dimensions are used.
        accelerator: An `Accelerator` of one's own, instead of the arguments above.
        find_unused_parameters: Whether DDP looks for parameters without a gradient in every step.
        gradient_checkpointing: Whether activations are computed twice instead of kept; the model needs
            transformers' `gradient_checkpointing_enable`.
        kwargs: As in `BaseTrainer`.

    Raises:
        ConfigError: If arguments contradict each other or the DeepSpeed configuration.
        DistributedError: If the program was started on more processes than the trainer sees.
    """

    def __init__(
        self,
        model: nn.Module,
        *args: Any,
        deepspeed_config: str | Path | Mapping[str, Any] | None = None,
        fsdp_plugin: Any = None,
        parallelism_config: Any = None,
        accelerator: Any = None,
        find_unused_parameters: bool = False,
        gradient_checkpointing: bool = False,
        **kwargs: Any,
    ) -> None:
        ways = {"deepspeed_config": deepspeed_config, "fsdp_plugin": fsdp_plugin, "accelerator": accelerator}
        chosen = [name for name, value in ways.items() if value is not None]
        if len(chosen) > 1:
            raise ConfigError(f"`{chosen[0]}` and `{chosen[1]}` exclude each other. Pass one of them.")
        if kwargs.get("device") is not None:
            raise ConfigError(
                f"`device={str(kwargs['device'])!r}` is an argument of Trainer: here each process is given its own. "
                "Leave it out (ACCELERATE_USE_CPU=true keeps a run off the GPUs)."
            )
        self.accelerator = accelerator
        if accelerator is None:
            plugin = deepspeed_plugin(deepspeed_config)
            if plugin is not None:
                adopt_config(plugin, kwargs)
            else:
                _adopt_launcher(kwargs)
            self.accelerator = make_accelerator(
                precision=precision_name(kwargs.get("autocast")),
                deepspeed_plugin=plugin,
                fsdp_plugin=fsdp_plugin,
                parallelism_config=parallelism_config,
                find_unused_parameters=find_unused_parameters,
            )
        elif kwargs.get("autocast") is None and accelerator.mixed_precision != "no":
            kwargs["autocast"] = accelerator.mixed_precision
        self._sharded_by = sharding_of(self.accelerator)
        self.ranks = find_ranks(self.accelerator)
        refuse_lost_processes(self.world_size)
        if gradient_checkpointing:
            _checkpoint_activations(model)
        with self.ranks.calling(f"{type(self).__name__}()"):
            super().__init__(model, *args, **kwargs)
        self._given |= {name: value for name, value in ways.items() if name != "accelerator"}
        self._given |= {"find_unused_parameters": find_unused_parameters}

    # --- setting up

    def _choose_device(self, device: str | torch.device | None) -> torch.device:
        return self.accelerator.device

    def _setup_training_components(self) -> None:
        """Wrap the model; FSDP and DeepSpeed take the optimizer with it."""
        if self._sharded_by:
            self._shard()
        else:
            self.model = self.accelerator.prepare_model(self.model)


def _adopt_launcher(given: dict[str, Any]) -> None:
    """Take over what `accelerate launch` or its config file said, where the user's program says nothing."""
    adopt_precision(given)
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps.isdigit() and int(steps) > 1 and not {"gradient_accumulation_steps", "global_batch_size"} & given.keys():
        given["gradient_accumulation_steps"] = int(steps)


def _checkpoint_activations(model: nn.Module) -> None:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if not callable(enable):
        raise ConfigError(
            f"`gradient_checkpointing=True` needs a model with `gradient_checkpointing_enable`, as transformers' have; "
            f"{type(model).__name__} has none. Use torch.utils.checkpoint in its forward, or the FSDP plugin's "
            "activation_checkpointing."
        )
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
