"""Whole models whose authors wrote Kronecker-sparse layers: every site lowered, training equal."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

from ksopt.compile.sites import Verdict

MODELS = sorted((Path(__file__).parent / "models").glob("*.py"))


def load(path: Path):
    spec = importlib.util.spec_from_file_location(f"model_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step(run, model, x):
    """One training step: the loss, and the gradients."""
    model.zero_grad()
    loss = torch.nn.functional.cross_entropy(run(x).flatten(0, -2), torch.arange(rows(run, x)) % 7)
    loss.backward()
    return [loss, *(parameter.grad for parameter in model.parameters())]


def rows(run, x):
    return x.shape[0] if x.is_floating_point() else x.numel()


@pytest.mark.parametrize(
    "dynamic",
    [
        pytest.param(False, id="static"),
        pytest.param(True, id="dynamic", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_every_site_is_lowered_and_a_step_is_equal(path, dynamic, compiled_by_eager):
    module = load(path)
    model = module.build()
    twin = copy.deepcopy(model)
    options = {"require": "all"}
    compiled = torch.compile(
        model, backend="ksopt", fullgraph=True, dynamic=dynamic, options=options
    )
    x = module.example()
    # The same float32 sums in another order, through all layers.
    torch.testing.assert_close(step(compiled, model, x), step(twin, twin, x), rtol=1e-3, atol=1e-5)
    report = compiled_by_eager.reports[-1]
    assert report.count(Verdict.LOWERED) == len(report.sites) == module.SITES_PER_BLOCK
    assert report.covered > 0.5
