"""A report as sections, rendered as markdown and as one self-contained page without scripts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from ksopt.report import drawing_style
from ksopt.report.tables import Table

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Figure:
    """A drawing in two sizes, as the wide one's text would be unreadable on a telephone.

    Args:
        wide: An ``<svg>`` element for a screen and for print; empty if there is nothing to draw.
        narrow: An ``<svg>`` element for a telephone.
        name: The name of its own file, without a suffix; empty for no file.
    """

    wide: str
    narrow: str
    name: str = ""


@dataclass(frozen=True)
class Fact:
    """A number that the page highlights.

    Args:
        value: The number, with its unit.
        name: The quantity, in few words.
        detail: The source of the number.
    """

    value: str
    name: str
    detail: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a report: its paragraphs, then its figure, its table and its code.

    Args:
        title: Its heading. On the page, a section with facts has none.
        lead: Plain text that the page highlights.
        paragraphs: Plain text.
        table: A table, if any.
        code: A block to copy, if any.
        language: Of the code.
        figure: A drawing, on the page. Markdown has no figures, and omits a section that has
            nothing else to show.
        facts: Highlighted numbers, after the lead; the paragraphs are then under the figure.
        warnings: Plain text after the facts: reasons that make them less certain.
        command: A line to copy, under the lead: the command that the lead refers to.
        is_folded: Whether the page shows only the title until a reader opens the section.
        part: The subject of consecutive sections, where a report covers several subjects. The page
            folds the sections of one part together.
    """

    title: str
    lead: tuple[str, ...] = ()
    paragraphs: tuple[str, ...] = ()
    table: Table | None = None
    code: str = ""
    language: str = ""
    figure: Figure | None = None
    facts: tuple[Fact, ...] = ()
    warnings: tuple[str, ...] = ()
    command: str = ""
    is_folded: bool = False
    part: str = ""


def html(title: str, where: str, sections: Sequence[Section]) -> str:
    """The page: light and dark, fit for telephones and for print.

    Args:
        title: Its heading.
        where: The line under the heading: the device of the measurements.
        sections: In order.
    """
    page = _environment().get_template("page.html.j2")
    return page.render(title=title, where=where, parts=_parts(sections), style=_style())


def fragment(sections: Sequence[Section]) -> str:
    """Sections as HTML for a notebook's cell, with their own style."""
    shown = _environment().get_template("sections.html.j2").render(parts=_parts(sections))
    return f'<style>{_style()}</style><div class="ksopt notebook">{shown}</div>'


def figures(sections: Sequence[Section]) -> dict[str, str]:
    """The drawings that are written to separate files, by name."""
    drawn = [section.figure for section in sections if section.figure is not None]
    return {one.name: one.wide for one in drawn if one.name and one.wide}


def _parts(sections: Sequence[Section]) -> list[tuple[str, list[Section]]]:
    """Consecutive sections of one part, grouped."""
    return [(part, list(group)) for part, group in itertools.groupby(sections, lambda s: s.part)]


def _style() -> Markup:
    return Markup((_FOLDER / "page.css").read_text("utf-8") + drawing_style.css())


@functools.cache
def _environment() -> jinja2.Environment:
    """The environment of the templates, which escapes every text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["breakable"] = breakable
    return environment


def breakable(text: str) -> Markup:
    """A text as HTML that may break between two factors of a chain.

    Example:
        >>> str(breakable("(1,2,3,4)*(4,1,1,3) < 9"))
        '(1,2,3,4)*<wbr>(4,1,1,3) &lt; 9'
    """
    return Markup(str(escape(text)).replace(")*(", ")*<wbr>("))


def markdown(title: str, sections: Sequence[Section], where: str = "") -> str:
    """The sections as markdown."""
    blocks = [f"# {title}", *([where] if where else [])]
    for section in sections:
        has_more = section.table or section.lead or section.facts
        if section.figure is not None and not has_more:
            continue
        name = section.title[0].lower() + section.title[1:]
        blocks.append(f"## {section.part}: {name}" if section.part else f"## {section.title}")
        # Markdown would read a chain's stars as emphasis.
        blocks += [_plain(text) for text in section.lead]
        if section.command:
            blocks.append(f"```sh\n{section.command}\n```")
        if section.facts:
            blocks.append("\n".join(map(_bullet, section.facts)))
        blocks += [_plain(text) for text in (*section.warnings, *section.paragraphs)]
        if section.table is not None:
            blocks.append(section.table.markdown())
        if section.code:
            blocks.append(f"```{section.language}\n{section.code}\n```")
    return "\n\n".join(blocks) + "\n"


def _plain(text: str) -> str:
    return text.replace("*", r"\*")


def _bullet(fact: Fact) -> str:
    detail = f": {_plain(fact.detail)}" if fact.detail else ""
    return f"- **{fact.value}** {fact.name}{detail}"
