"""Warnings about recompilations for new shapes, from PyTorch's records."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

logger: logging.Logger = logging.getLogger("omnitrain")

# What the reason for compiling once more has if it is a shape.
_OF_SHAPE = re.compile(r"(size|stride|rank) mismatch|\.size\(\)|\.stride\(\)")
# Recompilations for shapes before the warning.
_MANY = 3


class Recompilations:
    """Warns once if a run, which begins with this object, recompiles often because batches have other shapes."""

    def __init__(self) -> None:
        self._has_warned = False
        self._last: Any = next(reversed(_records()), None)
        self._reasons: list[str] = []
        self._seconds = 0.0

    def look(self) -> None:
        """Count what was compiled since the latest look; a log's time is enough for that, and steps need none."""
        records = _records()
        if not records or records[-1] is self._last:
            return
        known = next((number for number, record in enumerate(records) if record is self._last), -1)
        for record in records[known + 1 :]:
            why = (record.recompile_reason or "").partition("  #")[0]
            if _OF_SHAPE.search(why):
                self._reasons.append(why)
                self._seconds += record.entire_frame_compile_time_s or 0.0
        self._last = records[-1]
        if len(self._reasons) >= _MANY and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "torch.compile has compiled the model %d times more in this run, for %.1f s, as batches have other "
                "shapes; the latest reason: %s. Pad to few lengths (`pad_to_multiple_of` of a collator), leave the "
                "short end of an epoch out (`drop_last=True`), or pass compile={'dynamic': True}.",
                len(self._reasons), self._seconds, self._reasons[-1].strip(),
            )  # fmt: skip


def _records() -> list[Any]:
    """Return PyTorch's records of the latest compilations; empty if nothing was compiled."""
    module = sys.modules.get("torch._dynamo.utils")
    return [] if module is None else module.get_compilation_metrics()
