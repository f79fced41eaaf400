"""Checks of a run before its first step: `trainer.check()`."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from omnitrain.core.display import ProofResult, Table
from omnitrain.diagnostics.data_checks import check_data
from omnitrain.diagnostics.findings import CheckFinding, NotTried, Outcome
from omnitrain.diagnostics.learning_checks import (
    check_gradients,
    check_loss,
    check_overfitting,
    check_rate,
    check_shapes,
    check_time,
)
from omnitrain.diagnostics.mixing_checks import check_mixing, check_padding
from omnitrain.diagnostics.pass_probe import PassProbe, brief_error
from omnitrain.diagnostics.rehearsal import unchanged_run
from omnitrain.trainer.loop import Loop


@dataclass(frozen=True, slots=True)
class CheckResult(ProofResult):
    """The result of `trainer.check()`, which prints as a list and shows as a table in notebooks.

    Attributes:
        findings: What was found, errors first.
        outcomes: A line for each check: what was measured, or why it was not tried.
        seconds: How long it took.

    >>> finding = CheckFinding("warning", "labels", "the training set", "all 8 samples have label 0", "Look at them.")
    >>> print(CheckResult([finding], {"labels": "1 of 2 classes"}, 0.5))
    1 warning, in 0.5 s
      labels  1 of 2 classes
    warning: labels, the training set: all 8 samples have label 0. Look at them.
    """

    findings: list[CheckFinding]
    outcomes: dict[str, str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether there is no error and no warning."""
        return all(finding.severity == "note" for finding in self.findings)

    def __str__(self) -> str:
        """Return the outcome of each check, then the findings."""
        width = max(map(len, self.outcomes), default=0)
        lines = [f"{self._count()}, in {self.seconds:.1f} s"]
        lines += [f"  {name:<{width}}  {outcome}" for name, outcome in self.outcomes.items()]
        for finding in self.findings:
            text = f"{finding.severity}: {finding.check}, {finding.where}: {finding.what}. {finding.remedy}".rstrip()
            lines += textwrap.wrap(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        return "\n".join(lines)

    def _count(self) -> str:
        counts = {kind: sum(finding.severity == kind for finding in self.findings) for kind in _SEVERITIES}
        words = [f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count]
        return ", ".join(words) if words else "nothing found"

    def _table(self) -> Table:
        rows = [list(asdict(finding).values()) for finding in self.findings]
        above = [f"{self._count()}, in {self.seconds:.1f} s"]
        below = [f"{name}: {outcome}" for name, outcome in self.outcomes.items()]
        return Table(["severity", "check", "where", "what", "remedy"], rows, above=above, below=below)


_SEVERITIES = ("error", "warning", "note")


# The checks that need no more than passes that all ranks make together.
_FORWARD_CHECKS = ("loss", "shapes", "mixing", "padding")
_SHARDED = "gradients of sharded weights need backward passes on all ranks; run check() on one process"
_CHECKS: dict[str, Callable[[PassProbe], Outcome]] = {
    "loss": check_loss,
    "shapes": check_shapes,
    "gradients": check_gradients,
    "overfitting": check_overfitting,
    "mixing": check_mixing,
    "padding": check_padding,
    "rate": check_rate,
    "time": check_time,
}


def check_run(loop: Loop, samples: int, seconds: float) -> CheckResult:
    """Check the data, the model and the loss of a run that has not begun; called on all ranks.

    Args:
        loop: The loop of the run.
        samples: How many samples of each set are read, at most.
        seconds: The limit of reading each set, and of overfitting.
    """
    begin, ranks = time.perf_counter(), loop.ranks
    outcomes, findings = dict[str, str](), list[CheckFinding]()
    with unchanged_run(loop):
        batch, problem = _read_batch(loop)
        probe: PassProbe | None = None
        if batch is not None and not loop.has_custom_epoch:
            probe = PassProbe(loop, batch, seconds)
            problem = probe.begin()
        findings += [] if problem is None else [problem]
        fails = ranks.sum("whether the first batch of check() fails", float(problem is not None))[0] > 0
        for name, check in _CHECKS.items():
            try:
                if fails or probe is None:
                    raise NotTried(
                        "its own `_train_epoch` computes the loss" if loop.has_custom_epoch else "the batch fails"
                    )
                if probe.is_collective and name not in _FORWARD_CHECKS:
                    raise NotTried(_SHARDED)
                outcomes[name], entries = check(probe)
                findings += entries
            except NotTried as reason:
                outcomes[name] = f"not tried: {reason}"
            except Exception as error:
                outcomes[name] = f"not tried: {brief_error(error)}"
        classes = None if probe is None or fails else probe.count_classes()
        if ranks.is_main:
            for name, (outcome, entries) in check_data(loop, samples, seconds, classes).items():
                outcomes[name] = outcome
                findings += entries
    gathered = ranks.gather("the findings of check()", (outcomes, findings))
    unique, known = list[CheckFinding](), set[tuple[str, str]]()
    for _, entries in gathered:  # what several ranks find is reported once
        unique += [finding for finding in entries if (finding.check, finding.where) not in known]
        known |= {(finding.check, finding.where) for finding in entries}
    ordered = sorted(unique, key=lambda finding: _SEVERITIES.index(finding.severity))
    return CheckResult(ordered, gathered[0][0], time.perf_counter() - begin)


def _read_batch(loop: Loop) -> tuple[Any, CheckFinding | None]:
    """Return the first batch of this rank, or what its reading raised."""
    loader = loop.sets.train
    if loader is None:
        return None, None
    try:
        counted = next(loop.feed.lockstep_batches(loader, only_first=True), None)
    except Exception as error:
        if loop.ranks.world_size > 1:
            raise
        return None, CheckFinding(
            "error", "batch", loader.name, brief_error(error), "Correct the data or the collator."
        )
    return None if counted is None else counted.batch, None
