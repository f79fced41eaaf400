"""StraightThrough: passes run on rounded weights, updates go to full ones (Bengio et al., 2013, arXiv:1308.3432)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from omnitrain.algorithms.weights import local_part, matching, parameters_by_name, patterns_of, whole_tensor
from omnitrain.checkpoint.tensor_files import shard_like
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Algorithm, TrainerLike


class StraightThrough(Algorithm):
    """Trains with `function(weight)` in place of weights, for low precision: a straight-through estimator.

    Forward and backward passes run on what `function` makes of the weights; the gradients, taken there, update the
    weights themselves, as if it changed nothing (arXiv:1308.3432). Evaluations, `model.safetensors` and the end of the
    run have what `function` makes of them; the weights themselves are beside it, in `trained.safetensors`.

    Args:
        function: Called with a weight, whole and without a gradient; returns a tensor of its shape, and the same one
            for the same weight each time. It is called once for each weight in a step, and in each evaluation.
        match: Regular expressions; parameters in whose names one of them is found are meant. None is every parameter
            that trains and has two dimensions or more.

    Raises:
        ConfigError: If an argument is wrong; before the first step, if no parameter matches, under DeepSpeed, for
            weights of 16 bits, or with `microbatch_size="auto"`.

    >>> rounding = StraightThrough(lambda weight: (weight * 8).round() / 8, match=["weight"])
    >>> rounding.match
    ('weight',)
    """

    asks_alone = False

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], match: Sequence[str] | None = None) -> None:
        if not callable(function):
            raise ConfigError(f"`function` of StraightThrough must be callable, got {function!r}.")
        self.function: Callable[[torch.Tensor], torch.Tensor] = function
        self.match: tuple[str, ...] | None = patterns_of(match)
        self._names: list[str] = []
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters, each as this rank has it, and the values to put back, while a step runs its passes."""

    def set_up(self, trainer: TrainerLike) -> None:
        """Put back what a step that failed has left, and look for the parameters.

        Raises:
            ConfigError: If there are none, or `microbatch_size` is "auto".
        """
        self._put_back()
        if trainer.settings.microbatch_size == "auto":
            raise ConfigError(
                "`algorithms` holds StraightThrough, which cannot begin a step anew where memory runs out, and "
                "`microbatch_size='auto'`. Pass a number."
            )
        self._names = matching(trainer.model, self.match, "StraightThrough")

    def transform_batch(self, trainer: TrainerLike, batch: Any) -> Any:
        """Return the batch as it is; before the first one of a step, change the weights."""
        if not self._kept:
            live = parameters_by_name(trainer.model)
            self._kept = [(own := local_part(live[name]), own.clone()) for name in self._names]
            for (own, _), name in zip(self._kept, self._names, strict=True):
                own.copy_(local_part(self._made(live[name], name)))
        return batch

    def before_update(self, trainer: TrainerLike) -> None:
        """Put the weights back, which the update changes."""
        self._put_back()

    def transform_weights(self, trainer: TrainerLike, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the function makes of the weights."""
        self._put_back()  # after a step that made no update
        return {**weights, **{name: self._made(weights[name], name) for name in self._names if name in weights}}

    @torch.no_grad()
    def _made(self, weight: Any, name: str) -> torch.Tensor:
        """Return what the function makes of a weight, sharded as that is."""
        given = whole_tensor(weight).clone()
        made = self.function(given)
        if not isinstance(made, torch.Tensor) or made.shape != given.shape:
            raise ConfigError(
                f"`function` of StraightThrough must return a tensor of the shape of its argument, "
                f"{tuple(given.shape)} for {name!r}, got {made!r:.80}."
            )
        return shard_like(made.to(given.dtype), weight)

    def _put_back(self) -> None:
        for own, kept in self._kept:
            own.copy_(kept)
        self._kept = []
