"""docs/backend.md runs as it stands, and prints what it says."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "backend.md"


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
    assert len(test.examples) > 20
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    # Compiled functions look at their globals when they are thrown away.
    runner.run(test, out=report.append, clear_globs=False)
    assert not report, "".join(report)
