"""Scheduled traces and operator tables by torch.profiler."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from omnitrain.core.errors import ConfigError, Tolerance, check_number
from omnitrain.core.events import Callback, TrainerLike
from omnitrain.core.files import check_not_link, create_folder
from omnitrain.core.foreign_names import explain_call
from omnitrain.core.paths import folder_path

logger: logging.Logger = logging.getLogger("omnitrain")

PARTS = ("data", "forward", "backward", "update")
# Maximum characters of an operation in the table: names of kernels have hundreds.
_WIDTH = 60


class Profiler(Callback):
    """Traces some steps of a run by `torch.profiler`, and logs which operations took the most time.

    Steps are counted from where the run begins or resumes. `skip` steps are skipped once; then each cycle skips `wait`
    steps, discards the results of `warmup` steps, and traces `active` steps. A step begins when its data are read, so
    an evaluation between two steps belongs to the second one.

    Each rank writes `rank<r>-step<s>.json.gz` after a cycle, where `s` is the last traced step; open it in
    https://ui.perfetto.dev or chrome://tracing. The parts of a step are ranges there: data, forward, backward, update.
    The table of rank 0 is logged, and sent to loggers that show texts. Operations are traced on the CPU and on a CUDA
    or XPU device. Weights and random numbers are the same as without it. Only traced steps take longer; the time to
    write a trace is excluded from rates.

    Args:
        skip: Steps to skip at the beginning, when memory is allocated and kernels are chosen.
        wait: Steps to skip in each cycle.
        warmup: Steps in each cycle whose results are discarded, as the profiler's start takes time.
        active: Steps to trace in each cycle.
        repeat: Number of cycles; 0 repeats to the end of the run.
        folder: Where traces are written; None is `profile` in the run's `save_dir`.
        rows: Number of operations in the table.
        record_shapes: Whether to record the shapes of operations' inputs.
        profile_memory: Whether to record the memory that operations allocate.
        with_stack: Whether to record the Python source lines of operations; slow.

    >>> callbacks = [Profiler(skip=10, active=2)]  # Trainer(..., callbacks=callbacks)
    """

    order = 0  # first, so that another callback's error cannot leave the profiler running
    asks_alone = False
    # The active instance: PyTorch has one profiler per process.
    _running: ClassVar[Profiler | None] = None

    @explain_call
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
            ConfigError: If a number is not an integer, or is too small.
        """
        numbers = {"skip": skip, "wait": wait, "warmup": warmup, "active": active, "repeat": repeat, "rows": rows}
        for name, number in numbers.items():
            check_number(name, number, least=int(name in ("active", "rows")), is_whole=True)
        self.skip: int = skip
        self.wait: int = wait
        self.warmup: int = warmup
        self.active: int = active
        self.repeat: int = repeat
        self.rows = rows
        self.folder: Path | None = None if folder is None else folder_path(folder, "folder")
        self.options: dict[str, Any] = {
            "record_shapes": record_shapes, "profile_memory": profile_memory, "with_stack": with_stack,
        }  # fmt: skip
        # PyTorch's profiler, in a cycle after its skipped steps.
        self._profile: Any = None
        self._has_ranges = False
        self._error: Exception | None = None
        # Steps and traces of this run so far.
        self._step_count = self._trace_count = 0
        self._tolerance = Tolerance("A trace of the profiler", "The next one is tried again.")

    # --- schedule

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Reject a second profiler, and a run without a folder for traces.

        Raises:
            ConfigError: If another profiler is active, or there is no folder.
        """
        is_ours = Profiler._running is not None
        if is_ours or torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
            place = "in the `callbacks` of this run or of another" if is_ours else "around `train()`"
            raise ConfigError(
                f"A Profiler cannot start while another one is active, {place}: PyTorch has one per process. Leave one "
                "of them out."
            )
        if self.folder is None and trainer.save_dir is None:
            raise ConfigError("A Profiler needs a folder for its traces. Pass `save_dir`, or `folder` to it.")
        Profiler._running = self
        self._step_count = self._trace_count = 0

    def on_epoch_start(self, trainer: TrainerLike) -> None:
        """Start PyTorch's profiler before the data of the first step are read, if no step is skipped."""
        if self._profile is None and not self._step_count:
            self._start_if_due(trainer)

    def on_step_end(self, trainer: TrainerLike) -> None:
        self._step_count += 1
        if self._profile is not None:
            is_last = self._profile.current_action is ProfilerAction.RECORD_AND_SAVE
            with trainer.lifecycle.untimed() if is_last else contextlib.nullcontext():  # a trace is written
                self._profile.step()
                self._set_ranges(trainer)
                if is_last:
                    self._stop_profile(trainer)
        if self._profile is None:
            self._start_if_due(trainer)

    def on_train_end(self, trainer: TrainerLike) -> None:
        """Stop the profiler, and warn if the run had too few steps."""
        if Profiler._running is not self:
            return
        Profiler._running = None
        complete_traces = self._trace_count
        if self._profile is not None:
            with trainer.lifecycle.untimed():
                self._stop_profile(trainer)
        first = self.skip + self.wait + self.warmup + 1
        if self._trace_count > complete_traces:
            logger.warning(
                "The run ended in the middle of a cycle of the Profiler: its last trace has fewer than %d steps.",
                self.active,
            )
        elif not complete_traces:
            logger.warning(
                "The Profiler has traced nothing: this run had %d steps, and step %d would be the first to be traced. "
                "Pass a smaller `skip` or `wait`.", self._step_count, first,
            )  # fmt: skip

    # --- traces

    def _start_if_due(self, trainer: TrainerLike) -> None:
        """Start PyTorch's profiler for one cycle, once its skipped steps are over: its `step()` takes time in each."""
        cycle, position = divmod(self._step_count - self.skip, self.wait + self.warmup + self.active)
        if Profiler._running is not self or cycle < 0 or position != self.wait or 0 < self.repeat <= cycle:
            return

        def save_trace(profiler: profile) -> None:
            try:
                self._save_trace(trainer, profiler)
            except Exception as error:  # kept until the profiler is stopped, which in a transition would crash
                self._error = error

        device_activity = getattr(ProfilerActivity, trainer.device.type.upper(), ProfilerActivity.CPU)
        self._profile = profile(
            activities={ProfilerActivity.CPU} | ({device_activity} & torch.profiler.supported_activities()),
            schedule=schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=save_trace,
            **self.options,
        )
        self._profile.start()
        self._set_ranges(trainer)

    def _stop_profile(self, trainer: TrainerLike) -> None:
        profiler, self._profile, self._has_ranges = self._profile, None, False
        trainer.lifecycle.set_profiler_ranges(self, None)
        profiler.stop()
        if self._error is not None:
            error, self._error, Profiler._running = self._error, None, None
            raise error

    def _set_ranges(self, trainer: TrainerLike) -> None:
        """Add ranges for the parts of traced steps."""
        is_tracing = self._profile.current_action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
        if is_tracing != self._has_ranges:
            self._has_ranges = is_tracing
            trainer.lifecycle.set_profiler_ranges(self, record_function if is_tracing else None)

    def _save_trace(self, trainer: TrainerLike, profiler: profile) -> None:
        """Write the trace of this rank; on the main rank, log the table."""
        self._trace_count += 1
        folder = self.folder or Path(trainer.save_dir or "") / "profile"
        path = folder / f"rank{trainer.rank}-step{trainer.progress.step}.json.gz"
        with self._tolerance:
            if self.folder is None:
                create_folder(folder)
            folder.mkdir(parents=True, exist_ok=True)
            check_not_link(path)
            profiler.export_chrome_trace(str(path))
        if trainer.is_main_process:
            table = format_table(profiler.key_averages(), self.rows)
            logger.info("The steps up to step %d, whose trace is %r:\n%s", trainer.progress.step, str(path), table)
            trainer.lifecycle.report({"profile": table})


def format_table(operations: Sequence[Any], rows: int) -> str:
    """Return a table of the slowest operations, and a line with the parts of the steps.

    Times are device times if anything ran on a device, otherwise host times.
    """
    has_device = any(operation.self_device_time_total for operation in operations)
    parts: dict[str, float] = {}
    times: dict[str, tuple[float, int]] = {}
    for operation in operations:
        key = operation.key
        if key in PARTS:
            parts[key] = max(parts.get(key, 0.0), operation.cpu_time_total)  # a device has a second entry for it
        elif not key.startswith("ProfilerStep"):
            time, count = times.get(key, (0.0, 0))
            self_time = operation.self_device_time_total if has_device else operation.self_cpu_time_total
            times[key] = time + self_time, count + operation.count
    total = sum(time for time, _ in times.values()) or 1.0
    slowest = sorted(times.items(), key=lambda entry: -entry[1][0])[:rows]
    width = max([len("operation"), *(len(name[:_WIDTH]) for name, _ in slowest)])
    place = "device" if has_device else "host"
    lines = [f"{'operation':{width}}  {'calls':>7}  {f'ms on {place}':>12}  share"]
    lines += [f"{name[:_WIDTH]:{width}}  {n:7}  {time / 1e3:12.3f}  {time / total:5.1%}" for name, (time, n) in slowest]
    part_times = ", ".join(f"{name} {parts[name] / 1e3:.3f}" for name in PARTS if name in parts)
    return "\n".join([*lines, f"Parts of the steps, in ms on the host: {part_times}."])
