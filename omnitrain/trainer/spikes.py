"""Skipped steps and restored states after spikes of a run."""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from omnitrain.algorithms.spike_guard import Spike, SpikeGuard
from omnitrain.callbacks.cadence import Cadence
from omnitrain.checkpoint.live_copy import LiveCopy
from omnitrain.compute.device_runtime import device_runtime
from omnitrain.core.errors import CheckpointError, NonFiniteError, format_list
from omnitrain.core.events import Event
from omnitrain.core.progress import Progress
from omnitrain.data.loaders import MapLoader, close_loaders
from omnitrain.loggers.logger import RowLogger

logger: logging.Logger = logging.getLogger("omnitrain")

# Steps that are judged at once, by one exchange between the ranks.
_BLOCK = 8


class _Measurement(NamedTuple):
    """Loss and norm of a step, on the device or on their way to the host."""

    position: dict[str, int]
    values: Any
    weight: float
    event: Any


class Spikes:
    """What a `SpikeGuard` in `algorithms` decides for each step of a run.

    Attributes:
        guard: The algorithm, which judges.
        spike: The spike before which the run is to be restored, until `rewind` does so.
    """

    def __init__(self, guard: SpikeGuard, step: Any, trainer: Any) -> None:
        self.guard = guard
        self.spike: Spike | None = None
        self._step = step
        self._trainer = trainer
        self._runtime = device_runtime(trainer.device)
        self._pending: deque[_Measurement] = deque()
        # Whether a step is not finite, so that there is no use in further ones.
        self._is_urgent = False
        self._before: tuple[Any, float] = (0.0, 0.0)
        self._copy = LiveCopy()
        # The data that have a state, and their states before the run reads them.
        self._data: list[tuple[Any, Any]] = []
        self._in_a_row = 0
        self._latest_step = -math.inf

    @classmethod
    def find(cls, step: Any, trainer: Any) -> Spikes | None:
        """Return the object for a trainer whose algorithms include a `SpikeGuard`."""
        guards = [algorithm for algorithm in trainer.algorithms if isinstance(algorithm, SpikeGuard)]
        return cls(guards[0], step, trainer) if guards else None

    @property
    def rewinds(self) -> bool:
        """Whether spikes restore an earlier state; otherwise they skip their step."""
        return self.guard.action == "rewind"

    # --- in a step

    def begin_step(self) -> None:
        """Note the loss of the epoch before a step."""
        self._before = self._step.loss.snapshot()

    def admits(self, norm: torch.Tensor) -> bool:
        """Return whether to make the update; a guard that rewinds only collects loss and norm here."""
        loss, progress = self._step.loss, self._trainer.progress
        start = progress.samples_in_epoch
        stop = start + self._step.window.samples
        position = {"step": progress.step + 1, "epoch": progress.epoch, "start": start, "stop": stop}
        total: Any = loss.sum - self._before[0]
        values = (total, norm) if isinstance(total, float) else torch.stack([total, norm.to(total)])
        if isinstance(values, torch.Tensor) and self._runtime.has_streams:  # does not wait for the device
            values = self._runtime.host_buffer(2, values.dtype).copy_(values, non_blocking=True)
        measurement = _Measurement(position, values, loss.weight - self._before[1], self._runtime.record_event())
        self._pending.append(measurement)
        if self.rewinds:
            return True
        spike = self._judge(1)
        if spike is not None:
            self.guard.left_out.append(spike)
            stops = self.guard.action == "stop"
            self._report(spike, f"Its update is skipped{' and the run stops' if stops else ''}, which leaves out")
            if stops:
                self._trainer.control.schedule("requested")
        return spike is None

    def expect_nonfinite(self) -> None:
        """Judge right after this step, which is not finite."""
        self._is_urgent = True

    # --- between steps

    def begin_run(self) -> None:
        """Copy the state from which a run is restored that has no checkpoint yet."""
        if not self.rewinds:
            return
        checkpointer = self._checkpointer
        # a loader of PyTorch begins each pass at its beginning, and may create workers to return its state
        sources = [each for each in self._trainer.train_loader.stateful_sources() if not isinstance(each, DataLoader)]
        self._data = [(source, copy.deepcopy(source.state_dict())) for source in sources]
        if self.guard.every is not None or checkpointer.resumed is None:
            self._copy.update(self._trainer, checkpointer.contents, checkpointer.eval_weights)

    def detect(self, wait: bool) -> bool:
        """Judge steps, and return whether there is a spike; called on all ranks after each step.

        Args:
            wait: Whether to judge all steps so far, as before a log, an evaluation or a checkpoint. Otherwise half of
                those that are collected are judged once these are enough, which the device has long computed.
        """
        if not self.rewinds:
            return False
        if wait or self._is_copy_due or self._is_urgent:
            count = len(self._pending)
        else:
            count = _BLOCK if len(self._pending) >= 2 * _BLOCK else 0
        if self.spike is None and count:
            self.spike = self._judge(count)
        self._is_urgent = False
        return self.spike is not None

    @property
    def _is_copy_due(self) -> bool:
        every, step, latest = self.guard.every, self._trainer.progress.step, self._copy.progress
        return every is not None and step % every == 0 and (latest is None or latest.step < step)

    def keep_copy(self) -> None:
        """Copy the state of the run if it is time, after all that was requested at this step."""
        if self._is_copy_due:
            checkpointer = self._checkpointer
            self._copy.update(self._trainer, checkpointer.contents, checkpointer.eval_weights)
        elif self.guard.every is None and self._lifecycle.saved_path is not None:
            self._copy = LiveCopy()  # checkpoints replace it

    def _judge(self, count: int) -> Spike | None:
        """Return the first spike among the oldest collected steps, with their losses over all ranks."""
        ranks = self._trainer.ranks
        for first in range(0, count, _BLOCK):
            steps, sums = [self._pending.popleft() for _ in range(min(_BLOCK, count - first))], list[float]()
            for entry in steps:
                if entry.event is not None:
                    entry.event.synchronize()
                sums += [float(entry.values[0]), entry.weight]
            sums = ranks.sum_shares("the losses of steps", *sums)
            for entry, total, weight in zip(steps, sums[::2], sums[1::2], strict=True):
                loss, norm = total / weight if weight else math.nan, float(entry.values[1])
                if self._trainer.backend.can_skip and math.isfinite(loss) and not math.isfinite(norm):
                    continue  # an overflow of fp16, which the loss scaler handles
                spike = self.guard.find_spike(entry.position, loss, norm)
                if spike is not None:
                    self._pending.clear()
                    return spike
        return None

    # --- going back

    def rewind(self) -> None:
        """Restore the state from before the spike; from there on, the samples of its step are left out.

        Raises:
            NonFiniteError: After too many rewinds in a row.
            CheckpointError: If there is no state from before it.
        """
        spike, guard, lifecycle = self.spike, self.guard, self._lifecycle
        assert spike is not None
        self._in_a_row = 1 if spike.step - self._latest_step >= guard.window // 4 else self._in_a_row + 1
        self._latest_step = spike.step
        if self._in_a_row > guard.limit:
            samples = ", ".join(f"{entry.start} to {entry.stop - 1}" for entry in guard.left_out[-guard.limit :])
            raise NonFiniteError(
                f"{str(spike)[:1].upper()}{str(spike)[1:]}, after {guard.limit} rewinds in a row that left out the "
                f"samples at the positions {samples} of the order: the weights are the cause, not the samples. Lower "
                "the learning rate, warm up longer or lower `max_grad_norm`, and resume from the last checkpoint."
            )
        left_out, seconds, clock = [*guard.left_out, spike], lifecycle.progress.seconds, lifecycle.clock.state_dict()
        self._checkpointer.await_background()
        close_loaders(self._trainer.train_loader)
        for source, state in self._data:  # from which the next pass reads up to the position that is restored
            source.load_state_dict(copy.deepcopy(state))
        origin = self._restore(spike)
        guard.left_out = left_out
        lifecycle.progress.seconds = seconds
        lifecycle.clock.load_state_dict(clock)
        lifecycle.saved_at = None  # a checkpoint here lacks what is left out from now on
        lifecycle.undo_requests()
        self._step.guard.reset()
        self.spike = None
        self._pending.clear()
        self._report(spike, f"The run continues from step {lifecycle.progress.step} ({origin}), and leaves out")
        for callback in lifecycle.callbacks:
            if isinstance(callback, (Cadence, RowLogger)):
                callback.restart(self._trainer)
        lifecycle.emit(Event.CHECKPOINT_LOADED)

    def _restore(self, spike: Spike) -> str:
        """Restore the newest state from before a spike, and return what it was."""
        checkpointer, resumed = self._checkpointer, self._checkpointer.resumed
        position, folder = self._copy.progress, self._lifecycle.saved_path or (resumed and resumed.folder)
        # only the newest, since `save_total_limit` and `save_only_model` may have reduced an earlier one
        checkpoint = None if folder is None else checkpointer.find(folder)
        step = -1 if checkpoint is None else Progress.from_state(checkpoint.content["progress"]).step
        if checkpoint is not None and (-1 if position is None else position.step) < step < spike.step:
            checkpointer.restore_in_run(checkpoint)
            return checkpoint.folder.name
        if position is None or position.step >= spike.step:
            raise CheckpointError(
                f"SpikeGuard cannot go back: there is no checkpoint and no copy from before step {spike.step}. Leave "
                "saving to `save_steps`, or pass `every`."
            )
        self._copy.restore(self._trainer, checkpointer.contents, checkpointer.eval_weights)
        return "a copy in memory"

    def _report(self, spike: Spike, outcome: str) -> None:
        """Log a spike, and add it to the history and to `run.json`."""
        loader, indices = self._trainer.train_loader, list[int]()
        if isinstance(loader, MapLoader):
            indices = loader.sampler.samples(spike.epoch, spike.start, spike.stop).tolist()
        samples = format_list(indices) if indices else f"those at the positions {spike.start} to {spike.stop - 1}"
        self._lifecycle.metrics["left_out_samples"] = self.guard.left_out_samples
        if (record := self._checkpointer.contents.record) is not None:  # on the main rank
            record.add_left_out({**spike.to_dict(), "samples": indices})
        if self._trainer.is_main_process:
            logger.warning("A spike: %s. %s its %d samples: %s", spike, outcome, spike.stop - spike.start, samples)

    @property
    def _lifecycle(self) -> Any:
        return self._trainer.lifecycle

    @property
    def _checkpointer(self) -> Any:
        return self._trainer._checkpointer
