"""Trained layers around an activation: its input is computed again for its slope."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ksopt
from ksopt.epilogue import Activation, with_epilogue
from ksopt.kernels import gradient_autotuner, input_gradients, plan_autotuner, trained_chain
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common import chain_tile, input_grad_tile
from ksopt.kernels.families.input_grad_wgmma16 import InputGradient
from ksopt.kernels.problem import DeviceSpec, Epilogue, Problem
from ksopt.ops.input_gradient import ks_chain_input_grad_activated
from ksopt.ops.trained_chain import ks_chain_keeping
from ksopt.patterns.chain import Chain, Pattern
from ksopt.reference import ks_reference
from tests.gpu.trained_steps import gradients, kernels_of_step

pytestmark = pytest.mark.gpu

# And the factor of what is activated.
CHAINS = (
    ("(1,192,64,2)*(2,64,768,1)", "(1,768,64,2)"),
    ("(1,52,48,2)*(3,32,72,1)", "(1,54,32,4)"),
    ("(1,72,96,1)*(3,32,40,1)", "(1,120,96,1)"),
    ("(1,90,64,4)*(4,64,96,1)", "(1,48,32,8)"),
)
ACTIVATIONS: tuple[Activation, ...] = ("relu", "gelu", "gelu_tanh", "silu")
UNIT = {torch.float16: 2**-11, torch.bfloat16: 2**-8}


@pytest.fixture
def spec() -> DeviceSpec:
    spec = DeviceSpec.of_device(0)
    if spec.capability != (9, 0):
        pytest.skip("the kernels are for compute capability 9.0")
    return spec


def slope_of(h: Tensor, activation: Activation) -> Tensor:
    exact = h.double().requires_grad_()
    (slope,) = torch.autograd.grad(with_epilogue(exact, activation=activation).sum(), exact)
    return slope


@pytest.mark.parametrize(("text", "factor"), CHAINS)
def test_gradients_of_what_is_activated(spec: DeviceSpec, text: str, factor: str) -> None:
    seed = int(time.time())
    print(f"seed {seed}")
    torch.manual_seed(seed)
    draw = random.Random(seed)
    plain_shape = input_grad_tile.Shape(*Chain.parse(text))
    for activation in ACTIVATIONS:
        s = replace(plain_shape, activation=activation, below=Pattern.parse(factor))
        dtype = draw.choice((torch.float16, torch.bfloat16))
        tile = draw.choice(list(input_grad_tile.configs(s, spec)))
        name = str(dtype).removeprefix("torch.")
        kernel = InputGradient(s, tile, name, 0)
        left, right, last = (
            (torch.randn(p.weight_shape, device="cuda") * p.b**-0.5).to(dtype)
            for p in (s.left, s.right, Pattern.parse(factor))
        )
        bias = torch.randn(s.right.in_features, device="cuda").to(dtype)
        for rows in (1, 65, draw.choice((1000, 20_011))):
            grad = torch.randn(rows, s.left.out_features, device="cuda").to(dtype)
            below = (2 * torch.randn(rows, s.features_below, device="cuda")).to(dtype)
            own = draw.choice((None, bias))
            of_h, between = kernel([grad], [left, right, last], below, own)
            h = with_epilogue(ks_reference(below.double(), last.double()), own)
            slope = slope_of(h, activation)
            z = ks_reference(grad.double(), left.double().transpose(1, 2))
            of_activated = ks_reference(z, right.double().transpose(1, 2))
            expected = of_activated * slope
            spread = ks_reference(z.abs(), right.double().abs().transpose(1, 2)) * slope.abs()
            # ReLU's slope jumps where h is 0, within the sums' own error.
            near = (h.abs() < 1e-4) & (activation == "relu")
            allowed = UNIT[dtype] * (expected.abs() + 1.01 * spread) + 1e-5 * (1 + spread)
            allowed += 1e-5 * of_activated.abs()
            wrong = ((of_h.double() - expected).abs() > allowed) & ~near
            assert not wrong.any(), (activation, tile, rows, int(wrong.sum()))
            plain = InputGradient(plain_shape, tile, name, 0)
            assert torch.equal(plain([grad], [left, right])[1], between)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_beside_the_values_between(spec: DeviceSpec, activation: Activation) -> None:
    chain = Chain.parse("(1,768,64,2)*(2,64,192,1)")
    problem = Problem(chain, "bfloat16", False, True, Epilogue(True, activation))
    family = family_of("chain_wgmma16")
    tiles = list(chain_tile.configs(chain_tile.Shape.of(chain), spec, problem.epilogue))
    weights = [(torch.randn(p.weight_shape, device="cuda") * p.c**-0.5).bfloat16() for p in chain]
    bias = torch.randn(chain.out_features, device="cuda").bfloat16()
    for tile in random.Random(0).sample(tiles, 3):
        storing = family.storing_launcher(problem, tile, 0)
        plain = family.storing_launcher(
            Problem(chain, "bfloat16", False, True, Epilogue(True)), tile, 0
        )
        for rows in (1, 200, 8_200):
            x = torch.randn(rows, chain.in_features, device="cuda").bfloat16()
            y, z, _ = storing(x, weights, bias)
            assert torch.equal(z, plain(x, weights, bias)[1])
            h = with_epilogue(ks_reference(z.double(), weights[0].double()), bias)
            truth = with_epilogue(h, activation=activation)
            assert ((y.double() - truth).abs() <= 2**-8 * truth.abs() + 1e-5).all()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ksopt.KSLinear(384, 1536, "(1,768,64,2)*(2,64,192,1)")
        self.down = ksopt.KSLinear(1536, 384, "(1,192,64,2)*(2,64,768,1)")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known, and predicted times decide."""
    monkeypatch.setenv("KSOPT_TUNE", "model")
    plan_autotuner.forget()
    gradient_autotuner.forget()
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.mark.usefixtures("predicted")
def test_a_compiled_step(spec: DeviceSpec) -> None:
    """Its gradients are as exact as those of eager mode, and the kernels are taken."""
    x = torch.randn(25_216, 384, device="cuda").bfloat16()
    names = kernels_of_step(Block().cuda().bfloat16(), x)
    assert "ksopt_chain_wgmma16_bfloat16_768_64_2_2_64_192_gelu_z" in names
    assert "ksopt_input_grad_wgmma16_bfloat16_192_64_2_2_64_768_of_64_2_gelu" in names


@pytest.mark.usefixtures("predicted")
def test_known_launches_need_no_python(spec: DeviceSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    from ksopt.jit import host

    assert host.load() is None
    model = Block().cuda().bfloat16()
    compiled = torch.compile(model, backend="ksopt")
    up, down = ([one.detach().clone() for one in layer.weights] for layer in (model.up, model.down))
    x, grad = (torch.randn(25_216, 384, device="cuda").bfloat16() for _ in range(2))
    below = torch.randn(25_216, 128, device="cuda").bfloat16()

    def results() -> list[Tensor]:
        return [
            *ks_chain_keeping(x, up, None, 1, "gelu"),
            *ks_chain_input_grad_activated([grad], [*down, up[0]], below, None, "gelu"),
            *gradients(compiled, model, x),
        ]

    first = results()
    for module in (trained_chain, input_gradients):

        def of_none(
            *operands: object, run: Callable[..., object] = module.run, **activation: object
        ) -> object:
            assert not activation, "Python was entered"
            return run(*operands)

        monkeypatch.setattr(module, "run", of_none)
    for one, other in zip(results(), first, strict=True):
        assert torch.equal(one, other)
