"""Precision, device selection, and detection of out-of-memory errors."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch import nn

from omnitrain.compute.device_runtime import device_runtime
from omnitrain.core.errors import ConfigError, MissingExtraError, check_choice, did_you_mean

logger: logging.Logger = logging.getLogger("omnitrain")

_NAMES = {
    "fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "half": "fp16", "bf16": "bf16",
    "bfloat16": "bf16", "fp8": "fp8", "float8": "fp8",
}  # fmt: skip
_NO_AUTOCAST = contextlib.nullcontext()
_DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
# The lowest compute capability of NVIDIA GPUs that multiply in fp8.
_FP8_FROM = (8, 9)


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes that the argument `dtypes` sets; None leaves one unchanged.

    >>> Dtypes.parse({"inputs": "bf16", "reductions": torch.float32}).described
    {'inputs': 'bf16', 'reductions': 'fp32'}
    """

    parameters: torch.dtype | None = None
    buffers: torch.dtype | None = None
    inputs: torch.dtype | None = None
    reductions: torch.dtype | None = None

    @classmethod
    def parse(cls, value: Any) -> Dtypes:
        """Read the argument `dtypes`.

        Raises:
            ConfigError: If it is no such dict, or sets parameters to fp16.
        """
        known = [field.name for field in fields(cls)]
        if value is None:
            return cls()
        if not isinstance(value, Mapping) or not value:
            raise ConfigError(
                f"`dtypes` must be a dict such as {{'parameters': 'bf16'}}, of {', '.join(known)}, got {value!r:.200}."
            )
        dtypes: dict[str, torch.dtype | None] = {}
        for name, dtype in value.items():
            if name not in known:
                raise ConfigError(
                    f"`dtypes` sets {name!r}. It may set {', '.join(known)}.{did_you_mean(str(name), known)}"
                )
            precision = precision_name(dtype, f"dtypes[{name!r}]")
            if precision == "fp8":
                raise ConfigError(f"`dtypes` sets {name!r} to fp8, which is only for products: use autocast='fp8'.")
            dtypes[name] = None if dtype is None else _DTYPES[precision] or torch.float32
        if dtypes.get("parameters") is torch.float16:
            raise ConfigError(
                f"`dtypes` sets parameters to {value['parameters']!r}: they would not train, as fp16 holds neither "
                "small updates nor the epsilon of Adam. Use 'bf16', or autocast='fp16', which keeps them in fp32."
            )
        return cls(**dtypes)

    @property
    def described(self) -> dict[str, str] | None:
        """The dtypes that are set, by the names of `autocast`; None if none is."""
        names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
        dtypes = self.parameters, self.buffers, self.inputs, self.reductions
        pairs = zip(fields(self), dtypes, strict=True)
        return {field.name: names[dtype] for field, dtype in pairs if dtype is not None} or None

    def cast(self, model: nn.Module) -> None:
        """Cast the floating-point parameters and buffers of a model in place."""
        for dtype, tensors in ((self.parameters, model.parameters()), (self.buffers, model.buffers())):
            for tensor in tensors if dtype is not None else ():
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)


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
            ConfigError: If the name is unknown, fp16 on a CPU, which has no fp16 autocast, or fp8 on a device that does
                not support it.
        """
        name = precision_name(autocast)
        if name == "fp16" and device.type == "cpu":
            raise ConfigError(
                f"`autocast={autocast!r}` is not available on a CPU. Use `autocast='bf16'` there, or a GPU device."
            )
        if name == "fp8" and (reason := _fp8_obstacle(device)):
            raise ConfigError(
                f"`autocast={autocast!r}` needs an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper), and "
                f"{reason}. Use autocast='bf16'."
            )
        return cls(name, device.type, matmul, Dtypes.parse(dtypes))

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for the forward pass and the loss."""
        dtype = _DTYPES[self.name]
        return _NO_AUTOCAST if dtype is None else torch.autocast(self.device_type, dtype=dtype)

    @contextlib.contextmanager
    def run_context(self) -> Iterator[None]:
        """Set the precision of fp32 matrix products, and disable the weight cache of a `torch.autocast` around the run.

        The cache lives until that context exits, so a run inside would compute with the weights of its first step.
        """
        matmul, has_cache = self.matmul and matmul_precision(), torch.is_autocast_cache_enabled()
        if self.matmul is not None:
            torch.set_float32_matmul_precision(self.matmul)
        if torch.is_autocast_enabled(self.device_type):
            torch.clear_autocast_cache()
            torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(has_cache)
            if matmul is not None:
                torch.set_float32_matmul_precision(matmul)

    def convert(self, model: nn.Module) -> None:
        """Convert the linear layers of a model to fp8 products by torchao, if that is the precision.

        Their parameters stay the same objects under the same names. Only sizes that are multiples of 16 are supported.

        Raises:
            ConfigError: If no layer can be converted.
            MissingExtraError: If torchao is not installed.
        """
        if self.name != "fp8":
            return
        try:
            from torchao.float8 import convert_to_float8_training  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise MissingExtraError("autocast='fp8'", "torchao") from None
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not model]
        layers = [layer for layer in layers if not (layer.in_features % 16 or layer.out_features % 16)]
        if not layers:
            raise ConfigError(
                "`autocast='fp8'` has nothing to convert: the model has no linear layer whose sizes are both multiples "
                "of 16. Use autocast='bf16'."
            )
        plain = {id(layer) for layer in layers if type(layer) is nn.Linear}  # others may be converted already
        convert_to_float8_training(model, module_filter_fn=lambda module, name: id(module) in plain)
        logger.warning(
            "%d linear layers multiply in fp8, which is tested by emulation only. Compare the first losses with those "
            "of autocast='bf16'.", len(layers),
        )  # fmt: skip

    def grad_scaler(self, scale: Sequence[float]) -> torch.amp.GradScaler:
        """Return the loss scaler by the argument `fp16_loss_scale`: enabled for fp16, disabled for everything else."""
        interval, is_on = growth_interval(scale), self.name == "fp16"
        return torch.amp.GradScaler(self.device_type, init_scale=scale[0], growth_interval=interval, enabled=is_on)


def _fp8_obstacle(device: torch.device) -> str:
    """Return why a device does not support fp8; "" if it does."""
    runtime = device_runtime(device)
    if runtime.capability is None:
        return f"the device is {device}"
    version = ".".join(map(str, runtime.capability))
    return "" if runtime.capability >= _FP8_FROM else f"{runtime.name} has {version}"


def growth_interval(scale: Sequence[float]) -> int:
    """Return after how many steps without an overflow the loss scale doubles, by `fp16_loss_scale`."""
    return int(scale[2]) if len(scale) > 2 else 2000


def matmul_precision() -> str:
    """Return the precision of PyTorch's fp32 matrix products: "highest", "high" or "medium"."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Please use the new API settings")  # PyTorch 2.9 says so of this function
            return torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has used PyTorch's newer switches, such as torch.backends.fp32_precision
        backends: Any = torch.backends
        on_gpu, on_cpu = backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision
        return "highest" if on_gpu != "tf32" else "medium" if on_cpu == "bf16" else "high"


def uses_tf32(model: nn.Module, device: torch.device) -> bool:
    """Return whether fp32 layers of a model may compute in TF32 on a GPU, as convolutions do by default."""
    if device.type != "cuda":
        return False
    try:
        in_cudnn = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # the program has used PyTorch's newer switches
        in_cudnn = cast(Any, torch.backends.cudnn).conv.fp32_precision != "ieee"
    kinds = ("torch.nn.modules.conv", "torch.nn.modules.rnn")
    has_kernels = any(base.__module__ in kinds for module in model.modules() for base in type(module).__mro__)
    return matmul_precision() != "highest" or (in_cudnn and has_kernels)


def precision_name(autocast: str | torch.dtype | None, argument: str = "autocast") -> str:
    """Return "fp32", "fp16", "bf16" or "fp8" for any spelling of an argument.

    Raises:
        ConfigError: If the name is unknown.
    """
    text = "fp32" if autocast is None else str(autocast).removeprefix("torch.").lower()
    if text not in _NAMES:
        check_choice(argument, autocast, _NAMES, " or None")
    return _NAMES[text]


def accelerate_precision(autocast: str | torch.dtype | None) -> str:
    """Return accelerate's name for the precision: "no", "fp16" or "bf16"; with fp8, all but products is bf16."""
    name = precision_name(autocast)
    return {"fp32": "no", "fp8": "bf16"}.get(name, name)


def choose_device(device: str | torch.device | None) -> torch.device:
    """Return the requested device, or the first available of cuda, xpu, mps and cpu.

    Raises:
        ConfigError: If it does not exist on this machine.
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
            f"`device={device!r}` cannot be used: {reason}. Leave it out to use the available one."
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device is out of memory."""
    from accelerate.utils.memory import should_reduce_batch_size

    known = isinstance(error, Exception) and should_reduce_batch_size(error)
    return known or isinstance(error, torch.OutOfMemoryError)


def free_memory() -> None:
    """Collect garbage, and release the allocator's unused memory to the device."""
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)


def is_device_lost(error: BaseException) -> bool:
    """Return whether an error leaves the device unusable, such as an assertion in a CUDA kernel."""
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error) or "device-side assert" in str(error)
