"""Every layer of the corpus is recognised and lowered, with equal results and gradients."""

import importlib.util
from pathlib import Path

import pytest
import torch

from ksopt.compile.sites import Verdict

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.py"))
KS_MM = {torch.ops.ksopt.ks_mm.default, torch.ops.ksopt.ks_mm_once.default}
KS_CHAIN = torch.ops.ksopt.ks_chain


def load(path: Path):
    spec = importlib.util.spec_from_file_location(f"corpus_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(function, parameters, x):
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    gradients = torch.autograd.grad(y.float().square().sum(), [leaf, *parameters])
    return [y, *gradients]


def sizes(shape, batch_dim, dynamic):
    yield shape
    if dynamic:
        for more in (1, 5):
            yield tuple(n + more if at == batch_dim else n for at, n in enumerate(shape))


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_is_lowered_and_equal(path, dynamic, compiled_by_eager):
    layer = load(path)
    torch.manual_seed(0)
    model = layer.build()
    parameters = [p for p in model.parameters() if p.requires_grad]
    compiled = torch.compile(
        model, backend="ksopt", fullgraph=True, dynamic=dynamic, options={"require": "all"}
    )
    dtype = getattr(layer, "DTYPE", torch.float32)
    # The same sums in another order; bfloat16 results are rounded at every factor.
    rtol, atol = (1e-4, 1e-5) if dtype is torch.float32 else (2e-2, 2e-2)
    compiles = None
    for shape in sizes(layer.INPUT, getattr(layer, "BATCH_DIM", 0), dynamic):
        x = torch.randn(shape)
        expected = results(model, parameters, x)
        actual = results(compiled, parameters, x)
        assert actual[0].dtype == expected[0].dtype
        if expected[0].is_contiguous():
            assert actual[0].is_contiguous()
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
        # One compile for every batch. (torch itself may restart a compile.)
        compiles = compiles or len(compiled_by_eager.graphs)
        assert len(compiled_by_eager.graphs) == compiles
    report = compiled_by_eager.reports[-1]
    assert [str(site.chain) for site in report.sites] == layer.CHAINS
    assert {site.verdict for site in report.sites} == {Verdict.LOWERED}
    factors = sum(len(site.chain) for site in report.sites)
    nodes = compiled_by_eager.graphs[-1].nodes
    products = sum(node.target in KS_MM for node in nodes)
    products += sum(len(node.args[1]) for node in nodes if node.target is KS_CHAIN)
    assert products == factors
    places = {site.place.file for site in report.sites if site.place.file}
    assert places <= {str(path)}


def test_the_corpus_is_as_large_as_it_should_be():
    assert len(CORPUS) >= 25
