"""The host library, played on a CPU, for the tests that need it."""

import played_driver
import pytest
import torch
from seen_products import by_pythons_kernels

from ksopt.kernels import plan_autotuner, weight_cache
from ksopt.kernels.backends import cuda


@pytest.fixture(scope="session")
def library():
    return played_driver.library()


@pytest.fixture
def played(library, monkeypatch):
    """The library in the place of the real one, the CPU in that of a CUDA device."""
    by_pythons_kernels(monkeypatch)
    for module, name, value in played_driver.stand_ins(library):
        monkeypatch.setattr(module, name, value, raising=False)

    def forget():
        cuda.forget()
        plan_autotuner.forget()
        weight_cache.refresh()

    forget()
    with torch.no_grad():
        yield library
    forget()


@pytest.fixture
def serving(played):
    """The same, its own kernels of the products registered."""
    played.ops.serve_products(True)
    played.ops.serve_input_gradients(True)
    yield played
    played.ops.serve_input_gradients(False)
    played.ops.serve_products(False)
