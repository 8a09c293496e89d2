"""The table of the experiments' README has every script, and names files that exist."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
EXPERIMENTS = DOCS / "experiments"
TABLE = (EXPERIMENTS / "README.md").read_text(encoding="utf-8")
ROWS = [line.split("|") for line in TABLE.splitlines() if line.startswith("| `")]


def test_every_script_has_a_row():
    scripts = {path.name for path in EXPERIMENTS.glob("*.py")}
    folders = {f"{path.parent.name}/" for path in EXPERIMENTS.glob("*/*.py")}
    named = [name for row in ROWS for name in re.findall("`(.+?)`", row[1])]
    assert sorted(named) == sorted(scripts | folders)


def test_the_files_of_data_exist():
    for pattern in (name for row in ROWS for name in re.findall("`(.+?)`", row[3])):
        assert list((DOCS / "data").glob(pattern)), pattern
