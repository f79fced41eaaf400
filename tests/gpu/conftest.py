"""Where these tests run: on the GPU, and those that ask for a `device` on the CPU where there is no GPU.

So a name that has changed is noticed without a GPU, by the native trainer in `make test` and by HFTrainer in
`make test-all`. What is tested is what the GPU does.
"""

from pathlib import Path

import pytest
import torch
from devices import KINDS

HERE = Path(__file__).resolve().parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is no GPU, leave HFTrainer to `make test-all`, and leave out AccelerateTrainer."""
    for item in items:
        if HERE in item.path.parents and not torch.cuda.is_available():
            ids = item.name.partition("[")[2].rstrip("]").split("-")
            if "hf" in ids or "hf" in item.path.name:
                item.add_marker(pytest.mark.slow)
            if "accelerate" in ids:
                item.add_marker(pytest.mark.skip(reason="AccelerateTrainer needs a GPU here"))


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The GPU; without one, the CPU."""
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("runs on the GPU here")
    return torch.device(request.param)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which trainer; skipped where a package that it needs is not there."""
    if request.param == "hf":
        pytest.importorskip("transformers", reason="HFTrainer needs transformers, which is not installed")
    return request.param
