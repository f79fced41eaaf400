"""AccelerateTrainer: any number of processes, under DDP, FSDP 2 or DeepSpeed ZeRO, with one process's numbers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from omnitrain.errors import ConfigError
from omnitrain.optimization import build_optimizer
from omnitrain.precision import precision_name
from omnitrain.sampling import Window
from omnitrain.trainers.accelerators import (
    adopt_precision,
    find_ranks,
    make_accelerator,
    refuse_lost_processes,
    start_from_main,
)
from omnitrain.trainers.native import Trainer
from omnitrain.trainers.zero import ZeroEngine, adopt_config, deepspeed_plugin, fill_config

__all__ = ["AccelerateTrainer"]

_NOTHING = contextlib.nullcontext()


class AccelerateTrainer(Trainer):
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
        self.ranks = find_ranks(self.accelerator)
        refuse_lost_processes(self.world_size)
        self._zero: ZeroEngine | None = None
        self._reduces = True  # whether FSDP's backward passes exchange gradients
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
        kind = str(self.accelerator.distributed_type.value)
        if kind not in ("FSDP", "DEEPSPEED"):
            self.model = self.accelerator.prepare_model(self.model)
            return
        if self._given["async_save"]:
            raise ConfigError(
                f"`async_save=True` cannot be had with {kind}, whose weights lie in parts on the processes: all of "
                "them put these together at once, which a thread beside the training cannot do. Leave it out."
            )
        start_from_main(self.model, self.ranks)  # before it is cut up
        if kind == "DEEPSPEED":
            self.scaler = torch.amp.GradScaler(enabled=False)  # DeepSpeed scales by itself
            plugin = self.accelerator.state.deepspeed_plugin
            fill_config(plugin, self.batch_size, self.max_grad_norm, self.world_size)
            self._zero = ZeroEngine(self.accelerator, self.model, self._optimizer_for(plugin))
            self.model, self.optimizer = self._zero.model, self._zero.optimizer
        else:
            optimizer = build_optimizer(self._given["optimizer"], self.model, self.learning_rate, self.weight_decay)
            self.model, prepared = self.accelerator.prepare(self.model, optimizer)
            self.optimizer = prepared.optimizer

    def _optimizer_for(self, plugin: Any) -> Any:
        """Return the optimizer that DeepSpeed is given: ours, or a place-holder for the one in its configuration."""
        if "optimizer" not in plugin.deepspeed_config:
            return build_optimizer(self._given["optimizer"], self.model, self.learning_rate, self.weight_decay)
        from accelerate.utils import DummyOptim

        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return DummyOptim(trainable, lr=self.learning_rate, weight_decay=self.weight_decay)  # type: ignore[arg-type]

    # --- a step

    def _accumulating(self, last: bool) -> AbstractContextManager[Any]:
        self._is_last = last
        if isinstance(self.model, FSDPModule):
            # accelerate's no_sync asks a state that on a CPU has forgotten FSDP, and then does nothing
            if last is not self._reduces:
                self.model.set_requires_gradient_sync(last)
                self._reduces = last
            return _NOTHING
        return _NOTHING if last or self._zero is not None else self.accelerator.no_sync(self.model)

    def _backward(self, loss: torch.Tensor) -> None:
        if self._zero is not None:
            self._zero.backward(loss, self._is_last)
        else:
            super()._backward(loss)

    def _scale_gradients(self, factor: float) -> None:
        if self._zero is None:
            super()._scale_gradients(factor)
        else:
            self._zero.scale_gradients(factor)

    def _gradient_norm(self) -> torch.Tensor:
        norm = super()._gradient_norm()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _leave_evaluation(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # as backward does: until then the model's parameters are not the optimizer's

    # --- checkpoints

    def _model_tensors(self) -> dict[str, Any]:
        return super()._model_tensors() if self._zero is None else self._zero.weights()

    def _optimizer_state(self) -> tuple[dict[str, Any], Any]:
        return super()._optimizer_state() if self._zero is None else self._zero.optimizer_state()

    def _load_weights(self, tensors: Mapping[str, torch.Tensor], where: str, extra: Mapping[str, Any]) -> None:
        if self._zero is None:
            super()._load_weights(tensors, where, extra)
        else:
            self._zero.load_weights(tensors, where)

    def _load_optimizer(self, tensors: Mapping[str, torch.Tensor], saved: Any, where: str) -> None:
        if self._zero is None:
            super()._load_optimizer(tensors, saved, where)
        else:
            self._zero.load_optimizer(tensors, saved, where)

    def _optimizer_step(self, window: Window) -> bool:
        if self._zero is None:
            return super()._optimizer_step(window)
        self.lifecycle.before_optimizer_step()
        norm, applied = self._zero.step()
        self._grad_norm = torch.tensor(norm, dtype=torch.float64)
        return self._conclude_step(self._is_admitted(self._grad_norm, window) and applied)


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
