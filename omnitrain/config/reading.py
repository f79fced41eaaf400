"""YAML files as trees of plain values with their file and line.

Files are read, merged and overridden here, and references in them are resolved. `parts.py` builds objects from the
values. Nothing is imported here.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnitrain.config.yaml_writer import FromEnvironment, loader
from omnitrain.core.errors import ConfigError, MissingExtraError, did_you_mean

Key = tuple[str | int, ...]
"""The path to a value: names of mappings and positions in lists."""

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_POSITION = re.compile(r"[0-9]{1,9}")
# The keys of a mapping that stands for an object.
PART_KEYS = ("class_path", "init_args", "import_path")
# Values in one file, and after its references are resolved; more of them are aliases or references that multiply.
_MAX_VALUES = 100_000
# Characters of a text with references.
_MAX_TEXT = 1_000_000
# Nested values, and chained references.
_MAX_DEPTH = 100


def has_part_keys(value: Any) -> bool:
    """Return whether a value is a mapping that stands for an object.

    >>> has_part_keys({"class_path": "my.Net"}), has_part_keys({"lr": 0.1})
    (True, False)
    """
    return isinstance(value, Mapping) and not value.keys().isdisjoint(PART_KEYS)


class _Missing:
    """No value."""


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """The location of a value: a file and line, or an option of the command line."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(slots=True)
class Tree:
    """Values by name, and the place of each."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, SourceLocation] = field(default_factory=dict)

    def place(self, key: Key) -> SourceLocation:
        """Return the place of a value, or of the closest one around it."""
        for end in range(len(key), -1, -1):
            if key[:end] in self.places:
                return self.places[key[:end]]
        return SourceLocation("the configuration")

    def error(self, key: Key, message: str) -> ConfigError:
        """Return the error for a value, with its place."""
        return ConfigError(f"{self.place(key)}: {message}")

    def get(self, key: Key, default: Any = None) -> Any:
        """Return the value at a key."""
        value: Any = self.values
        for number, part in enumerate(key):
            if isinstance(value, Mapping) and "class_path" in value and number > 1 and part not in PART_KEYS:
                value = value.get("init_args", {})
            child: Any = _Missing
            if isinstance(value, Mapping):
                child = value.get(part, _Missing)
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                child = value[part]
            if child is _Missing:
                return default
            value = child
        return value

    def merge(self, other: Tree) -> None:
        """Merge another tree into this one: mappings are joined, anything else is replaced.

        An object that gets another class loses the arguments of the old one, which the new class may not take.
        """
        self.values = _merge(self.values, other.values)
        self.places |= other.places

    def override(self, word: str, text: str | None, place: SourceLocation) -> None:
        """Set one value from the command line, such as `trainer.callbacks.0.patience`.

        Args:
            word: The names and positions with dots between them.
            text: The value, as in a file; None removes the key.
            place: Its location.

        Raises:
            ConfigError: If there is no such position in a list, nothing to remove, or the text is no value.
                The first entry of a list that is not there has position 0.
        """
        value = None if text is None else parse_value(text, place)
        self.put(word, value, place, removes=text is None)

    def put(self, word: str, value: Any, place: SourceLocation, removes: bool = False) -> None:
        """Set one value, or remove it; as `override`, with the value itself."""
        key: Key = ()
        inside: Any = self.values
        parts = word.split(".")
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            if isinstance(inside, dict) and "class_path" in inside and number > 1 and part not in PART_KEYS:
                inside, key = inside.setdefault("init_args", {}), (*key, "init_args")
            index = self._position(inside, part, word, place) if isinstance(inside, list) else _find_key(inside, part)
            key = (*key, index)
            if not is_last:
                inside = self._descend(inside, index, parts[number + 1], word, place)
                continue
            if removes:
                self._remove(inside, index, word, place)
                continue
            if key == ("trainer",) and isinstance(value, str):  # such as `--trainer AccelerateTrainer`
                inside, index, key = self.values.setdefault("trainer", {}), "class_path", ("trainer", "class_path")
            self.places = {path: origin for path, origin in self.places.items() if path[: len(key)] != key}
            _set_item(inside, index, value)
            self.places[key] = place

    @staticmethod
    def _descend(inside: Any, index: Any, part: str, word: str, place: SourceLocation) -> Any:
        """Return the child of a value; a name becomes the name of a class.

        A missing child becomes a list if the next part of the word is position 0, and else a mapping.
        """
        if isinstance(inside, dict) and inside.get(index) is None and _POSITION.fullmatch(part):
            if int(part):
                raise ConfigError(
                    f"{place}: {word!r} goes into a list that is not there, where {part!r} is no position. The first "
                    "entry is 0."
                )
            inside[index] = []
        elif isinstance(inside, dict) and not isinstance(inside.get(index), (dict, list)):
            is_name = isinstance(inside.get(index), str)
            inside[index] = {"class_path": inside[index]} if is_name else {}
        elif isinstance(inside, list) and index == len(inside):
            inside.append({})
        return inside[index]

    @staticmethod
    def _remove(inside: Any, index: Any, word: str, place: SourceLocation) -> None:
        if isinstance(inside, dict) and index not in inside:
            near = did_you_mean(str(index), [str(name) for name in inside])
            raise ConfigError(f"{place}: there is no {word!r} to remove.{near}")
        if isinstance(inside, list) and index >= len(inside):
            raise ConfigError(f"{place}: there is no {word!r} to remove: the list has {len(inside)} entries.")
        del inside[index]

    @staticmethod
    def _position(values: list[Any], part: str, word: str, place: SourceLocation) -> int:
        if not _POSITION.fullmatch(part) or int(part) > len(values):
            raise ConfigError(
                f"{place}: {word!r} goes into a list of {len(values)}, where {part!r} is no position. Those there are "
                f"0 to {len(values)}, the last of which adds one."
            )
        return int(part)

    def resolve(self) -> None:
        """Replace references, `${trainer.seed}` and `${env:HOME}`, by what they refer to.

        Raises:
            ConfigError: If one refers to nothing, or to itself.
        """
        self.values = self._resolve_value(self.values, (), (), itertools.count())

    def _resolve_value(self, value: Any, key: Key, chain: tuple[str, ...], counter: Iterator[int]) -> Any:
        if next(counter) > _MAX_VALUES or len(chain) > _MAX_DEPTH:
            raise self.error(key, "references lead to too many values. Write the values out.")
        if isinstance(value, dict):
            return {name: self._resolve_value(entry, (*key, name), chain, counter) for name, entry in value.items()}
        if isinstance(value, list):
            return [self._resolve_value(entry, (*key, number), chain, counter) for number, entry in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        match = _REFERENCE.fullmatch(value)
        if match:
            return self._look_up(match[1].strip(), key, chain, counter)
        parts = [self._look_up(name.strip(), key, chain, counter) for name in _REFERENCE.findall(value)]
        if sum(len(str(part)) for part in parts) > _MAX_TEXT:
            raise self.error(key, f"references make a text of more than {_MAX_TEXT:,} characters. Write it out.")
        values, references = iter(parts), iter(parts)
        text = _REFERENCE.sub(lambda _: str(next(values)), value)
        if not any(isinstance(part, FromEnvironment) for part in parts):
            return text
        return FromEnvironment(text, _REFERENCE.sub(lambda _: _to_reference(next(references)), value))

    def _look_up(self, name: str, key: Key, chain: tuple[str, ...], counter: Iterator[int]) -> Any:
        if name in chain:
            circle = " -> ".join((*chain[chain.index(name) :], name))
            raise self.error(key, f"the reference {circle} leads back to itself. Write the value out in one of them.")
        if name.startswith("env:"):
            variable, has_default, default = name.removeprefix("env:").partition(",")
            if variable not in os.environ and not has_default:
                raise self.error(
                    key, f"the environment has no variable {variable!r}. Set it, or write ${{env:{variable},default}}."
                )
            parsed = parse_value(os.environ.get(variable, default), self.place(key))
            return FromEnvironment(parsed, f"${{{name}}}") if isinstance(parsed, str) else parsed
        target: Key = tuple(int(part) if _POSITION.fullmatch(part) else part for part in name.split("."))
        missing = object()
        value = self.get(target, missing)
        if value is missing:
            names = [dotted_name(path) for path in self.iter_keys()]
            raise self.error(key, f"${{{name}}} refers to nothing.{did_you_mean(name, names)}")
        return self._resolve_value(value, target, (*chain, name), counter)

    def iter_keys(self) -> Iterator[Key]:
        """Yield the key of every value, those of mappings and lists too."""
        yield from _keys(self.values, ())


def _to_reference(value: Any) -> str:
    return value.reference if isinstance(value, FromEnvironment) else str(value)


def dotted_name(key: Key) -> str:
    """Return a key as on the command line.

    >>> dotted_name(("trainer", "callbacks", 0, "patience"))
    'trainer.callbacks.0.patience'
    """
    return ".".join(map(str, key))


def read(path: str | Path) -> Tree:
    """Read a YAML file.

    Numbers are those of YAML 1.2 (`1e-4` is one), and only `true` and `false` are truth values; dates stay text.

    Raises:
        ConfigError: With file and line, if it is missing, empty, no YAML, no mapping, or has a key twice.
        MissingExtraError: If PyYAML is not installed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as a configuration: {error}.") from error
    return _parse(text, str(path))


def parse_value(text: str, place: SourceLocation) -> Any:
    """Return the value of a text of YAML, such as that of an option of the command line.

    >>> place = SourceLocation("doctest")
    >>> [parse_value(text, place) for text in ("1e-4", "2h", "null", "[1, a]", "off")]
    [0.0001, '2h', None, [1, 'a'], 'off']
    """
    if not text.strip():
        return text
    try:
        return _parse(f"value: {text}\n", str(place)).values["value"]
    except ConfigError:
        if text[:1] in "[{":
            raise
        return text  # such as "a: b", which is no value in one line


def _parse(text: str, source: str) -> Tree:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("A configuration file", "pyyaml", "config") from error
    try:
        node = yaml.compose(text, loader())
    except RecursionError as error:
        raise ConfigError(f"{source}: {_TOO_DEEP}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = SourceLocation(source, mark.line + 1 if mark else 1)
        what = getattr(error, "problem", None) or str(error)
        tab = " Indent with spaces: YAML allows no tabs." if "\\t" in what else ""
        raise ConfigError(f"{place}: this is not YAML: {what}.{tab}") from error
    if node is None:
        raise ConfigError(f"{source}: the file is empty. It needs at least `trainer:` and its arguments.")
    tree = Tree()
    values = _NodeReader(source, tree.places).value(node, ())
    if not isinstance(values, dict):
        raise tree.error((), f"expected names with values, got {values!r}.")
    tree.values = values
    return tree


_MERGE = "tag:yaml.org,2002:merge"
_TOO_DEEP = f"brackets or indentation are nested too deep. At most {_MAX_DEPTH} values can be inside of one another."


class _NodeReader:
    """Converts nodes of PyYAML into values, and records their places."""

    def __init__(self, source: str, places: dict[Key, SourceLocation]) -> None:
        self._source, self._places = source, places
        self._open: list[Any] = []
        # The entries of the mappings read so far; None while one is read.
        self._entries_by_node: dict[int, dict[Any, tuple[Any, Any]] | None] = {}

    def value(self, node: Any, key: Key) -> Any:
        """Return the value of a node."""
        place = self._place(node)
        self._places.setdefault(key, place)
        if len(key) > _MAX_DEPTH:
            raise ConfigError(f"{place}: {_TOO_DEEP}")
        if len(self._places) > _MAX_VALUES or any(node is open_node for open_node in self._open):
            raise ConfigError(f"{place}: an alias (*name) contains itself, or too many. Write the values out.")
        if node.id != "scalar" and node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            raise _unknown_tag(node, place)
        self._open.append(node)
        try:
            if node.id == "mapping":
                return self._mapping(node, key)
            if node.id == "sequence":
                return [self.value(entry, (*key, number)) for number, entry in enumerate(node.value)]
            return self._scalar(node, place)
        finally:
            self._open.pop()

    def _mapping(self, node: Any, key: Key) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for name, (name_node, value_node) in self._entries(node).items():
            self._places[*key, name] = self._place(name_node)
            values[name] = self.value(value_node, (*key, name))
        return values

    def _entries(self, node: Any) -> dict[Any, tuple[Any, Any]]:
        """Return the nodes of a mapping by name, with those that `<<` merges below its own."""
        if id(node) in self._entries_by_node:
            entries = self._entries_by_node[id(node)]
            if entries is None:
                raise ConfigError(f"{self._place(node)}: a mapping merges itself (<<). Write the values out.")
            return entries
        self._entries_by_node[id(node)] = None
        explicit: dict[Any, tuple[Any, Any]] = {}
        merged: dict[Any, tuple[Any, Any]] = {}
        for name_node, value_node in node.value:
            place = self._place(name_node)
            name = self._scalar(name_node, place) if name_node.id == "scalar" else None
            if name is None:
                raise ConfigError(f"{place}: a key must be a name or a number.")
            if name in explicit:
                raise ConfigError(
                    f"{place}: {name!r} is here a second time; the first is in line "
                    f"{self._place(explicit[name][0]).line}. Leave one out."
                )
            explicit[name] = name_node, value_node
            if name_node.tag == _MERGE:
                for source in value_node.value if value_node.id == "sequence" else [value_node]:
                    if source.id != "mapping":
                        raise ConfigError(f"{self._place(value_node)}: `<<` takes a mapping, or a list of mappings.")
                    merged = self._entries(source) | merged
        entries = merged | {name: pair for name, pair in explicit.items() if pair[0].tag != _MERGE}
        self._entries_by_node[id(node)] = entries
        return entries

    def _place(self, node: Any) -> SourceLocation:
        return SourceLocation(self._source, node.start_mark.line + 1)

    def _scalar(self, node: Any, place: SourceLocation) -> Any:
        text, kind = node.value, node.tag.removeprefix("tag:yaml.org,2002:")
        if kind in ("str", "merge"):
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int":
            digits = text.replace("_", "")
            if len(digits) > 20 or abs(int(digits)) >= 2**64:
                raise ConfigError(f"{place}: {digits[:20]}... is too large: integers have at most 64 bits.")
            return int(digits)
        if kind == "float":
            return float(re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", text.lower()).replace("_", ""))
        raise _unknown_tag(node, place)


def _unknown_tag(node: Any, place: SourceLocation) -> ConfigError:
    return ConfigError(f"{place}: the tag {node.tag!r} is not known. Only plain values are read.")


def _merge(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    if "class_path" in above and above["class_path"] != below.get("class_path", above["class_path"]):
        below = {name: value for name, value in below.items() if name != "init_args"}
    return below | {name: _merge(below.get(name), value) for name, value in above.items()}


def _find_key(inside: Any, part: str) -> Any:
    """Return the key of a mapping with this spelling; it may be a number."""
    return next((name for name in inside if str(name) == part), part) if isinstance(inside, dict) else part


def _set_item(inside: Any, index: Any, value: Any) -> None:
    if isinstance(inside, list) and index == len(inside):
        inside.append(value)
    else:
        inside[index] = value


def _keys(value: Any, key: Key) -> Iterator[Key]:
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, Sequence) and not isinstance(value, str):
        items = enumerate(value)
    for name, entry in items:
        yield (*key, name)
        yield from _keys(entry, (*key, name))
