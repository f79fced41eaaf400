"""What holds for every test: no network, one thread, the same random numbers each time, and nothing left behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator

os.environ.update(
    HF_HUB_OFFLINE="1", MPLBACKEND="Agg", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="offline"
)

import hypothesis
import numpy as np
import programs
import pytest
import torch

from omnitrain import descriptors

torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # type: ignore[assignment]  # no power is cut here, and a busy disk takes its time
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")

SUITE = "TEST_SUITE"
"""The variable by which the processes that the tests of one session have started are found."""
KEPT = pytest.StashKey[str]()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed the three generators, so that a test does not depend on those before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def plain_descriptors() -> Iterator[None]:
    """Forget how a test has described metrics, which holds for the whole process."""
    known, described = dict(descriptors._KNOWN), set(descriptors._DESCRIBED)
    yield
    for kept, before in ((descriptors._KNOWN, known), (descriptors._DESCRIBED, described)):
        kept.clear()
        kept.update(before)  # type: ignore[arg-type]


def pytest_configure(config: pytest.Config) -> None:
    """Give the session a folder of its own for what DeepSpeed compiles, and a name to all of its processes."""
    if hasattr(config, "workerinput"):  # one of several: it has these from the process that has started it
        return
    os.environ[SUITE] = uuid.uuid4().hex
    config.stash[KEPT] = os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp(prefix="torch-extensions-")
    cache = getattr(config, "cache", None)
    os.environ["TORCH_EXTENSIONS_KEPT"] = str(cache.mkdir("torch-extensions")) if cache else ""
    if config.getoption("numprocesses", None):  # no tests run here: what ends this process is to end the workers too
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_sessionfinish() -> None:
    """End the process that others were forked from."""
    if "forking" in sys.modules:
        sys.modules["forking"].stop()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what tests have left running, and say so."""
    folder = config.stash.get(KEPT, "")
    if folder:
        left = programs.kill_all(SUITE, os.environ[SUITE])
        if left:
            print("These processes were left by tests, and have been ended:", *left, sep="\n  ", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is no GPU."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
