"""A report as sections: one self-contained page (no script, nothing loaded) and markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ksopt.report.tables import Table

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b6470; --line: #d9dee4; --back: #fff;
  --panel: #f5f7f9; --accent: #0b63c4; --dense: #b4400c;
  --second: #b4400c; --third: #1f7a3d; --fourth: #7a3fb0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaee; --soft: #a3adb8; --line: #39414a;
  --back: #14171a; --panel: #1e2328; --accent: #6cb2ff; --dense: #ff9a62;
  --second: #ff9a62; --third: #7bd49a; --fourth: #c9a2ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 66rem; padding: 1.5rem 1rem 4rem; color: var(--ink);
  background: var(--back); font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
p { margin: .5rem 0; max-width: 46rem; overflow-wrap: anywhere; }
.where { color: var(--soft); }
.answer { border-left: 4px solid var(--accent); background: var(--panel); padding: .6rem 1rem;
  margin: 1rem 0; max-width: 50rem; }
.answer p { max-width: none; }
/* A shadow at the side where a table that is too wide goes on; what covers it scrolls along. */
.table { overflow-x: auto; margin: .75rem 0; background:
  linear-gradient(90deg, var(--back) 40%, transparent) left / 2.5rem 100% no-repeat local,
  linear-gradient(270deg, var(--back) 40%, transparent) right / 2.5rem 100% no-repeat local,
  linear-gradient(90deg, var(--line), transparent) left / .6rem 100% no-repeat scroll,
  linear-gradient(270deg, var(--line), transparent) right / .6rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
.right { text-align: right; } td.right { white-space: nowrap; }
pre { background: var(--panel); padding: .75rem 1rem; overflow-x: auto; font-size: .875rem; }
svg { display: block; width: 100%; height: auto; max-width: 50rem; margin: .5rem 0; }
svg text { fill: var(--soft); font-family: system-ui, sans-serif; }
svg path { fill: none; }
.grid { stroke: var(--line); stroke-width: .5; } .axis { stroke: var(--soft); }
.budget { stroke: var(--soft); stroke-dasharray: 3 4; }
.dense { stroke: var(--dense); stroke-width: 2; stroke-dasharray: 8 4; }
svg .dense-text { fill: var(--dense); font-weight: 600; stroke: var(--back); stroke-width: 3;
  paint-order: stroke; }
.front { stroke: var(--accent); stroke-width: 1.5; }
svg .point { fill: var(--accent); fill-opacity: .6; stroke: var(--back); stroke-width: .75; }
.chosen { fill: none; stroke: var(--ink); stroke-width: 2; }
.s0 { --mark: var(--accent); } .s1 { --mark: var(--second); } .s2 { --mark: var(--third); }
.s3 { --mark: var(--fourth); } .s4 { --mark: var(--ink); } .s5 { --mark: var(--soft); }
.line { stroke: var(--mark); stroke-width: 2; }
.late { stroke-dasharray: 6 4; }
svg .box { fill: var(--mark); fill-opacity: .2; stroke: var(--mark); stroke-width: 1.5; }
.whisker { stroke: var(--mark); } .middle { stroke: var(--ink); stroke-width: 2.5; }
svg .dot { fill: var(--mark); fill-opacity: .5; }
svg .label { fill: var(--mark); font-weight: 600; }
.narrow { display: none; }
@media (max-width: 40rem) { .wide { display: none; } .narrow { display: block; } }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --line: #bbb;
  --back: #fff; --panel: #f3f3f3; --accent: #0b4f9c; --dense: #8c3208;
  --second: #8c3208; --third: #14602e; --fourth: #5b2b8a; }
  body { max-width: none; font-size: 11px; padding: 0; } h2 { break-after: avoid; }
  tr, svg, .answer { break-inside: avoid; } .table { overflow: visible; background: none; }
  .wide { display: block; } .narrow { display: none; } pre { white-space: pre-wrap; } }
"""


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
    body = "\n".join(_section(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="where">{escape(where)}</p>\n{body}\n'
        "</body>\n</html>\n"
    )


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


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    lead, rest = (
        "".join(f"<p>{_breakable(text)}</p>" for text in texts)
        for texts in (section.lead, section.paragraphs)
    )
    parts += [f'<div class="answer">{lead}</div>'] if lead else []
    parts.append(rest)
    if section.figure is not None:
        for kind, drawing in (("wide", section.figure.wide), ("narrow", section.figure.narrow)):
            parts.append(f'<div class="{kind}">{drawing or "<p>Nothing was measured.</p>"}</div>')
    if section.table is not None:
        parts.append(section.table.html())
    if section.code:
        parts.append(f"<pre><code>{escape(section.code)}</code></pre>")
    return "\n".join(parts)


def _breakable(text: str) -> str:
    return escape(text).replace(")*(", ")*<wbr>(")
