"""Parameters by name, and their local and full tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from omnitrain.checkpoint.state_dicts import bare_name
from omnitrain.core.errors import ConfigError
from omnitrain.optim.param_groups import find_matches


def patterns_of(argument: str, patterns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the patterns of an argument as a tuple; None stays None.

    Raises:
        ConfigError: If it is a single string.
    """
    if isinstance(patterns, str):
        raise ConfigError(f"`{argument}` must be a list of regular expressions, got {patterns!r}.")
    return None if patterns is None else tuple(patterns)


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the floating-point parameters by their names in checkpoints."""
    parameters = model.named_parameters()
    return {bare_name(name): parameter for name, parameter in parameters if parameter.is_floating_point()}


def matching(model: nn.Module, match: Sequence[str] | None, owner: str, required: Collection[str] = ()) -> list[str]:
    """Return the names of the parameters that match one of the patterns, and those `required`, even if frozen.

    Without patterns, these are all that train and have two dimensions or more.

    Raises:
        ConfigError: If a pattern matches no name, or there is no such parameter.
    """
    parameters = parameters_by_name(model)
    if match is None:
        trained = {name for name, parameter in parameters.items() if parameter.dim() > 1 and parameter.requires_grad}
        names = [name for name in parameters if name in required or name in trained]
    else:
        names = list(find_matches(f"`match` of {owner}", match, parameters.items()))
    if not names:
        raise ConfigError(f"{owner} found no parameter that trains and has two dimensions. Name them in `match`.")
    return names


def local_part(tensor: Any) -> torch.Tensor:
    """Return the local shard of a DTensor; a plain tensor unchanged."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full_tensor(tensor: Any) -> torch.Tensor:
    """Return the full tensor on its device; gathering a DTensor is a collective of all ranks."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
