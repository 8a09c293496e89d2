"""Both weight gradients of a trained chain by one operator."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ksopt
from ksopt.ops import chain_gradients, weight_gradient
from ksopt.ops.trained_chain import trained_products
from ksopt.reference import ks_reference
from tests.kernels import toy_chains

CHAIN = "(1,8,4,4)*(4,4,8,1)"  # 32 -> 16 -> 32
SIZES = (1, 4, 4, 1)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """One launch is faster, wherever no gradient of gradients is recorded."""
    requested: list[bool] = []

    def are_together(
        x: Tensor, left: Tensor, right: Tensor, with_bias: bool, siblings: int
    ) -> bool:
        requested.append(with_bias)
        return not torch.is_grad_enabled()

    monkeypatch.setenv("KSOPT_TUNE", "model")
    monkeypatch.setattr(chain_gradients, "are_together", are_together)
    with toy_chains.registered():
        yield requested


def rows(*batch: int, siblings: int = 1) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Gradients of y, what is between the factors, its gradients, and x."""
    grads, between, grad_between = (
        [torch.randn(*batch, features) for _ in range(siblings)] for features in (32, 16, 16)
    )
    return grads, between, grad_between, torch.randn(*batch, 32)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("siblings", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("batch", [(6,), (2, 3), (0,)], ids=str)
def test_the_operator_is_one_of_torchs(
    batch: tuple[int, ...], siblings: int, with_bias: bool
) -> None:
    inputs = rows(*batch, siblings=siblings)
    op = chain_gradients.ks_chain_weight_grads
    for test in ("test_faketensor", "test_schema"):
        torch.library.opcheck(op, (*inputs, *SIZES, with_bias), test_utils=test)
    shapes = ((1, 8, 4, 4), (4, 4, 8, 1)) * siblings
    weights = [torch.empty(shape, device="meta") for shape in shapes]
    gradients, biases = chain_gradients.weight_grads(*inputs, weights, with_bias)
    assert len(gradients) == 2 * siblings
    *lists, x = inputs
    for at, (grad, between, grad_between) in enumerate(zip(*lists, strict=True)):
        expected = weight_gradient.weight_grad_decomposed(
            grad.double(), between.double(), 1, 4, False
        )
        torch.testing.assert_close(gradients[2 * at].double(), expected, rtol=1e-5, atol=1e-5)
        expected = weight_gradient.weight_grad_decomposed(
            grad_between.double(), x.double(), 4, 1, False
        )
        torch.testing.assert_close(gradients[2 * at + 1].double(), expected, rtol=1e-5, atol=1e-5)
    assert (biases is not None) == with_bias
    if biases is not None:
        for bias, grad in zip(biases, inputs[0], strict=True):
            torch.testing.assert_close(bias, grad.flatten(0, -2).sum(0))


def test_it_refuses_rows_that_do_not_fit() -> None:
    grads, between, grad_between, x = rows(6, siblings=2)

    def refuses(words: str, *lists: list[Tensor]) -> None:
        with pytest.raises(ksopt.errors.InvalidInputError, match=words):
            chain_gradients.ks_chain_weight_grads(*lists, x, *SIZES, True)

    refuses(r"grad has batch dims \[5\]", [one[:5] for one in grads], between, grad_between)
    refuses("have 2, 1, 2 tensors", grads, between[:1], grad_between)
    refuses("have 0, 0, 0 tensors", [], [], [])
    refuses(r"the shapes \[6, 32\], \[6, 16\]", [grads[0], grads[1][:, :16]], between, grad_between)


@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_training_takes_it(together: list[bool], bias: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = ksopt.KSLinear(32, 32, CHAIN, activation="gelu", bias=bias)
    twin = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="ksopt")
    x = torch.randn(7, 32)
    actual = []
    for function, inputs in ((compiled, x), (twin, x.double())):
        function(inputs).square().sum().backward()
        owner = twin if function is twin else model
        actual.append([one.grad.double() for one in owner.parameters() if one.grad is not None])
    assert together == [bias]
    assert len(actual[0]) == len(actual[1]) == (3 if bias else 2)
    for mine, truth in zip(*actual, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-4, atol=1e-4)


def test_frozen_operands_and_gradients_of_gradients(together: list[bool]) -> None:
    """Where not all weights are trained, or gradients are recorded, each is computed alone."""
    torch.manual_seed(0)
    x = torch.randn(5, 32, dtype=torch.float64, requires_grad=True)
    left = torch.randn(1, 8, 4, 4, dtype=torch.float64, requires_grad=True)
    right = torch.randn(4, 4, 8, 1, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(32, dtype=torch.float64, requires_grad=True)

    def product(x: Tensor, left: Tensor, right: Tensor, bias: Tensor) -> Tensor:
        return trained_products(x, [left, right], [bias], of_launch=1)[0]

    for needed in ((x, left, right, bias), (left, right), (left,), (right, bias), (left, bias)):
        y = product(*(one if any(one is n for n in needed) else one.detach()
                      for one in (x, left, right, bias)))  # fmt: skip
        grad = torch.randn_like(y)
        actual = torch.autograd.grad(y, needed, grad)
        reference = ks_reference(ks_reference(x, right), left) + bias
        truth = torch.autograd.grad(reference, needed, grad)
        for mine, theirs in zip(actual, truth, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert together == [True, False]
    shapes = ((2, 4), (1, 2, 2, 2), (2, 2, 2, 1), (4,))  # a difference is taken for each element
    small = [torch.randn(one, dtype=torch.float64, requires_grad=True) for one in shapes]
    assert torch.autograd.gradgradcheck(product, small)


@pytest.mark.parametrize(("faster", "launches"), [((1, 3), [3]), ((1,), [1, 1, 1]), ((), [])])
@pytest.mark.parametrize("with_bias", [True, False])
def test_siblings_take_the_launch_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, faster: tuple[int, ...], launches: list[int], with_bias: bool
) -> None:
    seen: list[int] = []
    weight_grads = chain_gradients.weight_grads

    def counted(grads: list[Tensor], *operands: Any) -> tuple[list[Tensor], list[Tensor] | None]:
        seen.append(len(grads))
        return weight_grads(grads, *operands)

    monkeypatch.setattr(chain_gradients, "weight_grads", counted)
    monkeypatch.setattr(chain_gradients, "is_faster", lambda *those: those[-1] in faster)
    torch.manual_seed(0)
    shapes = [*((1, 8, 4, 4), (4, 4, 8, 1)) * 3, *(((32,),) * 3 if with_bias else ())]
    x, *operands = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 32), *shapes)
    )
    weights, biases = operands[:6], operands[6:]
    truths = [
        ks_reference(ks_reference(x, right), left) + (biases[at] if with_bias else 0.0)
        for at, (left, right) in enumerate(zip(weights[::2], weights[1::2], strict=True))
    ]
    grads = [torch.randn_like(one) for one in truths]
    expected = torch.autograd.grad(truths, [x, *operands], grads)
    results = trained_products(x, weights, biases)
    torch.testing.assert_close(torch.autograd.grad(results, [x, *operands], grads), expected)
    assert seen == launches
