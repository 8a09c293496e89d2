"""The command line: accepted arguments, refusals, and output streams."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import ksopt
from ksopt.cli.main import main

SMALL = ("search", "--dims", "32x64", "--batch", "16", "--device", "cpu", "--trials", "3")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run words that must be refused as misuse; return the sentence."""
    try:
        code = main(words)
    except SystemExit as leaving:  # argparse's way
        code = leaving.code  # type: ignore[assignment]
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    *stages, sentence = printed.err.splitlines()
    assert sentence.startswith("ksopt")
    assert not any("Traceback" in line or "rror" in line for line in stages), printed.err
    return sentence


@pytest.mark.parametrize("dims", ["768", "768x", "x768", "768x3072x4", "axb", "0x64", "-8x8", ""])
def test_malformed_dims(capsys: pytest.CaptureFixture[str], dims: str) -> None:
    assert re.search(r"INxOUT|at least 1", refused(capsys, "search", f"--dims={dims}"))


def test_dims_are_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--dims" in refused(capsys, "search")


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("0%", "more than 0"),
        ("0", "more than 0"),
        ("300%", "at most 100%"),
        ("1.5", "at most 1.0"),
        ("9999999", "at most 100%"),
        ("25q", "600k, 2.4M"),
        ("nan", "600k, 2.4M"),
        ("", "600k, 2.4M"),
    ],
)
def test_budgets_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], budget: str, words: str
) -> None:
    assert words in refused(capsys, *SMALL, "--budget", budget)


def test_one_bad_step_of_a_ladder_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'300%'" in refused(capsys, *SMALL, "--budget", "25%", "300%")


def test_a_budget_that_no_chain_meets_names_the_smallest_that_works(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    message = refused(capsys, *SMALL, "--budget", "1%", "--out", str(tmp_path / "report"))
    smallest = re.search(r"([\d,]+) weights|at least ([\d,]+)", message)
    assert "1%" in message
    assert smallest is not None, message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--dtype", "int8"), "float32, float16 or bfloat16"),
        (("--layout", "sideways"), "batch_last"),
        (("--device", "toaster"), "toaster"),
        (("--device", "cuda:99"), "cuda:99"),
        (("--trials", "-1"), "at least 1"),
        (("--trials", "0"), "at least 1"),
        (("--trials", "many"), "not a whole number"),
        (("--batch", "0"), "at least 1"),
        (("--batch", "1.5"), "not a whole number"),
        (("--factors", "0"), "at least 1"),
        (("--factors", "9"), "at most 3"),
        (("--seed", "-1"), "at least 0"),
        (("--timeout", "0"), "more than 0"),
        (("--timeout", "-5"), "more than 0"),
        (("--timeout", "nan"), "more than 0"),
        (("--timeout", "soon"), "not a number"),
        (("--min-rank", "0"), "at least 1"),
        (("--min-rank", "33"), "= 32"),
        (("--min-use", "2"), "from 0 to 1"),
        (("--storage", "nonsense"), "nonsense"),
        (("--frobnicate",), "--frobnicate"),
    ],
)
def test_arguments_that_are_not_allowed(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: tuple[str, ...],
    expected: str,
) -> None:
    assert expected in refused(capsys, *SMALL, "--out", str(tmp_path / "report"), *words)


def test_an_output_folder_that_cannot_be_created(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert "file" in refused(capsys, *SMALL, "--out", str(tmp_path / "file" / "report"))
    assert "file" in refused(capsys, *SMALL, "--out", str(tmp_path / "file"))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc takes no folder, even from root")
def test_an_output_folder_that_may_not_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/proc/report" in refused(capsys, *SMALL, "--out", "/proc/report")


def test_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert "serch" in refused(capsys, "serch")
    assert "COMMAND" in refused(capsys)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == f"ksopt {ksopt.__version__}\n"
    for words in (["--help"], ["search", "--help"], ["doctor", "--help"]):
        with pytest.raises(SystemExit) as leaving:
            main(words)
        assert leaving.value.code == 0
        assert "usage: ksopt" in capsys.readouterr().out


def test_help_needs_no_heavy_package() -> None:
    script = (
        "import sys; from ksopt.cli.main import main\n"
        "try: main(['search', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'optuna', 'pandas', 'numpy', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("device", ["cdua", "cuda"])
def test_a_device_that_cannot_be_here_is_refused_before_torch_is_imported(device: str) -> None:
    """An import of torch takes seconds. The driver is one that no machine has."""
    script = (
        "import sys; from ksopt.cli.main import main; from ksopt.system import device_names\n"
        "device_names._DRIVER = 'libno_such_driver.so.1'\n"
        f"code = main(['search', '768x3072', '--device', {device!r}])\n"
        "sys.exit(code if 'torch' not in sys.modules else 'torch was imported')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert f"device '{device}' is not available" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_search_prints_a_table_and_where_the_report_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "report"
    assert main([*SMALL, "--budget", "50%", "--out", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "dense" in printed
    assert str(folder) in "".join(printed.split("\n"))
    for name in ("report.md", "report.html", "results.json", "trials.csv"):
        assert (folder / name).stat().st_size > 0


@pytest.mark.usefixtures("brief")
def test_search_json_is_one_document_and_nothing_else(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Nor does a process that it starts print anything there."""
    words = [*SMALL, "--budget", "50%", "--out", str(tmp_path / "report"), "--json"]
    assert main(words) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed == json.loads((tmp_path / "report" / "results.json").read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("budget", [(), ("--budget",)])
def test_no_budget_is_the_ladder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, budget: tuple[str, ...]
) -> None:
    assert main([*SMALL, "--out", str(tmp_path / "report"), "--json", *budget]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r'"text": "(\d+%)"', printed)[:3] == ["10%", "25%", "50%"]


@pytest.mark.slow
def test_ctrl_c_stops_it_with_130_and_no_traceback(tmp_path: Path) -> None:
    words = ["search", "--dims", "256x256", "--trials", "100000", "--device", "cpu", "--out", "r"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ksopt", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "r").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2)  # into the measurements
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130, message
    assert "Traceback" not in message


def test_a_failure_is_one_sentence_without_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("ksopt.doctor.advice.diagnose", broken)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err.startswith("ksopt: ZeroDivisionError: division by zero")
    with pytest.raises(ZeroDivisionError):
        main(["doctor", "--traceback"])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ksopt.errors.InvalidInputError("no"), 2),
        (ksopt.errors.UnavailableError("no"), 1),
        (ksopt.errors.CompilationError("no"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_error_has_its_exit_code(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
) -> None:
    def broken() -> None:
        raise error

    monkeypatch.setattr("ksopt.doctor.advice.diagnose", broken)
    assert main(["doctor"]) == code
    assert capsys.readouterr().err in ("ksopt: no\n", "ksopt: stopped\n")


def test_doctor_prints_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    rows = dict(line.split(maxsplit=1) for line in printed.split("\n\n")[0].splitlines())
    assert rows["ksopt"].startswith(ksopt.__version__)
    assert rows["torch"] == torch.__version__
    count = torch.get_num_threads()
    assert rows["cpu"].endswith(f"torch uses {count} thread{'' if count == 1 else 's'}")


def test_doctor_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["ksopt"] == ksopt.__version__


@pytest.mark.slow
def test_a_reader_that_has_gone_is_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ksopt", "doctor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == ""


@pytest.mark.parametrize("word", ["--dtype=--", "--out=a\0b", "a\0b"])
def test_words_that_no_argument_can_be(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["tune", "--pattern", "(1,4,4,2)", word])
    assert leaving.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ksopt tune: ")
    assert repr(word).strip("'") in line
