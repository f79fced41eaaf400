from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker
from recipes import Keyed, KeyedModel
from resuming import Killed

import omnitrain
from omnitrain import (
    AccelerateTrainer,
    Callback,
    ConfigError,
    CsvLogger,
    HFTrainer,
    Histogram,
    MissingExtraError,
    TensorBoardLogger,
    Tracking,
    Trainer,
    WandbLogger,
)

TRAINERS = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}
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


class KillAt(Callback):
    order = 99

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == self.step:
            raise Killed


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
def test_a_killed_run_goes_on_in_the_same_run_of_the_service_without_a_step_twice(kind, tmp_path):
    given = {"save_dir": tmp_path, "eval_steps": 4, "keep_best": 0}
    with pytest.raises(Killed):
        make(kind, loggers=[Service()], callbacks=[Reports(), KillAt(9)], **given).train()
    assert steps("train/loss") == [2, 4, 6, 8] and steps("preview") == [4, 8]  # and the checkpoint is of step 5
    trainer = make(kind, loggers=[Service()], callbacks=[Reports()], **given)
    trainer.train(resume_from="auto")
    trainer.test()
    assert list(Service.runs) == ["run-0"]
    assert steps("train/loss") == [2, 4, 6, 8, 10]
    assert steps("eval/loss") == steps("preview") == steps("weights/mean") == [4, 8, 10]
    assert steps("test/loss") == [10]


def test_a_test_in_another_process_goes_to_the_run_of_the_checkpoint(tmp_path):
    make(save_dir=tmp_path, loggers=[Service()]).train()
    trainer = make(save_dir=tmp_path, loggers=[Service()])
    trainer.load_checkpoint(tmp_path / "last")
    trainer.test()
    assert steps("test/loss") == [10] and list(Service.runs) == ["run-0"]


def test_a_second_fresh_training_is_another_run(tmp_path):
    trainer = make(loggers=[Plain()])
    trainer.train()
    tracker = Plain()
    make(loggers=[tracker], trial_name="b").train()
    assert steps("train/loss", "run-0") == steps("train/loss", "run-1") == [2, 4, 6, 8, 10]
    assert tracker.settings["batch_size"] == 4 and isinstance(tracker.settings["callbacks"], str)


def test_a_tracker_that_cannot_go_on_is_not_opened_twice(tmp_path, caplog):
    trainer = make(loggers=[Plain()])
    trainer.train()
    trainer.test()
    assert list(Service.runs) == ["run-0"] and not steps("test/loss")
    assert "plain has ended its run" in caplog.text


def test_watching_moves_no_random_number_and_leaves_no_state_of_accelerate_behind():
    random.seed(3)
    before = random.getstate()
    PartialState._reset_state()
    seen = []

    class Look(Callback):
        order = 50

        def on_train_start(self, trainer: Any) -> None:
            seen.append(random.getstate())

    states = []
    for loggers in (None, [Service()]):
        random.setstate(before)
        trainer = make(loggers=loggers, callbacks=[Look()])
        trainer.train()
        states.append({name: one.clone() for name, one in trainer.model.state_dict().items()})
    assert seen[0] == seen[1] and not PartialState._shared_state
    assert all(torch.equal(one, states[1][name]) for name, one in states[0].items())


def test_a_service_that_fails_during_the_run_does_not_end_it(caplog):
    tracker = Service()

    class Unplug(Callback):
        def on_step_end(self, trainer: Any) -> None:
            tracker.fails = 3 < trainer.progress.step < 7

    make(loggers=[tracker], callbacks=[Unplug()]).train()
    assert steps("train/loss") == [2, 8, 10]
    assert caplog.text.count("service cannot be written: no route") == 1 and "works again" in caplog.text


def test_rows_between_intervals_are_left_out_and_a_resume_keeps_the_place(tmp_path):
    def every() -> Any:
        return Tracking(Service(), every="3ba")

    make(loggers=[every()]).train()
    assert steps("train/loss") == [4, 6, 10] and steps("eval/loss") == [5, 10]  # the first rows after 3, 6 and 9
    with pytest.raises(Killed):
        make(save_dir=tmp_path, loggers=[every()], callbacks=[KillAt(4)], save_steps=3, keep_best=0).train()
    make(save_dir=tmp_path, loggers=[every()], save_steps=3, keep_best=0).train(resume_from="auto")
    assert steps("train/loss", "run-1") == [4, 6, 10]


def events(folder: Path, name: str, kind: str = "Scalars") -> list[Any]:
    """Read all event files one by one: those of the same second have no order."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = []
    for path in folder.glob("events.*"):
        one = accumulator.EventAccumulator(str(path), size_guidance={"histograms": 0, "tensors": 0})
        one.Reload()
        found += getattr(one, kind)(name) if name in one.Tags()[kind.lower()] else []
    return found


@pytest.mark.parametrize("kind", TRAINERS)
def test_loggers_by_name_and_as_objects_get_the_same_rows(kind, tmp_path):
    loggers = ["tensorboard", "csv", TensorBoardLogger(tmp_path / "slow", every="5ba")]
    trainer = make(kind, save_dir=tmp_path / "run", loggers=loggers, callbacks=[Reports()])
    trainer.train()
    trainer.test()
    board, slow = tmp_path / "run" / "tensorboard", tmp_path / "slow"
    assert [one.step for one in events(board, "train/loss")] == [2, 4, 6, 8, 10]
    assert [one.step for one in events(slow, "train/loss")] == [6, 10]
    assert [one.step for one in events(slow, "eval/loss")] == [5, 10]
    assert [one.step for one in events(board, "test/loss")] == [10]
    histogram, _ = events(board, "weights", "Histograms")
    value = histogram.histogram_value
    assert (value.min, value.max, value.num, value.sum) == (1.0, 3.0, 2.0, 4.0)
    assert (list(value.bucket_limit), list(value.bucket)) == ([2.0, 4.0], [1.0, 1.0])
    text, _ = events(board, "preview/text_summary", "Tensors")
    assert text.tensor_proto.string_val[0] == b"    a text" and text.step == 5
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    reports = [row for row in rows if row["kind"] == "report"]
    assert [row["step"] for row in reports] == [5, 10]
    assert (reports[0]["preview"], reports[0]["weights/std"]) == ("a text", 1.0)
    table = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in table[1:]] == [row["kind"] for row in rows]


def test_transformers_own_reports_stay_and_the_same_one_twice_is_refused(tmp_path):
    args = omnitrain.HFTrainingArguments(output_dir=str(tmp_path / "out"), report_to=["tensorboard"], use_cpu=True)
    with pytest.raises(ConfigError, match="both name 'tensorboard'"):
        HFTrainer(KeyedModel(), args, Keyed(), loggers="tensorboard")
    HFTrainer(KeyedModel(), args, Keyed(), loggers=[CsvLogger()])


@pytest.mark.parametrize(
    ("loggers", "message"),
    [
        ("tensorbord", "'tensorbord', and there is no such logger. Did you mean 'tensorboard'"),
        (3, "must be a name or a list of names and loggers, got 3"),
        ([Service], r"got the class Service. Pass Service\("),
        ([object()], "subclass of accelerate.tracking.GeneralTracker"),
        (["csv", CsvLogger()], "the file 'metrics.csv' twice"),
        ([WandbLogger(), WandbLogger(project="b")], "W&B twice"),
        ([TensorBoardLogger("a"), TensorBoardLogger("a")], "TensorBoard in '.*' twice"),
        ([Service(), Service()], "the tracker 'service' twice"),
    ],
)
def test_what_is_no_logger_or_comes_twice_is_refused(loggers, message):
    with pytest.raises(ConfigError, match=message):
        make(loggers=loggers)


def test_a_logger_in_callbacks_is_not_made_once_more():
    with pytest.raises(ConfigError, match="TensorBoard twice, or beside the same one in `callbacks`"):
        make(loggers="tensorboard", callbacks=[TensorBoardLogger()])


def test_options_beside_an_object_and_an_interval_that_is_none_are_refused():
    with pytest.raises(ConfigError, match="no options beside a tracker"):
        Tracking(Service(), tags=["a"])
    with pytest.raises(ConfigError, match="every"):
        Tracking(Service(), every="often")


@pytest.mark.parametrize("name", ["mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio", "wandb"])
def test_a_package_that_is_missing_is_named_before_the_first_step(name, monkeypatch):
    for module in ("omnitrain.callbacks.tracking", "omnitrain.callbacks.defaults"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=f"pip install {name}"):
        make(loggers=[name])


def test_a_logger_of_json_lines_replaces_the_one_of_the_trainer(tmp_path):
    make(save_dir=tmp_path, loggers=[omnitrain.JsonlLogger(every="5ba")]).train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [6, 10]


# --- services themselves, where they are installed


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store.db")
    yield mlflow.MlflowClient(f"sqlite:///{tmp_path}/store.db")
    sys.modules.pop("mlflow", None)


def test_mlflow_has_one_run_with_each_step_once(mlflow, tmp_path):
    with pytest.raises(Killed):
        make(save_dir=tmp_path / "run", loggers=["mlflow"], callbacks=[Reports(), KillAt(9)], trial_name="a").train()
    trainer = make(save_dir=tmp_path / "run", loggers=["mlflow"], callbacks=[Reports()], trial_name="a")
    trainer.train(resume_from="auto")
    trainer.test()
    (run,) = mlflow.search_runs([one.experiment_id for one in mlflow.search_experiments()])
    assert (run.info.run_name, run.info.status, run.data.params["batch_size"]) == ("a", "FINISHED", "4")
    for name, expected in (("train/loss", [2, 4, 6, 8, 10]), ("eval/loss", [5, 10]), ("test/loss", [10])):
        assert [one.step for one in mlflow.get_metric_history(run.info.run_id, name)] == expected
    texts = [one.path for one in mlflow.list_artifacts(run.info.run_id, "preview")]
    assert sorted(texts) == ["preview/step-10.txt", "preview/step-5.txt"]


def test_a_file_of_rows_without_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"asks for 'metrics.csv', and there is no place for it. Pass `save_dir`"):
        Trainer(torch.nn.Linear(1, 1), loggers=["csv"])
