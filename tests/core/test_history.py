"""The history of a run: both spellings, plain values, JSON, the table, the plot; and exact means."""

import copy
import json
import math
import pickle
import sys
import types
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnitrain.core.errors import ConfigError, MissingExtraError
from omnitrain.core.history import MetricRow, MetricsDict


def history(epochs: int = 3) -> MetricsDict:
    """Return a run of `epochs` epochs of 10 steps, evaluated in the middle and at the end of each."""
    metrics = MetricsDict()
    for epoch in range(1, epochs + 1):
        metrics.add_valid({"epoch": epoch - 0.5, "step": 10 * epoch - 5, "eval_loss": 1.0}, best=False)
        row = {"epoch": epoch, "step": 10 * epoch}
        metrics.add_train({**row, "train_loss": 1 / epoch, "learning_rate": 2e-5, "grad_norm": 3.0})
        metrics.add_valid({**row, "eval_loss": 0.5, "eval_accuracy": 0.25 * epoch}, best=epoch < 3)
    return metrics


def test_metrics_lookup_with_and_without_prefix() -> None:
    for stored in ("eval_accuracy", "test_accuracy", "train_accuracy", "accuracy"):
        row = MetricRow({stored: 0.5})
        assert row["accuracy"] == row.get("accuracy") == 0.5 and "accuracy" in row
    row, number = MetricRow(accuracy=0.5, test_f1=0.25, eval_loss=1.0, loss=2.0, train_loss=3.0), cast(Any, 3)
    assert row["eval_accuracy"] == row.get("eval_accuracy") == 0.5 and "eval_accuracy" in row
    assert "eval_f1" not in row and row.get("eval_f1", -1) == -1 and number not in row
    assert (row["loss"], row["eval_loss"], row["train_loss"]) == (2.0, 1.0, 3.0)


def test_metrics_empty_history(tmp_path: Path) -> None:
    metrics = MetricsDict()
    assert metrics == {"train_metrics_history": [], "valid": [], "test": [], "best_valid": {}}
    assert metrics.get("stop_reason") is None and "best_step" not in metrics
    assert str(metrics) == metrics._repr_html_() == "no metrics yet"
    pytest.importorskip("matplotlib")
    assert metrics.plot(tmp_path / "curves.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(("row", "key", "words"), [
    (MetricRow(eval_loss=1.0, eval_accuracy=0.5), "acc", "'acc' here.*'eval_loss', 'eval_acc.*mean 'accuracy'"),
    (MetricRow(eval_loss=1.0, eval_accuracy=0.5), "accuracu", "no metric 'accuracu'.*mean '(eval_)?accuracy'"),
    (MetricRow(eval_loss=1.0), 3, "3"),
    (MetricsDict(), "best_step", "no evaluation"),
    (MetricsDict(), "stop_reason", "not over"),
    (MetricsDict(), "vald", "valid"),
    (MetricsDict()["best_valid"], "accuracy", "no metric 'accuracy' here: nothing has been evaluated"),
])  # fmt: skip
def test_metrics_missing_key_reports_reason(row: Any, key: Any, words: str) -> None:
    with pytest.raises(KeyError, match=words):
        row[key]
    with pytest.raises(ConfigError, match=r"no place for 'stop_reson'.*mean 'stop_reason'"):
        MetricsDict()["stop_reson"] = "epochs"


def test_metrics_best_valid_and_copies_of_rows() -> None:
    metrics = history()
    assert metrics["best_valid"]["accuracy"] == metrics["best_valid"]["eval_accuracy"] == 0.5
    assert metrics["best_step"] == 20 and len(metrics["valid"]) == 6
    with pytest.raises(KeyError, match="no metric 'step'"):
        MetricsDict().add_valid({"eval_loss": 1.0}, best=True)
    metrics, row = MetricsDict(), {"epoch": 1, "step": 1, "eval_loss": 1.0}
    metrics.add_train(row)
    metrics.add_valid(row, best=True)
    metrics.add_test(row)
    row["eval_loss"] = 9.0
    metrics["valid"][0]["eval_loss"] = 8.0
    rows = metrics["train_metrics_history"][0], metrics["best_valid"], metrics["test"][0]
    assert [row["loss"] for row in rows] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("value", "plain"), [
    *((number, 0.5) for number in (np.float32(0.5), np.float64(0.5), np.array(0.5))), (np.int64(3), 3), (3, 3),
    (np.bool_(True), 1), (True, 1), (torch.ones((), requires_grad=True) / 2, 0.5), (np.str_("a"), "a"),
    (Path("runs") / "a", str(Path("runs") / "a")), (-math.inf, -math.inf),
])  # fmt: skip
def test_metrics_values_become_plain(value: Any, plain: Any) -> None:
    metrics = MetricsDict()
    metrics.add_test({"step": 1, "value": value})
    stored = metrics["test"][0]["value"]
    assert stored == plain and type(stored) is type(plain)


@pytest.mark.parametrize("value", [np.ones((3, 3)), {"a": 1.0}, [1.0], None, 1j])
def test_metrics_rejects_non_numbers(value: Any) -> None:
    with pytest.raises(ConfigError, match="'eval_confusion' must be a number or a string, got a"):
        MetricsDict().add_valid({"step": 1, "eval_confusion": value}, best=False)
    with pytest.raises(ConfigError, match="stop_reason"):
        MetricsDict()["stop_reason"] = value


words = st.sampled_from(["", "eval_loss", "\u00e9", '"\n'])  # drawing from st.text() takes a second for its tables
numbers = st.one_of(st.floats(), st.integers(-(2**40), 2**40), words)
rows = st.lists(st.dictionaries(words, numbers, max_size=4), max_size=4)


@given(rows=rows, facts=st.booleans())
@settings(max_examples=8)
def test_metrics_json_round_trip(rows: Any, facts: bool) -> None:
    metrics = MetricsDict()
    for row in rows:
        metrics.add_train(row)
        metrics.add_valid({"step": 3, **row}, best=True)
        metrics.add_test(row)
    if facts:
        metrics["stop_reason"], metrics["best_checkpoint"] = "epochs", "checkpoint-3"
    assert MetricsDict.from_dict(json.loads(json.dumps(metrics))) == metrics
    assert MetricsDict.from_dict(json.loads(json.dumps(metrics.to_dict(), allow_nan=False))) == metrics


def test_metrics_json_and_pickle_keep_history(tmp_path: Path) -> None:
    metrics = history()
    metrics.add_valid({"epoch": 4, "step": 40, "eval_loss": math.nan, "eval_ppl": math.inf}, best=False)
    path = metrics.to_json(tmp_path / "new" / "metrics.json")
    json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN and Infinity are not JSON
    for other in (MetricsDict.from_json(path), copy.deepcopy(metrics), pickle.loads(pickle.dumps(metrics))):
        assert other == metrics and type(other) is MetricsDict
        assert other["best_valid"]["accuracy"] == 0.5 and math.isnan(other["valid"][-1]["loss"])


def test_metrics_table_joins_training_and_evaluation() -> None:
    metrics = history()
    metrics["stop_reason"] = "epochs"
    metrics.add_test({"epoch": 2, "step": 20, "test_loss": 0.75, "test_accuracy": 0.5})
    assert str(metrics) == (
        "stopped by: epochs · best: step 20 (epoch 2), loss 0.5000, accuracy 0.5000\n"
        " epoch  step  train_loss     lr  grad_norm  eval_loss  eval_accuracy\n"
        "0.5000     5                                   1.0000\n"
        "     1    10      1.0000  2e-05     3.0000     0.5000         0.2500\n"
        "1.5000    15                                   1.0000\n"
        "     2    20      0.5000  2e-05     3.0000     0.5000         0.5000  *\n"
        "2.5000    25                                   1.0000\n"
        "     3    30      0.3333  2e-05     3.0000     0.5000         0.7500\n"
        "test: loss 0.7500, accuracy 0.5000 (step 20)"
    )


def test_metrics_table_is_truncated_if_shorter() -> None:
    lines = str(history(epochs=30)).splitlines()
    assert len(lines) == 2 + 5 + 1 + 15 and lines[7] == "… 40 rows …"
    assert [line.split()[1] for line in (lines[2], lines[6], lines[8], lines[-1])] == ["5", "25", "230", "300"]
    metrics = MetricsDict()
    for step in range(1, 22):
        metrics.add_train({"epoch": step, "step": step, "train_loss": 1.0})
    assert "…" not in str(metrics)
    metrics.add_train({"epoch": 22, "step": 22, "train_loss": 1.0})
    assert "… 2 rows …" in str(metrics)


def test_metrics_plot_returns_figure_or_writes_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    pyplot, metrics = sys.modules.get("matplotlib.pyplot"), history()
    figures = pyplot.get_fignums() if pyplot else []  # of other tests
    figure = metrics.plot()
    assert [[line.get_label() for line in axes.get_lines()] for axes in figure.axes] == [
        ["train_loss", "eval_loss", "best, step 20", "end, step 30"],
        ["eval_accuracy", "_best", "_end"],
        ["learning rate"],
    ]
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert not pyplot or pyplot.get_fignums() == figures
    metrics.add_valid({"step": 40, "eval_loss": math.nan, "eval_model": "a", "eval_accuracy": 1.0}, best=True)
    path = tmp_path / "new" / "curves"
    assert metrics.plot(path) == path and path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '.\[plot\]'"):
        metrics.plot()


def test_metrics_html_and_pretty_table() -> None:
    metrics, texts = MetricsDict(), list[str]()
    for step in range(1, 30):
        metrics.add_valid({"step": step, "eval_loss": 0.25 * step, "eval_<b>": 1.0}, best=step == 2)
    shown = metrics._repr_html_()
    assert "<th>eval_&lt;b&gt;</th>" in shown and "<b>" not in shown
    assert "<th>0.5000</th>" in shown and "<td>0.7500</td>" in shown
    assert "… 9 rows …" in shown and shown.count("<tr>") == 22
    metrics._repr_pretty_(types.SimpleNamespace(text=texts.append), False)
    assert texts == [str(metrics)]
