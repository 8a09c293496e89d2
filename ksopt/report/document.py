"""A report as sections: one self-contained page (no script, nothing loaded) and markdown."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from ksopt.report.tables import Table

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Figure:
    """A drawing in two sizes: one scaled to a telephone would have letters too small to read.

    Args:
        wide: An ``<svg>`` element for a screen and for print; empty if there is nothing to draw.
        narrow: The same for a telephone.
    """

    wide: str
    narrow: str


@dataclass(frozen=True)
class Section:
    """A part of a report: its paragraphs, then its figure, its table and its code.

    Args:
        title: Its heading.
        lead: Plain text that stands out.
        paragraphs: Plain text.
        table: A table, if any.
        code: A block to copy, if any.
        language: Of the code.
        figure: A drawing, on the page. Markdown has none, and leaves out a section that has
            nothing else to show.
    """

    title: str
    lead: tuple[str, ...] = ()
    paragraphs: tuple[str, ...] = ()
    table: Table | None = None
    code: str = ""
    language: str = ""
    figure: Figure | None = None


def html(title: str, where: str, sections: Sequence[Section]) -> str:
    """The page: light and dark, fit for telephones and for print.

    Args:
        title: Its heading.
        where: The line under the heading: what it was measured on.
        sections: In order.
    """
    page = _environment().get_template("page.html.j2")
    style = (_FOLDER / "page.css").read_text("utf-8")
    return page.render(title=title, where=where, sections=sections, style=Markup(style))


@functools.cache
def _environment() -> jinja2.Environment:
    """Of templates, in which every text is escaped."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    made.filters["breakable"] = breakable
    return made


def breakable(text: str) -> Markup:
    """A text as HTML, in which a line may end between two factors of a chain.

    Example:
        >>> str(breakable("(1,2,3,4)*(4,1,1,3) < 9"))
        '(1,2,3,4)*<wbr>(4,1,1,3) &lt; 9'
    """
    return Markup(str(escape(text)).replace(")*(", ")*<wbr>("))


def markdown(title: str, sections: Sequence[Section]) -> str:
    """The same as markdown."""
    blocks = [f"# {title}"]
    for section in sections:
        if section.figure is not None and section.table is None:
            continue
        blocks.append(f"## {section.title}")
        # A chain's stars would be read as emphasis.
        texts = (*section.lead, *section.paragraphs)
        blocks += [text.replace("*", r"\*") for text in texts]
        if section.table is not None:
            blocks.append(section.table.markdown())
        if section.code:
            blocks.append(f"```{section.language}\n{section.code}\n```")
    return "\n\n".join(blocks) + "\n"
