"""The referee: who is called when, and what is counted. No torch is needed to test it."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from omnitrain.errors import ConfigError, DistributedError
from omnitrain.events import INSIDE_OF_STEPS, Callback, Control, Event
from omnitrain.objective import Objective
from omnitrain.run.lifecycle import Lifecycle


def lifecycle(*callbacks: Callback) -> Lifecycle:
    return Lifecycle(SimpleNamespace(), callbacks, Objective("loss"))  # type: ignore[arg-type]


class Named(Callback):
    def __init__(self, name: str, order: int, calls: list[str]) -> None:
        self.name, self.order, self.calls = name, order, calls

    def on_step_end(self, trainer: Any) -> None:
        self.calls.append(self.name)


def test_callbacks_run_by_order_then_as_given_and_the_order_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    run = lifecycle(*(Named(name, order, calls) for name, order in [("c", 40), ("a", 10), ("b", 10), ("0", 0)]))
    with caplog.at_level(logging.INFO, logger="omnitrain"):
        run.begin_train()
        run.end_step(samples=1)
        run.end_step(samples=1)
    assert calls == ["0", "a", "b", "c"] * 2
    assert caplog.text.count("Named (0), Named (10), Named (10), Named (40)") == 1


def test_every_event_has_a_method_and_the_docstring_prints_it() -> None:
    for event in Event:
        assert callable(getattr(Callback, f"on_{event}"))
        assert event.name in (Event.__doc__ or "")


def test_a_failing_callback_is_named_and_the_failure_goes_on() -> None:
    class Bad(Callback):
        def on_step_end(self, trainer: Any) -> None:
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom") as caught:
        lifecycle(Bad()).end_step(samples=1)
    assert caught.value.__notes__ == ["Raised by the callback Bad.on_step_end."]


def test_the_end_after_a_failure_cannot_hide_the_failure(caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Callback):
        def on_train_end(self, trainer: Any) -> None:
            raise RuntimeError("second")

    run = lifecycle(Bad())
    run.end_train(failed=True)
    assert "Bad.on_train_end failed" in caplog.text
    with pytest.raises(RuntimeError, match="second"):
        run.end_train(failed=False)


def test_a_request_is_taken_once() -> None:
    control = Control(evaluate=True)
    assert control.taken("evaluate").evaluate and not control.taken("evaluate").evaluate


def test_an_epoch_that_was_cut_short_neither_counts_nor_has_a_row() -> None:
    run = lifecycle()
    run.progress.epoch_size = 10
    run.end_step(samples=4)
    run.end_epoch(complete=False, row={"train_loss": 1.0})
    assert run.progress.epoch == 0 and run.progress.samples_in_epoch == 4
    assert run.metrics["train_metrics_history"] == []
    run.end_step(samples=6)
    run.end_epoch(complete=True, row={"train_loss": 0.5})
    assert run.progress.epoch == 1 and run.progress.samples_in_epoch == 0
    assert run.metrics["train_metrics_history"] == [{"epoch": 1, "step": 2, "train_loss": 0.5}]


def test_the_evaluation_before_training_does_not_use_up_patience() -> None:
    run = lifecycle()
    run.evaluated({"eval_loss": 1.0}, counts=False)
    run.end_step(samples=1)
    run.evaluated({"eval_loss": 2.0})
    assert run.objective.evaluations_without_gain == 1 and run.metrics["best_step"] == 0


def test_state_goes_to_the_callback_of_the_same_class(caplog: pytest.LogCaptureFixture) -> None:
    class Counter(Callback):
        seen = 0

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    first, second = Counter(), Counter()
    first.seen, second.seen = 3, 4
    old = lifecycle(first, second)
    old.end_step(samples=5)
    new_first, new_second = Counter(), Counter()
    new = lifecycle(Callback(), new_first, new_second)
    kept = old.state_dict()
    new.load_state_dict({**kept, "metrics": old.metrics.to_dict()})
    with contextlib.ExitStack() as undo:
        new.load_callbacks(kept["callbacks"], undo)
        undo.pop_all()
    assert (new_first.seen, new_second.seen, new.progress.samples) == (3, 4, 5)
    lifecycle().load_callbacks(kept["callbacks"], contextlib.ExitStack())
    assert "Counter', which is not among the callbacks" in caplog.text


def test_something_that_is_no_callback_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"subclass of omnitrain\.Callback"):
        lifecycle(print)  # type: ignore[arg-type]


class Failing(Callback):
    """Fails in every step; its state is the number of its calls."""

    def __init__(self, on_error: str, error: type[BaseException] = RuntimeError) -> None:
        self.on_error, self.error, self.calls = on_error, error, 0

    def on_step_end(self, trainer: Any) -> None:
        self.calls += 1
        raise self.error("boom")

    def log_values(self, trainer: Any) -> dict[str, float]:
        return {"calls": self.calls}

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}


def test_a_failure_that_only_warns_is_reported_with_its_traceback_and_then_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[str] = []
    run = lifecycle(Failing("warn"), Named("next", 10, calls))
    for _ in range(25):
        run.end_step(samples=1)
    assert len(calls) == 25 and run.listeners[0].failures == 25
    reports = [one for one in caplog.records if "Failing.on_step_end failed" in one.message]
    assert len(reports) == 2 and reports[0].exc_info is not None and "the 10th failure" in reports[1].message
    run.end_train(failed=False)
    assert "The callback Failing failed 25 times in this run." in caplog.text


def test_a_disabled_callback_is_called_no_more_and_named_at_the_end_and_keeps_its_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = Failing("disable")
    run = lifecycle(bad)
    for _ in range(3):
        run.end_step(samples=1)
    row: dict[str, Any] = {}
    run.add_values(row)
    assert bad.calls == 1 and row == {} and caplog.text.count("Traceback") == 1
    assert run.state_dict()["callbacks"] == [{"callback": "Failing", "turn": 0, "state": {"calls": 1}}]
    run.end_train(failed=False)
    assert "Failing failed once in this run, and was called no more after that" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, DistributedError])
def test_no_policy_holds_back_the_end_of_a_program_or_an_error_of_another_rank(error: type[BaseException]) -> None:
    with pytest.raises(error):
        lifecycle(Failing("warn", error)).end_step(samples=1)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Failing.on_error must be one of 'raise', 'warn', 'disable', got 'ignore'"):
        lifecycle(Failing("ignore"))


def test_the_time_in_each_callback_is_summed_up_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100))
    run = lifecycle(Named("a", 10, []), Callback())
    monkeypatch.setattr("omnitrain.run.lifecycle.time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    for _ in range(3):
        run.end_step(samples=1)
    assert [(one.seconds, one.calls) for one in run.listeners] == [(3.0, 3), (0.0, 0)]
    with caplog.at_level(logging.INFO, logger="omnitrain"):
        run.end_train(failed=False)
    assert "Time in callbacks: Named 3.000 s (3 calls)." in caplog.text


def test_events_of_micro_batches_cost_one_look_where_nobody_listens_and_a_rehearsal_tells_nobody() -> None:
    class Batches(Callback):
        def on_batch_start(self, trainer: Any, batch: Any, number: int) -> None: ...

        def on_eval_batch_end(self, trainer: Any, batch: Any, output: Any) -> None: ...

    idle = lifecycle(Named("a", 10, []))
    assert idle.inside_of_step is None and idle.inside_of_evaluation is None
    run = lifecycle(Batches())
    assert run.inside_of_step == run.inside_of_evaluation == run.emit
    with run.silent():
        assert run.inside_of_step is None and run.inside_of_evaluation is None
    assert run.inside_of_step == run.inside_of_evaluation == run.emit


@pytest.mark.parametrize("event", [*INSIDE_OF_STEPS, Event.STEP_START, Event.STEP_END])
def test_who_listens_inside_of_steps_may_ask_alone_unless_it_says_otherwise(event: Event) -> None:
    kind = type("Listens", (Callback,), {f"on_{event}": lambda self, trainer, *details: None})
    listens, quiet = kind(), kind()
    quiet.asks_alone = False
    assert lifecycle(listens).asks_alone and not lifecycle(quiet).asks_alone
    assert not lifecycle(type("Others", (Callback,), {"on_eval_batch_end": lambda *details: None})()).asks_alone
