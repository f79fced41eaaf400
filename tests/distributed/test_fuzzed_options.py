"""Random triples of options on two processes: they resume, also on one process, and have its numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import Jobs, asked_for, launch_all
from forking import current_rank
from fuzz.cases import TO_END, Case, compare_split, daily_seeds, draw, play
from fuzz.options import BACKENDS
from resuming import differences

FIXED = (40, 55)


def case_of(seed: int, backend: str = "") -> Case:
    """Return the case of a seed, or the same on one process."""
    case = draw(seed, with_workers=False, trainers=BACKENDS)
    return replace(case, trainer="Trainer", batch=case.split) if backend == "native" else case


def train(backend: str, seed: int, folder: str) -> dict[str, Any]:
    """Train to the end, in parts, and up to a cut for `continue_other`; return what differs in the resumed run."""
    case, place, problems = case_of(seed, backend), Path(folder, backend), list[str]()
    straight = play(case, place / "straight")
    torch.save(straight, place / f"{current_rank()}.pt")
    if case.resumes and backend != "native":
        resumed = play(case, place / "cut", [*case.cuts, TO_END], straight.events)
        problems = differences(resumed.outcome, straight.outcome)
    if case.resumes and case.commutes:
        play(case, place / "part", case.cuts[:1], straight.events)
    return {"problems": [f"resume: {line}" for line in problems[:4]]}


def continue_other(backend: str, seed: int, folder: str) -> dict[str, Any]:
    """Compare with the run on one process: that of two, and the rest of a run that the other of these has begun."""
    case, problems = case_of(seed, backend), list[str]()
    straight = torch.load(Path(folder, "native", "0.pt"), weights_only=False)
    if backend != "native":
        run = torch.load(Path(folder, backend, f"{current_rank()}.pt"), weights_only=False)
        problems += [f"one process: {line}" for line in compare_split(case, run, straight)[:4]]
    if case.resumes:
        source = "native" if backend != "native" else case_of(seed).trainer
        rest = play(case, Path(folder, source, "part"))
        rest.weights[:0] = straight.weights[: len(straight.weights) - len(rest.weights)]
        problems += [f"resume from {source}: {line}" for line in compare_split(case, rest, straight)[:4]]
    return {"problems": problems}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[int, list[str]]:
    """What is wrong with the case of each seed."""
    folder, seeds = tmp_path_factory.mktemp("fuzz"), sorted(asked_for(request, "seed"))
    cases, problems = {seed: case_of(seed) for seed in seeds}, {seed: list[str]() for seed in seeds}
    for function in (train, continue_other):
        jobs = Jobs()
        for seed, case in cases.items():
            for backend in ("native", case.trainer):
                if not problems[seed] and (case.commutes or (function is train and backend != "native")):
                    jobs.add(f"{seed}-{backend}", backend, function, seed=seed, folder=str(folder / f"{seed}"))
        results = launch_all(jobs, folder / function.__name__)
        for job in jobs:
            ranks = results.get(job.name) or [{"error": "It was not run", "message": results.broken[job.name]}]
            for rank, result in enumerate(ranks):
                lines = result.get("problems") or []
                if "error" in result:
                    lines = [f"{function.__name__}: {result['error']}: {result['message'][:600]}"]
                problems[job.options["seed"]] += [f"{job.backend}, rank {rank}: {line}" for line in lines]
    return problems


@pytest.mark.parametrize("seed", [*FIXED, *(pytest.param(seed, marks=pytest.mark.slow) for seed in daily_seeds(8))])
def test_fuzzed_options_on_two_processes(problems: dict[int, list[str]], seed: int) -> None:
    """Two ranks resume bit for bit, have the numbers of one process, and each continues what the other began."""
    if problems[seed]:
        pytest.fail(f"seed {seed}: {case_of(seed).report(problems[seed])}", pytrace=False)
