"""Lookup of modules, classes and functions by dotted paths or short names.

Importing a module runs its code. Without `trust`, only modules that are installed or in the current folder are
imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from omnitrain.core.errors import ConfigError, did_you_mean

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
# Modules whose names need no path, in the order of the search.
SHORT = ("omnitrain", "torch.nn", "torch.optim", "torch.optim.lr_scheduler", "torch.utils.data")


def is_path(text: str) -> bool:
    """Return whether a text is a dotted path.

    >>> is_path("my.models.Net"), is_path("EMA"), is_path("runs/a.b")
    (True, False, False)
    """
    return _PATH.fullmatch(text) is not None


def find(name: str, trust: bool) -> tuple[str, Any]:
    """Return the dotted path of a class, function or object, and the object itself; `name` may be short, as "EMA"."""
    if not is_path(name):
        modules = {module: importlib.import_module(module) for module in SHORT}
        for path, module in modules.items():
            if name.isidentifier() and not name.startswith("_") and hasattr(module, name):
                return f"{path}.{name}", getattr(module, name)
        known = [attr for module in modules.values() for attr in getattr(module, "__all__", dir(module))]
        hint = did_you_mean(name, known)
        raise ConfigError(
            f"there is nothing called {name!r} in {', '.join(SHORT)}.{hint or ' Give the full path: my.Net.'}"
        )
    package = name.partition(".")[0]
    if package == "__main__":
        raise ConfigError(
            f"{name!r} was defined in the program that was started, or in a notebook, where no other program finds it. "
            "Move it into a module."
        )
    if not trust:
        check_trust(name)
    return name, import_object(name)


def import_object(name: str) -> Any:
    """Return the object at a dotted path: attributes of the innermost module that exists."""
    words = name.split(".")
    for end in range(len(words) - 1, 0, -1):
        module = ".".join(words[:end])
        try:
            target: Any = importlib.import_module(module)
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
            if not hasattr(target, word):
                where = getattr(target, "__name__", module)
                raise ConfigError(f"{where} has no {word!r}, which {name!r} needs.{did_you_mean(word, dir(target))}")
            target = getattr(target, word)
        return target
    raise ConfigError(f"there is no module {words[0]!r}, which {name!r} needs.")


def _find_sources(name: str) -> list[str]:
    """Return the files of the first module of a dotted path that has code; none if it is imported already."""
    module = ""
    for word in name.split("."):
        module = f"{module}.{word}" if module else word
        if getattr(sys.modules.get(module), "__file__", None) or module in sys.builtin_module_names:
            return []
        try:
            spec = importlib.util.find_spec(module)  # which imports the package around it: one without code
        except (ImportError, ValueError, AttributeError):
            return []  # importing it raises the error
        if spec is None:
            return []
        if spec.origin not in (None, "namespace"):
            files = [] if spec.origin in ("built-in", "frozen") else [spec.origin or ""]
            return files + list(spec.submodule_search_locations or ())
    return []


def check_trust(name: str) -> None:
    """Raise ConfigError for a dotted path into a module that is neither installed nor in the current folder."""
    paths = {sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
    allowed = [Path(__file__).resolve().parent.parent, *(Path(path).resolve() for path in paths), Path.cwd()]
    for place in filter(None, _find_sources(name)):
        real = Path(place).resolve()
        if not any(real.is_relative_to(folder) for folder in allowed):
            raise ConfigError(
                f"{name!r} is in {os.fspath(real)!r}, which is neither installed nor in the current folder. A "
                "configuration can run any code that it names: pass --trust if you know where this one comes from."
            )


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class or function; none for a function of C without a signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def missing_parameters(function: Any, arguments: Collection[Any]) -> list[str]:
    """Return the parameters without default that arguments, by name or by position, leave out.

    >>> missing_parameters(dict.fromkeys, [1]), missing_parameters(Path.joinpath, {}), missing_parameters(print, [])
    ([], ['self'], [])
    """
    parameters = list(parameters_of(function).values())
    passed = set(arguments) if isinstance(arguments, Mapping) else {par.name for par in parameters[: len(arguments)]}
    return [
        par.name for par in parameters
        if par.kind not in (par.VAR_POSITIONAL, par.VAR_KEYWORD) and par.default is par.empty and par.name not in passed
    ]  # fmt: skip
