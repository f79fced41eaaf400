"""The referee: who is called when, and what is counted. No torch is needed to test it."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from omnitrain.errors import ConfigError
from omnitrain.events import Callback, Control, Event
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
