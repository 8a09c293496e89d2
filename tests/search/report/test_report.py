"""The files of a search: their contents, consistency and completeness."""

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ksopt import ops
from ksopt.errors import InvalidInputError
from ksopt.report.svg import linear_ticks, log_ticks
from ksopt.search import SearchRequest, SearchResult, progress
from ksopt.search.report import answers, export, results_json, terminal

Search = Callable[..., SearchResult]
FILES = ("report.html", "report.md", "results.json", "plan.json", "trials.csv")


@pytest.fixture(scope="module")
def cache() -> list[SearchResult]:
    return []


@pytest.fixture
def result(
    search: Search, cache: list[SearchResult], tmp_path_factory: pytest.TempPathFactory
) -> SearchResult:
    """One search for all tests here, which read its files."""
    if not cache:
        out = tmp_path_factory.mktemp("kept") / "report"
        cache.append(search(trials=6, budgets=("30%", "50%"), dims="48x64", out=out))
    return cache[0]


def read(result: SearchResult, name: str) -> str:
    return (result.folder / name).read_text(encoding="utf-8")


def test_every_file_names_both_sizes(result: SearchResult) -> None:
    for name in FILES:
        text = read(result, name)
        assert "in_features" in text, name
        assert "out_features" in text, name
    text = io.StringIO()
    terminal.print_result(result, text)
    assert "in_features=48, out_features=64" in text.getvalue()
    assert str(result.folder.resolve() / "report.html") in text.getvalue()


def test_the_json_has_its_schema(result: SearchResult) -> None:
    actual = json.loads(read(result, "results.json"))
    assert actual == json.loads(results_json.to_json(result))
    assert actual["schema"] == "ksopt.search/4"
    assert set(actual) == {
        "schema",
        "request",
        "model",
        "plan",
        "budgets",
        "whole",
        "layers",
        "unmet",
        "notes",
        "warnings",
        "replayed",
        "stopped",
        "seconds",
        "folder",
    }
    assert actual["request"]["dims"] == ["48x64"]
    (layer,) = actual["layers"]
    assert (layer["in_features"], layer["out_features"]) == (48, 64)
    assert layer["dense_parameters"] == 48 * 64
    assert set(layer) == {
        "in_features",
        "out_features",
        "dense_parameters",
        "request",
        "recommendations",
        "finalists",
        "structures",
        "trials",
        "front",
        "space",
        "sampler",
        "stopped",
        "seconds",
        "final_seconds",
        "roofline",
        "correlations",
        "surrounded",
        "drift",
        "dense_layer",
        "run",
        "device",
        "runs",
    }
    assert [answer["budget"]["text"] for answer in layer["recommendations"]] == ["30%", "50%"]
    for answer in layer["recommendations"]:
        chosen = answer["chosen"]
        assert chosen["latency_over_dense"] == pytest.approx(
            chosen["latency"]["median_us"] / chosen["dense"]["median_us"]
        )
        assert chosen["efficiency"] == pytest.approx(
            chosen["floor_us"] / chosen["latency"]["median_us"]
        )
        assert answer["least_parameters"] <= chosen["parameters"]
        assert chosen["parameters"] <= answer["budget"]["parameters"]


def test_the_csv_has_a_row_for_each_trial(result: SearchResult) -> None:
    rows = list(csv.DictReader(io.StringIO(read(result, "trials.csv"))))
    trials = json.loads(read(result, "results.json"))["layers"][0]["trials"]
    assert len(rows) == len(trials) == len(result.layers[0].trials) == 6
    for row, trial in zip(rows, trials, strict=True):
        assert row["chain"] == trial["chain"]
        assert int(row["parameters"]) == trial["parameters"]
        assert float(row["latency_median_us"]) == trial["latency"]["median_us"]
        assert float(row["dense_p80_us"]) == trial["dense"]["p80_us"]
        assert (row["in_features"], row["out_features"]) == ("48", "64")


class Page(HTMLParser):
    """Contents of a page: tags, loaded resources, unclosed tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone(result: SearchResult) -> None:
    text = read(result, "report.html")
    page = Page(text)
    assert page.open == []
    assert page.loads == []
    assert "script" not in page.tags
    assert "url(" not in text
    assert "@import" not in text
    assert {"svg", "table", "style"} <= page.tags
    for answer in result.layers[0].recommendations:
        assert answer.chosen is not None
        assert str(answer.chosen.facts.chain) in text.replace("<wbr>", "")
    wide = text.split('<div class="wide">')[1].split("</svg>")[0]
    assert wide.count('class="point"') == len(result.layers[0].trials)
    assert wide.count('class="chosen"') == wide.count('class="budget"') == 2
    assert wide.count('class="dense"') == wide.count('class="front"') == 1
    assert not re.search(r"[\"' ](nan|inf)\b", text)


def test_markdown_answers_first(result: SearchResult) -> None:
    text = read(result, "report.md")
    sentence = result.layers[0].recommendations[0].sentence.replace("*", r"\*")
    assert text.index("## Answer") < text.index(sentence) < text.index("## Finalists")
    assert result.request.command in text
    assert "rho" in text
    assert "efficiency" in text
    for line in text.split("## Finalists")[1].split("##")[0].splitlines():
        if line.startswith("|"):
            assert line.count("|") == 12


def test_the_snippet_runs(result: SearchResult) -> None:
    actual = re.findall(r"```python\n(.*?)```", read(result, "report.md"), flags=re.DOTALL)
    if not actual:  # nothing beat the dense layer on this machine, and the report says so
        assert "use" not in {
            answer.verdict.name.lower() for answer in result.layers[0].recommendations
        }
        return
    script = actual[0] + "\nimport torch; print(layer(torch.ones(3, 48)).shape)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "torch.Size([3, 64])\n", done.stderr


def test_the_command_makes_the_same_request(result: SearchResult) -> None:
    words = result.request.command.split()
    assert words[:2] == ["ksopt", "search"]
    arguments = dict(re.findall(r"--([a-z-]+) ((?:[^-\s]\S*\s*)+)", result.request.command))
    assert arguments["dims"].strip() == "48x64"
    assert arguments["budget"].split() == ["30%", "50%"]
    assert arguments["device"].strip() == "cpu"


def test_files_are_written_whole_or_not(
    result: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read(result, "report.md")
    replaced: list[str] = []

    def fail(self: Path, target: Path) -> None:
        replaced.append(target.name)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(InvalidInputError, match="No space left on device"):
        export.write(result, result.folder)
    assert replaced
    assert read(result, "report.md") == before
    assert not list(result.folder.glob(".*-*"))


def test_failures_are_shown(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("no memory | at all")

    monkeypatch.setattr(ops, "chain", broken)
    result = search(trials=2)
    rows = list(csv.DictReader(io.StringIO(read(result, "trials.csv"))))
    assert [row["state"] for row in rows] == ["failed"] * 2
    assert rows[0]["reason"] == "RuntimeError: no memory | at all"
    assert r"no memory \| at all" in read(result, "report.md")
    Page(read(result, "report.html"))
    printed = io.StringIO()
    terminal.print_result(result, printed)
    message = "All 2 trials failed, the first because of RuntimeError: no memory | at all"
    assert message in printed.getvalue()
    assert message in read(result, "report.md").split("## Finalists")[0]
    assert answers.warnings(result) == [message]
    several = replace(result, request=SearchRequest(("32x64", "64x32"), device="cpu"))
    assert answers.warnings(several) == [f"32x64: {message}"]


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.5), (900, 1350), (0.5, 3e5), (7, 70)])
def test_axes_have_ticks(low: float, high: float) -> None:
    ticks = log_ticks(low, high)
    assert 2 <= len(ticks) <= 20
    assert all(low <= tick <= high for tick in ticks)
    linear = linear_ticks(low * 1000, high * 1000, 5)
    assert 2 <= len(linear) <= 8


def test_progress_to_a_pipe_is_lines(search: Search) -> None:
    stream = io.StringIO()
    search(progress.for_terminal(stream))
    lines = stream.getvalue().splitlines()
    assert "4 of 4 chains measured" in stream.getvalue()
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    assert len(lines) <= 6


def test_progress_on_a_terminal_and_none_at_all(search: Search) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    search(progress.for_terminal(stream))
    assert "measuring the roofline" in stream.getvalue()
    quiet = Terminal()
    search(progress.for_terminal(quiet, quiet=True))
    assert quiet.getvalue() == ""
