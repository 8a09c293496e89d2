"""Trained siblings, as queries, keys and values: one launch forward, one for the gradient of x."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition

import ksopt
from ksopt.compile import backend
from ksopt.kernels import plan_autotuner
from ksopt.kernels.families.base import ANY_TYPE
from ksopt.ops import input_gradient
from ksopt.ops.input_gradient import ks_chain_input_grad
from ksopt.ops.trained_chain import ks_chain_keeping, trained_products
from ksopt.reference import ks_reference
from tests.einsum_layer import ByEinsum
from tests.kernels import toy_chains

CHAIN = "(1,8,4,4)*(4,4,8,1)"  # 32 -> 16 -> 32
Predict = Callable[..., None]


class Siblings(nn.Module):
    """Layers on one input, whose results meet in one expression."""

    def __init__(self, count: int = 3, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ksopt.KSLinear(32, 32, CHAIN, bias=bias) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ones_like(x)
        for at, layer in enumerate(self.layers):
            y = y * torch.sin((1 + at) * layer(x))
        return y


class Attention(nn.Module):
    """Queries, keys and values, each as its reader wants it."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.q, self.k, self.v = make(), make(), make()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:-1], 4, 8).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


def by_layer() -> nn.Module:
    return ksopt.KSLinear(32, 32, CHAIN)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[toy_chains.ToyChain]]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    monkeypatch.setenv("KSOPT_TUNE", "model")
    with toy_chains.registered() as family:
        yield family
    torch._dynamo.reset()


@pytest.fixture
def predict(toy, monkeypatch: pytest.MonkeyPatch) -> Predict:
    """Sets whether chains are one launch forward, and of how many one computes the gradient."""

    def patch(*, forward: bool, of_input: tuple[int, ...] = ()) -> None:
        def is_one_launch(_: Tensor, weights: list[Tensor]) -> bool:
            return len(weights) // 2 in of_input

        monkeypatch.setattr(toy, "us", 1e-3 if forward else 1e9)
        monkeypatch.setattr(input_gradient, "is_one_launch", is_one_launch)

    return patch


class Traced:
    """The operators of both graphs of what is compiled, and the reports."""

    def __init__(self) -> None:
        self.forward = Counter[str]()
        self.backward = Counter[str]()

    def compile(self, gm: fx.GraphModule, inputs: list[Tensor], _: object) -> Callable[..., object]:
        def counting(seen: Counter[str]) -> Callable[[fx.GraphModule, object], fx.GraphModule]:
            def compiler(graph: fx.GraphModule, _: object) -> fx.GraphModule:
                names = (str(node.target) for node in graph.graph.nodes)
                seen.update(name.split(".")[1] for name in names if name.startswith("ksopt."))
                return graph

            return compiler

        compiled: Callable[..., object] = aot_autograd(
            fw_compiler=counting(self.forward),
            bw_compiler=counting(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )(gm, inputs)
        return compiled


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    traced = Traced()
    monkeypatch.setattr(backend, "compile_by_inductor", traced.compile)
    return traced


def gradients(function: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_(x.requires_grad)
    model.zero_grad()
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), *(one.grad for one in (x, *model.parameters()) if one.grad is not None)]


def check(model: nn.Module, x: Tensor, compiled: Callable[..., Tensor] | None = None) -> None:
    """The results and the gradients of a compiled step are those in float64."""
    if compiled is None:
        compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    twin = copy.deepcopy(model).double()
    truth = gradients(twin, twin, x.detach().double().requires_grad_(x.requires_grad))
    actual = gradients(compiled, model, x)
    assert len(actual) == len(truth)
    for mine, theirs in zip(actual, truth, strict=True):
        # Sums of some 100 float32 products of numbers up to about 10.
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


def rows(*sizes: int) -> Tensor:
    return torch.randn(*sizes, 32, requires_grad=True)


@pytest.mark.parametrize(
    ("count", "bias"),
    [
        (3, True),
        *(pytest.param(count, True, marks=pytest.mark.slow) for count in (2, 4)),
        *(pytest.param(count, False, marks=pytest.mark.slow) for count in (3, 4)),
        (2, False),
    ],
)
def test_both_passes_are_one_launch_of_chains(predict, traced, toy, count: int, bias: bool) -> None:
    predict(forward=True, of_input=(count,))
    check(Siblings(count, bias), rows(3, 5))
    assert traced.forward == {"ks_chain_keeping": 1}
    assert traced.backward["ks_chain_input_grad"] == 1
    assert traced.backward["ks_mm_repacked"] == 0
    assert [problem.siblings for problem in toy.stored] == [count]


def test_of_five_one_is_alone(predict, traced) -> None:
    predict(forward=True, of_input=(1, 4))
    check(Siblings(5), rows(7))
    assert traced.forward == {"ks_chain_keeping": 2}
    assert traced.backward["ks_chain_input_grad"] == 2


def test_the_forward_pass_may_be_a_launch_for_each_factor(predict, traced) -> None:
    predict(forward=False, of_input=(1, 3))
    check(Siblings(), rows(7))
    assert traced.forward == {"ks_mm_repacked": 6}
    assert traced.backward["ks_chain_input_grad"] == 1


def test_the_forward_pass_may_be_a_launch_for_each_sibling(
    predict, traced, toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict(forward=True, of_input=(3,))
    monkeypatch.setattr(
        toy, "predicted_us", lambda self, problem, *_: 1e-3 if problem.siblings == 1 else 1e9
    )
    check(Siblings(), rows(7))
    assert traced.forward == {"ks_chain_keeping": 3}
    assert traced.backward["ks_chain_input_grad"] == 1


@pytest.mark.parametrize(
    ("forward", "of_input", "ahead", "back"),
    [
        (True, (), {"ks_chain_keeping": 1}, {"ks_mm_repacked": 4}),
        (True, (1,), {"ks_chain_keeping": 1}, {"ks_chain_input_grad": 2}),
        (False, (1,), {"ks_mm_repacked": 4}, {"ks_chain_input_grad": 2}),
        (False, (), {"ks_mm_repacked": 4}, {"ks_mm_repacked": 4}),
    ],
    ids=str,
)
def test_passes_are_together_where_that_is_faster(
    predict, traced, forward, of_input, ahead, back
) -> None:
    predict(forward=forward, of_input=of_input)
    check(Siblings(2), rows(7))
    assert traced.forward == ahead
    assert traced.backward == back


def test_attention_in_an_authors_spelling(predict, traced) -> None:
    predict(forward=True, of_input=(3,))
    check(Attention(ByEinsum), rows(2, 5))
    assert traced.forward == {"ks_chain_keeping": 1}
    assert traced.backward["ks_chain_input_grad"] == 1


@pytest.mark.slow
def test_batches_of_any_size_are_compiled_once(predict, traced) -> None:
    predict(forward=True, of_input=(3,))
    model = Attention(by_layer)
    compiled = torch.compile(model, backend="ksopt", fullgraph=True, dynamic=True)
    for sizes in ((2, 5), (3, 4)):
        check(model, rows(*sizes), compiled)
    assert counters["stats"]["unique_graphs"] == 1
    assert traced.forward == {"ks_chain_keeping": 1}


def test_the_report_says_that_one_launch_computes_them(predict, traced) -> None:
    predict(forward=True, of_input=(3,))
    with backend.collected() as reports:
        check(Siblings(), rows(7))
    (report,) = reports
    assert report.passes["layers_in_one_launch"] == 3
    assert [site.one_launch for site in report.sites] == [("bias",)] * 3
    assert all("One launch computes all of it, with bias" in site.reason for site in report.sites)


@pytest.mark.parametrize("forward", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_autocast_casts_them(
    predict, traced, toy, forward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "dtypes", ANY_TYPE)
    predict(forward=forward, of_input=(3,))
    model, x = Siblings(), rows(9)
    twin = copy.deepcopy(model)
    several = []
    for function, its in (
        (torch.compile(model, backend="ksopt", fullgraph=True), model),
        (twin, twin),
    ):
        own = x.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = function(own)
        y.float().square().sum().backward()
        of_parameters = [one.grad for one in its.parameters()]
        assert all(one is not None and one.dtype is torch.float32 for one in of_parameters)
        several.append([y, own.grad, *of_parameters])
    torch.testing.assert_close(*several, rtol=0.05, atol=0.05)
    assert traced.forward == ({"ks_chain_keeping": 1} if forward else {"ks_mm_repacked": 6})
    assert traced.backward["ks_chain_input_grad"] == 1


@pytest.mark.slow
def test_a_frozen_layer_is_left(predict, traced) -> None:
    predict(forward=True, of_input=(2,))
    model = Siblings()
    model.layers[1].requires_grad_(False)
    check(model, rows(7))
    assert traced.forward["ks_chain_keeping"] == 1
    assert traced.backward["ks_chain_input_grad"] == 1


def test_a_frozen_bias_and_an_input_without_a_gradient(predict, traced) -> None:
    predict(forward=True, of_input=(3,))
    model = Siblings()
    model.layers[1].bias.requires_grad_(False)
    check(model, torch.randn(7, 32))
    assert traced.forward == {"ks_chain_keeping": 1}
    assert traced.backward == {"ks_mm_repacked": 3}  # for the right factors


def test_parameters_that_have_no_gradient_get_none(predict, traced) -> None:
    """As in eager mode, where an optimizer leaves them."""

    class Detached(Siblings):
        def forward(self, x: Tensor) -> Tensor:
            first, second, third = self.layers
            return first(x) * second(x).detach() + third(x).sin()

    predict(forward=True, of_input=(2, 3))
    model = Detached()
    check(model, rows(7))
    assert model.layers[1].bias.grad is None
    assert traced.forward == {"ks_chain_keeping": 1}
    assert traced.backward["ks_chain_input_grad"] == 1


def test_a_layer_where_no_gradient_is_recorded_stays_there(predict, traced) -> None:
    class Switched(Siblings):
        def forward(self, x: Tensor) -> Tensor:
            first, second, third = self.layers
            with torch.no_grad():
                y = first(x)
            return y * second(x).sin() * third(x)

    predict(forward=True, of_input=(1, 2, 3))
    model = Switched()
    check(model, rows(7))
    assert model.layers[0].bias.grad is None


def test_results_that_are_returned_have_memory_of_their_own(predict, traced) -> None:
    class Returning(Siblings):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return tuple(layer(x) for layer in self.layers)

    predict(forward=True, of_input=(3,))
    model, x = Returning(), rows(7)
    results = torch.compile(model, backend="ksopt", fullgraph=True)(x)
    for one, other in zip(results, model(x), strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one, other)
    assert traced.forward == {"ks_chain_keeping": 3}


def test_layers_of_other_patterns_or_dtypes_are_no_siblings(predict, traced) -> None:
    class Others(Siblings):
        def __init__(self) -> None:
            super().__init__(1)
            self.layers.append(ksopt.KSLinear(32, 32, "(1,8,8,4)*(4,8,8,1)"))

    predict(forward=True, of_input=(2,))
    check(Others(), rows(7))
    assert traced.forward == {"ks_chain_keeping": 2}
    assert traced.backward["ks_chain_input_grad"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("forward", [True, False])
def test_inductor_compiles_them(predict, toy, forward: bool) -> None:
    """From torch's caches on disk, too."""
    predict(forward=forward, of_input=(3,))
    with torch._inductor.config.patch(fx_graph_cache=True):
        for _ in range(2):
            torch._dynamo.reset()
            check(Attention(by_layer), rows(2, 5))
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert len(toy.stored) == (2 if forward else 0)


@pytest.mark.parametrize("of_launch", [2, 1, 0])
def test_gradients_of_gradients(predict, of_launch: int) -> None:
    predict(forward=True, of_input=(2,))
    shapes = ((2, 4), *((1, 2, 2, 2), (2, 2, 2, 1)) * 2, (4,), (4,))
    operands = [torch.randn(one, dtype=torch.float64, requires_grad=True) for one in shapes]

    def product(x: Tensor, *others: Tensor) -> list[Tensor]:
        return trained_products(x, others[:4], others[4:], of_launch)

    assert torch.autograd.gradcheck(product, operands)
    assert torch.autograd.gradgradcheck(product, operands)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_operators_are_torchs(predict, toy, count: int) -> None:
    weights = [torch.randn(size) for size in ((1, 8, 4, 4), (4, 4, 8, 1)) * count]
    x, bias = torch.randn(2, 3, 32), torch.randn(32 * count)
    pairs = list(zip(weights[::2], weights[1::2], strict=True))
    truth = torch.cat([ks_reference(ks_reference(x, right), left) for left, right in pairs], -1)
    for forward in (True, False):
        predict(forward=forward)
        plan_autotuner.forget()
        y, between, packed = ks_chain_keeping(x, weights, bias, count, packed=8)
        torch.testing.assert_close(y, truth + bias)
        values = between if count > 1 else between[None]
        for one, (_, right) in zip(values, pairs, strict=True):
            torch.testing.assert_close(one, ks_reference(x, right))
        assert packed.shape == (8,)
        assert len(toy.stored) == 1
    grads = list(torch.randn(count, 2, 3, 48)[..., 8:40])
    to, between = ks_chain_input_grad(grads, weights)
    several = [
        ks_reference(grad, left.transpose(1, 2))
        for grad, (left, _) in zip(grads, pairs, strict=True)
    ]
    torch.testing.assert_close(between, torch.stack(several) if count > 1 else several[0])
    of_x = zip(several, pairs, strict=True)
    of_each = [ks_reference(one, right.transpose(1, 2)) for one, (_, right) in of_x]
    torch.testing.assert_close(to, torch.stack(of_each).sum(0))
    for check in ("test_faketensor", "test_schema"):
        operands = (x, weights, bias, count, "none", 8)
        torch.library.opcheck(ks_chain_keeping, operands, test_utils=check)
        torch.library.opcheck(ks_chain_input_grad, (grads, weights), test_utils=check)
