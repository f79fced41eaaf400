"""Numbers of a user's script on each backend, side by side."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from omnitrain.checkpoint.state_dicts import unwrap
from omnitrain.checkpoint.tensor_files import gather_to_host
from omnitrain.compute.precision import uses_tf32
from omnitrain.config.overrides import Overrides
from omnitrain.core.display import ProofResult, Table, create_panels, draw_curve
from omnitrain.core.errors import ConfigError, check_choice, escape_unprintable
from omnitrain.core.events import Callback, TrainerLike
from omnitrain.diagnostics.batch_dependence import BatchDependence, BatchProbe
from omnitrain.diagnostics.script import Outcome, Script, without_gpu

Size = Literal["bits", "rounding", "different", "not run"]

BACKENDS = ("native", "accelerate", "hf", "ddp", "fsdp", "zero1", "zero2", "zero3", "split")
_CLASSES = {"native": "Trainer", "accelerate": "AccelerateTrainer", "hf": "HFTrainer"}
# The largest relative differences that are rounding: of the first step, and of all of them, in which they grow.
_FIRST = {"fp32": 1e-4}
_FIRST_IN_16_BITS = 3e-2
_GROWTH = 10.0
_SPLIT = 8
# How much larger than in the trials of the reasons, and than one percent, a difference of the first loss may be.
_PLAUSIBLE, _LEAST_EFFECT = 10.0, 0.01
_RECORD, _WEIGHTS = "record.json", "weights.safetensors"


class Recorder(Callback):
    """Records the first steps of a run in a folder, and ends the process after them.

    Args:
        folder: The folder; the main rank writes there.
        steps: How many steps.
        probes: Whether to look for what makes a step depend on its split into batches.
        frozen: Names of modules that stay in evaluation mode.
    """

    order = 1000
    asks_alone = False

    def __init__(self, folder: str, steps: int, probes: bool = False, frozen: Sequence[str] = ()) -> None:
        self.folder: Path = Path(folder)
        self.steps = steps
        self.probes = probes
        self.frozen: frozenset[str] = frozenset(frozen)
        self._rows: list[dict[str, float]] = []
        self._before: tuple[Any, float] = (0.0, 0.0)
        self._samples = 0

    def on_train_start(self, trainer: Any) -> None:
        for name, module in unwrap(trainer.model).named_modules() if self.frozen else ():
            module.training = module.training and name not in self.frozen

    def on_step_start(self, trainer: Any) -> None:
        self._before, self._samples = trainer._step.loss.snapshot(), trainer.progress.samples

    def on_step_end(self, trainer: Any) -> None:
        total, weight = trainer._step.loss.snapshot()
        local = float(total - self._before[0]), weight - self._before[1]
        total, weight = trainer.ranks.sum_shares("the loss of a recorded step", *local)
        norm = trainer._step.grad_norm
        self._rows.append({
            "loss": total / weight if weight else math.nan,
            "grad_norm": math.nan if norm is None else float(norm),
            "samples": trainer.progress.samples - self._samples,
        })  # fmt: skip
        if len(self._rows) >= self.steps:
            self._finish(trainer)

    def on_train_end(self, trainer: TrainerLike) -> None:
        if sys.exception() is None:
            self._finish(trainer)

    def _finish(self, trainer: Any) -> None:
        tensors = sorted(trainer.backend.model_tensors().items())
        weights = {name: gather_to_host(tensor).clone() for name, tensor in tensors}
        is_fp32 = trainer.precision.name == "fp32"
        record = {
            "trainer": type(trainer).__name__,
            "precision": "tf32" if is_fp32 and uses_tf32(trainer.model, trainer.device) else trainer.precision.name,
            "batch_size": trainer.batch_size,
            "processes": trainer.world_size,
            "device": str(trainer.device),
            "rows": self._rows,
            "reasons": [],
            "problem": "",
        }
        try:
            record["reasons"] = [asdict(reason) for reason in BatchProbe(trainer).find_reasons()] if self.probes else []
        except Exception as error:  # a unit of the user's may not be callable outside of a step
            record["problem"] = f"{type(error).__name__}: {error}"
        if trainer.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(weights, self.folder / _WEIGHTS)
            self.folder.joinpath(_RECORD).write_text(json.dumps(record))
        # the rest of the script would evaluate, save and train more
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@dataclass(slots=True)
class Run:
    """One run of the script, compared with the script as it is.

    Attributes:
        name: The backend or the split.
        loss: The largest relative difference of the losses of steps; NaN if it did not run.
        grad_norm: The same of the norms of gradients.
        weights: The largest difference in a weight, relative to the largest entry of that weight.
        first: The larger one of the first step's differences in loss and norm.
        size: What the differences amount to.
        expected: What they may amount to.
        reason: Why they have to be, or why it did not run.
        losses: The relative difference of the loss at each step.
        remaining: What the differences amount to when the reasons are taken away; "not run" if that was not tried.
        objection: Why the reasons do not explain the differences; empty if they do.
        problem: Why that could not be tried; empty if it could.
    """

    name: str
    loss: float = math.nan
    grad_norm: float = math.nan
    weights: float = math.nan
    first: float = math.nan
    size: Size = "not run"
    expected: Size = "rounding"
    reason: str = ""
    losses: list[float] = field(default_factory=list)
    remaining: Size = "not run"
    objection: str = ""
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether the differences are as expected, or could not be found."""
        order = ("bits", "rounding", "different")
        return self.size == "not run" or (order.index(self.size) <= order.index(self.expected) and not self.objection)


@dataclass(frozen=True, slots=True)
class Parity(ProofResult):
    """The numbers of a script on each backend and in each split, compared with those of the script as it is.

    Attributes:
        script: The script.
        trainer: The class of its trainer.
        steps: The number of steps that were compared.
        samples: Samples in a step.
        runs: A comparison for each backend and split.
        reasons: What makes a step of the script depend on its split into batches.
        problem: Why that could not be tried; empty if it could.
        required: Whether each run counts, as the user has named the backends.
        is_deterministic_supplied: Whether all runs got `deterministic=True`, as two runs of the script differ on a GPU.
    """

    script: str
    trainer: str
    steps: int
    samples: int
    runs: list[Run]
    reasons: list[str]
    problem: str = ""
    required: bool = False
    is_deterministic_supplied: bool = False

    @property
    def ok(self) -> bool:
        """Whether every difference is as expected."""
        return all(run.ok for run in self.runs)

    @property
    def code(self) -> int:
        """The exit code: 0 if every difference is as expected, 1 if one is not, 2 if one could not be found."""
        return 1 if not self.ok else 2 if self._untried() else 0

    def _untried(self) -> list[str]:
        """Return the runs that say nothing and should."""
        return [run.name for run in self.runs if run.problem or (self.required and run.size == "not run")]

    def _table(self) -> Table:
        titles = ["", "loss", "grad_norm", "weights", "found", "expected", ""]
        rows = [
            [run.name, *map(_format, (run.loss, run.grad_norm, run.weights)), run.size,
             "" if run.size == "not run" else run.expected, "" if run.ok else "UNEXPECTED"]
            for run in self.runs
        ]  # fmt: skip
        head = (
            f"{self.script}: {self.trainer}, {self.steps} steps of {self.samples} samples; largest relative difference"
        )
        notes = [f"{run.name}: {run.reason}" for run in self.runs if run.size == "not run"]
        notes += [f"Depends on the split of a step: {reason}." for reason in self.reasons]
        remaining = [f"{run.name} {run.remaining}" for run in self.runs if run.remaining != "not run"]
        notes += [f"Without that: {', '.join(remaining)}."] if remaining else []
        notes += [f"{run.name}: {run.objection}" for run in self.runs if run.objection]
        if any(not run.ok and not run.objection for run in self.runs):
            notes.append("No reason was found for the unexpected differences.")
        if self.is_deterministic_supplied:
            notes.append("Two runs of the script differ on a GPU: all runs got deterministic=True.")
        if self.problem:
            notes.append(f"What depends on the split of a step could not be tried: {self.problem}")
        notes += [f"{run.name}: without its reasons {run.problem}" for run in self.runs if run.problem]
        if self.ok and (untried := self._untried()):
            notes.append(f"Could not be tried: {', '.join(untried)}.")
        return Table(titles, rows, above=[head], below=notes, is_first_left=True)

    def _figure(self) -> Any:
        figure, (axes,) = create_panels("Parity", 1)
        for run in self.runs:
            points = [(step, max(value, 1e-17)) for step, value in enumerate(run.losses, start=1)]
            draw_curve(axes, points, run.name)
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel("relative difference of the loss")
        axes.legend(fontsize="small")
        return figure

    def to_json(self) -> dict[str, Any]:
        """Return the result as values of JSON."""
        runs = [{**asdict(run), "ok": run.ok} for run in self.runs]
        runs = [{name: _to_json(value) for name, value in run.items()} for run in runs]
        content = {**asdict(self), "ok": self.ok, "code": self.code, "runs": runs}
        del content["required"]
        return content


def compare_backends(
    script: Script, steps: int = 20, backends: Sequence[str] | None = None, timeout: float = 600.0
) -> Parity:
    """Run the first steps of a script on each backend and in other splits, and compare them with the script as it is.

    Args:
        script: The script; it runs on one process, and on two for backends of several.
        steps: How many steps.
        backends: Some of `BACKENDS`; None takes all that are installed.
        timeout: Seconds for each run.

    Raises:
        ConfigError: If it cannot be tried: the script has no trainer of omnitrain, fails, or is not deterministic.
    """
    script.check()
    if steps < 1:
        raise ConfigError(f"`--steps {steps}` must be a number of steps, at least 1.")
    for name in backends or ():
        check_choice("--on", name, BACKENDS)
    with tempfile.TemporaryDirectory(prefix="omnitrain-parity-") as scratch:
        return _Comparison(script, steps, Path(scratch), timeout).compare(backends or _installed(), bool(backends))


def _installed() -> list[str]:
    required = {"hf": "transformers", "zero1": "deepspeed", "zero2": "deepspeed", "zero3": "deepspeed"}
    return [name for name in BACKENDS if name not in required or find_spec(required[name]) is not None]


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to run the script: what differs in it, and how it is launched."""

    title: str
    overrides: Overrides
    processes: int = 1
    options: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Record:
    content: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]

    def values(self, name: str) -> list[float]:
        return [row[name] for row in self.content["rows"]]


class _Comparison:
    """Runs a script in several ways."""

    def __init__(self, script: Script, steps: int, scratch: Path, timeout: float) -> None:
        self._script = script
        self._steps = steps
        self._scratch = scratch
        self._timeout = timeout
        self._references: dict[str, _Record | None] = {}

    def compare(self, backends: Sequence[str], required: bool) -> Parity:
        base, repeated = self._run_twice()
        remedy = "Seed what it draws before the trainer is made (torch.manual_seed)."
        if repeated.size != "bits" and base.content["device"] != "cpu":
            self._script = replace(self._script, supplied={"deterministic": True})
            self._scratch /= "deterministic"
            try:
                base, repeated = self._run_twice()
            except ConfigError as error:
                remedy = without_gpu(error)
        if repeated.size != "bits":
            step = next((n for n, value in enumerate(repeated.losses, start=1) if value), self._steps)
            raise ConfigError(
                f"{self._script.path!r} is not deterministic: run twice unchanged, its losses part at step {step}. "
                f"{remedy}"
            )
        content = base.content
        samples = int(content["rows"][0]["samples"])
        runs = [repeated]
        reasons = [BatchDependence(**reason) for reason in content["reasons"]]
        for name in backends:
            ways = self._ways(name, content, samples)
            runs += [self._run(way, base, reasons) for way in ways]
            if name == "split" and not ways:
                runs.append(Run("split", reason="a step has one sample, which cannot be split"))
        if all(run.size == "not run" for run in runs[1:]) and len(runs) > 1:
            raise ConfigError(
                f"Nothing could be compared: {'; '.join(f'{run.name}: {run.reason}' for run in runs[1:])}"
            )
        problem = escape_unprintable(content["problem"])[:300]
        texts = [reason.text for reason in reasons]
        size = len(content["rows"]), samples
        supplied = bool(self._script.supplied)
        return Parity(self._script.path, content["trainer"], *size, runs, texts, problem, required, supplied)

    def _run_twice(self) -> tuple[_Record, Run]:
        """Return the record of the script as it is, and the comparison with a second run of it."""
        base = self._require("as it is", probes=True)
        if not any(map(math.isfinite, base.values("loss"))):  # NaN would count as equal to NaN
            raise ConfigError(
                f"{self._script.path!r} has no finite loss in its first steps, so nothing can be compared. Look for "
                "the cause first; `trainer.check()` helps."
            )
        again = self._require("as it is, again")
        return base, _compare(Run("again", expected="bits"), again, base)

    def _ways(self, name: str, content: Mapping[str, Any], samples: int) -> list[_Way]:
        """Return the runs of a backend."""
        kind, size = content["trainer"], int(content["batch_size"])
        if name == "split":
            part = -(-samples // _SPLIT)
            sizes = [size for size in dict.fromkeys((samples, part)) if samples > 1]
            return [_Way(f"{-(-samples // each)} x {each}", {"arguments": _step_of(samples, each)}) for each in sizes]
        if name in _CLASSES:
            return [] if _CLASSES[name] == kind else [_Way(name, {"trainer": _CLASSES[name]})]
        options = {"fsdp": ["--fsdp"], "ddp": []}.get(name, ["--zero", name[-1]])
        overrides: Overrides = {"arguments": _step_of(samples, max(1, min(size, samples // 2)))}
        if kind == "Trainer":
            overrides["trainer"] = "AccelerateTrainer"
        return [_Way(f"{name} x 2", overrides, 2, ["--cpu", *options] if content["device"] == "cpu" else options)]

    def _run(self, way: _Way, base: _Record, reasons: list[BatchDependence]) -> Run:
        batch_size = way.overrides.get("arguments", {}).get("batch_size", base.content["batch_size"])
        has_same_split = way.processes == 1 and batch_size == base.content["batch_size"]
        expected: Size = "rounding" if has_same_split or not reasons else "different"
        run = Run(way.title, expected=expected)
        record, outcome = self._record(way)
        if record is None:
            run.reason = self._failure(outcome)
            return run
        changes = {
            "trainer": way.overrides.get("trainer", base.content["trainer"]), "processes": way.processes,
            "batch_size": batch_size,
        }  # fmt: skip
        ignored = [f"{name} {record.content[name]!r}, not {value!r}" for name, value in changes.items()
                   if record.content[name] != value]  # fmt: skip
        if ignored:  # such as a class of the script's own: its numbers would be equal, and say nothing
            run.reason = f"it ran with {', '.join(ignored)}, as the script's own class or loader cannot be replaced"
            return run
        if record.values("samples") != base.values("samples"):
            counts = [[int(count) for count in part.values("samples")] for part in (record, base)]
            run.reason = f"its steps have other samples: {counts[0]} instead of {counts[1]}"
            return run
        _compare(run, record, base)
        if run.size == "different" and expected == "different":
            run.reason = "; ".join(reason.text for reason in reasons)
            self._try_reasons(run, way, record, base, reasons)
        return run

    def _try_reasons(
        self, run: Run, way: _Way, record: _Record, base: _Record, reasons: Sequence[BatchDependence]
    ) -> None:
        """Find out whether the reasons explain the differences of a run: by their size, and without the reasons.

        Modules are put into evaluation mode. What stays there is the same in a run of one process with the same split.
        """
        effect = max(reason.effect for reason in reasons)
        if run.losses[0] > _PLAUSIBLE * max(effect, _LEAST_EFFECT):
            run.objection = (
                f"the first loss differs by {run.losses[0]:.0e} of itself, and in trials of the reasons by "
                f"{effect:.0e} at most"
            )
            return
        frozen = sorted({name for reason in reasons for name in reason.modules})
        is_same_split = any(not reason.modules for reason in reasons)
        if is_same_split and way.processes == 1:  # it would be compared with itself
            return
        size, samples = record.content["batch_size"], int(base.content["rows"][0]["samples"])
        arguments = _step_of(samples, size) if is_same_split else {}
        title = f"reference {size}" if is_same_split else "reference"
        if title not in self._references:
            self._references[title], outcome = self._record(_Way(title, {"arguments": arguments}), frozen=frozen)
            if self._references[title] is None:
                run.problem = f"the script as it is: {self._failure(outcome)}"
        reference, rest = self._references[title], record
        if frozen:
            rest, outcome = self._record(replace(way, title=f"{way.title} without"), frozen=frozen)
            if rest is None:
                run.problem = self._failure(outcome)
        if reference is None or rest is None:
            run.problem = run.problem or "the script as it is fails"
            return
        trial = _compare(Run(way.title), rest, reference)
        run.remaining = trial.size
        if trial.size == "different":
            gap = max(trial.loss, trial.grad_norm)
            run.objection = f"without its reasons losses or gradients still differ by {gap:.0e} of themselves"

    def _failure(self, outcome: Outcome) -> str:
        return f"ended at its time limit of {self._timeout:g} s" if outcome.timed_out else outcome.last_error()

    def _require(self, title: str, probes: bool = False) -> _Record:
        record, outcome = self._record(_Way(title, {}), probes=probes)
        if record is None:
            if outcome.code == 0:
                raise ConfigError(
                    f"{self._script.path!r} ended without a step of a trainer of omnitrain. Give a script that trains "
                    "with Trainer, AccelerateTrainer or HFTrainer."
                )
            what = "reached its time limit" if outcome.timed_out else f"failed with exit code {outcome.code}"
            raise ConfigError(f"{self._script.path!r} {what} by itself: {outcome.last_error()}")
        return record

    def _record(self, way: _Way, probes: bool = False, frozen: Sequence[str] = ()) -> tuple[_Record | None, Outcome]:
        folder = self._scratch / way.title.replace(" ", "-").replace(",", "")
        arguments = {"folder": str(folder), "steps": self._steps, "probes": probes, "frozen": frozen}
        path = f"{Recorder.__module__}.{Recorder.__qualname__}"
        callbacks = [{"class_path": path, "init_args": arguments}]
        overrides: Overrides = {**way.overrides, "save_dir": str(folder / "runs"), "callbacks": callbacks}
        script = replace(self._script, processes=way.processes, options=way.options)
        outcome = script.run(folder, overrides, timeout=self._timeout)
        if outcome.timed_out or not (folder / _RECORD).exists():
            return None, outcome
        record = _Record(json.loads((folder / _RECORD).read_text()), load_file(folder / _WEIGHTS))
        return record if record.content["rows"] else None, outcome


def _step_of(samples: int, batch_size: int) -> dict[str, Any]:
    """Return the arguments for steps of so many samples in micro-batches of so many."""
    return {"global_batch_size": samples, "batch_size": batch_size, "gradient_accumulation_steps": 1}


def _compare(run: Run, record: _Record, base: _Record) -> Run:
    """Fill in the differences of a run."""
    run.losses = [_relative(a, b) for a, b in zip(record.values("loss"), base.values("loss"), strict=False)]
    norms = [_relative(a, b) for a, b in zip(record.values("grad_norm"), base.values("grad_norm"), strict=False)]
    run.loss, run.grad_norm, run.first = max(run.losses), max(norms), max(run.losses[0], norms[0])
    run.weights = max(
        (
            _difference(record.weights.get(name), weight)
            for name, weight in base.weights.items()
            if weight.is_floating_point()  # the others count, such as the passes of BatchNorm
        ),
        default=0.0,
    )
    least = _FIRST.get(base.content["precision"], _FIRST_IN_16_BITS)
    largest = max(run.loss, run.grad_norm)
    if not run.loss and not run.grad_norm and not run.weights:
        run.size = "bits"
    else:
        is_rounding = run.first <= least and largest <= least * _GROWTH and math.isfinite(run.weights)
        run.size = "rounding" if is_rounding else "different"
    return run


def _relative(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a) and math.isfinite(b) else math.inf


def _difference(a: torch.Tensor | None, b: torch.Tensor) -> float:
    if a is None or a.shape != b.shape:
        return math.inf
    if not b.numel() or torch.equal(a, b):
        return 0.0
    a, b = a.double(), b.double()
    if torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
        return 0.0
    difference = float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
    return difference if math.isfinite(difference) else math.inf


def _format(value: float) -> str:
    return "-" if math.isnan(value) else "0" if not value else f"{value:.0e}"


def _to_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_json(entry) for entry in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
