"""Pictures of chains: they show where the matrices may be nonzero, and nothing else."""

import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ksopt import drawing
from ksopt.cli.main import main
from ksopt.errors import InvalidInputError
from ksopt.patterns.chain import Chain
from ksopt.patterns.pattern import Pattern

EXAMPLE = "(2,3,2,3)*(6,2,2,1)"


def support(pattern: Pattern) -> list[list[bool]]:
    """Definition 2.1, entry by entry."""
    a, b, c, d = pattern.weight_shape
    full = [[False] * pattern.in_features for _ in range(pattern.out_features)]
    for i in range(a):
        for k in range(b):
            for l in range(c):
                for j in range(d):
                    full[i * b * d + k * d + j][i * c * d + l * d + j] = True
    return full


@pytest.mark.parametrize("text", ["(2,3,2,3)", "(6,2,2,1)", "(1,1,5,4)", "(3,4,1,2)"])
def test_each_entry_is_a_cell(text: str) -> None:
    pattern = Pattern.parse(text)
    grid = drawing.Grid.of(pattern, 64)
    assert grid.is_exact
    assert [[bool(share) for share in row] for row in grid.cells] == support(pattern)
    assert sum(map(sum, grid.first)) == pattern.b * pattern.c


def test_a_cell_of_many_entries_is_as_full_as_they_are() -> None:
    pattern = Pattern(2, 6, 4, 5)
    grid, full = drawing.Grid.of(pattern, 7), support(pattern)
    assert not grid.is_exact
    for y, row in enumerate(grid.cells):
        for x, share in enumerate(row):
            entries = [
                entry
                for r, line in enumerate(full)
                if r * 7 // pattern.out_features == y
                for c, entry in enumerate(line)
                if c * 7 // pattern.in_features == x
            ]
            assert share == pytest.approx(sum(entries) / len(entries))


def test_plain_characters_for_a_pipe() -> None:
    stream = io.StringIO()
    drawing.write(Chain.parse("(2,2,1,1)"), stream)
    assert stream.getvalue() == "(2,2,1,1): 4 x 2, 4 weights\n# .\n# .\n. #\n. #\n\n"


def test_colours_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    drawing.write(Chain.parse(EXAMPLE), stream)
    assert "█" in stream.getvalue()


def test_the_command_draws_and_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "chain.svg"
    assert main(["show", EXAMPLE, "--svg", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "in_features=12, out_features=18: 60 weights, 27.8%" in printed
    assert "(6,2,2,1): 12 x 12, 24 weights" in printed
    root = ElementTree.fromstring(file.read_text("utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "(2,3,2,3)" in "".join(root.itertext())
    assert "class=" not in file.read_text("utf-8")  # no program needs a style sheet for it


def test_the_command_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", EXAMPLE, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["parameters"], value["rank_bound"]) == (60, 12)
    assert [one["pattern"] for one in value["factors"]] == [[2, 3, 2, 3], [6, 2, 2, 1]]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["(2,3,2)"], "pattern"),
        (["(2,3,2,3)*(5,2,2,1)"], "(5,2,2,1)"),
        ([EXAMPLE, "--svg", "no/such/folder.svg"], "no/such/folder.svg"),
        (["(1,70000,1,1)"], "at most 65,536"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    assert main(["show", *words]) == 2
    assert expected in capsys.readouterr().err


def test_a_layer_that_is_too_large_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="at most 65,536"):
        drawing.to_svg(Chain.parse("(1,1,999999999,1)"))
