"""The report of a run that reached its time limit."""

import os

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once, not at the end."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}\n{report.longreprtext[-2000:]}\n")
