"""What holds for every test: no network, one thread, the same random numbers each time."""

from __future__ import annotations

import os
import random

os.environ.update(
    HF_HUB_OFFLINE="1", MPLBACKEND="Agg", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="offline"
)

import hypothesis
import numpy as np
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed the three generators, so that a test does not depend on those before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
