"""Callbacks that log metrics to files, trackers and the terminal."""

from typing import Any


def __getattr__(name: str) -> Any:
    from omnitrain import _load_export

    return _load_export(__name__, name)
