"""The summary of a benchmark of random patterns."""

import csv
from pathlib import Path

import pytest

import random_patterns

DATA = Path(__file__).parents[2] / "docs" / "data"
PAGE = Path(__file__).parents[2] / "docs" / "development" / "kernels.md"


def test_each_product_has_its_fastest_rivals(tmp_path: Path) -> None:
    bench = tmp_path / "bench.csv"
    rows = [
        ("(2,3,4,5)", "5000", "ksopt", "batch_first", "10", "0.5"),
        ("(2,3,4,5)", "5000", "bmm", "batch_first", "8", "0.6"),
        ("(2,3,4,5)", "5000", "einsum", "batch_first", "9", "0.5"),
        ("(2,3,4,5)", "5000", "bmm", "batch_last", "1", "0.6"),
        ("(2,3,4,5)", "5000", "bmm_paper_product", "batch_first", "2", "0.6"),
        ("(2,3,4,5)", "5000", "dense", "batch_first", "5", "0.6"),
        ("(2,3,4,5)", "5000", "expand", "batch_first", "", ""),
        ("(1,3,4,1)", "7", "ksopt", "batch_first", "3", "0.1"),
        ("(1,3,4,1)", "7", "bmm", "batch_first", "3", "0.1"),
    ]
    with bench.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("chain", "batch", "way", "layout", "median_us", "efficiency"))
        writer.writerows(rows)
    first, second = random_patterns.condensed(bench)
    assert [first[name] for name in random_patterns.COLUMNS[4:]] == ["bmm", "8.00", "dense", "5.00"]
    assert [second[name] for name in random_patterns.COLUMNS[4:]] == ["bmm", "3.00", "", ""]
    text = random_patterns.table([first, second])
    assert "1 products of at least 4096 rows: median efficiency 0.50" in text
    assert "blocks' ways: 1, by more than 10 %: 1, at most 1.25 times" in text
    assert "any way: 1, by more than 10 %: 1, at most 2.00 times" in text


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_page_says_what_the_data_do(dtype: str) -> None:
    with (DATA / f"random-20261125-{dtype}.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    _, _, lines_of_table = PAGE.read_text(encoding="utf-8").partition("## Random patterns")
    shown = [line.split("|") for line in lines_of_table.splitlines() if line.startswith("| ")]
    column = 2 if dtype == "bfloat16" else 3
    median, _, blocks, _, every = [line[column].strip() for line in shown[1:6]]
    text = random_patterns.table(rows)
    assert f"median efficiency {median}," in text
    assert f"blocks' ways: {blocks}," in text
    assert f"any way: {every}," in text
