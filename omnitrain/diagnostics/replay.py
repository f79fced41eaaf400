"""Repetition of one step of a run, sample by sample."""

from __future__ import annotations

import copy
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from omnitrain.callbacks.trace import TRACE_FILE, TRACED, Trace
from omnitrain.checkpoint.lookup import check_content
from omnitrain.checkpoint.run_record import read_record
from omnitrain.checkpoint.store import Store
from omnitrain.config import overrides
from omnitrain.core.display import ProofResult, Table
from omnitrain.core.errors import CheckpointError, ConfigError, check_number
from omnitrain.core.events import Callback, TrainerLike
from omnitrain.core.files import replace_file
from omnitrain.diagnostics.pass_probe import mean_loss
from omnitrain.diagnostics.run_diff import METRICS_FILE, read_rows
from omnitrain.diagnostics.script import Script
from omnitrain.diagnostics.verify import recorded_processes
from omnitrain.trainer.buffers import unchanged_buffers

if TYPE_CHECKING:
    from omnitrain.trainer.base import BaseTrainer

_REPLAYED_FILE = "replayed-trace.jsonl"
_SHOWN = 10


@dataclass(slots=True)
class Replay(ProofResult):
    """A step of a run, made once more; prints as a table of its samples.

    Attributes:
        run: The run.
        step: The step.
        checkpoint: The checkpoint from which it was replayed; "" from the beginning of the run.
        samples: The indices of its samples; empty for data without an index.
        losses: The loss of each sample, in the same order: of the sample without the others of its batch, by the
            weights before the step and the model in evaluation mode, so without dropout.
        grad_norms: The L2 norm of the gradient of each of these losses; empty under FSDP and DeepSpeed, which add up
            gradients over ranks.
        loss: The mean loss of the step, as in training.
        grad_norm: The L2 norm of the gradients of the step before clipping.
        batch: What the loader returned for it; a list, if the step has several micro-batches. None for a script.
        same: What agrees with the run to the bit: digests of its `Trace`, or "grad_norm" of its logs.
        differs: What does not.
        notes: What could not be computed or compared.
    """

    run: str
    step: int
    checkpoint: str
    samples: list[int]
    losses: list[float]
    grad_norms: list[float]
    loss: float | None
    grad_norm: float | None
    batch: Any = field(repr=False)
    same: list[str]
    differs: list[str]
    notes: list[str]

    @property
    def ok(self) -> bool:
        """Whether nothing disagrees with the run."""
        return not self.differs

    def __str__(self) -> str:
        """Return the step, and its samples with the largest gradients."""
        start = self.checkpoint or "the beginning"
        lines = [f"step {self.step} of {self.run}, replayed from {start}"]
        if self.loss is not None and self.grad_norm is not None:
            lines[0] += f": loss {self.loss:.6g}, norm of the gradients {self.grad_norm:.6g}"
        if self.same:
            lines.append(f"the same as in the run, to the bit: {', '.join(self.same)}")
        if self.differs:
            lines.append(f"not as in the run: {', '.join(self.differs)}")
        if self.losses:
            lines.append("each sample by itself, by the weights before the step and in evaluation mode:")
        are_samples = len(self.samples) == len(self.losses)
        names: Sequence[Any] = self.samples if are_samples else range(len(self.losses))
        norms = self.grad_norms or [math.nan] * len(self.losses)
        order = sorted(range(len(self.losses)), key=lambda row: (self.grad_norms or self.losses)[row], reverse=True)
        rows = [[str(names[row]), f"{self.losses[row]:.6g}", f"{norms[row]:.6g}"] for row in order[:_SHOWN]]
        measure = "gradients" if self.grad_norms else "losses"
        below = [f"and {len(order) - _SHOWN} samples with smaller {measure}"] if len(order) > _SHOWN else []
        below += [f"note: {note}" for note in self.notes]
        titles = ["sample" if are_samples else "row", "loss", "gradient"]
        return str(Table(titles, rows, above=lines, below=below))


class StepReplayed(SystemExit):
    """Ends a run after the step that was to be replayed."""


class StepRecorder(Callback):
    """Measures the samples of one step, and ends the run after it.

    Args:
        step: The step, counted from 1.
        path: The JSON file to write; None keeps everything in the attributes.
    """

    asks_alone: ClassVar[bool] | bool = False

    def __init__(self, step: int, path: str | None = None) -> None:
        self.step: int = step
        self.path: str | None = path
        self.batches: list[Any] = []
        """What the loader returned for the step on this rank."""
        self.result: dict[str, Any] = {}
        """Samples, losses, norms and notes."""
        self._local: dict[str, Any] = {}

    def on_batch_start(self, trainer: TrainerLike, batch: Any, number: int) -> None:
        """Measure each sample before the first forward pass of the step."""
        if trainer.progress.step + 1 == self.step and not number:
            self.batches, self._local = [], _measure_samples(trainer)
            window = trainer._step.window  # type: ignore[attr-defined]
            self.batches = copy.deepcopy(_counted(window))

    def on_step_end(self, trainer: TrainerLike) -> None:
        if trainer.progress.step != self.step:
            return
        norm = trainer._step.grad_norm  # type: ignore[attr-defined]
        self._local["grad_norm"] = None if norm is None else float(norm)
        parts = trainer.ranks.one_per_share(trainer.ranks.gather("the samples of a step", self._local))
        self.result = {"grad_norm": parts[0]["grad_norm"], "step": self.step}
        for name in ("samples", "losses", "grad_norms"):
            self.result[name] = [value for part in parts for value in part.get(name, ())]
        self.result["notes"] = list(dict.fromkeys(note for part in parts for note in part.get("notes", ())))
        raise StepReplayed(0)

    def on_train_end(self, trainer: TrainerLike) -> None:
        """Add the row of the trace, which has written its last one before, and write the result."""
        if self.result and trainer.is_main_process:
            self.result["row"] = _row_of(Path(str(trainer.save_dir)) / _REPLAYED_FILE, self.step, "step")
            if self.path is not None:
                replace_file(Path(self.path), json.dumps(self.result).encode(), sync=False)


def make_trace() -> Trace:
    """Return a `Trace` that writes next to one of the user's."""
    trace = Trace()
    trace.filename = _REPLAYED_FILE
    return trace


def _counted(window: Any) -> list[Any]:
    return [batch for batch, weight in zip(window.batches, window.weights, strict=True) if weight]


def _measure_samples(trainer: Any) -> dict[str, Any]:
    """Return indices, losses and norms of gradients of the samples of the step on this rank, and leave no trace."""
    window, progress, loader = trainer._step.window, trainer.progress, trainer.train_loader
    backend, model = trainer.backend, trainer.model
    is_collective = backend.forward_is_collective
    samples, parts, losses, norms, notes = list[int](), list[Any](), list[float](), list[float](), list[str]()
    turns = max(window.origins, default=-1) + 1 if window.origins else len(window.batches)
    for turn in range(turns):
        indices = loader.indices_at(progress.epoch, progress.samples_in_epoch, turn) if loader is not None else None
        samples += indices or []
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        parts = [part for batch in _counted(window) for part in trainer._feed._split(copy.deepcopy(batch), 1)]
    except Exception as error:
        notes.append(_unmeasured(error))
    count = max(trainer.ranks.gather("how many samples a step has", len(parts))) if is_collective else len(parts)
    with (
        unchanged_buffers(model),
        backend.eval_mode(trainer.settings.seed),
        torch.set_grad_enabled(not is_collective),
    ):
        for number in range(count):  # a rank with fewer samples makes the passes of the others with any batch
            part = parts[number] if number < len(parts) else copy.deepcopy(window.batches[0])
            try:
                with trainer._autocast():
                    batch, run = trainer._prepare_batch(part), trainer._forward
                    output = backend.forward(run, batch) if is_collective else run(model, batch)
                loss = mean_loss(output)
                losses.append(float(loss.detach()))
                if not is_collective:
                    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                    dense = [gradient.to_dense() for gradient in gradients if gradient is not None]
                    norms.append(float(nn.utils.get_total_norm(dense)))
            except Exception as error:
                notes = [_unmeasured(error)]
    if notes:
        return {"samples": samples, "notes": notes}
    if is_collective:
        notes.append("norms of gradients of samples are unknown: gradients are added up over ranks")
    elif losses and samples and len(losses) != len(samples):
        notes.append(f"its {len(samples)} samples are {len(losses)} rows of its batches: losses are those of rows")
    return {"samples": samples, "losses": losses[: len(parts)], "grad_norms": norms, "notes": notes}


def _unmeasured(error: Exception) -> str:
    """Return the note on a model or loss that takes no single sample."""
    return f"the samples could not be measured one by one: {type(error).__name__}: {error}"


def replay(run: str | os.PathLike[str], step: int, make_trainer: Callable[[], BaseTrainer]) -> Replay:
    """Make a step of a run once more, to the bit, and return its samples with their losses and gradients.

    The trainer resumes from the newest checkpoint before the step and trains to it. It writes into a temporary folder,
    so that nothing of the run changes. If the run has a `Trace`, its digests are compared with those of the replay.

    Args:
        run: The folder of the run.
        step: The step, counted from 1.
        make_trainer: Makes the trainer of the run, as its script does.

    Returns:
        The step: `samples`, `losses`, `grad_norms`, `loss`, `grad_norm` and `batch`.

    Raises:
        ConfigError: If the run or the step does not exist, or the program runs on several processes.

    >>> import tempfile, torch, omnitrain
    >>> def make_trainer():
    ...     torch.manual_seed(0)
    ...     data = torch.utils.data.TensorDataset(torch.arange(8.0).view(8, 1), torch.arange(8.0).view(8, 1))
    ...     return omnitrain.Trainer(
    ...         torch.nn.Linear(1, 1), data, loss_fn=torch.nn.functional.mse_loss, batch_size=4, epochs=2,
    ...         device="cpu", progress_bar=False, save_dir=folder.name,
    ...     )
    >>> folder = tempfile.TemporaryDirectory()
    >>> _ = make_trainer().train()
    >>> result = omnitrain.replay(folder.name, 3, make_trainer)
    >>> len(result.samples), len(result.losses), result.checkpoint
    (4, 4, 'checkpoint-2')
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("replay() runs on one process. For several, use `omnitrain replay RUN --step N -n 2 SCRIPT`.")
    path = Path(run)
    checkpoint = _find_checkpoint(path, step)
    with (
        tempfile.TemporaryDirectory(prefix="omnitrain-") as folder,
        overrides.applied(_make_overrides(Path(folder), step, checkpoint, None)),
    ):
        trainer = make_trainer()
        recorder = next((part for part in trainer.lifecycle.callbacks if isinstance(part, StepRecorder)), None)
        if recorder is None:
            raise ConfigError(f"`make_trainer` must return a new trainer in each call, got {trainer!r:.200}.")
        try:
            trainer.train()
        except StepReplayed:
            pass
        else:
            raise ConfigError(
                f"The trainer has ended at step {trainer.progress.step}, before step {step}. Give an earlier step."
            )
        batches = recorder.batches
        batch = batches[0] if len(batches) == 1 else batches
        return _make_replay(path, step, checkpoint, recorder.result, batch, processes=1)


def replay_script(path: Path, step: int, script: Script, timeout: float = 3600.0, name: str | None = None) -> Replay:
    """Make a step of a run once more in a process of its script; see `replay`.

    Args:
        path: The folder of the run.
        step: The step, counted from 1.
        script: The script that has made the run.
        timeout: Seconds after which the script is ended.
        name: What the result calls the run; None is its path.

    Raises:
        ConfigError: If the run or the step does not exist, or the script did not come to it.
    """
    script.check()
    checkpoint = _find_checkpoint(path, step)
    result = script.read_result(
        lambda file: _make_overrides(file.parent, step, checkpoint, str(file)), f"without coming to step {step}.",
        timeout,
    )  # fmt: skip
    return _make_replay(path, step, checkpoint, result, None, script.processes, name)


def _find_checkpoint(path: Path, step: int) -> Path | None:
    """Return the newest undamaged checkpoint before a step; None if there is none."""
    check_number("step", step, least=1, is_whole=True)
    if not path.is_dir():
        raise ConfigError(f"{str(path)!r} is no folder. Give a run's `save_dir`.")
    store = Store(path)
    folders = store.folders()
    if not folders and not read_record(path):
        raise ConfigError(f"{str(path)!r} has no checkpoints and no record of a run. Give a run's `save_dir`.")
    for number, folder in sorted(folders.items(), reverse=True):
        if number < step:
            try:
                content = store.verify(folder, accept=check_content)
            except CheckpointError:
                continue
            if not content.get("only_model"):
                return folder
    return None


def _make_overrides(folder: Path, step: int, checkpoint: Path | None, file: str | None) -> overrides.Overrides:
    module = "omnitrain.diagnostics.replay"
    return {
        "save_dir": str(folder / "runs"),
        "resume_from": "" if checkpoint is None else str(checkpoint.resolve()),
        "callbacks": [
            {"class_path": f"{module}.make_trace"},
            {"class_path": f"{module}.StepRecorder", "init_args": {"step": step, "path": file}},
        ],
    }


def _make_replay(
    path: Path,
    step: int,
    checkpoint: Path | None,
    result: Mapping[str, Any],
    batch: Any,
    processes: int,
    name: str | None = None,
) -> Replay:
    """Compare a replayed step with the run, and return both."""
    notes = list(result["notes"])
    replayed: dict[str, Any] = result["row"]
    traced, logged = _row_of(path / TRACE_FILE, step, "step"), _row_of(path / METRICS_FILE, step, "train")
    same, differs = list[str](), list[str]()
    before = recorded_processes(path)
    names = TRACED if before == processes else ("samples", "batch")
    if before != processes:
        notes.append(f"the run had {before} processes and the replay {processes}: numbers may differ by rounding")
    if traced:
        for part in names:
            if part in traced and part in replayed:
                (same if traced[part] == replayed[part] else differs).append(part)
    elif logged.get("grad_norm") is not None and before == processes:
        (same if logged["grad_norm"] == result["grad_norm"] else differs).append("grad_norm")
    if not same and not differs:
        notes.append(f"the run has no row of this step in {TRACE_FILE}, so that nothing could be compared")
    return Replay(
        name or str(path), step, "" if checkpoint is None else checkpoint.name, result["samples"], result["losses"],
        result["grad_norms"], replayed.get("mean_loss"), result["grad_norm"], batch, same, differs, notes,
    )  # fmt: skip


def _row_of(path: Path, step: int, kind: str) -> dict[str, Any]:
    """Return the row of the step that made the update, without those of skipped ones; empty if there is none."""
    return read_rows(path).get((step, kind), {}) if path.is_file() else {}
