"""The same probes on other trainers and on omnitrain's: does each keep what its users take for granted?

    python benchmarks/peers/probes.py [--only R3 ...] [--json FILE]

Each probe runs in a process of its own and says what happened, in numbers; the judgement is one function per probe,
the same for all. A trainer that is not installed is listed as such. How to install them is in README.md beside this.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
PEERS = ("transformers", "lightning")
SECONDS = 120
"""After which a probe counts as hanging; they take a few seconds each."""

Verdict = tuple[bool, str]
"""Whether it is as a user would expect, and what happened."""

EXACT = 1e-6  # what another order of summation may cost in float32


def equal(facts: Any) -> Verdict:
    same = facts["difference"] <= EXACT
    update = f"; the whole update is {facts['update']:.1e}" if "update" in facts else ""
    return same, "same weights" if same else f"weights differ by {facts['difference']:.1e}{update}"


def gradients(facts: Any) -> Verdict:
    return facts["gradients"] == [1.0, 1.0], f"gradients {facts['gradients']}"


def resumed(facts: Any) -> Verdict:
    wrong = {name: difference for name, difference in facts.items() if difference}
    listed = "; ".join(f"{name}: differ by {difference:.1e}" for name, difference in wrong.items())
    return not wrong, listed or "bit-exact: plain and random data, 0 and 2 workers"


def stream(facts: Any) -> Verdict:
    def told(after: list[int]) -> str:
        again, never = len(set(facts["before"]) & set(after)), 60 - len({*facts["before"], *after})
        return f"{again} of the {len(facts['before'])} again, {never} of 60 never"

    text = told(facts["after"])
    if "after, not seeded" in facts:
        text += f" (resumed without seeding: {told(facts['after, not seeded'])})"
    text += "; it warns" if facts["said"] else ""
    return sorted(facts["before"] + facts["after"]) == list(range(60)), text


def damaged(facts: Any) -> Verdict:
    def kind(outcome: Any) -> str:
        if "error" in outcome:
            return "crash"
        unsaid = "with a warning" if outcome["said"] else "without a word"
        if outcome["first_step"] == 6:
            return f"goes on from the older good one, {unsaid}"
        if outcome["first_step"] == 1:
            return f"starts from nothing, {unsaid}"
        return (
            f"goes on with something lost or changed, {unsaid}"
            if outcome["difference"]
            else "goes on with nothing lost"
        )

    kinds = Counter(map(kind, facts.values()))
    good = {"goes on from the older good one, with a warning", "goes on with nothing lost"}
    return set(kinds) <= good, "; ".join(f"{count} of {len(facts)}: {what}" for what, count in kinds.most_common())


def directions(facts: Any) -> Verdict:
    sys.path.insert(0, str(HERE))
    expected = importlib.import_module("material").DIRECTIONS
    wrong = [f"{name}={facts[name]}" for name, direction in expected.items() if facts[name] != direction]
    unknown = facts["foo"]
    text = "takes " + ", ".join(wrong) if wrong else f"{len(expected)} of {len(expected)} right"
    refused = unknown not in ("min", "max")
    return not wrong and refused, f"{text}; unknown 'foo': {'refused' if refused else unknown}"


def not_a_number(facts: Any) -> Verdict:
    text = f"{facts['steps']} of {facts['of']} steps, weights {'finite' if facts['finite'] else 'NaN'}"
    text += f", {facts['error']}" if facts["error"] else ", no error"
    text += f", logged loss {facts['logged']}" if "logged" in facts else ""
    return facts["finite"] and bool(facts["error"]), text


def patience(facts: Any) -> Verdict:
    text = f"stops at {facts['resumed']}, uninterrupted at {facts['straight']}"
    text += "".join(f" ({option}: at {step})" for option, step in facts.items() if option.endswith("=True"))
    return facts["resumed"] == facts["straight"], text


class Probe(NamedTuple):
    """What is tried, and how what happened is judged."""

    question: str
    judge: Callable[[Any], Verdict]


PROBES = {
    "R1": Probe("8 sequences of unequal length: batch 8 against batch 1 x accumulate 8, one SGD step", equal),
    "R2": Probe("3 micro-batches of gradient 1, accumulate 2: gradients of the two steps", gradients),
    "R3": Probe("stopped at step 7 of 15 in an epoch and resumed: final weights", resumed),
    "R4": Probe("the same: samples of the epoch seen again, or never", stream),
    "R5": Probe("one file of the newest checkpoint missing, cut or with a flipped bit: resume the newest", damaged),
    "R6": Probe("direction of the metric, not told: 5 to minimise, 5 to maximise", directions),
    "R7": Probe("one NaN label in 60 samples, 30 steps", not_a_number),
    "R8": Probe("dropout: evaluating every few steps against not evaluating", equal),
    "R9": Probe("patience 3, stopped at step 6 and resumed: when it stops", patience),
}


@dataclass(slots=True)
class Row:
    """One probe on one trainer.

    Attributes:
        is_right: None if it was not run.
        facts: As the trainer's script gave them.
    """

    probe: str
    question: str
    trainer: str
    version: str
    is_right: bool | None
    result: str
    facts: Any = None


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec(name) is None:
            return None
        return str(getattr(importlib.import_module(name), "__version__", "unknown version"))


def probe(name: str, trainer: str) -> Row:
    """Run one probe on one trainer, in another process."""
    version, question = version_of(trainer), PROBES[name].question
    if version is None:
        return Row(name, question, trainer, "", None, "not installed")
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--run", name, trainer]
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **quiet})
        facts = json.loads(child.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Row(name, question, trainer, version, False, f"hangs: no result after {SECONDS} s")
    except (IndexError, ValueError):
        return Row(name, question, trainer, version, None, f"did not run: {child.stderr.strip().splitlines()[-1:]}")
    return Row(name, question, trainer, version, *PROBES[name].judge(facts), facts)


def run(name: str, trainer: str) -> None:
    """Run one probe here, and print its facts as the last line."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))
    probed = getattr(importlib.import_module(f"on_{trainer}"), name.lower())
    with tempfile.TemporaryDirectory() as folder:
        facts = probed(Path(folder)) if inspect.signature(probed).parameters else probed()
    print("\n" + json.dumps(facts))


def show(rows: list[Row]) -> str:
    """Return one line for each probe and peer, with omnitrain's result beside the peer's, as a Markdown table."""
    ours = {row.probe: row for row in rows if row.trainer == "omnitrain"}
    lines = [("probe", "peer", "its result", "omnitrain")]
    for row in rows:
        if row.trainer == "omnitrain":
            continue
        question = "" if lines[-1][0].startswith(row.probe) else row.question
        peer = f"{row.trainer} {row.version}".strip()
        lines.append((f"{row.probe} {question}".strip(), peer, marked(row), marked(ours[row.probe])))
    lines.insert(1, ("---", "---", "---", "---"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def marked(row: Row) -> str:
    return row.result if row.is_right is None else f"{'right' if row.is_right else 'wrong'}: {row.result}"


def main() -> None:
    """Probe and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=PROBES, default=list(PROBES), metavar="R", help=", ".join(PROBES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, with all facts, there too")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        return run(*options.run)
    rows = []
    for name in options.only:
        for trainer in (*PEERS, "omnitrain"):
            print(f"{name} on {trainer} ...", file=sys.stderr, flush=True)
            rows.append(probe(name, trainer))
    print(show(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
