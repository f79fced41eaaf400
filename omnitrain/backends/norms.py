"""Normalization layers with mixed dtypes on CPUs."""

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
    """Casts weights to fp32 if the statistics or the input are fp32, as GPU kernels do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _FUNCTIONS:
            return func(*args, **(kwargs or {}))
        arguments = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
        statistics = arguments.get("running_mean")
        if (arguments["input"] if statistics is None else statistics).dtype == torch.float32:
            arguments |= {
                name: arguments[name].float() for name in ("weight", "bias") if arguments.get(name) is not None
            }
        return func(**arguments)


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with _MatchedWeights():
        return type(self).forward(self, *args, **kwargs)


def match_norm_dtypes(model: nn.Module, param_dtype: torch.dtype | None = None) -> None:
    """Have the normalization layers of a model accept 16-bit weights with fp32 inputs or statistics, on a CPU.

    PyTorch's kernels for CPUs reject such a mix ("expected scalar type BFloat16 but found Float"), those for GPUs
    compute it. The parameters stay unchanged, and so do layers whose weights have more bits, as they are or, with
    `param_dtype`, as they are gathered for a forward pass.
    """
    for module in model.modules():
        dtypes = [param_dtype or parameter.dtype for parameter in module.parameters(recurse=False)]
        if isinstance(module, _LAYERS) and any(dtype.itemsize < 4 for dtype in dtypes):
            module.forward = types.MethodType(_forward, module)
