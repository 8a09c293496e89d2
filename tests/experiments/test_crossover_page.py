"""`python docs/experiments/crossover_page.py`: the maps of docs/crossover.md from runs' folders."""

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
    data, page = tmp_path / "crossover", tmp_path / "crossover.md"
    monkeypatch.setattr(crossover_page, "DATA", data)
    monkeypatch.setattr(crossover_page, "PAGE", page)
    monkeypatch.setattr(crossover_page, "PICTURES", tmp_path)
    page.write_text("before\n<!-- begin crossover -->\nold\n<!-- end crossover -->\nafter\n")
    for name, budgets in (("few", "50%,25%"), ("one", "25%")):
        words = ("--passes", "inference", "--budgets", budgets, "--out", str(data / name))
        assert main.main([*RUN, *words]) == 0
    assert crossover_page.main([]) == 0
    text = page.read_text("utf-8")
    assert text.startswith("before\n<!-- begin crossover -->\n`ksopt bench crossover ")
    assert text.endswith("<!-- end crossover -->\nafter\n")
    assert "old" not in text
    assert text.count("### Inference, float32, over dense") == 2
    assert text.count(": 4 of 4 layers.") == 2
    for name in ("few", "one"):
        assert f"pictures/crossover-{name}-inference-float32.svg" in text
        assert (tmp_path / f"crossover-{name}-inference-float32.svg").exists()
    lines = (tmp_path / "crossover.csv").read_text("utf-8").splitlines()
    assert len(lines) == 1 + 4 * 2 + 4  # a line for each layer and budget


@pytest.mark.skipif(not crossover_page.DATA.exists(), reason="no run is stored")
def test_the_page_is_that_of_the_data() -> None:
    page = crossover_page.PAGE.read_text("utf-8")
    maps = page.split(crossover_page.BEGIN)[1].split(crossover_page.END)[0]
    assert maps == crossover_page.maps()
