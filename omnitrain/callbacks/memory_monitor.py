"""The memory of the device and of the process, in rows of logs, and a snapshot of it where it runs out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from omnitrain.compute.precision import is_out_of_memory
from omnitrain.core.errors import ConfigError, Tolerance
from omnitrain.core.events import Callback, TrainerLike
from omnitrain.core.files import check_not_link, create_folder
from omnitrain.core.paths import folder_path

if TYPE_CHECKING:
    import torch

logger: logging.Logger = logging.getLogger("omnitrain")

GIB = 1 << 30
_MAX_ENTRIES = 100_000
"""The most allocations that a snapshot remembers."""
_TRAINING = "train"


def resident_memory() -> tuple[int, int]:
    """Return the bytes of host memory that this process holds now, and the most since it began; 0 for an unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        found = {name: value for name, _, value in (line.partition(":") for line in lines)}
        return int(found["VmRSS"].split()[0]) * 1024, int(found["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):  # not Linux
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0, 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS, in KiB elsewhere
    return 0, most if sys.platform == "darwin" else most * 1024


def has_peaks(device: torch.device) -> bool:
    """Whether PyTorch keeps the peaks of the memory of a device."""
    return device.type in ("cuda", "xpu")


def records(device: torch.device) -> bool:
    """Whether PyTorch can record the allocations on a device."""
    return device.type == "cuda"


def read_peaks(device: torch.device) -> tuple[int, int]:
    """Return the most bytes that tensors took on a device, and that PyTorch had reserved, since the last call.

    Both are counts on the host: the device is not waited for.
    """
    import torch

    found = torch.accelerator.memory_stats(device)
    torch.accelerator.reset_peak_memory_stats(device)
    return found.get("allocated_bytes.all.peak", 0), found.get("reserved_bytes.all.peak", 0)


class MemoryMonitor(Callback):
    """Shows in each row of logs how much memory this rank took since the row before, in GiB.

    On a GPU: `memory_allocated`, the most that tensors took at once; `memory_reserved`, the most that PyTorch took from
    the device; and the first of these by what was done meanwhile: `memory_train`, `memory_eval`, `memory_save`, each
    only if there was any of it. The peaks are PyTorch's own counts, which are set back at each of these boundaries:
    `torch.cuda.max_memory_allocated()` has the peak since the latest one. On any device: `memory_process`, the host
    memory that the process holds (its resident set, not that of data loader workers), and `memory_process_peak`, the
    most since the process began. With `async_save`, saving is counted as training.

    The rows show the memory of rank 0; at the end of the run each rank logs its own peaks.

    Args:
        snapshot: Whether to record each allocation on a CUDA device, and write them where memory runs out, for
            https://pytorch.org/memory_viz. Recording takes some time and host memory in every step.
        folder: Where to; None is `memory` in the run's `save_dir`.

    >>> callbacks = [MemoryMonitor()]  # Trainer(..., callbacks=callbacks)
    """

    order = 0  # before what others do at the same boundary
    asks_alone = False

    def __init__(self, snapshot: bool = False, folder: str | Path | None = None) -> None:
        """Check the arguments.

        Raises:
            ConfigError: If `folder` is given, and nothing would be written there.
        """
        if folder is not None and not snapshot:
            raise ConfigError(
                f"`folder={str(folder)!r}` is for snapshots, and `snapshot` is False. Pass snapshot=True, or leave it "
                "out."
            )
        self.snapshot = snapshot
        self.folder: Path | None = None if folder is None else folder_path(folder, "folder")
        self._phase = ""
        """What is being done: "train", "eval" or "save"; empty before the first epoch."""
        self._allocated: dict[str, int] = {}
        """The most bytes that tensors took since the last row, by what was done."""
        self._reserved = 0
        self._of_run: dict[str, int] = {}
        """The most bytes that tensors took in the run, by what was done."""
        self._is_recording = False

    # --- boundaries

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Begin to measure, and to record if asked to.

        Raises:
            ConfigError: If a snapshot is asked for, and there is no CUDA device or no folder.
        """
        self._allocated, self._of_run, self._reserved = {}, {}, 0
        self._enter(trainer, "")
        self._allocated, self._reserved = {}, 0  # of what was before
        if self.snapshot:
            self._record(trainer)

    def on_epoch_start(self, trainer: TrainerLike) -> None:
        """Training begins."""
        self._enter(trainer, _TRAINING)

    def on_eval_start(self, trainer: TrainerLike) -> None:
        """An evaluation begins."""
        self._enter(trainer, "eval")

    def on_eval_end(self, trainer: TrainerLike, metrics: Mapping[str, float]) -> None:
        """An evaluation is over."""
        self._enter(trainer, _TRAINING)

    def on_save_start(self, trainer: TrainerLike) -> None:
        """Saving begins."""
        if not trainer.settings.async_save:
            self._enter(trainer, "save")

    def on_save_end(self, trainer: TrainerLike) -> None:
        """Saving is over."""
        self._enter(trainer, _TRAINING)

    def _enter(self, trainer: TrainerLike, phase: str) -> None:
        """Take the peaks of what was done until now, and start those of what follows."""
        if has_peaks(trainer.device):
            allocated, reserved = read_peaks(trainer.device)
            for peaks in (self._allocated, self._of_run):
                peaks[self._phase] = max(allocated, peaks.get(self._phase, 0))
            self._reserved = max(self._reserved, reserved)
        self._phase = phase

    # --- what is shown

    def log_values(self, trainer: TrainerLike) -> dict[str, float]:
        """Return the memory since the last row, in GiB."""
        self._enter(trainer, _TRAINING)
        found: dict[str, float] = {}
        if self._allocated:
            found = {"memory_allocated": max(self._allocated.values()), "memory_reserved": self._reserved}
            found |= {f"memory_{phase}": peak for phase, peak in self._allocated.items() if phase}
        now, most = resident_memory()
        found |= {"memory_process": now} if now else {}
        found |= {"memory_process_peak": most} if most else {}
        self._allocated, self._reserved = {}, 0
        return {name: value / GIB for name, value in found.items()}

    def on_train_end(self, trainer: TrainerLike) -> None:
        """Log the peaks of the run on this rank, and end the recording."""
        self._enter(trainer, "")
        self._stop_recording()
        peaks = [f"{phase} {peak / GIB:.2f}" for phase, peak in self._of_run.items() if phase]
        peaks.append(f"process {resident_memory()[1] / GIB:.2f}")
        logger.info("The most memory on rank %d, in GiB: %s.", trainer.rank, ", ".join(peaks))

    # --- snapshots

    def _record(self, trainer: TrainerLike) -> None:
        import torch

        if not records(trainer.device):
            raise ConfigError(
                f"`snapshot=True` records the allocations of a CUDA device, and this run is on {str(trainer.device)!r}."
                " Leave it out here."
            )
        if self._folder(trainer) is None:
            raise ConfigError("There is no place for a snapshot of the memory. Pass `save_dir`, or `folder`.")
        torch.cuda.memory._record_memory_history(max_entries=_MAX_ENTRIES)
        self._is_recording = True

    def _stop_recording(self) -> None:
        if self._is_recording:
            import torch

            self._is_recording = False
            torch.cuda.memory._record_memory_history(enabled=None)

    def _folder(self, trainer: TrainerLike) -> Path | None:
        return self.folder or (None if trainer.save_dir is None else trainer.save_dir / "memory")

    def on_exception(self, trainer: TrainerLike, error: BaseException) -> None:
        """Write the snapshot, if memory has run out."""
        folder = self._folder(trainer)
        if not self._is_recording or folder is None or not is_out_of_memory(error):
            return
        import torch

        path = folder / f"rank{trainer.rank}-step{trainer.progress.step}.pickle"
        with Tolerance("The snapshot of the memory", "The run ends without it."):
            if self.folder is None:
                create_folder(folder)
            folder.mkdir(parents=True, exist_ok=True)
            check_not_link(path)
            torch.cuda.memory._dump_snapshot(str(path))
            error.add_note(f"What held the memory is in {str(path)!r}: open it at https://pytorch.org/memory_viz.")
