"""What transformers' callbacks are told, in which order and with which arguments: as by a stock Trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from marks import thinned
from tiny import Tokens, bert
from torch.utils.data import DataLoader, IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from omnitrain import HFTrainer

KINDS: tuple[Any, Any] = (transformers.Trainer, HFTrainer)
EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    def make(folder: str = "run", **options: Any) -> TrainingArguments:
        defaults = {
            "use_cpu": True, "report_to": "none", "per_device_train_batch_size": 2, "num_train_epochs": 2,
            "learning_rate": 0.01,
        }  # fmt: skip
        return TrainingArguments(str(tmp_path / folder), **{**defaults, **options})

    return make


class Records(TrainerCallback):
    """Writes down every event, with the step it came at, and what it was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, float]] = []
        self.args: dict[str, Any] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.told: dict[str, dict[str, Any]] = {}

    def note(self, event: str, args: Any, state: Any, control: Any, **told: Any) -> None:
        self.seen.append((event, state.global_step, round(state.epoch or 0, 3)))
        self.args[event] = args
        self.states[event] = dict(vars(state))
        self.told[event] = told


def _noting(event: str) -> Any:
    def on_event(self: Records, *args: Any, **told: Any) -> None:
        self.note(event, *args, **told)

    return on_event


for name in EVENTS:
    setattr(Records, name, _noting(name))


def run(
    kind: Any, args: TrainingArguments, *callbacks: Any, resume_from_checkpoint: bool = False, **options: Any
) -> tuple[Any, Records]:
    records = Records()
    trainer = kind(
        bert(), args, train_dataset=Tokens(8, "classes"), eval_dataset=Tokens(4, "classes"),
        callbacks=[*callbacks, records], **options,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    return trainer, records


def state_of(trainer: Any) -> Any:
    return (trainer.engine if isinstance(trainer, HFTrainer) else trainer).state


BY_STEPS = {"eval_strategy": "steps", "save_strategy": "steps", "logging_steps": 2}
CASES: list[Any] = [
    {**BY_STEPS, "eval_steps": 2, "save_steps": 2},
    {**BY_STEPS, "eval_steps": 3, "save_steps": 3, "logging_steps": 1},
    {**BY_STEPS, "eval_steps": 2, "save_steps": 2, "max_steps": 5},
    {**BY_STEPS, "eval_steps": 2, "save_steps": 4, "load_best_model_at_end": True},
    {**BY_STEPS, "eval_strategy": "no", "save_steps": 3, "gradient_accumulation_steps": 2},
    {**BY_STEPS, "eval_steps": 2, "save_strategy": "best", "metric_for_best_model": "loss"},
    {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"},
    {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": 5},
    {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "loss"},
    {"eval_strategy": "no", "save_strategy": "no", "logging_strategy": "no"},
    {"eval_strategy": "no", "save_strategy": "no", "logging_first_step": True, "logging_steps": 3},
    {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no", "eval_delay": 5},
]


@pytest.mark.parametrize("said", thinned(CASES, CASES[1:3] + CASES[6:7] + CASES[10:11]), ids=str)
def test_the_events_of_a_run_are_those_of_a_stock_trainer(arguments: Any, said: dict[str, Any]) -> None:
    stock, theirs = run(transformers.Trainer, arguments("stock", **said))
    saves = {} if said["save_strategy"] == "no" else {"keep_best": 0}  # else each new best is saved at once
    ours, found = run(HFTrainer, arguments("ours", **said), **saves)
    assert found.seen == theirs.seen
    before, now = state_of(stock), state_of(ours)
    for name in ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "global_step", "epoch"):
        assert getattr(now, name) == getattr(before, name), name
    assert [sorted(row) for row in now.log_history] == [sorted(row) for row in before.log_history]


def test_intervals_that_are_shares_of_the_run_are_told_in_steps(arguments: Any) -> None:
    said = {**BY_STEPS, "eval_steps": 0.3, "save_steps": 0.5, "logging_steps": 0.25}
    states = [state_of(run(kind, arguments(kind.__name__, **said))[0]) for kind in KINDS]
    found = [(state.eval_steps, state.save_steps, state.logging_steps) for state in states]
    assert found == [(3, 4, 2), (3, 4, 2)]


ON_PURPOSE = [
    ({"eval_on_start": True}, ("on_prediction_step", 0, 0), "an evaluation before step 1 comes before on_train_begin"),
]


@pytest.mark.parametrize(("said", "missing", "why"), ON_PURPOSE, ids=str)
def test_what_is_told_otherwise_than_by_a_stock_trainer_is_listed(
    arguments: Any, said: dict[str, Any], missing: Any, why: str
) -> None:
    said = {"eval_strategy": "epoch", "save_strategy": "no", **said}
    _, theirs = run(transformers.Trainer, arguments("stock", **said))
    _, found = run(HFTrainer, arguments("ours", **said))
    assert missing not in found.seen
    assert found.seen == [one for one in theirs.seen if one != missing]


def test_a_new_best_is_saved_when_it_is_found_and_a_callback_is_told(arguments: Any) -> None:
    said = {**BY_STEPS, "eval_steps": 1, "save_steps": 100, "learning_rate": 0.0, "max_steps": 2}
    saves = [
        [step for event, step, _ in run(kind, arguments(kind.__name__, **said))[1].seen if event == "on_save"]
        for kind in KINDS
    ]
    assert saves == [[2], [1, 2]]


# --- what they see


def test_callbacks_see_the_very_arguments_of_the_user(arguments: Any) -> None:
    args = arguments(**BY_STEPS, eval_steps=2, save_steps=2, max_grad_norm=0.5, save_total_limit=2)
    before = dict(vars(args))
    _, found = run(HFTrainer, args)
    assert set(map(id, found.args.values())) == {id(args)}
    assert vars(args) == before
    assert (args.num_train_epochs, args.max_grad_norm, args.eval_strategy) == (2, 0.5, "steps")


def test_callbacks_see_what_arguments_of_ours_say_in_the_place_of_a_default(arguments: Any) -> None:
    args = arguments(num_train_epochs=3, save_strategy="no", learning_rate=5e-5)
    options: dict[str, Any] = {"learning_rate": 0.5, "epochs": 1, "max_grad_norm": None, "eval_steps": 2}
    _, found = run(HFTrainer, args, **options)
    seen = found.args["on_step_end"]
    assert (seen.learning_rate, seen.num_train_epochs, seen.max_grad_norm) == (0.5, 1, 0.0)
    assert (seen.eval_strategy, seen.eval_steps, args.learning_rate) == ("steps", 2, 5e-5)


def test_without_training_arguments_callbacks_see_what_is_in_force(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 2, "batch_size": 2, "learning_rate": 0.5, "save_dir": tmp_path / "run"}
    _, found = run(HFTrainer, None, save_steps=3, **options)  # type: ignore[arg-type]
    seen = found.args["on_init_end"]
    assert (seen.num_train_epochs, seen.per_device_train_batch_size, seen.learning_rate) == (2, 2, 0.5)
    assert (seen.save_strategy, seen.save_steps, seen.eval_strategy) == ("steps", 3, "epoch")
    assert seen.output_dir == str(tmp_path / "run") and found.states["on_step_end"]["max_steps"] == 8


def test_callbacks_get_all_that_a_stock_trainer_gives_them(arguments: Any) -> None:
    said = {**BY_STEPS, "eval_steps": 2, "save_steps": 2}
    _, theirs = run(transformers.Trainer, arguments("stock", **said))
    ours, found = run(HFTrainer, arguments("ours", **said))
    for event, told in theirs.told.items():
        assert found.told[event].keys() == told.keys(), event
    told = found.told["on_step_end"]
    assert told["model"] is ours.get_model() and told["optimizer"] is ours.optimizer
    assert told["lr_scheduler"] is ours.lr_scheduler
    loaders = [one.told["on_evaluate"] for one in (theirs, found)]
    assert [(len(one["train_dataloader"]), len(one["eval_dataloader"])) for one in loaders] == [(4, 1), (4, 1)]
    batches = list(loaders[1]["train_dataloader"])
    assert sum(len(batch["labels"]) for batch in batches) == 8
    metrics = [one.told["on_evaluate"]["metrics"] for one in (theirs, found)]
    assert metrics[0].keys() == metrics[1].keys()


class Reads(TrainerCallback):
    """Keeps the loaders that it is given."""

    def __init__(self) -> None:
        self.loaders: list[Any] = []

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any, **kwargs: Any) -> None:
        self.loaders.append(train_dataloader)

    def on_evaluate(self, args: Any, state: Any, control: Any, eval_dataloader: Any, **kwargs: Any) -> None:
        self.loaders.append(eval_dataloader)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_callbacks_read_the_users_data_by_the_loaders_that_they_see(arguments: Any, workers: int) -> None:
    data, held = Tokens(8, "classes"), Tokens(4, "classes")
    reads = Reads()
    args = arguments(eval_strategy="epoch", save_strategy="no", num_train_epochs=1, dataloader_num_workers=workers)
    HFTrainer(bert(), args, data, held, callbacks=[reads]).train()
    train, valid = reads.loaders
    assert (type(train), type(valid)) == (DataLoader, DataLoader)
    assert train.dataset is data and valid.dataset is held
    assert torch.cat([batch["labels"] for batch in valid]).tolist() == [int(held[i]["labels"]) for i in range(4)]


class Stream(IterableDataset[Any]):
    """Has an epoch, which callbacks set."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        yield from Tokens(8, "classes")


def test_callbacks_see_a_stream_and_a_loader_of_the_users_own(arguments: Any) -> None:
    stream, reads = Stream(), Reads()
    own = DataLoader(Tokens(8, "classes"), batch_size=2)  # type: ignore[arg-type]
    args = arguments(save_strategy="no", max_steps=2)
    HFTrainer(bert(), args, stream, callbacks=[reads]).train()
    HFTrainer(bert(), args, train_loader=own, callbacks=[reads]).train()
    assert reads.loaders[0].dataset is stream and reads.loaders[1] is own
    assert len(next(iter(reads.loaders[0]))["labels"]) == 2


def test_the_operations_that_a_checkpoint_tells_of_are_all_up_to_it(arguments: Any, tmp_path: Path) -> None:
    said = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 100}
    found = []
    for kind in KINDS:
        state = state_of(run(kind, arguments(kind.__name__, **said))[0])
        kept = [
            json.loads((tmp_path / kind.__name__ / f"checkpoint-{n}" / "trainer_state.json").read_text())
            for n in (3, 6, 8)
        ]
        found.append([state.total_flos, *(one["total_flos"] for one in kept)])
    assert found[0] == found[1] and found[0][1] > 0


def test_the_list_of_callbacks_is_that_of_a_stock_trainer(arguments: Any) -> None:
    stops, mine = EarlyStoppingCallback(3), Records()
    found = []
    for kind in KINDS:
        trainer: Any = kind(
            bert(), arguments(eval_strategy="epoch", metric_for_best_model="loss"), train_dataset=Tokens(8, "classes"),
            eval_dataset=Tokens(4, "classes"), callbacks=[stops, mine],
        )  # fmt: skip
        engine = trainer.engine if kind is HFTrainer else trainer
        found.append([type(one) for one in engine.callback_handler.callbacks])
        assert stops in engine.callback_handler.callbacks and mine in engine.callback_handler.callbacks
    assert found[0] == found[1]


def test_an_error_of_a_callback_names_it(arguments: Any) -> None:
    class Breaks(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        run(HFTrainer, arguments(save_strategy="no"), Breaks())
    assert "Raised by the callback Breaks.on_step_end." in caught.value.__notes__


def test_tensorboard_records_the_arguments_of_the_user(arguments: Any) -> None:
    pytest.importorskip("tensorboard")
    from transformers.integrations.integration_utils import TensorBoardCallback

    class Writer:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.texts: dict[str, str] = {}

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

        def add_text(self, name: str, text: str) -> None:
            self.texts[name] = text

    writer = Writer()
    board = TensorBoardCallback(writer)
    run(HFTrainer, arguments(save_strategy="no", max_grad_norm=0.5, eval_strategy="epoch"), board)
    recorded = json.loads(writer.texts["args"])
    assert (recorded["num_train_epochs"], recorded["max_grad_norm"], recorded["eval_strategy"]) == (2, 0.5, "epoch")


class Uploads(TrainerCallback):
    """Looks for the files of a checkpoint when it is told of it, as those of MLflow and of W&B do."""

    def __init__(self) -> None:
        self.files: dict[int, set[str]] = {}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.files[state.global_step] = {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("last", [8, 7], ids=["on an interval", "off it"])
def test_what_is_uploaded_from_a_checkpoint_is_where_a_stock_trainer_has_it(arguments: Any, last: int) -> None:
    found = []
    for kind in KINDS:
        uploads = Uploads()
        said = {**BY_STEPS, "eval_steps": 2, "save_steps": 2, "save_total_limit": 1, "max_steps": last}
        run(kind, arguments(kind.__name__, load_best_model_at_end=True, **said), uploads)
        found.append(uploads.files)
    assert found[0].keys() == found[1].keys()
    for files in found[1].values():
        assert {"config.json", "model.safetensors", "trainer_state.json"} <= files


class Judges(EarlyStoppingCallback):
    """Early stopping with a judgement of its own: no evaluation is a gain."""

    def check_metric_value(self, *args: Any) -> None:
        self.early_stopping_patience_counter += 1


def test_a_subclass_of_early_stopping_judges_in_its_own_way(arguments: Any) -> None:
    said = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    said |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.1}
    steps = [state_of(run(kind, arguments(kind.__name__, **said), Judges(3))[0]).global_step for kind in KINDS]
    assert steps == [3, 3]


# --- evaluations and predictions outside of a run


def test_batches_and_predictions_are_told_outside_of_a_run_too(arguments: Any) -> None:
    seen, told = [], []
    for kind in KINDS:
        records, data = Records(), Tokens(4, "classes")
        args = arguments(save_strategy="no", per_device_eval_batch_size=2)
        trainer: Any = kind(bert(), args, train_dataset=data, eval_dataset=data, callbacks=[records])
        trainer.evaluate()
        trainer.predict(data)
        seen.append([event for event, *_ in records.seen])
        told.append(records.told["on_predict"]["metrics"].keys() - {"test_model_preparation_time"})
    assert seen[0] == seen[1] and told[0] == told[1]


def test_the_memory_of_evaluations_is_measured_where_that_is_asked_for(arguments: Any) -> None:
    pytest.importorskip("psutil")
    found = []
    for kind in KINDS:
        data = Tokens(4, "classes")
        args = arguments(save_strategy="no", skip_memory_metrics=False)
        trainer: Any = kind(bert(), args, train_dataset=data, eval_dataset=data)
        trainer.train()
        metrics = {**trainer.evaluate(), **trainer.predict(data).metrics, **state_of(trainer).log_history[-2]}
        found.append({name for name in metrics if "_mem_" in name})
    assert found[0] == found[1] and any(name.startswith("eval_mem_") for name in found[1])


# --- flags


class Flags(TrainerCallback):
    """Sets one flag at one event of one step."""

    def __init__(self, event: str, flag: str, value: bool, step: int = 2) -> None:
        def on_event(args: Any, state: Any, control: Any, **told: Any) -> Any:
            if state.global_step == step:
                setattr(control, flag, value)
            return control

        setattr(self, event, on_event)


RARELY = {**BY_STEPS, "eval_steps": 100, "save_steps": 100, "logging_steps": 1}
ALL_AT_2 = {**BY_STEPS, "eval_steps": 2, "save_steps": 2, "logging_steps": 2}
FLAGS: list[Any] = [
    (RARELY, "on_step_begin", "should_log", True),
    (RARELY, "on_step_end", "should_evaluate", True),
    (RARELY, "on_log", "should_evaluate", True),
    (RARELY, "on_log", "should_save", True),
    (ALL_AT_2, "on_log", "should_evaluate", False),
    (ALL_AT_2, "on_log", "should_save", False),
    (ALL_AT_2, "on_step_end", "should_save", False),
    (ALL_AT_2, "on_evaluate", "should_save", False),
    (ALL_AT_2, "on_evaluate", "should_training_stop", True),
    (ALL_AT_2, "on_save", "should_training_stop", True),
    ({**ALL_AT_2, "save_steps": 100}, "on_evaluate", "should_save", True),
    ({**RARELY, "step": 4}, "on_epoch_end", "should_evaluate", True),
    ({**RARELY, "step": 4}, "on_epoch_end", "should_save", True),
]


@pytest.mark.parametrize(("said", "event", "flag", "value"), FLAGS, ids=str)
def test_flags_are_acted_on_at_every_event_as_by_a_stock_trainer(
    arguments: Any, said: dict[str, Any], event: str, flag: str, value: bool
) -> None:
    seen = []
    options = {name: one for name, one in said.items() if name != "step"}
    for kind in KINDS:
        sets = Flags(event, flag, value, said.get("step", 2))
        saves = {"keep_best": 0} if kind is HFTrainer else {}
        seen.append(run(kind, arguments(kind.__name__, **options), sets, **saves)[1].seen)
    assert seen[1] == seen[0]


def test_a_run_that_a_callback_ends_when_it_is_told_of_a_log_ends_there_and_saves(arguments: Any) -> None:
    seen = []
    for kind in KINDS:
        stops = Flags("on_log", "should_training_stop", True)
        seen.append(run(kind, arguments(kind.__name__, **RARELY), stops)[1].seen)
    assert [one for one in seen[1] if one[0] != "on_save"] == seen[0]
    assert ("on_save", 2, 0.5) in seen[1]


class Shown(TrainerCallback):
    """Notes what flags announce when a row of logs is told."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            self.seen.append((state.global_step, control.should_evaluate, control.should_save))


def test_flags_show_what_is_still_to_come(arguments: Any) -> None:
    seen = []
    for kind in KINDS:
        shown = Shown()
        run(kind, arguments(kind.__name__, **{**BY_STEPS, "eval_steps": 2, "save_steps": 4}), shown)
        seen.append(shown.seen)
    assert seen[1] == seen[0] == [(2, True, False), (4, True, True), (6, True, False), (8, True, True)]
    assert set(map(type, seen[1][0])) == {int, bool}


class Keeps(TrainerCallback, ExportableState):
    """Keeps a word in checkpoints."""

    def __init__(self, word: str = "none") -> None:
        self.word = word

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"word": self.word}}


def test_a_run_that_had_ended_is_there_with_its_history_and_what_callbacks_keep(
    arguments: Any, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"max_steps": 4, "save_steps": 4, "save_strategy": "steps", "logging_steps": 2}
    first, _ = run(HFTrainer, arguments("ended", **said), Keeps("one"), Keeps("two"))
    kept = [Keeps(), Keeps()]
    again, _ = run(HFTrainer, arguments("ended", **said), *kept, resume_from_checkpoint=True)
    assert [one.word for one in kept] == ["one", "two"]
    assert again.state.global_step == 4 and again.state.log_history[:2] == first.state.log_history[:2]
    assert "the state of a callback" not in caplog.text
    run(HFTrainer, arguments("ended", **said), Keeps(), resume_from_checkpoint=True)
    assert "the state of a callback 'Keeps', which is not among the callbacks" in caplog.text
