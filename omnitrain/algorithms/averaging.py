"""What averages of the weights have in common: one beside each weight that trains, which evaluations and files have.

How an average is formed, and when, is in the file of each algorithm.
"""

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
    weights in training are beside them in `trained.safetensors`. Buffers, such as the statistics of BatchNorm, stay
    those of training.

    Args:
        update: Brings averages up to the present weights; gets both, and how many states are in the averages already.
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
            ConfigError: Under ZeRO 3, whose weights lie in parts in DeepSpeed's own buffers.
        """
        if any(hasattr(one, "ds_id") for one in trainer.model.parameters()):
            raise ConfigError(
                f"`algorithms` holds {type(self).__name__}, which cannot average weights under ZeRO 3: they lie in "
                "parts, in buffers of DeepSpeed's own. Use ZeRO 1 or 2, or FSDP."
            )
        self.count, self._averages, self._pairs = 0, {}, ([], [])

    def _join(self, trainer: TrainerLike) -> None:
        """Begin an average of each parameter that trains and has none, at the present weight."""
        for name, one in trainer.model.named_parameters():
            if one.requires_grad and one.is_floating_point() and bare_name(name) not in self._averages:
                self._averages[bare_name(name)] = _copied(one)
        self._pair(trainer)

    def _pair(self, trainer: TrainerLike) -> None:
        """List averages and weights side by side, each as this rank has it."""
        live = {bare_name(name): one for name, one in trainer.model.named_parameters()}
        names = [name for name in self._averages if name in live]
        self._pairs = [local_part(self._averages[name]) for name in names], [live[name] for name in names]

    def _add(self) -> None:
        """Bring the averages up to the present weights."""
        averages, weights = self._pairs
        pairs = zip(averages, weights, strict=True)
        if averages:
            self._update(averages, [local_part(one).to(average.dtype) for average, one in pairs], self.count)
        self.count += 1

    def transform_weights(self, trainer: TrainerLike, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return the weights with averages in place of those that have one."""
        return {name: self._averages.get(name, one) for name, one in weights.items()}

    def restore_weights(self, trainer: TrainerLike, weights: Mapping[str, Any]) -> None:
        """Take the averages of a checkpoint over."""
        live = {bare_name(name): one for name, one in trainer.model.named_parameters()}
        self._averages = {name: _copied(weights[name], live[name]) for name in weights}
        self._pair(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return how many states of the weights are in the average; the averages are among the model's files."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.count = int(state["count"])


def _copied(tensor: Any, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return a copy of a weight on the device, in 32 bits at least."""
    if like is not None and not isinstance(tensor, torch.Tensor):  # it is put together from all ranks
        return gather_to_host(tensor).to(like.device)
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.clone()
