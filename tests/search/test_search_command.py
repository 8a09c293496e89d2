"""``ksopt search`` as it is typed: exit codes, and refusals in the words of the command line."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import ksopt.search
from ksopt.cli.main import main
from ksopt.conversion.plan import Plan
from ksopt.patterns.surroundings import Surroundings
from ksopt.search.objectives import Objective
from ksopt.search.results import SearchResult

LAYER = ("search", "--dims", "16x16", "--budget", "60%", "--batch", "4", "--device", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(), ("--dims", "16x32")], ids=["one size", "several"])
@pytest.mark.parametrize("program", [(), ("--json",)], ids=["", "json"])
def test_a_search_without_a_trial_that_worked_has_failed(
    quick: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[str, ...],
    program: tuple[str, ...],
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    out = tmp_path / "out"
    words = (*LAYER, *sizes, "--trials", "2", "--out", str(out), *program)
    monkeypatch.setattr(Objective, "measure", fail)
    assert main(words) == 1
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == ("ksopt: no chain could be measured: every trial failed")
    assert "failed because of RuntimeError: out of memory" in (out / "report.md").read_text() or (
        "failed, the first because of RuntimeError: out of memory"
        in (out / "report.md").read_text()
    )
    # The report can be had again, and says so; that is no failure.
    assert main(["search", "--replay", str(out)]) == 0


def test_a_search_with_one_trial_that_worked_is_done(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, calls = Objective.measure, []

    def sometimes(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        return measure(*arguments)

    monkeypatch.setattr(Objective, "measure", sometimes)
    assert main((*LAYER, "--trials", "2", "--out", str(tmp_path / "out"))) == 0
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--min-speedup", "0"), "--min-speedup 0.0: give a number more than 0"),
        (("--min-rank", "17"), "--min-rank 17: a 16x16 layer has rank at most"),
        (("--min-rank", "0"), "--min-rank must be at least 1, got 0"),
        (("--min-use", "2"), "--min-use 2.0: give a share"),
        (("--max-error", "0.1"), "--max-error 0.1 needs weights"),
        (("--factors", "0"), "--factors must be at least 1, got 0"),
        (("--seed", "4294967296"), "seed 4294967296: give a whole number from 0 to 4294967295"),
    ],
)
def test_a_refusal_names_the_option_that_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "out"
    assert main((*LAYER, *words, "--out", str(out))) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_space_without_a_chain_says_which_option_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("search", "--dims", "7x13", "--budget", "40%", "--device", "cpu")
    assert main((*words, "--out", str(tmp_path / "out"))) == 2
    assert "A smaller --min-rank allows smaller chains" in capsys.readouterr().err
    assert main(("space", "--dims", "8x12", "--min-rank", "9")) == 2
    assert "--min-rank 9: a 8x12 layer" in capsys.readouterr().err


def test_a_search_without_time_for_a_trial_needs_a_longer_timeout(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main((*LAYER, "--timeout", "0.001", "--out", str(tmp_path / "out"))) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "The --timeout was too short for one measurement: use a longer one."


@pytest.mark.parametrize(("stopped", "code"), [("timeout", 0), ("interrupted", 130)])
def test_a_search_that_was_stopped_names_what_resumes_it(
    quick: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    stopped: str,
    code: int,
) -> None:
    run = ksopt.search.run_search

    def stops(*arguments: Any) -> SearchResult:
        return dataclasses.replace(run(*arguments), stopped=stopped)

    (rule,) = Plan.of({"16x16": "(4,4,4,1)*(1,4,4,4)"}).rules
    plan = Plan((dataclasses.replace(rule, where=Surroundings(("bias",), siblings=3)),))
    monkeypatch.setattr(ksopt.search, "run_search", stops)
    monkeypatch.setattr(ksopt.search, "plan_of", lambda result: plan)
    words = (*LAYER, "--trials", "2", "--out", str(tmp_path / "out"))
    assert main(words) == code
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == "The same command resumes this search."
    assert printed.out.splitlines()[-1].startswith(
        "next:   ksopt convert --model MODULE:FACTORY --inputs MODULE:FACTORY --plan "
    )
    assert main((*words, "--quiet")) == code
    assert capsys.readouterr().err == ""


def test_a_budget_without_a_chain_names_what_helps(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("search", "64x64", "--budget", "25%", "1", "--batch", "4", "--device", "cpu")
    assert main((*words, "--trials", "1", "--out", str(tmp_path / "out"))) == 0
    printed = capsys.readouterr()
    assert "the smallest one of this search has 768. A smaller --min-rank or fewer" in printed.out
    assert "timing 1 finalist of 64x64 in turns with dense" in printed.err


def test_a_space_writes_numbers_of_weights_with_commas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("space", "768x3072", "--budget", "1", "--limit", "0")) == 0
    assert "the smallest budget that works is 33,792 weights" in capsys.readouterr().out
