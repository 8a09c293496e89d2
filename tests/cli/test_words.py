"""The words of the command line: the shortest commands, and the errors of wrong words."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ksopt.cli.main import main
from ksopt.cli.verbosity import logged

TINY = ("--batch", "16", "--device", "cpu", "--trials", "2", "--budget", "50%")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    try:
        code = main(words)
    except SystemExit as leaving:  # argparse's way
        code = leaving.code  # type: ignore[assignment]
    assert code == 2
    return capsys.readouterr().err


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "words", [("32x64", *TINY), (*TINY[:4], "32x64", *TINY[4:]), ("--dims", "32x64", *TINY)]
)
def test_a_size_needs_no_option(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["search", *words, "--json", "--out", str(tmp_path / "r")]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["dims"] == ["32x64"]


@pytest.mark.usefixtures("quick")
def test_several_sizes_of_both_kinds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["search", "32x64", "64x32", *TINY, "--trials", "3", "--dims", "16x16", "--json"]
    assert main([*words, "--out", str(tmp_path / "r")]) == 0
    dims = json.loads(capsys.readouterr().out)["request"]["dims"]
    assert dims == ["32x64", "64x32", "16x16"]


def test_a_space_of_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["space", "16x32", "--budget", "50%", "--limit", "1"]) == 0
    first = capsys.readouterr().out
    assert main(["space", "--dims", "16x32", "--budget", "50%", "--limit", "1"]) == 0
    assert capsys.readouterr().out == first
    assert "give one size" in refused(capsys, "space")
    assert "give one size" in refused(capsys, "space", "16x32", "--dims", "16x32")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("serch", "8x8"), "did you mean 'search'?"),
        (("search", "8x8", "--trails", "3"), "did you mean '--trials'?"),
        (("search", "8x8", "--buget=25%"), "did you mean '--budget'?"),
        (("search", "8x8", "--dtype", "flaot16"), "did you mean 'float16'?"),
        (("search", "8x8", "--layout", "batchlast"), "did you mean 'batch_last'?"),
        (("search", "8x8", "--device", "cdua"), "did you mean 'cuda'?"),
        (("search", "8x8", "--objective", "latnecy"), "did you mean 'latency'?"),
        (("search", "8x8", "--families", "monach"), "did you mean 'monarch'?"),
        (("search", "8x8", "--epilogue", "bais"), "did you mean 'bias'?"),
        (("search", "8x8", "--structures", "kss"), "did you mean 'ks'?"),
        (("space", "8x8", "--order", "weigths"), "did you mean 'weights'?"),
        (("search", "--budget", "25%", "768x3072"), "ksopt search 768x3072 --budget"),
        (("search", "8x8", "--batch", "4", "16x16"), "write sizes beside each other"),
        (("completion", "bahs"), "did you mean 'bash'?"),
    ],
)
def test_the_nearest_right_word(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refused(capsys, *words)


def test_nothing_near_is_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean" not in refused(capsys, "search", "8x8", "--frobnicate")
    assert "did you mean" not in refused(capsys, "show", "(1,2,2,1)", "--out", "x.svg")
    assert "did you mean" not in refused(capsys, "search", "8x8", "--dtype", "xyz")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("show", "monarch"), "'monarch' is not a pattern: write (a,b,c,d) with four integers"),
        (("show", "(1,0,4,2)"), "'(1,0,4,2)' is not a pattern: b must be at least 1, got 0"),
        (("show", "(1,2,2,1)*x"), "'(1,2,2,1)*x' is not a chain: 'x' is not a pattern"),
        (("show", "(1,2,3,4)*(2,3,4,1)"), "(1,2,3,4)*(2,3,4,1) is not a chain: factor 1"),
        (("explain-kernel", "monarch"), "'monarch' is not a pattern"),
        (("explain-kernel", "(0,4,4,2)"), "'(0,4,4,2)' is not a pattern: a must be at least 1"),
        (
            ("explain-kernel", "(1,4,4,2)", "--in-float32"),
            "a result is cast to float32 where its operands are of 16 bit and it has no residual; "
            "this is of float32",
        ),
        (("tune", "--pattern", "(0,1,1,1)"), "'(0,1,1,1)' is not a pattern: a must be"),
        (("tune", "--chain", "monarch"), "'monarch' is not a pattern"),
        (("bench", "kernels", "--chain", "(1,1,1,0)"), "'(1,1,1,0)' is not a pattern: d must be"),
        (("bench", "kernels", "--patterns", "x"), "--patterns 'x': it must be paper, sample:N"),
        (
            ("bench", "kernels", "--patterns", "sample:0"),
            "--patterns 'sample:0': N of sample:N must be a whole number from 1 to 627",
        ),
        (("bench", "kernels", "--patterns", "sample:628"), "--patterns 'sample:628': N of"),
        (("bench", "kernels", "--patterns", "sample:\u00b2"), "--patterns 'sample:\u00b2': N of"),
        (("bench", "kernels", "--patterns", "random:\u00b2"), "--patterns 'random:\u00b2': N of"),
        (
            ("bench", "kernels", "--patterns", "paper", "--inductor-sample", "-1"),
            "bench: --inductor-sample must be at least 0, got -1",
        ),
        (("bench", "kernels", "--timeout", "0"), "--timeout 0: it must be above 0 seconds"),
        (("bench", "models", "--timeout", "0"), "--timeout 0: it must be above 0 seconds"),
        (("bench", "paper", "--minutes", "0"), "--minutes 0: it must be above 0"),
        (("bench", "models", "--chain", "x", "--small"), "--chain x: 'x' is not a pattern"),
    ],
)
def test_an_error_begins_with_what_was_typed(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device = ("--device", "cpu") if words[0] in ("tune", "bench") else ()
    message = refused(capsys, *words, *device)
    assert message.startswith(f"ksopt: {expected}")
    assert len(message.splitlines()) == 1


def test_a_count_of_one_is_singular(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "(1,1,1,1)"]) == 0
    printed = capsys.readouterr().out
    assert "out_features=1: 1 weight, 100% of the dense layer's 1." in printed
    assert "1 weights" not in printed
    assert main(["space", "1x1", "--factors", "1", "--budget", "100%"]) == 0
    assert "1 chain of at most 1 factor, 1 weight (100%)" in capsys.readouterr().out
    assert "the dense layer's 1 weight: give at most 100%" in refused(
        capsys, "space", "1x1", "--budget", "2"
    )
    assert main(["explain-kernel", "(1,4,4,2)", "--batch", "1", "--gpu", "A100"]) == 0
    assert ", 1 row\n" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_report_of_one_trial_and_one_row_is_singular(tmp_path: Path) -> None:
    words = ["search", "1x1", "--batch", "1", "--device", "cpu", "--trials", "1"]
    words += ["--budget", "100%", "--factors", "1", "--out", str(tmp_path / "r")]
    assert main(words) == 0
    report = (tmp_path / "r" / "report.md").read_text(encoding="utf-8")
    assert "(1 weight)" in report
    assert "random input of 1 row:" in report
    plural = r"\b1 (weights|chains|trials|rows|factors|layers|finalists|repeats)\b"
    assert re.findall(f"(?<![.,]){plural}", report) == []


def headings(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    return re.findall(r"^(\w.*):$", capsys.readouterr().out, flags=re.MULTILINE)


def test_common_options_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    titles = headings(capsys, "search")
    assert titles[:2] == ["what is searched: one of these", "common options"]
    assert {"the chains", "the search", "a model's layers"} <= set(titles)
    assert titles.index("output and errors") > titles.index("the search")
    assert "options" not in titles


@pytest.mark.parametrize(
    "words",
    [["search"], ["report"], ["space"], ["show"], ["explain"], ["explain-kernel"], ["convert"],
     ["doctor"], ["tune"], ["bench", "kernels"], ["bench", "models"], ["completion"]],
)  # fmt: skip
def test_every_command_has_the_same_last_options(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    last = capsys.readouterr().out.partition("output and errors:")[2]
    for option in ("--help", "--json", "--quiet", "--verbose", "--traceback"):
        assert option in last, option


@pytest.mark.usefixtures("quick")
def test_quiet_leaves_the_answer_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["search", "32x64", *TINY, "--quiet", "--out", str(tmp_path / "r")]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "report.html" in printed.out


@pytest.mark.usefixtures("quick")
def test_verbose_logs_each_trial(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    level = logging.getLogger("ksopt").level
    words = ["search", "32x64", *TINY, "--quiet", "-v", "--out", str(tmp_path / "r")]
    assert main(words) == 0
    lines = capsys.readouterr().err.splitlines()
    assert sum("ksopt.search: trial" in line for line in lines) == 2
    logger = logging.getLogger("ksopt")
    assert (logger.level, logger.handlers, logger.propagate) == (level, [], True)


def test_details_are_for_two_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    for count, expected in ((0, []), (1, ["done"]), (2, ["done", "detail"])):
        with logged(count, sys.stderr):
            logging.getLogger("ksopt.test").info("done")
            logging.getLogger("ksopt.test").debug("detail")
        lines = capsys.readouterr().err.splitlines()
        assert [line.split(": ")[-1] for line in lines] == expected


@pytest.mark.slow
def test_torch_logs_takes_the_logger() -> None:
    script = "import logging, torch; print(logging.getLogger('ksopt').level)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TORCH_LOGS": "ksopt"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(logging.INFO), done.stderr


def test_completion_knows_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for word in ("search", "report", "--budget", "--epilogue", "kernels"):
        assert word in script, word
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_completion_without_its_library(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "zsh"]) == 1
    assert "ksopt[completion]" in capsys.readouterr().err
