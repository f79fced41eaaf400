"""What omnitrain.json may hold: the type and the range of every value that a run restores. No torch.

It is checked before any value is used: a file with a correct hash can have been written by anyone. `manifest.py` checks
what the store itself writes there, `contents.py` whether a checkpoint fits the run.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from datetime import datetime
from typing import Any

from omnitrain.core.errors import CheckpointError
from omnitrain.core.history import TABLES
from omnitrain.core.progress import Progress

Check = Callable[[Any, str], None]
"""Gets a value and its place, and raises a ValueError that says what is wrong."""

LARGEST = 2**63 - 1
DEPTH = 100
"""How deeply lists and dicts may be nested; ours are about ten levels deep."""


def check_limits(content: Any) -> None:
    """Refuse values nested too deeply for recursion, and numbers beyond 64 bits."""
    waiting = [(content, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > DEPTH:
            raise ValueError(f"more than {DEPTH} lists and objects in each other")
        if isinstance(value, dict):
            waiting += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            waiting += [(inner, depth + 1) for inner in value]
        elif isinstance(value, int) and abs(value) >= 2**64:
            raise ValueError(f"a number of {value.bit_length()} bits")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a parsed JSON object if no key is in it twice: otherwise the last one would win silently."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice in one object")
    return found


def _wrong(value: Any, where: str, wanted: str) -> ValueError:
    return ValueError(f"{where} = {reprlib.repr(value)}, where {wanted} was expected")


def _inner(where: str, key: Any) -> str:
    return f"{where}.{key}" if isinstance(key, str) and key.isidentifier() else f"{where}[{reprlib.repr(key)}]"


# --- plain values


def whole(least: int = 0, most: int = LARGEST) -> Check:
    """Return a check for ints in a range."""

    def check(value: Any, where: str) -> None:
        if type(value) is not int or not least <= value <= most:
            raise _wrong(value, where, f"a whole number from {least} to {most}")

    return check


def number(least: float = -math.inf, odd: bool = False) -> Check:
    """Return a check for finite numbers; with `odd`, NaN and infinities pass too, in all their spellings."""

    def check(value: Any, where: str) -> None:
        found: Any = value
        if odd and isinstance(value, dict) and value.keys() == {"__float__"}:
            found = _ODD.get(str(value["__float__"]), "")
        is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
        if not is_number or (not odd and not (math.isfinite(found) and found >= least)):
            bound = "" if least == -math.inf else f" of at least {least:g}"
            raise _wrong(value, where, f"a number{bound}" if odd else f"a finite number{bound}")

    return check


_ODD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def flag(value: Any, where: str) -> None:
    """Accept True and False."""
    if not isinstance(value, bool):
        raise _wrong(value, where, "true or false")


def text(value: Any, where: str) -> None:
    """Accept strings."""
    if not isinstance(value, str):
        raise _wrong(value, where, "text")


def _pattern(form: str, wanted: str) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or not re.fullmatch(form, value, re.ASCII):
            raise _wrong(value, where, wanted)

    return check


def _date(value: Any, where: str) -> None:
    try:
        datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise _wrong(value, where, "a date as ISO 8601 has it") from None


# --- composed ones


def maybe(check: Check) -> Check:
    """Return a check that also accepts None."""
    return lambda value, where: None if value is None else check(value, where)


def each(check: Check, count: int | None = None) -> Check:
    """Return a check for lists, applied to every entry."""

    def check_all(value: Any, where: str) -> None:
        if not isinstance(value, list) or count not in (None, len(value)):
            raise _wrong(value, where, "a list" if count is None else f"a list of {count}")
        for index, inner in enumerate(value):
            check(inner, f"{where}[{index}]")

    return check_all


def _row(*checks: Check) -> Check:
    def check_all(value: Any, where: str) -> None:
        each(_anything, len(checks))(value, where)
        for index, (check, inner) in enumerate(zip(checks, value, strict=True)):
            check(inner, f"{where}[{index}]")

    return check_all


def _one_or_each(check: Check) -> Check:
    """Return a check for a list by rank; the first checkpoints have a single entry instead."""
    return lambda value, where: (each(check) if isinstance(value, list) else check)(value, where)


def table(check: Check) -> Check:
    """Return a check for objects with any keys, applied to every value."""

    def check_all(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        for key, inner in value.items():
            check(inner, _inner(where, key))

    return check_all


def record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None, open: bool = True) -> Check:
    """Return a check for objects with given keys; if `open`, other keys are accepted too."""
    known = {**required, **(optional or {})}

    def check_all(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        for key, inner in value.items():
            if key in known:
                known[key](inner, _inner(where, key).lstrip("."))
            elif not open:
                raise ValueError(f"{_inner(where, key)}, which is not known here")
        for key in required:
            if key not in value:
                raise ValueError(f"no {_inner(where, key).lstrip('.')}")

    return check_all


def _anything(value: Any, where: str) -> None:
    pass


def _all_of(*checks: Check) -> Check:
    def check_all(value: Any, where: str) -> None:
        for check in checks:
            check(value, where)

    return check_all


def _number_or_text(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise _wrong(value, where, "a number or text")


def tagged(value: Any, where: str) -> None:
    """Accept what `state.to_json` returns, with a fitting value under each of its tags."""
    if isinstance(value, list):
        for index, inner in enumerate(value):
            tagged(inner, f"{where}[{index}]")
        return
    if not isinstance(value, dict):
        return
    tags = [key for key in value if key.startswith("__")]
    if not tags:
        for key, inner in value.items():
            tagged(inner, _inner(where, key))
        return
    tag, content = tags[0], value[tags[0]]
    if len(value) > 1 or tag not in _TAGS:
        raise _wrong(value, where, f"an object with one of {', '.join(_TAGS)} alone")
    _TAGS[tag](content, _inner(where, tag))


def _key(value: Any, where: str) -> None:
    if isinstance(value, dict) and value.keys() == {"__tuple__"} and isinstance(value["__tuple__"], list):
        each(_key)(value["__tuple__"], where)
    elif isinstance(value, (dict, list)) and not any(value == {"__float__": odd} for odd in _ODD):
        raise _wrong(value, where, "the key of a dict")


def _pairs(check: Check) -> Check:
    def check_all(value: Any, where: str) -> None:
        each(_anything, 2)(value, where)
        _key(value[0], where)
        check(value[1], where)

    return each(check_all)


def _object(value: Any, where: str) -> None:
    """Accept what `state.to_json` makes of a dict."""
    if not isinstance(value, dict) or any(key.startswith("__") and key != "__dict__" for key in value):
        raise _wrong(value, where, "an object")
    tagged(value, where)


_TAGS: dict[str, Check] = {
    "__tensor__": text,
    "__float__": _pattern("nan|inf|-inf", "nan, inf or -inf"),
    "__tuple__": each(tagged),
    "__counter__": _pairs(_number_or_text),
    "__dict__": _pairs(tagged),
}

# --- the content of omnitrain.json


def _counter(default: Any) -> Check:
    return number(0) if isinstance(default, float) else whole() if isinstance(default, int) else maybe(whole())


_steps = whole(-1)


def row(value: Any, where: str) -> None:
    """Accept a row of the history: numbers and text by name."""
    table(_number_or_text)(value, where)


_rows = each(row)
_sums = record({"sum": number(odd=True), "weight": number(), "marked": each(number(odd=True), 2)})
_generators = record(
    {"python": record({"version": whole(3, 3), "gauss": maybe(number())})},
    {"numpy": record({"pos": whole(0, 624), "has_gauss": whole(0, 1), "gauss": number()})},
)
_LOSS_MEAN = record(
    {},
    {
        **dict.fromkeys(("shift", "counts_labels", "is_sum", "is_mean", "is_shift_known"), flag),
        "ignore_index": whole(-LARGEST),
        "tasks": table(_anything),
    },
)
_LOOP = record(
    {
        "loss": _one_or_each(_sums),
        "grad_norm": maybe(number(odd=True)),
        "logged": _row(whole(), number(0), whole(), whole()),
    },
    {
        "learning_rates": each(number()),
        "microbatch_size": maybe(whole(1)),
        "loss_mean": _LOSS_MEAN,
        "metrics": each(each(_row(text, number(odd=True), number(odd=True), number(), number()))),
    },
)

_MARK = record({"epoch": _steps, "position": whole(), "state": _anything, "has_ended": flag}, open=False)

_OPTIMIZER = record(
    {"groups": each(_all_of(record({"params": each(text)}), tagged)), "rest": table(_object), "shared": _object}
)

_ALWAYS: dict[str, Check] = {
    "extra_state": _all_of(table(_anything), tagged),
    "settings": record(
        {"seed": whole(0, 2**64), "total_steps": maybe(whole()), "optimizer_groups": maybe(each(table(_anything)))},
        {
            "optimizer_groups": maybe(each(record({}, {"lr": number()}))),
            "lr_scheduler_options": maybe(table(_anything)),
            "algorithm_options": maybe(table(_anything)),
            "callback_options": maybe(table(_anything)),
        },
    ),
    "progress": record(
        {"epoch": whole(), "step": whole()},
        {field.name: _counter(None if field.default is MISSING else field.default) for field in fields(Progress)},
        open=False,
    ),
    "objective": record(
        {
            "metric": text,
            "direction": _pattern("min|max", "'min' or 'max'"),
            "best": maybe(number()),
            "best_step": maybe(_steps),
            "latest": maybe(number()),
            "evaluations_without_gain": whole(),
            "reference": maybe(number()),
        }
    ),
    "metrics": record(
        {"best_valid": table(_number_or_text)},
        {
            "train_metrics_history": _rows,
            "valid": _rows,
            "test": _rows,
            "best_step": _steps,
            "best_checkpoint": _pattern(r"checkpoint-[0-9]{1,19}", "the name of a checkpoint"),
            "stop_reason": text,
            "rows": record({}, {name: whole() for name in TABLES}, open=False),
        },
        open=False,
    ),
    "evaluated_step": _steps,
    "credited_step": _steps,
    "callbacks": each(record({"callback": text, "state": _object}, {"turn": whole()})),
    "loop": _LOOP,
    "owes": record({"evaluation": flag, "save": flag}),
}
_WHOLE: dict[str, Check] = {
    "optimizer": _OPTIMIZER,
    "rng": _one_or_each(_generators),
    "scheduler": maybe(_object),
    "scaler": _object,
    "algorithms": each(_object),
    "drawn": each(whole(0, 2)),
}
_OPTIONAL: dict[str, Check] = {
    "only_model": flag,
    "parts": each(table(_anything)),
    "frozen": table(text),
    "for_best": flag,
    "optimizers": table(maybe(_OPTIMIZER)),
    "order": _pattern("drawn|keyed", "'drawn' or 'keyed'"),
    "identity": maybe(
        record(
            {
                "python": text,
                "data": table(table(maybe(record({"size": whole(), "samples": table(table(text))})))),
                "code": table(table(text)),
            }
        )
    ),
    "clock": record({"began_at": number(0), "seconds": table(number(0))}),
    "scored": each(_steps, 2),
    "stream": maybe(
        _all_of(
            record(
                {"epoch": _steps, "position": whole(), "state": _anything, "has_ended": flag},
                {"batches": whole(), "workers": whole()},
                False,
            ),
            tagged,
        )
    ),
    "record": maybe(
        record(
            {},
            {
                "started_at": _date,
                "step": whole(),
                "resumed_from": maybe(text),
                "command": each(text),
                "script": maybe(table(maybe(text))),
                "git": maybe(record({"commit": text}, {"branch": maybe(text), "clean": flag})),
                "packages": table(text),
                "platform": text,
                "processes": whole(1),
                "hosts": table(table(whole(1))),
                "environment": table(text),
            },
        )
    ),
    "world_size": whole(1),
    "versions": table(text),
    "saved_at": _date,
}


def validate(content: Mapping[str, Any], where: str, complete: bool = True) -> None:
    """Refuse the content of an omnitrain.json that no run can have written.

    Args:
        content: The content.
        where: The name of the checkpoint in errors.
        complete: Whether everything that a run needs must be there; otherwise only what is there must be right.

    Raises:
        CheckpointError: It names the key, the value, and what was expected.
    """
    needed = _ALWAYS if content.get("only_model") is True else {**_ALWAYS, **_WHOLE}
    known = {**_ALWAYS, **_WHOLE, **_OPTIONAL}
    try:
        record(needed if complete else {}, known)(dict(content), "")
    except ValueError as error:
        raise CheckpointError(
            f"{where} is damaged: 'omnitrain.json' has {error}. Take another checkpoint, or repair this one by hand."
        ) from None
