"""In compiled training steps the gradient of a weight is a batched product of PyTorch."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from written_code import result_and_code

from ksopt import ops
from ksopt.nn import KSLinear

LAYOUTS = ["batch_first", "batch_last"]


def step(model, x):
    """The gradients of a model's parameters and of x."""
    return torch.autograd.grad(model(x).square().sum(), (*model.parameters(), x))


def check(compiled, model, x):
    """Its gradients are those in float64, and lie in memory as their parameters do."""
    actual = step(compiled, x)
    truth = step(copy.deepcopy(model).double(), x.detach().double().requires_grad_())
    for one, exact in zip(actual, truth, strict=True):
        # Sums of some 100 float32 products of numbers up to about 10.
        torch.testing.assert_close(one, exact.float(), rtol=1e-4, atol=1e-3)
    for one, parameter in zip(actual, model.parameters(), strict=False):
        assert one.stride() == parameter.stride()


def compiled_step(model, x, backend="ksopt"):
    """The compiled model after a step, and the code of that."""
    run = torch.compile(model, backend=backend, fullgraph=True)
    _, code = result_and_code(lambda: step(run, x))
    return run, code


def rows(layout):
    return torch.randn((24, 10) if layout == "batch_last" else (10, 24), requires_grad=True)


@pytest.mark.parametrize("backend", ["ksopt", "inductor"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_diagonal_factors_copy_nothing(layout, backend):
    model = KSLinear(24, 32, "(4,8,6,1)*(2,12,12,1)", bias=False, layout=layout)
    x = rows(layout)
    run, code = compiled_step(model, x, backend)
    assert "weight_grad" not in code
    assert code.count("extern_kernels.bmm(") == 2
    assert "clone" not in code
    assert "copy_" not in code
    check(run, model, x)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chain", ["(1,8,6,4)", "(2,8,6,2)"])
def test_copies_of_the_others_are_inductors(chain, layout):
    model = KSLinear(24, 32, chain, bias=False, layout=layout)
    x = rows(layout)
    run, code = compiled_step(model, x)
    assert "weight_grad" not in code
    assert code.count("extern_kernels.bmm(") == 1
    check(run, model, x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = KSLinear(24, 32, "(2,8,8,2)*(4,8,6,1)")
        self.down = KSLinear(32, 24, "(1,6,8,4)")

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.slow
def test_batches_of_any_size_and_rank_are_compiled_once():
    model = Model()
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    for batch in ((5, 3), (9, 7), (64, 2)):
        x = torch.randn(*batch, 24, requires_grad=True)
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim)
        check(compiled, model, x)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch", [*(pytest.param(one, marks=pytest.mark.slow) for one in ((), (1,), (0,))), (2, 0)]
)
def test_batches_of_one_row_and_of_none(batch):
    model = Model()
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    check(compiled, model, torch.randn(*batch, 24, requires_grad=True))


@pytest.mark.parametrize(
    "shape", [pytest.param((2, 3, 4, 5), marks=pytest.mark.slow), (3, 4, 5, 1)]
)
@pytest.mark.parametrize("last", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_users_own_call_is_compiled_and_has_gradients(last, shape):
    a, b, c, d = shape

    def compute(grad, x):
        return ops.ks_mm_weight_grad(grad.sin(), x, a, d, last)

    compiled = torch.compile(compute, fullgraph=True, dynamic=True)
    for batch in (7, 11):
        operands = [
            torch.randn(*((a * n * d, batch) if last else (batch, a * n * d)), requires_grad=True)
            for n in (b, c)
        ]
        exact = [t.detach().double().requires_grad_() for t in operands]
        actual, expected = compiled(*operands), compute(*exact)
        assert actual.is_contiguous()
        torch.testing.assert_close(actual, expected.float())
        for one, other in zip(
            torch.autograd.grad(actual.square().sum(), operands),
            torch.autograd.grad(expected.square().sum(), exact),
            strict=True,
        ):
            torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("where", [pytest.param("around", marks=pytest.mark.slow), "inside"])
def test_under_autocast_the_weights_gradient_is_of_the_products_dtype(where):
    """Also where autocast is off for the product alone: its gradient is traced with it on."""
    layer = KSLinear(24, 32, "(4,8,6,1)", bias=False)

    def product(x):
        with torch.autocast("cpu", enabled=where == "around", dtype=torch.bfloat16):
            return layer(x)

    compiled = torch.compile(product, backend="ksopt", fullgraph=True)
    collected = []
    for run in (compiled, product):
        x = torch.linspace(-1, 1, 240).view(10, 24)
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x)
        collected.append(
            torch.autograd.grad(y.float().square().sum(), tuple(layer.parameters()))[0]
        )
    # One rounding to bfloat16 of each sum where the product is computed in it.
    tolerance = 1e-5 if where == "inside" else 1e-2
    torch.testing.assert_close(*collected, rtol=tolerance, atol=tolerance)
