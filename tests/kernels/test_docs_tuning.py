"""docs/tuning.md runs as it stands: its commands and its Python."""

import re
import shlex

import pages
import pytest

from ksopt.cli.main import _parser, main
from ksopt.kernels import autotuner, registry
from ksopt.kernels.backends import cpu
from ksopt.kernels.problem import FEW_ROWS
from ksopt.measure import interleaved

PAGE = pages.DOCS / "tuning.md"
TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)[0].splitlines()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    cpu.forget()
    yield
    cpu.forget()


def test_the_commands_run_one_after_the_other(capsys):
    shown = []
    for command in COMMANDS:
        program, *words = shlex.split(command)
        assert program == "ksopt"
        assert main([*words, "--device", "cpu"]) == 0, command
        shown.append(capsys.readouterr().out)
    assert "2 choices, 2 measured now" in shown[0]
    assert "4 choices, 4 measured now" in shown[1]
    tuned = sum(int(out.splitlines()[-2].split()[0]) for out in shown[:3])
    assert f"{tuned} choices, 0 measured now" in shown[3]
    assert '"recorded"' in shown[4]


def test_the_gpus_command_is_understood():
    (command,) = re.findall(r"On a GPU: `(.*?)`", TEXT)
    parsed = _parser().parse_args(shlex.split(command)[1:])
    assert parsed.batch == [64, 25088]


def test_the_python_runs_as_it_stands():
    assert pages.faults(PAGE) == []


def test_the_options_are_the_command_lines():
    table = TEXT.split("| option | meaning | default |")[1].split("\n\n")[0]
    named = set(re.findall(r"`(--[a-z0-9-]+)`", table))
    usage = _parser()._subparsers._group_actions[0].choices["tune"].format_help()
    options = set(re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", usage, flags=re.MULTILINE))
    assert named == options - {"--help", "--json", "--quiet", "--traceback", "--verbose"}


def test_the_numbers_are_the_codes():
    assert registry.MOST_KERNELS == 11
    assert "at\nmost 11, side by side" in TEXT
    assert interleaved.BUDGET_S == 0.5
    assert "about half\na second" in TEXT
    assert (interleaved._TIE, interleaved._TIE_US, interleaved._NOISY_TIE) == (1.01, 0.2, 1.05)
    assert "those within 1 % of it, those whose samples differ by 0.2 us or less, and" in TEXT
    assert "own spread (up to its 80th percentile, at most 5 %)" in TEXT
    assert "those within 0.2 us of it join them" in TEXT
    assert (FEW_ROWS, autotuner._SERIES, autotuner._SERIES_BYTES) == (128, 8, 256 << 20)
    assert "Up to 128 rows a sample is a series of up to 8 products" in TEXT
    assert "as dense matrices they would take more\n  than 256 MiB" in TEXT
    assert cpu.BUDGET_S == 0.02
    assert "takes 20 ms" in TEXT
