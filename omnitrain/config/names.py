"""What the names in a configuration mean: modules, classes and functions, by dotted paths or short names.

Importing a module runs its code. What a file names is imported without a question only if it is installed, or lies in
the current folder.
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
SHORT = ("omnitrain", "torch.nn", "torch.optim", "torch.optim.lr_scheduler", "torch.utils.data")
"""Modules whose names need no path, in the order in which they are asked."""


def is_path(text: str) -> bool:
    """Return whether a text is a dotted path.

    >>> is_path("my.models.Net"), is_path("EMA"), is_path("runs/a.b")
    (True, False, False)
    """
    return _PATH.fullmatch(text) is not None


def short_names() -> list[str]:
    """Return the names that need no path."""
    found = []
    for name in SHORT:
        module = importlib.import_module(name)
        found += [one for one in getattr(module, "__all__", dir(module)) if not one.startswith("_")]
    return found


def find(name: str, trust: bool) -> tuple[str, Any]:
    """Return the dotted path of a class, function or object, and the thing itself.

    Args:
        name: A dotted path, or a short name such as "EMA".
        trust: Whether modules may be imported that are neither installed nor in the current folder.

    Raises:
        ConfigError: If there is nothing of this name, or its module is not trusted.
    """
    if not is_path(name):
        for home in SHORT:
            module = importlib.import_module(home)
            if name.isidentifier() and not name.startswith("_") and hasattr(module, name):
                return f"{home}.{name}", getattr(module, name)
        hint = did_you_mean(name, short_names())
        raise ConfigError(
            f"there is nothing called {name!r} in {', '.join(SHORT)}.{hint or ' Give the path of your own: my.Net.'}"
        )
    package = name.partition(".")[0]
    if package == "__main__":
        raise ConfigError(
            f"{name!r} was defined in the program that was started, or in a notebook, where no other program finds it. "
            "Move it into a module."
        )
    if not trust:
        check_trust(name)
    from omnitrain.config.instantiation import imported

    return name, imported(name)


def _places_of(name: str) -> list[str]:
    """Return the files and folders of the first module of a dotted path that has code, and does not run already."""
    module = ""
    for word in name.split("."):
        module = f"{module}.{word}" if module else word
        if getattr(sys.modules.get(module), "__file__", None) or module in sys.builtin_module_names:
            return []
        try:
            spec = importlib.util.find_spec(module)  # which imports the package around it: one without code
        except (ImportError, ValueError, AttributeError):
            return []  # importing it will say so
        if spec is None:
            return []
        if spec.origin not in (None, "namespace"):
            own = [] if spec.origin in ("built-in", "frozen") else [spec.origin or ""]
            return own + list(spec.submodule_search_locations or ())
    return []


def check_trust(name: str) -> None:
    """Raise ConfigError for a dotted path into a module that is neither installed nor in the current folder."""
    places = _places_of(name)
    allowed = [*_installed(), Path.cwd()]
    for place in filter(None, places):
        real = Path(place).resolve()
        if not any(real.is_relative_to(one) for one in allowed):
            raise ConfigError(
                f"{name!r} is in {os.fspath(real)!r}, which is neither installed nor in the current folder. A "
                "configuration can run any code that it names: pass --trust if you know where this one comes from."
            )


def _installed() -> Iterable[Path]:
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
    own = Path(__file__).resolve().parent.parent
    return [own, *(Path(path).resolve() for path in paths)]
