"""The search for lines that are written twice."""

from pathlib import Path

import equal_lines

TEXT = """
import math

def {name}(x):
    \"\"\"{name}.\"\"\"
    y = math.sqrt(x)

    # {name}
    y = y + 1
    y = y * {number}
    if y > 2:
        y = y / 2
    return y
"""


def test_runs_of_equal_lines(tmp_path: Path) -> None:
    files = [tmp_path / "one.py", tmp_path / "other.py"]
    for file, number in zip(files, (3, 4), strict=True):
        file.write_text(TEXT.format(name=file.stem, number=number), encoding="utf-8")
    runs = list(equal_lines.equal_runs(files, 2))
    assert [(a.text, b.text, length) for a, b, length in runs] == [
        ("y = math.sqrt(x)", "y = math.sqrt(x)", 2),
        ("if y > 2:", "if y > 2:", 3),
    ]
    assert [(a.file.name, a.number, b.file.name) for a, b, _ in runs] == [
        ("one.py", 6, "other.py"),
        ("one.py", 11, "other.py"),
    ]
    assert not list(equal_lines.equal_runs(files, 4))
