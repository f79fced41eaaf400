"""A device that works later than the host, in threads, so that what would race on a GPU fails on any machine."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from omnitrain.compute.device_runtime import RUNTIMES, DeviceRuntime
from omnitrain.data import collation

DELAY_S = 0.001
"""How much later than its call a copy is done."""
LIMIT_S = 60


class FakeEvent:
    """The point in the work of a stream at which it was recorded."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream, self.position, self._is_over = stream, stream.submitted, threading.Event()
        stream.submit(self._is_over.set)

    def query(self) -> bool:
        return self._is_over.is_set()

    def wait(self) -> None:
        assert self._is_over.wait(LIMIT_S), "the stream stands still"

    def synchronize(self) -> None:
        self.wait()
        self.stream.waited = max(self.stream.waited, self.position)


class FakeStream:
    """A queue of work, done in its order by a thread.

    Attributes:
        submitted: How much work it was given.
        waited: How much of it the host knows to be done, as it has waited for that.
    """

    def __init__(self) -> None:
        self.submitted, self.waited = 0, 0
        self._work: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def submit(self, work: Callable[[], Any]) -> None:
        self.submitted += 1
        self._work.put(work)

    def record_event(self) -> FakeEvent:
        return FakeEvent(self)

    def wait_event(self, event: FakeEvent) -> None:
        event.wait()  # only the stream of the computation waits, and the host does its work

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(LIMIT_S)


class Replayed(torch.nn.Module):
    """A model that runs as CUDA graphs do: its next run overwrites what the one before has returned.

    It stands for what `torch.compile(mode="reduce-overhead")` returns, whose graphs have fixed memory.
    """

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        super().__init__()
        self._orig_mod, self.runs = model, 0
        self._outputs: list[torch.Tensor] = []
        self._has_gradient: set[torch.Tensor] = set()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def get_compiler_config(self) -> dict[str, Any]:
        return {"triton.cudagraphs": True}

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        if parameter not in self._has_gradient:  # otherwise it was added to memory that is not the graph's
            assert parameter.grad is not None
            self._outputs.append(parameter.grad)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for output in self._outputs:
            output.data.fill_(float("nan") if output.is_floating_point() else 2**30)
        self.runs += 1
        self._has_gradient = {parameter for parameter in self._orig_mod.parameters() if parameter.grad is not None}
        outputs = self._orig_mod(*args, **kwargs)
        self._outputs = [output for output in tree_leaves(outputs) if isinstance(output, torch.Tensor)]
        return outputs


class FakeDevice(TorchFunctionMode):
    """Makes the devices of a kind asynchronous in a context: copies on streams, and those that do not block, are late.

    A tensor that is copied to the device has garbage until then.
    """

    def __init__(self, kind: str = "cpu") -> None:
        super().__init__()
        self.kind, self.computation, self.delay = kind, FakeStream(), DELAY_S
        self.streams = [self.computation]
        self.copies: list[tuple[torch.Tensor, FakeStream, int]] = []
        self.recorded: set[int] = set()
        self._stream = self.computation

    def __enter__(self) -> FakeDevice:
        device = self

        class Runtime(DeviceRuntime):
            has_streams = True

            def record_event(self) -> FakeEvent:
                return device.computation.record_event()

            def new_stream(self) -> FakeStream:
                device.streams.append(FakeStream())
                return device.streams[-1]

            def current_stream(self) -> FakeStream:
                return device.computation

            @contextmanager
            def use_stream(self, stream: FakeStream) -> Iterator[None]:
                device._stream = stream
                try:
                    yield
                finally:
                    device._stream = device.computation

        RUNTIMES[self.kind] = Runtime
        self._record_stream = torch.Tensor.record_stream
        torch.Tensor.record_stream = lambda tensor, stream: device.record(tensor)  # type: ignore[method-assign]
        self._move_to_device = collation.move_to_device
        collation.move_to_device = self._move
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.Tensor.record_stream = self._record_stream  # type: ignore[method-assign]
        collation.move_to_device = self._move_to_device
        del RUNTIMES[self.kind]
        for stream in self.streams:
            stream.close()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            return self._copy_to_host(*args[:2])
        if function is torch.Tensor.cpu:  # from a device it is a copy
            return function(*args, **kwargs).clone()
        return function(*args, **kwargs)

    def _move(self, batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
        if not non_blocking:
            return self._move_to_device(batch, device)
        return tree_map_only(torch.Tensor, lambda source: self._copy_to_device(source, device), batch)

    def _copy_to_device(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        if any(source is copy for copy, *_ in self.copies):
            return source
        target = source.to(device, copy=True)
        if self._stream is self.computation or target.is_meta:  # what is computed later sees the copy
            self._stream.submit(lambda: time.sleep(self.delay))
        else:
            target.fill_(float("nan") if source.is_floating_point() else 2**30)
            self._stream.submit(lambda: (time.sleep(self.delay), target.copy_(source)))
        self.copies.append((target, self._stream, self._stream.submitted))
        return target

    def _copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if not source.is_meta:
            value = source.clone()  # of this moment in the order of the stream
            self.computation.submit(lambda: (time.sleep(self.delay), target.copy_(value)))
        return target

    def record(self, tensor: torch.Tensor) -> None:
        self.recorded.add(id(tensor))

    def unfinished_copies(self) -> int:
        """Return how many copies to the device the host has not waited for: their sources must not change yet."""
        return sum(position > stream.waited for _, stream, position in self.copies)

    def unrecorded_copies(self) -> int:
        """Return how many copies the computation uses without the allocator's knowledge, which may reuse them."""
        others = [copy for copy, stream, _ in self.copies if stream is not self.computation]
        return sum(id(copy) not in self.recorded for copy in others)
