"""What became of a process of this machine, as others have written down which it was.

A number alone says little: it means another process in another container, and is used again.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["is_alive", "is_known", "own_process"]


def own_process() -> dict[str, Any]:
    """Return what tells this process from all others, on this machine or another; JSON types."""
    return {
        "host": platform.node(),
        "boot": _boot(),
        "namespace": _namespace(),
        "pid": os.getpid(),
        "started": _stat_of(os.getpid())[1],
    }


def is_known(process: Mapping[str, Any]) -> bool:
    """Return whether this process can tell what became of another one, which has to be in the same container."""
    return (process["boot"], process["namespace"]) == (_boot(), _namespace()) and os.name == "posix"


def is_alive(process: Mapping[str, Any]) -> bool:
    """Return whether a process that is known has not ended."""
    try:
        os.kill(process["pid"], 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is another user's
    (state, found), started = _stat_of(process["pid"]), process.get("started")
    return state not in ("Z", "X") and (started is None or found is None or found == started)


def _boot() -> str:
    return _first_line("/proc/sys/kernel/random/boot_id") or platform.node()


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _stat_of(pid: int) -> tuple[str, str | None]:
    """Return the state of a process and when it started, as Linux has them."""
    fields = _first_line(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else ("", None)


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace").partition("\n")[0]
    except OSError:
        return ""
