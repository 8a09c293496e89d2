"""Operands that are not what lies in their memory: negated lazily, zeros, other kinds.

The operator computes where it can, and says a sentence where it cannot: in eager mode, under
autograd, with memory given for the result, under transforms and under torch.compile.
"""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

import ksopt
from ksopt import ops
from ksopt.errors import InvalidInputError
from ksopt.functional import ks_linear
from ksopt.reference import ks_reference

PATTERN = (2, 3, 3, 2)
CALLS = {
    "ks_mm": ops.ks_mm,
    "ks_mm_once": ops.ks_mm_once,
    "ks_mm_inner": ops.ks_mm_inner,
    "ks_mm_repacked": ops.ks_mm_repacked,
    "ks_mm_frozen": ops.ks_mm_frozen,
    "multiply": ops.multiply,
    "ks_linear": lambda x, weight: ks_linear(x, [weight]),
}


def conjugated_imag(real):
    """The same values, as the imaginary part of a number that is conjugated lazily."""
    lazy = torch.complex(torch.randn_like(real), -real).conj().imag
    assert lazy.is_neg()
    return lazy


def negated(real):
    lazy = torch._neg_view(-real)
    assert lazy.is_neg()
    return lazy


LAZY = {"negated": negated, "conjugated": conjugated_imag}


def operands():
    return torch.randn(5, 12), torch.randn(PATTERN)


@pytest.mark.parametrize("lazily", LAZY)
@pytest.mark.parametrize("call", CALLS)
def test_lazily_negated_operands(call, lazily):
    (x, weight), lazy = operands(), LAZY[lazily]
    expected = ks_reference(x, weight)
    for one, other in ((lazy(x), weight), (x, lazy(weight)), (lazy(x), lazy(weight))):
        with torch.no_grad():
            torch.testing.assert_close(CALLS[call](one, other), expected)
        torch.testing.assert_close(CALLS[call](one, other), expected)


@pytest.mark.parametrize("lazily", LAZY)
def test_their_gradients(lazily):
    (x, weight), lazy, grad = operands(), LAZY[lazily], torch.randn(5, 12)
    actual, expected = [], []
    for product, results in ((ops.ks_mm, actual), (ks_reference, expected)):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        one, other = map(lazy, leaves)
        product(one, other).backward(lazy(grad))
        results += [leaf.grad for leaf in leaves]
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("lazily", LAZY)
@pytest.mark.parametrize("write", [ops.ks_mm_inner_out, ops.ks_mm_repacked_out])
def test_into_memory_that_is_passed(write, lazily):
    (x, weight), lazy = operands(), LAZY[lazily]
    for out in (torch.empty(5, 12), lazy(torch.zeros(5, 12))):
        with torch.no_grad():
            write(lazy(x), weight, out=out)
        torch.testing.assert_close(out.clone(), ks_reference(x, weight))


@pytest.mark.parametrize("call", CALLS)
def test_zeros_without_memory(call):
    x, weight = operands()
    zeros = torch._efficientzerotensor
    assert not CALLS[call](zeros(5, 12), weight).any()
    assert not CALLS[call](x, zeros(*PATTERN)).any()


@pytest.mark.parametrize("grad_mode", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_complex_numbers_get_a_sentence(call, grad_mode):
    x, weight = (t.to(torch.complex64).requires_grad_(grad_mode) for t in operands())
    allowed = "x is complex64, but it must be one of float32, float16, bfloat16, float64"
    for one, other in ((x, weight), (x.conj(), weight.conj())):
        with pytest.raises(InvalidInputError, match=allowed):
            CALLS[call](one, other)
        with pytest.raises(InvalidInputError, match=allowed):
            CALLS[call](one.to("meta"), other.to("meta"))
    with pytest.raises(InvalidInputError, match="one dtype"):
        CALLS[call](x.conj(), weight.real)
    with pytest.raises(InvalidInputError, match="one dtype"):
        CALLS[call](x.real, weight.conj())


def test_complex_numbers_elsewhere():
    x, weight = (t.to(torch.complex64) for t in operands())
    with pytest.raises(InvalidInputError, match="complex64"):
        ops.ks_mm_weight_grad(x.conj(), x, 2, 2, False)
    with pytest.raises(InvalidInputError, match="complex64"):
        vmap(lambda row: ops.ks_mm(row, weight))(x.conj())
    with pytest.raises(InvalidInputError, match="complex64"), torch.no_grad():
        ops.ks_mm_inner_out(x.conj(), weight, out=torch.empty_like(x).conj())
    with pytest.raises(InvalidInputError, match="KSLinear: dtype is complex64, but it must be"):
        ksopt.KSLinear(12, 12, "(2,3,3,2)", dtype=torch.complex64)
    with pytest.raises(InvalidInputError, match="complex64"):
        ksopt.KSLinear(12, 12, "(2,3,3,2)").to(torch.complex64)(x)


def test_under_transforms():
    x, weight = operands()
    expected = ks_reference(x, weight)
    torch.testing.assert_close(vmap(lambda x: ops.ks_mm(x, weight))(negated(x)), expected)
    slope = grad(lambda x: ops.ks_mm(negated(x), weight).sum())(x)
    torch.testing.assert_close(slope, grad(lambda x: ks_reference(x, weight).sum())(x))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("grad_mode", [False, True])
def test_other_kinds_of_tensors_get_a_sentence(call, grad_mode):
    x, weight = (t.requires_grad_(grad_mode) for t in operands())
    kinds = {
        "sparse_coo": x.to_sparse(),
        "sparse_csr": x.detach().to_sparse_csr(),
        "nested": torch.nested.as_nested_tensor([x, x]),
        "jagged|nested": torch.nested.as_nested_tensor([x, x], layout=torch.jagged),
        "qint8": torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8),
    }
    for words, other in kinds.items():
        with pytest.raises(InvalidInputError, match=rf"x is (stored as|a) ({words})"):
            CALLS[call](other, weight)
    with pytest.raises(InvalidInputError, match="weight is stored as sparse_coo, but it must be"):
        CALLS[call](x, weight.detach().to_sparse())


@pytest.mark.slow
@pytest.mark.parametrize("lazily", LAZY)
@pytest.mark.parametrize("place", ["input", "inside"])
def test_under_compile(lazily, place):
    """An input of a graph, too, of which Inductor reads the memory alone."""
    (x, weight), lazy = operands(), LAZY[lazily]

    def forward(x, weight):
        if place == "inside":
            x, weight = torch._neg_view(-x), torch._neg_view(-weight)
        return ops.ks_mm(x + 0, weight) * 2

    if place == "input":
        x, weight = lazy(x), lazy(weight)
    torch.compiler.reset()
    compiled = torch.compile(forward, backend="ksopt")
    torch.testing.assert_close(compiled(x, weight), forward(x, weight))
    # The same function of ordinary operands is another graph.
    x, weight = operands()
    torch.testing.assert_close(compiled(x, weight), forward(x, weight))
