"""Lifecycle: the order of callbacks, their errors and state, and the counts of a run."""

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recipes import callback

from omnitrain.core.errors import ConfigError, DistributedError
from omnitrain.core.events import INNER_STEP_EVENTS, Callback, Event
from omnitrain.core.objective import Objective
from omnitrain.trainer.lifecycle import Lifecycle


def lifecycle(*callbacks: Callback) -> Lifecycle:
    return Lifecycle(SimpleNamespace(), callbacks, Objective("loss"))  # type: ignore[arg-type]


class Named(Callback):
    def __init__(self, name: str, order: int, calls: list[str]) -> None:
        self.name, self.order, self.calls = name, order, calls

    def on_step_end(self, trainer: Any) -> None:
        self.calls.append(self.name)


class Failing(Callback):
    def __init__(self, on_error: str = "raise", error: type[BaseException] = RuntimeError, calls: int = 0) -> None:
        self.on_error, self.error, self.calls = on_error, error, calls

    def on_step_end(self, trainer: Any) -> None:
        self.calls += 1
        raise self.error("boom")

    def log_values(self, trainer: Any) -> dict[str, float]:
        return {"calls": self.calls}

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def test_callbacks_run_by_order_which_is_logged_once(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, clock = list[str](), iter(range(100))
    run = lifecycle(*(Named(name, order, calls) for name, order in [("c", 40), ("a", 10), ("b", 10), ("0", 0)]))
    monkeypatch.setattr("omnitrain.trainer.lifecycle.time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    caplog.set_level(logging.INFO, "omnitrain")
    run.begin_train()
    run.end_step(samples=1)
    run.end_step(samples=1)
    assert [(listener.seconds, listener.calls) for listener in run.listeners] == [(2.0, 2)] * 4
    run.end_train(failed=False)
    assert calls == ["0", "a", "b", "c"] * 2
    assert caplog.text.count("Named (0), Named (10), Named (10), Named (40)") == 1
    assert "Time in callbacks: Named 2.000 s (2 calls)" in caplog.text


def test_error_at_the_end_does_not_hide_the_first(caplog: pytest.LogCaptureFixture) -> None:
    run = lifecycle(callback(on_train_end=lambda trainer: 1 / 0))
    run.end_train(failed=True)
    assert "Functions.on_train_end failed" in caplog.text
    with pytest.raises(ZeroDivisionError):
        run.end_train(failed=False)


def test_callback_state_is_restored_by_class(caplog: pytest.LogCaptureFixture) -> None:
    old, counters = lifecycle(Failing(calls=3), Failing(calls=4)), (Failing(), Failing())
    old.progress.advance(samples=5)
    new, state = lifecycle(Callback(), *counters), old.state_dict()
    new.load_state_dict({**state, "metrics": old.metrics.to_dict()})
    with contextlib.ExitStack() as undo:
        new.load_callbacks(state["callbacks"], undo)
        undo.pop_all()
    assert ([counter.calls for counter in counters], new.progress.samples) == ([3, 4], 5)
    lifecycle().load_callbacks(state["callbacks"], contextlib.ExitStack())
    assert "Failing', which is not among the callbacks" in caplog.text


def test_on_error_warn_logs_a_traceback_and_each_10th_failure(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    run = lifecycle(Failing("warn"), Named("next", 10, calls))
    for _ in range(25):
        run.end_step(samples=1)
    assert len(calls) == 25 and run.listeners[0].failures == 25
    reports = [record for record in caplog.records if "Failing.on_step_end failed" in record.message]
    assert len(reports) == 2 and reports[0].exc_info is not None and "the 10th failure" in reports[1].message
    run.end_train(failed=False)
    assert "The callback Failing failed 25 times in this run." in caplog.text


def test_on_error_disable_unsubscribes_and_keeps_state(caplog: pytest.LogCaptureFixture) -> None:
    bad, row = Failing("disable"), dict[str, Any]()
    run = lifecycle(bad)
    for _ in range(3):
        run.end_step(samples=1)
    run.add_values(row)
    assert bad.calls == 1 and row == {} and caplog.text.count("Traceback") == 1
    assert run.state_dict()["callbacks"] == [{"callback": "Failing", "turn": 0, "state": {"calls": 1}}]
    run.end_train(failed=False)
    assert "Failing failed once in this run, and was called no more after that" in caplog.text


def test_log_values_are_numbers_under_new_names() -> None:
    def adding(values: Any) -> Lifecycle:
        return lifecycle(callback(log_values=lambda trainer: values))

    row = {"loss": 0.5}
    with pytest.raises(ConfigError, match=r"Functions\.log_values returns 'loss', which the row of logs has already"):
        adding({"loss": 1.0}).add_values(row)
    for values in (3, {"a": "b"}, {"a": [1.0, 2.0]}):
        with pytest.raises(TypeError, match="must return a dict of numbers"):
            adding(values).add_values(row)
    adding({"half": torch.tensor(0.5)}).add_values(row)
    assert row == {"loss": 0.5, "half": 0.5} and type(row["half"]) is float


def test_callbacks_and_their_on_error_are_validated() -> None:
    with pytest.raises(ConfigError, match=r"subclass of omnitrain\.Callback"):
        lifecycle(print)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Failing.on_error` must be one of 'raise', 'warn', 'disable', got 'ignore'"):
        lifecycle(Failing("ignore"))
    for error in (KeyboardInterrupt, SystemExit, DistributedError):  # which `on_error` does not concern
        with pytest.raises(error):
            lifecycle(Failing("warn", error)).end_step(samples=1)


def test_batch_events_are_off_without_listeners() -> None:
    idle = lifecycle(Named("a", 10, []))
    assert idle.emit_in_step is None and idle.emit_in_evaluation is None
    run = lifecycle(callback(on_batch_start=print, on_eval_batch_end=print))
    assert run.emit_in_step == run.emit_in_evaluation == run.emit
    with run.suppress_events():
        assert run.emit_in_step is None and run.emit_in_evaluation is None
    assert run.emit_in_step == run.emit_in_evaluation == run.emit


def test_local_requests_follow_listeners_inside_of_steps() -> None:
    assert all(callable(getattr(Callback, f"on_{event}")) and event.name in (Event.__doc__ or "") for event in Event)
    for event in (*INNER_STEP_EVENTS, Event.STEP_START, Event.STEP_END):
        for asks_alone in (True, False):
            listener = callback(asks_alone=asks_alone, **{f"on_{event}": print})
            assert lifecycle(listener).has_rank_local_requests is asks_alone
    assert not lifecycle(callback(on_eval_batch_end=print)).has_rank_local_requests
