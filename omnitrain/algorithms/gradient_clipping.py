"""GradientClipping: by value, or adaptively to the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from omnitrain.algorithms.weights import local_part, patterns_of
from omnitrain.core.errors import ConfigError, check_number
from omnitrain.core.events import Algorithm, TrainerLike
from omnitrain.core.foreign_names import explain_call
from omnitrain.optim.param_groups import find_matches
from omnitrain.optim.sparse_gradients import stored_rows, stored_values

# Lower bound on the norm of a unit's weights, so that units that start at zero can train.
_MIN_WEIGHT_NORM = 1e-3


class GradientClipping(Algorithm):
    """Clips gradients by value or adaptively, in place of `max_grad_norm`; their norm before that is logged.

    "value" limits each entry to between `-limit` and `limit`. "adaptive" limits the norm of each unit's gradient to
    `limit` times the norm of its weights (AGC, arXiv:2102.06171); a unit is the weights of one output: all dimensions
    but the first, and a full vector.

    Args:
        kind: "value" or "adaptive".
        limit: The limit.
        exclude: Regular expressions of names of parameters that are not clipped; the paper excludes the last layer.

    Raises:
        ConfigError: If an argument is wrong; before the first step, together with `max_grad_norm`, or under DeepSpeed.

    >>> GradientClipping("adaptive", 0.01).kind
    'adaptive'
    """

    asks_alone = False

    @explain_call
    def __init__(self, kind: Literal["value", "adaptive"], limit: float, exclude: Sequence[str] = ()) -> None:
        if kind not in ("value", "adaptive"):
            raise ConfigError(f"`kind` must be 'value' or 'adaptive', got {kind!r}. `max_grad_norm` clips by norm.")
        check_number("limit", limit, above=0)
        self.kind = kind
        self.limit = limit
        self.exclude: tuple[str, ...] = patterns_of("exclude", exclude) or ()
        self._clipped: list[Any] = []

    def set_up(self, trainer: TrainerLike) -> None:
        norm = trainer.settings.max_grad_norm
        if norm is not None:
            raise ConfigError(
                f"`algorithms` holds GradientClipping, and `max_grad_norm={norm}` clips as well. "
                "Pass max_grad_norm=None; the norm is still logged."
            )
        parameters = dict(trainer.model.named_parameters())
        excluded = find_matches("`exclude`", self.exclude, parameters.items())
        self._clipped = [parameter for name, parameter in parameters.items() if name not in excluded]

    begin_epoch = set_up

    @torch.no_grad()
    def before_update(self, trainer: TrainerLike) -> None:
        parameters = [parameter for parameter in self._clipped if parameter.grad is not None]
        if self.kind == "value":
            for parameter in parameters:
                stored_values(local_part(parameter.grad)).clamp_(-self.limit, self.limit)
            return
        for parameter in parameters:
            max_norms = _unit_norms(stored_rows(parameter, parameter.grad)).clamp(min=_MIN_WEIGHT_NORM) * self.limit
            norms = _unit_norms(stored_values(parameter.grad))
            factors = torch.where(norms > max_norms, max_norms / norms, 1.0).to(parameter.grad.dtype)
            if not hasattr(parameter.grad, "redistribute"):
                stored_values(parameter.grad).mul_(factors)
            else:  # a DTensor cannot be multiplied in place by one of other placements
                parameter.grad = (parameter.grad * factors).redistribute(placements=parameter.grad.placements)


def _unit_norms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm of each unit, in a shape that broadcasts to the tensor."""
    tensor = tensor.detach()
    return torch.linalg.vector_norm(tensor, dim=tuple(range(min(1, tensor.dim() - 1), tensor.dim())), keepdim=True)
