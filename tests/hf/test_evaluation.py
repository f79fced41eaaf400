"""Arguments of evaluations: `include_for_metrics`, `batch_eval_metrics`, `bf16_full_eval` and `fp16_full_eval`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from marks import thinned
from recipes import distance, weights
from tiny import Tokens, bert, llama
from transformers import EvalPrediction

from omnitrain import Callback, HFTrainer
from omnitrain.core.errors import ConfigError, DataError
from omnitrain.model.units import StepOutput

DEFAULTS = {"per_device_eval_batch_size": 3, "disable_tqdm": True}
KINDS: tuple[Any, Any] = (transformers.Trainer, HFTrainer)


class Calls:
    """A function of metrics that keeps its arguments."""

    def __init__(self) -> None:
        self.calls: list[EvalPrediction] = []

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        self.calls.append(prediction)
        return {"calls": len(self.calls)}


# --- include_for_metrics


def ragged(size: int) -> list[dict[str, Any]]:
    """Sequences that a collator pads to the longest of a batch."""
    return [
        {"input_ids": row["input_ids"][: 4 + i % 5].tolist(), "labels": i % 3} for i, row in enumerate(Tokens(size))
    ]


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(sample["input_ids"]) for sample in samples)
    ids = [[*sample["input_ids"], *[0] * (width - len(sample["input_ids"]))] for sample in samples]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor([sample["labels"] for sample in samples])}


def test_inputs_and_losses_are_those_of_a_stock_trainer(arguments: Any) -> None:
    predictions = []
    for kind in KINDS:
        metrics = Calls()
        args = arguments(include_for_metrics=["inputs", "loss"])
        kind(bert(), args, eval_dataset=ragged(7), compute_metrics=metrics, data_collator=padded).evaluate()
        predictions.append(metrics.calls[0])
    stock, ours = predictions
    assert ours.inputs.shape == (7, 8) and -100 in ours.inputs
    for name in ("inputs", "predictions", "label_ids"):
        assert np.array_equal(getattr(ours, name), getattr(stock, name))
    # one value for each sample: of the last batch, which is short, a stock trainer has as many as of a full one
    assert ours.losses.shape == (7,) and np.array_equal(ours.losses, stock.losses[:7])
    assert len(set(ours.losses.tolist())) == 3


def test_metrics_get_only_what_is_included(arguments: Any) -> None:
    for names, included in ((["loss"], (False, True)), (["inputs"], (True, False)), ([], (False, False))):
        metrics = Calls()
        args = arguments(include_for_metrics=names)
        HFTrainer(bert(), args, eval_dataset=Tokens(5, "classes"), compute_metrics=metrics).evaluate()
        (call,) = metrics.calls
        assert (call.inputs is not None, call.losses is not None) == included
        assert len(list(call)) == 2 + sum(included)


def test_losses_of_a_unit_that_sums_are_means(arguments: Any) -> None:
    class Unit:
        def __call__(self, batch: Any) -> Any:
            raise AssertionError

        def evaluate(self, batch: Any) -> Any:
            return StepOutput(torch.tensor(6.0), batch["input_ids"], batch["labels"], num_targets=3)

    metrics = Calls()
    args = arguments(include_for_metrics=["loss"])
    HFTrainer(bert(), args, eval_dataset=Tokens(2, "classes"), compute_metrics=metrics, unit=Unit()).evaluate()
    assert metrics.calls[0].losses.tolist() == [2.0, 2.0]


def test_inputs_have_the_main_input_name_of_the_model(arguments: Any) -> None:
    model: Any = bert()
    model.main_input_name = "pixel_values"
    args = arguments(include_for_metrics=["inputs"])
    trainer = HFTrainer(model, args, eval_dataset=Tokens(2, "classes"), compute_metrics=Calls())
    with pytest.raises(DataError, match=r"'pixel_values', but the batch holds 'input_ids'"):
        trainer.evaluate()


# --- batch_eval_metrics


class Accuracy:
    """Counts batch by batch, as transformers' documentation shows it."""

    def __init__(self) -> None:
        self.correct: list[float] = []
        self.calls: list[tuple[int, bool]] = []

    def __call__(self, prediction: EvalPrediction, compute_result: bool) -> Any:
        predictions, labels = prediction
        assert isinstance(predictions, torch.Tensor) and isinstance(labels, torch.Tensor)
        assert not predictions.requires_grad
        self.calls.append((len(labels), compute_result))
        self.correct += (predictions.argmax(-1) == labels).float().tolist()
        if not compute_result:
            return {}
        result, self.correct = {"accuracy": sum(self.correct) / len(self.correct)}, []
        return result


def test_batch_metrics_are_called_as_by_a_stock_trainer(arguments: Any) -> None:
    data, results = Tokens(7, "classes"), []
    for kind in KINDS:
        metrics = Accuracy()
        trainer: Any = kind(bert(), arguments(batch_eval_metrics=True), eval_dataset=data, compute_metrics=metrics)
        evaluated = trainer.evaluate()["eval_accuracy"]
        predictions = trainer.predict(data)
        accuracies = evaluated, predictions.metrics["test_accuracy"]
        results.append((accuracies, predictions.predictions.tolist(), metrics.calls))
    assert results[1] == results[0]
    assert results[1][-1] == [(3, False), (3, False), (1, True)] * 2


def test_batch_metrics_may_select_the_best(arguments: Any) -> None:
    data = Tokens(7, "classes")
    args = arguments(batch_eval_metrics=True, eval_strategy="epoch", metric_for_best_model="accuracy")
    trainer = HFTrainer(bert(), args, data, data, compute_metrics=Accuracy())
    assert not trainer.scorer.keeps_predictions
    metrics = trainer.train()
    assert metrics["best_valid"]["eval_accuracy"] == max(row["eval_accuracy"] for row in metrics["valid"])


def test_batch_metrics_have_a_last_batch_of_each_set(arguments: Any) -> None:
    accuracy, sets = Accuracy(), {"one": Tokens(4, "classes"), "two": Tokens(3, "classes")}
    args = arguments(batch_eval_metrics=True)
    metrics = HFTrainer(bert(), args, eval_dataset=sets, compute_metrics=accuracy).evaluate()
    assert accuracy.calls == [(3, False), (1, True), (3, True)]
    assert {"eval_one_accuracy", "eval_two_accuracy"} <= metrics.keys()


def test_batch_metrics_get_the_logits_unshifted(arguments: Any) -> None:
    shapes = []

    def metrics(prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        shapes.append((tuple(prediction.predictions.shape), tuple(prediction.label_ids.shape)))
        return {"x": 1.0}

    HFTrainer(llama(), arguments(batch_eval_metrics=True), eval_dataset=Tokens(3), compute_metrics=metrics).evaluate()
    assert shapes == [((3, 9, 40), (3, 9))]


def test_batch_metrics_must_return_numbers(arguments: Any) -> None:
    data, args = Tokens(3, "classes"), arguments(batch_eval_metrics=True)
    for result, message in ((None, "dict of numbers"), ({"x": "high"}, "'x' is no number")):
        metrics = lambda prediction, compute_result, result=result: result  # noqa: E731
        with pytest.raises(DataError, match=message):
            HFTrainer(bert(), args, eval_dataset=data, compute_metrics=metrics).evaluate()


def test_metric_options_that_contradict_are_rejected(arguments: Any) -> None:
    by_batch, message = {"batch_eval_metrics": True}, r"batch_eval_metrics=True.*compute_result"
    both = {**by_batch, "include_for_metrics": ["inputs"]}
    for fields, metrics, words in (
        (by_batch, ["accuracy"], message),
        (by_batch, lambda prediction: {}, message),
        (both, Accuracy(), r"batch_eval_metrics=True.*include_for_metrics=\['inputs'\]"),
        ({"include_for_metrics": ["losses"]}, None, "got 'losses'.*'loss'"),
    ):
        with pytest.raises(ConfigError, match=words):
            HFTrainer(bert(), arguments(**fields), compute_metrics=metrics)


# --- bf16_full_eval, fp16_full_eval


@pytest.mark.parametrize("name", thinned(["bf16_full_eval", "fp16_full_eval"], ["bf16_full_eval"]))
def test_half_precision_evaluation_is_that_of_a_stock_trainer(arguments: Any, name: str) -> None:
    data, results = Tokens(7, "classes"), []
    for kind in KINDS:
        trainer: Any = kind(bert().float(), arguments(**{name: True}), eval_dataset=data)
        results.append((trainer.predict(data).predictions.astype(np.float32), trainer.evaluate()["eval_loss"]))
    (stock, stock_loss), (ours, loss) = results
    assert np.array_equal(ours, stock)
    assert loss == pytest.approx(stock_loss, rel=1e-2)  # a stock trainer takes the mean in that precision
    full = HFTrainer(bert().float(), arguments(), eval_dataset=data).predict(data).predictions
    assert not np.array_equal(full, ours) and np.abs(full - ours).max() < 0.02


class EvaluatesInSteps(Callback):
    def on_step_end(self, trainer: Any) -> None:
        trainer.evaluate(Tokens(6, "classes"))


def test_half_precision_evaluation_leaves_the_weights_unchanged(arguments: Any) -> None:
    """To the bit; and evaluations of a run use the weights of the run."""
    data = Tokens(6, "classes")
    args = arguments(
        bf16_full_eval=True, eval_strategy="steps", eval_steps=1, eval_on_start=True, max_steps=2,
        per_device_eval_batch_size=6, per_device_train_batch_size=6,
    )  # fmt: skip
    model: Any = bert().float()
    dtypes: list[Any] = []
    model.register_buffer("third", torch.tensor(1 / 3))
    model.register_forward_hook(lambda *_: dtypes.extend({model.classifier.weight.dtype, model.third.dtype}))
    before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    trainer = HFTrainer(model, args, data, data, callbacks=[EvaluatesInSteps()])
    trainer.evaluate()
    trainer.test(data)
    trainer.predict(data)
    assert dtypes == [torch.bfloat16] * 3
    assert all(map(torch.equal, before, (*model.parameters(), *model.buffers())))
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    dtypes.clear()
    trainer.train()
    assert dtypes == [torch.float32] * 7
    expected = HFTrainer(bert().float(), arguments(max_steps=2, per_device_train_batch_size=6), data)
    expected.train()
    assert distance(weights(model), weights(expected.model)) == 0


def test_half_precision_weights_are_restored_after_an_error(arguments: Any) -> None:
    def fail(prediction: EvalPrediction) -> Any:
        raise ZeroDivisionError

    model = bert().float()
    trainer = HFTrainer(model, arguments(bf16_full_eval=True), eval_dataset=Tokens(2, "classes"), compute_metrics=fail)
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
