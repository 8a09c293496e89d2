"""Kernels that read a weight's elements in order, by weights that are stored in another."""

import pytest
import torch

from ksopt import ops
from ksopt.kernels import registry, weight_cache, weight_scopes
from ksopt.kernels.autotuner import Choice, Decision
from ksopt.kernels.backends import cuda
from ksopt.kernels.families.base import family_of
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

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
ALLOWED = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# How the memory of a weight (a, b, c, d) is ordered, and the way back.
STORED = {"by groups": ((0, 3, 1, 2), (0, 2, 3, 1)), "transposed": ((0, 2, 1, 3), (0, 2, 1, 3))}


class Case:
    """Operands whose product is decided to be a family's kernel."""

    def __init__(self, name, stored):
        self.dtype = CASES[name]
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
        choice = Choice(way, way.build(0), "model")
        assert choice.call.entry().repacks
        cuda.remember(problem_key, 0, Decision(choice, choice))

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


@pytest.fixture(params=[(name, stored) for name in CASES for stored in STORED], ids="-".join)
def case(request):
    cuda.forget()
    weight_cache.refresh()
    with torch.no_grad():
        yield Case(*request.param)
    cuda.forget()
    weight_cache.refresh()


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
