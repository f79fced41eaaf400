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
    """The weighted sum of an epoch's losses, kept on the device and read only for logs.

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
        self._marked = (0.0, 0.0)  # sum and weight at the latest log

    def add(self, loss: torch.Tensor, weight: float) -> None:
        """Add the loss of a micro-batch; with weight 0 it had nothing to predict, and its NaN must not be added."""
        if not weight:
            return
        self.weight += weight
        if isinstance(self.sum, torch.Tensor):
            # in place, without a temporary: `sum += loss * weight` would allocate twice in each micro-batch
            self.sum.add_(loss.detach(), alpha=weight)
        else:
            self.sum += weight * read_on_cpu(loss)

    def read(self) -> float:
        """Return the sum, waiting for the device if it is there."""
        return float(self.sum)

    def mean(self) -> float:
        """Return the mean over all ranks since the epoch began."""
        total, weight = self.ranks.sum("the mean loss of an epoch", *self.ranks.count_once([self.read(), self.weight]))
        return total / weight if weight else math.nan

    def since_last(self) -> tuple[float, float]:
        """Return the sum and the weight that were added on this rank since the last call."""
        current = self.read(), self.weight
        (total, weight), self._marked = self._marked, current
        return current[0] - total, current[1] - weight

    def snapshot(self) -> tuple[float | torch.Tensor, float]:
        """Return sum and weight for `rollback`, without waiting for the device."""
        return (self.sum.clone() if isinstance(self.sum, torch.Tensor) else self.sum), self.weight

    def rollback(self, snapshot: tuple[float | torch.Tensor, float]) -> None:
        """Remove what was added since `snapshot()`."""
        self._set(*snapshot)

    def state_dict(self) -> dict[str, Any]:
        """Return sum and weight, now and at the latest log."""
        return {"sum": self.read(), "weight": self.weight, "marked": list(self._marked)}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states from `state_dict()` of each process; if their number differs, the first gets the total."""
        if len(states) != self.ranks.data.size:
            added: dict[str, Any] = {key: sum(state[key] for state in states) for key in ("sum", "weight")}
            added["marked"] = [sum(state["marked"][i] for state in states) for i in (0, 1)]
            states = [added, *[{"sum": 0.0, "weight": 0.0, "marked": [0.0, 0.0]}] * (self.ranks.data.size - 1)]
        state = states[self.ranks.data.rank]
        self._set(state["sum"], state["weight"])
        self._marked = (state["marked"][0], state["marked"][1])

    def begin_epoch(self) -> None:
        """Start the mean of a new epoch; what was added since the latest log still counts in the next log."""
        total, weight = self.read(), self.weight
        # negative, so that the next difference has what the last epoch added since the latest log
        self._marked = (self._marked[0] - total, self._marked[1] - weight)
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
    device itself (PyTorch's fused ones can, by the `found_inf` that GradScaler uses too), the guard is *deferred*:
    from the first bad step on, the device makes no more updates, and the host learns of it some steps later without
    waiting. Otherwise the number is read, which is free on a CPU.

    Args:
        device: The device of the evidence.
        optimizer: The optimizer whose steps are guarded.
        deferred: Whether to skip updates on the device and learn of it later.
    """

    _PENDING = 32  # how many steps the host may lag behind before it waits

    def __init__(self, device: torch.device, optimizer: Any, deferred: bool) -> None:
        self.deferred: bool = deferred
        self._pending: deque[tuple[int, Any, Any]] = deque()
        if deferred:
            self._found_inf = torch.zeros((), dtype=torch.float32, device=device)
            self._host = torch.zeros(self._PENDING, dtype=torch.float32, pin_memory=device.type == "cuda")
            self._count = 0
            # the attributes that torch.amp.GradScaler sets for fused optimizers (`_step_supports_amp_scaling`)
            optimizer.found_inf, optimizer.grad_scale = self._found_inf, None

    @staticmethod
    def can_defer(device: torch.device, optimizer: Any) -> bool:
        """Return whether reading has a cost and the optimizer can skip updates on the device."""
        return device.type == "cuda" and bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def admits(self, evidence: float | torch.Tensor, where: Callable[[], Any]) -> bool:
        """Return whether to take the step, as far as the host knows.

        Args:
            evidence: A scalar that is finite if and only if loss and gradients are.
            where: Returns the result of `first_bad()` if this step turns out to be bad.
        """
        if not self.deferred:
            return math.isfinite(evidence)  # waits for the device
        bad = ~torch.as_tensor(evidence, device=self._found_inf.device).isfinite()
        # once it is 1 it stays so: no later update may be built on weights that the host has not judged
        torch.maximum(self._found_inf, bad.to(self._found_inf.dtype), out=self._found_inf)
        slot = self._count % self._PENDING
        self._count += 1
        # to pinned memory, or the copy would wait for the device
        self._host[slot].copy_(self._found_inf, non_blocking=True)
        event = torch.cuda.Event() if self._found_inf.device.type == "cuda" else None
        if event is not None:
            event.record()
        self._pending.append((slot, event, where()))
        return True

    def first_bad(self, wait: bool = False) -> Any | None:
        """Return the `where` of the first bad step that the device has reported, or None.

        Args:
            wait: Whether to wait for all steps so far. Otherwise only the step 32 steps back is checked, which is done
                by now; checking whatever happens to be done could differ between ranks.
        """
        while len(self._pending) >= (1 if wait else self._PENDING):
            slot, event, where = self._pending.popleft()
            if event is not None:
                event.synchronize()
            if read_on_cpu(self._host[slot]):
                self._pending.clear()
                return where
        return None

    def release(self, optimizer: Any) -> None:
        """Restore the optimizer as it was."""
        if self.deferred:
            # left there, they would also guard the steps that the user takes after the run
            del optimizer.found_inf, optimizer.grad_scale
            self.deferred = False
