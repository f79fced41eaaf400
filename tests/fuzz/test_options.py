"""Random triples of options, interrupted, left out and split otherwise: the numbers are what the table says."""

import pytest
from fuzz.cases import check, daily_seeds, draw

FIXED = (18, 173, 195)


@pytest.fixture(autouse=True)
def off_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def fail_on_problems(seed: int, with_workers: bool) -> None:
    case = draw(seed, with_workers)
    if failures := check(case):
        pytest.fail(f"seed {seed}: {case.report(failures)}", pytrace=False)


@pytest.mark.parametrize("seed", FIXED)
def test_fuzzed_options_have_their_effect_and_resume(seed: int) -> None:
    fail_on_problems(seed, with_workers=False)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("seed", daily_seeds(40))
def test_fuzzed_options_of_the_day(seed: int) -> None:
    fail_on_problems(seed, with_workers=True)
