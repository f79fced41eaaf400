"""Samples that cause an error, found by repeating the operation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from omnitrain.core.errors import describe_samples

# How long to try samples again: other ranks may be waiting.
_LIMIT_S = 10.0

Attempt = Callable[[list[int]], Any]


def _fails(error: Exception, attempt: Attempt, samples: list[int]) -> bool:
    try:
        attempt(samples)
    except Exception as raised:
        return type(raised) is type(error)
    return False


def isolate_failures(error: Exception, samples: Sequence[int], attempt: Attempt) -> list[int]:
    """Return the samples for which `attempt` raises the same type of error individually.

    >>> isolate_failures(KeyError(), range(5), lambda samples: {0: "a", 1: "b"}[samples[0] // 3])
    []
    >>> isolate_failures(KeyError(), range(5), lambda samples: {0: "a"}[samples[0] // 3])
    [3, 4]
    """
    end = time.monotonic() + _LIMIT_S
    return [sample for sample in samples if time.monotonic() < end and _fails(error, attempt, [sample])]


def _differing(error: Exception, samples: Sequence[int], attempt: Attempt) -> list[int]:
    """Return the samples incompatible with the others: the smaller of the groups that fit the first sample or do not.

    The result is empty if both groups are equally large.
    """
    first, end = samples[0], time.monotonic() + _LIMIT_S
    unlike = [sample for sample in samples[1:] if time.monotonic() < end and _fails(error, attempt, [first, sample])]
    alike = [sample for sample in samples if sample not in set(unlike)]
    return [] if len(unlike) == len(alike) else min(unlike, alike, key=len)


def describe_failures(error: Exception, samples: Sequence[int], of: str, attempt: Attempt, pairs: bool = False) -> str:
    """Return the samples of a batch as text, or those that fail individually or, in pairs, differ from the others.

    >>> describe_failures(IndexError(), [0, 1, 7], "the training set", lambda samples: [[0, 0][i] for i in samples])
    'sample 7 of the training set, which fails individually'
    """
    everyone = describe_samples(samples, of)
    if len(samples) == 1:
        return everyone
    failing = isolate_failures(error, samples, attempt)
    if len(failing) == len(samples):
        return f"{everyone}, each of which fails individually: look at the model, or at the types of the data"
    if failing:
        return f"{describe_samples(failing, of)}, which fail{'s' * (len(failing) == 1)} individually"
    odd = _differing(error, samples, attempt) if pairs else []
    if odd:
        differ = f"which differ{'s' * (len(odd) == 1)} from the others of the batch"
        return f"{describe_samples(odd, of)}, {differ} ({describe_samples(samples)})"
    return everyone
