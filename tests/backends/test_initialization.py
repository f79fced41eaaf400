"""Weights on the meta device that no rank and no file has, initialized by the modules' own methods."""

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
        first, second, counted = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), Counted()
    first.bias, second.weight = nn.Parameter(torch.full((4,), 7.0)), first.weight
    names = {"0.weight", "2.weight", "2.count"}
    torch.manual_seed(3)
    assert initialize_missing(nn.Sequential(first, second, counted), names) == {"2.weight": "Counted"}
    torch.manual_seed(3)
    assert first.weight is second.weight and torch.equal(first.weight, nn.Linear(4, 4).weight)
    assert first.bias.tolist() == [7.0] * 4 and not hasattr(first.bias, "_is_hf_initialized")
    assert counted.count.tolist() == [0, 1, 2]
