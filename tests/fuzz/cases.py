"""Fuzzed runs: drawn from a seed, run straight, interrupted, without each option and in another split."""

import datetime
import math
import os
import random
import re
import signal
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from fuzz.kinds import KINDS, NAMES, SIZE
from fuzz.options import BACKENDS, LISTS, TABLE, TRAINERS, Option, altered_aspects, is_valid, parse_arguments
from resuming import Cut, Failed, KillAtEvent, Rates, differences, outcome, train

from omnitrain.checkpoint.tensor_files import gather_to_host

SPLITS = {8: [(4, 2), (2, 4), (8, 1)], 6: [(3, 2), (6, 1), (2, 3)], 4: [(4, 1), (2, 2), (1, 4)], 3: [(3, 1), (1, 3)]}
"""Batch sizes and accumulations, by the samples of a step on each process."""
UNSTEADY = re.compile(r"per_second|seconds|runtime|memory|throughput|flops|mfu|time|_share|goodput")
"""Values of logs that depend on the machine."""


@dataclass(frozen=True)
class Case:
    """A run to check, readable and reproducible by its `repr`."""

    trainer: str  # of `TRAINERS` or, on two processes, of `BACKENDS`
    kind: str  # the model and its data: a key of `KINDS`
    options: tuple[str, ...]  # texts of rows of the table
    base: str  # arguments that are not under test, as text
    batch: tuple[int, int]  # batch size and accumulation, on each process
    split: tuple[int, int]  # others, for a step of the same samples on one process
    cuts: tuple[
        tuple[str, float], ...
    ]  # ("stop", "signal" or "kill", step), ("stop at event", share of all events), ...

    @property
    def traits(self) -> list[str]:
        """The traits of the kind."""
        return KINDS[self.kind].traits.split()

    @property
    def rows(self) -> tuple[Option, ...]:
        """The options' rows of the table; of several with one text, that which is valid for the kind."""
        traits = {*self.traits, "divides_8"}
        valid = [row for row in TABLE if {*row.needs.split()} <= traits and not {*row.bars.split()} & traits]
        return tuple(next(row for row in valid if row.text == text) for text in self.options)

    @property
    def tolerances(self) -> tuple[float, float]:
        """What rounding may change: of losses and, relative to 1 + the value, of weights.

        Adam makes steps of any size of the rounding where gradients are zero but for that, in keys' biases of GPT-2.
        """
        return (1e-3, math.inf) if {"single", "fp32", "zero2"} & {*self.traits, self.trainer} else (1e-9, 1e-7)

    @property
    def commutes(self) -> bool:
        """Whether other splits of a step give the same numbers."""
        return "commutes" in self.traits and all(row.commutes for row in self.rows) and not self.pairs_across_ranks

    @property
    def pairs_across_ranks(self) -> bool:
        """Whether one process mixes two samples that are on different ranks: two ranks share the last step of an epoch
        evenly, and are left an odd number each."""
        arguments = parse_arguments(", ".join([self.base, *self.options]))
        step = 2 * self.batch[0] * self.batch[1]
        is_odd = SIZE % step // 2 % 2 == 1 and arguments.get("drop_last") != "True"
        return is_odd and self.trainer in BACKENDS and any("mixed" in row.gives for row in self.rows)

    @property
    def resumes(self) -> bool:
        """Whether the run can be resumed."""
        return all(row.resumes for row in self.rows)

    def call(self) -> str:
        """Return the Python expression of the trainer."""
        kind = KINDS[self.kind]
        trainer, _, sharding = BACKENDS.get(self.trainer, self.trainer).partition(", ")
        arguments = {
            "train_loader" if "loader" in self.traits else "train_dataset": kind.data.format(SIZE),
            "eval_dataset": kind.evaluation or kind.data.format(9), **parse_arguments(kind.arguments),
            "batch_size": str(self.batch[0]), "gradient_accumulation_steps": str(self.batch[1]),
            "learning_rate": "0.05", **parse_arguments(f"{self.base}, {sharding}"), "callbacks": "[*watchers]",
        }  # fmt: skip
        if "loader" in self.traits:
            del arguments["batch_size"]
        if any("own_rate" in row.gives for row in self.rows):
            del arguments["learning_rate"]
        for row in self.rows:
            for name, value in row.arguments.items():
                is_joined = name in LISTS and name in arguments
                arguments[name] = f"{arguments[name][:-1]}, {value[1:]}" if is_joined else value
        if "global_batch_size" in arguments:
            del arguments["gradient_accumulation_steps"]
        if self.trainer == "Trainer":
            arguments["device"] = "'cpu'"
        text = ", ".join(f"{name}={value}" for name, value in arguments.items())
        return f"{trainer}(model := {kind.model}, {text}, progress_bar=False, save_dir=folder)"

    def report(self, failures: Iterable[str]) -> str:
        """Return the text of a failed test, with what repeats it."""
        return "\n".join([f"{self!r}", f"  {self.call()}", *(f"  - {line}" for line in failures)])


def daily_seeds(count: int) -> list[int]:
    """Return seeds of the day, or those that FUZZ_SEED and FUZZ_CASES ask for."""
    base = int(os.environ.get("FUZZ_SEED") or datetime.date.today().strftime("%Y%m%d"))
    return [base * 1000 + number for number in range(int(os.environ.get("FUZZ_CASES") or count))]


def draw(seed: int, with_workers: bool = True, trainers: Iterable[str] = TRAINERS) -> Case:
    """Return the case of a seed."""
    generator = random.Random(seed)
    while True:
        kind = generator.choice([*KINDS])
        samples = generator.choice([8, 8, 6]) if "commutes" in KINDS[kind].traits else 8
        base = f"epochs={generator.choice([2, 3])}, log_steps=2"
        base += generator.choice(["", ", save_steps=1", ", save_steps=2", ", save_steps=3"])
        rows, (batch, split) = tuple(generator.sample(TABLE, 3)), generator.sample(_splits(kind, samples), 2)
        cuts = tuple(_draw_cut(generator) for _ in range(generator.choice([1, 1, 2])))
        trainer = generator.choice([*trainers])
        if trainer in BACKENDS:
            batch = generator.choice(_splits(kind, samples // 2))
        case = Case(trainer, kind, tuple(row.text for row in rows), base, batch, split, cuts)
        if any("rare" in row.gives for row in rows) and (not with_workers or generator.random() < 0.9):
            continue
        subsets = [rows, *([row for row in rows if row is not option] for option in rows)]
        if not all(is_valid(case.trainer, kind, size[0], subset) for subset in subsets for size in (batch, split)):
            continue
        if case.pairs_across_ranks and generator.random() < 0.5 and "map" in case.traits:
            case = replace(case, base=f"{base}, drop_last=True")
        return case


def _splits(kind: str, samples: int) -> list[tuple[int, int]]:
    return [(1, samples)] * 2 if "singles" in KINDS[kind].traits else SPLITS[samples]


def _draw_cut(generator: random.Random) -> tuple[str, float]:
    way, step, share = generator.choice(["stop", "signal", "kill"]), generator.randint(1, 8), generator.random()
    return (way, step) if generator.random() < 0.5 else (f"{way} at event", round(share, 2))


# --- a run

TO_END = ("", 0)
"""The cut of a part that trains to the end."""


class Record(Rates):
    """Notes the weights in training after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[torch.Tensor] = []

    def on_step_end(self, trainer: Any) -> None:
        super().on_step_end(trainer)
        parameters = trainer.get_model().parameters()
        self.weights.append(torch.cat([gather_to_host(parameter).double().flatten() for parameter in parameters]))


class CutAtEvent(KillAtEvent):
    """Ends the run at the n-th event as `Cut` does after a step; counts them all with n=0."""

    way = "kill"

    def interrupt(self, trainer: Any) -> None:
        if self.way == "kill":
            raise self.error
        trainer.stop() if self.way == "stop" else os.kill(os.getpid(), signal.SIGTERM)


@dataclass
class Run:
    """What came of a run: everything that a resumed one must agree on, the weights by step, and how many events."""

    outcome: dict[str, Any]
    weights: list[torch.Tensor]
    events: int

    def scores(self) -> dict[Any, Any]:
        """Return the metrics of evaluations and epochs, by table, position and name."""
        return {
            (table, row["epoch"], row["step"], name): value
            for table in ("valid", "train_metrics_history")
            for row in self.outcome["metrics"][table]
            for name, value in row.items()
            if not UNSTEADY.search(name)
        }


def play(case: Case, folder: Path, cuts: Iterable[tuple[str, float]] = (TO_END,), events: int = 0) -> Run:
    """Train in parts, each with a new trainer that resumes from "auto", and interrupted in the way of a cut.

    An uninterrupted run has so many events.
    """
    for way, place in cuts:
        counter, record = CutAtEvent(), Record()
        cut: Any = counter
        if way.endswith(" at event"):
            # the first event of a resumed run comes before signals are caught
            counter.way, counter.number = way.split()[0], 2 + int(place * (events - 1))
        elif way:
            cut = Cut(way, int(place))
        if case.trainer in BACKENDS:
            cut.error = Failed  # a killed rank would end the other cases
        trainer = eval(case.call(), {**NAMES, "watchers": [record, cut], "folder": folder})
        train(trainer, resume_from="auto")
    state = outcome(trainer)
    if case.trainer == "zero2":  # whose flat tensors end in padding, of which Adamax makes other numbers than 0
        moments, _ = trainer.backend.optimizer_state()
        rest = {name: tensor for name, tensor in state["tensors"].items() if not name.startswith("optimizer/")}
        state["tensors"] = rest | {f"optimizer/{name}": gather_to_host(tensor) for name, tensor in moments.items()}
    state["tensors"].pop("model/_extra_state", None)  # a skipped step changes it, and a save after one has it
    rows = [
        {name: value for name, value in row.items() if not UNSTEADY.search(name)} for row in state.get("journal", ())
    ]
    state["journal"] = [row for row in rows if row.keys() - {"kind", "step", "epoch"}]
    if (trace := folder / "trace.jsonl").exists():
        state["trace"] = trace.read_text().splitlines()
    return Run(state, record.weights, counter.count)


# --- what is checked


def check(case: Case) -> list[str]:
    """Return what is wrong with a case: each sentence begins with the check that failed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        folder, title, failures = Path(name), "run", []
        try:
            straight = play(case, folder / "straight")
            title = "resume"
            if case.resumes:
                resumed = play(case, folder / "cut", [*case.cuts, TO_END], straight.events)
                failures += [f"resume: {line}" for line in differences(resumed.outcome, straight.outcome)[:4]]
            for number, row in enumerate(case.rows):
                title = f"effect of {row.text}"
                options = case.options[:number] + case.options[number + 1 :]
                other = play(replace(case, options=options), folder / f"without-{number}")
                failures += [f"{title}: {line}" for line in compare_effect(case, number, straight, other)[:4]]
            title = f"split {case.split}"
            if case.commutes:
                other = play(replace(case, batch=case.split), folder / "split")
                failures += [f"{title}: {line}" for line in compare_split(case, straight, other)[:4]]
        except Exception as error:
            failures.append(f"{title}: {type(error).__name__}: {str(error)[:600]}")
        return failures


def compare_effect(case: Case, number: int, run: Run, other: Run) -> list[str]:
    """Compare a run with the one without an option, as the table says."""
    option = case.rows[number]
    aspects = altered_aspects(option, [row for row in case.rows if row is not option])
    gap, scores, other_scores = weight_gap(run, other), run.scores(), other.scores()
    if "weights" in option.alters.split():
        is_late = run.outcome["position"]["step"] < option.begins  # updates, which skipped steps are not
        is_late |= "skips" in case.traits and "lr_scheduler" in option.arguments  # a skipped step moves no schedule
        is_same = gap == 0 and len(run.weights) == len(other.weights) and not is_late
        return ["the weights in training are the same without it"] if is_same else []
    if "weights" in aspects:
        return []
    tolerance, weight_tolerance = case.tolerances if "rounding" in aspects else (0.0, 0.0)
    problems = [f"the weights in training differ by {gap:.1e}"] if gap > weight_tolerance else []
    if "length" not in aspects and len(run.weights) != len(other.weights):
        problems.append(f"{len(run.weights)} steps, and {len(other.weights)} without it")
    if "scores" not in aspects:
        problems += score_gaps(scores, other_scores, tolerance)
    elif "scores" in option.alters.split() and not {"evaluations", "length"} & aspects and scores == other_scores:
        is_evaluated = any(table == "valid" for table, *_ in scores)
        problems += ["the evaluations are the same without it"] if is_evaluated else []
    if not {"length", "evaluations", "scores", "choice", "rounding"} & aspects:
        tensors, other_tensors = (
            {name: tensor for name, tensor in each.outcome["tensors"].items() if name.startswith("model/")}
            for each in (run, other)
        )
        problems += differences(tensors, other_tensors, "weights in the end")
    return problems


def compare_split(case: Case, run: Run, other: Run) -> list[str]:
    """Compare the run with one whose steps have the same samples in other batches."""
    (tolerance, weight_tolerance), gap = case.tolerances, weight_gap(run, other)
    problems = [f"the weights in training differ by {gap:.1e}"] if gap > weight_tolerance else []
    problems += [] if len(run.weights) == len(other.weights) else ["the number of steps differs"]
    return problems + score_gaps(run.scores(), other.scores(), tolerance, every=True)


def weight_gap(run: Run, other: Run) -> float:
    """Return the largest relative difference between the weights of equal steps; infinity if one is not a number."""
    pairs = [pair for pair in zip(run.weights, other.weights, strict=False) if not torch.equal(*pair)]
    gaps = [float(((a - b).abs() / (1 + b.abs())).max()) for a, b in pairs]
    return max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)


def score_gaps(scores: dict[Any, Any], others: dict[Any, Any], tolerance: float, every: bool = False) -> list[str]:
    """Describe values that are not close: of all metrics, or of those that both runs have."""
    problems = []
    for key in sorted(scores.keys() | others.keys() if every else scores.keys() & others.keys()):
        a, b = scores.get(key, math.inf), others.get(key, math.inf)
        if a != b and not (a != a and b != b) and not abs(a - b) <= tolerance * (1 + abs(b)):
            problems.append(f"{key} is {a} and not {b}")
    return problems
