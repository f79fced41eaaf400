"""What functions of metrics get by transformers' arguments: the inputs, the losses, or batch by batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from recipes import distance, weights
from tiny import Tokens, bert, llama
from transformers import EvalPrediction, TrainingArguments

from omnitrain import Callback, HFTrainer
from omnitrain.errors import ConfigError, DataError
from omnitrain.units import StepOutput


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    def make(**options: Any) -> TrainingArguments:
        defaults = {
            "use_cpu": True, "report_to": "none", "save_strategy": "no", "per_device_eval_batch_size": 3,
            "disable_tqdm": True,
        }  # fmt: skip
        return TrainingArguments(str(tmp_path / "run"), **{**defaults, **options})

    return make


class Seen:
    """A function of metrics that keeps what it gets."""

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
    found = []
    for kind in (transformers.Trainer, HFTrainer):
        seen = Seen()
        args = arguments(include_for_metrics=["inputs", "loss"])
        trainer: Any = kind(bert(), args, eval_dataset=ragged(7), compute_metrics=seen, data_collator=padded)
        trainer.evaluate()
        found.append(seen.calls[0])
    theirs, ours = found
    assert ours.inputs.shape == (7, 8) and -100 in ours.inputs
    assert np.array_equal(ours.inputs, theirs.inputs)
    assert np.array_equal(ours.predictions, theirs.predictions) and np.array_equal(ours.label_ids, theirs.label_ids)
    # one value for each sample: of the last batch, which is short, theirs has as many as of a whole one
    assert ours.losses.shape == (7,) and np.array_equal(ours.losses, theirs.losses[:7])
    assert len(set(ours.losses.tolist())) == 3


def test_only_what_was_asked_for_is_there(arguments: Any) -> None:
    for wanted, held in ((["loss"], (False, True)), (["inputs"], (True, False)), ([], (False, False))):
        seen = Seen()
        args = arguments(include_for_metrics=wanted)
        HFTrainer(bert(), args, eval_dataset=Tokens(5, "classes"), compute_metrics=seen).evaluate()
        (call,) = seen.calls
        assert (call.inputs is not None, call.losses is not None) == held
        assert len(list(call)) == 2 + sum(held)


def test_the_losses_of_a_unit_that_sums_are_means_too(arguments: Any) -> None:
    class Unit:
        def __call__(self, batch: Any) -> Any:
            raise AssertionError

        def evaluate(self, batch: Any) -> Any:
            return StepOutput(torch.tensor(6.0), batch["input_ids"], batch["labels"], num_targets=3)

    seen = Seen()
    args = arguments(include_for_metrics=["loss"])
    HFTrainer(bert(), args, eval_dataset=Tokens(2, "classes"), compute_metrics=seen, unit=Unit()).evaluate()
    assert seen.calls[0].losses.tolist() == [2.0, 2.0]


def test_inputs_go_by_the_name_that_the_model_has_for_them(arguments: Any) -> None:
    model: Any = bert()
    model.main_input_name = "pixel_values"
    args = arguments(include_for_metrics=["inputs"])
    trainer = HFTrainer(model, args, eval_dataset=Tokens(2, "classes"), compute_metrics=Seen())
    with pytest.raises(DataError, match=r"'pixel_values', but the batch holds 'input_ids'"):
        trainer.evaluate()


def test_a_word_that_is_not_among_them_is_an_error(arguments: Any) -> None:
    with pytest.raises(ConfigError, match=r"got 'losses'.*'loss'"):
        HFTrainer(llama(), arguments(include_for_metrics=["losses"]))


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


def test_a_function_is_called_batch_by_batch_as_a_stock_trainer_calls_it(arguments: Any) -> None:
    data, found = Tokens(7, "classes"), []
    for kind in (transformers.Trainer, HFTrainer):
        function = Accuracy()
        args = arguments(batch_eval_metrics=True, per_device_train_batch_size=4, eval_strategy="epoch",
                         num_train_epochs=2)  # fmt: skip
        trainer: Any = kind(bert(), args, eval_dataset=data, compute_metrics=function)
        first = trainer.evaluate()["eval_accuracy"]
        second = trainer.predict(data)
        found.append((first, second.metrics["test_accuracy"], second.predictions.tolist(), function.calls))
    assert found[1] == found[0]
    assert found[1][-1] == [(3, False), (3, False), (1, True)] * 2


def test_a_function_of_batches_keeps_no_predictions_and_may_select_the_best(arguments: Any) -> None:
    data = Tokens(7, "classes")
    args = arguments(batch_eval_metrics=True, eval_strategy="epoch", metric_for_best_model="accuracy")
    trainer = HFTrainer(bert(), args, data, data, compute_metrics=Accuracy())
    assert not trainer.scorer.keeps_predictions
    metrics = trainer.train()
    assert metrics["best_valid"]["eval_accuracy"] == max(row["eval_accuracy"] for row in metrics["valid"])


def test_each_of_several_sets_has_a_last_batch(arguments: Any) -> None:
    function = Accuracy()
    sets = {"one": Tokens(4, "classes"), "two": Tokens(3, "classes")}
    args = arguments(batch_eval_metrics=True)
    metrics = HFTrainer(bert(), args, eval_dataset=sets, compute_metrics=function).evaluate()
    assert function.calls == [(3, False), (1, True), (3, True)]
    assert {"eval_one_accuracy", "eval_two_accuracy"} <= metrics.keys()


def test_logits_of_a_language_model_come_unshifted(arguments: Any) -> None:
    shapes = []

    def note(prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        shapes.append((tuple(prediction.predictions.shape), tuple(prediction.label_ids.shape)))
        return {"x": 1.0}

    HFTrainer(llama(), arguments(batch_eval_metrics=True), eval_dataset=Tokens(3), compute_metrics=note).evaluate()
    assert shapes == [((3, 9, 40), (3, 9))]


def test_a_result_that_is_no_dict_of_numbers_is_an_error(arguments: Any) -> None:
    for result, words in ((None, "dict of numbers"), ({"x": "high"}, "'x' is no number")):
        trainer = HFTrainer(
            bert(), arguments(batch_eval_metrics=True), eval_dataset=Tokens(3, "classes"),
            compute_metrics=lambda prediction, compute_result, result=result: result,
        )  # fmt: skip
        with pytest.raises(DataError, match=words):
            trainer.evaluate()


@pytest.mark.parametrize("metrics", ["accuracy", ["accuracy"], lambda prediction: {}], ids=["name", "list", "function"])
def test_what_cannot_be_called_batch_by_batch_is_refused(arguments: Any, metrics: Any) -> None:
    with pytest.raises(ConfigError, match=r"batch_eval_metrics=True.*compute_result"):
        HFTrainer(bert(), arguments(batch_eval_metrics=True), compute_metrics=metrics)


def test_batches_and_inputs_together_are_refused(arguments: Any) -> None:
    args = arguments(batch_eval_metrics=True, include_for_metrics=["inputs"])
    with pytest.raises(ConfigError, match=r"batch_eval_metrics=True.*include_for_metrics=\['inputs'\]"):
        HFTrainer(bert(), args, compute_metrics=Accuracy())


# --- bf16_full_eval, fp16_full_eval


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_an_evaluation_outside_of_a_run_has_the_numbers_of_a_stock_trainer(arguments: Any, name: str) -> None:
    data, found = Tokens(7, "classes"), []
    for kind in (transformers.Trainer, HFTrainer):
        trainer: Any = kind(bert().float(), arguments(**{name: True}), eval_dataset=data)
        found.append((trainer.predict(data).predictions.astype(np.float32), trainer.evaluate()["eval_loss"]))
    assert np.array_equal(found[1][0], found[0][0])
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-2)  # theirs takes the mean in that precision
    full = HFTrainer(bert().float(), arguments(), eval_dataset=data).predict(data).predictions
    assert not np.array_equal(full, found[1][0]) and np.abs(full - found[1][0]).max() < 0.02


class Dtypes:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        return {"x": 1.0}

    def watch(self, model: Any) -> Any:
        model.register_buffer("third", torch.tensor(1 / 3))
        model.register_forward_hook(lambda *_: self.seen.extend({model.classifier.weight.dtype, model.third.dtype}))
        return model


class EvaluatesBeside(Callback):
    def on_step_end(self, trainer: Any) -> None:
        trainer.evaluate(Tokens(6, "classes"))


def test_the_weights_are_the_same_to_the_bit_afterwards_and_evaluations_of_a_run_use_them(arguments: Any) -> None:
    data, dtypes = Tokens(6, "classes"), Dtypes()
    args = arguments(
        bf16_full_eval=True, eval_strategy="steps", eval_steps=1, eval_on_start=True, max_steps=2,
        per_device_eval_batch_size=6, per_device_train_batch_size=6,
    )  # fmt: skip
    model = dtypes.watch(bert().float())
    before = [one.clone() for one in (*model.parameters(), *model.buffers())]
    addresses = [one.data_ptr() for one in model.parameters()]
    trainer = HFTrainer(model, args, data, data, callbacks=[EvaluatesBeside()])
    trainer.evaluate()
    trainer.test(data)
    trainer.predict(data)
    assert dtypes.seen == [torch.bfloat16] * 3
    assert all(map(torch.equal, before, (*model.parameters(), *model.buffers())))
    assert addresses == [one.data_ptr() for one in model.parameters()]
    dtypes.seen.clear()
    trainer.train()
    assert dtypes.seen == [torch.float32] * 7
    other = HFTrainer(bert().float(), arguments(max_steps=2, per_device_train_batch_size=6), data)
    other.train()
    assert distance(weights(model), weights(other.model)) == 0


def test_the_weights_are_put_back_after_an_error_too(arguments: Any) -> None:
    def fail(prediction: EvalPrediction) -> Any:
        raise ZeroDivisionError

    model = bert().float()
    trainer = HFTrainer(model, arguments(bf16_full_eval=True), eval_dataset=Tokens(2, "classes"), compute_metrics=fail)
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate()
    assert {one.dtype for one in model.parameters()} == {torch.float32}
