"""EMA: an exponential moving average of the weights."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import ClassVar

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from omnitrain.algorithms.averaging import WeightAverage
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import TrainerLike

logger: logging.Logger = logging.getLogger("omnitrain")


class EMA(WeightAverage):
    """Evaluates, keeps and ends with an exponential moving average of the weights (arXiv:1703.01780).

    After each update every average becomes `d * average + (1 - d) * weight`; it begins at the first weights. At first
    `d` is smaller than `decay`, so that a short run forgets these too: after `n` updates it is
    `min(decay, (1 + n) / (10 + n))`, as in diffusers and TensorFlow.

    Args:
        decay: How much of the average stays at each update, between 0 and 1; an average is over the latest
            `1 / (1 - decay)` updates or so. A run that is shorter logs a warning.

    Raises:
        ConfigError: If `decay` is not between 0 and 1; before the first step, under ZeRO 3, or for weights of 16 bits.

    >>> [round(EMA(decay=0.99).decay_after(updates), 3) for updates in (0, 90, 1000)]
    [0.1, 0.91, 0.99]
    """

    conflicts: ClassVar[Collection[str]] = ("SWA",)

    def __init__(self, decay: float = 0.999) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay < 1:
            raise ConfigError(f"`decay` of EMA must be a number between 0 and 1, got {decay!r}.")
        super().__init__(self._average)
        self.decay = decay

    def decay_after(self, updates: int) -> float:
        """Return how much of the average stays at an update that comes after so many others."""
        return min(self.decay, (1 + updates) / (10 + updates))

    def _average(self, averages: list[torch.Tensor], weights: list[torch.Tensor], updates: int) -> None:
        get_ema_multi_avg_fn(self.decay_after(updates))(averages, weights, updates)

    def set_up(self, trainer: TrainerLike) -> None:
        """Forget the averages of an earlier run, and warn if this run is too short for `decay`."""
        super().set_up(trainer)
        total, span = trainer.total_steps, 1 / (1 - self.decay)
        if total is not None and total < span and trainer.rank == 0:
            logger.warning(
                "EMA(decay=%s) averages over about %.0f updates, and the run has %d, at whose end decay is %.3f. Pass "
                "a smaller one.", self.decay, span, total, self.decay_after(total),
            )  # fmt: skip

    def begin_epoch(self, trainer: TrainerLike) -> None:
        """Start averages of parameters that began to train."""
        self._add_parameters(trainer)

    def after_update(self, trainer: TrainerLike) -> None:
        """Move the averages towards the weights."""
        self._update_averages()
