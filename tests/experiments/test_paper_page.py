"""`python docs/experiments/paper_page.py`: the results of docs/paper.md from a run's folder."""

from pathlib import Path

import pytest

import paper_page
from ksopt.cli import main

RUN = ("bench", "paper", "--device", "cpu", "--quiet", "--sample", "2", "--batch", "8")


@pytest.mark.slow
def test_the_page_shows_a_run(
    brief: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, page, shown = tmp_path / "paper", tmp_path / "paper.md", tmp_path / "pictures"
    shown.mkdir()
    monkeypatch.setattr(paper_page, "DATA", data)
    monkeypatch.setattr(paper_page, "PAGE", page)
    monkeypatch.setattr(paper_page, "PICTURES", shown)
    page.write_text("before\n<!-- begin paper -->\nold\n<!-- end paper -->\nafter\n", "utf-8")
    assert main.main([*RUN, "--table", "5", "--figure", "6", "--out", str(data)]) == 0
    assert paper_page.main([]) == 0
    text = page.read_text("utf-8")
    assert text.startswith("before\n<!-- begin paper -->\nMeasured on ")
    assert text.endswith("<!-- end paper -->\nafter\n")
    assert "old" not in text
    assert "### Table 5" in text
    assert "### The heuristic: by width" in text
    for name in paper_page.pictures(data):
        assert f"pictures/paper-{name}.svg" in text
        assert (shown / f"paper-{name}.svg").exists()
    assert (tmp_path / "paper.csv").read_text("utf-8").startswith("item,row")
    capsys.readouterr()
    assert paper_page.main(["--rows", str(data)]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("| 8 | float32 | 2 |")


@pytest.mark.skipif(not paper_page.DATA.exists(), reason="no run is stored")
def test_the_page_is_that_of_the_data() -> None:
    page = paper_page.PAGE.read_text("utf-8")
    results = page.split(paper_page.BEGIN)[1].split(paper_page.END)[0]
    assert results == paper_page.results(paper_page.DATA)
