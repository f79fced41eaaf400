"""The trainers, and which cases of an exhaustive test belong in `make test`, and which in `make test-all` alone."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch.nn.functional as F
from recipes import trainer_on_cpu
from torch import nn

from omnitrain import AccelerateTrainer, HFTrainer, Trainer

TRAINERS: dict[str, Any] = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}


def thinned(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return the cases for `parametrize`, all but the quick ones marked `slow`.

    Raises:
        ValueError: If a quick one is no case.
    """
    cases = list(cases)
    unknown = [case for case in quick if case not in cases]
    if unknown:
        raise ValueError(f"{unknown} are no cases. There are {cases}.")
    return [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=[] if case in quick else pytest.mark.slow)
        for case in cases
    ]


def make_small(kind: Any, model: nn.Module, data: Any = None, **options: Any) -> Any:
    """Return a silent trainer of this class or name, on the CPU, with batches of 4 and the squared error."""
    return trainer_on_cpu(TRAINERS.get(kind, kind), model, data, **{"batch_size": 4, "loss_fn": F.mse_loss, **options})
