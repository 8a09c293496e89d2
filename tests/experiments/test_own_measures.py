"""How the experiments time and judge: by ksopt.measure, and with kernels played on the CPU."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import chain_kernels
import chain_weight_gradients
import compare_kernels
import host_time
import input_gradients
import layer_time
import profile_products
import projection_time
from ksopt.kernels.families.common import chain_grads_tile
from ksopt.kernels.families.common.chain_grads_tile import Config, Tile
from ksopt.kernels.families.common.chain_tile import Shape as ChainShape
from ksopt.kernels.families.common.input_grad_tile import Shape
from ksopt.kernels.families.gradient_base import KINDS, gradient_families
from ksopt.kernels.problem import DeviceSpec
from ksopt.ops.weight_gradient import weight_grad_decomposed
from ksopt.patterns.chain import Chain

LEFT, RIGHT = Chain.parse("(1,16,8,2)*(2,8,16,1)")
ROWS = 5
Spoil = Callable[[Tensor], object]


def right(_: Tensor) -> None:
    """Leave a result as it is."""


def coarse(y: Tensor) -> None:
    """Round a result to four bits fewer than its type has."""
    y.copy_(y.to(torch.float8_e4m3fn))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def test_calls_take_turns_and_have_medians() -> None:
    x = torch.randn(64, 64)
    assert all(us > 0 for us in layer_time.medians_us([lambda: x @ x, lambda: x + x], "cpu"))


def test_calls_one_after_another() -> None:
    x = torch.randn(64, 64)
    times = profile_products.samples_us(lambda: x @ x, 0.01, "cpu")
    assert len(times) > 2
    assert min(times) > 0


def test_a_layer_is_called_by_the_kernels_that_are_named() -> None:
    chain = Chain.monarch(16, 16, p=4)
    call, chosen = profile_products.layer(chain, torch.randn(3, 16), False)
    result = call()
    assert isinstance(result, Tensor)
    assert result.shape == (3, 16)
    assert not result.requires_grad
    assert chosen()


def test_eager_steps_are_profiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_time, "ROUNDS", 1)
    monkeypatch.setattr(host_time, "CALLS", 2)
    monkeypatch.setattr(host_time, "PROFILED", 2)
    monkeypatch.setattr(host_time, "MOST_OPERATORS", 1000)  # all, whatever their times
    monkeypatch.setattr(host_time, "LAYERS", host_time.LAYERS[:1])
    host_time.print_steps("cpu")
    text = capsys.readouterr().out
    assert "KSLinear, eager, forward and backward: " in text
    assert "nn.Linear, eager, forward and backward: " in text
    assert " us,  1.0 times per step: aten::gelu_backward" in text


def test_a_projection_is_timed_several_times() -> None:
    seconds, projection = projection_time.timed(torch.randn(4, 4), Chain.monarch(4, 4, p=2))
    assert len(seconds) == projection_time.RUNS
    assert min(seconds) > 0
    assert projection.relative_error < 1


@pytest.mark.parametrize(("spoil", "fault"), [(right, None), (coarse, "relative error")])
def test_gradients_of_inputs_are_judged(spoil: Spoil, fault: str | None) -> None:
    weights = [randn(*p.weight_shape) for p in (LEFT, RIGHT)]
    o = input_gradients.Operands([randn(ROWS, LEFT.out_features)], weights)

    def launch(grads: list[Tensor], packed: object, between: Tensor, to: Tensor) -> None:
        for result, y in zip((to, between), o.by_einsum(torch.bfloat16), strict=True):
            result.copy_(y)
        spoil(to)

    kernel = SimpleNamespace(shape=Shape(LEFT, RIGHT), pack=lambda _: None, launch=launch)
    text = input_gradients.fault_of(kernel, o)
    assert text is None if fault is None else fault in text


@pytest.mark.parametrize(("spoil", "fault"), [(right, None), (coarse, "relative error")])
def test_chains_are_judged(spoil: Spoil, fault: str | None) -> None:
    s, e = ChainShape(LEFT, RIGHT), chain_kernels.GELU
    weights = [[randn(*p.weight_shape)] for p in (LEFT, RIGHT)]
    residual = randn(ROWS, LEFT.out_features)
    o = chain_kernels.Operands(
        randn(ROWS, RIGHT.in_features), *weights, randn(LEFT.out_features), residual
    )

    def launcher(x: Tensor, packed: object, bias: object, residual: object, out: Tensor) -> Tensor:
        out.copy_(chain_kernels.by_pytorch(o, s, e))
        spoil(out)
        return out

    launcher.epilogue = e
    text = chain_kernels.fault_of(launcher, s, o, None)
    assert text is None if fault is None else fault in text


@pytest.mark.parametrize(("spoil", "is_right"), [(right, True), (coarse, False)])
def test_gradients_of_weights_are_judged(spoil: Spoil, is_right: bool) -> None:
    launch = chain_grads_tile.launch_of(Config(1, 1, Tile(1, 1), Tile(1, 1)), ROWS, (1, 1), 1)

    def write(inputs: list[Tensor], results: list[Tensor], shares: object) -> None:
        grad, between, grad_between, x = inputs
        left = weight_grad_decomposed(grad, between, LEFT.a, LEFT.d, False)
        of_right = weight_grad_decomposed(grad_between, x, RIGHT.a, RIGHT.d, False)
        for result, y in zip(results, (left, of_right, grad.sum(0)), strict=True):
            result.copy_(y)
        spoil(results[0])

    kernel = SimpleNamespace(chain=(LEFT, RIGHT), launch=launch, write=write)
    features = (LEFT.out_features, LEFT.in_features, RIGHT.out_features, RIGHT.in_features)
    inputs = [randn(ROWS, one) for one in features]
    if is_right:
        assert chain_weight_gradients.check(kernel, inputs) > 0
    else:
        with pytest.raises(AssertionError):
            chain_weight_gradients.check(kernel, inputs)


def test_the_machine_code_of_every_family_of_gradients_is_compared() -> None:
    device = DeviceSpec((9, 0), 132, 228 * 1024)
    names = {case.split()[-1] for case, _ in compare_kernels.gradient_launchers(device)}
    assert names == {family.name for kind in KINDS for family in gradient_families(kind)}
