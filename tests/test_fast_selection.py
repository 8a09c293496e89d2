"""`make test` leaves tests out, but no room: each has tests that are neither slow nor of a GPU."""

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from fast_files import FAST

ROOT = Path(__file__).parents[1]


def rooms() -> list[str]:
    """Folders of `ksopt/` and `search/` that hold code, as their tests are called."""
    folders = {file.parent for file in ROOT.glob("ksopt/*/*.py")}
    folders |= {file.parent for file in ROOT.glob("search/**/*.py")}
    return sorted(str(folder.relative_to(ROOT)).removeprefix("ksopt/") for folder in folders)


@pytest.fixture(scope="module")
def selected(pytestconfig: pytest.Config) -> Collection[str]:
    """The files of each test that `make test` runs; those of a GPU are skipped there."""
    if FAST in pytestconfig.stash:
        return pytestconfig.stash[FAST]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    chosen = ["-m", "not slow and not gpu", "tests"]
    done = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    return [line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow  # where this file is run alone, all tests are collected once more
@pytest.mark.parametrize("room", rooms())
def test_every_room_has_fast_tests(room: str, selected: Collection[str]) -> None:
    assert any(file.startswith(f"tests/{room}/") for file in selected)
