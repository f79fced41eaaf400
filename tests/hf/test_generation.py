"""Evaluations whose predictions the model generates, compared with `Seq2SeqTrainer`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from marks import thinned
from recipes import distance, fit, weights
from tiny import Tokens, bert, llama, t5
from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments

from omnitrain import HFTrainer
from omnitrain.core.errors import ConfigError, DataError

ARGUMENTS = Seq2SeqTrainingArguments
DEFAULTS = {"per_device_eval_batch_size": 3, "predict_with_generate": True, "disable_tqdm": True}
KINDS: tuple[Any, Any] = (Seq2SeqTrainer, HFTrainer)


def score(prediction: Any) -> dict[str, float]:
    tokens = np.where(prediction.predictions != -100, prediction.predictions, 0)
    labels = np.where(prediction.label_ids != -100, prediction.label_ids, 0)
    return {"tokens": float(tokens.sum()), "labels": float(labels.sum()), "width": tokens.shape[1]}


def ending(model: Any) -> Any:
    """A model that ends its answers, some sooner than others."""
    model.generation_config.eos_token_id = list(range(2, 8))
    with torch.no_grad():
        for parameter in model.parameters():  # at first they say hardly anything
            parameter.mul_(4)
    return model


LONG = GenerationConfig(max_new_tokens=40, pad_token_id=0, bos_token_id=1, eos_token_id=[*range(2, 8)])
CASES: list[Any] = [
    (t5, "pairs", {}),
    (llama, "prompts", {"generation_max_length": 30}),
    (t5, "pairs", {"generation_num_beams": 3, "generation_max_length": 14}),
    (t5, "prompts", {"generation_config": LONG}),
    (llama, "tokens", {"generation_config": LONG}),
]


@pytest.mark.parametrize(("make", "samples", "fields"), thinned(CASES, CASES[:2]))
def test_generated_predictions_are_those_of_seq2seq_trainer(
    arguments: Any, make: Any, samples: str, fields: Any
) -> None:
    # without any length a stock trainer gives only the first batch 20 new tokens
    data, args = Tokens(7 if fields else 3, samples), arguments(**fields)
    stock, ours = (kind(ending(make()).eval(), args, compute_metrics=score).predict(data) for kind in KINDS)
    assert np.array_equal(ours.predictions, np.where(stock.predictions == -100, 0, stock.predictions))
    assert len({tuple(row) for row in ours.predictions.tolist()}) > 1
    if samples == "prompts":
        assert ours.labels is None and ours.metrics == {}
        return
    assert ours.labels.shape == stock.label_ids.shape
    assert np.array_equal(np.maximum(ours.labels, 0), np.maximum(stock.label_ids, 0))
    for name in ("test_tokens", "test_labels", "test_width"):
        assert ours.metrics[name] == stock.metrics[name]
    plain = HFTrainer(ending(make()).eval(), arguments(predict_with_generate=False)).predict(data)
    assert ours.metrics["test_loss"] == plain.metrics["test_loss"]


@pytest.mark.parametrize(("size", "width"), thinned([(10, 20), (20, 31), (35, 35)], [(20, 31)]))
def test_generated_predictions_are_as_wide_as_the_config(arguments: Any, size: int, width: int) -> None:
    model, data = t5(), Tokens(3, "pairs")
    model.generation_config.max_new_tokens = 30
    model.generate = lambda **kwargs: torch.full((3, size), 5)  # type: ignore[method-assign]
    for kind in KINDS:
        trainer: Any = kind(model, arguments(), compute_metrics=score)
        assert trainer.predict(data).predictions.shape == (3, width)
    trainer = HFTrainer(model, arguments(), preprocess_logits_for_metrics=lambda tokens, labels: tokens[:, :4] + 2)
    assert trainer.predict(data).predictions.tolist() == [[7] * 4] * 3


def test_generated_predictions_are_the_same_in_every_split(arguments: Any) -> None:
    both = [arguments(per_device_eval_batch_size=size, generation_max_length=30) for size in (2, 7)]
    trainers = [HFTrainer(ending(t5()), args, compute_metrics=score) for args in both]
    first, other = (trainer.predict(Tokens(7, "pairs")) for trainer in trainers)
    assert np.array_equal(first.predictions, other.predictions) and np.array_equal(first.labels, other.labels)
    assert first.metrics == pytest.approx(other.metrics, rel=1e-6)
    assert set(first.labels[:, -1]) == {-100} and -100 not in first.predictions and 0 in first.predictions[:, -1]


def test_evaluate_generates_nothing_without_metrics(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = t5(), Tokens(3, "pairs")
    trainer = HFTrainer(model, arguments(), eval_dataset=data)
    monkeypatch.setattr(model, "generate", None)
    assert trainer.evaluate().keys() == {"eval_loss"}
    with pytest.raises(TypeError):
        trainer.predict(data)
    options = {"eval_dataset": Tokens(3, "classes"), "compute_metrics": score}
    trainer = HFTrainer(bert(), arguments(prediction_loss_only=True), **options)
    assert trainer.evaluate().keys() == {"eval_loss"}


SAMPLED = GenerationConfig(do_sample=True, max_new_tokens=8, pad_token_id=0, decoder_start_token_id=0, eos_token_id=2)


def test_sampling_leaves_the_training_unchanged(arguments: Any) -> None:
    """And the best is selected by what is generated."""
    predictions = []

    def record(prediction: Any) -> dict[str, float]:
        predictions.append(prediction.predictions.tolist())
        return score(prediction)

    fields = {"eval_steps": 1, "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    fields |= {"generation_config": SAMPLED, "metric_for_best_model": "tokens", "greater_is_better": False}
    options = {"compute_metrics": record, "data_collator": transformers.default_data_collator}
    plain, trainer = (
        fit(HFTrainer(t5(dropout=0.3), args, Tokens(8, "pairs"), Tokens(3, "pairs"), **options))
        for args in (arguments(eval_strategy=strategy, **fields) for strategy in ("no", "steps"))
    )
    metrics = trainer.metrics
    assert metrics["best_valid"]["eval_tokens"] == min(row["eval_tokens"] for row in metrics["valid"])
    assert distance(weights(plain.model), weights(trainer.model)) == 0 < distance(weights(plain.model), weights(t5()))
    trainer.evaluate()
    trainer.evaluate()
    assert predictions[-1] == predictions[-2]  # a repeated evaluation gives the same


def test_generation_config_is_saved_with_the_model(arguments: Any, tmp_path: Path) -> None:
    SAMPLED.save_pretrained(tmp_path / "config")
    data = Tokens(3, "pairs")
    for config in (SAMPLED, str(tmp_path / "config"), str(tmp_path / "config" / "generation_config.json")):
        trainer = HFTrainer(t5(), arguments(generation_config=config), eval_dataset=data)
        trainer.save_model(tmp_path / "model", overwrite=True)
        saved = GenerationConfig.from_pretrained(tmp_path / "model")
        assert saved.do_sample and saved.max_new_tokens == 8
        assert trainer.get_model().generation_config is not SAMPLED
    model = t5()
    before = model.generation_config.to_dict()
    HFTrainer(model, arguments(generation_num_beams=2), eval_dataset=data, compute_metrics=score).evaluate()
    assert model.generation_config.to_dict() == before


def test_generation_rejects_what_it_cannot_do(arguments: Any) -> None:
    for model, fields, options, message in (
        (torch.nn.Linear(2, 2), {}, {}, "needs a model with a method `generate`"),
        (t5(), {}, {"compute_metrics": ["accuracy"]}, "compute_metrics='accuracy'.*predict_with_generate"),
        (t5(), {"sortish_sampler": True}, {}, "sortish_sampler=True"),
    ):
        with pytest.raises(ConfigError, match=message):
            HFTrainer(model, arguments(**fields), **options)


TUPLES = torch.utils.data.TensorDataset(torch.full((3, 4), 5), torch.full((3, 4), 5))


@pytest.mark.parametrize(("make", "config", "data", "message"), [
    (t5, {"num_return_sequences": 2, "num_beams": 2}, Tokens(3, "pairs"), "generated 6 sequences for 3 samples"),
    (llama, {"pad_token_id": None}, Tokens(3, "prompts"), "`pad_token`"),
    (llama, {}, TUPLES, "batches that are dicts, got a tuple"),
], ids=["sequences", "padding", "tuple"])  # fmt: skip
def test_generated_predictions_need_their_data(arguments: Any, make: Any, config: Any, data: Any, message: str) -> None:
    model = make()
    for name, value in config.items():
        setattr(model.generation_config, name, value)
    model.config.pad_token_id = model.generation_config.pad_token_id
    loss = {"loss_fn": lambda outputs, labels: outputs.logits.sum()} if data is TUPLES else {}
    fields = {"generation_max_length": 12} if make is llama else {}
    with pytest.raises(DataError, match=message):
        HFTrainer(model, arguments(**fields), **loss).predict(data)


@pytest.mark.parametrize("name", thinned(["max_length", "max_new_tokens"], ["max_new_tokens"]))
def test_generation_options_may_be_those_of_a_call(arguments: Any, name: str) -> None:
    results, options = [], {name: 6}
    for kind in KINDS:
        trainer: Any = kind(ending(t5()).eval(), arguments(generation_max_length=12), compute_metrics=score)
        trainer.model.generation_config.max_length = None
        called, plain = trainer.evaluate(Tokens(4), **options), trainer.evaluate(Tokens(4))
        predictions = trainer.predict(Tokens(4), metric_key_prefix="own", **options).predictions.tolist()
        results.append((predictions, *((row["eval_tokens"], row["eval_width"]) for row in (called, plain))))
    assert results[0] == results[1] and results[0][1] != results[0][2]


def test_generation_options_may_be_an_attribute_of_a_subclass(arguments: Any) -> None:
    class Own(HFTrainer):
        def evaluate(self, eval_dataset: Any = None, **gen_kwargs: Any) -> Any:  # type: ignore[override]
            self._gen_kwargs = gen_kwargs
            return self.evaluation_loop(self.get_eval_dataloader(eval_dataset), "Evaluation").metrics

    trainer = Own(ending(t5()).eval(), arguments(), compute_metrics=score)
    for length in (40, 30):
        assert trainer.evaluate(Tokens(4), max_length=length)["eval_width"] == length


def test_generation_options_are_rejected_without_generation(arguments: Any) -> None:
    trainer = HFTrainer(t5(), arguments(predict_with_generate=False))
    trainer.evaluate(Tokens(4), max_length=9)  # as in a script that leaves it to its command line
    trainer = HFTrainer(t5(), None, Tokens(4))
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(TypeError, match=r"max_length.*predict_with_generate"):
            call(Tokens(4), max_length=9)
