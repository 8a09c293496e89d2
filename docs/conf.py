"""The documents as a site: `sphinx-build -W docs build/site`, with `pip install 'ksopt[docs]'`.

-W turns warnings into errors, so that a link to a missing page or heading fails.
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

# Headings are targets of links, by the same anchors as in the Markdown files.
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # an included page may begin below the first level

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_custom_sections = [("Shape", "notes_style"), ("Source", "notes_style")]
default_role = "literal"  # for names in single backquotes

_CONTRIBUTING = re.compile(r"\((?:\.\./)+CONTRIBUTING\.md")


def setup(app: Sphinx) -> None:
    """Connect the hooks; called by Sphinx."""
    app.connect("source-read", _link_inside)
    app.connect("autodoc-process-docstring", _escape_stars)


def _link_inside(app: Sphinx, page: str, text: list[str]) -> None:
    """Redirect links to CONTRIBUTING.md to its page of the site."""
    text[0] = _CONTRIBUTING.sub("(/development/contributing.md", text[0])


def _escape_stars(
    app: Sphinx, kind: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Escape the star of shapes such as [*batch, features], which begins no emphasis."""
    lines[:] = [line.replace("*batch", "\\*batch") for line in lines]
