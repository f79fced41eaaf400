"""Manifest of a checkpoint (omnitrain.json): its entries, reading and verifying.

`check_value` compares a file with the types of its entries before any value is used: anyone can write a file with a
correct hash. The store writes the first entries, `contents.py` the others. No torch.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
import reprlib
import stat
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from omnitrain.core.errors import CheckpointError
from omnitrain.core.files import FileEntry, hashing, is_inside, open_regular, read_or_none, unique_keys
from omnitrain.core.history import TABLES

if TYPE_CHECKING:
    from omnitrain.distributed.ranks import Ranks

T = TypeVar("T")

FORMAT_VERSION = 1
MANIFEST = "omnitrain.json"
HISTORY = "history.jsonl"
# The most bytes of omnitrain.json that are read.
LARGEST_MANIFEST = 1 << 28
# How deeply lists and dicts may be nested; those of a run are about ten levels deep.
_DEPTH = 100
# The least bytes of files that are hashed by several ranks.
_MIN_SHARED_BYTES = 1 << 28
_REQUEST = "the files of a checkpoint to hash"
_ZEROS = "0" * 64


# The sort key of checkpoints.
SAVE_ORDER = operator.attrgetter("sequence", "step")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The properties of a checkpoint by which those to keep and to load are chosen."""

    step: int
    score: float | None = None
    """The value of the metric to optimize at this step; None if it was not evaluated or not finite."""
    sequence: int = 0
    """The number of the save in this folder; steps need not rise with it, as a run can resume from an earlier one."""
    best: bool = False
    """Whether its score was the best so far when it was saved."""
    for_best: bool = False
    """Whether that was the only reason to save it: it is deleted once `keep_best` others are better."""

    @classmethod
    def from_manifest(cls, content: Mapping[str, Any]) -> CheckpointInfo:
        """Return the properties in the content of omnitrain.json."""
        for_best = bool(content.get("for_best"))  # a folder written through `Store` need not have it
        return cls(content["step"], content["score"], content["sequence"], content["best"], for_best)


Check = Callable[[Path, Mapping[str, FileEntry]], None]
"""Raises a CheckpointError if the content of a file in a folder has changed."""
Place = tuple[str | int, ...]
"""The keys and indices that lead to a value in omnitrain.json."""

# --- checking values


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule for a plain value.

    Args:
        types: The accepted types.
        expected: The accepted values as text, for the error.
        limits: The least and the largest number; None also accepts NaN and infinities.
        form: The regular expression that a text matches; "" accepts any.
    """

    types: tuple[type, ...]
    expected: str
    limits: tuple[float, float] | None = None
    form: str = ""

    def __call__(self, value: Any, where: Place) -> None:
        """Raise a ValueError if a value is not accepted; `where` is its path in the file."""
        fits = type(value) in self.types  # True is no number
        if fits and self.limits is not None:
            fits = self.limits[0] <= value <= self.limits[1]
        if fits and self.form:
            fits = re.fullmatch(self.form, value, re.ASCII) is not None
        if not fits:
            raise _wrong(value, where, self.expected)


@dataclass(frozen=True, slots=True)
class Nullable:
    """The type of an entry that may be null."""

    kind: Any


@dataclass(frozen=True, slots=True)
class Optional:
    """The type of an entry that may be missing."""

    kind: Any


def check_value(value: Any, kind: Any, where: Place = ()) -> None:
    """Reject a value of another type.

    Args:
        value: The value, as JSON types.
        kind: `int` for a count, `float` for a finite number, `bool` or `str`; `[kind]` for a list; `(kind, ...)` for a
            list of so many entries; `{name: kind, ...: kind}` for an object, of which an Ellipsis stands for all other
            names; or a function that checks a value and its path.
        where: The path of the value in the file.

    Raises:
        ValueError: With the path of the first wrong value.
    """
    if isinstance(kind, Nullable | Optional):
        if value is not None or isinstance(kind, Optional):
            check_value(value, kind.kind, where)
    elif isinstance(kind, dict):
        _OBJECT(value, where)
        for key, inner in value.items():
            if key not in kind and ... not in kind:
                raise ValueError(f"the unknown key {_format_path((*where, key))}")
            check_value(inner, kind[key if key in kind else ...], (*where, key))
        for key in kind:
            if key is not ... and key not in value and not isinstance(kind[key], Optional):
                raise ValueError(f"no {_format_path((*where, key))}")
    elif isinstance(kind, list | tuple):
        is_row = isinstance(kind, tuple)
        _LIST(value, where)
        if is_row and len(value) != len(kind):
            raise _wrong(value, where, f"a list of {len(kind)}")
        for index, (inner, inner_kind) in enumerate(zip(value, kind if is_row else kind * len(value), strict=True)):
            check_value(inner, inner_kind, (*where, index))
    elif kind is not Any:
        rule: Any = _RULES.get(kind, kind)
        rule(value, where)


def _wrong(value: Any, where: Place, expected: str) -> ValueError:
    return ValueError(f"{_format_path(where)} = {reprlib.repr(value)}, where {expected} was expected")


def _format_path(where: Place) -> str:
    keys = [f".{key}" if str(key).isidentifier() else f"[{reprlib.repr(key)}]" for key in where]
    return "".join(keys).lstrip(".")


def _whole(least: int, most: int = 2**63 - 1) -> Rule:
    return Rule((int,), f"a whole number from {least} to {most}", (least, most))


def _text(form: str, expected: str) -> Rule:
    return Rule((str,), expected, form=form)


def _check_number(value: Any, where: Place) -> None:
    """Reject what is no number; infinities and NaN may be tagged."""
    if value not in _NONFINITE:
        _NUMBER(value, where)


def _check_numbers(value: Any, where: Place) -> None:
    """Reject what is no number and no list of such lists."""
    if isinstance(value, list):
        check_value(value, [_check_numbers], where)
    else:
        _check_number(value, where)


def _check_meter(value: Any, where: Place) -> None:
    """Reject what is no row of a training metric: a mean, a sum or maximum, or an object of torchmetrics."""
    _LIST(value, where)
    mean = (str, _check_number, _check_number, float, float)
    tensor = (_text("sum|mean|max|min", "a reduction"), _text(r"u?int\d+|b?float\d+", "a dtype"), _check_numbers)
    state = Nullable([(int, {...: tensor})])
    rows = {6: (*mean, _text("sum|running|max", "a kind of metric")), 4: (str, state, state, _text("object", "object"))}
    check_value(value, rows.get(len(value), mean), where)


def _check_tagged(value: Any, where: Place) -> None:
    """Reject what is not from `state_dicts.to_json`: an object with a tag has nothing else."""
    if isinstance(value, list):
        check_value(value, [_check_tagged], where)
    elif isinstance(value, dict):
        tags = value.keys() & _TAGS.keys()
        check_value(value, _TAGS[tags.pop()] if tags else {...: _check_tagged}, where)


def _check_key(value: Any, where: Place) -> None:
    """Reject what cannot be a key of a dict."""
    if isinstance(value, dict) and value.keys() == {"__tuple__"}:
        check_value(value["__tuple__"], [_check_key], where)
    elif isinstance(value, dict | list) and value not in _NONFINITE:
        raise _wrong(value, where, "the key of a dict")


def _check_state(value: Any, where: Place) -> None:
    """Reject what is not from `state_dicts.to_json` for a dict."""
    _OBJECT(value, where)
    if not value.keys().isdisjoint(_TAGS.keys() - {"__dict__"}):
        raise _wrong(value, where, "an object")
    _check_tagged(value, where)


_NONFINITE = ({"__float__": "nan"}, {"__float__": "inf"}, {"__float__": "-inf"})
_OBJECT, _LIST = Rule((dict,), "an object"), Rule((list,), "a list")
_NUMBER = Rule((int, float), "a number")
_RULES: dict[Any, Callable[[Any, Place], None]] = {
    int: _whole(0),
    float: Rule((int, float), "a finite number", (-sys.float_info.max, sys.float_info.max)),
    bool: Rule((bool,), "true or false"),
    str: Rule((str,), "text"),
}
_STEP = _whole(-1)  # -1 if there was none
_SECONDS = Rule((int, float), "a finite number of at least 0", (0, sys.float_info.max))
_SCALAR = Rule((int, float, str), "a number or text")
_DIGEST = _text("[0-9a-f]{64}", "64 hexadecimal digits")
_DATE = _text(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?([+-]\d\d:\d\d)?", "a date as ISO 8601 has it")
_TAGS: dict[str, Any] = {
    "__tensor__": {"__tensor__": str},
    "__float__": {"__float__": _text("nan|inf|-inf", "nan, inf or -inf")},
    "__tuple__": {"__tuple__": [_check_tagged]},
    "__counter__": {"__counter__": [(_check_key, _SCALAR)]},
    "__dict__": {"__dict__": [(_check_key, _check_tagged)]},
}

# --- the entries of omnitrain.json, which docs/checkpoint-format.md describes


def _optional(entries: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: kind if name is ... else Optional(kind) for name, kind in entries.items()}


# A row of the history.
ROW: Any = {...: _SCALAR}
_STORE_ENTRIES = {
    "format_version": _whole(1, FORMAT_VERSION),
    "sha256": _DIGEST,
    "step": int,
    "sequence": int,
    "score": Nullable(float),
    "best": bool,
    "files": {...: {"size": int, "sha256": _DIGEST, ...: Any}},
    ...: Any,
}
_OPTIONS = Nullable({...: Any})
_COUNTERS = ("samples_in_epoch", "samples", "tokens", "skipped_steps", "step_in_epoch", "batches_in_epoch")
_FLAGS = ("shift", "counts_labels", "is_sum", "is_mean", "is_shift_known")
# Without an Ellipsis: other names would become attributes or arguments.
_TASK_MEAN = _optional({**dict.fromkeys(_FLAGS, bool), "ignore_index": _whole(1 - 2**63)})
_GIT = {"commit": str, **_optional({"branch": Nullable(str), "clean": bool}), ...: Any}
_START = {
    "started_at": _DATE,
    "step": int,
    "resumed_from": Nullable(str),
    "command": [str],
    "script": Nullable({...: Nullable(str)}),
    "git": Nullable(_GIT),
    "packages": {...: str},
    "platform": str,
    "processes": _whole(1),
    "hosts": {...: {...: _whole(1)}},
    "environment": {...: str},
    ...: Any,
}
_ENTRIES: dict[Any, Any] = {
    "extra_state": _check_state,
    "settings": {
        "seed": _whole(0, 2**64),
        "total_steps": Nullable(int),
        "optimizer_groups": Nullable([{"lr": float, ...: Any}]),
        **dict.fromkeys(("lr_scheduler_options", "algorithm_options", "callback_options"), Optional(_OPTIONS)),
        ...: Any,
    },
    "progress": {
        "epoch": int,
        "step": int,
        **_optional({**dict.fromkeys(_COUNTERS, int), "seconds": _SECONDS, "epoch_size": Nullable(int)}),
    },
    "objective": {
        "metric": str,
        "direction": _text("min|max", "'min' or 'max'"),
        **dict.fromkeys(("best", "latest", "reference"), Nullable(float)),
        "best_step": Nullable(_STEP),
        "evaluations_without_gain": int,
        ...: Any,
    },
    "metrics": {
        "best_valid": ROW,
        "rows": dict.fromkeys(TABLES, Optional(int)),
        "best_step": Optional(_STEP),
        "best_checkpoint": Optional(_text(r"checkpoint-[0-9]{1,19}", "the name of a checkpoint")),
        "stop_reason": Optional(str),
        "left_out_samples": Optional(int),
    },
    "evaluated_step": _STEP,
    "credited_step": _STEP,
    "callbacks": [{"callback": str, "state": _check_state, "turn": Optional(int), ...: Any}],
    "loop": {
        "loss": [{"sum": _check_number, "weight": float, "marked": (_check_number, _check_number), ...: Any}],
        "grad_norm": Nullable(_check_number),
        "learning_rates": [float],
        "loss_mean": {**_TASK_MEAN, "tasks": Optional({...: _TASK_MEAN})},
        "logged": (int, _SECONDS, int, int),
        "microbatch_size": Optional(Nullable(_whole(1))),
        "metrics": Optional([[_check_meter]]),
        "metric_results": Optional({...: {...: _check_number}}),
        ...: Any,
    },
    "owes": {"evaluation": bool, "save": bool, ...: Any},
    "only_model": bool,
    "frozen": {...: str},
    "for_best": bool,
    "scored": (_STEP, _STEP),
    "clock": {"began_at": _SECONDS, "seconds": {...: _SECONDS}, ...: Any},
    "identity": {
        "python": str,
        "data": {...: {...: Nullable({"size": int, "samples": {...: {...: str}}, ...: Any})}},
        "code": {...: {...: str}},
        ...: Any,
    },
    "parts": Optional([{...: Any}]),
    "record": Optional(Nullable(_optional(_START))),
    "world_size": Optional(_whole(1)),
    "versions": Optional({...: str}),
    "saved_at": Optional(_DATE),
    ...: Any,
}
_OPTIMIZER = {
    "groups": [{"params": [str], ...: _check_tagged}],
    "rest": {...: _check_state},
    "shared": _check_state,
    ...: Any,
}
_PYTHON = {"version": _whole(3, 3), "gauss": Nullable(float), ...: Any}
_NUMPY = {"pos": _whole(0, 624), "has_gauss": _whole(0, 1), "gauss": float, ...: Any}
_STREAM = {
    "epoch": _STEP,
    "position": int,
    "state": _check_tagged,
    "has_ended": bool,
    **_optional({"batches": int, "workers": int}),
}
# The entries that only checkpoints with more than weights have.
_RUN_ENTRIES: dict[Any, Any] = {
    "optimizer": _OPTIMIZER,
    "optimizers": {...: Nullable(_OPTIMIZER)},
    "rng": [{"python": _PYTHON, "numpy": Optional(_NUMPY), ...: Any}],
    "scheduler": Nullable(_check_state),
    "scaler": _check_state,
    "algorithms": [_check_state],
    "drawn": [_whole(0, 2)],
    "order": _text("drawn|keyed", "'drawn' or 'keyed'"),
    "stream": Nullable(_STREAM),
}


def validate(content: Mapping[str, Any], where: str, complete: bool = True) -> None:
    """Reject the content of an omnitrain.json that no run can have written.

    Args:
        content: The content.
        where: The name of the checkpoint in errors.
        complete: Whether all entries that a run needs are required; otherwise only the existing ones are checked.

    Raises:
        CheckpointError: The content is invalid.
    """
    only_model = content.get("only_model") is True
    entries = _ENTRIES | (_optional(_RUN_ENTRIES) if only_model else _RUN_ENTRIES)
    try:
        check_value(content, entries if complete else _optional(entries))
    except ValueError as error:
        raise CheckpointError(
            f"{where} is damaged: {MANIFEST!r} has {error}. Use another checkpoint, or repair this one by hand."
        ) from None


_RUN_FILE = re.compile(r"(optimizer|scheduler|scaler|rng|rng_state_?\d*|trained|states|trainer_state)([./].*)?")


def is_run_file(name: str) -> bool:
    """Return whether only a resumed run needs a file of a checkpoint, ours or one for a stock Trainer of transformers.

    >>> [is_run_file(name) for name in ("optimizer/state.safetensors", "rng_state_0.pth", "model.safetensors")]
    [True, True, False]
    """
    return _RUN_FILE.fullmatch(name) is not None


def check_limits(content: Any) -> None:
    """Reject values nested too deeply for recursion, and numbers beyond 64 bits."""
    values: list[Any] = [content]
    for _ in range(_DEPTH + 1):
        nested: list[Any] = []
        for value in values:
            if isinstance(value, dict):
                nested.extend(value.values())
            elif isinstance(value, list):
                nested.extend(value)
            elif isinstance(value, int) and abs(value) >= 2**64:
                raise ValueError(f"a number of {value.bit_length()} bits")
        values = nested
    if values:
        raise ValueError(f"more than {_DEPTH} nested lists and objects")


# --- writing and reading


def encode(content: Mapping[str, Any]) -> bytes:
    """Return the text of omnitrain.json.

    Raises:
        CheckpointError: If JSON cannot hold the content.
    """
    try:
        text = json.dumps({"format_version": FORMAT_VERSION, "sha256": _ZEROS, **content}, indent=2) + "\n"
    except TypeError as error:
        raise CheckpointError(
            f"A state has something that JSON cannot hold: {error}. Keep numbers, strings, None, lists and dicts in a "
            "state, or convert it in `state_dict`."
        ) from error
    return text.replace(_ZEROS, hashlib.sha256(text.encode()).hexdigest(), 1).encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of omnitrain.json, after checking its hash."""
    name = repr(str(folder))
    if not folder.is_dir():
        raise CheckpointError(f"{name} does not exist.")
    try:
        with open_regular(folder / MANIFEST) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_MANIFEST:
                raise CheckpointError(
                    f"{name} is rejected: {MANIFEST!r} has {size} bytes, and at most {LARGEST_MANIFEST} are read."
                )
            data = file.read(size + 1)  # allocates so many bytes at once, hence the limit
    except FileNotFoundError:
        raise CheckpointError(f"{name} is incomplete: {MANIFEST!r} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {MANIFEST!r}: {error}.") from error
    return parse_manifest(data, name)


def parse_manifest(data: bytes, name: str) -> dict[str, Any]:
    """Return the content of an omnitrain.json; `name` is that of the checkpoint in errors."""
    version = re.search(rb'"format_version":\s*([0-9]{1,9})\b', data)
    if version and int(version[1]) > FORMAT_VERSION:
        raise CheckpointError(
            f"{name} has format_version {int(version[1])} in {MANIFEST!r}, and this omnitrain reads up to "
            f"{FORMAT_VERSION}. Upgrade omnitrain."
        )
    digest = re.search(rb'"sha256":\s*"([0-9a-f]{64})"', data)
    if not digest or hashlib.sha256(data.replace(digest[1], _ZEROS.encode(), 1)).hexdigest() != digest[1].decode():
        raise CheckpointError(f"{name} is damaged: {MANIFEST!r} does not match its own sha256; it was changed.")
    try:
        content = json.loads(data.decode(), object_pairs_hook=unique_keys)
        check_limits(content)
        check_value(content, _STORE_ENTRIES)
    except RecursionError:
        raise CheckpointError(f"{name} is rejected: {MANIFEST!r} is nested too deeply.") from None
    except ValueError as error:
        raise CheckpointError(f"{name} is damaged: {MANIFEST!r} has {error}. Use another checkpoint.") from None
    for file in content["files"]:
        if not is_inside(file):
            raise CheckpointError(f"{name} is rejected: {MANIFEST!r} lists {file!r}, which is outside of the folder.")
    return content


def check_hashes(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Raise a CheckpointError for the first file whose content has changed."""
    try:
        with hashing({folder / name: entry["size"] for name, entry in files.items()}) as digests:
            for (name, entry), digest in zip(files.items(), digests, strict=True):
                if digest != entry["sha256"]:
                    raise CheckpointError(
                        f"{str(folder)!r} is damaged: the content of {name!r} does not match its sha256."
                    )
    except OSError as error:
        raise CheckpointError(f"{str(folder)!r} cannot be read: {error}.") from error


def inspect(folder: Path, hashes: bool, check: Check = check_hashes) -> dict[str, Any]:
    """Return the content of omnitrain.json, after checking that all files in it exist unchanged.

    Args:
        folder: The folder of a checkpoint.
        hashes: Whether to read and hash all files, instead of only comparing sizes.
        check: Hashes the files.
    """
    content = read_manifest(folder)
    for name, entry in content["files"].items():
        try:
            status = (folder / name).stat()
        except (OSError, ValueError):  # ValueError: a name that no file can have
            raise CheckpointError(f"{str(folder)!r} is incomplete: {name!r} is missing.") from None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{str(folder)!r} is damaged: {name!r} is not a regular file.")
        if status.st_size != entry["size"]:
            raise CheckpointError(
                f"{str(folder)!r} is incomplete: {name!r} has {status.st_size} bytes, and {entry['size']} were written."
            )
    if hashes:
        check(folder, content["files"])
    return content


def read_history(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `metrics` of a checkpoint, with the rows of its history.

    Args:
        folder: The folder of the checkpoint.
        content: Its omnitrain.json.

    Raises:
        CheckpointError: If the file of the rows is invalid.
    """
    tables: dict[str, list[Any]] = {name: [] for name in TABLES}
    metrics = {**content["metrics"], **tables}
    counts = metrics.pop("rows")
    number = 0
    try:
        with open_regular(folder / HISTORY) as file:
            lines = file.read().splitlines()
        for line in lines:
            number += 1
            ((name, entry),) = json.loads(line).items()
            check_limits(entry)
            check_value(entry, ROW, (name,))
            tables[name].append(entry)
        for name, rows in tables.items():
            if len(rows) != counts.get(name, 0):
                raise ValueError(f"its rows are not the expected {counts}")
    except OSError as error:
        raise CheckpointError(f"{str(folder / HISTORY)!r} cannot be read: {error}. Use another checkpoint.") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{str(folder)!r} is damaged: line {number} of {HISTORY!r} is not a row of a history "
            f"({type(error).__name__}: {error}). Use another checkpoint."
        ) from None
    return metrics


# --- hashing by all ranks


def find_with_shared_hashing(ranks: Ranks, find: Callable[[Check], T]) -> T:
    """Return the result of `find`, which runs on the main rank while all ranks hash; all of them raise its error.

    Args:
        ranks: The ranks; all of them call this.
        find: Gets a function that hashes the files of a checkpoint, and may call it for several checkpoints.
    """
    if ranks.world_size == 1:
        return find(check_hashes)

    def check(folder: Path, files: Mapping[str, FileEntry]) -> None:
        manifest, size = read_or_none(folder / MANIFEST), sum(entry["size"] for entry in files.values())
        if size < _MIN_SHARED_BYTES or manifest is None:
            check_hashes(folder, files)
            return
        digest = hashlib.sha256(manifest).digest()
        ranks.on_main(_REQUEST, lambda: (folder, dict(files), digest))
        _hash_share(ranks, folder, files, digest)

    outcome: Future[T] = Future()
    if ranks.is_main:
        try:
            outcome.set_result(find(check))
        except Exception as error:
            outcome.set_exception(error)
        ranks.on_main(_REQUEST, lambda: None)
    else:
        while request := cast(Any, ranks.on_main(_REQUEST, lambda: None)):
            _hash_share(ranks, *request)
    return ranks.on_main("the choice of a checkpoint", outcome.result)


def _hash_share(ranks: Ranks, folder: Path, files: Mapping[str, FileEntry], manifest_digest: bytes) -> None:
    """Hash this rank's share of the files; on the main rank raise the error of any rank."""
    # a folder of this name on another machine may hold a different checkpoint
    has_files = ranks.is_main or hashlib.sha256(read_or_none(folder / MANIFEST) or b"").digest() == manifest_digest
    flags = ranks.gather("a look at a checkpoint", has_files)
    loads = {rank: 0 for rank, flag in enumerate(flags) if flag}
    share: dict[str, FileEntry] = {}
    for name, entry in sorted(files.items(), key=lambda file: (-file[1]["size"], file[0])):
        rank = min(loads, key=loads.__getitem__)
        loads[rank] += entry["size"]
        if rank == ranks.rank:
            share[name] = entry
    message = ""
    try:
        check_hashes(folder, share)
    except CheckpointError as error:
        message = str(error)
    messages = list(filter(None, ranks.gather("the hashes of a checkpoint", message)))
    if messages and ranks.is_main:
        raise CheckpointError(messages[0])
