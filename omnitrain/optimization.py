"""Optimizer and schedule, from `optimizer`, `learning_rate`, `lr_scheduler` and `warmup_steps`."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from omnitrain.errors import ConfigError, MissingExtraError, did_you_mean
from omnitrain.settings import DEFAULTS

__all__ = [
    "SCHEDULES",
    "TRANSFORMERS_SCHEDULES",
    "build_optimizer",
    "build_scheduler",
    "check_optimizers",
    "follows_evaluations",
    "fused_adamw",
    "import_class",
    "optimizer_class",
    "optimizers_among",
]


def import_class(path: str, wanted: type, name: str) -> Any:
    """Return the class at a dotted path such as "torch.optim.SGD", without calling anything in it.

    Importing a module runs it, so only packages of optimizers are imported; others must be imported by the program.

    Args:
        path: The path.
        wanted: The required base class.
        name: The argument with this path.

    Raises:
        ConfigError: If it is not such a class, or from a package that the program has not imported.
    """
    module, _, attribute = path.rpartition(".")
    package = module.partition(".")[0]
    if package not in _PACKAGES and package not in sys.modules:
        raise ConfigError(
            f"`{name}={path[:200]!r}` is in no package that is imported. Import {package!r} before, or pass the class."
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"`{name}={path[:200]!r}` cannot be imported: {error}. Give a dotted path such as 'torch.optim.SGD'."
        ) from error
    if not isinstance(found, type) or not issubclass(found, wanted):
        raise ConfigError(
            f"`{name}={path[:200]!r}` is not a subclass of {wanted.__module__}.{wanted.__name__}. Give the path "
            "of one, or pass a function itself."
        )
    return found


_PACKAGES = ("torch", "transformers", "bitsandbytes", "torchao", "torch_optimizer", "pytorch_optimizer", "timm", "apex")
"""Packages of optimizers and schedules, which may be imported for a path."""


def optimizer_class(spec: str) -> Any:
    """Return the optimizer for a short name ("adamw", "SGD") or a dotted path.

    Raises:
        ConfigError: If there is no such optimizer.
    """
    if "." in spec:
        return import_class(spec, torch.optim.Optimizer, "optimizer")
    named = {name.lower(): value for name, value in vars(torch.optim).items() if isinstance(value, type)}
    named = {name: value for name, value in named.items() if issubclass(value, torch.optim.Optimizer)}
    named.pop("optimizer", None)
    found = named.get(spec.lower().replace("_", "").replace("-", ""))
    if found is None:
        raise ConfigError(
            f"`optimizer` must be one of {', '.join(map(repr, sorted(named)))}, a dotted path, an optimizer, a class "
            f"or a callable of the parameters, got {spec[:200]!r}.{did_you_mean(spec.lower(), named)}"
        )
    return found


def build_optimizer(
    spec: torch.optim.Optimizer | str | Callable[..., Any] | None,
    model: nn.Module,
    learning_rate: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Return the optimizer for `spec`, over the parameters of `model` that require gradients.

    A class, its dotted path or short name gets `lr` and `weight_decay` if it takes them. Any other callable gets only
    the parameters. None is AdamW, fused if devices and dtypes allow it.

    Raises:
        ConfigError: If nothing is trainable, the path leads nowhere, or an instance has none of the model's parameters.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError("`model` has no parameter that requires a gradient, so there is nothing to train.")
    if spec is None:
        return fused_adamw(trainable, learning_rate, weight_decay)
    if hasattr(spec, "param_groups"):
        optimizer: Any = spec
    else:
        factory: Any = optimizer_class(spec) if isinstance(spec, str) else spec
        is_other_class = isinstance(factory, type) and not callable(getattr(factory, "step", None))
        if not callable(factory) or is_other_class or isinstance(factory, nn.Module):
            raise ConfigError(
                "`optimizer` must be an optimizer, its class, a name, a dotted path or a callable of the parameters, "
                f"got {spec!r:.200}."
            )
        options: dict[str, Any] = {}
        if inspect.isclass(factory):
            taken = inspect.signature(factory).parameters
            wanted = {"lr": learning_rate, "weight_decay": weight_decay}
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
            options = {key: value for key, value in wanted.items() if key in taken or (takes_any and value)}
            given = {"lr": ("learning_rate", DEFAULTS["learning_rate"]), "weight_decay": ("weight_decay", 0.0)}
            for key, (name, default) in given.items():
                if wanted[key] != default and key not in options:
                    raise ConfigError(
                        f"`{name}={wanted[key]}` has no effect: {factory.__name__} takes no argument {key!r}. Leave "
                        "it out, or pass a callable of the parameters."
                    )
        optimizer = factory(trainable, **options)  # type: ignore[call-arg]
    _check_optimizer(optimizer, model)
    return optimizer


def fused_adamw(parameters: Iterable[nn.Parameter], learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """Return fused AdamW if PyTorch supports it for these parameters, and ordinary AdamW otherwise."""
    parameters = list(parameters)
    # PyTorch checks devices and dtypes only in the first step, where it raises.
    fused = all(one.is_floating_point() and one.device.type in _FUSED_DEVICES for one in parameters)
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay, fused=fused or None)


_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def _check_optimizer(optimizer: Any, model: nn.Module) -> None:
    if not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            f"`optimizer` must give an optimizer when called with the parameters, got {optimizer!r}. "
            "Return the optimizer from it."
        )
    own = {id(parameter) for parameter in model.parameters()}
    given = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if not any(identity in own for identity in given):
        raise ConfigError(
            f"`optimizer` ({type(optimizer).__name__}) holds none of the model's parameters, so the model would not "
            "change. Build it from `model.parameters()` of the model that you pass."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"`optimizer` ({type(optimizer).__name__}) needs a closure in every step, which omnitrain does not give. "
            "Use an optimizer whose step() works without one, such as AdamW or SGD."
        )


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _constant(progress: float) -> float:
    return 1.0


SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "cosine": _cosine,
}
"""Factor of the learning rate as a function of the fraction of steps after warm-up, by transformers' names."""

TRANSFORMERS_SCHEDULES = ("cosine_with_restarts", "inverse_sqrt", "polynomial")
"""Further schedules, which transformers builds if it is installed; its others need more than a name."""


def build_scheduler(
    spec: Any,
    optimizer: torch.optim.Optimizer,
    *,
    warmup_steps: int,
    total_steps: int | None,
) -> Any:
    """Return the schedule for `spec`: an instance, a name from transformers, or a callable of the optimizer.

    Raises:
        ConfigError: If the name is unknown, the length of the run is needed but unknown, the instance belongs
            to another optimizer, or `warmup_steps` would have no effect.
    """
    if isinstance(spec, str) and "." in spec:
        spec = import_class(spec, LRScheduler, "lr_scheduler")
    if spec is None or isinstance(spec, str):
        name = spec or ("constant_with_warmup" if warmup_steps else None)
        return None if name is None else _named_schedule(name, optimizer, warmup_steps, total_steps)
    if warmup_steps:
        raise ConfigError(
            f"`warmup_steps={warmup_steps}` has no effect on a `lr_scheduler` that is an instance or a callable. "
            "Use a name such as lr_scheduler='cosine', or put the warm-up into the schedule itself."
        )
    scheduler = spec
    if isinstance(spec, type) or not callable(getattr(spec, "step", None)):
        is_other_class = isinstance(spec, type) and not callable(getattr(spec, "step", None))
        if not callable(spec) or is_other_class or isinstance(spec, nn.Module):
            raise ConfigError(
                f"`lr_scheduler` must be a scheduler, a name or a callable of the optimizer, got {spec!r:.200}."
            )
        try:
            scheduler = spec(optimizer)
        except TypeError as error:
            if not isinstance(spec, type):
                raise
            raise ConfigError(
                f"`lr_scheduler={spec.__name__}` needs more than the optimizer: {error}. Pass a function: "
                f"lr_scheduler=lambda optimizer: {spec.__name__}(optimizer, ...)."
            ) from error
        if not callable(getattr(scheduler, "step", None)):
            raise ConfigError(
                f"`lr_scheduler` must give a scheduler when called with the optimizer, got {scheduler!r:.200}. "
                "Return the scheduler from it."
            )
    owner = getattr(scheduler, "optimizer", optimizer)
    if owner is not optimizer:
        raise ConfigError(
            "`lr_scheduler` belongs to another optimizer than the one that trains, so it would change nothing. "
            "Pass that optimizer as `optimizer=` too, or pass a callable: lr_scheduler=lambda optimizer: ..."
        )
    return scheduler


def follows_evaluations(scheduler: Any) -> bool:
    """Return whether a schedule's `step` takes a metric, as in ReduceLROnPlateau."""
    if scheduler is None:
        return False
    taken = inspect.signature(scheduler.step).parameters.get("metrics")
    return taken is not None and taken.default is taken.empty


def _named_schedule(name: str, optimizer: torch.optim.Optimizer, warmup: int, total: int | None) -> LRScheduler:
    known = [*SCHEDULES, *TRANSFORMERS_SCHEDULES]
    if name not in known:
        raise ConfigError(
            f"`lr_scheduler` must be one of {', '.join(map(repr, known))}, a scheduler or a callable of the optimizer, "
            f"got {name[:200]!r}.{did_you_mean(name, known)}"
        )
    shape = SCHEDULES.get(name)
    if total is None and shape is not _constant and name != "inverse_sqrt":
        raise ConfigError(
            f"`lr_scheduler={name!r}` needs the number of steps, which is unknown: the data has no length. "
            "Set `max_steps`."
        )
    if total is not None and warmup >= total:
        raise ConfigError(f"`warmup_steps={warmup}` leaves nothing of the run's {total} steps. Make it smaller.")
    if shape is None:
        try:
            from transformers import get_scheduler
        except ImportError:
            raise MissingExtraError(f"lr_scheduler={name!r}", "transformers", "hf") from None
        return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    decay = (total or 0) - warmup

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        return shape(min((step - warmup) / decay, 1.0)) if decay > 0 else 1.0

    return LambdaLR(optimizer, factor)


def check_optimizers(optimizers: Any, takes_several: bool) -> None:
    """Raise ConfigError unless these are optimizers by name that can be saved in checkpoints.

    Args:
        optimizers: The value assigned to `self.optimizers`.
        takes_several: Whether the backend supports several.
    """
    if not isinstance(optimizers, Mapping) or not optimizers:
        raise ConfigError(f"`optimizers` must be a dict of optimizers by name, got {optimizers!r}.")
    for name, optimizer in optimizers.items():
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"`optimizers[{name!r}]` must be an instance of torch.optim.Optimizer, got {optimizer!r}."
            )
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name) or name == "state":
            raise ConfigError(
                f"`optimizers` cannot name one {name!r}, which names its file in a checkpoint. Use letters, digits, "
                "'_' and '-' (and not 'state')."
            )
    if not takes_several:
        raise ConfigError(
            "`optimizers` cannot be used with sharded weights (FSDP, ZeRO), which have one optimizer. Train under DDP "
            "or on one process."
        )


def optimizers_among(attributes: Mapping[str, Any]) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers among an object's attributes, by attribute; those in a list or dict also by key."""
    found: dict[str, torch.optim.Optimizer] = {}
    for name, value in attributes.items():
        entries = {name: value}
        if isinstance(value, dict):
            entries = {f"{name}[{key!r}]": one for key, one in value.items()}
        elif isinstance(value, (list, tuple)):
            entries = {f"{name}[{i}]": one for i, one in enumerate(value)}
        found |= {key: one for key, one in entries.items() if isinstance(one, torch.optim.Optimizer)}
    return found
