"""Habits that users of transformers bring along, on every trainer: tokenizers, columns, logits before metrics."""

import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from marks import TRAINERS
from recipes import StopAt, Tagger, distance, fit, rows, same, t16, trainer_on_cpu, weights
from safetensors.torch import load_file
from tiny import VOCABULARY, Tokens, bert, gpt
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from omnitrain import AccelerateTrainer, Algorithm, Callback, ConfigError, HFTrainer, Trainer, WeightedLosses
from omnitrain.core.errors import CheckpointError, DataError
from omnitrain.data.collation import Collator

datasets = pytest.importorskip("datasets")


def make(trainer_class: Any, model: nn.Module, data: Any, **options: Any) -> Any:
    return trainer_on_cpu(trainer_class, model, data, **{"max_steps": 2, **options})


def tokenizer(side: str = "left") -> PreTrainedTokenizerFast:
    """A tokenizer that pads with 1 on the left, as no collator of ours does unless it is told to."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w1", padding_side=side)


def sentences(size: int = 12) -> list[dict[str, Any]]:
    ids = Tokens(size).ids
    return [
        {"input_ids": ids[i, : 3 + i % 5].tolist(), "attention_mask": [1] * (3 + i % 5), "labels": i % 3}
        for i in range(size)
    ]


class Watching(nn.Module):
    """Records its input; takes only the arguments named here."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.inputs = bert(), []

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        self.inputs.append(input_ids)
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


# --- processing_class


def test_tokenizer_pads_unless_there_is_a_collator(trainer_class: Any) -> None:
    models, pads_left = [], []
    left, right = DataCollatorWithPadding(tokenizer()), DataCollatorWithPadding(tokenizer("right"))
    for options in ({}, {"data_collator": left, "processing_class": None}, {"data_collator": right}):
        model = Watching()
        trainer = fit(make(trainer_class, model, sentences(), **{"processing_class": tokenizer(), **options}))
        assert isinstance(trainer.data_collator, DataCollatorWithPadding)
        models.append(model)
        pads_left.append(any((batch[:, 0] == 1).any() for batch in model.inputs))
    assert same(weights(models[0]), weights(models[1])) and pads_left == [True, True, False]


@pytest.mark.parametrize(
    ("kind", "in_background"), [("native", False), ("native", True), ("accelerate", True), ("hf", False)]
)
def test_tokenizer_is_saved_with_models_and_checkpoints(kind: str, in_background: bool, tmp_path: Path) -> None:
    options = {"save_dir": tmp_path, "save_steps": 1, "save_total_limit": 1, "async_save": in_background}
    options |= {"processing_class": tokenizer(), "eval_dataset": sentences(6)}
    trainer = fit(make(TRAINERS[kind], bert(), sentences(), **options))
    assert trainer.save_model(tmp_path / "model") == tmp_path / "model"
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    for folder in (tmp_path / "best", tmp_path / "last", tmp_path / "model"):
        saved = AutoTokenizer.from_pretrained(folder.resolve())
        assert (saved.padding_side, saved.pad_token, saved("w3")["input_ids"]) == ("left", "w1", [3])
    assert trainer.load_checkpoint("last")


def test_processing_class_without_padding_is_only_saved(trainer_class: Any, tmp_path: Path) -> None:
    class Processor:
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "processor.txt").write_text("here")

    trainer = make(trainer_class, t16(), rows(8), loss_fn=F.mse_loss, processing_class=Processor())
    trainer.save_model(tmp_path)
    assert trainer.data_collator is None and (tmp_path / "processor.txt").read_text() == "here"
    for value in ("bert-base-uncased", PreTrainedTokenizerFast, 7):
        with pytest.raises(ConfigError, match="processing_class"):
            make(trainer_class, t16(), rows(8), processing_class=value)


def test_preprocessed_logits_reach_metrics_and_predictions(trainer_class: Any) -> None:
    labels_of_batches: list[Any] = []

    def classes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels_of_batches.append(labels)
        return logits.argmax(-1)

    def accuracy(prediction: Any) -> dict[str, float]:
        assert prediction.predictions.shape == (7,)
        return {"accuracy": float((prediction.predictions == prediction.label_ids).mean())}

    options: dict[str, Any] = {"processing_class": tokenizer(), "eval_dataset": sentences(7)}
    plain = make(trainer_class, bert(), sentences(), compute_metrics="accuracy", **options)
    options |= {"compute_metrics": accuracy, "preprocess_logits_for_metrics": classes}
    trainer = make(trainer_class, bert(), sentences(), **options)
    assert trainer.evaluate() == plain.evaluate()
    assert isinstance(labels_of_batches[0], torch.Tensor)
    expected = plain.predict(sentences(7)).predictions.argmax(-1)
    assert np.array_equal(trainer.predict(sentences(7)).predictions, expected)
    options = {"eval_dataset": Tokens(6), "compute_metrics": "accuracy"}  # of a causal model, which shifts them
    rows = [
        make(trainer_class, gpt(), Tokens(6), preprocess_logits_for_metrics=preprocess, **options).evaluate()
        for preprocess in (None, classes)
    ]
    assert rows[0] == rows[1]


def test_resume_rejects_other_preprocessing_of_logits(tmp_path: Path) -> None:
    def run(preprocess: Any, **how: Any) -> Any:
        options: dict[str, Any] = {"save_dir": tmp_path, "eval_dataset": rows(4), "epochs": 2, "max_steps": None}
        options |= {"callbacks": [] if how else [StopAt(1)], "preprocess_logits_for_metrics": preprocess}
        return make(Trainer, t16(), rows(8), loss_fn=F.mse_loss, **options).train(**how)

    run(lambda logits, labels: logits)
    with pytest.raises(CheckpointError, match="preprocess_logits_for_metrics"):
        run(lambda logits, labels: -logits, resume_from="auto")
    run(lambda logits, labels: -logits, resume_from="auto", allow_change=["preprocess_logits_for_metrics"])


# --- columns


def table(size: int = 12) -> Any:
    samples = enumerate(sentences(size))
    return datasets.Dataset.from_list([{**row, "text": f"line {number}", "number": number} for number, row in samples])


def test_columns_unknown_to_the_model_are_removed_and_logged(
    trainer_class: Any, caplog: pytest.LogCaptureFixture
) -> None:
    results = []
    with caplog.at_level(logging.INFO, "omnitrain"):
        for data in (table(), sentences()):
            model = bert()
            trainer = make(trainer_class, model, data, eval_dataset=data, processing_class=tokenizer())
            results.append((trainer.train()["best_valid"], weights(model)))
    assert results[0][0] == results[1][0] and same(results[0][1], results[1][1])
    (message,) = [text for text in caplog.messages if "are dropped" in text]
    assert message.endswith(": 'number', 'text'.")
    data = table().rename_column("labels", "topic")
    trainer = make(trainer_class, Watching(), data, processing_class=tokenizer(), label_names=["topic"])
    assert set(trainer.train_loader.dataset.column_names) == {"input_ids", "attention_mask", "topic"}


class Open(nn.Linear):
    """Takes any columns."""

    def forward(self, **columns: Any) -> Any:
        return {"loss": super().forward(columns["number"].float()[:, None]).mean()}


class Whole(nn.Linear):
    """In Composer's shape: it is handed the whole batch."""

    def forward(self, labels: Any) -> Any:
        return super().forward(labels["number"].float()[:, None])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.mean() + batch["weight"].mean() * 0


def test_columns_all_reach_open_models_units_and_transforms(trainer_class: Any) -> None:
    for kind in (Open, Whole):
        data = datasets.Dataset.from_dict({"number": range(8), "weight": [0.5] * 8, "labels": [0] * 8})
        make(trainer_class, kind(1, 1), data).train()
    columns: list[set[str]] = []

    def unit(batch: Any) -> torch.Tensor:
        columns.append(set(batch))
        return model(input_ids=batch["number"][:, None], labels=batch["labels"]).loss

    model, plain = bert(), table().remove_columns(["input_ids", "attention_mask"])
    make(trainer_class, model, plain, unit=unit).train()
    assert columns[0] == {"number", "text", "labels"}
    plain.set_transform(lambda rows: {"input_ids": [[number] for number in rows["number"]], "labels": rows["labels"]})
    make(trainer_class, bert(), plain).train()
    data = datasets.Dataset.from_dict({"ids": [[1, 2]] * 8, "labels": [[1, 2]] * 8})
    make(trainer_class, Tagger(), data).train()
    with pytest.raises(DataError, match="needs 'ids'"):
        make(trainer_class, Tagger(), data.rename_column("ids", "tokens")).train()


@pytest.mark.parametrize("trainer_class", [Trainer, AccelerateTrainer])  # HFTrainer removes them, as transformers does
def test_columns_all_reach_custom_code_that_sees_batches(trainer_class: Any) -> None:
    columns: list[set[str]] = []

    def collate(samples: list[Any]) -> Any:
        columns.append(set(samples[0]))
        return DataCollatorWithPadding(tokenizer())([{**sample, "text": 0} for sample in samples])

    class Look(Algorithm):
        def transform_batch(self, trainer: Any, batch: Any) -> Any:
            columns.append(set(batch))
            return batch

    class Own(trainer_class):
        def _prepare_batch(self, batch: Any) -> Any:
            columns.append(set(batch))
            return super()._prepare_batch(batch)

    numbers = table().remove_columns("text")
    for kind, data, options in (
        (trainer_class, table(), {"data_collator": collate}),
        (trainer_class, numbers, {"algorithms": [Look()], "processing_class": tokenizer()}),
        (Own, numbers, {"processing_class": tokenizer()}),
    ):
        columns.clear()
        make(kind, Watching(), data, max_steps=1, **options).train()
        assert "number" in columns[0]


# --- padding without a mask


def ragged() -> list[dict[str, Any]]:
    """Sequences of several lengths, without a mask."""
    return [{"input_ids": sentence["input_ids"], "labels": sentence["labels"]} for sentence in sentences()]


TOTAL = sum(len(sentence["input_ids"]) for sentence in ragged())


def test_padded_inputs_without_mask_get_one(trainer_class: Any) -> None:
    """Predictions and tokens do not depend on which samples are padded to the same length."""
    results, data = [], ragged()
    for size in (1, 4):
        trainer = make(trainer_class, bert(), data, eval_dataset=data, batch_size=size, epochs=1, max_steps=None)
        results.append(torch.as_tensor(trainer.predict(data).predictions))
        trainer.train()
        assert trainer.progress.tokens == TOTAL
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


class Unmasked(nn.Module):
    """Classifies the first token; takes no mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, 3)).double()

    def forward(self, input_ids: Any, labels: Any) -> Any:
        scores = self.body(input_ids[:, 0])
        return {"loss": F.cross_entropy(scores, labels), "logits": scores}


def test_mask_comes_with_any_collator_if_the_model_takes_it(trainer_class: Any) -> None:
    collator = Collator(pad_values={"input_ids": 5})
    trainer = make(trainer_class, Watching(), ragged(), data_collator=collator)
    assert "attention_mask" in next(iter(trainer.train_loader)) and "attention_mask" not in collator(ragged())
    assert trainer.data_collator is collator
    trainer = make(trainer_class, Unmasked(), ragged())
    assert set(next(iter(trainer.train_loader))) == {"input_ids", "labels"}
    trainer.train()


def test_tokens_of_padded_batches_leave_out_padding(trainer_class: Any) -> None:
    """Lengths and schedules in tokens do not depend on how a step is split."""
    results = []
    for size, accumulation, microbatch in ((4, 1, None), (1, 4, None), (4, 1, 1)):
        model = Unmasked()
        trainer = fit(make(
            trainer_class, model, ragged(), batch_size=size, gradient_accumulation_steps=accumulation,
            learning_rate=0.1, max_steps=None, max_duration=f"{2 * TOTAL}tok", lr_scheduler="linear",
            microbatch_size=microbatch,
        ))  # fmt: skip
        assert (trainer.progress.step, trainer.progress.tokens) == (6, 2 * TOTAL)
        results.append(weights(model))
    assert distance(results[0], results[1]) <= 1e-12 >= distance(results[0], results[2])


def sum_of_parts(outputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    gaps = outputs - labels
    return {"squared": gaps.square().sum(), "absolute": 0.5 * gaps.abs().sum()}


def test_loss_of_sums_is_a_mean_over_samples(trainer_class: Any) -> None:
    """Whatever the split of a step and of an evaluation, and so are the parts of the loss."""
    x, y = rows(24).tensors
    gaps = (t16()(x) - y).detach()
    parts = {"loss_squared": float(gaps.square().mean()), "loss_absolute": float(0.5 * gaps.abs().mean())}
    expected = {**parts, "loss": sum(parts.values())}
    for size, accumulation, eval_size in ((8, 1, 3), (3, 3, 24)):
        trainer = make(
            trainer_class, t16(), rows(24), eval_dataset=rows(24), loss_fn=sum_of_parts, grad_reduction="sum", epochs=1,
            batch_size=size, gradient_accumulation_steps=accumulation, eval_batch_size=eval_size, max_steps=None,
            learning_rate=0.0, optimizer="sgd", compute_metrics=None,
        )  # fmt: skip
        history = trainer.train()
        train, valid = history["train_metrics_history"][0], history["valid"][0]
        for name, value in expected.items():
            assert train[f"train_{name}"] == pytest.approx(value, rel=1e-12), (size, name)
            assert valid[f"eval_{name}"] == pytest.approx(value, rel=1e-12), (size, name)


# --- losses that are modules


class Centres(nn.Module):
    """Squared distance to a target, scaled by a learned temperature; counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self, learned: bool = True, counts: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=learned)
        self.register_buffer("calls", torch.zeros(()), persistent=counts)

    def forward(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.calls.add_(1)
        return self.scale * F.mse_loss(outputs, labels)

    def method(self, outputs: Any, labels: Any) -> torch.Tensor:
        return self(outputs, labels)


def test_loss_with_own_parameters_is_rejected(trainer_class: Any) -> None:
    nested = WeightedLosses({"a": Centres(), "b": nn.MSELoss()})
    losses = (Centres(), Centres().method, functools.partial(Centres(), num_items_in_batch=None), nested)
    options: list[dict[str, Any]] = [{"loss_fn": loss} for loss in losses]
    if trainer_class is HFTrainer:
        options.append({"compute_loss_func": Centres()})
    for option in options:
        with pytest.raises(ConfigError, match=r"`loss_fn` .* has parameters .*scale.* submodule.*requires_grad_"):
            make(trainer_class, t16(), rows(8), **option)
    with pytest.raises(ConfigError, match=r"`unit` \(Centres\) has parameters"):
        make(trainer_class, t16(), rows(8), unit=Centres())


def test_loss_that_is_part_of_the_model_is_trained_and_saved(trainer_class: Any, tmp_path: Path) -> None:
    """That is the remedy in the error; its buffer may change then."""
    model, loss = t16(), Centres(counts=True)
    model[-1].register_module("loss", loss)  # a linear layer does not call it
    trainer = fit(make(trainer_class, model, rows(8), loss_fn=loss, save_dir=tmp_path))
    assert loss.scale != 1 and loss.calls >= trainer.progress.step > 0
    saved = load_file(tmp_path / "last" / "model.safetensors")
    assert saved["3.loss.scale"] == loss.scale and "3.loss.calls" in saved


def test_loss_with_frozen_parameters_is_accepted(trainer_class: Any, tmp_path: Path) -> None:
    """Unless it changes its buffers."""

    def with_penalty(model: nn.Module, outputs: Any, labels: Any) -> torch.Tensor:
        return F.mse_loss(outputs, labels) + 1e-3 * sum(weight.square().sum() for weight in model.parameters())

    model, plain = t16(), t16()
    make(trainer_class, model, rows(8), loss_fn=Centres(learned=False)).train()
    make(trainer_class, plain, rows(8), loss_fn=F.mse_loss).train()
    assert same(weights(model), weights(plain))
    make(trainer_class, plain, rows(8), loss_fn=functools.partial(with_penalty, plain)).train()
    model, loss = t16(), Centres(learned=False, counts=True)
    with pytest.raises(ConfigError, match=r"`loss_fn` \(Centres\) changes its buffer 'calls'.*submodule"):
        make(trainer_class, model, rows(8), loss_fn=loss, save_dir=tmp_path / "run").train()
    assert same(weights(model), weights(t16())) and not list((tmp_path / "run").glob("checkpoint-*"))


class Rotated(nn.Module):
    """Multiplies its input by complex numbers, which are a parameter, a buffer, or a buffer that is not saved."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out, phases = nn.Linear(4, 1, dtype=torch.float64), torch.randn(4, dtype=dtype)
        if kind == "parameter":
            self.phases = nn.Parameter(phases)
        else:
            self.register_buffer("phases", phases, persistent=kind == "buffer")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((x * self.phases).abs().double())


@pytest.mark.parametrize("kind", ["parameter", "buffer", "temporary buffer"])
def test_complex_tensors_are_trained_and_resumed(trainer_class: Any, kind: str, tmp_path: Path) -> None:
    """But for complex128 where it would be saved."""

    def build(dtype: torch.dtype, folder: Path | None, **options: Any) -> Any:
        options |= {"loss_fn": F.mse_loss, "batch_size": 4, "max_steps": 4, "save_steps": 1 if folder else None}
        return make(trainer_class, Rotated(kind, dtype), rows(16), save_dir=folder, **options)

    dtype = torch.complex128 if kind == "temporary buffer" else torch.complex64
    if kind != "temporary buffer":
        with pytest.raises(ConfigError, match=r"'phases' has dtype torch\.complex128, .*torch\.view_as_real"):
            build(torch.complex128, tmp_path / "run")
        assert not (tmp_path / "run").exists()
        build(torch.complex128, None).train()  # nothing is saved
    straight, resumed = build(dtype, tmp_path / "straight"), build(dtype, tmp_path / "run")
    straight.train()
    build(dtype, tmp_path / "run", callbacks=[StopAt(2)]).train()
    resumed.train(resume_from="auto")
    assert resumed.progress.step == 4 and same(weights(straight.get_model()), weights(resumed.get_model()))


# --- threads


def in_thread(call: Callable[[], Any]) -> Any:
    """Return the error of a call in another thread, or None."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).exception()


CALLS: dict[str, Callable[[Any], Any]] = {
    "compile": lambda trainer: trainer.compile(),
    "evaluate": lambda trainer: trainer.evaluate(rows(8)),
    "predict": lambda trainer: trainer.predict(rows(8)),
    "test": lambda trainer: trainer.test(rows(8)),
    "train": lambda trainer: trainer.train(),
}


def test_calls_in_another_thread_than_train_are_rejected(trainer_class: Any) -> None:
    """They would share random numbers; in the run's thread they work, also on another trainer, and so after the run."""
    errors: dict[str, Any] = {}

    def new(*callbacks: Callback) -> Any:
        model = t16(dropout=0.5)
        return make(trainer_class, model, rows(8), loss_fn=nn.MSELoss(), max_steps=1, callbacks=callbacks)

    class Nested(Callback):
        def on_train_start(self, trainer: Any) -> None:
            for name, call in CALLS.items():
                errors[name] = in_thread(lambda call=call: call(other))
                assert other.progress.step == 0
                call(other)

    other, third = new(), new()
    new(Nested()).train()
    for name, error in errors.items():
        assert isinstance(error, ConfigError) and "'MainThread' of this program trains" in str(error)
        assert f"`{name}()` was called in" in str(error)
    assert other.progress.step == 1
    assert in_thread(third.train) is None and third.progress.step == 1


def test_train_beside_an_evaluation_is_rejected(trainer_class: Any) -> None:
    """Its end would restore the random numbers from before, in the middle of the run."""
    errors: list[Any] = []

    class Training(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            errors.append(in_thread(trainer.train))
            return super().__getitem__(index)

    trainer = make(trainer_class, t16(), rows(8), loss_fn=nn.MSELoss(), max_steps=1)
    trainer.evaluate(Training(rows(1)))
    assert "'MainThread' of this program is in `evaluate()`" in str(errors[0]) and isinstance(errors[0], ConfigError)


@pytest.mark.parametrize("kind", TRAINERS)
def test_repr_says_where_run_is(kind: str) -> None:
    trainer = trainer_on_cpu(TRAINERS[kind], t16(), rows(8), loss_fn=F.mse_loss, batch_size=4, epochs=1)
    name = type(trainer).__name__
    assert repr(trainer) == f"{name}(Sequential of 97 parameters on cpu, step 0 of 2)"
    trainer.train()
    assert repr(trainer) == f"{name}(Sequential of 97 parameters on cpu, step 2 of 2, ended by 'epochs')"
    assert repr(object.__new__(type(trainer))).startswith("<omnitrain.")
