"""Where the time of some steps goes: traces and a table by torch.profiler, on a schedule."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from omnitrain.core.errors import ConfigError, Tolerance
from omnitrain.core.events import Callback, TrainerLike
from omnitrain.core.files import check_not_link, create_folder
from omnitrain.core.paths import folder_path

if TYPE_CHECKING:
    import torch

logger: logging.Logger = logging.getLogger("omnitrain")

PARTS = ("data", "forward", "backward", "update")
_WIDTH = 60
"""The most characters of the name of an operation in the table: those of kernels have hundreds."""


class Profiler(Callback):
    """Traces some steps of a run by `torch.profiler`, and logs which operations took the most time.

    Steps are counted from where the run begins, or is resumed: `skip` steps are left out once, then each cycle leaves
    out `wait` steps, runs the profiler without keeping its results in `warmup` steps, and traces `active` steps. A step
    is the reading of its data with all that follows until the next one is over, so an evaluation in between belongs to
    the step after it.

    Each rank writes `rank<r>-step<s>.json.gz` after a cycle, `s` being the step that was traced last; open it in
    https://ui.perfetto.dev or chrome://tracing. The parts of a step are named there: data, forward, backward, update.
    The table of rank 0 is logged, and shown by loggers that show texts. Operations on a CUDA or XPU device are traced
    beside those on the CPU. Weights and random numbers are the same as without it; steps that are traced take longer,
    the others do not. Writing a trace is not part of the rates in the logs.

    Args:
        skip: Steps to leave out at the beginning, when memory is allocated and kernels are chosen.
        wait: Steps to leave out in each cycle.
        warmup: Steps in each cycle in which the profiler runs, and its results are dropped, as its start takes time.
        active: Steps of each cycle that are traced.
        repeat: Cycles; 0 goes on to the end of the run.
        folder: Where traces go; None is `profile` in the run's `save_dir`.
        rows: Operations in the table.
        record_shapes: Whether to note the shapes of operations' inputs.
        profile_memory: Whether to note what operations allocate.
        with_stack: Whether to note the lines of Python code that operations come from; slow.

    >>> callbacks = [Profiler(skip=10, active=2)]  # Trainer(..., callbacks=callbacks)
    """

    order = 0  # so that no other callback's error comes before the end of the profiler
    asks_alone = False
    _running: ClassVar[Profiler | None] = None
    """The one whose run is under way: PyTorch has one profiler in a process."""

    def __init__(
        self,
        skip: int = 4,
        wait: int = 0,
        warmup: int = 1,
        active: int = 4,
        repeat: int = 1,
        folder: str | Path | None = None,
        *,
        rows: int = 10,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        """Check the arguments.

        Raises:
            ConfigError: If a number is not whole or too small.
        """
        numbers = {"skip": (skip, 0), "wait": (wait, 0), "warmup": (warmup, 0), "active": (active, 1),
                   "repeat": (repeat, 0), "rows": (rows, 1)}  # fmt: skip
        for name, (value, least) in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"`{name}` of a Profiler must be an integer of at least {least}, got {value!r}.")
        self.skip: int = skip
        self.wait: int = wait
        self.warmup: int = warmup
        self.active: int = active
        self.repeat: int = repeat
        self.rows: int = rows
        self.folder: Path | None = None if folder is None else folder_path(folder, "folder")
        self.record_shapes: bool = record_shapes
        self.profile_memory: bool = profile_memory
        self.with_stack: bool = with_stack
        self._profile: Any = None
        """PyTorch's profiler, from the warm-up of a cycle to its end."""
        self._seen = self._traces = 0
        """Steps of this run so far, and traces that were made of them."""
        self._is_over = False
        """Whether the last cycle of the run is over."""
        self._tolerance = Tolerance("A trace of the profiler", "The next one is tried again.")

    # --- when

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Refuse a second profiler, and a run that has no place for traces.

        Raises:
            ConfigError: If there is either.
        """
        import torch

        running = Profiler._running is not None
        if running or torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
            whose = "in the `callbacks` of this run or of another" if running else "around `train()`"
            raise ConfigError(
                f"A Profiler cannot begin while another one is at work, {whose}: PyTorch has one in a process. Leave "
                "one of them out."
            )
        if self.folder is None and trainer.save_dir is None:
            raise ConfigError("There is no place for the traces of a Profiler. Pass `save_dir`, or `folder` to it.")
        Profiler._running = self
        self._seen, self._traces, self._is_over = 0, 0, False

    def on_epoch_start(self, trainer: TrainerLike) -> None:
        """Begin before the data of the first step are read, if no step is left out."""
        if self._profile is None and not self._seen:
            self._begin_if_due(trainer)

    def on_step_end(self, trainer: TrainerLike) -> None:
        """Go on to the next step of the schedule."""
        if self._is_over:
            return
        self._seen += 1
        try:
            self._advance(trainer)
        except Exception:  # with another `on_error` the run goes on, and may not call this again
            self._give_up(trainer)
            raise

    def _advance(self, trainer: TrainerLike) -> None:
        if self._profile is not None:
            done = self._seen - self.skip
            is_last = done % self._cycle == 0
            with trainer.lifecycle.untimed() if is_last else contextlib.nullcontext():  # a trace is written
                self._profile.step()
                self._mark(trainer)
                if is_last:
                    self._end(trainer)
            self._is_over = done == self._cycle * self.repeat
        if self._profile is None:
            self._begin_if_due(trainer)

    def on_train_end(self, trainer: TrainerLike) -> None:
        """End the profiler, and say if it has seen too few steps."""
        if Profiler._running is not self:
            return
        Profiler._running = None
        complete = self._traces
        if self._profile is not None:
            with trainer.lifecycle.untimed():
                self._end(trainer)
        first = self.skip + self.wait + self.warmup + 1
        if self._traces > complete:
            logger.warning(
                "The run ended in the middle of a cycle of the Profiler: its last trace has fewer than %d steps.",
                self.active,
            )
        elif not complete:
            logger.warning(
                "The Profiler has traced nothing: it counted %d steps, and the first that it traces is step %d, from "
                "where the run began. Pass a smaller `skip` or `wait`.", self._seen, first,
            )  # fmt: skip

    # --- what

    @property
    def _cycle(self) -> int:
        return self.wait + self.warmup + self.active

    def _begin_if_due(self, trainer: TrainerLike) -> None:
        """Start PyTorch's profiler for a cycle, if the steps that it leaves out are over."""
        import torch
        from torch.profiler import ProfilerActivity, profile, schedule

        done = self._seen - self.skip
        if self._is_over or done < 0 or done % self._cycle != self.wait:
            return
        other = getattr(ProfilerActivity, trainer.device.type.upper(), ProfilerActivity.CPU)
        activities = {ProfilerActivity.CPU} | ({other} & torch.profiler.supported_activities())
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=lambda made: self._keep(trainer, made),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
        )
        self._profile.start()
        self._mark(trainer)

    def _end(self, trainer: TrainerLike) -> None:
        ended, self._profile = self._profile, None
        trainer.lifecycle.set_profiler_ranges(self, None)
        if ended is not None:
            ended.stop()

    def _give_up(self, trainer: TrainerLike) -> None:
        """End PyTorch's profiler, if it lets itself be ended, and trace nothing more in this run."""
        self._is_over, Profiler._running = True, None
        with contextlib.suppress(Exception):
            self._end(trainer)

    def _mark(self, trainer: TrainerLike) -> None:
        """Name the parts of the steps that are traced, and of no others."""
        from torch.profiler import ProfilerAction, record_function

        traced = self._profile.current_action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
        trainer.lifecycle.set_profiler_ranges(self, record_function if traced else None)

    def _keep(self, trainer: TrainerLike, made: torch.profiler.profile) -> None:
        """Write the trace of this rank, and show the table of the main one."""
        self._traces += 1
        folder = self.folder or Path(trainer.save_dir or "") / "profile"
        path = folder / f"rank{trainer.rank}-step{trainer.progress.step}.json.gz"
        with self._tolerance:
            if self.folder is None:
                create_folder(folder)
            folder.mkdir(parents=True, exist_ok=True)
            check_not_link(path)
            made.export_chrome_trace(str(path))
        if trainer.is_main_process:
            table = table_of(made.key_averages(), self.rows)
            logger.info("The steps up to step %d, whose trace is %r:\n%s", trainer.progress.step, str(path), table)
            trainer.lifecycle.report({"profile": table})


def table_of(operations: Sequence[Any], rows: int) -> str:
    """Return a table of the operations that took the most time, and a line with the parts of the steps.

    The time is that on the device, if anything ran there, otherwise on the host.

    Args:
        operations: What `key_averages()` of a profiler returns.
        rows: Operations in the table.
    """
    has_device = any(one.self_device_time_total for one in operations)
    parts: dict[str, float] = {}
    times: dict[str, tuple[float, int]] = {}
    for one in operations:
        if one.key in PARTS:
            parts[one.key] = max(parts.get(one.key, 0.0), one.cpu_time_total)  # on a device it comes once more
        elif not one.key.startswith("ProfilerStep"):
            time, count = times.get(one.key, (0.0, 0))
            own = one.self_device_time_total if has_device else one.self_cpu_time_total
            times[one.key] = time + own, count + one.count
    whole = sum(time for time, _ in times.values()) or 1.0
    most = sorted(times.items(), key=lambda item: -item[1][0])[:rows]
    width = max([len(name[:_WIDTH]) for name, _ in most], default=0)
    width = max(width, len("operation"))
    where = "device" if has_device else "host"
    lines = [f"{'operation':{width}}  {'calls':>7}  {f'ms on {where}':>12}  share"]
    lines += [f"{name[:_WIDTH]:{width}}  {n:7}  {time / 1e3:12.3f}  {time / whole:5.1%}" for name, (time, n) in most]
    told = ", ".join(f"{name} {parts[name] / 1e3:.3f}" for name in PARTS if name in parts)
    return "\n".join([*lines, f"Parts of the steps, in ms on the host: {told}."])
