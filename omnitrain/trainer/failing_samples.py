"""Samples that raise errors in forward passes, and remedies for dtypes.

Errors in the data report their samples in `data/`; `nonfinite.py` reports a NaN.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from torch import nn

from omnitrain.compute.precision import is_device_lost, is_out_of_memory
from omnitrain.core.errors import describe_samples
from omnitrain.data.collation import tensors_in
from omnitrain.data.failing_samples import describe_failures
from omnitrain.distributed.ranks import is_connection_error
from omnitrain.trainer.hooks import Hooks

_LATE = (
    "A device reports its errors late, and is unusable from then on. Most often a label or an index is out of range: "
    "CUDA_LAUNCH_BLOCKING=1 in the environment names the samples, and so does a run without a GPU."
)


def describe_failing_samples(
    error: Exception,
    trainer: Hooks,
    loader: Any,
    position: tuple[int, int, int],
    forward: Callable[[Any], Any],
    rerun_context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> str:
    """Return the samples of a micro-batch as text, and which of them fail by themselves.

    The text is empty if samples have no index. Samples are not run again after an error of the device, of its memory or
    of another rank, or if a forward pass is a collective call.

    Args:
        error: The error that the micro-batch raised.
        trainer: The trainer.
        loader: The loader of the micro-batch.
        position: The epoch, the sample of it at which the window begins, and the number of the micro-batch in the
            window.
        forward: The function that failed, which takes a batch.
        rerun_context: Returns the context in which to call it again: without gradients and effects on the run.
    """
    samples = loader.indices_at(*position)
    if not samples or is_connection_error(error):
        return ""
    description = describe_samples(samples, loader.name)
    if is_device_lost(error):
        return f"{description}, or before"  # `add_device_remedy` says why
    if not hasattr(loader, "fetch") or trainer.backend.forward_is_collective or is_out_of_memory(error):
        return description

    def attempt(indices: list[int]) -> None:
        batch = trainer._prepare_batch(loader.fetch(position[0], np.array(indices)))
        with trainer._autocast():
            forward(batch)

    with rerun_context():
        return describe_failures(error, samples, loader.name, attempt)


def add_device_remedy(error: BaseException) -> None:
    """Add to an error of the device itself, such as an assertion in one of its kernels, how to find the cause."""
    if is_device_lost(error) and not is_out_of_memory(error) and _LATE not in getattr(error, "__notes__", ()):
        error.add_note(_LATE)


def add_dtype_remedy(error: Exception, model: nn.Module, batch: Any, dtypes: Any = None) -> None:
    """Add a remedy to an error of a forward pass about dtypes that do not fit together.

    PyTorch has no class for these errors, so they are recognized by their texts.
    """
    if re.search(r"expected (scalar type|target dtype to be) Long", str(error)):
        error.add_note("Classes are labels of 64 bits: convert them, array.astype('int64') or tensor.long().")
    if not isinstance(error, RuntimeError):
        return
    has_statistics = any(getattr(module, "running_mean", None) is not None for module in model.modules())
    if "mixed dtype (CPU)" in str(error) or (has_statistics and "expected scalar type" in str(error)):
        error.add_note(
            "A normalization layer on a CPU takes neither an input nor statistics of another type than its weights. "
            "Give all of them one, by model.to(dtype), or leave the weights in fp32 and use autocast='bf16'."
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
