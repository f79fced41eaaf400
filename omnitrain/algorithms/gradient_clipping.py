"""GradientClipping: by value, or adaptively to the weights (Brock et al., 2021, arXiv:2102.06171)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import torch

from omnitrain.algorithms.weights import local_part
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Algorithm, TrainerLike
from omnitrain.optim.param_groups import not_found
from omnitrain.optim.sparse_gradients import stored_rows, stored_values

_LEAST = 1e-3
"""What the norm of a unit's weights counts at least, so that those that begin at zero can train."""


class GradientClipping(Algorithm):
    """Clips gradients in another way than by their norm, which `max_grad_norm` does; the norm before is still logged.

    "value" limits each entry to between `-limit` and `limit`. "adaptive" limits the norm of each unit's gradient to
    `limit` times the norm of its weights (AGC, arXiv:2102.06171); a unit is what leads to one output: all but the first
    dimension, and a vector as a whole.

    Args:
        kind: "value" or "adaptive".
        limit: The limit.
        exclude: Regular expressions of names of parameters that are left alone; the paper leaves out the last layer.

    Raises:
        ConfigError: If an argument is wrong; before the first step, beside `max_grad_norm`, or under DeepSpeed.

    >>> GradientClipping("adaptive", 0.01).kind
    'adaptive'
    """

    asks_alone = False

    def __init__(self, kind: Literal["value", "adaptive"], limit: float, exclude: Sequence[str] = ()) -> None:
        if kind not in ("value", "adaptive"):
            raise ConfigError(
                f"`kind` must be 'value' or 'adaptive', got {kind!r}. By their norm, `max_grad_norm` clips."
            )
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < float("inf"):
            raise ConfigError(f"`limit` must be a positive number, got {limit!r}.")
        if isinstance(exclude, str):
            raise ConfigError(f"`exclude` must be a list of regular expressions, got {exclude!r}.")
        self.kind = kind
        self.limit = limit
        self.exclude: tuple[str, ...] = tuple(exclude)
        self._clipped: list[Any] = []

    def set_up(self, trainer: TrainerLike) -> None:
        """Refuse to clip twice.

        Raises:
            ConfigError: If `max_grad_norm` is set, or a pattern matches no parameter.
        """
        norm = trainer.settings.max_grad_norm
        if norm is not None:
            raise ConfigError(
                f"`algorithms` holds GradientClipping, and `max_grad_norm={norm}` clips as well. "
                "Pass max_grad_norm=None; the norm is logged all the same."
            )
        named = list(trainer.model.named_parameters())
        for pattern in self.exclude:
            if not any(re.search(pattern, name) for name, _ in named):
                raise not_found("`exclude`", pattern, named)

    def begin_epoch(self, trainer: TrainerLike) -> None:
        """List the parameters."""
        named = trainer.model.named_parameters()
        self._clipped = [one for name, one in named if not any(re.search(pattern, name) for pattern in self.exclude)]

    @torch.no_grad()
    def before_update(self, trainer: TrainerLike) -> None:
        """Clip the gradients."""
        held = [one for one in self._clipped if one.grad is not None]
        if self.kind == "value":
            for one in held:
                stored_values(local_part(one.grad)).clamp_(-self.limit, self.limit)
            return
        for one in held:
            most = _unit_norms(stored_rows(one, one.grad)).clamp(min=_LEAST) * self.limit
            norms = _unit_norms(stored_values(one.grad))
            factors = torch.where(norms > most, most / norms, 1.0).to(one.grad.dtype)
            if not hasattr(one.grad, "redistribute"):
                stored_values(one.grad).mul_(factors)
            else:  # sharded; in place it cannot be multiplied by what lies in another way
                one.grad = (one.grad * factors).redistribute(placements=one.grad.placements)


def _unit_norms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm of each unit, shaped so that the tensor can be multiplied by it."""
    tensor = tensor.detach()
    return torch.linalg.vector_norm(tensor, dim=tuple(range(min(1, tensor.dim() - 1), tensor.dim())), keepdim=True)
