"""Sparse gradients, such as those of `nn.Embedding(sparse=True)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from omnitrain.core.errors import ConfigError, format_list
from omnitrain.optim.build import has_sparse_gradients, try_step


def parameters_by_layout(model: nn.Module) -> tuple[dict[int, str], dict[int, str]]:
    """Return the names of parameters whose gradients will be sparse, and of those whose gradients will be dense.

    Both are known only for layers of PyTorch, by the `id` of the parameter. A weight that an embedding
    shares with another layer gets a dense gradient, the sum of both.
    """
    layouts: dict[int, set[bool | None]] = {}
    for module in model.modules():
        is_sparse = has_sparse_gradients(module)
        is_known = is_sparse or type(module).__module__.startswith("torch.nn.modules.")
        for parameter in module.parameters(recurse=False):
            layouts.setdefault(id(parameter), set()).add(is_sparse if is_known else None)
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    sparse, dense = ({key: name for key, name in names.items() if layouts[key] == {kind}} for kind in (True, False))
    return sparse, dense


def coalesce(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Add up the entries of sparse gradients with the same index; return what all gradients store.

    The norm of what a gradient stores is that of the gradient only once each index is there once.
    """
    values: list[torch.Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse and not parameter.grad.is_coalesced():
                parameter.grad = parameter.grad.coalesce()
            values.append(stored_values(parameter.grad))
    return values


def stored_values(gradient: torch.Tensor) -> torch.Tensor:
    """Return what a gradient stores, as an alias: the values of a sparse one, one row for each index."""
    return gradient._values() if gradient.is_sparse else gradient


def stored_rows(tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor for which a gradient of its shape stores values; of a dense one, all."""
    return tensor.detach()[gradient._indices()[0]] if gradient.is_sparse else tensor


def check_optimizer(optimizer: torch.optim.Optimizer, sparse: Mapping[int, str], dense: Mapping[int, str]) -> None:
    """Raise ConfigError if an optimizer cannot train its parameters, as `parameters_by_layout` returns them.

    Only optimizers of PyTorch are tried out, as the steps of others may have side effects.
    """
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        members = [parameter for parameter in group["params"] if id(parameter) in sparse]
        reason = _reason_against_sparse(optimizer, group, members[0]) if members else None
        if reason is not None:
            raise ConfigError(
                f"`optimizer` ({name}) cannot train {_list_names(sparse, members)}, whose gradients are sparse: "
                f"{reason}. Make the layer with sparse=False, or use optimizer='sgd' or 'adagrad' without weight decay "
                "and momentum; 'sparseadam' trains only embeddings."
            )
        members = [parameter for parameter in group["params"] if id(parameter) in dense]
        if members and isinstance(optimizer, torch.optim.SparseAdam):
            raise ConfigError(
                f"`optimizer` ({name}) takes sparse gradients only, and those of "
                f"{_list_names(dense, members)} are dense. Use optimizer='sgd' or "
                "'adagrad', which take both, or make the embeddings with sparse=False and use 'adamw'."
            )


def _list_names(names: Mapping[int, str], parameters: list[Any]) -> str:
    return format_list([repr(names[id(parameter)]) for parameter in parameters])


def _reason_against_sparse(optimizer: Any, group: Mapping[str, Any], parameter: torch.Tensor) -> str | None:
    """Return why an optimizer cannot train a parameter with sparse gradients, from a step of a small copy of it."""
    values = torch.zeros([1] * parameter.dim(), dtype=parameter.dtype)
    small = nn.Parameter(values.clone())
    with torch.sparse.check_sparse_tensor_invariants():  # PyTorch warns until a program has said whether to check
        small.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), values, values.shape)
    kind = optimizer.stepping(group) if hasattr(optimizer, "stepping") else type(optimizer)
    try:
        state = try_step(kind, group, small)
    except (RuntimeError, ValueError) as error:
        return str(error).rstrip(".")
    if any(torch.is_tensor(value) and value.is_sparse for value in state.values()):
        return "it keeps a sparse momentum, which checkpoints cannot hold"
    return None
