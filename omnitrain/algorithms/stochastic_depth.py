"""StochasticDepth: some layers of a deep network are left out of each step (Huang et al., 2016, arXiv:1603.09382)."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from omnitrain.compute.random_state import derive_seed
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Algorithm, TrainerLike


class StochasticDepth(Algorithm):
    """Leaves layers out at random, another choice in each step, as a regularizer (arXiv:1603.09382).

    A layer is a module whose output is its input plus something, of the same shape. In a step for which it is left out,
    its output is its input; otherwise what it adds is divided by the share of steps that it is kept in, so that
    evaluations run on the model as it is. The choice is the same for all samples of a step, and follows from the seed
    and the number of the step alone. All layers are computed: it saves no time.

    Args:
        layers: Regular expressions of the whole names of modules, or classes of modules.
        drop_rate: The share of steps that the last layer is left out of.
        distribution: "linear": the rate rises layer by layer up to `drop_rate`; "uniform": it is that of each.

    Raises:
        ConfigError: If an argument is wrong; before the first step, if there is no such module; in the first step, if a
            module gives another shape than it takes.

    >>> StochasticDepth(["layers.[0-9]+"], drop_rate=0.5).rates(2)
    [0.25, 0.5]
    """

    asks_alone = False

    def __init__(
        self,
        layers: Sequence[str | type[nn.Module]],
        drop_rate: float = 0.2,
        distribution: Literal["linear", "uniform"] = "linear",
    ) -> None:
        if isinstance(layers, (str, type)) or not all(isinstance(one, (str, type)) for one in layers):
            raise ConfigError(f"`layers` must be a list of regular expressions and classes, got {layers!r}.")
        if isinstance(drop_rate, bool) or not isinstance(drop_rate, (int, float)) or not 0 < drop_rate < 1:
            raise ConfigError(f"`drop_rate` must be a number between 0 and 1, got {drop_rate!r}.")
        if distribution not in ("linear", "uniform"):
            raise ConfigError(f"`distribution` must be 'linear' or 'uniform', got {distribution!r}.")
        self.layers: tuple[str | type[nn.Module], ...] = tuple(layers)
        self.drop_rate: float = drop_rate
        self.distribution: Literal["linear", "uniform"] = distribution
        self._handles: list[Any] = []
        self._factors: torch.Tensor = torch.ones(0)
        """What is multiplied with that which each layer adds, in the present step."""
        self._step = -1

    def rates(self, layers: int) -> list[float]:
        """Return the share of steps that each of so many layers is left out of."""
        if self.distribution == "uniform":
            return [self.drop_rate] * layers
        return [self.drop_rate * (number + 1) / layers for number in range(layers)]

    def set_up(self, trainer: TrainerLike) -> None:
        """Look for the layers.

        Raises:
            ConfigError: If one of `layers` is not there.
        """
        self.end_run(trainer)
        self._found(trainer.model)

    def _found(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the layers by name, in the order in which the model holds them."""
        modules, found = dict(model.named_modules()), set[str]()
        for one in self.layers:
            if isinstance(one, type):
                own = [name for name, module in modules.items() if isinstance(module, one)]
            else:
                own = [name for name in modules if name and re.fullmatch(one, name)]
            if not own:
                what = f"is a {one.__name__}" if isinstance(one, type) else f"is called {one!r}"
                names = ", ".join([name for name in modules if name][:20])
                raise ConfigError(f"`layers` of StochasticDepth: no module {what}. Those of the model are {names}.")
            found.update(own)
        return {name: module for name, module in modules.items() if name in found}

    def _begin(self, trainer: TrainerLike) -> None:
        """Put hooks on the layers, until the run ends."""
        layers = self._found(trainer.model)
        self._factors, self._step = torch.ones(len(layers), device=trainer.device), -1
        for number, (name, layer) in enumerate(layers.items()):
            hook = functools.partial(self._leave_out, number, name)
            self._handles.append(layer.register_forward_hook(hook, with_kwargs=True))

    def end_run(self, trainer: TrainerLike) -> None:
        """Take the hooks off the layers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def transform_batch(self, trainer: TrainerLike, batch: Any) -> Any:
        """Return the batch as it is; before the first one of a step, choose the layers."""
        if not self._handles:
            self._begin(trainer)
        step = trainer.progress.step + trainer.progress.skipped_steps
        if step != self._step:
            self._step = step
            kept = [1 - rate for rate in self.rates(len(self._factors))]
            draws = [derive_seed(trainer.seed, _DEPTH, step, number) / 2**64 for number in range(len(kept))]
            self._factors.copy_(torch.tensor([(u < one) / one for u, one in zip(draws, kept, strict=True)]))
        return batch

    def _leave_out(self, number: int, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Return the output of a layer for a step: its input alone, or with more of what it adds."""
        if not module.training:
            return output
        taken = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
        given = output[0] if isinstance(output, tuple) else output
        if taken is None or not isinstance(given, torch.Tensor) or taken.shape != given.shape:
            raise ConfigError(
                f"`layers` of StochasticDepth: {name!r} gives another shape than it takes, so it cannot be left out. "
                "Name modules whose output is their input plus something."
            )
        made = (taken + (given - taken) * self._factors[number]).to(given.dtype)
        return (made, *output[1:]) if isinstance(output, tuple) else made


_DEPTH = 0xDE9
"""Sets these draws apart from others that go by the same seed."""
