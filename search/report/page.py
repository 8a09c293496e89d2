"""The search's report as a page and as markdown."""

from __future__ import annotations

from ksopt.report import document
from ksopt.search.report import glossary as glossary  # registers its section
from ksopt.search.report import layer_sections as layer_sections
from ksopt.search.report import method_sections as method_sections
from ksopt.search.report import phrases, sections
from ksopt.search.report import search_sections as search_sections
from ksopt.search.report import structure_sections as structure_sections
from ksopt.search.results import SearchResult


def html(result: SearchResult) -> str:
    """The page report.html."""
    return document.html(title(result), where(result), sections.written(result))


def fragment(result: SearchResult) -> str:
    """The unfolded sections of the page, for a notebook's cell."""
    every = sections.written(result)
    return document.fragment([one for one in every if not one.is_folded and not one.part])


def markdown(result: SearchResult) -> str:
    """The markdown report.md."""
    return document.markdown(title(result), sections.written(result), where(result))


def title(result: SearchResult) -> str:
    """The report's title."""
    sizes, model = result.request.sizes, result.request.model
    if model is not None:
        return f"Chains for the linear layers of {model.source}"
    if len(sizes) > 1:
        return f"Chains for linear layers of {len(sizes)} sizes"
    return f"Chains for a {sizes[0]} linear layer"


def where(result: SearchResult) -> str:
    """Device and settings of the measurement, in a line."""
    request, device = result.request, result.layers[0].device
    size = f"{phrases.layer(request.sizes[0])}; " if request.is_one_layer else ""
    return (
        f"{size}{device.name}, {device.device}; {request.dtype}, batch {request.batch}, "
        f"{request.layout}; torch {device.torch}, ksopt {device.ksopt}"
    )
