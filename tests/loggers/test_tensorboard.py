"""Scalars in TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_runs import fake_trainer, run_to, start, train

from omnitrain.loggers.tracking import TensorBoardLogger


@pytest.fixture(autouse=True)
def file_names(monkeypatch):
    """Names of files of one second are in the order of a counter, as text: let it have the same number of digits."""
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(1000))


def read(log_dir: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(log_dir))
    events.Reload()
    return events


def scalars(log_dir: Path, name: str = "train/loss") -> dict[int, float]:
    events = read(log_dir).Scalars(name)
    values = {event.step: round(event.value, 6) for event in events}
    assert len(values) == len(events)  # no step twice
    return values


def test_logs_and_evaluations_are_scalars(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = fake_trainer()
    train(TensorBoardLogger(None), trainer, 10)
    log_dir = tmp_path / "runs" / "tensorboard"  # where there is no `save_dir`
    scores = {"eval/f1", "eval/loss"}
    assert {*read(log_dir).Tags()["scalars"]} == scores | {"train/epoch", "train/loss"}
    assert scalars(log_dir) == {step: round(1 / step, 6) for step in range(1, 11)}
    assert scalars(log_dir, "eval/loss") == {step: round(2 / step, 6) for step in range(2, 11, 2)}
    (event,) = read(log_dir).Tensors("config/text_summary")
    assert json.loads(event.tensor_proto.string_val[0]) == trainer.resolved_config()


def test_resumed_run_has_no_step_twice(tmp_path):
    trainer = fake_trainer()
    killed = start(TensorBoardLogger(tmp_path), trainer, 5)
    assert list(scalars(tmp_path)) == [1, 2, 3, 4, 5]  # each row is flushed
    run_to(killed, trainer, 8)
    killed.on_train_end(trainer)  # so that the rows of the steps 6 to 8 are in the file
    train(TensorBoardLogger(tmp_path), fake_trainer(step=5), 10)
    assert list(scalars(tmp_path)) == list(range(1, 11))
    assert list(scalars(tmp_path, "eval/loss")) == [2, 4, 6, 8, 10]
    train(TensorBoardLogger(tmp_path), fake_trainer(), 4)  # a fresh run hides the earlier one
    assert list(scalars(tmp_path)) == [1, 2, 3, 4]


def test_values_wait_while_a_disk_fails(tmp_path, monkeypatch, caplog):
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    trainer = fake_trainer()
    logger = start(TensorBoardLogger(tmp_path), trainer, 4)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "add_scalar", fail)
        run_to(logger, trainer, 8)
    run_to(logger, trainer, 12)
    logger.on_train_end(trainer)
    assert list(scalars(tmp_path)) == list(range(1, 13))
    messages = [record.getMessage() for record in caplog.records if record.name == "omnitrain"]
    assert len(messages) == 2 and "cannot be written" in messages[0] and "works again" in messages[1]
