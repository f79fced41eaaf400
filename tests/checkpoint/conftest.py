"""Fixtures of the tests of checkpoints."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from resuming import memory_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory, for tests that write much."""
    with memory_folder() as path:
        yield path
