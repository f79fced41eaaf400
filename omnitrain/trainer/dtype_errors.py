"""Remedies for dtype errors of a forward pass."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from omnitrain.data.collation import tensors_in


def add_dtype_remedy(error: Exception, model: nn.Module, batch: Any, dtypes: Any = None) -> None:
    """Add a remedy to an error of a forward pass about dtypes that do not fit together.

    PyTorch has no class for these errors, so they are recognized by their texts.

    Args:
        error: The error; it gets a note.
        model: The model.
        batch: The batch of the forward pass.
        dtypes: The argument `dtypes` of the trainer.
    """
    if re.search(r"expected (scalar type|target dtype to be) Long", str(error)):
        error.add_note("Classes are labels of 64 bits: convert them, array.astype('int64') or tensor.long().")
    if not isinstance(error, RuntimeError):
        return
    if re.search(r"mixed dtype|expected scalar type", str(error)) and (layers := _mixed_layers(model)):
        error.add_note(
            f"A layer has weights and statistics of different types, which a CPU does not take together: {layers}. "
            "Give both the same type, by dtypes={'parameters': ..., 'buffers': ...} or model.to(dtype)."
        )
        return
    if "mixed dtype (CPU)" in str(error):
        error.add_note(
            "A normalization layer with weights of 16 bits got an input of 32, which a CPU does not take. Cast the "
            "input to the dtype of the layer's weight, or leave the weights in fp32 and use autocast='bf16'."
        )
        return
    if "dtype" not in str(error):
        return
    batch_dtypes = {str(tensor.dtype) for tensor in tensors_in(batch) if tensor.is_floating_point()}
    model_dtypes = {str(tensor.dtype) for tensor in model.parameters() if tensor.is_floating_point()}
    if batch_dtypes - model_dtypes:
        remedy = "Give both the same type: model.to(dtype), or tensor.to(dtype) in the dataset."
        if dtypes:
            remedy = f"Give both the same type, by 'parameters' and 'inputs' in `dtypes={dtypes!r}`, or leave it out."
        elif batch_dtypes == {"torch.float64"}:
            remedy = (
                "Arrays of NumPy are float64 by default: convert the data, array.astype('float32') or tensor.float()."
            )
        error.add_note(
            f"The batch has {', '.join(sorted(batch_dtypes))}, and the model {', '.join(sorted(model_dtypes))}. "
            f"{remedy}"
        )


def _mixed_layers(model: nn.Module) -> str:
    """Return the layers whose weights and running statistics differ in dtype, as text."""
    layers = [
        f"{name or type(module).__name__!r} ({_dtype_name(weight)} and {_dtype_name(statistics)})"
        for name, module in model.named_modules()
        if isinstance(weight := getattr(module, "weight", None), torch.Tensor)
        and isinstance(statistics := getattr(module, "running_mean", None), torch.Tensor)
        and weight.dtype != statistics.dtype
    ]
    return ", ".join(layers[:3]) + (", ..." if len(layers) > 3 else "")


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
