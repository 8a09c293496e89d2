"""docs/integrations.md runs as it stands."""

import pages

PAGE = pages.DOCS / "integrations.md"


def test_the_page_runs_as_it_stands() -> None:
    assert pages.faults(PAGE) == []
