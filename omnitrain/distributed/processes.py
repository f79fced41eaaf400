"""Identification of processes, and detection of dead ones.

A process id is not enough: it means another process in another container, and ids are reused.
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
        "started": _stat(os.getpid())[1],
    }


def is_in_same_container(process: Mapping[str, Any]) -> bool:
    """Return whether another process is in the same container, where this one can check it."""
    return (process["boot"], process["namespace"]) == (_boot(), _namespace()) and os.name == "posix"


def is_alive(process: Mapping[str, Any]) -> bool:
    """Return whether a known process has not ended."""
    try:
        os.kill(process["pid"], 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it belongs to another user
    (state, current), recorded = _stat(process["pid"]), process.get("started")
    return state not in ("Z", "X") and (recorded is None or current is None or current == recorded)


def _boot() -> str:
    return _first_line("/proc/sys/kernel/random/boot_id") or platform.node()


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str | None]:
    """Return the state and the start time of a process, from Linux's /proc."""
    fields = _first_line(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else ("", None)


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace").partition("\n")[0]
    except OSError:
        return ""
