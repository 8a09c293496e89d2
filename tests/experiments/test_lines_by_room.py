"""The table of files and lines by room."""

import doctest
from pathlib import Path

import pytest

import lines_by_room

SOURCE = '''"""A module."""

import os  # what for


def f():
    """A docstring
    of two lines."""
    # why
    return """a text
    of two lines"""
'''


def test_its_examples_are_true() -> None:
    failed, tried = doctest.testmod(lines_by_room)
    assert tried > 1
    assert not failed


def test_lines_of_code_are_not_those_about_it() -> None:
    assert lines_by_room.code_lines(SOURCE) == 4


def test_contributing_has_both_tables() -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms, change_note = (
        [
            [cell.strip() for cell in line.split("|")[1:-1]]
            for line in text.split(f"\n## {title}\n")[1].split("\n## ")[0].splitlines()
            if line.startswith("|")
        ]
        for title in ("The rooms", "Change note")
    )
    assert all(len(row) == 2 and any(map(str.islower, row[1])) for row in rooms if row[0][0] == "`")
    assert [row[0] for row in change_note[2:-1]] == list(lines_by_room.ROOMS)


@pytest.mark.slow
def test_the_wheel_is_the_sum_of_its_rooms(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_by_room.main(["HEAD"]) == 0
    rows = {}
    for line in capsys.readouterr().out.splitlines()[2:]:
        _, room, files, lines, _ = (cell.strip().replace(",", "") for cell in line.split("|"))
        # The commas between the names of a room's folders are gone, too.
        rows[room] = int(files), int(lines)
    rooms = [*rows][: [*rows].index("the wheel")]
    csrc = 1  # a module that makes it a package
    assert sum(rows[room][0] for room in rooms) == rows["the wheel"][0] - csrc
    wheel, code = rows["the wheel"], rows["the wheel without docstrings comments and blank lines"]
    assert wheel[0] == code[0]
    assert wheel[1] > code[1] > wheel[1] / 2
