"""The search's report as a page and as markdown."""

from __future__ import annotations

from ksopt import pages
from ksopt.search import document
from ksopt.search.result import SearchResult


def html(result: SearchResult) -> str:
    """The page; what report.html holds."""
    request, device = result.request, result.device
    where = (
        f"{device.name}, {device.device}; {request.dtype}, batch {request.batch}, "
        f"{request.layout}; torch {device.torch}, ksopt {device.ksopt}"
    )
    return pages.html(document.title(result), where, document.sections(result))


def markdown(result: SearchResult) -> str:
    """The report as markdown; what report.md holds."""
    return pages.markdown(document.title(result), document.sections(result))
