"""Weights that a kernel may read before the one ahead of it has ended."""

import contextlib

import pytest
import torch
from played_driver import variable
from played_layer import Factors, FactorsAsStored

import ksopt
from ksopt.kernels import host_plans, weight_scopes

LAYERS = {"a chain": {}, "siblings": {"siblings": 2}}


@pytest.fixture(params=LAYERS)
def device(serving, monkeypatch, request):
    layer = FactorsAsStored(serving, monkeypatch, **LAYERS[request.param])
    for _ in range(2):
        layer.run()
    return layer


@contextlib.contextmanager
def recording(device):
    """A stream whose work becomes part of a graph."""
    stream, capturing = (variable(device.library, name) for name in ("stream", "capturing"))
    stream.value, capturing.value = 5, 1
    try:
        yield
    finally:
        stream.value = capturing.value = 0


def settled(device, known=None):
    """How many of a call's products read settled weights."""
    count = variable(device.library, "settled")
    before = count.value
    y = (known or device.known)()
    assert y is not None
    device.check(y)
    return count.value - before


def test_the_kernel_ahead_of_all_but_the_first_is_the_layers_own(device):
    assert settled(device) == len(device.weights) - 1
    with weight_scopes.repacked():
        assert settled(device) == len(device.weights) - 1


def test_a_graph_of_prepared_weights_writes_none(device):
    with ksopt.prepared_weights(), recording(device):
        assert settled(device) == len(device.weights)
    with recording(device):  # which may contain an optimizer's step
        assert settled(device) == len(device.weights) - 1
    with ksopt.prepared_weights():  # as may what runs before the recording
        assert settled(device) == len(device.weights) - 1
    assert settled(device) == len(device.weights) - 1


@pytest.mark.parametrize("wrap", [torch.Tensor.detach, torch.nn.Parameter])
def test_weights_that_a_graph_computes_are_written_by_it(device, wrap):
    """A parameter, too, as a copy of a weight in another dtype is."""
    _, *around = device.arguments()

    def known(weights, owners):
        return lambda: host_plans.run(device.x, weights, *around, owners)

    with ksopt.prepared_weights(), recording(device):
        for with_owners in (False, True):
            weights = [wrap(one.detach().clone()).requires_grad_(False) for one in device.weights]
            call = known(weights, weights if with_owners else None)
            assert settled(device, call) == len(weights) - 1


def test_a_graph_that_writes_a_weight_writes_it(device):
    first = device.layer.weights[-1]
    with ksopt.prepared_weights(), recording(device), torch.no_grad():
        first.mul_(-2)
        assert settled(device) == len(device.weights) - 1
        assert settled(device) == len(device.weights)  # what wrote it ended before the last call


def test_weights_without_versions_are_as_ever(device):
    with torch.inference_mode():
        device.layer.weights = torch.nn.ParameterList(
            torch.nn.Parameter(one.clone(), requires_grad=False) for one in device.layer.weights
        )
    with ksopt.prepared_weights(), recording(device):
        for _ in range(2):
            assert settled(device) == len(device.weights) - 1


def test_what_a_launch_packs_is_not_settled(serving, monkeypatch):
    layer = Factors(serving, monkeypatch)
    for _ in range(2):
        layer.run()
    assert settled(layer) == len(layer.weights) - 1  # packed by an earlier call
    with weight_scopes.repacked():
        layer.run()
        assert settled(layer) == 0


def test_weights_in_another_order_are_copied_first(device):
    with torch.no_grad():
        for at, weight in enumerate(device.layer.weights):
            turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
            device.layer.weights[at] = torch.nn.Parameter(turned, requires_grad=False)
    with weight_scopes.repacked():
        device.run()
        in_order = len(device.others)
        assert settled(device) == in_order
