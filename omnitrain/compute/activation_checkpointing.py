"""Recomputation of activations in the backward pass, instead of keeping them, for any model."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from omnitrain.core.errors import ConfigError

_NAMES = ("activation_checkpointing", "gradient_checkpointing")  # transformers' newer name first
_HOLDERS = (nn.ModuleList, nn.Sequential)


def own_way(model: Any) -> functools.partial[Any] | None:
    """Return the function with which a transformers model enables its own recomputation; None if it has none."""
    for name in _NAMES if getattr(model, "supports_gradient_checkpointing", True) else ():
        if callable(enable := getattr(model, f"{name}_enable", None)):
            return functools.partial(enable, **{f"{name}_kwargs": {"use_reentrant": False}})
    return None


def recompute_activations(model: nn.Module, wanted: bool | Sequence[str]) -> None:
    """Let a model recompute activations: in its own way if it is from transformers, otherwise block by block.

    Args:
        model: The bare module; changed in place, permanently.
        wanted: Regular expressions for the names of its blocks; True finds them: the members of its `ModuleList`s and
            `Sequential`s that have layers in turn.

    Raises:
        ConfigError: If there are no such blocks.
    """
    enable = own_way(model) if wanted is True else None
    if enable is not None:
        return enable()
    for block in _found_blocks(model) if wanted is True else _named_blocks(model, wanted or ()):
        if not isinstance(block.forward, _Recomputed):
            block.forward = _Recomputed(block)
    return None


def _found_blocks(model: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = list(dict.fromkeys(blocks_in(model)))
    if not found:  # then each Sequential of layers is a block, if there are several
        found = [one for one in model.modules() if one is not model and isinstance(one, nn.Sequential) and len(one) > 1]
    if not found or (len(found) == 1 and isinstance(found[0], nn.Sequential)):
        raise ConfigError(
            f"`gradient_checkpointing=True` finds no blocks in {type(model).__name__}: none of its parts is an "
            "nn.ModuleList or nn.Sequential of modules that are made of layers. Name those whose activations are to be "
            "computed again, as in gradient_checkpointing=['encoder', r'stages\\.\\d+'], or put layers into an "
            "nn.Sequential each."
        )
    return found


def blocks_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks in a module: the members of its lists that consist of layers; the inner ones if nested."""
    holds_blocks = isinstance(module, _HOLDERS)
    for child in module.children():
        inner = list(blocks_in(child)) if not holds_blocks or isinstance(child, _HOLDERS) else []
        if inner or not holds_blocks:
            yield from inner
        elif not isinstance(child, nn.ModuleList) and next(child.children(), None) is not None:
            yield child


def _named_blocks(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = {name: one for name, one in model.named_modules() if name and re.fullmatch(pattern, name)}
        if not matching:
            names = ", ".join([name for name, _ in model.named_modules() if name][:20])
            raise ConfigError(
                f"`gradient_checkpointing={list(patterns)!r}`: no module is called {pattern!r}. Those of "
                f"{type(model).__name__} are {names or 'none'}."
            )
        found |= matching
    outer = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    return list(dict.fromkeys(found[name] for name in outer))


class _Recomputed:
    """The `forward` of a block that keeps only its inputs, and is called again for the backward pass.

    Args:
        block: The module.
    """

    def __init__(self, block: nn.Module) -> None:
        functools.update_wrapper(self, block.forward)
        self.block = block
        self.run = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        how: dict[str, Any] = {"context_fn": self._contexts} if next(self.block.buffers(), None) is not None else {}
        # positional, because PyTorch finds there the devices whose random numbers it restores
        return checkpoint(self._call, args, kwargs, use_reentrant=False, **how)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.run(*args, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of both calls; the second one uses the earlier buffers, and leaves the present ones.

        Otherwise BatchNorm would count a batch twice, and a spectral norm would iterate further.
        """
        stores = [one._buffers for one in self.block.modules()]
        before = [
            (store, name, buffer.clone()) for store in stores for name, buffer in store.items() if buffer is not None
        ]
        return contextlib.nullcontext(), _with_buffers(before)


@contextlib.contextmanager
def _with_buffers(buffers: Sequence[tuple[dict[str, Any], str, torch.Tensor]]) -> Iterator[None]:
    now = [(store, name, store[name]) for store, name, _ in buffers]
    try:
        for store, name, buffer in buffers:
            store[name] = buffer
        yield
    finally:
        for store, name, buffer in now:
            store[name] = buffer
