"""docs/patterns.md runs as it stands, and prints what it says."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "patterns.md"


def code_in_place(page: str) -> str:
    """The page with everything outside its python blocks blanked, so that line numbers stay."""
    lines, inside = [], False
    for line in page.splitlines():
        if line.startswith("```"):
            assert inside or line == "```python", f"a block that no test runs: {line}"
            inside = not inside
            lines.append("")
        else:
            lines.append(line if inside else "")
    return "\n".join(lines)


def test_the_page_runs_as_it_stands() -> None:
    code = code_in_place(PAGE.read_text(encoding="utf-8"))
    test = doctest.DocTestParser().get_doctest(code, {}, PAGE.name, str(PAGE), 0)
    assert len(test.examples) > 30
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert not report, "".join(report)
