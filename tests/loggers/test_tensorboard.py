"""Scalars in TensorBoard."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omnitrain.core.errors import MissingExtraError
from omnitrain.core.progress import Progress
from omnitrain.loggers.tensorboard import TensorBoardLogger


def make_trainer(save_dir: Path | None = None, step: int = 0, is_main_process: bool = True) -> Any:
    return SimpleNamespace(
        progress=Progress(epoch_size=30, step=step), is_main_process=is_main_process, save_dir=save_dir,
        resolved_config=lambda: {"batch_size": 8, "optimizer": {"lr": 0.1}},
    )  # fmt: skip


def start(folder: Path | None, trainer: Any, last: int = 0) -> TensorBoardLogger:
    """Begin a run and train to step `last`."""
    logger = TensorBoardLogger(folder)
    logger.on_train_start(trainer)
    run_to(logger, trainer, last)
    return logger


def run_to(logger: TensorBoardLogger, trainer: Any, last: int) -> None:
    while trainer.progress.step < last:
        trainer.progress.advance(samples=3)
        step = trainer.progress.step
        logger.on_log(trainer, {"step": step, "epoch": step / 10, "loss": 1 / step, "learning_rate": 0.1})
        if step % 5 == 0:
            logger.on_eval_end(trainer, {"eval_loss": 2 / step, "eval_dev_f1": 0.5})


def train(folder: Path | None, trainer: Any, last: int = 0) -> TensorBoardLogger:
    logger = start(folder, trainer, last)
    logger.on_train_end(trainer)
    return logger


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
    trainer = make_trainer()
    train(None, trainer, 10)
    log_dir = tmp_path / "runs" / "tensorboard"  # where there is no `save_dir`
    scores = {"eval/dev_f1", "eval/loss"}
    assert {*read(log_dir).Tags()["scalars"]} == scores | {"train/epoch", "train/learning_rate", "train/loss"}
    assert scalars(log_dir) == {step: round(1 / step, 6) for step in range(1, 11)}
    assert scalars(log_dir, "eval/loss") == {5: 0.4, 10: 0.2}
    (event,) = read(log_dir).Tensors("config/text_summary")
    assert json.loads(event.tensor_proto.string_val[0]) == trainer.resolved_config()


def test_resumed_run_has_no_step_twice(tmp_path):
    trainer = make_trainer()
    killed = start(tmp_path, trainer, 5)
    killed.on_save_end(trainer)
    assert list(scalars(tmp_path)) == [1, 2, 3, 4, 5]  # a checkpoint flushes
    run_to(killed, trainer, 8)
    killed.on_train_end(trainer)  # so that the rows of the steps 6 to 8 are in the file
    train(tmp_path, make_trainer(step=5), 10)
    assert list(scalars(tmp_path)) == list(range(1, 11))
    assert list(scalars(tmp_path, "eval/loss")) == [5, 10]
    train(tmp_path, make_trainer(), 4)  # a fresh run hides the earlier one
    assert list(scalars(tmp_path)) == [1, 2, 3, 4]


def test_other_ranks_need_no_package_and_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    trainer = make_trainer(is_main_process=False)
    logger = start(tmp_path, trainer, 5)
    logger.on_log(trainer, {"test_loss": 0.25})
    logger.on_save_end(trainer)
    logger.on_train_end(trainer)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(MissingExtraError, match=r"TensorBoardLogger needs tensorboard.*-e .*\[tensorboard\]"):
        TensorBoardLogger(tmp_path).on_train_start(make_trainer())


def test_values_wait_while_a_disk_fails(tmp_path, monkeypatch, caplog):
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    trainer = make_trainer()
    logger = start(tmp_path, trainer, 4)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "add_scalar", fail)
        run_to(logger, trainer, 8)
        logger.on_save_end(trainer)
        logger.on_save_end(trainer)
    run_to(logger, trainer, 12)
    logger.on_train_end(trainer)
    assert list(scalars(tmp_path)) == list(range(1, 13))
    messages = [record.getMessage() for record in caplog.records if record.name == "omnitrain"]
    assert len(messages) == 2 and "cannot be written" in messages[0] and "works again" in messages[1]
