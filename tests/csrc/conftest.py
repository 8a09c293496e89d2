"""The host library, played on a CPU, for the tests that need it."""

import played_driver
import pytest
import torch
from seen_products import by_pythons_kernels

from ksopt.kernels import dispatch, host_plans, planner, weight_cache
from ksopt.kernels.backends import cuda


@pytest.fixture(scope="session")
def library():
    return played_driver.library()


@pytest.fixture
def played(library, monkeypatch):
    """The library in the place of the real one, the CPU in that of a CUDA device."""
    by_pythons_kernels(monkeypatch)
    monkeypatch.setattr(torch.ops, "ksopt_host", library.ops, raising=False)
    monkeypatch.setattr(dispatch, "run_known", cuda.run_known)
    monkeypatch.setattr(dispatch, "run_known_changing", cuda.run_known_changing)
    monkeypatch.setattr(dispatch, "run", cuda.run)
    monkeypatch.setattr(weight_cache, "is_capturing", lambda _: False)
    monkeypatch.setattr(cuda, "_launch_known", None)
    monkeypatch.setattr(cuda, "_launch_prepared", None)
    monkeypatch.setattr(host_plans, "_run_plan", None)

    def forget():
        cuda.forget()
        planner.forget()
        weight_cache.refresh()

    forget()
    with torch.no_grad():
        yield library
    forget()


@pytest.fixture
def serving(played):
    """The same, its own kernels of the products registered."""
    played.ops.serve_products(True)
    yield played
    played.ops.serve_products(False)
