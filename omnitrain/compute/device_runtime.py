"""Streams, events, pinned memory, memory figures and names of devices."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


class DeviceRuntime:
    """What the host asks of a device; this base class serves devices that it never runs ahead of, such as a CPU.

    What copies, events, memory and capabilities depend on is decided here: other code asks for what a device can do,
    not for its name.

    Attributes:
        has_streams: Whether the host queues work on streams and runs ahead, so that a copy ends later than its call,
            and reading a value waits for the device.
        pins_memory: Whether copies to the device are faster from page-locked memory.
        has_memory_stats: Whether PyTorch counts the memory of the device.
        can_record_memory: Whether PyTorch can record each allocation.
    """

    has_streams: bool = False
    pins_memory: bool = False
    has_memory_stats: bool = False
    can_record_memory: bool = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)

    @property
    def name(self) -> str:
        """The product name of the device, or its kind."""
        name: Any = getattr(self._module, "get_device_name", None)
        return self.device.type if self.device.type == "cpu" or name is None else str(name(self.device))

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA's compute capability."""
        return None

    @property
    def total_memory(self) -> int | None:
        """The memory of the device in bytes, if it is known."""
        return None

    def can_skip_updates(self, optimizer: Any) -> bool:
        """Return whether an optimizer decides on the device whether to update, by `found_inf`, and it pays."""
        return self.has_streams and bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def host_buffer(self, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return `size` zeros in host memory to which the device can copy while the host goes ahead."""
        return torch.zeros(size, dtype=dtype, pin_memory=self.pins_memory)

    def record_event(self) -> Any:
        """Return an event after the work queued so far, with `synchronize()`; None if that is done already."""
        return None

    def new_stream(self) -> Any:
        """Return a stream for copies to a device with streams."""
        return self._module.Stream(self.device)

    def current_stream(self) -> Any:
        """Return the stream of the computation on a device with streams."""
        return self._module.current_stream(self.device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which work is queued on a stream."""
        return self._module.stream(stream)

    def read_peaks(self) -> tuple[int, int]:
        """Return the peak bytes allocated and reserved since the last call, as counted on the host: nothing waits."""
        stats = torch.accelerator.memory_stats(self.device)
        torch.accelerator.reset_peak_memory_stats(self.device)
        return stats.get("allocated_bytes.all.peak", 0), stats.get("reserved_bytes.all.peak", 0)


class _StreamingRuntime(DeviceRuntime):
    """Runtime of a device with streams, by the module of PyTorch that is named like its kind."""

    has_streams = True
    pins_memory = True
    has_memory_stats = True

    @property
    def total_memory(self) -> int | None:
        return int(self._module.get_device_properties(self.device).total_memory)

    def record_event(self) -> Any:
        return self.current_stream().record_event()


class _CudaRuntime(_StreamingRuntime):
    can_record_memory = True

    @property
    def capability(self) -> tuple[int, int] | None:
        return self._module.get_device_capability(self.device)


RUNTIMES: dict[str, type[DeviceRuntime]] = {"cuda": _CudaRuntime, "xpu": _StreamingRuntime}
"""The runtime of each kind of device that has more than the base class."""


def device_runtime(device: torch.device) -> DeviceRuntime:
    """Return the runtime of a device."""
    return RUNTIMES.get(device.type, DeviceRuntime)(device)
