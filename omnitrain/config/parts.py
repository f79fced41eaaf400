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
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from omnitrain.config import names
from omnitrain.config.reading import PART_KEYS, Key, Tree, has_part_keys, read
from omnitrain.core.errors import ConfigError, MissingExtraError, OmnitrainError, add_location, did_you_mean

Mode = Literal["text", "object", "function", "class"]
"""What a text means where it stands as an argument: itself, what an object is made of, a function, or a class."""


class Placeholder:
    """Stands for an object while the other arguments are checked; errors show its description."""

    def __init__(self, description: Any = None) -> None:
        self._description = description

    def __repr__(self) -> str:
        return repr(self._description)

    def __call__(self) -> None:
        """Be callable."""

    def save_pretrained(self) -> None:
        """Be a tokenizer."""


# Types whose values a text can be, and types of which a text makes no object.
_TEXT_TYPES = frozenset(["str", "Literal", "int", "float", "bool", "complex", "Interval"])
_PLAIN_TYPES = frozenset(["None", "NoneType", "bytes", "dict", "Dict", "list", "List", "tuple", "Tuple", "set",
    "Mapping", "Sequence", "Iterable", "Optional", "Union", "Path", "Duration", "device", "Any"])  # fmt: skip


def text_mode(annotation: Any, is_any_object: bool = False) -> Mode:
    """Return what a text means as an argument with this annotation; `Any` may stand for objects.

    >>> [text_mode(kind) for kind in ("Callable[[list[int]], str] | None", int | str, "Iterable[Callback]")]
    ['function', 'text', 'object']
    """
    if any(issubclass(kind, enum.Enum) for kind in _classes(annotation)):
        return "text"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    if is_any_object and re.search(r"(^|\bIterable\[)(typing\.)?Any\b", text):
        return "object"
    while (start := text.find("Callable[")) >= 0:  # what a function takes and returns plays no part
        depth, end = 1, start + len("Callable[")
        while depth and end < len(text):
            depth, end = depth + (text[end] == "[") - (text[end] == "]"), end + 1
        text = f"{text[:start]}Callable{text[end:]}"
    text = re.sub(r"~\w+|ForwardRef\(.*?\)", "Any", text)
    text = re.sub(r"^(?:typing\.)?(?:Union|Optional)\[(.*)\]$", r"\1", text)
    outside = re.sub(r"\[.*?\]", "", re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", text)))
    for words in (_type_names(outside), _type_names(text)):  # types in brackets decide if all around them hold others
        if any(word in _TEXT_TYPES or word.endswith("Name") for word in words):
            return "text"
        if "Callable" in words:
            return "function"
        if words & {"type", "Type"}:
            return "class"
        if words - _PLAIN_TYPES:
            return "object"
    return "text"


def _type_names(annotation: Any) -> set[str]:
    """Return the names of the types in an annotation without their modules, but not those of a mapping's keys."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"[\w.]*\b(Mapping|[Dd]ict)\[[^,\]]*,", "", re.sub(r"(['\"]).*?\1", "", text))
    return {word.rpartition(".")[2] for word in re.findall(r"[A-Za-z_][\w.]*", text)}


def _classes(annotation: Any) -> list[type]:
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        return [annotation]
    inner = () if typing.get_origin(annotation) is Literal else typing.get_args(annotation)
    return [kind for argument in inner for kind in _classes(argument)]


class Parts:
    """Builds the objects that a tree describes, or only checks whether they can be built, and collects errors.

    `seed` is that of the random numbers while an object is built.
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
        built, order = {}, [*parameters]
        for name in sorted(arguments, key=lambda argument: order.index(argument) if argument in order else 0):
            annotation = str(parameters[name].annotation) if name in parameters else "Any"
            with self._collecting():
                built[name] = self._build_argument(name, arguments[name], annotation)
        return built

    def _build_argument(self, name: str, value: Any, annotation: str) -> Any:
        key, kind = ("trainer", name), annotation.partition("|")[0].strip()
        if name == "compute_metrics":
            return self._metrics(value, key)
        if name in ("optimizer", "lr_scheduler") and isinstance(value, str):
            return self._optimizer_or_schedule(value, key)
        if kind.startswith("transformers."):  # its arguments are enough, or the path of a file that has them
            if isinstance(value, str) and Path(value).suffix in (".json", ".yaml", ".yml"):
                value = read(value).values
            if isinstance(value, Mapping) and not has_part_keys(value):
                return self._part(kind, value, key, "object")
        return self.value(value, key, text_mode(annotation, is_any_object=True))

    def _metrics(self, value: Any, key: Key) -> Any:
        """Return names of metrics unchanged, and functions for their paths."""
        if isinstance(value, list):
            return [self._metrics(entry, (*key, number)) for number, entry in enumerate(value)]
        is_name = isinstance(value, str) and not names.is_path(value)
        return self.value(value, key, "text" if is_name else "function")

    def _optimizer_or_schedule(self, value: str, key: Key) -> Any:
        """Return the name, which the trainer knows, or a class of another package."""
        from omnitrain.optim import build

        if names.is_path(value) and value.partition(".")[0] not in build.PACKAGES:
            return self._find(value, key)[1]
        try:
            if key[-1] == "optimizer" and value.lower() != build.MUON:
                build.optimizer_class(value)
        except OmnitrainError as error:
            raise self.tree.error(key, str(error)) from error
        if key[-1] == "lr_scheduler" and not names.is_path(value) and value not in build.SCHEDULE_NAMES:
            hint = did_you_mean(value, build.SCHEDULE_NAMES)
            raise self.tree.error(key, f"there is no schedule {value!r}, but {', '.join(build.SCHEDULE_NAMES)}.{hint}")
        return value

    @contextlib.contextmanager
    def _collecting(self) -> Iterator[None]:
        """Collect an error of the code inside, or raise it if objects are being built."""
        try:
            yield
        except ConfigError as error:
            if self.makes:
                raise
            self.errors.append(error)

    def value(self, value: Any, key: Key, mode: Mode) -> Any:
        """Return what a plain value stands for, if a text there has the meaning `mode`."""
        result: Any = Placeholder()
        with self._collecting():
            if isinstance(value, Mapping) and ("class_path" in value or "import_path" in value):
                result = self._described_object(value, key, mode)
            elif isinstance(value, Mapping):
                result = {name: self.value(entry, (*key, name), mode) for name, entry in value.items()}
            elif isinstance(value, list):
                result = [self.value(entry, (*key, number), mode) for number, entry in enumerate(value)]
            else:
                result = self._part(value, {}, key, mode) if isinstance(value, str) and mode != "text" else value
        return result

    def _described_object(self, value: Mapping[str, Any], key: Key, mode: Mode) -> Any:
        kind = "import_path" if "import_path" in value else "class_path"
        allowed = ["import_path"] if kind == "import_path" else ["class_path", "init_args", "seed"]
        for name in (name for name in value if name not in allowed):
            remedy = "only `init_args` and `seed` can be set, got {!r}. Write it under `init_args`."
            if kind == "import_path":
                remedy = "nothing can be set, got {!r}: it is the thing itself. Write `class_path` for an object."
            raise self.tree.error((*key, name), f"next to `{kind}` {remedy.format(name)}")
        path = value[kind]
        if not isinstance(path, str) or not path:
            raise self.tree.error(key, f"a class or function is named by a text, got {path!r:.100}.")
        if kind == "import_path":
            return self._find(path, key)[1]
        seed = value.get("seed", self.seed)
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise self.tree.error((*key, "seed"), f"`seed` must be an integer of at least 0, got {seed!r:.100}.")
        return self._part(path, value.get("init_args"), key, mode, seed)

    def _check_trust(self, value: Any, key: Key) -> None:
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
                raise self.tree.error(key, str(error)) from error

    def _find(self, path: str, key: Key) -> tuple[str, Any]:
        try:
            return names.find(path, self.trust)
        except ConfigError as error:
            raise self.tree.error(key, str(error)) from error

    def _part(self, path: str, init_args: Any, key: Key, mode: Mode, seed: int | None = None) -> Any:
        """Return the object that a class or function makes of its arguments, or the function itself."""
        full, function = self._find(path, key)
        is_bare = isinstance(self.tree.get(key), str)
        is_class = isinstance(function, type)
        if is_bare and (not callable(function) or mode == "class" or (mode == "function" and not is_class)):
            return function
        if not callable(function):
            raise self.tree.error(key, f"{full} cannot be called. Use `import_path` for the thing itself.")
        init_args = {} if init_args is None else init_args
        if not isinstance(init_args, (Mapping, list)):
            raise self.tree.error(
                (*key, "init_args"),
                f"the arguments of {full} are names with values, or a list, got {init_args!r:.100}.",
            )
        before = len(self.errors)
        arguments = self._arguments(full, function, init_args, key)
        from omnitrain.config.instantiation import make_part

        takes_rest = mode == "function" or (mode == "text" and len(key) == 2)  # as `optimizer` and `lr_scheduler` do
        if takes_rest and isinstance(arguments, dict) and not is_bare and names.missing_parameters(function, arguments):
            return functools.partial(function, **arguments)
        if len(self.errors) == before:
            self._check_call(full, function, arguments, key)
        if not self.makes:
            return Placeholder()
        try:
            return make_part(full, function, arguments, self.seed if seed is None else seed, init_args)
        except OmnitrainError as error:
            raise self.tree.error(key, str(error)) from error
        except Exception as error:
            add_location(error, f"{self.tree.location(key)}, where {full} is called")
            raise

    def _check_call(self, full: str, function: Any, arguments: Any, key: Key) -> None:
        if missing := names.missing_parameters(function, arguments):
            needs = ", ".join(map(repr, missing))
            raise self.tree.error(key, f"{full} needs {needs}: give a value under `init_args`.")
        if not names.parameters_of(function):
            return  # a function of C
        try:
            signature = inspect.signature(function)
            _ = signature.bind(**arguments) if isinstance(arguments, dict) else signature.bind(*arguments)
        except TypeError as error:
            raise self.tree.error(key, f"{full} cannot be called so: {error}.") from error

    def _arguments(self, full: str, function: Any, init_args: Any, key: Key) -> Any:
        """Return the arguments of a class or function, after a check of their names and types."""
        prefix = (*key, "init_args") if "init_args" in (self.tree.get(key) or ()) else key
        if isinstance(init_args, list):
            return [self.value(entry, (*prefix, number), "text") for number, entry in enumerate(init_args)]
        converted: dict[str, Any] = {}
        annotations = _annotations(function)
        for name, value in init_args.items():
            annotation = annotations.get(name, "Any")
            converted[name] = self._argument(value, annotation, (*prefix, name))
            is_same = type(converted[name]) is type(value) and converted[name] == value
            if not self.trust and is_same and not _type_names(annotation) <= _PLAIN_TYPES | _TEXT_TYPES:
                with self._collecting():
                    converted[name] = Placeholder()
                    self._check_trust(value, (*prefix, name))  # before jsonargparse imports it
                    converted[name] = value
        return self._convert(full, function, annotations, init_args, converted, prefix)

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
                    raise self.tree.error(key, f"{value!r} is no device, such as 'cpu' or 'cuda:0'.") from error
        return self.value(value, key, text_mode(annotation))

    def _convert(
        self, full: str, function: Any, annotations: Mapping[str, Any], plain: Mapping[str, Any],
        arguments: dict[str, Any], key: Key,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the arguments as jsonargparse converts them to the annotations; objects stay unchanged."""
        try:
            import jsonargparse
        except ImportError as error:
            raise MissingExtraError("A configuration file", "jsonargparse", "config") from error
        parser = jsonargparse.ArgumentParser(exit_on_error=False)
        add = parser.add_class_arguments if isinstance(function, type) else parser.add_function_arguments
        objects = {name for name, value in arguments.items() if value is not plain[name] and value != plain[name]}
        skipped = {*objects, *names.missing_parameters(function, arguments)}
        try:
            known = add(function, fail_untyped=False, skip=set[str | int](skipped), sub_configs=False)
        except Exception:  # an annotation that jsonargparse does not know, or a function of C
            return arguments
        if not (parameters := names.parameters_of(function)):  # a function of C
            return arguments
        open_names = any(param.kind is param.VAR_KEYWORD for param in parameters.values())
        for name in arguments.keys() - {*objects, *known} if not open_names else ():
            hint = did_you_mean(name, {*known, *parameters} - {"self"})
            with self._collecting():
                raise self.tree.error((*key, name), f"{full} has no argument {name!r}.{hint}")
        pending = {name: value for name, value in arguments.items() if name in known and name not in objects}
        while pending:
            try:  # a copy, as it changes lists in place
                parsed = parser.parse_object(copy.deepcopy(pending), defaults=False).as_dict()
                types = {**dict.fromkeys(parsed, ""), **dict.fromkeys(parameters, Any), **annotations}
                texts = {  # whether a text can be a value of a type, or of one in its brackets
                    name: isinstance(kind, TypeVar) or not _type_names(kind).isdisjoint(("str", "Any", "object"))
                    for name, kind in types.items()
                }
                return arguments | {name: _restore_texts(plain[name], parsed[name], texts[name]) for name in pending}
            except Exception as error:
                match = re.search(r'Parser key "([^".]+)', str(error))
                if match is None or match[1] not in pending:
                    break
                name, value = match[1], pending.pop(match[1])
                annotation = parameters[name].annotation if name in parameters else ""
                expected = _expected_type(str(error)) or f"does not fit {inspect.formatannotation(annotation)}"
                with self._collecting():
                    message = f"`{name}` of {full} {expected}, got {value!r:.100}."
                    raise self.tree.error((*key, name), message) from error
        return arguments


def _restore_texts(plain: Any, parsed: Any, admits_texts: bool) -> Any:
    """Return a parsed value with the texts of the file where their type admits texts, or where nothing has changed.

    jsonargparse reads a text as YAML before it tries the text itself, so "007" would become 7.
    """
    if isinstance(plain, str):
        is_converted = isinstance(parsed, (bool, int, float, complex, type(None), list, dict))
        # an equal one, too: it may have a reference
        return plain if parsed == plain or (admits_texts and is_converted) else parsed
    if isinstance(plain, list) and isinstance(parsed, (list, tuple)) and len(plain) == len(parsed):
        return type(parsed)(_restore_texts(*pair, admits_texts) for pair in zip(plain, parsed, strict=True))
    if isinstance(plain, Mapping) and isinstance(parsed, dict) and plain.keys() == parsed.keys():
        return {name: _restore_texts(plain[name], entry, admits_texts) for name, entry in parsed.items()}
    return parsed


def _annotations(function: Any) -> dict[str, Any]:
    """Return the annotations of the parameters, with aliases resolved where their names can be looked up."""
    parameters = names.parameters_of(function).items()
    annotations = {name: param.annotation for name, param in parameters if param.annotation is not param.empty}
    with contextlib.suppress(Exception):  # names that only a type checker imports
        annotations |= typing.get_type_hints(function.__init__ if isinstance(function, type) else function)
    return annotations


def _expected_type(message: str) -> str:
    """Return what jsonargparse expected, as text; empty if its message does not say."""
    kinds = re.findall(r"Expected an? (.+?)(?:\. Got value| string: |$)", message, re.M)
    kinds = [re.sub(r"<class '(.+?)'>|typing\.", lambda match: match[1] or "", kind) for kind in kinds]
    kinds = ["None" if kind == "NoneType" else kind for kind in dict.fromkeys(kinds)]
    return f"must be {' or '.join(kinds)}" if kinds else ""
