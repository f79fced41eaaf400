"""Paths and addresses that users pass."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from omnitrain.core.errors import ConfigError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


# Bytes of a name in usual file systems.
_MAX_NAME = 255


def local_path(value: Any, name: str) -> Path:
    """Return the user's path, the argument `name`, with `~` expanded.

    Raises:
        ConfigError: If it is not a path, or not on a file system of this machine.

    >>> local_path("runs/a", "save_dir").name
    'a'
    """
    if not isinstance(value, (str, os.PathLike)) or isinstance(os.fspath(value), bytes) or not str(value).strip():
        raise ConfigError(f"`{name}` must be a path, got {value!r}. Pass the path of a file or folder.")
    text = str(os.fspath(value))
    if "\0" in text or any(len(os.fsencode(part)) > _MAX_NAME for part in Path(text).parts):
        raise ConfigError(
            f"`{name}={text!r:.60}...` is no path that a file system takes: it has a NUL, or a name of more than "
            f"{_MAX_NAME} bytes. Pass a shorter one."
        )
    if _URL.match(text):
        raise ConfigError(
            f"`{name}={text!r}` is an address, and a local path is needed here. Pass one. `save_dir`, "
            "`init_from`, `resume_from` and `load_checkpoint` take addresses, as strings."
        )
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # `~name` of an unknown user
        raise ConfigError(f"`{name}={text!r}`: {error} Pass the full path.") from error


def is_address(value: Any) -> bool:
    """Return whether a value is the address of a remote store, and no path.

    >>> is_address("s3://bucket/run"), is_address("runs/a"), is_address("C:/runs")
    (True, False, False)
    """
    return isinstance(value, str) and _ADDRESS.match(value) is not None


def local_folder(address: str) -> Path:
    """Return the local folder of a run whose `save_dir` is an address.

    It is in `$OMNITRAIN_LOCAL_DIR`, or in `omnitrain/runs` of the user's cache; its name is that of the run, and a
    digest of the address.
    """
    folder, address = os.environ.get("OMNITRAIN_LOCAL_DIR"), address.rstrip("/")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "omnitrain" / "runs"
    name = re.sub(r"[^A-Za-z0-9._-]", "_", address.rpartition("/")[2])[:80]
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    return Path(folder or cache).expanduser().absolute() / f"{name}-{digest}"


def run_folder(value: Any, name: str) -> Path:
    """Return the local folder of a run, given its path or address.

    Raises:
        ConfigError: If it is neither.
    """
    return local_folder(value) if is_address(value) else folder_path(value, name)


def folder_path(value: Any, name: str) -> Path:
    """Return the absolute path of a folder, existing or not, so that a change of the working directory has no effect.

    Raises:
        ConfigError: If it is not a local path, or is a file.
    """
    path = local_path(value, name).absolute()
    for parent in (path, *path.parents):
        if parent.exists() and not parent.is_dir():
            raise ConfigError(f"`{name}={str(value)!r}`: {str(parent)!r} is a file. Pass the path of a folder.")
    return path
