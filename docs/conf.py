"""Settings of Sphinx for the site. `make docs` builds it into build/site.

The source folder is the whole repository, so that links between pages, notebooks, results and code
are the same on the site as anywhere else. Pages of reference/ are made from the code.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools import reference  # noqa: E402
from transformer_jax import __version__  # noqa: E402

project = "transformer_jax"
version = release = __version__
copyright = "the authors of transformer_jax; license: Apache-2.0"

root_doc = "docs/index"
include_patterns = ["docs/**", "notebooks/0*.ipynb", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [".venv*", "runs", "build"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".rst": "restructuredtext"}

nb_execution_mode = "off"  # `make notebooks` executes them
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
mathjax_path = "tex-svg.js"

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # those of Flax's Module are not about this project
autodoc_typehints_format = "short"
add_module_names = False
nitpicky = True
nitpick_ignore_regex = [("py:class|py:exc", ".*"), ("py:obj", "None|typing.*")]  # in annotations
suppress_warnings = ["ref.python"]  # annotations name types without their module

highlight_language = "sh"  # of blocks that name none
pygments_dark_style = "github-dark"

html_theme = "furo"
html_title = project
html_static_path = ["_static", "../build/mathjax"]
html_favicon = "_static/favicon.svg"
html_extra_path = ["_extra"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False


def setup(app: Sphinx) -> None:
    """Connects the functions below to the events of a build."""
    app.connect("builder-inited", lambda _: reference.write(ROOT / "docs" / "reference"))
    app.connect("source-read", execute)
    app.connect("doctree-read", link_names)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-signature", shorten_arrays)
    app.connect("autodoc-process-docstring", convert_markdown)


def execute(_: Sphinx, page: str, source: list[str]) -> None:
    """Replaces a notebook by the one with outputs that `make notebooks` wrote."""
    if page.startswith("notebooks/"):
        source[0] = (ROOT / "build" / f"{page}.ipynb").read_text("utf-8")


def link_names(_: Sphinx, tree: nodes.document) -> None:
    """Links code that is a name of the package to the reference."""
    for code in list(tree.findall(nodes.literal)):
        if name := reference.full_name(code.astext()):
            link = pending_xref("", refdomain="py", reftype="obj", reftarget=name)
            code.replace_self(link)
            link += code


def skip_fields(_: Sphinx, kind: str, name: str, member: Any, skip: bool, __: Any) -> bool | None:
    """Leaves out the fields of named tuples, which their signatures show."""
    return True if str(member.__doc__).startswith("Alias for field number") else None


def shorten_arrays(*event: Any) -> tuple[str, ...] | None:
    """Returns a signature and the type of its result with the name of arrays as it is written."""
    if not event[-2]:
        return None
    return tuple((text or "").replace("jaxlib._jax.Array", "Array") for text in event[-2:])


def convert_markdown(*event: Any) -> None:
    """Converts a docstring to reStructuredText."""
    lines: list[str] = event[-1]
    paragraphs = "\n".join(lines).split("\n\n")
    lines[:] = "\n\n".join(map(reference.paragraph, paragraphs)).splitlines()
