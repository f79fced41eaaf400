"""Loggers by name and trackers of accelerate."""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker
from fake_runs import fake_trainer, run_to, start, train
from marks import TRAINERS, thinned
from recipes import Keyed, KeyedModel, callback, fit, same, weights
from resuming import Cut, Killed

import omnitrain
from omnitrain import (
    Callback,
    ConfigError,
    CsvLogger,
    HFTrainer,
    Histogram,
    MissingExtraError,
    TensorBoardLogger,
    Tracking,
    WandbLogger,
)

WEIGHTS = Histogram(edges=[0, 2, 4], counts=[1, 1], low=1.0, high=3.0, total=4.0, squares=10.0)


class Service(GeneralTracker):
    """A service with ids: all its runs, which processes that are killed leave behind."""

    name = "service"
    requires_logging_directory = False
    runs: dict[str, list[tuple[int, str, Any]]] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.id = ""
        self.settings: dict[str, Any] = {}
        self.open = self.fails = False

    @property
    def tracker(self) -> list[tuple[int, str, Any]]:
        return self.runs[self.id]

    def start(self) -> None:
        random.random()  # as many do, for a name
        self.id = self.id or f"run-{len(self.runs)}"
        self.runs.setdefault(self.id, [])
        self.open = True

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.settings = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        assert self.open
        if self.fails:
            raise ConnectionResetError("no route")
        self.tracker.extend((step or 0, name, value) for name, value in values.items())

    def finish(self) -> None:
        self.open = False

    def state_dict(self) -> dict[str, Any]:
        return {"id": self.id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.id = state["id"]


class Plain(Service):
    """The same, without ids."""

    name = "plain"
    state_dict = load_state_dict = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return super().__getattribute__(name)


class Reports(Callback):
    def on_eval_end(self, trainer: Any, metrics: Any) -> None:
        trainer.lifecycle.report({"preview": "a text", "weights": WEIGHTS})


@pytest.fixture(autouse=True)
def service():
    Service.runs = {}
    yield
    Service.runs = {}


def make(kind: str = "native", **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "max_steps": 10, "batch_size": 4, "log_steps": 2, "eval_steps": 5, "save_steps": 5, "progress_bar": False,
        "load_best_at_end": False,
    }  # fmt: skip
    if options.get("save_dir") is None:
        del defaults["save_steps"]
    if kind == "native":
        options["device"] = "cpu"
    return TRAINERS[kind](KeyedModel(), Keyed(), Keyed(8), Keyed(8), **(defaults | options))


def steps(name: str, run: str = "run-0") -> list[int]:
    return [step for step, key, _ in Service.runs[run] if key == name]


@pytest.mark.parametrize("kind", TRAINERS)
def test_resumed_run_continues_its_run_of_the_service(kind, tmp_path):
    options = {"save_dir": tmp_path, "eval_steps": 4, "keep_best": 0}
    with pytest.raises(Killed):
        make(kind, loggers=[Service()], callbacks=[Reports(), Cut("kill", 9)], **options).train()
    assert steps("train/loss") == [2, 4, 6, 8] and steps("preview") == [4, 8]  # and the checkpoint is of step 5
    trainer = fit(make(kind, loggers=[Service()], callbacks=[Reports()], **options), resume_from="auto")
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

    class Made(Plain):
        requires_logging_directory = False
        tracker = property(lambda self: SimpleNamespace(id="x", step=0, finish=lambda exit_code: None))

        def __init__(self, name: str, **options: Any) -> None:
            super().__init__()
            created.append((name, options))

    logger = Tracking("wandb", project="digits", nested_run=True)
    logger._class = Made
    trainer = fit(make(loggers=[logger], max_steps=1))
    assert created == [("digits", {"nested_run": True, "config": trainer.resolved_config()})]


def test_tracking_leaves_generators_and_accelerate_unchanged():
    random.seed(3)
    before = random.getstate()
    PartialState._reset_state()
    generators = []

    look = callback(order=50, on_train_start=lambda trainer: generators.append(random.getstate()))
    states = []
    for loggers in (None, [Service()]):
        random.setstate(before)
        trainer = fit(make(loggers=loggers, callbacks=[look]))
        states.append(weights(trainer.model))
    assert generators[0] == generators[1] and not PartialState._shared_state
    assert same(*states)


def test_failing_service_does_not_end_the_run(caplog):
    tracker = Service()

    def unplug(trainer: Any) -> None:
        tracker.fails = 3 < trainer.progress.step < 7

    make(loggers=[tracker], callbacks=[callback(on_step_end=unplug)]).train()
    assert steps("train/loss") == [2, 8, 10]
    assert caplog.text.count("service cannot be written: no route") == 1 and "works again" in caplog.text


def test_tracking_every_omits_rows_also_after_a_resume(tmp_path):
    def loggers() -> Any:
        return [Tracking(Service(), every="3ba")]

    make(loggers=loggers()).train()
    assert steps("train/loss") == [4, 6, 10] and steps("eval/loss") == [5, 10]  # the first rows after 3, 6 and 9
    with pytest.raises(Killed):
        make(save_dir=tmp_path, loggers=loggers(), callbacks=[Cut("kill", 4)], save_steps=3, keep_best=0).train()
    make(save_dir=tmp_path, loggers=loggers(), save_steps=3, keep_best=0).train(resume_from="auto")
    assert steps("train/loss", "run-1") == [4, 6, 10]


def events(folder: Path, name: str, kind: str = "Scalars") -> list[Any]:
    """Read all event files one by one: those of the same second have no order."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    values = []
    for path in folder.glob("events.*"):
        file = accumulator.EventAccumulator(str(path), size_guidance={"histograms": 0, "tensors": 0})
        file.Reload()
        values += getattr(file, kind)(name) if name in file.Tags()[kind.lower()] else []
    return values


@pytest.mark.parametrize("kind", thinned(TRAINERS, ["native", "hf"]))
def test_loggers_by_name_and_as_objects_get_the_same_rows(kind, tmp_path):
    loggers = ["tensorboard", "csv", TensorBoardLogger(tmp_path / "slow", every="5ba")]
    trainer = fit(make(kind, save_dir=tmp_path / "run", loggers=loggers, callbacks=[Reports()]))
    trainer.test()
    board, slow = tmp_path / "run" / "tensorboard", tmp_path / "slow"
    for folder, name, expected in (
        (board, "train/loss", [2, 4, 6, 8, 10]), (slow, "train/loss", [6, 10]), (slow, "eval/loss", [5, 10]),
        (board, "test/loss", [10]),
    ):  # fmt: skip
        assert [event.step for event in events(folder, name)] == expected
    histogram, _ = events(board, "weights", "Histograms")
    value = histogram.histogram_value
    assert (value.min, value.max, value.num, value.sum) == (1.0, 3.0, 2.0, 4.0)
    assert (list(value.bucket_limit), list(value.bucket)) == ([2.0, 4.0], [1.0, 1.0])
    text, _ = events(board, "preview/text_summary", "Tensors")
    assert text.tensor_proto.string_val[0] == b"    a text" and text.step == 5
    (config,) = events(board, "config/text_summary", "Tensors")
    assert json.loads(config.tensor_proto.string_val[0]) == trainer.resolved_config()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    reports = [row for row in rows if row["kind"] == "report"]
    assert [row["step"] for row in reports] == [5, 10]
    assert (reports[0]["preview"], reports[0]["weights/std"]) == ("a text", 1.0)
    table = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in table[1:]] == [row["kind"] for row in rows]


def scalars(log_dir: Path, name: str = "train/loss") -> list[int]:
    """Return the steps of a value as TensorBoard shows them, over all event files."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = accumulator.EventAccumulator(str(log_dir))
    shown.Reload()
    return [event.step for event in shown.Scalars(name)]


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

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "add_scalar", fail)
        run_to(logger, trainer, 8)
    run_to(logger, trainer, 12)
    logger.on_train_end(trainer)
    assert scalars(tmp_path) == list(range(1, 13))
    messages = [record.getMessage() for record in caplog.records if record.name == "omnitrain"]
    assert len(messages) == 2 and "cannot be written" in messages[0] and "works again" in messages[1]


def test_report_to_and_loggers_must_not_overlap(tmp_path):
    args = omnitrain.HFTrainingArguments(output_dir=str(tmp_path / "out"), report_to=["tensorboard"], use_cpu=True)
    with pytest.raises(ConfigError, match="both have 'tensorboard'"):
        HFTrainer(KeyedModel(), args, Keyed(), loggers="tensorboard")
    HFTrainer(KeyedModel(), args, Keyed(), loggers=[CsvLogger()])


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
def test_loggers_are_validated(options, message, tmp_path):
    if "save_dir" in options:
        options = {**options, "save_dir": tmp_path}
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_jsonl_logger_replaces_the_default_one(tmp_path):
    make(save_dir=tmp_path, loggers=[omnitrain.JsonlLogger(every="5ba")]).train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [6, 10]


def test_missing_package_is_an_error_in_the_constructor(monkeypatch):
    monkeypatch.setattr("omnitrain.loggers.tracking.find_spec", lambda name: None)
    for name in ("mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio", "wandb", "tensorboard"):
        with pytest.raises(MissingExtraError, match=f"pip install {name}"):
            make(loggers=[name])
    with pytest.raises(MissingExtraError, match=r"'wandb' needs wandb.*-e .*\[wandb\]"):
        WandbLogger()


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store.db")
    yield mlflow.MlflowClient(f"sqlite:///{tmp_path}/store.db")
    sys.modules.pop("mlflow", None)


def test_mlflow_run_is_resumed_with_each_step_once(mlflow, tmp_path):
    options = {"save_dir": tmp_path / "run", "loggers": ["mlflow"], "callbacks": [Reports()], "trial_name": "a"}
    with pytest.raises(Killed):
        make(**{**options, "callbacks": [Reports(), Cut("kill", 9)]}).train()
    trainer = fit(make(**options), resume_from="auto")
    trainer.test()
    (run,) = mlflow.search_runs([experiment.experiment_id for experiment in mlflow.search_experiments()])
    assert (run.info.run_name, run.info.status, run.data.params["batch_size"]) == ("a", "FINISHED", "4")
    for name, expected in (("train/loss", [2, 4, 6, 8, 10]), ("eval/loss", [5, 10]), ("test/loss", [10])):
        assert [metric.step for metric in mlflow.get_metric_history(run.info.run_id, name)] == expected
    texts = [artifact.path for artifact in mlflow.list_artifacts(run.info.run_id, "preview")]
    assert sorted(texts) == ["preview/step-10.txt", "preview/step-5.txt"]
