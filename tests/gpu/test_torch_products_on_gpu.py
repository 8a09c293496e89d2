"""PyTorch's batched products and the transposes around them, launched by the host library."""

import pytest
import torch
from devices import H200
from torch import nn

from ksopt import ops
from ksopt.kernels import weight_cache, weight_scopes
from ksopt.kernels.autotuner import Choice, Decision, _preparing
from ksopt.kernels.backends import cuda
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common.pytorch_ops import multiplier
from ksopt.kernels.families.transpose_bmm import Config
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

transpose_bmm = family_of("transpose_bmm")

pytestmark = pytest.mark.gpu

ALLOWED = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in ALLOWED]
PATTERNS = [
    Pattern(1, 64, 96, 1),
    Pattern(4, 64, 96, 1),
    Pattern(1, 32, 48, 8),
    Pattern(4, 96, 32, 16),
    Pattern(2, 1, 64, 8),
    Pattern(2, 64, 1, 8),
]
STORED = {
    "as it is": lambda w: w.contiguous(),
    "transposed": lambda w: w.transpose(1, 2).contiguous().transpose(1, 2),
    "by groups": lambda w: w.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
}


@pytest.fixture(autouse=True)
def forget():
    cuda.forget()
    weight_cache.refresh()
    with torch.no_grad():
        yield
    cuda.forget()
    weight_cache.refresh()


class Case:
    """Operands whose product is decided to be a way, for weights of both kinds."""

    def __init__(self, name, pattern, dtype, last=False, stored="as it is", rows=72):
        self.last, self.dtype = last, dtype
        features = pattern.in_features
        shape = (features, rows) if last else (rows, features)
        self.x = torch.randn(shape, device="cuda").to(dtype)
        values = torch.randn(pattern.weight_shape, device="cuda") / pattern.c**0.5
        self.weight = nn.Parameter(STORED[stored](values.to(dtype)), requires_grad=False)
        problem_key = cuda.problem_key_of(self.x, self.weight, last)
        if name == "bmm_loop" and min(pattern.a, pattern.d) == 1:
            pytest.skip("bmm_loop: one product is enough")
        if name == "transpose_bmm":
            reason = transpose_bmm.unsupported_reason(problem_key.problem, H200)
            if reason is not None:
                pytest.skip(f"transpose_bmm: {reason}")
            call = transpose_bmm.launcher(problem_key.problem, Config(problem_key.problem.dtype), 0)
        else:
            call = multiplier(name, problem_key.problem)
        if call.entry() is None:
            pytest.skip("there is no host library on this machine")
        cached, fresh = (
            Choice(Candidate(name, problem_key.problem, 1.0), _preparing(call, weight_is), "model")
            for weight_is in ("cached", "repacked")
        )
        cuda.remember(problem_key, 0, Decision(cached, fresh))

    def known(self, out=None):
        return cuda.run_known(self.x, self.weight, self.last, out)

    def check(self, y):
        assert y.is_contiguous()
        layout = "batch_last" if self.last else "batch_first"
        truth = ks_reference(self.x.double(), self.weight.detach().double(), layout)
        error = float((y.double() - truth).norm() / truth.norm())
        assert error <= ALLOWED[self.dtype], error


WAYS = [
    *(("bmm", False), ("bmm", True), ("transpose_bmm", False)),
    *(("bmm_loop", True), ("einsum", False), ("einsum", True), ("bmm_weight_first", False)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize(("name", "last"), WAYS)
def test_what_is_known_is_right_and_right_after_a_change(name, last, pattern, stored, dtype):
    case = Case(name, pattern, dtype, last, stored)
    case.check(ops.ks_mm(case.x, case.weight, last))
    out = torch.full_like(case.known(), torch.nan)
    for repacked in (False, True):
        with weight_scopes.repacked(repacked):
            case.check(case.known())
            assert case.known(out.fill_(torch.nan)).data_ptr() == out.data_ptr()
            case.check(out)
    case.weight.mul_(-3)
    case.check(ops.ks_mm(case.x, case.weight, last))
    case.check(case.known())


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("name", "last"), WAYS)
def test_a_graph_reads_the_weight_of_its_replay(name, last, stored):
    case = Case(name, Pattern(4, 96, 32, 16), torch.bfloat16, last, stored)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            ops.ks_mm(case.x, case.weight, last)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.ks_mm(case.x, case.weight, last)
    for _ in range(2):
        case.weight.mul_(-2)
        graph.replay()
        case.check(y)


@pytest.mark.parametrize(("name", "last"), WAYS)
def test_the_current_stream_is_the_one_that_multiplies(name, last):
    case = Case(name, Pattern(4, 96, 32, 16), torch.float16, last)
    ops.ks_mm(case.x, case.weight, last)
    new = torch.randn_like(case.x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        case.x.copy_(new)
        with weight_scopes.repacked():
            y = case.known()
    stream.synchronize()
    case.check(y)


@pytest.mark.parametrize(("name", "last"), WAYS)
def test_one_row_and_several_batch_dims(name, last):
    for rows in (1, 8):
        case = Case(name, Pattern(4, 96, 32, 16), torch.float16, last, rows=rows)
        case.check(ops.ks_mm(case.x, case.weight, last))
        case.check(ops.ks_mm(case.x, case.weight, last))
    x = case.x.view(-1, 2, 4) if last else case.x.view(2, 4, -1)
    y = cuda.run_known(x, case.weight, last)
    assert y is not None
    case.check(y.flatten(1) if last else y.flatten(0, 1))
