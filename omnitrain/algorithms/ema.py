"""EMA: an exponential moving average of the weights (Polyak and Juditsky, 1992; Tarvainen and Valpola, 2017)."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from torch.optim.swa_utils import get_ema_multi_avg_fn

from omnitrain.algorithms.averaging import WeightAverage
from omnitrain.errors import ConfigError
from omnitrain.events import TrainerLike

__all__ = ["EMA"]


class EMA(WeightAverage):
    """Evaluates, keeps and ends with an exponential moving average of the weights (arXiv:1703.01780).

    After each update every average becomes `decay * average + (1 - decay) * weight`; it begins at the first weights.

    Args:
        decay: How much of the average stays at each update, between 0 and 1.

    Raises:
        ConfigError: If `decay` is not between 0 and 1; before the first step, under ZeRO 3, or for weights of 16 bits.

    >>> EMA(decay=0.99).decay
    0.99
    """

    conflicts: ClassVar[Collection[str]] = ("SWA",)

    def __init__(self, decay: float = 0.999) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay < 1:
            raise ConfigError(f"`decay` of EMA must be a number between 0 and 1, got {decay!r}.")
        super().__init__(get_ema_multi_avg_fn(decay))
        self.decay = decay

    def begin_epoch(self, trainer: TrainerLike) -> None:
        """Begin an average of each parameter that trains and has none."""
        self._join(trainer)

    def after_update(self, trainer: TrainerLike) -> None:
        """Move the averages towards the weights."""
        self._add()
