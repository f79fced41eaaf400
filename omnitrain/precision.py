"""Precision and device selection, and detection of out-of-memory errors."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from omnitrain.errors import ConfigError, did_you_mean

__all__ = ["Precision", "choose_device", "free_memory", "is_device_lost", "is_out_of_memory", "precision_name"]

_NAMES = {
    "fp32": "fp32",
    "float32": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}
_DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of the forward pass. Weights and optimizer state keep the model's dtype.

    >>> Precision.parse("bfloat16", torch.device("cpu"))
    Precision(name='bf16', device_type='cpu')
    """

    name: str
    device_type: str

    @classmethod
    def parse(cls, autocast: str | torch.dtype | None, device: torch.device) -> Precision:
        """Read the `autocast` argument.

        Raises:
            ConfigError: If the name is unknown, or it is fp16 on a CPU, which has no fp16 autocast.
        """
        name = _name_of(autocast)
        if name == "fp16" and device.type == "cpu":
            raise ConfigError(
                f"`autocast={autocast!r}` is not available on a CPU. Use `autocast='bf16'` there, or a GPU device."
            )
        return cls(name, device.type)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for the forward pass and the loss."""
        dtype = _DTYPES[self.name]
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device_type, dtype=dtype)

    def grad_scaler(self, initial_scale: float) -> torch.amp.GradScaler:
        """Return the loss scaler: enabled for fp16, disabled for everything else."""
        return torch.amp.GradScaler(self.device_type, init_scale=initial_scale, enabled=self.name == "fp16")


def _name_of(autocast: str | torch.dtype | None) -> str:
    text = "fp32" if autocast is None else str(autocast).removeprefix("torch.").lower()
    if text not in _NAMES:
        raise ConfigError(
            f"`autocast` must be one of {', '.join(map(repr, _NAMES))} or None, got {autocast!r}."
            f"{did_you_mean(text, _NAMES)}"
        )
    return _NAMES[text]


def precision_name(autocast: str | torch.dtype | None) -> str:
    """Return accelerate's name for the precision: "no", "fp16" or "bf16".

    Raises:
        ConfigError: If the name is unknown.
    """
    name = _name_of(autocast)
    return "no" if name == "fp32" else name


def choose_device(device: str | torch.device | None) -> torch.device:
    """Return the device that was asked for, or the first available of cuda, xpu, mps and cpu.

    Raises:
        ConfigError: If it does not exist here.
    """
    if device is None:
        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = "cpu" if kind is None else kind.type
    try:
        return torch.empty(0, device=torch.device(device)).device  # "cuda" becomes "cuda:0"
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"`device={device!r}` cannot be used: {reason}. Leave it out to take what there is."
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device is out of memory."""
    from accelerate.utils.memory import should_reduce_batch_size

    known = isinstance(error, Exception) and should_reduce_batch_size(error)
    return known or isinstance(error, torch.OutOfMemoryError)


def free_memory() -> None:
    """Give back to the device what nothing holds any more."""
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)


def is_device_lost(error: BaseException) -> bool:
    """Return whether an error leaves the device unusable, such as an assertion in a CUDA kernel."""
    lost = getattr(torch, "AcceleratorError", ())  # in torch 2.8 and later
    return isinstance(error, lost) or "CUDA error" in str(error) or "device-side assert" in str(error)
