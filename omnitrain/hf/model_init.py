"""Model creation by `model_init`, for each fresh run and each trial."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from omnitrain.compute.random_state import isolated_rng
from omnitrain.core.errors import ConfigError


def check_model_init(model: Any, model_init: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError unless one of model and `model_init` is passed, with arguments that fit every new model."""
    if (model is None) == (model_init is None):
        problem = "neither is given" if model is None else "both are given"
        raise ConfigError(f"HFTrainer needs `model` or `model_init`, and {problem}. Pass one of them.")
    if model_init is None:
        return
    if not callable(model_init) or isinstance(model_init, nn.Module):
        raise ConfigError(f"`model_init` must be a function that returns a model, got {type(model_init).__name__}.")
    if hasattr(kwargs.get("optimizer"), "param_groups"):
        raise ConfigError(
            "`optimizer` belongs to one model, but `model_init` makes a new one for each run. Pass the optimizer's "
            "class, or a function of the parameters."
        )
    if kwargs.get("unit") is not None:
        raise ConfigError(
            "`unit` has its own model, but `model_init` makes a new one for each run. Pass `model` instead."
        )


def create_model(model_init: Callable[..., Any], trial: Any, seed: int, device: torch.device) -> nn.Module:
    """Return a new model, whose weights depend only on the seed; the program's random state stays unchanged.

    Raises:
        ConfigError: If `model_init` takes anything but a trial, or does not return a model.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(model_init)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.kind in positional]
    if len(parameters) > 1:
        names = ", ".join(parameter.name for parameter in parameters)
        raise ConfigError(f"`model_init` must take no argument, or one, the trial of a search. It takes {names}.")
    with isolated_rng(device, seed):
        model = model_init(*[trial][: len(parameters)])
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`model_init` must return an nn.Module, got {type(model).__name__}.")
    return model
