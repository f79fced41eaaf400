"""State of custom units, collators, datasets and losses; snapshots of datasets.

Loaders and streams, whose state is their position, are in `loaders.py` and `streams.py`.
"""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from omnitrain.arguments import Settings
from omnitrain.core.errors import ConfigError


class _ModuleState:
    """The state of a module without that of the model in it, which is saved anyway."""

    def __init__(self, module: nn.Module, model: nn.Module) -> None:
        self._module = module
        model_tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._names = {
            name for name, tensor in module.state_dict(keep_vars=True).items() if id(tensor) not in model_tensors
        }

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self._module.state_dict().items() if name in self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != self._names:
            raise KeyError(f"expected {sorted(self._names)}, got {sorted(state)}")
        self._module.load_state_dict(state, strict=False)


def has_state(part: Any) -> bool:
    """Whether a part of a run, such as a stream or a collator, has `state_dict` and `load_state_dict`."""
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def data_parts(settings: Settings) -> dict[str, Any]:
    """Return the collator and the map-style datasets that have a state, by argument."""
    datasets = nested_datasets("train_dataset", settings.train_dataset) if settings.train_loader is None else {}
    parts = {"data_collator": settings.data_collator, **datasets}
    return {name: part for name, part in parts.items() if has_state(part)}


def nested_datasets(name: str, dataset: Any) -> dict[str, Any]:
    """Return a map-style dataset, and those inside PyTorch's wrappers, by name."""
    if isinstance(dataset, Subset):
        return nested_datasets(f"{name}.dataset", dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        entries = [
            nested_datasets(f"{name}.datasets[{number}]", member) for number, member in enumerate(dataset.datasets)
        ]
        return {key: part for entry in entries for key, part in entry.items()}
    is_map = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    return {name: dataset} if is_map else {}


def stateful_parts(settings: Settings, model: nn.Module) -> dict[str, Any]:
    """Return custom parts of a run with `state_dict` and `load_state_dict`, by argument."""
    loss_fn = None if isinstance(settings.loss_fn, nn.Module) else settings.loss_fn
    parts = {"unit": settings.unit, "loss_fn": loss_fn, **data_parts(settings)}
    for name, part in list(parts.items()):
        if not has_state(part):
            del parts[name]
        elif isinstance(part, nn.Module):
            parts[name] = _ModuleState(part, model)
    return parts


def check_parts(settings: Settings, names: Collection[str]) -> None:
    """Reject a state that a checkpoint cannot have."""
    if "data_collator" in names and settings.num_workers:
        raise ConfigError(
            f"`data_collator` ({type(settings.data_collator).__name__}) has a state_dict(), and num_workers="
            f"{settings.num_workers}: each worker process changes its own copy, which no checkpoint has. Pass "
            "num_workers=0, or a collator without state_dict()."
        )


@contextlib.contextmanager
def preserve_state(parts: Mapping[Any, Any]) -> Iterator[None]:
    """Restore the states of parts on exit: what runs inside belongs to no step."""
    states = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    try:
        yield
    finally:
        for name, part in parts.items():
            part.load_state_dict(states[name])


_PLAIN = (bool, int, float, complex, str, bytes, range, type(None))
_DEPTH = 6
# The most objects of a dataset that are looked into; of the rest, it is noticed which ones they are.
_VISITED = 1 << 15
# The largest array whose content is looked at.
_BYTES = 1 << 24


def snapshot(value: Any, depth: int = _DEPTH, budget: list[int] | None = None) -> Any:
    """Return a value that changes with a dataset and its attributes, and is cheap to compute.

    It covers numbers and text, the identity of objects, tensors and functions, writes to tensors and to arrays of up to
    16 MiB, and the same of nested datasets, lists and dicts. It misses writes to larger arrays, and the content of
    objects of compiled code.

    >>> data = type("Data", (), {})()
    >>> data.sizes = [1, 2]
    >>> before = snapshot(data)
    >>> data.sizes.append(3)
    >>> snapshot(data) == before
    False
    """
    budget = [_VISITED] if budget is None else budget
    budget[0] -= 1
    if isinstance(value, _PLAIN):
        return type(value).__name__, hash(value)
    if isinstance(value, torch.Tensor):
        return id(value), tuple(value.shape), None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        is_small = value.nbytes <= _BYTES and value.dtype.kind != "O"
        return id(value), value.shape, zlib.crc32(value.tobytes()) if is_small else None
    if not depth or isinstance(value, (type, FunctionType, ModuleType, nn.Module)):
        return id(value)
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        entries = [entry for pair in value.items() for entry in pair] if isinstance(value, dict) else value
        if len(entries) > budget[0]:
            return id(value), len(value), hash(tuple(map(id, entries)))
        return id(value), tuple(snapshot(entry, depth - 1, budget) for entry in entries)
    attributes = getattr(value, "__dict__", None)
    return id(value), None if attributes is None else snapshot(dict(attributes), depth, budget)[1:]
