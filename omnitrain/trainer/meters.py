"""Weighted means of losses, and of metrics that forward passes return."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from omnitrain.compute.precision import read_on_cpu
from omnitrain.core.errors import ConfigError, DataError
from omnitrain.distributed.ranks import Ranks


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
            self.sum += weight * read_on_cpu(loss)

    def mean(self) -> float:
        """Return the mean over all ranks since the epoch began."""
        total, weight = self.ranks.sum(
            "the mean loss of an epoch", *self.ranks.count_once([float(self.sum), self.weight])
        )
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
        local_states = _states_of_rank(self.ranks, states)
        numbers = [[0.0] * 4, *([state["sum"], state["weight"], *state["marked"]] for state in local_states)]
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
_Meter = tuple[torch.Tensor, list[float]]


class Meters:
    """The weighted means of named values, since the latest log and since the epoch began.

    Unlike losses, values may be NaN or infinite: then so is the mean of that log and of that epoch, and no other.

    >>> meters = Meters(torch.device("cpu"))
    >>> meters.add({"accuracy": torch.tensor(0.5)}, 3)
    >>> meters.add({"accuracy": torch.tensor(1.0)}, 1)
    >>> meters.means_since_last(), meters.means_since_last(), meters.means()
    ({'accuracy': 0.625}, {}, {'accuracy': 0.625})
    """

    def __init__(self, device: torch.device, ranks: Ranks | None = None) -> None:
        self.ranks: Ranks = ranks or Ranks()
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._zeros: Callable[[], torch.Tensor] = functools.partial(torch.zeros, 2, dtype=dtype, device=device)
        # By name the sums on the device and the weights, each since the latest log and since the epoch began.
        self._meters: dict[str, _Meter] = {}

    def __len__(self) -> int:
        """Return the number of names on this rank."""
        return len(self._meters)

    def add(self, values: Mapping[str, Any], weight: float) -> None:
        """Add the values of a micro-batch, which are means over it; one of weight 0 had nothing to measure.

        A value can be a pair with its own weight, if it is a mean over something else.

        Raises:
            ConfigError: For a name that stands for something else.
            DataError: For a value that is no scalar.
        """
        if not weight:
            return
        for name, entry in values.items():
            value, value_weight = entry if type(entry) is tuple and len(entry) == 2 else (entry, weight)
            if not value_weight:
                continue
            # a dict lookup in each micro-batch; names are validated when they appear first
            sums, weights = self._meters.get(name) or self._begin(name)
            sums.add_(_scalar(name, value), alpha=value_weight)
            weights[_LOG] += value_weight
            weights[_EPOCH] += value_weight

    def _begin(self, name: Any) -> _Meter:
        if not isinstance(name, str) or not name or name in _TAKEN or name.startswith(_PREFIXES):
            raise ConfigError(
                f"A metric, or a part of the loss, is called {name!r} in rows of logs, and that stands for something "
                f"else there, or is no text. Choose another name: not {', '.join(sorted(_TAKEN))}, and none that "
                f"begins with {', '.join(_PREFIXES)}."
            )
        return self._meters.setdefault(name, (self._zeros(), [0.0, 0.0]))

    # --- means over all ranks

    def means_since_last(self) -> dict[str, float]:
        """Return the means since the last call; called on all ranks."""
        means = self._means("the metrics for a log", _LOG)
        for sums, weights in self._meters.values():
            sums[_LOG] = weights[_LOG] = 0.0
        return means

    def means(self) -> dict[str, float]:
        """Return the means since the epoch began; called on all ranks."""
        return self._means("the metrics of an epoch", _EPOCH)

    def _means(self, what: str, since: int) -> dict[str, float]:
        return self.ranks.combine(what, self.sums(since), lambda sums: means_of(self.ranks.one_per_share(sums)))

    def sums(self, since: int = _EPOCH) -> dict[str, tuple[float, float]]:
        """Return sum and weight on this rank since the latest log or since the epoch began, waiting for the device."""
        meters = {
            name: (sums[since], weights[since]) for name, (sums, weights) in self._meters.items() if weights[since]
        }
        # stacked, so that all of them are read from the device in one copy
        totals = torch.stack([total for total, _ in meters.values()]).tolist() if meters else []
        return {name: (total, meters[name][1]) for name, total in zip(meters, totals, strict=True)}

    def begin_epoch(self) -> None:
        """Start the means of a new epoch; what was added since the latest log still counts in the next."""
        for sums, weights in self._meters.values():
            sums[_EPOCH] = weights[_EPOCH] = 0.0

    # --- rollback and checkpoints

    def snapshot(self) -> dict[str, _Meter]:
        """Return the state for `rollback`, without waiting for the device."""
        return {name: (sums.clone(), list(weights)) for name, (sums, weights) in self._meters.items()}

    def rollback(self, snapshot: Mapping[str, _Meter]) -> None:
        """Remove what was added since `snapshot()`."""
        self._meters = {name: (sums.clone(), list(weights)) for name, (sums, weights) in snapshot.items()}

    def state_dict(self) -> list[Any]:
        """Return of each name the two sums and the two weights."""
        return [[name, *sums.tolist(), *weights] for name, (sums, weights) in self._meters.items()]

    def load_state_dict(self, states: Sequence[Sequence[Any]]) -> None:
        """Restore the states of each process; if their number differs, the first gets the total."""
        self._meters = {}
        for name, *numbers_of in (entry for state in _states_of_rank(self.ranks, states) for entry in state):
            sums, weights = self._meters.setdefault(name, (self._zeros(), [0.0, 0.0]))
            sums += torch.tensor(numbers_of[:2], dtype=sums.dtype).to(sums.device)
            weights[:] = [a + b for a, b in zip(weights, numbers_of[2:], strict=True)]


def means_of(sums: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Return the means of what ranks have: sum and weight by name.

    >>> means_of([{"a": (3.0, 2.0)}, {}, {"a": (3.0, 1.0), "b": (1.0, 1.0)}])
    {'a': 2.0, 'b': 1.0}
    """
    merged: dict[str, tuple[float, float]] = {}
    for of_rank in sums:
        for name, (total, weight) in of_rank.items():
            before = merged.get(name, (0.0, 0.0))
            merged[name] = (before[0] + total, before[1] + weight)
    return {name: total / weight for name, (total, weight) in merged.items()}


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
