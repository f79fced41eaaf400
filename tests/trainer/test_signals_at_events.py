"""A signal at any event of a run, the last ones included, ends it with the signal's exit code, and it is resumed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import TRAINERS
from recipes import fit, rows, same, small_trainer, t16, weights
from resuming import KillAtEvent
from torch.nn import functional as F

from omnitrain import Callback


class SignalAtEvent(KillAtEvent):
    """Sends a signal to this process at the n-th event of the run."""

    def __init__(self, number: int = 0, kind: int = signal.SIGTERM) -> None:
        super().__init__(number)
        self.kind = kind

    def interrupt(self, trainer: Any) -> None:
        os.kill(os.getpid(), self.kind)


def make(name: str, folder: Path, *callbacks: Callback) -> Any:
    data = rows(16, torch.float32)
    options = {"loss_fn": F.mse_loss, "batch_size": 8, "epochs": 2, "log_steps": 1, "eval_steps": 3, "save_steps": 3}
    options |= {"save_dir": folder, "callbacks": callbacks, "progress_bar": False, "sanity": False}
    return TRAINERS[name](t16(dtype=torch.float32), data, data, load_best_at_end=True, **options)


@pytest.fixture(scope="module", params=TRAINERS)
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str], Any]:
    record = SignalAtEvent()
    trainer = fit(make(request.param, tmp_path_factory.mktemp("straight"), record))
    return request.param, record.names, trainer


def check(name: str, number: int, event: str, expected: Any, folder: Path, kind: int = signal.SIGTERM) -> None:
    where = f"{name}, event {number} ({event})"
    record, handlers = SignalAtEvent(number, kind), [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)]
    cut = make(name, folder, record)
    with pytest.raises(KeyboardInterrupt if kind == signal.SIGINT else SystemExit) as end:
        cut.train()
    assert kind == signal.SIGINT or end.value.code == 143, where
    assert cut.stop_reason == "signal" and cut.progress.step == record.names.count("step_start"), where
    assert [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)] == handlers, where
    resumed = fit(make(name, folder), resume_from="auto")
    metrics, best = resumed.metrics, expected.metrics
    assert same(weights(resumed.get_model()), weights(expected.get_model())), where
    assert (metrics["stop_reason"], metrics["best_step"]) == ("epochs", best["best_step"]), where
    assert [row["step"] for row in metrics["valid"]] == [3, 4], where
    assert metrics["valid"][-1]["eval_loss"] == best["valid"][-1]["eval_loss"], where


def test_signal_in_or_after_the_last_step_ends_the_run(straight: tuple[str, list[str], Any], tmp_path: Path) -> None:
    name, events, expected = straight
    for event in ("step_start", "eval_batch_start", "save_end", "log") if name == "native" else ("save_end",):
        number, kind = len(events) - events[::-1].index(event), signal.SIGINT if event == "log" else signal.SIGTERM
        check(name, number, event, expected, tmp_path / event, kind)


@pytest.mark.slow
def test_signal_at_any_event_ends_the_run(straight: tuple[str, list[str], Any], tmp_path: Path) -> None:
    name, events, expected = straight
    handled = [*enumerate(events, 1)][:-1]  # at the end of the run the handlers are restored
    for number, event in handled[:: 1 if name == "native" else 4]:
        check(name, number, event, expected, tmp_path / str(number))


@pytest.mark.parametrize("saves", [True, False])
def test_trainer_is_usable_after_ctrl_c(trainer_class: Any, saves: bool, tmp_path: Path) -> None:
    """As in a notebook, whose kernel gets SIGINT and lives on: it evaluates, and ends as the undisturbed run."""
    options = {"data": rows(16), "eval_dataset": rows(16), "batch_size": 8, "kind": trainer_class}
    folder = {"save_dir": tmp_path} if saves else {}
    trainer = small_trainer(callbacks=[SignalAtEvent(9, signal.SIGINT)], **options, **folder)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    step = trainer.progress.step
    assert 0 < step < 4 and trainer.stop_reason == "signal" and trainer.evaluate()["eval_loss"] > 0
    assert len(trainer.predict(rows(3)).predictions) == 3
    trainer.train(more=f"{4 - step}ba")
    assert (trainer.progress.step, trainer.stop_reason) == (4, "max_steps")
    assert same(weights(trainer.model), weights(fit(small_trainer(**options)).model))
