"""Options of an optimizer from `optimizer_kwargs`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

from omnitrain.core.errors import ConfigError, did_you_mean

IMPLEMENTATION = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Options of optimizers that choose an implementation; it may not exist elsewhere, so they are not restored."""
# Arguments of the trainer that set options of optimizers.
_ARGUMENTS = {"lr": "learning_rate", "weight_decay": "weight_decay"}


def check_optimizer_kwargs(options: Mapping[str, Any], *kinds: Any) -> None:
    """Check that each option is taken by at least one of the classes.

    Raises:
        ConfigError: If one is not, or has its own argument of the trainer.
    """
    for name in _ARGUMENTS.keys() & options.keys():
        raise ConfigError(f"`optimizer_kwargs` has {name!r}. Pass `{_ARGUMENTS[name]}={options[name]!r}` instead.")
    if not options:
        return
    parameters = [parameter for kind in kinds for parameter in inspect.signature(kind).parameters.values()]
    switches = {parameter.name for parameter in parameters if isinstance(parameter.default, bool)} | IMPLEMENTATION
    for name, value in options.items():
        is_switch = name in switches and not isinstance(value, bool) and value is not None
        if is_switch or (isinstance(value, float) and not math.isfinite(value)):
            expected = "True or False" if is_switch else "a finite number"
            raise ConfigError(f"`optimizer_kwargs[{name!r}]` must be {expected}, got {value!r}.")
    if options.get("differentiable"):
        raise ConfigError(
            "`optimizer_kwargs` has differentiable=True, for gradients through the update itself, of which a trainer "
            "takes none. Leave it out."
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = sorted({parameter.name for parameter in parameters} - {"params", *_ARGUMENTS})
    for name in options:
        if name not in known:
            owners = " and ".join(kind.__name__ for kind in kinds)
            raise ConfigError(
                f"`optimizer_kwargs` has {name!r}, which is no option of {owners}. Expected {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )


def make_optimizer(make: Any, parameters: Iterable[Any], rates: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Return `make(parameters, **rates, **options)`.

    Raises:
        ConfigError: If it rejects the options.
    """
    try:
        return make(parameters, **rates, **options)
    except Exception as error:
        if not options:
            raise
        raise ConfigError(
            f"`optimizer_kwargs={dict(options)!r:.200}`: {make.__name__} raises {type(error).__name__}: {error}."
        ) from error
