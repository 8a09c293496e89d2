"""The input gradient of a trained chain as one operator: where it is called, what it gives."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import ksopt
from ksopt.kernels import input_gradients, registry
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common.input_grad_tile import Shape
from ksopt.kernels.families.common.pytorch_cost import elementwise_us
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.ops import input_gradient
from ksopt.ops.input_gradient import ks_chain_input_grad
from ksopt.patterns.chain import Chain
from ksopt.reference import ks_reference
from tests.kernels import toy_chains

CHAIN = "(1,8,4,4)*(4,4,8,1)"  # 32 -> 16 -> 32
H200 = DeviceSpec((9, 0), 132, 228 * 1024)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Gradients that the operator is called with, where a kernel would be taken for any chain."""
    seen: list[Tensor] = []

    def run(grads: list[Tensor], *_: object) -> None:
        seen.append(grads[0])

    monkeypatch.setenv("KSOPT_TUNE", "model")
    monkeypatch.setattr(input_gradients, "run", run)
    monkeypatch.setattr(input_gradient, "is_one_launch", lambda *_: True)
    with toy_chains.registered():
        yield seen


def drawn(*rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(*rows, 32), torch.randn(1, 8, 4, 4), torch.randn(4, 4, 8, 1)


def test_it_is_two_products(calls: list[Tensor]) -> None:
    grad, left, right = drawn(3, 5)
    to, between = ks_chain_input_grad([grad], [left, right])
    torch.testing.assert_close(between, ks_reference(grad, left.transpose(1, 2)))
    torch.testing.assert_close(to, ks_reference(between, right.transpose(1, 2)))
    assert len(calls) == 1


def test_the_operator_is_one_of_torchs() -> None:
    for check in ("test_faketensor", "test_schema"):
        grad, *weights = drawn(6)
        torch.library.opcheck(ks_chain_input_grad, ([grad], weights), test_utils=check)


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_training_calls_it(calls: list[Tensor], dynamic: bool) -> None:
    torch.manual_seed(0)
    model = ksopt.KSLinear(32, 32, CHAIN)
    twin = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="ksopt", dynamic=dynamic)
    sizes = [5, 8] if dynamic else [5, 5]  # another static size would be compiled again
    for rows in sizes:
        x = torch.randn(rows, 32).requires_grad_()
        own = x.detach().double().requires_grad_()
        for function, of, inputs in ((compiled, model, x), (twin, twin, own)):
            of.zero_grad()
            function(inputs).square().sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad.double(), own.grad, rtol=1e-4, atol=1e-4)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)
    assert [len(grad) for grad in calls] == sizes


@pytest.mark.slow
def test_it_is_not_called_for_weights_alone(calls: list[Tensor]) -> None:
    model = ksopt.KSLinear(32, 32, CHAIN)
    torch.compile(model, backend="ksopt")(torch.randn(5, 32)).sum().backward()
    assert model.weights[1].grad is not None
    assert calls == []


def test_nothing_but_a_cuda_device_has_a_kernel() -> None:
    grad, *weights = drawn(6)
    assert not input_gradient.is_one_launch(grad, weights)
    apart = input_gradient._apart
    assert input_gradients.run([grad], weights, None, apart, apart) is None
    shape = Shape(*Chain.parse("(1,192,64,2)*(2,64,192,1)"))
    assert not input_gradients.is_by_kernel(shape, torch.bfloat16, 4096, torch.device("cpu"))


def test_it_is_taken_where_it_is_predicted_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(*Chain.parse("(1,512,128,2)*(2,128,512,1)"))
    other = Shape(*Chain.parse("(1,512,40,2)*(2,40,512,1)"))
    input_gradients.faster.cache_clear()
    try:
        assert input_gradients.faster(shape, "bfloat16", 4096, H200) is not None
        assert input_gradients.faster(shape, "float32", 4096, H200) is None
        assert input_gradients.faster(other, "bfloat16", 4096, H200) is None
        input_gradients.faster.cache_clear()
        monkeypatch.setattr(input_gradients, "factors_us", lambda *_: 1.0)
        assert input_gradients.faster(shape, "bfloat16", 4096, H200) is None
    finally:
        input_gradients.faster.cache_clear()


def test_siblings_are_compared_with_launches_of_each_and_additions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left, right = Chain.parse("(1,192,64,2)*(2,64,192,1)")
    one, three = Shape(left, right), Shape(left, right, 3)
    adding_us = elementwise_us(3 * 2 * 4096 * right.in_features, H200.multiprocessors)

    def apart_us(s: Shape) -> float:
        input_gradients.faster.cache_clear()
        return input_gradients.apart_us(s, "bfloat16", 4096, H200)

    try:
        alone = input_gradients.faster(one, "bfloat16", 4096, H200)
        assert alone is not None
        assert apart_us(three) == pytest.approx(3 * alone.predicted_us + 2 * adding_us)
        assert input_gradients.faster(three, "bfloat16", 4096, H200) is not None
        monkeypatch.setattr(input_gradients, "factors_us", lambda *_: 1.0)
        assert apart_us(three) == pytest.approx(3 * 1.0 + 2 * adding_us)
        assert apart_us(one) == 1.0
    finally:
        input_gradients.faster.cache_clear()


def test_launches_that_prepare_weights_count_beside_those_of_factors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A transposed weight is put in order or packed first, unless PyTorch reads it as it is."""

    def best_predicted(problem: Problem, *_: object) -> list[Candidate]:
        kernel = Candidate("decode_mma16", problem, 2.0, family_of("decode_mma16"))
        return [kernel, Candidate("bmm", problem, 4.0)]

    monkeypatch.setattr(registry, "best_predicted", best_predicted)
    monkeypatch.setattr(input_gradients, "_PREPARING_US", 3.0)
    shape = Shape(*Chain.parse("(1,384,96,2)*(2,96,384,1)"))
    by_kernel, by_torch = 2.0 + 3.0, 4.0  # of d = 2, where PyTorch's weight is prepared, too; of 1
    assert input_gradients.factors_us(shape, "bfloat16", 64, H200) == by_kernel + by_torch


@pytest.mark.slow
def test_weights_that_the_forward_pass_packed_reach_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only where x has a gradient."""
    monkeypatch.setenv("KSOPT_TUNE", "model")
    seen: list[Tensor | None] = []
    monkeypatch.setattr(input_gradients, "run", lambda *operands: seen.append(operands[2]))
    monkeypatch.setattr(input_gradient, "is_one_launch", lambda *_: True)
    monkeypatch.setattr(input_gradient, "packed_elements", lambda *_: 24)
    model = ksopt.KSLinear(32, 32, "(1,8,4,4)*(4,4,8,1)")
    with toy_chains.registered():
        compiled = torch.compile(model, backend="ksopt", dynamic=False)
        compiled(torch.randn(6, 32, requires_grad=True)).sum().backward()
        assert [None if packed is None else packed.shape for packed in seen] == [(24,)]
        compiled(torch.randn(6, 32)).sum().backward()
    assert len(seen) == 1
