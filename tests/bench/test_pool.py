"""Worker processes run each task once, and report what they cannot run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ksopt.bench import pool
from ksopt.errors import KsoptError

MODULE = """
import sys

import torch

from ksopt.bench import pool
from ksopt.bench.request import Subject
from ksopt.bench.results import Row
from ksopt.measure.device_health import DeviceLostError
from ksopt.patterns.chain import Chain


class Runner:
    def __init__(self, options, device):
        self.device = torch.device(device)
        self.ready = {"started": options["name"]}
        self.ahead = []

    def compile_ahead(self, tasks, compilers):
        self.ahead = [task["number"] for task in tasks]

    def run(self, task):
        if task["number"] == 7:
            subject = Subject(Chain.parse("(1,2,2,1)"), 4)
            row = Row(subject, "kernel", "batch_first", 0, 0, 1.0, None)
            raise DeviceLostError("7 broke it", [row])
        if task["number"] < 0:
            raise ValueError("numbers are positive")
        return {"result": 2 * task["number"], "ahead": self.ahead}


sys.exit(pool.serve(Runner))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module whose workers double numbers."""
    (tmp_path / "doubling_worker.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "doubling_worker"


def answered(
    module: str,
    numbers: list[int],
    answers: list[Mapping[str, Any]],
    most: int = 100,
    workers: int = 1,
) -> None:
    tasks = [{"number": number} for number in numbers]

    def is_over() -> bool:
        return sum("result" in one for one in answers) >= most

    for answer in pool.answers(module, {"name": "toy"}, tasks, ["cpu"] * workers, is_over):
        answers.append(answer)


def test_workers_share_the_tasks(module: str) -> None:
    answers: list[Mapping[str, Any]] = []
    answered(module, [1, 2, 3], answers, workers=2)
    assert answers.count({"started": "toy"}) == 2
    results = {one["number"]: one for one in answers if "result" in one}
    assert {number: one["result"] for number, one in results.items()} == {1: 2, 2: 4, 3: 6}
    assert all(one["ahead"] in ([1, 3], [2]) for one in results.values())


@pytest.mark.slow
def test_no_task_begins_once_it_is_over(module: str) -> None:
    answers: list[Mapping[str, Any]] = []
    answered(module, [1, 2, 3], answers, most=2)
    assert [one["result"] for one in answers if "result" in one] == [2, 4]


def test_the_rows_of_a_lost_device_come_before_its_error(module: str) -> None:
    answers: list[Mapping[str, Any]] = []
    with pytest.raises(KsoptError, match="cpu: 7 broke it"):
        answered(module, [1, 7, 2], answers)
    assert [one["number"] for one in answers[1:]] == [1, 7]
    (row,) = answers[-1]["result"]
    assert row["way"] == "kernel"


@pytest.mark.slow
def test_another_error_is_reported_with_its_type(module: str) -> None:
    answers: list[Mapping[str, Any]] = []
    with pytest.raises(KsoptError, match="cpu: ValueError: numbers are positive"):
        answered(module, [-1], answers)
    assert answers == [{"started": "toy"}, {}]
