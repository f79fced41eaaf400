"""Where these tests run: on the GPU, and those that ask for a `device` on the CPU where there is no GPU.

So a name that has changed is noticed without a GPU. What is tested is what the GPU does.
"""

from __future__ import annotations

import pytest
import torch
from devices import KINDS


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
