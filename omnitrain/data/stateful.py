"""State of custom units, collators, map-style datasets and losses.

Loaders and streams, whose state is their position, are in `loaders.py` and `streams.py`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from omnitrain.arguments import Settings
from omnitrain.core.errors import ConfigError
from omnitrain.data.streams import has_state


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


def data_parts(settings: Settings) -> dict[str, Any]:
    """Return the collator and the map-style datasets that have a state, by argument."""
    parts = {"data_collator": settings.data_collator}
    if settings.train_loader is None:
        parts |= _datasets("train_dataset", settings.train_dataset)
    return {name: part for name, part in parts.items() if has_state(part)}


def _datasets(name: str, dataset: Any) -> dict[str, Any]:
    """Return a map-style dataset, and those inside PyTorch's wrappers, by name."""
    if isinstance(dataset, Subset):
        return _datasets(f"{name}.dataset", dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        entries = [_datasets(f"{name}.datasets[{number}]", member) for number, member in enumerate(dataset.datasets)]
        return {key: part for entry in entries for key, part in entry.items()}
    is_map = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    return {name: dataset} if is_map else {}


def stateful_parts(settings: Settings, model: nn.Module) -> dict[str, Any]:
    """Return custom parts of a run with `state_dict` and `load_state_dict`, by argument."""
    parts: dict[str, Any] = {"unit": settings.unit}
    if not isinstance(settings.loss_fn, nn.Module):
        parts["loss_fn"] = settings.loss_fn
    parts = {name: part for name, part in parts.items() if has_state(part)} | data_parts(settings)
    return {name: _ModuleState(part, model) if isinstance(part, nn.Module) else part for name, part in parts.items()}


def check_parts(settings: Settings, names: Collection[str]) -> None:
    """Reject a state that a checkpoint cannot have.

    Raises:
        ConfigError: If workers run a collator with a state, which changes in them.
    """
    if "data_collator" in names and settings.num_workers:
        raise ConfigError(
            f"`data_collator` ({type(settings.data_collator).__name__}) has a state_dict(), and num_workers="
            f"{settings.num_workers}: each worker process changes its own copy, which no checkpoint has. Pass "
            "num_workers=0, or a collator without state_dict()."
        )


@contextlib.contextmanager
def preserve_state(parts: Mapping[str, Any]) -> Iterator[None]:
    """Restore the states of parts on exit: what runs inside belongs to no step."""
    states = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    try:
        yield
    finally:
        for name, part in parts.items():
            part.load_state_dict(states[name])
