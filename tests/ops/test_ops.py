"""The operators: values, gradients, transforms, refusal, and the choice on CPU."""

import contextlib
import threading
import time

import pytest
import torch
from seen_products import without_library
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ksopt import functional, ops
from ksopt.baselines import BASELINES
from ksopt.errors import InvalidInputError
from ksopt.kernels import dispatch
from ksopt.kernels.backends import cpu
from ksopt.kernels.problem import Problem
from ksopt.ops import implementation
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

SHAPES = [(1, 1, 1, 1), (2, 3, 4, 5), (1, 7, 3, 2), (3, 4, 5, 1), (1, 3, 5, 6), (1, 9, 8, 1)]
BATCHES = [(), (0,), (1,), (7,), (63,), (2, 3), (0, 3)]
LAYOUTS = ["batch_first", "batch_last"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def no_old_choices():
    cpu.forget()
    yield
    cpu.forget()


def make_x(shape, layout, batch, dtype=torch.float64):
    a, _, c, d = shape
    n = a * c * d
    return torch.randn((n, *batch) if layout == "batch_last" else (*batch, n)).to(dtype)


def ks_mm(x, weight, layout="batch_first"):
    return torch.ops.ksopt.ks_mm(x, weight, layout == "batch_last")


@pytest.mark.parametrize("tune", ["measure", "model", "off"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_is_as_accurate_as_pytorch(shape, dtype, layout, tune, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", tune)
    weight = torch.randn(shape).to(dtype)
    for batch in BATCHES:
        x = make_x(shape, layout, batch, dtype)
        exact = ks_reference(x.double(), weight.double(), layout)
        pytorch = BASELINES["bmm_paper"].bind(weight, layout)(x)
        for _ in range(2):  # the second time by what the first one chose
            y = ks_mm(x, weight, layout)
            assert y.shape == exact.shape
            assert y.dtype == dtype
            assert y.is_contiguous()
            torch.testing.assert_close(y, ks_mm(x, weight, layout), rtol=0, atol=0)
            if y.numel():
                error, allowed = ((t - exact).abs().max() for t in (y, pytorch))
                # Twice PyTorch's own error, and where that is 0 one rounding of the largest result;
                # in float64 two, because the reference is rounded as well.
                roundings = 2 if dtype == torch.float64 else 1
                slack = roundings * torch.finfo(dtype).eps * exact.abs().max()
                assert error <= 2 * allowed + slack


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_writes_every_element_whatever_the_strides(shape, layout):
    torch.use_deterministic_algorithms(True)  # also fills new tensors with NaN
    try:
        weight = torch.randn(shape[::-1], dtype=torch.float64).permute(3, 2, 1, 0)
        x = make_x(shape, layout, (7,))
        sliced = torch.randn(*(2 * size + 1 for size in x.shape), dtype=torch.float64)
        misaligned = torch.randn(x.numel() + 1, dtype=torch.float64)[1:].view(x.shape)
        for view in (x, x.t().contiguous().t(), sliced[1::2, 1::2], misaligned):
            y = ks_mm(view, weight, layout)
            torch.testing.assert_close(y, ks_reference(view, weight, layout))
            assert y.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 4, 5, 1)])
def test_opcheck(shape, layout, requires_grad):
    last = layout == "batch_last"
    a, b, c, d = shape
    x = make_x(shape, layout, (7,), torch.float32).requires_grad_(requires_grad)
    g = make_x((a, c, b, d), layout, (7,), torch.float32).requires_grad_(requires_grad)
    weight = torch.randn(shape, requires_grad=requires_grad)
    torch.library.opcheck(torch.ops.ksopt.ks_mm.default, (x, weight, last))
    torch.library.opcheck(torch.ops.ksopt.ks_mm_weight_grad.default, (g, x, a, d, last))
    if not requires_grad:
        torch.library.opcheck(ops.ks_mm_inner, (x, weight, last))
        for twin in (ops.ks_mm_repacked, ops.ks_mm_frozen):
            torch.library.opcheck(twin, (x, weight, last))
        # In graphs that torch has cached before the name was left.
        torch.library.opcheck(torch.ops.ksopt.ks_mm_weight_grad_inner, (g, x, a, d, last))
        if not last:
            both = torch.ops.ksopt.ks_mm_weight_bias_grad_inner.default
            torch.library.opcheck(both, (g, x, a, d))
            of_weight, of_bias = both(g, x, a, d)
            torch.testing.assert_close(of_weight, ops.ks_mm_weight_grad(g, x, a, d, last))
            torch.testing.assert_close(of_bias, g.sum(0))


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_with_an_owner(layout, dtype, requires_grad):
    last = layout == "batch_last"
    owner = torch.randn(5, 2, 3, 4, requires_grad=requires_grad)
    x = make_x((2, 3, 4, 5), layout, (7,), dtype).requires_grad_(requires_grad)
    twins = [] if requires_grad else [ops.ks_mm_inner, ops.ks_mm_repacked, ops.ks_mm_frozen]
    for op in (ops.ks_mm, *twins):
        torch.library.opcheck(op, (x, owner.permute(1, 2, 3, 0), last, owner))
    torch.library.opcheck(ops.ks_mm_once, (x, owner.to(dtype).permute(1, 2, 3, 0), last))


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_order(layout, batch):
    shape = (2, 3, 2, 2)
    x = make_x(shape, layout, batch).requires_grad_()
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for inputs in [(x, weight), (x.detach(), weight), (x, weight.detach())]:
        assert torch.autograd.gradcheck(
            lambda x, w: ks_mm(x, w, layout),
            inputs,
            check_forward_ad=True,
            check_batched_grad=True,
        )
    assert torch.autograd.gradgradcheck(lambda x, w: ks_mm(x, w, layout), (x, weight))


@pytest.mark.parametrize("way", ["bmm", "bmm_paper", "bsr"])
def test_results_may_be_changed_in_place(way, monkeypatch):
    # Of a block-diagonal weight some of PyTorch's ways return a view of what they have computed.
    monkeypatch.setattr(
        dispatch, "run", lambda x, weight, last, out: BASELINES[way].bind(weight, "batch_first")(x)
    )
    x, weight = torch.randn(6, 32, requires_grad=True), torch.randn(4, 8, 8, 1, requires_grad=True)
    actual, expected = ks_mm(x, weight), ks_reference(x, weight)
    actual.relu_()
    torch.testing.assert_close(actual, expected.relu(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(actual.square().sum(), (x, weight)),
        torch.autograd.grad(expected.relu().square().sum(), (x, weight)),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("way", ["bmm", "bmm_paper", "bsr"])
@pytest.mark.parametrize("op", [ops.ks_mm, ops.ks_mm_inner, ops.multiply])
def test_results_of_no_grad_may_be_changed_where_gradients_are_recorded(op, way, monkeypatch):
    monkeypatch.setattr(
        dispatch, "run", lambda x, weight, last, out: BASELINES[way].bind(weight, "batch_first")(x)
    )
    x, weight, scale = torch.randn(6, 32), torch.randn(4, 8, 8, 1), torch.ones(32)
    with torch.no_grad():
        y = op(x, weight)
    expected = y.sum(0)
    y.mul_(scale.requires_grad_()).sum().backward()
    torch.testing.assert_close(scale.grad, expected)


def test_saves_only_what_the_gradients_need():
    shape = (2, 3, 2, 2)
    x = make_x(shape, "batch_first", (5,)).requires_grad_()
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def saved(x, weight):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            ks_mm(x, weight)
        return {tuple(t.shape) for t in saved}

    assert saved(x, weight) == {(5, 8), shape}
    assert saved(x.detach(), weight) == {(5, 8)}
    assert saved(x, weight.detach()) == {shape}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transforms_equal_those_of_the_reference(layout):
    shape = (2, 3, 4, 2)
    weight = torch.randn(shape, dtype=torch.float64)
    many = torch.randn(2, 3, 6, 4, 2, dtype=torch.float64)  # six weights, mapped over dim 2
    x = torch.stack([make_x(shape, layout, (5,)) for _ in range(6)])

    def results(product):
        def loss(weight, x):
            return product(x, weight).square().sum()

        yield vmap(lambda x: product(x, weight))(x)
        yield vmap(lambda x: product(x, weight), in_dims=1, out_dims=1)(x.transpose(0, 1))
        yield vmap(product, in_dims=(0, 2))(x, many)
        yield vmap(product, in_dims=(None, 2))(x[0], many)
        yield vmap(vmap(product, in_dims=(None, 2)), in_dims=(0, None))(x, many)
        yield grad(loss)(weight, x[0])
        yield vmap(grad(loss), in_dims=(None, 0))(weight, x)  # gradients for each sample
        yield grad(lambda w: vmap(lambda x: loss(w, x))(x).sum())(weight)
        yield hessian(loss)(weight, x[0])
        yield jvp(loss, (weight, x[0]), (weight + 1, x[0] - 1))[1]
        yield jvp(grad(loss), (weight, x[0]), (weight + 1, x[0] - 1))[1]

    pairs = zip(
        results(lambda x, w: ks_mm(x, w, layout)),
        results(lambda x, w: ks_reference(x, w, layout)),
        strict=True,
    )
    for index, (actual, expected) in enumerate(pairs):
        torch.testing.assert_close(actual, expected, msg=lambda text, n=index: f"case {n}: {text}")


def owned(x, weight, layout="batch_first", owner=None):
    owner = weight if owner is None else owner
    return torch.ops.ksopt.ks_mm(x, weight, layout == "batch_last", owner)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_beside_an_owner_a_weight_is_converted_to_the_inputs_dtype(layout):
    weight = torch.randn(2, 3, 4, 5, requires_grad=True)
    x = make_x((2, 3, 4, 5), layout, (7,), torch.bfloat16).requires_grad_()
    with pytest.raises(InvalidInputError, match="they must have one dtype"):
        ks_mm(x, weight, layout)
    actual, expected = owned(x, weight, layout), ks_mm(x, weight.bfloat16(), layout)
    assert torch.equal(actual, expected)
    for one, other in zip(
        *(torch.autograd.grad(y.float().square().sum(), (x, weight)) for y in (actual, expected)),
        strict=True,
    ):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    with torch.no_grad():
        assert torch.equal(owned(x, weight, layout), expected)
    assert torch.equal(
        torch.autograd.grad(owned(x, weight.detach(), layout).sum(), x)[0],
        torch.autograd.grad(ks_mm(x, weight.detach().bfloat16(), layout).sum(), x)[0],
    )
    many = x.detach().float()[None].expand(3, *x.shape)
    torch.testing.assert_close(
        vmap(lambda x: owned(x, weight, layout))(many.bfloat16()),
        expected.expand(3, *expected.shape),
    )
    tangent = jvp(lambda x: owned(x, weight, layout), (x,), (x,))[1]
    torch.testing.assert_close(tangent, expected, rtol=2e-2, atol=2e-1)  # bfloat16 sums
    with pytest.raises(InvalidInputError, match="x is bfloat16 and weight is int64, but they must"):
        owned(x, weight.detach().long(), layout)


def test_an_owner_of_other_memory_makes_no_difference():
    weight, other = torch.randn(2, 3, 4, 5), torch.randn(3)
    x = make_x((2, 3, 4, 5), "batch_first", (7,), torch.float32)
    expected = ks_mm(x, weight)
    assert torch.equal(owned(x, weight, owner=other), expected)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (x, weight, other)]
        assert owned(fakes[0], fakes[1], owner=fakes[2]).shape == expected.shape


def test_a_weight_that_is_used_once_has_all_gradients():
    weight = torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    x = make_x((2, 3, 2, 2), "batch_first", (3,)).requires_grad_()
    assert torch.autograd.gradcheck(ops.ks_mm_once, (x, weight), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ops.ks_mm_once, (x, weight))
    torch.testing.assert_close(
        vmap(ops.ks_mm_once, in_dims=(0, None))(x[:, None], weight)[:, 0], ks_mm(x, weight)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_the_dtype_in_force(dtype):
    shape = (2, 3, 4, 5)
    x = make_x(shape, "batch_first", (7,), torch.float32)
    weight = torch.randn(shape, requires_grad=True)
    bias = torch.randn(30, requires_grad=True)
    expected = ks_mm(x.to(dtype), weight.detach().to(dtype))
    with torch.autocast("cpu", dtype):
        assert torch.equal(ks_mm(x, weight), expected)
        assert torch.equal(ks_mm(x.to(dtype), weight), expected)
        y = functional.ks_linear(x, [weight], bias)
        assert y.dtype == dtype
        double = ks_mm(x.double(), weight.double())
        assert double.dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert ks_mm(x, weight).dtype == torch.float32
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32
    assert bias.grad.dtype == torch.float32
    # Autocast for another device leaves these tensors alone, as torch's own operators do.
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    with torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set() | key,
        torch._C._dispatch_tls_local_exclude_set(),
    ):
        assert ks_mm(x, weight).dtype == torch.float32


def test_inference_mode_and_meta():
    shape = (2, 3, 4, 5)
    x = make_x(shape, "batch_first", (7,), torch.float32)
    weight = torch.randn(shape)
    with torch.inference_mode():
        y = ks_mm(x.clone(), weight.clone())
    assert y.is_inference()
    assert torch.equal(y, ks_mm(x, weight))
    meta = ks_mm(x.to("meta"), weight.to("meta"))
    assert meta.shape == (7, 30)
    assert meta.device.type == "meta"


WRONG = {
    "ks_mm: weight has shape [3, 4], but it must be [a, b, c, d]": lambda t: (t(2, 4), t(3, 4)),
    "ks_mm: weight has shape [2, 0, 4, 1], but a, b, c and d must be at least 1": lambda t: (
        t(7, 8),
        t(2, 0, 4, 1),
    ),
    "ks_mm: x is a scalar, but it must have a dim of features": lambda t: (t(()), t(1, 1, 1, 1)),
    "ks_mm: x has shape [7, 9], but with weight [2, 3, 4, 1] in layout batch_first its last dim "
    "must be a*c*d = 8": lambda t: (t(7, 9), t(2, 3, 4, 1)),
    "ks_mm: x has shape [7, 8], but with weight [2, 3, 4, 1] in layout batch_last its first dim "
    "must be a*c*d = 8": lambda t: (t(7, 8), t(2, 3, 4, 1), True),
    "ks_mm: x is float32 and weight is float64, but they must have one dtype (convert one of "
    "them, or run under torch.autocast)": lambda t: (t(7, 8), t(2, 3, 4, 1).double()),
    "ks_mm: x is int64, but it must be one of float32, float16, bfloat16, float64": lambda t: (
        t(7, 8).long(),
        t(2, 3, 4, 1).long(),
    ),
    "ks_mm: x is complex64, but it must be one of float32, float16, bfloat16, float64": lambda t: (
        t(7, 8).to(torch.complex64),
        t(2, 3, 4, 1).to(torch.complex64),
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_inputs_get_one_sentence_in_eager_and_on_fakes(message):
    make = WRONG[message]
    with pytest.raises(InvalidInputError) as raised:
        torch.ops.ksopt.ks_mm(*make(torch.ones))
    assert str(raised.value) == message
    x, weight, *layout = make(torch.ones)
    if weight.is_floating_point():
        weight.requires_grad_()
    with pytest.raises(InvalidInputError) as raised:
        torch.ops.ksopt.ks_mm(x, weight, *layout)
    assert str(raised.value) == message
    with FakeTensorMode(), pytest.raises(InvalidInputError) as raised:
        torch.ops.ksopt.ks_mm(*make(torch.ones))
    assert str(raised.value) == message


def test_wrong_device_is_named():
    message = "x is on cpu and weight on meta, but they must be on one device"
    with pytest.raises(InvalidInputError, match=message):
        torch.ops.ksopt.ks_mm(torch.ones(7, 8), torch.ones(2, 3, 4, 1, device="meta"))


@pytest.mark.parametrize(
    ("grad_shape", "x_shape", "message"),
    [
        ((7, 6), (7, 2, 8), "both must have the same batch dims and one dim of features"),
        ((7, 6), (6, 8), "grad has batch dims [7] and x [6], but they must be the same"),
        ((7, 7), (7, 8), "grad has 7 features, but they must be a multiple of a*d = 2*1"),
        ((7, 6), (7, 9), "x has 9 features, but they must be a multiple of a*d = 2*1"),
    ],
)
def test_wrong_inputs_of_the_weight_gradient(grad_shape, x_shape, message):
    with pytest.raises(InvalidInputError) as raised:
        ops.ks_mm_weight_grad(torch.ones(grad_shape), torch.ones(x_shape), 2, 1, False)
    assert message in str(raised.value)


def test_ks_linear_runs_right_to_left_and_adds_the_bias_in_both_layouts():
    weights = [torch.randn(1, 4, 3, 2), torch.randn(2, 3, 5, 1)]
    bias = torch.randn(8)
    x = torch.randn(2, 7, 10)
    expected = ks_reference(ks_reference(x, weights[1]), weights[0]) + bias
    torch.testing.assert_close(functional.ks_linear(x, weights, bias), expected)
    y = functional.ks_linear(x.movedim(-1, 0), weights, bias, "batch_last")
    torch.testing.assert_close(y, expected.movedim(-1, 0))
    assert y.is_contiguous()
    torch.testing.assert_close(functional.ks_linear(x[0, 0], weights, bias), expected[0, 0])


def test_ks_linear_refuses_what_does_not_fit():
    x, weight = torch.randn(7, 8), torch.randn(2, 3, 4, 1)
    for arguments, message in [
        (([],), "weights is empty"),
        (([weight], torch.ones(5)), r"bias has shape \[5\], but the chain has 6 outputs"),
        (([weight], torch.ones(6).double()), "bias is float64 and the product float32"),
        (([weight], None, "bsf"), "layout 'bsf' is unknown"),
    ]:
        with pytest.raises(InvalidInputError, match=message):
            functional.ks_linear(x, *arguments)


def test_the_choice_is_measured_once_and_remembered(monkeypatch):
    timed = []
    real = cpu._fastest
    monkeypatch.setattr(cpu, "_fastest", lambda *args: timed.append(args) or real(*args))
    shape = (2, 8, 8, 2)
    weight = torch.randn(shape)
    for batch in (33, 40, 64):  # up to one power of two: one choice
        ks_mm(make_x(shape, "batch_first", (batch,), torch.float32), weight)
    assert len(timed) == 1
    threads = torch.get_num_threads()
    ((problem, name),) = cpu.chosen().items()
    assert problem == f"(2,8,8,2) float32 batch_first batch<=64 threads={threads}"
    assert name in BASELINES
    ks_mm(make_x(shape, "batch_first", (65,), torch.float32), weight)
    ks_mm(make_x(shape, "batch_last", (40,), torch.float32), weight, "batch_last")
    ks_mm(make_x(shape, "batch_first", (40,), torch.bfloat16), weight.bfloat16())
    assert len(timed) == 4


def test_the_fastest_candidate_is_taken(monkeypatch):
    """With a clock of our own: each candidate seems to take a time that the test sets."""
    costs = {"bmm": 3.0, "bmm_paper": 3.5, "einsum": 2.0, "expand": 1.0, "dense": 4.0}
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0] * 1e9)
    real = cpu._Product.multiply

    def multiply(self, *args):
        now[0] += costs[self.baseline.name] * 1e-4
        return real(self, *args)

    monkeypatch.setattr(cpu._Product, "multiply", multiply)
    shape = (2, 8, 8, 2)
    x = make_x(shape, "batch_first", (40,), torch.float32)
    for best in costs:
        cpu.forget()
        costs[best] = 0.5
        ks_mm(x, torch.randn(shape))
        assert set(cpu.chosen().values()) == {best}
        costs[best] = 5.0


def test_deterministic_products_follow_the_rule_whatever_was_measured(monkeypatch, deterministic):
    without_library(monkeypatch)  # whose products are seen here
    problem = Problem.of_factor(Pattern(2, 64, 64, 2), "float32", False)
    monkeypatch.setattr(cpu, "_fastest", lambda *_: cpu._decision(problem, "einsum", "measured"))
    monkeypatch.setattr(cpu, "load", lambda *_: None)
    taken = []
    real = cpu._Product.multiply
    shape = (2, 64, 64, 2)
    x, weight = make_x(shape, "batch_first", (40,), torch.float32), torch.randn(shape)
    monkeypatch.setattr(
        cpu._Product,
        "multiply",
        lambda self, *args: (taken.append(self.baseline.name), real(self, *args))[1],
    )
    ks_mm(x, weight)
    with deterministic():
        ks_mm(x, weight)
    assert taken == ["einsum", "bmm"]


def test_timing_stops_in_time(monkeypatch):
    """Slow candidates are run twice at most, and once if another is more than twice as fast."""
    without_library(monkeypatch)
    costs = {"bmm": 1.0, "bmm_paper": 1.2, "einsum": 1.5, "expand": 0.9, "dense": 2.5}
    runs = []
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0] * 1e9)
    real = cpu._Product.multiply

    def multiply(self, *args):
        runs.append(self.baseline.name)
        now[0] += costs[self.baseline.name]
        return real(self, *args)

    monkeypatch.setattr(cpu._Product, "multiply", multiply)
    shape = (2, 8, 8, 2)
    ks_mm(make_x(shape, "batch_first", (40,), torch.float32), torch.randn(shape))
    twice = ["bmm", "bmm_paper", "einsum"] * 2
    assert sorted(runs) == sorted([*twice, "dense", *["expand"] * 3])
    assert list(cpu.chosen().values()) == ["expand"]  # the third run is the product itself


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((3, 4, 5, 1), "bmm"),
        ((3, 16, 5, 2), "expand"),
        ((3, 5, 17, 2), "bmm"),
        ((1, 1, 1, 32), "expand"),
        ((1, 1, 1, 33), "bmm"),
    ],
)
def test_the_fixed_rule(shape, name, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "off")
    for layout in LAYOUTS:
        ks_mm(make_x(shape, layout, (7,), torch.float32), torch.randn(shape), layout)
    assert list(cpu.chosen().values()) == [name, name]
    assert cpu.rule(Pattern(*shape)) == name


def test_the_tuning_setting_is_checked(monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "maybe")
    refusal = "KSOPT_TUNE is 'maybe': it must be 'off', 'model' or 'measure'"
    with pytest.raises(InvalidInputError, match=refusal):
        ks_mm(torch.ones(7, 4), torch.ones(1, 4, 4, 1))


def test_many_threads_may_meet_a_problem_at_once():
    shape = (2, 8, 8, 4)
    weight = torch.randn(shape)
    x = make_x(shape, "batch_first", (40,), torch.float32)
    expected = ks_reference(x, weight)
    start = threading.Barrier(8)
    failures = []

    def work():
        start.wait()
        for _ in range(20):
            try:
                torch.testing.assert_close(ks_mm(x, weight), expected)
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(cpu.chosen()) == 1


def test_weights_that_change_are_noticed():
    shape = (2, 3, 4, 2)
    weight = torch.randn(shape)
    x = make_x(shape, "batch_first", (7,), torch.float32)
    ks_mm(x, weight)
    weight.data.mul_(2)
    torch.testing.assert_close(ks_mm(x, weight), ks_reference(x, weight))


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class PassingFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _autocast_on_gpus():
    """torch.autocast("cuda"), which does nothing where there is no GPU."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def _seen_in(context):
    with torch.no_grad(), context:
        return ops.is_intercepted()


def _seen_in_vmap():
    seen = []
    with torch.no_grad():
        torch.vmap(lambda t: seen.append(ops.is_intercepted()) or t)(torch.ones(2))
    return seen[0]


def _seen_in_a_trace():
    seen = []
    with torch.no_grad():
        torch.jit.trace(lambda t: seen.append(ops.is_intercepted()) or t + 1, torch.ones(2))
    return seen[0]


INTERCEPTING = {
    "a dispatch mode": lambda: _seen_in(Passing()),
    "a function mode": lambda: _seen_in(PassingFunctions()),
    "a default device": lambda: _seen_in(torch.device("cpu")),
    "autocast": lambda: _seen_in(torch.autocast("cpu", dtype=torch.bfloat16)),
    "autocast on GPUs": lambda: _seen_in(_autocast_on_gpus()),
    "forward mode": lambda: _seen_in(torch.autograd.forward_ad.dual_level()),
    "vmap": _seen_in_vmap,
    "a trace": _seen_in_a_trace,
}


@pytest.mark.parametrize("how", INTERCEPTING)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_whatever_intercepts_a_product_is_noticed(how):
    """`ops.multiply` may then not go past the dispatcher."""
    assert INTERCEPTING[how]()
    with torch.no_grad():
        assert not ops.is_intercepted()
    with torch.inference_mode():
        assert not ops.is_intercepted()


@pytest.mark.parametrize("layer", [ops.multiply, functional.ks_linear])
def test_gradients_that_nothing_needs_do_not_slow_a_call(monkeypatch, layer):
    """A frozen layer in front of trained ones takes the path of inference."""
    x, weight = torch.randn(3, 8), torch.nn.Parameter(torch.randn(1, 4, 4, 2))
    taken = []
    for name in ("product", "chain"):
        run = getattr(implementation, name)
        monkeypatch.setattr(
            implementation, name, lambda *a, run=run, **k: taken.append(1) or run(*a, **k)
        )
    frozen = weight.detach()
    weights = frozen if layer is ops.multiply else [frozen]
    assert not layer(x, weights).requires_grad
    assert len(taken) == 1
    weights = weight if layer is ops.multiply else [weight]
    assert layer(x, weights).requires_grad


def test_a_layer_is_traced_as_the_operator():
    """Not as what an eager call takes for short."""
    weights = [torch.randn(1, 4, 2, 2), torch.randn(2, 2, 4, 1)]
    graph = make_fx(lambda x: functional.ks_linear(x, weights))(torch.randn(3, 8))
    assert sum(node.target is ops.ks_mm_inner for node in graph.graph.nodes) == 2


def weight_grad_operands(shape, layout, batch, dtype=torch.float64):
    """The gradient of a product, and its x."""
    a, b, c, d = shape
    return (make_x(s, layout, batch, dtype) for s in ((a, c, b, d), shape))


def weight_grad_reference(grad, x, shape, layout):
    weight = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    y = ks_reference(x.double(), weight, layout)
    return torch.autograd.grad(y, weight, grad.double())[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_weights_gradient_is_traced_as_one_batched_product(shape, layout):
    """Of matrices that a GEMM reads as they are, and which for d = 1 are not copied."""
    a, _, _, d = shape
    last = layout == "batch_last"

    def compute(grad, x):
        return torch.ops.ksopt.ks_mm_weight_grad(grad, x, a, d, last)

    for batch in BATCHES:
        grad, x = weight_grad_operands(shape, layout, batch)
        graph = make_fx(compute, tracing_mode="fake")(grad, x)
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        assert not [node for node in calls if node.target.namespace == "ksopt"]
        (bmm,) = (node for node in calls if node.target is torch.ops.aten.bmm.default)
        assert all(1 in node.meta["val"].stride()[1:] for node in bmm.args)
        copies = {torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default}
        if d == 1:
            assert not any(node.target in copies for node in calls)
        actual = graph(grad, x)
        assert actual.shape == shape
        assert actual.is_contiguous()
        torch.testing.assert_close(actual, weight_grad_reference(grad, x, shape, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_traced_weight_gradient_takes_any_strides(shape, layout):
    grad, x = weight_grad_operands(shape, layout, (4, 6))
    grad = torch.stack((grad, grad), -1)[..., 0]
    x = x.transpose(0, -1).contiguous().transpose(0, -1)
    with Passing():
        actual = ops.ks_mm_weight_grad(grad, x, shape[0], shape[3], layout == "batch_last")
    torch.testing.assert_close(actual, weight_grad_reference(grad, x, shape, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 4, 5, 1)])
def test_a_traced_weight_gradient_is_not_cast_by_autocast(shape, layout):
    grad, x = weight_grad_operands(shape, layout, (7,), torch.float32)
    arguments = (grad, x, shape[0], shape[3], layout == "batch_last")
    with torch.autocast("cpu", torch.bfloat16):
        eager = ops.ks_mm_weight_grad(*arguments)
        with Passing():
            traced = ops.ks_mm_weight_grad(*arguments)
    assert traced.dtype == torch.float32
    torch.testing.assert_close(traced, eager)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 4, 5, 1), (3, 1, 1, 5)])
def test_a_traced_weight_gradient_may_be_changed_where_gradients_are_recorded(shape):
    grad, x = weight_grad_operands(shape, "batch_first", (7,))
    scale = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    with torch.no_grad(), Passing():
        actual = ops.ks_mm_weight_grad(grad, x, shape[0], shape[3], False)
    expected = actual.clone()
    actual.mul_(scale).sum().backward()
    torch.testing.assert_close(scale.grad, expected)
    with Passing():
        actual = ops.ks_mm_weight_grad(grad.requires_grad_(), x, shape[0], shape[3], False)
        actual.mul_(2)
    torch.testing.assert_close(actual, 2 * expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 2, 2), (2, 3, 2, 1)])
def test_gradients_of_a_weights_gradient(shape, layout):
    operands = [t.requires_grad_() for t in weight_grad_operands(shape, layout, (3,))]

    def compute(grad, x):
        return ops.ks_mm_weight_grad(grad, x, shape[0], shape[3], layout == "batch_last")

    for mode in (contextlib.nullcontext(), Passing()):
        with mode:
            assert torch.autograd.gradcheck(compute, operands)
            assert torch.autograd.gradgradcheck(compute, operands)
    assert torch.autograd.gradcheck(compute, operands, check_forward_ad=True)


@pytest.mark.parametrize("how", ["no_grad", "inference_mode"])
def test_past_the_dispatcher_errors_and_results_are_the_operators(how):
    x, weight = torch.randn(3, 8), torch.randn(2, 2, 4, 1)
    with getattr(torch, how)():
        actual, expected = ops.multiply(x, weight), ops.ks_mm(x, weight)
        assert torch.equal(actual, expected)
        assert actual.is_inference() == expected.is_inference()
        with pytest.raises(InvalidInputError) as ours:
            ops.multiply(x[:, 1:], weight)
        with pytest.raises(InvalidInputError) as operators:
            ops.ks_mm(x[:, 1:], weight)
    assert str(ours.value) == str(operators.value)
    meta = ops.multiply(x.to("meta"), weight.to("meta"))
    assert meta.shape == (3, 4)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_transposed_gradient_is_laid_out_once_for_both_products(layout, compiled, monkeypatch):
    last = layout == "batch_last"
    weight = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    x = make_x(weight.shape, layout, (3, 7)).requires_grad_()
    other = torch.randn(30, 7, 3, dtype=torch.float64) if last else torch.randn(3, 30, 7).double()
    steps = []
    run = dispatch.run

    def noting(x, *rest):
        steps.append(x.stride(-1))
        return run(x, *rest)

    def loss(x, weight):
        y = ks_mm(x, weight, layout)
        return (y.transpose(1, 2) * other).sum()

    expected = torch.autograd.grad(
        (ks_reference(x, weight, layout).transpose(1, 2) * other).sum(), (x, weight)
    )
    without_library(monkeypatch)
    monkeypatch.setattr(dispatch, "run", noting)
    called = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    actual = torch.autograd.grad(called(x, weight), (x, weight))
    assert steps == [1, 1]  # forward, and the gradient of x
    for one, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, right)
