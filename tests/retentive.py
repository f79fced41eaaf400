"""A model, data and a collator that keep something from every pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

COLLATING = torch.Generator().manual_seed(3)


def collate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Add noise of a generator of this module."""
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    return x + 0.01 * torch.randn(x.shape, generator=COLLATING, dtype=x.dtype), y


class Noisy(nn.Module):
    """Has batch statistics, dropout, its own generator, a counter, a list and an attribute made on first use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
        self.generator = torch.Generator().manual_seed(1)
        self.passes, self.seen = 0, list[float]()
        self.state = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.scale = float(x.abs().mean())
        self.passes += 1
        self.seen.append(float(x[0, 0]))
        self.state += 1
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        return self.body(x / self.scale + 0.01 * noise) * (1 + 0.01 * self.passes + 0.01 * float(self.state))


class Drawn(Dataset[Any]):
    """Draws from a generator of its own, and counts what it is asked for."""

    def __init__(self, size: int) -> None:
        self.size, self.generator, self.count = size, torch.Generator().manual_seed(2), 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x + 0.01 * torch.randn(4, generator=self.generator) + 0.001 * self.count, torch.tensor(index % 3)
