"""Meters: means, sums and maxima of named values, and objects of torchmetrics."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recipes import StopAt, Trace, fit, rows, small_trainer, t16
from torchmetrics import AUROC, MeanMetric, MeanSquaredError, MetricCollection, MinMetric

from omnitrain import Max, StepOutput, Sum
from omnitrain.checkpoint import state_dicts
from omnitrain.core.errors import ConfigError, DataError
from omnitrain.distributed.ranks import Ranks
from omnitrain.trainer.meters import Meters, means_of

CPU, NAN = torch.device("cpu"), math.nan


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_nan_is_in_the_means_of_its_log_and_epoch_only(bad: float) -> None:
    meters = Meters(CPU)
    meters.add({"a": torch.tensor(bad), "b": 1.0}, 2)
    assert not math.isfinite(meters.means_since_last()["a"])
    meters.add({"a": 3.0}, 1)
    assert meters.means_since_last() == {"a": 3.0}
    assert not math.isfinite(meters.means()["a"]) and meters.means()["b"] == 1.0
    meters.begin_epoch()
    meters.add({"a": 5.0}, 1)
    assert meters.means() == meters.means_since_last() == {"a": 5.0}


def test_scalars_of_all_types_are_accepted() -> None:
    for value in (
        torch.tensor(2), torch.tensor([[2.0]]), torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(2.0).half(), 2,
        np.float32(2), np.int64(2), torch.tensor(2.0, requires_grad=True),
    ):  # fmt: skip
        meters = Meters(CPU)
        for _ in range(3):
            meters.add({"a": value}, 1.5)
        meters.add({"a": NAN, "loss": 1.0}, 0)  # without weight a batch adds nothing
        meters.add({"share": True}, 1)
        meters.add({"share": torch.tensor(False)}, 3)
        assert meters.means() == {"a": 2.0, "share": 0.25}


def test_values_and_names_that_are_no_metrics_are_an_error() -> None:
    for value, word in (
        (torch.ones(2), "shape \\(2,\\)"), (torch.ones(0), "shape \\(0,\\)"), (torch.tensor(1j), "complex64"),
        (None, "NoneType"), ("0.5", "str '0.5'"), ([1.0], "list"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=f"'a' must be a scalar.*got .*{word}.*mean"):
            Meters(CPU).add({"a": value}, 1)
    meters = Meters(CPU)
    for name in ("loss", "loss_scale", "step", "test_a", "eval_a", "learning_rate_1", "", 3, None):
        with pytest.raises(ConfigError, match=f"{name!r}.*Choose another name"):
            meters.add({name: 1.0}, 1)
    assert len(meters) == 0


def add_all(meters: Meters, batches: list[list[float]], scores: Any, **more: Any) -> None:
    for batch in batches:
        x = torch.tensor(batch)
        scores.update(x)
        kinds = {"sum": Sum(x.sum()), "total": Sum(len(x), running=True), "max": Max(x.max()), "min": Max(-x.min())}
        meters.add({**kinds, "object": scores, **more}, len(x))


def test_sums_maxima_and_objects_are_those_of_all_batches() -> None:
    """However they are split, since the latest log and since the epoch; a running total goes on."""
    for batches in ([[1.0, -5.0, 3.0]], [[1.0], [-5.0], [3.0]], [[1.0, -5.0], [3.0]]):
        meters, scores = Meters(CPU), MetricCollection([MeanMetric(), MinMetric()])
        add_all(meters, batches, scores)
        expected = {"sum": -1.0, "total": 3.0, "max": 3.0, "min": 5.0}
        objects = {"object_MeanMetric": -1 / 3, "object_MinMetric": -5.0}
        assert meters.means_since_last() == pytest.approx(expected | objects)
        add_all(meters, [[-2.0]], scores)
        assert meters.means_since_last() == {
            "sum": -2.0, "total": 4.0, "max": -2.0, "min": 2.0, "object_MeanMetric": -2.0, "object_MinMetric": -2.0
        }  # fmt: skip
        assert meters.means()["sum"] == -3.0 and meters.means()["max"] == 3.0
        meters.begin_epoch()
        assert meters.means() == {"total": 4.0}
        snapshot = meters.snapshot()
        add_all(meters, [[math.nan]], scores)
        meters.rollback(snapshot)
        scores.update(torch.tensor(9.0))
        meters.add({"object": scores, "sum": Sum(1), "max": Max(9)}, 0)  # without weight a batch adds nothing
        assert meters.means() == {"total": 4.0} and not scores["MeanMetric"].update_count


def test_kinds_of_metrics_cannot_change() -> None:
    meters = Meters(CPU)
    meters.add({"a": Sum(1.0)}, 1)
    for value, word in ((1.0, "a mean"), (Max(1.0), "a Max"), (Sum(1.0, running=True), "a Sum over the run")):
        with pytest.raises(DataError, match=f"'a' is {word} in this batch, and was a Sum before"):
            meters.add({"a": value}, 1)
    other = Meters(CPU)
    other.add({"a": 1.0}, 1)
    with pytest.raises(DataError, match="'a' is a Sum on one rank and a mean on another"):
        means_of([meters.sums(), other.sums()])
    with pytest.raises(DataError, match="'a' must be a scalar"):
        meters.add({"a": Sum(torch.ones(2))}, 1)
    curve = AUROC(task="binary")
    curve.update(torch.rand(3), torch.tensor([0, 1, 1]))
    with pytest.raises(ConfigError, match=r"'b', a BinaryAUROC, cannot be added up.*'preds'.*thresholds"):
        meters.add({"b": curve}, 1)
    meters, scores = Meters(CPU), MetricCollection([MeanMetric()])
    scores.update(1.0)
    meters.add({"c": scores, "c_MeanMetric": 1.0}, 1)
    with pytest.raises(DataError, match="Two metrics are called 'c_MeanMetric'"):
        meters.means()


class FakeRanks(Ranks):
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def combine(self, what: str, value: Any, function: Any) -> Any:
        return value


def test_state_of_every_kind_is_restored() -> None:
    """On any number of ranks, with the results of objects, which a resumed run lacks until a pass returns them."""
    states, metric = [], MeanMetric()
    for rank in range(2):
        meters = Meters(CPU)
        add_all(meters, [[7.0 - rank]], metric, mean=1.0 + rank)
        meters.means_since_last()
        add_all(meters, [[1.0 + rank, -4.0]], metric, mean=0.1 * rank, **{f"only {rank}": NAN})
        states.append(meters.state_dict())
    results = meters.object_results(states)["metric_results"]
    assert results == {"object": {"object": pytest.approx(8 / 6)}}
    states = state_dicts.from_json(json.loads(json.dumps(state_dicts.to_json(states, "metrics"))))
    for world_size in (1, 2, 3):
        parts = [Meters(CPU, FakeRanks(rank, world_size)) for rank in range(world_size)]
        for part in parts:
            part.add({"gone": 1.0}, 1)
            part.load_state_dict(copy.deepcopy(states), copy.deepcopy(results))
        means = means_of([part.sums() for part in parts])
        assert math.isnan(means.pop("only 0")) and math.isnan(means.pop("only 1"))
        expected = {"sum": 8.0, "total": 6.0, "max": 7.0, "min": 4.0, "mean": 3.2 / 6, "object": 8 / 6}
        assert means == pytest.approx(expected) and len(parts[-1]) == {1: 8, 2: 7, 3: 0}[world_size]
        add_all(parts[0], [[10.0]], metric)
        since_log = means_of([part.sums(0) for part in parts])
        expected = {"sum": 5.0, "total": 7.0, "max": 10.0, "min": 4.0, "mean": 0.05, "object": 1.0}
        assert {name: since_log[name] for name in expected} == pytest.approx(expected)
        assert means_of([part.sums() for part in parts])["object"] == pytest.approx(18 / 7)


class Counts:
    def __init__(self, model: Any) -> None:
        self.model, self.error = model, MeanSquaredError()

    def __call__(self, batch: Any) -> StepOutput:
        x, y = batch
        scores = self.model(x)
        self.error.update(scores.detach(), y)
        metrics = {"rows": Sum(len(x)), "all_rows": Sum(len(x), running=True), "top": Max(x[:, 0].max())}
        return StepOutput(F.mse_loss(scores, y), scores, y, metrics={**metrics, "mse": self.error})


@pytest.mark.parametrize("stop", [5, 6])
def test_counted_metrics_are_exact_and_resumed(trainer_class: Any, stop: int, tmp_path: Path) -> None:
    """In micro-batches, in evaluations, after a resume in mid-epoch or on an epoch's last step, with the loss."""

    def train(*callbacks: Any, resume_from: Any = None, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
        trace, model = Trace(), t16()
        options = {"eval_dataset": rows(7), "log_steps": 4, "learning_rate": 0.01, **options}
        options |= {"kind": trainer_class, "model": model, "unit": Counts(model), "callbacks": [trace, *callbacks]}
        return fit(small_trainer(data=rows(22), **options), resume_from=resume_from), trace.logs

    trainer, logs = train()
    history, evaluations = trainer.metrics["train_metrics_history"], trainer.metrics["valid"]
    assert [row["train_rows"] for row in history] == [22, 22] and [row["train_all_rows"] for row in history] == [22, 44]
    assert [row["rows"] for row in logs] == [16, 14, 14] and logs[-1]["all_rows"] == 44
    for prefix, table in (("", logs), ("train_", history), ("eval_", evaluations)):
        assert all(math.isclose(row[f"{prefix}mse"], row[f"{prefix}loss"], rel_tol=1e-6) for row in table)
    assert history[0]["train_top"] == max(x[0] for x, _ in rows(22))
    assert all(row["eval_rows"] == row["eval_all_rows"] == 7 for row in evaluations)
    split, _ = train(batch_size=2, gradient_accumulation_steps=2)
    for name in ("train_rows", "train_top", "train_all_rows"):
        assert [row[name] for row in split.metrics["train_metrics_history"]] == [row[name] for row in history]
    train(StopAt(stop), save_dir=tmp_path, load_best_at_end=False)
    resumed, logs_after = train(save_dir=tmp_path, load_best_at_end=False, resume_from="auto")
    assert resumed.metrics["train_metrics_history"] == history and resumed.metrics["valid"] == evaluations
    kinds = ("rows", "all_rows", "top", "mse")
    assert [[row[name] for name in kinds] for row in logs_after] == [[row[name] for name in kinds] for row in logs[1:]]
