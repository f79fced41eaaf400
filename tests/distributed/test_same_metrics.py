"""Evaluation matches one process: for any number of samples, any batches, any metric, on every rank; errors too."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, PROCESSES, Jobs, asked_for, bound, dtype_of, gap, launch_all, make_trainer, sound
from counting import Streamed
from marks import thinned
from recipes import Blank, Sentences, Tagger, Trace, fit, rows, t16
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from omnitrain import CrossEntropy, EvalSet, Max, Sum, chunked_cross_entropy
from omnitrain.core.errors import NonFiniteError

SIZES = {"few": (1, 5), "all": (1, 2, 3, 5, 8, 31)}
SOURCES = ("map", "stream", "loader", "distributed loader")
CASES = [
    ("ddp", "y_true, y_pred", 3, "few"), ("ddp", "torchmetrics list states", 3, "few"), ("fsdp", "names", 3, "few"),
    ("ddp", "names", 1, "all"), ("ddp", "binary", 3, "all"), ("ddp", "one score", 4, "all"),
    ("ddp", "regression", 1, "all"), ("ddp", "torchmetrics", 1, "all"), ("zero3", "eval_pred", 3, "all"),
]  # fmt: skip
"""Backend, metrics, batch size and sizes of sets; evaluation is the same code under all backends."""
VALUES = [("ddp", "named"), ("hf2", "named"), ("fsdp", "chunked"), ("fsdp", "named"), ("zero3", "chunked")]
"""Where values that a model names, or computes in chunks, are compared with those of one process."""
FAILING = [("ddp", "crash"), ("hf2", "nan"), ("fsdp", "crash"), ("ddp", "nan")]
COUNTED = {"words", "all_words", "largest", "mean_token", "token"}
"""Metrics of `Measured` that are counted, and so the same to the bit; without their prefix."""
MESSAGES = {
    "crash": "no such thing",
    "nan": "The loss of the evaluation set is nan at step 2. It comes from these samples of it: 13.",
}


def numbers(size: int, kind: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(size, 4, generator=generator)
    if kind == "regression":
        return TensorDataset(x, torch.randn(size, 1, generator=generator))
    labels = torch.randint(0, 2 if kind in ("binary", "one score") else 3, (size,), generator=generator)
    return TensorDataset(x, labels[:, None].float() if kind == "one score" else labels)


def mean_of_classes(eval_pred: Any) -> dict[str, float]:
    return {"hits": float((eval_pred.predictions.argmax(-1) == eval_pred.label_ids).mean()), "n": len(eval_pred[1])}


def order_matters(y_true: Any, y_pred: Any) -> dict[str, float]:
    return {"weighted": float((np.arange(1, len(y_true) + 1) * (y_true == y_pred)).sum())}


METRICS: dict[str, Any] = {
    "names": ["accuracy", "f1_macro", "log_loss", "cohen_kappa", "top2_accuracy"],
    "binary": ["roc_auc", "average_precision", "f1"],
    "one score": ["accuracy", "f1", "roc_auc", "log_loss", "brier", "specificity"],
    "regression": ["mse", "mae", "r2", "pearson", "max_error", "spearman", "median_absolute_error"],
    "eval_pred": mean_of_classes, "y_true, y_pred": order_matters, "torchmetrics list states": MulticlassAUROC(3),
    "torchmetrics": MetricCollection([MulticlassAccuracy(3, average="micro"), MulticlassF1Score(3)]),
}  # fmt: skip


def source_of(name: str, data: TensorDataset, batch: int, backend: str) -> Any:
    if name in ("map", "stream"):
        return data if name == "map" else Streamed(data)
    is_split = name == "distributed loader" and PROCESSES[backend] > 1
    return DataLoader(data, batch, sampler=DistributedSampler(data, shuffle=False) if is_split else None)


def score(backend: str, kind: str, batch: int, sizes: str) -> dict[str, Any]:
    """Evaluate every set from every source; of batches of 3, also test and predict."""
    losses = {"regression": F.mse_loss, "one score": F.binary_cross_entropy_with_logits}
    torch.manual_seed(5)
    head = nn.Linear(4, {"regression": 1, "one score": 1, "binary": 2}.get(kind, 3))
    trainer = make_trainer(
        backend, head, numbers(4, kind), loss_fn=losses.get(kind, F.cross_entropy), compute_metrics=METRICS[kind],
        eval_batch_size=batch,
    )  # fmt: skip
    scores: dict[str, Any] = {}
    for size, source in itertools.product(SIZES[sizes], SOURCES):
        data, name = source_of(source, numbers(size, kind), batch, backend), f"{size} samples from a {source}"
        scores[f"{name}: evaluate"] = trainer.evaluate(data)
        if batch == 3:
            if size == 1:
                scores[f"{name}: test"] = trainer.test(data)
            predictions, labels, metrics = trainer.predict(data)
            scores[f"{name}: predict"] = [predictions.tolist(), labels.tolist(), metrics]
    sets = {"one": numbers(1, kind), "many": numbers(7, kind), "loader": DataLoader(numbers(5, kind), batch)}
    scores["named sets"] = trainer.evaluate(sets)
    scores["subsets"] = trainer.evaluate({
        "subset": EvalSet(numbers(7, kind), subset=5, weight=2), "loss": EvalSet(numbers(3, kind), metrics=None),
        "stream": EvalSet(Streamed(numbers(7, kind)), subset=5),
    })  # fmt: skip
    return scores


def of_any_length(size: int) -> list[dict[str, torch.Tensor]]:
    """Return sentences of 1 to 6 tokens, some of which have no label at all."""
    sentences = Blank(size, range(1, size, 3))
    return [{key: value[: 1 + i * 5 % 6] for key, value in sentences[i].items()} for i in range(size)]


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    columns = {name: [sample[name] for sample in samples] for name in ("ids", "labels")}
    return {
        name: nn.utils.rnn.pad_sequence(column, True, -100 * (name == "labels")) for name, column in columns.items()
    }


def predict_ragged(backend: str) -> dict[str, Any]:
    results = {}
    for batch, size in ((1, 2), (2, 7), (3, 1)):
        trainer = make_trainer(
            backend, Tagger(dtype=torch.float32), of_any_length(4), data_collator=pad, eval_batch_size=batch,
            compute_metrics="accuracy",
        )  # fmt: skip
        predictions, labels, metrics = trainer.predict(of_any_length(size))
        # as wide as the widest sentence, whatever the batches; what a model says of padding depends on them
        predictions[labels == -100] = 0.0
        results[f"{size} by {batch}"] = [predictions.tolist(), labels.tolist(), metrics]
    return results


class Measured(Tagger):
    """Names metrics of every kind, one of them only where a sentence begins so; one rank has one of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mean_token = MeanMetric()

    def forward(self, ids: torch.Tensor) -> Any:  # type: ignore[override]
        logits = self.out(self.embed(ids))
        self.mean_token.update(ids.double())
        metrics = {
            "spread": logits.std(-1).mean(), "confident": (logits.softmax(-1) > 0.3).any(-1).float().mean(),
            "words": Sum((ids > 3).sum()), "all_words": Sum(ids.numel(), running=True), "largest": Max(ids.max()),
            "mean_token": self.mean_token,
        }  # fmt: skip
        if ids[0, 0] == 4:
            metrics["rare"] = torch.ones(())
        if os.environ.get("RANK") == "1" and self.training:
            metrics["second"] = logits.new_ones(()) * 2
        return {"logits": logits, "metrics": metrics}


class Chunked(Tagger):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.embed(ids)
        return {"loss": chunked_cross_entropy(hidden, self.out.weight, labels, self.out.bias, chunk_size=5)}


def train_values(backend: str, kind: str, dtype: str) -> dict[str, Any]:
    """Train a model that names values under a loss of two parts, or computes its loss in chunks, in uneven steps."""
    trace, options = Trace(), {"loss_fn": CrossEntropy(z_loss=0.1)} if kind == "named" else {}
    model: Tagger = (Measured if kind == "named" else Chunked)(dtype=DTYPES[dtype])
    trainer = fit(make_trainer(
        backend, model, Sentences(21), Sentences(7), callbacks=[trace], batch_size=2, global_batch_size=8, epochs=2,
        learning_rate=0.05, log_steps=2 if kind == "named" else 1, **options,
    ))  # fmt: skip
    entries = [row for row in trainer.state.log_history if "loss" in row] if backend.startswith("hf") else []
    rows = [*trace.logs, *entries, *trainer.metrics["train_metrics_history"], *trainer.metrics["valid"]]
    return {"rows": [{name: value for name, value in row.items() if "per_second" not in name} for row in rows]}


def single(backend: str) -> str:
    """Return the backend of one process that is the reference of another."""
    return "hf" if backend == "hf2" else "native"


def crash(y_true: Any, y_pred: Any) -> dict[str, float]:
    raise KeyError("no such thing")


def fail(backend: str, kind: str) -> dict[str, Any]:
    """Train with an evaluation that cannot work, and return what was raised after how many steps."""
    x, y = rows(20).tensors
    if kind == "nan":
        y[13] = float("nan")
    trainer = make_trainer(
        backend, t16(), rows(8), TensorDataset(x, y), loss_fn=F.mse_loss, batch_size=2,
        compute_metrics=crash if kind == "crash" else None, eval_batch_size=2, learning_rate=0.01, epochs=1,
    )  # fmt: skip
    with pytest.raises((KeyError, NonFiniteError), match=MESSAGES[kind]):
        trainer.train()
    return {"steps": trainer.progress.step}


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    cases, jobs = asked_for(request, "backend", "kind", "batch", "sizes"), Jobs()
    for backend, kind, batch, sizes in sorted(cases | {("native", *case) for _, *case in cases}):
        jobs.add(f"{backend}-{kind}-{batch}-{sizes}", backend, score, kind=kind, batch=batch, sizes=sizes)
    for backend in ("native", "ddp"):
        jobs.add(f"{backend}-ragged", backend, predict_ragged)
    values = asked_for(request, "backend", "kind", test="test_values")
    runs = {(name, kind, dtype_of(backend)) for backend, kind in values for name in (backend, single(backend))}
    for backend, kind, dtype in sorted(runs):
        jobs.add(f"{backend}-{kind}-{dtype}", backend, train_values, kind=kind, dtype=dtype)
    for backend, kind in sorted(asked_for(request, "backend", "kind", test="test_evaluation_error")):
        jobs.add(f"{backend}-{kind}", backend, fail, kind=kind)
    return sound(launch_all(jobs, folder))


def assert_native(results: dict[str, list[dict[str, Any]]], backend: str, name: str) -> None:
    reference, ranks = results[f"native-{name}"][0], results[f"{backend}-{name}"]
    assert gap(*ranks) == 0, "the ranks differ"
    assert ranks[0].keys() == reference.keys()
    for case in reference:
        assert gap(ranks[0][case], reference[case]) <= 1e-6, case


@pytest.mark.parametrize(("backend", "kind", "batch", "sizes"), thinned(CASES, CASES[:3]))
def test_scores_and_predictions_match_one_process(
    results: Any, backend: str, kind: str, batch: int, sizes: str
) -> None:
    assert_native(results, backend, f"{kind}-{batch}-{sizes}")


def test_ragged_predictions_are_padded_as_on_one_process(results: Any) -> None:
    assert_native(results, "ddp", "ragged")


@pytest.mark.parametrize(("backend", "kind"), thinned(VALUES, VALUES[:3]))
def test_values_of_a_model_match_one_process(results: Any, backend: str, kind: str) -> None:
    """Those that it names are means of the batches that have them, wherever they are."""
    (first, second), (reference,) = (
        [rank["rows"] for rank in results[f"{name}-{kind}-{dtype_of(backend)}"]] for name in (backend, single(backend))
    )
    assert first == second
    names = {prefix + name for prefix in ("", "eval_", "train_") for name in ("loss", "loss_ce", "loss_z")}
    compared, expected = (
        [{name: row[name] for name in row if name in names | {"grad_norm"}} for row in rows]
        for rows in (first, reference)
    )
    assert len(expected[0]) == (4 if kind == "named" else 2) and gap(compared, expected) <= bound(backend)
    if kind == "named":
        assert {row["second"] for row in first if "loss" in row} == {2.0}
        assert {"spread", "confident", "rare"} <= set().union(*first)
        counted, expected = (
            [{name: row[name] for name in row if name.split("_", 1)[-1] in COUNTED} for row in rows]
            for rows in (first, reference)
        )
        assert counted == expected and max(row.get("all_words", 0) for row in first) == 2 * 21 * 6
        assert {row["rare"] for row in first if "rare" in row} == {1.0}


@pytest.mark.parametrize(("backend", "kind"), thinned(FAILING, FAILING[:2]))
def test_evaluation_error_is_raised_on_all_ranks(results: Any, backend: str, kind: str) -> None:
    steps = 0 if kind == "crash" else 2  # sample 13 is in no first batch
    assert results[f"{backend}-{kind}"] == [{"steps": steps}] * 2
