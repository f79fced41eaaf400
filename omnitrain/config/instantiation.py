"""Records how objects were built, so that a configuration can rebuild them.

A model or a dataset does not know its arguments. `instantiate` builds one by the name of its class or function, and
records both; callbacks and algorithms record their arguments themselves. `TrainerConfig` has the records as plain
values. Files are read in `reading.py`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
import sys
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omnitrain.compute.random_state import isolated_rng
from omnitrain.config.names import import_object, missing_parameters
from omnitrain.config.plain_yaml import MISSING, FromEnvironment, write
from omnitrain.core.duration import Duration
from omnitrain.core.events import Algorithm, Callback, init_arguments
from omnitrain.core.metric_format import to_python_scalar
from omnitrain.core.secrets import is_secret_name, mask_text

Missing = dict[tuple[str | int, ...], str]
"""Why an object cannot be written, by its place."""
# The longest list that is written.
_LIMIT = 1000

_REFERENCE = re.compile(r"\$\{env:[^${}]*\}")
# How objects were built, by id: a weak reference or the object, its class or function, arguments and seed.
_origins: dict[int, tuple[Any, str, Any, int]] = {}
# The latest objects without weak references, such as lists, whose memory stays in use.
_strong_refs: deque[int] = deque(maxlen=32)


def instantiate(class_path: str, init_args: Mapping[str, Any] | Sequence[Any] = (), *, seed: int = 42) -> Any:
    """Build an object by the name of its class or function, and record both for `config.yaml` of a run.

    Random numbers start from `seed` inside, and are unchanged outside: the weights of a model do not depend on what
    was built before. `omnitrain train` builds the objects of a file in this way, with the seed of the trainer.

    Args:
        class_path: The dotted path of a class or function, such as "torch.nn.Linear".
        init_args: What it is called with: plain values by name, or by position.
        seed: The seed of Python's, NumPy's and torch's random numbers.

    Raises:
        ConfigError: If there is nothing of this name.

    >>> instantiate("torch.nn.Linear", {"in_features": 4, "out_features": 2})  # Trainer(model=...)
    Linear(in_features=4, out_features=2, bias=True)
    """
    return make_part(class_path, import_object(class_path), init_args, seed)


def make_part(class_path: str, function: Any, init_args: Any, seed: int, config: Any = None) -> Any:
    """Call a class or function under a seed, and record how its result was built.

    `config` has the arguments as plain values, if they differ from `init_args`.
    """
    with isolated_rng(seed=seed):
        instance = function(**init_args) if isinstance(init_args, Mapping) else function(*init_args)
    origin: Any = class_path, init_args if config is None else config, seed
    # callbacks and algorithms record it themselves; the others are shared by all code
    is_shared = isinstance(instance, (Callback, Algorithm, str, int, float, bool, bytes, type(None)))
    if not is_shared and not (isinstance(instance, tuple) and not instance):
        try:
            _origins[id(instance)] = weakref.ref(instance, functools.partial(_forget, id(instance))), *origin
        except TypeError:  # such as a list, which allows no weak references
            if len(_strong_refs) == _strong_refs.maxlen:
                _forget(_strong_refs[0])
            _strong_refs.append(id(instance))
            _origins[id(instance)] = instance, *origin
    return instance


def _forget(number: int, _: Any = None) -> None:
    _origins.pop(number, None)


class _ConfigWriter:
    """Converts objects into plain values from which `omnitrain train` builds equal ones, as far as it can.

    `missing` gets the reason for each object that it cannot, by its place. Objects with another seed than `seed`, that
    of the trainer, are written with theirs.
    """

    def __init__(self, missing: Missing, seed: int) -> None:
        self._missing = missing
        self._seed = seed

    def convert(self, value: Any, place: tuple[str | int, ...]) -> Any:
        """Return the plain values of an object at a place of the file."""
        if isinstance(value, FromEnvironment):
            return value.reference
        if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
            return value
        if id(value) in _origins:
            _, path, arguments, seed = _origins[id(value)]
            init_args = self.convert(arguments, (*place, "init_args"))
            return _describe(path, init_args) | ({} if seed == self._seed else {"seed": seed})
        if isinstance(value, enum.Enum):
            path = None if isinstance(value, (str, int)) else _import_path(type(value))
            return self.convert(value.value, place) if path is None else {"import_path": f"{path}.{value.name}"}
        if isinstance(value, (Path, Duration, torch.device)):
            return str(value)
        if isinstance(value, (Callback, Algorithm)):
            return self._part(value, init_arguments(value), place)
        if type(value) in (list, tuple) and len(value) <= _LIMIT:
            return [self.convert(entry, (*place, number)) for number, entry in enumerate(value)]
        if isinstance(value, Mapping) and all(type(key) in (str, int, float) for key in value) and len(value) <= _LIMIT:
            return {key: self.convert(entry, (*place, key)) for key, entry in value.items()}
        if isinstance(value, functools.partial) and not value.args and missing_parameters(value.func, value.keywords):
            return self._part(value, value.keywords, place, value.func)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changed = {}
            for field in dataclasses.fields(value):
                default = field.default_factory() if callable(field.default_factory) else field.default
                current = getattr(value, field.name)
                if field.init and (default is dataclasses.MISSING or not _is_same(current, default)):
                    changed[field.name] = current
            return self._part(value, changed, place)
        if (path := _import_path(value)) is not None:
            return {"import_path": path}
        if isinstance(value, nn.Module) and (arguments := _module_arguments(value)) is not None:
            return self._part(value, arguments, place)
        return self.omit(value, place)

    def _part(self, value: Any, arguments: Mapping[str, Any], place: Any, function: Any = None) -> Any:
        kind = type(value) if function is None else function
        path = _import_path(kind)
        if path is None:
            return self.omit(value, place, f"{kind.__qualname__} is no name in a module that can be imported")
        values, parameters = dict(arguments), inspect.signature(kind).parameters
        for name, param in parameters.items():
            if param.kind is param.VAR_KEYWORD:
                values |= values.pop(name, {})
            elif param.kind is param.VAR_POSITIONAL and values.pop(name, ()):
                return self.omit(value, place, f"{kind.__qualname__} has arguments by position (*{name})")
            elif name in values and values[name] is param.default:
                del values[name]
        init_args = {name: self.convert(entry, (*place, "init_args", name)) for name, entry in values.items()}
        return _describe(_short_name(path), init_args)

    def omit(self, value: Any, place: tuple[str | int, ...], why: str = "") -> str:
        """Note why an object cannot be written, and return "???"."""
        kind = type(value)
        why = why or f"an object of {kind.__module__}.{kind.__qualname__}, whose arguments are not known"
        self._missing[place] = why
        return MISSING


def _describe(path: str, init_args: Any) -> dict[str, Any]:
    return {"class_path": path, "init_args": init_args} if init_args else {"class_path": path}


def _import_path(value: Any) -> str | None:
    """Return the dotted path by which a class, function or constant of torch is imported; None if there is none."""
    if isinstance(value, torch.dtype):
        return str(value)
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module in ("__main__", "builtins"):
        return None
    target: Any = sys.modules.get(module)
    for part in name.split("."):
        target = getattr(target, part, None)
    if target is not value:
        return None
    is_public = module.startswith("omnitrain.") and name in sys.modules["omnitrain"].__all__
    return f"omnitrain.{name}" if is_public else f"{module}.{name}"  # which stays where it is when a module moves


def _is_same(first: Any, second: Any) -> bool:
    return first is second or (type(first) is type(second) and bool(first == second))


def _module_arguments(module: nn.Module) -> dict[str, Any] | None:
    """Return the arguments of a loss of torch; None for a module with tensors, or one that is not torch's.

    They are read from the attributes of the same names; a module that is rebuilt from them must have equal attributes.
    """
    kind = type(module)
    if not kind.__module__.startswith("torch.nn.") or module.state_dict() or list(module.children()):
        return None
    has_hooks = any(value for name, value in vars(module).items() if name.endswith("_hooks"))
    attributes = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    names = [name for name in inspect.signature(kind).parameters if name in attributes]
    arguments = {name: attributes[name] for name in names}
    try:
        again = vars(kind(**arguments))
    except Exception:
        return None
    is_same = again.keys() == vars(module).keys() and all(_is_same(again[name], x) for name, x in attributes.items())
    return arguments if is_same and not has_hooks else None


@dataclass(frozen=True)
class TrainerConfig:
    """The arguments of a trainer, as a file from which `omnitrain train` rebuilds it.

    Attributes:
        values: Plain values, with "???" for each object that cannot be written.
        missing: The reason for it, by its place.
    """

    values: dict[str, Any]
    missing: Missing

    @classmethod
    def of(cls, trainer: Any, arguments: Mapping[str, Any]) -> TrainerConfig:
        """Return the configuration of a trainer, whose constructor has not run yet, from its arguments."""
        arguments = {name: to_python_scalar(value) for name, value in arguments.items()}
        seed = arguments.get("seed", getattr(arguments.get("training_args", arguments.get("args")), "seed", 42))
        kind, missing = type(trainer), Missing()
        writer, path = _ConfigWriter(missing, seed), _import_path(kind)
        values: dict[str, Any] = {"class_path": _short_name(path or "")}
        if path is None:
            reason = f"{kind.__qualname__} is no name in a module that can be imported"
            values["class_path"] = writer.omit(trainer, ("trainer", "class_path"), reason)
        elif not kind.__init__.__module__.startswith("omnitrain."):
            reason = f"the arguments of {path}'s own constructor are not known, only those below"
            values["class_path"] = writer.omit(trainer, ("trainer", "class_path"), reason)
        for name, value in arguments.items():
            place = ("trainer", name)
            if name.endswith(("_dataset", "_loader")) and type(value) is list and id(value) not in _origins:
                values[name] = writer.omit(value, place, "a list of samples; have a function return it")
            else:
                values[name] = writer.convert(value, place)
        return cls({"trainer": _mask_secrets(values, missing, ("trainer",))}, missing)

    def text(self) -> str:
        """Return the file."""
        lines = [f"# {'.'.join(map(str, place))}: {why}." for place, why in self.missing.items()]
        head = "# This run was made in Python, and has parts without a name. Write one for each ??? below:"
        return "\n".join([*([head, *lines] if lines else []), write(self.values)])

    __str__ = text

    def _repr_html_(self) -> str:
        """Show the file in notebooks."""
        from html import escape  # with a table of 2,000 entities, which no run needs

        return f"<pre>{escape(self.text())}</pre>"


def _short_name(path: str) -> str:
    """Return the name without a path for the public names of omnitrain."""
    import omnitrain

    name = path.rpartition(".")[2]
    return name if path.startswith("omnitrain.") and name in omnitrain.__all__ else path


def _mask_secrets(value: Any, missing: Missing, place: tuple[str | int, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _mask_secrets(entry, missing, (*place, key)) for key, entry in value.items()}
    if isinstance(value, list):
        return [_mask_secrets(entry, missing, (*place, number)) for number, entry in enumerate(value)]
    if not isinstance(value, str) or value == MISSING or value[:1] in "<[":  # such as `pad_token`
        return value
    rest = _REFERENCE.sub("", value)
    if rest != value and mask_text(rest) == rest:  # what it refers to is not written
        return value
    if is_secret_name(str(place[-1])) or mask_text(value) != value:
        missing[place] = "it looks like a secret, and none is written"
        return MISSING
    return value
