"""Searches that are compared: one page of several, read from their folders."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ksopt.cli.main import main
from ksopt.errors import InvalidInputError
from ksopt.measure.timing import Measurement
from ksopt.patterns.surroundings import Surroundings
from ksopt.report import document
from ksopt.search import SearchResult
from ksopt.search.comparison import compare
from ksopt.search.report import comparison
from ksopt.search.results import SurroundedResult, Verdict

from one_layer import with_layer  # isort: skip

Search = Callable[..., SearchResult]


def timed(result: SearchResult, us: float, dense_us: float) -> SearchResult:
    """The result, as if its chains took so long."""
    latency, dense = (Measurement(one, 0.99 * one, 1.01 * one, 20) for one in (us, dense_us))
    (layer,) = result.layers
    finalists = tuple(replace(one, latency=latency, dense=dense) for one in layer.finalists)
    (answer,) = layer.recommendations
    chosen = replace(answer, verdict=Verdict.USE, chosen=finalists[0])
    return with_layer(result, finalists=finalists, recommendations=(chosen,))


THREE = Surroundings(("bias",), siblings=3)


def timed_as_three(result: SearchResult, us: float, dense_us: float) -> SearchResult:
    """The result, as if its chains lost alone, and took so long as three on one input."""
    (there,) = timed(result, us, dense_us).layers
    (alone,) = timed(result, 106, 100).layers
    dense = tuple(replace(one, verdict=Verdict.KEEP_DENSE) for one in alone.recommendations)
    won = SurroundedResult(THREE, there.finalists, there.recommendations)
    return with_layer(
        result, finalists=alone.finalists, recommendations=dense, surrounded=(won,)
    )  # fmt: skip


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("searched")


@pytest.fixture
def folders(
    search: Search, searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Copies of two searches, which are run once."""
    requested: dict[str, dict[str, Any]] = {
        "before": {"trials": 2},
        "after": {"trials": 3, "batch": 32},
    }
    for name, options in requested.items():
        if not (searched / name).exists():
            search(out=searched / name, **options)
        shutil.copytree(searched / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return list(requested)


def test_two_searches_are_one_page(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *folders, "--out", "both"]) == 0
    printed = capsys.readouterr().out
    assert str(tmp_path / "both" / "comparison.html") in printed
    assert "What was timed differs (batch): compare the ratios, not the times." in printed
    page = (tmp_path / "both" / "comparison.html").read_text("utf-8")
    assert "Speedup over dense against weights, of before, after" in page
    assert (tmp_path / "both" / "plots" / "comparison.svg").exists()
    text = (tmp_path / "both" / "comparison.md").read_text("utf-8")
    requested = text.partition("## What differs")[2]
    assert "| batch | 16 | 32 |" in requested
    assert "| trials | 2 | 3 |" in requested
    assert "| dtype" not in requested
    assert "What was timed differs (batch)" in text


def test_as_data(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *folders, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["schema"] == "ksopt.comparison/1"
    assert [len(one["layers"][0]["trials"]) for one in value["searches"].values()] == [2, 3]


def test_the_fastest_is_named(search: Search, tmp_path: Path) -> None:
    result = search(trials=2)
    searches = {"before": timed(result, 40, 100), "after": timed(result, 20, 90)}
    assert comparison.lead(searches) == [
        "32x64: the chain of after takes the least, 20.0 us.",
        "The other takes 40.0 us of before.",
    ]
    assert [row[2] for row in comparison.table(searches).rows] == ["2.50x", "4.50x"]
    facts = comparison.sections(searches)[0].facts
    assert [(fact.value, fact.name) for fact in facts] == [("2.50x", "before"), ("4.50x", "after")]
    assert document.figures(comparison.sections(searches)).keys() == {"comparison"}


def test_a_chain_that_wins_in_surroundings_only_has_them_beside_it(
    search: Search,
) -> None:
    result = search(trials=2)
    searches = {"alone": timed(result, 40, 100), "three": timed_as_three(result, 60, 90)}
    shown = comparison.table(searches)
    chain = str(result.layers[0].finalists[0].facts.chain)
    assert shown.heads[2:5] == ("speedup", "chain", "surroundings")
    assert [row[2:5] for row in shown.rows] == [
        ("2.50x", chain, ""),
        ("1.50x", chain, "3 on one input, followed by a bias"),
    ]
    only = (
        "Where the table has surroundings, a chain is worth using in them only: elsewhere the "
        "layer stays dense."
    )
    assert comparison.lead(searches) == [
        "No size has a chain that is faster than dense in two of the searches, in the same "
        "surroundings.",
        only,
    ]
    facts = comparison.sections(searches)[0].facts
    assert [(fact.value, fact.name) for fact in facts] == [
        ("2.50x", "alone"),
        ("1.50x", "three, as 3 on one input, followed by a bias"),
    ]
    searches["again"] = timed_as_three(result, 50, 90)
    assert comparison.lead(searches) == [
        "32x64, as 3 on one input, followed by a bias: the chain of again takes the least, "
        "50.0 us.",
        "The other takes 60.0 us of three.",
        only,
    ]
    assert "| 3 on one input, followed by a bias |" in comparison.markdown(searches)


def test_one_search_has_its_report_written_again(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "before", "--out", "again", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replayed"] is True
    assert (tmp_path / "again" / "report.html").exists()


@pytest.mark.parametrize("words", [["before", "before"], ["before", "none"]])
def test_what_cannot_be_compared_leaves_nothing(
    folders: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *words, "--out", "both"]) == 2
    assert capsys.readouterr().err.startswith("ksopt: ")
    assert not (tmp_path / "both").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "ksopt: none: there is no such folder; name a search's output folder"),
        ("plan.json", "ksopt: plan.json: it is no folder; name a search's output folder"),
        ("both", "ksopt: both: there is no study.db in this folder; name the folder of a search"),
    ],
)
def test_what_is_no_search_is_named_as_typed(
    name: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text("{}", encoding="utf-8")
    (tmp_path / "both").mkdir()
    assert main(["report", name]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_folders_of_one_name_have_their_whole_paths(
    folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "before").rename(tmp_path / "old" / "after")
    assert list(compare(["old/after", "after"])) == ["old/after", "after"]
    with pytest.raises(InvalidInputError, match="two searches or more"):
        compare(["after"])
