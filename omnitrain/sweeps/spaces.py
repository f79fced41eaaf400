"""What a search for hyperparameters may choose from: lists, ranges, and functions of optuna's trial. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from omnitrain.arguments import describe
from omnitrain.core.errors import ConfigError, did_you_mean

_FORMS = 'a list of choices, a range such as {"low": 1e-5, "high": 1e-2, "log": True}, or a function of optuna\'s trial'
_KEYS = ("low", "high", "log", "step")
_MOST_POINTS = 100_000


@dataclass(frozen=True, slots=True)
class _Dimension:
    """One parameter.

    Args:
        suggest: Returns a value for a trial of optuna.
        described: What it is, as JSON types.
        values: All its values; None if they cannot be listed.
    """

    suggest: Callable[[Any], Any]
    described: Any
    values: list[Any] | None


class Space:
    """The parameters of a search by name.

    Args:
        given: A list, a dict or a function for each name; see `omnitrain.search`.

    Raises:
        ConfigError: One of them cannot be searched; the message names it.

    >>> Space({"width": [8, 32], "depth": {"low": 1, "high": 3}}).points()[:2]
    [{'width': 8, 'depth': 1}, {'width': 8, 'depth': 2}]
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        if not isinstance(given, Mapping) or not given:
            raise ConfigError(f"`space` must be a dict with {_FORMS} for each parameter, got {given!r}.")
        for name in given:
            if not isinstance(name, str) or not name:
                raise ConfigError(f"`space` has the key {name!r}. Its keys must be the names of parameters.")
        self._dimensions = {name: _dimension(name, one) for name, one in given.items()}

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Return the values of a trial of optuna, which are always the same for the same trial."""
        return {name: one.suggest(trial) for name, one in self._dimensions.items()}

    def described(self) -> dict[str, Any]:
        """Return what the parameters are, as JSON types."""
        return {name: one.described for name, one in self._dimensions.items()}

    def points(self) -> list[dict[str, Any]]:
        """Return all combinations; the values of the last parameter change first.

        Raises:
            ConfigError: A parameter has values without number, or there are too many combinations.
        """
        values: list[list[Any]] = []
        for name, one in self._dimensions.items():
            if one.values is None:
                raise ConfigError(
                    f"sampler='grid' tries everything, and space[{name!r}] cannot be listed: {one.described!r}. Give a "
                    'list, or a range with a "step".'
                )
            values.append(one.values)
        if (size := math.prod(map(len, values))) > _MOST_POINTS:
            raise ConfigError(f"sampler='grid' has {size} combinations. Give fewer values, or use sampler='tpe'.")
        return [dict(zip(self._dimensions, point, strict=True)) for point in itertools.product(*values)]


def _dimension(name: str, given: Any) -> _Dimension:
    if isinstance(given, list):
        return _choices(name, given)
    if isinstance(given, Mapping):
        return _range(name, given)
    if callable(given):
        return _Dimension(given, describe(given), None)
    hint = ""
    if isinstance(given, tuple) and len(given) == 2:
        hint = f' Write {list(given)!r} for two choices, or {{"low": {given[0]!r}, "high": {given[1]!r}}} for a range.'
    elif given is None or isinstance(given, (str, int, float)):
        hint = f" A value that stays is for `make_trainer`, or write [{given!r}]."
    raise ConfigError(f"space[{name!r}] must be {_FORMS}, got {given!r}.{hint}")


def _choices(name: str, values: list[Any]) -> _Dimension:
    if not values:
        raise ConfigError(f"space[{name!r}] is an empty list. Give at least one choice.")
    for number, value in enumerate(values):
        if not (value is None or isinstance(value, (bool, int, float, str))) or value != value:
            raise ConfigError(
                f"space[{name!r}] has the choice {value!r}. A choice must be a number, a string, True, False or None: "
                "name other things by a string, and make them in `make_trainer`."
            )
        if value in values[:number]:
            raise ConfigError(f"space[{name!r}] has the choice {value!r} twice. Leave one out.")
    kept = list(values)
    return _Dimension(lambda trial: trial.suggest_categorical(name, kept), kept, kept)


def _range(name: str, given: Mapping[str, Any]) -> _Dimension:
    where = f"space[{name!r}]"
    for key in given:
        if key not in _KEYS:
            words = ", ".join(map(repr, _KEYS))
            raise ConfigError(f"{where} has the key {key!r}; a range has {words}.{did_you_mean(str(key), _KEYS)}")
    for key in ("low", "high"):
        if not _is_number(given.get(key)):
            raise ConfigError(f"{where} needs a finite number as {key!r}, got {given.get(key)!r}.")
    low, high, log, step = given["low"], given["high"], given.get("log", False), given.get("step")
    if not low < high:
        raise ConfigError(f"{where} has low={low!r} and high={high!r}. 'low' must be below 'high'.")
    if not isinstance(log, bool):
        raise ConfigError(f"{where} has log={log!r}. It must be True or False.")
    if log and step is not None:
        raise ConfigError(f"{where} has both 'log' and 'step', which exclude each other. Leave one out.")
    if log and low <= 0:
        raise ConfigError(f"{where} has log=True and low={low!r}. A range by the logarithm begins above 0.")
    if step is not None and not (_is_number(step) and 0 < step <= high - low):
        raise ConfigError(f"{where} has step={step!r}. It must be a positive number, at most high - low.")
    is_whole = all(isinstance(value, int) for value in (low, high, *([] if step is None else [step])))
    if is_whole:
        step = 1 if step is None else step
        high -= (high - low) % step  # optuna would do it, with a warning
        values = None if log else list(range(low, high + 1, step)) if (high - low) // step < _MOST_POINTS else None
        return _Dimension(lambda trial: trial.suggest_int(name, low, high, step=step, log=log), dict(given), values)
    if step is None:
        return _Dimension(lambda trial: trial.suggest_float(name, low, high, log=log), dict(given), None)
    first, apart = Decimal(str(low)), Decimal(str(step))  # as floats, 3 * 0.3 is less than 0.9
    count = int((Decimal(str(high)) - first) // apart)
    high = float(first + count * apart)
    values = [float(first + turn * apart) for turn in range(count + 1)] if count < _MOST_POINTS else None
    return _Dimension(lambda trial: trial.suggest_float(name, low, high, step=step), dict(given), values)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
