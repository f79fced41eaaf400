"""StochasticDepth: random layers are skipped in each step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from omnitrain.compute.activation_checkpointing import find_modules
from omnitrain.compute.random_state import derive_seed
from omnitrain.core.errors import ConfigError, check_choice, check_number
from omnitrain.core.events import Algorithm, TrainerLike


class StochasticDepth(Algorithm):
    """Skips random layers, others in each step, as a regularizer (arXiv:1603.09382).

    A layer is a module whose output is its input plus something, of the same shape. In a step that skips it, its
    output is its input; otherwise what it adds is divided by the share of steps that keep it, so that evaluations run
    on the unchanged model. The choice is the same for all samples of a step, and depends only on the seed and the
    number of the step. All layers are computed: it saves no time.

    Args:
        layers: Regular expressions of the full names of modules, or classes of modules.
        drop_rate: The share of steps that skip the last layer.
        distribution: "linear": the rate rises layer by layer up to `drop_rate`; "uniform": it is the same for all.

    Raises:
        ConfigError: If an argument is wrong; before the first step, if there is no such module; in the first step, if a
            module changes the shape of its input.

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
        if isinstance(layers, (str, type)) or not all(isinstance(layer, (str, type)) for layer in layers):
            raise ConfigError(f"`layers` must be a list of regular expressions and classes, got {layers!r}.")
        check_number("drop_rate", drop_rate, above=0, below=1)
        check_choice("distribution", distribution, ("linear", "uniform"))
        self.layers: tuple[str | type[nn.Module], ...] = tuple(layers)
        self.drop_rate: float = drop_rate
        self.distribution: Literal["linear", "uniform"] = distribution
        self._handles: list[Any] = []
        # Factors of what each layer adds in the current step, of shape (layers,).
        self._factors: torch.Tensor = torch.ones(0)
        self._step = -1

    def rates(self, layers: int) -> list[float]:
        """Return the share of steps that skip each layer, for so many layers."""
        if self.distribution == "uniform":
            return [self.drop_rate] * layers
        return [self.drop_rate * (number + 1) / layers for number in range(layers)]

    def set_up(self, trainer: TrainerLike) -> None:
        self.end_run(trainer)
        self._matching_layers(trainer.model)

    def _matching_layers(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the layers by name, in the order of the model."""
        selected = dict[str, nn.Module]()
        for layer in self.layers:
            selected |= find_modules(model, layer, "`layers` of StochasticDepth")
        return {name: module for name, module in model.named_modules() if name in selected}

    def end_run(self, trainer: TrainerLike) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def transform_batch(self, trainer: TrainerLike, batch: Any) -> Any:
        if not self._handles:
            layers = self._matching_layers(trainer.model)
            self._factors, self._step = torch.ones(len(layers), device=trainer.device), -1
            for number, (name, layer) in enumerate(layers.items()):
                hook = functools.partial(self._skip_or_scale, number, name)
                self._handles.append(layer.register_forward_hook(hook, with_kwargs=True))
        step = trainer.progress.step + trainer.progress.skipped_steps
        if step != self._step:
            self._step = step
            keep_rates = [1 - rate for rate in self.rates(len(self._factors))]
            draws = [derive_seed(trainer.seed, _STREAM, step, number) / 2**64 for number in range(len(keep_rates))]
            factors = [(draw < rate) / rate for draw, rate in zip(draws, keep_rates, strict=True)]
            self._factors.copy_(torch.tensor(factors))
        return batch

    def _skip_or_scale(self, number: int, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Return only the input of a layer, or its output with a scaled residual; a forward hook."""
        if not module.training:
            return output
        residual = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        hidden = output[0] if isinstance(output, tuple) else output
        if residual is None or not isinstance(hidden, torch.Tensor) or residual.shape != hidden.shape:
            raise ConfigError(
                f"`layers` of StochasticDepth: {name!r} changes the shape of its input, so it cannot be skipped. "
                "Name modules whose output is their input plus something."
            )
        scaled = (residual + (hidden - residual) * self._factors[number]).to(hidden.dtype)
        return (scaled, *output[1:]) if isinstance(output, tuple) else scaled


# Separates these random numbers from others of the same seed.
_STREAM = 0xDE9
