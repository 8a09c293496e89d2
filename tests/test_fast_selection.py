"""`make test` leaves tests out, but no room: each has tests that are neither slow nor of a GPU."""

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from fast_files import FAST

ROOT = Path(__file__).parents[1]


def rooms() -> list[str]:
    """Folders of code, as their tests are called; a part without a folder of tests has its room's.

    Modules outside of packages have the tests that are in no folder.
    """
    files = [*ROOT.glob("ksopt/**/*.py"), *ROOT.glob("search/**/*.py"), *ROOT.glob("csrc/*.py")]
    code = {file.relative_to(ROOT).parent for file in files}
    folders = {Path("tests", *part.parts[part.parts[0] == "ksopt" :]) for part in code}
    return sorted({str(_with_tests(folder)) for folder in folders})


def _with_tests(folder: Path) -> Path:
    is_part = len(folder.parts) > 2 and not (ROOT / folder).is_dir()
    return _with_tests(folder.parent) if is_part else folder


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


@pytest.mark.parametrize("folder", rooms())
def test_every_room_has_fast_tests(folder: str, selected: Collection[str]) -> None:
    whole = folder == "tests"
    assert any(
        str(Path(file).parent) == folder if whole else file.startswith(f"{folder}/")
        for file in selected
    )
