"""Copies the list of arguments, the signature and docstring of `BaseTrainer.__init__`, to where it is repeated.

    python .ci/signatures.py [--check]

Three other places repeat it, each between two comments: the constructors of `AccelerateTrainer` and `HFTrainer`, and
the fields of `Settings`. With `--check` nothing is written, and a copy that differs is an error. The tables of other
trainers' argument names in the documentation are written in the same way.

Why copies: an editor shows the arguments of a class, and their texts, only if they are written out there. Of the ways
to write them once, none serves all editors:

* `**options: Unpack[SomeTypedDict]`: pyright checks calls, but jedi, IPython and `inspect.signature` show `**options`.
* A decorator that sets `__signature__`: right for `inspect.signature` and IPython, nothing for pyright and for jedi.
* Trainers as dataclasses that inherit the fields: a subclass can neither leave one out (`device`) nor put its own first
  (`HFTrainer(model, args, data_collator, ...)`), and jedi takes keyword-only fields for positional ones.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "omnitrain"
sys.path[:0] = [str(ROOT)]

from omnitrain import argument_aliases  # noqa: E402
from omnitrain.core import foreign_names  # noqa: E402

POSITIONAL = ("model", "train_dataset", "eval_dataset", "test_dataset")
TRAINERS = ("trainer/accelerated.py", "hf/trainer.py")
# An argument that these trainers do not have: a launcher places each process.
LEFT_OUT = "device"
# Where HFTrainer takes more than the others.
WIDER = {"callbacks: Iterable[Callback] = ()": "callbacks: Iterable[AnyCallback] | None = ()"}


def read_declarations(source: str) -> dict[str, str]:
    """Return the source of each keyword-only argument of the constructor, with the comment of its group before it."""
    constructors = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    args = next(node.args for node in constructors if node.name == "__init__" and node.args.kwonlyargs)
    lines = source.splitlines()
    declarations = {}
    for argument, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        first = argument.lineno - 1
        while lines[first - 1].strip().startswith("#"):
            first -= 1
        assert default is not None, f"{argument.arg} has no default"
        declarations[argument.arg] = "\n".join(lines[first : default.end_lineno]).removesuffix(",") + ","
    return declarations


def find_entries(source: str) -> tuple[int, int]:
    """Return where the entries of `Args:` in the docstring of the constructor begin and end."""
    start = source.index("Args:\n", source.index("def __init__")) + len("Args:\n")
    return start, source.index("\n\n", start)


def read_descriptions(source: str) -> dict[str, str]:
    """Return the line of each argument in the docstring of the constructor."""
    start, end = find_entries(source)
    return {line.strip().partition(":")[0]: line for line in source[start:end].splitlines()}


def replace_between(path: Path, begin: str, end: str, content: str) -> str:
    """Return the text of a file with the lines between two marks replaced."""
    before, first_mark, rest = path.read_text(encoding="utf-8").partition(f"{begin}\n")
    _, second_mark, after = rest.partition(end)
    if not (first_mark and second_mark):
        raise SystemExit(f"{path} lacks the marks {begin.strip()!r} and {end.strip()!r}.")
    return f"{before}{first_mark}{content}\n{second_mark}{after}"


def write_constructor(path: Path, declarations: dict[str, str], descriptions: dict[str, str]) -> str:
    """Return the text of a trainer's file with the arguments of BaseTrainer after its own."""
    signature = "\n".join(declarations.values())
    if path.parent.name == "hf":
        for narrow, wide in WIDER.items():
            signature = signature.replace(narrow, wide)
    source = replace_between(
        path, "        # <arguments of BaseTrainer, written by `make signatures`>", "        # </arguments>", signature
    )
    start, end = find_entries(source)
    shared = {name: line for name, line in descriptions.items() if name in declarations}
    entries = [line for line in source[start:end].splitlines() if line.strip().partition(":")[0] not in shared]
    return source[:start] + "\n".join([*entries, *shared.values()]) + source[end:]


def write_copies() -> dict[Path, str]:
    """Return the text of each file that repeats the list."""
    source = (PACKAGE / "trainer" / "base.py").read_text(encoding="utf-8")
    declarations, descriptions = read_declarations(source), read_descriptions(source)
    fields = [f"    {name}: Any = None" for name in POSITIONAL[1:]]
    fields += [re.sub(r"^ {8}", "    ", text.removesuffix(","), flags=re.M) for text in declarations.values()]
    del declarations[LEFT_OUT]
    copies = {PACKAGE / name: write_constructor(PACKAGE / name, declarations, descriptions) for name in TRAINERS}
    settings, names = PACKAGE / "arguments.py", ROOT / "docs" / "names.md"
    copies[settings] = replace_between(
        settings, "    # <fields, written by `make signatures`>", "    # </fields>", "\n".join(fields)
    )
    tables = f"{foreign_names.format_tables()}\n{argument_aliases.format_tables()}".removesuffix("\n")
    copies[names] = replace_between(
        names, "<!-- names, written by `make signatures` -->", "<!-- end of names -->", tables
    )
    return copies


def main() -> None:
    """Write the copies, or with `--check` report the files that differ."""
    stale = {path: text for path, text in write_copies().items() if path.read_text(encoding="utf-8") != text}
    if stale and "--check" in sys.argv:
        files = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        raise SystemExit(f"The arguments differ from those of BaseTrainer in {files}: run `make signatures`.")
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
