"""Which cases of an exhaustive test belong in `make test`, and which in `make test-all` alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Return the cases for `parametrize`, all but those that are kept marked `slow`.

    Raises:
        ValueError: If one that is kept is no case.
    """
    cases = list(cases)
    unknown = [one for one in kept if one not in cases]
    if unknown:
        raise ValueError(f"{unknown} are no cases. There are {cases}.")
    return [
        pytest.param(*(one if isinstance(one, tuple) else [one]), marks=[] if one in kept else pytest.mark.slow)
        for one in cases
    ]
