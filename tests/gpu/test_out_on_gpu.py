"""Products written into passed memory on a CUDA device: right, and none is allocated beside it."""

import itertools
import re

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

from ksopt import ops
from ksopt.kernels import registry, weight_cache
from ksopt.kernels.backends import cpu, cuda
from ksopt.kernels.families.base import families
from ksopt.kernels.launcher import Launcher
from ksopt.nn import KSLinear
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

pytestmark = pytest.mark.gpu

SHAPES = [(2, 64, 48, 8), (1, 32, 64, 4), (3, 32, 32, 1), (4, 64, 64, 16), (1, 24, 40, 3)]
ROWS = (1, 7, 64, 1001)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Against float64, a result may be as far as twice PyTorch's own: sums in another order.
ALLOWED_RATIO = 2.0
SUM_ROUNDING = 2.0**-24 / 2  # of each addition in fp32, about, at random


@pytest.fixture(autouse=True)
def forget():
    cuda.forget()
    weight_cache.refresh()
    yield
    cuda.forget()
    weight_cache.refresh()


def draw(shape, rows, dtype, last):
    """x, weight, the product in float64, and what PyTorch's own result is off."""
    p = Pattern(*shape)
    weight = (torch.randn(shape, device="cuda") / p.c**0.5).to(dtype)
    x = torch.randn(rows, p.in_features, device="cuda").to(dtype)
    x = x.T.contiguous() if last else x
    truth = ks_reference(x.double(), weight.double(), "batch_last" if last else "batch_first")
    theirs = error_of(cpu.multiply_by_bmm(x, weight, last), truth)
    return x, weight, truth, max(theirs, SUM_ROUNDING * p.c**0.5)


def error_of(y, truth):
    return float((y.double() - truth).norm() / truth.norm())


def every_way(problem, rows):
    """PyTorch's ways, the general kernel, and the best tile of every family that can run here."""
    spec = cuda.spec_of(0)
    candidates = registry.pytorch(problem, rows, 1)
    for family in families():
        candidates += registry.ranked(family, problem, rows, spec)[:1]
    return candidates


def requested_outs(call):
    """Bytes of memory that a call takes from torch's allocator."""
    before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
    call()
    return torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - before


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_way_writes_into_it_and_takes_no_memory_for_y(shape, last, dtype):
    for rows in ROWS:
        x, weight, truth, theirs = draw(shape, rows, dtype, last)
        problem_key = cuda.problem_key_of(x, weight, last)
        for way, call in registry.built(every_way(problem_key.problem, rows), 0, problem_key.rows):
            for _ in range(2):  # prepares the weight, takes workspaces
                call(x, weight)
            out = torch.empty(truth.shape, dtype=dtype, device="cuda")
            without = requested_outs(lambda call=call, x=x, weight=weight: call(x, weight))
            out.fill_(torch.nan)
            with_out = requested_outs(
                lambda call=call, x=x, weight=weight, out=out: call(x, weight, out)
            )
            error = error_of(out, truth)
            assert error <= ALLOWED_RATIO * theirs, f"{way.label}, {rows} rows: {error:.2e}"
            # Their result, where it is contiguous, is copied; any other would be without out, too.
            copying = ("einsum_weight_first", "bmm_weight_first", "conv")
            is_copied = way.name in copying and without == with_out
            assert is_copied or without - with_out >= out.nbytes, f"{way.label}, {rows} rows"
            if not (way.is_pytorch or way.name in ("naive", "transpose_bmm")):
                assert with_out == 0, f"{way.label}, {rows} rows"
            memory = torch.full((out.numel() + 128,), torch.nan, dtype=dtype, device="cuda")
            inside = memory[64:-64].view(out.shape)  # aligned, between what must stay as it is
            call(x, weight, inside)
            assert error_of(inside, truth) <= ALLOWED_RATIO * theirs, f"{way.label}, {rows} rows"
            assert memory[:64].isnan().all()
            assert memory[-64:].isnan().all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
@pytest.mark.parametrize("op", [ops.ks_mm_inner_out, ops.ks_mm_repacked_out])
def test_the_operators_take_any_memory(shape, last, op, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "model")
    for dtype, rows in itertools.product(DTYPES, (7, 1001)):
        x, weight, truth, theirs = draw(shape, rows, dtype, last)
        elements = truth.numel()
        spaces = {
            "its own": torch.empty(truth.shape, device="cuda", dtype=dtype),
            "misaligned": torch.empty(elements + 1, device="cuda", dtype=dtype)[1:],
            "transposed": torch.empty(truth.shape[::-1], device="cuda", dtype=dtype).T,
        }
        for name, space in spaces.items():
            out = space.view(truth.shape)
            for _ in range(3):  # decided and prepared; registered with the host library; known
                out.fill_(torch.nan)
                op(x, weight, None, last, out=out)
                error = error_of(out, truth)
                assert error <= ALLOWED_RATIO * theirs, f"{name}, {dtype}, {rows} rows: {error:.2e}"
        if truth.numel() <= x.numel():
            op(x, weight, None, last, out=x.view(-1)[:elements].view(truth.shape))
            error = error_of(x.view(-1)[:elements].view(truth.shape), truth)
            assert error <= ALLOWED_RATIO * theirs, f"in x, {dtype}, {rows} rows: {error:.2e}"


@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_known_call_takes_no_memory(last, dtype, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "model")
    x, weight, truth, theirs = draw((4, 64, 64, 4), 1000, dtype, last)
    out = torch.empty(truth.shape, dtype=dtype, device="cuda")
    with torch.no_grad():
        for _ in range(2):
            ops.ks_mm_inner_out(x, weight, None, last, out=out)
        y = cuda.run_known(x, weight, last, out.fill_(torch.nan))
        if y is None or not isinstance(cuda.choice_for(x, weight, last).call, Launcher):
            pytest.skip("the choice on this device is not one kernel, or there is no host library")
        assert y.data_ptr() == out.data_ptr()
        assert error_of(out, truth) <= ALLOWED_RATIO * theirs
        assert requested_outs(lambda: ops.ks_mm_inner_out(x, weight, None, last, out=out)) == 0
        for other in (out.double(), out[..., :-1], out.T, x):
            assert cuda.run_known(x, weight, last, other) is None


class Blocks(nn.Module):
    """Products by a layer's parameter and by the author's own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            KSLinear(512, 512, text, bias=False)
            for text in ("(1,64,64,8)", "(8,64,64,1)", "(1,4,4,128)*(128,4,4,1)")
        )
        self.blocks = nn.Parameter(torch.randn(8, 64, 64) / 8)

    def forward(self, x):
        y = x
        for layer in self.layers:
            y = layer(y).relu()
        y = torch.bmm(y.view(-1, 8, 64).transpose(0, 1), self.blocks.mT)
        return x + y.transpose(0, 1).reshape(x.shape)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_compiled_model_writes_into_planned_memory(mode, dtype):
    torch._dynamo.reset()
    model = Blocks().to("cuda", dtype)
    options = {"mode": mode, "tune": "off"}
    tolerance = {torch.float32: 1e-4}.get(dtype, 4e-2)
    with torch.no_grad(), fresh_inductor_cache():
        compiled = torch.compile(model, backend="ksopt", options=options, fullgraph=True)
        _, (code, *_) = run_and_get_code(compiled, torch.randn(600, 512, device="cuda").to(dtype))
        products = re.findall(r"torch\.ops\.ksopt\.(ks_mm\w*\.\w+)\(", code)
        chains = re.findall(r"torch\.ops\.ksopt\.ks_chain\w*\.\w+\(", code)
        assert all(product.endswith(".out") for product in products), products
        assert len(products) + 2 * len(chains) == 5, (products, chains)
        for factor in (1, 1, -1, 1):  # recorded, replayed; the weight changed in between
            model.blocks.mul_(factor)
            x = torch.randn(600, 512, device="cuda").to(dtype)
            y = compiled(x).clone()
            torch.testing.assert_close(y, model(x), rtol=tolerance, atol=tolerance)


def test_a_compiled_chain_needs_two_results_at_a_time():
    torch._dynamo.reset()
    model = nn.Sequential(*(KSLinear(512, 512, "(1,64,64,8)", bias=False) for _ in range(6)))
    model, x = model.to("cuda", torch.bfloat16), torch.randn(4096, 512, device="cuda").bfloat16()
    with torch.no_grad():
        compiled = torch.compile(model, backend="ksopt", options={"tune": "off"}, fullgraph=True)
        for _ in range(2):
            compiled(x)
        y_bytes = x.nbytes
        assert requested_outs(lambda: model(x)) >= 6 * y_bytes
        ways_taken = {cuda.choice_for(x, layer.weights[0], False).name for layer in model}
        if ways_taken & {"transpose_bmm", "bmm", "bmm_paper", "einsum"}:
            pytest.skip(f"{', '.join(sorted(ways_taken))} take memory of their own")
        assert requested_outs(lambda: compiled(x)) <= 2 * y_bytes + 4096
