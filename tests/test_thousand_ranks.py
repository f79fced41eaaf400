"""One rank in a run of many, in a simulation: nothing of what it does grows with the ranks but what is named."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import programs
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.processes]

ROOT = Path(__file__).resolve().parent.parent
FEW, MANY = 128, 256
FEW_PARTS, MANY_PARTS = 72, 144
"""Of ranks that write a file each, which takes time."""
OF_ALL = {
    ("start", 0): {
        "the random numbers for a checkpoint", "the hosts of a run", "what the data draws", "some samples of the data",
    },
    ("evaluate", 0): {"the predictions of an evaluation", "the states of metrics", "the end of an evaluation"},
    ("save", 0): {
        "the random numbers for a checkpoint", "what the data draws", "the losses for a checkpoint",
        "the writing of a checkpoint",
    },
    ("save", 1): {"the losses for a checkpoint"},
    ("load", 1): {"the choice of a checkpoint"},
}  # fmt: skip
"""What may bring more bytes with more ranks: what the main rank compares or has to have of each one, and, on each of
them, the loss of each in a checkpoint, which a run that goes on in the same process needs; the manifest that it is read
from.
"""
OF_PARTS = {("save", 1): {"the parts of a checkpoint"}, ("load", 1): {"opening files"}}
OF_ALL_PARTS = {phase: names | OF_PARTS.get(phase, set()) for phase, names in OF_ALL.items()}
"""With parts also what the main rank writes of each one's files into the manifest, and their names, sizes and digests,
which each rank gets when it opens them."""
SELDOM = {"the tensors on the meta device", "the buffers of the model"}
"""A few bytes a rank: once; in steps 1, 2, 4, 8 and so on, and before evaluations and checkpoints."""


def counted(folder: Path, run: str, *sizes: int) -> dict[tuple[str, int, int], dict[str, Any]]:
    """What the main rank, 0, and the last one, 1, do in a phase of a run."""
    script, counts = ROOT / "benchmarks" / "thousand_ranks.py", ",".join(map(str, sizes))
    child = programs.run(
        sys.executable, script, "--ranks", counts, "--runs", run, "--json", "out.json", cwd=folder,
        env={"PYTHONPATH": str(ROOT)}, timeout=250,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    rows = json.loads((folder / "out.json").read_text())
    return {(row["phase"], min(1, row["rank"]), row["world_size"]): row for row in rows}


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], dict[str, Any]]:
    return counted(tmp_path_factory.mktemp("ranks"), "ddp", 2, FEW, MANY)


@pytest.fixture(scope="module")
def counts_of_parts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], dict[str, Any]]:
    return counted(tmp_path_factory.mktemp("parts"), "whole", FEW_PARTS, MANY_PARTS)


def larger(few: dict[str, int], many: dict[str, int]) -> set[str]:
    """Return what brings more bytes with more ranks; numbers in texts are longer, by less than 64 bytes."""
    return {name for name, size in many.items() if size > few[name] + 64} - SELDOM


PHASES = [(phase, rank) for phase in ("start", "step", "evaluate", "save", "load") for rank in (0, 1)]


@pytest.mark.parametrize("phase, rank", PHASES)
def test_counts_and_bytes_grow_only_where_listed(counts: Any, phase: str, rank: int) -> None:
    few, many = (counts[phase, rank, size] for size in (FEW, MANY))
    same = ["collectives", "store"]
    if (phase, rank) != ("load", 0):  # the main rank reads the random numbers of each rank from one file
        same += ["opened", "stats"]
    assert {name: few[name] for name in same} == {name: many[name] for name in same}
    assert larger(few["names"], many["names"]) <= OF_ALL.get((phase, rank), set())


@pytest.mark.parametrize("rank", [0, 1])
def test_steps_saves_and_loads_make_few_exchanges(counts: Any, rank: int) -> None:
    step = counts["step", rank, MANY]
    assert step["collectives"] == 1 and step["sent"] < 600 and step["received"] < 600
    assert step["store"] == step["opened"] == step["stats"] == 0
    for phase, size, most in (("save", 2, 14), ("save", MANY, 17), ("load", 2, 18), ("load", MANY, 18)):
        assert counts[phase, rank, size]["collectives"] <= most


def test_other_ranks_open_no_more_files(counts: Any) -> None:
    assert counts["save", 1, MANY]["opened"] == counts["save", 1, MANY]["stats"] == 0
    for name in ("opened", "stats"):
        assert counts["load", 1, MANY][name] == counts["load", 1, FEW][name] > 0


# --- where each rank writes its part of a checkpoint


def check_parts(counts: Any, few_ranks: int, many_ranks: int, of_each: dict[tuple[str, str], int]) -> None:
    """Check that nothing grows with the ranks but what is named, and the files that the main rank opens for each."""
    for phase, rank in PHASES:
        few, many = (counts[phase, rank, size] for size in (few_ranks, many_ranks))
        assert [few[row] for row in ("collectives", "store")] == [many[row] for row in ("collectives", "store")]
        for name in ("opened", "stats"):
            allowed = of_each.get((phase, name), 0) * (many_ranks - few_ranks) if rank == 0 else 0
            assert many[name] <= few[name] + allowed, (phase, rank, name)
        sizes = [
            {re.sub(r"opening \d+ files", "opening files", name): size for name, size in row["names"].items()}
            for row in (few, many)
        ]
        assert larger(*sizes) <= OF_ALL_PARTS.get((phase, rank), set()), (phase, rank)
    assert counts["load", 1, many_ranks]["opened"] < 30 and counts["save", 1, many_ranks]["opened"] < 8


def test_sharded_counts_do_not_grow(counts_of_parts: Any) -> None:
    of_each = {("save", "opened"): 2, ("save", "stats"): 4, ("load", "opened"): 2, ("load", "stats"): 3}
    check_parts(counts_of_parts, FEW_PARTS, MANY_PARTS, of_each)


def test_sharded_thousand_ranks(tmp_path: Path) -> None:
    of_each = {("save", "stats"): 4, ("load", "opened"): 4, ("load", "stats"): 6}
    check_parts(counted(tmp_path, "parts", 128, 1024), 128, 1024, of_each)
