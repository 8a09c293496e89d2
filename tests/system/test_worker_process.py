"""Worker processes: tasks in, answers out, and their end."""

import queue
import sys
from pathlib import Path
from typing import Any

import pytest

from ksopt.system.worker_process import WorkerProcess, ended

WORKER = """
import os, sys

from ksopt.system import worker_process

answer = worker_process.answers()
print("not an answer", flush=True)
first = worker_process.first_task()
if first is None:
    sys.exit(3)
lines = worker_process.listen(code=4)
answer({"first": first})
while True:
    line = lines.get()
    if line == "broken":
        os._exit(5)
    answer({"line": line})
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "echoes.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "echoes"


def test_lines_go_there_and_back(module: str, capfd: pytest.CaptureFixture[str]) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with WorkerProcess(module, answers.put) as worker:
        worker.send({"a": 1})
        worker.send([2])
        assert answers.get(timeout=60) == {"first": {"a": 1}}
        assert answers.get(timeout=60) == {"line": [2]}
        worker.send("broken")
        assert answers.get(timeout=60) == {"ended": 5}
        worker.send("too late")
        assert worker.has_ended
    assert "not an answer" in capfd.readouterr().err


@pytest.mark.parametrize("patience_s", [0.0, 20.0])
def test_closing_ends_it(module: str, patience_s: float) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with WorkerProcess(module, answers.put, patience_s=patience_s) as worker:
        worker.send(1)
        assert answers.get(timeout=60) == {"first": 1}
        assert not worker.has_ended
    assert worker.has_ended
    assert answers.get(timeout=60) == {"ended": -15 if patience_s else -9}


def test_a_worker_that_answers_nothing_is_silent(
    module: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with WorkerProcess(module, own_session=sys.platform == "linux") as worker:
        worker.send(1)
    assert worker.has_ended
    assert capfd.readouterr() == ("", "")


def test_an_end_in_words() -> None:
    assert ended(1) == "ended with exit status 1"
    assert ended(-15) == "was ended by signal 15"
