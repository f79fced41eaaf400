"""Schema of omnitrain.json.

Types and ranges are checked before any value is used: anyone can write a file with a correct hash. `manifest.py` checks
the keys of the store, `contents.py` whether a checkpoint fits the run. No torch.
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
"""Takes a value and its path in the file; raises a ValueError if it is invalid."""

LARGEST = 2**63 - 1
# How deeply lists and dicts may be nested; those of a run are about ten levels deep.
DEPTH = 100


def check_limits(content: Any) -> None:
    """Reject values nested too deeply for recursion, and numbers beyond 64 bits."""
    waiting = [(content, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > DEPTH:
            raise ValueError(f"more than {DEPTH} nested lists and objects")
        if isinstance(value, dict):
            waiting += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            waiting += [(inner, depth + 1) for inner in value]
        elif isinstance(value, int) and abs(value) >= 2**64:
            raise ValueError(f"a number of {value.bit_length()} bits")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a parsed JSON object; a key that is in it twice is an error, as the last one would win silently."""
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise ValueError("the same key twice in an object")
    return parsed


def _wrong(value: Any, where: str, expected: str) -> ValueError:
    return ValueError(f"{where} = {reprlib.repr(value)}, where {expected} was expected")


def _inner(where: str, key: Any) -> str:
    return f"{where}.{key}" if isinstance(key, str) and key.isidentifier() else f"{where}[{reprlib.repr(key)}]"


# --- plain values


def integer(least: int = 0, most: int = LARGEST) -> Check:
    """Return a check for ints in a range."""

    def check(value: Any, where: str) -> None:
        if type(value) is not int or not least <= value <= most:
            raise _wrong(value, where, f"a whole number from {least} to {most}")

    return check


def number(least: float = -math.inf, allow_nonfinite: bool = False) -> Check:
    """Return a check for numbers; NaN and infinities may also be tagged strings, as in `{"__float__": "nan"}`."""

    def check(value: Any, where: str) -> None:
        plain: Any = value
        if allow_nonfinite and isinstance(value, dict) and value.keys() == {"__float__"}:
            plain = _NONFINITE.get(str(value["__float__"]), "")
        is_number = isinstance(plain, (int, float)) and not isinstance(plain, bool)
        if not is_number or (not allow_nonfinite and not (math.isfinite(plain) and plain >= least)):
            bound = "" if least == -math.inf else f" of at least {least:g}"
            raise _wrong(value, where, f"a number{bound}" if allow_nonfinite else f"a finite number{bound}")

    return check


_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def boolean(value: Any, where: str) -> None:
    """Accept True and False."""
    if not isinstance(value, bool):
        raise _wrong(value, where, "true or false")


def string(value: Any, where: str) -> None:
    """Accept strings."""
    if not isinstance(value, str):
        raise _wrong(value, where, "text")


def _pattern(form: str, expected: str) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or not re.fullmatch(form, value, re.ASCII):
            raise _wrong(value, where, expected)

    return check


def _date(value: Any, where: str) -> None:
    try:
        datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise _wrong(value, where, "a date as ISO 8601 has it") from None


# --- composed checks


def nullable(check: Check) -> Check:
    """Return a check that also accepts None."""
    return lambda value, where: None if value is None else check(value, where)


def list_of(check: Check, count: int | None = None) -> Check:
    """Return a check for lists, applied to every entry."""

    def check_all(value: Any, where: str) -> None:
        if not isinstance(value, list) or count not in (None, len(value)):
            raise _wrong(value, where, "a list" if count is None else f"a list of {count}")
        for index, inner in enumerate(value):
            check(inner, f"{where}[{index}]")

    return check_all


def _row(*checks: Check) -> Check:
    def check_all(value: Any, where: str) -> None:
        list_of(_anything, len(checks))(value, where)
        for index, (check, inner) in enumerate(zip(checks, value, strict=True)):
            check(inner, f"{where}[{index}]")

    return check_all


def dict_of(check: Check) -> Check:
    """Return a check for objects with any keys, applied to every value."""

    def check_all(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        for key, inner in value.items():
            check(inner, _inner(where, key))

    return check_all


def record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None, open: bool = True) -> Check:
    """Return a check for objects with these keys; if `open`, other keys are accepted too."""
    known = {**required, **(optional or {})}

    def check_all(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        for key, inner in value.items():
            if key in known:
                known[key](inner, _inner(where, key).lstrip("."))
            elif not open:
                raise ValueError(f"the unknown key {_inner(where, key)}")
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
    """Accept the result of `state_dicts.to_json`, with a valid value under each of its tags."""
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
        raise _wrong(value, where, f"an object with only one of {', '.join(_TAGS)}")
    _TAGS[tag](content, _inner(where, tag))


def _key(value: Any, where: str) -> None:
    if isinstance(value, dict) and value.keys() == {"__tuple__"} and isinstance(value["__tuple__"], list):
        list_of(_key)(value["__tuple__"], where)
    elif isinstance(value, (dict, list)) and not any(value == {"__float__": name} for name in _NONFINITE):
        raise _wrong(value, where, "the key of a dict")


def _pairs(check: Check) -> Check:
    def check_all(value: Any, where: str) -> None:
        list_of(_anything, 2)(value, where)
        _key(value[0], where)
        check(value[1], where)

    return list_of(check_all)


def _object(value: Any, where: str) -> None:
    """Accept the result of `state_dicts.to_json` for a dict."""
    if not isinstance(value, dict) or any(key.startswith("__") and key != "__dict__" for key in value):
        raise _wrong(value, where, "an object")
    tagged(value, where)


_TAGS: dict[str, Check] = {
    "__tensor__": string,
    "__float__": _pattern("nan|inf|-inf", "nan, inf or -inf"),
    "__tuple__": list_of(tagged),
    "__counter__": _pairs(_number_or_text),
    "__dict__": _pairs(tagged),
}

# --- the content of omnitrain.json


def _counter(default: Any) -> Check:
    return number(0) if isinstance(default, float) else integer() if isinstance(default, int) else nullable(integer())


_steps = integer(-1)


def row(value: Any, where: str) -> None:
    """Accept a row of the history: numbers and text by name."""
    dict_of(_number_or_text)(value, where)


_float = number(allow_nonfinite=True)
_options = nullable(dict_of(_anything))
_sums = record({"sum": _float, "weight": number(), "marked": list_of(_float, 2)})
_generators = record(
    {"python": record({"version": integer(3, 3), "gauss": nullable(number())})},
    {"numpy": record({"pos": integer(0, 624), "has_gauss": integer(0, 1), "gauss": number()})},
)
_LOSS_MEAN_FIELDS = {
    **dict.fromkeys(("shift", "counts_labels", "is_sum", "is_mean", "is_shift_known"), boolean),
    "ignore_index": integer(-LARGEST),
}
_LOSS_MEAN = record({}, {**_LOSS_MEAN_FIELDS, "tasks": dict_of(record({}, _LOSS_MEAN_FIELDS, open=False))}, open=False)
_LOOP = record(
    {
        "loss": list_of(_sums),
        "grad_norm": nullable(_float),
        "learning_rates": list_of(number()),
        "loss_mean": _LOSS_MEAN,
        "logged": _row(integer(), number(0), integer(), integer()),
    },
    {
        "microbatch_size": nullable(integer(1)),
        "metrics": list_of(list_of(_row(string, _float, _float, number(), number()))),
    },
)

_OPTIMIZER = record(
    {
        "groups": list_of(_all_of(record({"params": list_of(string)}), tagged)),
        "rest": dict_of(_object),
        "shared": _object,
    }
)

_REQUIRED: dict[str, Check] = {
    "extra_state": _all_of(dict_of(_anything), tagged),
    "settings": record(
        {
            "seed": integer(0, 2**64),
            "total_steps": nullable(integer()),
            "optimizer_groups": nullable(list_of(dict_of(_anything))),
        },
        {
            "optimizer_groups": nullable(list_of(record({}, {"lr": number()}))),
            "lr_scheduler_options": _options,
            "algorithm_options": _options,
            "callback_options": _options,
        },
    ),
    "progress": record(
        {"epoch": integer(), "step": integer()},
        {field.name: _counter(None if field.default is MISSING else field.default) for field in fields(Progress)},
        open=False,
    ),
    "objective": record(
        {
            "metric": string,
            "direction": _pattern("min|max", "'min' or 'max'"),
            "best": nullable(number()),
            "best_step": nullable(_steps),
            "latest": nullable(number()),
            "evaluations_without_gain": integer(),
            "reference": nullable(number()),
        }
    ),
    "metrics": record(
        {
            "best_valid": dict_of(_number_or_text),
            "rows": record({}, {name: integer() for name in TABLES}, open=False),
        },
        {
            "best_step": _steps,
            "best_checkpoint": _pattern(r"checkpoint-[0-9]{1,19}", "the name of a checkpoint"),
            "stop_reason": string,
        },
        open=False,
    ),
    "evaluated_step": _steps,
    "credited_step": _steps,
    "callbacks": list_of(record({"callback": string, "state": _object}, {"turn": integer()})),
    "loop": _LOOP,
    "owes": record({"evaluation": boolean, "save": boolean}),
    "only_model": boolean,
    "frozen": dict_of(string),
    "for_best": boolean,
    "scored": list_of(_steps, 2),
    "clock": record({"began_at": number(0), "seconds": dict_of(number(0))}),
    "identity": record(
        {
            "python": string,
            "data": dict_of(dict_of(nullable(record({"size": integer(), "samples": dict_of(dict_of(string))})))),
            "code": dict_of(dict_of(string)),
        }
    ),
}
_FULL_RUN: dict[str, Check] = {
    "optimizer": _OPTIMIZER,
    "rng": list_of(_generators),
    "scheduler": nullable(_object),
    "scaler": _object,
    "algorithms": list_of(_object),
    "drawn": list_of(integer(0, 2)),
    "optimizers": dict_of(nullable(_OPTIMIZER)),
    "order": _pattern("drawn|keyed", "'drawn' or 'keyed'"),
    "stream": nullable(
        _all_of(
            record(
                {"epoch": _steps, "position": integer(), "state": _anything, "has_ended": boolean},
                {"batches": integer(), "workers": integer()},
                False,
            ),
            tagged,
        )
    ),
}
_OPTIONAL: dict[str, Check] = {
    "parts": list_of(dict_of(_anything)),
    "record": nullable(
        record(
            {},
            {
                "started_at": _date,
                "step": integer(),
                "resumed_from": nullable(string),
                "command": list_of(string),
                "script": nullable(dict_of(nullable(string))),
                "git": nullable(record({"commit": string}, {"branch": nullable(string), "clean": boolean})),
                "packages": dict_of(string),
                "platform": string,
                "processes": integer(1),
                "hosts": dict_of(dict_of(integer(1))),
                "environment": dict_of(string),
            },
        )
    ),
    "world_size": integer(1),
    "versions": dict_of(string),
    "saved_at": _date,
}


def validate(content: Mapping[str, Any], where: str, complete: bool = True) -> None:
    """Reject the content of an omnitrain.json that no run can have written.

    Args:
        content: The content.
        where: The name of the checkpoint in errors.
        complete: Whether all keys that a run needs are required; otherwise only the existing ones are checked.

    Raises:
        CheckpointError: The content is invalid.
    """
    needed = _REQUIRED if content.get("only_model") is True else {**_REQUIRED, **_FULL_RUN}
    known = {**_REQUIRED, **_FULL_RUN, **_OPTIONAL}
    try:
        record(needed if complete else {}, known)(dict(content), "")
    except ValueError as error:
        raise CheckpointError(
            f"{where} is damaged: 'omnitrain.json' has {error}. Use another checkpoint, or repair this one by hand."
        ) from None
