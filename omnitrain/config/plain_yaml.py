"""YAML with the plain values of version 1.2.

`1e-4` is a number, and only `true` and `false` are booleans. PyYAML, which is imported on first use, implements
version 1.1, in which `on` is true, `1:30` is 90 and `1e-4` a string.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

# The placeholder in a file for an unknown value; the file is rejected until it is replaced.
MISSING = "???"

_EXPONENT = r"(?:[eE][-+]?\d+)"
# The texts of each kind of plain value, and with what they begin.
_VALUES = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": (r"~|null|Null|NULL|", "~nN"),
    "int": (r"[-+]?(?:0|[1-9]\d*(?:_\d+)*)", "-+0123456789"),
    "float": (
        rf"[-+]?(?:\d[\d_]*\.\d*{_EXPONENT}?|\.\d+{_EXPONENT}?|\d[\d_]*{_EXPONENT}|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": (r"<<", "<"),
}


class FromEnvironment(str):
    """A text that holds values of environment variables, and is written as the references to them.

    Args:
        value: The text.
        reference: What the configuration has in its place, such as "${env:HF_TOKEN}".
    """

    __slots__ = ("reference",)

    def __new__(cls, value: str, reference: str) -> FromEnvironment:
        """Return the text, which remembers the reference."""
        text = super().__new__(cls, value)
        text.reference = reference
        return text

    def __reduce__(self) -> Any:
        """Pickle it as plain text."""
        return str, (str(self),)


def _with_plain_values(base: type, resolvers: dict[str, Any]) -> Any:
    """Return a class of PyYAML's that resolves plain values so, besides those of `resolvers`."""
    kind: Any = type(
        base.__name__, (base,), {"yaml_implicit_resolvers": {key: [*some] for key, some in resolvers.items()}}
    )
    for name, (pattern, first) in _VALUES.items():
        letters = [*first, ""] if name == "null" else [*first]
        kind.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(rf"^(?:{pattern})$"), letters)
    return kind


@functools.cache
def loader() -> Any:
    """Return PyYAML's safe loader with these values."""
    import yaml

    return _with_plain_values(yaml.SafeLoader, {})


@functools.cache
def _dumper() -> Any:
    """Return PyYAML's safe dumper, which puts into quotes what either version takes for something else than a text."""
    import yaml

    dumper = _with_plain_values(yaml.SafeDumper, yaml.SafeDumper.yaml_implicit_resolvers)
    dumper.add_representer(FromEnvironment, lambda kind, value: kind.represent_str(value.reference))
    return dumper


def write(values: Mapping[str, Any]) -> str:
    """Return the text of a file with these values, which is read as the same ones; references stay references.

    >>> print(write({"rate": 1e-5, "text": "1e-5", "strategy": "no"}), end="")
    rate: 1.0e-05
    text: '1e-5'
    strategy: 'no'
    """
    import yaml

    return yaml.dump(dict(values), Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=120)
