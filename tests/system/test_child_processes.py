"""Processes that end with their parent, also while they import."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ksopt.system import child_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux sends that signal")

PARENT = """
import subprocess, sys
from ksopt.system import child_processes
words = {
    "module": child_processes.module("slow"),
    "program": child_processes.program(["sleep", "60"]),
}
print(subprocess.Popen(words[sys.argv[1]]).pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["module", "program"])
def test_it_ends_with_a_killed_parent_while_it_imports(kind: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n", encoding="utf-8")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, kind],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.5)  # it is in its sleep
    os.kill(child, 0)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    until = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        state = Path(f"/proc/{child}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        if state[0] == "Z":  # it stays a zombie where no process adopts orphans
            return
        time.sleep(0.02)
    assert not Path(f"/proc/{child}").exists()


def test_one_whose_parent_has_ended_before_it_could_ask_ends_at_once() -> None:
    words = [
        word if word != str(os.getpid()) else "1" for word in child_processes.program(["echo", "a"])
    ]
    done = subprocess.run(words, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, b"")


def test_words_arrive_and_exit_codes_return() -> None:
    words = ["sh", "-c", "echo $0; exit 3", "a b"]
    done = subprocess.run(
        child_processes.program(words), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (3, "a b\n")


def test_a_module_sees_what_it_would_see_of_python_m(tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text("import sys\nprint(__name__, sys.argv)\n", encoding="utf-8")
    done = subprocess.run(
        child_processes.module("seen"), cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == f"__main__ ['{tmp_path / 'seen.py'}']"
