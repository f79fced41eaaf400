"""Recomputation of activations in the backward pass, for any model."""

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


def builtin_checkpointing(model: Any) -> functools.partial[Any] | None:
    """Return the function that enables a transformers model's own recomputation; None if it has none."""
    for name in _NAMES if getattr(model, "supports_gradient_checkpointing", True) else ():
        if callable(enable := getattr(model, f"{name}_enable", None)):
            return functools.partial(enable, **{f"{name}_kwargs": {"use_reentrant": False}})
    return None


def recompute_activations(model: nn.Module, blocks: bool | Sequence[str]) -> None:
    """Enable recomputation: by the model's own method if it is from transformers, otherwise block by block.

    Args:
        model: The unwrapped module; modified in place, permanently.
        blocks: Regular expressions for the names of its blocks; True finds them: the members of its `ModuleList`s and
            `Sequential`s that contain layers.

    Raises:
        ConfigError: If there are no such blocks.
    """
    enable = builtin_checkpointing(model) if blocks is True else None
    if enable is not None:
        return enable()
    for block in _discover_blocks(model) if blocks is True else _named_blocks(model, blocks or ()):
        if not isinstance(block.forward, _Recomputed):
            block.forward = _Recomputed(block)
    return None


def _discover_blocks(model: nn.Module) -> list[nn.Module]:
    blocks: list[nn.Module] = list(dict.fromkeys(blocks_in(model)))
    if not blocks:  # then each Sequential of layers is a block, if there are several
        inner = [module for module in model.modules() if module is not model]
        blocks = [module for module in inner if isinstance(module, nn.Sequential) and len(module) > 1]
    if not blocks or (len(blocks) == 1 and isinstance(blocks[0], nn.Sequential)):
        raise ConfigError(
            f"`gradient_checkpointing=True` finds no blocks in {type(model).__name__}: none of its parts is an "
            "nn.ModuleList or nn.Sequential of modules that contain layers. Name the modules to recompute, as in "
            "gradient_checkpointing=['encoder', r'stages\\.\\d+'], or wrap each block in an nn.Sequential."
        )
    return blocks


def blocks_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of a module's lists that contain layers; the innermost ones if lists are nested."""
    holds_blocks = isinstance(module, _HOLDERS)
    for child in module.children():
        inner = list(blocks_in(child)) if not holds_blocks or isinstance(child, _HOLDERS) else []
        if inner or not holds_blocks:
            yield from inner
        elif not isinstance(child, nn.ModuleList) and next(child.children(), None) is not None:
            yield child


def _named_blocks(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    blocks: dict[str, nn.Module] = {}
    for pattern in patterns:
        blocks |= find_modules(model, pattern, f"`gradient_checkpointing={list(patterns)!r}`")
    outer = [name for name in blocks if not any(name.startswith(f"{other}.") for other in blocks)]
    return list(dict.fromkeys(blocks[name] for name in outer))


def find_modules(model: nn.Module, pattern: str | type[nn.Module], argument: str) -> dict[str, nn.Module]:
    """Return the modules inside a model of a class, or whose full names match a regular expression, by name.

    Raises:
        ConfigError: If there are none; `argument` is what it calls the argument.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    if isinstance(pattern, type):
        matches = {name: module for name, module in modules.items() if isinstance(module, pattern)}
    else:
        matches = {name: module for name, module in modules.items() if re.fullmatch(pattern, name)}
    if not matches:
        what = f"is a {pattern.__name__}" if isinstance(pattern, type) else f"is called {pattern!r}"
        names = ", ".join([*modules][:20]) or "none"
        raise ConfigError(f"{argument}: no module {what}. Those of {type(model).__name__} are {names}.")
    return matches


class _Recomputed:
    """The `forward` of a block that keeps only its inputs, and runs again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        functools.update_wrapper(self, block.forward)
        self.block = block
        self.run = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        options: dict[str, Any] = {"context_fn": self._contexts} if next(self.block.buffers(), None) is not None else {}
        # positional: PyTorch searches these for the devices whose random state it restores
        return checkpoint(self._call, args, kwargs, use_reentrant=False, **options)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.run(*args, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of both calls; the second reads the buffers of the first, and leaves them unchanged.

        Otherwise BatchNorm would count a batch twice, and a spectral norm would iterate further.
        """
        stores = [module._buffers for module in self.block.modules()]
        entries = [(store, name, buffer) for store in stores for name, buffer in store.items() if buffer is not None]
        buffers = [(store, name, buffer.clone()) for store, name, buffer in entries]
        return contextlib.nullcontext(), _swapped_buffers(buffers)


@contextlib.contextmanager
def _swapped_buffers(buffers: Sequence[tuple[dict[str, Any], str, torch.Tensor]]) -> Iterator[None]:
    current = [(store, name, store[name]) for store, name, _ in buffers]
    try:
        for store, name, buffer in buffers:
            store[name] = buffer
        yield
    finally:
        for store, name, buffer in current:
            store[name] = buffer
