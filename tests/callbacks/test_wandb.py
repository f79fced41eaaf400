from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omnitrain.callbacks.wandb import WandbLogger
from omnitrain.duration import Limits
from omnitrain.errors import MissingExtraError
from omnitrain.events import Histogram
from omnitrain.progress import Progress


def make_trainer(step: int = 0, is_main_process: bool = True) -> Any:
    return SimpleNamespace(
        progress=Progress(epoch_size=30, step=step),
        is_main_process=is_main_process,
        trial_name="trial-7",
        resolved_config=lambda: {"batch_size": 8},
    )


def run_to(logger: WandbLogger, trainer: Any, last: int) -> None:
    while trainer.progress.step < last:
        trainer.progress.advance(samples=3)
        step = trainer.progress.step
        logger.on_log(trainer, {"step": step, "epoch": step / 10, "loss": 1 / step})
        if step % 2 == 0:
            logger.on_eval_end(trainer, {"eval_accuracy": 0.5})


# --- the real library, offline


@pytest.fixture
def offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield wandb
    wandb.teardown()  # its service process reads the environment once


def records(tmp_path: Path) -> Iterator[Any]:
    """Read what an offline run would upload: protobuf messages in the log format of LevelDB."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # `finish()` may return before the service process has written everything; this waits for it
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        data, at, parts = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            size, part = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            parts += data[at + 7 : at + 7 + size]
            at += 7 + size
            if part in (1, 4):  # whole, or the last part
                record = Record()
                record.ParseFromString(parts)
                parts = b""
                yield record


def values(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def history(tmp_path: Path) -> list[dict[str, Any]]:
    rows = [values(record.history.item) for record in records(tmp_path) if record.HasField("history")]
    return [{k: v for k, v in row.items() if k not in ("_runtime", "_timestamp")} for row in rows]


def test_logs_and_evaluations_of_a_step_are_one_row(offline, tmp_path):
    logger, trainer = WandbLogger(project="digits", tags=["baseline"]), make_trainer()
    logger.on_train_start(trainer)
    run_to(logger, trainer, 2)
    logger.on_train_end(trainer)
    assert offline.run is None
    assert history(tmp_path) == [
        {"_step": 1, "train/loss": 1.0, "train/epoch": 0.1},
        {"_step": 2, "train/loss": 0.5, "train/epoch": 0.2, "eval/accuracy": 0.5},
    ]
    (run,) = (record.run for record in records(tmp_path) if record.HasField("run"))
    assert (run.project, run.display_name, list(run.tags)) == ("digits", "trial-7", ["baseline"])
    assert values(run.config.update)["batch_size"] == 8
    assert [record.exit.exit_code for record in records(tmp_path) if record.HasField("exit")] == [0]


def test_a_failed_training_finishes_with_exit_code_1(offline, tmp_path):
    logger, trainer = WandbLogger(), make_trainer()
    logger.on_train_start(trainer)
    logger.on_exception(trainer, RuntimeError())
    logger.on_train_end(trainer)
    assert offline.run is None
    assert [record.exit.exit_code for record in records(tmp_path) if record.HasField("exit")] == [1]


def test_a_resumed_training_continues_the_same_run(offline, tmp_path):
    first, trainer = WandbLogger(), make_trainer()
    first.on_train_start(trainer)
    run_to(first, trainer, 2)
    state = json.loads(json.dumps(first.state_dict()))
    first.on_train_end(trainer)
    second = WandbLogger()
    second.load_state_dict(state)
    second.on_train_start(trainer)
    run_to(second, trainer, 4)
    second.on_train_end(trainer)
    ids = {record.run.run_id for record in records(tmp_path) if record.HasField("run")}
    assert ids == {state["run_id"]}
    assert sorted(row["_step"] for row in history(tmp_path)) == [1, 2, 3, 4]


def test_a_run_of_the_user_is_used_and_left_open(offline, tmp_path):
    run = offline.init()
    for _ in range(3):
        run.log({"mine": 1})  # moves W&B's own step past the first steps of the training
    logger, trainer = WandbLogger(), make_trainer()
    logger.on_train_start(trainer)
    run_to(logger, trainer, 1)
    logger.on_exception(trainer, RuntimeError())
    logger.on_train_end(trainer)
    assert offline.run is run
    run.finish()
    assert history(tmp_path)[-1] == {"_step": 3, "step": 1, "train/loss": 1.0, "train/epoch": 0.1}


def test_a_test_after_the_training_goes_to_the_summary_of_the_same_run(offline, tmp_path):
    logger, trainer = WandbLogger(), make_trainer()
    logger.on_train_start(trainer)
    run_to(logger, trainer, 1)
    logger.on_train_end(trainer)
    logger.on_log(trainer, {"test_loss": 0.25})
    assert offline.run is None
    summary: dict[str, Any] = {}
    for record in records(tmp_path):
        if record.HasField("summary"):
            summary |= values(record.summary.update)
    assert summary["test/loss"] == 0.25
    assert not any("test/loss" in row for row in history(tmp_path))
    assert len({record.run.run_id for record in records(tmp_path) if record.HasField("run")}) == 1


def test_reports_are_histograms_and_texts_and_an_interval_leaves_rows_out(offline, tmp_path):
    logger, trainer = WandbLogger(every="2ba"), make_trainer()
    trainer.limits, trainer.lifecycle = Limits(max_steps=9), SimpleNamespace(is_closing=False)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 3)
    weights = Histogram(edges=[0.0, 2.0, 4.0], counts=[1, 2], low=1.0, high=3.0, total=4.0, squares=10.0)
    logger.on_report(trainer, {"weights": weights, "preview": "<b>"})
    logger.on_train_end(trainer)
    rows = history(tmp_path)
    assert [row["_step"] for row in rows if "train/loss" in row] == [2]
    assert rows[-1]["_step"] == 3
    assert (rows[-1]["weights/values"], rows[-1]["weights/bins"]) == ([1, 2], [0.0, 2.0, 4.0])
    assert rows[-1]["preview/_type"] == "html-file"
    assert logger.state_dict()["shown"] == 1


# --- what an offline run cannot show


class FakeRun:
    def __init__(self, **settings: Any) -> None:
        self.settings, self.id, self.step = settings, settings.get("id", "new"), 0
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log(self, row: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, row))

    def finish(self, exit_code: int) -> None:
        pass


@pytest.fixture
def fake(monkeypatch):
    wandb = SimpleNamespace(run=None, runs=[], step=0)

    def init(**settings: Any) -> FakeRun:
        wandb.runs.append(FakeRun(**settings))
        wandb.runs[-1].step = wandb.step
        return wandb.runs[-1]

    wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return wandb


def test_steps_that_the_killed_part_has_sent_are_not_sent_again(fake):
    fake.step = 8  # W&B answers: the next step is 8
    logger, trainer = WandbLogger(), make_trainer(step=5)
    logger.load_state_dict({"run_id": "abc"})
    logger.on_train_start(trainer)
    run_to(logger, trainer, 10)
    logger.on_train_end(trainer)
    assert (fake.runs[0].settings["id"], fake.runs[0].settings["resume"]) == ("abc", "allow")
    assert sorted({step for step, _ in fake.runs[0].rows}) == [8, 9, 10]


def test_a_second_fresh_training_is_another_run(fake):
    logger = WandbLogger()
    logger.load_state_dict({"run_id": "abc"})
    logger.on_train_start(make_trainer())
    assert "id" not in fake.runs[0].settings


def test_what_the_user_passes_wins(fake):
    WandbLogger(id="mine", name="named", config={"a": 1}).on_train_start(make_trainer())
    settings = fake.runs[0].settings
    assert (settings["id"], settings["name"], settings["config"]) == ("mine", "named", {"a": 1})


def test_other_ranks_open_no_run(fake):
    logger, trainer = WandbLogger(), make_trainer(is_main_process=False)
    logger.on_train_start(trainer)
    run_to(logger, trainer, 4)
    logger.on_log(trainer, {"test_loss": 0.25})
    logger.on_train_end(trainer)
    assert fake.runs == []


def test_a_missing_wandb_is_named_before_the_first_step(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"WandbLogger needs wandb.*-e .*\[wandb\]"):
        WandbLogger().on_train_start(make_trainer())


def test_a_disk_that_fails_ends_no_run_and_the_rows_after_it_are_sent(monkeypatch, caplog):
    sent: list[int] = []
    is_full = [True]

    def refuse() -> None:
        if is_full[0]:
            raise OSError(28, "No space left on device")

    class Run:
        id, step, summary = "id", 0, SimpleNamespace(update=lambda values: refuse())

        def log(self, values: Any, step: int) -> None:
            refuse()
            sent.append(step)

        def finish(self, exit_code: int) -> None:
            refuse()

    def init(**settings: Any) -> Run:
        refuse()
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None, init=init))
    logger, trainer = WandbLogger(), make_trainer()
    logger.on_train_start(trainer)
    run_to(logger, trainer, 2)
    is_full[0] = False
    run_to(logger, trainer, 4)
    is_full[0] = True
    logger.on_log(trainer, {"test_loss": 1.0})
    logger.on_train_end(trainer)
    assert sorted(set(sent)) == [3, 4]
    assert [record.getMessage().count("cannot be written") for record in caplog.records] == [1, 0, 1]
