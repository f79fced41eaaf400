"""Loggers by name and trackers of accelerate."""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker
from fake_runs import WEIGHTS, fake_trainer, run_to, start, train
from marks import TRAINERS, thinned
from recipes import Keyed, KeyedModel, callback, fit, same, trainer_on_cpu, weights
from resuming import Cut, Killed

import omnitrain
from omnitrain import ConfigError, CsvLogger, Histogram, TensorBoardLogger, Tracking, WandbLogger


class Service(GeneralTracker):
    """A service with ids: all its runs, which processes that are killed leave behind."""

    name = "service"
    requires_logging_directory = False
    runs: dict[str, list[tuple[int, str, Any]]] = {}  # noqa: RUF012
    id = ""
    is_open = fails = False

    @property
    def tracker(self) -> list[tuple[int, str, Any]]:
        return self.runs[self.id]

    def start(self) -> None:
        random.random()  # as many do, for a name
        self.id = self.id or f"run-{len(self.runs)}"
        self.runs.setdefault(self.id, [])
        self.is_open = True

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.settings = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        assert self.is_open
        if self.fails:
            raise ConnectionResetError("no route")
        self.tracker.extend((step or 0, name, value) for name, value in values.items())

    def finish(self) -> None:
        self.is_open = False

    def state_dict(self) -> dict[str, Any]:
        return {"id": self.id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.id = state["id"]


class Plain(Service):
    """The same, without ids."""

    name = "plain"

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return super().__getattribute__(name)


REPORTS = callback(on_eval_end=lambda trainer, _: trainer.lifecycle.report({"preview": "a text", "weights": WEIGHTS}))


@pytest.fixture(autouse=True)
def service(monkeypatch):
    monkeypatch.setattr(Service, "runs", {})


def make(kind: str = "native", **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "max_steps": 10, "batch_size": 4, "log_steps": 2, "eval_steps": 5, "load_best_at_end": False,
    }  # fmt: skip
    if options.get("save_dir") is not None:
        defaults["save_steps"] = 5
    data = {"eval_dataset": Keyed(8), "test_dataset": Keyed(8)}
    return trainer_on_cpu(TRAINERS[kind], KeyedModel(), Keyed(), **{**data, **defaults, **options})


def steps(name: str, run: str = "run-0") -> list[int]:
    return [step for step, key, _ in Service.runs[run] if key == name]


@pytest.mark.parametrize("kind", TRAINERS)
def test_resumed_run_continues_its_run_of_the_service(kind, tmp_path):
    options = {"save_dir": tmp_path, "eval_steps": 4, "keep_best": 0}
    with pytest.raises(Killed):
        make(kind, loggers=[Service()], callbacks=[REPORTS, Cut("kill", 9)], **options).train()
    assert steps("train/loss") == [2, 4, 6, 8] and steps("preview") == [4, 8]  # and the checkpoint is of step 5
    trainer = fit(make(kind, loggers=[Service()], callbacks=[REPORTS], **options), resume_from="auto")
    trainer.test()
    assert list(Service.runs) == ["run-0"]
    assert steps("train/loss") == [2, 4, 6, 8, 10]
    assert steps("eval/loss") == steps("preview") == steps("weights/mean") == [4, 8, 10]
    trainer = make(kind, loggers=[Service()], **options)
    trainer.load_checkpoint(tmp_path / "last")
    trainer.test()
    assert steps("test/loss") == [10, 10] and list(Service.runs) == ["run-0"]


def test_fresh_run_is_another_run_and_none_is_opened_twice(caplog):
    """A tracker without a way to resume is not opened again for tests."""
    trainer, tracker = make(loggers=[Plain()]), Plain()
    trainer.train()
    trainer.test()
    assert list(Service.runs) == ["run-0"] and not steps("test/loss")
    assert "plain has ended its run" in caplog.text
    make(loggers=[tracker], trial_name="b").train()
    assert steps("train/loss", "run-0") == steps("train/loss", "run-1") == [2, 4, 6, 8, 10]
    assert tracker.settings["batch_size"] == 4 and isinstance(tracker.settings["callbacks"], str)


def test_tracker_by_name_gets_the_project_and_options():
    created: list[tuple[str, dict[str, Any]]] = []

    class Created(Plain):
        tracker = property(lambda self: SimpleNamespace(id="x", step=0, finish=lambda exit_code: None))

        def __init__(self, name: str, **options: Any) -> None:
            super().__init__()
            created.append((name, options))

    logger = Tracking("wandb", project="digits", nested_run=True)
    logger._class = Created
    trainer = fit(make(loggers=[logger], max_steps=1))
    assert created == [("digits", {"nested_run": True, "config": trainer.resolved_config()})]


def test_tracking_leaves_generators_and_accelerate_unchanged():
    PartialState._reset_state()
    generators, ends = [], []
    look = callback(order=50, on_train_start=lambda trainer: generators.append(random.getstate()))
    for loggers in (None, [Service()]):
        random.seed(3)
        ends.append(weights(fit(make(loggers=loggers, callbacks=[look])).model))
    assert generators[0] == generators[1] and not PartialState._shared_state
    assert same(*ends)


def test_failing_service_does_not_end_the_run(caplog):
    tracker = Service()

    def unplug(trainer: Any) -> None:
        tracker.fails = 3 < trainer.progress.step < 7

    make(loggers=[tracker], callbacks=[callback(on_step_end=unplug)]).train()
    assert steps("train/loss") == [2, 8, 10]
    assert caplog.text.count("service cannot be written: no route") == 1 and "works again" in caplog.text


def test_tracking_every_omits_rows_also_after_a_resume(tmp_path):
    def build(**options: Any) -> Any:
        return make(loggers=[Tracking(Service(), every="3ba")], **options)

    build().train()
    assert steps("train/loss") == [4, 6, 10] and steps("eval/loss") == [5, 10]  # the first rows after 3, 6 and 9
    options = {"save_dir": tmp_path, "save_steps": 3, "keep_best": 0}
    with pytest.raises(Killed):
        build(callbacks=[Cut("kill", 4)], **options).train()
    build(**options).train(resume_from="auto")
    assert steps("train/loss", "run-1") == [4, 6, 10]


accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def events(folder: Path, name: str, kind: str = "Scalars") -> list[Any]:
    """Read all event files one by one: those of the same second have no order."""
    values = []
    for path in folder.glob("events.*"):
        file = accumulators.EventAccumulator(str(path), size_guidance={"histograms": 0, "tensors": 0}).Reload()
        values += getattr(file, kind)(name) if name in file.Tags()[kind.lower()] else []
    return values


@pytest.mark.parametrize("kind", thinned(TRAINERS, ["native", "hf"]))
def test_loggers_by_name_and_as_objects_get_the_same_rows(kind, tmp_path):
    loggers = ["tensorboard", "csv", TensorBoardLogger(tmp_path / "slow", every="5ba")]
    trainer = fit(make(kind, save_dir=tmp_path / "run", loggers=loggers, callbacks=[REPORTS]))
    trainer.test()
    board, slow = tmp_path / "run" / "tensorboard", tmp_path / "slow"
    for folder, name, expected in (
        (board, "train/loss", [2, 4, 6, 8, 10]), (slow, "train/loss", [6, 10]), (slow, "eval/loss", [5, 10]),
        (board, "test/loss", [10]),
    ):  # fmt: skip
        assert [event.step for event in events(folder, name)] == expected
    value = events(board, "weights", "Histograms")[0].histogram_value
    assert (value.min, value.max, value.num, value.sum) == (1.0, 3.0, 2.0, 4.0)
    assert (list(value.bucket_limit), list(value.bucket)) == ([2.0, 4.0], [1.0, 1.0])
    text, _ = events(board, "preview/text_summary", "Tensors")
    assert text.tensor_proto.string_val[0] == b"    a text" and text.step == 5
    (config,) = events(board, "config/text_summary", "Tensors")
    assert json.loads(config.tensor_proto.string_val[0]) == trainer.resolved_config()
    rows = rows_in(tmp_path / "run")
    reports = [(row["step"], row["preview"], row["weights/std"]) for row in rows if row["kind"] == "report"]
    assert reports == [(5, "a text", 1.0), (10, "a text", 1.0)]
    table = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in table[1:]] == [row["kind"] for row in rows]


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars(log_dir: Path, name: str = "train/loss") -> list[int]:
    return [event.step for event in accumulators.EventAccumulator(str(log_dir)).Reload().Scalars(name)]


@pytest.fixture
def file_names(monkeypatch):
    """Names of files of one second are in the order of a counter, as text: let it have the same number of digits."""
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(1000))


def test_tensorboard_has_no_step_twice_after_a_resume(tmp_path, file_names):
    trainer = fake_trainer()
    killed = start(TensorBoardLogger(tmp_path), trainer, 5)
    assert scalars(tmp_path) == [1, 2, 3, 4, 5]  # each row is flushed
    run_to(killed, trainer, 8)
    killed.on_train_end(trainer)  # so that the rows of the steps 6 to 8 are in the file
    train(TensorBoardLogger(tmp_path), fake_trainer(step=5), 10)
    assert scalars(tmp_path) == list(range(1, 11))
    assert scalars(tmp_path, "eval/loss") == [2, 4, 6, 8, 10]
    train(TensorBoardLogger(tmp_path), fake_trainer(), 4)  # a fresh run hides the earlier one
    assert scalars(tmp_path) == [1, 2, 3, 4]


def test_rows_for_tensorboard_wait_while_a_disk_fails(tmp_path, file_names, monkeypatch, caplog):
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    trainer = fake_trainer()
    logger = start(TensorBoardLogger(tmp_path), trainer, 4)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "add_scalar", mock.Mock(side_effect=OSError(28, "No space left on device")))
        run_to(logger, trainer, 8)
    run_to(logger, trainer, 12)
    logger.on_train_end(trainer)
    assert scalars(tmp_path) == list(range(1, 13))
    first, second = [record.getMessage() for record in caplog.records if record.name == "omnitrain"]
    assert "cannot be written" in first and "works again" in second


@pytest.mark.parametrize(("options", "message"), [
    ({"loggers": "tensorbord"}, "'tensorbord', which is no known logger. Did you mean 'tensorboard'"),
    ({"loggers": 3}, "must be a name or a list of names and loggers, got 3"),
    ({"loggers": [Service]}, r"got the class Service. Pass Service\("),
    ({"loggers": [object()]}, "subclass of accelerate.tracking.GeneralTracker"),
    ({"loggers": ["csv", CsvLogger()], "save_dir": "run"}, "the file 'metrics.csv' twice"),
    ({"loggers": [WandbLogger(), WandbLogger(project="b")]}, "W&B twice"),
    ({"loggers": [TensorBoardLogger("a"), TensorBoardLogger("a")]}, "TensorBoard in '.*' twice"),
    ({"loggers": [Service(), Service()]}, "the tracker 'service' twice"),
    ({"loggers": "tensorboard", "callbacks": [TensorBoardLogger()]}, "twice, or also in `callba"),
    ({"loggers": ["csv"]}, r"needs a folder for 'metrics.csv'. Pass `save_dir`"),
])  # fmt: skip
def test_loggers_are_validated(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_report_to_and_loggers_must_not_overlap(tmp_path):
    args = omnitrain.HFTrainingArguments(output_dir=str(tmp_path / "out"), report_to=["tensorboard"], use_cpu=True)
    with pytest.raises(ConfigError, match="both have 'tensorboard'"):
        omnitrain.HFTrainer(KeyedModel(), args, Keyed(), loggers="tensorboard")
    omnitrain.HFTrainer(KeyedModel(), args, Keyed(), loggers=[CsvLogger()])


def test_jsonl_logger_replaces_the_default_one(tmp_path):
    make(save_dir=tmp_path, loggers=[omnitrain.JsonlLogger(every="5ba")]).train()
    assert [row["step"] for row in rows_in(tmp_path) if row["kind"] == "train"] == [6, 10]


def test_missing_package_is_an_error_in_the_constructor(monkeypatch):
    monkeypatch.setattr("omnitrain.loggers.tracking.find_spec", lambda name: None)
    for name in ("mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio", "wandb", "tensorboard"):
        with pytest.raises(omnitrain.MissingExtraError, match=f"pip install {name}"):
            make(loggers=[name])
    with pytest.raises(omnitrain.MissingExtraError, match=r"'wandb' needs wandb.*-e .*\[wandb\]"):
        WandbLogger()


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store.db")
    yield mlflow.MlflowClient(f"sqlite:///{tmp_path}/store.db")
    sys.modules.pop("mlflow", None)


def test_mlflow_run_is_resumed_with_each_step_once(mlflow, tmp_path):
    options = {"save_dir": tmp_path / "run", "loggers": ["mlflow"], "callbacks": [REPORTS], "trial_name": "a"}
    with pytest.raises(Killed):
        make(**{**options, "callbacks": [REPORTS, Cut("kill", 9)]}).train()
    trainer = fit(make(**options), resume_from="auto")
    trainer.test()
    (run,) = mlflow.search_runs([experiment.experiment_id for experiment in mlflow.search_experiments()])
    assert (run.info.run_name, run.info.status, run.data.params["batch_size"]) == ("a", "FINISHED", "4")
    for name, expected in (("train/loss", [2, 4, 6, 8, 10]), ("eval/loss", [5, 10]), ("test/loss", [10])):
        assert [metric.step for metric in mlflow.get_metric_history(run.info.run_id, name)] == expected
    texts = [artifact.path for artifact in mlflow.list_artifacts(run.info.run_id, "preview")]
    assert sorted(texts) == ["preview/step-10.txt", "preview/step-5.txt"]


def fail(logger: WandbLogger, trainer: Any) -> None:
    logger.on_exception(trainer, RuntimeError())
    logger.on_train_end(trainer)


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
                yield Record.FromString(parts)
                parts = b""


def values(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


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
    logs, reports, *more = [values(record.history.item) for record in messages if record.HasField("history")]
    expected = {"_step": 2, "train/loss": 0.5, "train/epoch": 0.2, "eval/loss": 1.0, "eval/f1": 0.5}
    assert {name: value for name, value in logs.items() if name not in ("_runtime", "_timestamp")} == expected
    assert (reports["_step"], reports["preview/_type"]) == (3, "html-file")
    assert (reports["weights/values"], reports["weights/bins"]) == ([1, 2], [0.0, 2.0, 4.0])
    assert [row["_step"] for row in more] == [4, 5]
    run, *again = [record.run for record in messages if record.HasField("run")]
    assert (run.project, run.display_name, list(run.tags)) == ("digits", "trial-7", ["baseline"])
    assert values(run.config.update)["batch_size"] == 8
    assert {other.run_id for other in again} == {run.run_id} == {state["run_id"]}
    assert sorted({record.exit.exit_code for record in messages if record.HasField("exit")}) == [0, 1]
    summaries = [values(record.summary.update) for record in messages if record.HasField("summary")]
    assert [summary["test/loss"] for summary in summaries if "test/loss" in summary][-1] == 0.25


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
    """Its own step may be ahead, so the step is a value of the row; other ranks send nothing."""
    fake.run = FakeRun(step=3)
    for is_main_process in (True, False):
        trainer = fake_trainer(is_main_process=is_main_process)
        logger = start(WandbLogger(), trainer, 1)
        fail(logger, trainer)
        if not is_main_process:
            logger.on_log(trainer, {"test_loss": 0.25})
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


def test_failing_disk_does_not_end_the_run(fake, caplog):
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
