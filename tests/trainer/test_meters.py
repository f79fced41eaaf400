"""Meters: weighted means of named values."""

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from omnitrain.checkpoint import state_dicts
from omnitrain.core.errors import ConfigError, DataError
from omnitrain.distributed.ranks import Ranks
from omnitrain.trainer.meters import Meters, means_of

CPU, NAN = torch.device("cpu"), math.nan


def test_nan_is_in_the_means_of_its_log_and_epoch_only() -> None:
    for bad in (NAN, math.inf, -math.inf):
        meters = Meters(CPU)
        meters.add({"a": torch.tensor(bad), "b": 1.0}, 2)
        assert not math.isfinite(meters.means_since_last()["a"])
        meters.add({"a": 3.0}, 1)
        assert meters.means_since_last() == {"a": 3.0}
        assert not math.isfinite(meters.means()["a"]) and meters.means()["b"] == 1.0
        meters.begin_epoch()
        meters.add({"a": 5.0}, 1)
        assert meters.means() == meters.means_since_last() == {"a": 5.0}


def test_scalars_of_all_types_are_accepted() -> None:
    for value in (
        torch.tensor(2), torch.tensor([[2.0]]), torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(2.0).half(), 2,
        np.float32(2), np.int64(2), torch.tensor(2.0, requires_grad=True),
    ):  # fmt: skip
        meters = Meters(CPU)
        for _ in range(3):
            meters.add({"a": value}, 1.5)
        meters.add({"a": NAN, "loss": 1.0}, 0)  # without weight a batch adds nothing
        meters.add({"share": True}, 1)
        meters.add({"share": torch.tensor(False)}, 3)
        assert meters.means() == {"a": 2.0, "share": 0.25}


def test_values_and_names_that_are_no_metrics_are_an_error() -> None:
    for value, word in (
        (torch.ones(2), "shape \\(2,\\)"), (torch.ones(0), "shape \\(0,\\)"), (torch.tensor(1j), "complex64"),
        (None, "NoneType"), ("0.5", "str '0.5'"), ([1.0], "list"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=f"'a' must be a scalar.*got .*{word}.*mean"):
            Meters(CPU).add({"a": value}, 1)
    meters = Meters(CPU)
    for name in ("loss", "loss_scale", "step", "test_a", "eval_a", "learning_rate_1", "", 3, None):
        with pytest.raises(ConfigError, match=f"{name!r}.*Choose another name"):
            meters.add({name: 1.0}, 1)
    assert len(meters) == 0


class FakeRanks(Ranks):
    """Ranks that combine nothing."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def combine(self, what: str, value: Any, function: Any) -> Any:
        return value


def test_state_is_restored_on_any_number_of_ranks() -> None:
    states = []
    for rank in range(2):
        meters = Meters(CPU)
        meters.add({"a": 1.0 + rank}, 1)
        meters.means_since_last()
        meters.add({"a": 0.1 * rank, f"only {rank}": NAN}, 3)
        states.append(meters.state_dict())
    states = state_dicts.from_json(json.loads(json.dumps(state_dicts.to_json(states, "metrics"))))
    for world_size in (1, 2, 3):
        parts = []
        for rank in range(world_size):
            meters = Meters(CPU, FakeRanks(rank, world_size))
            meters.add({"gone": 1.0}, 1)
            meters.load_state_dict(copy.deepcopy(states))
            parts.append(meters)
        means = means_of([meters.sums() for meters in parts])
        assert means.pop("a") == (1.0 + 2.0 + 3 * 0.1) / 8
        assert sorted(means) == ["only 0", "only 1"] and all(map(math.isnan, means.values()))
        assert means_of([meters.means_since_last() for meters in parts])["a"] == 0.1 * 3 / 6
        assert len(parts[-1]) == {1: 3, 2: 2, 3: 0}[world_size]
