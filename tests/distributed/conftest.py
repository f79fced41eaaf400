"""What holds for the tests that start several processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of them."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.distributed)
