"""torchao's conversion to fp8 without torchao and without a GPU: the same products, computed in fp32."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as fp8 holds it, scaled by its maximum; gradients pass through."""
    scale = torch.finfo(torch.float8_e4m3fn).max / tensor.detach().abs().amax().clamp(min=1e-12).float()
    scaled = (tensor.detach().float() * scale).to(torch.float8_e4m3fn).float() / scale
    return tensor + (scaled.to(tensor.dtype) - tensor).detach()


class Float8Linear(nn.Linear):
    """A layer that multiplies in fp8."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(rounded(x), rounded(self.weight), self.bias)


def convert(model: nn.Module, module_filter_fn: Callable[[nn.Module, str], bool]) -> nn.Module:
    """Replace the layers that the filter admits, with their own parameters."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and module_filter_fn(layer, name):
            converted = Float8Linear(layer.in_features, layer.out_features, device="meta")
            converted.weight, converted.bias = layer.weight, layer.bias
            model.set_submodule(name, converted)
    return model


def install(patch: pytest.MonkeyPatch) -> None:
    """Have every device multiply in fp8."""
    stand_in: Any = ModuleType("torchao.float8")
    stand_in.convert_to_float8_training = convert
    patch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    patch.setitem(sys.modules, "torchao.float8", stand_in)
    patch.setattr("omnitrain.compute.precision._fp8_obstacle", lambda device: "")
