"""Evaluations whose predictions the model generates, as `Seq2SeqTrainer` has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from recipes import distance, weights
from tiny import Tokens, bert, llama, t5
from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments

from omnitrain import HFTrainer
from omnitrain.errors import ConfigError, DataError


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    def make(**options: Any) -> Seq2SeqTrainingArguments:
        defaults = {
            "use_cpu": True, "report_to": "none", "save_strategy": "no", "per_device_eval_batch_size": 3,
            "predict_with_generate": True, "disable_tqdm": True,
        }  # fmt: skip
        return Seq2SeqTrainingArguments(str(tmp_path / "run"), **{**defaults, **options})

    return make


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


CASES = {
    "as they come": {},
    "longer than the config says": {"generation_max_length": 30},
    "shorter": {"generation_max_length": 12},
    "beams": {"generation_num_beams": 3, "generation_max_length": 14},
    "by new tokens": {
        "generation_config": GenerationConfig(
            max_new_tokens=40, pad_token_id=0, bos_token_id=1, eos_token_id=[*range(2, 8)]
        )
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("make", "kind"), [(t5, "pairs"), (t5, "prompts"), (llama, "prompts"), (llama, "tokens")])
def test_predictions_labels_and_loss_are_those_of_seq2seq_trainer(
    arguments: Any, make: Any, kind: str, case: str
) -> None:
    # without any length theirs gives the first batch alone 20 new tokens
    data, found = Tokens(7 if CASES[case] else 3, kind), []
    for trainer_kind in (Seq2SeqTrainer, HFTrainer):
        args = arguments(**CASES[case])
        trainer: Any = trainer_kind(ending(make()).eval(), args, compute_metrics=score)
        found.append(trainer.predict(data))
    theirs, ours = found
    assert np.array_equal(ours.predictions, np.where(theirs.predictions == -100, 0, theirs.predictions))
    assert len({tuple(row) for row in ours.predictions.tolist()}) > 1
    if kind == "prompts":
        assert ours.labels is None and ours.metrics == {}
        return
    assert ours.labels.shape == theirs.label_ids.shape
    assert np.array_equal(np.maximum(ours.labels, 0), np.maximum(theirs.label_ids, 0))
    for name in ("test_tokens", "test_labels", "test_width"):
        assert ours.metrics[name] == theirs.metrics[name]


@pytest.mark.parametrize(("size", "width"), [(10, 20), (20, 31), (25, 31), (35, 35)])
def test_answers_are_made_as_wide_as_the_config_allows(arguments: Any, size: int, width: int) -> None:
    for kind in (Seq2SeqTrainer, HFTrainer):
        model = t5()
        model.generation_config.max_new_tokens = 30
        model.generate = lambda size=size, **kwargs: torch.full((3, size), 5)  # type: ignore[method-assign]
        trainer: Any = kind(model, arguments(), compute_metrics=score)
        assert trainer.predict(Tokens(3, "pairs")).predictions.shape == (3, width)


@pytest.mark.parametrize(("make", "kind"), [(t5, "pairs"), (llama, "tokens")])
def test_no_split_into_batches_shows_in_the_predictions(arguments: Any, make: Any, kind: str) -> None:
    found = []
    for size in (1, 2, 7):
        args = arguments(per_device_eval_batch_size=size, generation_max_length=30)
        found.append(HFTrainer(ending(make()), args, compute_metrics=score).predict(Tokens(7, kind)))
    for other in found[1:]:
        assert np.array_equal(found[0].predictions, other.predictions)
        assert np.array_equal(found[0].labels, other.labels)
        assert found[0].metrics == pytest.approx(other.metrics, rel=1e-6)
    assert (
        set(found[0].labels[:, -1]) == {-100} and -100 not in found[0].predictions and 0 in found[0].predictions[:, -1]
    )


def test_the_loss_is_that_of_an_evaluation_without_generation(arguments: Any) -> None:
    for make, kind in ((t5, "pairs"), (llama, "tokens")):
        losses = []
        for generates in (True, False):
            args = arguments(predict_with_generate=generates)
            trainer = HFTrainer(make(), args, eval_dataset=Tokens(7, kind), compute_metrics=lambda p: {"x": 1.0})
            losses.append(trainer.evaluate()["eval_loss"])
        assert losses[0] == losses[1]


def test_smoothed_labels_go_together_with_it(arguments: Any) -> None:
    data, losses = Tokens(3, "pairs"), []
    for kind in (Seq2SeqTrainer, HFTrainer):
        args = arguments(label_smoothing_factor=0.3)
        trainer: Any = kind(t5(), args, eval_dataset=data, compute_metrics=score)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_nothing_is_generated_where_nobody_looks_at_it(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = t5()
    trainer = HFTrainer(model, arguments(), eval_dataset=Tokens(3, "pairs"))
    monkeypatch.setattr(model, "generate", None)
    assert trainer.evaluate().keys() == {"eval_loss"}
    with pytest.raises(TypeError):
        trainer.predict(Tokens(3, "pairs"))


def test_what_is_generated_goes_through_preprocess_logits_for_metrics(arguments: Any) -> None:
    trainer = HFTrainer(
        t5(), arguments(), eval_dataset=Tokens(3, "pairs"), compute_metrics=score,
        preprocess_logits_for_metrics=lambda tokens, labels: tokens[:, :4] * 0 + 7,
    )  # fmt: skip
    assert trainer.predict(Tokens(3, "pairs")).predictions.tolist() == [[7] * 4] * 3


SAMPLED = GenerationConfig(do_sample=True, max_new_tokens=8, pad_token_id=0, decoder_start_token_id=0, eos_token_id=2)


def test_sampling_in_evaluations_leaves_the_numbers_of_the_training_alone(arguments: Any) -> None:
    found, seen = [], []

    def note(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions.tolist())
        return {"x": 1.0}

    for strategy in ("steps", "no"):
        args = arguments(
            eval_strategy=strategy, eval_steps=2, max_steps=6, per_device_train_batch_size=2, learning_rate=1e-2,
            generation_config=SAMPLED,
        )  # fmt: skip
        trainer = HFTrainer(
            t5(dropout=0.3), args, Tokens(8, "pairs"), Tokens(3, "pairs"), compute_metrics=note,
            data_collator=transformers.default_data_collator,
        )  # fmt: skip
        trainer.train()
        found.append(weights(trainer.model))
    assert distance(*found) == 0
    trainer.evaluate()
    trainer.evaluate()
    assert seen[-1] == seen[-2]  # an evaluation done again gives the same
    assert distance(found[0], weights(t5())) > 0


def test_best_and_stopping_go_by_what_was_generated(arguments: Any) -> None:
    args = arguments(
        eval_strategy="epoch", num_train_epochs=2, metric_for_best_model="tokens", greater_is_better=False,
    )  # fmt: skip
    trainer = HFTrainer(t5(), args, Tokens(8, "pairs"), Tokens(3, "pairs"), compute_metrics=score)
    metrics = trainer.train()
    assert metrics["best_valid"]["eval_tokens"] == min(row["eval_tokens"] for row in metrics["valid"])


def test_the_generation_config_is_taken_over_and_saved_with_the_model(arguments: Any, tmp_path: Path) -> None:
    SAMPLED.save_pretrained(tmp_path / "config")
    for given in (SAMPLED, str(tmp_path / "config"), str(tmp_path / "config" / "generation_config.json")):
        trainer = HFTrainer(t5(), arguments(generation_config=given), eval_dataset=Tokens(3, "pairs"))
        trainer.save_model(tmp_path / "model", overwrite=True)
        kept = GenerationConfig.from_pretrained(tmp_path / "model")
        assert kept.do_sample and kept.max_new_tokens == 8
        assert trainer.get_model().generation_config is not SAMPLED


def test_the_models_own_generation_config_stays_as_it_is(arguments: Any) -> None:
    model = t5()
    before = model.generation_config.to_dict()
    HFTrainer(
        model, arguments(generation_num_beams=2), eval_dataset=Tokens(3, "pairs"), compute_metrics=score
    ).evaluate()
    assert model.generation_config.to_dict() == before


def test_what_cannot_be_meant_is_refused(arguments: Any) -> None:
    with pytest.raises(ConfigError, match=r"needs a model with a method `generate`"):
        HFTrainer(torch.nn.Linear(2, 2), arguments())
    with pytest.raises(ConfigError, match=r"compute_metrics='accuracy'.*predict_with_generate"):
        HFTrainer(t5(), arguments(), compute_metrics=["accuracy"])
    with pytest.raises(ConfigError, match=r"sortish_sampler=True"):
        HFTrainer(t5(), arguments(sortish_sampler=True))


def test_several_answers_to_one_question_are_an_error(arguments: Any) -> None:
    model = t5()
    model.generation_config.num_return_sequences = model.generation_config.num_beams = 2
    with pytest.raises(DataError, match="generated 6 sequences for 3 samples"):
        HFTrainer(model, arguments()).predict(Tokens(3, "pairs"))


def test_without_a_token_to_pad_with_it_says_what_to_set(arguments: Any) -> None:
    model = llama()
    model.config.pad_token_id = model.generation_config.pad_token_id = None
    with pytest.raises(DataError, match="`pad_token`"):
        HFTrainer(model, arguments(generation_max_length=12)).predict(Tokens(3, "prompts"))


def test_batches_that_are_no_dicts_are_refused(arguments: Any) -> None:
    data = torch.utils.data.TensorDataset(torch.full((3, 4), 5), torch.full((3, 4), 5))
    with pytest.raises(DataError, match="batches that are dicts, got a tuple"):
        HFTrainer(llama(), arguments(), loss_fn=lambda outputs, labels: outputs.logits.sum()).predict(data)


def test_a_loss_is_all_that_is_computed_if_it_is_all_that_was_asked_for(arguments: Any) -> None:
    trainer = HFTrainer(bert(), arguments(prediction_loss_only=True), eval_dataset=Tokens(3, "classes"))
    assert trainer.evaluate().keys() == {"eval_loss"}


@pytest.mark.parametrize("given", [{"max_length": 9}, {"num_beams": 3, "max_length": 14}, {"max_new_tokens": 4}])
def test_what_is_generated_is_said_by_a_call(arguments: Any, given: dict[str, int]) -> None:
    found = []
    for kind in (Seq2SeqTrainer, HFTrainer):
        trainer: Any = kind(ending(t5()).eval(), arguments(generation_max_length=12), compute_metrics=score)
        trainer.model.generation_config.max_length = None
        metrics = trainer.evaluate(Tokens(4), **given)
        predicted = trainer.predict(Tokens(4), metric_key_prefix="own", **given)
        found.append((metrics["eval_tokens"], metrics["eval_width"], predicted.predictions.tolist()))
        plain = trainer.evaluate(Tokens(4))
        found[-1] += (plain["eval_tokens"], plain["eval_width"])
    assert found[0] == found[1] and found[0][:2] != found[0][3:]


def test_what_an_evaluation_of_a_subclass_generates_is_said_by_its_attribute(arguments: Any) -> None:
    class Own(HFTrainer):
        def evaluate(self, eval_dataset: Any = None, **gen_kwargs: Any) -> Any:  # type: ignore[override]
            self._gen_kwargs = gen_kwargs
            return self.evaluation_loop(self.get_eval_dataloader(eval_dataset), "Evaluation").metrics

    trainer = Own(ending(t5()).eval(), arguments(), compute_metrics=score)
    assert trainer.evaluate(Tokens(4), max_length=40)["eval_width"] == 40
    assert trainer.evaluate(Tokens(4), max_length=30)["eval_width"] == 30


def test_what_is_to_be_generated_is_refused_where_nothing_is(arguments: Any) -> None:
    trainer = HFTrainer(t5(), arguments(predict_with_generate=False))
    trainer.evaluate(Tokens(4), max_length=9)  # as a script does that leaves it to its command line
    trainer = HFTrainer(t5(), None, Tokens(4))
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(TypeError, match=r"max_length.*predict_with_generate"):
            call(Tokens(4), max_length=9)
