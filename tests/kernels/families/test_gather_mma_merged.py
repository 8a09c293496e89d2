"""Chains as one matrix with holes: what is supported, and the kernel on the CPU."""

import pytest
import torch
from checks import H200, gpu
from packed_kernels import PackedKernel, without_predicates
from packed_kernels import instances as packed_instances

from ksopt.kernels import mergeable, registry
from ksopt.kernels.candidate import merges
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.gather_mma_merged import GatherMmaHoles, MergedLauncher, matrix_of
from ksopt.kernels.merged import merge_with_holes
from ksopt.kernels.problem import Epilogue, Problem
from ksopt.patterns.chain import Chain
from ksopt.reference import chain_reference, chain_to_dense

merged = family_of("gather_mma_merged")

CHAIN = Chain.parse("(3,5,2,7)*(2,21,11,1)")
CHAINS = [
    CHAIN,
    Chain.parse("(24,3,1,1)*(4,1,8,6)*(64,3,2,1)"),
    Chain.parse("(42,2,4,2)*(1,48,1,7)"),
    Chain.parse("(24,3,1,1)*(4,1,8,6)"),
]


def problem_of(chain, dtype="bfloat16", **rest):
    return Problem(chain, dtype, False, **rest)


def draw(chain, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.weight_shape, generator=generator).to(dtype) for p in chain]


@pytest.mark.parametrize("chain", CHAINS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_holes_are_where_no_path_leads(chain, dtype):
    assert chain.product_support is None
    weights = draw(chain, dtype)
    for weight in weights:
        weight.view(-1)[::3] = 0  # some paths have a weight of zero, of either sign
        weight.view(-1)[1::7] = -0.0
    matrix = merge_with_holes(weights)
    support = chain_to_dense([torch.ones_like(weight).double() for weight in weights]) > 0
    is_hole = (matrix == 0) & matrix.signbit()
    assert torch.equal(is_hole, ~support)
    exact = chain_to_dense([weight.double() for weight in weights])
    magnitude = chain_to_dense([weight.double().abs() for weight in weights])
    rounding = 2**-8 if dtype == torch.bfloat16 else 2**-22
    assert ((matrix.double() - exact).abs() <= rounding * magnitude).all()


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (problem_of(CHAIN), None),
        (problem_of(CHAIN, "float32", epilogue=Epilogue(True, "gelu", True)), None),
        (problem_of(CHAIN, "float16"), "float16"),
        (problem_of(CHAIN[:1], epilogue=Epilogue(True)), "factor"),
        (problem_of(Chain.parse("(1,6,5,5)*(5,5,7,1)")), "factor"),
        (problem_of(CHAIN, siblings=2), "one chain"),
        (Problem(CHAIN, "bfloat16", True), "batch_last"),
        (problem_of(Chain.parse("(3000,1,3,2)*(2000,9,3,1)")), "elements"),
    ],
    ids=str,
)
def test_what_it_takes(problem, reason):
    answer = merged.unsupported_reason(problem, H200)
    assert answer is None if reason is None else reason in (answer or "")


def test_it_is_a_rival_for_parameters_only():
    problem = problem_of(Chain.parse("(21,16,242,2)*(6,77,8,22)"))
    several = registry.candidates(problem, 425, H200)
    ours = [one for one in several if one.name == merged.name]
    assert ours
    assert all(one.takes_parameters and one.prepares_weight for one in ours)
    assert merges(merged.name)
    assert not merges("gather_mma")
    assert mergeable.product_in_words(problem) == "one dense matrix of 1.4 MiB"


def cases():
    for at, chain in enumerate(CHAINS):
        for dtype in ("bfloat16", "float32"):
            problem = problem_of(chain, dtype)
            tiles = [one for one in merged.configs(problem, gpu(2)) if one.bm <= 32]
            yield problem, tiles[(7 * at + 3) % len(tiles)]


CASES = list(cases())


@pytest.mark.sweep
@pytest.mark.parametrize(("problem", "tile"), CASES, ids=str)
def test_what_is_not_finite_reaches_what_it_met(emulator, problem, tile):
    """The kernel on the CPU, which meets infinities, NaN and ordinary rows."""
    by_matrix = matrix_of(problem)
    built = emulator.build(packed_instances(GatherMmaHoles(), by_matrix, tile), without_predicates)
    kernel = PackedKernel(*built)
    dtype = getattr(torch, problem.dtype)
    weights = draw(problem.chain, dtype)
    x = torch.randn(37, problem.chain.in_features, generator=torch.Generator().manual_seed(1))
    x = x.to(dtype)
    matrix = merge_with_holes(weights).view(by_matrix.pattern.weight_shape)
    truth = chain_reference(x.double(), [weight.double() for weight in weights])
    magnitude = chain_reference(x.double().abs(), [weight.double().abs() for weight in weights])
    allowed = magnitude * (2**-7 if dtype == torch.bfloat16 else 2**-19) + 1e-30
    for rows in (x, x[:16]):
        y = kernel(rows, matrix)
        assert ((y.double() - truth[: len(rows)]).abs() <= allowed[: len(rows)]).all()
    hit = x.clone()
    hit[2, 0], hit[36, -1], hit[20, 1] = torch.inf, torch.nan, -torch.inf
    y, expected = kernel(hit, matrix), chain_reference(hit, weights)
    assert torch.equal(y.isfinite(), expected.isfinite())
    finite = expected.isfinite()
    assert ((y.double() - truth).abs() <= allowed)[finite].all()


class ByMatrix:
    """A `PackedLauncher` on the CPU."""

    form = "merged, for a test"

    def __init__(self, problem):
        self.problem = problem
        self.packs = 0

    def pack(self, weight):
        self.packs += 1
        return weight.clone()

    def multiply(self, x, packed, out=None):
        y = x @ packed[0, :, :, 0].T
        return y if out is None else out.copy_(y)


def launcher_of(problem):
    by_matrix = ByMatrix(matrix_of(problem))
    return MergedLauncher(problem, by_matrix, 4 * by_matrix.problem.pattern.nnz), by_matrix


@torch.no_grad()
def test_a_layer_makes_its_matrix_once_a_version():
    problem = problem_of(CHAIN, "float32", epilogue=Epilogue(True, "gelu", True))
    call, by_matrix = launcher_of(problem)
    weights = [torch.nn.Parameter(weight) for weight in draw(CHAIN)]
    x, bias = torch.randn(5, CHAIN.in_features), torch.randn(CHAIN.out_features)
    residual = torch.randn(5, CHAIN.out_features)
    assert call.may_keep(weights)
    assert not call.is_cached(weights)
    for times in (1, 2):
        y = chain_reference(x, weights) + bias
        expected = torch.nn.functional.gelu(y) + residual
        spread = torch.empty(5, CHAIN.out_features, 2)[..., 0]
        for out in (None, torch.empty_like(expected), spread):
            y = call(x, weights, bias, residual, out)
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
            assert out is None or y is out
        assert by_matrix.packs == times
        assert call.is_cached(weights)
        weights[1].mul_(-2)
    assert not call.may_keep(draw(CHAIN))


@torch.no_grad()
def test_a_product_that_is_not_finite_is_not_used():
    call, _ = launcher_of(problem_of(CHAIN, "float32"))
    weights = [torch.nn.Parameter(weight) for weight in draw(CHAIN)]
    weights[0].view(-1)[3] = torch.inf
    x = torch.randn(5, CHAIN.in_features)
    torch.testing.assert_close(call(x, weights), chain_reference(x, weights), equal_nan=True)
    assert not call.is_cached(weights)
