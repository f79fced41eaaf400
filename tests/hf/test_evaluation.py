"""Arguments of evaluations: what metrics get, half precision, and when the first evaluation is."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from marks import thinned
from recipes import StopAt, callback, distance, fit, weights
from tiny import Tokens, bert, llama
from transformers import EvalPrediction

from omnitrain import HFTrainer
from omnitrain.core.errors import DataError
from omnitrain.model.units import StepOutput

DEFAULTS = {
    "per_device_eval_batch_size": 3, "per_device_train_batch_size": 2, "num_train_epochs": 3, "disable_tqdm": True
}  # fmt: skip
KINDS: tuple[Any, Any] = (transformers.Trainer, HFTrainer)


# --- include_for_metrics


def noting(calls: list[EvalPrediction]) -> Any:
    """Return a function of metrics that keeps its arguments."""

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        calls.append(prediction)
        return {"calls": len(calls)}

    return metrics


def ragged(size: int) -> list[dict[str, Any]]:
    """Sequences that a collator pads to the longest of a batch."""
    return [{"input_ids": row["input_ids"][: 4 + i % 5], "labels": i % 3} for i, row in enumerate(Tokens(size))]


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {"input_ids": ids, "labels": torch.tensor([sample["labels"] for sample in samples])}


def test_inputs_and_losses_are_those_of_a_stock_trainer(arguments: Any) -> None:
    predictions: list[EvalPrediction] = []
    args = arguments(include_for_metrics=["inputs", "loss"])
    for kind in KINDS:
        options = {"compute_metrics": noting(predictions), "data_collator": padded}
        kind(bert(), args, eval_dataset=ragged(7), **options).evaluate()
    stock, ours = predictions
    assert ours.inputs.shape == (7, 8) and -100 in ours.inputs
    for name in ("inputs", "predictions", "label_ids"):
        assert np.array_equal(getattr(ours, name), getattr(stock, name))
    # one value for each sample: of the last batch, which is short, a stock trainer has as many as of a full one
    assert ours.losses.shape == (7,) and np.array_equal(ours.losses, stock.losses[:7])
    assert len(set(ours.losses.tolist())) == 3


@pytest.mark.parametrize(
    ("names", "included"), [(["loss"], (False, True)), (["inputs"], (True, False)), ([], (False, False))]
)
def test_metrics_get_only_what_is_included(arguments: Any, names: list[str], included: tuple[bool, bool]) -> None:
    calls: list[EvalPrediction] = []
    options = {"eval_dataset": Tokens(5, "classes"), "compute_metrics": noting(calls)}
    HFTrainer(bert(), arguments(include_for_metrics=names), **options).evaluate()
    (call,) = calls
    assert (call.inputs is not None, call.losses is not None) == included and len(list(call)) == 2 + sum(included)


class Summing:
    """A unit that sums, in evaluations."""

    def __call__(self, batch: Any) -> Any:
        raise AssertionError

    def evaluate(self, batch: Any) -> Any:
        return StepOutput(torch.tensor(6.0), batch["input_ids"], batch["labels"], num_targets=3)


def test_losses_of_a_unit_that_sums_are_means(arguments: Any) -> None:
    calls: list[EvalPrediction] = []
    options = {"eval_dataset": Tokens(2, "classes"), "compute_metrics": noting(calls), "unit": Summing()}
    HFTrainer(bert(), arguments(include_for_metrics=["loss"]), **options).evaluate()
    assert calls[0].losses.tolist() == [2.0, 2.0]


BY_BATCH = {"batch_eval_metrics": True}


@pytest.mark.parametrize(("fields", "metrics", "message"), [
    ({"include_for_metrics": ["inputs"]}, lambda prediction: {}, "'pixel_values', but the batch holds 'input_ids'"),
    (BY_BATCH, lambda prediction, compute_result: None, "dict of numbers"),
    (BY_BATCH, lambda prediction, compute_result: {"x": "high"}, "The metric 'x' must be a number, got str"),
])  # fmt: skip
def test_inputs_and_batch_metrics_are_checked(arguments: Any, fields: Any, metrics: Any, message: str) -> None:
    model = bert()
    model.main_input_name = "pixel_values"
    with pytest.raises(DataError, match=message):
        HFTrainer(model, arguments(**fields), eval_dataset=Tokens(3, "classes"), compute_metrics=metrics).evaluate()


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
        correct, self.correct = self.correct, [] if compute_result else self.correct
        return {"accuracy": float(np.mean(correct))} if compute_result else {}


def test_batch_metrics_are_called_as_by_a_stock_trainer(arguments: Any) -> None:
    data, results = Tokens(7, "classes"), []
    args = arguments(batch_eval_metrics=True)
    for kind in KINDS:
        metrics = Accuracy()
        trainer: Any = kind(bert(), args, eval_dataset=data, compute_metrics=metrics)
        accuracy, (predictions, _, tested) = trainer.evaluate()["eval_accuracy"], trainer.predict(data)
        results.append((accuracy, tested["test_accuracy"], predictions.tolist(), metrics.calls))
    assert results[1] == results[0]
    assert results[1][-1] == [(3, False), (3, False), (1, True)] * 2
    metrics, sets = Accuracy(), {"one": Tokens(4, "classes"), "two": Tokens(3, "classes")}
    values = HFTrainer(bert(), args, eval_dataset=sets, compute_metrics=metrics).evaluate()
    assert metrics.calls == [(3, False), (1, True), (3, True)]  # a last batch of each set
    assert {"eval_one_accuracy", "eval_two_accuracy"} <= values.keys()


def test_batch_metrics_may_select_the_best(arguments: Any) -> None:
    data = Tokens(7, "classes")
    args = arguments(batch_eval_metrics=True, eval_strategy="epoch", metric_for_best_model="accuracy")
    trainer = HFTrainer(bert(), args, data, data, compute_metrics=Accuracy())
    assert not trainer.scorer.keeps_predictions
    metrics = trainer.train()
    assert metrics["best_valid"]["eval_accuracy"] == max(row["eval_accuracy"] for row in metrics["valid"])


def test_batch_metrics_get_the_logits_unshifted(arguments: Any) -> None:
    shapes = []

    def metrics(prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        shapes.append((tuple(prediction.predictions.shape), tuple(prediction.label_ids.shape)))
        return {"x": 1.0}

    HFTrainer(llama(), arguments(batch_eval_metrics=True), eval_dataset=Tokens(3), compute_metrics=metrics).evaluate()
    assert shapes == [((3, 9, 40), (3, 9))]


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


def test_half_precision_evaluation_leaves_the_weights_unchanged(arguments: Any) -> None:
    """To the bit, after an error too; and evaluations of a run use the weights of the run."""
    data, fields = Tokens(6, "classes"), {"per_device_train_batch_size": 6, "max_steps": 2}
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "per_device_eval_batch_size": 6}
    args = arguments(bf16_full_eval=True, **evaluated, **fields)
    model: Any = bert().float()
    dtypes: list[Any] = []
    model.register_buffer("third", torch.tensor(1 / 3))
    model.register_forward_hook(lambda *_: dtypes.extend({model.classifier.weight.dtype, model.third.dtype}))
    before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    evaluates = callback(on_step_end=lambda trainer: trainer.evaluate(data))
    trainer = HFTrainer(model, args, data, data, callbacks=[evaluates])
    for evaluate in (trainer.evaluate, trainer.test, trainer.predict):
        evaluate(data)
    assert dtypes == [torch.bfloat16] * 3
    with pytest.raises(ZeroDivisionError):
        HFTrainer(model, args, eval_dataset=data, compute_metrics=lambda prediction: 1 / 0).evaluate()
    assert all(map(torch.equal, before, (*model.parameters(), *model.buffers())))
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    dtypes.clear()
    trainer.train()
    assert dtypes == [torch.float32] * 7
    assert distance(weights(model), weights(fit(HFTrainer(bert().float(), arguments(**fields), data)).model)) == 0


# --- eval_delay, eval_on_start


def classifier(args: Any, *callbacks: Any, kind: Any = HFTrainer) -> Any:
    """A trainer of 12 steps, 4 in an epoch."""
    data = Tokens(8, "classes")
    return kind(bert(), args, train_dataset=data, eval_dataset=data, callbacks=[*callbacks])


def noting_steps(steps: list[int]) -> Any:
    """Return a callback that notes the steps of evaluations."""
    note = lambda args, state, *_, **__: steps.append(state.global_step)  # noqa: E731
    return callback(transformers.TrainerCallback, on_evaluate=note)


STEPS = {"eval_strategy": "steps", "eval_steps": 2}
EPOCHS = {"eval_strategy": "epoch"}
DELAYS: list[Any] = [
    ({**STEPS, "eval_delay": 6}, [6, 8, 10, 12]),
    ({**STEPS, "eval_delay": 9, "eval_on_start": True}, [0, 10, 12]),
    ({**EPOCHS, "eval_delay": 1.5}, [8, 12]),
    ({**EPOCHS, "eval_delay": 1, "max_steps": 6}, [4, 6]),
]


@pytest.mark.parametrize(("fields", "expected"), thinned(DELAYS, [DELAYS[0], DELAYS[1], DELAYS[3]]), ids=str)
def test_eval_delay_has_the_evaluations_of_a_stock_trainer(arguments: Any, fields: Any, expected: list[int]) -> None:
    for kind in KINDS:
        steps: list[int] = []
        classifier(arguments(**fields), noting_steps(steps), kind=kind).train()
        assert steps == expected, kind


def test_eval_delay_counts_from_the_start_and_not_from_a_resume(arguments: Any) -> None:
    args = arguments(**STEPS, eval_delay=6, save_strategy="steps", save_steps=100)
    classifier(args, StopAt(3)).train()
    metrics = classifier(args).train(resume_from="auto")
    assert [row["step"] for row in metrics["valid"]] == [6, 8, 10, 12]


@pytest.mark.parametrize("order", thinned([0, 10], [10]))
def test_eval_delay_does_not_hold_for_requests(arguments: Any, order: int) -> None:
    def request(trainer: Any) -> None:
        if trainer.progress.step == 3:
            trainer.request_evaluate()

    args = arguments(eval_strategy="steps", eval_steps=9, eval_delay=11)
    metrics = classifier(args, callback(order=order, on_step_end=request)).train()
    assert [row["step"] for row in metrics["valid"]] == [3, 12]  # and it holds for the end of the run
    args = arguments(**STEPS, eval_delay=50, save_strategy="steps", save_steps=4, load_best_model_at_end=True)
    metrics = classifier(args).train()
    assert metrics["stop_reason"] == "epochs" and metrics["best_valid"] == {} and metrics["valid"] == []


def test_eval_on_start_evaluates_once_in_each_run(arguments: Any) -> None:
    evaluations: list[int] = []
    trainer = classifier(arguments(**STEPS, eval_on_start=True, max_steps=1), noting_steps(evaluations))
    for steps in ([0, 1], [0, 1, 0, 1]):
        trainer.train()
        assert evaluations == steps
    assert [row["step"] for row in trainer.state.log_history if "eval_loss" in row] == [0, 1]
