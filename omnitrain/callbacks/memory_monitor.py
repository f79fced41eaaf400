"""Memory of the device and the process in logs, snapshots on out-of-memory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from omnitrain.compute.device_runtime import device_runtime
from omnitrain.compute.precision import is_out_of_memory
from omnitrain.core.errors import ConfigError, Tolerance
from omnitrain.core.events import Callback, TrainerLike
from omnitrain.core.files import check_not_link, create_folder
from omnitrain.core.paths import folder_path

logger: logging.Logger = logging.getLogger("omnitrain")

GIB = 1 << 30
# Maximum number of allocations in a snapshot.
_MAX_ENTRIES = 100_000
_TRAINING = "train"


def resident_memory() -> tuple[int, int]:
    """Return the current and the peak resident memory of this process in bytes; 0 if unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
        return int(fields["VmRSS"].split()[0]) * 1024, int(fields["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):  # not Linux
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0, 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS, in KiB elsewhere
    return 0, peak if sys.platform == "darwin" else peak * 1024


class MemoryMonitor(Callback):
    """Logs the peak memory of this rank since the previous row, in GiB.

    On a GPU: `memory_allocated`, the peak of all tensors; `memory_reserved`, the peak that PyTorch reserved; and the
    first of these by phase, for phases that occurred: `memory_train`, `memory_eval`, `memory_save`. The peaks are
    PyTorch's counters, which are reset at each change of phase: `torch.cuda.max_memory_allocated()` has the peak
    since the latest one. On any device: `memory_process`, the resident host memory of the process (without data
    loader workers), and `memory_process_peak`, its peak since the process began. With `async_save`, saving is counted
    as training.

    The rows show the memory of rank 0; at the end of the run each rank logs its own peaks.

    Args:
        snapshot: Whether to record each allocation on a CUDA device, and write them on out-of-memory, for
            https://pytorch.org/memory_viz. Recording takes some time and host memory in every step.
        folder: Where snapshots are written; None is `memory` in the run's `save_dir`.

    >>> callbacks = [MemoryMonitor()]  # Trainer(..., callbacks=callbacks)
    """

    order = 0  # before other callbacks allocate at the same boundary
    asks_alone = False

    def __init__(self, snapshot: bool = False, folder: str | Path | None = None) -> None:
        """Check the arguments.

        Raises:
            ConfigError: If `folder` is passed without `snapshot=True`.
        """
        if folder is not None and not snapshot:
            raise ConfigError(
                f"`folder={str(folder)!r}` is for snapshots, and `snapshot` is False. Pass snapshot=True, or leave it "
                "out."
            )
        self.snapshot = snapshot
        self.folder: Path | None = None if folder is None else folder_path(folder, "folder")
        # The current phase: "train", "eval" or "save"; empty before the first epoch.
        self._phase = ""
        # Peak bytes of tensors since the last row, by phase.
        self._allocated: dict[str, int] = {}
        self._reserved = 0
        # Peak bytes of tensors in the run, by phase.
        self._run_peaks: dict[str, int] = {}
        self._is_recording = False

    # --- boundaries

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Start measuring, and recording if `snapshot` is True.

        Raises:
            ConfigError: If `snapshot` is True without a CUDA device or a folder.
        """
        self._allocated, self._run_peaks, self._reserved = {}, {}, 0
        self._begin_phase(trainer, "")
        self._allocated, self._reserved = {}, 0  # peaks from before the run
        if not self.snapshot:
            return
        if not device_runtime(trainer.device).can_record_memory:
            raise ConfigError(
                f"`snapshot=True` records the allocations of a CUDA device, and this run is on {str(trainer.device)!r}."
                " Leave it out here."
            )
        if self.folder is None and trainer.save_dir is None:
            raise ConfigError("A memory snapshot needs a folder. Pass `save_dir`, or `folder`.")
        torch.cuda.memory._record_memory_history(max_entries=_MAX_ENTRIES)
        self._is_recording = True

    def on_epoch_start(self, trainer: TrainerLike) -> None:
        self._begin_phase(trainer, _TRAINING)

    def on_eval_start(self, trainer: TrainerLike) -> None:
        self._begin_phase(trainer, "eval")

    def on_eval_end(self, trainer: TrainerLike, metrics: Mapping[str, float]) -> None:
        self._begin_phase(trainer, _TRAINING)

    def on_save_start(self, trainer: TrainerLike) -> None:
        if not trainer.settings.async_save:
            self._begin_phase(trainer, "save")

    on_save_end = on_epoch_start

    def _begin_phase(self, trainer: TrainerLike, phase: str) -> None:
        """Store the peaks of the phase that ends, and reset them for the next one."""
        runtime = device_runtime(trainer.device)
        if runtime.has_memory_stats:
            allocated, reserved = runtime.read_peaks()
            for peaks in (self._allocated, self._run_peaks):
                peaks[self._phase] = max(allocated, peaks.get(self._phase, 0))
            self._reserved = max(self._reserved, reserved)
        self._phase = phase

    # --- logs

    def log_values(self, trainer: TrainerLike) -> dict[str, float]:
        """Return the memory since the last row, in GiB."""
        self._begin_phase(trainer, _TRAINING)
        sizes: dict[str, float] = {}
        if self._allocated:
            sizes = {"memory_allocated": max(self._allocated.values()), "memory_reserved": self._reserved}
            sizes |= {f"memory_{phase}": peak for phase, peak in self._allocated.items() if phase}
        resident, peak = resident_memory()
        sizes |= {"memory_process": resident} if resident else {}
        sizes |= {"memory_process_peak": peak} if peak else {}
        self._allocated, self._reserved = {}, 0
        return {name: size / GIB for name, size in sizes.items()}

    def on_train_end(self, trainer: TrainerLike) -> None:
        self._begin_phase(trainer, "")
        if self._is_recording:
            self._is_recording = False
            torch.cuda.memory._record_memory_history(enabled=None)
        peaks = [f"{phase} {peak / GIB:.2f}" for phase, peak in self._run_peaks.items() if phase]
        peaks.append(f"process {resident_memory()[1] / GIB:.2f}")
        logger.info("Peak memory on rank %d, in GiB: %s.", trainer.rank, ", ".join(peaks))

    # --- snapshots

    def on_exception(self, trainer: TrainerLike, error: BaseException) -> None:
        if not self._is_recording or not is_out_of_memory(error):
            return
        folder = self.folder or Path(trainer.save_dir or "") / "memory"
        path = folder / f"rank{trainer.rank}-step{trainer.progress.step}.pickle"
        with Tolerance("The memory snapshot", "The run ends without it."):
            if self.folder is None:
                create_folder(folder)
            folder.mkdir(parents=True, exist_ok=True)
            check_not_link(path)
            torch.cuda.memory._dump_snapshot(str(path))
            error.add_note(f"The memory snapshot is in {str(path)!r}: open it at https://pytorch.org/memory_viz.")
