"""StraightThrough: rounded weights in forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from omnitrain.algorithms.weights import full_tensor, local_part, matching, parameters_by_name, patterns_of
from omnitrain.checkpoint.tensor_files import shard_like
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Algorithm, TrainerLike


class StraightThrough(Algorithm):
    """Trains with `function(weight)` in place of weights: a straight-through estimator.

    Forward and backward passes run on `function(weight)`; its gradients update the weights themselves
    (arXiv:1308.3432). Evaluations, `model.safetensors` and the end of the run have `function(weight)`; the weights
    themselves are saved next to it, in `trained.safetensors`.

    Args:
        function: Called with a full weight without a gradient; returns a tensor of its shape, deterministically. It is
            called once for each weight in a step, and in each evaluation.
        match: Regular expressions; parameters in whose names one of them is found match. None is every parameter
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
        self.match: tuple[str, ...] | None = patterns_of("match", match)
        self._names: list[str] = []
        # Local parts of parameters with the values to restore, while a step runs its passes.
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def set_up(self, trainer: TrainerLike) -> None:
        self._restore()  # after a failed step
        if trainer.settings.microbatch_size == "auto":
            raise ConfigError(
                "`algorithms` holds StraightThrough, which cannot run a step again if memory runs out, and "
                "`microbatch_size='auto'`. Pass a number."
            )
        self._names = matching(trainer.model, self.match, "StraightThrough")

    def transform_batch(self, trainer: TrainerLike, batch: Any) -> Any:
        if not self._saved:
            live = parameters_by_name(trainer.model)
            self._saved = [(weight := local_part(live[name]), weight.clone()) for name in self._names]
            for (weight, _), name in zip(self._saved, self._names, strict=True):
                weight.copy_(local_part(self._transform(live[name], name)))
        return batch

    def before_update(self, trainer: TrainerLike) -> None:
        self._restore()

    def transform_weights(self, trainer: TrainerLike, weights: Mapping[str, Any]) -> dict[str, Any]:
        self._restore()  # after a step that made no update
        return {**weights, **{name: self._transform(weights[name], name) for name in self._names if name in weights}}

    @torch.no_grad()
    def _transform(self, weight: Any, name: str) -> torch.Tensor:
        """Return `function(weight)`, sharded like the weight."""
        full_weight = full_tensor(weight).clone()
        transformed = self.function(full_weight)
        if not isinstance(transformed, torch.Tensor) or transformed.shape != full_weight.shape:
            raise ConfigError(
                f"`function` of StraightThrough must return a tensor of the shape of its argument, "
                f"{tuple(full_weight.shape)} for {name!r}, got {transformed!r:.80}."
            )
        return shard_like(transformed.to(full_weight.dtype), weight)

    def _restore(self) -> None:
        for weight, saved in self._saved:
            weight.copy_(saved)
        self._saved = []
