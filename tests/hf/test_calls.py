"""The methods of transformers.Trainer, and what subclasses override of them, compared with the stock Trainer."""

import collections
import inspect
import json
import math
import re
import sys
from operator import methodcaller
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from recipes import Blank, Keyed, KeyedModel, Sentences, Tagger, callback, distance, fit, rows, same, t16, weights
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from omnitrain import Callback, HFTrainer, StepOutput, Trainer
from omnitrain.core.errors import ConfigError
from omnitrain.hf.calls import ENGINE_ATTRIBUTES

KINDS: tuple[Any, Any] = (transformers.Trainer, HFTrainer)
DEFAULTS = {
    "num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 0.05, "logging_steps": 1,
    "disable_tqdm": True, "train_sampling_strategy": "sequential", "lr_scheduler_type": "constant",
}  # fmt: skip
"""20 rows in steps of 4."""


def make(args: Any, kind: Any = HFTrainer, model: Any = KeyedModel, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(model=model(), args=args, **{"train_dataset": Keyed(), "eval_dataset": Keyed(8), **options})


def trained(*args: Any, **options: Any) -> Any:
    return fit(make(*args, **options))


# --- names

PAGE = Path(__file__).parents[2] / "docs" / "training-arguments.md"
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))


def verdicts() -> dict[str, set[str]]:
    """Return the names of each verdict that the page has."""
    text = PAGE.read_text(encoding="utf-8")
    table = text.split("\n## Every public name of transformers.Trainer\n")[1].split("\n## ")[0]
    same, engine = (re.findall(rf"\n\| {words} \| (.*) \|", table) for words in ("the same", "passed on to the engine"))
    another, absent = (re.split(rf"\n\| {words} \|", table)[1].split("\n\n")[0] for words in ("different", "missing"))
    tables = {"another": another, "absent": absent}
    first_cells = {kind: [row.split(" | ")[0] for row in rows.splitlines()[2:]] for kind, rows in tables.items()}
    cells = {"same": same, "engine": engine, **first_cells}
    return {kind: set(re.findall(r"`(\w+)`", " ".join(names))) for kind, names in cells.items()}


def public_names() -> set[str]:
    """Return the methods of transformers.Trainer, and the attributes that they set."""
    source = inspect.getsource(transformers.Trainer)
    attributes = re.findall(r"self\.([a-z]\w*)\s*(?::[^=\n]+)?=[^=]", source)
    return {name for name in dir(transformers.Trainer) if not name.startswith("_")} | set(attributes)


@pytest.mark.skipif(VERSION > (5, 23), reason="newer than what is supported")
def test_public_names_of_transformers_are_on_the_page() -> None:
    kinds = verdicts()
    listed = [name for names in kinds.values() for name in names]
    assert len(listed) == len(set(listed)) and public_names() - set(listed) == set()
    if VERSION == (5, 23):
        assert set(listed) - public_names() == set()
    trainer = HFTrainer(t16(0.0, torch.float32), None, rows(4, torch.float32), loss_fn=F.mse_loss, batch_size=4)
    supported = {*kinds["same"], *kinds["engine"], *kinds["another"]} & public_names()
    assert not [name for name in supported if not hasattr(trainer, name)]
    assert not [name for name in kinds["absent"] - {"objective"} if hasattr(trainer, name)]  # ours is another one
    assert kinds["engine"] == ENGINE_ATTRIBUTES
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        trainer.nonsense  # noqa: B018


def batch_of(trainer: Any) -> Any:
    return {name: value[:4] for name, value in next(iter(trainer.get_train_dataloader())).items()}


def formatting(trainer: Any) -> Any:
    """Return the function; that of 5.23 cannot be called as a method."""
    return trainer.metrics_format if isinstance(trainer, HFTrainer) else transformers.trainer_pt_utils.metrics_format


def summary_of(loader: Any) -> Any:
    return isinstance(loader, DataLoader), len(loader), sorted(next(iter(loader)))


def files_of(trainer: Any) -> list[str]:
    return sorted(path.name for path in Path(trainer.args.output_dir).iterdir() if path.is_file())


def predictions_of(output: Any) -> list[Any]:
    arrays = [None if array is None else array.tolist() for array in (output.predictions, output.label_ids)]
    return [*arrays, output.num_samples, {name: round(value, 5) for name, value in output.metrics.items()}]


def losses_of_loops(trainer: Any) -> list[Any]:
    loader = trainer.get_test_dataloader(Keyed(8))
    named = trainer.evaluation_loop(loader, description="Prediction", metric_key_prefix="own")
    return [*map(predictions_of, (named, trainer.evaluation_loop(loader, "Evaluation", prediction_loss_only=True)))]


def files_of_model(trainer: Any) -> list[str]:
    for _ in range(2):  # a second time replaces the first
        trainer.save_model()
    return files_of(trainer)


def saved_metrics(trainer: Any) -> list[Any]:
    trainer.save_metrics("train", {"train_samples": 20})
    trainer.save_metrics("eval", {"eval_loss": 1.0})
    return [files_of(trainer), json.loads((Path(trainer.args.output_dir) / "all_results.json").read_text())]


def saved_step(trainer: Any) -> int:
    trainer.save_state()
    return json.loads((Path(trainer.args.output_dir) / "trainer_state.json").read_text())["global_step"]


class Counts(TrainerCallback):
    """Is added and removed."""


WITHOUT_ARGUMENTS = """
    autocast_smart_context_manager call_model_init compute_loss_context_manager get_cp_size get_num_trainable_parameters
    get_sp_size get_tp_size is_local_process_zero is_world_process_zero store_flos
"""
CALLS: dict[str, Any] = {
    **{name: methodcaller(name) for name in WITHOUT_ARGUMENTS.split()},
    "add_callback": lambda t: t.add_callback(Counts()),
    "compute_loss": lambda t: t.compute_loss(t.model, batch_of(t)).shape,
    "create_optimizer": lambda t: isinstance(t.create_optimizer(), torch.optim.Optimizer),
    "create_optimizer_and_scheduler": lambda t: t.create_optimizer_and_scheduler(4),
    "create_scheduler": lambda t: type(t.create_scheduler(4, t.create_optimizer())),
    "evaluate": lambda t: "eval_loss" in t.evaluate(),
    "evaluation_loop": losses_of_loops,
    "floating_point_ops": lambda t: t.floating_point_ops(batch_of(t)),
    "get_decay_parameter_names": lambda t: sorted(t.get_decay_parameter_names(t.model)),
    "get_eval_dataloader": lambda t: summary_of(t.get_eval_dataloader()),
    "get_learning_rates": lambda t: {type(rate) for rate in t.get_learning_rates()},
    "get_optimizer_cls_and_kwargs": lambda t: t.get_optimizer_cls_and_kwargs(t.args),
    "get_optimizer_group": lambda t: sum(map(len, t.get_optimizer_group())),
    "get_test_dataloader": lambda t: summary_of(t.get_test_dataloader(Keyed(8))),
    "get_total_train_batch_size": lambda t: t.get_total_train_batch_size(t.args),
    "get_train_dataloader": lambda t: summary_of(t.get_train_dataloader()),
    "log": lambda t: (t.log({"mine": 1.0}), sorted(t.state.log_history[-1])),
    "log_metrics": lambda t: t.log_metrics("eval", {"eval_loss": 1.0}),
    "metrics_format": lambda t: formatting(t)({"eval_loss": 1.0, "eval_runtime": 3.0, "total_flos": 1e9}),
    "num_examples": lambda t: t.num_examples(t.get_train_dataloader()),
    "pop_callback": lambda t: (t.add_callback(Counts()), type(t.pop_callback(Counts))),
    "predict": lambda t: [getattr(part, "shape", None) for part in t.predict(Keyed(8))],
    "prediction_step": lambda t: [part.shape for part in t.prediction_step(t.model, batch_of(t), False)],
    "remove_callback": lambda t: (t.add_callback(Counts()), t.remove_callback(Counts)),
    "save_metrics": saved_metrics,
    "save_model": files_of_model,
    "save_state": saved_step,
    "train": lambda t: len(tuple(t.train())),
    "training_step": lambda t: t.training_step(t.model, batch_of(t)).shape,
}
ELSEWHERE = {"hyperparameter_search", "push_to_hub", "create_model_card", "init_hf_repo"}
"""Methods that need a search, or the Hub: in test_search.py and test_hub.py."""


@pytest.fixture(scope="module")
def pair(module_arguments: Any) -> Any:
    """A stock trainer and ours after the same run."""
    options: dict[str, Any] = {"train_dataset": Keyed(), "eval_dataset": Keyed(8)}
    options["model_init"] = lambda: KeyedModel()  # of a class, transformers counts the arguments
    args = [module_arguments(kind.__name__, num_train_epochs=1) for kind in KINDS]
    return [fit(kind(args=each, **options)) for kind, each in zip(KINDS, args, strict=True)]


@pytest.mark.parametrize("name", sorted((verdicts()["same"] | verdicts()["engine"]) - ELSEWHERE))
def test_name_answers_as_in_a_stock_trainer(name: str, pair: Any) -> None:
    if not hasattr(pair[0], name):
        pytest.skip("this transformers has no such name")
    stock, ours = (CALLS[name](trainer) if name in CALLS else getattr(trainer, name) for trainer in pair)
    assert name in CALLS or not callable(getattr(transformers.Trainer, name, None)), "call it"
    if (stock, ours) == (None, ""):  # of `fsdp`, which our backends handle
        return
    classes = (CallbackHandler, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR)
    assert type(stock) is type(ours) or isinstance(ours, classes), (stock, ours)
    assert stock == ours or not isinstance(ours, (bool, int, float, str, dict, list, set, tuple, torch.Size))


def test_methods_take_the_keywords_of_transformers() -> None:
    for name in (
        "train", "evaluate", "predict", "save_model", "log", "save_metrics", "log_metrics", "create_optimizer",
        "create_scheduler", "compute_loss", "training_step", "prediction_step", "get_eval_dataloader", "push_to_hub",
    ):  # fmt: skip
        stock, ours = (inspect.signature(getattr(kind, name)).parameters for kind in KINDS)
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in ours.values())
        assert takes_any or stock.keys() <= ours.keys(), name


# --- calls


def test_train_returns_the_results_of_transformers(arguments: Any) -> None:
    stock, trainer = make(arguments(), transformers.Trainer), make(arguments())
    expected, result = stock.train(), trainer.train()
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


def test_evaluate_and_predict_take_the_names_of_transformers(arguments: Any) -> None:
    trainer, stock = make(arguments()), make(arguments(), transformers.Trainer)
    expected = stock.evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected)
    for metrics in (
        trainer.evaluate(eval_dataset=Keyed(8), ignore_keys=None, metric_key_prefix="dev"),
        trainer.evaluate(Keyed(8), ["hidden"], "dev"),
    ):
        assert metrics == {"dev_loss": pytest.approx(expected)}
    reference = stock.predict(Keyed(8), metric_key_prefix="x")
    for result in (
        trainer.predict(Keyed(8), None, "x"),
        trainer.predict(test_dataset=Keyed(8), ignore_keys=[], metric_key_prefix="x"),
    ):
        assert np.array_equal(result.label_ids, reference.label_ids)
        assert np.allclose(result.predictions, reference.predictions)
        assert result.metrics["x_loss"] == pytest.approx(reference.metrics["x_loss"])
        predictions, labels, metrics = result
        assert predictions is result.predictions and metrics is result.metrics
        assert labels is result.labels is result.label_ids
    with pytest.raises(ConfigError, match="two names"):
        trainer.evaluate(Keyed(8), eval_dataset=Keyed(8))


def test_evaluate_takes_the_name_of_a_set(arguments: Any) -> None:
    trainer = make(arguments(), eval_dataset={"near": Keyed(8), "far": Keyed(12)})
    assert trainer.evaluate("far") == {"eval_far_loss": trainer.evaluate(Keyed(12))["eval_loss"]}
    with pytest.raises(ConfigError, match=r"no set 'elsewhere'\. It has 'near', 'far'"):
        trainer.evaluate(eval_dataset="elsewhere")


class Verbose(KeyedModel):
    """Returns more than scores."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        output = super().forward(x, labels)
        return {"loss": output["loss"], "scores": output["logits"], "hidden": x}


def test_predict_leaves_out_ignored_keys(arguments: Any) -> None:
    (stock, stock_part), (ours, part) = (
        [trainer.predict(Keyed(8), ignored).predictions for ignored in (None, ["hidden"])]
        for trainer in (make(arguments(), kind, Verbose) for kind in KINDS)
    )
    assert [array.shape for array in ours] == [array.shape for array in stock] == [(8, 1), (8, 4)]
    assert np.allclose(part, stock_part) and part.shape == (8, 1)


def stacked(samples: Any) -> Any:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def test_constructor_takes_positions_in_either_order(arguments: Any) -> None:
    for trainer in (
        HFTrainer(KeyedModel(), arguments(), stacked, Keyed(), Keyed(8)),  # of transformers
        HFTrainer(KeyedModel(), arguments(), Keyed(), Keyed(8), data_collator=stacked),
        HFTrainer(KeyedModel(), Keyed(), Keyed(8), data_collator=stacked),
    ):
        assert len(trainer.train_dataset) == 20 and len(trainer.eval_dataset) == 8
        assert trainer.data_collator is stacked


@pytest.mark.parametrize("removes", [True, False])
def test_loaders_have_the_columns_and_sizes_of_transformers(arguments: Any, removes: bool) -> None:
    columns = {"x": Keyed(10).x.tolist(), "labels": Keyed(10).y.tolist(), "text": ["a", "bcd"] * 5}
    data = datasets.Dataset.from_dict(columns)
    args = arguments(remove_unused_columns=removes, per_device_eval_batch_size=1, dataloader_drop_last=True)
    options = {"train_dataset": data, "eval_dataset": data, "data_collator": lambda samples: dict(samples[0])}
    sizes = []
    for kind in KINDS:
        trainer = make(args, kind, **options)
        loaders = trainer.get_train_dataloader(), trainer.get_eval_dataloader(), trainer.get_test_dataloader(data)
        batches = [next(iter(loader)) for loader in loaders]
        assert [sorted(batch) for batch in batches] == [["labels", "x"] if removes else sorted(columns)] * 3
        sizes.append([(len(loader), loader.total_batch_size) for loader in loaders])
    assert sizes[0] == sizes[1] and sizes[0][0] == (2, 4)


def test_optimizer_may_be_a_class_with_options(arguments: Any) -> None:
    trainer = make(arguments(), optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.25, "momentum": 0.5}))
    assert type(trainer.optimizer) is torch.optim.SGD and trainer.get_learning_rates() == [0.25]
    assert trainer.get_optimizer_group(next(trainer.model.parameters())) is trainer.optimizer.param_groups[0]


def test_create_optimizer_and_scheduler_takes_a_number_of_steps(arguments: Any) -> None:
    trainer = make(arguments(lr_scheduler_type="linear"))
    trainer.create_optimizer_and_scheduler(num_training_steps=4)
    trainer.optimizer.step()
    trainer.lr_scheduler.step()
    assert trainer.lr_scheduler.get_last_lr() == pytest.approx([0.0375])


def test_callbacks_are_added_and_removed(arguments: Any) -> None:
    trainer, steps = make(arguments(max_steps=2)), list[str]()
    names = ["removed", "stays", "popped"]
    for base in (TrainerCallback, Callback):
        callbacks = [callback(base, on_step_end=lambda *_, name=name, **__: steps.append(name)) for name in names]
        for added in callbacks:
            trainer.add_callback(added)
        trainer.remove_callback(callbacks[0])
        assert trainer.pop_callback(callbacks[2]) is callbacks[2] and trainer.pop_callback(callbacks[2]) is None
    for runs in (1, 2):
        trainer.train()
        assert steps == ["stays"] * 4 * runs


def test_added_early_stopping_stops_a_run(arguments: Any) -> None:
    stopping = transformers.EarlyStoppingCallback(2, 0.001)
    trainer = make(arguments(eval_strategy="steps", eval_steps=1, num_train_epochs=20, learning_rate=0.0))
    trainer.add_callback(stopping)
    for _ in range(2):
        assert trainer.train()["stop_reason"] == "early_stopping" and trainer.progress.step == 3
        assert trainer.objective.delta == 0.001
    with pytest.raises(ConfigError, match="eval_dataset"):
        make(arguments(), eval_dataset=None).add_callback(stopping)


def test_train_takes_resume_from_checkpoint(arguments: Any, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 1}
    straight = trained(arguments("straight", **options))
    trained(arguments(**{**options, "max_steps": 3}))
    for checkpoint in (True, str(tmp_path / "run" / "checkpoint-2")):
        trainer = fit(make(arguments(**options)), resume_from_checkpoint=checkpoint)
        assert same(weights(trainer.model), weights(straight.model))
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        make(arguments("empty", **options)).train(resume_from_checkpoint=True)


def test_second_run_in_a_folder_replaces_the_first(arguments: Any, caplog: pytest.LogCaptureFixture) -> None:
    trained(arguments(save_strategy="steps", save_steps=2, max_steps=3))
    assert "earlier run" not in caplog.text
    args = arguments(save_strategy="steps", save_steps=1, max_steps=1)
    assert [path.name for path in trained(args).store.checkpoints()] == ["checkpoint-1"]
    assert "2 checkpoints of an earlier run, up to checkpoint-3" in caplog.text
    with pytest.raises(ConfigError, match="already holds checkpoints"):
        make(args, overwrite=False).train()


def test_changed_training_arguments_are_rejected(arguments: Any) -> None:
    trainer = make(arguments())
    trainer.args.learning_rate = 0.1
    with pytest.raises(ConfigError, match=r"args.learning_rate. was 0.05 .* and is 0.1 now"):
        trainer.train()


# --- losses of subclasses


class Weighted(HFTrainer):
    """The most frequent subclass: a custom loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = 2 * F.mse_loss(outputs["logits"], labels)
        return (loss, outputs) if return_outputs else loss


class StockWeighted(transformers.Trainer):
    compute_loss = Weighted.compute_loss


def test_compute_loss_trains_and_evaluates_as_in_transformers(arguments: Any) -> None:
    stock, ours = (trained(arguments(eval_strategy="epoch"), kind) for kind in (StockWeighted, Weighted))
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-5)
    assert ours.predict(Keyed(8)).predictions.shape == stock.predict(Keyed(8)).predictions.shape == (8, 1)


def test_callbacks_see_the_labels_that_compute_loss_pops(arguments: Any) -> None:
    keys: list[set[str]] = []
    recorder = callback(on_after_forward=lambda trainer, batch, output: keys.append(set(batch)))
    trained(arguments(max_steps=2), Weighted, callbacks=[recorder])
    assert keys == [{"x", "labels"}] * 2


class Measured(KeyedModel):
    """A model whose output has a metric."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:  # type: ignore[override]
        return {**super().forward(x, labels), "metrics": {"size": x.abs().mean()}}


class Passing(HFTrainer):
    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        return super().compute_loss(*arguments, **options)


class Doubled(HFTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return StepOutput(2 * loss, outputs["logits"], metrics={"plain": loss})


def test_compute_loss_keeps_the_metrics_of_a_pass(arguments: Any) -> None:
    args = arguments(eval_strategy="epoch", logging_steps=1, max_steps=2, learning_rate=0.0, max_grad_norm=0.0)
    (plain, plain_valid), (passed, passed_valid), (doubled, doubled_valid) = (
        (metrics["train_metrics_history"][-1], metrics["valid"][-1])
        for metrics in (trained(args, kind, Measured).metrics for kind in (HFTrainer, Passing, Doubled))
    )
    assert "train_size" in plain and plain == passed and plain_valid == passed_valid and "eval_size" in plain_valid
    loss, valid_loss = plain["train_loss"], plain_valid["eval_loss"]
    expected = {**plain, "train_loss": 2 * loss, "train_plain": loss, "grad_norm": 2 * plain["grad_norm"]}
    assert doubled == pytest.approx(expected, rel=1e-6)
    assert doubled_valid["eval_plain"] == pytest.approx(valid_loss, rel=1e-6)
    assert doubled_valid["eval_size"] == plain_valid["eval_size"]


class Contrasting(HFTrainer):
    """Has inputs and targets without labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        outputs = model(inputs["x"])
        loss = F.mse_loss(outputs["logits"], inputs["other"])
        return (loss, outputs) if return_outputs else loss


def test_compute_loss_without_labels_is_evaluated(arguments: Any) -> None:
    data, held_out = ([{"x": row["x"], "other": row["labels"]} for row in Keyed(size)] for size in (20, 8))
    args = arguments(eval_strategy="epoch", remove_unused_columns=False)
    trainer = trained(args, Contrasting, train_dataset=data, eval_dataset=held_out)
    expected = Trainer(trainer.model, eval_dataset=Keyed(8)).evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == trainer.metrics["valid"][-1]["eval_loss"] == pytest.approx(expected)
    result = trainer.predict(held_out)  # of the model only, as in transformers
    assert result.predictions.shape == (8, 1) and "test_loss" not in result.metrics


def sentences(kind: Any, data: Any = None, **options: Any) -> Any:
    """A trainer of token labels, for one epoch."""
    device = {"device": "cpu"} if kind is Trainer else {}
    options = {"epochs": 1, "learning_rate": 0.05, "progress_bar": False, **device, **options}
    return kind(Tagger(), train_dataset=data or Sentences(24), **options)


class ByKeyword(HFTrainer):
    def compute_loss(self, model: Any, inputs: Any, *, return_outputs: bool = False, num_items_in_batch: Any = None):
        outputs = model(**inputs)
        assert num_items_in_batch == (inputs["labels"] != -100).sum()
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class ByAnyKeyword(HFTrainer):
    def compute_loss(self, model: Any, inputs: Any, **options: Any):
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if options.get("return_outputs") else outputs["loss"]


class OnlyForTraining(HFTrainer):
    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None):
        return model(**inputs)["loss"]


@pytest.mark.parametrize("kind", [ByKeyword, ByAnyKeyword, OnlyForTraining])
def test_compute_loss_gets_its_options_by_name(kind: type[HFTrainer]) -> None:
    """As transformers passes them; `return_outputs` only in evaluations. They count each batch once, on the host.

    A mean over the labels of a micro-batch gives the same numbers in every split.
    """
    options = {} if kind is OnlyForTraining else {"eval_dataset": Sentences(8), "eval_batch_size": 4}
    trainer = sentences(kind, batch_size=2, gradient_accumulation_steps=4, **options)
    with mock.patch.object(trainer._feed, "weigh", wraps=trainer._feed.weigh) as weigh:
        fit(trainer)
        count = weigh.call_count
        if options:
            assert math.isfinite(trainer.evaluate()["eval_loss"]) and weigh.call_count == count + 2
    assert distance(weights(trainer.model), weights(fit(sentences(Trainer, batch_size=8)).model)) < 1e-12


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """The sum over the labels of a batch, divided by their number."""
    loss = F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / num_items_in_batch


class Summed(HFTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
        outputs = model(**inputs)
        loss = summed(outputs, inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def test_items_of_a_batch_turn_a_sum_into_a_mean() -> None:
    """Also in evaluations, and of a batch in which no label counts."""
    data, loss_func = Blank(24, [3]), mock.Mock(wraps=summed)
    options = {"batch_size": 1, "gradient_accumulation_steps": 4}
    plain = fit(sentences(HFTrainer, data, **options))
    loss = plain.evaluate(Sentences(8))["eval_loss"]
    for kind, more in ((Summed, {}), (HFTrainer, {"compute_loss_func": loss_func})):
        trainer = fit(sentences(kind, data, **options, **more))
        assert distance(weights(plain.model), weights(trainer.model)) < 1e-6
        assert trainer.evaluate(Sentences(8))["eval_loss"] == pytest.approx(loss)
    assert loss_func.call_count >= 26  # of the last trainer: for each sample and each batch of evaluations


# --- other methods of subclasses


class Overriding(HFTrainer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls = collections.Counter[str]()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.calls["step"] += 1
        return super().training_step(model, inputs, num_items_in_batch)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return loss, 2 * logits, labels

    def log(self, logs: dict[str, float]) -> None:
        super().log({**logs, "own": 1.0})

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        self.calls["evaluation"] += 1
        return {**super().evaluate(eval_dataset, ignore_keys, metric_key_prefix), "eval_own": 0.5}


def test_overridden_steps_logs_and_evaluations_are_called(arguments: Any) -> None:
    trainer, plain = make(arguments(eval_strategy="epoch"), Overriding), make(arguments(eval_strategy="epoch"))
    result, expected = trainer.train(), plain.train()
    assert same(weights(plain.model), weights(trainer.model))
    assert trainer.calls == {"step": 10, "evaluation": 2} and len(trainer.state.log_history) >= 12
    assert [row["eval_own"] for row in result["valid"]] == [0.5, 0.5]
    assert [row["eval_loss"] for row in result["valid"]] == [row["eval_loss"] for row in expected["valid"]]
    assert all("own" in row for row in trainer.state.log_history)
    assert np.array_equal(trainer.predict(Keyed(8)).predictions, 2 * plain.predict(Keyed(8)).predictions)


def test_training_step_must_call_the_base_class(arguments: Any) -> None:
    own = type("Own", (HFTrainer,), {"training_step": lambda self, model, inputs, number=None: model(**inputs)["loss"]})
    with pytest.raises(ConfigError, match=r"training_step must call super\(\).training_step"):
        trained(arguments(), own)


def test_loaders_optimizer_and_schedule_of_a_subclass_are_used(arguments: Any) -> None:
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

    trainer = make(arguments(eval_strategy="epoch"), Own)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(make(arguments()).evaluate()["eval_loss"])
    for _ in range(2):
        trainer.train()
        assert trainer.progress.step == 8 == trainer.steps and type(trainer.optimizer) is torch.optim.SGD
        assert type(trainer.lr_scheduler) is torch.optim.lr_scheduler.StepLR
        assert trainer.get_learning_rates() == pytest.approx([0.125 * 0.1**4])


def test_create_optimizer_and_scheduler_of_a_subclass_is_used(arguments: Any) -> None:
    class Own(HFTrainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            falling = torch.optim.lr_scheduler.LinearLR
            self.lr_scheduler = falling(self.optimizer, 1.0, 0.0, total_iters=num_training_steps)

    trainer = trained(arguments(), Own)
    assert type(trainer.optimizer) is torch.optim.SGD and trainer.get_learning_rates() == pytest.approx([0.0])


def scoring(base: Any) -> Any:
    """A trainer with a custom `evaluate`, as in transformers' question answering."""

    class Own(base):
        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
            loader = self.get_eval_dataloader(self.eval_dataset if eval_dataset is None else eval_dataset)
            compute_metrics, self.compute_metrics = self.compute_metrics, None
            options = {"ignore_keys": ignore_keys, "metric_key_prefix": metric_key_prefix}
            try:
                output = self.evaluation_loop(loader, description="Evaluation", prediction_loss_only=None, **options)
            finally:
                self.compute_metrics = compute_metrics
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in compute_metrics(output).items()}
            metrics |= {**output.metrics, f"{metric_key_prefix}_runtime": 0.1}
            self.rows_seen = output.num_samples
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    return Own


@pytest.mark.parametrize("is_labelled", [True, False])
def test_evaluate_of_a_subclass_is_part_of_the_run(is_labelled: bool, arguments: Any) -> None:
    """Also of rows of which a model makes predictions, and no loss."""
    spreads: list[float] = []

    def stop_at_second(args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        spreads.append(metrics["eval_spread"])
        control.should_training_stop = state.global_step == 4

    def spread(output: Any) -> dict[str, float]:
        return {"spread": float(np.std(output.predictions)), "labelled": float(output.label_ids is not None)}

    data = Keyed(8) if is_labelled else [{"x": row["x"]} for row in Keyed(8)]
    options = {"callbacks": [callback(TrainerCallback, on_evaluate=stop_at_second)], "eval_dataset": data}
    for base in KINDS:
        best = {"optimization_metric": "spread", "optimization_direction": "max"} if base is HFTrainer else {}
        args = arguments(eval_strategy="steps", eval_steps=2)
        trainer = make(args, scoring(base), compute_metrics=spread, **options, **best)
        result = trainer.train()
        assert result.global_step == 4 and trainer.rows_seen == 8 and trainer.compute_metrics is spread
        rows = [row for row in trainer.state.log_history if "eval_spread" in row]
        assert [row["step"] for row in rows] == [2, 4] and ("eval_loss" in rows[0]) is is_labelled
        assert [row["eval_spread"] for row in rows] == spreads[-2:]
    assert len(spreads) == 4 and spreads[:2] == pytest.approx(spreads[2:])
    assert [row["eval_spread"] for row in result["valid"]] == spreads[2:] and "eval_runtime" not in result["valid"][0]


def test_compute_metrics_may_be_set_after_the_constructor(arguments: Any) -> None:
    trainer = make(arguments(), compute_metrics=lambda prediction: {"rows": len(prediction.predictions)})
    assert trainer.evaluate()["eval_rows"] == 8
    trainer.compute_metrics = None
    assert list(trainer.evaluate()) == ["eval_loss"]
    trainer.compute_metrics = "mae"
    assert "eval_mae" in trainer.evaluate()

    class Early(HFTrainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.compute_metrics = "mae"
            super().__init__(*args, **options)

    with pytest.raises(ConfigError, match="`compute_metrics` is fixed"):
        make(arguments(), Early)


def test_control_flags_of_a_subclass_are_honoured(arguments: Any, tmp_path: Path) -> None:
    class Own(HFTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
            if model.training:
                self.control.should_save = self.progress.step == 1
                self.control.should_training_stop = self.progress.step == 2
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    trainer = trained(arguments(), Own)
    assert trainer.progress.step == 3 and trainer.stop_reason == "requested"
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]


def test_trainer_may_replace_transformers_trainer(monkeypatch: pytest.MonkeyPatch, arguments: Any) -> None:
    monkeypatch.setattr(vars(sys.modules["omnitrain.hf.trainer"])["transformers"], "Trainer", HFTrainer)
    members = {"get_train_dataloader": lambda self: super(own, self).get_train_dataloader()}
    own = type("Own", (HFTrainer,), members)
    assert trained(arguments(max_steps=2), own).progress.step == 2
