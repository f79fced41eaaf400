"""GradualUnfreezing: higher layers train first, lower ones join."""

from __future__ import annotations

from collections.abc import Sequence

from omnitrain.algorithms.freezing import Freezing
from omnitrain.core.errors import ConfigError


class GradualUnfreezing(Freezing):
    """Begins with only the last layer and unfreezes the others from the top down (arXiv:1801.06146).

    At the start of each epoch `done / until` of all layers but the last are unfrozen, `done` being the finished share
    of the run.

    Args:
        until: The share of the run after which all layers train.
        layers: Regular expressions of the names of layers, lowest first; None takes modules with direct
            parameters.

    Raises:
        ConfigError: If an argument is wrong; before the first step, under DeepSpeed.

    >>> GradualUnfreezing(until=0.25).until
    0.25
    """

    def __init__(self, until: float = 0.5, layers: Sequence[str] | None = None) -> None:
        super().__init__(layers)
        if isinstance(until, bool) or not 0 < until <= 1:
            raise ConfigError(f"`until` must be above 0 and at most 1, got {until!r}.")
        self.until = until

    def _count(self, layers: int, done: float) -> int:
        return layers - int(layers * min(done / self.until, 1) + 1e-9)
