"""A model whose weights lie in parts on the processes: what FSDP 2 and DeepSpeed ZeRO change about a step.

Which of them it is to be, `accelerators.py` finds out; DeepSpeed's engine is in `zero.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from omnitrain.errors import ConfigError
from omnitrain.data.sampling import Window
from omnitrain.trainers.accelerators import start_from_main
from omnitrain.trainers.scaling import LossScaling
from omnitrain.trainers.zero import ZeroEngine, fill_config

__all__ = ["Sharding"]

_NOTHING = contextlib.nullcontext()


class Sharding(LossScaling):
    """A trainer that can put its model into the hands of FSDP 2 or DeepSpeed, as its accelerator says."""

    accelerator: Any
    """accelerate's `Accelerator`; None where transformers has yet to make it."""
    _sharded_by: str | None = None
    """The name of what cuts the weights up, if anything does."""
    _zero: ZeroEngine | None = None
    _is_last: bool = True
    _reduces: bool = True
    """Whether FSDP's backward passes exchange gradients."""

    def _shard(self) -> None:
        """Wrap the model, and the optimizer with it."""
        if self._given["async_save"]:
            raise ConfigError(
                f"`async_save=True` cannot be had with {self._sharded_by}, whose weights lie in parts on the "
                "processes: all of them put these together at once, which a thread beside the training cannot do. "
                "Leave it out."
            )
        start_from_main(self.model, self.ranks)  # before it is cut up
        if self._sharded_by == "DEEPSPEED":
            self.scaler = torch.amp.GradScaler(enabled=False)  # DeepSpeed scales by itself
            plugin = self.accelerator.state.deepspeed_plugin
            fill_config(plugin, self.batch_size, self.max_grad_norm, self.world_size)
            in_config = "optimizer" in plugin.deepspeed_config
            optimizer = self._place_holder() if in_config else self._build_optimizer()
            self._zero = ZeroEngine(self.accelerator, self.model, optimizer)
            self.model, self.optimizer = self._zero.model, self._zero.optimizer
        else:
            self.model, prepared = self.accelerator.prepare(self.model, self._build_optimizer())
            self.optimizer = prepared.optimizer

    def _release(self) -> None:
        """Let go of DeepSpeed's engine, which else holds the model for as long as the program runs."""
        if self._zero is not None:
            self._zero.model.destroy()
            self._zero = None

    def _place_holder(self) -> Any:
        """Return what accelerate wants where DeepSpeed makes the optimizer, from its own configuration."""
        from accelerate.utils import DummyOptim

        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return DummyOptim(trainable, lr=self.learning_rate, weight_decay=self.weight_decay)  # type: ignore[arg-type]

    def _renew_optimizer(self) -> None:
        if self._zero is None:
            super()._renew_optimizer()
        else:
            self._zero.reset()

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

    def _optimizer_step(self, window: Window) -> bool:
        if self._zero is None:
            return super()._optimizer_step(window)
        return self._conclude_step(self._update_by_zero(self._zero, window))

    def _update_by_zero(self, zero: ZeroEngine, window: Window) -> bool:
        """Have DeepSpeed clip, check and update; return whether the update was made."""
        self.lifecycle.before_optimizer_step()
        norm, applied = zero.step()
        self._grad_norm = torch.tensor(norm, dtype=torch.float64)
        return self._is_admitted(self._grad_norm, window) and applied

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
