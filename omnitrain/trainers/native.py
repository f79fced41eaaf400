"""Trainer: one device, with PyTorch's own loss scaler for fp16."""

from __future__ import annotations

from omnitrain.trainers.base import BaseTrainer

__all__ = ["Trainer"]


class Trainer(BaseTrainer):
    """Trains a model on one device: the first available of cuda, xpu, mps and cpu, or the one that `device` names.

    >>> import torch
    >>> data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    >>> trainer = Trainer(
    ...     torch.nn.Linear(4, 2), data, data, loss_fn=torch.nn.functional.cross_entropy, epochs=1,
    ...     device="cpu", progress_bar=False,
    ... )
    >>> metrics = trainer.train()
    >>> metrics["stop_reason"], sorted(metrics["best_valid"])
    ('epochs', ['epoch', 'eval_loss', 'step'])
    """
