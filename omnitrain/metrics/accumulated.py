"""States of torchmetrics objects, which add up over batches and ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from omnitrain.core.errors import CheckpointError, ConfigError, DataError

# The reductions of torchmetrics with which a state can be added to another one.
_REDUCTIONS = {f"dim_zero_{kind}": kind for kind in ("sum", "mean", "max", "min")}


def is_torchmetrics(value: Any) -> bool:
    """Check without importing torchmetrics, which is already imported if there is such a metric."""
    module = sys.modules.get("torchmetrics")
    kinds = [getattr(module, name, None) for name in ("Metric", "MetricCollection")]
    return isinstance(value, tuple(kind for kind in kinds if kind))


def parts_of_metric(metric: Any) -> list[Any]:
    """Return the single metrics of a metric or a collection."""
    return [module for module in metric.modules() if isinstance(module, sys.modules["torchmetrics"].Metric)]


def reset_objects(metrics: Mapping[str, Any] | None) -> None:
    """Have metrics forget a forward pass that does not count."""
    for value in (metrics or {}).values():
        if is_torchmetrics(value):
            value.reset()


@dataclass(slots=True)
class PartState:
    """The state of a single metric: the number of its updates, and its tensors by name with their reduction."""

    updates: int
    tensors: dict[str, tuple[str, torch.Tensor]]

    def __add__(self, other: PartState) -> PartState:
        if not self.updates or not other.updates:
            return self if self.updates else other
        total = self.updates + other.updates
        tensors = {}
        for name, (kind, tensor) in self.tensors.items():
            added = other.tensors[name][1].to(tensor.device)
            if kind == "sum":
                tensor = tensor + added
            elif kind == "mean":
                tensor = (tensor * self.updates + added * other.updates) / total
            else:
                tensor = torch.maximum(tensor, added) if kind == "max" else torch.minimum(tensor, added)
            tensors[name] = kind, tensor
        return PartState(total, tensors)


@dataclass(slots=True)
class MetricState:
    """What a torchmetrics object has counted; states of one object, or of its copies on other ranks, can be added.

    >>> from torchmetrics import MeanMetric
    >>> metric, states = MeanMetric(), []
    >>> for values in ([1.0], [3.0, 5.0]):
    ...     metric.update(torch.tensor(values))
    ...     states.append(MetricState.pop("size", metric))
    >>> (states[0] + states[1]).compute("size", metric)
    {'size': 3.0}
    """

    parts: list[PartState]

    @classmethod
    def pop(cls, name: str, metric: Any) -> Self:
        """Return what a metric has counted since it was last reset, and reset it.

        Raises:
            ConfigError: If it keeps all predictions, or has a state that cannot be added up.
        """
        parts = []
        for part in parts_of_metric(metric):
            tensors = {}
            for state, reduce in part._reductions.items():
                kind, value = _REDUCTIONS.get(getattr(reduce, "__name__", "")), getattr(part, state)
                if kind is None or not isinstance(value, torch.Tensor):
                    raise ConfigError(
                        f"The metric {name!r}, a {type(part).__name__}, cannot be added up over micro-batches: its "
                        f"state {state!r} is no sum, mean, maximum or minimum. Give it `thresholds`, if it takes them, "
                        "or score it in evaluations, by `compute_metrics`."
                    )
                tensors[state] = kind, value.detach()
            parts.append(PartState(part._update_count, tensors))
        metric.reset()
        return cls(parts)

    def __add__(self, other: MetricState) -> MetricState:
        return MetricState([a + b for a, b in zip(self.parts, other.parts, strict=True)])

    def __bool__(self) -> bool:
        """Return whether the metric was updated."""
        return any(part.updates for part in self.parts)

    def cpu(self) -> MetricState:
        """Return a copy on the host."""
        return MetricState([
            PartState(part.updates, {name: (kind, tensor.cpu()) for name, (kind, tensor) in part.tensors.items()})
            for part in self.parts
        ])  # fmt: skip

    def compute(self, name: str, metric: Any) -> dict[str, float]:
        """Return the result by name; one of several numbers, or of a collection, is `<name>_<part>`.

        Args:
            name: The name of the metric.
            metric: An object of the same kind, which stays unchanged.
        """
        metric = metric.clone().cpu()
        for part, state in zip(parts_of_metric(metric), self.cpu().parts, strict=True):
            part.distributed_available_fn = lambda: False  # the states of all ranks are in this one
            part._computed, part._update_count = None, state.updates
            for state_name, (_, tensor) in state.tensors.items():
                setattr(part, state_name, tensor)
        result = metric.compute()
        results = {f"{name}_{key}": value for key, value in result.items()} if isinstance(result, Mapping) else {}
        return {
            key + suffix: number
            for key, value in (results or {name: result}).items()
            for suffix, number in _numbers(key, value)
        }

    def to_json(self) -> list[Any]:
        """Return the state as JSON types."""
        return [
            [part.updates, {name: [kind, str(tensor.dtype).removeprefix("torch."), tensor.tolist()]
                            for name, (kind, tensor) in part.tensors.items()}]
            for part in self.parts
        ]  # fmt: skip

    @classmethod
    def from_json(cls, parts: list[Any]) -> Self:
        """Return the state from `to_json`.

        Raises:
            CheckpointError: If it has no tensors.
        """
        try:
            return cls([
                PartState(updates, {name: (kind, torch.tensor(values, dtype=getattr(torch, dtype)))
                                    for name, (kind, dtype, values) in tensors.items()})
                for updates, tensors in parts
            ])  # fmt: skip
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"The state of a training metric cannot be read: {error}.") from error


def _numbers(name: str, value: Any) -> list[tuple[str, float]]:
    """Return the numbers in a result, with the endings of their names."""
    numbers = torch.as_tensor(value)
    if numbers.ndim > 1:
        raise DataError(
            f"The metric {name!r} must give numbers, got a tensor of shape {tuple(numbers.shape)}. Choose an average."
        )
    if numbers.numel() == 1:
        return [("", float(numbers))]
    return [(f"_{i}", float(number)) for i, number in enumerate(numbers)]
