"""Optimizer and schedule, from `optimizer`, `learning_rate`, `lr_scheduler` and `warmup_steps`.

What the rate is at a place of a run is in `schedules.py`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from omnitrain.arguments import DEFAULTS
from omnitrain.compute.device_runtime import device_runtime
from omnitrain.core.errors import ConfigError, MissingExtraError, OmnitrainError, did_you_mean
from omnitrain.core.progress import Progress
from omnitrain.optim.muon import Muon, has_fused_kernel
from omnitrain.optim.optimizer_kwargs import IMPLEMENTATION, check_optimizer_kwargs, make_optimizer
from omnitrain.optim.schedules import (
    NAMED,
    RunLength,
    RunPosition,
    Schedule,
    make_schedule,
    named_schedule,
    warmup_length,
)

logger: logging.Logger = logging.getLogger("omnitrain")


def import_class(path: str, expected: type | tuple[type, ...], name: str) -> Any:
    """Return the subclass of `expected` at a dotted path such as "torch.optim.SGD", without calling anything in it.

    Importing a module runs it, so only packages of optimizers are imported; others must be imported by the program.

    Raises:
        ConfigError: If it is not such a class, or from a package that the program has not imported.
    """
    module, _, attribute = path.rpartition(".")
    package = module.partition(".")[0]
    if package not in PACKAGES and package not in sys.modules:
        raise ConfigError(
            f"`{name}={path[:200]!r}` is in no package that is imported. Import {package!r} before, or pass the class."
        )
    try:
        value = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"`{name}={path[:200]!r}` cannot be imported: {error}. Give a dotted path such as 'torch.optim.SGD'."
        ) from error
    if not isinstance(value, type) or not issubclass(value, expected):
        kinds = expected if isinstance(expected, tuple) else (expected,)
        expected_names = " or ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
        raise ConfigError(
            f"`{name}={path[:200]!r}` is not a subclass of {expected_names}. Give the path of one, or pass a "
            "function itself."
        )
    return value


# Packages of optimizers and schedules, which may be imported for a path.
PACKAGES = (
    "omnitrain", "torch", "transformers", "bitsandbytes", "torchao", "torch_optimizer", "pytorch_optimizer", "timm",
    "apex", "lion_pytorch",
)  # fmt: skip

MUON = "muon"
# Optimizers outside of torch.optim by short names, which are those of transformers. The first installed one counts.
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "lion": ("lion_pytorch.Lion", "timm.optim.Lion", "pytorch_optimizer.Lion", "bitsandbytes.optim.Lion"),
    "adamw_torch": ("torch.optim.AdamW",),
    "adamw_torch_8bit": ("torchao.optim.AdamW8bit",),
    "adamw_torch_4bit": ("torchao.optim.AdamW4bit",),
    **{
        name: (f"bitsandbytes.optim.{kind}",)
        for name, kind in {
            "adamw_8bit": "AdamW8bit", "adamw_bnb_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit",
            "paged_adamw_32bit": "PagedAdamW32bit", "adam_8bit": "Adam8bit", "sgd_8bit": "SGD8bit",
            "rmsprop_bnb": "RMSprop", "rmsprop_bnb_8bit": "RMSprop8bit", "lion_8bit": "Lion8bit",
            "lion_32bit": "Lion32bit", "paged_lion_8bit": "PagedLion8bit", "paged_lion_32bit": "PagedLion32bit",
            "ademamix": "AdEMAMix", "ademamix_8bit": "AdEMAMix8bit",
        }.items()
    },
}  # fmt: skip


# Those with a kernel for a GPU that does the whole update.
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def optimizer_class(spec: str) -> Any:
    """Return the optimizer for a short name ("adamw", "SGD", "lion") or a dotted path.

    Raises:
        ConfigError: If there is no such optimizer.
        MissingExtraError: If its package is not installed.
    """
    if "." in spec:
        return import_class(spec, torch.optim.Optimizer, "optimizer")
    classes = [value for value in vars(torch.optim).values() if isinstance(value, type)]
    by_name = {kind.__name__.lower(): kind for kind in classes if issubclass(kind, torch.optim.Optimizer)}
    del by_name["optimizer"]
    by_name.pop(MUON, None)  # which trains only matrices: see `build_optimizer`
    name = _plain(spec)
    if name in by_name:
        return by_name[name]
    places = {_plain(key): paths for key, paths in _ELSEWHERE.items()}.get(name)
    if places is None:
        known = sorted([*by_name, MUON, "adamw_torch_fused", *_ELSEWHERE])
        raise ConfigError(
            f"`optimizer` must be one of {', '.join(map(repr, known))}, a dotted path, an optimizer, a class or a "
            f"callable of the parameters, got {spec[:200]!r}.{did_you_mean(spec.lower(), known)}"
        )
    for path in places:
        package = path.partition(".")[0]
        if package in sys.modules or importlib.util.find_spec(package) is not None:
            return import_class(path, torch.optim.Optimizer, "optimizer")
    raise MissingExtraError(f"optimizer={spec!r}", places[0].partition(".")[0])


def _plain(name: str) -> str:
    """Return a name as it is looked up: case, "_" and "-" do not count."""
    return name.lower().replace("_", "").replace("-", "")


def default_rate(spec: Any) -> float | None:
    """Return the default learning rate of an optimizer's class, which would hardly move at 2e-5.

    It is None for AdamW of any kind, Muon, an optimizer that exists already, and a function.

    >>> default_rate("sgd"), default_rate("adamw"), default_rate(None)
    (0.001, None, None)
    """
    if not isinstance(spec, (str, type)) or (isinstance(spec, str) and _plain(spec) in (MUON, "adamwtorchfused")):
        return None
    try:
        kind = optimizer_class(spec) if isinstance(spec, str) else spec
        rate = inspect.signature(kind).parameters["lr"].default
    except (OmnitrainError, ImportError, KeyError, TypeError, ValueError):
        return None  # which is refused elsewhere, or has no rate
    is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
    return float(rate) if is_number and "adamw" not in kind.__name__.lower() else None


def build_optimizer(
    spec: torch.optim.Optimizer | str | Callable[..., Any] | None,
    model: nn.Module,
    learning_rate: float,
    weight_decay: float,
    options: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer for `spec`, over the parameters of `model` that require gradients.

    A class, its dotted path or short name gets `lr` and `weight_decay` if it takes them, and the `options`. Any other
    callable gets only the parameters. None is AdamW, fused if devices and dtypes allow it, as "adam", "adamw" and
    "sgd" are on a GPU; "muon" is `muon.Muon`.

    Raises:
        ConfigError: If nothing is trainable, the path leads nowhere, an instance has none of the model's parameters, or
            the class takes no such options.
    """
    options = dict(options or {})
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError("`model` has no parameter that requires a gradient, so there is nothing to train.")
    if options.get("capturable") and all(parameter.device.type == "cpu" for parameter in trainable):
        raise ConfigError(
            "`optimizer_kwargs` has capturable=True, which is for CUDA graphs, and the model is on a CPU. Leave it out."
        )
    if spec is None or (isinstance(spec, str) and _plain(spec) == "adamwtorchfused"):
        fused = {} if IMPLEMENTATION & options.keys() else {"fused": has_fused_kernel(trainable) or None}
        rates = {"lr": learning_rate, "weight_decay": weight_decay}
        check_optimizer_kwargs(options, torch.optim.AdamW)
        return make_optimizer(torch.optim.AdamW, trainable, rates | fused, options)
    if isinstance(spec, str) and _plain(spec) == MUON:
        return Muon.of(model, learning_rate, weight_decay, options)
    if options and not isinstance(spec, (str, type)):
        raise ConfigError(
            f"`optimizer_kwargs={options!r:.200}` has no effect on an `optimizer` that is neither name nor class. Pass "
            "a name, such as optimizer='sgd', or set the options where it is made."
        )
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
        rates = {}
        if inspect.isclass(factory):
            parameters = inspect.signature(factory).parameters
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            values = {"lr": ("learning_rate", learning_rate), "weight_decay": ("weight_decay", weight_decay)}
            for key, (name, value) in values.items():
                if key in parameters or (takes_any and value):
                    rates[key] = value
                elif value != DEFAULTS[name]:
                    raise ConfigError(
                        f"`{name}={value}` has no effect: {factory.__name__} takes no argument {key!r}. Leave it out, "
                        "or pass a callable of the parameters."
                    )
        if isinstance(spec, str) and factory in _FUSED and not IMPLEMENTATION & options.keys():
            # on a GPU it is quicker, and skips a bad update itself, so that the host need not wait in each step
            is_ahead = all(device_runtime(parameter.device).has_streams for parameter in trainable)
            is_sparse = any(map(has_sparse_gradients, model.modules()))  # which fused kernels do not train
            rates |= {"fused": True} if is_ahead and not is_sparse and has_fused_kernel(trainable) else {}
        check_optimizer_kwargs(options, factory)
        optimizer = make_optimizer(factory, trainable, rates, options)
    if not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            f"`optimizer` must return an optimizer when called with the parameters, got {optimizer!r}. "
            "Return the optimizer from it."
        )
    optimizer_parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if optimizer_parameters.isdisjoint(map(id, model.parameters())):
        raise ConfigError(
            f"`optimizer` ({type(optimizer).__name__}) holds none of the model's parameters, so the model would not "
            "change. Build it from `model.parameters()` of the model that you pass."
        )
    return optimizer


def has_sparse_gradients(module: nn.Module) -> bool:
    """Return whether a module is an embedding that asks for sparse gradients, as DDP asks too."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def needs_closure(optimizer: Any) -> bool:
    """Return whether an optimizer's step needs a closure that computes loss and gradients again, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def has_modes(optimizer: Any) -> bool:
    """Return whether an optimizer has a mode for training and one for evaluations, as schedule-free ones do."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def try_step(kind: Any, group: Mapping[str, Any], parameter: nn.Parameter) -> Mapping[str, Any]:
    """Have a new optimizer of a class, with the options of a group, step on a small parameter with a gradient.

    Its state for the parameter is returned; nothing if it needs a closure, or is not PyTorch's own, as the steps of
    others may have side effects.

    Raises:
        RuntimeError: What its step raises, or ValueError.
    """
    if not inspect.unwrap(kind.step).__module__.startswith("torch.optim.") or needs_closure(kind):
        return {}
    try:
        optimizer = kind([{**group, "capturable": False, "params": [parameter]}])
    except TypeError:  # made with arguments of its own
        return {}
    optimizer.step()
    return optimizer.state[parameter]


# Names that transformers itself makes if it is installed, with `lr_scheduler_kwargs`.
BY_TRANSFORMERS = ("cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy")

# What `lr_scheduler` may be called.
SCHEDULE_NAMES = (*NAMED, *BY_TRANSFORMERS, "reduce_lr_on_plateau")


class ScheduleLR(LambdaLR):
    """Sets the rates of an optimizer by a schedule of the steps or of the progress of the run.

    Attributes:
        schedule: The factor of the rates.
        follows: Whether the rate depends on more than the steps, so that `move` needs the progress.
        progress: Where the run was when the rates were set; None where steps tell them.
        units: What lengths of the schedule and the run are counted in.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule, run_length: RunLength) -> None:
        needs_end = any(length.unit == "dur" for length in schedule.lengths())
        run_length = run_length if needs_end else replace(run_length, ends=())
        self.schedule: Schedule = schedule
        self.run_length: RunLength = run_length
        self.follows: bool = run_length.follows(schedule)
        self.progress: Progress | None = Progress() if self.follows else None
        self.units: frozenset[str] = run_length.units(schedule)
        self._needs_rate = any(part.min_lr is not None for part in schedule.parts)
        super().__init__(optimizer, [self._factor_of(number) for number in range(len(optimizer.param_groups))])

    def _factor_of(self, number: int) -> Callable[[int], float]:
        def factor(count: int) -> float:
            # a tensor is the rate of a compiled step
            rate = float(self.base_lrs[number]) if self._needs_rate else 1.0
            return self.schedule.factor(RunPosition(self.run_length, count, self.progress), rate)

        return factor

    def move(self, progress: Progress, applied: bool) -> None:
        """Set the rates to the progress of the run; `applied` tells whether an update was made."""
        self.progress = copy.copy(progress)
        if applied:
            self.step()
        else:  # the data went on all the same
            self.set_rates()

    def set_rates(self) -> None:
        """Update the rates to the current progress, without counting a step."""
        for group, rate, factor in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True):
            rate = rate * factor(self.last_epoch)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        excluded = ("schedule", "run_length", "follows", "progress", "units", "_needs_rate")
        return {key: value for key, value in super().state_dict().items() if key not in excluded}


def build_scheduler(
    spec: Any,
    optimizer: torch.optim.Optimizer,
    *,
    run_length: RunLength,
    warmup_steps: Any = 0,
    options: Mapping[str, Any] | None = None,
    mode: str = "min",
) -> Any:
    """Return the schedule that `spec` names.

    Args:
        spec: An instance, a `Schedule`, a name, the path of a class, or a callable of the optimizer.
        optimizer: Whose rates it sets.
        run_length: The length of the run.
        warmup_steps: The warm-up of a schedule by name.
        options: Arguments of a schedule by name, path or class, besides the optimizer.
        mode: "min" or "max": the better direction of what evaluations are judged by.

    Raises:
        ConfigError: If the name is unknown, the length of the run is needed but unknown, the instance belongs
            to another optimizer, or `warmup_steps` or `options` would have no effect.
    """
    if isinstance(spec, str) and "." in spec:
        spec = import_class(spec, (LRScheduler, Schedule), "lr_scheduler")
    if isinstance(spec, type) and issubclass(spec, Schedule):
        spec, options = make_schedule(spec, spec.__name__, options or {}), None
    is_named = isinstance(spec, str | None)
    if warmup_steps and not is_named:
        instead = "Pass it to the schedule: warmup=..." if isinstance(spec, Schedule) else (
            "Use a name such as lr_scheduler='cosine', or put the warm-up into the schedule itself."
        )  # fmt: skip
        raise ConfigError(
            f"`warmup_steps={warmup_steps}` has no effect on a `lr_scheduler` that is an instance or a callable. "
            f"{instead}"
        )
    if options and (spec is None or not (is_named or isinstance(spec, type))):
        raise ConfigError(
            f"`lr_scheduler_kwargs={dict(options)!r}` has no effect on a `lr_scheduler` that is neither name nor "
            "class. Pass a name, such as lr_scheduler='cosine'."
        )
    name = repr(spec)
    if is_named:
        spec = spec or ("constant_with_warmup" if warmup_steps else None)
        if spec is None:
            return None
        if spec in BY_TRANSFORMERS or spec == "reduce_lr_on_plateau":
            return _of_transformers(spec, optimizer, warmup_steps, run_length, options or {}, mode)
        spec = named_schedule(spec, options, warmup_length(warmup_steps))
    if isinstance(spec, Schedule):
        run_length.check(spec, name)
        for length in run_length.unreached(spec):
            logger.warning(
                "'%s' of `lr_scheduler=%s` comes after the end of the run, and is not reached.", length, name
            )
        _check_least(spec, optimizer)
        return ScheduleLR(optimizer, spec, run_length)
    return _scheduler_of(spec, optimizer, options or {})


def _check_least(schedule: Schedule, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a least rate above the rate of a group that trains."""
    for part in schedule.parts:
        for group in optimizer.param_groups:
            rate = float(group.get("initial_lr", group["lr"]))
            if part.min_lr is not None and 0 < rate <= part.min_lr:
                raise ConfigError(
                    f"`{type(part).__name__}`: its `min_lr={part.min_lr:g}` is not below the learning rate, {rate:g} "
                    "in one of the optimizer's groups. Make it smaller, or give a share of each: min_lr_rate=0.1."
                )


def _of_transformers(
    name: str, optimizer: Any, warmup: Any, run_length: RunLength, options: Mapping[str, Any], mode: str
) -> Any:
    """Return a schedule that transformers or torch makes."""
    if name in ("reduce_lr_on_plateau", "greedy") and warmup:
        raise ConfigError(f"`warmup_steps={warmup}` has no effect on `lr_scheduler={name!r}`. Leave it out.")
    if name == "reduce_lr_on_plateau":
        return _scheduler_of(ReduceLROnPlateau, optimizer, {"mode": mode, **options})
    try:
        from transformers import get_scheduler
    except ImportError:
        raise MissingExtraError(f"lr_scheduler={name!r}", "transformers", "hf") from None
    steps = 0
    if name == "greedy":
        options = {"mode": mode, **options}
    elif run_length.end is None:
        raise ConfigError(
            f"`lr_scheduler={name!r}` is made by transformers for a number of steps, which is unknown here. Set "
            "`max_steps`, or use a schedule that follows tokens, samples and time: 'wsd' or 'cosine' with "
            "lr_scheduler_kwargs={'min_lr': ...}."
        )
    else:
        steps = run_length.steps_of(warmup)
    try:
        return get_scheduler(
            name, optimizer, num_warmup_steps=steps, num_training_steps=run_length.end,
            scheduler_specific_kwargs=dict(options),
        )  # type: ignore[call-arg]  # fmt: skip
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"`lr_scheduler={name!r}` with `lr_scheduler_kwargs={dict(options)!r}`: transformers rejects it: {error}"
        ) from error


def _scheduler_of(spec: Any, optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> Any:
    """Return an instance of torch's kind: as it was given, of a class, or what a callable makes."""
    scheduler, has_step = spec, callable(getattr(spec, "step", None))
    if isinstance(spec, type) or not has_step:
        if not callable(spec) or (isinstance(spec, type) and not has_step) or isinstance(spec, nn.Module):
            raise ConfigError(
                f"`lr_scheduler` must be a scheduler, a name or a callable of the optimizer, got {spec!r:.200}."
            )
        try:
            scheduler = spec(optimizer, **options)
        except TypeError as error:
            if not isinstance(spec, type):
                raise
            raise ConfigError(
                f"`lr_scheduler={spec.__name__}` needs arguments besides the optimizer: {error}. Pass them as "
                f"`lr_scheduler_kwargs`, or a function: lr_scheduler=lambda optimizer: {spec.__name__}(optimizer, ...)."
            ) from error
        if not callable(getattr(scheduler, "step", None)):
            raise ConfigError(
                f"`lr_scheduler` must return a scheduler when called with the optimizer, got {scheduler!r:.200}. "
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
    parameter = None if scheduler is None else inspect.signature(scheduler.step).parameters.get("metrics")
    return parameter is not None and parameter.default is parameter.empty


def check_optimizers(optimizers: Any, takes_several: bool) -> None:
    """Raise ConfigError unless `self.optimizers` are optimizers by name that the backend and checkpoints support."""
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
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name, value in attributes.items():
        if isinstance(value, torch.optim.Optimizer):
            optimizers[name] = value
        elif isinstance(value, (dict, list, tuple)):
            for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(entry, torch.optim.Optimizer):
                    optimizers[f"{name}[{key!r}]"] = entry
    return optimizers
