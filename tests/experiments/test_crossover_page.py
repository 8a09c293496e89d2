"""`python docs/experiments/crossover_page.py`: the maps of docs/crossover.md from crossover.csv."""

from pathlib import Path

import pytest

import crossover_page
from ksopt.bench.crossover import measuring
from ksopt.cli import main

RUN = ("bench", "crossover", "--device", "cpu", "--quiet", "--widths", "16,32", "--rows", "1,8")


def test_the_page_shows_the_runs(
    brief: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_SECONDS", 0.001)
    monkeypatch.setattr(measuring, "_FEWEST", 3)
    page = tmp_path / "crossover.md"
    runs = (("MAPS", "float32"), ("MAPS_H200", "float16"), ("LAYERS", "bfloat16"))
    for where, precision in runs:
        out = tmp_path / precision
        words = ("--passes", "inference", "--budgets", "25%,12.5%", "--precisions", precision)
        assert main.main([*RUN, *words, "--out", str(out)]) == 0
        monkeypatch.setattr(crossover_page, where, out / "crossover.csv")
    monkeypatch.setattr(crossover_page, "PAGE", page)
    monkeypatch.setattr(crossover_page, "PICTURES", tmp_path)
    page.write_text(
        "a\n<!-- begin maps -->\nold\n<!-- end maps -->\nb\n<!-- begin h200 -->\n"
        "<!-- end h200 -->\n<!-- begin layers -->\n<!-- end layers -->\nc\n"
    )
    assert crossover_page.main([]) == 0
    text = page.read_text("utf-8")
    assert text.startswith("a\n<!-- begin maps -->\n### Inference, float32, over dense\n")
    assert text.endswith("<!-- end layers -->\nc\n")
    assert "old" not in text
    # The table is the command's own.
    table = (tmp_path / "float32" / "crossover.md").read_text("utf-8")
    lines = [line for line in text.split("begin h200")[0].splitlines() if line.startswith("| ")]
    assert len(lines) == 3
    assert all(line in table for line in lines)
    assert "pictures/crossover-inference-float32.svg" in text
    assert "pictures/crossover-inference-float16-h200.svg" in text.split("begin h200")[1]
    assert (tmp_path / "crossover-inference-float16-h200.svg").exists()
    drawing = tmp_path / "crossover-inference-float32.svg"
    own = tmp_path / "float32" / "maps" / "crossover-inference-float32.svg"
    assert drawing.read_text("utf-8") == own.read_text("utf-8")
    rows = [line for line in text.split("begin layers")[1].splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[:2] for row in rows[1:]] == [
        ["| 16", "1"], ["| 16", "8"], ["| 32", "1"], ["| 32", "8"],
    ]  # fmt: skip


def test_the_page_is_that_of_the_data() -> None:
    page = crossover_page.PAGE.read_text("utf-8")
    for name, block in crossover_page.blocks().items():
        begin, end = crossover_page.BEGIN.format(name), crossover_page.END.format(name)
        assert page.split(begin)[1].split(end)[0] == block
