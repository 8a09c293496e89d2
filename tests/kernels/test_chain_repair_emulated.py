"""The kernel behind a product by a chain's matrix with zeros, run on the CPU by the emulator."""

import pytest
import torch
from cuda_emulator import Instance
from emulated_chains import _aligned, _emulate

from ksopt.kernels import chain_repair
from ksopt.kernels.mergeable import holds_zeros
from ksopt.kernels.merged import merge, times_matrix
from ksopt.kernels.problem import Epilogue, Geometry, Problem
from ksopt.patterns.chain import Chain
from ksopt.reference import chain_reference

CHAINS = (
    "(14,3,18,2)*(4,63,6,2)",
    "(3,2,4,1)*(2,6,5,1)",
    "(2,1,3,5)*(3,2,7,5)",
    "(2,3,4,3)*(3,4,2,2)",
    "(3,1500,4,1)*(2,6,2,1)",  # a thread has more outputs than a pass
    "(3,2,1600,1)*(2,2400,3,1)",  # more values between than fit at a time
)
CASES = [
    Problem(Chain.parse(text), dtype, last, epilogue=Epilogue(bias=bias))
    for at, text in enumerate(CHAINS)
    for last in (False, True)
    for dtype, bias in ((("float32", "bfloat16")[(at + last) % 2], at % 3 != 1),)
]


def name(at):
    p = CASES[at]
    return f"{p.chain}-{p.dtype}-{p.layout}{'-bias' if p.epilogue.bias else ''}"


@pytest.fixture(scope="module")
def kernels(emulator):
    geometry = Geometry(chain_repair.THREADS, 0, chain_repair.ROWS, 1, 1)
    return emulator.on_demand(
        [
            Instance(
                Problem.of_factor(p.chain[0], p.dtype, False), chain_repair.source(p), geometry
            )
            for p in CASES
        ]
    )


class Operands:
    """Random operands, each in memory of its own kind: x; weights and bias; y."""

    def __init__(self, problem, rows, seed):
        generator = torch.Generator().manual_seed(seed)
        kind = getattr(torch, problem.dtype)
        chain, last = problem.chain, problem.batch_last

        def draw(*size):
            return torch.randn(*size, generator=generator).to(kind)

        columns = chain.in_features
        self.problem, self.rows = problem, rows
        self.x = _aligned(draw(rows * columns)).view((columns, rows) if last else (rows, columns))
        flat = [draw(one.nnz) * one.c**-0.5 for one in chain]
        added = draw(chain.out_features)
        self.memory = _aligned(torch.cat([*flat, added]))
        *parts, self.bias = self.memory.split([*(one.numel() for one in flat), added.numel()])
        # The last weight's elements are in another order.
        left, right = (part.view(one.weight_shape) for part, one in zip(parts, chain, strict=True))
        a, b, c, d = chain[1].weight_shape
        self.weights = [left, right.view(a, d, b, c).permute(0, 2, 3, 1)]

    def exact(self):
        weights = [one.double() for one in self.weights]
        y = chain_reference(self.x.double(), weights, self.problem.layout)
        if not self.problem.epilogue.bias:
            return y
        bias = self.bias.double()
        return y + (bias[:, None] if self.problem.batch_last else bias)

    def spoilt(self):
        """By the matrix, zeros and all."""
        bias = self.bias if self.problem.epilogue.bias else None
        return times_matrix(self.x, merge(self.weights), bias, self.problem.batch_last)

    def repaired(self, kernel, y, blocks=None):
        memory = _aligned(y.reshape(-1))
        to = memory.view(y.shape)
        bias = self.bias if self.problem.epilogue.bias else None
        arguments = chain_repair.arguments_of(self.problem, self.x, self.weights, bias, to)
        launch = (blocks or chain_repair.blocks_for(self.rows), chain_repair.THREADS, 0)
        kernel._loaded.emulate_updates(True)
        _emulate(kernel, arguments, launch, (self.x.reshape(-1), self.memory, memory))
        return to


def assert_near(y, truth, dtype, times=1):
    unit = times * {"float32": 2e-6, "bfloat16": 2**-8}[dtype]
    assert torch.equal(y.isfinite(), truth.isfinite())
    assert torch.equal(y.isnan(), truth.isnan())
    finite = truth.isfinite()
    off = (y.double() - truth)[finite].abs()
    assert (off <= unit * (truth[finite].abs() + truth[finite].abs().mean())).all()


def test_the_cases_hold_zeros():
    assert all(holds_zeros(problem.chain.patterns) for problem in CASES)


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_rows_that_are_not_finite_are_computed_again(kernels, at):
    problem = CASES[at]
    for rows in (1, 70):
        o = Operands(problem, rows, seed=rows)
        by_row = o.x.T if problem.batch_last else o.x
        by_row[rows // 2, 1], by_row[rows - 1, 0] = torch.inf, torch.nan
        assert not o.spoilt().isfinite().all()
        y = o.repaired(kernels[at], o.spoilt(), blocks=1)
        assert_near(y, o.exact(), problem.dtype, times=4)  # of the matrix, which is rounded too


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_every_row_may_be_computed_again(kernels, at):
    problem = CASES[at]
    o = Operands(problem, 67, seed=1)
    y = o.repaired(kernels[at], torch.full_like(o.spoilt(), torch.nan))
    assert_near(y, o.exact(), problem.dtype)


@pytest.mark.parametrize("at", range(0, len(CASES), 5), ids=name)
def test_what_is_finite_stays_as_it_is(kernels, at):
    o = Operands(CASES[at], 130, seed=0)
    y = torch.zeros_like(o.spoilt())  # not the product: nothing is computed
    assert not o.repaired(kernels[at], y).any()
