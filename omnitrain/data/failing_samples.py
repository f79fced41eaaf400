"""Samples that cause an error, found by repeating the operation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from omnitrain.core.errors import describe_samples

# How long to try samples again: other ranks may be waiting.
_LIMIT_S = 10.0

Attempt = Callable[[list[int]], Any]


def _last_of_failing(error: Exception, batches: Iterable[list[int]], attempt: Attempt) -> list[int]:
    """Return the last sample of each batch for which `attempt` raises the same type of error."""
    end, failing = time.monotonic() + _LIMIT_S, list[int]()
    for batch in batches:
        if time.monotonic() > end:
            break
        try:
            attempt(batch)
        except Exception as raised:
            failing += batch[-1:] if type(raised) is type(error) else []
    return failing


def describe_failures(error: Exception, samples: Sequence[int], of: str, attempt: Attempt, pairs: bool = False) -> str:
    """Return the samples of a batch as text, or those that fail individually or, in pairs, differ from the others.

    >>> describe_failures(IndexError(), [0, 1, 7], "the training set", lambda samples: [[0, 0][i] for i in samples])
    'sample 7 of the training set, which fails individually'
    """
    everyone = describe_samples(samples, of)
    if len(samples) == 1:
        return everyone
    failing = _last_of_failing(error, ([sample] for sample in samples), attempt)
    if len(failing) == len(samples):
        return f"{everyone}, each of which fails individually: look at the model, or at the types of the data"
    if failing:
        return f"{describe_samples(failing, of)}, which fail{'s' * (len(failing) == 1)} individually"
    unlike = _last_of_failing(error, ([samples[0], sample] for sample in samples[1:]), attempt) if pairs else []
    alike = [sample for sample in samples if sample not in set(unlike)]
    if unlike and len(unlike) != len(alike):  # otherwise it is unclear which of them are odd
        odd = min(unlike, alike, key=len)
        differ = f"which differ{'s' * (len(odd) == 1)} from the others of the batch"
        return f"{describe_samples(odd, of)}, {differ} ({describe_samples(samples)})"
    return everyone
