"""The loss scaler of fp16: what it skips, what counts as finite beside it, and when it has nothing left to lower."""

from __future__ import annotations

from functools import cached_property

import torch

from omnitrain.errors import NonFiniteError
from omnitrain.trainers.base import BaseTrainer

__all__ = ["LossScaling"]


class LossScaling(BaseTrainer):
    """A trainer with PyTorch's own loss scaler; who steps through it is the trainer's to say."""

    @cached_property
    def scaler(self) -> torch.amp.GradScaler:
        """PyTorch's scaler under fp16, else its null object (enabled=False). May be replaced before `train()`."""
        return self.precision.grad_scaler(self.fp16_loss_scale[0])

    @property
    def _must_undo(self) -> bool:
        return super()._must_undo or self.scaler.is_enabled()

    def _backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def _clip_gradients(self) -> torch.Tensor:
        self.scaler.unscale_(self.optimizer)
        return super()._clip_gradients()

    def _finite_evidence(self, norm: torch.Tensor) -> torch.Tensor:
        if self.scaler.is_enabled():
            return self._loss.sum  # an infinite gradient is the scaler's ordinary business: it skips the step
        return norm if self.world_size > 1 else super()._finite_evidence(norm)

    def _check_loss_scale(self, applied: bool) -> None:
        """Refuse to go on where the gradients overflow whatever the scale."""
        if not applied and self.scaler.is_enabled() and self.scaler.get_scale() < self.fp16_loss_scale[1]:
            raise NonFiniteError(
                f"The fp16 loss scale fell to {self.scaler.get_scale():g}, below its minimum "
                f"{self.fp16_loss_scale[1]:g}, at step {self.progress.step + 1}: the gradients overflow whatever the "
                "scale. Lower the learning rate, use autocast='bf16', or lower the minimum in `fp16_loss_scale`."
            )

    def _backend_logs(self) -> dict[str, float]:
        return {"loss_scale": self.scaler.get_scale()} if self.scaler.is_enabled() else {}
