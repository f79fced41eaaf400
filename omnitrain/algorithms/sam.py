"""SAM: sharpness-aware minimization."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import nn

from omnitrain.algorithms.weights import local_part
from omnitrain.core.errors import ConfigError, check_number
from omnitrain.core.events import Algorithm, TrainerLike
from omnitrain.optim.sparse_gradients import coalesce


class SAM(Algorithm):
    """Updates by the gradient at `weights + rho * gradient / |gradient|`, for flat minima (arXiv:2010.01412).

    Each step runs its micro-batches twice, and takes twice as long. The loss that is logged is that of the first pass,
    the norm of the gradients that of the second. BatchNorm counts both in its statistics, and dropout draws new masks.

    Args:
        rho: Distance from the weights at which the second gradient is computed.

    Raises:
        ConfigError: If `rho` is not positive; before the first step, under DeepSpeed or with `microbatch_size="auto"`.

    >>> SAM(rho=0.1).rho
    0.1
    """

    asks_alone = False
    conflicts: ClassVar[Collection[str]] = ("SAM",)

    def __init__(self, rho: float = 0.05) -> None:
        check_number("rho", rho, above=0)
        self.rho = rho
        # Weights with their values before the second pass.
        self._saved: list[tuple[Any, torch.Tensor]] = []

    def set_up(self, trainer: TrainerLike) -> None:
        if trainer.settings.microbatch_size == "auto":
            raise ConfigError(
                "`algorithms` holds SAM, whose second pass cannot run again if memory runs out, and "
                "`microbatch_size='auto'`. Pass a number."
            )

    @torch.no_grad()
    def before_second_pass(self, trainer: TrainerLike) -> None:
        parameters: list[Any] = [parameter for parameter in trainer.model.parameters() if parameter.grad is not None]
        norm: Any = nn.utils.get_total_norm(coalesce(parameters))
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        factor = self.rho / norm.clamp(min=1e-12)
        self._saved = [(weight := local_part(parameter), weight.clone()) for parameter in parameters]
        for (weight, _), parameter in zip(self._saved, parameters, strict=True):
            weight.add_(local_part(parameter.grad) * factor.to(weight.dtype))

    def after_second_pass(self, trainer: TrainerLike) -> None:
        for weight, saved in self._saved:
            weight.copy_(saved)
        self._saved = []
