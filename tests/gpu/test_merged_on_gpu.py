"""Layers that are multiplied by the product of their factors, on a GPU."""

import pytest
import torch
from torch.nn import functional as F

import ksopt
from ksopt import KSLinear
from ksopt.kernels import mergeable, merged, plan_autotuner, registry
from ksopt.kernels.candidate import MERGED, Candidate
from ksopt.reference import chain_reference

pytestmark = pytest.mark.gpu

CHAIN = "(1,128,128,8)*(8,128,128,1)"  # a Monarch layer of 1024 features
TO_FACTOR = "(4,32,32,8)*(1,128,128,8)"  # (1,128,128,8)
WITH_ZEROS = "(16,64,64,1)*(1,8,8,128)"  # no pattern has its product's support
TO_LARGE_FACTOR = "(8,64,8,2)*(1,64,512,2)"  # (1,512,512,2), of 7 times the weights
N = 1024


def by_merging_at_once(problem, *_):
    return [Candidate(MERGED, problem, 1e-3)] if mergeable.can_merge(problem) else []


@pytest.fixture(autouse=True)
def the_fastest(monkeypatch, tmp_path):
    """Merging is predicted to be the fastest, and nothing is timed."""
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KSOPT_TUNE", "model")
    monkeypatch.setattr(registry, "by_merging", by_merging_at_once)
    plan_autotuner.forget()
    torch._dynamo.reset()
    yield
    plan_autotuner.forget()
    torch._dynamo.reset()


@pytest.fixture
def merges(monkeypatch):
    result = []
    usual = merged.merge

    def counted(weights, siblings=1):
        result.append(usual(weights, siblings))
        return result[-1]

    monkeypatch.setattr(merged, "merge", counted)
    return result


def layer(dtype, chain=CHAIN, **around):
    torch.manual_seed(0)
    return KSLinear(N, N, chain, device="cuda", dtype=dtype, **around)


def check(y, model, x):
    weights = [weight.detach().double() for weight in model.weights]
    truth = F.gelu(chain_reference(x.double(), weights) + model.bias.detach().double())
    z = x
    for weight in reversed(list(model.weights)):
        a, _, c, d = weight.shape
        z = torch.einsum("nacd,abcd->nabd", z.view(-1, a, c, d), weight).reshape(len(z), -1)
    theirs = F.gelu(z + model.bias)
    allowed = 2 * (theirs.double() - truth).norm() + 1e-6 * truth.norm()
    assert (y.double() - truth).norm() <= allowed


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 16, 256, 4096])
@pytest.mark.parametrize("chain", [CHAIN, TO_FACTOR, TO_LARGE_FACTOR, WITH_ZEROS])
def test_a_layer_is_as_exact_as_its_author(chain, dtype, rows, merges):
    model = layer(dtype, chain, activation="gelu")
    x = torch.randn(rows, N, device="cuda", dtype=dtype)
    for _ in range(3):
        check(model(x), model, x)
    assert len(merges) == 1
    model.weights[0].mul_(-2)
    check(model(x), model, x)
    assert len(merges) == 2


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 65, 3000])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_what_is_not_finite_reaches_what_it_reaches_in_the_chain(dtype, rows, bias, last, merges):
    torch.manual_seed(rows)
    layout = "batch_last" if last else "batch_first"
    for text in (WITH_ZEROS, "(14,3,18,2)*(4,63,6,2)", "(132,3,144,1)*(36,88,2,6)"):
        chain = ksopt.Chain.parse(text)
        sizes = chain.in_features, chain.out_features
        model = KSLinear(*sizes, text, bias=bias, device="cuda", dtype=dtype)
        weights = list(model.weights)
        x = torch.randn(rows, chain.in_features, device="cuda", dtype=dtype)
        x[rows // 2, 3], x[rows - 1, 0] = torch.inf, torch.nan
        x = x.T.contiguous() if last else x
        exact = chain_reference(x.double(), [one.double() for one in weights], layout)
        if bias:
            exact += model.bias.double()[:, None] if last else model.bias.double()
        finite = exact.isfinite()
        for _ in range(2):  # by Python, and by the host library
            y = ksopt.ks_linear(x, weights, model.bias, layout)
            assert torch.equal(y.isfinite(), finite)
            assert torch.equal(y.isnan(), exact.isnan())
            off = (y.double() - exact)[finite].norm() / exact[finite].norm()
            assert off <= {torch.bfloat16: 8e-3, torch.float32: 1e-5}[dtype]
    assert len(merges) == 3


@torch.no_grad()
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("chain", [CHAIN, TO_FACTOR, WITH_ZEROS])
def test_a_compiled_layer_reads_the_weights_as_they_are(chain, mode, merges):
    model = layer(torch.bfloat16, chain, activation="gelu")
    compiled = torch.compile(model, backend="ksopt", mode=mode)
    x = torch.randn(256, N, device="cuda", dtype=torch.bfloat16)
    for _ in range(4):
        check(compiled(x).clone(), model, x)
    assert merges
    for weight in model.weights:
        weight.mul_(-2)
        check(compiled(x).clone(), model, x)
    model.weights[0].data.mul_(0.5)
    ksopt.refresh()
    check(compiled(x).clone(), model, x)


@torch.no_grad()
def test_a_graph_of_ones_own_does_not_merge(merges):
    model = layer(torch.bfloat16, activation="gelu")
    x = torch.randn(256, N, device="cuda", dtype=torch.bfloat16)
    model(x)
    merges.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
    assert not merges
    model.weights[1].mul_(-2)
    graph.replay()
    torch.cuda.synchronize()
    check(y, model, x)


@torch.no_grad()
@pytest.mark.parametrize("chain", [CHAIN, TO_FACTOR])
def test_another_stream_waits_for_the_product(chain, merges):
    model = layer(torch.float32, chain, activation="gelu")
    x = torch.randn(256, N, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        model(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        y = model(x)
    torch.cuda.synchronize()
    check(y, model, x)
    assert len(merges) == 1
