"""How parts of a run were made, in names and plain values, so that a file can make them again.

A model or a dataset does not know its arguments. `instantiate` makes one by the name of its class or function, and
notes both; callbacks and algorithms note their arguments themselves. `config_of` writes all that down. What a file
contains is read and built in `config/`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
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
from omnitrain.config.yaml_writer import MISSING, FromEnvironment, write
from omnitrain.core.duration import Duration
from omnitrain.core.errors import ConfigError, did_you_mean
from omnitrain.core.events import Algorithm, Callback, init_arguments
from omnitrain.core.metric_format import to_python_scalar
from omnitrain.core.secrets import is_secret_name, mask_text

Missing = dict[tuple[str | int, ...], str]
"""Why a part has no name, by its place."""
_LONGEST = 1000
"""The most entries of a list that are written down."""

_REFERENCE = re.compile(r"\$\{env:[^${}]*\}")
_made: dict[int, tuple[Any, str, Any, int]] = {}
"""How objects were made, by id: the object, or a weak reference to it, its class or function, arguments and seed."""
_held: deque[int] = deque(maxlen=32)
"""The latest of those to which there are no weak references, such as lists, whose memory stays in use."""


def instantiate(class_path: str, init_args: Mapping[str, Any] | Sequence[Any] = (), *, seed: int = 42) -> Any:
    """Make an object by the name of its class or function, and note how, so that `config.yaml` of a run says it.

    Random numbers begin from `seed` inside, and outside they are as they were: the weights of a model depend on nothing
    that was made before. `omnitrain train` makes the parts of a file in this way, with the seed of the trainer.

    Args:
        class_path: The dotted path of a class or function, such as "torch.nn.Linear".
        init_args: What it is called with: plain values by name, or by position.
        seed: The seed of Python's, NumPy's and torch's random numbers.

    Raises:
        ConfigError: If there is nothing of this name.

    >>> model = instantiate("torch.nn.Linear", {"in_features": 4, "out_features": 2})
    >>> config_of(model)
    {'class_path': 'torch.nn.Linear', 'init_args': {'in_features': 4, 'out_features': 2}}
    """
    return made(class_path, imported(class_path), init_args, seed)


def imported(name: str) -> Any:
    """Return what a dotted path leads to: attributes of the innermost module that there is.

    Raises:
        ConfigError: If there is nothing.
    """
    words = name.split(".")
    for end in range(len(words) - 1, 0, -1):
        module = ".".join(words[:end])
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if end > 1 and error.name is not None and module.startswith(error.name):
                continue
            if error.name == module:
                raise ConfigError(
                    f"there is no module {module!r}, which {name!r} needs. Install it, or start the program in the "
                    "folder that it lies in."
                ) from error
            raise ConfigError(f"{name!r} cannot be imported: {error}.") from error
        except Exception as error:
            raise ConfigError(f"{name!r} cannot be imported: {type(error).__name__} in {module}: {error}") from error
        for word in words[end:]:
            if not hasattr(found, word):
                where = getattr(found, "__name__", module)
                raise ConfigError(f"{where} has no {word!r}, which {name!r} needs.{did_you_mean(word, dir(found))}")
            found = getattr(found, word)
        return found
    raise ConfigError(f"there is no module {words[0]!r}, which {name!r} needs.")


def made(class_path: str, function: Any, init_args: Any, seed: int, config: Any = None) -> Any:
    """Call a class or function under a seed, and note how its result was made.

    Args:
        class_path: Its dotted path.
        function: The thing itself.
        init_args: Its arguments, by name or by position.
        seed: The seed of all random numbers inside.
        config: The arguments as plain values, if they are others.
    """
    with isolated_rng(seed=seed):
        found = function(**init_args) if isinstance(init_args, Mapping) else function(*init_args)
    note: Any = class_path, init_args if config is None else config, seed
    is_shared = isinstance(found, (str, int, float, bool, bytes, type(None))) or (
        isinstance(found, tuple) and not found
    )
    if not is_shared and not isinstance(found, (Callback, Algorithm)):  # which note it themselves
        try:
            _made[id(found)] = weakref.ref(found, functools.partial(_forget, id(found))), *note
        except TypeError:  # such as a list, which allows no weak references
            if len(_held) == _held.maxlen:
                _forget(_held[0])
            _held.append(id(found))
            _made[id(found)] = found, *note
    return found


def _forget(number: int, _: Any = None) -> None:
    _made.pop(number, None)


def is_partial(function: Any, init_args: Mapping[str, Any]) -> bool:
    """Return whether a class or function needs more arguments: an optimizer its parameters, a loss the outputs.

    >>> is_partial(torch.optim.SGD, {"lr": 0.1}), is_partial(torch.nn.Linear, {"in_features": 4, "out_features": 2})
    (True, False)
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(
        one.kind in named and one.default is inspect.Parameter.empty and one.name not in init_args for one in parameters
    )


def config_of(value: Any, missing: Missing | None = None, seed: int = 42) -> Any:
    """Return plain values from which `omnitrain train` makes an equal object.

    Args:
        value: The object.
        missing: Takes the reason for each part that has no name, by its place; "???" stands for it in the result.
        seed: That of the trainer; parts that were made with another one say so.
    """
    return _without_seed(_config(value, {} if missing is None else missing, ()), seed)


def _without_seed(value: Any, seed: int) -> Any:
    """Return the values without the seeds of parts that are this one."""
    if isinstance(value, list):
        return [_without_seed(one, seed) for one in value]
    if not isinstance(value, dict):
        return value
    is_part = "class_path" in value and value.get("seed") == seed
    return {key: _without_seed(one, seed) for key, one in value.items() if not (is_part and key == "seed")}


def _config(value: Any, missing: Missing, place: tuple[str | int, ...]) -> Any:
    if isinstance(value, FromEnvironment):
        return value.reference
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        return value
    if id(value) in _made:
        _, path, arguments, seed = _made[id(value)]
        init_args = _config(arguments, missing, (*place, "init_args"))
        return {"class_path": path, **({"init_args": init_args} if init_args else {}), "seed": seed}
    if isinstance(value, enum.Enum):
        path = None if isinstance(value, (str, int)) else _path_of(type(value))
        return _config(value.value, missing, place) if path is None else {"import_path": f"{path}.{value.name}"}
    if isinstance(value, (Path, Duration, torch.device)):
        return str(value)
    if isinstance(value, (Callback, Algorithm)):
        return _part(value, init_arguments(value), missing, place)
    if type(value) in (list, tuple) and len(value) <= _LONGEST:
        return [_config(one, missing, (*place, number)) for number, one in enumerate(value)]
    if isinstance(value, Mapping) and all(type(one) in (str, int, float) for one in value) and len(value) <= _LONGEST:
        return {key: _config(one, missing, (*place, key)) for key, one in value.items()}
    if isinstance(value, functools.partial) and not value.args and is_partial(value.func, value.keywords):
        return _part(value, value.keywords, missing, place, value.func)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _part(value, _changed_fields(value), missing, place)
    if (path := _path_of(value)) is not None:
        return {"import_path": path}
    if isinstance(value, nn.Module) and (arguments := _arguments_of_module(value)) is not None:
        return _part(value, arguments, missing, place)
    return _unnamed(value, missing, place)


def _part(value: Any, arguments: Mapping[str, Any], missing: Missing, place: Any, function: Any = None) -> Any:
    kind = type(value) if function is None else function
    path = _path_of(kind)
    if path is None:
        return _unnamed(value, missing, place, f"{kind.__qualname__} is no name in a module that can be imported")
    values, parameters = dict(arguments), inspect.signature(kind).parameters
    for name, one in parameters.items():
        if one.kind is one.VAR_KEYWORD:
            values |= values.pop(name, {})
        elif one.kind is one.VAR_POSITIONAL and values.pop(name, ()):
            return _unnamed(value, missing, place, f"{kind.__qualname__} was given arguments by position (*{name})")
        elif name in values and values[name] is one.default:
            del values[name]
    init_args = {name: _config(one, missing, (*place, "init_args", name)) for name, one in values.items()}
    return {"class_path": _short(path), **({"init_args": init_args} if init_args else {})}


def _unnamed(value: Any, missing: Missing, place: tuple[str | int, ...], why: str = "") -> str:
    kind = type(value)
    missing[place] = why or f"an object of {kind.__module__}.{kind.__qualname__}, whose arguments are not known"
    return MISSING


def _path_of(value: Any) -> str | None:
    """Return the dotted path by which a class, function or constant of torch is imported; None if there is none."""
    if isinstance(value, torch.dtype):
        return str(value)
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module in ("__main__", "builtins"):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value:
        return None
    is_public = module.startswith("omnitrain.") and name in sys.modules["omnitrain"].__all__
    return f"omnitrain.{name}" if is_public else f"{module}.{name}"  # which stays where it is when a module moves


def _changed_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that its constructor takes and that have not their defaults."""
    found = {}
    for field in dataclasses.fields(value):
        default = field.default_factory() if callable(field.default_factory) else field.default
        now = getattr(value, field.name)
        if field.init and (default is dataclasses.MISSING or not _same(now, default)):
            found[field.name] = now
    return found


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


def _arguments_of_module(module: nn.Module) -> dict[str, Any] | None:
    """Return what a loss of torch was made with; None for a module that holds tensors, or that is none of torch's.

    They are read from the attributes of the same names, and what is made from them must be the same in all attributes.
    """
    kind = type(module)
    if not kind.__module__.startswith("torch.nn.") or module.state_dict() or list(module.children()):
        return None
    has_hooks = any(value for name, value in vars(module).items() if name.endswith("_hooks"))
    attributes = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    names = [name for name in inspect.signature(kind).parameters if name in attributes]
    found = {name: attributes[name] for name in names}
    try:
        again = kind(**found)
    except Exception:
        return None
    same = vars(again).keys() == vars(module).keys() and all(
        _same(vars(again)[name], value) for name, value in attributes.items()
    )
    return found if same and not has_hooks else None


@dataclass(frozen=True)
class TrainerConfig:
    """What a trainer was made with, as a file from which `omnitrain train` makes it again.

    Attributes:
        values: Plain values, with "???" for each part that has no name.
        missing: Why it has none, by its place.
    """

    values: dict[str, Any]
    missing: Missing

    @classmethod
    def of(cls, trainer: Any, given: Mapping[str, Any]) -> TrainerConfig:
        """Return that of a trainer.

        Args:
            trainer: The trainer, whose constructor has not run yet.
            given: The arguments that it was called with, by name.
        """
        given = {name: to_python_scalar(value) for name, value in given.items()}
        kind, missing = type(trainer), Missing()
        path = _path_of(kind)
        if path is None:
            missing["trainer", "class_path"] = f"{kind.__qualname__} is no name in a module that can be imported"
        elif not kind.__init__.__module__.startswith("omnitrain."):
            missing["trainer", "class_path"] = (
                f"the arguments of {path}'s own constructor are not known, only those below"
            )
        is_known = ("trainer", "class_path") not in missing
        values: dict[str, Any] = {"class_path": _short(path or "") if is_known else MISSING}
        for name, value in given.items():
            place = ("trainer", name)
            if name.endswith(("_dataset", "_loader")) and type(value) is list and id(value) not in _made:
                values[name] = _unnamed(value, missing, place, "a list of samples; have a function return it")
            else:
                values[name] = _config(value, missing, place)
        theirs = given.get("training_args", given.get("args"))
        seed = given.get("seed", getattr(theirs, "seed", 42))
        values = _without_seed(values, seed) | ({"seed": seed} if "seed" in given else {})
        return cls({"trainer": _without_secrets(values, missing, ("trainer",))}, missing)

    def text(self) -> str:
        """Return the file."""
        lines = [f"# {'.'.join(map(str, place))}: {why}." for place, why in self.missing.items()]
        if lines:
            lines = [
                "# This run was made in Python, and has parts without a name. Write one for each ??? below:",
                *lines,
            ]
        return "\n".join([*lines, write(self.values)])

    def __str__(self) -> str:
        """Return the file."""
        return self.text()


def _short(path: str) -> str:
    """Return the name that needs no path, for what omnitrain offers."""
    import omnitrain

    name = path.rpartition(".")[2]
    return name if path.startswith("omnitrain.") and name in omnitrain.__all__ else path


def _without_secrets(value: Any, missing: Missing, place: tuple[str | int, ...]) -> Any:
    """Return the values with "???" for each text that looks like a secret, or whose name promises one."""
    if isinstance(value, dict):
        return {key: _without_secrets(one, missing, (*place, key)) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_secrets(one, missing, (*place, number)) for number, one in enumerate(value)]
    if not isinstance(value, str) or value == MISSING or value[:1] in "<[":  # such as `pad_token`
        return value
    rest = _REFERENCE.sub("", value)
    if rest != value and mask_text(rest) == rest:  # what it refers to is not written
        return value
    if is_secret_name(str(place[-1])) or mask_text(value) != value:
        missing[place] = "it looks like a secret, and none is written"
        return MISSING
    return value
