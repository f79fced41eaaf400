"""Rows in Weights & Biases, by the real library offline, and by a fake."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_runs import fake_trainer, run_to, start

from omnitrain.core.events import Histogram
from omnitrain.loggers.tracking import WandbLogger


def fail(logger: WandbLogger, trainer: Any) -> None:
    logger.on_exception(trainer, RuntimeError())
    logger.on_train_end(trainer)


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
            if part in (1, 4):  # a full record, or its last part
                record = Record()
                record.ParseFromString(parts)
                parts = b""
                yield record


def values(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def history(messages: list[Any]) -> list[dict[str, Any]]:
    rows = [values(record.history.item) for record in messages if record.HasField("history")]
    return [{k: v for k, v in row.items() if k not in ("_runtime", "_timestamp")} for row in rows]


@pytest.mark.slow
@pytest.mark.processes
def test_offline_run_has_rows_reports_config_and_summary(offline, tmp_path):
    """Logs and evaluations of a step are one row, a resumed run that fails is the same, and a test is its summary."""
    trainer = fake_trainer()
    logger = start(WandbLogger(project="digits", tags=["baseline"], every="2ba"), trainer, 3)
    weights = Histogram(edges=[0.0, 2.0, 4.0], counts=[1, 2], low=1.0, high=3.0, total=4.0, squares=10.0)
    logger.on_report(trainer, {"weights": weights, "preview": "<b>"})
    logger.on_train_end(trainer)
    state = json.loads(json.dumps(logger.state_dict()))
    assert offline.run is None and state["shown"] == 1
    resumed = WandbLogger(project="digits")
    resumed.load_state_dict(state)
    fail(start(resumed, trainer, 5), trainer)
    resumed.on_log(trainer, {"test_loss": 0.25})
    assert offline.run is None
    messages = list(records(tmp_path))
    logs, reports, *more = history(messages)
    assert logs == {"_step": 2, "train/loss": 0.5, "train/epoch": 0.2, "eval/loss": 1.0, "eval/f1": 0.5}
    assert (reports["_step"], reports["preview/_type"]) == (3, "html-file")
    assert (reports["weights/values"], reports["weights/bins"]) == ([1, 2], [0.0, 2.0, 4.0])
    assert [row["_step"] for row in more] == [4, 5]
    run, *again = [record.run for record in messages if record.HasField("run")]
    assert (run.project, run.display_name, list(run.tags)) == ("digits", "trial-7", ["baseline"])
    assert values(run.config.update)["batch_size"] == 8
    assert {other.run_id for other in again} == {run.run_id} == {state["run_id"]}
    assert sorted({record.exit.exit_code for record in messages if record.HasField("exit")}) == [0, 1]
    summary: dict[str, Any] = {}
    for record in messages:
        if record.HasField("summary"):
            summary |= values(record.summary.update)
    assert summary["test/loss"] == 0.25


# --- a fake


class FakeRun:
    """A run with the methods that the logger calls; each raises `broken`, if it is set."""

    def __init__(self, step: int = 0, **settings: Any) -> None:
        self.settings, self.id, self.step = settings, settings.get("id", "new"), step
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.broken: OSError | None = None
        self.exit_code: int | None = None
        self.summary = SimpleNamespace(update=lambda values: self.check())

    def check(self) -> None:
        if self.broken:
            raise self.broken

    def log(self, row: dict[str, float], step: int | None = None) -> None:
        self.check()
        self.rows.append((step, row))

    def finish(self, exit_code: int) -> None:
        self.check()
        self.exit_code = exit_code


@pytest.fixture
def fake(monkeypatch):
    wandb = SimpleNamespace(run=None, runs=[], step=0, broken=None, __spec__=object())

    def init(**settings: Any) -> FakeRun:
        if wandb.broken:
            raise wandb.broken
        wandb.runs.append(FakeRun(wandb.step, **settings))
        return wandb.runs[-1]

    wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return wandb


def test_resumed_run_sends_no_step_twice(fake):
    fake.step = 8  # W&B answers: the next step is 8
    logger, trainer = WandbLogger(), fake_trainer(step=5)
    logger.load_state_dict({"run_id": "abc"})
    start(logger, trainer, 10).on_train_end(trainer)
    (run,) = fake.runs
    assert (run.settings["id"], run.settings["resume"], run.exit_code) == ("abc", "allow", 0)
    assert sorted({step for step, _ in run.rows}) == [8, 9, 10]
    assert logger.state_dict()["run_id"] == "abc"


def test_run_of_the_user_stays_open(fake):
    """Its own step may be ahead, so the step is a value of the row."""
    fake.run = FakeRun(step=3)
    trainer = fake_trainer()
    fail(start(WandbLogger(), trainer, 1), trainer)
    assert fake.runs == [] and fake.run.exit_code is None
    assert fake.run.rows == [(None, {"step": 1, "train/loss": 1.0, "train/epoch": 0.1})]


def test_fresh_run_has_the_arguments_of_the_user(fake):
    logger, trainer = WandbLogger("digits", every=3, name="named", config={"a": 1}), fake_trainer()
    logger.load_state_dict({"run_id": "abc"})
    fail(start(logger, trainer, 7), trainer)
    run = fake.runs[0]
    assert "id" not in run.settings and run.exit_code == 1
    assert [run.settings[name] for name in ("project", "name", "config")] == ["digits", "named", {"a": 1}]
    assert [row["train/loss"] for _, row in run.rows if "train/loss" in row] == pytest.approx([1 / 3, 1 / 6])
    start(WandbLogger(id="mine"), fake_trainer())
    assert fake.runs[1].settings["id"] == "mine"


def test_other_ranks_open_no_run(fake):
    trainer = fake_trainer(is_main_process=False)
    logger = start(WandbLogger(), trainer, 4)
    logger.on_log(trainer, {"test_loss": 0.25})
    logger.on_train_end(trainer)
    assert fake.runs == []


def test_failing_disk_does_not_end_the_run(fake, caplog):
    """Its rows are sent later; what fails at the end is logged again."""
    fake.broken = OSError(28, "No space left on device")
    trainer = fake_trainer()
    logger = start(WandbLogger(), trainer, 2)
    fake.broken, broken = None, fake.broken
    run_to(logger, trainer, 4)
    (run,) = fake.runs
    run.broken = broken
    logger.on_log(trainer, {"test_loss": 1.0})
    logger.on_train_end(trainer)
    assert sorted({step for step, _ in run.rows}) == [1, 2, 3, 4]
    words = ("cannot be written", "works again", "cannot be written", "lacks 1 rows")
    assert all(text in record.getMessage() for text, record in zip(words, caplog.records, strict=True))
