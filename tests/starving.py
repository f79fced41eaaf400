"""A model for which memory runs out, where and when a test says so."""

import torch
from torch import nn


def no_room() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def raise_no_room(gradient: torch.Tensor) -> None:
    raise no_room()


class Starving(nn.Module):
    """A regression model with statistics and dropout, whose passes have room for few rows after the first ones."""

    def __init__(self, room: int = 1000, where: str = "forward", start: int = 0, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.dropout = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(dropout)
        self.last = nn.Linear(16, 1)
        self.double()
        self.room, self.where, self.start = room, where, start
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.norm(self.first(x)))  # which draws and counts before there is no room
        if not self.training:
            return self.last(hidden)
        self.sizes.append(len(x))
        room = self.room if len(self.sizes) > self.start else 1000
        if self.where == "forward" and len(x) > room:
            raise no_room()
        if self.where == "backward" and len(x) > room:
            hidden.register_hook(raise_no_room)
        return self.last(hidden)
