"""Weights on the meta device that no rank and no file has, initialized by the modules' own methods."""

from typing import cast

import torch
from torch import nn

from omnitrain.backends.start import initialize_missing


class Counted(nn.Module):
    """A buffer that is computed, next to a weight that nothing sets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def reset_parameters(self) -> None:
        self.count = torch.arange(3)


def test_initialize_missing_draws_only_what_is_missing() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    first, second = (cast("nn.Linear", layer) for layer in model)
    first.bias, second.weight = nn.Parameter(torch.full((4,), 7.0)), first.weight
    torch.manual_seed(3)
    assert initialize_missing(model, {"0.weight"}) == {}
    torch.manual_seed(3)
    assert first.weight is second.weight and torch.equal(first.weight, nn.Linear(4, 4).weight)
    assert first.bias.tolist() == [7.0] * 4 and not hasattr(first.bias, "_is_hf_initialized")


def test_initialize_missing_returns_what_nothing_sets() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Counted())
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    assert initialize_missing(model, names) == {"1.weight": "Counted"}
    assert dict(model.named_buffers())["1.count"].tolist() == [0, 1, 2]
