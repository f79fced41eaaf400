"""Out-of-memory errors: what took the memory, and smaller micro-batches.

After an error, a step under `microbatch_size="auto"` has the same samples, with the same weights; `feed.py` splits
them.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from omnitrain.backends.backend import Backend
from omnitrain.compute.device_runtime import device_runtime
from omnitrain.compute.precision import free_memory, is_out_of_memory
from omnitrain.compute.random_state import restore_rng, snapshot_rng
from omnitrain.core.errors import ConfigError, DataError
from omnitrain.core.events import Algorithm, find_overrides
from omnitrain.data.collation import count_samples
from omnitrain.data.sampling import Window
from omnitrain.distributed.ranks import Ranks
from omnitrain.optim.sparse_gradients import stored_values
from omnitrain.trainer.buffers import Buffers
from omnitrain.trainer.feed import Feed
from omnitrain.trainer.hooks import Hooks
from omnitrain.trainer.lifecycle import Lifecycle

logger: logging.Logger = logging.getLogger("omnitrain")

Result = TypeVar("Result")

Work = Literal["training", "evaluation", "saving"]

# A rank of so many is shown for what sharding would give, where the run has a single process.
_MANY = 8
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# A remedy is listed if it frees at least this share of what is known to be taken.
_LEAST = 0.02


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a rank had on its device when memory ran out, in bytes, and the settings that decide about it."""

    work: Work
    parameters: int  # and buffers
    gradients: int
    state: int
    future_gradients: int = 0  # which a step adds to these
    future_optimizer_bytes: int = 0  # which the first update adds to the state
    peak: int | None = None  # the most that tensors took at once; None if the device does not count it
    requested: int = 0  # the allocation that failed; 0 if the error does not say
    capacity: int | None = None  # the memory of the device, if it is known
    rows: int = 1  # of a micro-batch, or of a batch of an evaluation
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
    future = {"gradients": shortage.future_gradients, "state": shortage.future_optimizer_bytes}
    if future_parts := " and ".join(f"{size_of(size)} of {name}" for name, size in future.items() if size):
        words[-1] += f" (of the first step, {future_parts} were still to come)"
    if shortage.activations is not None:
        words.append(f"activations and work space {size_of(shortage.activations)} at most")
    if shortage.requested:
        link = "and" if shortage.peak is None else "with"
        words.append(f"{link} the {size_of(shortage.requested)} for which there was no room")
    capacity = f" The device has {size_of(shortage.capacity)}." if shortage.capacity else ""
    text = f"{_HEAD} in {shortage.work}, and this is what was in it: {', '.join(words)}.{capacity}"
    remedies = [f"  {name}{f': {gain}' if gain else ''}" for name, gain in _remedies(shortage)]
    return "\n".join([text, "What would take less, and about how much:", *remedies] if remedies else [text])


_HEAD = "Memory ran out"


def _remedies(shortage: Shortage) -> Iterator[tuple[str, str]]:
    active, least = shortage.activations, _LEAST * (max(shortage.peak or 0, shortage.parameters) + shortage.requested)
    matters = active is None or active > least

    def of_active(share: float, words: str = "") -> str:
        return "" if active is None else f"{words}-{size_of(active * share)}"

    matters = matters and shortage.work != "saving"
    if matters and shortage.rows > 1:
        half, trains = shortage.rows // 2, shortage.work == "training"
        name, parts = ("microbatch_size", "; the same step, in more parts") if trains else ("eval_batch_size", "")
        yield f"{name}={half} (instead of {shortage.rows}{parts})", of_active(1 - half / shortage.rows)
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
    """Return the bytes of an optimizer's state after its first update, by its options; 0 if they do not tell."""
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
    future: dict[str, int] = {}
    if work == "training" and not any(isinstance(value, torch.Tensor) for value in state):  # it is the first step
        future["future_gradients"] = bytes_of([parameter for parameter in trained if parameter.grad is None], device)
        sizes = [future_optimizer_bytes(group, bytes_of(group["params"], device)) for group in backend.groups]
        future["future_optimizer_bytes"] = sum(sizes)
    splits = settings.batch_size if trainer._feed.microbatch_size is None else trainer._feed.microbatch_size
    runtime = device_runtime(device)
    return Shortage(
        work,
        parameters=bytes_of(tensors, device),
        gradients=bytes_of(gradients, device),
        state=bytes_of(state, device),
        **future,
        peak=torch.accelerator.max_memory_allocated(device) if runtime.has_memory_stats else None,
        requested=requested,
        capacity=runtime.total_memory,
        rows=splits if work == "training" else settings.eval_batch_size or settings.batch_size,
        world_size=trainer.ranks.world_size,
        is_sharded=backend.sharding is not None,
        is_recomputed=bool(settings.gradient_checkpointing),
        is_full_precision=trainer.precision.name == "fp32"
        and any(parameter.is_floating_point() and parameter.element_size() >= 4 for parameter in parameters),
    )


def bytes_of(tensors: Iterable[Any], device: torch.device | None) -> int:
    """Return the bytes of this rank's parts of tensors on a device; None is all devices."""
    total = 0
    for tensor in tensors:
        part = getattr(tensor, "ds_tensor", None)  # DeepSpeed's ZeRO 3 keeps the rank's part of a parameter there
        part = tensor if part is None else part
        part = part.to_local() if hasattr(part, "to_local") else part
        if isinstance(part, torch.Tensor) and (device is None or part.device.type == device.type):
            total += part.numel() * part.element_size()
    return total


# --- smaller micro-batches


_IN_PASSES = ("transform_batch", "transform_output", "transform_loss")


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a model has layers that normalize over the micro-batch of one rank."""
    kinds = [type(module) for module in model.modules()]
    return any(issubclass(kind, _BatchNorm) and kind is not nn.SyncBatchNorm for kind in kinds)


class AutoMicrobatch:
    """Runs the micro-batches of a step again, halved, if memory runs out on any rank.

    Nothing that the ranks do together may be under way then: micro-batches run without an exchange of gradients, the
    ranks agree that all of them are through, and only then the gradients are averaged.

    Raises:
        ConfigError: If ranks exchange something inside of a forward or backward pass.
    """

    def __init__(self, trainer: Hooks, feed: Feed, lifecycle: Lifecycle, step: Any) -> None:
        self._trainer = trainer
        self._backend: Backend = trainer.backend
        self._ranks: Ranks = trainer.ranks
        self._feed = feed
        self._lifecycle = lifecycle
        self._step = step  # trainer.step.Step, which imports this module
        self._buffers = Buffers(trainer.backend.model)
        # Those whose states may change in the passes of a micro-batch.
        stateful = [part for part in trainer.algorithms if type(part).state_dict is not Algorithm.state_dict]
        self._algorithms = [part for part in stateful if any(find_overrides([part], name) for name in _IN_PASSES)]
        self.prepare()

    def prepare(self) -> None:
        """Reject exchanges between ranks in a forward or backward pass; called again once the model is placed."""
        self._backend.check_separate_all_reduce()
        modules = self._backend.model.modules()
        if self._ranks.world_size > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in modules):
            raise ConfigError(
                "`microbatch_size='auto'` cannot be used with nn.SyncBatchNorm, in whose forward pass the ranks wait "
                "for each other: one that runs out of memory there would leave the others waiting. Pass a number, such "
                "as microbatch_size=4."
            )

    def begin_epoch(self) -> None:
        """Look for the buffers of the model, which a callback may have changed."""
        self._buffers = Buffers(self._backend.model)

    def run(self, attempt: Callable[[], Result]) -> Result:
        """Return what `attempt()` returns, which runs the micro-batches of a window, once all ranks have come through.

        Where memory has run out, it is called again, and the window then has smaller micro-batches.

        Raises:
            RuntimeError: The out-of-memory error, if not even a single row fits.
        """
        step, window, first = self._step, self._step.window, 0
        means, random_numbers = step.snapshot(), snapshot_rng(self._trainer.device)
        states = [copy.deepcopy(algorithm.state_dict()) for algorithm in self._algorithms]
        self._buffers.snapshot()
        while True:
            try:
                result = attempt()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                size = self._agree(window, True)
                if size == 1:
                    error.add_note("`microbatch_size='auto'` is at one row at a time, which does not fit either.")
                    raise
            else:
                size = self._agree(window, False)
                if not size:
                    self._backend.reduce_gradients()
                    if first and self._ranks.is_main:
                        has_statistics, size = has_batch_norm(self._backend.model), self._feed.microbatch_size
                        logger.warning(
                            "Step %d has run out of memory with micro-batches of %d rows. From here on they are of %d "
                            "at most, and a step has as many more of them. Pass microbatch_size=%d to begin with that."
                            "%s", self._lifecycle.progress.step + 1, first, size, size,
                            " BatchNorm takes its statistics of one micro-batch." if has_statistics else "",
                        )  # fmt: skip
                    return result
                if size == 1:  # the rank that has failed ends the others with its error
                    self._ranks.gather("the end of the memory of another rank", None)
                del result
            # out here the error is gone, and with it what it kept alive
            first = first or size
            self._backend.discard_gradients()
            step.rollback(means)
            self._buffers.restore()
            restore_rng(random_numbers, self._trainer.device)
            for algorithm, state in zip(self._algorithms, states, strict=True):
                algorithm.load_state_dict(copy.deepcopy(state))
            free_memory()
            self._feed.shrink((size + 1) // 2)
            window = self._feed.split_again(window)
            step.restart(window)

    def _agree(self, window: Window, has_failed: bool) -> int:
        """Return the rows of the micro-batches that did not fit on some rank; 0 if they did on all of them."""
        (failed,) = self._ranks.sum("the memory of a step", has_failed)
        if not failed:
            return 0
        try:
            rows = max(map(count_samples, window.batches))
        except DataError:  # objects that only the user's own `split_batch` knows
            rows = self._trainer.settings.batch_size
        largest = self._ranks.combine("the rows of the micro-batches", rows, max)
        return min(self._feed.microbatch_size or largest, largest)
