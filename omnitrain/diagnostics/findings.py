"""Findings of the checks before a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """Something that `trainer.check()` has found.

    Attributes:
        severity: "error" if training fails or learns nothing so, "warning" for a likely fault, "note" for the rest.
        check: The name of the check.
        where: The parameter, module, sample or argument that it concerns.
        what: What it is.
        remedy: What to do about it; empty if nothing has to be done.
    """

    severity: Severity
    check: str
    where: str
    what: str
    remedy: str = ""


Outcome = tuple[str, list[CheckFinding]]
"""What a check has measured, as text, and its findings."""


class NotTried(Exception):
    """Why a check was not tried."""
