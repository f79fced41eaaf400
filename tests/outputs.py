"""What a page or a notebook says that its code prints, compared with what it prints."""

import math
import re

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")
PROGRESS = re.compile(
    r"^(?:step \d+(?:/\d+| \(\d+%\))|model  .* parameters, |train  .*; batch |save   |end    |"
    r"\{'\w+': '[^{}]*'epoch': '[^{}]*\}$).*(?:\n|$)",
    re.MULTILINE,
)
"""First, last and other lines of ours, and rows of transformers, which prints them if its verbosity was changed."""
TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?|\bseconds\b[ :]+\d\S*")
LOG_LINE = re.compile(r"^\[\d{4}-\d\d-\d\d .*\n?", re.MULTILINE)  # DeepSpeed prints one when it is imported


def without_progress(text: str) -> str:
    """Leave out the lines that a run prints while it trains, and those of a log: their times are others each time."""
    return LOG_LINE.sub("", PROGRESS.sub("", text))


def is_same_output(documented: str, printed: str) -> bool:
    """Whether the words are the same, and the numbers but for rounding. Dates and seconds may be any."""

    def is_same(number: str, other: str) -> bool:
        exact = number.isdigit() and other.isdigit()
        return number == other if exact else math.isclose(float(number), float(other), rel_tol=0.02, abs_tol=1e-6)

    documented, printed = (" ".join(TIME.sub("", text).split()) for text in (documented, printed))
    if NUMBER.split(documented) != NUMBER.split(printed):
        return False
    return all(map(is_same, NUMBER.findall(documented), NUMBER.findall(printed)))
