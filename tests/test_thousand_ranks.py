"""One rank in a run of many, in a simulation: nothing of what it does grows with the ranks but what is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import programs
import pytest

ROOT = Path(__file__).resolve().parent.parent
FEW, MANY = 128, 512
OF_ALL = {
    ("start", 0): {"the random numbers for a checkpoint", "the hosts of a run", "what the data draws"},
    ("evaluate", 0): {"the predictions of an evaluation", "the states of metrics", "the end of an evaluation"},
    ("save", 0): {"the random numbers for a checkpoint", "what the data draws", "the losses for a checkpoint"},
    ("save", 1): {"the losses for a checkpoint"},
    ("load", 1): {"the choice of a checkpoint"},
}
"""What may bring more bytes with more ranks: what the main rank has to have of each one, and, on each of them, the loss
of each in a checkpoint, which a run that goes on in the same process needs; the manifest that it is read from."""
AT_THE_START = "the tensors on the meta device"
"""It is exchanged once, and is a few bytes a rank."""


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    script, sizes = ROOT / "benchmarks" / "thousand_ranks.py", f"2,{FEW},{MANY}"
    child = programs.run(
        sys.executable, script, "--ranks", sizes, "--json", "out.json", cwd=folder, env={"PYTHONPATH": str(ROOT)},
        timeout=250,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    found = json.loads((folder / "out.json").read_text())
    return {(one["phase"], one["rank"], one["world_size"]): one for one in found}


PHASES = [(phase, rank) for phase in ("start", "step", "evaluate", "save", "load") for rank in (0, 1)]


@pytest.mark.parametrize("phase, rank", PHASES)
def test_exchanges_requests_and_files_are_as_many_with_more_ranks(counts: Any, phase: str, rank: int) -> None:
    few, many = (counts[phase, rank, size] for size in (FEW, MANY))
    same = ["collectives", "store"]
    if (phase, rank) != ("load", 0):  # the main rank reads the random numbers of each rank from one file
        same += ["opened", "stats"]
    assert {name: few[name] for name in same} == {name: many[name] for name in same}


@pytest.mark.parametrize("phase, rank", PHASES)
def test_only_what_is_named_brings_more_bytes_with_more_ranks(counts: Any, phase: str, rank: int) -> None:
    few, many = (counts[phase, rank, size]["names"] for size in (FEW, MANY))
    slack = 64  # numbers in texts are longer
    more = {name for name, size in many.items() if size > few[name] + slack}
    assert more - {AT_THE_START} <= OF_ALL.get((phase, rank), set())


def test_a_step_is_one_exchange_of_a_few_numbers(counts: Any) -> None:
    for rank in (0, 1):
        step = counts["step", rank, MANY]
        assert step["collectives"] == 1 and step["sent"] < 200 and step["received"] < 200
        assert step["store"] == step["opened"] == step["stats"] == 0


def test_another_rank_saves_nothing_and_reads_no_more_files_where_there_are_more_ranks(counts: Any) -> None:
    assert counts["save", 1, MANY]["opened"] == counts["save", 1, MANY]["stats"] == 0
    for name in ("opened", "stats"):
        assert counts["load", 1, MANY][name] == counts["load", 1, FEW][name] > 0
