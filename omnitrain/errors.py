"""The exceptions of omnitrain.

    OmnitrainError
    ├── ConfigError          (ValueError)       an argument is wrong, or two arguments contradict each other
    │   └── FixedSettingError  (AttributeError)   a setting is changed after the trainer was made
    ├── ObjectiveError       (ValueError, KeyError)  the metric to optimize, or its direction, is unknown
    ├── DataError            (ValueError)       a dataset, loader or batch cannot be used
    ├── NonFiniteError       (ArithmeticError)  a loss or a gradient is NaN or infinite
    ├── CheckpointError      (RuntimeError)     a checkpoint is missing, incomplete, damaged or does not fit
    ├── MissingExtraError    (ImportError)      an optional dependency is not installed
    └── DistributedError     (RuntimeError)     the processes of a run disagree or have lost each other

A message says what is wrong with the value in it, what was expected, and what to do. Only exception types,
the helpers that word their messages, and what is forgiven a failing disk belong here.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from types import TracebackType
from typing import Any

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DistributedError",
    "FixedSettingError",
    "MissingExtraError",
    "NonFiniteError",
    "ObjectiveError",
    "OmnitrainError",
    "Tolerance",
    "add_place",
    "did_you_mean",
    "is_disk_error",
    "listed",
    "named_samples",
]

logger: logging.Logger = logging.getLogger("omnitrain")

_OF_TORCH = ("PytorchStreamWriter", "inline_container", "unexpected pos", "iostream error", "Parent directory ")
"""What the messages of `torch.save` have in them where a disk failed: it raises RuntimeError."""

_OF_RUST = ("(os error ", "Os { code: ")
"""The same for safetensors and tokenizers, in newer and older releases."""


class OmnitrainError(Exception):
    r"""The base of all errors that omnitrain raises on purpose.

    What cannot be printed in a message is escaped: a value in it may be a file's, and control a terminal.

    >>> print(CheckpointError("the name is \x1b[2J"))
    the name is \x1b[2J
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*(_printable(one) if isinstance(one, str) else one for one in args), **options)


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)


class ConfigError(OmnitrainError, ValueError):
    """An argument is wrong, or two arguments contradict each other."""


class FixedSettingError(ConfigError, AttributeError):
    """A setting is changed after the trainer was made, when it would have no effect."""


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
    """A checkpoint is missing, incomplete, damaged, or was made by another configuration."""


class MissingExtraError(OmnitrainError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, who: str, package: str, extra: str = "") -> None:
        # never by the name of this project, which on the package index is that of another one
        clone = f", or `pip install -e '.[{extra}]'` in a clone of omnitrain" if extra else ""
        super().__init__(
            f"{who} needs {package}, which is not installed. Run `pip install {package}`{clone}.", name=package
        )


class DistributedError(OmnitrainError, RuntimeError):
    """The processes of a run disagree, or one of them is gone."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'accuracy'?"` for the nearest known name, which may be one that `name` abbreviates."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6) or [each for each in known if each.startswith(name)]
    return f" Did you mean {near[0]!r}?" if near and name else ""


_PLACE = "Where: "


def add_place(error: BaseException, place: str) -> None:
    """Add a note that says where in the run an error was raised, unless it has one: the innermost knows best."""
    if not any(note.startswith(_PLACE) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{_PLACE}{place}.")


def named_samples(indices: Iterable[int], of: str = "") -> str:
    """Return words for some samples of a dataset, the first 20 by their index.

    >>> named_samples([37], "the training set"), named_samples([3, 4])
    ('sample 37 of the training set', 'samples 3, 4')
    """
    indices = list(indices)
    return f"sample{'s' * (len(indices) > 1)} {listed(indices)}" + (f" of {of}" if of else "")


def listed(values: Iterable[Any]) -> str:
    """Return the first 20 of some values, separated by commas."""
    texts = [str(value) for value in values]
    return ", ".join(texts[:20]) + (", ..." if len(texts) > 20 else "")


def is_disk_error(error: BaseException | None) -> bool:
    """Return whether an error says that a disk refused: libraries have words of their own for it.

    >>> is_disk_error(OSError(28, "No space left on device")), is_disk_error(ValueError("no"))
    (True, False)
    """
    if isinstance(error, OSError):
        return True
    if isinstance(error, OmnitrainError) or not isinstance(error, Exception):
        return False
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_TORCH):
        return True
    return any(words in str(error) for words in _OF_RUST)


class Tolerance:
    """Lets a disk fail that something is written to: inside `with`, it is told of once, and again when it works.

    Args:
        what: What is written, as the subject of a message.
        then: What becomes of it.

    >>> tolerance = Tolerance("metrics.jsonl", "It is tried again.")
    >>> with tolerance:
    ...     raise OSError(28, "No space left on device")
    >>> tolerance.has_failed
    True
    """

    def __init__(self, what: str, then: str) -> None:
        self.what = what
        self.then = then
        self.has_failed: bool = False

    def __enter__(self) -> None:
        """Begin to write."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        """Forgive the error of a disk, and no other."""
        if error is None:
            if self.has_failed:
                logger.warning("%s: writing works again.", self.what)
            self.has_failed = False
            return False
        if not is_disk_error(error):
            return False
        if not self.has_failed:
            logger.error("%s cannot be written: %s. %s", self.what, error, self.then)
        self.has_failed = True
        return True
