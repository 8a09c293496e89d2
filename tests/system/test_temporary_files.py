"""Half-written files of a killed process are removed by the next, and no others."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ksopt.system import temporary_files
from ksopt.system.atomic_files import new_folder, write_whole

HOLD = """
import sys, time
from pathlib import Path
from ksopt.system.atomic_files import new_folder
from ksopt.system.temporary_files import new_file
place = Path(sys.argv[1])
with new_file(place, ".report.html-") as (descriptor, path), new_folder(place / "model") as folder:
    (folder / "part").write_text("half")
    print("holding", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    """A process in the midst of writing report.html and the folder model."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holding\n"
    return process


def names(folder: Path) -> set[str]:
    return {place.name for place in folder.iterdir()}


def test_what_a_killed_process_left_is_removed_by_the_next(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert len(names(tmp_path)) == 2
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert len(names(tmp_path)) == 2
    write_whole(tmp_path / "report.html", "whole")
    assert "report.html" in names(tmp_path)
    assert len(names(tmp_path)) == 2
    with new_folder(tmp_path / "model") as folder:
        (folder / "part").write_text("whole")
    assert names(tmp_path) == {"report.html", "model"}
    assert (tmp_path / "model" / "part").read_text() == "whole"


def test_what_another_process_is_writing_stays(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    before = names(tmp_path)
    write_whole(tmp_path / "report.html", "whole")
    temporary_files.sweep(tmp_path, ".model-")
    assert names(tmp_path) == before | {"report.html"}
    holder.communicate("")
    assert names(tmp_path) == {"report.html", "model"}


def test_what_a_user_named_alike_stays(tmp_path: Path) -> None:
    (tmp_path / ".report.html-backup01").write_text("a user's")
    (tmp_path / ".report.html-a.partial").write_text("a user's")
    (tmp_path / "target").write_text("a user's")
    (tmp_path / ".report.html-abcdefgh.partial").symlink_to(tmp_path / "target")
    before = names(tmp_path)
    write_whole(tmp_path / "report.html", "whole")
    assert names(tmp_path) == before | {"report.html"}
    assert (tmp_path / "target").read_text() == "a user's"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_what_is_another_users_stays(tmp_path: Path) -> None:
    theirs = tmp_path / ".report.html-abcdefgh.partial"
    theirs.write_text("another user's")
    os.chown(theirs, 12345, 12345)
    write_whole(tmp_path / "report.html", "whole")
    assert theirs.exists()


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "report.html", "half \udc80")
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "model"):
        raise ZeroDivisionError
    assert names(tmp_path) == set()


def test_a_file_swept_before_it_is_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may see it between its creation and its lock."""
    hold, removed = temporary_files._hold, []

    def late(descriptor: int, name: str) -> bool:
        if not removed:
            removed.append(name)
            temporary_files.sweep(tmp_path, ".a-")
        return hold(descriptor, name)

    monkeypatch.setattr(temporary_files, "_hold", late)
    with temporary_files.new_file(tmp_path, ".a-") as (_, path):
        assert path.is_file()
        assert str(path) != removed[0]
    removed.clear()
    with temporary_files.new_folder(tmp_path, ".a-") as path:
        assert path.is_dir()
        assert str(path) != removed[0]
    assert names(tmp_path) == set()


def test_a_folder_swept_before_it_is_opened_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, removed = temporary_files.tempfile.mkdtemp, []

    def swept_at_once(*arguments: object) -> str:
        name = make(*arguments)
        if not removed:
            removed.append(name)
            temporary_files.sweep(tmp_path, ".a-")
        return name

    monkeypatch.setattr(temporary_files.tempfile, "mkdtemp", swept_at_once)
    with temporary_files.new_folder(tmp_path, ".a-") as path:
        assert path.is_dir()
        assert str(path) != removed[0]
    assert names(tmp_path) == set()
