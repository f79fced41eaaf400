"""Muon for hidden matrices and AdamW for the rest, as one optimizer.

Muon makes the update of a matrix nearly orthogonal (Jordan et al. 2024, kellerjordan.github.io/posts/muon). Here it is
scaled to the size of AdamW's, so that one learning rate and weight decay serve both (arXiv 2502.16982).
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from omnitrain.core.errors import ConfigError
from omnitrain.optim.optimizer_kwargs import IMPLEMENTATION, check_optimizer_kwargs, make_optimizer

logger: logging.Logger = logging.getLogger("omnitrain")


class Muon(Optimizer):
    """Steps its matrices by `torch.optim.Muon` and its other parameters by `torch.optim.AdamW`.

    Both are PyTorch's own, over this optimizer's groups and state.

    Args:
        matrices: The parameters for Muon, each of two dimensions.
        others: Those for AdamW.
        lr: The learning rate of both.
        weight_decay: The same.
        options: Other options, each for those of the two that take it, such as "betas" for AdamW.

    >>> layer = nn.Linear(4, 4)
    >>> optimizer = Muon([layer.weight], [layer.bias], lr=0.1)
    >>> layer(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> [list(optimizer.state[one]) for one in layer.parameters()]
    [['momentum_buffer'], ['step', 'exp_avg', 'exp_avg_sq']]
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        non_matrices: Iterable[nn.Parameter],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        options = options or {}
        check_optimizer_kwargs(options, torch.optim.Muon, torch.optim.AdamW)

        def groups_of(kind: Any, parameters: list[nn.Parameter], **defaults: Any) -> list[dict[str, Any]]:
            known = {name: options[name] for name in options if name in inspect.signature(kind).parameters}
            defaults = {"lr": lr, "weight_decay": weight_decay, **defaults}
            rates = {name: value for name, value in defaults.items() if name not in known}
            return make_optimizer(kind, parameters, rates, known).param_groups

        matrix_list, rest = list(matrices), list(non_matrices)
        groups = groups_of(torch.optim.Muon, matrix_list, adjust_lr_fn="match_rms_adamw")
        if rest:
            fused = (not IMPLEMENTATION & options.keys() and has_fused_kernel(rest)) or None
            groups = [*groups, *groups_of(torch.optim.AdamW, rest, fused=fused)]
        super().__init__(groups, {})

    @classmethod
    def of(cls, model: nn.Module, lr: float, weight_decay: float, options: Mapping[str, Any] | None = None) -> Muon:
        """Return the optimizer of a model's parameters that require gradients.

        Its matrices are those of two dimensions that are in no embedding, nor in the output layer: that which
        `get_output_embeddings()` names, or the last layer that has one.

        Raises:
            ConfigError: If it has none.
        """
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        outer = _outer(model)
        matrices = [parameter for _, parameter in trained if parameter.ndim == 2 and id(parameter) not in outer]
        if not matrices:
            raise ConfigError(
                "optimizer='muon' is for matrices that are neither embeddings nor the output layer, and "
                f"{type(model).__name__} has none of these that trains. Use 'adamw'."
            )
        matrix_ids = {id(parameter) for parameter in matrices}
        rest = [(name, parameter) for name, parameter in trained if id(parameter) not in matrix_ids]
        flat = [name for name, parameter in rest if parameter.ndim >= 2]
        logger.info(
            "Muon updates %d matrices, and AdamW the %d other parameters%s.", len(matrices), len(rest),
            f": vectors, and {', '.join(flat[:4])}{', ...' if flat[4:] else ''}" if flat else "",
        )  # fmt: skip
        return cls(matrices, [parameter for _, parameter in rest], lr, weight_decay, options)

    def stepping(self, group: Mapping[str, Any]) -> type[Optimizer]:
        """Return the class of PyTorch that steps a group."""
        return torch.optim.Muon if "ns_steps" in group else torch.optim.AdamW

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters; return what `closure` does, if there is one, which is called before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            kind = self.stepping(group)
            with_gradients = [parameter for parameter in group["params"] if parameter.grad is not None]
            sharded = [parameter for parameter in with_gradients if hasattr(parameter, "full_tensor")]
            if kind is torch.optim.AdamW or not sharded:
                self._step(kind, group, self.state)
            else:
                for parameter in sharded:
                    self._step_whole(parameter, group)
        return loss

    def _step(self, kind: Any, group: dict[str, Any], state: Any) -> None:
        part: Any = object.__new__(kind)
        vars(part).update(vars(self))
        part.param_groups, part.state = [group], state
        inspect.unwrap(kind.step)(part)  # without what wraps it, which would call this optimizer's hooks once more

    def _step_whole(self, parameter: Any, group: dict[str, Any]) -> None:
        """Update a matrix whose rows are on several ranks as a whole, on each of them, so that no digit differs.

        Its shards have other directions, and PyTorch's sharded matrix products round their sums.
        """
        from torch.distributed.tensor import distribute_tensor

        def part_of(tensor: torch.Tensor) -> Any:
            return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)

        stand_in = nn.Parameter(parameter.full_tensor())
        stand_in.grad = parameter.grad.full_tensor()
        state: dict[Any, dict[str, Any]] = defaultdict(dict)
        state[stand_in] = {name: value.full_tensor() for name, value in self.state.get(parameter, {}).items()}
        self._step(torch.optim.Muon, {**group, "params": [stand_in]}, state)
        parameter.copy_(part_of(stand_in.detach()))
        self.state[parameter] = {name: part_of(value).clone() for name, value in state[stand_in].items()}


def has_fused_kernel(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether PyTorch updates all of these in one kernel: it looks only in the first step, and then raises."""
    meshes = {getattr(parameter, "device_mesh", None) for parameter in parameters}
    return len(meshes) <= 1 and all(
        parameter.is_floating_point() and parameter.device.type in _FUSED_DEVICES for parameter in parameters
    )


_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def _outer(model: nn.Module) -> set[int]:
    """Return the parameters of a model's embeddings and output layer, by identity."""
    direct = {module: module.parameters(recurse=False) for module in model.modules()}
    layers = [module for module, parameters in direct.items() if any(parameter.ndim == 2 for parameter in parameters)]
    embeddings = [module for module in layers if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    find: Any = getattr(model, "get_output_embeddings", None)  # of models of transformers
    head = find() if callable(find) else None
    matrices = [module for module in layers if module not in embeddings]
    output = [head] if isinstance(head, nn.Module) else matrices[-1:]
    return {id(parameter) for module in [*embeddings, *output] for parameter in module.parameters()}
