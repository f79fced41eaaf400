"""Copies the list of arguments, the signature and docstring of `BaseTrainer.__init__`, to where it is repeated.

    python .ci/signatures.py [--check]

Editors show the arguments of a class only where they are written out. So they stand in the constructors of the trainers
that add some of their own, and as the fields of `Settings`, each time between two comments; `--check` changes nothing
and fails if one of them differs. The page of other trainers' names is written in the same way.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "omnitrain"
sys.path[:0] = [str(PACKAGE.parent)]

from omnitrain import argument_aliases  # noqa: E402

NAMES = PACKAGE.parent / "docs" / "names.md"
SOURCE = PACKAGE / "trainer" / "base.py"
POSITIONAL = ("self", "model", "train_dataset", "eval_dataset", "test_dataset")
TRAINERS: dict[str, set[str]] = {
    "trainer/accelerated.py": {"device"},
    "hf/trainer.py": {"device"},
}
"""The files of the trainers that repeat the list, and the arguments that they do not have."""
WIDER = {
    ("hf/trainer.py", "callbacks: Iterable[Callback] = ()"): "callbacks: Iterable[AnyCallback] | None = ()",
}
"""What some of them take more of, in a file."""


def constructor_in(text: str) -> ast.FunctionDef:
    """Return the first `__init__` that takes `model`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__" and "model" in [a.arg for a in node.args.args]:
            return node
    raise SystemExit("no constructor found")


def declarations(text: str) -> dict[str, str]:
    """Return the source of each keyword-only argument of BaseTrainer, with the comment of its group before it."""
    args = constructor_in(text).args
    lines, found = text.splitlines(), {}
    for argument, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        first = argument.lineno - 1
        while lines[first - 1].strip().startswith("#"):
            first -= 1
        found[argument.arg] = "\n".join(lines[first : default.end_lineno]).removesuffix(",")
    return found


def descriptions(text: str) -> dict[str, str]:
    """Return the line of each argument in the `Args:` of BaseTrainer's constructor."""
    block = re.search(r"\n +Args:\n(.*?)\n\n +Raises:", text[text.index("def __init__") :], re.S)
    lines = block[1].splitlines()
    return {line.strip().partition(":")[0]: line for line in lines}


def between(text: str, begin: str, end: str, content: str) -> str:
    """Return the text with what stands between two marks replaced."""
    before, mark, rest = text.partition(begin)
    _, tail_mark, after = rest.partition(end)
    if not (mark and tail_mark):
        raise SystemExit(f"the marks {begin.strip()!r} and {end.strip()!r} are missing")
    return before + mark + content + tail_mark + after


def group_of(source: str) -> list[str]:
    """Return the comments before an argument, which name its group."""
    return [line for line in source.splitlines() if line.strip().startswith("#")]


def written() -> dict[Path, str]:
    """Return the content of each file that repeats the list, as it is to be."""
    source = SOURCE.read_text(encoding="utf-8")
    declared, described = declarations(source), descriptions(source)
    found = {}
    for name, without in TRAINERS.items():
        path = PACKAGE / name
        text = path.read_text(encoding="utf-8")
        kept, pending = [], []
        for argument, lines in declared.items():
            if argument in without:
                pending = group_of(lines)
                continue
            for (file, narrow), wide in WIDER.items():
                lines = lines.replace(narrow, wide) if file == name else lines
            kept += [lines + "," if group_of(lines) else "\n".join([*pending, lines + ","])]
            pending = []
        text = between(
            text, "        # <arguments of BaseTrainer, written by `make signatures`>\n", "        # </arguments>\n",
            "\n".join(kept) + "\n",
        )  # fmt: skip
        start = text.index("Args:\n", text.index("def __init__"))
        stop = text.index("\n\n", start)
        entries = text[start:stop].split("\n")
        own = [line for line in entries[1:] if line.strip().partition(":")[0] not in described or is_own(line, text)]
        shared = [line for argument, line in described.items() if argument in declared and argument not in without]
        text = text[:start] + "\n".join([entries[0], *own, *shared]) + text[stop:]
        found[path] = text
    path = PACKAGE / "arguments.py"
    fields = [re.sub(r"^ {8}", "    ", lines, flags=re.M) for lines in declared.values()]
    datasets = [f"    {name}: Any = None" for name in POSITIONAL[2:]]
    found[path] = between(
        path.read_text(encoding="utf-8"), "    # <fields, written by `make signatures`>\n", "    # </fields>\n",
        "\n".join([*datasets, *fields]) + "\n",
    )  # fmt: skip
    found[NAMES] = between(
        NAMES.read_text(encoding="utf-8"), "<!-- names, written by `make signatures` -->\n", "<!-- end of names -->\n",
        argument_aliases.format_tables(),
    )  # fmt: skip
    return found


def is_own(line: str, text: str) -> bool:
    """Whether an entry of a docstring is of an argument that the trainer describes in its own words."""
    name = line.strip().partition(":")[0]
    return name in POSITIONAL


def main() -> None:
    """Write the copies, or with `--check` name the files that differ."""
    stale = []
    for path, text in written().items():
        if path.read_text(encoding="utf-8") != text:
            stale.append(str(path.relative_to(PACKAGE.parent)))
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if stale and "--check" in sys.argv:
        raise SystemExit(
            f"The arguments differ from those of BaseTrainer in {', '.join(stale)}: run `make signatures`."
        )


if __name__ == "__main__":
    main()
