"""What freezing and thawing layers have in common: which layers there are, and how one is frozen.

How many are frozen, and when, is in the file of each algorithm.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from torch import nn

from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Algorithm, TrainerLike, share_of_run


class Freezing(Algorithm):
    """Freezes the lower layers of a model, as many as the share of the run's updates says, at the start of epochs.

    A frozen layer requires no gradient; what the optimizer keeps of it stays as it is until it trains again. Layers
    that were frozen before the run stay so, and the last one always trains.

    Args:
        layers: Regular expressions of the names of layers, from the lowest to the highest; None takes every module
            that has parameters of its own, in the order in which the model holds them.
    """

    asks_alone = False
    needs: ClassVar[Collection[str]] = ("freezing",)
    conflicts: ClassVar[Collection[str]] = ("LayerFreezing", "GradualUnfreezing")

    def __init__(self, layers: Sequence[str] | None = None) -> None:
        if isinstance(layers, str):
            raise ConfigError(f"`layers` must be a list of regular expressions, got {layers!r}.")
        self.layers: tuple[str, ...] | None = None if layers is None else tuple(layers)
        self._own: list[nn.Parameter] = []
        """What it has frozen."""

    def set_up(self, trainer: TrainerLike) -> None:
        """Thaw what an earlier run left frozen, and look for the layers.

        Raises:
            ConfigError: If there are fewer than two, it is not known how many updates the run has, or the same layers
                would be frozen in all of its epochs.
        """
        self._freeze([])
        share_of_run(trainer, type(self).__name__, 0)
        if len(found := self._layers(trainer.model)) < 2:
            raise ConfigError(
                f"{type(self).__name__} needs two layers at least, of which the last always trains, and found "
                f"{len(found)}. Name them in `layers`."
            )
        total, steps_per_epoch, changing = trainer.total_steps, trainer.steps_per_epoch, len(found) - 1
        starts = range(0, total, steps_per_epoch) if total and steps_per_epoch else range(0)
        counts = [self._count(changing, start / starts.stop) for start in starts]
        if counts and len(set(counts)) == 1:
            raise ConfigError(
                f"{type(self).__name__} chooses layers at the start of each epoch, and in each of the run's "
                f"{len(counts)} epochs it would freeze {counts[0]} of {changing}. Train for more epochs, or change its "
                "arguments."
            )

    def begin_epoch(self, trainer: TrainerLike) -> None:
        """Freeze the layers that are to be frozen in this epoch, and thaw the others."""
        progress, layers = trainer.progress, self._layers(trainer.model)
        # of a resumed run it may be the rest of an epoch
        done = share_of_run(trainer, type(self).__name__, progress.step - progress.step_in_epoch)
        kept = {id(one) for one in layers[-1]}
        frozen = [one for layer in layers[: self._count(len(layers) - 1, done)] for one in layer]
        self._freeze([one for one in frozen if id(one) not in kept])

    def _count(self, layers: int, done: float) -> int:
        """Return how many of these, which are all layers but the last, are to be frozen.

        Args:
            layers: How many there are.
            done: The share of the run that is done.
        """
        raise NotImplementedError

    def _freeze(self, parameters: list[nn.Parameter]) -> None:
        for one in self._own:
            one.requires_grad_(True)
        self._own = [one for one in parameters if one.requires_grad]
        for one in self._own:
            one.requires_grad_(False)

    def _layers(self, model: nn.Module) -> list[list[nn.Parameter]]:
        """Return the parameters of each layer, the lowest first."""
        if self.layers is None:
            own = [list(one.parameters(recurse=False)) for one in model.modules()]
        else:
            own = [self._named(model, pattern) for pattern in self.layers]
        return [layer for layer in own if layer]

    @staticmethod
    def _named(model: nn.Module, pattern: str) -> list[nn.Parameter]:
        found: list[Any] = [one for name, one in model.named_modules() if name and re.fullmatch(pattern, name)]
        if not found:
            names = ", ".join([name for name, _ in model.named_modules() if name][:20])
            raise ConfigError(f"`layers`: no module is called {pattern!r}. Those of the model are {names or 'none'}.")
        return [parameter for one in found for parameter in one.parameters()]
