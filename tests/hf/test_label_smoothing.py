"""`label_smoothing_factor`: the formula, and the weights of micro-batches."""

from typing import Any

import pytest
import torch
import transformers
from recipes import Sentences, StopAt, Tagger, distance, rows, t16, weights
from tiny import Tokens, bert, llama, t5
from torch.nn.functional import cross_entropy

from omnitrain import CrossEntropy, HFTrainer
from omnitrain.core.errors import ConfigError, DataError
from omnitrain.hf.label_smoothing import SmoothedLoss

DEFAULTS = {
    "label_smoothing_factor": 0.2, "optim": "sgd", "learning_rate": 0.5, "num_train_epochs": 1, "max_grad_norm": 0.0,
    "disable_tqdm": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "data"), [(llama, "tokens"), (t5, "pairs"), (bert, "classes")], ids=["causal", "pairs", "classes"]
)
def test_smoothed_loss_and_update_are_those_of_a_stock_trainer(arguments: Any, model: Any, data: str) -> None:
    args = arguments(per_device_train_batch_size=6, per_device_eval_batch_size=6, logging_steps=1)
    samples, losses, ends = Tokens(6, data), [], []
    for kind in (transformers.Trainer, HFTrainer):
        trainer: Any = kind(model().float(), args, train_dataset=samples)
        evaluated = trainer.evaluate(samples)["eval_loss"]
        trainer.train()
        losses.append([evaluated, next(row["loss"] for row in trainer.state.log_history if "loss" in row)])
        ends.append(weights(trainer.model))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # which a stock trainer rounds
    assert distance(*ends) <= 1e-6


@pytest.mark.parametrize("model", [llama, Tagger], ids=["causal", "plain module"])
def test_smoothed_step_is_the_same_in_every_split(arguments: Any, model: Any) -> None:
    """Also where labels are masked."""
    results, losses = [], []
    for batch, accumulation in ((8, 1), (2, 4)):
        args = arguments(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
        data: Any = Tokens(8) if model is llama else Sentences(8)
        trainer = HFTrainer(model(), args, data)
        losses.append(trainer.train()["train_metrics_history"][0]["train_loss"])
        results.append(weights(trainer.model))
    assert distance(results[0], weights(model())) > 1e-3
    assert distance(*results) <= 1e-12
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


@pytest.mark.parametrize("loss", ["masked", "custom", "causal"])
def test_smoothed_loss_shifts_as_the_loss_of_the_model(arguments: Any, loss: str) -> None:
    """A decoder that is trained to fill gaps has the class of a causal model, and the loss of another."""
    model, data, is_causal = llama(), Tokens(4), loss == "causal"
    if loss == "masked":
        model.loss_function = transformers.loss.loss_utils.ForMaskedLMLoss
    elif loss == "custom":
        model.loss_function = lambda logits, labels, **_: cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert HFTrainer(model, arguments(), data).settings.loss_fn.shift == is_causal
    args = arguments(label_smoothing_factor=0.0)
    HFTrainer(model, args, data, loss_fn=CrossEntropy(shift=is_causal))
    if is_causal:
        with pytest.raises(ConfigError, match=r"CrossEntropy\(shift=True\)"):
            HFTrainer(model, args, data, loss_fn=CrossEntropy())


def test_evaluated_loss_is_the_mean_over_labels(arguments: Any) -> None:
    model, data = llama(), Tokens(7)
    trainers = [HFTrainer(model, arguments(per_device_eval_batch_size=size), data) for size in (1, 2, 7)]
    losses = [trainer.evaluate(data)["eval_loss"] for trainer in trainers]
    with torch.no_grad():
        logits = model.eval()(input_ids=data.ids).logits[:, :-1]
    labels = data.labels[:, 1:]
    logs, labels = logits.log_softmax(-1)[labels != -100], labels[labels != -100]
    expected = -(0.8 * logs[range(len(labels)), labels] + 0.2 * logs.mean(-1)).mean()
    assert losses == pytest.approx([expected.item()] * 3, rel=1e-12)
    scores, labels = (8 * torch.randn(64, 1000)).bfloat16(), torch.randint(0, 1000, (64,))
    loss = SmoothedLoss(0.2)({"logits": scores}, labels)  # of half precision, summed in float32
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(SmoothedLoss(0.2)(scores.double(), labels).item(), rel=1e-5)


FACTOR = "label_smoothing_factor=0.2"
SMALL = {"vocab_size": 32, "d_model": 8}


def bart_decoder() -> Any:
    """A model whose class has its own loss, which does not shift labels."""
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return transformers.BartForCausalLM(transformers.BartConfig(**SMALL, **heads, encoder_layers=1, decoder_layers=1))


def xlnet() -> Any:
    return transformers.XLNetLMHeadModel(transformers.XLNetConfig(**SMALL, n_layer=1, n_head=2, d_inner=8))


@pytest.mark.parametrize(("model", "data", "fields", "options", "error", "message"), [
    (t16, rows(4), {}, {"loss_fn": lambda outputs, labels: 0}, ConfigError, f"{FACTOR}.*loss_fn"),
    (t16, rows(4), {}, {"compute_loss_func": lambda outputs, labels: 0}, ConfigError, f"{FACTOR}.*compute_loss_f"),
    (t16, rows(4), {}, {"unit": lambda batch: 0}, ConfigError, f"{FACTOR}.*`unit`"),
    (t16, rows(4), {"label_smoothing_factor": 1.5}, {}, ConfigError, "between 0 and 1, got 1.5"),
    (t16, rows(4), {}, {}, DataError, f"{FACTOR}.*float"),
    (llama, Tokens(4, "prompts"), {}, {}, DataError, f"{FACTOR}.*none"),
    (bart_decoder, Tokens(4), {}, {}, ConfigError, f"{FACTOR}.*BartForCausalLM.*shift=False"),
    (xlnet, Tokens(4), {}, {}, ConfigError, f"{FACTOR}.*XLNetLMHeadModel.*shift=False"),
], ids=["loss_fn", "compute_loss_func", "unit", "range", "float", "none", "bart", "xlnet"])  # fmt: skip
def test_smoothing_rejects_other_losses_and_labels(
    arguments: Any, model: Any, data: Any, fields: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        HFTrainer(model(), arguments(**fields), data, **options).train()


def test_smoothing_leaves_out_multi_label_problems(arguments: Any, caplog: pytest.LogCaptureFixture) -> None:
    data = [{"input_ids": row["input_ids"], "labels": torch.tensor([1.0, 0.0, 1.0]).double()} for row in Tokens(4)]
    results = []
    for factor in (0.0, 0.2):
        args = arguments(label_smoothing_factor=factor)
        trainer = HFTrainer(bert(problem_type="multi_label_classification"), args, data)
        assert ("label_smoothing_factor" in caplog.text) == bool(factor)
        results.append(trainer.evaluate(data))
    assert results[0] == results[1]


def test_resume_with_another_factor_is_rejected(arguments: Any) -> None:
    fields = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 2}
    HFTrainer(bert(), arguments(**fields), Tokens(6, "classes"), callbacks=[StopAt(1)]).train()
    trainer = HFTrainer(bert(), arguments(**fields, label_smoothing_factor=0.3), Tokens(6, "classes"))
    with pytest.raises(RuntimeError, match=r"loss_fn.*SmoothedLoss\(0.2\).*SmoothedLoss\(0.3\)"):
        trainer.train(resume_from="auto")
