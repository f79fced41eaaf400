"""Algorithms: objects that change the training itself, one per file."""

from typing import Any


def __getattr__(name: str) -> Any:
    from omnitrain import _load_export

    return _load_export(__name__, name)
