"""Changes of the settings that determine the numbers of a run.

`checkpointer.py` and `contents.py` decide what follows from a change: an error, or the new value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omnitrain.arguments import describe
from omnitrain.checkpoint.state_dicts import check_references
from omnitrain.checkpoint.tensor_files import TensorFile
from omnitrain.core.events import init_arguments
from omnitrain.optim.optimizer_kwargs import IMPLEMENTATION

# The settings that determine the numbers of a run: changing one on a resume is an error unless allowed by name.
DECIDING = (
    "model", "optimizer", "learning_rate", "weight_decay", "optimizer_groups", "param_groups", "freeze", "lr_scheduler",
    "lr_scheduler_kwargs", "lr_scheduler_options", "warmup_steps", "scheduler_interval", "global_batch_size",
    "max_grad_norm", "grad_reduction", "loss_fn", "unit", "label_names", "algorithms", "algorithm_options",
    "optimization_metric", "optimization_direction", "autocast", "dtypes", "fp16_loss_scale", "matmul_precision",
    "seed", "order_seed", "shuffle", "samples_per_epoch",
)  # fmt: skip

# Settings that assign parameters to the groups of an optimizer.
GROUPING = frozenset(["param_groups", "freeze"])

# Attributes of PyTorch's schedules that change during a run, and rates, which are settings of the optimizer.
_POSITION_KEYS = (
    "last_epoch", "_step_count", "_last_lr", "base_lrs", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i",
    "_get_lr_called_within_step", "_is_initial",
)  # fmt: skip


def changed_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the deciding settings that differ between a checkpoint and the run: (saved, current) by name."""
    changed: dict[str, tuple[Any, Any]] = {}
    for name in DECIDING:
        pair = saved.get(name), current.get(name)
        if name not in ("optimizer_groups", "algorithm_options") and _strip_package(pair[0]) != _strip_package(pair[1]):
            changed[name] = pair
    if GROUPING.isdisjoint(changed):  # groups that hold other parameters cannot be compared
        for name in ("learning_rate", "weight_decay"):
            changed.pop(name, None)  # of a custom optimizer, only the groups count
        if "optimizer" not in changed:
            changed |= _changed_groups(saved["optimizer_groups"] or [], current["optimizer_groups"] or [])
    if "lr_scheduler" in changed:
        changed.pop("lr_scheduler_options", None)
    differ = changed_options(saved, current, "algorithm_options")
    if differ[0] and "algorithms" not in changed:
        changed["algorithm_options"] = differ
    return changed


def _strip_package(value: Any) -> Any:
    """Return a setting with this package's classes by their bare names, as they may move to other modules."""
    if isinstance(value, list):
        return [_strip_package(entry) for entry in value]
    is_ours = isinstance(value, str) and value.startswith("omnitrain.")
    return value.rpartition(".")[2] if is_ours else value


def changed_options(saved: Mapping[str, Any], current: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Return the options of algorithms or callbacks that differ, saved and current: {"EMA.decay": 0.9}.

    Those that only one side has are ignored: versions may have different ones. `name` is "algorithm_options" or
    "callback_options".
    """
    before, after = saved.get(name) or {}, current.get(name) or {}
    differ: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for key in before:
        if key in after and before[key] != after[key]:
            differ[0][key], differ[1][key] = before[key], after[key]
    return differ


def _changed_groups(saved: list[dict[str, Any]], current: list[dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """Return the differences between the options of two optimizers, by the name of the setting."""
    changed: dict[str, tuple[Any, Any]] = {}
    before, after = list(map(dict, saved)), list(map(dict, current))
    for option, name in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
        old, new = [group.pop(option, None) for group in before], [group.pop(option, None) for group in after]
        if old != new:
            changed[name] = (old[0], new[0]) if len(old) == len(new) == 1 else (old, new)
    if before != after:
        changed["optimizer_groups"] = (before, after)
    return changed


def constructor_arguments(parts: Iterable[Any]) -> dict[str, Any]:
    """Return the constructor arguments of algorithms or callbacks, as JSON types by "<class>.<argument>"."""
    arguments: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for part in parts:
        name = type(part).__qualname__
        count = counts[name] = counts.get(name, 0) + 1
        prefix = name if count == 1 else f"{name} {count}"
        arguments |= {f"{prefix}.{option}": _strip_module(value) for option, value in init_arguments(part).items()}
    return arguments


def _strip_module(value: Any) -> Any:
    """Return an option as JSON types; an object by its name without the module, which differs in a script."""
    cls: Any = value if hasattr(value, "__qualname__") else type(value)
    plain = _to_plain(value)
    return cls.__qualname__ if plain == f"{cls.__module__}.{cls.__qualname__}" else plain


@dataclass(slots=True)
class InitialOptions:
    """The options of optimizer and schedule at the beginning of the run, before any schedule changed them.

    Attributes:
        optimizer: The options of each group.
        schedule: The options of a custom schedule; None for a named one, which the settings describe.
    """

    optimizer: list[dict[str, Any]] | None = None
    schedule: dict[str, Any] | None = None

    def record_optimizer(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Record the options of the groups, unless already recorded; called before a schedule changes them."""
        if self.optimizer is None:
            self.optimizer = initial_group_options(groups)

    def record_schedule(self, scheduler: Any) -> None:
        """Record the options of a custom schedule, unless already recorded."""

        def options(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {str(key): options(entry) for key, entry in value.items() if key not in _POSITION_KEYS}
            return [options(entry) for entry in value] if isinstance(value, (list, tuple)) else _to_plain(value)

        if self.schedule is None:
            self.schedule = options(scheduler.state_dict())


def initial_group_options(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the initial options of the groups as JSON types, without those of the implementation."""
    options_of_groups = []
    for group in groups:
        rate = group.get("initial_lr", group.get("lr"))
        options = {**group, "lr": rate}.items()
        skipped = ("params", "initial_lr", *IMPLEMENTATION)
        options_of_groups.append({key: _to_plain(value) for key, value in options if key not in skipped})
    return options_of_groups


def _to_plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    is_odd = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_odd else describe(value)  # JSON has neither NaN nor Infinity


# --- parameter groups


def regroup_state(
    saved: Mapping[str, Any],
    tensors: TensorFile,
    groups: Sequence[tuple[list[str], Mapping[str, Any]]],
    where: str,
) -> tuple[dict[str, Any], TensorFile]:
    """Return a saved optimizer state, rest and tensors, for other groups; no tensor is read.

    Parameters that did not train have no state; the state of those that no longer train is excluded. `groups` are the
    names and options of each of the present groups.
    """
    present = {name for names, _ in groups for name in names}
    rest = {name: entries for name, entries in saved["rest"].items() if name in present}
    nested = check_references([rest, saved["shared"]], tensors, where)
    keys = {key for key in tensors if key.rpartition("/")[0] in present or key in nested}
    saved_groups = saved["groups"]
    new_groups = []
    for index, (names, options) in enumerate(groups):
        group = saved_groups[min(index, len(saved_groups) - 1)]
        new_groups.append({**{key: value for key, value in group.items() if key in options}, "params": names})
    return {**saved, "rest": rest, "groups": new_groups}, tensors.subset(keys)
