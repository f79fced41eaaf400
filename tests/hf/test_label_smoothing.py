"""Label smoothing by transformers' arguments: its formula, and our weights of micro-batches."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from recipes import Sentences, StopAt, Tagger, distance, rows, t16, weights
from tiny import Tokens, bert, llama, t5
from transformers import TrainingArguments

from omnitrain import HFTrainer
from omnitrain.errors import ConfigError, DataError
from omnitrain.hf.label_smoothing import SmoothedLoss


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    def make(**options: Any) -> TrainingArguments:
        defaults = {
            "output_dir": str(tmp_path / "run"), "use_cpu": True, "report_to": "none", "save_strategy": "no",
            "label_smoothing_factor": 0.2, "optim": "sgd", "learning_rate": 0.5, "num_train_epochs": 1,
            "max_grad_norm": 0.0, "disable_tqdm": True,
        }  # fmt: skip
        return TrainingArguments(**{**defaults, **options})

    return make


class FirstLoss(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.loss = float("nan")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1 and "loss" in logs:
            self.loss = logs["loss"]


@pytest.mark.parametrize(
    ("model", "kind"), [(llama, "tokens"), (t5, "pairs"), (bert, "classes")], ids=["causal", "pairs", "classes"]
)
def test_loss_and_update_of_one_batch_are_those_of_a_stock_trainer(arguments: Any, model: Any, kind: str) -> None:
    found = []
    for trainer_kind in (transformers.Trainer, HFTrainer):
        first = FirstLoss()
        args = arguments(per_device_train_batch_size=6, per_device_eval_batch_size=6, logging_steps=1)
        trainer: Any = trainer_kind(model().float(), args, train_dataset=Tokens(6, kind), callbacks=[first])
        loss = trainer.evaluate(Tokens(6, kind))["eval_loss"]
        trainer.train()
        found.append((loss, first.loss, weights(trainer.model)))
    (stock_eval, stock_loss, stock_weights), (loss_eval, loss, own_weights) = found
    assert loss_eval == pytest.approx(stock_eval, rel=1e-5)
    assert loss == pytest.approx(stock_loss, rel=1e-4)  # which theirs rounds
    assert distance(own_weights, stock_weights) <= 1e-6


@pytest.mark.parametrize("model", [llama, Tagger], ids=["causal", "plain module"])
def test_every_split_of_a_step_with_masked_labels_is_the_same_step(arguments: Any, model: Any) -> None:
    found, losses = [], []
    for batch, accumulation in ((8, 1), (4, 2), (1, 8)):
        args = arguments(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
        data: Any = Tokens(8) if model is llama else Sentences(8)
        trainer = HFTrainer(model(), args, data)
        losses.append(trainer.train()["train_metrics_history"][0]["train_loss"])
        found.append(weights(trainer.model))
    assert distance(found[0], weights(model())) > 1e-3
    assert max(distance(found[0], other) for other in found[1:]) <= 1e-12
    assert max(losses) - min(losses) <= 1e-12


def test_the_loss_of_an_evaluation_is_the_mean_over_labels_whatever_its_batches(arguments: Any) -> None:
    model, data = llama(), Tokens(7)
    found = [
        HFTrainer(model, arguments(per_device_eval_batch_size=size), data).evaluate(data)["eval_loss"]
        for size in (1, 2, 7)
    ]
    with torch.no_grad():
        logits = model.eval()(input_ids=data.ids).logits[:, :-1]
    labels = data.labels[:, 1:]
    logs = logits.log_softmax(-1)[labels != -100]
    kept = labels[labels != -100]
    expected = -(0.8 * logs[range(len(kept)), kept] + 0.2 * logs.mean(-1)).mean()
    assert found == pytest.approx([expected.item()] * 3, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_half_precision_are_summed_in_float32(dtype: torch.dtype) -> None:
    scores, labels = (8 * torch.randn(64, 1000)).to(dtype), torch.randint(0, 1000, (64,))
    found = SmoothedLoss(0.2)({"logits": scores}, labels)
    assert found.dtype is torch.float32
    assert found.item() == pytest.approx(SmoothedLoss(0.2)(scores.double(), labels).item(), rel=1e-5)


def test_a_loss_of_ones_own_beside_it_is_an_error_naming_both(arguments: Any) -> None:
    for name in ("loss_fn", "compute_loss_func"):
        options = {name: lambda outputs, labels, num_items_in_batch=None: 0}
        with pytest.raises(ConfigError, match=f"label_smoothing_factor=0.2.*{name}"):
            HFTrainer(bert(), arguments(), Tokens(4, "classes"), **options)
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0.2.*`unit`"):
        HFTrainer(bert(), arguments(), Tokens(4, "classes"), unit=lambda batch: 0)


@pytest.mark.parametrize("factor", [-0.1, 1.5])
def test_a_factor_that_is_no_share_is_an_error(arguments: Any, factor: float) -> None:
    with pytest.raises(ConfigError, match=f"between 0 and 1, got {factor}"):
        HFTrainer(bert(), arguments(label_smoothing_factor=factor), Tokens(4, "classes"))


def test_samples_with_several_labels_are_not_smoothed_and_that_is_told(
    arguments: Any, caplog: pytest.LogCaptureFixture
) -> None:
    data = [{"input_ids": row["input_ids"], "labels": torch.tensor([1.0, 0.0, 1.0]).double()} for row in Tokens(4)]
    found = []
    for factor in (0.0, 0.2):
        model = bert(problem_type="multi_label_classification")
        caplog.clear()
        with caplog.at_level(logging.WARNING, "omnitrain"):
            trainer = HFTrainer(model, arguments(label_smoothing_factor=factor), data)
        assert ("label_smoothing_factor" in caplog.text) == bool(factor)
        found.append(trainer.evaluate(data))
    assert found[0] == found[1]


def test_labels_that_are_no_classes_are_an_error_at_the_first_step(arguments: Any) -> None:
    with pytest.raises(DataError, match=r"label_smoothing_factor=0.2.*float"):
        HFTrainer(t16(), arguments(), rows(4)).train()
    with pytest.raises(DataError, match=r"label_smoothing_factor=0.2.*none"):
        HFTrainer(llama(), arguments(), Tokens(4, "prompts")).train()


def test_a_resume_with_another_factor_is_told(arguments: Any) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 2}
    HFTrainer(bert(), arguments(**options), Tokens(6, "classes"), callbacks=[StopAt(1)]).train()
    trainer = HFTrainer(bert(), arguments(**options, label_smoothing_factor=0.3), Tokens(6, "classes"))
    with pytest.raises(RuntimeError, match=r"loss_fn.*SmoothedLoss\(0.2\).*SmoothedLoss\(0.3\)"):
        trainer.train(resume_from="auto")


def test_without_the_factor_the_models_own_loss_is_taken(arguments: Any) -> None:
    data = Tokens(4, "classes")
    model = bert()
    found = HFTrainer(model, arguments(label_smoothing_factor=0.0), data).evaluate(data)["eval_loss"]
    with torch.no_grad():
        logits = model.eval()(input_ids=data.ids).logits
    assert found == pytest.approx(F.cross_entropy(logits, data.ids[:, 0] % 3).item(), rel=1e-12)
