"""LayerFreezing: lower layers stop training one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from omnitrain.algorithms.freezing import Freezing
from omnitrain.core.errors import ConfigError


class LayerFreezing(Freezing):
    """Freezes more and more of the lower layers, from a point of the run on (after arXiv:1706.04983).

    At the start of each epoch `freeze_level * (done - freeze_start) / (1 - freeze_start)` of all layers but the last
    are frozen, `done` being the finished share of the run.

    Args:
        freeze_start: The share of the run after which freezing begins.
        freeze_level: The share of the layers, but for the last, that would be frozen at the end of the run.
        layers: Regular expressions of the names of layers, lowest first; None takes modules with direct
            parameters.

    Raises:
        ConfigError: If an argument is wrong; before the first step, under DeepSpeed.

    >>> LayerFreezing(freeze_start=0.25).freeze_level
    1.0
    """

    def __init__(
        self, freeze_start: float = 0.5, freeze_level: float = 1.0, layers: Sequence[str] | None = None
    ) -> None:
        super().__init__(layers)
        if isinstance(freeze_start, bool) or not 0 <= freeze_start < 1:
            raise ConfigError(f"`freeze_start` must be at least 0 and below 1, got {freeze_start!r}.")
        if isinstance(freeze_level, bool) or not 0 < freeze_level <= 1:
            raise ConfigError(f"`freeze_level` must be above 0 and at most 1, got {freeze_level!r}.")
        self.freeze_start = freeze_start
        self.freeze_level = freeze_level

    def _count(self, layers: int, done: float) -> int:
        passed = max(done - self.freeze_start, 0) / (1 - self.freeze_start)
        return int(layers * self.freeze_level * passed + 1e-9)
