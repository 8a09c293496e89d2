"""KSLinear: values, initialisation, conversion from dense layers, and life as a module."""

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from ksopt import ops
from ksopt.errors import InvalidInputError
from ksopt.functional import ks_linear
from ksopt.nn import KSLinear, KSStacked
from ksopt.ops import implementation
from ksopt.patterns.chain import Chain
from ksopt.projection import project
from ksopt.reference import chain_reference, chain_to_dense

MONARCH = Chain.monarch(12, 24, p=2)


def random_weights(chain, dtype=torch.float64):
    return [torch.randn(pattern.weight_shape, dtype=dtype) for pattern in chain]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_is_a_linear_layer(layout, bias):
    layer = KSLinear(12, 24, MONARCH, bias=bias, layout=layout, dtype=torch.float64)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    expected = nn.functional.linear(x, layer.to_dense(), layer.bias)
    x_in_layout = x.movedim(-1, 0) if layout == "batch_last" else x
    actual = layer(x_in_layout)
    torch.testing.assert_close(
        actual.movedim(0, -1) if layout == "batch_last" else actual,
        expected,
        rtol=1e-12,
        atol=1e-12,
    )
    expected = chain_reference(x_in_layout, list(layer.weights), layout)
    if not bias:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    actual.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_the_dense_matrix_is_differentiable():
    layer = KSLinear(12, 24, MONARCH, bias=False, dtype=torch.float64)
    x, y = torch.randn(7, 12, dtype=torch.float64), torch.randn(7, 24, dtype=torch.float64)
    actual = torch.autograd.grad((layer(x) * y).sum(), list(layer.weights))
    expected = torch.autograd.grad((x @ layer.to_dense().T * y).sum(), list(layer.weights))
    torch.testing.assert_close(actual, expected)


def test_chain_may_be_text():
    assert KSLinear(12, 24, str(MONARCH)).chain == MONARCH


@pytest.mark.parametrize(
    ("chain", "n", "m"),
    [
        (Chain.dense(48, 32), 48, 32),
        (Chain.monarch(48, 96, p=4), 48, 96),
        (Chain.low_rank(48, 64, rank=3), 48, 64),
        (Chain.square_dyadic(32), 32, 32),
        (Chain.parse("(4,6,5,2)"), 40, 48),
    ],
    ids=str,
)
def test_initial_outputs_vary_as_those_of_nn_linear(chain, n, m):
    """Variance 1/3 of the input's mean square (nn.Linear's), and the bias adds 1/(3 N)."""
    torch.manual_seed(0)
    x = torch.randn(64, n)
    layer = KSLinear(n, m, chain, bias=False)
    squares = []
    for _ in range(400):
        layer.reset_parameters()
        with torch.no_grad():
            squares.append(layer(x).square().mean())
    actual = torch.stack(squares) / x.square().mean() * 3
    # The mean of 400 draws; the widest of these chains (low rank 3) has a relative standard
    # deviation below 0.7 for one draw, so 5 standard errors are below 0.18.
    error = actual.std() / len(squares) ** 0.5
    assert error < 0.035
    assert abs(actual.mean() - 1) < 5 * error


def test_initial_bounds():
    torch.manual_seed(0)
    layer = KSLinear(4096, 4, "(1,4,4096,1)")
    # One dense factor: nn.Linear's own bounds, 1/sqrt(N), for the weight and for the bias.
    assert 0.99 / 64 < layer.weights[0].abs().max() <= 1 / 64
    bias = torch.cat([KSLinear(16, 64, "(1,64,16,1)").bias.detach() for _ in range(32)])
    assert 0.99 / 4 < bias.abs().max() <= 1 / 4
    # 2048 draws: 5 standard errors of the variance of a uniform variable are a relative 0.1.
    assert abs(bias.var() * 3 * 16 - 1) < 0.1
    chain = Chain.monarch(256, 256, p=4)
    for weight, pattern in zip(KSLinear(256, 256, chain).weights, chain, strict=True):
        bound = (3**0.5 / pattern.c) ** 0.5
        assert 0.99 * bound < weight.abs().max() <= bound


CHAINABLE = [
    Chain.dense(6, 4),
    Chain.low_rank(12, 10, rank=3),
    Chain.monarch(18, 36, p=3),
    Chain.monarch(24, 12, p=2),
    Chain.square_dyadic(16),
    Chain.block_butterfly(24, block=3),
    Chain.parse("(1,6,2,6)*(2,3,4,2)*(4,4,3,1)"),
    Chain.parse("(1,2,4,6)*(2,6,3,2)"),  # two classes, and blocks smaller than their rank
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chain", CHAINABLE, ids=str)
def test_from_linear_recovers_a_product(chain, dtype):
    assert chain.is_chainable
    torch.manual_seed(0)
    linear = nn.Linear(chain.in_features, chain.out_features, dtype=dtype).eval()
    linear.weight.data = chain_to_dense(random_weights(chain)).to(dtype)
    linear.bias.requires_grad_(False)
    layer = KSLinear.from_linear(linear, chain)
    assert not layer.training
    assert layer.weights[0].requires_grad
    assert not layer.bias.requires_grad
    assert {p.dtype for p in layer.parameters()} == {dtype}
    assert torch.equal(layer.bias, linear.bias)
    dense = chain_to_dense([weight.detach().double() for weight in layer.weights])
    exact = linear.weight.detach().double()
    assert (dense - exact).norm() <= 4 * (len(chain) + 1) * torch.finfo(dtype).eps * exact.norm()


def test_from_linear_recovers_a_product_of_lower_rank_than_the_chain():
    chain = Chain.monarch(36, 36, p=3)
    weights = random_weights(chain)
    weights[0][:, :, 1:4] = 0
    actual = project(chain_to_dense(weights), chain).weights
    torch.testing.assert_close(chain_to_dense(actual), chain_to_dense(weights))
    zeros = project(torch.zeros(36, 36), chain).weights
    assert not chain_to_dense(zeros).any()


def test_projected_factors_have_equal_gains():
    chain = Chain.square_dyadic(32)
    matrix = chain_to_dense(random_weights(chain)) * 1e30
    gains = [
        weight.square().mean().mul(pattern.c).sqrt()
        for weight, pattern in zip(project(matrix, chain).weights, chain, strict=True)
    ]
    torch.testing.assert_close(torch.stack(gains), gains[0].expand(len(gains)))


def test_from_linear_refuses_what_is_not_a_product_and_says_by_how_much():
    torch.manual_seed(0)
    linear = nn.Linear(12, 24)
    message = (
        r"not a product of the chain .*relative error 0\.\d+, more than the tolerance 1.43e-06"
    )
    with pytest.raises(InvalidInputError, match=message):
        KSLinear.from_linear(linear, MONARCH)
    assert KSLinear.from_linear(linear, MONARCH, tolerance=1.0).chain == MONARCH
    with pytest.raises(
        InvalidInputError, match="in_features=12 and out_features=24, but the layer"
    ):
        KSLinear.from_linear(nn.Linear(24, 12), MONARCH)
    with pytest.raises(InvalidInputError, match="not a product of the chain"):
        KSLinear.from_linear(nn.Linear(4, 4), "(1,2,1,2)*(2,1,2,1)")
    with pytest.raises(InvalidInputError, match="meta device"):
        KSLinear.from_linear(nn.Linear(12, 24, device="meta"), MONARCH)
    off_support = nn.Linear(4, 4)
    off_support.weight.data = torch.ones(4, 4)
    with pytest.raises(InvalidInputError, match=r"relative error 0.707"):
        KSLinear.from_linear(off_support, "(2,2,2,1)")
    off_support.weight.data[0, 0] = torch.nan
    with pytest.raises(InvalidInputError, match="NaN or infinity"):
        KSLinear.from_linear(off_support, "(2,2,2,1)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((24, 12, MONARCH), "has in_features=12 and out_features=24, but the layer is asked for"),
        ((12, 24, "(1,2"), "is not a pattern"),
        ((12, 24, 3), "chain is 3: give a Chain, its text"),
        ((12, 24, MONARCH, True, "bsl"), "layout 'bsl' is unknown"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        KSLinear(*arguments)


def test_state_dict_names_are_fixed_and_round_trip_through_a_safe_file():
    layer = KSLinear(12, 24, MONARCH)
    assert list(layer.state_dict()) == ["bias", "weights.0", "weights.1"]
    assert list(KSLinear(12, 24, MONARCH, bias=False).state_dict()) == ["weights.0", "weights.1"]
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = KSLinear(12, 24, MONARCH)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(7, 12)
    assert torch.equal(other(x), layer(x))


def test_copies_moves_and_repr():
    layer = KSLinear(12, 24, MONARCH, layout="batch_last")
    assert layer.extra_repr() == (
        f"in_features=12, out_features=24, chain={MONARCH}, bias=True, layout=batch_last"
    )
    assert str(MONARCH) in repr(layer)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weights[0].zero_()
    assert layer.weights[0].any()
    for moved, dtype in [
        (copy.deepcopy(layer).half(), torch.float16),
        (copy.deepcopy(layer).to(torch.bfloat16), torch.bfloat16),
        (copy.deepcopy(layer).double(), torch.float64),
    ]:
        assert moved(torch.randn(12, 7, dtype=dtype)).dtype == dtype
    assert [p.dtype for p in KSLinear(12, 24, MONARCH, dtype=torch.float16).parameters()] == [
        torch.float16
    ] * 3


def test_meta_device_and_to_empty():
    layer = KSLinear(12, 24, MONARCH, device="meta")
    assert layer(torch.randn(7, 12, device="meta")).shape == (7, 24)
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(torch.randn(7, 12)).isfinite().all()


def test_gradients_for_each_sample():
    layer = KSLinear(12, 24, MONARCH, dtype=torch.float64)
    parameters = dict(layer.named_parameters())
    x = torch.randn(5, 12, dtype=torch.float64)

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    loss(parameters, x).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(each[name].sum(0), parameter.grad)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_weights_are_those_of_the_list_however_they_are_stored():
    layer, x = KSLinear(12, 12, "(2,3,3,2)*(2,3,3,2)", bias=False), torch.randn(5, 12)

    def expected():
        return chain_reference(x, list(layer.weights))

    torch.testing.assert_close(layer(x), expected())
    parametrize.register_parametrization(layer.weights, "0", Doubled())
    torch.testing.assert_close(layer(x), expected())
    # Stored again, after the other one in the list's own order of parameters.
    parametrize.remove_parametrizations(layer.weights, "0")
    assert list(layer.weights._parameters) == ["1", "0"]
    torch.testing.assert_close(layer(x), expected())
    others = {f"weights.{index}": torch.randn(2, 3, 3, 2) for index in range(2)}
    actual = torch.func.functional_call(layer, others, (x,))
    torch.testing.assert_close(actual, chain_reference(x, list(others.values())))
    layer.weights = torch.nn.ParameterList(torch.randn(2, 3, 3, 2) for _ in range(2))
    torch.testing.assert_close(layer(x), expected())


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_a_bias_takes_no_second_result_where_nobody_records(layout):
    layer = KSLinear(16, 16, "(2,4,4,2)*(4,4,4,1)", layout=layout)
    nn.init.normal_(layer.bias)
    x = torch.randn(16, 5) if layout == "batch_last" else torch.randn(5, 16)
    before, bias = x.clone(), layer.bias.detach().clone()
    target = layer(x)  # a gradient is recorded of it
    assert target.requires_grad
    result = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        product = implementation.product
        patch.setattr(
            implementation, "product", lambda *args: result.append(product(*args)) or result[-1]
        )
        y = layer(x)
    assert y.data_ptr() == result[-1].data_ptr()
    torch.testing.assert_close(y, target.detach())
    assert torch.equal(x, before)
    assert torch.equal(layer.bias.detach(), bias)


def test_a_bias_of_each_sample_is_added_under_vmap():
    weights = [torch.randn(2, 4, 4, 2)]
    x, bias = torch.randn(5, 16), torch.randn(3, 16)
    with torch.no_grad():
        y = torch.vmap(lambda each: ks_linear(x, weights, each))(bias)
        torch.testing.assert_close(y, ks_linear(x, weights) + bias[:, None])


def stacked(count=3, chain="(1,4,2,2)*(2,2,4,1)", **how):
    torch.manual_seed(0)
    return KSStacked([KSLinear(8, 8, chain, **how) for _ in range(count)])


def side_by_side(layer, x):
    return torch.cat([part(x) for part in layer.parts], dim=-1)


@pytest.fixture
def operators(monkeypatch):
    """How many chains each operator that a layer calls computes."""
    seen = []

    def seen_chain(*args, siblings=1, **kwargs):
        seen.append(siblings)
        return ops.chain(*args, siblings=siblings, **kwargs)

    monkeypatch.setattr("ksopt.nn.layers.ops", SimpleNamespace(chain=seen_chain))
    return seen


@pytest.mark.parametrize("how", [{}, {"bias": False}, {"activation": "gelu"}], ids=str)
@pytest.mark.parametrize("count", [1, 3, 5])
def test_parts_of_one_chain_are_one_operators_work(operators, count, how):
    layer, x = stacked(count, **how), torch.randn(5, 8, requires_grad=True)
    expected, y = side_by_side(layer, x), layer(x)
    assert operators == [count]
    torch.testing.assert_close(y, expected)
    inputs = [x, *layer.parameters()]
    gradient = torch.randn_like(y)
    for one, other in zip(
        torch.autograd.grad(y, inputs, gradient),
        torch.autograd.grad(expected, inputs, gradient),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_parts_that_are_more_than_a_chain_are_called(operators):
    x = torch.randn(5, 8)
    other_chain = KSStacked([KSLinear(8, 8, "(1,8,8,1)"), KSLinear(8, 8, "(2,4,4,1)")])
    hooked = stacked()
    hooked.parts[1].register_forward_hook(lambda module, args, y: 2 * y)
    half_biased = KSStacked([KSLinear(8, 8, "(1,8,8,1)"), KSLinear(8, 8, "(1,8,8,1)", bias=False)])
    parametrized = stacked()
    parametrize.register_parametrization(parametrized.parts[0], "bias", torch.nn.Tanh())
    for layer in (other_chain, hooked, half_biased, parametrized):
        torch.testing.assert_close(layer(x), side_by_side(layer, x))
    assert operators == []


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_a_gate_multiplies_what_two_chains_give(layout):
    x = torch.randn(8, 8)
    one, other = ([torch.randn(1, 4, 2, 2), torch.randn(2, 2, 4, 1)] for _ in range(2))
    bias, residual = torch.randn(16), torch.randn(8, 8)
    y = ks_linear(
        x, [*one, *other], bias, layout, activation="silu_gate", residual=residual
    )  # fmt: skip
    a = ks_linear(x, one, bias[:8], layout, activation="silu")
    torch.testing.assert_close(y, a * ks_linear(x, other, bias[8:], layout) + residual)
