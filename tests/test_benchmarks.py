"""The benchmarks run: tiny sizes, no look at any time. The probes of other trainers are judged right on ours."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import programs
import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
PROBES = [f"R{number}" for number in range(1, 10)]


def run(*command: str | Path, cwd: Path) -> str:
    """Return what a script prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = programs.run(sys.executable, *command, cwd=cwd, env=environment, timeout=1200)
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_overhead_measures_the_case_that_is_asked_for(tmp_path: Path) -> None:
    run(BENCHMARKS / "overhead.py", "--quick", "--only", "tensors", "--json", "out.json", cwd=tmp_path)
    figures = json.loads((tmp_path / "out.json").read_text())
    assert {row["case"] for row in figures["rows"]} == {"tensors"}


@pytest.mark.slow
def test_overhead_measures_every_case(tmp_path: Path) -> None:
    run(BENCHMARKS / "overhead.py", "--quick", "--json", "out.json", cwd=tmp_path)
    figures = json.loads((tmp_path / "out.json").read_text())
    assert {"tensors", "dicts", "transformer", "hf", "hf-transformer", "evaluation", "imports"} <= {
        row["case"] for row in figures["rows"]
    }


@pytest.mark.slow
def test_checkpoint_measures_saves_files_and_seeking_and_leaves_nothing_behind(tmp_path: Path) -> None:
    printed = run(BENCHMARKS / "checkpoint.py", "--quick", "--json", "out.json", cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    figures = json.loads((tmp_path / "out.json").read_text())
    variants = {(row["case"], row["variant"]) for row in figures["rows"]}
    assert {
        ("save", "torch.save"),
        ("save", "omnitrain"),
        ("save, on disk", "omnitrain, async_save=True, later"),
    } <= variants
    ours = next(one for one in figures["files"] if one["name"] == "omnitrain")
    assert (ours["failed_save"], ours["flipped_bit"], ours["pickle"]) == ("kept", "noticed", False)
    reads = figures["seek"]
    assert reads["omnitrain, resumed, 0 workers"] == reads["omnitrain, from the start, 0 workers"] == 8
    assert reads["omnitrain, resumed, 2 workers"] <= 8 * (1 + 2 * 2)  # what the two workers fetch ahead
    assert "x ref" in printed


@pytest.mark.slow
@pytest.mark.distributed
def test_distributed_measures_both_models_on_two_processes(tmp_path: Path) -> None:
    run(BENCHMARKS / "distributed.py", "--quick", "--json", "out.json", cwd=tmp_path)
    figures = json.loads((tmp_path / "out.json").read_text())
    assert {(row["case"], row["variant"]) for row in figures["rows"]} >= {
        ("tiny MLP", "accelerate by hand"),
        ("tiny MLP", "AccelerateTrainer"),
        ("small transformer", "AccelerateTrainer"),
    }


# the probes of other trainers


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    return importlib.import_module("probes")


@pytest.mark.parametrize("name", PROBES)
def test_probe_finds_omnitrain_right(name: str, probes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = getattr(importlib.import_module("on_omnitrain"), name.lower())
    facts = probe(tmp_path) if inspect.signature(probe).parameters else probe()
    is_right, result = probes.PROBES[name].judge(json.loads(json.dumps(facts)))
    assert is_right, result


BAD: dict[str, list[dict[str, Any]]] = {
    "R1": [{"difference": 2e-6, "update": 1e-2}],
    "R2": [{"gradients": [1.0, 0.5]}, {"gradients": [1.0]}],
    "R3": [{"plain data, 0 workers": 0.0, "random data, 2 workers": 1e-9}],
    "R4": [{"before": [*range(28)], "after": [*range(32)], "said": []}, {"before": [0], "after": [], "said": []}],
    "R5": [
        {"a": {"error": "ValueError"}},
        {"a": {"first_step": 11, "said": [], "difference": 1e-3}},
        {"a": {"first_step": 6, "said": [], "difference": 0.0}},
        {"a": {"first_step": 1, "said": ["no checkpoint"], "difference": 0.0}},
    ],
    "R7": [
        {"steps": 30, "of": 30, "finite": False, "error": ""},
        {"steps": 3, "of": 30, "finite": False, "error": "E"},
    ],
    "R8": [{"difference": 1e-2}],
    "R9": [{"straight": 8, "resumed": 12}],
}


@pytest.mark.parametrize(("name", "facts"), [(name, facts) for name, several in BAD.items() for facts in several])
def test_probe_calls_a_bad_result_wrong(name: str, facts: dict[str, Any], probes: Any) -> None:
    assert not probes.PROBES[name].judge(facts)[0]


def test_guessed_direction_of_an_unknown_metric_is_wrong(probes: Any) -> None:
    right = dict(importlib.import_module("material").DIRECTIONS)
    judge = probes.PROBES["R6"].judge
    assert judge({**right, "foo": "ObjectiveError"})[0]
    assert not judge({**right, "foo": "max"})[0]
    assert not judge({**right, "foo": "ObjectiveError", "wer": "max"})[0]


def test_peer_that_is_not_installed_is_listed_as_that(probes: Any) -> None:
    row = probes.probe("R2", "no_such_trainer")
    assert (row.is_right, row.result) == (None, "not installed")


def test_table_has_a_line_for_each_peer_with_our_result_beside_it(probes: Any) -> None:
    ours = probes.Row("R2", "question", "omnitrain", "0.1", True, "gradients [1.0, 1.0]")
    theirs = probes.Row("R2", "question", "peer", "1.2", False, "gradients [1.0, 0.5]")
    absent = probes.Row("R2", "question", "other", "", None, "not installed")
    assert probes.show([theirs, absent, ours]).splitlines()[2:] == [
        "| R2 question | peer 1.2 | wrong: gradients [1.0, 0.5] | right: gradients [1.0, 1.0] |",
        "| R2 | other | not installed | right: gradients [1.0, 1.0] |",
    ]
