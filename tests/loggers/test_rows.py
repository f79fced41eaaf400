"""Files of rows: JSON lines and CSV, over kills, resumes and failing disks."""

import csv
import functools
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import fake_runs
import numpy as np
import pytest
from fake_runs import WEIGHTS, fake_trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from resuming import Killed

from omnitrain import CsvLogger, JsonlLogger
from omnitrain.core.progress import Progress

LOGGERS: dict[str, Any] = {"csv": CsvLogger, "jsonl": JsonlLogger}
start, run_to, train = (functools.partial(function, log_steps=2, eval_steps=10) for function in (
    fake_runs.start, fake_runs.run_to, fake_runs.train,
))  # fmt: skip


def path_in(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the only file in a folder, without the empty cells of a table."""

    def reject(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    path = path_in(folder)
    if path.suffix == ".jsonl":
        return [json.loads(line, parse_constant=reject) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        table = [{name: cell for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    return [{"kind": row.pop("kind"), **{name: float(cell) for name, cell in row.items()}} for row in table]


def steps(folder: Path, kind: str = "train") -> list[int]:
    return [row["step"] for row in read(folder) if row["kind"] == kind]


@pytest.fixture(params=LOGGERS)
def logger_class(request: pytest.FixtureRequest) -> Any:
    return LOGGERS[request.param]


def test_rows_are_one_per_log_and_evaluation(logger_class, tmp_path):
    trainer = fake_trainer(tmp_path)
    logger = start(logger_class(), trainer, 2)
    assert read(tmp_path) == [{"kind": "train", "step": 2, "epoch": 0.2, "loss": 0.5}]
    run_to(logger, trainer, 12)
    logger.on_train_end(trainer)
    assert steps(tmp_path) == [2, 4, 6, 8, 10, 12]
    assert read(tmp_path)[5] == {"kind": "eval", "step": 10, "epoch": 1, "eval_loss": 0.2, "eval_f1": 0.5}


def test_csv_columns_are_added_in_the_order_of_descriptors(tmp_path):
    trainer = fake_trainer(tmp_path)
    logger = start(CsvLogger(), trainer)
    for row in ({"samples_per_second": 3.0, "grad_norm": 1.0}, {"loss": 0.5, "accuracy": 1.0}):
        trainer.progress.advance(samples=3)
        logger.on_log(trainer, row)
    logger.on_train_end(trainer)
    header, first, _ = path_in(tmp_path).read_text().splitlines()
    assert header == "kind,step,epoch,loss,accuracy,grad_norm,samples_per_second,final"
    assert first == "train,1,0.1,,,1.0,3.0,"


def test_values_that_are_not_finite(logger_class, tmp_path):
    trainer = fake_trainer(tmp_path)
    logger = start(logger_class(), trainer)
    for step, loss in ((1, np.float32(0.5)), (2, math.nan), (3, math.inf)):
        logger.on_log(trainer, {"step": step, "loss": loss, "loss_scale": 2})
    logger.on_train_end(trainer)
    if logger_class is JsonlLogger:
        assert [row["loss"] for row in read(tmp_path)] == [0.5, None, None]
        assert {row["loss_scale"] for row in read(tmp_path)} == {2.0}
    else:
        frame = pytest.importorskip("pandas").read_csv(path_in(tmp_path))
        assert str(frame["loss"].tolist()) == "[0.5, nan, inf]" and frame["step"].tolist() == [1, 2, 3]


def test_other_ranks_and_runs_without_folder_write_nothing(logger_class, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for trainer in (fake_trainer(tmp_path, is_main_process=False), fake_trainer(None)):
        logger = logger_class()
        train(logger, trainer, 10)
        logger.on_log(trainer, {"test_loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_fresh_run_empties_the_file(logger_class, tmp_path, caplog):
    """And starts it again when it is deleted in the run."""
    train(logger_class(), fake_trainer(tmp_path), 20)
    trainer = fake_trainer(tmp_path)
    logger = start(logger_class(), trainer, 6)
    assert steps(tmp_path) == [2, 4, 6] and "eval" not in path_in(tmp_path).read_text()
    path_in(tmp_path).unlink()
    run_to(logger, trainer, 10)
    logger.on_train_end(trainer)
    assert steps(tmp_path) == [8, 10] and caplog.text.count("was deleted during the run") == 1
    train(logger_class("log.txt"), fake_trainer(tmp_path / "named"), 2)
    assert path_in(tmp_path / "named").name == "log.txt"


@pytest.mark.parametrize("checkpoint", [1, 9, 10, 17])
def test_resumed_run_after_a_kill_has_the_rows_of_a_straight_one(logger_class, tmp_path, checkpoint):
    train(logger_class(), fake_trainer(tmp_path / "whole"), 30)
    trainer = fake_trainer(tmp_path / "cut")
    killed = start(logger_class(), trainer, checkpoint)
    state = trainer.progress.state_dict()
    run_to(killed, trainer, 18)
    half = "train,20,2.0,0.0,0.0,0.0" if logger_class is CsvLogger else '{"kind": "train", "step": 20, "ep'
    with path_in(tmp_path / "cut").open("a") as file:
        file.write(half)
    trainer.progress = Progress.from_state(state)
    train(logger_class(), trainer, 30)
    assert path_in(tmp_path / "cut").read_text() == path_in(tmp_path / "whole").read_text()


def test_resumed_run_drops_closing_rows(logger_class, tmp_path):
    trainer = fake_trainer(tmp_path)
    logger = start(logger_class(), trainer, 4)
    trainer.lifecycle.is_closing = True
    logger.on_log(trainer, {"step": 5, "epoch": 0.5, "loss": 0.5})
    logger.on_train_end(trainer)
    assert [bool(row.get("final")) for row in read(tmp_path)] == [False, False, True]
    train(logger_class(), fake_trainer(tmp_path, step=5), 5)
    assert steps(tmp_path) == [2, 4]
    train(logger_class(), fake_trainer(tmp_path / "new", step=20), 22)  # resumed without the file
    assert steps(tmp_path / "new") == [22]


def test_resumed_run_does_not_repeat_an_evaluation(logger_class, tmp_path):
    """The kill was after the evaluation of step 10, and before the checkpoint that would remember it."""
    train(logger_class(), fake_trainer(tmp_path), 10)
    trainer = fake_trainer(tmp_path, step=10)
    trainer.progress.epoch = 1
    start(logger_class(), trainer).on_eval_end(trainer, {"eval_loss": 0.2})
    assert steps(tmp_path, "eval") == [10]


def test_rows_are_one_per_step_and_without_steps_one_per_epoch(logger_class, tmp_path):
    trainer = fake_trainer(tmp_path)
    logger = start(logger_class(), trainer)
    for epoch in (1, 2):
        trainer.progress.epoch = epoch
        logger.on_eval_end(trainer, {"eval_loss": 1 / epoch, "eval, odd": 0.5})
    for epoch in (math.nextafter(3.0, 0.0), 3):
        logger.on_log(trainer, {"step": 10, "epoch": epoch, "loss": 0.5})
    logger.on_train_end(trainer)
    assert [round(row["epoch"]) for row in read(tmp_path)] == [1, 2, 3]
    assert [row.get("eval, odd") for row in read(tmp_path)] == [0.5, 0.5, None]


def test_tests_after_a_run_and_after_a_kill_are_rows(logger_class, tmp_path):
    trainer, logger = fake_trainer(tmp_path), logger_class()
    train(logger, trainer, 4)
    logger.on_log(trainer, {"test_loss": 0.5})
    with path_in(tmp_path).open("a") as file:
        file.write('{"kind": "tr' if logger_class is JsonlLogger else "tr")
    logger_class().on_log(fake_trainer(tmp_path, step=4), {"test_loss": 0.25})
    assert [row["kind"] for row in read(tmp_path)] == ["train", "train", "test", "test"]
    assert read(tmp_path)[2] == {"kind": "test", "step": 4, "epoch": 0.4, "test_loss": 0.5}


def test_reports_are_the_numbers_of_histograms(logger_class, tmp_path):
    trainer = fake_trainer(tmp_path)
    logger = start(logger_class(), trainer, 2)
    logger.on_report(trainer, {"weights": WEIGHTS, "text": "a word"})
    logger.on_report(trainer, {"text": "two"})
    logger.on_train_end(trainer)
    common = {"kind": "report", "step": 2, "epoch": 0.2}
    first = {**common, "weights/min": 1.0, "weights/max": 3.0, "weights/mean": 2.0, "weights/std": 1.0}
    lines = [first | {"text": "a word"}, common | {"text": "two"}]
    assert read(tmp_path)[1:] == (lines if logger_class is JsonlLogger else [first])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without space")
def test_full_disk_does_not_end_the_run(tmp_path, caplog):
    train(JsonlLogger("/dev/full"), fake_trainer(tmp_path), 10)
    assert "No space left on device" in caplog.text and "lacks 6 rows" in caplog.text


DAMAGE: list[bytes] = [
    b"\0" * 40, b"\xff\xfe\xfd", b"[" * 5000, b"7", b'{"kind": [], "step": 1, "epoch": 0.1}',
    b'"' + b"x" * 200_000 + b'"',
    b'{"kind": "train", "step": "two", "epoch": 0.1}', b'{"kind": "train", "step": null, "epoch": null}', b"1" * 5000,
    b'{"kind": "train", "step": 1, "epoch": 1e999}', b"train,1,nan,,,", b"train,1,inf,0.5,0.5,", b"," * 9, b"",
    b"train," + b"1" * 5000 + b",0.1,,,",
]  # fmt: skip


@pytest.mark.parametrize("place", ["start", "middle", "end", "everywhere"])
def test_damaged_lines_are_set_aside(logger_class, place, tmp_path, caplog):
    train(logger_class(), fake_trainer(tmp_path), last=12)
    path, copy = path_in(tmp_path), path_in(tmp_path).with_suffix(path_in(tmp_path).suffix + ".damaged")
    lines = path.read_bytes().splitlines()
    number = {"start": 0, "middle": 3, "end": len(lines), "everywhere": 0}[place]
    rest = [] if place == "everywhere" else lines[number:]
    damaged = b"\n".join([*lines[:number], *DAMAGE, *rest, b""])
    path.write_bytes(damaged)
    for _ in range(2):
        train(logger_class(), fake_trainer(tmp_path, step=10), last=20)
    assert set(tmp_path.iterdir()) == {path, copy} and copy.read_bytes() == damaged
    assert caplog.text.count("damaged lines, which are removed") == 1
    copy.unlink()
    assert steps(tmp_path) == list(range(12 if place == "everywhere" else 2, 21, 2))


def test_kill_while_the_file_is_rewritten_leaves_the_old_one(logger_class, tmp_path, monkeypatch):
    """CSV is rewritten for a new column, JSON lines for a step that was repeated."""
    trainer = fake_trainer(tmp_path)
    logger, path = start(logger_class(), trainer, 4), path_in(tmp_path)
    if logger_class is JsonlLogger:
        with path.open("a") as file:  # so that more than the end is to be cut
            file.write('{"kind": "test", "step": 2, "epoch": 0.2}\n')
    before = path.read_bytes()
    monkeypatch.setattr("omnitrain.loggers.rows.os.replace", mock.Mock(side_effect=Killed))
    rewrite = {
        CsvLogger: lambda: logger.on_eval_end(trainer, {"eval_loss": 0.5}),
        JsonlLogger: lambda: logger_class().on_train_start(fake_trainer(tmp_path, step=2)),
    }[logger_class]
    with pytest.raises(Killed):
        rewrite()
    assert path.read_bytes() == before


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["train", "eval", "test"]), max_size=12), lost=st.integers(0, 400),
    until=st.integers(1, 12),
)  # fmt: skip
def test_resume_keeps_full_rows_up_to_its_step(tmp_path_factory, kinds, lost, until):
    rows = [{"kind": kind, "step": i, "epoch": i / 10, "loss": 1 / (i + 1)} for i, kind in enumerate(kinds)]
    lines = [json.dumps(row) + "\n" for row in rows]
    text = "".join(lines)[: max(len("".join(lines)) - lost, 0)]  # killed anywhere
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    path.write_text(text)
    JsonlLogger().on_train_start(fake_trainer(path.parent, step=until))
    assert path.read_text() == "".join(lines[: min(text.count("}"), until + 1)])
