"""The exceptions of omnitrain.

    OmnitrainError
    ├── ConfigError          (ValueError)       an argument is wrong, or two arguments contradict each other
    │   └── FixedSettingError  (AttributeError)   a setting is changed after the trainer was created
    ├── ObjectiveError       (ValueError, KeyError)  the metric to optimize, or its direction, is unknown
    ├── DataError            (ValueError)       a dataset, loader or batch cannot be used
    ├── NonFiniteError       (ArithmeticError)  a loss or a gradient is NaN or infinite
    ├── CheckpointError      (RuntimeError)     a checkpoint is missing, incomplete, damaged or does not fit
    ├── MissingExtraError    (ImportError)      an optional dependency is not installed
    └── DistributedError     (RuntimeError)     the processes of a run disagree or have lost each other

A message says what is wrong, with the value, what was expected, and what to do. Only exception types, functions that
format their messages, and the tolerance for a failing disk belong here.
"""

from __future__ import annotations

import difflib
import logging
import math
import numbers
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

logger: logging.Logger = logging.getLogger("omnitrain")

# Parts of the messages of `torch.save` on a failing disk: it raises RuntimeError.
_TORCH_ERRORS = ("PytorchStreamWriter", "inline_container", "unexpected pos", "iostream error", "Parent directory ")

# The same for safetensors and tokenizers, in newer and older releases.
_RUST_ERRORS = ("(os error ", "Os { code: ")


class OmnitrainError(Exception):
    r"""The base class of all errors that omnitrain raises on purpose.

    Unprintable characters in a message are escaped: a value can come from a file and contain terminal control codes.

    >>> print(CheckpointError("the name is \x1b[2J"))
    the name is \x1b[2J
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*(escape_unprintable(arg) if isinstance(arg, str) else arg for arg in args), **options)


def escape_unprintable(text: str) -> str:
    """Return a text with unprintable characters, such as terminal control codes, as escape sequences."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class ConfigError(OmnitrainError, ValueError):
    """An argument is wrong, or two arguments contradict each other."""


class FixedSettingError(ConfigError, AttributeError):
    """A setting is changed after the trainer was created, when it would have no effect."""


class ObjectiveError(OmnitrainError, ValueError, KeyError):
    """The metric to optimize is missing, or its direction is unknown."""

    def __str__(self) -> str:
        """Return the message; KeyError would print its repr."""
        return Exception.__str__(self)


class DataError(OmnitrainError, ValueError):
    """A dataset, a loader or a batch cannot be used."""


class NonFiniteError(OmnitrainError, ArithmeticError):
    """A loss or a gradient is NaN or infinite."""


class CheckpointError(OmnitrainError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or from another configuration."""


class MissingExtraError(OmnitrainError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, who: str, package: str, extra: str = "") -> None:
        # not by the name of this project, which another one has on the package index
        clone = f", or `pip install -e '.[{extra}]'` in a clone of omnitrain" if extra else ""
        super().__init__(
            f"{who} needs {package}, which is not installed. Run `pip install {package}`{clone}.", name=package
        )


class DistributedError(OmnitrainError, RuntimeError):
    """The processes of a run disagree, or one of them is gone."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'accuracy'?"` for the nearest known name; `name` may be an abbreviation of it."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6) or [each for each in known if each.startswith(name)]
    return f" Did you mean {near[0]!r}?" if near and name else ""


def unexpected_arguments(callee: str, errors: Sequence[str]) -> TypeError:
    """Return one error for all unknown arguments of a call, each on its own line if there are several."""
    if len(errors) == 1:
        return TypeError(f"{callee}() got an unexpected argument {errors[0]}")
    return TypeError("\n  ".join([f"{callee}() got {len(errors)} unexpected arguments:", *errors]))


_LOCATION = "Where: "


def add_location(error: BaseException, place: str) -> None:
    """Add a note that says where in the run an error was raised, unless it has one: the innermost is the most exact."""
    if not any(note.startswith(_LOCATION) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{_LOCATION}{place}.")


def describe_samples(indices: Iterable[int], of: str = "") -> str:
    """Describe samples of a dataset for a message, the first 20 by index.

    >>> describe_samples([37], "the training set"), describe_samples([3, 4])
    ('sample 37 of the training set', 'samples 3, 4')
    """
    indices = list(indices)
    return f"sample{'s' * (len(indices) > 1)} {format_list(indices)}" + (f" of {of}" if of else "")


def format_list(values: Iterable[Any]) -> str:
    """Return the first 20 values, separated by commas."""
    texts = [str(value) for value in values]
    return ", ".join(texts[:20]) + (", ..." if len(texts) > 20 else "")


def is_disk_error(error: BaseException | None) -> bool:
    """Return whether an error comes from a failing disk: libraries raise different types for it.

    >>> is_disk_error(OSError(28, "No space left on device")), is_disk_error(ValueError("no"))
    (True, False)
    """
    if isinstance(error, OSError):
        return True
    if isinstance(error, OmnitrainError) or not isinstance(error, Exception):
        return False
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _TORCH_ERRORS):
        return True
    return any(words in str(error) for words in _RUST_ERRORS)


class Tolerance:
    """Tolerates a failing disk inside `with`: logs it once, and once more when writing works again.

    Args:
        subject: What is written, as the subject of a message.
        consequence: What happens to it, as a sentence.
        tolerated: Another type of error that is tolerated, such as that of a service.

    >>> tolerance = Tolerance("metrics.jsonl", "It is tried again.")
    >>> with tolerance:
    ...     raise OSError(28, "No space left on device")
    >>> tolerance.has_failed
    True
    """

    def __init__(self, subject: str, consequence: str, tolerated: type[Exception] | tuple[()] = ()) -> None:
        self.subject = subject
        self.consequence = consequence
        self.tolerated = tolerated
        self.has_failed: bool = False

    def __enter__(self) -> None:
        """Start writing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        """Suppress the error of a disk, and those of the type `tolerated`."""
        if error is None:
            if self.has_failed:
                logger.warning("%s: writing works again.", self.subject)
            self.has_failed = False
            return False
        if not is_disk_error(error) and not isinstance(error, self.tolerated):
            return False
        if not self.has_failed:
            logger.error("%s cannot be written: %s. %s", self.subject, error, self.consequence)
        self.has_failed = True
        return True


def check_choice(name: str, value: Any, choices: Iterable[str], other: str = "") -> None:
    """Raise ConfigError unless the argument `name` is one of these texts; `other` says what else it may be."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        raise ConfigError(
            f"`{name}` must be one of {', '.join(map(repr, known))}{other}, got {value!r:.200}."
            f"{did_you_mean(str(value), known)}"
        )


def check_number(
    name: str,
    value: Any,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
    is_whole: bool = False,
) -> None:
    """Raise ConfigError unless the argument `name` is a finite number, or an integer, within these bounds."""
    is_number = isinstance(value, numbers.Integral if is_whole else numbers.Real) and not isinstance(value, bool)
    number: Any = value
    is_huge = is_number and isinstance(number, int) and abs(number) > 10**40  # too large for a float, or to be shown
    if (
        not is_number
        or is_huge
        or not math.isfinite(number)
        or not (least <= number <= most and above < number < below)
    ):
        bounds = {"of at least": least, "above": above, "below": below, "of at most": most}
        words = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound))
        kind = "an integer" if is_whole else "a finite number"
        shown = "one of more than 40 digits" if is_huge else repr(value)
        raise ConfigError(f"`{name}` must be {kind}{words and ' '}{words}, got {shown}.")
