"""Snapshots of the buffers of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from omnitrain.checkpoint.state_dicts import is_expanded


class Buffers:
    """Copies of a model's buffers, to put back what a forward pass has changed.

    All are copied before each step: BatchNorm's kernels do not mark its statistics as changed.
    """

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []
        self._kept: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def collect(self, model: nn.Module) -> None:
        """List the buffers of a model."""
        places = [(one._buffers, name) for one in model.modules() for name in one._buffers]
        self._places = [(held, name) for held, name in places if held[name] is not None]
        self._kept = []

    def keep(self) -> None:
        """Copy them."""
        now = [held[name] for held, name in self._places]
        if len(now) != len(self._kept) or any(one is not kept for one, kept in zip(now, self._kept, strict=True)):
            self._kept, self._copies = now, [one.detach().clone() for one in now]
        elif now:
            torch._foreach_copy_(self._copies, now)  # pyright: ignore

    def put_back(self) -> None:
        """Give back to each what it was when they were copied."""
        for (held, name), kept in zip(self._places, self._kept, strict=True):
            held[name] = kept
        with torch.no_grad():
            for kept, copied in zip(self._kept, self._copies, strict=True):
                if not is_expanded(kept):  # nothing has written to it
                    kept.copy_(copied)


@contextlib.contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model afterwards: some count forward passes, in evaluations too."""
    buffers = Buffers()
    buffers.collect(model)
    buffers.keep()
    try:
        yield
    finally:
        buffers.put_back()
