"""Fixtures of the backend's tests."""

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from ksopt.compile import backend, passes


@pytest.fixture(autouse=True)
def fresh():
    """Reset Dynamo, the counters and the random state."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    # Where opt_einsum is installed, it has torch compile einsums of many operands for each batch.
    with torch.backends.opt_einsum.flags(enabled=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def graph_caches():
    """torch keeps compiled graphs, as it does for users."""
    with torch._inductor.config.patch(fx_graph_cache=True):
        yield


@pytest.fixture
def compiled_by_eager(monkeypatch):
    """Rewritten graphs run through AOTAutograd, but eagerly: Inductor is slow, and Inductor's.

    Returns:
        The graphs and the reports of whatever the test compiles.
    """
    seen = SimpleNamespace(graphs=[], reports=[])

    def compile_by_inductor(gm, example_inputs, config):
        seen.graphs.append(gm.graph)
        return aot_eager(gm, example_inputs)

    def rewrite_graph(*args, **kwargs):
        report = passes.rewrite_graph(*args, **kwargs)
        seen.reports.append(report)
        return report

    monkeypatch.setattr(backend, "compile_by_inductor", compile_by_inductor)
    monkeypatch.setattr(backend, "rewrite_graph", rewrite_graph)
    return seen
