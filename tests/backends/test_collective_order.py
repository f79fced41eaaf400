"""Comparisons of collectives over many ranks."""

import zlib

import numpy as np
import pytest

from omnitrain.distributed.ranks import Ranks


class RanksWithCodes(Ranks):
    """Rank 0 of many ranks, whose sums are those of `ProcessRanks`, in float64; the code of the last one may differ."""

    def __init__(self, size: int, difference: int) -> None:
        self.world_size, self._difference = size, difference

    def sum(self, what: str, *values: float) -> list[float]:
        """Return the sums of a code and of its square."""
        codes = np.full(self.world_size, values[0])
        codes[-1] += self._difference
        return [float(np.cumsum(np.float64(codes) ** power)[-1]) for power in (1, 2)]


@pytest.mark.parametrize("size", [2, 33, 1000])
def test_are_equal_is_exact_for_many_ranks(size: int) -> None:
    """A sum that float64 rounds would report a difference between ranks that call the same layers."""
    for number in range(100):
        code = zlib.crc32(number.to_bytes(4))
        assert RanksWithCodes(size, 0).are_equal("the layers of a step", code)
        assert not RanksWithCodes(size, 1).are_equal("the layers of a step", code)
