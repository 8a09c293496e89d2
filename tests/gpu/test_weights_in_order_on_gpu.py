"""Weights stored in another order than (a, b, c, d): put in order, or packed as they are."""

import pytest
import torch

from ksopt import ops
from ksopt.kernels import registry, weight_cache, weight_scopes
from ksopt.kernels.autotuner import Choice, Decision
from ksopt.kernels.backends import cuda
from ksopt.kernels.families.base import family_of
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference
from tests.gpu.test_factor_epilogue_on_gpu import kernels_of

pytestmark = pytest.mark.gpu

PATTERN = Pattern(2, 64, 64, 8)
ROWS = 64
CASES = {
    "mma16": torch.float16,
    "wgmma16": torch.bfloat16,
    "decode_mma16": torch.bfloat16,
    "decode_fma": torch.float32,
    "mma_tf32x3": torch.float32,
}
PACKED = {
    "wgmma16_streamed": torch.bfloat16,
    "wgmma_tf32x3": torch.float32,
    "gather_mma_packed": torch.float16,
}
ALLOWED = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# How the memory of a weight (a, b, c, d) is ordered, and the way back.
STORED = {"by groups": ((0, 3, 1, 2), (0, 2, 3, 1)), "transposed": ((0, 2, 1, 3), (0, 2, 1, 3))}


class Case:
    """Operands whose product is decided to be a family's kernel."""

    def __init__(self, name, stored):
        self.dtype = (CASES | PACKED)[name]
        there, self.back = STORED[stored]
        self.x = torch.randn(ROWS, PATTERN.in_features, device="cuda").to(self.dtype)
        values = torch.randn(PATTERN.weight_shape, device="cuda") / PATTERN.c**0.5
        self.memory = values.to(self.dtype).permute(there).contiguous()
        problem_key = cuda.problem_key_of(self.x, self.weight, False)
        family = family_of(name)
        spec = cuda.spec_of(0)
        reason = family.unsupported_reason(problem_key.problem, spec)
        if reason is not None:
            pytest.skip(f"{name}: {reason}")
        way = registry.ranked(family, problem_key.problem, ROWS, spec)[0]
        self.choice = Choice(way, way.build(0), "model")
        cuda.remember(problem_key, 0, Decision(self.choice, self.choice))

    @property
    def weight(self):
        weight = self.memory.permute(self.back)
        assert weight.shape == PATTERN.weight_shape
        assert not weight.is_contiguous()
        return weight

    def known(self):
        return cuda.run_known(self.x, self.weight, False)

    def check(self, y):
        truth = ks_reference(self.x.double(), self.weight.double())
        error = float((y.double() - truth).norm() / truth.norm())
        assert error <= ALLOWED[self.dtype], error


@pytest.fixture
def nothing_known():
    cuda.forget()
    weight_cache.refresh()
    with torch.no_grad():
        yield
    cuda.forget()
    weight_cache.refresh()


@pytest.fixture(params=[(name, stored) for name in CASES for stored in STORED], ids="-".join)
def case(request, nothing_known):
    case = Case(*request.param)
    assert case.choice.call.entry().repacks
    return case


@pytest.fixture(params=[(name, stored) for name in PACKED for stored in STORED], ids="-".join)
def packed_case(request, nothing_known):
    return Case(*request.param)


def test_a_cached_weight_is_put_in_order_once_a_version(case):
    assert case.known() is None
    for _ in range(2):
        case.check(ops.ks_mm(case.x, case.weight))
        case.check(case.known())
        assert weight_cache.cached_bytes(case.x.device) == case.memory.nbytes
        case.memory.mul_(-1.5)
        assert case.known() is None


def test_a_changing_weight_is_put_in_order_at_each_call(case):
    case.check(ops.ks_mm(case.x, case.weight))
    weight_cache.refresh()
    for _ in range(2):
        out = torch.full((ROWS, PATTERN.out_features), torch.nan, device="cuda", dtype=case.dtype)
        ops.ks_mm_repacked_out(case.x, case.weight, case.memory, out=out)
        case.check(out)
        with weight_scopes.repacked():
            case.check(case.known())
        case.memory.data.mul_(1.5)  # which torch does not count
    assert weight_cache.cached_bytes(case.x.device) == 0


def test_a_captured_graph_reads_the_weight_of_its_replay(case):
    case.check(ops.ks_mm(case.x, case.weight))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.ks_mm(case.x, case.weight)
    for _ in range(2):
        graph.replay()
        case.check(y)
        case.memory.mul_(-2)


def test_a_changing_weight_is_packed_as_it_is_stored(packed_case):
    """By Python and by the host library: two kernels, of which none is a copy of torch's."""
    case = packed_case
    case.check(ops.ks_mm(case.x, case.weight))
    weight_cache.refresh()
    calls = [case.known, lambda: case.choice.call(case.x, case.weight)]
    with weight_scopes.repacked():
        for call in calls:
            case.memory.data.mul_(-1.5)
            case.check(call())
            pack, multiply = kernels_of(call)
            assert "_pack_" in pack
            assert multiply.startswith("ksopt_")


@pytest.mark.parametrize("name", PACKED)
def test_a_weight_is_packed_alike_from_any_order(name, nothing_known):
    for stored in STORED:
        case = Case(name, stored)
        pack = case.choice.call.pack
        expected = pack(case.weight.contiguous())
        assert torch.equal(pack(case.weight).view(torch.int16), expected.view(torch.int16))
