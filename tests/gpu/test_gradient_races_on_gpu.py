"""Races between the kernels of gradients and PyTorch, and what later calls and processes take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ksopt
from ksopt.jit import host
from ksopt.kernels import chain_gradients, gradient_autotuner, input_gradients, tuning_cache
from ksopt.kernels import weight_gradients as weights
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.families.common.input_grad_tile import Shape
from ksopt.kernels.gradient_record import GradientRecord
from ksopt.kernels.problem import DeviceSpec
from ksopt.ops import input_gradient, ks_mm_weight_grad
from ksopt.ops.chain_gradients import ks_chain_weight_grads
from ksopt.ops.input_gradient import ks_chain_input_grad
from ksopt.ops.weight_gradient import weight_grad_decomposed
from ksopt.patterns.chain import Chain, Pattern

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
LAYER = "(1,192,64,2)*(2,64,192,1)"


@pytest.fixture(autouse=True)
def measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    if DeviceSpec.of_device(0).capability != (9, 0):
        pytest.skip("the kernels are for compute capability 9.0")
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KSOPT_TUNE", "measure")
    assert host.load() is None
    gradient_autotuner.forget()
    yield
    gradient_autotuner.forget()


def records() -> list[GradientRecord]:
    return tuning_cache.load_all(backend_of("cuda").fingerprint(CUDA), GradientRecord)


def drawn(*sizes: int) -> Tensor:
    return torch.randn(*sizes, device="cuda").bfloat16()


def assert_near(result: Tensor, truth: Tensor) -> None:
    assert float((result.double() - truth).norm() / truth.norm()) < 4e-3


@pytest.mark.parametrize("pattern", [(1, 192, 64, 2), (4, 64, 64, 16), (1, 1, 1, 384)], ids=str)
def test_a_weights_gradient_is_raced_once(
    pattern: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, rows = Pattern(*pattern), 5000
    grad, x = drawn(rows, p.out_features), drawn(rows, p.in_features)
    truth = weight_grad_decomposed(grad.double(), x.double(), p.a, p.d, False)
    before = torch.cuda.get_rng_state()
    first = ks_mm_weight_grad(grad, x, p.a, p.d, False)
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert_near(first, truth)
    known = records()
    assert len(known) <= 1
    if known:
        (record,) = known
        least = min(one.median_us for one in record.timed)
        assert record.choice.median_us <= 1.06 * least + 0.3
    monkeypatch.setattr(gradient_autotuner, "race", None)  # later calls, and another process
    assert_near(
        ks_mm_weight_grad(grad[:4500], x[:4500], p.a, p.d, False),
        weight_grad_decomposed(grad[:4500].double(), x[:4500].double(), p.a, p.d, False),
    )
    gradient_autotuner.forget()
    again = ks_mm_weight_grad(grad, x, p.a, p.d, False)
    assert torch.equal(first, again)
    is_kernel = bool(known) and known[0].choice.config is not None
    assert weights.is_by_kernel(p, torch.bfloat16, rows, CUDA) == is_kernel


@pytest.mark.parametrize("siblings", [1, 3])
@pytest.mark.parametrize("rows", [64, 8192])
def test_those_of_chains_are_raced(rows: int, siblings: int) -> None:
    left, right = Chain.parse(LAYER)
    widths = (left.out_features, left.in_features, right.out_features)
    inputs = [[drawn(rows, n) for _ in range(siblings)] for n in widths]
    x = drawn(rows, right.in_features)
    results = ks_chain_weight_grads(*inputs, x, 1, 2, 2, 1, True)
    for at, its in enumerate(zip(*inputs, strict=True)):
        grad, between, grad_between = (one.double() for one in its)
        assert_near(results[2 * at], weight_grad_decomposed(grad, between, 1, 2, False))
        exact = weight_grad_decomposed(grad_between, x.double(), 2, 1, False)
        assert_near(results[2 * at + 1], exact)
        assert_near(results[2 * siblings + at], grad.sum(0))
    (record,) = (
        one
        for one in records()
        if (one.key.problem.gradient, one.key.problem.siblings) == ("chain_weights", siblings)
    )
    is_one = record.choice.config is not None
    call = ((left, right), torch.bfloat16, rows, CUDA, True, siblings)
    assert chain_gradients.is_by_kernel(*call) == is_one
    again = ks_chain_weight_grads(*inputs, x, 1, 2, 2, 1, True)
    assert all(torch.equal(one, other) for one, other in zip(results, again, strict=True))


@pytest.mark.parametrize("siblings", [1, 3])
def test_that_of_what_chains_read_is_raced(siblings: int) -> None:
    s, rows = Shape(*Chain.parse(LAYER), siblings), 8192
    factors = [drawn(*p.weight_shape) for p in (s.left, s.right) * siblings]
    grads = [drawn(rows, s.left.out_features) for _ in range(siblings)]
    wide = [one.double() for one in (*grads, *factors)]
    of_x, of_between = input_gradient._by_pytorch(wide[:siblings], wide[siblings:])
    for _ in range(2):
        to, between = ks_chain_input_grad(grads, factors)
        assert_near(between, of_between)
        assert_near(to, of_x)
    (record,) = (
        one
        for one in records()
        if one.key.problem.gradient == "chain_input" and one.key.problem.siblings == siblings
    )
    assert record.choice.config in (None, {})
    is_kernel = record.choice.config is not None
    assert input_gradients.is_by_kernel(s, torch.bfloat16, rows, CUDA) == is_kernel


@pytest.mark.parametrize("is_compiled", [False, True])
def test_training_has_the_right_gradients_while_they_race(is_compiled: bool) -> None:
    """Even of a first step whose gradients overflow."""
    torch.manual_seed(0)
    layer = ksopt.KSLinear(384, 384, LAYER).cuda().half()
    function = torch.compile(layer, backend="ksopt") if is_compiled else layer
    x = torch.randn(4096, 384, device="cuda").half()
    for scale in (1e9, 1.0, 1.0):
        layer.zero_grad()
        function(x).float().square().sum().mul(scale * 1e-4).backward()
    twin = ksopt.KSLinear(384, 384, LAYER).cuda().double()
    twin.load_state_dict(layer.state_dict())
    twin(x.double()).square().sum().mul(1e-4).backward()
    for mine, theirs in zip(layer.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert_near(mine.grad, theirs.grad)
    assert records()
