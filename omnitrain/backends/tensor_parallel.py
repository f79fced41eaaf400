"""The backend for tensor parallelism.

Layers are sharded over the ranks of a group, which work on the same samples. The weights of a layer in the plan are
DTensors of the mesh's dimension "tp". FSDP 2 shards these, and all others, over the data-parallel ranks, if there are
several.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from omnitrain.backends.fsdp import FSDP
from omnitrain.backends.start import preserve_shared_buffers
from omnitrain.core.errors import ConfigError


class TensorParallel(FSDP):
    """Shards the model by its plan, and then by FSDP 2 if there are several data-parallel ranks."""

    def _wrap(self) -> tuple[nn.Module, nn.Module]:
        self._load_full_weights(always=True)  # before it is sharded
        mesh = self.accelerator.torch_device_mesh
        with preserve_shared_buffers(self.model):
            model = self.model.to(self.device)
        parallelize(model, mesh["tp"])
        if self.ranks.data.size > 1:
            from accelerate.utils.fsdp_utils import fsdp2_prepare_model

            with self._reducing():
                model = fsdp2_prepare_model(self.accelerator, model)
            self._add_up_by_sums(model)
        # its parameters are other ones now; the optimizer is made of these, on its first use
        return model, self.maybe_compile(model)

    def gradient_norm(self) -> torch.Tensor:
        """Return the L2 norm of all gradients; those of different layers may be on different parts of the mesh."""
        sums: dict[tuple[Any, ...], torch.Tensor] = {}
        for parameter in self.parameters:
            if parameter.grad is not None:
                part, groups = self.shard_and_groups(parameter.grad)
                square = torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32)) ** 2
                sums[tuple(groups)] = sums.get(tuple(groups), torch.zeros_like(square)) + square
        for groups, square in sums.items():
            for group in groups:
                dist.all_reduce(square, group=group)
        return torch.stack([total.double() for total in sums.values()]).sum().sqrt() if sums else torch.zeros(())

    def clip_gradients(self, max_norm: float | None, norm: torch.Tensor | None = None) -> torch.Tensor:
        norm = self.gradient_norm() if norm is None else norm
        if max_norm is not None:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for parameter in self.parameters:
                if parameter.grad is not None:
                    shard = self.local_shard(parameter.grad)
                    shard.mul_(factor.to(shard.device, shard.dtype))
        return norm


def parallelize(model: nn.Module, mesh: Any) -> None:
    """Shard a model's layers over a mesh of one dimension, by transformers' plan or the model's `tp_plan`.

    A `tp_plan` has names of modules, with `*` for any part of a name, and how each is sharded: "colwise", "rowwise" or
    a `ParallelStyle` of PyTorch.

    Raises:
        ConfigError: If the model has no plan, or one that does not fit it.
    """
    find = getattr(model, "_resolve_parallel_plans", None)
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan or not isinstance(plan, Mapping):
        raise ConfigError(
            f"`parallelism_config` has tp_size={mesh.size()}, and {type(model).__name__} has no plan that says how its "
            "layers are sharded. Give it an attribute such as tp_plan={'body.0': 'colwise', 'body.2': 'rowwise'}, or "
            "take a model of transformers that has one."
        )
    before = {id(parameter) for parameter in model.parameters()}
    if find is not None:
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        _check_heads(model, mesh.size())
        apply_tensor_parallelism(model, mesh, find(DistributedConfig(tp_size=mesh.size()))[0])
    else:
        _apply_plan(model, mesh, plan)
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters() if id(parameter) not in before):
        raise ConfigError(
            f"The plan of {type(model).__name__} for tensor parallelism shards nothing: {dict(plan)!r:.200}. Name "
            "modules that have weights."
        )


def _check_heads(model: Any, size: int) -> None:
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise ConfigError(
                f"`parallelism_config` has tp_size={size}, which does not divide the {heads} heads of the model "
                f"({name}). Take a size that does."
            )


def _apply_plan(model: nn.Module, mesh: Any, plan: Mapping[str, Any]) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.parallel.style import ParallelStyle

    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    names = [name for name, _ in model.named_modules()]
    for pattern, style in plan.items():
        matches = fnmatch.filter(names, pattern)
        if not matches or not (style in styles if isinstance(style, str) else isinstance(style, ParallelStyle)):
            raise ConfigError(
                f"`tp_plan` of {type(model).__name__} has {pattern!r}: {style!r}. Name a module of the model, and "
                "'colwise', 'rowwise' or a ParallelStyle of torch.distributed.tensor.parallel."
            )
        for name in matches:
            parallelize_module(model.get_submodule(name), mesh, styles[style]() if isinstance(style, str) else style)
