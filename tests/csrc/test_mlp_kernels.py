"""Two layers in one launch by the host library's own kernels, as compiled graphs call them.

The driver is played: its kernel multiplies by one matrix, which is what both chains are packed as.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from played_driver import CHAIN, PACK_CHAIN, chain_of, variable
from played_layer import PLAIN, ROWS, Factors
from seen_products import Python

import ksopt
from ksopt import ops
from ksopt.epilogue import with_epilogue
from ksopt.errors import InvalidInputError
from ksopt.kernels import mlp_plans, plan_autotuner, weight_groups, weight_scopes
from ksopt.kernels.autotuner import Choice, Decision
from ksopt.kernels.by_layers import ByLayers
from ksopt.kernels.candidate import LAYERS, Candidate
from ksopt.kernels.launcher import chain_entry
from ksopt.kernels.problem import Epilogue, Problem, SecondLayer
from ksopt.patterns.chain import Chain
from ksopt.reference import chain_reference, chain_to_dense

view = torch._C._dynamo.guards._reinterpret_tensor  # what Inductor calls


class Seen(ctypes.Structure):
    """How the driver's chain was launched last."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weights", "bias", "residual", "y")),
        *((name, ctypes.c_long) for name in ("batch", "x_stride", "y_stride", "residual_stride")),
        ("rows_per_block", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("z", "hidden_bias")),
    ]


class Launched:
    """(x, weights, ...) -> y as a family's launcher of two layers."""

    FORM = "both as a matrix"

    def __init__(self, problem):
        self.problem, self.packs, self.calls = problem, 0, 0

    def __call__(self, x, weights, hidden_bias=None, bias=None, residual=None, out=None, /):
        self.calls += 1
        weight_groups.prepared_together(weights, self.FORM, self._pack)
        hidden = with_epilogue(chain_reference(x, weights[:2]), hidden_bias)
        y = with_epilogue(chain_reference(hidden, weights[2:]), bias, "relu", residual)
        return y if out is None else out.copy_(y)

    def _pack(self, weights):
        self.packs += 1
        return chain_to_dense([*weights[2:], *weights[:2]]).t().contiguous().view(1, 1, 1, -1)

    def entry(self):
        p = self.problem
        shapes = [one.weight_shape for chain in p.chains for one in chain]
        form = weight_groups.number_of(self.FORM, shapes, p.dtype)
        return chain_entry(
            kernel=CHAIN, out_features=p.out_features, threads=128, shared_bytes=0,
            rows_per_unit=64, most_blocks=2, cluster=1, form=form, pack=PACK_CHAIN, pack_blocks=1,
            pack_threads=32, packed_elements=p.chain.in_features * p.out_features,
        )  # fmt: skip


class Device:
    """Two layers, their launch chosen; ``whole`` says whether it is one."""

    def __init__(self, library, monkeypatch, whole=True, hidden_bias=False):
        self.layers = Factors(library, monkeypatch)  # whose factors are decided
        self.library, self.decided = library, 0
        self.weights = [torch.randn(p.weight_shape) / 2 for _ in range(2) for p in PLAIN]
        self.x, self.residual = (torch.randn(ROWS, PLAIN.in_features) for _ in range(2))
        self.bias = torch.randn(PLAIN.out_features)
        self.hidden_bias = torch.zeros(PLAIN.out_features) if hidden_bias else None
        second = SecondLayer(PLAIN, Epilogue(True, "relu", True))
        self.problem = Problem(
            *(PLAIN, "float32", False), epilogue=Epilogue(hidden_bias), second=second
        )
        chain_of(library, Chain((*PLAIN, *PLAIN)), in_sequence=True)
        self.call = Launched(self.problem)
        name, call = ("played", self.call) if whole else (LAYERS, ByLayers(self.problem))
        choice = Choice(Candidate(name, self.problem, 1.0), call, "model")
        self.decision = Decision(choice, choice)
        by_factors = self.layers.decision

        def decide(problem, operands):
            if problem.second is None:
                return by_factors, True
            self.decided += 1
            return self.decision, True

        monkeypatch.setattr(plan_autotuner, "_decision", decide)

    def arguments(self):
        around = (self.hidden_bias, self.bias, self.residual, "none", "relu")
        return self.weights[:2], self.weights[2:], *around

    def __call__(self, writes=False, out=None, **changes):
        """y, and whether it took Python."""
        changes.setdefault("owners", list(self.weights))
        with Python() as python:
            if writes or out is not None:
                out = torch.full_like(self.x, torch.nan) if out is None else out
                assert ops.ks_mlp_out(self.x, *self.arguments(), **changes, out=out) is None
                y = out
            else:
                y = ops.ks_mlp_inner(self.x, *self.arguments(), **changes)
        return y, bool(python.entered)

    def run(self, **arguments):
        """Checks y; whether it took Python."""
        y, takes_python = self(**arguments)
        hidden = chain_reference(self.x, self.weights[:2])
        expected = with_epilogue(
            chain_reference(hidden, self.weights[2:]), self.bias, "relu", self.residual
        )
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        return takes_python

    def warm(self, **arguments):
        for _ in range(2):
            self.run(**arguments)
        assert not self.run(**arguments)

    def seen(self):
        return Seen.in_dll(self.library.driver, "chain")


@pytest.fixture(params=[False, True], ids=["ks_mlp_inner", "ks_mlp.out"])
def writes(request):
    return request.param


@pytest.fixture
def device(serving, monkeypatch):
    return Device(serving, monkeypatch)


def test_what_is_known_takes_no_python(device, writes):
    assert device.run(writes=writes)
    device.warm(writes=writes)
    decided, packs = device.decided, device.call.packs
    launches = variable(device.library, "launches")
    before = launches.value
    for rows in (ROWS, 150):  # of the same range of batches
        device.x, device.residual = (torch.randn(rows, PLAIN.in_features) for _ in range(2))
        assert not device.run(writes=writes)
    assert (device.decided, device.call.packs) == (decided, packs)
    assert launches.value == before + 2


@pytest.mark.parametrize("which", range(4))
def test_a_change_of_any_weight_is_noticed(device, which):
    device.warm()
    device.weights[which].mul_(-2)
    assert device.run()
    device.warm()
    device.weights[which].data.add_(1)
    ksopt.refresh()
    assert device.run()


def test_each_operand_is_where_the_kernel_looks(serving, monkeypatch):
    device = Device(serving, monkeypatch, hidden_bias=True)
    device.warm()
    y, _ = device()
    seen = device.seen()
    tensors = (device.x, device.bias, device.residual, device.hidden_bias, y)
    places = (seen.x, seen.bias, seen.residual, seen.hidden_bias, seen.y)
    assert places == tuple(tensor.data_ptr() for tensor in tensors)
    assert (seen.batch, seen.x_stride, seen.y_stride) == (ROWS, 32, 32)
    odd = torch.zeros(PLAIN.out_features + 1)
    device.hidden_bias = odd[1:]  # not at a multiple of 16 bytes
    assert device.run()


def test_a_layer_s_launch_has_no_bias_ahead(serving, monkeypatch):
    device = Device(serving, monkeypatch)
    device.warm()
    device()
    assert device.seen().hidden_bias is None


def test_another_cut_of_the_weights_and_other_activations_are_others(device):
    device.warm()
    (first, second), (third, last), *around = device.arguments()
    before = device.decided
    owners = list(device.weights)
    cut = ([first], [second, third, last])
    ops.ks_mlp_inner(device.x, *cut, *around, owners)
    assert device.decided == before + 1
    with Python() as python:
        around[3:] = ["relu", "none"]
        ops.ks_mlp_inner(device.x, [first, second], [third, last], *around, owners)
    assert python.entered
    device.bias = device.bias.double()
    with pytest.raises(InvalidInputError, match="bias is float64"):
        device()


def test_views_are_known_by_their_owners(device):
    device.warm()
    owners = device.weights
    device.weights = [view(one, one.shape, one.stride(), 0) for one in owners]
    assert not device.run(owners=owners)
    packs = variable(device.library, "packs")
    before = packs.value
    assert not device.run(owners=None)  # nothing is cached of what a graph computes
    assert packs.value == before + 1


def test_weights_that_change_are_packed_at_each_call(device, writes):
    device.warm(writes=writes)
    packs = variable(device.library, "packs")
    with weight_scopes.repacked():
        device.run(writes=writes)  # this thread's state is set
        before, packed_by_python = packs.value, device.call.packs
        for factor in (3, -0.5):
            device.weights[0].data.mul_(factor)
            device.weights[3].data.add_(factor)
            assert not device.run(writes=writes)
    assert (packs.value, device.call.packs) == (before + 2, packed_by_python)


def test_deterministic_algorithms_are_pythons(device, deterministic):
    device.warm()
    with deterministic():
        assert device.run()
    device.warm()


def test_what_is_not_written_straight_is_copied(device):
    device.warm(writes=True)
    other = torch.empty(PLAIN.out_features, ROWS).t()
    assert device.run(out=other)
    before = device.x.clone()
    residual, device.residual = device.residual, before
    device.warm()
    y, _ = device(out=device.residual)
    device.residual = residual
    assert y.data_ptr() == before.data_ptr()
    with pytest.raises(InvalidInputError, match="out has shape"):
        device(out=torch.empty(3))
    device.x.requires_grad_()
    with torch.enable_grad(), pytest.raises(InvalidInputError, match="no gradient is recorded"):
        device(writes=True)


def test_layers_by_a_plan_each_are_pythons_and_right(serving, monkeypatch):
    device = Device(serving, monkeypatch, whole=False)
    for _ in range(3):
        assert device.run()


def test_forgotten_plans_are_not_taken(device):
    device.warm()
    plan_autotuner.forget()
    before = device.decided
    assert device.run()
    assert device.decided == before + 1


def test_the_plan_of_operands_that_do_not_fit_is_not_stored(device):
    device.warm()
    operands = SimpleNamespace(x=device.x, weights=tuple(device.weights[:3]))
    operands.hidden_bias = operands.bias = operands.residual = None
    host = mlp_plans.host_plans
    host.register_mlp(operands, 2, "none", "none", device.decision)
    device.warm()
