"""Trainer: one device, with PyTorch's own loss scaler for fp16."""

from __future__ import annotations

import torch

from omnitrain.errors import NonFiniteError
from omnitrain.trainers.base import BaseTrainer

__all__ = ["Trainer"]


class Trainer(BaseTrainer):
    """Trains a model on one device: the first there is of cuda, xpu, mps and cpu, or the one that `device` names.

    Takes the arguments of `BaseTrainer`.

    >>> data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    >>> trainer = Trainer(
    ...     torch.nn.Linear(4, 2), data, data, loss_fn=torch.nn.functional.cross_entropy, epochs=1,
    ...     device="cpu", progress_bar=False,
    ... )
    >>> metrics = trainer.train()
    >>> metrics["stop_reason"], sorted(metrics["best_valid"])
    ('epochs', ['epoch', 'eval_loss', 'step'])
    """

    scaler: torch.amp.GradScaler
    """Scales the loss under fp16; PyTorch's null object (enabled=False) otherwise. May be replaced before `train()`."""

    def _setup_training_components(self) -> None:
        super()._setup_training_components()
        self.scaler = self.precision.grad_scaler(self.fp16_loss_scale[0])

    @property
    def _must_undo(self) -> bool:
        return super()._must_undo or self.scaler.is_enabled()

    def _backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def _clip_gradients(self) -> torch.Tensor:
        self.scaler.unscale_(self.optimizer)
        return super()._clip_gradients()

    def _finite_evidence(self, norm: torch.Tensor) -> torch.Tensor:
        # With a scaler an infinite gradient is its ordinary business: it skips the step and scales less.
        return self._loss.sum if self.scaler.is_enabled() else super()._finite_evidence(norm)

    def _apply_update(self) -> bool:
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        applied = self.scaler.get_scale() >= scale  # the scale is only lowered after a skipped step
        if not applied and self.scaler.get_scale() < self.fp16_loss_scale[1]:
            raise NonFiniteError(
                f"The fp16 loss scale fell to {self.scaler.get_scale():g}, below its minimum "
                f"{self.fp16_loss_scale[1]:g}, at step {self.progress.step + 1}: the gradients overflow whatever the "
                "scale. Lower the learning rate, use autocast='bf16', or lower the minimum in `fp16_loss_scale`."
            )
        return applied

    def _backend_logs(self) -> dict[str, float]:
        return {"loss_scale": self.scaler.get_scale()} if self.scaler.is_enabled() else {}
