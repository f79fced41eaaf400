"""Initialization of meta-device weights by the modules' own methods.

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

# Operations after which nothing of the former values is left.
_OVERWRITES = ("normal_", "uniform_", "zero_", "fill_", "copy_", "ones_", "exponential_", "random_", "bernoulli_")


class ModuleInitializer:
    """Initializes weights by `reset_parameters` of modules, or `_init_weights` of the model around them.

    Args:
        model: The model, whose tensors are undefined until `restore`.
        specs: Shape and dtype of all its tensors by bare name.
        names: The names of those to be initialized.
    """

    def __init__(
        self, model: nn.Module, specs: Mapping[str, tuple[torch.Size, torch.dtype]], names: Collection[str]
    ) -> None:
        self._model, self._specs, self._names = unwrap(model), specs, set(names)
        self._original: list[tuple[dict[str, Any], str, Any]] = []
        # The entries of each tensor in the modules; a tied one has several.
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        self._owner: dict[str, nn.Module] = {}
        self._current: dict[str, torch.Tensor] = {}
        self._initialized: set[str] = set()
        first: dict[int, str] = {}
        for path, module in self._model.named_modules():
            for entries in (module._parameters, module._buffers):
                for key, tensor in entries.items():
                    if tensor is None:
                        continue
                    name = first.setdefault(id(tensor), bare_name(f"{path}.{key}" if path else key))
                    self._places.setdefault(name, []).append((entries, key))
                    self._owner.setdefault(name, module)
                    self._original.append((entries, key, tensor))
        for name in self._places:
            self._reset_tensor(name)

    def _reset_tensor(self, name: str) -> None:
        """Replace a tensor by an uninitialized one; the host allocates its memory when it is written to."""
        shape, dtype = self._specs[name]
        entries, key = self._places[name][0]
        old = entries[key]
        new: Any = torch.empty(shape, dtype=dtype)
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=False)
        new._is_hf_initialized = name not in self._names  # transformers leaves such tensors unchanged
        self._current[name] = new
        for entries, key in self._places[name]:
            entries[key] = new

    def restore(self) -> None:
        """Restore the tensors that the modules had."""
        for entries, key, tensor in self._original:
            entries[key] = tensor

    def missing(self) -> dict[str, str]:
        """Return the names of tensors that no module has initialized, and the classes of their modules."""
        absent = [
            name for name in self._specs if name in self._names - self._initialized and self._specs[name][0].numel()
        ]
        return {name: class_of(self._owner[name]).__name__ for name in absent}

    def steps(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield tensors by name as modules initialize them: inner modules first."""
        for module, owner in _in_order(self._model, None, set()):
            own_names = [name for name, value in self._owner.items() if value is module and name in self._names]
            if not own_names and owner is None:
                continue
            writes = _WriteTracker(
                {value.untyped_storage().data_ptr(): name for name, value in self._current.items()}, self._initialized
            )
            with torch.no_grad(), _skip_initialized(), writes:
                _initialize_module(module, owner, bool(own_names))
            initialized: dict[str, torch.Tensor] = {}
            for name, places in self._places.items():
                entries, key = places[0]
                if name in writes.written or entries[key] is not self._current[name]:
                    if name in self._names and entries[key] is not None:
                        initialized[name] = entries[key].detach()
                    self._reset_tensor(name)
            self._initialized |= initialized.keys()
            if initialized:
                yield initialized


def _in_order(module: nn.Module, owner: Any, visited: set[int]) -> Iterator[tuple[nn.Module, Any]]:
    """Yield modules after their children, each with the nearest one around it that has `_init_weights`."""
    if id(module) in visited:
        return
    visited.add(id(module))
    owner = module if callable(getattr(module, "_init_weights", None)) else owner
    for child in module.children():
        yield from _in_order(child, owner, visited)
    yield module, owner


def _initialize_module(module: nn.Module, owner: Any, has_own: bool) -> None:
    is_complete = owner is not None and hasattr(owner, "_initialize_weights")  # transformers' sets all tensors
    reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if has_own and callable(reset) and not is_complete:
        reset()
    if owner is not None:
        owner._init_weights(module)


def _skip_initialized() -> Any:
    """Return a context in which transformers skips tensors marked as initialized."""
    known = sys.modules.get("transformers.initialization")
    guard = getattr(known, "guard_torch_init_functions", None)
    return contextlib.nullcontext() if guard is None else guard()


class _WriteTracker(TorchDispatchMode):
    """Records which tensors are written to; rejects partial changes of tensors that were sent already."""

    def __init__(self, names: Mapping[int, str], sent: Collection[str]) -> None:
        super().__init__()
        self._names, self._sent = names, set(sent)
        self.written: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not getattr(func, "is_view", False):
            is_written = [
                bool(argument.alias_info and argument.alias_info.is_write) for argument in func._schema.arguments
            ]
            for place, argument in enumerate((*args, *kwargs.values())):
                for tensor in tree_leaves(argument):
                    if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                        self._record(func, tensor, place < len(args) and is_written[place])
        return func(*args, **kwargs)

    def _record(self, func: Any, tensor: torch.Tensor, is_written: bool) -> None:
        name = self._names.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if name is None:
            return
        operation = func._schema.name.partition("::")[2]
        is_all = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if name in self._sent:
            if not (is_written and operation in _OVERWRITES and is_all):
                raise ConfigError(
                    f"The model was made on the meta device, and a module around `{name}` goes by its values "
                    f"({operation}), which have been sent to the ranks. Pass init_from=..., or make the model outside "
                    "of `torch.device('meta')` on the main rank."
                )
            self._sent.discard(name)
        if is_written:
            self.written.add(name)
