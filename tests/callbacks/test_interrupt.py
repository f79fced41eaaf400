"""Signals to the main process, forked processes and data workers."""

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from omnitrain.callbacks.interrupt import Interrupt
from omnitrain.distributed.ranks import Ranks
from omnitrain.trainer.feed import Feed

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has other signals")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("omnitrain.distributed.signals.time", clock)
    return clock


@pytest.fixture
def trainer() -> Any:
    return SimpleNamespace(control=SimpleNamespace(stop="", save=False, signal=0), save_dir=object())


@pytest.fixture
def interrupt(trainer: Any, clock: Any) -> Iterator[Interrupt]:
    interrupt = Interrupt()
    interrupt.on_train_start(trainer)
    yield interrupt
    interrupt.on_train_end(trainer)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_same_signal_within_half_a_second_is_one_request(
    number: signal.Signals, interrupt: Interrupt, trainer: Any, clock: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    signal.raise_signal(number)
    clock.now += 0.49
    signal.raise_signal(number)
    assert trainer.control.stop == "signal"
    notice = f"{number.name}: finishing the current step. Send it again to exit at once.\n"
    assert capfd.readouterr().err == notice


@pytest.mark.parametrize(("first", "second", "seconds", "error"), [
    (signal.SIGTERM, signal.SIGTERM, 0.51, SystemExit), (signal.SIGINT, signal.SIGINT, 0.51, KeyboardInterrupt),
    (signal.SIGTERM, signal.SIGINT, 0.0, KeyboardInterrupt),
])  # fmt: skip
@pytest.mark.usefixtures("interrupt")
def test_second_signal_exits_at_once(first: int, second: int, seconds: float, error: Any, clock: Any) -> None:
    signal.raise_signal(first)
    clock.now += seconds
    with pytest.raises(error):
        signal.raise_signal(second)


def test_signals_of_an_earlier_run_do_not_count(interrupt: Interrupt, trainer: Any, clock: Any) -> None:
    signal.raise_signal(signal.SIGTERM)
    interrupt.on_train_end(trainer)
    trainer.control.stop = ""
    interrupt.on_train_start(trainer)
    signal.raise_signal(signal.SIGTERM)
    assert trainer.control.stop == "signal"


def in_a_fork(action: Any) -> int:
    """Run a function in a forked process; return its exit code, or minus the signal that ended it."""
    child = os.fork()
    if not child:
        code = 1
        try:
            code = int(action() or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.processes
def test_forked_processes_ignore_all_signals_but_sigterm(interrupt: Interrupt, trainer: Any, capfd: Any) -> None:
    def receive(number: int) -> bool:
        signal.raise_signal(number)
        return bool(trainer.control.stop or trainer.control.save or interrupt.error)

    codes = [in_a_fork(lambda number=number: receive(number)) for number in (signal.SIGINT, signal.SIGUSR1)]
    assert codes == [0, 0] and in_a_fork(lambda: signal.raise_signal(signal.SIGTERM)) == -signal.SIGTERM
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("reason", ["signal", "requested", ""])
def test_until_signal_ends_with_a_loader_error_after_a_signal(reason: str, trainer: Any) -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")

    trainer.control.stop = reason
    feed: Any = SimpleNamespace(_ranks=Ranks(), _lifecycle=trainer)
    is_raised = pytest.raises(RuntimeError, match="killed by signal")
    with nullcontext() if reason == "signal" else is_raised:
        assert list(Feed.until_signal(feed, failing())) == [1]
