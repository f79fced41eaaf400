"""Whether a process of this machine is alive, identified by a record that it wrote of itself.

A process id alone is not enough: it means another process in another container, and ids are reused.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def identify_process() -> dict[str, Any]:
    """Return an identification of this process, unique over machines; JSON types."""
    return {
        "host": platform.node(),
        "boot": _boot(),
        "namespace": _namespace(),
        "pid": os.getpid(),
        "started": _stat_of(os.getpid())[1],
    }


def is_in_same_container(process: Mapping[str, Any]) -> bool:
    """Return whether this process can check another one, which must be in the same container."""
    return (process["boot"], process["namespace"]) == (_boot(), _namespace()) and os.name == "posix"


def is_alive(process: Mapping[str, Any]) -> bool:
    """Return whether a known process has not ended."""
    try:
        os.kill(process["pid"], 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it belongs to another user
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
    """Return the state and the start time of a process, from Linux's /proc."""
    fields = _first_line(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else ("", None)


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace").partition("\n")[0]
    except OSError:
        return ""
