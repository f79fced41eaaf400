"""Drills: a script with interruptions, compared with an undisturbed run of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omnitrain.config.overrides import Overrides
from omnitrain.core.display import ProofResult, create_panels, draw_curve
from omnitrain.core.errors import ConfigError
from omnitrain.diagnostics.interruptions import CLASS_PATH, PHASES, SIGNALS, Interruption
from omnitrain.diagnostics.script import Outcome, Script, without_gpu

_STANDSTILL_SECONDS = 1.0
_TIMING = re.compile(r"per_sec|seconds|time|memory|mfu|flops|elapsed", re.IGNORECASE)
"""Names of values that no two runs share."""
_PARTS: tuple[str, ...] = ("weights", "optimizer state", "schedule", "random state", "history", "metrics.jsonl", "best")
_STEP_PARTS = {
    "batch": "another batch",
    "loss": "another loss",
    "rates": "another learning rate",
    "weights": "other weights",
    "random": "another random state",
}
"""What the record of a step has that differs, in the order in which it comes about."""
_REMEDY = "give it `state_dict()` and `load_state_dict()`"
_REMEDIES = {
    "model": "make it a buffer (`register_buffer()`), or return it in `get_extra_state()`",
    "TrainerCallback": "have it inherit from transformers' `ExportableState` too, and return it in `state()`",
    "compute_metrics": "keep it in a callback with `state_dict()`, as no checkpoint has the state of metrics",
}
"""How objects keep their state in checkpoints, by the argument; others have a `state_dict()`."""
_INDENT = "\n           "
_WORDS = {"kill": "kill", "term": "SIGTERM", "stop": "standstill and kill", "disk": "full disk"}
_PHASE_WORDS = {"data": "at its data", "step": "in its update", "evaluation": "in an evaluation", "save": "in a save"}


@dataclass(slots=True)
class Start:
    """One start of the disturbed run.

    Attributes:
        interruption: What was to interrupt it; None for the last one.
        outcome: How it ended.
        step: The step of the interruption; None if it did not come.
        resumed_at: The step from which the next start resumed; None if there was none.
    """

    interruption: Interruption | None
    outcome: Outcome
    step: int | None = None
    resumed_at: int | None = None

    def __str__(self) -> str:
        """Return the line of a report."""
        spec = self.interruption
        if spec is None:
            return f"ran to its end in {self.outcome.seconds:.1f} s"
        ranks = "" if spec["ranks"] is None else f" of rank {', '.join(map(str, spec['ranks']))}"
        run = "" if spec["run"] == "run-1" else f" of {spec['run']}"
        place = f"{_WORDS[spec['signal']]}{ranks} at step {spec['step'] if self.step is None else self.step}{run}"
        if self.step is None:
            return f"{place}, {_PHASE_WORDS[spec['phase']]}: did not come, the script had ended"
        resumed = "never resumed" if self.resumed_at is None else f"resumed at {self.resumed_at}"
        return f"{place}, {_PHASE_WORDS[spec['phase']]}; {resumed}"


@dataclass(frozen=True, slots=True)
class Drill(ProofResult):
    """The result of a drill; `print` shows it, `plot()` draws both curves of the loss.

    Attributes:
        script: What was run.
        starts: The starts of the disturbed run.
        notes: What the drill has changed for the script.
        parts: For each part of the outcome whether it is equal to the bit.
        difference: The first thing that differs; empty if nothing does.
        suspects: Attributes of the user's objects that differ, as no checkpoint has them.
        is_deterministic: Whether two undisturbed runs are equal; None if only one was needed.
        losses: The loss of each step of the undisturbed run, by run.
        disturbed_losses: The same of each start, with the steps that it trained.
        folder: Where the runs are; None if they were removed, as all is well.
        remedy: What to do about a script that is not deterministic.
    """

    script: Script
    starts: Sequence[Start]
    notes: Sequence[str]
    parts: Mapping[str, bool]
    difference: str = ""
    suspects: Sequence[str] = ()
    is_deterministic: bool | None = None
    losses: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    disturbed_losses: Sequence[tuple[str, Sequence[tuple[int, float]]]] = ()
    folder: Path | None = None
    remedy: str = ""

    @property
    def ok(self) -> bool:
        """Whether the disturbed run is equal to the undisturbed one."""
        return not self.difference

    @property
    def code(self) -> int:
        """The exit code of the command: 0 if equal, 1 if not, 2 if the script itself is not deterministic."""
        return 0 if self.ok else 2 if self.is_deterministic is False else 1

    def verdict(self) -> str:
        """Return the result as text, without the starts."""
        if self.ok:
            return f"equal to the bit: {', '.join(self.parts)}"
        if self.is_deterministic is False:
            return f"not deterministic by itself: two undisturbed runs differ. {self.difference}. {self.remedy}"
        lines = [f"different: {self.difference.replace(chr(10), _INDENT)}"]
        if self.parts:
            equal = [name for name, is_equal in self.parts.items() if is_equal]
            lines.append(f"           equal: {', '.join(equal) or 'nothing'}")
        lines += [f"suspect:   {suspect}" for suspect in self.suspects]
        return "\n".join([*lines, *([f"both runs are in {self.folder}"] if self.folder else [])])

    def __str__(self) -> str:
        """Return the notes, a line for each interruption, and the verdict."""
        lines = [f"note: {note}" for note in self.notes]
        lines += [f"{number:>2}  {start}" for number, start in enumerate(self.starts, 1)]
        return "\n".join([*lines, self.verdict()])

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        starts = [
            {**(start.interruption or {}), "stopped_at": start.step, "resumed_at": start.resumed_at,
             "code": start.outcome.code, "seconds": round(start.outcome.seconds, 3)}
            for start in self.starts
        ]  # fmt: skip
        return {
            "ok": self.ok, "code": self.code, "script": self.script.path, "notes": list(self.notes), "starts": starts,
            "parts": dict(self.parts), "difference": self.difference, "suspects": list(self.suspects),
            "is_deterministic": self.is_deterministic, "folder": self.folder and str(self.folder),
            "remedy": self.remedy,
        }  # fmt: skip

    def _figure(self) -> Any:
        figure, panels = create_panels("Drill", len(self.losses), has_one_axis=False)
        for axes, (run, losses) in zip(panels, self.losses.items(), strict=True):
            draw_curve(axes, losses, "undisturbed", color="#9a9ca5", alpha=0.5, linewidth=6, marker=None)
            parts = [points for name, points in self.disturbed_losses if name == run and points]
            for number, points in enumerate(parts):
                draw_curve(axes, points, f"start {number + 1}", linewidth=1.2, marker=None)
            for start in self.starts:
                if start.interruption is not None and start.step is not None and start.interruption["run"] == run:
                    axes.axvline(start.step, color="#888", linewidth=0.8, linestyle=":")
                    label = _WORDS[start.interruption["signal"]].partition(" and ")[0]
                    axes.annotate(
                        label, (start.step, 1), xycoords=("data", "axes fraction"),
                        xytext=(-3, -4), textcoords="offset points", rotation=90, ha="right", va="top", fontsize=8,
                    )  # fmt: skip
            axes.set(xlabel="step", ylabel="training loss" if len(self.losses) == 1 else f"training loss, {run}")
            axes.legend(fontsize="small")
        return figure


@dataclass(slots=True)
class Record:
    """What `Observer` has recorded of a run, read from its files.

    Attributes:
        rows: The events of each rank, in order.
        metrics: The rows of `metrics.jsonl` of each run.
    """

    rows: dict[str, list[dict[str, Any]]]
    metrics: dict[str, list[dict[str, Any]]]

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Return the record in a folder."""
        rows = {path.stem.removeprefix("observed-"): _read_lines(path) for path in folder.glob("observed-*.jsonl")}
        metrics = {path.parent.name: _read_lines(path) for path in (folder / "runs").glob("*/metrics.jsonl")}
        return cls(dict(sorted(rows.items())), dict(sorted(metrics.items())))

    def events(self, event: str, run: str | None = None, rank: str | None = None) -> list[dict[str, Any]]:
        """Return the events of a kind, of all ranks or of one."""
        ranks = self.rows if rank is None else [rank]
        return [
            row for name in ranks for row in self.rows.get(name, ())
            if row["event"] == event and run in (None, row["run"])
        ]  # fmt: skip

    def runs(self) -> list[str]:
        """Return the names of the runs, in the order of their start."""
        return list(dict.fromkeys(row["run"] for row in self.events("start", rank="0")))

    def steps(self, rank: str) -> dict[tuple[str, int], dict[str, Any]]:
        """Return the last record of each step, by run and step."""
        return {(row["run"], row["step"]): row for row in self.events("step", rank=rank)}

    def last_steps(self) -> dict[str, int]:
        """Return the last step of each run."""
        return {row["run"]: row["step"] for row in self.events("end", rank="0")}

    def last_end(self, run: str, rank: str) -> dict[str, Any] | None:
        """Return the state at the end of a run, if it has come there."""
        return next(iter(reversed(self.events("end", run, rank))), None)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")[:-1]
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):  # a killed process has written half of it
            rows.append(json.loads(line))
    return rows


def drill(
    script: Script,
    kills: int = 5,
    signals: Sequence[str] = SIGNALS,
    seed: int = 0,
    *,
    timeout: float = 3600.0,
    report: Callable[[str], None] = lambda line: None,
) -> Drill:
    """Run a script undisturbed, and again with interruptions from which it is resumed, and compare both.

    Nothing is written into the folders of the script's own runs. Without a difference the script is taken to be
    deterministic; with one, it is run undisturbed once more to tell its own differences from those of a resume.

    Args:
        script: The script.
        kills: How often it is interrupted.
        signals: By what: "kill", "term", "stop" (a standstill, then a kill) and "disk" (a full disk in a save, then a
            kill).
        seed: Decides about the places.
        timeout: Seconds after which a run of the script is ended.
        report: Called with each line as soon as it is known.

    Raises:
        ConfigError: If the script cannot be tried: it fails by itself, uses no trainer of omnitrain, or saves no state;
            or if no interruption came after a checkpoint.
    """
    script.check()
    signals = list(signals)
    if not signals or not set(signals) <= set(SIGNALS):
        raise ConfigError(f"`--signals {','.join(signals)}` must be some of {', '.join(SIGNALS)}.")
    if kills < 1:
        raise ConfigError(f"`--kills {kills}` must be a number of interruptions, at least 1.")
    folder = Path(tempfile.mkdtemp(prefix="omnitrain-drill-"))
    is_kept = False
    try:
        result = _Driver(script, folder, timeout, report).run(kills, signals, seed)
        is_kept = result.code == 1
        return result if is_kept else replace(result, folder=None)
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


class _Driver:
    """Runs the script in both ways."""

    def __init__(self, script: Script, folder: Path, timeout: float, report: Callable[[str], None]) -> None:
        self._script, self._folder, self._timeout, self._report = script, folder, timeout, report

    def run(self, kills: int, signals: Sequence[str], seed: int) -> Drill:
        undisturbed, outcome = self._run_undisturbed("undisturbed")
        self._check(undisturbed)
        notes, save_steps = _notes(undisturbed), _missing_save_steps(undisturbed)
        if self._script.supplied:
            notes.append("two undisturbed runs differ on a GPU: the drill supplies deterministic=True")
        histories = [end["history"] for end in undisturbed.events("end", rank="0")]
        names = {name for name, _ in _leaves([*undisturbed.metrics.values(), *histories])}
        if timed := sorted(name for name in names if re.search("time|memory", name)):
            notes.append(f"not compared, as their names are those of times and sizes: {', '.join(timed)}")
        if save_steps is not None:
            notes.append(
                f"it saves only at its end: the drill saves every {save_steps} steps. Pass `save_steps=` to lose less "
                "than everything by a kill."
            )
        steps = sum(undisturbed.last_steps().values())
        counts = [len(undisturbed.events(event, rank="0")) for event in ("evaluation", "save")]
        self._report(f"undisturbed: {steps} steps, {counts[0]} evaluations, {counts[1]} saves; {outcome.seconds:.1f} s")
        for note in notes:
            self._report(f"note: {note}")
        self._timeout = min(self._timeout, 300 + 10 * outcome.seconds)
        places = plan_interruptions(undisturbed, kills, signals, seed, self._script.processes, save_steps)
        starts, difference = self._run_disturbed(places, save_steps)
        disturbed = Record.read(self._folder / "disturbed")
        parts: dict[str, bool] = {}
        suspects: list[str] = []
        if not difference:
            difference, parts = compare(undisturbed, disturbed)
        if not difference and not any(start.resumed_at for start in starts):
            raise ConfigError(
                "Nothing was resumed: no interruption came after a checkpoint. Try more `--kills`, another `--seed`, "
                "or save more often."
            )
        is_deterministic, remedy = None, "Seed what it draws, such as the weights of the model (torch.manual_seed)."
        if difference and parts:
            self._report("the runs differ: once more undisturbed, to see whether the script itself does")
            again, _ = self._run_undisturbed("again")
            noisy = _find_noisy_values(undisturbed, again)
            if noisy:
                notes.append(f"not compared, as two undisturbed runs differ in them: {', '.join(sorted(noisy))}")
                difference, parts = compare(undisturbed, disturbed, noisy)
            natural, _ = compare(undisturbed, again, noisy)
            if natural and _has_other_kernels(undisturbed) and not self._script.supplied:
                self._report("it does: all of it again with deterministic=True, as on a GPU few kernels are")
                script = replace(self._script, supplied={"deterministic": True})
                driver = _Driver(script, self._folder / "deterministic", self._timeout, self._report)
                try:
                    return driver.run(kills, signals, seed)
                except ConfigError as error:
                    remedy = without_gpu(error)
            is_deterministic = not natural
            difference = natural.partition("\n")[0] or difference
            suspects = [] if natural else _find_suspects(undisturbed, disturbed, again)
        losses = {run: _losses(undisturbed.events("step", run, "0")) for run in undisturbed.runs()}
        return Drill(
            self._script, starts, notes, parts, difference, suspects, is_deterministic,
            {run: points for run, points in losses.items() if points}, _losses_by_start(disturbed), self._folder,
            remedy if is_deterministic is False else "",
        )  # fmt: skip

    def _overrides(self, name: str, resume: bool, **options: Any) -> Overrides:
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        observer = {"class_path": CLASS_PATH, "init_args": {"folder": str(folder), **options}}
        return {"save_dir": str(folder / "runs"), "resume": resume, "callbacks": [observer]}

    def _run_undisturbed(self, name: str) -> tuple[Record, Outcome]:
        outcome = self._script.run(self._folder / name, self._overrides(name, False), timeout=self._timeout)
        if outcome.timed_out:
            raise ConfigError(
                f"{self._script.path!r} had not ended after {self._timeout:.0f} s. Give it fewer steps, or a longer "
                "`--timeout`."
            )
        if outcome.code:
            raise ConfigError(
                f"{self._script.path!r} failed by itself, with exit code {outcome.code}, before anything was "
                f"interrupted. The drill redirects `save_dir`; a script that reads it again needs `trainer.save_dir`. "
                f"It ended with:\n{outcome.last_lines()}"
            )
        return Record.read(self._folder / name), outcome

    def _check(self, record: Record) -> None:
        path = self._script.path
        if not record.runs():
            raise ConfigError(
                f"{path!r} has trained with no trainer of omnitrain in its own processes, so there is nothing to "
                "resume. Drill the script that calls `train()`."
            )
        if not any(record.last_steps().values()):
            raise ConfigError(f"{path!r} has taken no step. Give it data, and at least one step to train.")
        if any(json.loads(end["values"]["only_model"]) for end in record.events("end", rank="0")):
            raise ConfigError(
                f"{path!r} saves only weights (save_only_model=True), from which no run can resume. Leave that out."
            )

    def _run_disturbed(self, places: list[Interruption], save_steps: int | None) -> tuple[list[Start], str]:
        """Start the script once for each interruption, and to its end; return the starts, and what went wrong."""
        folder, starts = self._folder / "disturbed", list[Start]()
        marker = folder / "stopped"

        def is_standing_still() -> bool:
            try:
                return time.time() - marker.stat().st_mtime > _STANDSTILL_SECONDS
            except OSError:
                return False

        for number, place in enumerate([*places, None]):
            marker.unlink(missing_ok=True)
            before = Record.read(folder)
            outcome = self._script.run(
                folder, self._overrides("disturbed", True, interruption=place, save_steps=save_steps),
                name=f"start-{number + 1}", timeout=self._timeout, is_stuck=is_standing_still,
            )  # fmt: skip
            record, start = Record.read(folder), Start(place, outcome)
            self._note_resumption(starts, before, record)
            hits = [
                row for rank in record.rows
                for row in record.events("interruption", rank=rank)[len(before.events("interruption", rank=rank)) :]
            ]  # fmt: skip
            if hits:
                start.step = hits[0]["step"]
            starts.append(start)
            if outcome.timed_out or (outcome.code and not hits):
                last = f"the start after: {starts[-2]}" if len(starts) > 1 else "the first start"
                what = f"did not end within {self._timeout:.0f} s" if outcome.timed_out else f"failed ({outcome.code})"
                if len(starts) == 1 and not hits:
                    raise ConfigError(
                        f"{self._script.path!r} {what} when it was run again, before anything interrupted it. "
                        f"It ended with:\n{outcome.last_lines()}"
                    )
                return starts, f"{last}: {what}:\n{outcome.last_lines()}\n"
            if place is not None and not hits:
                self._report(f"{len(starts):>2}  {start}")
                break
        return starts, ""

    def _note_resumption(self, starts: list[Start], before: Record, record: Record) -> None:
        """Say of the start before from where this one has resumed."""
        if not starts:
            return
        spec = starts[-1].interruption
        rows = record.events("start", rank="0")[len(before.events("start", rank="0")) :]
        same = [row["step"] for row in rows if spec is not None and row["run"] == spec["run"]]
        starts[-1].resumed_at = same[0] if same else None
        self._report(f"{len(starts):>2}  {starts[-1]}")


def plan_interruptions(
    record: Record, kills: int, signals: Sequence[str], seed: int, processes: int = 1, save_steps: int | None = None
) -> list[Interruption]:
    """Return where a run is interrupted: at random steps of the undisturbed one, in all phases that it has."""
    chance = random.Random(seed)
    runs = record.runs()
    steps = sorted(record.steps("0"), key=lambda key: (runs.index(key[0]), key[1]))
    places: dict[str, list[tuple[str, int, int]]] = {
        "data": [(*key, 0) for key in steps],
        "step": [(*key, 0) for key in steps],
        "evaluation": [(row["run"], row["step"], row["count"]) for row in record.events("evaluation", rank="0")],
        "save": [(row["run"], row["step"], row["count"]) for row in record.events("save", rank="0")],
    }
    if save_steps is not None:
        places["save"] += [(run, step, 8) for run, step in steps if step % save_steps == 0]
    first_saves = {run: min((row[1] for row in places["save"] if row[0] == run), default=math.inf) for run in runs}
    phases = [phase for phase in PHASES if places[phase]]
    chosen: list[Interruption] = []
    for number in range(kills):
        if number % len(phases) == 0:
            chance.shuffle(phases)
        if number % len(signals) == 0:
            order = chance.sample(list(signals), len(signals))
        signal = order[number % len(signals)]
        phase = "save" if signal == "disk" else phases[number % len(phases)]  # each run saves at its end
        # the last one after a checkpoint, or nothing might be resumed
        later = [] if number < kills - 1 else [place for place in places[phase] if place[1] > first_saves[place[0]]]
        run, step, count = chance.choice(later or places[phase])
        ranks = None if processes == 1 or number % 2 else [chance.randrange(processes)]
        if phase in ("save", "evaluation") and ranks is not None:
            ranks = [0]  # which has a part in each
        number_before = chance.randrange(max(count, 2))
        chosen.append(Interruption(run=run, step=step, phase=phase, signal=signal, number=number_before, ranks=ranks))
    return sorted(chosen, key=lambda place: (runs.index(place["run"]), place["step"]))


def _has_other_kernels(record: Record) -> bool:
    """Return whether a run was on an accelerator, most of whose kernels give other bits in each run."""
    return any(row["device"] != "cpu" for row in record.events("start", rank="0"))


def _notes(record: Record) -> list[str]:
    """Return what the drill changes for the script, as sentences."""
    starts = list({row["run"]: row for row in record.events("start", rank="0")}.values())
    notes = []
    folders = [row["save_dir"] for row in starts]
    if any(folder is not None for folder in folders):
        names = ", ".join(dict.fromkeys(repr(folder) for folder in folders if folder is not None))
        notes.append(f"save_dir {names} is redirected to a temporary folder")
    if None in folders:
        notes.append("the script has no `save_dir`, so that a kill would lose everything: the drill supplies one")
    if any(row["resume_from"] is None for row in starts):
        notes.append("train() has no `resume_from`: the drill supplies resume_from='auto'")
    return notes


def _missing_save_steps(record: Record) -> int | None:
    """Return the interval of saves that a script needs which saves at its end only; None if it saves before."""
    ends = record.last_steps()
    if any(row["step"] < ends.get(row["run"], 0) for row in record.events("save", rank="0")):
        return None
    return max(1, max(ends.values()) // 5)


# --- comparison


def compare(expected: Record, actual: Record, ignored: Collection[str] = frozenset()) -> tuple[str, dict[str, bool]]:
    """Return the first thing that differs, as text, and which parts of the outcome are equal.

    Args:
        expected: The record of an undisturbed run.
        actual: The record of the other.
        ignored: Names of values in `metrics.jsonl` and in the history that are not compared.
    """
    parts = dict.fromkeys(_recorded_parts(expected), True)
    texts = [*_compare_ends(expected, actual, parts, ignored), *_compare_metrics(expected, actual, parts, ignored)]
    since = _first_step(expected, actual)
    if since and not texts:
        parts["weights"] = parts["random state"] = False  # on the way, if not at the end
    texts = [*filter(None, [since]), *texts]
    return "\n".join(dict.fromkeys(texts[:3])), parts


def _first_step(expected: Record, actual: Record) -> str:
    """Return the first step whose record differs, and what of it comes first."""
    differing: list[tuple[int, str, str]] = []
    for rank in expected.rows:
        reference, candidate = expected.steps(rank), actual.steps(rank)
        for key, row in reference.items():
            other = candidate.get(key)
            names = [name for name in _STEP_PARTS if other is None or row[name] != other[name]]
            if names:
                equal = [text.partition(" ")[2] for name, text in _STEP_PARTS.items() if name not in names]
                what = "is missing" if other is None else f"has {_STEP_PARTS[names[0]]}"
                same = f" (same {', '.join(equal)})" if other is not None and equal else ""
                run = "" if key[0] == "run-1" else f" of {key[0]}"
                differing.append((list(reference).index(key), f"since step {key[1]}{run}: it {what}{same}", rank))
                break
    if not differing:
        return ""
    _, text, _ = min(differing)
    ranks = [rank for _, other, rank in differing if other == text]
    return text if len(ranks) == len(expected.rows) else f"{text}, on rank {', '.join(ranks)}"


def _find_noisy_values(first: Record, second: Record) -> set[str]:
    """Return the values, such as times, in which two undisturbed runs differ that are otherwise equal."""
    if _first_step(first, second):
        return set()
    noisy: set[str] = set()
    pairs: list[tuple[Any, Any]] = [(rows, second.metrics.get(run)) for run, rows in first.metrics.items()]
    for run in first.runs():
        ends = [record.last_end(run, "0") or {"history": None} for record in (first, second)]
        pairs.append((ends[0]["history"], ends[1]["history"]))
    for reference, candidate in pairs:
        for entry, other in zip(_comparable(reference), _comparable(candidate), strict=False):
            if entry[0] == other[0] and entry != other:
                noisy.add(entry[0])
    return noisy


def _compare_ends(expected: Record, actual: Record, parts: dict[str, bool], ignored: Collection[str]) -> Iterator[str]:
    for run in expected.runs():
        for rank in expected.rows:
            reference, candidate = expected.last_end(run, rank), actual.last_end(run, rank)
            if reference is None or candidate is None:
                if reference is not candidate:
                    parts.update(dict.fromkeys(_PARTS, False))
                    yield f"{run} has not ended in the {'disturbed' if candidate is None else 'undisturbed'} run"
                continue
            if reference["step"] != candidate["step"] or reference["reason"] != candidate["reason"]:
                parts["history"] = False
                ends = [f"{end['step']} ({end['reason']})" for end in (candidate, reference)]
                yield f"it ended at step {', not '.join(ends)}"
            for kind in ("tensors", "values"):
                for name in reference[kind].keys() | candidate[kind].keys():
                    if reference[kind].get(name) != candidate[kind].get(name):
                        parts[_part_of(name)] = False
            for name in reference["history"].keys() | candidate["history"].keys():
                tables = [_comparable({name: end["history"].get(name)}, ignored) for end in (reference, candidate)]
                if tables[0] != tables[1]:
                    parts["best" if "best" in name else "history"] = False
    if unequal := [name for name in _PARTS if not parts.get(name, True)]:
        yield f"at the end: other {', '.join(unequal)}"


def _recorded_parts(record: Record) -> list[str]:
    """Return the parts of the outcome that a run has, so that no other is called equal."""
    ends = record.events("end", rank="0")
    exists = {
        "schedule": any(end["values"].get("scheduler", "null") != "null" for end in ends),
        "metrics.jsonl": any(record.metrics.values()),
        "best": any("best" in name and value is not None for end in ends for name, value in end["history"].items()),
    }
    return [name for name in _PARTS if exists.get(name, True)]


def _part_of(name: str) -> str:
    """Return the part of the outcome that an entry of a checkpoint belongs to."""
    if name.startswith(("optimizer", "scaler")):
        return "optimizer state"
    if name.startswith(("rng", "drawn", "order", "data", "stream", "state")):
        return "random state"
    return "schedule" if name == "scheduler" else "weights"


def _compare_metrics(
    expected: Record, actual: Record, parts: dict[str, bool], ignored: Collection[str]
) -> Iterator[str]:
    for run, rows in expected.metrics.items():
        actual_rows = [dict(_comparable(row, ignored)) for row in actual.metrics.get(run, [])]
        for number, row in enumerate(dict(_comparable(row, ignored)) for row in rows):
            other = actual_rows[number] if number < len(actual_rows) else {}
            if row != other:
                parts["metrics.jsonl"] = False
                names = [name for name in row if row[name] != other.get(name)] or [*(other.keys() - row.keys())]
                values = f"{row.get(names[0])!r} undisturbed, {other.get(names[0])!r} resumed"
                yield f"metrics.jsonl at step {row.get('step')}: {names[0]} is {values}"
                break
        else:
            if len(actual_rows) != len(rows):
                parts["metrics.jsonl"] = False
                yield f"metrics.jsonl has {len(actual_rows)} rows, not {len(rows)}"


def _comparable(value: Any, ignored: Collection[str] = frozenset()) -> list[tuple[str, Any]]:
    """Return the values in dicts and lists with their names, without those of the clock and of folders."""
    values = list[tuple[str, Any]]()
    for name, entry in _leaves(value):
        if name not in ignored and not _TIMING.search(name):
            entry = "nan" if isinstance(entry, float) and math.isnan(entry) else entry
            values.append((name, Path(entry).name if isinstance(entry, str) and "/" in entry else entry))
    return values


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in dicts and lists, each with its key in the innermost dict."""
    if isinstance(value, (dict, list)):
        entries = value.items() if isinstance(value, dict) else ((name, entry) for entry in value)
        for key, entry in entries:
            yield from _leaves(entry, key)
    else:
        yield name, value


def _find_suspects(expected: Record, actual: Record, again: Record) -> list[str]:
    """Return the attributes of the user's objects that differ at the end: state that no checkpoint has."""
    suspects: dict[tuple[str, str], str] = {}
    for run, rank in itertools.product(expected.runs(), expected.rows):
        ends = [record.last_end(run, rank) for record in (expected, actual, again)]
        reference, candidate, repeated = ({} if end is None else end["objects"] for end in ends)
        for name, attributes in reference.items() if candidate else ():
            for attribute, value in attributes.items():
                other = candidate.get(name, {}).get(attribute)
                # what differs in a second undisturbed run too, such as a time, is no state
                if value == other or value != repeated.get(name, {}).get(attribute) or " at 0x" in value:
                    continue
                remedy = _REMEDIES.get(name.split()[0], _REMEDY)
                if name.endswith("()") and remedy is _REMEDY:
                    remedy = "make it a class with `state_dict()` and `load_state_dict()`"
                place = name if rank == "0" else f"{name} of rank {rank}"
                text = f"{place}: its {attribute!r} is {value} undisturbed, {other} resumed; {remedy}"
                suspects.setdefault((name, attribute), text)
    return list(suspects.values())[:5]


# --- curves


def _losses(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in rows if row["loss"] is not None]


def _losses_by_start(record: Record) -> list[tuple[str, list[tuple[int, float]]]]:
    """Return the run, and the losses of the steps, of each start that has some."""
    starts = list[tuple[str, list[tuple[int, float]]]]()
    for row in record.rows.get("0", ()):
        if row["event"] == "start":
            starts.append((row["run"], []))
        elif row["event"] == "step":
            starts[-1][1].extend(_losses([row]))
    return [start for start in starts if start[1]]
