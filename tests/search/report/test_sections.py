"""A section of the report is one function, also one that is registered from outside the package."""

from collections.abc import Callable, Iterator

import pytest

from ksopt.report.document import Section
from ksopt.search import LayerResult, SearchResult, replay
from ksopt.search.report.sections import section, unregister

Search = Callable[..., SearchResult]


@pytest.fixture
def widths() -> Iterator[None]:
    """A section between the finalists and the predictions."""

    @section(order=75, when=lambda layer: len(layer.trials) > 1)
    def middle_widths(layer: LayerResult) -> Section:
        widths = sorted({trial.facts.chain[0].in_features for trial in layer.trials})
        return Section("Widths in the middle", (), (f"Of {widths}.",))

    yield
    unregister(middle_widths)


def test_a_section_of_ones_own_is_in_the_report(search: Search, widths: None) -> None:
    result = search(trials=3)
    for name in ("report.html", "report.md"):
        text = (result.folder / name).read_text("utf-8")
        assert "Finalists" in text.partition("Widths in the middle")[0], name
        assert "How it was measured" in text.partition("Widths in the middle")[2], name


def test_a_section_is_where_it_applies(search: Search, widths: None) -> None:
    result = search(trials=1)
    assert "Widths" not in (result.folder / "report.md").read_text("utf-8")


def test_a_section_goes(search: Search) -> None:
    result = search(trials=2)
    assert "Widths" not in (result.folder / "report.md").read_text("utf-8")
    replay(str(result.folder))
    assert "Widths" not in (result.folder / "report.md").read_text("utf-8")
