from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnitrain.callbacks.jsonl import JsonlLogger, keep_rows
from omnitrain.progress import Progress


def make_trainer(save_dir: Path | None, step: int = 0, is_main_process: bool = True) -> Any:
    progress = Progress(epoch_size=30, step=step)
    lifecycle = SimpleNamespace(is_closing=False, saved_at=None)
    return SimpleNamespace(progress=progress, is_main_process=is_main_process, save_dir=save_dir, lifecycle=lifecycle)


def run_to(logger: JsonlLogger, trainer: Any, last: int) -> None:
    """Train to step `last`: 10 steps an epoch, a log every 2 steps, an evaluation at each epoch's end."""
    progress = trainer.progress
    while progress.step < last:
        progress.advance(samples=3)
        if progress.step % 2 == 0:
            logger.on_log(trainer, {"step": progress.step, "epoch": progress.epochs, "loss": 1 / progress.step})
        if progress.is_epoch_consumed:
            progress.close_epoch(complete=True)
            logger.on_eval_end(trainer, {"eval_loss": 2 / progress.step})


def train(save_dir: Path, last: int) -> None:
    logger, trainer = JsonlLogger(), make_trainer(save_dir)
    logger.on_train_start(trainer)
    run_to(logger, trainer, last)
    logger.on_train_end(trainer)


def read(save_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (save_dir / name).read_text().splitlines()]


def test_each_log_and_evaluation_is_a_row(tmp_path):
    train(tmp_path, 10)
    assert read(tmp_path)[0] == {"kind": "train", "step": 2, "epoch": 0.2, "loss": 0.5}
    assert read(tmp_path)[-1] == {"kind": "eval", "step": 10, "epoch": 1, "eval_loss": 0.2}
    assert [(row["kind"], row["step"]) for row in read(tmp_path)] == [
        *(("train", step) for step in (2, 4, 6, 8, 10)),
        ("eval", 10),
    ]


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
    logger, trainer = JsonlLogger(), make_trainer(tmp_path)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 2)
    assert len(read(tmp_path)) == 1
    logger.on_train_end(trainer)


def test_a_file_that_is_deleted_during_the_run_is_begun_anew_with_a_word(tmp_path, caplog):
    logger, trainer = JsonlLogger(), make_trainer(tmp_path)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 4)
    (tmp_path / "metrics.jsonl").unlink()
    run_to(logger, trainer, 8)
    logger.on_train_end(trainer)
    assert [row["step"] for row in read(tmp_path)] == [6, 8]
    assert caplog.text.count("was deleted during the run") == 1


def test_non_finite_values_become_null(tmp_path):
    logger, trainer = JsonlLogger(), make_trainer(tmp_path)
    logger.on_train_start(trainer)
    logger.on_log(trainer, {"step": 1, "epoch": 0.1, "loss": math.nan, "grad_norm": math.inf, "loss_scale": 2})
    logger.on_train_end(trainer)
    assert read(tmp_path) == [
        {"kind": "train", "step": 1, "epoch": 0.1, "loss": None, "grad_norm": None, "loss_scale": 2.0}
    ]


def test_values_of_numpy_become_floats(tmp_path):
    np = pytest.importorskip("numpy")
    logger, trainer = JsonlLogger(), make_trainer(tmp_path)
    logger.on_train_start(trainer)
    logger.on_eval_end(trainer, {"eval_loss": np.float32(0.5)})
    logger.on_train_end(trainer)
    assert read(tmp_path)[0]["eval_loss"] == 0.5


def test_without_a_save_dir_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger, trainer = JsonlLogger(), make_trainer(None)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 10)
    logger.on_log(trainer, {"test_loss": 1.0})
    logger.on_train_end(trainer)
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_write_nothing(tmp_path):
    logger, trainer = JsonlLogger(), make_trainer(tmp_path, is_main_process=False)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 10)
    logger.on_log(trainer, {"test_loss": 1.0})
    logger.on_train_end(trainer)
    assert list(tmp_path.iterdir()) == []


def test_a_fresh_run_starts_the_file_anew(tmp_path):
    train(tmp_path, 20)
    train(tmp_path, 6)
    assert [row["step"] for row in read(tmp_path)] == [2, 4, 6]


@pytest.mark.parametrize("checkpoint", [1, 5, 10, 12, 17])
def test_a_killed_and_resumed_run_has_the_rows_of_an_uninterrupted_one(tmp_path, checkpoint):
    train(tmp_path / "whole", 30)
    killed, trainer = JsonlLogger(), make_trainer(tmp_path / "cut")
    killed.on_train_start(trainer)
    run_to(killed, trainer, checkpoint)
    state = trainer.progress.state_dict()
    run_to(killed, trainer, 18)
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 20, "ep')  # killed in the middle of a row
    resumed = JsonlLogger()
    trainer.progress = Progress.from_state(state)
    resumed.on_train_start(trainer)
    run_to(resumed, trainer, 30)
    resumed.on_train_end(trainer)
    assert read(tmp_path / "cut") == read(tmp_path / "whole")
    assert [file.name for file in (tmp_path / "cut").iterdir()] == ["metrics.jsonl"]


def test_resuming_in_a_new_folder_starts_a_file(tmp_path):
    logger, trainer = JsonlLogger(), make_trainer(tmp_path / "new", step=20)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 22)
    logger.on_train_end(trainer)
    assert [row["step"] for row in read(tmp_path / "new")] == [22]


def test_an_evaluation_done_again_after_a_resume_is_there_once(tmp_path):
    train(tmp_path, 10)  # killed after the evaluation of step 10 and before the checkpoint that would remember it
    logger, trainer = JsonlLogger(), make_trainer(tmp_path, step=10)
    trainer.progress.epoch = 1
    logger.on_train_start(trainer)
    logger.on_eval_end(trainer, {"eval_loss": 0.2})
    logger.on_train_end(trainer)
    assert [row["step"] for row in read(tmp_path) if row["kind"] == "eval"] == [10]


def test_a_last_log_that_repeats_a_step_is_there_once(tmp_path):
    logger, trainer = JsonlLogger(), make_trainer(tmp_path)
    logger.on_train_start(trainer)
    logger.on_log(trainer, {"step": 10, "epoch": math.nextafter(1.0, 0.0), "loss": 0.5})
    logger.on_log(trainer, {"step": 10, "epoch": 1, "loss": 0.5})
    logger.on_train_end(trainer)
    assert len(read(tmp_path)) == 1


def test_a_loop_that_counts_no_steps_has_a_row_per_epoch(tmp_path):
    logger, trainer = JsonlLogger(), make_trainer(tmp_path)
    logger.on_train_start(trainer)
    for epoch in (1, 2):
        trainer.progress.epoch = epoch
        logger.on_eval_end(trainer, {"eval_loss": 1 / epoch})
    logger.on_train_end(trainer)
    assert [row["epoch"] for row in read(tmp_path)] == [1, 2]


def test_tests_after_the_training_are_rows_too(tmp_path):
    logger, trainer = JsonlLogger(), make_trainer(tmp_path)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 4)
    logger.on_train_end(trainer)
    logger.on_log(trainer, {"test_loss": 0.5})
    logger.on_log(trainer, {"test_loss": 0.25})  # of another test set
    assert [row for row in read(tmp_path) if row["kind"] == "test"] == [
        {"kind": "test", "step": 4, "epoch": 0.4, "test_loss": 0.5},
        {"kind": "test", "step": 4, "epoch": 0.4, "test_loss": 0.25},
    ]


def test_a_test_after_a_killed_run_does_not_join_its_torn_row(tmp_path):
    train(tmp_path, 4)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')
    JsonlLogger().on_log(make_trainer(tmp_path, step=4), {"test_loss": 0.5})
    assert [row["kind"] for row in read(tmp_path)] == ["train", "train", "test"]


def test_the_file_can_be_named(tmp_path):
    logger, trainer = JsonlLogger("log.jsonl"), make_trainer(tmp_path)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 2)
    logger.on_train_end(trainer)
    assert len(read(tmp_path, "log.jsonl")) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without space")
def test_a_full_disk_does_not_end_the_training(tmp_path, caplog):
    logger, trainer = JsonlLogger("/dev/full"), make_trainer(tmp_path)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 10)
    logger.on_train_end(trainer)
    assert "No space left on device" in caplog.text and "lacks 6 rows" in caplog.text


ROWS = st.lists(st.sampled_from(["train", "eval", "test"]), max_size=12)


@settings(max_examples=60, deadline=None)
@given(kinds=ROWS, lost=st.integers(0, 400), until=st.integers(0, 12))
def test_a_cut_keeps_exactly_the_whole_rows_up_to_its_step(tmp_path_factory, kinds, lost, until):
    rows = [{"kind": kind, "step": i, "epoch": i / 10, "loss": 1 / (i + 1)} for i, kind in enumerate(kinds)]
    lines = [json.dumps(row) + "\n" for row in rows]
    written = "".join(lines)
    written = written[: max(len(written) - lost, 0)]  # killed anywhere
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    path.write_text(written)
    last = keep_rows(path, until)
    whole = written.count("}")
    expected = [row for row in rows[:whole] if row["step"] <= until]
    assert path.read_text() == "".join(json.dumps(row) + "\n" for row in expected)
    assert last == {row["kind"]: (row["step"], row["epoch"]) for row in expected}


def test_a_kill_during_the_cut_leaves_the_old_file(tmp_path, monkeypatch):
    train(tmp_path, 10)
    with (tmp_path / "metrics.jsonl").open("a") as file:  # of a step back, so that the end is not what goes
        file.write('{"kind": "test", "step": 2, "epoch": 0.2}\n')
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("omnitrain.callbacks.rows.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        keep_rows(tmp_path / "metrics.jsonl", until=4)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
