"""Evaluation gives the numbers of one process: for any number of samples, any batches, any metric, on every rank."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, PROCESSES, Job, asked_for, bound, gap, launch_all, make_trainer
from marks import thinned
from recipes import Sentences, Tagger, Trace
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from omnitrain import Algorithm, CrossEntropy, EvalSet, chunked_cross_entropy
from omnitrain.distributed import ProcessRanks

SIZES = (1, 2, 3, 5, 8, 31)
BATCHES = (1, 3, 4)
SOURCES = ("map", "stream", "loader", "distributed loader")
KINDS = (
    "names",
    "binary",
    "one score",
    "regression",
    "eval_pred",
    "y_true, y_pred",
    "torchmetrics",
    "torchmetrics list states",
)
SCORED_BY = {"ddp": KINDS, "fsdp": ("names", "eval_pred"), "zero3": ("eval_pred",)}
"""Evaluation is the same code under all of them, so the others are not asked for everything."""

NAMING = ("ddp", "fsdp", "hf2", "zero3")
"""Where values that a model names are compared with those of one process."""

ALIKE = ("binary", "one score", "regression", "torchmetrics")
"""Kinds that take the way of another one."""

# --- what runs on every process


def numbers(size: int, kind: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(size, 4, generator=generator)
    if kind == "regression":
        return TensorDataset(x, torch.randn(size, 1, generator=generator))
    if kind == "one score":
        return TensorDataset(x, torch.randint(0, 2, (size, 1), generator=generator).float())
    return TensorDataset(x, torch.randint(0, 2 if kind == "binary" else 3, (size,), generator=generator))


def head(kind: str) -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(4, {"regression": 1, "one score": 1, "binary": 2}.get(kind, 3))


class Stream(IterableDataset[Any]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(len(self.data)))


def mean_of_classes(eval_pred: Any) -> dict[str, float]:
    return {"hits": float((eval_pred.predictions.argmax(-1) == eval_pred.label_ids).mean()), "n": len(eval_pred[1])}


def order_matters(y_true: Any, y_pred: Any) -> dict[str, float]:
    return {"weighted": float((np.arange(1, len(y_true) + 1) * (y_true == y_pred)).sum())}


def metric_of(kind: str) -> Any:
    if kind.startswith("torchmetrics"):
        import torchmetrics

        if "list" in kind:
            return torchmetrics.AUROC(task="multiclass", num_classes=3)
        return torchmetrics.MetricCollection(
            [
                torchmetrics.Accuracy(task="multiclass", num_classes=3),
                torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"),
            ]
        )
    return {
        "names": ["accuracy", "f1_macro", "log_loss", "cohen_kappa", "top2_accuracy"],
        "binary": ["roc_auc", "average_precision", "f1"],
        "one score": ["accuracy", "f1", "roc_auc", "log_loss", "brier", "specificity"],
        "regression": ["mse", "mae", "r2", "pearson", "max_error", "spearman", "median_absolute_error"],
        "eval_pred": mean_of_classes,
        "y_true, y_pred": order_matters,
    }[kind]


def source_of(name: str, data: TensorDataset, batch: int, backend: str) -> Any:
    if name == "map":
        return data
    if name == "stream":
        return Stream(data)
    if name == "distributed loader" and PROCESSES[backend] > 1:
        return DataLoader(data, batch, sampler=DistributedSampler(data, shuffle=False))
    return DataLoader(data, batch)


def score(backend: str, kind: str) -> dict[str, Any]:
    """Evaluate, test and predict every set from every source in every batch size."""
    losses = {"regression": F.mse_loss, "one score": F.binary_cross_entropy_with_logits}
    loss = losses.get(kind, F.cross_entropy)
    found: dict[str, Any] = {}
    for batch in (3,) if backend == "zero3" else BATCHES:
        trainer = make_trainer(
            backend, head(kind), numbers(4, kind),
            loss_fn=loss, compute_metrics=metric_of(kind), eval_batch_size=batch,
        )  # fmt: skip
        for size, source in itertools.product(SIZES, SOURCES):
            data = numbers(size, kind)
            given = source_of(source, data, batch, backend)
            case = f"{size} samples from a {source} by {batch}"
            found[f"{case}: evaluate"] = trainer.evaluate(given)
            if batch == 3:
                found[f"{case}: test"] = trainer.test(given)
                predictions, labels, metrics = trainer.predict(given)
                found[f"{case}: predict"] = [predictions.tolist(), labels.tolist(), metrics]
        found[f"named sets by {batch}"] = trainer.evaluate(
            {"one": numbers(1, kind), "many": numbers(7, kind), "own": DataLoader(numbers(5, kind), batch)}
        )
        found[f"sets with rules by {batch}"] = trainer.evaluate(
            {
                "subset": EvalSet(numbers(7, kind), subset=5, weight=2),
                "stream": EvalSet(Stream(numbers(7, kind)), subset=5),
                "loss": EvalSet(numbers(3, kind), metrics=None),
            }
        )
    return found


class Sorted(torch.utils.data.Dataset[Any]):
    """Sentences of 1 to 6 tokens, and none at all of the labels in some."""

    def __init__(self, size: int) -> None:
        self.rows = Sentences(size)
        self.rows.labels[1::3] = -100

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = 1 + index * 5 % 6
        return {key: value[:length] for key, value in self.rows[index].items()}


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad_sequence = torch.nn.utils.rnn.pad_sequence
    return {
        "ids": pad_sequence([one["ids"] for one in samples], batch_first=True),
        "labels": pad_sequence([one["labels"] for one in samples], batch_first=True, padding_value=-100),
    }


def predict_ragged(backend: str) -> dict[str, Any]:
    found = {}
    for batch, size in itertools.product((1, 2, 3), (1, 2, 7)):
        trainer = make_trainer(
            backend,
            Tagger(dtype=torch.float32),
            Sorted(4),
            data_collator=pad,
            eval_batch_size=batch,
            compute_metrics="accuracy",
        )
        predictions, labels, metrics = trainer.predict(Sorted(size))
        # as wide as the widest sentence, whatever the batches; what a model says of padding depends on them
        predictions[labels == -100] = 0.0
        found[f"{size} by {batch}"] = [predictions.tolist(), labels.tolist(), metrics]
    return found


class Meetings(Algorithm):
    """Counts what the processes come together for, step by step."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def transform_loss(self, trainer: Any, loss: Any) -> Any:
        self.seen.append("micro-batch")
        return loss


def log_every(backend: str, steps: int, masked: bool = True) -> dict[str, Any]:
    """Train with a log every so many steps, and write down all exchanges between processes."""
    noted, trace = Meetings(), Trace()
    trainer = make_trainer(
        backend, Tagger(dtype=torch.float64), Sentences(24), algorithms=[noted], callbacks=[trace], batch_size=2,
        global_batch_size=4, epochs=1, learning_rate=0.05, log_steps=steps,
    )  # fmt: skip
    begin = ProcessRanks._begin_exchange

    def watched(self: ProcessRanks, what: str, values: Any) -> Any:
        noted.seen.append(what)
        return begin(self, what, values)

    ProcessRanks._begin_exchange = watched  # type: ignore[method-assign]
    try:
        trainer.train()
    finally:
        ProcessRanks._begin_exchange = begin  # type: ignore[method-assign]
    return {"losses": [row["loss"] for row in trace.logs], "seen": noted.seen}


class Measured(Tagger):
    """Names two metrics, one of them only where a sentence begins so; one rank has one of its own."""

    def forward(self, ids: torch.Tensor) -> Any:  # type: ignore[override]
        logits = self.out(self.embed(ids))
        metrics = {"spread": logits.std(-1).mean(), "confident": (logits.softmax(-1) > 0.3).any(-1).float().mean()}
        if ids[0, 0] == 4:
            metrics["rare"] = torch.ones(())
        if os.environ.get("RANK") == "1" and self.training:
            metrics["second"] = logits.new_ones(()) * 2
        return {"logits": logits, "metrics": metrics}


class Chunked(Tagger):
    """Computes its loss in chunks of five tokens."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.embed(ids)
        return {"loss": chunked_cross_entropy(hidden, self.out.weight, labels, self.out.bias, chunk_size=5)}


def name_values(backend: str, dtype: str) -> dict[str, Any]:
    """Train with a loss of two parts and a model that names values, on fewer sentences than make whole steps."""
    trace = Trace()
    trainer = make_trainer(
        backend, Measured(dtype=DTYPES[dtype]), Sentences(21), Sentences(7), callbacks=[trace], batch_size=2,
        global_batch_size=8, epochs=2, learning_rate=0.05, log_steps=2, loss_fn=CrossEntropy(z_loss=0.1),
    )  # fmt: skip
    trainer.train()
    history = [*trainer.metrics["train_metrics_history"], *trainer.metrics["valid"]]
    told = trainer.state.log_history if backend.startswith("hf") else []
    rows = [*trace.logs, *(row for row in told if "loss" in row), *history]
    speeds = ("samples_per_second", "tokens_per_second")
    return {"rows": [{name: value for name, value in row.items() if name not in speeds} for row in rows]}


def in_chunks(backend: str, dtype: str) -> dict[str, Any]:
    """Train with a loss that is computed in chunks, inside of the model."""
    trace = Trace()
    trainer = make_trainer(
        backend, Chunked(dtype=DTYPES[dtype]), Sentences(21), Sentences(7), callbacks=[trace], batch_size=2,
        global_batch_size=8, epochs=2, learning_rate=0.05,
    )  # fmt: skip
    trainer.train()
    rows = [[row["loss"], row["grad_norm"]] for row in trace.logs]
    return {"rows": rows, "valid": [row["eval_loss"] for row in trainer.metrics["valid"]]}


# --- what came of it


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    pairs = sorted(asked_for(request, "backend", "kind"))
    pairs += [("native", kind) for kind in sorted({kind for _, kind in pairs})]
    jobs = [Job(f"{one}-{kind}", one, "test_same_metrics:score", {"kind": kind}) for one, kind in pairs]
    for backend in ("native", "ddp"):
        jobs.append(Job(f"{backend}-ragged", backend, "test_same_metrics:predict_ragged"))
    for backend in ("native", "ddp", "fsdp"):
        for steps in (1, 3):
            jobs.append(Job(f"{backend}-log-{steps}", backend, "test_same_metrics:log_every", {"steps": steps}))
    for backend in ("native", "hf", *NAMING):
        for dtype in ("float32",) if backend == "zero3" else ("float64", "float32")[: 2 if backend == "native" else 1]:
            named = f"{backend}-named-{dtype}"
            jobs.append(Job(named, backend, "test_same_metrics:name_values", {"dtype": dtype}))
            in_chunks = named.replace("named", "chunked")
            jobs.append(Job(in_chunks, backend, "test_same_metrics:in_chunks", {"dtype": dtype}))
    return launch_all(jobs, tmp_path_factory.mktemp("metrics"))


def apart(a: Any, b: Any) -> str:
    """Say how two results differ; empty if they do not."""
    try:
        found = gap(a, b)
    except AssertionError as error:
        return str(error)
    return "" if found <= 1e-6 else f"by {found}"


def assert_same(results: dict[str, list[dict[str, Any]]], backend: str, what: str) -> None:
    reference, ranks = results[f"native-{what}"][0], results[f"{backend}-{what}"]
    assert "error" not in reference, reference
    assert "error" not in ranks[0], ranks[0]
    assert gap(*ranks) == 0, "the ranks differ"
    assert ranks[0].keys() <= reference.keys()
    assert {case: found for case in ranks[0] if (found := apart(ranks[0][case], reference[case]))} == {}


@pytest.mark.parametrize(
    ("backend", "kind"),
    thinned(
        [(one, kind) for one, kinds in SCORED_BY.items() for kind in kinds],
        [("zero3", "eval_pred"), ("fsdp", "names"), *(("ddp", kind) for kind in KINDS if kind not in ALIKE)],
    ),
)
def test_metrics_and_predictions_are_those_of_one_process_on_every_rank(results: Any, backend: str, kind: str) -> None:
    assert_same(results, backend, kind)


def test_ragged_predictions_are_padded_alike_on_every_number_of_processes(results: Any) -> None:
    assert_same(results, "ddp", "ragged")


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_logged_loss_is_the_weighted_mean_over_all_processes(results: Any, backend: str, steps: int) -> None:
    ranks, reference = results[f"{backend}-log-{steps}"], results[f"native-log-{steps}"][0]
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert len(ranks[0]["losses"]) == 6 // steps
    np.testing.assert_allclose(ranks[0]["losses"], reference["losses"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_the_loss_is_exchanged_at_logs_only(results: Any, backend: str) -> None:
    often, seldom = (results[f"{backend}-log-{steps}"][0]["seen"] for steps in (1, 3))
    assert often.count("the loss for a log") == 6
    assert seldom.count("the loss for a log") == 2
    rest = [[one for one in seen if one != "the loss for a log"] for seen in (often, seldom)]
    assert rest[0] == rest[1]
    steps = "/".join(rest[1]).split("the beginning of a step/")[1]  # of the first one; the others' come with an end
    assert steps.startswith("micro-batch/the end of a step/" * 6)


@pytest.mark.parametrize("backend", NAMING)
def test_named_values_are_means_over_all_ranks_of_whatever_each_has_met(results: Any, backend: str) -> None:
    dtype = "float32" if backend == "zero3" else "float64"
    ranks = results[f"{backend}-named-{dtype}"]
    (reference,) = results[f"{'hf' if backend == 'hf2' else 'native'}-named-{dtype}"]
    assert "error" not in ranks[0], ranks[0]
    assert ranks[0] == ranks[1] and {row["second"] for row in ranks[0]["rows"] if "loss" in row} == {2.0}

    def compared(rows: Any) -> list[dict[str, float]]:
        names = ("loss_ce", "loss_z")
        prefixes = ("", "eval_", "train_")
        return [{one: row[one] for one in (p + name for p in prefixes for name in names) if one in row} for row in rows]

    expected, found = compared(reference["rows"]), compared(ranks[0]["rows"])
    assert [one.keys() for one in found] == [one.keys() for one in expected] and len(expected[0]) == 2
    assert gap(found, expected) <= bound(backend)
    assert {"spread", "confident", "rare"} <= set().union(*ranks[0]["rows"])
    assert all(row["rare"] == 1.0 for row in ranks[0]["rows"] if "rare" in row)


@pytest.mark.parametrize("backend", NAMING)
def test_a_loss_in_chunks_is_that_of_one_process(results: Any, backend: str) -> None:
    dtype = "float32" if backend == "zero3" else "float64"
    ranks = results[f"{backend}-chunked-{dtype}"]
    (reference,) = results[f"{'hf' if backend == 'hf2' else 'native'}-chunked-{dtype}"]
    assert "error" not in ranks[0], ranks[0]
    assert ranks[0] == ranks[1] and len(reference["rows"]) == 6
    assert gap(ranks[0], reference) <= bound(backend)


def test_without_named_values_nothing_more_is_exchanged_at_logs(results: Any) -> None:
    seen = results["ddp-log-1"][0]["seen"]
    assert "the metrics for a log" not in seen and "the metrics of an epoch" not in seen
