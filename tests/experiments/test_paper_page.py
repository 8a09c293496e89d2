"""`python docs/experiments/paper_page.py`: the results of docs/paper.md from a run's folder."""

from pathlib import Path

import pytest

import paper_page
from ksopt.bench.reproduction.products import NAMES
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
    page.write_text(
        "before\n<!-- begin paper -->\nold\n<!-- end paper -->\n"
        "between\n<!-- begin full -->\nold\n<!-- end full -->\nafter\n",
        "utf-8",
    )
    assert main.main([*RUN, "--table", "5", "--figure", "6", "--out", str(data)]) == 0
    assert paper_page.main([]) == 0
    text = page.read_text("utf-8")
    assert text.startswith("before\n<!-- begin paper -->\nMeasured on ")
    assert "<!-- end paper -->\nbetween\n<!-- begin full -->\nMeasured on " in text
    assert text.endswith("<!-- end full -->\nafter\n")
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


@pytest.mark.slow
@pytest.mark.skipif(not paper_page.DATA.exists(), reason="no run is stored")
def test_the_page_is_that_of_the_data() -> None:
    page = paper_page.PAGE.read_text("utf-8")
    results = page.split(paper_page.BEGIN)[1].split(paper_page.END)[0]
    assert results == paper_page.results(paper_page.DATA)
    full = page.split(paper_page.FULL_BEGIN)[1].split(paper_page.FULL_END)[0]
    assert full == paper_page.full(paper_page.DATA)


def test_each_way_of_all_patterns_is_from_the_table_of_its_layout() -> None:
    products = {table.dtype: paper_page.products(table.dtype) for table in paper_page.TABLES}
    assert {len(of) for of in products.values()} == {627}
    for table in paper_page.TABLES:
        by_pattern = {str(one.pattern): one.times_us for one in products[table.dtype]}
        for row in table.rows():
            key = NAMES[row["way"]], row["layout"]
            if row["layout"] == table.layout and row["median_us"]:
                assert by_pattern[row["chain"]][key] == float(row["median_us"])
    assert all(("kernel", "batch_last") not in one.times_us for one in products["bfloat16"])
    assert all(("bmm", "batch_last") in one.times_us for one in products["bfloat16"])
