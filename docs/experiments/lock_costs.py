"""Locks and signs of life between processes: filelock's and Optuna's beside ksopt's.

    python docs/experiments/lock_costs.py

Prints the time from a lock's release in one process to its acquisition in another that waits for
it, the outcome of a lock in a folder that takes no file, whether the contents of a locked file
survive, and the time from a process's death to its detection by another process.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import filelock
import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages._heartbeat import get_heartbeat_thread, is_heartbeat_enabled
from optuna.storages.journal import JournalFileBackend

from ksopt.system.locks import Lock, is_held

OWN, OWN_LIMITED, FILELOCK = "ksopt", "ksopt, with a limit", "filelock"
BEAT_S = 1
"""The shortest interval that Optuna accepts; a trial is stale after twice as long."""
_LIMIT_S = 5.0

# Both processes read the same clock: time.monotonic is the machine's.
_LOCKS = """
import sys, time
from pathlib import Path
path, kind = Path(sys.argv[1]), sys.argv[2]
if kind == "filelock":
    import filelock
    lock = filelock.FileLock(path)
else:
    from ksopt.system.locks import Lock
    lock = Lock(path, None if kind == "ksopt" else 60.0)
print("waits", flush=True)
lock.acquire()
print(time.monotonic(), flush=True)
lock.release()
"""
_LIVES = """
import sys, time
from pathlib import Path
from ksopt.system.locks import Lock
Lock(Path(sys.argv[1])).acquire()
print("lives", flush=True)
time.sleep(60)
"""
_BEATS = """
import sys, time, warnings
warnings.simplefilter("ignore")
import optuna
from optuna.storages import RDBStorage
from optuna.storages._heartbeat import get_heartbeat_thread
optuna.logging.set_verbosity(optuna.logging.ERROR)
storage = RDBStorage(sys.argv[1], heartbeat_interval={beat})
study = optuna.create_study(study_name="one", storage=storage)
get_heartbeat_thread(study.ask()._trial_id, storage).start()
time.sleep(2)
print("lives", flush=True)
time.sleep(60)
"""


@contextmanager
def other_process(program: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Another Python that runs a program and has printed its first line; killed at the end."""
    command = [sys.executable, "-c", program, *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline(), "the process ended"
            yield process
        finally:
            process.kill()


def hand_over_ms(kind: str, path: Path) -> float:
    """Milliseconds from the release of a lock to its acquisition by a process that waits for it."""
    lock = filelock.FileLock(path) if kind == FILELOCK else Lock(path)
    lock.acquire()
    with other_process(_LOCKS, str(path), kind) as process:
        assert process.stdout is not None
        time.sleep(0.2 + 0.1 * random.random())  # at any moment of an interval
        released = time.monotonic()
        lock.release()
        return 1000 * (float(process.stdout.readline()) - released)


def refusal(take: Callable[[], object]) -> str:
    """The outcome of a lock that cannot be taken, with its time."""
    began = time.monotonic()
    try:
        take()
    except (OSError, filelock.Timeout) as error:
        return f"{type(error).__name__} after {time.monotonic() - began:.1f} s"
    return f"taken after {time.monotonic() - began:.1f} s"


def after_lock(take: Callable[[Path], object], folder: Path) -> str:
    """Whether a file's contents survive a lock on it."""
    file = folder / "data"
    file.write_text("contents", encoding="utf-8")
    take(file)
    return "kept" if file.read_text(encoding="utf-8") == "contents" else "lost"


def detected_s(dead: Callable[[], bool], process: subprocess.Popen[str]) -> float:
    """Seconds from a process's death to its detection."""
    process.send_signal(signal.SIGKILL)
    process.wait()
    began = time.monotonic()
    while not dead():
        time.sleep(0.001)
    return time.monotonic() - began


def own_detection_s(folder: Path) -> float:
    """By a lock that ends with the process."""
    path = folder / "presence"
    with other_process(_LIVES, str(path)) as process:
        assert is_held(path)
        return detected_s(lambda: not is_held(path), process)


def heartbeat_detection_s(folder: Path) -> float:
    """By Optuna's heartbeat in SQLite."""
    url = f"sqlite:///{folder / 'study.db'}"
    with other_process(_BEATS.replace("{beat}", str(BEAT_S)), url) as process:
        storage = RDBStorage(url, heartbeat_interval=BEAT_S)
        study = optuna.load_study(study_name="one", storage=storage)
        return detected_s(lambda: bool(storage._get_stale_trial_ids(study._study_id)), process)


def supports_heartbeat(storage: BaseStorage) -> str:
    """Whether Optuna writes heartbeats into a storage."""
    thread = type(get_heartbeat_thread(0, storage)).__name__
    return f"{is_heartbeat_enabled(storage)} ({thread})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30, help="hand-overs (%(default)s)")
    repeats = parser.parse_args(arguments).repeats
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")  # heartbeats are experimental
    print(f"filelock {filelock.__version__}, optuna {optuna.__version__}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in (OWN, OWN_LIMITED, FILELOCK):
            times = [hand_over_ms(kind, folder / "lock") for _ in range(repeats)]
            median, most = statistics.median(times), max(times)
            print(f"hand-over by {kind}: median {median:.2f} ms, longest {most:.2f} ms", flush=True)
        place = Path("/proc/a.lock")
        theirs = filelock.FileLock(place, timeout=_LIMIT_S)
        print(f"{place}, ksopt: {refusal(Lock(place).acquire)}")
        print(f"{place}, filelock with a limit of {_LIMIT_S:.0f} s: {refusal(theirs.acquire)}")
        print(f"a locked file's contents, ksopt: {after_lock(_own, folder)}")
        print(f"a locked file's contents, filelock: {after_lock(_theirs, folder)}")
        print(f"a dead process, by a lock: {1000 * own_detection_s(folder):.1f} ms")
        heartbeat = heartbeat_detection_s(folder)
        print(f"by Optuna's heartbeat every {BEAT_S} s: {heartbeat:.1f} s")
        journal = JournalStorage(JournalFileBackend(str(folder / "journal")))
        print(f"Optuna's heartbeat in a journal: {supports_heartbeat(journal)}")
    return 0


def _own(file: Path) -> None:
    with Lock(file):
        pass


def _theirs(file: Path) -> None:
    with filelock.FileLock(file):
        pass


if __name__ == "__main__":
    sys.exit(main())
