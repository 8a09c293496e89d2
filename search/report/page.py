"""The search's report as a page and as markdown."""

from __future__ import annotations

from ksopt.report import document
from ksopt.search.report import sections
from ksopt.search.results import SearchResult


def html(result: SearchResult) -> str:
    """The page; what report.html holds."""
    return document.html(sections.title(result), where(result), sections.sections(result))


def where(result: SearchResult) -> str:
    """What it was measured on, in a line."""
    request, device = result.request, result.device
    return (
        f"{device.name}, {device.device}; {request.dtype}, batch {request.batch}, "
        f"{request.layout}; torch {device.torch}, ksopt {device.ksopt}"
    )


def markdown(result: SearchResult) -> str:
    """The report as markdown; what report.md holds."""
    return document.markdown(sections.title(result), sections.sections(result))
