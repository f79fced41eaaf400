"""Snapshots of the buffers of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from omnitrain.checkpoint.state_dicts import is_expanded


class Buffers:
    """Copies of a model's buffers, to undo the changes of a forward pass.

    All are copied before each step: BatchNorm's kernels do not mark its statistics as changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []
        self._tensors: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._places.append((module._buffers, name))

    def snapshot(self) -> None:
        """Copy them."""
        tensors = [buffers[name] for buffers, name in self._places]
        if list(map(id, tensors)) != list(map(id, self._tensors)):
            self._tensors, self._copies = tensors, [tensor.detach().clone() for tensor in tensors]
        elif tensors:
            torch._foreach_copy_(self._copies, tensors)  # pyright: ignore

    def restore(self) -> None:
        """Restore the copied values."""
        for (buffers, name), tensor in zip(self._places, self._tensors, strict=True):
            buffers[name] = tensor
        with torch.no_grad():
            for tensor, snapshot in zip(self._tensors, self._copies, strict=True):
                if not is_expanded(tensor):  # nothing has written to it
                    tensor.copy_(snapshot)


@contextlib.contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model afterwards: some count forward passes, in evaluations too."""
    buffers = Buffers(model)
    buffers.snapshot()
    try:
        yield
    finally:
        buffers.restore()
