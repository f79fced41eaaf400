"""Detection of non-finite losses and gradients without waiting for the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from omnitrain.compute.precision import read_on_cpu
from omnitrain.distributed.ranks import Ranks


class LossMeter:
    """The weighted sum of an epoch's losses, accumulated on the device and read only for logs.

    On a CPU, where reading is free, `sum` is a float.

    >>> meter = LossMeter(torch.device("cpu"))
    >>> meter.add(torch.tensor(2.0), 3)
    >>> meter.add(torch.tensor(4.0), 1)
    >>> meter.mean(), meter.since_last()
    (2.5, (10.0, 4.0))
    """

    def __init__(self, device: torch.device, ranks: Ranks | None = None) -> None:
        self.ranks: Ranks = ranks or Ranks()
        # In float64, the mean does not depend on how often it is read; Apple's devices have no float64.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.sum: float | torch.Tensor = 0.0
        if device.type != "cpu":
            self.sum = torch.zeros((), dtype=dtype, device=device)
        self.weight: float = 0.0
        # Sum and weight at the latest call of `since_last`.
        self._at_last_log = (0.0, 0.0)

    def add(self, loss: torch.Tensor, weight: float) -> None:
        """Add the loss of a micro-batch."""
        if not weight:
            return  # there was nothing to predict, so the loss may be NaN
        self.weight += weight
        if isinstance(self.sum, torch.Tensor):
            # in place, without a temporary: `sum += loss * weight` would allocate twice in each micro-batch
            self.sum.add_(loss.detach(), alpha=weight)
        else:
            self.sum += weight * read_on_cpu(loss)

    def read(self) -> float:
        """Return the sum, waiting for the device that holds it."""
        return float(self.sum)

    def mean(self) -> float:
        """Return the mean over all ranks since the epoch began."""
        total, weight = self.ranks.sum("the mean loss of an epoch", *self.ranks.count_once([self.read(), self.weight]))
        return total / weight if weight else math.nan

    def since_last(self) -> tuple[float, float]:
        """Return the sum and the weight added on this rank since the latest call."""
        current = self.read(), self.weight
        (total, weight), self._at_last_log = self._at_last_log, current
        return current[0] - total, current[1] - weight

    def snapshot(self) -> tuple[float | torch.Tensor, float]:
        """Return sum and weight, for `rollback`, without waiting for the device."""
        return (self.sum.clone() if isinstance(self.sum, torch.Tensor) else self.sum), self.weight

    def rollback(self, snapshot: tuple[float | torch.Tensor, float]) -> None:
        """Remove what was added since `snapshot()`."""
        self._set(*snapshot)

    def state_dict(self) -> dict[str, Any]:
        """Return sum and weight, now and at the latest log."""
        return {"sum": self.read(), "weight": self.weight, "marked": list(self._at_last_log)}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states from `state_dict()` of all processes.

        If the number of processes has changed, the first one gets the total, and the others start from 0.
        """
        rank, size = self.ranks.data.rank, self.ranks.data.size
        if len(states) != size:
            empty = {"sum": 0.0, "weight": 0.0, "marked": [0.0, 0.0]}
            total = {
                "sum": sum(state["sum"] for state in states),
                "weight": sum(state["weight"] for state in states),
                "marked": [sum(state["marked"][i] for state in states) for i in (0, 1)],
            }
            states = [total, *[empty] * (size - 1)]
        state = states[rank]
        self._set(state["sum"], state["weight"])
        self._at_last_log = (state["marked"][0], state["marked"][1])

    def begin_epoch(self) -> None:
        """Start the mean of a new epoch; what was added since the latest log still counts for the next log."""
        total, weight = self.read(), self.weight
        # so that the next `since_last` includes what the previous epoch added since the latest log
        self._at_last_log = (self._at_last_log[0] - total, self._at_last_log[1] - weight)
        self._set(0.0, 0.0)

    def _set(self, total: float | torch.Tensor, weight: float) -> None:
        self.weight = weight
        if isinstance(self.sum, torch.Tensor):
            self.sum.fill_(total)
        else:
            self.sum = float(total)


class FiniteGuard:
    """Decides before each optimizer step whether to take it.

    Reading a number from a GPU in every step would slow the loop down. If the optimizer can skip an update on the
    device (PyTorch's fused ones can, by the `found_inf` that GradScaler also uses), the guard is *deferred*: from the
    first non-finite step on, the device makes no more updates, and the host learns of it some steps later without
    waiting. Otherwise the number is read, which is free on a CPU.

    Args:
        device: The device on which losses and gradients are.
        optimizer: The optimizer whose steps are guarded.
        deferred: Whether to skip updates on the device, and report them later.
    """

    _MAX_PENDING = 32  # how many steps the host may lag behind before it waits

    def __init__(self, device: torch.device, optimizer: Any, deferred: bool) -> None:
        self.deferred: bool = deferred
        self._pending: deque[tuple[int, Any, Any]] = deque()
        if deferred:
            self._found_inf = torch.zeros((), dtype=torch.float32, device=device)
            self._host_flags = torch.zeros(self._MAX_PENDING, dtype=torch.float32, pin_memory=device.type == "cuda")
            self._count = 0
            # the attributes that torch.amp.GradScaler sets for fused optimizers (`_step_supports_amp_scaling`)
            optimizer.found_inf, optimizer.grad_scale = self._found_inf, None

    @staticmethod
    def can_defer(device: torch.device, optimizer: Any) -> bool:
        """Return whether reading is slow on the device, and the optimizer can skip updates there."""
        return device.type == "cuda" and bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def should_update(self, finiteness_value: float | torch.Tensor, locate: Callable[[], Any]) -> bool:
        """Return whether to take the step; a deferred guard returns True, and leaves the decision to the device.

        Args:
            finiteness_value: A scalar that is finite if and only if loss and gradients are.
            locate: Returns the result of `first_bad()` in case this step turns out to be the first bad one.
        """
        if not self.deferred:
            return math.isfinite(finiteness_value)  # waits for the device
        bad = ~torch.as_tensor(finiteness_value, device=self._found_inf.device).isfinite()
        # never reset to 0: no update may follow a bad step before the host has seen it
        torch.maximum(self._found_inf, bad.to(self._found_inf.dtype), out=self._found_inf)
        slot = self._count % self._MAX_PENDING
        self._count += 1
        # to pinned memory, as a copy to pageable memory would wait for the device
        self._host_flags[slot].copy_(self._found_inf, non_blocking=True)
        event = torch.cuda.Event() if self._found_inf.device.type == "cuda" else None
        if event is not None:
            event.record()
        self._pending.append((slot, event, locate()))
        return True

    def first_bad(self, wait: bool = False) -> Any | None:
        """Return the result of `locate` for the first bad step that the device has reported, or None.

        Args:
            wait: Whether to check all steps so far, and wait for them. Otherwise a step is checked once 32 steps are
                pending, when the device is done with it; checking whichever are done could differ between ranks.
        """
        while len(self._pending) >= (1 if wait else self._MAX_PENDING):
            slot, event, location = self._pending.popleft()
            if event is not None:
                event.synchronize()
            if read_on_cpu(self._host_flags[slot]):
                self._pending.clear()
                return location
        return None

    def release(self, optimizer: Any) -> None:
        """Remove the guard from the optimizer."""
        if self.deferred:
            # otherwise they would also guard steps that the user takes after the run
            del optimizer.found_inf, optimizer.grad_scale
            self.deferred = False
