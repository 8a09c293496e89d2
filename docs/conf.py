"""The documents as a site: `sphinx-build -W docs build/site`, with `pip install 'ksopt[docs]'`.

-W makes an error of every warning, so that a link to a page or a heading that is not there fails.
"""

import re

from sphinx.application import Sphinx

import ksopt

project = "ksopt"
author = "the ksopt authors"
release = ksopt.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["data"]
html_theme = "furo"
html_title = f"ksopt {release}"
html_copy_source = False
html_show_sphinx = html_show_copyright = False

# Headings are targets of links, by the names that they have where the pages lie as Markdown.
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page may begin below the first level, where it is included

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_custom_sections = [("Shape", "notes_style"), ("Source", "notes_style")]
default_role = "literal"  # names stand in single quotes of this kind

_CONTRIBUTING = re.compile(r"\((?:\.\./)+CONTRIBUTING\.md")


def setup(app: Sphinx) -> None:
    """Sphinx calls it."""
    app.connect("source-read", _link_inside)
    app.connect("autodoc-process-docstring", _escape_stars)


def _link_inside(app: Sphinx, page: str, text: list[str]) -> None:
    """A link to CONTRIBUTING.md, as it is where the pages lie, leads to its page of the site."""
    text[0] = _CONTRIBUTING.sub("(/development/contributing.md", text[0])


def _escape_stars(
    app: Sphinx, kind: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """[*batch, features] is a shape, and begins no emphasis."""
    lines[:] = [line.replace("*batch", "\\*batch") for line in lines]
