"""The file lock, where others have put something in its place."""

import errno
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from ksopt.system.locks import Busy, Lock, held_if_possible, is_held


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    file = tmp_path / "precious"
    file.write_text("years of work")
    return file


def test_a_link_is_not_followed(tmp_path: Path, precious: Path) -> None:
    path = tmp_path / ".lock"
    path.symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        Lock(path).acquire()
    with pytest.raises(OSError, match="symbolic links"):
        is_held(path)
    assert precious.read_text() == "years of work"


def test_a_link_to_nothing_makes_nothing(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.symlink_to(tmp_path / "new")
    with pytest.raises(OSError, match="symbolic links"):
        Lock(path).acquire()
    assert not (tmp_path / "new").exists()


def test_a_hard_link_is_not_emptied(tmp_path: Path, precious: Path) -> None:
    (tmp_path / ".lock").hardlink_to(precious)
    precious.chmod(0o640)
    with Lock(tmp_path / ".lock"):
        pass
    assert precious.read_text() == "years of work"
    assert precious.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ".lock"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    began = time.monotonic()
    with pytest.raises(OSError, match=r"regular file|directory"):
        Lock(path).acquire()
    assert time.monotonic() - began < 5


def test_a_folder_that_takes_no_file_is_refused_at_once() -> None:
    with pytest.raises(OSError, match=r"/proc/ksopt"):
        Lock(Path("/proc/ksopt.lock"), wait_s=5).acquire()


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "one"
    with pytest.raises(FileNotFoundError):
        is_held(path)
    with Lock(path) as first:
        assert first.created
        assert is_held(path)
        with pytest.raises(Busy):
            Lock(path, wait_s=0).acquire()
        with held_if_possible(path, wait_s=0.05) as problem:
            assert isinstance(problem, Busy)
    assert not is_held(path)
    with Lock(path, wait_s=0) as second:
        assert not second.created
    with held_if_possible(path) as problem:
        assert problem is None
        assert is_held(path)


def test_who_waits_for_a_lock_whose_file_goes_gets_a_lock_that_others_see(tmp_path: Path) -> None:
    path = tmp_path / "one"
    first, second = Lock(path), Lock(path)
    first.acquire()
    waiting = threading.Thread(target=second.acquire)
    waiting.start()
    time.sleep(0.2)  # until it waits
    first.release(remove=True)
    waiting.join(timeout=10)
    assert is_held(path)
    second.release(remove=True)
    assert not path.exists()


def _add(path: Path, counter: Path, times: int) -> None:
    for _ in range(times):
        lock = Lock(path)
        lock.acquire()
        number = int(counter.read_text())
        time.sleep(0.0005)
        counter.write_text(str(number + 1))
        lock.release(remove=number % 2 == 0)


def test_locks_whose_files_come_and_go_exclude_each_other(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_add, args=(tmp_path / "one", counter, 100)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert counter.read_text() == "400"


def test_a_file_system_without_locks_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with held_if_possible(tmp_path / "one") as problem:
        assert problem is not None
        assert problem.errno == errno.ENOLCK
