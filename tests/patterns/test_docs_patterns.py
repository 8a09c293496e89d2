"""docs/patterns.md runs as written, with the documented output."""

import pages

PAGE = pages.DOCS / "patterns.md"


def test_the_page_runs_as_it_stands() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```") == 2 * text.count("```python"), "a block that no test runs"
    assert pages.faults(PAGE) == []
