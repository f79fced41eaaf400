"""DDP: each rank has all of the weights, and gradients are averaged over the ranks in the backward pass.

A single process under accelerate is the same with nothing to average.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from omnitrain.backends.backend import Backend
from omnitrain.checkpoint.state import model_tensors
from omnitrain.distributed import Ranks
from omnitrain.errors import DistributedError
from omnitrain.units import StepOutput

__all__ = ["DDP", "start_from_main"]

Output = TypeVar("Output")

_NOTHING = contextlib.nullcontext()


class Runner(nn.Module):
    """The module that DDP wraps: calls the model, or with `run_step` whatever a step runs around it.

    DDP averages gradients only if the forward pass went through its own `forward`. A unit that holds the user's model
    calls that one directly, so it is the call of the unit that has to go through DDP.

    Args:
        model: The user's model, or what `torch.compile` made of it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, run_step: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        """Return `model(*args, **kwargs)`, or `run_step(model, *args)` as a dict, in which DDP finds the tensors."""
        if run_step is None:
            return self.model(*args, **kwargs)
        output = run_step(self.model, *args)
        if not isinstance(output, StepOutput):
            return output
        return {field.name: getattr(output, field.name) for field in fields(output)}


class DDP(Backend):
    """accelerate places the model; with several ranks, PyTorch's DistributedDataParallel wraps it.

    Args:
        accelerator: accelerate's `Accelerator`; None if it is set before `place`.
        parts: The arguments of `Backend`.
    """

    _ddp: DistributedDataParallel | None = None
    _was_forward_synced = False
    """Whether a forward pass since the latest update was one whose backward pass averages gradients."""

    def __init__(self, accelerator: Any, *parts: Any) -> None:
        super().__init__(*parts)
        self.accelerator = accelerator

    def _wrap(self) -> tuple[nn.Module, nn.Module]:
        model = self.accelerator.prepare_model(self.model, evaluation_mode=True)  # and compiled, if asked for
        trains = any(parameter.requires_grad for parameter in self.model.parameters())
        if self.ranks.world_size == 1 or not trains:
            return self.model, model
        handler = self.accelerator.ddp_handler
        options = {} if handler is None else handler.to_kwargs()
        self._ddp = DistributedDataParallel(Runner(model), **options)
        if handler is not None:
            handler.register_comm_hook(self._ddp)
        return self.model, self._ddp

    def forward(self, run: Callable[[nn.Module, Any], Output], batch: Any) -> Output:
        if self._ddp is None:
            return run(self.wrapped, batch)
        if not torch.is_grad_enabled():
            return run(self._ddp.module.model, batch)
        self._was_forward_synced |= self._ddp.require_backward_grad_sync
        output = self._ddp(batch, run_step=run)
        return StepOutput(**output) if isinstance(output, dict) else output  # type: ignore[return-value]

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return _NOTHING if last or self._ddp is None else self._ddp.no_sync()

    def update(self) -> bool:
        self.check_reduced()
        return super().update()

    def check_reduced(self) -> None:
        """Raise DistributedError if no forward pass since the latest update went through DDP."""
        if self._ddp is not None and not self._was_forward_synced:
            raise DistributedError(
                f"The gradients of this step were not averaged over the {self.ranks.world_size} ranks, whose weights "
                "would drift apart: no forward pass went through DDP. Call `self.model_wrapped(...)` instead of "
                "`self.model(...)` in a training loop of your own."
            )
        self._was_forward_synced = False


def start_from_main(model: nn.Module, ranks: Ranks) -> None:
    """Give every rank the weights of the main one, as DDP does when it wraps a model."""
    for tensor in model_tensors(model).values():
        if tensor.device.type != "meta" and tensor.numel():
            with torch.no_grad():
                tensor.copy_(ranks.broadcast(tensor.detach().cpu().contiguous()))
