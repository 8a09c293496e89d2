"""Sharing of devices between GPU tests, and the report of a run that reached its time limit."""

import os

import pytest
import torch

# Where there are several devices, processes of pytest-xdist take one each, in turns: chosen before
# CUDA is initialised, so that device 0 is this one.
_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
_devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
if _worker and torch.cuda.device_count() > 1:
    if len(_devices) < torch.cuda.device_count():
        _devices = [str(index) for index in range(torch.cuda.device_count())]
    os.environ["CUDA_VISIBLE_DEVICES"] = _devices[int(_worker.removeprefix("gw")) % len(_devices)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once, not at the end."""
    if report.failed and not _worker:
        print(f"\n{report.nodeid}\n{report.longreprtext[-2000:]}\n")
