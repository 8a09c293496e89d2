"""Whole layers through the host library's table of plans, on a CPU that plays a CUDA device.

The driver's kernels compute: one packs a factor's weight, one multiplies by that alone, and one
multiplies by a chain, whose weights a function of the test packs as a matrix.
"""

import gc
import threading
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from played_driver import CHAIN, MULTIPLY, PACK, chain_of, decide, multiplies_by, variable
from torch import nn

import ksopt
from ksopt import KSLinear, ops
from ksopt.epilogue import with_epilogue
from ksopt.kernels import host_plans, planner, weight_cache, weight_groups, weight_scopes
from ksopt.kernels.autotuner import Choice, Decision
from ksopt.kernels.by_factors import ByFactors
from ksopt.kernels.launcher import HostLauncher, chain_entry
from ksopt.kernels.packing_launcher import PackedLauncher, geometry_of
from ksopt.kernels.problem import Epilogue, Geometry, Problem
from ksopt.kernels.registry import FACTORS, Candidate
from ksopt.patterns.chain import Chain, Pattern
from ksopt.reference import chain_reference, chain_to_dense

TEXT = "(2,4,4,4)*(2,4,4,4)"
PLAIN = Chain.parse(TEXT)
ROWS = 200


class Launched:
    """(x, weights, ...) -> y as a family's launcher of chains: the kernel that the driver plays."""

    FORM = "as a matrix"
    grid = MappingProxyType({"rows_per_unit": 64, "most_blocks": 2, "cluster": 1})

    def __init__(self, problem):
        self.problem, self.packs, self.calls = problem, 0, 0

    def __call__(self, x, weights, bias=None, residual=None, out=None, /):
        self.calls += 1
        weight_groups.prepared_together(weights, self.FORM, self._pack)
        y = chain_reference(x, weights)
        y = with_epilogue(y, bias, self.problem.epilogue.activation, residual)
        return y if out is None else out.copy_(y)

    def _pack(self, weights):
        self.packs += 1
        return chain_to_dense(weights).t().contiguous().view(1, 1, 1, -1)

    def entry(self):
        p = self.problem
        shapes = [one.weight_shape for one in p.chain]
        form = weight_groups.number_of(self.FORM, shapes, p.dtype)
        return chain_entry(
            kernel=CHAIN, out_features=p.out_features, threads=128, shared_bytes=0, form=form,
            **self.grid,
        )  # fmt: skip


class Device:
    """A layer, and its plan on the device that is played."""

    residual = None

    def __init__(self, library, monkeypatch):
        self.library = library
        self.x = torch.randn(ROWS, PLAIN.in_features)
        self.layer = KSLinear(PLAIN.in_features, PLAIN.out_features, PLAIN, activation="relu")
        self.layer.requires_grad_(False)
        spec = SimpleNamespace(spec=lambda _: object(), device_type="cpu")
        monkeypatch.setattr(planner, "backend_of", lambda _: spec)
        monkeypatch.setattr(planner, "_decision", self._decision)
        self.decided = 0
        self._decide_factors()

    def _decide_factors(self):
        """Each factor's product is by a packed weight."""
        (pattern, _) = PLAIN
        multiplies_by(self.library, pattern)
        packing = Problem.of_factor(Pattern(1, pattern.nnz, pattern.nnz, 1), "float32", False)
        factor = Problem.of_factor(pattern, "float32", False)
        launcher = PackedLauncher(
            "doubled",
            HostLauncher(packing, geometry_of(pattern.nnz), PACK, None),
            HostLauncher(factor, Geometry(32, 0, 16, 1, 100), MULTIPLY, None),
            fallback=None,
        )
        decide(self.x, self.weights[0], launcher)

    def _decision(self, problem, operands):
        self.decided += 1
        return self.decision, True

    @property
    def weights(self):
        return list(self.layer.weights)

    def arguments(self):
        return self.weights, self.layer.bias, self.residual, "relu", False, 1

    def known(self, x=None, out=None):
        """y, if it takes no Python beyond the look at what is prepared."""
        return host_plans.run(self.x if x is None else x, *self.arguments(), None, out)

    def check(self, y, x=None):
        x = self.x if x is None else x
        expected = torch.relu(chain_reference(x, self.weights) + self.layer.bias)
        if self.residual is not None:
            expected = expected + self.residual
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)

    def run(self):
        y = ops.chain(self.x, *self.arguments())
        self.check(y)
        return y


class Whole(Device):
    """One launch."""

    def __init__(self, library, monkeypatch):
        super().__init__(library, monkeypatch)
        chain_of(library, PLAIN)
        self.problem = Problem(PLAIN, "float32", False, epilogue=Epilogue(True, "relu"))
        self.call = Launched(self.problem)
        choice = Choice(Candidate("played", self.problem, 1.0), self.call, "model")
        self.decision = Decision(choice, choice)

    @property
    def packs(self):
        return self.call.packs


class Factors(Device):
    """A launch a factor, by packed weights."""

    def __init__(self, library, monkeypatch):
        super().__init__(library, monkeypatch)
        problem = Problem(PLAIN, "float32", False, epilogue=Epilogue(True, "relu"))
        choice = Choice(Candidate(FACTORS, problem, 1.0), ByFactors(problem), "model")
        self.decision = Decision(choice, choice)

    @property
    def packs(self):
        return variable(self.library, "packs").value


@pytest.fixture(params=[Whole, Factors])
def device(played, monkeypatch, request):
    return request.param(played, monkeypatch)


@pytest.fixture
def whole(played, monkeypatch):
    return Whole(played, monkeypatch)


def warm(device):
    for _ in range(2):
        device.run()
    assert device.known() is not None


def test_a_layer_is_packed_once_and_then_known(device):
    assert device.known() is None
    before = device.packs
    warm(device)
    packs = device.packs - before
    decided = device.decided
    launches = variable(device.library, "launches").value
    for _ in range(3):
        device.check(device.known())
        device.run()
    assert device.packs - before == packs == (1 if isinstance(device, Whole) else 2)
    assert device.decided == decided
    each = 1 if isinstance(device, Whole) else 2
    assert variable(device.library, "launches").value == launches + 6 * each
    if isinstance(device, Whole):
        assert device.call.calls == 1


def in_place(device):
    device.layer.weights[1].mul_(-1.5)


def first_in_place(device):
    device.layer.weights[0].add_(1)


def other_data(device):
    device.layer.weights[1].data = torch.randn_like(device.layer.weights[1])


def written_and_refreshed(device):
    device.layer.weights[1].data.add_(1)
    ksopt.refresh()


def another_weight(device):
    values = torch.randn_like(device.layer.weights[1])
    device.layer.weights[1] = nn.Parameter(values, requires_grad=False)
    gc.collect()


def the_same_memory_by_another_name(device):
    """It counts versions of its own, from 0."""
    values = device.layer.weights[1].data.mul_(3)
    device.layer.weights[1] = nn.Parameter(values, requires_grad=False)


def a_training_step(device):
    device.layer.requires_grad_()
    with torch.enable_grad():
        device.layer(device.x).square().mean().backward()
    torch.optim.SGD(device.layer.parameters(), lr=0.1).step()
    device.layer.zero_grad()
    device.layer.requires_grad_(False)


def a_write_behind_a_training_forward(device):
    device.layer.weights[1].requires_grad_()
    with torch.enable_grad():
        device.layer(device.x)
    device.layer.weights[1].data.mul_(2)
    device.layer.weights[1].requires_grad_(False)


def a_state_dict(device):
    other = KSLinear(PLAIN.in_features, PLAIN.out_features, PLAIN, activation="relu")
    device.layer.load_state_dict(other.state_dict())


EVENTS = [
    *(in_place, first_in_place, other_data, written_and_refreshed, another_weight),
    *(the_same_memory_by_another_name, a_training_step, a_write_behind_a_training_forward),
    a_state_dict,
]


@pytest.mark.parametrize("event", EVENTS)
def test_a_weight_that_has_changed_is_packed_anew_and_known_again(device, event):
    warm(device)
    event(device)
    assert device.known() is None
    warm(device)
    device.check(device.known())


def test_any_order_of_changes_and_calls_is_right(device):
    import random

    draw = random.Random(0)
    for _ in range(60):
        draw.choice([*EVENTS, lambda _: None, lambda _: None])(device)
        for _ in range(draw.randrange(4)):
            device.run()


def test_a_weight_in_a_freed_ones_place_is_not_mistaken(device):
    """The same address, shape and version, as an allocator may give them: another storage."""
    weight = device.layer.weights[1]
    shape = weight.shape
    memory = bytearray(4 * weight.numel())

    def at_the_same_address():
        values = torch.frombuffer(memory, dtype=torch.float32).view(shape)
        return values.copy_(torch.randn(values.shape)).detach()

    seen = set()
    weight.data = at_the_same_address()
    for _ in range(4):
        warm(device)
        seen.add((weight.data_ptr(), weight._version))
        weight.data = torch.empty(0)
        gc.collect()
        weight.data = at_the_same_address()
        assert device.known() is None
    assert len(seen) == 1


def test_prepared_weights_are_let_go_with_the_weights(device):
    warm(device)
    device.layer = None
    gc.collect()
    assert weight_cache.kept_bytes(torch.device("cpu")) == 0


def test_another_stream_and_a_graph_are_not_known(device):
    warm(device)
    stream, capturing = (variable(device.library, name) for name in ("stream", "capturing"))
    stream.value = 5  # the notes say 0
    assert device.known() is None
    capturing.value = 1
    assert device.known() is None
    capturing.value = stream.value = 0
    assert device.known() is not None


def test_what_is_known_is_for_such_operands(device, monkeypatch):
    warm(device)
    assert device.known(device.x[:150]) is not None  # of the same range of batches
    assert device.known(device.x[:100]) is None
    assert device.known(device.x.t().contiguous().t()) is None
    assert device.known(device.x[:0]) is None
    odd = torch.randn(ROWS * 32 + 1)[1:].view(ROWS, 32)
    assert device.known(odd) is None  # not aligned
    with weight_scopes.changing():
        assert device.known() is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert device.known() is None
    device.residual = torch.randn(ROWS, PLAIN.out_features)
    assert device.known() is None  # another epilogue
    device.residual = None
    planner.forget()
    assert device.known() is None


def test_rows_and_blocks_of_any_batch(whole):
    for rows in (1, 63, 64, 65, 128, 129, 1000):
        whole.x = torch.randn(rows, PLAIN.in_features)
        warm(whole)
        y = whole.known()
        whole.check(y)
        units = -(-rows // 64)
        assert variable(whole.library, "blocks").value == min(units, 2)


def test_clusters_share_their_rows(whole, monkeypatch):
    clusters = {"rows_per_unit": 16, "most_blocks": 2**31, "cluster": 4}
    monkeypatch.setattr(Launched, "grid", clusters)
    for rows in (1, 16, 17, 1000):
        whole.x = torch.randn(rows, PLAIN.in_features)
        warm(whole)
        whole.check(whole.known())
        assert variable(whole.library, "blocks").value == 4 * -(-rows // 16)


def test_a_result_is_written_where_it_may_be(device):
    warm(device)
    out = torch.full((ROWS, PLAIN.out_features), torch.nan)
    y = device.known(out=out)
    assert y.data_ptr() == out.data_ptr()
    device.check(out)
    assert device.known(out=torch.empty(PLAIN.out_features, ROWS).t()) is None
    assert device.known(out=device.x) is None
    assert device.known(out=out.double()) is None
    wide = torch.empty(ROWS * 32 + 1)
    assert device.known(out=wide[1:].view(ROWS, 32)) is None
    ops.ks_chain_out(device.x, *device.arguments(), out=device.x)


def test_a_bias_or_a_residual_that_the_kernel_cannot_read_is_pythons(whole):
    problem = Problem(PLAIN, "float32", False, epilogue=Epilogue(True, "relu", True))
    whole.call.problem = problem
    whole.residual = torch.randn(ROWS, PLAIN.out_features)
    warm(whole)
    whole.check(whole.known())
    whole.residual = torch.randn(PLAIN.out_features, ROWS).t()
    assert whole.known() is None
    whole.run()
    whole.residual = torch.randn(ROWS, PLAIN.out_features)
    bias = torch.randn(PLAIN.out_features + 1)[1:]
    whole.layer.bias = nn.Parameter(bias, requires_grad=False)
    assert whole.known() is None
    whole.run()


def test_a_compiled_graphs_views_are_known_by_their_owners(device):
    """Inductor gives a new tensor at each call, and the parameter that it is a view of."""
    owners = device.weights
    view = torch._C._dynamo.guards._reinterpret_tensor

    def views():
        return [view(one, one.shape, one.stride(), 0) for one in owners]

    def run():
        arguments = (device.layer.bias, None, "relu", False, 1, owners)
        y = ops.ks_chain_inner(device.x, views(), *arguments)
        device.check(y)

    for _ in range(2):
        run()
    decided, packs = device.decided, device.packs
    launches = variable(device.library, "launches").value
    run()
    assert (device.decided, device.packs) == (decided, packs)
    assert variable(device.library, "launches").value > launches
    known = host_plans.run(device.x, views(), *device.arguments()[1:], owners)
    device.check(known)
    assert host_plans.run(device.x, views(), *device.arguments()[1:]) is None  # whose views?
    owners[1].mul_(2)
    assert host_plans.run(device.x, views(), *device.arguments()[1:], owners) is None
    run()


def test_two_threads_while_a_third_writes(device):
    warm(device)
    kept = [weight.clone() for weight in device.weights]
    wrong, stop = [], threading.Event()

    def multiply():
        x = torch.randn(ROWS, PLAIN.in_features)
        expected = torch.relu(chain_reference(x, kept) + device.layer.bias)
        with torch.no_grad():
            while not stop.is_set():
                y = ops.chain(x, *device.arguments())
                if not torch.allclose(y, expected, rtol=1e-4, atol=1e-4):
                    wrong.append(1)

    # The driver has one set of arguments: a launch by one thread at a time.
    thread = threading.Thread(target=multiply)
    thread.start()
    for _ in range(50):
        ksopt.refresh()
        planner.forget()
    stop.set()
    thread.join()
    assert not wrong
