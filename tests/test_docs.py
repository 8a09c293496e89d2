"""The examples of the documents are run: every docstring's, and the README's Python."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pages
import pytest

import ksopt
import ksopt.search

ROOT = Path(__file__).parents[1]
# ksopt.search lies elsewhere in a checkout: walking ksopt does not come to it.
MODULES = sorted(
    {
        module.name
        for package in (ksopt, ksopt.search)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not module.name.endswith("__main__")
    }
)
# The first examines the machine twice, the other searches; some five seconds each.
SLOW_EXAMPLES = ("ksopt.doctor.advice", "ksopt.search.one_call")
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW_EXAMPLES else name
        for name in MODULES
    ],
)
def test_the_examples_of_docstrings_run(name: str) -> None:
    failed, _ = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert failed == 0


def snippets(text: str) -> list[tuple[str, str]]:
    """Each ```python block, with the ```text block right under it (its output)."""
    pair = r"^```python\n(.*?)^```\n+```text\n(.*?)^```$"
    return re.findall(pair, text, flags=re.MULTILINE | re.DOTALL)


def without_measurements(text: str) -> list[str]:
    """The lines with chains and numbers masked: measurements differ from run to run."""
    masked = re.sub(r"\(\d+,\d+,\d+,\d+\)(\*\(\d+,\d+,\d+,\d+\))*", "CHAIN", text)
    masked = re.sub(r"[\d.,]*\d", "NUMBER", masked)
    return [" ".join(line.split()) for line in masked.splitlines()]


def test_every_python_block_of_the_readme_shows_its_output() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(snippets(text)) == text.count("```python") > 0


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("code", "output"),
    snippets((ROOT / "README.md").read_text(encoding="utf-8")),
    ids=lambda text: text.splitlines()[0],
)
def test_the_readmes_python_prints_what_the_readme_says(
    code: str, output: str, in_a_folder: None, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert without_measurements(capsys.readouterr().out) == without_measurements(output)


@pytest.mark.usefixtures("brief", "in_a_folder")
@pytest.mark.parametrize(
    "name", ["extending.md", pytest.param("quickstart.md", marks=pytest.mark.slow)]
)
def test_pages_of_no_room_run_as_they_stand(name: str) -> None:
    assert pages.faults(pages.DOCS / name) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    missing = [t for t in targets if not ((ROOT / document).parent / t).exists()]
    assert missing == []
