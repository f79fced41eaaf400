"""Base class for weight averaging."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from omnitrain.algorithms.weights import local_part
from omnitrain.checkpoint.state_dicts import bare_name
from omnitrain.checkpoint.tensor_files import gather_to_host
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Algorithm, TrainerLike


class WeightAverage(Algorithm):
    """Keeps an average of every parameter that requires a gradient, laid out as the parameter is.

    Evaluations run on the averages, `model.safetensors` of a checkpoint holds them, and the run ends with them; the
    weights in training are saved next to them, in `trained.safetensors`. Buffers, such as the statistics of BatchNorm,
    stay those of training.

    Args:
        update: Updates averages in place; called with averages, weights, and the number of averaged states.
    """

    asks_alone = False

    def __init__(self, update: Callable[[list[torch.Tensor], list[torch.Tensor], int], None]) -> None:
        self._update = update
        self.count: int = 0
        """How many states of the weights are in the average."""
        self._averages: dict[str, torch.Tensor] = {}
        self._pairs: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    def set_up(self, trainer: TrainerLike) -> None:
        """Forget the averages of an earlier run.

        Raises:
            ConfigError: Under ZeRO 3, which shards the weights in buffers of DeepSpeed.
        """
        if any(hasattr(parameter, "ds_id") for parameter in trainer.model.parameters()):
            raise ConfigError(
                f"`algorithms` holds {type(self).__name__}, which cannot average weights under ZeRO 3, "
                "which shards them in buffers of DeepSpeed. Use ZeRO 1 or 2, or FSDP."
            )
        self.count, self._averages, self._pairs = 0, {}, ([], [])

    def _add_parameters(self, trainer: TrainerLike) -> None:
        """Start an average, at the current weight, of each trained parameter without one."""
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad and parameter.is_floating_point() and bare_name(name) not in self._averages:
                self._averages[bare_name(name)] = _copy(parameter)
        self._pair(trainer)

    def _pair(self, trainer: TrainerLike) -> None:
        """Pair the local parts of averages and weights."""
        live = {bare_name(name): parameter for name, parameter in trainer.model.named_parameters()}
        names = [name for name in self._averages if name in live]
        self._pairs = [local_part(self._averages[name]) for name in names], [live[name] for name in names]

    def _update_averages(self) -> None:
        averages, weights = self._pairs
        pairs = zip(averages, weights, strict=True)
        if averages:
            self._update(averages, [local_part(weight).to(average.dtype) for average, weight in pairs], self.count)
        self.count += 1

    def transform_weights(self, trainer: TrainerLike, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return the weights, replaced by their averages where there are any."""
        return {name: self._averages.get(name, weight) for name, weight in weights.items()}

    def restore_weights(self, trainer: TrainerLike, weights: Mapping[str, Any]) -> None:
        """Restore the averages of a checkpoint."""
        live = {bare_name(name): parameter for name, parameter in trainer.model.named_parameters()}
        self._averages = {name: _copy(weights[name], live[name]) for name in weights}
        self._pair(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return how many states of the weights are in the average; the averages are among the model's files."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.count = int(state["count"])


def _copy(tensor: Any, like: torch.Tensor | None = None) -> torch.Tensor:
    """Copy a weight to the device, in at least 32 bits."""
    if like is not None and not isinstance(tensor, torch.Tensor):  # gathered lazily from all ranks
        return gather_to_host(tensor).to(like.device)
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.clone()
