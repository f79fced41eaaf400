"""Normalization on CPUs of weights in 16 bits beside inputs or statistics in fp32."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

_LAYERS: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    nn.LayerNorm, nn.GroupNorm, nn.RMSNorm,
)  # fmt: skip
_FUNCTIONS = (F.batch_norm, F.instance_norm, F.layer_norm, F.group_norm, F.rms_norm)


class _MatchedWeights(TorchFunctionMode):
    """Casts weights to fp32 beside statistics, or an input, in fp32, as kernels of GPUs do by themselves."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _FUNCTIONS:
            return func(*args, **(kwargs or {}))
        found = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
        statistics = found.get("running_mean")
        if (found["input"] if statistics is None else statistics).dtype == torch.float32:
            found |= {name: found[name].float() for name in ("weight", "bias") if found.get(name) is not None}
        return func(**found)


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with _MatchedWeights():
        return type(self).forward(self, *args, **kwargs)


def match_norm_dtypes(model: nn.Module) -> None:
    """Have the normalization layers of a model take weights in 16 bits beside inputs or statistics in fp32, on a CPU.

    PyTorch's kernels for CPUs reject such a mix ("expected scalar type BFloat16 but found Float"), those for GPUs
    compute it. The parameters stay unchanged.
    """
    for module in model.modules():
        if isinstance(module, _LAYERS):
            module.forward = types.MethodType(_forward, module)
