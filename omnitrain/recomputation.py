"""Activations that are computed once more for the backward pass instead of being kept, of any model."""

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

from omnitrain.errors import ConfigError

__all__ = ["blocks_in", "own_way", "recompute_activations"]

_NAMES = ("activation_checkpointing", "gradient_checkpointing")  # the newer one of transformers first
_HOLDERS = (nn.ModuleList, nn.Sequential)


def own_way(model: Any) -> functools.partial[Any] | None:
    """Return what has a model of transformers recompute activations in its own way; None if it has none."""
    for name in _NAMES if getattr(model, "supports_gradient_checkpointing", True) else ():
        if callable(enable := getattr(model, f"{name}_enable", None)):
            return functools.partial(enable, **{f"{name}_kwargs": {"use_reentrant": False}})
    return None


def recompute_activations(model: nn.Module, wanted: bool | Sequence[str]) -> None:
    """Have a model recompute activations, in its own way if it is one of transformers', else block by block.

    Args:
        model: The bare module; changed in place, and for good.
        wanted: Regular expressions of the names of its blocks; True finds them: they are what its `ModuleList`s and
            `Sequential`s hold, if that has layers in turn.

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
    if not found:  # then a Sequential of layers is one, if there are several
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
    """Yield the blocks in a module: what its lists hold, if that is made of layers; of nested blocks the inner ones."""
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
    """The `forward` of a block that keeps its inputs alone, and is called again for the backward pass.

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
        # arguments by position, where PyTorch looks for the devices whose random numbers it puts back
        return checkpoint(self._call, args, kwargs, use_reentrant=False, **how)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.run(*args, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of both calls; the second one finds buffers as they were, and leaves them as they are.

        Else it would count a batch of BatchNorm twice, and iterate on what a spectral norm has found.
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
