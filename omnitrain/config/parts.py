"""Objects of a run, built from their description in a configuration.

An object is a mapping with `class_path` and `init_args`, or a string where an argument takes no string; jsonargparse
checks and converts its arguments by the annotations of the class or function.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from omnitrain.config import names
from omnitrain.config.reading import PART_KEYS, Key, Tree, has_part_keys, read
from omnitrain.core.errors import ConfigError, MissingExtraError, OmnitrainError, add_location, did_you_mean

Mode = Literal["text", "object", "function", "class"]
"""What a text means where it stands as an argument: itself, what an object is made of, a function, or a class."""


class Placeholder:
    """Stands for an object while the other arguments are checked."""

    save_pretrained: Callable[..., None]

    def __init__(self) -> None:
        self.save_pretrained = lambda: None

    def __call__(self) -> None:
        """Be callable."""


_NUMBER_TYPES = ("int", "float", "bool", "complex")
# Types of which a text makes no object.
_PLAIN_TYPES = frozenset(["None", "NoneType", "bytes", "dict", "list", "tuple", "set",
                    "Mapping", "Sequence", "Iterable", "Path", "Duration", "device", "Any"])  # fmt: skip
_MAPPING_TYPES = ("dict", "Dict", "Mapping")
# Types whose values are of the types in brackets; in those with names, of the second.
_CONTAINER_TYPES = ("Optional", "Union", "Iterable", "Sequence", "list", "List", "tuple", "Tuple", *_MAPPING_TYPES)


def text_mode(annotation: Any, is_any_object: bool = False) -> Mode:
    """Return what a text means as an argument with this annotation.

    Args:
        annotation: The type, or its source.
        is_any_object: Whether `Any` stands for objects.

    >>> [text_mode(annotation) for annotation in ("Callable[[Any], str] | None", int | str, "Iterable[Callback]")]
    ['function', 'text', 'object']
    """
    if any(issubclass(kind, enum.Enum) for kind in _classes(annotation)):
        return "text"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    if text in ("Any", "typing.Any"):
        return "object" if is_any_object else "text"
    mode: Mode = "text"
    for member in _alternatives(text):
        outer, _, inner = member.partition("[")
        outer = outer.rpartition(".")[2]
        if outer in ("str", "Literal", *_NUMBER_TYPES) or outer.endswith("Name"):
            return "text"
        if outer in _CONTAINER_TYPES and inner and inner != "Any]":
            is_named = outer in _MAPPING_TYPES
            of = _alternatives(inner.removesuffix("]").replace(",", "|"))[is_named:]
            inner_mode = text_mode("|".join(of), is_any_object and not is_named)
            mode = inner_mode if mode == "text" else mode
        elif outer in ("type", "Type"):
            mode = "class"
        elif outer == "Callable":
            mode = "function"
        elif outer not in _PLAIN_TYPES and outer.isidentifier() and mode == "text":
            mode = "object"
        elif member == "Iterable[Any]" and is_any_object:
            mode = "object"  # a loader
    return mode


def _classes(annotation: Any) -> list[type]:
    """Return the classes in a type, those in brackets and unions too."""
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        return [annotation]
    inner = () if typing.get_origin(annotation) is Literal else typing.get_args(annotation)
    return [kind for argument in inner for kind in _classes(argument)]


def _alternatives(text: str) -> list[str]:
    """Return the members of a union of types."""
    members, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "|" and not depth:
            members.append("")
        else:
            members[-1] += letter
    return [member.strip() for member in members if member.strip()]


class Parts:
    """Builds the objects that a tree describes, or only checks whether they can be built.

    Args:
        tree: The values.
        trust: As for `Config`.
        seed: The seed of the random numbers while an object is built.
        makes: Whether to build anything; if not, errors are collected.
    """

    def __init__(self, tree: Tree, trust: bool, seed: int, makes: bool) -> None:
        self.tree: Tree = tree
        self.trust: bool = trust
        self.seed: int = seed
        self.makes: bool = makes
        self.errors: list[ConfigError] = []

    def build_arguments(self, trainer_class: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with which the class is called, in the order of its signature."""
        parameters = inspect.signature(trainer_class).parameters
        order = {name: number for number, name in enumerate(parameters)}
        built = {}
        for name in sorted(arguments, key=lambda argument: order.get(argument, 0)):
            annotation: Any = parameters[name].annotation if name in parameters else "Any"
            key: Key = ("trainer", name)
            if name == "compute_metrics":  # names of metrics, and functions by their paths
                built[name] = self._metrics(arguments[name], key)
            elif name in ("optimizer", "lr_scheduler") and isinstance(arguments[name], str):
                built[name] = self._optimizer_or_schedule(arguments[name], key)
            else:
                built[name] = self._by_annotation(arguments[name], annotation, key)
        return built

    def _metrics(self, value: Any, key: Key) -> Any:
        if isinstance(value, list):
            return [self._metrics(entry, (*key, number)) for number, entry in enumerate(value)]
        is_name = isinstance(value, str) and not names.is_path(value)
        return self.value(value, key, "text" if is_name else "function")

    def _optimizer_or_schedule(self, value: str, key: Key) -> Any:
        """Return the name, which the trainer knows, or a class of another package."""
        from omnitrain.optim import build

        if names.is_path(value) and value.partition(".")[0] not in build.PACKAGES:
            resolved = self._find(value, key)
            return resolved if isinstance(resolved, Placeholder) else resolved[1]
        try:
            if key[-1] == "optimizer" and value.lower() != build.MUON:
                build.optimizer_class(value)
        except OmnitrainError as error:
            return self.fail(key, str(error), error)
        if key[-1] == "lr_scheduler" and not names.is_path(value) and value not in build.SCHEDULE_NAMES:
            hint = did_you_mean(value, build.SCHEDULE_NAMES)
            return self.fail(key, f"there is no schedule {value!r}, but {', '.join(build.SCHEDULE_NAMES)}.{hint}")
        return value

    def _by_annotation(self, value: Any, annotation: Any, key: Key) -> Any:
        """Return what a value stands for where one class is expected, such as TrainingArguments.

        Its arguments without `class_path` are enough there, or the path of a file that has them.
        """
        kind, mode = str(annotation).partition("|")[0].strip(), text_mode(annotation, is_any_object=True)
        if not kind.startswith("transformers."):
            return self.value(value, key, mode)
        if isinstance(value, str) and Path(value).suffix in (".json", ".yaml", ".yml"):
            value = read(value).values
        if not isinstance(value, Mapping) or has_part_keys(value):
            return self.value(value, key, mode)
        return self._part(kind, value, key, "object")

    def fail(self, key: Key, message: str, error: BaseException | None = None) -> Placeholder:
        """Collect an error, or raise it if objects are being built."""
        config_error = self.tree.error(key, message)
        config_error.__cause__ = error
        if self.makes:
            raise config_error
        self.errors.append(config_error)
        return Placeholder()

    def value(self, value: Any, key: Key, mode: Mode) -> Any:
        """Return what a value stands for.

        Args:
            value: Plain values.
            key: Where they stand.
            mode: What a text is there.
        """
        if isinstance(value, Mapping):
            if "class_path" in value or "import_path" in value:
                return self._value_of_mapping(value, key, mode)
            return {name: self.value(entry, (*key, name), mode) for name, entry in value.items()}
        if isinstance(value, list):
            return [self.value(entry, (*key, number), mode) for number, entry in enumerate(value)]
        if not isinstance(value, str) or mode == "text":
            return value
        return self._part(value, {}, key, mode)

    def _value_of_mapping(self, value: Mapping[str, Any], key: Key, mode: Mode) -> Any:
        unexpected = [name for name in value if name not in (*PART_KEYS, "seed")]
        path = value.get("class_path", value.get("import_path"))
        if unexpected:
            known = "`init_args` and `seed`" if "class_path" in value else "nothing"
            return self.fail(
                (*key, unexpected[0]),
                f"next to `class_path` only {known} can be set, got {unexpected[0]!r}. Write it under `init_args`.",
            )
        if "class_path" in value and "import_path" in value:
            return self.fail(key, "`class_path` and `import_path` exclude each other: an object is made of the first.")
        if not isinstance(path, str) or not path:
            return self.fail(key, f"a class or function is named by a text, got {path!r:.100}.")
        if "import_path" in value:
            if "init_args" in value:
                return self.fail((*key, "init_args"), "`import_path` is the thing itself, which takes no `init_args`.")
            resolved = self._find(path, key)
            return resolved if isinstance(resolved, Placeholder) else resolved[1]
        init_args, seed = value.get("init_args"), value.get("seed", self.seed)
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            return self.fail((*key, "seed"), f"`seed` must be an integer of at least 0, got {seed!r:.100}.")
        return self._part(path, {} if init_args is None else init_args, key, mode, seed)

    def _check_trust(self, value: Any, key: Key) -> None:
        """Reject names of untrusted modules anywhere in a value."""
        if isinstance(value, Mapping):
            for name, entry in value.items():
                self._check_trust(entry, (*key, name))
        elif isinstance(value, list):
            for number, entry in enumerate(value):
                self._check_trust(entry, (*key, number))
        elif isinstance(value, str) and names.is_path(value):
            try:
                names.check_trust(value)
            except ConfigError as error:
                self.fail(key, str(error), error)

    def _find(self, path: str, key: Key) -> Any:
        try:
            return names.find(path, self.trust)
        except ConfigError as error:
            return self.fail(key, str(error), error)

    def _part(self, path: str, init_args: Any, key: Key, mode: Mode, seed: int | None = None) -> Any:
        """Return the object that a class or function makes of its arguments, or the function itself."""
        resolved = self._find(path, key)
        if isinstance(resolved, Placeholder):
            return resolved
        full, function = resolved
        is_bare = isinstance(self.tree.get(key), str)
        is_class = isinstance(function, type)
        if is_bare and (not callable(function) or mode == "class" or (mode == "function" and not is_class)):
            return function
        if not callable(function):
            return self.fail(key, f"{full} cannot be called. Use `import_path` for the thing itself.")
        if not isinstance(init_args, (Mapping, list)):
            return self.fail(
                (*key, "init_args"),
                f"the arguments of {full} are names with values, or a list, got {init_args!r:.100}.",
            )
        before = len(self.errors)
        arguments = self._arguments(full, function, init_args, key)
        from omnitrain.config.instantiation import is_partial, make_part

        takes_rest = mode == "function" or (mode == "text" and len(key) == 2)  # as `optimizer` and `lr_scheduler` do
        if takes_rest and isinstance(arguments, dict) and not is_bare and is_partial(function, arguments):
            return functools.partial(function, **arguments)
        if len(self.errors) == before and (missing := _missing_parameters(function, arguments)):
            return self.fail(
                key,
                f"{full} needs {', '.join(map(repr, missing))}: give a value under `init_args`.",
            )
        if len(self.errors) == before and (error := _signature_error(function, arguments)):
            return self.fail(key, f"{full} cannot be called so: {error}.", error)
        if not self.makes:
            return Placeholder()
        try:
            return make_part(full, function, arguments, self.seed if seed is None else seed, init_args)
        except OmnitrainError as error:
            return self.fail(key, str(error), error)
        except Exception as error:
            add_location(error, f"{self.tree.location(key)}, where {full} is called")
            raise

    def _arguments(self, full: str, function: Any, init_args: Any, key: Key) -> Any:
        """Return the arguments of a class or function, after a check of their names and types."""
        prefix = (*key, "init_args") if "init_args" in (self.tree.get(key) or ()) else key
        parameters = _parameters(function)
        if isinstance(init_args, list):
            return [self.value(entry, (*prefix, number), "text") for number, entry in enumerate(init_args)]
        converted: dict[str, Any] = {}
        annotations = _annotations(function, parameters)
        for name, value in init_args.items():
            annotation = annotations.get(name, "Any")
            converted[name] = self._argument(value, annotation, (*prefix, name))
            is_same = type(converted[name]) is type(value) and converted[name] == value
            if not self.trust and is_same and not _is_plain(annotation):
                before = len(self.errors)
                self._check_trust(value, (*prefix, name))  # before jsonargparse imports it
                converted[name] = converted[name] if len(self.errors) == before else Placeholder()
        return _convert(self, full, function, init_args, converted, prefix)

    def _argument(self, value: Any, annotation: Any, key: Key) -> Any:
        """Return what a value stands for; fields make a dataclass, and a text a member of an enum."""
        kinds = _classes(annotation)
        for kind in () if str in kinds else kinds:
            if isinstance(value, Mapping):
                if dataclasses.is_dataclass(kind) and value.keys().isdisjoint(PART_KEYS):
                    return self._part(f"{kind.__module__}.{kind.__qualname__}", value, key, "object")
            elif issubclass(kind, enum.Enum) and not isinstance(value, list):
                return next((member for member in kind if value in (member.name, member.value)), value)
            elif kind.__module__ == "torch" and kind.__name__ == "device" and isinstance(value, str):
                try:
                    return kind(value)
                except RuntimeError as error:
                    return self.fail(key, f"{value!r} is no device, such as 'cpu' or 'cuda:0'.", error)
        return self.value(value, key, text_mode(annotation))


def _is_plain(annotation: Any) -> bool:
    """Return whether no text can be the name of something in a value of this type."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    words = {word.rpartition(".")[2] for word in re.findall(r"[A-Za-z_][\w.]*", re.sub(r"(['\"]).*?\1", "", text))}
    return words <= {*_PLAIN_TYPES, *_NUMBER_TYPES, "str", "Literal", "Optional", "Union"}


def _annotations(function: Any, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return the annotations of the parameters, with aliases resolved where their names can be looked up."""
    annotations = {name: param.annotation for name, param in parameters.items() if param.annotation is not param.empty}
    with contextlib.suppress(Exception):  # names that only a type checker imports
        annotations |= typing.get_type_hints(function.__init__ if isinstance(function, type) else function)
    return annotations


def _missing_parameters(function: Any, arguments: Any) -> list[str]:
    """Return the parameters without a value."""
    parameters = list(_parameters(function).values())
    passed = set(arguments) if isinstance(arguments, dict) else {param.name for param in parameters[: len(arguments)]}
    open_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        param.name for param in parameters
        if param.kind not in open_kinds and param.default is inspect.Parameter.empty and param.name not in passed
    ]  # fmt: skip


def _signature_error(function: Any, arguments: Any) -> TypeError | None:
    """Return the error of a call whose arguments do not fit the signature, such as too many by position."""
    with contextlib.suppress(ValueError):  # a function of C
        try:
            signature = inspect.signature(function)
            _ = signature.bind(**arguments) if isinstance(arguments, dict) else signature.bind(*arguments)
        except TypeError as error:
            return error
    return None


def _convert(
    parts: Parts, full: str, function: Any, plain: Mapping[str, Any], arguments: dict[str, Any], key: Key
) -> dict[str, Any]:
    """Return the arguments as jsonargparse converts them to the annotations; objects stay unchanged."""
    try:
        import jsonargparse
    except ImportError as error:
        raise MissingExtraError("A configuration file", "jsonargparse", "config") from error
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    add = parser.add_class_arguments if isinstance(function, type) else parser.add_function_arguments
    objects = {name for name, value in arguments.items() if value is not plain[name] and value != plain[name]}
    skipped = {*objects, *_missing_parameters(function, arguments)}
    try:
        known = add(function, fail_untyped=False, skip=set[str | int](skipped), sub_configs=False)
    except Exception:  # an annotation that jsonargparse does not know, or a function of C
        return arguments
    if not (parameters := _parameters(function)):  # a function of C
        return arguments
    open_names = any(param.kind is param.VAR_KEYWORD for param in parameters.values())
    for name in arguments.keys() - {*objects, *known} if not open_names else ():
        hint = did_you_mean(name, {*known, *parameters} - {"self"})
        parts.fail((*key, name), f"{full} has no argument {name!r}.{hint}")
    pending = {name: value for name, value in arguments.items() if name in known}
    while pending:
        try:
            # a copy, as it changes lists in place
            parsed = dict(parser.parse_object(copy.deepcopy(pending), defaults=False).as_dict())
            annotations = {**dict.fromkeys(parameters, Any), **_annotations(function, parameters)}
            names = parsed.keys() & annotations.keys()
            texts = {name: _restore_texts(pending[name], parsed[name], annotations[name]) for name in names}
            return arguments | parsed | texts
        except Exception as error:
            match = re.search(r'Parser key "([^".]+)', str(error))
            if match is None or match[1] not in pending:
                break
            name, value = match[1], pending.pop(match[1])
            annotation = parameters[name].annotation if name in parameters else ""
            expected = _expected_type(str(error)) or f"does not fit {inspect.formatannotation(annotation)}"
            parts.fail((*key, name), f"`{name}` of {full} {expected}, got {value!r:.100}.", error)
    return arguments


def _restore_texts(plain: Any, parsed: Any, annotation: Any) -> Any:
    """Return a parsed value with the original strings wherever its annotation admits strings.

    jsonargparse reads a string as YAML before it tries the string itself, so "007" would become 7.

    Args:
        plain: The value in the file.
        parsed: The value that jsonargparse returned.
        annotation: The type of both.
    """
    members = _members(annotation)
    takes_all = any(member in (Any, object) or isinstance(member, TypeVar) for member in members)
    if isinstance(plain, str):
        literals = [member for member in members if typing.get_origin(member) is Literal]
        choices = [choice for literal in literals for choice in typing.get_args(literal)]
        is_converted = type(parsed) in (bool, int, float, complex, type(None), list, dict)
        keeps_text = is_converted and (takes_all or str in members or plain in choices)
        return plain if keeps_text or parsed == plain else parsed  # equal, but perhaps without its reference
    if isinstance(plain, list) and type(parsed) in (list, tuple) and len(plain) == len(parsed):
        inner = _types_inside(members, Sequence, Iterable)
        if len(inner) != len(plain) or Ellipsis in inner:
            inner = (inner[:1] or (Any,)) * len(plain)
        return type(parsed)(_restore_texts(*each) for each in zip(plain, parsed, inner, strict=True))
    if isinstance(plain, Mapping) and type(parsed) is dict and plain.keys() == parsed.keys():
        inner = _types_inside(members, Mapping)
        return {name: _restore_texts(plain[name], entry, inner[-1] if inner else Any) for name, entry in parsed.items()}
    return parsed


def _members(annotation: Any) -> list[Any]:
    """Return the members of a union; of a string that cannot be evaluated, the plain ones."""
    if isinstance(annotation, str):
        words = [member.rpartition(".")[2] for member in _alternatives(annotation)]
        return [kind for name, kind in (("Any", Any), ("object", object), ("str", str)) if name in words]
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [member for member in typing.get_args(annotation) for member in _members(member)]
    return [annotation]


def _types_inside(members: Sequence[Any], *kinds: type) -> tuple[Any, ...]:
    """Return the types in the brackets of the first member of one of these kinds."""
    for member in members:
        origin = typing.get_origin(member)
        if isinstance(origin, type) and any(issubclass(origin, kind) for kind in kinds):
            return typing.get_args(member)
    return ()


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function of C
        return {}


def _expected_type(message: str) -> str:
    """Return what jsonargparse expected, as text; empty if its message does not say."""
    kinds = re.findall(r"Expected an? (.+?)(?:\. Got value| string: |$)", message, re.M)
    kinds = [re.sub(r"<class '(.+?)'>|typing\.", lambda match: match[1] or "", kind) for kind in kinds]
    kinds = ["None" if kind == "NoneType" else kind for kind in dict.fromkeys(kinds)]
    return f"must be {' or '.join(kinds)}" if kinds else ""
