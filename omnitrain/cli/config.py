"""The commands `omnitrain train`, `omnitrain sweep` and `omnitrain config`.

`main.py` adds their parsers. Nothing here imports torch before a configuration was read and is valid.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omnitrain.arguments import DEFAULTS
from omnitrain.checkpoint.run_record import CONFIG_FILE, code_in
from omnitrain.config.configuration import SECTIONS, TRAINERS, Config, merge_files, raise_all
from omnitrain.config.plain_yaml import write
from omnitrain.config.reading import SourceLocation, Tree, parse_value, read
from omnitrain.core.errors import CheckpointError, ConfigError
from omnitrain.core.paths import is_address
from omnitrain.core.secrets import mask_text

Pairs = Sequence[tuple[str, str | None]]


def train(
    words: Sequence[str],
    resume: str | None,
    trust: bool,
    print_config: bool,
    check: bool = False,
    plan: bool = False,
    as_json: bool = False,
) -> int:
    """Train a configuration from files and options, or only print, check or plan it; return the exit code."""
    files, pairs = parse_words(words)
    if as_json and not check and not plan:
        raise ConfigError("--json is for the result of --check or --plan. Add one of them.")
    config = _make_config(files, pairs, resume, trust)
    if print_config:
        print(write(config.tree.values), end="")
        return 0
    with code_in(files[0].parent if files else Path()):
        if not check and not plan:
            config.train()
            return 0
        trainer = config.make_trainer()
        results: dict[str, Any] = {"check": trainer.check()} if check else {}
        results |= {"plan": trainer.plan()} if plan else {}
    if trainer.is_main_process:
        texts = [str(result) for result in results.values()]
        content = {name: result.to_json() for name, result in results.items()}
        print(json.dumps(content, indent=2) if as_json else "\n\n".join(texts))
    return 0 if all(result.ok for result in results.values()) else 1


def check(words: Sequence[str], trust: bool) -> None:
    """Check a configuration without building anything, and raise ConfigError for all that is wrong."""
    raise_all(_make_config(*parse_words(words), None, trust).check())
    print("Nothing is wrong.")


def convert(file: Path) -> None:
    """Print a configuration of nnScaler as one of ours, with comments for what has no counterpart."""
    from omnitrain.contrib.nnscaler import convert

    values, notes = convert(read(file))
    for note in notes:
        print(f"# {note}")
    print(write(values), end="")


def _make_config(files: Sequence[Path], pairs: Pairs, resume: str | None, trust: bool) -> Config:
    """Return the configuration of files and options, or of a run to resume."""
    if resume is None and not files:
        raise ConfigError("Name a file, such as config.yaml, or a run to resume: --resume runs/a.")
    if resume is None:
        tree = merge_files(files)
        return Config.from_tree(tree, _qualify_options(tree, pairs), trust)
    run, checkpoint = _locate_run(resume)
    tree = merge_files([_find_config(resume, run), *files])
    pairs = [(_folder_key(tree), run), ("trainer.overwrite", "false"), ("train.resume_from", checkpoint), *pairs]
    return Config.from_tree(tree, _qualify_options(tree, pairs), trust)


def _locate_run(resume: str) -> tuple[str, str]:
    """Return the run to resume, and its checkpoint.

    >>> _locate_run("runs/a"), _locate_run("s3://bucket/a/checkpoint-4/")
    (('runs/a', 'last'), ('s3://bucket/a', 's3://bucket/a/checkpoint-4'))
    """
    place = resume.rstrip("/") if is_address(resume) else str(Path(resume))
    parent, _, name = place.rpartition("/") if is_address(resume) else (str(Path(place).parent), "", Path(place).name)
    return (parent, place) if name.startswith("checkpoint-") else (place, "last")


def _find_config(resume: str, run: str) -> Path:
    """Return the file that describes a run, downloaded if the run is on a remote store."""
    remedy = "Name the folder of a run, or the file that it was started with and --train.resume_from last."
    if is_address(run):
        from omnitrain.checkpoint.remote import local_copy

        try:
            return local_copy(f"{run}/{CONFIG_FILE}", "--resume")
        except CheckpointError as error:
            raise ConfigError(f"--resume {mask_text(resume)}: {error} {remedy}") from error
    file = Path(run) / CONFIG_FILE
    if not file.is_file():
        raise ConfigError(f"--resume {resume}: there is no {CONFIG_FILE!r} in {run!r}. {remedy}")
    return file


def parse_words(words: Sequence[str]) -> tuple[list[Path], list[tuple[str, str | None]]]:
    """Return the files of a command line, and its options as names and texts; None for a name to remove.

    Modules of the current folder can be imported then.

    Raises:
        ConfigError: If a word is neither.

    >>> _, options = parse_words(["--trainer.epochs", "3", "--trainer.shuffle=false", "--trainer.a!", "--trainer.b"])
    >>> options
    [('trainer.epochs', '3'), ('trainer.shuffle', 'false'), ('trainer.a', None), ('trainer.b', 'true')]
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    files, pairs, remaining = list[Path](), list[tuple[str, str | None]](), list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, text = word.partition("=")
        if word in ("-f", "--config"):  # as nnScaler and Lightning have it
            if not remaining:
                raise ConfigError(f"{word} needs a file, such as config.yaml.")
            files.append(Path(remaining.pop(0)))
        elif not word.startswith("-"):
            files.append(Path(word))
        elif not re.fullmatch(r"--[A-Za-z_][\w.-]*!?", name):
            raise ConfigError(f"{word!r} is no option. Values are given as --trainer.epochs 3 or --trainer.epochs=3.")
        else:
            name = re.sub(r"(?<=[A-Za-z0-9])-(?=[A-Za-z0-9])", "_", name[2:])
            if not equals and not name.endswith("!"):
                is_value = bool(remaining) and not re.match(r"--[A-Za-z_]|-f$", remaining[0])
                text = remaining.pop(0) if is_value else "true"
            pairs.append((name[:-1], None) if name.endswith("!") else (name, text))
    return files, pairs


def _folder_key(tree: Tree) -> str:
    """Return the name of the folder of the run: HFTrainer's can be in its training arguments."""
    for name in ("training_args", "args"):
        if tree.get(("trainer", name, "output_dir")) is not None:
            return f"trainer.{name}.output_dir"
    return "trainer.save_dir"


def sweep(
    words: Sequence[str],
    trials: int | None,
    sampler: str | None,
    pruner: str | None,
    save_dir: Path | None,
    trust: bool,
) -> None:
    """Train once for each of many values, and print the results; the same command resumes an unfinished sweep."""
    files, pairs = parse_words(words)
    if not files:
        raise ConfigError("Name a file, such as config.yaml.")
    tree = merge_files(files)
    pairs = _qualify_options(tree, pairs)
    space = {name: values for name, text in pairs if (values := _parse_choices(name, text)) is not None}
    if not space:
        raise ConfigError(
            "Nothing is searched. Give several values, --trainer.learning_rate 1e-4,3e-4, or a range, "
            "--trainer.learning_rate '{low: 1e-5, high: 1e-2, log: true}'."
        )
    fixed = [(name, text) for name, text in pairs if name not in space]
    key = _folder_key(tree)
    values = {name: part if isinstance(part, list) else [part["low"], part["high"]] for name, part in space.items()}
    first = [(name, json.dumps(choices[0])) for name, choices in values.items()]
    config = Config.from_tree(tree, [*fixed, *first], trust)
    raise_all(config.check())
    for name, choices in values.items():  # each value with the first ones of the other options
        for value in choices[1:]:
            raise_all(Config.from_tree(tree, [*fixed, *first, (name, json.dumps(value))], trust).check())
    if save_dir is None:
        save_dir = Path(config.tree.get(tuple(key.split("."))) or "runs/sweep")

    def make_trainer(params: Mapping[str, Any], folder: Path) -> Any:
        chosen = [(name, json.dumps(value)) for name, value in params.items()]
        return Config.from_tree(tree, [*fixed, *chosen, (key, json.dumps(str(folder)))], trust).make_trainer()

    from omnitrain.sweeps.search import search

    count = math.prod(len(choices) if isinstance(choices, list) else math.inf for choices in space.values())
    if sampler is None and count < math.inf and (trials is None or count <= trials):
        sampler = "grid"  # all of them
    with code_in(files[0].parent):
        result = search(make_trainer, space, trials=trials, save_dir=save_dir, sampler=sampler, pruner=pruner)
    if os.environ.get("RANK", "0") == "0":
        print(f"{result}\nThe best is in {result.best.folder}.")


def _parse_choices(name: str, text: str | None) -> Any:
    """Return the values of an option that is searched: a list of choices, or a range; None for one value."""
    if text is None:
        return None
    location = SourceLocation(f"--{name}")
    value = parse_value(text, location)
    if isinstance(value, Mapping) and {"low", "high"} <= value.keys():
        return dict(value)
    if isinstance(value, str) and "," in value:
        return [parse_value(part.strip(), location) for part in value.split(",")]
    return None


def _qualify_options(tree: Tree, pairs: Pairs) -> list[tuple[str, str | None]]:
    """Return the pairs with transformers' options, which have no dots, moved to `training_args`."""
    options, placed = dict(pairs), list[tuple[str, str | None]]()
    trainer = options.get("trainer.class_path", options.get("trainer", tree.get(("trainer", "class_path"))))
    for name, text in pairs:
        if name.partition(".")[0] not in SECTIONS:
            if str(trainer).rpartition(".")[2] != "HFTrainer":
                is_argument = name in DEFAULTS or name == "model"
                hint = f" Write --trainer.{name}." if is_argument else ""
                raise ConfigError(f"--{name}: options begin with --{'., --'.join(SECTIONS)}..{hint}")
            name = f"trainer.training_args.{name}"
        placed.append((name, text))
    return placed


def format_trainer_help() -> str:
    """Return the help on the trainers' arguments, read from their docstrings without importing them."""
    package = Path(__file__).resolve().parent.parent
    files = {"Trainer": "trainer/base.py", "AccelerateTrainer": "trainer/accelerated.py", "HFTrainer": "hf/trainer.py"}
    lines, documented = [], set[str]()
    for name in TRAINERS:
        arguments = _read_arguments(package / files[name])
        arguments = {argument: words for argument, words in arguments.items() if argument not in documented}
        documented |= arguments.keys()
        lines.append(f"arguments of {'every trainer' if name == 'Trainer' else name}, each as --trainer.NAME VALUE:")
        lines += [f"  {argument:<30}{words}" for argument, words in arguments.items()]
        lines.append("")
    return "\n".join(lines)


def _read_arguments(path: Path) -> Mapping[str, str]:
    descriptions: dict[str, Any] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__" and len(node.args.kwonlyargs) > 20:
            text = inspect.cleandoc(ast.get_docstring(node) or "").partition("Args:\n")[2].partition("\n\n")[0]
            descriptions |= dict(re.findall(r"^ +(\w+): (.*)$", text, re.M))
    return descriptions
