"""docs/searching.md runs, and prints the documented output."""

import json
import re
from pathlib import Path

import pages

from ksopt.cli.main import _parser
from ksopt.search.results import Verdict

PAGE = pages.DOCS / "searching.md"


def test_the_page_runs_as_it_stands(quick: None) -> None:
    assert pages.faults(PAGE) == []


def test_the_options_are_the_command_lines() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.split("## What to ask")[1].split("\n\n")[1]
    named = set(re.findall(r"`(--[a-z-]+)`", table))
    usage = _parser()._subparsers._group_actions[0].choices["search"].format_help()
    assert named == set(re.findall(r"(--[a-z-]+)", usage.split("examples:")[0])) - {
        "--help",
        "--json",
        "--quiet",
        "--verbose",
        "--traceback",
    }


def test_the_keys_and_verdicts_are_there(quick: None, tmp_path: Path) -> None:
    from ksopt.search import SearchRequest, run_search
    from ksopt.search.report import results_json

    text = PAGE.read_text(encoding="utf-8").split("## results.json")[1]
    named = set(re.findall(r"`([a-z_0-9]+)`", text))
    request = SearchRequest(
        "32x64", budgets=("50%",), batch=16, device="cpu", trials=2, out=tmp_path / "report"
    )
    actual = json.loads(results_json.to_json(run_search(request)))
    (layer,) = actual["layers"]
    parts = [actual, layer, layer["recommendations"][0], layer["finalists"][0], layer["trials"][0]]
    keys = {key for part in [*parts, layer["trials"][0]["latency"], layer["space"]] for key in part}
    assert keys - {"schema"} <= named
    for verdict in Verdict:
        assert f'"{verdict.value}"' in text.replace("\n", " ")
