"""How Sphinx builds the pages; the reference is read from `omnitrain.__all__`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import omnitrain

project = "omnitrain"
author = "The omnitrain authors"
copyright = "2026, The omnitrain authors"  # the name that Sphinx reads
release = version = omnitrain.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"omnitrain {release}"
html_static_path = ["_static"]
html_css_files = ["omnitrain.css"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

default_role = "code"  # docstrings write `name` in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


ROOT = Path(__file__).resolve().parents[1]
SEARCHES = Path(__file__).with_name("searches.json")


def as_page(path: Path) -> str:
    """Return a notebook as Markdown, with the outputs that are saved in it."""
    blocks: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(text)
            if len(blocks) == 1:
                blocks.append(
                    f"*This page is `notebooks/{path.name}` with its outputs.*"
                )
            continue
        blocks.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text")})
            if image := data.get("image/png"):
                encoded = "".join(image).replace("\n", "")
                blocks.append(f"![A picture](data:image/png;base64,{encoded})")
            else:
                text = "".join(data["text/plain"]).rstrip()
                blocks.append(f"```text\n{text}\n```")
    return "\n\n".join(blocks)


def show(app: Sphinx, page: str, source: list[str]) -> None:
    """Fill the pages of the notebooks and of the examples, which lie elsewhere."""
    if page.startswith("notebook-"):
        path = ROOT / "notebooks" / f"{page.removeprefix('notebook-')}.ipynb"
        source[0] = as_page(path)
    elif page == "examples":
        path = ROOT / "examples" / "README.md"
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"\[(\w+)\]\(\1\)", r"`\1`", text)  # a folder
        source[0] = re.sub(r"\]\((?=\w+\.)", "](../examples/", text)
    else:
        return
    app.env.note_dependency(str(path))


def add_search_terms(app: Sphinx, document: nodes.document) -> None:
    """Enter the words of searches.json into the index, which the search ranks first."""
    sections = {
        section.get("slug"): section["ids"][0]
        for section in document.findall(nodes.section)
    }
    targets = json.loads(SEARCHES.read_text(encoding="utf-8"))
    for term, target in targets.items():
        page, _, slug = target.partition("#")
        if page == app.env.docname:
            anchor = sections[slug] if slug else ""
            entry = ("single", term, anchor, "main", None)
            document.insert(0, addnodes.index(entries=[entry]))
    app.env.note_dependency(str(SEARCHES))


def mark_argument_tables(_: Sphinx, document: nodes.document) -> None:
    """Mark tables of arguments, whose rows become entries of a list on a phone."""
    for table in document.findall(nodes.table):
        titles = [entry.astext() for entry in next(iter(table.findall(nodes.row)))]
        if titles[0] in ("argument", "algorithm") and len(titles) == 3:
            table["classes"].append("arguments")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above."""
    app.connect("source-read", show)
    app.connect("doctree-read", add_search_terms)
    app.connect("doctree-read", mark_argument_tables)
    return {"parallel_read_safe": True}
