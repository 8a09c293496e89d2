"""Families of gradients' kernels that register from outside, through what operators call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checks import H200
from torch import Tensor

from ksopt.epilogue import with_epilogue
from ksopt.jit import host
from ksopt.kernels import (
    chain_gradients,
    gradient_autotuner,
    input_gradients,
    weight_gradients,
)
from ksopt.kernels.families.gradient_base import EnterableGradient, TakesPacked
from ksopt.ops import chain_gradients as chain_operators
from ksopt.ops import input_gradient, weight_gradient
from ksopt.patterns.chain import Chain, Pattern
from ksopt.reference import ks_reference
from tests.kernels.toy_gradients import ToyChainGrads, ToyInputGrad, ToyWeightGrad, registered

LEFT, RIGHT = Chain.parse("(1,3,2,2)*(2,2,4,1)")
BELOW = Pattern(1, 4, 3, 2)
BATCH = (5, 7)
FAST, SLOW = 1e-3, 1e9
"""Predicted microseconds."""

Results = Sequence[Tensor | None]


class Case:
    """A chain's product of float64, or of siblings', by PyTorch, and its gradients by autograd."""

    def __init__(self, siblings: int = 1, activation: Any = "none") -> None:
        torch.manual_seed(siblings)
        self.siblings, self.activation = siblings, activation
        self.below = torch.randn(*BATCH, BELOW.in_features).double()
        self.weight_below = torch.randn(BELOW.weight_shape).double()
        self.bias_below = torch.randn(BELOW.out_features).double()
        h = with_epilogue(ks_reference(self.below, self.weight_below), self.bias_below)
        self.h = h.requires_grad_()
        self.x = with_epilogue(self.h, None, activation)
        pairs = [(LEFT, RIGHT)] * siblings
        self.weights = [torch.randn(p.weight_shape).double() for pair in pairs for p in pair]
        for one in self.weights:
            one.requires_grad_()
        self.bias = torch.zeros(LEFT.out_features).double().requires_grad_()
        self.between = [ks_reference(self.x, right) for right in self.weights[1::2]]
        for one in self.between:
            one.retain_grad()
        ys = [
            ks_reference(z, left) + self.bias
            for z, left in zip(self.between, self.weights[::2], strict=True)
        ]
        self.grads = [torch.randn_like(y) for y in ys]
        torch.autograd.backward(ys, self.grads)

    @property
    def grads_between(self) -> list[Tensor]:
        return [one.grad for one in self.between if one.grad is not None]


def single(values: Any) -> Any:
    """Operands of float32, without gradients."""
    if isinstance(values, Tensor):
        return values.detach().float()
    return [single(one) for one in values]


def of_weight(case: Case) -> tuple[Results | None, Results]:
    grad, x = single([case.grads[0], case.between[0]])
    by_pytorch = partial(weight_gradient._by_pytorch, LEFT.a, LEFT.d, True)
    results = weight_gradients.run(grad, x, LEFT.a, LEFT.d, True, by_pytorch)
    return results, (case.weights[0].grad, case.bias.grad)


def of_chain_weights(case: Case) -> tuple[Results | None, Results]:
    of = chain_gradients.Factors(LEFT.a, LEFT.d, RIGHT.a, RIGHT.d)
    operands = single([*case.grads, *case.between, *case.grads_between, case.x])
    by_pytorch = partial(chain_operators._by_pytorch, of, True)
    results = chain_gradients.run(operands, of, True, by_pytorch, by_pytorch)
    return results, [*(one.grad for one in case.weights), *(dy.sum((0, 1)) for dy in case.grads)]


def of_chain_input(case: Case, packed: Tensor | None = None) -> tuple[Results | None, Results]:
    behind: dict[str, Any] = {}
    weights, by_pytorch = case.weights, input_gradient._by_pytorch
    if case.activation != "none":
        behind = {"below": single(case.below), "bias": single(case.bias_below)}
        behind["activation"] = case.activation
        weights = [*weights, case.weight_below]
        by_pytorch = partial(input_gradient.activated_by_pytorch, activation=case.activation)
    operands = (single(case.grads), single(weights), packed)
    results = input_gradients.run(*operands, by_pytorch, by_pytorch, **behind)
    between = case.grads_between
    return results, (case.h.grad, between[0] if len(between) == 1 else torch.stack(between))


Run = Callable[[Case], tuple[Results | None, Results]]
KINDS = {
    "weight": (ToyWeightGrad, of_weight, 9),
    "chain_weights": (ToyChainGrads, of_chain_weights, 11),
    "chain_input": (ToyInputGrad, of_chain_input, 9),
}
CASES = [
    pytest.param(*KINDS[kind], partial(Case, *case), id="-".join(map(str, (kind, *case))))
    for kind, case in (
        ("weight", ()),
        ("chain_weights", ()),
        ("chain_weights", (3,)),
        ("chain_input", ()),
        ("chain_input", (3,)),
        ("chain_input", (1, "gelu")),
    )
]
of_each_kind = pytest.mark.parametrize(("family", "run", "numbers", "case"), CASES)


@pytest.fixture(params=[False, True], ids=["python", "host"])
def entries(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """The numbers that the host library is told of, where it is loaded: a list of calls."""
    seen: list[tuple[Any, ...]] = []

    def know(*operands: Any) -> None:
        """Behind the operands, and after the sizes and flags of a factor or of a chain."""
        seen.append(tuple(operands[-1]) if isinstance(operands[-1], list) else operands)

    ops = {
        "know_weight_grad": lambda grad, x, a, d, with_bias, *numbers: know(*numbers),
        "know_chain_grads": know,
        "know_input_grad": lambda grads, weights, activation, *numbers: know(*numbers),
        "forget_gradients": lambda: None,
    }
    monkeypatch.setenv("KSOPT_TUNE", "model")
    monkeypatch.setattr(torch.ops, "ksopt_host", SimpleNamespace(**ops), raising=False)
    monkeypatch.setattr(host, "is_loaded", lambda: request.param)
    monkeypatch.setattr(gradient_autotuner, "spec_of", lambda _: H200)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for forget in (gradient_autotuner.forget, input_gradients.faster.cache_clear):
        forget()
    yield seen
    for forget in (gradient_autotuner.forget, input_gradients.faster.cache_clear):
        forget()


def assert_right(results: Results | None, truth: Results) -> None:
    assert results is not None
    for one, exact in zip(results, truth, strict=True):
        assert one is not None
        assert exact is not None
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-5)


class Launched:
    """A launcher that the host library could launch."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *operands: Any) -> Any:
        return self.call(*operands)

    def entry(self, rows: int) -> tuple[int, ...]:
        return 7, rows


class Packing(Launched):
    """A launcher that takes packed weights: as they are, and once more with the other sign."""

    packed_elements = 2 * (LEFT.nnz + RIGHT.nnz)

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(call)
        self.packed: list[Tensor | None] = []

    def pack(self, weights: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([one.flatten() for one in weights])
        return torch.cat([flat, -flat])

    def __call__(self, grads: Any, weights: Any, packed: Tensor | None = None) -> Any:
        self.packed.append(packed)
        if packed is not None:
            own = packed[LEFT.nnz + RIGHT.nnz :].neg().split([LEFT.nnz, RIGHT.nnz])
            weights = [p.view(of.weight_shape) for p, of in zip(own, (LEFT, RIGHT), strict=True)]
        return self.call(grads, weights)


@of_each_kind
def test_a_plain_function_computes_gradients(
    entries: list[Any], family: Any, run: Run, numbers: int, case: Callable[[], Case]
) -> None:
    with registered(FAST, of=family):
        for _ in range(2):
            assert_right(*run(case()))
    assert entries == []  # Python launches it each time


@of_each_kind
def test_what_the_host_library_can_launch_is_in_its_table(
    entries: list[Any], family: Any, run: Run, numbers: int, case: Callable[[], Case]
) -> None:
    assert isinstance(Launched(len), EnterableGradient)
    with registered(FAST, of=family, launcher=Launched):
        assert_right(*run(case()))
    assert entries == ([(7, 35)] if host.is_loaded() else [])


@of_each_kind
def test_where_no_kernel_is_faster_the_table_has_zeros(
    entries: list[Any], family: Any, run: Run, numbers: int, case: Callable[[], Case]
) -> None:
    with registered(SLOW, of=family):
        assert run(case())[0] is None
    assert entries == ([(0,) * numbers] if host.is_loaded() else [])


def test_weights_packed_before_are_passed_to_who_takes_them(entries: list[Any]) -> None:
    launchers: list[Packing] = []

    def packing(call: Callable[..., Any]) -> Packing:
        launchers.append(Packing(call))
        return launchers[-1]

    case = Case()
    weights = single(case.weights)
    with registered(FAST, of=ToyInputGrad, launcher=packing):
        packed = input_gradients.packed_for(weights, 35)
        assert packed is not None
        assert isinstance(launchers[0], TakesPacked)
        for one in (packed, None, packed[1:]):
            assert_right(*of_chain_input(case, one))
    assert [one for launcher in launchers for one in launcher.packed] == [packed, None, None]
    assert len(entries) == (3 if host.is_loaded() else 0)


def test_the_forward_pass_packs_for_no_tiles_but_its_own(entries: list[Any]) -> None:
    """A plain function reads the weights, though others were packed."""
    case = Case()
    weights, x = single(case.weights), single(case.x).expand(100, *BATCH, -1)
    shape = input_gradients.shape_of(weights)
    with registered(FAST, of=ToyInputGrad):
        assert input_gradients.is_by_kernel(shape, torch.float32, 3500, x.device)
        assert input_gradients.tile_of(shape, torch.float32, 3500, x.device) is None
        assert input_gradients.packed_for(weights, 3500) is None
        assert input_gradient.packed_elements(x, weights) == 0
        assert_right(*of_chain_input(case, torch.full((7,), torch.nan)))
    assert entries == []
