"""What README and docs say is so: their examples run, their tables are those of the code, their links lead somewhere.

python tests/test_docs.py                      writes the tables again that are made from the code
python tests/test_docs.py docs/quickstart.md   runs the examples of a page, shows what they print, and writes it again

What an example prints stands right under it, in a fence of its own that begins with ```text. The lines that a run
prints while it trains are left out.
"""

import contextlib
import functools
import inspect
import io
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from outputs import is_same_output, without_progress

import omnitrain
from omnitrain import BaseTrainer, Trainer
from omnitrain.core import objective
from omnitrain.hf import arguments as hf_arguments
from omnitrain.hf.trainer import NEVER_CALLED
from omnitrain.metrics import registry
from omnitrain.metrics.text import TEXT_METRICS

ROOT = Path(__file__).resolve().parents[1]
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
LINKED = {
    str(path.relative_to(ROOT)): path
    for pattern in ("*.md", "docs/*.md", "examples/*.md", "benchmarks/**/*.md", "notebooks/*.ipynb")
    for path in sorted(ROOT.glob(pattern))
}


def text_of(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_page(path: Path) -> Iterator[tuple[int, re.Match[str] | None, str]]:
    """Run the examples of a page from top to bottom, as a reader with one interpreter would.

    Yields for each its line, the fence right under it that says what it prints, and what it printed.
    """
    module = ModuleType("__main__")
    module.__dict__["__file__"] = str(path)
    text = path.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        if match[1].strip() != "python":
            continue
        line = text.count("\n", 0, match.start(2)) + 1
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            # Padded with empty lines, so that a traceback names the line of the page.
            exec(compile("\n" * (line - 1) + match[2], str(path), "exec"), module.__dict__)
        after = FENCE.search(text, match.end())
        is_output = after and after[1].strip() == "text" and not text[match.end() : after.start()].strip()
        yield line, after if is_output else None, without_progress(printed.getvalue())


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_page_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line, output, printed in run_page(PAGES[page]):
        assert output is None or is_same_output(output[2], printed), f"line {line} prints:\n{printed}"


def test_is_same_output() -> None:
    documented = "step 12  loss 0.5012\n"
    assert is_same_output(documented, "step 12 loss 0.5013") and is_same_output("apart: 1e-9", "apart: 0.0")
    for printed in ("step 13 loss 0.5012", "step 12 loss 0.5212", "step 12 accuracy 0.5012", "step 12", documented * 2):
        assert not is_same_output(documented, printed)
    assert is_same_output("2026-01-02 03:04 5 kB\nseconds 6.7", "2027-12-11 10:09 5 kB\nseconds 0.12")


def test_guides_have_examples() -> None:
    guides = ["quickstart", "the-loop", "metrics-and-direction", "extending", "arguments", "choosing", "huggingface"]
    for page in ("README.md", *(f"docs/{name}.md" for name in guides)):
        assert "\n```python\n" in text_of(page), page


LOOKED_UP = {
    "arguments", "training-arguments", "metric-names", "names", "api", "checkpoint-format", "losses-of-transformers",
}  # fmt: skip
"""Pages of tables and formats, which nobody reads from beginning to end."""


def test_guides_are_short() -> None:
    guides = {page for page in PAGES if page.startswith("docs/") and not page.startswith("docs/api-")}
    guides -= {f"docs/{name}.md" for name in LOOKED_UP}
    assert sum(len(text_of(page).split()) for page in guides) <= 45_000
    sidebar = re.findall(r"```{toctree}\n:hidden:\n(.*?)```", text_of("docs/index.md"), re.DOTALL)
    assert len(sidebar[0].split("\n\n")[1].split()) == 12, "guides"


def test_page_fences_are_known() -> None:
    included = {"{eval-rst}", "{toctree}", "{include} ../README.md", "{include} ../CHANGELOG.md"}
    for page in PAGES:
        languages = {match[1].strip() for match in FENCE.finditer(text_of(page))}
        assert languages <= {"python", "console", "yaml", "text"} | included, page


def prose(path: Path) -> str:
    """Return the Markdown of a page, or of a notebook's cells, without code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return FENCE.sub("", text)


@functools.cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    counts: Counter[str] = Counter()
    anchors = set()
    for title in re.findall(r"^#{1,6} (.+)$", prose(path), re.MULTILINE):
        title = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        anchors.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return anchors


def test_page_links_exist() -> None:
    """Those to other places are for `make linkcheck`, which needs a network."""
    for page, file in LINKED.items():
        for target in re.findall(r"\]\(([^)\s]+)", re.sub(r"`[^`\n]*`", "", prose(file))):
            if not re.match(r"https://[\w.-]+\.\w+(/|$)", target):
                name, _, anchor = target.partition("#")
                path = file.parent / name if name else file
                assert path.exists() and (not anchor or anchor in anchors(path)), (page, target)


def test_search_terms_lead_to_headings() -> None:
    for term, target in json.loads((ROOT / "docs" / "searches.json").read_text(encoding="utf-8")).items():
        page, _, anchor = target.partition("#")
        assert not anchor or anchor in anchors(PAGES[f"docs/{page}.md"]), (term, target)
        assert term == term.lower() and f"docs/{page}.md" in PAGES, (term, target)


def test_notebooks_have_pages() -> None:
    """docs/conf.py fills it."""
    pages = {path.stem.removeprefix("notebook-") for path in (ROOT / "docs").glob("notebook-*.md")}
    assert pages == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}


def test_page_names_existing_tests() -> None:
    suite = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py"))
    for page in PAGES:
        for name in re.findall(r"`(test_\w{20,})`", text_of(page)):  # "test_loss" is a metric
            assert f"def {name}(" in suite, (page, name)


# --- arguments


def arguments_of(trainer_class: type[BaseTrainer], *shared: str) -> dict[str, str]:
    """Return the default of each argument of a constructor but the shared ones, as the page writes it."""
    return {
        name: "required" if argument.default is argument.empty else f"`{argument.default!r}`".replace('"', "'")
        for name, argument in inspect.signature(trainer_class.__init__).parameters.items()
        if name not in ("self", *shared) and argument.kind is not argument.VAR_KEYWORD
    }


def test_arguments_page_lists_arguments() -> None:
    chapters = re.split("\n## AccelerateTrainer\n|\n## HFTrainer\n", text_of("docs/arguments.md"))
    rows = [re.findall(r"^\| `(\w+)` \| ([^|]+?) \| [^|]+ \|$", text, re.MULTILINE) for text in chapters]
    shared = arguments_of(BaseTrainer)
    assert rows[0] == list(shared.items())
    for kind, known, documented in (
        (omnitrain.AccelerateTrainer, [*shared], rows[1]), (omnitrain.HFTrainer, ["args", *shared], rows[2]),
    ):  # fmt: skip
        assert dict(documented) == arguments_of(kind, *known) and len(dict(documented)) == len(documented)


def named_in(page: str, title: str) -> set[str]:
    """Return what stands in code in the first column of the tables of a chapter, less the values given."""
    chapter = text_of(page).split(f"\n## {title}\n")[1].split("\n## ")[0]
    first = "".join(row.split("|")[1] for row in chapter.splitlines() if row.startswith("|"))
    return set(re.findall(r"`(\w+)[`=]", first))


def test_huggingface_page_lists_differences() -> None:
    assert set(hf_arguments.UNSUPPORTED) <= named_in("docs/training-arguments.md", "What is rejected")
    older = {*hf_arguments.RENAMED, *hf_arguments.SWITCHES, *hf_arguments.MOVED, *hf_arguments.WITHOUT_EFFECT}
    assert named_in("docs/training-arguments.md", "Older names") == older
    text = text_of("docs/huggingface.md").split("\n## Overriding\n")[1]
    assert not [hook for hook in NEVER_CALLED if f"`{hook}`" not in text]


def test_contributing_shows_every_room() -> None:
    picture = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("omnitrain/\n")[1].partition("```")[0]
    rooms = {path.parent.name for path in (ROOT / "omnitrain").glob("*/__init__.py")}
    assert set(re.findall(r"(\w+)/", picture)) == rooms


def test_trainer_has_signature_of_base() -> None:
    assert inspect.signature(Trainer.__init__) == inspect.signature(BaseTrainer.__init__)


def test_reference_lists_public_names() -> None:
    text = "".join(text_of(page) for page in PAGES if page.startswith("docs/api-"))
    listed = re.findall(r"^\.\. auto(?:class|function):: omnitrain\.(\w+)", text, re.M)
    assert sorted(listed) == sorted(omnitrain.__all__)
    assert all(getattr(omnitrain, name).__doc__ for name in omnitrain.__all__)


def test_loop_page_quotes_event() -> None:
    text = text_of("docs/the-loop.md")
    assert "autoclass:: omnitrain.Event\n" in text and "while not stop:" not in text


# --- tables that are made from the code


def direction_table() -> str:
    """Return the names of metrics by their direction, as Markdown."""
    lines = ["| better | where | names |", "|---|---|---|"]
    for better, everywhere, alone in (
        ("higher", objective._HIGHER, objective._HIGHER_ALONE),
        ("lower", objective._LOWER, objective._LOWER_ALONE),
    ):
        lines.append(f"| {better} | whole name, end of a name, words inside | {_listed(everywhere.split())} |")
        lines.append(f"| {better} | whole name only | {_listed(alone.split())} |")
    lines.append(f"| rejected | a word inside | {_listed(sorted(objective._UNCLEAR_WORDS))} |")
    return "\n".join(lines)


def names_table() -> str:
    """Return the metrics that can be asked for by name, as Markdown."""
    content = {
        "PairCounts": "counts of (label, prediction) pairs",
        "RankedScores": "one score and one label per sample",
        "CrossEntropySums": "sums and a count",
        "Moments": "moments of each output column",
        "Pairs": "all labels and predictions",
    }
    lines = ["| names | better | what is kept |", "|---|---|---|"]
    for statistic, kinds in registry._FAMILIES.items():
        for better, is_higher in (("higher", True), ("lower", False)):
            chosen = [kind for kind in kinds if (kind not in registry._LOWER_IS_BETTER) is is_higher]
            if chosen:
                lines.append(f"| {_listed(chosen)} | {better} | {content[statistic.__name__]} |")
    lines.append("| `top<k>_accuracy`, for example `top5_accuracy` | higher | hits and a count |")
    lines.append("| `f<beta>`, for example `f2` or `f0.5_macro` | higher | counts of (label, prediction) pairs |")
    for better, is_higher in (("higher", True), ("lower", False)):
        chosen = [name for name, (_, _, up) in TEXT_METRICS.items() if up is is_higher]
        lines.append(f"| {_listed(chosen)} | {better} | the texts |")
    aliases = ", ".join(f"`{alias}` = `{kind}`" for alias, kind in registry._ALIASES.items())
    return "\n".join([*lines, "", f"The same by other names: {aliases}."])


def _listed(words: list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


TABLES = {"directions": direction_table, "metric names": names_table}


def with_tables(text: str) -> str:
    """Return a page with the tables between its markers made anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- made from the code: {name} -->\n", "<!-- end -->"
        before, marker, rest = text.partition(begin)
        if marker:
            text = f"{before}{begin}{table()}\n{end}{rest.partition(end)[2]}"
    return text


def test_generated_tables_are_current() -> None:
    """If not: `python tests/test_docs.py` writes them anew."""
    text = text_of("docs/metric-names.md")
    assert text.count("<!-- made from the code: ") == len(TABLES)
    assert text == with_tables(text)


def _write_outputs(path: Path) -> None:
    """Run the examples of a page in an empty folder, and write what they print under those that have a place for it."""
    text = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for line, output, printed in [*run_page(path)][::-1]:
            print(f"--- line {line}\n{printed}", end="")
            if output is not None:
                text = text[: output.start(2)] + printed.rstrip() + "\n" + text[output.end(2) :]
    path.write_text(text, encoding="utf-8")


def _main(arguments: list[str]) -> None:
    for page in arguments:
        _write_outputs(Path(page).resolve())
    if not arguments:
        for path in PAGES.values():
            path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1:])
