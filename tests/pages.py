"""Runs the Python of a page of the documents, and compares its output."""

import doctest
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def faults(page: Path) -> list[str]:
    """What the page's ```python blocks print that the page does not say; they share their names.

    Line numbers are the page's own.
    """
    text = page.read_text(encoding="utf-8")
    test = doctest.DocTestParser().get_doctest(_code_in_place(text), {}, page.name, str(page), 0)
    assert test.examples, f"{page.name} has no Python that runs"
    lines: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    # Compiled functions look at their globals when they are thrown away.
    runner.run(test, out=lines.append, clear_globs=False)
    return lines


def _code_in_place(text: str) -> str:
    lines, inside = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            lines.append("")
        else:
            lines.append(line if inside else "")
    return "\n".join(lines)
