"""The examples run as a user would run them, with the right output."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from short_compilation import as_users_have_it

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env=as_users_have_it() | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_digits(tmp_path: Path) -> None:
    printed = run("digits.py", "--seeds", "1", "--epochs", "12", folder=tmp_path)
    row = r"^ *(dense|KS|narrow dense) +([\d,]+) +([\d.]+) %"
    networks = {
        name: (int(count.replace(",", "")), float(accuracy))
        for name, count, accuracy in re.findall(row, printed, flags=re.MULTILINE)
    }
    assert set(networks) == {"dense", "KS", "narrow dense"}, printed
    # The two hidden Monarch chains (p = 4 and p = 8), their biases, and the dense last layer.
    assert networks["KS"][0] == (4 * 128 * 16 + 4 * 16 * 16) + 2 * 8 * 64 * 64 + 2 * 512 + 5130
    assert networks["dense"][0] == 64 * 512 + 512 * 512 + 2 * 512 + 5130
    assert 0.97 * networks["KS"][0] < networks["narrow dense"][0] <= networks["KS"][0]
    # A linear classifier reaches about 95 % on this data: less means that training is broken.
    assert all(accuracy > 95 for _, accuracy in networks.values()), printed


@pytest.mark.slow
def test_distil_digits(tmp_path: Path) -> None:
    printed = run("distil_digits.py", folder=tmp_path)
    accuracies = dict(re.findall(r"^(\w+) +([\d.]+) %", printed, flags=re.MULTILINE))
    dense, converted, distilled = (
        float(accuracies[name]) for name in ("dense", "converted", "distilled")
    )
    assert dense > 95
    assert converted < distilled > dense - 2


@pytest.mark.slow
def test_compile_model(tmp_path: Path) -> None:
    printed = run("compile_model.py", "--batch", "16", "--device", "cpu", folder=tmp_path)
    assert "compiled and eager agree" in printed
    times = re.findall(r"^(.{18}) +([\d.]+) us", printed, flags=re.MULTILINE)
    names = [name.strip() for name, _ in times]
    assert names == ["dense, Inductor", "KS, eager", "KS, backend ksopt"], printed
    assert all(float(median) > 0 for _, median in times)
