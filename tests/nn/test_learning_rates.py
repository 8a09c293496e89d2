"""`ksopt.param_groups`: which parameter learns how fast."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import ksopt
from ksopt.errors import InvalidInputError
from ksopt.nn import KSLinear, KSStacked

UNEVEN = "(1,32,8,8)*(4,8,32,2)"  # 256 inputs, 256 outputs, fan-ins 8 and 32


def rates(groups):
    """The learning rate of each parameter; each is in one group."""
    actual = {}
    for group in groups:
        for parameter in group["params"]:
            assert parameter not in actual
            actual[parameter] = group["lr"]
    return actual


@pytest.mark.parametrize(("base", "width"), [(None, 256), (64, 64)])
def test_each_factor_by_its_own_fan_in(base, width):
    layer = KSLinear(256, 256, UNEVEN)
    model = nn.Sequential(nn.Embedding(10, 256), layer, nn.LayerNorm(256), nn.Linear(256, 4))
    actual = rates(ksopt.param_groups(model, lr=0.01, base=base))
    assert set(actual) == set(model.parameters())
    for weight, fan_in in zip(layer.weights, (8, 32), strict=True):
        assert actual.pop(weight) == pytest.approx(0.01 * width / (fan_in * 2))
    assert set(actual.values()) == {0.01}


@pytest.mark.parametrize("chain", ["(1,4,8,1)", "(1,4,4,1)*(1,4,8,1)*(2,4,4,1)"])
def test_one_dense_factor_keeps_lr_and_three_share_it(chain):
    layer = KSLinear(8, 4, chain)
    actual = rates(ksopt.param_groups(layer, 1.0))
    expected = [8 / (p.c * len(layer.chain)) for p in layer.chain]
    assert [actual[w] for w in layer.weights] == pytest.approx(expected)
    assert len(layer.chain) == 3 or actual[layer.weights[0]] == 1.0


def test_parts_of_a_stacked_layer_and_groups_of_equal_rates():
    q, k, v = (KSLinear(16, 16, "(1,4,4,4)*(4,4,4,1)") for _ in range(3))
    model = nn.ModuleDict({"qkv": KSStacked([q, k, v])})
    groups = ksopt.param_groups(model, 1.0)
    assert [(len(group["params"]), group["lr"]) for group in groups] == [(3, 1.0), (6, 2.0)]


def test_a_tied_factor_is_in_one_group_with_the_smaller_rate_whatever_the_order():
    long, short = KSLinear(32, 16, "(1,4,4,4)*(4,4,8,1)"), KSLinear(16, 16, "(1,4,4,4)*(4,4,4,1)")
    short.weights[0] = long.weights[0]
    for model in (nn.Sequential(long, short), nn.ModuleList([short, long])):
        assert rates(ksopt.param_groups(model, 1.0))[long.weights[0]] == 16 / 8


def test_frozen_parameters_are_left_out():
    layer = KSLinear(16, 16, "(1,4,4,4)*(4,4,4,1)")
    layer.weights[0].requires_grad_(False)
    assert set(rates(ksopt.param_groups(layer, 1.0))) == {layer.weights[1], layer.bias}
    assert ksopt.param_groups(layer.requires_grad_(False), 1.0) == []


def test_parametrized_factors_keep_lr():
    layer = KSLinear(16, 16, "(1,4,4,4)*(4,4,4,1)", bias=False)
    parametrize.register_parametrization(layer.weights, "0", nn.Identity())
    actual = rates(ksopt.param_groups(layer, 1.0))
    assert actual == {layer.weights.parametrizations["0"].original: 1.0, layer.weights[1]: 2.0}


@pytest.mark.parametrize("width", [256, 1024])
def test_a_step_of_adam_moves_outputs_as_it_does_a_dense_layers(width):
    """The first step is lr times the gradient's sign: outputs move by as much at any width.

    With one learning rate for all they move less, the less the wider the layer.
    """
    side = int(width**0.5)
    moves = {}
    chain = f"(1,{side},{side},{side})*({side},{side},{side},1)"
    for name, layer, grouped in (
        ("dense", nn.Linear(width, width, bias=False), False),
        ("factors", KSLinear(width, width, chain, bias=False), True),
        ("one lr", KSLinear(width, width, chain, bias=False), False),
    ):
        torch.manual_seed(0)
        layer.reset_parameters()
        x, goal = torch.randn(1, width), torch.randn(1, width)
        groups = ksopt.param_groups(layer, 1e-5) if grouped else layer.parameters()
        optimizer = torch.optim.Adam(groups, lr=1e-5, eps=1e-30)
        before = layer(x)
        (before * goal).mean().backward()
        optimizer.step()
        moves[name] = (layer(x) - before).abs().mean().item()
    assert 0.4 < moves["factors"] / moves["dense"] < 1.5
    assert moves["one lr"] / moves["factors"] == pytest.approx(2 / side, rel=0.01)


def test_a_scheduler_keeps_the_ratios():
    layer = KSLinear(16, 16, "(1,4,4,4)*(4,4,4,1)")
    optimizer = torch.optim.AdamW(ksopt.param_groups(layer, 0.1))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    layer(torch.randn(2, 16)).sum().backward()
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((-1.0,), "lr -1.0"), ((float("nan"),), "lr nan"), ((1.0, 0), "base 0")],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        ksopt.param_groups(nn.Linear(2, 2), *arguments)
