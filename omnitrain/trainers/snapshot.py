"""What one checkpoint holds, on its way to the disk."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Any

import torch

from omnitrain import __version__

__all__ = ["Snapshot", "versions"]


@dataclass(slots=True)
class Snapshot:
    """Everything that a checkpoint holds: tensors by file and name, and the payload of omnitrain.json."""

    files: dict[str, dict[str, torch.Tensor]]
    payload: dict[str, Any]
    step: int
    score: float | None
    best: bool
    evaluated_step: int

    @property
    def by_size(self) -> list[str]:
        """The files, the largest first."""

        def size(file: str) -> int:
            return sum(tensor.numel() * tensor.element_size() for tensor in self.files[file].values())

        return sorted(self.files, key=lambda file: (-size(file), file))

    def on_host(self, kept: dict[str, torch.Tensor]) -> Snapshot:
        """Return a copy that further training cannot change, in the host memory of the copy before it.

        Memory that is asked for anew costs most of a copy's time, for each page is cleared when it is first written.

        Args:
            kept: The tensors of the copy before it, which nobody reads any more; filled for the next one.
        """
        files: dict[str, dict[str, torch.Tensor]] = {}
        for file, tensors in self.files.items():
            copies = files[file] = {}
            for name, tensor in tensors.items():
                held = kept.get(f"{file}:{name}")
                if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                    held = kept[f"{file}:{name}"] = torch.empty_like(tensor, device="cpu", requires_grad=False)
                copies[name] = held.copy_(tensor.detach())
        return Snapshot(files, self.payload, self.step, self.score, self.best, self.evaluated_step)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of what a checkpoint was written with."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "safetensors")}
    return {"omnitrain": __version__, "python": platform.python_version(), **packages}
