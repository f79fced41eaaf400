"""Trainer: one device, with PyTorch's own loss scaler for fp16."""

from __future__ import annotations

from omnitrain.trainer.base import BaseTrainer


class Trainer(BaseTrainer):
    """Trains a model on one device: the first available of cuda, xpu, mps and cpu, or the one that `device` names.

    Several processes of one launch are an error: `AccelerateTrainer` is the trainer for these.

    >>> import torch
    >>> inputs, labels = torch.randn(64, 4), torch.randint(0, 2, (64,))
    >>> data = torch.utils.data.TensorDataset(inputs, labels)
    >>> model, loss_fn = torch.nn.Linear(4, 2), torch.nn.CrossEntropyLoss()
    >>> trainer = Trainer(model, data, data, loss_fn=loss_fn, epochs=1, progress_bar=False)
    >>> metrics = trainer.train()
    >>> metrics["stop_reason"], sorted(metrics["best_valid"])
    ('epochs', ['epoch', 'eval_loss', 'step'])
    """
