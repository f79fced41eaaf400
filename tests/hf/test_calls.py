"""The calling surface of transformers.Trainer, and what a subclass overrides of it, beside the stock Trainer."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from recipes import Keyed, KeyedModel, Sentences, Tagger, distance, rows, same, t16, weights
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from omnitrain import Callback, HFTrainer, StepOutput, Trainer
from omnitrain.errors import ConfigError
from omnitrain.hf.calls import ANSWERED_BY_ENGINE, CALLED, Calls


@pytest.fixture
def args(tmp_path: Path) -> Any:
    """Makes TrainingArguments for 20 rows in steps of 4."""

    def make(**options: Any) -> TrainingArguments:
        defaults = {
            "output_dir": str(tmp_path / "run"), "num_train_epochs": 2, "per_device_train_batch_size": 4,
            "learning_rate": 0.05, "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no",
            "disable_tqdm": True, "train_sampling_strategy": "sequential", "lr_scheduler_type": "constant",
        }  # fmt: skip
        return TrainingArguments(**{**defaults, **options})

    return make


def made(args: TrainingArguments, kind: Any = HFTrainer, model: Any = KeyedModel, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(model=model(), args=args, train_dataset=Keyed(), eval_dataset=Keyed(8), **options)


# --- names

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))


def verdicts() -> dict[str, set[str]]:
    """Return the names of each verdict that the page has."""
    table = (
        PAGE.read_text(encoding="utf-8").split("\n## Every public name of transformers.Trainer\n")[1].split("\n## ")[0]
    )
    same, engine = (re.search(rf"\n\| {words} \| (.*) \|", table) for words in ("the same", "passed on to the engine"))
    another, absent = (re.split(rf"\n\| {words} \|", table)[1].split("\n\n")[0] for words in ("different", "missing"))
    found = {"same": same[1], "engine": engine[1]}  # type: ignore[index]
    found |= {
        kind: " ".join(row.split(" | ")[0] for row in rows.splitlines()[2:])
        for kind, rows in (("another", another), ("absent", absent))
    }
    return {kind: set(re.findall(r"`(\w+)`", names)) for kind, names in found.items()}


def public_names() -> set[str]:
    """Return the methods of transformers.Trainer, and the attributes that they set."""
    source = inspect.getsource(transformers.Trainer)
    attributes = re.findall(r"self\.([a-z]\w*)\s*(?::[^=\n]+)?=[^=]", source)
    return {name for name in dir(transformers.Trainer) if not name.startswith("_")} | set(attributes)


@pytest.mark.skipif(VERSION > (5, 23), reason="newer than what is supported")
def test_every_public_name_of_transformers_trainer_has_a_verdict_on_the_page() -> None:
    kinds = verdicts()
    listed = [name for names in kinds.values() for name in names]
    assert len(listed) == len(set(listed)) and public_names() - set(listed) == set()
    if VERSION == (5, 23):
        assert set(listed) - public_names() == set()
    trainer = HFTrainer(t16(0.0, torch.float32), None, rows(4, torch.float32), loss_fn=F.mse_loss, batch_size=4)
    there = {*kinds["same"], *kinds["engine"], *kinds["another"]} & public_names()
    assert not [name for name in there if not hasattr(trainer, name)]
    assert not [name for name in kinds["absent"] - {"objective"} if hasattr(trainer, name)]  # ours is another one
    assert kinds["engine"] == set(ANSWERED_BY_ENGINE)


def batch_of(trainer: Any) -> Any:
    return {name: value[:4] for name, value in next(iter(trainer.get_train_dataloader())).items()}


def formatting(trainer: Any) -> Any:
    """Return the function; that of 5.23 cannot be called as a method."""
    return trainer.metrics_format if isinstance(trainer, HFTrainer) else transformers.trainer_pt_utils.metrics_format


def keys_of(loader: Any) -> Any:
    return isinstance(loader, DataLoader), len(loader), sorted(next(iter(loader)))


CALLS: dict[str, Any] = {
    "add_callback": lambda t: t.add_callback(Counts()),
    "autocast_smart_context_manager": lambda t: t.autocast_smart_context_manager(),
    "call_model_init": lambda t: t.call_model_init(),
    "compute_loss": lambda t: t.compute_loss(t.model, batch_of(t)).shape,
    "compute_loss_context_manager": lambda t: t.compute_loss_context_manager(),
    "create_optimizer": lambda t: isinstance(t.create_optimizer(), torch.optim.Optimizer),
    "create_optimizer_and_scheduler": lambda t: t.create_optimizer_and_scheduler(4),
    "create_scheduler": lambda t: type(t.create_scheduler(4, t.create_optimizer())),
    "evaluate": lambda t: "eval_loss" in t.evaluate(),
    "evaluation_loop": lambda t: t.evaluation_loop(t.get_eval_dataloader(), "x").num_samples,
    "floating_point_ops": lambda t: t.floating_point_ops(batch_of(t)),
    "get_cp_size": lambda t: t.get_cp_size(),
    "get_decay_parameter_names": lambda t: sorted(t.get_decay_parameter_names(t.model)),
    "get_eval_dataloader": lambda t: keys_of(t.get_eval_dataloader()),
    "get_learning_rates": lambda t: {type(rate) for rate in t.get_learning_rates()},
    "get_num_trainable_parameters": lambda t: t.get_num_trainable_parameters(),
    "get_optimizer_cls_and_kwargs": lambda t: t.get_optimizer_cls_and_kwargs(t.args),
    "get_optimizer_group": lambda t: sum(map(len, t.get_optimizer_group())),
    "get_sp_size": lambda t: t.get_sp_size(),
    "get_test_dataloader": lambda t: keys_of(t.get_test_dataloader(Keyed(8))),
    "get_total_train_batch_size": lambda t: t.get_total_train_batch_size(t.args),
    "get_tp_size": lambda t: t.get_tp_size(),
    "get_train_dataloader": lambda t: keys_of(t.get_train_dataloader()),
    "is_local_process_zero": lambda t: t.is_local_process_zero(),
    "is_world_process_zero": lambda t: t.is_world_process_zero(),
    "log": lambda t: (t.log({"mine": 1.0}), sorted(t.state.log_history[-1])),
    "log_metrics": lambda t: t.log_metrics("eval", {"eval_loss": 1.0}),
    "metrics_format": lambda t: formatting(t)({"eval_loss": 1.0, "eval_runtime": 3.0, "total_flos": 1e9}),
    "num_examples": lambda t: t.num_examples(t.get_train_dataloader()),
    "pop_callback": lambda t: (t.add_callback(Counts()), type(t.pop_callback(Counts))),
    "predict": lambda t: [getattr(one, "shape", None) for one in t.predict(Keyed(8))],
    "prediction_step": lambda t: [one.shape for one in t.prediction_step(t.model, batch_of(t), False)],
    "remove_callback": lambda t: (t.add_callback(Counts()), t.remove_callback(Counts)),
    "save_metrics": lambda t: (t.save_metrics("eval", {"eval_loss": 1.0}), files_of(t))[1],
    "save_model": lambda t: (t.save_model(), files_of(t))[1],
    "save_state": lambda t: (t.save_state(), files_of(t))[1],
    "store_flos": lambda t: t.store_flos(),
    "train": lambda t: len(tuple(t.train())),
    "training_step": lambda t: t.training_step(t.model, batch_of(t)).shape,
}
ELSEWHERE = {
    "hyperparameter_search": ("test_search.py", "hyperparameter_search("),
    "push_to_hub": ("test_hub.py", "push_to_hub("),
    "create_model_card": ("test_hub.py", "create_model_card("),
    "init_hf_repo": ("test_hub.py", "def test_the_repository_is_made_with_the_trainer"),
}
"""Methods that need a search, or the Hub: the file of tests, and what is in it."""


def files_of(trainer: Any) -> list[str]:
    return sorted(path.name for path in Path(trainer.args.output_dir).iterdir() if path.is_file())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A stock trainer and ours after the same run."""
    made = []
    for kind in (transformers.Trainer, HFTrainer):
        said: dict[str, Any] = {"num_train_epochs": 1, "per_device_train_batch_size": 4, "report_to": []}
        said |= {"use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
        folder = tmp_path_factory.mktemp(kind.__name__)
        trainer: Any = kind(
            model_init=lambda: KeyedModel(),  # of a class, transformers counts the arguments
            args=TrainingArguments(str(folder), **said),
            train_dataset=Keyed(),
            eval_dataset=Keyed(8),
        )
        trainer.train()
        made.append(trainer)
    return made


@pytest.mark.parametrize("name", sorted(verdicts()["same"] | verdicts()["engine"]))
def test_a_name_answers_as_in_a_stock_trainer(name: str, pair: Any) -> None:
    if name in ELSEWHERE:
        file, words = ELSEWHERE[name]
        assert words in (Path(__file__).parent / file).read_text(encoding="utf-8")
        return
    if not hasattr(pair[0], name):
        pytest.skip("this transformers has no such name")
    answers = [CALLS[name](trainer) if name in CALLS else getattr(trainer, name) for trainer in pair]
    assert name in CALLS or not callable(getattr(transformers.Trainer, name, None)), "call it"
    if answers == [None, ""]:  # of `fsdp`, which our backends see to
        return
    kinds = [type(answer) for answer in answers]
    ours = (CallbackHandler, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR)
    assert kinds[0] is kinds[1] or isinstance(answers[1], ours), kinds
    if isinstance(answers[1], (bool, int, float, str, dict, list, set, tuple, torch.Size)):
        assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["train", "evaluate", "predict", "save_model", "log", "save_metrics", "log_metrics",
                                  "create_optimizer", "create_scheduler", "compute_loss", "training_step",
                                  "prediction_step", "get_eval_dataloader", "push_to_hub"])  # fmt: skip
def test_methods_take_the_arguments_of_transformers_by_name(name: str) -> None:
    theirs = inspect.signature(getattr(transformers.Trainer, name)).parameters
    ours = inspect.signature(getattr(HFTrainer, name)).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in ours.values())
    assert takes_any or theirs.keys() <= ours.keys()


def test_what_is_read_from_the_engine_is_there_and_nothing_else_is(args: Any) -> None:
    trainer = made(args())
    for name in ANSWERED_BY_ENGINE:
        assert getattr(trainer, name) is not None or getattr(trainer.engine, name) is None
    assert isinstance(trainer.callback_handler, CallbackHandler) and trainer.args.learning_rate == 0.05
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        trainer.nonsense  # noqa: B018


# --- calls


def test_results_of_a_run_answer_as_those_of_transformers(args: Any) -> None:
    stock = made(args(), transformers.Trainer)
    expected = stock.train()
    trainer = made(args())
    result = trainer.train()
    step, loss, metrics = result
    assert step == result.global_step == expected.global_step == trainer.state.global_step == 10
    assert loss == result.training_loss == pytest.approx(expected.training_loss, rel=1e-5)
    assert metrics == result.metrics and metrics.keys() >= expected.metrics.keys()
    assert metrics["epoch"] == expected.metrics["epoch"] and result["train_metrics_history"][1]["step"] == 10
    assert dict(result)["valid"] == result["valid"] and json.loads(json.dumps(result))["valid"] == result["valid"]
    with pytest.raises(KeyError, match="Did you mean 'valid'"):
        result["vlaid"]
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in logged] == list(range(1, 11)) and len(stock.state.log_history) == 11


def test_sets_are_evaluated_and_predicted_by_transformers_names(args: Any) -> None:
    trainer, stock = made(args()), made(args(), transformers.Trainer)
    expected = stock.evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected)
    for found in (
        trainer.evaluate(eval_dataset=Keyed(8), ignore_keys=None, metric_key_prefix="dev"),
        trainer.evaluate(Keyed(8), None, "dev"),
        trainer.evaluate(Keyed(8), ["hidden"], metric_key_prefix="dev"),
    ):
        assert found == {"dev_loss": pytest.approx(expected)}
    theirs = stock.predict(Keyed(8), metric_key_prefix="x")
    for result in (
        trainer.predict(Keyed(8), None, "x"),
        trainer.predict(test_dataset=Keyed(8), ignore_keys=[], metric_key_prefix="x"),
    ):
        assert np.array_equal(result.label_ids, theirs.label_ids) and result.labels is result.label_ids
        assert np.allclose(result.predictions, theirs.predictions)
        assert result.metrics["x_loss"] == pytest.approx(theirs.metrics["x_loss"])
        predictions, labels, metrics = result
        assert predictions is result.predictions and labels is result.labels and metrics is result.metrics
    with pytest.raises(ConfigError, match="two names"):
        trainer.evaluate(Keyed(8), eval_dataset=Keyed(8))


def test_an_evaluation_set_is_named_by_its_name(args: Any) -> None:
    sets = {"near": Keyed(8), "far": Keyed(12)}
    trainer = HFTrainer(KeyedModel(), args(), train_dataset=Keyed(), eval_dataset=sets)
    assert trainer.evaluate("far") == {"eval_far_loss": trainer.evaluate(Keyed(12))["eval_loss"]}
    with pytest.raises(ConfigError, match="no 'elsewhere': there are 'near', 'far'"):
        trainer.evaluate(eval_dataset="elsewhere")


class Verbose(nn.Module):
    """Returns more than scores."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.body(x)
        return {"loss": F.mse_loss(output, labels), "scores": output, "hidden": x}


def test_ignored_keys_are_left_out_of_predictions_as_in_transformers(args: Any) -> None:
    found = []
    for kind in (transformers.Trainer, HFTrainer):
        trainer = made(args(), kind, Verbose)
        found.append([trainer.predict(Keyed(8)).predictions, trainer.predict(Keyed(8), ["hidden"]).predictions])
    (theirs, their_part), (ours, our_part) = found
    assert [part.shape for part in ours] == [part.shape for part in theirs] == [(8, 1), (8, 4)]
    assert np.allclose(our_part, their_part) and our_part.shape == (8, 1)


def test_models_states_and_metrics_are_written_as_scripts_do_it(args: Any, tmp_path: Path, capsys: Any) -> None:
    trainer = made(args())
    result = trainer.train()
    for _ in range(2):  # a second time replaces the first
        trainer.save_model()
        trainer.save_model(str(tmp_path / "other"))
    metrics = result.metrics
    metrics["train_samples"] = 20
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_state()
    assert "train_samples" in capsys.readouterr().out
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} >= {
        "model.safetensors", "training_args.bin", "train_results.json", "eval_results.json", "all_results.json",
        "trainer_state.json",
    }  # fmt: skip
    everything = json.loads((run / "all_results.json").read_text())
    assert everything["train_samples"] == 20 and "eval_loss" in everything
    assert json.loads((run / "trainer_state.json").read_text())["global_step"] == 10
    assert (tmp_path / "other" / "model.safetensors").exists()


@pytest.mark.parametrize("order", ["ours", "theirs"])
def test_arguments_are_taken_by_position_in_either_order(order: str, args: Any) -> None:
    def collate(samples: Any) -> Any:
        return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}

    if order == "ours":
        trainer = HFTrainer(KeyedModel(), args(), Keyed(), Keyed(8), data_collator=collate)
    else:
        trainer = HFTrainer(KeyedModel(), args(), collate, Keyed(), Keyed(8))
    assert len(trainer.train_dataset) == 20 and len(trainer.eval_dataset) == 8
    assert trainer.data_collator is collate


def test_loaders_leave_out_columns_that_the_model_does_not_take_as_in_transformers(args: Any) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"x": Keyed(4).x.tolist(), "labels": Keyed(4).y.tolist(), "text": ["a", "bcd", "e", "fg"]}
    data = datasets.Dataset.from_dict(columns)
    for keeps in (False, True):
        found = []
        for kind in (transformers.Trainer, HFTrainer):
            torch.manual_seed(0)
            said = args(remove_unused_columns=not keeps, per_device_eval_batch_size=1, per_device_train_batch_size=1)
            options = {"eval_dataset": data, "data_collator": lambda samples: dict(samples[0])}
            trainer = kind(model=KeyedModel(), args=said, train_dataset=data, **options)
            loaders = trainer.get_train_dataloader(), trainer.get_eval_dataloader(), trainer.get_test_dataloader(data)
            found.append([sorted(next(iter(loader))) for loader in loaders])
        assert found[0] == found[1] == [sorted(columns) if keeps else ["labels", "x"]] * 3


def test_an_optimizer_is_taken_as_class_and_options(args: Any) -> None:
    trainer = made(args(), optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.25, "momentum": 0.5}))
    assert type(trainer.optimizer) is torch.optim.SGD and trainer.get_learning_rates() == [0.25]
    assert trainer.get_optimizer_group(next(trainer.model.parameters())) is trainer.optimizer.param_groups[0]


def test_a_schedule_is_made_for_a_number_of_steps(args: Any) -> None:
    trainer = made(args(lr_scheduler_type="linear"))
    trainer.create_optimizer_and_scheduler(num_training_steps=4)
    rates = []
    for _ in range(4):
        rates += trainer.lr_scheduler.get_last_lr()
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert rates == pytest.approx([0.05, 0.0375, 0.025, 0.0125])


class Counts(TrainerCallback):
    """Counts its calls."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1


class OurCounts(Callback):
    """The same, of ours."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, trainer: Any) -> None:
        self.steps += 1


@pytest.mark.parametrize("kind", [Counts, OurCounts])
def test_callbacks_are_added_and_removed(kind: Any, args: Any) -> None:
    trainer = made(args())
    kept, removed, popped = kind(), kind(), kind()
    for callback in (removed, kept, popped):
        trainer.add_callback(callback)
    trainer.remove_callback(removed)
    assert trainer.pop_callback(popped) is popped and trainer.pop_callback(popped) is None
    trainer.train()
    assert (kept.steps, removed.steps, popped.steps) == (10, 0, 0)
    trainer.train()
    assert kept.steps == 20


def test_an_early_stopping_callback_that_is_added_stops_a_run(args: Any) -> None:
    trainer = made(args(eval_strategy="steps", eval_steps=1, num_train_epochs=20, learning_rate=0.0))
    trainer.add_callback(transformers.EarlyStoppingCallback(2, 0.001))
    for _ in range(2):
        assert trainer.train()["stop_reason"] == "early_stopping" and trainer.progress.step == 3
        assert trainer.objective.delta == 0.001
    with pytest.raises(ConfigError, match="eval_dataset"):
        HFTrainer(KeyedModel(), args(), Keyed()).add_callback(transformers.EarlyStoppingCallback(2))


def test_a_run_goes_on_by_transformers_name_of_the_argument(args: Any, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3}
    straight = made(args(output_dir=str(tmp_path / "straight"), **options))
    straight.train()
    part = made(args(max_steps=5, **options))
    part.train()
    for which in (True, str(tmp_path / "run" / "checkpoint-3")):
        trainer = made(args(**options))
        trainer.train(resume_from_checkpoint=which)
        assert same(weights(trainer.model), weights(straight.model))
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        made(args(output_dir=str(tmp_path / "empty"), **options)).train(resume_from_checkpoint=True)


def test_a_second_run_in_the_same_folder_replaces_the_first_and_says_so(
    args: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made(args(save_strategy="steps", save_steps=3)).train()
    assert "earlier run" not in caplog.text
    trainer = made(args(save_strategy="steps", save_steps=4))
    trainer.train()
    assert "4 checkpoints of an earlier run, up to checkpoint-10" in caplog.text
    assert [path.name for path in trainer.store.checkpoints()] == ["checkpoint-4", "checkpoint-8", "checkpoint-10"]
    with pytest.raises(ConfigError, match="already holds checkpoints"):
        made(args(save_strategy="steps", save_steps=4), overwrite=False).train()


def test_training_arguments_that_are_changed_afterwards_are_refused(args: Any) -> None:
    trainer = made(args())
    trainer.args.learning_rate = 0.1
    with pytest.raises(ConfigError, match=r"args.learning_rate. was 0.05 .* and is 0.1 now"):
        trainer.train()


# --- subclasses


class Weighted(HFTrainer):
    """The most frequent subclass: a loss of one's own."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = 2 * F.mse_loss(outputs["logits"], labels)
        return (loss, outputs) if return_outputs else loss


def test_a_loss_of_a_subclass_trains_and_evaluates_as_in_transformers(args: Any) -> None:
    class Stock(transformers.Trainer):
        compute_loss = Weighted.compute_loss

    def fitting(kind: Any) -> Any:
        trainer = made(args(eval_strategy="epoch"), kind)
        trainer.train()
        return trainer, trainer.evaluate()["eval_loss"]

    (stock, theirs), (ours, loss) = fitting(Stock), fitting(Weighted)
    assert loss == pytest.approx(theirs, rel=1e-5) and loss != pytest.approx(made(args()).evaluate()["eval_loss"])
    assert ours.predict(Keyed(8)).predictions.shape == stock.predict(Keyed(8)).predictions.shape == (8, 1)


class Named(KeyedModel):
    """A model whose output names a metric."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:  # type: ignore[override]
        return {**super().forward(x, labels), "metrics": {"size": x.abs().mean()}}


class Doubled(HFTrainer):
    """Twice the loss of the model, and a metric of its own."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return StepOutput(2 * loss, outputs["logits"], metrics={"plain": loss})


def test_metrics_of_a_pass_come_through_a_loss_of_a_subclass(args: Any) -> None:
    class Passing(HFTrainer):
        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            return super().compute_loss(*arguments, **options)

    rows = []
    for kind in (HFTrainer, Passing, Doubled):
        torch.manual_seed(0)
        said = args(eval_strategy="epoch", logging_steps=1, max_steps=2, learning_rate=0.0, max_grad_norm=0.0)
        trainer = kind(Named(), said, train_dataset=Keyed(), eval_dataset=Keyed(8))
        history = trainer.train()
        rows.append((history["train_metrics_history"][-1], history["valid"][-1]))
    (plain, plain_valid), (passed, passed_valid), (doubled, doubled_valid) = rows
    assert "train_size" in plain and plain == passed and plain_valid == passed_valid and "eval_size" in plain_valid
    assert doubled["train_plain"] == pytest.approx(plain["train_loss"], rel=1e-6)
    assert (
        doubled["train_loss"] == pytest.approx(2 * plain["train_loss"]) and doubled["train_size"] == plain["train_size"]
    )
    assert doubled_valid["eval_plain"] == pytest.approx(plain_valid["eval_loss"], rel=1e-6)
    assert doubled_valid["eval_size"] == plain_valid["eval_size"]


class Pairs(Keyed):
    """What belongs together, without labels."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "other": self.y[index]}


class Contrasting(HFTrainer):
    """A loss that needs no labels."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(inputs["x"])
        loss = F.mse_loss(outputs["logits"], inputs["other"])
        return (loss, outputs) if return_outputs else loss


def test_a_loss_without_labels_is_evaluated_too(args: Any) -> None:
    said = args(eval_strategy="epoch", remove_unused_columns=False)
    trainer = Contrasting(KeyedModel(), said, train_dataset=Pairs(), eval_dataset=Pairs(8))
    last = trainer.train()["valid"][-1]["eval_loss"]
    assert (
        trainer.evaluate()["eval_loss"]
        == last
        == pytest.approx(Trainer(trainer.model, eval_dataset=Keyed(8)).evaluate()["eval_loss"])
    )
    found = trainer.predict(Pairs(8))  # of the model alone, as in transformers
    assert found.predictions.shape == (8, 1) and "test_loss" not in found.metrics


class OfTokens(HFTrainer):
    """A mean over the labels of a micro-batch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)["logits"]
        labels = inputs["labels"]
        loss = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        kept = int((labels != -100).sum())
        if self.model.training:
            assert num_items_in_batch == kept
        loss = loss / kept
        return (loss, {"logits": outputs}) if return_outputs else loss


@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (2, 4), (1, 8)])
def test_a_mean_of_a_subclass_gives_the_same_numbers_in_every_split(batch_size: int, accumulation: int) -> None:
    def trained(kind: Any, batch_size: int, accumulation: int, **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        trainer = kind(
            Tagger().double(), train_dataset=Sentences(24), batch_size=batch_size, epochs=1, learning_rate=0.05,
            gradient_accumulation_steps=accumulation, progress_bar=False, **options,
        )  # fmt: skip
        trainer.train()
        return weights(trainer.model)

    expected = trained(Trainer, 8, 1, device="cpu")
    assert distance(trained(OfTokens, batch_size, accumulation), expected) < 1e-12


def test_steps_logs_and_evaluations_of_a_subclass_are_called(args: Any) -> None:
    seen: list[str] = []

    class Own(HFTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            seen.append("step")
            return super().training_step(model, inputs, num_items_in_batch)

        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            seen.append("prediction")
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return loss, 2 * logits, labels

        def log(self, logs: dict[str, float]) -> None:
            seen.append("log")
            super().log({**logs, "own": 1.0})

        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
            seen.append("evaluation")
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            return {**metrics, "eval_own": 0.5}

    trainer = made(args(eval_strategy="epoch"), Own)
    plain = made(args(eval_strategy="epoch"))
    assert same(weights(plain.model), weights(trainer.model))
    result, expected = trainer.train(), plain.train()
    assert same(weights(plain.model), weights(trainer.model))
    assert seen.count("step") == 10 and seen.count("evaluation") == 2 and seen.count("log") >= 12
    assert [row["eval_own"] for row in result["valid"]] == [0.5, 0.5]
    assert [row["eval_loss"] for row in result["valid"]] == [row["eval_loss"] for row in expected["valid"]]
    assert all("own" in row for row in trainer.state.log_history)
    assert np.array_equal(trainer.predict(Keyed(8)).predictions, 2 * plain.predict(Keyed(8)).predictions)
    assert "prediction" in seen


def test_a_step_that_does_not_call_ours_is_refused(args: Any) -> None:
    class Own(HFTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            loss = model(**inputs)["loss"]
            loss.backward()
            return loss.detach()

    with pytest.raises(ConfigError, match=r"training_step must call super\(\).training_step"):
        made(args(), Own).train()


def test_loaders_optimizer_and_schedule_of_a_subclass_are_made_when_a_run_begins(args: Any) -> None:
    class Own(HFTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.size, self.rate = 5, 0.125  # after the constructor, as scripts do

        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=self.size, shuffle=False)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return DataLoader(self.eval_dataset if eval_dataset is None else eval_dataset, batch_size=3)

        def create_optimizer(self) -> Any:
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.steps = num_training_steps
            self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer or self.optimizer, 2)
            return self.lr_scheduler

    trainer = made(args(eval_strategy="epoch"), Own)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(made(args()).evaluate()["eval_loss"])
    trainer.train()
    assert trainer.progress.step == 8 == trainer.steps and type(trainer.optimizer) is torch.optim.SGD
    assert type(trainer.lr_scheduler) is torch.optim.lr_scheduler.StepLR
    assert trainer.get_learning_rates() == pytest.approx([0.125 * 0.1**4])
    trainer.train()
    assert trainer.progress.step == 8


def test_an_optimizer_and_a_schedule_that_are_made_together_are_taken(args: Any) -> None:
    class Own(HFTrainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            falling = torch.optim.lr_scheduler.LinearLR
            self.lr_scheduler = falling(self.optimizer, 1.0, 0.0, total_iters=num_training_steps)

    trainer = made(args(), Own)
    trainer.train()
    assert type(trainer.optimizer) is torch.optim.SGD and trainer.get_learning_rates() == pytest.approx([0.0])


@pytest.mark.parametrize("name", [*CALLED])
def test_what_is_called_can_be_overridden_and_has_a_default(name: str) -> None:
    assert hasattr(HFTrainer, name)
    kind = type("Own", (HFTrainer,), {name: lambda self, *args, **kwargs: None})
    assert name in kind._overridden and issubclass(kind, Calls)


class Unlabelled(Keyed):
    """Rows of which a model makes predictions, and no loss."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: value for key, value in super().__getitem__(index).items() if key != "labels"}


def scoring_apart(base: Any) -> Any:
    """A trainer whose `evaluate` scores in its own way, as those of answers to questions do."""

    class Own(base):
        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
            eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
            compute_metrics, self.compute_metrics = self.compute_metrics, None
            try:
                output = self.evaluation_loop(
                    self.get_eval_dataloader(eval_dataset),
                    description="Evaluation",
                    prediction_loss_only=True if compute_metrics is None else None,
                    ignore_keys=ignore_keys,
                    metric_key_prefix=metric_key_prefix,
                )
            finally:
                self.compute_metrics = compute_metrics
            metrics = {f"{metric_key_prefix}_{name}": one for name, one in compute_metrics(output).items()}
            metrics |= {**output.metrics, f"{metric_key_prefix}_runtime": 0.1}
            self.rows_seen = output.num_samples
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    return Own


@pytest.mark.parametrize("labelled", [True, False])
def test_an_evaluation_of_a_subclass_by_transformers_loop_is_part_of_the_run(labelled: bool, args: Any) -> None:
    told = []

    class Told(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            told.append(metrics["eval_spread"])
            control.should_training_stop = len(told) == 2

    def spread(output: Any) -> dict[str, float]:
        return {"spread": float(np.std(output.predictions)), "labelled": float(output.label_ids is not None)}

    found = []
    for base in (transformers.Trainer, HFTrainer):
        told.clear()
        torch.manual_seed(0)
        trainer = scoring_apart(base)(
            model=KeyedModel(),
            args=args(eval_strategy="steps", eval_steps=2),
            train_dataset=Keyed(),
            eval_dataset=Keyed(8) if labelled else Unlabelled(8),
            compute_metrics=spread,
            callbacks=[Told()],
            **({"optimization_metric": "spread", "optimization_direction": "max"} if base is HFTrainer else {}),
        )
        result = trainer.train()
        assert result.global_step == 4 and len(told) == 2 and trainer.rows_seen == 8
        rows = [row for row in trainer.state.log_history if "eval_spread" in row]
        assert [row["step"] for row in rows] == [2, 4] and ("eval_loss" in rows[0]) is labelled
        found.append([row["eval_spread"] for row in rows])
        assert trainer.compute_metrics is spread
    assert found[0] == pytest.approx(found[1])
    assert [row["eval_spread"] for row in result["valid"]] == found[1] and "eval_runtime" not in result["valid"][0]


def test_loaders_are_those_of_transformers(args: Any) -> None:
    data = datasets.Dataset.from_list([{"x": one["x"].tolist(), "note": "n", "labels": one["labels"].tolist()}
                                       for one in Keyed(10)])  # fmt: skip
    found = []
    for kind in (transformers.Trainer, HFTrainer):
        trainer = kind(KeyedModel(), args(dataloader_drop_last=True), train_dataset=data, eval_dataset=data)
        loaders = [trainer.get_train_dataloader(), trainer.get_eval_dataloader(), trainer.get_test_dataloader(data)]
        found.append([(len(one), one.total_batch_size, list(next(iter(one)))) for one in loaders])
    assert found[0] == found[1] and found[0][0] == (2, 4, ["x", "labels"])


@pytest.mark.parametrize("prepares", [True, False])
def test_a_loader_that_accelerate_has_prepared_gives_the_same_numbers(prepares: bool, args: Any) -> None:
    class Own(HFTrainer):
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(self.train_dataset, batch_size=4)
            return self.accelerator.prepare(loader) if prepares else loader

    expected = made(args())
    trainer = made(args(), Own)
    trainer.train(), expected.train()
    assert same(weights(trainer.model), weights(expected.model))


def test_predictions_are_made_by_transformers_loop(args: Any) -> None:
    expected = made(args()).predict(Keyed(8))
    for kind in (transformers.Trainer, HFTrainer):
        trainer = made(args(), kind)
        loader = trainer.get_test_dataloader(Keyed(8))
        output = trainer.evaluation_loop(loader, description="Prediction", metric_key_prefix="own")
        assert np.allclose(output.predictions, expected.predictions) and np.array_equal(
            output.label_ids, expected.labels
        )
        assert output.num_samples == 8 and output.metrics["own_loss"] == pytest.approx(expected.metrics["test_loss"])
        output = trainer.evaluation_loop(loader, "Evaluation", prediction_loss_only=True)
        assert output.predictions is None and next(iter(output.metrics)) == "eval_loss" and output.num_samples == 8


def test_a_loop_of_a_subclass_that_nothing_would_call_is_refused() -> None:
    with pytest.raises(TypeError, match="evaluation_loop"):
        type("Own", (HFTrainer,), {"evaluation_loop": lambda self, *args, **kwargs: None})


def test_metrics_may_be_set_afterwards(args: Any) -> None:
    trainer = made(args(), compute_metrics=lambda prediction: {"rows": len(prediction.predictions)})
    assert trainer.evaluate()["eval_rows"] == 8
    trainer.compute_metrics = None
    assert list(trainer.evaluate()) == ["eval_loss"]
    trainer.compute_metrics = "mae"
    assert "eval_mae" in trainer.evaluate()
    with pytest.raises(ConfigError, match="learning_rate"):
        trainer.learning_rate = 1.0


def test_metrics_that_are_set_before_the_constructor_has_run_are_refused(args: Any) -> None:
    class Early(HFTrainer):
        def __init__(self, *given: Any, **options: Any) -> None:
            self.compute_metrics = "mae"
            super().__init__(*given, **options)

    with pytest.raises(ConfigError, match="`compute_metrics` is fixed"):
        made(args(), Early)


def test_a_run_is_steered_by_the_flags_of_transformers(args: Any, tmp_path: Path) -> None:
    class Own(HFTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
            if model.training:
                self.control.should_save = self.progress.step == 1
                self.control.should_training_stop = self.progress.step == 2
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    trainer = made(args(), Own)
    trainer.train()
    assert trainer.progress.step == 3 and trainer.stop_reason == "requested"
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    assert trainer.control.stop == "requested"


def test_a_program_may_put_it_in_the_place_of_transformers_trainer(monkeypatch: pytest.MonkeyPatch, args: Any) -> None:
    seen_by_ours: Any = vars(sys.modules["omnitrain.hf.trainer"])["transformers"]
    monkeypatch.setattr(seen_by_ours, "Trainer", HFTrainer)

    class Own(HFTrainer):
        def get_train_dataloader(self) -> Any:
            return super().get_train_dataloader()

    trainer = made(args(max_steps=2), Own)
    trainer.train()
    assert trainer.progress.step == 2
