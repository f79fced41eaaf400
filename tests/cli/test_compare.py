"""Runs side by side: their table and picture, and the runs that cannot be compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from omnitrain import ConfigError, MetricDescriptor, MetricsDict, compare_runs, describe_metric


def write_run(folder: Path, *evaluations: dict[str, float], end: str = "") -> Path:
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for epoch, metrics in enumerate(evaluations, start=1):
        common = {"step": 10 * epoch, "epoch": epoch}
        rows.append({"kind": "train", **common, "loss": 1 / epoch, "learning_rate": 0.1})
        rows.append({"kind": "eval", **common, **metrics})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_run(tmp_path / "a", {"eval_loss": 0.5, "eval_accuracy": 0.7}, {"eval_loss": 0.6, "eval_accuracy": 0.9})
    write_run(tmp_path / "b", {"eval_loss": 0.4, "eval_foo": 1.0}, {"eval_loss": 0.3, "eval_foo": 3.0})
    monkeypatch.chdir(tmp_path)
    return tmp_path


TABLE = """\
run  steps  epochs  loss  eval_loss  eval_accuracy  eval_foo
a       20    2.00   0.5    0.5 @10        0.9 @20         -
b       20    2.00   0.5  0.3 @20 *              -     3 @20
"""


def test_compare_marks_best_of_each_metric(runs: Path, command: Any) -> None:
    assert command("compare", "a", "b") == (0, TABLE, "")
    by_file = str(compare_runs("a", "b/metrics.jsonl")).splitlines()
    assert [line.split()[1:] for line in by_file] == [line.split()[1:] for line in TABLE.splitlines()]


def test_compare_plots_panel_per_value(runs: Path, command: Any) -> None:
    panels = [
        [axes.get_ylabel(), *(line.get_label() for line in axes.get_lines() if line.get_marker() != "*")]
        for axes in compare_runs("a", "b").plot().axes
    ]
    assert panels == [["train loss", "a", "b"], ["eval_loss", "a", "b"], ["eval_accuracy", "a"], ["eval_foo", "b"]]
    picture = Path("pictures", "runs.png")
    assert command("compare", "a", "b", "--png", picture)[:2] == (0, TABLE + f"Drawn in {picture}.\n")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_compare_takes_histories_and_files(runs: Path) -> None:
    metrics = MetricsDict()
    metrics.add_train({"epoch": 1, "step": 10, "train_loss": 0.75})
    metrics.add_valid({"epoch": 1, "step": 10, "eval_loss": 0.25}, best=True)
    metrics.add_test({"epoch": 1, "step": 10, "test_loss": 0.3})
    metrics.to_json("history.json")
    lines = str(compare_runs({"<one>": metrics, "other": "history.json", "b": "b"})).splitlines()
    assert lines[0].split() == ["run", "steps", "epochs", "loss", "eval_loss", "eval_foo", "test_loss"]
    assert lines[1].split() == ["<one>", "10", "1.00", "0.75", "0.25", "@10", "*", "-", "0.3", "*"]
    assert lines[2].split()[1:] == lines[1].split()[1:]
    assert "<td>&lt;one&gt;</td>" in compare_runs({"<one>": metrics})._repr_html_()


def test_compare_uses_metric_descriptions(runs: Path) -> None:
    describe_metric("accuracy", MetricDescriptor("acc.", format=".1%", order=1))
    header, row = str(compare_runs("a")).splitlines()
    assert header.split() == ["run", "steps", "epochs", "eval", "acc.", "loss", "eval_loss"] and "90.0% @20" in row


def test_compare_skips_damaged_lines(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = compare_runs("a").runs["a"]
    damage = [b"\0" * 40, b"\xff\xfe{", b"[" * 5000, b'{"kind": [], "step": 1}', b'{"kind": "eval", "step": "x"}', b"7"]
    path = runs / "a" / "metrics.jsonl"
    path.write_bytes(b"\n".join([*damage, path.read_bytes()]))
    assert compare_runs("a").runs["a"] == rows
    assert "metrics.jsonl has 6 damaged lines, which are left out." in caplog.text
    write_run(runs / "torn", {"eval_loss": 0.5}, end='{"kind": "train", "st')
    assert len(next(iter(compare_runs("torn").runs.values()))) == 2
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="has no metrics"):
        compare_runs("a")


@pytest.mark.parametrize(("names", "expected"), [
    (["nowhere"], "There is no folder 'nowhere'"), (["a", "a/"], "The run 'a' is there twice"),
    (["."], "'.' has no metrics.jsonl, which each run writes"),
    (["empty"], "The run 'empty' has no rows"), (["odd.json"], "'odd.json' has no rows of a run"),
    (["odd.jsonl"], "'odd.jsonl' has no rows of a run: each line is a JSON object"),
    ([], "There is nothing to compare"), ([MetricsDict()], "A MetricsDict has no name"),
])  # fmt: skip
def test_compare_rejects_other_paths(names: list[Any], expected: str, runs: Path) -> None:
    write_run(runs / "empty")
    (runs / "odd.json").write_text("[1]")
    (runs / "odd.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match=expected):
        compare_runs(*names)
