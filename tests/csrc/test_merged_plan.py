"""Layers by one matrix or factor through the host library, on a CPU that plays a CUDA device."""

import copy

import pytest
import torch
from played_driver import variable
from played_layer import EVENTS, PLAIN, ROWS, ByMatrix, ByProduct, product

from ksopt import ops
from ksopt.epilogue import ACTIVATIONS, GATES, parts_of_result, with_epilogue
from ksopt.kernels import host_plans, weight_scopes
from ksopt.kernels.operands import Operands, problem_of


@pytest.fixture(params=[1, 3, "gate", "factor"])
def device(played, monkeypatch, request):
    if request.param == "factor":
        return ByProduct(played, monkeypatch, residual=True)
    if request.param == "gate":
        return ByMatrix(played, monkeypatch, siblings=2, residual=True, gated=True)
    return ByMatrix(played, monkeypatch, siblings=request.param, residual=request.param > 1)


def warm(device):
    for _ in range(2):
        device.run()
    assert device.known() is not None


def test_the_matrix_is_computed_once_and_then_known(device):
    assert device.known() is None
    warm(device)
    assert device.packs == 1
    decided = device.decided
    device.check(device.known())
    device.run()
    x = torch.randn(2, ROWS // 2, PLAIN.in_features)
    device.residual = (
        None if device.residual is None else device.residual.view(2, -1, device.features)
    )
    device.check(device.known(x), x)
    assert (device.packs, device.decided) == (1, decided)


def test_layers_that_share_their_first_factor_are_known_side_by_side(device):
    warm(device)
    one, other = device.layer, copy.deepcopy(device.layer)
    other.weights[1].mul_(2)
    other.weights[0] = one.weights[0]
    device.layer = other
    warm(device)
    for layer in (one, other, one):
        device.layer = layer
        device.check(device.known())
    assert device.packs == 2


@pytest.mark.parametrize("kind", [ByMatrix, ByProduct])
@pytest.mark.parametrize("event", EVENTS)
def test_a_weight_that_has_changed_makes_another_matrix(played, monkeypatch, event, kind):
    device = kind(played, monkeypatch)
    warm(device)
    event(device)
    assert device.known() is None
    warm(device)
    device.check(device.known())


def test_it_writes_into_memory_that_it_is_handed(device):
    warm(device)
    out = torch.full((ROWS, device.features), torch.nan)
    assert device.known(out=out).data_ptr() == out.data_ptr()
    device.check(out)
    out.fill_(torch.nan)
    ops.ks_chain_out(device.x, *device.arguments(), out=out)
    device.check(out)


def test_weights_that_change_are_not_merged(device):
    with weight_scopes.repacked():
        device.run()
        device.run()
    assert device.packs == 0


def test_a_factor_that_was_packed_for_another_version_is_not_read(played, monkeypatch):
    """Its weight is packed again, also where the product of the factors lies where it lay."""
    device = ByProduct(played, monkeypatch)
    for _ in range(20):
        warm(device)
        packs, launches = (variable(played, name).value for name in ("packs", "launches"))
        device.check(device.known())
        assert variable(played, "launches").value == launches + 1
        device.layer.weights[0].mul_(-1.25)
        device.run()
        assert variable(played, "packs").value > packs


@pytest.mark.sweep
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATES])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_epilogue_and_layout(played, monkeypatch, last, activation, has_bias):
    device = ByMatrix(played, monkeypatch, siblings=2)

    def rows(features):
        return torch.randn((features, 2, 4) if last else (2, 4, features))

    x, residual = rows(PLAIN.in_features), rows(parts_of_result(activation, 2) * PLAIN.out_features)
    bias = device.layer.bias if has_bias else None
    layer = (x, device.weights, bias, residual, activation, last, 2)
    problem = problem_of(Operands(x, tuple(device.weights), bias, residual), activation, last, 2)
    device.decision = ByMatrix.decision_of(problem)
    for _ in range(2):
        ops.chain(*layer)
    y = host_plans.run(*layer)
    plain = x.movedim(0, -1) if last else x
    expected = product(plain, device.weights, 2)
    expected = expected.movedim(-1, 0) if last else expected
    expected = with_epilogue(expected, bias, activation, residual, last)
    size = 1e-4 * max([1.0, *expected.abs().flatten().tolist()])
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=size)


def test_what_is_no_parameter_is_not_merged_and_known_without_python(device):
    warm(device)
    values = [one.detach().clone() for one in device.weights]
    arguments = (values, *device.arguments()[1:])
    for _ in range(3):
        ops.chain(device.x, *arguments)
    decided, packs = device.decided, device.packs
    y = host_plans.run(device.x, *arguments)
    assert y is not None
    ops.chain(device.x, *arguments)
    assert (device.decided, device.packs) == (decided, packs)
