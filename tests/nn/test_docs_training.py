"""docs/training.md runs as it stands, and prints what it says."""

import pages

PAGE = pages.DOCS / "training.md"


def test_the_page_runs_as_it_stands() -> None:
    text = PAGE.read_text(encoding="utf-8")
    shell = text.count("```sh\n")
    assert text.count("```") == 2 * (text.count("```python") + shell), "a block that no test runs"
    assert pages.faults(PAGE) == []
