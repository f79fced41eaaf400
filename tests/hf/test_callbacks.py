"""The events, arguments and states that callbacks of transformers get, compared with those of a stock Trainer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from counting import Streamed
from marks import thinned
from recipes import callback, fit, setting
from tiny import Tokens, bert
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback

from omnitrain import HFTrainer

KINDS: tuple[Any, Any] = (transformers.Trainer, HFTrainer)
DEFAULTS = {
    "per_device_train_batch_size": 2, "num_train_epochs": 2, "learning_rate": 0.01, "save_strategy": "steps"
}  # fmt: skip
"""2 epochs of 4 steps."""


class Records(TrainerCallback):
    """Records every event with its step, and what it got."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, float]] = []
        self.args: dict[str, Any] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.details: dict[str, dict[str, Any]] = {}


def _recording(event: str) -> Any:
    def on_event(self: Records, args: Any, state: Any, control: Any, **details: Any) -> None:
        self.events.append((event, state.global_step, round(state.epoch or 0, 3)))
        self.args[event] = args
        self.states[event] = dict(vars(state))
        self.details[event] = details

    return on_event


for name in dir(TrainerCallback):
    if name.startswith("on_"):
        setattr(Records, name, _recording(name))


def fail(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def make(kind: Any, args: TrainingArguments | None, *callbacks: Any, **options: Any) -> Any:
    data = {"train_dataset": Tokens(8, "classes"), "eval_dataset": Tokens(4, "classes")}
    return kind(bert(), args, callbacks=[*callbacks], **data, **options)


def run(kind: Any, args: TrainingArguments | None, *callbacks: Any, **options: Any) -> tuple[Any, Records]:
    records = Records()
    return fit(make(kind, args, *callbacks, records, **options)), records


BY_STEPS = {"eval_strategy": "steps", "save_strategy": "steps", "logging_steps": 2}
CASES: dict[str, dict[str, Any]] = {
    "max_steps": {**BY_STEPS, "eval_steps": 2, "save_steps": 2, "max_steps": 5},
    "best at end": {**BY_STEPS, "eval_steps": 2, "save_steps": 4, "load_best_model_at_end": True},
    "accumulation": {**BY_STEPS, "eval_steps": 3, "save_steps": 3, "gradient_accumulation_steps": 2, "max_steps": 3},
    "best": {**BY_STEPS, "eval_steps": 2, "save_strategy": "best", "metric_for_best_model": "loss"},
    "epochs": {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"},
    "epochs, max_steps": {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": 5},
    "epochs, best": {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "loss"},
    "nothing": {"eval_strategy": "no", "save_strategy": "no", "logging_strategy": "no"},
    "first step": {"eval_strategy": "no", "save_strategy": "no", "logging_first_step": True, "logging_steps": 3},
}


@pytest.mark.parametrize("case", thinned(CASES, ["accumulation", "epochs", "first step"]))
def test_events_of_a_run_are_those_of_a_stock_trainer(arguments: Any, case: str) -> None:
    stock, expected = run(transformers.Trainer, arguments("stock", **CASES[case]))
    saves = {} if CASES[case]["save_strategy"] == "no" else {"keep_best": 0}  # else each new best is saved at once
    ours, records = run(HFTrainer, arguments("ours", **CASES[case]), **saves)
    assert records.events == expected.events
    for name in ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "global_step", "epoch"):
        assert getattr(ours.state, name) == getattr(stock.state, name), name
    assert [sorted(row) for row in ours.state.log_history] == [sorted(row) for row in stock.state.log_history]


def test_state_has_intervals_in_steps(arguments: Any) -> None:
    args = arguments(**{**BY_STEPS, "eval_steps": 0.3, "save_steps": 0.5, "logging_steps": 0.25})
    state = run(HFTrainer, args)[0].state
    assert (state.eval_steps, state.save_steps, state.logging_steps) == (3, 4, 2)


def test_evaluation_at_the_start_comes_before_on_train_begin(arguments: Any) -> None:
    """This is where the events differ from those of a stock Trainer."""
    args = arguments(eval_strategy="epoch", save_strategy="no", eval_on_start=True, max_steps=1)
    expected, events = (run(kind, args)[1].events for kind in KINDS)
    assert events == [event for event in expected if event != ("on_prediction_step", 0, 0)] != expected


def test_callbacks_get_the_values_of_our_arguments(arguments: Any, tmp_path: Path) -> None:
    args = arguments(num_train_epochs=3, save_strategy="no", learning_rate=5e-5)
    options: dict[str, Any] = {"learning_rate": 0.5, "epochs": 1, "max_grad_norm": None, "eval_steps": 2}
    values = run(HFTrainer, args, **options)[1].args["on_step_end"]
    assert (values.learning_rate, values.num_train_epochs, values.max_grad_norm) == (0.5, 1, 0.0)
    assert (values.eval_strategy, values.eval_steps, args.learning_rate) == ("steps", 2, 5e-5)
    options = {"epochs": 2, "batch_size": 2, "learning_rate": 0.5, "save_dir": tmp_path / "run", "save_steps": 3}
    _, records = run(HFTrainer, None, **options)
    values = records.args["on_init_end"]
    assert (values.num_train_epochs, values.per_device_train_batch_size, values.learning_rate) == (2, 2, 0.5)
    assert (values.save_strategy, values.save_steps, values.eval_strategy) == ("steps", 3, "epoch")
    assert values.output_dir == str(tmp_path / "run") and records.states["on_step_end"]["max_steps"] == 8


def test_callbacks_get_all_details_of_a_stock_trainer(arguments: Any) -> None:
    """And the arguments of the user, unchanged."""
    options = {**BY_STEPS, "eval_steps": 2, "save_steps": 2, "max_steps": 4, "max_grad_norm": 0.5}
    _, expected = run(transformers.Trainer, arguments("stock", **options))
    args = arguments("ours", **options)
    before = dict(vars(args))
    ours, records = run(HFTrainer, args)
    assert {id(value) for value in records.args.values()} == {id(args)} and vars(args) == before
    for event, details in expected.details.items():
        assert records.details[event].keys() == details.keys(), event
    details = records.details["on_step_end"]
    assert details["model"] is ours.get_model() and details["optimizer"] is ours.optimizer
    assert details["lr_scheduler"] is ours.lr_scheduler
    details = records.details["on_evaluate"]
    assert (len(details["train_dataloader"]), len(details["eval_dataloader"])) == (4, 1)
    assert sum(len(batch["labels"]) for batch in details["train_dataloader"]) == 8
    assert details["metrics"].keys() == expected.details["on_evaluate"]["metrics"].keys()


def test_callbacks_get_loaders_of_the_data(arguments: Any) -> None:
    loaders: list[Any] = []
    looks = callback(
        TrainerCallback,
        on_epoch_begin=lambda *_, train_dataloader, **__: loaders.append(train_dataloader),
        on_evaluate=lambda *_, eval_dataloader, **__: loaders.append(eval_dataloader),
    )
    data, held_out, stream = Tokens(8, "classes"), Tokens(4, "classes"), Streamed(Tokens(8, "classes"))
    custom = DataLoader(data, batch_size=2)
    args = arguments(eval_strategy="epoch", save_strategy="no", num_train_epochs=1)
    HFTrainer(bert(), args, data, held_out, callbacks=[looks]).train()
    args = arguments(save_strategy="no", max_steps=2)
    for options in ({"train_dataset": stream}, {"train_loader": custom}):
        HFTrainer(bert(), args, callbacks=[looks], **options).train()
    train, valid, streamed, users = loaders
    assert {type(loader) for loader in loaders} == {DataLoader}
    assert train.dataset is data and valid.dataset is held_out and streamed.dataset is stream and users is custom
    assert torch.cat([batch["labels"] for batch in valid]).tolist() == [int(row["labels"]) for row in held_out]
    assert len(next(iter(streamed))["labels"]) == 2


def test_state_of_a_checkpoint_counts_all_operations_up_to_it(arguments: Any, tmp_path: Path) -> None:
    counts = []
    for kind in KINDS:
        state = run(kind, arguments(kind.__name__, save_steps=3, max_steps=4, logging_steps=100))[0].state
        files = (tmp_path / kind.__name__ / f"checkpoint-{step}" / "trainer_state.json" for step in (3, 4))
        counts.append([state.total_flos, *(json.loads(file.read_text())["total_flos"] for file in files)])
    assert counts[0] == counts[1] and counts[0][1] > 0


def test_callback_list_is_that_of_a_stock_trainer(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    stopping, records = EarlyStoppingCallback(3), Records()
    args = arguments(eval_strategy="epoch", metric_for_best_model="loss", save_strategy="no", report_to="all")
    stock, ours = (make(kind, args, stopping, records).callback_handler.callbacks for kind in KINDS)
    assert [type(callback) for callback in stock] == [type(callback) for callback in ours]
    assert stopping in ours and records in ours


def test_error_of_a_callback_ends_the_run_with_its_name(arguments: Any) -> None:
    with pytest.raises(OSError, match="No space left") as error:
        run(HFTrainer, arguments(save_strategy="no", logging_steps=1), callback(TrainerCallback, on_log=fail))
    assert "Raised by the callback Functions.on_log." in error.value.__notes__


def test_on_save_finds_the_files_of_the_checkpoint(arguments: Any) -> None:
    """As the callbacks of MLflow and of W&B look for them."""
    options = {**BY_STEPS, "eval_steps": 2, "save_steps": 2, "save_total_limit": 1, "max_steps": 3}
    files: dict[int, set[str]] = {}

    def note(args: Any, state: Any, *_: Any, **__: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        files[state.global_step] = {path.name for path in folder.iterdir()}

    run(HFTrainer, arguments(load_best_model_at_end=True, **options), callback(TrainerCallback, on_save=note))
    assert files.keys() == {2, 3}
    assert {"config.json", "model.safetensors", "trainer_state.json"} <= files[2] & files[3]


def test_subclass_of_early_stopping_decides_by_itself(arguments: Any) -> None:
    """Here one for which no evaluation is better."""

    class Pessimist(EarlyStoppingCallback):
        def check_metric_value(self, *args: Any) -> None:
            self.early_stopping_patience_counter += 1

    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "learning_rate": 0.1}
    args = arguments(**options, load_best_model_at_end=True, metric_for_best_model="loss")
    assert run(HFTrainer, args, Pessimist(3))[0].state.global_step == 3


def test_evaluate_and_predict_have_the_events_of_a_stock_trainer(arguments: Any) -> None:
    events, metrics = [], []
    for kind in KINDS:
        records = Records()
        trainer = make(kind, arguments(save_strategy="no", per_device_eval_batch_size=2), records)
        trainer.evaluate()
        trainer.predict(Tokens(4, "classes"))
        events.append([event for event, *_ in records.events])
        metrics.append(records.details["on_predict"]["metrics"].keys() - {"test_model_preparation_time"})
    assert events[0] == events[1] and metrics[0] == metrics[1]


def test_memory_metrics_are_those_of_a_stock_trainer(arguments: Any) -> None:
    pytest.importorskip("psutil")
    results = []
    for kind in KINDS:
        trainer = fit(make(kind, arguments(save_strategy="no", skip_memory_metrics=False, max_steps=1)))
        predicted = trainer.predict(Tokens(4, "classes")).metrics
        metrics = {**trainer.evaluate(), **predicted, **trainer.state.log_history[-2]}
        results.append({name for name in metrics if "_mem_" in name})
    assert results[0] == results[1] and any(name.startswith("eval_mem_") for name in results[1])


RARE = {**BY_STEPS, "eval_steps": 100, "save_steps": 100, "logging_steps": 1}
ALL_AT_2 = {**BY_STEPS, "eval_steps": 2, "save_steps": 2, "logging_steps": 2}
FLAGS: list[Any] = [
    (RARE, "on_step_begin", "should_log", True),
    (RARE, "on_step_end", "should_evaluate", True),
    (RARE, "on_log", "should_save", True),
    (ALL_AT_2, "on_log", "should_evaluate", False),
    (ALL_AT_2, "on_evaluate", "should_save", False),
    (ALL_AT_2, "on_evaluate", "should_training_stop", True),
    (ALL_AT_2, "on_save", "should_training_stop", True),
    ({**RARE, "step": 4}, "on_epoch_end", "should_evaluate", True),
]


@pytest.mark.parametrize(
    ("options", "event", "flag", "value"),
    thinned(FLAGS, [FLAGS[2], FLAGS[4], FLAGS[7]]),
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_flags_are_honoured_at_every_event(arguments: Any, options: Any, event: str, flag: str, value: bool) -> None:
    events = []
    fields = {"max_steps": 5, **{name: field for name, field in options.items() if name != "step"}}
    for kind in KINDS:
        sets = setting(TrainerCallback, event, flag, value, options.get("step", 2))
        saves = {"keep_best": 0} if kind is HFTrainer else {}
        events.append(run(kind, arguments(kind.__name__, **fields), sets, **saves)[1].events)
    assert events[1] == events[0]


def test_stop_flag_at_a_log_ends_the_run_with_a_checkpoint(arguments: Any) -> None:
    """This is another difference."""
    stop = setting(TrainerCallback, "on_log", "should_training_stop")
    expected, events = (run(kind, arguments(kind.__name__, **RARE), stop)[1].events for kind in KINDS)
    assert [event for event in events if event[0] != "on_save"] == expected
    assert ("on_save", 2, 0.5) in events


@pytest.mark.parametrize("options", [{"eval_strategy": "epoch"}, {}])
def test_flag_to_save_is_shown_at_an_end_within_an_epoch(arguments: Any, options: Any) -> None:
    """With `save_strategy="epoch"`, as in a stock Trainer; the checkpoint comes once, after the last evaluation."""
    flags, saves = list[bool](), list[int]()
    watcher = callback(
        TrainerCallback,
        on_epoch_end=lambda args, state, control, **details: flags.append(control.should_save),
        on_save=lambda args, state, control, **details: saves.append(len(state.log_history)),
    )
    for kind in KINDS:
        run(kind, arguments(kind.__module__, max_steps=6, save_strategy="epoch", **options), watcher)
    assert flags == [True] * 4
    assert saves[2:] == saves[:2]


def test_flags_at_a_log_show_what_is_pending(arguments: Any) -> None:
    flags: list[Any] = []

    def note(args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        if "loss" in logs:
            flags.append((state.global_step, control.should_evaluate, control.should_save))

    for kind in KINDS:
        args = arguments(kind.__name__, **BY_STEPS, eval_steps=2, save_steps=4, max_steps=4)
        run(kind, args, callback(TrainerCallback, on_log=note))
    assert flags == [(2, True, False), (4, True, True)] * 2
    assert {type(value) for value in flags[-1]} == {int, bool}


@pytest.mark.parametrize("place", ["writer", "events"])
def test_failing_trackers_do_not_end_the_run(arguments: Any, monkeypatch: Any, caplog: Any, place: str) -> None:
    """As with `loggers`: those of `report_to` are reported, and the run continues."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    if place == "writer":
        for method in ("add_scalar", "flush", "close"):
            monkeypatch.setattr(tensorboard.SummaryWriter, method, fail)
    else:
        for event in ("on_init_end", "on_train_begin", "on_log", "on_train_end"):
            monkeypatch.setattr(TensorBoardCallback, event, fail, raising=False)
    trainer, records = run(HFTrainer, arguments(report_to=["tensorboard"], logging_steps=1, max_steps=3))
    assert trainer.progress.step == 3 and records.events[-1][0] == "on_train_end"
    (message,) = (message for message in caplog.messages if "of `report_to` failed" in message)
    assert message.startswith("TensorBoardCallback.on_")
