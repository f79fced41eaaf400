"""A signal at any event of a run, the last ones included, ends it with the signal's exit code, and it is resumed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import TRAINERS
from recipes import fit, rows, t16
from torch.nn import functional as F

from omnitrain import Callback, Event


class SignalAtEvent(Callback):
    """Sends a signal to this process at the n-th event of the run that falls into its handlers."""

    order = 97

    def __init__(self, number: int = 0, kind: int = signal.SIGTERM) -> None:
        self.number, self.kind = number, kind
        self.names: list[str] = []


def _counting(event: Event) -> Any:
    def count(self: SignalAtEvent, trainer: Any, *details: Any) -> None:
        self.names.append(str(event))
        if len(self.names) == self.number:
            os.kill(os.getpid(), self.kind)

    return count


for _event in Event:
    if _event not in (Event.EXCEPTION, Event.TRAIN_END):  # before which the handlers are put back
        setattr(SignalAtEvent, f"on_{_event}", _counting(_event))


def make(name: str, folder: Path, *callbacks: Callback) -> Any:
    data = rows(16, torch.float32)
    return TRAINERS[name](
        t16(dtype=torch.float32), data, data, loss_fn=F.mse_loss, epochs=2, batch_size=8, save_dir=folder, log_steps=1,
        eval_steps=3, save_steps=3, callbacks=list(callbacks), progress_bar=False, sanity=False, load_best_at_end=True,
    )  # fmt: skip


@pytest.fixture(scope="module", params=TRAINERS)
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str], Any]:
    """A trainer, the events of its run, and the run left alone."""
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
    resumed = make(name, folder)
    metrics = resumed.train(resume_from="auto")
    for key, tensor in expected.get_model().state_dict().items():
        assert torch.equal(resumed.get_model().state_dict()[key], tensor), where
    assert metrics["stop_reason"] == "epochs", where
    assert metrics["best_step"] == expected.metrics["best_step"], where
    assert [row["step"] for row in metrics["valid"]] == [3, 4], where
    assert metrics["valid"][-1]["eval_loss"] == expected.metrics["valid"][-1]["eval_loss"], where


def test_signal_in_or_after_the_last_step_ends_the_run(straight: tuple[str, list[str], Any], tmp_path: Path) -> None:
    """The step is finished first."""
    name, events, expected = straight
    for event in ("step_start", "eval_batch_start", "save_end", "log") if name == "native" else ("save_end",):
        number, kind = len(events) - events[::-1].index(event), signal.SIGINT if event == "log" else signal.SIGTERM
        check(name, number, event, expected, tmp_path / event, kind)


@pytest.mark.slow
def test_signal_at_any_event_ends_the_run(straight: tuple[str, list[str], Any], tmp_path: Path) -> None:
    name, events, expected = straight
    for number, event in [*enumerate(events, 1)][:: 1 if name == "native" else 4]:
        check(name, number, event, expected, tmp_path / str(number))


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("saves", [True, False])
def test_trainer_is_usable_after_ctrl_c(name: str, saves: bool, tmp_path: Path) -> None:
    """As in a notebook, whose kernel gets SIGINT and lives on: it evaluates, and ends as the undisturbed run."""

    def build(*callbacks: Callback) -> Any:
        data, options = rows(16), {"save_dir": tmp_path / str(len(callbacks))} if saves else {}
        return TRAINERS[name](
            t16(), data, data, loss_fn=F.mse_loss, epochs=2, batch_size=8, callbacks=list(callbacks), **options
        )

    trainer, undisturbed = build(SignalAtEvent(9, signal.SIGINT)), build()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    step = trainer.progress.step
    assert 0 < step < 4 and trainer.stop_reason == "signal" and trainer.evaluate()["eval_loss"] > 0
    assert len(trainer.predict(rows(3)).predictions) == 3
    trainer.train(more=f"{4 - step}ba")
    undisturbed.train()
    assert (trainer.progress.step, trainer.stop_reason) == (4, "max_steps")
    for weight, expected in zip(trainer.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(weight, expected)
