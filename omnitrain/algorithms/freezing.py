"""Freezing of layers, from the bottom up or from the top down."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from torch import nn

from omnitrain.algorithms.weights import patterns_of
from omnitrain.compute.activation_checkpointing import find_modules
from omnitrain.core.errors import ConfigError, check_number
from omnitrain.core.events import Algorithm, TrainerLike, share_of_run


class Freezing(Algorithm):
    """Freezes the lower layers of a model, as many as the share of the run's updates says, at the start of epochs.

    A frozen layer requires no gradient; its optimizer state stays unchanged until it trains again. Layers
    that were frozen before the run stay so, and the last one always trains.
    """

    asks_alone = False
    needs: ClassVar[Collection[str]] = ("freezing",)
    conflicts: ClassVar[Collection[str]] = ("LayerFreezing", "GradualUnfreezing")

    def __init__(self, layers: Sequence[str] | None = None) -> None:
        self.layers: tuple[str, ...] | None = patterns_of("layers", layers)
        self._frozen: list[nn.Parameter] = []

    def set_up(self, trainer: TrainerLike) -> None:
        self._freeze([])
        share_of_run(trainer, type(self).__name__, 0)
        if len(layers := self._layers(trainer.model)) < 2:
            raise ConfigError(
                f"{type(self).__name__} needs at least two layers, of which the last always trains, and found "
                f"{len(layers)}. Name them in `layers`."
            )
        total, steps_per_epoch, changing = trainer.total_steps, trainer.steps_per_epoch, len(layers) - 1
        starts = range(0, total, steps_per_epoch) if total and steps_per_epoch else range(0)
        counts = [self._count(changing, start / starts.stop) for start in starts]
        if counts and len(set(counts)) == 1:
            raise ConfigError(
                f"{type(self).__name__} chooses layers at the start of each epoch, and in each of the run's "
                f"{len(counts)} epochs it would freeze {counts[0]} of {changing}. Train for more epochs, or change its "
                "arguments."
            )

    def begin_epoch(self, trainer: TrainerLike) -> None:
        progress, layers = trainer.progress, self._layers(trainer.model)
        # a resumed run may begin in mid-epoch
        done = share_of_run(trainer, type(self).__name__, progress.step - progress.step_in_epoch)
        trained = {id(parameter) for parameter in layers[-1]}
        frozen = [parameter for layer in layers[: self._count(len(layers) - 1, done)] for parameter in layer]
        self._freeze([parameter for parameter in frozen if id(parameter) not in trained])

    def _count(self, layers: int, done: float) -> int:
        """Return how many of so many layers, without the last, to freeze after this share of the run."""
        raise NotImplementedError

    def _freeze(self, parameters: list[nn.Parameter]) -> None:
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in self._frozen:
            parameter.requires_grad_(False)

    def _layers(self, model: nn.Module) -> list[list[nn.Parameter]]:
        if self.layers is None:
            layers = [list(module.parameters(recurse=False)) for module in model.modules()]
        else:
            matches = [find_modules(model, pattern, "`layers`").values() for pattern in self.layers]
            layers = [[parameter for module in modules for parameter in module.parameters()] for modules in matches]
        return [layer for layer in layers if layer]


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
        check_number("freeze_start", freeze_start, least=0, below=1)
        check_number("freeze_level", freeze_level, above=0, most=1)
        self.freeze_start = freeze_start
        self.freeze_level = freeze_level

    def _count(self, layers: int, done: float) -> int:
        passed = max(done - self.freeze_start, 0) / (1 - self.freeze_start)
        return int(layers * self.freeze_level * passed + 1e-9)


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
        check_number("until", until, above=0, most=1)
        self.until = until

    def _count(self, layers: int, done: float) -> int:
        return layers - int(layers * min(done / self.until, 1) + 1e-9)
