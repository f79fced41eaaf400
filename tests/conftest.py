"""What holds for every test: no network, one thread, the same random numbers each time, and no leftovers."""

import gc
import os
import random
import signal
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", MPLBACKEND="Agg", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="offline"
)

import hypothesis
import numpy as np
import numpy.testing  # of which some versions start a process
import programs
import pytest
import torch

from omnitrain.checkpoint import run_record
from omnitrain.core import metric_format

if os.access("/dev/shm", os.W_OK):  # in memory, a file is made in a hundredth of the time
    memory = os.statvfs("/dev/shm")
    if memory.f_bavail * memory.f_frsize >= 2**32 and not memory.f_flag & os.ST_NOEXEC:  # containers may have 64 MB
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # type: ignore[assignment]  # no power is cut here, and a busy disk is slow
gc.set_threshold(20_000, 20, 20)  # by default, collections take a twentieth of the time
if not torch.cuda.is_available():
    for module in (torch.cuda, torch.xpu, torch.mtia):  # each would keep a formatted stack for a device that is missing
        module.manual_seed_all = lambda seed: None  # type: ignore[assignment]
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")
Git = run_record.Git
programs.answer_git()

SUITE = "TEST_SUITE"
"""The environment variable by which the processes that the tests of one session started are found."""


# --- which tests run, and in which order


NOT_SAMPLED = [f"test_{name}.py" for name in ("docs", "examples", "notebooks", "example_faults")]
"""Files whose slow tests are in no tenth: `.ci/run` has the same pages and scripts elsewhere, or each takes minutes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("omnitrain")
    group.addoption(
        "--tenth", type=int, metavar="N", help="leave out slow tests, but for the tenth with this number modulo 10"
    )
    group.addoption("--shuffle-files", type=int, metavar="SEED", help="run the files in a random order")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[Any], list[Any]]:
    """Look for no examples in the docstrings of tests, which have none."""
    return [collector for collector in (yield) if type(collector) is pytest.Module]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, put the files in order, and leave out what is in another tenth.

    Files that start processes come first, then the largest: they take longest, so both workers end together.
    """
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    seed = config.getoption("--shuffle-files")
    if seed is None:
        busy = {item.path for item in items if item.get_closest_marker("processes")}
        sizes = {path: path.stat().st_size for path in {item.path for item in items}}
        items.sort(key=lambda item: (item.path not in busy, -sizes[item.path]))
    else:
        items.sort(key=lambda item: zlib.crc32(f"{seed} {item.path.name}".encode()))
    tenth = config.getoption("--tenth")
    if tenth is not None:
        left_out = {item for item in items if item.get_closest_marker("slow") and not _is_in_tenth(item, tenth)}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _is_in_tenth(item: pytest.Item, tenth: int) -> bool:
    return item.path.name not in NOT_SAMPLED and zlib.crc32(item.nodeid.encode()) % 10 == tenth % 10


# --- what a test may do


class Guard:
    """Makes a test fail that starts a process or sleeps without the mark `processes`: `make test-fast` has neither."""

    LONGEST_S = 0.1
    """A sleep of at most so many seconds is no wait: loops that poll have some."""
    HARMLESS = ("ctypes.util", "matplotlib.font_manager", "platform", "typeshed_client.finder", "uuid")
    """Modules that learn about the machine from a program, once per process."""

    def __init__(self) -> None:
        self.is_armed = False
        self._sleep = time.sleep
        time.sleep = self.sleep
        sys.addaudithook(self.audit)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_armed or event not in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"):
            return
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__") in ("os", "subprocess", "tests.conftest", "conftest"):
            frame = frame.f_back
        if frame.f_globals.get("__name__") not in self.HARMLESS:
            raise RuntimeError(f"{event} {args[:2]}: a test that starts a process needs the mark `processes`.")

    def sleep(self, seconds: float) -> None:
        if self.is_armed and seconds > self.LONGEST_S and threading.current_thread() is threading.main_thread():
            raise RuntimeError(f"sleep({seconds}): a test that waits needs the mark `processes`.")
        self._sleep(seconds)


GUARD = Guard()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Arm the guard for a test of `make test-fast`, its fixtures included."""
    GUARD.is_armed = not any(map(item.get_closest_marker, ("processes", "slow")))
    try:
        return (yield)
    finally:
        GUARD.is_armed = False


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed the three generators, so that a test does not depend on those before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def plain_descriptors() -> Iterator[None]:
    """Forget how a test described metrics: descriptions hold for the whole process."""
    registries = (metric_format._KNOWN, metric_format._DESCRIBED)
    before = [registry.copy() for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)  # type: ignore[arg-type]


@pytest.fixture(params=["native", "accelerate", "hf"])
def trainer_class(request: pytest.FixtureRequest) -> Any:
    """Each of the three trainers, which are only imported where they are needed: that takes seconds."""
    from marks import TRAINERS

    return TRAINERS[request.param]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command of `omnitrain` in this process; return its exit code, and what it wrote to stdout and stderr."""
    from omnitrain.cli.main import main

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        return main([*map(str, words)]), *capsys.readouterr()

    return run


@pytest.fixture
def real_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask the real git for the commit, instead of the stand-in that answers at once."""
    monkeypatch.setattr(run_record, "Git", Git)


@pytest.fixture(autouse=True, scope="module")
def frozen_imports() -> None:
    """Keep what was imported out of garbage collection, which trainers and searches call: 0.3 s each time."""
    gc.collect()
    gc.freeze()


# --- the session


def pytest_configure(config: pytest.Config) -> None:
    """Give all processes of the session a name."""
    if hasattr(config, "workerinput"):  # one of several: it has the name from the process that started it
        return
    os.environ[SUITE] = uuid.uuid4().hex
    if config.getoption("numprocesses", None):  # no tests run here: what ends this process is to end the workers too
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the processes that tests left running, and report them."""
    if not hasattr(config, "workerinput") and SUITE in os.environ:
        leftovers = programs.kill_all(SUITE, os.environ[SUITE])
        if leftovers:
            print("Tests left these processes, which were ended:", *leftovers, sep="\n  ", file=sys.stderr)
