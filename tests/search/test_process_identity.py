"""Liveness of processes, by the process itself if visible, else by a lock."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ksopt.search import device_locks, process_identity
from ksopt.search.device_locks import Presence, is_gone
from ksopt.system.worker_process import WorkerProcess

SAY = """
import sys
from ksopt.search.device_locks import Presence
with Presence() as presence:
    print(presence.token, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def other() -> tuple[subprocess.Popen[str], str]:
    """A process that is present, and its token."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def present(cache: Path) -> set[str]:
    return {path.name for path in (cache / "locks").glob("worker-*")}


@pytest.mark.slow
def test_a_killed_process_is_gone_and_its_file_goes_with_the_next(
    other: tuple[subprocess.Popen[str], str], cache: Path
) -> None:
    process, token = other
    host = os.uname().nodename
    assert is_gone(host, token) is False
    with Presence() as presence:
        assert present(cache) == {f"worker-{token}", f"worker-{presence.token}"}
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert is_gone(host, token) is True
        assert is_gone(host, presence.token) is False
    assert is_gone(host, presence.token) is None  # its search has ended: it may be long in ending
    assert present(cache) == {f"worker-{token}"}
    with Presence() as presence:
        assert present(cache) == {f"worker-{presence.token}"}
    assert is_gone(host, token) is True  # also without the file
    assert is_gone("another host", token) is None


def test_a_number_that_another_process_has_now_is_not_taken_for_the_first() -> None:
    name = process_identity.name("abcd")
    assert process_identity.has_ended(name) is False
    pid, place, start, letters = name.split("-")
    assert process_identity.has_ended(f"{pid}-{place}-{int(start) - 1}-{letters}") is True
    other = f"{int(place, 16) ^ 1:08x}"
    assert process_identity.has_ended(f"{pid}-{other}-{start}-{letters}") is None
    assert process_identity.has_ended(f"{pid}-{letters}") is None  # as older versions named it
    assert process_identity.has_ended("1-../../etc-1-a") is None


def test_a_process_that_its_parent_has_not_buried_is_gone(
    other: tuple[subprocess.Popen[str], str],
) -> None:
    process, token = other
    process.send_signal(signal.SIGKILL)
    until = time.monotonic() + 30
    while process_identity.has_ended(token) is False and time.monotonic() < until:
        time.sleep(0.01)
    assert process_identity.has_ended(token) is True
    process.communicate()


@pytest.mark.slow
def test_where_processes_are_unknown_the_lock_decides(
    other: tuple[subprocess.Popen[str], str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a process in another container with the same cache."""
    process, token = other
    monkeypatch.setattr(process_identity, "has_ended", lambda name: None)
    host = os.uname().nodename
    assert is_gone(host, token) is False
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with Presence():
        assert f"worker-{token}" in present(cache)
    assert is_gone(host, token) is True
    file = cache / "locks" / f"worker-{token}"
    os.utime(file, (time.time() - 2 * device_locks._RETENTION_S,) * 2)
    with Presence():
        assert f"worker-{token}" not in present(cache)


def test_an_answer_cut_off_by_a_kill_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that hears must go on to say that the process has ended."""
    start = subprocess.Popen

    def cut_off(arguments: object, **options: object) -> object:
        script = 'print(\'{"trial": 3, "share": 0}\\n{"tri\', end="", flush=True)'
        return start([sys.executable, "-c", script], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", cut_off)
    heard: list[object] = []
    with WorkerProcess("ksopt.search.worker", heard.append) as worker:
        worker.send({})
        until = time.monotonic() + 30
        while {"ended": 0} not in heard and time.monotonic() < until:
            time.sleep(0.01)
    assert heard == [{"trial": 3, "share": 0}, {"ended": 0}]
