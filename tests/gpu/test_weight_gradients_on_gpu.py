"""Weight gradients by ksopt's kernel, against float64."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import Tensor

from ksopt import ops
from ksopt.kernels import plan_autotuner, weight_gradients
from ksopt.kernels.families.common.weight_grad import WeightGradient
from ksopt.kernels.problem import DeviceSpec
from ksopt.ops.weight_gradient import weight_grad_decomposed
from ksopt.patterns.chain import Pattern

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def by_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions decide here; in test_gradient_races_on_gpu.py races do."""
    monkeypatch.setenv("KSOPT_TUNE", "model")


@pytest.fixture
def spec() -> DeviceSpec:
    spec = DeviceSpec.of_device(0)
    if spec.capability != (9, 0):
        pytest.skip("the kernels are for compute capability 9.0")
    return spec


def operand(rows: int, features: int, dtype: torch.dtype) -> Tensor:
    """Rows that lie apart, with NaN between them."""
    memory = torch.full((rows, features + 16), float("nan"), dtype=dtype, device="cuda")
    memory[:, 8 : 8 + features] = torch.randn(rows, features, device="cuda")
    return memory[:, 8 : 8 + features]


UNIT = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-24}


def assert_right(dk: Tensor, grad: Tensor, x: Tensor, p: Pattern) -> None:
    truth = weight_grad_decomposed(grad.double(), x.double(), p.a, p.d, False)
    sizes = weight_grad_decomposed(grad.abs().double(), x.abs().double(), p.a, p.d, False)
    unit = UNIT[dk.dtype]
    wrong = ~((dk.double() - truth).abs() <= unit * truth.abs() + 2e-6 * sizes + 1e-6)
    assert not wrong.any(), f"{int(wrong.sum())} of {p.nnz} are wrong"


def assert_sums(of_bias: Tensor, grad: Tensor) -> None:
    truth, sizes = grad.double().sum(0), grad.abs().double().sum(0)
    unit = UNIT[of_bias.dtype]
    assert ((of_bias.double() - truth).abs() <= unit * truth.abs() + 2e-6 * sizes).all()


def test_random_patterns_rows_and_tiles(spec: DeviceSpec) -> None:
    seed = int(time.time())
    print(f"seed {seed}")
    torch.manual_seed(seed)
    draw = random.Random(seed)
    for _ in range(40):
        d = draw.choice((1, 2, 2, 3, 4, 4, 6, 7, 8, 12, 16, 24, 48, 64))
        b, c = (8 * draw.randint(1, 48) // draw.choice((1, d)) or 8 for _ in range(2))
        if b * d % 8 or c * d % 8:
            b, c = 8 * b, 8 * c
        p = Pattern(draw.randint(1, 6), b, c, d)
        if p.nnz * 8 > 2**26:
            continue
        rows = draw.choice((1, 17, 63, 64, 65, 400, 777, 3000, 10_000))
        if rows * (p.in_features + p.out_features) > 2**28:
            continue
        dtype = draw.choice((torch.float16, torch.bfloat16, torch.float32))
        grad, x = operand(rows, p.out_features, dtype), operand(rows, p.in_features, dtype)
        name = str(dtype).removeprefix("torch.")
        launches = weight_gradients.launches(p, name, rows, spec)
        if not launches:  # of many rows in float32
            continue
        launch = draw.choice(launches)
        with_bias = draw.random() < 0.5
        kernel = WeightGradient(p, name, launch, 0, with_bias)
        dk, of_bias = kernel(grad, x)
        assert_right(dk, grad, x, p)
        assert torch.equal(dk, kernel(grad, x)[0]), "not the same at every call"
        assert (of_bias is not None) == with_bias
        if of_bias is not None:
            assert_sums(of_bias, grad)


def test_the_operator_takes_it_and_all_that_it_may_be_called_with(spec: DeviceSpec) -> None:
    p = Pattern(1, 192, 64, 2)
    assert weight_gradients.is_by_kernel(p, torch.bfloat16, 4096, torch.device("cuda"))
    grad, x = (torch.randn(4, 1024, n, device="cuda").bfloat16() for n in (384, 128))
    for one, other in ((grad, x), (grad[..., ::1], x.transpose(0, 1).contiguous().transpose(0, 1))):
        dk = ops.ks_mm_weight_grad(one, other, 1, 2, False)
        assert_right(dk, one.reshape(-1, 384), other.reshape(-1, 128), p)
    odd = torch.randn(4 * 1024 * 384 + 1, device="cuda").bfloat16()[1:].view(4, 1024, 384)
    dk = ops.ks_mm_weight_grad(odd, x, 1, 2, False)
    assert_right(dk, odd.reshape(-1, 384), x.reshape(-1, 128), p)
    assert not ops.ks_mm_weight_grad(grad[:0], x[:0], 1, 2, False).any()


def test_compiled_training_has_its_gradients(spec: DeviceSpec) -> None:
    from ksopt import KSLinear

    torch.manual_seed(0)
    layer = KSLinear(384, 384, "(1,192,64,2)*(2,64,192,1)").cuda().bfloat16()
    x = torch.randn(8192, 384, device="cuda").bfloat16()
    truth = [None]
    for function in (layer, torch.compile(layer, backend="ksopt")):
        layer.zero_grad()
        function(x).square().mean().backward()
        grads = [weight.grad.clone() for weight in layer.parameters()]
        if truth == [None]:
            truth = grads
        for mine, theirs in zip(grads, truth, strict=True):
            assert (mine - theirs).abs().max() <= 0.02 * theirs.abs().max()


@pytest.mark.parametrize("is_known", [False, True])
def test_a_bias_is_summed_beside_it(
    spec: DeviceSpec, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ksopt.jit import host

    assert host.load() is None
    p = Pattern(1, 192, 64, 2)
    inner = torch.ops.ksopt.ks_mm_weight_bias_grad_inner
    grad, x = (torch.randn(4, 1024, n, device="cuda").bfloat16() for n in (384, 128))
    if is_known:
        inner(grad, x, 1, 2)
        with monkeypatch.context() as patched:
            patched.setattr(weight_gradients, "run", None)
            dk, of_bias = inner(grad, x, 1, 2)
    else:
        dk, of_bias = inner(grad[1:], x[1:], 1, 2)
        grad, x = grad[1:], x[1:]
    assert_right(dk, grad.reshape(-1, 384), x.reshape(-1, 128), p)
    assert_sums(of_bias, grad.reshape(-1, 384))
    x = torch.randn(4, 1024, 128, device="cuda").bfloat16()
    odd = torch.randn(4 * 1024 * 384 + 1, device="cuda").bfloat16()[1:].view(4, 1024, 384)
    dk, of_bias = inner(odd, x, 1, 2)
    assert_right(dk, odd.view(-1, 384), x.view(-1, 128), p)
    assert_sums(of_bias, odd.view(-1, 384))


def test_compiled_and_eager_training_sum_the_rows_for_the_bias(
    spec: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one launch per factor is taken."""
    from torch.profiler import ProfilerActivity, profile

    from ksopt import KSLinear
    from ksopt.kernels import chain_gradients

    monkeypatch.setattr(chain_gradients, "by_factors_us", lambda *_: 0.0)
    torch.manual_seed(1)
    layer = KSLinear(384, 384, "(1,192,64,2)*(2,64,192,1)").cuda().bfloat16()
    # So many rows as no other test has: the host library knows the answer from here on.
    x, grad = (torch.randn(8208, 384, device="cuda").bfloat16() for _ in range(2))
    for function in (layer, torch.compile(layer, backend="ksopt")):
        for _ in range(2):
            layer.zero_grad()
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                function(x).backward(grad)
                torch.cuda.synchronize()
        assert_sums(layer.bias.grad, grad)
        names = [event.key for event in profiled.key_averages()]
        assert "ksopt_weight_grad_wgmma16_bfloat16_1_192_64_2_bias" in names


@pytest.mark.parametrize("p", [Pattern(1, 192, 48, 2), Pattern(3, 20, 12, 5)], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 77, 512])
def test_few_rows_by_every_tile(spec: DeviceSpec, p: Pattern, rows: int) -> None:
    torch.manual_seed(rows)
    grad, x = (operand(rows, n, torch.float32) for n in (p.out_features, p.in_features))
    tried = 0
    for launch in weight_gradients.launches(p, "float32", rows, spec):
        dk, of_bias = WeightGradient(p, "float32", launch, 0, with_bias=True)(grad, x)
        assert_right(dk, grad, x, p)
        assert of_bias is not None
        assert_sums(of_bias, grad)
        tried += 1
    assert tried > 8


def test_few_rows_of_eager_training_in_float32_need_no_python(
    spec: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch for each weight, the bias's gradient beside it."""
    from torch.profiler import ProfilerActivity, profile

    from ksopt import KSLinear
    from ksopt.jit import host

    assert host.load() is None
    torch.manual_seed(5)
    layer = KSLinear(384, 384, "(1,192,48,2)*(2,48,192,1)", activation="gelu").cuda()
    twin = KSLinear(384, 384, "(1,192,48,2)*(2,48,192,1)", activation="gelu").cuda().double()
    twin.load_state_dict(layer.state_dict())
    x, grad = (torch.randn(18, 384, device="cuda") for _ in range(2))
    for at in range(2):
        layer.zero_grad()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled, monkeypatch.context() as no:
            if at:
                no.setattr(weight_gradients, "run", None)
            layer(x).backward(grad)
            torch.cuda.synchronize()
    names = [event.key for event in profiled.key_averages()]
    assert "ksopt_weight_grad_fma_float32_1_192_48_2_bias" in names
    assert "ksopt_weight_grad_fma_float32_2_48_192_1" in names
    assert not any("reduce_kernel" in name for name in names)
    twin(x.double()).backward(grad.double())
    for mine, truth in zip(layer.parameters(), twin.parameters(), strict=True):
        assert (mine.grad - truth.grad).abs().max() <= 1e-5 * truth.grad.abs().max()


def test_it_can_be_captured(spec: DeviceSpec) -> None:
    grad, x = (torch.randn(4096, n, device="cuda").bfloat16() for n in (384, 128))
    expected = ops.ks_mm_weight_grad(grad, x, 1, 2, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dk = ops.ks_mm_weight_grad(grad, x, 1, 2, False)
    dk.zero_()
    graph.replay()
    assert torch.equal(dk, expected)


def test_a_known_launch_needs_no_python(spec: DeviceSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    from ksopt import KSLinear
    from ksopt.jit import host

    assert host.load() is None
    grad, x = (torch.randn(8192, n, device="cuda").bfloat16() for n in (384, 128))
    inner = torch.ops.ksopt.ks_mm_weight_grad_inner.default
    expected = inner(grad, x, 1, 2, False)
    layer = KSLinear(384, 384, "(1,192,64,2)*(2,64,192,1)").cuda().bfloat16()
    rows = torch.randn(8192, 384, device="cuda").bfloat16()
    layer(rows).square().mean().backward()
    grads = [weight.grad.clone() for weight in layer.weights]

    def refuse(*args: object) -> None:
        raise AssertionError("Python was entered")

    monkeypatch.setattr(weight_gradients, "run", refuse)
    assert torch.equal(inner(grad, x, 1, 2, False), expected)
    layer.zero_grad()
    layer(rows).square().mean().backward()
    for weight, before in zip(layer.weights, grads, strict=True):
        assert torch.equal(weight.grad, before)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("batch", [(20_000,), (4, 5, 1000), (300,)], ids=str)
def test_a_known_trained_chain_needs_no_python(
    spec: DeviceSpec, monkeypatch: pytest.MonkeyPatch, batch: tuple[int, ...], has_bias: bool
) -> None:
    """It gives what Python's launch gives, whatever the weights are by then."""
    from ksopt.jit import host
    from ksopt.kernels import trained_chain
    from ksopt.ops.trained_chain import ks_chain_keeping
    from ksopt.reference import ks_reference

    assert host.load() is None
    monkeypatch.setenv("KSOPT_TUNE", "model")
    run, runs = trained_chain.run, []

    def seen(*args: object) -> object:
        result = run(*args)
        runs.append(result is not None)
        return result

    monkeypatch.setattr(trained_chain, "run", seen)
    torch.manual_seed(2)
    for dtype in (torch.bfloat16, torch.float16):
        left = torch.empty(1, 192, 64, 2, device="cuda", dtype=dtype)
        # A view whose elements are in another order.
        right = torch.empty(64, 2, 192, 1, device="cuda", dtype=dtype).transpose(0, 1)
        bias = torch.randn(384, device="cuda").to(dtype) if has_bias else None
        whole = torch.randn(*batch, 384, device="cuda").to(dtype)
        apart = torch.randn(*batch, 400, device="cuda").to(dtype)[..., 8:392]
        for x in (whole, apart):
            plan_autotuner.forget()
            runs.clear()
            ks_chain_keeping(x, [left.zero_(), right.zero_()], bias)
            assert runs == [True], "the planner took no kernel"
            for _ in range(3):
                left.normal_(std=0.1)
                right.normal_(std=0.1)
                runs.clear()
                y, between, _ = ks_chain_keeping(x, [left, right], bias)
                assert runs == [], "Python was entered"
                plan_autotuner.forget()
                expected = ks_chain_keeping(x, [left, right], bias)
                assert runs == [True]
                assert torch.equal(y, expected[0])
                assert torch.equal(between, expected[1])
                truth = ks_reference(x.double(), right.double())
                assert (between.double() - truth).abs().max() <= 2**-8 * truth.abs().max()
                full = ks_reference(between.double(), left.double())
                full = full if bias is None else full + bias.double()
                assert (y.double() - full).abs().max() <= 2**-7 * full.abs().max()
        graph = torch.cuda.CUDAGraph()
        runs.clear()
        with torch.cuda.graph(graph):
            y, between, _ = ks_chain_keeping(whole, [left, right], bias)
        right.normal_(std=0.1)
        graph.replay()
        assert runs == []
        plan_autotuner.forget()
        for one, other in zip(
            (y, between), ks_chain_keeping(whole, [left, right], bias)[:2], strict=True
        ):
            assert torch.equal(one, other)


def test_a_trained_chain_keeps_what_is_between_its_factors(spec: DeviceSpec) -> None:
    """In one launch, with every tile that the planner would try first."""
    from ksopt.kernels import registry
    from ksopt.kernels.problem import Epilogue, Problem
    from ksopt.patterns.chain import Chain
    from ksopt.reference import ks_reference

    torch.manual_seed(1)
    for text in ("(1,192,64,2)*(2,64,192,1)", "(1,96,48,4)*(4,48,96,1)", "(1,64,64,1)*(1,64,96,1)",
                 "(1,64,128,8)*(8,128,64,1)", "(1,128,32,16)*(4,128,32,1)"):  # fmt: skip
        problem = Problem(Chain.parse(text), "bfloat16", False, epilogue=Epilogue(bias=True))
        tried = 0
        for rows in (1, 333, 5000):
            for candidate in registry.best_kernels(problem, rows, spec, most=3):
                assert candidate.family is not None
                if not candidate.family.stores_intermediate(problem):
                    continue
                launch = candidate.family.storing_launcher(problem, candidate.tile, 0)
                left, right = (
                    torch.randn(p.weight_shape, device="cuda").bfloat16() / p.c**0.5
                    for p in problem.chain
                )
                bias = torch.randn(problem.out_features, device="cuda").bfloat16()
                x = operand(rows, problem.chain.in_features, torch.bfloat16)
                y, between, _ = launch(x, (left, right), bias)
                truth = ks_reference(x.double(), right.double())
                assert (between.double() - truth).abs().max() <= 2**-8 * truth.abs().max()
                full = ks_reference(between.double(), left.double()) + bias.double()
                assert (y.double() - full).abs().max() <= 2**-7 * full.abs().max()
                tried += 1
        assert tried, text


@pytest.mark.parametrize("rows", [25_216, 4_099])
@pytest.mark.parametrize("text", ["(2,64,192,1)", "(1,192,64,2)", "(4,40,24,3)"])
@pytest.mark.parametrize("batch_last", [False, True])
def test_float32_by_pytorch_in_parts(text: str, rows: int, batch_last: bool) -> None:
    """Divided rows, whose sums are as accurate as PyTorch's."""
    a, b, c, d = sizes = Pattern.parse(text).weight_shape
    torch.manual_seed(rows)
    grad, x = (torch.randn(rows, a * n * d, device="cuda") for n in (b, c))
    factors = [one.view(rows, a, -1, d) for one in (grad, x)]
    truth = torch.einsum("nikj,nilj->iklj", *(one.double() for one in factors))
    theirs = torch.einsum("nikj,nilj->iklj", *factors)
    if batch_last:
        grad, x = grad.T.contiguous(), x.T.contiguous()
    mine = weight_grad_decomposed(grad, x, a, d, batch_last)
    assert mine.shape == sizes
    error, other = ((one.double() - truth).norm() for one in (mine, theirs))
    assert error <= 1.1 * other
