"""Lookup of modules, classes and functions by dotted paths or short names.

Importing a module runs its code. Without `trust`, only modules that are installed or in the current folder are
imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
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


def short_names() -> list[str]:
    """Return the names that need no path."""
    exported = []
    for name in SHORT:
        module = importlib.import_module(name)
        exported += [attr for attr in getattr(module, "__all__", dir(module)) if not attr.startswith("_")]
    return exported


def find(name: str, trust: bool) -> tuple[str, Any]:
    """Return the dotted path of a class, function or object, and the object itself.

    Args:
        name: A dotted path, or a short name such as "EMA".
        trust: Whether modules may be imported that are neither installed nor in the current folder.

    Raises:
        ConfigError: If there is nothing of this name, or its module is not trusted.
    """
    if not is_path(name):
        for module_name in SHORT:
            module = importlib.import_module(module_name)
            if name.isidentifier() and not name.startswith("_") and hasattr(module, name):
                return f"{module_name}.{name}", getattr(module, name)
        hint = did_you_mean(name, short_names())
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
    from omnitrain.config.instantiation import import_object

    return name, import_object(name)


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
    places = _find_sources(name)
    allowed = [*_installed_folders(), Path.cwd()]
    for place in filter(None, places):
        real = Path(place).resolve()
        if not any(real.is_relative_to(folder) for folder in allowed):
            raise ConfigError(
                f"{name!r} is in {os.fspath(real)!r}, which is neither installed nor in the current folder. A "
                "configuration can run any code that it names: pass --trust if you know where this one comes from."
            )


def _installed_folders() -> Iterable[Path]:
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
    package = Path(__file__).resolve().parent.parent
    return [package, *(Path(path).resolve() for path in paths)]
