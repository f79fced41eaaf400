"""Named tensors to and from files: weights under the bare module's names, shared tensors once, safetensors only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from omnitrain.errors import ConfigError

__all__ = ["model_tensors", "save_weights", "unwrap"]

WEIGHTS = "model.safetensors"


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module that the user made, without `torch.compile`'s and DDP's wrappers around it.

    >>> unwrap(torch.compile(nn.Linear(1, 1)))
    Linear(in_features=1, out_features=1, bias=True)
    """
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the bare module by name, those that share memory only once, under their first name."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[torch.device, int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in unwrap(model).state_dict().items():
        identity = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and identity in seen:
            continue
        seen.add(identity)
        tensors[name] = tensor.detach()
    return tensors


def save_weights(model: nn.Module, folder: Path, overwrite: bool) -> Path:
    """Write `model.safetensors` into `folder`, and `config.json` beside it where the model has one.

    The file appears whole or not at all. A folder of a transformers model opens with `from_pretrained`.

    Raises:
        ConfigError: If there is one already and `overwrite` is False, or `folder` is a file.
    """
    path = folder / WEIGHTS
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"Cannot save the model to {str(folder)!r}: it is a file. Give the path of a folder.")
    if path.exists() and not overwrite:
        raise ConfigError(f"{str(path)!r} is there already. Pass overwrite=True to replace it, or give another path.")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in model_tensors(model).items()}
    part = folder / f"{WEIGHTS}.tmp"
    try:
        save_file(tensors, part, metadata={"format": "pt"})  # transformers asks for this entry
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    for name in ("config", "generation_config"):
        config = getattr(unwrap(model), name, None)
        if callable(getattr(config, "save_pretrained", None)):
            config.save_pretrained(folder)  # type: ignore[union-attr]
    return folder
