"""What a backend, or a user, overrides of the training loop; the defaults are plain PyTorch on one device.

When each of them is called is to be read in `loop.py`.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from omnitrain.data.collation import IGNORED_LABEL, move_to_device
from omnitrain.distributed import Ranks
from omnitrain.precision import Precision
from omnitrain.units import StepOutput, run_unit, without_effect

__all__ = ["Hooks"]

_NOTHING = contextlib.nullcontext()


class Hooks:
    """The steps of a step, each a method of its own."""

    model: nn.Module
    unit: Any
    device: torch.device
    precision: Precision
    optimizer: torch.optim.Optimizer
    max_grad_norm: float | None
    ranks: Ranks = Ranks()
    _filler: int = IGNORED_LABEL
    """What predictions of different lengths are filled up with to make one array."""
    _given: dict[str, Any]
    _parameters: list[nn.Parameter]

    def _prepare_batch(self, batch: Any) -> Any:
        """Return the batch as the model is to see it, on the device."""
        return move_to_device(batch, self.device, non_blocking=True)

    def _forward(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return loss and outputs of a batch on the device."""
        return run_unit(self.unit, model, batch)

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return the context of forward and loss."""
        return self.precision.autocast()

    def _accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context of one micro-batch; `last` says that gradients are to be complete after it."""
        return _NOTHING

    def _backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`."""
        loss.backward()

    def _idle_loss(self, output: StepOutput) -> torch.Tensor | None:
        """Return a loss without effect for a micro-batch that has nothing to predict, if a backward pass is awaited."""
        return without_effect(output) if self.ranks.world_size > 1 else None

    def _scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by `factor`."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _clip_gradients(self) -> torch.Tensor:
        """Clip the gradients to `max_grad_norm`, if there is one, and return their norm before that, on the device."""
        norm = self._gradient_norm()
        limit = self.max_grad_norm
        # On a CPU the norm can be read for nothing, and most steps need no clipping: the factor would be exactly 1.
        if limit is None or (norm.device.type == "cpu" and float(norm.numpy()) < limit * (1 - 1e-6) - 1e-6):
            return norm
        nn.utils.clip_grads_with_norm_(self._parameters, limit, norm)
        return norm

    def _gradient_norm(self) -> torch.Tensor:
        """Return the norm of all gradients."""
        return nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])

    def _leave_evaluation(self) -> None:
        """Bring the model back from forward passes without a backward pass."""

    def _apply_update(self) -> bool:
        """Take the optimizer's step; return False if it was left out."""
        self.optimizer.step()
        return True

    def _detecting_anomalies(self) -> AbstractContextManager[Any]:
        """Return the context of the run: PyTorch's anomaly detection, if that was asked for."""
        return torch.autograd.set_detect_anomaly(True) if self._given["detect_anomaly"] else _NOTHING

    def _backend_logs(self) -> dict[str, float]:
        """Return what the backend adds to each row of logs."""
        return {}
