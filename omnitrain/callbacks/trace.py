"""Digests of each step in a file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from omnitrain.checkpoint.fingerprints import content_digest
from omnitrain.checkpoint.state_dicts import unwrap
from omnitrain.compute.device_runtime import device_runtime
from omnitrain.compute.random_state import GENERATORS, isolated_rng
from omnitrain.compute.tensor_digests import (
    digest_rows,
    digest_words,
    format_digest,
    to_signed,
    to_words,
)
from omnitrain.core.errors import ConfigError, check_number
from omnitrain.core.events import Callback, TrainerLike
from omnitrain.data.loaders import MapLoader
from omnitrain.loggers.rows import RowFile, parse_row

logger: logging.Logger = logging.getLogger("omnitrain")

TRACE_FILE = "trace.jsonl"
# In the order in which a step comes to them: the first that differs is the cause of the next ones.
TRACED = ("samples", "batch", "weights", "random", "loss", "gradients", "update")
# The most steps whose digests wait for an accelerator.
_MAX_PENDING = 64


class Trace(RowFile):
    """Writes digests of every step to `trace.jsonl` in `save_dir`, by which `omnitrain diff` compares two runs.

    A row has the step and 16-byte digests of its `samples` (their indices), its `batch`, the `weights` and the `random`
    state that it began with, its `loss`, its `gradients` before clipping and its `update`; and `mean_loss`, a number.
    Digests are equal if and only if all bits are: on any number of processes, where the numbers are. They are computed
    on the device, and read from an accelerator some steps later, so that it does not wait. The run computes the same
    numbers as without it. A resumed run continues the file; rows after its checkpoint are dropped.

    Indices are known only of data with an index. Gradients under DeepSpeed, and weights under ZeRO 3, are not traced.

    Args:
        every: Steps between rows.

    Raises:
        ConfigError: If `every` is not a positive integer, or there is no `save_dir`.

    >>> callbacks = [Trace()]  # Trainer(..., save_dir="runs/a", callbacks=callbacks)
    """

    order: ClassVar[int] | int = 10
    asks_alone: ClassVar[bool] | bool = False

    # rows come from steps only
    on_log: ClassVar[Any] = Callback.on_log
    on_eval_end: ClassVar[Any] = Callback.on_eval_end
    on_report: ClassVar[Any] = Callback.on_report

    def __init__(self, every: int = 1) -> None:
        check_number("every", every, least=1, is_whole=True)
        super().__init__(TRACE_FILE)
        self.every: int = int(every)
        self._is_tracing = False
        self._step = 0
        # The epoch to which the run goes back; infinity at any other time.
        self._epoch = math.inf
        self._unseen: frozenset[str] = frozenset()
        # The digests of the step, two int64 on the device each, and those that are known on the host.
        self._digests: dict[str, Tensor] = {}
        self._texts: dict[str, str] = {}
        # The sum of the losses of this rank in the step, and what it is divided by in the mean; float64.
        self._loss: Tensor | None = None
        # The digest of the generators of this rank as a run seeds them, unless it is the first one.
        self._seeded: Tensor | int = 0
        self._output: Any = None
        # Rows whose digests are being copied to the host: their values, names of digests, numbers and event.
        self._copies: deque[tuple[dict[str, Any], list[str], Tensor, Any]] = deque()

    def on_train_start(self, trainer: TrainerLike) -> None:
        if trainer.save_dir is None:
            raise ConfigError("`callbacks` holds Trace, which writes into `save_dir`, and there is none. Pass it.")
        super().on_train_start(trainer)
        backend: Any = trainer.backend  # type: ignore[attr-defined]
        self._unseen = frozenset(name for name in ("weights", "gradients") if name in backend.unsupported)
        if self._unseen and trainer.is_main_process:
            reasons = "; ".join(f"{name}: {backend.unsupported[name]}" for name in sorted(self._unseen))
            logger.warning("%s has no digests of what is hidden here (%s).", TRACE_FILE, reasons)
        self._copies.clear()
        self._is_tracing, self._seeded = False, 0
        if trainer.ranks.data.rank:  # so that the sum over ranks is the state of the first until numbers are drawn
            with isolated_rng(trainer.device):
                trainer._seed()  # type: ignore[attr-defined]
                self._seeded = _digest_random(trainer.device)

    def on_checkpoint_loaded(self, trainer: TrainerLike) -> None:
        """Drop the rows after a checkpoint that is loaded within the run."""
        if self._is_active:
            self.restart(trainer)

    def restart(self, trainer: TrainerLike) -> None:
        self._copies.clear()
        self._epoch = round(trainer.progress.epochs, 6)
        super().restart(trainer)
        self._epoch = math.inf

    def on_step_start(self, trainer: TrainerLike) -> None:
        """Digest what the step begins with."""
        self._is_tracing = not (trainer.progress.step + 1) % self.every
        if self._is_tracing:
            self._step = trainer.progress.step
            self._digests, self._texts, self._loss = {}, {}, None
            self._digests["random"] = _digest_random(trainer.device) - self._seeded
            self._add_tensors(trainer, "weights", _weights(trainer))

    def on_batch_start(self, trainer: TrainerLike, batch: Any, number: int) -> None:
        """Digest the samples and the batches of the step, before its first forward pass."""
        if not self._is_tracing or number:
            return
        self._loss = None  # as a step can begin again
        window, progress, loader = trainer._step.window, trainer.progress, trainer.train_loader  # type: ignore[attr-defined]
        if isinstance(loader, MapLoader):
            position = progress.samples_in_epoch
            indices = loader.sampler.samples(progress.epoch, position, position + window.samples)
            self._texts["samples"] = hashlib.blake2b(indices.astype(np.int64).tobytes(), digest_size=16).hexdigest()
        batches = [batch for batch, weight in zip(window.batches, window.weights, strict=True) if weight]
        total = torch.zeros(2, dtype=torch.int64, device=trainer.device)
        with torch.no_grad():
            for entry in batches:
                total += _digest_batch(entry, trainer.device)
        self._digests["batch"] = total

    def on_after_forward(self, trainer: TrainerLike, batch: Any, output: Any) -> None:
        self._output = output

    def on_after_loss(self, trainer: TrainerLike, loss: Tensor) -> None:
        """Add the loss of a micro-batch."""
        if self._is_tracing and (weight := trainer._step.weight):  # type: ignore[attr-defined]
            count = self._output.num_targets
            device = torch.device("cpu") if loss.device.type == "mps" else loss.device  # which has no float64
            total = loss.detach().to(device, torch.float64) * (weight if count is None else 1.0)
            part = torch.stack([total, total.new_full((), float(weight if count is None else count))])
            self._loss = part if self._loss is None else self._loss + part
        self._output = None

    def on_before_clip(self, trainer: TrainerLike) -> None:
        """Digest the gradients."""
        if self._is_tracing:
            parameters = unwrap(trainer.model).parameters()
            self._add_tensors(trainer, "gradients", [parameter.grad for parameter in parameters])

    def on_step_end(self, trainer: TrainerLike) -> None:
        """Digest the update, and write the row once the device has computed it."""
        if not self._is_tracing:
            return
        self._is_tracing = False
        progress = trainer.progress
        before = self._digests.get("weights")
        self._add_tensors(trainer, "update", _weights(trainer))
        if before is not None:
            self._digests["update"] = self._digests["update"] - before
        self._sum_over_ranks(trainer)
        if not self._is_active:
            return
        row: dict[str, Any] = {"step": progress.step, "epoch": round(progress.epochs, 6), **self._texts}
        if progress.step == self._step:
            row["skipped"] = True
        names = [name for name in TRACED if name in self._digests]
        numbers = [self._digests[name] for name in names]
        if self._loss is not None:
            names.append("loss")
            numbers.append(self._loss.view(torch.int64))
        if trainer.device.type == "mps":
            numbers = [number.cpu() for number in numbers]
        self._start_copy(row, names, torch.cat(numbers))
        self._write_rows(trainer, wait=trainer.device.type == "cpu")

    def on_save_start(self, trainer: TrainerLike) -> None:
        self._write_rows(trainer, wait=True)

    def on_train_end(self, trainer: TrainerLike) -> None:
        self._write_rows(trainer, wait=True)
        super().on_train_end(trainer)

    # --- digests

    def _add_tensors(self, trainer: TrainerLike, name: str, tensors: Iterable[Tensor | None]) -> None:
        if not self._unseen & {name, {"update": "weights"}.get(name)}:
            with torch.no_grad():
                digest = trainer.backend.digest(list(tensors))  # type: ignore[attr-defined]
            if digest is not None:
                self._digests[name] = digest

    def _sum_over_ranks(self, trainer: TrainerLike) -> None:
        """Add up over all ranks the loss, and the digests of what each rank has of its own."""
        if trainer.world_size == 1:
            return
        if self._loss is None:
            self._loss = torch.zeros(2, dtype=torch.float64, device=trainer.device)
        digests = [self._digests[name] for name in ("random", "batch") if name in self._digests]
        for values in (self._loss, *digests):  # sums of digests are modulo 2^64
            if not trainer.ranks.data.counts:  # another rank counts the same samples
                values.zero_()
            dist.all_reduce(values)

    # --- rows

    def _start_copy(self, row: dict[str, Any], names: list[str], numbers: Tensor) -> None:
        """Copy the digests of a row to the host, without waiting for an accelerator."""
        runtime = device_runtime(numbers.device)
        if runtime.has_streams:
            numbers = runtime.host_buffer(len(numbers), numbers.dtype).copy_(numbers, non_blocking=True)
        self._copies.append((row, names, numbers, runtime.record_event()))

    def _line(self, row: Mapping[str, Any]) -> bytes:
        names = ("kind", "step", "epoch", "skipped", *TRACED, "mean_loss")
        values = {name: row[name] for name in names if name in row}
        if not math.isfinite(values.get("mean_loss", 0.0)):
            values["mean_loss"] = None
        return (json.dumps(values, allow_nan=False) + "\n").encode()

    def _is_later(self, row: Mapping[str, Any]) -> bool:
        # a skipped step has the number of the one before
        is_skipped_later = row["step"] == self._until and "skipped" in row and row["epoch"] > self._epoch
        return is_skipped_later or super()._is_later(row)

    def _parse(self, line: bytes) -> Mapping[str, Any] | None:
        return parse_row(line)

    def _write_rows(self, trainer: TrainerLike, wait: bool) -> None:
        """Write the rows whose digests have arrived; with `wait`, all of them."""
        while self._copies:
            row, names, numbers, event = self._copies[0]
            if event is not None and not event.query():
                if not wait and len(self._copies) < _MAX_PENDING:
                    return
                event.synchronize()
            self._copies.popleft()
            digests = dict(zip(names, numbers.view(-1, 2).tolist(), strict=True))
            if (words := digests.pop("loss", None)) is not None:
                total, count = struct.unpack("=2d", struct.pack("=2q", *words))
                row["loss"] = hashlib.blake2b(struct.pack("<d", total), digest_size=16).hexdigest()
                row["mean_loss"] = total / count if count else total
            row |= {name: format_digest(words) for name, words in digests.items()}
            self._append(trainer, "step", row, is_final=False)


def _weights(trainer: TrainerLike) -> list[Tensor]:
    model = unwrap(trainer.model)
    return [*model.parameters(), *model.buffers()]


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors of a batch, and what else is in it."""
    if isinstance(value, Mapping):
        for entry in value.values():
            yield from _leaves(entry)
    elif isinstance(value, (tuple, list)) and not all(isinstance(entry, (str, int, float)) for entry in value):
        for entry in value:
            yield from _leaves(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _leaves([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        yield torch.from_numpy(value)
    else:
        yield value


def _digest_batch(batch: Any, device: torch.device) -> Tensor:
    """Return the digest of a micro-batch: the same for the same rows in any order."""
    total, rows, rest = torch.zeros(2, dtype=torch.int64, device=device), list[Tensor](), list[Tensor]()
    for leaf in _leaves(batch):
        if not isinstance(leaf, Tensor):
            digest = content_digest(leaf)
            if digest is not None:
                total += to_signed(int(digest, 16))
        elif leaf.is_sparse or leaf.is_nested or not leaf.ndim or not leaf.numel():
            rest.append(leaf.to_dense() if leaf.is_sparse else leaf.values() if leaf.is_nested else leaf)
        elif not rows or (len(leaf) == len(rows[0]) and leaf.device == rows[0].device):
            rows.append(leaf)
        else:
            rest.append(leaf)
    if rows:
        total += digest_rows(rows).to(device, non_blocking=True)
    for tensor in rest:
        total += digest_words(to_words(tensor)).to(device, non_blocking=True)
    return total


def _digest_random(device: torch.device) -> Tensor:
    """Return the digest of the state of this rank's generators."""
    hasher = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, (bytes, np.ndarray)):
            hasher.update(value if isinstance(value, bytes) else value.tobytes())
        elif isinstance(value, (tuple, list)):
            for entry in value:
                add(entry)
        elif isinstance(value, dict):
            add(list(value.values()))
        else:
            hasher.update(repr(value).encode())

    for generator in GENERATORS:
        add(generator.snapshot())
    if device.type not in ("cpu", "meta"):
        add(torch.get_device_module(device).get_rng_state(device).numpy())
    words = torch.tensor(struct.unpack("=2q", hasher.digest()), dtype=torch.int64)
    return words.to(device, non_blocking=True)  # made there, the host would wait for it
