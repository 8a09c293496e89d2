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
