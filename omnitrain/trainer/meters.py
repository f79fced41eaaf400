"""Means of losses, and means, sums and maxima of metrics."""

from __future__ import annotations

import functools
import itertools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from omnitrain.core.errors import ConfigError, DataError
from omnitrain.distributed.ranks import Ranks
from omnitrain.metrics.accumulated import MetricState, is_torchmetrics, reset_objects
from omnitrain.model.units import Max, Sum


class LossMeter:
    """The weighted sum of an epoch's losses, accumulated on the device and read only for logs.

    On a CPU, where reading is free, `sum` is a float.

    >>> meter = LossMeter(torch.device("cpu"))
    >>> meter.add(torch.tensor(2.0), 3)
    >>> meter.add(torch.tensor(4.0), 1)
    >>> meter.mean(), meter.since_last()
    (2.5, (10.0, 4.0))
    """

    def __init__(self, device: torch.device, ranks: Ranks | None = None) -> None:
        self.ranks: Ranks = ranks or Ranks()
        # In float64, the mean does not depend on how often it is read; Apple's devices have no float64.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.sum: float | torch.Tensor = 0.0
        if device.type != "cpu":
            self.sum = torch.zeros((), dtype=dtype, device=device)
        self.weight: float = 0.0
        # Sum and weight at the latest call of `since_last`.
        self._at_last_log = (0.0, 0.0)

    def add(self, loss: torch.Tensor, weight: float) -> None:
        """Add the loss of a micro-batch."""
        if not weight:
            return  # there was nothing to predict, so the loss may be NaN
        self.weight += weight
        if isinstance(self.sum, torch.Tensor):
            # in place, without a temporary: `sum += loss * weight` would allocate twice in each micro-batch
            self.sum.add_(loss.detach(), alpha=weight)
        else:
            self.sum += weight * loss.item()

    def mean(self) -> float:
        """Return the mean over all ranks since the epoch began."""
        total, weight = self.ranks.sum_shares("the mean loss of an epoch", float(self.sum), self.weight)
        return total / weight if weight else math.nan

    def since_last(self) -> tuple[float, float]:
        """Return the sum and the weight added on this rank since the latest call."""
        current = float(self.sum), self.weight
        (total, weight), self._at_last_log = self._at_last_log, current
        return current[0] - total, current[1] - weight

    def snapshot(self) -> tuple[float | torch.Tensor, float]:
        """Return sum and weight, for `rollback`, without waiting for the device."""
        return (self.sum.clone() if isinstance(self.sum, torch.Tensor) else self.sum), self.weight

    def rollback(self, snapshot: tuple[float | torch.Tensor, float]) -> None:
        """Remove what was added since `snapshot()`."""
        total, self.weight = snapshot
        if isinstance(self.sum, torch.Tensor):
            self.sum.fill_(total)
        else:
            self.sum = float(total)

    def state_dict(self) -> dict[str, Any]:
        """Return sum and weight, now and at the latest log."""
        return {"sum": float(self.sum), "weight": self.weight, "marked": list(self._at_last_log)}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states of each process; if their number differs, the first gets the total."""
        numbers = [[0.0] * 4]
        for state in _states_of_rank(self.ranks, states):
            numbers.append([state["sum"], state["weight"], *state["marked"]])
        total, weight, *logged = map(sum, zip(*numbers, strict=True))
        self.rollback((total, weight))
        self._at_last_log = (logged[0], logged[1])

    def begin_epoch(self) -> None:
        """Start the mean of a new epoch; what was added since the latest log still counts for the next log."""
        # so that the next `since_last` includes what the previous epoch added since the latest log
        self._at_last_log = (self._at_last_log[0] - float(self.sum), self._at_last_log[1] - self.weight)
        self.rollback((0.0, 0.0))


def _states_of_rank(ranks: Ranks, states: Sequence[Any]) -> Sequence[Any]:
    """Return the states of all processes that this rank continues: all on the first one, if their number differs."""
    if len(states) == ranks.data.size:
        return states[ranks.data.rank : ranks.data.rank + 1]
    return [] if ranks.data.rank else states


# Names that rows of logs use themselves.
_TAKEN = frozenset(
    ["step", "epoch", "loss", "learning_rate", "grad_norm", "samples_per_second", "tokens_per_second", "skipped_steps",
     "loss_scale", "kind", "final"]
)  # fmt: skip
# Prefixes of the history, of evaluations, of tests and of other groups' rates.
_PREFIXES = ("train_", "eval_", "test_", "learning_rate_")


_LOG, _EPOCH = 0, 1
_KINDS = {"mean": "a mean", "sum": "a Sum", "running": "a Sum over the run", "max": "a Max", "object": "an object"}


@dataclass(slots=True)
class _Reading:
    """What one rank has counted of a name, on the host; readings of several ranks add up."""

    kind: str
    total: float
    weight: float

    def __add__(self, other: _Reading) -> _Reading:
        total = max(self.total, other.total) if self.kind == "max" else self.total + other.total
        if math.isnan(self.total + other.total) and self.kind == "max":
            total = math.nan
        return _Reading(self.kind, total, self.weight + other.weight)

    def results(self, name: str) -> dict[str, float]:
        return {name: self.total / self.weight if self.kind == "mean" else self.total}


@dataclass(slots=True)
class _ObjectReading:
    """What one rank has counted with an object of torchmetrics; without that object, its results when it was saved."""

    state: MetricState
    metric: Any
    saved: dict[str, float]
    kind: str = "object"

    def __add__(self, other: _ObjectReading) -> _ObjectReading:
        metric = other.metric if self.metric is None else self.metric
        return _ObjectReading(self.state + other.state, metric, self.saved)

    def results(self, name: str) -> dict[str, float]:
        return self.saved if self.metric is None else self.state.compute(name, self.metric)


class _Meter:
    """The mean, sum or maximum of a name, since the latest log and since the epoch began."""

    __slots__ = ("kind", "values", "weights")

    def __init__(self, kind: str, values: torch.Tensor, weights: list[float]) -> None:
        self.kind = kind
        self.values = values
        self.weights = weights

    def add(self, value: torch.Tensor, weight: float) -> None:
        if self.kind == "mean":
            self.values.add_(value, alpha=weight)
        elif self.kind != "max":
            self.values.add_(value)
        elif all(self.weights):
            torch.maximum(self.values, value.to(self.values), out=self.values)
        else:
            for since in (_LOG, _EPOCH):
                known = self.values[since].clone()
                self.values[since] = torch.maximum(known, value.to(known)) if self.weights[since] else value
        self.weights[_LOG] += weight
        self.weights[_EPOCH] += weight

    def reset(self, since: int) -> None:
        if self.kind != "running":
            self.values[since] = self.weights[since] = 0.0

    def copy(self) -> _Meter:
        return _Meter(self.kind, self.values.clone(), list(self.weights))

    def state_dict(self) -> list[Any]:
        return [*self.values.tolist(), *self.weights, *([] if self.kind == "mean" else [self.kind])]

    def merge_state(self, numbers: Sequence[float]) -> None:
        """Add the state of another process."""
        for since in (_LOG, _EPOCH):
            total, weight = numbers[since], numbers[2 + since]
            if weight:
                known = _Reading(self.kind, float(self.values[since]), self.weights[since])
                reading = _Reading(self.kind, total, weight)
                self.values[since] = (known + reading if known.weight else reading).total
                self.weights[since] += weight


class _ObjectMeter:
    """The states of an object of torchmetrics, since the latest log and since the epoch began."""

    __slots__ = ("kind", "metric", "saved", "states")

    def __init__(self, metric: Any, states: list[MetricState | None], saved: dict[str, float]) -> None:
        self.kind = "object"
        self.metric = metric
        self.states: list[MetricState | None] = states
        self.saved = saved

    def add(self, name: str, metric: Any) -> None:
        if self.metric is None:
            self.metric = metric.clone().cpu()
            self.metric.reset()
        if state := MetricState.pop(name, metric):
            self.states = [state if before is None else before + state for before in self.states]

    def reset(self, since: int) -> None:
        self.states[since] = None

    def copy(self) -> _ObjectMeter:
        return _ObjectMeter(self.metric, list(self.states), self.saved)

    def state_dict(self) -> list[Any]:
        return [*(None if state is None else state.to_json() for state in self.states), self.kind]

    def merge_state(self, states: Sequence[Any]) -> None:
        """Add the state of another process."""
        for since, parts in enumerate(states):
            if parts is not None:
                before, state = self.states[since], MetricState.from_json(parts)
                self.states[since] = state if before is None else before + state


class Meters:
    """The means, sums and maxima of named values, since the latest log and since the epoch began.

    Unlike losses, values may be NaN or infinite: then so is the result of that log and of that epoch, and no other.

    >>> meters = Meters(torch.device("cpu"))
    >>> meters.add({"accuracy": torch.tensor(0.5), "words": Sum(7)}, 3)
    >>> meters.add({"accuracy": torch.tensor(1.0), "words": Sum(5)}, 1)
    >>> meters.means_since_last(), meters.means_since_last(), meters.means()
    ({'accuracy': 0.625, 'words': 12.0}, {}, {'accuracy': 0.625, 'words': 12.0})
    """

    def __init__(self, device: torch.device, ranks: Ranks | None = None) -> None:
        self.ranks: Ranks = ranks or Ranks()
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._zeros: Callable[[], torch.Tensor] = functools.partial(torch.zeros, 2, dtype=dtype, device=device)
        self._meters: dict[str, _Meter | _ObjectMeter] = {}

    def __len__(self) -> int:
        """Return the number of names on this rank."""
        return len(self._meters)

    def add(self, values: Mapping[str, Any], weight: float) -> None:
        """Add the values of a micro-batch, which are means over it; one of weight 0 had nothing to measure.

        A value can be a pair with its own weight, if it is a mean over something else, or a `Sum`, a `Max` or an object
        of torchmetrics.

        Raises:
            ConfigError: For a name that stands for something else, or an object whose states cannot be added.
            DataError: For a value that is no scalar, or one of another kind than before.
        """
        for name, entry in values.items():
            kind, value, value_weight = _parse(entry, weight)
            if not value_weight or not weight:
                reset_objects({name: value})
                continue
            # a dict lookup in each micro-batch; names are validated when they appear first
            meter = self._meters.get(name) or self._begin(name, kind)
            if meter.kind != kind:
                raise DataError(
                    f"The metric {name!r} is {_KINDS[kind]} in this batch, and was {_KINDS[meter.kind]} before. Give "
                    "each of them a name."
                )
            if isinstance(meter, _Meter):
                meter.add(_scalar(name, value), value_weight)
            else:
                meter.add(name, value)

    def _begin(self, name: Any, kind: str) -> _Meter | _ObjectMeter:
        if not isinstance(name, str) or not name or name in _TAKEN or name.startswith(_PREFIXES):
            raise ConfigError(
                f"A metric, or a part of the loss, is called {name!r} in rows of logs, and that stands for something "
                f"else there, or is no text. Choose another name: not {', '.join(sorted(_TAKEN))}, and none that "
                f"begins with {', '.join(_PREFIXES)}."
            )
        return self._meters.setdefault(name, self._new(kind))

    def _new(self, kind: str, saved: dict[str, float] | None = None) -> _Meter | _ObjectMeter:
        is_object = kind == "object"
        return _ObjectMeter(None, [None, None], saved or {}) if is_object else _Meter(kind, self._zeros(), [0.0, 0.0])

    # --- results over all ranks

    def means_since_last(self) -> dict[str, float]:
        """Return the results since the last call; called on all ranks."""
        means = self._means("the metrics for a log", _LOG)
        for meter in self._meters.values():
            meter.reset(_LOG)
        return means

    def means(self) -> dict[str, float]:
        """Return the results since the epoch began; called on all ranks."""
        return self._means("the metrics of an epoch", _EPOCH)

    def _means(self, what: str, since: int) -> dict[str, float]:
        return self.ranks.combine(what, self.sums(since), lambda sums: means_of(self.ranks.one_per_share(sums)))

    def sums(self, since: int = _EPOCH) -> dict[str, Any]:
        """Return what this rank has counted since the latest log or since the epoch began, waiting for the device."""
        meters = {
            name: meter for name, meter in self._meters.items() if isinstance(meter, _Meter) and meter.weights[since]
        }
        # stacked, so that all of them are read from the device in one copy
        totals = torch.stack([meter.values[since] for meter in meters.values()]).tolist() if meters else []
        readings: dict[str, Any] = {
            name: _Reading(meter.kind, total, meter.weights[since])
            for (name, meter), total in zip(meters.items(), totals, strict=True)
        }
        for name, meter in self._meters.items():
            if isinstance(meter, _ObjectMeter) and (state := meter.states[since]) is not None:
                readings[name] = _ObjectReading(state.cpu(), meter.metric, meter.saved)
        return readings

    def begin_epoch(self) -> None:
        """Start the results of a new epoch; what was added since the latest log still counts in the next."""
        for meter in self._meters.values():
            meter.reset(_EPOCH)

    # --- rollback and checkpoints

    def snapshot(self) -> dict[str, Any]:
        """Return the state for `rollback`, without waiting for the device."""
        return {name: meter.copy() for name, meter in self._meters.items()}

    def rollback(self, snapshot: Mapping[str, Any]) -> None:
        """Remove what was added since `snapshot()`."""
        self._meters = {name: meter.copy() for name, meter in snapshot.items()}

    def state_dict(self) -> list[Any]:
        """Return the state of each name, as JSON types."""
        return [[name, *meter.state_dict()] for name, meter in self._meters.items()]

    def object_results(self, states: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Return "metric_results": those of objects over all processes, for a run that ends its epoch when resumed."""
        merged = Meters(torch.device("cpu"))
        merged.load_state_dict(states)
        results = {}
        for name, meter in merged._meters.items():
            local = self._meters.get(name)
            if isinstance(meter, _ObjectMeter) and isinstance(local, _ObjectMeter):
                state = meter.states[_EPOCH]
                results[name] = {} if state is None else _ObjectReading(state, local.metric, local.saved).results(name)
        return {"metric_results": results} if results else {}

    def load_state_dict(
        self, states: Sequence[Sequence[Any]], results: Mapping[str, dict[str, float]] = MappingProxyType({})
    ) -> None:
        """Restore the states of each process; if their number differs, the first gets the total.

        Args:
            states: The state of each process.
            results: The entry of `object_results`.
        """
        self._meters = {}
        for name, *state in itertools.chain(*_states_of_rank(self.ranks, states)):
            kind = state.pop() if isinstance(state[-1], str) else "mean"
            meter = self._meters.setdefault(name, self._new(kind, results.get(name)))
            meter.merge_state(state)


def _parse(entry: Any, weight: float) -> tuple[str, Any, float]:
    """Return kind, value and weight of an entry of `StepOutput.metrics`."""
    kind = type(entry)
    if kind is torch.Tensor or kind is float:
        return "mean", entry, weight
    if kind is tuple and len(entry) == 2:
        return "mean", *entry
    if kind is Sum:
        return "running" if entry.running else "sum", entry.value, 1.0
    if kind is Max:
        return "max", entry.value, 1.0
    return "object" if is_torchmetrics(entry) else "mean", entry, weight


def means_of(sums: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the results of what ranks have counted by name.

    >>> means_of([{"a": _Reading("mean", 3.0, 2.0)}, {}, {"a": _Reading("mean", 3.0, 1.0)}])
    {'a': 2.0}
    """
    merged: dict[str, Any] = {}
    for of_rank in sums:
        for name, reading in of_rank.items():
            before = merged.get(name)
            if before is not None and before.kind != reading.kind:
                raise DataError(
                    f"The metric {name!r} is {_KINDS[before.kind]} on one rank and {_KINDS[reading.kind]} on another. "
                    "Give each of them a name."
                )
            merged[name] = reading if before is None else before + reading
    results: dict[str, float] = {}
    for name, reading in merged.items():
        numbers = reading.results(name)
        if shared := numbers.keys() & results.keys():
            raise DataError(f"Two metrics are called {min(shared)!r}, one as a part of {name!r}. Rename one of them.")
        results |= numbers
    return results


def _scalar(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.detach().reshape(())
        description = f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    elif isinstance(value, numbers.Real):
        return torch.tensor(float(value), dtype=torch.float64)  # the device takes a number of the host without waiting
    else:
        description = f"{type(value).__name__} {value!r}"[:80]
    raise DataError(
        f"The metric {name!r} must be a scalar, a number or a tensor of one element, got {description}. Reduce it to "
        "the mean over the batch, for example with .mean()."
    )
