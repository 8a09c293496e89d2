"""The search's report as a page and as markdown."""

from __future__ import annotations

from ksopt import pages
from ksopt.search import document
from ksopt.search.result import SearchResult


def html(result: SearchResult) -> str:
    """The page; what report.html holds."""
    return pages.html(document.title(result), where(result), document.sections(result))


def where(result: SearchResult) -> str:
    """What it was measured on, in a line."""
    request, device = result.request, result.device
    return (
        f"{device.name}, {device.device}; {request.dtype}, batch {request.batch}, "
        f"{request.layout}; torch {device.torch}, ksopt {device.ksopt}"
    )


def markdown(result: SearchResult) -> str:
    """The report as markdown; what report.md holds."""
    return pages.markdown(document.title(result), document.sections(result))
