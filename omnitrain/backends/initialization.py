"""Weights that a model's modules make themselves, for a model that was made without memory.

One module at a time has memory, so that a model may be larger than the host.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omnitrain.checkpoint.state_dicts import bare_name, class_of, unwrap
from omnitrain.core.errors import ConfigError

_OVERWRITES = ("normal_", "uniform_", "zero_", "fill_", "copy_", "ones_", "exponential_", "random_", "bernoulli_")
"""Operations after which nothing of the former values is left."""


class OwnWeights:
    """The weights that `reset_parameters` of modules makes, or `_init_weights` of the model around them.

    Args:
        model: The model, whose tensors may be anything while this has not ended.
        specs: Shape and dtype of all its tensors by bare name.
        wanted: The names of those to be made.
    """

    def __init__(
        self, model: nn.Module, specs: Mapping[str, tuple[torch.Size, torch.dtype]], wanted: Collection[str]
    ) -> None:
        self._model, self._specs, self._wanted = unwrap(model), specs, set(wanted)
        self._before: list[tuple[dict[str, Any], str, Any]] = []
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        """Where each tensor stands in the modules; a tied one stands in several places."""
        self._owner: dict[str, nn.Module] = {}
        self._now: dict[str, torch.Tensor] = {}
        self._made: set[str] = set()
        first: dict[int, str] = {}
        for path, module in self._model.named_modules():
            for entries in (module._parameters, module._buffers):
                for key, tensor in entries.items():
                    if tensor is None:
                        continue
                    name = first.setdefault(id(tensor), bare_name(f"{path}.{key}" if path else key))
                    self._places.setdefault(name, []).append((entries, key))
                    self._owner.setdefault(name, module)
                    self._before.append((entries, key, tensor))
        for name in self._places:
            self._renew(name)

    def _renew(self, name: str) -> None:
        """Put a tensor without values in its places; the host gives it memory when it is written to."""
        shape, dtype = self._specs[name]
        entries, key = self._places[name][0]
        old = entries[key]
        new: Any = torch.empty(shape, dtype=dtype)
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=False)
        new._is_hf_initialized = name not in self._wanted  # transformers leaves such tensors alone
        self._now[name] = new
        for entries, key in self._places[name]:
            entries[key] = new

    def end(self) -> None:
        """Put back what the modules had."""
        for entries, key, tensor in self._before:
            entries[key] = tensor

    def lacking(self) -> dict[str, str]:
        """Return the names of tensors that no module has made, and the classes of their modules."""
        absent = [name for name in self._specs if name in self._wanted - self._made and self._specs[name][0].numel()]
        return {name: class_of(self._owner[name]).__name__ for name in absent}

    def steps(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield tensors by name as modules make them: those inside before those around them."""
        for module, owner in _in_order(self._model, None, set()):
            own = [name for name, one in self._owner.items() if one is module and name in self._wanted]
            if not own and owner is None:
                continue
            writes = _Writes({one.untyped_storage().data_ptr(): name for name, one in self._now.items()}, self._made)
            with torch.no_grad(), _guarded(), writes:
                _begin(module, owner, bool(own))
            found: dict[str, torch.Tensor] = {}
            for name, places in self._places.items():
                entries, key = places[0]
                if name in writes.written or entries[key] is not self._now[name]:
                    if name in self._wanted and entries[key] is not None:
                        found[name] = entries[key].detach()
                    self._renew(name)
            self._made |= found.keys()
            if found:
                yield found


def _in_order(module: nn.Module, owner: Any, seen: set[int]) -> Iterator[tuple[nn.Module, Any]]:
    """Yield modules after those inside of them, each with the nearest one around it that has `_init_weights`."""
    if id(module) in seen:
        return
    seen.add(id(module))
    owner = module if callable(getattr(module, "_init_weights", None)) else owner
    for child in module.children():
        yield from _in_order(child, owner, seen)
    yield module, owner


def _begin(module: nn.Module, owner: Any, has_own: bool) -> None:
    """Have a module make its weights."""
    is_complete = owner is not None and hasattr(owner, "_initialize_weights")  # transformers' sets all there is
    reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if has_own and callable(reset) and not is_complete:
        reset()
    if owner is not None:
        owner._init_weights(module)


def _guarded() -> Any:
    """Return a context in which transformers leaves alone what it is not to initialize."""
    known = sys.modules.get("transformers.initialization")
    guard = getattr(known, "guard_torch_init_functions", None)
    return contextlib.nullcontext() if guard is None else guard()


class _Writes(TorchDispatchMode):
    """Notes which tensors are written to; refuses to change a part of one whose values are gone."""

    def __init__(self, names: Mapping[int, str], gone: Collection[str]) -> None:
        super().__init__()
        self._names, self._gone = names, set(gone)
        self.written: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not getattr(func, "is_view", False):
            is_written = [bool(one.alias_info and one.alias_info.is_write) for one in func._schema.arguments]
            for place, one in enumerate((*args, *kwargs.values())):
                for tensor in tree_leaves(one):
                    if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                        self._note(func, tensor, place < len(args) and is_written[place])
        return func(*args, **kwargs)

    def _note(self, func: Any, tensor: torch.Tensor, is_written: bool) -> None:
        name = self._names.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if name is None:
            return
        operation = func._schema.name.partition("::")[2]
        is_all = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if name in self._gone:
            if not (is_written and operation in _OVERWRITES and is_all):
                raise ConfigError(
                    f"The model was made on the meta device, and a module around `{name}` goes by its values "
                    f"({operation}), which have been sent to the ranks. Pass init_from=..., or make the model outside "
                    "of `torch.device('meta')` on the main rank."
                )
            self._gone.discard(name)
        if is_written:
            self.written.add(name)
