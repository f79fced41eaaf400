from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omnitrain.callbacks.csv import CsvLogger
from omnitrain.events import Histogram
from omnitrain.progress import Progress

WEIGHTS = Histogram(edges=[0, 2, 4], counts=[1, 1], low=1.0, high=3.0, total=4.0, squares=10.0)


def make_trainer(save_dir: Path | None, step: int = 0, is_main_process: bool = True) -> Any:
    progress = Progress(epoch_size=30, step=step)
    lifecycle = SimpleNamespace(is_closing=False, saved_at=None)
    return SimpleNamespace(progress=progress, is_main_process=is_main_process, save_dir=save_dir, lifecycle=lifecycle)


def run_to(logger: CsvLogger, trainer: Any, last: int) -> None:
    """Train to step `last`: 10 steps an epoch, a log every 2 steps, an evaluation at each epoch's end."""
    progress = trainer.progress
    while progress.step < last:
        progress.advance(samples=3)
        if progress.step % 2 == 0:
            logger.on_log(trainer, {"step": progress.step, "epoch": progress.epochs, "loss": 1 / progress.step})
        if progress.is_epoch_consumed:
            progress.close_epoch(complete=True)
            logger.on_eval_end(trainer, {"eval_loss": 2 / progress.step, "eval, odd": 0.5})


def train(save_dir: Path, last: int) -> None:
    logger, trainer = CsvLogger(), make_trainer(save_dir)
    logger.on_train_start(trainer)
    run_to(logger, trainer, last)
    logger.on_train_end(trainer)


def read(save_dir: Path) -> list[dict[str, str]]:
    with (save_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_have_a_column_for_each_value_whenever_it_appears(tmp_path):
    train(tmp_path, 12)
    rows = read(tmp_path)
    assert list(rows[0]) == ["kind", "step", "epoch", "loss", "eval_loss", "eval, odd", "final"]
    assert [(row["kind"], row["step"]) for row in rows] == [
        *(("train", str(step)) for step in (2, 4, 6, 8, 10)),
        ("eval", "10"),
        ("train", "12"),
    ]
    assert rows[0]["loss"] == "0.5" and rows[0]["eval_loss"] == ""
    assert rows[5]["loss"] == "" and rows[5]["eval, odd"] == "0.5"
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.csv"]


def test_columns_are_in_the_order_of_their_descriptors(tmp_path):
    logger, trainer = CsvLogger(), make_trainer(tmp_path)
    logger.on_train_start(trainer)
    logger.on_log(trainer, {"samples_per_second": 3.0, "grad_norm": 1.0, "loss": 0.5, "accuracy": 1.0})
    logger.on_train_end(trainer)
    columns = ["kind", "step", "epoch", "loss", "accuracy", "grad_norm", "samples_per_second", "final"]
    assert list(read(tmp_path)[0]) == columns


def test_pandas_reads_numbers_and_what_is_not_finite(tmp_path):
    pandas = pytest.importorskip("pandas")
    logger, trainer = CsvLogger(), make_trainer(tmp_path)
    logger.on_train_start(trainer)
    for step, loss in ((1, 0.5), (2, float("nan")), (3, float("inf"))):
        logger.on_log(trainer, {"step": step, "loss": loss})
    logger.on_train_end(trainer)
    frame = pandas.read_csv(tmp_path / "metrics.csv")
    assert str(frame["loss"].tolist()) == "[0.5, nan, inf]" and frame["step"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("checkpoint", [1, 5, 9, 10, 12, 17])
def test_a_killed_and_resumed_run_has_the_rows_of_an_uninterrupted_one(tmp_path, checkpoint):
    train(tmp_path / "whole", 30)
    killed, trainer = CsvLogger(), make_trainer(tmp_path / "cut")
    killed.on_train_start(trainer)
    run_to(killed, trainer, checkpoint)
    state = trainer.progress.state_dict()
    run_to(killed, trainer, 18)
    with (tmp_path / "cut" / "metrics.csv").open("a") as file:
        file.write("train,20,2.0,0.0,0.0,0.0")  # killed in the middle of a row
    resumed = CsvLogger()
    trainer.progress = Progress.from_state(state)
    resumed.on_train_start(trainer)
    run_to(resumed, trainer, 30)
    resumed.on_train_end(trainer)
    assert (tmp_path / "cut" / "metrics.csv").read_text() == (tmp_path / "whole" / "metrics.csv").read_text()


def test_a_resumed_run_drops_the_rows_that_closed_the_one_before(tmp_path):
    logger, trainer = CsvLogger(), make_trainer(tmp_path)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 4)
    trainer.lifecycle.is_closing = True
    logger.on_log(trainer, {"step": 5, "epoch": 0.5, "loss": 0.5})
    logger.on_train_end(trainer)
    assert [row["final"] for row in read(tmp_path)] == ["", "", "1"]
    longer, trainer = CsvLogger(), make_trainer(tmp_path, step=5)
    longer.on_train_start(trainer)
    longer.on_train_end(trainer)
    assert [row["step"] for row in read(tmp_path)] == ["2", "4"]


def test_a_fresh_run_starts_the_file_anew_with_its_own_columns(tmp_path):
    train(tmp_path, 12)
    train(tmp_path, 2)
    assert read(tmp_path) == [{"kind": "train", "step": "2", "epoch": "0.2", "loss": "0.5", "final": ""}]


def test_a_kill_while_a_column_is_added_leaves_the_old_file(tmp_path, monkeypatch):
    logger, trainer = CsvLogger(), make_trainer(tmp_path)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 4)
    before = (tmp_path / "metrics.csv").read_bytes()

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("omnitrain.callbacks.rows.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        logger.on_eval_end(trainer, {"eval_loss": 0.5})
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_tests_are_rows_and_reports_are_the_numbers_of_their_histograms(tmp_path):
    logger, trainer = CsvLogger(), make_trainer(tmp_path)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 2)
    logger.on_report(trainer, {"weights": WEIGHTS, "text": "left out"})
    logger.on_report(trainer, {"text": "left out"})
    logger.on_train_end(trainer)
    logger.on_log(trainer, {"test_loss": 0.25})
    rows = read(tmp_path)
    assert [row["kind"] for row in rows] == ["train", "report", "test"]
    assert {name: rows[1][f"weights/{name}"] for name in ("min", "max", "mean", "std")} == {
        "min": "1.0", "max": "3.0", "mean": "2.0", "std": "1.0",
    }  # fmt: skip
    assert rows[2]["test_loss"] == "0.25" and "text" not in rows[1]


def test_other_ranks_and_runs_without_a_folder_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for trainer in (make_trainer(tmp_path, is_main_process=False), make_trainer(None)):
        logger = CsvLogger()
        logger.on_train_start(trainer)
        run_to(logger, trainer, 10)
        logger.on_train_end(trainer)
        logger.on_log(trainer, {"test_loss": 1.0})
    assert list(tmp_path.iterdir()) == []
