"""Precision and device selection, and detection of out-of-memory errors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from omnitrain.core.errors import ConfigError, MissingExtraError, did_you_mean

_NAMES = {
    "fp32": "fp32",
    "float32": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp8": "fp8",
    "float8": "fp8",
}
_DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
_FP8_FROM = (8, 9)
"""The compute capability of NVIDIA GPUs from which on they multiply in fp8."""


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes that the argument `dtypes` sets; None leaves one as it is.

    >>> Dtypes.parse({"inputs": "bf16", "reductions": torch.float32}).described
    {'inputs': 'bf16', 'reductions': 'fp32'}
    """

    parameters: torch.dtype | None = None
    buffers: torch.dtype | None = None
    inputs: torch.dtype | None = None
    reductions: torch.dtype | None = None

    @classmethod
    def parse(cls, given: Any) -> Dtypes:
        """Read the argument `dtypes`.

        Raises:
            ConfigError: If it is no such dict, or parameters are to be of fp16.
        """
        known = [field.name for field in fields(cls)]
        if given is None:
            return cls()
        if not isinstance(given, Mapping) or not given:
            raise ConfigError(
                f"`dtypes` must be a dict such as {{'parameters': 'bf16'}}, of {', '.join(known)}, got {given!r:.200}."
            )
        found: dict[str, torch.dtype | None] = {}
        for name, dtype in given.items():
            if name not in known:
                raise ConfigError(
                    f"`dtypes` sets {name!r}. It may set {', '.join(known)}.{did_you_mean(str(name), known)}"
                )
            word = "fp32" if dtype is None else _name_of(dtype, f"dtypes[{name!r}]")
            if word == "fp8":
                raise ConfigError(f"`dtypes` sets {name!r} to fp8, which is for products alone: autocast='fp8'.")
            found[name] = None if dtype is None else _DTYPES[word] or torch.float32
        if found.get("parameters") is torch.float16:
            raise ConfigError(
                f"`dtypes` sets parameters to {given['parameters']!r}: they would not train, as fp16 holds neither "
                "small updates nor the epsilon of Adam. Use 'bf16', or autocast='fp16', which keeps them in fp32."
            )
        return cls(**found)

    @property
    def described(self) -> dict[str, str] | None:
        """What is set, in the words of `autocast`; None if nothing is."""
        words = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
        said = {field.name: words[dtype] for field in fields(self) if (dtype := getattr(self, field.name)) is not None}
        return said or None

    def cast(self, model: nn.Module) -> None:
        """Cast the floating-point parameters and buffers of a model in place."""
        for wanted, held in ((self.parameters, model.parameters()), (self.buffers, model.buffers())):
            for tensor in held if wanted is not None else ():
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(wanted)


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of the forward pass. Weights and optimizer state keep the model's dtype.

    >>> Precision.parse("bfloat16", torch.device("cpu"))
    Precision(name='bf16', device_type='cpu', matmul=None)
    """

    name: str
    device_type: str
    matmul: str | None = None
    dtypes: Dtypes = field(default=Dtypes(), repr=False)

    @classmethod
    def parse(
        cls, autocast: str | torch.dtype | None, device: torch.device, matmul: str | None = None, dtypes: Any = None
    ) -> Precision:
        """Read the arguments `autocast`, `matmul_precision` and `dtypes`.

        Raises:
            ConfigError: If the name is unknown, or it is fp16 on a CPU, which has no fp16 autocast, or fp8 on a device
                that cannot multiply in it.
        """
        name = _name_of(autocast)
        if name == "fp16" and device.type == "cpu":
            raise ConfigError(
                f"`autocast={autocast!r}` is not available on a CPU. Use `autocast='bf16'` there, or a GPU device."
            )
        if name == "fp8" and (lacking := _lacks_fp8(device)):
            raise ConfigError(
                f"`autocast={autocast!r}` needs an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper), and "
                f"{lacking}. Use autocast='bf16'."
            )
        return cls(name, device.type, matmul, Dtypes.parse(dtypes))

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for the forward pass and the loss."""
        dtype = _DTYPES[self.name]
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device_type, dtype=dtype)

    @contextlib.contextmanager
    def without_cache(self) -> Iterator[None]:
        """Have a `torch.autocast` that the user's program is in cast the weights of each forward pass again.

        It keeps what it has cast until it is left, so a run inside would compute with the weights of its first step.
        """
        if not torch.is_autocast_enabled(self.device_type):
            yield
            return
        before = torch.is_autocast_cache_enabled()
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(before)

    def convert(self, model: nn.Module) -> None:
        """Have the linear layers of a model multiply in fp8, by torchao, if that is the precision.

        Their parameters stay the same objects under the same names. A layer needs sizes that are multiples of 16.

        Raises:
            ConfigError: If no layer can.
            MissingExtraError: If torchao is not installed.
        """
        if self.name != "fp8":
            return
        try:
            from torchao.float8 import convert_to_float8_training  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise MissingExtraError("autocast='fp8'", "torchao") from None
        fit = [one for one in model.modules() if isinstance(one, nn.Linear) and one is not model]
        fit = [one for one in fit if not (one.in_features % 16 or one.out_features % 16)]
        if not fit:
            raise ConfigError(
                "`autocast='fp8'`: the model holds no linear layer whose sizes are both multiples of 16, so nothing "
                "would be computed in fp8. Use autocast='bf16'."
            )
        plain = {id(one) for one in fit if type(one) is nn.Linear}  # another trainer may have converted the others
        convert_to_float8_training(model, module_filter_fn=lambda module, name: id(module) in plain)

    @contextlib.contextmanager
    def of_products(self) -> Iterator[None]:
        """Have products of fp32 matrices computed inside as `matmul_precision` says; afterwards as before."""
        if self.matmul is None:
            yield
            return
        before = matmul_precision()
        torch.set_float32_matmul_precision(self.matmul)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def grad_scaler(self, scale: Sequence[float]) -> torch.amp.GradScaler:
        """Return the loss scaler: enabled for fp16, disabled for everything else.

        Args:
            scale: The argument `fp16_loss_scale`.
        """
        interval, is_on = growth_interval(scale), self.name == "fp16"
        return torch.amp.GradScaler(self.device_type, init_scale=scale[0], growth_interval=interval, enabled=is_on)


def _lacks_fp8(device: torch.device) -> str:
    """Return what is wrong with a device for fp8; nothing if it can multiply in it."""
    if device.type != "cuda":
        return f"the device is {device}"
    found = torch.cuda.get_device_capability(device)
    return "" if found >= _FP8_FROM else f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"


def growth_interval(scale: Sequence[float]) -> int:
    """Return the steps without an overflow after which the loss scale doubles, by `fp16_loss_scale`."""
    return int(scale[2]) if len(scale) > 2 else 2000


def matmul_precision() -> str:
    """Return in what precision PyTorch computes products of fp32 matrices: "highest", "high" or "medium"."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Please use the new API settings")  # PyTorch 2.9 says so of this function
            return torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has used PyTorch's newer switches, such as torch.backends.fp32_precision
        backends: Any = torch.backends
        on_gpu, on_cpu = backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision
        return "highest" if on_gpu != "tf32" else "medium" if on_cpu == "bf16" else "high"


def _name_of(autocast: str | torch.dtype | None, argument: str = "autocast") -> str:
    text = "fp32" if autocast is None else str(autocast).removeprefix("torch.").lower()
    if text not in _NAMES:
        raise ConfigError(
            f"`{argument}` must be one of {', '.join(map(repr, _NAMES))} or None, got {autocast!r}."
            f"{did_you_mean(text, _NAMES)}"
        )
    return _NAMES[text]


def precision_name(autocast: str | torch.dtype | None) -> str:
    """Return accelerate's name for the precision: "no", "fp16" or "bf16", which fp8 is beside the products.

    Raises:
        ConfigError: If the name is unknown.
    """
    name = _name_of(autocast)
    return {"fp32": "no", "fp8": "bf16"}.get(name, name)


def computes_in_fp8(autocast: str | torch.dtype | None) -> bool:
    """Return whether the argument `autocast` asks for products in fp8, in any of its spellings.

    Raises:
        ConfigError: If the name is unknown.
    """
    return _name_of(autocast) == "fp8"


def choose_device(device: str | torch.device | None) -> torch.device:
    """Return the device that was asked for, or the first available of cuda, xpu, mps and cpu.

    Raises:
        ConfigError: If it does not exist here.
    """
    if device is None:
        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = "cpu" if kind is None else kind.type
    try:
        chosen = torch.empty(0, device=torch.device(device)).device  # "cuda" becomes "cuda:0"
        if chosen.type == "meta":
            raise ValueError("tensors on it have no values")
        return chosen
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
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error) or "device-side assert" in str(error)
