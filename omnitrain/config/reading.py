"""YAML files as trees of plain values with their file and line.

Files are read, merged and overridden here, and references in them are resolved. `parts.py` builds objects from the
values; the classes that files refer to are not imported here.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnitrain.config.plain_yaml import FromEnvironment, loader
from omnitrain.core.errors import ConfigError, MissingExtraError, did_you_mean

Key = tuple[str | int, ...]
"""The path to a value: names of mappings and positions in lists."""

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_POSITION = re.compile(r"[0-9]{1,9}")
# Keys that only a mapping that describes an object has.
PART_KEYS = ("class_path", "init_args", "import_path")
# Values in one file, and after its references are resolved; a file with more has aliases or references that multiply.
_MAX_VALUES = 100_000
# Characters of a text after its references are resolved.
_MAX_TEXT = 1_000_000
# Levels of nested values, and of references to references.
_MAX_DEPTH = 100
_TOO_DEEP = (
    f"brackets or indentation are nested too deep, or an alias (*name) contains itself. At most {_MAX_DEPTH} values "
    "can be inside of one another."
)
_MERGE, _TEXT = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"
_SCALARS = ("str", "null", "bool", "int", "float")
_MISSING = object()


def has_part_keys(value: Any) -> bool:
    """Return whether a value is a mapping that describes an object."""
    return isinstance(value, Mapping) and not value.keys().isdisjoint(PART_KEYS)


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """The location of a value: a file and line, or an option of the command line."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(slots=True)
class Tree:
    """The values of configuration files by name, and the location of each."""

    values: dict[str, Any] = field(default_factory=dict)
    locations: dict[Key, SourceLocation] = field(default_factory=dict)

    def location(self, key: Key) -> SourceLocation:
        """Return the location of a value, or of the closest one around it."""
        for end in range(len(key), -1, -1):
            if key[:end] in self.locations:
                return self.locations[key[:end]]
        return SourceLocation("the configuration")

    def error(self, key: Key, message: str) -> ConfigError:
        """Return the error for a value, with its location."""
        return ConfigError(f"{self.location(key)}: {message}")

    def get(self, key: Key, default: Any = None) -> Any:
        """Return the value at a key, in which `init_args` may be left out."""
        value: Any = self.values
        for depth, segment in enumerate(key):
            if isinstance(value, Mapping) and _is_init_arg(value, depth, segment):
                value = value.get("init_args", {})
            child: Any = _MISSING
            if isinstance(value, Mapping):
                child = value.get(segment, _MISSING)
            elif isinstance(value, list) and isinstance(segment, int) and segment < len(value):
                child = value[segment]
            if child is _MISSING:
                return default
            value = child
        return value

    def merge(self, other: Tree) -> None:
        """Merge another tree into this one: mappings are joined, anything else is replaced.

        An object that gets another class loses the arguments for the old one, which the new class may not accept.
        """
        self.values = _merge(self.values, other.values)
        self.locations |= other.locations

    def override(self, path: str, text: str | None, location: SourceLocation) -> None:
        """Set one value from the command line, such as `trainer.callbacks.0.patience`; the text None removes it.

        In the path, `init_args` may be left out, and position 0 creates a list.
        """
        self.put(path, _MISSING if text is None else parse_value(text, location), location)

    def put(self, path: str, value: Any, location: SourceLocation) -> None:
        """Set one value; like `override`, with the parsed value."""
        if path == "trainer" and isinstance(value, str):  # such as `--trainer AccelerateTrainer`
            path = "trainer.class_path"
        key: list[str | int] = []

        def changed(current: Any, segments: list[str]) -> Any:
            """Return a value with one inside of it set, and extend `key` by the way to that."""
            if not segments:
                return value
            segment, *rest = segments
            is_removed = value is _MISSING and not rest
            if isinstance(current, str):
                current = {"class_path": current}
            if current is None and segment.isdigit() and key:
                current = []
            if isinstance(current, list):
                is_position = _POSITION.fullmatch(segment) is not None
                if is_removed and is_position and int(segment) >= len(current):
                    raise ConfigError(
                        f"{location}: there is no {path!r} to remove: the list has {len(current)} entries."
                    )
                if not is_position or int(segment) > len(current):
                    raise ConfigError(
                        f"{location}: {path!r} goes into a list of {len(current)}, where {segment!r} is not a position."
                        f" Pass a number from 0 to {len(current)}; the last one appends an entry."
                    )
                key.append(position := int(segment))
                before = current[position] if position < len(current) else {} if rest else None
                entry = [] if is_removed else [changed(before, rest)]
                return [*current[:position], *entry, *current[position + 1 :]]
            entries = dict(current) if isinstance(current, dict) else {}
            if _is_init_arg(entries, len(key), segment):
                key.append("init_args")
                return entries | {"init_args": changed(entries.get("init_args") or {}, segments)}
            key.append(name := next((name for name in entries if str(name) == segment), segment))  # may be a number
            if is_removed and name not in entries:
                near = did_you_mean(segment, [str(name) for name in entries])
                raise ConfigError(f"{location}: there is no {path!r} to remove.{near}")
            if is_removed:
                return {other: entry for other, entry in entries.items() if other != name}
            return entries | {name: changed(entries.get(name), rest)}

        self.values = changed(self.values, path.split("."))
        if value is not _MISSING:
            target = tuple(key)
            self.locations = {place: line for place, line in self.locations.items() if place[: len(key)] != target}
            self.locations[target] = location

    def resolve(self, keep: tuple[str, ...] = ()) -> None:
        """Replace references, such as `${trainer.seed}` and `${env:HOME}`, by the values that they refer to.

        References whose names begin with one of `keep` are left unchanged.
        """
        counter = itertools.count()

        def resolve_value(value: Any, key: Key, chain: tuple[str, ...]) -> Any:
            if next(counter) > _MAX_VALUES or len(chain) > _MAX_DEPTH:
                raise self.error(key, "references lead to too many values. Write the values out.")
            if isinstance(value, dict):
                return {name: resolve_value(entry, (*key, name), chain) for name, entry in value.items()}
            if isinstance(value, list):
                return [resolve_value(entry, (*key, number), chain) for number, entry in enumerate(value)]
            if not isinstance(value, str) or "${" not in value:
                return value
            match = _REFERENCE.fullmatch(value)
            if match:
                return look_up(match[1].strip(), key, chain)
            parts = [look_up(name.strip(), key, chain) for name in _REFERENCE.findall(value)]
            if sum(len(str(part)) for part in parts) > _MAX_TEXT:
                raise self.error(key, f"references make a text of more than {_MAX_TEXT:,} characters. Write it out.")
            values = iter(parts)
            references = iter(part.reference if isinstance(part, FromEnvironment) else str(part) for part in parts)
            text = _REFERENCE.sub(lambda _: str(next(values)), value)
            if not any(isinstance(part, FromEnvironment) for part in parts):
                return text
            return FromEnvironment(text, _REFERENCE.sub(lambda _: next(references), value))

        def look_up(name: str, key: Key, chain: tuple[str, ...]) -> Any:
            if name.startswith(keep):
                return f"${{{name}}}"
            if name in chain:
                cycle = " -> ".join((*chain[chain.index(name) :], name))
                raise self.error(
                    key, f"the reference {cycle} leads back to itself. Write the value out in one of them."
                )
            if name.startswith("env:"):
                variable, has_default, default = name.removeprefix("env:").partition(",")
                if variable not in os.environ and not has_default:
                    message = (
                        f"the environment has no variable {variable!r}. Set it, or write ${{env:{variable},default}}."
                    )
                    raise self.error(key, message)
                parsed = parse_value(os.environ.get(variable, default), self.location(key))
                return FromEnvironment(parsed, f"${{{name}}}") if isinstance(parsed, str) else parsed
            target: Key = tuple(int(part) if _POSITION.fullmatch(part) else part for part in name.split("."))
            value = self.get(target, _MISSING)
            if value is _MISSING:
                names = [dotted_name(path) for path in self.iter_keys()]
                raise self.error(key, f"${{{name}}} refers to nothing.{did_you_mean(name, names)}")
            return resolve_value(value, target, (*chain, name))

        self.values = resolve_value(self.values, (), ())

    def iter_keys(self) -> Iterator[Key]:
        """Yield the key of every value, including mappings and lists."""
        yield from _iter_keys(self.values, ())


def dotted_name(key: Key) -> str:
    """Return a key as it is written on the command line."""
    return ".".join(map(str, key))


def read(path: str | Path) -> Tree:
    """Read a YAML file; errors have its name and the line.

    Numbers are those of YAML 1.2, such as `1e-4`; only `true` and `false` are booleans; dates stay text.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as a configuration: {error}.") from error
    return _parse(text, str(path))


def parse_value(text: str, location: SourceLocation) -> Any:
    """Return the value of a line of YAML, such as the value of a command-line option.

    >>> location = SourceLocation("doctest")
    >>> [parse_value(text, location) for text in ("1e-4", "2h", "null", "[1, a]", "off")]
    [0.0001, '2h', None, [1, 'a'], 'off']
    """
    if not text.strip():
        return text
    try:
        return _parse(f"value: {text}\n", str(location)).values["value"]
    except ConfigError:
        if text[:1] in "[{":
            raise
        return text  # such as "a: b", which is not a value inside of one line


def _parse(text: str, source: str) -> Tree:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("A configuration file", "pyyaml", "config") from error
    tree, counter = Tree(), itertools.count()
    constructor: Any = yaml.constructor.SafeConstructor()

    def locate(node: Any, key: Key, depth: int, overriding: set[Any]) -> None:
        """Record the location of each value in a node of PyYAML; raise ConfigError for what is no plain value.

        The node may be a mapping that `<<` merges into the one at the key, without the names in `overriding`.
        """
        location = SourceLocation(source, node.start_mark.line + 1)
        tree.locations.setdefault(key, location)
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{location}: {_TOO_DEEP}")
        if next(counter) > _MAX_VALUES:
            raise ConfigError(f"{location}: aliases (*name) make too many values. Write the values out.")
        if node.id == "scalar" and node.tag == _MERGE:
            node.tag = _TEXT  # a value, not a key
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind not in {"sequence": ("seq",), "mapping": ("map",)}.get(node.id, _SCALARS):
            raise ConfigError(f"{location}: the tag {node.tag!r} is not known. Only plain values are read.")
        if kind == "int" and (len(node.value) > 25 or abs(int(node.value)) >= 2**64):
            raise ConfigError(f"{location}: {node.value[:20]}... is too large: integers have at most 64 bits.")
        for number, entry in enumerate(node.value if kind == "seq" else ()):
            locate(entry, (*key, number), depth + 1, set())
        lines: dict[Any, int] = {}
        merged: list[Any] = []
        for name_node, value_node in node.value if kind == "map" else ():
            location, is_merge = SourceLocation(source, name_node.start_mark.line + 1), name_node.tag == _MERGE
            name: Any = name_node.value if is_merge else None
            if not is_merge:
                locate(name_node, key, depth + 1, set())
                name = constructor.construct_object(name_node) if name_node.id == "scalar" else None
            if name is None:
                raise ConfigError(f"{location}: a key must be a name or a number.")
            if name in lines:
                message = f"{name!r} is here a second time; the first is in line {lines[name]}. Leave one out."
                raise ConfigError(f"{location}: {message}")
            lines[name] = location.line
            if is_merge:
                merged = value_node.value if value_node.id == "sequence" else [value_node]
                if any(entry.id != "mapping" for entry in merged):
                    raise ConfigError(f"{location}: `<<` takes a mapping, or a list of mappings.")
            elif name not in overriding:
                tree.locations[*key, name] = location
                locate(value_node, (*key, name), depth + 1, set())
        overriding.update(lines)
        for entry in merged:
            locate(entry, key, depth + 1, overriding)

    try:
        node = yaml.compose(text, loader())
        if node is None:
            raise ConfigError(f"{source}: the file is empty. It needs at least `trainer:` and its arguments.")
        locate(node, (), 0, set())
        tree.values = constructor.construct_document(node)
    except RecursionError as error:
        raise ConfigError(f"{source}: {_TOO_DEEP}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        location = SourceLocation(source, mark.line + 1 if mark else 1)
        problem = getattr(error, "problem", None) or str(error)
        remedy = " Indent with spaces: YAML allows no tabs." if "\\t" in problem else ""
        raise ConfigError(f"{location}: this is not YAML: {problem}.{remedy}") from error
    if not isinstance(tree.values, dict):
        raise tree.error((), f"expected names with values (`trainer: ...`), got {tree.values!r}.")
    return tree


def _merge(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    if "class_path" in above and above["class_path"] != below.get("class_path", above["class_path"]):
        below = {name: value for name, value in below.items() if name != "init_args"}
    return below | {name: _merge(below.get(name), value) for name, value in above.items()}


def _is_init_arg(container: Mapping[Any, Any], depth: int, name: Any) -> bool:
    """Return whether a name inside of an object is that of an argument, which its `init_args` hold.

    The trainer, whose arguments are at depth 1, holds them itself.
    """
    return "class_path" in container and depth > 1 and name not in PART_KEYS


def _iter_keys(value: Any, key: Key) -> Iterator[Key]:
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, Sequence) and not isinstance(value, str):
        items = enumerate(value)
    for name, entry in items:
        yield (*key, name)
        yield from _iter_keys(entry, (*key, name))
