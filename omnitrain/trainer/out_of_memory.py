"""Notes on out-of-memory errors: memory in use, and remedies."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from omnitrain.compute.precision import is_out_of_memory
from omnitrain.optim.sparse_gradients import stored_values
from omnitrain.trainer.hooks import Hooks

logger: logging.Logger = logging.getLogger("omnitrain")

Work = Literal["training", "evaluation", "saving"]

# A rank of so many is shown for what sharding would give, where the run has a single process.
_MANY = 8
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# A remedy is listed if it frees at least this share of what is known to be taken.
_LEAST = 0.02


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a rank had on its device when memory ran out, in bytes, and the settings that decide about it.

    Args:
        work: What was being done.
        parameters: Parameters and buffers.
        gradients: Gradients.
        state: What the optimizer keeps.
        future_gradients: Gradients that a step adds to these.
        future_optimizer_bytes: What the first update adds to the state, if that is known.
        peak: The most that tensors took at once, with all of these; None if the device does not count it.
        requested: The allocation that failed; 0 if the error does not say.
        capacity: The memory of the device; None if that is not known.
        rows: Rows of a micro-batch, or of a batch of an evaluation.
        world_size: Ranks of the run.
        is_sharded: Whether parameters, gradients or state are sharded already.
        is_recomputed: Whether activations are recomputed already.
        is_full_precision: Whether the forward pass computes in 32 bits.
    """

    work: Work
    parameters: int
    gradients: int
    state: int
    future_gradients: int = 0
    future_optimizer_bytes: int = 0
    peak: int | None = None
    requested: int = 0
    capacity: int | None = None
    rows: int = 1
    world_size: int = 1
    is_sharded: bool = False
    is_recomputed: bool = False
    is_full_precision: bool = True

    @property
    def activations(self) -> int | None:
        """The rest, with the failed allocation: activations, and the work space of operations; None if unknown."""
        if self.peak is None:
            return None
        return max(self.peak - self.parameters - self.gradients - self.state, 0) + self.requested


def size_of(number: float) -> str:
    """Return bytes as text.

    >>> size_of(0), size_of(1_500_000), size_of(12_300_000_000)
    ('0 MB', '1.5 MB', '12.3 GB')
    """
    value, unit = (number / 1e9, "GB") if number >= 1e9 else (number / 1e6, "MB")
    return f"{value:.1f} {unit}" if value else f"0 {unit}"


def format_oom_report(shortage: Shortage) -> str:
    """Return what took the memory, and what would give some of it back, as the text of a note.

    >>> print(format_oom_report(Shortage("training", 10**9, 10**9, 2 * 10**9, peak=9 * 10**9, rows=8)))
    Memory ran out in training, and this is what was in it: parameters 1.0 GB, gradients 1.0 GB, optimizer state 2.0 GB, activations and work space 5.0 GB at most.
    What would take less, and about how much:
      microbatch_size=4 (instead of 8; the same step, in more parts): -2.5 GB
      autocast="bf16": up to -2.5 GB
      gradient_checkpointing=True (slower, the same numbers): most of 5.0 GB
      an optimizer whose state has 8 bits: -1.5 GB
      FSDP or ZeRO 3 over 8 processes: -3.5 GB
      ZeRO 2 over 8 processes: -2.6 GB
    """  # noqa: E501
    parts = {"parameters": shortage.parameters, "gradients": shortage.gradients, "optimizer state": shortage.state}
    words = [f"{name} {size_of(size)}" for name, size in parts.items()]
    if shortage.future_gradients or shortage.future_optimizer_bytes:
        future_bytes = {"gradients": shortage.future_gradients, "state": shortage.future_optimizer_bytes}
        future = " and ".join(f"{size_of(size)} of {name}" for name, size in future_bytes.items() if size)
        words[-1] += f" (of the first step, {future} were still to come)"
    if shortage.activations is not None:
        words.append(f"activations and work space {size_of(shortage.activations)} at most")
    if shortage.requested:
        words.append(
            f"{'with' if shortage.peak is not None else 'and'} the {size_of(shortage.requested)} for which there was "
            "no room"
        )
    capacity = f" The device has {size_of(shortage.capacity)}." if shortage.capacity else ""
    text = f"{_HEAD} in {shortage.work}, and this is what was in it: {', '.join(words)}.{capacity}"
    remedies = [f"  {name}{f': {gain}' if gain else ''}" for name, gain in _remedies(shortage)]
    return "\n".join([text, "What would take less, and about how much:", *remedies] if remedies else [text])


_HEAD = "Memory ran out"


def _remedies(shortage: Shortage) -> Iterator[tuple[str, str]]:
    """Yield what would take less memory, with how much that is."""
    active, least = shortage.activations, _LEAST * (max(shortage.peak or 0, shortage.parameters) + shortage.requested)
    matters = active is None or active > least

    def of_active(share: float, words: str = "") -> str:
        return "" if active is None else f"{words}-{size_of(active * share)}"

    if shortage.work == "saving":
        matters = False
    if matters and shortage.rows > 1:
        half = shortage.rows // 2
        share, before = 1 - half / shortage.rows, f"(instead of {shortage.rows}"
        if shortage.work == "training":
            yield f"microbatch_size={half} {before}; the same step, in more parts)", of_active(share)
        else:
            yield f"eval_batch_size={half} {before})", of_active(share)
    if matters and shortage.is_full_precision:
        yield 'autocast="bf16"', of_active(0.5, "up to ")
    if shortage.work == "training" and matters and not shortage.is_recomputed:
        most = "" if active is None else f"most of {size_of(active)}"
        yield "gradient_checkpointing=True (slower, the same numbers)", most
    state, gradients = shortage.state + shortage.future_optimizer_bytes, shortage.gradients + shortage.future_gradients
    if state > least:
        yield "an optimizer whose state has 8 bits", f"-{size_of(state * 0.75)}"
    if not shortage.is_sharded:
        ranks = shortage.world_size if shortage.world_size > 1 else _MANY
        for name, sharded in (
            ("FSDP or ZeRO 3", shortage.parameters + gradients + state),
            ("ZeRO 2", gradients + state),
        ):
            if sharded > least:
                yield f"{name} over {ranks} processes", f"-{size_of(sharded * (1 - 1 / ranks))}"


def future_optimizer_bytes(options: Mapping[str, Any], trained: int) -> int:
    """Return the bytes of an optimizer's state after its first update, by its options; 0 if they do not tell.

    Args:
        options: The options of a group: with `betas` it keeps two numbers of a parameter, with `momentum` one.
        trained: Bytes of the parameters that train.
    """
    if "betas" in options:
        return trained * (3 if options.get("amsgrad") else 2)
    return trained if options.get("momentum") else 0


# --- of a run


def explain_memory(error: Exception, trainer: Hooks, work: Work) -> None:
    """Add to an error of memory that runs out what took it, unless that was added before."""
    has_note = any(note.startswith(_HEAD) for note in getattr(error, "__notes__", ()))
    if not has_note and isinstance(error, RuntimeError) and is_out_of_memory(error):
        try:
            error.add_note(format_oom_report(shortage_of(trainer, work, requested_bytes(error))))
        except Exception:  # it must not hide the error
            logger.exception("What took the memory could not be found out.")


def requested_bytes(error: BaseException) -> int:
    """Return the bytes for which there was no room, as the error says; 0 if it does not.

    >>> requested_bytes(RuntimeError("CUDA out of memory. Tried to allocate 1.50 GiB."))
    1610612736
    >>> requested_bytes(RuntimeError("no room"))
    0
    """
    match = re.search(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMGT]iB)", str(error))
    return 0 if match is None else round(float(match[1]) * _UNITS[match[2]])


def shortage_of(trainer: Hooks, work: Work, requested: int = 0) -> Shortage:
    """Return what is on the device of a rank now; `requested` are the bytes for which there was no room."""
    backend, settings, device = trainer.backend, trainer.settings, trainer.device
    parameters = list(backend.model.parameters())
    tensors = [*parameters, *backend.model.buffers()]
    trained = [parameter for group in backend.groups for parameter in group["params"] if parameter.requires_grad]
    gradients = [stored_values(parameter.grad) for parameter in parameters if parameter.grad is not None]
    optimizers = backend.optimizers.values() or [backend.optimizer]
    state = [value for optimizer in optimizers for entries in optimizer.state.values() for value in entries.values()]
    is_first = work == "training" and not any(isinstance(value, torch.Tensor) for value in state)
    coming = (
        sum(future_optimizer_bytes(group, _bytes(group["params"], device)) for group in backend.groups)
        if is_first
        else 0
    )
    splits = settings.batch_size if trainer._feed.microbatch_size is None else trainer._feed.microbatch_size
    peak, capacity = _counted(device)
    return Shortage(
        work,
        parameters=_bytes(tensors, device),
        gradients=_bytes(gradients, device),
        state=_bytes(state, device),
        future_gradients=_bytes([parameter for parameter in trained if parameter.grad is None], device)
        if is_first
        else 0,
        future_optimizer_bytes=coming,
        peak=peak,
        requested=requested,
        capacity=capacity,
        rows=splits if work == "training" else settings.eval_batch_size or settings.batch_size,
        world_size=trainer.ranks.world_size,
        is_sharded=backend.sharding is not None,
        is_recomputed=bool(settings.gradient_checkpointing),
        is_full_precision=trainer.precision.name == "fp32" and _is_wide(parameters),
    )


def _bytes(tensors: Iterable[Any], device: torch.device) -> int:
    """Return the bytes of this rank's parts of tensors on a device."""
    total = 0
    for tensor in tensors:
        part = getattr(tensor, "ds_tensor", None)  # DeepSpeed's ZeRO 3 keeps the rank's part of a parameter there
        part = tensor if part is None else part
        part = part.to_local() if hasattr(part, "to_local") else part
        if isinstance(part, torch.Tensor) and part.device.type == device.type:
            total += part.numel() * part.element_size()
    return total


def _is_wide(parameters: Iterable[torch.Tensor]) -> bool:
    return any(parameter.is_floating_point() and parameter.element_size() >= 4 for parameter in parameters)


def _counted(device: torch.device) -> tuple[int | None, int | None]:
    """Return the most that tensors took on a device, and its memory; None for what is not counted."""
    if device.type not in ("cuda", "xpu"):
        return None, None
    peak = torch.accelerator.max_memory_allocated(device)
    capacity = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return peak, capacity
