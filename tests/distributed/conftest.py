"""What holds for the tests that start several processes."""

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of them; their fixtures run many launches."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.processes)
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Return a folder for all tests of a file."""
    return tmp_path_factory.mktemp(request.path.stem)
