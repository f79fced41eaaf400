"""Search spaces: lists, ranges and functions of optuna's trial. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from omnitrain.arguments import describe
from omnitrain.core.errors import ConfigError, check_number, did_you_mean

_FORMS = 'a list of choices, a range such as {"low": 1e-5, "high": 1e-2, "log": True}, or a function of optuna\'s trial'
_KEYS = ("low", "high", "log", "step")
_MOST_POINTS = 100_000


class _Dimension(NamedTuple):
    """One parameter: what suggests a value to a trial of optuna, its description, and all values that can be listed."""

    suggest: Callable[[Any], Any]
    description: Any
    values: list[Any] | None


class Space:
    """The parameters of a search by name: a list, a dict or a function for each; see `omnitrain.search`.

    >>> Space({"width": [8, 32], "depth": {"low": 1, "high": 3}}).points()[:2]
    [{'width': 8, 'depth': 1}, {'width': 8, 'depth': 2}]
    """

    def __init__(self, space: Mapping[str, Any]) -> None:
        if not isinstance(space, Mapping) or not space:
            raise ConfigError(f"`space` must be a dict with {_FORMS} for each parameter, got {space!r}.")
        for name in space:
            if not isinstance(name, str) or not name:
                raise ConfigError(f"`space` has the key {name!r}. Its keys must be the names of parameters.")
        self._dimensions = {name: _dimension(name, dimension) for name, dimension in space.items()}

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Return the values of a trial of optuna, which are always the same for the same trial."""
        return {name: dimension.suggest(trial) for name, dimension in self._dimensions.items()}

    def describe(self) -> dict[str, Any]:
        """Return the descriptions of the parameters, as JSON types."""
        return {name: dimension.description for name, dimension in self._dimensions.items()}

    def points(self) -> list[dict[str, Any]]:
        """Return all combinations, which must be finite; the values of the last parameter change first."""
        values: list[list[Any]] = []
        for name, dimension in self._dimensions.items():
            if dimension.values is None:
                raise ConfigError(
                    f"sampler='grid' tries all values, and those of space[{name!r}] cannot be listed: "
                    f'{dimension.description!r}. Pass a list, or a range with a "step".'
                )
            values.append(dimension.values)
        if (size := math.prod(map(len, values))) > _MOST_POINTS:
            raise ConfigError(f"sampler='grid' has {size} combinations. Give fewer values, or use sampler='tpe'.")
        return [dict(zip(self._dimensions, point, strict=True)) for point in itertools.product(*values)]


def _dimension(name: str, values: Any) -> _Dimension:
    if isinstance(values, list):
        return _choices(name, values)
    if isinstance(values, Mapping):
        return _range(name, values)
    if callable(values):
        return _Dimension(values, describe(values), None)
    hint = ""
    if isinstance(values, tuple) and len(values) == 2:
        hint = (
            f' Write {list(values)!r} for two choices, or {{"low": {values[0]!r}, "high": {values[1]!r}}} for a range.'
        )
    elif values is None or isinstance(values, (str, int, float)):
        hint = f" Pass a constant in `make_trainer`, or write [{values!r}]."
    raise ConfigError(f"space[{name!r}] must be {_FORMS}, got {values!r}.{hint}")


def _choices(name: str, values: list[Any]) -> _Dimension:
    if not values:
        raise ConfigError(f"space[{name!r}] is an empty list. Give at least one choice.")
    for number, value in enumerate(values):
        if not (value is None or isinstance(value, (bool, int, float, str))) or value != value:
            raise ConfigError(
                f"space[{name!r}] has the choice {value!r}. A choice must be a number, a string, True, False or None: "
                "choose other objects by a string, and create them in `make_trainer`."
            )
        if value in values[:number]:
            raise ConfigError(f"space[{name!r}] has the choice {value!r} twice. Leave one out.")
    choices = list(values)
    return _Dimension(lambda trial: trial.suggest_categorical(name, choices), choices, choices)


def _range(name: str, options: Mapping[str, Any]) -> _Dimension:
    label = f"space[{name!r}]"
    for key in options:
        if key not in _KEYS:
            known = ", ".join(map(repr, _KEYS))
            raise ConfigError(f"{label} has the key {key!r}; a range has {known}.{did_you_mean(str(key), _KEYS)}")
    for key in ("low", "high"):
        check_number(f"{label}[{key!r}]", options.get(key))
    low, high, log, step = options["low"], options["high"], options.get("log", False), options.get("step")
    if not low < high:
        raise ConfigError(f"{label} has low={low!r} and high={high!r}. 'low' must be below 'high'.")
    if not isinstance(log, bool):
        raise ConfigError(f"{label} has log={log!r}. It must be True or False.")
    if log and step is not None:
        raise ConfigError(f"{label} has both 'log' and 'step', which exclude each other. Leave one out.")
    if log and low <= 0:
        raise ConfigError(f"{label} has log=True and low={low!r}. A logarithmic range begins above 0.")
    if step is not None:
        check_number(f"{label}['step']", step, above=0, most=high - low)
    is_integer = all(isinstance(value, int) for value in (low, high, *([] if step is None else [step])))
    if is_integer:
        step = 1 if step is None else step
        high -= (high - low) % step  # optuna would do the same, with a warning
        values = None if log else list(range(low, high + 1, step)) if (high - low) // step < _MOST_POINTS else None
        return _Dimension(lambda trial: trial.suggest_int(name, low, high, step=step, log=log), dict(options), values)
    if step is None:
        return _Dimension(lambda trial: trial.suggest_float(name, low, high, log=log), dict(options), None)
    start, increment = Decimal(str(low)), Decimal(str(step))  # as floats, 3 * 0.3 is less than 0.9
    count = int((Decimal(str(high)) - start) // increment)
    high = float(start + count * increment)
    values = [float(start + index * increment) for index in range(count + 1)] if count < _MOST_POINTS else None
    return _Dimension(lambda trial: trial.suggest_float(name, low, high, step=step), dict(options), values)
