"""docs/backend.md runs, and prints the documented output."""

import pages
import pytest
import torch
from torch._dynamo.utils import counters

PAGE = pages.DOCS / "backend.md"


@pytest.mark.slow
def test_the_page_runs_as_it_stands() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```") == 2 * text.count("```python"), "a block that no test runs"
    assert pages.faults(PAGE) == []


def test_the_page_lists_every_counter(compiled_by_eager: object) -> None:
    torch.compile(torch.nn.Conv1d(8, 8, 1, groups=2), backend="ksopt")(torch.ones(3, 8, 5))
    text = PAGE.read_text(encoding="utf-8")
    names = [*counters["ksopt"], "results_planned"]
    assert len(names) == 17
    assert [name for name in names if f"`{name}`" not in text] == []
