"""The callback of a drill: records of steps, and one interruption."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import math
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypedDict

import numpy as np
import torch

from omnitrain.checkpoint.fingerprints import content_digest
from omnitrain.compute.random_state import snapshot_rng
from omnitrain.config import overrides
from omnitrain.core.events import Callback
from omnitrain.data.stateful import nested_datasets
from omnitrain.diagnostics.rehearsal import generator_state, members_of

PHASES = ("data", "step", "evaluation", "save")
SIGNALS = ("kill", "term", "stop", "disk")
CLASS_PATH = f"{__name__}.Observer"
_NUMBERS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": getattr(signal, "SIGSTOP", signal.SIGKILL)}
# A digest of all content of a value that has one, equal for equal bits.
digest: Callable[[Any], str | None] = functools.partial(content_digest, is_partial=True)
_CHANGES_OF_DISK = ("mkdir", "write", "link", "rename", "sync")


class Interruption(TypedDict):
    """What interrupts a run, and where."""

    run: str
    step: int
    phase: str
    signal: str
    number: int
    """How many batches of the evaluation, or file operations of the save, come before it."""
    ranks: list[int] | None
    """The ranks that it hits; None are all."""


class Observer(Callback):
    """Records digests of each step and of the end of a run, and interrupts it.

    Each rank appends to a file of its own, one JSON line per event, which outlives a kill.

    Args:
        folder: Where the files are.
        interruption: What interrupts the run; None records only.
        save_steps: The steps between checkpoints that are requested in addition; None requests none.
    """

    order = 90
    asks_alone = False

    def __init__(self, folder: str, interruption: Interruption | None = None, save_steps: int | None = None) -> None:
        self._folder = Path(folder)
        self._interruption = interruption
        self._number, self._signal = (interruption["number"], interruption["signal"]) if interruption else (0, "")
        self._save_steps = save_steps
        self._is_done = interruption is None
        self._is_overdue = False
        self._disk_error: OSError | None = None
        self._has_failed = False
        self._is_evaluating = False
        self._count = 0
        self._batches: str | None = None
        self._losses: list[float] = []

    # --- the record

    def on_train_start(self, trainer: Any) -> None:
        self._has_failed = False
        self._write(
            trainer, "start", total=trainer.total_steps, device=trainer.device.type, **overrides.describe_run(trainer)
        )

    def on_batch_start(self, trainer: Any, batch: Any, number: int) -> None:
        if number == 0:
            self._batches, self._losses = None, []
        self._batches = digest([self._batches, batch])

    def on_after_loss(self, trainer: Any, loss: torch.Tensor) -> None:
        self._losses.append(float(loss.detach()))

    def on_step_end(self, trainer: Any) -> None:
        step, losses = trainer.progress.step, self._losses
        loss = math.fsum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else None
        self._write(
            trainer, "step", batch=self._batches, loss=loss,
            rates=[group["lr"] for group in trainer.backend.optimizer.param_groups],
            random=digest(snapshot_rng(trainer.device)),
            weights=digest([*trainer.model.parameters(), *trainer.model.buffers()]),
        )  # fmt: skip
        if self._save_steps is not None and step % self._save_steps == 0:
            trainer.control.schedule("save")

    def on_eval_start(self, trainer: Any) -> None:
        self._is_evaluating, self._count = True, 0

    def on_eval_batch_end(self, trainer: Any, batch: Any, output: Any) -> None:
        if self._is_evaluating:
            if self._is_due(trainer, "evaluation") and self._count >= self._number:
                self._interrupt(trainer)
            self._count += 1

    def on_eval_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        self._is_evaluating = False
        self._write(trainer, "evaluation", count=self._count)
        if self._is_due(trainer, "evaluation"):
            self._interrupt(trainer)

    def on_save_start(self, trainer: Any) -> None:
        self._count = 0
        if not isinstance(trainer.store.fs, WatchedDisk):
            trainer.store.fs = WatchedDisk(trainer.store.fs, lambda name: self._touch_disk(trainer, name))

    def on_save_end(self, trainer: Any) -> None:
        self._write(trainer, "save", count=self._count)
        if self._is_due(trainer, "save"):  # this save had fewer operations than that of the undisturbed run
            self._is_overdue = True
            if self._signal != "disk":
                self._interrupt(trainer)

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        self._has_failed = True

    def on_train_end(self, trainer: Any) -> None:
        if self._has_failed or trainer.lifecycle.signal or trainer.control.signal:
            return
        files, rest = trainer._checkpointer.contents.capture_tensors()
        tensors = {f"{file}/{name}": digest(value) for file, part in files.items() for name, value in part.items()}
        values = {name: json.dumps(value, sort_keys=True, default=repr) for name, value in rest.items()}
        history = json.loads(json.dumps(dict(trainer.metrics), default=repr))
        folder = str(self._folder)  # which differs between runs
        objects = {
            name: {attribute: text.replace(folder, "") for attribute, text in attributes.items()}
            for name, attributes in _objects(trainer) if attributes
        }  # fmt: skip
        self._write(
            trainer, "end", reason=trainer.stop_reason, tensors=tensors, values=values, history=history, objects=objects
        )

    def _write(self, trainer: Any, event: str, **values: Any) -> None:
        row = {"run": Path(trainer.save_dir).name, "event": event, "step": trainer.progress.step, **values}
        with open(self._folder / f"observed-{trainer.rank}.jsonl", "ab", buffering=0) as file:
            file.write(json.dumps(row).encode() + b"\n")

    # --- the interruption

    def on_data_fetched(self, trainer: Any, batches: Sequence[Any]) -> None:
        if self._is_due(trainer, "data", ahead=1):
            self._interrupt(trainer)

    def on_step_start(self, trainer: Any) -> None:
        if self._disk_error is not None:  # the run continues after a full disk: what it has left is resumed from
            self._write(trainer, "killed")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_before_optimizer_step(self, trainer: Any) -> None:
        if self._is_due(trainer, "step", ahead=1) and self._number % 2 == 0:
            self._interrupt(trainer)

    def on_after_optimizer_step(self, trainer: Any) -> None:
        if self._is_due(trainer, "step", ahead=1):
            self._interrupt(trainer)

    def _is_due(self, trainer: Any, phase: str, ahead: int = 0) -> bool:
        spec = self._interruption
        if self._is_done or spec is None or spec["phase"] != phase or spec["run"] != Path(trainer.save_dir).name:
            return False
        is_hit = spec["ranks"] is None or trainer.rank in spec["ranks"]
        return is_hit and trainer.progress.step + ahead >= spec["step"]

    def _interrupt(self, trainer: Any) -> None:
        self._is_done = True
        self._write(trainer, "interruption")
        if self._signal == "stop":
            (self._folder / "stopped").touch()
        os.kill(os.getpid(), _NUMBERS[self._signal])

    def _touch_disk(self, trainer: Any, name: str) -> None:
        """Interrupt the run before a file operation of a save, or have it fail as on a full disk."""
        if self._is_due(trainer, "save") and (self._is_overdue or self._count >= self._number):
            if self._signal != "disk":
                self._interrupt(trainer)
            elif name in _CHANGES_OF_DISK:
                self._is_done = True
                self._write(trainer, "interruption")
                self._disk_error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._disk_error is not None and name in _CHANGES_OF_DISK:
            raise self._disk_error
        self._count += 1


class WatchedDisk:
    """The file system of a store, with a call before each operation.

    Args:
        disk: The file system.
        watch: Called with the name of each operation; what it raises is the error of the operation.
    """

    def __init__(self, disk: Any, watch: Callable[[str], None]) -> None:
        self._disk, self._watch = disk, watch

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._disk, name)
        if not callable(operation):
            return operation

        def run(*args: Any, **kwargs: Any) -> Any:
            self._watch(name)
            return operation(*args, **kwargs)

        return run


# --- the user's objects


def _objects(trainer: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the user's objects with the values of their attributes, to find what a checkpoint has forgotten."""
    settings = trainer.settings
    names = ("data_collator", "train_loader", "unit", "loss_fn", "compute_metrics")
    objects = [(name, getattr(settings, name)) for name in names]
    objects += (nested_datasets("train_dataset", settings.train_dataset) or {"stream": settings.train_dataset}).items()
    objects += [("callback", part) for part in trainer.lifecycle.callbacks]
    objects += [("algorithm", part) for part in trainer.algorithms]
    if (engine := getattr(trainer, "engine", None)) is not None:
        objects += [("TrainerCallback", part) for part in engine.callback_handler.callbacks]
    objects += [("model", part) for part in trainer.model.modules()]
    names_so_far: list[str] = []
    for role, part in objects:
        part = part.__self__ if isinstance(part, MethodType) else part
        if part is None or isinstance(part, Observer) or not _is_custom(part):
            continue
        name = (
            f"{role} {part.__qualname__}()" if isinstance(part, FunctionType) else f"{role} {type(part).__qualname__}"
        )
        names_so_far.append(name)
        count = names_so_far.count(name)
        texts = ((attribute, _describe(value)) for attribute, value in _attributes(part))
        texts = {attribute: text for attribute, text in texts if text is not None}
        yield name if count == 1 else f"{name} ({count})", texts


def _is_custom(part: Any) -> bool:
    """Whether an object, or a function, is of the user's code."""
    module = getattr(part, "__module__", None) or type(part).__module__
    return module.partition(".")[0] not in ("builtins", "datasets", "numpy", "omnitrain", "torch", "transformers")


def _attributes(part: Any, depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object and of those in it; of a function the names that it uses."""
    for name, value in members_of(part).items():
        yield name, value
        is_nested = hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType, torch.nn.Module))
        if depth and is_nested and _is_custom(value):
            yield from ((f"{name}.{inner}", entry) for inner, entry in _attributes(value, depth - 1))


def _describe(value: Any) -> str | None:
    """Return a value as text, generators of random numbers and arrays by a digest; None for other objects."""
    if isinstance(value, (bool, int, float, str, itertools.count)):
        return repr(value)[:200]
    if (state := generator_state(value)) is not None:
        return f"a generator {digest(state)}"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"an array {digest(value)}"
    if isinstance(value, (list, tuple, dict, set, deque)) and len(value) < 1000:
        text = repr(value)
        return text if len(text) <= 100 else f"{text[:60]}... with {len(value)} entries {digest(text)}"
    return None
