"""The report as one self-contained page: no script, nothing loaded, light and dark, print."""

from __future__ import annotations

from html import escape

from ksopt.search import document
from ksopt.search.document import Section
from ksopt.search.plot import latency_plot
from ksopt.search.result import SearchResult

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b6470; --line: #d9dee4; --back: #fff;
  --panel: #f5f7f9; --accent: #0b63c4; --dense: #b4400c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaee; --soft: #a3adb8; --line: #39414a;
  --back: #14171a; --panel: #1e2328; --accent: #6cb2ff; --dense: #ff9a62; } }
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
.table { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
.right { text-align: right; white-space: nowrap; }
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
.narrow { display: none; }
@media (max-width: 40rem) { .wide { display: none; } .narrow { display: block; } }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --line: #bbb;
  --back: #fff; --panel: #f3f3f3; --accent: #0b4f9c; --dense: #8c3208; }
  body { max-width: none; font-size: 11px; padding: 0; } h2 { break-after: avoid; }
  tr, svg, .answer { break-inside: avoid; } .table { overflow: visible; }
  .wide { display: block; } .narrow { display: none; } pre { white-space: pre-wrap; } }
"""


def html(result: SearchResult) -> str:
    """The page; what report.html holds."""
    sections = document.sections(result)
    title = document.title(result)
    request, device = result.request, result.device
    where = (
        f"{device.name}, {device.device}; {request.dtype}, batch {request.batch}, "
        f"{request.layout}; torch {device.torch}, ksopt {device.ksopt}"
    )
    body = "\n".join(_section(section, result) for section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="where">{escape(where)}</p>\n{body}\n'
        "</body>\n</html>\n"
    )


def _section(section: Section, result: SearchResult) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    lead, rest = (
        "".join(f"<p>{_breakable(text)}</p>" for text in texts)
        for texts in (section.lead, section.paragraphs)
    )
    parts += [f'<div class="answer">{lead}</div>'] if lead else []
    parts.append(rest)
    if section.plot:
        # Two drawings, because one scaled to a telephone would have letters too small to read.
        for kind, width, height in (("wide", 800, 400), ("narrow", 360, 340)):
            drawing = latency_plot(result, width, height)
            parts.append(f'<div class="{kind}">{drawing or "<p>Nothing was measured.</p>"}</div>')
    if section.table is not None:
        parts.append(section.table.html())
    if section.code:
        parts.append(f"<pre><code>{escape(section.code)}</code></pre>")
    return "\n".join(parts)


def _breakable(text: str) -> str:
    return escape(text).replace(")*(", ")*<wbr>(")
