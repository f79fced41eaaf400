"""Habits that users of transformers bring along, on every trainer: tokenizers, columns, logits before metrics."""

import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from marks import TRAINERS
from recipes import StopAt, Tagger, callback, distance, fit, rows, same, t16, trainer_on_cpu, weights
from safetensors.torch import load_file
from tiny import VOCABULARY, Tokens, bert, gpt
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding
from transformers import PreTrainedTokenizerFast as FastTokenizer

from omnitrain import AccelerateTrainer, Algorithm, Callback, ConfigError, HFTrainer, Trainer, WeightedLosses
from omnitrain.core.errors import CheckpointError, DataError
from omnitrain.data.collation import Collator

datasets = pytest.importorskip("datasets")


def make(trainer_class: Any, model: nn.Module, data: Any, **options: Any) -> Any:
    return trainer_on_cpu(trainer_class, model, data, **{"max_steps": 2, **options})


def tokenizer(side: str = "left") -> FastTokenizer:
    """A tokenizer that pads with 1 on the left, as no collator of ours does unless it is told to."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    return FastTokenizer(tokenizer_object=inner, pad_token="w1", padding_side=side)


def sentences(size: int = 12) -> list[dict[str, Any]]:
    ids = Tokens(size).ids
    return [
        {"input_ids": ids[i, : 3 + i % 5].tolist(), "attention_mask": [1] * (3 + i % 5), "labels": i % 3}
        for i in range(size)
    ]


class Watching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.inputs = bert(), []

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        self.inputs.append(input_ids)
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def test_tokenizer_pads_unless_there_is_a_collator(trainer_class: Any) -> None:
    ends, pads_left = [], []
    left, right = DataCollatorWithPadding(tokenizer()), DataCollatorWithPadding(tokenizer("right"))
    for options in ({}, {"data_collator": left, "processing_class": None}, {"data_collator": right}):
        model = Watching()
        fit(make(trainer_class, model, sentences(), **{"processing_class": tokenizer(), **options}))
        ends.append(weights(model))
        pads_left.append(any((batch[:, 0] == 1).any() for batch in model.inputs))
    assert same(*ends[:2]) and pads_left == [True, True, False]


@pytest.mark.parametrize(
    ("kind", "in_background"), [("native", False), ("native", True), ("accelerate", True), ("hf", False)]
)
def test_tokenizer_is_saved_with_models_and_checkpoints(kind: str, in_background: bool, tmp_path: Path) -> None:
    options = {"save_dir": tmp_path, "save_steps": 1, "save_total_limit": 1, "async_save": in_background}
    options |= {"processing_class": tokenizer(), "eval_dataset": sentences(6)}
    trainer = fit(make(TRAINERS[kind], bert(), sentences(), **options))
    assert trainer.save_model(tmp_path / "model") == tmp_path / "model"
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    if kind == "native":
        with pytest.raises(ConfigError, match="overwrite=True"):
            trainer.save_model(tmp_path / "model")
    for folder in (tmp_path / "best", tmp_path / "last", tmp_path / "model"):
        saved = AutoTokenizer.from_pretrained(folder.resolve())
        assert (saved.padding_side, saved.pad_token, saved("w3")["input_ids"]) == ("left", "w1", [3])
    assert trainer.load_checkpoint("last")


def test_processing_class_without_padding_is_only_saved(trainer_class: Any, tmp_path: Path) -> None:
    processor = SimpleNamespace(save_pretrained=lambda folder: (Path(folder) / "processor.txt").write_text("here"))
    trainer = make(trainer_class, t16(), rows(8), loss_fn=F.mse_loss, processing_class=processor)
    trainer.save_model(tmp_path)
    assert trainer.data_collator is None and (tmp_path / "processor.txt").read_text() == "here"
    for value in ("bert-base-uncased", FastTokenizer, 7):
        with pytest.raises(ConfigError, match="processing_class"):
            make(trainer_class, t16(), rows(8), processing_class=value)


def classes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    assert isinstance(labels, torch.Tensor)
    return logits.argmax(-1)


def test_preprocessed_logits_reach_metrics_and_predictions(trainer_class: Any) -> None:
    def accuracy(prediction: Any) -> dict[str, float]:
        assert prediction.predictions.shape == (7,)
        return {"accuracy": float((prediction.predictions == prediction.label_ids).mean())}

    options: dict[str, Any] = {"processing_class": tokenizer(), "eval_dataset": sentences(7)}
    plain = make(trainer_class, bert(), sentences(), compute_metrics="accuracy", **options)
    options |= {"compute_metrics": accuracy, "preprocess_logits_for_metrics": classes}
    trainer = make(trainer_class, bert(), sentences(), **options)
    assert trainer.evaluate() == plain.evaluate()
    expected = plain.predict(sentences(7)).predictions.argmax(-1)
    assert np.array_equal(trainer.predict(sentences(7)).predictions, expected)
    options = {"eval_dataset": Tokens(6), "compute_metrics": "accuracy"}  # of a causal model, which shifts them
    causal = make(trainer_class, gpt(), Tokens(6), preprocess_logits_for_metrics=classes, **options)
    assert causal.evaluate() == make(trainer_class, gpt(), Tokens(6), **options).evaluate()


def test_resume_rejects_other_preprocessing_of_logits(tmp_path: Path) -> None:
    def run(preprocess: Any, *callbacks: Callback, **how: Any) -> Any:
        options: dict[str, Any] = {"save_dir": tmp_path, "eval_dataset": rows(4), "epochs": 2, "max_steps": None}
        options |= {"callbacks": callbacks, "preprocess_logits_for_metrics": preprocess, "loss_fn": F.mse_loss}
        return make(Trainer, t16(), rows(8), **options).train(**how)

    run(lambda logits, labels: logits, StopAt(1))
    with pytest.raises(CheckpointError, match="preprocess_logits_for_metrics"):
        run(lambda logits, labels: -logits, resume_from="auto")
    run(lambda logits, labels: -logits, resume_from="auto", allow_change=["preprocess_logits_for_metrics"])


def table(size: int = 12) -> Any:
    samples = enumerate(sentences(size))
    return datasets.Dataset.from_list([{**row, "text": f"line {number}", "number": number} for number, row in samples])


def test_columns_unknown_to_the_model_are_removed_and_logged(trainer_class: Any, caplog: Any) -> None:
    results = []
    caplog.set_level(logging.INFO, "omnitrain")
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

    def unit(batch: Any) -> torch.Tensor:
        assert set(batch) == {"number", "text", "labels"}
        return model(input_ids=batch["number"][:, None], labels=batch["labels"]).loss

    model, plain = bert(), table().remove_columns(["input_ids", "attention_mask"])
    make(trainer_class, model, plain, unit=unit).train()
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

    def note(self: Any, *details: Any) -> Any:
        columns.append(set(details[-1]))
        return details[-1]

    look: Any = type("Look", (Algorithm,), {"transform_batch": note})()
    for methods, data, options in (
        ({}, table(), {"data_collator": collate}),
        ({}, table().remove_columns("text"), {"algorithms": [look], "processing_class": tokenizer()}),
        ({"_prepare_batch": note}, table().remove_columns("text"), {"processing_class": tokenizer()}),
    ):
        columns.clear()
        make(type("Own", (trainer_class,), methods), Watching(), data, max_steps=1, **options).train()
        assert "number" in columns[0]


def ragged() -> list[dict[str, Any]]:
    return [{"input_ids": sentence["input_ids"], "labels": sentence["labels"]} for sentence in sentences()]


TOTAL = sum(len(sentence["input_ids"]) for sentence in ragged())


def test_padded_inputs_without_mask_get_one(trainer_class: Any) -> None:
    results, data = [], ragged()
    for size in (1, 4):
        trainer = make(trainer_class, bert(), data, eval_dataset=data, batch_size=size, epochs=1, max_steps=None)
        results.append(torch.as_tensor(trainer.predict(data).predictions))
        assert fit(trainer).progress.tokens == TOTAL
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


class Unmasked(nn.Module):
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
    ends = []
    options = {"learning_rate": 0.1, "max_steps": None, "max_duration": f"{2 * TOTAL}tok", "lr_scheduler": "linear"}
    for size, accumulation, microbatch in ((4, 1, None), (1, 4, None), (4, 1, 1)):
        split = {"batch_size": size, "gradient_accumulation_steps": accumulation, "microbatch_size": microbatch}
        trainer = fit(make(trainer_class, Unmasked(), ragged(), **split, **options))
        assert (trainer.progress.step, trainer.progress.tokens) == (6, 2 * TOTAL)
        ends.append(weights(trainer.model))
    assert distance(ends[0], ends[1]) <= 1e-12 >= distance(ends[0], ends[2])


def test_loss_of_sums_is_a_mean_over_samples(trainer_class: Any) -> None:
    """Whatever the split of a step and of an evaluation, and so are the parts of the loss."""

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"squared": (outputs - labels).square().sum(), "absolute": 0.5 * (outputs - labels).abs().sum()}

    x, y = rows(24).tensors
    parts = {f"loss_{name}": float(value) / 24 for name, value in loss(t16()(x), y).items()}
    options = {"grad_reduction": "sum", "epochs": 1, "max_steps": None, "learning_rate": 0.0, "optimizer": "sgd"}
    for size, accumulation, eval_size in ((8, 1, 3), (3, 3, 24)):
        split = {"batch_size": size, "gradient_accumulation_steps": accumulation, "eval_batch_size": eval_size}
        history = make(trainer_class, t16(), rows(24), eval_dataset=rows(24), loss_fn=loss, **split, **options).train()
        for row, prefix in ((history["train_metrics_history"][0], "train"), (history["valid"][0], "eval")):
            means = {name: row[f"{prefix}_{name}"] for name in ("loss", *parts)}
            assert means == pytest.approx({**parts, "loss": sum(parts.values())}, rel=1e-12)


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
    options += [{"compute_loss_func": Centres()}] if trainer_class is HFTrainer else []
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
    def build(dtype: torch.dtype, folder: Path | None, *callbacks: Callback) -> Any:
        options = {"loss_fn": F.mse_loss, "batch_size": 4, "max_steps": 4, "save_steps": 1 if folder else None}
        return make(trainer_class, Rotated(kind, dtype), rows(16), save_dir=folder, callbacks=callbacks, **options)

    dtype = torch.complex128 if kind == "temporary buffer" else torch.complex64
    if kind != "temporary buffer":
        with pytest.raises(ConfigError, match=r"'phases' has dtype torch\.complex128, .*torch\.view_as_real"):
            build(torch.complex128, tmp_path / "run")
        assert not (tmp_path / "run").exists()
        build(torch.complex128, None).train()  # nothing is saved
    straight = fit(build(dtype, tmp_path / "straight"))
    build(dtype, tmp_path / "run", StopAt(2)).train()
    resumed = fit(build(dtype, tmp_path / "run"), resume_from="auto")
    assert resumed.progress.step == 4 and same(weights(straight.get_model()), weights(resumed.get_model()))


def in_thread(call: Callable[..., Any], *args: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).exception()


CALLS: dict[str, Any] = {"compile": (), "evaluate": (rows(8),), "predict": (rows(8),), "test": (rows(8),), "train": ()}


def test_calls_in_another_thread_than_train_are_rejected(trainer_class: Any) -> None:
    """They would share random numbers; in the run's thread they work, also on another trainer, and so after the run."""

    def nested(trainer: Any) -> None:
        for name, args in CALLS.items():
            error = in_thread(getattr(other, name), *args)
            assert isinstance(error, ConfigError) and "'MainThread' of this program trains" in str(error)
            assert f"`{name}()` was called in" in str(error) and other.progress.step == 0
            getattr(other, name)(*args)

    options = {"loss_fn": nn.MSELoss(), "max_steps": 1}
    other, third = (make(trainer_class, t16(dropout=0.5), rows(8), **options) for _ in range(2))
    make(trainer_class, t16(), rows(8), callbacks=[callback(on_train_start=nested)], **options).train()
    assert other.progress.step == 1
    assert in_thread(third.train) is None and third.progress.step == 1


def test_train_beside_an_evaluation_is_rejected(trainer_class: Any) -> None:
    """Its end would restore the random numbers from before, in the middle of the run."""
    errors: list[Any] = []

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        errors.append(in_thread(trainer.train))
        return F.mse_loss(*tensors)

    trainer = make(trainer_class, t16(), rows(8), loss_fn=loss)
    trainer.evaluate(rows(1))
    assert "'MainThread' of this program is in `evaluate()`" in str(errors[0]) and isinstance(errors[0], ConfigError)


def test_repr_says_where_run_is(trainer_class: Any) -> None:
    trainer, name = make(trainer_class, t16(), rows(8), loss_fn=F.mse_loss), trainer_class.__name__
    assert repr(trainer) == f"{name}(Sequential of 97 parameters on cpu, step 0 of 2)"
    trainer.train()
    assert repr(trainer) == f"{name}(Sequential of 97 parameters on cpu, step 2 of 2, ended by 'max_steps')"
    assert repr(object.__new__(trainer_class)).startswith("<omnitrain.")
