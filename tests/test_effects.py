"""Each argument of what is public, and each option of the command, is passed by a test."""

from __future__ import annotations

import argparse
import ast
import collections
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import omnitrain
from omnitrain import BaseTrainer
from omnitrain.cli import main

RESULTS = {
    "Event", "Histogram", "MetricsDict", "Predictions", "Progress", "RunComparison", "SchedulePreview", "SearchResult",
    "SearchTrial",
}  # fmt: skip
"""What a user gets and does not make."""
PROTOCOLS = {"EvalUnit", "TrainUnit"}
BY_VARIABLES = {"Config(tree)", "CsvLogger(filename)"}
"""What tests pass as one of several values."""


def parameters_of(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    return [name for name in names if name not in ("self", "unknown") and not name.startswith("_")]


def public_arguments() -> dict[str, list[str]]:
    """Return the arguments of all that is public, and of the methods of a trainer; shared ones are BaseTrainer's."""
    shared = parameters_of(BaseTrainer.__init__)
    arguments = {"BaseTrainer": shared}
    for name, method in vars(BaseTrainer).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            arguments[name] = parameters_of(method)
    for name in omnitrain.__all__:
        value = getattr(omnitrain, name)
        if not inspect.isclass(value):
            arguments[name] = parameters_of(value)
        elif "__init__" in vars(value) and name not in RESULTS | PROTOCOLS and not issubclass(value, Exception):
            is_shared = {*shared} if issubclass(value, BaseTrainer) else set()
            arguments.setdefault(name, [name for name in parameters_of(value.__init__) if name not in is_shared])
    return arguments


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a command and of those below it, each by its longest name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from options_of(below)
        elif action.option_strings and not {"-h", "--version"} & {*action.option_strings}:
            yield max(action.option_strings, key=len)


def test_arguments_and_options_are_passed_by_tests() -> None:
    """By keyword or by position to what takes it, or as a key of a dict in a file that names what takes it."""
    keywords, positions = collections.defaultdict[str, set[str]](set), collections.Counter[str]()
    keys, texts = collections.defaultdict[str, set[str]](set), set[str]()
    for path in Path(__file__).parent.rglob("test_*.py"):
        names, passed = set[str](), set[str]()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                function = ast.unparse(node.func).rpartition(".")[2]
                keywords[function] |= {str(keyword.arg) for keyword in node.keywords}
                positions[function] = max(positions[function], len(node.args))
                passed |= {str(keyword.arg) for keyword in node.keywords}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts |= {*node.value.replace("=", " ").split()}
                passed.add(node.value)
            elif isinstance(node, ast.Name | ast.Attribute):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
        for name in names | passed:
            keys[name.rpartition(".")[2]] |= passed
    keys["BaseTrainer"] = set().union(*keys.values())
    missing = [
        f"{owner}({name})"
        for owner, arguments in public_arguments().items()
        for number, name in enumerate(arguments)
        if number >= positions[owner] and name not in keywords[owner] | keys[owner]
    ]
    missing += [option for option in options_of(main._parser()[0]) if option not in texts]
    assert set(missing) == BY_VARIABLES
