"""How Sphinx builds the pages; the reference is read from `omnitrain.__all__`."""

from __future__ import annotations

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
