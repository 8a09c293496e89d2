"""Results, plans, explanations and conversions as a notebook shows them."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Protocol

import pytest
import torch

import ksopt
from ksopt.search import SearchRequest, run_search


class Shown(Protocol):
    def _repr_html_(self) -> str: ...


class Cell(HTMLParser):
    """The text and the tags of a cell; tags that load or run something are refused."""

    def __init__(self, value: Shown) -> None:
        super().__init__()
        self.text, self.tags, self.open = "", set[str](), list[str]()
        self.feed(value._repr_html_())
        assert self.open == []
        assert "script" not in self.tags

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        self.tags.add(tag)
        if tag != "wbr":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if "style" not in self.open else ""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dims", ["32x64", ("32x64", "64x32")])
def test_a_search(dims: str | tuple[str, ...], tmp_path: Path) -> None:
    request = SearchRequest(
        dims, budgets=("50%",), batch=16, device="cpu", trials=4, out=tmp_path / "report"
    )
    result = run_search(request)
    cell = Cell(result)
    assert {"svg", "table"} <= cell.tags
    assert "faster" in cell.text or "fastest" in cell.text
    # Printed, it is the output of the command.
    assert str(result).splitlines()[-1].startswith(("report: ", "plan:   "))
    layer = Cell(result.layers[0])
    assert "nn.Linear(32, 64)" in layer.text or "nn.Linear(64, 32)" in layer.text
    assert {"svg", "table"} <= layer.tags


def test_a_plan() -> None:
    cell = Cell(ksopt.Plan.of({"384x1536": "(1,768,192,2)*(2,192,192,1)", "head": None}))
    assert "(1,768,192,2)*(2,192,192,1)" in cell.text
    assert "dense" in cell.text
    assert {"svg", "table"} <= cell.tags


def test_a_conversion() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    done = ksopt.convert(model, {"16x16": "(1,4,4,4)*(4,4,4,1)"})
    assert str(done).startswith(done.sentence)
    assert len(str(done).splitlines()) == 4  # the sentence, and a table of one row
    cell = Cell(done)
    assert "1 layer converted" in cell.text
    assert "relative error" in cell.text
    assert {"svg", "table"} <= cell.tags


def test_an_explanation() -> None:
    cell = Cell(ksopt.explain(ksopt.KSLinear(8, 8, "(2,4,4,1)"), torch.ones(3, 8)))
    assert "1 of 1" in cell.text
    assert "(2,4,4,1)" in cell.text
    assert "table" in cell.tags
