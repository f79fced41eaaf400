"""Argument validation: individual values and conflicting combinations. No torch here."""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast

from omnitrain.argument_aliases import advice
from omnitrain.config import overrides
from omnitrain.config.plain_yaml import FromEnvironment
from omnitrain.core.duration import Duration, Interval, Limits, Stages, check_stages, check_stages_reached
from omnitrain.core.errors import ConfigError, FixedSettingError, did_you_mean, unexpected_arguments
from omnitrain.core.events import Algorithm, Callback
from omnitrain.core.metric_format import to_python_scalar
from omnitrain.core.paths import is_address, local_path
from omnitrain.optim.schedules import Schedule, warmup_length

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler

    from omnitrain.distributed.ranks import Ranks

Constructor = TypeVar("Constructor", bound=Callable[..., None])

ScheduleName = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr",
    "inverse_sqrt", "polynomial", "step", "multistep", "exponential", "wsd", "cosine_warmup_with_min_lr",
    "warmup_stable_decay", "greedy", "reduce_lr_on_plateau",
]  # fmt: skip
"""Schedules that `lr_scheduler` knows by name; transformers makes those from the thirteenth to the fifteenth."""

PrecisionName = Literal["fp32", "fp16", "bf16", "fp8", "float32", "float16", "half", "bfloat16", "float8"]
"""The names for `autocast`."""


class NoExtraArguments(TypedDict):
    """The type of `**unknown`, without keys: a type checker finds misspelt arguments."""


def takes_arguments(constructor: Constructor) -> Constructor:
    """Have a constructor declare and document its arguments, while `_construct(arguments)` does the work.

    `_construct` is called with the arguments that the caller passed, by name, so it can tell them from defaults. Names
    that the constructor does not declare raise one TypeError with the nearest name for each.
    """
    signature = inspect.signature(constructor)
    known = [name for name in signature.parameters if name not in ("self", "unknown")]

    @functools.wraps(constructor)
    def declared(self: Any, *args: Any, **kwargs: Any) -> None:
        if unknown := {name: kwargs.pop(name) for name in [*kwargs] if name not in known}:
            _reject_unknown(type(self), unknown, known)
        try:
            arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        except TypeError as error:
            by_position = [
                name for name in known if signature.parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            ]
            raise TypeError(
                f"{type(self).__name__}(): {error}. By position it takes {', '.join(by_position)}, in this order; pass "
                "the others by name."
            ) from None
        del arguments["self"]
        if overrides.is_active():
            if overrides.replace_class(self, arguments):
                return
            arguments = overrides.override_arguments(self, arguments)
        fixed = frozenset(known) - ASSIGNABLE_SETTINGS - getattr(type(self), "ASSIGNABLE", frozenset())
        for name in fixed & vars(self).keys():
            reject_assignment(self, name, vars(self)[name])
        from omnitrain.config.instantiation import TrainerConfig

        vars(self)["config"] = TrainerConfig.of(self, arguments)
        _construct(self, arguments, fixed)

    visible = [param for param in signature.parameters.values() if param.name != "unknown"]
    declared.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
    return cast(Constructor, declared)


def _construct(trainer: Any, arguments: dict[str, Any], fixed: frozenset[str]) -> None:
    """Build a trainer from its arguments; record them and the names of its internal attributes."""
    attributes = vars(trainer)
    names = attributes.keys() - {"config"}
    trainer._construct(dict(arguments))
    attributes |= {"fixed_settings": fixed, "_arguments": arguments, "_attributes": frozenset(attributes) - names}


def get_construction(trainer: Any) -> dict[str, Any]:
    """Return the arguments of a trainer and the attributes that a subclass has set, for `reconstruct`."""
    attributes = vars(trainer)
    internal = attributes["_attributes"] | {"config", "fixed_settings", "_arguments", "_attributes"}
    return {
        "config": trainer.config,
        "fixed": attributes["fixed_settings"],
        "arguments": attributes["_arguments"],
        "attributes": {name: value for name, value in attributes.items() if name not in internal},
    }


def reconstruct(trainer: Any, state: Mapping[str, Any]) -> None:
    """Build a trainer from the result of `get_construction`, or a copy of it."""
    vars(trainer).update(state["attributes"], config=state["config"])
    _construct(trainer, state["arguments"], state["fixed"])


def reject_assignment(trainer: Any, name: str, value: Any) -> None:
    """Raise FixedSettingError for an argument that is assigned to a trainer instead of passed to its constructor."""
    kind = type(trainer).__name__
    text = repr(value) if isinstance(value, (bool, int, float, str, type(None))) else "..."
    raise FixedSettingError(
        f"`{name}` is fixed when a trainer is made: assigning it would change nothing. Pass it to the constructor, "
        f"{kind}(..., {name}={text}).{_ALTERNATIVES.get(name, '')}"
    )


def change_setting(trainer: Any, **values: Any) -> None:
    """Set attributes that are fixed for the user of a trainer; for changes made by the run itself."""
    vars(trainer).update(values)


_RATE = " During a run, set {!r} in the groups of `trainer.optimizer.param_groups`."
_END = " A callback can end a run earlier: trainer.stop()."
# The alternative to assigning a setting, by its name.
_ALTERNATIVES: dict[str, str] = {
    "learning_rate": _RATE.format("lr"),
    "weight_decay": _RATE.format("weight_decay"),
    "epochs": _END,
    "max_steps": _END,
    "max_duration": _END,
    "eval_dataset": " trainer.evaluate(dataset) takes any other one.",
    "test_dataset": " trainer.test(dataset) takes any other one.",
    "eval_steps": " A callback can ask for more: trainer.request_evaluate().",
    "save_steps": " A callback can ask for more: trainer.request_save().",
    "log_steps": " A callback can ask for more: trainer.request_log().",
}

# Arguments that may also be assigned to a trainer; `ASSIGNABLE` of its class names others.
ASSIGNABLE_SETTINGS = frozenset(["model", "optimizer", "lr_scheduler", "unit"])


def _reject_unknown(trainer: type, unknown: Mapping[str, Any], known: list[str]) -> None:
    """Raise one TypeError for all unknown arguments; those of other trainers may be passed as None or False.

    If all are those of other trainers, it is a ConfigError.
    """
    reasons = getattr(trainer, "REFUSED", {})
    errors = []
    for name, value in unknown.items():
        if name not in reasons:
            errors.append(f"{name!r}.{advice(name, known) or did_you_mean(name, known)}")
        elif value is not None and value is not False:
            errors.append(f"`{name}={str(value)!r}` {reasons[name]}")
    if errors and unknown.keys() <= reasons.keys():
        raise ConfigError("\n".join(errors))
    if errors:
        raise unexpected_arguments(trainer.__name__, errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of a trainer, except the model, as passed. `BaseTrainer.__init__` describes each."""

    # <fields, written by `make signatures`>
    train_dataset: Any = None
    eval_dataset: Any = None
    test_dataset: Any = None
    # data
    train_loader: Iterable[Any] | None = None
    eval_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None
    test_loader: Iterable[Any] | None = None
    data_collator: Callable[[Any], Any] | None = None
    batch_size: int = 8
    microbatch_size: int | Literal["auto"] | None = None
    eval_batch_size: int | None = None
    global_batch_size: int | Mapping[Any, int] | None = None
    shuffle: bool = True
    drop_last: bool = False
    num_workers: int = 0
    pin_memory: bool | None = None
    prefetch_factor: int | None = None
    processing_class: Any = None
    # length
    epochs: int | float | None = None
    max_steps: int | None = None
    max_duration: int | str | Duration | None = None
    # optimizer
    optimizer: torch.optim.Optimizer | str | Callable[..., torch.optim.Optimizer] | None = None
    optimizer_kwargs: Mapping[str, Any] | None = None
    learning_rate: float = 2e-5
    weight_decay: float = 0.0
    lr_scheduler: Schedule | LRScheduler | ScheduleName | Callable[[Any], Any] | None = None
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    warmup_steps: int | float | str | Duration = 0
    scheduler_interval: Literal["step", "epoch"] = "step"
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = 1.0
    grad_reduction: Literal["mean", "sum", "per-token-mean"] = "mean"
    param_groups: Sequence[Mapping[str, Any]] | None = None
    freeze: Sequence[str] | None = None
    # loss and metrics
    loss_fn: Callable[[Any, Any], torch.Tensor | Mapping[str, torch.Tensor]] | None = None
    unit: Callable[..., Any] | None = None
    compute_metrics: Any = None
    label_names: Sequence[str] | None = None
    optimization_metric: str = "loss"
    optimization_direction: Literal["max", "min"] | None = None
    patience: int | str | Duration | None = None
    delta: float = 0.0
    early_stopper: Callable[[int, float], bool] | None = None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None
    sanity: bool = True
    # cadence
    eval_steps: Interval | None = None
    eval_on_start: bool = False
    save_steps: Interval | None = None
    log_steps: Interval = 10
    # checkpoints
    save_dir: str | Path | None = None
    save_total_limit: int | None = None
    keep_best: int = 1
    keep_every: int | None = None
    load_best_at_end: bool | None = None
    overwrite: bool = False
    save_required: bool = False
    save_only_model: bool | Literal["all_but_last"] = False
    save_frozen: bool | None = None
    async_save: bool = False
    consolidate: bool | None = None
    init_from: str | Path | Mapping[str, Any] | None = None
    # precision and placement
    autocast: PrecisionName | torch.dtype | None = None
    dtypes: Mapping[str, PrecisionName | torch.dtype] | None = None
    fp16_loss_scale: tuple[float, float] | tuple[float, float, int] = (65536.0, 1e-4)
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    compile: bool | Mapping[str, Any] = False
    gradient_checkpointing: bool | Sequence[str] = False
    device: str | torch.device | None = None
    # run
    seed: int = 42
    deterministic: bool = False
    on_nonfinite: Literal["raise", "skip", "warn"] = "raise"
    detect_anomaly: bool = False
    timeout: float | str | Duration | None = None
    callbacks: Iterable[Callback] = ()
    loggers: str | Sequence[object] | None = None
    algorithms: Iterable[Algorithm] = ()
    progress_bar: bool | None = None
    trial_name: str | None = None
    # </fields>

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Settings:
        """Return the settings for a caller's arguments, with None replaced by its meaning."""
        filled: dict[str, Any] = {
            name: to_python_scalar(value)  # np.int64(8), of a grid of values for example
            for name, value in arguments.items()
            if value is not None or name not in NONE_IS_DEFAULT
        }
        if all(arguments.get(name) is None for name in ("epochs", "max_steps", "max_duration")):
            filled["epochs"] = DEFAULT_EPOCHS
        return cls(**filled)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


# The length of a run without another limit.
DEFAULT_EPOCHS = 3
# Arguments with a default other than None that can nevertheless be passed as None.
NONE_IS_DEFAULT = ("callbacks", "algorithms", "optimization_metric")
# Arguments that take one of a few texts, or None if that is the default; and those that take True or False.
CHOICES: dict[str, tuple[str | None, ...]] = {
    field.name: (*re.findall(r"'(.+?)'", str(field.type)), *([None] if field.default is None else []))
    for field in fields(Settings) if str(field.type).startswith("Literal[")
}  # fmt: skip
SWITCHES = tuple(field.name for field in fields(Settings) if field.type in ("bool", "bool | None"))
NEEDS_EVALUATION: dict[str, tuple[Any, ...]] = {
    "patience": (None, -1), "early_stopper": (None,), "eval_steps": (None,), "eval_on_start": (False,),
    "load_best_at_end": (None, False), "optimization_metric": ("loss", "eval_loss"), "optimization_direction": (None,),
}  # fmt: skip
NEEDS_SAVE_DIR = ("save_steps", "save_total_limit", "keep_best", "keep_every", "overwrite",
                  "save_required", "save_only_model", "save_frozen", "async_save", "consolidate")  # fmt: skip
# Arguments without effect on a `train_loader`.
LOADER_SETTINGS = ("shuffle", "drop_last", "global_batch_size")
# Arguments without effect if every set is a loader.
DATASET_SETTINGS = ("batch_size", "data_collator", "num_workers", "pin_memory")
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Settings)}


def check_settings(settings: Settings) -> None:
    """Raise ConfigError for the first wrong argument, or pair of contradicting arguments."""
    values = settings.to_dict()
    _check_each(values)
    _check_data(values)
    _check_pairs(values)


def reject_class(name: str, value: Any) -> None:
    """Raise ConfigError for a class if an instance is needed, as the value or an entry of the argument `name`."""
    if isinstance(value, type):
        raise ConfigError(f"`{name}` takes instances, got the class {value.__name__}. Pass {value.__name__}(...).")


def check_list(name: str, value: Any) -> None:
    """Raise ConfigError for a value that is not a list of instances."""
    reject_class(name, value)
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ConfigError(f"`{name}` must be a list of instances, got {_repr(value)}.")


def check_switch(name: str, value: Any) -> None:
    """Raise ConfigError for a value other than True, False and None."""
    if not isinstance(value, (bool, type(None))):
        raise ConfigError(f"`{name}` must be True or False, got {_repr(value)}.")


def check_type(name: str, value: Any, *types: type) -> None:
    """Raise ConfigError for a value that is neither None nor of one of these types."""
    if value is not None and not isinstance(value, types):
        names = " or ".join(kind.__name__ for kind in types)
        raise ConfigError(f"`{name}` must be an instance of {names}, got {_repr(value)}.")


def parse_init_from(value: Any) -> dict[str, Any]:
    """Return the entries of `init_from`: "path", which is made absolute, "ignore" and "convert"."""
    source = dict(value) if isinstance(value, Mapping) else {"path": value}
    form = "{'path': ..., 'ignore': ['head.*'], 'convert': function}"
    for name in source:
        if name not in ("path", "ignore", "convert"):
            nearest = did_you_mean(str(name), ["path", "ignore", "convert"])
            raise ConfigError(f"`init_from` has {name!r}. It must be a path, or {form}.{nearest}")
    path, ignore, convert = source.get("path"), source.get("ignore"), source.get("convert")
    if ignore is not None and not _is_names(ignore):
        raise ConfigError(f"`init_from`: 'ignore' must be a list of names with * and ?, got {_repr(ignore)}.")
    if convert is not None and not callable(convert):
        raise ConfigError(f"`init_from`: 'convert' must be a function of the weights by name, got {_repr(convert)}.")
    place = path if is_address(path) else local_path(path, "init_from").absolute()
    return {"path": place, "ignore": list(ignore or ()), "convert": convert}


def _is_integer(value: Any, least: int = 0, most: int = sys.maxsize) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_finite(value: Any) -> bool:
    """Return whether the value is a number that a float can hold; True and False are not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _repr(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, int) and abs(value) > 10**40:
        return "a number of more than 40 digits"  # Python refuses to print one with thousands
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _pattern_error(patterns: Any) -> str:
    """Return the error of the first text that is no regular expression, in brackets; "" if there is none."""
    for pattern in patterns if _is_names(patterns) else ():
        try:
            re.compile(pattern)
        except re.error as error:
            return f" ({error})"
    return ""


def _is_loss_scale(scale: Any) -> bool:
    is_listed = isinstance(scale, (tuple, list)) and len(scale) in (2, 3) and all(map(is_finite, scale))
    return is_listed and 0 < scale[1] <= scale[0] and (len(scale) == 2 or (_is_integer(scale[2], 1)))


def _is_names(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(entry, str) for entry in value)


def _are_patterns(value: Any) -> bool:
    return _is_names(value) and not _pattern_error(value)


# The arguments that are checked each by itself: their names, what they accept, and that as text. None is accepted by
# switches, and where it is the default.
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("batch_size eval_batch_size gradient_accumulation_steps prefetch_factor keep_every",
     lambda value: _is_integer(value, 1), "a positive integer"),
    ("num_workers keep_best save_total_limit", _is_integer, "an integer of at least 0"),
    ("seed", lambda value: _is_integer(value, 0, 2**64 - 1), f"an integer of at least 0, at most {2**64 - 1}"),
    ("microbatch_size", lambda value: value == "auto" or _is_integer(value, 1), "a positive integer, 'auto' or None"),
    (" ".join(SWITCHES), lambda value: isinstance(value, bool), "True or False"),
    ("data_collator loss_fn unit early_stopper preprocess_logits_for_metrics", callable, "callable"),
    ("processing_class",
     lambda value: callable(getattr(value, "save_pretrained", None)) and not isinstance(value, type),
     "a tokenizer or processor, with a method save_pretrained(folder)"),
    ("gradient_checkpointing", lambda value: isinstance(value, bool) or _are_patterns(value),
     r"True, False or a list of regular expressions of modules' names, such as [r'layers\.\d+']"),
    ("freeze", _are_patterns,
     r"a list of regular expressions of parameters' names, such as ['embeddings', r'layer\.[0-5]\.']"),
    ("compile", lambda value: isinstance(value, (bool, Mapping)),
     "True, False or a dict of options of torch.compile"),
    ("label_names", _is_names, "a list of the keys of labels, such as ['start_positions', 'end_positions']"),
    ("optimization_metric", lambda value: isinstance(value, str) and bool(value), "the name of a metric"),
    ("learning_rate weight_decay delta", lambda value: is_finite(value) and value >= 0,
     "a finite number of at least 0"),
    ("max_grad_norm", lambda value: is_finite(value) and value > 0, "a positive number or None"),
    ("patience", lambda value: isinstance(value, (str, Duration)) or (_is_integer(value, -1) and value != 0),
     "a positive integer, a duration such as '20ba', or None"),
    ("save_only_model", lambda value: isinstance(value, bool) or value == "all_but_last",
     "True, False or 'all_but_last'"),
    ("fp16_loss_scale", _is_loss_scale,
     "(initial, minimum) with 0 < minimum <= initial, or (initial, minimum, window), of which the window is the steps "
     "without an overflow until the scale doubles"),
)  # fmt: skip
_REMEDIES = {"patience": " Leave it out to train all epochs.", "max_grad_norm": " None does not clip."}


def _check_each(values: Mapping[str, Any]) -> None:
    for name, choices in CHOICES.items():
        if not isinstance(values[name], (str, type(None))) or values[name] not in choices:
            raise ConfigError(
                f"`{name}` must be one of {', '.join(map(repr, choices))}, got {_repr(values[name])}."
                f"{did_you_mean(str(values[name]), filter(None, choices))}"
            )
    for names, accepts, expected in _RULES:
        for name in names.split():
            value, default = values[name], DEFAULTS[name]
            takes_none = default is None or isinstance(default, bool) or name == "max_grad_norm"
            if value is None and takes_none:
                continue
            if accepts is callable or name == "processing_class":
                reject_class(name, value)
            if not accepts(value):
                limit = _limit(value) if "integer" in expected and "at most" not in expected else ""
                reason = _pattern_error(value) if "regular expressions" in expected else ""
                remedy = " Leave it out for its default." if value is None else _REMEDIES.get(name, "")
                raise ConfigError(f"`{name}` must be {expected}{limit}, got {_repr(value)}{reason}.{remedy}")
    total, warmup = values["global_batch_size"], values["warmup_steps"]
    if isinstance(total, Mapping):
        check_stages("global_batch_size", total)
    elif total is not None and not _is_integer(total, 1):
        raise ConfigError(f"`global_batch_size` must be a positive integer{_limit(total)}, got {_repr(total)}.")
    if warmup is None or (isinstance(warmup, int) and not isinstance(warmup, bool) and not _is_integer(warmup)):
        raise ConfigError(
            f"`warmup_steps` must be an integer of at least 0, at most {sys.maxsize}, or a duration such as '0.1dur', "
            f"got {_repr(warmup)}.{' Leave it out for its default.' if warmup is None else ''}"
        )
    warmup_length(warmup)
    _check_groups(values["param_groups"])
    for name in ("callbacks", "algorithms"):
        check_list(name, values[name])
    if values["timeout"] is not None:
        parse_seconds("timeout", values["timeout"])


def _limit(value: Any) -> str:
    return f", at most {sys.maxsize}" if isinstance(value, int) and value > sys.maxsize else ""


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    form = "a list of dicts such as {'match': 'bias|norm', 'weight_decay': 0.0}"
    if not isinstance(groups, (list, tuple)) or not groups or not all(isinstance(group, Mapping) for group in groups):
        raise ConfigError(f"`param_groups` must be {form}, got {_repr(groups)}.")
    for place, group in enumerate(groups):
        where, pattern = f"`param_groups[{place}]`", group.get("match")
        if not pattern or not _are_patterns([pattern]):
            raise ConfigError(
                f"{where} must have a regular expression of parameters' names as 'match', got "
                f"{_repr(pattern)}{_pattern_error([pattern])}. `param_groups` is {form}."
            )
        if len(group) == 1 or not all(isinstance(key, str) for key in group):
            raise ConfigError(f"{where} must have options next to 'match', by name, got {_repr(group)}.")
        if "lr" in group and "lr_scale" in group:
            raise ConfigError(
                f"{where} has both 'lr' and 'lr_scale', which are the rate and a factor of `learning_rate`. Give one."
            )
        for name in ("lr", "lr_scale", "weight_decay"):
            if name in group and (not is_finite(group[name]) or group[name] < 0):
                raise ConfigError(
                    f"{where}: {name!r} must be a finite number of at least 0, got {_repr(group[name])}. "
                    "Put parameters that should not train into `freeze`."
                )


def _check_data(values: Mapping[str, Any]) -> None:
    for kind in ("train", "eval", "test"):
        if values[f"{kind}_dataset"] is not None and values[f"{kind}_loader"] is not None:
            raise ConfigError(f"`{kind}_dataset` and `{kind}_loader` are both given. Pass one of them.")
    has_eval = values["eval_dataset"] is not None or values["eval_loader"] is not None
    for name, off in NEEDS_EVALUATION.items():
        if not has_eval and values[name] not in off:
            raise ConfigError(
                f"`{name}={values[name]!r}` needs evaluations, but there is no evaluation set. "
                f"Pass `eval_dataset`, or leave `{name}` out."
            )
    if values["prefetch_factor"] is not None and not values["num_workers"]:
        raise ConfigError(
            f"`prefetch_factor={values['prefetch_factor']}` has no effect with `num_workers=0`. Set `num_workers`."
        )
    sets = [values["train_dataset"], values["eval_dataset"], values["test_dataset"]]
    if values["train_loader"] is not None or is_loader(values["train_dataset"]):
        only_loaders = all(dataset is None or is_loader(dataset) for dataset in sets)
        name = "train_dataset" if values["train_loader"] is None else "train_loader"
        batch_size = ("batch_size",) if values["eval_batch_size"] is not None else ()
        for unused in LOADER_SETTINGS + (DATASET_SETTINGS if only_loaders else batch_size):
            if values[unused] != DEFAULTS[unused]:
                instead = " For evaluations there is `eval_batch_size`." if unused == "batch_size" else ""
                raise ConfigError(
                    f"`{unused}={values[unused]!r}` has no effect on a `{name}` that is a loader, which is used "
                    f"unchanged. Set it in that loader, or pass its dataset instead.{instead}"
                )


def is_loader(data: Any) -> bool:
    """Return whether this is a DataLoader, which can be passed as a dataset."""
    return hasattr(data, "batch_sampler") and hasattr(data, "collate_fn")


def _check_pairs(values: Mapping[str, Any]) -> None:
    if values["unit"] is not None and values["loss_fn"] is not None:
        raise ConfigError("`unit` and `loss_fn` are both given: the unit computes its own loss. Pass one of them.")
    if values["unit"] is not None and values["compile"] not in (None, False):
        raise ConfigError(
            "`compile` has no effect on a custom `unit`, which calls its own model. Have it call torch.compile(model)."
        )
    optimizer = values["optimizer"]
    if optimizer is not None and not isinstance(optimizer, (str, type)):
        for name in ("learning_rate", "weight_decay"):
            if values[name] != DEFAULTS[name]:
                raise ConfigError(
                    f"`{name}={values[name]!r}` has no effect with an `optimizer` instance. "
                    "Set it in that optimizer, or pass its class instead."
                )
    examples = {"optimizer": {"betas": (0.9, 0.95)}, "lr_scheduler": {"min_lr": 1e-6}}
    for name, example in examples.items():
        options = values[f"{name}_kwargs"]
        is_dict = isinstance(options, Mapping) and all(isinstance(key, str) for key in options)
        if options is not None and not is_dict:
            raise ConfigError(
                f"`{name}_kwargs` must be a dict of what `{name}` takes, such as {example}, got {_repr(options)}."
            )
    if values["param_groups"] is not None and hasattr(optimizer, "param_groups"):
        raise ConfigError(
            "`param_groups` has no effect with an `optimizer` instance. Give these groups to that optimizer, or pass "
            "its class, or a callable of the parameters."
        )
    if values["scheduler_interval"] == "epoch":
        if values["lr_scheduler"] is None:
            raise ConfigError("`scheduler_interval='epoch'` has no effect without `lr_scheduler`. Pass one.")
        schedule, steps = values["lr_scheduler"], values["warmup_steps"]
        warmups = [part.warmup for part in schedule.parts] if isinstance(schedule, Schedule) else [steps]
        if warmup := next(filter(None, warmups), None):
            raise ConfigError(
                f"`warmup_steps={warmup}` counts steps, but `scheduler_interval='epoch'` moves the "
                "schedule once per epoch. Use scheduler_interval='step'."
            )
    if values["delta"] and values["patience"] in (None, -1) and not values["callbacks"]:
        raise ConfigError(f"`delta={values['delta']!r}` has no effect without `patience`. Pass `patience`.")
    if values["save_dir"] is not None and values["save_total_limit"] is None and values["keep_every"] is not None:
        raise ConfigError(
            f"`keep_every={values['keep_every']!r}` has no effect without `save_total_limit`, as all checkpoints are "
            "kept. Pass it."
        )
    if values["save_only_model"] == "all_but_last" and is_address(values["save_dir"]):
        raise ConfigError(
            f"`save_only_model='all_but_last'` changes checkpoints on a disk of this machine, and `save_dir` is "
            f"{values['save_dir']!r}. Pass a folder, or save_total_limit= to keep fewer checkpoints."
        )
    if values["save_dir"] is None:
        for name in NEEDS_SAVE_DIR:
            is_off = values[name] is False and DEFAULTS[name] is not None
            if values[name] != DEFAULTS[name] and not is_off:
                raise ConfigError(
                    f"`{name}={values[name]!r}` needs a place for checkpoints. Pass `save_dir`, or leave `{name}` out."
                )


def parse_seconds(name: str, value: Any) -> float:
    """Return the seconds of an argument that is a time: a number of seconds, or a string such as "10m"."""
    length = Duration.parse(value, "s", name)
    if length.unit != "s" or not is_finite(length.value):
        raise ConfigError(f"`{name}` must be a time such as 600 (seconds), '10m' or '2h', got {_repr(value)}.")
    return float(length.value)


def has_changing_batch_size(settings: Settings) -> bool:
    """Return whether the samples of a step change during the run."""
    return isinstance(settings.global_batch_size, Mapping)


def accumulation_stages(
    settings: Settings, limits: Limits, world_size: int, samples_per_epoch: int | None = None
) -> Stages | None:
    """Return the stages of micro-batches per window and process; None if they stay the same."""
    sizes = settings.global_batch_size
    if not isinstance(sizes, Mapping):
        return None
    stages = Stages(_accumulations(sizes, settings.batch_size, world_size), limits)
    check_stages_reached("global_batch_size", sizes, limits, samples_per_epoch)
    return stages


def _accumulations(sizes: Mapping[Any, int], batch_size: int, world_size: int) -> dict[Any, int]:
    share = batch_size * world_size
    for size in sizes.values():
        if size % share:
            raise ConfigError(
                f"A `global_batch_size` that changes must be a multiple of batch_size x processes = {batch_size} x "
                f"{world_size} = {share} at every place, got {size}. One that stays the same need not be."
            )
    return {place: size // share for place, size in sizes.items()}


def resolve_accumulation(settings: Settings, world_size: int) -> int:
    """Return the micro-batches per window and process at the start, from `global_batch_size` if that is given.

    Where that is no multiple of batch_size x processes, the micro-batches are as few as can be, and smaller.
    """
    accumulation, total = settings.gradient_accumulation_steps, settings.global_batch_size
    if total is None:
        return accumulation
    if isinstance(total, Mapping):
        if accumulation != 1:
            raise ConfigError(
                f"`gradient_accumulation_steps={accumulation}` contradicts a `global_batch_size` that changes, which "
                "sets it in each step. Leave one of them out."
            )
        return _accumulations(total, settings.batch_size, world_size)[0]
    if total < world_size:
        raise ConfigError(
            f"`global_batch_size={total}` has no sample for each of {world_size} processes. Make it larger, or start "
            f"{total} processes at most."
        )
    size = settings.batch_size
    needed = math.ceil(total / (size * world_size))
    if accumulation not in (1, needed):
        raise ConfigError(
            f"`gradient_accumulation_steps={accumulation}` contradicts `global_batch_size={total}`, which makes it "
            f"{total} / ({size} x {world_size}) = {needed}. Leave one of them out."
        )
    return needed


def samples_of_step(settings: Settings, world_size: int) -> int:
    """Return the samples of an optimizer step over all ranks; where that changes, those of the first one."""
    total = settings.global_batch_size
    if total is None:
        return settings.batch_size * world_size * settings.gradient_accumulation_steps
    return total[0] if isinstance(total, Mapping) else total


def describe(value: Any) -> Any:
    """Return a setting as JSON types: plain values unchanged, objects by a name."""
    if isinstance(value, FromEnvironment):
        return value.reference
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Path, Duration, Schedule)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): describe(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple) and len(value) < 1000:
        return [describe(entry) for entry in value]
    target: Any = value if hasattr(value, "__qualname__") and hasattr(value, "__module__") else type(value)
    return f"{target.__module__}.{target.__qualname__}"


def describe_all(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by name as JSON types; datasets and loaders by their type, named sets each by theirs."""
    described: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or not name.endswith(("_dataset", "_loader")):
            described[name] = describe(value)
        elif isinstance(value, dict):
            described[name] = {str(part): describe(type(dataset)) for part, dataset in value.items()}
        else:
            described[name] = describe(type(value))
    return described


# Arguments that may differ between ranks: they affect neither the numbers nor what the ranks do together.
RANK_LOCAL_SETTINGS = ("callbacks", "callback_options", "loggers", "device", "num_workers", "pin_memory",
                       "prefetch_factor", "progress_bar", "timeout", "trial_name")  # fmt: skip


def check_same_on_ranks(ranks: Ranks, described: Mapping[str, Any]) -> None:
    """Raise DistributedError on all ranks if their arguments differ, except those that may.

    Only the main rank uses `save_dir`, so the others may have another one; but either all ranks have one, or none.
    """
    common = {name: value for name, value in described.items() if name not in RANK_LOCAL_SETTINGS}
    if common.get("save_dir") is not None:
        common["save_dir"] = "a folder"
    ranks.check_equal(
        "The arguments of the ranks", common,
        f"Pass the same on every rank. Only {', '.join(RANK_LOCAL_SETTINGS)} may differ, and where `save_dir` is.",
    )  # fmt: skip
