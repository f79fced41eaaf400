from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omnitrain.callbacks.tensorboard import TensorBoardLogger
from omnitrain.errors import MissingExtraError
from omnitrain.progress import Progress


def make_trainer(save_dir: Path | None, step: int = 0, is_main_process: bool = True) -> Any:
    return SimpleNamespace(
        progress=Progress(epoch_size=30, step=step),
        is_main_process=is_main_process,
        save_dir=save_dir,
        resolved_config=lambda: {"batch_size": 8, "optimizer": {"lr": 0.1}},
    )


def run_to(logger: TensorBoardLogger, trainer: Any, last: int) -> None:
    while trainer.progress.step < last:
        trainer.progress.advance(samples=3)
        step = trainer.progress.step
        logger.on_log(trainer, {"step": step, "epoch": step / 10, "loss": 1 / step, "learning_rate": 0.1})
        if step % 5 == 0:
            logger.on_eval_end(trainer, {"eval_loss": 2 / step, "eval_dev_f1": 0.5})


def read(log_dir: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(log_dir))
    events.Reload()
    return events


def scalars(log_dir: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 6)) for event in read(log_dir).Scalars(name)]


def test_logs_and_evaluations_are_scalars(tmp_path):
    logger, trainer = TensorBoardLogger(), make_trainer(tmp_path)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 10)
    logger.on_train_end(trainer)
    log_dir = tmp_path / "tensorboard"
    assert sorted(read(log_dir).Tags()["scalars"]) == [
        *("eval/dev_f1", "eval/loss", "train/epoch", "train/learning_rate", "train/loss")
    ]
    assert scalars(log_dir, "train/loss") == [(step, round(1 / step, 6)) for step in range(1, 11)]
    assert scalars(log_dir, "eval/loss") == [(5, 0.4), (10, 0.2)]


def test_the_settings_are_a_text(tmp_path):
    logger, trainer = TensorBoardLogger(tmp_path), make_trainer(None)
    logger.on_train_start(trainer)
    logger.on_train_end(trainer)
    (event,) = read(tmp_path).Tensors("config/text_summary")
    assert json.loads(event.tensor_proto.string_val[0]) == trainer.resolved_config()


def test_a_resumed_run_has_no_step_twice(tmp_path):
    killed, trainer = TensorBoardLogger(tmp_path), make_trainer(None)
    killed.on_train_start(trainer)
    run_to(killed, trainer, 5)
    killed.on_save_end(trainer)
    run_to(killed, trainer, 8)
    killed._writer.flush()
    resumed, trainer = TensorBoardLogger(tmp_path), make_trainer(None, step=5)
    resumed.on_train_start(trainer)
    run_to(resumed, trainer, 10)
    resumed.on_train_end(trainer)
    killed.on_train_end(trainer)
    assert [step for step, _ in scalars(tmp_path, "train/loss")] == list(range(1, 11))
    assert [step for step, _ in scalars(tmp_path, "eval/loss")] == [5, 10]


def test_a_fresh_run_hides_an_earlier_one_in_the_same_folder(tmp_path):
    for last in (10, 4):
        logger, trainer = TensorBoardLogger(tmp_path), make_trainer(None)
        logger.on_train_start(trainer)
        run_to(logger, trainer, last)
        logger.on_train_end(trainer)
    assert [step for step, _ in scalars(tmp_path, "train/loss")] == [1, 2, 3, 4]


def test_a_checkpoint_puts_the_scalars_on_disk(tmp_path):
    logger, trainer = TensorBoardLogger(tmp_path), make_trainer(None)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 3)
    logger.on_save_end(trainer)
    assert len(scalars(tmp_path, "train/loss")) == 3
    logger.on_train_end(trainer)


def test_a_test_after_the_training_is_there(tmp_path):
    logger, trainer = TensorBoardLogger(tmp_path), make_trainer(None)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 5)
    logger.on_train_end(trainer)
    logger.on_log(trainer, {"test_loss": 0.25})
    assert scalars(tmp_path, "test/loss") == [(5, 0.25)]
    assert len(scalars(tmp_path, "train/loss")) == 5
    assert logger._writer is None


def test_without_a_save_dir_the_folder_is_runs_tensorboard(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger, trainer = TensorBoardLogger(), make_trainer(None)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 1)
    logger.on_train_end(trainer)
    assert scalars(tmp_path / "runs" / "tensorboard", "train/loss") == [(1, 1.0)]


def test_other_ranks_write_nothing(tmp_path):
    logger, trainer = TensorBoardLogger(tmp_path), make_trainer(None, is_main_process=False)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 5)
    logger.on_log(trainer, {"test_loss": 0.25})
    logger.on_save_end(trainer)
    logger.on_train_end(trainer)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensorboard_is_named_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"TensorBoardLogger needs tensorboard.*-e .*\[tensorboard\]"):
        TensorBoardLogger(tmp_path).on_train_start(make_trainer(None))


def test_values_wait_for_a_disk_that_fails_and_are_written_when_it_works_again(tmp_path, monkeypatch, caplog):
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    logger, trainer = TensorBoardLogger(tmp_path), make_trainer(None)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 4)

    def refuses(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "add_scalar", refuses)
        run_to(logger, trainer, 8)
        logger.on_save_end(trainer)
        logger.on_save_end(trainer)
    run_to(logger, trainer, 12)
    logger.on_train_end(trainer)
    assert [step for step, _ in scalars(tmp_path, "train/loss")] == list(range(1, 13))
    told = [record.getMessage() for record in caplog.records if record.name == "omnitrain"]
    assert ["cannot be written" in told[0], "works again" in told[1], len(told)] == [True, True, 2]
