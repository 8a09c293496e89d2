"""The experiments' README has every script and every file of docs/data, and names no others."""

import doctest
import re
from pathlib import Path

import fit_weight_gradients
from ksopt.kernels.families import weight_grad_mma16

DOCS = Path(__file__).parents[2] / "docs"
EXPERIMENTS = DOCS / "experiments"
TABLE = (EXPERIMENTS / "README.md").read_text(encoding="utf-8")
ROWS = [line.split("|") for line in TABLE.splitlines() if line.startswith("| `")]


def test_every_script_has_a_row():
    scripts = {path.name for path in EXPERIMENTS.glob("*.py")}
    folders = {f"{path.parent.name}/" for path in EXPERIMENTS.glob("*/*.py")}
    named = [name for row in ROWS for name in re.findall("`(.+?)`", row[1])]
    assert sorted(named) == sorted(scripts | folders)


def patterns() -> set[str]:
    """The files of data that the table names, and the text below it: those of `ksopt bench`."""
    below = re.findall(r"`(\S+?\.csv)`", TABLE.rpartition("|\n")[2])
    return {name for row in ROWS for name in re.findall("`(.+?)`", row[3])}.union(below)


def test_the_files_of_data_exist():
    for pattern in patterns():
        assert list((DOCS / "data").glob(pattern)), pattern


def test_every_file_of_data_is_named():
    files = {path.name for path in (DOCS / "data").iterdir()}
    assert files - {path.name for one in patterns() for path in (DOCS / "data").glob(one)} == set()


def test_the_examples_of_the_fit_are_true():
    failed, tried = doctest.testmod(fit_weight_gradients)
    assert tried
    assert not failed


def test_the_fit_of_weight_gradients_has_both_constants(capsys):
    fit_weight_gradients.main([])
    out = capsys.readouterr().out
    assert out.count("  code: ") == out.count("  fitted: ") == 3
    assert f"TFLOPS: code {weight_grad_mma16.TFLOPS:.4g}, fitted " in out
