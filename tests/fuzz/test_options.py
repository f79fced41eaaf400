"""Random triples of options, interrupted, left out and split otherwise: the numbers are what the table says."""

from __future__ import annotations

import datetime
import os

import pytest
from fuzz.cases import check, draw

FIXED = (7, 10, 19, 27, 35, 54)
BASE = int(os.environ.get("FUZZ_SEED") or datetime.date.today().strftime("%Y%m%d"))
COUNT = int(os.environ.get("FUZZ_CASES") or 40)


@pytest.fixture(autouse=True)
def off_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def fail_on_problems(seed: int, with_workers: bool) -> None:
    case = draw(seed, with_workers)
    if failures := check(case):
        report = [f"seed {seed}: check({case!r})", f"  {case.call()}", *(f"  - {line}" for line in failures)]
        pytest.fail("\n".join(report), pytrace=False)


@pytest.mark.parametrize("seed", FIXED)
def test_fuzzed_options_have_their_effect_and_resume(seed: int) -> None:
    fail_on_problems(seed, with_workers=False)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("seed", [BASE * 1000 + number for number in range(COUNT)])
def test_fuzzed_options_of_the_day(seed: int) -> None:
    fail_on_problems(seed, with_workers=True)
