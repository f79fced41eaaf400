"""What algorithms that change single weights have in common: which parameters are meant, their parts and wholes."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from omnitrain.checkpoint.state_dicts import bare_name
from omnitrain.core.errors import ConfigError
from omnitrain.optim.param_groups import not_found


def patterns_of(match: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return an argument `match` as a tuple; None stays None.

    Raises:
        ConfigError: If it is a single string.
    """
    if isinstance(match, str):
        raise ConfigError(f"`match` must be a list of regular expressions, got {match!r}.")
    return None if match is None else tuple(match)


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are numbers with a fraction, by their names in checkpoints."""
    return {bare_name(name): one for name, one in model.named_parameters() if one.is_floating_point()}


def matching(model: nn.Module, match: Sequence[str] | None, who: str, held: Collection[str] = ()) -> list[str]:
    """Return the names of the parameters in which one of the patterns is found.

    Args:
        model: The model.
        match: The patterns; None is every parameter that trains and has two dimensions or more.
        who: The algorithm, for the message.
        held: Names that count without patterns too, as they did before they were frozen.

    Raises:
        ConfigError: If one of them is found in no name, or there is no such parameter.
    """
    own = parameters_by_name(model)
    if match is None:
        found = [name for name, one in own.items() if name in held or (one.dim() > 1 and one.requires_grad)]
    else:
        for pattern in match:
            if not any(re.search(pattern, name) for name in own):
                raise not_found(f"`match` of {who}", pattern, own.items())
        found = [name for name in own if any(re.search(pattern, name) for pattern in match)]
    if not found:
        raise ConfigError(f"{who} found no parameter that trains and has two dimensions. Name them in `match`.")
    return found


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; another one as it is."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole_tensor(tensor: Any) -> torch.Tensor:
    """Return all of a tensor on its device; a sharded one is gathered, on all ranks at once."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
